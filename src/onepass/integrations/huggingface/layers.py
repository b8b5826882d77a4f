"""Transformer layers: fuses norms into the linear layers after them, and residual additions into the norms.

A layer's code is recorded as steps: calls of its children, and what it makes of their results (`layer_trace.py`). Steps that an
op of onepass does in one pass are joined. The other children are called as the layer's code calls them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.attentions import AttentionMatch
from onepass.integrations.huggingface.layer_steps import (
    Cast,
    ChildCall,
    ChildNorm,
    FoldedCall,
    JoinedNorm,
    LayerStep,
    PostNorm,
    Program,
    Sum,
    Taker,
)
from onepass.integrations.huggingface.layer_trace import LayerArguments, find_program, run_code
from onepass.integrations.huggingface.mixers import MixerMatch, mixer_of
from onepass.integrations.huggingface.mlps import MLPMatch
from onepass.integrations.huggingface.norms import NormMatch
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import Function, own_forward, probe, randn
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, reads_of


@dataclass
class LayerMatch:
    """A layer whose steps are known, some of them joined."""

    module: nn.Module
    program: Program
    arguments: LayerArguments
    snapshot: Snapshot = UNREAD
    other_in_fp16: bool = False  # its code asks for that type, as BART's clamps there, which no trial in fp64 shows

    @property
    def made_by(self) -> str:
        folded = [step for step in self.program.steps if isinstance(step, FoldedCall)]
        norms: list[JoinedNorm] = [step for step in self.program.steps if isinstance(step, JoinedNorm)]
        norms += [step.norm for step in folded]
        norm = norms[0].match.name.partition(",")[0]
        return f"{'norm_linear' if any(step.match.ready() for step in folded) else norm}, with the residual's sums"

    def change(self) -> str | None:
        return self.snapshot.change(self.module)

    def left(self) -> str | None:
        """Why its own code runs, with the norms apart, though nothing was changed."""
        half = self.other_in_fp16 and any(p.dtype is torch.float16 for p in self.module.parameters())
        return "in fp16 its own code, which does something else there" if half else None

    def takes(self, x: Any) -> bool:
        return not (self.other_in_fp16 and isinstance(x, Tensor) and x.dtype is torch.float16)

    def given(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a call that the program takes, or None."""
        return self.arguments.given(args, options) if self.snapshot.unchanged(self.module) else None

    def __call__(self, x: Tensor, given: dict[str, Any]) -> Any:
        return self.program.run(self.module, x, given)


# ---- recognition ----

_NOT_KNOWN = "its norms stay apart: what it makes of its children is not known"
_NOTHING_JOINED = "its norms stay apart: none is of a sum, or before one layer that takes it in"
_SHARED = "its norms stay apart: several layers read one's result, which is computed and kept once"


