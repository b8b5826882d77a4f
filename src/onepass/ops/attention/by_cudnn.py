"""cuDNN's attention, where it is faster and has a fixed order: its forward, through PyTorch, and its deterministic backward.

Forward   sums without atomics: on H200s it gave the same bits every time, and in any batch.
Backward  PyTorch asks for the one that adds dq up in any order. `nvidia-cudnn-frontend`, where it is installed, has the other. It
          keeps a part of dq for each block of keys, S^2 / 256 rows a head. So it runs for one sequence at a time, whose bits then
          don't depend on the others, and for a few thousand tokens only, unless a caller names it.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.ops.attention.backward import BackwardCall
from onepass.ops.attention.formula import AttentionOptions, contiguous_tokens
from onepass.ops.attention.forward import lse_size
from onepass.ops.attention.scores import LOG2E
from onepass.runtime.op import Reason

# From how many tokens on it is faster than our kernels, by the size of heads (docs/notes/0014-attention.md).
_FORWARD_FROM = {64: 2048, 128: 512}  # its forward alone
WIDEST = 256  # heads that cuDNN takes; beyond, PyTorch has one kernel, whose backward takes ten times its forward (note 0014)
_WIDE = ((192, 128), (256, 256))  # heads of more than 128 that PyTorch's backward of it is for
_NARROW, _ALL_FROM = 64, 2048  # forward and backward, for heads of up to 64; wider heads: always
_BACKWARD_SIZE, _BACKWARD_HEADS, _BACKWARD_FROM = 128, 32, 2048  # of heads, how many at least, and tokens, a multiple of _STEP
_WORKSPACE = 1 << 30  # bytes, of a backward at most
_STEP = 128  # of tokens: it plans 50 ms for each new shape, so it gets only shapes that are likely to come again
_INT32_MAX = 0x7FFFFFFF  # PyTorch keeps strides as int in the key of a plan
_WITHOUT_BUG = 91500  # cuDNN's version after which PyTorch prefers it; up to it some lengths went wrong


def _cudnn_version() -> int:
    """cuDNN's version, or 0. torch.backends.cudnn.version() would start a context on every GPU, which no fork may then use."""
    cudnn = getattr(torch._C, "_cudnn", None)
    return 0 if cudnn is None else int(cudnn.getVersionInt())


_CUDNN = _cudnn_version()  # a constant, which a compiler can fold


def has_cudnn(x: Tensor, newest: int) -> bool:
    """Whether PyTorch would take cuDNN's attention on x's GPU, of an architecture from Hopper's to `newest`.

    `torch.backends.cuda.enable_cudnn_sdp(False)` turns it off. A compiler can fold everything here; torch.backends.cuda and
    get_device_capability would break its graph.
    """
    if not x.is_cuda or not torch._C._get_cudnn_sdp_enabled() or _CUDNN <= _WITHOUT_BUG:
        return False
    properties: Any = torch.cuda.get_device_properties(x.device)
    return 9 <= int(properties.major) <= newest


def forward_by_cudnn(qkv: Tensor, D: int) -> bool:
    """Whether `attend_by_cudnn` takes the parts of this projection and was measured to be faster than `attend`.

    For plain causal attention, without documents, windows, softcaps and sinks.
    """
    S = qkv.shape[1]
    if S % _STEP or _FORWARD_FROM.get(D, S + 1) > S or not has_cudnn(qkv, newest=9):
        return False
    return _strides_fit(qkv)


def _strides_fit(qkv: Tensor) -> bool:
    return sum((size - 1) * stride for size, stride in zip(qkv.shape, qkv.stride(), strict=True)) <= _INT32_MAX


def all_by_cudnn(qkv: Tensor, D: int) -> bool:
    """Whether PyTorch's attention is faster forward and backward. Its backward sums in no fixed order."""
    return D <= WIDEST and has_cudnn(qkv, newest=10) and (D > _NARROW or qkv.shape[1] >= _ALL_FROM)


def parts_by_cudnn(qkv: Tensor, D: int, V: int) -> bool:
    """Whether PyTorch's ops of cuDNN, which look at nothing, take what is faster by `all_by_cudnn`. V: the width of values.

    On Blackwell PyTorch has others for wide heads.
    """
    sizes = max(D, V) <= 128 or (D, V) in _WIDE
    return sizes and qkv.shape[1] > 1 and has_cudnn(qkv, newest=9) and _strides_fit(qkv)


def attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Like `attend`. PyTorch lays y out as q lies."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, True, scale=options.scale)
    S = q.shape[2]
    return contiguous_tokens(y.transpose(1, 2), options), F.pad(lse.view(q.shape[:3]).mul_(LOG2E), (0, lse_size(S) - S))


