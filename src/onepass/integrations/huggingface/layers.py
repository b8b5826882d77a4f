"""Transformer layers: fuses norms into the linear layers after them, and residual additions into the norms.

A layer is recognised by running its code with stand-ins for its children. It must compute h = x + f after(mixer(before(x))) and
then h + f after(mlp(before(h))). The mixer is attention, or anything else that mixes tokens. `before` is a norm, `after` a norm,
a dropout or nothing, and f a number of the layer's, or 1. There may be two MLPs that are added up (experts, and one beside them).
Attention and MLP may also both read x, as in GPT-NeoX. A mixer or MLP may return a tuple, of which the layer takes the first.
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

_OF_NO_USE = frozenset(  # ignored if a layer doesn't pass them to its mixer
    ("use_cache", "cache_position", "position_ids", "position_embeddings")
)


@dataclass(frozen=True)
class LayerNames:
    """The names of a layer's children, by role."""

    attention: str  # or another mixer
    mlps: tuple[str, ...]
    before_attention: str
    before_mlp: str
    after_attention: str | None = None
    after_mlp: str | None = None
    parallel: bool = False  # attention and MLP both read x
    factor: str | None = None  # the attribute that multiplies what is added to the residual


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
    attention: AttentionMatch | None  # None for another mixer
    mlp: MLPMatch | None  # None for other modules in its place, such as experts
    before_attention: NormMatch
    before_mlp: NormMatch
    snapshot: Snapshot = UNREAD

    @property
    def made_by(self) -> str:
        folds = any(each is not None and each.ready() for each in (self.attention, self.mlp))
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
        match = self.attention
        if ours and match is not None and attention is match.module and match.ready():
            folded = FoldedNorm(self.before_attention)
            made, h = attention(x, onepass_folded=folded, **handed_on), folded.h
            assert h is not None
        else:
            normed, h = self._child(self.shape.before_attention)(x), x
            inputs = ((), {"hidden_states": normed}) if self.arguments.by_name else ((normed,), {})
            made = attention(*inputs[0], **inputs[1], **handed_on)
        return self._then(self.shape.after_attention, made, x.shape), h

    def _mlp(self, h: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the MLP's output for the sum of h and `residual`, and the sum."""
        mlp, *others = map(self._child, self.shape.mlps)
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
            normed = self._child(self.shape.before_mlp)(total)
            made = mlp(normed)
        for other in others:
            made = made + other(normed)
        return self._then(self.shape.after_mlp, made, h.shape), total

    def _normed_by(self, norm: NormMatch, name: str) -> bool:
        """Whether this norm still has its place, and may be fused."""
        return self._child(name) is norm.module and norm.untouched()

    def _child(self, name: str) -> Any:
        return self.module._modules[name]

    def _then(self, name: str | None, made: Any, shape: torch.Size) -> Tensor:
        """Return what is added to the residual, of a mixer's or an MLP's result."""
        x = made[0] if isinstance(made, tuple) else made
        x = x.view(shape)  # Llama 4's experts return rows
        x = x if name is None else self._child(name)(x)
        return x if self.shape.factor is None else x * getattr(self.module, self.shape.factor)  # type: ignore[no-any-return]


# ---- recognition ----


def find_layer(
    module: nn.Module,
    norms: dict[nn.Module, NormMatch],
    attentions: dict[nn.Module, AttentionMatch],
    mlps: dict[nn.Module, MLPMatch],
) -> LayerMatch | None:
    children = {name: child for name, child in module._modules.items() if child is not None}
    own = [name for name, child in children.items() if child in attentions]
    normed = [name for name, child in children.items() if child in norms]
    dropouts = [name for name, child in children.items() if isinstance(child, nn.Dropout)]
    rest = [name for name in children if name not in (*normed, *dropouts)]
    if len(own) > 1 or own_forward(module) or len(rest) not in (2, 3) or len(normed) not in (2, 4):
        return None
    found = _shape_of(module, own or rest, rest, normed, dropouts)
    if found is None or adds_tensors(module, found[0].attention, found[1]):
        return None
    shape, arguments = found[0], arguments_of(module, found[0].attention, found[1])
    first, second = norms[children[shape.before_attention]], norms[children[shape.before_mlp]]
    mlp = mlps.get(children[shape.mlps[0]]) if len(shape.mlps) == 1 else None
    return LayerMatch(module, shape, arguments, attentions.get(children[shape.attention]), mlp, first, second)


_MIXER, *_MLPS = torch.sin, lambda x: torch.cos(1.3 * x), lambda x: torch.tanh(0.7 * x)  # stand-ins


def _shape_of(
    module: nn.Module, mixers: list[str], rest: list[str], norms: list[str], dropouts: list[str]
) -> tuple[LayerNames, frozenset[str]] | None:
    """Return the roles whose formula gives the same result as the layer's code, with stand-ins for all children, and which of
    them return tuples."""
    x = randn(1, 3, 4)
    others: dict[str, Any] = {
        name: lambda x, factor=i + 2: factor * x - 0.1 * factor for i, name in enumerate([*norms, *dropouts])
    }
    for mixer in mixers:
        mlps = tuple(name for name in rest if name != mixer)
        functions = {mixer: _MIXER, **dict(zip(mlps, _MLPS, strict=False)), **others}
        for tuples in map(frozenset, ({mixer}, set(), {mixer, *mlps}, {*mlps})):
            results = [_run(_standing(module, functions, tuples, training), x) for training in (False, True)]
            shapes = _shapes(module, mixer, mlps, norms, dropouts) if all(isinstance(y, Tensor) for y in results) else ()
            for shape in shapes:
                expected = _formula(module, shape, functions, x)
                if all(close(each, expected) for each in results):
                    return shape, tuples
    return None


def _run(made: nn.Module, x: Tensor, **given: Any) -> Any:
    """Run the layer's code with None for arguments that have no default."""
    others = list(parameters_of(made).items())[1:]
    needed = [name for name, each in others if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return probe_forward(made, x, **dict.fromkeys(needed) | given)


def _standing(module: nn.Module, functions: dict[str, Any], tuples: frozenset[str], training: bool = False) -> nn.Module:
    children = {name: Function(_as_child(function, name in tuples)) for name, function in functions.items()}
    return probe(module, dict(children), training=training)


def _as_child(function: Any, returns_tuple: bool) -> Any:
    """Wrap a function as a child's forward: it takes any further arguments, and returns no attention weights or router scores."""

    def called(*args: Any, hidden_states: Tensor | None = None, **options: Any) -> Any:
        made = function(args[0] if hidden_states is None else hidden_states)
        return (made, None) if returns_tuple else made

    return called


def _shapes(module: nn.Module, mixer: str, mlps: tuple[str, ...], norms: list[str], dropouts: list[str]) -> Iterator[LayerNames]:
    numbers = [name for name, value in vars(module).items() if isinstance(value, float) and value != 1.0]
    for first, second, *after in permutations(norms):
        for later in [after] if after else product([None, *dropouts], repeat=2):
            for parallel, factor in product((False, True), (None, *numbers)):
                yield LayerNames(mixer, mlps, first, second, later[0], later[1], parallel, factor)


def _formula(module: nn.Module, shape: LayerNames, functions: dict[str, Any], x: Tensor) -> Tensor:
    def then(name: str | None, y: Tensor) -> Tensor:
        y = y if name is None else functions[name](y)
        return y if shape.factor is None else y * getattr(module, shape.factor)

    h = x + then(shape.after_attention, functions[shape.attention](functions[shape.before_attention](x)))
    normed = functions[shape.before_mlp](x if shape.parallel else h)
    return h + then(shape.after_mlp, sum((functions[name](normed) for name in shape.mlps), torch.zeros_like(x)))


def arguments_of(module: nn.Module, attention: str, tuples: frozenset[str] | None = None) -> AttentionArguments:
    """Find the arguments by passing each alone, and checking whether the attention receives it."""
    parameters = parameters_of(module)
    names = tuple(name for name, each in list(parameters.items())[1:] if each.kind is each.POSITIONAL_OR_KEYWORD)
    passed = frozenset(name for name in names if _arrives(module, attention, tuples, **{name: object()}))
    by_name = any("hidden_states" in options for options in _calls(module, attention, tuples))
    return AttentionArguments(names, passed, _arrives(module, attention, tuples, onepass_asks=object()), by_name)


def adds_tensors(module: nn.Module, attention: str, tuples: frozenset[str] | None = None) -> bool:
    """Whether the layer passes its attention a tensor that it was not given, such as a mask of its own."""
    given = (value for options in _calls(module, attention, tuples) for name, value in options.items() if name != "hidden_states")
    return any(isinstance(value, Tensor) for value in given)


def _arrives(module: nn.Module, attention: str, tuples: frozenset[str] | None, **given: object) -> bool:
    ((name, value),) = given.items()
    return any(options.get(name) is value for options in _calls(module, attention, tuples, **given))


def _calls(module: nn.Module, attention: str, tuples: frozenset[str] | None, **given: Any) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call of the attention. tuples: children that return some; None: the attention."""
    functions = {child: lambda x: x for child, there in module._modules.items() if there is not None}
    made = _standing(module, functions, frozenset((attention,)) if tuples is None else tuples)
    _run(made, randn(1, 3, 4), **given)
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
