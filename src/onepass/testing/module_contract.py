"""The contract of every module of `onepass.nn`, as checks. Each check takes what makes the module.

    for make in modules().values():
        has_the_same_parameters_anywhere(make)
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import onepass.nn

Make = Callable[..., Any]  # takes a device


def modules() -> dict[str, Make]:
    """Return what makes each module, by its name: of small sizes, and under sequence parallelism where it has that."""
    return {name: _maker(made) for name in onepass.nn.__all__ if isinstance(made := getattr(onepass.nn, name), type)}


def _maker(module: Make) -> Make:
    parameters = inspect.signature(module).parameters
    named = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    sizes = sum(p.default is p.empty for p in named) if named else 2  # Linear passes on what torch.nn.Linear takes
    return partial(module, *(8, 16, 2)[:sizes], **({"sequence_parallel": True} if "sequence_parallel" in parameters else {}))


def has_the_same_parameters_anywhere(make: Make) -> None:
    """Copied, pickled, cast, loaded or made on meta, a module has its parameters' values and marks. Copies share no memory."""
    torch.manual_seed(0)
    module = make()
    assigned = make(device="meta")
    materialized: Any = nn.Sequential(make(device="meta")).to_empty(device="cpu")[0]
    torch.manual_seed(0)
    materialized.reset_parameters()
    assigned.load_state_dict(module.state_dict(), assign=True)
    ways = {
        "copied": copy.deepcopy(module), "copied within another": copy.deepcopy(nn.Sequential(module))[0],
        "pickled": pickle.loads(pickle.dumps(module)), "cast": copy.deepcopy(module).double(), "made on meta": materialized,
        "loaded": assigned,
    }  # fmt: skip
    own = dict(module.named_parameters())
    for way, other in ways.items():
        theirs = dict(other.named_parameters())
        assert theirs.keys() == own.keys(), way
        for name, parameter in own.items():
            assert torch.equal(theirs[name], parameter.to(theirs[name].dtype)), f"{name}, {way}"
            assert vars(theirs[name]) == vars(parameter), f"marks of {name}, {way}"
            assert way == "loaded" or theirs[name].data_ptr() != parameter.data_ptr(), f"{name} is shared, {way}"


CHECKS = (has_the_same_parameters_anywhere,)
