"""Tensors that backward makes again, so that nobody keeps their memory from forward to backward.

torch.utils.checkpoint runs a whole region again, and all that the region saves comes anew. This is for a region that saves much
that is dear to make, and one tensor that is large and cheap: that one alone is made again, in the backward that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.runtime.backend import current_backend, use_backend


class _Part(NamedTuple):
    """A view of the tensor's memory that an op has saved."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _Recomputed:
    """Hooks for saved tensors. Those in the tensor's memory are let go of; `make` returns the tensor again."""

    def __init__(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        self.make, self.backend = make, current_backend()
        self.storage = tensor.untyped_storage()._cdata  # the tensor lives as long as these hooks are in force
        device = tensor.device.type
        self.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        # those of a block around, which get the others
        self.outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.parts = self.left = 0
        self.made: Tensor | None = None

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata != self.storage:
            if self.outer is not None:
                return self.outer[0](tensor)
            return tensor if tensor.grad_fn is None else tensor.detach()  # an op's own result would hold itself
        self.parts += 1
        return _Part(tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Any:
        if not isinstance(packed, _Part):
            return packed if self.outer is None else self.outer[1](packed)
        if self.made is None:
            self.made, self.left = self._made(), self.parts
        made, self.left = self.made, self.left - 1
        if not self.left:  # the backward that asked has all of them
            self.made = None
        return made.as_strided(*packed)

    def _made(self) -> Tensor:
        """Run as forward did: by the same backend, and in its types."""
        backend: Any = nullcontext() if current_backend() == self.backend else use_backend(self.backend)
        with backend, torch.no_grad(), torch.autocast(*self.autocast):
            return self.make()


def recomputed(tensor: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[Any]:
    """Keep no memory of `tensor` for the backwards of ops in this block: they call `make`, which returns it again.

    Args:
        tensor: what an op has made, in memory of its own. Ops in the block may have written to it: then `make` does, too.
        make: makes a tensor of the same layout. It must not hold `tensor`, or what it is a view of. It runs without gradients.
    """
    hooks = _Recomputed(tensor, make)
    return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)
