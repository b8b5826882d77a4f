"""The contract of every op, as checks. Each check takes one op's sample call, on a device, by a backend.

    for check in CHECKS:
        check(subjects("triton", torch.device("cpu"))["rms_norm"])

A check raises AssertionError if the op breaks the contract. Requirements of a single op are in that op's own tests.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from onepass.runtime.backend import register_backend
from onepass.runtime.dispatch import NAMESPACE
from onepass.runtime.op import OPS
from onepass.runtime.samples import weights_of
from onepass.testing.faults import MemorySteps
from onepass.testing.fuzz import lay_out, run_case
from onepass.testing.poison import saved_tensors, unchanged
from onepass.testing.row_contract import gives_rows_the_same_bits
from onepass.testing.subject import Subject, as_tuple, weighted_sum
from onepass.testing.wrong_arguments import names_wrong_arguments

_CLOSE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2e-2, 2e-2), torch.float64: (1e-10, 1e-10)}  # rtol, atol
_CLOSE |= {torch.int32: (0.0, 0.0), torch.int64: (0.0, 0.0)}


def subjects(backend: str, device: torch.device) -> dict[str, Subject]:
    """Return all sample calls of all ops by name."""
    found = {}
    for op in OPS.values():
        for name, sample in op.samples.SAMPLES.items():
            if name.partition(":")[0] == op.name:
                found[name] = Subject(op, backend, device, sample)
    return found


def _is_first(subject: Subject) -> bool:
    return subject.sample is subject.op.samples.SAMPLES[subject.op.name]


def _has_kernels(subject: Subject) -> bool:
    return next(iter(subject.op.samples.covering_calls()), None) is not None


def _close(found: Any, expected: Any, what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        rtol, atol = _CLOSE[other.dtype]
        scale = float(other.detach().abs().max()) if other.numel() else 1.0
        torch.testing.assert_close(
            one, other, rtol=rtol, atol=atol * max(1.0, scale), equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


# ---- the call ----


def repeats(subject: Subject) -> None:
    """Two calls are bitwise equal, and two backward passes of one. Inputs and incoming gradients are not written."""
    tensors = subject.tensors()
    ys, again = subject.run(*tensors), subject.run(*tensors)
    incoming = [torch.ones_like(y) for y in ys if y.requires_grad]
    before = [t.detach().clone() for t in tensors]
    first = subject.gradients(tensors, ys, retain_graph=True)
    torch.autograd.backward([y for y in ys if y.requires_grad], incoming, retain_graph=True)
    assert all(bool((g == 1).all()) for g in incoming), "an incoming gradient was written"
    for found in (subject.gradients(tensors, ys), subject.gradients(tensors, again)):
        assert all(map(torch.equal, first, found)), "gradients differ from call to call"
    assert all(map(torch.equal, ys, again)), "results differ from call to call"
    assert all(map(torch.equal, tensors, before)), "an input was written"


def takes_strided_tensors(subject: Subject) -> None:
    """Inputs and incoming gradients with gaps, or transposed, give the results and gradients of contiguous ones.

    So do inputs of which one, in turn, starts at an address that no vector has. Each comes after an aligned call of its kind.
    """
    tensors = subject.tensors()
    expected = subject.run(*tensors)
    asked = [y for y in expected if y.requires_grad]
    incoming = [weights_of(y) for y in asked]
    grads = torch.autograd.grad(asked, [t for t in tensors if t.requires_grad], incoming)
    for layout in ("rows apart", "columns apart", "transposed"):
        strided = [lay_out(t.detach(), layout).requires_grad_(t.requires_grad) for t in tensors]
        ys = subject.run(*strided)
        _close(ys, expected, f"results of {layout}")
        asked, leaves = [y for y in ys if y.requires_grad], [t for t in strided if t.requires_grad]
        dys = [lay_out(dy, layout) for dy in incoming]
        with unchanged(**{f"incoming gradient {i}": dy for i, dy in enumerate(dys)}):
            found = torch.autograd.grad(asked, leaves, dys)
        _close(found, grads, f"gradients of {layout}")
    for i, t in enumerate(tensors):
        with torch.no_grad():
            plain = subject.run(*tensors)
            found = subject.run(*tensors[:i], _one_later(t), *tensors[i + 1 :])
        _close(found, plain, f"results with an unaligned {subject.names()[i]}")


def _one_later(t: Tensor) -> Tensor:
    return torch.cat([t.detach().flatten()[:1], t.detach().flatten()])[1:].view(t.shape)


def respects_what_is_frozen(subject: Subject) -> None:
    """Frozen inputs get no gradient and leave the other gradients unchanged. If all inputs are frozen, there is no graph.

    Of up to four tensors that may be frozen every choice is taken, and of more those of none, one, all but one, and all.
    """
    tensors = subject.tensors()
    asking = [i for i, t in enumerate(tensors) if t.requires_grad]
    full = dict(zip(asking, subject.gradients(tensors), strict=True))
    n = len(asking)
    for needs in product((True, False), repeat=n):
        if n > 4 and 1 < sum(needs) < n - 1:
            continue
        wanted = [i for i, need in zip(asking, needs, strict=True) if need]
        some = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        with saved_tensors() as kept:
            ys = subject.run(*some)
        assert any(y.requires_grad for y in ys) is bool(wanted), f"a graph with {wanted} asking"
        assert wanted or not kept, "tensors are kept where nothing asks"
        if wanted:
            _close(subject.gradients(some, ys), [full[i] for i in wanted], f"gradients with {wanted} asking")


def takes_writes_to_results(subject: Subject) -> None:
    """A result can be written in place, as PyTorch's can. Gradients are as before, unless backward needs it and says so."""
    expected = subject.gradients(subject.tensors())
    for i, y in enumerate(subject.run(*subject.tensors())):
        tensors = subject.tensors()
        ys = subject.run(*tensors)
        with unchanged(**{str(j): t for j, t in enumerate((*tensors, *ys[:i], *ys[i + 1 :]))}):
            ys[i].mul_(2)
        assert torch.equal(ys[i], 2 * y)
        try:
            found = subject.gradients(tensors, (*ys[:i], ys[i] / 2, *ys[i + 1 :]))
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            continue
        _close(found, expected, f"gradients after a write to result {i}")


