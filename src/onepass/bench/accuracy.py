"""Check every output and gradient against fp64, on new inputs, before anything is timed.

All rows are compared, in chunks that fit in memory. onepass must be as good as the formula in fp32 rounded once: 1.25 x its
relative RMS error + 1e-6. With matrix products, whose operands have the storage dtype, the baseline rounds those operands too. A
sum over all rows is one number without a spread to compare; a fixed relative error is allowed. A peer may round as eager code
does. Memory that the allocator reuses holds NaN before the call, so an element that was never written is not right by accident.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from onepass.bench.define import OpBench
from onepass.bench.model import BenchCase, Call, Columns, Inputs, differentiate, outputs_of

_WHOLE = 1 << 31  # elements that a baseline makes at a time, several of them
_CHUNK = {"cuda": 1 << 25, "cpu": 1 << 22}  # fp64 elements at a time; the formula needs a dozen such tensors
_ONE_NUMBER = {torch.float32: 1e-6, torch.bfloat16: 2e-4, torch.float16: 2e-4}  # allowed relative error, by operand dtype
_TWO_PRODUCTS_IN_FP8 = 0.16  # gradients through two products whose incoming gradients are e5m2: 16 dB; they have about 20


def judged(
    bench: OpBench, case: BenchCase, inputs: Inputs, got: dict[str, Tensor], ours: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the errors of a contender's outputs and gradients, and the allowed errors."""
    formula = bench.formula_of(case)
    errors_found, baseline = errors(formula, inputs, got, with_baseline=ours and bench.baseline is None)
    if not ours:
        return errors_found, dict.fromkeys(errors_found, allowed_to_peers(case))
    if bench.baseline is not None:
        baseline, _ = errors(formula, inputs, _baseline_outputs(bench.baseline(case), inputs), with_baseline=False)
    least = {name: _ONE_NUMBER[case.dtype] for name in inputs.summed}
    return errors_found, {name: max(1.25 * baseline[name] + 1e-6, least.get(name, 0.0)) for name in errors_found}


def allowed_to_peers(case: BenchCase) -> float:
    """Return the error that eager code makes by rounding each intermediate, with a margin. Above it a peer is wrong."""
    if case.fp8:
        return _TWO_PRODUCTS_IN_FP8
    return 1e-4 if case.dtype in (torch.float32, torch.float64) else 3e-2


@dataclass
class _Difference:
    """The relative RMS error of tensors that arrive in chunks."""

    squares: dict[str, Tensor] = field(default_factory=dict)
    exact_squares: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, got: Tensor, exact: Tensor) -> None:
        zero = exact.new_zeros(())
        self.squares[name] = self.squares.get(name, zero) + (got.double() - exact).square().sum()
        self.exact_squares[name] = self.exact_squares.get(name, zero) + exact.square().sum()

    def relative(self) -> dict[str, float]:
        return {name: (s / self.exact_squares[name].clamp_min(1e-60)).sqrt().item() for name, s in self.squares.items()}


