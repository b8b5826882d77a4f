"""Models of transformers on a GPU: by the kernels as near as eager, compiled, gradients in fp32, and less memory."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from gpu.calls import nobody_waits
from integrations.huggingface import test_loss_kinds
from integrations.huggingface.families import FAMILIES, batch, made, step

from onepass.integrations import huggingface
from onepass.ops.attention import by_cudnn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LARGER = {"vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}


def on_gpu(family="Llama", **options):
    """With onepass in bf16, eager in bf16, and in fp32 what both should give; the batch."""
    exact = made(family, **options).cuda()
    model, plain = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    huggingface.apply(model)
    return model, plain, exact, {name: value.cuda() for name, value in batch(tokens=48).items()}


def error(found, exact):
    return sum((found[1][name].float() - grad).square().sum() for name, grad in exact[1].items()).sqrt()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", (False, True))
def test_as_near_as_eager(family, cache):
    """In a mixture every token goes to all experts. Chosen by a router in bf16, where two are near it may be another one, and a
    choice more or less (the auxiliary loss counts them too) is chance, and more than all the rest."""
    to_all = {"num_experts_per_tok": 4} if "num_experts_per_tok" in FAMILIES[family] else {}
    model, plain, exact, given = on_gpu(family, **to_all)
    found, eager, expected = (step(each, **given, use_cache=cache) for each in (model, plain, exact))
    assert error(found, expected) < 1.25 * error(eager, expected)
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=5e-3, atol=5e-3)


def experts_step(module, x, chosen, weights, dy):
    """The result, and the gradients of the tokens, of the router's weights and of the experts' own."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = module(x, chosen, weights)
    y.backward(dy)
    return [y.detach(), x.grad, weights.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("kind", test_loss_kinds.KINDS)
def test_other_losses_as_near_as_eager(kind):
    exact = test_loss_kinds.made(kind).cuda()
    model, plain = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    by = [row.by for row in huggingface.apply(model).rows if row.part == "loss" and row.by != "embedding"]
    assert by == ["linear_cross_entropy"]
    given = {name: value.cuda() for name, value in test_loss_kinds.inputs(kind).items()}
    narrow = {name: value.bfloat16() if value.is_floating_point() else value for name, value in given.items()}
    found, eager, expected = step(model, **narrow), step(plain, **narrow), step(exact, **given)
    assert error(found, expected) < 1.25 * error(eager, expected)
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(("family", "weights_in"), (("Mixtral", torch.float32), ("Qwen3Moe", torch.bfloat16)))
def test_experts_as_near_as_eager(family, weights_in):
    """By themselves, with the choice given: small experts' errors don't show in a whole model."""
    plain = made(family).cuda().bfloat16()
    model, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    huggingface.apply(model)
    x, dy = torch.randn(2, 96, 32, device="cuda", dtype=torch.bfloat16)
    weights, chosen = torch.randn(96, 4, device="cuda").softmax(-1).topk(2)
    weights = weights.to(weights_in)
    of_model, of_plain, of_exact = (each.model.layers[0].mlp.experts for each in (model, plain, exact))
    found, eager = (experts_step(each, x, chosen, weights, dy) for each in (of_model, of_plain))
    expected = experts_step(of_exact, x.float(), chosen, weights.float(), dy.float())
    for ours, theirs, right in zip(found, eager, expected, strict=True):
        assert (ours.float() - right).norm() < 1.25 * (theirs.float() - right).norm()


@pytest.mark.parametrize("family", ("Llama", "Qwen3", "Gemma2"))
@pytest.mark.parametrize("tokens", ("few", "many"))
def test_compiled(family, tokens, monkeypatch):
    """As one graph; for many tokens PyTorch's attention stands between our rotations."""
    if tokens == "many":
        monkeypatch.setattr(by_cudnn, "_ALL_FROM", 1)
    torch._dynamo.reset()
    model, plain, exact, given = on_gpu(family, **(LARGER if family == "Llama" else {}))
    found, eager, expected = step(torch.compile(model, fullgraph=True), **given), step(plain, **given), step(exact, **given)
    assert error(found, expected) < 1.25 * error(eager, expected)


def test_gradients_in_fp32():
    _, model, _, given = on_gpu()
    applied = huggingface.apply(model, main_grad=True)
    optimizer = applied.optimizer(lr=1e-3, max_norm=1.0)
    for _ in range(3):
        for _ in range(2):
            loss = model(**given).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert model(**given).loss < loss


def test_less_memory():
    model, plain, *_ = on_gpu(**LARGER, num_hidden_layers=4, max_position_embeddings=512)
    given = {"input_ids": torch.randint(3, 1024, (8, 512), device="cuda")}
    peaks = []
    for each in (model, plain):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        each(**given, labels=given["input_ids"], use_cache=False).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        each.zero_grad()
    assert peaks[0] < 0.6 * peaks[1]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers' and PEFT's own
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("family", ("Llama", "Gemma2", "GPT2"))
def test_lora_on_all_layers_as_near_as_eager(family):
    """Activation and second layer are one op. Of one draw of adapters either model may be nearer by chance."""
    peft = pytest.importorskip("peft")
    errors = torch.zeros(2)
    for seed in range(4):
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        exact = peft.get_peft_model(made(family, **(LARGER if family == "Llama" else {})), config).cuda()
        model, plain = (copy.deepcopy(exact).bfloat16() for _ in range(2))
        applied = huggingface.apply(model)
        (by,) = {row.by for row in applied.rows if row.part == "mlp"}
        assert by == "activation_linear, " + {"Llama": "swiglu", "Gemma2": "geglu", "GPT2": "gelu"}[family]
        given = {name: value.cuda() for name, value in batch(tokens=48).items()}
        found, eager, expected = (step(each, **given) for each in (model, plain, exact))
        errors += torch.tensor([float(error(each, expected)) ** 2 for each in (found, eager)])
    assert errors[0] < 1.25**2 * errors[1], errors.sqrt()


@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")  # bitsandbytes' own: it casts to fp16
@pytest.mark.parametrize("four", (True, False), ids=("4 bits", "8 bits"))
def test_quantised_layers_as_near_as_eager(four):
    """As near to the same numbers in fp32: those that bitsandbytes runs, or in 8 bits, where it quantises x, plain ones."""
    bnb = pytest.importorskip("bitsandbytes")

    def quantised(dtype):
        torch.manual_seed(0)
        model = made(**LARGER, attention_bias=False, mlp_bias=False, tie_word_embeddings=False).to(dtype)
        for module in model.requires_grad_(False).model.layers.modules():
            for name, layer in module.named_children():
                if type(layer) is torch.nn.Linear and four:
                    new = bnb.nn.Linear4bit(layer.in_features, layer.out_features, False, dtype, quant_type="nf4")
                    new.weight = bnb.nn.Params4bit(layer.weight.data.float(), requires_grad=False, quant_type="nf4")
                elif type(layer) is torch.nn.Linear:
                    new = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, False, has_fp16_weights=False)
                    new.weight = bnb.nn.Int8Params(layer.weight.data.half(), requires_grad=False, has_fp16_weights=False)
                else:
                    continue
                new = new.cuda()  # which quantises it
                if not four and dtype is torch.float32:
                    codes, scale = new.weight.data, new.weight.SCB
                    new = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
                    new.weight.data, new.weight.requires_grad = codes * scale[:, None] / 127, False
                setattr(module, name, new)
        model.model.embed_tokens.weight.requires_grad_()
        return model.cuda()

    model, plain, exact = quantised(torch.bfloat16), quantised(torch.bfloat16), quantised(torch.float32)
    applied = huggingface.apply(model)
    assert {row.by for row in applied.rows if row.part == "mlp"} == {"activation_linear, swiglu"}
    given = {name: value.cuda() for name, value in batch(tokens=48).items()}
    found, eager, expected = (step(each, **given) for each in (model, plain, exact))
    assert error(found, expected) < 1.25 * error(eager, expected)


