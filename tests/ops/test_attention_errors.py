"""Bad input: an error that names the argument, what it was and what it must be."""

import pytest
import torch
from ops.calls import backends, refused, says

import onepass

qkv, table = torch.ones(2, 3, 8 * 16).bfloat16(), torch.ones(3, 8)
row = torch.ones(1, 9, 8 * 16).bfloat16()


def at(*boundaries):
    return {"cu_seqlens": torch.tensor(boundaries, dtype=torch.int32)}


@backends
@pytest.mark.parametrize(
    ("error", "args", "options", "words"),
    [
        (TypeError, (qkv, 4.0, 2), {}, ("heads must be a whole number", "4.0", "float")),
        (TypeError, (qkv, 4, True), {}, ("groups must be a whole number", "True", "bool")),
        (ValueError, (qkv, 0), {}, ("heads must be at least 1", "0")),
        (ValueError, (qkv, 4, -2), {}, ("groups must be at least 1", "-2")),
        (ValueError, (qkv, 4, 3), {}, ("heads must be a multiple of groups, 3", "4")),
        (ValueError, (qkv[0], 4, 2), {}, ("qkv must have shape [B, S, 8 D]", "(3, 128)")),
        (ValueError, (qkv[..., :100], 4, 2), {}, ("qkv must have shape [B, S, 8 D]", "4 heads", "2 of keys", "(2, 3, 100)")),
        (ValueError, (qkv[..., :0], 4, 2), {}, ("qkv must have shape [B, S, 8 D]", "(2, 3, 0)")),
        (TypeError, (qkv, 4, 2), {"scale": "1"}, ("scale must be a number", "'1'")),
        (ValueError, (qkv, 4, 2), {"scale": float("nan")}, ("scale must be finite and above 0", "nan")),
        (ValueError, (qkv, 4, 2), {"scale": 0.0}, ("scale must be finite and above 0", "0.0")),
        (ValueError, (qkv, 4, 2), {"cos": table}, ("sin must be given where cos is", "None")),
        (ValueError, (qkv, 4, 2), {"sin": table}, ("cos must be given where sin is", "None")),
        (TypeError, (qkv, 4, 2), {"cos": table.int(), "sin": table}, ("cos must be a floating-point tensor", "int32")),
        (ValueError, (qkv, 4, 2), {"cos": table[:2], "sin": table[:2]}, ("cos must have shape [..., 3, R/2]", "qkv's", "(2, 8)")),
        (ValueError, (qkv, 4, 2), {"cos": torch.ones(3, 9), "sin": torch.ones(3, 9)}, ("from 1 to 8 numbers", "(3, 9)")),
        (ValueError, (qkv, 4, 2), {"cos": table, "sin": table[:, :4]}, ("sin must have cos's shape (3, 8)", "(3, 4)")),
        (ValueError, (qkv, 4, 2), {"cos": table.to("meta"), "sin": table}, ("cos must be on cpu, as qkv", "meta")),
        (ValueError, (qkv, 4, 2), {"cos": table.clone().requires_grad_(), "sin": table}, ("cos must not require grad",)),
        (TypeError, (qkv, 4, 2), {"causal": 1}, ("causal must be True or False", "1", "int")),
        (ValueError, (qkv, 4, 2), {"window": 0}, ("window must be at least 1", "0")),
        (TypeError, (qkv, 4, 2), {"window": 2.0}, ("window must be a whole number", "2.0", "float")),
        (TypeError, (qkv, 4, 2), {"window": (2, 0)}, ("window must be a whole number where attention is causal", "(2, 0)")),
        (TypeError, (qkv, 4, 2), {"window": 2, "causal": False}, ("window must be a pair where attention is not causal", "2")),
        (ValueError, (qkv, 4, 2), {"window": (1, -1), "causal": False}, ("window[1] must be at least 0", "-1")),
        (TypeError, (qkv, 4, 2), {"window": (True, 1), "causal": False}, ("window[0] must be a whole number", "True")),
        (TypeError, (qkv, 4, 2), {"softcap": "50"}, ("softcap must be a number", "'50'")),
        (ValueError, (qkv, 4, 2), {"softcap": 0.0}, ("softcap must be finite and above 0", "0.0")),
        (TypeError, (row, 4, 2), {"cu_seqlens": torch.tensor([0, 9])}, ("cu_seqlens must be a tensor of torch.int32", "int64")),
        (ValueError, (row, 4, 2), at(9), ("cu_seqlens must have shape [documents + 1]", "(1,)")),
        (ValueError, (qkv, 4, 2), at(0, 6), ("qkv must be one row of tokens where cu_seqlens is given", "(2, 3)")),
        (ValueError, (row, 4, 2), at(1, 9), ("cu_seqlens must begin with 0", "1")),
        (ValueError, (row, 4, 2), at(0, 8), ("cu_seqlens must end with 9, qkv's tokens", "8")),
        (ValueError, (row, 4, 2), at(0, 5, 4, 9), ("cu_seqlens must not fall", "from 5 to 4 at 2")),
        (ValueError, (row, 4, 2), at(0, 5, 9) | {"cos": table, "sin": table}, ("the longest document, 5", "has 3")),
        (ValueError, (row, 4, 2), at(0, 9) | {"cos": table[None], "sin": table[None]}, ("cos must have shape [..., 9, R/2]",)),
    ],
)
def test_bad_input_is_named(error, args, options, words, backend):
    refused(onepass.attention, args, {"backend": backend, **options}, error, words)


@backends
def test_a_leaf_that_requires_grad_is_not_overwritten(backend):
    leaf = qkv.clone().requires_grad_()
    for given in (leaf, leaf[:1], leaf.view(1, 6, -1)):
        tables = {"cos": torch.ones(given.shape[1], 8), "sin": torch.ones(given.shape[1], 8)}
        with pytest.raises(ValueError) as raised:
            onepass.attention(given, 4, 2, **tables, overwrite=True, backend=backend)
        says(("overwrite must be False", "leaf that requires grad", "True"), raised)
        onepass.attention(given, 4, 2, overwrite=True, backend=backend)  # which turns nothing
    assert torch.equal(leaf, qkv)
    with torch.no_grad():
        onepass.attention(leaf, 4, 2, cos=table, sin=table, overwrite=True, backend=backend)
    assert not torch.equal(leaf, qkv)


def test_what_is_written_is_neither_shared_nor_a_copy_of_a_leaf():
    """Numbers that lie in one place are read in place and rotated elsewhere; under autocast it is a copy that is written."""
    cos, sin = torch.ones(6, 4), torch.zeros(6, 4) + 0.5
    rows = torch.randn(200)
    shared = rows.as_strided((1, 6, 64), (0, 10, 1))  # each row begins within the one before
    got = onepass.attention(shared, 2, 1, cos=cos, sin=sin, overwrite=True)
    torch.testing.assert_close(got, onepass.attention(shared.clone(), 2, 1, cos=cos, sin=sin))
    leaf = torch.randn(1, 6, 64, requires_grad=True)
    before = leaf.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        onepass.attention(leaf, 2, 1, cos=cos, sin=sin, overwrite=True).float().sum().backward()
    assert torch.equal(leaf, before) and leaf.grad is not None
