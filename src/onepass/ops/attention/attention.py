"""attention: causal attention of a fused projection's queries, keys and values, which it turns by their positions first.

Formula  y = softmax(scale q k^T, each token seeing those up to itself) v, for each head; groups of heads share keys and values.
         q and k are turned as ops/attention/rope.py has it and rounded to qkv's type. Sums in fp32; the softmax, and the
         gradient of the scores, are rounded to qkv's type as operands of products are. With weights, q's and k's heads are
         normalised before they are turned, as there.
Shapes   qkv [B, S, (heads + 2 groups) D]: all queries, then keys, then values; cos and sin [S, R/2]; y [B, S, heads D].
Saves    qkv with q and k turned, which with `overwrite` is qkv's own memory; y; and for each head and token the logarithm of its
         sum, in fp32. No scores. With weights: qkv as it came, and beside it q and k turned, without v.
Bytes    forward turns q and k (read and written once) and reads q once, k and v once for each block of queries; backward has a
         kernel for dq and one for dk and dv, each of which computes the softmax again. All gradients are written in place in one
         tensor of qkv's shape, in which those of q and k are turned back.
Sums     in a fixed order: no atomics, and what a sequence gives does not depend on the others. With `deterministic=False`
         PyTorch's attention runs between the rotations where that is faster: cuDNN's, from Hopper on. On Hopper cuDNN's forward
         replaces ours where it is faster, deterministic or not, and so does its backward in a fixed order for heads of 128
         that share no keys, where `nvidia-cudnn-frontend` is installed.
Kernels  ops/attention/forward.py, ops/attention/backward.py, ops/attention/rope_kernels.py; cuDNN: ops/attention/by_cudnn.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.vectors import contiguous_param, saved_vectors
from onepass.kernels.language import triton_unsupported
from onepass.ops.attention.arguments import Window, check_arguments, head_size, make_options
from onepass.ops.attention.backward import BackwardCall, attend_backward, backward_tiles, sinks_gradient
from onepass.ops.attention.by_cudnn import (
    all_by_cudnn,
    attend_backward_by_cudnn,
    attend_by_cudnn,
    backward_by_cudnn,
    forward_by_cudnn,
)
from onepass.ops.attention.by_pytorch import attend_by_pytorch
from onepass.ops.attention.documents import tables_of_documents
from onepass.ops.attention.formula import AttentionOptions, attention_formula, is_plain, norm_of, parts_of
from onepass.ops.attention.forward import attend, forward_tiles, head_block, lse_size
from onepass.ops.attention.layout import as_readable, can_overwrite, check_overwritable, mark_overwritten
from onepass.ops.attention.rope_kernels import rotate
from onepass.ops.attention.rope_norm import weight_grads
from onepass.ops.attention.rope_norm_kernels import HeadGradients, rotate_back
from onepass.ops.attention.sharding import shard_attention
from onepass.runtime.autocast import product_type
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards
from onepass.runtime.sizes import shared_memory

SIZES = (16, 32, 64, 80, 96, 128, 192, 256)  # of heads
LONGEST = 1 << 20  # tokens
MOST_DOCUMENTS = 1 << 15  # and their blocks, are programs of a grid's second dimension
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
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
) -> Tensor:
    """Return y by the formula, for every type, with all scores at once: fp64 inputs make it the oracle."""
    options = make_options(qkv, heads, groups, interleaved, scale, causal, window, softcap, eps, zero_centered_gamma)
    return attention_formula(qkv, cos, sin, options, cu_seqlens, sinks, (q_weight, k_weight))


# ---- by kernels: registered ops, opaque to the compiler and visible to checkpointing ----


def _forward(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    options: AttentionOptions,
    *,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, the logarithm of each row's sum and, where there are tables, qkv with q and k turned; q and k alone where they
    are normalised too."""
    heads, groups = options.heads, options.groups
    readable, turned = as_readable(qkv), None
    cu_seqlens, sinks = _contiguous(cu_seqlens), _contiguous(sinks)
    q, k, v = parts_of(readable, heads, groups)
    if cos is not None and sin is not None:
        if q_weight is not None and k_weight is not None:
            turned, norm = _empty_qk(qkv, options), norm_of(options, q_weight, k_weight)
            rotate(cos, sin, q, k, options.interleaved, False, _qk_of(turned, options), norm)
            q, k = _qk_of(turned, options)
        elif overwrite:
            rotate(cos, sin, q, k, options.interleaved, False, (q, k))
            mark_overwritten(readable)
            turned = readable
        else:
            turned = readable = _rotated_copy(readable, cos, sin, options)
            q, k, v = parts_of(readable, heads, groups)
    if _is_plain_causal(options, cu_seqlens, sinks) and forward_by_cudnn(readable, q.shape[-1]):
        y, lse = attend_by_cudnn(q, k, v, options.scale)
    else:
        y, lse = attend(q, k, v, options, cu_seqlens, sinks)
    whole: Tensor = torch.ops.aten._unsafe_view(y, [*y.shape[:2], heads * y.shape[-1]])
    return whole, lse, turned


