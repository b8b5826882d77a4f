"""A run's folder of checkpoints: which ones are complete, which is the newest, and how a new one is added atomically.

`step-00000500` is a complete checkpoint. `step-00000500.part` is being written or removed. `step-00000500.replaced` makes room
for another checkpoint of its step. It counts as complete if a killed run left no other.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from onepass.runtime.errors import CommandError

INDEX = "checkpoint.json"
FORMAT = 1
_PART, _REPLACED = ".part", ".replaced"
_FIELDS = {"step": int, "number": int, "id": str, "model": dict, "files": dict, "tensors": dict}
_NAME = re.compile(rf"(step-\d{{8,}})({_PART}|{_REPLACED})?")


def find(path: Path) -> Path:
    """Return the checkpoint that --resume names: this checkpoint, or the newest of this run."""
    wanted = f"--resume {path} must be the folder of a run or of a checkpoint"
    if not path.is_dir():
        raise CommandError(f"{wanted}, but is {'a file' if path.exists() else 'not there'}")
    if path.resolve().name.endswith(_PART):
        raise CommandError(f"{wanted}, but is half a checkpoint: writing or removing it was cut short")
    if (path / INDEX).exists():
        return path
    there = _named(path / "checkpoints")
    if not there:
        raise CommandError(f"{wanted}, but has no checkpoint in it")
    return max(there, key=_number)


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote this checkpoint."""
    folder = checkpoint.parent if checkpoint.parent.name == "checkpoints" else checkpoint.resolve().parent
    if folder.name != "checkpoints":
        raise CommandError(
            f"--resume {checkpoint} is in no run's folder: give --config with its settings and --run-dir with a folder"
        )
    return folder.parent


def read_index(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / INDEX
    try:
        index = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise CommandError(f"{path} can't be read: {why}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise CommandError(f"{path} must be of format {FORMAT}, but is of another: it may be of another version of onepass")
    for name, kind in _FIELDS.items():
        if type(index.get(name)) is not kind:
            raise CommandError(f"{path} must have {name}, of type {kind.__name__}, but has {index.get(name)!r:.50}")
    return index


# ---- complete and interrupted checkpoints ----


def _named(folder: Path) -> list[Path]:
    """Return the checkpoints that are complete by their names."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = []
    for name in names:
        matched = _NAME.fullmatch(name)
        if matched and (matched[2] is None or (matched[2] == _REPLACED and matched[1] not in names)):
            found.append(folder / name)
    return found


def _number(checkpoint: Path) -> int:
    """Return the checkpoint's number, which counts a run's saves. The newest checkpoint has the largest.

    Steps do not order checkpoints: a run that resumes from an earlier one saves lower steps again.
    """
    return int(read_index(checkpoint)["number"])


def saved(folder: Path) -> dict[Path, int]:
    """Return complete checkpoints with their numbers, oldest first. Those with a damaged index are left out."""
    found = {}
    for checkpoint in _named(folder):
        with suppress(CommandError):
            found[checkpoint] = _number(checkpoint)
    return dict(sorted(found.items(), key=lambda each: each[1]))


def begin(folder: Path, step: int) -> Path:
    """Return an empty folder for a step's checkpoint. Clean up after interrupted writes and removals."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        matched = _NAME.fullmatch(path.name)
        if matched and matched[2] == _PART:
            shutil.rmtree(path)
        elif matched and matched[2] == _REPLACED:
            _put_back(path, folder / matched[1])
    part = folder / f"step-{step:08}{_PART}"
    part.mkdir()
    return part


def _put_back(replaced: Path, checkpoint: Path) -> None:
    if checkpoint.exists():
        remove(replaced)
    else:
        replaced.rename(checkpoint)


def finish(part: Path) -> Path:
    """Rename a written checkpoint to its final name. From then on it is complete, even if the machine stops."""
    checkpoint = part.with_name(part.name.removesuffix(_PART))
    replaced = checkpoint.with_name(checkpoint.name + _REPLACED)
    sync(part)
    if checkpoint.exists():
        checkpoint.rename(replaced)
    part.rename(checkpoint)
    sync(checkpoint.parent)
    if replaced.exists():
        remove(replaced)
    return checkpoint


def keep(folder: Path, most: int) -> None:
    """Remove all but the newest `most` checkpoints; 0 keeps all."""
    for checkpoint in list(saved(folder))[:-most] if most else []:
        remove(checkpoint)


def remove(checkpoint: Path) -> None:
    part = checkpoint.with_name(checkpoint.name.removesuffix(_REPLACED) + _PART)
    checkpoint.rename(part)
    shutil.rmtree(part)


def sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
