"""Gradients accumulated in fp32 by the ops that compute them: `apply(main_grad=True)`, and its optimizer.

    applied = huggingface.apply(model, main_grad=True)
    optimizer = applied.optimizer(lr=1e-4, max_norm=1.0)
    for batch in batches:
        model(**batch).loss.backward()    # once per microbatch
        optimizer.step()                  # also clears the gradients; zero_grad() may follow, or not

Every trainable parameter has a slot in fp32 buffers (`onepass.parallel.MainGrads`), and `.grad` stays None. AdamW steps fp32
masters of bf16 weights. It stores only the 16 bits of a master that its weight does not have.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onepass.gradients.adamw import AdamW
from onepass.gradients.buckets import Bucket
from onepass.gradients.main_grad import is_capturing
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.step_in_backward import StepInBackward
from onepass.integrations.huggingface.linear_layers import by_linear
from onepass.integrations.huggingface.patches import Patches
from onepass.integrations.huggingface.probe import own_forward
from onepass.integrations.huggingface.zero import is_deepspeeds
from onepass.runtime.cuda_graph import current_step


class PatientMainGrads(MainGrads):
    """MainGrads that reduces over data-parallel ranks in `finish`, because such a loop marks no backward as the step's last."""

    advice = "use applied.optimizer(...), as Trainer's optimizers=(applied.optimizer(...), None), or apply without main_grad"

    def __init__(self, model: nn.Module, release: bool) -> None:
        self._captured = False  # a CUDA graph adds gradients, and its replays call no hooks
        super().__init__(model, release=release)
        self._accumulating = True

    def step_by(self, step: Callable[[Bucket], None] | None) -> None:
        """As MainGrads'. A backward is a step's last then, but in `accumulate`."""
        super().step_by(step)
        self._accumulating = step is None

    def zero_(self) -> None:
        """As MainGrads', but before the next gradient another call clears no buffer: a step calls it, then the loop."""
        super().zero_()
        self._captured = self._captured or any(map(is_capturing, self.buffers))
        if not self.releases and not self._captured:
            self._clear = [buffer._version for buffer in self.buffers]

    def _on_gradient(self, parameter: Tensor) -> None:
        if is_deepspeeds(parameter, self.module):
            raise RuntimeError(
                "main_grad must be False under DeepSpeed, whose optimizer reads .grad and would train nothing: apply without it, "
                "and let DeepSpeed keep masters and sums in fp32"
            )
        self._clear = None
        self._captured = self._captured or is_capturing(parameter)
        super()._on_gradient(parameter)

    def added_here(self, parameter: Tensor) -> None:
        self._clear = None
        super().added_here(parameter)


class MainGradAdamW(AdamW):
    """`onepass.parallel.AdamW` with the interface of torch.optim, for loops that are written for that.

    Its step finishes the gradients, clips them to `max_norm`, clears them and begins the next step.
    """

    _main_grads: PatientMainGrads

    def __init__(
        self,
        main_grads: PatientMainGrads,
        groups: Iterable[Mapping[str, Any]] | None = None,
        *,
        max_norm: float | None = None,
        in_backward: bool | StepInBackward = False,
        **options: Any,
    ) -> None:
        if in_backward is True:
            in_backward = StepInBackward(max_norm=max_norm)
        if isinstance(in_backward, StepInBackward):
            if max_norm not in (None, in_backward.max_norm):
                raise ValueError(f"max_norm must be in_backward's, {in_backward.max_norm}, or None, but is {max_norm}")
            max_norm = in_backward.max_norm
        super().__init__(main_grads, groups, in_backward=in_backward, **options)
        self.max_norm = max_norm
        if max_norm is None and "transformers.trainer" in sys.modules:
            warnings.warn(
                "max_norm is None, so no gradient is clipped: Trainer's max_grad_norm clips .grad, which main_grad leaves None. "
                "Give applied.optimizer(max_norm=...) the norm, or infinity to clip nothing",
                stacklevel=3,
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step by the gradients and clear them.

        Args:
            closure: computes the loss and the gradients, as Lightning's does; its loss is returned. Without one, the gradient's
                norm before clipping is, where there is a `max_norm`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._main_grads.finish()
        norm = super().step(self.max_norm if self.backward_steps is None else None, zero=True)
        if current_step() is not None or not any(map(is_capturing, self._main_grads.buffers)):
            self._main_grads.zero_()
        return norm if closure is None else loss


def add_in_place(model: nn.Module, patches: Patches, release: bool) -> PatientMainGrads:
    """Create the model's MainGrads. Linear layers that are not replaced yet get forwards that add to main_grad.

    Hooks of MainGrads add the gradients of all other parameters.
    """
    for module in model.modules():
        if type(module) is nn.Linear and not own_forward(module):
            patches.set_forward(module, by_linear, None)
    main_grads = PatientMainGrads(model, release)
    patches.set(model, "zero_grad", partial(_zero_grad, model))
    return main_grads


def _zero_grad(self: Any, set_to_none: bool = True) -> None:
    """The model's zero_grad, which also clears main_grads. A deep copy of the model has none."""
    type(self).zero_grad(self, set_to_none)
    owner = next((p.main_grads() for p in self.parameters() if hasattr(p, "main_grads")), None)
    if owner is not None:
        owner.zero_()
