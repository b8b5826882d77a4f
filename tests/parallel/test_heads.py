"""Both heads as models have them: LoRA over a shared vocabulary, sharded by fully_shard, gathered as by ZeRO-3; against fp64.

The processes run heads_ranks.py.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from parallel import heads_ranks, linear_cross_entropy_ranks, linear_divergence_ranks
from parallel.heads_ranks import GATHERED, KINDS, SCALE, SHARDED, UPSTREAM, Model, adapters, batch
from parallel.worlds import PAIRS, found_by

import onepass
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy_reference
from onepass.ops.loss.linear_divergence import linear_divergence_reference

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
FP64 = torch.float64
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", params=PAIRS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(heads_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


def close(mine, exact, what):
    size = float(exact.abs().max())
    torch.testing.assert_close(mine.to(FP64), exact, rtol=1e-4, atol=1e-5 * size, msg=lambda m: f"{what}: {m}")


# ---- LoRA of a vocabulary that ranks share ----


def judged(found, exact, hidden, in_parts):
    assert all(torch.equal(mine["a"], found[0]["a"]) for mine in found)
    for name, value in exact.items():
        mine = [each[name] for each in found]
        if name in ("weight", "bias", "b") or (name == hidden and in_parts):
            mine = [torch.cat(mine)]
        for each in mine:
            close(each.reshape(value.shape), value, name)


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize("way", (*linear_cross_entropy_ranks.WAYS, "main_grad"))
def test_lora_of_a_shared_vocabulary(found, way, sequence):
    hidden, weight, bias, labels, _ = linear_cross_entropy_ranks.whole(FP64)
    a, b = adapters(hidden.shape[-1], weight.shape[0], FP64)
    named = {"hidden": hidden, "weight": weight, "bias": bias, "a": a, "b": b}
    for t in named.values():
        t.requires_grad_()
    loss = linear_cross_entropy_reference(hidden, weight, labels, "sum", bias=bias, lora=onepass.LoRA(a, b, SCALE))
    loss.backward(torch.full_like(loss, UPSTREAM))
    exact = {"loss": loss.detach()} | {name: t.grad for name, t in named.items()}
    judged([mine["vocabulary"][way, sequence] for mine in found], exact, "hidden", sequence)


def test_log_prob_of_a_call_without_gradients_has_the_same_bits(found):
    assert all(mine["vocabulary"]["same bits"] for mine in found)


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("kind", ("forward_kl", "jsd"))
def test_divergence_with_lora_of_a_shared_vocabulary(found, kind, reduction):
    student, weight, _, teacher, teacher_weight, labels = linear_divergence_ranks.whole(FP64)
    a, b = adapters(student.shape[-1], weight.shape[0], FP64)
    named = {"student": student, "weight": weight, "a": a, "b": b}
    for t in named.values():
        t.requires_grad_()
    loss = linear_divergence_reference(
        student, weight, teacher, teacher_weight, labels, kind=kind, reduction=reduction, student_lora=onepass.LoRA(a, b, SCALE)
    )
    loss.backward(torch.full_like(loss, UPSTREAM))
    exact = {"loss": loss.detach()} | {name: t.grad for name, t in named.items()}
    judged([mine["divergences"][kind, reduction] for mine in found], exact, "student", False)


# ---- parameters that are whole for a moment ----


@functools.cache
def exact(kind, name, ranks):
    """Each rank's loss, and the gradients of their mean, of the unsharded model."""
    options = {key: value for key, value in SHARDED[name].items() if key not in ("alone", "checkpointed")}
    model, losses = Model(kind, plain=True, **options).double(), []
    for rank in range(ranks):
        losses.append(model(*batch(rank, FP64)))
        (losses[-1] / ranks).backward()
    return [loss.detach() for loss in losses], {key: p.grad for key, p in model.named_parameters()}


def agree(found, kind, name, key):
    losses, grads = exact(kind, name, len(found))
    for mine, loss in zip(found, losses, strict=True):
        values = dict(mine[key[0]][key[1:]])
        close(values.pop("loss"), loss, "loss")
        assert values.keys() == grads.keys()
        for parameter, grad in values.items():
            assert (grad is None) == (grads[parameter] is None), parameter
            if grad is not None:
                close(grad, grads[parameter], parameter)


@kinds
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("reshard", (True, False))
def test_under_fully_shard(found, name, kind, reshard):
    agree(found, kind, name, ("sharded", kind, name, reshard))


@kinds
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_as_by_zero_3(found, name, kind):
    agree(found, kind, name, ("gathered", kind, name))
