"""Tells attentions what a batch lets them see, in place of a mask of [tokens, tokens].

Transformers makes masks of all scores for windows, packed sequences and padding, and waits for the GPU at every step to see
whether there are any. So this module passes the stack of layers a marker: nothing is masked, or the boundaries of documents. The
model's code passes it on as any prepared mask, and onepass's attentions read it. `apply` verifies on small batches that the code
does so, and what each layer's own masks hide. In all other calls masks are transformers' own, and the report names those calls.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from itertools import compress
from operator import is_, not_
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.attention_interface import NAME
from onepass.integrations.huggingface.attentions import LENGTHS, AttentionMatch
from onepass.integrations.huggingface.context_parallel import spread_of
from onepass.integrations.huggingface.document_trials import LENGTHS_OF_Q, mixers_in, parts_documents
from onepass.integrations.huggingface.documents import Refused, documents_of_lengths, documents_of_rows, starts_of
from onepass.integrations.huggingface.interfaces import NOTHING, KeyRange, documents_of, marker_of, masks_nothing
from onepass.integrations.huggingface.layer_trace import hands_on
from onepass.integrations.huggingface.layers import LayerMatch
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import Function, own_forward, parameters_of, probe, probe_forward, shallow
from onepass.integrations.huggingface.snapshot import UNREAD, Snapshot, is_watched, reads_of
from onepass.ops.attention.arguments import LONGEST
from onepass.ops.attention.attention import unsupported as attention_unsupported
from onepass.runtime.backend import choose
from onepass.runtime.batch_invariance import invariant

_INPUTS = frozenset(  # these mask nothing
    ("input_ids", "inputs_embeds", "num_items_in_batch", "shift_labels", "output_router_logits")
)
_MASK, _POSITIONS = "attention_mask", "position_ids"
_HIDING = LENGTHS | {_MASK, _POSITIONS}
_TOGETHER = "packed documents see each other"
_UNKNOWN = "nothing is known of boundaries that its code hands on"
_CACHE = ("use_cache", "past_key_values", "cache")


@dataclass(frozen=True)
class MaskPath:
    """A layer that passes its mask on to its attention."""

    module: nn.Module
    name: str  # of its attention
    attention: AttentionMatch
    layer: LayerMatch | None  # None: it runs its class's code
    snapshot: Snapshot = UNREAD

    def intact(self) -> bool:
        module, attention = self.module, self.attention
        if self.layer is None:
            if is_watched(module) or not self.snapshot.unchanged(module):
                return False
        elif not Patches.untouched(module, self.layer):
            return False
        if module._modules[self.name] is not attention.module:
            return False
        return Patches.untouched(attention.module, attention) and attention.snapshot.unchanged(attention.module)


@dataclass
class Stack:
    """A module that passes its mask to its layers, and what its own masks hide in each."""

    module: nn.Module
    place: str  # of the list of layers
    layers: list[nn.Module]
    paths: list[MaskPath]  # of those layers that have attention; the others get no mask
    by: str  # the attention implementation at `apply`
    names: list[str]  # of its forward's arguments
    leaks: tuple[str, ...] = ()  # kinds of mixers in which documents see each other all the same
    mixes: bool = False  # it has mixers, which take boundaries
    packs: bool = False  # positions that begin again part documents
    pads: bool = False  # a mask of [rows, tokens] hides tokens
    snapshot: Snapshot = UNREAD
    refused: dict[str, None] = field(default_factory=dict)  # what calls had that were left to transformers
    looked: bool = False  # for documents that see each other
    warned: list[str] = field(default_factory=list)  # of what

    def change(self) -> str | None:
        return self.snapshot.change(self.module)

    def left(self) -> str | None:
        """In what packed documents see each other, and what calls had in which masks were transformers' own."""
        words = [f"{_TOGETHER} in {' and '.join(self.leaks)}"] if self.leaks else []
        words += [f"transformers' masks in calls with {', '.join(self.refused)}"] if self.refused else []
        return "; ".join(words) or None

    def warn_of_packing(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Warn once of a packed batch, where nothing is known of what parts its documents."""
        inputs = {name: value for name, value in self._given(args, options).items() if not _is_nothing(name, value)}
        self._check_rows(inputs, _UNKNOWN)
        if LENGTHS_OF_Q in inputs:
            self._warn(f"documents of cu_seq_lens_q may see each other: {_UNKNOWN}")

    def marker(self, stack: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
        """Return the marker for this call, or None where it is left to transformers."""
        inputs = self._given(args, options)
        spreads = spread_of(stack, stack.config._attn_implementation) is not None
        if spreads:
            self._check_spread(stack, inputs)
        try:
            if not self._intact(stack) or _MASK in self.names[: len(args)]:
                return None
            return NOTHING if spreads else self._marker(stack, inputs)
        except Refused as reason:
            if not torch.compiler.is_compiling():
                self.refused[str(reason)] = None
            return None

    def needs_no_cache(self, stack: Any, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether this call asks for no cache, and must have none: it trains and may have documents, for which transformers does
        not look where there is a cache; or its bits are to be its own, as those of attention with a cache are not."""
        if "use_cache" in self.names[: len(args)]:
            return False
        given = self._given(args, options)
        packed = given.get(_POSITIONS) is not None or given.get(LENGTHS_OF_Q) is not None
        if not (stack.training and torch.is_grad_enabled() and packed) and not invariant():
            return False
        return all(given.get(name) is None for name in _CACHE)

    @torch.compiler.disable(reason="batches are looked at where sequences are spread over ranks")  # type: ignore[untyped-decorator]
    def _check_spread(self, stack: Any, inputs: dict[str, Any]) -> None:
        """Raise where what one rank of several has of the batch can't be computed there."""
        spread = spread_of(stack, stack.config._attn_implementation)
        assert spread is not None
        x = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        spread.check_batch(x, inputs, parts_documents=self.by == NAME)

    def _given(self, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.names, args)), **options}  # noqa: B905  (PyTorch 2.9's compiler takes strict=False for True)

    def _intact(self, stack: Any) -> bool:
        """Whether all code from here to onepass's attentions is unchanged."""
        there = stack._modules[self.place]
        if len(there) != len(self.layers) or not self.snapshot.unchanged(stack):
            return False
        if stack.config._attn_implementation != self.by:
            return False
        return all(map(is_, there, self.layers)) and all(path.intact() for path in self.paths)

    def _marker(self, stack: Any, everything: dict[str, Any]) -> Tensor | None:
        cache = everything.get("use_cache")
        inputs = {name: value for name, value in everything.items() if not _is_nothing(name, value)}
        if getattr(stack.config, "use_cache", False) if cache is None else cache:
            self._check_rows(inputs, "with a cache, which use_cache=False leaves out, transformers looks for none")
            if LENGTHS_OF_Q in inputs:
                self._warn("cu_seq_lens_q parts no documents in attention with a cache, which use_cache=False leaves out")
            raise Refused("a cache")
        for name in everything:
            if name not in _INPUTS and name not in _HIDING and (name in inputs or name == "is_causal"):
                raise Refused(name)
        if self.by == "eager" and getattr(stack.config, "output_attentions", False):
            raise Refused("output_attentions")
        if any(path.attention.module.training and path.attention.drops() for path in self.paths):
            raise Refused("attention dropout")
        x = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        documents = self._documents(x, inputs)
        if documents is not None and self.leaks and _MASK not in inputs:
            self._warn(f"{_TOGETHER} in {' and '.join(self.leaks)}")
        if x.is_cuda:
            self._check_kernels(x.shape[0], x.shape[1], documents)
        return NOTHING if documents is None else marker_of(documents)

    def _documents(self, x: Tensor, inputs: dict[str, Any]) -> Tensor | None:
        """Return the boundaries of the batch's documents, or None where each row is one."""
        rows, tokens = x.shape[:2]
        if LENGTHS_OF_Q in inputs:
            if _MASK in inputs:
                raise Refused("both cu_seq_lens_q and attention_mask")
            return documents_of_lengths(inputs[LENGTHS_OF_Q], inputs.get("cu_seq_lens_k"), x.device)
        name = _MASK if _MASK in inputs else _POSITIONS
        if name not in inputs:
            return None
        if not (self.pads if name is _MASK else self.packs or self.mixes):
            self._check_rows(inputs, "its own masks part none: give cu_seq_lens_q, as DataCollatorWithFlattening does if asked")
            hybrid = len(self.paths) < len(self.layers) and name is _MASK
            raise Refused(f"{name}, {'which layers without attention read' if hybrid else 'by which its own masks part nothing'}")
        chunks = any(path.attention.reach.chunk is not None for path in self.paths)
        return documents_of_rows(inputs[name], rows, tokens, x.device, padding=name is _MASK, from_zero=chunks)

    def _check_rows(self, inputs: dict[str, Any], why: str) -> None:
        """Warn once where positions begin again in a row that transformers takes for one sequence."""
        if self.warned or _POSITIONS not in inputs or any(name in inputs for name in (_MASK, *_CACHE[1:])):
            return
        x = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        if x.is_cuda and self.looked:  # a look waits for the device: the first call's rows stand for all
            return
        self.looked = True
        try:
            several = documents_of_rows(inputs[_POSITIONS], x.shape[0], x.shape[1], x.device, padding=False) is not None
        except Refused:  # what has no documents that onepass can see
            return
        if several:
            what = "position_ids begin again within a row, as those of packed documents do"
            self._warn(f"{what}, but the row is one sequence: {why}")

    def _warn(self, text: str) -> None:
        if torch.compiler.is_compiling() or text in self.warned:
            return
        self.warned.append(text)
        warnings.warn(f"{type(self.module).__name__}: {text}", stacklevel=2)

    def _check_kernels(self, rows: int, tokens: int, documents: Tensor | None) -> None:
        """Refuse what no kernel takes: PyTorch's way would be a mask of all tokens of the batch."""
        for path in self.paths:
            match = path.attention
            count = match.reach.count(documents, rows, tokens)
            plain = match.interface is None or match.interface.is_plain
            if count is None and plain and not match.reach.hides(tokens):  # PyTorch's attention takes it
                continue
            weight, size = next(match.module.parameters()), match.head_size
            qkv = torch.empty(1, 0, 3 * size, dtype=weight.dtype, device=weight.device)
            together = tokens if count is None else rows * tokens
            bounds = None if count is None else torch.empty(count + 1, dtype=torch.int32, device="meta")
            why = f"{together} tokens" if together > LONGEST else attention_unsupported(qkv, 1, 1, bounds)
            if why is not None:
                raise Refused(f"documents or windows that no kernel takes ({why})")
            if choose("attention", None, None) != "triton":
                raise Refused("documents or windows, by another backend than triton")


