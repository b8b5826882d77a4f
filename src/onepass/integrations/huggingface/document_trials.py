"""Whether a mixer parts documents by `cu_seq_lens_q`: its code runs on small random rows, together and each document alone.

The code runs in fp64 with the module's own sizes, but with a cheap function of each token in place of its linear layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onepass.integrations.huggingface.linear_layers import base_of, is_linear, sizes_of
from onepass.integrations.huggingface.mixers import mixer_of
from onepass.integrations.huggingface.probe import Function, probe, probe_forward, randn
from onepass.runtime.backend import use_backend

LENGTHS_OF_Q = "cu_seq_lens_q"  # an argument
_SIZES = (3, 5)  # of the documents
_SLACK, _SEEN = 1e-4, 1e-2  # transformers' mixers compute in fp32; what a token of another document changes is more


def mixers_in(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a layer that mix tokens but are no attention that gets a mask, by name."""
    return [(name, each) for name, each in layer.named_modules() if mixer_of(each) is not None or _is_other_attention(each)]


def _is_other_attention(module: nn.Module) -> bool:
    """Whether this is attention by its name, and linear by its configuration's kind of its layer."""
    return "attention" in type(module).__name__.lower() and getattr(module, "layer_type", "") == "linear_attention"


def parts_documents(module: nn.Module) -> bool:
    """Whether each document's result is as it is alone."""
    match = mixer_of(module)
    code = type(module).forward if match is None else match.original
    width = next((sizes_of(base_of(child))[0] for child in module._modules.values() if is_linear(base_of(child))), None)
    if width is None:
        return False
    x, boundaries = randn(1, sum(_SIZES), width), torch.tensor([0, _SIZES[0], sum(_SIZES)], dtype=torch.int32, device="cpu")
    made = _small(module)
    with use_backend("torch"):
        together, unparted = (_run(made, x, code, given) for given in ({LENGTHS_OF_Q: boundaries}, {}))
        alone = [_run(made, part, code, {}) for part in x.split(_SIZES, 1)]
    if together is None or unparted is None or any(each is None for each in alone):
        return False
    expected = torch.cat(alone, 1)  # type: ignore[arg-type]
    largest = expected.abs().max()
    return bool((together - expected).abs().max() < _SLACK * largest and (unparted - expected).abs().max() > _SEEN * largest)


def _run(made: nn.Module, x: Tensor, code: Callable[..., Any], given: dict[str, Any]) -> Tensor | None:
    y = probe_forward(made, x, probed_code=code, **given)
    y = y[0] if isinstance(y, tuple) else y
    return y.double() if isinstance(y, Tensor) else None


def _small(module: nn.Module) -> nn.Module:
    """Return a copy for the CPU with random parameters, and without linear layers."""
    if is_linear(base_of(module)):
        made = Function(partial(_product, *sizes_of(base_of(module))))
        vars(made).update(dict.fromkeys(base_of(module)._parameters))  # for a function that is given the whole mixer
        return made
    children = {name: _small(child) for name, child in module._modules.items() if child is not None}
    own = {name: None if p is None else randn(*p.shape, seed=i) for i, (name, p) in enumerate(module._parameters.items())}
    buffers = {name: None if each is None else each.to("cpu") for name, each in module._buffers.items()}
    return probe(module, children, _parameters=own, _buffers=buffers, training=True)


def _product(inputs: int, outputs: int, x: Tensor) -> Tensor:
    """Return `outputs` numbers of each token: waves of two sums of its own."""
    ramp = torch.linspace(-1, 1, inputs, dtype=x.dtype)
    first, second = x.mean(-1, keepdim=True) * inputs**0.5, (x * ramp).mean(-1, keepdim=True) * inputs**0.5
    return torch.sin(first * randn(outputs, seed=outputs).to(x) + second * randn(outputs, seed=outputs + 1).to(x) + 0.3)
