"""`onepass doctor`: what this machine has, which backends it can use, and the traps it would walk into.

Exit status: 1 where something is broken (calls raise, results are wrong, or a GPU's kernels can't run for a reason that can be
mended here), 0 otherwise. What works, but slower or with less, is a warning.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.ops.bias_activation import bias_activation, bias_activation_reference
from onepass.runtime import backend, lang
from onepass.runtime.lang import triton

OK, WARNING, BROKEN = "ok", "warning", "broken"


@dataclass
class Check:
    """One known trap or one self-test: what was found, and what to do where that is not fine."""

    name: str
    verdict: str
    found: str
    advice: str = ""


@dataclass
class Diagnosis:
    versions: dict[str, str]
    devices: list[dict[str, Any]]
    backends: dict[str, dict[str, dict[str, str | None]]]  # op, device, backend: why it can't be used there, or None
    checks: list[Check] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return any(check.verdict == BROKEN for check in self.checks)


def diagnose() -> Diagnosis:
    found = Diagnosis(_versions(), _devices(), _backends())
    found.checks = [check for trap in _TRAPS for check in trap()] + list(_self_tests())
    return found


# ---- what is here ----


def _versions() -> dict[str, str]:
    found = {"onepass": importlib.metadata.version("onepass"), "python": platform.python_version(), "torch": torch.__version__}
    found["triton"] = triton.__version__ if triton else "none"
    found["numpy"] = _version("numpy") or "none"
    found["cuda"] = torch.version.cuda or "none (a CPU build of PyTorch)"
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _devices() -> list[dict[str, Any]]:
    cpu = {"device": "cpu", "name": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    return [cpu] + [_gpu(device) for device in _gpus()]


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def _sample(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """x and bias for a swiglu, odd in every way that is allowed."""
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(37, 2 * 203, generator=generator), torch.randn(2 * 203, generator=generator)
    return x.to(device, dtype), bias.to(device, dtype)


# A small call of each op, by its name: an op that is not here is shown without its backends.
_CALLS: dict[str, Callable[[torch.device], tuple[Any, ...]]] = {"bias_activation": lambda device: (*_sample(device), "swiglu")}


def _backends() -> dict[str, dict[str, dict[str, str | None]]]:
    return {name: _backends_of(op) for name, op in sorted(backend.OPS.items()) if name in _CALLS}


def _backends_of(op: backend.Op) -> dict[str, dict[str, str | None]]:
    found: dict[str, dict[str, str | None]] = {}
    for device in (torch.device("cpu"), *_gpus()):
        args = _CALLS[op.name](device)
        reasons = {"triton": op.unsupported(*args), "torch": None}
        found[str(device)] = reasons | {name: other.unsupported(*args) for name, other in op.others.items()}
    return found


# ---- known traps ----


def _triton_version() -> Iterator[Check]:
    supported = ", ".join(version + "x" for version in lang.SUPPORTED)
    if triton is None:
        advice = "pip install 'onepass[triton]'"
        if _gpus():
            yield Check("triton", WARNING, "not installed: everything runs as plain PyTorch", advice)
        else:
            yield Check("triton", OK, f"not installed, nor needed on a CPU (to test kernels here: {advice})")
    elif not triton.__version__.startswith(lang.SUPPORTED):
        advice = f"install a Triton that was tried ({supported}), the one your PyTorch asks for"
        yield Check("triton", WARNING, f"{triton.__version__} was never tried with these kernels", advice)
    else:
        yield Check("triton", OK, f"{triton.__version__} is one of {supported}")


def _interpreter() -> Iterator[Check]:
    if not lang.INTERPRETED:
        return
    if _gpus():
        found = "TRITON_INTERPRET=1 is set: no kernel runs on the GPU, all its calls are plain PyTorch"
        yield Check("TRITON_INTERPRET", BROKEN, found, "unset TRITON_INTERPRET; it is for testing kernels on a CPU")
    else:
        yield Check("TRITON_INTERPRET", WARNING, "kernels run in Triton's interpreter, for tests only: a thousand times slower")


def _numpy() -> Iterator[Check]:
    if triton is None:
        return
    name, version = "numpy and the interpreter", _version("numpy")
    repair = "import onepass.testing.interpreter before running kernels, as our tests do"
    if version is None:
        verdict = BROKEN if lang.INTERPRETED else OK
        found = "numpy is not installed, and Triton's interpreter needs it" + ("" if lang.INTERPRETED else " (it is not in use)")
        yield Check(name, verdict, found, "pip install 'onepass[test]'" if lang.INTERPRETED else "")
    elif tuple(int(part) for part in version.split(".")[:2]) >= (2, 4):
        found = f"range() over a run-time argument raises in the interpreter under numpy {version}"
        if lang.INTERPRETED:
            yield Check(name, WARNING, found, repair)
        else:
            yield Check(name, OK, f"{found} (it is not in use)", repair)
    else:
        yield Check(name, OK, f"numpy {version} agrees with Triton's interpreter")


def _chosen_backend() -> Iterator[Check]:
    name = os.environ.get("ONEPASS_BACKEND")
    known = ["auto", *backend.known_backends()]
    if not name:
        yield Check("ONEPASS_BACKEND", OK, "not set")
    elif name not in known:
        found = f"{name!r} is no backend that is known here: unless your program registers one, every call raises"
        yield Check("ONEPASS_BACKEND", BROKEN, found, f"set it to one of {', '.join(known)}, or unset it")
    elif name == "torch" and _gpus():
        yield Check("ONEPASS_BACKEND", WARNING, "'torch': no kernel runs on the GPU", "unset it to have the kernels")
    elif name == "triton" and not _gpus() and not lang.INTERPRETED:
        yield Check("ONEPASS_BACKEND", BROKEN, "'triton', but there is no GPU: every call raises", "unset it, or set it to auto")
    else:
        yield Check("ONEPASS_BACKEND", OK, repr(name))


def _capability() -> Iterator[Check]:
    for device in _gpus():
        major, minor = torch.cuda.get_device_capability(device)
        found = f"{device} has compute capability {major}.{minor}"
        if (major, minor) < (8, 0):
            yield Check("capability", WARNING, f"{found}, and the kernels want 8.0", "set ONEPASS_BACKEND=torch on this machine")
        else:
            yield Check("capability", OK, found)


def _driver() -> Iterator[Check]:
    if torch.version.cuda and not torch.cuda.is_available():
        found = f"PyTorch is built for CUDA {torch.version.cuda}, but sees no GPU"
        yield Check("driver", WARNING, found, "compare with nvidia-smi; look at CUDA_VISIBLE_DEVICES and the driver's version")


def _compiler() -> Iterator[Check]:
    if not _gpus() or triton is None:
        return
    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    path = next(filter(None, map(shutil.which, wanted)), None)
    if path is None:
        found = f"none of {', '.join(wanted)} is on the path, and Triton builds its launcher with one"
        yield Check("C compiler", BROKEN, found, "install gcc, or set CC to a compiler (apt install gcc libc6-dev)")
    else:
        yield Check("C compiler", OK, path)


def _triton_cache() -> Iterator[Check]:
    if triton is None:
        return
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
    directory = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    if _writable(directory):
        yield Check("Triton's cache", OK, str(directory))
    else:
        advice = "set TRITON_CACHE_DIR to a directory that can be written, local to this machine"
        yield Check("Triton's cache", BROKEN if _gpus() else WARNING, f"{directory} can't be written", advice)


def _writable(directory: Path) -> bool:
    """Whether files can be made there, or in the nearest parent there is: asked by making one, which says it of root too."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _addmm() -> Iterator[Check]:
    """Gradients that a matrix product itself adds to an fp32 main_grad need this, on CUDA only."""
    for device in _gpus():
        out, a = torch.zeros(16, 16, device=device), torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        try:
            torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
        except (TypeError, RuntimeError) as error:
            found = f"torch {torch.__version__} can't do it on {device}: {str(error).strip().splitlines()[0]}"
            yield Check("addmm(out_dtype=)", WARNING, found, "a newer PyTorch: without it a gradient is made before it is added")
        else:
            yield Check("addmm(out_dtype=)", OK, f"works on {device}")


