"""`onepass bench huggingface`: training steps of Hugging Face models, eager, compiled, with peers' kernels and with onepass.

Each contender trains each model in a process of its own (huggingface_process.py). If it fails, its row says so. Contenders that
don't fit into --budget are skipped, and their rows say so. --json writes the rows as they come. It keeps the file's rows of other
cases and contenders, if they are from the same commit, machine and versions. So several commands can fill one table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from onepass.bench.huggingface_cases import (
    COMPILED,
    CONTENDERS,
    NEEDS,
    OURS_COMPILED,
    OURS_FP8,
    RIGHT,
    TAKEN,
    ModelCase,
    ModelResult,
    cases,
    compare,
    reached,
)
from onepass.bench.peers import find_peers
from onepass.bench.record import commit, device_name, plain, versions
from onepass.runtime.errors import CommandError, version_of
from onepass.runtime.fp8 import unfit_gpu

NAME, LORA = "huggingface", "lora"  # and its cases with adapters
STEPS, STEPS_QUICK = 50, 5
_DIGITS = 7  # of what is written: losses differ in the last of them
Rows = dict[str, dict[str, ModelResult]]  # by case, by contender
_FIELDS = {field.name for field in fields(ModelResult)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(f"only for {NAME}, which stands alone: training steps of Hugging Face models")
    group.add_argument("--contender", metavar="NAME", action="append", choices=CONTENDERS, help="only this one (can be repeated)")
    group.add_argument("--steps", type=int, metavar="N", help=f"whose losses are compared ({STEPS}; --quick: {STEPS_QUICK})")
    group.add_argument("--budget", type=float, metavar="SECONDS", help="leave out what takes longer, and end (no limit)")


def refuse_options(args: argparse.Namespace) -> None:
    """Raise CommandError if this command's options are given without the command."""
    for option in ("contender", "steps", "budget"):
        if getattr(args, option) is not None:
            raise CommandError(f"--{option} is only for {NAME}: onepass bench {NAME}")


def run(args: argparse.Namespace, device: torch.device) -> int:
    if args.ops == [LORA]:
        args.ops, args.case = [NAME], args.case or LORA
    wanted = _wanted(args, device)
    steps = args.steps or (STEPS_QUICK if args.quick else STEPS)
    facts = _facts(device, steps, args.quick)

    from onepass.bench.huggingface_report import ModelReport  # imports rich, which a refused request doesn't need

    report = ModelReport()
    report.header(facts)
    rows = _kept(args.json, facts)
    ends = time.monotonic() + (args.budget or float("inf"))
    stopped = 0
    try:
        for case in wanted:
            for name in args.contender or case.contenders:
                if name not in case.contenders:
                    continue
                result = _skipped(name, args, device, ends)
                if result is None:
                    report.begins(case, name)
                    result = _measured(case, name, device, steps, args.quick, ends)
                of_case = rows.setdefault(case.name, {})
                if result.status == "skipped":
                    of_case.setdefault(name, result)  # keeps an earlier command's result
                else:
                    of_case[name] = result
                    compare(list(of_case.values()))
                    report.row(case, result)
                _save(args.json, facts, rows)
            report.table(case, _in_order(rows[case.name]))
    except KeyboardInterrupt:
        report.say("[yellow]interrupted[/]")
        stopped = 130
    if args.json:
        report.say(f"rows in {args.json}")
    failed = [case.name for case in wanted if _wrong(case, _in_order(rows.get(case.name, {})))]
    if failed:
        report.say(f"[red]onepass is wrong, or raised, in {', '.join(failed)}[/]")
    return stopped or int(bool(failed))


def _wrong(case: ModelCase, rows: list[ModelResult]) -> bool:
    """Whether a onepass contender is too far from eager, or raised. Being slow is no error."""
    missed = [found for bar in case.bars if bar.figure in RIGHT and (found := reached(bar, rows)) and not found[1]]
    return bool(missed) or any(row.mine and row.status == "error" for row in rows)


# ---- the request ----


def _wanted(args: argparse.Namespace, device: torch.device) -> list[ModelCase]:
    if args.ops != [NAME]:
        raise CommandError(f"{NAME} stands alone, but is asked for with {', '.join(op for op in args.ops if op != NAME)}")
    for option in ("peer", "plot"):
        if getattr(args, option):
            raise CommandError(f"--{option} is for ops; {NAME} has --case, --contender, --steps, --budget and --json")
    if args.dtype != "bf16":
        raise CommandError(f"--dtype must be bf16 for {NAME}, but is {args.dtype}")
    if args.steps is not None and args.steps < 1:
        raise CommandError(f"--steps must be at least 1, but is {args.steps}")
    if args.budget is not None and args.budget <= 0:
        raise CommandError(f"--budget must be more than 0 seconds, but is {args.budget:g}")
    if device.type == "cpu" and not args.quick:
        raise CommandError(f"{NAME} needs a GPU: on a CPU there is --quick, with small models")
    if version_of("transformers") is None:
        raise CommandError(f"{NAME} needs transformers: pip install transformers")
    known = cases(args.quick)
    wanted = [case for case in known if args.case is None or args.case.lower() in case.name.lower()]
    if not wanted:
        raise CommandError(f"--case {args.case!r} names none; there are {', '.join(case.name for case in known)}")
    return [case for case in wanted if case.name == args.case] or wanted


