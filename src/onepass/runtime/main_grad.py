"""main_grad: a parameter that carries this tensor has its gradient added there, by what computes the gradient.

Megatron's convention. `weight.main_grad` (fp32, fp16 or bf16, of the weight's shape) gathers gradients over microbatches;
nothing of their size is allocated. What autograd is given instead, and what happens in each kind of pass:
- `.backward()`: added to main_grad. Where `weight.grad_added_to_main_grad` exists it becomes True and autograd gets zeros, so
  that the hooks that wait for a gradient find one; otherwise, and of `MainGrads`' parameters, it gets none.
- `torch.autograd.grad(..., weight)`: the gradient itself comes back, and main_grad stays as it is.
- a pass that does not ask for the weight (`autograd.grad` by something else): nothing is computed.
A compiled graph can do the first only: in another pass it raises before anything is written.
- in `onepass.runtime.graphs.graphed`, where make_graphed_callables asks by `autograd.grad`: as `.backward()`, at each replay.
- `weight.__fsdp_param__` (Megatron-FSDP): `weight.get_main_grad()` is called in backward and overwritten, not added to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.runtime.dispatch import cast, registered, watched
from onepass.runtime.released import check_no_copy, comes_first, ready, was_written, with_memory

_TYPES = (torch.float32, torch.float16, torch.bfloat16)


# ---- where a gradient goes ----


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The parameter's main_grad, or None where it carries none. Raises where it can't take a gradient."""
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
    """Of those that need a gradient, as ctx.needs_input_grad says from the first of them on; the others' are not looked at.

    They are to be kept on ctx, apart from the saved tensors, of which autograd would say that they were written to in between.
    """
    return tuple([main_grad_of(p) if p is not None and needs[i] else None for i, p in enumerate(parameters)])


def has_own_place(parameter: Tensor | None) -> bool:
    """Whether the parameter's gradient goes anywhere but to autograd."""
    return parameter is not None and (getattr(parameter, "main_grad", None) is not None or in_fsdp(parameter))


def keeps_main_grad(parameter: Tensor) -> bool:
    """Whether the parameter's main_grad is there after backward too; that of several as one is made anew in each forward."""
    return getattr(parameter, "main_grad", None) is not None and not in_fsdp(parameter) and not of_several(parameter)


def in_fsdp(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "__fsdp_param__", False))


def of_several(tensor_or_node: Any) -> bool:
    """Whether it is several parameters as one (runtime/joined.py), or their node in autograd's graph."""
    return bool(getattr(tensor_or_node, "of_several", False))


# ---- who asks for it ----


class Asked(Enum):
    """What a backward pass wants of one gradient."""

    GATHERED = "gathered"  # .backward()
    RETURNED = "returned"  # torch.autograd.grad by this parameter
    CAPTURED = "captured"  # the same for a CUDA graph, whose replays are to add to main_grad: zeros come back
    NOT = "not asked for"


def asked(ctx: Any, *given: bool) -> list[Asked]:
    """What the pass that is running wants of the gradients of the Function's first arguments: those given are tensors, not None.

    PyTorch's own `needs_input_grad` says only that somebody may want it some time.
    """
    needs = ctx.needs_input_grad
    if torch.compiler.is_compiling():  # there the registered op asks, when it runs
        return [Asked.GATHERED if need else Asked.NOT for need in needs[: len(given)]]
    found = []
    edges = iter(ctx.next_functions)  # of tensors only
    for there, needed in zip(given, needs, strict=False):
        node = next(edges)[0] if there else None
        found.append(_asked_of(node) if needed else Asked.NOT)
    return found


def _asked_of(node: Any) -> Asked:
    if of_several(node):
        return _asked_of_several(node)
    try:
        wanted = torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "leaf node" not in str(error):  # no pass is running: somebody calls backward by hand
            return Asked.GATHERED
        return Asked.CAPTURED if _to_be_captured(node) else Asked.RETURNED
    return Asked.GATHERED if wanted else Asked.NOT


def _asked_of_several(node: Any) -> Asked:
    """What is wanted of all alike, or the gradient itself, of which their node then puts each part where it belongs."""
    found = {_asked_of(each) for each, _ in node.next_functions if each is not None}
    if found == {Asked.NOT} and torch._C._will_engine_execute_node(node):  # asked for as one, by torch.autograd.grad
        return Asked.RETURNED
    return found.pop() if len(found) == 1 else Asked.RETURNED


# for all threads, as backward runs in others than who asks for it
_graphed: frozenset[int] = frozenset()  # by id
_any_graphed = False  # a compiler, which can't tell who will ask, is not to make a function anew for each block's parameters


