"""Compile every kernel for GPUs that are not present. Read registers, shared memory and spills from the binaries.

    python -m onepass.testing.aot                      # sm_80, sm_90 and sm_100; exit status 1 where anything spills or fails
    python -m onepass.testing.aot --arch 90 --only swiglu
    python -m onepass.testing.aot --in-turn            # a sixth of the binaries: each value of each parameter at least once
    python -m onepass.testing.aot --each-kernel        # each kernel's first launch only

The kernels and their configurations come from the ops. Each call is a user's call, on tensors of the meta device, which have
shapes and no memory. Launches are recorded instead of run. So this module knows nothing of tiles, and a kernel that no call
launches is an error. The calls are in `samples.py`, in the same folder as the kernels.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import onepass.gradients
import onepass.kernels
import onepass.ops
import onepass.product
from onepass.bench.options import short
from onepass.kernels import launch
from onepass.kernels.language import INTERPRETED, triton
from onepass.runtime.errors import install_hint
from onepass.runtime.samples import CoveringCall

ARCHS = (80, 90, 100)  # A100, H100 and H200, B200
_SHARED = {80: 166912, 90: 232448, 100: 232448}  # bytes of shared memory for one program: tiles depend on it
_LEAST_SHARED = 101376  # sm_86, sm_89, sm_120
_LIKE = {100: 90}  # what launches as another architecture does: equal memory, and no call that wants more than sm_90
_PROCESSORS = 132  # of an H100. With one, no kernel would have several programs


# ---- recording launches ----


@dataclass(frozen=True)
class Launch:
    """One kernel as one call launches it. `args` holds dtypes in place of tensors, None, and sizes."""

    kernel: launch.Kernel
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]  # num_warps and the like
    call: CoveringCall

    @property
    def name(self) -> str:
        function = self.kernel.jit.fn
        return f"{'.'.join(function.__module__.split('.')[-2:])} {function.__name__.strip('_').removesuffix('_kernel')}"

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal where Triton would reuse the compiled kernel."""
        return self.kernel, self.options, *map(_specialisation, _parameters(self.kernel), self.args)

    @property
    def values(self) -> set[tuple[Any, ...]]:
        """What the kernel is compiled for, by parameter and by option."""
        names = [name for name, _ in _parameters(self.kernel)]
        return {(self.kernel, *each) for each in (*zip(names, self.key[2:], strict=True), *self.options)}


@cache
def _parameters(kernel: launch.Kernel) -> list[tuple[str, bool]]:
    """Return each parameter's name, and whether it is a constexpr."""
    parameters = signature(kernel.jit.fn).parameters.values()
    return [(parameter.name, "constexpr" in str(parameter.annotation)) for parameter in parameters]


def _specialisation(parameter: tuple[str, bool], value: Any) -> Any:
    name, compiled_in = parameter
    if compiled_in:
        return repr(value)
    if not isinstance(value, int):
        return type(value) if isinstance(value, float) else value
    wide = value > 0x7FFFFFFF
    return wide if name in launch.VARYING else (wide, value == 1, value % 16 == 0)


def package_modules() -> Iterator[Any]:
    """Yield the modules that kernels are in."""
    for package in (onepass.kernels, onepass.gradients, onepass.product, onepass.ops):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            yield importlib.import_module(module.name)


def launches(only: str = "", arch: int = 90) -> list[Launch]:
    """Return every distinct kernel that the covering calls of all ops launch on this architecture, in a fixed order."""
    by_key: dict[tuple[Any, ...], Launch] = {}
    with _recording(arch) as recorded:
        for samples in (module for module in package_modules() if module.__name__.endswith(".samples")):
            for call in samples.covering_calls():
                if call.least_arch <= arch and only in f"{call.label} {short(call.dtype)}":
                    y = call.run()
                    y.backward(torch.empty_like(y))
                    for bound, args in recorded:
                        launched = Launch(bound.kernel, (*args, *bound.fixed), tuple(bound.options.items()), call)
                        by_key.setdefault(launched.key, launched)
                    recorded.clear()
    return list(by_key.values())


@contextmanager
def _recording(arch: int) -> Iterator[list[tuple[launch.Bound, tuple[Any, ...]]]]:
    """Record launches instead of running them: each kernel with its arguments, dtypes in place of tensors."""
    recorded: list[tuple[launch.Bound, tuple[Any, ...]]] = []
    gpu = {"triton_unsupported": None, "processors": _PROCESSORS, "shared_memory": _SHARED.get(arch, _LEAST_SHARED)}

    def record(bound: launch.Bound, grid: launch.Grid, *args: Any) -> None:
        recorded.append((bound, tuple(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch.Bound, "__call__", record))
        for module in package_modules():
            # the meta device passes for a GPU, and cached tiles of other architectures are dropped
            for name, value in gpu.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=value))
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    stack.callback(value.cache_clear)
                    value.cache_clear()
        yield recorded


