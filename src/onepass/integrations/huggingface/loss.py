"""The loss of a transformers language model without logits: onepass.linear_cross_entropy inside the head.

In training mode with labels and gradients enabled, the model's forward stores the labels for the head. The head's forward
computes the loss, because its weight is whole there even under FSDP. It returns logits with no columns, with which the model's
own code continues. At the end that code calls the loss function, which returns the head's loss. So `outputs.logits` of such a
call has shape [..., 0], and there is no cache unless the caller asks for one. All other calls run the model's own code:
evaluation, no labels, no gradients, a head that was wrapped or hooked since, an unknown loss option.

Where the code makes a `CrossEntropyLoss` itself (T5, Whisper, BERT), it finds another of this name in its globals. It reshapes
logits by their number of columns and may add a bias, so until it returns they have all of them: one row of NaN.

What the model does with its logits before the loss is measured once, when the loss is replaced (loss_trial.py).
One difference is intended: if all labels are ignored, the mean and its gradients are 0, not NaN.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.integrations.huggingface.context_parallel import spread_of
from onepass.integrations.huggingface.linear_layers import is_conv1d, is_lora, lora_of
from onepass.integrations.huggingface.loss_trial import CROSS_ENTROPY, OPTIONS, LossCode, LossKind, find_loss_code
from onepass.integrations.huggingface.patches import AppliedRow, Patches, wrapped_by
from onepass.integrations.huggingface.probe import own_forward, parameters_of, thread
from onepass.integrations.huggingface.rotation import globals_with, with_globals
from onepass.integrations.huggingface.snapshot import SILENT, UNREAD, Reads, Snapshot, hooked, is_watched
from onepass.integrations.trl import runs_onepass
from onepass.ops.loss.head.plan import machine_speed
from onepass.ops.loss.kept_rows import KeptRows, kept_rows
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy
from onepass.product.lora import LoRA
from onepass.runtime.dispatch import under_autocast

_LEAVE = "leave this model's loss as it is (loss=False)"
_TRLS = "TRL's trainers run TRL's fused head, which onepass.integrations.trl.install() replaces"
_OURS_IN_TRL = "TRL's trainers run its fused head, by linear_cross_entropy too"
_ABOUT_CACHES = {"use_cache", "past_key_values", "cache"}
_CHUNK, _FROZEN_CHUNK = 4096, 1024  # tokens


@dataclass(eq=False)
class _HeadCallState:
    """A running call of the model that needs no logits."""

    labels: Tensor
    options: dict[str, Any]
    next_labels: Tensor  # of each hidden state: where the loss is causal, the next token's
    rows: KeptRows | None  # which of them have a loss, asked for before the model runs; None stands for all
    loss: Tensor | None = None  # set by the head
    bias: Tensor | None = None  # which the model's code adds to the head's products
    logits: Tensor | None = None  # of no columns, for the outputs; set by the head where the code returns other ones


@dataclass(eq=False)
class _HeadState:
    """State shared by model and head. It holds no reference to the model, which a copy of the head alone would copy too."""

    head: Any  # an nn.Linear, or PEFT's LoRA around one, which has its attributes
    code: LossCode
    place: int  # index of labels among forward's arguments
    caches: bool  # whether forward takes use_cache, or hands it on
    known: frozenset[str]  # keywords that don't affect the loss, or that this module handles
    original: Callable[..., Any]  # the loss function
    snapshot: Snapshot  # of the model
    calls: dict[int, _HeadCallState] = field(default_factory=dict)  # by thread
    forward: Callable[..., Any] | None = None  # the model's, with another CrossEntropyLoss in its globals

    def __post_init__(self) -> None:
        if self.code.kind is LossKind.INLINE:
            assert self.snapshot.code is not None
            stock = globals_with(CROSS_ENTROPY, self.snapshot.code)[CROSS_ENTROPY]
            loss = functools.partial(_cross_entropy_loss, self, stock)
            self.forward = with_globals(self.snapshot.code, {CROSS_ENTROPY: loss})

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"calls": {}, "forward": None}  # with_globals' function can't be pickled, and has this state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    @property
    def call(self) -> _HeadCallState | None:
        return self.calls.get(thread())

    @call.setter
    def call(self, call: _HeadCallState | None) -> None:
        if call is None:
            self.calls.pop(thread(), None)
        else:
            self.calls[thread()] = call


@dataclass(frozen=True)
class LossMatch:
    """A model whose head computes the loss, or whose forward TRL has taken, for `apply`'s report."""

    module: nn.Module  # the head
    model: nn.Module
    snapshot: Snapshot = UNREAD

    def change(self) -> str | None:
        return self.snapshot.change(self.model) or (_TRLS if _runs_onepass_in_trl(self.model) is False else None)

    def left(self) -> str | None:
        """What TRL's trainers run, where TRL has taken the model's forward."""
        by_onepass = _runs_onepass_in_trl(self.model)
        return None if by_onepass is None else _OURS_IN_TRL if by_onepass else _TRLS


