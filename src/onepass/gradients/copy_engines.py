"""FSDP2's gathers and reductions on GPUs of one host by copy engines, which take no SMs from products: `use_copy_engines`.

NCCL's kernels hold SMs while they run, and while they wait for the slowest rank. Here a rank's part lies in memory that its peers
map, and they copy it: an all-gather is copies, and a reduce-scatter is copies and one pass that adds them. A barrier of one block
comes before. Sums of two ranks have NCCL's bits; more ranks are added in fp32 and rounded once, in the order of ranks.

A buffer is written again when a later collective's barrier is past, as then every peer has copied what it needed. Which one comes
next follows from counts and sizes, so that ranks choose alike. Sizes between two powers of two share up to three buffers, which
stay. Fewer are made where other sizes come between, as they do for the root.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.gradients.fsdp import check_collectives, groups_of

_TIMEOUT_MS = 600_000  # of a barrier, as NCCL's: a rank that doesn't come ends the others by a CUDA error
_BUFFERS = 3  # FSDP2 has two gathers under way at most: one is copied out, the next one comes


class _Slot:
    """A buffer that peers map."""

    def __init__(self, nbytes: int, device: torch.device, group: dist.ProcessGroup) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self.handle: Any = symmetric.rendezvous(self.buffer, group.group_name)
        self.used = -_BUFFERS  # number of the collective that had it last: none
        self.idle = self.holders()

    def holders(self) -> int:
        return torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata)


class _Buffers:
    """Slots by size, and the events of the last collectives' barriers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._slots: dict[int, list[_Slot]] = {}  # by the bits of their number of bytes
        self._taken: _Slot | None = None
        self._count = 0
        self._past: deque[Any] = deque(maxlen=_BUFFERS - 1)  # after their barriers
        self._copied: Any = None  # after the last one's copies

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer as a tensor. The current stream waits until peers have read it."""
        nbytes = numel * dtype.itemsize
        slots = self._slots.setdefault((nbytes - 1).bit_length(), [])
        slot = min(slots, key=lambda each: each.used, default=None)
        if slot is not None and slot.used > self._count - _BUFFERS:
            slot = None  # one more
        if slot is not None and slot.holders() > slot.idle:
            raise RuntimeError(f"more than {_BUFFERS - 1} gathers are under way: prefetch fewer modules, or leave copy engines")
        if slot is not None and slot.buffer.numel() < nbytes:
            slots.remove(slot)
            slot = None
        if slot is None:
            torch.cuda.synchronize(device)
            dist.barrier(self._group)  # nobody reads one that it replaces
            slot = _Slot(nbytes, device, self._group)
            slots.append(slot)
        if slot.used >= 0:
            torch.cuda.current_stream().wait_event(self._past[0])  # a later one's, as the last two are there
        self._taken = slot
        return slot.buffer[:nbytes].view(dtype)

    def meet(self, tensor: Tensor) -> Any:
        """Let ranks wait for each other on the current stream. Return the handle of the buffer that begins with the tensor."""
        slot = self._taken
        if slot is None or slot.buffer.data_ptr() != tensor.untyped_storage().data_ptr():
            raise RuntimeError("copy engines must be given the tensor that they allocated last, but were given another")
        stream = torch.cuda.current_stream()
        if self._copied is not None:
            stream.wait_event(self._copied)  # FSDP2 gathers on the main stream too, outside of forward and backward
        slot.handle.barrier(0, _TIMEOUT_MS)
        self._past.append(stream.record_event())
        slot.used, self._taken = self._count, None
        self._count += 1
        return slot.handle

    def note_copied(self) -> None:
        self._copied = torch.cuda.current_stream().record_event()


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
        self._buffers.note_copied()


class CopyEngineReduceScatter:
    """FSDP2's reduce-scatter: each rank copies its peers' gradients of its own part, and adds them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._buffers, self._ranks = _Buffers(group), group.size()
        self._input: weakref.ref[Tensor] | None = None  # of which a result is to come

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what is reduced, and then what the result comes to, which stays as gradients.

        An input that nothing holds is of a step that failed, and no result follows.
        """
        reduced = None if self._input is None else self._input()
        if reduced is not None and reduced.numel() == size[0] * self._ranks:
            return torch.empty(size, dtype=dtype, device=device)
        taken = self._buffers.take(size[0], dtype, device)
        self._input = weakref.ref(taken)
        return taken

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:  # fmt: skip
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"gradients must be summed or averaged by copy engines, but FSDP2 asks for {op}")
        self._input = None
        handle, numel, rank = self._buffers.meet(input_tensor), output_tensor.numel(), group.rank()
        parts = []
        for peer in range(group.size()):
            if peer == rank:
                parts.append(input_tensor[rank * numel : (rank + 1) * numel])
            else:
                part = handle.get_buffer(peer, (numel,), input_tensor.dtype, rank * numel)
                parts.append(torch.empty_like(output_tensor).copy_(part, non_blocking=True))
        self._buffers.note_copied()
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

    It is for GPUs of one host that reach each other (NVLink). Products beside it keep the SMs that NCCL's kernels take. Buffers
    stay, outside of the caching allocator: three of a block's size and one of the root's, in the type of gathers, and as many in
    the type of reductions.

    Args:
        model: sharded by `fully_shard` over one dimension of a mesh.
        reduce: False leaves reductions to NCCL.
    """
    from torch.distributed.fsdp import FSDPModule

    groups = list(groups_of(model))
    if not groups:
        raise ValueError("model must be sharded by fully_shard, but none of its modules is")
    by_name: dict[str, tuple[CopyEngineAllGather, CopyEngineReduceScatter]] = {}
    groups = [group for group in groups if group._all_gather_process_group.size() > 1]
    for group in groups:
        _check_reach(group)
    check_collectives(groups, reduce=reduce)
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
