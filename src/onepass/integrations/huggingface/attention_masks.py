"""The masks of transformers' attn_implementation="onepass": markers of what tokens see, in place of [tokens, tokens].

Transformers asks the mask function once a forward and kind of layer. Causal and bidirectional rows, windows, padding and packed
documents are markers: small tensors, which models pass on as they pass on masks. All else gets sdpa's mask: caches, chunks,
images among text, padding with holes, packed rows of a model that is compiled whole.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.integrations.huggingface.documents import Refused, documents_of_padding, documents_of_rows
from onepass.ops.loss.kept_rows import can_count
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.documents import document_of


class Sight(NamedTuple):
    """What a query sees."""

    causal: bool
    window: int | None = None  # causal: how many keys, its own and those before; otherwise how many on each side
    documents: Tensor | None = None  # boundaries over all rows
    padded: bool = False  # the documents are three a row: hidden tokens, those that are kept, hidden ones

    def marker(self, device: torch.device | str) -> Tensor:
        """Return a tensor of int32, whose shape has all but the boundaries. No real mask has this type."""
        bounds = torch.empty(0, dtype=torch.int32, device=device) if self.documents is None else self.documents
        window = 1 if self.window is None else self.window + 2
        return bounds.view(-1, 1, 1, 1).expand(-1, 3 - self.causal, window, 2 + self.padded)

    def mask(self, rows: int, tokens: int, device: torch.device) -> Tensor | None:
        """Return a mask of bool, [rows or 1, 1, tokens or 1, tokens], or None where a query sees all keys.

        Where attention is not causal, and so may be of other states, padding hides keys from all queries.
        """
        at = torch.arange(tokens, device=device)
        ahead = at[None, :] - at[:, None]
        masks = [(ahead <= 0)[None, None]] if self.causal else []
        if self.window is not None:
            masks.append((ahead > -self.window if self.causal else ahead.abs() <= self.window)[None, None])
        if self.documents is not None:
            document = document_of(self.documents, rows * tokens).view(rows, 1, 1, tokens)
            if self.padded and not self.causal:
                masks.append(document % 3 == 1)
            else:
                masks.append(document == document.transpose(2, 3))
        mask = None
        for each in masks:
            mask = each if mask is None else mask & each
        return mask


def sight_of(mask: Any) -> Sight | None:
    """Return what a marker says, or None for anything else."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.dtype != torch.int32:
        return None
    bounds, kind, window, padded = mask.shape
    if kind not in (2, 3) or padded not in (2, 3):
        return None
    return Sight(kind == 2, None if window == 1 else window - 2, mask[:, 0, 0, 0] if bounds > 0 else None, padded == 3)


def onepass_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **options: Any
) -> Tensor | None:
    """Return a marker, or what transformers' sdpa gets: a mask, or None where it needs none."""
    from transformers.masking_utils import sdpa_mask

    if q_length == kv_length and not isinstance(q_offset, Tensor) and q_offset == kv_offset == 0:
        try:
            if (sight := _find_sight(batch_size, q_length, **options)) is not None:
                return sight.marker(options.get("device", "cpu"))
        except Refused:
            pass
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **options)


def _find_sight(
    rows: int,
    tokens: int,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Sight | None:
    """Return what these arguments of a mask function mean, or None where that is nothing which a marker says.

    transformers forbids to skip a mask where it has overlays, or where its caller must have one.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if use_vmap or (local_size is not None and getattr(config, "attention_chunk_size", None) is not None):
        return None
    if not allow_is_causal_skip and not allow_is_bidirectional_skip:
        positions = _packed_positions(mask_function)
        if positions is None:
            return None
        return Sight(True, local_size, documents_of_rows(positions, rows, tokens, positions.device, padding=False))
    stock = causal_mask_function if allow_is_causal_skip else bidirectional_mask_function
    if local_size is None and mask_function is not None and mask_function is not stock:
        return None
    sight = Sight(allow_is_causal_skip, local_size)
    if attention_mask is None:
        return sight
    if attention_mask.shape != (rows, tokens) or under_functorch():
        return None
    place = rows, tokens, attention_mask.device
    if can_count(attention_mask) and documents_of_rows(attention_mask, *place, padding=True) is None:
        return sight
    return sight._replace(documents=documents_of_padding(attention_mask), padded=True)


def _packed_positions(mask_function: Any) -> Tensor | None:
    """Return numbers that grow by one within a document alone, or None where a mask function does more than part packed rows.

    A compiler can't look into it.
    """
    if torch.compiler.is_compiling() or not _is_made_by("and_masks", mask_function):
        return None
    seen, *others = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    names = "causal_mask_function", "and_masks", "remap_positions_for_packed_sequence"  # the first two before transformers 5.24
    if len(others) != 1 or not any(_is_made_by(name, seen) for name in names):
        return None
    if not _is_made_by("packed_sequence_mask_function", others[0]):
        return None
    document: Tensor = inspect.getclosurevars(others[0]).nonlocals["packed_sequence_mask"]
    return document + torch.arange(document.shape[1], device=document.device)


def _is_made_by(name: str, mask_function: Any) -> bool:
    """Whether this is transformers' function of this name, or what it returns."""
    made_as = getattr(mask_function, "__module__", None), getattr(mask_function, "__qualname__", "").split(".")[0]
    return made_as == ("transformers.masking_utils", name)
