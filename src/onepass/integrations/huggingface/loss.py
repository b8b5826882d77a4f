"""The loss of a causal language model of transformers without its logits: onepass.linear_cross_entropy from inside the head.

A call with labels, in training and with gradients, leaves its labels where the head finds them. The head's forward then makes the
loss at once, where its weight is whole even if FSDP divides it, and returns logits with no columns; the model's own code goes on
with those, and the loss function, which it calls at the end, hands out what the head has made. So `outputs.logits` of such a
call has shape [..., 0], and there is no cache but where one is asked for. Every other call goes the model's own way: evaluation,
no labels, no gradients, a head that was wrapped or hooked since, an option for the loss that we don't know.

What the model does with its logits on their way to the loss is measured once, when the loss is replaced.
One difference is meant: where all labels are ignored the mean is 0 and so are its gradients, not NaN.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.probe import FP64, FSDP, hooked, own_forward, parameters_of, thread
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy
from onepass.ops.loss.linear_cross_entropy.plan import machine_speed

_LEAVE = "leave this model's loss as it is (loss=False)"
_ABOUT_CACHES = {"use_cache", "past_key_values", "position_ids"}  # the last are looked at for packing where there is no cache
_CHUNK = 4096  # tokens
_OPTIONS = ("num_items_in_batch", "ignore_index", "shift_labels")  # ForCausalLMLoss's


@dataclass(frozen=True)
class _Logits:
    """What the model makes of its head's products: scale * products, or softcap * tanh(products / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __str__(self) -> str:
        if self.softcap is not None:
            return f", softcap {self.softcap:g}"
        return f", logit_scale {self.scale:g}" if self.scale != 1 else ""


@dataclass(eq=False)
class _HeadCallState:
    """A call of the model that wants no logits."""

    labels: Tensor
    options: dict[str, Any]
    loss: Tensor | None = None  # the head's work


@dataclass(eq=False)
class _HeadState:
    """What model and head know of each other. It doesn't lead to the model, as a copy of the head alone would copy that too."""

    head: nn.Linear
    logits: _Logits
    place: int  # of labels among forward's arguments
    caches: bool  # whether forward takes use_cache
    known: frozenset[str]  # keywords that change nothing of the loss, or that we follow
    original: Callable[..., Any]  # the loss function
    calls: dict[int, _HeadCallState] = field(default_factory=dict)  # by thread

    @property
    def call(self) -> _HeadCallState | None:
        return self.calls.get(thread())

    @call.setter
    def call(self, call: _HeadCallState | None) -> None:
        if call is None:
            self.calls.pop(thread(), None)
        else:
            self.calls[thread()] = call


def replace_loss(model: nn.Module, patches: Patches) -> list[AppliedRow]:
    """Let the model's own head make the loss. A row for the head: by what, or why not, and then nothing was touched."""
    causal: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model  # what PEFT has wrapped
    head: Any = causal.get_output_embeddings() if hasattr(causal, "get_output_embeddings") else None
    name = next((name for name, part in model.named_modules() if part is head), "")
    kind = type(head if name else causal).__name__
    why = _unlike(causal, head)
    if why is not None:
        return [AppliedRow(name, kind, "loss", why=why)]
    found = _measured(causal, head)
    if isinstance(found, str):
        return [AppliedRow(name, kind, "loss", why=found)]
    _set(causal, head, found, patches)
    return [AppliedRow(name, kind, "loss", by=f"linear_cross_entropy{found}")]


def _unlike(model: Any, head: Any) -> str | None:
    """Why this is no model with a linear head and the causal loss, as far as can be seen without running it."""
    if head is None:
        return "it has no head"
    if type(head).forward is not nn.Linear.forward:
        return f"its head is no plain torch.nn.Linear, but {type(head).__module__}.{type(head).__name__}"
    for owner, whose in ((head, "its head's"), (model, "its")):
        if own_forward(owner):
            return f"{whose} forward has been replaced already"
    if hooked(head, (FSDP,)):
        return "its head has hooks, which may want the logits"
    if "labels" not in parameters_of(model):
        return "its forward takes no labels"
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(type(model), "loss_function", None) is not PreTrainedModel.loss_function:
        return "its class has a loss_function of its own"
    if model.loss_function is not ForCausalLMLoss:
        return "its loss is another than transformers' ForCausalLMLoss"
    return None