def find_layer(
    module: nn.Module,
    norms: Mapping[nn.Module, NormMatch],
    attentions: Mapping[nn.Module, AttentionMatch],
    mlps: Mapping[nn.Module, MLPMatch],
) -> LayerMatch | str:
    """Return a match, or why there is none."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    own_norms = {name: norms[child] for name, child in children.items() if child in norms}
    if own_forward(module) or not own_norms or len(own_norms) == len(children):
        return _NOT_KNOWN
    plain = frozenset(name for name, child in children.items() if name in own_norms or isinstance(child, nn.Dropout))
    found = find_program(module, plain)
    if found is None or not any(isinstance(step, Sum) for step in found.program.steps):
        return _NOT_KNOWN
    takers = {
        name: match
        for name, child in children.items()
        if (match := attentions.get(child) or mlps.get(child) or mixer_of(child)) is not None
    }
    program = joined(found.program, own_norms, takers)
    if not any(isinstance(step, JoinedNorm | FoldedCall) for step in program.steps):
        steps = found.program.steps
        results = [step.results[0][1] for step in steps if _is_norm(step, own_norms)]
        shared = any(sum(step.reads.count(y) for step in steps) > 1 for y in results)
        return _SHARED if shared else _NOTHING_JOINED
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return LayerMatch(module, program, found.arguments, other_in_fp16=code is not None and "float16" in code.co_names)


def joined(program: Program, norms: dict[str, NormMatch], takers: Mapping[str, Taker]) -> Program:
    """Join norms with sums before or after them, and with attention or an MLP if nothing else reads them."""
    steps: list[LayerStep | None] = [*program.steps]
    readers: dict[int, list[int]] = {each: [len(steps)] for each in program.returned}
    for at, step in reversed([*enumerate(program.steps)]):
        for value in step.reads:
            readers[value] = [at, *readers.get(value, ())]
    normed = {step.results[0][1]: at for at, step in enumerate(program.steps) if _is_norm(step, norms)}
    casts = {step.result: step.a for step in program.steps if isinstance(step, Cast)}
    sums = {step.result: at for at, step in enumerate(program.steps) if isinstance(step, Sum) and not step.in_place}
    for total, at in [*sums.items()]:
        for y, residual in (program.steps[at].reads, program.steps[at].reads[::-1]):
            call = None if y not in normed or readers[y] != [at] else program.steps[normed[y]]
            if isinstance(call, ChildCall) and not norms[call.name].layer:
                steps[normed.pop(y)] = None
                steps[sums.pop(total)] = PostNorm(call.name, norms[call.name], call.inputs[0], total, residual)
                break
    for y, at in normed.items():
        step = program.steps[at]
        assert isinstance(step, ChildCall)
        (x,) = step.inputs
        norm = ChildNorm(step.name, norms[step.name], x, y, None, x, casts.get(x))
        if x in sums and readers[x][0] == at:
            first, added = sorted(program.steps[sums[x]].reads)  # the sum has the type of what was there first
            norm = replace(norm, x=first, residual=added)
            steps[sums[x]], steps[at] = None, norm
        after, *others = readers.get(y, [len(steps)])
        taker = None if others or after == len(steps) else steps[after]
        if not isinstance(taker, ChildCall) or taker.reads != (y,) or not _takes(taker, takers.get(taker.name)):
            continue
        if norm.residual is None or not any(at < other < after for other in readers[x]):  # nobody waits for the sum
            steps[at], steps[after] = None, FoldedCall(norm, taker, takers[taker.name])
    return Program.of(tuple(step for step in steps if step is not None), program.result, program.size)


def _is_norm(step: LayerStep, norms: Mapping[str, NormMatch]) -> TypeGuard[ChildCall]:
    if not isinstance(step, ChildCall) or step.name not in norms:
        return False
    return not step.named and len(step.inputs) == 1 and len(step.results) == 1


def _takes(call: ChildCall, match: Taker | None) -> bool:
    """Whether this call of attention, of a mixer or of an MLP can take a norm in."""
    if isinstance(match, MixerMatch):
        return match.takes_norms and not call.is_tuple
    if isinstance(match, AttentionMatch):
        return match.projections is not None and all(item < 2 for item, _ in call.results) and _projects_its_input(match, call)
    return match is not None and not (call.constants or call.handed_on or call.others is not None)


def _projects_its_input(match: AttentionMatch, call: ChildCall) -> bool:
    """Whether attention's layers read its input, whatever else the call hands on: those of cross-attention read that."""
    layers = match.projections
    assert layers is not None
    x, other = randn(2, 3, 4), randn(2, 3, 4, seed=2)
    for name, _ in call.handed_on:
        stand_ins = {own: Function(partial(_zeros, n)) for own, n in zip(layers.names, layers.sizes, strict=True)}
        with suppress(Exception):  # of an argument that must be something else than a tensor
            run_code(probe(match.module, dict(stand_ins)), x, {name: other})
        if any(args[0] is not x for each in stand_ins.values() for args, _ in each.calls):
            return False
    return True


def _zeros(width: int, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width)


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
        if isinstance(match, LayerMatch):
            match.snapshot = reads.snapshot()
            if not match.snapshot.read_tensors <= match.program.own_tensors:
                match = _NOT_KNOWN
        if isinstance(match, LayerMatch):
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(name, type(module).__name__, "norm", by=match.made_by, match=match))
        elif _is_layer(name, module, norms, attentions):
            rows.append(AppliedRow(name, type(module).__name__, "norm", why=match))
    return rows


def _is_layer(name: str, module: nn.Module, norms: Mapping[nn.Module, Any], attentions: Mapping[nn.Module, Any]) -> bool:
    """Whether this is a layer for the report: it has attention that is known, or is an element of a list, with norms."""
    there = [child for child in module._modules.values() if child is not None]
    return any(child in attentions for child in there) or (
        name.rpartition(".")[2].isdigit() and any(child in norms for child in there)
    )


def _forward(self: Any, *args: Any, **options: Any) -> Any:
    layer: LayerMatch = self._onepass
    name = layer.arguments.first
    x, *rest = args or (options.pop(name, None),)
    given = layer.given(tuple(rest), options) if layer.takes(x) else None
    if given is None:
        return type(self).forward(self, x, *rest, **options)
    if _is_checkpointed(self):
        tensors = {name: given[name] for name in layer.arguments.tensors}
        run = partial(_recomputable, layer, tuple(tensors), _without_caches(given))
        return self._gradient_checkpointing_func(run, x, *tensors.values())
    return layer(x, given)


def _recomputable(layer: LayerMatch, names: tuple[str, ...], given: dict[str, Any], x: Tensor, *tensors: Tensor) -> Any:
    """Run a layer whose tensors come by position: PyTorch's reentrant checkpoints give no gradients to others."""
    return layer(x, given | dict(zip(names, tensors)))  # noqa: B905  (PyTorch 2.9's compiler takes strict=False for True)


def _is_checkpointed(module: Any) -> bool:
    """Whether the class's forward itself would recompute in backward. A __call__ that does so also covers our forward."""
    return module.training and getattr(module, "gradient_checkpointing", False) and type(module).__call__ is nn.Module.__call__


def _without_caches(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options without caches, because recomputation would write keys and values a second time."""
    return {name: value for name, value in options.items() if name not in ("use_cache", "past_key_values", "cache", "layer_past")}