def attend_backward_in_any_order(call: BackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, [B, S, heads, D] each, of plain causal attention. Their last bits differ from run to run.

    PyTorch finds cuDNN's plan by the strides of q, k and v alone, so dy must lie as y does.
    """
    tensors = (x.transpose(1, 2) for x in (call.dy.contiguous(), call.q, call.k, call.v, call.y))
    S = call.q.shape[1]
    natural, seed = (call.lse[..., :S] / LOG2E)[..., None], torch.empty((), dtype=torch.int64, device=call.q.device)  # of dropout
    made = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        *tensors, natural, seed, seed, None, None, None, S, S, 0.0, True, scale=call.options.scale
    )
    dq, dk, dv = (x.transpose(1, 2).contiguous() for x in made)
    return dq, dk, dv


# ---- backward, through nvidia-cudnn-frontend ----

_DETERMINISTIC_FROM = 91900  # cuDNN's version that this was tried on
_state = threading.local()  # a handle belongs to one thread at a time


@lru_cache(1)
def has_frontend() -> bool:
    return find_spec("cudnn") is not None


def backward_by_cudnn(qkv: Tensor, D: int, options: AttentionOptions) -> bool:
    """Whether `attend_backward_by_cudnn` takes this projection's call and was measured to be faster than ours.

    For plain causal attention, without documents, windows, softcaps and sinks. Ours is faster where heads share keys.
    """
    S, heads = qkv.shape[1], options.heads
    if D != _BACKWARD_SIZE or not _BACKWARD_HEADS <= heads == options.groups or S % _STEP or S < _BACKWARD_FROM:
        return False
    fits = heads * (S * S // 256) * D * 4 <= _WORKSPACE
    return fits and _CUDNN >= _DETERMINISTIC_FROM and has_cudnn(qkv, newest=9) and has_frontend()


def cudnn_refuses(qkv: Tensor, D: int) -> Reason:
    """Why cuDNN's kernels can't take a plain causal call on a GPU, forward and backward, or None."""
    major, minor = torch.cuda.get_device_capability(qkv.device)
    if major != 9:
        return f"the GPU is {major}.{minor}, and cuDNN's backward in a fixed order was tried on Hopper, 9.0"
    if _CUDNN < _DETERMINISTIC_FROM:
        return f"cuDNN's version is {_CUDNN}, and its backward in a fixed order was tried from {_DETERMINISTIC_FROM} on"
    if not has_frontend():
        return "nvidia-cudnn-frontend is not installed (pip install 'onepass[cudnn]')"
    if not has_cudnn(qkv, newest=9):
        return "torch.backends.cuda.enable_cudnn_sdp(False) is in force"
    if D > 128:
        return f"heads of {D} are wider than 128"
    if qkv.shape[1] % 4:
        return f"{qkv.shape[1]} tokens are no multiple of 4"
    return None if _strides_fit(qkv) else "qkv is so large that its strides take more than 32 bits"


def attend_backward_by_cudnn(call: BackwardCall, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write the gradients dq, dk and dv, whose last strides are 1."""
    q, k, v, y, dy = call.q, call.k, call.v, call.y, call.dy
    natural = (call.lse / LOG2E)[..., None]
    plans, handle = _plans_of(q.device)
    for b in range(q.shape[0]):
        tensors = [x[b : b + 1].transpose(1, 2) for x in (q, k, v, y, dy, *gradients)] + [natural[b : b + 1]]
        kind = call.options.scale, call.options.in_order
        key = q.dtype, *kind, q.shape[1:], *(t.stride()[1:] for t in tensors)
        if key not in plans:
            plans[key] = _plan(handle, tensors, *kind)
        _run(plans[key], handle, tensors)


def _plans_of(device: torch.device) -> tuple[dict[Any, Any], Any]:
    """Return this thread's plans for a GPU, and a handle with the current stream."""
    import cudnn

    known = _state.__dict__.setdefault("devices", {})
    with torch.cuda.device(device):
        if device not in known:
            known[device] = {}, cudnn.create_handle()
        cudnn.set_stream(handle=known[device][1], stream=torch.cuda.current_stream().cuda_stream)
    return known[device]  # type: ignore[no-any-return]


def _plan(handle: Any, tensors: list[Tensor], scale: float, in_order: bool) -> tuple[Any, list[Any]]:
    """Return a graph of the backward, and its tensors in the order of `tensors`."""
    import cudnn

    fp32 = cudnn.data_type.FLOAT
    dtype = cudnn.data_type.BFLOAT16 if tensors[0].dtype == torch.bfloat16 else cudnn.data_type.HALF
    graph = cudnn.pygraph(io_data_type=dtype, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)

    def given(name: str, t: Tensor) -> Any:
        kind = fp32 if t.dtype == torch.float32 else dtype
        return graph.tensor(name=name, dim=tuple(t.shape), stride=tuple(t.stride()), data_type=kind)

    q, k, v, y, dy, *gradients, lse = tensors
    inputs = {name: given(name, t) for name, t in {"q": q, "k": k, "v": v, "o": y, "dO": dy, "stats": lse}.items()}
    made = graph.sdpa_backward(
        name="attention", **inputs, attn_scale=scale, use_causal_mask=True, use_deterministic_algorithm=in_order
    )
    for x, t in zip(made, gradients, strict=True):
        x.set_output(True).set_dim(tuple(t.shape)).set_stride(tuple(t.stride())).set_data_type(dtype)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    *before, stats = inputs.values()
    return graph, [*before, *made, stats]


def _run(plan: tuple[Any, list[Any]], handle: Any, tensors: list[Tensor]) -> None:
    graph, places = plan
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=tensors[0].device)
    graph.execute(dict(zip(places, tensors, strict=True)), workspace, handle=handle)
