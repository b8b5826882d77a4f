"""Find the onepass fusions that apply to the recorded operators. Each suggestion names the operators that it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from statistics import median

from torch.autograd import Function

from onepass.profiling.figures import Figures, OperatorCall
from onepass.profiling.limits import Limits
from onepass.runtime.formula import FORMULA_RANGE
from onepass.runtime.units import counted, listed, number, time

_LARGE_VOCABULARY, _LARGE_LOGITS = 8192, 1 << 24  # columns; elements, where columns are fewer
_FAST = 0.9  # of the copy bandwidth
_MANY_IGNORED = 0.1  # of the labels
_WORTH = 0.01  # of the time: smaller suggestions are dropped


@dataclass(frozen=True)
class Suggestion:
    """A onepass fusion that applies to the recorded operators."""

    call: str
    saw: str
    us: float  # per step: the time of the operators that it replaces; for a CUDA graph, the most that it can save

    def __str__(self) -> str:
        return f"{self.call}: {self.saw}"


def suggestions(
    figures: Figures, verdict: str, idle_us: float, limits: Limits, ignored_labels: float = 0.0
) -> tuple[Suggestion, ...]:
    """Return suggestions sorted by time, the largest first. If the step is launch-bound, a CUDA graph precedes them."""
    nodes, steps = _our_nodes(), figures.steps
    calls, ours = list[OperatorCall](), list[OperatorCall]()
    for call in figures.calls:
        (calls if nodes.isdisjoint(call.within) else ours).append(call)
    calls = [call for call in calls if not _as_fast_as_it_gets(call, limits)]
    total = sum(call.us for call in figures.calls) / steps
    finders: list[Callable[[Sequence[OperatorCall], int], Iterable[Suggestion]]] = [
        _losses, _norms, _activations, _optimizers,
    ]  # fmt: skip
    applying = [suggestion for finder in finders for suggestion in finder(calls, steps)]
    applying += _accumulations(calls, steps, ours)
    applying += _prompts(calls, steps, ignored_labels)
    if not figures.on_gpu:
        applying = [_on_cpu(suggestion) for suggestion in applying]
    applying += _equal(calls, steps, figures.on_gpu)
    applying = sorted((suggestion for suggestion in applying if suggestion.us >= _WORTH * total), key=lambda s: -s.us)
    return (*_graph(figures, verdict, idle_us), *applying)


def _our_nodes() -> set[str]:
    """Return the ranges of a trace in which an op of onepass runs: its autograd Function, forward or backward, or its formula."""
    names, classes = {FORMULA_RANGE}, [Function]
    while classes:
        classes += (of := classes.pop()).__subclasses__()
        if of.__module__.partition(".")[0] == "onepass":
            names |= {of.__name__, f"{of.__name__}Backward"}
    return names


def _as_fast_as_it_gets(call: OperatorCall, limits: Limits) -> bool:
    """Whether the call is a norm near the copy bandwidth. A onepass norm is then faster only if it fuses more operators."""
    if call.name not in _NORMS or call.cost.bytes is None or limits.copy_gbs is None or not call.us:
        return False
    return call.cost.bytes / call.us / 1e3 >= _FAST * limits.copy_gbs


def _graph(figures: Figures, verdict: str, idle_us: float) -> list[Suggestion]:
    if not (figures.on_gpu and verdict == "launch-bound" and figures.same_steps) or figures.graphs or figures.waits:
        return []
    launches = counted(figures.launches / figures.steps, "launch")
    saw = f"the same {launches} with the same shapes in each step, {time(idle_us)} of idling"
    call = "onepass.graphed_step(train_step)" if figures.trains else "onepass.fuse(fn, cuda_graph=True)"
    return [Suggestion(call, saw, idle_us)]


_NORMS = frozenset(f"aten::{name}{way}" for name in ("native_layer_norm", "_fused_rms_norm") for way in ("", "_backward"))


def _on_cpu(suggestion: Suggestion) -> Suggestion:
    """Add what differs on a CPU: onepass runs norms and activations as PyTorch operators, and splits the loss's product."""
    if "_norm" in suggestion.call or "activation" in suggestion.call:
        more = "faster on a GPU only"
    elif suggestion.call == _HEAD:
        more = "on a CPU it saves the logits' memory, not time"
    else:
        return suggestion
    return Suggestion(suggestion.call, f"{suggestion.saw}; {more}", suggestion.us)


