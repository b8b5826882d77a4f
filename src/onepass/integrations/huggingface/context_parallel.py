"""Whether other code has spread each sequence over ranks, so that a rank's attention alone would see its own tokens only.

    a ring   PyTorch's `context_parallel` (accelerate's cp_size) stands in for `F.scaled_dot_product_attention`
    Ulysses  DeepSpeed (accelerate's sp_size) wraps one of transformers' attention functions; verl wraps flash attention's

Attention then runs through them. What needs the tokens before it in another way, or documents that nobody parts, raises.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from onepass.ops.loss.kept_rows import can_count
from onepass.runtime.batch_invariance import refuse

_SDPA = torch._C._nn.scaled_dot_product_attention
RING = "PyTorch's context_parallel"
_VERL = "verl.utils.ulysses"


@dataclass(frozen=True)
class SequenceSpread:
    """Who spreads sequences over ranks, and which part is here, as far as it is known."""

    by: str
    rank: int | None = None
    size: int | None = None
    group: dist.ProcessGroup | None = None

    @property
    def is_ring(self) -> bool:
        return self.by == RING

    def check_attention(self, implementation: str, kept: int | None, tokens: int) -> None:
        """Raise where attention of this implementation, which sees `kept` keys or all, doesn't come by other ranks' tokens."""
        if implementation != "onepass":
            refuse(f"attention over ranks by {self.by}", "its kernels are not onepass's")
        if self.is_ring and implementation != "sdpa":
            raise ValueError(f'attn_implementation must be "sdpa" under {RING}, but is {implementation!r}')
        if self.by == _VERL:
            raise ValueError(
                "attn_implementation must be flash attention under verl's ulysses_sequence_parallel_size, wrapping no other, "
                f"but is {implementation!r}"
            )
        if kept is not None and (self.size is None or kept < tokens * self.size):
            raise NotImplementedError(
                f"attention over ranks by {self.by} sees whole sequences, but this layer's must see windows or chunks of {kept}"
            )

    def check_batch(self, x: Tensor, inputs: dict[str, Any], parts_documents: bool) -> None:
        """Raise where positions aren't those of one sequence a row, or a mask hides tokens before others, on whatever ranks.

        x: has the rows' tokens in its first two dimensions. parts_documents: whether attention parts them by their positions.
        """
        if inputs.get("cu_seq_lens_q") is not None:
            raise ValueError(f"cu_seq_lens_q must be None where {self.by} spreads sequences over ranks: give position_ids")
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        if not isinstance(positions, Tensor):
            raise ValueError(f"position_ids must be given where {self.by} spreads sequences over ranks: not each begins at 0")
        if not can_count(positions):
            raise RuntimeError(f"position_ids must be readable under {self.by}: not in a CUDA graph or a function transform")
        documents = holes = torch.zeros((), dtype=torch.bool, device=x.device)
        if not parts_documents:
            documents = (positions != self._order(x, positions)).any().to(x.device)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            documents, holes = self._agreed(documents, mask.to(x.device) != 0, x)
        has_documents, has_holes = torch.stack([documents, holes]).tolist()
        if has_documents:
            raise ValueError(
                f"position_ids must count one sequence a row under {self.by}, whose attention parts no documents, but they begin "
                "again, or elsewhere than this rank's tokens do"
            )
        if has_holes:
            raise ValueError(f"attention_mask must hide no token before one that it keeps under {self.by}, which reads no mask")

    def _agreed(self, documents: Tensor, kept: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether any rank has documents, and whether a whole mask hides tokens before others: on all ranks the same.

        A rank that raised by itself would leave the others to wait for it in attention.
        """
        if self.group is None or self.size is None or kept.shape != x.shape[:2]:  # a mask of whole rows is every rank's
            return documents, (kept[:, 1:] & ~kept[:, :-1]).any()
        rows, tokens = kept.shape
        whole = torch.zeros(rows, tokens * self.size + 1, dtype=torch.uint8, device=x.device)
        whole[:, self._order(x, kept)] = kept.to(torch.uint8)
        whole[:, -1] = documents
        dist.all_reduce(whole, dist.ReduceOp.MAX, self.group)
        return whole[:, -1].any(), (whole[:, 1:-1] > whole[:, :-2]).any()

    def _order(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the positions that this rank's tokens have: in a row, or a ring's first part and its mirror image."""
        tokens = torch.arange(x.shape[1], device=positions.device)
        if self.rank is None or self.size is None:
            return positions[..., :1] + tokens
        if not self.is_ring or not _is_balanced():
            return self.rank * x.shape[1] + tokens
        half = x.shape[1] // 2
        return torch.where(tokens < half, self.rank, 2 * self.size - 2 - self.rank) * half + tokens


def spread_of(module: nn.Module, implementation: str | None = None) -> SequenceSpread | None:
    """Return who spreads the module's sequences over ranks now, or None.

    implementation: of its attention, whose function other code may have wrapped; None asks for any.
    """
    if F.scaled_dot_product_attention is not _SDPA and _has_mesh():
        return SequenceSpread(RING) if torch.compiler.is_compiling() else SequenceSpread(RING, *_place(_mesh()))
    if not _is_elsewhere(implementation, module.training):
        return None
    if torch.compiler.is_compiling():
        return SequenceSpread("Ulysses")
    wrapper = _wrapper(implementation, module.training)
    return SequenceSpread(_VERL) if wrapper is None else wrapper


def check_whole_sequences(mixer: nn.Module) -> None:
    """Raise where a mixer would begin anew with each rank's tokens."""
    if (spread := spread_of(mixer)) is not None:
        raise NotImplementedError(
            f"{type(mixer).__name__} needs the tokens before its own, which {spread.by} has put on other ranks: train this model "
            "without context parallelism"
        )


def _mesh() -> DeviceMesh | None:
    """Return the mesh of the ring that stands in for PyTorch's attention, if it is one."""
    cells = getattr(F.scaled_dot_product_attention, "__closure__", None) or ()
    return next((each for cell in cells if isinstance(each := cell.cell_contents, DeviceMesh)), None)


def _place(mesh: DeviceMesh | None) -> tuple[int, int, dist.ProcessGroup]:
    assert mesh is not None
    return mesh.get_local_rank(), mesh.size(), mesh.get_group()


def _is_balanced() -> bool:
    """Whether the ring that stands in for PyTorch's attention has heads and tails of sequences on a rank, as by default."""
    options = getattr(F.scaled_dot_product_attention, "__globals__", {}).get("_cp_options")
    return bool(getattr(options, "enable_load_balance", True))


def _has_mesh() -> bool:
    return _mesh() is not None


def _is_elsewhere(implementation: str | None, training: bool) -> bool:
    """Whether Ulysses of this attention, or of any, is in force."""
    if _wrapper(implementation, training) is not None:
        return True
    verl = sys.modules.get(_VERL)
    spreads = verl is not None and verl.get_ulysses_sequence_parallel_world_size() > 1
    return spreads and (implementation is None or "flash" not in implementation)


def _wrapper(implementation: str | None, training: bool) -> SequenceSpread | None:
    """Return what DeepSpeed's wrapper of an attention function says of itself."""
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:  # `apply` takes models of one's own
        return None
    asked = ALL_ATTENTION_FUNCTIONS.values() if implementation is None else (ALL_ATTENTION_FUNCTIONS.get(implementation),)
    for function in asked:
        for cell in getattr(function, "__closure__", None) or ():
            ulysses = cell.cell_contents
            if hasattr(ulysses, "sp_rank") and (training or not getattr(ulysses, "disable_in_eval", False)):
                return SequenceSpread(function.__module__, ulysses.sp_rank, ulysses.world_size, ulysses.process_group)
    return None


# for the compiler: answered when a graph is made
_has_mesh._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_elsewhere._dynamo_marked_constant = True  # type: ignore[attr-defined]
