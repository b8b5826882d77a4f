"""Mutants of products in eight bits over ranks: the results of each differ from those of the real functions on some rank."""

import importlib
import os
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch.distributed as dist
from parallel.fp8_layers import CASES, RECIPES, flushed, running, shard, trained
from parallel.meeting import gather

from onepass.kernels.language import triton
from onepass.product.fp8 import product as fp8_product
from onepass.product.fp8 import scales as fp8_scales
from onepass.product.fp8 import weight as fp8_weight
from onepass.testing.mutants import mutate

pytestmark = pytest.mark.skipif(triton is None, reason="triton is not installed")
rank_context = partial(running, "formulas")
LINEAR = importlib.import_module("onepass.ops.linear.linear")  # the package has a function of this name
MUTANTS = {
    "nothing is shared": (fp8_weight, "FP8Weight.share", "if layout.gathers_x or layout.gathers_dy", "if layout is None"),
    "a first scale of one rank": (fp8_scales, "FP8Scales.measure", "role in self._groups", "role is None"),
    "later scales of one rank": (fp8_scales, "FP8Scales.refresh", "self._groups.items()", "()"),
    "own rows of dx elsewhere": (
        fp8_product, "FP8Call._gathered_output_gradient", "out=drows[M * rank : M * (rank + 1)]", "out=drows[:M].clone()",
    ),
    "scales of the first rows": (fp8_weight, "FP8Operand.part", "self.inverse[first:last]", "self.inverse[: last - first]"),
    "16-bit rows at another scale": (fp8_product, "_cast_as", "1 / own.inverse", "2 / own.inverse"),
    "scales of the step to come": (fp8_product, "_DeferredFP8Product.__init__", "dy.inverse.clone()", "dy.inverse"),
    "x's scale of the step to come": (fp8_product, "_DeferredFP8Product.__init__", "x.inverse.clone()", "x.inverse"),
    "y is not summed": (
        fp8_product, "FP8Product.forward", "start_sum(y, layout).wait()", "start_sum(y.clone(), layout).wait() * 0 + y",
    ),
    "x is this rank's": (fp8_product, "FP8Call.start_input", "coming.wait().transposed()", "own.transposed()"),
}  # fmt: skip


def judged(group, module):
    """Return the results of a module's `linear`."""
    recipe_class = type(module.product_for.__globals__["recipe_of"]("fp8"))
    found = {}
    for name in ("column, sequence", "row, sequence", "row"):
        for kind in ("delayed", "row", "16-bit wgrad"):
            own = recipe_class(**vars(RECIPES[kind]))
            call = partial(CASES[name][0], function=module.linear)
            x, parameters, dy = shard(name, group)
            call(x, parameters, tp_group=group, precision=own).backward(dy)
            found[name, kind] = [x.grad, parameters["weight"].grad]
            if kind == "delayed":
                found[name, kind] += trained(name, group, module.linear, own)["y"]
                found[name, kind].append(flushed(name, kind, group, module.linear, module.DeferredWgrad, own)["later"])
    return found


@cache
def real_results():
    return judged(dist.group.WORLD, LINEAR)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(group, name):
    with patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)  # the copy runs formulas
        broken = mutate(*MUTANTS[name], entry=LINEAR)
    real = real_results()
    try:
        theirs = judged(group, broken)
    except RuntimeError:  # of both ranks alike
        return
    same = all(a.equal(b) for key in real for a, b in zip(real[key], theirs[key], strict=True))
    assert not all(gather(group, same))
