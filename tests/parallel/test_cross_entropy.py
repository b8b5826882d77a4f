"""The loss of logits divided over ranks, against the whole in fp64. The processes run cross_entropy_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from parallel import cross_entropy_ranks
from parallel.cross_entropy_ranks import EMPTY, LEAD, OPTIONS, PARTS, WIDE, V, columns
from parallel.worlds import WORLDS, found_by

from onepass.ops.loss.cross_entropy import cross_entropy_reference
from onepass.ops.loss.row_functions import PLANES

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(cross_entropy_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


def ways(found):
    return [way for way in ("torch", "triton") if way in found[0]]


def compare(found, parts, dtype=torch.float32, mixed=False, **options):
    """Each rank has the whole loss, bit for bit that of the others, and its part of the gradient."""
    options.pop("inplace_backward", None)
    logits, labels, dy = cross_entropy_ranks.whole(dtype, sum(parts))
    if mixed:
        labels = cross_entropy_ranks.probabilities(labels)
    logits = logits.double().requires_grad_()
    y = cross_entropy_reference(logits, labels, **options)
    y.backward((dy if y.dim() else dy[0, 0]).double())
    close = {"rtol": 2e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 5e-3, "atol": 1e-5}
    for rank, mine in enumerate(found):
        assert mine["y"].dtype == torch.float32 and mine["dlogits"].dtype == dtype
        assert torch.equal(mine["y"], found[0]["y"]) and mine["again"]
        torch.testing.assert_close(mine["y"].double(), y.detach(), rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(mine["dlogits"].double(), logits.grad[..., columns(parts, rank)], **close)
        assert mixed or not mine["dlogits"][1, 0].any()


@pytest.mark.parametrize("name", OPTIONS)
def test_as_the_whole(found, name):
    for way in ways(found):
        compare([rank[way][name] for rank in found], PARTS[len(found)], mixed=name == "probabilities", **OPTIONS[name])


def test_in_16_bits_and_in_several_tiles_and_where_one_rank_has_all(found):
    for way in ways(found):
        compare([rank[way]["bf16"] for rank in found], PARTS[len(found)], torch.bfloat16, label_smoothing=0.1)
        compare([rank[way]["wide"] for rank in found], WIDE[len(found)], label_smoothing=0.1)
        compare([rank[way]["empty"] for rank in found], EMPTY[len(found)], label_smoothing=0.1)


def test_a_group_of_every_other_rank(found):
    if len(found) == 2:  # groups of one: as without a group
        for rank in found:
            compare([rank["pair"]], (V,))
        return
    for pair in (found[::2], found[1::2]):
        compare([rank["pair"] for rank in pair], PARTS[2])


def test_nothing_kept_and_nothing_there(found):
    for rank, mine in enumerate(found):
        for way in ways(found):
            ignored, (y, shape) = mine[way]["ignored"], mine[way]["no rows"]
            assert ignored["y"] == 0 and not ignored["dlogits"].any()
            assert y == 0 and shape == (0, PARTS[len(found)][rank])


def test_compiled_without_a_break(found):
    if len(found) == 4:
        pytest.skip("compiled by two ranks only")
    for way in ways(found):
        compare([rank[way]["compiled"] for rank in found], PARTS[2], label_smoothing=0.1)


def test_each_rank_finds_its_place(found):
    for rank, mine in enumerate(found):
        assert mine["place"].tolist() == [columns(PARTS[len(found)], rank).start, V]


def test_what_is_sent_is_a_size_and_the_rows_statistics(found):
    rows = LEAD[0] * LEAD[1]
    for rank in found:
        assert rank["sent"] == {"forward": [1, PLANES * rows], "backward": []}


def test_errors_say_what_to_do(found):
    for rank in found:
        *said, explained = rank["errors"]
        short = [each for each in said if "weight" in each]
        *labels, transform = [each for each in said if each not in short]
        assert all(each.startswith(f"ValueError: weight must have shape ({V},)") for each in short) and len(short) in (0, 2)
        assert labels and all(said.startswith(f"IndexError: labels must be from 0 to {V - 1}") for said in labels)
        assert transform.startswith("RuntimeError: cross_entropy over a tp_group can't follow vmap")
        assert explained.startswith("cross_entropy: ")