@contextmanager
def captured_by_grad(parameters: Iterable[Tensor]) -> Iterator[None]:
    """In the block a pass of torch.autograd.grad by one of these that has a main_grad captures it, or warms up for that."""
    global _graphed, _any_graphed
    before, _graphed = _graphed, _graphed | {id(parameter) for parameter in parameters}
    _any_graphed = bool(_graphed)
    try:
        yield
    finally:
        _graphed, _any_graphed = before, bool(before)


def _to_be_captured(node: Any) -> bool:
    parameter: Any = getattr(node, "variable", None)
    return id(parameter) in _graphed and keeps_main_grad(parameter)


def _asked_now(parameter: Tensor) -> Asked:
    """By the pass that is running, which may be a compiled graph's: that adds to main_grad whoever asks for whatever."""
    running = torch._C._current_autograd_node()
    for node, _ in running.next_functions if running is not None else ():
        if getattr(node, "variable", None) is not parameter and not (of_several(node) and parameter.grad_fn is node):
            continue
        wanted = _asked_of(node)
        if wanted in (Asked.RETURNED, Asked.NOT):
            raise RuntimeError(
                "main_grad must be gathered by .backward(), but this pass is torch.autograd.grad's, and a compiled graph can't "
                "return another gradient than it was made for, or none: run it uncompiled, or without main_grad on the weight"
            )
        return wanted
    return Asked.GATHERED


# ---- what autograd gets in its place ----

_zeros: dict[tuple[torch.Size, torch.dtype, torch.device, bool], Tensor] = {}
_HOLDERS = 2  # of a storage that is only here: the tensor, and the object that asks


def placeholder(parameter: Tensor, wanted: Asked = Asked.GATHERED) -> Tensor | None:
    """Zeros for the hooks of a parameter whose gradient is in main_grad already; None where nobody waits for any.

    One tensor of each kind is handed out again and again, while it is surely zeros and nobody's: autograd may keep what it gets
    as `.grad` and add to it in place. So would each replay of a graph, which therefore makes its own. But `MainGrads`' hooks are
    called for None as well, and take `.grad` away at once: only who captures by torch.autograd.grad must have a tensor, and one
    is enough for all of its parameters, whoever else has it, if it was made before.
    """
    if of_several(parameter):
        return _placeholder_of_several(parameter)
    cleared = _is_cleared(parameter)
    waited_for = hasattr(parameter, "grad_added_to_main_grad") and not cleared
    if torch.compiler.is_compiling():
        return torch.zeros_like(parameter) if waited_for or (cleared and _any_graphed) else None
    if not waited_for and wanted is not Asked.CAPTURED:
        return None
    recorded = capturing(parameter)
    kind = parameter.shape, parameter.dtype, parameter.device, cleared
    kept = _zeros.get(kind)
    if kept is None or kept._version or (not cleared and (recorded or somebody_has(kept))):
        if recorded:
            return torch.zeros_like(parameter)
        kept = _zeros[kind] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return kept.detach()


def _placeholder_of_several(parameter: Tensor) -> Tensor:
    """One zero in the shape of all, for their node, which knows it again and hands each its own."""
    if torch.compiler.is_compiling():
        return torch.zeros_like(parameter)
    kind = torch.Size(()), parameter.dtype, parameter.device, True
    kept = _zeros.get(kind)
    if kept is None or kept._version:
        if capturing(parameter):
            return torch.zeros_like(parameter)
        kept = _zeros[kind] = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return kept.expand(parameter.shape)


def _is_cleared(parameter: Tensor) -> bool:
    return hasattr(parameter, "main_grads")


def somebody_has(kept: Tensor) -> bool:
    """Whether anybody else has the tensor's storage."""
    return bool(torch._C._storage_Use_Count(kept.untyped_storage()._cdata) > _HOLDERS)


def is_placeholder(grad: Tensor, several: bool = False) -> bool:
    """Whether it is surely the zeros that `MainGrads`' parameters, or several as one, are handed: adding them would be right, and
    in vain."""
    kept = _zeros.get((torch.Size(()) if several else grad.shape, grad.dtype, grad.device, True))
    return kept is not None and kept.data_ptr() == grad.data_ptr() and not kept._version


