"""How an optimizer whose tensors stay where they are loads a state: its hooks run, and its groups' options are set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def loading(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the optimizer's hooks around a load. Yield the state that those before it have made."""
    state = dict(state_dict)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state = before(optimizer, state) or state
    yield state
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def check_sizes(groups: Iterable[Mapping[str, Any]], saved: Iterable[Mapping[str, Any]]) -> None:
    """Raise where groups have other numbers of parameters than those of a state."""
    mine, theirs = ([len(group["params"]) for group in each] for each in (groups, saved))
    if mine != theirs:
        raise ValueError(f"state must have groups of {mine} parameters, but has {theirs}")


def set_options(groups: Iterable[dict[str, Any]], saved: Iterable[Mapping[str, Any]]) -> None:
    """Set groups' options by those of a state. Tensors are written, as CUDA graphs read them."""
    for group, options in zip(groups, saved, strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            elif key != "params":
                group[key] = value
