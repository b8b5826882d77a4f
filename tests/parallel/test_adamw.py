"""AdamW over main_grad: against fp64 and torch's, masters of every kind of number, states and schedules."""

import copy
import gc

import pytest
import torch
from parallel.adamw_oracle import (
    BF16,
    CASES,
    FP16,
    FP32,
    OPTIONS,
    SHAPES,
    Case,
    fed,
    gradients_of,
    groups_of,
    judge,
    kept,
    named,
    parameters_of,
    rounded,
)
from torch import nn

import onepass
from onepass.gradients import adamw as module
from onepass.gradients import adamw_formula, adamw_stepper
from onepass.gradients.adamw_formula import AdamWSlice, joined_master, store_master
from onepass.kernels.language import triton
from onepass.parallel import AdamW, MainGrads, MasterWeights

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="needs Triton"))]


@pytest.fixture(params=BACKENDS)
def backend(request):
    with onepass.use_backend(request.param):
        yield request.param


# ---- a step ----


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("backend")
def test_steps_are_the_formulas(name):
    assert not judge(module, named, CASES[name])


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_on_a_cpu_it_is_torchs_fused_bit_for_bit(dtype, clip, monkeypatch):
    monkeypatch.setattr(adamw_formula, "_A_THREADS", 1000)  # several blocks
    case = Case(SHAPES, dtype, OPTIONS)
    parameters = parameters_of(case)
    masters = [p.detach().float().requires_grad_() for p in parameters]
    theirs = torch.optim.AdamW(groups_of(case, masters), fused=True)
    main_grads = named(parameters)
    ours = AdamW(main_grads, groups_of(case, parameters))
    with onepass.use_backend("torch"):
        for step in range(100):
            grads = gradients_of(case, step)
            fed(main_grads, grads)
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.clone()
            norm = ours.step(clip)
            if clip is not None:
                total = main_grads.norm()
                assert torch.equal(total, norm)
                for master in masters:
                    master.grad.mul_((clip / (total + 1e-6)).clamp(max=1.0))
            theirs.step()
    for parameter, master, mine in zip(parameters, masters, kept(ours, parameters), strict=True):
        assert torch.equal(mine[0], master.detach().flatten())
        if parameter.numel():
            assert torch.equal(ours.state[parameter]["exp_avg"], theirs.state[master]["exp_avg"])
            assert torch.equal(ours.state[parameter]["exp_avg_sq"], theirs.state[master]["exp_avg_sq"])
            assert ours.state[parameter]["step"] == theirs.state[master]["step"] == 100
        assert torch.equal(parameter.detach().flatten(), rounded(mine[0], dtype))


@pytest.mark.skipif(triton is None, reason="needs Triton")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_kernels_stay_as_near_to_fp64_as_torchs_fused_over_a_hundred_steps(dtype):
    case = Case(((48, 32), (9,)), dtype)
    errors = {}
    wide = parameters_of(Case(case.shapes, FP32))
    start = [p.detach().to(dtype).double() for p in wide]
    exact = [p.clone().requires_grad_() for p in start]
    oracle = torch.optim.AdamW(exact, foreach=False)
    for step in range(100):
        for parameter, grad in zip(exact, gradients_of(case, step), strict=True):
            parameter.grad = grad.double()
        oracle.step()
    for backend in ("torch", "triton"):
        parameters = parameters_of(case)
        main_grads = named(parameters)
        optimizer = AdamW(main_grads)
        with onepass.use_backend(backend):
            for step in range(100):
                fed(main_grads, gradients_of(case, step))
                optimizer.step()
        found = torch.cat([master for master, _, _ in kept(optimizer, parameters)])
        off = found.double() - torch.cat([p.detach().flatten() for p in exact])
        errors[backend] = (off.square().mean().sqrt().item(), off.abs().max().item())
    assert errors["triton"][0] <= 1.25 * errors["torch"][0] and errors["triton"][1] <= 2 * errors["torch"][1], errors


