"""`onepass.attention` as one of transformers' attention implementations, by the name "onepass".

    import onepass.integrations.huggingface

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="onepass")
    model.set_attn_implementation("onepass")  # or later

Masks are markers of what tokens see (attention_masks.py). A call with a real mask, with fewer queries than keys or with a bias of
positions goes to sdpa, or with a softcap or sinks to the model's own eager code. q, k and v are copied into one tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.integrations.huggingface.attention_masks import Sight, onepass_mask, sight_of
from onepass.integrations.huggingface.context_parallel import spread_of
from onepass.integrations.huggingface.documents import Refused, documents_of_lengths, documents_of_rows, documents_unread
from onepass.integrations.huggingface.interfaces import attend_heads
from onepass.integrations.huggingface.rotation import globals_with
from onepass.ops.attention.attention import unsupported
from onepass.ops.loss.kept_rows import can_count
from onepass.runtime.backend import choose
from onepass.runtime.batch_invariance import refuse
from onepass.runtime.documents import are_readable, are_right

NAME = "onepass"
_EAGER = "eager_attention_forward"  # in the globals of a model's code
_SPARSE = ("indices", "block_indices", "sinks", "block_table")  # arguments of models' own kernels
_OF_ITSELF = frozenset(  # arguments of a forward that has no other states to attend to
    (
        "hidden_states", "attention_mask", "position_embeddings", "position_ids", "rotary_pos_emb", "cache", "past_key_values",
        "past_key_value", "cache_position", "use_cache", "output_attentions", "kwargs",
    )
)  # fmt: skip


def register() -> None:
    """Register the implementation and its masks with transformers, where that is installed."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError:  # `apply` takes models of one's own
        return
    if NAME not in ALL_ATTENTION_FUNCTIONS:  # a second copy of onepass, such as a test's mutant, doesn't take the first's place
        ALL_ATTENTION_FUNCTIONS.register(NAME, onepass_attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, onepass_mask)


