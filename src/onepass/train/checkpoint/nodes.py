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


class Sighting(NamedTuple):
    """What a rank sees of a checkpoint. `known` is None where its index is damaged or absent."""

    path: Path
    known: tuple[int, int, str, dict[str, int], dict[str, str]] | None  # number, step, id, sizes of files, who wrote them
    sizes: dict[str, int]  # of the files that are there


class Spread(NamedTuple):
    """A checkpoint as all ranks see it together."""

    path: Path
    number: int
    step: int
    missing: dict[str, str]  # files that no rank sees, and their nodes

    def complain(self) -> str:
        return f"the checkpoint {self.path} lacks {describe_missing(self.missing)}"


def describe_missing(files: Mapping[str, str]) -> str:
    """Return files that no node has, and the nodes that wrote them."""
    nodes = sorted({node for node in files.values() if node})
    return ", ".join(sorted(files)) + (f", written on {', '.join(nodes)}" if nodes else "")


def find_on_nodes(path: Path, layout: ParallelLayout) -> Path:
    """Return the checkpoint that --resume names, which may lie on several nodes. Raise CommandError if it is not whole."""
    if layout.nodes == 1:
        return layout.on_first(lambda: folders.find(path))
    found = spread(path, layout)
    if not found:
        layout.on_all(lambda: folders.find(path))
    newest, whole = found[-1], [each for each in found if not each.missing]
    if newest.missing:
        other = f"; the newest whole one is {whole[-1].path}: --resume {whole[-1].path} goes on with it" if whole else ""
        raise CommandError(f"{newest.complain()}: start these nodes too, or copy the files to {newest.path} of any node{other}")
    return newest.path


def newest_whole(folder: Path, layout: ParallelLayout, above: int, verify: bool) -> tuple[Spread | None, list[str]]:
    """Return a run's newest good checkpoint with a number above `above`, and what is wrong with those that are newer."""
    wrong = []
    for each in reversed([each for each in spread(folder, layout) if each.number > above]):
        if each.missing:
            wrong.append(each.complain())
            continue
        try:
            if verify:
                share_index(each.path, layout)
                index = folders.read_index(each.path)
                verify_on_nodes(each.path, index, layout)
            return each, wrong
        except (folders.Damaged, CommandError) as error:
            wrong.append(f"the checkpoint {each.path} is damaged: {error}")
    return None, wrong


def spread(path: Path, layout: ParallelLayout) -> list[Spread]:
    """Return the checkpoint at a path, or a run's checkpoints, as all nodes have them, oldest first."""
    mine = layout.rank in layout.first_of_nodes
    seen: dict[Path, list[Sighting]] = {}
    for sighting in (each for theirs in layout.on_all(lambda: list(_sightings(path)) if mine else []) for each in theirs):
        seen.setdefault(sighting.path, []).append(sighting)
    found = []
    for place, sightings in seen.items():
        known = [each.known for each in sightings if each.known is not None]
        if known:
            newest = number, step, _, sizes, nodes = max(known, key=lambda each: each[:3])  # of several saves of a step
            there = [each.sizes for each in sightings if each.known is None or each.known == newest]
            missing = {name: nodes.get(name, "") for name, size in sizes.items() if all(s.get(name) != size for s in there)}
            found.append(Spread(place, number, step, missing))
    return sorted(found, key=lambda each: each.number)


def _sightings(path: Path) -> Iterator[Sighting]:
    for place in [path] if (path / folders.INDEX).exists() else folders.named(path / "checkpoints"):
        found = None
        with suppress(CommandError):
            index = folders.read_index(place)
            found = index["number"], index["step"], index["id"], dict(index["files"]), _nodes(index)
        yield Sighting(place, found, {each.name: each.stat().st_size for each in place.iterdir() if each.is_file()})


# ---- loading ----


def share_index(path: Path, layout: ParallelLayout) -> None:
    """Write a checkpoint's index, the newest that a node has, to disks that lack it."""
    if layout.nodes == 1:
        return
    seen = layout.on_all(lambda: _number_and_id(path))
    newest = max(seen)
    if newest[0] < 0:
        folders.read_index_or_advise(path)
    if seen.count(newest) == layout.ranks:
        return
    text = layout.on_rank(seen.index(newest), lambda: read_regular(path / folders.INDEX))
    for rank in layout.first_of_nodes:  # one after another, as some may share a disk

        def write() -> None:
            if layout.rank == rank and _number_and_id(path) != newest:  # noqa: B023 - called at once
                path.mkdir(parents=True, exist_ok=True)
                write_atomically(path / folders.INDEX, text)

        layout.on_all(write)


def verify_on_nodes(path: Path, index: Mapping[str, Any], layout: ParallelLayout) -> None:
    """Raise Damaged on all ranks if a file of any disk has changed. The ranks that see a disk share its files."""
    own: Mapping[str, Any] = index
    sharers: Sequence[int] = range(layout.ranks)
    if layout.nodes > 1:
        about = (path / folders.INDEX).stat()
        disks = group_ranks(layout.on_all(lambda: (about.st_ino, about.st_ctime_ns)))
        sharers = next((disk for disk in disks if layout.rank in disk), sharers)
        own = {**index, "files": {name: size for name, size in index["files"].items() if (path / name).exists()}}
    layout.on_all(lambda: folders.verify(path, own, sharers.index(layout.rank), len(sharers)))


def fetch(path: Path, needed: Collection[str], index: Mapping[str, Any], layout: ParallelLayout) -> None:
    """Copy the files that ranks of this node need and its disk lacks from nodes that have them. All ranks call it."""
    if layout.nodes == 1:
        return
    sizes: dict[str, int] = index["files"]
    seen = layout.on_all(lambda: ({name for name, size in sizes.items() if _size(path / name) == size}, {*needed}))
    lacking = [wanted - there for there, wanted in seen]
    if nowhere := set.union(*lacking).difference(*(there for there, _ in seen)):
        raise folders.Damaged(f"it lacks {describe_missing({name: _nodes(index).get(name, '') for name in nowhere})}")
    errors = []
    for name in sorted(set.union(*lacking)):
        giver = next(rank for rank, (there, _) in enumerate(seen) if name in there)
        hosts = {host for host, names in zip(layout.hosts, lacking, strict=True) if name in names}
        takers = [rank for rank in layout.first_of_nodes if layout.hosts[rank] in hosts]
        if layout.rank == giver:
            errors.append(_give(path / name, sizes[name], takers))
        elif layout.rank in takers:
            errors.append(_take(path / name, sizes[name], (index.get("checksums") or {}).get(name), giver))

    def check() -> None:
        for error in errors:
            if error is not None:
                raise error

    layout.on_all(check)


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


def _take(path: Path, size: int, sums: Sequence[int] | None, giver: int) -> Exception | None:
    """Receive a file, and compare it with its checksums before it has its name. Return what went wrong."""
    blocks, found = _received(size, giver), checksums.BlockSums()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
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


def _number_and_id(path: Path) -> tuple[int, str]:
    """Return a checkpoint's number and id, or those that are below all others where its index is damaged or absent."""
    with suppress(CommandError):
        index = folders.read_index(path)
        return index["number"], index["id"]
    return -1, ""
