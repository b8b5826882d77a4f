"""Registered ops where somebody watches, plain Python calls where nobody does; and a backward that says it is the last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

NAMESPACE = "onepass"  # of the registered ops; a mutant under test has another
_PLAIN = (Tensor, Parameter, type(None))
_libraries: dict[str, torch.library.Library] = {}


def registered(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an op that is opaque to the compiler and visible to dispatch modes; return what to call."""
    name = schema.partition("(")[0]
    library = _libraries.setdefault(NAMESPACE, torch.library.Library(NAMESPACE, "FRAGMENT"))
    library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def watched(*tensors: Tensor | None) -> bool:
    """Whether a compiler, a dispatch mode (checkpoint policies, counters, fake tensors) or a subclass must see the registered op.

    Nobody does in plain eager mode, and going through the dispatcher there costs 8 us forward and 16 us backward.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    for tensor in tensors:  # a loop, not any(...): half a microsecond
        if type(tensor) not in _PLAIN:
            return True
    return False


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), for what a Function returns: PyTorch 2.11's compiler loses its gradient where `to` passes x on."""
    return x if x.dtype == dtype else x.to(dtype)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will want a backward of a call on these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def checkpointed() -> bool:
    """Whether this forward is one that torch.utils.checkpoint runs, without reentrance, and will run again."""
    hooks = None if torch.compiler.is_compiling() else torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def transformed() -> bool:
    """Whether vmap, a functional derivative or forward-mode differentiation is in force: only formulas can follow those."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply without the 2 us that only functorch and setup_context need. Where `transformed`, it must not be called."""
    bare = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        return function.apply(*args) if torch.compiler.is_compiling() else bare(*args)

    return apply


def once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that can't be differentiated again, and says so, also where the incoming gradient is a constant.

    PyTorch's `once_differentiable` detaches in silence there, and a gradient penalty loses its gradient.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, *grads)
        with torch.no_grad():
            return last_derivative(backward(ctx, *grads))

    return run


def last_derivative(grads: Any) -> Any:
    """The same gradients, which raise when they are differentiated."""
    raise_later = torch._C._functions.DelayedError(
        "this is differentiable once; the op's reference, a plain formula, can be differentiated again",
        len(grads),
    )
    return raise_later(*(t if t is None else t.detach().requires_grad_() for t in grads))  # type: ignore[arg-type]
