"""attention: causal attention of a fused projection's queries, keys and values, which it rotates by their positions first.

Formula  y = softmax(scale q k^T, each token seeing those up to itself) v, for each head; groups of heads share keys and values.
         q and k are rotated as ops/attention/rope.py has it and rounded to qkv's type. Sums in fp32; the softmax, and the
         gradient of the scores, are rounded to qkv's type as operands of products are. With weights, q's and k's heads are
         normalised before they are rotated, as there. Gated, y is then multiplied by the sigmoid of each head's gate.
Shapes   qkv [B, S, (heads + 2 groups) D]: all queries, then keys, then values; cos and sin [S, R/2]; y [B, S, heads D]. Gated,
         each head's query is followed by its gate.
Saves    qkv with q and k rotated, which with `overwrite` is qkv's own memory; y; and for each head and token the logarithm of its
         sum, in fp32. No scores. With weights: qkv as it came, and beside it q and k rotated, without v. By group: a copy of
         qkv's parts with q and k rotated, or q and k beside qkv with weights. Gated, y before its gate.
Bytes    forward rotates q and k (read and written once) and reads q once, k and v once for each block of queries; backward has a
         kernel for dq and one for dk and dv, each of which computes the softmax again. All gradients are written in place in one
         tensor of qkv's shape, in which those of q and k are rotated back.
Sums     in a fixed order: no atomics, and what a sequence gives does not depend on the others. With `deterministic=False`
         PyTorch's attention runs between the rotations where that is faster: cuDNN's, from Hopper on. On Hopper cuDNN's kernels
         and flash-attn-4's replace ours where they are faster, in the order that is asked for: ops/attention/choice.py.
Kernels  ops/attention/forward.py, ops/attention/backward.py, ops/attention/rope_kernels.py. By group:
         ops/attention/grouped.py. Gates: ops/attention/gate_kernels.py. Others: ops/attention/by_cudnn.py,
         ops/attention/by_flash.py, ops/attention/by_pytorch.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.vectors import contiguous_param, saved_vectors
from onepass.kernels.language import kernels_unsupported
from onepass.ops.attention.arguments import LONGEST, AttentionCall, Window, check_arguments, head_size, make_options
from onepass.ops.attention.backward import BackwardCall, attend_backward, backward_tiles, sinks_gradient
from onepass.ops.attention.by_cudnn import (
    attend_backward_by_cudnn,
    attend_backward_in_any_order,
    attend_by_cudnn,
    parts_by_cudnn,
)
from onepass.ops.attention.by_flash import attend_backward_by_flash, attend_by_flash
from onepass.ops.attention.by_pytorch import attend_by_pytorch
from onepass.ops.attention.choice import CUDNN, FLASH, PYTORCH, backward_kernels, forward_kernels, in_order, pytorch_is_faster
from onepass.ops.attention.formula import (
    TILE,
    AttentionOptions,
    Weights,
    attention_formula,
    contiguous_tokens,
    empty_tokens,
    norm_of,
    parts_of,
)
from onepass.ops.attention.forward import attend, forward_tiles, head_block, lse_size
from onepass.ops.attention.gate_kernels import gate_op, ungate
from onepass.ops.attention.grouped import (
    empty_gradients,
    empty_memory,
    kept_parts,
    parts_of_memory,
    rotate_groups,
    rotate_groups_back,
    rotated_copy,
)
from onepass.ops.attention.layout import as_readable, can_overwrite, check_overwritable, mark_overwritten
from onepass.ops.attention.rope_kernels import rotate
from onepass.ops.attention.rope_norm import weight_grads
from onepass.ops.attention.rope_norm_kernels import HeadGradients, rotate_back
from onepass.ops.attention.sharding import shard_attention
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable, product_type
from onepass.runtime.documents import tables_of_documents
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sharding import has_dtensor, run_on_shards
from onepass.runtime.sizes import shared_memory

SIZES = (16, 32, 64, 80, 96, 128, 192, 256, 512)  # of heads
MOST_DOCUMENTS = 1 << 15  # and their blocks, are programs of a grid's second dimension
_TYPES = (torch.bfloat16, torch.float16)


def attention_reference(qkv: Tensor, heads: int, groups: int | None = None, **options: Any) -> Tensor:
    """Return y by the formula, for every type, with all scores at once: fp64 inputs make it the oracle.

    options: those of `attention`. What only says how to compute y has no effect.
    """
    call = AttentionCall(qkv, heads, groups, **options)
    weights = call.q_weight, call.k_weight
    return attention_formula(qkv, call.cos, call.sin, make_options(call), call.cu_seqlens, call.sinks, weights)


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
    """Return y, the logarithm of each row's sum and, where there are tables, qkv with q and k rotated; q and k alone where they
    are normalised too. These, and by group all, are dense parts of memory (`parts_of_memory`)."""
    heads, groups = options.heads, options.groups
    readable, rotated = as_readable(qkv), None
    cu_seqlens, sinks = _contiguous(cu_seqlens), _contiguous(sinks)
    norm = None if q_weight is None or k_weight is None else norm_of(options, q_weight, k_weight)
    if options.by_group:
        rotated = empty_memory(qkv, options, norm)
        parts = parts_of_memory(rotated, qkv, options, head_size(qkv, heads, groups))
        q, k, v = rotate_groups(readable, cos, sin, parts, options, norm)
    else:
        q, k, v = parts_of(readable, *options.layout)
    if cos is not None and sin is not None and not options.by_group:
        if norm is not None:
            rotated = empty_memory(qkv, options, norm)
            into_q, into_k = parts_of_memory(rotated, qkv, options, q.shape[-1])
            q, k = rotate(cos, sin, q, k, options.interleaved, False, (into_q, into_k), norm)  # type: ignore[assignment]
        elif overwrite:
            rotate(cos, sin, q, k, options.interleaved, False, (q, k))
            mark_overwritten(readable)
            rotated = readable
        else:
            rotated = readable = rotated_copy(readable, cos, sin, options)
            q, k, v = parts_of(readable, *options.layout)
    by = forward_kernels(readable, q.shape[-1], options, cu_seqlens, sinks)
    if by in (CUDNN, PYTORCH):
        y, lse = attend_by_cudnn(q, k, v, options)
    elif by == FLASH:
        y, lse = attend_by_flash(q, k, v, options, cu_seqlens, sinks)
    else:
        y, lse = attend(q, k, v, options, cu_seqlens, sinks)
    whole: Tensor = torch.ops.aten._unsafe_view(y, [*y.shape[:2], heads * y.shape[-1]])
    return whole, lse, rotated


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _forward_fake(
    qkv: Tensor, cos: Any, sin: Any, cu_seqlens: Any, sinks: Any, q_weight: Any, k_weight: Any, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    B, S, _ = qkv.shape
    y = empty_tokens(qkv, options, options.heads * head_size(qkv, *options.layout))
    lse = qkv.new_empty(B, options.heads, lse_size(S, cu_seqlens), dtype=torch.float32)
    if options.by_group or q_weight is not None:
        return y, lse, empty_memory(qkv, options, q_weight)
    return y, lse, None if cos is None else qkv.new_empty(qkv.shape)


class AttentionKept(NamedTuple):
    """What backward has of a call, and y's gradient.

    `rotated` is qkv with q and k rotated, or qkv itself where there are no tables. With weights it is q and k alone, and qkv as
    it came is given too.
    """

    dy: Tensor
    rotated: Tensor
    y: Tensor
    lse: Tensor
    cos: Tensor | None
    sin: Tensor | None
    cu_seqlens: Tensor | None
    sinks: Tensor | None
    q_weight: Tensor | None
    k_weight: Tensor | None
    qkv: Tensor | None


def _backward(
    kept: AttentionKept,
    options: AttentionOptions,
    of_qkv: bool,
    of_sinks: bool,
    of_q_weight: bool,
    of_k_weight: bool,
    *,
    into: tuple[Tensor | None, ...] | None = None,
    keep_scratch: bool = True,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of qkv, sinks and both weights. `into`: what the weights' are added to."""
    dy, rotated, y, lse, cos, sin, cu_seqlens, sinks, q_weight, k_weight, qkv = kept
    heads = options.heads
    y = contiguous_tokens(y, options)  # as it is, unless a compiler has laid it out anew
    by_head = *y.shape[:2], heads, y.shape[-1] // heads
    whole = as_readable(rotated if qkv is None else qkv)
    of_parts = of_qkv or of_q_weight or of_k_weight
    dqkv = gradients = None
    if options.by_group or qkv is not None:
        q, k, v = kept_parts(rotated, None if qkv is None else whole, y, options)
    else:
        q, k, v = parts_of(whole, *options.layout)
    if of_parts:
        dqkv = empty_tokens(y, options, options.every * by_head[-1])
        gradients = empty_gradients(q, dqkv, options) if options.by_group else parts_of(dqkv, *options.layout)
    dy, places = as_readable(dy), gradients
    if options.gated:
        dy = ungate(dy, y, whole, dqkv if of_qkv else None, options)
    call = BackwardCall(dy.view(by_head), q, k, v, y.view(by_head), lse, options, _contiguous(cu_seqlens))
    by, dsinks = backward_kernels(y, by_head[-1], options, cu_seqlens, sinks), None
    sinks = _contiguous(sinks)
    if by == FLASH:
        every = gradients or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        dsinks = attend_backward_by_flash(call, every, sinks)
    elif by == CUDNN and gradients is not None:
        attend_backward_by_cudnn(call, gradients)
    elif by == PYTORCH and places is not None:
        gradients = attend_backward_in_any_order(call)
        places[2].copy_(gradients[2])
    else:
        attend_backward(call, gradients)
        dsinks = sinks_gradient(call, sinks) if sinks is not None and of_sinks else None
    dq_weight = dk_weight = None
    needs = HeadGradients(of_qkv, of_qkv, of_q_weight, of_k_weight)
    norm = None if q_weight is None or k_weight is None else norm_of(options, q_weight, k_weight)
    if options.by_group and gradients is not None and dqkv is not None:
        by_group = gradients[:2], dqkv, cos, sin, options, None if norm is None else (norm, whole, needs)
        dq_weight, dk_weight = rotate_groups_back(*by_group, into=into, keep_scratch=keep_scratch)
    elif cos is not None and sin is not None and gradients is not None and places is not None:
        if norm is None:
            rotate(cos, sin, *gradients[:2], options.interleaved, True, places[:2])
        else:
            raw = parts_of(whole, *options.layout)[:2], norm, options.interleaved, needs
            parts = cos, sin, gradients[:2], *raw, places[:2]
            *_, dq_weight, dk_weight = rotate_back(*parts, into=into, keep_scratch=keep_scratch)
    return dqkv if of_qkv else None, dsinks if of_sinks else None, dq_weight, dk_weight


