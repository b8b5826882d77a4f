"""What `onepass bench` asks of a GPU: memory, and time under a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from bench.benching import changed, made
from torch import Tensor

import onepass
from onepass.bench import norm, runner
from onepass.bench.model import BenchCase, CaseResult, Contender
from onepass.runtime.ceilings import Ceilings, clock_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_what_is_kept_is_neither_input_nor_output() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    case = norm.BENCH.case("rms+residual", (1024, 4096), torch.bfloat16)  # 8 MiB a tensor
    inputs = norm.BENCH.inputs(case, device, torch.Generator(device))

    def keeps_a_copy(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return F.gelu(F.rms_norm(h, (4096,), weight)), h  # gelu saves the norm

    peak, kept = runner.memory_mib(keeps_a_copy, inputs, device)
    assert 8 <= kept < 9
    assert peak > kept + 2 * 8
    _, kept = runner.memory_mib(made(norm, case), inputs, device)
    assert 0 <= kept < 0.1


def test_small_cases_are_timed_in_a_graph_and_what_cannot_be_is_not() -> None:
    clock = clock_for(torch.device("cuda", torch.cuda.current_device()))
    case = norm.BENCH.case("rms", (256, 4096), torch.bfloat16)

    def asks_the_gpu(case: BenchCase):  # type: ignore[no-untyped-def]
        def call(x: Tensor, weight: Tensor) -> Tensor:
            assert x.sum().item() == x.sum().item()
            return onepass.rms_norm(x, weight)

        return call

    contenders = [Contender("waits", asks_the_gpu), *norm.BENCH.contenders(case)[:3]]  # onepass, eager, torch.compile
    plan = runner.BenchPlan(changed(norm.BENCH, contenders=lambda _: contenders), [case], lambda _: True)
    seeds = torch.Generator(clock.device)
    result = runner._measure_case(runner.Session(plan, clock, Ceilings(4000.0, 1 << 20, None), lambda _: None, seeds), case)
    rows = {row.contender: row for row in result.rows}
    assert all(row.status == "ok" for row in rows.values())
    assert rows["waits"].forward_graph_us is rows["waits"].backward_graph_us is None
    torch.cuda.empty_cache()  # refused while anybody captures
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    for name in ("onepass", "eager", "torch.compile"):
        forward, backward = rows[name].forward_graph_us, rows[name].backward_graph_us
        assert forward is not None and 0.5 < forward < 100, name
        assert backward is not None and 0.5 < backward < 200, name


def test_large_cases_are_not_timed_in_a_graph() -> None:
    clock = clock_for(torch.device("cuda", torch.cuda.current_device()))
    case = norm.BENCH.case("rms", (4096, 4096), torch.bfloat16)
    ours = norm.BENCH.contenders(case)[:1]
    plan = runner.BenchPlan(changed(norm.BENCH, contenders=lambda _: ours), [case], lambda _: True)
    seeds = torch.Generator(clock.device)
    result = runner._measure_case(runner.Session(plan, clock, Ceilings(4000.0, 1 << 20, None), lambda _: None, seeds), case)
    assert result.rows[0].forward_graph_us is None


def test_a_quick_run_times_the_cpu_on_the_case_itself() -> None:
    clock = clock_for(torch.device("cuda", torch.cuda.current_device()))
    case, ticks = norm.BENCH.case("rms", (256, 4096), torch.bfloat16), []
    contenders = norm.BENCH.contenders(case)[:2]  # onepass, eager
    plan = runner.BenchPlan(changed(norm.BENCH, contenders=lambda _: contenders), [case], lambda _: True, quick=True)
    found = list(runner.measure(plan, clock, Ceilings(4000.0, 1 << 20, None), ticks.append))
    assert len(ticks) == plan.steps(clock.device)
    (result,) = found
    assert isinstance(result, CaseResult)
    for row in result.rows:
        assert row.contender == "copy" or 5 < row.cpu_forward_us < row.cpu_both_us < 5000
