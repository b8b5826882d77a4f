"""What is changed in a model after `apply` is what runs: each module, hook and attribute that recognition has read."""

import copy
import importlib
import inspect
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize, prune

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import SMALL, assert_alike, batch, both, made, step

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface.linears import LINEARS_CHANGED
from onepass.integrations.huggingface.probe import probe, probe_forward
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, reads_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers' and PEFT's own


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def enlarge(model, before):
    """Give both the same weights, large enough for every part to matter."""
    with torch.no_grad():
        for p, other in zip(model.parameters(), before.parameters(), strict=True):
            p.copy_(other.add_(0.2 * torch.randn_like(other)))


def layers_of(model):
    return next(child for child in model.modules() if isinstance(child, nn.ModuleList))


class Scaled(nn.Module):
    """A module in another's place: twice what that makes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **options):
        found = self.inner(*args, **options)
        return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found


class OtherNorm(nn.Module):
    """A norm with a weight of its own, of another kind."""

    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x):
        return x / (1 + x.abs().mean(-1, keepdim=True)) * self.scale


def twice(module, args, result):
    return 2 * result


def put(path, value):
    """Set an attribute in all layers to what a function makes of it."""

    def change(model):
        for layer in layers_of(model):
            owner = layer.get_submodule(path.rpartition(".")[0])
            name = path.rpartition(".")[2]
            setattr(owner, name, value(getattr(owner, name)))

    return change


def hook(path):
    return lambda model: [layer.get_submodule(path).register_forward_hook(twice) for layer in layers_of(model)]


def configure(name, value):
    return lambda model: setattr(model.config, name, value)


def swap_norms(model):
    for layer in layers_of(model):
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        layer.input_layernorm, layer.post_attention_layernorm = second, first


def double_layer(model):
    layers_of(model)[0] = Scaled(layers_of(model)[0])


def drop_layer(model):
    model.model.layers = model.model.layers[:1]


def derive(path):
    """Give a module's class another forward, as a subclass does that somebody sets."""

    def change(model):
        for layer in layers_of(model):
            module = layer.get_submodule(path)
            module.__class__ = doubling(type(module))

    return change


def doubling(kind):
    def forward(self, *args, **options):
        found = kind.forward(self, *args, **options)
        return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found

    return type("Derived", (kind,), {"forward": forward})


def double_experts(model):
    """Run experts by an implementation that makes twice what their class's code makes."""
    interface = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    interface.setdefault("doubled", lambda module, *args: 2 * inspect.unwrap(type(module).forward)(module, *args))
    model.set_experts_implementation("doubled")


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def no_parameter(path, how):
    """Make a parameter of all layers one that is pruned, made for each call, or a tensor."""

    def change(model):
        for layer in layers_of(model):
            module, name = layer.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            if how == "pruned":
                prune.l1_unstructured(module, name, 0.5)
            elif how == "parametrised":
                parametrize.register_parametrization(module, name, Halved())
            else:
                halved = getattr(module, name).detach() / 2
                delattr(module, name)
                setattr(module, name, halved)

    return change


def bias(size):
    return nn.Parameter(torch.linspace(-1, 1, size))


