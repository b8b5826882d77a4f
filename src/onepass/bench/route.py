"""route against its peers: a router's scores, its top-k, weights, counts and losses.

Bytes     forward reads the logits and writes weights (fp32) and chosen experts (int64); backward reads the logits, the chosen
          experts and the weights' gradient, and writes the logits'.
Shapes    tokens x experts x chosen experts.
Variants  "softmax": normalised, as Qwen 3 and Mixtral route, with load-balancing and z-losses; "deepseek": sigmoids, a bias of
          the experts, the best 4 of 8 groups and a scale, with the load-balancing loss.
Peers     eager and torch.compile: the code of transformers' models, and the losses as Megatron computes them.
Inputs    tokens whose choice hangs on the last bits of a score have another token's logits: sums of other orders choose others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepass.bench.define import OpBench, Random, Run, Shape, Shapes, by_pytorch, of_each
from onepass.bench.model import BenchCase, Call, Inputs, Result
from onepass.ops.routing.route import route, route_reference

_VARIANTS = ("softmax", "deepseek")
_GPU = [(16384, 128, 8), (16384, 256, 8), (65536, 64, 6), (4096, 384, 8)]
_SHAPES = Shapes(of_each(_VARIANTS, _GPU), of_each(_VARIANTS, [(2048, 64, 4)]))
_GROUPS, _SCALE, _AUX, _Z = (8, 4), 2.5, 0.01, 0.001


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    tokens, experts, k = shape
    logits, choices = tokens * experts * size, tokens * k * 12
    return logits + choices, 2 * logits + choices


def _options(case: BenchCase) -> dict[str, Any]:
    k = case.shape[2]
    if case.variant == "softmax":
        return {"k": k, "aux": _AUX, "z": _Z}
    return {"k": k, "score": "sigmoid", "groups": _GROUPS, "scale": _SCALE, "aux": _AUX}


def _inputs(case: BenchCase, random: Random) -> Inputs:
    tokens, experts, k = case.shape
    logits = random(tokens, experts)
    bias = random(experts).float().mul_(0.1) if case.variant == "deepseek" else None
    logits = _with_gaps(logits, bias, k).requires_grad_()
    tensors = {"logits": logits} if bias is None else {"logits": logits, "bias": bias}
    ones = torch.ones((), device=random.device)
    grads = {"weights": random(tokens, k).float(), "aux_loss": ones} | ({"z_loss": ones} if bias is None else {})
    return Inputs(tensors, frozenset({"logits"}), grads, summed=frozenset({"aux_loss", "z_loss"} & grads.keys()))


def _with_gaps(logits: Tensor, bias: Tensor | None, k: int) -> Tensor:
    """Return logits whose tokens are all of those that every order of sums routes alike."""
    if bias is None:
        ranked = [logits.double().softmax(-1).log().sort(-1).values[:, -k - 1 :]]
    else:
        scores = logits.double().sigmoid() + bias
        ranked = [scores.sort(-1).values, _group_scores(scores).sort(-1).values]
    gap = torch.stack([each.diff(dim=-1).amin(-1) for each in ranked]).amin(0)
    clear = logits[gap > 1e-6]
    return clear[torch.arange(logits.shape[0], device=logits.device) % clear.shape[0]]


def _group_scores(scores: Tensor) -> Tensor:
    best: Tensor = scores.unflatten(-1, (_GROUPS[0], -1)).topk(2).values
    return best.sum(-1)


def _balance(shares: Tensor, chosen: Tensor) -> Tensor:
    """Return the load-balancing loss as Megatron computes it."""
    tokens, experts = shares.shape
    sent = torch.zeros_like(shares).scatter(1, chosen, 1.0).sum(0)
    return (shares.sum(0) * sent).sum() * (experts * _AUX / (chosen.shape[1] * tokens * tokens))


def _eager(case: BenchCase, run: Run) -> Call:
    k = case.shape[2]

    def softmax(logits: Tensor) -> Result:
        probabilities = torch.softmax(logits.float(), -1)
        weights, chosen = probabilities.topk(k)
        weights = weights / weights.sum(-1, keepdim=True)
        return weights, _balance(probabilities, chosen), logits.float().logsumexp(-1).square().mean() * _Z

    def deepseek(logits: Tensor, bias: Tensor) -> Result:
        scores = logits.float().sigmoid()
        choice = scores.detach() + bias
        best = _group_scores(choice).topk(_GROUPS[1], sorted=False).indices
        mask = torch.zeros_like(choice.unflatten(-1, (_GROUPS[0], -1))[..., 0]).scatter(1, best, 1.0)
        mask = mask.unsqueeze(-1).expand(-1, -1, choice.shape[-1] // _GROUPS[0]).flatten(1)
        chosen = choice.masked_fill(mask == 0, -torch.inf).topk(k).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * _SCALE
        return weights, _balance(scores / (scores.sum(-1, keepdim=True) + 1e-20), chosen)

    made: Call = run(softmax if case.variant == "softmax" else deepseek)
    return made


def _floats(case: BenchCase, function: Any) -> Call:
    """Return a call of route, or of its formula, that returns what has gradients."""

    def call(logits: Tensor, bias: Tensor | None = None) -> Result:
        routing = function(logits, bias=bias, **_options(case))
        return tuple(y for y in (routing.weights, routing.aux_loss, routing.z_loss) if y is not None)

    return call


_WHOLE_MAP = "its fused router returns weights of all experts and a map, not the chosen ones"
BENCH = OpBench(
    "route", _SHAPES, (64, 64, 4), _bytes_moved, _inputs, lambda case: by_pytorch(_eager),
    options=_options,
    keywords=lambda case: ("bias",) if case.variant == "deepseek" else (),
    ours=lambda case: _floats(case, route), formula=lambda case: _floats(case, route_reference),
    without={"Transformer Engine": _WHOLE_MAP, "Megatron-core": "calls that of Transformer Engine, or PyTorch as eager does"},
)  # fmt: skip
