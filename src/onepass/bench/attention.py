"""attention against its peers: causal attention of a fused QKV projection, whose queries and keys are rotated first.

Time      matrix products dominate, so times are relative to those of `rope + SDPA`, not to a copy's. `rope + SDPA` is onepass's
          rope and then PyTorch's attention with the kernel of its choice. To compute TFLOP/s: forward has 2 B heads D S^2 FLOPs,
          of the causal half, and backward 2.5 times as many.
Bytes     forward reads qkv and writes y; backward reads qkv, y and dy and writes dqkv.
Variants  `turned`, and `plain`, without rotation: all contenders run under torch.use_deterministic_algorithms, so that every run
          gives the same bits. `any order`: none does, and onepass has deterministic=False.
Shapes    sequences x tokens x heads x key and value heads x head dimension. The whole head dimension is rotated.
Gates     `gated`, in a fixed order or any: Qwen3.5's, beside each head's query. Peers read both by views and multiply as models.
Options   `documents` of 44 to 4096 tokens, `short documents` of 512, `window` of 1024 keys, `softcap` of 50. Only onepass is
          deterministic there. flex_attention has a block mask made before, varlen_attn takes the boundaries, and `dense SDPA`
          the documents of 512 as sequences.
Peers     rope + SDPA, flash, cuDNN: onepass's rope before PyTorch's attention, with the kernel of its choice or a given one.
          cuDNN's has no fixed order. torch.compile: eager rotation and PyTorch's attention. flash-attn 4: its public functions
          after onepass's rope, in the order of the case; where it is installed, onepass takes some of
          its kernels by itself, as `explain` says. cuDNN frontend: onepass's `backend="cudnn"`, which is cuDNN's forward and,
          through nvidia-cudnn-frontend, its backward in the order of the case. cuDNN flex: that package's own kernels in the
          CuTe DSL, after onepass's rope, in the order of the case; their mask is made once. They have no softcap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass.bench import attention_options as with_options
from onepass.bench.define import OpBench, Random, Shape, Shapes, bind, of_each
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result
from onepass.bench.peers import compiled, imported, needs_gpu
from onepass.ops.attention.attention import attention, attention_reference
from onepass.ops.attention.formula import parts_of
from onepass.ops.attention.rope import rope

_ANY = ", any order"
# notes cite the first two
_TURNED = [(4, 4096, 32, 8, 64), (16, 1024, 12, 12, 64), (2, 8192, 16, 4, 128), (4, 4096, 32, 32, 128)]
_ROW = [(1, 16384, 32, 8, 64), (1, 16384, 32, 8, 128)]
_OPTIONS = {"documents": _ROW, "short documents": _ROW, "window": _ROW[1:], "softcap": [(1, 4096, 8, 4, 256)]}
_GATED = [(2, 8192, 8, 2, 256)]
_GPU = {"turned": _TURNED, "turned" + _ANY: _TURNED, "plain": _TURNED[:1], "plain" + _ANY: _TURNED[:1]}
_GPU |= {"gated": _GATED, "gated" + _ANY: _GATED, **_OPTIONS}
_SHAPES = Shapes(_GPU, of_each(_GPU, [(1, 512, 8, 2, 64)]))


def _bytes_moved(variant: str, shape: Shape, size: int) -> tuple[int, int]:
    B, S, heads, groups, D = shape
    qkv, y = (B * S * each * D * size for each in (heads * (1 + variant.startswith("gated")) + 2 * groups, heads))
    return qkv + y, 2 * qkv + 2 * y


def _inputs(case: BenchCase, random: Random) -> Inputs:
    B, S, heads, groups, D = case.shape
    tensors = {"qkv": random.input(B, S, (heads * (1 + _is_gated(case)) + 2 * groups) * D)}
    if _is_turned(case):
        tensors |= random.rotations(S, D)
    if "documents" in case.variant:
        tensors["cu_seqlens"] = torch.tensor((0, *with_options.lengths_of(case)), device=random.device).cumsum(0).int()
    return Inputs(tensors, frozenset({"qkv"}), {"y": random(B, S, heads * D)}, row_elements=heads * S * S)  # the formula's scores


def _is_ordered(case: BenchCase) -> bool:
    return case.variant in ("turned", "plain", "gated")


def _is_gated(case: BenchCase) -> bool:
    return case.variant.startswith("gated")


def _is_turned(case: BenchCase) -> bool:
    return case.variant.startswith(("turned", "gated"))


def _layout(case: BenchCase) -> tuple[int, int, bool]:
    """Return what `parts_of` takes."""
    return *with_options.heads_of(case), _is_gated(case)


def _options(case: BenchCase) -> dict[str, Any]:
    heads, groups = with_options.heads_of(case)
    gated = {"gated": True} if _is_gated(case) else {}
    return {"heads": heads, "groups": groups, **gated, **with_options.options_of(case)}


def _keywords(case: BenchCase) -> tuple[str, ...]:
    return ("cu_seqlens",) if "documents" in case.variant else ("cos", "sin") if _is_turned(case) else ()


def _formula(case: BenchCase) -> Call:
    if case.variant in _OPTIONS:
        return with_options.formula(case, rounded=False)
    return bind(attention_reference, _options(case), _keywords(case))


def _baseline(case: BenchCase) -> Call:
    if case.variant not in _OPTIONS:
        return _after_rope(case)
    rounded, plain = with_options.formula(case, rounded=True), with_options.by_pytorch(case)
    return lambda qkv, *tensors: (rounded if qkv.is_cuda or case.variant == "softcap" else plain)(qkv, *tensors)


@contextmanager
def in_order(deterministic: bool) -> Iterator[None]:
    """Use deterministic algorithms, or not. PyTorch reads the setting at run time, in backward too."""
    had, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, changes nothing
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(had, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _ours(case: BenchCase) -> Call:
    return bind(attention, _options(case) | {"deterministic": not case.variant.endswith(_ANY)}, _keywords(case))


def _cudnn_frontend(case: BenchCase) -> Call:
    return bind(attention, _options(case) | {"deterministic": _is_ordered(case), "backend": "cudnn"}, _keywords(case))


# ---- PyTorch ----


def _with_gates(case: BenchCase, attend: Call) -> Call:
    """Return a call that multiplies what `attend` returns by the gates' sigmoid, where there are any."""

    def call(qkv: Tensor, *tensors: Tensor) -> Result:
        heads, D = case.shape[2], case.shape[4]
        gates = qkv[..., : 2 * heads * D].unflatten(-1, (heads, 2, D))[..., 1, :].flatten(-2)
        y: Any = attend(qkv, *tensors)
        return y * gates.sigmoid()  # type: ignore[no-any-return]

    return call if _is_gated(case) else attend


