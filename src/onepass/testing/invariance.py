"""Whether a row has the same bits whatever else is in its batch: forward, and in the gradients of inputs.

    from onepass.testing.invariance import check_batches, check_packing

    report = check_batches(model, input_ids=ids)        # rows are sequences: parts of the batch against the whole of it
    report = check_batches(layer, torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16))
    report = check_packing(model, documents)            # of a Hugging Face model: documents packed, and each alone
    print(report)                                       # names the first module that differs
    report.raise_if_different()

A module's results and the gradients of its inputs are compared by fingerprints, integer sums over a row's bits, so that a large
model takes little more memory than its step. What has no dimension of rows or of tokens is not looked at, and listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_SIZES = (1, 2, 3, 5, 8, 16, 33, 64)  # of parts that come first: where kernels for few rows end
_PRIME = 0x9E3779B97F4A7C15 - (1 << 64)  # of the places' factors, an odd number
_NUMBERS = 1 << 24  # whose bits are summed at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Difference(NamedTuple):
    """A module whose rows differ. `name` is empty for the module that was given."""

    name: str
    kind: str  # "forward": its result. "backward": the gradient of its input
    rows: int  # that differ
    of: int  # rows in the part
    part: str  # which

    def __str__(self) -> str:
        what = "result" if self.kind == "forward" else "input's gradient"
        return f"{self.name or 'the module'}: its {what} differs in {self.rows} of {self.of} rows, {self.part}"


@dataclass
class InvarianceReport:
    """What was compared, and for each part that differs its first module: in the order of forward, then of backward."""

    parts: int
    looked_at: list[str]
    left_out: list[str]
    differences: list[Difference] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        seen = f"{self.parts} parts, {len(self.looked_at)} modules"
        left = f"; not looked at: {', '.join(self.left_out)}" if self.left_out else ""
        if not self.differences:
            return f"The same bits in {seen}{left}."
        first = self.differences[0]
        return f"{first}. {len(self.differences)} of {seen} differ{left}."

    def raise_if_different(self) -> None:
        if self.differences:
            raise AssertionError(str(self))


def check_batches(
    module: nn.Module, *args: Any, splits: int = 50, backward: bool = True, seed: int = 0, leave_out: Sequence[str] = (),
    **kwargs: Any,
) -> InvarianceReport:  # fmt: skip
    """Run a module on parts of a batch, of 1 to all rows, at other places too. Compare each row with that of the whole batch.

    Args:
        module: called as `module(*args, **kwargs)`. It must draw no random numbers.
        args, kwargs: its arguments. Tensors whose first dimension is that of the first tensor have a row for each.
        splits: the number of parts: of 1, 2, 3, 5, 8, 16, 33 and 64 rows, and then of any number. Half of them have their rows in
            another order.
        backward: compare gradients too, of a loss that is a sum over rows.
        seed: of parts and of the loss.
        leave_out: ends of names of modules whose rows are not the batch's, as "experts" of rows that are sorted.
    """
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if not tensors or not tensors[0].dim() or not tensors[0].shape[0]:
        raise ValueError("the arguments must have a tensor with at least one row, in its first dimension")
    count, generator = tensors[0].shape[0], torch.Generator().manual_seed(seed)

    def rows_of(which: Tensor) -> Callable[[], Any]:
        def chosen(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != count:
                return value
            rows = value.detach()[which.to(value.device)]
            return rows.requires_grad_() if backward and rows.is_floating_point() else rows

        return partial(module, *map(chosen, args), **{name: chosen(each) for name, each in kwargs.items()})

    few = [size for size in _SIZES if size <= count]

    def parts() -> Iterator[tuple[str, Tensor]]:
        for number in range(splits):
            size = few[number] if number < len(few) else 1 + int(torch.randint(count, (), generator=generator))
            start = int(torch.randint(count - size + 1, (), generator=generator))
            which, said = torch.arange(start, start + size), f"rows {start} to {start + size} of {count}"
            if number % 2:
                which, said = which[torch.randperm(size, generator=generator)], f"{said}, in another order"
            yield said, which

    whole = _RecordedRun(module, count, backward, seed, leave_out).of(rows_of(torch.arange(count)), torch.arange(count))
    report = InvarianceReport(splits, [*whole.looked_at], [*whole.left_out])
    for said, which in parts():
        mine = _RecordedRun(module, len(which), backward, seed, leave_out).of(rows_of(which), which)
        report.differences += _first_difference(mine, whole.rows(which), said)
    return report


def check_packing(model: nn.Module, documents: Sequence[Tensor], *, backward: bool = True, seed: int = 0) -> InvarianceReport:
    """Run a Hugging Face model on documents packed into one row, by `position_ids` that begin anew, and on each alone.

    Args:
        documents: token ids, one-dimensional.
    """
    lengths = [len(each) for each in documents]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"documents must have at least one token each, but their lengths are {lengths}")
    places = [torch.arange(length, device=documents[0].device) for length in lengths]

    def call(which: Sequence[int]) -> Callable[[], Any]:
        ids, positions = (torch.cat([each[at] for at in which])[None] for each in (documents, places))
        return partial(model, input_ids=ids, position_ids=positions, use_cache=False)

    tokens = torch.arange(sum(lengths)).split(lengths)  # a token is a row
    whole = _RecordedRun(model, sum(lengths), backward, seed).of(call(range(len(lengths))), torch.arange(sum(lengths)))
    report = InvarianceReport(len(lengths), [*whole.looked_at], [*whole.left_out])
    for number, which in enumerate(tokens):
        mine = _RecordedRun(model, len(which), backward, seed).of(call([number]), which)
        report.differences += _first_difference(mine, whole.rows(which), f"document {number + 1} of {len(lengths)} alone")
    return report


# ---- a run ----

_Prints = dict[tuple[str, str, int, int], Tensor]  # fingerprints by kind, module, how many came before, numbers of a row


class _Recorded(NamedTuple):
    prints: _Prints
    left_out: dict[str, None]

    @property
    def looked_at(self) -> dict[str, None]:
        return dict.fromkeys(name for _, name, *_ in self.prints)

    def rows(self, which: Tensor) -> _Prints:
        return {key: each[which] for key, each in self.prints.items()}


class _RecordedRun:
    """Runs a module with hooks that take fingerprints of rows.

    Args:
        count: the rows of its arguments.
    """

    def __init__(self, module: nn.Module, count: int, backward: bool, seed: int, leave_out: Sequence[str] = ()) -> None:
        self._module, self._count, self._backward, self._seed = module, count, backward, seed
        self._not_rows = tuple(leave_out)
        self._prints: _Prints = {}
        self._noted: Counter[tuple[str, str]] = Counter()
        self._left_out: dict[str, None] = {}

    def of(self, call: Callable[[], Any], which: Tensor) -> _Recorded:
        """Run `call`. which: the rows' places in the whole batch, by which the loss weighs them."""
        with ExitStack() as stack:
            for name, each in self._module.named_modules():
                stack.enter_context(self._hooked(name, each))
            with torch.set_grad_enabled(self._backward):
                result = _first_tensor(call())
                self._note("forward", "", result)
                loss = self._loss(result, which)
                if loss.requires_grad:
                    loss.backward()
        for parameter in self._module.parameters():
            parameter.grad = None
        return _Recorded(self._prints, self._left_out)

    @contextmanager
    def _hooked(self, name: str, module: nn.Module) -> Iterator[None]:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            for each in _tensors((args, kwargs)):
                if self._backward and each.requires_grad and not isinstance(each, nn.Parameter):
                    each.register_hook(partial(self._note, "backward", name))

        def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            for each in _tensors(result):
                self._note("forward", name, each.detach())

        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, kind: str, name: str, tensor: Tensor) -> None:
        rows = None if name.endswith(self._not_rows) else _as_rows(tensor, self._count)
        number = self._noted[kind, name]
        self._noted[kind, name] += 1
        if rows is None:
            self._left_out[name or "the module"] = None
        else:
            self._prints[kind, name, number, rows.numel() // max(1, len(rows))] = fingerprints(rows)

    def _loss(self, result: Tensor, which: Tensor) -> Tensor:
        rows = _as_rows(result, self._count)
        if rows is None:
            raise ValueError(f"the result must have {self._count} rows, but has the shape {tuple(result.shape)}")
        generator = torch.Generator().manual_seed(self._seed)
        pattern = torch.randn(1 << 12, generator=generator, dtype=torch.float64).to(result.device, result.dtype)
        wide = _flat(rows)
        columns = torch.arange(wide.shape[1], device=result.device)
        places = (which.to(result.device)[:, None] * 131 + columns) % len(pattern)
        return (wide * pattern[places]).sum()


def fingerprints(rows: Tensor) -> Tensor:
    """Return a number for each row, in which all of its bits count: sums of integers, in any order the same."""
    bits = as_bits(rows)
    factors = torch.arange(1, 2 * bits.shape[1], 2, device=bits.device).mul_(_PRIME)
    parts = bits.split(max(1, _NUMBERS // max(1, bits.shape[1])))
    return torch.cat([(part.long() * factors).sum(1) for part in parts]).cpu()


def as_bits(rows: Tensor) -> Tensor:
    """Return [rows, numbers] as integers of the same bits."""
    return _flat(rows.detach()).contiguous().view(_BITS[rows.element_size()])


def _flat(rows: Tensor) -> Tensor:
    return rows.flatten(1) if rows.dim() > 1 else rows[:, None]


def _as_rows(tensor: Tensor, count: int) -> Tensor | None:
    """Return [count, ...] of a tensor that begins with the rows, with 1 and the rows, or with rows of rows, flattened."""
    if tensor.dim() and tensor.shape[0] == count:
        return tensor
    if tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.shape[1] == count:
        return tensor[0]
    if tensor.dim() > 1 and tensor.shape[0] and tensor.shape[0] % count == 0:
        return tensor.reshape(count, -1, *tensor.shape[1:])
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _first_tensor(result: Any) -> Tensor:
    found = getattr(result, "logits", None)
    tensor = found if isinstance(found, Tensor) else next(_tensors(result), None)
    if tensor is None:
        raise TypeError(f"the result must have a tensor of floats, but is a {type(result).__name__}")
    return tensor


def _first_difference(mine: _Recorded, theirs: _Prints, part: str) -> Iterator[Difference]:
    for key, prints in mine.prints.items():
        expected = theirs.get(key)
        if expected is None or expected.shape != prints.shape:
            continue
        apart = int((prints != expected).sum())
        if apart:
            kind, name, *_ = key
            yield Difference(name, kind, apart, len(prints), part)
            return
