"""Transformer layers: fuses norms into the linear layers after them, and residual additions into the norms.

A layer is recognised by running its code with stand-ins for its children. It must compute h = x + after(attention(before(x)))
and then h + after(mlp(before(h))). `before` is a norm, and `after` is a norm, a dropout or nothing. Attention and MLP may also
both read x, as in GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.attentions import AttentionMatch
from onepass.integrations.huggingface.linears import FoldedNorm
from onepass.integrations.huggingface.mlps import MLPMatch
from onepass.integrations.huggingface.norms import NormMatch
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import Function, close, own_forward, parameters_of, probe, probe_forward, randn
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, reads_of

_OF_NO_USE = frozenset(("use_cache", "cache_position", "position_ids"))  # ignored if a layer doesn't pass them to its attention


@dataclass(frozen=True)
class LayerNames:
    """The names of a layer's children, by role."""

    attention: str
    mlp: str
    before_attention: str
    before_mlp: str
    after_attention: str | None
    after_mlp: str | None
    parallel: bool  # attention and MLP both read x


@dataclass(frozen=True)
class AttentionArguments:
    """The arguments that a layer passes to its attention."""

    names: tuple[str, ...]  # of the layer's own arguments, after the hidden states
    passed: frozenset[str]  # those that it passes on under the same names
    others_too: bool  # whether it passes on keywords that it doesn't name
    by_name: bool  # whether it passes hidden states as a keyword, which hooks see

    def handed_on(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any] | None:
        """Return the attention's arguments for a call. Return None if an argument is given that attention does not get."""
        passed = {}
        named = dict(zip(self.names, args))  # noqa: B905  (PyTorch 2.9's compiler takes strict=False for True)
        for name, value in {**named, **options}.items():
            if (name in self.passed) if name in self.names else self.others_too:
                passed[name] = value
            elif value is not None and value is not False and name not in _OF_NO_USE:
                return None
        return passed


