"""Deliberately broken copies of a module: an oracle that does not catch them does not test.

    import onepass.ops.activation.bias_activation as room
    mutant = mutate(room, "(step < ROWS) & ", "")                       # raises if the source has no such text any more
    mutant = mutate(strips, "tl.num_programs(1)", "...", room=room)     # a room whose shared code is broken
    assert not within_budget(mutant.bias_activation, ...)

A mutant lives in a world of its own: all of onepass is imported once more with the change in place, under another namespace of
registered ops, and put aside; the registries, caches and kernels of the real one are as they were.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from onepass.runtime import dispatch

_numbers = itertools.count()
_NAMESPACE = 'NAMESPACE = "onepass"'
_GRID_SYNC = "onepass.kernels.grid_sync"
_folder = tempfile.TemporaryDirectory(prefix="onepass_mutants_")  # Triton reads the source of kernels again, so it is kept


class _Substitutes(importlib.abc.MetaPathFinder):
    """Finds some modules in other files than their own."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.files[name]) if name in self.files else None


def _ours(name: str) -> bool:
    testing = name == "onepass.testing" or name.startswith("onepass.testing.")
    return (name == "onepass" or name.startswith("onepass.")) and not testing


def _replaced(module: ModuleType, old: str, new: str, times: int) -> str:
    source = Path(str(module.__file__)).read_text()
    found = source.count(old)
    if found != times or old == new:
        raise ValueError(
            f"{old!r} must be in {module.__name__} {times} times, but is {found} times: the mutant has to follow the code"
        )
    return source.replace(old, new)


def mutate(module: ModuleType, old: str, new: str, *, room: ModuleType | None = None, times: int = 1) -> ModuleType:
    """A copy of `room` (by default the module itself) in a onepass where `old` is `new` in `module`'s source.

    `old` must be there `times` times.
    """
    number = next(_numbers)
    sources = {dispatch.__name__: _replaced(dispatch, _NAMESPACE, f'NAMESPACE = "onepass_mutant{number}"', 1)}
    sources[module.__name__] = _replaced(module, old, new, times)
    if module is dispatch:
        sources[module.__name__] = sources[module.__name__].replace(_NAMESPACE, f'NAMESPACE = "onepass_mutant{number}"')
    files = {}
    for name, source in sources.items():
        files[name] = Path(_folder.name) / f"{name.replace('.', '_')}_{number}.py"
        files[name].write_text(source)
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    finder = _Substitutes(files)
    sys.meta_path.insert(0, finder)
    try:
        copy = importlib.import_module((room or module).__name__)
        if _GRID_SYNC in sys.modules and _GRID_SYNC in real:  # how the interpreter's programs wait is not the mutant's affair
            vars(sys.modules[_GRID_SYNC])["yield_to_programs"] = vars(real[_GRID_SYNC])["yield_to_programs"]
        return copy
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(real)
