"""main_grad: a parameter that carries this tensor has its gradient added there, by what computes the gradient.

Megatron's convention. `weight.main_grad` (fp32, fp16 or bf16, of the weight's shape) accumulates gradients over microbatches, and
nothing of their size is allocated. Each kind of pass:
- `.backward()` adds to main_grad. Where `weight.grad_added_to_main_grad` exists, it becomes True and autograd gets zeros, so
  that the hooks that wait for a gradient find one. Otherwise, and for `MainGrads`' parameters, autograd gets None.
- `torch.autograd.grad(..., weight)` returns the gradient itself and leaves main_grad unchanged.
- A pass that does not ask for the weight (`autograd.grad` by something else) computes nothing for it.
- A compiled graph can do the first only: in another pass it raises before it writes anything.
- In `onepass.gradients.graphs.graphed`, where make_graphed_callables calls `autograd.grad`, each replay adds to main_grad.
- `weight.__fsdp_param__` (Megatron-FSDP): backward calls `weight.get_main_grad()` and overwrites what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.releasable_storage import check_no_copy, ensure_allocated, ensure_written, is_first_write, mark_written
from onepass.runtime.dispatch import cast, needs_dispatcher, registered

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- main_grad of a parameter ----


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """Return the parameter's main_grad, or None. Raises where it can't take a gradient."""
    main_grad: Any = getattr(parameter, "main_grad", None)
    if main_grad is None:
        return None
    _check_main_grad(main_grad, parameter)
    return main_grad  # type: ignore[no-any-return]


def _check_main_grad(main_grad: object, parameter: Tensor) -> None:
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"main_grad must be a tensor, but is a {type(main_grad).__name__}")
    if type(parameter).__name__ == "DTensor":
        raise TypeError(
            "main_grad must be a plain weight's, but its weight is a DTensor: its gradient comes in .grad, without main_grad"
        )
    if main_grad.shape != parameter.shape:
        raise ValueError(f"main_grad must have its weight's shape {tuple(parameter.shape)}, but has {tuple(main_grad.shape)}")
    if main_grad.dtype not in _TYPES:
        raise TypeError(f"main_grad must be fp32, fp16 or bf16, but is {main_grad.dtype}")
    if main_grad.device != parameter.device:
        raise ValueError(f"main_grad must be on {parameter.device}, as its weight, but is on {main_grad.device}")


def main_grads_of(needs: Sequence[bool], *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the main_grads of the parameters that need a gradient; `needs` is ctx.needs_input_grad from the first of them on.

    Keep them on ctx and not among the saved tensors: autograd would report that they were written in between.
    """
    return tuple([main_grad_of(p) if p is not None and needs[i] else None for i, p in enumerate(parameters)])


def accumulates_elsewhere(parameter: Tensor | None) -> bool:
    """Whether the parameter's gradient goes anywhere but to autograd."""
    return parameter is not None and (getattr(parameter, "main_grad", None) is not None or in_fsdp(parameter))


def keeps_main_grad(parameter: Tensor) -> bool:
    """Whether the parameter's main_grad outlives backward. That of concatenated parameters is made anew in each forward."""
    return getattr(parameter, "main_grad", None) is not None and not in_fsdp(parameter) and not is_concatenated(parameter)


def in_fsdp(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "__fsdp_param__", False))


def is_concatenated(tensor_or_node: Any) -> bool:
    """Whether it is a concatenation of parameters (gradients/packed_params.py), or its node in autograd's graph."""
    return bool(getattr(tensor_or_node, "is_concatenated", False))


# ---- what a pass asks for ----


class GradRequest(Enum):
    """What a backward pass wants of one gradient."""

    ACCUMULATE = "gathered"  # .backward()
    RETURN = "returned"  # torch.autograd.grad by this parameter
    CAPTURE = "captured"  # the same while a CUDA graph is captured: replays add to main_grad, and zeros come back
    SKIP = "not asked for"


def grad_requests(ctx: Any, count: int, first: int = 0) -> list[GradRequest]:
    """Return what the running pass wants of the gradients of a Function's `count` arguments, of which there are `first` before.

    PyTorch's `needs_input_grad` says only that some pass may want the gradient.
    """
    needs = ctx.needs_input_grad[first : first + count]
    if torch.compiler.is_compiling():  # the registered op asks when it runs
        return [GradRequest.ACCUMULATE if need else GradRequest.SKIP for need in needs]
    found = []
    edges, edge = ctx.next_functions, 0  # of tensors only; those that need no gradient have no node
    for need in needs:  # zip and iterators take 1 us more, of a call's 50
        if need:
            while edges[edge][0] is None:
                edge += 1
            found.append(_request_of(edges[edge][0]))
            edge += 1
        else:
            found.append(GradRequest.SKIP)
    return found


