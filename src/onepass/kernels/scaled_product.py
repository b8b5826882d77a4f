"""The product of two matrices of codes: on a GPU cuBLAS's, on a CPU the same rounded operands in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.kernels.cublaslt import scaled_mm, unusable


def scaled_product(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, dtype: torch.dtype, *,
    fast: bool = False, out: Tensor | None = None, add: bool = False,
) -> Tensor:  # fmt: skip
    """Return a @ b.T of codes a [M, K] and b [N, K], over their scales, in `dtype`.

    Args:
        a_inverse, b_inverse: the inverses of scales, of one element both, or [M, 1] and [N, 1].
        fast: sums may be kept in fewer bits than fp32, as the tensor cores of Hopper do.
        out: where the product is written, of `dtype`.
        add: to what `out` holds, in fp32, and rounded once.
    """
    if add and dtype is not torch.float32:  # cuBLAS would round the product as well as the sum
        assert out is not None
        return out.add_(scaled_product(a, a_inverse, b, b_inverse, torch.float32, fast=fast))
    if a.is_cuda and a.numel() and (out is None or out.stride(1) == 1) and unusable(a.device) is None:
        into = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device) if out is None else out
        scaled_mm(a, a_inverse, b, b_inverse, into, fast=fast, add=add)
        return into
    if a.is_cuda:
        scales = {"scale_a": a_inverse, "scale_b": b_inverse.t() if b_inverse.dim() else b_inverse}
        product = torch._scaled_mm(a, b.t(), **scales, out_dtype=dtype, use_fast_accum=fast)
    else:
        product = ((a.float() * a_inverse) @ (b.float() * b_inverse).t()).to(dtype)
    if out is None:
        return product
    return out.add_(product) if add else out.copy_(product)
