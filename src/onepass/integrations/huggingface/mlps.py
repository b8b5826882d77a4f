"""MLPs: recognised by what they compute, and replaced by one product up, then activation and product down as one op.

Layers with quantised weights, or that LoRA wraps in a way that is no plain one, run by themselves. Between them the activation is
one op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.compiled_mlp import gated_mlp, use_gated_mlp
from onepass.integrations.huggingface.linear_layers import is_like_linear, is_linear, sizes_of, tiny
from onepass.integrations.huggingface.linears import FoldedNorm, LinearsMatch
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import (
    LARGE,
    Function,
    close_by_rows,
    own_forward,
    parameters_of,
    probe,
    probe_forward,
    randn,
)
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, is_watched, reads_of
from onepass.ops.activation.activation_linear import activation_linear
from onepass.ops.activation.activations import ACTIVATIONS
from onepass.ops.activation.bias_activation import bias_activation

_HIDDEN, _INNER = 6, 10


@dataclass
class ActivationMatch:
    """A module that computes down(activation(up(x))), whose layers are called as they are. `up` names one layer or two."""

    module: nn.Module
    up: tuple[str, ...]
    down: str
    activation: str
    dropout: str | None  # applied to the output
    snapshot: Snapshot = UNREAD

    @property
    def made_by(self) -> str:
        return f"bias_activation, {self.activation}"

    def unchanged(self) -> bool:
        return self.snapshot.unchanged(self.module)

    def change(self) -> str | None:
        return self.snapshot.change(self.module)

    def __call__(self, x: Tensor) -> Tensor:
        layers: dict[str, Any] = self.module._modules
        first, *second = (layers[name](x) for name in self.up)
        linear = second[0] if second else None
        if linear is not None and linear.dtype != first.dtype:  # to what PyTorch makes of their product
            wide = torch.promote_types(first.dtype, linear.dtype)
            first, linear = first.to(wide), linear.to(wide)
        y: Tensor = layers[self.down](bias_activation(first, None, self.activation, linear=linear))
        return y if self.dropout is None else layers[self.dropout](y)


@dataclass
class MLPMatch:
    """A module that computes down(activation(up(x))). `up` is one linear layer, or two that run as one product."""

    module: nn.Module
    up: LinearsMatch
    down: LinearsMatch
    activation: str
    dropout: str | None  # applied to the output
    snapshot: Snapshot = UNREAD
    between: ActivationMatch | None = None  # what runs once the layers are wrapped, if the module's code calls them

    def unchanged(self) -> bool:
        return self._intact() and self.snapshot.unchanged(self.module)

    def ready(self) -> bool:
        return self.unchanged() and Patches.untouched(self.module, self)

    def change(self) -> str | None:
        return self.snapshot.change(self.module) or (self.left() if self.between is None else None)

    @property
    def made_by(self) -> str:
        return f"activation_linear, {self.activation}" if self.between is None or self._intact() else self.between.made_by

    def left(self) -> str | None:
        return self.up.change() or self.down.change()

    def _intact(self) -> bool:
        return self.up.intact() and self.down.intact()

    def __call__(self, x: Tensor, folded: FoldedNorm | None = None) -> Tensor:
        """Return the MLP of x, or of x's norm if one is folded in."""
        y = self._as_one(x, folded)
        if y is None:
            up = self.up(x, folded, biased=False)
            y = activation_linear(
                up, self.down.weight(up.dtype), self.down.bias(), self.activation,
                activation_bias=self.up.bias(), precision=self.down.precision(), lora=self.down.adapters() or None,
            )  # fmt: skip
        return y if self.dropout is None else self.module._modules[self.dropout](y)  # type: ignore[misc]

    def _as_one(self, x: Tensor, folded: FoldedNorm | None) -> Tensor | None:
        """Return the result of one function of a compiled graph, where it takes this call."""
        if folded is None or not torch.compiler.is_compiling() or self.up.biased or self.down.biased:
            return None
        precision = self.down.precision()
        layers = self.up.weights(), self.down.weight(x.dtype), self.activation, precision
        if precision != self.up.precision() or not use_gated_mlp(x, folded.residual, *layers):
            return None
        norm = folded.norm
        y, folded.h = gated_mlp(x, folded.residual, norm.weight, norm.bias, norm.kernel_options, *layers)
        return y


