"""Writes and reads files as torch.distributed.checkpoint (DCP) plans: safetensors, and an index in JSON.

No pickle is written or read. DCP's own writer pickles its index, and its reader would run code in it.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from onepass.runtime.regular_file import open_regular
from onepass.train.checkpoint.folders import INDEX, Damaged, file_of, index_json, written_id
from onepass.train.checkpoint.parts import Chunk
from onepass.train.checksums import BlockSums

T = TypeVar("T")
_BYTES = 4  # of an element: all are fp32
_PROPERTIES = TensorProperties(dtype=torch.float32)


def write(folder: Path, chunks: Iterable[Chunk], facts: Mapping[str, Any], rank: int, alone: bool) -> None:
    """Write each rank's file, and on the first rank the index, which contains `facts`. If one rank raises, all do."""
    with _whats_wrong(), _quiet():
        save({}, storage_writer=_Writer(folder, facts, rank), planner=_SavePlanner(chunks), no_dist=alone)


def read(folder: Path, chunks: Iterable[Chunk], index: Mapping[str, Any], alone: bool) -> None:
    """Read the chunks from all files that have parts of them, into the chunks' memory."""
    with _whats_wrong(), _quiet():
        load({}, storage_reader=_Reader(folder, index), planner=_LoadPlanner(chunks), no_dist=alone)


def files_needed(folder: Path, chunks: Iterable[Chunk], index: Mapping[str, Any]) -> set[str]:
    """Return the files that have parts of the chunks."""
    reader = _Reader(folder, index)
    items = (item for chunk in chunks for item in _read_items(chunk, reader.read_metadata()))
    return {reader.places[item.storage_index].file for item in items}


def file_of_rank(rank: int) -> str:
    return f"{rank}.safetensors"


@contextmanager
def _whats_wrong() -> Iterator[None]:
    """Raise the first failed rank's OSError or Damaged in place of DCP's exception, which collects those of all ranks."""
    try:
        yield
    except CheckpointException as failed:
        errors = [error for _, (error, _) in sorted(failed.failures.items())]
        causes = [error for error in errors if isinstance(error, (OSError, Damaged))]
        if not causes:
            raise
        raise causes[0] from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress DCP's warning about a single rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


# ---- which rank writes and reads what ----


