"""LinearCrossEntropy: a language model's output layer and loss in one module, without a tensor of all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import gather_last
from onepass.gradients.deferred import DeferredWgrad
from onepass.nn.linear import Init, check_input
from onepass.nn.sharding import range_of
from onepass.nn.vocabulary_head import VocabularyHead
from onepass.ops.linear.linear import linear
from onepass.ops.loss.formula import finished_logits
from onepass.ops.loss.kept_rows import KeptRows
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy
from onepass.ops.loss.reduction import check_reduction, check_terms
from onepass.ops.loss.targets import check_class_weight
from onepass.product.lora import LoRA


class LinearCrossEntropy(VocabularyHead):
    """torch.nn.Linear and torch.nn.CrossEntropyLoss by `onepass.linear_cross_entropy`. It takes hidden states, returns the loss.

        head = LinearCrossEntropy(1024, 50257)
        loss = head(hidden, labels)
        next_logits = head.logits(hidden[-1:])      # to evaluate, or to generate

    Parameters are initialised as torch.nn.Linear's, and have its state dict keys. In a group each rank has the rows of
    `vocab_range`, as in VocabParallelEmbedding, so both can share a weight: ``head.weight = embedding.weight``, or
    `skip_weight_param_allocation`. `onepass.nn.sharded_state_dict` returns the whole parameters.

    Args:
        hidden_size: the size of hidden's last dimension.
        vocab_size: the size of the whole vocabulary. It need not be a multiple of the group's size.
        bias: add a bias to the logits.
        reduction, ignore_index, label_smoothing, z_loss, softcap: as in `onepass.linear_cross_entropy`.
        logit_scale, temperature, logits_dtype, chunk_bytes: the same.
        class_weight: the same, whole on every rank. It moves with the module, and is not in its state dict.
        skip_weight_param_allocation: have no weight. Each call passes one, such as an embedding's.
        init_method: called on the whole weight; the bias then starts at zero. By default both start as torch.nn.Linear's do.
        tp_group: the ranks that shard the vocabulary. None is this rank alone. hidden's gradient is summed over them.
        sequence_parallel: hidden and its gradient are this rank's shard along the first dimension. Labels and loss are whole.
        device, dtype: of the parameters.
    """

    deferred: DeferredWgrad | None = None
    class_weight: Tensor | None
    options = (
        "reduction", "ignore_index", "label_smoothing", "z_loss", "softcap", "logit_scale", "temperature", "logits_dtype",
        "chunk_bytes",
    )  # fmt: skip
    flags = ("skip_weight_param_allocation", "sequence_parallel")

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        temperature: float = 1.0,
        class_weight: Tensor | None = None,
        logits_dtype: torch.dtype | None = None,
        chunk_bytes: int | None = None,
        skip_weight_param_allocation: bool = False,
        init_method: Init | None = None,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp_group)
        check_reduction(reduction)
        check_terms(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing, self.z_loss, self.softcap, self.logit_scale = label_smoothing, z_loss, softcap, logit_scale
        self.temperature, self.logits_dtype, self.chunk_bytes = temperature, logits_dtype, chunk_bytes
        check_class_weight("class_weight", class_weight, vocab_size, None)
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.sequence_parallel = sequence_parallel and self.ranks > 1  # a single rank has the whole sequence
        self.hold_vocabulary(
            hidden_size, vocab_size, bias=bias, skip_weight_param_allocation=skip_weight_param_allocation,
            init_method=init_method, device=device, dtype=dtype,
        )  # fmt: skip

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        token_weight: Tensor | None = None,
        grad_scale: float | None = None,
        return_stats: bool | Sequence[str] = False,
        rows: KeptRows | None = None,
        vocab_mask: Tensor | None = None,
        weight: Tensor | None = None,
        lora: LoRA | None = None,
        reduction: str | None = None,
    ) -> Any:
        """Return the loss. With return_stats, return (loss, stats).

        Args:
            hidden: ``[..., hidden_size]``. With sequence_parallel, this rank's shard along the first dimension.
            labels: ``[...]``, for the whole sequence and from the whole vocabulary; or probabilities ``[..., vocab_size]``, of
                which each rank has its shard's columns.
            token_weight, grad_scale, return_stats, rows, vocab_mask: as in `onepass.linear_cross_entropy`.
            weight: this rank's shard of another weight, used instead of the module's own.
            lora: an `onepass.LoRA` of the weight, for the loss alone: `logits` has none.
            reduction: replaces the module's, unless None.
        """
        check_input(hidden, self.hidden_size, "hidden_size", "hidden")
        return linear_cross_entropy(
            hidden,
            self.given(self.take_weight(weight)),
            labels,
            self.tp_group,
            sequence_parallel=self.sequence_parallel,
            bias=self.given(self.bias),
            lora=lora,
            token_weight=token_weight,
            class_weight=self.class_weight,
            grad_scale=grad_scale,
            return_stats=return_stats,
            rows=rows,
            vocab_mask=vocab_mask,
            deferred=self.deferred,
            **self.options_with(reduction),
        )

    def logits(self, hidden: Tensor, weight: Tensor | None = None, *, gather: bool = True) -> Tensor:
        """Return the logits ``[..., vocab_size]``, the input of softmax, whole on every rank.

        They are scaled, capped and divided by the temperature as in the loss. They are rounded to hidden's type, whatever
        logits_dtype is; a loss's stats are not. With sequence_parallel the logits are those of the whole sequence. Without
        `gather` each rank returns its shard of the vocabulary.
        """
        check_input(hidden, self.hidden_size, "hidden_size", "hidden")
        y = linear(
            hidden,
            self.given(self.take_weight(weight)),
            self.given(self.bias),
            tp_group=self.tp_group,
            allreduce_dgrad=self.ranks > 1 and not self.sequence_parallel,
            sequence_parallel=self.sequence_parallel,
            deferred=self.deferred,
        )
        terms = check_terms(self.ignore_index, 0.0, 0.0, self.softcap, self.logit_scale, self.temperature)
        if terms.softcap or terms.scale != 1:
            y = finished_logits(y.to(torch.promote_types(y.dtype, torch.float32)), terms).to(y.dtype)
        if not gather:
            return y
        ranges = [range_of(self.vocab_size, rank, self.ranks) for rank in range(self.ranks)]
        return gather_last(y, self.tp_group, sizes=[last - first for first, last in ranges])
