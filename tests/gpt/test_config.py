"""The configuration: what it refuses and how it says so, what follows from it, files, flags and presets."""

import ast
import contextlib
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from onepass.gpt import PRESETS, Config, Model, preset
from onepass.gpt import validate_config as contradictions
from onepass.runtime.fp8_recipe import FP8Recipe

FP8 = {"fp8_format": "hybrid"}
MOE = {"num_moe_experts": 4}
FIRST, LAST = {"num_layers_in_first_pipeline_stage": 1}, {"num_layers_in_last_pipeline_stage": 1}
STAGES = {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True}

REFUSED = [  # the fields, and what is said
    ({"num_layers": 0}, "num_layers must be at least 1, but is 0"),
    ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size must be at least 1, but is 0"),
    ({"recompute_num_layers": 0, "recompute_granularity": "full"}, "recompute_num_layers must be at least 1, but is 0"),
    ({"layernorm_epsilon": 0.0}, "layernorm_epsilon must be finite and above 0, but is 0.0"),
    ({"rotary_base": -1.0}, "rotary_base must be finite and above 0, but is -1.0"),
    ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be finite and above 0, but is 0.0"),
    ({"activation_func_clamp_value": float("inf")}, "activation_func_clamp_value must be finite and above 0, but is inf"),
    (
        {"activation_func_clamp_value": 1e300},
        "activation_func_clamp_value must be from 1.2e-38 to 3.4e+38, which fp32 holds, but is 1e+300",
    ),
    ({"layernorm_epsilon": 1e-310}, "layernorm_epsilon must be from 1.2e-38 to 3.4e+38, which fp32 holds, but is 1e-310"),
    ({"z_loss": -0.1}, "z_loss must be finite and at least 0, but is -0.1"),
    ({"moe_aux_loss_coeff": -1.0} | MOE, "moe_aux_loss_coeff must be finite and at least 0, but is -1.0"),
    ({"init_method_std": float("nan")}, "init_method_std must be finite and at least 0, but is nan"),
    ({"hidden_dropout": 1.0}, "hidden_dropout must be from 0 to below 1, but is 1.0"),
    ({"attention_dropout": -0.1}, "attention_dropout must be from 0 to below 1, but is -0.1"),
    ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, but is 1.5"),
    ({"glu_linear_offset": float("inf")}, "glu_linear_offset must be finite, but is inf"),
    ({"wgrad_deferral_limit": -1}, "wgrad_deferral_limit must be at least 0, where 0 is all microbatches, but is -1"),
    (
        {"hidden_size": 100, "num_attention_heads": 3},
        "hidden_size must be a multiple of num_attention_heads, 3, where kv_channels is None, but is 100",
    ),
    ({"num_query_groups": 3}, "num_attention_heads must be a multiple of num_query_groups, 3, but is 4"),
    ({"rotary_percent": 0.0}, "rotary_percent must be above 0 and at most 1, but is 0.0"),
    (
        {"rotary_percent": 0.5, "kv_channels": 6},
        "rotary_percent must leave an even number to rotate of a head's 6 (kv_channels), at least 2, but is 0.5: that is 3",
    ),
    (
        {"rotary_percent": 0.01},
        "rotary_percent must leave an even number to rotate of a head's 32 (kv_channels), at least 2, but is 0.01: that is 0",
    ),
    (
        {"use_rope_scaling": True, "position_embedding_type": "none"},
        "use_rope_scaling must be false without position_embedding_type 'rope', but that is 'none'",
    ),
    (
        {"use_rope_scaling": True, "rope_scaling_low_freq_factor": 4.0},
        "rope_scaling_low_freq_factor must be below rope_scaling_high_freq_factor, 4.0, but is 4.0",
    ),
    (
        {"memory_efficient_layer_norm": True, "norm_fusion": False},
        "memory_efficient_layer_norm must be false without norm_fusion, as PyTorch's norms can't do it, but is true",
    ),
    (
        {"activation_func": "squared_relu"},
        "activation_func must be 'gelu', 'gelu_exact', 'silu', 'quick_gelu' or 'relu' with gated_linear_unit, but is "
        "'squared_relu'",
    ),
    (
        {"gated_linear_unit": False, "activation_func_clamp_value": 7.0},
        "activation_func_clamp_value must be None without gated_linear_unit, but is 7.0",
    ),
    ({"gated_linear_unit": False, "glu_linear_offset": 1.0}, "glu_linear_offset must be 0 without gated_linear_unit, but is 1.0"),
    (
        {"activation_func_fp8_input_store": True, "bias_activation_fusion": False},
        "activation_func_fp8_input_store must be false without bias_activation_fusion, which does it, but is true",
    ),
    (
        {"cpu_offloading": True, "bias_activation_fusion": False},
        "cpu_offloading must be false without bias_activation_fusion, which does it, but is true",
    ),
    (
        {"activation_func_fp8_input_store": True, "cpu_offloading": True},
        "activation_func_fp8_input_store and cpu_offloading are both true, but one must be false: the activation's input is kept "
        "in one way",
    ),
    (
        {"cpu_offloading": True, "cpu_offloading_activations": False},
        "cpu_offloading_activations must be true with cpu_offloading, which moves nothing else, but is false",
    ),
    ({"moe_ffn_hidden_size": 64}, "moe_ffn_hidden_size must be None without num_moe_experts, but is 64"),
    ({"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff must be 0 without num_moe_experts, but is 0.1"),
    (MOE | {"moe_router_topk": 5}, "moe_router_topk must be at most num_moe_experts, 4, but is 5"),
    (
        MOE | {"add_bias_linear": True},
        "add_bias_linear must be false with num_moe_experts, as one activation of all their rows has one bias, but is true",
    ),
    (
        MOE | STAGES | {"moe_aux_loss_coeff": 0.1},
        "moe_aux_loss_coeff must be 0 with pipeline_model_parallel_size 2, but is 0.1: a stage hands on hidden states, and no "
        "loss",
    ),
    ({"wgrad_deferral_limit": 2}, "wgrad_deferral_limit must be 0 without defer_embedding_wgrad_compute, but is 2"),
    (
        STAGES | {"defer_embedding_wgrad_compute": True, "gradient_accumulation_fusion": False},
        "gradient_accumulation_fusion must be true with defer_embedding_wgrad_compute, which adds to main_grad, but is not",
    ),
    (
        {"defer_embedding_wgrad_compute": True},
        "pipeline_model_parallel_size must be above 1 with defer_embedding_wgrad_compute, as there is no flush without a "
        "pipeline, but is 1",
    ),
    (
        {"sequence_parallel": True},
        "sequence_parallel must be false with tensor_model_parallel_size 1: there are no ranks to divide a sequence over",
    ),
    (
        {"tensor_model_parallel_size": 3, "ffn_hidden_size": 300},
        "num_attention_heads must be a multiple of tensor_model_parallel_size, 3, but is 4",
    ),
    (
        {"tensor_model_parallel_size": 4, "num_query_groups": 2},
        "num_query_groups must be a multiple of tensor_model_parallel_size, 4, but is 2",
    ),
    (
        {"tensor_model_parallel_size": 2, "ffn_hidden_size": 301},
        "ffn_hidden_size must be a multiple of tensor_model_parallel_size, 2, but is 301",
    ),
    (
        MOE | {"tensor_model_parallel_size": 2, "moe_ffn_hidden_size": 31},
        "moe_ffn_hidden_size must be a multiple of tensor_model_parallel_size, 2, but is 31",
    ),
    (STAGES | {"pipeline_model_parallel_size": 5}, "pipeline_model_parallel_size must be at most num_layers, 4, but is 5"),
    (
        {"pipeline_model_parallel_size": 2},
        "untie_embeddings_and_output_weights must be true with pipeline_model_parallel_size above 1, but is false: the first "
        "stage and the last would each have the weight, and a part of its gradient",
    ),
    (
        {"num_layers_per_virtual_pipeline_stage": 1},
        "num_layers_per_virtual_pipeline_stage must be None with pipeline_model_parallel_size 1, where there are no stages, "
        "but is 1",
    ),
    (
        STAGES | {"num_layers_per_virtual_pipeline_stage": 3},
        "num_layers must be a multiple of 6, pipeline_model_parallel_size times num_layers_per_virtual_pipeline_stage, but is 4",
    ),
    (
        STAGES | {"virtual_pipeline_model_parallel_size": 4},
        "num_layers must be a multiple of 8, pipeline_model_parallel_size times virtual_pipeline_model_parallel_size, but is 4",
    ),
    (
        STAGES | {"virtual_pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
        "num_layers_per_virtual_pipeline_stage must be None with virtual_pipeline_model_parallel_size 2, from which it follows, "
        "but is 1",
    ),
    (
        STAGES | LAST | {"num_layers_per_virtual_pipeline_stage": 1},
        "num_layers_per_virtual_pipeline_stage must be None with num_layers_in_last_pipeline_stage, but is 1: ranks with more "
        "layers would have more stages; virtual_pipeline_model_parallel_size gives all ranks as many",
    ),
    (STAGES | {"num_layers_in_last_pipeline_stage": 0}, "num_layers_in_last_pipeline_stage must be at least 1, but is 0"),
    (
        {"num_layers_in_first_pipeline_stage": 3},
        "num_layers_in_first_pipeline_stage must be None with pipeline_model_parallel_size 1, where there are no stages, "
        "but is 3",
    ),
    (
        LAST,
        "num_layers_in_last_pipeline_stage must be None with pipeline_model_parallel_size 1, where there are no stages, but is 1",
    ),
    (
        STAGES | {"num_layers_in_last_pipeline_stage": 4},
        "num_layers_in_last_pipeline_stage 4 must leave each of the pipeline's other ranks, 1, as many layers, and at least one, "
        "but of num_layers 4 there are 0 left",
    ),
    (
        STAGES | {"num_layers_in_first_pipeline_stage": 5},
        "num_layers_in_first_pipeline_stage 5 must leave each of the pipeline's other ranks, 1, as many layers, and at least "
        "one, but of num_layers 4 there are -1 left",
    ),
    (
        STAGES | FIRST | LAST | {"pipeline_model_parallel_size": 4, "num_layers": 5},
        "num_layers_in_first_pipeline_stage 1 and num_layers_in_last_pipeline_stage 1 must leave each of the pipeline's other "
        "ranks, 2, as many layers, and at least one, but of num_layers 5 there are 3 left",
    ),
    (
        STAGES | FIRST | LAST,
        "num_layers_in_first_pipeline_stage 1 and num_layers_in_last_pipeline_stage 1 must be num_layers, 4, together: the "
        "pipeline has no other ranks",
    ),
    (
        STAGES | LAST | {"virtual_pipeline_model_parallel_size": 2},
        "num_layers_in_last_pipeline_stage must be a multiple of virtual_pipeline_model_parallel_size, 2, but is 1",
    ),
    (
        STAGES | {"num_layers": 5, "num_layers_in_first_pipeline_stage": 2, "virtual_pipeline_model_parallel_size": 2},
        "what num_layers_in_first_pipeline_stage 2 leaves each of the pipeline's other ranks must be a multiple of "
        "virtual_pipeline_model_parallel_size, 2, but is 3",
    ),
    (
        {"fp32_logits": True, "cross_entropy_fusion_impl": "native"},
        "fp32_logits must be false without cross_entropy_loss_fusion and cross_entropy_fusion_impl 'linear', which keep no "
        "logits, but is true",
    ),
    ({"mtp_use_repeated_layer": True}, "mtp_use_repeated_layer must be false without mtp_num_layers, but is true"),
    (
        {"recompute_num_layers": 2},
        "recompute_num_layers must be None without recompute_granularity, but is 2",
    ),
    (
        {"recompute_num_layers": 5, "recompute_granularity": "full"},
        "recompute_num_layers must be at most num_layers, 4, but is 5",
    ),
    ({"fp8_margin": 9} | FP8, "fp8_margin must be from 0 to 8, but is 9"),
    ({"fp8_margin": -1} | FP8, "fp8_margin must be from 0 to 8, but is -1"),
    ({"fp8_amax_history_len": 0} | FP8, "fp8_amax_history_len must be from 1 to 65536, but is 0"),
    ({"fp8_amax_history_len": 1 << 17} | FP8, "fp8_amax_history_len must be from 1 to 65536, but is 131072"),
    ({"fp8_recipe": "rowwise"}, "fp8_recipe must be 'delayed' without fp8_format, but is 'rowwise'"),
    ({"fp8_margin": 9}, "fp8_margin must be 0 without fp8_format, but is 9"),
    ({"fp8_wgrad": False}, "fp8_wgrad must be true without fp8_format, but is false"),
    ({"first_last_layers_bf16": True}, "first_last_layers_bf16 must be false without fp8_format, but is true"),
    (
        {"fp8_amax_history_len": 32, "fp8_recipe": "tensorwise"} | FP8,
        "fp8_amax_history_len must be 16 with fp8_recipe 'tensorwise', whose scales come from no steps before, but is 32",
    ),
    (
        {"fp8_amax_compute_algo": "most_recent", "fp8_recipe": "rowwise"} | FP8,
        "fp8_amax_compute_algo must be 'max' with fp8_recipe 'rowwise', whose scales come from no steps before, but is "
        "'most_recent'",
    ),
    (
        {"fp8_margin": 1, "fp8_recipe": "rowwise"} | FP8,
        "fp8_margin must be 0 with fp8_recipe 'rowwise', whose scales leave nothing free, but is 1",
    ),
    (
        {"num_layers_at_end_in_bf16": 2} | FP8,
        "num_layers_at_end_in_bf16 must be 1 without first_last_layers_bf16, but is 2",
    ),
    (
        {"num_layers_at_start_in_bf16": -1, "first_last_layers_bf16": True} | FP8,
        "num_layers_at_start_in_bf16 must be at least 0, but is -1",
    ),
    (
        {"num_layers_at_start_in_bf16": 3, "first_last_layers_bf16": True} | FP8,
        "num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16 must be below num_layers, 4, together, but are 3 and 1: no "
        "block would run in eight bits",
    ),
    ({"fp8_format": "e5m2"}, "fp8_format must be 'hybrid' or 'e4m3' or None, but is 'e5m2'"),
    # types
    ({"num_layers": 2.0}, "num_layers must be a whole number, but is 2.0"),
    ({"num_layers": True}, "num_layers must be a whole number, but is True"),
    ({"ffn_hidden_size": "big"}, "ffn_hidden_size must be a whole number or None, but is 'big'"),
    ({"rotary_base": "1e4"}, "rotary_base must be a number, but is '1e4'"),
    ({"qk_layernorm": 1}, "qk_layernorm must be true or false, but is 1"),
    ({"normalization": "rms"}, "normalization must be 'RMSNorm' or 'LayerNorm', but is 'rms'"),
    ({"recompute_granularity": "some"}, "recompute_granularity must be 'selective' or 'full' or None, but is 'some'"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED, ids=lambda each: "-".join(each) if isinstance(each, dict) else "")
def test_contradictions_raise_and_say_what_must_be(settings, said):
    with pytest.raises(ValueError) as error:
        Config(**settings)
    assert str(error.value) == said


ALLOWED = [  # what Megatron refuses, or accepts and then can't do
    {"activation_func": "quick_gelu", "glu_linear_offset": 1.0},
    {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
    {"gated_linear_unit": False, "activation_func": "gelu"},
    {"gated_linear_unit": False, "activation_func": "silu", "activation_func_fp8_input_store": True},
    {"gated_linear_unit": False, "activation_func": "squared_relu", "cpu_offloading": True},
    {"layernorm_zero_centered_gamma": True, "norm_fusion": False},
    {"memory_efficient_layer_norm": True, "persist_layer_norm": False},
    {"tensor_model_parallel_size": 2, "vocab_size": 1023},
    {"rotary_percent": 0.25, "position_embedding_type": "none", "kv_channels": 6},
    MOE | {"moe_router_topk": 4, "add_qkv_bias": True},
    STAGES | {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 3, "cross_entropy_fusion_impl": "native"},
    STAGES | {"num_layers": 3},
    FP8 | MOE | {"fp8_recipe": "rowwise", "fp8_wgrad": False},
    FP8 | {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 3},
    STAGES | {"num_layers": 3} | FIRST | {"num_layers_in_last_pipeline_stage": 2, "virtual_pipeline_model_parallel_size": 1},
]


@pytest.mark.parametrize("settings", ALLOWED, ids=lambda settings: "-".join(settings))
def test_what_our_ops_can_do_is_allowed(settings):
    assert all(getattr(Config(**settings), name) == value for name, value in settings.items())


def test_every_contradiction_is_in_the_table():
    ran = set()

    def trace(frame, event, argument):
        if frame.f_code.co_filename != contradictions.__file__:
            return None
        ran.add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        for settings, _ in REFUSED:
            with contextlib.suppress(ValueError):
                Config(**settings)
    finally:
        sys.settrace(None)
    statements = [node for node in ast.walk(ast.parse(Path(contradictions.__file__).read_text())) if isinstance(node, ast.Expr)]
    yields = [node for node in statements if isinstance(node.value, ast.Yield)]
    assert len(yields) > 30
    assert not [node.lineno for node in yields if not ran & set(range(node.lineno, node.end_lineno + 1))]


def test_which_blocks_run_in_eight_bits():
    config = Config(num_layers=5, first_last_layers_bf16=True, num_layers_at_end_in_bf16=2, fp8_margin=1, **FP8)
    recipe = FP8Recipe(margin=1)
    assert [config.precision(layer) for layer in range(5)] == [None, recipe, recipe, None, None]
    for name, scaling in (("tensorwise", "current"), ("rowwise", "row")):
        assert Config(fp8_format="e4m3", fp8_recipe=name, fp8_wgrad=False).precision(0) == FP8Recipe(scaling, "e4m3", wgrad=False)
    assert Config().precision(0) is None and config.reference().precision(2) is None
    model = Model(config.replace(num_moe_experts=2), device="meta", seed=0)
    assert {name for name, module in model.named_modules() if getattr(module, "precision", None)} == {
        f"layers.{layer}.{part}"
        for layer in (1, 2)
        for part in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.experts")
    }


def test_it_is_frozen_and_equal_by_value():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 3
    assert config == Config(rotary_base=10000) != Config(rotary_base=1)
    assert hash(config) == hash(Config())
    with pytest.raises(TypeError):
        Config(3)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(hidden_size=768, num_attention_heads=12), 2048),
        (Config(hidden_size=4096), 11008),
        (Config(hidden_size=128, gated_linear_unit=False), 512),
        (Config(ffn_hidden_size=100), 100),
    ],
    ids=repr,
)
def test_the_mlp_has_a_size_where_none_is_given(config, expected):
    assert config.ffn_size == expected


def test_what_follows_from_the_fields():
    config = Config(hidden_size=128, num_attention_heads=8, num_query_groups=2, rotary_percent=0.5)
    assert (config.head_size, config.query_groups, config.rotary_size, config.tied) == (16, 2, 8, True)
    assert Config(kv_channels=5, position_embedding_type="none").head_size == 5
    assert (Config().activation, Config(activation_func="gelu").activation) == ("swiglu", "geglu")
    assert Config(activation_func="gelu_exact").activation == "geglu_exact"
    assert Config(gated_linear_unit=False, activation_func="gelu_exact").activation == "gelu_exact"
    saves = {"fp8": {"activation_func_fp8_input_store": True}, "offload": {"cpu_offloading": True}, "input": {}}
    assert all(Config(**settings).activation_save == save for save, settings in saves.items())
    assert Config(params_dtype="bf16").dtype is torch.bfloat16
    assert Config(moe_ffn_hidden_size=8, **MOE).expert_size == 8 and Config(**MOE).expert_size == Config().ffn_size
    virtual = {"virtual_pipeline_model_parallel_size": 2}, {"num_layers_per_virtual_pipeline_stage": 1}, {}
    assert [Config(**STAGES | given).stages_per_rank for given in virtual] == [2, 2, 1]
    assert [Config(**{name: True}).qkv_bias for name in ("add_bias_linear", "add_qkv_bias")] == [True, True]


COUNTED = [
    {},
    {"add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"},
    {"gated_linear_unit": False, "add_qkv_bias": True, "untie_embeddings_and_output_weights": True, "num_query_groups": 2},
    {"qk_layernorm": True, "kv_channels": 6, "normalization": "LayerNorm"},
    {"num_moe_experts": 3, "moe_ffn_hidden_size": 16},
]


@pytest.mark.parametrize("settings", COUNTED, ids=lambda settings: "-".join(settings) or "defaults")
def test_parameters_are_counted(settings):
    config = Config(num_layers=3, hidden_size=32, ffn_hidden_size=48, vocab_size=50, max_position_embeddings=16, **settings)
    assert config.parameters_count() == sum(p.numel() for p in Model(config, device="meta", seed=0).parameters())


def test_flops_count_what_is_in_use():
    """Products of 2 flops a multiply-add, three times for forward and backward; small parameters count too."""
    shape = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 100, "max_position_embeddings": 32}
    attention = 6 * 2 * 64 * 16
    linears = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 100
    norms = 5 * 64
    assert Config(**shape).flops_per_token(16) == 6 * (linears + norms) + attention
    untied = Config(**shape, untie_embeddings_and_output_weights=True, position_embedding_type="learned_absolute")
    assert untied.flops_per_token(16) == Config(**shape).flops_per_token(16)
    experts = Config(**shape, num_moe_experts=8, moe_router_topk=2)
    assert experts.flops_per_token(16) - Config(**shape).flops_per_token(16) == 6 * 2 * (3 * 64 * 128 + 8 * 64)


