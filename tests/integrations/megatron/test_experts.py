"""Local experts by grouped products, beside Megatron's SequentialMLP: results, gradients, and checkpoints both ways."""

import pytest
import torch
import torch.nn.functional as F
from integrations.megatron.test_megatron import KINDS, config_of, model_of, step

from onepass.integrations import megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]

H, INNER = 32, 24
EXPERTS = KINDS["experts"] | {"num_moe_experts": 4, "moe_ffn_hidden_size": INNER, "moe_grouped_gemm": True}
COUNTS = [[3, 0, 5, 2], [0, 0, 4, 0], [0, 0, 0, 0]]


def quick_geglu():
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    options = {"activation_func": quick_gelu, "bias_activation_fusion": True}
    return options | {"activation_func_clamp_value": 9.0, "glu_linear_offset": 1.0}


def squared_relu():
    from megatron.core.activations import squared_relu

    return {"activation_func": squared_relu, "gated_linear_unit": False}


CASES = {  # options beside EXPERTS
    "swiglu": dict, "swiglu, fused": lambda: {"bias_activation_fusion": True},
    "biases": lambda: {"add_bias_linear": True, "activation_func": F.gelu, "gated_linear_unit": False},
    "clamp and offset": lambda: {"activation_func_clamp_value": 0.3, "glu_linear_offset": 0.5, "add_bias_linear": True},
    "quick_geglu, fused": quick_geglu,
    "squared_relu": squared_relu,
    "weights of the input": lambda: {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}  # fmt: skip


def experts_of(stock, dtype=torch.float64, count=4, **options):
    """Build a MoELayer's experts, all of whose parameters are random: stock's, or ours with the same values."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = config_of(**EXPERTS | {"params_dtype": dtype} | options)
    provider = LocalSpecProvider() if stock else megatron.spec_provider()()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    generator = torch.Generator().manual_seed(3)
    experts = provider.grouped_mlp_modules(True)(count, config, pg_collection=groups)
    assert type(experts).__name__ == ("SequentialMLP" if stock else "GroupedSequentialMLP")
    for expert in experts.local_experts if stock else ():
        expert.linear_fc2.explicit_expert_comm = True  # as over ranks: on one, autograd refuses stock's sum of a bias
    values = {
        key: value if value is None else torch.randn(value.shape, generator=generator, dtype=dtype) / 3
        for key, value in sorted(experts.state_dict().items())
    }
    experts.load_state_dict(values)
    return experts


def gradients(experts):
    """Return gradients by stock's names: main_grads where there are any."""
    found = {}
    for name, parameter in experts.named_parameters():
        grad = getattr(parameter, "main_grad", parameter.grad)
        of_one = name.startswith("local_experts.")
        found |= {name: grad} if of_one else {f"local_experts.{e}.{name}": part for e, part in enumerate(grad)}
    return found


def run(experts, counts):
    """Return y and the gradients of rows, of the router's weights and of parameters."""
    generator, dtype = torch.Generator().manual_seed(4), next(experts.parameters()).dtype
    x = torch.randn(sum(counts), H, generator=generator, dtype=dtype, requires_grad=True)
    probs = torch.rand(sum(counts), generator=generator, dtype=torch.float64).requires_grad_()
    y, bias = experts(x, torch.tensor(counts), probs)
    assert bias is None and y.dtype is dtype
    y.backward(torch.randn(y.shape, generator=generator, dtype=dtype))
    return {"y": y, "x": x.grad, "probs": probs.grad} | gradients(experts)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_as_stock(case, counts):
    """Experts without a row have gradients of zeros, where stock's have them too."""
    found, expected = (run(experts_of(stock, **CASES[case]()), counts) for stock in (False, True))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], torch.zeros_like(found[name]) if value is None else value, msg=name)


def test_a_fused_swiglu_is_clamped():
    """As the config says. Stock's loop over experts drops the clamp there, and its fused quick_geglu clamps before the bias."""
    clamped = {"activation_func_clamp_value": 0.3, "add_bias_linear": True}
    found, expected = (run(experts_of(stock, bias_activation_fusion=not stock, **clamped), COUNTS[0]) for stock in (False, True))
    torch.testing.assert_close(found, expected)


