"""dropout_add against its peers: a bias, dropout with p of 0.1, and the residual, as a transformer layer ends.

Bytes     forward reads x and the residual and writes y; backward reads dy and writes dx. The residual's gradient is dy itself.
          Bias and its gradient are one row each. A contender's mask, or the random state in its place, is not counted.
Peers     eager and torch.compile: one line with F.dropout.
          Megatron-core: its `bias_dropout_add`, compiled as Megatron-core does. It saves no mask either, and sums the bias
          gradient from a rounded tensor, as eager does.
Errors    each contender drops other elements. The first call finds out which: it applies the same random state to a tensor of
          ones and gives the formula the mask. It also checks how many elements are dropped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.model import BenchCase, Call, Contender, Inputs, OpBench, Result
from onepass.bench.peers import compiled, imported
from onepass.kernels.philox import scale_of, threshold_of
from onepass.ops.dropout.dropout_add import dropout_add
from onepass.runtime.backend import explain

OP = "dropout_add"
P = 0.1
_VARIANTS = ("bias", "plain")
# the mask of kept elements and their factor, of the contender that made its first call last
_found: list[tuple[Tensor, float]] = []


def _case(variant: str, rows: int, width: int, dtype: torch.dtype) -> BenchCase:
    one = rows * width * dtype.itemsize
    return BenchCase(OP, variant, (rows, width), dtype, 3 * one, 2 * one)


def _cases(device: torch.device, dtype: torch.dtype, quick: bool) -> list[BenchCase]:
    if device.type == "cuda" and not quick:
        shapes = [(16384, 8192), (16384, 4096), (2048, 4096), (600_000, 64), (777, 5000)]
    elif device.type == "cuda":
        shapes = [(16384, 4096), (777, 5000)]
    else:
        shapes = [(512, 2048)] if quick else [(2048, 4096), (777, 5000)]
    return [_case(variant, *shape, dtype) for variant in _VARIANTS for shape in shapes]


def _tiny(case: BenchCase) -> BenchCase:
    return _case(case.variant, 64, 1024, case.dtype)


def _inputs(case: BenchCase, device: torch.device, generator: torch.Generator) -> Inputs:
    """Return the inputs. `rows` has the row indices, by which the formula on a chunk finds its mask; contenders ignore it."""
    rows, width = case.shape

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=case.dtype)

    tensors = {"rows": torch.arange(rows, device=device)}
    tensors |= {"x": random(rows, width).requires_grad_(), "residual": random(rows, width).requires_grad_()}
    if case.variant == "bias":
        tensors["bias"] = random(width).requires_grad_()
    return Inputs(tensors, frozenset({"rows", "x", "residual"}), {"y": random(rows, width)})


def _formula(case: BenchCase) -> Call:
    def formula(rows: Tensor, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Result:
        z = x if bias is None else x + bias
        mask, scale = _found[0]
        return residual + torch.where(mask[rows], z * scale, 0.0)

    return formula


# ---- which elements a contender keeps ----


def _watched(function: Call, scale: float = 1 / (1 - P)) -> Call:
    known: list[bool] = []

    def call(rows: Tensor, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Result:
        if not known:
            known.append(True)
            _found[:] = [(_mask_of(function, x, residual, bias), scale)]
        return function(x, residual, bias)

    return call


def _mask_of(function: Call, x: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    """Return the mask of the elements that the next call will keep. Leave the random state as the next call needs it."""
    ones, zeros = torch.ones_like(x, requires_grad=True), torch.zeros_like(residual, requires_grad=True)
    nothing = None if bias is None else torch.zeros_like(bias, requires_grad=True)
    function(ones, zeros, nothing)  # compilation may draw random numbers
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices):
        y = function(ones, zeros, nothing)
    assert isinstance(y, Tensor)
    mask = y.detach() != 0
    off = abs(mask.double().mean().item() - (1 - P)) / (P * (1 - P) / mask.numel()) ** 0.5
    if off > 6:
        raise RuntimeError(f"{mask.double().mean().item():.5f} of the elements are kept, where {1 - P} should be")
    return mask


# ---- onepass and eager code ----


def _ours(case: BenchCase) -> Call:
    def ours(x: Tensor, residual: Tensor, bias: Tensor | None) -> Result:
        return dropout_add(x, residual, P, bias=bias)

    return _watched(ours, scale_of(threshold_of("p", P)))  # 0.1 is rounded to a multiple of 2**-16


def _plain(x: Tensor, residual: Tensor, bias: Tensor | None) -> Result:
    return residual + F.dropout(x if bias is None else x + bias, P)


def _eager(case: BenchCase) -> Call:
    return _watched(_plain)


def _compiled(case: BenchCase) -> Call:
    return _watched(compiled(_plain))


# ---- the peers' own functions ----


def _megatron(case: BenchCase) -> Call:
    function = imported("megatron.core.fusions.fused_bias_dropout", "bias_dropout_add_fused_train")

    def megatron(x: Tensor, residual: Tensor, bias: Tensor | None) -> Result:
        y: Tensor = function((x, bias), residual, P)
        return y

    return _watched(megatron)


def _contenders(case: BenchCase) -> list[Contender]:
    return [
        Contender("onepass", _ours, ours=True),
        Contender("eager", _eager),
        Contender("torch.compile", _compiled, compiles=True),
        Contender("Megatron-core", _megatron, package="Megatron-core", compiles=True),
    ]


def _backend(case: BenchCase, inputs: Inputs) -> str:
    given = dict(inputs.tensors)
    return explain(OP, given["x"], given["residual"], P, bias=given.get("bias")).backend


_NONE = "has no dropout with a residual"
BENCH = OpBench(
    OP, _cases, _inputs, _contenders, _formula, _tiny, _backend,
    without=dict.fromkeys(("Liger", "QuACK", "Apex", "Transformer Engine"), _NONE),
)  # fmt: skip
