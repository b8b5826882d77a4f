"""Save the run as JSON: hardware, versions and every row. Existing keys are stable; new ones may be added."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from onepass.bench.model import CaseResult, CpuTime, CpuTimes, Measured
from onepass.bench.options import short
from onepass.kernels.language import triton
from onepass.runtime.ceilings import Ceilings
from onepass.runtime.errors import version_of
from onepass.runtime.units import counted

SCHEMA = 1


@dataclass
class BenchRun:
    """All results of one `onepass bench` command."""

    device: torch.device
    dtype: torch.dtype
    quick: bool
    peers: dict[str, str]
    ceilings: Ceilings
    cpu_speed: list[CpuTime] = field(default_factory=list)  # of PyTorch calls
    copy_gbs_at_end: float | None = None
    cpu: list[CpuTimes] = field(default_factory=list)
    cases: list[CaseResult] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def failed(self) -> list[str]:
        """Return the names of the cases in which onepass is wrong or raised."""
        return [result.case.name for result in self.cases for row in result.rows if row.ours and row.status != "ok"]

    def bound_by_memory(self) -> list[CaseResult]:
        """Return the cases whose times are compared with a copy's. The picture shows only these."""
        return [result for result in self.cases if result.reference is None]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_name()}, {counted(torch.get_num_threads(), 'thread')}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    return {
        "onepass": version_of("onepass"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else None,
        "cuda": torch.version.cuda,
        "cudnn": None if (cudnn := torch.backends.cudnn.version()) is None else str(cudnn),
        "cutlass_dsl": version_of("nvidia-cutlass-dsl"),
    }


def commit() -> str | None:
    """Return the package's commit, with "+" if files differ from it. Outside a checkout return ONEPASS_COMMIT."""
    here = Path(__file__)

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here.parent), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    package = here.parents[1]
    if git("ls-files", "--error-unmatch", str(package / "__init__.py")) is None:  # installed inside another checkout
        return os.environ.get("ONEPASS_COMMIT")
    name = git("rev-parse", "--short=12", "HEAD")
    return name and name + ("+" if git("status", "--porcelain", "--", str(package)) else "")


def as_json(run: BenchRun) -> dict[str, Any]:
    memory = torch.cuda.get_device_properties(run.device).total_memory / 2**30 if run.device.type == "cuda" else None
    return {
        "schema": SCHEMA,
        "date": run.date,
        "commit": commit(),
        "hardware": {
            "device": run.device.type,
            "name": device_name(run.device),
            "memory_gib": plain(memory),
            "cpu": _cpu_name(),
            "cpu_count": os.cpu_count(),
        },
        "versions": {**versions(), "peers": run.peers},
        "dtype": short(run.dtype),
        "quick": run.quick,
        "ceilings": plain(asdict(run.ceilings) | {"copy_gbs_at_end": run.copy_gbs_at_end}),
        "cpu_time": [_cpu_time(times) | {"references": _calls(run.cpu_speed)} for times in run.cpu],
        "left_out": [
            {"op": result.case.op, "case": result.case.name, "contender": name, "reason": why}
            for result in run.cases
            for name, why in result.left_out.items()
        ],
        "rows": [_row(result, row) for result in run.cases for row in (result.copy, *result.rows)],
    }


def _cpu_time(times: CpuTimes) -> dict[str, Any]:
    return {
        "op": times.case.op,
        "variant": times.case.variant,
        "shape": list(times.case.shape),
        "contenders": _calls(times.rows),
    }


def _calls(times: list[CpuTime]) -> dict[str, Any]:
    return {t.name: {"forward_us": plain(t.forward_us), "both_us": plain(t.both_us)} for t in times}


def _row(result: CaseResult, row: Measured) -> dict[str, Any]:
    case = result.case
    return {
        "op": case.op,
        "case": case.name,
        "variant": case.variant,
        "shape": list(case.shape),
        "dtype": short(case.dtype),
        "forward_bytes": case.forward_bytes,
        "backward_bytes": case.backward_bytes,
        "reference": result.reference,
        **plain(asdict(row)),
    }


def plain(value: Any, digits: int = 5) -> Any:
    """Round floats: more digits are noise. NaN and infinity, which JSON lacks, become strings."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if abs(value) < float("inf") else str(value)
    if isinstance(value, dict):
        return {name: plain(one, digits) for name, one in value.items()}
    return [plain(one, digits) for one in value] if isinstance(value, list) else value


def save(run: BenchRun, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(run), indent=1) + "\n")
