"""Every op holds the contract, by its formula and by its kernels: in the interpreter here, on the GPU where there is one."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ops.calls import DELEGATED

import onepass
from onepass.testing.contract import CHECKS, refuses_second_derivatives, subjects

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAMPLES = sorted(subjects("torch", DEVICE))
OFTEN = "bias_activation", "dropout_add", "gated_rms_norm", "layer_norm", "linear", "rms_norm", "rope", "softmax"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", ("triton", "torch"))
@pytest.mark.parametrize("sample", SAMPLES)
def test_an_op_holds_the_contract(sample, backend, check):
    subject = subjects(backend, DEVICE)[sample]
    if backend == "triton":
        pytest.importorskip("triton")
        call = subject.sample.call(subject.op.call, *subject.tensors())
        if subject.op.name in DELEGATED and (reason := subject.op.unsupported(call)):
            pytest.skip(reason)
    check(subject)


@pytest.mark.parametrize("sample", [name for name in SAMPLES if name.partition(":")[0] in OFTEN])
def test_a_formula_is_differentiable_often(sample):
    refuses_second_derivatives(subjects("torch", DEVICE)[sample], may_raise=False)


@pytest.mark.parametrize("what", ("hessian", "hvp"))
@pytest.mark.parametrize("backend", ("triton", "torch"))
def test_functional_second_derivatives_are_right_or_raise(what, backend):
    """They differentiate gradients that they don't ask to be recorded: an op that detached would make zeros."""
    if backend == "triton":
        pytest.importorskip("triton")
    dtype = torch.float32 if backend == "triton" else torch.float64
    ours = partial(onepass.rms_norm, backend=backend)
    x, v = (torch.randn(2, 3, device=DEVICE, dtype=dtype) for _ in range(2))

    def second(norm):
        def total(x):
            return norm(x).sin().sum()

        functional = torch.autograd.functional
        return functional.hessian(total, x) if what == "hessian" else functional.hvp(total, x, v)[1]

    if backend == "triton":
        with pytest.raises(RuntimeError, match="differentiable once"):
            second(ours)
    else:
        torch.testing.assert_close(second(ours), second(partial(F.rms_norm, normalized_shape=(3,), eps=1e-6)))