class _SavePlanner(DefaultSavePlanner):
    """Plans writes. One rank writes a chunk that several ranks have. All chunks together must cover each whole tensor."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {MetadataIndex(chunk.name, chunk.offsets): chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(index, chunk) for index, chunk in self._chunks.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._chunks[write_item.index].open()


def _write_item(index: MetadataIndex, chunk: Chunk) -> WriteItem:
    data = TensorWriteData(_stored(chunk.offsets, chunk.sizes), _PROPERTIES, torch.Size(chunk.shape))
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _stored(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {MetadataIndex(chunk.name, chunk.offsets): chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        return LoadPlan([item for chunk in self._chunks.values() for item in _read_items(chunk, self.metadata)])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._chunks[index].open()


def _read_items(chunk: Chunk, metadata: Metadata) -> list[ReadItem]:
    there: Any = metadata.state_dict_metadata.get(chunk.name)
    if there is None or there.size != torch.Size(chunk.shape):
        stored = "none" if there is None else f"one of {list(there.size)}"
        raise Damaged(f"it must have a tensor {chunk.name} of {list(chunk.shape)}, but has {stored}")
    items = create_read_items_for_chunk_list(chunk.name, there, [_stored(chunk.offsets, chunk.sizes)])
    if sum(math.prod(item.lengths) for item in items) != math.prod(chunk.sizes):
        raise Damaged(f"it must have all of {chunk.name}, but has a part")
    return items


# ---- files ----


class _Place(NamedTuple):
    """The location of a stored chunk."""

    file: str
    start: int
    sizes: tuple[int, ...]
    sums: tuple[int, ...] = ()  # the file's checksums, with its last chunk


class _NothingToPrepare:
    """What DCP also asks of those who write and read files."""

    def reset(self, checkpoint_id: Any = None) -> None: ...
    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None: ...
    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Writer(_NothingToPrepare, StorageWriter):
    def __init__(self, folder: Path, facts: Mapping[str, Any], rank: int) -> None:
        self.folder, self.facts, self.rank = folder, facts, rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            name, sums = file_of_rank(self.rank), BlockSums()
            with (self.folder / name).open("wb", buffering=0) as file, ThreadPoolExecutor(1) as summing:
                _write_summed(file, memoryview(_header(plan.items, self.facts["id"])), sums, summing)
                for item in plan.items:
                    start = file.tell()
                    tensor: Any = planner.resolve_data(item)
                    _write_summed(file, _bytes(tensor.cpu().contiguous()), sums, summing)
                    results.append(WriteResult(item.index, file.tell() - start, _Place(name, start, tuple(tensor.shape))))
                os.fsync(file.fileno())
            results[-1] = replace(results[-1], storage_data=results[-1].storage_data._replace(sums=tuple(sums.sums)))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places: dict[MetadataIndex, _Place] = {}
        ends: dict[str, int] = {}
        sums: dict[str, tuple[int, ...]] = {}
        for result in (result for each in results for result in each):
            place = places[result.index] = result.storage_data
            ends[place.file] = place.start + result.size_in_bytes  # after the loop: the end of the file's last chunk
            sums[place.file] = place.sums
        tensors = {
            name: {
                "shape": list(there.size),
                "chunks": [[list(c.offsets), list(c.sizes), *places[MetadataIndex(name, c.offsets)][:2]] for c in there.chunks],
            }
            for name, there in metadata.state_dict_metadata.items()
            if isinstance(there, TensorStorageMetadata)
        }
        with (self.folder / INDEX).open("w") as file:
            file.write(index_json({**self.facts, "files": ends, "checksums": sums, "tensors": tensors}))
            file.flush()
            os.fsync(file.fileno())


def _header(items: Sequence[WriteItem], id: str) -> bytes:
    """Return a safetensors header: its length, the tensors in JSON, and padding spaces."""
    header: dict[str, Any] = {"__metadata__": {"id": id}}
    at = 0
    for item in items:
        assert item.tensor_data is not None
        chunk, shape = item.tensor_data.chunk, item.tensor_data.size
        end = at + math.prod(chunk.sizes) * _BYTES
        name = item.index.fqn
        if chunk.sizes != shape:
            name += "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(chunk.offsets, chunk.sizes, strict=True)) + "]"
        header[name] = {"dtype": "F32", "shape": list(chunk.sizes), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_summed(file: Any, data: memoryview, sums: BlockSums, summing: ThreadPoolExecutor) -> None:
    """Write data. A thread adds it to the checksums meanwhile: both release the GIL."""
    summed = summing.submit(sums.add, data)
    _write_all(file, data)
    summed.result()


def _write_all(file: Any, left: memoryview) -> None:
    while left:  # one call writes 2 GB at most, or what the disk has room for
        left = left[file.write(left) :]


def _bytes(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.view(-1).numpy()
    return memoryview(numbers).cast("B")


class _Reader(_NothingToPrepare, StorageReader):
    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder, self.index = folder, index
        self.places: dict[MetadataIndex, _Place] = {}
        try:
            self._metadata = Metadata({name: self._tensor(name, **said) for name, said in index["tensors"].items()})
        except (TypeError, ValueError) as error:
            raise Damaged(f"{INDEX} is not as it was written: {error}") from None

    def _tensor(self, name: str, shape: list[int], chunks: list[Any]) -> TensorStorageMetadata:
        stored = []
        for offsets, sizes, file, start in chunks:
            inside = all(0 <= o <= o + s <= whole for o, s, whole in zip(offsets, sizes, shape, strict=True))
            if not inside or type(file) is not str or type(start) is not int or not 0 <= start < 1 << 62:
                raise ValueError(f"{name} has a part {[offsets, sizes, file, start]!r:.100}")
            self.places[MetadataIndex(name, offsets)] = _Place(file, start, tuple(sizes))
            stored.append(_stored(offsets, sizes))
        if shape and not _are_apart(stored):
            raise ValueError(f"{name} has parts that overlap")
        return TensorStorageMetadata(_PROPERTIES, torch.Size(shape), stored)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in sorted(plan.items, key=lambda item: self.places[item.storage_index].start):
            by_file.setdefault(self.places[item.storage_index].file, []).append(item)
        for name, items in by_file.items():
            with self._opened(name) as file:
                for item in items:
                    planner.resolve_tensor(item).copy_(_read(file, self.places[item.storage_index], item))
        return _done(None)

    @contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO]:
        """Open a file. Raise Damaged if its size or the id in its header is not what was written."""
        with open_regular(file_of(self.folder, name, self.index)) as file:
            if written_id(file) != self.index["id"]:
                raise Damaged(f"{name} is no file of it")
            yield file


def _are_apart(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether no two chunks overlap. Each is compared only with earlier ones whose rows it may share."""
    near: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[0]):
        near = [other for other in near if other.offsets[0] + other.sizes[0] > chunk.offsets[0]]
        if any(_overlap(chunk, other) for other in near):
            return False
        near.append(chunk)
    return True


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in spans)


def _read(file: BinaryIO, place: _Place, item: ReadItem) -> Tensor:
    """Read a rectangle of a chunk. Only the rows that it needs are read from disk."""
    offsets, lengths = item.storage_offsets, item.lengths
    rows = torch.empty((lengths[0], *place.sizes[1:]), dtype=torch.float32)
    file.seek(place.start + offsets[0] * math.prod(place.sizes[1:]) * _BYTES)
    _read_all(file, rows)
    for dim in range(1, rows.dim()):
        rows = rows.narrow(dim, offsets[dim], lengths[dim])
    return rows


def _read_all(file: Any, tensor: Tensor) -> None:
    left = _bytes(tensor)
    while left:
        got = file.readinto(left)
        if not got:
            raise Damaged("a file of it ends early")
        left = left[got:]


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
