"""Flat gradient buffers and the masters fed from them, in one process and in several; those run main_grads_ranks.py."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from parallel import main_grads_ranks as world
from parallel.main_grads_ranks import BF16, BYTES, FP32, Mixed, backwards, close, exact, loss, main_grads_by_name
from parallel.worlds import WORLDS, found_by
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import main_grad as convention
from onepass.gradients.buckets import Bucket
from onepass.gradients.main_grads import MainGrads

needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")


@pytest.fixture(autouse=True)
def _plain_backend():
    with onepass.use_backend("torch"):
        yield


@pytest.fixture(scope="module", params=WORLDS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(world.run, request.param, tmp_path_factory.mktemp("ranks"))


# ---- one process ----


@pytest.mark.parametrize("bucket_bytes", [1, BYTES, 1 << 30])
def test_sums_over_microbatches(bucket_bytes):
    model = Mixed()
    main_grads = MainGrads(model, bucket_bytes=bucket_bytes)
    for first in (5, 0):  # the second step must not see the first
        main_grads.zero_()
        backwards(main_grads, model, 0, first)
        main_grads.finish()
    close(main_grads_by_name(model), exact([0]))
    assert all(p.grad is None for p in model.parameters())
    assert not any(p.grad_added_to_main_grad for p in model.parameters() if p.requires_grad)
    assert not hasattr(model.frozen, "main_grad")


def test_the_layout():
    model = Mixed(BF16, norms=FP32)
    main_grads = MainGrads(model, bucket_bytes=BYTES)
    assert len(main_grads.buffers) == 2 and len(main_grads.buckets) > 3  # one buffer a type of the parameters
    assert all(buffer.dtype == FP32 and buffer.is_contiguous() and not buffer.any() for buffer in main_grads.buffers)
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    last = []
    for bucket in main_grads.buckets:
        places = [order[place.name] for place in bucket.places]
        assert places == sorted(places, reverse=True)
        assert len({place.parameter.dtype for place in bucket.places}) == 1
        assert len(places) == 1 or bucket.places[-1].stop * 4 <= BYTES
        last.append(places[-1])
        for place in bucket.places:
            main_grad = place.parameter.main_grad
            assert main_grad.shape == place.parameter.shape and main_grad.is_contiguous()
            assert main_grad.data_ptr() == bucket.flat.data_ptr() + 4 * place.start and place.start % 64 == 0
            assert place.parameter.main_grads() is main_grads
    assert last == sorted(last, reverse=True)  # as gradients come
    assert sum(bucket.flat.numel() for bucket in main_grads.buckets) == sum(buffer.numel() for buffer in main_grads.buffers)


def test_narrow_gradients_are_summed_in_fp32():
    weight = nn.Parameter(torch.ones(4, dtype=BF16))
    main_grads = MainGrads([weight])
    with main_grads.accumulate():
        weight.sum().backward()
        assert weight.grad is None
    (weight * 2.0**-9).sum().backward()
    assert weight.grad is None
    main_grads.finish()
    assert weight.main_grad.dtype == FP32 and torch.equal(weight.main_grad, torch.full((4,), 1 + 2.0**-9))


def test_placeholders_are_not_added_but_what_is_beside_them_is():
    embedding, ours = nn.Embedding(5, 4), onepass.nn.NormLinear(4, 3)
    main_grads = MainGrads([*embedding.parameters(), *ours.parameters()])
    written = main_grads.buffers[0]._version
    y = ours(embedding(torch.arange(5)))
    onepass.norm_linear(y @ torch.ones(3, 4), torch.ones(4), embedding.weight).sum().backward()
    main_grads.finish()
    # by the ops: the norm's weight, the linear layer's and its bias, the head's; by a hook: what the lookup left
    assert main_grads.buffers[0]._version - written == 5
    assert all(not zeros.any() for zeros in convention._zeros.values())


def test_hooks_are_called_and_nothing_is_made_for_them(monkeypatch):
    """Once for a weight of two ops. Zeros for each shape of a large model would be a good part of its memory."""
    convention._zeros.clear()
    weight, ids = nn.Parameter(torch.randn(6, 4)), torch.tensor([1, 3, 3])
    main_grads, seen = MainGrads([weight]), []
    monkeypatch.setattr(main_grads, "_on_gradient", lambda parameter: seen.append(parameter.grad) or main_grads._take(parameter))
    embedding = onepass.nn.VocabParallelEmbedding(6, 4)
    del embedding.weight
    embedding.weight = weight
    for _ in range(2):
        onepass.linear(embedding(ids), weight).square().sum().backward()
    expected = torch.autograd.grad(2 * (weight[ids] @ weight.T).square().sum(), weight)
    torch.testing.assert_close(weight.main_grad, *expected)
    assert seen == [None, None] and not convention._zeros


NOTED, WAITED = "note_stream", "wait_for_gradients"


@pytest.fixture
def streams(monkeypatch):
    """What is done about them, of which there are none on a CPU."""
    done = []
    for name in (NOTED, WAITED):
        monkeypatch.setattr(Bucket, name, lambda bucket, name=name: done.append(name))
    return done


def test_a_hook_waits_for_the_stream_of_an_ops_gradient(streams):
    weight, theirs = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    main_grads = MainGrads([weight, theirs])
    with main_grads.accumulate():
        onepass.linear(torch.ones(2, 4), weight).sum().backward()
        assert streams == [NOTED, WAITED, NOTED]  # the op's; the hook's, which what comes after backward waits for
        streams.clear()
        nn.functional.linear(torch.ones(2, 4), theirs).sum().backward()
        assert streams == [WAITED, NOTED]
        streams.clear()
        weight.grad = convention.placeholder(weight, convention.GradRequest.CAPTURE)  # a graph's, whose replay has added its own
        main_grads._on_gradient(weight)
        assert streams == [WAITED, NOTED]
    streams.clear()
    main_grads.finish()
    assert streams == [WAITED] * len(main_grads.buckets)


def test_a_reduction_waits_for_all_gradients_of_its_bucket(streams, monkeypatch):
    weight = nn.Parameter(torch.randn(3, 4))
    main_grads = MainGrads([weight], average=False)
    main_grads.group = object()  # of others, to whom nothing goes
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **options: streams.append("sent"))
    onepass.linear(torch.ones(2, 4), weight).sum().backward()
    assert streams == [NOTED, WAITED, NOTED, WAITED, "sent"]


def test_what_a_graph_is_handed_is_zeros_still_where_somebody_else_writes_there():
    weight = nn.Parameter(torch.randn(3, 4))
    main_grads = MainGrads([weight])
    kept = convention.placeholder(weight, convention.GradRequest.CAPTURE)
    weight.grad = kept
    kept += 1.0  # no longer zeros, and no longer the pool's
    main_grads.finish()
    assert torch.equal(weight.main_grad, torch.ones(3, 4))


def test_checkpointed_and_a_retained_graph():
    model = Mixed()
    main_grads = MainGrads(model)
    with main_grads.accumulate():
        value = checkpoint(loss, model, 0, 0, use_reentrant=False)
        value.backward()
        again = loss(model, 0, 1)
        again.backward(retain_graph=True)
        again.backward()
    main_grads.finish()
    one, two = exact([0], 1), exact([0], 2)
    close(main_grads_by_name(model), {name: None if g is None else 2 * two[name] - g for name, g in one.items()})


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_gradient_with_a_graph_of_its_own_leaves_none():
    weight = nn.Parameter(torch.full((3,), 2.0))
    main_grads = MainGrads([weight])
    (weight**3).sum().backward(create_graph=True)
    main_grads.finish()
    assert not weight.main_grad.requires_grad and weight.main_grad.tolist() == [12.0] * 3


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_sparse_gradients(dtype):
    embedding = nn.Embedding(5, 3, sparse=True, dtype=dtype)
    with torch.sparse.check_sparse_tensor_invariants(False):
        main_grads = MainGrads(embedding)
        embedding(torch.tensor([1, 1, 4])).sum().backward()
        main_grads.finish()
    assert embedding.weight.main_grad[:, 0].tolist() == [0.0, 2.0, 0.0, 0.0, 1.0]


def test_gradients_put_in_grad_by_hand():
    model, reference = Mixed(), exact([0], 2)
    main_grads = MainGrads(model, bucket_bytes=BYTES)
    trainable = [p for p in model.parameters() if p.requires_grad and p is not model.unused]
    loss(model, 0, 0).backward()
    for parameter, grad in zip(trainable, torch.autograd.grad(loss(model, 0, 1), trainable), strict=True):
        parameter.grad = grad
    with pytest.raises(RuntimeError, match=r"got one after the reduction of its bucket had begun.*zero_\(\)"):
        main_grads.finish()  # the first bucket was full
    main_grads.zero_()
    assert all(p.grad is None for p in trainable)
    with main_grads.accumulate():
        loss(model, 0, 0).backward()
    for parameter, grad in zip(trainable, torch.autograd.grad(loss(model, 0, 1), trainable), strict=True):
        parameter.grad = grad
    main_grads.finish()
    close(main_grads_by_name(model), reference)
    assert all(p.grad is None for p in trainable)


def test_clearing():
    model = Mixed()
    main_grads = MainGrads(model)
    backwards(main_grads, model, 0)
    main_grads.finish()
    model.second.weight.grad, model.second.weight.grad_added_to_main_grad = torch.ones(20, 36), True
    main_grads.zero_()
    assert not any(buffer.any() for buffer in main_grads.buffers)
    assert all(p.grad is None and not p.grad_added_to_main_grad for p in model.parameters() if p.requires_grad)


def test_dropped_or_closed_it_lets_go_of_the_parameters():
    weight = nn.Parameter(torch.ones(2))
    gc.disable()  # nothing in a cycle
    try:
        main_grads = MainGrads([weight])
        buffer = weakref.ref(main_grads.buffers[0])
        del main_grads
        assert buffer() is None and not {"main_grad", "main_grads", "grad_added_to_main_grad"} & set(weight.__dict__)
    finally:
        gc.enable()
    weight.sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0]
    MainGrads([weight]).close()
    main_grads = MainGrads([weight])
    assert weight.grad is None
    main_grads.close()
    main_grads.close()
    assert not hasattr(weight, "main_grad")


# ---- several processes ----


def close_parts(got, expected):
    for name, (start, part) in got.items():
        grad = expected[name]
        right = torch.zeros_like(part) if grad is None else grad.flatten()[start : start + part.numel()].float()
        torch.testing.assert_close(part, right, rtol=2e-5, atol=2e-6, msg=lambda words, name=name: f"{name}: {words}")


@needs_gloo
@pytest.mark.parametrize("released", ["", ", released"])
@pytest.mark.parametrize("kind", ["averaged", "summed", "shards"])
def test_reduced_as_in_fp64(found, kind, released):
    expected = exact(range(len(found)), average=kind != "summed")
    for rank in found:
        close_parts(rank["reduced"][kind + released], expected)
    held = sum(part.numel() for rank in found for _, part in rank["reduced"][kind + released].values())
    assert held == sum(p.numel() for p in Mixed().parameters() if p.requires_grad) * (1 if kind == "shards" else len(found))


@needs_gloo
def test_groups_of_every_other_rank(found):
    if len(found) < 4:
        pytest.skip("four processes only")
    for place, rank in enumerate(found):
        for parts in rank["pairs"]:
            close_parts(parts, exact([place % 2, place % 2 + 2]))


@needs_gloo
@pytest.mark.parametrize("shard", [False, True])
def test_reductions_start_under_the_last_backward_only(found, shard):
    name = "reduce_scatter" if shard else "all_reduce"
    for rank in found:
        log = rank["overlap"][shard]
        assert log["before"] == 0
        sent = [call for call in log["backward"] if isinstance(call, tuple)]
        assert sent + log["finish"] == [(name, size) for size in log["sizes"]]
        assert len(sent) >= 1 and len(log["sizes"]) > 3
        assert all(size % 64 == 0 for size in log["sizes"])  # also of a rank's part
        assert any(isinstance(call, str) for call in log["backward"][log["backward"].index(sent[0]) + 1 :])


@needs_gloo
@pytest.mark.parametrize("release", [False, True])
def test_a_parameter_unused_on_one_rank(found, release):
    ranks = len(found)
    for place, rank in enumerate(found):
        log = rank["unused_on_one_rank"][release]
        assert log["backward"] == (1 if place == 0 else 5)
        assert [size for _, size in log["sent"]] == [
            64 * ranks * -(-(40 + 50 * index) // (64 * ranks)) for index in (4, 3, 2, 1, 0)
        ]
        everyone = sum(range(1, ranks + 1))
        for index, mean in enumerate(log["grads"]):
            expected = (index + 1) * (everyone - (index == 3)) / ranks
            torch.testing.assert_close(mean.item(), expected)


@needs_gloo
def test_by_hand_and_held(found):
    ranks = len(found)
    for rank in found:
        log = rank["by_hand_and_held"]
        assert log["sent"] == [0, 2, 2]
        too_early, *too_late = log["said"]
        assert "finish() must come after all gradients, but parameter 1's are deferred: flush them first" in too_early
        assert all("parameter 1 must get its gradients before" in words for words in too_late)
        one, two = log["grads"]
        torch.testing.assert_close(one, torch.full((3,), 11 + (ranks + 1) / 2))
        assert two.tolist() == [1.0] * 3


@needs_gloo
@pytest.mark.parametrize("shard", [False, True])
def test_norms_over_ranks(found, shard):
    grads = [grad.flatten() for grad in exact(range(len(found))).values() if grad is not None]
    for rank in found:
        two, one, largest, clipped, after, *nans = rank["norms"][shard]
        for norm_type, got in ((2.0, two), (1.0, one), (float("inf"), largest), (2.0, clipped)):
            torch.testing.assert_close(got, torch.linalg.vector_norm(torch.cat(grads), norm_type).float(), rtol=1e-5, atol=0)
        torch.testing.assert_close(after.item(), 0.05, rtol=1e-4, atol=0)
        assert all(norm.isnan() for norm in nans)
    assert all(torch.equal(a, b) for a, b in zip(found[0]["norms"][shard][:5], found[1]["norms"][shard][:5], strict=True))


@needs_gloo
def test_what_tensor_parallel_ranks_have_alike_counts_once(found):
    if len(found) < 4:
        pytest.skip("four processes only")
    expected = (100 * (1.0 + 4.0 + 9.0 + 16.0)) ** 0.5
    for rank in found:
        for norm, after in rank["tensor_parallel"]:
            torch.testing.assert_close(norm.item(), expected)
            torch.testing.assert_close(after.item(), 1.0)


@needs_gloo
def test_narrow_buffers(found):
    ranks = len(found)
    for rank in found:
        one, two, buffers = rank["narrow"]
        assert one.dtype == two.dtype == BF16 and buffers == 2
        assert one.tolist() == [2.0 * ranks] * 7 and two.tolist() == [ranks * (ranks + 1) / 2] * 9


CLOSE = {FP32: {"rtol": 1e-5, "atol": 1e-6}, BF16: {"rtol": 2**-7, "atol": 1e-4}}


def in_one_order(found):
    """Whether an all-reduce adds in the order in which a reduce-scatter does: with more than two terms NCCL may not."""
    return found[0]["backend"] == "gloo" or len(found) == 2


@needs_gloo
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_sharded_training_is_the_same(found, dtype):
    start = dict(Mixed(dtype, norms=FP32).named_parameters())
    total = sum(p.numel() for p in start.values() if p.requires_grad)
    first, whole_state, _ = found[0]["trained"][dtype, False]
    assert whole_state == total
    assert sum(rank["trained"][dtype, True][1] for rank in found) == total
    for rank in found:
        for shard in (False, True, "released"):
            weights, _, moved = rank["trained"][dtype, shard]
            assert moved
            if shard == "released" and in_one_order(found):
                assert all(torch.equal(weight, rank["trained"][dtype, True][0][name]) for name, weight in weights.items())
            for name, weight in weights.items():
                if world.CLIPPED[dtype] is None and in_one_order(found):
                    assert torch.equal(weight, first[name]), name
                else:  # the norm's sums are in another order
                    torch.testing.assert_close(weight, first[name], **CLOSE[weight.dtype])
                assert (name == "frozen") == torch.equal(weight, start[name]) or name == "unused"


@needs_gloo
@pytest.mark.parametrize("shard", [False, True])
def test_states_come_back(found, shard):
    ranks = len(found)
    for place, rank in enumerate(found):
        log = rank["resumed"][shard]
        mine = [place, ranks] if shard else [0, 1]
        other, short = log["said"]
        assert other == f"state must be of [rank, ranks] {mine}, but is of {[mine[0] + 1, mine[1]]}"
        assert short.startswith("state must have a master ") and log["same"]
        for before, after in (log["loaded"], log["trained"]):
            assert all(torch.equal(weight, after[name]) for name, weight in before.items())


@needs_gloo
def test_under_validate_ranks_that_differ_are_told(found):
    place = "parameter {} of shape ({},) and torch.{} at element {} of bucket {}".format
    differing = {
        "shape": (place(0, 3, "float32", 0, 0), place(0, 4, "float32", 0, 0)),
        "layers": (place(1, 4, "float32", 0, 0), place(2, 5, "float32", 0, 0)),
        "type": (place(1, 4, "float32", 0, 0), place(1, 4, "bfloat16", 0, 0)),
        "options": ("dtype torch.float32 and shard False", "dtype torch.float32 and shard True"),
        "buckets": (place(0, 3, "float32", 64, 0), place(0, 3, "float32", 0, 1)),
    }
    said = (
        "parameters and options must be the same, in one order, on all ranks of group, "
        "but its rank 0 has {} where its rank 1 has {}"
    )
    for rank in found:
        assert rank["agreement"] == {name: said.format(*both) for name, both in differing.items()} | {"alike": ""}


@needs_gloo
def test_a_group_of_one_and_a_group_without_this_rank(found):
    for place, rank in enumerate(found):
        sent, parts = rank["alone"]
        assert sent == []
        close_parts(parts, exact([place]))
        assert rank["other"].startswith("group must be None or a torch.distributed.ProcessGroup that has this rank, but is -100")
