"""attention: causal attention of a fused projection's queries, keys and values, which it turns by their positions first.

Formula  y = softmax(scale q k^T, each token seeing those up to itself) v, for each head; groups of heads share keys and values.
         q and k are turned as ops/attention/rope.py has it and rounded to qkv's type. Sums in fp32; the softmax, and the
         gradient of the scores, are rounded to qkv's type as operands of products are.
Shapes   qkv [B, S, (heads + 2 groups) D]: all queries, then keys, then values; cos and sin [S, R/2]; y [B, S, heads D].
Saves    qkv with q and k turned, which with `overwrite` is qkv's own memory; y; and for each head and token the logarithm of its
         sum, in fp32. No scores.
Bytes    forward turns q and k (read and written once) and reads q once, k and v once for each block of queries; backward has a
         kernel for dq and one for dk and dv, each of which computes the softmax again. All gradients are written in place in one
         tensor of qkv's shape, in which those of q and k are turned back.
Sums     in a fixed order: no atomics, and what a sequence gives does not depend on the others. With `deterministic=False`
         PyTorch's attention runs between the rotations where that is faster: cuDNN's, from Hopper on. On Hopper cuDNN's forward
         replaces ours where it is faster, deterministic or not; backward stays ours.
Kernels  ops/attention/forward.py, ops/attention/backward.py, ops/attention/rope_kernels.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.language import triton_unsupported
from onepass.ops.attention.backward import attend_backward, dk_dv_tiles, dq_tiles
from onepass.ops.attention.formula import (
    AttentionOptions,
    Parts,
    attention_by_pytorch,
    attention_formula,
    parts_of,
    rotated_parts,
)
from onepass.ops.attention.forward import all_by_cudnn, attend, attend_by_cudnn, forward_by_cudnn, forward_tiles, lse_size
from onepass.ops.attention.rope_formula import rope_blocks
from onepass.ops.attention.rope_kernels import check_tables, rotate
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_floating, check_number
from onepass.runtime.dispatch import (
    cast,
    fast_apply,
    has_address,
    needs_dispatcher,
    needs_grad,
    not_twice_differentiable,
    under_functorch,
)
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sizes import shared_memory

SIZES = (16, 32, 64, 128)  # of heads
LONGEST = 1 << 20  # tokens
_TYPES = (torch.bfloat16, torch.float16)


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
    """Return y by the formula, for every type, with all scores at once: fp64 inputs make it the oracle."""
    return attention_formula(qkv, cos, sin, _options(qkv, heads, groups, interleaved, scale))


def _options(qkv: Tensor, heads: int, groups: int | None, interleaved: bool, scale: float | None) -> AttentionOptions:
    if scale is None:
        scale = _head_size(qkv, heads, groups) ** -0.5
    return AttentionOptions(heads, heads if groups is None else groups, bool(interleaved), float(scale))


def _head_size(qkv: Tensor, heads: int, groups: int | None) -> int:
    return qkv.shape[-1] // (heads + 2 * (heads if groups is None else groups))


# ---- in qkv's own memory ----


def _check_overwritable(qkv: Tensor) -> None:
    """Raise where autograd would lose values: PyTorch refuses to write the same tensors in place."""
    owner = qkv._base if qkv._is_view() and qkv._base is not None else qkv
    if needs_grad(owner) and owner.is_leaf:
        raise ValueError(
            "overwrite must be False where qkv, or what it is a view of, is a leaf that requires grad, but is True: its values "
            "would be lost"
        )


def _mark_overwritten(qkv: Tensor) -> None:
    """Bump qkv's version so that autograd rejects stale saves. Call it after qkv's first use: bumping a view earlier loses its
    base."""
    if not qkv.is_inference():
        torch.autograd.graph.increment_version(qkv)


def _can_overwrite(qkv: Tensor, *tables: Tensor | None) -> bool:
    """Whether q and k can be turned in qkv's memory: not in a graph or a transform, nor where elements share an address."""
    if needs_dispatcher(qkv, *tables) or under_functorch():  # not whether an op is called: registered ops write over nothing
        return False
    extent = 1
    for stride, size in sorted(zip(qkv.stride(), qkv.shape, strict=True)):
        if size > 1 and stride < extent:
            return False
        extent = max(extent, stride * size)
    return True


# ---- by kernels: registered ops, opaque to the compiler and visible to checkpointing ----


def _as_readable(x: Tensor) -> Tensor:
    """Return x, or a copy where 16 bytes at a time can't be read: rows must be contiguous and begin at multiples of 16 bytes."""
    *outer, last = x.stride()
    in_rows = last == 1 and not any(stride % 8 for stride in outer) and all(outer) and x.data_ptr() % 16 == 0
    return x if in_rows else x.clone(memory_format=torch.contiguous_format)


