"""Tokenises text files, by a byte-pair tokenizer trained on them or by a Hugging Face folder's. Writes two files of token ids,
which are memory-mapped.

A folder of tokens has `tokenizer.json`, `train.bin`, `valid.bin` (the last part of the shuffled documents) and `tokens.json`.
`tokens.json` records which texts were read and what was written, with checksums, and is written last. A folder without it is
incomplete and is made again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from onepass.gpt.weights import LONGEST_JSON, read_config
from onepass.runtime.errors import CommandError
from onepass.runtime.regular_file import open_regular, read_regular
from onepass.train.checksums import BlockSums, block_sums, change
from onepass.train.files import write_atomically
from onepass.train.layout import ParallelLayout

END = "<|endoftext|>"  # between documents
SMALLEST = 257  # vocabulary: the bytes and END
_VALID = 0.05  # of the text
_NOT_LIBRARY = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "encodings", "turtledemo"}
_WRITTEN = ("tokenizer.json", "train.bin", "valid.bin")  # and tokens.json
_AT_ONCE = 128  # documents
_TRAINED_ON = 4 << 20  # characters; more text has the same frequent pairs

Told = Callable[[str, int, int], None]  # called with (task, done, total)


@dataclass(frozen=True)
class Tokens:
    """The token ids and the tokenizer of a folder of tokens."""

    folder: Path
    train: Any  # numpy arrays over the files
    valid: Any
    tokenizer: Any
    vocab_size: int
    end: int  # the id of the token between documents

    def sums(self) -> list[Any]:
        """Return the sizes and checksums of the files. Tokens of versions of onepass before checksums have none."""
        record = _read_record(self.folder, keep=True)
        return [] if record is None else [list(record.written[name]) for name in _WRITTEN if name in record.written]

    @functools.cached_property
    def vocabulary(self) -> str:
        """The hash of which token has which id, for which a model's embeddings stand."""
        return hashlib.sha256(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode()).hexdigest()


@dataclass(frozen=True)
class TokensRecord:
    """The content of tokens.json. Versions of onepass before checksums wrote `key` in place of texts and sums."""

    vocab_size: int
    texts: list[tuple[str, int, int, list[int]]]  # path, size, time of change, checksums
    written: dict[str, tuple[int, list[int]]]  # by file: size, checksums
    key: str | None = None
    tokenizer: str | None = None  # the hash of what was given
    end: int | None = None  # the token between documents, where a tokenizer was given


class FolderTokenizer(NamedTuple):
    """The tokenizer.json of a Hugging Face folder, and the token that the model ends a text with."""

    content: str
    end: int

    @property
    def hash(self) -> str:
        return hashlib.sha256(f"{self.end} {self.content}".encode()).hexdigest()


def folder_tokenizer(folder: Path, vocab_size: int) -> FolderTokenizer:
    """Read a folder's tokenizer. Raise CommandError where it isn't there, or has tokens that the model doesn't have."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CommandError(
            f"--load-hf {folder} must have a tokenizer.json, but has none: transformers writes it, by "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    if path.stat().st_size > LONGEST_JSON:
        raise CommandError(f"{path} must be of at most {LONGEST_JSON} bytes, but is of {path.stat().st_size}")
    try:
        content = read_regular(path).decode()
        size = _size(Tokenizer.from_str(content))
    except Exception as error:  # tokenizers raises no other type
        raise CommandError(f"{path} can't be read: {' '.join(str(error).split())}") from None
    if size > vocab_size:
        raise CommandError(f"{path} must be of the model's vocab_size, {vocab_size}, or fewer tokens, but is of {size}")
    ends = read_config(folder).get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    if type(end) is not int or not 0 <= end < size:
        raise CommandError(f"{folder / 'config.json'} must have eos_token_id, a token below {size}, but has {ends!r:.50}")
    return FolderTokenizer(content, end)


def _size(tokenizer: Any) -> int:
    """Return the number of tokens, up to the last one's id."""
    return 1 + int(max(tokenizer.get_vocab().values()))


def python_library() -> list[Path]:
    """Return the source files of this machine's standard library, without its tests."""
    top = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(top.rglob("*.py")) if not _NOT_LIBRARY.intersection(path.relative_to(top).parts)]


def _passed_over(inside: Path) -> bool:
    """Whether to skip a file: hidden files and folders, and __pycache__, which source folders contain."""
    return any(part.startswith(".") or part == "__pycache__" for part in inside.parts)


_TOKENS = ("tokens/tokenizer.json", "tokens/train.bin")
_OF_A_RUN = {"config.yaml", "log.csv", "loss.png", "samples.txt", "tokens", "checkpoints", "adapter", "reference"}


def _written_by_a_run(top: Path, inside: Path) -> bool:
    """Whether a training run wrote this file: with --data . its folder may lie among the texts."""
    named = zip(reversed(inside.parents), inside.parts, strict=True)
    folders = (
        top / folder for folder, name in named
        if name.removesuffix(".part") in _OF_A_RUN or name.startswith("events.out.tfevents.")
    )  # fmt: skip
    return any((folder / tokens).exists() for folder in folders for tokens in _TOKENS)


