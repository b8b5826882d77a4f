"""The packages we compare with: which are here, in what version."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PeerPackage:
    module: str  # what to import
    distribution: str  # what to install


PACKAGES = {
    "Liger": PeerPackage("liger_kernel", "liger-kernel"),
    "CCE": PeerPackage("cut_cross_entropy", "cut-cross-entropy"),
    "Megatron-core": PeerPackage("megatron.core", "megatron-core"),
    "QuACK": PeerPackage("quack", "quack-kernels"),
    "Apex": PeerPackage("apex", "apex"),
    "Transformer Engine": PeerPackage("transformer_engine", "transformer-engine"),
}


def find_peers() -> dict[str, str]:
    """The packages that are installed, and their versions."""
    return {name: version for name, package in PACKAGES.items() if (version := _version(package)) is not None}


def _version(package: PeerPackage) -> str | None:
    try:
        if importlib.util.find_spec(package.module) is None:
            return None
    except (ImportError, ValueError):  # its parent is missing, or it is half there
        return None
    try:
        return metadata.version(package.distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As a user with fixed shapes compiles it."""
    # a pool of compiling processes would start with the first call, and keep the CPUs busy while others are timed
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    wrapped: Callable[..., Any] = torch.compile(function, dynamic=False)
    return wrapped


def with_parameters(module: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A peer's module as a function of its input and of its parameters, which become those it is given."""
    held: list[Tensor] = []

    def call(x: Tensor, *parameters: Tensor) -> Any:
        if not held or held[0] is not parameters[0]:
            held[:] = parameters
            for name, parameter in zip(names, parameters, strict=True):
                setattr(module, name, parameter)
        return module(x)

    return call


def forget_compiled() -> None:
    """Let what comes next be compiled for its own shapes alone.

    After a second shape the compiler would go over to dynamic ones, and after eight give up: peers that compile inside, and
    torch.compile itself, would be slower than in a training run, where shapes stay.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
