"""Under `batch_invariant()` rows have the same bits among 1 to 8192 rows of real sizes: results and gradients, also as views."""

from functools import partial

import pytest
import torch
from gpu.calls import memory_goes_back

import onepass
from onepass.ops.routing.logits import router_logits
from onepass.runtime.op import OPS
from onepass.testing.row_contract import as_bits, check_rows, parts_of, row_call

__all__ = ["memory_goes_back"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16, FP32 = torch.bfloat16, torch.float32
SIZES = (1, 2, 3, 7, 16, 17, 64, 100, 129, 500, 1000, 4096)
ROWS = 8192
types = pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))


def numbers(*shape, dtype=BF16, scale=1.0, grad=True):
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).mul_(scale).to(dtype).requires_grad_(grad)


def check(op, *args, rows=ROWS, **options):
    """Compare parts of the call's rows with all of them."""
    call = row_call(OPS[op], vars(OPS[op].call(*args, **options)), backend=options.get("backend"))
    check_rows(call, parts_of(rows, [size for size in SIZES if size < rows]))


def weight(N, K, dtype):
    return numbers(N, K, dtype=dtype, scale=K**-0.5)


# ---- rows ----


@types
@pytest.mark.parametrize("how", ("plain", "residual", "efficient", "frozen"))
@pytest.mark.parametrize("H", (896, 2048, 4096, 5000, 777, 16384))
@pytest.mark.parametrize("norm", ("rms_norm", "layer_norm"))
def test_norms(norm, H, how, dtype):
    x, w, rows = numbers(ROWS, H, dtype=dtype), numbers(H, dtype=dtype), ROWS
    options = {"residual": numbers(ROWS, H, dtype=dtype, scale=2)} if how == "residual" else {}
    options |= {"memory_efficient": True} if how == "efficient" else {}
    options |= {"bias": numbers(H, dtype=dtype)} if norm == "layer_norm" else {}
    check(norm, x, w.detach() if how == "frozen" else w, rows=rows, **options)


@types
def test_norms_of_heads_of_a_projection(dtype):
    """Rows lie in groups."""
    qkv = numbers(2048, 48, 128, dtype=dtype, grad=False)
    check("rms_norm", qkv[:, 8:40].requires_grad_(), numbers(128, dtype=dtype), rows=2048)


@types
@pytest.mark.parametrize(("H", "groups"), ((128, None), (2048, None), (4096, 512)))
def test_gated_norms(H, groups, dtype):
    x, z = numbers(ROWS, H, dtype=dtype), numbers(ROWS, H, dtype=dtype)
    check("gated_rms_norm", x, z, numbers(H, dtype=dtype), group_size=groups)


@types
@pytest.mark.parametrize("activation", ("swiglu", "gelu", "silu"))
def test_activations(activation, dtype):
    for W in (2 * 5632, 2 * 777):
        token_weight = numbers(ROWS, 1, dtype=dtype)
        check("bias_activation", numbers(ROWS, W, dtype=dtype), numbers(W, dtype=dtype), activation, token_weight=token_weight)
    check("bias_activation", numbers(ROWS, 4096, dtype=dtype), None, activation, save="fp8")


@types
def test_dropout_add_without_dropout(dtype):
    x, residual = numbers(ROWS, 2048, dtype=dtype), numbers(ROWS, 2048, dtype=dtype)
    check("dropout_add", x, residual, 0.0, bias=numbers(2048, dtype=dtype))


@types
def test_softmax(dtype):
    check("softmax", numbers(ROWS, 2048, dtype=dtype))
    check("softmax", numbers(ROWS, 777, dtype=dtype))
    check("softmax", numbers(512, 64, 128, dtype=dtype), causal=True, rows=512)