def find_files(named: Sequence[str]) -> list[Path]:
    """Return the named files and all files in the named folders. Without names return the standard library's sources."""
    if not named:
        return python_library()
    files: list[Path] = []
    for name in named:
        path = Path(name)
        if path.is_dir():
            there = ((p, p.relative_to(path)) for p in path.rglob("*") if p.is_file())
            inside = sorted(p for p, name in there if not _passed_over(name) and not _written_by_a_run(path, name))
            if not inside:
                raise CommandError(f"--data {name} has no files in it")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise CommandError(f"--data {name} is no file and no folder")
    return files


def prepare(
    folder: Path, named: Sequence[str], vocab_size: int, seq_length: int, told: Told, *, keep: bool = False, verify: bool = True,
    given: FolderTokenizer | None = None,
) -> Tokens:  # fmt: skip
    """Return the tokens of these texts. Tokenise them unless the folder has their tokens already.

    Args:
        keep: raise if the folder has tokens of other texts, because a model that was trained on them depends on them.
        verify: compare tokens that are there with their checksums.
        given: the tokenizer. By default one is trained on the texts.
    """
    files = find_files(named)
    record = _read_record(folder, keep)
    differs = None if record is None else _difference(record, files, vocab_size, given)
    if differs and keep:
        raise CommandError(
            f"--data must be the texts of which {folder} has the tokens, but {differs}: the model was trained on those tokens; "
            "put the texts back, or begin a new run"
        )
    if record is None or differs:
        _make(folder, files, vocab_size, seq_length, told, given)
    elif verify:
        for name, (size, sums) in record.written.items():
            damage = change(folder / name, size, sums)
            if damage:
                raise _damaged(folder, name, damage)
    tokens = load(folder, vocab_size)
    _check_length(tokens.train, tokens.valid, seq_length)
    if verify:
        _check_range(tokens, min(vocab_size, tokens.vocab_size))
    return tokens


def check_same(sums: Sequence[list[Any]], layout: ParallelLayout) -> None:
    """Raise CommandError if disks have different tokens. `sums`: each disk's `Tokens.sums`."""
    for at, own in enumerate(sums):
        if own != sums[0]:
            first, other = (layout.place(layout.disks[disk][0]) for disk in (0, at))
            raise CommandError(
                f"the tokens must be the same on all nodes' disks, but those of {other} differ from those of {first}: the files "
                "of --data must be the same there, and without --data the versions of Python"
            )


def load(folder: Path, vocab_size: int) -> Tokens:
    import numpy
    from tokenizers import Tokenizer

    name = "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(read_regular(folder / name).decode())
        size = _size(tokenizer)
        kind = _number_type(vocab_size)
        arrays = {}
        for part in ("train", "valid"):
            name = f"{part}.bin"
            with open_regular(folder / name) as file:
                arrays[part] = numpy.memmap(file, dtype=kind, mode="r")
    except Exception as error:  # tokenizers raises no other type
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise _damaged(folder, name, f"can't be read: {why}") from None
    record = _read_record(folder, keep=True)
    end = tokenizer.token_to_id(END) if record is None or record.end is None else record.end
    if end is None or not 0 <= end < size:
        raise _damaged(folder, "tokenizer.json", f"must have the end of a text, {END if end is None else end}, but has not")
    return Tokens(folder, arrays["train"], arrays["valid"], tokenizer, size, end)


def _damaged(folder: Path, name: str, how: str) -> CommandError:
    return CommandError(f"{folder / name} {how}; remove {folder}, and the same command makes it again from the texts")


def _check_range(tokens: Tokens, end: int) -> None:
    for name, part in (("train.bin", tokens.train), ("valid.bin", tokens.valid)):
        if part.max() >= end:
            raise _damaged(tokens.folder, name, f"must hold tokens below {end}, but holds {part.max()}")


# ---- tokens.json ----


