"""`apply(graph=True)`: calls of the model that train are CUDA graphs, one for forward and one for backward of each shape.

Trainer's loop stays as it is, with its accumulation, clipping and optimizer. Two things keep shapes few:

mask     A mask that hides nothing is left out: a graph can't look at it. One that hides the ends of rows is left out too, if the
         model is causal and these tokens have no label: no other token sees them.
length   Of a causal model each row is padded at its end, by tokens that have no label, to the next of eight lengths an octave.

Whether a model is causal is tried: another last token must leave all other tokens' logits as they are, to the bit, another first
one must not, and tokens without a label at the end must leave the loss. Where that can't be told, no row is changed.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.gradients.graph_surroundings import configs_of
from onepass.gradients.graphed_calls import GraphedCalls, fresh_casts
from onepass.integrations.huggingface.loss import ModelForward, has_known_loss
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import parameters_of
from onepass.kernels.philox import seeds_on_device
from onepass.runtime.units import counted

_log = logging.getLogger("onepass")
_GRAPHS = "_onepass_graphs"
_MASK = "attention_mask"
_IGNORED = -100
_PADDED = {"input_ids": 0, "labels": _IGNORED, _MASK: 0}  # [rows, tokens], and what pads them
_ITEMS = "num_items_in_batch"
_NOT_PADDED = {_ITEMS, "use_cache"}
_OF_DOCUMENTS = "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"
_LIMITS = "max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len"  # a config's
_LENGTH_ROTATES = "dynamic", "longrope"  # rotations that depend on the row's length
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
    patches.on_undo(graphs.calls.forget)
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
        return f"CUDA graphs of {counted(count, 'shape')}" if count else "CUDA graphs, of no shape yet"

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
        parameters = parameters_of(model)  # .1 ms, so not at each call

        @functools.wraps(inner.__func__)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            graphs: ModelGraphs | None = vars(self).get(_GRAPHS)  # none after undo, which other code's wrappers outlive
            if graphs is None or not self.training or not torch.is_grad_enabled():
                return inner.__func__(self, *args, **kwargs)
            if torch.compiler.is_compiling():
                leave_to_compiler()
                return inner.__func__(self, *args, **kwargs)
            return graphs(self, inner.__func__, parameters, args, kwargs)

        def leave_to_compiler() -> None:
            """Note why there are no graphs. A compiler calls it as it traces."""
            vars(model)[_GRAPHS].calls.leave("torch.compile around the model")

        leave_to_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result
        del forward.__wrapped__  # as of `inner`
        return forward


@dataclass
class ModelGraphs:
    """The graphs of one model. A copy of the model begins without."""

    calls: GraphedCalls = field(default_factory=lambda: GraphedCalls(_say))
    causal: bool | None = None  # None: not known yet
    asked: int = 0  # how often that was to be known
    changes: int = 0  # of the model, when these and the next three were found
    limit: int | None = None  # positions that the model has
    fixed: bool = False  # whether rows keep their length
    balances: bool = False  # whether the loss has a part of all tokens, which balances experts
    padded: bool = False  # whether that has been said

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelGraphs, ()

    def __call__(
        self,
        model: Any,
        forward: Callable[..., Any],
        parameters: dict[str, inspect.Parameter],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        absent = {name for name, parameter in parameters.items() if given.get(name) is None and parameter.default is None}
        given = {name: value for name, value in given.items() if name not in absent}
        if not self.calls.supports(model):
            return forward(model, *args, **kwargs)
        if self.changes != self.calls.changes:
            self._look_at(model)
        if (reason := _reason(model, given)) is not None:
            self.calls.leave(reason)
            return self.calls.run_without(forward, (model, *args), kwargs)
        few = self._of_few_shapes(model, forward, given)
        outputs = self.calls.run(model, functools.partial(forward, model), (), few)
        tokens = given["input_ids"].shape[1] if few.get("input_ids") is not given.get("input_ids") else None
        if tokens is not None and outputs.get("logits") is not None:
            outputs["logits"] = outputs["logits"][:, :tokens]
        return outputs

    def _look_at(self, model: Any) -> None:
        """Note what padding depends on, which goes over all modules. It stays until the model changes."""
        self.causal, self.asked, self.changes = None, 0, self.calls.changes
        self.limit, self.fixed = _positions(model), _has_more_results(model) or _length_counts(model)
        self.balances = any(getattr(config, "output_router_logits", False) for config in configs_of(model.modules()))

    def _of_few_shapes(self, model: Any, forward: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
        """Return inputs of fewer shapes with the same loss: without a mask where it hides nothing, and padded."""
        mask, labels, ids = given.get(_MASK), given.get("labels"), given.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return given
        if type(given.get(_ITEMS)) in (int, float) and has_known_loss(model):  # else each number is a shape
            given = {**given, _ITEMS: torch.tensor(given[_ITEMS], device=ids.device)}
        alike = labels is None or (isinstance(labels, Tensor) and labels.shape == ids.shape)
        shown = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None
        if shown is not None and alike:
            full, hides_ends = _look(shown, labels)
            if full or (hides_ends and self._ends_are_free(model, forward, given)):
                given = {name: value for name, value in given.items() if name != _MASK}
        length = _length(ids.shape[1], self.limit)
        if length == ids.shape[1] or labels is None or not alike or (_MASK in given and shown is None):
            return given
        if self.fixed or not self._ends_are_free(model, forward, given):
            return given
        if not self.padded:
            self.padded = True
            _log.info("graph: rows are padded to one of few lengths, %d tokens to %d and so on", ids.shape[1], length)
        return {name: _filled(name, value, length) for name, value in given.items()}

    def _ends_are_free(self, model: Any, forward: Callable[..., Any], given: dict[str, Any]) -> bool:
        """Whether tokens without a label may come at the ends of rows, and be seen there."""
        if not given.keys() <= {*_PADDED, *_NOT_PADDED} or self.balances or not has_known_loss(model):
            return False
        return self._is_causal(model, forward)

    def _is_causal(self, model: Any, forward: Callable[..., Any]) -> bool:
        if self.causal is None:
            self.asked += 1
            if self.asked & (self.asked - 1) == 0:  # 1, 2, 4, 8 and so on: weights that were zeros are trained by then
                self.causal = _is_causal(model, forward)
            if self.causal is False:
                _log.info("graph: rows are not padded, as the loss of this model's tokens may depend on later ones")
        return bool(self.causal)


def _say(reason: str) -> None:
    _log.warning("graph: calls with %s run without a CUDA graph", reason)


def _reason(model: Any, given: dict[str, Any]) -> str | None:
    """Return what only a call without a graph can do."""
    documents = [name for name in _OF_DOCUMENTS if name in given]
    if documents:
        return f"{documents[0]}, whose documents have to be counted,"
    makes_none = not model.can_generate() or ("_onepass" in vars(model) and "labels" in given)  # as there are no logits
    asked = given.get("use_cache")  # None stands for the config's
    asked = not makes_none and getattr(model.config, "use_cache", False) if asked is None else asked
    if asked or "past_key_values" in given:
        return "a cache, which use_cache=False leaves out,"
    return None


def _has_more_results(model: Any) -> bool:
    """Whether its results are more than a loss and logits, or have no names."""
    config = model.config
    return config.output_hidden_states or config.output_attentions or not getattr(config, "return_dict", True)


def _positions(model: Any) -> int | None:
    """Return how many positions the model has, where that is limited."""
    limits = [getattr(config, name, None) for config in configs_of(model.modules()) for name in _LIMITS]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _length(tokens: int, limit: int | None) -> int:
    """Return the length that rows of so many tokens get: no longer than the limit."""
    padded = padded_length(tokens)
    return padded if limit is None else max(tokens, min(padded, limit))


def _length_counts(model: Any) -> bool:
    """Whether a longer row changes tokens before its end: by NEFTune's noise, by statistics, or by positions."""
    for part in model.modules():
        own = vars(part)
        if "neftune_noise_alpha" in own or isinstance(part, nn.modules.batchnorm._BatchNorm):
            return True
        if "rope_type" in own and any(kind in repr(own["rope_type"]) for kind in _LENGTH_ROTATES):
            return True
    return False


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