def uncovered(recorded: Iterable[Launch]) -> list[str]:
    """Return the kernels that no call launches."""
    launched = {each.kernel for each in recorded}
    kernels = {value for module in package_modules() for value in vars(module).values() if isinstance(value, launch.Kernel)}
    return sorted(f"kernel {kernel.jit.fn.__name__}" for kernel in kernels - launched)


# ---- compiling ----


# Spills that cost less than their alternatives, measured on an H200. Without them kernels take 7 % and more longer
# (docs/notes/0002-norm.md), 5 % (0007), and 3 to 12 % where more programs share a multiprocessor (0014). Two spilled instructions
# are also allowed where a row is one element.
ALLOWED_SPILLS = {
    ("norm.backward rows", "layer_norm 2048x5000", 100): 8,
    ("loss.whole_row_kernels both", "linear_cross_entropy 2048x128256 known_grad_scale", 100): 4,
    ("loss.whole_row_kernels both", "linear_cross_entropy 2048x128256 known_grad_scale smoothing", 90): 2,
    ("loss.whole_row_kernels both", "cross_entropy rows 2048x128256 softcap and smoothing", 80): 6,
    ("activation.kernels backward", "activation_linear gelu 37x1", 100): 2,
    ("dropout.kernels dropout_backward", "dropout_add 37x1", 90): 2,
    ("attention.backward dq", "attention 8/8x64", 90): 24,
    ("attention.backward dq", "attention 32/8x64", 90): 23,
    ("attention.backward dq", "attention 32/8x64 by group", 90): 23,
    ("attention.backward dk_dv", "attention 32/8x64", 90): 9,
    ("attention.backward dk_dv", "attention 8/8x128", 90): 12,
    ("attention.backward dk_dv", "latent_attention 32x128/128 interleaved", 90): 12,
    # a few instructions in a loop of hundreds, on GPUs where it is not measured
    ("attention.backward dq", "attention 8/8x128", 80): 10,
    ("attention.backward dq", "latent_attention 32x128/128 interleaved", 80): 6,
    ("attention.backward dq", "attention 32/8x128", 80): 10,
    ("attention.backward dk_dv", "attention 32/8x128", 80): 18,
    ("attention.backward dq", "attention 8/8x128", 100): 10,
    ("norm.backward rows", "rms_norm 2048x12288 residual", 100): 12,
    ("activation.kernels backward", "activation_linear gelu_exact 16384x8192", 100): 3,
    ("embedding.forward embedding", "embedding 16384x2048", 80): 2,
    ("embedding.forward embedding", "embedding 16384x2048 32000", 80): 2,
    # since statistics have names, and of a norm that a test has come to compile; not measured yet
    ("loss.whole_row_kernels both", "cross_entropy rows 2048x128256 softcap and smoothing", 90): 4,
    ("norm.fp8 long_codes", "fp8 norm rms 2048x20480 residual", 100): 1,
    ("norm.fp8 long_codes", "fp8 norm rms 2048x12288 residual", 100): 2,
    ("kernels.low_rank shrink", "adapters of rank 48, 6144 wide, by documents, dropout, seed in memory", 80): 2,
    ("norm.fp8 long_codes", "fp8 norm layer 2048x4096", 100): 1,
    ("norm.fp8 long_codes", "fp8 norm layer 2048x4096 e5m2", 100): 1,
    ("activation.kernels backward", "activation_linear gelu 4096x40 lora 4 after 4", 100): 9,
    ("kernels.low_rank expand", "adapters of rank 48, 6144 wide, by documents, dropout, seed in memory", 90): 5,
    ("kernels.low_rank expand", "adapters of rank 48, 6144 wide, by documents", 80): 2,
    ("kernels.low_rank shrink", "experts 32 of 2880 at 4096x2880 top 4 gpt-oss", 80): 4,
    ("ragged.kernels lanes_forward", "ragged layer_norm odd lanes", 80): 2,
    ("attention.forward attend", "attention 32/8x256 last tokens", 100): 96,
}
# Of attention's kernels, by a word of the call, on sm_80, sm_90 and sm_100. Each of these options is one more loop, or a mask in
# a loop that fills the registers. On sm_90 what spills less took longer (0014); the others are not measured.
ATTENTION_SPILLS = {
    "x80": (20, 12, 6), "x96": (20, 12, 6), "x192": (0, 81, 69), "x256": (0, 120, 69), "x512": (0, 60, 60),
    "documents": (3, 15, 8), "full": (4, 28, 0), "softcap": (28, 250, 69), "window": (187, 394, 53),
}  # fmt: skip


