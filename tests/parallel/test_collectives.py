"""Collectives and their gradients against the unsharded computation. The processes run collectives_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from parallel import collectives_ranks
from parallel.worlds import WORLDS, found_by

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")

NAMES = list(collectives_ranks.cases(2))


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(collectives_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


def whole(name, ranks, dtype):
    """Unsharded and in fp64: each place's y and dx."""
    xs, dys = collectives_ranks.inputs(name, ranks, dtype)
    same_x, same_dy = collectives_ranks.cases(ranks)[name][3:]
    leaves = [x.double().requires_grad_() for x in xs]
    if same_x:  # one tensor, which all ranks have
        leaves = leaves[:1] * ranks
    total = sum(leaves) if name in ("sum_over_group", "reduce_scatter_sequence") else None
    ys = {
        "copy_to_group": lambda: leaves,
        "sum_over_group": lambda: [total] * ranks,
        "gather_last": lambda: [torch.cat(leaves, -1)] * ranks,
        "split_last": lambda: leaves[0].chunk(ranks, -1),
        "gather_sequence": lambda: [torch.cat(leaves)] * ranks,
        "reduce_scatter_sequence": lambda: total.chunk(ranks),
        "split_sequence": lambda: leaves[0].chunk(ranks),
    }[name.partition(" ")[0]]()
    if same_dy:  # one result, which all ranks have
        torch.autograd.backward(ys[0], dys[0].double())
    else:
        torch.autograd.backward(ys, [dy.double() for dy in dys])
    return [(y.detach(), leaf.grad) for y, leaf in zip(ys, leaves, strict=True)]


def tolerance(dtype, summed):
    """Of sums over these ranks. 16-bit ones are made in fp32 and rounded once, but where NCCL rounds every one of several."""
    if dtype == torch.float32:
        return {"rtol": 1e-6, "atol": 1e-6}
    roundings = 0 if summed[0]["backend"] == "gloo" else len(summed) - 2
    return {"rtol": 0, "atol": roundings * torch.finfo(dtype).eps / 2 * 8}  # the sums are less than 8


def check(mine, expected, dtype, found):
    y, dx = expected
    for one, other in ((mine["y"], y), (mine["dx"], dx), (mine["third"], dx)):
        assert one.dtype == dtype and one.shape == other.shape
        torch.testing.assert_close(one, other.to(dtype), **tolerance(dtype, found))
    assert torch.equal(mine["twice"], 2 * mine["dx"]) and torch.equal(mine["third"], mine["dx"])
    assert mine["unchanged"]