def _request_of(node: Any) -> GradRequest:
    if is_concatenated(node):
        return _request_of_concatenated(node)
    try:
        request = torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "leaf node" not in str(error):  # no pass is running: somebody calls backward by hand
            return GradRequest.ACCUMULATE
        return GradRequest.CAPTURE if _is_captured(node) else GradRequest.RETURN
    return GradRequest.ACCUMULATE if request else GradRequest.SKIP


def _request_of_concatenated(node: Any) -> GradRequest:
    """Return what the pass wants of all parts alike, or RETURN: their node then puts each part where it belongs."""
    found = {_request_of(each) for each, _ in node.next_functions if each is not None}
    if found == {GradRequest.SKIP} and torch._C._will_engine_execute_node(node):  # autograd.grad by the concatenation itself
        return GradRequest.RETURN
    return found.pop() if len(found) == 1 else GradRequest.RETURN


# For all threads: backward runs in other threads than its caller.
_graphed: frozenset[int] = frozenset()  # ids of parameters
_any_graphed = False  # what compilers look at: with `_graphed` they would recompile for each block's parameters


@contextmanager
def captured_by_grad(parameters: Iterable[Tensor]) -> Iterator[None]:
    """In the block torch.autograd.grad by a parameter with main_grad captures its gradient, or warms up for that."""
    global _graphed, _any_graphed
    before, _graphed = _graphed, _graphed | {id(parameter) for parameter in parameters}
    _any_graphed = bool(_graphed)
    try:
        yield
    finally:
        _graphed, _any_graphed = before, bool(before)


def _is_captured(node: Any) -> bool:
    parameter: Any = getattr(node, "variable", None)
    return id(parameter) in _graphed and keeps_main_grad(parameter)


def _request_now(parameter: Tensor) -> GradRequest:
    """Return what the running pass wants, inside an op. Raises where a compiled graph would add to main_grad unasked."""
    running = torch._C._current_autograd_node()
    for node, _ in running.next_functions if running is not None else ():
        if getattr(node, "variable", None) is not parameter and not (is_concatenated(node) and parameter.grad_fn is node):
            continue
        request = _request_of(node)
        if request in (GradRequest.RETURN, GradRequest.SKIP):
            raise RuntimeError(
                "main_grad must be gathered by .backward(), but this pass is torch.autograd.grad's, and a compiled graph can't "
                "return another gradient than it was made for, or none: run it uncompiled, or without main_grad on the weight"
            )
        return request
    return GradRequest.ACCUMULATE


# ---- placeholders for autograd ----

_zeros: dict[tuple[torch.Size, torch.dtype, torch.device, bool], Tensor] = {}
_HOLDERS = 2  # of an unshared storage: the tensor, and the object that asks


def placeholder(parameter: Tensor, request: GradRequest = GradRequest.ACCUMULATE) -> Tensor | None:
    """Return zeros for the hooks of a parameter whose gradient is in main_grad already, or None where nobody waits for any.

    One tensor of each kind is reused while it is surely zeros and unshared: autograd may keep what it gets as `.grad` and add to
    it in place. Each replay of a graph would do so too, so a capture makes its own. `MainGrads`' hooks are called for None as
    well and clear `.grad` at once. There only a capture by torch.autograd.grad needs a tensor, and one serves all parameters,
    shared or not, if it was made before the capture.
    """
    if is_concatenated(parameter):
        return _placeholder_of_concatenated(parameter)
    hooked = _hooks_clear_grad(parameter)
    waited_for = hasattr(parameter, "grad_added_to_main_grad") and not hooked
    if torch.compiler.is_compiling():
        return torch.zeros_like(parameter) if waited_for or (hooked and _any_graphed) else None
    if not waited_for and request is not GradRequest.CAPTURE:
        return None
    recorded = is_capturing(parameter)
    kind = parameter.shape, parameter.dtype, parameter.device, hooked
    kept = _zeros.get(kind)
    if kept is None or kept._version or (not hooked and (recorded or is_shared(kept))):
        if recorded:
            return torch.zeros_like(parameter)
        kept = _zeros[kind] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return kept.detach()


