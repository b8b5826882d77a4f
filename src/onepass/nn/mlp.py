"""MLP, a transformer's MLP: a linear layer up, an activation, and a linear layer down. The last two are one op."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import copy_to_group, gather_sequence
from onepass.gradients.vectors import with_fp32_grad
from onepass.nn.fp8_state import shown
from onepass.nn.linear import ColumnParallelLinear, Init, RowParallelLinear, check_input
from onepass.nn.sharding import DividedParameters, check_init, check_size
from onepass.ops.activation.activation_linear import activation_linear
from onepass.ops.activation.activations import find_activation
from onepass.ops.activation.formula import check_options
from onepass.product.lora import Adapters
from onepass.runtime.checks import check_per_token
from onepass.runtime.fp8_recipe import Precision


class MLP(DividedParameters):
    """The MLP of a transformer: a linear layer, an activation and a linear layer. It is Megatron's MLP without its config.

        mlp = onepass.nn.MLP(1024, 4096, tp_group=group)
        y = mlp(x)

    x and linear_fc1's output are saved for backward, which recomputes the activation. forward returns y, or (y, bias) with
    skip_bias_add. Initialisation, shards and state dict are those of a ColumnParallelLinear, ``linear_fc1``, and a
    RowParallelLinear, ``linear_fc2``. The names are Megatron's.

    Args:
        hidden_size: the size of the last dimension of x and of y.
        ffn_hidden_size: the size of the activation, a multiple of the group's size. For a gated activation linear_fc1 has twice
            as many outputs: the gates, then the values that they gate.
        activation, clamp, linear_offset: as in `onepass.bias_activation`. Registered activations work too.
        bias: False omits the biases of both linear layers. linear_fc1's bias is added with the activation.
        save: how linear_fc1's output is saved for backward, as in `onepass.activation_linear`.
        skip_bias_add: leave linear_fc2's bias to the caller.
        init_method: called on the whole weight of linear_fc1, whose bias then starts at zero. None is torch.nn.Linear's.
        output_layer_init_method: the same for linear_fc2. None is init_method.
        tp_group: the ranks that shard the activation. None is this rank alone.
        sequence_parallel: x and y are this rank's shards along the first dimension. linear_fc2's bias is marked
            `sequence_parallel`: its gradient is a partial sum (`onepass.parallel.reduce_sequence_parallel_grads`).
        precision: ``fp8`` or an `onepass.FP8Recipe` runs both layers' products in eight bits.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        activation: str = "swiglu",
        *,
        bias: bool = True,
        clamp: float | None = None,
        linear_offset: float = 0.0,
        save: str = "input",
        skip_bias_add: bool = False,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        precision: Precision = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp_group)
        check_size("hidden_size", hidden_size)
        self.divided("ffn_hidden_size", ffn_hidden_size)
        act = find_activation(activation)
        check_options(act, clamp, linear_offset, save)
        check_init("output_layer_init_method", output_layer_init_method)
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        self.clamp, self.linear_offset, self.save, self.skip_bias_add = clamp, linear_offset, save, skip_bias_add
        options: dict[str, Any] = {"bias": bias, "tp_group": tp_group, "sequence_parallel": sequence_parallel}
        options |= {"precision": precision, "device": device, "dtype": dtype}
        up = hidden_size, act.parts * ffn_hidden_size
        self.linear_fc1 = ColumnParallelLinear(*up, stride=act.parts, skip_bias_add=True, init_method=init_method, **options)
        self.linear_fc2 = ActivationRowParallelLinear(
            ffn_hidden_size,
            hidden_size,
            skip_bias_add=skip_bias_add,
            init_method=output_layer_init_method or init_method,
            **options,
        )

    def reset_parameters(self) -> None:
        """Re-initialise all parameters, like those of the unsharded MLP."""
        self.linear_fc1.reset_parameters()
        self.linear_fc2.reset_parameters()

    def forward(
        self, x: Tensor, per_token_scale: Tensor | None = None, *, fc1_lora: Adapters = None, fc2_lora: Adapters = None
    ) -> Any:
        """Return y, or (y, bias) with skip_bias_add.

        Args:
            x: ``[..., hidden_size]``.
            per_token_scale: ``[...]`` or ``[..., 1]``, x's leading dimensions. A factor for each row of y, linear_fc2's bias
                included, such as an MoE router's weight. With it y includes the bias even with skip_bias_add, which then
                returns (y, None), as in Megatron.
            fc1_lora, fc2_lora: an `onepass.LoRA` of linear_fc1's and of linear_fc2's weight, or several of each.
        """
        self._check(x, per_token_scale)
        h, bias = self.linear_fc1(x, lora=fc1_lora)
        return self.rest(h, bias, per_token_scale, lora=fc2_lora)

    def rest(self, h: Tensor, bias: Tensor | None, per_token_scale: Tensor | None = None, *, lora: Adapters = None) -> Any:
        """Run the MLP from linear_fc1's output `h` and `bias` on, for callers that fuse linear_fc1 with a preceding op."""
        y, left = self.linear_fc2(
            h,
            bias,
            per_token_scale,
            activation=self.activation,
            clamp=self.clamp,
            linear_offset=self.linear_offset,
            save=self.save,
            lora=lora,
        )
        return (y, left) if self.skip_bias_add else y

    def _check(self, x: Tensor, per_token_scale: Tensor | None) -> None:
        """Check the arguments before any computation or collective."""
        check_input(x, self.hidden_size, "hidden_size")
        if per_token_scale is not None:
            check_per_token("per_token_scale", per_token_scale, x)

    def extra_repr(self) -> str:
        parts = [f"{self.hidden_size}", f"{self.ffn_hidden_size}", f"activation={self.activation!r}"]
        return ", ".join(parts + shown(self, clamp=None, linear_offset=0.0, save="input"))


class ActivationRowParallelLinear(RowParallelLinear):
    """A RowParallelLinear of an activation of x, as one op: MLP's linear_fc2.

    MLP calls this module instead of only reading its parameters. So its hooks run, such as those that gather parameters in time.
    """

    def forward(
        self, x: Tensor, activation_bias: Tensor | None = None, per_token_scale: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (y, None), or (y, bias) with skip_bias_add and no per_token_scale. `options` are activation_linear's."""
        scale = None if per_token_scale is None else _wide(per_token_scale)
        y = activation_linear(
            x,
            self.given(self.weight),
            None if self.skip_bias_add or scale is not None else self.given(self.bias),
            activation_bias=activation_bias,
            token_weight=None if scale is None else self._of_all_rows(scale),
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            deferred=self.deferred,
            precision=self.precision,
            **options,
        )
        if scale is None:
            return y, self.given(self.bias) if self.skip_bias_add else None
        return _plus_scaled(y, self.given(self.bias), scale), None

    def _of_all_rows(self, scale: Tensor) -> Tensor:
        """Return the scale of all rows of this rank's activation. Backward sums the ranks' partial gradients of it."""
        return (gather_sequence if self.sequence_parallel else copy_to_group)(scale, self.tp_group)


def _wide(scale: Tensor) -> Tensor:
    """Return the scale in fp32 or wider, as its products are. Its gradient is summed over ranks and uses in that type too."""
    return scale.to(torch.promote_types(scale.dtype, torch.float32))


def _plus_scaled(y: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """Return y + scale * bias, with one scale for each row. It is computed in the scale's type and rounded once."""
    bias = with_fp32_grad(bias)
    return y if bias is None else torch.addcmul(y, scale.reshape(*y.shape[:-1], 1), bias).to(y.dtype)
