"""The columns that a row of logits has in memory past its last: each kernel that writes a gradient writes zeros there.

A GPU's products read them, against rows of zeros in the weight's copy. On a CPU rows have none, so other tests never see them.
"""

import pytest
import torch
from ops.calls import gradients, needs_triton
from ops.oracle import BF16, DEVICE, FP32

import onepass
from onepass.ops.loss.formula import LossTerms
from onepass.ops.loss.head import operands
from onepass.ops.loss.linear_divergence import kernels as divergences
from onepass.ops.loss.linear_divergence.formula import KINDS, PLANES, DivergenceTerms
from onepass.ops.loss.linear_divergence.rows import LogitRows
from onepass.ops.loss.row_functions import APART
from onepass.ops.loss.row_kernels import RowGradients, row_gradients
from onepass.ops.loss.targets import VocabColumns
from onepass.ops.loss.whole_row_kernels import row_statistics_and_gradients
from onepass.runtime.sizes import ceil_div

ROWS, BLOCKS = 3, {"chunk_bytes": 1000}
pytestmark = needs_triton


def in_memory(W):
    """Return rows of NaN, with a room of whole steps, and the logits in them."""
    room = torch.full((ROWS, ceil_div(W, APART) * APART), float("nan"), device=DEVICE)
    logits = room[:, :W].copy_(torch.randn(ROWS, W, device=DEVICE))
    return room, logits


def whole(logits, room, labels):
    row_statistics_and_gradients(logits, logits, labels, LossTerms(), (), torch.ones(ROWS, device=DEVICE), room)


def by_tiles(logits, room, labels):
    lse = logits.logsumexp(1)
    columns = VocabColumns(0, logits.shape[1], room=room)
    row_gradients(logits, logits, labels, LossTerms(), lse, None, RowGradients(torch.ones(ROWS, device=DEVICE)), columns)


def divergence(kind):
    def run(logits, room, labels):
        teacher = in_memory(logits.shape[1])[1]
        rows = LogitRows(logits, logits, teacher, labels, room)
        numbers, losses = logits.new_empty(PLANES, ROWS), logits.new_empty(ROWS)
        divergences.whole_rows(rows, DivergenceTerms(kind=kind), numbers, losses, True)

    return run


@pytest.mark.parametrize("W", (1, 20, 33, 64, 70))
@pytest.mark.parametrize("write", (whole, by_tiles, *map(divergence, KINDS)), ids=("whole rows", "tiles", *KINDS))
def test_a_gradient_ends_in_zeros(write, W):
    room, logits = in_memory(W)
    write(logits, room.shape[1], torch.tensor((0, -100, W - 1), device=DEVICE))
    assert logits.isfinite().all()
    assert not room[:, W:].any()


@pytest.fixture
def padded(monkeypatch):
    """Weights and logits as on a GPU."""
    monkeypatch.setattr(operands, "pads", lambda x: True)


@pytest.mark.parametrize("options", ({}, BLOCKS, {**BLOCKS, "logits_dtype": FP32}), ids=("whole", "blocks", "wide"))
@pytest.mark.parametrize("biased", (False, True), ids=("plain", "bias"))
@pytest.mark.parametrize("V", (1, 20, 577, 1001))
def test_cross_entropy_of_odd_vocabularies(V, biased, options, padded):
    """Blocks of the vocabulary too, of which the last has the weight's rows of zeros."""
    given = [torch.randn(*shape, device=DEVICE).to(BF16).requires_grad_() for shape in ((32, 16), (V, 16), *(((V,),) * biased))]
    labels = torch.arange(32, device=DEVICE) % V

    def call(hidden, weight, bias=None, backend="triton"):
        return onepass.linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="none", backend=backend, **options)

    found, expected = gradients(call, given), gradients(lambda *ts: call(*ts, backend="torch"), given)
    assert all((one - other).norm() <= 2e-2 * other.norm() + 1e-6 for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("V", (1, 20, 577))
def test_divergence_of_odd_vocabularies(V, kind, padded):
    given = [torch.randn(*shape, device=DEVICE).to(BF16).requires_grad_(i < 2) for i, shape in enumerate(((32, 16), (V, 16)) * 2)]

    def call(*heads, backend="triton"):
        return onepass.linear_divergence(*heads, kind=kind, reduction="none", backend=backend)

    found, expected = gradients(call, given), gradients(lambda *ts: call(*ts, backend="torch"), given)
    assert all((one - other).norm() <= 2e-2 * other.norm() + 1e-4 for one, other in zip(found, expected, strict=True))
