"""Attention of linear_qkv's output as it is, beside stock on a CPU, in fp32; and what runs in Megatron's own forward, and why."""

import pytest
import torch
import torch.nn.functional as F
from integrations.megatron.test_megatron import KINDS, config_of, local_spec, step

from onepass.integrations import megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]

PLAIN = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "num_query_groups": 2}
NORMED = PLAIN | {"qk_layernorm": True}


def gpt(config, spec, **options):
    """A model whose norms of heads have weights that differ."""
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(0)
    given = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": True, **options}
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=16, **given)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "q_layernorm.weight" in name or "k_layernorm.weight" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def splits(model):
    """Count calls of a layer's core attention: the fused path has none."""
    called = []
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.register_forward_hook(lambda *_: called.append(1))
    return called


def assert_as_stock(ours, stock):
    assert ours[0] == pytest.approx(stock[0], rel=2e-6) and ours[1] == pytest.approx(stock[1], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "of_model"),
    [
        (PLAIN, {}),
        (PLAIN | {"num_query_groups": 4}, {}),
        (PLAIN | {"num_query_groups": 1, "kv_channels": 12}, {}),
        (PLAIN | {"rotary_interleaved": True}, {}),
        (PLAIN, {"rotary_percent": 0.5}),
        (PLAIN, {"rope_scaling": True}),
        (PLAIN | {"no_rope_freq": [1, 0]}, {}),
        (PLAIN | {"add_qkv_bias": True, "softmax_scale": 0.2}, {}),
        (PLAIN, {"position_embedding_type": "learned_absolute"}),
        (NORMED, {}),
        (NORMED | {"layernorm_zero_centered_gamma": True, "layernorm_epsilon": 1e-2}, {"rotary_percent": 0.5}),
    ],
)
def test_fused_as_stock(options, of_model):
    config = config_of(**options)
    installed = megatron.install() if config.layernorm_zero_centered_gamma else None
    try:  # stock has no centred norm here
        stock, ours = gpt(config, local_spec(config), **of_model), gpt(config, megatron.gpt_layer_spec(config), **of_model)
        called = splits(ours)
        assert_as_stock(step(ours), step(stock))
        assert not called
    finally:
        if installed:
            installed.undo()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (PLAIN | {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (PLAIN | {"softmax_type": "learnable"}, "softmax_type is 'learnable'"),
        (PLAIN | {"softmax_type": "off-by-one"}, "softmax_type is 'off-by-one'"),
        (PLAIN | {"window_size": (4, 0)}, "window_size is (4, 0)"),
        (PLAIN | {"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling is True"),
        (PLAIN | {"attention_output_gate": True}, "attention_output_gate is True"),
        (KINDS["qk norm, geglu, GQA"], "q_layernorm is LayerNorm"),
    ],
)
def test_split_as_stock(options, reason, monkeypatch):
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *sizes, device=None, **rest: ones(*sizes, **rest))  # of a window's mask: "cuda"
    config = config_of(**options)
    stock, ours = gpt(config, local_spec(config)), gpt(config, megatron.gpt_layer_spec(config))
    called = splits(ours)
    assert f"left: self_attention of 2 layers: {reason}" in str(megatron.apply(ours))
    results = []
    for model in (ours, stock):
        torch.manual_seed(3)  # of dropout
        results.append(step(model))
    assert_as_stock(*results)
    assert called == [1, 1]


def test_dropout_splits_in_training_alone():
    config = config_of(**PLAIN, attention_dropout=0.1)
    model = gpt(config, megatron.gpt_layer_spec(config))
    called = splits(model)
    step(model.eval())
    assert not called and "left" not in str(megatron.apply(model))


def test_the_account():
    config = config_of(**PLAIN)
    model = gpt(config, megatron.gpt_layer_spec(config))
    assert "self_attention of 2 layers: attention of linear_qkv's output, rotation in it" in str(megatron.apply(model))
    model = gpt(config, local_spec(config))
    assert "self_attention" not in str(megatron.apply(model))
    model = gpt(config, megatron.gpt_layer_spec(config))
    model.post_process = False
    assert "rotation in it" in str(megatron.apply(model))


