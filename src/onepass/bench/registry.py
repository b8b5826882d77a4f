"""Find the case files: modules of onepass.bench, named as the module that defines an op, or of what several ops do."""

from __future__ import annotations

import importlib
import pkgutil

import onepass.bench
from onepass.bench.define import OpBench
from onepass.runtime.op import OPS

_OF_SEVERAL_OPS = {"fp8_passes", "norm_mlp", "wgrad"}  # or of a part of one


def known_ops() -> list[str]:
    ours = {module.name for module in pkgutil.iter_modules(onepass.bench.__path__)}
    return sorted({op.function.__module__.rpartition(".")[2] for op in OPS.values()} & ours | _OF_SEVERAL_OPS)


def public_ops() -> list[str]:
    return [op for op in known_ops() if op not in _OF_SEVERAL_OPS]


def load(op: str) -> OpBench:
    bench = importlib.import_module(f"onepass.bench.{op}").BENCH
    assert isinstance(bench, OpBench)
    return bench
