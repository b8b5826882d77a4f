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


def states_of(groups: Iterable[Mapping[str, Any]], state: Mapping[str, Any]) -> dict[Tensor, Mapping[str, Any]]:
    """Return the parameters' states, by the keys that the saved groups name them by: numbers, or names, as
    torch.distributed.checkpoint gives them."""
    mine, theirs = ([key for group in each for key in group["params"]] for each in (groups, state["param_groups"]))
    known = set(theirs)
    unknown = [key for key in state["state"] if key not in known]
    if unknown:
        raise ValueError(f"state must be of parameters in its groups, but has one of {unknown[0]!r}")
    return {parameter: state["state"][key] for parameter, key in zip(mine, theirs, strict=True) if key in state["state"]}


def set_options(groups: Iterable[dict[str, Any]], saved: Iterable[Mapping[str, Any]]) -> None:
    """Set groups' options by those of a state. Tensors are written, as CUDA graphs read them."""
    for group, options in zip(groups, saved, strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            elif key != "params":
                group[key] = value
