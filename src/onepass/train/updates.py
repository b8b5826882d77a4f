"""From gradients to new weights, in three ways: by main_grad and AdamW in one pass, sharded by FSDP2, and as PyTorch has it.

Each has microbatches run in `accumulate()` but the last, then `finish` and `step`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.parallel import AdamW, MainGrads, reduce_sequence_parallel_grads
from onepass.train.layout import ParallelLayout
from onepass.train.masters import drawn, narrow_type
from onepass.train.options import Options

Groups = list[dict[str, Any]]


def learning_rate(step: int, options: Options) -> float:
    """Of the step with this number, from 0: rising from near 0 to lr, then falling to min_lr at the last."""
    if step < options.lr_warmup_iters:
        return options.lr * (step + 1) / options.lr_warmup_iters
    if options.lr_decay_style == "constant":
        return options.lr
    through = (step - options.lr_warmup_iters) / max(1, options.train_iters - 1 - options.lr_warmup_iters)
    left = (1 + math.cos(math.pi * through)) / 2 if options.lr_decay_style == "cosine" else 1 - through
    return options.lowest_lr + (options.lr - options.lowest_lr) * left


def parameter_groups(model: nn.Module, options: Options) -> Groups:
    """Matrices, whose weights decay, and the rest."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw_options(options: Options) -> dict[str, Any]:
    return {"lr": options.lr, "betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}


class Update(ABC):
    """Gradients of one model, and its optimizer."""

    optimizer: torch.optim.Optimizer

    def __init__(self, model: nn.Module, options: Options, layout: ParallelLayout) -> None:
        self.model, self.options, self.layout = model, options, layout

    def begin(self) -> None:  # noqa: B027  # most have nothing to do
        """Before a step's first forward."""

    def accumulate(self) -> AbstractContextManager[None]:
        """A backward in it is not the step's last."""
        return nullcontext()

    @abstractmethod
    def finish(self) -> Tensor:
        """After the step's last backward: the norm of the whole gradient, which this or `step` clips."""

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._step()

    def _step(self) -> None:
        self.optimizer.step()


def _data_group(layout: ParallelLayout) -> dist.ProcessGroup | None:
    """For MainGrads, which takes None for all ranks: one that is alone needs a group of its own, over which nothing is sent."""
    if layout.ranks == 1 or layout.data.group is not None:
        return layout.data.group
    alone: dist.ProcessGroup = dist.new_group([layout.rank], backend="gloo", use_local_synchronization=True)
    return alone


_RELEASED_FROM = 1 << 29  # parameters: 1B takes less time and memory for it, 124M as much time (docs/notes/0006-main-grads.md)


def _releases(model: nn.Module, options: Options, layout: ParallelLayout) -> bool:
    """Whether gradients' memory is lent. Unless told, where that was measured: for large models on one GPU."""
    if options.release_main_grads is not None:
        return options.release_main_grads
    large = sum(parameter.numel() for parameter in model.parameters()) >= _RELEASED_FROM
    return large and layout.device.type == "cuda" and layout.ranks == 1 and not options.cuda_graphs


class MainGradUpdate(Update):
    """Flat fp32 gradient buffers, reduced under backward, and an AdamW that clips, steps and clears them in one pass."""

    optimizer: AdamW
    _norm: Tensor  # of this step's gradient

    def __init__(self, model: nn.Module, options: Options, layout: ParallelLayout) -> None:
        super().__init__(model, options, layout)
        self.main_grads = MainGrads(
            model,
            group=_data_group(layout),
            shard=options.use_distributed_optimizer,
            release=_releases(model, options, layout),
            tp_group=layout.tensor.group,
            pp_group=layout.pipeline.group,
        )
        self.optimizer = AdamW(self.main_grads, parameter_groups(model, options), **adamw_options(options))
        if (dtype := narrow_type(model)) is not torch.float32:
            self.optimizer.set_masters(drawn(model, dtype))

    def begin(self) -> None:
        self.main_grads.zero_()  # which writes nothing after a step, and clears what an interrupted one has left

    def accumulate(self) -> AbstractContextManager[None]:
        return self.main_grads.accumulate()

    def finish(self) -> Tensor:
        self.main_grads.finish()
        if self.layout.tensor.group is not None:
            reduce_sequence_parallel_grads(self.model, self.layout.tensor.group)
        self._norm = self.main_grads.norm()
        return self._norm

    def _step(self) -> None:
        self.optimizer.step(self.options.clip_grad or None, zero=True, norm=self._norm)


class PlainUpdate(Update):
    """torch.optim's AdamW on the parameters, gradients in .grad: one rank, as code is written without onepass."""

    def __init__(self, model: nn.Module, options: Options, layout: ParallelLayout) -> None:
        super().__init__(model, options, layout)
        self.optimizer = torch.optim.AdamW(parameter_groups(model, options), fused=True, **adamw_options(options))

    def finish(self) -> Tensor:
        most = self.options.clip_grad or math.inf
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), most, foreach=True)

    def _step(self) -> None:
        super()._step()
        self.optimizer.zero_grad()


class FsdpUpdate(PlainUpdate):
    """PyTorch's fully_shard: each data-parallel rank has a part of every block's weights, gradients and state."""

    def __init__(self, model: nn.Module, options: Options, layout: ParallelLayout) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        assert layout.data.group is not None
        mesh = DeviceMesh.from_group(layout.data.group, layout.device.type)
        dtype = narrow_type(model)
        model.float()  # the masters; what is gathered and multiplied has the model's type
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, values in drawn(model, dtype):
                parameters[name].copy_(values)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        blocks: Any = model.layers
        for block in blocks.values():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        super().__init__(model, options, layout)

    def begin(self) -> None:
        self._last(True)

    def accumulate(self) -> AbstractContextManager[None]:
        return _Deferring(self)

    def _last(self, last: bool) -> None:
        model: Any = self.model
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)

    def finish(self) -> Tensor:
        norm: Any = super().finish()
        return norm.full_tensor()  # type: ignore[no-any-return]


class _Deferring(AbstractContextManager[None]):
    """fully_shard's gradients stay where they are until the last microbatch."""

    def __init__(self, update: FsdpUpdate) -> None:
        self.update = update

    def __enter__(self) -> None:
        self.update._last(False)

    def __exit__(self, *raised: object) -> None:
        self.update._last(True)