def allowed_spills(kernel: str, call: str, arch: int) -> int:
    """Return how many instructions of a kernel may spill."""
    allowed = [ALLOWED_SPILLS.get((kernel, call, arch), 0)]
    if kernel.startswith("attention.") and arch in ARCHS:
        allowed += [limits[ARCHS.index(arch)] for word, limits in ATTENTION_SPILLS.items() if word in call]
    return max(allowed)


@dataclass(frozen=True)
class Compiled:
    kernel: str
    call: str
    dtype: str
    arch: int
    registers: int = 0
    shared: int = 0
    spills: int = 0
    failure: str = ""

    @property
    def fine(self) -> bool:
        return self.spills <= allowed_spills(self.kernel, self.call, self.arch) and not self.failure


class _NoGpu:
    """A stub driver that tells Triton which architecture to compile for."""

    arch = ARCHS[0]

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cpu


def _compile(launched: Launch, arch: int) -> Compiled:
    """Compile for `arch` and read the binary. It never raises, because one failure must not hide the others."""
    row = Compiled(launched.name, launched.call.label, short(launched.call.dtype), arch)
    try:
        compiled = _binary(launched, arch)
        registers, shared, spills = _usage(compiled)
        if arch == 90 and "wgmma" in compiled.asm["ptx"]:
            _check_addresses(_disassembled(compiled))
    except Exception as error:  # ptxas and Triton raise errors of any type
        lines = str(error).strip().splitlines()
        return Compiled(**asdict(row) | {"failure": f"{type(error).__name__}: {lines[-1] if lines else ''}"})
    return Compiled(**asdict(row) | {"registers": registers, "shared": shared, "spills": spills})


def _binary(launched: Launch, arch: int) -> Any:
    driver = _NoGpu()
    driver.arch = arch
    triton.runtime.driver.set_active(driver)
    jit = launched.kernel.jit
    jit.device_caches.clear()  # they hold the target of the last compilation
    mocked = (triton.runtime.jit.MockTensor(arg) if isinstance(arg, torch.dtype) else arg for arg in launched.args)
    return jit.warmup(*mocked, grid=(1,), **dict(launched.options))


def _usage(compiled: Any) -> tuple[int, int, int]:
    """Return registers, bytes of shared memory, and the number of spill instructions."""
    usage = _read_cubin(compiled, "cuobjdump", "-res-usage")
    match = re.search(r"REG:(\d+).*?STACK:(\d+)|STACK:(\d+).*?REG:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage.strip()!r}")
    registers, stack = int(match[1] or match[4]), int(match[2] or match[3])
    # A kernel that spills has a stack. Disassembly takes longer than compilation, so skip it for kernels without one.
    code = _disassembled(compiled) if stack else ""
    # nvdisasm does not support every architecture. For others count the stack's bytes instead.
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code)) if code.strip() else stack
    return registers, compiled.metadata.shared, spills


_LOW = re.compile(r"UIADD3 (UR\d+), (UP\d), (UR\d+), [^,]+, URZ ;")  # the low half of a sum of 64 bits, and its carry
_HIGH = re.compile(r"UIADD3\.X UR\d+, (\w+), [^,]+, \w+, (UP\d)")
_WRITES = re.compile(r"\*/ +(?:@\S+ )?(\S+) (?:UP\d, )?UR(\d+),")


def _check_addresses(code: str) -> None:
    """Raise where ptxas adds to an address whose low and high half are one register.

    ptxas 12.8 does that to a tile in shared memory whose rows are shorter than another's: the product then reads elsewhere.
    """
    lines = code.splitlines()
    for number, line in enumerate(lines):
        low = _LOW.search(line)
        if low is None or low[1] == low[3]:
            continue
        for later in lines[number + 1 : number + 12]:
            high = _HIGH.search(later)
            if high and high[2] == low[2]:
                if high[1] == low[3]:
                    raise RuntimeError(f"{low[3]} is both halves of an address: ptxas compiled it wrongly")
                break
            if (writes := _WRITES.search(later)) and low[3] in _written(writes[1], int(writes[2])):
                break  # it may be the high half now


def _written(instruction: str, register: int) -> tuple[str, ...]:
    wide = ".WIDE" in instruction or ".64" in instruction
    return tuple(f"UR{at}" for at in range(register, register + 1 + wide))


def _disassembled(compiled: Any) -> str:
    return _read_cubin(compiled, "nvdisasm")


def _read_cubin(compiled: Any, tool: str, *options: str) -> str:
    """Return what a tool of Triton's says of a binary."""
    path = Path(triton.backends.nvidia.__file__).parent / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True).stdout


# ---- in several processes ----


def _planned(only: str, arch: int) -> list[Launch]:
    return _plan(only, _LIKE.get(arch, arch))


_plan = cache(launches)


def _work(index: int, arch: int, only: str) -> Compiled:
    return _compile(_planned(only, arch)[index], arch)  # a kernel can't be pickled, its index can


