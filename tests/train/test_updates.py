"""MainGradUpdate: beside the fp32 masters and torch's AdamW that it stands for, its clipping, and what interrupts leave."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from train.checkpoint_runs import alone, batch, configured, go

from onepass.gpt import Config
from onepass.gradients import main_grads
from onepass.parallel import MasterWeights
from onepass.train import updates
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options
from onepass.train.setup import make
from onepass.train.updates import MainGradUpdate, adamw_options, parameter_groups

NARROW = [{}, {"params_dtype": "bf16"}]
BOTH = pytest.mark.parametrize("settings", NARROW, ids=["fp32", "bf16"])
RELEASED = {"release_main_grads": True}


class ByMasters(MainGradUpdate):
    """By passes of their own: clip_, torch's AdamW on fp32 masters, rounding, zero_."""

    def __init__(self, update):
        self.options, self.layout, self.main_grads = update.options, update.layout, update.main_grads
        self.weights = MasterWeights(
            update.main_grads,
            lambda groups: torch.optim.AdamW(groups, fused=True, **adamw_options(update.options)),
            parameter_groups(update.model, update.options),
        )
        self.optimizer = self.weights.optimizer
        names = {id(parameter): name for name, parameter in update.model.named_parameters()}
        start = {name: tensor for name, kind, tensor, *_ in update.optimizer.masters() if kind == "master"}
        for parameter, master, _ in self.weights.pieces():
            master.detach().copy_(start[names[id(parameter)]].view_as(master))

    def finish(self):
        self.main_grads.finish()
        return self.main_grads.clip_(self.options.clip_grad or math.inf)

    def _step(self):
        self.weights.step()


def trained_with(**settings):
    config, options = configured(**settings)
    return make(config, options, alone())


def moments(trained):
    return torch.cat([tensor for _, kind, tensor, *_ in trained.update.optimizer.masters() if kind == "exp_avg"])


def weights(trained):
    return torch.cat([parameter.detach().flatten() for parameter in trained.model.parameters()])


@BOTH
@pytest.mark.parametrize("clip", [0.0, 0.3, 100.0])
def test_losses_are_those_of_fp32_masters_and_torchs_adamw(clip, settings):
    ours, theirs = (trained_with(clip_grad=clip, **settings) for _ in range(2))
    theirs.update = theirs.steps.update = ByMasters(theirs.update)
    start = weights(ours)
    one, two = (go(each, alone(), 0, 8) for each in (ours, theirs))
    assert one[0] == two[0] and (weights(ours) - start).abs().max() > 0.01
    for mine, other in zip(one, two, strict=True):
        assert mine == pytest.approx(other, rel=1e-3 if settings else 1e-6)
    apart, moved = (weights(ours) - weights(theirs)).float().norm(), (weights(ours) - start).float().norm()
    assert apart <= (0.02 if settings else 1e-5) * moved


@BOTH
def test_released_gradients_change_nothing(settings):
    kept, released = trained_with(**settings), trained_with(**settings, **RELEASED)
    assert go(kept, alone(), 0, 4) == go(released, alone(), 0, 4) and torch.equal(weights(kept), weights(released))
    assert not any(buffer.untyped_storage().nbytes() for buffer in released.update.main_grads.buffers)


@pytest.mark.parametrize(
    ("said", "size", "device", "ranks", "graphs", "releases"),
    [
        (None, 1 << 29, "cuda", 1, False, True),
        (None, (1 << 29) - 1, "cuda", 1, False, False),
        (None, 1 << 29, "cuda", 1, True, False),
        (None, 1 << 29, "cuda", 2, False, False),
        (None, 1 << 29, "cpu", 1, False, False),
        (False, 1 << 29, "cuda", 1, False, False),
        (True, 5, "cpu", 2, False, True),
    ],
)
def test_large_models_gradients_are_released_on_one_gpu_unless_told(said, size, device, ranks, graphs, releases):
    model = nn.ParameterList([torch.empty(size, device="meta")])
    options = Options(release_main_grads=said, cuda_graphs=graphs)
    assert updates.releases(model, options, ParallelLayout(torch.device(device), ranks=ranks)) is releases


@pytest.mark.parametrize("releases", [False, True])
def test_and_by_main_grads(releases, monkeypatch):
    monkeypatch.setattr(updates, "releases", lambda *_: releases)
    assert trained_with().update.main_grads.releases is releases