def _runs_onepass_in_trl(model: nn.Module) -> bool | None:
    """Whether TRL's fused head is onepass's, where TRL has put it around the model's forward; None elsewhere."""
    answers = map(runs_onepass, wrapped_by(vars(model).get("forward")))
    return next((answer for answer in answers if answer is not None), None)


def replace_loss(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    """Let the model's head compute the loss. Return a row with what replaces it, or why the model is unchanged."""
    causal: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapped model
    head: Any = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    name = next((name for name, part in model.named_modules() if part is head), "")
    kind = type(head if name else causal).__name__
    if head is not None and _runs_onepass_in_trl(causal) is not None:
        match = LossMatch(head, causal)
        return [AppliedRow(name, kind, "loss", why=match.left(), match=match)]
    loss = _kind_of(causal, head)
    if isinstance(loss, str):
        return [AppliedRow(name, kind, "loss", why=loss)]
    reads = Reads(causal)
    code = find_loss_code(causal, head, loss, reads)
    if isinstance(code, str):
        return [AppliedRow(name, kind, "loss", why=code)]
    snapshot = reads.snapshot()
    if snapshot.read_tensors:
        return [AppliedRow(name, kind, "loss", why="its forward reads a parameter or a buffer of its own")]
    _set(causal, head, code, snapshot, patches)
    by = f"linear_cross_entropy{code}{', LoRA' if is_lora(head) else ''}"
    return [AppliedRow(name, kind, "loss", by=by, match=LossMatch(head, causal, snapshot))]


def _kind_of(model: Any, head: Any) -> LossKind | str:
    """Return the kind of the model's loss, or why it has no linear head with one that is known, without running it."""
    if head is None:
        return "it has no head"
    if is_lora(head):
        adapter = _lora_of_head(head)
        if isinstance(adapter, str):
            return adapter
    elif type(head).forward is not nn.Linear.forward:
        return f"its head is no plain torch.nn.Linear, but {type(head).__module__}.{type(head).__name__}"
    for owner, whose in ((head, "its head's"), (model, "its")):
        if own_forward(owner):
            return f"{whose} forward has been replaced already"
    if hooked(head, SILENT):
        return "its head has hooks, which may want the logits"
    if "labels" not in parameters_of(model):
        return "its forward takes no labels"
    if globals_with(CROSS_ENTROPY, type(model).forward):
        return LossKind.INLINE
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    if getattr(type(model), "loss_function", None) is not PreTrainedModel.loss_function:
        return "its class has a loss_function of its own"
    kinds = {ForCausalLMLoss: LossKind.CAUSAL, ForMaskedLMLoss: LossKind.MASKED}
    return kinds.get(model.loss_function, "its loss is another than transformers' ForCausalLMLoss and ForMaskedLMLoss")


def has_known_loss(model: Any) -> bool:
    """Whether the model's loss is transformers' of language models, by onepass or not: tokens without a label don't count."""
    shared = vars(model).get("_onepass")
    if isinstance(shared, _HeadState):
        return shared.code.kind is LossKind.INLINE or getattr(model.loss_function, "func", None) is _loss_function
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    stock = getattr(type(model), "loss_function", None) is PreTrainedModel.loss_function
    return stock and model.loss_function is ForCausalLMLoss


def _set(model: Any, head: Any, code: LossCode, snapshot: Snapshot, patches: Patches) -> None:
    from transformers.utils.generic import TransformersKwargs

    names = list(parameters_of(model))
    known = frozenset((*names, *OPTIONS, *TransformersKwargs.__annotations__, "return_dict"))
    if code.kind is not LossKind.CAUSAL:
        known -= {"shift_labels"}
    shared = _HeadState(head, code, names.index("labels"), _takes_caches(model), known, model.loss_function, snapshot)
    patches.set_forward(head, _head_forward, shared)
    patches.set(model, "_onepass", shared)
    patches.set(model, "forward", ModelForward(model), inert=True)
    patches.set(model, "_loss_function", functools.partial(_loss_function, model))


def _takes_caches(model: Any) -> bool:
    """Whether forward takes use_cache, or any keywords, which it hands to a stack that takes it (Granite's mixtures)."""
    parameters, stack = parameters_of(model), getattr(model, getattr(model, "base_model_prefix", ""), None)
    any_keyword = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return "use_cache" in parameters or (any_keyword and isinstance(stack, nn.Module) and "use_cache" in parameters_of(stack))


# ---- a call ----


class ModelForward:
    """The model's forward: a method, as accelerate looks for one, but a pickled method would be the class's own when loaded."""

    def __init__(self, model: Any) -> None:  # one that is being loaded or copied has nothing yet but its class
        self.__self__ = model
        self.__func__ = self._function(model)
        signature = inspect.signature(self.__func__)
        self.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
        self.__name__, self.__doc__ = self.__func__.__name__, self.__func__.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        """Accelerate restores a method of the function."""
        return getattr(other, "__self__", None) is self.__self__ and getattr(other, "__func__", None) is self.__func__

    def __hash__(self) -> int:
        return id(self.__func__)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.__self__,)

    def _function(self, model: Any) -> Callable[..., Any]:
        return _forward_like(type(model).forward)


