"""Attention of documents that follow each other, with windows, softcaps and sinks, and what is not causal."""

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.attention_oracle import Case, judge_case, packed
from ops.calls import backends, equal, gradients, needs_triton, relative
from ops.oracle import BF16, DEVICE, FP16, FP64
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


@needs_triton
@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_any_documents_windows_caps_and_sinks(data):
    """By the kernels, in small tiles; `test_attention` has the cases that mutants must fail, by both backends."""
    pick = data.draw
    causal, groups = pick(st.booleans()), pick(st.integers(1, 2))
    side = st.one_of(st.none(), st.integers(0, 70))
    window = pick(st.one_of(st.none(), st.integers(1, 90))) if causal else pick(st.one_of(st.none(), st.tuples(side, side)))
    options = {
        "heads": groups * pick(st.integers(1, 2)), "groups": groups, "D": pick(st.sampled_from((16, 32, 80))),
        "R": pick(st.sampled_from((0, 8, 16))), "dtype": pick(st.sampled_from((BF16, FP16))), "causal": causal, "window": window,
        "softcap": pick(st.sampled_from((None, None, 3.0))), "sinks": pick(st.booleans()), "overwrite": pick(st.booleans()),
        "each": pick(st.booleans()), "small": True,
    }  # fmt: skip
    if pick(st.booleans()):
        lengths = pick(st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(lambda found: sum(found) > 1))
        case = packed(lengths, **options)
    else:
        case = Case(pick(st.integers(1, 2)), pick(st.integers(2, 90)), **options)
    report = judge_case(module, case)
    assert report, f"{case}\n{report}"


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
    if backend == "torch" and DEVICE == "cuda":
        pytest.skip("by a mask, as no host reads the boundaries there")
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


