"""latent_attention against its peers: DeepSeek's attention from its up-projections on.

Time      matrix products dominate, so times are relative to those of `eager`, not to a copy's.
Bytes     forward reads the projections and writes y; backward reads these and dy and writes the projections' gradients.
Variants  `heads`, where sums have a fixed order: all contenders run under torch.use_deterministic_algorithms. `any order`: none
          does, and onepass has deterministic=False.
Shapes    sequences x tokens x heads x nope x rope x V: DeepSeek V2 Lite's, then V3's.
Peers     eager and torch.compile: as transformers writes it: rotation, two joins, PyTorch's attention with its choice of kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.attention import in_order
from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch
from onepass.bench.model import BenchCase, Call, Contender, Inputs

_ANY = "any order"
_LITE, _V3 = (4, 4096, 16, 128, 64, 128), (1, 4096, 128, 128, 64, 128)
_SHAPES = Shapes(
    gpu={"heads": [_LITE, _V3], _ANY: [_LITE, _V3]},
    cpu={"heads": [(1, 256, 4, 64, 32, 64)], _ANY: [(1, 256, 4, 64, 32, 64)]},
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    B, S, heads, nope, rope, V = shape
    projections, y = B * S * (heads * (2 * nope + rope + V) + rope) * size, B * S * heads * V * size
    return projections + y, 2 * projections + 2 * y


def _inputs(case: BenchCase, random: Random) -> Inputs:
    B, S, heads, nope, rope, V = case.shape
    shapes = {"q": (heads, nope + rope), "kv": (heads, nope + V), "k_rope": (rope,)}
    tensors = {name: random.input(B, S, *shape) for name, shape in shapes.items()}
    return Inputs(
        tensors | random.rotations(S, rope), frozenset(tensors), {"y": random(B, S, heads, V)}, row_elements=heads * S * S
    )  # the formula's scores


def _options(case: BenchCase) -> dict[str, Any]:
    return {"interleaved": True, **({"deterministic": False} if case.variant == _ANY else {})}


def _pairs_to_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def _eager(case: BenchCase, run: Run, padded: bool = False) -> Call:
    """padded: values are as wide as keys, for a CPU's fast attention, which rounds scores where PyTorch's other one doesn't."""
    _, _, heads, nope, rope, V = case.shape

    def attend(q: Tensor, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, kv, k_rope = q.transpose(1, 2), kv.transpose(1, 2), k_rope.unsqueeze(1)
        (q_nope, q_rope), (k_nope, v) = q.split((nope, rope), -1), kv.split((nope, V), -1)
        q_rope, k_rope = _pairs_to_halves(q_rope, cos, sin), _pairs_to_halves(k_rope, cos, sin)
        k = torch.cat([k_nope, k_rope.expand(-1, heads, -1, -1)], -1)
        v = F.pad(v, (0, nope + rope - V)) if padded and not v.is_cuda else v
        return F.scaled_dot_product_attention(torch.cat([q_nope, q_rope], -1), k, v, is_causal=True)[..., :V].transpose(1, 2)

    return run(attend)


def _peers(case: BenchCase) -> list[Contender]:
    return by_pytorch(_eager)


BENCH = OpBench(
    "latent_attention", _SHAPES, (1, 64, 4, 64, 32, 64), _bytes_moved, _inputs, _peers, options=_options,
    keywords=lambda _: ("cos", "sin"), baseline=lambda case: _eager(case, lambda call: call, padded=True), reference="eager",
    around=lambda case: in_order(case.variant != _ANY),
)  # fmt: skip