def _norms(calls: Sequence[OperatorCall], steps: int) -> Iterable[Suggestion]:
    for name, ours in (("native_layer_norm", "layer_norm"), ("_fused_rms_norm", "rms_norm")):
        seen = _named(calls, f"aten::{name}", f"aten::{name}_backward")
        if seen:
            added = sum(
                before.name == "aten::add" and before.step == call.step and _shape(before) == _shape(call)
                for before, call in pairwise(_working(calls))
                if call.name == f"aten::{name}"
            )
            more = f"; {_count(added, steps)} follow an addition of their shape: residual= takes it in" if added else ""
            yield _suggestion(f"onepass.{ours}(x, weight, ...)", seen, steps, more)
    norms = _written_out(calls)
    if norms:
        parts = [call for norm, _ in norms for call in norm]
        us = sum(call.us for call in parts) / steps
        saw = f"{_count(len(norms), steps)} RMS norms written out in {_count(len(parts), steps)} operators, {time(us)}"
        added = sum(after_addition for _, after_addition in norms)
        more = f"; {_count(added, steps)} follow an addition of their shape: residual= takes it in" if added else ""
        yield Suggestion("onepass.rms_norm(x, weight)", saw + more, us)


def _written_out(calls: Sequence[OperatorCall]) -> list[tuple[list[OperatorCall], bool]]:
    """Return each RMS norm written out as x * rsqrt(mean(x^2) + eps) * weight, and whether it follows an addition.

    Casts may stand between its operators, as models of 16 bits compute the norm in fp32.
    """
    norms = []
    work = [call for call in _working(calls) if call.name not in _CASTS]
    for i, call in enumerate(work):
        if call.name != "aten::rsqrt":
            continue
        first = max(i - 3, 0)
        around = [c for c in work[first : i + 3] if c.step == call.step]
        names = {c.name for c in around}
        if "aten::mean" in names and "aten::mul" in names and names & {"aten::pow", "aten::square"}:
            parts = [c for c in around if c.name in _RMS_PARTS]
            before = work[first - 1] if first else call
            added = before.name == "aten::add" and before.step == call.step and _shape(before) == _shape(around[0])
            norms.append((parts, added))
    return norms


_RMS_PARTS = ("aten::pow", "aten::square", "aten::mean", "aten::add", "aten::rsqrt", "aten::mul")
_CASTS = ("aten::copy_", "aten::_to_copy")


def _activations(calls: Sequence[OperatorCall], steps: int) -> Iterable[Suggestion]:
    for name, plain, gated in (("gelu", "gelu", "geglu"), ("silu", "silu", "swiglu")):
        seen = _named(calls, f"aten::{name}", f"aten::{name}_backward")
        if not seen:
            continue
        products = _gates(calls, f"aten::{name}")
        activation = gated if products else plain
        more = f"; {_count(len(products), steps)} are multiplied with a tensor of their shape" if products else ""
        yield _suggestion(f'onepass.bias_activation(x, bias, "{activation}")', [*seen, *products], steps, more)


def _gates(calls: Sequence[OperatorCall], activation: str) -> list[OperatorCall]:
    """Return the multiplications of an activation's result: what follows at once, or behind the product of the other factor."""
    products = []
    work = [call for call in _working(calls) if call.name not in _CASTS]  # autocast's lie before the product
    for i, call in enumerate(work):
        if call.name != activation:
            continue
        after = work[i + 1 : i + 3]
        if after and after[0].cost.flops is not None and _inner(after[0]) == (_shape(call) or (None,))[-1]:
            del after[0]
        if after and after[0].name == "aten::mul" and after[0].step == call.step and _shapes(after[0]) == [_shape(call)] * 2:
            products.append(after[0])
    return products


_LOSSES = frozenset(f"aten::nll_loss{rank}_{way}" for rank in ("", "2d") for way in ("forward", "backward"))


_HEAD = "onepass.linear_cross_entropy(hidden, weight, labels)"


