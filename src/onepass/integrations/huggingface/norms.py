"""Norms: recognised by what they compute, and replaced by `onepass.rms_norm` and `onepass.layer_norm`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.integrations.huggingface.gated_norms import find_gated_norm, gated_norm_forward
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import FP64, close, own_forward, parameters_of, probe, probe_forward, randn
from onepass.integrations.huggingface.snapshot import UNREAD, Reads, Snapshot, reads_of
from onepass.integrations.huggingface.zero import gathered
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.norm import layer_norm, rms_norm

_SIZE = 16
_SLACK = 1e-5  # transformers' norms compute in fp32


@dataclass(frozen=True)
class NormMatch:
    """A norm in the model, and its options."""

    module: nn.Module
    layer: bool
    eps: float
    zero_centered: bool
    snapshot: Snapshot = UNREAD

    @property
    def options(self) -> dict[str, Any]:
        return {"eps": self.eps, "zero_centered_gamma": self.zero_centered}

    @property
    def kernel_options(self) -> NormOptions:
        return NormOptions(self.layer, self.eps, self.zero_centered)

    @property
    def weight(self) -> Tensor | None:
        return self._own("weight")

    @property
    def bias(self) -> Tensor | None:
        return self._own("bias") if self.layer else None

    def _own(self, name: str) -> Tensor | None:
        own = self.module._parameters
        return gathered(own[name]) if name in own else None

    @property
    def name(self) -> str:
        if self.module._parameters.get("weight") is None:
            return "rms_norm, no weight"
        return ("layer_norm" if self.layer else "rms_norm") + (", zero-centred" if self.zero_centered else "")

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return norm(x); with a residual return (norm(x + residual), x + residual)."""
        if self.layer:
            return layer_norm(x, self.weight, self.bias, residual=residual, **self.options)
        return rms_norm(x, self.weight, residual=residual, **self.options)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return norm(x) + residual, of an RMSNorm."""
        return rms_norm(x, self.weight, post_residual=residual, **self.options)

    def untouched(self) -> bool:
        return Patches.untouched(self.module, self) and self.snapshot.unchanged(self.module)

    def change(self) -> str | None:
        return self.snapshot.change(self.module)


def find_norm(module: nn.Module) -> NormMatch | None:
    """Return a match if this module is a norm over the last dimension, else None."""
    with reads_of(module) as reads:
        match = _found(module, reads)
    return None if match is None else replace(match, snapshot=reads.snapshot())


def _found(module: nn.Module, reads: Reads) -> NormMatch | None:
    weight = module._parameters.get("weight")
    if module._modules or module._buffers or own_forward(module):
        return None
    if weight is None and (module._parameters or not _is_named_so(module)):  # one that only divides
        return None
    if weight is not None and weight.dim() != 1:
        return None
    reads.names |= {"weight", "bias"} | ({"eps", "normalized_shape"} & vars(module).keys())  # PyTorch's own are not probed
    if type(module).forward is nn.LayerNorm.forward:
        assert isinstance(module, nn.LayerNorm)
        return NormMatch(module, True, module.eps, False) if len(module.normalized_shape) == 1 else None
    if type(module).forward is nn.RMSNorm.forward:
        assert isinstance(module, nn.RMSNorm)
        return (
            NormMatch(module, False, module.eps, False) if len(module.normalized_shape) == 1 and module.eps is not None else None
        )
    eps = _eps_of(module) if len(parameters_of(module)) == 1 else None
    return None if eps is None or module._parameters.keys() - {"weight", "bias"} else _by_trial(module, eps)


def is_norm(module: nn.Module) -> bool:
    return isinstance(vars(module).get("_onepass"), NormMatch) or find_norm(module) is not None


def _eps_of(module: nn.Module) -> float | None:
    """Return the only attribute that can be the epsilon, or None."""
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2}
    return numbers.pop() if len(numbers) == 1 else None


def _by_trial(module: nn.Module, eps: float) -> NormMatch | None:
    """Return the onepass norm whose result on random values equals the module's, or None."""
    weight, bias = randn(_SIZE, seed=2), randn(_SIZE, seed=3)
    parameters = {
        name: None if p is None else nn.Parameter({"weight": weight, "bias": bias}[name])
        for name, p in module._parameters.items()
    }
    small = torch.tensor([1.0, 30.0, 0.01, 1e-3, 1e-4], dtype=FP64).repeat(4)[:_SIZE, None]  # the smallest rows show the epsilon
    x = randn(2, _SIZE, _SIZE) * small  # square: a norm over another dimension runs too, and differs
    y = probe_forward(probe(module, {}, _parameters=parameters), x)
    shift = None if parameters.get("bias") is None else bias
    ways = [(False, False)] if not parameters else product((True,) if shift is not None else (False, True), (False, True))
    for layer, centered in ways:
        factor, sizes = None if not parameters else weight + 1 if centered else weight, (_SIZE,)
        expected = F.layer_norm(x, sizes, factor, shift, eps) if layer else F.rms_norm(x, sizes, factor, eps)
        if close(y, expected, _SLACK):
            return NormMatch(module, layer, eps, centered)
    return None


def _is_named_so(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def looks_like_a_norm(module: nn.Module) -> bool:
    return _is_named_so(module) and not module._modules and bool(module._parameters)


def replace_norms(model: nn.Module, patches: Patches) -> tuple[dict[nn.Module, NormMatch], list[AppliedRow]]:
    made, rows = {}, []
    for name, module in model.named_modules():
        norm = find_norm(module)
        row = partial(AppliedRow, name, type(module).__name__, "norm")
        if norm is not None:
            patches.set_forward(module, _forward, norm)
            made[module] = norm
            rows.append(row(by=norm.name, match=norm))
        elif (gated := find_gated_norm(module)) is not None:
            patches.set_forward(module, gated_norm_forward, gated)
            rows.append(row(by=gated.name, match=gated))
        elif looks_like_a_norm(module):
            rows.append(row(why="it has a forward of its own already" if own_forward(module) else "it computes something else"))
    return made, rows


def _forward(self: Any, *args: Tensor, **named: Tensor) -> Any:
    norm: NormMatch = self._onepass
    if not norm.snapshot.unchanged(self):
        return type(self).forward(self, *args, **named)
    (x,) = args or named.values()
    return norm(x)
