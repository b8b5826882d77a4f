"""Flat gradient buffers and the masters fed from them over ranks, against gradients in fp64."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from parallel.meeting import error_of, every_other_rank, gather, halves, own_group
from parallel.mixed_model import BF16, BYTES, FP32, Mixed, backwards, exact, loss
from parallel.poisoned import poisoned
from parallel.worlds import FOURS, PAIRS
from torch import nn

import onepass
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.master_weights import MasterWeights

WORLDS = [*PAIRS, *FOURS]
rank_context = partial(onepass.use_backend, "torch")
of_four = pytest.mark.parametrize("world", FOURS, indirect=True, scope="module")
shards = pytest.mark.parametrize("shard", (False, True))
STEPS = 3
CLIPPED = {FP32: 0.5, BF16: None}  # dtype of the weights -> max_norm of clip_
CLOSE = {FP32: {"rtol": 1e-5, "atol": 1e-6}, BF16: {"rtol": 2**-7, "atol": 1e-4}}


class Sent:
    """Record the name and the number of elements of each reduction in the block."""

    NAMES = [name for name in ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]

    def __enter__(self):
        self.real, calls = {name: getattr(dist, name) for name in self.NAMES}, []
        for name in self.NAMES:
            setattr(dist, name, self.noting(name, calls))
        return calls

    def noting(self, name, calls):
        def noted(tensor, *args, **options):
            calls.append((name.removesuffix("_single").removesuffix("_tensor"), tensor.numel()))
            return self.real[name](tensor, *args, **options)

        return noted

    def __exit__(self, *exception):
        for name, real in self.real.items():
            setattr(dist, name, real)


def close_parts(main_grads, expected):
    """Compare this rank's parts of gradients with the whole's, and return their size."""
    size = 0
    for bucket in main_grads.buckets:
        for place, start, stop in bucket.parts():
            part, grad = bucket.flat[start:stop], expected[place.name]
            right = torch.zeros_like(part) if grad is None else grad.flatten()[start - place.start : stop - place.start].float()
            torch.testing.assert_close(part, right, rtol=2e-5, atol=2e-6, msg=lambda words, name=place.name: f"{name}: {words}")
            size += part.numel()
    return size


KINDS = {"averaged": {}, "summed": {"average": False}, "shards": {"shard": True}}


def reduce_twice(group, **options):
    """Run two steps, of which the second must not see the first."""
    model = Mixed()
    main_grads = MainGrads(model, group=group, bucket_bytes=BYTES, **options)
    for first in (5, 0):
        main_grads.zero_()
        backwards(main_grads, model, dist.get_rank(), first)
        main_grads.finish()
    return main_grads


@pytest.mark.parametrize("release", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_reduced_as_in_fp64(group, kind, release):
    with poisoned():
        main_grads = reduce_twice(None, release=release, **KINDS[kind])
        held = sum(gather(group, close_parts(main_grads, exact(range(group.size()), average=kind != "summed"))))
    assert held == sum(p.numel() for p in Mixed().parameters() if p.requires_grad) * (1 if kind == "shards" else group.size())


@of_four
@shards
def test_groups_of_every_other_rank(group, shard):
    place = group.rank() % 2
    with poisoned():
        close_parts(reduce_twice(every_other_rank(), shard=shard), exact([place, place + 2]))


@shards
def test_reductions_start_under_the_last_backward_only(group, shard):
    model = Mixed()
    main_grads = MainGrads(model, bucket_bytes=BYTES, shard=shard)
    with Sent() as calls:  # and the names of gradients, as their hooks are called
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
        with main_grads.accumulate():
            loss(model, group.rank(), 0).backward()
            loss(model, group.rank(), 1).backward()
        assert all(isinstance(call, str) for call in calls)
        calls.clear()
        loss(model, group.rank(), 2).backward()
        backward = list(calls)
        main_grads.finish()
    sizes = [bucket.mine.numel() for bucket in main_grads.buckets]
    sent = [call for call in backward if isinstance(call, tuple)]
    assert sent + calls[len(backward) :] == [("reduce_scatter" if shard else "all_reduce", size) for size in sizes]
    assert len(sent) >= 1 and len(sizes) > 3
    assert all(size % 64 == 0 for size in sizes)  # also of a rank's part
    assert any(isinstance(call, str) for call in backward[backward.index(sent[0]) + 1 :])


@pytest.mark.parametrize("release", (False, True))
def test_a_parameter_unused_on_one_rank(group, release):
    """On that rank its bucket and those after it wait for finish(); the order of reductions is the same on all ranks.

    With release, the unused gradient's memory holds stale data, which must not be sent.
    """
    rank, ranks = group.rank(), group.size()
    weights = [nn.Parameter(torch.ones(40 + 50 * index)) for index in range(5)]
    with poisoned():
        main_grads = MainGrads(weights, bucket_bytes=4, release=release)
        with Sent() as calls:
            sum((index + 1) * (rank + 1) * w.sum() for index, w in enumerate(weights) if (rank, index) != (0, 3)).backward()
            assert len(calls) == (1 if rank == 0 else 5)
            main_grads.finish()
        assert [size for _, size in calls] == [64 * ranks * -(-(40 + 50 * index) // (64 * ranks)) for index in (4, 3, 2, 1, 0)]
        for index, weight in enumerate(weights):
            expected = (index + 1) * (sum(range(1, ranks + 1)) - (index == 3)) / ranks
            torch.testing.assert_close(weight.main_grad.mean().item(), expected)


def test_by_hand_and_held(group):
    """.grad that is set by hand, without a hook, and a gradient that is held and added later."""
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    main_grads = MainGrads([two, one], bucket_bytes=4)  # `one` is in the first bucket
    one.grad = torch.full((3,), group.rank() + 1.0)
    with Sent() as calls:
        main_grads.hold(one)
        (one.sum() + two.sum()).backward()
        assert calls == []
        too_early = "finish() must come after all gradients, but parameter 1's are deferred: flush them first"
        assert too_early in error_of(main_grads.finish)
        one.main_grad += 10.0
        main_grads.unhold(one)
        assert len(calls) == 2
        for late in (main_grads.check_open, main_grads.hold):
            assert "parameter 1 must get its gradients before" in error_of(late, one)
        main_grads.finish()
    assert len(calls) == 2
    torch.testing.assert_close(one.main_grad, torch.full((3,), 11 + (group.size() + 1) / 2))
    assert two.main_grad.tolist() == [1.0] * 3


@shards
def test_norms_over_ranks(group, shard):
    grads = torch.cat([grad.flatten() for grad in exact(range(group.size())).values() if grad is not None])
    model = Mixed()
    main_grads = MainGrads(model, bucket_bytes=BYTES, shard=shard)
    backwards(main_grads, model, group.rank())
    main_grads.finish()
    norms = [main_grads.norm(p) for p in (2.0, 1.0, float("inf"))] + [main_grads.clip_(0.05)]
    for norm_type, norm in zip((2.0, 1.0, float("inf"), 2.0), norms, strict=True):
        torch.testing.assert_close(norm, torch.linalg.vector_norm(grads, norm_type).float(), rtol=1e-5, atol=0)
    norms.append(main_grads.norm())
    torch.testing.assert_close(norms[-1].item(), 0.05, rtol=1e-4, atol=0)
    assert all(map(torch.equal, norms, gather(group, norms)[0]))
    main_grads.zero_()
    model.second.weight.main_grad[0, 0] = float("nan")
    main_grads.finish()
    assert main_grads.norm().isnan() and main_grads.norm(float("inf")).isnan()


@of_four
@shards
def test_what_tensor_parallel_ranks_have_alike_counts_once(group, shard):
    """Of one sharded and two replicated tensor-parallel parameters."""
    cut, whole, other = (nn.Parameter(torch.zeros(100)) for _ in range(3))
    cut.tensor_model_parallel, whole.tensor_model_parallel = True, False
    main_grads = MainGrads([cut, whole, other], group=every_other_rank(), shard=shard, tp_group=halves())
    (cut * (1.0 + halves().rank()) + whole * 3.0 + other * 4.0).sum().backward()
    main_grads.finish()
    torch.testing.assert_close(main_grads.clip_(1.0).item(), (100 * (1.0 + 4.0 + 9.0 + 16.0)) ** 0.5)
    torch.testing.assert_close(main_grads.norm().item(), 1.0)


def test_narrow_buffers(group):
    """bf16 ones, for an fp32 and a bf16 parameter."""
    one, two, ranks = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(9, dtype=BF16)), group.size()
    main_grads = MainGrads([one, two], dtype=BF16, average=False)
    with main_grads.accumulate():
        (one * (1 + 2.0**-9)).sum().backward()
    (one.sum() + two.sum() * (group.rank() + 1)).backward()
    main_grads.finish()
    assert one.main_grad.dtype == two.main_grad.dtype == BF16 and len(main_grads.buffers) == 2
    assert one.main_grad.tolist() == [2.0 * ranks] * 7 and two.main_grad.tolist() == [ranks * (ranks + 1) / 2] * 9


# ---- master weights ----


def weights_for(model, main_grads):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]  # includes the frozen parameter
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.03}]
    return MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, lr=0.02), groups)


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def alike(one, other):
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


def train(model, main_grads, weights, steps, clip=None):
    for step in steps:
        main_grads.zero_()
        backwards(main_grads, model, dist.get_rank(), first=10 * step)
        main_grads.finish()
        if clip is not None:
            main_grads.clip_(clip)
        weights.step()


@cache
def trained(dtype, shard, release=False):
    """Return the weights after some steps, and the size of the optimizer's state."""
    with poisoned():
        model = Mixed(dtype, norms=FP32)
        main_grads = MainGrads(model, bucket_bytes=BYTES, shard=shard, release=release)
        weights = weights_for(model, main_grads)
        trainable = [p for p in model.parameters() if p.requires_grad]
        versions = [p._version for p in trainable]
        train(model, main_grads, weights, range(STEPS), CLIPPED[dtype])
    assert all(p._version > version for p, version in zip(trainable, versions, strict=True))
    return weights_of(model), sum(each["exp_avg"].numel() for each in weights.optimizer.state.values())


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_sharded_training_is_the_same(group, dtype):
    start = dict(Mixed(dtype, norms=FP32).named_parameters())
    total = sum(p.numel() for p in start.values() if p.requires_grad)
    whole, size = trained(dtype, False)
    assert size == total and sum(gather(group, trained(dtype, True)[1])) == total
    first = gather(group, whole)[0]
    # with more than two terms NCCL's all-reduce may not add in the order in which a reduce-scatter does
    in_one_order = dist.get_backend() == "gloo" or group.size() == 2
    assert not in_one_order or alike(trained(dtype, True, release=True)[0], trained(dtype, True)[0])
    for options in ((False,), (True,), (True, True)):
        for name, weight in trained(dtype, *options)[0].items():
            if CLIPPED[dtype] is None and in_one_order:
                assert torch.equal(weight, first[name]), name
            else:  # the norm's sums are in another order
                torch.testing.assert_close(weight, first[name], **CLOSE[weight.dtype])
            assert (name == "frozen") == torch.equal(weight, start[name]) or name == "unused"


