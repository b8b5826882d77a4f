"""Count the labels that have no loss, such as a prompt's: a trace has the labels' shape, but not their values."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_LOSSES = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


class LabelCounter(TorchDispatchMode):
    """Count all labels of cross entropies in the block, and those that are ignore_index. Nothing waits for a GPU in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._all = 0
        self._ignored: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _LOSSES and type(args[1]) is Tensor and not _is_capturing(args[1]):
            _, labels, _, _, ignore_index = args
            self._all += labels.numel()
            self._ignored.append((labels == ignore_index).sum())
        return func(*args, **(kwargs or {}))

    def watch(self) -> AbstractContextManager[Any]:
        """Count in the block, unless something was compiled in this process: under a mode Dynamo's code runs uncompiled."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        return nullcontext() if utils is not None and any(utils.counters["frames"].values()) else self

    def ignored(self) -> float:
        """The fraction of the labels that are ignored; 0 where no loss was seen."""
        return sum(count.item() for count in self._ignored) / self._all if self._all else 0.0


def _is_capturing(labels: Tensor) -> bool:
    return labels.is_cuda and torch.cuda.is_current_stream_capturing()
