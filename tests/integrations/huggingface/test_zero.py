"""transformers' models with onepass under ZeRO-3's contract: weights are empty but while a module runs that reads them."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, made, mutant_tests
from integrations.huggingface.zero3 import Zero3, hook_of, partition, patch_linear

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import linear_layers, norms, snapshot, zero


@pytest.fixture(autouse=True)
def _by_pytorch(monkeypatch):
    patch_linear(monkeypatch)
    with onepass.use_backend("torch"):
        yield


def steps(model, **given):
    """Return losses and gradients of two backwards: in the second, hooks gather what the first has read."""
    losses = []
    for _ in range(2):
        out = model(**given)
        out.loss.backward()
        losses.append(out.loss.detach())
    assert not out.logits.numel()
    return torch.stack(losses), {name: p.grad for name, p in model.named_parameters()}


def is_right(applied_module, family="Llama", order=("apply", "zero"), **options):
    """Compare a model under ZeRO-3 with transformers' own. order: of onepass, and of what DeepSpeed does."""
    model = made(family)
    before = copy.deepcopy(model)
    if options:
        for each in (model, before):
            each.gradient_checkpointing_enable(options)
    for what in order:
        if what == "apply":
            applied = applied_module.apply(model)
        elif what == "init":
            for parameter in model.parameters():
                partition(parameter)
        else:
            Zero3(model)
    losses = [before(**batch()).loss for _ in range(2)]
    sum(losses).backward()
    expected = torch.stack(losses).detach(), {name: p.grad for name, p in before.named_parameters()}
    assert_alike(steps(model, **batch()), expected)
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }  # no input has a gradient
    assert {id(parameter) for parameter in model.parameters() if parameter.numel()} <= tables
    return model, applied


@pytest.mark.parametrize(
    ("family", "order"),
    (
        ("Llama", ("apply", "zero")),
        ("Llama", ("init", "apply", "zero")),
        ("Gemma3Text", ("zero", "apply")),
        ("Qwen3Moe", ("init", "apply", "zero")),
    ),
)
def test_a_step_is_the_same(family, order):
    _, applied = is_right(huggingface, family, order)
    assert not applied.left
    (by,) = {row.by for row in applied.rows if row.name == "model.layers.1"}
    assert by == "norm_linear, with the residual's sums"


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_checkpoints_are_recomputed():
    """In a backward of their own. DeepSpeed keeps what others gather for the backward that is running, which Zero3 does not."""
    is_right(huggingface, use_reentrant=True)


@pytest.mark.parametrize("order", (("apply", "zero"), ("init", "apply", "zero")))
def test_transposed_weights_run_their_own_code(order):
    """Their products save views, which would keep all that ZeRO-3 gathers."""
    _, applied = is_right(huggingface, "GPT2", order)
    assert not any(row.part in ("mlp", "qkv") and row.by and "linear" in row.by for row in applied.rows)


def test_apply_leaves_weights_empty():
    model = made()
    for parameter in model.parameters():
        partition(parameter)
    huggingface.apply(model).undo()
    assert not any(parameter.numel() for parameter in model.parameters())


def test_an_empty_weight_raises_by_name():
    model = made()
    huggingface.apply(model)
    zero3 = Zero3(model)
    zero3.gathers = False  # as where no engine runs the model
    with pytest.raises(RuntimeError, match="a weight is empty, as DeepSpeed ZeRO-3 has partitioned it: call the engine"):
        model(**batch())


@pytest.mark.parametrize("name", (None, "ds_shape", "_hp_mapping"))  # without ZeRO; of stage 3; of stages 1 and 2
def test_main_grad_raises_by_name(name):
    model = made()
    applied = huggingface.apply(model, main_grad=True)
    if name is None:
        model.register_forward_pre_hook(hook_of("deepspeed.runtime.engine", lambda *_: None))
    for parameter in model.parameters() if name else ():
        setattr(parameter, name, parameter.shape)
    with pytest.raises(RuntimeError, match=r"main_grad must be False under DeepSpeed, whose optimizer reads \.grad"):
        model(**batch()).loss.backward()
    applied.undo()


def test_frozen_codes_raise_by_name():
    model = made()
    for parameter in model.parameters():
        partition(parameter.requires_grad_(False))
    with pytest.raises(ValueError, match="frozen_layouts must be None with weights that DeepSpeed ZeRO-3 has partitioned"):
        huggingface.apply(model, precision="fp8", frozen_layouts=2)


MUTANTS = {
    "a norm's weight by get": (norms, "NormMatch._own", "own[name]", "own.get(name)"),
    "hooks that count": (snapshot, "", "SILENT = FSDP, *ZERO,", "SILENT = FSDP,"),
    "empty weights have no shapes": (zero, "shapes_of_empty", "parameter.data = parameter.new_full", "_ = parameter.new_full"),
    "shapes stay": (zero, "shapes_of_empty", "for parameter in empty: parameter.data = parameter.new_empty(0)", "pass"),
}
test_a_mutant_is_found, test_what_mutants_are_tried_on_is_right = mutant_tests(
    MUTANTS, lambda module: is_right(module, order=("init", "apply", "zero"))
)


@pytest.mark.slow
def test_views_that_are_kept_are_found(monkeypatch):
    monkeypatch.setattr(linear_layers, "keeps_gathered", lambda module: False)
    with pytest.raises(AssertionError):
        is_right(huggingface, "GPT2")
