"""Updates turn gradients into new weights: by main_grad and a one-pass AdamW, by FSDP2, or by PyTorch's AdamW alone.

Run all microbatches of a step but the last in `accumulate()`, then call `finish` and `step`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.gradients.adamw_state import embeddings_apart
from onepass.nn.precision import FP8Layer, fp8_layers
from onepass.parallel import AdamW, FSDPMainGrads, MainGrads, ShardedAdamW, StepInBackward, reduce_sequence_parallel_grads
from onepass.product.fp8.scales import FP8Scales, share_notes
from onepass.product.fp8.weight import fp8_weight
from onepass.runtime.units import size as bytes_of
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options

Groups = list[dict[str, Any]]


def learning_rate(step: int, options: Options) -> float:
    """Return the learning rate of a step, counted from 0. It rises from near 0 to lr, then falls to min_lr at the last step."""
    if step < options.lr_warmup_iters:
        return options.lr * (step + 1) / options.lr_warmup_iters
    if options.lr_decay_style == "constant":
        return options.lr
    through = (step - options.lr_warmup_iters) / max(1, options.train_iters - 1 - options.lr_warmup_iters)
    left = (1 + math.cos(math.pi * through)) / 2 if options.lr_decay_style == "cosine" else 1 - through
    return options.lowest_lr + (options.lr - options.lowest_lr) * left


def parameter_groups(model: nn.Module, options: Options) -> Groups:
    """Return two groups: matrices, with weight decay, and all other parameters, without."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw_options(options: Options) -> dict[str, Any]:
    return {"lr": options.lr, "betas": (options.adam_beta1, options.adam_beta2), "eps": options.adam_eps}


def state_options(options: Options) -> dict[str, Any]:
    """Return how onepass's optimizers keep their state."""
    return {"moments": options.optimizer_moments, "offload": "state" if options.offload_optimizer else None}


class Update(ABC):
    """Handles the gradients of one model, and its optimizer."""

    optimizer: torch.optim.Optimizer
    _delayed: Sequence[FP8Layer] = ()  # layers in eight bits with delayed scales

    def __init__(self, model: nn.Module, options: Options, layout: ParallelLayout) -> None:
        self.model, self.options, self.layout = model, options, layout
        self._delayed = [each for each in fp8_layers(model) if each.recipe.scaling == "delayed"]

    def begin(self) -> None:  # noqa: B027  # most subclasses need none
        """Prepare for a step. Call it before the first forward."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context for backwards that are not the step's last."""
        return nullcontext()

    def describe_broken_step(self) -> str:
        """Return what a step that broke off in backward has left, where that is not all as it was."""
        return ""

    def describe_offload(self) -> str | None:
        """Return a line on what state in the host's memory costs, or None."""
        return None

    @abstractmethod
    def finish(self) -> Tensor:
        """Complete the gradient after the step's last backward, and return its norm. Either this or `step` clips it."""

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of the next step, before the backward that may make it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, lr: float) -> None:
        self.set_rate(lr)
        self._share_notes()  # before what a graph has captured refreshes its scales, after the optimizer's step
        self._step()

    def delayed_scales(self) -> list[FP8Scales]:
        """Return the scales of layers in eight bits that have delayed ones, as far as a forward has made them."""
        weights: list[Any] = [each.weight for each in self._delayed]
        return [weight.fp8.scales for weight in weights if hasattr(weight, "fp8")]

    def _share_notes(self) -> None:
        """Let the ranks that have these layers take their next scales from what all of them have seen."""
        scales = self.delayed_scales()
        for group in (self.layout.data.group, self.layout.tensor.group):
            if scales and group is not None:
                share_notes(scales, group)

    def _step(self) -> None:
        self.optimizer.step()


def lone_group(layout: ParallelLayout) -> dist.ProcessGroup:
    """Return a group of this rank alone, over which nothing is sent."""
    alone: dist.ProcessGroup = dist.new_group([layout.rank], backend="gloo", use_local_synchronization=True)
    return alone


_RELEASED_FROM = 1 << 29  # parameters: 1B takes less time and memory, 124M the same time (docs/notes/0006-main-grads.md)


