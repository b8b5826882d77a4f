"""Norms of a tensor's columns: the same numbers as of the columns one by one (test_ragged_norm)."""

import pytest
import torch

from onepass.ops.norm.ragged.ragged_norm import (
    columns_norm_backward,
    columns_norm_forward,
    ragged_norm_backward,
    ragged_norm_forward,
)
from onepass.runtime.backend import use_backend

WIDTHS = [5, 16, 1, 33]


def made(dtype, lead=(3,), widths=WIDTHS, strided=False):
    torch.manual_seed(0)
    total = sum(widths)
    x, dy = (torch.randn(*lead, total + 3 * strided).to(dtype)[..., :total] for _ in range(2))
    weight, bias = (torch.randn(total).to(dtype) for _ in range(2))
    return x, dy, weight, bias


def listed(whole, widths):
    return [] if whole is None else list(whole.split(widths, -1))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("dtype", "lead", "widths", "strided"),
    [
        (torch.float32, (3,), WIDTHS, False),
        (torch.bfloat16, (2, 3), [16, 32], False),
        (torch.float16, (7,), [8, 24, 8], True),
        (torch.float32, (0,), WIDTHS, False),
        (torch.float32, (), [4, 4], False),
    ],
)
def test_as_lane_by_lane(backend, norm, affine, dtype, lead, widths, strided):
    x, dy, weight, bias = made(dtype, lead, widths, strided)
    weight, bias = (weight if affine else None), (bias if affine and norm == "layer_norm" else None)
    xs, dys, weights, biases = (listed(whole, widths) for whole in (x, dy, weight, bias))
    with use_backend(backend):
        y, mean, rstd = columns_norm_forward(x, weight, bias, widths, norm, 1e-5)
        want = ragged_norm_forward(xs, weights, biases, norm, 1e-5, True)
        torch.testing.assert_close([y, mean, rstd], list(want), rtol=0, atol=0)
        asked = affine, affine and norm == "layer_norm"
        back = columns_norm_backward(dy, x, weight, mean, rstd, widths, norm, *asked)
        want = ragged_norm_backward(dys, xs, weights, mean, rstd, norm, True, *asked)
        torch.testing.assert_close(list(back), list(want), rtol=0, atol=0)


def test_another_tensor_of_the_shape():
    """What is kept of a shape holds no address."""
    with use_backend("triton"):
        for seed in range(3):
            x = torch.randn(4, sum(WIDTHS), generator=torch.Generator().manual_seed(seed))
            y, _, _ = columns_norm_forward(x, None, None, WIDTHS, "rms_norm", 1e-5)
            want, _, _ = ragged_norm_forward(listed(x, WIDTHS), [], [], "rms_norm", 1e-5, True)
            torch.testing.assert_close(y, want, rtol=0, atol=0)


def test_an_uneven_address():
    whole = torch.randn(4 * 48 + 1)
    x = whole[1:].view(4, 48)  # 4 bytes off: no 16-byte loads
    with use_backend("triton"):
        y, _, _ = columns_norm_forward(x, None, None, [16, 32], "rms_norm", 1e-5)
        even, _, _ = columns_norm_forward(x.clone(), None, None, [16, 32], "rms_norm", 1e-5)
    torch.testing.assert_close(y, even)


@pytest.mark.parametrize("widths", [[5, 16], [0, 55], []])
def test_widths_must_make_up_a_row(widths):
    x, _, weight, bias = (t.to("meta") for t in made(torch.float32))
    with pytest.raises(ValueError, match="widths must be at least 1 and add up to x's last dimension 55"):
        columns_norm_forward(x, weight, bias, widths, "layer_norm", 1e-5)


def test_vectors_must_be_as_long_as_a_row():
    x, _, weight, _ = (t.to("meta") for t in made(torch.float32))
    with pytest.raises(ValueError, match=r"bias must have shape \(55,\), as x's last dimension, but has \(54,\)"):
        columns_norm_forward(x, weight, weight[1:], WIDTHS, "layer_norm", 1e-5)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_registered(norm):
    x, dy, weight, bias = made(torch.float32)
    bias = bias if norm == "layer_norm" else None
    checks = ("test_schema", "test_faketensor")
    with use_backend("torch"):
        torch.library.opcheck(columns_norm_forward, (x, weight, bias, WIDTHS, norm, 1e-5), test_utils=checks)
        _, mean, rstd = columns_norm_forward(x, weight, bias, WIDTHS, norm, 1e-5)
        given = dy, x, weight, mean, rstd, WIDTHS, norm, True, bias is not None
        torch.library.opcheck(columns_norm_backward, given, test_utils=checks)
