"""The error budget: how far a result may be from the formula in fp64, and how the error is measured.

    report = judge(my_op, my_formula, {"x": x, "weight": weight}, dy)
    assert report, report                        # prints each output that is too far: its name, measure and error

Three computations have the same inputs. The formula in fp64 is exact. The formula in fp32, with results rounded once to the
dtypes of ours, is the baseline. Ours may have 1.25 x the baseline's relative RMS error + 1e-6, over the whole tensor and on its
worst row. Its largest single error may be 2 x the baseline's. Outputs of a few elements have too little spread to compare. They
are pooled over the seeds that are judged together. Their slack is 2e-4 with 16-bit inputs, and 1e-6 with fp32 inputs.
Rows with few elements that are not 0, as causal rows have, are pooled as one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

RMS, LARGEST = 1.25, 2.0  # times the baseline's
SLACK = 1e-6
SMALL = 32  # outputs (and rows) of fewer elements have too little spread
SMALL_SLACK = {torch.float32: 1e-6, torch.float64: 1e-6, torch.float16: 2e-4, torch.bfloat16: 2e-4}

Function = Callable[..., Tensor | tuple[Tensor, ...]]
Inputs = Mapping[str, Tensor | None]
Gradients = Tensor | Sequence[Tensor | None] | None


@dataclass(frozen=True)
class Finding:
    """One output by one measure."""

    output: str
    measure: str
    ours: float
    baseline: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.ours <= self.allowed  # False for NaN

    def __str__(self) -> str:
        says = "ok     " if self.ok else "TOO FAR"
        return (
            f"{says} {self.output:16} {self.measure:18} ours {self.ours:.3g}, "
            f"baseline {self.baseline:.3g}, allowed {self.allowed:.3g}"
        )


@dataclass
class BudgetReport:
    """The findings of all outputs. It is true if all of them are within the budget."""

    findings: list[Finding] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.findings) and all(finding.ok for finding in self.findings)

    def __str__(self) -> str:
        worst_first = sorted(self.findings, key=lambda finding: finding.ok)
        return "\n".join(["error against fp64:", *(f"  {finding}" for finding in worst_first)])

    __repr__ = __str__  # what pytest shows of `assert report`


# ---- the three computations ----


def run(function: Function, inputs: Inputs, dy: Gradients = None, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the outputs ("y", or "y0", "y1", ...) and, with `dy`, the gradient ("d" + name) of each floating-point input.

    With `dtype`, inputs and incoming gradients are converted to it first. Otherwise inputs keep their strides. `dy` is one
    tensor, or one for each output, with None for outputs that get no gradient.
    """
    tensors = {name: _fresh(tensor, dtype, dy is not None) for name, tensor in inputs.items()}
    returned = function(*tensors.values())
    outputs = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    results = {"y" if len(outputs) == 1 else f"y{i}": output.detach() for i, output in enumerate(outputs)}
    if dy is None:
        return results
    pairs = zip(outputs, (dy,) if isinstance(dy, Tensor) else dy, strict=True)
    given = [(output, grad if dtype is None else grad.to(dtype)) for output, grad in pairs if grad is not None]
    asked = {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad}
    grads = torch.autograd.grad([output for output, _ in given], list(asked.values()), [grad for _, grad in given])
    return results | {f"d{name}": grad for name, grad in zip(asked, grads, strict=True)}


def _fresh(tensor: Tensor | None, dtype: torch.dtype | None, grad: bool) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    converted = tensor.detach() if dtype is None else tensor.detach().to(dtype)
    return converted.requires_grad_(grad)


def judge(ours: Function, formula: Function, inputs: Inputs, dy: Gradients = None) -> BudgetReport:
    """Run `ours` on the inputs, and the dtype-generic `formula` on them in fp64 and in fp32. Compare the results."""
    return judge_seeds(ours, formula, [(inputs, dy)])