def _empty_qk(qkv: Tensor, options: AttentionOptions) -> Tensor:
    """Return memory for q and k, [B, S, (heads + groups) D]."""
    heads, groups = options.heads, options.groups
    return qkv.new_empty(*qkv.shape[:2], (heads + groups) * head_size(qkv, heads, groups))


def _qk_of(turned: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    heads, groups = options.heads, options.groups
    q, k = turned.view(*turned.shape[:2], heads + groups, -1).split_with_sizes((heads, groups), 2)
    return q, k


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _is_plain_causal(options: AttentionOptions, cu_seqlens: Tensor | None, sinks: Tensor | None) -> bool:
    return options.right == 0 and is_plain(options, cu_seqlens, sinks)


def _rotated_copy(qkv: Tensor, cos: Tensor, sin: Tensor, options: AttentionOptions) -> Tensor:
    """Return qkv with q and k turned. v is copied too, so that backward does not need qkv itself."""
    turned = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    (q, k, v), (into_q, into_k, into_v) = (parts_of(x, options.heads, options.groups) for x in (qkv, turned))
    rotate(cos, sin, q, k, options.interleaved, False, (into_q, into_k))
    into_v.copy_(v)
    return turned


def _forward_fake(
    qkv: Tensor, cos: Any, sin: Any, cu_seqlens: Any, sinks: Any, q_weight: Any, k_weight: Any, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    B, S, _ = qkv.shape
    y = qkv.new_empty(B, S, options.heads * head_size(qkv, options.heads, options.groups))
    lse = qkv.new_empty(B, options.heads, lse_size(S, cu_seqlens), dtype=torch.float32)
    if q_weight is not None:
        return y, lse, _empty_qk(qkv, options)
    return y, lse, None if cos is None else qkv.new_empty(qkv.shape)


def _backward(
    dy: Tensor,
    turned: Tensor,
    y: Tensor,
    lse: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    qkv: Tensor | None,
    options: AttentionOptions,
    of_qkv: bool,
    of_sinks: bool,
    of_q_weight: bool,
    of_k_weight: bool,
    *,
    into: tuple[Tensor | None, ...] | None = None,
    keep_scratch: bool = True,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of qkv, sinks and both weights.

    `turned` is qkv with q and k turned, or qkv itself where there are no tables. With weights it is q and k alone, and qkv as it
    came is given too. into: what the weights' gradients are added to.
    """
    heads, groups = options.heads, options.groups
    by_head = *y.shape[:2], heads, y.shape[-1] // heads
    if qkv is None:
        whole = as_readable(turned)
        q, k, v = parts_of(whole, heads, groups)
    else:
        whole = as_readable(qkv)
        (q, k), v = _qk_of(turned, options), parts_of(whole, heads, groups)[2]
    of_parts = of_qkv or of_q_weight or of_k_weight
    dqkv = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device) if of_parts else None
    gradients = None if dqkv is None else parts_of(dqkv, heads, groups)
    call = BackwardCall(as_readable(dy).view(by_head), q, k, v, y.view(by_head), lse, options, _contiguous(cu_seqlens))
    if gradients is not None and _is_plain_causal(options, cu_seqlens, sinks) and backward_by_cudnn(whole, by_head[-1], options):
        attend_backward_by_cudnn(call, gradients)
    else:
        attend_backward(call, gradients)
    dq_weight = dk_weight = None
    if cos is not None and sin is not None and gradients is not None:
        dq, dk, _ = gradients
        if q_weight is None or k_weight is None:
            rotate(cos, sin, dq, dk, options.interleaved, True, (dq, dk))
        else:
            given = dq, dk, *parts_of(whole, heads, groups)[:2], norm_of(options, q_weight, k_weight), options.interleaved
            needs = HeadGradients(of_qkv, of_qkv, of_q_weight, of_k_weight)
            *_, dq_weight, dk_weight = rotate_back(cos, sin, *given, needs, (dq, dk), into=into, keep_scratch=keep_scratch)
    dsinks = sinks_gradient(call, sinks.contiguous()) if sinks is not None and of_sinks else None
    return dqkv if of_qkv else None, dsinks, dq_weight, dk_weight


def _backward_fake(
    dy: Tensor, turned: Tensor, y: Any, lse: Any, cos: Any, sin: Any, cu_seqlens: Any, sinks: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, qkv: Tensor | None, options: AttentionOptions, *needs: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    given = (turned if qkv is None else qkv), sinks, q_weight, k_weight
    return tuple(t.new_empty(t.shape) if t is not None and need else None for t, need in zip(given, needs, strict=True))


_forward_op = Registered(
    "attention(Tensor qkv, Tensor? cos, Tensor? sin, Tensor? cu_seqlens, Tensor? sinks, Tensor? q_weight, Tensor? k_weight, "
    "AttentionOptions options) -> (Tensor, Tensor, Tensor?)",
    _forward,
    _forward_fake,
    AttentionOptions,
)
_backward_op = Registered(
    "attention_backward(Tensor dy, Tensor turned, Tensor y, Tensor lse, Tensor? cos, Tensor? sin, Tensor? cu_seqlens, "
    "Tensor? sinks, Tensor? q_weight, Tensor? k_weight, Tensor? qkv, AttentionOptions options, bool of_qkv, bool of_sinks, "
    "bool of_q_weight, bool of_k_weight) -> (Tensor?, Tensor?, Tensor?, Tensor?)",
    _backward,
    _backward_fake,
    AttentionOptions,
    dispatched=partial(_backward, keep_scratch=False),
)


# ---- autograd ----


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        sinks: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        cu_seqlens: Tensor | None,
        options: AttentionOptions,
        overwrite: bool,
    ) -> Tensor:
        y, lse, turned = _forward_op(qkv, cos, sin, cu_seqlens, sinks, q_weight, k_weight, options, overwrite=overwrite)
        ctx.options = options
        ctx.vectors = saved_vectors(ctx, 2, q_weight, k_weight)
        kept = (qkv if turned is None else turned).detach()  # autograd won't save one of several views that was overwritten
        as_it_came = None if q_weight is None else qkv
        ctx.save_for_backward(kept, y, lse, cos, sin, cu_seqlens, sinks, q_weight, k_weight, as_it_came)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, q_weight, k_weight, qkv = ctx.saved_tensors
        given = True, saved[-1] is not None, q_weight is not None, k_weight is not None
        needs, weights, grads = weight_grads(ctx, given, (dy, *saved, qkv), (q_weight, k_weight))
        dqkv, dsinks, *dweights = _backward_op(dy, *saved, *weights, qkv, ctx.options, *needs, **grads.direct())
        return dqkv, dsinks, *grads.put(dweights), None, None, None, None, None


_apply = fast_apply(_AttentionFunction)


# ---- the public function: say what is wrong, choose who does it, return ----


def unsupported(qkv: Tensor, heads: int, groups: int | None = None, cu_seqlens: Tensor | None = None) -> str | None:
    """Why the kernels can't take this call, or None."""
    dtype = product_type(qkv)
    if dtype not in _TYPES:
        return f"qkv is {dtype}, and the kernels take 16 bits"
    D = head_size(qkv, heads, groups)
    if D not in SIZES:
        return f"heads of {D} are none of {', '.join(map(str, SIZES))}, which the kernels take; torch takes any"
    if qkv.shape[1] > LONGEST:
        return f"{qkv.shape[1]} tokens are more than {LONGEST}"
    if cu_seqlens is not None and cu_seqlens.shape[0] > MOST_DOCUMENTS:
        return f"{cu_seqlens.shape[0] - 1} documents are more than {MOST_DOCUMENTS - 1}"
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
    qkv, cos, overwrite, normed = call.qkv, call.cos, call.overwrite and call.q_weight is None, call.q_weight is not None
    if not qkv.numel():
        return "the PyTorch formula, as there is nothing to do"
    D = head_size(qkv, call.heads, call.groups)
    if not call.deterministic and is_plain(_options_of(call), call.cu_seqlens, call.sinks) and pytorch_is_faster(qkv, D):
        how = f"{'normalised and ' * normed}turned by rope's kernel{' in place' if overwrite else ''}"
        turned = "" if cos is None else f"q and k {how}; "
        return f"{turned}torch.nn.functional.scaled_dot_product_attention"
    smem, W, options = shared_memory(qkv.device), head_block(D), _options_of(call)
    forward = forward_tiles(W, smem)
    dq, dk_dv = backward_tiles(D, qkv.shape[1], options, call.cu_seqlens is not None, smem)
    plain = _is_plain_causal(options, call.cu_seqlens, call.sinks)
    by_cudnn = plain and forward_by_cudnn(qkv, D)
    said = f"tiles of queries x keys: forward {'by cuDNN' if by_cudnn else f'{forward.block_m} x {forward.block_n}'}; "
    if plain and backward_by_cudnn(qkv, D, options):
        said += "backward by cuDNN, in a fixed order; "
    else:
        said += f"backward {dq.block_m} x {dq.block_n} for dq, {dk_dv.block_m} x {dk_dv.block_n} for dk and dv; "
    if call.cu_seqlens is not None:
        said += "documents' tiles listed on the GPU, the longest first; "
    if normed:
        said += "q and k normalised and turned by rope's kernel beside qkv, and back in place; "
    elif cos is not None:
        said += f"q and k turned by rope's kernel {'in place' if overwrite else 'into a copy of qkv'}, and back in place; "
    kept = "qkv, q and k" if normed else "qkv" if cos is None or overwrite else "the copy"
    return said + f"keeps {kept}, y, and a number a head and token"


def _check(call: Call) -> None:
    tables = call.cos, call.sin, call.scale
    weights = call.q_weight, call.k_weight, call.eps, call.zero_centered_gamma
    check_arguments(
        call.qkv, call.heads, call.groups, *tables, call.causal, call.cu_seqlens, call.window, call.softcap, call.sinks, *weights
    )


def _options_of(call: Call) -> AttentionOptions:
    given = call.interleaved, call.scale, call.causal, call.window, call.softcap, call.eps, call.zero_centered_gamma
    return make_options(call.qkv, call.heads, call.groups, *given)


def _describe_pytorch(call: Call) -> str:
    how = "normalised and turned" if call.q_weight is not None else f"turned{' in place' if call.overwrite else ''}"
    turned = "" if call.cos is None else f", after q and k are {how}"
    if call.softcap is not None or call.sinks is not None:
        return f"the PyTorch formula, all scores of a document at once{turned}"
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
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    overwrite: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Attention of a fused projection, with rotary positions; causal, and deterministic forward and backward, by default.

    Args:
        qkv: ``[B, S, (heads + 2 groups) D]``: the queries of all heads, then the keys, then the values of all groups. Of any
            strides; it is copied where the last is not 1, or rows don't begin at multiples of 16 bytes.
        heads: of the queries, a multiple of groups.
        groups: of keys and values, each shared by ``heads / groups`` consecutive heads of queries; None means one a head.
        cos, sin: the tables by which q and k are turned first, as in `rope`: ``[S, R/2]``, or ``[B, S, R/2]``. None for both
            turns nothing. They get no gradient. With `cu_seqlens`, tables of ``[longest, R/2]`` are looked up by position within
            the document, and those of ``[1, S, R/2]`` taken as they are.
        interleaved: the pairs that are turned are neighbours, ``(2i, 2i + 1)``; otherwise ``(i, i + R/2)``.
        scale: of the scores, above 0; None means ``D ** -0.5``.
        causal: a query sees its own key and those before it; False: all keys.
        cu_seqlens: int32 ``[documents + 1]``, on qkv's device: the boundaries of documents that follow each other in a qkv of
            ``[1, S, ...]``, from 0 to S. A query sees its own document only, whose result has the bits that it would have as the
            only one. Documents may be empty. On a GPU nothing waits to read them: where they are wrong, all results are NaN, and
            `validate` raises.
        window: how many keys a query sees, its own and those before it. Where attention is not causal: a pair, the keys before
            and after its own. None for either, or for both, is no bound.
        softcap: scores, after the scale, become ``softcap * tanh(scores / softcap)``. None leaves them.
        sinks: ``[heads]``, a logit a head that takes part in the softmax and has no value, as a key of zeros would. It gets a
            gradient.
        q_weight, k_weight, eps, zero_centered_gamma: RMSNorm of each head of q and of k before they are turned, as in `rope`.
            They need tables.
        overwrite: q and k may be turned in qkv's own memory, which saves a copy of it. Nothing else may need qkv afterwards:
            whatever autograd has saved of it raises in backward. Not for a leaf that requires grad, nor where a checkpointed
            region begins with qkv. It has no effect without tables, with weights, whose backward needs qkv as it came, under a
            compiler or under a transform.
        deterministic: False lets PyTorch's attention run between our rotations where that is faster, as cuDNN's is from Hopper
            on for heads over 64 or from 2048 tokens: the gradients' last bits then differ from run to run. It has no effect
            where `torch.use_deterministic_algorithms` is on.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. The
            kernels take bf16 and fp16 and heads of 16, 32, 64, 80, 96, 128, 192 or 256; ``torch`` is PyTorch's own attention,
            with a mask where there are documents or a window, and a formula where there is a softcap or sinks.

    Returns:
        ``[B, S, heads D]``, contiguous, in qkv's type (or autocast's, where that is on).
    """
    if has_dtensor(qkv):
        return run_on_shards(  # type: ignore[no-any-return]
            "attention", qkv=qkv, heads=heads, groups=groups, cos=cos, sin=sin, interleaved=interleaved, scale=scale,
            causal=causal, cu_seqlens=cu_seqlens, window=window, softcap=softcap, sinks=sinks, q_weight=q_weight,
            k_weight=k_weight, eps=eps, zero_centered_gamma=zero_centered_gamma, overwrite=overwrite,
            deterministic=deterministic, backend=backend,
        )  # fmt: skip
    norm = q_weight, k_weight, eps, zero_centered_gamma
    check_arguments(qkv, heads, groups, cos, sin, scale, causal, cu_seqlens, window, softcap, sinks, *norm)
    options = make_options(qkv, heads, groups, interleaved, scale, causal, window, softcap, eps, zero_centered_gamma)
    chosen = choose("attention", backend, unsupported(qkv, heads, groups, cu_seqlens))
    dtype = product_type(qkv)
    overwrite = bool(overwrite) and cos is not None and q_weight is None and qkv.numel() > 0 and can_overwrite(qkv, cos, sin)
    if overwrite and dtype == qkv.dtype:  # otherwise the op writes over a copy
        check_overwritable(qkv)
    if chosen not in NATIVE:
        return run_other(  # type: ignore[no-any-return]
            "attention", chosen, qkv, heads, groups,
            cos=cos, sin=sin, interleaved=interleaved, scale=scale, causal=causal, cu_seqlens=cu_seqlens, window=window,
            softcap=softcap, sinks=sinks, q_weight=q_weight, k_weight=k_weight, eps=eps, zero_centered_gamma=zero_centered_gamma,
            overwrite=overwrite, deterministic=deterministic,
        )  # fmt: skip
    rows = cast(qkv, dtype)
    plain = not deterministic and is_plain(options, cu_seqlens, sinks)
    if chosen == "torch" or not qkv.numel() or (plain and pytorch_is_faster(rows, head_size(rows, heads, groups))):
        by_kernel = chosen != "torch"
        return attend_by_pytorch(rows, cos, sin, cu_seqlens, sinks, (q_weight, k_weight), options, overwrite, by_kernel)
    if cos is not None and sin is not None:
        cos, sin = tables_of_documents(cos, sin, cu_seqlens, rows.shape[1])
    q_weight, k_weight = contiguous_param(q_weight), contiguous_param(k_weight)
    if needs_grad(rows, sinks, q_weight, k_weight):
        return _apply(rows, sinks, q_weight, k_weight, cos, sin, cu_seqlens, options, overwrite)  # type: ignore[no-any-return]
    given = rows, cos, sin, cu_seqlens, sinks, q_weight, k_weight, options
    return _forward_op(*given, overwrite=overwrite)[0]  # type: ignore[no-any-return]


define_op(
    attention,
    check=_check,
    unsupported=lambda call: unsupported(call.qkv, call.heads, call.groups, call.cu_seqlens),
    variant=_variant,
    sharding=shard_attention,
    formula=_describe_pytorch,
)
