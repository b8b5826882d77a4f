"""Helpers for tests of `onepass bench`: runs that take seconds, and stand-ins for peers that are not installed."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from onepass.bench import accuracy
from onepass.bench.define import OpBench
from onepass.bench.model import BenchCase, Call, Inputs, differentiate
from onepass.cli import main


def bench(*arguments: str) -> int:
    return main(["bench", *arguments, "--quick", "--device", "cpu"])


def only(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *cases: BenchCase, **more: Any) -> None:
    """Restrict a case file to these cases."""
    monkeypatch.setattr(module, "BENCH", changed(module.BENCH, cases=lambda *_: list(cases), **more))


def changed(bench: OpBench, **more: Any) -> OpBench:
    """Return a benchmark with these fields or methods in place of its own."""
    made = copy.copy(bench)
    vars(made).update(more)
    return made


def given(
    module: ModuleType, shape: tuple[int, ...], variant: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[BenchCase, Inputs]:  # fmt: skip
    """Return a case and its tensors."""
    case = module.BENCH.case(variant, shape, dtype)
    return case, module.BENCH.inputs(case, torch.device("cpu"), torch.Generator())


def made(module: ModuleType, case: BenchCase, name: str = "onepass") -> Call:
    """Return a contender's call."""
    return next(contender for contender in module.BENCH.contenders(case) if contender.name == name).make(case)


def check_contenders(module: ModuleType, case: BenchCase, inputs: Inputs) -> None:
    """Assert that each contender is right, leaves its inputs, and runs again, as when it is timed."""
    before = {name: tensor.detach().clone() for name, tensor in inputs.tensors.items()}
    for contender in module.BENCH.contenders(case):
        if not (contender.compiles or contender.floor or contender.lacks):
            call = contender.make(case)
            assert not wrong(module, case, inputs, call, contender.ours), contender.name
            assert all(torch.equal(inputs.tensors[name], tensor) for name, tensor in before.items()), contender.name
            differentiate(call(*inputs.tensors.values()), list(inputs.asked.values()), inputs.fresh_grads(), inputs.trained)


def wrong(module: ModuleType, case: BenchCase, inputs: Inputs, call: Call, ours: bool = False) -> list[str]:
    """Return the names of a contender's outputs and gradients whose errors are too large."""
    found, allowed = accuracy.judged(module.BENCH, case, inputs, accuracy.outputs(call, inputs), ours)
    return accuracy.too_far(found, allowed)


def cute(**ops: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """Return a stand-in for Liger's functions, which must be asked for the CuTe DSL and, at their first calls, for no other."""
    seen: set[str] = set()

    def named(name: str) -> Callable[..., Any]:
        def call(*args: Any, impl: str, **options: Any) -> Any:
            assert impl == "nvidia-cutedsl"
            if name not in seen:
                assert os.environ.get("LIGER_KERNEL_STRICT") == "1"
            seen.add(name)
            return ops[name](*args, **options)

        return call

    return {"liger_kernel.functional": {name: named(name) for name in ops}, "cutlass": {}}


def stand_in(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Put modules with this content into sys.modules, with their parent packages."""
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        module.__spec__ = ModuleSpec(name, None)
        parts = name.split(".")
        for i in range(1, len(parts)):
            above = ".".join(parts[:i])
            if above not in modules:
                monkeypatch.setitem(sys.modules, above, ModuleType(above))
        monkeypatch.setitem(sys.modules, name, module)
