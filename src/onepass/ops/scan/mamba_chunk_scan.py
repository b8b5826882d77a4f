"""mamba_chunk_scan: the scan of Mamba 2 (SSD), a state that forgets at a head's own pace; by the best installed wheel.

Formula  for each head and token, S of [P, N]: d = clamp(softplus(dt + dt_bias)); S = exp(d A) S + d x B^T; y = S C + D x. In
         fp32, by chunks of 64 tokens (ops/scan/chunks.py).
Shapes   x [B, S, H, P], dt [B, S, H], A, D and dt_bias [H], B and C [B, S, G, N], H a multiple of G; states [B, H, P, N], or one
         for each document; y [B, S, H, P] of x's type.
Saves    its arguments.
Bytes    forward reads x, dt, B and C and writes y; but products bind.
Kernels  none of ours: those of mamba-ssm or FLA (ops/scan/by_wheels.py), whose 16-bit operands of products are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.vectors import with_fp32_grads
from onepass.kernels.language import kernels_unsupported
from onepass.ops.scan import by_wheels
from onepass.ops.scan.by_wheels import ScanGradients
from onepass.ops.scan.chunks import ScanInputs, ScanOptions, chunked_scan
from onepass.runtime.backend import NATIVE, choose, current_backend, find_op, register_backend, run_other
from onepass.runtime.batch_invariance import invariant, refuse
from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.chunks import SequenceShapes, chunk_by_chunk, run_sequences
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable
from onepass.runtime.documents import check_documents
from onepass.runtime.op import Call, Reason, Registered, define_op
from onepass.runtime.sharding import (
    WHOLE,
    Layout,
    Split,
    all_as,
    first_split,
    has_dtensor,
    run_on_shards,
    split_output,
    sum_over,
)
from onepass.runtime.wheels import TUNED, find_wheel

_Result = Tensor | tuple[Tensor, Tensor]
_NO_LIMIT = (0.0, float("inf"))
_DEFAULTS: dict[str, Any] = dict.fromkeys(("D", "dt_bias", "initial_states", "cu_seqlens")) | {
    "dt_softplus": False, "dt_limit": _NO_LIMIT, "return_final_states": False,
}  # fmt: skip


def mamba_chunk_scan_reference(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> _Result:
    """The formula, for every type, with the options of `mamba_chunk_scan`."""
    given = _DEFAULTS | options
    y, final = chunked_scan(_inputs(given | {"x": x, "dt": dt, "A": A, "B": B, "C": C}), _options(given))
    return (y, final) if given["return_final_states"] else y


# ---- registered ops, and autograd ----


def _forward_fake(inputs: ScanInputs, options: ScanOptions) -> tuple[Tensor | None, ...]:
    x, cu_seqlens = inputs.x, inputs.cu_seqlens
    B, _, H, P = x.shape
    states = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = x.new_empty(states, H, P, inputs.B.shape[-1], dtype=torch.float32) if options.final else None
    return x.new_empty(x.shape), final


_forward = Registered(
    "mamba_chunk_scan(ScanInputs inputs, ScanOptions options) -> (Tensor, Tensor?)",
    by_wheels.wheel_forward,
    _forward_fake,
    ScanInputs,
    ScanOptions,
)


def _backward_fake(
    grads: ScanGradients, inputs: ScanInputs, options: ScanOptions, need_dstates: bool
) -> tuple[Tensor | None, ...]:
    of = *inputs[:7], inputs.states if need_dstates else None
    return tuple(None if t is None else t.new_empty(t.shape) for t in of)


_backward = Registered(
    "mamba_chunk_scan_backward(ScanGradients grads, ScanInputs inputs, ScanOptions options, bool need_dstates) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor?, Tensor?, Tensor?)",
    by_wheels.wheel_backward,
    _backward_fake,
    ScanGradients,
    ScanInputs,
    ScanOptions,
)


class _ScanFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        inputs, ctx.options = ScanInputs(*given[:-1]), given[-1]
        ctx.save_for_backward(*inputs)
        y, final = _forward(inputs, ctx.options)
        return (y,) if final is None else (y, final)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor, dfinal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        grads = _backward(ScanGradients(dy, dfinal), ScanInputs(*ctx.saved_tensors), ctx.options, needs[7])
        return *(grad if need else None for grad, need in zip(grads, needs[:8], strict=True)), None, None


_apply = fast_apply(_ScanFunction)


# ---- the public function: say what is wrong, choose who does it, return ----


def _inputs(given: Mapping[str, Any]) -> ScanInputs:
    return ScanInputs(*(given[name] for name in ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial_states", "cu_seqlens")))


def _options(given: Mapping[str, Any], wheel: str = "") -> ScanOptions:
    least, most = given["dt_limit"]
    return ScanOptions(bool(given["dt_softplus"]), float(least), float(most), bool(given["return_final_states"]), wheel)


def choose_wheel(given: Mapping[str, Any], *names: str) -> tuple[str, Reason]:
    """Return the first wheel, or of these, that takes a call, or "" and why none does."""
    inputs = _inputs(given)
    refused = kernels_unsupported("x", inputs.x)
    if refused is not None:
        return "", refused
    refusals = {name: by_wheels.REFUSALS[name] for name in names or by_wheels.REFUSALS}
    return find_wheel(refusals, inputs, bool(given["return_final_states"]), needs_grad(*inputs[:8]))


def variant(call: Call) -> str:
    """Which wheel a call runs."""
    if not call.x.numel():
        return "the PyTorch formula, as there is nothing to do"
    name, _ = choose_wheel(vars(call))
    if invariant():
        return f"nothing, as {by_wheels.wheel_title(name)} can't under onepass.batch_invariant(): {TUNED}"
    waits = "; its host reads the documents' boundaries" if name == "fla" and call.cu_seqlens is not None else ""
    return by_wheels.wheel_title(name) + waits


def check_scan(given: Mapping[str, Any]) -> None:
    """Raise where an argument is wrong."""
    x, B, states = given["x"], given["B"], given["initial_states"]
    for name in ("x", "dt", "A", "B", "C"):
        check_floating(name, given[name])
    for name in ("D", "dt_bias", "initial_states"):
        if given[name] is not None:
            check_floating(name, given[name], optional=True)
    if x.dim() != 4:
        raise ValueError(f"x must have shape [B, S, H, P], but has {tuple(x.shape)}")
    if given["dt"].shape != x.shape[:3]:
        raise ValueError(f"dt must have shape {tuple(x.shape[:3])}, as x's heads, but has {tuple(given['dt'].shape)}")
    for name in ("A", "D", "dt_bias"):
        if given[name] is not None and given[name].shape != x.shape[2:3]:
            raise ValueError(f"{name} must have shape {tuple(x.shape[2:3])}, a number a head, but has {tuple(given[name].shape)}")
    groups = B.shape[2] if B.dim() == 4 else 0
    if B.dim() != 4 or B.shape[:2] != x.shape[:2] or (x.shape[2] % groups if groups else x.shape[2]) or B.shape[3] == 0:
        wanted = f"[{x.shape[0]}, {x.shape[1]}, G, N], G a divisor of x's {x.shape[2]} heads"
        raise ValueError(f"B must have shape {wanted}, but has {tuple(B.shape)}")
    if given["C"].shape != B.shape:
        raise ValueError(f"C must have B's shape {tuple(B.shape)}, but has {tuple(given['C'].shape)}")
    _check_limit(given["dt_limit"])
    documents = x.shape[0]
    if given["cu_seqlens"] is not None:
        check_documents(given["cu_seqlens"], x, tuple(x.shape[:2]), "x")
        documents = given["cu_seqlens"].shape[0] - 1
    shape = documents, x.shape[2], x.shape[3], B.shape[3]
    if states is not None and tuple(states.shape) != shape:
        raise ValueError(f"initial_states must have shape {shape}, [B or documents, H, P, N], but has {tuple(states.shape)}")
    for name in ("dt", "A", "B", "C", "D", "dt_bias", "initial_states"):
        if given[name] is not None:
            check_device(name, given[name], x, "x")


def _check_limit(limit: object) -> None:
    if not isinstance(limit, tuple | list) or len(limit) != 2:
        raise TypeError(f"dt_limit must be two numbers, the least and the largest dt, but is {limit!r}")
    for number in limit:
        check_number("dt_limit", number)
    if not limit[0] <= limit[1]:
        raise ValueError(f"dt_limit must begin with the lesser number, but is {tuple(limit)}")


def shard_scan(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Sequences are divided, or heads where each rank gets whole groups. Time is not, as states pass through it."""
    rows, vectors = ("x", "dt", "B", "C"), ("A", "D", "dt_bias")
    split = first_split(*(at[name] for name in rows), *(2 if at.get(name) == 0 else WHOLE for name in vectors))
    heads = split == 2 and given["B"].shape[2] % ranks == 0
    if not heads and (split != 0 or given["cu_seqlens"] is not None):
        split = WHOLE
    x, states = given["x"], 1 if heads else split
    of_heads = 0 if heads else WHOLE
    final: Any = WHOLE if split == WHOLE else (states, x.shape[2] if heads else x.shape[0])
    inputs = all_as(split, *rows) | all_as(of_heads, *vectors) | {"initial_states": states, "cu_seqlens": WHOLE}
    gradients = all_as(of_heads if heads else sum_over(split), *vectors)
    return Layout(inputs, gradients, [split_output(split, x), final])


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    cu_seqlens: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    backend: str | None = None,
) -> _Result:
    """The scan of Mamba 2 (SSD), by mamba-ssm's or FLA's kernels where they are installed.

    Args:
        x: ``[B, S, H, P]``, what is written into the states.
        dt: ``[B, S, H]``, each token's step: how much it writes, and how much a head forgets.
        A: ``[H]``, negative: the states keep ``exp(dt * A)``. Models hold ``A_log`` and give ``-exp(A_log)``.
        B, C: ``[B, S, G, N]``, where x is written and what is read. H is a multiple of G, whose groups each serve as many
            neighbouring heads.
        D: ``[H]``; ``D * x`` is added to y.
        dt_bias: ``[H]``, added to dt.
        dt_softplus: then softplus is taken of dt.
        dt_limit: the least and the largest dt after that.
        cu_seqlens: int32 ``[documents + 1]``, on x's device: the boundaries of documents that follow each other in one sequence,
            from 0 to S. States don't pass from one to the next. Documents may be empty. Where the boundaries are wrong, y is NaN,
            and `validate` raises.
        initial_states: ``[B, H, P, N]``, or with documents ``[documents, H, P, N]``, of any floating-point type; None: zeros.
        return_final_states: return the states after the last tokens too, in fp32.
        backend: ``auto``, ``triton``, ``torch``, ``mamba_ssm``, ``fla`` or a registered name; None leaves it to `use_backend` and
            ONEPASS_BACKEND. ``triton`` is the first installed wheel that takes the call: bf16 or fp16 on a GPU. ``auto`` takes
            the formula elsewhere.

    Returns:
        y, ``[B, S, H, P]`` of x's type; with `return_final_states` also the states, which are differentiable.
    """
    given = {
        "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit,
        "cu_seqlens": cu_seqlens, "initial_states": initial_states, "return_final_states": return_final_states,
    }  # fmt: skip
    if has_dtensor(x, dt, A, B, C, D, dt_bias, cu_seqlens, initial_states):
        return run_on_shards("mamba_chunk_scan", **given, backend=backend)  # type: ignore[no-any-return]
    check_scan(given)
    wheel, refused = "", None
    if (backend or current_backend()) != "torch":  # which need not import a wheel
        wheel, refused = choose_wheel(given)
    chosen = choose("mamba_chunk_scan", backend, refused)
    if chosen not in NATIVE:
        return run_other("mamba_chunk_scan", chosen, **given)  # type: ignore[no-any-return]
    if chosen == "torch" or x.numel() == 0:
        return _by_formula(_inputs(given), _options(given))
    return _by_wheel(_inputs(given), _options(given, wheel))


