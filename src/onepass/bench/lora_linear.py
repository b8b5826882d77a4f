"""lora_linear against PEFT's layer: a frozen weight and an adapter of rank 16.

Time      matrix products dominate, so times are relative to those of `eager`, not to a copy's.
Bytes     forward reads x, the weight and the adapters and writes y; backward reads dy, x, the weight and the adapters, and writes
          dx and the adapters' gradients.
Gradients of x and of the adapters; the weight is frozen.
Variants  `fp32` adapters as PEFT makes them, `bf16` as `autocast_adapter_dtype=False` leaves them. `bf16 fp8` has the weight's
          products in eight bits, over `onepass bf16`. `q, k, v` is one weight with fp32 adapters of three parts of its rows, and
          `8 documents` has an fp32 adapter for each of eight documents of equal length.
Peers     eager: as PEFT's layer computes, without its dropout. torch.compile of the same. q, k and v are three layers there, and
          their results are concatenated; documents follow each other, as a batch of several adapters is run.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.bench import fp8
from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch, of_each
from onepass.bench.model import FP8, BenchCase, Call, Inputs
from onepass.ops.linear.linear import linear
from onepass.ops.linear.lora_linear import lora_linear
from onepass.product.lora import LoRA
from onepass.runtime.backend import explain
from onepass.runtime.fp8_recipe import Precision

_RANK, _SCALE, _DOCUMENTS = 16, 2.0, 8
_FP8, _QKV, _BY_DOCUMENT = "bf16" + FP8, "q, k, v", f"{_DOCUMENTS} documents"
_LLAMA_8B = [(4096, 4096, 6144), (4096, 4096, 28672), (4096, 14336, 4096)]  # tokens, input features, output features
_SHAPES = Shapes(
    gpu={"fp32": _LLAMA_8B, "bf16": _LLAMA_8B, _FP8: _LLAMA_8B, _QKV: _LLAMA_8B[:1], _BY_DOCUMENT: _LLAMA_8B},
    gpu_quick={"fp32": _LLAMA_8B[:1]},
    cpu=of_each(("fp32", "bf16", _FP8, _QKV, _BY_DOCUMENT), [(256, 512, 768)]),
    cpu_quick={"fp32": [(128, 128, 192)]},
)


def _spans(outer: int) -> tuple[tuple[int, int], ...]:
    """Return the rows of q, k and v, of which q has four times k's."""
    q, k = outer * 4 // 6, outer // 6
    return (0, q), (q, q + k), (q + k, outer)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, inner, outer = shape
    of_a, of_b = {_QKV: (3, 1), _BY_DOCUMENT: (_DOCUMENTS, _DOCUMENTS)}.get(variant, (1, 1))
    adapter = _RANK * (of_a * inner + of_b * outer) * (size if variant.startswith("bf16") else 4)
    x, weight, y = (n * size for n in (tokens * inner, inner * outer, tokens * outer))
    return x + weight + adapter + y, y + 2 * x + weight + 2 * adapter


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, inner, outer = case.shape
    weight = random.weight(outer, inner).requires_grad_(False)
    tensors: dict[str, Tensor] = {"x": random.input(tokens, inner), "weight": weight}
    if case.variant == _QKV:
        for name, (first, last) in zip("qkv", _spans(outer), strict=True):
            tensors |= {f"{name}_a": random.weight(_RANK, inner), f"{name}_b": random.weight(last - first, _RANK)}
    elif case.variant == _BY_DOCUMENT:
        a, b = random.weight(_DOCUMENTS * _RANK, inner), random.weight(_DOCUMENTS * outer, _RANK)
        tensors |= {"lora_a": a.view(_DOCUMENTS, _RANK, inner), "lora_b": b.view(_DOCUMENTS, outer, _RANK)}
        tensors["document"] = torch.arange(tokens, device=random.device) * _DOCUMENTS // tokens
    else:
        tensors |= {"lora_a": random.weight(_RANK, inner), "lora_b": random.weight(outer, _RANK)}
    for name, tensor in tensors.items():
        if name.endswith(("_a", "_b")):
            wide = tensor.detach() if case.variant.startswith("bf16") else tensor.detach().float()
            tensors[name] = nn.Parameter(wide * 0.1 if name.endswith("_b") else wide)
    return Inputs(tensors, frozenset({"x", "document"} & tensors.keys()), {"y": random(tokens, outer)})