def errors(
    formula: Call, inputs: Inputs, got: dict[str, Tensor], with_baseline: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the relative RMS errors of outputs and gradients by name, and the same of the formula in fp32 or an empty dict."""
    ours, baseline = _Difference(), _Difference()
    exact_sums: dict[str, Tensor] = {}
    baseline_sums: dict[str, Tensor] = {}
    for part in _parts(inputs, _CHUNK[next(iter(inputs.tensors.values())).device.type]):
        exact = _formula_on(formula, inputs, part, torch.float64)
        rounded = _formula_on(formula, inputs, part, torch.float32) if with_baseline else {}
        for name, value in exact.items():
            if _summed(name, inputs):
                exact_sums[name] = exact_sums.get(name, 0) + value
                if with_baseline:
                    baseline_sums[name] = baseline_sums.get(name, 0) + rounded[name].double()
                continue
            ours.add(name, got[name][part], value)
            if with_baseline:
                baseline.add(name, rounded[name].to(got[name].dtype), value)
    for name, total in exact_sums.items():
        ours.add(name, got[name], total)
        if with_baseline:
            baseline.add(name, baseline_sums[name].to(got[name].dtype), total)
    return ours.relative(), baseline.relative()


def _parts(inputs: Inputs, elements: int) -> list[slice]:
    """Rows of so many elements at a time."""
    by_row = [grad for name, grad in inputs.grads.items() if name not in inputs.summed]
    by_row += [inputs.tensors[name] for name in inputs.by_row]
    rows, widest = by_row[0].shape[0], max(inputs.row_elements, *(tensor[0].numel() for tensor in by_row))
    chunk = max(1, elements // widest)
    return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


def _baseline_outputs(call: Call, inputs: Inputs) -> dict[str, Tensor]:
    """All rows at once where they fit. Of parts, sums over rows are added in fp64 and rounded once more."""
    parts = _parts(inputs, _WHOLE)
    if len(parts) == 1:
        return outputs(call, inputs)
    by_part: dict[str, list[Tensor]] = {}
    joined: dict[str, Tensor] = {}
    for part in parts:
        tensors = {
            name: (t.detach()[part] if name in inputs.by_row else t.detach()).requires_grad_(t.requires_grad)
            for name, t in inputs.tensors.items()
        }
        grads = [grad if name in inputs.summed else grad[part] for name, grad in inputs.grads.items()]
        for name, value in _by_name(call, inputs, tensors, grads).items():
            by_part.setdefault(name, []).append(value)
    for name, values in by_part.items():
        whole = sum(value.double() for value in values) if _summed(name, inputs) else torch.cat(values)
        joined[name] = torch.as_tensor(whole).to(values[0].dtype)
    return joined


def _summed(name: str, inputs: Inputs) -> bool:
    return name in inputs.summed or (name not in inputs.grads and name.removeprefix("d") not in inputs.by_row)


def _formula_on(formula: Call, inputs: Inputs, part: slice, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the formula's outputs and gradients for some rows, computed in `dtype` from the contender's inputs."""
    tensors = {}
    for name, tensor in inputs.tensors.items():
        value = tensor.detach()[part] if name in inputs.by_row else tensor.detach()
        tensors[name] = value.to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else value
    grads = [(grad if name in inputs.summed else grad[part]).to(dtype) for name, grad in inputs.grads.items()]
    return _by_name(formula, inputs, tensors, grads)


def outputs(call: Call, inputs: Inputs) -> dict[str, Tensor]:
    """Return the contender's outputs and gradients, computed in memory that held NaN."""
    incoming = inputs.fresh_grads()
    poison(inputs)
    return _by_name(call, inputs, inputs.tensors, incoming)


def _by_name(call: Call, inputs: Inputs, tensors: dict[str, Tensor], incoming: list[Tensor]) -> dict[str, Tensor]:
    asked = [tensors[name] for name in inputs.asked]
    for tensor in asked:
        if hasattr(tensor, "main_grad"):
            tensor.main_grad.zero_()
    result = call(*tensors.values())
    grads = differentiate(result, asked, incoming, inputs.trained)
    results = outputs_of(torch.cat(result, -1) if isinstance(result, Columns) else result)
    outputs = {name: result.detach() for name, result in zip(inputs.grads, results, strict=True)}
    return outputs | {f"d{name}": grad for name, grad in zip(inputs.asked, grads, strict=True)}


def poison(inputs: Inputs) -> None:
    """Fill with NaN the blocks that PyTorch's allocator will reuse for results of these sizes."""
    like = [*inputs.grads.values(), *inputs.asked.values()]
    blocks = [torch.full_like(tensor.detach(), float("nan")) for tensor in like for _ in range(2)]
    del blocks


def too_far(errors_of: dict[str, float], allowed: dict[str, float]) -> list[str]:
    return [name for name, error in errors_of.items() if not error <= allowed[name]]  # `not <=`: NaN counts as too far
