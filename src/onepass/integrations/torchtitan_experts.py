"""torchtitan's experts: grouped products with the activation in the second, rows of tokens sorted once. Imports torchtitan.

torchtitan's combine scales rows of results and sums them by token. Where no other rank has experts the scores are the
activation's factor instead, and one pass sums: `SortedExperts`. Elsewhere dispatch and combine are the dispatcher's.
Products are in bf16 whatever the model's type, as torchtitan's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward

from onepass.gradients.written_names import WrittenNames
from onepass.integrations.torchtitan_configs import new_config
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.grouped import multiply_activated_rows
from onepass.ops.experts.expert_bias import add_expert_bias
from onepass.ops.linear.grouped import gathered_grouped_linear
from onepass.ops.linear.routing import gather_tokens, sort_rows
from onepass.product.grouped import GroupedOptions, multiply_grouped_rows


class Chosen(NamedTuple):
    """Each token's experts and their scores, [T, K], where tokens come as they are and not as sorted rows."""

    experts: Tensor
    scores: Tensor


def _multiply(
    x: Tensor, counts: Tensor, chosen: Chosen | None, weights: Mapping[str, Tensor], biases: Mapping[str, Tensor],
    options: ActivationOptions, precision: Any,
) -> Tensor:  # fmt: skip
    """Return the experts' results of sorted rows, or those of `chosen` summed by token.

    weights: by their names, down last; those before are the parts that lie side by side. biases: of up and of down, or none.
    """
    written = None if chosen is None or torch.compiler.is_compiling() else WrittenNames()
    how, rows = GroupedOptions(precision, written=written), x.bfloat16()
    *ups, (down_name, down) = weights.items()
    if chosen is None:
        routes, by_row, ends = None, None, counts.cumsum(0, dtype=torch.int32)
        parts = [multiply_grouped_rows(rows, up, ends, rows.dtype, how._replace(name=name)) for name, up in ups]
    else:
        routes = sort_rows(chosen.scores, chosen.experts, down.shape[0], written)
        by_row, ends = routes.weights, routes.ends
        parts = [gathered_grouped_linear(rows, up, routes, how._replace(name=name)) for name, up in ups]
    h = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    of_up, of_down = biases.items() if biases else (("", None), ("", None))
    h = add_expert_bias(h, of_up[1], ends, None, of_up[0], written)
    y = multiply_activated_rows(h, down, ends, options, by_row, how._replace(name=down_name))
    y = add_expert_bias(y, of_down[1], ends, by_row, of_down[0], written)
    return (y if routes is None else gather_tokens(y, routes, None, written)).type_as(x)


def _local(experts: Any, *names: str) -> dict[str, Tensor]:
    """Return this rank's parts of parameters."""
    found = {name: getattr(experts, name) for name in names}
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in found.items()}


class GatedExperts(GroupedExperts):
    Config = new_config("GatedExperts", GroupedExperts, "precision")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.precision = config.precision

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor, chosen: Chosen | None = None) -> Tensor:
        weights = _local(self, "w1_EFD", "w3_EFD", "w2_EDF")
        options = ActivationOptions(find_activation("swiglu").key, None, None)
        return _multiply(x_RD, num_tokens_per_expert_E, chosen, weights, {}, options, self.precision)


class BiasedExperts(GptOssGroupedExperts):
    """gpt-oss's: gates and values alternate in up's rows."""

    Config = new_config("BiasedExperts", GptOssGroupedExperts, "precision")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.precision = config.precision

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor, chosen: Chosen | None = None) -> Tensor:
        weights, biases = _local(self, "mlp1_weight_EGD", "mlp2_weight_EDF"), _local(self, "mlp1_bias_EG", "mlp2_bias_ED")
        mesh = getattr(self.mlp1_weight_EGD, "device_mesh", None)
        if mesh is not None and "tp" in mesh.mesh_dim_names:  # ranks' results are summed, and each has the whole bias
            biases["mlp2_bias_ED"] = ScaleBiasForward.apply(biases["mlp2_bias_ED"], mesh["tp"].size(), torch.bfloat16)
        options = ActivationOptions(find_activation("quick_geglu").key, self.swiglu_limit, 1.0, interleaved=True)
        return _multiply(x_RD, num_tokens_per_expert_E, chosen, weights, biases, options, self.precision)


class SortedExperts(RoutedExperts):
    Config = new_config("SortedExperts", RoutedExperts)

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:  # fmt: skip
        given = topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
        dispatcher = self.token_dispatcher
        by_rank = type(dispatcher) not in (LocalTokenDispatcher, AllToAllTokenDispatcher)
        if by_rank or getattr(dispatcher, "ep_mesh", None) is not None:
            return super().forward(x_BLD, *given)  # type: ignore[no-any-return]
        chosen = Chosen(topk_expert_ids_BLK.flatten(0, 1), topk_scores_BLK.flatten(0, 1))
        with maybe_set_sparse_mesh():
            y: Tensor = self.inner_experts(x_BLD.flatten(0, 1), num_local_tokens_per_expert_E, chosen)
        return y.view(x_BLD.shape)


OF_EXPERTS: dict[Any, Any] = {GroupedExperts.Config: GatedExperts, GptOssGroupedExperts.Config: BiasedExperts}
