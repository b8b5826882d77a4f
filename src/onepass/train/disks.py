"""Whether the ranks of several nodes share a disk. It is found out by trial."""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path

from onepass.runtime.errors import CommandError
from onepass.train.layout import ParallelLayout


def find_disks(folder: Path, layout: ParallelLayout) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that see each disk on which a run's folder is or will be; nothing where all see the same one.

    Each node's first rank writes a file, and all ranks look for those files.
    """
    if layout.nodes == 1:
        return ()
    name = layout.on_first(lambda: f".disk-{uuid.uuid4().hex}")
    own = next(path for path in (folder, *folder.parents) if path.is_dir()) / f"{name}-{layout.rank}"
    written = layout.rank in layout.first_of_nodes

    def write() -> Path | None:
        if written:
            own.touch()
        return own if written else None

    def look() -> int:
        for rank, path in enumerate(places):
            if path is not None and path.exists():
                return rank
        raise CommandError(f"{layout.place(layout.rank)} must see what its node's first rank writes to {own.parent}, but doesn't")

    try:
        places = layout.on_all(write)
        return group_ranks(layout.on_all(look))
    finally:
        if written:
            with suppress(OSError):
                own.unlink()


def group_ranks(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that have each key, in the order of their first ranks; nothing where all have the same."""
    groups: dict[Hashable, list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key, []).append(rank)
    return tuple(map(tuple, groups.values())) if len(groups) > 1 else ()


def describe_disks(layout: ParallelLayout) -> str:
    """Return the sentence that says how many disks a run of several nodes is on."""
    if layout.nodes == 1:
        return ""
    if not layout.disks:
        return f"{layout.nodes} nodes share one folder. "
    folders = "a folder each" if len(layout.disks) == layout.nodes else f"{len(layout.disks)} folders between them"
    return f"{layout.nodes} nodes have {folders}, with tokens and a part of each checkpoint. "