def test_the_reference_has_every_fusion_off_and_the_same_shape():
    more = {"activation_func_fp8_input_store": True, "memory_efficient_layer_norm": True, "fp32_logits": True}
    config = preset("tiny", qk_layernorm=True, **more)
    plain = config.reference()
    fusions = {flag.field for flag in Config.flags() if flag.field.endswith("_fusion")} | {"norm_fusion"}
    assert not any(getattr(plain, name) for name in fusions | more.keys()) and plain.activation_save == "input"
    assert plain.parameters_count() == config.parameters_count() and plain.qk_layernorm
    assert plain.reference() == plain


# ---- files ----


def test_yaml_there_and_back(tmp_path):
    for name in PRESETS:
        path = tmp_path / f"{name}.yaml"
        path.write_text(preset(name, params_dtype="bf16").to_yaml())
        assert Config.from_yaml(path) == preset(name, params_dtype="bf16")


def test_yaml_takes_numbers_as_people_write_them(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("layernorm_epsilon: 1e-6\nrotary_base: 500000\nqk_layernorm: true\nnum_query_groups: null\n")
    assert Config.from_yaml(path) == Config(layernorm_epsilon=1e-6, rotary_base=500000.0, qk_layernorm=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hiden_size: 64", "'hiden_size' is no setting; did you mean 'hidden_size'?"),
        ("xyzzy: 1", "'xyzzy' is no setting"),
        ("- 64", "{path} must hold settings, one a line, as `hidden_size: 768`, but is [64]"),
        ("", "{path} must hold settings, one a line, as `hidden_size: 768`, but is None"),
    ],
    ids=("near", "far", "list", "empty"),
)
def test_yaml_that_is_no_configuration(text, said, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        Config.from_yaml(path)
    assert str(error.value) == said.format(path=path)


def test_without_yaml_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"needs PyYAML: pip install '.\[train\]' in a clone"):
        Config().to_yaml()


