"""Adapters of a model, beside weights that have them merged in, PEFT's on Hugging Face's model, and those over ranks."""

import json

import pytest
import torch
import torch.nn.functional as F
from gpt.small_models import batch, configured, started
from gpt.test_weights import GPT2, LLAMA, weights, written
from ops.calls import relative
from parallel.meeting import own_group
from parallel.worlds import PAIRS

from onepass.gpt import Model, add_adapters, load_huggingface, save_adapter, save_huggingface
from onepass.gpt.lora import LinearAdapter, adapter_files, describe_adapters, frozen_digest
from onepass.parallel import AdamW, MainGrads, reduce_sequence_parallel_grads

safetensors = pytest.importorskip("safetensors.torch")

WORLDS = PAIRS[:1]
KINDS = {
    "llama": {},
    "gpt-2": {
        "add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
        "gated_linear_unit": False, "activation_func": "gelu", "num_query_groups": 4,
    },
}  # fmt: skip
# Hugging Face's layers: ours, and the weight's rows, which are q 16, k 8, v 8; gate 24, up 24 in the Llama
ROWS = {
    "q_proj": ("self_attention.linear_qkv", 0, 16), "k_proj": ("self_attention.linear_qkv", 16, 24),
    "v_proj": ("self_attention.linear_qkv", 24, 32), "o_proj": ("self_attention.linear_proj", 0, 16),
    "gate_proj": ("mlp.linear_fc1", 0, 24), "up_proj": ("mlp.linear_fc1", 24, 48), "down_proj": ("mlp.linear_fc2", 0, 16),
    "attn.c_attn": ("self_attention.linear_qkv", 0, 48), "attn.c_proj": ("self_attention.linear_proj", 0, 16),
    "mlp.c_fc": ("mlp.linear_fc1", 0, 24), "mlp.c_proj": ("mlp.linear_fc2", 0, 16),
}  # fmt: skip


def adapted(group=None, modules=("all-linear",), **options):
    """Return an fp64 model with adapters whose both factors are random."""
    model = started(configured(1 if group is None else group.size(), **options), group)
    add_adapters(model, 3, 6.0, modules, seed=5)
    for adapter in adapters(model):
        adapter.start("lora_b", lambda b, name=adapter.name: b.copy_(drawn(name, b.shape)))
    return model.double()


