"""The last stage's copy of the embedding, which multi-token prediction reads there.

The first stage owns the embedding: it alone has an optimizer's state for it and saves it, and the gradient's norm has it once.
The copy's gradients are added to the owner's before those are reduced, and its weights come from the owner after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.parallel import MainGrads
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options
from onepass.train.stages import Stages
from onepass.train.updates import MainGradUpdate, lone_group


class CopiedEmbeddingUpdate(MainGradUpdate):
    """The update of a pipeline whose last stage has a copy of the embedding."""

    def __init__(self, model: Stages, options: Options, layout: ParallelLayout) -> None:
        super().__init__(model, options, layout)
        self._owned: list[Any] = [] if model.embedding is None else [*model.embedding.parameters()]
        self._copies: list[Any] = [] if model.embedding_copy is None else [*model.embedding_copy.parameters()]
        self._copies_grads = MainGrads(self._copies, group=lone_group(layout)) if self._copies else None
        self._send_weights()

    def begin(self) -> None:
        for parameter in self._owned:
            self.main_grads.give_up(parameter)  # where a step was interrupted
        super().begin()
        for parameter in self._owned:
            self.main_grads.hold(parameter)
        if self._copies_grads is not None:
            self._copies_grads.zero_()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with super().accumulate():
            if self._copies_grads is None:
                yield
            else:
                with self._copies_grads.accumulate():
                    yield

    def finish(self) -> Tensor:
        if self._copies_grads is not None:
            self._copies_grads.finish()
        grads = [torch.empty_like(parameter.main_grad) for parameter in self._owned]
        self._exchange([copy.main_grad for copy in self._copies], grads, source=self.layout.pipeline.size - 1, target=0)
        for parameter, grad in zip(self._owned, grads, strict=True):
            parameter.main_grad.add_(grad)
            self.main_grads.unhold(parameter)
        return super().finish()

    def publish(self) -> None:
        super().publish()
        self._send_weights()

    def _step(self) -> None:
        super()._step()
        self._send_weights()

    def _send_weights(self) -> None:
        owned, copies = ([parameter.detach() for parameter in each] for each in (self._owned, self._copies))
        self._exchange(owned, copies, source=0, target=self.layout.pipeline.size - 1)

    def _exchange(self, sent: list[Tensor], received: list[Tensor], source: int, target: int) -> None:
        """Send tensors from one rank of the pipeline to another. Others do nothing."""
        group, rank = self.layout.pipeline.group, self.layout.pipeline.rank
        for tensor in sent if rank == source else ():
            dist.send(tensor, group=group, group_dst=target)
        for tensor in received if rank == target else ():
            dist.recv(tensor, group=group, group_src=source)