def _after_rope(case: BenchCase) -> Call:
    def call(qkv: Tensor, *tables: Tensor) -> Result:
        q, k, v = parts_of(qkv, *_layout(case))
        if tables:
            q, k = rope(q, k, *tables)
        return with_options.sdpa(q, k, v)

    return _with_gates(case, call)


def _by_kernel(case: BenchCase, kernel: SDPBackend) -> Call:
    function = _after_rope(case)

    def call(*tensors: Tensor) -> Result:
        with sdpa_kernel(kernel):
            return function(*tensors)

    return call


def _flash_attn_4(case: BenchCase) -> Call:
    names = "flash_attn_func", "flash_attn_varlen_func"
    of_rows, of_documents = (imported("flash_attn.cute", name) for name in names)
    ours = with_options.options_of(case)
    left = ours["window"] - 1 if "window" in ours else None
    options = {"causal": True, "window_size": (left, None if left is None else 0), "softcap": ours.get("softcap", 0.0)}
    options["deterministic"] = _is_ordered(case)

    def call(qkv: Tensor, *tensors: Tensor) -> Result:
        q, k, v = parts_of(qkv, *_layout(case))
        if "documents" in case.variant:
            at = {"cu_seqlens_q": tensors[0], "cu_seqlens_k": tensors[0]}
            y = of_documents(q[0], k[0], v[0], **at, **options)[0][None]
        else:
            if tensors:
                q, k = rope(q, k, *tensors)
            y = of_rows(q, k, v, **options)[0]
        return y.flatten(2)  # type: ignore[no-any-return]

    return _with_gates(case, call)


