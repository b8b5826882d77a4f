"""Mixtures of experts of every family: by `apply`, and by transformers' `experts_implementation="onepass"`."""

import copy
import functools
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, both, made, step  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402
from onepass.integrations.huggingface import applied as applied_module  # noqa: E402
from onepass.integrations.huggingface import dense_experts, experts_interface  # noqa: E402
from onepass.integrations.huggingface import expert_trials as trials  # noqa: E402
from onepass.integrations.huggingface import experts as experts_module  # noqa: E402
from onepass.integrations.huggingface.expert_trials import Gate, find_gate  # noqa: E402
from onepass.integrations.huggingface.experts import find_experts  # noqa: E402
from onepass.integrations.huggingface.probe import fresh_defaults  # noqa: E402
from onepass.runtime.dispatch import TORCH  # noqa: E402
from onepass.testing.mutants import mutate  # noqa: E402


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


WHOLE = TORCH >= (2, 10)  # before, the compiler can't take rows between numbers that it doesn't know
_SWIGLU = "grouped products, swiglu"
MIXTURES = {  # a family, and what the report says of its experts
    **dict.fromkeys(
        (
            "Mixtral", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3_5MoeText", "DeepseekV3", "Glm4Moe", "Ernie4_5_Moe", "MiniMax",
            "MiniMaxM2", "GraniteMoe",
        ),
        _SWIGLU,
    ),
    "GptOss": "grouped products, quick_geglu, clamped at 7, offset 1, interleaved",
    "NemotronH": "grouped products, squared_relu",
    "Llama4Text": "grouped products of chosen rows, swiglu",
}  # fmt: skip
BY_APPLY_ALONE = "Llama4Text"  # transformers has no implementations to choose from
BY_NAME = tuple(name for name in MIXTURES if name != BY_APPLY_ALONE)


