"""Tensor-parallel layers in eight bits, against one rank in fp64 and one rank in eight bits. The processes run fp8_ranks.py."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from ops.fp8_calls import decibels
from parallel import fp8_ranks
from parallel.fp8_ranks import BY_KERNELS, CASES, MUTANTS, RECIPES, STEPS, B, K, N, S, part, used, whole
from parallel.worlds import PAIRS, found_by

from onepass.gradients.fp8_scales import ROLES
from onepass.kernels.language import triton

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo"),
    pytest.mark.skipif(triton is None, reason="triton is not installed"),
]
cases = pytest.mark.parametrize("name", CASES)
recipes = pytest.mark.parametrize("kind", RECIPES)
ways = pytest.mark.parametrize(
    ("kind", "by"), [*((kind, "formulas") for kind in RECIPES), *((kind, "kernels") for kind in BY_KERNELS)]
)


@pytest.fixture(scope="module", params=PAIRS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(fp8_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


@cache
def unsharded(name):
    """Return y and all gradients of the layer in one piece, in fp64."""
    x, parameters, dy = whole()
    x = x.double().requires_grad_()
    parameters = {key: torch.nn.Parameter(t.double()) for key, t in parameters.items()}
    y = CASES[name][0](x, parameters, tp_group=None)
    y.backward(dy.double())
    return {"y": y.detach(), "x": x.grad, **{key: t.grad for key, t in used(name, parameters).items()}}


def joined(name, parts):
    """Return the whole tensors of the ranks' parts."""
    _, by_row, divided = CASES[name]
    dims = {"weight": 1, "x": -1} if by_row else {"weight": 0, "bias": 0, "y": -1}
    dims |= {"y" if by_row else "x": 0} if divided else {}
    summed = {"bias"} if by_row and divided else {"norm_weight"} if divided else set()

    def join(key):
        each = [mine[key] for mine in parts]
        return sum(t.double() for t in each) if key in summed else torch.cat(each, dims[key]) if key in dims else each[0]

    return {key: join(key) for key in parts[0]}


# ---- results ----


def by_way(found, by):
    """Return what each rank found by kernels, or by formulas where there is no GPU."""
    return [rank["kernels"] if by == "kernels" else rank for rank in found]


@ways
@cases
def test_as_one_rank_in_fp64(found, name, kind, by):
    found = by_way(found, by)
    ours, exact = joined(name, [rank["layer"][name, kind] for rank in found]), unsharded(name)
    for key, t in ours.items():
        assert t.shape == exact[key].shape
        assert decibels(t, exact[key]) > (28 if key == "y" else 20), key
    assert all(rank["layer"][name, kind][key].dtype == torch.bfloat16 for rank in found for key in ours)


@ways
@cases
def test_as_one_rank_in_eight_bits_bit_for_bit(found, name, kind, by):
    """Each rank's part of the products, of all rows, is what it makes of them without the others; sums are those of these."""
    found = by_way(found, by)
    _, by_row, divided = CASES[name]
    singles = [rank["alone"][name, kind] for rank in found]
    bias = whole()[1]["bias"]

    def summed(key):
        return sum(single[key].float() for single in singles).bfloat16()

    for at, (rank, single) in enumerate(zip(found, singles, strict=True)):
        mine = rank["layer"][name, kind]
        assert mine["weight"].equal(single["weight"])
        y = summed("y") + bias if by_row else single["y"] + part(bias, 0, at, len(found))
        assert mine["y"].equal(part(y, 0, at, len(found)) if by_row and divided else y)
        if by_row and divided and torch.cuda.is_available():  # cuBLAS may sum in another order for fewer rows
            assert decibels(mine["x"], single["x"]) > 50
        elif by_row:
            assert mine["x"].equal(single["x"])
        elif "norm" not in name:
            assert mine["x"].equal(part(summed("x"), 0, at, len(found)) if divided else summed("x"))


@cases
@recipes
def test_checkpointing_gives_the_same_bits(found, name, kind):
    for rank in found:
        assert all(t.equal(rank["again"][name, kind][key]) for key, t in rank["layer"][name, kind].items())


@cases
@recipes
def test_what_is_frozen_has_no_gradient_and_disturbs_nobody(found, name, kind):
    for rank in found:
        for asked, grads in rank["frozen"][name, kind].items():
            assert grads.pop(asked).equal(rank["layer"][name, kind][asked])
            assert all(grad is None for grad in grads.values())


@cases
def test_ranks_without_tokens(found, name):
    assert all(rank["no tokens"][name][0] == 0 for rank in found)


# ---- main_grad ----


@cases
@recipes
def test_main_grad_gathers_this_ranks_part(found, name, kind):
    for rank in found:
        mine = rank["gathered"][name, kind]
        assert mine["flags"] and all(mine["grads"])
    ours = joined(name, [rank["gathered"][name, kind]["main_grads"] for rank in found])
    for key, t in ours.items():
        assert decibels(t / 2, unsharded(name)[key]) > 20, key