def _placeholder_of_concatenated(parameter: Tensor) -> Tensor:
    """Return one zero, expanded to the whole shape. The concatenation's node recognises it and gives each part its own."""
    if torch.compiler.is_compiling():
        return torch.zeros_like(parameter)
    kind = torch.Size(()), parameter.dtype, parameter.device, True
    kept = _zeros.get(kind)
    if kept is None or kept._version:
        if is_capturing(parameter):
            return torch.zeros_like(parameter)
        kept = _zeros[kind] = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return kept.expand(parameter.shape)


def _nobody_waits(parameter: Tensor) -> bool:
    return not hasattr(parameter, "grad_added_to_main_grad") and not is_concatenated(parameter)


def _hooks_clear_grad(parameter: Tensor) -> bool:
    """Whether `.grad` is None again once a gradient has come, by the hooks of `MainGrads`."""
    return hasattr(parameter, "main_grads")


def is_shared(kept: Tensor) -> bool:
    """Whether another tensor has this tensor's storage."""
    return bool(torch._C._storage_Use_Count(kept.untyped_storage()._cdata) > _HOLDERS)


def is_placeholder(grad: Tensor, several: bool = False) -> bool:
    """Whether it is surely the zeros that `MainGrads`' or concatenated parameters get: adding them can be left out."""
    kept = _zeros.get((torch.Size(()) if several else grad.shape, grad.dtype, grad.device, True))
    return kept is not None and kept.data_ptr() == grad.data_ptr() and not kept._version


def is_capturing(tensor: Tensor) -> bool:
    """Whether work on the tensor goes into a CUDA graph instead of running now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def mark_added(parameter: Any) -> None:
    """Set the parameter's flag: its op has added to main_grad, or will after backward."""
    if hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = True
        if _hooks_clear_grad(parameter):
            parameter.main_grads.added_here(parameter)


def mark_accumulated(parameter: Tensor, request: GradRequest = GradRequest.ACCUMULATE) -> Tensor | None:
    """Set the parameter's flag, and return what autograd gets. If that can't be allocated, the flag is not set."""
    grad = placeholder(parameter, request)
    mark_added(parameter)
    return grad


def accumulation_target(parameter: Tensor, main_grad: Tensor | None, request: GradRequest) -> Tensor | None:
    """Return where an op may add a gradient part by part, by `add_gradient`.

    None: the op makes the gradient separately, and `vector_gradient` puts it where it belongs.
    """
    if (
        main_grad is None
        or request not in (GradRequest.ACCUMULATE, GradRequest.CAPTURE)
        or in_fsdp(parameter)
        or needs_dispatcher(main_grad)  # whether a write to main_grad itself would go unseen, not which way an op takes
    ):
        return None
    return ensure_allocated(_target_in_pass(main_grad, request))


# ---- adding a gradient ----


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, request: GradRequest) -> Tensor | None:
    """Put the gradient of `x @ weight.T` by weight where it belongs, and return what autograd gets.

    dy [M, N] and x [M, K] are rows. `weight` is the parameter itself. `main_grad` is what `main_grad_of` returned in forward: by
    now the parameter may carry another step's.
    """
    return put_gradient(_PRODUCT, (dy, x), weight, main_grad, request)


def vector_gradient(sums: Tensor, vector: Tensor, main_grad: Tensor | None, request: GradRequest) -> Tensor | None:
    """Put the gradient of a bias or a norm's weight, in fp32 or wider, where it belongs, and return what autograd gets."""
    return put_gradient(_PRODUCT, (sums, None), vector, main_grad, request)


VectorSums = tuple[Tensor, Tensor, Tensor | None, GradRequest]  # the arguments of `vector_gradient`


def prepare_vector_gradient(
    sums: Tensor, vector: Tensor, main_grad: Tensor | None, request: GradRequest
) -> tuple[Tensor | None, bool]:
    """Do all of `vector_gradient` that needs memory. Return its result, and whether `add_vector_gradient` must follow."""
    if main_grad is None and request is not GradRequest.SKIP and not in_fsdp(vector):  # the usual case: 1 us less
        return cast(sums, vector.dtype), False
    if main_grad is not None and not torch.compiler.is_compiling():
        ensure_allocated(main_grad)
    return _prepare(_PRODUCT, (sums, None), vector, main_grad, request)


