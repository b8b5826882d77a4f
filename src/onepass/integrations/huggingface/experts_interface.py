"""`onepass.experts` as one of transformers' implementations of experts, by the name "onepass".

    import onepass.integrations.huggingface

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="onepass")
    model.set_experts_implementation("onepass")  # or later

A class under transformers' `use_experts_implementation` says how its weights lie. The activation is found by running its code.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from onepass.integrations.huggingface.expert_trials import Gate, find_gate
from onepass.integrations.huggingface.probe import fresh_defaults, probe_forward
from onepass.ops.experts.experts import experts

NAME = "onepass"

_Numbers = tuple[tuple[str, Any], ...]  # a module's attributes that are numbers or words


def register() -> None:
    """Register the implementation with transformers, where that is installed."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # `apply` takes models of one's own
        return
    if NAME not in ALL_EXPERTS_FUNCTIONS:  # a second copy of onepass, such as a test's mutant, doesn't take the first's place
        ALL_EXPERTS_FUNCTIONS.register(NAME, onepass_experts_forward)


def onepass_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts. hidden_states [tokens, hidden]; the others [tokens, k].

    Raises:
        ValueError: the class computes something that `onepass.experts` doesn't.
    """
    act: Any = getattr(self, "act_fn", None)
    is_module = isinstance(act, nn.Module)
    plain = not is_module or not (act._parameters or act._buffers or act._modules)
    gate = _GATES[_gate_of(type(self), type(act) if is_module else act, _numbers(act) if plain else None, _numbers(self))]
    up, up_bias = ("gate_up_proj", "gate_up_proj_bias") if self.has_gate else ("up_proj", "up_proj_bias")
    y = experts(
        hidden_states,
        getattr(self, up),
        self.down_proj,
        top_k_index,
        top_k_weights,
        gate.activation,
        up_bias=getattr(self, up_bias) if self.has_bias else None,
        down_bias=self.down_proj_bias if self.has_bias else None,
        clamp=gate.clamp,
        linear_offset=gate.linear_offset,
        interleaved=gate.interleaved,
        transposed=self.is_transposed,
    )
    return y.to(hidden_states.dtype)  # under autocast too, as transformers' own


def _numbers(module: Any) -> _Numbers:
    if not isinstance(module, nn.Module):
        return ()
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str)))


_GATES: dict[str, Gate] = {}  # those that were found, by their words


def _gate_of(kind: Any, act: Any, act_numbers: _Numbers | None, numbers: _Numbers) -> str:
    """Return in words what is between the products of experts of this class. A compiler calls it as it traces.

    It takes no module, whose identity would be guarded: then each layer would be compiled by itself. It returns a word, as only
    those are constants for the compiler.
    act: a function or a class; act_numbers: None where the activation has tensors or modules.
    """
    return _found_gate(kind, act, act_numbers, numbers)


# what torch.compiler.assume_constant_result does, which imports the compiler
_gate_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache
def _found_gate(kind: Any, act: Any, act_numbers: _Numbers | None, numbers: _Numbers) -> str:
    """Return the gate's words, and enter it in _GATES."""
    experts: Any = _bare(kind, numbers)
    if getattr(experts, "_is_expert_parallel", False):
        raise ValueError(_refusal(kind, "runs its experts on several ranks"))
    if getattr(experts, "has_post_expert_norm", False):
        raise ValueError(_refusal(kind, "norms each expert's result before the sum"))
    if isinstance(act, type):
        act = None if act_numbers is None else _made(act, act_numbers)
    experts.act_fn = act
    code: Any = kind._apply_gate if experts.has_gate else _activate
    with fresh_defaults():
        gate = find_gate(lambda h: probe_forward(experts, h, probed_code=code), experts.has_gate)
    if gate is None:
        raise ValueError(_refusal(kind, "has an activation that onepass hasn't"))
    words = str(gate)
    _GATES[words] = gate
    return words


def _activate(experts: Any, h: Tensor) -> Any:
    return experts.act_fn(h)


def _bare(kind: Any, numbers: _Numbers) -> nn.Module:
    made: nn.Module = object.__new__(kind)
    nn.Module.__init__(made)
    vars(made).update(numbers)
    return made


def _made(kind: type[nn.Module], numbers: _Numbers) -> nn.Module | None:
    try:
        made = kind()
    except TypeError:  # it asks for arguments, and what it made of them is unknown
        return None
    vars(made).update(numbers)
    return made


def _refusal(kind: type[nn.Module], does: str) -> str:
    return (
        f'experts_implementation must not be "{NAME}" for this model: {kind.__name__} {does}. '
        'Load it with experts_implementation="grouped_mm", or call model.set_experts_implementation("grouped_mm")'
    )
