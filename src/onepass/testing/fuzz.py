"""Random cases for every op: formula and kernels against the formula in fp64.

    onepass fuzz                                     # 100 cases an op, on a GPU where there is one
    onepass fuzz rms_norm --cases 10000 --seed 0     # cases of seeds 0 to 9999
    TRITON_INTERPRET=1 onepass fuzz softmax          # kernels on a CPU
    onepass fuzz rms_norm --seed 17 --cases 1 --choices 0,3,0,1    # one shrunk case, as a failure prints it
    onepass fuzz fp8_histories                       # calls of one layer after another: fuzz_histories.py

`RANDOM_CALLS` in an op's `samples.py` draws its sizes, types and options. Here memory layouts, numbers, frozen inputs and
main_grad are drawn for all ops alike. A case is a list of choices, of which 0 is the simplest: shrinking tries smaller ones.
Numbers come from the device's own generator, so a case repeats on the same kind of device.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.deferred import DeferredWgrad
from onepass.runtime.op import Op
from onepass.runtime.random_calls import Draw, RandomCall, RandomTensor
from onepass.runtime.sizes import is_lost
from onepass.testing.fuzz_judge import PRODUCTS, judge
from onepass.testing.poison import poisoned, saved_tensors, unchanged

if os.environ.get("TRITON_INTERPRET") == "1":
    import onepass.testing.interpreter  # noqa: F401

BACKENDS = ("torch", "triton")
NUMBERS = ("normal", "zero", "1e-4", "1e4", "1e-4 to 1e4", "mean 100", "subnormal", "inf and NaN")
LAYOUTS = ("contiguous", "rows apart", "columns apart", "transposed", "expanded", "unaligned")
_LIKELY = (12, 1, 1, 1, 1, 1, 1, 1)
_REAL = ("number", "finite", "weight", "tame", "tame weight")  # kinds of tensors that take any numbers
_CALLS = 320  # on a GPU so many sets of all but numbers, in turn: a compilation takes longer than a case
_SHRINKS = 300  # runs of smaller cases
_CACHED = 50  # cases until PyTorch's memory cache is emptied


@dataclass
class Outcome:
    """What one case showed."""

    op: str
    seed: int
    choices: tuple[int, ...] = ()
    given: bool = False  # whether the choices were given
    what: str = ""  # the call in words
    ran: list[str] = field(default_factory=list)  # backends
    failures: list[str] = field(default_factory=list)
    lost: bool = False  # the process can't use the GPU any more, as after an access to an address that isn't there

    @property
    def line(self) -> str:
        """The command that repeats this case."""
        choices = f" --choices {','.join(map(str, self.choices))}" if self.given else ""
        return f"onepass fuzz {self.op} --seed {self.seed} --cases 1{choices}"


@dataclass
class _Drawn:
    """A call with its numbers."""

    call: RandomCall
    seed: int  # also of the default generator before each run: the op and the formula drop the same elements
    tensors: dict[str, Tensor]
    asking: set[str]  # who gets a gradient
    main_grads: dict[str, Tensor]
    words: list[str]
    defers: bool = False  # the weight's gradient is made after backward
    dys: list[Tensor | None] | None = None

    def wide(self, result: str) -> torch.dtype:
        """The type in which the op computes a result."""
        decides = self.call.arithmetic.get(result, next(iter(self.tensors)))
        return torch.promote_types(self.tensors[decides].dtype, torch.float32)


# ---- a case ----


def keeps_generators(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Make `run`, which seeds PyTorch's generators, leave the caller's as they were."""

    @functools.wraps(run)
    def kept(*args: Any, device: torch.device | None = None, **how: Any) -> Outcome:
        gpu = device if device is not None and device.type == "cuda" else None
        on_cpu, of_gpu = torch.get_rng_state(), None if gpu is None else torch.cuda.get_rng_state(gpu)
        try:
            return run(*args, device=device, **how)
        finally:
            torch.set_rng_state(on_cpu)
            if gpu is not None and of_gpu is not None:
                with contextlib.suppress(RuntimeError):  # what a GPU that is lost raises: the case says more
                    torch.cuda.set_rng_state(of_gpu, gpu)

    return kept


