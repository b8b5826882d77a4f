"""gated_delta_rule: linear attention whose state forgets and is corrected, as hybrid layers have it; by the best installed wheel.

Formula  for each head and token, S of [K, V]: S = exp(g) S; d = beta (v - k S); S = S + k^T d; y = scale q S. fp32, by chunks of
         64 tokens (ops/delta/chunks.py).
Shapes   q and k [B, S, Hk, K], v [B, S, H, V], g and beta [B, S, H], H a multiple of Hk; states [B, H, K, V], or one for each
         document; y [B, S, H, V] of q's type.
Saves    q, k, v, beta, g's sums and each chunk's inverse, 64 numbers a token and head. The formula: its arguments.
Bytes    forward reads q, k, v, g and beta and writes y; but products bind.
Kernels  none of ours: those of FlashQLA or FLA (ops/delta/by_wheels.py), whose 16-bit operands of products are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.language import kernels_unsupported
from onepass.ops.delta import by_wheels
from onepass.ops.delta.by_wheels import DeltaInputs, DeltaKept, DeltaOptions
from onepass.ops.delta.chunks import chunked_delta_rule
from onepass.runtime.backend import NATIVE, choose, current_backend, find_op, register_backend, run_other
from onepass.runtime.batch_invariance import invariant, refuse
from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.chunks import SequenceShapes, chunk_by_chunk, run_sequences
from onepass.runtime.dispatch import cast, fast_apply, needs_grad, not_twice_differentiable
from onepass.runtime.documents import check_documents
from onepass.runtime.op import Call, Reason, Registered, define_op
from onepass.runtime.sharding import WHOLE, Layout, Split, all_as, first_split, has_dtensor, run_on_shards, split_output
from onepass.runtime.wheels import TUNED, find_wheel

_Result = Tensor | tuple[Tensor, Tensor]


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> _Result:
    """The formula, for every type."""
    y, final = chunked_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, _scale(k, scale))
    return (y, final) if output_final_state else y


def _scale(k: Tensor, scale: float | None) -> float:
    return float(k.shape[-1] ** -0.5 if scale is None else scale)


# ---- registered ops, and autograd ----


def _forward_fake(inputs: DeltaInputs, options: DeltaOptions) -> tuple[Tensor | None, ...]:
    q, k, v, g, _, _, cu_seqlens = inputs
    B, S, H, V = v.shape
    states = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = v.new_empty(states, H, k.shape[-1], V, dtype=torch.float32) if options.final else None
    return q.new_empty(v.shape), final, g.new_empty(g.shape, dtype=torch.float32), q.new_empty(B, S, H, by_wheels.CHUNK)


_forward = Registered(
    "gated_delta_rule(DeltaInputs inputs, DeltaOptions options) -> (Tensor, Tensor?, Tensor, Tensor)",
    by_wheels.wheel_forward,
    _forward_fake,
    DeltaInputs,
    DeltaOptions,
)


def _backward_fake(kept: DeltaKept, options: DeltaOptions, need_dstate: bool) -> tuple[Tensor | None, ...]:
    grads = (kept.q, kept.k, kept.v, kept.sums, kept.beta, kept.state if need_dstate else None)
    return tuple(None if t is None else t.new_empty(t.shape) for t in grads)


_backward = Registered(
    "gated_delta_rule_backward(DeltaKept kept, DeltaOptions options, bool need_dstate) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor?)",
    by_wheels.wheel_backward,
    _backward_fake,
    DeltaKept,
    DeltaOptions,
)


class _DeltaFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, cu_seqlens: Tensor | None,
        options: DeltaOptions,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.options, ctx.of_g = options, g.dtype
        y, final, sums, system = _forward(DeltaInputs(q, k, v, g, beta, state, cu_seqlens), options)
        ctx.save_for_backward(q, k, v, sums, beta, system, state, cu_seqlens)
        return (y,) if final is None else (y, final)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        dq, dk, dv, dg, dbeta, dstate = _backward(DeltaKept(dy, dfinal, *ctx.saved_tensors), ctx.options, needs[5])
        grads = dq, dk, dv, cast(dg, ctx.of_g), dbeta, dstate
        return *(grad if need else None for grad, need in zip(grads, needs[:6], strict=True)), None, None


_apply = fast_apply(_DeltaFunction)


# ---- the public function: say what is wrong, choose who does it, return ----


def _inputs(given: Mapping[str, Any]) -> DeltaInputs:
    return DeltaInputs(*(given[name] for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")))


def choose_wheel(inputs: DeltaInputs, *names: str) -> tuple[str, Reason]:
    """Return the first wheel, or of these, that takes a call, or "" and why none does."""
    refused = kernels_unsupported("q", inputs.q)
    if refused is not None:
        return "", refused
    refusals = {name: by_wheels.REFUSALS[name] for name in names or by_wheels.REFUSALS}
    return find_wheel(refusals, inputs, needs_grad(*inputs[:6]))


def variant(call: Call) -> str:
    """Which wheel a call runs."""
    if not call.v.numel():
        return "the PyTorch formula, as there is nothing to do"
    name, _ = choose_wheel(_inputs(vars(call)))
    if invariant():
        return f"nothing, as {by_wheels.wheel_title(name)} can't under onepass.batch_invariant(): {TUNED}"
    waits = "" if call.cu_seqlens is None else "; its host reads the documents' boundaries"
    return f"{by_wheels.wheel_title(name)}'s kernels, in chunks of {by_wheels.CHUNK} tokens{waits}"


def check_delta_rule(given: Mapping[str, Any]) -> None:
    """Raise where an argument is wrong."""
    q, k, v, state = given["q"], given["k"], given["v"], given["initial_state"]
    for name in ("q", "k", "v", "g", "beta"):
        check_floating(name, given[name])
    if q.dim() != 4 or q.shape[3] == 0:
        raise ValueError(f"q must have shape [B, S, heads, K], but has {tuple(q.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {tuple(q.shape)}, but has {tuple(k.shape)}")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or (v.shape[2] % q.shape[2] if q.shape[2] else v.shape[2]):
        heads = f"[{q.shape[0]}, {q.shape[1]}, H, V], H a multiple of q's {q.shape[2]} heads"
        raise ValueError(f"v must have shape {heads}, but has {tuple(v.shape)}")
    for name in ("g", "beta"):
        if given[name].shape != v.shape[:3]:
            raise ValueError(f"{name} must have shape {tuple(v.shape[:3])}, as v's heads, but has {tuple(given[name].shape)}")
    if given["scale"] is not None:
        check_number("scale", given["scale"])
    documents = q.shape[0]
    if given["cu_seqlens"] is not None:
        check_documents(given["cu_seqlens"], q, tuple(q.shape[:2]), "q")
        documents = given["cu_seqlens"].shape[0] - 1
    if state is not None:
        check_floating("initial_state", state, optional=True)
        shape = documents, v.shape[2], k.shape[3], v.shape[3]
        if tuple(state.shape) != shape:
            raise ValueError(f"initial_state must have shape {shape}, [B or documents, H, K, V], but has {tuple(state.shape)}")
    for name in ("k", "v", "g", "beta", "initial_state"):
        if given[name] is not None:
            check_device(name, given[name], q, "q")


def shard_delta_rule(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Sequences are divided, or heads where each rank gets whole ones of q and k. Time is not, as a state passes through it."""
    names = ("q", "k", "v", "g", "beta")
    split = first_split(*(at[name] for name in names))
    heads = split == 2 and given["q"].shape[2] % ranks == 0
    if not heads and (split != 0 or given["cu_seqlens"] is not None):
        split = WHOLE
    v, states = given["v"], 1 if heads else split
    final: Any = WHOLE if split == WHOLE else (states, v.shape[2] if heads else v.shape[0])
    inputs = all_as(split, *names) | {"initial_state": states, "cu_seqlens": WHOLE}
    return Layout(inputs, {}, [split_output(split, v), final])


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    backend: str | None = None,
) -> _Result:
    """The gated delta rule of Qwen3-Next and Qwen3.5, by FlashQLA's or FLA's kernels where they are installed.

    Args:
        q, k: ``[B, S, Hk, K]``, normalised already, as `causal_conv1d` returns them with ``l2_norm``.
        v: ``[B, S, H, V]``; H a multiple of Hk, whose heads each serve as many neighbours of v's.
        g: ``[B, S, H]``, the logarithm of what a head keeps of its state, as `delta_gates` returns it.
        beta: ``[B, S, H]``, how much it writes.
        scale: of q; None: ``K ** -0.5``.
        cu_seqlens: int32 ``[documents + 1]``, on q's device: the boundaries of documents that follow each other in one sequence,
            from 0 to S. States don't pass from one to the next. Documents may be empty. Where the boundaries are wrong, y is NaN,
            and `validate` raises.
        initial_state: ``[B, H, K, V]``, or with documents ``[documents, H, K, V]``, of any floating-point type; None: zeros.
        output_final_state: return the states after the last tokens too, in fp32.
        backend: ``auto``, ``triton``, ``torch``, ``fla``, ``flash_qla`` or a registered name; None leaves it to `use_backend` and
            ONEPASS_BACKEND. ``triton`` is the first installed wheel that takes the call: bf16 or fp16 on a GPU. ``auto`` takes
            the formula elsewhere.

    Returns:
        y, ``[B, S, H, V]`` of q's type; with `output_final_state` also the states, which are differentiable.
    """
    given = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale, "cu_seqlens": cu_seqlens, "initial_state": initial_state,
        "output_final_state": output_final_state,
    }  # fmt: skip
    if has_dtensor(q, k, v, g, beta, cu_seqlens, initial_state):
        return run_on_shards("gated_delta_rule", **given, backend=backend)  # type: ignore[no-any-return]
    check_delta_rule(given)
    inputs, wheel, refused = _inputs(given), "", None
    if (backend or current_backend()) != "torch":  # which need not import a wheel
        wheel, refused = choose_wheel(inputs)
    chosen = choose("gated_delta_rule", backend, refused)
    if chosen not in NATIVE:
        return run_other("gated_delta_rule", chosen, **given)  # type: ignore[no-any-return]
    if chosen == "torch" or v.numel() == 0:
        return _by_formula(inputs, _scale(k, scale), output_final_state)
    return _by_wheel(inputs, DeltaOptions(_scale(k, scale), bool(output_final_state), wheel))


