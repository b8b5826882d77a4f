"""Tensor-parallel layers in eight bits, against one rank in fp64 and one rank in eight bits."""

import pickle
from contextlib import contextmanager
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ops.fp8_calls import decibels
from parallel.fp8_layers import (
    CASES,
    RECIPES,
    STEPS,
    B,
    K,
    N,
    S,
    end_step,
    flushed,
    part,
    running,
    shard,
    trained,
    used,
    whole,
    with_main_grad,
)
from parallel.meeting import drawn, error_of, gather, own_group
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.kernels import cublaslt
from onepass.kernels.language import triton
from onepass.nn import MLP, ColumnParallelLinear, RowParallelLinear
from onepass.parallel import DeferredWgrad, MainGrads
from onepass.product.fp8.scales import ROLES

pytestmark = pytest.mark.skipif(triton is None, reason="triton is not installed")
rank_context = partial(running, "formulas")
BY_KERNELS = ("delayed", "row")  # without a GPU: the others' kernels are these
cases = pytest.mark.parametrize("name", CASES)
recipes = pytest.mark.parametrize("kind", RECIPES)
sequences = pytest.mark.parametrize("name", ("column, sequence", "row, sequence"))
ways = pytest.mark.parametrize(
    ("kind", "by"), [*((kind, "formulas") for kind in RECIPES), *((kind, "kernels") for kind in BY_KERNELS)]
)


# ---- results ----


@cache
def layer(name, kind, by="formulas", sequence=S):
    """Return this rank's y and gradients."""
    x, parameters, dy = shard(name, dist.group.WORLD, sequence)
    with running(by):
        y = CASES[name][0](x, parameters, tp_group=dist.group.WORLD, precision=RECIPES[kind])
        y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **{key: t.grad for key, t in used(name, parameters).items()}}


@cache
def alone(name, kind, by):
    """Return what this rank makes of its part of the weight without a group, with all rows of x and dy, and without the bias."""
    x, parameters, dy = shard(name, dist.group.WORLD, divide=False)
    parameters["bias"] = None
    with running(by):
        y = CASES[name][0](x, parameters, tp_group=None, precision=RECIPES[kind])
        y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "weight": parameters["weight"].grad}


@cache
def unsharded(name):
    """Return y and all gradients of the layer in one piece, in fp64."""
    x, parameters, dy = whole()
    x = x.double().requires_grad_()
    parameters = {key: torch.nn.Parameter(t.double()) for key, t in parameters.items()}
    y = CASES[name][0](x, parameters, tp_group=None)
    y.backward(dy.double())
    return {"y": y.detach(), "x": x.grad, **{key: t.grad for key, t in used(name, parameters).items()}}


def joined(name, mine):
    """Return the whole tensors of which each rank has a part."""
    _, by_row, divided = CASES[name]
    dims = {"weight": 1, "x": -1} if by_row else {"weight": 0, "bias": 0, "y": -1}
    dims |= {"y" if by_row else "x": 0} if divided else {}
    summed = {"bias"} if by_row and divided else {"norm_weight"} if divided else set()
    parts = gather(dist.group.WORLD, mine)

    def join(key):
        each = [part[key] for part in parts]
        return sum(t.double() for t in each) if key in summed else torch.cat(each, dims[key]) if key in dims else each[0]

    return {key: join(key) for key in mine}


@ways
@cases
def test_as_one_rank_in_fp64(group, name, kind, by):
    mine, exact = layer(name, kind, by), unsharded(name)
    assert all(t.dtype == torch.bfloat16 for t in mine.values())
    for key, t in joined(name, mine).items():
        assert t.shape == exact[key].shape
        assert decibels(t, exact[key]) > (28 if key == "y" else 20), key


@ways
@cases
def test_as_one_rank_in_eight_bits_bit_for_bit(group, name, kind, by):
    """Each rank's part of the products, of all rows, is what it makes of them without the others; sums are those of these."""
    _, by_row, divided = CASES[name]
    rank, ranks = group.rank(), group.size()
    mine, single, bias = layer(name, kind, by), alone(name, kind, by), whole()[1]["bias"]
    singles = gather(group, single)

    def summed(key):
        return sum(each[key].float() for each in singles).bfloat16()

    assert mine["weight"].equal(single["weight"])
    y = summed("y") + bias if by_row else single["y"] + part(bias, 0, rank, ranks)
    assert mine["y"].equal(part(y, 0, rank, ranks) if by_row and divided else y)
    if by_row and divided and torch.cuda.is_available():  # cuBLAS may sum in another order for fewer rows
        assert decibels(mine["x"], single["x"]) > 50
    elif by_row:
        assert mine["x"].equal(single["x"])
    elif "norm" not in name:
        assert mine["x"].equal(part(summed("x"), 0, rank, ranks) if divided else summed("x"))


