"""Tokenises text files: trains a byte-pair tokenizer on them, and writes two files of token ids, which are memory-mapped.

A folder of tokens has `tokenizer.json`, `train.bin`, `valid.bin` (the last part of the shuffled documents) and `tokens.json`.
`tokens.json` records which files were read, and is written last. A folder without it is incomplete and is made again.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepass.runtime.errors import CommandError

END = "<|endoftext|>"  # between documents
SMALLEST = 257  # vocabulary: the bytes and END
_VALID = 0.05  # of the text
_NOT_LIBRARY = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "encodings", "turtledemo"}
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


def python_library() -> list[Path]:
    """Return the source files of this machine's standard library, without its tests."""
    top = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(top.rglob("*.py")) if not _NOT_LIBRARY.intersection(path.relative_to(top).parts)]


def _passed_over(inside: Path) -> bool:
    """Whether to skip a file: hidden files and folders, and __pycache__, which source folders contain."""
    return any(part.startswith(".") or part == "__pycache__" for part in inside.parts)


_TOKENS = ("tokens/tokenizer.json", "tokens/train.bin")
_OF_A_RUN = {"config.yaml", "log.csv", "loss.png", "samples.txt", "tokens", "checkpoints", "reference"}


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
    found: list[Path] = []
    for name in named:
        path = Path(name)
        if path.is_dir():
            there = ((p, p.relative_to(path)) for p in path.rglob("*") if p.is_file())
            inside = sorted(p for p, name in there if not _passed_over(name) and not _written_by_a_run(path, name))
            if not inside:
                raise CommandError(f"--data {name} has no files in it")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise CommandError(f"--data {name} is no file and no folder")
    return found


def prepare(folder: Path, named: Sequence[str], vocab_size: int, seq_length: int, told: Told) -> Tokens:
    """Return the tokens of these texts. Tokenise them unless the folder has their tokens already."""
    files = find_files(named)
    key = _key(files, vocab_size)
    said = folder / "tokens.json"
    if not said.exists() or json.loads(said.read_text()).get("key") != key:
        _make(folder, files, vocab_size, seq_length, told)
        said.write_text(json.dumps({"key": key, "files": len(files), "vocab_size": vocab_size}, indent=1) + "\n")
    tokens = load(folder, vocab_size)
    _check_length(tokens.train, tokens.valid, seq_length)
    return tokens


def load(folder: Path, vocab_size: int) -> Tokens:
    import numpy
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    kind = _number_type(vocab_size)
    train, valid = (numpy.memmap(folder / f"{name}.bin", dtype=kind, mode="r") for name in ("train", "valid"))
    return Tokens(folder, train, valid, tokenizer, tokenizer.get_vocab_size())


def _key(files: Sequence[Path], vocab_size: int) -> str:
    """Return a hash of the files' paths, sizes and times, and of vocab_size. It tells whether the same files were read before."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([stats, vocab_size]).encode()).hexdigest()


def _make(folder: Path, files: Sequence[Path], vocab_size: int, seq_length: int, told: Told) -> None:
    files = list(files)
    random.Random(0).shuffle(files)
    documents = [_read(path) for path in files]
    total = sum(map(len, documents))
    if not total:
        raise CommandError(f"the text is empty: {len(files)} files hold no characters")
    tokenizer = _trained(documents, vocab_size, told)
    numbers = _encoded(tokenizer, documents, vocab_size, told)
    cut = int(len(numbers) * (1 - _VALID))
    train, valid = numbers[:cut], numbers[cut:]
    _check_length(train, valid, seq_length)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"{folder} can't be written: {error.strerror}") from None
    (folder / "tokens.json").unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    train.tofile(folder / "train.bin")
    valid.tofile(folder / "valid.bin")


def _check_length(train: Any, valid: Any, seq_length: int) -> None:
    for part, what in ((train, "training"), (valid, "evaluation, a twentieth,")):
        if len(part) <= seq_length:
            raise CommandError(
                f"the text is too short: its part for {what} has {len(part)} tokens, and a sequence is {seq_length} and one; "
                "give more with --data, or a smaller --seq-length"
            )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
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


def _as_much(documents: Iterable[str], most: int) -> Iterator[str]:
    for document in documents:
        if most <= 0:
            return
        yield document[:most]
        most -= len(document)


def _encoded(tokenizer: Any, documents: Sequence[str], vocab_size: int, told: Told) -> Any:
    import numpy

    end, pieces = tokenizer.token_to_id(END), []
    for first in range(0, len(documents), _AT_ONCE):
        told("encoding the text", first, len(documents))
        for encoded in tokenizer.encode_batch(documents[first : first + _AT_ONCE], add_special_tokens=False):
            pieces.append(numpy.asarray([*encoded.ids, end], dtype=_number_type(vocab_size)))
    told("encoding the text", len(documents), len(documents))
    return numpy.concatenate(pieces)


def _number_type(vocab_size: int) -> str:
    order = "<" if sys.byteorder == "little" else ">"
    return f"{order}u2" if vocab_size <= 1 << 16 else f"{order}u4"