def _forward_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the new forward, with the name and the signature of the class's forward."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared: _HeadState | None = getattr(self, "_onepass", None)  # none after undo, which other code's wrappers outlive
        if shared is None:
            return type(self).forward(self, *args, **kwargs)
        labels = args[shared.place] if len(args) > shared.place else kwargs.get("labels")
        if labels is not None:
            _check_shifted(self, shared, kwargs)
        if labels is None or not _without_logits(self, shared, kwargs):
            return type(self).forward(self, *args, **kwargs)
        if shared.caches and len(args) <= shared.place and not kwargs.keys() & _ABOUT_CACHES:
            # Else models copy all keys and values into a cache that nothing reads, and look for no packed documents.
            kwargs["use_cache"] = False
        shared.call = call = _call_of(labels, {name: kwargs[name] for name in OPTIONS if name in kwargs}, shared.code.kind)
        try:
            call.bias = shared.code.bias_in(self)
            outputs = (shared.forward or type(self).forward)(self, *args, **kwargs)
        finally:
            shared.call = None
        return outputs if shared.forward is None else _without_columns(outputs, call)

    del forward.__wrapped__  # accelerate follows it to remove its own wrappers, and would remove this one
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward


def _check_shifted(model: Any, shared: _HeadState, options: dict[str, Any]) -> None:
    """Raise where the last token's label lies on another rank."""
    shifts_itself = shared.code.kind is LossKind.INLINE
    given = shared.code.kind is not LossKind.CAUSAL or options.get("shift_labels") is not None
    if (shifts_itself or not given) and (spread := spread_of(model)) is not None:
        what = "labels must not be given to a model that shifts them itself" if shifts_itself else "shift_labels must be given"
        raise ValueError(f"{what} where {spread.by} spreads sequences over ranks: a token's label may lie on another")


def _call_of(labels: Tensor, options: dict[str, Any], kind: LossKind) -> _HeadCallState:
    ignore, shifted = options.get("ignore_index", -100), options.get("shift_labels")
    if kind is LossKind.INLINE:  # its code ignores them
        options, ignore = {}, -100
    if kind is not LossKind.CAUSAL:
        shifted = labels
    elif shifted is None:  # a token's label is the next token: shift labels, not hidden
        shifted = F.pad(labels, (0, 1), value=ignore)[..., 1:].contiguous()
    return _HeadCallState(labels, options, shifted, kept_rows(shifted, ignore))


def _without_logits(model: Any, shared: _HeadState, given: Iterable[str]) -> bool:
    """Whether this call needs no logits, and head, loss function and what the model does with logits are as before."""
    return (
        model.training
        and torch.is_grad_enabled()
        and (shared.code.kind is LossKind.INLINE or getattr(model.loss_function, "func", None) is _loss_function)
        and model.get_output_embeddings() is shared.head
        and shared.known.issuperset(given)
        and shared.snapshot.unchanged(model)
        and not any(is_watched(module) or type(module).forward is not forward for module, forward in shared.code.around)
    )


def _head_forward(self: Any, input: Tensor, **options: Any) -> Tensor:
    """options: what PEFT's hooks give its layers, such as adapters by row."""
    shared: _HeadState = self._onepass
    call, lora = shared.call, _lora_of_head(self) if is_lora(self) else None
    # FSDP's hooks on the head's output gather its weight for backward, which NaN in place of logits doesn't come by.
    allowed = () if shared.code.kind is LossKind.INLINE else SILENT
    if call is None or options or isinstance(lora, str) or hooked(self, allowed) or not _can_make(self, lora, input, call):
        made: Tensor = type(self).forward(self, input, **options)
        return made
    if call.loss is not None:
        raise RuntimeError(f"the head was called again, and the loss is already made: {_LEAVE}")
    call.loss = _loss(self, lora, input, call, shared.code)
    if shared.code.kind is LossKind.INLINE:
        call.logits = input.detach()[..., :0]
        return input.new_full((*[1 for _ in input.shape[:-1]], self.out_features), float("nan"))
    # The result depends on the loss: hooks on the head's output then run before the loss's backward. FSDP's gathers the weight.
    return input.detach()[..., :0] + call.loss


