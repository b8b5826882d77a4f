"""Mixers of hybrids: their own code runs with onepass's convolution, delta rule or scan in place of the model's functions.

Where one linear layer is all that reads a mixer's input, its product takes the norm before the mixer in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.attention_trials import TOKENS, random_like
from onepass.integrations.huggingface.context_parallel import check_whole_sequences
from onepass.integrations.huggingface.convolutions import CONVOLUTION, convolution_of, is_causal_convolution
from onepass.integrations.huggingface.delta_mixers import DeltaMixer, find_delta_mixer
from onepass.integrations.huggingface.delta_rules import DELTA_RULE, delta_rule_of, is_delta_rule
from onepass.integrations.huggingface.linear_layers import base_of, is_linear, linear_of, sizes_of
from onepass.integrations.huggingface.linears import FoldedNorm, LinearsMatch
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import FP64, Function, own_forward, probe, probe_forward, randn, thread
from onepass.integrations.huggingface.rotation import globals_with, with_globals
from onepass.integrations.huggingface.scans import SCAN, WHOLE_MIXER, declines, declining, is_scan, scan_of
from onepass.integrations.huggingface.snapshot import CODE_CHANGED, UNREAD, Snapshot, reads_of


class _Known(NamedTuple):
    """A function that models' code calls by name."""

    is_it: Callable[[Callable[..., Any]], bool]
    ours: Callable[[Callable[..., Any]], Callable[..., Any]]
    result: Callable[..., Any]  # of the shape of its result: an operand
    op: str = ""  # none: it only makes way for the others


def _first(x: Any, *_: Any, **__: Any) -> Any:
    return x


_KNOWN = {
    CONVOLUTION: _Known(is_causal_convolution, convolution_of, _first, "causal_conv1d"),
    DELTA_RULE: _Known(is_delta_rule, delta_rule_of, lambda q, k, v, **_: (v, None), "gated_delta_rule"),
    SCAN: _Known(is_scan, scan_of, _first, "mamba_chunk_scan"),
    WHOLE_MIXER: _Known(declines, declining, declining(_first)),
}
_NO_MASK_OR_CACHE = "attention_mask", "cache", "past_key_values", "cache_params"


