"""Sample calls of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.ops.activation.activations import ACTIVATIONS
from onepass.ops.experts.experts import experts, experts_reference
from onepass.product.lora import LoRA
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.samples import CoveringCall, Sample, meta, random_tensors

_E, _K, _H, _I = 4, 2, 24, 40  # experts, of a token, hidden and inner size
_GPT_OSS: dict[str, Any] = {
    "activation": "quick_geglu", "clamp": 7.0, "linear_offset": 1.0, "interleaved": True, "transposed": True
}  # fmt: skip


def _chosen(x: Any, weights: Any, experts: int) -> Tensor:
    """Return experts for each token of x. Some have many tokens, and some none. Where x or weights are wrong, so is not this."""
    lead, device = (tuple(x.shape[:-1]), x.device) if isinstance(x, Tensor) else ((3, 7), None)
    k = weights.shape[-1] if isinstance(weights, Tensor) and weights.dim() else _K
    tokens = torch.arange(math.prod(lead), device=device).square()
    return ((tokens.unsqueeze(-1) + torch.arange(k, device=device)) % experts).view(*lead, k)


def _arguments(named: dict[str, Any]) -> dict[str, Any]:
    """Return the op's keywords: with chosen experts, and adapters made of their tensors."""
    found = {name: value for name, value in named.items() if "." not in name}
    if "up.a" in named:
        found["lora"] = LoRA(named["up.a"], named["up.b"], 0.5), LoRA(named["down.a"], named["down.b"], 2.0)
    experts = named["up"].shape[0] if isinstance(named["up"], Tensor) and named["up"].dim() == 3 else _E
    return found if "chosen" in found else found | {"chosen": _chosen(named["x"], named["weights"], experts)}


@dataclass(frozen=True)
class ExpertsSample(Sample):
    """A sample whose tensors after x, up and down are given by name."""

    def call(self, function: Callable[..., Any], *tensors: Tensor, **more: Any) -> Any:
        names = "x", "up", "down", *self.keywords
        return function(**_arguments(dict(zip(names, tensors, strict=True)) | self.options | more))


def _tensors(
    device: torch.device, dtype: torch.dtype, more: tuple[tuple[int, ...], ...] = (), transposed: bool = False
) -> tuple[Tensor, ...]:
    shapes = ((_E, _H, 2 * _I), (_E, _I, _H)) if transposed else ((_E, 2 * _I, _H), (_E, _H, _I))
    x, up, down, weights, *rest = random_tensors(((3, 7, _H), *shapes, (3, 7, _K), *more), device, dtype)
    return x, up * _H**-0.5, down * _I**-0.5, weights, *(t * t.shape[-1] ** -0.5 for t in rest)


_ADAPTERS = "weights", "up.a", "up.b", "down.a", "down.b"
SAMPLES = {
    "experts": ExpertsSample(_tensors, experts_reference, keywords=("weights",), roundings=2.0),
    "experts: biases, interleaved, transposed": ExpertsSample(
        partial(_tensors, more=((_E, 2 * _I), (_E, _H)), transposed=True), experts_reference, _GPT_OSS,
        keywords=("weights", "up_bias", "down_bias"), roundings=2.0,
    ),
    "experts: shared": ExpertsSample(
        partial(_tensors, more=((3, 7, _H),)), experts_reference, keywords=("weights", "shared"), roundings=2.0
    ),
    "experts: lora": ExpertsSample(
        partial(_tensors, more=((_E, 5, _H), (_E, 2 * _I, 5), (_E, 6, _I), (_E, _H, 6))), experts_reference,
        keywords=_ADAPTERS, roundings=2.0,
    ),
}  # fmt: skip

SHAPES_OF: dict[str, Any] = {
    "experts": {
        "up_bias": lambda x, given: (given["up"][0], given["up"][2 if given.get("transposed") else 1]),
        "down_bias": lambda x, given: (given["up"][0], x.shape[-1]),
        "shared": lambda x, given: x.shape,
    }
}  # fmt: skip
TYPES_OF = {"chosen": torch.int64}


# ---- random calls ----


