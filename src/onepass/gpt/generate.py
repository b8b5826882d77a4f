"""Generation of tokens: a prompt in one pass, then a token a step, by the blocks that train and a cache of keys and values.

A step's hidden states come from the same norms, products and attention as in training. Under `onepass.batch_invariant()` they
have the same bits, and so have the log-probabilities of the tokens that were chosen, which the training loss's head computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepass.gpt.cache import KeyValueCache
from onepass.ops.attention.formula import AttentionOptions
from onepass.runtime.checks import check_number, check_whole
from onepass.runtime.documents import check_documents, ranges_of
from onepass.runtime.sharding import has_dtensor

_STEPS = 16  # after so many the host asks whether all sequences have ended
_UNITS = 2.0**40  # in which top_p counts the likeliest token; a vocabulary of 2^22 has at most 2^62
_COLDEST = 2.0**-100  # a temperature by which 0 divided is 0 in fp32
Generators = torch.Generator | Sequence[torch.Generator] | None


class Generated(NamedTuple):
    """What `Model.generate` returns. After a sequence's end its tokens repeat the last, and its log-probabilities are 0."""

    tokens: Tensor  # int64 [sequences, new tokens of the longest], without the prompts
    lengths: Tensor  # int64 [sequences]: how many there are, the token that ended a sequence among them
    log_probs: Tensor | None  # fp32 [sequences, new tokens], where they were asked for


class Sampling(NamedTuple):
    """How a token is chosen, as `Model.generate` has it."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: Generators = None

    def check(self, sequences: int) -> None:
        """Raise where an option is wrong."""
        check_number("temperature", self.temperature)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, but is {self.temperature}")
        if self.top_k is not None:
            check_whole("top_k", self.top_k, 1)
        if self.top_p is not None:
            check_number("top_p", self.top_p)
            if not 0 < self.top_p <= 1:
                raise ValueError(f"top_p must be above 0 and at most 1, but is {self.top_p}")
        if isinstance(self.generator, Sequence) and len(self.generator) != sequences:
            raise ValueError(f"generator must be one, or one for each of {sequences} sequences, but is {len(self.generator)}")

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token of each row of logits [sequences, vocabulary], and whether the row's highest logit is finite.

        Rows are only added up as integers, as how a GPU adds floats depends on their number and place.
        """
        highest, likeliest = logits.max(-1, keepdim=True)
        finite = highest.isfinite()[:, 0]
        if self.temperature == 0:
            return likeliest[:, 0], finite
        shares = ((logits.float() - highest.float()) / max(self.temperature, _COLDEST)).exp()  # of what is likeliest
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            shares = shares.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], 0.0)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = shares.sort(descending=True, stable=True)
            units = (ordered * _UNITS).long()
            sums = units.cumsum(-1)
            cut = (sums - units).double() >= self.top_p * sums[:, -1:].double()  # what more probable tokens have together
            shares = shares.masked_fill(cut.scatter(1, order, cut), 0.0)
        return (shares / self._noise(shares)).argmax(-1), finite  # each with its probability, as torch.multinomial does it

    def _noise(self, like: Tensor) -> Tensor:
        if not isinstance(self.generator, Sequence):
            return torch.empty_like(like).exponential_(generator=self.generator)
        rows = zip(like, self.generator, strict=True)
        return torch.stack([torch.empty_like(row).exponential_(generator=generator) for row, generator in rows])


def stops_of(stop_tokens: Any) -> tuple[int, ...]:
    """Return the tokens that end a sequence, of one, of several or of None."""
    if stop_tokens is None:
        return ()
    several = isinstance(stop_tokens, Iterable) and getattr(stop_tokens, "ndim", 1) != 0
    try:
        return tuple(map(index, stop_tokens if several else (stop_tokens,)))
    except TypeError:
        raise TypeError(f"stop_tokens must be a whole number, whole numbers or None, but is {stop_tokens!r}") from None


def prompts_of(tokens: Tensor | Sequence[Tensor], cu_seqlens: Tensor | None) -> list[Tensor]:
    """Return the prompts, one-dimensional, of a batch, of documents in one row, or of a list."""
    if isinstance(tokens, Tensor):
        if tokens.dim() != 2:
            raise ValueError(f"tokens must have shape [sequences, tokens], or be a list of them, but has {tuple(tokens.shape)}")
        prompts = [*tokens]
        if cu_seqlens is not None:
            check_documents(cu_seqlens, tokens, tuple(tokens.shape), "tokens")
            prompts = [tokens[0, first:end] for first, end in ranges_of(cu_seqlens)]
    elif cu_seqlens is not None:
        raise ValueError("cu_seqlens must be None where tokens is a list")
    else:
        prompts = [*tokens]
    for at, prompt in enumerate(prompts):
        if not isinstance(prompt, Tensor) or prompt.dim() != 1 or not len(prompt) or prompt.is_floating_point():
            what = f"shape {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else f"a {type(prompt).__name__}"
            raise ValueError(f"prompt {at} must be at least one whole number in one dimension, but is {what}")
    if not prompts:
        raise ValueError("tokens must have at least one prompt, but has none")
    return prompts


