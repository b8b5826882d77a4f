"""The oracle of cross_entropy (see `oracle`)."""

from dataclasses import dataclass

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, FP64, NamedCase, laid_out

from onepass.ops.loss import cross_entropy as real
from onepass.ops.loss.formula import DIFFERENTIABLE_STATISTICS, STATISTICS
from onepass.testing.budget import Finding, compare, run
from onepass.testing.poison import poisoned, unchanged


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. `lead` is the shape of labels. Rows 2, 5, 8 and so on are ignored."""

    lead: tuple[int, ...] = (5,)
    V: int = 72
    dtype: torch.dtype = FP32
    reduction: str = "mean"
    smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = -100
    labels: torch.dtype = torch.int64
    layout: str = "contiguous"
    over: bool = False
    spread: float = 3.0
    softcap: float | None = None
    weighted: bool = False  # classes
    mixed: bool = False  # labels are probabilities, which don't sum to 1
    stats: bool = False

    @property
    def options(self):
        weight = 2 * torch.rand(self.V, generator=torch.Generator().manual_seed(1))
        weight[::7] = 0.0
        return {
            "reduction": self.reduction,
            "label_smoothing": self.smoothing,
            "z_loss": self.z_loss,
            "ignore_index": self.ignore_index,
            "softcap": self.softcap,
            "weight": weight.to(DEVICE) if self.weighted else None,
            "return_stats": self.names,
        }

    @property
    def names(self):
        return tuple(n for n in STATISTICS if not self.mixed or n not in ("log_prob", "correct")) if self.stats else ()


def cases():
    """Return few, large cases: rows of one tile and of several, in all dtypes, with all options."""
    return [
        Case(),
        Case((2, 3), 4200, BF16, "none", 0.1, 1e-3, labels=torch.int32),
        Case((4,), 2500, FP16, "sum", z_loss=0.01, layout="sliced", ignore_index=7),
        Case((7,), 130, BF16, "mean", 0.2, layout="unaligned", over=True),
        Case((4,), 2111, FP32, "none", 0.3, over=True, layout="sliced"),
        Case((3, 2), 65, FP32, "mean", 1.0, 1e-4, layout="transposed", over=True),
        Case((), 33, FP32, "none"),
        Case((6,), 40, FP32, "sum", spread=200.0),
        Case((2, 2, 2), 64, BF16, layout="swapped"),
        Case((4,), 2111, BF16, "none", 0.1, 1e-2, softcap=5.0, stats=True),
        Case((7,), 130, FP32, "mean", 0.0, 1e-2, weighted=True, layout="sliced"),
        Case((7,), 2500, FP32, "mean", 0.2, 1e-2, weighted=True, softcap=5.0, stats=True),
        Case((2, 3), 2500, BF16, "mean", 0.1, 1e-2, weighted=True, mixed=True, over=True),
        Case((4,), 130, FP32, "none", mixed=True, stats=True, layout="strided"),
    ]


class _Made(torch.autograd.Function):
    """Logits that are the output of an op, not a leaf. They share the leaf's memory, which the test inspects."""

    @staticmethod
    def forward(ctx, leaf):
        return leaf.detach()

    @staticmethod
    def backward(ctx, dy):
        return dy


made = _Made.apply


def draw(case, seed=0):
    """Return logits, labels and the loss's gradient. They are drawn on the CPU, so every machine gets the same values."""
    generator = torch.Generator().manual_seed(seed)
    logits = (case.spread * torch.randn(*case.lead, case.V, generator=generator)).to(case.dtype)
    labels = torch.randint(case.V, case.lead, generator=generator)
    flat = labels.view(-1)
    flat[0] = case.V - 1
    flat[2::3] = case.ignore_index
    if case.mixed:
        labels = 1.5 * (2 * torch.randn(*case.lead, case.V, generator=generator)).softmax(-1)
    dy = torch.randn(case.lead if case.reduction == "none" else (), generator=generator) + 2
    return laid_out(logits.to(DEVICE), case.layout), labels.to(DEVICE, FP32 if case.mixed else case.labels), dy.to(DEVICE)


def results(function, case, logits, labels, dy, dtype=None):
    """Return the loss and its gradient, and the gradient's elements at the labels and elsewhere, each by itself."""

    def call(x):
        if not case.stats:
            return function(x, labels)
        loss, stats = function(x, labels)
        return loss, *(getattr(stats, name) for name in case.names)

    dys = [dy, *(labels.new_full(case.lead, 0.1, dtype=FP32) if n in DIFFERENTIABLE_STATISTICS else None for n in case.names)]
    found = run(call, {"logits": logits}, dys if case.stats else dy, dtype)
    found["y"] = found.get("y", found.get("y0"))
    if case.mixed:
        labels = labels.argmax(-1)
    at = torch.where((labels >= 0) & (labels < case.V), labels, 0).long().unsqueeze(-1)
    found["the right ones'"] = found["dlogits"].gather(-1, at)
    found["the others'"] = found["dlogits"].scatter(-1, at, 0.0)
    return found


def judge_case(module, case, seed=0, backend="triton"):
    """Judge `module.cross_entropy` on a case against the budget. Tensors and memory that it must not write are checked too."""
    logits, labels, dy = draw(case, seed)
    wide = [results(lambda x, y: real.cross_entropy_reference(x, y, **case.options), case, logits, labels, dy, dtype)
            for dtype in (FP32, FP64)]  # fmt: skip
    given = laid_out(logits.clone(), case.layout)
    where = []

    def ours(x, y):
        where.append(x.data_ptr())
        return module.cross_entropy(made(x) if case.over else x, y, inplace_backward=case.over, backend=backend, **case.options)

    watch = {"labels": labels, "dy": dy} if case.over else {"labels": labels, "dy": dy, "logits": given}
    with unchanged(**watch), poisoned():
        got = results(ours, case, given, labels, dy)
    report = compare([(got, *wide)], case.dtype)
    report.findings += _exact(case, got, labels, where[0], given)
    return report


def _exact(case, got, labels, where, logits):
    """Check that ignored rows are exactly 0, that the loss is fp32, and that the gradient is written only where it belongs."""
    ignored = labels == case.ignore_index if not case.mixed else torch.zeros(case.lead, dtype=torch.bool, device=DEVICE)
    rest = int(got["dlogits"][ignored].count_nonzero())
    if case.reduction == "none":
        rest += int(got["y"][ignored].count_nonzero())
    wrong_type = got["y"].dtype is not FP32 or got["dlogits"].dtype is not case.dtype
    rows_apart = case.layout in ("contiguous", "sliced", "unaligned")
    elsewhere = case.over and rows_apart and got["dlogits"].data_ptr() != where
    around = logits._base if case.layout in ("strided", "sliced") else logits
    overwritten = around.numel() - logits.numel() - int(around.isnan().sum())  # memory between rows holds NaN
    return [
        Finding("logits", "written beside", overwritten, 0, 0),
        Finding("ignored rows", "numbers that are not 0", rest, 0, 0),
        Finding("types", "another", int(wrong_type), 0, 0),
        Finding("dlogits", "not over the logits", int(elsewhere), 0, 0),
    ]
