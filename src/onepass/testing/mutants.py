"""Deliberately broken copies of the package: an oracle that does not catch them does not test.

    from onepass.kernels import column_reduce
    from onepass.ops.norm import norm
    mutant = mutate(column_reduce, "add_strips", " < STRIPS", " < STRIPS - 1", entry=norm)
    assert not within_budget(mutant.rms_norm, ...)

A mutant names the function that it breaks and the few words that it changes there, which must be in that function exactly once.
It holds through moves within a file and through any other edit of the function, and raises where it does not.

A mutant lives in a world of its own: all of onepass is imported once more with the change in place, under another namespace of
registered ops, and put aside; the registries, caches and kernels of the real one are as they were.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import re
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from onepass.runtime import dispatch

_numbers = itertools.count()
_NAMESPACE = 'NAMESPACE = "onepass"'
_FOLLOW = "the mutant has to follow the code"
_REPLACED = {"onepass.kernels.grid_sync": "yield_to_programs", "onepass.kernels.layout": "distance"}  # by the interpreter
_ENTERED = {  # what an import of `onepass` enters in a module's table
    "onepass.product.precision": "onepass.product.fp8.layer",
    "onepass.product.lora": "onepass.product.lora_product",
}
_folder = tempfile.TemporaryDirectory(prefix="onepass_mutants_")  # Triton reads the source of kernels again, so it is kept


@cache
def _code_of(file: str) -> CodeType:
    return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a file once, for all copies: no file of bytecode is looked for, read or missed."""

    def get_code(self, fullname: str) -> CodeType:
        return _code_of(self.path)


class _Substitutes(importlib.abc.MetaPathFinder):
    """Finds some modules in other files than their own, and others where the real package has found them."""

    def __init__(self, files: dict[str, Path], real: dict[str, ModuleType]) -> None:
        self.files, self.real = files, real

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.files[name])
        if name not in self.real:
            return None
        file, folders = str(self.real[name].__file__), getattr(self.real[name], "__path__", None)
        return importlib.util.spec_from_file_location(name, loader=_Loader(name, file), submodule_search_locations=folders)


def _ours(name: str) -> bool:
    testing = name == "onepass.testing" or name.startswith("onepass.testing.")
    return (name == "onepass" or name.startswith("onepass.")) and not testing


@cache
def _parsed(file: str) -> tuple[str, ast.Module]:
    source = Path(file).read_text()
    return source, ast.parse(source)


def _extent(module: ModuleType, function: str) -> tuple[str, int, int]:
    """Return the module's source, and where `function` ("name" or "Class.name") begins and ends in it; "" is the whole module."""
    source, tree = _parsed(str(module.__file__))
    found: ast.AST = tree
    for name in filter(None, function.split(".")):
        inner = [node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == name]
        if len(inner) != 1:
            raise ValueError(f"{module.__name__} must have one {function}, but has {len(inner)}: {_FOLLOW}")
        found = inner[0]
    if not isinstance(found, (ast.FunctionDef, ast.ClassDef)):
        return source, 0, len(source)
    lines = source.splitlines(keepends=True)
    return source, sum(map(len, lines[: found.lineno - 1])), sum(map(len, lines[: found.end_lineno]))


def _replace(module: ModuleType, function: str, old: str, new: str) -> str:
    source, first, last = _extent(module, function)
    before, after = old[: len(old) - len(old.lstrip())], old[len(old.rstrip()) :]
    words = r"\s+".join(map(re.escape, old.split()))  # however lines are broken
    text, found = re.subn(re.escape(before) + words + re.escape(after), lambda _: new, source[first:last])
    if found != 1 or old == new:
        where = f"{module.__name__}{':' if function else ''}{function}"
        raise ValueError(f"{old!r} must be in {where} once, but is there {found} times: {_FOLLOW}")
    return source[:first] + text + source[last:]


def mutate(module: ModuleType, function: str, old: str, new: str, *, entry: ModuleType | None = None) -> ModuleType:
    """Return `entry`, by default `module`, of a onepass in which `old` is `new` in `function` of `module`.

    `function` may be "Class.method", and "" for a module's own statements. A space in `old` is any space or line break.
    """
    return _import_again(entry or module, {module.__name__: _replace(module, function, old, new)})


def copy_package(entry: ModuleType) -> ModuleType:
    """Return `entry` of a onepass that is imported once more, with no change: what passes there fails for no other reason."""
    return _import_again(entry, {})


def _import_again(entry: ModuleType, sources: dict[str, str]) -> ModuleType:
    number = next(_numbers)
    text = sources.get(dispatch.__name__) or Path(str(dispatch.__file__)).read_text()
    sources[dispatch.__name__] = text.replace(_NAMESPACE, f'NAMESPACE = "onepass_mutant{number}"')
    files = {}
    for name, source in sources.items():
        files[name] = Path(_folder.name) / f"{name.replace('.', '_')}_{number}.py"
        files[name].write_text(source)
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    safe = get_safe_globals()
    finder = _Substitutes(files, real)
    sys.meta_path.insert(0, finder)
    if entry.__name__ != "onepass" and "onepass" not in sources:  # only what the entry imports, a third of all
        package = sys.modules["onepass"] = ModuleType("onepass")
        package.__path__ = real["onepass"].__path__
    try:
        copy = importlib.import_module(entry.__name__)
        for table, entered in _ENTERED.items():
            if table in sys.modules:
                importlib.import_module(entered)
        for module, function in _REPLACED.items():
            if module in sys.modules and module in real:
                vars(sys.modules[module])[function] = vars(real[module])[function]
        return copy
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(real)
        clear_safe_globals()  # torch.load would take a copy's classes for those of their names
        add_safe_globals(safe)
