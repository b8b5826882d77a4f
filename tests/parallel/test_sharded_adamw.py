"""ShardedAdamW over plain parameters, by types of weights, moments and masters: against fp64, torch's own, and its states."""

import copy

import pytest
import torch
from parallel import histories
from parallel.adamw_oracle import (
    BF16,
    EPS,
    FP16,
    FP32,
    OPTIONS,
    SHAPES,
    Case,
    adamw_reference,
    gradients_of,
    groups_of,
    parameters_of,
)
from torch import nn

import onepass
from onepass.gradients.adamw_formula import joined_master
from onepass.kernels.language import triton
from onepass.parallel import ShardedAdamW

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="needs Triton"))]
KINDS = {  # the weights' type, and options
    "fp32": (FP32, {}),
    "fp32, moments of bf16": (FP32, {"moments": "bf16"}),
    "bf16": (BF16, {}),
    "bf16, moments of fp32": (BF16, {"moments": "fp32"}),
    "bf16, masters": (BF16, {"masters": True}),
    "bf16, masters, moments of fp32": (BF16, {"masters": True, "moments": "fp32"}),
}
HALF = {FP32: EPS, BF16: 2.0**-8}  # of a unit in the last place, relative


@pytest.fixture(params=BACKENDS)
def backend(request):
    with onepass.use_backend(request.param):
        yield request.param


def made(kind, shapes=SHAPES):
    dtype, options = KINDS[kind]
    case = Case(shapes, dtype, OPTIONS)
    parameters = parameters_of(case)
    return case, parameters, ShardedAdamW(groups_of(case, parameters), **options)


