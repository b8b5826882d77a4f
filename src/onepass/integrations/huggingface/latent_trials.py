"""Multi-head latent attention, DeepSeek's: whether it is all that a module's code computes, by running it on small layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.attention_trials import (
    HIDDEN,
    TOKENS,
    norm_at,
    normed,
    norms_in,
    positions_of,
    random_like,
    tried,
)
from onepass.integrations.huggingface.linear_layers import sizes_of, tiny
from onepass.integrations.huggingface.linears import FoldedNorm, LinearsMatch
from onepass.integrations.huggingface.norms import is_norm
from onepass.integrations.huggingface.probe import LARGE, Function, close_by_rows, parameters_of, randn
from onepass.integrations.huggingface.rotation import COMPLEX, HALVES, ROTATIONS, Rotation
from onepass.ops.attention.attention import SIZES
from onepass.ops.attention.latent_attention import latent_attention, latent_attention_reference, unsupported

_RANK = 3  # of weights that stand in for up-projections


@dataclass(frozen=True)
class FusedLatent:
    """Arguments of `onepass.latent_attention` for a module that only does projections down and up, norms of what is between,
    rotation and causal attention."""

    heads: int
    nope: int
    rope: int
    values: int
    scale: float
    rotation: Rotation | None
    tables: bool  # whether it is called with tables of positions
    norms: tuple[str, ...]  # of the queries' latent rows, where there are such, and of those of keys and values
    queries: LinearsMatch | None  # their up-projection; None: they are projected from the input
    keys: LinearsMatch  # the up-projection of keys and values
    softcap: None = None
    sinks: None = None
    factor: None = None
    turns_alone: bool = False

    @property
    def width(self) -> int:
        """Of q's and k's heads."""
        return self.nope + self.rope

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Columns of the down-projections: for queries, for keys and values, and the part of keys that is rotated."""
        first = self.heads * self.width if self.queries is None else self.queries.input_size
        return first, self.keys.input_size, self.rope

    def takes(self, module: nn.Module, x: Tensor, window: int | None) -> bool:
        """Whether all parts are as they were, and onepass's kernels take the heads on a GPU."""
        if window is not None or (x.is_cuda and not {self.width, self.values} <= set(SIZES)):
            return False
        norms = [norm_at(module, name) for name in self.norms]
        if not all([norm is not None and norm.untouched() for norm in norms]):
            return False
        return self.keys.intact() and (self.queries is None or self.queries.intact())

    def attend(self, module: nn.Module, made: Tensor, positions: Any, documents: Tensor | None) -> Tensor:
        """Return attention's result [B, S, heads * values] of the down-projections'."""
        B, S, _ = made.shape
        first, latent, k_rope = made.split(self.sizes, -1)
        q = first if self.queries is None else self.queries(first, _folded(module, self.norms[0]))
        kv = self.keys(latent, _folded(module, self.norms[-1]))
        cos = sin = None
        if self.rotation is not None:
            cos, sin = self.rotation.tables(positions)
        if documents is not None:
            q, kv, k_rope = (x.reshape(1, B * S, -1) for x in (q, kv, k_rope))
            cos, sin = (None if table is None else table.expand(B, S, -1).reshape(1, B * S, -1) for table in (cos, sin))
        q, kv = (x.unflatten(-1, (self.heads, -1)) for x in (q, kv))
        y = latent_attention(
            q,
            kv,
            k_rope,
            cos=cos,
            sin=sin,
            interleaved=self.rotation is not None and self.rotation.interleaved,
            scale=self.scale,
            cu_seqlens=documents,
            deterministic=False,
            backend=None if unsupported(q, kv, k_rope, documents) is None else "torch",
        )
        return y.view(B, S, -1)

    def words(self) -> str:
        return f"latent_attention, norm_linear after {' and '.join(self.norms)}"


def _folded(module: nn.Module, name: str) -> FoldedNorm:
    norm = norm_at(module, name)
    assert norm is not None  # `takes` has seen it
    return FoldedNorm(norm)


# ---- recognition ----


def latent_roles(module: Any, linears: list[str]) -> tuple[LinearsMatch, list[str]] | None:
    """Return the layers that read the input, queries' first, and the others; or None if other code reads the input too."""
    if len(linears) not in (4, 5) or not all(is_norm(module._modules[name]) for name in norms_in(module)):
        return None
    for positions in positions_of(module):
        layers = {name: Function(partial(random_like, size=sizes_of(module.get_submodule(name))[1])) for name in linears}
        hidden = torch.full((1, TOKENS, sizes_of(module._modules[linears[0]])[0]), float("nan"), dtype=torch.float64)
        y = tried(module, layers, hidden, positions, "sdpa")
        if not isinstance(y, Tensor) or not y.isfinite().all() or any(len(layer.calls) != 1 for layer in layers.values()):
            continue
        asked = [name for name in linears if layers[name].calls[0][0][0] is hidden]
        match = LinearsMatch.found(module, tuple(asked)) if len(asked) == 2 else None
        return None if match is None else (match, [name for name in linears if name not in asked])
    return None