def releases(model: nn.Module, options: Options, layout: ParallelLayout) -> bool:
    """Whether the gradients' memory is lent to activations. By default it is where that was measured: large models on one GPU."""
    if options.release_main_grads is not None:
        return options.release_main_grads
    if options.step_in_backward:
        return True
    large = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) >= _RELEASED_FROM
    return large and layout.device.type == "cuda" and layout.ranks == 1 and not options.cuda_graphs


class MainGradUpdate(Update):
    """Flat fp32 gradient buffers, reduced during backward, and an AdamW that clips, steps and clears them in one pass."""

    optimizer: AdamW
    _norm: Tensor  # of this step's gradient

    def __init__(self, model: nn.Module, options: Options, layout: ParallelLayout) -> None:
        super().__init__(model, options, layout)
        alone = layout.ranks > 1 and layout.data.group is None  # MainGrads takes None for all ranks
        self.main_grads = MainGrads(
            model,
            group=lone_group(layout) if alone else layout.data.group,
            shard=options.use_distributed_optimizer,
            release=releases(model, options, layout),
            tp_group=layout.tensor.group,
            pp_group=layout.pipeline.group,
        )
        early = StepInBackward(max_norm=options.clip_grad or math.inf) if options.step_in_backward else False
        self.optimizer = AdamW(
            self.main_grads,
            parameter_groups(model, options),
            **adamw_options(options),
            **state_options(options),
            in_backward=early,
        )
        if (dtype := narrow_type(model)) is not torch.float32:
            self.optimizer.set_masters(drawn(model, dtype))

    def begin(self) -> None:
        self.main_grads.zero_()  # writes nothing after a complete step; clears what an interrupted one left

    def accumulate(self) -> AbstractContextManager[None]:
        return self.main_grads.accumulate()

    def finish(self) -> Tensor:
        self.main_grads.finish()
        if self.options.step_in_backward:
            norm = self.optimizer.step()
            assert norm is not None  # as it is told to clip, if by infinity
            return norm
        if self.layout.tensor.group is not None:
            reduce_sequence_parallel_grads(self.model, self.layout.tensor.group)
        self._norm = self.main_grads.norm()
        return self._norm

    def describe_broken_step(self) -> str:
        stepped = self.optimizer.stepped
        if not stepped:
            return ""
        return (
            f"The step broke off in backward: {len(stepped)} of {len(self.main_grads.named)} parameters, from {stepped[0]} to "
            f"{stepped[-1]}, have their new weights, the others their old ones. Go on from the last checkpoint"
        )

    def describe_offload(self) -> str | None:
        if not self.options.offload_optimizer:
            return None
        size, rate = self.optimizer.passes()
        when = "beside backward" if self.options.step_in_backward else "after backward"
        return (
            f"Offload: {bytes_of(size)} of masters and moments come to the GPU and go back in each step, {when}: "
            f"{size / rate:.2f} s each way at {rate / 1e9:.0f} GB/s."
        )

    def publish(self) -> None:
        """Let all ranks have the weights that the optimizer was given. Ranks call it together."""
        self.optimizer.publish()

    def _step(self) -> None:
        if not self.options.step_in_backward:
            self.optimizer.step(self.options.clip_grad or None, zero=True, norm=self._norm)


class PlainUpdate(Update):
    """torch.optim.AdamW on the parameters with gradients in .grad, as code without onepass uses it. For one rank."""

    def __init__(self, model: nn.Module, options: Options, layout: ParallelLayout) -> None:
        super().__init__(model, options, layout)
        self.optimizer = torch.optim.AdamW(parameter_groups(model, options), fused=True, **adamw_options(options))

    def finish(self) -> Tensor:
        most = self.options.clip_grad or math.inf
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), most, foreach=True)

    def _step(self) -> None:
        super()._step()
        self.optimizer.zero_grad()


_MARKS = "sequence_parallel", "tensor_model_parallel"  # of parameters, which say what tensor-parallel ranks have of them


