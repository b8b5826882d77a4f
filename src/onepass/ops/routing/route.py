"""route: each token's experts and their weights, the experts' loads, and a router's losses.

Formula  s = softmax(logits) or sigmoid(logits). A token's experts are the k of the largest s + bias, among its best groups where
         there are groups: those of the largest sums of their two best s + bias. Of equal ones the lowest comes first.
         Weights are scale * s of the chosen, normalised scale * s / sum s. (A sum of sigmoids has 1e-20 more, as DeepSeek V3's.)
         aux_loss = aux * E * sum_e f_e P_e: f_e is the share of all T k choices that expert e got, P_e the mean over tokens of
         s_e, of a sigmoid over its token's sum. z_loss = z * mean(logsumexp(logits)^2). fp32 all the way.
         Gradients come through weights, P and logsumexp. What was chosen, f and the bias have none.
Shapes   logits [..., E], bias [E]; weights and chosen [..., k], counts [E], losses []. T tokens, E up to 1024 by the kernels.
Saves    logits, chosen, and counts where there is aux.
Bytes    forward reads logits and writes weights and chosen, 12 bytes a choice. Backward reads logits, chosen and dweights and
         writes dlogits. Sums over tokens are a row a program.
Kernels  ops/routing/kernels.py: one each way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.language import kernels_unsupported
from onepass.ops.routing.kernels import WIDEST, RouteOptions, forward_tiles, route_backward, route_forward
from onepass.ops.routing.routing import Routing
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.batch_invariance import refuse
from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.dispatch import fast_apply, needs_grad, not_twice_differentiable
from onepass.runtime.formula import formula_by_blocks
from onepass.runtime.op import Registered, define_op
from onepass.runtime.sharding import PARTIAL, WHOLE, Layout, Split, has_dtensor, leading_split, run_on_shards, split_output

_TINY = 1e-20  # added to a sum of sigmoids, which may be 0
_SCORES = ("softmax", "sigmoid")


def route_reference(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    normalise: bool = True,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
    aux: float | None = None,
    z: float | None = None,
) -> Routing:
    """The formula, for every type."""
    return _formula(logits, bias, _options(k, score, normalise, groups, scale, aux, z))


def _options(
    k: int, score: str, normalise: bool, groups: tuple[int, int] | None, scale: float, aux: float | None, z: float | None
) -> RouteOptions:  # fmt: skip
    coefficients = (None if each is None else float(each) for each in (aux, z))
    return RouteOptions(k, score == "sigmoid", bool(normalise), *(groups or (1, 1)), float(scale), *coefficients)


def _formula(logits: Tensor, bias: Tensor | None, options: RouteOptions) -> Routing:
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    E = x.shape[-1]
    T = max(x.numel() // E, 1)
    scores = formula_by_blocks(torch.sigmoid, x) if options.sigmoid else x.softmax(-1)
    chosen = _choose(x.detach(), scores.detach(), bias, options)
    if options.sigmoid:
        weights = scores.gather(-1, chosen)
        if options.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    elif options.normalise:  # of logits: a bias may choose experts whose probabilities are all 0
        weights = x.log_softmax(-1).gather(-1, chosen).softmax(-1)
    else:
        weights = scores.gather(-1, chosen)
    flat = chosen.flatten()
    counts = torch.zeros(E, dtype=torch.int32, device=x.device).scatter_add(0, flat, torch.ones_like(flat, dtype=torch.int32))
    aux_loss = z_loss = None
    if options.aux is not None:
        shares = scores / (scores.sum(-1, keepdim=True) + _TINY) if options.sigmoid else scores
        means = shares.flatten(0, -2).sum(0) / T if x.dim() > 1 else shares
        loads = counts.to(x.dtype) * (options.aux * E / (T * options.k))
        aux_loss = (loads * means).sum()
    if options.z is not None:
        z_loss = (x.logsumexp(-1).square() * (options.z / T)).sum()
    return Routing(weights * options.scale, chosen, counts, aux_loss, z_loss)


def _choose(x: Tensor, scores: Tensor, bias: Tensor | None, options: RouteOptions) -> Tensor:
    """Return the experts of each token, the best first. Without a bias they are in the order of the logits.

    Sorts are stable: torch.topk promises nothing of equal numbers, and a GPU's chooses others than a CPU's.
    """
    choice = x if bias is None else scores + bias.detach().to(x.dtype)
    order = choice.sort(dim=-1, descending=True, stable=True).indices
    if options.groups > 1:
        grouped = (scores if bias is None else choice).unflatten(-1, (options.groups, -1))
        best = grouped.topk(2).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices[..., : options.top_groups]
        kept = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0)
        kept_first = kept.gather(-1, order // grouped.shape[-1]).sort(dim=-1, descending=True, stable=True).indices
        order = order.gather(-1, kept_first)
    return order[..., : options.k].contiguous()


# ---- registered ops ----


def _forward_fake(logits: Tensor, bias: Tensor | None, options: RouteOptions) -> tuple[Tensor | None, ...]:
    shape = (*logits.shape[:-1], options.k)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty(logits.shape[-1], dtype=torch.int32),
        *(None if each is None else logits.new_empty((), dtype=torch.float32) for each in (options.aux, options.z)),
    )


def _backward_fake(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_forward = Registered(
    "route(Tensor logits, Tensor? bias, RouteOptions options) -> (Tensor, Tensor, Tensor, Tensor?, Tensor?)",
    route_forward, _forward_fake, RouteOptions, dispatched=partial(route_forward, keep_scratch=False),
)  # fmt: skip
_backward = Registered(
    "route_backward(Tensor logits, Tensor chosen, Tensor? counts, Tensor? dweights, Tensor? daux, Tensor? dz, "
    "RouteOptions options) -> Tensor",
    route_backward, _backward_fake, RouteOptions,
)  # fmt: skip


# ---- autograd ----


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, options: RouteOptions) -> tuple[Tensor | None, ...]:
        weights, chosen, counts, aux_loss, z_loss = _forward(logits, bias, options)
        ctx.set_materialize_grads(False)  # a loss may not be used, or the weights
        ctx.mark_non_differentiable(chosen, counts)
        ctx.options = options
        ctx.save_for_backward(logits, chosen, None if options.aux is None else counts)
        return weights, chosen, counts, aux_loss, z_loss

    @staticmethod
    @not_twice_differentiable
    def backward(
        ctx: Any, dweights: Tensor | None, dchosen: None, dcounts: None, daux: Tensor | None, dz: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        return _backward(*ctx.saved_tensors, dweights, daux, dz, ctx.options), None, None


_apply = fast_apply(_Route)


# ---- the public face: say what is wrong, choose who does it, return ----


def unsupported(logits: Tensor, **options: Any) -> str | None:
    """Why the kernels can't take this call, or None."""
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"logits is {logits.dtype}"
    if logits.shape[-1] > WIDEST:
        return f"logits has {logits.shape[-1]} experts, and the kernels hold {WIDEST}"
    return kernels_unsupported("logits", logits)


