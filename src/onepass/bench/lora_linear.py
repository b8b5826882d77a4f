"""lora_linear against PEFT's layer: a frozen weight and an adapter of rank 16.

Time      matrix products dominate, so times are relative to those of `eager`, not to a copy's.
Bytes     forward reads x, the weight and the adapters and writes y; backward reads dy, x, the weight and the adapters, and writes
          dx and the adapters' gradients.
Gradients of x and of the adapters; the weight is frozen.
Variants  `fp32` adapters as PEFT makes them, `bf16` as `autocast_adapter_dtype=False` leaves them. `bf16 fp8` has the weight's
          products in eight bits, over `onepass bf16`. `q, k, v` is one weight with fp32 adapters of three parts of its rows, and
          `8 documents` has an fp32 adapter for each of eight documents of equal length. `gate, up, down` is an MLP with fp32
          adapters: linear of gate and up as one weight, then activation_linear. Its shape is tokens, hidden and MLP.
Peers     eager: as PEFT's layer computes, without its dropout. torch.compile of the same. q, k and v are three layers there,
          whose results nobody joins; documents follow each other, as a batch of several adapters is run.
          Unsloth, axolotl: their autograd functions of a linear layer, of q, k and v, and of an MLP. They round adapters to x's
          type themselves, without autocast. `inplace` is off: Unsloth would write dx over x, which the next call reads. That
          saves memory, not time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.bench import fp8
from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch, of_each
from onepass.bench.model import FP8, BenchCase, Call, Columns, Contender, Inputs, Result
from onepass.bench.peers import needs_gpu, once, unsloth_lora
from onepass.ops.activation.activation_linear import activation_linear
from onepass.ops.activation.bias_activation import bias_activation_reference
from onepass.ops.linear.linear import linear
from onepass.ops.linear.lora_linear import lora_linear
from onepass.product.lora import LoRA
from onepass.runtime.backend import explain
from onepass.runtime.fp8_recipe import Precision

_RANK, _SCALE, _DOCUMENTS = 16, 2.0, 8
_FP8, _QKV, _MLP, _BY_DOCUMENT = "bf16" + FP8, "q, k, v", "gate, up, down", f"{_DOCUMENTS} documents"
_LLAMA_8B = [(4096, 4096, 6144), (4096, 4096, 28672), (4096, 14336, 4096)]  # tokens, input features, output features
_SHAPES = Shapes(
    gpu={
        "fp32": _LLAMA_8B, "bf16": _LLAMA_8B, _FP8: _LLAMA_8B, _QKV: _LLAMA_8B[:1], _MLP: [(4096, 4096, 14336)],
        _BY_DOCUMENT: _LLAMA_8B,
    },
    gpu_quick={"fp32": _LLAMA_8B[:1]},
    cpu=of_each(("fp32", "bf16", _FP8, _QKV, _MLP, _BY_DOCUMENT), [(256, 512, 768)]),
    cpu_quick={"fp32": [(128, 128, 192)]},
)  # fmt: skip


def _spans(outer: int) -> tuple[tuple[int, int], ...]:
    """Return the rows of q, k and v, of which q has four times k's."""
    q, k = outer * 4 // 6, outer // 6
    return (0, q), (q, q + k), (q + k, outer)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, inner, outer = shape
    of_a, of_b = {_QKV: (3, 1), _MLP: (3, 3), _BY_DOCUMENT: (_DOCUMENTS, _DOCUMENTS)}.get(variant, (1, 1))
    adapter = _RANK * (of_a * inner + of_b * outer) * (size if variant.startswith("bf16") else 4)
    x, weight, y = (n * size for n in (tokens * inner, inner * outer, tokens * outer))
    if variant == _MLP:
        weight, y = 3 * weight, x
    return x + weight + adapter + y, y + 2 * x + weight + 2 * adapter


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, inner, outer = case.shape
    weight = random.weight(outer, inner).requires_grad_(False)
    tensors: dict[str, Tensor] = {"x": random.input(tokens, inner), "weight": weight}
    if case.variant == _QKV:
        for name, (first, last) in zip("qkv", _spans(outer), strict=True):
            tensors |= {f"{name}_a": random.weight(_RANK, inner), f"{name}_b": random.weight(last - first, _RANK)}
    elif case.variant == _MLP:
        for name, rows, columns in (("weight", 2 * outer, inner), ("down", inner, outer)):
            tensors[name] = random.weight(rows, columns).requires_grad_(False)
        for name, rows, columns in (("gate", outer, inner), ("up", outer, inner), ("down", inner, outer)):
            tensors |= {f"{name}_a": random.weight(_RANK, columns), f"{name}_b": random.weight(rows, _RANK)}
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
    by_row, width = frozenset({"x", "document"} & tensors.keys()), inner if case.variant == _MLP else outer
    return Inputs(tensors, by_row, {"y": random(tokens, width)}, row_elements=2 * outer if case.variant == _MLP else 0)


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

    def mlp(x: Tensor, weight: Tensor, down: Tensor, *parts: Tensor) -> Tensor:
        gate_a, gate_b, up_a, up_b, down_a, down_b = parts
        outer = down.shape[1]
        of_gate, of_up = LoRA(gate_a, gate_b, _SCALE, (0, outer)), LoRA(up_a, up_b, _SCALE, (outer, 2 * outer))
        h = linear(x, weight, lora=[of_gate, of_up])
        return activation_linear(h, down, activation="swiglu", lora=LoRA(down_a, down_b, _SCALE))

    calls: dict[str, Call] = {_QKV: joined, _MLP: mlp, _BY_DOCUMENT: by_document}
    return calls.get(case.variant, one)