@types
def test_embedding(dtype):
    ids = torch.randint(32000, (ROWS,), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    check("embedding", ids, numbers(32000, 2048, dtype=dtype))


@types
@pytest.mark.parametrize("normed", (False, True))
def test_rope(normed, dtype):
    q, k = numbers(256, 32, 16, 128, dtype=dtype), numbers(256, 32, 4, 128, dtype=dtype)
    angles = numbers(32, 64, dtype=FP32, grad=False)
    weights = {"q_weight": numbers(128, dtype=dtype), "k_weight": numbers(128, dtype=dtype)} if normed else {}
    check("rope", q, k, angles.cos(), angles.sin(), rows=256, **weights)


# ---- products ----


@types
@pytest.mark.parametrize(("K", "N"), ((2048, 3072), (8192, 2048), (896, 4864), (4096, 6144)))
def test_linear(K, N, dtype):
    check("linear", numbers(ROWS, K, dtype=dtype), weight(N, K, dtype), numbers(N, dtype=dtype))


def lora(N, K, dtype, rank=16):
    return onepass.LoRA(weight(rank, K, dtype), numbers(N, rank, dtype=dtype, scale=0.1), 2.0)


@types
@pytest.mark.parametrize("adapted", (False, True), ids=("", "lora"))
def test_layers(adapted, dtype):
    added = {"lora": lora(3072, 2048, dtype)} if adapted else {}
    x, z = numbers(ROWS, 2048, dtype=dtype), numbers(ROWS, 2048, dtype=dtype)
    w, v = weight(3072, 2048, dtype), numbers(2048, dtype=dtype)
    check("linear", x, w, **added)
    check("norm_linear", x, v, w, **added)
    check("activation_linear", numbers(ROWS, 4096, dtype=dtype), w, None, "swiglu", **added)
    check("gated_norm_linear", x, z, v[:128].detach(), w, group_size=128, **added)


@types
def test_adapters_of_documents(dtype):
    """Documents are the rows: alone, with others before and after, in documents of other lengths."""
    K, N, lengths = 2048, 3072, (1, 700, 3, 2048, 64, 5)
    x, w, a = numbers(sum(lengths), K, dtype=dtype), weight(N, K, dtype), numbers(len(lengths), 16, K, dtype=dtype, scale=0.02)
    b, dy = numbers(len(lengths), N, 16, dtype=dtype, scale=0.1), numbers(sum(lengths), N, dtype=dtype, grad=False)

    def run(rows, documents):
        ends = torch.tensor([lengths[d] for d in documents], device="cuda").cumsum(0)
        own = x.detach()[rows].requires_grad_()
        y = onepass.lora_linear(own, w, a.detach()[documents], b.detach()[documents], ends=ends, scale=0.5)
        return y.detach(), *torch.autograd.grad(y, own, dy[rows])

    starts = [sum(lengths[:d]) for d in range(len(lengths))]
    with onepass.batch_invariant():
        whole = run(slice(None), list(range(len(lengths))))
        for documents in ([0], [1], [3], [4, 2], [5, 3, 0]):
            rows = torch.cat([torch.arange(starts[d], starts[d] + lengths[d]) for d in documents]).cuda()
            for mine, theirs in zip(run(rows, documents), whole, strict=True):
                assert torch.equal(as_bits(mine), as_bits(theirs[rows]))


@types
def test_router_logits(dtype):
    x, w, dy = numbers(ROWS, 2048, dtype=dtype), weight(128, 2048, FP32), numbers(ROWS, 128, dtype=FP32, grad=False)

    def run(rows):
        own = x.detach()[rows].requires_grad_()
        y = router_logits(own, w)
        return y.detach(), *torch.autograd.grad(y, own, dy[rows])

    with onepass.batch_invariant():
        whole = run(slice(None))
        for rows in parts_of(ROWS, SIZES):
            for mine, theirs in zip(run(rows.cuda()), whole, strict=True):
                assert torch.equal(as_bits(mine), as_bits(theirs[rows.cuda()])), len(rows)


@types
@pytest.mark.parametrize("options", ({}, {"score": "sigmoid", "groups": (8, 4), "scale": 2.5}), ids=("softmax", "sigmoid"))
def test_route(options, dtype):
    check("route", numbers(ROWS, 128, dtype=dtype), 8, **options)


GPT_OSS = {"activation": "quick_geglu", "clamp": 7.0, "linear_offset": 1.0, "interleaved": True, "transposed": True}
EXPERTS = {  # hidden and inner size, experts, of a token, options
    "qwen": (2048, 768, 128, 8, {}), "mixtral": (1024, 3584, 8, 2, {}), "gpt-oss": (2880, 2880, 32, 4, GPT_OSS),
    "fp8": (1024, 4096, 8, 2, {"precision": onepass.FP8Recipe(scaling="row", format="e4m3")}),
}  # fmt: skip


@pytest.mark.parametrize("adapted", (False, True), ids=("", "lora"))
@pytest.mark.parametrize(("size", "dtype"), [*((size, BF16) for size in EXPERTS), ("mixtral", FP32)], ids=str)
def test_experts(size, dtype, adapted):
    H, inner, E, k, options = EXPERTS[size]
    rows = 256 if dtype is FP32 else 4096
    swapped = "transposed" in options
    up = numbers(E, *((H, 2 * inner) if swapped else (2 * inner, H)), dtype=dtype, scale=H**-0.5)
    down = numbers(E, *((inner, H) if swapped else (H, inner)), dtype=dtype, scale=inner**-0.5)
    weights, chosen = numbers(rows, E, dtype=FP32, grad=False).softmax(-1).topk(k)
    if swapped:
        options = options | {"up_bias": numbers(E, 2 * inner, dtype=dtype), "down_bias": numbers(E, H, dtype=dtype)}
    if adapted:
        of_up = onepass.LoRA(numbers(E, 16, H, dtype=dtype, scale=0.02), numbers(E, 2 * inner, 16, dtype=dtype, scale=0.1))
        of_down = onepass.LoRA(numbers(E, 16, inner, dtype=dtype, scale=0.02), numbers(E, H, 16, dtype=dtype, scale=0.1))
        options = options | {"lora": (of_up, of_down)}
    check("experts", numbers(rows, H, dtype=dtype), up, down, chosen, weights.requires_grad_(), rows=rows, **options)


@pytest.mark.parametrize("adapted", (False, True), ids=("", "lora"))
def test_eight_bits_by_row(adapted):
    how = {"precision": onepass.FP8Recipe(scaling="row")} | ({"lora": lora(3072, 2048, BF16)} if adapted else {})
    x, w = numbers(ROWS, 2048), weight(3072, 2048, BF16)
    check("linear", x, w, numbers(3072), **how)
    check("norm_linear", x, numbers(2048), w, **how)
    check("activation_linear", numbers(ROWS, 4096), w, None, "swiglu", **how)


# ---- losses ----


@types
@pytest.mark.parametrize("V", (32000, 50257))
def test_cross_entropy(V, dtype):
    logits, labels = numbers(2048, V, dtype=dtype), torch.randint(V, (2048,), device="cuda")
    check("cross_entropy", logits, labels, rows=2048, return_stats=True, z_loss=1e-4)
    check("cross_entropy", logits, labels, rows=2048, label_smoothing=0.1, weight=numbers(V, dtype=FP32, grad=False).abs())


HEADS = {
    "llama": (2048, 32000, {"return_stats": True}),
    "qwen": (896, 151936, {"temperature": 0.7, "return_stats": ("log_prob", "entropy")}),
    "bias": (2048, 50257, {"bias": True, "softcap": 30.0, "label_smoothing": 0.1}),
    "wide": (2048, 32000, {"logits_dtype": FP32, "z_loss": 1e-4}),
    "lora": (2048, 32000, {"lora": True, "return_stats": True}),
}


def head(size, dtype, rows):
    D, V, options = HEADS[size]
    hidden, w = numbers(rows, D, dtype=dtype), weight(V, D, dtype)
    labels = torch.randint(V, (rows,), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    labels[::7] = -100
    options = options | ({"bias": numbers(V, dtype=dtype)} if "bias" in options else {})
    return (hidden, w, labels), options | ({"lora": lora(V, D, dtype)} if "lora" in options else {})


@types
@pytest.mark.parametrize("size", HEADS)
def test_linear_cross_entropy(size, dtype):
    rows = 1024 if dtype is FP32 else 4096
    args, options = head(size, dtype, rows)
    check("linear_cross_entropy", *args, rows=rows, **options)


@pytest.mark.parametrize("reduction", ("none", "sum"))
@pytest.mark.parametrize("size", HEADS)
def test_a_head_in_chunks(size, reduction):
    """Any chunk_bytes, rows that are kept, and a call without gradients: the bits of all at once."""
    (hidden, w, labels), options = head(size, BF16, 2048)
    options["reduction"] = reduction

    def run(**more):
        found = onepass.linear_cross_entropy(hidden, w, labels, **options, **more)
        loss, *stats = found if isinstance(found, tuple) else (found,)
        (gradient,) = torch.autograd.grad(loss.sum(), hidden) if loss.requires_grad else (None,)
        return ([] if loss.dim() == 0 else [loss]) + [s for s in (stats[0] if stats else ()) if s is not None], gradient

    with onepass.batch_invariant():
        rows, gradient = run()
        runs = [run(chunk_bytes=1 << 20), run(chunk_bytes=200 << 20), run(chunk_bytes=4 << 30)]
        runs += [] if "lora" in options or reduction == "none" else [run(rows=onepass.kept_rows(labels))]
        with torch.no_grad():
            runs += [run(), run(chunk_bytes=1 << 20)]
    for others, other in runs:
        for mine, theirs in zip(others, rows, strict=True):
            kept = labels != -100
            assert torch.equal(as_bits(mine[kept]), as_bits(theirs[kept]))
        assert other is None or torch.equal(as_bits(other), as_bits(gradient))


@types
@pytest.mark.parametrize("kind", ("forward_kl", "reverse_kl", "jsd"))
def test_linear_divergence(kind, dtype):
    rows = 512 if dtype is FP32 else 2048
    student, teacher = numbers(rows, 2048, dtype=dtype), numbers(rows, 4096, dtype=dtype, grad=False)
    given = student, weight(32000, 2048, dtype), teacher, weight(32000, 4096, dtype).detach()
    check("linear_divergence", *given, kind=kind, temperature=0.7, rows=rows)
    with onepass.batch_invariant():
        step = partial(onepass.linear_divergence, *given, kind=kind, reduction="none")
        runs = [(y := step(chunk_bytes=size), torch.autograd.grad(y.sum(), given[0])[0]) for size in (None, 1 << 20, 4 << 30)]
    for losses, gradient in runs[1:]:
        assert torch.equal(losses, runs[0][0]) and torch.equal(gradient, runs[0][1])


# ---- what can't ----


def test_what_mixes_rows_raises():
    x, w = numbers(64, 2048), weight(2048, 2048, BF16)
    with onepass.batch_invariant():
        for scaling in ("delayed", "current"):
            with pytest.raises(RuntimeError, match=f"{scaling} scales can't run under onepass.batch_invariant"):
                onepass.linear(x, w, precision=onepass.FP8Recipe(scaling=scaling))
        with pytest.raises(RuntimeError, match="PyTorch's formula on a GPU can't run"):
            onepass.rms_norm(x.double(), None)
