"""Runs a step's microbatches through pipeline stages, by the schedules of torch.distributed.pipelining.

zero-bubble is torch's ScheduleInterleavedZeroBubble. Unlike the V-shaped schedule it takes any number of stages per rank. It
places them on the same ranks as the other schedules do, so a checkpoint's shards stay where they are. `DeferredWgrad` postpones
weight gradients to the schedule's slots for them, and adds them straight to main_grad. torch's own split of backward is not used:
it leaves gradients in .grad in the weights' dtype, and PyTorch 2.11 can't split an autograd.Function.
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
    """Runs this rank's stages of the pipeline by the schedule. All ranks of the pipeline get the loss."""

    model: Stages

    def __init__(self, model: Stages, config: Config, options: Options, layout: ParallelLayout, update: Update) -> None:
        super().__init__(model, config, options, update)
        self._microbatches = microbatches(config, options, layout.data.size)
        # With one stage, its last backward is the step's last and may start reductions. Another stage's backward would follow it.
        self._one_stage = options.pipeline_schedule == "1f1b"
        self._head_later = self._deferring_head()
        self._schedule = self._scheduled(layout.device)

    def run(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        self.update.begin()
        inputs = (batch.tokens.contiguous(),) if 0 in self.model.own else ()  # torch 2.11 requires the example's strides
        labels = {"labels": batch.labels, "target": batch.labels} if self.model.last in self.model.own else {}
        labels |= {"tokens": batch.tokens} if labels and self.config.mtp_num_layers else {}
        shares: list[Tensor] = []
        with nullcontext() if self._one_stage else self.update.accumulate():
            self._schedule.step(*inputs, losses=shares, return_outputs=False, **labels, **batch.documents)
        if self._head_later is not None:
            self._head_later.flush()  # while earlier stages still run backwards
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
        """Return a dw_builder, which defers weight gradients to the schedule's slots. Only ops that add to main_grad defer."""
        deferred = DeferredWgrad()
        if self.config.gradient_accumulation_fusion:
            deferred.attach(self.model)
        return deferred.dw_builder

    def _share(self, loss: Tensor, labels: Tensor) -> Tensor:
        """Return a microbatch's share of the step's loss. The last stage has computed `loss` with the labels."""
        return loss * (1.0 / self._microbatches)

    def _stage(self, number: int, device: torch.device, builder: Any) -> PipelineStage:
        """Create a stage with example inputs and outputs, so that torch infers no shapes by a trial forward."""
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
    """A stage that runs all backwards of a step but the last in the update's `accumulate()`, before reductions start."""

    def __init__(self, *args: Any, update: Update, **options: Any) -> None:
        super().__init__(*args, **options)
        self.update = update

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with nullcontext() if last_backward else self.update.accumulate():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