@keeps_generators
def run_case(
    op: Op,
    seed: int,
    choices: Sequence[int] | None = None,
    *,
    device: torch.device | None = None,
    function: Callable[..., Any] | None = None,
    without: Sequence[str] = (),
    backends: Sequence[str] = BACKENDS,
    empty: bool = False,
) -> Outcome:
    """Run one case by each backend that takes it.

    Args:
        choices: what to take in place of the seed's own choices; numbers still come from the seed.
        function: runs in the op's place, such as a mutant's.
        without: numbers of NUMBERS that become normal ones.
        empty: draw a call without rows.
    """
    device = torch.device("cpu") if device is None else device
    on_gpu = device.type == "cuda"
    draw = Draw(random.Random(f"{op.name} {seed % _CALLS if on_gpu else seed}"), choices, on_gpu, empty)
    drawn = _draw_case(op, draw, seed, device, without)
    found = Outcome(op.name, seed, given=choices is not None)
    references: dict[torch.dtype, list[dict[str, Tensor]]] = {}
    call = op.call(**drawn.call.arguments(drawn.tensors), **drawn.call.options)
    for backend in backends:
        if backend == "triton" and op.unsupported(call) is not None:
            continue
        found.ran.append(backend)
        try:
            ours = _ours(function or op.function, drawn, backend, draw)
        except Exception as error:
            found.failures.append(f"{backend}: {type(error).__name__}: {error}")
            if is_lost(device):
                found.lost = True
                break
            continue
        types = {f"d{name}": drawn.main_grads.get(name, drawn.tensors[name]).dtype for name in drawn.asking}
        factor = PRODUCTS if drawn.call.products else 1.0
        floors = drawn.call.floors(drawn.tensors)
        for wide in dict.fromkeys(map(drawn.wide, ours)):
            if wide not in references:
                references[wide] = _references(drawn, wide)
            results = [{name: t for name, t in each.items() if drawn.wide(name) is wide} for each in (ours, *references[wide])]
            eps = torch.finfo(wide).eps
            beside = drawn.call.results, drawn.call.gradients
            bad = judge(results[0], results[1:], types, *beside, factor, floors, eps)
            found.failures += [f"{backend}: {words}" for words in bad]
    found.choices = tuple(draw.taken)
    found.what = ", ".join(drawn.words)
    return found