def _read_record(folder: Path, keep: bool) -> TokensRecord | None:
    """Return what tokens.json says, or None if the folder has no complete tokens. With `keep`, raise where it is damaged."""
    path = folder / "tokens.json"
    if not path.exists():
        return None
    try:
        record = json.loads(read_regular(path).decode())
        if type(record.get("key")) is str and type(record["files"]) is int:
            return TokensRecord(record["vocab_size"], [], {}, record["key"])
        texts = [(str(name), int(size), int(changed), list(sums)) for name, size, changed, sums in record["texts"]]
        written = {name: (int(record["written"][name][0]), list(record["written"][name][1])) for name in _WRITTEN}
        end = None if record.get("end") is None else int(record["end"])
        return TokensRecord(record["vocab_size"], texts, written, None, record.get("tokenizer"), end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if keep:
            how = f"can't be read: {error.strerror}" if isinstance(error, OSError) else "is not as it was written"
            raise _damaged(folder, path.name, how) from None
        return None


def _difference(record: TokensRecord, files: Sequence[Path], vocab_size: int, given: FolderTokenizer | None) -> str | None:
    """Return how texts or their tokenizer differ from the record's. A file is read if its path, size or time differ."""
    if record.tokenizer != (None if given is None else given.hash):
        return "their tokenizer is another"
    if record.key is not None:
        return None if record.key == _key(files, vocab_size) else "they differ in a path, size or time"
    if record.vocab_size != vocab_size:
        return f"vocab_size was {record.vocab_size} and is {vocab_size}"
    before, now = [text[0] for text in record.texts], [str(path) for path in files]
    if len(before) != len(now):
        gone, new = set(before).difference(now), set(now).difference(before)
        return f"{min(gone)} is gone" if gone else f"{min(new, default=now[0])} is new"
    for (path, size, changed, sums), file in zip(record.texts, files, strict=True):
        there = file.stat()
        if there.st_size != size or ((str(file), there.st_mtime_ns) != (path, changed) and block_sums(file) != sums):
            return f"{file} has changed"
    return None


def _key(files: Sequence[Path], vocab_size: int) -> str:
    """Return a hash of the files' paths, sizes and times, and of vocab_size."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([stats, vocab_size]).encode()).hexdigest()


def _make(
    folder: Path, files: Sequence[Path], vocab_size: int, seq_length: int, told: Told, given: FolderTokenizer | None
) -> None:
    read = [_read(path) for path in files]
    texts = [text for _, text in read]
    random.Random(0).shuffle(read)
    documents = [document for document, _ in read]
    total = sum(map(len, documents))
    if not total:
        raise CommandError(f"the text is empty: {len(files)} files hold no characters")
    tokenizer = _trained(documents, vocab_size, told) if given is None else _read_tokenizer(given)
    numbers = _encoded(tokenizer, documents, vocab_size, told, None if given is None else given.end)
    cut = int(len(numbers) * (1 - _VALID))
    train, valid = numbers[:cut], numbers[cut:]
    _check_length(train, valid, seq_length)
    contents = (tokenizer.to_str(pretty=True).encode(), train.view("u1").data, valid.view("u1").data)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokens.json").unlink(missing_ok=True)
        written = {name: _write(folder / name, memoryview(data)) for name, data in zip(_WRITTEN, contents, strict=True)}
        of_given = () if given is None else (None, given.hash, given.end)
        record = asdict(TokensRecord(vocab_size, texts, written, *of_given))
        write_atomically(folder / "tokens.json", json.dumps(record) + "\n")
    except OSError as error:
        raise CommandError(f"{folder} can't be written: {error.strerror}") from None


def _write(path: Path, data: memoryview) -> tuple[int, list[int]]:
    """Write a file. Return its size and checksums."""
    sums = BlockSums()
    sums.add(data)
    write_atomically(path, data)
    return len(data), sums.sums


def _check_length(train: Any, valid: Any, seq_length: int) -> None:
    for part, what in ((train, "training"), (valid, "evaluation, a twentieth,")):
        if len(part) <= seq_length:
            raise CommandError(
                f"the text is too short: its part for {what} has {len(part)} tokens, and a sequence is {seq_length} and one; "
                "give more with --data, or a smaller --seq-length"
            )


def _read(path: Path) -> tuple[str, tuple[str, int, int, list[int]]]:
    """Return a file's text, and its entry in TokensRecord."""
    sums = BlockSums()
    try:
        changed = path.stat().st_mtime_ns
        data = read_regular(path)
        sums.add(memoryview(data))
        document = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")  # as reading in text mode does
        return document, (str(path), len(data), changed, sums.sums)
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise CommandError(f"{path} can't be read: {why}") from None


def _trained(documents: Sequence[str], vocab_size: int, told: Told) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    told("training the tokenizer", 0, 1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_as_much(documents, _TRAINED_ON), trainer)
    told("training the tokenizer", 1, 1)
    return tokenizer


def _read_tokenizer(given: FolderTokenizer) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(given.content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _as_much(documents: Iterable[str], most: int) -> Iterator[str]:
    for document in documents:
        if most <= 0:
            return
        yield document[:most]
        most -= len(document)


def _encoded(tokenizer: Any, documents: Sequence[str], vocab_size: int, told: Told, given_end: int | None) -> Any:
    """Return all documents' tokens. A tokenizer that was given adds its own to each, such as one that begins a text."""
    import numpy

    own, end, pieces = given_end is not None, tokenizer.token_to_id(END) if given_end is None else given_end, []
    for first in range(0, len(documents), _AT_ONCE):
        told("encoding the text", first, len(documents))
        for encoded in tokenizer.encode_batch(documents[first : first + _AT_ONCE], add_special_tokens=own):
            ids = encoded.ids if own and encoded.ids[-1:] == [end] else [*encoded.ids, end]
            pieces.append(numpy.asarray(ids, dtype=_number_type(vocab_size)))
    told("encoding the text", len(documents), len(documents))
    return numpy.concatenate(pieces)


def _number_type(vocab_size: int) -> str:
    order = "<" if sys.byteorder == "little" else ">"
    return f"{order}u2" if vocab_size <= 1 << 16 else f"{order}u4"
