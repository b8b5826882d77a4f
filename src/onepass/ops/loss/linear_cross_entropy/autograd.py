"""The gradients of linear_cross_entropy: made in forward, where they wait or are finished, in backward, or in flush()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import vocab_range
from onepass.gradients.deferred import DeferredWgrad, graph_break_if_deferred, is_deferred
from onepass.gradients.main_grad import (
    GradRequest,
    VectorSums,
    accumulates_elsewhere,
    accumulation_target,
    grad_requests,
    main_grads_of,
    mark_accumulated,
    mark_added,
    name_written,
    placeholder,
    vector_gradient,
    vector_gradients,
)
from onepass.gradients.releasable_storage import ensure_allocated, ensure_written
from onepass.ops.loss.formula import LossOptions, RowLosses
from onepass.ops.loss.head.autograd import retained, scaled
from onepass.ops.loss.head.operands import HeadTensors, head_of, wide_type
from onepass.ops.loss.head.passes import recompute_gradients
from onepass.ops.loss.head.sums import Gradients, Needs
from onepass.ops.loss.kept_rows import KeptRows, RowSelection
from onepass.ops.loss.linear_cross_entropy.row_loss import OPS, CrossEntropyRows, KeptNumbers, TokenRows
from onepass.ops.loss.reduction import can_validate_labels, mean_scale, reduce_rows, row_gradient, validate_labels
from onepass.ops.loss.row_kernels import RowGradients
from onepass.ops.loss.targets import Targets, check_class_weight, has_masses, row_weights
from onepass.runtime.dispatch import cast, fast_apply, needs_dispatcher, not_twice_differentiable, under_checkpoint


class _LinearCrossEntropy(torch.autograd.Function):
    """Outputs: the loss, and the statistics that the options name."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor | None, lora_b: Tensor | None,
        token_weight: Tensor | None, labels: Tensor, bits: Tensor | None, probabilities: Tensor | None,
        class_weight: Tensor | None, options: LossOptions, group: dist.ProcessGroup | None, deferred: DeferredWgrad | None,
        kept: KeptRows | None,
    ) -> Any:  # fmt: skip
        graph_break_if_deferred(deferred)
        need_hidden, need_weight, *need_others, need_token_weight = ctx.needs_input_grad[:6]
        main_grads = main_grads_of((need_weight, *need_others), weight, bias, lora_a, lora_b)
        needs = Needs(need_hidden, need_weight and deferred is None, *need_others)
        if options.grad_scale is not None and under_checkpoint():
            raise RuntimeError("grad_scale can't be used under activation checkpointing, which runs forward twice: leave it away")
        # Where a compiler or a mode sees the call, PyTorch reduces: it sees operators, which it may fuse, but no kernel.
        direct = not needs_dispatcher(hidden, weight, bias, lora_a, lora_b)
        by_kernel = options.use_triton and direct
        selection = None if kept is None else kept.selection(0 if group is None else group.rank(), hidden.device)
        targets = Targets(probabilities, class_weight)
        rows, of_mean = _rows_of(hidden, weight, labels, token_weight, bits, targets, options, group, by_kernel, selection)
        # without gradients a chunk's rows are gathered when its turn comes: less memory
        own = selection.own if selection is not None and direct and not any(needs) else None
        tensors = HeadTensors(_selected(hidden, selection) if own is None else hidden, weight, bias, lora_a, lora_b)
        *each, dhidden, dweight, dbias, dlora_a, dlora_b, logits = OPS.forward(
            tensors, rows, options, needs, accumulates_elsewhere(weight),
            accumulate=(weight, main_grads[0], GradRequest.ACCUMULATE), own=own,
        )  # fmt: skip
        computed = RowLosses(*each)
        losses, lse = computed[:2]
        stats = {name: computed.statistic(name, options.terms) for name in options.statistics()}
        entropy, mass = stats.get("entropy"), computed.mass if rows.masses() else None
        added = options.grad_scale is not None and needs.need_weight and dweight is None
        with name_written(["weight"] if added else []):
            ignore, reduction = options.ignore_index, options.reduction
            loss, _ = reduce_rows(losses, rows.labels, ignore, reduction, rows.token_weight, by_kernel, rows.mean_scale, of_mean)
            if options.reduction == "none":
                loss = _returned(loss, labels, selection)
            # Copies: backward needs the logsumexp and the entropy, so nobody else may write to them.
            outputs = [
                _returned(t.to(t.dtype if t.dtype is torch.bool else losses.dtype, copy=True), labels, selection)
                for t in stats.values()
            ]
            wrong = kept.mismatch(labels) if kept is not None and labels.is_cuda else None  # a CPU has raised
            if wrong is not None:
                loss, *outputs = [t if t.dtype is torch.bool else torch.where(wrong, torch.nan, t) for t in (loss, *outputs)]
        ctx.options, ctx.deferred, ctx.needs, ctx.used, ctx.scaled = options, deferred, needs, False, ()
        ctx.promised = options.grad_scale is not None and any(needs)
        ctx.added = added
        # A graph's op returns an empty dbias for none. A rank without columns has no other: backward makes it again.
        ctx.made = any(t is not None for t in (dhidden, dweight, dlora_a, dlora_b)) or (
            dbias is not None and dbias.shape[0] > 0
        )
        ctx.held, ctx.main_grads = [retained(t) for t in (weight, bias, lora_a, lora_b)], main_grads
        ctx.token_weight = None if token_weight is None else (token_weight.dtype, token_weight.shape)
        of_label = None
        if need_token_weight:
            of_label = row_weights(rows.labels, options.ignore_index, *targets, options.smoothing).divisor()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden, weight, bias, lora_a, lora_b, *rows, *(selection or (None, None)), lse, entropy, mass,
            losses if need_token_weight else None, of_label, logits, dhidden, dweight,
            dbias if needs.need_bias and (ctx.made or ctx.promised) else None, dlora_a, dlora_b,
        )  # fmt: skip
        if not outputs:
            return loss
        ctx.mark_non_differentiable(*outputs[len(options.differentiable()) :])
        return loss, *outputs

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dloss: Tensor | None, *dstats: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = _detached(_Saved(*ctx.saved_tensors))
        fresh, ctx.used = not ctx.used, True  # used even if this pass fails halfway
        *requests, of_token_weight = grad_requests(ctx, 6)
        stats = [t for t in dstats if t is not None]
        dtoken_weight = _token_weight_gradient(ctx, saved, dloss, of_token_weight)  # takes memory: before main_grad is written
        grads: Grads
        if ctx.promised:
            grads = _promised_gradients(ctx, saved, dloss, stats, requests, fresh)
        elif dloss is None and not stats:
            grads = (None,) * 5
        elif ctx.made and not stats:
            assert dloss is not None
            grads = _made_gradients(ctx, _unscaled(ctx, saved, requests), dloss, requests)
        else:
            grads = _backward_gradients(ctx, saved, dloss, dstats, requests, fresh)
        return *grads, dtoken_weight, *(None,) * 8


