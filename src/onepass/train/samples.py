"""Texts that the model writes: each goes on from a few tokens of the text that it wasn't trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.train.text import Tokens

_PROMPT = 24  # tokens
_TEMPERATURE, _BEST = 0.8, 50  # drawn among so many of the likeliest tokens


class TextSample(NamedTuple):
    prompt: str
    written: str


@torch.no_grad()
def write(
    logits: Callable[[Tensor], Tensor], tokens: Tokens, count: int, length: int, longest: int, seed: int, device: torch.device
) -> list[TextSample]:
    """logits: of the last of the tokens [count, any], [count, vocabulary]. longest: tokens that it takes at once."""
    generator = torch.Generator().manual_seed(seed)
    text = _prompts(tokens, count, generator).to(device)
    start = text.shape[1]
    for _ in range(length):
        text = torch.cat([text, _drawn(logits(text[:, -longest:]), tokens.vocab_size, generator)], 1)
    decode = tokens.tokenizer.decode
    return [TextSample(decode(row[:start].tolist()), decode(row[start:].tolist())) for row in text]


def _prompts(tokens: Tokens, count: int, generator: torch.Generator) -> Tensor:
    import numpy

    starts = torch.randint(len(tokens.valid) - _PROMPT, (count,), generator=generator).tolist()
    return torch.from_numpy(numpy.stack([tokens.valid[at : at + _PROMPT] for at in starts]).astype(numpy.int64))


def _drawn(logits: Tensor, there: int, generator: torch.Generator) -> Tensor:
    """[count, 1]. there: tokens that the tokenizer knows; the vocabulary may be larger."""
    best = (logits[:, :there].float().cpu() / _TEMPERATURE).topk(min(_BEST, there), -1)
    chosen = torch.multinomial(best.values.softmax(-1), 1, generator=generator)
    return best.indices.gather(1, chosen).to(logits.device)
