"""Writing of a run's files: a full disk or a killed process leaves what was there."""

from __future__ import annotations

import os
from pathlib import Path


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
