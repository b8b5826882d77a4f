"""Products of rows that are sorted by group, each with its group's matrix: by Triton, PyTorch's, or a loop over groups.

Shapes   a [M, K], b [G, N, K], ends [G] int32: where each group's rows end. A group may have none. The result is [M, N].
Codes    a has a scale a row, and b one for each of its G N rows. The result of a row is multiplied by the inverses of both.
The loop waits for the GPU, to learn each group's rows. On a CPU it multiplies codes in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.kernels.grouped_kernels import multiply_rows, triton_multiplies
from onepass.kernels.layout import lies_evenly
from onepass.kernels.quack_product import add_by_quack, multiply_by_quack, quack_multiplies
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.dispatch import has_address
from onepass.runtime.fp8 import MULTIPLE, fits_fp8
from onepass.runtime.op import Registered
from onepass.runtime.sizes import compute_capability

_ALIGNED = 8  # 16-bit numbers: PyTorch's product takes rows that start at multiples of 16 bytes
_SCALED_CAPABILITY = 9, 0  # PyTorch's kernel is Hopper's alone, though it lets 10.0 call it
_GROUPS = 1024  # PyTorch takes fewer
_SCALED_LEAST = 4096  # N and K from which it gains: .72 of bf16's time at 28672 x 4096 on an H100, 2.2 times at 1536 x 2048


def group_rows(ends: Tensor) -> Iterator[slice]:
    """Yield each group's rows. On a GPU this waits for the device. On the meta device nobody knows them."""
    if ends.is_meta:
        return
    start = 0
    for end in ends.tolist():
        yield slice(start, end)
        start = end


# ---- in the operands' type ----


def torch_can_group(x: Tensor, weight: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these. It does not wait for the GPU to learn each group's rows."""
    return (
        hasattr(F, "grouped_mm")
        and x.is_cuda
        and x.dtype is torch.bfloat16
        and weight.shape[0] < _GROUPS
        and weight.shape[1] % _ALIGNED == 0
        and weight.shape[2] % _ALIGNED == 0
        and compute_capability(x.device) >= (8, 0)
    )


def grouped_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a @ b[g].T for each group's rows. Both have the same type."""
    if a.shape[0] and torch_can_group(a, b):  # PyTorch's refuses no rows
        if invariant():  # PyTorch's takes any number of rows
            return _rows_by_torch(a, b, ends)
        if quack_multiplies(a, b, a.shape[0] * b.shape[1] * b.shape[2]):
            return multiply_by_quack(a, b, ends)
        return multiply_rows(a, b, ends) if triton_multiplies(a, b, a.shape[0]) else _rows_by_torch(a, b, ends)
    return _by_group(a, b, ends)  # type: ignore[no-any-return]


def grouped_gradient(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a.T @ b of each group's rows [G, N, K], for operands that `torch_can_group`."""
    N, K = a.shape[1], b.shape[1]
    if not quack_multiplies(a, b, a.shape[0] * N * K, of_gradient=True):
        return F.grouped_mm(_readable_rows(a).mT, _readable_rows(b), offs=ends)
    out = a.new_empty(ends.shape[0], N, K)
    add_by_quack(out, a, b, ends, keep=False)
    return out


def _rows_by_torch(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    weight = b if not has_address(b) or lies_evenly(b) else b.clone(memory_format=torch.contiguous_format)
    return F.grouped_mm(_readable_rows(a), weight.mT, offs=ends)


def _readable_rows(x: Tensor) -> Tensor:
    """Return rows that are sorted by group, or a copy where PyTorch's product can't read them: 16 bytes at a time, along rows.

    Along columns it would ask for groups of 8 rows, on the GPU. A compiler copies what begins elsewhere itself.
    """
    if not has_address(x) or (x.stride(1) == 1 and x.stride(0) >= x.shape[1] and lies_evenly(x)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _by_group_now(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    y = a.new_empty(a.shape[0], b.shape[1])
    for group, rows in enumerate(group_rows(ends)):
        torch.mm(a[rows], b[group].t(), out=y[rows])
    return y


def _gradient_by_group(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return torch.stack([a[rows].t() @ b[rows] for rows in group_rows(ends)])


_by_group = Registered(
    "grouped_product(Tensor a, Tensor b, Tensor ends) -> Tensor",
    _by_group_now,
    lambda a, b, ends: a.new_empty(a.shape[0], b.shape[1]),
)
# a.T @ b of each group's rows: for compiled graphs, which can't know the rows
gradient_by_group = Registered(
    "grouped_gradient(Tensor a, Tensor b, Tensor ends) -> Tensor",
    _gradient_by_group,
    lambda a, b, ends: a.new_empty(ends.shape[0], a.shape[1], b.shape[1]),
)


# ---- in eight bits ----


def unfit_for_scaled_groups(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why products of this type with a weight [G, N, K], and with its transpose, can't be in eight bits, or None."""
    groups, N, K = shape
    if not fits_fp8((N, K)):
        return f"the experts' sizes, {N} x {K}, are not multiples of {MULTIPLE}"
    if device.type != "cuda":
        return None
    if not hasattr(F, "scaled_grouped_mm"):
        return f"PyTorch {torch.__version__} has no grouped product in eight bits"
    found = compute_capability(device)
    if found != _SCALED_CAPABILITY:
        return f"PyTorch's grouped product in eight bits needs compute capability 9.0, but the GPU has {found[0]}.{found[1]}"
    if dtype is not torch.bfloat16:
        return f"PyTorch's grouped product in eight bits returns bf16, but the product's type is {dtype}"
    if groups >= _GROUPS:
        return f"PyTorch's grouped product in eight bits takes fewer than {_GROUPS} experts, but there are {groups}"
    if min(N, K) < _SCALED_LEAST:
        return f"PyTorch's grouped product in eight bits is slower than in bf16 where a size is below {_SCALED_LEAST}: {N} x {K}"
    return None


def scaled_grouped_product(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the product of e4m3 codes, over their scales, in `dtype`: bf16 on a GPU.

    Args:
        a_inverse, b_inverse: the inverses of scales, fp32, of M and G N elements.
    """
    groups, N, _ = b.shape
    if a.is_cuda and a.shape[0]:
        by_row = F.ScalingType.RowWise
        scales = a_inverse.view(-1), by_row, b_inverse.view(groups, N), by_row
        # with fast sums the error is up to 1.4 times that of rounding to 16 bits, at K = 4096
        return F.scaled_grouped_mm(  # type: ignore[attr-defined,no-any-return]
            a, b.mT, *scales, offs=ends, output_dtype=dtype, use_fast_accum=False
        )
    y = a.new_empty(a.shape[0], N, dtype=dtype)
    wide, inverses = a.float() * a_inverse.view(-1, 1), b_inverse.view(groups, N, 1)
    for group, rows in enumerate(group_rows(ends)):
        y[rows] = wide[rows] @ (b[group].float() * inverses[group]).t()
    return y
