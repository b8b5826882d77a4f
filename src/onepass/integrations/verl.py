"""verl's fused log-probabilities and entropy (`use_fused_kernels=True`) by onepass.linear_cross_entropy.

from onepass.integrations import verl

installed = verl.install()  # in every worker, before or after models are made
print(installed)            # what was replaced, what was not, and why
...                         # train, as before
installed.undo()

verl has three doors to them: a function (its "triton" backend), a module (its "torch" and "liger" backends), and with Megatron
from 0.18 an output processor. All are looked up at each call.

Over several tensor-parallel ranks the function returns hidden's gradient as this rank's part of a sum, and callers sum it in
gathering the sequence. linear_cross_entropy sums it itself. So there the function stays verl's, and the output processor, which
contains the gathering, is replaced instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.integrations.seams import Seams
from onepass.integrations.tested import TESTED
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy
from onepass.runtime.batch_invariance import refuse

_FUNCTION = "verl.utils.kernel.linear_cross_entropy"
_MODULE = "verl.utils.experimental.torch_functional"
_MEGATRON = "verl.models.mcore.model_forward_fused"
_WANTED = ("log_prob", "entropy")


class LogProbsAndEntropy:
    """Has the place of verl.utils.kernel.linear_cross_entropy.linear_cross_entropy."""

    def __init__(self, stock: Any, fp32_head: bool = False) -> None:
        self.stock, self.fp32_head = stock, fp32_head

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none",
        dist_process_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return each label's log-probability and each token's entropy, flat, in fp32, both differentiable."""
        if reduction.lower() != "none" or (dist_process_group is not None and dist_process_group.size() > 1):
            _refuse(self.fp32_head, "with a reduction, and over several tensor-parallel ranks")
            made: tuple[Tensor, Tensor] = self.stock(hidden, weight, labels, temperature, reduction, dist_process_group)
            return made
        flat = hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1)
        return _log_probs_and_entropy(*flat, temperature, self.fp32_head)


def fused_linear_for_ppo(fp32_head: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return what has the place of FusedLinearForPPO.forward."""

    def forward(
        self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return as above, of input_ids' shape; verl's entropy has hidden's type."""
        return _log_probs_and_entropy(hidden_states, vocab_weights, input_ids, temperature, fp32_head)

    return forward


class FusedOutputProcessor:
    """Has the place of verl.models.mcore.model_forward_fused.fused_output_processor, for Megatron-core from 0.18."""

    def __init__(self, stock: Any, fp32_head: bool = False) -> None:
        self.stock, self.fp32_head = stock, fp32_head

    def __call__(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, labels: Tensor, context: Any,
        config: Any, **given: Any,
    ) -> Any:  # fmt: skip
        """hidden_states [S, B, D], with sequence parallelism this rank's part of S; labels [B, S], in verl packed as B = 1."""
        from verl.models.mcore import model_forward_fused as theirs

        if theirs.has_config_logger_enabled(config):  # verl's logs what this doesn't know
            _refuse(self.fp32_head, "with its logging of configurations")
            return self.stock(
                hidden_states=hidden_states, output_layer=output_layer, output_weight=output_weight, labels=labels,
                context=context, config=config, **given,
            )  # fmt: skip
        group = theirs.parallel_state.get_tensor_model_parallel_group()
        sequence = bool(config.sequence_parallel)
        tokens = hidden_states.shape[0] * (group.size() if sequence else 1), hidden_states.shape[1]
        _, stats = linear_cross_entropy(
            hidden_states, output_layer.weight if output_weight is None else output_weight, labels.reshape(tokens), group, "none",
            sequence_parallel=sequence, temperature=context.temperature, logits_dtype=_logits_dtype(self.fp32_head),
            return_stats=_WANTED,
        )  # fmt: skip
        return theirs.CausalLMOutputForPPO(
            loss=None, logits=None, past_key_values=None, hidden_states=hidden_states, attentions=None,
            log_probs=stats.log_prob.reshape(-1), entropy=stats.entropy.reshape(-1),
        )  # fmt: skip


def _log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, fp32_head: bool
) -> tuple[Tensor, Tensor]:
    _, stats = linear_cross_entropy(
        hidden, weight, labels, reduction="none", temperature=temperature, logits_dtype=_logits_dtype(fp32_head),
        return_stats=_WANTED,
    )  # fmt: skip
    return stats.log_prob, stats.entropy


def _logits_dtype(fp32_head: bool) -> torch.dtype | None:
    return torch.float32 if fp32_head else None


def _refuse(fp32_head: bool, where: str) -> None:
    refuse(f"verl's head {where}", "there it is verl's own function")
    if fp32_head:
        raise ValueError(f"fp32_head must be False {where}: there the head is verl's own function and rounds logits; but is True")


def install(*, fp32_head: bool = False, batch_invariant: bool = False) -> Seams:
    """Let verl's fused kernels be onepass's. Return what `print` shows and `undo` restores.

    Args:
        fp32_head: do not round logits to hidden's type. The operands of their product keep theirs.
        batch_invariant: turn `onepass.batch_invariant()` on, for the whole process, until `undo`. Log-probabilities then don't
            depend on the microbatch, where `huggingface.apply` has made the model onepass's.

    Raises:
        SeamError: verl is not installed, a name is not where it was, or onepass is installed already. verl is as it was.
    """
    seams = Seams("verl", TESTED["verl"][-1])
    with seams.all_or_nothing():
        stock = getattr(importlib.import_module(_FUNCTION), "linear_cross_entropy", None)
        seams.rebind(_FUNCTION, "linear_cross_entropy", LogProbsAndEntropy(stock, fp32_head))
        seams.rebind(_MODULE, "FusedLinearForPPO.forward", fused_linear_for_ppo(fp32_head))
        try:
            megatron = importlib.import_module(_MEGATRON)
        except ImportError as error:
            seams.leave(_MEGATRON, f"it can't be imported here ({error})")
        else:
            processor = FusedOutputProcessor(getattr(megatron, "fused_output_processor", None), fp32_head)
            seams.rebind(_MEGATRON, "fused_output_processor", processor, optional=True)
        if batch_invariant:
            seams.make_invariant()
    seams.leave(
        "linear_cross_entropy over several tensor-parallel ranks",
        "it returns a part of hidden's gradient; only the output processor of Megatron-core 0.18 and newer is replaced there",
    )
    return seams