def enlarged(model):
    """Make gates and clamps matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "expert" in name:
                parameter.normal_(std=2.0 if "bias" in name else 1.0)
    return model


pytestmark = pytest.mark.filterwarnings(
    "ignore:.*RoPE scaling factor",
    "ignore:.*gradient_checkpointing:FutureWarning",  # transformers' own
)


# ---- models ----


@pytest.mark.parametrize("family", MIXTURES)
def test_apply_replaces_the_experts_of_every_family(family):
    model = enlarged(made(family))
    before = copy.deepcopy(model)
    applied = huggingface.apply(model)
    assert {row.by for row in applied.replaced if row.part == "mlp" and "grouped" in row.by} == {MIXTURES[family]}
    assert not [row for row in applied.left if "experts" in row.kind.lower()]
    assert_alike(step(model, **batch()), step(before, **batch()))


@pytest.mark.parametrize("family", BY_NAME)
def test_the_implementation_of_every_family(family):
    model = enlarged(made(family))
    before = copy.deepcopy(model)
    before.set_experts_implementation("eager")
    model.set_experts_implementation("onepass")
    assert model.get_experts_implementation()[""] == "onepass"
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_a_model_that_is_loaded(tmp_path, monkeypatch):
    made("Qwen3Moe").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="onepass").train()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert_alike(step(model, **batch()), step(plain, **batch()))
    calls = []
    monkeypatch.setattr(experts_interface, "experts", lambda x, *_, **__: calls.append(x.shape) or x)
    model(**batch())
    assert calls == [(24, 32)] * 2


@pytest.mark.parametrize("family", ("Mixtral", "GptOss", "NemotronH"))
def test_apply_takes_a_model_of_either_implementation(family):
    model = enlarged(made(family))
    before = copy.deepcopy(model)
    model.set_experts_implementation("onepass")
    applied = huggingface.apply(model)
    assert MIXTURES[family] in {row.by for row in applied.replaced}
    assert_alike(step(model, **batch()), step(before, **batch()))


@pytest.mark.parametrize("how", ("kernels", "checkpointing"))
@pytest.mark.parametrize("family", ("GptOss", "NemotronH", BY_APPLY_ALONE))
def test_a_step_by_kernels_and_with_checkpointing(family, how):
    model = enlarged(made(family))
    before = copy.deepcopy(model)
    if family == BY_APPLY_ALONE:
        huggingface.apply(model)
    else:
        model.set_experts_implementation("onepass")
    expected = step(before, **batch())
    if how == "checkpointing":
        model.gradient_checkpointing_enable()
    with onepass.use_backend("auto" if how == "kernels" else "torch"):
        assert_alike(step(model, **batch()), expected)


@pytest.mark.parametrize("implementation", ("grouped_mm", "onepass"))
def test_autocast_leaves_the_type_of_hidden_states(implementation):
    module = gpt_oss()
    module.config._experts_implementation = implementation
    with torch.autocast("cpu", torch.bfloat16):
        assert module(*INPUTS).dtype is torch.float32


def test_evaluation_and_generation_are_the_same():
    model = enlarged(made("GptOss", output_router_logits=False)).eval()
    before = copy.deepcopy(model)
    model.set_experts_implementation("onepass")
    ids = batch()["input_ids"]
    for options in ({}, {"labels": ids}):
        with torch.no_grad():
            torch.testing.assert_close(model(ids, **options).logits, before(ids, **options).logits, rtol=1e-4, atol=1e-4)
    written = [each.generate(ids, max_new_tokens=4, do_sample=False) for each in (model, before)]
    assert written[0].equal(written[1])


# ---- compilers ----


@pytest.mark.slow
@pytest.mark.parametrize(("family", "how"), (("Mixtral", "apply"), ("GptOss", "implementation")))
def test_compiled_as_one_graph(family, how):
    model = enlarged(made(family, num_hidden_layers=1, output_router_logits=False))
    before = copy.deepcopy(model)
    if how == "apply":
        huggingface.apply(model)
    else:
        model.set_experts_implementation("onepass")
    given = batch() | {"use_cache": False}
    assert_alike(step(torch.compile(model, fullgraph=WHOLE, backend="aot_eager"), **given), step(before, **given))


@pytest.mark.skipif(not WHOLE, reason="PyTorch 2.9 breaks the graph")
def test_layers_that_are_compiled_by_themselves_share_a_graph():
    model, count = made("Mixtral", num_hidden_layers=3), CompileCounter()
    model.set_experts_implementation("onepass")
    x, chosen, weights = torch.randn(6, 32), torch.tensor([[0, 1]] * 6), torch.rand(6, 2)
    for layer in model.model.layers:
        layer.mlp.experts.compile(backend=count, fullgraph=True)
        layer.mlp.experts(x, chosen, weights)
    assert count.frame_count == 1
    layer.mlp.experts.act_fn = nn.ReLU()
    expected = type(layer.mlp.experts).forward(layer.mlp.experts, x, chosen, weights)
    torch.testing.assert_close(layer.mlp.experts(x, chosen, weights), expected)
    assert count.frame_count == 2


# ---- every class that transformers has ----


class _Sizes(SimpleNamespace):
    """A configuration of small experts of any family."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        sizes = 4 if "experts" in name else 3.0 if "softcap" in name else 12 if "inter" in name else 16
        return _OTHERS.get(name, sizes)


_OTHERS = {
    "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh", "mlp_hidden_act": "relu2", "moe_latent_size": None,
    "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "post_norm_eps": 1e-6,
}  # fmt: skip


