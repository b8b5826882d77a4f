"""Where onepass meets other packages. Nothing of theirs is imported before it is used."""

import importlib
from types import ModuleType

_PACKAGES = ("huggingface",)  # imported when they are named: onepass.integrations.huggingface


def __getattr__(name: str) -> ModuleType:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