CHANGES = {
    "activation": ("Llama", put("mlp.act_fn", lambda _: nn.ReLU())),
    "activation's hook": ("Llama", hook("mlp.act_fn")),
    "activation's option": ("GPT2", put("mlp.act", lambda act: nn.GELU(approximate="none"))),
    "down's bias gone": ("Llama", put("mlp.down_proj.bias", lambda _: None)),
    "up's bias": ("Mistral", put("mlp.up_proj.bias", lambda _: bias(48))),
    "q's bias": ("Mistral", put("self_attn.q_proj.bias", lambda _: bias(32))),
    "q's bias gone": ("Llama", put("self_attn.q_proj.bias", lambda _: None)),
    "another q": ("Llama", put("self_attn.q_proj", Scaled)),
    "another o": ("Llama", put("self_attn.o_proj", Scaled)),
    "another gate": ("Llama", put("mlp.gate_proj", Scaled)),
    "another mlp": ("Llama", put("mlp", Scaled)),
    "another attention": ("Llama", put("self_attn", Scaled)),
    "another layer": ("Llama", double_layer),
    "fewer layers": ("Llama", drop_layer),
    "scaling": ("Llama", put("self_attn.scaling", lambda _: 0.9)),
    "GPT-2's scaling": ("GPT2", put("attn.scaling", lambda _: 0.9)),
    "epsilon": ("Llama", put("input_layernorm.variance_epsilon", lambda _: 0.5)),
    "second epsilon": ("Llama", put("post_attention_layernorm.variance_epsilon", lambda _: 0.5)),
    "layer norm's eps": ("GPT2", put("ln_1.eps", lambda _: 0.5)),
    "Gemma's eps": ("Gemma2", put("post_feedforward_layernorm.eps", lambda _: 0.5)),
    "norms swapped": ("Llama", swap_norms),
    "another norm": ("Llama", put("input_layernorm", lambda _: OtherNorm(32))),
    "another second norm": ("Llama", put("post_attention_layernorm", lambda _: OtherNorm(32))),
    "another norm of q": ("Qwen3", put("self_attn.q_norm", lambda _: OtherNorm(16))),
    "norm in a wrapper": ("Llama", put("input_layernorm", Scaled)),
    "final norm": ("Llama", lambda model: setattr(model.model.norm, "variance_epsilon", 0.5)),
    "logits' softcap": ("Gemma2", configure("final_logit_softcapping", 1.5)),
    "attention's softcap": ("Gemma2", put("self_attn.attn_logit_softcapping", lambda _: 0.5)),
    "logits' scale": ("Cohere", lambda model: setattr(model, "logit_scale", 0.7)),
    "logits' scale in the configuration": ("Granite", configure("logits_scaling", 7.0)),
    "sliding window": ("Mistral", configure("sliding_window", 3)),
    "residual multiplier": ("Granite", put("residual_multiplier", lambda _: 0.3)),
    "another head": ("Mistral", lambda model: setattr(model, "lm_head", Scaled(model.lm_head))),
    "experts' activation": ("Mixtral", put("mlp.experts.act_fn", lambda _: nn.ReLU())),
    "experts' hook": ("Mixtral", hook("mlp.experts.act_fn")),
    "experts' implementation": ("Mixtral", double_experts),
    "mlp's class": ("Llama", derive("mlp")),
    "attention's class": ("Llama", derive("self_attn")),
    "norm's class": ("Llama", derive("input_layernorm")),
    "dropout within": ("GPT2", put("mlp.dropout", lambda _: nn.ReLU())),
    "norm's weight pruned": ("Llama", no_parameter("input_layernorm.weight", "pruned")),
    "norm's weight a tensor": ("Llama", no_parameter("post_attention_layernorm.weight", "a tensor")),
    "layer norm's weight parametrised": ("GPT2", no_parameter("ln_1.weight", "parametrised")),
    "layer norm's bias parametrised": ("GPT2", no_parameter("ln_2.bias", "parametrised")),
    "norm of k's weight pruned": ("Qwen3", no_parameter("self_attn.k_norm.weight", "pruned")),
    "q's weight pruned": ("Llama", no_parameter("self_attn.q_proj.weight", "pruned")),
    "k's weight parametrised": ("Llama", no_parameter("self_attn.k_proj.weight", "parametrised")),
    "up's weight pruned": ("Llama", no_parameter("mlp.up_proj.weight", "pruned")),
    "GPT-2's weight pruned": ("GPT2", no_parameter("mlp.c_fc.weight", "pruned")),
    "experts' weight pruned": ("Mixtral", no_parameter("mlp.experts.down_proj", "pruned")),
    "sinks a tensor": ("GptOss", no_parameter("self_attn.sinks", "a tensor")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_after_apply_is_what_runs(what):
    family, change = CHANGES[what]
    plain = {"Mistral": {"sliding_window": None}, "Granite": {"residual_multiplier": 1.0}}
    model, before, _ = both(family, **plain.get(family, {}))
    enlarge(model, before)
    unchanged = step(model, **batch())[0]
    for each in (model, before):
        change(each)
    found, expected = step(model, **batch()), step(before, **batch())
    assert abs(expected[0] - unchanged) > 1e-5  # the change changes something
    assert_alike(found, expected)


MATCHES = {"Llama": 13, "Gemma2": 17, "GPT2": 12, "Granite": 13, "Mixtral": 15, "Mistral": 13}


@pytest.mark.parametrize("family", MATCHES)
def test_all_that_recognition_read_is_compared(family):
    """Each attribute in turn, of modules, their configurations and the children that ran; and each of those children."""
    _, _, applied = both(family)
    matches = [row.match for row in applied.replaced if hasattr(row.match, "snapshot")]
    assert len(matches) == MATCHES[family]
    read = set()
    for match in matches:
        owner, snapshot = getattr(match, "model", match.module), match.snapshot
        assert snapshot != UNREAD and match.change() is None
        for where, change, restore in attributes_in(owner, snapshot):
            assert snapshot.unchanged(owner)
            change()
            assert not snapshot.unchanged(owner) and match.change() is not None, where
            restore()
            read.add(where)
        assert match.change() is None
    expected = {"Llama": "scaling", "Gemma2": "config.final_logit_softcapping", "GPT2": "attn_dropout.p", "Mixtral": "act_fn"}
    assert {expected.get(family, "config.vocab_size")} <= read


def attributes_in(module, snapshot, prefix=""):
    """Yield a name, what changes it, and what takes that back."""
    own = vars(module)
    for values, place, kind in (
        (own, snapshot.attributes, ""),
        (vars(own.get("config", torch.Size)), snapshot.config, "config."),
    ):
        for name, _ in place:
            there, value = name in values, values.get(name)
            yield (
                prefix + kind + name,
                lambda values=values, name=name: values.update({name: object()}),
                lambda values=values, name=name, there=there, value=value: (
                    values.update({name: value}) if there else values.pop(name)
                ),
            )
    for name, place in snapshot.tensors:
        kept = own["_parameters"].get(name)
        assert (place == "_parameters") == (kept is not None)
        new = None if place else torch.zeros(1)
        yield (
            prefix + name,
            lambda name=name, new=new: own["_parameters"].update({name: new}),
            lambda name=name, kept=kept: (
                own["_parameters"].pop(name) if kept is None else own["_parameters"].update({name: kept})
            ),
        )
    for name, child, inner in snapshot.children:
        yield (
            prefix + name,
            lambda name=name: own["_modules"].update({name: nn.ReLU()}),
            lambda name=name, child=child: own["_modules"].update({name: child}),
        )
        handles = []
        yield (
            f"{prefix}{name}'s hooks",
            lambda handles=handles, child=child: handles.append(child.register_forward_hook(twice)),
            lambda handles=handles: handles[0].remove(),
        )
        yield from attributes_in(child, inner, f"{prefix}{name}.")


def test_the_report_says_what_has_changed():
    model, _, applied = both()
    before = str(applied)
    first, second = layers_of(model)
    first.mlp.act_fn, first.input_layernorm, second.self_attn.scaling = nn.ReLU(), OtherNorm(32), 0.9
    second.mlp.up_proj.bias = None
    why = {(row.name, row.part): row.why for row in applied.left}
    assert why == {
        ("model.layers.0.mlp", "mlp"): "changed since: its act_fn is another module",
        ("model.layers.0.input_layernorm", "norm"): "changed since: OtherNorm has its place",
        ("model.layers.1.self_attn", "qkv"): f"changed since: its scaling was {8**-0.5} and is 0.9",
    }
    (mlp,) = [row for row in applied.replaced if row.name == "model.layers.1.mlp"]
    assert (mlp.by, mlp.why) == ("bias_activation, swiglu", LINEARS_CHANGED)
    assert "changed since" in str(applied) and "changed since" not in before
    applied.undo()


@pytest.mark.parametrize("place", ("model.norm", "model.layers.0.mlp", "model.layers.1.self_attn"))
def test_the_report_names_a_forward_that_other_code_has_put_there(place):
    model, _, applied = both()
    module = model.get_submodule(place)
    ours = module.forward

    def wrapper(*args, **options):
        return ours(*args, **options)

    module.forward = wrapper
    assert place not in [row.name for row in applied.left]
    module.forward = MethodType(type(module).forward, module)
    whys = [row.why for row in applied.left if row.name == place]
    assert len(whys) == (2 if "attn" in place else 1)  # and its rotation
    assert all(why.startswith("changed since: its forward is transformers.") for why in whys)
    del module.forward
    assert {row.why for row in applied.left if row.name == place} == {"changed since: its forward is its class's"}


def test_what_is_put_back_is_replaced_again():
    model, _, applied = both()
    act, layer = layers_of(model)[0].mlp.act_fn, layers_of(model)[0]
    layer.mlp.act_fn = nn.ReLU()
    assert applied.left
    layer.mlp.act_fn = act
    assert not applied.left and layer.mlp._onepass.ready()


def test_a_hook_from_before_stays_in_force_and_sees_no_probe():
    model = made()
    before, calls = copy.deepcopy(model), []
    for each in (model, before):
        layers_of(each)[0].mlp.act_fn.register_forward_hook(lambda _, args, result: calls.append(result.dtype) or 2 * result)
    applied = huggingface.apply(model)
    assert not calls
    assert [row.why for row in applied.left] == ["its act_fn has hooks or a forward of its own"]
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert len(calls) == 2


def scale_gradients(module, gradients, *_):
    return tuple(None if gradient is None else 1.1 * gradient for gradient in gradients)


GLOBAL_HOOKS = {
    "register_module_forward_hook": lambda module, args, result: 1.1 * result,
    "register_module_forward_pre_hook": lambda module, args: tuple(1.1 * x for x in args),
    "register_module_full_backward_hook": scale_gradients,
    "register_module_full_backward_pre_hook": scale_gradients,
}


@pytest.mark.filterwarnings("ignore:.*ackward hook")  # on modules that return records, and on those without gradients
@pytest.mark.parametrize("register", GLOBAL_HOOKS)
@pytest.mark.parametrize("family", ("Llama", "GPT2"))
def test_global_hooks_see_the_calls_of_all_modules(register, family):
    model = made(family)
    before, late, calls = copy.deepcopy(model), copy.deepcopy(model), []
    expected = huggingface.apply(late)
    enlarge(late, copy.deepcopy(before))

    def hook(module, *args):
        calls.append(type(module).__name__)
        return GLOBAL_HOOKS[register](module, *args) if calls[-1] in ("Linear", "Conv1D", "SiLUActivation") else None

    with getattr(torch_module, register)(hook):
        applied = huggingface.apply(model)  # which probes nothing by it, and recognises what it would without
        assert not calls
        for each in (model, before):
            each.load_state_dict(late.state_dict())
        runs = []
        for each in (before, model, late):
            runs.append((step(each, **batch()), sorted(calls)))
            calls.clear()
    for found, seen in runs[1:]:
        assert_alike(found, runs[0][0])
        assert seen == runs[0][1] and len(seen) > 20
    assert applied.rows == expected.rows


@pytest.mark.parametrize("first", ("onepass", "PEFT"))
def test_norms_that_peft_trains(first):
    """A new norm gets the gradient, and the frozen one none."""
    peft = pytest.importorskip("peft")
    model = made()
    before = copy.deepcopy(model)
    options = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "post_attention_layernorm"]}

    def wrapped(inner):
        torch.manual_seed(3)
        return peft.get_peft_model(inner, peft.LoraConfig(**options, init_lora_weights=False))

    if first == "onepass":
        huggingface.apply(model)
        model = wrapped(model)
    else:
        model = wrapped(model)
        huggingface.apply(model)
    before = wrapped(before)
    for each in (model, before):
        for name, parameter in each.named_parameters():
            if "modules_to_save" in name:
                parameter.data.mul_(1.5)
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_copies_look_at_their_own():
    model, before, _ = both()
    copied = copy.deepcopy(model)
    for each in (model, before):
        put("mlp.act_fn", lambda _: nn.ReLU())(each)
    assert layers_of(copied)[0].mlp._onepass.ready() and not layers_of(model)[0].mlp._onepass.ready()
    assert_alike(step(model, **batch()), step(before, **batch()))
    put("self_attn.scaling", lambda _: 0.9)(copied)
    assert not layers_of(copied)[0].self_attn._onepass.ready()


