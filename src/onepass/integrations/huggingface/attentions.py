"""Attention: its projections as one product, rotation in one launch, and causal attention by `onepass.attention`.

Where that is all that a module does, it is one call, with its documents, window and softcap. For other modules their own code
still runs: norms of q and k, caches, masks. It runs with another `apply_rotary_pos_emb` and other attention interfaces in its
globals, and its linear layers return their parts of the one product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.interfaces import (
    INTERFACES,
    InterfaceCall,
    Interfaces,
    backend_of,
    documents_of,
    find_interface,
    is_marker,
    masks_nothing,
    window_of,
)
from onepass.integrations.huggingface.linear_layers import base_of, call_layer, is_linear, linear_of, sizes_of, tiny
from onepass.integrations.huggingface.linears import FoldedNorm, LinearsMatch, parts_of
from onepass.integrations.huggingface.norms import NormMatch, is_norm
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import (
    FP64,
    Function,
    close,
    own_forward,
    parameters_of,
    probe,
    probe_forward,
    randn,
    shallow,
    thread,
)
from onepass.integrations.huggingface.rotation import (
    ROTATION,
    Rotation,
    find_rotation,
    globals_with,
    has_tables,
    tables_are_doubled,
    with_globals,
)
from onepass.integrations.huggingface.snapshot import CODE_CHANGED, UNREAD, Snapshot, reads_of
from onepass.ops.attention.attention import SIZES, attention
from onepass.ops.attention.formula import AttentionOptions, attention_formula

_TOKENS, _HIDDEN = 5, 6
_EPS = 1e-6  # of norms that stand in for a module's
_HARMLESS = frozenset(  # arguments of attention that have no effect without a mask and a cache
    (
        "position_embeddings", "position_ids", "cache_position", "use_cache", "num_items_in_batch", "shift_labels",
        "output_router_logits",
    )
)  # fmt: skip
LENGTHS = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))  # a marker has them
_SWITCHES = frozenset(("output_attentions", "output_hidden_states"))  # no effect if False


@dataclass(frozen=True)
class FusedAttention:
    """Arguments of `onepass.attention` for a module that only does projections, norms of q's and k's heads, rotation and causal
    attention."""

    heads: int
    groups: int
    scale: float
    rotation: Rotation | None
    softcap: float | None
    norms: tuple[str, ...] = ()  # the children that normalise q's heads and k's

    def norm_options(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the norms' weights and options, or None where other code runs in one of them."""
        if not self.norms:
            return {}
        q_norm, k_norm = (_norm_at(module, name) for name in self.norms)
        if q_norm is None or k_norm is None or not (q_norm.untouched() and k_norm.untouched()):
            return None
        return {"q_weight": q_norm.weight, "k_weight": k_norm.weight, **q_norm.options}


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
    whole: FusedAttention | None
    interface: InterfaceCall | None
    window: int | None = None  # which a marker has in place of a mask; masks.py sets it
    running: dict[int, _AttentionCall] = field(default_factory=dict)  # by thread
    snapshot: Snapshot = UNREAD

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"original": None, "running": {}}  # with_globals' function can't be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.original = _original(self.module, self.rotation, self.interface)

    @property
    def head_size(self) -> int:
        return _head_size(self.module)

    def ready(self) -> bool:
        if self.projections is None or not self.projections.intact():
            return False
        return Patches.untouched(self.module, self) and self.snapshot.unchanged(self.module)

    def change(self) -> str | None:
        return self.snapshot.change(self.module) or (None if self.projections is None else self.projections.change())

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
        if (self.whole.rotation is None) != (options.get("position_embeddings") is None):
            return False
        module: Any = self.module
        if x.is_cuda and _head_size(module) not in SIZES:  # its own code runs rope's kernel and SDPA
            return False
        if not marked and (self.whole.softcap is not None or module.config._attn_implementation not in ("sdpa", "onepass")):
            return False
        return not (module.training and drops(module)) and self.whole.norm_options(module) is not None

    def at_once(self, x: Tensor, options: dict[str, Any], folded: FoldedNorm | None) -> tuple[Tensor, None]:
        whole = self.whole
        assert whole is not None and self.projections is not None
        qkv, marker = self.projections(x, folded), options.get("attention_mask")
        B, S, C = qkv.shape
        cos, sin = (None, None) if whole.rotation is None else whole.rotation.tables(*options["position_embeddings"])
        documents = None if marker is None else documents_of(marker)
        if documents is not None:
            qkv = qkv.view(1, B * S, C)
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
            window=None if marker is None else window_of(self.window, S),
            softcap=whole.softcap,
            **(whole.norm_options(self.module) or {}),
            overwrite=True,
            deterministic=False,
            backend=backend_of(qkv, whole.heads, whole.groups, documents),
        )
        return call_layer(self.module._modules[self.out], y.view(B, S, -1)), None  # type: ignore[arg-type]


