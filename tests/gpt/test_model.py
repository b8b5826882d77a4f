"""The model: each fusion against PyTorch's operators, the loss, its parts, recomputation, and where gradients go."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from ops.calls import relative
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass.gpt import Config, Model, preset
from onepass.gpt.model import Embedding
from onepass.gpt.positions import frequencies
from onepass.parallel import MainGrads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # for the kernels
SHAPE = {
    "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 20, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8,
    "vocab_size": 41, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {
    "add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False, "activation_func": "gelu",
}  # fmt: skip
VARIANTS = {
    "llama": {},
    "gpt-2": GPT2,
    "zero-centred": {"layernorm_zero_centered_gamma": True, "memory_efficient_layer_norm": True, "normalization": "LayerNorm"},
    "norms alone": {"norm_linear_fusion": False},
    "norms alone, zero-centred": {
        "norm_linear_fusion": False, "layernorm_zero_centered_gamma": True, "memory_efficient_layer_norm": True,
    },
    "norms alone, biases": GPT2 | {"norm_linear_fusion": False},
    "heads normed": {"qk_layernorm": True, "add_qkv_bias": True},
    "heads normed, layer": GPT2 | {"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
    "half rotated": {"rotary_percent": 0.5},
    "interleaved": {"rotary_interleaved": True, "rotary_base": 100.0},
    "stretched": {"use_rope_scaling": True, "rope_scaling_original_max_position_embeddings": 16},
    "no positions": {"position_embedding_type": "none"},
    "clamped": {"activation_func": "quick_gelu", "activation_func_clamp_value": 0.01, "glu_linear_offset": 1.0},
    "squared": {"gated_linear_unit": False, "activation_func": "squared_relu"},
    "exact": {"gated_linear_unit": False, "activation_func": "gelu_exact", "add_bias_linear": True},
    "relu": {"activation_func": "relu", "add_bias_linear": True},
    "gelu gate": {"activation_func": "gelu"},
    "native": {"cross_entropy_fusion_impl": "native", "final_logit_softcapping": 1.5, "z_loss": 0.1, "label_smoothing": 0.1},
    "linear": {"final_logit_softcapping": 1.5, "z_loss": 0.1, "label_smoothing": 0.1},
    "untied": {"untie_embeddings_and_output_weights": True},
    "one head a query": {"num_query_groups": None, "kv_channels": None},
    "experts": {"num_moe_experts": 3, "moe_aux_loss_coeff": 0.1},
    "recomputed": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "two tokens more": {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7, "recompute_granularity": "full"},
    "a token more, experts": {
        "mtp_num_layers": 1, "num_moe_experts": 3, "moe_aux_loss_coeff": 0.1, "untie_embeddings_and_output_weights": True,
    },
    "two tokens more by one layer": {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    "products again": {"recompute_granularity": "selective"},
}  # fmt: skip
FUSIONS = [  # each switched off alone
    {"norm_fusion": False, "norm_linear_fusion": False}, {"norm_fusion": False}, {"norm_linear_fusion": False},
    {"bias_activation_fusion": False}, {"bias_dropout_fusion": False}, {"apply_rope_fusion": False},
    {"attention_fusion": False}, {"attention_fusion": False, "apply_rope_fusion": False},
    {"cross_entropy_loss_fusion": False}, {"cross_entropy_fusion_impl": "native"}, {"gradient_accumulation_fusion": False},
]  # fmt: skip


def given(vocabulary=SHAPE["vocab_size"], length=11):
    """Tokens, labels of which some are ignored, and a mask."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (2, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[1, 2:4] = -100
    return tokens[:, :-1], labels, torch.rand(2, length, generator=generator)


def started(config, dtype=torch.float64, **options):
    """With biases and norm weights that are not what they start as."""
    model = Model(config, seed=5, **options).to(dtype)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def found(config, dtype=torch.float64):
    """The loss, logits, and the gradients."""
    model = started(config, dtype)
    tokens, labels, _ = given()
    loss = model(tokens, labels)
    loss.backward()
    return loss.detach(), model(tokens).detach(), {name: t.grad for name, t in model.named_parameters()}


