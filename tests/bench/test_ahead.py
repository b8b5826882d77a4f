"""Compiling ahead of a short run: what is called, where, and what becomes of errors."""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from typing import Any

import pytest
import torch
from bench.benching import changed
from torch import Tensor

from onepass.bench import ahead, norm, runner
from onepass.bench.model import BenchCase, Call, Contender
from onepass.runtime.ceilings import clock_for

CASE = norm.BENCH.case("rms", (8, 16), torch.float32)
DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class _Twice(torch.autograd.Function):
    """Note the threads that run it."""

    threads: list[tuple[str, int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        _Twice.threads.append(("forward", threading.get_ident()))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        _Twice.threads.append(("backward", threading.get_ident()))
        return 2 * dy, dy.sum(0)


def _twice(case: BenchCase) -> Call:
    return lambda x, weight: _Twice.apply(x, weight)  # type: ignore[no-untyped-call,no-any-return]


def _raises(case: BenchCase) -> Call:
    raise RuntimeError("not here")


def _warns(case: BenchCase) -> Call:
    warnings.warn("of a peer", stacklevel=1)
    return _twice(case)


def _compile(*contenders: Contender, case: BenchCase = CASE) -> list[str]:
    _Twice.threads = []
    ticks: list[str] = []
    bench = changed(norm.BENCH, contenders=lambda _: list(contenders))
    tasks = ahead.tasks_of([runner.BenchPlan(bench, [case], lambda _: True, quick=True)])
    ahead.compile_ahead(tasks, clock_for(DEVICE), ticks.append)
    assert len(ticks) == len(tasks)
    return ticks


def test_forward_and_backward_run_in_one_thread_that_is_not_this_one() -> None:
    assert _compile(Contender("twice", _twice)) == ["rms 8x16: twice, compiled"]
    (first, forward), (second, backward) = _Twice.threads
    assert (first, second) == ("forward", "backward")
    assert forward == backward != threading.get_ident()


def test_other_packages_begin() -> None:
    bench = changed(norm.BENCH, contenders=lambda _: [Contender("eager", _twice), Contender("peer", _twice, package="Liger")])
    tasks = ahead.tasks_of([runner.BenchPlan(bench, [CASE], lambda _: True, quick=True)])
    assert [contender.name for _, _, contender in tasks] == ["peer", "eager"]


def test_in_eight_bits_there_is_a_step_before() -> None:
    _compile(Contender("twice", _twice), case=dataclasses.replace(CASE, fp8=True))
    assert len(_Twice.threads) == 4


def test_several_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 4)
    all_here = threading.Barrier(4, timeout=60)
    met: list[int] = []

    def meets(case: BenchCase) -> Call:
        met.append(all_here.wait())
        return _twice(case)

    _compile(*(Contender(f"peer {i}", meets) for i in range(4)))
    assert sorted(met) == [0, 1, 2, 3]


def test_errors_and_warnings_are_for_later() -> None:
    assert len(_compile(Contender("raises", _raises), Contender("warns", _warns))) == 2
    assert len(_Twice.threads) == 2


def test_what_compiles_in_one_thread_at_a_time_waits() -> None:
    assert _compile(Contender("torch.compile", _raises, compiles=True), Contender("QuACK", _raises, "QuACK")) == []


def test_an_interruption_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)
    interrupted = threading.Event()

    def interrupt(said: str) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def waits(case: BenchCase) -> Call:
        interrupted.wait(60)
        time.sleep(0.02)  # the others are dropped meanwhile, however busy the machine is
        return _twice(case)

    _Twice.threads = []
    peers = [Contender("first", _twice), *(Contender(f"peer {i}", waits) for i in range(50))]
    bench = changed(norm.BENCH, contenders=lambda _: peers)
    tasks = ahead.tasks_of([runner.BenchPlan(bench, [CASE], lambda _: True)])
    with pytest.raises(KeyboardInterrupt):
        ahead.compile_ahead(tasks, clock_for(DEVICE), interrupt)
    assert len(_Twice.threads) < 100