def _is_nothing(name: str, value: Any) -> bool:
    return value is None or value is False or (name == "logits_to_keep" and type(value) is int and value == 0)


def replace_masks(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    """Replace the forwards of suitable stacks in the model. The model's own forward stays, because other code inspects it."""
    rows = []
    for name, stack in model.named_modules():
        place = next((name for name, child in stack.named_children() if isinstance(child, nn.ModuleList)), None)
        layers = [] if place is None else [*stack._modules[place]]
        mixers = {type(module).__name__ for layer in layers for _, module in mixers_in(layer)}
        if place is None or not (mixers or any(_attentions_in(layer) for layer in layers)):
            continue
        with reads_of(stack) as reads:
            match, why = _found(stack, place, layers) if stack is not model else (None, "other code reads the model's forward")
        if match is not None:
            match.snapshot = reads.snapshot()
            patches.set_forward(stack, _forward, match)
        elif mixers and not own_forward(stack) and stack is not model:
            patches.set_forward(stack, _watched, Stack(stack, place, layers, [], "", list(parameters_of(stack))))
            why = f"packed documents may see each other, as {_UNKNOWN}"
        by = None if match is None else _words(match)
        rows.append(AppliedRow(name, type(stack).__name__, "qkv", by=by, why=why, match=match))
    return rows


def _attentions_in(layer: nn.Module) -> list[tuple[str, AttentionMatch]]:
    """Return the layer's own attentions that onepass knows, by name."""
    known = [(name, vars(child).get("_onepass")) for name, child in layer._modules.items() if child is not None]
    return [(name, match) for name, match in known if isinstance(match, AttentionMatch)]


def find_mask_path(layer: nn.Module) -> MaskPath | None:
    """Return how this layer's mask comes to its attention, or None where it doesn't come as it is."""
    own = vars(layer).get("_onepass")
    match = own if isinstance(own, LayerMatch) else None
    attentions = _attentions_in(layer)
    if len(attentions) != 1 or (match is None and own_forward(layer)) or not getattr(attentions[0][1].module, "is_causal", False):
        return None
    name, attention = attentions[0]
    with reads_of(layer) as reads:
        if not hands_on(layer, name, _MASK):
            return None
    return MaskPath(layer, name, attention, match, reads.snapshot())


def _found(stack: Any, place: str, layers: list[nn.Module]) -> tuple[Stack | None, str | None]:
    """Return what the stack's own masks hide, as its code makes them for small batches; or None, and why."""
    if own_forward(stack):
        return None, "it has a forward of its own already"
    if getattr(stack, "config", None) is None:
        return None, "it has no configuration"
    found = [find_mask_path(layer) for layer in layers]
    paths, attends = [path for path in found if path is not None], [path is not None for path in found]
    if not any(_attentions_in(layer) for layer in layers):
        return _without_attention(stack, place, layers)
    if not paths:
        return None, "no layer passes a mask on to an attention that is causal"
    by = stack.config._attn_implementation
    if by not in ("eager", "sdpa", "onepass"):
        return None, f"its attention is {by}"
    if not getattr(stack.config, "is_causal", True):
        return None, "its attention is not causal"
    plain, marked = _run(stack, None), _run(stack, NOTHING)
    if not len(plain.masks) == len(marked.masks) == len(layers):
        return None, "its code doesn't pass a mask on to its layers"
    if any(there is not None for run in (plain, marked) for there in run.without(attends)):
        return None, "not all of its layers pass a mask on to an attention that is causal"
    if any(not masks_nothing(mask) for mask in marked.of(attends)):
        return None, "its code doesn't pass a mask on to its layers"
    if not plain.agrees(marked):
        return None, "its code gives its layers something else where there is a mask"
    kept = torch.ones(_ROWS, _TOKENS, dtype=torch.bool)
    seen = {reach: _seen(reach, starts_of(kept, padding=True)) for reach in _RANGES}
    found_reaches = [next((each for each in seen if _hides(mask, seen[each], kept)), None) for mask in plain.of(attends)]
    reaches = [each for each in found_reaches if each is not None]
    if len(reaches) < len(paths):
        return None, "its masks are none that onepass knows"
    plain_only = any(path.attention.interface is None for path in paths)
    if plain_only and (by == "eager" or any(each.hides(_TOKENS) for each in reaches)):
        if by == "sdpa" and getattr(stack.config, "attn_logit_softcapping", None):  # Gemma 2; newer transformers refuse that
            return None, "SDPA drops its softcap: load it with attn_implementation='eager', or by a newer transformers"
        return None, "its layers call attention in a way that onepass doesn't know"
    for path, reach in zip(paths, reaches, strict=True):
        path.attention.reach = KeyRange(
            stack.config.sliding_window if reach.window else None, stack.config.attention_chunk_size if reach.chunk else None
        )
    match = Stack(stack, place, layers, paths, by, list(parameters_of(stack)), *_mixing(stack, layers))
    if not plain_only:
        match.packs, match.pads = (_reads(stack, name, value, reaches, attends) for name, value in _BATCHES.items())
    return match, None


def _without_attention(stack: Any, place: str, layers: list[nn.Module]) -> tuple[Stack | None, str | None]:
    """Return the stack if boundaries come to all mixers, and from positions that it is given; or None, and why."""
    (leaks, mixes), names = _mixing(stack, layers), list(parameters_of(stack))
    if leaks or _POSITIONS not in names:
        return None, _UNKNOWN
    return Stack(stack, place, layers, [], stack.config._attn_implementation, names, leaks, mixes), None


def _mixing(stack: Any, layers: list[nn.Module]) -> tuple[tuple[str, ...], bool]:
    """Return the kinds of the layers' mixers that don't part documents, and whether boundaries come to all the others."""
    lengths = torch.tensor([0, _TOKENS], dtype=torch.int32)
    calls, leaks, mixes, known = _run(stack, None, **{LENGTHS_OF_Q: lengths}).layers, set(), False, {}
    for i, layer in enumerate(layers):
        for name, module in mixers_in(layer):
            mixes, kind = True, (type(module), tuple(p.shape for p in module.parameters()))
            if kind not in known:
                known[kind] = parts_documents(module)
            comes = len(calls) == len(layers) and calls[i].get(LENGTHS_OF_Q) is lengths
            if not (known[kind] and comes and name in layer._modules and hands_on(layer, name, LENGTHS_OF_Q)):
                leaks.add(type(module).__name__)
    return tuple(sorted(leaks)), mixes


_ROWS, _TOKENS, _WINDOW = 2, 6, 2  # of the small batches
_BATCHES = {  # of several documents a row, and padded on either side
    _POSITIONS: torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]]),
    _MASK: torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]]),
}
_RANGES = KeyRange(window=_WINDOW), KeyRange(chunk=_WINDOW), KeyRange()  # of their layers


