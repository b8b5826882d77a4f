"""The case file of cross_entropy: every contender is called rightly, and one that writes over the logits gets its own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import check_contenders, cute, made, stand_in, wrong
from torch import Tensor

from onepass.bench import cross_entropy

given = partial(benching.given, cross_entropy, (40, 96))


class _OverLogits(torch.autograd.Function):
    """As peers do it: the gradient of a mean over the logits, in forward."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:  # type: ignore[no-untyped-def]
        with torch.enable_grad():
            x = logits.float().requires_grad_()
            loss = F.cross_entropy(x, labels, label_smoothing=smoothing)
        (dx,) = torch.autograd.grad(loss, x)
        ctx.save_for_backward(logits.copy_(dx))
        return loss.detach()

    @staticmethod
    def backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
        return ctx.saved_tensors[0] * dy, None, None


def _liger(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    loss: Tensor = _OverLogits.apply(logits, labels, label_smoothing)  # type: ignore[no-untyped-call]
    return loss


def _quack(logits: Tensor, labels: Tensor, reduction: str, inplace_backward: bool = False) -> Tensor:
    return _liger(logits, labels, 0.0) if inplace_backward else F.cross_entropy(logits.float(), labels, reduction=reduction)


def _transformer_engine(logits: Tensor, labels: Tensor, smoothing: float, reduce: bool) -> Tensor:
    assert logits.dim() == 3 and labels.dim() == 2 and not reduce
    losses = F.cross_entropy(logits[0].float(), labels[0], reduction="none", label_smoothing=smoothing)
    return losses[None]


def _trl(logits: Tensor, index: Tensor, temperature: float = 1.0, *, row_mask: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.float().log_softmax(-1)
    log_prob = log_p.gather(-1, torch.where(row_mask, index, 0)[:, None])[:, 0]
    return torch.where(row_mask, log_prob, 0.0), -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    liger = {"liger_kernel.transformers.functional": {"liger_cross_entropy": _liger}}
    liger |= cute(cross_entropy=lambda *given, label_smoothing: (_liger(*given, label_smoothing), None, None, None))
    trl = {"trl.kernels": {"selective_log_softmax_and_entropy": _trl}}
    trl |= {"transformer_engine.pytorch.cross_entropy": {"parallel_cross_entropy": _transformer_engine}}
    stand_in(monkeypatch, liger | trl | {"quack.cross_entropy": {"cross_entropy": _quack}})


@pytest.mark.parametrize("variant", ["plain", "smoothing", "over"])
def test_every_contender_is_called_rightly_and_leaves_the_logits(variant: str) -> None:
    case, inputs = given(variant)
    check_contenders(cross_entropy, case, inputs)


def test_what_computes_something_else_is_wrong() -> None:
    case, inputs = given("smoothing")
    assert wrong(cross_entropy, case, inputs, made(cross_entropy, given("plain")[0]))
    assert wrong(cross_entropy, case, inputs, lambda x, y: made(cross_entropy, case)(x, y.clamp_min(0)))


def test_the_full_cases_are_those_of_a_gpu() -> None:
    cases = cross_entropy.BENCH.cases(torch.device("cuda"), torch.bfloat16, False)
    assert [case.shape for case in cases if case.variant == "plain"] == [(8192, 128256), (16384, 32000), (4096, 50257)]
    assert len(cases) == 9
    assert cases[0].backward_bytes == 2 * cases[0].forward_bytes == 2 * 8192 * 128256 * 2