def decorated():
    """Yield the classes whose experts have implementations to choose from."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        names = re.findall(r"^@use_experts_implementation.*\nclass (\w+)", path.read_text(), re.MULTILINE)
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}") if names else None
        yield from (getattr(module, name) for name in names)


REFUSED = {
    "MuseSparkExperts": "norms each expert's result before the sum",
    "Inkling2Experts": "has an activation that onepass hasn't",
    "Inkling2LoopExperts": "has an activation that onepass hasn't",
}


def small(kind, **sizes):
    module = kind(_Sizes(_experts_implementation="eager", **sizes))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.slow
def test_every_class_is_computed_or_refused():
    classes = list(decorated())
    assert len(classes) > 20
    x, weights, chosen = 2 * torch.randn(7, 16), torch.rand(7, 2), torch.rand(7, 4).topk(2).indices
    for kind in classes:
        module = small(kind)
        expected = module(x, chosen, weights)
        module.config._experts_implementation = "onepass"
        if kind.__name__ in REFUSED:
            does = f"{kind.__name__} {REFUSED[kind.__name__]}"
            with pytest.raises(ValueError, match=f'must not be "onepass" for this model: {does}. Load it with .*grouped_mm'):
                module(x, chosen, weights)
        else:
            found = module(x, chosen, weights)
            assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), kind.__name__
        with fresh_defaults():
            assert (find_experts(module) is None) is (kind.__name__ in REFUSED), kind.__name__


def gpt_oss(**changes):
    module = small(importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss").GptOssExperts)
    vars(module).update(changes)
    return module


INPUTS = torch.randn(6, 16), torch.tensor([[0, 1], [1, 2], [3, 0]] * 2), torch.rand(6, 2)


@pytest.mark.parametrize("changes", ({"limit": 1.5}, {"limit": 2}, {"alpha": 1.702, "limit": 100.0}))
def test_numbers_that_are_changed_are_what_runs(changes):
    module = gpt_oss(**changes)
    expected = module(*INPUTS)
    module.config._experts_implementation = "onepass"
    torch.testing.assert_close(module(*INPUTS), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "does"),
    (
        ({"alpha": 1.5}, "has an activation that onepass hasn't"),
        ({"_is_expert_parallel": True}, "runs its experts on several ranks"),
        ({"has_post_expert_norm": True}, "norms each expert's result before the sum"),
    ),
)
def test_what_is_refused(changes, does):
    module = gpt_oss(**changes)
    module.config._experts_implementation = "onepass"
    with pytest.raises(ValueError, match=f'GptOssExperts {does}. Load it with experts_implementation="grouped_mm"'):
        module(*INPUTS)


ACTIVATIONS = {"another": nn.Tanh(), "with a parameter": nn.PReLU(), "with an argument": nn.Threshold(0.1, 0.0), "none": None}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_that_are_refused(name):
    module = small(importlib.import_module("transformers.models.mixtral.modeling_mixtral").MixtralExperts)
    module.act_fn, module.config._experts_implementation = ACTIVATIONS[name], "onepass"
    with pytest.raises(ValueError, match="MixtralExperts has an activation that onepass hasn't"):
        module(*INPUTS)


@pytest.mark.parametrize(("approximate", "name"), (("tanh", "geglu"), ("none", "geglu_exact")))
def test_an_activation_with_an_option(approximate, name, monkeypatch):
    module = small(importlib.import_module("transformers.models.mixtral.modeling_mixtral").MixtralExperts)
    module.act_fn = nn.GELU(approximate)
    expected = module(*INPUTS)
    module.config._experts_implementation = "onepass"
    torch.testing.assert_close(module(*INPUTS), expected, rtol=1e-5, atol=1e-4)
    asked = []
    monkeypatch.setattr(experts_interface, "experts", lambda x, *args, **_: asked.append(args[4]) or x)
    module(*INPUTS)
    assert asked == [name]


def test_the_name_is_registered_once():
    assert ALL_EXPERTS_FUNCTIONS["onepass"] is experts_interface.onepass_experts_forward
    copied = mutate(experts_interface, "onepass_experts_forward", "self.is_transposed", "False", entry=experts_interface)
    assert copied is not experts_interface
    copied.register()
    assert ALL_EXPERTS_FUNCTIONS["onepass"] is experts_interface.onepass_experts_forward


# ---- what stands between the products ----

silu = torch.nn.functional.silu


def clamped(h, gate=7.0, linear=7.0, offset=1.0):
    a, b = h.chunk(2, -1)
    return silu(a.clamp(max=gate)) * (b.clamp(-linear, linear) + offset)


GATES = {
    "plain": (lambda h: clamped(h, 1e9, 1e9, 0.0), Gate("swiglu")),
    "clamped": (lambda h: clamped(h, 0.75, 0.75, 0.0), Gate("swiglu", 0.75)),
    "offset": (lambda h: clamped(h, 1e9, 1e9), Gate("swiglu", None, 1.0)),
    "in fp32": (lambda h: clamped(h.float()).double(), Gate("swiglu", 7.0, 1.0)),
    "interleaved": (
        lambda h: silu(h[:, ::2]) * h[:, 1::2],
        Gate("swiglu", interleaved=True),
    ),
    "the gate alone clamped": (lambda h: clamped(h, 7.0, 1e9), None),
    "the linear half alone clamped": (lambda h: clamped(h, 1e9, 7.0), None),
    "clamped after the activation": (lambda h: silu(h[:, :6]).clamp(max=7.0) * h[:, 6:].clamp(-7.0, 7.0), None),
    "the gate clamped below too": (lambda h: clamped(h.clamp(min=-7.0)), None),
    "another offset": (lambda h: clamped(h, offset=0.5), None),
    "halves the other way round": (lambda h: h[:, :6] * silu(h[:, 6:]), None),
    "something added": (lambda h: clamped(h) + 1e-3, None),
    "nothing": (lambda h: None, None),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name):
    run, gate = GATES[name]
    assert find_gate(run, True) == gate


def test_activations_without_a_gate():
    assert find_gate(silu, False) == Gate("silu")
    assert find_gate(lambda h: torch.relu(h).square(), False) == Gate("squared_relu")
    assert find_gate(lambda h: torch.relu(h).clamp(max=6.0), False) is None


# ---- Llama 4's ----


def both_llama_4():
    model, before, applied = both(BY_APPLY_ALONE)
    return enlarged(model), before.load_state_dict(model.state_dict()) and before, applied


CHANGES = {
    "a hook on the experts": lambda mixture: mixture.experts.register_forward_hook(lambda module, given, y: 2 * y),
    "a hook on the shared expert": lambda mixture: mixture.shared_expert.register_forward_hook(lambda module, given, y: 2 * y),
    "a hook on the router": lambda mixture: mixture.router.register_forward_hook(lambda module, given, y: (2 * y[0], y[1])),
    "another activation": lambda mixture: setattr(mixture.experts, "act_fn", nn.ReLU()),
    "more experts of a token": lambda mixture: setattr(mixture.router, "top_k", 3),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_after_apply_is_what_runs(what):
    model, before, applied = both_llama_4()
    unchanged = step(before, **batch())
    for each in (model, before):
        CHANGES[what](each.model.layers[1].feed_forward)
    expected = step(before, **batch())
    assert abs(expected[0] - unchanged[0]) > 1e-5
    assert_alike(step(model, **batch()), expected)
    (row,) = [row for row in applied.rows if row.name == "model.layers.1.feed_forward"]
    assert (row.by is None) is ("shared" not in what)


def test_in_eight_bits_its_experts_keep_their_type():
    applied = huggingface.apply(made(BY_APPLY_ALONE), precision="fp8")
    why = {row.why for row in applied.rows if row.part == "precision" and row.kind == "Llama4TextExperts"}
    assert why == {"experts of chosen rows keep their type"}


def test_only_the_chosen_rows_are_multiplied(monkeypatch):
    model, _, _ = both_llama_4()
    rows, run = [], dense_experts.ExpertsMatch.__call__
    monkeypatch.setattr(
        dense_experts.ExpertsMatch, "__call__", lambda self, x, *given: rows.append(len(x)) or run(self, x, *given)
    )
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each(**batch())
    assert rows == [48] * 4


def derived(module, forward):
    """Give a module's class another forward."""
    kind = type(module)
    module.__class__ = type("Derived", (kind,), {"forward": lambda self, x: forward(functools.partial(kind.forward, self), x)})


