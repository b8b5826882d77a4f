"""Checks that every op makes of its arguments: each names the argument, what it was and what it must be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepass.runtime.dispatch import PLAIN, TORCH, under_autocast

_LEAST = torch.finfo(torch.float32).tiny
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_floating(name: str, value: object, optional: bool = False) -> None:
    if not isinstance(value, Tensor) or value.dtype not in FLOATING:
        kind = f"one of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        what = "a floating-point tensor (16, 32 or 64 bits)"
        raise TypeError(f"{name} must be {what}{' or None' if optional else ''}, but is {kind}")


def value_range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value. PyTorch before 2.11 can't find both of a DTensor's in one pass."""
    if TORCH < (2, 11) and type(x) not in PLAIN:
        return x.amin(), x.amax()
    least, most = x.aminmax()
    return least, most


def check_number(name: str, value: object, optional: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number{' or None' if optional else ''}, but is {value!r}, a {type(value).__name__}")


def check_whole(name: str, count: object, least: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{name} must be a whole number, but is {count!r}, a {type(count).__name__}")
    if count < least:
        raise ValueError(f"{name} must be at least {least}, but is {count}")


def check_device(name: str, value: Tensor, x: Tensor, like: str = "x") -> None:
    if value.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, as {like}, but is on {value.device}")


def check_vector(name: str, value: Tensor, x: Tensor) -> None:
    """A bias or a weight: as long as x's last dimension, and on its device."""
    check_floating(name, value, optional=True)
    if value.shape != (x.shape[-1],):  # of a tuple: a slice of a shape takes as long again
        raise ValueError(f"{name} must have shape {tuple(x.shape[-1:])}, as x's last dimension, but has {tuple(value.shape)}")
    check_device(name, value, x)


def check_same_shape(name: str, value: Tensor, x: Tensor) -> None:
    check_floating(name, value, optional=True)
    if value.shape != x.shape:
        raise ValueError(f"{name} must have x's shape {tuple(x.shape)}, but has {tuple(value.shape)}")
    check_device(name, value, x)


def check_norm(x: Tensor, eps: float) -> None:
    """x is numbers, there is something to take a mean of, and something to keep its root from 0."""
    check_floating("x", x)
    shape = x.shape
    if not shape or shape[-1] == 0:
        raise ValueError(f"x must have a last dimension of at least 1, but has shape {tuple(shape)}")
    check_eps(eps)


def check_eps(eps: float) -> float:
    if type(eps) is not float:
        check_number("eps", eps)
    if not _LEAST <= eps < math.inf:
        what = f"finite and at least {_LEAST:.2g}, the least fp32 holds" if eps > 0 else "above 0"
        raise ValueError(f"eps must be {what}, but is {eps!r}")
    return eps


def check_per_token(name: str, value: Tensor, x: Tensor) -> None:
    """One number a row of x, with or without a last dimension of 1, on its device."""
    check_floating(name, value, optional=True)
    tokens = x.shape[:-1]
    if value.shape != tokens and value.shape != (*tokens, 1):
        raise ValueError(
            f"{name} must have shape {tuple(tokens)} or {(*tokens, 1)}, one number a token, but has {tuple(value.shape)}"
        )
    check_device(name, value, x)


def check_linear(x: Tensor, K: int, weight: Tensor, bias: Tensor | None, name: str = "x", prefix: str = "") -> None:
    """The weight and the bias of a product with rows of K numbers, made of x: of x's type, which autocast would see to.

    `prefix` begins their names, where a call has several.
    """
    check_floating(f"{prefix}weight", weight)
    shape = weight.shape
    if len(shape) != 2 or shape[1] != K:
        raise ValueError(f"{prefix}weight must have shape (N, {K}), with {name}'s last dimension, but has {tuple(shape)}")
    if weight.dtype != x.dtype and not under_autocast(x):
        raise TypeError(f"{prefix}weight must have {name}'s type {x.dtype}, but is {weight.dtype}")
    check_device(f"{prefix}weight", weight, x, name)
    if bias is None:
        return
    check_floating(f"{prefix}bias", bias, optional=True)
    if bias.shape != shape[:1]:
        raise ValueError(
            f"{prefix}bias must have shape {tuple(shape[:1])}, as {prefix}weight's rows, but has {tuple(bias.shape)}"
        )
    if bias.dtype != x.dtype and not under_autocast(x):
        raise TypeError(f"{prefix}bias must have {name}'s type {x.dtype}, but is {bias.dtype}")
    check_device(f"{prefix}bias", bias, x, name)