def test_what_is_compiled_is_compiled_anew():
    layer = layers_of(made("Llama"))[0]
    model = nn.Sequential(layer.input_layernorm, layer.mlp)
    before, x = copy.deepcopy(model), torch.randn(2, 5, 32)
    huggingface.apply(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), before(x))
    for each in (model, before):
        each[0].variance_epsilon, each[1].act_fn = 0.5, nn.ReLU()
    torch.testing.assert_close(compiled(x), before(x))
    for each in (model, before):
        each[1].__class__ = doubling(type(each[1]))
    torch.testing.assert_close(compiled(x), before(x))


class Module(nn.Module):
    """Reads more than it computes with."""

    def __init__(self):
        super().__init__()
        self.weight, self.options, self.scale, self.unread = nn.Parameter(torch.ones(2)), [1.0], 1.0, 1.0

    def forward(self, x):
        return x * self.weight * self.scale * self.options[0] * getattr(self, "more", 1.0)


def gated(place):
    """Let a module in each layer scale something by a parameter that is 1 at first."""

    def change(model):
        for layer in layers_of(model):
            module = layer.get_submodule(place) if place else layer
            module.gate = nn.Parameter(torch.ones(()))
            kind = type(module)
            module.__class__ = type(f"Gated{kind.__name__}", (kind,), {"forward": scale_output(kind)})

    return change


