"""Names of earlier releases. Importing a module's old path gives the module that took its place, with a DeprecationWarning.

They are kept for one release. The public names of `onepass`, `onepass.nn` and `onepass.parallel` are where they were.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_PREFIX = "onepass."
# Old path to new, below onepass.
MOVED = {
    "gradients.fp8_gradient": "product.fp8.gradient",
    "gradients.fp8_scales": "product.fp8.scales",
    "gradients.fp8_updates": "product.fp8.updates",
    "gradients.fp8_weight": "product.fp8.weight",
    "kernels.fp8_output": "runtime.fp8",
    "kernels.fp8_tile": "kernels.fp8",
    "ops.norm.fp8_kernels": "ops.norm.fp8",
    "parallel.collectives": "distributed.collectives",
    "parallel.tensor_parallel": "distributed.tensor_parallel",
    "parallel.vocab_shards": "distributed.collectives",
    "profiling.units": "runtime.units",
    "train.threads": "runtime.cpu_threads",
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.removeprefix(_PREFIX) in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = _PREFIX + MOVED[spec.name.removeprefix(_PREFIX)]
        warnings.warn(f"{spec.name} has moved to {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        alias = ModuleType(spec.name, module.__doc__)
        vars(alias).update({name: value for name, value in vars(module).items() if not name.startswith("__")})
        return alias

    def exec_module(self, module: ModuleType) -> None:
        """It is filled already."""


def renamed(old: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what answers to a method's old name."""

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        warnings.warn(f"{old} has the name {method.__name__} now", DeprecationWarning, stacklevel=2)
        return method(*args, **options)

    return run


def install() -> None:
    """Let `import` find them. Last in line: it costs nothing where a module is found."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