NEARLY = {
    "scores of all": lambda mixture: derived(mixture.router, lambda stock, x: (stock(x)[1].sigmoid(), stock(x)[1])),
    "scores of more for some": lambda mixture: derived(mixture.router, lambda stock, x: (stock(x)[1].clamp(min=0), stock(x)[1])),
    "experts' outputs scaled": lambda mixture: derived(mixture.experts, lambda stock, x: 2 * stock(x)),
    "experts in another order": lambda mixture: derived(
        mixture.experts,
        lambda stock, x: stock(x.view(len(stock.args[0].down_proj), -1, x.shape[-1]).roll(1, 0).flatten(0, 1)),
    ),
    "the sum scaled": lambda mixture: derived(mixture, lambda stock, x: (2 * stock(x)[0], stock(x)[1])),
}


@pytest.mark.parametrize("what", NEARLY)
def test_what_is_nearly_llama_4s_is_left(what):
    model = made(BY_APPLY_ALONE)
    for layer in model.model.layers:
        NEARLY[what](layer.feed_forward)
    applied = huggingface.apply(model)
    assert not [row for row in applied.replaced if "grouped" in row.by]


# ---- mutants: what the tests above would catch ----


def gates_are_found(mutant):
    assert all(mutant.find_gate(run, True) == gate for run, gate in GATES.values())


def implementation_is_right(mutant):
    nemotron = small(importlib.import_module("transformers.models.nemotron_h.modeling_nemotron_h").NemotronHExperts)
    gelu = small(importlib.import_module("transformers.models.mixtral.modeling_mixtral").MixtralExperts)
    gelu.act_fn = nn.GELU("tanh")
    for module in (gpt_oss(), gpt_oss(limit=1.5), nemotron, gelu):
        torch.testing.assert_close(mutant.onepass_experts_forward(module, *INPUTS), module(*INPUTS), rtol=1e-5, atol=1e-4)


