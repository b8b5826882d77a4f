"""What only a GPU shows of AdamW: that nobody waits, launches, graphs, memory, all masters there are, sizes past 32 bits."""

import pytest
import torch
from gpu.calls import captured, deterministic_algorithms, memory_goes_back, needs_60_gib, nobody_waits, taken
from parallel import histories, test_eight_bits, test_sharded_adamw
from parallel.adamw_oracle import BF16, CASES, FP16, FP32, SHAPES, Case, fed, gradients_of, judge, kept, named, parameters_of
from torch import nn

import onepass
from onepass.gradients import adamw as module
from onepass.gradients import step_in_backward
from onepass.parallel import AdamW, MasterWeights, ShardedAdamW

__all__ = ["memory_goes_back"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _on_the_gpu():
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def made(dtype=BF16, shapes=SHAPES, **options):
    case = Case(shapes, dtype)
    parameters = parameters_of(case)
    main_grads = named(parameters)
    return case, parameters, main_grads, AdamW(main_grads, **options)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_formulas(name):
    assert not judge(module, named, CASES[name])


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", test_sharded_adamw.KINDS)
def test_steps_over_grad_are_the_formulas(kind, clip):
    test_sharded_adamw.test_steps_are_the_formulas(kind, clip)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_over_grad_it_goes_on_as_torchs_and_its_state_is_torchs(kind):
    test_sharded_adamw.test_it_goes_on_as_torchs_and_its_state_is_torchs(kind, "triton")


def test_steps_by_moments_in_eight_bits_are_the_formulas():
    assert not test_eight_bits.wrong_step(test_eight_bits.made)
    assert test_eight_bits.unlike(test_eight_bits.made) < 1e-3
    assert test_eight_bits.drift(ShardedAdamW) < 0.12
    test_eight_bits.test_a_state_goes_on_bit_for_bit("triton")
    for poison in (torch.nan, torch.inf, 1e30):
        test_eight_bits.test_poison_stays_where_it_is(poison, "triton")


def test_steps_in_backward_wait_for_nobody_and_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(step_in_backward, "_PART", 1 << 20)
    found = []
    for early in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024, dtype=BF16) for _ in range(4)))
        optimizer = ShardedAdamW(model.parameters(), masters=True, moments="fp32", in_backward=early)
        x = torch.randn(64, 1024, dtype=BF16)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = model(x).square().mean()
        with nobody_waits():
            loss.backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_pytorchs_operators_are_as_the_kernels():
    found = []
    for backend in ("triton", "torch"):
        case, parameters, main_grads, optimizer = made()
        with onepass.use_backend(backend):
            for step in range(3):
                fed(main_grads, gradients_of(case, step))
                with nobody_waits():
                    optimizer.step(0.5, zero=True)
        found.append([each for state in kept(optimizer, parameters) for each in state])
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-6)  # some versions of torch's have betas in fp32


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_over_a_hundred_steps_masters_are_as_near_to_fp64_as_torchs_fused(dtype):
    case, parameters, main_grads, optimizer = made(dtype, ((512, 384), (9,)), lr=1e-3)
    masters = [p.detach().float().requires_grad_() for p in parameters]
    exact = [p.detach().double().requires_grad_() for p in parameters]
    theirs, oracle = torch.optim.AdamW(masters, lr=1e-3, fused=True), torch.optim.AdamW(exact, lr=1e-3, foreach=False)
    for step in range(100):
        grads = gradients_of(case, step)
        fed(main_grads, grads)
        for master, wide, grad in zip(masters, exact, grads, strict=True):
            master.grad, wide.grad = grad.clone(), grad.double()
        for each in (optimizer, theirs, oracle):
            each.step()
    right = torch.cat([p.detach().flatten() for p in exact])
    ours, torchs = (
        torch.cat([each.detach().flatten().double() for each in found]) - right
        for found in ([master for master, _, _ in kept(optimizer, parameters)], masters)
    )
    assert ours.square().mean().sqrt() <= 1.25 * torchs.square().mean().sqrt()
    assert ours.abs().max() <= 2 * torchs.abs().max() + 1e-9


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", histories.KINDS)
def test_random_histories_are_torchs(kind, dtype):
    """Of freezing, unfreezing and writing weights."""
    for seed in range(4):
        assert not histories.judged(histories.History(seed), histories.made(kind, dtype))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_masters_follow_weights_and_nobody_waits(dtype):
    weight = nn.Parameter(torch.randn(1000, 1001).to(dtype))
    main_grads = named([weight])
    weights = MasterWeights(main_grads, lambda groups: torch.optim.SGD(groups, lr=1.0))
    main_grads.finish()
    new = torch.randn(1000, 1001).to(dtype)
    for place in (slice(0, 1000), slice(3, 4)):  # all, and some
        weight.data[place] = new[place].neg_()
        with nobody_waits():
            weights.step()
        assert torch.equal(weight, new)