@cases
@recipes
def test_checkpointing_gives_the_same_bits(group, name, kind):
    x, parameters, dy = shard(name, group)
    options = {"tp_group": group, "precision": RECIPES[kind], "use_reentrant": False}
    y = checkpoint(CASES[name][0], x, parameters, **options)
    y.backward(dy)
    mine = {"y": y, "x": x.grad, **{key: t.grad for key, t in used(name, parameters).items()}}
    assert all(t.equal(mine[key]) for key, t in layer(name, kind).items())


@cases
@recipes
def test_what_is_frozen_has_no_gradient_and_disturbs_nobody(group, name, kind):
    for asked in ("x", "weight"):
        x, parameters, dy = shard(name, group)
        x.requires_grad_(asked == "x")
        for key, parameter in parameters.items():
            parameter.requires_grad_(key == asked)
        CASES[name][0](x, parameters, tp_group=group, precision=RECIPES[kind]).backward(dy)
        grads = {"x": x.grad, **{key: t.grad for key, t in parameters.items()}}
        assert grads.pop(asked).equal(layer(name, kind)[asked])
        assert all(grad is None for grad in grads.values())


@cases
def test_ranks_without_tokens(group, name):
    assert layer(name, "delayed", sequence=0)["y"].shape[0] == 0


# ---- main_grad ----


@cases
@recipes
def test_main_grad_gathers_this_ranks_part(group, name, kind):
    """Of two microbatches."""
    x, parameters, dy = shard(name, group)
    with_main_grad(parameters)
    for _ in range(2):
        CASES[name][0](x, parameters, tp_group=group, precision=RECIPES[kind]).backward(dy)
    mine = used(name, parameters)
    assert all(t.grad_added_to_main_grad and (t.grad is None or not t.grad.any()) for t in mine.values())
    for key, t in joined(name, {key: t.main_grad for key, t in mine.items()}).items():
        assert decibels(t / 2, unsharded(name)[key]) > 20, key