def _is_harmless(name: str, value: Any, marked: bool) -> bool:
    if marked and (name == "attention_mask" or name in LENGTHS):
        return True
    return value is None or name in _HARMLESS or (value is False and name in _SWITCHES)


def drops(module: nn.Module) -> bool:
    """Whether the module has dropout, as a rate or as a child."""
    rates = [getattr(module, "attention_dropout", 0.0), *(each.p for each in module.children() if isinstance(each, nn.Dropout))]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


@dataclass(frozen=True)
class RotationMatch:
    """An attention module's rotation, for `apply`'s report: the module's own code calls it, whatever its attributes are."""

    attention: AttentionMatch

    @property
    def module(self) -> nn.Module:
        return self.attention.module

    def change(self) -> str | None:
        return None if self.attention.snapshot.has_code_of(self.module) else CODE_CHANGED


# ---- recognition ----


def find_attention(module: nn.Module, rotates: bool) -> AttentionMatch | None:
    """Return a match, or None. `rotates`: whether the model's rotary tables are in a form that onepass can read."""
    linears = [name for name, child in module._modules.items() if is_linear(base_of(child))]
    if "attention" not in type(module).__name__.lower() or own_forward(module):
        return None
    if getattr(getattr(module, "config", None), "num_attention_heads", None) is None:
        return None
    rotation = find_rotation(type(module).forward) if rotates else None
    if len(linears) < 2:  # LoRA's layers, or quantised ones, whose results are rotated all the same
        if rotation is None:
            return None
        return AttentionMatch(module, None, "", _original(module, rotation, None), rotation, None, None)
    projections, out = _roles(module, linears)
    if projections is None and rotation is None:
        return None
    interface = _interface_of(module, linears)
    whole = None if projections is None else _as_whole(module, projections, out, rotation, interface)
    return AttentionMatch(module, projections, out, _original(module, rotation, interface), rotation, whole, interface)


def _original(module: nn.Module, rotation: Rotation | None, interface: InterfaceCall | None) -> Callable[..., Any]:
    forward = type(module).forward
    others: dict[str, Any] = {}
    if rotation is not None:
        others[ROTATION] = rotation.function
    if interface is not None:
        others[INTERFACES] = Interfaces(globals_with(INTERFACES, forward)[INTERFACES])
    return with_globals(forward, others) if others else forward


def _interface_of(module: Any, linears: list[str]) -> InterfaceCall | None:
    """Return how the module's code calls attention, or None."""
    forward = type(module).forward
    stock = globals_with(INTERFACES, forward).get(INTERFACES)
    if stock is None or not getattr(module, "is_causal", True):
        return None
    sizes = {name: sizes_of(module.get_submodule(name))[1] for name in linears}
    layers = {name: Function(partial(_random_like, size=size, seed=i)) for i, (name, size) in enumerate(sizes.items())}
    hidden, by = randn(1, _TOKENS, sizes_of(module._modules[linears[0]])[0]), module.config._attn_implementation
    for width in _widths(module):

        def run(interfaces: Any, width: int = width) -> object:
            code = with_globals(forward, {INTERFACES: interfaces})
            return _tried(module, layers, hidden, randn(1, _TOKENS, width), by, code=code)

        if (interface := find_interface(stock, by, run)) is not None:
            return interface
    return None


def _roles(module: nn.Module, linears: list[str]) -> tuple[LinearsMatch | None, str]:
    """Return the layers that read the module's input, or None if other code reads it too, and the output projection."""
    if not all(is_norm(module._modules[name]) for name in _norms_in(module)):  # type: ignore[arg-type]
        return None, linears[-1]
    for width, by in product(_widths(module), ("sdpa", "eager")):  # SDPA has no softcap
        layers = {name: Function(partial(_random_like, size=sizes_of(module.get_submodule(name))[1])) for name in linears}
        hidden = torch.full((1, _TOKENS, sizes_of(module._modules[linears[0]])[0]), float("nan"), dtype=FP64)  # type: ignore[arg-type]
        y = _tried(module, layers, hidden, randn(1, _TOKENS, width), by)
        if not isinstance(y, Tensor):
            continue
        asked = [name for name in linears for args, _ in layers[name].calls if args and args[0] is hidden]
        others = [name for name in linears if name not in asked]
        if len(asked) == len(set(asked)) == len(linears) - 1 and len(layers[others[0]].calls) == 1:
            made = layers[others[0]].calls[0][0][0]
            if y.isfinite().all() and made.isfinite().all():
                return LinearsMatch.found(module, tuple(asked)), others[0]
        break
    return None, linears[-1]


