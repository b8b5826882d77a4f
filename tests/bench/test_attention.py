"""The case file of attention: every contender is called rightly, and one that writes over its input gets its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.benching import bench, only, wrong

from onepass.bench import attention
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result


def given(variant: str) -> tuple[BenchCase, Inputs]:
    case = attention._case(variant, (1 if "documents" in variant else 2, 9, 4, 4, 16), torch.bfloat16)
    return case, attention._inputs(case, torch.device("cpu"), torch.Generator())


@pytest.mark.parametrize("variant", list(attention._SHAPES))
def test_every_contender_is_called_rightly_and_leaves_its_inputs(variant: str) -> None:
    case, inputs = given(variant)
    before = {name: tensor.detach().clone() for name, tensor in inputs.tensors.items()}
    contenders = attention.BENCH.contenders(case)
    for contender in contenders:
        if not contender.compiles and contender.name != "cuDNN":
            call = contender.make(case)
            assert not wrong(attention, case, inputs, call, contender.ours), contender.name
            assert all(torch.equal(inputs.tensors[name], tensor) for name, tensor in before.items()), contender.name
            torch.autograd.backward(call(*inputs.tensors.values()), inputs.fresh_grads())  # and again, as when it is timed


def test_what_computes_something_else_is_wrong() -> None:
    case, inputs = given("turned")
    assert wrong(attention, case, inputs, lambda qkv, cos, sin: attention._ours(case)(qkv)) == ["y", "dqkv"]


@pytest.mark.usefixtures("one_round")
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, attention, given("turned, any order")[0])
    assert bench("attention", "--json", str(tmp_path / "run.json")) == 0
    rows = {row["contender"]: row for row in json.loads((tmp_path / "run.json").read_text())["rows"]}
    for name in ("onepass", "rope + SDPA", "flash"):
        assert rows[name]["status"] == "ok", rows[name]["message"]
        assert rows[name]["both_of_reference"] > 0


@pytest.mark.usefixtures("one_round")
def test_all_of_a_fixed_order_run_deterministically_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[bool]] = {"turned": set(), "turned, any order": set()}

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, variant: str) -> torch.Tensor:
            ctx.variant = variant
            asked[variant].add(torch.are_deterministic_algorithms_enabled())
            return x * 1

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
            asked[ctx.variant].add(torch.are_deterministic_algorithms_enabled())
            return dy, None

    def looking(case: BenchCase) -> list[Contender]:
        call = attention._after_rope(case)
        return [Contender("rope + SDPA", lambda _: lambda qkv, *tables: call(Looks.apply(qkv, case.variant), *tables))]  # type: ignore[no-untyped-call]

    def formula(case: BenchCase) -> Call:
        call = attention._formula(case)

        def judging(*tensors: torch.Tensor) -> Result:  # cuBLAS may refuse its products where it is asked to be deterministic
            assert not torch.are_deterministic_algorithms_enabled()
            return call(*tensors)

        return judging

    for variant in asked:
        only(monkeypatch, attention, given(variant)[0], contenders=looking, formula=formula)
        assert bench("attention", "--json", str(tmp_path / "run.json")) == 0
        assert {row["status"] for row in json.loads((tmp_path / "run.json").read_text())["rows"]} == {"ok"}
    assert asked == {"turned": {True}, "turned, any order": {False}}
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_full_cases_are_those_of_a_gpu() -> None:
    cases = attention.BENCH.cases(torch.device("cuda"), torch.bfloat16, False)
    assert [case.name for case in cases[:2]] == ["turned 4x4096x32x8x64", "turned 16x1024x12x12x64"]
    assert len(cases) == 16
    assert (cases[0].forward_bytes, cases[0].backward_bytes) == (4 * 4096 * 80 * 128, 4 * 4096 * 160 * 128)