@pytest.mark.parametrize(("clip", "most"), [(0.0, math.inf), (0.25, 0.25), (1e6, 1e6)])
def test_a_gradient_is_clipped_and_its_norm_is_told_as_it_was(clip, most):
    trained = trained_with(clip_grad=clip, adam_beta1=0.75)
    ((_, norm),) = go(trained, alone(), 0, 1)
    assert norm > 0.5 and moments(trained).norm().item() == pytest.approx(0.25 * min(norm, most), rel=1e-5)


def test_a_step_takes_the_norm_once_and_leaves_the_buffers_clear(monkeypatch):
    trained = trained_with(params_dtype="bf16")
    main_grads, asked = trained.update.main_grads, []
    norm = main_grads.norm
    monkeypatch.setattr(main_grads, "norm", lambda: asked.append(True) or norm())
    go(trained, alone(), 0, 3)
    assert len(asked) == 3 and not any(buffer.any() for buffer in main_grads.buffers)
    versions = [buffer._version for buffer in main_grads.buffers]
    trained.update.begin()
    assert versions == [buffer._version for buffer in main_grads.buffers]


@pytest.mark.parametrize("settings", [*NARROW, RELEASED], ids=["fp32", "bf16", "released"])
@pytest.mark.parametrize("when", ["in a microbatch", "before the step"])
def test_an_interrupted_steps_gradients_are_in_no_other(when, settings):
    straight, interrupted = (trained_with(**settings) for _ in range(2))
    lines = go(straight, alone(), 0, 3)
    assert go(interrupted, alone(), 0, 1) == lines[:1]
    if when == "in a microbatch":
        calls = []

        def second(module, args):
            calls.append(module)
            if len(calls) == 2:
                raise KeyboardInterrupt

        hook = interrupted.model.register_forward_pre_hook(second)
        with pytest.raises(KeyboardInterrupt):
            interrupted.steps.run(batch(7, alone()))
        hook.remove()
    else:
        interrupted.steps.run(batch(7, alone()))
    assert any(buffer.any() for buffer in interrupted.update.main_grads.buffers)
    assert go(interrupted, alone(), 1, 3) == lines[1:]
    assert torch.equal(weights(interrupted), weights(straight))


def test_adamws_numbers_are_those_of_the_flags():
    options = Options(adam_beta1=0.8, adam_beta2=0.7, adam_eps=1e-3, lr=0.25)
    for plain in (False, True):
        update = make(Config(num_layers=1), options, ParallelLayout(torch.device("cpu")), plain=plain).update
        for group in update.optimizer.param_groups:
            assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.7), 1e-3, 0.25)


def test_a_step_that_breaks_off_in_backward_says_which_weights_are_new(monkeypatch):
    monkeypatch.setattr(main_grads, "RELEASED_BYTES", 1 << 12)
    monkeypatch.setattr(updates, "MainGrads", partial(main_grads.MainGrads, bucket_bytes=1 << 10))
    trained = trained_with(params_dtype="bf16", step_in_backward=True)
    before = {name: parameter.detach().clone() for name, parameter in trained.model.named_parameters()}
    trained.update.set_rate(1e-2)

    optimizer, left = trained.update.optimizer, [3]
    step_buckets = optimizer.step_buckets

    def limited(*args):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("none left")
        step_buckets(*args)

    monkeypatch.setattr(optimizer, "step_buckets", limited)
    said = r"^none left. The step broke off in backward: \d+ of \d+ parameters, from \S+ to \S+, have their new weights, .*"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        trained.steps.run(batch(0, alone()))
    changed = {name for name, parameter in trained.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed and changed <= set(optimizer.stepped) < {name for name, _ in trained.update.main_grads.named}


@pytest.mark.parametrize(("settings", "when"), [({}, "after backward"), ({"step_in_backward": True}, "beside backward")])
def test_offload_says_what_it_costs(settings, when, monkeypatch):
    trained = trained_with(params_dtype="bf16", optimizer_moments="8bit", offload_optimizer=True, **settings)
    optimizer = trained.update.optimizer
    size, rate = optimizer.passes()
    assert size > 0 and rate > 0
    monkeypatch.setattr(optimizer, "passes", lambda: (4 << 30, 2 << 30))  # the measured rate is this machine's
    said = trained.update.describe_offload()
    assert said == (
        f"Offload: 4 GiB of masters and moments come to the GPU and go back in each step, {when}: 2.00 s each way at 2 GB/s."
    )
    assert trained_with(**settings).update.describe_offload() is None