@pytest.mark.parametrize("dtype", collectives_ranks.TYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_as_unsharded(found, name, dtype):
    for mine, expected in zip(found, whole(name, len(found), dtype), strict=True):
        check(mine["mappings"][name, dtype], expected, dtype, found)


@pytest.mark.parametrize("dtype", collectives_ranks.TYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_as_unsharded_in_groups_of_every_other_rank(found, name, dtype):
    expected = whole(name, 2, dtype)
    for rank, mine in enumerate(found):
        place = collectives_ranks.members(len(found), rank).index(rank)
        check(mine["strided_groups"][name, dtype], expected[place], dtype, found[:2])


@pytest.mark.parametrize("name", NAMES)
def test_strided_inputs_and_gradients(found, name):
    for mine, expected in zip(found, whole(name, len(found), torch.bfloat16), strict=True):
        check(mine["layouts"][name], expected, torch.bfloat16, found)


def test_no_tokens_and_expanded_gradients(found):
    ranks = len(found)
    for rank in found:
        shapes, dx = rank["empty"]
        assert shapes.pop("gather_last") == ((0, 4 * ranks), (0, 4))
        assert shapes.pop("split_last") == ((0, 4 // ranks), (0, 4))
        assert len(shapes) == 5 and all(pair == ((0, 4), (0, 4)) for pair in shapes.values())
        assert torch.equal(dx, torch.full((2, 3), 2.0 * ranks))


def test_what_is_sent(found):
    gather, total, scatter = ["all_gather_into_tensor"], ["all_reduce"], ["reduce_scatter_tensor"]
    for rank in found:
        assert rank["sent"] == {
            "copy_to_group": ([], total, False),
            "sum_over_group": (total, [], False),
            "gather_last": (gather * 2, [], False),
            "gather_last uneven": (gather * 2, [], False),
            "gather_last sizes": (gather, [], False),
            "split_last": ([], gather, False),
            "gather_sequence": (gather, scatter, False),
            "gather_sequence alike": (gather, [], False),
            "reduce_scatter_sequence": (scatter, gather, False),
            "split_sequence": ([], gather, False),
        }


def test_a_gradient_is_not_differentiated(found):
    for rank in found:
        assert len(rank["again"]) == len(NAMES)
        assert all("differentiable once" in said for said in rank["again"])


def test_bare_pieces(found):
    ranks = len(found)
    for dtype in collectives_ranks.TYPES:
        xs = [collectives_ranks.numbers(2, rank, (4, 3), dtype) for rank in range(ranks)]
        total = sum(x.double() for x in xs)
        for rank, mine in enumerate(found):
            gathered, part, totals, same, unchanged = mine["bare"][dtype]
            assert torch.equal(gathered, torch.cat(xs))
            assert part.dtype == dtype and all(one.dtype == dtype for one in totals)
            close = tolerance(dtype, found)
            torch.testing.assert_close(part, total.chunk(ranks)[rank].to(dtype), **close)
            contiguous, after, strided, after_strided = totals
            torch.testing.assert_close(contiguous, total.to(dtype), **close)
            torch.testing.assert_close(strided, total.to(dtype), **close)
            assert not after.any() and not after_strided.any()
            assert same and unchanged


def test_many_in_flight(found):
    ranks = len(found)
    for rank in found:
        wholes, parts, buffer = rank["in_flight"]
        for index, (gathered, part) in enumerate(zip(wholes, parts, strict=True)):
            each = [float(place + index) for place in range(ranks)]
            assert torch.equal(gathered, torch.tensor(each).repeat_interleave(1000)[:, None].expand(-1, 8))
            assert torch.equal(part, torch.full((1000 // ranks, 8), sum(each)).bfloat16())
        assert torch.equal(buffer, torch.full((6, 1000), float(sum(range(ranks)))))


def test_errors_name_the_argument_and_nothing_is_sent(found):
    ranks = len(found)
    for place, rank in enumerate(found):
        said, sent = rank["errors"]
        first = f"x's first dimension must be a multiple of {ranks}, the size of group, but is {ranks + 1}: x has shape"
        last = f"x's last dimension must be a multiple of {ranks}, the size of group, but is {2 * ranks - 1}: x has shape"
        assert all(words.startswith(first) for words in said[:3]) and said[3].startswith(last)
        assert said[4] == said[5] == "x must have at least one dimension, but has shape ()"
        assert said[6] == f"sizes must be {ranks} numbers from 0 on, one a rank of group, but is [1]"
        assert said[7] == f"sizes must be {ranks} numbers from 0 on, one a rank of group, but is {[-1] * ranks}"
        right, wrong = list(range(ranks)), list(range(ranks))
        right[place], wrong[place] = 2 * ranks - 1, 6
        assert said[8] == f"sizes must be {right}, as x's last dimension on each rank of group, but is {wrong}"
        assert sent == []


def test_under_validate_ranks_that_differ_are_told(found):
    ranks = len(found)
    for place, rank in enumerate(found):
        said, longer, agreeing = rank["agreement"]
        words = "must be the same on all ranks of group, but is"
        differing = f"of shape ({ranks}, 4) and torch.float32 on its rank 0 and of shape ({2 * ranks}, 4)"
        assert all(each.startswith(f"x {words} {differing}") for each in said[:4])
        assert said[4].startswith(f"x, but for its last dimension, {words} of shape ({ranks},)")
        assert said[5].startswith(f"sizes {words} {[1] * ranks} on its rank 0 and {[1] * (ranks - 1) + [2]} on its rank 1")
        assert said[6].startswith(f"sizes must be {[1] * (ranks - 1) + [2]}, as x's last dimension on each rank of group, but")
        assert "torch.float32 on its rank 0 and of shape (2, 1) and torch.bfloat16 on its rank 1" in said[7]
        assert torch.equal(longer, torch.ones(ranks * (1 + place), 4))
        for name, mine in agreeing.items():
            check(mine, whole(name, ranks, torch.float32)[place], torch.float32, found)


def test_compiled_without_a_break(found):
    if len(found) == 4:
        pytest.skip("compiled by two ranks only")
    for rank in found:
        eager, compiled = rank["compiled"]
        torch.testing.assert_close(compiled, eager)


def test_a_group_of_one_and_a_group_without_this_rank(found):
    for rank in found:
        sent, same, said = rank["alone"]
        assert sent == [] and same
        assert len(said) == 4
        words = "group must be None or a torch.distributed.ProcessGroup that has this rank, but is"
        assert all(each.startswith(words) for each in said)


def test_without_a_group_and_without_torch_distributed():
    x = torch.ones(3, 5, requires_grad=True)
    assert not dist.is_initialized()
    assert collectives_ranks.handed_back(x, None)
