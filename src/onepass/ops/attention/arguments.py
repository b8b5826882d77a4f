"""attention's arguments: what they must be, and the options that are made of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from onepass.ops.attention.formula import AttentionOptions
from onepass.ops.attention.layout import is_sequence_first
from onepass.ops.attention.rope_kernels import check_tables, check_weights
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.checks import check_device, check_floating, check_number, check_whole
from onepass.runtime.documents import check_documents, check_longest
from onepass.runtime.op import Call

Window = int | tuple[int | None, int | None] | None
LONGEST = 1 << 20  # tokens


def head_size(qkv: Tensor, heads: int, groups: int | None, gated: bool = False) -> int:
    return qkv.shape[-1] // (heads * (1 + bool(gated)) + 2 * (heads if groups is None else groups))


class AttentionCall(NamedTuple):
    """The arguments of a call but its backend, in the order of the public signature."""

    qkv: Tensor
    heads: int
    groups: int | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    scale: float | None = None
    causal: bool = True
    cu_seqlens: Tensor | None = None
    window: Window = None
    softcap: float | None = None
    sinks: Tensor | None = None
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    zero_centered_gamma: bool = False
    by_group: bool = False
    gated: bool = False
    overwrite: bool = False
    deterministic: bool = True


def make_options(call: AttentionCall | Call, in_order: bool = True, kernels: str = "") -> AttentionOptions:
    """Return the options. A window as long as the tokens is none, unless a document must not see how many there are."""
    qkv, heads, groups, scale, window = call.qkv, call.heads, call.groups, call.scale, call.window
    if scale is None:
        scale = head_size(qkv, heads, groups, call.gated) ** -0.5
    if window is None:
        left, right = -1, 0 if call.causal else -1
    elif isinstance(window, int):
        left, right = window - 1, 0
    else:
        left, right = (-1 if side is None else side for side in window)
    furthest = LONGEST if invariant() else qkv.shape[1] - 1
    left, right = -1 if 0 <= left >= furthest else left, -1 if 0 < right >= furthest else right
    by_group = bool(call.by_group)
    return AttentionOptions(
        heads, heads if groups is None else groups, bool(call.interleaved), float(scale), left, right, float(call.softcap or 0.0),
        float(call.eps), bool(call.zero_centered_gamma), in_order, kernels, by_group, by_group and is_sequence_first(qkv),
        bool(call.gated),
    )  # fmt: skip


def check_arguments(call: AttentionCall | Call) -> None:
    """Raise where an argument of attention is wrong."""
    qkv, heads, groups, cos, sin, cu_seqlens = call.qkv, call.heads, call.groups, call.cos, call.sin, call.cu_seqlens
    check_floating("qkv", qkv)
    for name, count in (("heads", heads), ("groups", heads if groups is None else groups)):
        check_whole(name, count, 1)
    groups = heads if groups is None else groups
    if heads % groups:
        raise ValueError(f"heads must be a multiple of groups, {groups}, but is {heads}")
    if call.gated and call.by_group:
        raise ValueError("gated must be False where qkv is by_group, but is True")
    every = heads * (1 + bool(call.gated)) + 2 * groups
    if qkv.dim() != 3 or qkv.shape[-1] % every or not qkv.shape[-1]:
        queries = "queries, each with its gate" if call.gated else "queries"
        raise ValueError(
            f"qkv must have shape [B, S, {every} D], with {heads} heads of {queries}, {groups} of keys and {groups} of values, "
            f"but has {tuple(qkv.shape)}"
        )
    for name, number in (("scale", call.scale), ("softcap", call.softcap)):
        if number is not None:
            check_number(name, number)
            if not 0 < number < math.inf:
                raise ValueError(f"{name} must be finite and above 0, but is {number}")
    if call.causal is not True or call.window is not None:
        _check_window(call.causal, call.window)
    if call.sinks is not None:
        _check_sinks(call.sinks, heads, qkv)
    tokens = tuple(qkv.shape[:2])
    if cu_seqlens is not None:
        check_documents(cu_seqlens, qkv, tokens, "qkv")
    if (cos is None) != (sin is None):
        name, other = ("sin", "cos") if sin is None else ("cos", "sin")
        raise ValueError(f"{name} must be given where {other} is, but is None")
    if cos is not None and sin is not None:
        check_tables_of(cos, sin, cu_seqlens, qkv, tokens, qkv.shape[-1] // every, "qkv")
    if call.q_weight is not None or call.k_weight is not None or call.zero_centered_gamma:
        norm = call.q_weight, call.k_weight, call.eps, call.zero_centered_gamma
        check_weights(*norm, qkv, qkv.shape[-1] // every, "qkv")
        if cos is None:
            raise ValueError("cos and sin must be given where q_weight and k_weight are, but are None")


def check_tables_of(
    cos: Tensor, sin: Tensor, cu_seqlens: Tensor | None, x: Tensor, tokens: tuple[int, ...], D: int, name: str
) -> None:
    """Raise unless the tables fit x, called `name`; by position within a document where `cu_seqlens` is given."""
    check_floating("cos", cos)
    check_floating("sin", sin)
    if cu_seqlens is not None and cos.dim() == 2:
        check_tables(cos, sin, x, cos.shape[:1], D, name)
        check_longest(cu_seqlens, cos.shape[0])
    else:
        check_tables(cos, sin, x, tokens, D, name)


def _check_window(causal: object, window: object) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, but is {causal!r}, a {type(causal).__name__}")
    if window is None:
        return
    if causal:
        if isinstance(window, (tuple, list)):
            what = "a whole number where attention is causal, the keys that a query sees"
            raise TypeError(f"window must be {what}, but is {window!r}")
        check_whole("window", window, 1)
        return
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        what = "a pair where attention is not causal, the keys before and after its own that a query sees (None for all)"
        raise TypeError(f"window must be {what}, but is {window!r}")
    for at, side in enumerate(window):
        if side is not None:
            check_whole(f"window[{at}]", side, 0)


def _check_sinks(sinks: Tensor, heads: int, qkv: Tensor) -> None:
    check_floating("sinks", sinks, optional=True)
    if sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), a logit for each head, but has {tuple(sinks.shape)}")
    check_device("sinks", sinks, qkv, "qkv")
