"""Megatron's local experts, SequentialMLP, by grouped products: the weights of all experts of a rank are one parameter a layer.

Rows come sorted by expert from Megatron's dispatcher, which sends them between ranks, and as many a rank has under expert tensor
parallelism. Each number of rows stays where it is: nothing here waits for a GPU. Checkpoints are SequentialMLP's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.megatron.mlp import fused_activation
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.grouped import multiply_activated_rows
from onepass.ops.experts.expert_bias import add_expert_bias
from onepass.product.grouped import GroupedOptions, multiply_grouped_rows
from onepass.runtime.dispatch import product_type


class StackedLinear(nn.Module):
    """The parameters of one linear layer of each expert: ``weight`` [experts, N, K], and ``bias`` [experts, N] or None."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.register_parameter("bias", None)
        for name, first in layers[0].named_parameters():
            stacked = nn.Parameter(torch.stack([getattr(layer, name).detach() for layer in layers]))
            vars(stacked).update(vars(first))  # who reduces its gradient, and which part of a tensor it is
            if getattr(first, "tensor_model_parallel", False):
                stacked.partition_dim = first.partition_dim + 1  # type: ignore[attr-defined]
            if name == "bias":  # a vector of each expert, whose rate MuP doesn't divide; it asks for this mark or one dimension
                stacked.is_embedding_parameter = True  # type: ignore[attr-defined]
            self.register_parameter(name, stacked)

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias: hooks that gather parameters run."""
        return self.weight, self.bias


def build_experts(num_local_experts: int, config: Any, *rest: Any, **options: Any) -> Any:
    """Return the experts of a MoELayer: grouped ones, or a SequentialMLP where Megatron has to compute the activation."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    alone = fused_activation(config) is None or config.fp8 or config.fp4
    return (SequentialMLP if alone else grouped_sequential_mlp())(num_local_experts, config, *rest, **options)


def with_grouped_experts(stock: Any) -> Any:
    """Wrap LocalSpecProvider.grouped_mlp_modules: with moe_grouped_gemm experts are `build_experts`'."""

    def grouped_mlp_modules(provider: Any, moe_use_grouped_gemm: bool) -> Any:
        sequential = stock(provider, moe_use_grouped_gemm)
        return partial(build_experts, **sequential.keywords) if moe_use_grouped_gemm else sequential

    return grouped_mlp_modules


def refusing_stacks(get_optimizer: Any) -> Any:
    """Wrap what makes Muon and its like, which step matrices: they take a stack of them for none, and one of biases for one."""

    @wraps(get_optimizer, assigned=("__doc__",))  # the report names it as ours
    def get(config: Any, model_chunks: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(module, StackedLinear) for chunk in model_chunks for module in chunk.modules()):
            raise NotImplementedError(
                f"optimizer must step each number by itself, as adam does, where onepass stacks the weights of experts, but is "
                f"{config.optimizer}: leave moe_grouped_gemm off"
            )
        return get_optimizer(config, model_chunks, *args, **options)

    return get


@cache
def grouped_sequential_mlp() -> Any:
    """Return the class of SequentialMLPs whose experts are two `StackedLinear`."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    class GroupedSequentialMLP(SequentialMLP):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)  # the experts start as stock's
            experts = [*self._modules.pop("local_experts")]
            for layer in ("linear_fc1", "linear_fc2"):
                self.add_module(layer, StackedLinear([getattr(expert, layer) for expert in experts]))
            # not modules of this one: they have no memory, and know SequentialMLP's keys
            self.local_experts: Any = tuple(expert.to("meta") for expert in experts)
            self.register_state_dict_post_hook(_split_state)
            self.register_load_state_dict_pre_hook(_stack_state)
            config, activation = self.config, fused_activation(self.config)
            assert activation is not None  # or SequentialMLP would stand here
            gate = config.activation_func_clamp_value, float(config.glu_linear_offset) or None
            key = find_activation(activation).key
            self.options = ActivationOptions(key, *(gate if config.gated_linear_unit else (None, None)))
            in_fp8 = config.bias_activation_fusion and config.activation_func_fp8_input_store
            self.save = "fp8" if in_fp8 else "input"

        def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor) -> Any:
            x, probs = permuted_local_hidden_states, permuted_probs
            if self.config.moe_apply_probs_on_input:
                if self.config.moe_router_topk != 1:
                    raise ValueError(
                        f"moe_router_topk must be 1 with moe_apply_probs_on_input, but is {self.config.moe_router_topk}"
                    )
                x, probs = (probs.unsqueeze(-1) * x).to(x.dtype), None  # type: ignore[assignment]
            ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
            weight, bias = self.linear_fc1()
            y = multiply_grouped_rows(x, weight, ends, product_type(x), GroupedOptions(name="linear_fc1.weight"))
            y = add_expert_bias(y, bias, ends, None, "linear_fc1.bias", None)
            weight, bias = self.linear_fc2()
            how = GroupedOptions(name="linear_fc2.weight")
            y = multiply_activated_rows(y, weight, ends, self.options, probs, how, save=self.save)
            return add_expert_bias(y, bias, ends, probs, "linear_fc2.bias", None), None

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
        ) -> dict[str, Any]:
            """Return stock's shards, those of a parameter as one factory, for which the optimizer's state is made too."""
            state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            for name, parameter in self.named_parameters():
                parts = [state.pop(f"{prefix}local_experts.{e}.{name}") for e in range(self.num_local_experts)]
                state[prefix + name] = _stacked_shards(f"{prefix}experts.", name, parameter, parts)
            return state

    return GroupedSequentialMLP


# ---- checkpoints ----


def _split_state(experts: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Give each expert its part of state_dict's parameters, by SequentialMLP's keys."""
    stacked = {name: state.pop(prefix + name) for name, _ in experts.named_parameters()}
    for e, expert in enumerate(experts.local_experts):
        for name in expert.state_dict():
            state[f"{prefix}local_experts.{e}.{name}"] = stacked[name][e] if name in stacked else None


def _stack_state(experts: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Turn SequentialMLP's keys into ours, where all experts are there. Shards that were loaded have our names already."""
    names = {name for name, _ in experts.named_parameters()}
    for name in experts.local_experts[0].state_dict():
        keys = [f"{prefix}local_experts.{e}.{name}" for e in range(experts.num_local_experts)]
        if all(key in state for key in keys):
            parts = [state.pop(key) for key in keys]
            if name in names:
                state[prefix + name] = torch.stack(parts)


def _stacked_shards(root: str, name: str, parameter: Tensor, parts: Sequence[Any]) -> Any:
    """Return a factory of the parameter's shards. `parts`: each expert's shard or factory, of a key that begins with `root`."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    tails = [part.key.removeprefix(root) for part in parts]  # with the expert's number where each has a key of its own

    def build(key: str, t: Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
        if flattened_range is not None:
            raise NotImplementedError("flattened_range must be None for stacked experts")
        head, built = key.removesuffix(name), []
        for part, tail, own in zip(parts, tails, t.detach(), strict=True):
            part = replace(part, key=head + tail, data=own, replica_id=replica_id)
            built.append(part.build() if isinstance(part, ShardedTensorFactory) else replace(part, dtype=own.dtype))
        return built

    def merge(loaded: list[Any]) -> Tensor:
        experts = zip(parts, loaded, strict=True)
        return torch.stack([part.merge_fn(own) if isinstance(part, ShardedTensorFactory) else own for part, own in experts])

    return ShardedTensorFactory(root + name, parameter, build, merge, parts[0].replica_id)
