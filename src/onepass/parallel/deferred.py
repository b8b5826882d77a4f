"""Weights' gradients put off: backward keeps what their products are made of, and `flush` makes them.

A pipeline stage that waits for its neighbours has time then, and a head's product is its largest. What is kept is this rank's
own, as backward has it: under sequence parallelism the rows of the other ranks are gathered in `flush`, those of the next product
while this one is made, so that no more than two are there at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from onepass.parallel.collectives import Pending
from onepass.parallel.product import Spread, rows_of, start_all_rows
from onepass.runtime.main_grad import Asked, add_gradient, capturing, keeps_main_grad, settled

_NOTHING = object()  # is on its way


class Work(Protocol):
    """What a weight's gradient is made of."""

    tensors: dict[str, Tensor]  # nobody may write to them before it is made

    def check(self) -> None:
        """Raise where it can't be made any more."""

    def start(self) -> Any:
        """What of other ranks is needed, on its way."""

    def add(self, coming: Any, main_grad: Tensor) -> None:
        """Make the gradient, of what `start` has returned too, and add it."""


class _Product:
    """dy.T @ x, of rows that other ranks may have too."""

    def __init__(self, dy: Tensor, x: Tensor, spread: Spread | None) -> None:
        self.tensors, self.spread = {"dy": dy, "x": x}, spread

    def check(self) -> None:
        pass

    def start(self) -> tuple[Pending, Pending]:
        return start_all_rows(self.tensors["dy"], self.tensors["x"], self.spread)

    def add(self, coming: tuple[Pending, Pending], main_grad: Tensor) -> None:
        dy, x = coming
        add_gradient(main_grad, rows_of(dy.wait()), rows_of(x.wait()))


class _Kept(NamedTuple):
    """A gradient to be made."""

    work: Work
    weight: Any
    main_grad: Tensor
    versions: dict[str, int]  # of the work's tensors
    stream: torch.cuda.Stream | None  # on which they were made
    captured: bool  # for a CUDA graph, each replay of which makes other ones

    def check(self) -> None:
        if self.captured and not capturing(self.main_grad):
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
    """Put weights' gradients off until `flush`, which adds them to main_grad.

    Megatron's defer_embedding_wgrad_compute, for any layer.

        deferred = DeferredWgrad()
        logits = onepass.linear(hidden, head, deferred=deferred)     # in each microbatch
        loss(logits).backward()                                      # keeps hidden and the gradient of logits
        ...
        deferred.flush()                                             # once a step, before gradients are reduced

    Each weight must carry `main_grad`. With `MainGrads` a bucket waits until its weights' gradients are flushed, and `finish`
    raises where they are not; whoever reduces gradients in another way calls `check_flushed` before. A pass of
    `torch.autograd.grad` by the weight gets its gradient at once, and a bias's is never put off: it is a sum, no product.

    In torch.distributed.pipelining, zero-bubble schedules included, `dw_builder` makes the weights' products where the schedule
    has them, straight into main_grad:

        deferred.attach(stage_module)
        stage = PipelineStage(stage_module, ..., dw_builder=deferred.dw_builder)

    Several weights may share one; a compiled graph is left for the call (with fullgraph=True that is an error).

    Args:
        limit: how many gradients of one weight are kept at most; those after are made in backward, as without. 0 keeps all.
            Megatron's wgrad_deferral_limit: the first microbatches' are put off.
    """

    def __init__(self, limit: int = 0) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool):
            raise TypeError(f"limit must be a number of gradients, but is {limit!r}")
        if limit < 0:
            raise ValueError(f"limit must be 0, for all of them, or more, but is {limit}")
        self.limit = limit
        self._kept: list[_Kept] = []
        self._handed: list[list[_Kept]] = []  # to functions that `dw_builder` returned
        self._counts: dict[int, int] = {}  # by weight

    # ---- in backward ----

    def takes(self, weight: Tensor, wanted: Asked) -> bool:
        """Whether this gradient is to be kept."""
        return wanted is Asked.GATHERED and not (self.limit and self._counts.get(id(weight), 0) >= self.limit)

    def keep(self, dy: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, spread: Spread | None) -> Tensor | None:
        """Keep the product dy.T @ x for later, of this rank's dy and x; what autograd gets for it."""
        return self.keep_work(_Product(dy.detach(), x.detach(), spread), weight, main_grad)

    def keep_work(self, work: Work, weight: Tensor, main_grad: Tensor | None) -> Tensor | None:
        """The same of any gradient."""
        assert main_grad is not None  # `check_deferred` saw to it
        owner = _owner(weight)
        if owner is not None:
            owner.hold(weight)
        stream = torch.cuda.current_stream(main_grad.device) if main_grad.is_cuda else None
        versions = {name: tensor._version for name, tensor in work.tensors.items()}
        self._kept.append(_Kept(work, weight, main_grad, versions, stream, capturing(main_grad)))
        self._counts[id(weight)] = self._counts.get(id(weight), 0) + 1
        return settled(weight)

    # ---- later ----

    def flush(self) -> None:
        """Make all products that are kept, and add them to main_grad. Collective under sequence parallelism."""
        for batch in [*self._handed, self._kept]:
            self._run(batch)

    def dw_builder(self) -> Callable[[], None]:
        """What the last backward kept, as the function that adds it to main_grad: PipelineStage's ``dw_builder``."""
        batch, self._kept = self._kept, []
        self._handed.append(batch)
        return partial(self._run, batch)

    @torch.no_grad()
    def _run(self, batch: list[_Kept]) -> None:
        """What could not be added stays in the batch."""
        for each in batch:  # nothing is written where something can't be
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
        """Throw away what is kept, of a step that is given up."""
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
        """Raise where something is kept: for whoever is about to reduce the gradients."""
        if len(self):
            raise RuntimeError(f"{len(self)} deferred gradients are not in main_grad yet: flush() before gradients are reduced")

    # ---- what it is ----

    def attach(self, module: nn.Module) -> None:
        """Put off the gradients of all layers in module that can: those that have an attribute `deferred`."""
        layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "deferred")]
        if not layers:
            raise ValueError("module must have a layer that takes `deferred`, as onepass.nn.Linear does, but has none")
        for layer in layers:
            layer.deferred = self

    def __len__(self) -> int:
        """How many gradients are kept."""
        return sum(self._counts.values())

    def __bool__(self) -> bool:
        return True  # also while it is empty

    @property
    def nbytes(self) -> int:
        """The memory of all that is kept."""
        batches = [*self._handed, self._kept]
        kept = [t.untyped_storage() for batch in batches for each in batch for t in each.work.tensors.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    def __repr__(self) -> str:
        return f"DeferredWgrad(limit={self.limit}, {len(self)} kept)"

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredWgrad:
        return self  # a copied module's gradients are put off to the same flush

    def __reduce__(self) -> tuple[type[DeferredWgrad], tuple[int]]:
        return DeferredWgrad, (self.limit,)  # gradients are a step's, and no checkpoint's


def _owner(weight: Any) -> Any:
    """The `MainGrads` that has the weight's main_grad, or None."""
    found = getattr(weight, "main_grads", None)
    return None if found is None else found()


def check_deferred(deferred: DeferredWgrad | None, weight: Tensor) -> DeferredWgrad | None:
    """Raise where the weight's gradient could not be put off; None where nobody will ask for it."""
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