def _formula(case: BenchCase, rounded: bool = False) -> Call:
    """Return the formula. `rounded`: operands of products are."""

    def operand(t: Tensor) -> Tensor:
        return t.to(case.dtype) if rounded else t

    def added(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        t = _SCALE * F.linear(operand(x), operand(a)).to(torch.promote_types(x.dtype, torch.float32))
        return F.linear(operand(t) if rounded else t.to(x.dtype), operand(b))

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return fp8.baseline_linear(case, x, weight) if rounded else F.linear(x, weight)

    def call(x: Tensor, weight: Tensor, *parts: Tensor) -> Tensor:
        y = product(x, weight)
        if case.variant == _MLP:
            down, *adapters = parts
            h = y + torch.cat([added(x, *adapters[i : i + 2]) for i in (0, 2)], -1)
            act = bias_activation_reference(h.to(torch.promote_types(h.dtype, torch.float32)), activation="swiglu")
            return product(act, down) + added(act, *adapters[4:])
        if case.variant == _QKV:
            return y + torch.cat([added(x, *parts[i : i + 2]) for i in (0, 2, 4)], -1)
        if case.variant != _BY_DOCUMENT:
            return y + added(x, *parts)
        a, b, document = parts
        for e in range(_DOCUMENTS):
            y = y + torch.where((document == e)[:, None], added(x, a[e], b[e]), 0.0)
        return y

    return call


# ---- peers ----


def _layers(case: BenchCase, weight: Tensor, *others: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each layer's weight and adapter, as models have them."""
    weights, adapters = [weight], others
    if case.variant == _QKV:
        weights = [weight[slice(*rows)] for rows in _spans(weight.shape[0])]
    elif case.variant == _MLP:
        weights, adapters = [*weight.chunk(2), others[0]], others[1:]
    return list(zip(weights, adapters[::2], adapters[1::2], strict=True))


def _eager(case: BenchCase, run: Run) -> Call:
    def linear_layer(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return (y + F.linear(F.linear(x.to(lora_a.dtype), lora_a), lora_b) * _SCALE).to(y.dtype)

    def layers(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear_layer(x, *layer) for layer in _layers(case, *tensors))

    def mlp(x: Tensor, *tensors: Tensor) -> Tensor:
        gate, up, down = _layers(case, *tensors)
        return linear_layer(F.silu(linear_layer(x, *gate)) * linear_layer(x, *up), *down)

    def documents(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, document: Tensor) -> Tensor:
        y, parts = F.linear(x, weight), zip(x.chunk(_DOCUMENTS), lora_a, lora_b, strict=True)
        added = [F.linear(F.linear(rows.to(a.dtype), a), b) * _SCALE for rows, a, b in parts]
        return (y + torch.cat(added)).to(y.dtype)

    calls: dict[str, Call] = {_QKV: layers, _MLP: mlp, _BY_DOCUMENT: documents}
    call = run(calls.get(case.variant, linear_layer))
    return (lambda *tensors: Columns(call(*tensors))) if case.variant == _QKV else call


def _by_functions(case: BenchCase, kernels: Any, one: Any, activation: tuple[Any, Any], arguments: Callable[..., Any]) -> Call:
    """Return the call of a package's autograd functions.

    Args:
        one: the function of a linear layer.
        activation: its functions of SwiGLU, forward and backward.
        arguments: returns a function's arguments, of x and of each layer's weight and adapter.
    """
    layers = once(partial(_layers, case))

    def call(x: Tensor, *tensors: Tensor) -> Result:
        given = arguments(x[None], layers(*tensors))  # rows of a batch: backward takes no others
        if case.variant == _QKV:
            return Columns(y[0] for y in kernels.LoRA_QKV.apply(*given, False))
        y: Tensor = kernels.LoRA_MLP.apply(*given, *activation, False) if case.variant == _MLP else one.apply(*given)
        return y[0]

    return call


def _unsloth(case: BenchCase) -> Call:
    kernels = unsloth_lora()

    def arguments(x: Tensor, layers: list[tuple[Tensor, Tensor, Tensor]]) -> list[Any]:
        return [x, *(value for weight, a, b in layers for value in (weight, None, a, b, _SCALE))]

    return _by_functions(case, kernels, kernels.LoRA_W, (kernels.swiglu_fg_kernel, kernels.swiglu_DWf_DW_dfg_kernel), arguments)


def _axolotl(case: BenchCase) -> Call:
    kernels = importlib.import_module("axolotl.kernels.lora")

    def arguments(x: Tensor, layers: list[tuple[Tensor, Tensor, Tensor]]) -> list[Any]:
        return [x, None, *(value for weight, a, b in layers for value in (weight, None, None, a, b, _SCALE, None, None))]

    return _by_functions(case, kernels, kernels.LoRA_O, (kernels.swiglu_forward, kernels.swiglu_backward), arguments)


def _peers(case: BenchCase) -> list[Contender]:
    if case.fp8:
        return []
    lacks = "has one adapter a call" if case.variant == _BY_DOCUMENT else needs_gpu()
    fused = {"Unsloth": _unsloth, "axolotl": _axolotl}
    return [*by_pytorch(_eager), *(Contender(name, make, package=name, lacks=lacks) for name, make in fused.items())]


def _backend(case: BenchCase, inputs: Inputs) -> str:
    tensors = inputs.tensors
    a, b = [tensor for name, tensor in tensors.items() if name.endswith(("_a", "_b"))][:2]
    x, weight = tensors["x"], tensors["weight"]
    first = {_QKV: _spans(weight.shape[0])[0], _MLP: (0, weight.shape[0] // 2)}
    lora = LoRA(a, b, _SCALE, first.get(case.variant))
    if case.variant == _BY_DOCUMENT:
        lora = lora._replace(ends=_ends(case.shape[0], x.device))
    explanation = explain("linear", x, weight, lora=lora)
    return str(explanation.backend)


_APART = "has no LoRA layer"
BENCH = OpBench(
    "lora_linear", _SHAPES, (64, 128, 128), _bytes_moved, _inputs,
    _peers,
    ours=_ours, weights=(1,), baseline=lambda case: _formula(case, rounded=True), reference="eager",
    formula=_formula, backend=_backend, without={"Liger": _APART, "Megatron-core": _APART, "Apex": _APART},
)  # fmt: skip
