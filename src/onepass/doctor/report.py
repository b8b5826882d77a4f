"""A diagnosis as people read it: a line for each device and each group of checks that found nothing; all else in full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from onepass.doctor.environment import BROKEN, OK, WARNING, Check, Diagnosis
from onepass.kernels import language
from onepass.runtime.units import counted

SELF_TEST = "self-test of"
_KNOWN = "known problems"
_COLOURS = {OK: "green", WARNING: "yellow", BROKEN: "bold red"}
_WIDTH = 120  # where there is no terminal


def show(diagnosis: Diagnosis, everything: bool) -> None:
    """Print the diagnosis, with every backend of every op and every check if `everything`."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH)
    console.print("  ".join(f"[bold]{name}[/] {escape(version)}" for name, version in diagnosis.versions.items()), soft_wrap=True)
    devices = Table.grid(padding=(0, 2, 0, 0))
    for device in diagnosis.devices:
        facts = [device["name"], *(f"{name} {value}" for name, value in device.items() if name not in ("device", "name"))]
        devices.add_row(device["device"], escape(f"{', '.join(facts)}: {_who_runs(diagnosis, device['device'])}"))
    checks = Table.grid(padding=(0, 2, 0, 0))
    rows = diagnosis.checks if everything else [*_in_groups(diagnosis.checks), *_troubles(diagnosis.checks)]
    for check in rows:
        advice = f"\n[bold]do:[/] {escape(check.advice)}" if check.advice and check.verdict != OK else ""
        checks.add_row(f"[{_COLOURS[check.verdict]}]{check.verdict}[/]", escape(check.name), escape(check.found) + advice)
    for table in (devices, *([_usable(diagnosis)] if everything else []), checks):
        console.print(table)
        console.print()
    counts = {verdict: sum(check.verdict == verdict for check in diagnosis.checks) for verdict in (WARNING, BROKEN)}
    more = "" if everything else "; --all shows every check, and which backends each op can use"
    console.print(f"{counts[BROKEN]} broken, {counted(counts[WARNING], 'warning')}{more}", soft_wrap=True)


def _who_runs(diagnosis: Diagnosis, device: str) -> str:
    """Say in a sentence by what the ops run on a device, and which other packages' kernels can be named there."""
    usable = {
        op: {name for name, reason in devices.get(device, {}).items() if reason is None}
        for op, devices in diagnosis.backends.items()
    }
    plain = [op for op, names in usable.items() if "triton" not in names]
    if not any(usable.values()):
        ran = "no op runs"
    elif device == "cpu" and not language.INTERPRETED:
        ran = f"all {len(usable)} ops run as PyTorch's operators"
    elif plain:
        ran = f"kernels run {len(usable) - len(plain)} of {len(usable)} ops; as PyTorch's operators run {', '.join(plain)}"
    else:
        ran = f"kernels run all {len(usable)} ops"
    others: dict[str, list[str]] = {}
    for op, names in usable.items():
        for name in sorted(names - {"triton", "torch"}):
            others.setdefault(name, []).append(op)
    named = [f"{name} ({', '.join(ops)})" for name, ops in others.items()]
    return f"{ran}; backends to name: {', '.join(named)}" if named else ran


def _in_groups(checks: Iterable[Check]) -> Iterable[Check]:
    """Return a line for each group of checks that are well: self-tests of a device, and known problems."""
    groups: dict[str, list[str]] = {}
    for check in checks:
        if check.verdict == OK:
            group = f"self-tests on {check.name.rpartition(' on ')[2]}" if check.name.startswith(SELF_TEST) else _KNOWN
            groups.setdefault(group, []).append(check.name)
    for group, names in groups.items():
        tested = f"{len(names)} right, forward and backward against fp64"
        yield Check(group, OK, f"none with {', '.join(dict.fromkeys(names))}" if group == _KNOWN else tested)


def _troubles(checks: Iterable[Check]) -> Iterable[Check]:
    return (check for check in checks if check.verdict != OK)


def _usable(diagnosis: Diagnosis) -> Table:
    """Return a table of every op, device and backend."""
    table = Table("op", "device", "backend", "", box=None, padding=(0, 2, 0, 0))
    for op, devices in diagnosis.backends.items():
        for where, reasons in devices.items():
            for name, reason in reasons.items():
                by_pytorch = name == "triton" and where == "cpu" and not language.INTERPRETED
                can = "can be used: PyTorch multiplies, and no Triton kernel runs" if by_pytorch else "can be used"
                table.add_row(op, where, name, f"[green]{can}[/]" if reason is None else f"no: {escape(reason)}")
    return table
