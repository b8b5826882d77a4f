"""LinearCrossEntropy: a language model's output layer and loss in one module, without a tensor of all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.gradients.deferred import DeferredWgrad
from onepass.nn.linear import Init, check_input
from onepass.nn.sharding import DividedParameters, Division, check_init, check_size, range_of
from onepass.ops.linear.linear import linear
from onepass.ops.loss.formula import finished_logits
from onepass.ops.loss.kept_rows import KeptRows
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy
from onepass.ops.loss.reduction import check_reduction, check_terms
from onepass.parallel.collectives import gather_last


class LinearCrossEntropy(DividedParameters):
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
        reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature, logits_dtype,
            chunk_bytes: as in `onepass.linear_cross_entropy`.
        skip_weight_param_allocation: have no weight. Each call passes one, such as an embedding's.
        init_method: called on the whole weight; the bias then starts at zero. By default both start as torch.nn.Linear's do.
        tp_group: the ranks that shard the vocabulary. None is this rank alone. hidden's gradient is summed over them.
        sequence_parallel: hidden and its gradient are this rank's shard along the first dimension. Labels and loss are whole.
        device, dtype: of the parameters.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    deferred: DeferredWgrad | None = None

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
        check_size("hidden_size", hidden_size)
        check_size("vocab_size", vocab_size)
        check_init("init_method", init_method)
        check_reduction(reduction)
        check_terms(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
        self.hidden_size, self.vocab_size, self.init_method = hidden_size, vocab_size, init_method
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing, self.z_loss, self.softcap, self.logit_scale = label_smoothing, z_loss, softcap, logit_scale
        self.temperature, self.logits_dtype, self.chunk_bytes = temperature, logits_dtype, chunk_bytes
        self.skip_weight_param_allocation = skip_weight_param_allocation
        self.sequence_parallel = sequence_parallel and self.ranks > 1  # a single rank has the whole sequence
        self.vocab_range = range_of(vocab_size, self.rank, self.ranks)
        rows, division = self.vocab_range[1] - self.vocab_range[0], Division(0, vocab_size)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if not skip_weight_param_allocation:
            self.hold("weight", rows, hidden_size, device=device, dtype=dtype, division=division)
        if bias:
            self.hold("bias", rows, device=device, dtype=dtype, division=division)
        self.reset_parameters()
        self.mark_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise all parameters, like those of the unsharded layer."""
        self.start_as_linear(self.hidden_size, self.init_method)

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
        reduction: str | None = None,
    ) -> Any:
        """Return the loss. With return_stats, return (loss, stats).

        Args:
            hidden: ``[..., hidden_size]``. With sequence_parallel, this rank's shard along the first dimension.
            labels: ``[...]``, for the whole sequence and from the whole vocabulary.
            token_weight, grad_scale, return_stats, rows, vocab_mask: as in `onepass.linear_cross_entropy`.
            weight: this rank's shard of another weight, used instead of the module's own.
            reduction: replaces the module's, unless None.
        """
        check_input(hidden, self.hidden_size, "hidden_size", "hidden")
        return linear_cross_entropy(
            hidden,
            self.given(self._weight(weight)),
            labels,
            self.tp_group,
            self.reduction if reduction is None else reduction,
            self.ignore_index,
            self.sequence_parallel,
            bias=self.given(self.bias),
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            temperature=self.temperature,
            token_weight=token_weight,
            logits_dtype=self.logits_dtype,
            grad_scale=grad_scale,
            chunk_bytes=self.chunk_bytes,
            return_stats=return_stats,
            rows=rows,
            vocab_mask=vocab_mask,
            deferred=self.deferred,
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
            self.given(self._weight(weight)),
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

    def _weight(self, given: Tensor | None) -> Tensor:
        weight = self.weight if given is None else given
        if weight is None:
            raise ValueError("weight must be given with the call, as skip_weight_param_allocation leaves the module without one")
        shape = (self.vocab_range[1] - self.vocab_range[0], self.hidden_size)
        if weight.shape != shape:
            part = "the rows of vocab_range" if self.ranks > 1 else "a row a token"
            raise ValueError(f"weight must have shape {shape}, {part}, but has {tuple(weight.shape)}")
        return weight

    def extra_repr(self) -> str:
        said = [f"{self.hidden_size}", f"{self.vocab_size}", f"bias={self.bias is not None}"]
        said += [f"vocab_range={self.vocab_range}", f"tp={self.ranks}"] if self.ranks > 1 else []
        for name, usual in _USUAL.items():
            value = getattr(self, name)
            said += [f"{name}={value!r}"] if value != usual else []
        return ", ".join(said)


_USUAL = {  # defaults, which extra_repr omits
    "reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0,
    "temperature": 1.0, "logits_dtype": None, "chunk_bytes": None, "skip_weight_param_allocation": False,
    "sequence_parallel": False,
}  # fmt: skip
