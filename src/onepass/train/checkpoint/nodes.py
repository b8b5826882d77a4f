"""Checkpoints whose files lie on several nodes' disks: which one is whole, and who gives a node the files that it lacks.

Each node's ranks write to their own disk, and each disk has the index. A checkpoint is whole if between them the nodes have all
of its files. A load copies the files that a node's ranks read and its disk lacks, compared with their checksums.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onepass.runtime.errors import CommandError
from onepass.runtime.regular_file import open_regular, read_regular
from onepass.train import checksums
from onepass.train.checkpoint import folders
from onepass.train.disks import group_ranks
from onepass.train.files import write_atomically
from onepass.train.layout import ParallelLayout

_PART = ".part"


class KnownSave(NamedTuple):
    """What an index says of its checkpoint."""

    number: int
    step: int
    id: str
    files: dict[str, int]  # sizes
    nodes: dict[str, str]  # who wrote them


class Sighting(NamedTuple):
    """What a rank sees of a checkpoint. Where its index is damaged or absent, `ids` are those in its files."""

    path: Path
    known: KnownSave | None
    sizes: dict[str, int]  # of the files that are there
    ids: dict[str, object]
    damage: str


class Spread(NamedTuple):
    """A checkpoint as all ranks see it together."""

    path: Path
    step: int
    number: int = 0
    id: str = ""
    missing: Mapping[str, str] = {}  # files that no rank sees, and their nodes
    damage: str | None = None  # of its index, where no rank can read one: then number and id are not known

    @property
    def whole(self) -> bool:
        return not self.missing and self.damage is None

    def complain(self) -> str:
        if self.damage is not None:
            return f"the checkpoint {self.path} is damaged: {self.damage}"
        return f"the checkpoint {self.path} lacks {describe_missing(self.missing)}"


def describe_missing(files: Mapping[str, str]) -> str:
    """Return files that no node has, and the nodes that wrote them."""
    nodes = sorted({node for node in files.values() if node})
    return ", ".join(sorted(files)) + (f", written on {', '.join(nodes)}" if nodes else "")


def find_on_nodes(path: Path, layout: ParallelLayout) -> tuple[Path, str | None]:
    """Return the checkpoint that --resume names, which may lie on several nodes, and its id there.

    Raise CommandError if it is not whole.
    """
    if layout.nodes == 1:
        return layout.on_first(lambda: folders.find(path)), None
    found = spread(path, layout)
    if not found:
        layout.on_all(lambda: folders.find(path))
    whole = [each for each in found if each.whole]
    newest = found[-1]
    if unread := [each for each in found if each.damage is not None and each.step >= newest.step]:
        newest = unread[-1]
    if not newest.whole and not (whole and whole[-1].path == newest.path):  # an older save of the same step takes its place
        other = f"; the newest whole one is {whole[-1].path}: --resume {whole[-1].path} goes on with it" if whole else ""
        raise CommandError(f"{newest.complain()}: start these nodes too, or copy the files to {newest.path} of any node{other}")
    return whole[-1].path, whole[-1].id


def newest_whole(folder: Path, layout: ParallelLayout, above: int, verify: bool) -> tuple[Spread | None, list[str]]:
    """Return a run's newest good checkpoint with a number above `above`, and what is wrong with those that are newer.

    Its index is shared. One whose number can't be read may be newer.
    """
    found = spread(folder, layout)
    wrong = {each.path: each.complain() for each in found if each.damage is not None}
    for each in reversed([each for each in found if each.damage is None and each.number > above]):
        if each.missing:
            wrong.setdefault(each.path, each.complain())
            continue
        try:
            share_index(each.path, each.id, layout)
            if verify:
                verify_on_nodes(each.path, layout.agree(lambda: folders.read_index(each.path)), layout)  # noqa: B023
            return each, [*wrong.values()]
        except (folders.Damaged, CommandError, OSError) as error:
            wrong.setdefault(each.path, f"the checkpoint {each.path} is damaged: {error}")
    return None, [*wrong.values()]


def spread(path: Path, layout: ParallelLayout) -> list[Spread]:
    """Return the checkpoint at a path, or a run's checkpoints, as all nodes have them, oldest first.

    Of several saves of a step, which a crash between two nodes leaves, there is one each. Those without an index come first.
    """
    itself = any(layout.on_all(lambda: any((each / folders.INDEX).exists() for each in (path, folders.replaced_at(path)))))
    mine = layout.rank in layout.first_of_nodes
    seen: dict[Path, list[Sighting]] = {}
    for sighting in (s for theirs in layout.on_all(lambda: list(_sightings(path, itself)) if mine else []) for s in theirs):
        seen.setdefault(folders.place_of(sighting.path), []).append(sighting)
    found = []
    for place, sightings in seen.items():
        saves = {each.known.id: each.known for each in sightings if each.known is not None}
        for known in saves.values():
            there = [_files_of(known.id, each) for each in sightings]
            missing = [name for name, size in known.files.items() if all(files.get(name) != size for files in there)]
            nodes = {name: known.nodes.get(name, "") for name in missing}
            found.append(Spread(place, known.step, known.number, known.id, nodes))
        newest = [each for each in sightings if each.path == place] or sightings
        if all(each.known is None for each in newest):
            found.append(Spread(place, folders.step_of(place), damage=newest[0].damage))
    return sorted(found, key=lambda each: (each.number, each.step, each.id))


def _files_of(id: str, sighting: Sighting) -> dict[str, int]:
    """Return the sizes of the files of a save that were seen."""
    if sighting.known is not None:
        return sighting.sizes if sighting.known.id == id else {}
    return {name: size for name, size in sighting.sizes.items() if sighting.ids.get(name) == id}


def _sightings(path: Path, itself: bool) -> Iterator[Sighting]:
    """Look at the checkpoint at a path, or at those of a run, and at what has made room for them."""
    places = [path] if itself else sorted(set(map(folders.place_of, folders.named(path / "checkpoints"))))
    for checkpoint in (each for place in places for each in (place, folders.replaced_at(place)) if each.is_dir()):
        known, damage = None, ""
        try:
            index = folders.read_index(checkpoint)
            known = KnownSave(index["number"], index["step"], index["id"], dict(index["files"]), _nodes(index))
        except CommandError as error:
            damage = str(error)
        files = [each for each in checkpoint.iterdir() if each.is_file()]
        ids = {each.name: _written_id(each) for each in files} if known is None else {}
        yield Sighting(checkpoint, known, {each.name: each.stat().st_size for each in files}, ids, damage)


def _written_id(path: Path) -> object:
    """Return the id in a file's header, or None where it can't be read."""
    with suppress(OSError), open_regular(path) as file:
        return folders.written_id(file)
    return None


# ---- loading ----


def share_index(path: Path, id: str, layout: ParallelLayout) -> None:
    """Put a checkpoint in its place on disks where another save of its step is there, and its index on disks that lack it."""

    def look() -> list[str | None]:
        place = path.resolve()
        return [_id_at(each) for each in (place, folders.replaced_at(place))]

    seen = layout.on_all(look)
    if all(place == id for place, _ in seen):
        return
    source = next((rank for rank, ids in enumerate(seen) if id in ids), None)
    if source is None:
        raise CommandError(f"the checkpoint {path} must be where it was found, but is gone: is another run writing there?")

    def read() -> bytes:
        place = path.resolve()
        return read_regular((place if seen[source][0] == id else folders.replaced_at(place)) / folders.INDEX)

    text = layout.on_rank(source, read)

    def settle() -> None:
        place, (here, replaced) = path.resolve(), look()
        if here == id:
            return
        if place.exists() and (here is not None or replaced == id):
            folders.make_room(place)
        if replaced == id and not place.exists():
            folders.replaced_at(place).rename(place)
        else:
            place.mkdir(parents=True, exist_ok=True)
            write_atomically(place / folders.INDEX, text)

    for rank in layout.first_of_nodes:  # one after another, as some may share a disk
        layout.on_all(lambda: settle() if layout.rank == rank else None)  # noqa: B023 - called at once


def verify_on_nodes(path: Path, index: Mapping[str, Any], layout: ParallelLayout) -> None:
    """Raise Damaged on all ranks if a file of any disk has changed, or is on none. The ranks that see a disk share its files."""
    own: Mapping[str, Any] = index
    sharers: Sequence[int] = range(layout.ranks)
    if layout.nodes > 1:
        sizes: dict[str, int] = index["files"]
        sharers = _sharers(path, layout)[layout.rank]
        seen = layout.on_all(lambda: _files_there(path, sizes, index) if layout.rank == sharers[0] else set())
        if nowhere := {*sizes}.difference(*seen):
            raise _lacking(nowhere, index)
        own = {**index, "files": {name: sizes[name] for name in sizes if name in seen[sharers[0]]}}
    layout.on_all(lambda: folders.verify(path, own, sharers.index(layout.rank), len(sharers)))


def fetch(path: Path, needed: Collection[str], index: Mapping[str, Any], layout: ParallelLayout) -> None:
    """Copy the files that ranks need and their disk lacks from nodes that have them. All ranks call it."""
    if layout.nodes == 1:
        return
    sizes: dict[str, int] = index["files"]
    lacking = layout.on_all(lambda: {*needed} - _files_there(path, needed, index))
    wanted = sorted(set.union(*lacking))
    if not wanted:
        return
    seen = layout.on_all(lambda: _files_there(path, wanted, index))
    if nowhere := {*wanted}.difference(*seen):
        raise _lacking(nowhere, index)
    sharers = _sharers(path, layout)
    layout.on_all(lambda: _remove_parts(path) if layout.rank == sharers[layout.rank][0] else None)
    errors = []
    for name in wanted:
        giver = next(rank for rank, there in enumerate(seen) if name in there)
        takers = sorted({sharers[rank][0] for rank, names in enumerate(lacking) if name in names} - {giver})
        if layout.rank == giver:
            errors.append(_give(path / name, sizes[name], takers))
        elif layout.rank in takers:
            errors.append(_take(path / name, sizes[name], (index.get("checksums") or {}).get(name), giver, layout.rank))

    def check() -> None:
        for error in errors:
            if error is not None:
                raise error

    layout.on_all(check)


def _sharers(path: Path, layout: ParallelLayout) -> list[Sequence[int]]:
    """Return, for each rank, the ranks that see the same disk, by the file of a checkpoint's index there."""

    def look() -> tuple[int, int]:
        about = (path / folders.INDEX).stat()
        return about.st_ino, about.st_ctime_ns

    disks = group_ranks(layout.on_all(look)) or (tuple(range(layout.ranks)),)
    return [next(disk for disk in disks if rank in disk) for rank in range(layout.ranks)]