def as_latent(module: Any, projections: LinearsMatch, others: list[str]) -> tuple[FusedLatent, str] | None:
    """Return the arguments of `onepass.latent_attention` if that is all that the module does, and the output projection."""
    for whole, out in _candidates(module, projections, others):
        if _is_all(module, projections, whole, out):
            return whole, out
    return None


def _candidates(module: Any, projections: LinearsMatch, others: list[str]) -> Iterator[tuple[FusedLatent, str]]:
    """Yield each way in which the layers' sizes fit."""
    H, scale = module.config.num_attention_heads, getattr(module, "scaling", None)
    widths = {
        name: norm.weight.shape[0] for name in norms_in(module) if (norm := norm_at(module, name)) and norm.weight is not None
    }
    takes_tables = "position_embeddings" in parameters_of(module)
    rotations: Iterable[Rotation | None] = (*ROTATIONS, COMPLEX, None) if takes_tables else (None,)
    for *names, out in permutations(others):
        ups = [up for name in names if (up := LinearsMatch.found(module, (name,))) is not None]
        if not len(ups) == len(names) == len(widths):
            continue
        *before, keys = ups
        queries = before[0] if before else None
        made = projections.sizes[0] if queries is None else queries.sizes[0]
        rope, values = projections.sizes[1] - keys.input_size, sizes_of(module._modules[out])[0] // H
        nope = made // H - rope
        fits = [made, *keys.sizes, sizes_of(module._modules[out])[0]] == [H * (nope + rope), H * (nope + values), H * values]
        fits = fits and projections.sizes[0] == (made if queries is None else queries.input_size)
        if not fits or rope < 2 or rope % 2 or nope < 1 or values < 1:
            continue
        factor = scale if isinstance(scale, float) and scale > 0 else (nope + rope) ** -0.5
        for norms, rotation in product(permutations(widths), rotations):
            if [widths[name] for name in norms] == [up.input_size for up in ups]:
                yield FusedLatent(H, nope, rope, values, factor, rotation, takes_tables, norms, queries, keys), out


def _is_all(module: Any, projections: LinearsMatch, whole: FusedLatent, out: str) -> bool:
    """Compare the module's code and the formula on small layers."""
    first, rank, rope = whole.sizes
    downs = {
        name: tiny(layer, HIDDEN, outputs, 30 + i)
        for i, (name, layer, outputs) in enumerate(zip(projections.names, projections.linears, projections.sizes, strict=True))
    }
    both = [up for up in (whole.queries, whole.keys) if up is not None]
    ups = {up.names[0]: _up(up.input_size, up.sizes[0], 40 + i) for i, up in enumerate(both)}
    weights = {name: randn(up.input_size, seed=50 + i) for i, (name, up) in enumerate(zip(whole.norms, both, strict=True))}
    norms = {name: Function(partial(normed, weight=weight)) for name, weight in weights.items()}
    last = tiny(module._modules[out], whole.heads * whole.values, HIDDEN, 60)
    half, how = randn(1, TOKENS, rope // 2, seed=2), whole.rotation
    tables = (HALVES if how is None else how).given(half) if whole.tables else None
    layers = downs | ups | norms | {out: last}
    cos, sin = (None, None) if how is None else (half[0].cos(), half[0].sin())
    pairs = how is not None and how.interleaved
    for x in (randn(1, TOKENS, HIDDEN), LARGE * randn(1, TOKENS, HIDDEN)):
        results = [tried(module, layers, x, tables, "sdpa", training) for training in (False, True)]
        q, latent, k_rope = torch.cat([layer(x) for layer in downs.values()], -1).detach().split((first, rank, rope), -1)
        if whole.queries is not None:
            q = ups[whole.queries.names[0]](norms[whole.norms[0]](q))
        kv = ups[whole.keys.names[0]](norms[whole.norms[-1]](latent))
        q, kv = (each.unflatten(-1, (whole.heads, -1)) for each in (q, kv))
        y = latent_attention_reference(q, kv, k_rope, cos=cos, sin=sin, interleaved=pairs, scale=whole.scale)
        expected = last(y.flatten(2)).detach()
        if not all(close_by_rows(each, expected) for each in results):
            return False
    return True


def _up(inputs: int, outputs: int, seed: int) -> Function:
    """Return a layer whose weight is a product of two thin ones, as models' have gigabytes in fp64."""
    down, up = randn(inputs, _RANK, seed=seed) / inputs**0.5, randn(_RANK, outputs, seed=seed + 5)
    return Function(lambda x: x @ down @ up)