def _set(model: Any, head: nn.Linear, logits: _Logits, patches: Patches) -> None:
    from transformers.utils.generic import TransformersKwargs

    names = list(parameters_of(model))
    known = frozenset((*names, *_OPTIONS, *TransformersKwargs.__annotations__, "return_dict"))
    shared = _HeadState(head, logits, names.index("labels"), "use_cache" in names, known, model.loss_function)
    patches.set_forward(head, _head_forward, shared)
    patches.set(model, "_onepass", shared)
    patches.set(model, "forward", MethodType(_forward_like(type(model).forward), model))  # accelerate looks for a method
    patches.set(model, "_loss_function", functools.partial(_loss_function, model))


# ---- a call ----


def _forward_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """The model's forward, with the name and the signature of its class's."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared: _HeadState = self._onepass
        labels = args[shared.place] if len(args) > shared.place else kwargs.get("labels")
        if labels is None or not _without_logits(self, shared, kwargs):
            return type(self).forward(self, *args, **kwargs)
        if shared.caches and len(args) <= shared.place and not kwargs.keys() & _ABOUT_CACHES:
            kwargs["use_cache"] = False  # unasked, models would copy keys and values of every layer into one, for nobody
        shared.call = _HeadCallState(labels, {name: kwargs[name] for name in _OPTIONS if name in kwargs})
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            shared.call = None

    del forward.__wrapped__  # accelerate follows it to undo its own wrappers, and would undo this
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward


def _without_logits(model: Any, shared: _HeadState, given: Iterable[str]) -> bool:
    """Whether nobody wants this call's logits, and the loss is still ours to make."""
    return (
        model.training
        and torch.is_grad_enabled()
        and getattr(model.loss_function, "func", None) is _loss_function
        and model.get_output_embeddings() is shared.head
        and shared.known.issuperset(given)
    )


def _head_forward(self: Any, input: Tensor) -> Tensor:
    shared: _HeadState = self._onepass
    call = shared.call
    if call is None or not _can_make(self, input, call):
        made: Tensor = type(self).forward(self, input)
        return made
    if call.loss is not None:
        raise RuntimeError(f"the head was called again, and the loss is already made: {_LEAVE}")
    call.loss = _loss(self, input, call, shared.logits)
    # It depends on the loss: hooks on what the head returns run before the loss's own backward (FSDP's gathers the weight).
    return input.detach()[..., :0] + call.loss


def _can_make(head: nn.Linear, hidden: Tensor, call: _HeadCallState) -> bool:
    labels = call.options.get("shift_labels")
    labels = call.labels if labels is None else labels
    plain = type(head.weight) in (Tensor, nn.Parameter) and type(hidden) is Tensor
    return plain and labels.numel() == hidden.shape[:-1].numel() and not hooked(head, (FSDP,))


def _loss(head: nn.Linear, hidden: Tensor, call: _HeadCallState, logits: _Logits) -> Tensor:
    """ForCausalLMLoss of the head's logits."""
    items = call.options.get("num_items_in_batch")
    ignore = call.options.get("ignore_index", -100)
    labels = call.options.get("shift_labels")
    if labels is None:  # a token's label is the next one: hidden stays as it is
        labels = F.pad(call.labels, (0, 1), value=ignore)[..., 1:]
    loss: Tensor = linear_cross_entropy(
        hidden, head.weight, labels.to(hidden.device).reshape(hidden.shape[:-1]), reduction="mean" if items is None else "sum",
        ignore_index=ignore, bias=head.bias, softcap=logits.softcap, logit_scale=logits.scale,
        chunk_bytes=_room(hidden, head.weight),
    )  # fmt: skip
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def _room(hidden: Tensor, weight: Tensor) -> int | None:
    """For chunks of 4096 tokens and the sums over them, where the op would take more by itself: a step's memory has its peak
    here, and they take 1 % longer."""
    tokens = hidden.shape[:-1].numel()
    if torch.compiler.is_compiling() or hidden.device.type != "cuda" or tokens <= _CHUNK:
        return None
    size = hidden.element_size()
    return _room_of(tokens, weight.shape[0], weight.shape[1], size, machine_speed(hidden.device, size).budget)


def _room_of(tokens: int, V: int, D: int, size: int, budget: int) -> int | None:
    """budget: what the op allows itself."""
    gradients = D * (V + tokens)
    room = max(4 * gradients, _CHUNK * V * size + (4 - size) * gradients)  # sums; or logits, and sums beside the results
    return room if room < budget else None


