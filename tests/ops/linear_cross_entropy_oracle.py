"""The oracle of linear_cross_entropy (see `oracle`). A case names the plan ("way") that the module must use.

The baseline is eager code: it rounds logits and their gradient once to the operands' dtype and computes all else in fp32. If
the plan makes gradients in forward, the logits' gradient is rounded before it is multiplied by the incoming one, as designed.
"""

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from ops.oracle import DEVICE, FP32, FP64, NamedCase, normals
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import onepass.ops.loss.linear_cross_entropy as real
from onepass.ops.loss.formula import DIFFERENTIABLE_STATISTICS, STATISTICS, LossTerms, reduce_losses, row_losses
from onepass.ops.loss.head.plan import HeadPlan
from onepass.ops.loss.targets import Targets, has_masses, row_weights, split_labels
from onepass.runtime.sizes import ceil_div
from onepass.testing.budget import Finding, compare
from onepass.testing.poison import poisoned, unchanged

ALL = 1 << 30
WAYS = {  # name -> the plan's way, and its tokens and columns at a time; the last chunks are smaller
    "keep_logits": ("keep_logits", ALL, ALL),
    "grad_in_forward": ("grad_in_forward", 16, ALL),
    "known_grad_scale": ("known_grad_scale", 16, ALL),
    "recompute": ("recompute", 16, ALL),
    "blocks": ("recompute", ALL, 64),
    "both": ("recompute", 16, 64),
}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def whole_sums():
    """Forbid reduced-precision reductions: cuBLAS may split a product of small matrices and add the parts in 16 bits."""
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False
    yield
    products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before


UPSTREAM = 1.75  # the loss's incoming gradient
LORA_SCALE = 0.7


_FIRST = 1 << 60  # the first of the chunk_bytes values that stand for a way
_forced = {}  # chunk_bytes -> way


def forced(module, way):
    """Return a chunk_bytes that makes a module's calls, and their backward, use this way whatever is cheapest."""
    if way is None:
        return None
    if not hasattr(module.row_loss.make_plan, "stock"):
        module.row_loss.make_plan = _planner(module.row_loss.make_plan)
    budgets = {each: budget for budget, each in _forced.items()}
    budget = budgets.get(way, _FIRST + len(_forced))
    _forced[budget] = way
    return budget


def _planner(stock):
    def plan_of(asked, machine):
        if asked.chunk_bytes not in _forced:
            return stock(asked, machine)
        way = _forced[asked.chunk_bytes]
        name, rows, columns = WAYS[way] if isinstance(way, str) else way
        name = "loss_only" if not (asked.needs_hidden or asked.needs_weight) else asked.mode or name
        N, V = min(rows, max(asked.N, 1)), min(columns, asked.V) if name in ("recompute", "loss_only") else asked.V
        N = max(asked.N, 1) if name == "keep_logits" else N
        return HeadPlan(name, N, V, max(1, ceil_div(asked.N, N)), max(1, ceil_div(asked.V, V)), 0.0, 0)

    plan_of.stock = stock
    return plan_of


def reductions_of(way):
    """Return the reductions that a way supports. Gradients made in forward can only be scaled by one number."""
    return ("mean", "sum") if way == "grad_in_forward" else ("mean", "sum", "none")


