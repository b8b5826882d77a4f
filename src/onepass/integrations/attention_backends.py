"""Backends of attention that run kernels of cuDNN, of flash-attn-4 and of PyTorch's varlen_attn, between our rotations.

A backend runs if a caller names it, in both passes, or raises with the reason. "auto" and "triton" take the first two by
themselves where they were measured to be faster (ops/attention/choice.py).

    cudnn        plain causal attention on Hopper; its backward through nvidia-cudnn-frontend, in either order
    flash_attn   flash-attn-4's wheel, on Hopper and Blackwell; in either order
    varlen_attn  torch.nn.attention.varlen, of PyTorch's own flash attention; no softcap, no sinks. Its backward has a fixed order
                 only under torch.use_deterministic_algorithms
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from onepass.ops.attention.arguments import head_size
from onepass.ops.attention.attention import attend_with, attention, options_of
from onepass.ops.attention.by_cudnn import cudnn_refuses
from onepass.ops.attention.by_flash import flash_functions
from onepass.ops.attention.by_pytorch import attend_by_pytorch
from onepass.ops.attention.choice import CUDNN, FLASH
from onepass.ops.attention.document_kernels import checked_boundaries
from onepass.ops.attention.formula import AttentionOptions, Parts, is_plain
from onepass.runtime.backend import find_op, register_backend
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.dispatch import cast, product_type, under_functorch
from onepass.runtime.op import Call, Reason

VARLEN = "varlen_attn"
_TYPES = (torch.bfloat16, torch.float16)


def _refuses(name: str, *args: Any, **given: Any) -> Reason:
    """Why a backend's kernels can't take a call, or None."""
    call = find_op(attention).call(*args, **given)
    qkv, dtype = call.qkv, product_type(call.qkv)
    if not _on_gpu(qkv):
        return f"qkv is on {qkv.device.type}, and {name} needs a CUDA device"
    if dtype not in _TYPES:
        return f"qkv is {dtype}, and {name} takes 16 bits"
    if not qkv.numel():
        return "qkv is empty"
    if invariant():
        return f"onepass.batch_invariant() is on, and {name} chooses tiles and splits by the sizes of the whole batch"
    if under_functorch():
        return "vmap, a functional derivative or forward-mode differentiation is in force"
    D = head_size(qkv, call.heads, call.groups, call.gated)
    if D % 8 or D > 256:
        return f"heads of {D} are no multiple of 8 up to 256"
    return _REFUSALS[name](call, D, options_of(call))


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda  # a test's is none


def _cudnn_refuses(call: Call, D: int, options: AttentionOptions) -> Reason:
    if options.right != 0 or not is_plain(options, call.cu_seqlens, call.sinks):
        return "cuDNN is asked for plain causal attention here: no documents, windows, softcaps or sinks"
    return cudnn_refuses(call.qkv, D)


def _flash_refuses(call: Call, D: int, options: AttentionOptions) -> Reason:
    functions = flash_functions()
    if isinstance(functions, str):
        return functions
    major, minor = torch.cuda.get_device_capability(call.qkv.device)
    if major not in (9, 10):
        return f"flash-attn-4's backward needs a GPU of Hopper or Blackwell, 9.x or 10.x, and this one is {major}.{minor}"
    if major == 10 and D > 128:
        return f"heads of {D} are wider than 128, which flash-attn-4 takes on Blackwell"
    return None


def _varlen_refuses(call: Call, D: int, options: AttentionOptions) -> Reason:
    if find_spec("torch.nn.attention.varlen") is None:
        return f"PyTorch {torch.__version__} has no torch.nn.attention.varlen; 2.10 and newer have"
    for name in ("softcap", "sinks"):
        if getattr(call, name) is not None:
            return f"varlen_attn has no {name}"
    if options.in_order and not torch.are_deterministic_algorithms_enabled():
        return (
            "varlen_attn's backward has a fixed order only under torch.use_deterministic_algorithms(True): turn that on, or pass "
            "deterministic=False"
        )
    if "window_size" not in signature(_varlen()).parameters and (options.left >= 0 or options.right > 0):
        return f"varlen_attn of PyTorch {torch.__version__} has no window"
    return None


_REFUSALS = {CUDNN: _cudnn_refuses, FLASH: _flash_refuses, VARLEN: _varlen_refuses}


def _run(name: str, *args: Any, **given: Any) -> Tensor:
    call = find_op(attention).call(*args, **given)
    if name != VARLEN:
        return attend_with(name, call)
    rows, weights = cast(call.qkv, product_type(call.qkv)), (call.q_weight, call.k_weight)
    tensors = call.cos, call.sin, call.cu_seqlens, call.sinks
    return attend_by_pytorch(rows, *tensors, weights, options_of(call), call.overwrite, True, _attend_by_varlen)


def _attend_by_varlen(parts: Parts, options: AttentionOptions, cu_seqlens: Tensor | None, sinks: None) -> Tensor:
    """Return y [B, S, heads D]. Rows of a batch are documents too."""
    B, S, heads, _ = parts[0].shape
    if cu_seqlens is None:
        boundaries = torch.arange(0, (B + 1) * S, S, dtype=torch.int32, device=parts[0].device)
    else:
        boundaries, wrong = checked_boundaries(cu_seqlens.contiguous(), S)
    q, k, v = (x.flatten(0, 1) for x in parts)
    function = _varlen()
    taken, more = signature(function).parameters, dict[str, Any](scale=options.scale)
    if "window_size" in taken:
        more["window_size"] = options.left, options.right
    else:
        more["is_causal"] = options.right == 0
    if heads != options.groups:
        if "enable_gqa" in taken:
            more["enable_gqa"] = True
        else:  # before PyTorch 2.12
            k, v = (x.repeat_interleave(heads // options.groups, 1) for x in (k, v))
    y: Tensor = function(q, k, v, boundaries, boundaries, S, S, **more).view(B, S, -1)
    return y if cu_seqlens is None else y.masked_fill(wrong.bool(), torch.nan)


def _varlen() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def register() -> None:
    """Register the backends with attention and `explain`. Called once, when onepass is imported."""
    for name in _REFUSALS:
        register_backend(attention.__name__, name, partial(_run, name), partial(_refuses, name))
