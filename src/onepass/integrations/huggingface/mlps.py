"""MLPs: recognised by what they compute, and replaced by one product up, then activation and product down as one op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.linears import LINEARS_CHANGED, FoldedNorm, LinearsMatch, is_linear, sizes_of, tiny
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import Function, close, own_forward, parameters_of, probe, probe_forward, randn
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, is_watched, reads_of
from onepass.ops.activation.activation_linear import activation_linear
from onepass.ops.activation.activations import ACTIVATIONS

_HIDDEN, _INNER = 6, 10


@dataclass
class MLPMatch:
    """A module that computes down(activation(up(x))). `up` is one linear layer, or two that run as one product."""

    module: nn.Module
    up: LinearsMatch
    down: LinearsMatch
    activation: str
    dropout: str | None  # applied to the output
    snapshot: Snapshot = UNREAD

    def unchanged(self) -> bool:
        return self.up.intact() and self.down.intact() and self.snapshot.unchanged(self.module)

    def ready(self) -> bool:
        return self.unchanged() and Patches.untouched(self.module, self)

    def change(self) -> str | None:
        return self.snapshot.change(self.module) or (None if self.unchanged() else LINEARS_CHANGED)

    def __call__(self, x: Tensor, folded: FoldedNorm | None = None) -> Tensor:
        """Return the MLP of x, or of x's norm if one is folded in."""
        up = self.up(x, folded, biased=False)
        y: Tensor = activation_linear(
            up, self.down.weight(), self.down.bias(), self.activation,
            activation_bias=self.up.bias(), precision=self.down.precision(),
        )  # fmt: skip
        return y if self.dropout is None else self.module._modules[self.dropout](y)  # type: ignore[misc]


def find_mlp(module: nn.Module) -> MLPMatch | str | None:
    """Return a match, or why a module that looks like an MLP can't be replaced, or None."""
    linears = [name for name, child in module._modules.items() if is_linear(child)]
    if len(linears) not in (2, 3) or own_forward(module) or len(parameters_of(module)) != 1:
        return None
    if not _goes_up_and_down([sizes_of(module._modules[name]) for name in linears]):  # type: ignore[arg-type]
        return None
    others = [name for name, child in module._modules.items() if name not in linears and child is not None]
    dropouts = [name for name in others if isinstance(module._modules[name], nn.Dropout)]
    if len(dropouts) > 1 or any(list(module._modules[name].parameters()) for name in others):  # type: ignore[union-attr]
        return "it has more than linear layers, an activation and a dropout at its end"
    for name in set(others) - set(dropouts):
        if is_watched(module._modules[name]):  # type: ignore[arg-type]
            return f"its {name} has hooks or a forward of its own"
    for up_names, down_name in _roles(linears):
        up, down = LinearsMatch.found(module, up_names), LinearsMatch.found(module, (down_name,))
        if up is not None and down is not None:
            activation = _activation_of(module, up, down, dropouts)
            if activation is not None:
                return MLPMatch(module, up, down, activation, dropouts[0] if dropouts else None)
    return "it computes something else, or by an activation that onepass doesn't have"


def _goes_up_and_down(sizes: list[tuple[int, int]]) -> bool:
    inputs, outputs = {size[0] for size in sizes}, {size[1] for size in sizes}
    return len(inputs) == 2 and len(outputs) == 2 and bool(inputs & outputs)


def _roles(names: list[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    for *up, down in permutations(names):
        yield tuple(up), down


def _activation_of(module: nn.Module, up: LinearsMatch, down: LinearsMatch, dropouts: list[str]) -> str | None:
    """Return the onepass activation with which small layers in these roles give the result of the module's code."""
    gated = len(up.names) == 2 or up.sizes[0] == 2 * sizes_of(down.linears[0])[0]
    if sum(up.sizes) != (2 if gated else 1) * sizes_of(down.linears[0])[0]:
        return None
    each = 2 * _INNER if gated and len(up.names) == 1 else _INNER
    layers = {name: tiny(layer, _HIDDEN, each, 10 + i) for i, (name, layer) in enumerate(zip(up.names, up.linears, strict=True))}
    layers[down.names[0]] = last = tiny(down.linears[0], _INNER, _HIDDEN, 20)
    children: dict[str, nn.Module] = {**layers, **{name: Function(lambda y: 3 * y + 1) for name in dropouts}}
    x = 3 * randn(7, _HIDDEN)
    found = [probe_forward(probe(module, children, training=training), x) for training in (False, True)]
    first = torch.cat([layers[name](x) for name in up.names], -1).detach()
    for name, act in ACTIVATIONS.items():
        if act.gated == gated:
            inner = act.formula(first[..., :_INNER]) * first[..., _INNER:] if gated else act.formula(first)
            made = last(inner).detach()
            expected = 3 * made + 1 if dropouts else made
            if all(close(each, expected, 1e-6) for each in found):
                return name
    return None


def replace_mlps(model: nn.Module, patches: Patches) -> tuple[dict[nn.Module, MLPMatch], list[AppliedRow]]:
    made, rows = {}, []
    for name, module in model.named_modules():
        with reads_of(module) as reads:
            found = find_mlp(module)
        if isinstance(found, MLPMatch):
            found.snapshot = reads.snapshot()
            found = "it has parameters or buffers beside its layers'" if found.snapshot.reads_tensors else found
        if isinstance(found, MLPMatch):
            found.up.replace(patches)
            patches.set_forward(module, _forward, found)
            made[module] = found
            rows.append(AppliedRow(name, type(module).__name__, "mlp", by=f"activation_linear, {found.activation}", match=found))
        elif found is not None or _looks_like_an_mlp(module):
            rows.append(AppliedRow(name, type(module).__name__, "mlp", why=found or _why(module)))
    return made, rows


def _looks_like_an_mlp(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith(("mlp", "feedforward"))


def _why(module: nn.Module) -> str:
    if own_forward(module):
        return "it has a forward of its own already"
    layers = [child for child in module._modules.values() if child is not None and list(child.parameters())]
    kinds = {f"{type(child).__module__.partition('.')[0]}'s {type(child).__name__}" for child in layers if not is_linear(child)}
    return "its layers are " + ", ".join(sorted(kinds)) if kinds else "it computes something else"


def _forward(self: Any, *args: Tensor, onepass_folded: FoldedNorm | None = None, **named: Tensor) -> Any:
    (x,), mlp = args or named.values(), self._onepass
    if onepass_folded is None and not mlp.unchanged():  # wrapped since, for example by PEFT
        return type(self).forward(self, x)
    return mlp(x, onepass_folded)
