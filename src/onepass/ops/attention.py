"""attention: causal attention of a fused projection's queries, keys and values, which it turns by their positions first.

Formula  y = softmax(scale q k^T, each token seeing those up to itself) v, for each head; groups of heads share keys and values.
         q and k are turned as ops/rope.py has it and rounded to qkv's type. Sums in fp32; the softmax, and the gradient of the
         scores, are rounded to qkv's type as operands of products are.
Shapes   qkv [B, S, (heads + 2 groups) D]: all queries, then keys, then values; cos and sin [S, R/2]; y [B, S, heads D].
Saves    qkv with q and k turned, which with `overwrite` is qkv's own memory; y; and for each head and token the logarithm of its
         sum, in fp32. No scores.
Bytes    forward turns q and k (read and written once) and reads q once, k and v once for each block of queries; backward has a
         kernel for dq and one for dk and dv, each of which makes the softmax again. All gradients are written where they belong
         in one tensor of qkv's shape, in which those of q and k are turned back.
Sums     in a fixed order: no atomics, and what a sequence gives does not depend on the others. `deterministic=False` lets
         PyTorch's attention stand between the rotations where that is faster: cuDNN's, from Hopper on. On Hopper cuDNN's
         forward stands for ours where it is faster, also where all is deterministic; backward stays ours.
Kernels  kernels/attention_forward.py, kernels/attention_backward.py, kernels/rope.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.attention_backward import attend_backward, dk_dv_tiles, dq_tiles
from onepass.kernels.attention_formula import (
    Heads,
    Parts,
    attention_by_pytorch,
    attention_formula,
    parts_of,
    turned_parts,
)
from onepass.kernels.attention_forward import (
    all_by_cudnn,
    attend,
    attend_by_cudnn,
    forward_by_cudnn,
    forward_tiles,
    lse_size,
)
from onepass.kernels.rope import check_tables, rotate
from onepass.kernels.rope_formula import rope_blocks
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose, register_op, run_other
from onepass.runtime.checks import check_floating, check_number
from onepass.runtime.dispatch import bare_apply, cast, needs_grad, once, registered, transformed, watched
from onepass.runtime.lang import no_triton
from onepass.runtime.sizes import shared_memory

SIZES = (16, 32, 64, 128)  # of heads
LONGEST = 1 << 20  # tokens
_TYPES = (torch.bfloat16, torch.float16)

Maybe = Tensor | None


def attention_reference(
    qkv: Tensor,
    heads: int,
    groups: int | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The formula, for every type, of all scores at once: fp64 inputs make it the oracle."""
    return attention_formula(qkv, cos, sin, _heads(qkv, heads, groups, interleaved, scale))


def _heads(qkv: Tensor, heads: int, groups: int | None, interleaved: bool, scale: float | None) -> Heads:
    D = _head_size(qkv, heads, groups)
    groups = heads if groups is None else groups
    return Heads(heads, groups, bool(interleaved), D**-0.5 if scale is None else float(scale))


def _head_size(qkv: Tensor, heads: int, groups: int | None) -> int:
    return qkv.shape[-1] // (heads + 2 * (heads if groups is None else groups))


# ---- in qkv's own memory ----


def _check_overwritable(qkv: Tensor) -> None:
    """PyTorch refuses to write the same in place."""
    owner = qkv._base if qkv._is_view() and qkv._base is not None else qkv
    if needs_grad(owner) and owner.is_leaf:
        raise ValueError(
            "overwrite must be False where qkv, or what it is a view of, is a leaf that requires grad, but is True: its values "
            "would be lost"
        )


def _say_overwritten(qkv: Tensor) -> None:
    """To whoever has saved qkv for a backward of its own. Not before autograd has seen qkv: it would take a view for another."""
    if not qkv.is_inference():
        torch.autograd.graph.increment_version(qkv)


def _may_write(qkv: Tensor, *tables: Maybe) -> bool:
    """Whether anything can: who watches is given no op that writes, and numbers in one place would be turned together."""
    if watched(qkv, *tables) or transformed():
        return False
    extent = 1
    for stride, size in sorted(zip(qkv.stride(), qkv.shape, strict=True)):
        if size > 1 and stride < extent:
            return False
        extent = max(extent, stride * size)
    return True


