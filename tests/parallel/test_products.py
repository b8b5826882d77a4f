"""Linear layers spread over ranks, against the unsharded layer in fp64. The processes run products_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from parallel import products_ranks
from parallel.products_ranks import CASES, part
from parallel.worlds import WORLDS, found_by

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(products_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


def unsharded(name, dtype=torch.float32, sequence=products_ranks.S):
    """y and all gradients of the layer in one piece, of the same numbers in fp64."""
    x, parameters, dy = products_ranks.whole(dtype, sequence)
    x = x.double().requires_grad_()
    parameters = {key: torch.nn.Parameter(t.double()) for key, t in parameters.items()}
    y = CASES[name][0](x, parameters, None)
    y.backward(dy.double())
    return {"y": y.detach(), **products_ranks.grads_of(x, parameters)}


def expected(name, rank, ranks, dtype=torch.float32, sequence=products_ranks.S):
    """This rank's parts; the norm's parameters and a row-parallel bias have parts of sums, which the test adds up."""
    _, by_row, divided = CASES[name]
    all_of_it = unsharded(name, dtype, sequence)
    parts = {"weight": 1, "x": -1} if by_row else {"weight": 0, "bias": 0, "y": -1}
    if divided:
        parts["y" if by_row else "x"] = 0
    return {key: part(t, parts[key], rank, ranks) if key in parts else t for key, t in all_of_it.items()}


def summed(name):
    """The gradients that are parts of a sum over the group."""
    _, by_row, divided = CASES[name]
    return {"bias"} if by_row and divided else {"norm_weight", "norm_bias"} if divided else set()


def compare(found, name, dtype, sequence=products_ranks.S, keys=("y", "x", "weight", "bias", "norm_weight", "norm_bias")):
    ranks = len(found)
    tight = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 0.3}
    for rank, mine in enumerate(found):
        wanted = expected(name, rank, ranks, dtype, sequence)
        for key in keys:
            got = mine[key]
            if wanted[key] is None:
                assert got is None
                continue
            assert got.dtype == dtype
            total = sum(other[key].double() for other in found) if key in summed(name) else got.double()
            torch.testing.assert_close(total, wanted[key], **tight)


@cases
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_as_unsharded(found, name, dtype):
    compare([rank[name][dtype] for rank in found], name, dtype)
    assert all(rank[name][dtype]["again"] and rank[name][dtype]["unchanged"] for rank in found)


@cases
def test_a_group_of_every_other_rank(found, name):
    if len(found) == 2:  # two groups of one: as without a group, but for what is divided already
        alone = unsharded(name)
        for rank in found:
            torch.testing.assert_close(rank["strided"][name]["y"].double(), alone["y"], rtol=1e-5, atol=1e-4)
        return
    for pair in (found[::2], found[1::2]):
        compare([rank["strided"][name] for rank in pair], name, torch.float32)


@cases
def test_ranks_without_tokens(found, name):
    for rank in found:
        mine = rank["no tokens"][name]
        assert mine["y"].shape[0] == 0 and mine["x"].shape[0] == 0
        assert not mine["weight"].any() and not mine["bias"].any()


@cases
def test_what_is_frozen_has_no_gradient_and_disturbs_nobody(found, name):
    for asked in ("x", "weight"):
        only = [rank["frozen"][name][asked] for rank in found]
        compare(only, name, torch.float32, keys=(asked,))
        assert all(grad is None for mine in only for key, grad in mine.items() if key != asked)


@cases
def test_main_grad_gathers_this_ranks_part(found, name):
    doubled = [{key: t / 2 for key, t in rank["main_grad"][name].items()} for rank in found]
    used = ("weight", "bias", "norm_weight") if "norm" in name else ("weight", "bias")
    compare(doubled, name, torch.float32, keys=used)


@cases
def test_what_is_sent_is_under_way_during_a_product(found, name):
    for rank in found:
        happened = rank["order"][name]
        waits = [at for at, what in enumerate(happened) if what == "wait"]
        if CASES[name][1:] == (True, False):
            assert "start" not in happened  # each rank has its own dx
            continue
        assert waits and happened.count("start") == len(waits)
        for at in waits:
            before = happened[:at]
            assert "product" in before[before.index("start") :], happened
        assert happened[-1] != "start"


@cases
def test_compiled_without_a_break(found, name):
    if len(found) == 4:
        pytest.skip("compiled by two ranks only")
    compare([rank["compiled"][name] for rank in found], name, torch.bfloat16)


def test_compiled_without_a_bias(found):
    """PyTorch 2.11's compiler lost these gradients, where what was summed came back in its own place."""
    if len(found) == 4:
        pytest.skip("compiled by two ranks only")
    compare([rank["compiled without a bias"] for rank in found], "row", torch.bfloat16, keys=("x", "weight"))


def test_errors_say_what_to_do_before_anything_is_sent(found):
    ranks = len(found)
    for rank in found:
        both, three, scalar, odd, group, norm_group, odd_too = rank["errors"]
        assert both.startswith("allreduce_dgrad and sequence_parallel exclude each other")
        assert three.startswith("allreduce_dgrad and reduce_output exclude each other")
        assert scalar.startswith("x must have a first dimension for sequence_parallel to divide")
        assert odd.startswith(f"x's first dimension must be a multiple of {ranks}, the size of tp_group")
        assert group.startswith("group must be None or a torch.distributed.ProcessGroup") and norm_group == group
        assert odd_too == odd


def test_explain_says_what_is_sent(found):
    for rank in found:
        nothing, column, sequence, row = rank["explained"]
        assert "tp_group" not in nothing
        assert "dx summed over tp_group" in column and "divided" not in column
        assert "dx summed over tp_group" in sequence and "divided along the first dimension" in sequence
        assert "y summed over tp_group" in row


def test_without_a_group_nothing_is_asked_of_it():
    x, parameters, _ = products_ranks.whole()
    alone = CASES["column, sequence"][0](x, parameters, None)
    assert torch.equal(alone, torch.nn.functional.linear(x, parameters["weight"], parameters["bias"]))