def documents_given(kind):
    """Two rows of 48 tokens: documents of 7 to 29, by positions or by boundaries of one row; or padding on the left."""
    given = batch(tokens=48)
    if kind == "padded":
        mask = torch.ones(2, 48, dtype=torch.int64)
        mask[0, :17] = 0
        labels = torch.where(mask.cumsum(1) > 1, given["input_ids"], -100)  # a padded token predicts the first
        return {name: value.cuda() for name, value in (given | {"labels": labels, "attention_mask": mask}).items()}
    lengths = (7, 29, 12)
    given["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    if kind == "lengths":
        given = {name: value[:1] for name, value in given.items()}
        given["cu_seq_lens_q"] = given["cu_seq_lens_k"] = torch.tensor([0, 7, 36, 48], dtype=torch.int32)
    return {name: value.cuda() for name, value in given.items()} | {"use_cache": False}


@pytest.mark.parametrize("kind", ("positions", "lengths", "padded"))
@pytest.mark.parametrize("family", ("Llama", "Qwen3", "Mistral", "Gemma2", "Gemma3Text"))
def test_documents_as_near_as_eager(family, kind):
    """transformers makes masks of them; it goes by positions where there are lengths, too. Its SDPA knows no softcap."""
    model, plain, exact, _ = on_gpu(family, **LARGER, **({"attn_implementation": "eager"} if family == "Gemma2" else {}))
    given = documents_given(kind)
    found, eager, expected = (step(each, **given) for each in (model, plain, exact))
    assert error(found, expected) < 1.25 * error(eager, expected)
    stack = model.model._onepass
    assert not stack.refused


def test_nobody_waits_where_boundaries_are_given():
    model, _, _, _ = on_gpu("Mistral", **LARGER)
    given = {name: value for name, value in documents_given("lengths").items() if name != "labels"}
    model.model(**given).last_hidden_state.sum().backward()
    with nobody_waits():
        model.model(**given).last_hidden_state.sum().backward()
    assert not model.model._onepass.refused