def judge_seeds(ours: Function, formula: Function, cases: Iterable[tuple[Inputs, Gradients]]) -> BudgetReport:
    """Like `judge`, over several draws of the inputs. Outputs of few elements need more than one draw."""
    trials = []
    dtype = torch.float32
    for inputs, dy in cases:
        wide = (run(formula, inputs, dy, t) for t in (torch.float32, torch.float64))
        trials.append((run(ours, inputs, dy), *wide))
        types = [t.dtype for t in inputs.values() if t is not None and t.is_floating_point()]
        dtype = next((t for t in types if t.itemsize == 2), dtype)
    return compare(trials, dtype)


# ---- comparing ----


def compare(trials: Sequence[tuple[Mapping[str, Tensor], ...]], dtype: torch.dtype = torch.float32) -> BudgetReport:
    """Compare (ours, baseline, exact) results by name. `dtype` is the storage type, which sets the slack of small outputs.

    The baseline is rounded here to the dtypes of ours.
    """
    report = BudgetReport()
    for name in trials[0][2]:
        triples = [(ours[name], baseline[name].to(ours[name].dtype), exact[name].double()) for ours, baseline, exact in trials]
        for ours, baseline, exact in triples:
            if ours.shape != exact.shape:
                report.findings.append(Finding(name, f"shape {tuple(ours.shape)}", float("nan"), 0.0, 0.0))
                return report
            report.findings += _infinite(name, ours, baseline)
        if all(exact.numel() for *_, exact in triples):
            report.findings += _finite(name, [_without_infinite(*triple) for triple in triples], dtype)
    return report


def _infinite(name: str, ours: Tensor, baseline: Tensor) -> list[Finding]:
    """Check that ours equals the baseline where that is infinite or NaN."""
    infinite = ~baseline.isfinite()
    if not infinite.any():
        return []
    a, b = ours[infinite].double(), baseline[infinite].double()
    other = int(((a != b) & ~(a.isnan() & b.isnan())).sum())
    return [Finding(name, "NaN and infinities", other, 0, 0)]


def _without_infinite(*triple: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    finite = triple[1].isfinite()
    ours, baseline, exact = (torch.where(finite, t.double(), 0.0) for t in triple)
    return ours, baseline, exact


def _finite(name: str, triples: list[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype) -> list[Finding]:
    size = sum(exact.numel() for *_, exact in triples) // len(triples)
    slack = SLACK if size >= SMALL else SMALL_SLACK[dtype]
    ours, baseline = (_relative([(triple[i], triple[2]) for triple in triples]) for i in (0, 1))
    pooled = f"RMS of {len(triples)} draws" if len(triples) > 1 else "relative RMS"
    findings = [Finding(name, pooled, ours, baseline, RMS * baseline + slack)]
    largest = _most(exact.abs().max() for *_, exact in triples)
    worst, worst_baseline = (_most((triple[i] - triple[2]).abs().max() for triple in triples) for i in (0, 1))
    findings.append(Finding(name, "largest error", worst, worst_baseline, LARGEST * worst_baseline + slack * largest))
    if all(exact.dim() > 1 and exact.shape[-1] >= SMALL for *_, exact in triples):
        row, row_baseline = (_most(_by_row(triple[i], triple[2]) for triple in triples) for i in (0, 1))
        findings.append(Finding(name, "worst row", row, row_baseline, RMS * row_baseline + SLACK))
    return findings


def _most(values: Iterable[Tensor]) -> float:
    """Return the largest value, or NaN if any is NaN. Python's max would depend on the order."""
    return torch.stack(list(values)).max().item()


def _relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    error = sum((got - exact).square().sum().item() for got, exact in pairs)
    size = sum(exact.square().sum().item() for _, exact in pairs)
    return float((error / size) ** 0.5) if size else float(error != 0)


def _by_row(got: Tensor, exact: Tensor) -> Tensor:
    """Return the largest relative error of a row. Rows of few numbers that are not 0, as causal ones, are pooled as one row."""
    error, size = (t.square().sum(-1).flatten() for t in (got - exact, exact))
    few = (exact.count_nonzero(-1).flatten() < SMALL) & (size > 0)
    error, size = (torch.cat([each[~few], each[few].sum()[None]]) for each in (error, size))
    return torch.where(size > 0, (error / size.clamp_min(1e-300)).sqrt(), (error != 0).double()).max()
