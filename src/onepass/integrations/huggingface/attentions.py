"""Attention: its projections as one product, rotation in one launch, and causal attention by `onepass.attention`.

Where that is all that a module does, it is one call, with its documents, window and softcap. For other modules their own code
still runs: norms of q and k, caches, masks. It runs with another `apply_rotary_pos_emb` and other attention interfaces in its
globals, and its linear layers return their parts of the one product.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onepass.gradients.places import parts_of
from onepass.integrations.huggingface.attention_interface import NAME
from onepass.integrations.huggingface.attention_trials import (
    FusedAttention,
    as_one_op,
    calls_rotation,
    head_size_of,
    interface_of,
    norm_at,
    roles_of,
)
from onepass.integrations.huggingface.context_parallel import SequenceSpread, spread_of
from onepass.integrations.huggingface.interfaces import (
    INTERFACES,
    InterfaceCall,
    Interfaces,
    KeyRange,
    backend_of,
    is_marker,
    masks_nothing,
)
from onepass.integrations.huggingface.latent_trials import FusedLatent, as_latent, latent_roles
from onepass.integrations.huggingface.linear_layers import base_of, call_layer, is_linear, linear_of
from onepass.integrations.huggingface.linears import FoldedNorm, LinearsMatch
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import own_forward, thread
from onepass.integrations.huggingface.rotation import (
    COMPLEX,
    ROTATION,
    ROTATIONS,
    Rotation,
    find_rotation,
    globals_with,
    has_tables,
    part_with_tables,
    tables_are_read,
    turns_alone,
    with_globals,
)
from onepass.integrations.huggingface.snapshot import CODE_CHANGED, UNREAD, Snapshot, reads_of
from onepass.ops.attention.attention import SIZES, attention
from onepass.runtime.batch_invariance import invariant

WITHOUT_EFFECT = frozenset(  # arguments that have none on a mixer without a mask and a cache, besides tables of positions
    (
        "position_embeddings", "position_ids", "cache_position", "use_cache", "num_items_in_batch", "shift_labels",
        "output_router_logits",
    )
)  # fmt: skip
_HARMLESS = WITHOUT_EFFECT | {"shared_kv_states"}  # on attention that is one op
LENGTHS = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))  # a marker has them
_OWN_BITS = (
    "a call's attention is transformers' own, whose bits may depend on the batch in spite of onepass.batch_invariant(): with a "
    "cache, which use_cache=False leaves out, with a mask of four dimensions, or output_attentions"
)
_SWITCHES = frozenset(("output_attentions", "output_hidden_states"))  # no effect if False


class _AttentionCall:
    """A running call of a module's own code."""

    def __init__(self, folded: FoldedNorm | None) -> None:
        self.folded = folded  # into the projections
        self.waiting: dict[str, tuple[Tensor, Tensor]] = {}  # by layer: its input, and its part of the product


