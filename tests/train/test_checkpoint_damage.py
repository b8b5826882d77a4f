"""Damage on disk is named, not trained on: flipped bits, short and empty files, texts and tokens that have changed."""

import json
import random
import shlex
import shutil

import pytest
import torch
from train import checkpoint_killed
from train.checkpoint_runs import alone, configured, flip, go, saved, started

from onepass.cli import main
from onepass.runtime.errors import CommandError
from onepass.train import checkpoint, checksums, text
from onepass.train.checkpoint import folders
from onepass.train.setup import make

SMALL = shlex.split(
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --vocab-size 300 --seq-length 16 --micro-batch-size 2 --samples 0 "
    "--eval-iters 0 --lr-warmup-iters 1 --no-table --no-fusion-table --device cpu"
)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", 1000)


def load(path, trained=None, **how):
    config, options = configured()
    return checkpoint.load(path, trained or make(config, options, alone()), config, alone(), **how)


def refused(act):
    with pytest.raises(CommandError) as said:
        act()
    return str(said.value)


# ---- checksums ----


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 3500])
def test_pieces_of_any_size_have_the_files_checksums(size, tmp_path, small_blocks):
    path, data = tmp_path / "file", random.Random(size).randbytes(size)
    path.write_bytes(data)
    for step in (1, 7, 1000, 5000):
        sums = checksums.BlockSums()
        for start in range(0, size, step):
            sums.add(memoryview(data)[start : start + step])
        assert sums.sums == checksums.block_sums(path) and len(sums.sums) == -(-size // 1000)
        assert checksums.change(path, size, sums.sums) is None


def test_a_flipped_bit_is_seen_by_the_rank_that_reads_its_block(tmp_path, small_blocks):
    path = tmp_path / "file"
    path.write_bytes(random.Random(0).randbytes(6500))
    sums = checksums.block_sums(path)
    flip(path, 5999, 1)
    said = "has changed since it was written, in bytes 5000 to 6000"
    assert checksums.change(path, 6500, sums) == said
    assert [checksums.change(path, 6500, sums, slice(rank, None, 4)) for rank in range(4)] == [None, said, None, None]
    assert checksums.change(path, 6500, None) is None
    assert checksums.change(path, 6500, sums[1:]) == "must have a checksum for each of its 7 blocks, but has 6"


# ---- checkpoints ----


@pytest.mark.parametrize("name", ["0.safetensors", "checkpoint.json"])
def test_any_flipped_bit_is_named_and_changes_nothing(name, tmp_path, small_blocks):
    config, options = configured()
    _, path = started(tmp_path)
    trained = make(config, options.replace(seed=2), alone())
    before = [parameter.clone() for parameter in trained.model.parameters()]
    draw, good = random.Random(0), (path / name).read_bytes()
    for _ in range(25):
        at, bit = draw.randrange(len(good)), draw.randrange(8)
        flip(path / name, at, 1 << bit)
        assert name in refused(lambda: load(path, trained)), (at, bit)
        (path / name).write_bytes(good)
    assert all(map(torch.equal, before, trained.model.parameters()))
    assert load(path, trained) == 2


def test_without_checksums_a_flipped_bit_is_loaded(tmp_path):
    _, path = started(tmp_path)
    flip(path / "0.safetensors", (path / "0.safetensors").stat().st_size - 2)
    assert load(path, verify=False) == 2


def test_a_checkpoint_of_before_checksums_is_loaded(tmp_path):
    trained, path = started(tmp_path)
    index = json.loads((path / "checkpoint.json").read_text())
    for name in ("checksum", "checksums", "vocabulary"):
        del index[name]
    (path / "checkpoint.json").write_text(json.dumps(index))
    config, options = configured(seed=2)
    other = make(config, options, alone())
    assert load(path, other) == 2
    checkpoint.check_vocabulary(path, "any")
    assert all(map(torch.equal, trained.model.parameters(), other.model.parameters()))


def test_a_damaged_one_names_the_newest_good_one(tmp_path):
    config, options = configured(keep_checkpoints=0)
    trained = make(config, options, alone())
    go(trained, alone(), 0, 1)
    paths = [saved(tmp_path, step, trained, config, options, alone()) for step in (1, 2, 3, 4)]
    for path in paths[2:]:
        flip(path / "0.safetensors", 2000)
    instead = f"; the newest good one is {paths[1]}: --resume {paths[1]} goes on with it"
    assert checkpoint.find(tmp_path) == paths[3]
    assert refused(lambda: load(paths[3])).endswith(instead)
    (paths[3] / "checkpoint.json").unlink()
    for act in (lambda: checkpoint.find(tmp_path), lambda: checkpoint.check(paths[3], config)):
        assert refused(act) == f"{paths[3]}/checkpoint.json can't be read: No such file or directory{instead}"
    for path in paths[:2]:
        (path / "checkpoint.json").write_text("{")
    assert refused(lambda: checkpoint.find(tmp_path)) == f"{paths[3]}/checkpoint.json can't be read: No such file or directory"


def test_an_older_damaged_one_is_no_obstacle(tmp_path):
    config, options = configured(keep_checkpoints=0)
    trained = make(config, options, alone())
    first, last = (saved(tmp_path, step, trained, config, options, alone()) for step in (2, 4))
    (first / "checkpoint.json").write_text("{")
    assert checkpoint.find(tmp_path) == last and load(last) == 4
    (last / "checkpoint.json").write_text("{")
    (last / "a link to nothing").symlink_to(tmp_path / "nothing")
    (tmp_path / "checkpoints" / "step-00000009").write_text("no folder")
    again = tmp_path / "checkpoints" / "step-00000003"  # of a run that went back, saved after step 4
    checkpoint.save(again.parent, 3, trained, config, options, alone())
    assert checkpoint.find(tmp_path) == again and list(folders.saved(again.parent)) == [again]


def test_another_vocabulary_is_refused(tmp_path):
    config, options = configured()
    trained = make(config, options, alone())
    checkpoint.save(tmp_path / "checkpoints", 1, trained, config, options, alone(), vocabulary="a hash")
    path = checkpoint.find(tmp_path)
    checkpoint.check_vocabulary(path, "a hash")
    said = refused(lambda: checkpoint.check_vocabulary(path, "another hash"))
    assert said.startswith(f"the checkpoint {path} must be of this run's tokenizer, but is of another, on whose")


# ---- tokens and texts ----


def prepare(folder, *names, **how):
    return text.prepare(folder, [str(name) for name in names], 300, 8, lambda *_: None, **how)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(3):
        (tmp_path / "texts" / f"{i}.txt").write_text("".join(f"word{i * j} of {j}\r\n" for j in range(200)))
    return tmp_path / "texts"


def tokens_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


DAMAGES = {
    "must be of {size} bytes, but is of {half}": lambda data: data[: len(data) // 2],
    "must be of {size} bytes, but is of 0": lambda data: b"",
    "has changed since it was written, in bytes 0 to {size}": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["train.bin", "valid.bin", "tokenizer.json"])
@pytest.mark.parametrize("said", DAMAGES)
def test_damaged_tokens_are_named(said, name, keep, tmp_path, corpus):
    place = tmp_path / "tokens"
    prepare(place, corpus)
    path, before = place / name, tokens_of(place)
    size = len(before[name])
    path.write_bytes(DAMAGES[said](before[name]))
    damage = said.format(size=size, half=size // 2)
    wanted = f"{path} {damage}; remove {place}, and the same command makes it again from the texts"
    assert refused(lambda: prepare(place, corpus, keep=keep)) == wanted
    shutil.rmtree(place)
    prepare(place, corpus, keep=keep)
    assert tokens_of(place) == before


@pytest.mark.parametrize("record", ["{", "[]", "null", '{"texts": 5}', '{"texts": [[1]], "vocab_size": 3}', "[" * 100_000])
def test_a_damaged_record_is_named_or_made_again(record, tmp_path, corpus):
    place = tmp_path / "tokens"
    prepare(place, corpus)
    before = tokens_of(place)
    (place / "tokens.json").write_text(record)
    assert f"{place}/tokens.json is not as it was written; remove" in refused(lambda: prepare(place, corpus, keep=True))
    prepare(place, corpus)
    assert tokens_of(place) == before


def test_tokens_of_before_checksums_are_used_until_a_file_changes(tmp_path, corpus):
    place = tmp_path / "tokens"
    prepare(place, corpus)
    files = text.find_files([str(corpus)])
    (place / "tokens.json").write_text(json.dumps({"key": text._key(files, 300), "files": len(files), "vocab_size": 300}))
    before = tokens_of(place)
    prepare(place, corpus, keep=True)
    assert tokens_of(place) == before
    files[0].write_text("other words " * 100)
    assert "has the tokens, but they differ in a path, size or time:" in refused(lambda: prepare(place, corpus, keep=True))
    assert tokens_of(place) == before
    (place / "train.bin").write_bytes(b"")
    assert "train.bin can't be read: cannot mmap an empty file; remove" in refused(lambda: text.load(place, 300))


def test_tokens_past_the_vocabulary_are_named(tmp_path, corpus):
    place = tmp_path / "tokens"
    prepare(place, corpus)
    files = text.find_files([str(corpus)])
    (place / "tokens.json").write_text(json.dumps({"key": text._key(files, 300), "files": len(files), "vocab_size": 300}))
    flip(place / "valid.bin", 9, 0x80)
    assert f"{place}/valid.bin must hold tokens below 300, but holds 3" in refused(lambda: prepare(place, corpus))


def test_texts_are_the_same_by_their_content_and_named_where_it_changed(tmp_path, corpus, monkeypatch):
    place = tmp_path / "tokens"
    prepare(place, corpus)
    before = tokens_of(place)
    (corpus / "0.txt").touch()
    prepare(place, corpus, keep=True)
    monkeypatch.chdir(tmp_path)
    prepare(place, "texts", keep=True)
    assert tokens_of(place) == before
    one = corpus / "1.txt"
    good = one.read_bytes()
    one.write_bytes(good.replace(b"of 7", b"of 8"))
    assert f"has the tokens, but {one} has changed: the model" in refused(lambda: prepare(place, corpus, keep=True))
    one.write_bytes(good)
    (corpus / "new.txt").write_text("new")
    assert f"but {corpus}/new.txt is new: " in refused(lambda: prepare(place, corpus, keep=True))
    (corpus / "new.txt").unlink()
    one.unlink()
    assert f"but {one} is gone: " in refused(lambda: prepare(place, corpus, keep=True))
    assert tokens_of(place) == before
    prepare(place, corpus)  # a run that has no model yet takes the texts as they are
    assert tokens_of(place) != before


def test_line_ends_are_read_as_in_text_mode(tmp_path):
    path = tmp_path / "file"
    path.write_bytes("a\r\nb\rc\nd\r\r\n\x85\u2028".encode())
    assert text._read(path)[0] == path.read_text(encoding="utf-8")


@pytest.mark.skipif(not hasattr(checkpoint_killed.os, "fork"), reason="needs fork")
def test_killed_at_any_moment_tokens_are_made_again(tmp_path):
    found = checkpoint_killed.run_tokens(tmp_path)
    assert len(found) > 12 and found == [(9, True)] * (len(found) - 1) + [(0, True)]


# ---- the command ----


def test_a_run_whose_texts_changed_is_refused(tmp_path, corpus, capsys):
    def train(*more):
        return main(["train", "--data", str(corpus), *SMALL, *map(str, more)])

    run = tmp_path / "run"
    assert train("--run-dir", run, "--train-iters", 2) == 0
    before = tokens_of(run / "tokens")
    (corpus / "0.txt").write_text("quite other words, for another tokenizer " * 100)
    assert train("--resume", run, "--train-iters", 3) == 2
    assert f"onepass train: --data must be the texts of which {run}/tokens has the tokens, but" in capsys.readouterr().err
    assert tokens_of(run / "tokens") == before
    assert train("--resume", run, "--run-dir", tmp_path / "other", "--train-iters", 3) == 2
    assert "step-00000002 must be of this run's tokenizer, but is of another" in capsys.readouterr().err
