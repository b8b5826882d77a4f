"""Activations and their derivatives: the PyTorch formula of each and its pair of Triton device functions.

Device functions take and return fp32. A gated activation, act(x1) * (x2 + offset), is its gate's act and a flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.language import as_device_function, device_function, tl, triton
from onepass.kernels.sigmoid import LOG2_E, exp2_approx, reciprocal_approx, sigmoid, silu, silu_derivative

# ---- device functions ----

_GELU_1 = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_3 = tl.constexpr(1.5957691216057308 * 0.044715)


@device_function
def _gelu_sigmoid(z):
    """Return sigmoid(2u) = (1 + tanh u) / 2, which loses nothing where tanh is near -1."""
    return sigmoid(z * (-LOG2_E * _GELU_1 - LOG2_E * _GELU_3 * z * z))


@device_function
def _gelu(z):
    s, _ = _gelu_sigmoid(z)
    return z * s


@device_function
def _gelu_derivative(z):
    s, rest = _gelu_sigmoid(z)
    return s + z * s * rest * (_GELU_1 + 3.0 * _GELU_3 * z * z)


@device_function
def _normal_tail(z):
    """Return exp(-z^2 / 2), and half of erfc(|z| / sqrt 2) to 2e-7 of itself.

    The second is that exponential times a polynomial in 1 / (1 + 0.3 |z|). The library's erf branches: with it the backward
    ran at 0.69 of the copy bandwidth instead of 0.9.
    """
    e = exp2_approx(-0.5 * LOG2_E * z * z)
    t = reciprocal_approx(1.0 + 0.3 * tl.abs(z))
    p = 0.0356757128203033 * t - 0.15720702012459717
    p = p * t + 0.20636025628899857
    p = p * t - 0.053689744794361755
    p = p * t + 0.12856475145123777
    p = p * t + 0.09991258832908953
    p = p * t + 0.12075409241510776
    p = p * t + 0.11962929055145496
    return e, p * t * e


@device_function
def _gelu_exact(z):
    _, tail = _normal_tail(z)
    return z * tl.where(z > 0.0, 1.0 - tail, tail)


@device_function
def _gelu_exact_derivative(z):
    e, tail = _normal_tail(z)
    return tl.where(z > 0.0, 1.0 - tail, tail) + z * 0.3989422804014327 * e


@device_function
def _quick_gelu(z):
    s, _ = sigmoid(-1.702 * LOG2_E * z)
    return z * s


@device_function
def _quick_gelu_derivative(z):
    s, rest = sigmoid(-1.702 * LOG2_E * z)
    return s + 1.702 * (z * s * rest)


@device_function
def _relu(z):
    return tl.where(z <= 0.0, 0.0, z)  # a maximum would drop NaN on a GPU


@device_function
def _relu_derivative(z):
    return tl.where(z <= 0.0, 0.0, 1.0)  # where z is NaN the gradient passes, as in torch.relu


@device_function
def _squared_relu(z):
    r = tl.where(z <= 0.0, 0.0, z)
    return r * r


@device_function
def _squared_relu_derivative(z):
    return tl.where(z <= 0.0, 0.0, 2.0 * z)


# ---- formulas, where PyTorch has no function for them ----


def _quick_gelu_formula(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


def _squared_relu_formula(z: Tensor) -> Tensor:
    return F.relu(z).square()


def _gelu_formula(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


# ---- the registry ----


@dataclass(frozen=True, eq=False)  # equal only to itself: a quick key of caches
class Activation:
    name: str
    formula: Callable[[Tensor], Tensor]
    forward: Any  # Triton device functions, or None: then the formula runs by PyTorch
    derivative: Any
    gated: bool = False
    masks: bool = False  # where the derivative is 0 nothing comes back, not even NaN: as PyTorch's relu has it
    key: str = ""  # graphs find it by this: its name may be registered again, and their activation must not change

    @property
    def parts(self) -> int:
        """2 where a row of x has a gate and a linear half, else 1."""
        return 2 if self.gated else 1


def _with_gate(name: str, act: Activation) -> Activation:
    return replace(act, name=name, gated=True, key=name)


_PLAIN = (
    Activation("gelu", _gelu_formula, _gelu, _gelu_derivative),
    Activation("gelu_exact", F.gelu, _gelu_exact, _gelu_exact_derivative),
    Activation("quick_gelu", _quick_gelu_formula, _quick_gelu, _quick_gelu_derivative),
    Activation("silu", F.silu, silu, silu_derivative),
    Activation("relu", F.relu, _relu, _relu_derivative, masks=True),
    Activation("squared_relu", _squared_relu_formula, _squared_relu, _squared_relu_derivative, masks=True),
)
ACTIVATIONS: dict[str, Activation] = {act.name: replace(act, key=act.name) for act in _PLAIN}
GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_exact": "gelu_exact", "quick_geglu": "quick_gelu", "reglu": "relu"}
for _name, _gate in GATES.items():
    ACTIVATIONS[_name] = _with_gate(_name, ACTIVATIONS[_gate])
_BUILT_IN = frozenset(ACTIVATIONS)
_BY_KEY = dict(ACTIVATIONS)  # also those whose name was registered again


def find_activation(name: str) -> Activation:
    act = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if act is None:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, but is {name!r}")
    return act


def activation_of(key: str) -> Activation:
    return _BY_KEY[key]


def register_activation(
    name: str,
    formula: Callable[[Tensor], Tensor],
    forward: Any = None,
    derivative: Any = None,
    gated: bool = False,
) -> None:
    """Register your own function as ``activation=name``.

    ``formula`` is elementwise PyTorch and takes every floating-point type. It may work in place: it gets a copy. ``forward`` and
    ``derivative`` are ``@triton.jit`` functions from an fp32 block to an fp32 block. Without them the activation runs by PyTorch,
    and `explain` says so. With ``gated=True`` it is the gate: ``act(x1) * (x2 + linear_offset)``. Registering a name again
    replaces it for later calls.

        @triton.jit
        def mish(z): return z * (1 - 2 / (1 + (1 + tl.exp(z)) * (1 + tl.exp(z))))
        onepass.register_activation("mish", torch.nn.functional.mish, mish, mish_derivative)
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a word, but is {name!r}")
    if not isinstance(gated, bool):
        raise TypeError(f"gated must be True or False, but is {gated!r}")
    if name in _BUILT_IN:
        raise ValueError(f"name must not be that of a built-in activation ({', '.join(sorted(_BUILT_IN))}), but is {name!r}")
    if not callable(formula):
        raise TypeError(f"formula must be a function of a tensor, but is {type(formula).__name__}")
    if (forward is None) != (derivative is None):
        missing = "derivative" if derivative is None else "forward"
        raise ValueError(f"forward and derivative must be given together, but {missing} is missing")
    for argument, function in (("forward", forward), ("derivative", derivative)):
        if (
            function is not None
            and triton is not None
            and not isinstance(as_device_function(function), type(as_device_function(_gelu)))
        ):
            raise TypeError(f"{argument} must be a @triton.jit function, but is {type(function).__name__}")
    key = f"{name}#{len(_BY_KEY)}"
    ACTIVATIONS[name] = _BY_KEY[key] = Activation(name, _of_a_copy(formula), forward, derivative, gated, key=key)


def _of_a_copy(formula: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The formula, which may write to its argument or return it: `nn.ReLU(inplace=True)` does, and that may be the caller's x."""
    return lambda z: formula(z.clone())
