"""embedding: within the budget whatever ids come, bitwise the same in each call; shards, padding, strange ids, bad input."""

import math

import pytest
import torch
import torch.nn.functional as F
from ops.calls import backends, needs_triton, says
from ops.embedding_oracle import Case, judge_case, main_cases
from ops.oracle import BF16, DEVICE, FP32, FP64, replaced

import onepass
import onepass.ops.embedding.embedding as module
from onepass.gradients.releasable_storage import ReleasableBuffer
from onepass.ops.embedding import backward, forward
from onepass.testing.poison import poisoned


def drawn(*shape, rows=40, seed=0):
    return torch.randint(rows, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def table(rows=40, H=6, dtype=FP32, seed=0):
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype).requires_grad_()


# ---- right ----


@pytest.mark.parametrize("case", main_cases(), ids=str)
@backends
def test_within_the_budget(case, backend):
    report = judge_case(module, case, backend=backend)
    assert report, f"{case}\n{report}"


@needs_triton
@pytest.mark.parametrize("H", (1, 3, 16, 777, 1024, 2049, 3000))
def test_widths(H):
    report = judge_case(module, Case(70, 9, H, BF16, FP32, "zipf"))
    assert report, report


@needs_triton
@pytest.mark.parametrize("rows", (1, 2, 3, 15, 16, 255, 256, 32000, 248320))
def test_vocabularies(rows):
    """Both digits of the order at their ends. A large table has rows that nobody looks up, which stay as they are."""
    for kind in ("uniform", "alike"):
        report = judge_case(module, Case(70, rows, 2, draw=kind, main=FP32))
        assert report, report


@needs_triton
@pytest.mark.parametrize("M", (1, 2, 63, 64, 65, 127, 128, 129, 640))
def test_runs_end_where_pieces_do(M):
    for rows, kind in ((1, "alike"), (2, "sorted"), (3, "halves")):
        report = judge_case(module, Case(M, rows, 4, draw=kind, main=FP32))
        assert report, f"{rows} {kind}\n{report}"


@needs_triton
def test_a_run_of_more_pieces_than_are_looked_at_at_once():
    with replaced(vars(backward), _BOUNDARIES=4):
        for M in (64 * 4, 64 * 5, 64 * 9 + 1):
            for rows, kind in ((1, "alike"), (2, "halves")):
                report = judge_case(module, Case(M, rows, 2, draw=kind, main=FP32))
                assert report, report


@needs_triton
def test_the_order_is_that_of_rows_then_of_tokens():
    for kind, M in (("zipf", 5000), ("uniform", 333), ("alike", 100)):
        ids = (40 * torch.rand(M) ** 5).long() if kind == "zipf" else drawn(M) if kind == "uniform" else torch.full((M,), 39)
        ids, weight = ids.to(DEVICE), table().detach()
        with poisoned():
            _, order = forward.look_up(ids, weight, forward.EmbeddingOptions(-1, 0, 40), True)
        assert torch.equal(order >> 32, ids.sort(stable=True).values)
        assert torch.equal(order & 0xFFFFFFFF, ids.sort(stable=True).indices)


@backends
@pytest.mark.parametrize("shape", ((), (0,), (2, 0), (1,), (3, 5)), ids=str)
def test_it_is_pytorchs(shape, backend):
    weight, ids = table(), drawn(*shape)
    for padding in (None, 3, -1):
        y, expected = onepass.embedding(ids, weight, padding_idx=padding, backend=backend), F.embedding(ids, weight, padding)
        assert torch.equal(y, expected)
        dy = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(y, weight, dy), torch.autograd.grad(expected, weight, dy))


@backends
def test_shards_sum_to_the_whole(backend):
    whole, ids = table(23), drawn(4, 9, rows=23)
    parts = whole.detach().split((8, 8, 7, 0))
    dy = torch.randn(4, 9, 6, device=DEVICE)
    y, grads, start = 0, [], 0
    for part in parts:
        part = part.clone().requires_grad_()
        found = onepass.embedding(ids, part, vocab_start=start, vocab_size=23, backend=backend)
        grads.append(torch.autograd.grad(found, part, dy)[0])
        y, start = y + found.detach(), start + part.shape[0]
    expected = F.embedding(ids, whole)
    assert torch.equal(y, expected)
    torch.testing.assert_close(torch.cat(grads), torch.autograd.grad(expected, whole, dy)[0])


@backends
def test_nan_and_infinities_stay_in_their_rows(backend):
    weight, ids = table(9), torch.arange(9, device=DEVICE).repeat(20)
    with torch.no_grad():
        weight[2, 1], weight[3, 0] = math.nan, math.inf
    y = onepass.embedding(ids, weight, backend=backend)
    dy = torch.ones_like(y)
    dy[4 + 9 * 7, 2], dy[5, 3] = math.nan, -math.inf
    (grad,) = torch.autograd.grad(y, weight, dy)
    assert torch.equal(y.isnan(), weight.detach()[ids].isnan()) and y.isnan().any()
    assert grad.isnan().nonzero().tolist() == [[4, 2]] and grad[5, 3] == -math.inf
    assert (grad.isfinite().sum() == grad.numel() - 2) and grad[0, 0] == 20


