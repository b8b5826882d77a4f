"""Data-parallel ranks decide on a CUDA graph each by its own clock: one captures, the other doesn't, and they train as ever."""

from functools import partial

import pytest
import torch
from parallel.worlds import PAIRS
from runtime import cpu_graph
from train.checkpoint_runs import configured, go

import onepass
from onepass.train import measured_steps, steps
from onepass.train.layout import _groups
from onepass.train.measured_steps import MeasuredSteps
from onepass.train.setup import make

WORLDS = [PAIRS[0]]
rank_context = partial(onepass.use_backend, "torch")


def decided(group, measures):
    """Train on this rank. Return losses and norms, whether there is a graph in the end, and the weights."""
    config, options = configured(params_dtype="fp32", clip_grad=0.0)
    layout = _groups(config, torch.device("cpu"))
    trained = make(config, options, layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "capture", partial(cpu_graph.record, may_wait=True))
        patch.setattr(steps, "side_stream", cpu_graph.beside)
        patch.setattr(steps, "free_memory", lambda device: None)
        patch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
        patch.setattr(measured_steps, "synchronize", lambda device: None)
        patch.setattr(measured_steps, "memory_of_graph", lambda device: (0, 1))
        patch.setattr(measured_steps, "_WAITS", 0.0 if layout.rank == 0 else 2.0)
        if measures:
            trained.steps = MeasuredSteps(trained.model, config, options, trained.update)
        found = go(trained, layout, 0, 12)
    return found, trained.steps.replays, [parameter.detach() for parameter in trained.model.parameters()]


@pytest.mark.parametrize("world", WORLDS, indirect=True, scope="module")
def test_one_rank_captures_and_the_other_does_not(world):
    (one, captured, weights), (other, eager, theirs) = world.run(decided, True)
    (expected, _, without), _ = world.run(decided, False)
    assert (captured, eager) == (True, False)
    assert all(map(torch.equal, weights, theirs))
    torch.testing.assert_close(torch.tensor(one), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    for found, weight in zip(weights, without, strict=True):
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-4)
    assert len(other) == 12
