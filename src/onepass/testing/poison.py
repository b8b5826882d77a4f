"""Detect elements that a kernel does not write, writes out of bounds, and writes to inputs.

with poisoned():                             # allocations in the block start as NaN, between two canaries
    y = op(x)
assert_written(y=y)

with unchanged(x=x, dy=dy): ...              # bitwise, including the storage around views
with saved_tensors() as kept: ...            # the tensors that autograd saves for backward
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

GUARD = 4096  # bytes before and after: stray writes land near. A multiple of every alignment that kernels assume
CANARY = 0xA5
_INTEGER, _BYTE = 0x7A, 0xFF  # bytes of unwritten integers, which are large. 0xFF for uint8: as an e4m3 code it is NaN


@dataclass
class Allocations:
    """The allocations of a block: guarded buffers with descriptions."""

    made: list[tuple[Tensor, int, str]] = field(default_factory=list)  # buffer, bytes inside, description

    def check(self) -> None:
        """Raise AssertionError if a canary was overwritten."""
        if not self._touched():
            return
        hurt = []
        for buffer, inside, what in self.made:
            for side, edge in (("before", buffer[:GUARD]), ("after", buffer[GUARD + inside :])):
                overwritten = (edge != CANARY).nonzero()
                if len(overwritten):
                    at = overwritten[0].item() - GUARD if side == "before" else overwritten[0].item() + inside
                    hurt.append(f"{what}: {len(overwritten)} bytes written {side} it, the first at byte {at}")
        raise AssertionError("writes outside of allocations:\n  " + "\n  ".join(hurt))

    def _touched(self) -> bool:
        """Whether any canary was overwritten: one wait for each device, and not two for each allocation."""
        edges: dict[torch.device, list[Tensor]] = {}
        for buffer, inside, _ in self.made:
            edges.setdefault(buffer.device, []).extend((buffer[:GUARD], buffer[GUARD + inside :]))
        return any(bool((torch.stack(each) != CANARY).any()) for each in edges.values())

    def allocate(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else 0
        inside = extent * dtype.itemsize
        buffer = _stock["full"]((GUARD + inside + GUARD,), CANARY, dtype=torch.uint8, device=device)
        self.made.append((buffer, inside, f"{tuple(size)} {dtype}"))
        tensor = torch.tensor([], dtype=dtype, device=device)  # set_ rather than a view: an op may return it as its own
        tensor.set_(buffer.untyped_storage(), GUARD // dtype.itemsize, size, stride)
        return tensor


def _poison(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    byte = _BYTE if tensor.dtype == torch.uint8 else _INTEGER
    return tensor.fill_(int.from_bytes(bytes([byte]) * tensor.dtype.itemsize, "little"))


# Allocation functions that Python code calls. Patched, because a mode would miss the thread that runs backward on a GPU.
_stock: dict[str, Callable[..., Any]] = {
    "empty": torch.empty,
    "empty_like": torch.empty_like,
    "empty_strided": torch.empty_strided,
    "zeros": torch.zeros,
    "new_empty": torch.Tensor.new_empty,
    "full": torch.full,
}


@contextlib.contextmanager
def poisoned() -> Iterator[Allocations]:
    """Make torch.empty, empty_like, empty_strided, zeros and Tensor.new_empty return tensors between canaries in the block.

    Empty tensors hold NaN (integers 0x7a7a..., bytes 0xff). The end of the block checks the canaries. PyTorch's internal
    allocations, pinned memory, and allocations under a compiler or a dispatch mode are not guarded.
    """
    allocations = Allocations()

    def guarded(name: str, *args: Any, **kwargs: Any) -> Any:
        template = _stock[name](*args, **kwargs)
        special = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or kwargs.get("out") is not None
        plain = type(template) is Tensor and template.layout == torch.strided and template.device.type in ("cpu", "cuda")
        if special or not plain or template.is_pinned():
            return template
        tensor = allocations.allocate(template.shape, template.stride(), template.dtype, template.device)
        (tensor.zero_ if name == "zeros" else lambda: _poison(tensor))()
        return tensor.requires_grad_(template.requires_grad)

    def patch(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: guarded(name, *args, **kwargs)

    try:
        for name in ("empty", "empty_like", "empty_strided", "zeros"):
            setattr(torch, name, patch(name))
        torch.Tensor.new_empty = patch("new_empty")  # type: ignore[method-assign]
        yield allocations
    finally:
        for name in ("empty", "empty_like", "empty_strided", "zeros"):
            setattr(torch, name, _stock[name])
        del torch.Tensor.new_empty  # uncovers the inherited method
    allocations.check()


def assert_written(**outputs: Tensor | None) -> None:
    """Assert that no NaN of the poison is left. The inputs must be finite."""
    for name, tensor in outputs.items():
        if tensor is not None and tensor.is_floating_point():
            missing = int(tensor.isnan().sum())
            assert not missing, f"{name}: {missing} of {tensor.numel()} elements never written, or NaN"


# ---- tensors that must not change ----


def _bytes(tensor: Tensor) -> Tensor:
    """Return the whole storage of the tensor as bytes."""
    storage = tensor.detach().untyped_storage()
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage)


@contextlib.contextmanager
def unchanged(**tensors: Tensor | None) -> Iterator[None]:
    """Raise AssertionError if the block changes a bit of these tensors or of the storage that they view."""
    before = {name: (tensor, _bytes(tensor).clone(), tensor._version) for name, tensor in tensors.items() if tensor is not None}
    yield
    for name, (tensor, bits, version) in before.items():
        changed = int((_bytes(tensor) != bits).sum())
        assert not changed, f"{name}: {changed} bytes of its storage were changed"
        assert tensor._version == version, f"{name} was written in place (with what it held)"


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Yield the tensors that autograd saves for backward of calls in the block, in order."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def bytes_kept(kept: list[Tensor], *but: Tensor | None) -> int:
    """Return the bytes of the saved tensors. Each storage counts once, and those of the tensors in `but` do not count."""
    there = {tensor.untyped_storage().data_ptr() for tensor in but if tensor is not None}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for address, size in storages.items() if address not in there)
