"""flash-attn-4's attention, where it is installed and was measured to be faster, or where a caller names it.

Its wheel has kernels for Hopper and Blackwell in Python, which it compiles at the first call of a kind: 2 to 8 seconds for each
pass. Its backward adds dq up in any order, or in a fixed one, which waits. Both keep dq, and dk and dv of shared heads, in fp32.

Its autograd function would keep its own copies of q, k and v, so the functions below that are called. They are not public: names
and parameters are looked up first, and what is missing is said.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.ops.attention.backward import BackwardCall
from onepass.ops.attention.document_kernels import checked_boundaries, make_nan
from onepass.ops.attention.formula import AttentionOptions, empty_tokens
from onepass.ops.attention.forward import lse_size
from onepass.ops.attention.scores import LOG2E
from onepass.runtime.wheels import Wheel, find_functions

INSTALL = "pip install 'flash-attn-4[cu13]', without [cu13] for CUDA 12"
_BOTH = {"softmax_scale", "causal", "softcap", "window_size_left", "window_size_right", "learnable_sink"}
_BOTH |= {"cu_seqlens_q", "cu_seqlens_k"}
_PARAMETERS = {
    "_flash_attn_fwd": _BOTH | {"q", "k", "v", "out", "lse", "return_lse"},
    "_flash_attn_bwd": _BOTH | {"q", "k", "v", "out", "dout", "lse", "deterministic", "dq", "dk", "dv"},
}
_WARNS = r"(cutlass|flash_attn|quack)\b"
_WHEEL = Wheel("flash-attn-4", "flash-attn-4", INSTALL, "flash_attn.cute.interface", _PARAMETERS, _WARNS)


class FlashFunctions(NamedTuple):
    forward: Any
    backward: Any


@lru_cache(1)
def flash_functions() -> FlashFunctions | str:
    """Return flash-attn-4's functions, or why there are none. Imports the package, which takes seconds."""
    found = find_functions(_WHEEL)
    return found if isinstance(found, str) else FlashFunctions(*found)


def _loads() -> bool:
    return not isinstance(flash_functions(), str)


# what torch.compiler.assume_constant_result does, which imports the compiler
_loads._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_flash(x: Tensor) -> bool:
    """Whether flash-attn-4 loads, and x is on a GPU for which it was measured."""
    if not x.is_cuda:
        return False
    properties: Any = torch.cuda.get_device_properties(x.device)
    return int(properties.major) == 9 and _loads()


def attend_by_flash(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, cu_seqlens: Tensor | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Like `attend`. With documents the logarithms are for `attend_backward_by_flash` alone: natural, and by token."""
    B, S, H, D = q.shape
    y = empty_tokens(q, options, H, D)
    lse = torch.empty(B, H, lse_size(S, cu_seqlens), dtype=torch.float32, device=q.device)
    arguments = _options_of(options) | {"learnable_sink": sinks, "return_lse": True}
    with torch.cuda.device_of(q):
        if cu_seqlens is None:
            _loaded().forward(q, k, v, out=y, lse=lse[..., :S], **arguments)
            lse.mul_(LOG2E)
        else:
            boundaries, wrong = checked_boundaries(cu_seqlens, S)
            _loaded().forward(q[0], k[0], v[0], out=y[0], lse=lse[0, :, :S], **arguments, **_both(boundaries))
            for x in (y, lse):  # backward makes NaN of these
                make_nan(x, wrong)
    return y, lse


def attend_backward_by_flash(call: BackwardCall, gradients: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None) -> Tensor | None:
    """Write the gradients dq, dk and dv, whose last strides are 1, and return that of the sinks."""
    S, cu_seqlens = call.q.shape[1], call.cu_seqlens
    lse = call.lse[..., :S].contiguous()
    rows: tuple[Tensor, ...] = (call.q, call.k, call.v, call.y, call.dy)
    arguments = _options_of(call.options) | {"learnable_sink": sinks, "deterministic": call.options.in_order}
    arguments["softcap"] = call.options.softcap  # 0 for none, where forward has None
    into = gradients
    if cu_seqlens is None:
        lse = lse / LOG2E
    else:
        arguments |= _both(checked_boundaries(cu_seqlens, S)[0])
        rows, lse, into = tuple(x[0] for x in rows), lse[0], tuple(x[0] for x in gradients)  # type: ignore[assignment]
    with torch.cuda.device_of(call.q):
        returned = _loaded().backward(*rows, lse, **arguments, **dict(zip(("dq", "dk", "dv"), into, strict=True)))
    return None if sinks is None else returned[3]


def _loaded() -> FlashFunctions:
    functions = flash_functions()
    if isinstance(functions, str):
        raise RuntimeError(functions)
    return functions


def _options_of(options: AttentionOptions) -> dict[str, Any]:
    left, right = (None if side < 0 else side for side in (options.left, options.right))
    return {
        "softmax_scale": options.scale,
        "causal": options.right == 0,
        "softcap": options.softcap or None,
        "window_size_left": left,
        "window_size_right": right,
    }


def _both(boundaries: Tensor) -> dict[str, Tensor]:
    return {"cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}