@pytest.mark.parametrize("options", [PLAIN, NORMED])
def test_modules_and_keys_are_stocks(options):
    """Modules are called, as hooks of theirs gather parameters; linear_qkv's gradient has stock's rows."""
    from megatron.core.transformer.attention import SelfAttention

    config = config_of(**options)
    spec, theirs = megatron.gpt_layer_spec(config), megatron.gpt_layer_spec(config)
    theirs.submodules.self_attention.module = SelfAttention
    ours, stock = gpt(config, spec), gpt(config, theirs)
    assert isinstance(ours.decoder.layers[0].self_attention, SelfAttention)
    assert [*ours.state_dict()] == [*stock.state_dict()]
    called, names = [], ["linear_qkv", "linear_proj"] + ["q_layernorm", "k_layernorm"] * ("qk_layernorm" in options)
    for name in names:
        module = getattr(ours.decoder.layers[0].self_attention, name)
        module.register_forward_pre_hook(lambda module, given, name=name: called.append(name))
    results = [step(model) for model in (ours, stock)]
    assert_as_stock(*results)
    assert sorted(called) == sorted(names)
    for (name, one), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("options", [PLAIN, NORMED])
def test_main_grad(options):
    """Each microbatch adds to linear_qkv's main_grad, and to the norms' of heads, in stock's order of rows."""
    config = config_of(**options)
    stock = gpt(config, local_spec(config), share_embeddings_and_output_weights=False)
    installed = megatron.install()
    try:
        fused = config_of(**options, gradient_accumulation_fusion=True)
        ours = gpt(fused, megatron.gpt_layer_spec(fused), share_embeddings_and_output_weights=False)
        for parameter in ours.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        for _ in range(2):
            step(stock), step(ours)
    finally:
        installed.undo()
    theirs = dict(stock.named_parameters())
    for name in ("linear_qkv.weight", "linear_proj.weight", *(["q_layernorm.weight"] if "qk_layernorm" in options else [])):
        name = f"decoder.layers.0.self_attention.{name}"
        torch.testing.assert_close(ours.get_parameter(name).main_grad, theirs[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [PLAIN, NORMED])
def test_core_attention_recomputed(options, monkeypatch):
    from megatron.core.tensor_parallel import random

    state = {"get": lambda *_, **__: torch.get_rng_state(), "set": lambda new, *_, **__: torch.set_rng_state(new)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", state["get"])
    monkeypatch.setattr(random, "_get_cuda_rng_state", state["get"])
    monkeypatch.setattr(random, "_set_cuda_rng_state", state["set"])
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    config, again = config_of(**options), config_of(**options, **recompute)
    stock, ours = gpt(config, local_spec(config)), gpt(again, megatron.gpt_layer_spec(again))
    called, saved = splits(ours), []
    assert_as_stock(step(ours), step(stock))
    assert not called
    layer, angles = ours.decoder.layers[0].self_attention, torch.randn(16, 1, 1, 8)
    hidden = torch.randn(16, 2, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        layer(hidden, None, rotary_pos_emb=angles)
    assert torch.Size((16, 2, 64)) in saved  # mixed_qkv, and of attention's own nothing: statistics are the only ones of 4 heads
    assert not any(4 in shape for shape in saved)


def packed(lengths, longest=None, **options):
    from megatron.core.packed_seq_params import PackedSeqParams

    ends, longest = torch.tensor([0, *lengths]).cumsum(0).int(), longest or max(lengths)
    given = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return PackedSeqParams(qkv_format="thd", **{**given, **options})


def packed_losses(model, lengths, params):
    tokens = torch.randint(64, (1, sum(lengths) + 1), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    given, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return model(given, places, None, labels=labels, packed_seq_params=params)


@pytest.mark.parametrize("options", [PLAIN, NORMED])
@pytest.mark.parametrize("longest", [None, 13])
@pytest.mark.parametrize("lengths", [(5, 1, 7), (13,)])
def test_packed_documents(options, lengths, longest):
    """As with Megatron's own SelfAttention, also where its rope takes angles for all tokens and not for each document's."""
    from megatron.core.transformer.attention import SelfAttention

    config = config_of(**options)
    spec, theirs = megatron.gpt_layer_spec(config), megatron.gpt_layer_spec(config)
    theirs.submodules.self_attention.module = SelfAttention
    ours, stock = gpt(config, spec), gpt(config, theirs)
    called = splits(ours)
    found, expected = (packed_losses(model, lengths, packed(lengths, longest)) for model in (ours, stock))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    assert called == ([1, 1] if longest and len(lengths) > 1 else [])


def test_core_attention_of_documents():
    """Megatron's own SelfAttention, and calls that are split, give it q, k and v."""
    config = config_of(**PLAIN)
    core = gpt(config, megatron.gpt_layer_spec(config)).decoder.layers[0].self_attention.core_attention
    q, k, v = (torch.randn(13, heads, 8) for heads in (4, 2, 2))
    found = core(q, k, v, None, packed_seq_params=packed((5, 8)))
    each = [core(*(x[:, None] for x in part), None)[:, 0] for part in zip(*(x.split((5, 8)) for x in (q, k, v)), strict=True)]
    torch.testing.assert_close(found, torch.cat(each))


def test_packed_with_padding_is_refused_as_before():
    config = config_of(**PLAIN)
    ends = torch.tensor([0, 5, 13]).int()
    params = packed((5, 8), cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q_padded must be None"):
        packed_losses(gpt(config, megatron.gpt_layer_spec(config)), (5, 8), params)


@pytest.mark.parametrize("what", ["angles for each sequence", "angles for q alone", "an argument that is not plain"])
def test_calls_that_are_split(what):
    """Their results are those of Megatron's own SelfAttention with the same core attention."""
    from megatron.core.transformer.attention import SelfAttention

    config = config_of(**PLAIN)
    theirs = megatron.gpt_layer_spec(config)
    theirs.submodules.self_attention.module = SelfAttention
    hidden, angles = torch.randn(16, 2, 32), torch.randn(16, 1, 1, 4).repeat(1, 1, 1, 2)
    given = {
        "angles for each sequence": {"rotary_pos_emb": torch.randn(16, 2, 1, 4).repeat(1, 1, 1, 2)},
        "angles for q alone": {"rotary_pos_emb": (angles, None)},
        "an argument that is not plain": {"rotary_pos_emb": angles, "sequence_len_offset": 0},
    }[what]
    layers = [gpt(config, spec).decoder.layers[0].self_attention for spec in (megatron.gpt_layer_spec(config), theirs)]
    called = []
    layers[0].core_attention.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(*(layer(hidden, None, **given)[0] for layer in layers), rtol=1e-5, atol=1e-6)
    assert called
    pair = (angles, angles)
    torch.testing.assert_close(*(layer(hidden, None, rotary_pos_emb=pair)[0] for layer in layers), rtol=1e-5, atol=1e-6)
    assert called == [1]


def test_inference_is_megatrons():
    from megatron.core.inference.contexts import StaticInferenceContext

    config = config_of(**PLAIN)
    model = gpt(config, megatron.gpt_layer_spec(config)).eval()
    tokens, places, mask = torch.arange(6)[None], torch.arange(6)[None], torch.triu(torch.ones(1, 1, 6, 6, dtype=torch.bool), 1)
    called = splits(model)
    with torch.no_grad():
        logits = model(tokens, places, mask)
        assert not called
        context = StaticInferenceContext(1, 16)
        found = model(tokens, places, mask, inference_context=context, runtime_gather_output=True)
        torch.testing.assert_close(found[:, -1:], logits[:, -1:])
    assert called == [1, 1]