def op(way=None, module=real, **options):
    """Return the op forced to one way. known_grad_scale gets grad_scale 1 by default; a CPU runs the torch backend by default."""
    options.setdefault("backend", "torch" if DEVICE == "cpu" else None)
    if way == "known_grad_scale":
        options.setdefault("grad_scale", 1.0)

    if way is not None:
        options["chunk_bytes"] = forced(module, way)

    def call(hidden, weight, labels, bias=None, token_weight=None, **more):
        return module.linear_cross_entropy(hidden, weight, labels, bias=bias, token_weight=token_weight, **options | more)

    return call


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. `lead` is the shape of labels, of which every third is ignored.

    `main` is the main_grads' dtype; with it, two calls accumulate.
    """

    mode: str | tuple[str, int, int] = "keep_logits"
    reduction: str = "mean"
    dtype: torch.dtype = FP32
    lead: tuple[int, ...] = (7, 6)
    D: int = 40
    V: int = 150
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    temperature: float = 1.0
    bias: bool = False
    weighted: bool = False
    wide: bool = False
    full: bool = False
    masked: bool = False
    kept: bool = False  # compute the rows that are not ignored, as a call on a CPU does by itself; else all
    main: torch.dtype | None = None
    frozen: str = ""
    ignore_index: int = -100
    lora: int = 0  # the rank
    classes: bool = False  # have weights
    mixed: bool = False  # labels are probabilities, which don't sum to 1

    @property
    def names(self):
        """The statistics that `full` asks for."""
        names = STATISTICS if self.full else ()
        return tuple(name for name in names if not self.mixed or name not in ("log_prob", "correct"))

    def class_weight(self):
        weight = 2 * torch.rand(self.V, generator=torch.Generator().manual_seed(1))
        weight[::7] = 0.0
        return weight.to(DEVICE) if self.classes else None

    @property
    def options(self):
        return {
            "reduction": self.reduction,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "logit_scale": self.scale,
            "temperature": self.temperature,
            "return_stats": self.names or False,
        }

    @property
    def promised(self):
        return "known_grad_scale" in (self.mode, self.mode[0])


NAMES = ("hidden", "weight", "bias", "token_weight", "lora_a", "lora_b")


def draw(case, seed=0):
    """Return the tensors by name, labels and each output's incoming gradient.

    They are drawn on the CPU, so every machine gets the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = normals(generator)
    hidden, weight = drawn(*case.lead, case.D), 2 * drawn(case.V, case.D) / case.D**0.5
    bias = drawn(case.V) if case.bias else None
    token_weight = torch.rand(case.lead, generator=generator) + 0.25 if case.weighted else None
    labels = torch.randint(case.V, case.lead, generator=generator)
    flat = labels.view(-1)
    best = F.linear(hidden, weight, bias).argmax(-1).view(-1)
    flat[::2] = best[::2]  # so that some predictions are correct
    flat[:1] = case.V - 1
    flat[2::3] = case.ignore_index
    if case.mixed:
        labels = 1.5 * (2 * drawn(*case.lead, case.V)).softmax(-1)
    plain = case.reduction != "none" or case.promised
    dys = [torch.full(case.lead if case.reduction == "none" else (), UPSTREAM) if plain else drawn(*case.lead) + 2]
    dys += [drawn(*case.lead) for name in case.names if name in DIFFERENTIABLE_STATISTICS]
    lora_a = drawn(case.lora, case.D) / case.D**0.5 if case.lora else None
    lora_b = drawn(case.V, case.lora) / case.lora**0.5 if case.lora else None
    given = dict(zip(NAMES, (hidden, weight, bias, token_weight, lora_a, lora_b), strict=True))
    types = {name: FP32 if name == "token_weight" else case.dtype for name in NAMES}
    given = {name: None if t is None else t.to(DEVICE, types[name]) for name, t in given.items()}
    return given, labels.to(DEVICE), [dy.to(DEVICE) for dy in dys]


# ---- memory and flops of a call ----


class Taken(NamedTuple):
    """The memory that a function allocated on a CPU, and the flops of its matrix products."""

    most: int  # peak bytes, beyond those allocated before
    left: int  # bytes still allocated at the end
    flops: int  # of matrix products

    def products(self, inputs):
        """Return how many products of the size of hidden @ weight.T were computed."""
        return self.flops / (2 * inputs[0].numel() * inputs[1].shape[0])


def taken(function):
    """Measure a function with PyTorch's profiler. It also sees allocations inside operators, and installs no dispatch mode."""
    gc.collect()  # garbage of earlier tests would count as freed
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, acc_events=True) as seen:
        kept = function()
    now = most = flops = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
        elif event.name() in ("aten::mm", "aten::addmm", "aten::addmm_"):
            (n, k), (_, m) = event.shapes()[:2] if event.name() == "aten::mm" else event.shapes()[1:3]
            flops += 2 * n * k * m
    del kept
    return Taken(most, now, flops)


# ---- the three computations ----