def capturing(tensor: Tensor) -> bool:
    """Whether what is done to the tensor goes into a CUDA graph, and is not done now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _mark(parameter: Any) -> None:
    if hasattr(parameter, "grad_added_to_main_grad"):
        parameter.grad_added_to_main_grad = True
        if _is_cleared(parameter):
            parameter.main_grads.added_here(parameter)


def settled(parameter: Tensor, wanted: Asked = Asked.GATHERED) -> Tensor | None:
    """What autograd gets for a gradient that its op has added to main_grad, or will after backward."""
    _mark(parameter)
    return placeholder(parameter, wanted)


def place_of(parameter: Tensor, main_grad: Tensor | None, wanted: Asked) -> Tensor | None:
    """Where an op may add a gradient part by part, by `add_gradient`. None where it is to make it apart, for `vector_gradient`
    to put it."""
    if main_grad is None or wanted not in (Asked.GATHERED, Asked.CAPTURED) or in_fsdp(parameter) or watched(main_grad):
        return None
    return with_memory(_place_in_pass(main_grad, wanted))


# ---- putting it there ----


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, main_grad: Tensor | None, wanted: Asked) -> Tensor | None:
    """The gradient of `x @ weight.T` by weight, of rows dy [M, N] and x [M, K]: put where it belongs, or for autograd.

    `weight` is the parameter itself; `main_grad` what `main_grad_of` found in forward, as by now it may be another step's.
    """
    return _gradient(_PRODUCT, dy, x, weight, main_grad, wanted)


def vector_gradient(sums: Tensor, vector: Tensor, main_grad: Tensor | None, wanted: Asked) -> Tensor | None:
    """The same of a bias or a norm's weight, whose gradient is there already, in fp32 or wider."""
    return _gradient(_PRODUCT, sums, None, vector, main_grad, wanted)


class _Way(NamedTuple):
    """How a gradient is made of two tensors and a parameter: to be returned, over main_grad, or added to it.

    The ops are for where somebody watches.
    """

    returned: Callable[[Any, Any, Tensor], Tensor]
    overwrite: Callable[[Any, Any, Tensor], Tensor]
    overwrite_op: Any
    add: Callable[[Tensor, Any, Any], None]
    add_op: Any


def _gradient(
    way: _Way, first: Tensor, second: Tensor | None, parameter: Tensor, main_grad: Tensor | None, wanted: Asked
) -> Tensor | None:
    """Put it where the pass wants it; what autograd gets."""
    if wanted is Asked.NOT:
        return None
    if wanted is Asked.RETURNED or (main_grad is None and not in_fsdp(parameter)):
        return way.returned(first, second, parameter)
    if in_fsdp(parameter):
        return (way.overwrite_op if watched(first, second) else way.overwrite)(first, second, parameter)
    assert main_grad is not None
    if watched(first, second, main_grad):
        way.add_op(main_grad, first, second, parameter)
    else:
        way.add(_place_in_pass(main_grad, wanted), first, second)
        _mark(parameter)
    return placeholder(parameter, wanted)


def _product(first: Tensor, second: Tensor | None, parameter: Tensor) -> Tensor:
    """`first.T @ second`, or `first` itself where there is no second."""
    return cast(first if second is None else first.t() @ second, parameter.dtype)


def place_for(main_grad: Tensor, wanted: Asked) -> Tensor:
    """Where a kernel adds by itself."""
    return ready(_place_in_pass(main_grad, wanted))


def _place_in_pass(main_grad: Tensor, wanted: Asked) -> Tensor:
    """main_grad, or in what warms up for a capture, with gradients of nothing in particular, what is thrown away.

    It may have no memory yet: a way that adds sees to that, as only it knows whether it can write over what is there.
    """
    return torch.empty_like(main_grad) if wanted is Asked.CAPTURED and not capturing(main_grad) else main_grad


_CPU_ROWS = 4096  # of main_grad that are made of widened operands at a time, where a CPU can't sum 16-bit products in fp32


def add_gradient(main_grad: Tensor, first: Tensor, second: Tensor | None, keep: bool = True) -> None:
    """main_grad (or nothing) + first.T @ second (or first), with fp32 sums and one rounding where main_grad is narrower.

    Where main_grad's memory comes with the step's first gradient (`released.py`), that is seen to here, and it is nothing.
    But cuBLAS rounds twice where main_grad has the operands' 16-bit type, the product and then the sum: 1.41 times the error, as
    Apex's kernel has. One rounding there takes an fp32 buffer of the weight's size and half as long again.
    """
    if keep and comes_first(main_grad):
        _add_gradient(main_grad, first, second, keep=False)
        was_written(main_grad)
    else:
        _add_gradient(main_grad, first, second, keep)


def _add_gradient(main_grad: Tensor, first: Tensor, second: Tensor | None, keep: bool) -> None:
    beta = float(keep)
    if second is None:
        main_grad.add_(first) if keep else main_grad.copy_(first)
    elif first.dtype == main_grad.dtype:
        main_grad.addmm_(first.t(), second, beta=beta)
    elif first.is_cuda and main_grad.dtype is torch.float32:
        torch.addmm(main_grad, first.t(), second, beta=beta, out_dtype=torch.float32, out=main_grad)
    elif main_grad.dtype is torch.float32:
        wide = second.float()
        for at in range(0, main_grad.shape[0], _CPU_ROWS):
            main_grad[at : at + _CPU_ROWS].addmm_(first[:, at : at + _CPU_ROWS].float().t(), wide, beta=beta)
    else:  # another 16-bit type, or fp32 into 16 bits; in place, as autocast would round what is not
        main_grad.copy_(main_grad.float().addmm_(first.float().t(), second.float(), beta=beta))


