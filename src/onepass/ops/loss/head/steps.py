"""The forward and the backward of a head's row loss as registered ops, which plan a call and run its passes.

Called directly, forward runs whichever mode the planner finds best. A graph has to know what its ops return before sizes are
known, so there the mode follows from the options alone (`_graph_mode`); the planner still divides the call when the op runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onepass.gradients.main_grad import GradRequest, accumulation_target
from onepass.ops.loss.head.operands import HeadOptions, HeadTensors, head_of, wide_type
from onepass.ops.loss.head.passes import (
    find_losses,
    gradients_of_kept_logits,
    keep_logits,
    make_all_logits,
    recompute_gradients,
)
from onepass.ops.loss.head.row_loss import MADE_IN_FORWARD, RowLoss
from onepass.ops.loss.head.sums import Gradients, Needs, new_gradients
from onepass.runtime.op import Registered

Accumulate = tuple[Tensor, Tensor | None, GradRequest]  # the weight, its main_grad and how the pass asks for its gradient


def _graph_mode(options: HeadOptions, needs: Needs) -> str:
    if not any(needs):
        return "loss_only"
    if options.grad_scale is not None:
        return "known_grad_scale"
    # a graph sends zeros to statistics that nobody differentiates
    return "recompute" if options.reduction == "none" or options.differentiable() else "grad_in_forward"


class HeadOps:
    """The two registered ops of a row loss.

        ops = HeadOps("linear_cross_entropy", CrossEntropyRows, LossOptions, TokenRows, KeptNumbers, RowGradients, "Tensor, ...")

    Args:
        name: the public op's.
        loss: the `RowLoss`.
        options, rows, kept, incoming: the records that it takes.
        found: the schema of its record `found`. `Registered` takes an empty vector in the place of a `Tensor?` for None, so what
            may have no rows is declared `Tensor`; callers know by options and `needs` whether there is such.
    """

    def __init__(
        self, name: str, loss: type[RowLoss], options: type[Any], rows: type[Any], kept: type[Any], incoming: type[Any],
        found: str,
    ) -> None:  # fmt: skip
        self.loss, self.rows, self.kept, self.incoming = loss, rows, kept, incoming
        records = HeadTensors, rows, kept, incoming, options, Needs
        of_call = f"{options.__name__} options, Needs needs, bool separate_sum"
        gradients = "Tensor?, Tensor?, Tensor, Tensor?, Tensor?"
        self.forward = Registered(
            f"{name}_forward(HeadTensors tensors, {rows.__name__} rows, {of_call}) -> ({found}, {gradients}, Tensor?)",
            self._forward, self._forward_fake, *records, dispatched=self._forward_in_graph,
        )  # fmt: skip
        self.backward = Registered(
            f"{name}_backward(HeadTensors tensors, {rows.__name__} rows, {kept.__name__} kept, {incoming.__name__} incoming, "
            f"{of_call}) -> ({gradients})",
            self._backward, self._backward_fake, *records,
        )  # fmt: skip

    def _forward(
        self, tensors: HeadTensors, rows: Any, options: Any, needs: Needs, separate_sum: bool, *,
        accumulate: Accumulate | None = None, mode: str | None = None, own: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return what was found of the rows, the `Gradients` that are made already, and logits that wait.

        Args:
            separate_sum: the weight's gradient goes to main_grad, and is rounded there only.
            accumulate: finished gradients of the weight are added to main_grad at once, and dweight is None.
            mode: the only one that will do, or None.
            own: numbers of hidden's rows that are computed, where no gradient is needed; None for all.
        """
        plan = self.loss.plan(tensors, rows, options, needs, None if accumulate is None else accumulate[1], mode)
        head = head_of(tensors, rows.place, options, options.product, own)
        loss = self.loss(head, rows, options, plan.mode)
        if plan.mode not in MADE_IN_FORWARD:
            pieces, logits = self.loss.forward_pieces(head, options, plan), None
            if plan.mode == "keep_logits":
                logits = keep_logits(head, loss, *pieces)
            else:
                find_losses(head, loss, *pieces)
            return *loss.found, *Gradients(), logits
        target = None
        if plan.mode == "known_grad_scale" and needs.need_weight and accumulate is not None:
            target = accumulation_target(*accumulate)
        made = _new_in_forward(tensors, options, needs, separate_sum, plan.mode, target)
        sums = made if target is None else made._replace(weight=target)
        find_losses(head, loss, plan.rows, head.columns, sums, target is not None)
        return *loss.found, *made, None

    def _forward_in_graph(
        self, tensors: HeadTensors, rows: Any, options: Any, needs: Needs, separate_sum: bool
    ) -> tuple[Tensor | None, ...]:
        return self._forward(tensors, rows, options, needs, separate_sum, mode=_graph_mode(options, needs))

    def _forward_fake(
        self, tensors: HeadTensors, rows: Any, options: Any, needs: Needs, separate_sum: bool
    ) -> tuple[Tensor | None, ...]:
        made, mode = Gradients(), _graph_mode(options, needs)
        if mode in MADE_IN_FORWARD:
            made = _new_in_forward(tensors, options, needs, separate_sum, mode)
        return *self.loss.empty(tensors, rows, options), *made, None

    def _backward(
        self, tensors: HeadTensors, rows: Any, kept: Any, incoming: Any, options: Any, needs: Needs, separate_sum: bool, *,
        accumulate: Accumulate | None = None, logits: Tensor | None = None, used: bool = False,
    ) -> Gradients:  # fmt: skip
        """Return the gradients, hidden's as [tokens, D], from `logits` that waited or from recomputed ones.

        With `accumulate`, the weight's is added to main_grad if that can be done part by part, and dweight is None. `used` logits
        hold their gradient, unless that is narrower: they are made again in place, by forward's products.
        """
        head = head_of(tensors, rows.place, options, options.product)
        loss = self.loss(head, rows, options, "recompute", kept, incoming)
        target = accumulation_target(*accumulate) if needs.need_weight and accumulate is not None else None
        made = _new_in_backward(tensors, options, needs, separate_sum, target)
        sums = made if target is None else made._replace(weight=target)
        if logits is not None:
            pieces = self.loss.forward_pieces(head, options)
            if used and head.narrow_gradient is None:
                make_all_logits(head, *pieces, logits)
            gradients_of_kept_logits(head, loss, pieces[0], logits, sums, target is not None)
        else:
            plan = self.loss.plan(tensors, rows, options, needs, target, "recompute", kept)
            recompute_gradients(head, loss, plan.rows, plan.columns, sums, target is not None)
        return made

    def _backward_fake(
        self, tensors: HeadTensors, rows: Any, kept: Any, incoming: Any, options: Any, needs: Needs, separate_sum: bool
    ) -> Gradients:
        return _new_in_backward(tensors, options, needs, separate_sum)


# ---- memory of gradients ----


def _new_in_forward(
    tensors: HeadTensors, options: HeadOptions, needs: Needs, separate_sum: bool, mode: str, target: Tensor | None = None
) -> Gradients:
    """Those that wait are sums. target: where the weight's goes to, if to no memory of its own."""
    known, wide = mode == "known_grad_scale", wide_type(tensors.weight)
    weight = tensors.weight.dtype if known and not separate_sum else wide
    return new_gradients(tensors, needs, options.product if known else wide_type(tensors.hidden), weight, target)


def _new_in_backward(
    tensors: HeadTensors, options: HeadOptions, needs: Needs, separate_sum: bool, target: Tensor | None = None
) -> Gradients:
    weight = wide_type(tensors.weight) if separate_sum else tensors.weight.dtype
    return new_gradients(tensors, needs, options.product, weight, target)
