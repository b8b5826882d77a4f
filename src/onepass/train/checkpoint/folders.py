"""A run's folder of checkpoints: which ones are complete, which is the newest, and how a new one is added atomically.

`step-00000500` is a complete checkpoint. `step-00000500.part` is being written or removed. `step-00000500.replaced` makes room
for another checkpoint of its step, and is removed when all disks have that. It counts as complete if a killed run left no other.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from onepass.runtime.errors import CommandError
from onepass.runtime.regular_file import read_regular
from onepass.train.checksums import change
from onepass.train.files import sync_folder

INDEX = "checkpoint.json"
FORMAT = 1
LONGEST_HEADER = 100 << 20  # that safetensors reads
_LONGEST_INDEX = 256 << 20  # a 7B model over 1,000 ranks has 90 MB
_PART, _REPLACED = ".part", ".replaced"
_FIELDS = {"step": int, "number": int, "id": str, "model": dict, "files": dict, "tensors": dict}
_NAME = re.compile(rf"(step-\d{{8,}})({_PART}|{_REPLACED})?")


class Damaged(Exception):
    """The files differ from what was written."""


def find(path: Path) -> Path:
    """Return the checkpoint that --resume names: this checkpoint, or the newest of this run.

    A damaged index raises if its checkpoint may be the newest.
    """
    wanted = f"--resume {path} must be the folder of a run or of a checkpoint"
    if not path.is_dir():
        raise CommandError(f"{wanted}, but is {'a file' if path.exists() else 'not there'}")
    if path.resolve().name.endswith(_PART):
        raise CommandError(f"{wanted}, but is half a checkpoint: writing or removing it was cut short")
    if (path / INDEX).exists():
        return path
    there = named(path / "checkpoints")
    if not there:
        raise CommandError(f"{wanted}, but has no checkpoint in it")
    readable = list(saved(path / "checkpoints"))
    for damaged in sorted(set(there).difference(readable), key=_age, reverse=True):
        if not readable or all(theirs > own for theirs, own in zip(_age(damaged), _age(readable[-1]), strict=True)):
            read_index_or_advise(damaged)
    return readable[-1]


def _age(checkpoint: Path) -> tuple[int, int]:
    """Return the step and the time of writing. A checkpoint without its number is the newest only if both are the largest."""
    times = [path.lstat().st_mtime_ns for path in checkpoint.iterdir()]
    return int(checkpoint.name.removesuffix(_REPLACED).removeprefix("step-")), max(times, default=0)


def folder_of(path: Path) -> Path:
    """Return the folder of the run that --resume names, itself or by one of its checkpoints, which may be gone or a link's."""
    if (path / "checkpoints").is_dir():
        return path
    return next((each.parent.parent for each in (path, path.resolve()) if each.parent.name == "checkpoints"), path)


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote this checkpoint."""
    folder = folder_of(checkpoint)
    if folder == checkpoint:
        raise CommandError(
            f"--resume {checkpoint} is in no run's folder: give --config with its settings and --run-dir with a folder"
        )
    return folder


# ---- what was written, and whether it is still that ----


def index_json(index: Mapping[str, Any]) -> str:
    """Return an index as JSON, with its checksum."""
    return json.dumps({**index, "checksum": zlib.crc32(json.dumps(index).encode())})


def read_index(checkpoint: Path) -> dict[str, Any]:
    """Return the index. One with checksums must be as it was written; versions of onepass before checksums wrote none."""
    path = checkpoint / INDEX
    try:
        if path.stat().st_size > _LONGEST_INDEX:
            raise CommandError(f"{path} must be of at most {_LONGEST_INDEX} bytes, but is of {path.stat().st_size}")
        text = read_regular(path).decode()
        index = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise CommandError(f"{path} can't be read: {why}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise CommandError(f"{path} must be of format {FORMAT}, but is of another: it may be of another version of onepass")
    for name, kind in _FIELDS.items():
        if type(index.get(name)) is not kind:
            raise CommandError(f"{path} must have {name}, of type {kind.__name__}, but has {index.get(name)!r:.50}")
    if index["step"] < 0:
        raise CommandError(f"{path} must have a step of at least 0, but has {index['step']}")
    if (index.pop("checksum", None) is not None or "checksums" in index) and text != index_json(index):
        raise CommandError(f"{path} has changed since it was written: its checksum is another")
    return index


def read_index_or_advise(checkpoint: Path) -> dict[str, Any]:
    """Like `read_index`, but the error names the newest good checkpoint of the same run."""
    try:
        return read_index(checkpoint)
    except CommandError as error:
        raise CommandError(f"{error}{advice(checkpoint)}") from None


def file_of(checkpoint: Path, name: str, index: Mapping[str, Any], share: slice | None = None) -> Path:
    """Return the path of a checkpoint's file. Raise Damaged if it is not of the size that was written.

    Args:
        share: the blocks whose checksums are compared too.
    """
    path = checkpoint / name
    if path.parent != checkpoint:
        raise Damaged(f"{INDEX} names a file elsewhere, {name!r}")
    sums = None
    if share is not None and "checksums" in index:
        sums = index["checksums"].get(name) if type(index["checksums"]) is dict else None
        if type(sums) is not list:
            raise Damaged(f"{INDEX} must have the checksums of {name}, but has {sums!r:.50}")
    differs = change(path, index["files"].get(name), sums, share or slice(None))
    if differs:
        raise Damaged(f"{name} {differs}")
    return path


def written_id(file: BinaryIO) -> object:
    """Return the id of the checkpoint that a safetensors file was written for, or None."""
    length = int.from_bytes(file.read(8), "little")
    try:
        return json.loads(file.read(min(length, LONGEST_HEADER)))["__metadata__"]["id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def verify(checkpoint: Path, index: Mapping[str, Any], rank: int = 0, ranks: int = 1) -> None:
    """Raise Damaged if a file has changed since it was written. Each of several ranks reads a share of every file."""
    for name in index["files"]:
        file_of(checkpoint, name, index, slice(rank, None, ranks))


def advice(damaged: Path) -> str:
    """Return the end of an error message: the newest good checkpoint beside a damaged one, or nothing if none is good."""
    for checkpoint in reversed(saved(damaged.parent)):
        with suppress(CommandError, Damaged, OSError):
            if checkpoint.name != damaged.resolve().name:
                verify(checkpoint, read_index(checkpoint))
                return f"; the newest good one is {checkpoint}: --resume {checkpoint} goes on with it"
    return ""


# ---- complete and interrupted checkpoints ----


def named(folder: Path) -> list[Path]:
    """Return the checkpoints that are complete by their names."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    checkpoints = []
    for name in names:
        matched = _NAME.fullmatch(name)
        if matched and (matched[2] is None or (matched[2] == _REPLACED and matched[1] not in names)):
            checkpoints.append(folder / name)
    return checkpoints


