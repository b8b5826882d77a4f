"""Mixers of hybrids: their own code runs with onepass's convolution, delta rule or scan in place of the model's functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from onepass.integrations.huggingface.convolutions import CONVOLUTION, convolution_of, is_causal_convolution
from onepass.integrations.huggingface.delta_mixers import DeltaMixer, find_delta_mixer
from onepass.integrations.huggingface.delta_rules import DELTA_RULE, delta_rule_of, is_delta_rule
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import own_forward
from onepass.integrations.huggingface.rotation import globals_with, with_globals
from onepass.integrations.huggingface.scans import SCAN, WHOLE_MIXER, declines, declining, is_scan, scan_of
from onepass.integrations.huggingface.snapshot import CODE_CHANGED, Snapshot


class _Known(NamedTuple):
    """A function that models' code calls by name."""

    is_it: Callable[[Callable[..., Any]], bool]
    ours: Callable[[Callable[..., Any]], Callable[..., Any]]
    op: str = ""  # none: it only makes way for the others


_KNOWN = {
    CONVOLUTION: _Known(is_causal_convolution, convolution_of, "causal_conv1d"),
    DELTA_RULE: _Known(is_delta_rule, delta_rule_of, "gated_delta_rule"),
    SCAN: _Known(is_scan, scan_of, "mamba_chunk_scan"),
    WHOLE_MIXER: _Known(declines, declining),
}


@dataclass
class MixerMatch:
    """A module whose code calls functions of these names."""

    module: nn.Module
    names: tuple[str, ...]
    original: Callable[..., Any]  # a copy of its class's forward that calls onepass's
    snapshot: Snapshot
    whole: DeltaMixer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"original": None}  # with_globals' function can't be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.original = _with_ours(type(self.module).forward, self.names)

    def words(self) -> str:
        ops = [op for each in self.names if (op := _KNOWN[each].op)]
        return ", ".join(ops if self.whole is None else [*ops, "delta_gates", "gated_norm_linear"])

    def change(self) -> str | None:
        return None if self.snapshot.has_code_of(self.module) else CODE_CHANGED


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
            patches.set_forward(module, _forward if whole is None else _whole_forward, match)
            rows.append(AppliedRow(name, kind, "qkv", by=match.words(), match=match))
    return rows


def _with_ours(forward: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    return with_globals(forward, {each: _KNOWN[each].ours(globals_with(each, forward)[each]) for each in names})


def _forward(self: Any, *args: Any, **options: Any) -> Any:
    match: MixerMatch = self._onepass
    return (match.original if match.change() is None else type(self).forward)(self, *args, **options)


def _whole_forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
    whole: DeltaMixer = self._onepass.whole
    if whole.suits(hidden_states, args, options):
        return whole(hidden_states, options)
    return _forward(self, hidden_states, *args, **options)
