"""`onepass bench [op ...]`: measure ops against their peers; `onepass bench huggingface`: measure whole training steps.

Exit status: 0 if every onepass result is right, 1 if one is not, 2 if the request can't be met, 130 if interrupted. Results
measured before an interruption are kept.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from onepass.bench import ahead, huggingface, record, registry, runner
from onepass.bench.define import OpBench
from onepass.bench.model import BenchCase, Contender, CpuTimes
from onepass.bench.options import DTYPES, find_device
from onepass.bench.peers import find_peers
from onepass.bench.record import BenchRun
from onepass.runtime.ceilings import clock_for, copy_bandwidth, measure_ceilings
from onepass.runtime.cpu_threads import CpuThreads
from onepass.runtime.errors import CommandError, check_output, install_hint

_NAMED = ("bf16", "fp16", "fp32")  # not fp64: errors are measured against it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure ops against their peers: time, fraction of the copy bandwidth, CPU time, memory and error."
    known = ", ".join(registry.known_ops())
    models = f"{huggingface.LORA} or {huggingface.NAME}"
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"which ops (all: {known}); or {models}, by itself")
    parser.add_argument("--quick", action="store_true", help="one case of each op, done in about a minute")
    parser.add_argument("--case", metavar="TEXT", help="only cases whose name contains this, such as swiglu or 777x5000")
    parser.add_argument("--peer", metavar="NAME", action="append", help="only peers whose name contains this (can be repeated)")
    parser.add_argument("--device", help="cuda, cuda:1, cpu (a GPU if there is one)")
    parser.add_argument("--dtype", choices=_NAMED, default="bf16", help="of inputs and results (bf16)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything measured, the hardware and versions to FILE")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the fractions of the copy bandwidth (.png, .svg, .pdf)")
    huggingface.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise CommandError(f"--plot needs matplotlib: {install_hint('bench')}")
    check_output("json", args.json)
    check_output("plot", args.plot, (".png", ".svg", ".pdf"))
    device = _device(args.device)
    if device.type == "cpu":
        CpuThreads(lambda text: print(text, flush=True), "bench").choose()
    if huggingface.NAME in args.ops or huggingface.LORA in args.ops:
        return huggingface.run(args, device)
    huggingface.refuse_options(args)
    dtype = DTYPES[args.dtype]
    peers = find_peers()
    skipped = "what takes seconds to compile is left out of --quick (--peer names peers)" if args.quick else None
    plans = [_plan(op, args, device, dtype, peers) for op in _ops(args.ops, args.quick)]
    plans = _chosen(plans, args)

    from onepass.bench.report import BenchReport, kept_in_all  # imports rich, which a refused request doesn't need

    report = BenchReport()
    clock = clock_for(device)
    result = BenchRun(device, dtype, args.quick, peers, measure_ceilings(device, clock), runner.cpu_speed(clock, dtype))
    report.header(result, _ours_runs_as(plans[0], device), _without(plans, peers), skipped)
    stopped: int | None = None
    to_compile = ahead.tasks_of(plans) if args.quick and device.type == "cuda" else []
    with report.ticking(sum(plan.steps(device) for plan in plans) + len(to_compile)) as tick:
        try:
            ahead.compile_ahead(to_compile, clock, tick)
            for plan in plans:
                for measured in runner.measure(plan, clock, result.ceilings, tick):
                    if isinstance(measured, CpuTimes):
                        result.cpu.append(measured)
                        report.cpu_times(measured)
                    else:
                        result.cases.append(measured)
                        report.case(measured)
            result.copy_gbs_at_end = copy_bandwidth(clock, result.ceilings.copy_bytes)
        except KeyboardInterrupt:
            stopped = 130
        except runner.DeviceLost as lost:
            report.say(f"[red]stopped: {lost}[/]")
            stopped = 1
    if (kept := kept_in_all(result.cases)) is not None:
        report.say(kept)
    return _finish(args, result, report.say, stopped)


def _finish(args: argparse.Namespace, result: BenchRun, say: Callable[[str], None], stopped: int | None) -> int:
    start, end = result.ceilings.copy_gbs, result.copy_gbs_at_end
    if end and abs(end / start - 1) > 0.05:
        say(f"[yellow]the copy bandwidth moved during the run: {start:.0f} GB/s at the start, {end:.0f} at the end[/]")
    if stopped == 130:
        say(f"[yellow]interrupted; {len(result.cases)} cases are complete[/]")
    if args.json:
        record.save(result, args.json)
        say(f"rows in {args.json}")
    if args.plot and not result.bound_by_memory():
        say("no picture: none of these cases is measured against a copy")
    elif args.plot:
        from onepass.bench.picture import draw

        draw(result, args.plot)
        say(f"picture in {args.plot}")
    failed = result.failed()
    if failed:
        say(f"[red]onepass is wrong, or raised, in {', '.join(failed)}[/]")
    return stopped if stopped is not None else 1 if failed else 0


# ---- the request ----


def _ops(named: list[str], quick: bool) -> list[str]:
    known = registry.known_ops()
    for op in named:
        if op not in known:
            models = f"{huggingface.LORA} and {huggingface.NAME} by itself"
            raise CommandError(f"unknown op {op!r}; known are {', '.join(known)}, {models}")
    return list(dict.fromkeys(named)) or (registry.public_ops() if quick else known)


def _device(named: str | None) -> torch.device:
    """Return the device with its index, and make it the current device."""
    device = find_device(named)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def _plan(op: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype, peers: dict[str, str]) -> runner.BenchPlan:
    bench = registry.load(op)
    wanted = [name.lower() for name in args.peer or ()]

    def keep(contender: Contender) -> bool:
        if wanted:
            return contender.ours or any(name in contender.name.lower() for name in wanted)
        return not (args.quick and contender.slow_start)

    return runner.BenchPlan(bench, bench.cases(device, dtype, args.quick), keep, args.quick, peers)


def _chosen(plans: list[runner.BenchPlan], args: argparse.Namespace) -> list[runner.BenchPlan]:
    """Apply --case and --quick. Raise CommandError with the known names if --case or --peer matches none."""
    plans = [plan for plan in plans if plan.cases]
    if not plans:
        raise CommandError("ops must have cases on this GPU, but these are all in eight bits, which need compute capability 8.9")
    cases = [case for plan in plans for case in plan.cases]
    names = _contender_names([(plan.bench, case) for plan in plans for case in plan.cases])
    for peer in args.peer or ():
        if not any(peer.lower() in name.lower() for name in names):
            raise CommandError(f"--peer {peer!r} names none; there are {', '.join(names)}")
    if args.case:
        for plan in plans:
            plan.cases = [case for case in plan.cases if args.case.lower() in case.name.lower()]
        plans = [plan for plan in plans if plan.cases]
        if not plans:
            raise CommandError(f"--case {args.case!r} names none; there are {', '.join(case.name for case in cases)}")
    elif args.quick:
        for plan in plans:
            del plan.cases[1:]
    return plans


def _contender_names(pairs: list[tuple[OpBench, BenchCase]]) -> list[str]:
    return list(dict.fromkeys(c.name for bench, case in pairs for c in bench.contenders(case) if not c.ours))


def _ours_runs_as(plan: runner.BenchPlan, device: torch.device) -> str:
    case = plan.bench.tiny(plan.cases[0])
    return plan.bench.backend_of(case, plan.bench.inputs(case, device, torch.Generator(device=device)))


def _without(plans: list[runner.BenchPlan], peers: Iterable[str]) -> list[str]:
    """Return which installed packages have nothing to compare, and why: a line for the ops that this is alike for."""
    ops: dict[str, list[str]] = {}
    for plan in plans:
        compared = {contender.package for case in plan.cases for contender in plan.bench.contenders(case)}
        why = plan.bench.without
        parts = [f"{name} ({why[name]})" for name in peers if name in why]
        if unlike := [name for name in peers if name not in compared and name not in why]:
            parts.append(f"nothing like it in {', '.join(unlike)}")
        if parts:
            ops.setdefault("; ".join(parts), []).append(plan.bench.op)
    return [f"{', '.join(names)}: {said}" for said, names in ops.items()]
