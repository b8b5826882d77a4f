"""latent_attention: DeepSeek's multi-head latent attention, from its up-projections and the part of keys that all heads share.

Formula  y = softmax(scale [q_nope | rope(q_rope)] [k_nope | rope(k_rope)]^T, each token seeing those up to itself) v, for each
         head. Rotation is in fp32, rounded once, as ops/attention/rope.py has it; attention as ops/attention/attention.py.
Shapes   q [B, S, heads, nope + rope]; kv [B, S, heads, nope + V], each head's k_nope, then its v; k_rope [B, S, rope];
         cos and sin [S, rope/2]; y [B, S, heads, V].
Saves    q, k and v as heads, q's and k's of nope + rope; y; and for each head and token the logarithm of its sum, in fp32.
         Neither q, kv nor k_rope.
Bytes    forward reads the projections and writes q, k and v, and attention reads those; backward reads the gradients of heads and
         writes those of the projections, q's in place. k_rope's gradient is summed over heads in fp32, in their order.
Sums     in a fixed order: no atomics, and what a sequence gives does not depend on the others. With `deterministic=False`
         cuDNN's attention runs on Hopper, without documents, whose backward adds dq up in any order.
Kernels  ops/attention/latent_kernels.py, and attention's: ops/attention/forward.py, ops/attention/backward.py,
         ops/attention/by_cudnn.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.language import kernels_unsupported
from onepass.ops.attention.arguments import LONGEST, check_tables_of
from onepass.ops.attention.attention import MOST_DOCUMENTS, SIZES
from onepass.ops.attention.backward import BackwardCall, attend_backward, backward_tiles
from onepass.ops.attention.by_cudnn import (
    all_by_cudnn,
    attend_backward_in_any_order,
    attend_by_cudnn,
    parts_by_cudnn,
)
from onepass.ops.attention.choice import in_order
from onepass.ops.attention.formula import AttentionOptions, Parts, attention_by_pytorch, formula_of_parts
from onepass.ops.attention.forward import attend, forward_tiles, head_block, lse_size
from onepass.ops.attention.latent_kernels import LatentGradients, LatentSizes, arrange, arrange_back, arrange_tiles
from onepass.ops.attention.layout import as_readable, is_read_by_address
from onepass.ops.attention.rope_formula import rope_formula
from onepass.ops.attention.sharding import table_split
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.dispatch import (
    cast,
    fast_apply,
    needs_grad,
    not_twice_differentiable,
    product_type,
    under_functorch,
)
from onepass.runtime.documents import check_documents, tables_of_documents
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
    Split,
    all_as,
    first_split,
    has_dtensor,
    run_on_shards,
    split_output,
)
from onepass.runtime.sizes import shared_memory
from onepass.runtime.units import counted

_TYPES = (torch.bfloat16, torch.float16)


class LatentOptions(NamedTuple):
    """What latent_attention takes besides tensors."""

    rope: int  # the width of k_rope
    interleaved: bool
    scale: float
    in_order: bool  # sums have a fixed order

    def attention(self, heads: int) -> AttentionOptions:
        return AttentionOptions(heads, heads, self.interleaved, self.scale, in_order=self.in_order)

    def sizes(self, heads: int, width: int, values: int) -> LatentSizes:
        """Return the sizes of heads, whose queries have this width."""
        return LatentSizes(heads, width - self.rope, self.rope // 2, values, self.interleaved)


def latent_attention_reference(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    deterministic: bool = True,
) -> Tensor:
    """Return y by the formula, for every type, with all scores at once: fp64 inputs make it the oracle."""
    options = _options(q, k_rope, interleaved, scale, deterministic)
    parts = _parts(q, kv, k_rope, cos, sin, cu_seqlens, options)
    return _by_formula(parts, options, cu_seqlens)


def _by_formula(parts: Parts, options: LatentOptions, cu_seqlens: Tensor | None) -> Tensor:
    H, V = parts[2].shape[2:]
    y: Tensor = formula_of_parts(parts, options.attention(H), cu_seqlens).unflatten(-1, (H, V))
    return y


def _options(q: Tensor, k_rope: Tensor, interleaved: bool, scale: float | None, deterministic: bool) -> LatentOptions:
    return LatentOptions(
        k_rope.shape[-1], bool(interleaved), float(q.shape[-1] ** -0.5 if scale is None else scale), in_order(deterministic)
    )


def _parts(
    q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor | None,
    options: LatentOptions,
) -> Parts:  # fmt: skip
    """Return q, k and v as attention takes them."""
    nope = q.shape[-1] - options.rope
    (q_nope, q_rope), (k_nope, v) = q.split((nope, options.rope), -1), kv.split((nope, kv.shape[-1] - nope), -1)
    k_rope = k_rope.unsqueeze(-2)
    if cos is not None and sin is not None:
        cos, sin = tables_of_documents(cos, sin, cu_seqlens, q.shape[1])
        q_rope, k_rope = (rope_formula(x, cos, sin, options.interleaved) for x in (q_rope, k_rope))
    shared = k_rope.expand(*k_nope.shape[:-1], options.rope)
    return torch.cat([q_nope, q_rope], -1), torch.cat([k_nope, shared], -1), v


def _by_pytorch(parts: Parts, options: LatentOptions, cu_seqlens: Tensor | None) -> Tensor:
    """Return y by PyTorch's attention; empty or transformed, by the formula.

    Its kernels on GPUs don't look at addresses, as in ops/attention/by_pytorch.py. v is a slice of kv.
    """
    q, k, v = parts
    if under_functorch() or not q.numel():
        return _by_formula(parts, options, cu_seqlens)
    H, V = v.shape[2:]
    by_address = is_read_by_address(v)
    if by_address:
        v = as_readable(v)
    missing = max(0, q.shape[-1] - V) if v.device.type == "cpu" else 0  # PyTorch's kernel for CPUs takes one width
    if missing:  # a pad of nothing is a copy
        v = F.pad(v, (0, missing))
    whole = attention_by_pytorch((q, k, v), options.attention(H), cu_seqlens)
    y: Tensor = whole.unflatten(-1, (H, V + missing))[..., :V].contiguous()
    if by_address and y.requires_grad:
        y.register_hook(lambda dy: as_readable(dy.contiguous()))
    return y


# ---- by kernels: registered ops, opaque to the compiler and visible to checkpointing ----


def _forward(
    q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor | None,
    options: LatentOptions,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return y, the logarithm of each row's sum, and q, k and v as heads."""
    heads, width = q.shape[2:]
    sizes = options.sizes(heads, width, kv.shape[3] - width + options.rope)
    parts, whole = arrange(q, kv, k_rope, cos, sin, sizes), options.attention(heads)
    if _by_cudnn(q, sizes.values, options, cu_seqlens):
        return *attend_by_cudnn(*parts, whole), *parts
    return *attend(*parts, whole, None if cu_seqlens is None else cu_seqlens.contiguous()), *parts


