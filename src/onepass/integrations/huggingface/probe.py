"""What a module's code does, found by running it: with small children in the place of its own, in fp64, on the CPU.

So no name has to be known, nor a class, and a model's code that has changed since is not mistaken for what it was.
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

FP64 = torch.float64


def probe(module: nn.Module, children: dict[str, nn.Module], **attributes: Any) -> nn.Module:
    """Of the module's class, with its attributes but for those given, and with these children beside the others."""
    made = object.__new__(type(module))
    own = {name: value for name, value in vars(module).items() if name != "forward"}
    vars(made).update(own, _modules={**module._modules, **children}, **attributes)
    return made


def probe_forward(module: nn.Module, *args: Any, **options: Any) -> Any:
    """The class's forward, past hooks and __call__'s own ways; None where it can't take this."""
    with torch.no_grad():
        try:
            return type(module).forward(module, *args, **options)
        except Exception:
            return None


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Random numbers go on after it as they would have; within it PyTorch's defaults are those of a fresh process."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=FP64, device="cpu", generator=torch.Generator().manual_seed(seed))


def close(found: Any, expected: Tensor, tolerance: float = 1e-9) -> bool:
    """HF's norms and rotations are fp32 inside: their tolerance is wider."""
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.device != expected.device:
        return False
    return bool(torch.allclose(found.to(expected.dtype), expected, rtol=tolerance, atol=tolerance))


class Function(nn.Module):
    """A child that is a function, and keeps what it was called with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **options: Any) -> Any:
        self.calls.append((args, options))
        return self.function(*args, **options)


def parameters_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Of the class's forward, but self."""
    return dict(list(inspect.signature(type(module).forward).parameters.items())[1:])


def own_forward(module: nn.Module) -> bool:
    """Whether somebody has given this instance a forward of its own."""
    return "forward" in vars(module)


FSDP = "torch.distributed.fsdp"  # whose hooks gather weights, and no more
_NO_MATTER = (FSDP, "transformers.")  # the latter's record what comes out


def hooked(module: nn.Module, but_by: tuple[str, ...] = _NO_MATTER) -> bool:
    """Whether somebody looks at this module's calls, or changes them; hooks of packages that begin so don't count."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
        for hook in hooks.values():
            if not (getattr(hook, "__module__", None) or "").startswith(but_by):
                return True
    return False


def thread() -> int:
    """The key of what is known of a call that is under way."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def shallow(value: Any, **attributes: Any) -> Any:
    """A copy, of a configuration say, with other attributes."""
    made = copy.copy(value)
    for name, other in attributes.items():
        setattr(made, name, other)
    return made
