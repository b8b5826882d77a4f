"""`apply(graph=True)`: calls of the model that train are CUDA graphs, one for forward and one for backward of each shape.

Trainer's loop stays as it is, with its accumulation, clipping and optimizer. Two things keep shapes few:

mask     A mask that hides nothing is left out: a graph can't look at it. One that hides the ends of rows is left out too, if the
         model is causal and these tokens have no label: no other token sees them.
length   Of a causal model each row is padded at its end, by tokens that have no label, to the next of eight lengths an octave.

Whether a model is causal is tried once: another last token must leave all other tokens' logits as they are, to the bit.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.gradients.graphed_calls import GraphedCalls
from onepass.integrations.huggingface.loss import ModelForward
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import parameters_of
from onepass.kernels.philox import seeds_on_device

_log = logging.getLogger("onepass")
_GRAPHS = "_onepass_graphs"
_MASK = "attention_mask"
_IGNORED = -100
_PADDED = {"input_ids": 0, "labels": _IGNORED, _MASK: 0}  # [rows, tokens], and what pads them
_NOT_PADDED = {"num_items_in_batch", "use_cache"}
_OF_DOCUMENTS = "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"
_LEAST_STEP, _STEPS_AN_OCTAVE = 16, 8
_TRIED = 16  # tokens


def add_graphs(model: nn.Module, patches: Patches) -> AppliedRow:
    """Let the model's calls in training be graphs. Return the report's row."""
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    name = next(name for name, part in model.named_modules() if part is causal)
    graphs = ModelGraphs()
    if not isinstance(vars(causal).get("forward"), ModelForward | None):
        raise ValueError(f"graph must be False for this {type(causal).__name__}, whose forward has been replaced, but is True")
    patches.set(causal, _GRAPHS, graphs)
    patches.set(causal, "forward", GraphedForward(causal), inert=True)
    patches.on_undo(seeds_on_device().undo)  # backward and recomputation draw as their forward did
    return AppliedRow(name, type(causal).__name__, "graph", by="CUDA graphs", match=GraphMatch(causal, graphs))


@dataclass(frozen=True)
class GraphMatch:
    """A model whose calls are graphs, for `apply`'s report."""

    module: nn.Module
    graphs: ModelGraphs

    @property
    def made_by(self) -> str:
        count = self.graphs.calls.graphs
        return f"CUDA graphs of {count} shape{'s' * (count > 1)}" if count else "CUDA graphs, of no shape yet"

    def change(self) -> None:
        return None

    def left(self) -> str | None:
        reasons = "; ".join(self.graphs.calls.reasons)
        return f"calls without: {reasons}" if reasons else None


class GraphedForward(ModelForward):
    """The model's forward, replayed where that is possible."""

    def _function(self, model: Any) -> Callable[..., Any]:
        there = vars(model).get("forward")
        inner = there if isinstance(there, ModelForward) else ModelForward(model)

        @functools.wraps(inner.__func__)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            graphs: ModelGraphs | None = vars(self).get(_GRAPHS)  # none after undo, which other code's wrappers outlive
            if graphs is None or not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return inner.__func__(self, *args, **kwargs)
            return graphs(self, inner.__func__, args, kwargs)

        del forward.__wrapped__  # as of `inner`
        return forward


