"""Integrations with other packages. Those packages are imported only when they are used."""

import importlib
from types import ModuleType

_PACKAGES = ("axolotl", "huggingface", "megatron", "torchtitan", "trl", "verl")  # submodules that are imported at their first use


def __getattr__(name: str) -> ModuleType:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