def _files_there(path: Path, names: Collection[str], index: Mapping[str, Any]) -> set[str]:
    """Return those of a checkpoint's files that are there whole, and are no other checkpoint's."""
    of_size = [name for name in names if (path / name).parent == path and _size(path / name) == index["files"].get(name)]
    return {name for name in of_size if _written_id(path / name) == index["id"]}


def _lacking(names: Collection[str], index: Mapping[str, Any]) -> folders.Damaged:
    return folders.Damaged(f"it lacks {describe_missing({name: _nodes(index).get(name, '') for name in names})}")


def _remove_parts(path: Path) -> None:
    """Remove what killed processes have fetched of files."""
    for part in path.glob(f"*.safetensors.*{_PART}"):
        part.unlink(missing_ok=True)


def _give(path: Path, size: int, takers: Sequence[int]) -> Exception | None:
    """Send a file to ranks. Return why it could not be read: all blocks are sent nevertheless, as they are waited for."""
    failed: Exception | None = None
    for start in range(0, size, checksums.BLOCK):
        block = torch.zeros(min(checksums.BLOCK, size - start), dtype=torch.uint8)
        try:
            with open_regular(path) as file:
                file.seek(start)
                file.readinto(_memory(block))
        except OSError as error:
            failed = error
        for taker in takers:
            dist.send(block, taker)
    return failed