def _random_like(x: Tensor, size: int, seed: int = 1) -> Tensor:
    return randn(*x.shape[:-1], size, seed=seed)


def _tried(
    module: nn.Module,
    layers: dict[str, Any],
    hidden: Tensor,
    angles: Tensor,
    by: str,
    training: bool = False,
    mask: Tensor | None = None,
    code: Callable[..., Any] | None = None,
) -> Any:
    """Run the module's code, or other code, with these layers and this attention implementation.

    Norms that are not among the layers are replaced by identities, and parameters of its own by random ones.
    """
    others = {name: Function(lambda x: x) for name in _norms_in(module) if name not in layers}
    config = shallow(module.config, _attn_implementation=by)
    own = {name: None if p is None else randn(*p.shape, seed=5) for name, p in module._parameters.items()}
    made = probe(module, {**layers, **others}, config=config, training=training, _parameters=own)
    names = parameters_of(module)
    options: dict[str, Any] = {"attention_mask": mask} if "attention_mask" in names else {}
    if "position_embeddings" in names:
        options["position_embeddings"] = angles.cos(), angles.sin()
    result = probe_forward(made, hidden, probed_code=code, **options)
    return result[0] if isinstance(result, tuple) else result


def _norms_in(module: nn.Module) -> list[str]:
    """Return the children with parameters that are no linear layers. In a module that is recognised all are norms."""
    there = [(name, child) for name, child in module._modules.items() if child is not None and not is_linear(base_of(child))]
    return [name for name, child in there if list(child.parameters())]


