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

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch, of_each
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result
from onepass.bench.peers import imported
from onepass.kernels.philox import scale_of, threshold_of
from onepass.ops.dropout.dropout_add import dropout_add
from onepass.runtime.backend import explain

P = 0.1
_GPU = [(16384, 8192), (16384, 4096), (2048, 4096), (600_000, 64), (777, 5000)]
_OF_DEVICES = _GPU, [(2048, 4096), (777, 5000)], [(16384, 4096), (777, 5000)], [(512, 2048)]
_SHAPES = Shapes(*(of_each(("bias", "plain"), shapes) for shapes in _OF_DEVICES))
# the mask of kept elements and their factor, of the contender that made its first call last
_found: list[tuple[Tensor, float]] = []


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    once = shape[0] * shape[1] * size
    return 3 * once, 2 * once


def _inputs(case: BenchCase, random: Random) -> Inputs:
    """Return the inputs. `rows` has the row indices, by which the formula on a chunk finds its mask; contenders ignore it."""
    rows, width = case.shape
    tensors = {"rows": torch.arange(rows, device=random.device)}
    tensors |= {"x": random.input(rows, width), "residual": random.input(rows, width)}
    if case.variant == "bias":
        tensors["bias"] = random.parameter(width)
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
    scale = scale_of(threshold_of("p", P))  # 0.1 is rounded to a multiple of 2**-16
    return _watched(lambda x, residual, bias: dropout_add(x, residual, P, bias=bias), scale)


def _eager(case: BenchCase, run: Run) -> Call:
    return _watched(run(lambda x, residual, bias: residual + F.dropout(x if bias is None else x + bias, P)))


# ---- the peers' own functions ----


def _megatron(case: BenchCase) -> Call:
    function = imported("megatron.core.fusions.fused_bias_dropout", "bias_dropout_add_fused_train")
    return _watched(lambda x, residual, bias: function((x, bias), residual, P))


def _backend(case: BenchCase, inputs: Inputs) -> str:
    tensors = dict(inputs.tensors)
    return explain("dropout_add", tensors["x"], tensors["residual"], P, bias=tensors.get("bias")).backend


_NONE = "has no dropout with a residual"
BENCH = OpBench(
    "dropout_add", _SHAPES, (64, 1024), _bytes_moved, _inputs,
    lambda case: [*by_pytorch(_eager), Contender("Megatron-core", _megatron, package="Megatron-core", compiles=True)],
    ours=_ours, formula=_formula, backend=_backend,
    without=dict.fromkeys(("Liger", "QuACK", "Apex", "Transformer Engine"), _NONE),
)  # fmt: skip