def compare(got, expected, bound=1e-12):
    for one, other in zip(got[:2], expected[:2], strict=True):
        assert relative(one, other) < bound
    assert got[2].keys() == expected[2].keys()
    for name, grad in expected[2].items():  # a key's bias has none without rotation, but for rounding
        assert (got[2][name] - grad).norm() <= bound * grad.norm() + 1e-17, name


@pytest.mark.parametrize("name", VARIANTS)
def test_fused_is_as_the_reference(name):
    config = Config(**SHAPE | VARIANTS[name])
    compare(found(config), found(config.reference()))


@pytest.mark.parametrize("off", FUSIONS, ids="-".join)
@pytest.mark.parametrize("base", ({}, GPT2), ids=("llama", "gpt-2"))
def test_each_fusion_alone_changes_nothing(base, off):
    compare(found(Config(**SHAPE, **base, **off)), found(Config(**SHAPE, **base)))


@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize("base", ({"norm_linear_fusion": False}, {}, GPT2), ids=("norms alone", "llama", "gpt-2"))
def test_by_either_backend_in_fp32(base, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    config = Config(**SHAPE | {"num_layers": 1} | base)
    model, plain = (started(each, torch.float32).to(DEVICE) for each in (config, config.reference()))
    tokens, labels, _ = (t.to(DEVICE) for t in given(length=5))
    with onepass.use_backend(backend):
        model(tokens, labels).backward()
    plain(tokens, labels).backward()
    for (name, t), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (t.grad - other.grad).norm() <= 1e-5 * other.grad.norm() + 1e-8, name


# ---- what each flag switches: the operator that runs ----

SWITCHES = [
    ("apply_rope_fusion", "onepass.gpt.positions.rope"),
    ("norm_linear_fusion", "onepass.gpt.parts.norm_linear"),
    ("bias_activation_fusion", "onepass.nn.mlp.activation_linear"),
    ("bias_dropout_fusion", "onepass.gpt.parts.dropout_add"),
    ("norm_fusion", "onepass.nn.norm.layer_norm"),
    ("cross_entropy_loss_fusion", "onepass.nn.linear_cross_entropy.linear_cross_entropy"),
]


def test_norms_are_ours_without_persist_layer_norm():
    """As in Megatron, whose flag chooses a kernel of Apex."""
    config = preset("tiny", normalization="LayerNorm", memory_efficient_layer_norm=True, persist_layer_norm=False)
    norms = [module for module in Model(config, device="meta").modules() if isinstance(module, onepass.nn.LayerNorm)]
    assert norms and all(type(norm) is onepass.nn.LayerNorm and norm.memory_efficient for norm in norms)


@pytest.mark.parametrize(("flag", "op"), SWITCHES, ids=[flag for flag, _ in SWITCHES])
def test_a_flag_switches_its_own_op_and_no_other(flag, op, monkeypatch):
    called = set()
    for _, place in SWITCHES:
        module, name = place.rsplit(".", 1)
        module = __import__(module, fromlist=[name])
        real = getattr(module, name)

        def spy(*args, real=real, place=place, **options):
            called.add(place)
            return real(*args, **options)

        monkeypatch.setattr(module, name, spy)
    tokens, labels, _ = given()
    config = Config(**SHAPE | GPT2 | {"position_embedding_type": "rope", "attention_fusion": False})  # which has rope's in it
    Model(config, seed=0)(tokens, labels)
    assert called == {place for _, place in SWITCHES}
    called.clear()
    Model(config.replace(**{flag: False}), seed=0)(tokens, labels)
    assert called == {place for _, place in SWITCHES} - {op}


@pytest.mark.parametrize("settings", ({"activation_func_fp8_input_store": True}, {"cpu_offloading": True}), ids="-".join)
@pytest.mark.parametrize("experts", ({}, {"num_moe_experts": 2}), ids=("one MLP", "experts"))
def test_the_activations_input_is_kept_otherwise(settings, experts):
    got, expected = (found(Config(**SHAPE, **experts, **each), torch.float32) for each in (settings, {}))
    exact = "cpu_offloading" in settings
    assert torch.equal(got[0], expected[0])
    away = max(relative(got[2][name], grad.double()) for name, grad in expected[2].items())
    assert away == 0.0 if exact else 1e-4 < away < 0.1


def test_memory_efficient_norms_are_told_so():
    """As the numbers are the same."""
    model = Model(Config(**SHAPE, memory_efficient_layer_norm=True, norm_linear_fusion=False), seed=0)
    assert model.final_layernorm.memory_efficient and model.layers["0"].input_layernorm.memory_efficient


# ---- the formula ----


def test_logits_of_a_llama_written_down():
    """One layer, position by position, with no operator of the model's."""
    config = Config(**SHAPE | {"num_layers": 1})
    model, (tokens, _, _) = started(config), given(length=4)
    w = {name: t.detach() for name, t in model.named_parameters()}

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    expected = []
    for row in tokens:
        h = w["embedding.word_embeddings.weight"][row]
        qkv = norm(h, w["layers.0.input_layernorm.weight"]) @ w["layers.0.self_attention.linear_qkv.weight"].t()
        q, k, v = qkv[:, :32].view(-1, 4, 8), qkv[:, 32:48].view(-1, 2, 8), qkv[:, 48:].view(-1, 2, 8)
        mixed = torch.zeros(len(row), 4, 8, dtype=h.dtype)
        for head in range(4):
            for to in range(len(row)):
                scores = [turned(q[to, head], to) @ turned(k[at, head // 2], at) / math.sqrt(8) for at in range(to + 1)]
                for at, share in enumerate(torch.stack(scores).softmax(0)):
                    mixed[to, head] += share * v[at, head // 2]
        h = h + mixed.flatten(1) @ w["layers.0.self_attention.linear_proj.weight"].t()
        up = norm(h, w["layers.0.pre_mlp_layernorm.weight"]) @ w["layers.0.mlp.linear_fc1.weight"].t()
        h = h + (up[:, :20] * up[:, :20].sigmoid() * up[:, 20:]) @ w["layers.0.mlp.linear_fc2.weight"].t()
        expected.append(norm(h, w["final_layernorm.weight"]) @ w["embedding.word_embeddings.weight"].t())
    assert relative(model(tokens).detach(), torch.stack(expected)) < 1e-7  # the tables are fp32


def turned(x, position):
    """As complex numbers, of halves."""
    angles = torch.tensor([position * 10000.0 ** (-i / 4) for i in range(4)], dtype=torch.float64)
    z = torch.complex(x[:4], x[4:]) * torch.polar(torch.ones(4, dtype=torch.float64), angles)
    return torch.cat([z.real, z.imag])


@pytest.mark.parametrize(("low", "high", "kept"), ((1.0, 4.0, 15), (2.0, 16.0, 11)))
def test_llama_3s_stretching(low, high, kept):
    """Long waves are divided by the factor, short ones kept, and between is a straight line in the number of waves."""
    config = preset("1B", rope_scaling_low_freq_factor=low, rope_scaling_high_freq_factor=high)
    plain, stretched = frequencies(config.replace(use_rope_scaling=False)), frequencies(config)
    waves = 8192 * plain / (2 * math.pi)
    assert torch.equal(stretched[waves >= high], plain[waves >= high]) and (waves >= high).sum() == kept
    torch.testing.assert_close(stretched[waves <= low], plain[waves <= low] / 32)
    between = (waves > low) & (waves < high)
    share = (waves[between] - low) / (high - low)
    assert between.any()
    torch.testing.assert_close(stretched[between], (1 - share) * plain[between] / 32 + share * plain[between])


# ---- the loss ----


@pytest.mark.parametrize("impl", ("linear", "native", "none"))
@pytest.mark.parametrize("masked", (False, True), ids=("whole", "masked"))
@pytest.mark.parametrize("experts", ({}, {"num_moe_experts": 2, "moe_aux_loss_coeff": 0.5}), ids=("one MLP", "experts"))
def test_reductions_and_masks(impl, masked, experts):
    fused = {"cross_entropy_loss_fusion": False} if impl == "none" else {"cross_entropy_fusion_impl": impl}
    config = Config(**SHAPE, **fused, **experts, z_loss=0.1)
    model, (tokens, labels, mask) = started(config), given()
    logits = model(tokens)
    rows = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    kept = (labels != -100).double()
    rows = rows + 0.1 * logits.logsumexp(-1).square() * kept
    weight = kept * mask if masked else kept
    call = {"loss_mask": mask} if masked else {}
    base = started(config.replace(moe_aux_loss_coeff=0.0)) if experts else model
    own = (model(tokens, labels) - base(tokens, labels)).item() if experts else 0.0
    assert bool(own) == bool(experts)
    rows = (rows + own) * weight
    for reduction, expected in (("none", rows), ("sum", rows.sum()), ("mean", rows.sum() / weight.sum())):
        assert relative(model(tokens, labels, reduction=reduction, **call).detach(), expected.detach()) < 1e-7, reduction


@pytest.mark.parametrize("impl", ("linear", "native", "none"))
def test_nothing_to_foretell_is_a_loss_of_zero(impl):
    fused = {"cross_entropy_loss_fusion": False} if impl == "none" else {"cross_entropy_fusion_impl": impl}
    model, (tokens, labels, mask) = started(Config(**SHAPE, **fused)), given()
    loss = model(tokens, labels, loss_mask=torch.zeros_like(mask))
    loss.backward()
    assert loss == 0 and not any(t.grad.any() for t in model.parameters())


def test_fp32_logits_are_not_rounded():
    errors = []
    for fp32_logits in (False, True):
        model = started(Config(**SHAPE, params_dtype="bf16", fp32_logits=fp32_logits), torch.bfloat16)
        kept = {}
        model.output_layer.register_forward_pre_hook(lambda module, args, kept=kept: kept.update(hidden=args[0]))
        tokens, labels, _ = given()
        loss = model(tokens, labels)
        logits = kept["hidden"].double() @ model._head_weight().double().T
        errors.append((loss - F.cross_entropy(logits.flatten(0, -2), labels.flatten())).abs().item())
    assert errors[1] < 1e-6 < errors[0]


def test_grad_scale_is_the_linear_losss_alone():
    tokens, labels, _ = given()
    model = started(Config(**SHAPE))
    loss = model(tokens, labels, grad_scale=0.25)
    (0.25 * loss).backward()
    other = started(Config(**SHAPE))
    (0.25 * other(tokens, labels)).backward()
    assert all(relative(t.grad, o.grad) < 1e-12 for t, o in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"grad_scale must be None without cross_entropy_loss_fusion and .*, but is 0.5"):
        started(Config(**SHAPE, cross_entropy_fusion_impl="native"))(tokens, labels, grad_scale=0.5)


# ---- parts ----


@pytest.mark.parametrize("base", ({}, GPT2, {"norm_linear_fusion": False}), ids=("llama", "gpt-2", "norms alone"))
def test_stages_one_after_the_other_are_the_whole(base):
    config = Config(**SHAPE | base | {"num_layers": 3, "untie_embeddings_and_output_weights": True})
    whole = started(config)
    stages = [
        started(config, layers=range(0, 1), last=False),
        started(config, layers=range(1, 2), first=False, last=False),
        started(config, layers=range(2, 3), first=False),
    ]
    tokens, labels, _ = given()
    loss = stages[2](stages[1](stages[0](tokens)), labels)
    assert relative(loss.detach(), whole(tokens, labels).detach()) < 1e-14
    loss.backward()
    whole(tokens, labels).backward()
    parts = {name: t for stage in stages for name, t in stage.named_parameters()}
    assert parts.keys() == dict(whole.named_parameters()).keys()
    for name, t in whole.named_parameters():
        assert torch.equal(parts[name], t) and relative(parts[name].grad, t.grad) < 1e-12, name
    for stage in stages:
        stage.load_state_dict({name: t for name, t in whole.state_dict().items() if name in stage.state_dict()})


def test_state_dicts_have_the_same_keys_with_every_fusion_and_none():
    for base in ({}, GPT2, {"qk_layernorm": True, "num_moe_experts": 2}):
        config = Config(**SHAPE | {"num_moe_experts": None} | base) if "num_moe_experts" not in base else Config(**SHAPE | base)
        fused, plain = Model(config, seed=0), Model(config.reference(), seed=1)
        plain.load_state_dict(fused.state_dict())
        assert list(fused.state_dict()) == list(plain.state_dict()) == [name for name, _ in fused.named_parameters()]


def test_weights_start_as_their_seed_and_name_say():
    config = preset("tiny", hidden_size=64, num_attention_heads=2)
    one, same, other = (Model(config, seed=seed) for seed in (1, 1, 2))
    std = {name: t.std().item() for name, t in one.named_parameters() if t.dim() > 1}
    for (name, t), twin, stranger in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(t, twin)
        if t.dim() == 1:
            assert torch.equal(t, torch.ones_like(t))
            continue
        assert not torch.equal(t, stranger)
        ends = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        assert std[name] == pytest.approx(0.02 / math.sqrt(8) if ends else 0.02, rel=0.05), name
    weights = dict(one.named_parameters())
    assert not torch.equal(weights["layers.0.mlp.linear_fc1.weight"], weights["layers.1.mlp.linear_fc1.weight"])
    half = Model(config.replace(params_dtype="bf16"), seed=1)
    assert all(torch.equal(t.bfloat16(), h) for t, h in zip(one.parameters(), half.parameters(), strict=True))


def test_without_a_seed_torch_draws_one():
    torch.manual_seed(3)
    one = Model(preset("tiny", num_layers=1))
    torch.manual_seed(3)
    same, other = Model(preset("tiny", num_layers=1)), Model(preset("tiny", num_layers=1))
    name = "layers.0.mlp.linear_fc1.weight"
    assert torch.equal(one.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])


def test_from_the_meta_device():
    config = preset("tiny", num_layers=1, num_moe_experts=2)
    made = Model(config, seed=4, device="meta")
    made.to_empty(device="cpu")
    made.reset_parameters()
    expected = Model(config, seed=4)
    assert all(torch.equal(t, expected.state_dict()[name]) for name, t in made.state_dict().items())
    tokens, labels, _ = given()
    assert torch.equal(made(tokens, labels), expected(tokens, labels))


def test_a_copy_and_another_type_rotate_by_tables_of_fp32():
    model = Model(preset("tiny", num_layers=1), seed=0)
    for other in (copy.deepcopy(model), model.bfloat16()):
        cos, sin = other.rotary(9)
        assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (9, 16)
        assert torch.equal(cos[:, 0], torch.arange(9).double().cos().float())


# ---- where gradients go ----


def test_without_gradient_accumulation_fusion_no_op_writes_main_grad():
    tokens, labels, _ = given()
    for base in ({}, GPT2 | {"norm_linear_fusion": False}, {"num_moe_experts": 2, "qk_layernorm": True}):
        models = [started(Config(**SHAPE, **base, gradient_accumulation_fusion=fused), torch.float32) for fused in (True, False)]
        for model in models:
            for parameter in model.parameters():
                parameter.main_grad = torch.zeros_like(parameter)
            model(tokens, labels).backward()
        by_ops, by_autograd = (dict(model.named_parameters()) for model in models)
        for name, parameter in by_autograd.items():
            assert not parameter.main_grad.any() and parameter.grad.any(), name
            if not name.endswith("router.weight"):
                assert by_ops[name].grad is None, name
                assert relative(by_ops[name].main_grad, parameter.grad.double()) < 1e-5, name


@pytest.mark.parametrize("fused", (True, False))
@pytest.mark.parametrize("recompute", (None, "selective", "full"))
def test_two_microbatches_in_main_grads(fused, recompute):
    options = {"gradient_accumulation_fusion": fused, "recompute_granularity": recompute}
    model, plain = (started(Config(**SHAPE, **GPT2, **each), torch.float32) for each in (options, {}))
    grads = MainGrads(model)
    tokens, labels, _ = given()
    with grads.accumulate():
        model(tokens, labels).backward()
    model(labels.clamp(min=0), tokens).backward()
    grads.finish()
    plain(tokens, labels).backward()
    plain(labels.clamp(min=0), tokens).backward()
    for (name, t), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert t.grad is None and (t.main_grad - other.grad).norm() <= 1e-5 * other.grad.norm() + 1e-8, name


@pytest.mark.parametrize("granularity", ("full", "selective"))
def test_recomputing_keeps_less_and_drops_the_same(granularity):
    def kept(config):
        sizes = []
        torch.manual_seed(7)
        model = started(config)
        tokens, labels, _ = given()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            loss = model(tokens, labels)
        loss.backward()
        return sum(sizes), loss.detach(), [t.grad for t in model.parameters()]

    base = GPT2 | {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    whole, less = (kept(Config(**SHAPE, **base, recompute_granularity=each)) for each in (None, granularity))
    assert less[0] < (0.5 if granularity == "full" else 0.97) * whole[0]
    assert torch.equal(whole[1], less[1])
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-14) for one, other in zip(whole[2], less[2], strict=True))


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({}, 0),
        ({"recompute_granularity": "full"}, 3),
        ({"recompute_granularity": "full", "recompute_num_layers": 2}, 2),
    ],
    ids=("none", "all", "two"),
)
def test_so_many_blocks_are_recomputed(settings, blocks, monkeypatch):
    called = []
    real = onepass.gpt.model.checkpoint
    monkeypatch.setattr("onepass.gpt.model.checkpoint", lambda *args, **more: called.append(args) or real(*args, **more))
    model, (tokens, labels, _) = started(Config(**SHAPE | {"num_layers": 3} | settings)), given()
    model(tokens, labels)
    assert [args[0] for args in called] == list(model.layers.values())[:blocks]
    with torch.no_grad():
        model(tokens, labels)
    assert len(called) == blocks


def test_norm_and_linear_as_one_keep_less():
    def kept(config):
        sizes = {}
        model, (tokens, labels, _) = started(config), given()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.setdefault(t.data_ptr(), t.numel()) and t, lambda t: t):
            model(tokens, labels)
        return sum(sizes.values())

    alone, one = (kept(Config(**SHAPE, norm_linear_fusion=each)) for each in (False, True))
    assert alone - one >= 2 * SHAPE["num_layers"] * 22 * SHAPE["hidden_size"]  # a tensor of the stream's size at each norm


