"""experts: each token through its experts, weighted and summed.

Formula  y[t] = shared[t] + sum_j w[t, j] (down[e] act(up[e] x[t] + up_bias[e]) + down_bias[e]) of e = chosen[t, j], in the order
         of j. Of two equal experts of a token both count. act is bias_activation's, with clamp and linear_offset.
Shapes   x [..., H], chosen and weights [..., k], up [E, 2 I or I, H], down [E, H, I]; transposed: up [E, H, 2 I or I], down
         [E, I, H]. T tokens, M = T k rows.
Rows     are sorted by expert (kernels/token_rows.py). Up's product gathers them, down's makes the activation, with w in it, and
         one pass sums by token. Nothing is read by the host, and nothing is atomic: the same bits in each call.
Saves    x, the order, and up's result; recompute=True: x and the order.
Products in bf16 on GPUs PyTorch's grouped ones, on Hopper rows' by Triton (kernels/grouped_kernels.py), or QuACK's
         (kernels/quack_product.py); elsewhere a loop over experts, which waits for a GPU. The weights' gradients are rounded once
         before they are added to main_grad, but QuACK adds as it stores.
LoRA     of an expert is that of its rows (product/grouped.py). Nothing of the weights' size is made.
Bytes    of M rows: x's gathered twice, up's result written and read three times, the activation's written twice and read twice,
         down's written and read, and as much again of gradients; up's bias reads and writes its rows once more, down's 1 / k of
         them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onepass.gradients.written_names import WrittenNames
from onepass.kernels.grouped_kernels import triton_multiplies
from onepass.kernels.quack_product import quack_adds, quack_multiplies
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.formula import ActivationOptions, activation_formula, check_options
from onepass.ops.activation.grouped import multiply_activated_rows
from onepass.ops.activation.kernels import activation_unsupported
from onepass.ops.experts.expert_bias import add_expert_bias, add_weighted_bias
from onepass.ops.linear.grouped import gathered_grouped_linear
from onepass.ops.linear.routing import gather_tokens, sort_rows
from onepass.product.grouped import GroupedOptions
from onepass.product.lora import MOST_DOCUMENTS, LoRA
from onepass.runtime.backend import NATIVE, choose, run_other
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.checks import check_device, check_floating, check_number
from onepass.runtime.dispatch import cast, has_address, product_type, under_functorch
from onepass.runtime.fp8_recipe import Precision, recipe_of
from onepass.runtime.op import Call, define_op
from onepass.runtime.process_setting import validating
from onepass.runtime.sharding import Layout, Split, by_rows, has_dtensor, refuse, run_on_shards

Adapters = tuple[LoRA | None, LoRA | None] | None


def experts_reference(
    x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, activation: str = "swiglu", *,
    up_bias: Tensor | None = None, down_bias: Tensor | None = None, shared: Tensor | None = None, lora: Adapters = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Return y by the formula, of all experts for all tokens: for every type, and for functional derivatives."""
    given = {"clamp": None, "linear_offset": 0.0, "interleaved": False, "transposed": False, "activation": activation} | options
    up_lora, down_lora = lora or (None, None)
    y = torch.zeros_like(x) if shared is None else shared.to(x.dtype)
    for e in range(up.shape[0]):
        w = torch.where(chosen == e, weights, 0).sum(-1, keepdim=True).to(x.dtype)
        h = _multiplied(x, up, e, up_bias, up_lora, given["transposed"])
        a = activation_formula(h, None, None, _options(given)).to(x.dtype)
        own = _multiplied(a, down, e, down_bias, down_lora, given["transposed"])
        y = y + torch.where((chosen == e).any(-1, keepdim=True), w * own, 0)  # another token's NaN is not this one's
    known = ((chosen >= 0) & (chosen < up.shape[0])).all(-1, keepdim=True)
    return torch.where(known, y, torch.nan)


def _multiplied(
    x: Tensor, weight: Tensor, e: int, bias: Tensor | None, lora: LoRA | None, transposed: bool
) -> Tensor:  # fmt: skip
    w = weight[e].to(x.dtype)
    y = x @ (w if transposed else w.t())
    if lora is not None:
        y = y + lora.scale * (x @ lora.a[e].to(x.dtype).t()) @ lora.b[e].to(x.dtype).t()
    return y if bias is None else y + bias[e].to(x.dtype)


