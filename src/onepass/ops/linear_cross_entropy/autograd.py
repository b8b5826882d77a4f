"""When linear_cross_entropy's gradients are made: in forward, where they wait or are finished, in backward, or in flush()."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.kernels.cross_entropy_formula import RowLosses
from onepass.kernels.losses import can_look, look_at_labels, mean_scale, reduced_rows, row_gradient
from onepass.kernels.scaled import scaled
from onepass.kernels.softmax_rows import Incoming
from onepass.ops.linear_cross_entropy.head import of_whole_rows, whole_rows, wide_type
from onepass.ops.linear_cross_entropy.passes import Gradients, gradients_again
from onepass.ops.linear_cross_entropy.steps import Call, Rows, first_step, head_of, made_again, plan_call
from onepass.ops.linear_cross_entropy.traced import traced_backward, traced_forward, traced_way
from onepass.parallel.product import leave_graph, postponed
from onepass.parallel.vocabulary import vocab_place
from onepass.runtime.dispatch import bare_apply, cast, checkpointed, once, watched
from onepass.runtime.main_grad import Asked, asked, has_own_place, main_grads_of, place_of, settled, vector_gradient
from onepass.runtime.released import ready, with_memory


class _LinearCrossEntropy(torch.autograd.Function):
    """Outputs: the loss, and with `full` logsumexp, log_prob, entropy and correct."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_weight: Tensor | None, labels: Tensor, call: Call
    ) -> Any:
        leave_graph(call.deferred)
        *needs, needs_token_weight = ctx.needs_input_grad[:4]
        main_grads = main_grads_of(needs[1:], weight, bias)
        if call.deferred is not None:  # later
            needs[1] = False
        if call.grad_scale is not None and checkpointed():
            raise RuntimeError("grad_scale can't be used under activation checkpointing, which runs forward twice: leave it away")
        seen = watched(hidden, weight, bias)
        native = call.native and not seen
        rows = _rows_of(hidden, weight, labels, token_weight, call, native)
        if seen:
            way, into, kept = traced_way(call, tuple(needs)), None, None
            found, waiting = traced_forward(hidden, weight, bias, rows, call, way, tuple(needs), has_own_place(weight))
        else:
            plan = plan_call(hidden, weight, labels, call, tuple(needs), main_grads[0])
            way = plan.way
            into = place_of(weight, main_grads[0], Asked.GATHERED) if way == "promised" and needs[1] else None
            found, waiting, kept = first_step(hidden, weight, bias, rows, call, plan, tuple(needs), into, has_own_place(weight))
        loss, _ = reduced_rows(found.loss, rows.labels, call.terms, call.reduction, rows.token_weight, native, rows.scale)
        if call.reduction == "none":
            loss = _shaped(loss, labels.shape)
        ctx.call, ctx.way, ctx.used, ctx.added = call, way, False, into is not None
        ctx.held, ctx.main_grads = _held(weight, bias), main_grads
        ctx.given = None if token_weight is None else (token_weight.dtype, token_weight.shape)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden, weight, bias, *rows, found.logsumexp, found.entropy, found.loss if needs_token_weight else None,
            None if kept is None else whole_rows(kept), *waiting,
        )  # fmt: skip
        if not call.full:
            return loss
        stats = _stats_of(found, labels.shape)
        ctx.mark_non_differentiable(stats[-1])
        return loss, *stats

    @staticmethod
    @once
    def backward(ctx: Any, dloss: Tensor | None, *dstats: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = _ours(_Saved(*ctx.saved_tensors))
        fresh, ctx.used = not ctx.used, True  # used up even where this pass fails halfway
        wanted = asked(ctx, True, True, saved.bias is not None, saved.token_weight is not None)
        stats = [t for t in dstats if t is not None]
        if ctx.way == "promised":
            grads = _as_promised(ctx, saved, dloss, stats, wanted, fresh)
        elif dloss is None and not stats:
            grads = None, None, None
        elif ctx.way == "forward" and fresh and not stats:
            assert dloss is not None
            grads = _waited(ctx, saved, dloss, wanted)
        else:
            grads = _in_backward(ctx, saved, dloss, dstats, wanted, fresh)
        dhidden = None if grads[0] is None else cast(grads[0], saved.hidden.dtype).view(saved.hidden.shape)
        return dhidden, grads[1], grads[2], _token_weight_gradient(ctx, saved, dloss, wanted[3]), None, None


class _Saved(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    token_weight: Tensor | None
    scale: Tensor | None
    place: Tensor | None
    logsumexp: Tensor
    entropy: Tensor | None
    losses: Tensor | None
    logits: Tensor | None
    hidden_waiting: Tensor | None
    weight_waiting: Tensor | None
    bias_waiting: Tensor | None

    def rows(self) -> Rows:
        return Rows(self.labels, self.token_weight, self.scale, self.place)


def _held(*parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """Parameters themselves, for what stands on them. Of what was computed, a head with LoRA, the saved tensor will do: it is
    let go when backward has run, or under checkpointing before."""
    return tuple(t if t is not None and (t.is_leaf or has_own_place(t)) else None for t in parameters)


def _parameters(ctx: Any, saved: _Saved) -> tuple[Tensor, Any]:
    weight, bias = ctx.held
    return saved.weight if weight is None else weight, saved.bias if bias is None else bias


def _ours(saved: _Saved) -> _Saved:
    """What this op made and may write to, under version counters of their own: a second backward does not look at it."""
    if torch.compiler.is_compiling():
        return saved
    logits, *waiting = (None if t is None else t.data for t in saved[-4:])
    return _Saved(*saved[:-4], logits, *waiting)


def _stats_of(found: RowLosses, shape: torch.Size) -> tuple[Tensor, ...]:
    """Of their own, as the logsumexp, log_prob and entropy that backward needs are nobody's to write to."""
    stats = found.logsumexp.to(found.loss.dtype), *found[2:]
    return tuple(_shaped(t.clone(), shape) for t in stats if t is not None)


def _shaped(rows: Tensor, shape: torch.Size) -> Tensor:
    """Not a view, as autograd sees it: what a Function returns as a view can't be written to."""
    shaped: Tensor = torch.ops.aten._unsafe_view(rows, shape)
    return shaped


def _rows_of(
    hidden: Tensor, weight: Tensor, labels: Tensor, token_weight: Tensor | None, call: Call, native: bool
) -> Rows:  # fmt: skip
    labels = labels.reshape(-1).contiguous()
    weights = None if token_weight is None else token_weight.reshape(-1).to(wide_type(hidden))
    scale = mean_scale(labels, call.terms, call.reduction, wide_type(hidden), weights, native)
    place = None if call.group is None else vocab_place(weight.shape[0], call.group, weight.device)
    if place is not None and can_look(labels):
        look_at_labels(labels, int(place[1]), call.terms.ignore_index)
    return Rows(labels, weights, scale, place)


Grads = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden [N, D], the weight and the bias


# ---- gradients that forward has made ----


def _waited(ctx: Any, saved: _Saved, dloss: Tensor, wanted: list[Asked]) -> Grads:
    """What waited, times what came back for the loss: rounded once."""
    factor = dloss if saved.scale is None else dloss * saved.scale
    weight, bias = _parameters(ctx, saved)
    hidden = dweight = dbias = None
    if wanted[0] is not Asked.NOT and saved.hidden_waiting is not None:
        hidden = _times(ctx.call, saved.hidden_waiting, factor, ctx.call.product)
    if wanted[1] is not Asked.NOT:
        if saved.weight_waiting is None:  # put off, or more than are put off
            dweight = _in_backward(ctx, saved, dloss, (), [Asked.NOT, wanted[1], Asked.NOT, Asked.NOT], False)[1]
        else:
            moved = has_own_place(weight) and wanted[1] is not Asked.RETURNED
            kind = saved.weight_waiting.dtype if moved else weight.dtype
            sums = _times(ctx.call, saved.weight_waiting, factor, kind)
            dweight = vector_gradient(sums, weight, ctx.main_grads[0], wanted[1])
    if wanted[2] is not Asked.NOT and saved.bias_waiting is not None:
        dbias = vector_gradient(saved.bias_waiting * factor, bias, ctx.main_grads[1], wanted[2])
    return hidden, dweight, dbias


def _times(call: Call, waiting: Tensor, factor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """In its own memory unless another type is asked for: it is not needed again."""
    dtype = dtype or waiting.dtype
    if torch.compiler.is_compiling():
        return cast(waiting * factor, dtype)
    into = waiting if waiting.dtype == dtype else torch.empty_like(waiting, dtype=dtype)
    if call.native and not watched(waiting, factor):
        return scaled(waiting, factor, into)
    return torch.mul(waiting, factor, out=into)


def _as_promised(
    ctx: Any, saved: _Saved, dloss: Tensor | None, dstats: list[Tensor], wanted: list[Asked], fresh: bool
) -> Grads:  # fmt: skip
    """What is finished, if the promise was kept: a CPU looks, a GPU answers with NaN, as looking would make it wait."""
    if not fresh:
        raise RuntimeError("with grad_scale the gradients are made in forward, once: a second backward needs a call without it")
    if dloss is None or (dstats and not torch.compiler.is_compiling()):  # a graph sends zeros to all that leaves it
        raise RuntimeError("with grad_scale only the loss can be differentiated, but a gradient came for one of the stats")
    weight, bias = _parameters(ctx, saved)
    if ctx.added and wanted[1] not in (Asked.GATHERED, Asked.CAPTURED):
        raise RuntimeError(
            "with grad_scale the weight's gradient is in main_grad already, but this pass is torch.autograd.grad's, which leaves "
            "main_grad alone: leave grad_scale away for it"
        )
    truth = _truth(ctx, dloss, dstats)
    hidden = None if saved.hidden_waiting is None else _times(ctx.call, saved.hidden_waiting, truth)
    dweight = dbias = None
    if ctx.added:
        dweight = settled(weight, wanted[1])
        if hidden is None:  # the NaN has to be somewhere
            ready(ctx.main_grads[0])[:1].mul_(truth)
    elif saved.weight_waiting is not None:
        sums = _times(ctx.call, saved.weight_waiting, truth)
        dweight = vector_gradient(sums, weight, ctx.main_grads[0], wanted[1])
    if saved.bias_waiting is not None:
        dbias = vector_gradient(saved.bias_waiting * truth, bias, ctx.main_grads[1], wanted[2])
    return hidden, dweight, dbias


_AS_PROMISED = 1e-6  # of it: loss * 0.1 / 5 sends back what is 0.02 but for an fp32 rounding or two


def _truth(ctx: Any, dloss: Tensor, dstats: list[Tensor]) -> Tensor:
    """1 where the incoming gradient is the one that was promised, and nothing comes for the stats; else NaN."""
    promised: float = ctx.call.grad_scale
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


def _in_backward(
    ctx: Any, saved: _Saved, dloss: Tensor | None, dstats: tuple[Tensor | None, ...], wanted: list[Asked], fresh: bool
) -> Grads:
    """Of the logits that were kept, where nobody has used them up, else of logits that are made again."""
    call: Call = ctx.call
    weight, bias = _parameters(ctx, saved)
    incoming = _incoming(saved, call, dloss, dstats)
    dweight = dbias = hidden = place = sums = bias_sums = None
    if postponed(call.deferred, weight, wanted[1]):
        assert call.deferred is not None
        dweight = call.deferred.keep_work(_LossWork(ctx, saved, incoming), weight, ctx.main_grads[0])
        wanted = [wanted[0], Asked.NOT, *wanted[2:]]
    needs = wanted[0] is not Asked.NOT, wanted[1] is not Asked.NOT, wanted[2] is not Asked.NOT
    tensors = saved.hidden, saved.weight, saved.bias, saved.rows(), saved.logsumexp, saved.entropy
    apart = has_own_place(weight) and wanted[1] is not Asked.RETURNED
    if any(needs) and watched(saved.hidden, saved.weight, saved.bias):
        hidden, sums, bias_sums = traced_backward(*tensors, incoming, call, needs, apart)
    elif any(needs):
        place = place_of(weight, ctx.main_grads[0], wanted[1]) if needs[1] else None
        kept = None if saved.logits is None or not fresh else of_whole_rows(saved.logits, saved.weight.shape[0])
        hidden, sums, bias_sums = made_again(*tensors, incoming, call, needs, apart, place, kept)
    if place is not None:
        dweight = settled(weight, wanted[1])
    elif sums is not None:
        dweight = vector_gradient(sums, weight, ctx.main_grads[0], wanted[1])
    if bias_sums is not None:
        dbias = vector_gradient(bias_sums, bias, ctx.main_grads[1], wanted[2])
    return hidden, dweight, dbias


def _incoming(saved: _Saved, call: Call, dloss: Tensor | None, dstats: tuple[Tensor | None, ...]) -> Incoming:
    """For each row, in fp32."""
    N, wide = saved.labels.shape[0], wide_type(saved.hidden)
    if dloss is None:
        g = saved.logsumexp.new_zeros(N, dtype=wide)
    else:
        g = row_gradient(dloss.to(wide), call.reduction, N, saved.scale, saved.token_weight)
    rows = [None if t is None else t.reshape(N).to(wide).contiguous() for t in dstats[:3]]
    return Incoming(g, *rows)


class _LossWork:
    """A head's deferred gradient: of hidden states and a few numbers a token. The logits are made again when it is made."""

    def __init__(self, ctx: Any, saved: _Saved, incoming: Incoming) -> None:
        call: Call = ctx.call
        self.weight, self.bias, self.call = saved.weight, saved.bias, call._replace(grad_scale=None, deferred=None)
        self.made_with = [t._version for t in (saved.weight, saved.bias) if t is not None]
        kept = {
            "hidden": saved.hidden, "labels": saved.labels, "place": saved.place, "logsumexp": saved.logsumexp,
            "entropy": saved.entropy, **{f"d{name}": t for name, t in zip(Incoming._fields, incoming, strict=True)},
        }  # fmt: skip
        self.tensors = {name: t.detach() for name, t in kept.items() if t is not None}

    def check(self) -> None:
        if self.made_with != [t._version for t in (self.weight, self.bias) if t is not None]:
            raise RuntimeError("a head whose gradient is deferred was written to since: flush() before the optimizer's step")

    def start(self) -> None:
        pass

    def add(self, coming: Any, main_grad: Tensor) -> None:
        kept = self.tensors.get
        hidden, labels, lse = self.tensors["hidden"], self.tensors["labels"], self.tensors["logsumexp"]
        head = head_of(hidden, self.weight, self.bias, Rows(labels, None, None, kept("place")), self.call)
        plan = plan_call(hidden, self.weight, labels, self.call, (False, True, False), main_grad, "again")
        incoming = Incoming(self.tensors["dloss"], *(kept(f"d{name}") for name in Incoming._fields[1:]))
        found = RowLosses(lse, lse, None, kept("entropy"))
        gradients_again(head, plan, found, incoming, Gradients(None, with_memory(main_grad), None), True)


def _token_weight_gradient(ctx: Any, saved: _Saved, dloss: Tensor | None, wanted: Asked) -> Tensor | None:
    """Of a mean: how much more a row's loss is than the mean, as its weight is in what is divided by."""
    if wanted is Asked.NOT or dloss is None or saved.losses is None or saved.token_weight is None:
        return None
    losses = saved.losses
    if saved.scale is not None:
        kept = saved.labels != ctx.call.terms.ignore_index
        mean = torch.where(kept, losses * saved.token_weight, 0.0).sum() * saved.scale
        losses = torch.where(kept, losses - mean, 0.0) * saved.scale
    dtype, shape = ctx.given
    return (losses * dloss.reshape(-1)).to(dtype).view(shape)


apply = bare_apply(_LinearCrossEntropy)
