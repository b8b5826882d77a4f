"""Forward and backward of a module's calls as CUDA graphs, one pair for each shape of the inputs.

For loops that are not one's own, and call the module, backward and an optimizer one after another (transformers' Trainer). What
is around the graphs runs as ever: accumulation, clipping, any optimizer, hooks on parameters. `onepass.graphed_step` captures
whole steps.

A call that no graph can stand for runs as it is, and its reason is said once. So does a call before the backward of the last one:
a replay would overwrite what that backward needs, as all graphs share their memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from onepass.gradients.graph_surroundings import CONSTANTS, Surroundings
from onepass.gradients.graphs import Captured, graphed
from onepass.gradients.main_grad import GradRequest, grad_requests, is_placeholder, keeps_main_grad
from onepass.kernels.device_tables import is_capturing
from onepass.runtime.cuda_graph import CpuGenerators, capture, current_step, free_memory, side_stream
from onepass.runtime.dispatch import not_twice_differentiable

_WARM = 3  # calls of a shape before its capture
_TRIES = 2  # captures of a shape
_TENSOR = object()  # in place of one


class GraphedCalls:
    """Runs a module's calls that train, and replays those of a shape that was called before.

    Args:
        say: takes each reason why calls run without a graph, once.
        max_graphs: shapes that get graphs. Others run as they are.
        loss: the loss's key in a dict of results. Where there is one, it alone has a gradient.
    """

    def __init__(self, say: Callable[[str], None], *, max_graphs: int = 8, loss: str = "loss") -> None:
        self._say, self._max_graphs, self._loss = say, max_graphs, loss
        self.reasons: dict[str, None] = {}
        self.changes = 0  # how often the module was found changed
        self._shapes: dict[Hashable, _CallShape] = {}
        self._surroundings: Surroundings | None = None
        self._grads: dict[int, Tensor] = {}  # by parameter: all graphs write them at one place
        self._left = 4 * max_graphs  # captures, of a module that changes all the time
        self._reached = _Reached()
        self._running: weakref.ref[_Running] | None = None
        self._stream: torch.cuda.Stream | None = None  # of all of these calls: what accumulates a gradient belongs to one
        self._pool: Any = None
        self._device = torch.device("cpu")

    @property
    def graphs(self) -> int:
        return sum(shape.graphs is not None for shape in self._shapes.values())

    def leave(self, reason: str) -> None:
        """Note, and say at the first time, why a call runs without a graph."""
        if reason not in self.reasons:
            self.reasons[reason] = None
            self._say(reason)

    def supports(self, module: nn.Module) -> bool:
        """Whether the module's calls can have graphs. Forget those of a module that has changed since."""
        reason = self._look_at(module)
        if current_step() is not None or is_capturing(self._device):  # a part of another graph
            return False
        if reason is not None:
            self.leave(reason)
        return reason is None

    def run(self, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what function(*args, **kwargs) does, which calls a module that is supported."""
        leaves, spec = tree_flatten((args, kwargs))
        as_it_is = partial(self.run_without, function, args, kwargs)
        if (reason := _wrong_input(leaves, self._device) or _hooks_on_saved_tensors()) is not None:
            self.leave(reason)
            return as_it_is()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shape = self._shape_of((spec, *map(_kind, leaves), *_autocast(self._device)), tensors)
        if shape is None or shape.failures >= _TRIES:
            return as_it_is()
        if self._running is not None and (running := self._running()) is not None and not running.ended:
            self.leave("a call before the last one's backward, whose result is still alive (delete what gets no backward)")
            return as_it_is()
        warms = shape.graphs is None and shape.calls < _WARM
        if shape.graphs is None and not warms:
            statics = iter(shape.inputs)
            again = tree_unflatten([next(statics) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
            if not self._capture(module, shape, tensors, partial(function, *again[0], **again[1])):
                return as_it_is()
        call = partial(self._warm, shape, function, args, kwargs) if warms else partial(self._replay, shape, tensors)
        return self._beside(call)

    def run_without(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what function(*args, **kwargs) does, without a graph, but on the graphs' stream.

        What accumulates a gradient belongs to the stream of the call that made it, and lives with the call's result. One of
        another stream would draw that stream into a capture, which then fails.
        """
        return self._beside(partial(function, *args, **kwargs))

    def forget(self) -> None:
        """Free the graphs and their memory, and take hooks off the parameters."""
        self._shapes.clear()
        self._grads.clear()
        self._reached.stop()
        self._pool = self._surroundings = self._running = None

    def _beside(self, call: Callable[[], Any]) -> Any:
        with side_stream(self._device, self._stream) as self._stream:
            found = call()
        for result in tree_flatten(found)[0]:
            if isinstance(result, Tensor) and result.is_cuda:
                result.record_stream(torch.cuda.current_stream(self._device))
        return found

    def _look_at(self, module: nn.Module) -> str | None:
        """Return why this module's calls can have no graphs."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return "several ranks, whose reductions a graph would leave out"
        if self._surroundings is None or not self._surroundings.hold():
            if self._surroundings is not None and self.graphs == 0:  # a capture counts by itself
                self._left -= 1
            self.forget()
            self.changes += 1
            self._surroundings = Surroundings(module)
            self._device = self._surroundings.device
        if self._left <= 0:
            return "a model that changes again and again"
        return self._surroundings.unsupported

    def _shape_of(self, key: Hashable, tensors: list[Tensor]) -> _CallShape | None:
        if key not in self._shapes:
            if len(self._shapes) >= self._max_graphs:
                self.leave(f"other shapes than the first {self._max_graphs}, which have graphs")
                return None
            self._shapes[key] = _CallShape([tensor.detach().clone() for tensor in tensors])
        return self._shapes[key]

    def _warm(self, shape: _CallShape, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call as it is, which warms up what a capture of its shape must find."""
        assert self._surroundings is not None
        shape.calls += 1
        self._reached.watch(self._surroundings.trained, shape.reached)
        return function(*args, **kwargs)

    def _capture(self, module: nn.Module, shape: _CallShape, tensors: list[Tensor], call: Callable[[], Any]) -> bool:
        """Capture the call and its backward, or note why that failed. Return whether it is captured."""
        assert self._surroundings is not None
        self._left -= 1
        self._reached.stop()
        generators = CpuGenerators()
        try:
            for static, tensor in zip(shape.inputs, tensors, strict=True):
                static.copy_(tensor)
            free_memory(self._device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with graphed(module) as captured, side_stream(self._device, self._stream) as self._stream:
                made = self._captured(shape, self._surroundings.trained, call, captured)
            if not generators.unchanged():
                raise RuntimeError("it draws random numbers on the CPU, which a replay can't draw anew")
        except Exception as error:  # whatever it is, the call runs without a graph
            self._pool = None  # pinned memory's allocator takes a failed capture to be going on in it
            reason = str(error).partition("\n")[0] or type(error).__name__
        else:
            shape.graphs = made
            return True
        generators.restore()
        shape.failures, shape.calls = shape.failures + 1, 0  # once more: results from before the first call may have been alive
        shape.reached.clear()
        if shape.failures >= _TRIES:  # outside of the error, whose frames keep the capture's memory
            self.leave(f"a shape whose capture failed: {reason}")
        return False

    def _captured(self, shape: _CallShape, parameters: list[Tensor], call: Callable[[], Any], captured: Captured) -> _Graphs:
        with fresh_casts(self._device):
            forward, found = capture(call, self._device, self._pool)
        leaves, spec = tree_flatten(found)
        others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, *CONSTANTS))]
        if others:
            raise RuntimeError(f"it returns a {others[0]}, which a replay can't make anew")
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        asked = self._differentiated(found, results)
        incoming = [torch.zeros_like(results[place]) for place in asked]
        call = partial(self._backward, [results[place] for place in asked], parameters, incoming)
        backward, grads = capture(call, self._device, self._pool)
        _check_reached(shape.reached, parameters, grads)
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None and not is_placeholder(grad):
                self._grads.setdefault(id(parameter), grad)
        leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        differentiable = [result.requires_grad for result in results]
        results = [result.detach() for result in results]
        return _Graphs(forward, backward, results, differentiable, asked, incoming, grads, (leaves, spec), captured)

    def _differentiated(self, found: Any, results: list[Tensor]) -> list[int]:
        """Return the places of the results whose gradients backward takes."""
        loss = found.get(self._loss) if isinstance(found, dict) else None
        asked = [place for place, result in enumerate(results) if result.requires_grad and (loss is None or result is loss)]
        if not asked:
            raise RuntimeError("none of its results has a gradient")
        return asked

    def _backward(self, results: list[Tensor], parameters: list[Tensor], incoming: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients. Where another shape's graph has a place for one already, it goes there."""
        grads: list[Any] = list(torch.autograd.grad(results, parameters, incoming, allow_unused=True))
        for place, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            kept = self._grads.get(id(parameter))
            if grad is not None and kept is not None and not is_placeholder(grad):
                grads[place] = kept.copy_(grad)
        return grads

    def _replay(self, shape: _CallShape, tensors: list[Tensor]) -> Any:
        assert shape.graphs is not None and self._surroundings is not None
        for static, tensor in zip(shape.inputs, tensors, strict=True):
            static.copy_(tensor)
        self._move_gradients()
        running = _Running(shape.graphs, self._surroundings.trained)
        self._running = weakref.ref(running)
        found = _Replay.apply(running, *self._surroundings.trained)  # type: ignore[no-untyped-call]
        return shape.graphs.results_of(found)

    def _move_gradients(self) -> None:
        """Move gradients that are still in the graphs' memory, as between microbatches, to memory of their own."""
        for parameter in self._surroundings.trained:  # type: ignore[union-attr]
            grad = parameter.grad
            if grad is not None and (kept := self._grads.get(id(parameter))) is not None and grad.data_ptr() == kept.data_ptr():
                parameter.grad = grad.clone()


class _Running:
    """A replayed call, until its backward. Autograd's node holds it alone: if that goes, nobody waits for a backward."""

    def __init__(self, graphs: _Graphs, parameters: list[Tensor]) -> None:
        self.graphs, self.parameters, self.ended = graphs, parameters, False


class _Replay(torch.autograd.Function):
    """Replays forward, and in backward its backward. Gradients go to parameters as those of any op."""

    @staticmethod
    def forward(ctx: Any, running: _Running, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.running, graphs = running, running.graphs
        graphs.forward.replay()
        results = tuple(result.clone() for result in graphs.results)
        fixed = [result for result, moves in zip(results, graphs.differentiable, strict=True) if not moves]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        running: _Running = ctx.running
        graphs, parameters = running.graphs, running.parameters
        _check_pass(running, incoming)
        requests = grad_requests(ctx, len(parameters), 1)
        for parameter, request in zip(parameters, requests, strict=True):
            if request is not GradRequest.ACCUMULATE and keeps_main_grad(parameter):
                raise RuntimeError(
                    "main_grad must be gathered by .backward(), but this pass is torch.autograd.grad's, and a CUDA graph adds to "
                    "main_grad: apply with graph=False"
                )
        running.ended = True
        for static, place in zip(graphs.incoming, graphs.asked, strict=True):
            grad = incoming[place]
            static.zero_() if grad is None else static.copy_(grad)
        graphs.backward.replay()
        graphs.captured.replayed()
        found: list[Tensor | None] = [None]
        for grad, request in zip(graphs.grads, requests, strict=True):
            if grad is None or request is GradRequest.SKIP:
                found.append(None)
            else:  # the next replay overwrites it: `.grad` moves before that, what torch.autograd.grad returns can't
                found.append(grad.detach() if request is GradRequest.ACCUMULATE else grad.clone())
        return tuple(found)


def _check_pass(running: _Running, incoming: tuple[Tensor | None, ...]) -> None:
    if running.ended:
        raise RuntimeError("a CUDA graph's replay has one backward, but this is its second: apply with graph=False")
    for place, grad in enumerate(incoming):
        if grad is not None and place not in running.graphs.asked:
            raise RuntimeError(
                "gradients must come by the loss where a CUDA graph has computed one, but another result has a gradient: apply "
                "with graph=False"
            )


# ---- what belongs to a shape ----


class _Reached:
    """Notes which parameters get a gradient in backwards of calls that warm up, for the shapes of these calls.

    A reentrant checkpoint runs a backward of its own, of which torch.autograd.grad, and so a capture, knows nothing.
    """

    def __init__(self) -> None:
        self._shapes: list[set[int]] = []  # of calls whose backward may be the next one: ids of parameters
        self._noted = False  # whether a backward has come since the last call
        self._handles: list[Any] = []

    def watch(self, parameters: list[Tensor], ids: set[int]) -> None:
        if not self._handles:
            self._handles = [each.register_post_accumulate_grad_hook(self._note) for each in parameters]
        self._shapes = [ids] if self._noted else [*self._shapes, ids]
        self._noted = False

    def _note(self, parameter: Tensor) -> None:
        self._noted = True
        for ids in self._shapes:
            ids.add(id(parameter))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._shapes = [], []


def _check_reached(ids: set[int], parameters: list[Tensor], grads: list[Tensor | None]) -> None:
    if any(grad is None and id(parameter) in ids for parameter, grad in zip(parameters, grads, strict=True)):
        raise RuntimeError(
            "weights had gradients before that they have not in the capture: checkpointing needs use_reentrant=False, and all "
            "calls of a shape must use the same weights"
        )


@dataclass
class _CallShape:
    inputs: list[Tensor]
    calls: int = 0  # which warmed up
    failures: int = 0
    graphs: _Graphs | None = None
    reached: set[int] = field(default_factory=set)  # ids of parameters that got gradients


@dataclass
class _Graphs:
    """The graphs of one shape, with what they read and write."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    results: list[Tensor]
    differentiable: list[bool]
    asked: list[int]  # places of results whose gradients are the incoming ones
    incoming: list[Tensor]
    grads: list[Tensor | None]  # of parameters
    tree: tuple[list[Any], Any]  # of the results: leaves, and how they are nested
    captured: Captured

    def results_of(self, tensors: tuple[Tensor, ...]) -> Any:
        leaves, spec = self.tree
        each = iter(tensors)
        return tree_unflatten([next(each) if leaf is _TENSOR else leaf for leaf in leaves], spec)


# ---- what a call is given ----


def _kind(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _wrong_input(leaves: list[Any], device: torch.device) -> str | None:
    """Return why inputs can't be a graph's."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, CONSTANTS):
                return f"a {type(leaf).__name__} among the inputs"
        elif type(leaf) is not Tensor or leaf.requires_grad:
            return "an input that requires a gradient" if leaf.requires_grad else f"a {type(leaf).__name__} among the inputs"
        elif leaf.device != device:
            return f"an input on {leaf.device}"
    return None


def _hooks_on_saved_tensors() -> str | None:
    there = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return "hooks on saved tensors, which a replay would not call" if there else None


def _autocast(device: torch.device) -> tuple[Hashable, ...]:
    return (torch.get_autocast_dtype(device.type),) if torch.is_autocast_enabled(device.type) else ()


def fresh_casts(device: torch.device) -> AbstractContextManager[Any]:
    """Let autocast take no weight that was cast before, and keep none: replays must cast them anew."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)
