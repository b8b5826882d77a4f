"""ShardedAdamW in backward: the same bits, gradients that are freed as they come, clipping, microbatches, and what it refuses."""

import copy
import gc
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parallel.worlds import PAIRS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import sharded_adamw, step_in_backward
from onepass.parallel import ShardedAdamW, StepInBackward
from onepass.testing.mutants import mutate

WORLDS = PAIRS
KINDS = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16, masters": (torch.bfloat16, {"masters": True, "moments": "fp32"}),
    "bf16, masters, 8 bits": (torch.bfloat16, {"masters": True, "moments": "8bit"}),
}


@contextmanager
def rank_context():
    with patch.object(step_in_backward, "_PART", 256 * 20), onepass.use_backend("torch"):  # two or three parameters each
        yield


@pytest.fixture(autouse=True)
def _by_pytorch():
    with rank_context():
        yield


class Model(nn.Module):
    """Tied weights, one that is not used, one that is frozen, and layers that are made again."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.words = nn.Embedding(16, 256)
        nn.init.normal_(self.words.weight, std=0.1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 8), nn.GELU(), nn.Linear(8, 256)) for _ in range(3))
        self.head = nn.Linear(256, 16, bias=False)
        self.head.weight = self.words.weight
        self.unused, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(256), requires_grad=False)
        self.layers[0][0].bias.requires_grad_(False)
        self.reentrant = reentrant

    def forward(self, ids):
        x = self.words(ids) * self.frozen
        for layer in self.layers:
            x = x + (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return nn.functional.cross_entropy(self.head(x[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def made(kind, optimizer=ShardedAdamW, reentrant=None, **options):
    dtype, more = KINDS[kind]
    torch.manual_seed(0)
    model = Model(reentrant).to(dtype)
    return model, optimizer(model.parameters(), lr=1e-2, **more, **options)


def ids(step):
    drawn = torch.randint(0, 16, (2, 7), generator=torch.Generator("cpu").manual_seed(step), device="cpu")
    return drawn.to(torch.get_default_device())


def trained(model, optimizer, steps=range(4), microbatches=1):
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    for step in steps:
        with optimizer.accumulate():
            for more in range(1, microbatches):
                model(ids(100 * more + step)).backward()
        model(ids(step)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def alike(a, b):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(a, b, strict=True))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_bits_of_steps_after_backward(kind, reentrant, microbatches):
    usual = trained(*made(kind, reentrant=reentrant), microbatches=microbatches)
    early = trained(*made(kind, reentrant=reentrant, in_backward=True), microbatches=microbatches)
    assert alike(usual, early)


def test_gradients_are_freed_as_they_come():
    model, optimizer = made("fp32", in_backward=StepInBackward())
    live = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _: live.append(sum(p.grad.numel() for p in model.parameters() if p.grad is not None))
            )
    model(ids(0)).backward()
    left = [name for name, p in model.named_parameters() if p.grad is not None]
    assert max(live) < 256 * 20 and sum(p.numel() for p in model.parameters()) > 3 * max(live)
    assert set(left) <= {"words.weight", "unused"} | {name for name, p in model.named_parameters() if p.numel() < 300}
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_it_clips_by_the_norm_of_the_step_before():
    model, optimizer = made("fp32", in_backward=StepInBackward(max_norm=0.05))
    usual, after = made("fp32")
    before = None
    for step in range(4):
        usual(ids(step)).backward()
        norm = after.norm()
        after.step(max_norm=None if before is None else 0.05, norm=before)
        after.zero_grad()
        before = norm
        model(ids(step)).backward()
        torch.testing.assert_close(optimizer.step(), norm)
        optimizer.zero_grad()
    assert norm > 0.1
    for mine, theirs in zip(model.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_second_gradient_is_refused_by_name():
    model, optimizer = made("fp32", in_backward=StepInBackward())
    model(ids(0)).backward()
    with pytest.raises(RuntimeError, match=r"second time since the last step\(\), and \d+ of 15 parameters .*accumulate"):
        model(ids(1)).backward()
    optimizer.zero_grad()
    model(ids(1)).backward()
    optimizer.step()


def test_layers_that_are_frozen_and_unfrozen():
    early, usual = made("fp32", in_backward=StepInBackward()), made("fp32")
    for step in range(6):
        for model, optimizer in (early, usual):
            model.layers[1].requires_grad_(step % 3 != 0)
            model(ids(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert alike(early[0].parameters(), usual[0].parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_states_go_from_one_to_the_other(kind):
    model, optimizer = made(kind, in_backward=StepInBackward())
    trained(model, optimizer, range(2))
    for more in ({}, {"in_backward": StepInBackward()}):
        other, resumed = made(kind, **more)
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        again = copy.deepcopy(model)
        went_on = ShardedAdamW(again.parameters(), lr=1e-2, **KINDS[kind][1])
        went_on.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert alike(trained(other, resumed, range(2, 4)), trained(again, went_on, range(2, 4)))


def test_the_hooks_go_with_the_optimizer():
    model, optimizer = made("fp32", in_backward=StepInBackward())
    del optimizer
    gc.collect()
    model(ids(0)).backward()
    assert model.words.weight.grad is not None


def test_what_it_refuses(monkeypatch):
    with pytest.raises(ValueError, match="max_norm must be a number of 0 or more, or None, but is -1"):
        StepInBackward(max_norm=-1)
    with pytest.raises(TypeError, match=r"in_backward must be a bool or a StepInBackward, but is 1\.0"):
        made("fp32", in_backward=1.0)
    _, optimizer = made("fp32", in_backward=StepInBackward())
    with pytest.raises(ValueError, match=r"max_norm must be given as StepInBackward\(max_norm=...\)"):
        optimizer.step(max_norm=1.0)
    monkeypatch.setattr(step_in_backward.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(step_in_backward.dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"False for plain parameters on 2 ranks, .*15 of 15 parameters are no DTensors"):
        made("fp32", in_backward=StepInBackward())


# ---- over ranks ----


def sharded(kind, early, **options):
    """Return a model under fully_shard, and its optimizer."""
    dtype, more = KINDS[kind]
    torch.manual_seed(0)
    model, device = Model().to(dtype), torch.get_default_device().type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    shared = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for layer in model.layers:
        fully_shard(layer, **shared)
    fully_shard(model, **shared)
    return model, ShardedAdamW(model.parameters(), lr=1e-2, **more, in_backward=early, **options)


def trained_over_ranks(model, optimizer, steps=range(3), microbatches=2, synchronise=False):
    """Return the whole weights, and the norms that steps return. Each rank has other batches."""
    norms, mine = [], 1000 * dist.get_rank()
    for step in steps:
        with optimizer.accumulate():
            for more in range(1, microbatches):
                model.set_requires_gradient_sync(synchronise)
                model(ids(mine + 100 * more + step)).backward()
        model.set_requires_gradient_sync(True)
        model(ids(mine + step)).backward()
        norms.append(optimizer.step())
        optimizer.zero_grad()
    return [p.detach().full_tensor() for p in model.parameters()], norms


def test_steps_over_ranks(group):
    """Weights have the bits of steps after backward, whenever gradients of microbatches are reduced."""
    for kind, options in (("fp32", {"synchronise": True}), ("bf16, masters, 8 bits", {}), ("bf16", {"microbatches": 1})):
        usual, _ = trained_over_ranks(*sharded(kind, False), **options)
        early, _ = trained_over_ranks(*sharded(kind, True), **options)
        assert alike(usual, early), kind
    model, kept = sharded("fp32", StepInBackward())
    before = [p.detach().full_tensor() for p in model.layers[2].parameters()]
    model(ids(group.rank())).backward()
    assert all(p.grad is None for p in model.layers[2].parameters())
    assert not any(map(torch.equal, before, [p.detach().full_tensor() for p in model.layers[2].parameters()]))
    with pytest.raises(RuntimeError, match=r"second time since the last step\(\)"):
        model(ids(group.rank())).backward()
    assert kept.step() is None


def test_norms_over_ranks(group):
    """They are those of all ranks' parts together, clip the step after, and go with a state."""
    model, optimizer = sharded("bf16, masters, 8 bits", StepInBackward(max_norm=0.05))
    usual, after = sharded("bf16, masters, 8 bits", False)
    norm = None
    for step in range(3):
        usual(ids(10 * step + group.rank())).backward()
        last, norm = norm, after.norm()
        after.step(max_norm=None if last is None else 0.05, norm=last)
        after.zero_grad()
        model(ids(10 * step + group.rank())).backward()
        torch.testing.assert_close(optimizer.step(), norm, rtol=1e-5, atol=0)
        optimizer.zero_grad()
    assert norm > 0.1
    for mine, theirs in zip(model.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor())
    other, resumed = sharded("bf16, masters, 8 bits", StepInBackward(max_norm=0.05))
    weights, state = get_state_dict(model, optimizer)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    went_on, norms = trained_over_ranks(model, optimizer, range(3, 5))
    again, same = trained_over_ranks(other, resumed, range(3, 5))
    assert alike(went_on, again) and alike(norms, same)
    with (
        patch.object(step_in_backward, "local_part", lambda tensor: tensor.to_local().to("meta")),
        pytest.raises(ValueError, match="in_backward must be False where FSDP2 offloads parameters"),
    ):
        sharded("fp32", True)


MUTANTS = {
    "before all are whole": ("BackwardSteps.on_gradient", "len(whole) == self._expected[number]", "True"),
    "gradients are kept": ("BackwardSteps._step", "each.grad = None", "pass"),
    "what is left is not stepped": ("BackwardSteps.finish", "range(len(self._parts))", "()"),
    "in accumulate too": ("BackwardSteps.accumulate", "self._holds, True", "self._holds, False"),
    "frozen ones are waited for": ("BackwardSteps.forget", "each.requires_grad for", "1 for"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    mutant = mutate(step_in_backward, *MUTANTS[name], entry=sharded_adamw)
    steps = mutant.BackwardSteps.__init__.__globals__
    steps["_PART"] = 256 * 20
    usual = trained(*made("fp32"), microbatches=2)
    with mutant.AdamWStepper.run.__globals__["backend"].use_backend("torch"):
        model, optimizer = made("fp32", mutant.ShardedAdamW, in_backward=steps["StepInBackward"]())
        try:
            early = trained(model, optimizer, microbatches=2)
            model(ids(0)).backward()
        except RuntimeError:
            return
    live = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
    assert not alike(usual, early) or live > 256 * 20
