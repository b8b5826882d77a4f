"""Tables of words by `onepass.embedding`, whose backward adds the rows of equal words in one pass, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import own_forward
from onepass.ops.embedding.embedding import embedding
from onepass.runtime.dispatch import needs_grad, under_functorch


@dataclass
class EmbeddingMatch:
    module: nn.Embedding

    def suits(self) -> bool:
        """Whether the table only looks up: by no norm, and with dense gradients by counts alone."""
        return self.module.max_norm is None and not (self.module.sparse or self.module.scale_grad_by_freq)

    def change(self) -> str | None:
        return None if self.suits() else "it has options that onepass.embedding lacks"


def replace_embeddings(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    rows = []
    for name, module in model.named_modules():
        if type(module) is nn.Embedding and not own_forward(module) and (match := EmbeddingMatch(module)).suits():
            patches.set_forward(module, _forward, match)
            rows.append(AppliedRow(name, "Embedding", "loss", by="embedding", match=match))
    return rows


def _forward(self: Any, input: Tensor) -> Tensor:
    """Look up. Without a gradient PyTorch's own is as fast."""
    match: EmbeddingMatch = self._onepass
    if under_functorch() or not needs_grad(self.weight) or not match.suits():
        return nn.Embedding.forward(self, input)
    return embedding(input, self.weight, padding_idx=self.padding_idx)