def _seen(reach: KeyRange, starts: Tensor) -> Tensor:
    """Return what tokens see, [rows, tokens, tokens], of documents that begin where `starts` is true."""
    at = torch.arange(starts.shape[1])
    first = torch.where(starts, at, 0).cummax(-1).values  # of each token's document
    back = at[:, None] - at
    seen = (back >= 0) & (first[:, :, None] == first[:, None, :])
    if reach.window is not None:
        seen &= back < reach.window
    if reach.chunk is not None:
        chunk = (at - first) // reach.chunk
        seen &= chunk[:, :, None] == chunk[:, None, :]
    return seen


@dataclass
class _Run:
    """What a stack's code gave its layers and other children."""

    masks: list[Any]
    layers: list[dict[str, Any]]  # the other arguments of each layer's call, by name or position
    others: list[Any]  # arguments of the other children's calls

    def of(self, attends: list[bool]) -> list[Any]:
        """Return the masks of layers that have attention."""
        return [*compress(self.masks, attends)]

    def without(self, attends: list[bool]) -> list[Any]:
        """Return the masks of layers that have none, where an absent one is None."""
        return [*compress(self.masks, map(not_, attends))]

    def agrees(self, other: _Run) -> bool:
        return _same(self.layers, other.layers) and _same(self.others, other.others)


