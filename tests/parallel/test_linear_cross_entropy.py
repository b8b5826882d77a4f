"""linear_cross_entropy over ranks, against the whole vocabulary in fp64. The processes run linear_cross_entropy_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from parallel import linear_cross_entropy_ranks as ranks_file
from parallel.linear_cross_entropy_ranks import OPTIONS, UPSTREAM, VOCABULARY, WAYS, D, N
from parallel.worlds import WORLDS, found_by

from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy_reference

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
TIGHT = {"rtol": 1e-5, "atol": 1e-5}
sequences = pytest.mark.parametrize("sequence", (False, True), ids=("whole", "divided"))


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(ranks_file.run, request.param, tmp_path_factory.mktemp("ranks"))


def exactly(dtype=torch.float32, upstream=UPSTREAM, weighted=True, biased=True, **options):
    """The loss and the gradients of the whole, of the same numbers in fp64."""
    hidden, weight, bias, labels, weights = ranks_file.whole(dtype)
    hidden, weight, bias = (t.double().requires_grad_() for t in (hidden, weight, bias))
    more = {"bias": bias} if biased else {}
    if "class_weight" in options:
        labels = ranks_file.probabilities(labels)
    loss = linear_cross_entropy_reference(hidden, weight, labels, token_weight=weights if weighted else None, **more, **options)
    loss.backward(torch.full_like(loss, upstream))
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}


def shard(name, whole, rank, ranks, sequence):
    if whole is None or name == "loss":
        return whole
    if name == "hidden":
        return whole.reshape(N, D).chunk(ranks)[rank] if sequence else whole.reshape(N, D)
    return ranks_file.part(whole, rank, ranks)


def compare(mine, exact, rank, ranks, sequence, tolerance=TIGHT, names=("loss", "hidden", "weight", "bias")):
    for name in names:
        wanted = shard(name, exact[name], rank, ranks, sequence)
        torch.testing.assert_close(mine[name].double().reshape(wanted.shape), wanted, **tolerance)


@sequences
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_as_the_whole_vocabulary(found, way, option, sequence):
    if way.startswith("grad_in_forward") and option == "none":
        pytest.skip("not of rows' losses")
    exact = exactly(**OPTIONS[option])
    for rank, mine in enumerate(each["ways"][way, option, sequence] for each in found):
        compare(mine, exact, rank, len(found), sequence)
        assert mine["loss"].dtype == torch.float32
        assert mine.get("again", True), "a second backward has other bits"


@sequences
@pytest.mark.parametrize("logits", (None, torch.float32))
def test_in_bf16(found, sequence, logits):
    exact = exactly(torch.bfloat16)
    for rank, mine in enumerate(each["half_precision"][sequence, logits] for each in found):
        compare(mine, exact, rank, len(found), sequence, {"rtol": 3e-2, "atol": 3e-2})
        if logits is not None:
            torch.testing.assert_close(mine["loss"].double(), exact["loss"], rtol=2e-6, atol=2e-6)
        assert mine["hidden"].dtype == mine["weight"].dtype == torch.bfloat16


def test_main_grad_gathers_this_ranks_part(found):
    exact = exactly(upstream=1.0)
    for rank, mine in enumerate(each["main_grad"] for each in found):
        compare(mine, exact, rank, len(found), True, names=("hidden", "weight", "bias"))
        assert mine["own"] is None


def test_statistics_are_of_the_whole_vocabulary_and_can_be_differentiated(found):
    hidden, weight, bias, labels, _ = ranks_file.whole()
    hidden, weight, bias = (t.double().requires_grad_() for t in (hidden, weight, bias))
    loss, known = linear_cross_entropy_reference(hidden, weight, labels, "none", bias=bias, return_stats=True)
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(labels.shape, generator=generator).double() for _ in range(4)]
    torch.autograd.backward((loss, *known[:3]), incoming)
    exact = {"hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    for rank, mine in enumerate(each["stats"] for each in found):
        for got, wanted in zip(mine["known"][:4], (loss, *known[:3]), strict=True):
            torch.testing.assert_close(got.double(), wanted.detach(), **TIGHT)
        assert torch.equal(mine["known"][4], known.correct)
        compare(mine, exact, rank, len(found), False, names=("hidden", "weight", "bias"))


@sequences
def test_a_ratio_of_policies_starts_at_1(found, sequence):
    exact = exactly(weighted=False, reduction="sum", vocab_mask=ranks_file.mask().view(N // 4, 4, -1))
    for rank, mine in enumerate(each["policy"][sequence] for each in found):
        assert torch.equal(mine["old"], mine["new"]) and mine["old"].count_nonzero() == 15
        compare(mine, exact, rank, len(found), sequence, names=("hidden", "weight", "bias"))


@sequences
def test_a_deferred_gradient(found, sequence):
    exact = exactly(upstream=1.0, weighted=False, biased=False)
    for rank, mine in enumerate(each["deferred"][sequence] for each in found):
        assert mine["empty"]
        compare(mine, exact, rank, len(found), sequence, names=("hidden", "weight"))


@sequences
def test_compiled_without_a_break(found, sequence):
    if len(found) == 4:
        pytest.skip("compiled by two ranks only")
    exact = exactly(upstream=1.0, weighted=False)
    for rank, mine in enumerate(each["compiled"][sequence] for each in found):
        compare(mine, exact, rank, len(found), sequence)


def test_no_tokens_and_labels_that_are_no_tokens(found):
    for rank in found:
        mine = rank["told_apart"]
        if mine["row"] is None:  # CPUs look
            assert mine["wrong"].startswith(f"labels must be from 0 to {sum(VOCABULARY[2]) - 1}")
        else:
            assert mine["wrong"].flatten().isnan().tolist() == [True] + [False] * (N - 1)
            assert not mine["row"].any()
        assert mine["ignored"] == 0 and mine["none"]


def test_no_tokens_at_all(found):
    for rank in found:
        assert len(rank["no_tokens"]) == 4
        assert not any(t.any() for each in rank["no_tokens"].values() for t in each)


def test_what_is_sent_is_under_way_during_a_product(found):
    """Hidden states and statistics under the next product; the gradient's sum under the weight's product, and longer."""
    for rank in found:
        happened = rank["overlapped"]
        assert happened.count("product") == 3
        for name in ("statistics", "hidden"):
            starts = [at for at, what in enumerate(happened) if what == f"start {name}"]
            waits = [at for at, what in enumerate(happened) if what == f"wait {name}"]
            assert len(starts) == len(waits) == 3
            pairs = list(zip(starts, waits, strict=True))
            alone = pairs[-1] if name == "statistics" else pairs[0]  # nothing is left to do under it
            assert all("product" in happened[start:wait] for start, wait in pairs if (start, wait) != alone), happened
        assert happened[-3:] == ["wait gradient"] * 3


def test_what_is_said_of_bad_arguments(found):
    for rank in found:
        said = rank["bad"]
        assert said[0].startswith("labels must have shape")
        assert said[1] == ("tp_group must be None or a torch.distributed.ProcessGroup that has this rank, but is 'tp'")
        assert said[2].startswith("weight must have shape (N, 4)")


def test_the_parts_make_the_whole():
    assert {sum(sizes) for sizes in VOCABULARY.values()} == {sum(VOCABULARY[2])}