def _losses(calls: Sequence[OperatorCall], steps: int) -> Iterable[Suggestion]:
    softmaxes, seen = _cross_entropies(calls)
    if not softmaxes:
        return
    shape, classes = _shape(softmaxes[0]), _classes(softmaxes[0])
    assert shape
    heads = [call for call in calls if call.cost.flops is not None and _inner(call) == classes]
    size = " x ".join(f"{n:,}" for n in shape)
    made = ", made by a matrix product" if heads else ""
    yield _suggestion(_HEAD if heads else "onepass.cross_entropy(logits, labels)", seen, steps, f"; the logits are {size}{made}")


def _prompts(calls: Sequence[OperatorCall], steps: int, ignored: float) -> Iterable[Suggestion]:
    """Logits of tokens whose labels are ignored, as a prompt's are in fine-tuning."""
    softmaxes, seen = _cross_entropies(calls)
    if not softmaxes or ignored < _MANY_IGNORED:
        return
    classes = _classes(softmaxes[0])
    products = [call for call in calls if call.cost.flops is not None and any(classes in shape for shape in _shapes(call))]
    us = ignored * sum(call.us for call in [*seen, *products]) / steps
    saw = f"{ignored:.0%} of the labels are ignore_index: their logits and gradients are computed for nothing, {time(us)}"
    yield Suggestion("onepass.linear_cross_entropy(hidden[kept], weight, labels[kept]), kept = labels != -100", saw, us)


def _cross_entropies(calls: Sequence[OperatorCall]) -> tuple[list[OperatorCall], list[OperatorCall]]:
    """Return the softmaxes over large logits that losses follow, and all calls of these losses."""
    softmaxes = [
        call for call in _named(calls, "aten::_log_softmax")
        if _classes(call) >= _LARGE_VOCABULARY or prod(_shape(call) or ()) >= _LARGE_LOGITS
    ]  # fmt: skip
    shapes = {_shape(call) for call in softmaxes}
    losses = [
        call for call in calls
        if call.name in _LOSSES or (call.name == "aten::gather" and _shape(call) in shapes)
    ]  # fmt: skip
    if not losses:
        return [], []
    return softmaxes, [*softmaxes, *_named(calls, "aten::_log_softmax_backward_data"), *losses]


def _classes(call: OperatorCall) -> int:
    """Return the size of the dimension that a softmax is over."""
    shape, dim = _shape(call), call.inputs[1].value
    return shape[int(dim)] if shape and dim.lstrip("-").isdigit() else 0


def _inner(call: OperatorCall) -> int | None:
    """Return the number of columns of a product's result."""
    tensors = [tensor for tensor in call.inputs if tensor.shape]
    return tensors[-1].shape[-1] if tensors and tensors[-1].shape else None


def _accumulations(calls: Sequence[OperatorCall], steps: int, ours: Sequence[OperatorCall]) -> Iterable[Suggestion]:
    """Additions to .grad of what a product makes, by PyTorch or inside an op of onepass."""
    added = [
        call for call in calls if call.name in ("aten::add_", "aten::add") and "torch::autograd::AccumulateGrad" in call.within
    ]  # fmt: skip
    by_pytorch, by_ours = _product_shapes(calls), _product_shapes(ours)
    more = "; they add a weight's gradient to .grad, which the matrix product can do itself"
    if seen := [call for call in added if _shape(call) in by_pytorch]:
        yield _suggestion("onepass.linear(x, weight) with weight.main_grad (onepass.parallel.MainGrads)", seen, steps, more)
    if seen := [call for call in added if _shape(call) in by_ours - by_pytorch]:
        yield _suggestion("onepass.parallel.MainGrads(model)", seen, steps, more)


def _product_shapes(calls: Sequence[OperatorCall]) -> set[tuple[int, ...] | None]:
    """Return the shapes of products' results and of their transposes: autograd makes a weight's gradient either way."""
    sizes = {
        (left[0], right[-1]) for call in calls if call.cost.flops for left, right in pairwise(_shapes(call)) if left and right
    }
    return {shape for rows, columns in sizes for shape in ((rows, columns), (columns, rows))}


_ADAMW = frozenset(f"aten::{name}" for name in ("lerp_", "mul_", "add_", "addcmul_", "sqrt", "div", "div_", "addcdiv_"))
_LONGEST_UPDATE = 9  # calls of a parameter's update