@dataclass
class AttentionMatch:
    """A recognised attention module."""

    module: nn.Module
    projections: LinearsMatch | None  # all layers that read its input, in call order
    out: str  # the output projection
    original: Callable[..., Any]  # its class's forward, or a copy that calls onepass's rotation
    rotation: Rotation | None
    whole: FusedAttention | FusedLatent | None
    interface: InterfaceCall | None
    rotates: bool = True  # whether its code calls the rotation
    reach: KeyRange = field(default_factory=KeyRange)  # which a marker has in place of a mask; masks.py sets it
    running: dict[int, _AttentionCall] = field(default_factory=dict)  # by thread
    snapshot: Snapshot = UNREAD
    dropouts: tuple[str, ...] = field(init=False)  # attributes that models have such a rate as

    def __post_init__(self) -> None:  # here, as PyTorch 2.11's compiler can't go through a module's attributes
        self.dropouts = ("attention_dropout", *(name for name in vars(self.module) if "drop" in name))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"original": None, "running": {}}  # with_globals' function can't be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.original = _original(self.module, self.rotation, self.interface)

    @property
    def head_size(self) -> int:
        return head_size_of(self.module) if self.interface is None else self.interface.width

    @property
    def products(self) -> list[LinearsMatch]:
        """The layers that run by ops, but for the output projection."""
        ups = [self.whole.queries, self.whole.keys] if isinstance(self.whole, FusedLatent) else []
        return [each for each in (self.projections, *ups) if each is not None]

    def drops(self) -> bool:
        """Whether the module has dropout, as a rate or as a child."""
        rates = [getattr(self.module, name, 0.0) for name in self.dropouts]
        rates += [each.p for each in self.module.children() if isinstance(each, nn.Dropout)]
        return any(isinstance(rate, float) and rate > 0 for rate in rates)

    def ready(self) -> bool:
        if self.projections is None or not self.projections.intact():
            return False
        return Patches.untouched(self.module, self) and self.snapshot.unchanged(self.module)

    def change(self) -> str | None:
        return self.snapshot.change(self.module) or (None if self.projections is None else self.projections.change())

    def check_spread(self, spread: SequenceSpread, tokens: int) -> None:
        """Raise where attention over ranks would see other keys than this module's."""
        module: Any = self.module
        implementation = module.config._attn_implementation
        for kept in (self.reach.chunk, None if implementation == NAME else self.reach.window):
            spread.check_attention(implementation, kept, tokens)

    # ---- the module's own code ----

    def by_original(self, x: Tensor, args: tuple[Any, ...], options: dict[str, Any], folded: FoldedNorm | None) -> Any:
        key = thread()
        self.running[key] = _AttentionCall(folded)
        try:
            known = self.snapshot.has_code_of(self.module)
            return (self.original if known else type(self.module).forward)(self.module, x, *args, **options)
        finally:
            self.running.pop(key, None)

    def part(self, name: str, layer: nn.Module, x: Tensor) -> Tensor:
        """Return this layer's product with x. The first layer that is called computes all parts; the others return theirs."""
        running = self.running.get(thread())
        layers = self.projections
        if running is None or layers is None or not layers.intact() or layers.are_wrapped():  # PEFT's layers call them
            return linear_of(layer, x)
        waiting = running.waiting.pop(name, None)
        if waiting is None or waiting[0] is not x:
            made = parts_of(layers(x, running.folded), layers.sizes)
            running.waiting = {other: (x, part) for other, part in zip(layers.names, made, strict=True)}
            waiting = running.waiting.pop(name)
        return waiting[1]

    # ---- as one op ----

    def suits(self, x: Tensor, args: tuple[Any, ...], options: dict[str, Any], folded: FoldedNorm | None) -> bool:
        """Whether `onepass.attention` computes exactly this call. A caller that folds a norm in has checked `ready` already."""
        if self.whole is None or args or x.dim() != 3 or (folded is None and not self.ready()):
            return False
        marked = is_marker(options.get("attention_mask"))
        if not getattr(self.module, "is_causal", True) or not all(_is_harmless(*each, marked) for each in options.items()):
            return False
        if self.whole.tables != (options.get("position_embeddings") is not None):
            return False
        if self.whole.factor is not None and not self.whole.factor.takes(options.get("position_ids")):
            return False
        module: Any = self.module
        more = self.whole.softcap is not None or self.whole.sinks is not None  # than SDPA has
        if not marked and (more or module.config._attn_implementation not in ("sdpa", "onepass")):
            return False
        if isinstance(self.whole, FusedLatent):
            takes = self.whole.takes(module, x, self.reach.window if marked else None)
        else:  # on a GPU of other sizes its own code runs rope's kernel and SDPA
            takes = invariant() or not (x.is_cuda and head_size_of(module) not in SIZES)
            takes = takes and self.whole.norm_options(module) is not None
        return takes and not (module.training and self.drops())

    def at_once(self, x: Tensor, options: dict[str, Any], folded: FoldedNorm | None) -> tuple[Tensor, None]:
        whole = self.whole
        assert whole is not None and self.projections is not None
        qkv = self.projections(x, folded)
        documents, window = self.reach.of(options.get("attention_mask"), qkv, qkv.shape[1])
        if isinstance(whole, FusedLatent):
            y = whole.attend(self.module, qkv, options.get("position_embeddings"), documents)
            return call_layer(self.module._modules[self.out], y), None  # type: ignore[arg-type]
        B, S = qkv.shape[:2]
        cos, sin = (None, None) if whole.rotation is None else whole.rotation.tables(options["position_embeddings"])
        if whole.factor is not None:
            qkv = whole.factor.applied(qkv, whole.heads * self.head_size, options.get("position_ids"))
        row_norms = (norm_at(self.module, name) for name in whole.norms) if whole.rows else ()
        of_values = None if whole.value_norm is None else norm_at(self.module, whole.value_norm)
        qkv = whole.arranged(qkv, tuple(row_norms), of_values)  # type: ignore[arg-type]
        if documents is not None:
            qkv = qkv.view(1, B * S, -1)
            cos, sin = (None if table is None else table.expand(B, S, -1).reshape(1, B * S, -1) for table in (cos, sin))
        y = attention(
            qkv,
            whole.heads,
            whole.groups,
            cos=cos,
            sin=sin,
            interleaved=whole.rotation is not None and whole.rotation.interleaved,
            scale=whole.scale,
            cu_seqlens=documents,
            window=window,
            softcap=whole.softcap,
            sinks=None if whole.sinks is None else self.module._parameters[whole.sinks],
            **(whole.norm_options(self.module) or {}),
            gated=whole.gated,
            overwrite=True,
            deterministic=False,
            backend=backend_of(qkv, whole.heads, whole.groups, documents, whole.gated),
        )
        return call_layer(self.module._modules[self.out], y.view(B, S, -1)), None  # type: ignore[arg-type]