def _with_fp32_grads(inputs: ScanInputs) -> ScanInputs:
    """Let gradients of D and dt_bias come in fp32 where they have a main_grad."""
    D, dt_bias = with_fp32_grads(inputs.D, inputs.dt_bias)
    return inputs._replace(D=D, dt_bias=dt_bias)


def _by_wheel(inputs: ScanInputs, options: ScanOptions) -> _Result:
    if invariant():
        refuse(f"mamba_chunk_scan by {by_wheels.wheel_title(options.wheel)}", TUNED)
    inputs = _with_fp32_grads(inputs)
    if needs_grad(*inputs[:8]):
        y, *final = _apply(*inputs, options)
    else:
        y, *final = [t for t in _forward(inputs, options) if t is not None]
    return (y, *final) if final else y


def _by_formula(inputs: ScanInputs, options: ScanOptions) -> _Result:
    x, dt, A, B, C, D, dt_bias, states, cu_seqlens = _with_fp32_grads(inputs)

    def formula(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, first: Tensor | None, *vectors: Any) -> tuple[Tensor, Tensor]:
        A, D, dt_bias = vectors

        def rule(tokens: Sequence[Tensor], first: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
            x, dt, B, C = tokens
            return chunked_scan(ScanInputs(x, dt, A, B, C, D, dt_bias, first, cu_seqlens), options)

        return chunk_by_chunk(rule, (x, dt, B, C), first, cu_seqlens)

    shapes = SequenceShapes(x.shape, (*x.shape[2:], B.shape[3]))
    return run_sequences(formula, (x, dt, B, C), states, shapes, cu_seqlens, options.final, (A, D, dt_bias))


define_op(
    mamba_chunk_scan,
    check=lambda call: check_scan(vars(call)),
    unsupported=lambda call: choose_wheel(vars(call))[1],
    variant=variant,
    sharding=shard_scan,
    formula=lambda call: "the PyTorch formula, in chunks of 64 tokens; keeps its arguments",
)


# ---- backends of one wheel ----


def _run(name: str, *args: Any, **given: Any) -> _Result:
    named = find_op(mamba_chunk_scan).named(*args, **given)
    return _by_wheel(_inputs(named), _options(named, name))


def _refuses(name: str, *args: Any, **given: Any) -> Reason:
    return choose_wheel(find_op(mamba_chunk_scan).named(*args, **given), name)[1]


for _name in by_wheels.REFUSALS:
    register_backend("mamba_chunk_scan", _name, partial(_run, _name), partial(_refuses, _name))
