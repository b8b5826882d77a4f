"""LinearDivergence: a student's output layer, and how far its distribution is from a teacher's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.nn.linear import Init, check_input
from onepass.nn.vocabulary_head import VocabularyHead
from onepass.ops.loss.linear_divergence import check_divergence, linear_divergence
from onepass.ops.loss.reduction import check_reduction
from onepass.product.lora import LoRA


class LinearDivergence(VocabularyHead):
    """A student's head and its divergence from a teacher's, by `onepass.linear_divergence`: it takes hidden states of both.

        head = LinearDivergence(1024, 50257, kind="jsd")
        loss = head(student_hidden, teacher_hidden, teacher.lm_head.weight, labels)

    Parameters are initialised as torch.nn.Linear's, and have its state dict keys. ``head.weight = student.lm_head.weight`` ties
    it to a student that has a head. In a group each rank has the rows of `vocab_range`, as in `LinearCrossEntropy`. The teacher's
    head is no part of the module.

    Args:
        hidden_size: the size of the student's last dimension. The teacher's may be another.
        vocab_size: the size of the whole vocabulary. It need not be a multiple of the group's size.
        bias: add a bias to the student's logits.
        kind, beta, temperature, softcap, teacher_softcap, reduction, ignore_index, logits_dtype, chunk_bytes: as in
            `onepass.linear_divergence`.
        skip_weight_param_allocation: have no weight. Each call passes one, such as that of the student's head.
        init_method: called on the whole weight; the bias then starts at zero. By default both start as torch.nn.Linear's do.
        tp_group: the ranks that shard the vocabulary of both heads. None is this rank alone.
        device, dtype: of the parameters.
    """

    always_shown = ("kind",)
    options = (
        "kind", "beta", "temperature", "softcap", "teacher_softcap", "reduction", "ignore_index", "logits_dtype", "chunk_bytes",
    )

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        kind: str = "forward_kl",
        beta: float = 0.5,
        temperature: float = 1.0,
        softcap: float | None = None,
        teacher_softcap: float | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        logits_dtype: torch.dtype | None = None,
        chunk_bytes: int | None = None,
        skip_weight_param_allocation: bool = False,
        init_method: Init | None = None,
        tp_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp_group)
        check_reduction(reduction)
        check_divergence(kind, beta, temperature, softcap, teacher_softcap)
        self.kind, self.beta, self.temperature = kind, beta, temperature
        self.softcap, self.teacher_softcap = softcap, teacher_softcap
        self.reduction, self.ignore_index = reduction, ignore_index
        self.logits_dtype, self.chunk_bytes = logits_dtype, chunk_bytes
        self.hold_vocabulary(
            hidden_size, vocab_size, bias=bias, skip_weight_param_allocation=skip_weight_param_allocation,
            init_method=init_method, device=device, dtype=dtype,
        )  # fmt: skip

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        teacher_weight: Tensor,
        labels: Tensor | None = None,
        *,
        teacher_bias: Tensor | None = None,
        weight: Tensor | None = None,
        lora: LoRA | None = None,
        reduction: str | None = None,
    ) -> Tensor:
        """Return the divergence.

        Args:
            student: ``[..., hidden_size]``.
            teacher: ``[..., E]``, of the same tokens.
            teacher_weight: ``[V, E]``, this rank's shard of the teacher's head.
            labels: ``[...]`` or None: which tokens `ignore_index` leaves out.
            teacher_bias: ``[V]`` or None.
            weight: this rank's shard of another weight, used instead of the module's own.
            lora: an `onepass.LoRA` of the student's weight.
            reduction: replaces the module's, unless None.
        """
        check_input(student, self.hidden_size, "hidden_size", "student")
        return linear_divergence(
            student,
            self.given(self.take_weight(weight)),
            teacher,
            teacher_weight,
            labels,
            student_bias=self.given(self.bias),
            student_lora=lora,
            teacher_bias=teacher_bias,
            tp_group=self.tp_group,
            **self.options_with(reduction),
        )
