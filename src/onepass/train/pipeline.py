"""A step's microbatches through the stages of a pipeline, by the schedules of torch.distributed.pipelining.

Zero-bubble is torch's ScheduleInterleavedZeroBubble: unlike its V-shaped one it takes any number of stages a rank, in the same
places as the other schedules, so that a checkpoint's parts don't move. Weights' products are put off to where it has them by
`DeferredWgrad`, straight into main_grad, and not by torch's own split of a backward, which leaves them in .grad in the weights'
type, and which PyTorch 2.11 can't do with an autograd.Function.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from onepass.gpt import Config
from onepass.parallel import DeferredWgrad
from onepass.train.batches import TokenBatch
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options
from onepass.train.stages import Stages, microbatches
from onepass.train.steps import TrainSteps
from onepass.train.updates import Update

_OF_SEVERAL = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


class PipelinedSteps(TrainSteps):
    """Runs this rank's stages as the pipeline's other ranks run theirs. All of them get the loss."""

    model: Stages

    def __init__(self, model: Stages, config: Config, options: Options, layout: ParallelLayout, update: Update) -> None:
        super().__init__(model, config, options, update)
        self._microbatches = microbatches(config, options, layout.data.size)
        # Of one stage the last backward is the step's, and may start the reductions. Another's would come too late.
        self._one_stage = options.pipeline_schedule == "1f1b"
        self._head_later = self._deferring_head()
        self._schedule = self._scheduled(layout.device)

    def run(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        self.update.begin()
        given = (batch.tokens.contiguous(),) if 0 in self.model.own else ()  # torch 2.11 wants the example's strides
        labels = {"labels": batch.labels, "target": batch.labels} if self.model.last in self.model.own else {}
        shares: list[Tensor] = []
        with nullcontext() if self._one_stage else self.update.accumulate():
            self._schedule.step(*given, losses=shares, return_outputs=False, **labels)
        if self._head_later is not None:
            self._head_later.flush()  # the stages before this one have backwards to run yet
        norm = self.update.finish()
        loss = torch.stack([share.detach() for share in shares]).sum() if shares else None
        return self.model.told(loss, (), torch.float32, batch.tokens.device), norm

    def _deferring_head(self) -> DeferredWgrad | None:
        if not self.config.defer_embedding_wgrad_compute or self.model.output_layer is None:
            return None
        return DeferredWgrad(self.config.wgrad_deferral_limit)

    # ---- the schedule ----

    def _scheduled(self, device: torch.device) -> Any:
        builder = self._weights_later() if self.options.pipeline_schedule == "zero-bubble" else None
        if self._head_later is not None and self.model.output_layer is not None:
            self._head_later.attach(self.model.output_layer)
        stages: list[Any] = [self._stage(number, device, builder) for number in self.model.own]
        how: dict[str, Any] = {"loss_fn": self._share, "scale_grads": False}
        if self._one_stage:
            return Schedule1F1B(stages[0], self._microbatches, **how)
        return _OF_SEVERAL[self.options.pipeline_schedule](stages, self._microbatches, **how)

    def _weights_later(self) -> Any:
        """Where the weights' gradients wait for the schedule. Those that ops don't add to main_grad don't."""
        deferred = DeferredWgrad()
        if self.config.gradient_accumulation_fusion:
            deferred.attach(self.model)
        return deferred.dw_builder

    def _share(self, loss: Tensor, labels: Tensor) -> Tensor:
        """How much a microbatch's loss, which its stage made with the labels, is of the step's."""
        return loss * (1.0 / self._microbatches)

    def _stage(self, number: int, device: torch.device, builder: Any) -> PipelineStage:
        """With examples of what it takes and returns, so that torch need not try it on something."""
        model, batch, length = self.model, self.options.micro_batch_size, self.options.seq_length
        tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
        shape = model.hidden_shape(batch, length)
        hidden = torch.empty(shape, dtype=self.config.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return _Stage(
            model.own[number],
            number,
            model.last + 1,
            device,
            input_args=hidden if number else tokens,
            output_args=loss if number == model.last else hidden,
            group=model.pipeline.group,
            dw_builder=builder,
            update=self.update,
        )


class _Stage(PipelineStage):
    """All of its backwards but the last, of a step, come before the update's reductions."""

    def __init__(self, *args: Any, update: Update, **options: Any) -> None:
        super().__init__(*args, **options)
        self.update = update

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with nullcontext() if last_backward else self.update.accumulate():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
