"""torchtitan's head and loss as one op. Imports torchtitan."""

from __future__ import annotations

from functools import partial
from typing import Any

import spmd_types as spmd
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size

from onepass.integrations.torchtitan_configs import new_config
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy


class LinearCrossEntropyLoss(ChunkedLossWrapper):
    """The head and the loss as one op, in one call of lm_head, whose weight FSDP2 then gathers and reduces once."""

    Config = new_config("LinearCrossEntropyLoss", ChunkedLossWrapper)

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        super().__init__(config)

    def set_lm_head(self, lm_head: nn.Module) -> None:
        if type(lm_head).forward is not nn.Linear.forward:
            raise NotImplementedError(f"onepass's loss needs an lm_head that is a Linear, but it is {type(lm_head).__qualname__}")
        lm_head.forward = partial(_head, lm_head, lm_head.forward)
        super().set_lm_head(lm_head)

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **loss_inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """As CrossEntropyLoss has it, loss_inputs have no effect."""
        assert self.lm_head is not None
        loss = self.lm_head(pred, labels)
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}


def _head(head: Any, stock: Any, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
    """Stands in for lm_head's forward: the summed loss where there are labels, else logits."""
    if labels is None:
        return stock(hidden)  # type: ignore[no-any-return]
    group = None
    if spmd_mesh_size("tp") > 1:
        group = current_spmd_mesh().get_group("tp")
        hidden = spmd.redistribute(hidden, group, src=spmd.R, dst=spmd.I)  # what comes back is summed over the ranks already
    return linear_cross_entropy(hidden, head.weight, labels, group, "sum", IGNORE_INDEX, bias=head.bias)
