"""Bad input: an error that names the argument, what it was and what it must be."""

import pytest
import torch
from ops.calls import backends, equal, refused
from ops.oracle import DEVICE

import onepass

x, table = torch.ones(2, 3, 4, 8), torch.ones(3, 4)


@backends
@pytest.mark.parametrize(
    ("error", "args", "words"),
    [
        (ValueError, (x[0, 0], x[0, 0], table, table), ("q must have at least three dimensions", "(4, 8)")),
        (ValueError, (x, x[..., :6], table, table), ("k must have q's shape (2, 3, 4, 8) but for the heads", "(2, 3, 4, 6)")),
        (ValueError, (x, x[:, :2], table, table), ("k must have q's shape", "(2, 2, 4, 8)")),
        (ValueError, (x, x[0], table, table), ("k must have q's shape", "(3, 4, 8)")),
        (ValueError, (x, x, table[0], table), ("cos must have shape [..., 3, R/2]", "(4,)")),
        (ValueError, (x, x, table[:2], table[:2]), ("cos must have shape [..., 3, R/2]", "(2, 4)")),
        (ValueError, (x, x, table[:1], table[:1]), ("cos must have shape [..., 3, R/2]", "(1, 4)")),
        (ValueError, (x, x, torch.ones(3, 8), table), ("from 1 to 4 numbers a token", "one half of it", "(3, 8)")),
        (ValueError, (x, x, table[:, :0], table), ("from 1 to 4 numbers a token", "(3, 0)")),
        (ValueError, (x, x, table.expand(3, 3, 4), table), ("cos must have leading dimensions", "(2,)", "(3, 3, 4)")),
        (ValueError, (x, x, table.expand(1, 2, 3, 4), table), ("cos must have leading dimensions", "(2,)", "(1, 2, 3, 4)")),
        (ValueError, (x, x, table, table[:, :2]), ("sin must have cos's shape (3, 4)", "(3, 2)")),
        (ValueError, (x, x, table, table.expand(2, 3, 4)), ("sin must have cos's shape (3, 4)", "(2, 3, 4)")),
        (ValueError, (x, x, table.clone().requires_grad_(), table), ("cos must not require grad", "detach")),
        (ValueError, (x, x, table, table.clone().requires_grad_()), ("sin must not require grad", "detach")),
    ],
)
def test_bad_input_is_named(error, args, words, backend):
    refused(onepass.rope, args, {"backend": backend}, error, words)


@backends
def test_tables_that_require_grad_are_fine_where_nothing_does(backend):
    q, cos = x.to(DEVICE), table.to(DEVICE)
    with torch.no_grad():
        ys = onepass.rope(q, q, *(cos.clone().requires_grad_() for _ in range(2)), backend=backend)
    assert equal(ys, onepass.rope(q, q, cos, cos, backend=backend))


@backends
@pytest.mark.parametrize(
    ("q", "boundaries", "words"),
    [
        (x, (0, 6), ("q must be one row of tokens", "(2, 3)")),
        (x[:1], (0, 2), ("cu_seqlens must end with 3, q's tokens", "2")),
        (x[0], (0, 3, 2), ("cu_seqlens must end with 3", "2")),
        (x[0], (0, 2, 1, 3), ("cu_seqlens must not fall", "from 2 to 1")),
        (torch.ones(7, 2, 8), (0, 3, 7), ("cos must have a row for each position of the longest document, 4", "3")),
    ],
)
def test_bad_documents_are_named(q, boundaries, words, backend):
    options = {"cu_seqlens": torch.tensor(boundaries, dtype=torch.int32), "backend": backend}
    refused(onepass.rope, (q, q, table, table), options, ValueError, words)