@lru_cache
def _ends(tokens: int, device: torch.device) -> Tensor:
    return torch.arange(1, _DOCUMENTS + 1, device=device, dtype=torch.int32) * (tokens // _DOCUMENTS)


def _ours(case: BenchCase, precision: Precision = None) -> Call:
    def joined(x: Tensor, weight: Tensor, *parts: Tensor) -> Tensor:
        pairs = zip(parts[::2], parts[1::2], _spans(weight.shape[0]), strict=True)
        return linear(x, weight, lora=[LoRA(a, b, _SCALE, rows) for a, b, rows in pairs])

    def by_document(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, document: Tensor) -> Tensor:
        return lora_linear(x, weight, lora_a, lora_b, scale=_SCALE, ends=_ends(case.shape[0], x.device))

    def one(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        return lora_linear(x, weight, lora_a, lora_b, scale=_SCALE, precision=precision)

    calls: dict[str, Call] = {_QKV: joined, _BY_DOCUMENT: by_document}
    return calls.get(case.variant, one)


def _formula(case: BenchCase, rounded: bool = False) -> Call:
    """Return the formula. `rounded`: operands of products are."""

    def operand(t: Tensor) -> Tensor:
        return t.to(case.dtype) if rounded else t

    def added(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        t = _SCALE * F.linear(operand(x), operand(a)).to(torch.promote_types(x.dtype, torch.float32))
        return F.linear(operand(t) if rounded else t.to(x.dtype), operand(b))

    def call(x: Tensor, weight: Tensor, *parts: Tensor) -> Tensor:
        y = fp8.baseline_linear(case, x, weight) if rounded else F.linear(x, weight)
        if case.variant == _QKV:
            return y + torch.cat([added(x, *parts[i : i + 2]) for i in (0, 2, 4)], -1)
        if case.variant != _BY_DOCUMENT:
            return y + added(x, *parts)
        a, b, document = parts
        for e in range(_DOCUMENTS):
            y = y + torch.where((document == e)[:, None], added(x, a[e], b[e]), 0.0)
        return y

    return call


def _eager(case: BenchCase, run: Run) -> Call:
    def linear_layer(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return (y + F.linear(F.linear(x.to(lora_a.dtype), lora_a), lora_b) * _SCALE).to(y.dtype)

    def layers(x: Tensor, weight: Tensor, *parts: Tensor) -> Tensor:
        spans = enumerate(_spans(weight.shape[0]))
        return torch.cat([linear_layer(x, weight[slice(*rows)], *parts[2 * i : 2 * i + 2]) for i, rows in spans], -1)

    def documents(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, document: Tensor) -> Tensor:
        y, parts = F.linear(x, weight), zip(x.chunk(_DOCUMENTS), lora_a, lora_b, strict=True)
        added = [F.linear(F.linear(rows.to(a.dtype), a), b) * _SCALE for rows, a, b in parts]
        return (y + torch.cat(added)).to(y.dtype)

    calls: dict[str, Call] = {_QKV: layers, _BY_DOCUMENT: documents}
    return run(calls.get(case.variant, linear_layer))


def _backend(case: BenchCase, inputs: Inputs) -> str:
    x, weight, a, b = list(inputs.tensors.values())[:4]
    lora = LoRA(a, b, _SCALE, _spans(weight.shape[0])[0] if case.variant == _QKV else None)
    if case.variant == _BY_DOCUMENT:
        lora = lora._replace(ends=_ends(case.shape[0], x.device))
    explanation = explain("linear", x, weight, lora=lora)
    return str(explanation.backend)


_APART = "has no LoRA layer"
BENCH = OpBench(
    "lora_linear", _SHAPES, (64, 128, 128), _bytes_moved, _inputs,
    lambda case: [] if case.fp8 else by_pytorch(_eager),
    ours=_ours, weights=(1,), baseline=lambda case: _formula(case, rounded=True), reference="eager",
    formula=_formula, backend=_backend, without={"Liger": _APART, "Megatron-core": _APART, "Apex": _APART},
)  # fmt: skip