def _loss_function(self: Any, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Any:
    """The model's loss_function: what the head has made of these labels, or the original."""
    shared: _HeadState = self._onepass
    call = shared.call
    if call is None or call.loss is None:
        return shared.original(logits, labels, vocab_size, **options)
    if labels is not call.labels or any(options.get(name) is not call.options.get(name) for name in _OPTIONS):
        raise RuntimeError(
            f"{type(self).__name__}.forward gave its loss function other labels or options than it was called with, and the loss "
            f"is already made: {_LEAVE}"
        )
    if vocab_size != shared.head.out_features:
        raise ValueError(f"vocab_size must be the head's {shared.head.out_features}, but is {vocab_size}")
    return call.loss + logits.sum()  # of no numbers: the hooks' way


# ---- what lies between the head and the loss ----


class _LossTrial:
    """A run of the model's forward in which nothing is computed but what it does itself with logits and loss."""

    def __init__(self, head: nn.Linear, logits: Tensor) -> None:
        self.head, self.logits = head, logits
        self.hidden = torch.zeros(*logits.shape[:-1], head.in_features, dtype=head.weight.dtype, device="cpu")
        self.labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device="cpu")
        self.options: dict[str, Any] = {name: object() for name in _OPTIONS}
        self.asked = 0  # how often for the head
        self.came: list[tuple[Any, Any, int, dict[str, Any]]] = []  # to the loss function
        self.loss = torch.tensor(0.5, dtype=FP64, device="cpu")

    def called(self, module: nn.Module) -> Any:
        if module is not self.head:
            return _Hidden(self.hidden)
        self.asked += 1
        return self.logits

    def loss_function(self, logits: Any, labels: Any, vocab_size: int, **options: Any) -> Tensor:
        self.came.append((logits, labels, vocab_size, options))
        return self.loss.clone()

    def run(self, model: nn.Module) -> str | None:
        """Why the head can't make this model's loss, or None."""
        names = parameters_of(model)
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        options = dict(self.options) if open_ended else {}
        if "input_ids" in names:
            options["input_ids"] = self.labels
        if open_ended or "output_router_logits" in names:
            options["output_router_logits"] = False  # there are no routers
        try:
            outputs = type(model).forward(_ProbeModule(model, self), labels=self.labels, **options)
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        except Exception as error:
            return f"its forward can't be followed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        if len(self.came) != 1:
            return "its forward doesn't leave the loss to its loss_function"
        if self.asked != 1:
            return "its forward doesn't call its head itself, and once"
        logits, labels, vocab_size, came = self.came[0]
        if labels is not self.labels or (open_ended and any(came.get(name) is not self.options[name] for name in _OPTIONS)):
            return "its forward doesn't give its labels and all options for the loss to its loss_function as they are"
        if vocab_size != self.head.out_features:
            return f"its loss is not over the {self.head.out_features} columns of its head"
        if not isinstance(logits, Tensor) or logits.shape != self.logits.shape or logits.requires_grad:
            return "its forward does more with the logits than to scale or to cap them"
        if not isinstance(loss, Tensor) or not torch.equal(loss, self.loss):
            return "its loss is not its loss_function's alone"
        return None


class _ProbeModule:
    """In place of the model or a module in it: has its attributes, but does nothing when called."""

    def __init__(self, module: nn.Module, trial: _LossTrial) -> None:
        self._module, self._trial = module, trial

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._trial.called(self._module)

    def __getattr__(self, name: str) -> Any:
        if name == "loss_function":
            return self._trial.loss_function
        found = getattr(self._module, name)
        return _ProbeModule(found, self._trial) if isinstance(found, nn.Module) else found


class _Hidden:
    """What the model below the head returns: hidden states, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return (self.last_hidden_state,)[index]


def _measured(model: nn.Module, head: nn.Linear) -> _Logits | str:
    """What the model does with its logits, or why they are needed."""
    given = torch.linspace(-8, 8, 2 * head.out_features, dtype=FP64, device="cpu").view(1, 2, -1)
    given[0, 0, 0], given[0, 1, -1] = 1.0, 1e6  # the scale, and the cap
    trials = _LossTrial(head, given), _LossTrial(head, given[..., :0])  # the second as it will be
    with torch.enable_grad():  # which shows a scale that is learnt
        why = next((why for trial in trials if (why := trial.run(model)) is not None), None)
    return _made_of(given, trials[0].came[0][0].double()) if why is None else why


def _made_of(given: Tensor, came: Tensor) -> _Logits | str:
    scale, cap = came[0, 0, 0].item(), came[0, 1, -1].item()
    for one, values in (
        (_Logits(), given),
        (_Logits(scale=scale), given * scale),
        (_Logits(softcap=cap), torch.tanh(given / cap) * cap),
    ):
        if torch.allclose(came, values, rtol=1e-5, atol=0):
            return one
    return "its forward does more with the logits than to scale or to cap them"
