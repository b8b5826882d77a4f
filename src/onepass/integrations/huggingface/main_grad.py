"""Gradients added in fp32 where they are made: `apply(main_grad=True)`, and the optimizer that goes with it.

    applied = huggingface.apply(model, main_grad=True)
    optimizer = applied.optimizer(lr=1e-4, max_norm=1.0)
    for batch in batches:
        model(**batch).loss.backward()    # as often as gradients are to be added
        optimizer.step()
        optimizer.zero_grad()

Every trainable parameter has a place in fp32 buffers (`onepass.parallel.MainGrads`), `.grad` stays None, and AdamW steps bf16
weights by fp32 masters, of which it keeps the 16 bits that the weights don't have.
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
    """Reductions over data-parallel ranks begin in `finish`: no backward of such a loop says that it is the step's last."""

    def __init__(self, model: nn.Module, release: bool) -> None:
        super().__init__(model, release=release)
        self._accumulating = True


class MainGradAdamW(AdamW):
    """`onepass.parallel.AdamW` for a loop that knows of torch.optim only: its step finishes the gradients, scales them to
    `max_norm` and clears them."""

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
        """With a norm to scale to, the norm that the gradient had."""
        if closure is not None:
            raise TypeError("closure must be None: gradients are stepped by once, and then gone")
        self._main_grads.finish()
        return super().step(self.max_norm, zero=True)


def add_in_place(model: nn.Module, patches: Patches, release: bool) -> MainGrads:
    """Linear layers that nothing else has replaced add their gradients there too; of everything else the hooks see to it."""
    for module in model.modules():
        if type(module) is nn.Linear and not own_forward(module):
            patches.set_forward(module, _linear, None)
    return PatientMainGrads(model, release)


def _linear(self: Any, input: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return type(self).forward(self, input)  # type: ignore[no-any-return]
    return linear(input, weight_of(self), bias_of(self))
