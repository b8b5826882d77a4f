"""Gradients accumulated in fp32 by the ops that compute them: `apply(main_grad=True)`, and its optimizer.

    applied = huggingface.apply(model, main_grad=True)
    optimizer = applied.optimizer(lr=1e-4, max_norm=1.0)
    for batch in batches:
        model(**batch).loss.backward()    # once per microbatch
        optimizer.step()
        optimizer.zero_grad()

Every trainable parameter has a slot in fp32 buffers (`onepass.parallel.MainGrads`), and `.grad` stays None. AdamW steps fp32
masters of bf16 weights. It stores only the 16 bits of a master that its weight does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onepass.gradients.adamw import AdamW
from onepass.gradients.main_grads import MainGrads
from onepass.integrations.huggingface.linears import bias_of, weight_of
from onepass.integrations.huggingface.patches import Patches
from onepass.integrations.huggingface.probe import own_forward
from onepass.ops.linear.linear import linear


class PatientMainGrads(MainGrads):
    """MainGrads that reduces over data-parallel ranks in `finish`, because such a loop marks no backward as the step's last."""

    def __init__(self, model: nn.Module, release: bool) -> None:
        super().__init__(model, release=release)
        self._accumulating = True


class MainGradAdamW(AdamW):
    """`onepass.parallel.AdamW` with the interface of torch.optim, for loops that are written for that.

    Its step finishes the gradients, clips them to `max_norm` and clears them.
    """

    def __init__(
        self,
        main_grads: MainGrads,
        groups: Iterable[Mapping[str, Any]] | None = None,
        *,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(main_grads, groups, **options)
        self.max_norm = max_norm

    def step(self, closure: Any = None) -> Tensor | None:  # type: ignore[override]
        """Step by the gradients and clear them. With `max_norm` return the gradient's norm before clipping."""
        if closure is not None:
            raise TypeError("closure must be None: gradients are stepped by once, and then gone")
        self._main_grads.finish()
        return super().step(self.max_norm, zero=True)


def add_in_place(model: nn.Module, patches: Patches, release: bool) -> MainGrads:
    """Create the model's MainGrads. Linear layers that are not replaced yet get forwards that add to main_grad.

    Hooks of MainGrads add the gradients of all other parameters.
    """
    for module in model.modules():
        if type(module) is nn.Linear and not own_forward(module):
            patches.set_forward(module, _linear, None)
    return PatientMainGrads(model, release)


def _linear(self: Any, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return type(self).forward(self, input)  # type: ignore[no-any-return]
    return linear(input, weight_of(self), bias_of(self))