class Rounded(torch.autograd.Function):
    """Round an fp32 product to the operands' dtype unless `wide`, and always its gradient.

    The gradient is rounded without `factor`, which is multiplied in after the rounding.
    """

    @staticmethod
    def forward(ctx, product, dtype, wide, factor):
        ctx.dtype, ctx.factor = dtype, factor
        return product.clone() if wide else product.to(dtype).to(product.dtype)

    @staticmethod
    def backward(ctx, dproduct):
        return (dproduct / ctx.factor).to(ctx.dtype).to(dproduct.dtype) * ctx.factor, None, None, None


def _factor(case, labels, token_weight):
    """Return the factor that backward multiplies into rows' gradients that were made in forward, else 1."""
    if "grad_in_forward" not in (case.mode, case.mode[0]) or case.full:
        return 1.0
    if case.reduction == "sum":
        return UPSTREAM
    kept = split_labels(labels)[0] != case.ignore_index
    return UPSTREAM / (kept.sum() if token_weight is None else token_weight.detach()[kept].sum())


def _mask(case, labels):
    """Which columns each row's distribution has: its label, and others."""
    columns = torch.arange(case.V, device=labels.device)
    return (columns == labels.unsqueeze(-1)) | ((columns + 5 * labels.unsqueeze(-1)) % 3 > 0)


def _eager(case, labels, rounded):
    cap, scale = (case.softcap or 0.0) / case.temperature, case.scale / case.temperature
    terms = LossTerms(case.ignore_index, case.smoothing, case.z_loss, cap, scale)

    def call(hidden, weight, bias, token_weight, lora_a, lora_b):
        product, factor = F.linear(hidden, weight, bias), _factor(case, labels, token_weight)
        if lora_a is not None:
            low = LORA_SCALE * F.linear(hidden, lora_a)
            product = product + F.linear(Rounded.apply(low, case.dtype, False, factor) if rounded else low, lora_b)
        if rounded:
            product = Rounded.apply(product, case.dtype, case.wide, factor)
        of_rows, mixed = split_labels(labels)
        targets, smoothing = Targets(mixed, case.class_weight()), case.smoothing
        masses = targets if has_masses(*targets, smoothing) else None
        rows = row_losses(product, of_rows, terms, case.names, _mask(case, labels) if case.masked else None, masses)
        weights = row_weights(of_rows, case.ignore_index, *targets, smoothing, token_weight)
        loss = reduce_losses(rows.loss, of_rows, case.ignore_index, weights.of_losses, case.reduction, weights.of_mean)
        return (loss, *(rows.statistic(name, terms) for name in case.names))

    return call


def _leaves(case, given, dtype=None):
    leaves = {}
    for name, t in given.items():
        if t is not None:
            leaf = t.detach().to(t.dtype if dtype is None else dtype, copy=True)
            t = leaf.requires_grad_(name not in case.frozen.split())
        leaves[name] = t
    return leaves




def _results(case, outs, leaves, grads, labels):
    found = {name: out.detach() for name, out in zip(("loss", *case.names), outs, strict=False)}
    found |= {f"d{name}": grads[name] for name in NAMES if leaves[name] is not None and name not in case.frozen.split()}
    if "dweight" in found and not case.mixed:
        there = labels[labels != case.ignore_index].unique()
        found["dweight of labels"] = found["dweight"][there]
    return found


def _backward(case, outs, dys):
    """Run backward of all differentiable outputs, if any. A loss with grad_scale is differentiated by itself."""
    if not outs[0].requires_grad:
        return
    count = 1 if case.promised else 1 + sum(name in DIFFERENTIABLE_STATISTICS for name in case.names)
    torch.autograd.backward(outs[:count], [dy.to(out.dtype) for dy, out in zip(dys[:count], outs, strict=False)])


def _theirs(case, given, labels, dys, dtype):
    leaves = _leaves(case, given, dtype)
    outs = _eager(case, labels, dtype is FP32)(*leaves.values())
    _backward(case, outs, dys)
    return _results(case, outs, leaves, {name: None if t is None else t.grad for name, t in leaves.items()}, labels)


