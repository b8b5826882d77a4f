"""Numbers, times, sizes and counts as text."""

from __future__ import annotations

from collections.abc import Iterable


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def counted(count: float, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{number(count)} {noun}{'es' if noun.endswith('ch') else 's'}"


def listed(names: Iterable[str], most: int = 4) -> str:
    listed = list(dict.fromkeys(names))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def time(us: float) -> str:
    """Format a time with three digits, in s, ms or us."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"


def size(count: float) -> str:
    for unit, many in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= many:
            return f"{count / many:.3g} {unit}"
    return f"{count:.0f} bytes"