def _run(stack: Any, mask: Tensor | None, **given: Tensor) -> _Run:
    """Run the stack's code with stand-ins for all children, eager attention's masks, and a short window."""
    ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64)
    children: dict[str, nn.Module] = {}
    layers: list[Function] = []
    others: list[Function] = []
    for name, child in stack._modules.items():
        if isinstance(child, nn.ModuleList):
            layers = [_layer(each) for each in child]
            children[name] = nn.ModuleList(layers)
            continue
        if child is None:
            continue
        if isinstance(child, nn.Embedding):  # of tokens or positions
            width = child.embedding_dim
            children[name] = made = Function(lambda *_, width=width, **__: torch.zeros(_ROWS, _TOKENS, width))
            made.weight = torch.zeros(0)  # whose device some look for
        elif isinstance(child, nn.Linear):
            width = child.out_features
            children[name] = made = Function(lambda x, width=width: torch.zeros(*x.shape[:-1], width))
        else:
            children[name] = made = Function(_tables if "rotary" in name else _first)
        others.append(made)
    config = shallow(stack.config, _attn_implementation="eager")
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None) is not None:
            setattr(config, name, _WINDOW)
    options: dict[str, Any] = {"input_ids": ids, "use_cache": False, _MASK: mask, **given}
    probe_forward(probe(stack, children, config=config), **options)
    calls = [{**{str(i): value for i, value in enumerate(args)}, **options} for each in layers for args, options in each.calls]
    masks = [call.pop(_MASK, None) for call in calls]
    return _Run(masks, calls, [list(call) for each in others for call in each.calls])


