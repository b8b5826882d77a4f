"""From files to tokens: what is read, what comes back, which tokens a step sees."""

import json

import pytest
import torch

from onepass.runtime.errors import CommandError
from onepass.train import text
from onepass.train.batches import Batches

CPU = torch.device("cpu")


def nothing(what, done, total):
    pass


def prepared(folder, named, vocab_size=300, seq_length=8):
    return text.prepare(folder, [str(name) for name in named], vocab_size, seq_length, nothing)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "inner").mkdir(parents=True)
    for i in range(30):
        where = folder / "inner" if i % 2 else folder
        where.joinpath(f"{i}.txt").write_text(
            f"document {i}: the quick brown fox jumps over the lazy dog, äöü 漢字 {i}\n" * 5, encoding="utf-8"
        )
    (folder / ".hidden").write_text("never read")
    return folder


def test_files_of_a_folder(tmp_path):
    folder = tmp_path / ".cache" / "texts"  # hidden itself, which whoever names it knows
    for name in ("a.txt", "inner/b.py", ".git/config", "inner/.hidden", "inner/__pycache__/b.cpython-312.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"text" if name[-1] in "ty" else b"\xff\xfe")
    assert text.find_files([str(folder)]) == [folder / "a.txt", folder / "inner" / "b.py"]


def test_all_of_the_text_comes_back(tmp_path, corpus):
    tokens = prepared(tmp_path / "tokens", [corpus])
    numbers = [*tokens.train.tolist(), *tokens.valid.tolist()]
    assert max(numbers) < tokens.vocab_size <= 300
    back = tokens.tokenizer.decode(numbers, skip_special_tokens=False).split(text.END)
    wanted = [path.read_text(encoding="utf-8") for path in corpus.rglob("*.txt")]
    assert sorted(back[:-1]) == sorted(wanted) and back[-1] == ""
    assert len(tokens.valid) / len(numbers) == pytest.approx(0.05, abs=0.01)


def test_what_was_made_is_used_again_until_the_files_change(tmp_path, corpus):
    told = []
    for _ in range(2):
        text.prepare(tmp_path / "t", [str(corpus)], 300, 8, lambda *what: told.append(what))
        count = len(told)
    assert len(told) == count > 0
    first = count
    (corpus / "new.txt").write_text("something new " * 50)
    text.prepare(tmp_path / "t", [str(corpus)], 300, 8, lambda *what: told.append(what))
    assert len(told) > first
    half = json.loads((tmp_path / "t" / "tokens.json").read_text())
    (tmp_path / "t" / "tokens.json").write_text(json.dumps(half | {"key": "of a run that was killed"}))
    text.prepare(tmp_path / "t", [str(corpus)], 300, 8, lambda *what: told.append(what))
    assert len(told) > 2 * first


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: [folder / "missing"], "is no file and no folder"),
        (lambda folder: [folder], "has no files in it"),
        (lambda folder: [write(folder / "empty.txt", b"")], "the text is empty"),
        (lambda folder: [write(folder / "short.txt", b"a few words")], "the text is too short"),
        (lambda folder: [write(folder / "picture.png", b"\x89PNG\xff\xfe")], "picture.png can't be read: it is not UTF-8 text"),
    ],
)
def test_text_that_is_none(tmp_path, make, said):
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(CommandError, match=said):
        prepared(tmp_path / "out", make(folder))
    assert not (tmp_path / "out" / "tokens.json").exists()


def test_a_text_that_was_long_enough_for_shorter_sequences(tmp_path, corpus):
    prepared(tmp_path / "t", [corpus])
    with pytest.raises(CommandError, match="the text is too short: its part for evaluation"):
        prepared(tmp_path / "t", [corpus], seq_length=1000)


def write(path, data):
    path.write_bytes(data)
    return path


def test_pythons_own_library_is_there():
    files = text.python_library()
    assert len(files) > 200 and not any("test" in path.parts for path in files)


def test_steps_see_the_same_on_any_layout_and_other_tokens_each():
    numbers = torch.arange(1000, dtype=torch.int32).numpy()
    whole = Batches(numbers, 8, 16, 3, 0, 1, CPU)
    for step in (0, 1, 70):
        one = whole.of_step(step)
        assert one.tokens.shape == one.labels.shape == (8, 16)
        assert torch.equal(one.tokens[:, 1:], one.labels[:, :-1]) and torch.equal(one.labels[:, -1], one.tokens[:, -1] + 1)
        parts = [Batches(numbers, 8, 16, 3, rank, 4, CPU).of_step(step) for rank in range(4)]
        assert torch.equal(torch.cat([part.tokens for part in parts]), one.tokens)
        assert torch.equal(whole.of_step(step).tokens, one.tokens)
    starts = {int(start) for step in range(50) for start in whole.of_step(step).tokens[:, 0]}
    assert len(starts) > 200
    other = Batches(numbers, 8, 16, 4, 0, 1, CPU)
    assert not torch.equal(other.of_step(0).tokens, whole.of_step(0).tokens)


def test_the_last_token_can_be_a_label_and_none_is_past_the_end():
    numbers = torch.arange(18, dtype=torch.int32).numpy()
    seen = torch.cat([Batches(numbers, 8, 16, 0, 0, 1, CPU).of_step(step).labels.flatten() for step in range(20)])
    assert seen.max() == 17 and seen.min() == 1


def test_a_large_seed_draws_as_well():
    text = torch.arange(1000).numpy()
    one, other = (Batches(text, 4, 8, seed, 0, 1, CPU).of_step(3).tokens for seed in ((1 << 63) - 1, (1 << 63) - 2))
    assert one.shape == (4, 8) and not torch.equal(one, other)
