"""Finds out what a module's code computes by running it with small stand-in children, in fp64, on the CPU.

So recognition needs no list of models or classes. If a later version of a model's code computes something else, it is not
recognised, rather than replaced wrongly.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.snapshot import GLOBAL_HOOKS, recording

FP64 = torch.float64
LARGE = 2.0**20  # a factor of inputs that shows clamps


def probe(module: nn.Module, children: dict[str, nn.Module], **attributes: Any) -> nn.Module:
    """Return a module of the same class, with the given attributes and children in place of the module's own."""
    made: nn.Module = object.__new__(type(module))
    own = {name: value for name, value in vars(module).items() if name != "forward"}
    vars(made).update(own, _modules={**module._modules, **children}, **attributes)
    reads = recording(module)
    if reads is not None:
        reads.record(made, {*children, *attributes})
    return made


def probe_forward(module: nn.Module, *args: Any, probed_code: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Run the class's forward, or other code, without hooks and without __call__. Return None if it raises."""
    with torch.no_grad():
        try:
            return (probed_code or type(module).forward)(module, *args, **options)
        except Exception:
            return None


@contextmanager
def fresh_defaults() -> Iterator[None]:
    """Restore PyTorch's random state, default dtype and global hooks after the block. Within it they are a fresh process's."""
    dtype, hooks = torch.get_default_dtype(), [dict(registry) for registry in GLOBAL_HOOKS]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        for registry in GLOBAL_HOOKS:
            registry.clear()
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            for registry, kept in zip(GLOBAL_HOOKS, hooks, strict=True):
                registry.update(kept)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=FP64, device="cpu", generator=torch.Generator().manual_seed(seed))


def close(found: Any, expected: Tensor, tolerance: float = 1e-9) -> bool:
    """Compare shape, device and values. Transformers' norms and rotations compute in fp32 and need a wider tolerance."""
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.device != expected.device:
        return False
    return bool(torch.allclose(found.to(expected.dtype), expected, rtol=tolerance, atol=tolerance))


def close_by_rows(found: Any, expected: Tensor, tolerance: float = 1e-6) -> bool:
    """Compare, where rows may be large: each by its largest number, if that is above 1."""
    largest = expected.abs().amax(-1, keepdim=True).clamp(min=1.0)
    return isinstance(found, Tensor) and found.shape == expected.shape and close(found / largest, expected / largest, tolerance)


class Function(nn.Module):
    """A stand-in child that calls a function and records the arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **options: Any) -> Any:
        self.calls.append((args, options))
        return self.function(*args, **options)


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of the class's forward, except self."""
    return dict(list(inspect.signature(type(module).forward).parameters.items())[1:])


def own_forward(module: nn.Module) -> bool:
    """Whether this instance has a forward of its own, in place of its class's."""
    return "forward" in vars(module)


def thread() -> int:
    """Return the key of a running call's state: the thread, or 0 under a compiler."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def shallow(value: Any, **attributes: Any) -> Any:
    """Return a shallow copy, for example of a configuration, with these attributes."""
    made = copy.copy(value)
    for name, other in attributes.items():
        setattr(made, name, other)
    return made