# ---- flags ----


def test_every_field_is_a_flag_with_a_help_text():
    made = Config.flags()
    assert [flag.field for flag in made] == [field.name for field in dataclasses.fields(Config)]
    assert all(flag.help and flag.on.startswith("--") for flag in made)
    named = [name for flag in made for name in (flag.on, flag.off) if name]
    assert len(named) == len(set(named))


@pytest.mark.parametrize(
    ("field", "on", "off", "kind"),
    [
        ("hidden_size", "--hidden-size", None, int),
        ("layernorm_epsilon", "--norm-epsilon", None, float),
        ("layernorm_zero_centered_gamma", "--apply-layernorm-1p", "--no-apply-layernorm-1p", bool),
        ("bias_activation_fusion", "--bias-activation-fusion", "--no-bias-activation-fusion", bool),
        ("norm_fusion", "--norm-fusion", "--no-norm-fusion", bool),
        ("persist_layer_norm", "--persist-layer-norm", "--no-persist-layer-norm", bool),
        ("add_bias_linear", "--add-bias-linear", "--disable-bias-linear", bool),
        ("apply_rope_fusion", "--rope-fusion", "--no-rope-fusion", bool),
        ("attention_fusion", "--attention-fusion", "--no-attention-fusion", bool),
        ("num_moe_experts", "--num-experts", None, int),
        ("num_layers_in_first_pipeline_stage", "--decoder-first-pipeline-num-layers", None, int),
        ("num_layers_in_last_pipeline_stage", "--decoder-last-pipeline-num-layers", None, int),
        ("virtual_pipeline_model_parallel_size", "--num-virtual-stages-per-pipeline-rank", None, int),
        ("normalization", "--normalization", None, str),
    ],
)
def test_flags_have_megatrons_names(field, on, off, kind):
    (flag,) = (flag for flag in Config.flags() if flag.field == field)
    assert (flag.on, flag.off, flag.type) == (on, off, kind)
    assert flag.default == getattr(Config(), field)
    assert flag.choices == (("RMSNorm", "LayerNorm") if field == "normalization" else ())


# ---- presets ----


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 1.115), ("124M", 124.476), ("350M", 354.871), ("1B", 1235.814), ("7B", 6738.416), ("8B", 8030.261)],
)
def test_presets_have_their_size(name, millions):
    assert preset(name).parameters_count() / 1e6 == pytest.approx(millions, abs=1e-3)


def test_presets_take_changes_and_say_what_is_wrong():
    assert preset("124M", num_layers=2).num_layers == 2
    with pytest.raises(
        ValueError, match=r"must be one of tiny, 124M, 350M, 1B, 7B, 8B, 70B, 405B, but is '124m'; did you mean '124M'\?"
    ):
        preset("124m")
    with pytest.raises(ValueError, match="'num_layer' is no setting; did you mean 'num_layers'"):
        preset("tiny", num_layer=3)
