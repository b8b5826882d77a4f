"""Multi-token prediction of onepass.gpt beside its definition, in fp64."""

import pytest
import torch
import torch.nn.functional as F
from gpt.test_model import GPT2, SHAPE, given, started
from ops.calls import relative

from onepass.gpt import Config, Model, save_huggingface
from onepass.parallel import MainGrads

MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
REPEATED = {"mtp_use_repeated_layer": True}


def norm_of(module, x):
    if hasattr(module, "bias"):
        return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)
    return F.rms_norm(x, x.shape[-1:], module.weight, module.eps)


def by_definition(model, tokens, labels, mask=None):
    """Return the model's own mean loss and each depth's, row by row and token by token."""
    kept, losses = {}, []
    hook = model.final_layernorm.register_forward_hook(lambda module, given, found: kept.update(h=found))
    own = model.eval()(tokens, labels, loss_mask=mask)
    hook.remove()
    model.train()
    h, length = kept["h"], tokens.shape[1]
    h = h[0] if isinstance(h, tuple) else h
    words, places = model.embedding.word_embeddings.weight, model.embedding.position_embeddings
    tables = None if model.rotary is None else model.rotary(length, None)
    layers = [*model.mtp.values()] * (model.config.mtp_num_layers // len(model.mtp))
    for depth, layer in enumerate(layers, 1):
        embedded = torch.zeros_like(h)
        for i in range(length):
            later = i + depth < length
            embedded[:, i] = words[tokens[:, i + depth] if later else torch.zeros_like(tokens[:, 0])]
            if places is not None:
                embedded[:, i] += places.weight[i + depth if later else 0]
        x = torch.cat((norm_of(layer.enorm, embedded), norm_of(layer.hnorm, h)), -1) @ layer.eh_proj.weight.t()
        y, pending, _ = layer.transformer_layer(x, None, tables)
        h = norm_of(layer.final_layernorm, y if pending is None else y + pending)
        logits, total, weights = h @ words.t(), 0.0, 0.0
        for row in range(len(tokens)):
            for i in range(length - depth):
                if labels[row, i + depth] != -100:
                    weight = 1.0 if mask is None else mask[row, i + depth].double()
                    total = total - weight * logits[row, i].log_softmax(-1)[labels[row, i + depth]]
                    weights = weights + weight
        losses.append(total / weights if weights else 0.0)
    return own, losses


def assert_gradients(loss, model, expected, bound=1e-11):
    """The loss's gradients are those of the expected one."""
    found = torch.autograd.grad(loss, list(model.parameters()))
    wanted = torch.autograd.grad(expected, list(model.parameters()), retain_graph=True)
    for (name, _), one, other in zip(model.named_parameters(), found, wanted, strict=True):
        assert (one - other).norm() <= bound * other.norm() + 1e-16, name


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("base", ({}, GPT2, REPEATED), ids=("llama", "gpt-2", "one layer"))
def test_by_definition(base, masked):
    tokens, labels, mask = given()
    mask = mask.double() if masked else None
    model = started(Config(**SHAPE, **base, **MTP))
    own, depths = by_definition(model, tokens, labels, mask)
    expected = own + 0.7 / 2 * sum(depths)
    kept = (labels != -100).double() * (1.0 if mask is None else mask)
    for reduction, times in (("mean", 1.0), ("sum", kept.sum()), ("none", kept.sum())):
        loss = model(tokens, labels, loss_mask=mask, reduction=reduction).sum()
        assert relative(loss.detach(), (own * times).detach()) < 1e-12
        assert_gradients(loss, model, expected * times, 1e-11 if reduction != "none" else 1e-7)  # factors of tokens are fp32


@pytest.mark.parametrize(("repeated", "part"), ((False, 1.0), (True, 0.5)))
def test_auxiliary_losses_of_depths(repeated, part):
    """They have gradients and no value, and a layer has one, however many depths it is."""
    tokens, labels, _ = given()
    experts = {"num_moe_experts": 3, "moe_aux_loss_coeff": 0.5, "mtp_use_repeated_layer": repeated}
    model, aux = started(Config(**SHAPE, **experts, **MTP)), []
    for layer in model.mtp.values():
        layer.transformer_layer.register_forward_hook(lambda module, given, found: aux.append(found[2]))
    own, depths = by_definition(model, tokens, labels)
    expected, loss = own + 0.7 / 2 * sum(depths) + part * sum(aux[:2]), model(tokens, labels)
    assert relative(loss.detach(), own.detach()) < 1e-12
    assert_gradients(loss, model, expected)


def test_evaluation_runs_no_depths():
    tokens, labels, _ = given()
    model, called = started(Config(**SHAPE, **MTP)), []
    for layer in model.mtp.values():
        layer.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        model(tokens, labels)
    model(tokens)
    model.eval()(tokens, labels)
    assert not called
    model.train()(tokens, labels)
    assert len(called) == 2


def test_documents_foretell_their_own_tokens():
    model = started(Config(**SHAPE, **MTP))
    tokens, labels, _ = given()
    tokens, labels = tokens[:1], labels[:1]
    packed = model(tokens, labels, cu_seqlens=torch.tensor([[0, 2, 6, 11]], dtype=torch.int32))
    sums, kept = [0.0] * 3, [0] * 3
    for first, end in ((0, 2), (2, 6), (6, 11)):
        own, depths = by_definition(model, tokens[:, first:end], labels[:, first:end])
        for depth, loss in enumerate((own, *depths)):
            sums[depth] += (end - first - depth) * loss
            kept[depth] += end - first - depth
    own, *depths = (total / count for total, count in zip(sums, kept, strict=True))
    assert relative(packed.detach(), own.detach()) < 1e-12
    assert_gradients(packed, model, own + 0.7 / 2 * sum(depths))


def test_grad_scale_is_each_depths_part():
    tokens, labels, _ = given()
    found = []
    for grad_scale in (None, 0.5):
        model = started(Config(**SHAPE, **MTP), torch.float32)
        grads = MainGrads(model)
        (0.5 * model(tokens, labels, grad_scale=grad_scale)).backward()
        found.append({name: parameter.main_grad.clone() for name, parameter in model.named_parameters()})
        grads.close()
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("base", ({}, GPT2), ids=("llama", "gpt-2"))
def test_stages(base):
    """The last has a copy of the embedding, whose gradients and the first's add up to the whole model's."""
    tokens, labels, _ = given()
    config = Config(**SHAPE, **base, **MTP, untie_embeddings_and_output_weights=True)
    whole = started(config)
    first, last = started(config, layers=range(1), last=False), started(config, layers=range(1, 2), first=False)
    loss = last(first(tokens), labels, tokens=tokens)
    assert torch.equal(loss, whole(tokens, labels)) and not first.mtp
    loss.backward()
    whole(tokens, labels).backward()
    found = [{name: parameter.grad for name, parameter in stage.named_parameters()} for stage in (first, last)]
    for name, parameter in whole.named_parameters():
        parts = [stage[name] for stage in found if name in stage]
        assert len(parts) == 1 + name.startswith("embedding") and relative(sum(parts), parameter.grad) < 1e-12, name
    hidden = first(tokens)
    with pytest.raises(ValueError, match="tokens must be given to a last stage that trains with mtp_num_layers, but is None"):
        last(hidden, labels)
    with torch.no_grad():
        assert torch.equal(last(hidden, labels), whole.eval()(tokens, labels))


def test_counts_and_what_is_refused(tmp_path):
    config = Config(**SHAPE, **MTP)
    assert config.parameters_count() == sum(p.numel() for p in Model(config, device="meta").parameters())
    repeated = config.replace(**REPEATED)
    assert repeated.parameters_count() == sum(p.numel() for p in Model(repeated, device="meta").parameters())
    assert repeated.flops_per_token(16) == config.flops_per_token(16)
    plain, each = Config(**SHAPE), config.parameters_count() - Config(**SHAPE).parameters_count()
    products = each - 2 * 5 * SHAPE["hidden_size"] + 2 * (SHAPE["vocab_size"] + 5) * SHAPE["hidden_size"]
    attention = 2 * 4 * 8 * 16
    assert config.flops_per_token(16) - plain.flops_per_token(16) == 6 * (products + attention)
    with pytest.raises(ValueError, match="mtp_num_layers must be None for a Llama of Hugging Face's, but is 2"):
        save_huggingface(Model(config, seed=0), tmp_path)
