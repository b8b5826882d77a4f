"""The oracle of linear_divergence (see `oracle`). A case names the plan that the module must use.

The baseline is eager code: it rounds both heads' logits and the student's gradient once to the operands' types, and computes all
else in fp32. If the plan makes gradients in forward, that gradient is rounded before the incoming one is multiplied in.
"""

import contextlib
from dataclasses import dataclass
from unittest import mock

import torch
from ops.linear_cross_entropy_oracle import LORA_SCALE, UPSTREAM, Rounded
from ops.oracle import DEVICE, FP32, FP64, NamedCase, normals
from torch.nn import functional as F

from onepass.ops.loss.formula import reduce_losses
from onepass.ops.loss.linear_divergence.formula import DivergenceTerms, row_divergences
from onepass.testing.budget import Finding, compare
from onepass.testing.poison import poisoned, unchanged

MODES = ("grad_in_forward", "keep_logits", "keep_teacher", "recompute")


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. `lead` is the shape of labels, of which every third is ignored; `rows` are a chunk's, the last is smaller.

    `main` is the main_grads' dtype; with it, two calls accumulate. `block`: columns of a piece of the kernels.
    """

    mode: str = "grad_in_forward"
    kind: str = "forward_kl"
    reduction: str = "mean"
    dtype: torch.dtype = FP32
    lead: tuple[int, ...] = (7, 6)
    D: int = 40
    E: int = 24
    V: int = 150
    rows: int = 16
    beta: float = 0.3
    temperature: float = 1.0
    softcap: float | None = None
    teacher_softcap: float | None = None
    bias: bool = False
    wide: bool = False
    labels: bool = True
    near: bool = False  # the student's logits are nearly the teacher's
    size: float = 2.0  # of logits
    main: torch.dtype | None = None
    frozen: str = ""
    ignore_index: int = -100
    teacher_dtype: torch.dtype | None = None
    block: int | None = None
    lora: int = 0  # the student's rank

    @property
    def options(self):
        names = ("kind", "beta", "temperature", "softcap", "teacher_softcap", "reduction", "ignore_index")
        return {name: getattr(self, name) for name in names}


STUDENT = ("student", "student_weight", "student_bias", "lora_a", "lora_b")
NAMES = (*STUDENT, "teacher", "teacher_weight", "teacher_bias")


def draw(case, seed=0):
    """Return the tensors by name, labels, and the incoming gradient. They are drawn on the CPU: every machine gets the same."""
    generator = torch.Generator().manual_seed(seed)
    drawn = normals(generator)
    given = {}
    for head, width in (("student", case.D), ("teacher", case.E)):
        given[head], given[f"{head}_weight"] = drawn(*case.lead, width), case.size * drawn(case.V, width) / width**0.5
        given[f"{head}_bias"] = drawn(case.V) if case.bias else None
    lora = (drawn(case.lora, case.D) / case.D**0.5, drawn(case.V, case.lora) / case.lora**0.5) if case.lora else (None, None)
    given["lora_a"], given["lora_b"] = lora
    if case.near:
        assert case.D >= case.E
        for name in ("", "_weight"):
            given[f"student{name}"] = F.pad(given[f"teacher{name}"], (0, case.D - case.E))
        given["student_weight"] *= 1 + 0.01 * drawn(case.V, 1)
    teacher_dtype = case.teacher_dtype or case.dtype
    given = {
        name: None if given[name] is None else given[name].to(DEVICE, case.dtype if name in STUDENT else teacher_dtype)
        for name in NAMES
    }
    labels = torch.randint(case.V, case.lead, generator=generator)
    labels.view(-1)[2::3] = case.ignore_index
    dy = drawn(*case.lead) + 2 if case.reduction == "none" else torch.full((), UPSTREAM)
    return given, labels.to(DEVICE) if case.labels else None, dy.to(DEVICE)


# ---- the three computations ----


def _factor(case, labels):
    if case.mode != "grad_in_forward":
        return 1.0
    return UPSTREAM if case.reduction == "sum" else UPSTREAM / max(1, int((labels != case.ignore_index).sum()))


def _theirs(case, given, labels, dy, dtype):
    leaves = {
        name: None if t is None else t.detach().to(dtype).requires_grad_(name in STUDENT and name not in case.frozen.split())
        for name, t in given.items()
    }
    labels = torch.full(case.lead, case.ignore_index + 1, device=DEVICE) if labels is None else labels
    terms = DivergenceTerms(
        case.ignore_index, case.kind, case.beta, case.temperature, case.softcap or 0.0, case.teacher_softcap or 0.0
    )
    logits = [F.linear(*(leaves[f"{head}{name}"] for name in ("", "_weight", "_bias"))) for head in ("student", "teacher")]
    factor = _factor(case, labels)
    if case.lora:
        low = LORA_SCALE * F.linear(leaves["student"], leaves["lora_a"])
        low = Rounded.apply(low, case.dtype, False, factor) if dtype is FP32 else low
        logits[0] = logits[0] + F.linear(low, leaves["lora_b"])
    if dtype is FP32:
        logits[0] = Rounded.apply(logits[0], case.dtype, case.wide, factor)
        logits[1] = logits[1] if case.wide else logits[1].to(case.teacher_dtype or case.dtype).float()
    loss = reduce_losses(row_divergences(*logits, labels, terms), labels, case.ignore_index, None, case.reduction)
    if loss.requires_grad:
        loss.backward(dy.to(loss.dtype))
    return _results(case, loss, {name: None if t is None else t.grad for name, t in leaves.items()})


def _results(case, loss, grads):
    found = {"loss": loss.detach()}
    return found | {f"d{name}": grads[name] for name in STUDENT if grads[name] is not None and name not in case.frozen.split()}


@contextlib.contextmanager
def forced(module, case):
    """In the block the module's calls, and their backward, follow the case's plan, and its kernels have its pieces."""
    kernels = module.row_loss.kernels

    def plan(inputs, budget):
        asks = inputs.needs_hidden or inputs.needs_weight
        rows = min(case.rows, max(1, inputs.N)) if case.mode != "keep_logits" else max(1, inputs.N)
        mode = case.mode if asks else "loss_only"
        mode = "recompute" if inputs.in_graph and mode.startswith("keep") else mode
        return module.plan.DivergencePlan(mode, rows, inputs.V, -(-inputs.N // rows), 0, False)

    tiles = kernels.tiles_of_rows if case.block is None else lambda *_: kernels.PieceTiles(case.block, 1, 0)
    with mock.patch.object(module.row_loss, "make_plan", plan), mock.patch.object(kernels, "tiles_of_rows", tiles):
        kernels._plan.cache_clear()
        yield
    kernels._plan.cache_clear()


def call(module, case, backend, given, labels):
    """Return the divergence of the op."""
    heads = [given[name] for name in ("student", "student_weight", "teacher", "teacher_weight")]
    biases = {name: given[name] for name in ("student_bias", "teacher_bias")}
    wide = FP32 if case.wide else None
    lora = module.LoRA(given["lora_a"], given["lora_b"], LORA_SCALE) if case.lora else None
    return module.linear_divergence(
        *heads, labels, student_lora=lora, logits_dtype=wide, backend=backend, **biases, **case.options
    )  # fmt: skip


def _ours(module, case, given, labels, dy, backend):
    leaves = {
        name: None if t is None else t.detach().requires_grad_(name in STUDENT and name not in case.frozen.split())
        for name, t in given.items()
    }
    moved = [name for name in STUDENT[1:] if case.main and leaves[name] is not None and name not in case.frozen.split()]
    for name in moved:
        leaves[name].main_grad = torch.zeros_like(leaves[name], dtype=case.main)
    watch = {name: t for name, t in (*leaves.items(), ("labels", labels), ("dy", dy)) if t is not None}
    with forced(module, case), unchanged(**watch), poisoned():
        for _ in range(2 if moved else 1):
            leaves["student"].grad = None
            loss = call(module, case, backend, leaves, labels)
            if loss.requires_grad:
                loss.backward(dy.to(loss.dtype))
    grads = {name: None if t is None else t.main_grad / 2 if name in moved else t.grad for name, t in leaves.items()}
    return _results(case, loss, grads)


def judge_case(module, case, seeds=1, backend="triton"):
    """Judge `module.linear_divergence` on several draws of a case. Inputs that it must not write are checked too."""
    trials, found = [], []
    for seed in range(seeds):
        given, labels, dy = draw(case, seed)
        ours = _ours(module, case, given, labels, dy, backend)
        trials.append((ours, *(_theirs(case, given, labels, dy, dtype) for dtype in (FP32, FP64))))
        if labels is not None:
            ignored = labels == case.ignore_index
            rest = int(ours["loss"][ignored].count_nonzero()) if case.reduction == "none" else 0
            rest += int(ours["dstudent"][ignored].count_nonzero()) if "dstudent" in ours else 0
            found.append(Finding("ignored rows", "not 0", rest, 0, 0))
    types = {"loss": FP32, "dstudent": case.dtype}
    found += [Finding(name, "type", float(ours[name].dtype != kind), 0, 0) for name, kind in types.items() if name in ours]
    report = compare(trials, case.dtype)
    report.findings += found
    return report