def _widths(module: Any) -> list[int]:
    """Return candidate widths of the rotary tables: the whole head, or the part that a model rotates."""
    size = _head_size(module)
    part = getattr(module, "rotary_ndims", None) or int(size * (getattr(module.config, "partial_rotary_factor", None) or 1))
    return [size, part, max(2, size // 4 * 2)]


def _head_size(module: Any) -> int:
    named = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    return int(named or module.config.hidden_size // module.config.num_attention_heads)


def _as_whole(
    module: Any, projections: LinearsMatch, out: str, rotation: Rotation | None, interface: InterfaceCall | None
) -> FusedAttention | None:
    """Return the arguments of `onepass.attention` if that is all that the module does.

    The test compares the module's code and the formula on small layers.
    """
    size, heads = _head_size(module), module.config.num_attention_heads
    groups = (sum(projections.sizes) // size - heads) // 2
    scale = getattr(module, "scaling", None)
    softcap = None if interface is None else interface.softcap
    whole = FusedAttention(heads, groups, scale if isinstance(scale, float) and scale > 0 else size**-0.5, rotation, softcap)
    norms = _norms_in(module)
    if ("position_embeddings" in parameters_of(module)) != (rotation is not None) or (norms and rotation is None):
        return None
    if norms and not _are_alike([_norm_at(module, name) for name in norms], size):
        return None
    if len(projections.names) not in (1, 3) or sum(projections.sizes) != (heads + 2 * groups) * size:
        return None
    if heads * size != sizes_of(module._modules[out])[0]:
        return None
    layers = {
        name: tiny(layer, _HIDDEN, outputs, 30 + i)
        for i, (name, layer, outputs) in enumerate(zip(projections.names, projections.linears, projections.sizes, strict=True))
    }
    last = tiny(module._modules[out], heads * size, _HIDDEN, 40)
    x = randn(1, _TOKENS, _HIDDEN)
    qkv = torch.cat([layer(x) for layer in layers.values()], -1).detach()
    weights_of = {name: randn(size, seed=50 + i) for i, name in enumerate(norms)}
    stand_ins = {name: (weight, Function(partial(_normed, weight=weight))) for name, weight in weights_of.items()}
    by, mask = "sdpa", None
    if softcap is not None:  # which SDPA refuses
        by, mask = "eager", torch.full((_TOKENS, _TOKENS), float("-inf"), dtype=FP64).triu(1)[None, None]
    for width in _widths(module):
        angles = randn(1, _TOKENS, width // 2, seed=2)
        doubled = angles if rotation is None else rotation.doubled(angles)
        made = {**layers, **{name: child for name, (_, child) in stand_ins.items()}, out: last}
        results = [_tried(module, made, x, doubled, by, training, mask) for training in (False, True)]
        cos, sin = (None, None) if rotation is None else (angles[0].cos(), angles[0].sin())
        interleaved = rotation is not None and rotation.interleaved
        call = AttentionOptions(heads, groups, interleaved, whole.scale, softcap=softcap or 0.0, eps=_EPS)
        for names in permutations(norms):
            weights = (None, None) if not names else (stand_ins[names[0]][0], stand_ins[names[1]][0])
            expected = last(attention_formula(qkv, cos, sin, call, weights=weights)).detach()
            if all(close(each, expected, 1e-6) for each in results):
                return replace(whole, norms=names)
    return None


def _norm_at(module: nn.Module, name: str) -> NormMatch | None:
    """Return the match of a child that onepass has replaced, as a norm."""
    match = vars(module._modules[name]).get("_onepass")
    return match if isinstance(match, NormMatch) else None


def _are_alike(norms: list[NormMatch | None], size: int) -> bool:
    """Whether these are two norms that `onepass.attention` has, of heads of this size."""
    kinds = {(norm.layer, norm.eps, norm.zero_centered, norm.weight.shape) for norm in norms if norm is not None}  # type: ignore[union-attr]
    return len(norms) == 2 and None not in norms and len(kinds) == 1 and kinds.pop()[::3] == (False, (size,))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS) * weight


# ---- replacement ----


def replace_attentions(
    model: nn.Module, patches: Patches, *, qkv: bool, rope: bool
) -> tuple[dict[nn.Module, AttentionMatch], list[AppliedRow]]:
    rotates = {how for how in map(Rotation, (False, True)) if tables_are_doubled(model, how)} if rope else set()
    made, rows = {}, []
    for name, module in model.named_modules():
        with reads_of(module) as reads:
            match = find_attention(module, bool(rotates))
        if match is not None and match.rotation is not None and match.rotation not in rotates:
            match.original, match.rotation, match.whole = _original(module, None, match.interface), None, None
        if match is not None and (match.rotation is not None or (qkv and match.projections is not None)):
            match.snapshot = reads.snapshot()
            if match.snapshot.reads_tensors:
                match.whole = None
            _replace(match, patches, qkv)
            made[module] = match
        if match is not None or "attention" in type(module).__name__.lower():
            rows += _rows(model, name, module, made.get(module), qkv, rope, bool(rotates))
    return made, rows


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
    model: nn.Module, name: str, module: nn.Module, match: AttentionMatch | None, qkv: bool, rope: bool, rotates: bool
) -> list[AppliedRow]:
    kind, rows = type(module).__name__, []
    if rope and (rotates or (has_tables(model) and globals_with(ROTATION, type(module).forward))):
        why = "its rotation is none that onepass has" if rotates else "the model has no tables of positions that onepass can read"
        row = partial(AppliedRow, name, kind, "rope")
        if match is not None and match.rotation is not None:
            rows.append(row(by="rope", match=RotationMatch(match)))
        else:
            rows.append(row(why=why))
    if qkv:
        one = match is not None and match.projections is not None
        whole = None if match is None else match.whole
        by = "linear" if whole is None else "attention"
        if whole is not None:
            by += f", {' and '.join(whole.norms)}" if whole.norms else ""
            by += "" if whole.softcap is None else f", softcap {whole.softcap:g}"
        why = "what its input goes to are not just linear layers"
        rows.append(AppliedRow(name, kind, "qkv", by=by, match=match) if one else AppliedRow(name, kind, "qkv", why=why))
    return rows


def _forward(self: Any, hidden_states: Tensor, *args: Any, onepass_folded: FoldedNorm | None = None, **options: Any) -> Any:
    match: AttentionMatch = self._onepass
    if match.interface is None and masks_nothing(options.get("attention_mask")):
        options["attention_mask"] = None
    if match.suits(hidden_states, args, options, onepass_folded):
        return match.at_once(hidden_states, options, onepass_folded)
    if onepass_folded is not None and match.projections is not None and match.projections.are_wrapped():
        hidden_states, onepass_folded = onepass_folded.unfold(hidden_states), None  # PEFT's layers read the norm's output
    return match.by_original(hidden_states, args, options, onepass_folded)


def _hand_out(self: Any, x: Tensor) -> Tensor:
    match, name = self._onepass
    return match.part(name, self, x)  # type: ignore[no-any-return]