def takes_parameters_in_inference_mode(subject: Subject) -> None:
    """Parameters give the results of plain tensors. Under no_grad and inference_mode they agree, and nothing is kept."""
    tensors = subject.tensors()
    expected = subject.run(*tensors)
    parameters = [torch.nn.Parameter(t.detach()) if t.requires_grad else t for t in tensors]
    assert all(map(torch.equal, subject.run(*parameters), expected))
    for mode in (torch.no_grad, torch.inference_mode):
        with saved_tensors() as kept, mode():
            ys = subject.run(*parameters)
        assert not kept, f"tensors are kept under {mode.__name__}"
        _close(ys, expected, mode.__name__)  # not bitwise: a kernel that saves nothing for backward is a different one
        assert not any(y.requires_grad for y in ys), mode.__name__


def hands_others_the_call(subject: Subject) -> None:
    """A registered backend gets the tensors, and the options that are not their defaults: enough for the same results."""
    tensors, defaults, seen = subject.tensors(), inspect.signature(subject.op.function).parameters, []

    def run(*args: Any, **options: Any) -> Any:
        seen.append(options)
        return subject.op.function(*args, **options, backend=subject.backend)

    others = dict(subject.op.others)
    try:
        register_backend(subject.op.name, "someone", run)
        found = replace(subject, backend="someone").run(*tensors)
    finally:
        subject.op.others.clear()
        subject.op.others.update(others)
    assert all(map(torch.equal, found, subject.run(*tensors)))
    plain = [name for name, value in seen[0].items() if not isinstance(value, Tensor) and value == defaults[name].default]
    assert not plain, f"defaults were handed on: {plain}"


# ---- derivatives ----


def refuses_second_derivatives(subject: Subject, may_raise: bool = True) -> None:
    """A second derivative is right or raises, if it may. It is never silently dropped.

    The first pass takes gradients by all leaves, the first, or the last. The second differentiates a penalty on them by all
    leaves, with `.backward()` and with `torch.autograd.grad`.
    """
    tensors = subject.tensors(torch.float64 if subject.backend == "torch" else None)
    leaves = [t for t in tensors if t.requires_grad]
    for first in (leaves, leaves[:1], leaves[-1:]):
        for second in (_by_backward, _by_grad):
            expected = _second(partial(subject.sample.call, subject.sample.formula), tensors, first, second)
            try:
                found = _second(lambda *ts: subject.run(*ts), tensors, first, second)
            except RuntimeError as error:
                raises = re.search("differentiable once|derivative for .* is not implemented", str(error))  # ours; PyTorch's own
                if not (may_raise and raises):
                    raise
                continue
            _close(
                [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)],
                [torch.zeros_like(t) if g is None else g for g, t in zip(expected, leaves, strict=True)],
                f"second derivative {second.__name__}",
            )


