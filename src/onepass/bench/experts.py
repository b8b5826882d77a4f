"""experts against its peers: a mixture's experts on the tokens that a router has sent them, biases and all.

Time      matrix products dominate, so times are relative to those of `products`: the two grouped products of forward and the four
          of backward, of rows that are sorted already. Nothing is gathered, activated, weighted or summed there.
Bytes     forward reads x, the choices and the weights, and writes y; backward reads dy, x, the choices and the weights, and
          writes the gradients. With main_grad those of the weights are read and written in fp32.
Shapes    tokens x features x experts x features of an expert x chosen experts: those of Qwen 3 30B, Mixtral 8x7B and gpt-oss 20B,
          at 16384 tokens. Tokens choose by the softmax of random logits.
Variants  "main_grad": the weights' gradients go to an fp32 main_grad, by .backward(). "gpt-oss": its biases, clamped and
          interleaved gates, and weights whose input features come first.
Peers     eager: the loop over experts of transformers' models. grouped_mm: transformers' `experts_implementation="grouped_mm"`;
          torch.compile: the same, compiled. With main_grad a hook adds their .grad to it.
          products by QuACK: the same six by its grouped product, in its default configuration. Ours uses it for large main_grads.
          Liger: without tuning, which compiles each kernel a dozen times and more (LIGER_FUSED_MOE_AUTOTUNE=1 tunes).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, as_written, bind, give_main_grad
from onepass.bench.model import BenchCase, Call, Contender, Inputs
from onepass.bench.peers import compiled, imported, needs_gpu, once, since_torch
from onepass.ops.activation.bias_activation import bias_activation_reference
from onepass.ops.experts.experts import experts

_QWEN, _MIXTRAL, _GPT_OSS = (16384, 2048, 128, 768, 8), (16384, 4096, 8, 14336, 2), (16384, 2880, 32, 2880, 4)
_SMALL, _TINY = (256, 128, 8, 96, 2), (64, 64, 4, 32, 2)
_SHAPES = Shapes(
    gpu={"swiglu": [_QWEN, _MIXTRAL], "swiglu main_grad": [_QWEN], "gpt-oss": [_GPT_OSS]},
    gpu_quick={"swiglu": [(4096, *_QWEN[1:])]},
    cpu={"swiglu": [_SMALL], "swiglu main_grad": [_SMALL], "gpt-oss": [_SMALL]},
    cpu_quick={"swiglu": [_TINY]},
)
_CLAMP, _ALPHA = 7.0, 1.702  # gpt-oss's limit of gates, and its sigmoid's slope
_BIASES = ("up_bias", "down_bias")


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, hidden, experts, inner, k = shape
    rows, choices, weights = tokens * hidden * size, tokens * k * 12, 3 * experts * hidden * inner
    in_gradients = weights * (8 if variant.endswith("main_grad") else size)
    return 2 * rows + choices + weights * size, 3 * rows + choices + tokens * k * 4 + weights * size + in_gradients


def _is_gpt_oss(case: BenchCase) -> bool:
    return case.variant == "gpt-oss"


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, hidden, experts, inner, k = case.shape
    weights, chosen = random(tokens, experts).float().softmax(-1).topk(k)
    weights = weights / weights.sum(-1, keepdim=True)
    up, down = random.weight(experts * 2 * inner, hidden), random.weight(experts * hidden, inner)
    shapes = ((2 * inner, hidden), (hidden, inner))
    if _is_gpt_oss(case):
        shapes = ((hidden, 2 * inner), (inner, hidden))
    tensors: dict[str, Tensor] = {"x": random.input(tokens, hidden)}
    for name, weight, shape in zip(("up", "down"), (up, down), shapes, strict=True):
        tensors[name] = torch.nn.Parameter(weight.detach().view(experts, *shape))
    tensors |= {"chosen": chosen, "weights": weights.requires_grad_()}
    if _is_gpt_oss(case):
        tensors |= {"up_bias": random.parameter(experts, 2 * inner), "down_bias": random.parameter(experts, hidden)}
    trained = case.variant.endswith("main_grad")
    if trained:
        give_main_grad(tensors["up"])
        give_main_grad(tensors["down"])
    by_row, grads = frozenset({"x", "chosen", "weights"}), {"y": random(tokens, hidden)}
    return Inputs(tensors, by_row, grads, trained, row_elements=2 * inner * k)


def _options(case: BenchCase) -> dict[str, Any]:
    if not _is_gpt_oss(case):
        return {"activation": "swiglu"}
    return {"activation": "quick_geglu", "clamp": _CLAMP, "linear_offset": 1.0, "interleaved": True, "transposed": True}


def _keywords(case: BenchCase) -> tuple[str, ...]:
    return _BIASES if _is_gpt_oss(case) else ()


# ---- the formula ----


def _by_expert(case: BenchCase, rounded: bool = False) -> Call:
    """Return the formula, in the type of its tensors. `rounded`: rows between two passes are, and sums are fp32."""
    options = _options(case)
    interleaved, transposed = (options.pop(name, False) for name in ("interleaved", "transposed"))

    def narrow(t: Tensor) -> Tensor:
        return t.to(case.dtype) if rounded else t

    def expert(
        rows: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None
    ) -> Tensor:
        wide = rows.dtype
        h = F.linear(narrow(rows), up).to(wide)
        if up_bias is not None:
            h = narrow(h + up_bias.to(wide)).to(wide)
        if interleaved:
            h = torch.cat([h[:, ::2], h[:, 1::2]], -1)
        y = F.linear(narrow(bias_activation_reference(h, **options) * weight), down).to(wide)
        return y if down_bias is None else narrow(y + narrow(weight) * down_bias.to(wide)).to(wide)

    def call(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, *biases: Tensor) -> Tensor:
        if transposed:
            up, down = up.mT, down.mT
        count, wide = up.shape[0], torch.promote_types(x.dtype, torch.float32)
        order = chosen.flatten().argsort(stable=True)
        token, sizes = order // chosen.shape[1], chosen.flatten().bincount(minlength=count).tolist()
        rows, of_rows = x.to(wide)[token].split(sizes), weights.to(wide).flatten()[order, None].split(sizes)
        of_experts = [t.unbind() for t in (up, down, *biases)] + [(None,) * count] * (2 - len(biases))
        y = torch.cat([expert(*each) for each in zip(rows, of_rows, *of_experts, strict=True)])
        return torch.zeros_like(x, dtype=wide).index_add(0, token, y).to(x.dtype)

    return call


# ---- peers ----


def _gate(case: BenchCase, h: Tensor) -> Tensor:
    """Return the activation as transformers' models write it."""
    if not _is_gpt_oss(case):
        gate, linear = h.chunk(2, -1)
        return F.silu(gate) * linear
    gate, linear = h[..., ::2].clamp(max=_CLAMP), h[..., 1::2].clamp(-_CLAMP, _CLAMP)
    return (linear + 1) * (gate * torch.sigmoid(gate * _ALPHA))