def _optimizers(calls: Sequence[OperatorCall], steps: int) -> Iterable[Suggestion]:
    """AdamW in a loop over parameters, in which each of several calls reads and writes the parameter or its state."""
    work = [call for call in _working(calls) if call.name in _ADAMW]
    seen: list[OperatorCall] = []
    loops = begun = 0
    for i, call in enumerate(work):
        if call.name != "aten::addcdiv_" or any(name.startswith("aten::_foreach") for name in call.within):
            continue
        start = i
        least = max(begun, i + 1 - _LONGEST_UPDATE)
        while start > least and (work[start - 1].step, _shape(work[start - 1])) == (call.step, _shape(call)):
            start -= 1
        begun = i + 1
        if {"aten::addcmul_", "aten::sqrt"} <= {each.name for each in work[start:i]}:
            seen += work[start : i + 1]
            loops += 1
    if seen:
        more = f"; {_count(loops, steps)} parameters are stepped one after the other, which one pass does for all"
        yield _suggestion("onepass.parallel.AdamW(main_grads)", seen, steps, more)


# ---- runs of small equal calls ----

_LEAST_REPEATS, _LONGEST_PERIOD = 8, 4
_SMALL_US = {True: 20.0, False: 100.0}  # on a GPU, on a CPU: calling such an operator costs about as much as running it
_FREE = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "narrow",
        "ones", "permute", "reshape", "resize_", "resolve_conj", "resolve_neg", "result_type", "select", "slice", "split",
        "split_with_sizes", "squeeze", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "_reshape_alias",
        "_unsafe_view", "zeros",
    )
)  # fmt: skip


def _equal(calls: Sequence[OperatorCall], steps: int, on_gpu: bool) -> list[Suggestion]:
    work = _working(calls)
    groups = [group for group in _repeats(work) if median(call.us for call in group) <= _SMALL_US[on_gpu]]
    if not groups:
        return []
    longest = max(groups, key=len)
    period = list(dict.fromkeys(call.name for call in longest))
    us = sum(call.us for group in groups for call in group) / steps
    saw = (
        f"{_count(sum(map(len, groups)), steps)} small calls with the same shapes one after the other, such as {listed(period)} "
        f"{len(longest) // len(period)} times, {time(us)}: "
        "where they don't need each other's results, one can do for all"
    )
    return [Suggestion("onepass.fuse(fn)", saw, us)]


def _repeats(calls: Sequence[OperatorCall]) -> list[list[OperatorCall]]:
    """Return runs in which a few calls repeat with the same shapes and dtypes. In-place calls end a run."""
    runs, i = [], 0
    keys = [None if call.name.endswith("_") else (call.step, *call.key) for call in calls]
    while i < len(calls):
        end = i + 1
        for period in range(1, _LONGEST_PERIOD + 1):
            same = 0
            while i + same + period < len(keys) and keys[i + same] is not None and keys[i + same] == keys[i + same + period]:
                same += 1
            if same // period + 1 >= _LEAST_REPEATS:
                end = i + (same // period + 1) * period
                runs.append(list(calls[i:end]))
                break
        i = end
    return runs


# ---- calls ----


def _named(calls: Sequence[OperatorCall], *names: str) -> list[OperatorCall]:
    return [call for call in calls if call.name in names]


def _working(calls: Sequence[OperatorCall]) -> list[OperatorCall]:
    return [call for call in calls if call.works and call.name not in _FREE]


def _shapes(call: OperatorCall) -> list[tuple[int, ...]]:
    return [tensor.shape for tensor in call.inputs if tensor.shape is not None]


def _shape(call: OperatorCall) -> tuple[int, ...] | None:
    return next(iter(_shapes(call)), None)


def _suggestion(ours: str, seen: Sequence[OperatorCall], steps: int, more: str = "") -> Suggestion:
    names = Counter(call.name for call in seen)
    us = sum(call.us for call in seen) / steps
    listed = ", ".join(f"{_count(count, steps)} {name}" for name, count in names.items())
    return Suggestion(ours, f"{listed}, {time(us)} together{more}", us)


def _count(count: int, steps: int) -> str:
    return number(count / steps)