def _second(
    function: Callable[..., Any], tensors: list[Tensor], first: list[Tensor], second: Callable[..., list[Tensor | None]]
) -> list[Tensor | None]:
    ys = function(*tensors)
    total = weighted_sum(as_tuple(ys))
    grads = torch.autograd.grad(total.square(), first, create_graph=True)
    penalty = total + sum(g.square().sum() for g in grads)
    return second(penalty, [t for t in tensors if t.requires_grad])


def _by_grad(penalty: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(penalty, leaves, allow_unused=True))


def _by_backward(penalty: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    for leaf in leaves:
        leaf.grad = None
    penalty.backward()
    return [leaf.grad for leaf in leaves]


def follows_transforms(subject: Subject) -> None:
    """torch.func.grad agrees with autograd, vmap with one call after another, jvp with grad. They transform the formula.

    An explicit choice of kernels raises under each of them.
    """
    tensors = subject.tensors()
    expected = subject.gradients(tensors)
    asking = [i for i, t in enumerate(tensors) if t.requires_grad]
    points = tuple(tensors[i].detach() for i in asking)

    def loss(by: str | None, *given: Tensor) -> Tensor:
        whole = [t.detach() for t in tensors]
        for i, t in zip(asking, given, strict=True):
            whole[i] = t
        return weighted_sum(replace(subject, backend=by).run(*whole))

    transforms: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
        "grad": lambda of: torch.func.grad(of, tuple(range(len(points))))(*points),
        "jvp": lambda of: torch.func.jvp(of, points, tuple(map(torch.ones_like, points)))[1],
        "vmap": lambda of: torch.func.vmap(of, randomness="different")(*(torch.stack([t, t / 2]) for t in points)),
    }
    if subject.backend == "triton" and _has_kernels(subject):
        for name, transform in transforms.items():
            try:
                transform(partial(loss, "triton"))
            except RuntimeError as error:
                if "backend 'triton' can't take this call" not in str(error):
                    raise
            else:
                raise AssertionError(f"torch.func.{name} ran, though the kernels were chosen")
    by = None if subject.backend == "triton" else subject.backend
    found = {name: transform(partial(loss, by)) for name, transform in transforms.items()}
    _close(found["grad"], expected, "torch.func.grad")
    rtol = _CLOSE[points[0].dtype][0]
    flat = torch.cat([g.flatten().float() for g in expected])
    torch.testing.assert_close(found["jvp"], flat.sum(), rtol=0, atol=rtol * float(flat.abs().sum()) + 1e-5)
    each = torch.stack([loss(by, *points), loss(by, *(t / 2 for t in points))])
    torch.testing.assert_close(found["vmap"], each, rtol=10 * rtol, atol=rtol)  # batched products sum in another order


# ---- main_grad ----


