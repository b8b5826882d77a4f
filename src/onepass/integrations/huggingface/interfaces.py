"""The interface by which a module's code calls attention: `onepass.attention` where a marker says what tokens see.

The stack of layers passes the marker in place of a mask (masks.py): `NOTHING`, or the documents' boundaries. A call with a mask,
or with none, goes to the implementation that the model is configured for. q, k and v are copied into one tensor: a read and a
write of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.integrations.huggingface.context_parallel import spread_of
from onepass.integrations.huggingface.documents import chunk_count, chunks_of
from onepass.integrations.huggingface.probe import close
from onepass.integrations.huggingface.query_factors import QueryFactor
from onepass.ops.attention.attention import attention
from onepass.ops.attention.attention import unsupported as attention_unsupported
from onepass.ops.attention.by_cudnn import WIDEST
from onepass.ops.attention.formula import AttentionOptions, attention_formula

INTERFACES = "ALL_ATTENTION_FUNCTIONS"
NOTHING = torch.ones(1, 1, 0, 0, dtype=torch.bool, device="cpu")  # the marker of whole rows; no real mask has this shape
_KNOWN = frozenset(  # arguments of an interface
    ("dropout", "scaling", "softcap", "s_aux", "sliding_window", "is_causal", "position_ids")
)


def marker_of(cu_seqlens: Tensor) -> Tensor:
    """Return the marker of documents: their boundaries, in a shape and of a type that no mask has."""
    return cu_seqlens.view(-1, 1, 1, 1)


def masks_nothing(mask: Any) -> bool:
    """Whether the mask is NOTHING, or a copy on another device."""
    return isinstance(mask, Tensor) and mask.shape == NOTHING.shape


def is_marker(mask: Any) -> bool:
    """Whether the mask is a marker: each token sees those before it, of its row or document, in the layer's window."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return False
    return masks_nothing(mask) or (mask.dtype == torch.int32 and mask.shape[1:] == (1, 1, 1) and mask.shape[0] > 1)


def documents_of(marker: Tensor) -> Tensor | None:
    """Return the boundaries, or None for whole rows."""
    return None if masks_nothing(marker) else marker.view(-1)


def backend_of(qkv: Tensor, heads: int, groups: int, cu_seqlens: Tensor | None, gated: bool = False) -> str | None:
    """Return PyTorch's backend where the kernels can't take this call, else None. masks.py sends no such documents on a GPU."""
    return None if attention_unsupported(qkv, heads, groups, cu_seqlens, gated) is None else "torch"


@dataclass(frozen=True)
class KeyRange:
    """How far a layer's queries see within a row or document."""

    window: int | None = None  # so many keys, its own and those before it
    chunk: int | None = None  # keys from the last multiple of this on

    def hides(self, tokens: int) -> bool:
        """Whether it hides anything of so many."""
        return min(size for size in (self.window, self.chunk, tokens) if size is not None) < tokens

    def of(self, marker: Any, x: Tensor, tokens: int) -> tuple[Tensor | None, int | None]:
        """Return the boundaries of documents, or None for whole rows, and the window, or None for one that hides nothing.

        x: has the rows first, and the device of the result.
        """
        documents = None if marker is None else documents_of(marker)
        if marker is None or not self.hides(tokens if documents is None else x.shape[0] * tokens):
            return documents, None
        if self.chunk is None:
            return documents, self.window
        return chunks_of(documents, x.shape[0], tokens, self.chunk, x.device), None

    def count(self, documents: Tensor | None, rows: int, tokens: int) -> int | None:
        """Return how many documents there are then, or None for whole rows."""
        if self.chunk is not None and self.hides(tokens if documents is None else rows * tokens):
            return chunk_count(documents, rows, tokens, self.chunk)
        return None if documents is None else documents.shape[0] - 1


@dataclass(frozen=True)
class InterfaceCall:
    """How a module's code calls its interface, whose function computes what `onepass.attention` does."""

    by: str  # the implementation that was compared: "sdpa", "eager" or "onepass"
    scale: float | None
    softcap: float | None
    sinks: bool
    width: int  # of q's heads
    factor: QueryFactor | None = None  # which its queries have by their positions

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and not self.sinks


