"""gated_norm: gated_rms_norm, RMSNorm and a gate in one kernel, as state-space and linear-attention layers end.

Formula  y = x / sqrt(mean(x^2) + eps) * weight * act(z), or with norm_before_gate=False, for h = x * act(z),
         y = h / sqrt(mean(h^2) + eps) * weight. act is SiLU or the sigmoid. The mean is over the last dimension, or over each
         group of group_size columns. zero_centered_gamma: weight + 1 in the place of weight. fp32 all the way, y rounded once.
Shapes   x and z [..., H], weight [H], y x's shape and type. Rows, or groups, of up to 8192 columns by the kernels.
Saves    x, z and weight: 1 / the root is found again with the sums that backward needs anyway.
Bytes    forward reads x and z and writes y; backward reads dy, x and z and writes dx and dz. dweight in the same pass.
Kernels  ops/norm/gated_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.gradients.main_grad import grad_requests
from onepass.gradients.places import Place, place_of
from onepass.gradients.vectors import KernelTargets, VectorGrads, contiguous_param, saved_vectors, vector_grads, with_fp32_grads
from onepass.kernels.language import triton_unsupported
from onepass.kernels.layout import groups_of
from onepass.ops.norm import gated_kernels as kernels
from onepass.ops.norm.formula import norm_formula
from onepass.ops.norm.gated_kernels import GatedNormOptions
from onepass.ops.norm.kernels import TYPES
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.checks import check_device, check_floating, check_norm, check_same_shape, check_vector
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable, under_functorch
from onepass.runtime.formula import run_formula
from onepass.runtime.op import Call, Registered, define_op
from onepass.runtime.sharding import Layout, Split, by_rows, has_dtensor, run_on_shards

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


def gated_rms_norm_reference(
    x: Tensor,
    z: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    zero_centered_gamma: bool = False,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Tensor:
    """The formula, for every type."""
    options = gated_options(x.shape[-1], eps, zero_centered_gamma, activation, norm_before_gate, group_size)
    return gated_formula(x, weight, z, options)


def gated_options(
    width: int, eps: float, zero_centered_gamma: bool, activation: str, norm_before_gate: bool, group_size: int | None
) -> GatedNormOptions:
    """Return the options of rows of this width."""
    groups = 1 if group_size is None else width // group_size
    return GatedNormOptions(float(eps), bool(zero_centered_gamma), activation, bool(norm_before_gate), groups)


def gated_formula(
    x: Tensor, weight: Tensor | None, z: Tensor, options: GatedNormOptions, dtype: torch.dtype | None = None
) -> Tensor:  # fmt: skip
    """Return y, rounded to x's type or to `dtype`."""
    eps, centered, activation, norm_first, groups = options
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = _GATES[activation](z.to(wide))
    h = x.to(wide) if norm_first else x.to(wide) * gate
    h = h.unflatten(-1, (groups, x.shape[-1] // groups))
    y = norm_formula(h, None, None, layer=False, eps=eps).flatten(-2)
    if weight is not None:
        y = y * (weight.to(wide) + 1.0 if centered else weight.to(wide))
    return (y * gate if norm_first else y).to(dtype or x.dtype)


# ---- registered ops, and autograd ----

gated_forward = Registered(
    "gated_rms_norm(Tensor x, Tensor z, Tensor? weight, GatedNormOptions options) -> Tensor",
    kernels.gated_forward,
    lambda x, z, weight, options: x.new_empty(x.shape),
    GatedNormOptions,
)


def _backward_fake(
    dy: Tensor, x: Tensor, z: Tensor, weight: Any, options: GatedNormOptions, *needs: bool
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return tuple(t.new_empty(t.shape) if need else None for t, need in zip((x, z, weight, dy), needs, strict=True))


gated_backward = Registered(
    "gated_rms_norm_backward(Tensor dy, Tensor x, Tensor z, Tensor? weight, GatedNormOptions options, bool need_dx, "
    "bool need_dz, bool need_dweight, bool rebuild) -> (Tensor?, Tensor?, Tensor?, Tensor?)",
    kernels.gated_backward,
    _backward_fake,
    GatedNormOptions,
    dispatched=partial(kernels.gated_backward, keep_scratch=False),
)


def gated_backward_into(
    grads: VectorGrads | None, dy: Tensor, x: Tensor, z: Tensor, weight: Tensor | None, options: GatedNormOptions, *needs: bool,
    into_dy: bool = False, place: Place | None = None,
) -> tuple[KernelTargets | None, tuple[Tensor | None, ...]]:  # fmt: skip
    """Return what the kernel added to, and what `gated_backward` returns. `place`: dz's."""
    direct: dict[str, Any] = {"into_dy": into_dy, "place": place}
    into = None if grads is None else grads.into(dy, x, z, weight)
    if into is not None:
        direct["into"] = into.tensors
    elif grads is not None:
        (weight,) = grads.wide(weight)
    return into, gated_backward(dy, x, z, weight, options, *needs, **direct)


class _GatedNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor | None, options: GatedNormOptions) -> Any:
        ctx.options, ctx.place = options, place_of(z)
        ctx.vectors = saved_vectors(ctx, 2, weight)
        ctx.save_for_backward(x, z, weight)
        return gated_forward(x, z, weight, options)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        need_dx, need_dz, need_dweight = ctx.needs_input_grad[:3]
        grads = None if ctx.vectors is None else vector_grads(ctx.vectors, grad_requests(ctx, 3)[2:])
        if grads is not None:
            (need_dweight,) = grads.needed()
        needs = need_dx, need_dz, need_dweight, False
        into, (dx, dz, dweight, _) = gated_backward_into(grads, dy, x, z, weight, ctx.options, *needs, place=ctx.place)
        return dx, dz, *([dweight] if grads is None else grads.put(into, dweight)), None


_apply = fast_apply(_GatedNormFunction)


# ---- the public function: say what is wrong, choose who does it, return ----


def unsupported(x: Tensor, group_size: int | None) -> str | None:
    """Why the kernels can't take this call, or None."""
    if x.dtype not in TYPES:
        return f"x is {x.dtype}"
    if under_functorch():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    width = x.shape[-1] if group_size is None else group_size
    if width > kernels.WIDEST:
        return f"{'rows' if group_size is None else 'groups'} of {width} are longer than {kernels.WIDEST}"
    return triton_unsupported(x)


def variant(call: Call) -> str:
    """Which kernels a call runs, and their tiles."""
    x, z = call.x, call.z
    if not x.numel():
        return "the PyTorch formula, as there is nothing to do"
    given = call.eps, call.zero_centered_gamma, call.activation, call.norm_before_gate, call.group_size
    options = gated_options(x.shape[-1], *given)
    H = x.shape[-1] // options.groups
    rows = "groups" if options.groups > 1 else "rows"
    ahead, back = kernels.gated_forward_tiles(H, x.element_size()), kernels.backward_tiles_for(x, z, options)
    description = f"forward with {ahead.block_m} {rows} a program, in registers; backward with {back.block_m} at a time"
    if call.weight is not None and call.weight.requires_grad:
        description += f", {back.resident} programs a multiprocessor, the next {back.stages - 1} turns' {rows} on their way"
    else:
        description += ", as many programs as that takes"
    copied = [name for name, t in (("x", x), ("z", z)) if not t.is_contiguous() and groups_of(t, True) is None]
    description += f"; {' and '.join(copied)} copied, as it lies" if copied else ""
    return f"{description}; keeps x and z"


def check_gated_norm(given: Mapping[str, Any], name: str = "weight", shared: bool = False) -> None:
    """Raise where an argument is wrong. `name`: of the norm's weight, which groups may share where it is `shared`."""
    x, z, weight, group_size = given["x"], given["z"], given[name], given["group_size"]
    check_norm(x, given["eps"])
    check_floating("z", z)
    check_same_shape("z", z, x)
    if weight is None:
        if given["zero_centered_gamma"]:
            raise ValueError(f"zero_centered_gamma says how {name} is kept, but there is no {name}")
    elif shared:
        _check_shared_weight(name, weight, x, group_size)
    else:
        check_vector(name, weight, x)
    check_gate("x's last dimension", x.shape[-1], given["activation"], group_size)


def _check_shared_weight(name: str, weight: Tensor, x: Tensor, group_size: int | None) -> None:
    """Check a weight of x's columns, or of a group's."""
    check_floating(name, weight, optional=True)
    K, shape = x.shape[-1], tuple(weight.shape)
    if group_size is None and len(shape) == 1 and 0 < shape[0] < K and K % shape[0] == 0:
        raise ValueError(
            f"{name} must be [K] = [{K}], but is [{shape[0]}]: where heads of {shape[0]} columns share it, "
            f"give group_size={shape[0]}"
        )
    if shape != (group_size,):
        check_vector(name, weight, x)
    check_device(name, weight, x)


def check_gate(name: str, width: int, activation: str, group_size: int | None) -> None:
    """Check the options that no other norm has. `name`: what the width is called."""
    if activation not in _GATES:
        raise ValueError(f"activation must be one of {', '.join(_GATES)}, but is {activation!r}")
    if group_size is not None and (type(group_size) is not int or group_size < 1 or width % group_size):
        raise ValueError(f"group_size must divide {name}, {width}, or be None, but is {group_size!r}")


def shard_gated_norm(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided, and whole rows normalised."""
    return by_rows(given, at, ("x", "z"), ("weight",))


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    zero_centered_gamma: bool = False,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """RMSNorm over the last dimension and a gate, ``rms_norm(x) * weight * silu(z)``; one kernel forward, one backward.

    Args:
        x: ``[..., H]``, such as heads ``[B, S, heads, H]``. H, or `group_size`, up to 8192 on a GPU.
        z: the gate before its activation, of x's shape and any floating-point type. x and z may be slices of a projection's
            rows: they are read where they lie.
        weight: ``[H]``, of any floating-point type, or None.
        eps: added to the mean of the squares; above 0.
        zero_centered_gamma: weight is kept as its distance from 1; the sum is fp32.
        activation: ``silu`` or ``sigmoid``, of the gate.
        norm_before_gate: False normalises the gated rows, ``rms_norm(x * silu(z)) * weight``, as Mamba 2 does.
        group_size: normalise each group of so many columns by itself. It divides H.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        y, of x's shape and type. Arithmetic is in fp32, and y is rounded once. x and z are kept for backward, and nothing else.
    """
    given = {
        "x": x, "z": z, "weight": weight, "eps": eps, "zero_centered_gamma": zero_centered_gamma, "activation": activation,
        "norm_before_gate": norm_before_gate, "group_size": group_size,
    }  # fmt: skip
    if has_dtensor(x, z, weight):
        return run_on_shards("gated_rms_norm", **given, backend=backend)  # type: ignore[no-any-return]
    check_gated_norm(given)
    chosen = choose("gated_rms_norm", backend, unsupported(x, group_size))
    if chosen not in NATIVE:
        return run_other("gated_rms_norm", chosen, **given)  # type: ignore[no-any-return]
    options = gated_options(x.shape[-1], eps, zero_centered_gamma, activation, norm_before_gate, group_size)
    if chosen == "torch" or x.numel() == 0:
        formula = partial(gated_formula, options=options)
        return run_formula(formula, "input", x, shared=with_fp32_grads(weight), per_row=(z,))  # type: ignore[no-any-return]
    weight = contiguous_param(weight)
    if not needs_grad(x, z, weight):
        return gated_forward(x, z, weight, options)  # type: ignore[no-any-return]
    return _apply(x, z, weight, options)  # type: ignore[no-any-return]


define_op(
    gated_rms_norm,
    check=lambda call: check_gated_norm(vars(call)),
    unsupported=lambda call: unsupported(call.x, call.group_size),
    variant=variant,
    sharding=shard_gated_norm,
)
