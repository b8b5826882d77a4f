"""Parameters sharded over the ranks of a tensor-parallel group: initialisation, Megatron's attributes, and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.nn.norm import MarkedParameters, is_size


class Division(NamedTuple):
    """How a parameter is sharded over the ranks, in rank order."""

    dim: int
    size: int  # of the whole parameter, along dim
    stride: int = 1  # number of blocks. A rank has a shard of each: 2 for gates and their values
    sizes: tuple[int, ...] = ()  # of the blocks, where they differ

    def blocks(self) -> tuple[int, ...]:
        return self.sizes or (self.size // self.stride,) * self.stride


def part_of(whole: Tensor, division: Division, rank: int, ranks: int) -> Tensor:
    """Return a rank's shard of the whole parameter."""
    parts = []
    for block in whole.split(division.blocks(), division.dim):
        first, last = range_of(block.shape[division.dim], rank, ranks)
        parts.append(block.narrow(division.dim, first, last - first))
    return parts[0] if len(parts) == 1 else torch.cat(parts, division.dim)


def range_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the start and stop of a rank's shard, as torch.chunk and DTensor divide. The last ranks may have less or nothing."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


def check_size(name: str, value: object) -> None:
    if not is_size(value):
        raise ValueError(f"{name} must be a size of at least 1, but is {value!r}")


def check_init(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function of the weight or None, but is {value!r}")


class DividedParameters(MarkedParameters):
    """A module that holds this rank's shards of its parameters.

    Parameters carry Megatron's attributes tensor_model_parallel, partition_dim and partition_stride. A move or a copy makes new
    parameters, which get the attributes again. Shards are initialised like those of the unsharded module: each rank makes the
    whole parameter on its device, one at a time, and keeps its shard. So all ranks must start with the same random state. They
    also end with the same one.
    """

    tp_group: dist.ProcessGroup | None
    sequence_parallel = False
    _marked: tuple[str, ...] = ()
    _divisions: dict[str, Division]  # of the sharded parameters, by name

    def __init__(self, tp_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        if tp_group is not None and not isinstance(tp_group, dist.ProcessGroup):  # new_group's result outside of the group
            raise TypeError(
                f"tp_group must be None or a torch.distributed.ProcessGroup that has this rank, but is {tp_group!r}: "
                "a rank that is in no group has no part of this module"
            )
        self.tp_group = tp_group
        self.rank, self.ranks = (0, 1) if tp_group is None else (tp_group.rank(), tp_group.size())
        self._divisions = {}

    def divided(self, name: str, size: int, stride: int = 1) -> int:
        """Return this rank's share of a size. Raise ValueError where the size does not divide evenly."""
        check_size(name, size)
        check_size("stride", stride)
        if size % (self.ranks * stride):
            said = "the size of tp_group" + (" times stride" if stride > 1 else "")
            raise ValueError(f"{name} must be a multiple of {self.ranks * stride}, {said}, but is {size}")
        return size // self.ranks

    def hold(self, name: str, *shape: int, device: Any, dtype: Any, division: Division | None = None) -> None:
        """Register an uninitialised parameter. `shape` is the shape of this rank's shard."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        if division is not None:
            self._divisions[name] = division

    @torch.no_grad()
    def start(self, name: str, init: Callable[[Tensor], Any]) -> None:
        """Call `init` on the whole parameter, and keep this rank's shard."""
        parameter, division = getattr(self, name), self._divisions.get(name)
        if division is None or self.ranks == 1:
            init(parameter)
            return
        whole = parameter.new_empty(whole_shape(parameter, division))
        init(whole)
        parameter.copy_(part_of(whole, division, self.rank, self.ranks))

    def start_as_linear(self, inputs: int, init: Callable[[Tensor], Any] | None) -> None:
        """Initialise weight and bias as torch.nn.Linear does.

        With `init`, call it on the weight and set the bias to zero, as in Megatron.
        """
        if getattr(self, "weight", None) is not None:
            self.start("weight", init or (lambda weight: nn.init.kaiming_uniform_(weight, a=math.sqrt(5))))
        if getattr(self, "bias", None) is not None:
            bound = 1 / math.sqrt(inputs)
            self.start("bias", nn.init.zeros_ if init else lambda bias: nn.init.uniform_(bias, -bound, bound))

    def mark_parameters(self) -> None:
        super().mark_parameters()
        for name, division in self._divisions.items():
            parameter: Any = getattr(self, name)
            if parameter is not None:
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = division.dim, division.stride

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.tp_group)] = self.tp_group  # copies share the group, which can't be copied
        return super().__deepcopy__(memo)


def whole_shape(part: Tensor, division: Division) -> tuple[int, ...]:
    return *part.shape[: division.dim], division.size, *part.shape[division.dim + 1 :]


# ---- checkpoints ----


def sharded_state_dict(module: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Return a state dict for torch.distributed.checkpoint. It can be loaded into a tensor-parallel group of another size.

        torch.distributed.checkpoint.save(onepass.nn.sharded_state_dict(model), checkpoint_id=folder)
        torch.distributed.checkpoint.load(onepass.nn.sharded_state_dict(model), checkpoint_id=folder)

    Sharded parameters are DTensors over their module's tp_group. Everything else is as in `state_dict()`. The tensors share the
    module's memory, so loading into them updates the module. A rank's shard of a parameter with a stride is not contiguous in the
    whole. Such a parameter has an entry for each block of the whole, ``weight.0``, ``weight.1``, ..., for every group size.
    """
    state: dict[str, Any] = dict(module.state_dict(prefix=prefix))
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, DividedParameters):
            for name, division in part._divisions.items():
                key = prefix + (f"{path}.{name}" if path else name)
                if key in state:
                    _divide(state, key, division, part.tp_group)
    return state


def _divide(state: dict[str, Any], key: str, division: Division, group: dist.ProcessGroup | None) -> None:
    """Replace a shard in the state dict by the whole parameter, as DTensors over the group."""
    local = state[key]
    dim, blocks = division.dim, division.blocks()
    if len(blocks) == 1:
        state[key] = _whole(local, division, group)
        return
    del state[key]
    ranks = 1 if group is None else group.size()
    for at, part in enumerate(local.split([size // ranks for size in blocks], dim)):
        state[f"{key}.{at}"] = _whole(part, Division(dim, blocks[at]), group)


def _whole(local: Tensor, division: Division, group: dist.ProcessGroup | None) -> Tensor:
    if group is None or group.size() == 1:
        return local
    from torch.distributed.device_mesh import DeviceMesh  # slow to import, and `import onepass` does not need it
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size(whole_shape(local, division))
    mesh = DeviceMesh.from_group(group, local.device.type)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(division.dim)], run_check=False, shape=shape, stride=strides)
