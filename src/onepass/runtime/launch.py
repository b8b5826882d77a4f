"""Launch a Triton kernel without Triton's per-call work.

`kernel[grid](*args)` inspects every argument at each call, though what it finds depends only on the types, the alignment of
the pointers and the sizes compiled in. So look those up once for each kind of call and keep the compiled kernel.

    @kernel("M")                                    # M varies from call to call: a new M compiles nothing
    def _copy_kernel(x_ptr, y_ptr, M, H, BLOCK: tl.constexpr): ...

    _copy_kernel((programs, 1, 1), x, y, M, H, 1024, num_warps=4)       # the grid, then the arguments in order

Arguments whose names end in `_ptr` are tensors, or None (then the kernel is compiled without them).

A compiled kernel's `run` is private to Triton. It is used for the versions it was tried on; for others, under the
interpreter, and while a profiler hooks launches, Triton's own way is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onepass.runtime.lang import triton

TRIED = ("3.5.", "3.6.", "3.7.")
_INT32_MAX = 0x7FFFFFFF


class Launcher:
    """One kernel with its plans: what was compiled for each kind of call."""

    def __init__(self, function: Callable[..., Any], varying: tuple[str, ...]) -> None:
        self.jit = triton.jit(function, do_not_specialize=list(varying))
        names = self.jit.arg_names
        self.tensors = [i for i, name in enumerate(names) if name.endswith("_ptr")]
        self.fixed = [i for i, name in enumerate(names) if not name.endswith("_ptr") and name not in varying]
        self.varying = [i for i, name in enumerate(names) if name in varying]
        self.direct = triton.__version__.startswith(TRIED)
        self.plans: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Any, num_warps: int = 4) -> None:
        device = args[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():  # Triton launches on the current device
            with torch.cuda.device(device):
                return self(grid, *args, num_warps=num_warps)
        kind, addresses = self.kind(device, args, num_warps)
        plan = self.plans.get(kind)
        if plan is None or triton.knobs.runtime.launch_enter_hook.calls:
            return self.first(kind, grid, args, num_warps)
        run, function, metadata = plan
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*grid, stream, function, metadata, None, None, None, *addresses)

    def kind(self, device: int, args: tuple[Any, ...], num_warps: int = 4) -> tuple[tuple[Any, ...], list[Any]]:
        """All that Triton compiles in (equal kinds share a compiled kernel), and the arguments with addresses for tensors."""
        parts: list[Any] = [device, num_warps]
        addresses, pointers = list(args), 0
        for i in self.tensors:
            tensor = args[i]
            if tensor is None:
                parts.append(None)
                continue
            parts.append(tensor.dtype)
            addresses[i] = address = tensor.data_ptr()  # an int spares the driver a look-up of each tensor
            pointers |= address
        if pointers % 16:  # each pointer is specialised by itself
            parts += [addresses[i] is None or addresses[i] % 16 == 0 for i in self.tensors]
        for i in self.fixed:
            parts.append(args[i])
            parts.append(type(args[i]))  # 1, 1.0 and True are equal, but not to Triton
        for i in self.varying:
            parts.append(args[i] > _INT32_MAX)  # i64 rather than i32
        return tuple(parts), addresses

    def first(self, kind: tuple[Any, ...], grid: tuple[int, int, int], args: tuple[Any, ...], num_warps: int) -> None:
        compiled = self.jit[grid](*args, num_warps=num_warps)
        if compiled is not None and self.direct:
            self.plans[kind] = compiled.run, compiled.function, compiled.packed_metadata


def grid_of(across: int, down: int) -> tuple[int, int, int]:
    """A grid of tiles, `across` fastest. Dimensions after the first end at 65,535: where `down` is more, it takes two.

    A kernel reads its tile as program_id(0), program_id(1) + 65535 * program_id(2), with no division; programs past the end
    must find nothing to do.
    """
    return across, min(down, 65535), -(-down // 65535)


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a Triton kernel; `varying` names the sizes that must not be compiled in."""
    return lambda function: Launcher(function, varying) if triton else None
