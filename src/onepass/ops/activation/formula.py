"""The options and the formula of a bias and an activation: what the kernels compute, for every type; and checks of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.ops.activation.activations import Activation, activation_of, find_activation
from onepass.runtime.checks import check_floating, check_number, check_per_token, check_vector
from onepass.runtime.process_setting import validating
from onepass.runtime.saved import SAVES


class ActivationOptions(NamedTuple):
    """What a bias and an activation take besides tensors."""

    activation: str  # the key, not the name: a name may be registered again, and existing graphs keep the old activation
    clamp: float | None
    linear_offset: float | None  # None for 0: the kernels are then compiled without it
    threshold: int = 0  # how many of 65536 elements dropout drops
    seed_number: int | None = None  # dropout's seed where it is no tensor: in plain eager mode on a GPU
    interleaved: bool = False  # gate and linear part alternate in x's last dimension, and are not its halves


def _clamped(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp x. The boundary passes gradient, as torch.clamp's does only before PyTorch 2.14. NaN does not."""
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def activation_formula(
    x: Tensor, bias: Tensor | None, token_weight: Tensor | None, options: ActivationOptions, linear: Tensor | None = None
) -> Tensor:
    """Return y without dropout, in the wider of x's type and fp32: the caller rounds it.

    With `linear`, x is the gate alone.
    """
    act = activation_of(options.activation)
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    if act.gated:
        if linear is not None:
            gate, linear = z, linear.to(wide)
        else:
            gate, linear = z.unflatten(-1, (-1, 2)).unbind(-1) if options.interleaved else z.chunk(2, -1)
        if options.clamp is not None:
            gate, linear = _clamped(gate, -torch.inf, options.clamp), _clamped(linear, -options.clamp, options.clamp)
        if options.linear_offset:  # -0.0 + 0.0 would be 0.0
            linear = linear + options.linear_offset
        y = act.formula(gate) * linear
    else:
        y = act.formula(z)
    return y if token_weight is None else y * token_weight.to(wide).reshape(*x.shape[:-1], 1)


# ---- what is wrong with a call ----


def check_activation(given: Mapping[str, Any], bias: Tensor | None, bias_name: str = "bias", halves: bool = True) -> Activation:
    """Raise where an argument is wrong, else return the activation. `halves`: a gated one's gate and linear part are x's."""
    x, token_weight = given["x"], given["token_weight"]
    act = find_activation(given["activation"])
    check_floating("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, but is a scalar")
    if act.gated and x.shape[-1] % 2 and halves:
        raise ValueError(f"x must have an even last dimension for {act.name!r}, but has {x.shape[-1]}")
    if bias is not None:
        check_vector(bias_name, bias, x)
    if token_weight is not None:
        check_per_token("token_weight", token_weight, x)
    check_options(act, given["clamp"], given["linear_offset"], given["save"])
    return act


def check_options(act: Activation, clamp: float | None, linear_offset: float, save: str) -> None:
    """Raise where an option is wrong, whatever x is."""
    if clamp is not None:
        check_number("clamp", clamp, optional=True)
        if not act.gated:
            raise ValueError(f"clamp ({clamp!r}) needs a gated activation, but activation is {act.name!r}")
        if not clamp > 0:
            raise ValueError(f"clamp must be a positive number or None, but is {clamp!r}")
    if type(linear_offset) is not float or linear_offset != 0.0:
        check_number("linear_offset", linear_offset)
        if linear_offset != linear_offset or (linear_offset and not act.gated):
            raise ValueError(f"linear_offset must be a number, and 0 if not gated, but is {linear_offset!r} for {act.name!r}")
    if save not in SAVES:
        raise ValueError(f"save must be one of {', '.join(SAVES)}, but is {save!r}")


def check_finite(x: Tensor) -> None:
    """Raise under `validate()` where x has infinities, which fp8 codes can't hold."""
    if validating() and not torch.compiler.is_compiling() and not bool(x.isfinite().all()):
        raise ValueError("x must be finite for save='fp8', which can't hold infinities, but is not")