def _random_experts(draw: Draw) -> RandomCall:
    dtype, H, lead = draw.dtype(), draw.width(), draw.lead()
    inner, E, k = draw.choose((8, 1, 5, 64, 33)), draw.choose((4, 8, 1, 3)), draw.choose((1, 2))
    activation, transposed = draw.choose(("swiglu", "gelu", "geglu")), draw.flag()
    wide = inner * ACTIVATIONS[activation].parts
    options: dict[str, Any] = {
        "activation": activation, "transposed": transposed, "interleaved": wide > inner and draw.flag(0.3),
        "linear_offset": draw.choose((0.0, 1.0)) if wide > inner else 0.0,
    }  # fmt: skip
    shapes = [(E, H, wide), (E, inner, H)] if transposed else [(E, wide, H), (E, H, inner)]
    tensors = {"x": RandomTensor((*lead, H), dtype, "tame")}
    for name, shape in zip(("up", "down"), shapes, strict=True):
        tensors[name] = RandomTensor(shape, dtype, "tame weight", True, shape[1 if transposed else 2])
    tensors["weights"] = RandomTensor((*lead, k), draw.beside(dtype), "tame")
    for name, size in (("up_bias", wide), ("down_bias", H)):
        if draw.flag(0.3):
            tensors[name] = RandomTensor((E, size), dtype, "tame", True)
    if draw.flag(0.3):
        tensors["shared"] = RandomTensor((*lead, H), dtype, "tame")
    options["recompute"] = draw.flag(0.2)
    given = {name: value for name, value in options.items() if name != "recompute"}
    formula = lambda **named: experts_reference(**_arguments(named), **given)  # noqa: E731
    return RandomCall(tensors, options, formula, products=True, finite=True, arguments=_arguments)


RANDOM_CALLS = {"experts": _random_experts}

# ---- calls that launch every kernel, in every form that is shipped ----


def covering_calls() -> Iterator[CoveringCall]:
    """Qwen3's, Mixtral's and gpt-oss's experts, with all options between them."""
    yield _call(2048, 768, 128, 8)
    yield _call(2048, 768, 128, 8, torch.float32)
    yield _call(4096, 14336, 8, 2, shared=True)
    yield _call(2880, 2880, 32, 4, torch.bfloat16, True, **_GPT_OSS)
    yield _call(2880, 2880, 32, 4, torch.float16, True, **_GPT_OSS)
    yield _call(2048, 768, 128, 8, rank=16)


def _call(
    H: int, inner: int, E: int, k: int, dtype: torch.dtype = torch.bfloat16, biased: bool = False, shared: bool = False,
    rank: int = 0, **options: Any,
) -> CoveringCall:  # fmt: skip
    def run() -> Tensor:
        x = meta(4096, H, dtype=dtype)
        shapes = ((E, H, 2 * inner), (E, inner, H)) if options.get("transposed") else ((E, 2 * inner, H), (E, H, inner))
        up, down = (meta(*shape, dtype=dtype, requires_grad=not rank) for shape in shapes)
        chosen = torch.empty(4096, k, dtype=torch.int64, device="meta")
        more: dict[str, Any] = {"shared": meta(4096, H, dtype=dtype)} if shared else {}
        if biased:
            more |= {"up_bias": meta(E, 2 * inner, dtype=dtype), "down_bias": meta(E, H, dtype=dtype)}
        if rank:
            of_up = LoRA(meta(E, rank, H, dtype=torch.float32), meta(E, 2 * inner, rank, dtype=torch.float32))
            of_down = LoRA(meta(E, rank, inner, dtype=torch.float32), meta(E, H, rank, dtype=torch.float32))
            more["lora"] = of_up, of_down
        weights = meta(4096, k, dtype=torch.float32)
        return experts(x, up, down, chosen, weights, **more, **options, backend="triton")

    words = ("gpt-oss",) * biased + ("shared",) * shared + (f"lora {rank}",) * bool(rank)
    return CoveringCall(" ".join(("experts", f"{E} of {inner} at 4096x{H} top {k}", *words)), dtype, run)