class Interfaces:
    """Stands in for transformers' ALL_ATTENTION_FUNCTIONS in the globals of a module's code."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = self._stock.get_interface(name, default)

        def call(module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, *args: Any, **options: Any) -> Any:
            if spread_of(module, name) is not None:  # what a marker says has been checked
                window = module._onepass.reach.window
                options |= {} if window is None else {"sliding_window": window}
                return function(module, q, k, v, None if is_marker(attention_mask) else attention_mask, *args, **options)
            if not is_marker(attention_mask):
                return function(module, q, k, v, attention_mask, *args, **options)
            documents, window = module._onepass.reach.of(attention_mask, q, q.shape[2])
            plain = documents is None and window is None and name == "sdpa" and module._onepass.interface.is_plain
            if plain and (q.shape[3] <= WIDEST or not q.is_cuda):
                return function(module, q, k, v, None, *args, **options)
            if options.get("dropout"):
                raise RuntimeError(f"{type(module).__name__} drops attention, which apply has not found: please report the model")
            taken: dict[str, Any] = {name: options.get(name) for name in ("scaling", "softcap", "s_aux")}
            return attend_heads(q, k, v, documents, window=window, **taken), None

        return call


def attend_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    *,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Return y [B, tokens, heads, V] of q [B, heads, tokens, D]; k and v have the groups, and v may be narrower."""
    (B, heads, S, D), groups, V = q.shape, k.shape[1], v.shape[3]
    rows = (1, B * S) if documents is not None else (B, S)
    qkv = _joined(q, k, v).view(*rows, (heads + 2 * groups) * D)
    y = attention(
        qkv,
        heads,
        groups,
        scale=scaling,
        causal=causal,
        cu_seqlens=documents,
        window=window,
        softcap=softcap,
        sinks=s_aux,
        deterministic=False,
        backend=backend_of(qkv, heads, groups, documents),
    )
    return y.view(B, S, heads, D)[..., :V]


def _joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return one projection [B, S, heads, D]; values that are narrower end in zeros."""
    v = F.pad(v, (0, q.shape[3] - v.shape[3])) if v.shape[3] < q.shape[3] else v
    return torch.cat([x.transpose(1, 2) for x in (q, k, v)], 2)


# ---- recognition ----


class InterfaceRecorder:
    """Stands in for ALL_ATTENTION_FUNCTIONS, and keeps the calls of its functions."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        def record(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
            self.calls.append((default, module, q, k, v, options))
            return torch.zeros_like(q).transpose(1, 2), None

        return record


def find_interface(stock: Any, by: str, run: Callable[[Any], object]) -> InterfaceCall | None:
    """Return how a module's code calls attention, if that is what the formula computes; else None.

    `run` runs the module's code with other interfaces. `by` is the model's implementation.
    """
    recorder = InterfaceRecorder()
    run(recorder)
    if len(recorder.calls) != 1 or by not in ("sdpa", "eager", "onepass"):
        return None
    default, module, q, k, v, options = recorder.calls[0]
    if any(value is not None and value is not False for name, value in options.items() if name not in _KNOWN):
        return None
    if options.get("is_causal") is False:
        return None
    if q.dim() != 4 or k.shape[:3] != v.shape[:3] or not v.shape[3] <= q.shape[3] == k.shape[3] or q.shape[1] % k.shape[1]:
        return None
    (_, heads, S, D), groups = q.shape, k.shape[1]
    scale, softcap, sinks = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
    harmless = {"dropout": 0.0, **({"sliding_window": 2} if options.get("sliding_window") else {})}  # the mask has the window
    mask = torch.full((S, S), float("-inf"), dtype=q.dtype).triu(1)[None, None]
    try:
        attended = stock.get_interface(by, default)(module, q, k, v, mask, **{**options, **harmless})[0]
        call = AttentionOptions(heads, groups, False, D**-0.5 if scale is None else scale, softcap=softcap or 0.0)
        whole = attention_formula(_joined(q, k, v).flatten(2), None, None, call, None, sinks)
        expected = whole.unflatten(-1, (heads, D))[..., : v.shape[3]]
    except Exception:
        return None
    return InterfaceCall(by, scale, softcap, sinks is not None, D) if close(attended, expected, 1e-6) else None
