"""Linear layers: torch.nn.Linear by `onepass.linear`, and tensor-parallel layers, of which each rank has a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.distributed.collectives import gather_last, split_last
from onepass.gradients.deferred import DeferredWgrad
from onepass.nn.fp8_state import FP8Module, shown
from onepass.nn.sharding import DividedParameters, Division, check_init, check_size
from onepass.ops.linear.linear import linear
from onepass.product.lora import Adapters
from onepass.runtime.fp8_recipe import Precision, recipe_of

Init = Callable[[Tensor], Any]


class Linear(FP8Module, nn.Linear):
    """torch.nn.Linear by `onepass.linear`. Gradients of parameters that carry ``main_grad`` are added to it.

    The attribute `deferred` takes a `onepass.parallel.DeferredWgrad`, as in every layer of this module.

    Args:
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits. The others are torch.nn.Linear's.
    """

    deferred: DeferredWgrad | None = None
    precision: Precision = None

    def __init__(self, *args: Any, precision: Precision = None, **options: Any) -> None:
        super().__init__(*args, **options)
        recipe_of(precision)
        self.precision = precision

    def forward(self, input: Tensor, *, lora: Adapters = None) -> Tensor:
        """Return y. `lora`: an `onepass.LoRA` of the weight, or several."""
        check_input(input, self.in_features, "in_features")
        return linear(input, self.weight, self.bias, deferred=self.deferred, precision=self.precision, lora=lora)

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), *shown(self, precision=None)])


def check_input(x: Tensor, size: int, name: str, argument: str = "x") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{argument} must be a tensor, but is a {type(x).__name__}")
    if x.shape[-1:] != (size,):
        raise ValueError(f"{argument}'s last dimension must be {size}, {name}, but {argument} has shape {tuple(x.shape)}")


class _ParallelLinear(DividedParameters):
    """The base class of both layers: sizes, initialisation and extra_repr."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    deferred: DeferredWgrad | None = None
    precision: Precision = None
    _flags: tuple[str, ...] = ()  # options that extra_repr shows

    def __init__(
        self,
        input_size: int,
        output_size: int,
        skip_bias_add: bool,
        init_method: Init | None,
        tp_group: dist.ProcessGroup | None,
        sequence_parallel: bool,
        precision: Precision,
    ) -> None:
        super().__init__(tp_group)
        recipe_of(precision)
        self.precision = precision
        check_size("input_size", input_size)
        check_size("output_size", output_size)
        check_init("init_method", init_method)
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add, self.init_method = skip_bias_add, init_method
        self.sequence_parallel = sequence_parallel and self.ranks > 1  # a single rank has the whole sequence

    def reset_parameters(self) -> None:
        """Re-initialise all parameters, like those of the unsharded layer. With init_method the bias is zero, as in Megatron."""
        self.start_as_linear(self.input_size, self.init_method)

    def extra_repr(self) -> str:
        parts = [f"{self.input_size}", f"{self.output_size}", f"bias={self.bias is not None}", f"tp={self.ranks}"]
        return ", ".join(parts + shown(self, **dict.fromkeys(self._flags, False), precision=None))


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose outputs are sharded over tp_group. It is Megatron's without its config.

        up = ColumnParallelLinear(1024, 4096, tp_group=group)
        down = RowParallelLinear(4096, 1024, tp_group=group)
        y, _ = down(torch.nn.functional.gelu(up(x)[0]))

    forward returns (y, None), or (y, bias) with skip_bias_add. Shards are initialised like those of the unsharded layer, if all
    ranks have the same random state: each rank makes the whole weight and keeps its shard. The state dict has this rank's shards
    under torch.nn.Linear's keys. `onepass.nn.sharded_state_dict` returns the whole parameters.

    Args:
        input_size: the size of x's last dimension.
        output_size: the size of the whole y's last dimension. A multiple of the group's size times stride.
        bias: False omits the bias.
        gather_output: every rank returns the whole y, not its shard. Not with sequence_parallel.
        skip_bias_add: leave the bias to the caller, who may fuse it, as `onepass.bias_activation` does.
        init_method: called on the whole weight; the bias then starts at zero. By default both start as torch.nn.Linear's do.
        stride: the number of blocks of outputs. Each rank has a shard of each block: 2 for a gated activation, so that each rank
            has gates and their values. Or the sizes of the blocks, where they differ, such as queries, keys and values. Each is
            a multiple of the group's size.
        skip_weight_param_allocation: have no weight. Each call passes one, such as another module's.
        tp_group: the ranks. None is this rank alone.
        sequence_parallel: x and its gradient are this rank's shard along the first dimension.
        allreduce_dgrad: sum x's gradient over the ranks, which have the same x. None is True, unless sequence_parallel. With
            False each rank returns a partial sum.
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits.
        device, dtype: of the parameters.
    """

    _flags = ("gather_output", "skip_bias_add", "skip_weight_param_allocation", "sequence_parallel")

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        init_method: Init | None = None,
        stride: int | Sequence[int] = 1,
        skip_weight_param_allocation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        allreduce_dgrad: bool | None = None,
        precision: Precision = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, output_size, skip_bias_add, init_method, tp_group, sequence_parallel, precision)
        division = self._division(output_size, stride)
        self.output_size_per_partition = output_size // self.ranks
        self.gather_output, self.stride = gather_output, division.stride
        self.skip_weight_param_allocation = skip_weight_param_allocation
        if gather_output:
            self._check_gather("gather_output", sequence_parallel, bias)
        if allreduce_dgrad and sequence_parallel:
            raise ValueError("allreduce_dgrad and sequence_parallel exclude each other: x's gradient is summed already")
        self.allreduce_dgrad = self.ranks > 1 and not self.sequence_parallel and allreduce_dgrad is not False
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if not skip_weight_param_allocation:
            self.hold("weight", self.output_size_per_partition, input_size, device=device, dtype=dtype, division=division)
        if bias:
            self.hold("bias", self.output_size_per_partition, device=device, dtype=dtype, division=division)
        self.reset_parameters()
        self.mark_parameters()

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        lora: Adapters = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (y, None), or (y, bias) with skip_bias_add.

        Args:
            x: ``[..., input_size]``.
            weight: this rank's shard of another weight, used instead of the module's own.
            runtime_gather_output: replaces gather_output, unless None.
            lora: an `onepass.LoRA` of the weight, or several: a is whole, and b has this rank's rows.
        """
        if runtime_gather_output:
            self._check_gather("runtime_gather_output", self.sequence_parallel, self.bias is not None)
        check_input(x, self.input_size, "input_size")
        y = linear(
            x,
            self.given(self._weight(weight)),
            None if self.skip_bias_add else self.given(self.bias),
            tp_group=self.tp_group,
            allreduce_dgrad=self.allreduce_dgrad,
            sequence_parallel=self.sequence_parallel,
            deferred=self.deferred,
            precision=self.precision,
            lora=lora,
        )
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            y = gather_last(y, self.tp_group, sizes=(self.output_size_per_partition,) * self.ranks)
        return y, self.given(self.bias) if self.skip_bias_add else None

    def _division(self, size: int, stride: int | Sequence[int]) -> Division:
        if not isinstance(stride, Sequence):
            self.divided("output_size", size, stride)
            return Division(0, size, stride)
        for at, block in enumerate(stride):
            self.divided(f"stride[{at}]", block)
        if sum(stride) != size:
            raise ValueError(f"stride must be blocks of {size} together, output_size, but is {list(stride)}")
        return Division(0, size, len(stride), tuple(stride))

    def _weight(self, other: Tensor | None) -> Tensor:
        weight = self.weight if other is None else other
        if weight is None:
            raise ValueError("weight must be given with the call, as skip_weight_param_allocation leaves the module without one")
        shape = (self.output_size_per_partition, self.input_size)
        if other is not None and other.shape != shape:
            raise ValueError(f"weight must have shape {shape}, this rank's part, but has {tuple(other.shape)}")
        return weight

    def _check_gather(self, name: str, sequence_parallel: bool, bias: bool) -> None:
        """Raise for options that exclude each other. A group of one raises too, so that its code runs on several ranks."""
        if sequence_parallel:
            raise ValueError(f"{name} and sequence_parallel exclude each other: there, what follows takes this rank's part of y")
        if bias and self.skip_bias_add:
            raise ValueError(f"{name} and skip_bias_add exclude each other: the whole y doesn't fit this rank's part of bias")
        if self.stride > 1:
            raise ValueError(f"{name} and stride exclude each other: the ranks' parts side by side are not in the whole's order")


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose inputs are sharded over tp_group; y is the sum over the ranks. It is Megatron's without its config.

    forward returns (y, None), or (y, bias) with skip_bias_add. Initialisation and state dict are as ColumnParallelLinear's. The
    bias is whole on every rank.

    Args:
        input_size: the size of the whole x's last dimension. A multiple of the group's size.
        output_size: the size of y's last dimension.
        bias: False omits the bias. It is added after the sum.
        input_is_parallel: x is this rank's shard, such as a column-parallel layer's output. If False, x is whole and is split
            here. False is not allowed with sequence_parallel.
        skip_bias_add: leave the bias to the caller.
        init_method: called on the whole weight; the bias then starts at zero. By default both start as torch.nn.Linear's do.
        tp_group: the ranks. None is this rank alone.
        sequence_parallel: y is this rank's shard along the first dimension. The bias is marked `sequence_parallel`: its gradient
            is a partial sum (`onepass.parallel.reduce_sequence_parallel_grads`).
        precision: ``fp8`` or an `onepass.FP8Recipe` runs the products in eight bits.
        device, dtype: of the parameters.
    """

    weight: nn.Parameter
    _marked = ("bias",)
    _flags = ("skip_bias_add", "sequence_parallel")

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        init_method: Init | None = None,
        tp_group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        precision: Precision = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, output_size, skip_bias_add, init_method, tp_group, sequence_parallel, precision)
        if sequence_parallel and not input_is_parallel:
            raise ValueError("sequence_parallel needs input_is_parallel=True: x is divided by features, and y by the sequence")
        self.input_size_per_partition = self.divided("input_size", input_size)
        self.input_is_parallel = input_is_parallel
        shape, division = (output_size, self.input_size_per_partition), Division(1, input_size)
        self.hold("weight", *shape, device=device, dtype=dtype, division=division)
        self.register_parameter("bias", None)
        if bias:
            self.hold("bias", output_size, device=device, dtype=dtype)
        self.reset_parameters()
        self.mark_parameters()

    def forward(self, x: Tensor, *, lora: Adapters = None) -> tuple[Tensor, Tensor | None]:
        """Return (y, None), or (y, bias) with skip_bias_add. A LoRA's a has this rank's columns, and its b is whole."""
        if self.input_is_parallel:
            check_input(x, self.input_size_per_partition, "this rank's part of input_size")
        else:
            check_input(x, self.input_size, "input_size")
            x = split_last(x, self.tp_group)
        y = linear(
            x,
            self.given(self.weight),
            None if self.skip_bias_add else self.given(self.bias),
            tp_group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            reduce_output=True,
            deferred=self.deferred,
            precision=self.precision,
            lora=lora,
        )
        return y, self.given(self.bias) if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.input_is_parallel else ", input_is_parallel=False")