class FsdpUpdate(Update):
    """PyTorch's fully_shard: each data-parallel rank has a shard of every block's weights, gradients and optimizer state.

    Microbatches' gradients add up in its buffers, in fp32 and inside of the products.
    """

    optimizer: ShardedAdamW
    _norm: Tensor  # of this step's gradient

    def __init__(self, model: nn.Module, options: Options, layout: ParallelLayout) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        assert layout.data.group is not None
        mesh = DeviceMesh.from_group(layout.data.group, layout.device.type)
        dtype = narrow_type(model)
        model.float()  # fp32 masters; gathered weights and products have the model's dtype
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, values in drawn(model, dtype):
                parameters[name].copy_(values)
        # inputs stay as the model makes them: rotations in fp32, and alike where a checkpoint runs a block without its hooks
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        blocks: Any = model.layers, model.mtp
        marks = {name: {mark: getattr(parameter, mark, False) for mark in _MARKS} for name, parameter in parameters.items()}
        for block in chain(*(each.values() for each in blocks)):
            fully_shard(block, mesh=mesh, mp_policy=policy)
            stateful = [(each, each.weight) for each in fp8_layers(block) if each.has_state]
            block.register_forward_pre_hook(partial(_carry_fp8, stateful))
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for name, parameter in model.named_parameters():  # which are others now
            vars(parameter).update(marks[name])
        super().__init__(model, options, layout)
        self.main_grads = FSDPMainGrads(model)
        groups = embeddings_apart(parameter_groups(model, options), model, options.optimizer_moments)
        self.optimizer = ShardedAdamW(groups, **adamw_options(options), **state_options(options))

    def begin(self) -> None:
        self._last(True)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Postpone fully_shard's gradient reduction to the last microbatch."""
        self._last(False)
        try:
            yield
        finally:
            self._last(True)

    def _last(self, last: bool) -> None:
        model: Any = self.model
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)

    def finish(self) -> Tensor:
        group = self.layout.tensor.group
        if group is not None:
            reduce_sequence_parallel_grads(self.model, group)
        self._norm = self.optimizer.norm(group)
        return self._norm

    def _step(self) -> None:
        self.optimizer.step(max_norm=self.options.clip_grad or None, norm=self._norm)
        self.optimizer.zero_grad()


def _carry_fp8(layers: list[tuple[FP8Layer, Tensor]], *_: Any) -> None:
    """Give gathered weights the eight-bit state of the parts that they are gathered from, where checkpoints find it."""
    for each, part in layers:
        gathered: Any = each.weight
        gathered.fp8 = fp8_weight(part, each.recipe)


# ---- where fp32 master weights start ----
# A master that starts as its bf16 weight is in the middle of the interval that rounds to it. The weight would not change until
# steps add up to half a unit in its last place. With a slow learning-rate warmup the first steps would have no effect.


def narrow_type(model: nn.Module) -> torch.dtype:
    """Return the narrowest dtype of the parameters: that of matrices, as norms may have a wider one."""
    types = {parameter.dtype for parameter in model.parameters()}
    return min(types, key=lambda dtype: dtype.itemsize, default=torch.float32)


@torch.no_grad()
def drawn(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fp32 initial values) of each parameter that its module's `reset_parameters` initialises, module by module.
    Modules that are frozen are left out.

    Elements of a parameter that are not these values rounded to `dtype`, such as loaded ones, are yielded as they are.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in seen}
        seen |= set(map(id, own.values()))
        if not any(p.requires_grad for p in own.values()) or not hasattr(module, "reset_parameters"):
            continue
        for name, values in _started_in_fp32(module, own).items():
            parameter = own[name]
            wide = torch.where(values.to(dtype) == parameter, values, parameter.float())
            yield f"{path}.{name}" if path else name, wide


def _started_in_fp32(module: Any, own: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    stock = module._parameters
    made = {name: nn.Parameter(torch.empty_like(p, dtype=torch.float32), requires_grad=False) for name, p in own.items()}
    module._parameters = {**stock, **made}
    try:
        module.reset_parameters()
    finally:
        module._parameters = stock
    return {name: parameter.detach() for name, parameter in made.items()}