def drawn(name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def adapters(model):
    return [module for module in model.modules() if isinstance(module, LinearAdapter)]


@pytest.mark.parametrize("modules", [("all-linear",), ("k_proj", "up_proj", "down_proj")], ids=["all", "some"])
@pytest.mark.parametrize("way", ["fused", "reference", "recomputed"])
def test_a_llama_is_the_one_with_merged_weights(modules, way):
    merged_equals(adapted(modules=modules, **ways(way)), 14 if len(modules) == 1 else 6)


@pytest.mark.parametrize("way", ["fused", "reference"])
def test_a_gpt2_is_the_one_with_merged_weights(way):
    merged_equals(adapted(**KINDS["gpt-2"], **ways(way)), 8)


def ways(way):
    return {"reference": {"reference": True}, "recomputed": {"recompute_granularity": "full"}}.get(way, {})


def merged_equals(model, number):
    """Compare loss, logits and the adapters' gradients with those of a model whose weights are W + scale * b a."""
    merged = started(model.config)
    places = {}
    for adapter in adapters(model):
        _, _, layer, name = adapter.name.split(".", 3)
        ours, first, last = next(place for theirs, place in ROWS.items() if name.endswith(theirs))
        weight = dict(merged.named_parameters())[f"layers.{layer}.{ours}.weight"]
        weight.data[first:last] += 2.0 * adapter.lora_b.detach() @ adapter.lora_a.detach()
        places[adapter] = weight, first, last
    assert len(places) == number
    tokens, labels, _ = batch()
    assert relative(model(tokens).detach(), merged(tokens).detach()) < 1e-12
    for one in (model, merged):
        one(tokens, labels).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == set(merged.state_dict())
    for adapter, (weight, first, last) in places.items():
        gradient = 2.0 * weight.grad[first:last]
        assert relative(adapter.lora_a.grad, adapter.lora_b.detach().t() @ gradient) < 1e-10, adapter.name
        assert relative(adapter.lora_b.grad, gradient @ adapter.lora_a.detach().t()) < 1e-10, adapter.name


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_adapters_as_they_share_weights(world, kind, sequence):
    whole = a_step(None, kind, False)
    for rank in world.run(a_step, kind, sequence):
        assert all(rank[name] == whole[name] for name in ("digest", "said", "config"))
        assert all(abs(rank[name] / whole[name] - 1) < 1e-6 for name in ("loss", "norm"))
        assert rank["adapter"].keys() == whole["adapter"].keys()
        for name, tensor in whole["adapter"].items():
            assert relative(rank["adapter"][name], tensor) < 1e-5, name


def a_step(group, kind, sequence):
    """Return a step's loss and the norm of its gradients, and the adapters after it."""
    model = adapted(group, **KINDS[kind], sequence_parallel=sequence).float()
    found = {"digest": frozen_digest(model), "said": describe_adapters(model)}
    tokens, labels, _ = batch()
    grads = MainGrads(model, group=None if group is None else own_group(), tp_group=group)
    optimizer = AdamW(grads, lr=1e-2)
    loss = model(tokens, labels)
    loss.backward()
    grads.finish()
    reduce_sequence_parallel_grads(model, group)
    found |= {"loss": loss.item(), "norm": float(grads.norm())}
    optimizer.step()
    files = adapter_files(model)
    grads.close()
    return found | {"adapter": safetensors.load(files["adapter_model.safetensors"]), "config": files["adapter_config.json"]}


# ---- theirs ----


@pytest.mark.parametrize(("theirs", "rslora"), [(LLAMA, False), (GPT2, True)], ids=["llama", "gpt-2, rslora"])
@pytest.mark.filterwarnings("ignore")
def test_peft_trains_alike_and_loads_what_was_trained(theirs, rslora, tmp_path):
    """From the same start, by the same data and AdamW: the same losses, and the logits of what is saved."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = str(written(tmp_path / "base", theirs, weights(theirs)))

    def wrapped(adapter, **how):
        other = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(other, tmp_path / adapter, **how)

    _, model = load_huggingface(base)
    add_adapters(model, 3, 6, use_rslora=rslora, seed=5)
    save_adapter(model, tmp_path / "start", base=base)
    other = wrapped("start", is_trainable=True)
    assert sum(p.numel() for p in other.parameters() if p.requires_grad) == sum(p.numel() for p in trained(model))
    grads = MainGrads(model)
    how = {"lr": 2e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours, plain = AdamW(grads, **how), torch.optim.AdamW(trained(other), **how)
    losses = []
    for step in range(4):
        grads.zero_()
        tokens = torch.randint(29, (2, 12), generator=torch.Generator().manual_seed(step))
        one = model(tokens[:, :-1], tokens[:, 1:])
        two = F.cross_entropy(other(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        one.backward()
        two.backward()
        grads.finish()
        ours.step(zero=True)
        plain.step()
        plain.zero_grad()
        losses.append((one.item(), two.item()))
    assert all(abs(one / two - 1) < 2e-6 for one, two in losses) and losses[-1][0] != losses[0][0]
    save_adapter(model, tmp_path / "end", base=base)
    said = json.loads((tmp_path / "end" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == base and said["fan_in_fan_out"] is (theirs is GPT2)  # PEFT would warn, and mend it
    with torch.no_grad():
        assert relative(model(tokens), wrapped("end").eval()(tokens).logits.double()) < 1e-5
    grads.close()


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def test_adapters_start_as_pefts_do():
    """`a` uniform up to 1 / sqrt(inputs), and zeros in `b`. Each has numbers of its own, and a seed has its own."""
    model = Model(configured(1, hidden_size=64), seed=0)
    tokens = batch()[0]
    before = model(tokens)
    add_adapters(model, 16, 32, seed=1)
    assert torch.equal(model(tokens), before)
    made = adapters(model)
    for adapter in made:
        bound = adapter.lora_a.shape[1] ** -0.5
        assert 0.97 * bound < adapter.lora_a.abs().max() <= bound and not adapter.lora_b.any()
        assert abs(adapter.lora_a.std() / bound - 3**-0.5) < 0.05 and adapter.scale == 2.0
    assert len({adapter.lora_a.flatten()[0].item() for adapter in made}) == len(made) == 14
    again, other = (Model(configured(1, hidden_size=64), seed=0) for _ in range(2))
    add_adapters(again, 16, 32, seed=1)
    add_adapters(other, 16, 32, seed=2)
    assert torch.equal(adapters(again)[3].lora_a, made[3].lora_a) and not torch.equal(adapters(other)[3].lora_a, made[3].lora_a)


def test_the_digest_is_of_frozen_bits(tmp_path):
    model = adapted().float()
    digest = frozen_digest(model)
    adapters(model)[0].lora_a.data.zero_()
    assert frozen_digest(model) == digest
    save_huggingface(model, tmp_path)  # the frozen weights alone
    _, again = load_huggingface(tmp_path)
    assert frozen_digest(again.requires_grad_(False)) == digest
    with torch.no_grad():
        weight = again.layers["1"].mlp.linear_fc2.weight
        weight[2, 3] = torch.nextafter(weight[2, 3], torch.tensor(9.0))
    assert frozen_digest(again) != digest


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ({}, {"rank": 0}, "rank must be at least 1, but is 0"),
        (
            {},
            {"modules": ["q_prj"]},
            "of q_proj, .* but has 'q_prj'; did you mean 'q_proj'",
        ),
        ({}, {"modules": []}, "modules must be all-linear or some of q_proj, .* for a Llama, but has ''"),
        (KINDS["gpt-2"], {"modules": ["q_proj"]}, "some of c_attn, c_proj, c_fc for a GPT-2, but has 'q_proj'"),
        ({"num_moe_experts": 2}, {}, "num_moe_experts must be None for a Llama of Hugging Face's, but is 2"),
        ({"mtp_num_layers": 1}, {}, "mtp_num_layers must be None for a Llama of Hugging Face's, but is 1"),
    ],
    ids=["rank", "name", "none", "gpt-2", "experts", "depths"],
)
def test_what_has_no_adapters(options, given, said):
    with pytest.raises(ValueError, match=said):
        add_adapters(Model(configured(1, **options), seed=0), **given)


def test_a_model_gets_adapters_once_and_whole():
    model = adapted()
    with pytest.raises(ValueError, match="model must have no adapters, but has some"):
        add_adapters(model)
    with pytest.raises(ValueError, match="model must have adapters, as add_adapters makes them, but has none"):
        adapter_files(started(configured(1)))
    stage = Model(configured(1, untie_embeddings_and_output_weights=True), layers=range(1), last=False)
    with pytest.raises(ValueError, match="model must be whole, but is a stage of a pipeline"):
        add_adapters(stage)
