"""Launch a Triton kernel without Triton's per-call work.

`kernel[grid](*args)` inspects every argument at each call, but the result depends only on the types, the alignment of the
pointers and the sizes compiled in. So bind the sizes once, look up types and alignment, and keep the compiled kernel.

    @kernel
    def _copy_kernel(x_ptr, y_ptr, M, H, BLOCK: tl.constexpr): ...

    copy = _copy_kernel.bind(H, 1024, num_warps=4)      # once for each width: all arguments after the varying ones
    copy((programs, 1, 1), x, y, M)                     # every call: the grid, the tensors, the sizes that vary

A kernel's arguments come in this order: tensors (names in `_ptr`; None compiles the kernel without them), sizes that vary
from call to call (named in VARYING; a new value compiles nothing), then everything that is bound.
A SEED is the last of the sizes, and None or above 32 bits.

A compiled kernel's launch function is private to Triton. It is used with the versions that it was tried on. Other versions, the
interpreter and profilers that hook launches use Triton's own launch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.language import VERSION, as_device_function, jit, triton
from onepass.runtime.sizes import ceil_div

VARYING = ("M", "ROWS", "S", "FIRST", "SEED")
_INT32_MAX = 0x7FFFFFFF
_REGISTERS = 65536  # of a multiprocessor, on every GPU so far

Grid = tuple[int, int, int]


class Kernel:
    """A Triton kernel whose bound forms are launched cheaply."""

    def __init__(self, function: Callable[..., Any]) -> None:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        varying = [name for name in names if name in VARYING]
        self._function, self._varying = function, varying
        self.kind = _kind_of(sum(name.endswith("_ptr") for name in names), len(varying), "SEED" in varying)
        order = [2 - name.endswith("_ptr") * 2 if name not in VARYING else 1 for name in names]
        assert order == sorted(order), f"{names}: tensors first, then {VARYING}, then what is bound"

    @cached_property
    def jit(self) -> Any:
        """Triton's kernel, made at the first call."""
        return jit(self._function, do_not_specialize=self._varying)

    def bind(self, *fixed: Any, num_warps: int = 4, together: bool = False, resident: int = 0, fused: bool = True) -> Bound:
        """Bind the arguments after the varying ones.

        `together`: all programs run at the same time, or the launch fails; they may wait for each other.
        `resident`: how many programs share a multiprocessor's registers. Without it the assembler makes room for more programs
        than there are, and spills.
        `fused`: the compiler may round a product and a sum once, where it likes. Otherwise only `tl.fma` does, and a result has
        the same bits whatever else the kernel is compiled for.
        """
        # always named: Triton 3.9 warns where it isn't, and 3.10 leaves fusion out
        options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": fused}
        if together:
            options["launch_cooperative_grid"] = True
        if resident:
            options["maxnreg"] = min(255, _REGISTERS // (32 * num_warps * resident) // 8 * 8)
        return Bound(self, tuple(map(as_device_function, fixed)), options)


class Bound:
    """A kernel with its bound arguments, and a plan, the compiled kernel, for each set of types and alignments."""

    def __init__(self, kernel: Kernel, fixed: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kernel, self.fixed, self.options = kernel, fixed, options
        self.plans: dict[tuple[Any, ...], Any] = {}
        self.kept: list[Any] = []  # Triton 3.9 unloads a kernel that it holds no longer: the first of two that threads compiled
        self.room: dict[tuple[Any, ...], int] = {}

    def __call__(self, grid: Grid, *args: Any) -> None:
        device = args[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():  # Triton launches on the current device
            with torch.cuda.device(device):
                return self(grid, *args)
        kind, addresses = self.kernel.kind(device, args)
        plan = self.plans.get(kind)
        if plan is None or triton.knobs.runtime.launch_enter_hook.calls:
            return self.first(kind, grid, args)
        launch, middle = plan
        launch(*grid, torch._C._cuda_getCurrentRawStream(device), *middle, *addresses, *self.fixed)

    def most_at_once(self, *args: Any) -> int:
        """Return how many programs of this kernel fit on the GPU at the same time: the most that `together` can launch."""
        device = args[0].get_device()
        if device < 0:
            return 1 << 16  # the interpreter's: any number
        kind, _ = self.kernel.kind(device, args)
        if kind not in self.room:
            with torch.cuda.device(device):  # Triton compiles for the current one
                self.room[kind] = _room(self.kernel.jit.warmup(*args, *self.fixed, grid=(1,), **self.options), device)
        return self.room[kind]

    def first(self, kind: tuple[Any, ...], grid: Grid, args: tuple[Any, ...]) -> None:
        compiled = copy_context().run(self._by_triton, grid, args)
        if compiled is not None:
            plan = _quick_launch(compiled, args[0].device)
            if plan is not None:
                self.kept.append(compiled)
                self.plans[kind] = plan

    def _by_triton(self, grid: Grid, args: tuple[Any, ...]) -> Any:
        """Launch by Triton. It runs in a context of its own, as users may set the allocator."""
        device = args[0].device
        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
        return self.kernel.jit[grid](*args, *self.fixed, **self.options)


def _quick_launch(compiled: Any, device: torch.device) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """Return a compiled kernel's launch function, and what it takes between the stream and the kernel's own arguments.

    Triton's `run` makes two functions at each call and asks for hooks. None: this Triton was not tried, or the kernel wants more.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    hooks = (None, None, None)
    if not (3, 5) <= VERSION <= (3, 9) or (VERSION > (3, 5) and run.profile_scratch_size):
        return None
    if VERSION == (3, 5):
        return None if run.global_scratch_size else (run, (function, metadata, *hooks))
    launch, size = run.launch, run.global_scratch_size  # size: bytes for each program's tensor descriptors
    flags = run.launch_cooperative_grid, run.launch_pdl

    def scratch(x: int, y: int, z: int) -> Tensor | None:
        return torch.empty(x * y * z * size, dtype=torch.int8, device=device) if size else None

    if VERSION == (3, 6):
        if not size:
            return launch, (function, *flags, None, None, metadata, *hooks)

        def launch_flat(x: int, y: int, z: int, stream: int, *args: Any) -> None:
            launch(x, y, z, stream, function, *flags, scratch(x, y, z), None, metadata, *hooks, *args)

        return launch_flat, ()
    if getattr(run, "gsan_enabled", False):
        return None
    kinds = run.arg_annotations, run.kernel_signature

    def launch_packed(x: int, y: int, z: int, stream: int, *args: Any) -> None:
        launch(x, y, z, stream, function, *flags, metadata, *hooks, scratch(x, y, z), None, *kinds, args)

    return launch_packed, ()


def _kind_of(
    tensors: int, sizes: int, seeded: bool = False
) -> Callable[[int, tuple[Any, ...]], tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return a function of the device and the arguments: it returns a plan's key, and the arguments with tensors' addresses.

    The key has what Triton compiles in besides bound values. Addresses spare the driver a look-up of each. `seeded`: the last
    argument may be None. This is most of a call's time, so the source is unrolled: a loop takes half as long again.
    """
    given = [f"t{i}" for i in range(tensors)]
    addresses = [f"at{i}" for i in range(tensors)]
    numbers = [f"n{i}" for i in range(sizes)]
    kinds = [f"None if {t} is None else {t}.dtype" for t in given]
    kinds += [f"{n} > {_INT32_MAX}" for n in numbers[: sizes - seeded]]  # i64, not i32
    kinds += [f"{numbers[-1]} is None"] if seeded else []
    source = f"""def kind(device, args):
        {", ".join(given + numbers)}, = args
        {", ".join(addresses)}, = {", ".join(f"None if {t} is None else {t}.data_ptr()" for t in given)},
        kind = device, {", ".join(kinds)}
        if ({" | ".join(f"({at} or 0)" for at in addresses)}) % 16:  # each pointer is specialised by itself
            kind += {", ".join(f"({at} or 0) % 16 == 0" for at in addresses)},
        return kind, ({", ".join(addresses + numbers)},)"""
    names: dict[str, Any] = {}
    exec(source, names)
    return names["kind"]  # type: ignore[no-any-return]


def _room(compiled: Any, device: int) -> int:
    """Return how many programs of a compiled kernel fit in a GPU's registers, shared memory and threads."""
    compiled._init_handles()
    gpu: Any = torch.cuda.get_device_properties(device)  # PyTorch's type hints lack some fields
    threads = 32 * compiled.metadata.num_warps
    most = min(
        gpu.regs_per_multiprocessor // (ceil_div(compiled.n_regs, 8) * 8 * threads),
        gpu.shared_memory_per_multiprocessor // (compiled.metadata.shared + 1024),  # each program's own, and the driver's
        gpu.max_threads_per_multi_processor // threads,
    )
    return int(most * gpu.multi_processor_count)


def grid_of(across: int, down: int) -> Grid:
    """Return a grid of tiles, `across` fastest. Dimensions after the first end at 65,535: a larger `down` takes two.

    A kernel reads its tile as program_id(0), program_id(1) + 65535 * program_id(2), without a division. Programs past the end
    must find nothing to do.
    """
    return across, min(down, 65535), ceil_div(down, 65535)


def kernel(function: Callable[..., Any]) -> Any:
    """Decorate a Triton kernel. Without Triton it can be bound, for `explain`, and not launched."""
    return Kernel(function)