@cases
@recipes
def test_flush_adds_what_backward_would_have_added(found, name, kind):
    """Also where the layer's scales are others by then."""
    by_row, divided = CASES[name][1:]
    for rank in found:
        mine = rank["flushed"][name, kind]
        assert mine["kept"] == 2 and not mine["before"].any() and mine["at once"].any()
        assert mine["later"].equal(mine["at once"])
        ranks, rows = len(found), S * B
        x, dy = (K // ranks if by_row else K), (N if by_row else N // ranks)
        x_rows, dy_rows = (rows // ranks if divided and by_row is of_dy else None for of_dy in (False, True))
        if RECIPES[kind].has_wgrad:  # codes, of which turned ones are padded to 48 rows, and two scales
            assert mine["bytes"] == 2 * ((x_rows or 48) * x + (dy_rows or 48) * dy + 8)
        else:  # dy is one tensor for both microbatches
            assert mine["bytes"] == 2 * (2 * (x_rows or rows) * x + (dy_rows or rows) * dy)


@pytest.mark.parametrize("put_off", (False, True))
@pytest.mark.parametrize("name", ("column, sequence", "row, sequence"))
def test_main_grads_whose_memory_comes_and_goes(found, name, put_off):
    ours = joined(name, [{"weight": rank["released"][name, put_off]} for rank in found])["weight"]
    assert decibels(ours / 2, unsharded(name)["weight"]) > 20


# ---- scales ----


@cases
def test_after_some_steps_ranks_share_the_scales_that_one_rank_would_have(found, name):
    """Of what is divided by rows, and of what all ranks have whole."""
    place = ROLES.index("gradient" if CASES[name][1] else "input")
    for rank in found:
        ours, single = (each["scales"] for each in rank["trained"][name])
        assert ours["steps"].tolist() == [STEPS - 1] * 3 and ours["started"].tolist() == [True, False, True]
        for key in ("scale", "history"):
            assert ours[key][place].equal(found[0]["trained"][name][0]["scales"][key][place])
            assert ours[key].equal(single[key])
        assert ours["history"][place].all()


@cases
def test_a_forward_without_gradients_leaves_no_trace(found, name):
    assert all(all(rank["looked_at"][name]) for rank in found)


def test_a_scale_that_ranks_had_of_their_own_becomes_one(found):
    first, second = (rank["shared_late"]["scales"] for rank in found)
    assert not first[0].equal(second[0]) and first[1].equal(second[1])
    assert first[1][0] == min(first[0][0], second[0][0]) and first[1][4] == 1 / first[1][0]
    assert all(rank["shared_late"]["copied"] for rank in found)
    whole_y = torch.cat([rank["shared_late"]["y"] for rank in found], -1)
    assert decibels(whole_y, unsharded("column, sequence")["y"] - whole()[1]["bias"]) > 25


@pytest.mark.parametrize("name", ("column, sequence", "row, sequence"))
def test_a_step_of_zeros_is_no_history_to_ranks_either(found, name):
    """Later steps have scales of their own values, and ranks that have a history measure nothing more."""
    _, by_row, _ = CASES[name]
    x, parameters, dy = (t.double() if isinstance(t, torch.Tensor) else t for t in whole())
    exact = {"y": x @ parameters["weight"].double().t(), "x": dy @ parameters["weight"].double()}
    for step in range(1, 5):
        for key, dim in (("y", 0 if by_row else -1), ("x", -1 if by_row else 0)):
            ours = torch.cat([rank["shared_zeros"][name]["steps"][step][key] for rank in found], dim)
            assert decibels(ours.double() * 2.0**20, exact[key]) > (25 if key == "y" else 20), (step, key)
    role = ROLES.index("gradient" if by_row else "input")
    assert all(rank["shared_zeros"][name]["started"][role] for rank in found)
    assert all(not rank["shared_zeros"][name]["counts"][1, role] for rank in found)


# ---- what is sent ----


@cases
@recipes
def test_what_is_sent(found, name, kind):
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
    for rank in found:
        for when, happened in rank["order"][name, kind].items():
            assert [what for what in happened if what.startswith("start")] == sent[when], when


@cases
@recipes
def test_what_is_sent_in_backward_is_under_way_during_a_product(found, name, kind):
    for rank in found:
        happened = list(rank["order"][name, kind]["backward"])
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
def test_the_next_ones_rows_come_while_this_product_is_made(found, name, kind):
    for rank in found:
        happened = ["start" if "start" in what else what for what in rank["order"][name, kind]["flush"]]
        waits = ["start", "start", "wait", "product", "wait", "product"]
        assert happened == (waits if CASES[name][2] else ["product"] * 2)


def test_ranks_that_do_not_agree_are_named(found):
    for rank in found:
        updated, unfit = rank["validated"]
        assert updated.startswith("x must be the same on all ranks of group, but is of shape (18, 64) and torch.uint8 on its")
        assert "torch.bfloat16 on its rank 1" in unfit


# ---- modules ----


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize("name", ("column", "row", "mlp"))
def test_modules(found, name, sequence):
    for rank in found:
        for key, (ours, exact) in rank["modules"][name, sequence].items():
            assert ours.shape == exact.shape
            assert decibels(ours, exact) > (25 if key == "y" else 18) - (4 if name == "mlp" else 0), key


# ---- mutants ----


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(found, name):
    assert not all(rank["mutants"][name] for rank in found)
