"""fully_shard of what tensor-parallel ranks divide: norms count their parts, and parameters that they all have stay alike."""

import pytest
import torch
from parallel.worlds import FOURS
from train.checkpoint_runs import _groups, configured, go

import onepass
from onepass.train.setup import make

WORLDS = [FOURS[0]]
TENSOR = {"tensor_model_parallel_size": 2, "clip_grad": 0.05}


def trained(group, **settings):
    """Train on this rank. Return losses and norms, and the norms' weights."""
    config, options = configured(**TENSOR | settings)
    layout = _groups(config, torch.device("cpu"))
    with onepass.use_backend("torch"):
        made = make(config, options, layout)
        found = go(made, layout, 0, 3)
    norms = [parameter for name, parameter in made.model.named_parameters() if "norm" in name]
    return found, [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in norms]


@pytest.mark.parametrize("world", WORLDS, indirect=True, scope="module")
@pytest.mark.parametrize("sequence", (False, True), ids=("", "sequence parallel"))
def test_it_trains_as_without(world, sequence):
    whole, sharded = (world.run(trained, sequence_parallel=sequence, use_fsdp=fsdp) for fsdp in (False, True))
    for (lines, weights), (expected, others) in zip(sharded, whole, strict=True):
        torch.testing.assert_close(torch.tensor(lines), torch.tensor(expected), rtol=1e-5, atol=0)
        torch.testing.assert_close(weights, others, rtol=1e-5, atol=1e-6)
    for _, weights in sharded[1:]:
        assert all(map(torch.equal, weights, sharded[0][1]))
