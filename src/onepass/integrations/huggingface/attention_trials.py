"""What attention modules compute, by running their code on small layers: which layers read the input, how it calls attention's
interface, and whether `onepass.attention` is all that it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onepass.integrations.huggingface.interfaces import INTERFACES, InterfaceCall, InterfaceRecorder, find_interface
from onepass.integrations.huggingface.linear_layers import base_of, is_linear, sizes_of, tiny
from onepass.integrations.huggingface.linears import LinearsMatch
from onepass.integrations.huggingface.norms import NormMatch, is_norm
from onepass.integrations.huggingface.probe import (
    FP64,
    LARGE,
    Function,
    close_by_rows,
    parameters_of,
    probe,
    probe_forward,
    randn,
    shallow,
)
from onepass.integrations.huggingface.query_factors import IDS, LATE, QueryFactor, find_factor, takes_positions
from onepass.integrations.huggingface.rotation import COMPLEX, HALVES, ROTATION, Rotation, globals_with, with_globals
from onepass.ops.attention.formula import AttentionOptions, attention_formula

TOKENS, HIDDEN = len(IDS), 6
EPS = 1e-6  # of norms that stand in for a module's
_SHARED = "shared_kv_states"  # an argument
_OWN = 5  # the seed of parameters that do


@dataclass(frozen=True)
class FusedAttention:
    """Arguments of `onepass.attention` for a module that only does projections, norms of q's and k's heads or rows, rotation,
    causal attention, and a gate of its result."""

    heads: int
    groups: int
    scale: float
    rotation: Rotation | None
    softcap: float | None
    tables: bool  # whether it is called with tables of positions, also where it makes nothing of them
    norms: tuple[str, ...] = ()  # the children that normalise q's heads and k's, or their rows
    rows: bool = False  # the norms are of whole rows
    gated: bool = False  # q's projection gives each head's query and its gate
    sinks: str | None = None  # the parameter of its sinks
    shares: bool = False  # keys before their norm and rotation are the values too
    value_norm: str | None = None  # the child that normalises values' heads
    factor: QueryFactor | None = None  # of queries, by their positions
    turns_alone: bool = False  # it is this only where the tables have no factor, as q and k are normalised after rotation

    def norm_options(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the heads' norms' weights and options, or None where other code runs in one of the norms."""
        if self.value_norm is not None and ((norm := norm_at(module, self.value_norm)) is None or not norm.untouched()):
            return None
        if not self.norms:
            return {}
        q_norm, k_norm = (norm_at(module, name) for name in self.norms)
        if q_norm is None or k_norm is None or not (q_norm.untouched() and k_norm.untouched()):
            return None
        if self.rows:
            return {}
        weights = {f"{of}_weight": norm.weight for of, norm in (("q", q_norm), ("k", k_norm))}
        if q_norm.weight is None:
            some = next(module.parameters())
            weights = dict.fromkeys(weights, some.new_ones(head_size_of(module)))
        return weights | q_norm.options

    def arranged(
        self, qkv: Tensor, norms: tuple[Callable[[Tensor], Tensor], ...], of_values: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return q, k and v as attention takes them. norms: of rows, of q and of k, or none; and of v's heads."""
        if not (norms or self.shares or of_values):
            return qkv
        columns = qkv.shape[-1] // (self.heads + (2 - self.shares) * self.groups)  # of a head
        sizes = [columns * self.heads, *[columns * self.groups] * (2 - self.shares)]
        q, k, *values = qkv.split(sizes, -1)
        v = k if self.shares else values[0]
        if of_values is not None:
            v = of_values(v.unflatten(-1, (self.groups, columns))).flatten(-2)
        if norms:
            q, k = norms[0](q), norms[1](k)
        return torch.cat([q, k, v], -1)

    def words(self) -> str:
        kinds = [f"{' and '.join(dict.fromkeys(self.norms))}{' of rows' if self.rows else ''}"] if self.norms else []
        kinds += [] if self.value_norm is None else [self.value_norm]
        kinds += ["keys as values"] if self.shares else []
        kinds += ["gated"] if self.gated else []
        kinds += [] if self.factor is None else ["queries scaled by position"]
        kinds += [] if self.softcap is None else [f"softcap {self.softcap:g}"]
        return ", ".join(["attention", *kinds, *([] if self.sinks is None else ["sinks"])])


def interface_of(module: Any, linears: list[str]) -> InterfaceCall | None:
    """Return how the module's code calls attention, or None."""
    forward = type(module).forward
    stock = globals_with(INTERFACES, forward).get(INTERFACES)
    if stock is None or not getattr(module, "is_causal", True):
        return None
    sizes = {name: sizes_of(module.get_submodule(name))[1] for name in linears}
    layers = {name: Function(partial(random_like, size=size, seed=i)) for i, (name, size) in enumerate(sizes.items())}
    hidden, by = randn(1, TOKENS, sizes_of(module._modules[linears[0]])[0]), module.config._attn_implementation
    for positions in positions_of(module):

        def run(interfaces: Any, at: int = LATE, positions: Any = positions) -> object:
            code = with_globals(forward, {INTERFACES: interfaces})
            return tried(module, layers, hidden, positions, by, code=code, at=at)

        def queries(at: int, run: Callable[[Any, int], object] = run) -> Tensor | None:
            run(recorder := InterfaceRecorder(), at)
            return recorder.calls[0][2] if recorder.calls else None

        if (interface := find_interface(stock, by, run)) is not None:
            return replace(interface, factor=find_factor(module, queries))
    return None


def calls_rotation(module: Any, linears: list[str], rotation: Rotation) -> bool:
    """Whether the module's code calls the rotation that is among its globals, as far as a run shows."""
    calls: list[None] = []

    def rotate(q: Tensor, k: Tensor, *_: Any, **__: Any) -> Any:
        calls.append(None)
        return q if rotation.single else (q, k)

    code = with_globals(type(module).forward, {ROTATION: rotate})
    layers = {name: Function(partial(random_like, size=sizes_of(module.get_submodule(name))[1])) for name in linears}
    hidden = randn(1, TOKENS, sizes_of(module._modules[linears[0]])[0])
    ran = [tried(module, layers, hidden, positions, "sdpa", code=code) for positions in positions_of(module)]
    return bool(calls) or all(y is None for y in ran)


def roles_of(module: nn.Module, linears: list[str]) -> tuple[LinearsMatch | None, str]:
    """Return the layers that read the module's input, or None if other code reads it too, and the output projection."""
    if not all(is_norm(module._modules[name]) for name in norms_in(module)):  # type: ignore[arg-type]
        return None, linears[-1]
    for positions, by in product(positions_of(module), ("sdpa", "eager")):  # SDPA has no softcap
        layers = {name: Function(partial(random_like, size=sizes_of(module.get_submodule(name))[1])) for name in linears}
        hidden = torch.full((1, TOKENS, sizes_of(module._modules[linears[0]])[0]), float("nan"), dtype=FP64)  # type: ignore[arg-type]
        y = tried(module, layers, hidden, positions, by)
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


def random_like(x: Tensor, size: int, seed: int = 1) -> Tensor:
    return randn(*x.shape[:-1], size, seed=seed)


def tried(
    module: nn.Module,
    layers: dict[str, Any],
    hidden: Tensor,
    tables: Any,
    by: str,
    training: bool = False,
    mask: Tensor | None = None,
    code: Callable[..., Any] | None = None,
    shared: Any = None,
    at: int = LATE,
) -> Any:
    """Run the module's code, or other code, with these layers and this attention implementation.

    tables: of positions, or None. shared: keys and values of other layers; None: random ones. at: the first token's position.

    Norms that are not among the layers are replaced by identities, and parameters of its own by random ones.
    """
    norms = [*norms_in(module), *_weightless_in(module)]
    others = {name: Function(lambda x: x) for name in norms if name not in layers}
    config = shallow(module.config, _attn_implementation=by)
    own = {name: None if p is None else randn(*p.shape, seed=_OWN) for name, p in module._parameters.items()}
    made = probe(module, {**layers, **others}, config=config, training=training, _parameters=own)
    names = parameters_of(module)
    options: dict[str, Any] = {"attention_mask": mask} if "attention_mask" in names else {}
    if "position_embeddings" in names and tables is not None:
        options["position_embeddings"] = tables
    if takes_positions(module):
        options["position_ids"] = at + torch.tensor([IDS])
    if _SHARED in names:
        options[_SHARED] = _SharedStates(module) if shared is None else shared
    with _LatePositions(at):
        result = probe_forward(made, hidden, probed_code=code, **options)
    return result[0] if isinstance(result, tuple) else result


class _SharedStates(dict[str, tuple[Tensor, Tensor]]):
    """Random keys and values of other layers."""

    def __init__(self, module: Any) -> None:
        groups = module.config.num_attention_heads // getattr(module, "num_key_value_groups", 1)
        self._shape = 1, groups, TOKENS, head_size_of(module)

    def __missing__(self, name: str) -> tuple[Tensor, Tensor]:
        return randn(*self._shape, seed=6), randn(*self._shape, seed=7)


class _Unshared:
    """Refuses to be read or written."""


class _LatePositions(TorchFunctionMode):
    """Counts positions from a late one: some models scale q from a position of a few thousand on, which no trial would reach."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), options: Any = None) -> Any:
        made = function(*args, **(options or {}))
        return made + self._at if function is torch.arange else made


def norms_in(module: nn.Module) -> list[str]:
    """Return the children with parameters that are no linear layers. In a module that is recognised all are norms."""
    there = [(name, child) for name, child in module._modules.items() if child is not None and not is_linear(base_of(child))]
    return [name for name, child in there if list(child.parameters())]


def _widths(module: Any) -> list[int]:
    """Return candidate widths of the rotary tables: the whole head, or the part that a model rotates."""
    size = head_size_of(module)
    part = getattr(module, "rotary_ndims", None) or int(size * (getattr(module.config, "partial_rotary_factor", None) or 1))
    rotated = getattr(module, "qk_rope_head_dim", None)
    return [*([] if rotated is None else [rotated]), size, part, max(2, size // 4 * 2)]


def positions_of(module: Any) -> list[Any]:
    """Return candidate tables of each candidate width, and complex ones."""
    angles = [randn(1, TOKENS, width) for width in _widths(module)]
    return [*((each.cos(), each.sin()) for each in angles), *(COMPLEX.given(each[..., ::2]) for each in angles)]


def head_size_of(module: Any) -> int:
    named = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    return int(named or module.config.hidden_size // module.config.num_attention_heads)


def as_one_op(
    module: Any, projections: LinearsMatch, out: str, rotation: Rotation | None, interface: InterfaceCall | None
) -> FusedAttention | None:
    """Return the arguments of `onepass.attention` if that is all that the module does."""
    takes_tables = "position_embeddings" in parameters_of(module)
    ways = [(COMPLEX if rotation is None else rotation, True)] if takes_tables else []
    for how, tables in [*ways, *([(None, True)] if takes_tables else []), (None, False)]:
        if (whole := _as_attention(module, projections, out, how, interface, tables)) is not None:
            return whole
    return None


def _as_attention(
    module: Any,
    projections: LinearsMatch,
    out: str,
    rotation: Rotation | None,
    interface: InterfaceCall | None,
    tables: bool,
) -> FusedAttention | None:
    """Compare the module's code, called with or without tables of positions, and the formula on small layers."""
    size, heads = head_size_of(module), module.config.num_attention_heads
    gated = len(projections.sizes) == 3 and projections.sizes[0] == 2 * heads * size
    shares = len(projections.sizes) == 2
    groups = (sum(projections.sizes) // size - heads * (1 + gated)) // (2 - shares)
    scale = getattr(module, "scaling", None)
    softcap = None if interface is None else interface.softcap
    scale = scale if isinstance(scale, float) and scale > 0 else size**-0.5
    factor = None if interface is None else interface.factor
    whole = FusedAttention(heads, groups, scale, rotation, softcap, tables, gated=gated, shares=shares, factor=factor)
    sinks = [name for name, p in module._parameters.items() if p is not None]
    if interface is not None and interface.sinks:
        if len(sinks) != 1 or module._parameters[sinks[0]].shape != (heads,):
            return None
        whole = replace(whole, sinks=sinks[0])
    norms = norms_in(module)
    if norms and rotation is None:
        return None
    widths = _widths_of_norms([norm_at(module, name) for name in norms]) if norms else []
    if widths is None or (norms and sorted(widths) not in ([size, size], sorted([heads * size, groups * size]))):
        return None
    whole = replace(whole, rows=bool(norms) and widths != [size, size])
    if gated and (whole.rows or factor is not None):
        return None
    if len(projections.names) > 3 or sum(projections.sizes) != (heads * (1 + gated) + (2 - shares) * groups) * size:
        return None
    if heads * size != sizes_of(module._modules[out])[0]:
        return None
    layers = {
        name: tiny(layer, HIDDEN, outputs, 30 + i)
        for i, (name, layer, outputs) in enumerate(zip(projections.names, projections.linears, projections.sizes, strict=True))
    }
    last = tiny(module._modules[out], heads * size, HIDDEN, 40)
    weights_of = {name: randn(width, seed=50 + i) for i, (name, width) in enumerate(zip(norms, widths, strict=True))}
    stand_ins = {name: (weight, Function(partial(normed, weight=weight))) for name, weight in weights_of.items()}
    one = torch.ones(size, dtype=FP64)
    weightless = {} if gated else _weightless_in(module)
    of_values = {name: Function(partial(normed, weight=one)) for name in weightless}
    pairs_of_norms = [*permutations(norms)]
    if not norms and rotation is not None:  # of heads, without weights
        pairs_of_norms += [pair for pair in product(weightless, repeat=2) if weightless[pair[0]] == weightless[pair[1]]]
        stand_ins = {name: (one, child) for name, child in of_values.items()}
    inputs = []
    for x in (randn(1, TOKENS, HIDDEN), LARGE * randn(1, TOKENS, HIDDEN)):
        qkv = torch.cat([layer(x) for layer in layers.values()], -1).detach()
        scaled = qkv if factor is None else factor.scaled(qkv, heads * size, LATE + torch.tensor([IDS]))
        inputs.append((x, scaled))
    by, mask = "sdpa", None
    if softcap is not None or whole.sinks is not None:  # which SDPA refuses
        by, mask = "eager", torch.full((TOKENS, TOKENS), float("-inf"), dtype=FP64).triu(1)[None, None]
    logits = None if whole.sinks is None else randn(heads, seed=_OWN)
    made = {**layers, **of_values, **{name: child for name, (_, child) in stand_ins.items()}, out: last}
    interleaved = rotation is not None and rotation.interleaved
    call = AttentionOptions(heads, groups, interleaved, whole.scale, softcap=softcap or 0.0, eps=EPS, gated=gated)
    for width in _widths(module):
        angles = randn(1, TOKENS, width // 2, seed=2)

        def fits(names: tuple[str, ...], value_norm: str | None, of_tables: float, angles: Tensor = angles) -> bool:
            """Compare them where tables have this factor."""
            given = (HALVES if rotation is None else rotation).given(angles, of_tables) if tables else None
            weights = tuple(stand_ins[name][0] for name in names) if names and not whole.rows else (None, None)
            row_norms = tuple(stand_ins[name][1] for name in names) if whole.rows else ()
            cos, sin = (None, None) if rotation is None else (of_tables * each[0] for each in (angles.cos(), angles.sin()))
            for x, qkv in inputs:
                arranged = whole.arranged(qkv, row_norms, None if value_norm is None else of_values[value_norm])
                y = attention_formula(arranged, cos, sin, call, None, logits, weights)  # type: ignore[arg-type]
                expected = last(y).detach()
                runs = (tried(module, made, x, given, by, training, mask, shared=_Unshared()) for training in (False, True))
                if not all(close_by_rows(each, expected) for each in runs):
                    return False
            return True

        for names, value_norm in product(pairs_of_norms, (None, *of_values)):
            if whole.rows and [weights_of[name].numel() for name in names] != [heads * size, groups * size]:
                continue
            if fits(names, value_norm, 1.0):
                alone = rotation is not None and not fits(names, value_norm, 2.0)
                return replace(whole, norms=names, value_norm=value_norm, turns_alone=alone)
    return None


def norm_at(module: nn.Module, name: str) -> NormMatch | None:
    """Return the match of a child that onepass has replaced, as a norm."""
    child = module._modules[name]
    match = None if child is None else vars(child).get("_onepass")
    return match if isinstance(match, NormMatch) else None


def _weightless_in(module: nn.Module) -> dict[str, float]:
    """Return the children that onepass has replaced as norms without weights, and the eps of each."""
    norms = ((name, norm_at(module, name)) for name in module._modules)
    return {name: norm.eps for name, norm in norms if norm is not None and norm.weight is None}


def _widths_of_norms(norms: list[NormMatch | None]) -> list[int] | None:
    """Return the widths of two RMSNorms that differ in nothing else, or None."""
    kinds = {(norm.layer, norm.eps, norm.zero_centered) for norm in norms if norm is not None}
    if len(norms) != 2 or None in norms or len(kinds) != 1 or kinds.pop()[0]:
        return None
    return [norm.weight.shape[0] for norm in norms]  # type: ignore[union-attr]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