def onepass_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return y [B, tokens, heads, D] of query [B, heads, tokens, D]; key and value have the groups.

    options: what else a model passes on, of which dropout, position_ids and the boundaries of documents are read. A window is the
    marker's, or without a mask sliding_window.

    Raises:
        ValueError: the call has something that neither `onepass.attention` nor sdpa computes, or documents in two ways.
    """
    _check_options(options)
    if (spread := spread_of(module, NAME)) is not None:
        spread.check_attention(NAME, None, query.shape[2])
    rows, tokens = query.shape[0], query.shape[2]
    taken: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is None and causal and 1 < tokens < key.shape[2]:  # a static cache's first call: the rest is empty
        key, value = key[:, :, :tokens], value[:, :, :tokens]
    aligned = key.shape[:1] == query.shape[:1] and key.shape[2] == tokens
    sight = sight_of(attention_mask)
    if sight is None and attention_mask is None and aligned:
        sight = Sight(causal)
        if causal and tokens > 1:  # as flash attention has them: Ulysses gives no masks
            documents = _documents_by_positions(options.get("position_ids"), rows, tokens, query.device)
            sight = sight._replace(window=options.get("sliding_window"), documents=documents)
    given = options.get("cu_seq_lens_q") is not None
    if sight is None:
        mask = _checked_mask(attention_mask)
        if given:
            packed = Sight(False, None, _documents_given(options, query, aligned))
            mask = _both(mask, packed.mask(rows, tokens, query.device))
        return _by_mask(module, query, key, value, mask, causal, position_bias, taken), None
    if not aligned:
        raise ValueError(
            f"key must have query's rows and tokens, {rows} and {tokens}, where attention_mask is {NAME}'s, "
            f"but has {key.shape[0]} and {key.shape[2]}"
        )
    if given:
        if sight.padded:
            raise ValueError("cu_seq_lens_q must not be given with an attention_mask that hides tokens")
        sight = sight._replace(documents=_documents_given(options, query, aligned))
    elif sight.documents is None and sight.causal and attention_mask is not None:
        positions = options.get("position_ids")
        if isinstance(positions, Tensor) and positions.shape == (1, tokens) and can_count(positions):
            sight = sight._replace(documents=_documents_by_positions(positions, rows, tokens, query.device))
    documents = sight.documents
    sizes = key.shape[-1] == query.shape[-1] >= value.shape[-1]
    if position_bias is None and sizes and _takes(module, query, key, sight):
        missing = query.shape[-1] - value.shape[-1]
        padded = F.pad(value, (0, missing)) if missing else value
        window = sight.window if sight.causal or sight.window is None else (sight.window, sight.window)
        y = attend_heads(query, key, padded, documents, causal=sight.causal, window=window, **taken)
        return (y[..., : value.shape[-1]] if missing else y), None
    plain = sight.causal and sight.window is None and documents is None
    mask = None if plain else sight.mask(rows, tokens, query.device)
    y = _by_mask(module, query, key, value, mask, sight.causal, position_bias, taken)
    return (y if documents is None else y.masked_fill(~are_right(documents, rows * tokens), torch.nan)), None


def _check_options(options: dict[str, Any]) -> None:
    if dropout := options.get("dropout"):
        raise ValueError(
            f'dropout of attention must be 0 with attn_implementation="{NAME}", but is {dropout}: set the configuration\'s '
            '(attention_dropout, attention_probs_dropout_prob, attn_pdrop) to 0, or take attn_implementation="sdpa"'
        )
    if options.get("output_attentions"):
        raise ValueError(f'output_attentions must be False with attn_implementation="{NAME}": take "eager", which has scores')
    for name in _SPARSE:
        if options.get(name) is not None:
            raise ValueError(f'{name} must be None with attn_implementation="{NAME}": this model asks for "eager" or "sdpa"')


def _checked_mask(mask: Any) -> Tensor | None:
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 4 and (mask.dtype == torch.bool or mask.is_floating_point())):
        return mask
    what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
    raise ValueError(
        f'attention_mask must be bool or floating, of four dimensions, with attn_implementation="{NAME}", but is {what}'
    )


def _both(mask: Tensor | None, seen: Tensor | None) -> Tensor | None:
    if mask is None or seen is None:
        return seen if mask is None else mask
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


# ---- documents ----


def _documents_given(options: dict[str, Any], query: Tensor, aligned: bool) -> Tensor:
    if not aligned:
        raise ValueError("cu_seq_lens_q must be None where there are more or fewer keys than queries")
    wrong = "cu_seq_lens_q and cu_seq_lens_k must be boundaries of documents in one row"
    if query.shape[0] != 1:
        raise ValueError(f"{wrong}, but there are {query.shape[0]}")
    try:
        return documents_of_lengths(options["cu_seq_lens_q"], options.get("cu_seq_lens_k"), query.device)
    except Refused as why:
        raise ValueError(f"{wrong}: {why}") from None


def _documents_by_positions(position_ids: Any, rows: int, tokens: int, device: torch.device) -> Tensor | None:
    """Return the boundaries in rows whose positions begin again, as transformers looks for them with flash attention.

    transformers' masks don't part documents where there is a cache. The host waits once for position_ids, which carry what was
    found to the next layer. In a graph it can't: there are empty documents then.
    """
    if not isinstance(position_ids, Tensor) or position_ids.shape not in ((1, tokens), (rows, tokens)):
        return None
    if not can_count(position_ids):
        return documents_unread(position_ids.to(device), rows, tokens)
    key = rows, tokens, device, None if position_ids.is_inference() else position_ids._version
    known = getattr(position_ids, "_onepass_documents", None)
    if known is None or known[0] != key:
        known = key, documents_of_rows(position_ids, rows, tokens, device, padding=False)
        if not position_ids.is_inference():  # else nobody can tell whether they have been written to since
            position_ids._onepass_documents = known  # type: ignore[attr-defined]
    return known[1]


# ---- who computes it ----


def _takes(module: Any, query: Tensor, key: Tensor, sight: Sight) -> bool:
    """Whether `onepass.attention` takes such documents without a mask of all tokens of the batch."""
    documents = sight.documents
    if documents is None:
        return True
    if not sight.causal and not _attends_to_itself(type(module).forward):  # queries at hidden places may be others' tokens
        return False
    if are_readable(documents):
        return True
    heads, groups = query.shape[1], key.shape[1]
    qkv = query.new_empty(1, 0, (heads + 2 * groups) * query.shape[-1])
    return unsupported(qkv, heads, groups, documents) is None and choose("attention", None, None) != "torch"


@lru_cache
def _attends_to_itself(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward has no argument for other states."""
    return _OF_ITSELF.issuperset(list(inspect.signature(forward).parameters)[1:])


# for the compiler, as experts_interface.py has it
_attends_to_itself._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _by_mask(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    position_bias: Tensor | None,
    taken: dict[str, Any],
) -> Tensor:
    """Return y by transformers' sdpa, or by the model's own eager code where there is a softcap or sinks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    refuse("attention of fewer queries than keys, or by a mask", "PyTorch's attention chooses kernels by the sizes of the batch")
    given = {name: value for name, value in (taken | {"position_bias": position_bias}).items() if value is not None}
    if "softcap" not in given and "s_aux" not in given:
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=causal, **given)[0]
    eager = globals_with(_EAGER, type(module).forward).get(_EAGER)
    if eager is None:
        raise ValueError(
            f"attention_mask must be None or {NAME}'s where there is a softcap or sinks, as {type(module).__name__} has no "
            f'{_EAGER}: take attn_implementation="eager"'
        )
    if mask is None and causal and query.shape[2] > 1:
        mask = Sight(True).mask(1, query.shape[2], query.device)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(~mask, torch.finfo(query.dtype).min)
    y: Tensor = eager(module, query, key, value, mask, **given)[0]
    return y
