"""Compile contenders' kernels ahead of a short run, several at a time: one after the other they would be most of its time.

Contenders are called in threads: Triton's compiler releases the GIL for much of its work, and processes would each import all
packages and hold a GPU context. Autograd's own thread is turned off: one for all backward passes compiles them in sequence.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress

import torch

from onepass.bench import accuracy
from onepass.bench.model import BenchCase, Contender
from onepass.bench.runner import BenchPlan, Tick
from onepass.runtime.ceilings import Clock

_THREADS = 8  # at most: each holds one case's inputs and results
Task = tuple[BenchPlan, BenchCase, Contender]


def tasks_of(plans: Sequence[BenchPlan]) -> list[Task]:
    """Return what to compile, other packages' first: they are imported too, and may try tiles.

    Compilers that take one thread at a time wait until it is measured.
    """
    tasks = [(plan, case, contender) for plan in plans for case in plan.cases for contender in plan.contenders(case)]
    return sorted((task for task in tasks if not task[2].slow_start), key=lambda task: task[2].package is None)


def compile_ahead(tasks: Sequence[Task], clock: Clock, tick: Tick) -> None:
    """Call each contender, forward and backward. What it returns or raises is judged when it is measured."""
    with warnings.catch_warnings(), ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        running = {pool.submit(_call, task, clock.device): task for task in tasks}
        try:
            for done in as_completed(running):
                _, case, contender = running[done]
                tick(f"{case.name}: {contender.name}, compiled")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    clock.synchronize()
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()


def _call(task: Task, device: torch.device) -> None:
    plan, case, contender = task
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    with suppress(Exception), torch.autograd.set_multithreading_enabled(False):
        inputs = plan.bench.inputs(case, device, torch.Generator(device=device))
        call = contender.make(case)
        for _ in range(2 if case.fp8 else 1):  # delayed scales come from the step before
            accuracy.outputs(call, inputs)
