"""A training step of any model as one CUDA graph: forward, backward, the optimizer's step and the clearing of gradients.

A replay runs no Python. What a step reads beside its inputs must be where it was at the capture: parameters, gradients, the
optimizer's state and options. Each call checks that, and raises where a replay would compute something else than the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import (
    SequenceKey,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from onepass.runtime.cuda_graph import WholeStep, capture, free_memory, side_stream, whole_step

_log = logging.getLogger("onepass")
_UNCAPTURED = (
    "Whatever waits for the GPU must be left out: .item(), .cpu(), printing a tensor, an `if` on a tensor's value, GradScaler. "
    "Copies from the CPU must, too"
)


def graphed_step(train_step: Callable[..., Any], *, warmup: int = 3, max_graphs: int = 8) -> GraphedStep:
    """Run a training step as a CUDA graph, which launches its kernels at once: the CPU's time no longer matters.

        step = onepass.graphed_step(train_step)
        for batch in loader:
            loss = step(**batch)

    `train_step` takes tensors, runs forward, backward, `optimizer.step()` and `zero_grad()`, and returns tensors or nothing. It
    may have several microbatches. For each shape of its inputs the first calls run it as it is. The next call captures a graph
    and replays it, as all later calls do. Calls that run and replays are steps alike, with the same bits but for dropout.

    A replay runs no Python. It has the learning rate of a tensor, `lr=torch.tensor(1e-3, device="cuda")`, which schedulers write
    in place. PyTorch's optimizers need `capturable=True`; `onepass.parallel.AdamW` is ready. Random numbers differ from replay to
    replay, and `torch.manual_seed` repeats them. What Python decides or counts in `train_step` stays as it was at the capture:
    `model.train()`, an `if`, numbers that it reads from elsewhere.

    These raise: an optimizer that counts on the CPU, a number among its options that has changed, a state that was replaced,
    parameters that have moved or were frozen or unfrozen, gradients of another backward, a step that waits for the GPU, several
    ranks. Other tensors that `train_step` reads must stay where they are; nothing checks that. Where parameters are on a CPU each
    call runs `train_step`.

    Args:
        train_step: inputs may be nested in lists and dicts. Those that are no tensors belong to the shape: another number is
            another graph.
        warmup: calls of each shape that run before its capture, at least 1.
        max_graphs: shapes that get a graph. Others run as they are, with one warning: pad inputs to few lengths.

    Returns:
        A callable like `train_step`. Tensors that it returns are copies without a graph of autograd.
    """
    if not callable(train_step):
        raise TypeError(f"train_step must be callable, but is {train_step!r}")
    for name, value in (("warmup", warmup), ("max_graphs", max_graphs)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}")
    return GraphedStep(train_step, warmup, max_graphs)


class GraphedStep:
    """What `graphed_step` returns.

    Attributes:
        graphs: the number of graphs that were captured.
    """

    def __init__(self, train_step: Callable[..., Any], warmup: int, max_graphs: int) -> None:
        self._train_step, self._warmup, self._max_graphs = train_step, warmup, max_graphs
        self._device: torch.device | None = None  # of the parameters, when an optimizer has stepped
        self._optimizers: list[Optimizer] = []
        self._stepped = False  # in this call
        self._shapes: dict[Hashable, _Shape] = {}
        self._stream: torch.cuda.Stream | None = None  # of all calls that run: autograd's nodes belong to a stream
        self._pool: Any = None
        self._told = False

    @property
    def graphs(self) -> int:
        return sum(shape.graph is not None for shape in self._shapes.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = self._device or next((tensor.device for tensor in tensors if has_graphs(tensor.device)), None)
        if device is None:  # the first call: its optimizer tells where parameters are
            with self._watched(args, kwargs):
                return self._train_step(*args, **kwargs)
        if not has_graphs(device):
            return self._train_step(*args, **kwargs)
        _check_surroundings(device)
        _check_inputs(args, kwargs, device)
        shape = self._shape_of((spec, *map(_kind, leaves)), tensors)
        if shape is None:
            return self._run(args, kwargs, device)
        for static, tensor in zip(shape.inputs, tensors, strict=True):
            static.copy_(tensor)
        if shape.graph is None:
            static_inputs = iter(shape.inputs)
            args, kwargs = tree_unflatten([next(static_inputs) if isinstance(x, Tensor) else x for x in leaves], spec)
            if shape.calls < self._warmup:
                shape.calls += 1
                return self._run(args, kwargs, device)
            self._capture(shape, args, kwargs, device)
        else:
            shape.relied_on.check()
        assert shape.graph is not None
        shape.graph.replay()
        torch.autograd.graph.increment_version(shape.relied_on.written)  # for what keeps a copy of them by version
        return tree_map_only(Tensor, _copied, shape.results)

    def _shape_of(self, key: Hashable, tensors: list[Tensor]) -> _Shape | None:
        """Return what belongs to inputs of this kind, or None if there are enough graphs."""
        if key not in self._shapes:
            if len(self._shapes) >= self._max_graphs:
                if not self._told:
                    _log.warning("graphed_step: max_graphs is %d: steps of other shapes run without a graph", self._max_graphs)
                self._told = True
                return None
            self._shapes[key] = _Shape([tensor.detach().clone() for tensor in tensors])
        return self._shapes[key]

    def _run(self, args: Any, kwargs: Any, device: torch.device) -> Any:
        with side_stream(device, self._stream) as self._stream, self._watched(args, kwargs):
            found = self._train_step(*args, **kwargs)
        return tree_map_only(Tensor, _copied, found)

    @contextmanager
    def _watched(self, args: Any, kwargs: Any) -> Iterator[WholeStep]:
        """Look at the optimizers that step in the block. Yield what it writes and reads beside their parameters."""
        self._stepped = False
        hook = register_optimizer_step_pre_hook(partial(self._on_step, args, kwargs))
        try:
            with whole_step() as step:
                yield step
        finally:
            hook.remove()
        if not self._stepped:
            raise RuntimeError("train_step must call step() of a torch.optim.Optimizer, but called none")

    def _on_step(self, args: Any, kwargs: Any, optimizer: Any, *_: Any) -> None:
        self._stepped = True
        if any(optimizer is known for known in self._optimizers):
            return
        parameters = _parameters(optimizer)
        devices = {parameter.device for parameter in parameters if parameter.requires_grad}
        if self._device is not None:
            devices.add(self._device)
        if len(devices) != 1:
            raise ValueError(f"parameters must be on one device, but are on {', '.join(sorted(map(str, devices)))}")
        (device,) = devices
        if has_graphs(device):
            _check_inputs(args, kwargs, device)
            _check_optimizer(optimizer)
        self._device = device
        self._optimizers.append(optimizer)

    def _capture(self, shape: _Shape, args: Any, kwargs: Any, device: torch.device) -> None:
        for optimizer in self._optimizers:
            _check_state(optimizer, device)
        parameters = [parameter for optimizer in self._optimizers for parameter in _parameters(optimizer)]
        options = [_Options(optimizer, device) for optimizer in self._optimizers]
        grads = [parameter.grad for parameter in parameters]
        free_memory(device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with side_stream(device, self._stream) as self._stream, self._watched(args, kwargs) as step:
                graph, found = self._captured(lambda: self._train_step(*args, **kwargs), device)
            for each in options:
                each.check("the step itself changes it, and a graph's replays don't")
            expected = _grads_to_expect(parameters, grads)
        except BaseException:
            self._pool = None  # pinned memory's allocator takes a failed capture to be going on in it
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad  # those of the capture have no values
            raise
        places = [parameter.data_ptr() for parameter in parameters]
        asking = [(each, each.requires_grad) for each in {id(each): each for each in (*parameters, *step.given)}.values()]
        written = [*(parameter for parameter in parameters if parameter.requires_grad), *step.written]
        eight_bits = [(each, each.fp8) for each, _ in asking if hasattr(each, "fp8")]
        shape.relied_on = _ReliedOn(options, parameters, places, asking, expected, written, eight_bits, step.scales)
        shape.results = tree_map_only(Tensor, Tensor.detach, found)
        shape.graph = graph

    def _captured(self, call: Callable[[], Any], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
        try:
            return capture(call, device, self._pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            said = str(error).partition("\n")[0]  # a CUDA error goes on about how to debug kernels
            raise RuntimeError(f"train_step can't be captured in a CUDA graph: {said}. {_UNCAPTURED}") from error


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"


def _copied(result: Tensor) -> Tensor:
    return result.detach().clone()


# ---- what a graph relies on ----


@dataclass
class _Shape:
    """The static inputs of one shape, and its graph with what that writes and relies on."""

    inputs: list[Tensor]
    calls: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    results: Any = None
    relied_on: Any = None


class _Options:
    """An optimizer's options, and its state, as they are at a capture."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device, self._state = optimizer, device, optimizer.state
        self._values = [self._fixed(group) for group in optimizer.param_groups]

    def _fixed(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return numbers as they are, and tensors on the device as themselves, as graphs read them there."""
        found = {name: value for name, value in group.items() if name != "params"}
        for name, value in found.items():
            if isinstance(value, Tensor) and value.device != self._device:
                found[name] = value.tolist()
        return found

    def check(self, why: str = "a graph keeps it") -> None:
        kind = type(self._optimizer).__name__
        groups = self._optimizer.param_groups
        if self._optimizer.state is not self._state or len(groups) != len(self._values):
            raise RuntimeError(
                f"{kind} must keep its state and groups, but load_state_dict or add_param_group has replaced them: make a new "
                "graphed_step"
            )
        for group, values in zip(groups, self._values, strict=True):
            now = self._fixed(group)
            for name, value in values.items():
                if isinstance(value, Tensor) or isinstance(now.get(name), Tensor):
                    same = now.get(name) is value
                else:
                    same = now.get(name) == value
                if not same:
                    raise RuntimeError(
                        f"{kind}'s {name} must stay {value}, but is {now.get(name)} since: {why}. Give the optimizer a tensor, "
                        f"{name}=torch.tensor(..., device='{self._device}'), and write it in place, as schedulers do"
                    )


class _ReliedOn(NamedTuple):
    """What must be as it was at the capture."""

    options: list[_Options]
    parameters: list[Any]
    places: list[int]
    asking: list[tuple[Any, bool]]  # parameters, and whether they require a gradient
    grads: list[Any]
    written: list[Tensor]
    eight_bits: list[tuple[Any, Any]]  # weights, and the state that they carry for products in eight bits
    scales: list[Any]  # which a replay writes: held, so that it writes to nobody else's memory

    def check(self) -> None:
        for each in self.options:
            each.check()
        if any(getattr(weight, "fp8", None) is not state for weight, state in self.eight_bits):
            raise RuntimeError("a weight's scales must stay, but are others, as after load_state_dict: make a new graphed_step")
        if [parameter.data_ptr() for parameter in self.parameters] != self.places:
            raise RuntimeError("parameters must stay where they are, but one has other memory by now: make a new graphed_step")
        if any(parameter.requires_grad is not asks for parameter, asks in self.asking):
            raise RuntimeError("parameters must stay frozen or trained, but requires_grad has changed: make a new graphed_step")
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            if parameter.grad is not grad and grad is not _ANY:
                raise RuntimeError(
                    f".grad must be as train_step left it, but is another for a parameter of shape {tuple(parameter.shape)}: "
                    "call zero_grad() after a backward of your own"
                )


_ANY = object()  # the graph makes gradients of its own, whatever .grad was before


def _grads_to_expect(parameters: list[Tensor], before: list[Tensor | None]) -> list[Any]:
    """Return each .grad that the graph starts from, after its capture. `before`: those of before."""
    found: list[Any] = []
    for parameter, grad in zip(parameters, before, strict=True):
        if parameter.grad is grad:
            found.append(grad)
        elif grad is not None and parameter.grad is not None:  # cleared first, then made anew
            found.append(_ANY)
        else:
            what = "left in .grad" if grad is None else "there before"
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} is {what}: train_step itself must call zero_grad(), before the "
                "backward or after the step"
            )
    return found


# ---- checks ----


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _kind(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _check_surroundings(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            "torch.autocast must begin in train_step, but is on before: a graph would keep weights that were cast then"
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(f"graphed_step is for one rank, but torch.distributed has {dist.get_world_size()}")


def _check_inputs(args: Any, kwargs: Any, device: torch.device) -> None:
    for place, leaf in enumerate(tree_leaves((args, kwargs))):
        if not isinstance(leaf, Tensor):
            if type(leaf).__hash__ is None:
                raise TypeError(f"{_name(args, kwargs, place)} must be a tensor or a constant, but is a {type(leaf).__name__}")
        elif leaf.device != device:
            raise ValueError(
                f"{_name(args, kwargs, place)} must be on {device}, where the parameters are, but is on {leaf.device}: move it "
                "before the call"
            )
        elif leaf.requires_grad:
            raise ValueError(f"{_name(args, kwargs, place)} must not require a gradient, which nobody would get, but does")


def _name(args: Any, kwargs: Any, place: int) -> str:
    path, _ = tree_flatten_with_path((args, kwargs))[0][place]
    return f"{'args' if path[0] == SequenceKey(0) else 'kwargs'}{keystr(path[1:])}"


def _check_optimizer(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if getattr(optimizer, "found_inf", None) is not None:
        raise RuntimeError("GradScaler must be left out of train_step: it counts on the CPU. bf16 needs none")
    if not all(group.get("capturable", True) for group in optimizer.param_groups):
        raise ValueError(f"{kind} must have capturable=True, to count its steps on the GPU, but has False")


def _check_state(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.device != device):
                raise TypeError(
                    f"{type(optimizer).__name__} must have its state on {device}, but has {name} elsewhere, where replays of a "
                    "graph don't change it: onepass.parallel.AdamW and torch.optim.AdamW(capturable=True) have all of it there"
                )