@dataclass
class MixerMatch:
    """A module whose code calls functions of these names."""

    module: nn.Module
    names: tuple[str, ...]
    original: Callable[..., Any]  # a copy of its class's forward that calls onepass's
    snapshot: Snapshot
    whole: DeltaMixer | None = None
    first: LinearsMatch | None = None  # the layer that is all that reads its input
    read: Snapshot = UNREAD  # by the trial that says so
    running: dict[int, tuple[Tensor, FoldedNorm]] = field(default_factory=dict)  # by thread: an input, and the norm before it

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"original": None, "running": {}}  # with_globals' function can't be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.original = _with_ours(type(self.module).forward, self.names)

    def words(self) -> str:
        ops = [op for each in self.names if (op := _KNOWN[each].op)]
        return ", ".join(ops if self.whole is None else [*ops, "delta_gates", "gated_norm_linear"])

    def change(self) -> str | None:
        return None if self.snapshot.has_code_of(self.module) else CODE_CHANGED

    @property
    def takes_norms(self) -> bool:
        return self.first is not None or self.whole is not None

    def ready(self) -> bool:
        """Whether a norm may be handed to it: a call that can't take it in computes the norm first."""
        return Patches.untouched(self.module, self)

    def folds(self, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether its code reads the input by its first layer alone in this call."""
        if args or self.first is None or any(options.get(name) is not None for name in _NO_MASK_OR_CACHE):
            return False
        return self.read.unchanged(self.module) and self.first.intact() and not self.first.are_wrapped()

    def by_original(self, *args: Any, **options: Any) -> Any:
        return (self.original if self.change() is None else type(self.module).forward)(self.module, *args, **options)

    def by_folding(self, x: Tensor, options: dict[str, Any], folded: FoldedNorm) -> Any:
        key = thread()
        self.running[key] = x, folded
        try:
            return self.by_original(x, **options)
        finally:
            self.running.pop(key, None)

    def product(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the first layer's product with x, or with its norm where that is folded in."""
        read, folded = self.running.get(thread(), (None, None))
        return linear_of(layer, x) if read is not x or self.first is None else self.first(x, folded)


def mixer_of(module: nn.Module) -> MixerMatch | None:
    """Return the module's match, or None where it is no mixer that onepass runs."""
    match = vars(module).get("_onepass")
    return match if isinstance(match, MixerMatch) and match.module is module else None


def replace_mixers(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    rows = []
    right: dict[Any, bool] = {}
    wholes: list[DeltaMixer] = []
    for name, module in model.named_modules():
        forward, kind = type(module).forward, type(module).__name__
        called = {each: found[each] for each in _KNOWN if each in (found := globals_with(each, forward))}
        if called and own_forward(module):
            rows.append(AppliedRow(name, kind, "qkv", why="it has a forward of its own already"))
            continue
        for each, stock in called.items():
            if stock not in right:
                right[stock] = _KNOWN[each].is_it(inspect.unwrap(stock))
            if not right[stock]:
                rows.append(AppliedRow(name, kind, "qkv", why=f"its {each} computes something else"))
        names = tuple(each for each, stock in called.items() if right[stock])
        if any(_KNOWN[each].op for each in names):
            whole = find_delta_mixer(module, wholes) if {CONVOLUTION, DELTA_RULE} <= set(names) else None
            match = MixerMatch(module, names, _with_ours(forward, names), Snapshot(code=forward), whole)
            if whole is not None:
                wholes.append(whole)
                whole.inputs.replace(patches)
            else:
                with reads_of(module) as reads:
                    match.first = _reader_of_input(module, names)
                match.read = reads.snapshot()
            if match.first is not None:
                patches.set_forward(match.first.linears[0], _hand_out, match)
            patches.set_forward(module, _forward if whole is None else _whole_forward, match)
            rows.append(AppliedRow(name, kind, "qkv", by=match.words(), match=match))
    return rows


def _with_ours(forward: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    return with_globals(forward, {each: _KNOWN[each].ours(globals_with(each, forward)[each]) for each in names})


def _reader_of_input(module: nn.Module, names: tuple[str, ...]) -> LinearsMatch | None:
    """Return the one linear layer that the module's input goes to, or None where other code reads the input too.

    Args:
        names: functions that the module's code calls.
    """
    children: dict[str, Any] = {name: child for name, child in module._modules.items() if child is not None}
    sizes = {name: sizes_of(base_of(child)) for name, child in children.items() if is_linear(base_of(child))}
    code = with_globals(type(module).forward, {each: _KNOWN[each].result for each in names})
    own = {name: None if p is None else randn(*p.shape) for name, p in module._parameters.items()}
    stand_ins = {name: _stand_in(child, sizes[name][1] if name in sizes else None) for name, child in children.items()}
    for name, (width, _) in sizes.items():
        x = torch.full((1, TOKENS, width), float("nan"), dtype=FP64, device="cpu")
        for layer in sizes:
            stand_ins[layer].calls.clear()
        y = probe_forward(probe(module, stand_ins, training=True, _parameters=own), x, probed_code=code)
        if not isinstance(y, Tensor) or not y.isfinite().all():
            continue
        if [layer for layer in sizes for args, _ in stand_ins[layer].calls if args[0] is x] == [name]:
            return LinearsMatch.found(module, (name,))
    return None


def _stand_in(child: nn.Module, outputs: int | None) -> Any:
    """Return what a trial has in place of a child. outputs: of a linear layer."""
    if isinstance(child, nn.Conv1d):
        own = {name: None if p is None else randn(*p.shape) for name, p in child._parameters.items()}
        return probe(child, {}, _parameters=own)
    made = Function(_first if outputs is None else partial(random_like, size=outputs))
    numbers = {name: value for name, value in vars(child).items() if type(value) is float}
    vars(made).update(dict.fromkeys(child._parameters), **numbers)  # for a function that is given the whole mixer
    return made


def _forward(self: Any, *args: Any, onepass_folded: FoldedNorm | None = None, **options: Any) -> Any:
    check_whole_sequences(self)
    match: MixerMatch = self._onepass
    if onepass_folded is None:
        return match.by_original(*args, **options)
    x, *rest = args
    if match.folds(tuple(rest), options):
        return match.by_folding(x, options, onepass_folded)
    return match.by_original(onepass_folded.unfold(x), *rest, **options)


def _whole_forward(self: Any, hidden_states: Tensor, *args: Any, onepass_folded: FoldedNorm | None = None, **options: Any) -> Any:
    check_whole_sequences(self)
    whole: DeltaMixer = self._onepass.whole
    if whole.suits(hidden_states, args, options):
        return whole(hidden_states, options, onepass_folded)
    return _forward(self, hidden_states, *args, onepass_folded=onepass_folded, **options)


def _hand_out(self: Any, x: Tensor) -> Tensor:
    return self._onepass.product(self, x)  # type: ignore[no-any-return]