def add_vector_gradient(sums: Tensor, vector: Tensor, main_grad: Tensor | None, request: GradRequest) -> None:
    """Add the gradient to main_grad, and set the flag."""
    _add(_PRODUCT, (sums, None), vector, main_grad, request)


def vector_gradients(
    vectors: Sequence[VectorSums | None], work: Callable[[], Tensor | None] | None = None
) -> tuple[list[Tensor | None], Tensor | None]:
    """`vector_gradient` of several, after `work`. Return what autograd gets of them, and what `work` returns.

    All memory is allocated before `work`, which may add to another main_grad: if that fails, no vector's main_grad was written.
    """
    prepared = [(None, False) if each is None else prepare_vector_gradient(*each) for each in vectors]
    found = None if work is None else work()
    for each, (_, adds) in zip(vectors, prepared, strict=True):
        if each is not None and adds:
            add_vector_gradient(*each)
    return [grad for grad, _ in prepared], found


def name_written(names: Sequence[str]) -> AbstractContextManager[None]:
    """Say in an error in the block which parameters' main_grad the call has written. Write last where you can instead."""
    return _named_in_errors(names) if names and not torch.compiler.is_compiling() else nullcontext()


@contextmanager
def _named_in_errors(names: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        written = " and ".join(f"{name}.main_grad" for name in names)
        error.args = (f"{error}\nthe call has added to {written} already: clear that before you repeat the call",)
        raise


Operands = tuple[Tensor | None, ...]  # what a gradient is made of


class GradientKind(NamedTuple):
    """How a gradient is made of its operands, tensors, and a parameter: returned, written over main_grad, or added to it.

    The ops are not `Registered`: they do more than the direct calls, as they must find out who asks, and the parameter's type
    does not decide between the two, as only its attributes are used.
    """

    returned: Callable[..., Tensor]  # takes the operands and the parameter, as the next two
    overwrite: Callable[..., Tensor]
    overwrite_op: Any
    add: Callable[..., None]  # takes main_grad and the operands
    add_op: Any  # and the parameter


def put_gradient(
    way: GradientKind, operands: Operands, parameter: Tensor, main_grad: Tensor | None, request: GradRequest
) -> Tensor | None:
    """Put the gradient where the pass wants it, and return what autograd gets."""
    grad, adds = _prepare(way, operands, parameter, main_grad, request)
    if adds:
        _add(way, operands, parameter, main_grad, request)
    return grad


def _prepare(
    way: GradientKind, operands: Operands, parameter: Tensor, main_grad: Tensor | None, request: GradRequest
) -> tuple[Tensor | None, bool]:
    """Return what autograd gets, in memory of its own, and whether `_add` must follow."""
    if request is GradRequest.SKIP:
        return None, False
    if request is GradRequest.RETURN or (main_grad is None and not in_fsdp(parameter)):
        return way.returned(*operands, parameter), False
    if in_fsdp(parameter):  # it overwrites, so a repeated call does no harm
        return (way.overwrite_op if needs_dispatcher(*operands) else way.overwrite)(*operands, parameter), False
    if request is GradRequest.ACCUMULATE and _nobody_waits(parameter):  # the usual case: 1 us less
        return None, True
    return placeholder(parameter, request), True


def _add(
    way: GradientKind, operands: Operands, parameter: Tensor, main_grad: Tensor | None, request: GradRequest
) -> None:
    """Add the gradient to main_grad, and set the parameter's flag."""
    assert main_grad is not None
    if needs_dispatcher(*operands, main_grad):
        way.add_op(main_grad, *operands, parameter)
    else:
        way.add(_target_in_pass(main_grad, request), *operands)
        mark_added(parameter)


def _product(first: Tensor, second: Tensor | None, parameter: Tensor) -> Tensor:
    """Return `first.T @ second`, or `first` where there is no second."""
    return cast(first if second is None else first.t() @ second, parameter.dtype)


def kernel_target(main_grad: Tensor, request: GradRequest) -> Tensor:
    """Return where a kernel adds by itself."""
    return ensure_written(_target_in_pass(main_grad, request))


def _target_in_pass(main_grad: Tensor, request: GradRequest) -> Tensor:
    """Return main_grad, or while a capture warms up, with meaningless gradients, a tensor that is thrown away.

    It may have no memory yet. The function that adds allocates it: only that one knows whether it can write instead of add.
    """
    return torch.empty_like(main_grad) if request is GradRequest.CAPTURE and not is_capturing(main_grad) else main_grad


_CPU_ROWS = 4096  # rows of main_grad per product of widened operands: a CPU can't sum 16-bit products in fp32


def add_gradient(main_grad: Tensor, first: Tensor, second: Tensor | None, keep: bool = True) -> None:
    """Add first.T @ second, or first, to main_grad: fp32 sums, rounded once where it is narrower. `keep=False`: overwrite.

    A step's first gradient overwrites a main_grad whose memory comes with it (releasable_storage.py).
    cuBLAS rounds twice where main_grad has the operands' 16-bit type, the product and then the sum: 1.41 times the error, as in
    Apex's kernel. One rounding would take an fp32 buffer of the weight's size and half as long again.
    """
    if keep and is_first_write(main_grad):
        add_to_sum(main_grad, first, second, keep=False)
        mark_written(main_grad)
    else:
        add_to_sum(main_grad, first, second, keep)


def add_to_sum(main_grad: Tensor, first: Tensor, second: Tensor | None, keep: bool) -> None:
    """Add as `add_gradient` does, but don't ask whether this step has written here: a compiler can trace it."""
    beta = float(keep)
    if second is None:
        main_grad.add_(first) if keep else main_grad.copy_(first)
    elif first.dtype == main_grad.dtype:  # a beta that is passed takes 1 us more
        main_grad.addmm_(first.t(), second) if keep else torch.mm(first.t(), second, out=main_grad)
    elif first.is_cuda and main_grad.dtype is torch.float32 and first.dtype.itemsize == 2:  # cuBLAS widens no other type
        if keep:
            torch.addmm(main_grad, first.t(), second, out_dtype=torch.float32, out=main_grad)
        else:
            torch.mm(first.t(), second, out_dtype=torch.float32, out=main_grad)
    elif main_grad.dtype is torch.float32:
        wide, columns = second.float(), first.new_empty(first.shape[0], min(first.shape[1], _CPU_ROWS), dtype=torch.float32)
        for at in range(0, main_grad.shape[0], _CPU_ROWS):
            part = first[:, at : at + _CPU_ROWS]
            main_grad[at : at + _CPU_ROWS].addmm_(columns[:, : part.shape[1]].copy_(part).t(), wide, beta=beta)
    else:  # another 16-bit type, or fp32 into 16 bits; in place, as autocast rounds other products
        main_grad.copy_(main_grad.float().addmm_(first.float().t(), second.float(), beta=beta))


def as_op(add: Callable[..., None]) -> Callable[..., None]:
    """Return the function that an op runs: it finds out who asks, adds, and sets the parameter's flag."""

    def add_and_mark(main_grad: Tensor, *operands_and_parameter: Any) -> None:
        *operands, parameter = operands_and_parameter
        check_no_copy(main_grad, getattr(parameter, "main_grad", None))
        add(_target_in_pass(main_grad, _request_now(parameter)), *operands)
        mark_added(parameter)

    return add_and_mark


def _overwrite(first: Tensor, second: Tensor | None, parameter: Any) -> Tensor:
    return overwrite_main_grad(parameter, lambda main_grad: add_gradient(main_grad, first, second, keep=False))


def overwrite_main_grad(parameter: Any, write: Callable[[Tensor], object]) -> Tensor:
    """Write over Megatron-FSDP's main_grad, which exists in backward only. Return zeros: its hooks always wait for a gradient."""
    _request_now(parameter)
    main_grad = parameter.get_main_grad()
    _check_main_grad(main_grad, parameter)
    parameter.main_grad = main_grad
    write(main_grad)
    mark_added(parameter)
    return torch.zeros_like(parameter)


_add_op = registered(
    "add_gradient(Tensor(a!) main_grad, Tensor first, Tensor? second, Tensor parameter) -> ()",
    as_op(add_gradient),
    lambda *_: None,
)
_overwrite_op = registered(
    "overwrite_gradient(Tensor first, Tensor? second, Tensor parameter) -> Tensor",
    _overwrite,
    lambda first, second, parameter: torch.empty_like(parameter),
)
_PRODUCT = GradientKind(_product, _overwrite, _overwrite_op, add_gradient, _add_op)