# ---- the residual stream ----

STREAMS = {  # its settings, and how many additions are passes of their own in backward
    "llama": ({}, 0),
    "gpt-2": (GPT2, 0),
    "experts": ({"num_moe_experts": 2}, 0),
    "norms alone": ({"norm_linear_fusion": False}, 1),  # the first norm has nothing to add, and does not give h back
}


def of_the_streams_size(t):
    return t.shape == (2, 11, SHAPE["hidden_size"])


def test_each_norm_keeps_one_tensor_of_the_streams_size():
    """What a norm and its linear layer keep: h; the last norm keeps h and the head's loss its result."""
    kept = {}
    model, (tokens, labels, _) = started(Config(**SHAPE)), given()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t) is None or t, lambda t: t):
        model(tokens, labels)
    expected = 2 * SHAPE["num_layers"] + 2
    assert sum(of_the_streams_size(t) for t in kept.values()) == expected


@pytest.mark.parametrize("name", STREAMS)
def test_sums_of_the_stream_are_made_in_other_passes(name):
    pytest.importorskip("triton")
    settings, expected = STREAMS[name]
    model = started(Config(**SHAPE | settings), torch.float32).to(DEVICE)
    tokens, labels, _ = (t.to(DEVICE) for t in given())
    with onepass.use_backend("triton"):
        with Additions() as forward:
            loss = model(tokens, labels)
        with Additions() as backward:
            loss.backward()
    assert (forward.count, backward.count) == (0, expected)