def give(parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.to(parameter.dtype)


def kept(optimizer, parameter):
    """The parameter's number and moments in fp64, of its master where it has one."""
    state = optimizer.state[parameter]
    whole = joined_master(parameter.detach(), state["low"]) if "low" in state else parameter.detach()
    return [each.double().clone() for each in (whole, state["exp_avg"], state["exp_avg_sq"])]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("backend")
def test_steps_are_the_formulas(kind, clip):
    case, parameters, optimizer = made(kind)
    assert (
        optimizer.state[parameters[0]]["exp_avg"].dtype == {"fp32": FP32, "bf16": BF16}[KINDS[kind][1].get("moments", kind[:4])]
    )
    for step in range(1, 4):
        give(parameters, gradients_of(case, step))
        norm = torch.cat([p.grad.double().flatten() for p in parameters]).norm()
        factor = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
        before = [kept(optimizer, parameter) for parameter in parameters]
        optimizer.step(max_norm=clip)
        for place, parameter in enumerate(parameters):
            options = optimizer.param_groups[place % len(OPTIONS)]
            options = {name: options[name] for name in ("lr", "betas", "eps", "weight_decay")}
            expected = adamw_reference(before[place][0], parameter.grad.double() * factor, *before[place][1:], step, **options)
            types = (
                FP32 if "low" in optimizer.state[parameter] else parameter.dtype,
                *[optimizer.state[parameter]["exp_avg"].dtype] * 2,
            )
            for name, new, right, dtype in zip(
                ("weight", "exp_avg", "exp_avg_sq"), kept(optimizer, parameter), expected, types, strict=True
            ):
                close = 1e-5 if name == "exp_avg" and right.numel() else 0.0  # of terms that cancel
                slack = 1.01 * HALF[dtype] * right.abs() + 1e-4 * options["lr"] * (name == "weight") + 6e-6 * right.abs()
                off = (new - right).abs() - slack - close * (before[place][1].abs() + factor * parameter.grad.double().abs())
                assert (off <= 2.0**-130).all(), (step, place, name)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_it_goes_on_as_torchs_and_its_state_is_torchs(kind, backend):
    case, parameters, optimizer = made(kind)
    others = parameters_of(case)
    theirs = torch.optim.AdamW(groups_of(case, others), fused=True)
    for step in range(6):
        for mine in (parameters, others):
            give(mine, gradients_of(case, step))
        optimizer.step()
        theirs.step()
        if step == 2:  # each takes the other's state
            mine, other = (copy.deepcopy(each.state_dict()) for each in (optimizer, theirs))
            optimizer.load_state_dict(other)
            theirs.load_state_dict(mine)
            for group in theirs.param_groups:
                group["fused"] = True  # a state says how torch's steps
    for mine, other in zip(parameters, others, strict=True):
        if kind == "bf16" and backend == "torch":
            assert torch.equal(mine, other)
        else:  # a number in a thousand is rounded the other way
            rtol, atol = (0.0, 1e-5) if kind == "fp32" else (2.0**-6, 1e-4)
            torch.testing.assert_close(mine.float(), other.float(), rtol=rtol, atol=atol)
            assert (mine.float() - other.float()).norm() <= 1e-3 * other.float().norm() + 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("backend")
def test_a_state_goes_on_bit_for_bit(kind):
    case, parameters, optimizer = made(kind)
    for step in range(2):
        give(parameters, gradients_of(case, step))
        optimizer.step()
    _, others, resumed = made(kind)
    with torch.no_grad():
        for mine, other in zip(parameters, others, strict=True):
            other.copy_(mine)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(2, 4):
        for given in (parameters, others):
            give(given, gradients_of(case, step))
        optimizer.step()
        resumed.step()
    for mine, other in zip(parameters, others, strict=True):
        assert torch.equal(mine, other)
        for name, each in optimizer.state[mine].items():
            assert torch.equal(each, resumed.state[other][name]) and each.dtype == resumed.state[other][name].dtype


@pytest.mark.usefixtures("backend")
def test_small_steps_add_up_in_masters_alone():
    weights = [nn.Parameter(torch.full((64,), 1.0, dtype=BF16)) for _ in range(2)]
    for masters, weight in enumerate(weights):
        optimizer = ShardedAdamW([weight], lr=1e-4, weight_decay=0.0, moments="fp32", masters=bool(masters))
        for _ in range(50):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert (weights[0] == 1).all() and torch.allclose(weights[1].float(), torch.tensor(1 - 50e-4), atol=2.0**-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("backend")
def test_random_histories_are_torchs(seed):
    """Of freezing, unfreezing and writing weights, with masters."""
    assert not histories.judged(histories.History(seed), histories.made("ShardedAdamW", BF16, masters=True, moments="fp32"))


@pytest.mark.usefixtures("backend")
def test_nan_and_inf_stay_where_they_are():
    for kind in KINDS:
        _, (weight,), optimizer = made(kind, ((64,),))
        weight.grad = torch.ones_like(weight)
        weight.grad[3], weight.grad[5] = torch.nan, torch.inf
        optimizer.step()
        finite = weight.isfinite()
        assert not finite[3] and not finite[5] and finite.sum() == 62, kind


def test_what_it_does_not_take():
    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="moments must be fp32, bf16, 8bit or None, but is 'int4'"):
        ShardedAdamW([weight], moments="int4")
    with pytest.raises(TypeError, match=r"parameters must be fp32 or bf16, but one is torch.float16"):
        ShardedAdamW([nn.Parameter(torch.ones(4, dtype=FP16))])
    optimizer = ShardedAdamW([weight])
    with pytest.raises(ValueError, match=r"state must have groups of \[1\] parameters, but has \[2\]"):
        optimizer.load_state_dict(torch.optim.AdamW([weight, nn.Parameter(torch.ones(3))]).state_dict())
    other = ShardedAdamW([nn.Parameter(torch.ones(5))])
    with pytest.raises(ValueError, match=r"exp_avg of shape \(4,\), but has \(5,\)"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.usefixtures("backend")
def test_a_norm_without_a_limit_scales_nothing():
    weights = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    for weight, options in zip(weights, ({}, {"norm": torch.tensor(torch.inf)}), strict=True):
        weight.grad = torch.ones(4)
        ShardedAdamW([weight]).step(**options)
    assert torch.equal(*weights)
    with pytest.raises(ValueError, match="max_norm must be a number of 0 or more, or None, but is -1"):
        ShardedAdamW(weights).step(max_norm=-1)


@pytest.mark.usefixtures("backend")
def test_gradients_of_another_type_from_step_to_step():
    weights = [nn.Parameter(torch.ones(64)) for _ in range(2)]
    for weight in weights:
        weight.grad_dtype = None
    optimizer = ShardedAdamW(weights, weight_decay=0.0, lr=0.1)
    for types in ((FP32, FP32), (FP32, BF16), (BF16, BF16)):
        for weight, dtype in zip(weights, types, strict=True):
            weight.grad = torch.ones(64, dtype=dtype)
        optimizer.step()
    for weight in weights:
        torch.testing.assert_close(weight.detach(), torch.full((64,), 0.7), rtol=1e-4, atol=1e-4)


def test_what_has_changed_since_it_was_made():
    weight = nn.Parameter(torch.ones(4, 4, dtype=BF16))
    optimizer = ShardedAdamW([weight], masters=True)
    weight.data = weight.data.float()
    weight.grad = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=r"when their optimizer was made, torch.bfloat16, but one is torch.float32 by now"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(4, 4))]  # as accelerate does under FSDP2
    with pytest.raises(RuntimeError, match=r"the groups' parameters are others .*make it after fully_shard"):
        optimizer.step()


def test_the_callers_groups_stay():
    groups = [{"params": [nn.Parameter(torch.ones(4, 256))], "moments": "8bit"}]
    for _ in range(2):
        optimizer = ShardedAdamW(groups)
        assert "exp_avg_code" in optimizer.state[groups[0]["params"][0]]


@pytest.mark.parametrize("in_backward", [False, True])
def test_steps_leave_the_states_views_as_they_are(in_backward):
    """To make them anew takes longer than all else that the CPU does, and in backward as often as there are parts."""
    weight, frozen = (nn.Parameter(torch.ones(4, 256), requires_grad=trained) for trained in (True, False))
    optimizer = ShardedAdamW([weight, frozen], in_backward=in_backward)
    before = optimizer.state[weight]
    for trained in (False, True):
        frozen.requires_grad_(trained)
        (weight + frozen).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (optimizer.state[weight] is before) != trained and (frozen in optimizer.state) == trained


def test_torchs_does_not_take_codes_for_moments():
    weight = nn.Parameter(torch.ones(2, 256))
    theirs = torch.optim.AdamW([weight])
    theirs.load_state_dict(ShardedAdamW([weight], moments="8bit").state_dict())
    weight.grad = torch.ones_like(weight)
    with pytest.raises(KeyError, match="exp_avg"):
        theirs.step()