def test_nobody_waits_and_few_kernels_run():
    case, _, main_grads, optimizer = made(shapes=((64, 64), (128,), (32, 8)))
    for step in range(2):
        fed(main_grads, gradients_of(case, step))
        optimizer.step(1.0, zero=True)
    fed(main_grads, gradients_of(case, 2))
    with nobody_waits():
        optimizer.step(1.0, zero=True)
        main_grads.zero_()
    fed(main_grads, gradients_of(case, 2))
    optimizer.step(zero=True)  # no longer clipped, which is told the device once
    fed(main_grads, gradients_of(case, 3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        optimizer.step(zero=True)
        main_grads.zero_()
        torch.cuda.synchronize()
    ran = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted("scalars" in key for key in ran) == [False, True], ran


def test_no_option_compiles_anything():
    from onepass.gradients import adamw_kernels as kernels

    case, _, main_grads, optimizer = made(shapes=((64, 64),))
    fed(main_grads, gradients_of(case, 0))
    optimizer.step(1.0)
    functions = kernels._adamw_kernel.jit, kernels._scalars_kernel.jit
    before = [len(cache[0]) for jit in functions for cache in jit.device_caches.values()]
    for step in range(1, 4):
        optimizer.param_groups[0].update(lr=0.1 / step, betas=(0.5, 0.9 + step / 100), eps=10.0**-step, weight_decay=step / 7)
        fed(main_grads, gradients_of(case, step))
        optimizer.step(1.0 / step)
    assert [len(cache[0]) for jit in functions for cache in jit.device_caches.values()] == before


def captured_and_by_hand(lr):
    """Return a case, parameters whose step is captured, with its graph, and the same parameters to be stepped by hand."""
    shapes = ((40, 24), (7,), (16400,))
    case, parameters, main_grads, optimizer = made(shapes=shapes, lr=lr)
    _, others, theirs, by_hand = made(shapes=shapes, lr=float(lr))
    main_grads.finish()
    _, graph = captured(lambda: optimizer.step(0.5))  # warmed up with gradients of zero, twice
    optimizer.set_step(0)
    with torch.no_grad():
        for mine, other in zip(parameters, others, strict=True):
            mine.copy_(other)
    optimizer.reload()
    return case, (parameters, optimizer, graph), (others, theirs, by_hand)


def test_a_graph_steps_on_by_a_learning_rate_in_memory():
    lr = torch.tensor(1e-2)
    case, (parameters, optimizer, graph), (others, theirs, by_hand) = captured_and_by_hand(lr)
    for step in range(4):
        for parameter, grad in zip(parameters, gradients_of(case, step), strict=True):
            parameter.main_grad.copy_(grad)
        lr.fill_(1e-2 / (step + 1))
        graph.replay()
        by_hand.param_groups[0]["lr"] = lr.item()
        fed(theirs, gradients_of(case, step))
        by_hand.step(0.5)
    for mine, other, one, two in zip(parameters, others, kept(optimizer, parameters), kept(by_hand, others), strict=True):
        assert torch.equal(mine, other) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert optimizer.state[parameters[0]]["step"] == 4


def test_steps_between_replays_have_their_own_learning_rate():
    case, (parameters, optimizer, graph), (others, theirs, by_hand) = captured_and_by_hand(1e-1)
    for step, replayed in enumerate((False, True, False, False, True)):
        for parameter, grad in zip(parameters, gradients_of(case, step), strict=True):
            parameter.main_grad.copy_(grad)
        optimizer.param_groups[0]["lr"] = 1e-3
        graph.replay() if replayed else optimizer.step(0.5)
        by_hand.param_groups[0]["lr"] = 1e-1 if replayed else 1e-3
        fed(theirs, gradients_of(case, step))
        by_hand.step(0.5)
    assert all(torch.equal(mine, other) for mine, other in zip(parameters, others, strict=True))


def test_the_same_every_time_and_on_another_stream():
    found = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), deterministic_algorithms():
            case, parameters, main_grads, optimizer = made()
            for step in range(3):
                fed(main_grads, gradients_of(case, step))
                optimizer.step(0.1, zero=True)
        torch.cuda.synchronize()
        found.append([each for state in kept(optimizer, parameters) for each in state])
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))


def test_memory():
    """Kept: ten bytes a bf16 weight beside it and its gradient. For the time of a step: nothing of its size."""
    parameter = nn.Parameter(torch.zeros(1 << 24, dtype=BF16))
    main_grads = named([parameter])
    bytes_kept, optimizer = taken(lambda: AdamW(main_grads))
    assert bytes_kept < 10.1 * (1 << 24)
    main_grads.finish()
    optimizer.step(1.0)
    more, _ = taken(lambda: optimizer.step(1.0, zero=True))
    assert more < 1 << 20


def test_all_masters_there_are():
    """Every fp32 number survives a step that takes nothing off; NaN stays NaN, in the weight too."""
    size = 1 << 27
    parameter = nn.Parameter(torch.zeros(size, dtype=BF16))
    main_grads = named([parameter])
    optimizer = AdamW(main_grads, weight_decay=0.0)
    main_grads.finish()
    for first in range(-(1 << 31), 1 << 31, size):
        master = torch.arange(first, first + size, dtype=torch.int64).to(torch.int32).view(FP32)
        optimizer.set_master("p0", "master", master, 0, size)
        optimizer.step()
        after = next(tensor for _, kind, tensor, _, _ in optimizer.masters() if kind == "master")
        number = master.isfinite()
        assert (after == master)[number].all()
        assert torch.equal(after.isnan(), ~number) and torch.equal(parameter.isnan(), ~number)  # inf - 0 inf is none
        weight = parameter.detach().float()
        near = number & weight.isfinite()
        assert ((weight - master).abs() <= (master.to(BF16).float() - master).abs())[near].all()


@needs_60_gib
def test_past_two_to_the_31():
    size = (1 << 31) + 16400
    parameter = nn.Parameter(torch.zeros(size, dtype=BF16))
    main_grads = named([parameter])
    optimizer = AdamW(main_grads, lr=0.5, betas=(0.0, 0.0), eps=0.0)
    parameter.main_grad[-16400:] = 1.0
    parameter.main_grad[0] = 2.0
    parameter.main_grad[1:-16400] = -1.0
    main_grads.finish()
    optimizer.step(zero=True)
    assert parameter[-16400:].eq(-0.5).all() and parameter[0] == -0.5 and parameter[1 : 1 << 31].eq(0.5).all()
    assert not parameter.main_grad.any()
