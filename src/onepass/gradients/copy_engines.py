"""FSDP2's gathers and reductions on GPUs of one host by copy engines, which take no SMs from products: `use_copy_engines`.

NCCL's kernels hold SMs while they run, and while they wait for the slowest rank. Here a rank's part lies in memory that its peers
map, and they copy it: an all-gather is copies, and a reduce-scatter is copies and one pass that adds them. A barrier of one block
comes before. Sums of two ranks have NCCL's bits; more ranks are added in fp32 and rounded once, in the order of ranks.

A buffer is written again when a later collective's barrier is past, as then every peer has copied what it needed. Buffers come in
turn, so that ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_TIMEOUT_MS = 600_000  # of a barrier, as NCCL's: a rank that doesn't come ends the others by a CUDA error
_BUFFERS = 3  # FSDP2 has two gathers under way at most: one is copied out, the next one comes


class _Slot:
    """A buffer that peers map."""

    def __init__(self, nbytes: int, device: torch.device, group: dist.ProcessGroup) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self.handle: Any = symmetric.rendezvous(self.buffer, group.group_name)
        self.used = -1  # number of the collective that had it last
        self.idle = self.holders()

    def holders(self) -> int:
        return torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata)


class _Buffers:
    """Slots in turn, and the events of the collectives' barriers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._slots: list[_Slot | None] = [None] * _BUFFERS
        self._turn = self._count = 0
        self._past: dict[int, Any] = {}  # number of a collective -> event after its barrier

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the next buffer as a tensor. The current stream waits until peers have read it."""
        self._turn = (self._turn + 1) % _BUFFERS
        slot, nbytes = self._slots[self._turn], numel * dtype.itemsize
        if slot is not None and slot.holders() > slot.idle:
            raise RuntimeError(f"more than {_BUFFERS - 1} gathers are under way: prefetch fewer modules, or leave copy engines")
        if slot is None or slot.buffer.numel() < nbytes:
            torch.cuda.synchronize(device)
            dist.barrier(self._group)  # nobody reads the old one
            self._slots[self._turn] = None
            del slot
            slot = self._slots[self._turn] = _Slot(nbytes, device, self._group)
        if slot.used >= 0:
            torch.cuda.current_stream().wait_event(self._past[slot.used + 1])
        slot.used = self._count
        return slot.buffer[:nbytes].view(dtype)

    def meet(self, tensor: Tensor) -> Any:
        """Let ranks wait for each other on the current stream. Return the handle of the buffer that begins with the tensor."""
        place = tensor.untyped_storage().data_ptr()
        slot = next(each for each in self._slots if each is not None and each.buffer.data_ptr() == place)
        slot.handle.barrier(0, _TIMEOUT_MS)
        slot.used = self._count
        self._past[self._count] = torch.cuda.current_stream().record_event()
        self._past.pop(self._count - 2 * _BUFFERS, None)
        self._count += 1
        return slot.handle


class CopyEngineAllGather:
    """FSDP2's all-gather: each rank copies its peers' parts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._buffers = _Buffers(group)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._buffers.take(size[0], dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:  # fmt: skip
        handle, numel, ranks = self._buffers.meet(output_tensor), input_tensor.numel(), group.size()
        for step in range(1, ranks):
            peer = (group.rank() + step) % ranks
            part = handle.get_buffer(peer, (numel,), output_tensor.dtype, peer * numel)
            output_tensor[peer * numel : (peer + 1) * numel].copy_(part, non_blocking=True)


class CopyEngineReduceScatter:
    """FSDP2's reduce-scatter: each rank copies its peers' gradients of its own part, and adds them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._buffers = _Buffers(group)
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what is reduced, and then what the result comes to, which stays as gradients."""
        self._has_input = not self._has_input
        if self._has_input:
            return self._buffers.take(size[0], dtype, device)
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:  # fmt: skip
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"gradients must be summed or averaged by copy engines, but FSDP2 asks for {op}")
        handle, numel, rank = self._buffers.meet(input_tensor), output_tensor.numel(), group.rank()
        parts = []
        for peer in range(group.size()):
            if peer == rank:
                parts.append(input_tensor[rank * numel : (rank + 1) * numel])
            else:
                part = handle.get_buffer(peer, (numel,), input_tensor.dtype, rank * numel)
                parts.append(torch.empty_like(output_tensor).copy_(part, non_blocking=True))
        if len(parts) == 2:
            torch.add(*parts, out=output_tensor)
            if op == dist.ReduceOp.AVG:
                output_tensor.mul_(0.5)  # exact
            return
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        output_tensor.copy_(total.div_(group.size()) if op == dist.ReduceOp.AVG else total)


def use_copy_engines(model: nn.Module, *, reduce: bool = True) -> None:
    """Let FSDP2 gather this model's weights, and reduce its gradients, by copy engines.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        use_copy_engines(model)

    It is for GPUs of one host that reach each other (NVLink). Where products run beside NCCL's kernels they are faster.

    Args:
        model: sharded by `fully_shard` over one dimension of a mesh.
        reduce: False leaves reductions to NCCL.
    """
    from torch.distributed.fsdp import FSDPModule

    from onepass.gradients.fsdp import groups_of

    groups = list(groups_of(model))
    if not groups:
        raise ValueError("model must be sharded by fully_shard, but none of its modules is")
    by_name: dict[str, tuple[CopyEngineAllGather, CopyEngineReduceScatter]] = {}
    groups = [group for group in groups if group._all_gather_process_group.size() > 1]
    for group in groups:
        _check_reach(group)
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in groups:
            if module in group.modules:
                ranks = group._all_gather_process_group
                if ranks.group_name not in by_name:
                    by_name[ranks.group_name] = CopyEngineAllGather(ranks), CopyEngineReduceScatter(ranks)
                gather, scatter = by_name[ranks.group_name]
                module.set_custom_all_gather(gather)  # type: ignore[arg-type]
                if reduce:
                    module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]


def _check_reach(group: Any) -> None:
    ranks, device = group._all_gather_process_group, group.device
    if device.type != "cuda":
        raise ValueError(f"model must be on GPUs for copy engines, but is on {device.type}")
    if ranks.size() > torch.cuda.device_count():
        raise ValueError(
            f"copy engines must reach all ranks of a mesh, but it has {ranks.size()} and this host "
            f"{torch.cuda.device_count()} GPUs: shard within hosts, or leave gathers to NCCL"
        )