def _is_harmless(name: str, value: Any, marked: bool) -> bool:
    if marked and (name == "attention_mask" or name in LENGTHS):
        return True
    return value is None or name in _HARMLESS or (value is False and name in _SWITCHES)


@dataclass(frozen=True)
class RotationMatch:
    """An attention module's rotation, for `apply`'s report: the module's own code calls it, whatever its attributes are."""

    called_by: AttentionMatch

    @property
    def module(self) -> nn.Module:
        return self.called_by.module

    def change(self) -> str | None:
        return None if self.called_by.snapshot.has_code_of(self.module) else CODE_CHANGED


# ---- recognition ----


def find_attention(module: nn.Module, readable: bool) -> AttentionMatch | None:
    """Return a match, or None. `readable`: whether the model's rotary tables are in a form that onepass can read."""
    linears = [name for name, child in module._modules.items() if is_linear(base_of(child))]
    if own_forward(module):
        return None
    if getattr(getattr(module, "config", None), "num_attention_heads", None) is None:
        return None
    rotation = find_rotation(type(module).forward) if readable else None
    if len(linears) < 2:  # LoRA's layers, or quantised ones, whose results are rotated all the same
        if rotation is None:
            return None
        return AttentionMatch(module, None, "", _original(module, rotation, None), rotation, None, None)
    whole: FusedAttention | FusedLatent | None = None
    projections, out = roles_of(module, linears)
    latent = None if projections is not None else latent_roles(module, linears)
    if projections is None and rotation is None and latent is None:
        return None
    interface = interface_of(module, linears)
    if projections is not None:
        whole = as_one_op(module, projections, out, rotation, interface)
    elif latent is not None:
        projections = latent[0]
        if (found := as_latent(module, *latent)) is not None:
            whole, out = found
    rotates = rotation is not None and calls_rotation(module, linears, rotation)
    return AttentionMatch(module, projections, out, _original(module, rotation, interface), rotation, whole, interface, rotates)


def _original(module: nn.Module, rotation: Rotation | None, interface: InterfaceCall | None) -> Callable[..., Any]:
    forward = type(module).forward
    others: dict[str, Any] = {}
    if rotation is not None:
        others[ROTATION] = rotation.function
    if interface is not None:
        others[INTERFACES] = Interfaces(globals_with(INTERFACES, forward)[INTERFACES])
    return with_globals(forward, others) if others else forward


# ---- replacement ----


