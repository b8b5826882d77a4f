"""Infinities, NaN and zeros of either sign in any input: formula and kernels say the same of each element."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from ops.calls import DELEGATED, needs_triton

from onepass.runtime.op import OPS
from onepass.runtime.samples import Sample, random_tensors
from onepass.testing.contract import Subject, subjects

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
VALUES = {"inf": (math.inf,), "-inf": (-math.inf,), "nan": (math.nan,), "zeros": (0.0, -0.0)}

GATED = partial(random_tensors, ((5, 2 * 70), (2 * 70,), (5,)))
CLAMPED = {
    f"bias_activation: {activation}, clamped": Sample(
        GATED, None, {"activation": activation, "clamp": 0.5, "linear_offset": 1.0}, keywords=("token_weight",)
    )
    for activation in ("swiglu", "geglu", "geglu_exact", "quick_geglu", "reglu")
}
PLAIN = {
    f"bias_activation: {activation}": Sample(partial(random_tensors, ((5, 70), (70,))), None, {"activation": activation})
    for activation in ("gelu", "gelu_exact", "quick_gelu", "silu", "relu", "squared_relu")
}
OTHERS = ("attention", "latent_attention", "linear", *DELEGATED)  # products, and kernels of PyTorch's or wheels'
NAMES = [name for name in subjects("torch", DEVICE) if name.partition(":")[0] not in OTHERS]


def results(subject, backend, tensors):
    """The outputs and the gradients of a call, and their names."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    subject = replace(subject, backend=backend)
    ys = subject.run(*leaves)
    named = {f"output {i}": y.detach() for i, y in enumerate(ys)}
    asked = [name for name, t in zip(subject.names(), leaves, strict=True) if t.requires_grad]
    return named | dict(zip([f"d{name}" for name in asked], subject.gradients(leaves, ys), strict=True))


def same(found, expected, what, *, exact, signs=True):
    """Not exact: a sum of infinities is NaN or infinite by the order of its terms, and signs of zeros are not compared."""
    a, b = found.float(), expected.float()
    assert torch.equal(a.isfinite(), b.isfinite()), f"{what}: other elements are finite"
    finite = a.isfinite()
    scale = b[finite].abs().max() if finite.any() else 1.0
    torch.testing.assert_close(a[finite], b[finite], rtol=3e-2, atol=1e-2 * max(1.0, float(scale)), msg=lambda m: f"{what}: {m}")
    if exact:
        assert torch.equal(a.isnan(), b.isnan()), f"{what}: other elements are NaN"
        assert torch.equal(a[a.isinf()], b[b.isinf()]), f"{what}: other infinities"
        zeros = (a == 0) & (b == 0) & signs
        assert torch.equal(a.signbit()[zeros], b.signbit()[zeros]), f"{what}: another zero's sign"


@needs_triton
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", [*NAMES, *CLAMPED, *PLAIN])
def test_formula_and_kernels_agree(name, values):
    """Each value in the first input, and in each other one two of them."""
    sample = {**CLAMPED, **PLAIN}.get(name)
    subject = Subject(OPS[name.partition(":")[0]], None, DEVICE, sample) if sample else subjects("torch", DEVICE)[name]
    if name.endswith("gelu_exact") and values == "inf" and torch.nn.functional.gelu(torch.full((16,), math.inf)).isnan().any():
        pytest.skip("PyTorch's gelu of infinity is NaN on this CPU")
    tensors = subject.tensors(BF16)
    for at, t in enumerate(tensors):
        if not t.is_floating_point() or (at and (at + [*VALUES].index(values)) % 2):
            continue
        changed = [each.detach().clone().requires_grad_(each.requires_grad) for each in tensors]
        with torch.no_grad():
            flat = changed[at].view(-1)
            for i, value in enumerate(VALUES[values]):
                flat[(i + 1) * flat.numel() // 3] = value
        found, expected = (results(subject, backend, changed) for backend in ("triton", "torch"))
        for each in found:
            exact = each.startswith("output")
            signs = name != "rope: normed" or "inf" not in values  # a norm makes zeros of a row with an infinity
            same(found[each], expected[each], f"{each} with {values} in {subject.names()[at]}", exact=exact, signs=signs)


@pytest.mark.parametrize(("values", "column"), (("inf", 3), ("-inf", 70), ("nan", 100)), ids=("q", "k", "v"))
@pytest.mark.parametrize("backend", (pytest.param("triton", marks=needs_triton), "torch"))
def test_attention_leaves_other_sequences_alone(backend, values, column):
    subject = subjects(backend, DEVICE)["attention"]
    (qkv,) = subject.tensors(BF16)
    changed = qkv.detach().clone().requires_grad_()
    with torch.no_grad():
        changed[1, 20, column] = VALUES[values][0]
    expected = results(subject, backend, [qkv])
    for name, found in results(subject, backend, [changed]).items():
        assert torch.equal(found[::2], expected[name][::2]), name
        assert not found[1].isfinite().all() or backend == "torch", name
