"""Registered ops where somebody watches, plain Python calls where nobody does; and a backward that says it is the last."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
NAMESPACE = "onepass"  # of the registered ops; a mutant under test has another
PLAIN = (Tensor, Parameter, type(None))  # types that nobody watches
_libraries: dict[str, torch.library.Library] = {}


def registered(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Any:  # fmt: skip
    """Register an op that is opaque to the compiler and visible to dispatch modes; return what to call."""
    name = schema.partition("(")[0]
    library = _libraries.setdefault(NAMESPACE, torch.library.Library(NAMESPACE, "FRAGMENT"))
    library.define(schema, tags=tags)
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def needs_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether a compiler, a dispatch mode (checkpoint policies, counters, fake tensors) or a subclass must see the registered op.

    Nobody does in plain eager mode, and going through the dispatcher there costs 8 us forward and 16 us backward.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    for tensor in tensors:  # a loop, not any(...): half a microsecond
        if type(tensor) not in PLAIN:
            return True
    return False


def has_address(x: Tensor) -> bool:
    """Whether `x.data_ptr()` is where its values are: tensors of compilers and functorch, fake ones and subclasses have none."""
    return type(x) in PLAIN and not torch.compiler.is_compiling() and not is_functorch_wrapped_tensor(x)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), for what a Function returns: PyTorch 2.11's compiler loses its gradient where `to` passes x on."""
    return x if x.dtype == dtype else x.to(dtype)


def add_matmul(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Return y + x @ w in y's memory, and from a compiler in memory that it chooses.

    PyTorch 2.11's compiler gives zeros for the gradients of a Function whose result was written in place after an op made it.
    """
    return y.addmm(x, w) if torch.compiler.is_compiling() else y.addmm_(x, w)


def writable(y: Tensor) -> Tensor:
    """Return what a Function returns for y, so that its caller may write to it in place.

    F.linear with a bias returns a view where x has three dimensions, and autograd lets nobody write to a Function's views.
    """
    if torch.compiler.is_compiling() or not y._is_view():
        return y
    return y.data  # no view, and a tenth of the time of an operator


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will want a backward of a call on these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def under_checkpoint() -> bool:
    """Whether this forward is one that torch.utils.checkpoint runs, without reentrance, and will run again."""
    return _checkpoint_hook() is not None


def recomputation() -> Callable[[Tensor], Any] | None:
    """Return what takes the tensors that a recomputation of torch.utils.checkpoint saves, or None where none runs.

    It ends the recomputation, by an exception, with the last tensor that backward needs.
    """
    hook = _checkpoint_hook()
    return hook if hook is not None and hook.__qualname__.startswith("_recomputation_hook.") else None


def _checkpoint_hook() -> Any:
    hooks = None if torch.compiler.is_compiling() else torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint" else None


def under_functorch() -> bool:
    """Whether vmap, a functional derivative or forward-mode differentiation is in force: only formulas can follow those."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply without the 2 us that only functorch and setup_context need. Where `under_functorch`, it must not be
    called."""
    bare = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        return function.apply(*args) if torch.compiler.is_compiling() else bare(*args)

    return apply if TORCH >= (2, 11) else _with_main_grads(function, apply)


def _with_main_grads(function: type[torch.autograd.Function], apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return `apply` for the compiler before PyTorch 2.11, which gives forward copies of tensors, without main_grad.

    Tensors in a tuple come as they are, but get no gradients. So forward gets parameters with main_grad in both ways.
    """

    class WithMainGrads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *copies, originals = args
            chosen = [b if _has_main_grad(b) else a for a, b in zip(copies, originals, strict=True)]
            return function.forward(ctx, *chosen)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return *function.backward(ctx, *grads), None

    with_main_grads: Any = WithMainGrads

    def apply_to_parameters(*args: Any) -> Any:
        if torch.compiler.is_compiling() and any([_has_main_grad(arg) for arg in args]):
            return with_main_grads.apply(*args, args)
        return apply(*args)

    return apply_to_parameters


def _has_main_grad(value: object) -> bool:
    return isinstance(value, Tensor) and (hasattr(value, "main_grad") or hasattr(value, "__fsdp_param__"))


def not_twice_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward raise in a pass that is itself to be differentiated (create_graph=True).

    PyTorch's `once_differentiable` raises later, in the second pass, and only where that pass comes by: `torch.autograd.grad`
    of a gradient penalty by its leaves does not, and loses the penalty in silence.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotTwiceDifferentiable
        return backward(ctx, *grads)

    return run


class NotTwiceDifferentiable(RuntimeError):
    """Raised in a backward with create_graph=True through an op that is differentiable once."""

    def __init__(self) -> None:
        super().__init__(
            "this op is differentiable once, but its backward runs with create_graph=True; the op's reference, a plain formula, "
            "can be differentiated again"
        )


# ---- autocast ----


def under_autocast(x: Tensor) -> bool:
    """Whether autocast rounds the operands of x's product; it leaves fp64 alone."""
    if not torch._C._is_any_autocast_enabled():  # the usual case, at a third of the time
        return False
    return not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64


def product_type(x: Tensor) -> torch.dtype:
    """What the operands of x's product are rounded to: x's type, or autocast's where that is on."""
    return torch.get_autocast_dtype(x.device.type) if under_autocast(x) else x.dtype
