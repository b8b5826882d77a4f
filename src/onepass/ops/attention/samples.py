"""Sample calls of attention and rope."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.attention.attention import SIZES, attention, attention_reference
from onepass.ops.attention.document_kernels import checked_boundaries, make_nan
from onepass.ops.attention.formula import AttentionOptions
from onepass.ops.attention.latent_attention import latent_attention, latent_attention_reference
from onepass.ops.attention.next_token import attend_last
from onepass.ops.attention.rope import rope, rope_reference
from onepass.runtime.random_calls import BF16, FP16, FP32, FP64, Draw, RandomCall, RandomTensor
from onepass.runtime.samples import (
    CoveringCall,
    Sample,
    give_main_grad,
    meta,
    random_tensors,
)


def _documents(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return qkv of three documents, one of them empty; sinks; and boundaries."""
    qkv, sinks = random_tensors(((1, 37, (4 + 2 * 2) * 16), (4,)), device, dtype)
    return qkv, sinks, torch.tensor((0, 20, 20, 37), dtype=torch.int32, device=device)


def _normed(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k, both weights and tables that rotate a part of each head."""
    return random_tensors(((3, 7, 5, 22), (3, 7, 2, 22), (22,), (22,), (7, 9), (7, 9)), device, dtype)


def _latent_documents(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, kv, k_rope and tables by position, of three documents, one of them empty."""
    made = random_tensors(((1, 37, 1, 80), (1, 37, 1, 96), (1, 37, 16), (20, 8), (20, 8)), device, dtype)
    return *made, torch.tensor((0, 20, 20, 37), dtype=torch.int32, device=device)


SAMPLES = {
    "attention": Sample(
        partial(random_tensors, ((3, 37, (4 + 2 * 2) * 16),)),
        attention_reference,
        {"heads": 4, "groups": 2},
        dtype=torch.bfloat16,
        roundings=2.0,
    ),
    "attention: documents": Sample(
        _documents,
        attention_reference,
        {"heads": 4, "groups": 2, "window": 9, "softcap": 3.0},
        keywords=("sinks", "cu_seqlens"),
        frozen=1,
        dtype=torch.bfloat16,
        roundings=2.0,
    ),
    "attention: by group": Sample(
        partial(random_tensors, ((3, 37, (4 + 2 * 2) * 16),)),
        attention_reference,
        {"heads": 4, "groups": 2, "by_group": True},
        dtype=torch.bfloat16,
        roundings=2.0,
    ),
    "attention: gated": Sample(
        partial(random_tensors, ((3, 37, 2 * (4 + 2) * 16),)),
        attention_reference,
        {"heads": 4, "groups": 2, "gated": True},
        dtype=torch.bfloat16,
        roundings=2.0,
    ),
    "latent_attention": Sample(
        partial(random_tensors, ((2, 37, 5, 32), (2, 37, 5, 40), (2, 37, 8), (37, 4), (37, 4))),
        latent_attention_reference,
        {"scale": 0.2, "interleaved": True},
        keywords=("cos", "sin"),
        frozen=2,
        dtype=torch.bfloat16,
        roundings=2.0,
    ),
    "latent_attention: documents": Sample(
        _latent_documents,
        latent_attention_reference,
        keywords=("cos", "sin", "cu_seqlens"),
        frozen=3,
        dtype=torch.bfloat16,
        roundings=2.0,
    ),
    "rope": Sample(
        partial(random_tensors, ((3, 7, 5, 22), (3, 7, 2, 22), (7, 9), (7, 9))), rope_reference, {"interleaved": True}, frozen=2
    ),
    "rope: normed": Sample(
        _normed,
        rope_reference,
        {"zero_centered_gamma": True},
        keywords=("q_weight", "k_weight", "cos", "sin"),
        frozen=2,
    ),
}


def _table_shape(x: Tensor, given: dict[str, Any]) -> tuple[int, ...]:
    """A number a token and pair of a head's numbers."""
    heads, groups = given["heads"], given["groups"]
    every = heads * (1 + given.get("gated", False)) + 2 * (heads if groups is None else groups)
    return *x.shape[1:2], x.shape[-1] // max(1, every) // 2


def _latent_table(q: Tensor, given: dict[str, Any]) -> tuple[int, ...]:
    return *q.shape[1:2], given["k_rope"][-1] // 2


SHAPES_OF = {
    "attention": {"cos": _table_shape, "sin": _table_shape},
    "latent_attention": {"cos": _latent_table, "sin": _latent_table},
}


# ---- random calls ----


def _random_attention(draw: Draw) -> RandomCall:
    dtype = draw.choose((BF16, FP16, FP32, FP64), (8, 8, 2, 1))
    D = draw.choose((16, *SIZES[1:], 6), (8, *(1 for _ in SIZES[1:]), 1))
    heads, groups = draw.choose(((1, 1), (2, 1), (4, 2), (3, 3)))
    batch, tokens = draw.choose((1, 2, 0)), draw.choose((3, 1, 17, 64, 100, 0), (2, 2, 2, 1, 1, 1))
    gated = draw.flag(0.2)
    every = heads * (1 + gated) + 2 * groups
    tensors = {"qkv": RandomTensor((batch, tokens, every * D), dtype, "tame")}
    if draw.flag():
        tables = (*((batch,) if draw.flag(0.3) else ()), tokens, draw.choose((D // 2, 1)))
        tensors |= {name: RandomTensor(tables, draw.choose((FP32, dtype)), name) for name in ("cos", "sin")}
    options: dict[str, Any] = {"heads": heads, "groups": groups, "interleaved": draw.flag(), "scale": draw.choose((None, 0.5))}
    options |= {"causal": draw.flag(0.8), "softcap": draw.choose((None, 3.0), (3, 1))}
    sides = (None, 2, 5, 40) if options["causal"] else (None, (1, 3), (20, None))
    options["window"] = draw.choose(sides, (3, *(1 for _ in sides[1:])))
    if batch == 1 and draw.flag(0.3):
        tensors["cu_seqlens"] = RandomTensor((draw.choose((3, 2, 5)),), torch.int32, "boundaries", top=tokens)
    if "cos" in tensors and draw.flag(0.3):
        tensors |= {name: RandomTensor((D,), draw.beside(dtype), "tame", True) for name in ("q_weight", "k_weight")}
        options |= {"eps": draw.choose((1e-6, 1e-2)), "zero_centered_gamma": draw.flag()}
    if draw.flag(0.2):
        tensors["sinks"] = RandomTensor((heads,), draw.choose((FP32, dtype)), "tame")
    options |= {"by_group": draw.flag(0.2) and not gated, "gated": gated}
    written = ("qkv",) if draw.flag(0.2) else ()
    formula = partial(attention_reference, **options)
    # an infinity or NaN may turn any row of its sequence into NaN; the scores' gradient of a query that sees one key is rounding
    floors = dict.fromkeys(("dqkv", "dq_weight", "dk_weight"), 4e-5)
    return RandomCall(
        tensors, {**options, "overwrite": bool(written)}, formula, True, written=written, finite=True, floors=lambda _: floors
    )


def _random_latent(draw: Draw) -> RandomCall:
    dtype = draw.choose((BF16, FP16, FP32, FP64), (8, 8, 2, 1))
    width, V = draw.choose((16, 32, 80, 192, 6), (4, 4, 1, 1, 1)), draw.choose((16, 32, 128, 5), (4, 4, 1, 1))
    rope, heads = 2 * draw.choose((1, 2, (width - 1) // 2)), draw.choose((1, 2, 3, 5))
    batch, tokens = draw.choose((1, 2, 0)), draw.choose((3, 1, 17, 64, 100, 0), (2, 2, 2, 1, 1, 1))
    shapes = {"q": (heads, width), "kv": (heads, width - rope + V), "k_rope": (rope,)}
    tensors = {name: RandomTensor((batch, tokens, *shape), dtype, "tame") for name, shape in shapes.items()}
    if draw.flag():
        tables = (*((batch,) if draw.flag(0.3) else ()), tokens, rope // 2)
        tensors |= {name: RandomTensor(tables, draw.choose((FP32, dtype)), name) for name in ("cos", "sin")}
    if batch == 1 and draw.flag(0.3):
        tensors["cu_seqlens"] = RandomTensor((draw.choose((3, 2, 5)),), torch.int32, "boundaries", top=tokens)
    options: dict[str, Any] = {"interleaved": draw.flag(), "scale": draw.choose((None, 0.5))}
    floors = dict.fromkeys(("dq", "dkv", "dk_rope"), 4e-5)  # as attention's
    formula = partial(latent_attention_reference, **options)
    return RandomCall(tensors, options, formula, True, finite=True, floors=lambda _: floors)


def _random_rope(draw: Draw) -> RandomCall:
    dtype, D = draw.dtype(), draw.choose((8, 2, 3, 22, 64, 129))
    lead = tuple(size for size in draw.lead()[-2:]) or (1,)
    q, k = draw.choose(((2, 1), (1, 1), (5, 2), (3, 3)))
    tensors = {"q": RandomTensor((*lead, q, D), dtype), "k": RandomTensor((*lead, k, D), draw.beside(dtype))}
    tables = (*lead[: -1 if draw.flag(0.3) else 0], lead[-1], draw.choose((D // 2, 1)))
    tensors |= {name: RandomTensor(tables, draw.choose((FP32, dtype)), name) for name in ("cos", "sin")}
    options: dict[str, Any] = {"interleaved": draw.flag()}
    if draw.flag(0.4):
        tensors |= {name: RandomTensor((D,), draw.beside(dtype)) for name in ("q_weight", "k_weight")}
        options |= {"eps": draw.choose((1e-6, 1e-2)), "zero_centered_gamma": draw.flag()}
    return RandomCall(
        tensors, options, partial(rope_reference, **options), arithmetic=dict.fromkeys(("y1", "dk", "dk_weight"), "k")
    )


RANDOM_CALLS = {"attention": _random_attention, "latent_attention": _random_latent, "rope": _random_rope}

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    yield from _attention_calls()
    yield from _latent_calls()
    yield from _rope_calls()


_HEADS = (  # of q, of k, their width, and how much of it is rotated: grouped, alone, one k for all, odd and partly rotated ones
    (32, 8, 128, 128), (12, 12, 64, 64), (71, 1, 64, 64), (40, 40, 128, 128), (16, 16, 80, 32), (32, 32, 80, 80), (24, 8, 96, 96),
    (8, 4, 256, 256), (64, 8, 256, 64), (3, 1, 10, 6), (1, 1, 4096, 4096),
)  # fmt: skip

_NORMED_HEADS = (  # Qwen 3's, Gemma 3's, Qwen 3 Next's, and other widths
    (16, 8, 128, 128), (4, 1, 256, 256), (16, 2, 256, 64), (12, 12, 64, 64), (16, 16, 80, 32), (32, 32, 80, 80), (24, 8, 96, 96),
    (32, 8, 192, 192), (1, 1, 4096, 4096),
)  # fmt: skip


def _rope_calls() -> Iterator[CoveringCall]:
    """All heads, in halves and interleaved; types, tables and what is frozen at one of them."""
    for heads in _HEADS:
        for option in ("", "interleaved"):
            yield _rope_call(heads, option=option)
    for dtype in (torch.float16, torch.float32):
        for option in ("", "interleaved"):
            yield _rope_call(_HEADS[0], dtype, option)
    for option in ("bf16 tables", "frozen q", "frozen k"):
        yield _rope_call(_HEADS[0], option=option)
    for heads in _NORMED_HEADS:
        yield _rope_call(heads, option="normed")
    for heads in _NORMED_HEADS[:3]:
        yield _rope_call(heads, option="normed interleaved")
    yield _rope_call(_NORMED_HEADS[0], torch.float32, "normed")
    for option in ("normed zero-centred", "normed frozen weights", "normed frozen q", "normed main_grad"):
        yield _rope_call(_NORMED_HEADS[0], option=option)


def _rope_call(heads: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    HQ, HK, D, R = heads

    def run() -> Tensor:
        learned = {name: f"frozen {name}" not in option for name in "qk"}
        q, k = (meta(4, 512, H, D, dtype=dtype, requires_grad=learned[name]) for name, H in (("q", HQ), ("k", HK)))
        table = dtype if option == "bf16 tables" else torch.float32
        cos, sin = (meta(512, R // 2, dtype=table, requires_grad=False) for _ in range(2))
        given: dict[str, Any] = {"interleaved": "interleaved" in option, "zero_centered_gamma": "zero-centred" in option}
        if "normed" in option:
            given |= {name: meta(D, dtype=dtype, requires_grad="weights" not in option) for name in ("q_weight", "k_weight")}
        if "main_grad" in option:
            give_main_grad(given["q_weight"], given["k_weight"])
        rotated = rope(q, k, cos, sin, **given, backend="triton")
        return torch.cat([y.flatten() for y in rotated])

    return CoveringCall(" ".join(filter(None, (f"rope {HQ}/{HK}x{D}", f"{R} rotated" if R < D else "", option))), dtype, run)


def _attention_calls() -> Iterator[CoveringCall]:
    """All sizes of heads, alone and grouped; the other type, what is not rotated or a part of something, and each option."""
    for D in SIZES:
        yield _attention_call(8, 8, D)
        yield _attention_call(32, 8, D)
    yield _attention_call(32, 8, 64, torch.float16)
    for option in ("not rotated", "odd strides", "by group", "by group not rotated", "by group normed"):
        yield _attention_call(32, 8, 64, option=option)
    for D in (64, 128):
        yield _attention_call(32, 8, D, option="documents")
        yield _attention_call(32, 8, D, option="documents window", window=128)
        yield _attention_call(32, 8, D, option="window", window=128)
    yield _attention_call(64, 8, 64, option="documents sinks window", window=128)
    yield _attention_call(12, 12, 64, option="documents full", causal=False)
    yield _attention_call(12, 12, 64, option="full", causal=False)
    yield _attention_call(12, 12, 64, option="full window", causal=False, window=(64, 64))
    for D in (128, 256):
        yield _attention_call(8, 4, D, option="softcap", softcap=50.0)
        yield _attention_call(8, 4, D, option="softcap window", softcap=50.0, window=128)
    yield _attention_call(8, 4, 256, option="documents")
    yield _attention_call(8, 2, 256, option="gated normed")
    yield _attention_call(16, 2, 80, option="gated not rotated")
    yield CoveringCall("attention's boundaries, for others", torch.bfloat16, _check_boundaries)
    for D in (64, 128, 256):
        yield CoveringCall(f"attention 32/8x{D} last tokens", torch.bfloat16, partial(_attend_last, 32, 8, D))


def _check_boundaries() -> Tensor:
    """As other packages' kernels have them checked."""
    wrong = checked_boundaries(meta(9, dtype=torch.int32, requires_grad=False), 512)[1]
    y = meta(512, 2048, dtype=torch.bfloat16)
    for x in (y, meta(32, 512, dtype=torch.float32, requires_grad=False)):
        make_nan(x, wrong)
    return y


def _attend_last(heads: int, groups: int, D: int) -> Tensor:
    """As a model that generates with a cache does."""
    keys, values, q = (meta(4, *shape, D, dtype=torch.bfloat16) for shape in ((512, groups), (512, groups), (heads,)))
    options, tiles = AttentionOptions(heads, groups, False, D**-0.5), meta(4, 4, dtype=torch.int32, requires_grad=False)
    return attend_last(q, keys, values, (512,) * 4, tiles, options).requires_grad_()


def _attention_call(
    heads: int, groups: int, D: int, dtype: torch.dtype = torch.bfloat16, option: str = "", **options: Any
) -> CoveringCall:
    def run() -> Tensor:
        gated, B = "gated" in option, 1 if "documents" in option else 4
        columns = (heads * (1 + gated) + 2 * groups) * D
        odd = option == "odd strides"
        qkv = meta(B, 512, columns + 1, dtype=dtype)[..., 1:] if odd else meta(B, 512, columns, dtype=dtype)
        cos = None if "not rotated" in option else meta(512, D // (8 if gated else 2), dtype=torch.float32, requires_grad=False)
        given = {"gated": gated, **options}
        if "by group" in option:
            qkv, given["by_group"] = meta(512, B, columns, dtype=dtype).transpose(0, 1), True
        if "normed" in option:
            given |= {name: meta(D, dtype=dtype) for name in ("q_weight", "k_weight")}
        if "documents" in option:
            given["cu_seqlens"] = meta(9, dtype=torch.int32, requires_grad=False)
        if "sinks" in option:
            given["sinks"] = meta(heads, dtype=torch.float32)
        return attention(qkv, heads, groups, cos=cos, sin=cos, backend="triton", **given)

    return CoveringCall(" ".join(filter(None, (f"attention {heads}/{groups}x{D}", option))), dtype, run)


_LATENT_HEADS = (  # heads, nope, rope, v: DeepSeek V3's, GLM 4.7 Flash's, MiniCPM 3's, Mistral 4's, and other widths
    (128, 128, 64, 128), (20, 192, 64, 256), (40, 64, 32, 64), (32, 64, 64, 128), (3, 74, 6, 16), (5, 24, 8, 16),
)  # fmt: skip


def _latent_calls() -> Iterator[CoveringCall]:
    """All heads, in pairs and halves; the other type, documents, and what is frozen at the first."""
    for heads in _LATENT_HEADS:
        yield _latent_call(heads, option="interleaved")
    yield _latent_call(_LATENT_HEADS[0], torch.float16)
    for option in ("", "documents", "not rotated", "frozen q", "frozen kv", "frozen k_rope", "frozen keys"):
        yield _latent_call(_LATENT_HEADS[0], option=option)


def _latent_call(sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.bfloat16, option: str = "") -> CoveringCall:
    heads, nope, rope, V = sizes

    def run() -> Tensor:
        B = 1 if option == "documents" else 4
        q = meta(B, 512, heads, nope + rope, dtype=dtype, requires_grad=option != "frozen q")
        kv = meta(B, 512, heads, nope + V, dtype=dtype, requires_grad=option not in ("frozen kv", "frozen keys"))
        k_rope = meta(B, 512, rope, dtype=dtype, requires_grad=option not in ("frozen k_rope", "frozen keys"))
        table = None if option == "not rotated" else meta(512, rope // 2, dtype=torch.float32, requires_grad=False)
        bounds = meta(9, dtype=torch.int32, requires_grad=False) if option == "documents" else None
        given: dict[str, Any] = {"interleaved": option == "interleaved", "cu_seqlens": bounds, "backend": "triton"}
        return latent_attention(q, kv, k_rope, cos=table, sin=table, **given)

    label = f"latent_attention {heads}x{nope + rope}/{V}"
    return CoveringCall(" ".join(filter(None, (label, option))), dtype, run)