def _cudnn_flex(case: BenchCase) -> Call:
    create_mask_plan, function = (imported("cudnn.flex_attention", name) for name in ("create_mask_plan", "flex_attn_func"))
    plans: list[Any] = []

    def call(qkv: Tensor, *tensors: Tensor) -> Result:
        q, k, v = parts_of(qkv, *_layout(case))
        boundaries = {}
        if "documents" in case.variant:
            q, k, v = q[0], k[0], v[0]
            longest = max(with_options.lengths_of(case))
            boundaries = {f"{name}_{x}": at for x in "qk" for name, at in (("cu_seqlens", tensors[0]), ("max_seqlen", longest))}
        elif tensors:
            q, k = rope(q, k, *tensors)
        if not plans:
            seen = with_options.visible_keys(case).to(qkv.device)
            plans.append(create_mask_plan(seen, q, k, v, build_backward=True, **boundaries))
        y: Tensor = function(q, k, v, mask_plan=plans[0], deterministic=_is_ordered(case))
        return y.reshape(*qkv.shape[:2], -1)

    return _with_gates(case, call)


def _compiled(case: BenchCase) -> Call:
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = (torch.cat((table, table), -1).to(x.dtype).unsqueeze(-2) for table in (cos, sin))
        return x * cos + torch.cat((-second, first), -1) * sin

    def call(qkv: Tensor, *tables: Tensor) -> Result:
        q, k, v = parts_of(qkv, *_layout(case))
        if tables:
            q, k = rotated(q, *tables), rotated(k, *tables)
        return with_options.sdpa(q, k, v)

    return compiled(_with_gates(case, call))


def _peers(case: BenchCase) -> list[Contender]:
    lacks = needs_gpu()
    flash = Contender("flash-attn 4", _flash_attn_4, package="flash-attn 4", lacks=lacks)
    no_softcap = "no softcap" if case.variant == "softcap" else None
    flex = Contender("cuDNN flex", _cudnn_flex, package="cuDNN frontend", lacks=lacks or no_softcap)
    if case.variant in _OPTIONS:
        return [*with_options.peers(case), flash, flex]
    peers = [Contender("rope + SDPA", _after_rope)]
    if case.variant.endswith(_ANY):  # deterministic: only flash attention works, and SDPA chooses it
        peers.append(Contender("flash", partial(_by_kernel, kernel=SDPBackend.FLASH_ATTENTION)))
        peers.append(Contender("cuDNN", partial(_by_kernel, kernel=SDPBackend.CUDNN_ATTENTION), lacks=lacks))
    peers.append(Contender("cuDNN frontend", _cudnn_frontend, package="cuDNN frontend", lacks=lacks))
    return [*peers, flash, flex, Contender("torch.compile", _compiled, compiles=True)]


BENCH = OpBench(
    "attention", _SHAPES, (1, 64, 4, 2, 64), _bytes_moved, _inputs, _peers,
    options=_options, keywords=_keywords, ours=_ours, formula=_formula, baseline=_baseline,
    reference=lambda case: "flex_attention" if case.variant in _OPTIONS else "rope + SDPA",
    around=lambda case: in_order(_is_ordered(case)),
    without={
        "Transformer Engine": "takes cuDNN's or flash attention's",
        "Megatron-core": "takes Transformer Engine's",
    },
)  # fmt: skip
