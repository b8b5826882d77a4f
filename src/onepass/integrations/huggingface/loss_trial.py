"""Finds out what a model's code does between its head and its loss, by running that code alone.

The model's forward runs with a stand-in for the model, whose children compute nothing. The head gives chosen numbers as logits,
and what comes to the loss shows what was made of them. Where the head is within a child (BERT's `cls`), its code runs too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.probe import FP64, parameters_of
from onepass.integrations.huggingface.rotation import with_globals
from onepass.integrations.huggingface.snapshot import Reads, RecordingConfig, is_watched

CROSS_ENTROPY = "CrossEntropyLoss"
OPTIONS = ("num_items_in_batch", "ignore_index", "shift_labels")  # ForCausalLMLoss's


class LossKind(Enum):
    CAUSAL = "ForCausalLMLoss"  # of each token's next one
    MASKED = "ForMaskedLMLoss"
    INLINE = CROSS_ENTROPY  # made in forward, of labels as they are


@dataclass(frozen=True)
class LossCode:
    """How a model comes to its loss: by this function of scale * products, or of softcap * tanh(products / softcap)."""

    kind: LossKind
    scale: float = 1.0
    softcap: float | None = None
    around: tuple[tuple[nn.Module, Callable[..., Any]], ...] = ()  # modules between model and head, with their classes' forwards
    bias: tuple[nn.Module | None, str] | None = None  # added to the products: an attribute of the model (None) or of a module

    def bias_in(self, model: nn.Module) -> Tensor | None:
        if self.bias is None:
            return None
        module, name = self.bias
        bias: Tensor = getattr(model if module is None else module, name)
        return bias.view(-1)

    def __str__(self) -> str:
        if self.softcap is not None:
            return f", softcap {self.softcap:g}"
        return f", logit_scale {self.scale:g}" if self.scale != 1 else ""


class _LossTrial:
    """A run of the model's forward that computes only what forward itself does with logits and loss."""

    def __init__(self, head: Any, kind: LossKind, logits: Tensor, reads: Reads) -> None:
        self.head, self.kind, self.logits, self.reads = head, kind, logits, reads
        self.hidden = torch.zeros(*logits.shape[:-1], head.in_features, dtype=head.weight.dtype, device="cpu")
        self.labels = torch.arange(logits.shape[:-1].numel(), device="cpu").view(logits.shape[:-1])
        self.options: dict[str, Any] = {name: object() for name in OPTIONS if name != "shift_labels" or kind is LossKind.CAUSAL}
        self.asked = 0  # number of calls of the head
        self.around: list[nn.Module] = []  # modules whose forwards have run
        self.bias: tuple[nn.Module | None, str] | None = None
        self.biases = torch.linspace(1, 2, head.out_features, dtype=FP64, device="cpu")  # in its place
        self.came: list[tuple[Any, Any, int, dict[str, Any]]] = []  # calls of the loss function
        self.loss = torch.tensor(0.5, dtype=FP64, device="cpu")

    def called(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if module is self.head:
            self.asked += 1
            return self.logits
        if self.head not in module.modules():
            return self.hidden if self.around and not self.asked else _Hidden(self.hidden)  # a layer, or all below the head
        self.around.append(module)
        return type(module).forward(_ProbeModule(module, self), *args, **options)

    def may_be_bias(self, tensor: Tensor, module: nn.Module) -> bool:
        """Whether forward may add this to the logits: it is read once, after the head, which has no bias of its own."""
        after = self.kind is LossKind.INLINE and self.asked == 1 and self.bias is None and self.head.bias is None
        return after and tensor.numel() == self.head.out_features and (module is self.reads.module or module in self.around)

    def loss_function(self, logits: Any, labels: Any, vocab_size: int, **options: Any) -> Tensor:
        self.came.append((logits, labels, vocab_size, options))
        return self.loss.clone()

    def cross_entropy_loss(self, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda logits, labels: self.loss_function(logits, labels, logits.shape[-1], **options)

    def run(self, model: nn.Module) -> str | None:
        """Run the model's forward. Return why the head can't compute this model's loss, or None."""
        names, inline = parameters_of(model), self.kind is LossKind.INLINE
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()) and not inline
        options = dict(self.options) if open_ended else {}
        if "input_ids" in names:
            options["input_ids"] = self.labels
        if open_ended or "output_router_logits" in names:
            options["output_router_logits"] = False  # there are no routers
        forward = type(model).forward
        if inline:
            forward = with_globals(forward, {CROSS_ENTROPY: self.cross_entropy_loss})
        try:
            outputs = forward(_ProbeModule(model, self), labels=self.labels, **options)
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        except Exception as error:
            return f"its forward can't be followed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        if len(self.came) != 1:
            return f"its forward doesn't leave the loss to {'one CrossEntropyLoss' if inline else 'its loss_function'}"
        if self.asked != 1:
            return "its forward doesn't call its head once"
        if any(map(is_watched, self.around)):
            return "a module around its head has hooks or a forward of its own"
        logits, labels, vocab_size, came = self.came[0]
        if inline:
            same = torch.equal(labels.flatten(), self.labels.flatten())
            if not same or came not in ({}, {"ignore_index": -100}):
                return "its forward doesn't take its CrossEntropyLoss of its labels as they are"
            expected = self.logits if self.bias is None else self.logits + self.biases
            if self.logits._version or not torch.equal(logits, expected.view(-1, self.head.out_features)):
                return "its forward does more with the logits than to reshape them and to add a bias"
            if not isinstance(outputs, dict) or outputs["logits"].data_ptr() != logits.data_ptr():
                return "its forward doesn't return the logits that its loss is of"
        elif labels is not self.labels or (open_ended and any(came.get(name) is not each for name, each in self.options.items())):
            return "its forward doesn't give its labels and all options for the loss to its loss_function as they are"
        elif vocab_size != self.head.out_features:
            return f"its loss is not over the {self.head.out_features} columns of its head"
        elif not isinstance(logits, Tensor) or logits.shape != self.logits.shape or logits.requires_grad or self.logits._version:
            return "its forward does more with the logits than to scale or to cap them"
        if not isinstance(loss, Tensor) or not torch.equal(loss, self.loss):
            return "its loss is not its loss_function's alone"
        return None


class _ProbeModule:
    """A stand-in for the model or a module in it. It has the same attributes, but a call computes nothing."""

    def __init__(self, module: nn.Module, trial: _LossTrial) -> None:
        self._module, self._trial = module, trial

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._trial.called(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "loss_function":
            return self._trial.loss_function
        value, reads = getattr(self._module, name), self._trial.reads
        if isinstance(value, nn.Module):
            return _ProbeModule(value, self._trial)
        if isinstance(value, Tensor) and self._trial.may_be_bias(value, self._module):
            self._trial.bias = (None if self._module is reads.module else self._module), name
            return self._trial.biases.view(value.shape)
        if self._module is not reads.module:
            if self._module in self._trial.around and isinstance(value, Tensor):
                raise ValueError(f"{type(self._module).__name__} reads its {name}")
            return value
        reads.names.add(name)
        return RecordingConfig(value, reads) if name == "config" else value


class _Hidden:
    """The output of the model below the head: hidden states, and None for every other attribute."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return (self.last_hidden_state,)[index]


def find_loss_code(model: nn.Module, head: Any, kind: LossKind, reads: Reads) -> LossCode | str:
    """Return how the model comes to its loss, or why it needs its logits."""
    given = torch.linspace(-8, 8, 2 * head.out_features, dtype=FP64, device="cpu").view(1, 2, -1)
    given[0, 0, 0], given[0, 1, -1] = 1.0, 1e6  # these show the scale and the cap
    trials = [_LossTrial(head, kind, given.clone(), reads)]
    if kind is not LossKind.INLINE:
        trials.append(_LossTrial(head, kind, given[..., :0].clone(), reads))  # without columns, as in training
    with torch.enable_grad():  # a learnt scale then requires grad
        why = next((why for trial in trials if (why := trial.run(model)) is not None), None)
    if why is not None:
        return why
    around = tuple((module, type(module).forward) for module in trials[0].around)
    if kind is LossKind.INLINE:
        return LossCode(kind, around=around, bias=trials[0].bias)
    came = trials[0].came[0][0].double()
    scale, cap = came[0, 0, 0].item(), came[0, 1, -1].item()
    for code, values in (
        (LossCode(kind, around=around), given),
        (LossCode(kind, scale=scale, around=around), given * scale),
        (LossCode(kind, softcap=cap, around=around), torch.tanh(given / cap) * cap),
    ):
        if torch.allclose(came, values, rtol=1e-5, atol=0):
            return code
    return "its forward does more with the logits than to scale or to cap them"