def find_mlp(module: nn.Module) -> MLPMatch | ActivationMatch | str | None:
    """Return a match, or why a module that looks like an MLP can't be replaced, or None."""
    linears = [name for name, child in module._modules.items() if is_linear(child) or is_like_linear(child)]
    if len(linears) not in (2, 3) or own_forward(module) or len(parameters_of(module)) != 1:
        return None
    sizes = {name: sizes_of(module.get_submodule(name)) for name in linears}
    roles = list(_roles(sizes))
    if not roles:
        return None
    others = [name for name, child in module._modules.items() if name not in linears and child is not None]
    dropouts = [name for name in others if isinstance(module._modules[name], nn.Dropout)]
    if len(dropouts) > 1 or any(list(module._modules[name].parameters()) for name in others):  # type: ignore[union-attr]
        return "it has more than linear layers, an activation and a dropout at its end"
    for name in set(others) - set(dropouts):
        if is_watched(module._modules[name]):  # type: ignore[arg-type]
            return f"its {name} has hooks or a forward of its own"
    dropout = dropouts[0] if dropouts else None
    for up_names, down_name in roles:
        activation = _activation_of(module, up_names, down_name, dropouts, Function)
        between = None if activation is None else ActivationMatch(module, up_names, down_name, activation, dropout)
        up, down = LinearsMatch.found(module, up_names), LinearsMatch.found(module, (down_name,))
        if up is None or down is None:
            if between is not None:
                return between
            continue
        activation = activation or _activation_of(module, up_names, down_name, dropouts)
        if activation is not None:
            return MLPMatch(module, up, down, activation, dropout, between=between)
    return "it computes something else, or by an activation that onepass doesn't have"


def _roles(sizes: dict[str, tuple[int, int]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield which layers may go up, in order, and which down, by their sizes: (inputs, outputs)."""
    for *up, down in permutations(sizes):
        inner, outputs = sizes[down]
        widths = (inner, 2 * inner) if len(up) == 1 else (inner,)
        if all(sizes[name][0] == outputs and sizes[name][1] in widths for name in up):
            yield tuple(up), down


def _activation_of(
    module: nn.Module, up: tuple[str, ...], down: str, dropouts: list[str], wrap: Callable[[nn.Module], nn.Module] | None = None
) -> str | None:
    """Return the onepass activation with which small layers in these roles give the result of the module's code.

    With `wrap` the code gets layers that it can call, and nothing else.
    """
    gated = len(up) == 2 or sizes_of(module.get_submodule(up[0]))[1] != sizes_of(module.get_submodule(down))[0]
    each = 2 * _INNER if gated and len(up) == 1 else _INNER
    layers = {name: tiny(module.get_submodule(name), _HIDDEN, each, 10 + i) for i, name in enumerate(up)}
    layers[down] = last = tiny(module.get_submodule(down), _INNER, _HIDDEN, 20)
    children: dict[str, nn.Module] = {name: layer if wrap is None else wrap(layer) for name, layer in layers.items()}
    children |= {name: Function(lambda y: 3 * y + 1) for name in dropouts}
    x = 3 * randn(7, _HIDDEN)
    x = torch.cat([x, LARGE * x])
    results = [probe_forward(probe(module, children, training=training), x) for training in (False, True)]
    first = torch.cat([layers[name](x) for name in up], -1).detach()
    for name, act in ACTIVATIONS.items():
        if act.gated == gated:
            inner = act.formula(first[..., :_INNER]) * first[..., _INNER:] if gated else act.formula(first)
            made = last(inner).detach()
            expected = 3 * made + 1 if dropouts else made
            if all(close_by_rows(each, expected) for each in results):
                return name
    return None


def replace_mlps(model: nn.Module, patches: Patches) -> tuple[dict[nn.Module, MLPMatch], list[AppliedRow]]:
    made, rows = {}, []
    for name, module in model.named_modules():
        with reads_of(module) as reads:
            match = find_mlp(module)
        if isinstance(match, MLPMatch | ActivationMatch):
            match.snapshot = reads.snapshot()
            match = "it has parameters or buffers beside its layers'" if match.snapshot.read_tensors else match
        if isinstance(match, MLPMatch):
            match.up.replace(patches)
            if match.between is not None:
                match.between.snapshot = match.snapshot
            made[module] = match
        if isinstance(match, MLPMatch | ActivationMatch):
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(name, type(module).__name__, "mlp", by=match.made_by, match=match))
        elif match is not None or (_is_named_so(module) and not any(map(_are_experts, module.children()))):  # which have a row
            rows.append(AppliedRow(name, type(module).__name__, "mlp", why=match or _why(module)))
    return made, rows


def _is_named_so(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith(("mlp", "feedforward"))


def _are_experts(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("experts")


def _why(module: nn.Module) -> str:
    if own_forward(module):
        return "it has a forward of its own already"
    layers = [child for child in module._modules.values() if child is not None and list(child.parameters())]
    known = [child for child in layers if is_linear(child) or is_like_linear(child)]
    kinds = {f"{type(child).__module__.partition('.')[0]}'s {type(child).__name__}" for child in layers if child not in known}
    return "its layers are " + ", ".join(sorted(kinds)) if kinds else "it computes something else"


def _forward(self: Any, *args: Tensor, onepass_folded: FoldedNorm | None = None, **named: Tensor) -> Any:
    (x,), mlp = args or named.values(), self._onepass
    if onepass_folded is not None:
        return mlp(x, onepass_folded)
    if mlp.unchanged():
        return mlp(x)
    between = getattr(mlp, "between", None)
    if between is not None and between.unchanged():  # the layers are wrapped since, for example by PEFT
        return between(x)
    return type(self).forward(self, x)
