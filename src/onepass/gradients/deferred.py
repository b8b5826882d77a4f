"""Deferred weight gradients: backward keeps the operands of their products, and `flush` makes them.

A pipeline stage has time while it waits for its neighbours, and a head's product is its largest. Backward keeps this rank's own
rows. Under sequence parallelism `flush` gathers the other ranks' rows, those of the next product under the current one, so that
at most two sets exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from onepass.distributed.collectives import Pending
from onepass.distributed.tensor_parallel import TPLayout, rows_of, start_gather_rows
from onepass.gradients.main_grad import GradRequest, add_gradient, is_capturing, keeps_main_grad, mark_added, placeholder

_NOTHING = object()  # no gather is under way


class DeferredWork(Protocol):
    """A weight gradient that can be made later."""

    tensors: dict[str, Tensor]  # its operands, which nobody may write before it is made

    def check(self) -> None:
        """Raise where it can no longer be made."""

    def start(self) -> Any:
        """Start the collectives for what other ranks have, and return them."""

    def add(self, coming: Any, main_grad: Tensor) -> None:
        """Make the gradient, with what `start` returned, and add it to main_grad."""


class _ProductWork:
    """dy.T @ x over the rows of all ranks."""

    def __init__(self, dy: Tensor, x: Tensor, layout: TPLayout | None) -> None:
        self.tensors, self.layout = {"dy": dy, "x": x}, layout

    def check(self) -> None:
        pass

    def start(self) -> tuple[Pending, Pending]:
        return start_gather_rows(self.tensors["dy"], self.tensors["x"], self.layout)

    def add(self, coming: tuple[Pending, Pending], main_grad: Tensor) -> None:
        dy, x = coming
        add_gradient(main_grad, rows_of(dy.wait()), rows_of(x.wait()))


class _DeferredGradient(NamedTuple):
    """A kept gradient, and what decides whether it can still be made."""

    work: DeferredWork
    weight: Any
    main_grad: Tensor
    versions: dict[str, int]  # of the work's tensors
    stream: torch.cuda.Stream | None  # that made the operands
    captured: bool  # in a CUDA graph, whose replays make other operands

    def check(self) -> None:
        if self.captured and not is_capturing(self.main_grad):
            raise RuntimeError(
                "a deferred gradient was kept in the capture of a CUDA graph, which must flush() too: no replay would make it"
            )
        for name, tensor in self.work.tensors.items():
            if tensor._version != self.versions[name]:
                raise RuntimeError(
                    f"{name} of a deferred gradient, of shape {tuple(tensor.shape)}, was written to after it was kept: "
                    "flush() before it is, or write to a copy"
                )
        self.work.check()
        owner = _owner(self.weight)
        if owner is not None:
            owner.check_open(self.weight)

    def start(self) -> Any:
        if self.stream is not None:
            here = torch.cuda.current_stream(self.main_grad.device)
            if here != self.stream:
                here.wait_stream(self.stream)
                for tensor in self.work.tensors.values():
                    tensor.record_stream(here)
        return self.work.start()


class DeferredWgrad:
    """Defer weight gradients until `flush`, which adds them to main_grad.

    Megatron's defer_embedding_wgrad_compute, for any layer.

        deferred = DeferredWgrad()
        logits = onepass.linear(hidden, head, deferred=deferred)     # in each microbatch
        loss(logits).backward()                                      # keeps hidden and the gradient of logits
        ...
        deferred.flush()                                             # once a step, before gradients are reduced

    Each weight must carry `main_grad`. With `MainGrads` a bucket waits until its weights' gradients are flushed, and `finish`
    raises where they are not. If you reduce gradients in another way, call `check_flushed` before. `torch.autograd.grad` by the
    weight returns its gradient at once. A bias's gradient is never deferred: it is a sum, not a product. A layer whose weight's
    gradient is a product in eight bits (`precision`) keeps codes with the scales of their step: half the bytes.

    In torch.distributed.pipelining, zero-bubble schedules included, `dw_builder` makes the weights' products where the schedule
    places them, straight into main_grad:

        deferred.attach(stage_module)
        stage = PipelineStage(stage_module, ..., dw_builder=deferred.dw_builder)

    Several weights may share one. A call breaks a compiled graph, which is an error with fullgraph=True.

    Args:
        limit: how many gradients of one weight are kept at most. Backward makes the later ones. 0 keeps all. As Megatron's
            wgrad_deferral_limit, it defers the first microbatches' gradients.
    """

    def __init__(self, limit: int = 0) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool):
            raise TypeError(f"limit must be a number of gradients, but is {limit!r}")
        if limit < 0:
            raise ValueError(f"limit must be 0, for all of them, or more, but is {limit}")
        self.limit = limit
        self._kept: list[_DeferredGradient] = []
        self._handed: list[list[_DeferredGradient]] = []  # batches of functions that `dw_builder` returned
        self._counts: dict[int, int] = {}  # by weight

    # ---- in backward ----

    def takes(self, weight: Tensor, request: GradRequest) -> bool:
        """Whether this gradient is kept for later."""
        return request is GradRequest.ACCUMULATE and not (self.limit and self._counts.get(id(weight), 0) >= self.limit)

    def keep(self, dy: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, layout: TPLayout | None) -> Tensor | None:
        """Keep this rank's dy and x, for the product dy.T @ x. Return what autograd gets."""
        return self.keep_work(_ProductWork(dy.detach(), x.detach(), layout), weight, main_grad)

    def keep_work(self, work: DeferredWork, weight: Tensor, main_grad: Tensor | None) -> Tensor | None:
        """Keep any gradient for later. Return what autograd gets."""
        assert main_grad is not None  # `check_deferred` saw to it
        grad = placeholder(weight)  # first: it may find no memory
        self._add_work(work, weight, main_grad)
        mark_added(weight)
        return grad

    def add_product(self, dy: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor, layout: TPLayout | None) -> None:
        """Keep this rank's dy and x of a backward that is over, whose autograd has what it needs."""
        self._add_work(_ProductWork(dy.detach(), x.detach(), layout), weight, main_grad)

    def _add_work(self, work: DeferredWork, weight: Tensor, main_grad: Tensor) -> None:
        owner = _owner(weight)
        if owner is not None:
            owner.hold(weight)
        stream = torch.cuda.current_stream(main_grad.device) if main_grad.is_cuda else None
        versions = {name: tensor._version for name, tensor in work.tensors.items()}
        self._kept.append(_DeferredGradient(work, weight, main_grad, versions, stream, is_capturing(main_grad)))
        self._counts[id(weight)] = self._counts.get(id(weight), 0) + 1

    # ---- later ----

    def flush(self) -> None:
        """Make all kept products, and add them to main_grad. Collective under sequence parallelism."""
        for batch in [*self._handed, self._kept]:
            self._run(batch)

    def dw_builder(self) -> Callable[[], None]:
        """Return a function that makes what the last backward kept: PipelineStage's ``dw_builder``."""
        batch, self._kept = self._kept, []
        self._handed.append(batch)
        return partial(self._run, batch)

    @torch.no_grad()
    def _run(self, batch: list[_DeferredGradient]) -> None:
        """Make the batch's gradients. Those that were not added stay in the batch."""
        for each in batch:  # before anything is written
            each.check()
        coming: Any = _NOTHING
        while batch:
            each = batch[0]
            first = each.start() if coming is _NOTHING else coming
            coming = batch[1].start() if len(batch) > 1 else _NOTHING
            each.work.add(first, each.main_grad)
            del batch[0]
            self._forget(each.weight)
            owner = _owner(each.weight)
            if owner is not None and id(each.weight) not in self._counts:
                owner.unhold(each.weight)
        self._handed = [other for other in self._handed if other is not batch]

    def clear(self) -> None:
        """Discard what is kept, when a step is abandoned."""
        for batch in [*self._handed, self._kept]:
            for each in batch:
                self._forget(each.weight)
                owner = _owner(each.weight)
                if owner is not None:
                    owner.give_up(each.weight)
            batch.clear()
        self._handed.clear()

    def _forget(self, weight: Tensor) -> None:
        left = self._counts.pop(id(weight)) - 1
        if left:
            self._counts[id(weight)] = left

    def check_flushed(self) -> None:
        """Raise where gradients are kept. Call it before reducing gradients."""
        if len(self):
            raise RuntimeError(f"{len(self)} deferred gradients are not in main_grad yet: flush() before gradients are reduced")

    # ---- container ----

    def attach(self, module: nn.Module) -> None:
        """Defer the gradients of all layers in module that have an attribute `deferred`."""
        layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "deferred")]
        if not layers:
            raise ValueError("module must have a layer that takes `deferred`, as onepass.nn.Linear does, but has none")
        for layer in layers:
            layer.deferred = self

    def __len__(self) -> int:
        """Return how many gradients are kept."""
        return sum(self._counts.values())

    def __bool__(self) -> bool:
        return True  # also when empty

    @property
    def nbytes(self) -> int:
        """The bytes of all kept tensors."""
        batches = [*self._handed, self._kept]
        kept = [t.untyped_storage() for batch in batches for each in batch for t in each.work.tensors.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    def __repr__(self) -> str:
        return f"DeferredWgrad(limit={self.limit}, {len(self)} kept)"

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredWgrad:
        return self  # a copied module's gradients wait for the same flush

    def __reduce__(self) -> tuple[type[DeferredWgrad], tuple[int]]:
        return DeferredWgrad, (self.limit,)  # gradients belong to a step, not to a checkpoint


def is_deferred(deferred: DeferredWgrad | None, weight: Tensor, request: GradRequest) -> bool:
    """Whether backward keeps the operands of the weight's gradient instead of making it."""
    return deferred is not None and deferred.takes(weight, request)


def graph_break_if_deferred(deferred: DeferredWgrad | None) -> None:
    """Break the graph in the forward of a Function that may defer a gradient: a compiled graph can't keep its operands."""
    if deferred is not None and torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="onepass: a compiled graph can't keep what a deferred gradient is made of")


def _owner(weight: Any) -> Any:
    """Return the `MainGrads` that has the weight's main_grad, or None."""
    found = getattr(weight, "main_grads", None)
    return None if found is None else found()


def check_deferred(deferred: DeferredWgrad | None, weight: Tensor) -> DeferredWgrad | None:
    """Raise where the weight's gradient can't be deferred. Return None where no gradient will be asked for."""
    if deferred is None:
        return None
    if not isinstance(deferred, DeferredWgrad):
        raise TypeError(f"deferred must be a DeferredWgrad or None, but is a {type(deferred).__name__}")
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return None
    if not keeps_main_grad(weight):
        raise ValueError(
            "cannot defer the gradient of a weight without main_grad: give it one (`onepass.parallel.MainGrads` does), or leave "
            "deferred away. Megatron-FSDP's, which is there in backward only, can't be put off either"
        )
    return deferred
