"""What a message says to do where a package of an extra is missing."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """From a clone: no package of this name is published, but one by somebody else may be."""
    return f"pip install '.[{extra}]' in a clone of onepass"