class _Saved(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    labels: Tensor
    token_weight: Tensor | None
    mean_scale: Tensor | None
    place: Tensor | None
    bits: Tensor | None
    probabilities: Tensor | None
    class_weight: Tensor | None
    selected: Tensor | None
    own_selected: Tensor | None
    logsumexp: Tensor
    entropy: Tensor | None
    mass: Tensor | None
    losses: Tensor | None
    label_weight: Tensor | None  # labels' class weights, for the token weights' gradient
    logits: Tensor | None
    hidden_made: Tensor | None
    weight_made: Tensor | None
    bias_made: Tensor | None
    lora_a_made: Tensor | None
    lora_b_made: Tensor | None

    def tensors(self) -> HeadTensors:
        """The head's, with the hidden states that are computed."""
        return HeadTensors(_selected(self.hidden, self.selection()), *self[1:5])

    def token_rows(self) -> TokenRows:
        return TokenRows(*self[5:12])

    def made(self) -> tuple[Tensor | None, ...]:
        """The gradients of bias and LoRA's a and b that forward has made."""
        return self[-3:]

    def selection(self) -> RowSelection | None:
        """The rows that are computed, or None for all."""
        if self.selected is None or self.own_selected is None:
            return None
        return RowSelection(self.selected, self.own_selected)

    def rows(self, values: Tensor) -> Tensor:
        """Return the computed rows' part of `values`, one a label, as a vector."""
        values = values.reshape(-1)
        return values if (selection := self.selection()) is None else selection.take(values)


def _parameters(ctx: Any, saved: _Saved) -> list[Any]:
    """The weight, the bias, and LoRA's a and b."""
    return [t if kept is None else kept for kept, t in zip(ctx.held, saved[1:5], strict=True)]


def _sums_of(
    ctx: Any, saved: _Saved, gradients: Sequence[Tensor | None], requests: list[GradRequest], factor: Tensor | None = None
) -> list[VectorSums | None]:
    """What `vector_gradients` takes of the gradients of bias and LoRA's a and b."""
    parameters = _parameters(ctx, saved)[1:]
    return [
        None if t is None or request is GradRequest.SKIP else (t if factor is None else t * factor, parameter, main, request)
        for t, parameter, main, request in zip(gradients, parameters, ctx.main_grads[1:], requests[2:], strict=True)
    ]


def _detached(saved: _Saved) -> _Saved:
    """Give the tensors that this op made, and may write to, version counters of their own: a second backward reads none of
    them."""
    if torch.compiler.is_compiling():
        return saved
    made = [None if t is None else t.data for t in saved[-6:]]  # logits too
    return _Saved(*saved[:-6], *made)


def _shaped(rows: Tensor, shape: torch.Size) -> Tensor:
    """Not a view, as autograd sees it: what a Function returns as a view can't be written to."""
    shaped: Tensor = torch.ops.aten._unsafe_view(rows, shape)
    return shaped


def _selected(hidden: Tensor, selection: RowSelection | None) -> Tensor:
    """Return hidden's rows that are computed, [tokens, D], or hidden itself for all."""
    if selection is None:
        return hidden
    return hidden.reshape(hidden.shape[:-1].numel(), hidden.shape[-1]).index_select(0, selection.own)


def _returned(rows: Tensor, labels: Tensor, selection: RowSelection | None) -> Tensor:
    """Return computed rows as values of labels' shape."""
    return _shaped(rows if selection is None else selection.put(rows, labels.numel()), labels.shape)


def _rows_of(
    hidden: Tensor, weight: Tensor, labels: Tensor, token_weight: Tensor | None, bits: Tensor | None, targets: Targets,
    options: LossOptions, group: dist.ProcessGroup | None, by_kernel: bool, selection: RowSelection | None,
) -> tuple[TokenRows, Tensor | None]:  # fmt: skip
    """Return also the weights by whose sum a mean divides, if they aren't those of the losses."""
    labels = labels.reshape(-1).contiguous()
    weights = None if token_weight is None else token_weight.reshape(-1).to(wide_type(hidden))
    if selection is not None:
        labels, weights = selection.take(labels), None if weights is None else selection.take(weights)
        bits = bits if bits is None or bits.shape[0] == 1 else selection.take(bits)
    (probabilities, classes), ignore, smoothing = targets, options.ignore_index, options.smoothing
    weights, of_mean = both = row_weights(labels, ignore, probabilities, classes, smoothing, weights)
    scale = mean_scale(labels, ignore, options.reduction, wide_type(hidden), both.divisor(), by_kernel)
    place = None if group is None else vocab_range(weight.shape[0], group, weight.device)
    if place is not None and can_validate_labels(labels):
        validate_labels(labels, int(place[1]), ignore)
        check_class_weight("class_weight", classes, int(place[1]), hidden.device)
    classes = classes.contiguous() if classes is not None and has_masses(probabilities, classes, smoothing) else None
    return TokenRows(labels, weights, scale, place, bits, probabilities, classes), of_mean


Grads = tuple[Tensor | None, ...]  # of hidden, the weight, the bias, and LoRA's a and b


# ---- gradients that forward has made ----


def _unscaled(ctx: Any, saved: _Saved, requests: list[GradRequest]) -> _Saved:
    """Return what forward made. Where an earlier pass multiplied it in place, forward's products are computed again: the same
    numbers, rounded in the same places."""
    asked = [name for name, request in zip(_SCALED, requests[: len(_SCALED)], strict=True) if request is not GradRequest.SKIP]
    if not any(name in ctx.scaled for name in asked):
        return saved
    *_, dhidden, dweight, _, _, _, _ = OPS.forward(
        saved.tensors(), saved.token_rows(), ctx.options, ctx.needs, False,
        accumulate=(_parameters(ctx, saved)[0], ctx.main_grads[0], GradRequest.ACCUMULATE), mode="grad_in_forward",
    )  # fmt: skip
    return saved._replace(hidden_made=dhidden, weight_made=dweight)


def _made_gradients(ctx: Any, saved: _Saved, dloss: Tensor, requests: list[GradRequest]) -> Grads:
    """Multiply what forward made by the loss's incoming gradient; it is rounded once."""
    factor = dloss if saved.mean_scale is None else dloss * saved.mean_scale
    weight, hidden = _parameters(ctx, saved)[0], None
    if requests[0] is not GradRequest.SKIP and saved.hidden_made is not None:
        hidden = _as_hidden(saved, _times_once(ctx, saved, "hidden_made", factor, ctx.options.product))

    def put_weight() -> Tensor | None:
        if requests[1] is GradRequest.SKIP:
            return None
        if saved.weight_made is None:  # deferred, now or by an earlier pass
            only = [request if i == 1 else GradRequest.SKIP for i, request in enumerate(requests)]
            return _backward_gradients(ctx, saved, dloss, (), only, False)[1]
        moved = accumulates_elsewhere(weight) and requests[1] is not GradRequest.RETURN
        dtype = saved.weight_made.dtype if moved else weight.dtype
        sums = _times_once(ctx, saved, "weight_made", factor, dtype)
        return vector_gradient(sums, weight, ctx.main_grads[0], requests[1])

    return hidden, *_put(put_weight, _sums_of(ctx, saved, saved.made(), requests, factor))


def _as_hidden(saved: _Saved, dhidden: Tensor) -> Tensor:
    dhidden, shape = cast(dhidden, saved.hidden.dtype), saved.hidden.shape
    return (dhidden if (selection := saved.selection()) is None else selection.put_own(dhidden, shape[:-1].numel())).view(shape)


def _put(
    put_weight: Callable[[], Tensor | None], others: list[VectorSums | None]
) -> list[Tensor | None]:
    gradients, dweight = vector_gradients(others, put_weight)
    return [dweight, *gradients]


_SCALED = "hidden_made", "weight_made"  # those that backward may multiply in place


def _times_once(ctx: Any, saved: _Saved, name: str, factor: Tensor, dtype: torch.dtype) -> Tensor:
    made: Tensor = getattr(saved, name)
    if made.dtype == dtype:
        ctx.scaled = (*ctx.scaled, name)
    return scaled(made, factor, dtype, ctx.options.use_triton, over=True)


def _promised_gradients(
    ctx: Any, saved: _Saved, dloss: Tensor | None, dstats: list[Tensor], requests: list[GradRequest], fresh: bool
) -> Grads:  # fmt: skip
    """Return finished gradients if grad_scale's promise was kept. If not, a CPU raises and a GPU returns NaN, as checking would
    make it wait."""
    if not fresh:
        raise RuntimeError("with grad_scale the gradients are made in forward, once: a second backward needs a call without it")
    if dloss is None or (dstats and not torch.compiler.is_compiling()):  # a graph sends zeros to all that leaves it
        raise RuntimeError("with grad_scale only the loss can be differentiated, but a gradient came for one of the stats")
    weight = _parameters(ctx, saved)[0]
    if ctx.added and requests[1] not in (GradRequest.ACCUMULATE, GradRequest.CAPTURE):
        raise RuntimeError(
            "with grad_scale the weight's gradient is in main_grad already, but this pass is torch.autograd.grad's, which leaves "
            "main_grad alone: leave grad_scale away for it"
        )
    truth = _true_scale(ctx, dloss, dstats)

    def scale(made: Tensor) -> Tensor:
        return scaled(made, truth, made.dtype, ctx.options.use_triton, over=True)

    with name_written(["weight"] if ctx.added else []):
        hidden = None if saved.hidden_made is None else _as_hidden(saved, scale(saved.hidden_made))

        def put_weight() -> Tensor | None:
            if saved.weight_made is not None:
                return vector_gradient(scale(saved.weight_made), weight, ctx.main_grads[0], requests[1])
            if ctx.added and hidden is None:  # the NaN has to be somewhere
                ensure_written(ctx.main_grads[0])[:1].mul_(truth)
            return mark_accumulated(weight, requests[1]) if ctx.added else None

        return hidden, *_put(put_weight, _sums_of(ctx, saved, saved.made(), requests, truth))


_AS_PROMISED = 1e-6  # relative: loss * 0.1 / 5 sends back 0.02 but for an fp32 rounding or two


def _true_scale(ctx: Any, dloss: Tensor, dstats: list[Tensor]) -> Tensor:
    """Return 1 if the incoming gradient is the promised one and the stats' are 0; else NaN."""
    promised: float = ctx.options.grad_scale
    off = (dloss - promised).abs()
    kept = (off <= _AS_PROMISED * abs(promised)).all()
    for t in dstats:
        kept = kept & (t == 0).all()
    if dloss.device.type == "cpu" and not torch.compiler.is_compiling() and not kept:
        came = dloss.flatten()[off.argmax()].item()
        raise RuntimeError(
            f"grad_scale promised that the loss's incoming gradient would be {promised}, but it is {came}"
            + (": what this call has added to main_grad is wrong, clear it" if ctx.added else "")
        )
    return torch.where(kept, 1.0, torch.nan)


# ---- gradients that backward makes ----


def _backward_gradients(
    ctx: Any, saved: _Saved, dloss: Tensor | None, dstats: Sequence[Tensor | None], requests: list[GradRequest], fresh: bool
) -> Grads:
    """Make gradients from the logits that waited, or from recomputed logits."""
    weight = _parameters(ctx, saved)[0]
    incoming = _incoming(saved, ctx.options, dloss, dstats)
    made, grad = Gradients(), None
    main_grad, request = ctx.main_grads[0], requests[1]
    later = is_deferred(ctx.deferred, weight, request)
    skip = GradRequest.SKIP
    asked = [each is not skip for each in requests]
    needs = Needs(asked[0], asked[1] and not later, *asked[2:])
    if needs.need_weight and accumulation_target(weight, main_grad, request) is not None:
        grad = placeholder(weight, request)  # before main_grad is written, part by part
    if any(needs):
        separate_sum = accumulates_elsewhere(weight) and request is not GradRequest.RETURN
        made = Gradients(*OPS.backward(
            saved.tensors(), saved.token_rows(), KeptNumbers(saved.logsumexp, saved.entropy), incoming, ctx.options, needs,
            separate_sum, accumulate=(weight, main_grad, request), logits=saved.logits, used=not fresh,
        ))  # fmt: skip

    def put_weight() -> Tensor | None:
        if later:
            return ctx.deferred.keep_work(_HeadWork(ctx, saved, incoming), weight, main_grad)  # type: ignore[no-any-return]
        if made.weight is not None:
            return vector_gradient(made.weight, weight, main_grad, request)
        if needs.need_weight:
            mark_added(weight)
        return grad

    with name_written(["weight"] if needs.need_weight and made.weight is None else []):
        hidden = None if made.hidden is None else _as_hidden(saved, made.hidden)
        return hidden, *_put(put_weight, _sums_of(ctx, saved, made[2:], requests))


def _incoming(saved: _Saved, options: LossOptions, dloss: Tensor | None, dstats: Sequence[Tensor | None]) -> RowGradients:
    """Incoming gradients of each row's loss and stats, in fp32."""
    N, wide = saved.labels.shape[0], wide_type(saved.hidden)
    if dloss is None:
        g = saved.logsumexp.new_zeros(N, dtype=wide)
    else:
        dloss = saved.rows(dloss) if options.reduction == "none" else dloss
        g = row_gradient(dloss.to(wide), options.reduction, N, saved.mean_scale, saved.token_weight)
    # the others, which come after, have none
    came = zip(options.differentiable(), dstats)  # noqa: B905  (PyTorch 2.9's compiler takes strict=False for True)
    rows = {name: saved.rows(t).to(wide).contiguous() for name, t in came if t is not None}
    return RowGradients(g, **rows, mass=saved.mass)


class _HeadWork:
    """A head's deferred gradient: it keeps hidden states and a few numbers a token, and recomputes logits in flush()."""

    def __init__(self, ctx: Any, saved: _Saved, incoming: RowGradients) -> None:
        kept = KeptNumbers(saved.logsumexp, saved.entropy)
        records: tuple[Any, ...] = saved.tensors(), saved.token_rows(), kept, incoming
        self.records = [type(each)(*(None if t is None else t.detach() for t in each)) for each in records]
        named = [(name, t) for record in self.records for name, t in zip(record._fields, record, strict=True)]
        self.tensors = {name: t for name, t in named if t is not None and name not in ("weight", "bias")}
        self.written = [t for t in (saved.weight, saved.bias) if t is not None]
        self.made_with, self.options = [t._version for t in self.written], ctx.options

    def check(self) -> None:
        if self.made_with != [t._version for t in self.written]:
            raise RuntimeError("a head whose gradient is deferred was written to since: flush() before the optimizer's step")

    def start(self) -> None:
        pass

    def add(self, coming: Any, main_grad: Tensor) -> None:
        tensors, rows, kept, incoming = self.records
        plan = CrossEntropyRows.plan(tensors, rows, self.options, Needs(False, True, False), main_grad, "recompute", kept)
        head = head_of(tensors, rows.place, self.options, self.options.product)
        loss = CrossEntropyRows(head, rows, self.options, "recompute", kept, incoming)
        into = Gradients(weight=ensure_allocated(main_grad))
        recompute_gradients(head, loss, plan.rows, plan.columns, into, True)


def _token_weight_gradient(ctx: Any, saved: _Saved, dloss: Tensor | None, request: GradRequest) -> Tensor | None:
    """A mean divides by the weights, so there it is how much more a row's loss is than the mean. Of losses made of masses the
    label's class weight is in the loss already."""
    if request is GradRequest.SKIP or dloss is None or saved.losses is None or saved.token_weight is None:
        return None
    losses, of_label = saved.losses, saved.label_weight
    each = losses if of_label is None or saved.class_weight is not None else losses * of_label
    if saved.mean_scale is not None:
        kept = saved.labels != ctx.options.ignore_index
        mean = torch.where(kept, losses * saved.token_weight, 0.0).sum() * saved.mean_scale
        each = torch.where(kept, each - (mean if of_label is None else mean * of_label), 0.0) * saved.mean_scale
    dtype, shape = ctx.token_weight
    gradient = (each * (saved.rows(dloss) if dloss.dim() else dloss)).to(dtype)
    return (gradient if (selection := saved.selection()) is None else selection.put(gradient, shape.numel())).view(shape)


apply = fast_apply(_LinearCrossEntropy)
