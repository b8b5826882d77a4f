"""Bad input: an error that names the argument, what it was and what it must be; and nothing changed."""

import pytest
import torch
from ops.calls import refused
from ops.oracle import DEVICE

import onepass
from onepass.kernels.language import triton

x, weight = torch.ones(2, 6), torch.ones(6)
NAN, INF = float("nan"), float("inf")

BAD = {  # the call's arguments, its error, what is said: the argument, what it was, what it must be
    "bool x": ((x.bool(),), {}, TypeError, ("x must be", "floating-point", "torch.bool")),
    "complex x": ((x + 0j,), {}, TypeError, ("x must be", "floating-point", "complex64")),
    "hidden size 0": ((torch.ones(3, 0), torch.ones(0)), {}, ValueError, ("x must", "at least 1", "(3, 0)")),
    "zero-centred nothing": ((x,), {"zero_centered_gamma": True}, ValueError, ("zero_centered_gamma", "no weight")),
    "short residual": ((x,), {"residual": x[:1]}, ValueError, ("residual must have", "(2, 6)", "(1, 6)")),
    "residual a row": ((x,), {"residual": weight}, ValueError, ("residual must have", "(2, 6)", "(6,)")),
    "residual transposed": ((x,), {"residual": x.T}, ValueError, ("residual must have", "(2, 6)", "(6, 2)")),
    "eps of zero": ((x, weight), {"eps": 0.0}, ValueError, ("eps must be", "above 0", "0.0")),
    "eps of integer zero": ((x, weight), {"eps": 0}, ValueError, ("eps must be", "above 0", "0")),
    "eps below zero": ((x, weight), {"eps": -1e-5}, ValueError, ("eps must be", "above 0", "-1e-05")),
    "eps NaN": ((x, weight), {"eps": NAN}, ValueError, ("eps must be", "above 0", "nan")),
    "eps infinite": ((x, weight), {"eps": INF}, ValueError, ("eps must be", "finite", "inf")),
    "eps that fp32 has no number for": ((x, weight), {"eps": 1e-50}, ValueError, ("eps must be", "at least 1.2e-38", "1e-50")),
    "eps a word": ((x, weight), {"eps": "1e-5"}, TypeError, ("eps must be", "number", "'1e-5'", "str")),
    "eps nothing": ((x, weight), {"eps": None}, TypeError, ("eps must be", "number", "None")),
    "eps True": ((x, weight), {"eps": True}, TypeError, ("eps must be", "number", "True")),
}
norms = pytest.mark.parametrize("norm", (onepass.layer_norm, onepass.rms_norm), ids=("layer", "rms"))


@norms
@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_and_why(name, backend, norm):
    args, options, error, words = BAD[name]
    refused(norm, args, {"backend": backend, **options}, error, words)


@norms
def test_an_explicit_backend_never_falls_back(norm):
    with pytest.raises(RuntimeError, match="float64"):
        norm(x.double(), weight.double(), backend="triton")
    y = norm(x.double(), weight.double())
    assert y.dtype == torch.float64 and torch.equal(y, norm(x.double(), weight.double(), backend="torch"))


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@norms
def test_rows_longer_than_the_kernels_take(norm):
    wide = torch.ones(1, 262145, device=DEVICE)
    with pytest.raises(RuntimeError, match="262145 are longer than 262144"):
        norm(wide, backend="triton")
    assert onepass.explain(norm, wide).backend == "torch"
    assert norm(wide).shape == wide.shape
