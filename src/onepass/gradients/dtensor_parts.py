"""What an optimizer reads and writes of DTensors: this rank's part, laid as the parameter is, and sums over their meshes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from onepass.runtime.sharding import has_dtensor


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part, in the tensor's own memory."""
    return tensor.to_local() if has_dtensor(tensor) else tensor  # type: ignore[no-any-return]


def placed_as(tensor: Any, parameter: Any) -> Any:
    """Return the tensor as the parameter lies. One that all ranks have whole is divided."""
    if not has_dtensor(parameter):
        return tensor.full_tensor() if has_dtensor(tensor) else tensor
    from torch.distributed.tensor import DTensor, Replicate

    if not has_dtensor(tensor):
        mesh = parameter.device_mesh
        tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return tensor if tensor.placements == parameter.placements else tensor.redistribute(placements=parameter.placements)


def layout_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return a DTensor's mesh and its placements there, or None for a plain tensor."""
    return (tensor.device_mesh, tensor.placements) if has_dtensor(tensor) else None


def sum_over_mesh(number: Tensor, layout: tuple[Any, ...] | None) -> Tensor:
    """Return the sum of the ranks' numbers, each of a part of a tensor that lies so. Ranks with the same part count once."""
    if layout is not None:
        mesh, placements = layout
        for dim, placement in enumerate(placements):
            if not placement.is_replicate() and mesh.size(dim) > 1:
                number = number.clone()
                dist.all_reduce(number, group=mesh.get_group(dim))
    return number