@backends
def test_fp64(backend):
    weight, ids = table(dtype=FP64), drawn(30)
    if backend == "triton":
        with pytest.raises(RuntimeError, match=r"weight is torch\.float64"):
            onepass.embedding(ids, weight, backend=backend)
        return
    assert torch.autograd.gradcheck(lambda w: module.embedding_reference(ids, w), weight)
    onepass.embedding(ids, weight, backend=backend).sum().backward()
    torch.testing.assert_close(weight.grad[:, 0], ids.bincount(minlength=40).double())


# ---- what is kept, run and written ----


@needs_triton
def test_one_kernel_each_way(kernels_launched):
    weight = table()
    y = onepass.embedding(drawn(200), weight, backend="triton")
    assert kernels_launched == ["_embedding_kernel"]
    y.sum().backward()
    assert kernels_launched == ["_embedding_kernel", "_embedding_backward_kernel"]


@needs_triton
def test_nothing_is_ordered_where_no_gradient_is_asked_for(launched):
    weight, ids = table(), drawn(200)
    onepass.embedding(ids, weight.detach(), backend="triton")
    with torch.no_grad():
        onepass.embedding(ids, weight, backend="triton")
    assert [args[4] for args in launched] == [None, None]


@needs_triton
def test_what_is_kept():
    weight, ids, kept = table(), drawn(200), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        onepass.embedding(ids, weight, backend="triton")
    assert [(t.dtype, tuple(t.shape)) for t in kept] == [(torch.int64, (200,))]


@backends
def test_a_first_gradient_finds_no_zeros_in_released_memory(backend):
    weight = table(700, 400)
    buffer = torch.zeros(700 * 400, device=DEVICE)
    weight.main_grad = buffer.view(700, 400)
    released = ReleasableBuffer(buffer, [weight.main_grad], [])
    ids = drawn(90, rows=700)
    for times in (1, 2):
        if times == 1:
            released.release()
            with poisoned():
                onepass.embedding(ids, weight, backend=backend).sum().backward()
        else:
            onepass.embedding(ids, weight, backend=backend).sum().backward()
        torch.testing.assert_close(weight.main_grad[:, 0], times * ids.bincount(minlength=700).float())


@backends
def test_a_tied_weight_and_two_microbatches(backend):
    weight = table()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    exact = weight.detach().double().requires_grad_()
    for seed in (0, 1):
        ids = drawn(30, seed=seed)
        onepass.linear(onepass.embedding(ids, weight, backend=backend), weight).square().sum().backward()
        F.linear(F.embedding(ids, exact), exact).square().sum().backward()
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad.double(), exact.grad, rtol=1e-4, atol=1e-3)


# ---- words ----


@needs_triton
def test_explain():
    said = onepass.explain(onepass.embedding, drawn(8), table()).variant
    assert said == (
        "forward with 1024 tokens a program, while the same kernel orders the tokens by row; backward with a program a token; "
        "keeps the order"
    )
    wide = torch.empty(4, 2048, device=DEVICE)
    assert onepass.explain(onepass.embedding, drawn(8, rows=4), wide).variant == (
        "forward with 4 tokens a program; no gradient is asked for"
    )
    assert "nothing to do" in onepass.explain(onepass.embedding, drawn(0), wide).variant
    assert not forward.orders_in_kernel(1 << 17, 1000, 64) and forward.orders_in_kernel(1 << 17, 1000, 2048)
    assert not forward.orders_in_kernel(8, 1 << 20, 64)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda w: onepass.embedding(drawn(3), w, padding_idx=40), ValueError, "padding_idx must be from -40 to 39, but is 40"),
        (lambda w: onepass.embedding(drawn(3), w, padding_idx=-41), ValueError, "padding_idx must be from -40 to 39, but is -41"),
        (lambda w: onepass.embedding(drawn(3), w, padding_idx=1.0), TypeError, "padding_idx must be a whole number, but is 1.0"),
        (lambda w: onepass.embedding(drawn(3), w, vocab_size=39), ValueError, "vocab_size must be at least 40, weight's rows"),
        (lambda w: onepass.embedding(drawn(3), w, vocab_start=1), ValueError, "vocab_start must be from 0 to 0"),
        (lambda w: onepass.embedding(drawn(3), w, vocab_start=-1, vocab_size=50), ValueError, "vocab_start must be from 0 to 10"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error) as raised:
        call(table())
    says([words], raised)


@backends
@pytest.mark.parametrize("strange", (-1, 40, 1 << 40))
def test_ids_of_no_vocabulary_raise_where_they_are_read(strange, backend):
    ids = torch.tensor([1, strange, 3], device=DEVICE)
    with onepass.validate(), pytest.raises(IndexError, match="ids must be from 0 to 39, the rows of the vocabulary"):
        onepass.embedding(ids, table(), backend=backend)