# ---- the public face: say what is wrong, choose who does it, return ----


def variant(call: Call) -> str:
    """Which products and passes a call runs."""
    if not call.x.numel():
        return "the PyTorch formula, as there is nothing to do"
    E, k = call.up.shape[0], call.chosen.shape[-1]
    products = "grouped products" if recipe_of(call.precision) is None else "grouped products in eight bits where they gain"
    kept = "x and the order of rows" if call.recompute else "x, the order of rows and up's result"
    products += f" forward, four backward{_by_others(call)}"
    return f"rows of {k} of {E} experts a token, sorted by expert; two {products}; keeps {kept}"


def _by_others(call: Call) -> str:
    """Name the products that are not PyTorch's."""
    quacks: dict[str, list[str]] = {"products": [], "gradient": [], "gradient into main_grad": []}
    tritons: dict[str, list[str]] = {"products": []}
    for name, weight in (("up", call.up), ("down", call.down)):
        rows, main_grad = call.chosen.numel(), getattr(weight, "main_grad", None)
        size, in_16_bits = rows * weight.shape[1] * weight.shape[2], recipe_of(call.precision) is None and not invariant()
        is_added = main_grad is not None and quack_adds(call.x, main_grad)
        multiplied = in_16_bits and quack_multiplies(call.x, weight, size)
        if multiplied:
            quacks["products"].append(name)
        elif not is_added and quack_multiplies(call.x, weight, size, of_gradient=True):
            quacks["gradient"].append(name)
        if in_16_bits and not multiplied and triton_multiplies(call.x, weight, rows):
            tritons["products"].append(name)
        if is_added:
            quacks["gradient into main_grad"].append(name)
    return _said(quacks, "QuACK") + _said(tritons, "Triton")


def _said(named: dict[str, list[str]], by: str) -> str:
    said = [f"{' and '.join(names)}'s {what}" for what, names in named.items() if names]
    return f", {' and '.join(said)} by {by}" if said else ""


def _check(given: Mapping[str, Any]) -> None:
    x, up, down, chosen, weights = (given[name] for name in ("x", "up", "down", "chosen", "weights"))
    for name in ("x", "up", "down", "weights"):
        check_floating(name, given[name])
    act = find_activation(given["activation"])
    check_options(act, given["clamp"], given["linear_offset"], "input")
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, but is a scalar")
    H, transposed = x.shape[-1], given["transposed"]
    wanted = "(E, hidden size, inner size)" if transposed else "(E, inner size, hidden size)"
    if up.dim() != 3 or not up.shape[0] or up.shape[1 if transposed else 2] != H:
        raise ValueError(f"up must have shape {wanted} of x's hidden size {H}, but has {tuple(up.shape)}")
    E, wide = up.shape[0], up.shape[2 if transposed else 1]
    if wide % act.parts:
        raise ValueError(f"up must have an even inner size for {act.name!r}, which has two halves, but has {wide}")
    if given["interleaved"] and not act.gated:
        raise ValueError(f"interleaved must be False for {act.name!r}, which has no gate, but is True")
    inner = wide // act.parts
    of_down = (E, inner, H) if transposed else (E, H, inner)
    if down.shape != of_down:
        raise ValueError(f"down must have shape {of_down}, as up and x have it, but has {tuple(down.shape)}")
    if not isinstance(chosen, Tensor) or chosen.dtype not in (torch.int32, torch.int64):
        kind = f"one of {chosen.dtype}" if isinstance(chosen, Tensor) else f"a {type(chosen).__name__}"
        raise TypeError(f"chosen must be a tensor of torch.int32 or torch.int64, but is {kind}")
    if chosen.dim() != x.dim() or chosen.shape[:-1] != x.shape[:-1] or not chosen.shape[-1]:
        raise ValueError(f"chosen must have shape {(*x.shape[:-1], 'k')}, as x's tokens, but has {tuple(chosen.shape)}")
    if weights.shape != chosen.shape:
        raise ValueError(f"weights must have chosen's shape {tuple(chosen.shape)}, but has {tuple(weights.shape)}")
    for name, shape in (("up_bias", (E, wide)), ("down_bias", (E, H)), ("shared", tuple(x.shape))):
        if given[name] is not None:
            check_floating(name, given[name], optional=True)
            if given[name].shape != shape:
                raise ValueError(f"{name} must have shape {shape}, but has {tuple(given[name].shape)}")
    for name in ("up", "down", "chosen", "weights", "up_bias", "down_bias", "shared"):
        if given[name] is not None:
            check_device(name, given[name], x)
    _check_lora(given["lora"], x, (wide, H), (H, inner), E)
    recipe_of(given["precision"])
    _check_chosen(chosen, E)


