"""Make a backward run out of memory at each step in turn.

noted = MemorySteps()
noted.backward(loss())                              # noted.steps: its calls that allocate memory or multiply matrices
for step in noted.steps:
    MemorySteps(fail_at=step).backward(loss())      # raises torch.OutOfMemoryError in the place of that call
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from onepass.gradients.main_grad import _zeros

_PRODUCTS = ("mm", "addmm", "addmm_", "matmul", "__matmul__")  # their workspace is inside, also where they write to `out`


class MemorySteps(TorchFunctionMode):
    """Note the calls of PyTorch from Python that need memory, or fail in the place of one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.calls, self.fail_at, self.steps = 0, fail_at, list[int]()

    def backward(self, loss: Tensor) -> None:
        """Run loss.backward() on this thread. `Tensor.backward` is a call that modes see, which then see none of its calls."""
        _zeros.clear()  # kept from pass to pass: a step that the next one would not have
        with torch.autograd.set_multithreading_enabled(False), self:
            _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call, self.calls = self.calls, self.calls + 1
        if call == self.fail_at:
            raise torch.OutOfMemoryError("no memory, in a test")
        given = _storages((args, kwargs))
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _PRODUCTS or _storages(found) - given:
            self.steps.append(call)
        return found


def _storages(values: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tree_leaves(values) if isinstance(t, Tensor)}