# ---- by kernels ----


def _readable(x: Tensor) -> Tensor:
    """x, or a copy where its rows are not of numbers side by side, each from 16 bytes on, which descriptors ask for."""
    *outer, last = x.stride()
    in_rows = last == 1 and not any(stride % 8 for stride in outer) and all(outer) and x.data_ptr() % 16 == 0
    return x if in_rows else x.clone(memory_format=torch.contiguous_format)


def _forward(qkv: Tensor, cos: Maybe, sin: Maybe, h: Heads, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y, each row's logarithm, and qkv with q and k turned."""
    turned = qkv = _readable(qkv)
    if cos is not None and sin is not None:
        if overwrite:
            q, k, _ = parts_of(qkv, h.heads, h.groups)
            rotate(q, k, cos, sin, h.interleaved, False, (q, k))
            _say_overwritten(qkv)
        else:
            turned = _turned_copy(qkv, cos, sin, h)
    kernel = attend_by_cudnn if forward_by_cudnn(turned, _head_size(turned, h.heads, h.groups)) else attend
    y, lse = kernel(*parts_of(turned, h.heads, h.groups), h.scale)
    whole: Tensor = torch.ops.aten._unsafe_view(y, [*y.shape[:2], h.heads * y.shape[-1]])
    return whole, lse, turned


def _turned_copy(qkv: Tensor, cos: Tensor, sin: Tensor, h: Heads) -> Tensor:
    """All of it, so that qkv itself need not be kept for v."""
    turned = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    (q, k, v), (into_q, into_k, into_v) = (parts_of(x, h.heads, h.groups) for x in (qkv, turned))
    rotate(q, k, cos, sin, h.interleaved, False, (into_q, into_k))
    into_v.copy_(v)
    return turned


def _backward(dy: Tensor, turned: Tensor, y: Tensor, lse: Tensor, cos: Maybe, sin: Maybe, h: Heads) -> Tensor:
    dqkv = torch.empty(turned.shape, dtype=turned.dtype, device=turned.device)
    dq, dk, dv = parts_of(dqkv, h.heads, h.groups)
    by_head = *y.shape[:2], h.heads, y.shape[-1] // h.heads
    dy, y = _readable(dy).view(by_head), y.view(by_head)
    attend_backward(dy, *parts_of(_readable(turned), h.heads, h.groups), y, lse, h.scale, dq, dk, dv)
    if cos is not None and sin is not None:
        rotate(dq, dk, cos, sin, h.interleaved, True, (dq, dk))
    return dqkv


# ---- registered: opaque to the compiler, visible to checkpointing; nothing is overwritten where somebody watches ----


def _forward_all(qkv: Tensor, cos: Maybe, sin: Maybe, *h: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, lse, turned = _forward(qkv, cos, sin, Heads(*h), False)
    return y, lse, qkv.new_empty(0) if cos is None else turned


def _forward_fake(qkv: Tensor, cos: Maybe, sin: Maybe, *h: Any) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups, *_ = h
    B, S, columns = qkv.shape
    y = qkv.new_empty(B, S, heads * (columns // (heads + 2 * groups)))
    lse = qkv.new_empty(B, heads, lse_size(S), dtype=torch.float32)
    return y, lse, qkv.new_empty(0 if cos is None else qkv.shape)


def _backward_all(dy: Tensor, turned: Tensor, y: Tensor, lse: Tensor, cos: Maybe, sin: Maybe, *h: Any) -> Tensor:
    return _backward(dy, turned, y, lse, cos, sin, Heads(*h))


_forward_op = registered(
    "attention(Tensor qkv, Tensor? cos, Tensor? sin, int heads, int groups, bool interleaved, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _forward_all,
    _forward_fake,
)
_backward_op = registered(
    "attention_backward(Tensor dy, Tensor turned, Tensor y, Tensor lse, Tensor? cos, Tensor? sin, int heads, int groups, "
    "bool interleaved, float scale) -> Tensor",
    _backward_all,
    lambda dy, turned, *rest: turned.new_empty(turned.shape),
)


def _turned_all(qkv: Tensor, cos: Tensor, sin: Tensor, *h: Any) -> Tensor:
    return _turned_copy(_readable(qkv), cos, sin, Heads(*h))


def _turned_back_all(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *h: Any) -> Tensor:
    return _turned_back(dq, dk, dv, cos, sin, Heads(*h), True)


def _turned_back_fake(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *h: Any) -> Tensor:
    return _of_all_parts(dq, Heads(*h))


_turned_op = registered(
    "attention_turned(Tensor qkv, Tensor cos, Tensor sin, int heads, int groups, bool interleaved, float scale) -> Tensor",
    _turned_all,
    lambda qkv, *rest: qkv.new_empty(qkv.shape),
)
_turned_back_op = registered(
    "attention_turned_back(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, int heads, int groups, bool interleaved, "
    "float scale) -> Tensor",
    _turned_back_all,
    _turned_back_fake,
)


def _run(qkv: Tensor, cos: Maybe, sin: Maybe, h: Heads, overwrite: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not watched(qkv, cos, sin):
        return _forward(qkv, cos, sin, h, overwrite)
    y, lse, turned = _forward_op(qkv, cos, sin, *h)
    return y, lse, qkv if cos is None else turned


# ---- autograd ----


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Maybe, sin: Maybe, h: Heads, overwrite: bool) -> Tensor:
        y, lse, turned = _run(qkv, cos, sin, h, overwrite)
        ctx.call = h
        ctx.save_for_backward(turned.detach(), y, lse, cos, sin)  # detached: one of several views can't be overwritten and saved
        return y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Maybe, ...]:
        turned, y, lse, cos, sin = ctx.saved_tensors
        if watched(dy, turned):
            dqkv = _backward_op(dy, turned, y, lse, cos, sin, *ctx.call)
        else:
            dqkv = _backward(dy, turned, y, lse, cos, sin, ctx.call)
        return dqkv, None, None, None, None


class _Turned(torch.autograd.Function):
    """q and k turned, and v, for PyTorch's attention; their gradients come back in one tensor."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, h: Heads, overwrite: bool, by_kernel: bool) -> Parts:
        ctx.call = h, by_kernel
        ctx.save_for_backward(cos, sin)
        return _turned(qkv, cos, sin, h, overwrite, by_kernel)

    @staticmethod
    @once
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Maybe, ...]:
        (cos, sin), (h, by_kernel) = ctx.saved_tensors, ctx.call
        if by_kernel and watched(dq, dk, dv):
            dqkv = _turned_back_op(dq, dk, dv, cos, sin, *h)
        else:
            dqkv = _turned_back(dq, dk, dv, cos, sin, h, by_kernel)
        return dqkv, None, None, None, None, None


def _turned(qkv: Tensor, cos: Tensor, sin: Tensor, h: Heads, overwrite: bool, by_kernel: bool) -> Parts:
    if watched(qkv, cos, sin):
        return parts_of(_turned_op(qkv, cos, sin, *h), h.heads, h.groups)
    if qkv.stride(-1) != 1:  # neither kernel nor parts can be written there
        qkv, overwrite = qkv.contiguous(), True
    q, k, v = parts_of(qkv, h.heads, h.groups)
    into = [q, k] if overwrite else [x.new_empty(x.shape) for x in (q, k)]
    _turn(q, k, cos, sin, h, False, into, by_kernel)
    if overwrite:
        _say_overwritten(qkv)
    return into[0], into[1], v


def _turned_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, h: Heads, by_kernel: bool) -> Tensor:
    dqkv = _of_all_parts(dq, h)
    *into, into_v = parts_of(dqkv, h.heads, h.groups)
    _turn(dq, dk, cos, sin, h, True, into, by_kernel)
    into_v.copy_(dv)
    return dqkv


def _of_all_parts(q: Tensor, h: Heads) -> Tensor:
    B, S, _, D = q.shape
    return q.new_empty(B, S, (h.heads + 2 * h.groups) * D)


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, h: Heads, back: bool, into: list[Tensor], by_kernel: bool) -> None:
    if by_kernel:
        rotate(q, k, cos, sin, h.interleaved, back, (into[0], into[1]))
        return
    for x, out in zip((q, k), into, strict=True):
        rope_blocks(x, cos, sin, h.interleaved, back, out)


_apply, _apply_turned = bare_apply(_Attention), bare_apply(_Turned)


def _by_pytorch(qkv: Tensor, cos: Maybe, sin: Maybe, h: Heads, overwrite: bool, by_kernel: bool) -> Tensor:
    """PyTorch's attention, which keeps what it likes, after our rotation; for a transform, or of nothing, the formula."""
    if transformed() or not qkv.numel():
        return attention_formula(qkv, cos, sin, h)
    by_formula = not by_kernel and watched(qkv, cos, sin)  # who watches chooses what to keep
    if cos is None or sin is None or by_formula:
        return attention_by_pytorch(turned_parts(qkv, cos, sin, h), h)
    turn = _apply_turned if needs_grad(qkv) else _turned
    return attention_by_pytorch(turn(qkv, cos, sin, h, overwrite, by_kernel), h)


# ---- the public face: say what is wrong, choose who does it, return ----


def _check(
    qkv: Tensor, heads: int, groups: int | None = None, *, cos: Maybe = None, sin: Maybe = None, interleaved: bool = False,
    scale: float | None = None, overwrite: bool = False, deterministic: bool = True,
) -> None:  # fmt: skip
    check_floating("qkv", qkv)
    for name, count in (("heads", heads), ("groups", heads if groups is None else groups)):
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} must be a whole number, but is {count!r}, a {type(count).__name__}")
        if count < 1:
            raise ValueError(f"{name} must be at least 1, but is {count}")
    groups = heads if groups is None else groups
    if heads % groups:
        raise ValueError(f"heads must be a multiple of groups, {groups}, but is {heads}")
    every = heads + 2 * groups
    if qkv.dim() != 3 or qkv.shape[-1] % every or not qkv.shape[-1]:
        raise ValueError(
            f"qkv must have shape [B, S, {every} D], with {heads} heads of queries, {groups} of keys and {groups} of values, "
            f"but has {tuple(qkv.shape)}"
        )
    if scale is not None:
        check_number("scale", scale)
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be finite and above 0, but is {scale}")
    if (cos is None) != (sin is None):
        name, other = ("sin", "cos") if sin is None else ("cos", "sin")
        raise ValueError(f"{name} must be given where {other} is, but is None")
    if cos is not None and sin is not None:
        check_floating("cos", cos)
        check_floating("sin", sin)
        check_tables(cos, sin, qkv, tuple(qkv.shape[:2]), qkv.shape[-1] // every, "qkv")


def unsupported(qkv: Tensor, heads: int, groups: int | None = None, **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    dtype = product_type(qkv)
    if dtype not in _TYPES:
        return f"qkv is {dtype}, and the kernels take 16 bits"
    D = _head_size(qkv, heads, groups)
    if D not in SIZES:
        return f"heads of {D} are none of {', '.join(map(str, SIZES))}"
    if qkv.shape[1] > LONGEST:
        return f"{qkv.shape[1]} tokens are more than {LONGEST}"
    if transformed():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    reason = no_triton(qkv)
    return None if reason is None else reason.replace("x is", "qkv is")


def faster_by_pytorch(qkv: Tensor, head_size: int) -> bool:
    """Where bits may differ from run to run PyTorch takes cuDNN's attention, from Hopper on: .8 to .9 of our time for wide heads,
    a little less than ours in a whole step for narrow ones and many tokens. PyTorch's others take longer than ours."""
    return not torch.are_deterministic_algorithms_enabled() and all_by_cudnn(qkv, head_size)


def variant(
    qkv: Tensor, heads: int, groups: int | None = None, *, cos: Maybe = None, overwrite: bool = False,
    deterministic: bool = True, **options: Any,
) -> str:  # fmt: skip
    """Which kernels a call runs, and their tiles."""
    if not qkv.numel():
        return "the PyTorch formula, as there is nothing to do"
    D = _head_size(qkv, heads, groups)
    if not deterministic and faster_by_pytorch(qkv, D):
        turned = "" if cos is None else f"q and k turned by rope's kernel{' in place' if overwrite else ''}; "
        return f"{turned}torch.nn.functional.scaled_dot_product_attention"
    room = shared_memory(qkv.device)
    forward, dq, dk_dv = forward_tiles(D, room), dq_tiles(D, room), dk_dv_tiles(D, qkv.shape[1], room)
    by_tiles = f"{forward.block_m} x {forward.block_n}"
    said = f"tiles of queries x keys: forward {'by cuDNN' if forward_by_cudnn(qkv, D) else by_tiles}; "
    said += f"backward {dq.block_m} x {dq.block_n} for dq, {dk_dv.block_m} x {dk_dv.block_n} for dk and dv; "
    if cos is not None:
        said += f"q and k turned by rope's kernel {'in place' if overwrite else 'into a copy of qkv'}, and back in place; "
    return said + f"keeps {'qkv' if cos is None or overwrite else 'the copy'}, y, and a number a head and token"


def _by_pytorch_said(qkv: Tensor, *args: Any, cos: Maybe = None, overwrite: bool = False, **options: Any) -> str:
    turned = "" if cos is None else f", after q and k are turned{' in place' if overwrite else ''}"
    return f"torch.nn.functional.scaled_dot_product_attention{turned}"


def attention(
    qkv: Tensor,
    heads: int,
    groups: int | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    overwrite: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Causal attention of a fused projection, with rotary positions, deterministic forward and backward unless told otherwise.

    Args:
        qkv: ``[B, S, (heads + 2 groups) D]``: the queries of all heads, then the keys, then the values of all groups. Of any
            strides; there is a copy where the last is not 1, or rows don't begin at multiples of 16 bytes.
        heads: of the queries, a multiple of groups.
        groups: of keys and values, each shared by ``heads / groups`` queries that follow each other; None is one a head.
        cos, sin: the tables by which q and k are turned first, as `rope` has them: ``[S, R/2]``, or ``[B, S, R/2]``. None for
            both turns nothing. They get no gradient.
        interleaved: the pairs that are turned are neighbours, ``(2i, 2i + 1)``; otherwise ``(i, i + R/2)``.
        scale: of the scores, above 0; ``D ** -0.5`` where it is None.
        overwrite: q and k may be turned in qkv's own memory, which spares a copy of it. Nobody else may need qkv afterwards:
            what autograd has saved of it raises in backward. Not for a leaf that requires grad, nor where a checkpointed region
            begins with qkv. Without tables it does nothing, nor under a compiler or a transform.
        deterministic: False lets PyTorch's attention stand between our rotations where that is faster, as cuDNN's is from Hopper
            on for heads over 64 or from 2048 tokens: the gradients' last bits then differ from run to run. It is as True where
            `torch.use_deterministic_algorithms` is on.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. The
            kernels take bf16 and fp16 and heads of 16, 32, 64 or 128; ``torch`` is PyTorch's own attention.

    Returns:
        ``[B, S, heads D]``, contiguous, in qkv's type (or autocast's, where that is on).
    """
    _check(qkv, heads, groups, cos=cos, sin=sin, scale=scale)
    chosen = choose("attention", backend, unsupported(qkv, heads, groups))
    overwrite = bool(overwrite) and cos is not None and qkv.numel() > 0 and _may_write(qkv, cos, sin)
    if overwrite and product_type(qkv) == qkv.dtype:  # else it is a copy that is written
        _check_overwritable(qkv)
    if chosen not in NATIVE:
        options: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": interleaved, "scale": scale, "overwrite": overwrite}
        options["deterministic"] = deterministic
        return run_other("attention", chosen, qkv, heads, groups, **options)  # type: ignore[no-any-return]
    h = _heads(qkv, heads, groups, interleaved, scale)
    rows = cast(qkv, product_type(qkv))
    faster = not deterministic and faster_by_pytorch(rows, _head_size(rows, heads, groups))
    if chosen == "torch" or faster or not qkv.numel():
        return _by_pytorch(rows, cos, sin, h, overwrite, chosen != "torch")
    if needs_grad(rows):
        return _apply(rows, cos, sin, h, overwrite)  # type: ignore[no-any-return]
    return _run(rows, cos, sin, h, overwrite)[0]


register_op(attention, _check, unsupported, variant, _by_pytorch_said)