_TRAPS = (_triton_version, _driver, _capability, _interpreter, _numpy, _chosen_backend, _compiler, _triton_cache, _addmm)


# ---- the self-test: a forward and a backward on each device, by each native backend that can, against fp64 ----


def _self_tests() -> Iterator[Check]:
    for device in (torch.device("cpu"), *_gpus()):
        for name in backend.NATIVE:
            call = backend.OPS["bias_activation"]
            if name == "torch" or call.unsupported(*_CALLS["bias_activation"](device)) is None:
                yield _self_test(device, name)


def _self_test(device: torch.device, name: str) -> Check:
    if name == "triton" and lang.INTERPRETED and _version("numpy"):
        import onepass.testing.interpreter  # noqa: F401
    title = f"self-test, {name} on {device}"
    try:
        worst = max(_excess(device, name, dtype) for dtype in (torch.float32, torch.bfloat16))
    except Exception as error:  # of any library below: that is what is to be reported
        lines = str(error).strip().splitlines()
        return Check(title, BROKEN, f"{type(error).__name__}: {lines[0] if lines else ''}", "run it with the traps above mended")
    found = f"bias_activation and its gradients: {worst:.2f} of the allowed error"
    if not worst <= 1:
        return Check(title, BROKEN, found, "don't train with this: please report it, with `onepass doctor --json`")
    return Check(title, OK, found)