def leaves_main_grad_alone_where_it_fails(subject: Subject) -> None:
    """A backward that runs out of memory, at any step, leaves main_grads and flags as they were, and can be repeated.

    Or the error names each main_grad that was written. Cleared, it gets the right sum too. Of steps that leave the same written
    one is repeated. By the formula an op's first sample alone is tried.
    """
    if subject.backend == "torch" and not _is_first(subject):
        return

    def prepared() -> tuple[dict[str, Any], Tensor]:
        tensors = subject.tensors()
        named = {name: t for name, t in zip(subject.names(), tensors, strict=True) if t.requires_grad}
        for t in named.values():
            _give_main_grad(t)
        return named, weighted_sum(subject.run(*tensors))

    prepared()[1].backward()  # a kernel's first launch has steps of its own
    expected, loss = prepared()
    noted = MemorySteps()
    noted.backward(loss)
    taking = [name for name, t in expected.items() if t.grad_added_to_main_grad]
    repeated: set[tuple[str, ...]] = set()
    for step in noted.steps if taking else ():
        named, loss = prepared()
        try:
            MemorySteps(fail_at=step).backward(loss)
        except torch.OutOfMemoryError as error:
            said = str(error)
        else:
            raise AssertionError(f"nothing failed at step {step}")
        left: tuple[str, ...] = ()
        for name in taking:
            t = named[name]
            written = t.grad_added_to_main_grad or not bool((t.main_grad == 1).all())
            named_so = re.search(rf"\b{name}\.main_grad", said) is not None
            assert written is named_so, f"{name}.main_grad, written: {written}, after the error {said!r}"
            if written:
                _give_main_grad(t)
                left += (name,)
        if left in repeated:
            continue
        repeated.add(left)
        weighted_sum(subject.run(*_in_place_of(subject, named))).backward()
        for name in taking:
            assert torch.equal(named[name].main_grad, expected[name].main_grad), f"{name}.main_grad of a retry after step {step}"


def _give_main_grad(parameter: Any) -> None:
    parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32, requires_grad=False)
    parameter.grad_added_to_main_grad = False


def _in_place_of(subject: Subject, named: dict[str, Tensor]) -> list[Tensor]:
    """The sample's tensors, with these in the place of theirs."""
    return [named.get(name, t) for name, t in zip(subject.names(), subject.tensors(), strict=True)]


# ---- nothing to do ----


def takes_no_rows_with_any_options(subject: Subject) -> None:
    """Random calls without rows give the formula's results and gradients. An op's first sample alone makes them."""
    if _is_first(subject):
        for seed in range(12):
            outcome = run_case(subject.op, seed, device=subject.device, backends=(str(subject.backend),), empty=True)
            assert not outcome.failures, f"{outcome.what}: {outcome.failures}"


def gives_gradients_of_nothing(subject: Subject) -> None:
    """Without rows every tensor that requires grad gets a gradient, of zeros: a bucket that waits for one must not wait.

    Each of the first tensor's dimensions but the last is made 0 in turn. With a main_grad, that stays as it is.
    """
    names = subject.names()
    for rows in {size for size in subject.tensors()[0].shape[:-1] if size > 1}:
        with torch.no_grad():
            empty = [_with_rows(0, rows, name, t) for name, t in zip(names, subject.tensors(), strict=True)]
        formula, ours, adding = ([_like(t, given) for t, given in zip(empty, subject.tensors(), strict=True)] for _ in range(3))
        for t in adding:
            _give_main_grad(t)
        expected: list[Tensor | None] = [None] * len(names)
        if subject.sample.formula is not None:  # what no row reads may have a gradient all the same
            expected = _by_backward(weighted_sum(as_tuple(subject.sample.call(subject.sample.formula, *formula))), formula)
        for leaves in (ours, adding):
            found = _by_backward(weighted_sum(subject.run(*leaves)), leaves)
            for name, t, grad, zeros in zip(names, leaves, found, expected, strict=True):
                if t.requires_grad:
                    what = f"gradient of {name}, where {names[0]} is {tuple(leaves[0].shape)}"
                    assert grad is not None, f"no {what}"
                    added = t.main_grad - 1 if leaves is adding else 0  # type: ignore[attr-defined]
                    _close([(grad + added).to(t.dtype)], [torch.zeros_like(t) if zeros is None else zeros], what)


def _like(t: Tensor, given: Tensor) -> Tensor:
    """A leaf of this tensor's values, which asks for a gradient as `given` does."""
    return t.detach().requires_grad_(given.requires_grad)


def _with_rows(count: int, rows: int, name: str, t: Tensor) -> Tensor:
    """The tensor with so many entries along the dimensions that have `rows`. Boundaries of as many tokens fall to that."""
    for dim, size in enumerate(t.shape):
        t = t.narrow(dim, 0, count) if size == rows else t
    falls = name == "ends" or (name == "cu_seqlens" and t.max() == rows)
    return t.clamp(max=count) if falls else t


# ---- autocast, checkpointing, compilation ----