def _tasks(archs: Sequence[int], only: str, in_turn: bool, each_kernel: bool = False) -> list[tuple[int, int]]:
    """Return indices of launches and architectures. Each kernel's first launch is for every architecture.

    In turn: also a launch with a value that none before it has, for one architecture, and those that are known to spill.
    """
    every = [(index, arch) for arch in archs for index in range(len(_planned(only, arch)))]
    if not (in_turn or each_kernel):
        return every
    chosen, kernels, values = set(), set(), set()
    for index, arch in every:
        launched = _planned(only, arch)[index]
        spills = in_turn and (launched.name, launched.call.label, arch) in ALLOWED_SPILLS
        if spills or (launched.kernel, arch) not in kernels:
            chosen.add((index, arch))
            kernels.add((launched.kernel, arch))
            values |= launched.values
    # sorted, each launch is first asked of the architecture whose turn it is
    for index, arch in sorted(every, key=lambda task: (archs.index(task[1]) - task[0]) % len(archs)) if in_turn else ():
        launched = _planned(only, arch)[index]
        if not launched.values <= values:
            chosen.add((index, arch))
            values |= launched.values
    return [task for task in every if task in chosen]


def compile_all(archs: Sequence[int], only: str, jobs: int, in_turn: bool = False, each_kernel: bool = False) -> list[Compiled]:
    """Compile in forks of this process, which inherit the plan. No thread or driver has started that a fork would break."""
    tasks = _tasks(archs, only, in_turn, each_kernel)
    gc.freeze()  # else each collection in a fork goes through all launches: a twentieth of the time
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        running = {pool.submit(_work, index, arch, only): (index, arch) for index, arch in tasks}
        for _ in as_completed(running):
            pass
    done = {task: future.result() for future, task in running.items()}
    return [done[task] for task in tasks]


# ---- the command ----


def _table(rows: list[Compiled], archs: tuple[int, ...]) -> Any:
    from rich.table import Column, Table

    title = "registers, bytes of shared memory and spills"
    figures = (Column(f"sm_{arch}", justify="right") for arch in archs)
    table = Table("kernel", "first launched by", "type", *figures, title=title, title_justify="left")
    lines: dict[tuple[str, str, str], dict[int, list[str]]] = {}
    for row in rows:  # less shared memory may change an architecture's kernels and their order
        cells = lines.setdefault((row.kernel, row.call, row.dtype), {arch: [] for arch in archs})
        cells[row.arch].append(_cell(row))
    for named, cells in lines.items():
        table.add_row(*named, *("\n".join(cells[arch]) for arch in archs))
    return table


def _cell(row: Compiled) -> str:
    if row.failure:
        return "[bold red]failed[/]"
    spills = f"[bold {'yellow' if row.fine else 'red'}]{row.spills}[/]" if row.spills else "0"
    return f"{row.registers}  {row.shared}  {spills}"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m onepass.testing.aot", description="Compile all kernels for absent GPUs.")
    parser.add_argument("--arch", default=",".join(map(str, ARCHS)), help="such as 90 or 80,90,100 (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="calls whose label contains this, such as 'swiglu' or 'fp16'")
    parser.add_argument(
        "--in-turn", action="store_true", help="each value of a parameter for one architecture, and each kernel for all"
    )
    parser.add_argument("--each-kernel", action="store_true", help="the first launch of each kernel, for each architecture")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile (%(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if triton is None:
        print(f"onepass.testing.aot: triton is not installed: {install_hint('triton')}", file=sys.stderr)
        return 2
    from rich.console import Console

    archs = tuple(int(arch) for arch in args.arch.split(","))
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # unused here, and a fifth of the time
    start = time.monotonic()
    missing = [] if args.only else uncovered(_planned(args.only, max(archs)))
    rows = compile_all(archs, args.only, args.jobs, args.in_turn, args.each_kernel)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(_table(rows, archs))
    for row in rows:
        if row.failure:
            console.print(f"{row.kernel} of {row.call} {row.dtype} on sm_{row.arch}: {row.failure}", markup=False)
    for name in missing:
        console.print(f"{name}: no covering call in a samples.py launches it")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    bad = sum(not row.fine for row in rows)
    console.print(f"{len(rows)} binaries in {time.monotonic() - start:.0f} s: {bad} spill or fail, {len(missing)} not covered")
    return 1 if bad or missing or not rows else 0


def _without_interpreter() -> None:
    """Restart without the interpreter: kernels that are decorated under it can't be compiled."""
    if INTERPRETED:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        os.execve(sys.executable, [sys.executable, "-m", "onepass.testing.aot", *sys.argv[1:]], environment)


if __name__ == "__main__":
    _without_interpreter()
    sys.exit(main())
