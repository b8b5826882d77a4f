"""Memory that shows what was not written, what was written outside, and what should not have been touched.

with poisoned():                             # what is allocated in here starts as NaN, between two canaries
    y = op(x)
assert_written(y=y)

with unchanged(x=x, dy=dy): ...              # bit for bit, the storage around views included
with saved_tensors() as kept: ...            # what autograd keeps for backward
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

GUARD = 4096  # bytes before and after: strides of stray writes are short; a multiple of every alignment that kernels assume
CANARY = 0xA5
_INTEGER, _BYTE = 0x7A, 0xFF  # each byte of an unwritten integer: large; a byte by itself is NaN where it is an e4m3 code


@dataclass
class Allocations:
    """What was allocated within the block: the guarded buffers and what they were for."""

    made: list[tuple[Tensor, int, str]] = field(default_factory=list)  # buffer, bytes inside, description

    def check(self) -> None:
        """Raise where a canary was overwritten."""
        hurt = []
        for buffer, inside, what in self.made:
            for side, edge in (("before", buffer[:GUARD]), ("after", buffer[GUARD + inside :])):
                overwritten = (edge != CANARY).nonzero()
                if len(overwritten):
                    at = overwritten[0].item() - GUARD if side == "before" else overwritten[0].item() + inside
                    hurt.append(f"{what}: {len(overwritten)} bytes written {side} it, the first at byte {at}")
        if hurt:
            raise AssertionError("writes outside of allocations:\n  " + "\n  ".join(hurt))

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


# What Python code calls to allocate. Patched, not a mode: the backward of a GPU's tensors runs in a thread of its own.
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
    """Within the block torch.empty, empty_like, empty_strided, zeros and Tensor.new_empty give tensors between canaries.

    Empty ones hold NaN (integers 0x7a7a..., bytes 0xff). At the end of the block the canaries are checked. Allocations that
    PyTorch makes for itself, pinned ones, and those under a compiler or a dispatch mode are left alone.
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
        del torch.Tensor.new_empty  # what it inherits is seen again
    allocations.check()


def assert_written(**outputs: Tensor | None) -> None:
    """No NaN is left of the poison; for outputs of finite inputs."""
    for name, tensor in outputs.items():
        if tensor is not None and tensor.is_floating_point():
            missing = int(tensor.isnan().sum())
            assert not missing, f"{name}: {missing} of {tensor.numel()} elements never written, or NaN"


# ---- what must stay as it is ----


def _bytes(tensor: Tensor) -> Tensor:
    """All of the tensor's storage, as bytes."""
    storage = tensor.detach().untyped_storage()
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage)


@contextlib.contextmanager
def unchanged(**tensors: Tensor | None) -> Iterator[None]:
    """Raise where the block changed a bit of these tensors or of the storage they are views of."""
    before = {name: (tensor, _bytes(tensor).clone(), tensor._version) for name, tensor in tensors.items() if tensor is not None}
    yield
    for name, (tensor, bits, version) in before.items():
        changed = int((_bytes(tensor) != bits).sum())
        assert not changed, f"{name}: {changed} bytes of its storage were changed"
        assert tensor._version == version, f"{name} was written in place (with what it held)"


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that autograd keeps for backward from calls within the block, in the order they were kept."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def bytes_kept(kept: list[Tensor], *but: Tensor | None) -> int:
    """The bytes of tensors kept, each storage once, less those of the tensors that are there anyway."""
    there = {tensor.untyped_storage().data_ptr() for tensor in but if tensor is not None}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for address, size in storages.items() if address not in there)
