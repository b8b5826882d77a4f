"""What output layers share that take hidden states and return a loss: parameters of this rank's rows of the vocabulary."""

from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar

from torch import Tensor, nn

from onepass.nn.fp8_state import shown
from onepass.nn.linear import Init
from onepass.nn.sharding import DividedParameters, Division, check_init, check_size, range_of


class VocabularyHead(DividedParameters):
    """An output layer that keeps its logits to itself. In a group each rank has the rows of `vocab_range`."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    options: ClassVar[tuple[str, ...]]  # attributes that are the op's options
    always_shown: ClassVar[tuple[str, ...]] = ()  # those that extra_repr has always
    flags: ClassVar[tuple[str, ...]] = ("skip_weight_param_allocation",)  # what else it has where it is not the default

    def hold_vocabulary(
        self, hidden_size: int, vocab_size: int, *, bias: bool, skip_weight_param_allocation: bool, init_method: Init | None,
        device: Any, dtype: Any,
    ) -> None:  # fmt: skip
        """Hold and initialise the parameters. Call it last in __init__."""
        check_size("hidden_size", hidden_size)
        check_size("vocab_size", vocab_size)
        check_init("init_method", init_method)
        self.hidden_size, self.vocab_size, self.init_method = hidden_size, vocab_size, init_method
        self.skip_weight_param_allocation = skip_weight_param_allocation
        self.vocab_range = range_of(vocab_size, self.rank, self.ranks)
        rows, division = self.vocab_range[1] - self.vocab_range[0], Division(0, vocab_size)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if not skip_weight_param_allocation:
            self.hold("weight", rows, hidden_size, device=device, dtype=dtype, division=division)
        if bias:
            self.hold("bias", rows, device=device, dtype=dtype, division=division)
        self.reset_parameters()
        self.mark_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise all parameters, like those of the unsharded layer."""
        self.start_as_linear(self.hidden_size, self.init_method)

    def take_weight(self, other: Tensor | None) -> Tensor:
        """Return the weight that a call gives, or the module's own."""
        weight = self.weight if other is None else other
        if weight is None:
            raise ValueError("weight must be given with the call, as skip_weight_param_allocation leaves the module without one")
        shape = (self.vocab_range[1] - self.vocab_range[0], self.hidden_size)
        if weight.shape != shape:
            part = "the rows of vocab_range" if self.ranks > 1 else "a row a token"
            raise ValueError(f"weight must have shape {shape}, {part}, but has {tuple(weight.shape)}")
        return weight

    def options_with(self, reduction: str | None) -> dict[str, Any]:
        """Return the op's options. A call's reduction replaces the module's, unless None."""
        options = {name: getattr(self, name) for name in self.options}
        return options if reduction is None else options | {"reduction": reduction}

    def extra_repr(self) -> str:
        parts = [f"{self.hidden_size}", f"{self.vocab_size}", f"bias={self.bias is not None}"]
        parts += [f"{name}={getattr(self, name)!r}" for name in self.always_shown]
        parts += [f"vocab_range={self.vocab_range}", f"tp={self.ranks}"] if self.ranks > 1 else []
        defaults = {name: parameter.default for name, parameter in signature(type(self)).parameters.items()}
        names = (name for name in (*self.options, *self.flags) if name not in self.always_shown)
        return ", ".join(parts + shown(self, **{name: defaults[name] for name in names}))
