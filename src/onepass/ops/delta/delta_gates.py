"""delta_gates: the two gates of a gated delta rule from their projections, as hybrid layers have them.

Formula  g = -exp(a_log) * softplus(a + dt_bias), the logarithm of a head's decay; beta = sigmoid(b), how much a head writes.
         fp32 all the way; beta is rounded once.
Shapes   a and b [..., H], or [..., G, H / G] as they lie in one projection of both; a_log and dt_bias [H].
         g fp32 of a's shape, beta of b's shape and type, both contiguous.
Saves    a, b, a_log and dt_bias.
Bytes    forward reads a and b and writes g and beta; backward reads dg, dbeta, a and b and writes da and db. The gradients of
         a_log and dt_bias in the same pass.
Kernels  ops/delta/gate_kernels.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.main_grad import grad_requests
from onepass.gradients.places import place_of
from onepass.gradients.vectors import contiguous_param, saved_vectors, vector_grads, with_fp32_grads
from onepass.kernels.language import kernels_unsupported
from onepass.ops.delta import gate_kernels as kernels
from onepass.ops.delta.gate_kernels import GateOptions, GatesKept
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_device, check_floating
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable
from onepass.runtime.formula import run_formula
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sharding import (
    WHOLE,
    Layout,
    Split,
    all_as,
    first_split,
    has_dtensor,
    leading_split,
    run_on_shards,
    split_output,
    sum_over,
)

_TYPES = (torch.bfloat16, torch.float32, torch.float16)


def delta_gates_reference(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The formula, for every type."""
    heads = a.shape[-_dims(a, a_log.numel()) :]
    g, beta = _formula(a, a_log.reshape(heads), dt_bias.reshape(heads), b)
    return g, beta


def _formula(a: Tensor, a_log: Tensor, dt_bias: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(a.dtype, torch.float32)
    g = -a_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide))
    return g, cast(b.to(torch.promote_types(b.dtype, torch.float32)).sigmoid(), b.dtype)


def _dims(a: Tensor, H: int) -> int:
    """Return how many of a's last dimensions have its H heads."""
    return 1 if a.shape[-1] == H else 2


# ---- registered ops, and autograd ----


def _forward_fake(a: Tensor, b: Tensor, a_log: Any, dt_bias: Any, options: GateOptions) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)


_forward = Registered(
    "delta_gates(Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, GateOptions options) -> (Tensor, Tensor)",
    kernels.gates_forward,
    _forward_fake,
    GateOptions,
)


def _backward_fake(kept: GatesKept, options: GateOptions, *needs: bool) -> tuple[Tensor | None, ...]:
    return tuple(t.new_empty(t.shape) if need else None for t, need in zip(kept[2:], needs, strict=True))


_backward = Registered(
    "delta_gates_backward(GatesKept kept, GateOptions options, bool need_da, bool need_db, bool need_da_log, "
    "bool need_ddt_bias) -> (Tensor?, Tensor?, Tensor?, Tensor?)",
    kernels.gates_backward,
    _backward_fake,
    GatesKept,
    GateOptions,
    dispatched=partial(kernels.gates_backward, keep_scratch=False),
)


class _GatesFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, options: GateOptions) -> Any:
        ctx.options, ctx.places = options, (place_of(a), place_of(b))
        ctx.vectors = saved_vectors(ctx, 2, a_log, dt_bias)
        ctx.save_for_backward(a, b, a_log, dt_bias)
        return _forward(a, b, a_log, dt_bias, options)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dg: Tensor, dbeta: Tensor) -> tuple[Tensor | None, ...]:
        a, b, a_log, dt_bias = ctx.saved_tensors
        need_da, need_db, *needs = ctx.needs_input_grad[:4]
        grads = None if ctx.vectors is None else vector_grads(ctx.vectors, grad_requests(ctx, 4)[2:])
        into, direct = None, {"places": ctx.places}
        kept = GatesKept(dg, dbeta, a, b, a_log, dt_bias)
        if grads is not None:
            needs = list(grads.needed())
            into = grads.into(*kept)
            if into is not None:
                direct["into"] = into.tensors
            else:
                a_log, dt_bias = grads.wide(a_log, dt_bias)
                kept = kept._replace(a_log=a_log, dt_bias=dt_bias)  # type: ignore[arg-type]
        da, db, *found = _backward(kept, ctx.options, need_da, need_db, *needs, **direct)
        return da, db, *(found if grads is None else grads.put(into, *found)), None


_apply = fast_apply(_GatesFunction)


# ---- the public function: say what is wrong, choose who does it, return ----


def unsupported(a: Tensor, b: Tensor, a_log: Tensor) -> str | None:
    """Why the kernels can't take this call, or None."""
    for name, t in (("a", a), ("b", b)):
        if t.dtype not in _TYPES:
            return f"{name} is {t.dtype}"
    if a_log.numel() > kernels.MOST_HEADS:
        return f"{a_log.numel()} heads are more than {kernels.MOST_HEADS}"
    return kernels_unsupported("a", a)


def variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    if not call.a.numel():
        return "the PyTorch formula, as there is nothing to do"
    H = call.a_log.numel()
    tiles = kernels.gate_tiles(H)
    rows = kernels.strip_rows(call.a.numel() // H, tiles, call.a.device)
    return f"forward with {tiles.block_m} rows a program; backward with {rows}, {tiles.block_m} a turn; keeps a and b"


def check_gates(given: Mapping[str, Any]) -> None:
    """Raise where an argument is wrong."""
    a, b = given["a"], given["b"]
    for name, t in given.items():
        check_floating(name, t)
    if not a.shape:
        raise ValueError("a must have shape [..., H], of H heads, or [..., G, H / G], but is a number")
    if b.shape != a.shape:
        raise ValueError(f"b must have a's shape {tuple(a.shape)}, but has {tuple(b.shape)}")
    allowed = dict.fromkeys((a.shape[-1:].numel(), a.shape[-2:].numel()))
    for name in ("a_log", "dt_bias"):
        shape = tuple(given[name].shape)
        if len(shape) != 1 or shape[0] not in allowed:
            shapes = " or ".join(f"({size},)" for size in allowed)
            raise ValueError(f"{name} must have shape {shapes}, a number for each of a's heads, but has {shape}")
        allowed = dict.fromkeys(shape)  # the second has the first's
    for name in ("b", "a_log", "dt_bias"):
        check_device(name, given[name], a, "a")


def shard_gates(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided, or heads where each rank gets as many. Heads divided, a_log and dt_bias are too."""
    a, vectors = given["a"], ("a_log", "dt_bias")
    last = _dims(a, given["a_log"].numel())
    split = first_split(at["a"], at["b"])
    heads = a.dim() - last
    if split == heads and a.shape[heads] % ranks == 0:
        inputs, gradients = all_as(0, *vectors), {}
    else:
        split = leading_split(split, a, last)
        inputs, gradients = all_as(WHOLE, *vectors), all_as(sum_over(split), *vectors)
    return Layout(all_as(split, "a", "b") | inputs, gradients, split_output(split, a))


def delta_gates(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gates of a gated delta rule, ``-exp(a_log) * softplus(a + dt_bias)`` and ``sigmoid(b)``; one kernel each way.

    Args:
        a: ``[..., H]``, what heads forget, before its bias; of any floating-point type.
        b: how much heads write, before the sigmoid; of a's shape and any floating-point type. a and b may be slices of a
            projection: evenly spaced rows are read where they lie. Where a projection has groups of heads of both in turn,
            as Qwen3-Next's does, give views ``[..., G, H / G]``:
            ``b, a = projected.unflatten(-1, (G, -1)).chunk(2, -1)``.
        a_log: ``[H]``, the logarithm of each head's rate, of any floating-point type.
        dt_bias: ``[H]``, of any floating-point type.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. The
            kernels take up to 4096 heads.

    Returns:
        g, the logarithm of the decay, fp32 (fp64 of fp64) and of a's shape; and beta, of b's shape and type. Both are contiguous:
        of groups, ``g.flatten(-2)`` is ``[..., H]`` without a copy. Arithmetic is in fp32.
    """
    given = {"a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}
    if has_dtensor(a, b, a_log, dt_bias):
        return run_on_shards("delta_gates", **given, backend=backend)  # type: ignore[no-any-return]
    check_gates(given)
    chosen = choose("delta_gates", backend, unsupported(a, b, a_log))
    if chosen not in NATIVE:
        return run_other("delta_gates", chosen, **given)  # type: ignore[no-any-return]
    H = a_log.shape[0]
    if chosen == "torch" or a.numel() == 0:
        last = _dims(a, H)
        rows = (a, b) if last == 1 else (a.flatten(-2), b.flatten(-2))
        g, beta = run_formula(_formula, "input", rows[0], shared=with_fp32_grads(a_log, dt_bias), per_row=rows[1:])
        return g.view(a.shape), beta.view(b.shape)
    options = GateOptions(H, a.shape[-1])
    a_log, dt_bias = contiguous_param(a_log), contiguous_param(dt_bias)  # type: ignore[assignment]
    if not needs_grad(a, b, a_log, dt_bias):
        return _forward(a, b, a_log, dt_bias, options)  # type: ignore[no-any-return]
    return _apply(a, b, a_log, dt_bias, options)  # type: ignore[no-any-return]


define_op(
    delta_gates,
    check=lambda call: check_gates(vars(call)),
    unsupported=lambda call: unsupported(call.a, call.b, call.a_log),
    variant=variant,
    sharding=shard_gates,
)
