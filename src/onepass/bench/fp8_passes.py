"""The passes that write codes of eight bits for products: casts, norms and swiglu, each beside a copy of as many bytes.

Passes    `cast` writes x at one scale, `by row` at each row's own, `turned` its transpose, `both` the two in one pass.
          `norm` is RMSNorm into codes; `norm turned` makes its transpose in backward, from x and the statistics of forward.
          `swiglu` writes codes of its result; `swiglu backward` reads x and dy and writes dx, dx turned and y turned.
          All but `by row` and `turned` note the largest magnitude and what saturates, as delayed scales need it.
Bytes     what a pass reads in the case's type, and a byte for each code that it writes. Rows have no backward: a pass is timed
          as a forward, also where it belongs to one.
Errors    of all codes, at their scales. The baseline is the formula in fp32 and PyTorch's cast.
Peers     eager and torch.compile: that formula and cast. They note nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, as_written, by_pytorch, of_each
from onepass.bench.model import BenchCase, Call, Inputs, Result
from onepass.bench.peers import once
from onepass.kernels.fp8 import new_notes
from onepass.kernels.fp8_cast import cast_rows, cast_tensor
from onepass.kernels.language import triton_unsupported
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.fp8 import activation_backward_codes, activation_codes
from onepass.ops.norm import fp8 as norm_fp8
from onepass.ops.norm.formula import NormOptions
from onepass.runtime.fp8 import E4M3, E5M2, FP8Target, finite_amax, largest, scale_for

_EPS = 1e-5
_NORM, _SWIGLU = NormOptions(False, _EPS, False), ActivationOptions("swiglu", None, None)
_SCALES = {"cast": 64.0, "norm": 8.0, "swiglu": 8.0}  # no normal number saturates
_TURNED = " turned"
_WRITES: dict[str, tuple[str, ...]] = {
    "cast": ("y",),
    "cast by row": ("y",),
    "cast turned": ("y turned",),
    "cast both": ("y", "y turned"),
    "norm": ("y",),
    "norm by row": ("y",),
    "norm turned": ("y turned",),
    "swiglu": ("y",),
    "swiglu by row": ("y",),
    "swiglu backward": ("dx", "dx turned", "y turned"),
}
_FEW = ("cast both", "norm", "norm turned", "swiglu by row", "swiglu backward")


def _kind(case: BenchCase) -> str:
    return case.variant.partition(" ")[0]


def _shapes_of(**shapes: list[Shape]) -> dict[str, list[Shape]]:
    """Return the shapes of y by variant: x of swiglu is twice as wide."""
    return {variant: shapes[variant.partition(" ")[0]] for variant in _WRITES}


_SHAPES = Shapes(  # those of models of 1B and 8B
    gpu=_shapes_of(
        cast=[(16384, 2048), (16384, 8192)], norm=[(16384, 2048), (8192, 4096)], swiglu=[(16384, 8192), (8192, 14336)]
    ),
    gpu_quick=of_each(_WRITES, [(8192, 4096)]),
    cpu=of_each(_WRITES, [(512, 1024)]),
    cpu_quick=of_each(_FEW, [(128, 256)]),
)


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    parts = 2 if variant.startswith("swiglu") else 1
    read = parts + ("backward" in variant)
    written = sum(parts if name.startswith("dx") else 1 for name in _WRITES[variant])
    return shape[0] * shape[1] * (read * size + written), 0


def _inputs(case: BenchCase, random: Random) -> Inputs:
    rows, width = case.shape
    kind = _kind(case)
    wide = 2 * width if kind == "swiglu" else width
    tensors = {"x": random(rows, wide), "scale": torch.tensor(_SCALES[kind], device=random.device)}
    tensors["amax"], tensors["saturated"], _ = new_notes(random.device)
    if kind == "norm":
        tensors["weight"] = random(width)
    elif case.variant == "swiglu backward":
        tensors["dy"] = random(rows, width)
    outputs = {
        name: torch.zeros(rows, wide if name.startswith("dx") else width, dtype=_type_of(name), device=random.device)
        for name in _WRITES[case.variant]
    }
    return Inputs(tensors, frozenset({"x", "dy"} & tensors.keys()), outputs)


def _type_of(output: str) -> torch.dtype:
    return E5M2 if output.startswith("dx") else E4M3


# ---- the formula, which PyTorch rounds ----


def _numbers(case: BenchCase, x: Tensor, more: Tensor | None) -> dict[str, Tensor]:
    """Return what a pass writes, before it is scaled, in x's type."""
    kind = _kind(case)
    if kind == "cast":
        return {"y": x}
    if kind == "norm":
        return {"y": F.rms_norm(x, x.shape[-1:], more, _EPS)}
    gate, linear = x.chunk(2, -1)
    if more is None:
        return {"y": F.silu(gate) * linear}
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    dx = torch.cat([more * linear * sigmoid * (1 + gate * (1 - sigmoid)), more * silu], -1)
    return {"y": silu * linear, "dx": dx}


