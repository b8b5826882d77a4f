"""Gated norms of linear attention and of Mamba 2: recognised by what they compute, replaced by `onepass.gated_rms_norm`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.probe import FP64, close, own_forward, parameters_of, probe, probe_forward, randn
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, reads_of
from onepass.ops.norm.gated_norm import gated_rms_norm, gated_rms_norm_reference

_SLACK = 1e-5  # transformers' norms compute in fp32


@dataclass(frozen=True)
class GatedNormMatch:
    """A gated norm in the model, and its options."""

    module: nn.Module
    names: tuple[str, str]  # of the arguments: the rows, and the gate
    options: dict[str, Any]
    snapshot: Snapshot = UNREAD

    @property
    def name(self) -> str:
        words = ["gated_rms_norm"]
        words += [] if self.options["activation"] == "silu" else [self.options["activation"]]
        words += [] if self.options["norm_before_gate"] else ["of gated rows"]
        words += ["zero-centred"] if self.options["zero_centered_gamma"] else []
        words += [] if self.options["group_size"] is None else [f"in groups of {self.options['group_size']}"]
        return ", ".join(words)

    def change(self) -> str | None:
        return self.snapshot.change(self.module)


def find_gated_norm(module: nn.Module) -> GatedNormMatch | None:
    """Return a match if this module is a gated RMSNorm over the last dimension, else None."""
    weight, names = module._parameters.get("weight"), tuple(parameters_of(module))
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or module._modules or module._buffers:
        return None
    if len(names) != 2 or own_forward(module) or weight.device.type == "meta":
        return None
    numbers = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2}
    if len(numbers) != 1:
        return None
    with reads_of(module) as reads:
        options = _by_trial(module, weight.shape[0], numbers.pop())
    return None if options is None else GatedNormMatch(module, names, options, reads.snapshot())


def _by_trial(module: nn.Module, width: int, eps: float) -> dict[str, Any] | None:
    """Return the options with which onepass's gated norm gives the module's result on random values, or None."""
    weight, z = randn(width, seed=2), randn(6, width, seed=3)
    small = torch.tensor([1.0, 30.0, 0.01, 1e-3, 1e-4, 3.0], dtype=FP64)[:, None]  # the smallest rows show the epsilon
    x = randn(6, width) * small
    y = probe_forward(probe(module, {}, _parameters={"weight": nn.Parameter(weight)}), x, z)
    for activation, first, centered, size in product(("silu", "sigmoid"), (True, False), (False, True), _sizes(module, width)):
        options: dict[str, Any] = {
            "eps": eps, "activation": activation, "norm_before_gate": first, "zero_centered_gamma": centered, "group_size": size
        }  # fmt: skip
        if close(y, gated_rms_norm_reference(x, z, weight, **options), _SLACK):
            return options
    return None


def _sizes(module: nn.Module, width: int) -> Iterator[int | None]:
    """Yield None, and the sizes of groups that the module's attributes can mean."""
    yield None
    for number in {value for value in vars(module).values() if type(value) is int and 1 < value < width and width % value == 0}:
        yield from (number, width // number)


def gated_norm_forward(self: Any, *args: Tensor, **named: Tensor) -> Any:
    match: GatedNormMatch = self._onepass
    given = {**dict(zip(match.names, args)), **named}  # noqa: B905  (PyTorch 2.9's compiler takes strict=False for True)
    x, z = given[match.names[0]], given.get(match.names[1])
    if z is None or not match.snapshot.unchanged(self):  # without a gate Mamba 2's is a norm of groups
        return type(self).forward(self, *args, **named)
    return gated_rms_norm(x, z, self.weight, **match.options)