def applied_is_right(mutant):
    for family in ("GptOss", BY_APPLY_ALONE):
        model = enlarged(made(family))
        before = copy.deepcopy(model)
        found = {row.by for row in mutant.apply(model).replaced}
        assert MIXTURES[family] in found
        assert_alike(step(model, **batch()), step(before, **batch()))
    for change in NEARLY.values():
        model = made(BY_APPLY_ALONE)
        change(model.model.layers[0].feed_forward)
        applied = mutant.apply(model)
        assert "model.layers.0.feed_forward" not in {row.name for row in applied.replaced}


CATCHES = {trials: gates_are_found, experts_interface: implementation_is_right}  # others are seen by `apply`
MUTANTS = {
    "linear halves first": (trials, "_halves", "h[..., ::2], h[..., 1::2]", "h[..., 1::2], h[..., ::2]"),
    "the gate clamped below": (trials, "Gate.formula", "gate.clamp(max=self.clamp)", "gate.clamp(-self.clamp, self.clamp)"),
    "no rows beyond the clamp": (trials, "find_gate", "rows * 4 * (gate.clamp or 8.0)", "rows"),
    "the offset in the clamp": (trials, "_candidates", "most - offset", "most"),
    "the clamp to one digit": (trials, "_candidates", ":.6g", ":.1g"),
    "no offset": (trials, "_candidates", "(0.0, 1.0)", "(0.0,)"),
    "a large clamp is none": (trials, "_candidates", "_LARGE / 2", "5"),
    "by name: no clamp": (experts_interface, "onepass_experts_forward", "clamp=gate.clamp", "clamp=None"),
    "by name: no offset": (experts_interface, "onepass_experts_forward", "=gate.linear_offset", "=0.0"),
    "by name: halves": (experts_interface, "onepass_experts_forward", "=gate.interleaved", "=False"),
    "by name: not transposed": (experts_interface, "onepass_experts_forward", "=self.is_transposed", "=False"),
    "by name: no bias up": (experts_interface, "onepass_experts_forward", "getattr(self, up_bias) if", "None if"),
    "by name: no bias down": (experts_interface, "onepass_experts_forward", "self.down_proj_bias if", "None if"),
    "by name: whole numbers alone": (experts_interface, "_numbers", "(int, float, str)", "(int, str)"),
    "by name: the activation's defaults": (experts_interface, "_made", "vars(made).update(numbers)", "pass"),
    "not transposed": (experts_module, "ExpertsMatch.__call__", '"transposed": layout.transposed', '"transposed": False'),
    "no bias up": (experts_module, "ExpertsMatch.__call__", '("up_bias", layout.up_bias)', '("up_bias", None)'),
    "no bias down": (experts_module, "ExpertsMatch.__call__", '("down_bias", layout.down_bias)', '("down_bias", None)'),
    "dense: fewer of a token": (dense_experts, "DenseExpertsMatch.__call__", "topk(self.k)", "topk(1)"),
    "dense: scores after": (dense_experts, "DenseExpertsMatch.__call__", "* scores.unsqueeze(2)", "* scores.unsqueeze(2).sign()"),
    "dense: nothing shared": (dense_experts, "DenseExpertsMatch.__call__", "shared(x) + y", "y"),
    "dense: scores of all": (dense_experts, "_choices_of", "if not others and", "if"),
    "dense: any experts": (dense_experts, "_gate_of", "return gate if close(", "return gate if None is not ("),
    "dense: any sum": (dense_experts, "_sums", "and close(found[0], expected)", ""),
}


@pytest.mark.parametrize("module", (*CATCHES, applied_module), ids=lambda module: module.__name__)
def test_what_mutants_are_tried_on_is_right(module):
    CATCHES.get(module, applied_is_right)(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    monkeypatch.setenv("ONEPASS_BACKEND", "torch")  # a mutant has a use_backend of its own
    module = MUTANTS[name][0]
    with monkeypatch.context() as patched:
        patched.delenv("TRITON_INTERPRET", raising=False)  # the copy runs formulas
        mutant = mutate(*MUTANTS[name], entry=module if module in CATCHES else applied_module)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        CATCHES.get(module, applied_is_right)(mutant)


def test_a_mixture_named_mlp_has_the_rows_of_its_parts_alone():
    rows = [row for row in huggingface.apply(made("GptOss")).rows if row.part == "mlp"]
    assert {(row.kind, row.why) for row in rows} == {("GptOssExperts", None), ("GptOssTopKRouter", None)}