@dataclass
class LayerMatch:
    module: nn.Module
    shape: LayerNames
    arguments: AttentionArguments
    attention: AttentionMatch
    mlp: MLPMatch | None  # None for another module in its place, such as experts
    before_attention: NormMatch
    before_mlp: NormMatch
    snapshot: Snapshot = UNREAD

    @property
    def made_by(self) -> str:
        folds = self.attention.ready() or (self.mlp is not None and self.mlp.ready())
        norm = self.before_mlp.name.partition(",")[0]
        return f"{'norm_linear' if folds else norm}, with the residual's sums"

    def change(self) -> str | None:
        return self.snapshot.change(self.module)

    def __call__(self, x: Tensor, handed_on: dict[str, Any]) -> Tensor:
        made, h = self._attention(x, handed_on)
        if self.shape.parallel:
            up, h = self._mlp(h, None)
            return h + (up + made)
        up, h = self._mlp(h, made)
        return h + up

    def _attention(self, x: Tensor, handed_on: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the attention's output and x. The fused norm returns x, so that its backward adds up x's gradients."""
        attention = self._child(self.shape.attention)
        ours = self._normed_by(self.before_attention, self.shape.before_attention)
        if ours and attention is self.attention.module and self.attention.ready():
            folded = FoldedNorm(self.before_attention)
            made, h = attention(x, onepass_folded=folded, **handed_on)[0], folded.h
            assert h is not None
        else:
            normed, h = self._child(self.shape.before_attention)(x), x
            inputs = ((), {"hidden_states": normed}) if self.arguments.by_name else ((normed,), {})
            made = attention(*inputs[0], **inputs[1], **handed_on)[0]
        return self._then(self.shape.after_attention, made), h

    def _mlp(self, h: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the MLP's output for the sum of h and `residual`, and the sum."""
        mlp = self._child(self.shape.mlp)
        ours = self._normed_by(self.before_mlp, self.shape.before_mlp)
        if ours and self.mlp is not None and mlp is self.mlp.module and self.mlp.ready():
            folded = FoldedNorm(self.before_mlp, residual)
            made, total = mlp(h, onepass_folded=folded), folded.h
            assert total is not None
        elif ours and residual is not None:
            normed, total = self.before_mlp(h, residual)
            made = mlp(normed)
        else:
            total = h if residual is None else h + residual
            made = mlp(self._child(self.shape.before_mlp)(total))
        return self._then(self.shape.after_mlp, made), total

    def _normed_by(self, norm: NormMatch, name: str) -> bool:
        """Whether this norm still has its place, and may be fused."""
        return self._child(name) is norm.module and norm.untouched()

    def _child(self, name: str) -> Any:
        return self.module._modules[name]

    def _then(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else self._child(name)(x)


# ---- recognition ----


def find_layer(
    module: nn.Module,
    norms: dict[nn.Module, NormMatch],
    attentions: dict[nn.Module, AttentionMatch],
    mlps: dict[nn.Module, MLPMatch],
) -> LayerMatch | None:
    children = {name: child for name, child in module._modules.items() if child is not None}
    own = [name for name, child in children.items() if child in attentions]
    if len(own) != 1 or own_forward(module):
        return None
    normed = [name for name, child in children.items() if child in norms]
    dropouts = [name for name, child in children.items() if isinstance(child, nn.Dropout)]
    rest = [name for name in children if name not in (*own, *normed, *dropouts)]
    if len(rest) != 1 or len(normed) not in (2, 4) or not isinstance(mlps.get(children[rest[0]]), MLPMatch | None):
        return None
    shape = _shape_of(module, own[0], rest[0], normed, dropouts)
    if shape is None or adds_tensors(module, own[0]):
        return None
    first, second = norms[children[shape.before_attention]], norms[children[shape.before_mlp]]
    return LayerMatch(
        module,
        shape,
        arguments_of(module, own[0]),
        attentions[children[own[0]]],
        mlps.get(children[rest[0]]),
        first,
        second,
    )


def _shape_of(module: nn.Module, attention: str, mlp: str, norms: list[str], dropouts: list[str]) -> LayerNames | None:
    """Return the roles whose formula gives the same result as the layer's code, with stand-ins for all children."""
    x = randn(1, 3, 4)
    functions: dict[str, Any] = {attention: torch.sin, mlp: lambda x: torch.cos(1.3 * x)}
    functions |= {name: lambda x, factor=i + 2: factor * x - 0.1 * factor for i, name in enumerate([*norms, *dropouts])}
    results = [probe_forward(_standing(module, functions, attention, training), x) for training in (False, True)]
    for shape in _shapes(attention, mlp, norms, dropouts):
        expected = _formula(shape, functions, x)
        if all(close(each, expected) for each in results):
            return shape
    return None


def _standing(module: nn.Module, functions: dict[str, Any], attention: str, training: bool = False) -> nn.Module:
    children: dict[str, nn.Module] = {name: Function(function) for name, function in functions.items()}
    children[attention] = Function(_as_attention(functions[attention]))
    return probe(module, children, training=training)


def _as_attention(function: Any) -> Any:
    """Wrap a function as an attention module's forward: it takes any further arguments and returns no attention weights."""

    def called(*args: Any, hidden_states: Tensor | None = None, **options: Any) -> tuple[Tensor, None]:
        return function(args[0] if hidden_states is None else hidden_states), None

    return called


def _shapes(attention: str, mlp: str, norms: list[str], dropouts: list[str]) -> Iterator[LayerNames]:
    for first, second, *after in permutations(norms):
        for later in [after] if after else product([None, *dropouts], repeat=2):
            for parallel in (False, True):
                yield LayerNames(attention, mlp, first, second, later[0], later[1], parallel)


def _formula(shape: LayerNames, functions: dict[str, Any], x: Tensor) -> Tensor:
    def then(name: str | None, y: Tensor) -> Tensor:
        return y if name is None else functions[name](y)

    h = x + then(shape.after_attention, functions[shape.attention](functions[shape.before_attention](x)))
    made = then(shape.after_mlp, functions[shape.mlp](functions[shape.before_mlp](x if shape.parallel else h)))
    return h + made


def arguments_of(module: nn.Module, attention: str) -> AttentionArguments:
    """Find the arguments by passing each alone, and checking whether the attention receives it."""
    parameters = parameters_of(module)
    names = tuple(name for name, each in list(parameters.items())[1:] if each.kind is each.POSITIONAL_OR_KEYWORD)
    passed = frozenset(name for name in names if _arrives(module, attention, **{name: object()}))
    by_name = any("hidden_states" in options for options in _calls(module, attention))
    return AttentionArguments(names, passed, _arrives(module, attention, onepass_asks=object()), by_name)


def adds_tensors(module: nn.Module, attention: str) -> bool:
    """Whether the layer passes its attention a tensor that it was not given, such as a mask of its own."""
    given = (value for options in _calls(module, attention) for name, value in options.items() if name != "hidden_states")
    return any(isinstance(value, Tensor) for value in given)


def _arrives(module: nn.Module, attention: str, **given: object) -> bool:
    ((name, value),) = given.items()
    return any(options.get(name) is value for options in _calls(module, attention, **given))


def _calls(module: nn.Module, attention: str, **given: Any) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call of the attention."""
    functions = {child: lambda x: x for child, there in module._modules.items() if there is not None}
    made = _standing(module, functions, attention)
    probe_forward(made, randn(1, 3, 4), **given)
    stub: Any = made._modules[attention]
    return [options for _, options in stub.calls]


# ---- replacement ----


def replace_layers(
    model: nn.Module,
    patches: Patches,
    norms: dict[nn.Module, NormMatch],
    attentions: dict[nn.Module, AttentionMatch],
    mlps: dict[nn.Module, MLPMatch],
) -> list[AppliedRow]:
    rows = []
    for name, module in model.named_modules():
        with reads_of(module) as reads:
            match = find_layer(module, norms, attentions, mlps)
        if match is not None:
            match.snapshot = reads.snapshot()
        if match is not None and not match.snapshot.read_tensors:
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(name, type(module).__name__, "norm", by=match.made_by, match=match))
        elif _is_layer(name, module, norms, attentions):
            why = "its norms stay apart: what it makes of its children is not known"
            rows.append(AppliedRow(name, type(module).__name__, "norm", why=why))
    return rows


def _is_layer(name: str, module: nn.Module, norms: Mapping[nn.Module, Any], attentions: Mapping[nn.Module, Any]) -> bool:
    """Whether this is a layer for the report: it has attention that is known, or is an element of a list, with norms."""
    there = [child for child in module._modules.values() if child is not None]
    return any(child in attentions for child in there) or (
        name.rpartition(".")[2].isdigit() and any(child in norms for child in there)
    )


def _forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
    layer: LayerMatch = self._onepass
    handed_on = layer.arguments.handed_on(args, options) if layer.snapshot.unchanged(self) else None
    if handed_on is None:
        return type(self).forward(self, hidden_states, *args, **options)
    if _is_checkpointed(self):
        return self._gradient_checkpointing_func(partial(layer, handed_on=_without_caches(handed_on)), hidden_states)
    return layer(hidden_states, handed_on)


def _is_checkpointed(module: Any) -> bool:
    """Whether the class's forward itself would recompute in backward. A __call__ that does so also covers our forward."""
    return module.training and getattr(module, "gradient_checkpointing", False) and type(module).__call__ is nn.Module.__call__


def _without_caches(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without caches, because recomputation would write keys and values a second time."""
    return {name: value for name, value in options.items() if name not in ("use_cache", "past_key_values", "cache", "layer_past")}