@dataclass
class ModelGraphs:
    """The graphs of one model. A copy of the model begins without."""

    calls: GraphedCalls = field(default_factory=lambda: GraphedCalls(_say))
    causal: bool | None = None  # None: not tried yet
    padded: bool = False  # whether that has been said

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelGraphs, ()

    def __call__(self, model: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(parameters_of(model), args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        reason = _reason(model, given)
        if reason is not None:
            self.calls.leave(reason)
        if reason is not None or not self.calls.supports(model):
            return forward(model, *args, **kwargs)
        few = self._of_few_shapes(model, forward, given)
        outputs = self.calls.run(model, functools.partial(forward, model), (), few)
        tokens = given["input_ids"].shape[1] if few.get("input_ids") is not given.get("input_ids") else None
        if tokens is not None and outputs.get("logits") is not None:
            outputs["logits"] = outputs["logits"][:, :tokens]
        return outputs

    def _of_few_shapes(self, model: Any, forward: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
        """Return inputs of fewer shapes with the same loss: without a mask where it hides nothing, and padded."""
        mask, labels, ids = given.get(_MASK), given.get("labels"), given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return given
        alike = labels is None or (isinstance(labels, Tensor) and labels.shape == ids.shape)
        shown = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None
        if shown is not None and alike:
            full, hides_ends = _look(shown, labels)
            if full or (hides_ends and self._is_causal(model, forward)):
                given = {name: value for name, value in given.items() if name != _MASK}
        length = padded_length(ids.shape[1])
        if length == ids.shape[1] or labels is None or not alike or not given.keys() <= {*_PADDED, *_NOT_PADDED}:
            return given
        if (_MASK in given and shown is None) or _has_more_results(model) or not self._is_causal(model, forward):
            return given
        if not self.padded:
            self.padded = True
            _log.info("graph: rows are padded to one of few lengths, %d tokens to %d and so on", ids.shape[1], length)
        return {name: _filled(name, value, length) for name, value in given.items()}

    def _is_causal(self, model: Any, forward: Callable[..., Any]) -> bool:
        if self.causal is None:
            self.causal = _is_causal(model, forward)
            if not self.causal:
                _log.info("graph: rows are not padded, as the loss of this model's tokens may depend on later ones")
        return self.causal


def _say(reason: str) -> None:
    _log.warning("graph: calls with %s run without a CUDA graph", reason)


def _reason(model: Any, given: dict[str, Any]) -> str | None:
    """Return what only a call without a graph can do."""
    documents = [name for name in _OF_DOCUMENTS if name in given]
    if documents:
        return f"{documents[0]}, whose documents have to be counted,"
    cached = given.get("use_cache", "labels" not in given and getattr(model.config, "use_cache", False))
    if cached or "past_key_values" in given:
        return "a cache, which use_cache=False leaves out,"
    return None


def _has_more_results(model: Any) -> bool:
    """Whether its results are more than a loss and logits, or have no names."""
    config = model.config
    return config.output_hidden_states or config.output_attentions or not getattr(config, "return_dict", True)


def padded_length(tokens: int) -> int:
    """Return the length that rows of so many tokens get: eight an octave, so that an eighth at most is added from 128 on."""
    step = max(_LEAST_STEP, (1 << tokens.bit_length() - 1) // _STEPS_AN_OCTAVE)
    return -(-tokens // step) * step


def _filled(name: str, value: Any, length: int) -> Any:
    return F.pad(value, (0, length - value.shape[1]), value=_PADDED[name]) if name in _PADDED else value


def _look(mask: Tensor, labels: Tensor | None) -> tuple[bool, bool]:
    """Return whether the mask hides nothing, and whether it hides ends of rows without labels alone. It waits for the GPU."""
    kept = mask != 0
    if labels is None:
        return bool(kept.all()), False
    ends = (kept[:, :-1] | ~kept[:, 1:]).all() & (kept | (labels == _IGNORED)).all()
    full, hides_ends = torch.stack([kept.all(), ends]).tolist()
    return full, hides_ends


def _is_causal(model: Any, forward: Callable[..., Any]) -> bool:
    """Whether no token sees a later one, in logits and in the loss: tried with a few tokens, of which the last one changes."""
    if any(getattr(vars(part).get("config"), "output_router_logits", False) for part in model.modules()):
        return False  # the loss that balances experts has all tokens
    training = [part for part in model.modules() if part.training]
    try:
        vocabulary = model.get_input_embeddings().weight.shape[0]
        ids = torch.arange(_TRIED, device=model.device)[None] % vocabulary
        others = ids.clone()
        others[:, -1] = (ids[:, -1] + 1) % vocabulary
        model.eval()
        with torch.no_grad():
            one, other = (forward(model, input_ids=each, use_cache=False).logits[:, :-1] for each in (ids, others))
        return torch.equal(one, other)
    except Exception:  # a model that takes other inputs
        return False
    finally:
        for part in training:
            part.training = True