def _draw_case(op: Op, draw: Draw, seed: int, device: torch.device, without: Sequence[str]) -> _Drawn:
    call: RandomCall = op.samples.RANDOM_CALLS[op.name](draw)
    source = random.Random(f"{op.name} {seed} numbers")
    words = [f"{name}={value}" for name, value in call.options.items() if value not in (None, False)]
    drawn = _Drawn(call, seed, {}, set(), {}, words)
    first = next(iter(call.tensors.values()))
    for i, (name, tensor) in enumerate(call.tensors.items()):
        numbers = draw.choose(NUMBERS, _LIKELY, source) if tensor.kind in _REAL else "normal"
        tame = "tame" in tensor.kind or (call.products and first.dtype is torch.float16)  # an operand inside would overflow
        # what is kept may have one scale for several numbers
        finite = call.finite or call.gradients > 0 or call.results > 0 or tensor.kind == "finite"
        # sums of numbers around 100 cancel, down to the rounding of operands
        refused = (*without, *(NUMBERS[3:6] if tame else NUMBERS[5:6] if call.results else ()), *(NUMBERS[-1:] if finite else ()))
        numbers = "normal" if numbers in refused else numbers
        layout = draw.choose(LAYOUTS, (4, 1, 1, 1, 1, 1))
        alike = tensor is first and len(tensor.shape) == 1  # a row of one number has no variance
        if layout == "expanded" and (alike or tensor.kind == "boundaries" or (call.products and "weight" in tensor.kind)):
            layout = "contiguous"  # of equal rows of a weight gradients cancel, down to the rounding of operands
        values = draw_values(tensor, numbers, _generator(device, seed, i), device)
        drawn.tensors[name] = lay_out(values, layout)
        words = [f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"]
        words += [word for word in (numbers, layout) if word not in ("normal", "contiguous")]
        if tensor.kind in (*_REAL, "positive"):
            if draw.flag(0.8):
                drawn.asking.add(name)
                if tensor.parameter and draw.flag(0.2):
                    like = torch.randn(tensor.shape, generator=_generator(device, seed, 100 + i), device=device)
                    own = torch.float32 if tensor.dtype is torch.float64 else tensor.dtype
                    drawn.main_grads[name] = like.to(draw.choose((torch.float32, own)))
                    words.append("main_grad")
            else:
                words.append("frozen")
        drawn.words.append(" ".join(words))
    can_defer = "deferred" in inspect.signature(op.function).parameters and call.promised is None
    if can_defer and call.can_defer and "weight" in drawn.main_grads and draw.flag():
        drawn.defers = True
        drawn.words.append("deferred")
    return drawn


def _generator(device: torch.device, seed: int, of: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed * 1009 + of)


def draw_values(tensor: RandomTensor, numbers: str, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return a tensor of these numbers, which the generator makes."""
    shape = tensor.shape
    on: dict[str, Any] = {"generator": generator, "device": device}

    def uniform() -> Tensor:
        return torch.rand(shape, **on)

    if tensor.kind == "labels":
        labels = torch.randint(tensor.top, shape, **on)
        return torch.where(uniform() < 0.2, tensor.ignore_index, labels)
    if tensor.kind == "boundaries":
        inner = torch.randint(tensor.top + 1, (shape[0] - 2,), **on).sort().values
        return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), tensor.top)]).to(tensor.dtype)
    if tensor.kind == "mask":
        return uniform() < 0.3
    if tensor.kind in ("positive", "constant"):
        return (uniform() + 0.25).to(tensor.dtype)
    x: Tensor = torch.randn(shape, dtype=torch.promote_types(tensor.dtype, torch.float32), **on)
    if tensor.kind in ("cos", "sin"):
        return (x.cos() if tensor.kind == "cos" else x.sin()).to(tensor.dtype)
    if "weight" in tensor.kind:
        x = x / max(tensor.top, 1) ** 0.5
    if numbers == "zero":
        x = x * 0
    elif numbers in ("1e-4", "1e4"):
        x = x * float(numbers)
    elif numbers == "1e-4 to 1e4":
        x = x * 10 ** (8 * uniform() - 4)
    elif numbers == "mean 100":
        x = x + 100
    elif numbers == "subnormal":
        x = x * torch.finfo(tensor.dtype).tiny / 4
    elif numbers == "inf and NaN":
        pick = uniform()
        for i, value in enumerate((float("inf"), float("-inf"), float("nan"))):
            x = torch.where((pick >= i * 0.01) & (pick < (i + 1) * 0.01), value, x)
    return x.to(tensor.dtype)


def lay_out(t: Tensor, layout: str) -> Tensor:
    """Return the values in another memory layout; expanded, in all of the first dimension those of its first entry."""
    if layout == "contiguous" or not t.dim() or not t.numel():
        return t
    if layout == "rows apart":
        wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), 7)
        return wide[..., 1:-2].copy_(t)
    if layout == "columns apart":
        return t.new_full((*t.shape, 2), 7)[..., 0].copy_(t)
    if layout == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return t[:1].expand(t.shape)
    return t.new_full((t.numel() + 1,), 7)[1:].view(t.shape).copy_(t)


# ---- the computations ----


def _ours(function: Callable[..., Any], drawn: _Drawn, backend: str, draw: Draw) -> dict[str, Tensor]:
    """Run the op in poisoned memory. Inputs, incoming gradients, and the memory around them must stay as they are."""
    leaves = {name: t.detach().requires_grad_(name in drawn.asking) for name, t in drawn.tensors.items()}
    inputs = {name: t * 1 if name in drawn.call.written else t for name, t in leaves.items()}
    for name, main_grad in drawn.main_grads.items():
        leaves[name].main_grad = main_grad.clone()  # type: ignore[attr-defined]
    deferred = DeferredWgrad() if drawn.defers else None
    more = {} if deferred is None else {"deferred": deferred}
    torch.manual_seed(drawn.seed)
    with unchanged(**drawn.tensors), poisoned(), contextlib.ExitStack() as stack:
        kept = [] if drawn.asking else stack.enter_context(saved_tensors())
        outputs = _outputs(function(**drawn.call.arguments(inputs), **drawn.call.options, **more, backend=backend))
        if kept:
            raise AssertionError(f"{len(kept)} tensors are kept for backward, which nothing asks for")
        if drawn.dys is None:
            drawn.dys = [_incoming(y, i, draw, drawn) for i, y in enumerate(outputs)]
        with unchanged(**{f"dy{i}": dy for i, dy in enumerate(drawn.dys)}):
            results = _results(outputs, drawn.dys)
            if deferred is not None:
                deferred.flush()
    whole = outputs[0].requires_grad and not any(y.requires_grad and dy is None for y, dy in zip(outputs, drawn.dys, strict=True))
    for name in drawn.asking:
        grad = leaves[name].main_grad if name in drawn.main_grads else leaves[name].grad  # type: ignore[attr-defined]
        if grad is None and whole and name not in drawn.call.constants:
            raise AssertionError(f"no gradient for {name}, which asked for one")
        results[f"d{name}"] = torch.zeros_like(leaves[name]) if grad is None else grad
    frozen = [name for name, t in leaves.items() if name not in drawn.asking and t.grad is not None]
    if frozen:
        raise AssertionError(f"a gradient for {', '.join(frozen)}, which asked for none")
    return results


def _outputs(returned: Any) -> list[Tensor]:
    """Return the floating-point tensors of a result, which may be nested, with None in it."""
    if returned is None:
        return []
    if isinstance(returned, Tensor):
        return [returned] if returned.is_floating_point() else []
    return [tensor for each in returned for tensor in _outputs(each)]


def _incoming(y: Tensor, i: int, draw: Draw, drawn: _Drawn) -> Tensor | None:
    """Return a gradient to come back to y, in some memory layout, or None."""
    call = drawn.call
    if not y.requires_grad or (i and (call.promised is not None or draw.flag(0.2))):
        return None
    layout = draw.choose(LAYOUTS, (4, 1, 1, 1, 1, 1))
    dy: Tensor = torch.randn(y.shape, generator=_generator(y.device, drawn.seed, 50 + i), device=y.device) * call.incoming
    dy = dy if call.promised is None else torch.full_like(dy, call.promised)
    return lay_out(dy.to(y.dtype), layout)


def _results(outputs: list[Tensor], dys: list[Tensor | None]) -> dict[str, Tensor]:
    pairs = [(y, dy) for y, dy in zip(outputs, dys, strict=True) if dy is not None and y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [dy.to(y.dtype) for y, dy in pairs])
    return {f"y{i}": y.detach() for i, y in enumerate(outputs)}


def _references(drawn: _Drawn, wide: torch.dtype) -> list[dict[str, Tensor]]:
    """Return the results in fp64, in `wide`, and twice in that of inputs a rounding away, subnormal ones taken for 0.

    Those show how far the problem itself amplifies an error, as where a difference cancels. The rounding is that of `wide`, or
    the storage type's where operands of products inside have that type.
    """
    first = next(iter(drawn.tensors.values()))
    jitter = torch.finfo(first.dtype if drawn.call.products else wide).eps
    found = [_formula(drawn, torch.float64), _formula(drawn, wide)]
    return found + [_formula(drawn, wide, jitter, seed) for seed in (1, 2)]


def _formula(drawn: _Drawn, dtype: torch.dtype, jitter: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
    def converted(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        tiny = torch.finfo(t.dtype).tiny
        t = t.detach().to(dtype, copy=True)
        if jitter:
            step = torch.rand(t.shape, dtype=dtype, generator=_generator(t.device, seed, 0), device=t.device) - 0.5
            t = torch.where(t.abs() < tiny, 0.0, t * (1 + step * 2 * jitter))
        return t

    leaves = {name: converted(t).requires_grad_(name in drawn.asking) for name, t in drawn.tensors.items()}
    assert drawn.dys is not None
    dys = [None if dy is None else converted(dy) for dy in drawn.dys]
    torch.manual_seed(drawn.seed)
    results = _results(_outputs(drawn.call.formula(**drawn.call.arguments(leaves))), dys)
    for name in drawn.asking:
        grad = leaves[name].grad
        grad = torch.zeros_like(leaves[name]) if grad is None else grad
        main_grad = drawn.main_grads.get(name)
        results[f"d{name}"] = grad if main_grad is None else grad + main_grad.to(grad.dtype)
    return results


# ---- many cases, and smaller ones ----


def shrink(fails: Callable[[Sequence[int]], Outcome], outcome: Outcome) -> Outcome:
    """Return the simplest failing case that can be reached by making one choice smaller at a time."""
    best, runs = outcome, 0
    improved = True
    while improved and runs < _SHRINKS:
        improved = False
        for i, choice in enumerate(best.choices):
            for smaller in sorted({0, choice // 2, choice - 1} & set(range(choice))):
                runs += 1
                tried = fails([*best.choices[:i], smaller, *best.choices[i + 1 :]])
                if tried.failures and sum(tried.choices) < sum(best.choices):
                    best, improved = tried, True
                    break
            if improved:
                break
    return best


@dataclass
class Tally:
    """What the cases of one op showed."""

    op: str
    cases: int = 0
    ran: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BACKENDS, 0))
    failed: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    ended: str = ""  # why it ended before its last case


def fuzz(op: Op, cases: int, seed: int = 0, **how: Any) -> Tally:
    """Run so many cases of an op. `how` is `fuzz_cases`' and `run_case`'s."""
    return fuzz_cases(op.name, functools.partial(run_case, op), cases, seed, **how)


def fuzz_cases(
    name: str, run: Callable[..., Outcome], cases: int, seed: int = 0,
    *, shrinks: int = 3, seen: Callable[[Tally], None] = lambda tally: None, **how: Any,
) -> Tally:  # fmt: skip
    """Run the cases of seeds `seed` to `seed + cases - 1`. The first `shrinks` failing ones are shrunk.

    `run` takes a seed, and choices to take in place of the seed's own.

    Ctrl-C ends it early, and so does a case after which the process can't use the GPU: `tally.ended` says so.
    """
    tally, start = Tally(name), time.perf_counter()
    with _whole_sums(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the formula's own, of degrees of freedom and the like
        for at in range(seed, seed + cases):
            try:
                outcome = run(at, **how)
                if outcome.failures and len(tally.failed) < shrinks and not outcome.lost:
                    outcome = shrink(lambda choices, at=at: run(at, choices, **how), outcome)  # type: ignore[misc]
            except KeyboardInterrupt:
                tally.ended = f"interrupted: --seed {at} goes on"
                break
            if tally.cases % _CACHED == 0 and torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # sizes differ from case to case, and other processes need memory too
            tally.cases += 1
            for backend in outcome.ran:
                tally.ran[backend] += 1
            if outcome.failures:
                tally.failed.append(outcome)
            tally.seconds = time.perf_counter() - start
            seen(tally)
            if outcome.lost:
                tally.ended = f"this process can't use the GPU any more: --seed {at + 1} goes on after the case"
                break
    return tally


@contextlib.contextmanager
def _whole_sums() -> Iterator[None]:
    """Forbid reduced-precision sums: cuBLAS may split a product and add the parts in 16 bits."""
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before