def place_of(checkpoint: Path) -> Path:
    """Return the place of a checkpoint that may have made room for another one."""
    return checkpoint.parent / checkpoint.name.removesuffix(_REPLACED)


def replaced_at(place: Path) -> Path:
    """Return where a checkpoint goes that makes room for another one at its place."""
    return place.parent / (place.name + _REPLACED)  # the working folder has no name, which with_name() refuses


def step_of(place: Path) -> int:
    """Return the step that a checkpoint's name says, or 0."""
    matched = _NAME.fullmatch(place.name)
    return int(matched[1].removeprefix("step-")) if matched else 0


def make_room(place: Path) -> None:
    """Move another save of this step away, to where the next save removes it. It stays a candidate if none is there yet."""
    there = replaced_at(place)
    if there.exists():
        there = place.with_name(place.name + _PART)
        if there.exists():
            shutil.rmtree(there)
    place.rename(there)


def _number(checkpoint: Path) -> int:
    """Return the checkpoint's number, which counts a run's saves. The newest checkpoint has the largest.

    Steps do not order checkpoints: a run that resumes from an earlier one saves lower steps again.
    """
    return int(read_index(checkpoint)["number"])


def saved(folder: Path) -> dict[Path, int]:
    """Return complete checkpoints with their numbers, oldest first. Those with a damaged index are left out."""
    numbers = {}
    for checkpoint in named(folder):
        with suppress(CommandError):
            numbers[checkpoint] = _number(checkpoint)
    return dict(sorted(numbers.items(), key=lambda each: each[1]))


def newest_number(folder: Path) -> int:
    """Return the largest number of a folder's checkpoints, or 0."""
    return max(saved(folder).values(), default=0)


def begin(folder: Path, step: int) -> Path:
    """Return an empty folder for a step's checkpoint. Clean up after interrupted writes and removals."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        matched = _NAME.fullmatch(path.name)
        if matched and matched[2] == _PART:
            shutil.rmtree(path)
        elif matched and matched[2] == _REPLACED and (folder / matched[1]).exists():
            remove(path)
        elif matched and matched[2] == _REPLACED:
            path.rename(folder / matched[1])
    part = folder / f"step-{step:08}{_PART}"
    part.mkdir()
    return part


def finish(part: Path) -> Path:
    """Rename a written checkpoint to its final name. From then on it is complete, even if the machine stops.

    One that it replaces stays beside it, until `keep` is called: on other disks it may still be the newest.
    """
    checkpoint = part.with_name(part.name.removesuffix(_PART))
    sync_folder(part)
    if checkpoint.exists():
        checkpoint.rename(replaced_at(checkpoint))
    part.rename(checkpoint)
    sync_folder(checkpoint.parent)
    return checkpoint


def keep(folder: Path, most: int) -> None:
    """Remove what checkpoints have replaced, and all but the newest `most`; 0 keeps all."""
    for place in map(place_of, sorted(folder.glob(f"*{_REPLACED}"))):
        if _NAME.fullmatch(place.name) and place.exists():
            remove(replaced_at(place))
    for checkpoint in list(saved(folder))[:-most] if most else []:
        remove(checkpoint)


def remove(checkpoint: Path) -> None:
    part = checkpoint.with_name(checkpoint.name.removesuffix(_REPLACED) + _PART)
    checkpoint.rename(part)
    shutil.rmtree(part)