def _skipped(name: str, args: argparse.Namespace, device: torch.device, ends: float) -> ModelResult | None:
    why = None
    if time.monotonic() >= ends:
        why = "no time is left of --budget"
    elif absent := [package for package in NEEDS.get(name, ()) if package not in find_peers()]:
        why = f"not installed: {', '.join(absent)}"
    elif name in NEEDS and device.type == "cpu":
        why = "its kernels need a GPU"
    elif name in (COMPILED, OURS_COMPILED) and device.type == "cpu" and not args.contender:
        why = "left out of --quick on a CPU, where compiling takes most of the time"
    elif name == OURS_FP8 and device.type == "cuda" and (unfit := unfit_gpu(device)) is not None:
        why = f"eight bits need compute capability 8.9 or later, but {unfit}"
    return None if why is None else ModelResult(name, "skipped", why)


# ---- a contender's process ----


def _measured(case: ModelCase, name: str, device: torch.device, steps: int, quick: bool, ends: float) -> ModelResult:
    begun = time.monotonic()
    shown = asdict(case) | {"asked": ()}
    asked = {"case": shown, "contender": name, "device": str(device), "steps": steps, "quick": quick}
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "found.json"), Path(folder, "log")
        command = [sys.executable, "-m", "onepass.bench.huggingface_process", json.dumps(asked), str(file)]
        ended = _run(command, log, None if ends == float("inf") else ends - begun)
        if file.exists():
            result = ModelResult(**json.loads(file.read_text()))
        elif ended is None:
            result = ModelResult(name, "skipped", f"not done after {time.monotonic() - begun:.0f} s, when --budget ended")
        else:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            result = ModelResult(name, "error", f"ended with status {ended}: {''.join(last)}")
    result.seconds = time.monotonic() - begun
    return result


def _run(command: list[str], log: Path, seconds: float | None) -> int | None:
    """Run a process and return its exit status, or None on a timeout. Kill all processes that it started."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, such as a compiler's workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- the record ----


def _facts(device: torch.device, steps: int, quick: bool) -> dict[str, Any]:
    """Return the facts that rows of one table must share."""
    compared = {*TAKEN, *(package for packages in NEEDS.values() for package in packages)}
    peers = {name: version for name, version in find_peers().items() if name in compared}
    return {
        "commit": commit(),
        "device": device_name(device),
        "versions": {**versions(), "transformers": version_of("transformers"), "peers": peers},
        "dtype": "bf16",
        "quick": quick,
        "steps": steps,
    }


def _kept(path: Path | None, facts: dict[str, Any]) -> Rows:
    """Return a file's rows if it is from the same commit, machine and versions. If that is unknown, return none."""
    known = facts["commit"] is not None and not facts["commit"].endswith("+")
    if path is None or not path.exists() or not known:
        return {}
    try:
        told = json.loads(path.read_text())
    except ValueError:
        return {}
    if any(told.get(name) != value for name, value in facts.items()):
        return {}
    rows: Rows = {}
    for row in told["rows"]:
        result = rows.setdefault(row["case"], {})[row["contender"]] = ModelResult(
            **{name: row[name] for name in _FIELDS & row.keys()}
        )
        result.losses = [float(loss) for loss in result.losses]  # JSON has NaN as a string
        result.losses_again = [float(loss) for loss in result.losses_again]
        result.errors = {kind: float(error) for kind, error in result.errors.items()}
    for of_case in rows.values():
        compare(list(of_case.values()))
    return rows


def _save(path: Path | None, facts: dict[str, Any], rows: Rows) -> None:
    if path is None:
        return
    known = {case.name: case for case in cases(facts["quick"])}
    written = [_row(known[name], found) for name, of_case in rows.items() for found in _in_order(of_case)]
    bars = [_bar(case, _in_order(rows[name])) for name, case in known.items() if name in rows]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = {"schema": 1, "date": date, **facts, "rows": written, "bars": [bar for of_case in bars for bar in of_case]}
    path.write_text(json.dumps(record, indent=1) + "\n")


def _row(case: ModelCase, result: ModelResult) -> dict[str, Any]:
    shown = {"op": NAME, "case": case.name, "shape": [case.sequences, case.length], "tokens": case.tokens}
    return shown | {"attention": case.attention, **plain(asdict(result), _DIGITS)}


def _bar(case: ModelCase, rows: list[ModelResult]) -> list[dict[str, Any]]:
    bars = []
    for bar in case.bars:
        is_now = reached(bar, rows)
        value, enough = is_now or (None, None)
        bars.append({"case": case.name, **asdict(bar), "is": plain(value, _DIGITS), "reached": enough})
    return bars


def _in_order(rows: dict[str, ModelResult]) -> list[ModelResult]:
    return [rows[name] for name in CONTENDERS if name in rows]