def _layer(layer: nn.Module) -> Function:
    """Return a stand-in for a layer, with the attributes that say of which kind it is."""
    made = Function(_first)
    vars(made).update({name: value for name, value in vars(layer).items() if isinstance(value, str | int)})
    return made


def _hides(mask: Any, seen: Tensor, kept: Tensor) -> bool:
    """Whether an eager mask lets the tokens that are kept see just these."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-2:] != seen.shape[-2:]:
        return False
    return torch.equal((mask[:, 0] == 0).expand(seen.shape)[kept], seen[kept])


def _reads(stack: Any, name: str, value: Tensor, reaches: list[KeyRange], attends: list[bool]) -> bool:
    """Whether the stack's own masks part documents by this argument as onepass does, and nothing else depends on it."""
    padding = name is _MASK
    own = _run(stack, value if padding else None, **({} if padding else {name: value}))
    marked = _run(stack, NOTHING, **({} if padding else {name: value}))
    if len(own.masks) != len(attends) or any(not masks_nothing(mask) for mask in marked.of(attends)) or not own.agrees(marked):
        return False
    if any(mask is not None for run in (own, marked) for mask in run.without(attends)):
        return False
    starts = starts_of(value, padding)
    kept = value.bool() if padding else torch.ones_like(value, dtype=torch.bool)
    return all(_hides(mask, _seen(reach, starts), kept) for mask, reach in zip(own.of(attends), reaches, strict=True))


