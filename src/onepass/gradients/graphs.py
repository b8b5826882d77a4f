"""CUDA graphs of backward passes that add to main_grad.

A graph holds what the GPU does and nothing of what Python does: a replay adds to main_grad again, sets no flag and calls no hook.
The captured pass itself sets flags although it adds nothing. torch.cuda.make_graphed_callables calls torch.autograd.grad, which
asks for the gradient itself; that would lie in the graph's memory and be added to main_grad after each replay. `graphed` handles
both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from onepass.gradients.main_grad import captured_by_grad


class Captured:
    """Which gradients the passes of a `graphed` block added to main_grad."""

    def __init__(self) -> None:
        self._added: list[Any] = []

    def replayed(self) -> None:
        """Set the flags that the passes of the block set. A replay sets none: call this after it."""
        for parameter in self._added:
            parameter.grad_added_to_main_grad = True


@contextmanager
def graphed(parameters: nn.Module | Iterable[Tensor]) -> Iterator[Captured]:
    """Capture CUDA graphs in this block, whose replays add the parameters' gradients to main_grad.

        with onepass.graphed(block):
            block = torch.cuda.make_graphed_callables(block, (sample,))

    In the block torch.autograd.grad by parameters with main_grad, which make_graphed_callables calls, counts as `.backward()`:
    the graph adds to main_grad, and autograd gets zeros. A warm-up by such a pass leaves main_grad unchanged. A compiled function
    must run its forward in the block too, and is compiled anew there. After the block the flags (`grad_added_to_main_grad`) are
    what they were before it.

        with onepass.graphed(model) as captured, main_grads.accumulate(), torch.cuda.graph(graph):
            loss(model(x)).backward()
        ...
        graph.replay()
        captured.replayed()     # where somebody looks at flags; `MainGrads` does not

    A warm-up by `.backward()` adds to main_grad: clear that before the first step. A graph writes to the main_grad of its
    capture, which must keep its memory and be cleared in place. Where make_graphed_callables is used, `.grad` is memory of the
    graph, to which PyTorch would add wrongly: it must be None before the next replay, as `MainGrads` and zero_grad() leave it.

    Args:
        parameters: a module or parameters; those without main_grad are ignored.
    """
    listed = _listed(parameters)
    flagged: list[Any] = [parameter for parameter in listed if hasattr(parameter, "grad_added_to_main_grad")]
    before = [parameter.grad_added_to_main_grad for parameter in flagged]
    captured = Captured()
    for parameter in flagged:
        parameter.grad_added_to_main_grad = False
    try:
        with captured_by_grad(listed):
            yield captured
        captured._added = [parameter for parameter in flagged if parameter.grad_added_to_main_grad]
    finally:
        for parameter, was in zip(flagged, before, strict=True):
            parameter.grad_added_to_main_grad = was


def _listed(parameters: nn.Module | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, Tensor):  # iterating over it would give its rows
        raise TypeError("parameters must be a module or parameters, but is one tensor: put it in a list")
    listed = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    for parameter in listed:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters must be a module or parameters, but has a {type(parameter).__name__} in it")
    return listed
