"""Helpers for tests of several ops: run a call, return its outputs and gradients, and compare them."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass.kernels.language import triton
from onepass.testing.poison import unchanged

DELEGATED = "gated_delta_rule", "mamba_chunk_scan"  # to kernels of wheels, on a GPU; tests/ops/test_*_wheels.py have stand-ins
needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")
backends = pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])


class Operators(TorchDispatchMode):
    """A dispatch mode, like a selective checkpoint's, that records the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    @property
    def additions(self):
        return sum(name.startswith(("aten.add.", "aten.add_.")) for name in self.names)


def outputs(returned):
    return (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)


def incoming(y, i=0):
    """Return a gradient for the i-th output. All its elements differ."""
    return torch.linspace(-1, 2 + i, y.numel(), device=y.device).view(y.shape).to(y.dtype)


def gradients(function, inputs):
    """Return the outputs, and the gradients of the inputs with requires_grad. The inputs are replaced by new leaves."""
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
    ys = outputs(function(*leaves))
    torch.autograd.backward(ys, [incoming(y, i) for i, y in enumerate(ys)])
    return [*(y.detach() for y in ys), *(t.grad for t in leaves if t is not None and t.requires_grad)]


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def nearly_equal(first, second):
    """Assert equality but for fp32's last bits: a GPU kernel that saves statistics is another binary with its own rounding."""
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * b.abs().max().item() if b.numel() else 0)
    return True


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def says(words, raised):
    """Assert that an error's message contains all these words."""
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in {str(raised.value)!r}"


def refused(op, args, options, error, words):
    """Assert that a call raises an error that says these words, in `explain` too, and changes no tensor."""
    given = [t for t in (*args, *options.values()) if isinstance(t, torch.Tensor) and not t.is_meta]
    for call in (op, partial(onepass.explain, op)):
        if call is op or error is not IndexError:  # explain reads no labels
            with unchanged(**{f"given{i}": t for i, t in enumerate(given)}), pytest.raises(error) as raised:
                call(*args, **options)
            says(words, raised)
