"""Weights under DeepSpeed's ZeRO. Stage 3 leaves them empty, except while a module runs, forward or backward.

A module's hooks gather its own weights. `_parameters` are dicts that gather too: what another module's forward reads there by
`[]`, or as an attribute. That module's hooks gather it from then on. So matches read weights of other modules in this way, and
not by `.get`, which finds them empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

AnyTensor = TypeVar("AnyTensor", Tensor, Tensor | None)


def is_partitioned(parameter: Tensor | None) -> bool:
    """Whether stage 3 has this parameter, gathered or not."""
    return hasattr(parameter, "ds_shape")


def is_deepspeeds(parameter: Tensor, model: nn.Module | None) -> bool:
    """Whether DeepSpeed's engine steps this parameter. ZeRO marks it, and the engine has a hook on the model."""
    hooks = () if model is None else model._forward_pre_hooks.values()
    engine = any(getattr(hook, "__module__", None) == "deepspeed.runtime.engine" for hook in hooks)
    return engine or is_partitioned(parameter) or hasattr(parameter, "_hp_mapping")


def gathered(parameter: AnyTensor) -> AnyTensor:
    """Return a parameter that is about to be used, or raise where it is empty."""
    if is_empty(parameter):
        raise RuntimeError(
            "a weight is empty, as DeepSpeed ZeRO-3 has partitioned it: call the engine that deepspeed.initialize has returned, "
            "and not its module, or gather the weights by deepspeed.zero.GatheredParameters"
        )
    return parameter


def is_empty(parameter: Any) -> bool:
    return is_partitioned(parameter) and parameter.numel() != parameter.ds_shape.numel()


@contextmanager
def shapes_of_empty(model: nn.Module) -> Iterator[None]:
    """Give empty parameters their shapes in the block, and NaN for all numbers. Recognition looks at no weight's numbers."""
    empty: list[Any] = [parameter for parameter in model.parameters() if is_empty(parameter)]
    for parameter in empty:
        parameter.data = parameter.new_full((), float("nan")).expand(parameter.ds_shape)
    try:
        yield
    finally:
        for parameter in empty:
            parameter.data = parameter.new_empty(0)