def test_one_expert_of_a_rank():
    found, expected = (run(experts_of(stock, count=1), [5]) for stock in (False, True))
    torch.testing.assert_close(found, expected)


def test_gradients_go_to_main_grad():
    options = {"add_bias_linear": True, "dtype": torch.float32}
    experts, expected = experts_of(False, **options), run(experts_of(False, **options), COUNTS[0])
    for parameter in experts.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    found = run(experts, COUNTS[0])
    assert all(parameter.grad is None for parameter in experts.parameters())
    of_weights = [name for name in expected if "linear" in name]
    torch.testing.assert_close({name: found[name] - 1 for name in of_weights}, {name: expected[name] for name in of_weights})


def test_inputs_are_kept_and_not_activations():
    """And layers are called as modules, whose hooks gather parameters."""
    experts, saved, called = experts_of(False), [], []
    x = torch.randn(10, H, dtype=torch.float64, requires_grad=True)
    for layer in (experts.linear_fc1, experts.linear_fc2):
        layer.register_forward_pre_hook(lambda *_: called.append(1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        experts(x, torch.tensor([3, 0, 5, 2]), torch.rand(10, dtype=torch.float64))
    assert (10, 2 * INNER) in saved and (10, INNER) not in saved and len(called) == 2


def test_optimizers_of_matrices_are_refused(installed):
    """They would step stacked weights by Adam, and the biases of all experts as one matrix."""
    from megatron.core import optimizer

    get = getattr(optimizer, "_get_megatron_emerging_optimizer", None) or optimizer.muon.get_megatron_muon_optimizer
    with pytest.raises(NotImplementedError, match=r"optimizer must step each number by itself.* but is muon: leave moe_grouped"):
        get(optimizer.OptimizerConfig(optimizer="muon"), [experts_of(False)], {})


def test_mup_takes_biases_for_vectors():
    optimizer = pytest.importorskip("megatron.core.optimizer")
    if not hasattr(optimizer, "get_mup_config_overrides"):
        pytest.skip("this megatron-core has no MuP")

    def rates(stock):
        overrides = optimizer.get_mup_config_overrides(optimizer.OptimizerConfig(lr=0.1, min_lr=0.0), 4.0)
        named = experts_of(stock, add_bias_linear=True).named_parameters()
        rates = [(key, own["max_lr"]) for key, own in overrides.items() if "max_lr" in own]
        return {name.rpartition("linear")[2]: [rate for key, rate in rates if key.matches(p, name)] for name, p in named}

    assert rates(False) == rates(True)


def test_topk_with_weights_of_the_input_is_refused():
    experts = experts_of(False)
    experts.config.moe_apply_probs_on_input = True
    with pytest.raises(ValueError, match="moe_router_topk must be 1 with moe_apply_probs_on_input, but is 2"):
        run(experts, COUNTS[0])


@pytest.mark.parametrize("grouped", [True, False])
def test_a_models_experts(grouped):
    """By the spec with moe_grouped_gemm, and by install in local specs; parameters start as stock's and carry its marks."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = config_of(**EXPERTS | {"moe_grouped_gemm": grouped})

    def local():
        return get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=grouped, normalization="RMSNorm")

    models = [model_of(config, local())]
    models[0].decoder.layers[0].mlp.experts.local_experts[0].linear_fc1.weight.sequence_parallel = "as before"
    installed = megatron.install()
    try:
        assert "LocalSpecProvider.grouped_mlp_modules: onepass" in str(installed)
        models.append(model_of(config, local()))
    finally:
        installed.undo()
    models += [model_of(config, megatron.gpt_layer_spec(config)), model_of(config, local())]
    kinds = [type(model.decoder.layers[0].mlp.experts).__name__ for model in models]
    ours = "GroupedSequentialMLP" if grouped else "SequentialMLP"
    assert kinds == ["SequentialMLP", ours, ours, "SequentialMLP"]
    stock, *others = map(step, models)
    assert others == [pytest.approx(stock, rel=2e-6)] * 3
    experts, theirs = (model.decoder.layers[0].mlp.experts for model in models[2:])
    if grouped:
        fc1, first = experts.linear_fc1.weight, theirs.local_experts[0].linear_fc1.weight
        assert fc1.shape == (4, 2 * INNER, H) and len(list(experts.parameters())) == 2
        assert vars(fc1) == vars(first) | {"partition_dim": 1} and fc1.allreduce is first.allreduce


def test_other_activations_are_megatrons():
    config = config_of(**EXPERTS | {"activation_func": torch.tanh})
    model = model_of(config, megatron.gpt_layer_spec(config))
    assert type(model.decoder.layers[0].mlp.experts).__name__ == "SequentialMLP"


# ---- checkpoints ----


def test_a_state_dict_is_stocks():
    (ours, stock), other = (experts_of(each, add_bias_linear=True) for each in (False, True)), experts_of(True, count=4)
    state = ours.state_dict(prefix="a.")
    assert state.keys() == stock.state_dict(prefix="a.").keys()
    torch.testing.assert_close(ours.state_dict(), stock.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        for parameter in (*ours.parameters(), *stock.parameters()):
            parameter.add_(1)
    stock.load_state_dict(ours.state_dict())
    torch.testing.assert_close(stock.state_dict(), ours.state_dict(), rtol=0, atol=0)
    incomplete = other.state_dict()
    del incomplete["local_experts.2.linear_fc1.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "linear_fc1.weight"'):
        experts_of(False).load_state_dict(incomplete)


def shards(state):
    """Return what a distributed checkpoint would have of a sharded state dict: keys, offsets and replicas, and numbers."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    apply_factories(state)
    found = {}
    for shard in nested_values(state):
        at = shard.key, shard.global_offset, shard.global_shape, shard.replica_id, getattr(shard, "dtype", None)
        found[at] = shard.data.clone() if isinstance(shard, ShardedTensor) else None
    return found


SHARDING = [{}, {"singleton_local_shards": True}]


@pytest.mark.parametrize("metadata", SHARDING, ids=["", "keys by expert"])
def test_shards_are_stocks(metadata):
    """Of the model and of its optimizer, under prefixes of layers that come later."""
    from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding

    found = []
    for stock in (False, True):
        experts, sharded = experts_of(stock, add_bias_linear=True), {}
        for layer in range(2):
            made = experts.sharded_state_dict(f"layers.{layer}.", ((0, layer, 2),), dict(metadata))
            replace_prefix_for_sharding(made, f"layers.{layer}.", "layers.")
            sharded |= made
        parameters = list(experts.parameters())
        of_parameters = get_param_id_to_sharded_param_map(made, iter(parameters))
        assert of_parameters.keys() == set(range(len(parameters)))
        moments = {
            name: make_sharded_optimizer_tensor(shard, parameters[name].detach() + 1, "optimizer.exp_avg")
            for name, shard in of_parameters.items()
        }
        found.append((shards(sharded), shards(moments)))
    for ours, theirs in zip(*found, strict=True):
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("stock", [False, True], ids=["ours to stock", "stock to ours"])
@pytest.mark.parametrize("metadata", SHARDING, ids=["", "keys by expert"])
def test_a_distributed_checkpoint_both_ways(stock, metadata, tmp_path, monkeypatch):
    from megatron.core import dist_checkpointing

    before, after = (experts_of(each, add_bias_linear=True) for each in (stock, not stock))
    expected = {key: value.clone() for key, value in before.state_dict().items() if value is not None}
    with torch.no_grad():
        for parameter in after.parameters():
            parameter.zero_()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    dist_checkpointing.save(before.sharded_state_dict("mlp.", metadata=dict(metadata)), tmp_path)
    loaded = dist_checkpointing.load(after.sharded_state_dict("mlp.", metadata=dict(metadata)), tmp_path)
    after.load_state_dict({key.removeprefix("mlp."): value for key, value in loaded.items()})
    found = {key: value for key, value in after.state_dict().items() if value is not None}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