def _take(path: Path, size: int, sums: Sequence[int] | None, giver: int, rank: int) -> Exception | None:
    """Receive a file, and compare it with its checksums before it has its name. Return what went wrong."""
    blocks, found = _received(size, giver), checksums.BlockSums()
    part = path.with_name(f"{path.name}.{rank}{_PART}")
    try:
        with part.open("xb") as file:
            for block in blocks:
                file.write(block)
                found.add(block)
            os.fsync(file.fileno())
        if sums is not None and found.sums != sums:
            raise folders.Damaged(f"{path.name} has changed since it was written, or on its way from rank {giver}")
        part.replace(path)
    except (OSError, folders.Damaged) as error:
        for _ in blocks:  # they are sent nevertheless
            pass
        part.unlink(missing_ok=True)
        return error
    return None


def _received(size: int, giver: int) -> Iterator[memoryview]:
    for start in range(0, size, checksums.BLOCK):
        block = torch.empty(min(checksums.BLOCK, size - start), dtype=torch.uint8)
        dist.recv(block, giver)
        yield _memory(block)


def _memory(block: torch.Tensor) -> memoryview:
    numbers: Any = block.numpy()
    return memoryview(numbers)


def _nodes(index: Mapping[str, Any]) -> dict[str, str]:
    """Return which node wrote each file, where each has its own disk."""
    nodes = index.get("nodes")
    return {str(name): str(node) for name, node in nodes.items()} if isinstance(nodes, dict) else {}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _id_at(path: Path) -> str | None:
    """Return a checkpoint's id, or None where its index is damaged or absent."""
    with suppress(CommandError):
        return str(folders.read_index(path)["id"])
    return None
