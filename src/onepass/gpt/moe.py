"""A mixture of experts in place of an MLP. A router sends each token to its top-k experts and weights their outputs.

Tokens are sorted by expert, so that each linear layer of all experts is one grouped GEMM (ops/linear/grouped.py). The activation
multiplies by the router's weight. Both products may run in eight bits. No token is dropped.
Each rank of tp_group holds a shard of every expert.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from onepass.distributed.collectives import copy_to_group, gather_sequence, reduce_scatter_sequence, sum_over_group
from onepass.gpt.config import Config
from onepass.gpt.parts import Initializer, WholeWeight, makes_products_again, plain_activation
from onepass.nn.fp8_state import GroupedLayer
from onepass.nn.sharding import DividedParameters, Division
from onepass.ops.activation.grouped import activation_grouped_linear
from onepass.ops.linear.grouped import gathered_grouped_linear, grouped_linear
from onepass.ops.linear.routing import Routes, gather_tokens, sort_rows
from onepass.ops.routing.logits import router_logits
from onepass.ops.routing.route import route
from onepass.product.grouped import GroupedOptions
from onepass.runtime.recomputed import recomputed

# ---- modules ----


class RouterLogits(WholeWeight):
    """Each token's logits of the experts: a linear layer, at least in fp32 whatever the model's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return router_logits(x, self.weight)


class ParallelExperts(DividedParameters, GroupedLayer):
    """All experts' weights: weight1 [experts, parts x size, hidden_size] and weight2 [experts, hidden_size, size].

    parts is 2 for a gated activation and otherwise 1. Each rank holds 1 / ranks of size.
    """

    weight1: nn.Parameter
    weight2: nn.Parameter
    grouped_weights = ("weight1", "weight2")

    def __init__(self, config: Config, tp_group: dist.ProcessGroup | None, start: Initializer, device: Any) -> None:
        super().__init__(tp_group)
        assert config.num_moe_experts is not None
        self.config = config
        self.starts = start.of("weight1"), start.of("weight2", 1 / math.sqrt(2 * config.num_layers))
        experts, hidden, size = config.num_moe_experts, config.hidden_size, config.expert_size
        parts, own = 2 if config.gated_linear_unit else 1, size // self.ranks
        options: dict[str, Any] = {"device": device, "dtype": config.dtype}
        self.hold("weight1", experts, parts * own, hidden, division=Division(1, parts * size, parts), **options)
        self.hold("weight2", experts, hidden, own, division=Division(2, size), **options)
        self.reset_parameters()
        self.mark_parameters()

    def reset_parameters(self) -> None:
        self.start("weight1", self.starts[0])
        self.start("weight2", self.starts[1])

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        """Return this rank's partial sum for each route of the tokens x, sorted by expert."""
        c = self.config
        weight, precision = self.given(self.weight2), self.precision
        h = self._up(x, routes)
        again = partial(self._up, x.detach(), routes._replace(weights=routes.weights.detach()))
        with recomputed(h, again) if makes_products_again(c) else nullcontext():
            if c.bias_activation_fusion:
                options: dict[str, Any] = {"clamp": c.activation_func_clamp_value, "linear_offset": c.glu_linear_offset}
                options |= {"token_weight": routes.weights, "save": c.activation_save, "precision": precision}
                return activation_grouped_linear(h, weight, routes.ends, c.activation, **options)
            a = (plain_activation(h, None, c) * routes.weights.unsqueeze(-1)).to(h.dtype)
            return grouped_linear(a, weight, routes.ends, precision)

    def _up(self, x: Tensor, routes: Routes) -> Tensor:
        return gathered_grouped_linear(x, self.given(self.weight1), routes, GroupedOptions(self.precision))


class MoE(nn.Module):
    """Router and experts. forward returns (y, load-balancing loss). The loss is None where moe_aux_loss_coeff is 0."""

    def __init__(self, config: Config, tp_group: dist.ProcessGroup | None, start: Initializer, device: Any) -> None:
        super().__init__()
        assert config.num_moe_experts is not None
        self.config, self.tp_group = config, tp_group
        self.router = RouterLogits(config, (config.num_moe_experts, config.hidden_size), start.of("router"), device)
        self.experts = ParallelExperts(config, tp_group, start.of("experts"), device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        c, group = self.config, self.tp_group
        flat = x.flatten(0, -2)
        logits = self.router(flat)
        if c.sequence_parallel:  # all ranks route all tokens
            flat, logits = gather_sequence(flat, group), gather_sequence(logits, group, sum_gradient=False)
        else:
            flat = copy_to_group(flat, group)
        k = c.moe_router_topk
        routing = route(logits, k, normalise=k > 1, aux=c.moe_aux_loss_coeff or None)
        weights = copy_to_group(routing.weights, group)  # gradients of the routing weights are partial sums
        routes = sort_rows(weights, routing.chosen, logits.shape[1])
        y = gather_tokens(self.experts(flat, routes), routes)
        y = (reduce_scatter_sequence if c.sequence_parallel else sum_over_group)(y, group)
        return y.view(x.shape), routing.aux_loss
