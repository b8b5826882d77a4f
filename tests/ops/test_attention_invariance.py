"""Under batch_invariant() a document's attention, and the gradient of its part of qkv, depend on that document alone."""

import importlib

import pytest
import torch
from ops.calls import backends
from ops.mutants import copy_package, mutate
from ops.oracle import BF16, DEVICE, FP32
from ops.packing_ways import check_ways

import onepass
from onepass.ops.attention import formula
from onepass.ops.attention.backward import backward_tiles

module = importlib.import_module("onepass.ops.attention.attention")
LENGTHS = (1, 7, 64, 70)
HEADS, GROUPS, D = 4, 2, 16


def documents(columns, dtype, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(length, columns, generator=generator).to(DEVICE, dtype)] for length in lengths]


def tables(R=8):
    angles = torch.rand(256, R // 2, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 6
    return angles.cos(), angles.sin()


def check(op=onepass.attention, lengths=LENGTHS, dtype=BF16, padded=True, R=8, switch=onepass.batch_invariant, **options):
    cos, sin = tables(R)
    gated = options.get("gated", False)
    columns = (HEADS * (1 + gated) + 2 * GROUPS) * D

    def call(qkv, boundaries):
        longest = cos.shape[0] if boundaries is not None else qkv.shape[1]
        given = {"cos": cos[:longest], "sin": sin[:longest]} if R else {}
        return op(qkv, HEADS, GROUPS, cu_seqlens=boundaries, deterministic=False, **given, **options)

    check_ways(call, documents(columns, dtype, lengths), documents(HEADS * D, dtype, lengths), padded, switch)


OPTIONS = [
    {},
    {"R": 0, "window": 5},
    {"window": 80, "by_group": True},  # longer than some documents, and than some batches
    {"softcap": 2.0, "window": 66},
    {"sinks": True, "gated": True},
    {"norm": True, "interleaved": True},
    {"causal": False, "padded": False},
    {"causal": False, "window": (3, 65), "padded": False},
]


@backends
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "plain")
def test_a_document_has_the_bits_that_it_has_alone(backend, options):
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 2, HEADS, device=DEVICE)
    if options.pop("norm", False):
        options |= {"q_weight": torch.linspace(0.5, 2, D, device=DEVICE), "k_weight": torch.linspace(2, 1, D, device=DEVICE)}
    if backend == "torch" and DEVICE == "cuda":
        pytest.skip("no host reads where documents begin there")
    check(backend=backend, **options)


@backends
def test_latent_attention(backend):
    if backend == "torch" and DEVICE == "cuda":
        pytest.skip("no host reads where documents begin there")
    nope, rope, V, (cos, sin) = 24, 8, 16, tables()

    def call(x, boundaries):
        q, kv, k_rope = x.split((HEADS * (nope + rope), HEADS * (nope + V), rope), -1)
        q, kv = (t.unflatten(-1, (HEADS, -1)) for t in (q, kv))
        longest = cos.shape[0] if boundaries is not None else x.shape[1]
        given = {"cos": cos[:longest], "sin": sin[:longest], "cu_seqlens": boundaries, "deterministic": False}
        return onepass.latent_attention(q, kv, k_rope, **given, backend=backend).flatten(2)

    columns = HEADS * (2 * nope + rope + V) + rope
    check_ways(call, documents(columns, BF16), documents(HEADS * V, BF16))


def test_wide_types_are_the_formulas():
    if DEVICE == "cuda":
        pytest.skip("no host reads where documents begin there")
    check(dtype=FP32)
    check(dtype=torch.float64, window=66, lengths=(5, 70))