def _check_lora(lora: object, x: Tensor, of_up: tuple[int, int], of_down: tuple[int, int], E: int) -> None:
    if lora is None:
        return
    if not isinstance(lora, tuple) or isinstance(lora, LoRA) or len(lora) != 2:
        raise TypeError(f"lora must be None or a pair, of up and of down, of onepass.LoRA or None, but is {lora!r}")
    if E > MOST_DOCUMENTS:
        raise ValueError(f"lora goes with at most {MOST_DOCUMENTS} experts, but there are {E}")
    for name, adapter, (N, K) in zip(("lora's up", "lora's down"), lora, (of_up, of_down), strict=True):
        if adapter is None:
            continue
        if not isinstance(adapter, LoRA):
            raise TypeError(f"{name} must be an onepass.LoRA or None, but is a {type(adapter).__name__}")
        check_number(f"{name}.scale", adapter.scale)
        for option in ("rows", "dropout", "ends"):
            if getattr(adapter, option):
                raise ValueError(f"{name}.{option} must be left out of experts, but is {getattr(adapter, option)!r}")
        for part in ("a", "b"):
            check_floating(f"{name}.{part}", getattr(adapter, part))
        rank = adapter.a.shape[1] if adapter.a.dim() == 3 and adapter.a.shape[1] else "r"
        for part, shape in (("a", (E, rank, K)), ("b", (E, N, rank))):
            found = getattr(adapter, part)
            if found.shape != shape:
                raise ValueError(f"{name}.{part} must have shape {shape}, but has {tuple(found.shape)}")
            check_device(f"{name}.{part}", found, x)


def _check_chosen(chosen: Tensor, E: int) -> None:
    """Raise where an expert isn't there, if the host may know: on a GPU only under `validate()`, as results are NaN otherwise."""
    if torch.compiler.is_compiling() or not has_address(chosen) or under_functorch() or not chosen.numel():
        return
    if chosen.device.type == "cpu" or validating():
        least, most = (int(number) for number in chosen.aminmax())
        if least < 0 or most >= E:
            raise ValueError(f"chosen must be from 0 to {E - 1}, of {E} experts, but there is {least if least < 0 else most}")


