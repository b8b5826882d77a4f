"""TRL's fused head by onepass.linear_cross_entropy, under SFT, DPO, KTO, GRPO and RLOO.

from onepass.integrations import trl

installed = trl.install()  # before or after trainers are made
print(installed)           # what was replaced, what was not, and why
...                        # train with TRL, as before
installed.undo()

TRL's trainers compute log-probabilities, entropies and other numbers of each token by an autograd function of hidden states and
the head's weight. They look its name up at each call, so that trainers and models that are made already follow.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from onepass.integrations.seams import SeamError, Seams
from onepass.integrations.tested import TESTED
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy
from onepass.runtime.batch_invariance import refuse
from onepass.runtime.dispatch import under_autocast

_MODULE, _NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
_ARGUMENTS = ("weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale")
_OUTPUTS = {  # TRL's names, in their order, and those of linear_cross_entropy's statistics
    "entropy": "entropy", "log_sum_sq_probs": "log_sum_sq_probs", "mean_logits": "mean_logit", "is_top1": "correct",
}  # fmt: skip


class LogProbFunction:
    """Has the place of TRL's autograd function, called as that: `apply` with the same arguments and results."""

    def __init__(self, stock: Any, fp32_head: bool = False) -> None:
        self.stock = stock  # None where TRL has no Triton
        self.fp32_head = fp32_head
        self.pair = stock is not None and "outputs" not in _parameters(stock)  # TRL 1.14

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        final_logit_softcapping: float | None = None, logit_scale: float = 1.0, outputs: tuple[str, ...] = tuple(_OUTPUTS),
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return each row's log-probability of its target, and what `outputs` names; None for what it doesn't.

        hidden [N, H], weight [V, H], bias [V], targets [N]. `chunk_size` is TRL's: here the op plans.
        """
        if is_partitioned(weight):
            refuse("the head under DeepSpeed ZeRO-3", "it stays TRL's")
            if self.fp32_head:
                raise ValueError(
                    "fp32_head must be False under DeepSpeed ZeRO-3, where the head stays TRL's and rounds, but is True"
                )
            more = () if self.pair else (outputs,)
            return self.stock.apply(  # type: ignore[no-any-return]
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, *more
            )
        if self.pair:
            outputs = ("entropy",)
        if not under_autocast(hidden):  # as TRL does: products of hidden's type
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        names = [ours for theirs, ours in _OUTPUTS.items() if theirs in outputs]
        _, stats = linear_cross_entropy(
            hidden, weight, targets, reduction="none", bias=bias, softcap=final_logit_softcapping, logit_scale=logit_scale,
            temperature=temperature, logits_dtype=torch.float32 if self.fp32_head else None, return_stats=("log_prob", *names),
        )  # fmt: skip
        if self.pair:
            return stats.log_prob, stats.entropy
        return stats.log_prob, *(getattr(stats, ours) for ours in _OUTPUTS.values())


def is_partitioned(weight: Tensor) -> bool:
    """Whether DeepSpeed ZeRO-3 has gathered this weight for forward only: TRL's function gathers it again in backward."""
    return hasattr(weight, "ds_id")


def install(*, fp32_head: bool = False, batch_invariant: bool = False) -> Seams:
    """Let TRL's trainers compute log-probabilities by onepass. Return what `print` shows and `undo` restores.

    Args:
        fp32_head: do not round logits to hidden's type. The operands of their product keep theirs.
        batch_invariant: turn `onepass.batch_invariant()` on, for the whole process, until `undo`. Log-probabilities of a policy
            and of its reference then don't depend on the microbatch, where `huggingface.apply` has made both models onepass's.

    Raises:
        SeamError: TRL is not installed, its function is not where it was or takes other arguments, or onepass is installed
            already. TRL is as it was.
    """
    seams = Seams("trl", TESTED["trl"][-1])
    stock = getattr(importlib.import_module(_MODULE), _NAME, None)
    if isinstance(stock, LogProbFunction):
        raise SeamError(f"{_NAME} of trl {seams.version} is onepass's already: undo() that install first")
    if stock is not None:
        _check(stock, seams.version)
    with seams.all_or_nothing():
        seams.rebind(_MODULE, _NAME, LogProbFunction(stock, fp32_head))
        if batch_invariant:
            seams.make_invariant()
    seams.leave("the head under DeepSpeed ZeRO-3", "backward gathers its weight again, which TRL's function does")
    if stock is not None and "outputs" not in _parameters(stock):
        seams.leave("trainers that make logits", "SFT and RLOO, and without use_liger_kernel all, until TRL 1.15")
    return seams


def runs_onepass(forward: Any) -> bool | None:
    """Whether a model's forward with TRL's fused head runs onepass's function. None for other forwards."""
    names = getattr(forward, "__globals__", {})
    return isinstance(names.get(_NAME), LogProbFunction) if names.get("__name__") == _MODULE else None


def _parameters(stock: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(stock.forward).parameters)


def _check(stock: Any, version: str) -> None:
    taken = _parameters(stock)[2:]  # after ctx and the hidden states
    if taken not in (_ARGUMENTS, (*_ARGUMENTS, "outputs")):
        raise SeamError(
            f"{_NAME} of trl {version} takes ({', '.join(taken)}) after the hidden states, and onepass knows "
            f"({', '.join(_ARGUMENTS)}) and outputs, as in {TESTED['trl'][0]} to {TESTED['trl'][-1]}: nothing was changed"
        )