def _forward_fake(
    q: Tensor, kv: Tensor, k_rope: Tensor, cos: Any, sin: Any, cu_seqlens: Tensor | None, options: LatentOptions
) -> tuple[Tensor, ...]:
    B, S, H, width = q.shape
    v = q.new_empty(B, S, H, kv.shape[3] - width + options.rope)
    lse = q.new_empty(B, H, lse_size(S, cu_seqlens), dtype=torch.float32)
    return torch.empty_like(v), lse, *(q.new_empty(q.shape) for _ in range(2)), v


def _by_cudnn(q: Tensor, values: int, options: LatentOptions, cu_seqlens: Tensor | None) -> bool:
    """Whether cuDNN's attention is faster both ways, may run, and takes such heads."""
    if cu_seqlens is not None or options.in_order or invariant():
        return False
    return all_by_cudnn(q, q.shape[-1]) and parts_by_cudnn(q, q.shape[-1], values)


class LatentKept(NamedTuple):
    """What backward has of a call, and y's gradient."""

    dy: Tensor
    y: Tensor
    lse: Tensor
    q: Tensor  # as heads, like k and v
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    cu_seqlens: Tensor | None


def _backward(kept: LatentKept, options: LatentOptions, of_q: bool, of_kv: bool, of_rope: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, kv and k_rope."""
    dy, y, lse, q, k, v, cos, sin, cu_seqlens = kept
    B, S, H, width = q.shape
    sizes = options.sizes(H, width, v.shape[3])
    bounds = None if cu_seqlens is None else cu_seqlens.contiguous()
    call = BackwardCall(as_readable(dy), q, k, v, y.contiguous(), lse, options.attention(H), bounds)
    of_keys = of_kv or of_rope
    dkv = q.new_empty(B, S, H, sizes.nope + sizes.values) if of_kv else None
    if _by_cudnn(q, sizes.values, options, cu_seqlens):
        dq, dk, dv = attend_backward_in_any_order(call)
        of_heads = LatentGradients(dq if of_q else None, dk if of_keys else None, dv if of_kv else None)
    else:
        of_heads = LatentGradients(torch.empty_like(q) if of_q else None, torch.empty_like(k) if of_keys else None, None)
        in_place = torch.empty_like(v) if dkv is None and of_keys else None if dkv is None else dkv[..., sizes.nope :]
        attend_backward(call, (*of_heads[:2], in_place))
    dk_rope = q.new_empty(B, S, options.rope) if of_rope else None
    arrange_back(of_heads, cos, sin, sizes, dkv, dk_rope)
    return of_heads.dq, dkv, dk_rope


def _backward_fake(kept: LatentKept, options: LatentOptions, *needs: bool) -> tuple[Tensor | None, ...]:
    B, S, H, width = kept.q.shape
    shapes = kept.q.shape, (B, S, H, width - options.rope + kept.v.shape[3]), (B, S, options.rope)
    return tuple(kept.q.new_empty(shape) if need else None for shape, need in zip(shapes, needs, strict=True))


_forward_op = Registered(
    "latent_attention(Tensor q, Tensor kv, Tensor k_rope, Tensor? cos, Tensor? sin, Tensor? cu_seqlens, LatentOptions options) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    LatentOptions,
)
_backward_op = Registered(
    "latent_attention_backward(LatentKept kept, LatentOptions options, bool of_q, bool of_kv, bool of_rope) "
    "-> (Tensor?, Tensor?, Tensor?)",
    _backward,
    _backward_fake,
    LatentKept,
    LatentOptions,
)


# ---- autograd ----


class _LatentFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor | None, sin: Tensor | None, cu_seqlens: Tensor | None,
        options: LatentOptions,
    ) -> Tensor:  # fmt: skip
        y, *kept = _forward_op(q, kv, k_rope, cos, sin, cu_seqlens, options)
        ctx.options = options
        ctx.save_for_backward(y, *kept, cos, sin, cu_seqlens)
        return y  # type: ignore[no-any-return]

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward_op(LatentKept(dy, *ctx.saved_tensors), ctx.options, *ctx.needs_input_grad[:3])
        return *grads, None, None, None, None


_apply = fast_apply(_LatentFunction)


# ---- the public function: say what is wrong, choose who does it, return ----


def unsupported(q: Tensor, kv: Tensor, k_rope: Tensor, cu_seqlens: Tensor | None = None) -> str | None:
    """Why the kernels can't take this call, or None."""
    if product_type(q) not in _TYPES:
        return f"q is {product_type(q)}, and the kernels take 16 bits"
    width = q.shape[3]
    for name, size in (("q", width), ("v", kv.shape[3] - width + k_rope.shape[2])):
        if size not in SIZES:
            return f"{name}'s heads of {size} are none of {', '.join(map(str, SIZES))}, which the kernels take; torch takes any"
    if q.shape[1] > LONGEST:
        return f"{q.shape[1]} tokens are more than {LONGEST}"
    if cu_seqlens is not None and cu_seqlens.shape[0] > MOST_DOCUMENTS:
        return f"{cu_seqlens.shape[0] - 1} documents are more than {MOST_DOCUMENTS - 1}"
    return kernels_unsupported("q", q)


def variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    q, options = call.q, _options(call.q, call.k_rope, call.interleaved, call.scale, call.deterministic)
    if not q.numel():
        return "the PyTorch formula, as there is nothing to do"
    H, width = q.shape[2:]
    whole, sizes = options.attention(H), options.sizes(H, width, call.kv.shape[3] - width + options.rope)
    smem = shared_memory(q.device)
    tiles, forward = arrange_tiles(*sizes[:4]), forward_tiles(head_block(width), smem)
    dq, dk_dv = backward_tiles(width, q.shape[1], whole, call.cu_seqlens is not None, smem)
    by = f"tiles of queries x keys: forward {forward.block_m} x {forward.block_n}; backward {dq.block_m} x {dq.block_n} for dq, "
    by += f"{dk_dv.block_m} x {dk_dv.block_n} for dk and dv"
    if _by_cudnn(q, sizes.values, options, call.cu_seqlens):
        by = "cuDNN, backward in any order"
    tokens = counted(tiles.block_s, "token")
    return (
        f"heads arranged by a kernel each way, {tokens} and {min(tiles.block_h, H)} heads at a time; attention of "
        f"{width}/{sizes.values} by {by}; keeps q, k and v as heads, y, and a number a head and token"
    )


def check_latent_attention(given: Mapping[str, Any]) -> None:
    """Raise where an argument is wrong."""
    q, kv, k_rope, cos, sin, cu_seqlens = (given[name] for name in ("q", "kv", "k_rope", "cos", "sin", "cu_seqlens"))
    for name in ("q", "kv", "k_rope"):
        check_floating(name, given[name])
    if q.dim() != 4 or not q.shape[3]:
        raise ValueError(f"q must have shape [B, S, heads, nope + rope], but has {tuple(q.shape)}")
    B, S, H, width = q.shape
    if k_rope.dim() != 3 or k_rope.shape[:2] != (B, S) or k_rope.shape[2] % 2 or not 0 < k_rope.shape[2] < width:
        raise ValueError(
            f"k_rope must have shape [{B}, {S}, rope], rope even and less than {width}, but has {tuple(k_rope.shape)}"
        )
    nope = width - k_rope.shape[2]
    if kv.dim() != 4 or kv.shape[:3] != (B, S, H) or kv.shape[3] <= nope:
        raise ValueError(f"kv must have shape [{B}, {S}, {H}, {nope} + V], nope being q's, but has {tuple(kv.shape)}")
    for name in ("kv", "k_rope"):
        check_device(name, given[name], q, "q")
    if given["scale"] is not None:
        check_number("scale", given["scale"])
        if not 0 < given["scale"] < float("inf"):
            raise ValueError(f"scale must be finite and above 0, but is {given['scale']}")
    if cu_seqlens is not None:
        check_documents(cu_seqlens, q, (B, S), "q")
    if (cos is None) != (sin is None):
        name, other = ("sin", "cos") if sin is None else ("cos", "sin")
        raise ValueError(f"{name} must be given where {other} is, but is None")
    if cos is not None:
        check_tables_of(cos, sin, cu_seqlens, q, (B, S), k_rope.shape[2], "q")
        if 2 * cos.shape[-1] != k_rope.shape[2]:
            raise ValueError(f"cos must have {k_rope.shape[2] // 2} numbers a token, one for each pair, but has {cos.shape[-1]}")


def shard_latent_attention(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Sequences are divided, or heads of q and kv where each rank gets as many, which share k_rope."""
    q = given["q"]
    split = first_split(at["q"], at["kv"], at["k_rope"] if at["k_rope"] == 0 else WHOLE)
    heads = split == 2 and q.shape[2] % ranks == 0
    if not heads and (split != 0 or given["cu_seqlens"] is not None):
        split = WHOLE
    rows = WHOLE if heads else split
    inputs = all_as(split, "q", "kv") | {"k_rope": rows, "cu_seqlens": WHOLE}
    inputs |= {name: table_split(given[name], rows, 1) for name in ("cos", "sin")}
    return Layout(inputs, all_as(PARTIAL, "k_rope") if heads else {}, split_output(split, q))


def latent_attention(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    deterministic: bool = True,
    backend: str | None = None,
) -> Tensor:
    """DeepSeek's multi-head latent attention, causal, of heads that share the rotated part of their keys.

    Args:
        q: ``[B, S, heads, nope + rope]``, as the queries' up-projection gives them.
        kv: ``[B, S, heads, nope + V]``, as that of keys and values does: each head's key without positions, then its value.
        k_rope: ``[B, S, rope]``, the part of keys that positions rotate, the same for all heads. A slice of the down-projection
            is read where it lies.
        cos, sin: the tables by which that part of q and of k is rotated, as in `rope`: ``[S, rope/2]``, or ``[B, S, rope/2]``.
            None for both rotates nothing. They get no gradient. With `cu_seqlens`, tables of ``[longest, rope/2]`` are looked up
            by position in the document, and those of ``[1, S, rope/2]`` taken as they are.
        interleaved: the pairs that are rotated are neighbours, ``(2i, 2i + 1)``, as in DeepSeek's weights; otherwise
            ``(i, i + rope/2)``. DeepSeek's code also reorders them, in q and k alike, which changes no score.
        scale: of the scores, above 0; None means ``(nope + rope) ** -0.5``.
        cu_seqlens: int32 ``[documents + 1]``, on q's device: the boundaries of documents that follow each other in a q of
            ``[1, S, ...]``, from 0 to S, as in `attention`. A query sees its own document only, whose result has the bits that it
            would have as the only one. Where they are wrong, all results are NaN, and `validate` raises.
        deterministic: False lets cuDNN's attention run on Hopper, without documents, which is faster: the gradients' last
            bits then differ from run to run. It has no effect where `torch.use_deterministic_algorithms` is on or under
            `batch_invariant`.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. The
            kernels take bf16 and fp16, and nope + rope and V of 16, 32, 64, 80, 96, 128, 192, 256 or 512. ``torch`` is PyTorch's
            attention, with a mask where there are documents.

    Returns:
        ``[B, S, heads, V]``, contiguous, in q's type (or autocast's, where that is on).
    """
    given = {
        "q": q, "kv": kv, "k_rope": k_rope, "cos": cos, "sin": sin, "interleaved": interleaved, "scale": scale,
        "cu_seqlens": cu_seqlens, "deterministic": deterministic,
    }  # fmt: skip
    if has_dtensor(q, kv, k_rope):
        return run_on_shards("latent_attention", **given, backend=backend)  # type: ignore[no-any-return]
    check_latent_attention(given)
    chosen = choose("latent_attention", backend, unsupported(q, kv, k_rope, cu_seqlens))
    if chosen not in NATIVE:
        return run_other("latent_attention", chosen, **given)  # type: ignore[no-any-return]
    dtype, options = product_type(q), _options(q, k_rope, interleaved, scale, deterministic)
    q, kv, k_rope = (cast(x, dtype) for x in (q, kv, k_rope))
    if chosen == "torch" or not q.numel():
        return _by_pytorch(_parts(q, kv, k_rope, cos, sin, cu_seqlens, options), options, cu_seqlens)
    if cos is not None and sin is not None:
        cos, sin = tables_of_documents(cos, sin, cu_seqlens, q.shape[1])
    arguments = q, kv, k_rope, cos, sin, cu_seqlens, options
    if needs_grad(q, kv, k_rope):
        return _apply(*arguments)  # type: ignore[no-any-return]
    return _forward_op(*arguments)[0]  # type: ignore[no-any-return]


define_op(
    latent_attention,
    check=lambda call: check_latent_attention(vars(call)),
    unsupported=lambda call: unsupported(call.q, call.kv, call.k_rope, call.cu_seqlens),
    variant=variant,
    sharding=shard_latent_attention,
    formula=lambda _: "torch.nn.functional.scaled_dot_product_attention, after q and k are rotated and joined",
)
