"""Functions of wheels that nobody has to install, looked up with the parameters that we call them by."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from inspect import signature
from typing import Any, NamedTuple, TypeVar

# why `batch_invariant()` refuses a wheel of Triton's or TileLang's kernels
TUNED = (
    "its kernels are tuned by trial in each process and cut chunks by the whole row; backend='torch' keeps the promise on a CPU"
)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Wheel(NamedTuple):
    """A wheel, and what of it is called."""

    title: str  # as messages name it
    package: str  # as pip does: another version of the module may lie in the same folder
    install: str  # what to type
    module: str
    parameters: Mapping[str, set[str]]  # by function
    warns: str  # a pattern of modules that warn of each other


def find_functions(wheel: Wheel) -> tuple[Any, ...] | str:
    """Return the wheel's functions in order, or why there are none. Imports the package, which takes seconds."""
    try:
        version = metadata.version(wheel.package)
    except metadata.PackageNotFoundError:
        return f"{wheel.title} is not installed ({wheel.install})"
    # from here on, as it compiles at any call: a process where warnings are errors has not asked for these kernels
    warnings.filterwarnings("ignore", module=wheel.warns)
    try:
        module = import_module(wheel.module)
    except Exception as error:  # it loads compiled libraries of other packages
        return f"{wheel.title} {version} can't be imported: {type(error).__name__}: {error} ({wheel.install})"
    for name, needed in wheel.parameters.items():
        function = getattr(module, name, None)
        missing = needed - set(signature(function).parameters) if callable(function) else {"the function itself"}
        if missing:
            return f"{wheel.module}.{name} of {wheel.title} {version} lacks {', '.join(sorted(missing))}"
    return tuple(getattr(module, name) for name in wheel.parameters)


def find_wheel(refusals: Mapping[str, Callable[..., str | None]], *given: Any) -> tuple[str, str | None]:
    """Return the first wheel that doesn't refuse what is given, or "" and why all do."""
    reasons = []
    for name, refuses in refusals.items():
        reason = refuses(*given)
        if reason is None:
            return name, None
        reasons.append(reason)
    return "", "; ".join(dict.fromkeys(reasons))


def constant(function: _Function) -> _Function:
    """Do what torch.compiler.assume_constant_result does, which imports the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
