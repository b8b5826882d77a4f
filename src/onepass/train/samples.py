"""Text that the model generates. Each sample continues a few tokens of the validation text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.train.packing import Documents
from onepass.train.text import Tokens

_PROMPT = 24  # tokens
_TEMPERATURE, _BEST = 0.8, 50  # top-k sampling


class TextSample(NamedTuple):
    prompt: str
    written: str


@torch.no_grad()
def write(
    logits: Callable[[Tensor], Tensor], tokens: Tokens, count: int, length: int, longest: int, seed: int, device: torch.device,
    documents: Documents | None = None,
) -> list[TextSample]:  # fmt: skip
    """Generate `length` tokens after each of `count` prompts.

    Args:
        logits: a function from tokens [count, any] to the logits after the last of them, [count, vocabulary].
        longest: the most tokens per row that `logits` takes.
        documents: those of the validation text. Prompts begin with them, and samples end where they do. By default prompts are
            any part of the text, and samples go on with the next document.
    """
    generator = torch.Generator().manual_seed(seed)
    text = _prompts(tokens, count, generator, documents).to(device)
    start = text.shape[1]
    for _ in range(length):
        text = torch.cat([text, _drawn(logits(text[:, -longest:]), tokens.vocab_size, generator)], 1)
    decode, rows = tokens.tokenizer.decode, text.tolist()
    if documents is not None:  # the model has seen no tokens after an end
        rows = [row[: row.index(tokens.end, start)] if tokens.end in row[start:] else row for row in rows]
    return [TextSample(decode(row[:start]), decode(row[start:])) for row in rows]


def _prompts(tokens: Tokens, count: int, generator: torch.Generator, documents: Documents | None) -> Tensor:
    import numpy

    starts: Any
    length, starts = _PROMPT, range(len(tokens.valid) - _PROMPT)
    if documents is not None:
        length = min(_PROMPT, int(documents.inputs.max()))
        starts = documents.starts[documents.inputs >= length]
    chosen = [int(starts[at]) for at in torch.randint(len(starts), (count,), generator=generator).tolist()]
    return torch.from_numpy(numpy.stack([tokens.valid[at : at + length] for at in chosen]).astype(numpy.int64))


def _drawn(logits: Tensor, there: int, generator: torch.Generator) -> Tensor:
    """Return the next tokens [count, 1]. `there`: how many tokens the tokenizer has, as the vocabulary may be larger."""
    best = (logits[:, :there].float().cpu() / _TEMPERATURE).topk(min(_BEST, there), -1)
    chosen = torch.multinomial(best.values.softmax(-1), 1, generator=generator)
    return best.indices.gather(1, chosen).to(logits.device)