@shards
def test_states_come_back(group, shard):
    """In a new model, after two steps. Loading another rank's state raises and changes nothing."""
    model = Mixed(BF16, norms=FP32)
    main_grads = MainGrads(model, bucket_bytes=BYTES, shard=shard)
    weights = weights_for(model, main_grads)
    train(model, main_grads, weights, range(2))
    state = copy.deepcopy(weights.state_dict())  # state_dict() returns the optimizer's own tensors
    at_two = weights_of(model)
    train(model, main_grads, weights, range(2, STEPS))

    other = Mixed(BF16, norms=FP32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    theirs = MainGrads(other, bucket_bytes=BYTES, shard=shard)
    again = weights_for(other, theirs)
    rank, ranks = state["shard"]
    name = next(iter(state["masters"]))
    short = {**state, "masters": {**state["masters"], name: state["masters"][name][:1]}}
    before, mine = weights_of(other), [group.rank(), group.size()] if shard else [0, 1]
    said = error_of(again.load_state_dict, {**state, "shard": [rank + 1, ranks]})
    assert said == f"state must be of [rank, ranks] {mine}, but is of {[mine[0] + 1, mine[1]]}"
    assert error_of(again.load_state_dict, short).startswith("state must have a master ")
    assert alike(weights_of(other), before)
    again.load_state_dict(state)
    with torch.no_grad():
        other.frozen.copy_(model.frozen)
    assert alike(weights_of(other), at_two)
    train(other, theirs, again, range(2, STEPS))
    assert alike(weights_of(other), weights_of(model))


# ---- groups and ranks that differ ----


def test_under_validate_ranks_that_differ_are_told(group):
    others = group.rank() > 0

    def make(layers=2, longer=0, dtype=FP32, **options):
        MainGrads([nn.Parameter(torch.ones(3 + layer + longer, dtype=dtype)) for layer in range(layers)], **options)

    place = "parameter {} of shape ({},) and torch.{} at element {} of bucket {}".format
    said = (
        "parameters and options must be the same, in one order, on all ranks of group, "
        "but its rank 0 has {} where its rank 1 has {}"
    )
    differing = [
        ({"layers": 1, "longer": group.rank()}, place(0, 3, "float32", 0, 0), place(0, 4, "float32", 0, 0)),
        ({"layers": 3 if others else 2}, place(1, 4, "float32", 0, 0), place(2, 5, "float32", 0, 0)),
        ({"dtype": BF16 if others else FP32}, place(1, 4, "float32", 0, 0), place(1, 4, "bfloat16", 0, 0)),
        ({"dtype": BF16, "shard": others}, "dtype torch.float32 and shard False", "dtype torch.float32 and shard True"),
        ({"bucket_bytes": 4 if others else 1 << 20}, place(0, 3, "float32", 64, 0), place(0, 3, "float32", 0, 1)),
    ]
    with onepass.validate():
        for options, *both in differing:
            assert error_of(make, **options) == said.format(*both)
        make()


def test_a_group_of_one_and_a_group_without_this_rank(group):
    model = Mixed()
    with Sent() as calls:
        main_grads = MainGrads(model, group=own_group(), shard=True)
        backwards(main_grads, model, group.rank())
        main_grads.finish()
        main_grads.norm()
    assert calls == []
    close_parts(main_grads, exact([group.rank()]))
    said = error_of(MainGrads, Mixed(), group=-100)
    assert said.startswith("group must be None or a torch.distributed.ProcessGroup that has this rank, but is -100")
