"""Forward and backward of a step's microbatches, run one after another or as replays of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.gpt import Config
from onepass.kernels.philox import seeds_on_device
from onepass.runtime.cuda_graph import capture, free_memory, restored_generator, side_stream
from onepass.train.batches import TokenBatch
from onepass.train.options import Options
from onepass.train.updates import Update

_WARM = 2  # microbatches before a graph is captured
_FEWEST_BOUNDARIES = 16  # of a sequence, in a graph for packed ones


class TrainSteps:
    """Runs a model's microbatches. The update handles their gradients.

    Args:
        autocast: the autocast dtype of PyTorch operators, for parameters of a wider dtype; None runs without autocast.

    Attributes:
        replays: whether microbatches are a CUDA graph's replays.
    """

    replays = False

    def __init__(
        self, model: nn.Module, config: Config, options: Options, update: Update, autocast: torch.dtype | None = None
    ) -> None:
        self.model, self.config, self.options, self.update, self.autocast = model, config, options, update, autocast
        self._known = _takes_grad_scale(config)

    def run(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the batch and the norm of its gradient. Afterwards the update can step."""
        self.update.begin()
        parts = batch.microbatches(self.options.micro_batch_size)
        total = torch.zeros((), dtype=torch.float32, device=batch.tokens.device)
        try:
            for at, part in enumerate(parts):
                last = at == len(parts) - 1
                with nullcontext() if last else self.update.accumulate():
                    total += self._micro(part, 1.0 / len(parts))
        except RuntimeError as error:  # out of memory, most likely
            if not (left := self.update.describe_broken_step()):
                raise
            raise type(error)(f"{error}. {left}") from error
        return total / len(parts), self.update.finish()

    def _micro(self, part: TokenBatch, share: float) -> Tensor:
        """Run forward and backward of a microbatch, with its gradient multiplied by `share`."""
        options: dict[str, Any] = {"grad_scale": share} if self._known else {}
        with self._seeds():
            with self._wide():
                loss: Tensor = self.model(part.tokens, part.labels, **part.documents, **options)
            (loss * share).backward()
        return loss.detach()

    def _seeds(self) -> AbstractContextManager[Any]:
        """Let dropout drop what it would in a CUDA graph: then it makes no difference from which step on there is one."""
        drops = self.config.hidden_dropout or self.config.attention_dropout
        return seeds_on_device() if drops else nullcontext()

    def _wide(self) -> Any:
        device = next(self.model.parameters()).device
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of the token after each row."""
        length = tokens.shape[1]
        padding = -length % self.config.sequence_ranks  # sequence parallelism needs equal shards
        with self._wide():
            logits: Tensor = self.model(F.pad(tokens, (0, padding)))
        return logits[:, length - 1]

    @torch.no_grad()
    def loss(self, batch: TokenBatch) -> Tensor:
        """Return the mean loss of the batch, without gradients."""
        parts = batch.microbatches(self.options.micro_batch_size)
        with self._wide():
            return torch.stack([self.model(part.tokens, part.labels, **part.documents).float() for part in parts]).mean()


class GraphedSteps(TrainSteps):
    """TrainSteps that replay one CUDA graph for each microbatch.

    Shapes are fixed. A graph takes packed sequences of up to a number of documents, and those of fewer with empty ones after
    them. For more documents a graph of twice as many takes its place.
    """

    replays = True
    _graph: tuple[torch.cuda.CUDAGraph, Tensor] | None = None  # and the loss that its replays write
    _boundaries = 0  # in each sequence of the graph

    def run(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        self.update.begin()
        if batch.cu_seqlens is not None:
            batch = batch._replace(cu_seqlens=self._widened(batch.cu_seqlens))
        parts = batch.microbatches(self.options.micro_batch_size)
        total = torch.zeros((), dtype=torch.float32, device=batch.tokens.device)
        with self.update.accumulate():  # a replay calls no hooks: the reductions start in finish
            if self._graph is None:
                self._capture(parts[0], 1.0 / len(parts))
            assert self._graph is not None
            graph, loss = self._graph
            for part in parts:
                for static, tensor in zip(self._static, part, strict=True):
                    if static is not None and tensor is not None:
                        static.copy_(tensor)
                graph.replay()
                total += loss
        return total / len(parts), self.update.finish()

    def _capture(self, part: TokenBatch, share: float) -> None:
        """Capture a microbatch. Undo what its warm-up adds to gradients and counts, and the random numbers that it draws."""
        self._static = static = TokenBatch(*(None if each is None else each.clone() for each in part))  # type: ignore[arg-type]
        device = part.tokens.device
        counts = [(scales, scales.counts()) for scales in self.update.delayed_scales()]
        free_memory(device)
        with side_stream(device), restored_generator(device):
            for _ in range(_WARM):
                self._micro(static, share)
            for scales in self.update.delayed_scales():
                scales.set_counts(next((count for known, count in counts if known is scales), None))
            free_memory(device)
            self._graph = self._captured(partial(self._micro, static, share), device)
        self.update.begin()  # clears the gradients that warm-up added

    def _captured(self, micro: Callable[[], Tensor], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        return capture(micro, device)

    def _widened(self, cu_seqlens: Tensor) -> Tensor:
        """Repeat the ends of the boundaries, to as many as the graph has. If there are more, let go of the graph."""
        needed = cu_seqlens.shape[1]
        if needed > self._boundaries:
            self._boundaries = max(_FEWEST_BOUNDARIES, 1 << (needed - 1).bit_length())
            self._graph = None
        return torch.cat([cu_seqlens, cu_seqlens[:, -1:].expand(-1, self._boundaries - needed)], 1)


def _takes_grad_scale(config: Config) -> bool:
    """Whether the output layer may compute its gradient in forward.

    Its op must add to main_grad, and the loss must go straight to backward.
    """
    return config.loss_without_logits and config.gradient_accumulation_fusion and not config.defer_embedding_wgrad_compute
