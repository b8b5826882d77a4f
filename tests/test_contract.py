"""Every op holds the contract, by its formula and by its kernels: in the interpreter here, on the GPU where there is one."""

import pytest
import torch

from onepass.testing.contract import CHECKS, subjects

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("backend", ("triton", "torch"))
@pytest.mark.parametrize("sample", sorted(subjects("torch", DEVICE)))
def test_an_op_holds_the_contract(sample, backend, check):
    if backend == "triton":
        pytest.importorskip("triton")
    check(subjects(backend, DEVICE)[sample])
