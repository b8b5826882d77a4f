"""fp32 masters follow 16-bit weights that others have written: `.data`, a loaded state, averaged weights, by whatever means.

    where master, rounded, is not weight: master = weight

6 bytes are read a weight, and written only where it was. Nobody waits for the device.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from onepass.kernels.language import tl, triton_unsupported
from onepass.kernels.launch import Bound, kernel
from onepass.runtime import backend
from onepass.runtime.sizes import ceil_div

_BLOCK, _WARPS = 512, 4  # four values a thread: both types then have one layout


@kernel
def _follow_kernel(weight_ptr, master_ptr, M, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < M
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    master = tl.load(master_ptr + at, mask=inside, other=0.0)
    rounded = master.to(weight_ptr.dtype.element_ty).to(tl.float32)
    tl.store(master_ptr + at, weight, mask=inside & (rounded != weight))


@lru_cache(1)
def _bound() -> Bound:
    bound: Bound = _follow_kernel.bind(_BLOCK, num_warps=_WARPS)
    return bound


def follow_weight(weight: Tensor, master: Tensor) -> None:
    """Write the weights of 16 bits into those of their fp32 masters that are others."""
    if weight.is_contiguous() and master.is_contiguous() and _use_triton(weight):
        follow_by_kernel(weight, master)
    else:
        torch.where(master.to(weight.dtype) == weight, master, weight, out=master)


def follow_by_kernel(weight: Tensor, master: Tensor) -> None:
    if weight.numel():
        _bound()((ceil_div(weight.numel(), _BLOCK), 1, 1), weight, master, weight.numel())


def _use_triton(weight: Tensor) -> bool:
    """Whether a kernel runs. No other package has one for this, so choosing one by `use_backend` changes nothing."""
    named = backend.current_backend()
    return backend.choose("MasterWeights", named if named in backend.NATIVE else "auto", triton_unsupported(weight)) == "triton"