def _backward_fake(kept: AttentionKept, options: AttentionOptions, *needs: bool) -> tuple[Tensor | None, ...]:
    y = kept.y
    dqkv = empty_tokens(y, options, y.shape[-1] // options.heads * options.every) if needs[0] else None
    others = zip((kept.sinks, kept.q_weight, kept.k_weight), needs[1:], strict=True)
    return dqkv, *(t.new_empty(t.shape) if t is not None and need else None for t, need in others)


_forward_op = Registered(
    "attention(Tensor qkv, Tensor? cos, Tensor? sin, Tensor? cu_seqlens, Tensor? sinks, Tensor? q_weight, Tensor? k_weight, "
    "AttentionOptions options) -> (Tensor, Tensor, Tensor?)",
    _forward,
    _forward_fake,
    AttentionOptions,
)
_backward_op = Registered(
    "attention_backward(AttentionKept kept, AttentionOptions options, bool of_qkv, bool of_sinks, bool of_q_weight, "
    "bool of_k_weight) -> (Tensor?, Tensor?, Tensor?, Tensor?)",
    _backward,
    _backward_fake,
    AttentionKept,
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
        y, lse, rotated = _forward_op(qkv, cos, sin, cu_seqlens, sinks, q_weight, k_weight, options, overwrite=overwrite)
        ctx.options = options
        ctx.vectors = saved_vectors(ctx, 2, q_weight, k_weight)
        kept = (qkv if rotated is None else rotated).detach()  # autograd won't save one of several views that was overwritten
        as_it_came = None if q_weight is None else qkv
        ctx.save_for_backward(kept, y, lse, cos, sin, cu_seqlens, sinks, q_weight, k_weight, as_it_came)
        return gate_op(y, qkv, options) if options.gated else y  # type: ignore[no-any-return]

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, q_weight, k_weight, qkv = ctx.saved_tensors
        needs, weights, grads = weight_grads(ctx, 4, (dy, *saved, qkv), (q_weight, k_weight))
        kept = AttentionKept(dy, *saved, *weights, qkv)  # type: ignore[call-arg]
        dqkv, dsinks, *dweights = _backward_op(kept, ctx.options, *needs, **grads.direct())
        return dqkv, dsinks, *grads.put(dweights), None, None, None, None, None


_apply = fast_apply(_AttentionFunction)


# ---- the public function: say what is wrong, choose who does it, return ----


def unsupported(
    qkv: Tensor, heads: int, groups: int | None = None, cu_seqlens: Tensor | None = None, gated: bool = False
) -> str | None:
    """Why the kernels can't take this call, or None."""
    dtype = product_type(qkv)
    if dtype not in _TYPES:
        return f"qkv is {dtype}, and the kernels take 16 bits"
    D = head_size(qkv, heads, groups, gated)
    if D not in SIZES:
        return f"heads of {D} are none of {', '.join(map(str, SIZES))}, which the kernels take; torch takes any"
    if qkv.shape[1] > LONGEST:
        return f"{qkv.shape[1]} tokens are more than {LONGEST}"
    if cu_seqlens is not None and cu_seqlens.shape[0] > MOST_DOCUMENTS:
        return f"{cu_seqlens.shape[0] - 1} documents are more than {MOST_DOCUMENTS - 1}"
    return kernels_unsupported("qkv", qkv)


def _variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    qkv, cos, normed = call.qkv, call.cos, call.q_weight is not None
    overwrite = call.overwrite and not normed and not call.by_group
    if not qkv.numel():
        return "the PyTorch formula, as there is nothing to do"
    D, options = head_size(qkv, call.heads, call.groups, call.gated), options_of(call)
    by_gates = "y times its gates' sigmoid by a kernel each way; " if call.gated else ""
    if pytorch_is_faster(qkv, D, options, call.cu_seqlens, call.sinks):
        where = " in place" if overwrite else ", out of their groups" if call.by_group else ""
        how = f"{'normalised and ' * normed}rotated by rope's kernel{where}"
        rotated = "" if cos is None else f"q and k {how}; "
        return f"{rotated}{by_gates}torch.nn.functional.scaled_dot_product_attention"
    smem, W = shared_memory(qkv.device), head_block(D)
    forward = forward_tiles(W, smem)
    dq, dk_dv = backward_tiles(D, qkv.shape[1], options, call.cu_seqlens is not None, smem)
    by_forward, by_backward = (of(qkv, D, options, call.cu_seqlens, call.sinks) for of in (forward_kernels, backward_kernels))
    names, order = {CUDNN: "by cuDNN", FLASH: "by flash-attn-4"}, f"in {'a fixed' if options.in_order else 'any'} order"
    description = f"tiles of queries x keys: forward {names.get(by_forward, f'{forward.block_m} x {forward.block_n}')}; "
    if by_backward in names:
        description += f"backward {names[by_backward]}, {order}; "
    else:
        description += f"backward {dq.block_m} x {dq.block_n} for dq, {dk_dv.block_m} x {dk_dv.block_n} for dk and dv; "
    if call.cu_seqlens is not None:
        description += "documents' tiles listed on the GPU, the longest first; "
    if call.by_group:
        how = "copied" if cos is None else f"{'normalised and ' * normed}rotated by rope's kernel"
        description += f"q and k {how} out of their groups, and back into them; "
    elif normed:
        description += "q and k normalised and rotated by rope's kernel beside qkv, and back in place; "
    elif cos is not None:
        into = "in place" if overwrite else "into a copy of qkv"
        description += f"q and k rotated by rope's kernel {into}, and back in place; "
    kept = "qkv, q and k" if normed else "qkv" if not call.by_group and (cos is None or overwrite) else "the copy"
    return description + by_gates + f"keeps {kept}, y, and a number a head and token"


def options_of(call: Call, kernels: str = "") -> AttentionOptions:
    return make_options(call, in_order(call.deterministic), kernels)


def _describe_pytorch(call: Call) -> str:
    in_place = " in place" if call.overwrite and not call.by_group else ""
    how = "normalised and rotated" if call.q_weight is not None else f"rotated{in_place}"
    rotated = "" if call.cos is None else f", after q and k are {how}"
    rotated += ", before y's gates" if call.gated else ""
    if invariant():
        return f"PyTorch's products of tiles of {TILE} queries and {TILE} keys, a document at a time{rotated}"
    if call.softcap is not None or call.sinks is not None:
        return f"the PyTorch formula, all scores of a document at once{rotated}"
    return f"torch.nn.functional.scaled_dot_product_attention{rotated}"


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
    by_group: bool = False,
    gated: bool = False,
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
        cos, sin: the tables by which q and k are rotated first, as in `rope`: ``[S, R/2]``, or ``[B, S, R/2]``. None for both
            rotates nothing. They get no gradient. With `cu_seqlens`, tables of ``[longest, R/2]`` are looked up by position in
            the document, and those of ``[1, S, R/2]`` taken as they are.
        interleaved: the pairs that are rotated are neighbours, ``(2i, 2i + 1)``; otherwise ``(i, i + R/2)``.
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
        q_weight, k_weight, eps, zero_centered_gamma: RMSNorm of each head of q and of k before they are rotated, as in `rope`.
            They need tables.
        by_group: qkv has for each group its queries, its key and its value, as Megatron-core's linear_qkv makes them. The
            rotation puts them apart, so nothing else is copied. If qkv's memory is ``[S, B, ...]``, so are the result's and
            the gradient's.
        gated: each head's query in qkv, ``[B, S, (2 heads + 2 groups) D]``, is followed by its gate, by whose sigmoid the head's
            result is multiplied, as in Qwen3-Next and Qwen3.5. The gates' gradient is written beside the others in qkv's.
        overwrite: q and k may be rotated in qkv's own memory, which saves a copy of it. Nothing else may need qkv afterwards:
            whatever autograd has saved of it raises in backward. Not for a leaf that requires grad, nor where a checkpointed
            region begins with qkv. It has no effect without tables, with weights, whose backward needs qkv as it came, by group,
            under a compiler or under a transform.
        deterministic: False lets other kernels run between our rotations where they are faster, as cuDNN's are from Hopper
            on for heads over 64 or from 2048 tokens outside of a compiled graph, and flash-attn-4's, where that is installed: the
            gradients' last bits then differ from run to run. It has no effect where `torch.use_deterministic_algorithms` is on
            or under `batch_invariant`.
        backend: ``auto``, ``triton``, ``torch``, ``cudnn``, ``flash_attn``, ``varlen_attn`` or a registered name; None leaves it
            to `use_backend` and ONEPASS_BACKEND. The kernels take bf16 and fp16 and heads of 16, 32, 64, 80, 96, 128, 192, 256
            or 512, and give calls to cuDNN's and flash-attn-4's where those are faster and as deterministic. ``torch`` is
            PyTorch's own attention, with a mask where there are documents or a window, and a formula where there is a softcap
            or sinks. The last three run the kernels that they name, or raise and say why not.

    Returns:
        ``[B, S, heads D]``, contiguous unless `by_group` says otherwise, in qkv's type (or autocast's, where that is on).
    """
    call = AttentionCall(
        qkv, heads, groups, cos, sin, interleaved, scale, causal, cu_seqlens, window, softcap, sinks, q_weight, k_weight, eps,
        zero_centered_gamma, by_group, gated, overwrite, deterministic,
    )  # fmt: skip
    if has_dtensor(qkv):
        return run_on_shards("attention", **call._asdict(), backend=backend)  # type: ignore[no-any-return]
    check_arguments(call)
    options = make_options(call, in_order(deterministic))
    chosen = choose("attention", backend, unsupported(qkv, heads, groups, cu_seqlens, gated))
    dtype = product_type(qkv)
    alone = cos is not None and q_weight is None and not by_group and qkv.numel() > 0
    overwrite = bool(overwrite) and alone and can_overwrite(qkv, cos, sin)
    if overwrite and dtype == qkv.dtype:  # otherwise the op writes over a copy
        check_overwritable(qkv)
    if chosen not in NATIVE:
        return run_other("attention", chosen, **call._asdict() | {"overwrite": overwrite})  # type: ignore[no-any-return]
    rows, weights = cast(qkv, dtype), (q_weight, k_weight)
    D = head_size(rows, *options.layout)
    other = pytorch_is_faster(rows, D, options, cu_seqlens, sinks)
    causal = options.right == 0
    if other and causal and options.gated and cos is not None and parts_by_cudnn(rows, D, D):  # the same kernels, gates in place
        other, options = False, options._replace(kernels=PYTORCH)
    if chosen == "torch" or not qkv.numel() or other:
        # on a GPU the formula's norms depend on the number of rows, where attention's kernels take no fp32 and these do
        by_kernel = chosen != "torch" or (rows.is_cuda and rows.dtype is torch.float32 and q_weight is not None and invariant())
        return attend_by_pytorch(rows, cos, sin, cu_seqlens, sinks, weights, options, overwrite, by_kernel)
    return _by_kernels(rows, cos, sin, cu_seqlens, sinks, weights, options, overwrite)


def _by_kernels(
    rows: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor | None, sinks: Tensor | None, weights: Weights,
    options: AttentionOptions, overwrite: bool,
) -> Tensor:  # fmt: skip
    if cos is not None and sin is not None:
        cos, sin = tables_of_documents(cos, sin, cu_seqlens, rows.shape[1])
    q_weight, k_weight = (contiguous_param(weight) for weight in weights)
    if needs_grad(rows, sinks, q_weight, k_weight):
        return _apply(rows, sinks, q_weight, k_weight, cos, sin, cu_seqlens, options, overwrite)  # type: ignore[no-any-return]
    arguments = rows, cos, sin, cu_seqlens, sinks, q_weight, k_weight, options
    y = _forward_op(*arguments, overwrite=overwrite)[0]
    return gate_op(y, rows, options) if options.gated else y  # type: ignore[no-any-return]


def attend_with(kernels: str, call: Call) -> Tensor:
    """Return y by the kernels of `choice.py` that are named, in both passes, of a call that they take."""
    rows, tensors = cast(call.qkv, product_type(call.qkv)), (call.cos, call.sin, call.cu_seqlens, call.sinks)
    return _by_kernels(rows, *tensors, (call.q_weight, call.k_weight), options_of(call, kernels), call.overwrite)


define_op(
    attention,
    check=check_arguments,
    unsupported=lambda call: unsupported(call.qkv, call.heads, call.groups, call.cu_seqlens, call.gated),
    variant=_variant,
    sharding=shard_attention,
    formula=_describe_pytorch,
)