@cases
@recipes
def test_flush_adds_what_backward_would_have_added(group, name, kind):
    """Also where the layer's scales are others by then."""
    by_row, divided = CASES[name][1:]
    mine, ranks, rows = flushed(name, kind, group), group.size(), S * B
    assert mine["kept"] == 2 and not mine["before"].any() and mine["at once"].any()
    assert mine["later"].equal(mine["at once"])
    x, dy = (K // ranks if by_row else K), (N if by_row else N // ranks)
    x_rows, dy_rows = (rows // ranks if divided and by_row is of_dy else None for of_dy in (False, True))
    if RECIPES[kind].has_wgrad:  # codes, of which transposed ones are padded to 48 rows, and two scales
        assert mine["bytes"] == 2 * ((x_rows or 48) * x + (dy_rows or 48) * dy + 8)
    else:  # dy is one tensor for both microbatches
        assert mine["bytes"] == 2 * (2 * (x_rows or rows) * x + (dy_rows or rows) * dy)


@sequences
@pytest.mark.parametrize("put_off", (False, True))
def test_main_grads_whose_memory_comes_and_goes(group, name, put_off):
    x, parameters, dy = shard(name, group)
    weight, later = parameters["weight"], DeferredWgrad() if put_off else None
    main_grads = MainGrads([weight], group=own_group(), release=True)
    call = partial(CASES[name][0], tp_group=group, precision="fp8", deferred=later)
    for _ in range(2):
        main_grads.zero_()
        with main_grads.accumulate():
            call(x, parameters).backward(dy)
        call(x, parameters).backward(dy)
        if later is not None:
            later.flush()
        main_grads.finish()
    ours = joined(name, {"weight": weight.main_grad})["weight"]
    assert decibels(ours / 2, unsharded(name)["weight"]) > 20


# ---- scales ----


@cases
def test_after_some_steps_ranks_share_the_scales_that_one_rank_would_have(group, name):
    """Of what is divided by rows, and of what all ranks have whole."""
    place = ROLES.index("gradient" if CASES[name][1] else "input")
    ours, single = (trained(name, group, divide=divide)["scales"] for divide in (True, False))
    first = gather(group, ours)[0]
    assert ours["steps"].tolist() == [STEPS - 1] * 3 and ours["started"].tolist() == [True, False, True]
    for key in ("scale", "history"):
        assert ours[key][place].equal(first[key][place])
        assert ours[key].equal(single[key])
    assert ours["history"][place].all()


@cases
def test_a_forward_without_gradients_leaves_no_trace(group, name):
    x, parameters, dy = shard(name, group)
    call = partial(CASES[name][0], tp_group=group, precision=RECIPES["delayed"])
    y = call(x, parameters)
    y.backward(dy)
    scales = parameters["weight"].fp8.scales
    before = {key: t.clone() for key, t in scales.state_dict().items()}
    with torch.no_grad():
        assert call(x, parameters).equal(y)
        call(x * 100, parameters)
    assert all(t.equal(before[key]) for key, t in scales.state_dict().items())


def test_a_scale_that_ranks_had_of_their_own_becomes_one(group):
    """After a call in which each rank has the x of its own, one gathers it."""
    x, parameters, dy = shard("column, sequence", group)
    scales = []
    for sequence in (False, True):
        options = {"tp_group": group, "sequence_parallel": sequence, "precision": RECIPES["delayed"]}
        y = onepass.linear(x, parameters["weight"], **options)
        if not sequence:  # a step is over
            with torch.no_grad():
                parameters["weight"].mul_(1)
            onepass.linear(x, parameters["weight"], **options)
        scales.append(parameters["weight"].fp8.scales.factors[0].clone())
    y.backward(dy)
    copied = pickle.loads(pickle.dumps(parameters["weight"].fp8.scales))
    assert copied.factors.equal(parameters["weight"].fp8.scales.factors)
    first, second = gather(group, scales)
    assert not first[0].equal(second[0]) and first[1].equal(second[1])
    assert first[1][0] == min(first[0][0], second[0][0]) and first[1][4] == 1 / first[1][0]
    whole_y = torch.cat(gather(group, y.detach()), -1)
    assert decibels(whole_y, unsharded("column, sequence")["y"] - whole()[1]["bias"]) > 25


@sequences
def test_a_step_of_zeros_is_no_history_to_ranks_either(group, name):
    """Later steps have scales of their own values, and ranks that have a history measure nothing more."""
    _, by_row, _ = CASES[name]
    x, parameters, dy = (t.double() if isinstance(t, torch.Tensor) else t for t in whole())
    exact = {"y": x @ parameters["weight"].double().t(), "x": dy @ parameters["weight"].double()}
    dims = {"y": 0 if by_row else -1, "x": -1 if by_row else 0}
    x, parameters, dy = shard(name, group)
    call = partial(CASES[name][0], tp_group=group, precision=RECIPES["delayed"])
    for step, factor in enumerate((0.0, 2.0**-20, 2.0**-20, 2.0**-20, 2.0**-20)):
        own = (x.detach() * factor).requires_grad_()
        y = call(own, parameters | {"bias": None})
        y.backward(dy * factor)
        with torch.no_grad():
            parameters["weight"].mul_(1)
        for key, t in (("y", y.detach()), ("x", own.grad)) if step else ():
            ours = torch.cat(gather(group, t), dims[key])
            assert decibels(ours.double() * 2.0**20, exact[key]) > (25 if key == "y" else 20), (step, key)
    scales, role = parameters["weight"].fp8.scales, ROLES.index("gradient" if by_row else "input")
    assert list(scales.started)[role] and not scales.counts()[1, role]


# ---- what is sent ----


@cache
def order(name, kind):
    """Return what each part of a step does, in order: what is sent, as "start gather uint8", waits and products."""
    group = dist.group.WORLD
    x, parameters, dy = shard(name, group)
    call = partial(CASES[name][0], tp_group=group, precision=RECIPES[kind])
    for _ in range(2):  # in the second ranks learn that there is a history
        end_step(call, x, parameters, dy)
    happened, here, scaled_mm = {}, [], cublaslt.scaled_mm

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            said = str(function)
            if "c10d_functional" in said:
                sent = f"{said.split('.')[1].split('_')[1]} {args[0].dtype}".replace("torch.", "")
                here.append("wait" if "wait" in said else f"start {sent}")
            elif ".mm" in said or ".addmm" in said or "scaled_mm" in said or "add_gradient" in said or "fp8_gradient" in said:
                here.append("product")
                with patch.object(cublaslt, "scaled_mm", scaled_mm):  # the same one, where the op calls cuBLASLt
                    return function(*args, **(kwargs or {}))
            return function(*args, **(kwargs or {}))

    def watched(*args, **options):  # cuBLASLt, which is called without PyTorch
        here.append("product")
        return scaled_mm(*args, **options)

    @contextmanager
    def watching(part):
        nonlocal here
        here = happened[part] = []
        with Watch(), patch.object(cublaslt, "scaled_mm", watched):
            yield

    with watching("forward"):
        y = call(x, parameters)
    with watching("backward"):
        y.backward(dy)
    later = DeferredWgrad()
    with_main_grad(parameters)
    for _ in range(2):
        call(x, parameters, deferred=later).backward(dy)
    with watching("flush"):
        later.flush()
    with torch.no_grad():
        parameters["weight"].mul_(2)
    with watching("refresh"):
        parameters["weight"].fp8.update(parameters["weight"])
    return happened


@cases
@recipes
def test_what_is_sent(group, name, kind):
    """Rows of x and dy go in eight bits, but for a weight's gradient in 16. A new scale takes 64 numbers."""
    _, by_row, divided = CASES[name]
    recipe = RECIPES[kind]
    new_scale = ["start reduce int32"] if divided and recipe.scaling == "current" else []
    codes = ["start gather uint8", *["start gather float32"] * (recipe.scaling == "row")]
    again = codes if recipe.has_wgrad else ["start gather bfloat16"]
    wide = "bfloat16" if torch.cuda.is_available() else "float32"
    sums = [f"start {'scatter' if divided else 'reduce'} {wide}"]
    sent = {
        "forward": sums if by_row else new_scale + codes if divided else [],
        "backward": (new_scale + again if divided else []) if by_row else (again if divided else []) + sums,
        "refresh": ["start reduce int32"] if divided and recipe.scaling == "delayed" else [],
        "flush": [again[0]] * 2 if divided else [],
    }
    for when, happened in order(name, kind).items():
        assert [what for what in happened if what.startswith("start")] == sent[when], when


@cases
@recipes
def test_what_is_sent_in_backward_is_under_way_during_a_product(group, name, kind):
    happened = list(order(name, kind)["backward"])
    if "start reduce int32" in happened:  # nothing can be cast without the scale
        at = happened.index("start reduce int32")
        assert happened[at + 1] == "wait"
        del happened[at : at + 2]
    for at, what in enumerate(happened):
        if what == "wait":
            first = next(i for i, each in enumerate(happened) if each.startswith("start"))
            assert "product" in happened[first:at], happened
    assert sum(each.startswith("start") for each in happened) == happened.count("wait")


@cases
@recipes
def test_the_next_ones_rows_come_while_this_product_is_made(group, name, kind):
    happened = ["start" if "start" in what else what for what in order(name, kind)["flush"]]
    waits = ["start", "start", "wait", "product", "wait", "product"]
    assert happened == (waits if CASES[name][2] else ["product"] * 2)


def test_ranks_that_do_not_agree_are_named(group):
    """One has updated its weight and the other has not, or has an odd part."""
    x, parameters, _ = shard("column, sequence", group)
    weight, options = parameters["weight"].detach(), {"tp_group": group, "sequence_parallel": True, "precision": "fp8"}
    x.requires_grad_()
    for _ in range(2):
        onepass.linear(x, weight, **options)
        weight.mul_(1)
    onepass.linear(x, weight, **options)
    if group.rank() == 1:
        weight.add_(1)
    with onepass.validate():
        said = error_of(onepass.linear, x, weight, **options)
        assert said.startswith("x must be the same on all ranks of group, but is of shape (18, 64) and torch.uint8 on its")
        said = error_of(onepass.linear, x, weight[: len(weight) - 8 * group.rank()].clone(), **options)
        assert "torch.bfloat16 on its rank 1" in said


# ---- modules ----


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize(("name", "module"), [("column", ColumnParallelLinear), ("row", RowParallelLinear), ("mlp", MLP)])
def test_modules(group, name, module, sequence):
    """Against the same in fp32 on one rank."""
    sizes = (K, N) if name != "row" else (N, K)
    torch.manual_seed(5)
    ours = module(*sizes, tp_group=group, sequence_parallel=sequence, precision="fp8")
    torch.manual_seed(5)
    plain = module(*sizes)
    x, dy = (drawn(torch.randn, S, B, size, generator=torch.Generator().manual_seed(7)) for size in sizes)
    dy = x.clone() if name == "mlp" else dy
    rows = partial(part, dim=0, rank=group.rank(), ranks=group.size()) if sequence else lambda t: t
    columns = partial(part, dim=-1, rank=group.rank(), ranks=group.size())
    own_x = (columns(x) if name == "row" else rows(x)).requires_grad_()
    y = ours(own_x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(columns(dy) if name == "column" else rows(dy))
    exact = plain(x.requires_grad_())
    exact = exact[0] if isinstance(exact, tuple) else exact
    exact.backward(dy)
    pairs = {
        "y": (y, columns(exact.detach()) if name == "column" else rows(exact.detach())),
        "x": (own_x.grad, columns(x.grad) if name == "row" else rows(x.grad)),
    }
    if name != "mlp":
        pairs["weight"] = ours.weight.grad, part(plain.weight.grad, 1 if name == "row" else 0, group.rank(), group.size())
    for key, (mine, wanted) in pairs.items():
        assert mine.shape == wanted.shape
        assert decibels(mine, wanted) > (25 if key == "y" else 18) - (4 if name == "mlp" else 0), key