def _ours(module, case, given, labels, dys, backend):
    leaves = _leaves(case, given)
    moved = [name for name in ("weight", "bias", "lora_a", "lora_b") if case.main and leaves[name] is not None]
    for name in moved:
        leaves[name].main_grad = torch.zeros_like(leaves[name], dtype=case.main)
    call = op(case.mode, module, backend=backend, logits_dtype=FP32 if case.wide else None, **case.options)
    more = {"grad_scale": UPSTREAM} if case.promised else {}
    more |= {"class_weight": case.class_weight()} if case.classes else {}
    more |= {"vocab_mask": _mask(case, labels)} if case.masked else {}
    more |= {"lora": module.LoRA(leaves["lora_a"], leaves["lora_b"], LORA_SCALE)} if case.lora else {}
    rows = nullcontext() if case.kept else mock.patch.object(module, "_rows_to_compute", return_value=None)
    watch = {name: t for name, t in leaves.items() if t is not None}
    with unchanged(labels=labels, **watch, **{f"dy{i}": dy for i, dy in enumerate(dys)}), poisoned(), rows:
        for _ in range(2 if moved else 1):
            leaves["hidden"].grad = None
            returned = call(leaves["hidden"], leaves["weight"], labels, leaves["bias"], leaves["token_weight"], **more)
            outs = (returned[0], *(getattr(returned[1], name) for name in case.names)) if case.full else (returned,)
            _backward(case, outs, dys)
    grads = {name: t.main_grad / 2 if name in moved else None if t is None else t.grad for name, t in leaves.items()}
    if case.weighted and moved and grads["token_weight"] is not None:
        grads["token_weight"] /= 2
    return _results(case, outs, leaves, grads, labels)


def judge_case(module, case, seeds=1, backend="triton"):
    """Judge `module.linear_cross_entropy` on several draws of a case. Inputs that it must not write are checked too."""
    trials, found = [], []
    for seed in range(seeds):
        given, labels, dys = draw(case, seed)
        ours = _ours(module, case, given, labels, dys, backend)
        baseline, exact = (_theirs(case, given, labels, dys, dtype) for dtype in (FP32, FP64))
        found += _exactly(case, ours, given, labels)
        if "correct" in case.names:
            right = ours.pop("correct"), exact.pop("correct")
            found.append(Finding("correct", "wrong", _wrong(case, given, *right), 0, 0))
        trials.append((ours, baseline, exact))
    report = compare(trials, case.dtype)
    report.findings += found
    return report


def _wrong(case, given, ours, exact):
    """Count rows with a wrong `correct`, except where the two largest logits are so close that rounding may swap them."""
    hidden, weight, bias, _, a, b = (None if t is None else t.double() for t in given.values())
    most = F.linear(hidden, weight if a is None else weight + LORA_SCALE * b @ a, bias).topk(2).values
    sure = most[..., 0] - most[..., 1] > (0 if case.dtype is FP32 else 0.05)
    return int(((ours != exact) & sure).sum())


def _exactly(case, ours, given, labels):
    """Check that ignored rows have a loss and a gradient of exactly 0; that losses are fp32 and gradients as their tensors."""
    ignored = split_labels(labels)[0] == case.ignore_index
    rest = 0
    if case.reduction == "none":
        rest += int(ours["loss"][ignored].count_nonzero())
    if case.full:
        rest += sum(int(ours[name][ignored].count_nonzero()) for name in STATISTICS if name in ours)
    if "dhidden" in ours:
        rest += int(ours["dhidden"][ignored].count_nonzero())
    types = {name: FP32 for name in ("loss", *STATISTICS) if name != "correct"}
    types |= {f"d{name}": t.dtype for name, t in given.items() if t is not None}
    if case.main:
        types |= dict.fromkeys(("dweight", "dbias", "dlora_a", "dlora_b"), case.main)
    others = [name for name, t in ours.items() if name in types and t.dtype is not types[name]]
    return [
        Finding("ignored rows", "numbers that are not 0", rest, 0, 0),
        Finding("types", "another of " + " ".join(others), len(others), 0, 0),
    ]