def test_backends_go_on_with_each_others_state():
    case = CASES["bf16"]
    found = []
    for order in (["torch"] * 4, ["triton", "torch"] * 2 if triton else ["torch"] * 4):
        parameters = parameters_of(case)
        main_grads = named(parameters)
        optimizer = AdamW(main_grads, groups_of(case, parameters))
        for step, backend in enumerate(order):
            fed(main_grads, gradients_of(case, step))
            with onepass.use_backend(backend):
                optimizer.step(1.0)
        found.append(torch.cat([master for master, _, _ in kept(optimizer, parameters)]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("backend")
def test_options_may_change_at_every_step_and_a_learning_rate_may_be_a_tensor():
    case = Case(((16,), (8, 8)), BF16)
    results = []
    for lr in (1e-2, torch.tensor(1e-2)):
        parameters = parameters_of(case)
        main_grads = named(parameters)
        optimizer = AdamW(main_grads, lr=lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(4):
            fed(main_grads, gradients_of(case, step))
            optimizer.step()
            schedule.step()
            optimizer.param_groups[0].update(betas=(0.9 - step / 10, 0.99), weight_decay=step / 10, eps=1e-8 * (step + 1))
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1e-2 / 16)
        results.append(torch.cat([master for master, _, _ in kept(optimizer, parameters)]))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-9)
    parameters = parameters_of(case)
    masters = [p.detach().float().requires_grad_() for p in parameters]
    by_hand = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(4):
        for master, grad in zip(masters, gradients_of(case, step), strict=True):
            master.grad = grad
        by_hand.step()
        by_hand.param_groups[0].update(
            lr=1e-2 / 2 ** (step + 1), betas=(0.9 - step / 10, 0.99), weight_decay=step / 10, eps=1e-8 * (step + 1)
        )
    torch.testing.assert_close(results[0], torch.cat([m.detach().flatten() for m in masters]), rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("backend")
def test_nan_and_inf_are_seen():
    for bad in (float("nan"), float("inf"), float("-inf")):
        for dtype in (BF16, FP32, FP16):
            parameter = nn.Parameter(torch.ones(24, dtype=dtype))
            main_grads = named([parameter])
            optimizer = AdamW(main_grads)
            grad = torch.ones(24)
            grad[5] = bad
            fed(main_grads, [grad])
            optimizer.step()
            assert parameter.isnan().tolist() == [place == 5 for place in range(24)]
            assert kept(optimizer, [parameter])[0][0].isnan().sum() == 1
            fed(main_grads, [grad])
            norm = optimizer.step(1.0)  # as clip_: of a norm that is no number all become none
            assert not norm.isfinite() and parameter.isnan().sum() == (24 if bad != bad else 1)


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_a_step_past_a_graph_writes_what_the_graphs_replay_wrote(monkeypatch):
    case = Case(((16,), (8, 8)), BF16)
    results = []
    for replayed in (True, False):
        parameters = parameters_of(case)
        main_grads = named(parameters)
        optimizer = AdamW(main_grads, lr=1e-1)
        (stepper,) = optimizer._parts[0].steppers.values()
        fed(main_grads, gradients_of(case, 0))
        with onepass.use_backend("triton"), monkeypatch.context() as capture:
            capture.setattr(adamw_stepper, "is_capturing", lambda device: True)
            optimizer.step(1.0)
        of_graph = stepper.options.clone()
        for step in range(1, 3):
            optimizer.param_groups[0].update(lr=1e-3, betas=(0.5, 0.9), weight_decay=0.3, eps=1e-6)
            fed(main_grads, gradients_of(case, step))
            with onepass.use_backend("triton"):
                optimizer.step(0.5)
            if replayed:
                stepper.options.copy_(of_graph)  # as a replay does
        results.append(torch.cat([master for master, _, _ in kept(optimizer, parameters)]))
    assert torch.equal(*results)


@pytest.mark.usefixtures("backend")
def test_a_norm_that_is_known_is_not_taken_again(monkeypatch):
    parameters = [nn.Parameter(torch.zeros(8)) for _ in range(2)]
    for parameter, known in zip(parameters, (False, True), strict=True):
        main_grads = named([parameter])
        optimizer = AdamW(main_grads, eps=1.0)
        fed(main_grads, [torch.full((8,), 3.0)])
        norm = main_grads.norm() if known else None
        if known:
            monkeypatch.setattr(main_grads, "norm", None)
        assert optimizer.step(0.5, norm=norm).item() == pytest.approx(3 * 8**0.5)
    assert torch.equal(*parameters) and parameters[0].any()


# ---- masters ----


def masters_of_all_kinds():
    """Random bits; all upper halves, with lower ones at the edges of rounding."""
    random = torch.randint(-(2**31), 2**31, (1 << 20,)).to(torch.int32)
    upper = torch.arange(1 << 16, dtype=torch.int32)[:, None] << 16
    edges = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int32)
    return torch.cat([random, (upper | edges).flatten()])


def test_every_fp32_is_a_bf16_and_16_bits_more():
    bits = masters_of_all_kinds()
    master = bits.view(FP32)
    weight, low = torch.empty(len(bits), dtype=BF16), torch.empty(len(bits), dtype=torch.int16)
    nothing = torch.empty(0)
    store_master(AdamWSlice(weight, nothing, nothing, nothing, low, 0), master)
    again = joined_master(weight, low)
    number = ~master.isnan()
    assert torch.equal(again.view(torch.int32)[number], bits[number])
    assert again.isnan().equal(~number) and weight.isnan().equal(~number) and (~number).sum() > 1000
    nearest = master.to(BF16)
    tie = (bits & 0xFFFF) == 0x8000
    assert torch.equal(weight[number & ~tie], nearest[number & ~tie])
    finite = number & weight.isfinite()
    assert torch.equal(weight[finite], rounded(master[finite], BF16))
    assert (weight[finite].float().abs() >= master[finite].abs())[tie[finite]].all()
    assert torch.equal(weight[number & tie].float().view(torch.int32), bits[number & tie] + 0x8000)


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_the_kernel_keeps_every_master_that_a_step_leaves_alone():
    """Nothing is taken off where the gradient is 0 and nothing decays: exponents, subnormals, carries and inf."""
    bits = masters_of_all_kinds()[(1 << 20) - 4096 :: 5][:60000]
    master = bits.view(FP32)
    parameter = nn.Parameter(torch.zeros(len(bits), dtype=BF16))
    main_grads = named([parameter])
    optimizer = AdamW(main_grads, weight_decay=0.0)
    optimizer.set_master("p0", "master", master, 0, len(bits))
    fed(main_grads, [torch.zeros(len(bits))])
    with onepass.use_backend("triton"):
        optimizer.step()
    after = kept(optimizer, [parameter])[0][0]
    number = master.isfinite()
    assert torch.equal(after.view(torch.int32)[number], bits[number]) and (~number).any()
    assert after.isnan().equal(master.isnan() | master.isinf()) and parameter.isnan().equal(after.isnan())  # inf - 0 inf


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.usefixtures("backend")
def test_masters_keep_what_narrow_weights_would_lose_and_reload_takes_the_weights(dtype):
    parameter = nn.Parameter(torch.ones(8, dtype=dtype))
    main_grads = named([parameter])
    optimizer = AdamW(main_grads, lr=2.0**-12, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    for _ in range(64):
        fed(main_grads, [torch.ones(8)])
        optimizer.step()
    assert kept(optimizer, [parameter])[0][0].tolist() == [1 - 2.0**-6] * 8 and parameter.tolist() == [1 - 2.0**-6] * 8
    fed(main_grads, [torch.ones(8)])
    optimizer.step()
    with torch.no_grad():
        parameter.fill_(3.0)
    optimizer.reload()
    assert kept(optimizer, [parameter])[0][0].tolist() == [3.0] * 8


@pytest.mark.usefixtures("backend")
def test_weights_that_are_given_other_memory_are_found():
    parameters = parameters_of(Case(((64,), (9,)), BF16))
    main_grads = named(parameters)
    optimizer = AdamW(main_grads)
    parameters[0].data, old = parameters[0].data.clone(), parameters[0].data
    before = old.clone()
    fed(main_grads, [torch.ones(64), torch.ones(9)])
    optimizer.step()
    assert torch.equal(old, before) and not torch.equal(parameters[0], before)


def test_bytes_kept():
    """A master costs bf16 weights two bytes, fp16 ones four."""
    for dtype, more in ((BF16, 2), (FP16, 4), (FP32, 0)):
        parameter = nn.Parameter(torch.zeros(6400, dtype=dtype))
        optimizer = AdamW(named([parameter]))
        tensors = [tensor for name, tensor in optimizer.state[parameter].items() if name != "step"]
        assert sum(tensor.nbytes for tensor in tensors) == (8 + more) * 6400


# ---- the buffers ----


@pytest.mark.usefixtures("backend")
def test_what_a_step_has_cleared_is_not_cleared_again():
    parameter = nn.Parameter(torch.ones(64))
    main_grads = named([parameter])
    optimizer = AdamW(main_grads)
    fed(main_grads, [torch.ones(64)])
    optimizer.step(zero=True)
    version = main_grads.buffers[0]._version
    assert not parameter.main_grad.any()
    with pytest.raises(RuntimeError, match=r"step\(\) must come after finish\(\)"):
        optimizer.step()
    main_grads.zero_()
    assert main_grads.buffers[0]._version == version
    (parameter.sum() * 3).backward()
    main_grads.finish()
    assert parameter.main_grad.tolist() == [3.0] * 64
    optimizer.step(zero=True)
    parameter.main_grad[3] = 1.0  # by somebody else, who wants it gone
    optimizer.zero_grad()
    assert not parameter.main_grad.any()
    fed(main_grads, [torch.ones(64)])
    optimizer.step()
    main_grads.zero_()
    assert not parameter.main_grad.any()


def test_autograd_sees_that_weights_were_written(backend):
    weight = nn.Parameter(torch.ones(16))
    main_grads = named([weight])
    optimizer = AdamW(main_grads)
    y = (weight * weight).sum()
    fed(main_grads, [torch.ones(16)])
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- states ----


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.usefixtures("backend")
def test_a_state_comes_back_and_goes_on_bit_for_bit(dtype, tmp_path):
    case = Case(SHAPES, dtype, OPTIONS)

    def made():
        parameters = parameters_of(case)
        main_grads = named(parameters)
        optimizer = AdamW(main_grads, groups_of(case, parameters))
        return parameters, main_grads, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def steps(main_grads, optimizer, schedule, numbers):
        for step in numbers:
            fed(main_grads, gradients_of(case, step))
            optimizer.step(1.0)
            schedule.step()

    parameters, *first = made()
    steps(*first, range(2))
    torch.save(first[1].state_dict(), tmp_path / "state.pt")
    saved = first[2].state_dict()
    steps(*first, range(2, 4))
    others, *second = made()
    with torch.no_grad():
        for other in others:
            other.mul_(2)
    second[1].load_state_dict(torch.load(tmp_path / "state.pt"))
    second[2].load_state_dict(saved)
    steps(*second, range(2, 4))
    for mine, theirs, one, two in zip(parameters, others, kept(first[1], parameters), kept(second[1], others), strict=True):
        assert torch.equal(mine, theirs) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert first[1].param_groups[0]["lr"] == second[1].param_groups[0]["lr"]


def test_a_state_is_torchs():
    """What torch's AdamW has saved of fp32 weights goes on here, and what is saved here goes on there."""
    case = Case(SHAPES, FP32, OPTIONS)
    theirs, ours = parameters_of(case), parameters_of(case)
    torchs = torch.optim.AdamW(groups_of(case, theirs), fused=True)
    for step in range(2):
        for parameter, grad in zip(theirs, gradients_of(case, step), strict=True):
            parameter.grad = grad.clone()
        torchs.step()
    main_grads = named(ours)
    optimizer = AdamW(main_grads, groups_of(case, ours))
    optimizer.load_state_dict(torchs.state_dict())
    with torch.no_grad():
        for mine, parameter in zip(ours, theirs, strict=True):
            mine.copy_(parameter)
    state = optimizer.state_dict()
    again = torch.optim.AdamW(groups_of(case, copy.deepcopy(theirs)), fused=True)
    again.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    fed(main_grads, gradients_of(case, 2))
    for parameter, grad in zip(theirs, gradients_of(case, 2), strict=True):
        parameter.grad = grad.clone()
    with onepass.use_backend("torch"):
        optimizer.step()
    torchs.step()
    assert all(torch.equal(mine, parameter) for mine, parameter in zip(ours, theirs, strict=True))
    assert again.state[again.param_groups[0]["params"][0]]["step"] == 2


def test_masters_in_parts_and_hooks():
    case = CASES["bf16"]
    parameters, others = parameters_of(case), parameters_of(case)
    one, two = (AdamW(named(each), groups_of(case, each)) for each in (parameters, others))
    fed(one._main_grads, gradients_of(case, 0))
    one.step()
    for name, kind, tensor, start, stop in one.masters():
        middle = (start + stop) // 2
        two.set_master(name, kind, tensor[: middle - start].double(), start, middle)
        two.set_master(name, kind, tensor[middle - start :], middle, stop)
    two.set_step(1)
    two.publish()
    assert all(
        torch.equal(a, b)
        for mine, theirs in zip(kept(one, None), kept(two, None), strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    assert two.state[others[0]]["step"] == 1
    said = []
    two.register_load_state_dict_pre_hook(lambda optimizer, state: said.append("before"))
    two.register_load_state_dict_post_hook(lambda optimizer: said.append("after"))
    two.load_state_dict(one.state_dict())
    assert said == ["before", "after"]
    with pytest.raises(ValueError, match=r"must be of what masters\(\) gives, but are p0, master, 0, 961"):
        two.set_master("p0", "master", torch.zeros(961), 0, 961)
    with pytest.raises(ValueError, match="values must be 2 numbers, but are 3"):
        two.set_master("p0", "master", torch.zeros(3), 0, 2)


# ---- states, one at a time ----


def stepped(dtype, steps=2):
    """Parameters after some steps, whose gradients are not cleared."""
    case = Case(SHAPES, dtype, OPTIONS)
    parameters = parameters_of(case)
    main_grads = named(parameters)
    optimizer = AdamW(main_grads, groups_of(case, parameters))
    with onepass.use_backend("torch"):
        for step in range(steps):
            fed(main_grads, gradients_of(case, step))
            optimizer.step(1.0)
    return parameters, main_grads, optimizer


def all_equal(ones, others):
    return all(torch.equal(a, b) for one, two in zip(ones, others, strict=True) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_states_are_read_where_they_lie_and_written(dtype):
    parameters, main_grads, optimizer = stepped(dtype)
    main_grads.zero_()
    main_grads.buffers[0].fill_(3.0)
    before, weights = kept(optimizer, parameters), [p.clone() for p in parameters]
    others, _, another = stepped(dtype, 5)
    wholly = dict(zip(map(id, parameters), kept(another, others), strict=True))
    for parameter, state, start in optimizer.parameter_states():
        for kind in module.KINDS:
            found = state.read(kind)
            stored = {"master": {FP16: state.stored.get("master"), FP32: parameter}.get(dtype)}.get(kind, state.stored.get(kind))
            assert found.dtype == FP32 and start == 0 and (stored is None or found.data_ptr() == stored.data_ptr())
    assert all_equal(before, kept(optimizer, parameters)) and all(map(torch.equal, parameters, weights))
    for parameter, state, _ in optimizer.parameter_states():
        for kind, theirs in zip(module.KINDS, wholly[id(parameter)], strict=True):
            state.write(kind, theirs)
    assert all_equal(kept(another, others), kept(optimizer, parameters))
    assert all(map(torch.equal, parameters, others)) and (main_grads.buffers[0] == 3.0).all()


def test_states_of_weights_that_were_given_other_memory():
    parameters, _, optimizer = stepped(BF16)
    parameters[0].data = parameters[0].data.clone()
    next(state for parameter, state, _ in optimizer.parameter_states() if parameter is parameters[0]).write(
        "master", torch.full((960,), 2.0)
    )
    assert (parameters[0] == 2.0).all()


def test_states_that_do_not_fit_change_nothing():
    one, two = nn.Parameter(torch.ones(8, dtype=BF16)), nn.Parameter(torch.ones(8))
    optimizer = AdamW(named([one, two]))
    good = copy.deepcopy(optimizer.state_dict())
    short, other = (copy.deepcopy(good) for _ in range(2))
    del short["state"][0]["master"]
    other["shard"] = [1, 2]
    few = {**good, "param_groups": [{**good["param_groups"][0], "params": [0]}]}
    for state, words in (
        (short, r"state must have master of shape \(8,\) for p0, but has None"),
        (other, r"state must be of \[rank, ranks\] \[0, 1\], but is of \[1, 2\]"),
        (few, r"state must have groups of \[2\] parameters, but has \[1\]"),
    ):
        for value in state["state"].values():
            value["exp_avg"].fill_(7)
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(state)
    assert not optimizer.state[one]["exp_avg"].any()


# ---- what is refused ----


def test_what_cannot_be_stepped_is_named():
    one, two = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4).t())
    with pytest.raises(TypeError, match=r"main_grads must have dtype torch.float32, but has torch.bfloat16"):
        AdamW(MainGrads([one], dtype=BF16))
    gc.collect()
    main_grads = MainGrads([one])
    for options, words in (
        ({"lr": -1.0}, "lr must be 0 or more, but is -1.0"),
        ({"betas": (0.9, 1.0)}, r"betas must be at least 0 and below 1, but are \(0.9, 1.0\)"),
        ({"eps": -1e-8}, "eps must be 0 or more"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        ({"groups": []}, "parameter 0 is in none"),
    ):
        with pytest.raises(ValueError, match=words):
            AdamW(main_grads, **options)
    with pytest.raises(ValueError, match=r"parameter 0 must be contiguous, but has strides \(1, 4\): MasterWeights takes any"):
        AdamW(MainGrads([two]))
    optimizer = AdamW(main_grads)
    with pytest.raises(RuntimeError, match=r"step\(\) must come after finish\(\)"):
        optimizer.step()
    main_grads.finish()
    for wrong in (-1, float("nan"), "1", lambda: None):
        with pytest.raises(ValueError, match="max_norm must be a number of 0 or more, or None"):
            optimizer.step(wrong)
    with pytest.raises(RuntimeError, match="groups must be given when AdamW is made"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert one.tolist() == [1.0] * 4


def test_a_batch_keeps_to_what_lies_evenly():
    """Odd sizes and odd addresses have a launch of their own; nothing else is divided."""
    pytest.importorskip("triton")
    from onepass.gradients.adamw_kernels import batches_of

    storage = torch.zeros(200, dtype=BF16)
    parameters = [nn.Parameter(storage[:64]), nn.Parameter(storage[65:129]), nn.Parameter(torch.zeros(63, dtype=BF16))]
    optimizer = AdamW(named(parameters))
    batches = batches_of(each for piece in optimizer._pieces() for _, each in piece.state.slices(piece.grads))
    assert sorted((batch.align, batch.programs) for batch in batches) == [(1, 2), (8, 1)]
    assert all(piece.state.read("master").dtype == FP32 for piece in optimizer._pieces())


def test_it_agrees_with_master_weights():
    case = Case(((32, 8), (5,)), BF16)
    results = []
    for make in (
        lambda mg: AdamW(mg, lr=1e-2),
        lambda mg: MasterWeights(mg, lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True)),
    ):
        parameters = parameters_of(case)
        main_grads = named(parameters)
        weights = make(main_grads)
        with onepass.use_backend("torch"):
            for step in range(10):
                fed(main_grads, gradients_of(case, step))
                weights.step()
        results.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