def scale_output(kind):
    def forward(self, *args, **options):
        found = kind.forward(self, *args, **options)
        return (self.gate * found[0], *found[1:]) if isinstance(found, tuple) else self.gate * found

    forward.__signature__ = inspect.signature(kind.forward)
    return forward


@pytest.mark.parametrize(("family", "place"), [("Llama", ""), ("Llama", "mlp"), ("GPT2", "attn")])
def test_a_parameter_that_is_one_at_first_is_trained(family, place):
    model = made(family, tie_word_embeddings=False)
    gated(place)(model)
    before = copy.deepcopy(model)
    applied = huggingface.apply(model)
    assert applied.replaced
    found = step(model, **batch())
    assert sum("gate" in name and "gate_proj" not in name for name in found[1]) == 2
    assert_alike(found, step(before, **batch()))


def test_a_setting_of_a_part_of_the_configuration():
    transformers = pytest.importorskip("transformers")
    text = SMALL | {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 30.0}
    config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    model = transformers.Gemma4ForConditionalGeneration(config).train()
    before, applied = copy.deepcopy(model), huggingface.apply(model)
    (row,) = [row for row in applied.replaced if row.part == "loss" and row.kind == "Linear"]
    assert row.by == "linear_cross_entropy, softcap 30"
    for each in (model, before):
        each.config.text_config.final_logit_softcapping = 0.05
    (row,) = [row for row in applied.left if row.part == "loss" and row.kind == "Linear"]
    assert row.why == "changed since: its config.text_config.final_logit_softcapping was 30.0 and is 0.05"
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_what_a_snapshot_is_of():
    module = Module()
    with reads_of(module) as reads:
        probe_forward(probe(module, {}), torch.ones(2))
    snapshot = reads.snapshot()
    tensors = ("more", None), ("weight", "_parameters")
    assert snapshot == Snapshot(Module.forward, (("options", [1.0]), ("scale", 1.0)), (), tensors)
    module.unread = 2.0
    assert snapshot.unchanged(module)
    module.more = 2.0  # which was not there
    assert not snapshot.unchanged(module)
    del module.more
    module.options[0] = 2.0
    assert snapshot.change(module) == "its options was a list and is a list"