def _words(match: Stack) -> str:
    attentions = [path.attention for path in match.paths]
    packs = match.packs or (match.mixes and not match.leaks)
    kinds = [name for name, there in (("packed", packs), ("padded", match.pads)) if there]
    words = [f"documents for {' and '.join(kinds)} masks" if kinds else "no masks"]
    for kind in ("window", "chunk"):
        sizes = sorted({size for each in attentions if (size := getattr(each.reach, kind)) is not None})
        words += [f"{kind}s of {', '.join(map(str, sizes))}"] if sizes else []
    if any(each.interface is not None and each.interface.sinks for each in attentions):
        words.append("sinks")
    return ", ".join(words)


def _first(x: Any = None, *_: Any, **__: Any) -> Any:
    return x


def _tables(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return x, x


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


# ---- a call ----


def _forward(self: Any, *args: Any, **options: Any) -> Any:
    stack: Stack = self._onepass
    if stack.needs_no_cache(self, args, options):
        options["use_cache"] = False
    marker = stack.marker(self, args, options)
    if marker is not None:
        if stack.paths:
            options[_MASK] = marker
        if stack.mixes and (documents := documents_of(marker)) is not None:
            options[LENGTHS_OF_Q] = documents
    return type(self).forward(self, *args, **options)


def _watched(self: Any, *args: Any, **options: Any) -> Any:
    self._onepass.warn_of_packing(args, options)
    return type(self).forward(self, *args, **options)
