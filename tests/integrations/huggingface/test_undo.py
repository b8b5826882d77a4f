"""`undo` where libraries have wrapped a forward after `apply`."""

import functools
from types import MethodType

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

import transformers
from integrations.huggingface.families import assert_alike, batch, both, made, step

import onepass


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def plus_one(module, forward):
    """Wrap a forward as libraries do: under the name of what is wrapped."""

    @functools.wraps(forward)
    def wrapper(*args, **options):
        return forward(*args, **options) + 1

    return wrapper


@pytest.mark.parametrize("place", ("lm_head", "model.layers.1.mlp"))
def test_undo_names_a_wrapper_and_the_line_that_takes_it_back(place):
    model, before, applied = both()
    inner = model.get_submodule(place)
    inner.forward = plus_one(inner, inner.forward)
    with pytest.raises(RuntimeError) as raised:
        applied.undo()
    line = f"del applied.model.get_submodule('{place}').forward"
    assert f"{type(inner).__name__}.forward of {place} is {__name__}." in str(raised.value)
    assert "wrapper by now" in str(raised.value) and f"`{line}`" in str(raised.value)
    exec(line, {"applied": applied})
    applied.undo()
    assert "forward" not in vars(inner)
    assert_alike(step(model, **batch()), step(before, **batch()), 0)


def scaled_head(model):
    """Set a forward that keeps the model's in its closure, as TRL does."""
    original = model.forward

    @functools.wraps(type(model).forward)
    def fused(self, *args, fused_lm_head=False, **options):
        return "fused" if fused_lm_head else original(*args, **options)

    model.forward = MethodType(fused, model)


@pytest.mark.parametrize("autocast", (False, True))
def test_undo_leaves_a_wrapper_that_calls_the_models_forward(autocast):
    model, before, applied = both()
    scaled_head(model)
    if autocast:  # as accelerate does for Trainer(bf16=True)
        model._original_forward = model.forward
        model.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__), model)
    wrapper = model.forward
    applied.undo()
    assert model.forward == wrapper and model(fused_lm_head=True) == "fused"
    assert "_onepass" not in vars(model)
    if not autocast:
        assert_alike(step(model, **batch()), step(before, **batch()), 0)
    with pytest.raises(RuntimeError, match="nothing to undo"):
        applied.undo()
    again = onepass.integrations.huggingface.apply(model)
    assert [row.why for row in again.left if row.part == "loss"] == ["its forward has been replaced already"]
    again.undo()
    assert model.forward == wrapper


def test_undo_names_the_wrapper_of_the_model():
    """One that doesn't call what was there."""
    model, before, applied = both()
    model.forward = MethodType(lambda self, *args, **options: type(self).forward(self, *args, **options), model)
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM\.forward is .*<lambda> by now.*`del applied\.model\.forward`"):
        applied.undo()
    del applied.model.forward
    applied.undo()
    assert_alike(step(model, **batch()), step(before, **batch()), 0)


def test_undo_names_accelerates_hook():
    accelerate = pytest.importorskip("accelerate")
    model, before, applied = both()
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, accelerate.hooks.ModelHook())
    with pytest.raises(
        RuntimeError, match=r"is accelerate\.hooks\..* by now.*`accelerate\.hooks\.remove_hook_from_mod"
    ) as raised:
        applied.undo()
    exec(str(raised.value).split("`")[1], {"applied": applied, "accelerate": accelerate})
    applied.undo()
    assert_alike(step(model, **batch()), step(before, **batch()), 0)


def test_undo_after_trainer_in_bf16(tmp_path):
    """Its autocast comes off too: the model is as it was, but for its weights."""
    accelerate = pytest.importorskip("accelerate")
    model, _, applied = both()
    row = torch.arange(3, 15)
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, bf16=True, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    trainer = transformers.Trainer(model, options, train_dataset=[{"input_ids": row, "labels": row}] * 8)
    try:
        trainer.train()
        mine = model.model.norm.forward
        model.model.norm.forward = plus_one(model.model.norm, mine)
        with pytest.raises(RuntimeError, match=r"LlamaRMSNorm\.forward of model\.norm"):
            applied.undo()
        assert "_original_forward" in vars(model)  # nothing is taken off
        model.model.norm.forward = mine
        applied.undo()
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process
    assert not {"forward", "_original_forward"} & vars(model).keys()
    assert all("forward" not in vars(module) for module in model.modules())
    assert model(input_ids=row[None]).logits.dtype is torch.float32
    fresh = made()
    fresh.load_state_dict(model.state_dict())
    assert_alike(step(model, **batch()), step(fresh, **batch()), 0)