def _excess(device: torch.device, name: str, dtype: torch.dtype) -> float:
    """The worst error of y and of the gradients, as a fraction of what is allowed."""
    x, bias = _sample(device, dtype)

    def ours(x: Tensor, bias: Tensor) -> Tensor:
        return bias_activation(x, bias, "swiglu", backend=name)

    def formula(x: Tensor, bias: Tensor) -> Tensor:
        return bias_activation_reference(x, bias, activation="swiglu")

    got, baseline, exact = _run(ours, x, bias), _run(formula, x, bias), _run(formula, x.double(), bias.double())
    return max(_error(g, e) / (1.25 * _error(b, e) + 1e-6) for g, b, e in zip(got, baseline, exact, strict=True))


def _run(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    y = function(*leaves)
    y.sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    found = diagnose()
    if args.json:
        json.dump(asdict(found) | {"broken": found.broken}, sys.stdout, indent=2)
        print()
    else:
        _show(found)
    return 1 if found.broken else 0


def _show(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print("  ".join(f"[bold]{name}[/] {version}" for name, version in found.versions.items()))
    for device in found.devices:
        facts = (f"{name} {value}" for name, value in device.items() if name not in ("device", "name"))
        console.print("  ".join((device["device"], device["name"], *facts)))
    usable = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("op", "device", "backend", ""):
        usable.add_column(heading)
    for op, devices in found.backends.items():
        for where, reasons in devices.items():
            for name, reason in reasons.items():
                usable.add_row(op, where, name, "[green]can be used[/]" if reason is None else f"no: {escape(reason)}")
    checks = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "check", "found"):
        checks.add_column(heading)
    colours = {OK: "green", WARNING: "yellow", BROKEN: "bold red"}
    for check in found.checks:
        advice = f"\n[bold]do:[/] {escape(check.advice)}" if check.advice and check.verdict != OK else ""
        checks.add_row(f"[{colours[check.verdict]}]{check.verdict}[/]", check.name, escape(check.found) + advice)
    for table in (usable, checks):
        console.print()
        console.print(table)
    counts = {verdict: sum(check.verdict == verdict for check in found.checks) for verdict in (WARNING, BROKEN)}
    console.print(f"\n{counts[BROKEN]} broken, {counts[WARNING]} to mind")