def _check_model(model: Any, longest: int) -> None:
    c = model.config
    if c.tensor_model_parallel_size > 1:
        raise ValueError(f"generate needs the whole model, but tensor_model_parallel_size is {c.tensor_model_parallel_size}")
    if not model.first or model.output_layer is None:
        raise ValueError("generate needs the whole model, but this is a pipeline stage of it")
    divided = next((name for name, parameter in model.named_parameters() if has_dtensor(parameter)), None)
    if divided is not None:
        raise ValueError(f"generate needs the whole model, but its {divided} is a DTensor, of which a rank has a part")
    if model.training and (c.hidden_dropout or c.attention_dropout):
        raise ValueError("generate drops nothing: call model.eval() first, as the configuration has dropout")
    if longest > c.max_position_embeddings:
        raise ValueError(
            f"max_new_tokens must leave sequences of at most max_position_embeddings, {c.max_position_embeddings}, "
            f"but the longest would have {longest}"
        )


def _hidden_states(model: Any, tokens: Tensor, cache: KeyValueCache) -> Tensor:
    """Return what the head reads of a step's tokens, which are put in the cache."""
    h, pending = model.embedding(tokens, cache.positions), None
    tables = None if model.rotary is None else model.rotary(tokens.shape[1], cache.positions)
    for block, layer in zip(model.layers.values(), cache.layers, strict=True):
        h, pending, _ = block(h, pending, tables, None, layer)
    normed: Tensor = model.final_layernorm(h) if pending is None else model.final_layernorm(h, pending)[0]
    return normed


@torch.no_grad()
def generate(
    model: Any, prompts: list[Tensor], max_new_tokens: int, sampling: Sampling, stop_tokens: Sequence[int],
    return_log_probs: bool,
) -> Generated:  # fmt: skip
    """`Model.generate`, of arguments that are brought into one form."""
    check_whole("max_new_tokens", max_new_tokens, 1)
    sampling.check(len(prompts))
    lengths = [len(prompt) for prompt in prompts]
    _check_model(model, max(lengths) + max_new_tokens)
    c, device, head = model.config, prompts[0].device, model.output_layer
    options = AttentionOptions(c.num_attention_heads, c.query_groups, c.rotary_interleaved, c.head_size**-0.5)
    cache = KeyValueCache(options, len(model.layers), lengths, max(lengths) + max_new_tokens - 1, device)
    weight = model.embedding.word_embeddings.weight if c.tied else None
    h = _hidden_states(model, torch.cat(prompts)[None], cache)
    h = h[0, cache.ends.cumsum(0) - 1][:, None]
    stops = torch.tensor([*stop_tokens], dtype=torch.int64, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    lost = ended
    chosen = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    states, tokens, counts = [], [], torch.zeros_like(chosen)
    for step in range(max_new_tokens):
        if step:
            cache.advance()
            h = _hidden_states(model, chosen[:, None], cache)
        token, finite = sampling.choose(head.logits(h, weight)[:, 0])
        lost = lost | ~(finite | ended)
        chosen = torch.where(ended, chosen, token)
        if return_log_probs:
            states.append(h)
        tokens.append(chosen)
        counts += ~ended
        if stop_tokens:
            ended = ended | torch.isin(chosen, stops)
            if step % _STEPS == _STEPS - 1 and bool((ended | lost).all()):
                break
    if lost.any():
        raise RuntimeError(
            f"the highest logit must be finite, but in sequences {lost.nonzero().flatten().tolist()} it is NaN or inf"
        )
    longest = int(counts.max())
    made, log_probs = torch.stack(tokens[:longest], 1), None
    if return_log_probs:
        stats = head(torch.cat(states[:longest], 1), made, weight=weight, reduction="none", return_stats=("log_prob",))[1]
        log_probs = stats.log_prob.masked_fill(torch.arange(longest, device=device) >= counts[:, None], 0.0)
    return Generated(made, counts, log_probs)
