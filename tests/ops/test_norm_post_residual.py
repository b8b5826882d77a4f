"""rms_norm with a residual that is added to its result: against the formula in fp64, its gradients, and mutants."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from ops.calls import backends, needs_triton, refused
from ops.norm_oracle import LAYOUTS, Case, small_tiles
from ops.oracle import BF16, DEVICE, FP16, FP32, heads_laid_out, judge_call, normals

import onepass
import onepass.ops.norm.norm as module
from onepass.ops.norm.norm import rms_norm_reference
from onepass.testing.budget import run
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged

BASE = Case(lead=(13,), residual=FP32)  # the type of what is added
CASES = [
    *(replace(BASE, path=path, layout=layout) for path in ("rows", "chunks", "shared") for layout in ("contiguous", "sliced")),
    *(replace(BASE, path=path, dtype=BF16, weight=FP32, residual=BF16, centered=True) for path in ("rows", "fold")),
    replace(BASE, path="few", dtype=FP16, weight=None, residual=FP16, memory_efficient=True),
    replace(BASE, dtype=BF16, weight=BF16),
    replace(BASE, path="rows", lead=(2, 3, 4), H=24, layout="part", dy_layout="heads first"),
    *(replace(BASE, H=40, lead=(4, 3), layout=layout, dy_layout=layout) for layout in LAYOUTS),
    replace(BASE, H=4097, lead=(2,)),
    replace(BASE, H=12300, lead=(2,), dtype=BF16, residual=BF16),
]


def draw(case, seed=0):
    randn, shape = normals(seed), (*case.lead, case.H)
    x = heads_laid_out(randn(*shape).to(case.dtype).to(DEVICE), case.layout)
    weight = None if case.weight is None else (randn(case.H) - 0.75 * case.centered).to(case.weight).to(DEVICE)
    post = heads_laid_out(randn(*shape).to(case.residual).to(DEVICE), case.dy_layout)
    return {"x": x, "weight": weight, "post": post}, heads_laid_out(randn(*shape).to(case.dtype).to(DEVICE), case.dy_layout)


def judge_case(module, case, backend="triton"):
    options = {"zero_centered_gamma": case.centered, "eps": case.eps}

    def op(x, weight, post):
        given = {"post_residual": post, "memory_efficient": case.memory_efficient, "backend": backend}
        return module.rms_norm(x, weight, **given, **options)

    def formula(x, weight, post):
        return rms_norm_reference(x, weight, post_residual=post, **options)

    with small_tiles(module, case.path) as counters:
        return judge_call(op, partial(run, formula), partial(draw, case), case.dtype, counters)


@backends
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_formula(case, backend):
    report = judge_case(module, case, backend)
    assert report, report


@needs_triton
def test_what_is_kept():
    """What is added is not."""
    x, post = (torch.randn(36, 100, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(2))
    weight = torch.randn(100, device=DEVICE, dtype=BF16, requires_grad=True)
    with saved_tensors() as kept:
        onepass.rms_norm(x, weight, post_residual=post, backend="triton")
    assert bytes_kept(kept, x, weight) == 36 * 4


@backends
def test_gradients_of_their_own(backend):
    """dy is the gradient of what is added, and nobody's who writes into that."""
    x, post = (torch.randn(5, 40, device=DEVICE, requires_grad=True) for _ in range(2))
    dy = torch.randn(5, 40, device=DEVICE)
    with unchanged(dy=dy):
        onepass.rms_norm(x, post_residual=post, backend=backend).backward(dy)
        assert post.grad.equal(dy) and x.grad.any()
        post.grad.zero_()
    frozen = x.detach()
    onepass.rms_norm(frozen, post_residual=post, backend=backend).backward(dy)
    assert post.grad.equal(dy)


@pytest.mark.parametrize("other", ("residual", "return_input", "out"))
def test_it_stands_alone(other):
    x = torch.ones(2, 6)
    given = {"residual": x, "return_input": True, "out": "fp8"}[other]
    refused(
        onepass.rms_norm, (x,), {other: given, "post_residual": x}, ValueError, (f"{other} must be left out", "post_residual")
    )
    with pytest.raises(ValueError, match="post_residual must have"):
        onepass.rms_norm(x, post_residual=x[:1])
