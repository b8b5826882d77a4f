"""Writing of a run's files, all in its folder: a full disk or a killed process leaves what was there."""

from __future__ import annotations

import os
from pathlib import Path

from onepass.runtime.errors import CommandError


def write_atomically(path: Path, data: bytes | memoryview | str, sync: bool = True) -> None:
    """Replace a file. Until all of `data` is written beside it, `path` keeps what it has.

    An OSError names `path`, and leaves nothing beside it. A link at `path` is replaced, not followed.

    Args:
        sync: flush the file and its folder to disk, so that a power failure does not take it.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.unlink(missing_ok=True)
        with part.open("xb") as file:  # exclusive: never through a link that is in its place
            file.write(data.encode() if isinstance(data, str) else data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
        if sync:
            sync_folder(path.parent)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        part.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def check_links(folder: Path) -> None:
    """Raise CommandError if a link in a run's folder leads out of it. The folder itself may be a link."""
    inside = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in sorted((*folders, *files))):
            target = os.path.realpath(path)
            if path.is_symlink() and os.path.commonpath((inside, target)) != inside:
                raise CommandError(f"{path} must be in the run's folder, but is a link to {target}: put what it names there")
