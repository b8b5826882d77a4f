"""Attention of documents that follow each other, with windows, softcaps and sinks, and what is not causal."""

import importlib
import math

import pytest
import torch
from ops.attention_oracle import BF16, DEVICE, FP64
from ops.calls import backends, equal, gradients, relative
from ops.packed_oracle import packed_attention

import onepass

module = importlib.import_module("onepass.ops.attention.attention")

HEADS, GROUPS, D, T = 4, 2, 16, 50
LENGTHS = (7, 0, 20, 1, 22)
BOUNDARIES = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def tensors(dtype=BF16, R=8, longest=22):
    qkv = torch.randn(1, T, (HEADS + 2 * GROUPS) * D, device=DEVICE).to(dtype).requires_grad_()
    angles = torch.randn(longest, R // 2, device=DEVICE, dtype=torch.float64 if dtype == FP64 else torch.float32)
    sinks = torch.randn(HEADS, device=DEVICE, dtype=angles.dtype).requires_grad_()
    return qkv, {"cos": angles.cos(), "sin": angles.sin()}, sinks


def boundaries():
    return BOUNDARIES.to(DEVICE)


OPTIONS = [
    {"cu_seqlens": True},
    {"cu_seqlens": True, "tables": True},
    {"cu_seqlens": True, "tables": True, "interleaved": True, "causal": False},
    {"window": 5},
    {"window": 1},
    {"cu_seqlens": True, "window": 4, "tables": True},
    {"causal": False},
    {"causal": False, "window": (3, 2)},
    {"causal": False, "window": (None, 4), "cu_seqlens": True},
    {"causal": False, "window": (0, None)},
    {"softcap": 0.7},
    {"softcap": 2.0, "cu_seqlens": True, "window": 6, "scale": 0.9},
    {"sinks": True},
    {"sinks": True, "softcap": 1.5, "cu_seqlens": True, "window": 9, "tables": True},
    {"sinks": True, "causal": False, "cu_seqlens": True, "window": (4, 5)},
]


def label(options):
    return "-".join(name if value is True else f"{name}={value}" for name, value in options.items())


def call_of(options, tables, sinks):
    """The keywords of a call, the sinks apart."""
    given = {name: value for name, value in options.items() if name not in ("cu_seqlens", "tables", "sinks")}
    given |= {"cu_seqlens": boundaries()} if "cu_seqlens" in options else {}
    return given | (tables if "tables" in options else {}), [sinks] if "sinks" in options else []


@pytest.mark.parametrize("options", OPTIONS, ids=label)
@pytest.mark.parametrize("which", ("reference", "torch"))
def test_the_formula_is_what_is_meant(which, options):
    qkv, tables, sinks = tensors(FP64)
    given, more = call_of(options, tables, sinks)
    if which == "reference":
        op = module.attention_reference
    else:
        op = lambda x, *heads, **how: onepass.attention(x * 1, *heads, **how, overwrite=True, backend="torch")  # noqa: E731
    results = []
    for function in (op, packed_attention):
        y = function(qkv, HEADS, GROUPS, **given, **({"sinks": sinks} if more else {}))
        results.append([y, *torch.autograd.grad(y.square().sum(), [qkv, *more])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# ---- documents ----


@pytest.mark.parametrize("R", (4, 16))
def test_rope_looks_up_positions_within_the_document(R):
    q, k = (torch.randn(1, T, heads, D, device=DEVICE) for heads in (4, 2))
    _, tables, _ = tensors(R=R)
    found = onepass.rope(q, k, **tables, cu_seqlens=boundaries())
    for first, end in zip(BOUNDARIES.tolist(), BOUNDARIES.tolist()[1:], strict=False):
        each = {name: table[: end - first] for name, table in tables.items()}
        alone = onepass.rope(q[:, first:end], k[:, first:end], **each)
        assert equal([x[:, first:end] for x in found], alone)


def test_rope_takes_tables_of_all_tokens_as_they_are():
    q, k = (torch.randn(1, T, heads, D, device=DEVICE) for heads in (4, 2))
    angles = torch.randn(1, T, 3, device=DEVICE)
    tables = angles.cos(), angles.sin()
    assert equal(onepass.rope(q, k, *tables, cu_seqlens=boundaries()), onepass.rope(q, k, *tables))


@backends
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_a_document_has_the_bits_it_has_alone_whatever_its_neighbours_hold(value, backend):
    qkv, tables, _ = tensors()
    given = {**tables, "window": 6, "backend": backend}
    with torch.no_grad():
        qkv[:, 7:27] = value
    call = lambda x, at: onepass.attention(x * 1, HEADS, GROUPS, **given, cu_seqlens=at)  # noqa: E731
    y, dqkv = gradients(lambda x: call(x, boundaries()), [qkv])
    dy = torch.linspace(-1, 2, y.numel(), device=DEVICE).view(y.shape).to(y.dtype)
    for first, end in ((0, 7), (27, 28), (28, 50)):
        alone = qkv[:, first:end].detach().requires_grad_()
        one = call(alone, torch.tensor([0, end - first], dtype=torch.int32, device=DEVICE))
        assert torch.equal(one, y[:, first:end])
        assert torch.equal(torch.autograd.grad(one, alone, dy[:, first:end])[0], dqkv[:, first:end])


def test_documents_under_a_compiler_and_wrong_ones():
    """Nobody reads the boundaries there: what is wrong becomes NaN."""
    qkv, tables, sinks = tensors()
    for more in ({}, {"sinks": sinks, "softcap": 2.0}):
        call = lambda x, at: onepass.attention(x * 1, HEADS, GROUPS, **tables, cu_seqlens=at, **more, backend="torch")  # noqa: B023, E731
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        plain, found = (gradients(lambda x, f=f: f(x, boundaries()), [qkv]) for f in (call, compiled))
        assert all(relative(a, b.double()) < 1e-2 for a, b in zip(found, plain, strict=True))
        for wrong in ([1, 50], [0, 49], [0, 30, 20, 50]):
            assert compiled(qkv, torch.tensor(wrong, dtype=torch.int32, device=DEVICE)).isnan().all()