def _scaled(case: BenchCase, numbers: Tensor, scale: Tensor) -> Tensor:
    if case.variant.endswith("by row"):
        return numbers * scale_for(finite_amax(numbers, -1), E4M3).to(numbers.dtype)
    return numbers * scale


def _formula(case: BenchCase) -> Call:
    def call(x: Tensor, scale: Tensor, amax: Tensor, saturated: Tensor, more: Tensor | None = None) -> Result:
        numbers = _numbers(case, x, more)
        return tuple(_scaled(case, numbers[name.removesuffix(_TURNED)], scale) for name in _WRITES[case.variant])

    return call


def _eager(case: BenchCase, run: Run) -> Call:
    def call(x: Tensor, scale: Tensor, amax: Tensor, saturated: Tensor, more: Tensor | None = None) -> Result:
        numbers = _numbers(case, x.float(), None if more is None else more.float())
        codes = {}
        for name, value in numbers.items():
            dtype = _type_of(name)
            codes[name] = _scaled(case, value, scale).clamp(-largest(dtype), largest(dtype)).to(dtype)
        return tuple(
            codes[name.removesuffix(_TURNED)].t().contiguous().t() if name.endswith(_TURNED) else codes[name]
            for name in _WRITES[case.variant]
        )

    return run(call)


# ---- onepass; what is turned is returned as a view of its rows ----


def _cast(what: str, x: Tensor, scale: Tensor, amax: Tensor, saturated: Tensor) -> Result:
    if what == "by row":
        return cast_rows(x)[0]
    noted = FP8Target(E4M3, scale) if what == "turned" else FP8Target(E4M3, scale, amax, saturated)
    plain, turned = cast_tensor(x, noted, codes=what != "turned", transposed=what in ("turned", "both"))
    return tuple(each for each in (plain, None if turned is None else _rows_of(turned, x)) if each is not None)


def _norm(
    what: str, statistics: Callable[[Tensor, Tensor], Tensor | None],
    x: Tensor, scale: Tensor, amax: Tensor, saturated: Tensor, weight: Tensor,
) -> Result:  # fmt: skip
    by_torch = triton_unsupported(x) is not None
    if what == "turned":
        turn = norm_fp8.norm_codes_transposed_formula if by_torch else norm_fp8.norm_codes_transposed
        return _rows_of(turn(x, statistics(x, weight), weight, None, _NORM, FP8Target(E4M3, scale)), x)
    target = FP8Target(E4M3) if what == "by row" else FP8Target(E4M3, scale, amax, saturated)
    write = norm_fp8.norm_codes_formula if by_torch else norm_fp8.norm_codes
    return write(x, None, weight, None, _NORM, target, True)[0]


def _kept_statistics() -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return a function that returns what forward keeps of x, computed once for each x."""

    def statistics(x: Tensor, weight: Tensor) -> Tensor | None:
        write = norm_fp8.norm_codes if triton_unsupported(x) is None else norm_fp8.norm_codes_formula
        return write(x, None, weight, None, _NORM, FP8Target(E4M3), True)[3]

    return once(statistics)


def _swiglu(what: str, x: Tensor, scale: Tensor, amax: Tensor, saturated: Tensor, dy: Tensor | None = None) -> Result:
    use_triton = triton_unsupported(x) is None
    noted = FP8Target(E4M3, scale, amax, saturated)
    if what != "backward":
        target = FP8Target(E4M3) if what == "by row" else noted
        return activation_codes(x, None, None, _SWIGLU, target, use_triton=use_triton)[0]
    found = activation_backward_codes(
        dy, x, None, None, _SWIGLU, noted._replace(dtype=E5M2), FP8Target(E4M3, scale), use_triton=use_triton
    )
    assert found.dx is not None and found.dx_transposed is not None and found.y_transposed is not None
    return found.dx, _rows_of(found.dx_transposed, x), _rows_of(found.y_transposed, x)


def _rows_of(turned: Tensor, x: Tensor) -> Tensor:
    return turned[:, : x.shape[0]].t()


def _ours(case: BenchCase) -> Call:
    kind, _, what = case.variant.partition(" ")
    if kind == "norm":
        return partial(_norm, what, _kept_statistics())
    return partial(_cast if kind == "cast" else _swiglu, what)


def _backend(case: BenchCase, inputs: Inputs) -> str:
    return "triton" if triton_unsupported(inputs.tensors["x"]) is None else "torch"


BENCH = OpBench(
    "fp8_passes", _SHAPES, (64, 128), _bytes_moved, _inputs, lambda case: by_pytorch(_eager),
    ours=_ours, formula=_formula, baseline=as_written(_eager), backend=_backend, in_fp8=True,
    without={"torchao": "its casts are torch.compile's", "Transformer Engine": "its casts are inside of its modules"},
)  # fmt: skip
