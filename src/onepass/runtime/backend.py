"""Who runs a call: the one owner of backend choice.

"triton" is the native path, "torch" the plain formulas, and other packages can be registered for an op under their own name.
Order of authority: the `backend=` argument, `use_backend()`, the environment variable ONEPASS_BACKEND (read when onepass is
imported), then "auto", which takes triton where it can and PyTorch elsewhere. An explicit choice never falls back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onepass.runtime.batch_invariance import how_rows_keep_their_bits, invariant, refuse
from onepass.runtime.op import FORMULA, OPS, Backend, Op, Reason
from onepass.runtime.process_setting import ProcessSetting, SettingChange

_log = logging.getLogger("onepass")
_said: set[tuple[str, str]] = set()

NATIVE = ("triton", "torch")


@dataclass
class Explanation:
    """What `explain` found: print it, or read its fields."""

    op: str
    backend: str
    variant: str
    why: str
    reasons: dict[str, Reason]  # each known backend: why it can't take the call, or None
    rows: str = ""  # under `batch_invariant()`: by what a row has the same bits in any batch

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend} ({self.why})", f"  runs   {self.variant}"]
        lines += [f"  rows   {self.rows}"] if self.rows else []
        width = max(6, *map(len, self.reasons))
        verdicts = {name: "can run this" if reason is None else f"no: {reason}" for name, reason in self.reasons.items()}
        lines += [f"  {name:{width}} {what}" for name, what in verdicts.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from rich.markup import escape
        from rich.table import Table

        from onepass.runtime.notebook import html_report

        table = Table("backend", "this call", title=escape(f"{self.op}: {self.backend} ({self.why})"))
        for name, reason in self.reasons.items():
            table.add_row(escape(name), "can run it" if reason is None else escape(f"no: {reason}"))
        lines = [f"runs: {self.variant}", *([f"rows: {self.rows}"] if self.rows else [])]
        return html_report(table, *map(escape, lines))


def find_op(op: str | Callable[..., Any]) -> Op:
    name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    if name not in OPS:
        raise ValueError(f"op must be one of {', '.join(sorted(OPS))}, but is {name!r}")
    return OPS[name]


def register_backend(
    op: str, name: str, run: Callable[..., Any], unsupported: Callable[..., Reason] = lambda *args, **kwargs: None
) -> None:
    """Let `backend=name` run `op` by another package's kernels.

    `run` takes the op's arguments; `unsupported` takes the same and says why the call can't be done, or None. Such a backend
    is taken only when it is named, never by "auto".
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a word, but is {name!r}")
    if name in (*NATIVE, "auto"):
        raise ValueError(f"name must not be one of {', '.join(NATIVE)} or auto, but is {name!r}")
    for argument, function in (("run", run), ("unsupported", unsupported)):
        if not callable(function):
            raise TypeError(f"{argument} must be a function of {op}'s arguments, but is a {type(function).__name__}")
    find_op(op).others[name] = Backend(run, unsupported)


# ---- the choice in force ----


def known_backends() -> list[str]:
    return [*NATIVE, *sorted({name for op in OPS.values() for name in op.others})]


def _checked(name: str, source: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{source} must be the name of a backend, but is {name!r}")
    if name != "auto" and name not in known_backends():
        raise ValueError(f"{source} must be one of auto, {', '.join(known_backends())}, but is {name!r}")
    return name


_from_environment = os.environ.get("ONEPASS_BACKEND", "")
_choice = ProcessSetting("backend", (_from_environment, "ONEPASS_BACKEND") if _from_environment else ("auto", "auto"))


def use_backend(name: str) -> SettingChange[tuple[str, str]]:
    """Choose the backend for every op, from now on or, as a context manager, within the block.

        onepass.use_backend("torch")            # everything from here
        with onepass.use_backend("triton"): ... # and back to what it was

    From now on means the whole process, all threads. A block is its thread's own, with the backwards that run from it: other
    threads, also those started inside, don't see it. In a block its choice goes before the process's.
    """
    return _choice.change((_checked(name, "use_backend's name"), "use_backend"))


def current_backend() -> str:
    """The backend of calls that name none."""
    return _chosen()[0]


def _chosen() -> tuple[str, str]:
    """The backend in force, and who chose it."""
    return _choice.process if not _choice.has_blocks else _choice.in_thread()


def choose(op: str, backend: str | None, reason: Reason) -> str:
    """The backend for a call that triton can't take for `reason` (None: it can)."""
    if backend is None:
        name, _ = _choice.process if not _choice.has_blocks else _choice.in_thread()
    else:
        name = backend
    if name == "auto":
        if reason is None:
            return "triton"
        if not torch.compiler.is_compiling():
            _say_once(op, reason)
        return "torch"
    if name == "torch":
        return name
    if name == "triton":
        if reason is not None:
            raise RuntimeError(f"backend 'triton' can't take this call of {op}: {reason}")
        return name
    if not isinstance(name, str) or name not in OPS[op].others:
        _checked(name, "backend" if backend is not None else _chosen()[1])
        raise RuntimeError(f"backend {name!r} is not registered for {op}, which has {', '.join([*NATIVE, *OPS[op].others])}")
    return name


def run_other(op: str, name: str, *args: Any, **options: Any) -> Any:
    """Run a registered backend, or say why it can't. It is given those options only that are not their defaults.

    What the op takes by position it is given so, whichever way it comes here.
    """
    known = OPS[op]
    other, defaults = known.others[name], known.defaults
    args = *args, *(options.pop(argument) for argument in known.positional if argument in options)
    options = {option: value for option, value in options.items() if not _is_default(value, defaults.get(option, _NO_DEFAULT))}
    reason = other.unsupported(*args, **options)
    if reason is not None:
        raise RuntimeError(f"backend {name!r} can't take this call of {op}: {reason}")
    refuse(f"backend {name!r}", "nobody knows whether its kernels look at the number of rows")
    return other.run(*args, **options)


_NO_DEFAULT = object()


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not isinstance(value, torch.Tensor) and value == default)


def _say_once(op: str, reason: str) -> None:
    if (op, reason) not in _said:
        _said.add((op, reason))
        _log.info("%s runs as plain PyTorch: %s", op, reason)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which backend and kernel variant a call would take and why, without running it.

    print(onepass.explain(onepass.bias_activation, x, bias, "swiglu"))
    """
    if hasattr(op, "shorthand_of"):
        op, options = op.shorthand_of
        kwargs = options | kwargs
    known = find_op(op)
    backend = kwargs.pop("backend", None)
    call = known.call(*args, **kwargs)
    known.check(call)
    reasons = {"triton": known.unsupported(call), "torch": None}
    reasons |= {name: other.unsupported(*args, **kwargs) for name, other in known.others.items()}
    chosen = choose(known.name, backend, reasons["triton"])
    if chosen == "triton":
        variant = known.variant(call)
    elif chosen == "torch":
        variant = known.formula(call) if known.formula else FORMULA
    else:
        variant = f"{chosen}'s own kernels"
    asked = backend is not None and backend != "auto"
    name, source = _chosen()
    source = "the backend argument" if asked else "auto" if "auto" in (backend, name) else source
    why = f"chosen by {source}" if source != "auto" or chosen == "triton" else f"auto, because {reasons['triton']}"
    tensors = [each for each in vars(call).values() if isinstance(each, torch.Tensor)]
    rows = how_rows_keep_their_bits(tensors[0].device, chosen) if invariant() and tensors else ""
    return Explanation(known.name, chosen, variant, why, reasons, rows)