def _lora_of_head(head: nn.Module) -> LoRA | str | None:
    """Return what PEFT's layer adds to the logits, or why that is no LoRA of a head."""
    adapters = lora_of(head)
    if isinstance(adapters, str) or is_conv1d(head.base_layer):  # type: ignore[arg-type]
        return adapters if isinstance(adapters, str) else "the layer that its LoRA wraps is no plain torch.nn.Linear"
    if adapters and adapters[0].dropout:
        return "its LoRA has dropout, which the loss of a head has not"
    if len(adapters) > 1:
        return f"it has {len(adapters)} active LoRAs: {', '.join(head.active_adapters)}"  # type: ignore[arg-type]
    return adapters[0] if adapters else None


def _can_make(head: Any, lora: LoRA | None, hidden: Tensor, call: _HeadCallState) -> bool:
    plain = type(head.weight) in (Tensor, nn.Parameter) and type(hidden) is Tensor
    if call.bias is not None:
        plain = plain and head.bias is None and (call.bias.dtype == hidden.dtype or under_autocast(hidden))
    if lora is not None and not under_autocast(hidden):
        plain = plain and {lora.a.dtype, lora.b.dtype} <= {hidden.dtype, torch.float32}
    return plain and call.next_labels.numel() == hidden.shape[:-1].numel()


def _loss(head: Any, lora: LoRA | None, hidden: Tensor, call: _HeadCallState, code: LossCode) -> Tensor:
    """Return what the loss function would return for the head's logits."""
    items = call.options.get("num_items_in_batch")
    ignore = call.options.get("ignore_index", -100)
    labels = call.next_labels.to(hidden.device).reshape(hidden.shape[:-1])
    loss: Tensor = linear_cross_entropy(
        hidden, head.weight, labels, reduction="mean" if items is None else "sum", ignore_index=ignore,
        bias=head.bias if call.bias is None else call.bias,
        lora=lora, softcap=code.softcap, logit_scale=code.scale, chunk_bytes=_room(hidden, head.weight), rows=call.rows,
    )  # fmt: skip
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def _room(hidden: Tensor, weight: Tensor) -> int | None:
    """Return chunk_bytes for chunks of 4096 tokens and the sums over them, if the op's default is more.

    A step's memory peaks here. These chunks take 1 % longer. Of a frozen weight nothing is summed over chunks, which are shorter.
    """
    tokens, trained = hidden.shape[:-1].numel(), weight.requires_grad
    if torch.compiler.is_compiling() or hidden.device.type != "cuda" or tokens <= (_CHUNK if trained else _FROZEN_CHUNK):
        return None
    size = hidden.element_size()
    return _room_of(tokens, weight.shape[0], weight.shape[1], size, machine_speed(hidden.device, size).budget, trained)


def _room_of(tokens: int, V: int, D: int, size: int, budget: int, trained: bool = True) -> int | None:
    """`budget`: the op's default chunk_bytes."""
    gradients, chunk = (D * (V + tokens), _CHUNK) if trained else (D * tokens, _FROZEN_CHUNK)
    room = max(4 * gradients, chunk * V * size + (4 - size) * gradients)  # fp32 sums; or a chunk's logits and such sums
    return room if room < budget else None


def _loss_function(self: Any, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Any:
    """The model's loss_function. Return the loss that the head computed with these labels, or call the original."""
    shared: _HeadState = self._onepass
    call = shared.call
    if call is None or call.loss is None:
        return shared.original(logits, labels, vocab_size, **options)
    if labels is not call.labels or any(options.get(name) is not call.options.get(name) for name in OPTIONS):
        raise RuntimeError(
            f"{type(self).__name__}.forward gave its loss function other labels or options than it was called with, and the loss "
            f"is already made: {_LEAVE}"
        )
    if vocab_size != shared.head.out_features:
        raise ValueError(f"vocab_size must be the head's {shared.head.out_features}, but is {vocab_size}")
    return call.loss + logits.sum()  # an empty sum: backward passes the hooks on the head's output


def _cross_entropy_loss(shared: _HeadState, stock: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Tensor]:
    """Return what the model's code takes for a CrossEntropyLoss: a function that returns the head's loss."""
    call = shared.call
    if call is None or call.loss is None:
        return stock(*args, **options)  # type: ignore[no-any-return]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if logits.numel() != shared.head.out_features or labels.numel() != call.labels.numel():
            raise RuntimeError(f"the model's code takes the loss of other labels than it was called with: {_LEAVE}")
        assert call.loss is not None
        return call.loss

    return loss


def _without_columns(outputs: Any, call: _HeadCallState) -> Any:
    """Return the model's outputs, with logits of no columns if the head has computed the loss."""
    if call.logits is None:
        return outputs
    if isinstance(outputs, tuple):
        return outputs[0], call.logits, *outputs[2:]
    outputs.logits = call.logits
    return outputs