def _by_wheel(inputs: DeltaInputs, options: DeltaOptions) -> _Result:
    if invariant():
        refuse(f"gated_delta_rule by {by_wheels.wheel_title(options.wheel)}", TUNED)
    if needs_grad(*inputs[:6]):
        y, *final = _apply(*inputs, options)
    else:
        y, *final = [t for t in _forward(inputs, options)[:2] if t is not None]
    return (y, *final) if final else y


def _by_formula(inputs: DeltaInputs, scale: float, final: bool) -> _Result:
    q, k, v, g, beta, state, cu_seqlens = inputs

    def formula(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        return chunk_by_chunk(rule, (q, k, v, g, beta), first, cu_seqlens)

    def rule(tokens: Sequence[Tensor], first: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return chunked_delta_rule(*tokens, first, cu_seqlens, scale)  # type: ignore[call-arg, arg-type]

    shapes = SequenceShapes(v.shape, (v.shape[2], k.shape[3], v.shape[3]))
    return run_sequences(formula, (q, k, v, g, beta), state, shapes, cu_seqlens, final)


define_op(
    gated_delta_rule,
    check=lambda call: check_delta_rule(vars(call)),
    unsupported=lambda call: choose_wheel(_inputs(vars(call)))[1],
    variant=variant,
    sharding=shard_delta_rule,
    formula=lambda call: "the PyTorch formula, in chunks of 64 tokens; keeps its arguments",
)


# ---- backends of one wheel ----


def _run(name: str, *args: Any, **given: Any) -> _Result:
    named = find_op(gated_delta_rule).named(*args, **given)
    return _by_wheel(_inputs(named), DeltaOptions(_scale(named["k"], named["scale"]), bool(named["output_final_state"]), name))


def _refuses(name: str, *args: Any, **given: Any) -> Reason:
    return choose_wheel(_inputs(find_op(gated_delta_rule).named(*args, **given)), name)[1]


for _name in by_wheels.REFUSALS:
    register_backend("gated_delta_rule", _name, partial(_run, _name), partial(_refuses, _name))
