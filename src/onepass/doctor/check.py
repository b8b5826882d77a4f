"""The result of a check, for all checks of `onepass doctor`."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

OK, WARNING, BROKEN = "ok", "warning", "broken"
OLDEST_TRANSFORMERS = 5  # that huggingface.apply was tried with


@dataclass
class Check:
    """The result of one check for a known problem, or of one self-test, with advice if it is not ok."""

    name: str
    verdict: str
    found: str
    advice: str = ""


def version_of(package: str) -> str | None:
    """Return the version of a package that is installed, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