@needs_triton
@pytest.mark.parametrize("wrong", ([1, 50], [0, 49], [0, 30, 20, 50], [0, -3, 50], [0, 99, 50], [0, 50, 2_000_000_000]), ids=str)
def test_wrong_boundaries_that_nobody_reads_are_nan(wrong, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr("onepass.runtime.documents.are_readable", lambda cu_seqlens: False)
    qkv, tables, sinks = tensors()
    at = torch.tensor(wrong, dtype=torch.int32, device=DEVICE)
    for more in ({}, {"sinks": sinks, "window": 5}, {"causal": False}):
        call = lambda x, m=more: onepass.attention(x * 1, HEADS, GROUPS, cu_seqlens=at, **m, backend="triton")  # noqa: E731
        y, dqkv = gradients(call, [qkv])
        assert y.isnan().all() and dqkv.isnan().any()
    q, k = torch.randn(2, 1, T, 2, 8, device=DEVICE)
    assert all(x.isnan().all() for x in onepass.rope(q, k, **tables, cu_seqlens=at))


@needs_triton
def test_launches_of_documents(kernels_launched):
    qkv, tables, sinks = tensors()
    call = lambda x, sinks: onepass.attention(  # noqa: E731
        x * 1, HEADS, GROUPS, **tables, cu_seqlens=boundaries(), sinks=sinks, backend="triton"
    )
    gradients(call, (qkv, sinks))
    backward = ["_document_tiles_kernel", "_dq_kernel", "_dk_dv_kernel"]
    attended = ["_rope_kernel", "_document_tiles_kernel", "_attend_kernel"]
    assert kernels_launched[-8:] == [*attended, *backward, "_dsinks_kernel", "_rope_kernel"]
    kernels_launched.clear()
    gradients(call, (qkv.detach(), sinks))  # what is frozen costs nothing
    assert kernels_launched[-6:] == [*attended, "_document_tiles_kernel", "_dq_kernel", "_dsinks_kernel"]


@needs_triton
def test_a_frozen_projection_leaves_the_sinks_gradient_as_it_is():
    qkv, _, sinks = tensors()
    for more in ({}, {"cu_seqlens": boundaries()}):
        call = lambda x, s, m=more: onepass.attention(x, HEADS, GROUPS, sinks=s, **m, backend="triton")  # noqa: E731
        assert torch.equal(gradients(call, (qkv, sinks))[2], gradients(call, (qkv.detach(), sinks))[1])


@backends
def test_one_document_is_a_sequence(backend):
    qkv, _, _ = tensors()
    whole = torch.tensor([0, T], dtype=torch.int32, device=DEVICE)
    for more in ({}, {"window": 9}, {"causal": False}):
        call = lambda x, at, m=more: onepass.attention(x * 1, HEADS, GROUPS, cu_seqlens=at, **m, backend=backend)  # noqa: E731
        assert equal(*(gradients(lambda x, at=at, f=call: f(x, at), [qkv]) for at in (whole, None)))


@backends
@pytest.mark.parametrize("documents", (0, 1, 2))
def test_of_no_tokens_every_parameter_gets_zeros(backend, documents):
    qkv, tables, sinks = tensors(longest=0)
    given = [qkv[:, :0], sinks, *(torch.ones(D, device=DEVICE, requires_grad=True) for _ in range(2))]
    tables |= {"cu_seqlens": torch.zeros(1 + documents, dtype=torch.int32, device=DEVICE)} if documents else {}

    def call(qkv, sinks, q_weight, k_weight):
        norm = {"q_weight": q_weight, "k_weight": k_weight}
        return onepass.attention(qkv, HEADS, GROUPS, sinks=sinks, **norm, **tables, backend=backend)

    y, *grads = gradients(call, given)
    assert y.shape == (1, 0, HEADS * D) and not any(grad.any() for grad in grads)


@backends
def test_a_window_as_long_as_the_tokens_is_none(backend):
    qkv, _, _ = tensors()
    call = lambda x, window: onepass.attention(x, HEADS, GROUPS, window=window, backend=backend)  # noqa: E731
    assert equal(*(gradients(lambda x, w=window: call(x, w), [qkv]) for window in (T, None)))


@needs_triton
def test_compiled_documents_are_the_same():
    qkv, tables, sinks = tensors()
    call = lambda x, s, at: onepass.attention(  # noqa: E731
        x * 1, HEADS, GROUPS, **tables, cu_seqlens=at, sinks=s, window=8, softcap=3.0, backend="triton"
    )
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for at in (boundaries(), torch.tensor([0, 11, 30, T], dtype=torch.int32, device=DEVICE)):
        results = [gradients(lambda x, s, f=f, at=at: f(x, s, at), (qkv, sinks)) for f in (call, compiled)]
        assert equal(*results)


@needs_triton
def test_what_the_kernels_can_not_take_is_named():
    row = torch.zeros(1, 8, 3 * 48, device=DEVICE, dtype=BF16)
    reason = onepass.explain("attention", row, 1, 1).reasons["triton"]
    assert reason == "heads of 48 are none of 16, 32, 64, 80, 96, 128, 192, 256, 512, which the kernels take; torch takes any"
    many = torch.zeros(1 << 15, dtype=torch.int32, device=DEVICE)
    with onepass.validate(False):
        many[-1] = 8
        said = onepass.explain("attention", torch.zeros(1, 8, 48, device=DEVICE, dtype=BF16), 1, 1, cu_seqlens=many)
    assert said.backend == "triton" and "documents' tiles listed" in said.variant


@backends
def test_sinks_and_boundaries_of_any_strides(backend):
    qkv, _, sinks = tensors()
    call = lambda x, s, at: onepass.attention(x * 1, HEADS, GROUPS, sinks=s, cu_seqlens=at, backend=backend)  # noqa: E731
    apart = lambda x: torch.stack([x, x + 1], -1)[..., 0]  # noqa: E731
    one = gradients(lambda x, s: call(x, s, boundaries()), (qkv, sinks))
    other = gradients(lambda x, s: call(x, apart(s), apart(boundaries())), (qkv, sinks))
    assert equal(one, other)
