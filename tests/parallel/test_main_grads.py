"""Flat gradient buffers and the masters fed from them, in one process."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from parallel.mixed_model import BF16, BYTES, FP32, Mixed, backwards, close, exact, loss, main_grads_by_name
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import main_grad as convention
from onepass.gradients.buckets import Bucket
from onepass.gradients.main_grads import MainGrads


@pytest.fixture(autouse=True)
def _plain_backend():
    with onepass.use_backend("torch"):
        yield


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


def test_a_methods_old_name_answers():
    main_grads = MainGrads(Mixed())
    with pytest.warns(DeprecationWarning, match="cleared has the name mark_zeroed now"):
        main_grads.cleared()
    assert main_grads._clear == [buffer._version for buffer in main_grads.buffers]