def _eager(case: BenchCase, run: Run) -> Call:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.t() if _is_gpt_oss(case) else weight, bias)

    def call(
        x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor,
        up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        y = torch.zeros_like(x)
        for e in range(up.shape[0]):
            token, place = torch.where(chosen == e)
            h = linear(x[token], up[e], None if up_bias is None else up_bias[e])
            out = linear(_gate(case, h), down[e], None if down_bias is None else down_bias[e])
            y.index_add_(0, token, (out * weights[token, place, None]).to(y.dtype))
        return y

    return run(call)


def _grouped_mm(case: BenchCase, run: Run) -> Call:
    forward = run(imported("transformers.integrations.moe", "grouped_mm_experts_forward"))

    def call(
        x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor,
        up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        module = SimpleNamespace(
            num_experts=up.shape[0], gate_up_proj=up, down_proj=down, gate_up_proj_bias=up_bias, down_proj_bias=down_bias,
            has_gate=True, has_bias=up_bias is not None, is_transposed=_is_gpt_oss(case), has_post_expert_norm=False,
            _is_expert_parallel=False, _apply_gate=partial(_gate, case),
        )  # fmt: skip
        y: Tensor = forward(module, x, chosen, weights)
        return y

    return call


def _liger(case: BenchCase) -> Call:
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")  # read when its kernels are imported
    function = imported("liger_kernel.ops.fused_moe", "LigerFusedMoEFunction").apply
    return lambda x, up, down, chosen, weights: function(x, up, down, chosen.int(), weights)


class _Products(NamedTuple):
    """Grouped products of rows a: with b [E, K, N], and with rows b of the same experts."""

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]  # the third is where each expert's rows end
    weights: Callable[[Tensor, Tensor, Tensor], Tensor]


def _by_pytorch() -> _Products:
    return _Products(lambda a, b, ends: F.grouped_mm(a, b, offs=ends), lambda a, b, ends: F.grouped_mm(a.mT, b, offs=ends))


def _by_quack() -> _Products:
    gemm = partial(imported("quack.gemm_interface", "gemm"), tuned=False)
    return _Products(
        lambda a, b, ends: gemm(a, b, cu_seqlens_m=F.pad(ends, (1, 0))),
        lambda a, b, ends: gemm(a.mT, b, cu_seqlens_k=F.pad(ends, (1, 0))),
    )


class _GroupedProducts(torch.autograd.Function):
    """The six products of a call, of rows that stand in for those of the experts."""

    @staticmethod
    def forward(
        ctx: Any, products: _Products, rows: Any, transposed: bool, x: Tensor, up: Tensor, down: Tensor, *others: Tensor
    ) -> Tensor:
        """`rows`: of x or dy, of the activation, of its input, and where each expert's end. `others` get gradients too."""
        ctx.save_for_backward(up, down, *others)
        ctx.products, ctx.rows, ctx.transposed, ctx.gathers = products, rows, transposed, hasattr(up, "main_grad")
        of_x, of_a, _, ends = rows
        products.rows(of_x, up if transposed else up.mT, ends)
        products.rows(of_a, down if transposed else down.mT, ends)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        products, (up, down, *others), (of_x, of_a, of_h, ends) = ctx.products, ctx.saved_tensors, ctx.rows
        products.rows(of_x, down.mT if ctx.transposed else down, ends)
        products.rows(of_h, up.mT if ctx.transposed else up, ends)
        pairs = ((of_h, of_x), (of_x, of_a))
        dup, ddown = (products.weights(*((b, a) if ctx.transposed else (a, b)), ends) for a, b in pairs)
        # with a main_grad the floor has the products, without the addition
        of_weights = (None, None) if ctx.gathers else (dup, ddown)
        return None, None, None, torch.empty_like(dy), *of_weights, *(torch.empty_like(t) for t in others)


def _products(case: BenchCase, by: Callable[[], _Products] = _by_pytorch) -> Call:
    def stand_ins(x: Tensor, up: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        _, hidden, count, inner, _ = case.shape
        ends = chosen.flatten().bincount(minlength=count).cumsum(0).int()
        widths = (hidden, inner, 2 * inner)
        return *(torch.randn(chosen.numel(), n, device=x.device, dtype=x.dtype) for n in widths), ends

    made, products = once(stand_ins), by()

    def call(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, *biases: Tensor) -> Tensor:
        rows = made(x, up, chosen)
        y: Tensor = _GroupedProducts.apply(products, rows, _is_gpt_oss(case), x, up, down, weights, *biases)  # type: ignore[no-untyped-call]
        return y

    return call


def _peers(case: BenchCase) -> list[Contender]:
    recomputed = bind(experts, _options(case) | {"recompute": True}, _keywords(case))
    no_groups = since_torch("2.10", F, "grouped_mm") if case.dtype == torch.bfloat16 else "PyTorch's takes bf16 alone"
    unlike = "has no biases, and its gates and linear parts don't alternate" if _is_gpt_oss(case) else needs_gpu()
    return [
        Contender("onepass recompute", lambda case: recomputed, ours=True),
        Contender("products", _products, floor=True, lacks=no_groups),
        Contender(
            "products by QuACK",
            partial(_products, by=_by_quack),
            package="QuACK",
            floor=True,
            lacks=needs_gpu() if case.dtype == torch.bfloat16 else "called for bf16 only",
        ),
        Contender("eager", as_written(_eager)),
        Contender("grouped_mm", as_written(_grouped_mm), package="transformers"),
        Contender("torch.compile", lambda case: _grouped_mm(case, compiled), package="transformers", compiles=True),
        Contender("Liger", _liger, package="Liger", lacks=unlike),
    ]


BENCH = OpBench(
    "experts", _SHAPES, _TINY, _bytes_moved, _inputs, _peers,
    options=_options, keywords=_keywords, formula=_by_expert, baseline=partial(_by_expert, rounded=True), reference="products",
    without={"Transformer Engine": "its grouped layer takes each expert's number of rows from the host",
             "Megatron-core": "its experts are Transformer Engine's grouped layers"},
)  # fmt: skip