def replace_attentions(
    model: nn.Module, patches: Patches, *, qkv: bool, rope: bool
) -> tuple[dict[nn.Module, AttentionMatch], list[AppliedRow]]:
    of_parts: dict[nn.Module, set[Rotation]] = {}
    made, rows = {}, []
    for name, module in model.named_modules():
        if "attention" not in type(module).__name__.lower():
            continue
        part = part_with_tables(model, name)
        if part not in of_parts:
            of_parts[part] = {how for how in (*ROTATIONS, COMPLEX) if tables_are_read(part, how)} if rope else set()
        rotates = of_parts[part]
        with reads_of(module) as reads:
            match = find_attention(module, bool(rotates))
        if match is not None and match.rotation is not None and match.rotation not in rotates:
            match.original, match.rotation = _original(module, None, match.interface), None
        whole = None if match is None else match.whole
        if match is not None and whole is not None and not _has_tables_of(part, rotates, whole):
            match.whole = None
        if match is not None and (match.rotation is not None or (qkv and match.projections is not None)):
            match.snapshot = reads.snapshot()
            if match.whole is not None and match.snapshot.read_tensors - {match.whole.sinks}:
                match.whole = None
            _replace(match, patches, qkv)
            made[module] = match
        rows += _rows(part, name, module, made.get(module), qkv, rope, bool(rotates))
    return made, rows


def _has_tables_of(part: nn.Module, read: set[Rotation], whole: FusedAttention | FusedLatent) -> bool:
    """Whether the tables of its part of the model, of which these are read, are those that it needs."""
    how = whole.rotation
    return how is None or (how in read and (not whole.turns_alone or turns_alone(part, how)))


def _replace(match: AttentionMatch, patches: Patches, qkv: bool) -> None:
    if not qkv:
        match.projections = match.whole = match.interface = None
        match.original = _original(match.module, match.rotation, None)
    elif match.projections is not None:
        match.projections.replace(patches)
        for name, layer in zip(match.projections.names, match.projections.linears, strict=True):
            patches.set_forward(layer, _hand_out, (match, name))
    patches.set_forward(match.module, _forward, match)


def _rows(
    part: nn.Module, name: str, module: nn.Module, match: AttentionMatch | None, qkv: bool, rope: bool, rotates: bool
) -> list[AppliedRow]:
    kind, rows = type(module).__name__, []
    if rope and (rotates or (has_tables(part) and globals_with(ROTATION, type(module).forward))):
        why = "its rotation is none that onepass has" if rotates else "the model has no tables of positions that onepass can read"
        row = partial(AppliedRow, name, kind, "rope")
        if match is not None and match.rotation is not None and match.rotates:
            rows.append(row(by="rope", match=RotationMatch(match)))
        elif match is None or match.whole is None:  # else it has no positions
            rows.append(row(why=why))
    if qkv:
        one = match is not None and match.projections is not None
        whole = None if match is None else match.whole
        by = "linear" if whole is None else whole.words()
        why = "what its input goes to are not just linear layers"
        rows.append(AppliedRow(name, kind, "qkv", by=by, match=match) if one else AppliedRow(name, kind, "qkv", why=why))
    return rows


def _forward(self: Any, hidden_states: Tensor, *args: Any, onepass_folded: FoldedNorm | None = None, **options: Any) -> Any:
    match: AttentionMatch = self._onepass
    spread = spread_of(self, self.config._attn_implementation)
    if spread is not None:
        match.check_spread(spread, hidden_states.shape[1])
    if match.interface is None and masks_nothing(options.get("attention_mask")):
        options["attention_mask"] = None
    if spread is None and match.suits(hidden_states, args, options, onepass_folded):
        return match.at_once(hidden_states, options, onepass_folded)
    if match.whole is not None and invariant() and not torch.compiler.is_compiling():
        warnings.warn(_OWN_BITS, stacklevel=2)
    if onepass_folded is not None and match.projections is not None and match.projections.are_wrapped():
        hidden_states, onepass_folded = onepass_folded.unfold(hidden_states), None  # PEFT's layers read the norm's output
    return match.by_original(hidden_states, args, options, onepass_folded)


def _hand_out(self: Any, x: Tensor) -> Tensor:
    match, name = self._onepass
    return match.part(name, self, x)  # type: ignore[no-any-return]