def shard_experts(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Tokens are divided, and weights are whole."""
    refuse(given, "precision", "lora")
    rows = ("x", "chosen", "weights", "shared")
    return by_rows(given, at, rows, ("up", "down", "up_bias", "down_bias"))


def experts(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    activation: str = "swiglu",
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: float | None = None,
    linear_offset: float = 0.0,
    interleaved: bool = False,
    transposed: bool = False,
    shared: Tensor | None = None,
    lora: Adapters = None,
    recompute: bool = False,
    precision: Precision = None,
    backend: str | None = None,
) -> Tensor:
    """Send each token through its k experts, and sum what they return, weighted.

    Tokens' rows are sorted by expert, so that each layer of all experts is one grouped product. No token is dropped. The order
    and the sum are the same in each call. Gradients of weights that carry ``main_grad`` are added there.

    Args:
        x: ``[..., H]``, the tokens.
        up: ``[E, 2 I, H]`` for a gated activation, gates first, otherwise ``[E, I, H]``.
        down: ``[E, H, I]``.
        chosen: ``[..., k]``, int32 or int64: each token's experts, as `onepass.route` or ``torch.topk`` returns them. An expert
            that comes twice counts twice. One that there isn't raises on a CPU and under `onepass.validate`; on a GPU it makes
            that token's result NaN, and no other's.
        weights: ``[..., k]``: they multiply the experts' results. Their gradient is that of a router.
        activation: as in `onepass.bias_activation`.
        up_bias, down_bias: ``[E, 2 I or I]`` and ``[E, H]``.
        clamp, linear_offset: as in `onepass.bias_activation`; 7.0 and 1.0 with ``quick_geglu`` for gpt-oss.
        interleaved: gates and what they multiply alternate in up's rows, as gpt-oss has them, and are not its halves.
        transposed: weights are ``[E, H, 2 I or I]`` and ``[E, I, H]``, as gpt-oss and Llama 4 have them.
        shared: ``[..., H]``, a shared expert's result. It is added in the pass that sums.
        lora: a pair of `onepass.LoRA`, of up and of down, either None, with a ``[E, r, K]`` and b ``[E, N, r]``. up and down are
            usually frozen then.
        recompute: keep x and the order of rows alone, and compute up's product again in backward.
        precision: ``fp8`` or an `onepass.FP8Recipe` runs forward's products and the rows' gradients in eight bits where PyTorch
            can and it gains. Elsewhere they keep their type, and the logger ``onepass`` says why.
        backend: ``auto``, ``triton``, ``torch`` or a registered name; None leaves it to `use_backend` and ONEPASS_BACKEND. It
            decides on the activation's pass. Products are PyTorch's.

    Returns:
        ``[..., H]``, in x's type or autocast's.
    """
    given: dict[str, Any] = {
        "x": x, "up": up, "down": down, "chosen": chosen, "weights": weights, "activation": activation, "up_bias": up_bias,
        "down_bias": down_bias, "clamp": clamp, "linear_offset": linear_offset, "interleaved": interleaved,
        "transposed": transposed, "shared": shared, "lora": lora, "recompute": recompute, "precision": precision,
    }  # fmt: skip
    if has_dtensor(x, up, down, chosen, weights, up_bias, down_bias, shared):
        return run_on_shards("experts", **given, backend=backend)  # type: ignore[no-any-return]
    _check(given)
    taken = choose("experts", backend, activation_unsupported(x, find_activation(activation)))
    if taken not in NATIVE:
        return run_other("experts", taken, **given)  # type: ignore[no-any-return]
    if under_functorch() or not x.numel():
        del given["recompute"], given["precision"]
        return experts_reference(**given)
    H, k = x.shape[-1], chosen.shape[-1]
    rows = x.reshape(-1, H), weights.reshape(-1, k), chosen.reshape(-1, k), None if shared is None else shared.reshape(-1, H)
    return _run(up, down, given, taken, *rows).view(*x.shape)


def _run(
    up: Tensor, down: Tensor, given: Mapping[str, Any], backend: str, x: Tensor, weights: Tensor, chosen: Tensor,
    shared: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return y of tokens [T, H]."""
    written = None if torch.compiler.is_compiling() else WrittenNames()
    of_up, of_down = given["lora"] or (None, None)
    routes = sort_rows(weights, chosen, up.shape[0], written)
    how = GroupedOptions(given["precision"], given["transposed"], of_up, "up", written)

    def rows_of(x: Tensor, by_row: Tensor) -> Tensor:
        h = gathered_grouped_linear(x, up, routes, how)
        h = add_expert_bias(h, given["up_bias"], routes.ends, None, "up_bias", written)
        of_rows = how._replace(lora=of_down, name="down")
        return multiply_activated_rows(h, down, routes.ends, _options(given), by_row, of_rows, backend=backend)

    x = cast(x, product_type(x))
    if given["recompute"] and torch.is_grad_enabled():
        y = checkpoint(rows_of, x, routes.weights, use_reentrant=False, preserve_rng_state=False)
    else:
        y = rows_of(x, routes.weights)
    start = None if shared is None else cast(shared, y.dtype)
    start = add_weighted_bias(start, given["down_bias"], cast(weights, y.dtype), chosen, "down_bias", written)
    return gather_tokens(y, routes, start, written)


def _options(given: Mapping[str, Any]) -> ActivationOptions:
    clamp, offset, key = given["clamp"], float(given["linear_offset"]) or None, find_activation(given["activation"]).key
    return ActivationOptions(key, None if clamp is None else float(clamp), offset, interleaved=given["interleaved"])


define_op(
    experts,
    check=lambda call: _check(vars(call)),
    unsupported=lambda call: activation_unsupported(call.x, find_activation(call.activation)),
    variant=variant,
    sharding=shard_experts,
)