class Additions(TorchDispatchMode):
    """Counts the operators that do nothing but add two tensors of the residual stream's size."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        both = args[:2] if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) else ()
        self.count += len(both) == 2 and all(isinstance(t, torch.Tensor) and of_the_streams_size(t) for t in both)
        return func(*args, **(kwargs or {}))


# ---- dropout ----


@pytest.mark.parametrize("fused", (True, False))
def test_dropout_drops_in_training_alone(fused):
    config = Config(**SHAPE, hidden_dropout=0.5, attention_dropout=0.5, bias_dropout_fusion=fused)
    model, (tokens, labels, _) = started(config), given()
    one, other = model(tokens, labels), model(tokens, labels)
    assert one != other
    model.eval()
    expected = started(Config(**SHAPE))(tokens, labels)
    assert relative(model(tokens, labels).detach(), expected.detach()) < 1e-14


@pytest.mark.parametrize("fused", (True, False))
def test_the_embedding_is_dropped_too(fused):
    config = preset("tiny", hidden_dropout=0.25, bias_dropout_fusion=fused)
    model = Model(config, seed=0)
    assert isinstance(model.embedding, Embedding)
    h = model.embedding(torch.randint(2048, (8, 64)))
    assert (h == 0).double().mean() == pytest.approx(0.25, abs=0.01)
    assert not (model.embedding.eval()(torch.randint(2048, (8, 64))) == 0).any()


# ---- compiled, and under autocast ----


def test_compiled_whole():
    model, (tokens, labels, _) = started(Config(**SHAPE), torch.float32), given()
    expected = model(tokens, labels)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative(compiled(tokens, labels).detach(), expected.detach().double()) < 1e-5


@pytest.mark.parametrize("reference", (True, False), ids=("reference", "fused"))
@pytest.mark.parametrize("experts", ({}, {"num_moe_experts": 2}), ids=("one MLP", "experts"))
def test_under_autocast(reference, experts):
    config = Config(**SHAPE, **experts)
    model, (tokens, labels, _) = started(config.reference() if reference else config, torch.float32), given()
    expected = model(tokens, labels)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels)
    loss.backward()
    assert 0 < relative(loss.detach(), expected.detach().double()) < 1e-2
    assert all(t.grad.dtype is torch.float32 and t.grad.isfinite().all() for t in model.parameters())


# ---- errors ----


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({}, {"layers": range(1, 4)}, "layers must be a range within 2, num_layers, but is range(1, 4)"),
        ({}, {"layers": range(0, 2, 2)}, "layers must be a range within 2, num_layers, but is range(0, 2, 2)"),
        (
            {"tensor_model_parallel_size": 2},
            {},
            "tp_group must be of tensor_model_parallel_size ranks, 2, but is of 1",
        ),
        (
            {},
            {"last": False},
            "untie_embeddings_and_output_weights must be true where first and last are not one stage, but is false: the head's "
            "weight is the embedding's",
        ),
    ],
    ids=("layers", "step", "ranks", "tied"),
)
def test_a_model_says_what_is_wrong(settings, options, said):
    with pytest.raises(ValueError) as error:
        Model(Config(**SHAPE, **settings), **options)
    assert str(error.value) == said


def test_tokens_that_are_too_many_or_no_batch():
    model = Model(Config(**SHAPE), seed=0)
    with pytest.raises(ValueError, match="x must have a sequence of at most max_position_embeddings, 16, but 17"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"tokens must have shape \[batch, sequence\], but has \(5,\)"):
        model(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(IndexError, match="ids must be from 0 to 40"):
        model(torch.full((1, 4), 41))
