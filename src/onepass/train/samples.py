"""Text that the model generates. Each sample continues a few tokens of the validation text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.train.text import Tokens

_PROMPT = 24  # tokens
_TEMPERATURE, _BEST = 0.8, 50  # top-k sampling


class TextSample(NamedTuple):
    prompt: str
    written: str


@torch.no_grad()
def write(
    logits: Callable[[Tensor], Tensor], tokens: Tokens, count: int, length: int, longest: int, seed: int, device: torch.device
) -> list[TextSample]:
    """Generate `length` tokens after each of `count` prompts.

    Args:
        logits: a function from tokens [count, any] to the logits after the last of them, [count, vocabulary].
        longest: the most tokens per row that `logits` takes.
    """
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
    """Return the next tokens [count, 1]. `there`: how many tokens the tokenizer has, as the vocabulary may be larger."""
    best = (logits[:, :there].float().cpu() / _TEMPERATURE).topk(min(_BEST, there), -1)
    chosen = torch.multinomial(best.values.softmax(-1), 1, generator=generator)
    return best.indices.gather(1, chosen).to(logits.device)
