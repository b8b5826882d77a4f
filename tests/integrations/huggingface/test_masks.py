"""Masks under a compiler: where a call masks nothing its attentions are given none, and everywhere else what they were given."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import FAMILIES, assert_alike, batch, both, step

import onepass
from onepass.integrations.huggingface.masks import Mask

WINDOWED = {"Mistral", "Gemma2", "Gemma3Text"}


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def masks_of(model, **given):
    """What the compiled model gives to SDPA, in each layer: whether a mask, and whether it is causal by itself."""
    found = []

    def read(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention or "scaled_dot_product" in str(node.target):
                found.append((node.kwargs.get("attn_mask") is not None, node.kwargs.get("is_causal", False)))
        return graph.forward

    torch._dynamo.reset()
    model(**given)  # whether it runs at all
    torch.compile(model, fullgraph=True, backend=read)(**given)
    return found


MASKED, PLAIN = (True, False), (False, True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ("Llama", "Qwen3", "GPT2"))
def test_a_call_that_masks_nothing(family):
    model, _, _ = both(family)
    given = batch() | {"use_cache": False}
    tokens = given["input_ids"].shape[1]
    assert masks_of(model, **given) == [PLAIN] * 2
    assert masks_of(model, **given, attention_mask=torch.ones_like(given["input_ids"])) == [MASKED] * 2
    packed = torch.arange(tokens).remainder(5).expand(2, -1)
    assert masks_of(model, **given, position_ids=packed) == [MASKED] * 2


@pytest.mark.slow
@pytest.mark.parametrize("given", ("packed", "padded", "plain"))
def test_compiled_it_masks_what_it_masked(given):
    model, before, _ = both()
    more = {"position_ids": torch.arange(12).remainder(5).expand(2, -1)} if given == "packed" else {}
    call = batch(masked=given == "padded") | more | {"use_cache": False}
    assert_alike(step(torch.compile(model, fullgraph=True, backend="aot_eager"), **call), step(before, **call))


@pytest.mark.slow
def test_a_window_is_a_mask():
    model, _, _ = both("Mistral")
    assert masks_of(model, **batch(), use_cache=False) == [MASKED] * 2


def known(model):
    return [part._onepass for part in model.modules() if isinstance(vars(part).get("_onepass"), Mask)]


@pytest.mark.parametrize("family", FAMILIES)
def test_which_stacks_mask_no_more_than_what_follows(family):
    model, _, applied = both(family)
    assert len(known(model)) == (family not in WINDOWED)
    applied.undo()
    assert not known(model)


def test_not_one_that_sees_both_ways():
    model, _, _ = both(is_causal=False)
    assert not known(model)
    model, _, _ = both(attn_implementation="eager")
    assert not known(model)


def test_not_while_its_own_cache_is_made():
    """Which a compiled call asks for by the model's configuration, where it is told nothing."""
    from onepass.integrations.huggingface.masks import _masks_nothing

    model, _, _ = both()
    ids = torch.ones(1, 3, dtype=torch.int64)
    stack = model.model
    assert _masks_nothing(stack, (ids,), {"use_cache": False, "position_ids": None})
    assert not _masks_nothing(stack, (ids,), {})
    assert not _masks_nothing(stack, (ids, torch.ones(1, 3)), {"use_cache": False})
    assert not _masks_nothing(stack, (ids,), {"use_cache": False, "position_ids": ids})
    stack.config.use_cache = False
    assert _masks_nothing(stack, (ids,), {})