def variant(logits: Tensor, **options: Any) -> str:
    """Which kernels a call runs, and their tiles."""
    if not logits.numel():
        return "the PyTorch formula, as there is nothing to do"
    tokens = forward_tiles(logits.shape[-1]).block_m
    return f"one kernel forward, {tokens} tokens a program at a time, and one backward; keeps logits and chosen"


def _check(given: Mapping[str, Any]) -> None:
    logits, k, bias = given["logits"], given["k"], given["bias"]
    check_floating("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have a last dimension of experts, but has shape {tuple(logits.shape)}")
    E = logits.shape[-1]
    if not _is_int(k) or not 1 <= k <= E:
        raise ValueError(f"k must be an int from 1 to {E}, the number of experts, but is {k!r}")
    if given["score"] not in _SCORES:
        raise ValueError(f"score must be one of {', '.join(map(repr, _SCORES))}, but is {given['score']!r}")
    if bias is not None:
        check_floating("bias", bias, optional=True)
        if bias.shape != (E,):
            raise ValueError(f"bias must have shape {(E,)}, one number an expert, but has {tuple(bias.shape)}")
        check_device("bias", bias, logits, "logits")
    if given["groups"] is not None:
        _check_groups(given["groups"], k, E)
    for name, least in (("scale", -math.inf), ("aux", 0.0), ("z", 0.0)):
        value, optional = given[name], name != "scale"
        if optional and value is None:
            continue
        check_number(name, value, optional)
        if not (least <= value < math.inf and value > -math.inf):  # isfinite would break a compiled graph
            raise ValueError(f"{name} must be finite{'' if least < 0 else ' and at least 0'}, but is {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_groups(groups: object, k: int, E: int) -> None:
    if not isinstance(groups, tuple) or len(groups) != 2 or not all(map(_is_int, groups)):
        raise TypeError(f"groups must be two ints, the number of groups and how many a token has, or None, but is {groups!r}")
    count, top = groups
    if count < 1 or E % count or E // count < 2:
        raise ValueError(f"groups must divide the {E} experts into groups of at least two, but is {groups!r}")
    if not 1 <= top <= count or k > top * (E // count):
        raise ValueError(f"groups must leave a token from 1 to {count} groups, with at least k = {k} experts, but is {groups!r}")


def shard_route(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Tokens are divided. Losses are of all tokens: with them logits are whole."""
    logits = given["logits"]
    rows = leading_split(at["logits"], logits) if given["aux"] is None and given["z"] is None else WHOLE
    own = split_output(rows, logits)
    counts = WHOLE if rows == WHOLE else PARTIAL
    return Layout({"logits": rows, "bias": WHOLE}, outputs=[own, own, counts, WHOLE, WHOLE, WHOLE])


def route(
    logits: Tensor,
    k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    normalise: bool = True,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
    aux: float | None = None,
    z: float | None = None,
    backend: str | None = None,
) -> Routing:
    """Choose each token's k experts and weight them; count the experts' tokens; compute a router's losses.

    One kernel forward, one backward. Experts of equal scores are chosen in their order, on every device. (``torch.topk`` promises
    no order, and its GPU kernels choose others than its CPU's.) NaN is above all numbers, as in ``torch.topk``.

    Args:
        logits: ``[..., E]``, a router's scores of E experts; E up to 1024 on a GPU.
        k: experts a token.
        score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each.
        bias: ``[E]``, added to scores where experts are chosen, and not in weights. It gets no gradient; `nn.Router.update_bias`
            moves it.
        normalise: divide weights by their sum, whatever k is. Of a softmax this is the softmax over the chosen logits.
        groups: the number of groups, of neighbouring experts, and how many of them a token's experts may come from, as DeepSeek
            V3 has them: groups with the largest sums of their two best scores.
        scale: multiplies the weights.
        aux: coefficient of the load-balancing loss, which is ``aux`` where all experts get equally many tokens; None: no loss.
        z: coefficient of the z-loss, the mean square of the logits' logsumexp; None: no loss.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND.

    Returns:
        `onepass.Routing`: ``.weights`` and ``.chosen`` ``[..., k]``, ``.counts`` ``[E]``, ``.aux_loss`` and ``.z_loss``. Weights
        and losses are fp32. Losses and counts are over all of this rank's tokens. ``.with_capacity(factor)`` drops what is beyond
        an expert's capacity. Writing to chosen in place makes backward raise.
    """
    given = {
        "logits": logits, "k": k, "score": score, "bias": bias, "normalise": normalise, "groups": groups, "scale": scale,
        "aux": aux, "z": z,
    }  # fmt: skip
    if has_dtensor(logits, bias):
        return run_on_shards("route", **given, backend=backend)  # type: ignore[no-any-return]
    _check(given)
    if aux is not None and needs_grad(logits):
        refuse("route with aux", "its loss has a gradient that depends on which experts all tokens chose")
    chosen = choose("route", backend, unsupported(logits))
    if chosen not in NATIVE:
        return run_other("route", chosen, **given)  # type: ignore[no-any-return]
    options = _options(k, score, normalise, groups, scale, aux, z)
    if chosen == "torch" or logits.numel() == 0:
        return _formula(logits, bias, options)
    by_kernels = _apply if needs_grad(logits) else _forward
    return Routing(*by_kernels(logits, None if bias is None else bias.detach(), options))


define_op(
    route,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: unsupported(**vars(call)),
    variant=lambda call: variant(**vars(call)),
    sharding=shard_route,
)
