"""linear_divergence over ranks, against the whole vocabulary in fp64. The processes run linear_divergence_ranks.py."""

import pytest
import torch
import torch.distributed as dist
from parallel import linear_divergence_ranks as ranks_file
from parallel.linear_divergence_ranks import EVEN, OPTIONS, UPSTREAM, VOCABULARY, D
from parallel.worlds import WORLDS, found_by

from onepass.nn import LinearDivergence
from onepass.ops.loss.linear_divergence import linear_divergence_reference
from onepass.ops.loss.linear_divergence.formula import KINDS

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
TIGHT = {"rtol": 1e-5, "atol": 1e-5}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(ranks_file.run, request.param, tmp_path_factory.mktemp("ranks"))


def exactly(dtype=torch.float32, upstream=UPSTREAM, **options):
    """The divergence and the gradients of the whole, of the same numbers in fp64."""
    student, weight, bias, teacher, teacher_weight, labels = ranks_file.whole(dtype)
    student, weight, bias = (t.double().requires_grad_() for t in (student, weight, bias))
    options.pop("chunk_bytes", None)
    loss = linear_divergence_reference(
        student, weight, teacher.double(), teacher_weight.double(), labels, student_bias=bias, **options
    )
    loss.backward(torch.full_like(loss, upstream))
    return {"loss": loss.detach(), "student": student.grad, "weight": weight.grad, "bias": bias.grad}


def compare(mine, exact, rank, ranks, tolerance=TIGHT, names=("loss", "student", "weight", "bias")):
    for name in names:
        wanted = ranks_file.part(exact[name], rank, ranks) if name in ("weight", "bias") else exact[name]
        torch.testing.assert_close(mine[name].double(), wanted, **tolerance)


@kinds
@pytest.mark.parametrize("option", OPTIONS)
def test_as_the_whole_vocabulary(found, option, kind):
    exact = exactly(kind=kind, beta=0.3, **OPTIONS[option])
    for rank, mine in enumerate(each["plans"][kind, option] for each in found):
        compare(mine, exact, rank, len(found))
        assert mine["same"] and mine["loss"].dtype == torch.float32
        assert not mine["student"][1, 2].any()


@kinds
def test_in_bf16(found, kind):
    exact = exactly(torch.bfloat16, kind=kind)
    for rank, mine in enumerate(each["half_precision"][kind] for each in found):
        compare(mine, exact, rank, len(found), {"rtol": 3e-2, "atol": 3e-2})
        assert mine["student"].dtype == mine["weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_main_grad_gathers_this_ranks_part(found, reduction):
    exact = exactly(kind="jsd", reduction=reduction)
    for rank, mine in enumerate(each["main_grad"][reduction] for each in found):
        compare(mine, exact, rank, len(found), names=("student", "weight", "bias"))
        assert mine["own"] is None


@kinds
def test_compiled(found, kind):
    if len(found) == 4:
        pytest.skip("compiled by two ranks only")
    exact = exactly(upstream=1.0, kind=kind)
    for rank, mine in enumerate(each["compiled"][kind] for each in found):
        compare(mine, exact, rank, len(found))


def test_no_tokens(found):
    for rank in found:
        assert not any(t.any() for t in rank["no_tokens"])


def test_the_module_is_the_unsharded_one(found):
    torch.manual_seed(5)
    head = LinearDivergence(D, EVEN, bias=True, kind="jsd", temperature=0.5)
    student, _, _, teacher, teacher_weight, labels = ranks_file.whole(size=EVEN)
    loss = head(student.requires_grad_(), teacher, teacher_weight, labels)
    loss.backward()
    for rank, mine in enumerate(each["module"] for each in found):
        torch.testing.assert_close(mine["loss"], loss.detach(), **TIGHT)
        torch.testing.assert_close(mine["student"], student.grad, **TIGHT)
        torch.testing.assert_close(mine["weight"], head.weight.grad[slice(*mine["range"])], **TIGHT)
        assert f"vocab_range={mine['range']}, tp={len(found)}" in mine["said"], rank


def test_what_is_said_of_bad_arguments(found):
    for rank in found:
        said = rank["bad"]
        assert said[0].startswith("teacher_weight must have as many rows as student_weight")
        assert said[1] == "tp_group must be None or a torch.distributed.ProcessGroup that has this rank, but is 'tp'"
        assert said[2].startswith("labels must have shape")


def test_the_parts_make_the_whole():
    assert {sum(sizes) for sizes in VOCABULARY.values()} == {sum(VOCABULARY[2])}
