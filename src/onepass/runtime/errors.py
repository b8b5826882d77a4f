"""What commands can't do, said in one line before anything is measured, trained or written; which packages there are."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


class CommandError(Exception):
    """What a command was asked for can't be done; the message says why. The cli prints it and exits with `status`."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.status = status


def check_output(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse a file that could not be written at the end, and make its folder."""
    if path is None:
        return
    if suffixes and not path.name.endswith(suffixes):
        raise CommandError(f"--{option} must end in {' or '.join(suffixes)}, but is {str(path)!r}")
    if path.is_dir():
        raise CommandError(f"--{option} must be a file, but {str(path)!r} is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--{option} can't be written: {error}") from None


def version_of(distribution: str) -> str | None:
    """The version of a package that is installed, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def install_hint(extra: str) -> str:
    """What to do where a package of an extra is missing. From a clone: one of this name may be published by somebody else."""
    return f"pip install '.[{extra}]' in a clone of onepass"