def _is_causal(model: Any, forward: Callable[..., Any]) -> bool | None:
    """Whether no token sees a later one, in logits and in the loss: tried with a few tokens. None: no token sees another."""
    training = [part for part in model.modules() if part.training]
    try:
        count, vocabulary = min(_TRIED, _length(1, _positions(model))), model.get_input_embeddings().weight.shape[0]
        ids = torch.arange(count, device=model.device)[None] % vocabulary
        labels, kept = ids.clone(), count - count // 4
        labels[:, kept:] = _IGNORED
        model.eval()
        with torch.no_grad(), fresh_casts(model.device):
            call = functools.partial(forward, model, use_cache=False)
            first, last = ids.clone(), ids.clone()
            for other, place in ((first, 0), (last, -1)):
                other[:, place] = (ids[:, place] + 1) % vocabulary
            one, of_first, of_last = (call(input_ids=each).logits for each in (ids, first, last))
            loss, padded = (call(input_ids=ids[:, :n], labels=labels[:, :n]).loss.float() for n in (kept, count))
        if not torch.equal(one[:, :-1], of_last[:, :-1]) or not torch.allclose(loss, padded, rtol=1e-2):
            return False
        return None if torch.equal(one[:, 1:], of_first[:, 1:]) else True
    except Exception:  # a model that takes other inputs
        return False
    finally:
        for part in training:
            part.training = True