@pytest.mark.parametrize("options", ({}, {"window": 9}, {"softcap": 2.0}, {"causal": False, "window": (4, 3)}, {"causal": False}))
@pytest.mark.parametrize("sinks", (False, True))
def test_tiles_compute_attention(options, sinks):
    qkv = torch.randn(2, 131, (HEADS + 2 * GROUPS) * D, dtype=torch.float64, device=DEVICE, requires_grad=True)
    sink = torch.randn(HEADS, dtype=torch.float64, device=DEVICE, requires_grad=True)
    given = {"sinks": sink, **options} if sinks else options
    leaves = [qkv, sink] if sinks else [qkv]

    def results():
        y = onepass.attention(qkv * 1, HEADS, GROUPS, **given, backend="torch")
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    expected = results()
    with onepass.batch_invariant():
        found = results()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_nan_stays_in_its_document():
    qkv = torch.randn(1, 90, (HEADS + 2 * GROUPS) * D)
    qkv[0, 10:80] = torch.nan
    bounds = torch.tensor([0, 10, 80, 90], dtype=torch.int32)
    with onepass.batch_invariant():
        y = onepass.attention(qkv, HEADS, GROUPS, cu_seqlens=bounds, backend="torch")
    assert y[0, 10:80].isnan().all() and y[0, :10].isfinite().all() and y[0, 80:].isfinite().all()


def test_ours_alone_run_whatever_is_faster(monkeypatch):
    choice = importlib.import_module("onepass.ops.attention.choice")
    for name in ("all_by_cudnn", "forward_by_cudnn", "backward_by_cudnn", "has_flash"):
        monkeypatch.setattr(choice, name, lambda *_: True)
    qkv = torch.empty(1, 8192, 6 * 128, dtype=BF16)
    options = module.make_options(module.AttentionCall(qkv, 2, 2), in_order=False)
    assert choice.pytorch_is_faster(qkv, 128, options) or choice.forward_kernels(qkv, 128, options) != choice.ONEPASS
    with onepass.batch_invariant():
        assert not choice.pytorch_is_faster(qkv, 128, options)
        assert choice.forward_kernels(qkv, 128, options) == choice.backward_kernels(qkv, 128, options) == choice.ONEPASS


def test_tiles_of_gradients_are_those_of_documents():
    for D, S in ((64, 4096), (64, 100), (128, 4096), (256, 77)):
        for smem in (160_000, 230_000):
            options = module.make_options(module.AttentionCall(torch.empty(1, S, 3 * D), 1, 1))
            of_documents = backward_tiles(D, S, options, True, smem)
            with onepass.batch_invariant():
                assert backward_tiles(D, S, options, False, smem) == of_documents


@pytest.mark.parametrize("name", ("cudnn", "flash_attn", "varlen_attn"))
def test_kernels_of_others_refuse_by_name(monkeypatch, name):
    backends = importlib.import_module("onepass.integrations.attention_backends")
    monkeypatch.setattr(backends, "_on_gpu", lambda _: True)
    qkv = torch.zeros(1, 8, 6 * 64, dtype=BF16)
    with onepass.batch_invariant(), pytest.raises(RuntimeError, match=rf"batch_invariant.*{name}"):
        onepass.attention(qkv, 2, 2, backend=name, deterministic=False)


# ---- mutants ----


def check_copy(copy):
    check(copy.attention, switch=lambda: copy.invariant.__globals__["INVARIANT"].change(True), backend="torch", dtype=FP32)


def test_a_copy_keeps_the_promise():
    check_copy(copy_package(module))


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("_by_document", "if invariant() and parts[0].numel():", "if False:"),
        ("attend_by_tiles", "documents_in_turn(cu_seqlens, S,", "documents_in_turn(None, S,"),
    ],
)
def test_without_tiles_of_documents_bits_differ(function, old, new):
    with pytest.raises(AssertionError, match="differs"):
        check_copy(mutate(formula, function, old, new, entry=module))


def test_a_window_knows_no_longest_row():
    def options(S):
        call = module.AttentionCall(torch.empty(1, S, 3 * D), 1, 1, window=40)
        return module.make_options(call)

    assert options(20) != options(400)
    with onepass.batch_invariant():
        assert options(20) == options(400)
