"""Which ops have a case file: a module here with the name of one in `onepass.ops`."""

from __future__ import annotations

import importlib
import pkgutil

import onepass.bench
import onepass.ops
from onepass.bench.model import OpBench


def known_ops() -> list[str]:
    ours = {module.name for module in pkgutil.iter_modules(onepass.bench.__path__)}
    return sorted(module.name for module in pkgutil.iter_modules(onepass.ops.__path__) if module.name in ours)


def load(op: str) -> OpBench:
    bench = importlib.import_module(f"onepass.bench.{op}").BENCH
    assert isinstance(bench, OpBench)
    return bench