def _marked(add: Callable[[Tensor, Any, Any], None]) -> Callable[[Tensor, Any, Any, Tensor], None]:
    """The same inside an op, which finds out itself who asks."""

    def add_and_mark(main_grad: Tensor, first: Any, second: Any, parameter: Tensor) -> None:
        check_no_copy(main_grad, getattr(parameter, "main_grad", None))
        add(_place_in_pass(main_grad, _asked_now(parameter)), first, second)
        _mark(parameter)

    return add_and_mark


def _overwrite(first: Tensor, second: Tensor | None, parameter: Any) -> Tensor:
    return _overwritten(parameter, lambda main_grad: add_gradient(main_grad, first, second, keep=False))


def _overwritten(parameter: Any, write: Callable[[Tensor], None]) -> Tensor:
    """Megatron-FSDP's: its buffer is there in backward only, and its hooks always wait for something."""
    _asked_now(parameter)
    main_grad = parameter.get_main_grad()
    _check_main_grad(main_grad, parameter)
    parameter.main_grad = main_grad
    write(main_grad)
    _mark(parameter)
    return torch.zeros_like(parameter)


_add_op = registered(
    "add_gradient(Tensor(a!) main_grad, Tensor first, Tensor? second, Tensor parameter) -> ()",
    _marked(add_gradient),
    lambda *_: None,
)
_overwrite_op = registered(
    "overwrite_gradient(Tensor first, Tensor? second, Tensor parameter) -> Tensor",
    _overwrite,
    lambda first, second, parameter: torch.empty_like(parameter),
)
_PRODUCT = _Way(_product, _overwrite, _overwrite_op, add_gradient, _add_op)


# ---- of a weight whose rows are looked up ----


def rows_gradient(dy: Tensor, ids: Tensor, weight: Tensor, main_grad: Tensor | None, wanted: Asked) -> Tensor | None:
    """The gradient of `weight[ids]` by weight, of rows dy [M, K] and ids [M]: put where it belongs, or for autograd.

    Rows of one id are added up in fp32 or wider, in their order; a narrower gradient is rounded once.
    """
    return _gradient(_ROWS, dy, ids, weight, main_grad, wanted)


def add_rows(main_grad: Tensor, dy: Tensor, ids: Tensor) -> None:
    """main_grad[ids] += dy, with fp32 sums, without atomics and without waiting for a GPU."""
    main_grad = ready(main_grad)
    if main_grad.dtype in (torch.float32, torch.float64):
        _add_in_order(main_grad, ids, dy.to(main_grad.dtype))
        return
    if not ids.shape[0]:
        return
    ids, order = ids.sort(stable=True)
    new = torch.ones_like(ids)
    new[1:] = ids[1:] != ids[:-1]
    which = new.cumsum(0) - 1  # of the different ids
    sums = torch.zeros(dy.shape, dtype=torch.float32, device=dy.device)
    _add_in_order(sums, which, dy[order].float())
    # written as often as the id is there, the same each time
    main_grad.index_copy_(0, ids, (main_grad[ids].float() + sums[which]).to(main_grad.dtype))


def _add_in_order(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    if total.is_cuda:
        total.index_put_((ids,), rows, accumulate=True)  # sorts; index_add_ is atomic there, and this one on a CPU
    else:
        total.index_add_(0, ids, rows)


def _looked_up(dy: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    return (_scatter_op if watched(dy, ids, weight) else _scattered)(dy, ids, weight)


def _scattered(dy: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    dweight = torch.zeros_like(weight)
    add_rows(dweight, dy, ids)
    return dweight


def _overwrite_rows(dy: Tensor, ids: Tensor, weight: Any) -> Tensor:
    return _overwritten(weight, lambda main_grad: add_rows(main_grad.zero_(), dy, ids))


_scatter_op = registered(
    "scattered_gradient(Tensor dy, Tensor ids, Tensor weight) -> Tensor",
    _scattered,
    lambda dy, ids, weight: torch.empty_like(weight),
)
_add_rows_op = registered(
    "add_rows_gradient(Tensor(a!) main_grad, Tensor dy, Tensor ids, Tensor weight) -> ()",
    _marked(add_rows),
    lambda *_: None,
)
_overwrite_rows_op = registered(
    "overwrite_rows_gradient(Tensor dy, Tensor ids, Tensor weight) -> Tensor",
    _overwrite_rows,
    lambda dy, ids, weight: torch.empty_like(weight),
)
_ROWS = _Way(_looked_up, _overwrite_rows, _overwrite_rows_op, add_rows, _add_rows_op)