def _forward(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, options: AttentionOptions, *, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, the logarithm of each row's sum and, where there are tables, qkv with q and k turned."""
    heads, groups, interleaved, scale = options
    readable, turned = _as_readable(qkv), None
    if cos is not None and sin is not None:
        if overwrite:
            q, k, _ = parts_of(readable, heads, groups)
            rotate(cos, sin, q, k, interleaved, False, (q, k))
            _mark_overwritten(readable)
        else:
            readable = _rotated_copy(readable, cos, sin, options)
        turned = readable
    q, k, v = parts_of(readable, heads, groups)
    y, lse = (attend_by_cudnn if forward_by_cudnn(readable, q.shape[-1]) else attend)(q, k, v, scale)
    whole: Tensor = torch.ops.aten._unsafe_view(y, [*y.shape[:2], heads * y.shape[-1]])
    return whole, lse, turned


def _rotated_copy(qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions) -> Tensor:
    """Return qkv with q and k turned. v is copied too, so that backward does not need qkv itself."""
    turned = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    (q, k, v), (into_q, into_k, into_v) = (parts_of(x, options.heads, options.groups) for x in (qkv, turned))
    rotate(cos, sin, q, k, options.interleaved, False, (into_q, into_k))
    into_v.copy_(v)
    return turned


def _forward_fake(qkv: Tensor, cos: Any, sin: Any, options: AttentionOptions) -> tuple[Tensor, Tensor, Tensor | None]:
    B, S, _ = qkv.shape
    y = qkv.new_empty(B, S, options.heads * _head_size(qkv, options.heads, options.groups))
    lse = qkv.new_empty(B, options.heads, lse_size(S), dtype=torch.float32)
    return y, lse, None if cos is None else qkv.new_empty(qkv.shape)


def _backward(
    dy: Tensor, turned: Tensor, y: Tensor, lse: Tensor, cos: Tensor | None, sin: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Return dqkv. `turned` is qkv with q and k turned, or qkv itself where there are no tables."""
    heads, groups, interleaved, scale = options
    dqkv = torch.empty(turned.shape, dtype=turned.dtype, device=turned.device)
    dq, dk, dv = parts_of(dqkv, heads, groups)
    by_head = *y.shape[:2], heads, y.shape[-1] // heads
    dy, y = _as_readable(dy).view(by_head), y.view(by_head)
    attend_backward(dy, *parts_of(_as_readable(turned), heads, groups), y, lse, scale, dq, dk, dv)
    if cos is not None and sin is not None:
        rotate(cos, sin, dq, dk, interleaved, True, (dq, dk))
    return dqkv


_forward_op = Registered(
    "attention(Tensor qkv, Tensor? cos, Tensor? sin, AttentionOptions options) -> (Tensor, Tensor, Tensor?)",
    _forward,
    _forward_fake,
    AttentionOptions,
)
_backward_op = Registered(
    "attention_backward(Tensor dy, Tensor turned, Tensor y, Tensor lse, Tensor? cos, Tensor? sin, AttentionOptions options) "
    "-> Tensor",
    _backward,
    lambda dy, turned, *rest: turned.new_empty(turned.shape),
    AttentionOptions,
)


# ---- the rotations alone, for PyTorch's attention between them ----


def _rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions, *, overwrite: bool = False, by_kernel: bool = True
) -> Parts:
    """Return q and k turned, in qkv's memory with `overwrite`, and v, a view of qkv."""
    if qkv.stride(-1) != 1:  # neither the kernel nor `view` can write there
        qkv, overwrite = qkv.contiguous(), True
    q, k, v = parts_of(qkv, options.heads, options.groups)
    into = (q, k) if overwrite else (q.new_empty(q.shape), k.new_empty(k.shape))
    _rotate_into(into, q, k, cos, sin, options.interleaved, False, by_kernel)
    if overwrite:
        _mark_overwritten(qkv)
    return *into, v


def _rotate_apart(qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions) -> tuple[Tensor | None, ...]:
    """`_rotate` for the dispatcher, which takes no results that share memory with qkv or each other."""
    q, k, v = parts_of(qkv, options.heads, options.groups)
    return *rotate(cos, sin, q, k, options.interleaved, False), v.clone(memory_format=torch.contiguous_format)


def _rotate_fake(qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in parts_of(qkv, options.heads, options.groups))


def _rotate_back(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions, *, by_kernel: bool = True
) -> Tensor:
    """Return dqkv, with dq and dk turned back."""
    dqkv = _empty_qkv(dq, dk, dv, cos, sin, options)
    into_q, into_k, into_v = parts_of(dqkv, options.heads, options.groups)
    _rotate_into((into_q, into_k), dq, dk, cos, sin, options.interleaved, True, by_kernel)
    into_v.copy_(dv)
    return dqkv


def _empty_qkv(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions) -> Tensor:
    B, S, _, D = q.shape
    return q.new_empty(B, S, (options.heads + 2 * options.groups) * D)


def _rotate_into(
    into: tuple[Tensor, Tensor], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool, by_kernel: bool
) -> None:
    if by_kernel:
        rotate(cos, sin, q, k, interleaved, back, into)
        return
    for x, out in zip((q, k), into, strict=True):
        rope_blocks(x, cos, sin, interleaved, back, out)


_rotate_op = Registered(
    "attention_turned(Tensor qkv, Tensor cos, Tensor sin, AttentionOptions options) -> (Tensor, Tensor, Tensor)",
    _rotate,
    _rotate_fake,
    AttentionOptions,
    dispatched=_rotate_apart,
)
_rotate_back_op = Registered(
    "attention_turned_back(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, AttentionOptions options) -> Tensor",
    _rotate_back,
    _empty_qkv,
    AttentionOptions,
)


# ---- autograd ----


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, options: AttentionOptions, overwrite: bool
    ) -> Tensor:
        y, lse, turned = _forward_op(qkv, cos, sin, options, overwrite=overwrite)
        ctx.options = options
        kept = (qkv if turned is None else turned).detach()  # autograd won't save one of several views that was overwritten
        ctx.save_for_backward(kept, y, lse, cos, sin)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _backward_op(dy, *ctx.saved_tensors, ctx.options), None, None, None, None


class _RotatedParts(torch.autograd.Function):
    """q and k turned, and v, for PyTorch's attention; their gradients come back in one tensor."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions, overwrite: bool, by_kernel: bool
    ) -> Parts:
        ctx.call = options, by_kernel
        ctx.save_for_backward(cos, sin)
        return _rotated(qkv, cos, sin, options, overwrite, by_kernel)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        (cos, sin), (options, by_kernel) = ctx.saved_tensors, ctx.call
        if by_kernel:
            dqkv = _rotate_back_op(dq, dk, dv, cos, sin, options)
        else:
            dqkv = _rotate_back(dq, dk, dv, cos, sin, options, by_kernel=False)
        return dqkv, None, None, None, None, None


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions, overwrite: bool, by_kernel: bool) -> Parts:
    if by_kernel:
        return _rotate_op(qkv, cos, sin, options, overwrite=overwrite)  # type: ignore[no-any-return]
    return _rotate(qkv, cos, sin, options, overwrite=overwrite, by_kernel=False)


_apply, _apply_rotation = fast_apply(_AttentionFunction), fast_apply(_RotatedParts)


def _by_pytorch(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, options: AttentionOptions, overwrite: bool, by_kernel: bool
) -> Tensor:
    """Return y by PyTorch's attention, which chooses what it saves, after our rotation; empty or transformed, by the formula.

    Its kernels read 16 bytes at a time and don't look at addresses: what they read, dy too, is copied where it must be.
    """
    if under_functorch() or not qkv.numel():
        return attention_formula(qkv, cos, sin, options)
    by_address = qkv.is_cuda and has_address(qkv)
    if by_address:
        qkv = _as_readable(qkv)
    # not whether an op is called: a compiler, or a mode that watches, sees the formula whole and chooses what to save
    by_formula = not by_kernel and needs_dispatcher(qkv, cos, sin)
    if cos is None or sin is None or by_formula:
        parts = rotated_parts(qkv, cos, sin, options)
    else:
        parts = (_apply_rotation if needs_grad(qkv) else _rotated)(qkv, cos, sin, options, overwrite, by_kernel)
    y = attention_by_pytorch(parts, options)
    if by_address and y.requires_grad:
        y.register_hook(_as_readable)
    return y


# ---- the public function: say what is wrong, choose who does it, return ----


def _check(qkv: Tensor, heads: int, groups: int | None, cos: Tensor | None, sin: Tensor | None, scale: float | None) -> None:
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


def unsupported(qkv: Tensor, heads: int, groups: int | None = None) -> str | None:
    """Why the kernels can't take this call, or None."""
    dtype = product_type(qkv)
    if dtype not in _TYPES:
        return f"qkv is {dtype}, and the kernels take 16 bits"
    D = _head_size(qkv, heads, groups)
    if D not in SIZES:
        return f"heads of {D} are none of {', '.join(map(str, SIZES))}"
    if qkv.shape[1] > LONGEST:
        return f"{qkv.shape[1]} tokens are more than {LONGEST}"
    if under_functorch():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    reason = triton_unsupported(qkv)
    return None if reason is None else reason.replace("x is", "qkv is")


def pytorch_is_faster(qkv: Tensor, head_size: int) -> bool:
    """Whether PyTorch's attention is faster than our kernels, where bits may differ from run to run.

    It then takes cuDNN's, from Hopper on: .8 to .9 of our time for wide heads, and a little less than ours in a whole step for
    narrow heads and many tokens. PyTorch's other backends take longer than ours.
    """
    return not torch.are_deterministic_algorithms_enabled() and all_by_cudnn(qkv, head_size)


def _variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    qkv, cos, overwrite = call.qkv, call.cos, call.overwrite
    if not qkv.numel():
        return "the PyTorch formula, as there is nothing to do"
    D = _head_size(qkv, call.heads, call.groups)
    if not call.deterministic and pytorch_is_faster(qkv, D):
        turned = "" if cos is None else f"q and k turned by rope's kernel{' in place' if overwrite else ''}; "
        return f"{turned}torch.nn.functional.scaled_dot_product_attention"
    smem = shared_memory(qkv.device)
    forward, dq, dk_dv = forward_tiles(D, smem), dq_tiles(D, smem), dk_dv_tiles(D, qkv.shape[1], smem)
    by_tiles = f"{forward.block_m} x {forward.block_n}"
    said = f"tiles of queries x keys: forward {'by cuDNN' if forward_by_cudnn(qkv, D) else by_tiles}; "
    said += f"backward {dq.block_m} x {dq.block_n} for dq, {dk_dv.block_m} x {dk_dv.block_n} for dk and dv; "
    if cos is not None:
        said += f"q and k turned by rope's kernel {'in place' if overwrite else 'into a copy of qkv'}, and back in place; "
    return said + f"keeps {'qkv' if cos is None or overwrite else 'the copy'}, y, and a number a head and token"


def _describe_pytorch(call: Call) -> str:
    turned = "" if call.cos is None else f", after q and k are turned{' in place' if call.overwrite else ''}"
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
    """Causal attention of a fused projection, with rotary positions; deterministic forward and backward by default.

    Args:
        qkv: ``[B, S, (heads + 2 groups) D]``: the queries of all heads, then the keys, then the values of all groups. Of any
            strides; it is copied where the last is not 1, or rows don't begin at multiples of 16 bytes.
        heads: of the queries, a multiple of groups.
        groups: of keys and values, each shared by ``heads / groups`` consecutive heads of queries; None means one a head.
        cos, sin: the tables by which q and k are turned first, as in `rope`: ``[S, R/2]``, or ``[B, S, R/2]``. None for both
            turns nothing. They get no gradient.
        interleaved: the pairs that are turned are neighbours, ``(2i, 2i + 1)``; otherwise ``(i, i + R/2)``.
        scale: of the scores, above 0; None means ``D ** -0.5``.
        overwrite: q and k may be turned in qkv's own memory, which saves a copy of it. Nothing else may need qkv afterwards:
            whatever autograd has saved of it raises in backward. Not for a leaf that requires grad, nor where a checkpointed
            region begins with qkv. It has no effect without tables, under a compiler or under a transform.
        deterministic: False lets PyTorch's attention run between our rotations where that is faster, as cuDNN's is from Hopper
            on for heads over 64 or from 2048 tokens: the gradients' last bits then differ from run to run. It has no effect
            where `torch.use_deterministic_algorithms` is on.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. The
            kernels take bf16 and fp16 and heads of 16, 32, 64 or 128; ``torch`` is PyTorch's own attention.

    Returns:
        ``[B, S, heads D]``, contiguous, in qkv's type (or autocast's, where that is on).
    """
    _check(qkv, heads, groups, cos, sin, scale)
    chosen = choose("attention", backend, unsupported(qkv, heads, groups))
    dtype = product_type(qkv)
    overwrite = bool(overwrite) and cos is not None and qkv.numel() > 0 and _can_overwrite(qkv, cos, sin)
    if overwrite and dtype == qkv.dtype:  # otherwise the op writes over a copy
        _check_overwritable(qkv)
    if chosen not in NATIVE:
        return run_other(  # type: ignore[no-any-return]
            "attention", chosen, qkv, heads, groups,
            cos=cos, sin=sin, interleaved=interleaved, scale=scale, overwrite=overwrite, deterministic=deterministic,
        )  # fmt: skip
    options = _options(qkv, heads, groups, interleaved, scale)
    rows = cast(qkv, dtype)
    faster = not deterministic and pytorch_is_faster(rows, _head_size(rows, heads, groups))
    if chosen == "torch" or faster or not qkv.numel():
        return _by_pytorch(rows, cos, sin, options, overwrite, chosen != "torch")
    if needs_grad(rows):
        return _apply(rows, cos, sin, options, overwrite)  # type: ignore[no-any-return]
    return _forward_op(rows, cos, sin, options, overwrite=overwrite)[0]  # type: ignore[no-any-return]


define_op(
    attention,
    check=lambda call: _check(call.qkv, call.heads, call.groups, call.cos, call.sin, call.scale),
    unsupported=lambda call: unsupported(call.qkv, call.heads, call.groups),
    variant=_variant,
    formula=_describe_pytorch,
)