def works_under_autocast(subject: Subject) -> None:
    """Under autocast results and gradients are within 16 bits of those without, and have the types of their tensors.

    fp64 stays as it is.
    """
    tensors = subject.tensors()
    torch.manual_seed(0)
    expected = subject.run(*tensors)
    grads = subject.gradients(tensors, expected)
    torch.manual_seed(0)
    with torch.autocast(subject.device.type, torch.bfloat16):
        ys = subject.run(*tensors)
    found = subject.gradients(tensors, ys)
    assert [g.dtype for g in found] == [t.dtype for t in tensors if t.requires_grad]
    for one, other in zip((*ys, *found), (*expected, *grads), strict=True):
        if other.is_floating_point():
            assert (one - other).double().norm() <= 2e-2 * other.double().norm(), "another result under autocast"
    if subject.backend == "torch":
        with torch.autocast(subject.device.type, torch.bfloat16):
            wide = subject.run(*subject.tensors(torch.float64))
        assert all(y.dtype is torch.float64 for y in wide if y.is_floating_point()), [y.dtype for y in wide]


def can_be_checkpointed(subject: Subject) -> None:
    """Activation checkpointing, reentrant or not, gives bitwise equal gradients."""
    tensors = subject.tensors()
    expected = subject.gradients(tensors)
    ys = checkpoint(subject.run, *tensors, use_reentrant=False)
    assert all(map(torch.equal, subject.gradients(tensors, ys), expected)), "not reentrant"
    leaves = [t for t in tensors if t.requires_grad]
    grads = _by_backward(weighted_sum(checkpoint(subject.run, *tensors, use_reentrant=True)), leaves)
    assert all(g is not None and torch.equal(g, e) for g, e in zip(grads, expected, strict=True)), "reentrant"


def can_be_compiled(subject: Subject) -> None:
    """torch.compile traces the op without a graph break, forward and backward.

    An op's first sample by kernels goes through AOTAutograd too, and for another number of rows.
    """
    tensors = subject.tensors()
    torch._dynamo.reset()
    sample, function, backend = subject.sample, subject.op.function, subject.backend
    of_all = backend == "triton" and _is_first(subject)
    compiler = "aot_eager" if of_all else "eager"  # registers_sound_ops takes all registered ops through AOTAutograd
    compiled = torch.compile(lambda *ts: sample.call(function, *ts, backend=backend), fullgraph=True, backend=compiler)
    rows = max(tensors[0].shape[:-1])
    for size in (rows, rows - 1) if of_all else (rows,):
        given = [_with_rows(size, rows, name, t) for name, t in zip(subject.names(), tensors, strict=True)]
        given = [_like(t, asking) for t, asking in zip(given, tensors, strict=True)]
        torch.manual_seed(0)
        expected = subject.run(*given)
        torch.manual_seed(0)
        found = as_tuple(compiled(*given))
        _close(found, expected, f"results of {size} rows")
        _close(subject.gradients(given, found), subject.gradients(given, expected), f"gradients of {size} rows")


def registers_sound_ops(subject: Subject) -> None:
    """The registered ops of a call have correct schemas and fakes. A dispatch mode sees them.

    The formula calls none that kernels' calls don't, so there an op's first sample is enough.
    """
    if subject.backend == "torch" and not _is_first(subject):
        return
    tensors = subject.tensors()
    with _calls() as calls:
        subject.gradients(tensors)
    assert calls or not (subject.backend == "triton" and _has_kernels(subject)), "nobody who watches sees a registered op"
    for op, args, kwargs in calls:
        torch.library.opcheck(op, args, kwargs, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@contextmanager
def _calls() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Yield the calls of onepass's registered ops. In the block all of them go through the dispatcher."""
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == NAMESPACE:
                found.append((func, torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, args), dict(kwargs or {})))
            return func(*args, **(kwargs or {}))

    with Recorder():  # type: ignore[no-untyped-call]
        yield found


CHECKS = (
    repeats,
    takes_strided_tensors,
    respects_what_is_frozen,
    takes_parameters_in_inference_mode,
    takes_writes_to_results,
    names_wrong_arguments,
    hands_others_the_call,
    refuses_second_derivatives,
    follows_transforms,
    leaves_main_grad_alone_where_it_fails,
    gives_gradients_of_nothing,
    takes_no_rows_with_any_options,
    works_under_autocast,
    can_be_checkpointed,
    can_be_compiled,
    registers_sound_ops,
    gives_rows_the_same_bits,
)
