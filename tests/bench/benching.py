"""What the tests of `onepass bench` share: runs in seconds, and peers that stand in for packages that are not here."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest

from onepass.bench import accuracy
from onepass.bench.model import BenchCase, Call, Inputs
from onepass.cli import main


def bench(*arguments: str) -> int:
    return main(["bench", *arguments, "--quick", "--device", "cpu"])


def only(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *cases: BenchCase, **more: Any) -> None:
    """Let a case file have these cases only."""
    monkeypatch.setattr(module, "BENCH", dataclasses.replace(module.BENCH, cases=lambda *_: list(cases), **more))


def wrong(module: ModuleType, case: BenchCase, inputs: Inputs, call: Call, ours: bool = False) -> list[str]:
    """Which outputs and gradients of a contender are too far off."""
    found, allowed = accuracy.judged(module.BENCH, case, inputs, accuracy.outputs(call, inputs), ours)
    return accuracy.too_far(found, allowed)


def stand_in(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Put modules that hold these where imports find them."""
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        parts = name.split(".")
        for i in range(1, len(parts)):
            above = ".".join(parts[:i])
            if above not in modules:
                monkeypatch.setitem(sys.modules, above, ModuleType(above))
        monkeypatch.setitem(sys.modules, name, module)
