"""Files by somebody who means harm: they are refused in words, run nothing, and neither fill memory nor reach other files."""

import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from train.checkpoint_runs import alone, configured, started

from onepass.cli import main
from onepass.gpt import Config, Model
from onepass.gpt.weights import load_huggingface, save_huggingface
from onepass.runtime.errors import CommandError
from onepass.train import checkpoint, text
from onepass.train.checkpoint import folders
from onepass.train.setup import make

DEEP = "[" * 200_000
SMALL = shlex.split(
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --vocab-size 300 --seq-length 16 --micro-batch-size 2 --samples 1 "
    "--sample-tokens 2 --eval-iters 1 --lr-warmup-iters 1 --no-table --no-fusion-table --device cpu"
)


# ---- other people's weights ----

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def theirs(tmp_path):
    config = Config(
        num_layers=1, hidden_size=16, ffn_hidden_size=32, num_attention_heads=2, vocab_size=40, max_position_embeddings=16
    )
    save_huggingface(Model(config, seed=0), tmp_path / "theirs")
    return tmp_path / "theirs"


def config(**changes):
    def act(folder):
        said = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({name: value for name, value in said.items() if value != "absent"}))

    return act


def header(change):
    """Return what gives the weights' file another header: a changed dict, or bytes."""

    def act(folder):
        data = (folder / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        said = json.loads(data[8:end])
        made = change(said) or json.dumps(said).encode()
        (folder / WEIGHTS).write_bytes(len(made).to_bytes(8, "little") + made + data[end:])

    return act


def tensor(**changes):
    return header(lambda said: said[NORM].update(changes))


def written(name, content):
    data = (
        content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else json.dumps(content).encode()
    )
    return lambda folder: (folder / name).write_bytes(data)


NO_SAFETENSORS = "must be a safetensors file, but is not"
HOSTILE_WEIGHTS = {
    "a list for a config": (written(CONFIG, []), "must be a JSON object, but is []"),
    "a deep config": (written(CONFIG, DEEP), "must be JSON, but is not: nested too deeply"),
    "a config of other bytes": (written(CONFIG, b"\xff\xfe"), "must be JSON, but is not: 'utf-8' codec"),
    "a number of 10,000 digits": (written(CONFIG, '{"a": ' + "9" * 10_000 + "}"), "must be JSON, but is not: Exceeds the limit"),
    "a huge config": (lambda folder: os.truncate(folder / CONFIG, 1 << 30), "must be of at most 67108864 bytes"),
    "no size": (config(hidden_size="absent"), "config.json of a llama must have 'hidden_size', but has not"),
    "a text for a size": (config(hidden_size="16"), "hidden_size must be a whole number, but is '16'"),
    "a billion layers": (config(num_hidden_layers=10**9), "must be of the weights beside it, but is of 2,592,000,000,656 param"),
    "a huge vocabulary": (config(vocab_size=10**15), "must be of the weights beside it, but is of 16,000,000"),
    "a vocabulary past all numbers": (config(vocab_size=10**30), "vocab_size must be below 2**63 in size, but has 100 bits"),
    "many positions": (config(max_position_embeddings=10**12), "max_position_embeddings must be at most 16777216, but is 1000"),
    "a list for a type": (config(torch_dtype=["float32"]), "dtype must be one of"),
    "a list for an activation": (config(hidden_act=["silu"]), "hidden_act must be one of"),
    "a list for rope": (config(rope_scaling=[1, 2]), "rope_parameters must be an object, but is [1, 2]"),
    "an empty file": (written(WEIGHTS, b""), NO_SAFETENSORS),
    "a header longer than the file": (written(WEIGHTS, (1 << 62).to_bytes(8, "little") + b"{}"), NO_SAFETENSORS),
    "a deep header": (header(lambda said: b'{"a":' + DEEP.encode()), NO_SAFETENSORS),
    "offsets past the end": (tensor(data_offsets=[0, 1 << 40]), NO_SAFETENSORS),
    "negative offsets": (tensor(data_offsets=[-64, 0]), NO_SAFETENSORS),
    "offsets of another tensor": (tensor(data_offsets=[0, 64]), NO_SAFETENSORS),
    "a shape larger than its data": (tensor(shape=[1 << 40]), NO_SAFETENSORS),
    "a shape that overflows": (tensor(shape=[1 << 33, 1 << 33]), NO_SAFETENSORS),
    "whole numbers": (tensor(dtype="I32"), f"the weight {NORM} must be of floats, but is torch.int32"),
    "an index that leaves the folder": (written(INDEX, {"weight_map": {NORM: f"../theirs/{WEIGHTS}"}}), "must name files beside"),
    "an index of absolute paths": (written(INDEX, {"weight_map": {NORM: "/etc/passwd"}}), "must name files beside it, but '/etc"),
    "an index of the folder above": (written(INDEX, {"weight_map": {NORM: ".."}}), "must name files beside it, but '..' is none"),
    "an index of numbers": (written(INDEX, {"weight_map": {NORM: 5}}), "must have weight_map, the file of each tensor, but has"),
    "an index without a map": (written(INDEX, {}), "must have weight_map, the file of each tensor, but has None"),
    "a deep index": (written(INDEX, DEEP), "must be JSON, but is not: nested too deeply"),
}


@pytest.mark.parametrize("name", HOSTILE_WEIGHTS)
def test_weights_are_refused(name, theirs):
    load_huggingface(theirs)
    act, said = HOSTILE_WEIGHTS[name]
    act(theirs)
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        load_huggingface(theirs)
    assert said in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs mkfifo")
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name, theirs):
    (theirs / name).unlink()
    os.mkfifo(theirs / name)
    with pytest.raises(FileNotFoundError, match=f"folder must hold {name}"):
        load_huggingface(theirs)


# ---- checkpoints: whoever changes one on purpose gives it checksums that are right ----

OURS = "final_layernorm.weight"


def chunk(at, value):
    return lambda index: index["tensors"][OURS]["chunks"][0].__setitem__(at, value)


def overlapping(index):
    """As many numbers as the tensor has, of which the last half comes from nowhere."""
    chunks = index["tensors"][OURS]["chunks"]
    ((offsets, (size,), file, start),) = chunks
    chunks[:] = [[offsets, [size // 2], file, start], [offsets, [size - size // 2], file, start]]


HOSTILE_INDICES = {
    "a place before the file": chunk(3, -4),
    "a place past any file": chunk(3, 1 << 80),
    "half a number": chunk(0, [0.5]),
    "a text for a range": chunk(1, ["16"]),
    "ranges of another rank": chunk(1, [1, 16]),
    "parts that overlap": overlapping,
    "a link's name": chunk(2, "../../secret"),
    "an absolute name": chunk(2, "/etc/passwd"),
    "the folder itself": chunk(2, "."),
    "the folder above": chunk(2, ".."),
    "a name of bytes that no file has": chunk(2, "a\0b"),
    "no dict of tensors": lambda index: index["tensors"].update({OURS: []}),
    "a tensor without end": lambda index: index["tensors"][OURS].update(shape=[1 << 62]),
    "checksums of no file": lambda index: index["files"].update({"/etc/passwd": 5}),
    "checksums that are none": lambda index: index["checksums"].update({"0.safetensors": 5}),
    "no dict of checksums": lambda index: index.update(checksums=[1]),
    "texts for sizes": lambda index: index["files"].update({"0.safetensors": "7"}),
}


def load(path):
    config, options = configured()
    return checkpoint.load(path, make(config, options, alone()), config, alone())


@pytest.mark.parametrize("name", HOSTILE_INDICES)
def test_an_index_is_refused(name, tmp_path):
    _, path = started(tmp_path)
    index = json.loads((path / "checkpoint.json").read_text())
    del index["checksum"]
    HOSTILE_INDICES[name](index)
    (path / "checkpoint.json").write_text(folders.index_json(index))
    with pytest.raises(CommandError, match=r"(damaged|must have|checkpoint\.json)"):
        load(path)


@pytest.mark.parametrize("content", [DEEP, "[]", "5", "{}", '{"format": 1, "step": ' + "9" * 10_000 + "}", "\ud800"])
def test_what_is_no_index_is_refused(content, tmp_path):
    _, path = started(tmp_path)
    (path / "checkpoint.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(CommandError, match=r"checkpoint\.json (can't be read: it is no JSON|must )"):
        load(path)


def test_a_huge_index_is_not_read(tmp_path):
    _, path = started(tmp_path)
    os.truncate(path / "checkpoint.json", 1 << 32)
    with pytest.raises(CommandError, match=r"checkpoint\.json must be of at most 268435456 bytes, but is of 4294967296$"):
        load(path)


@pytest.mark.parametrize("start", [(1 << 63).to_bytes(8, "little"), (500).to_bytes(8, "little") + DEEP.encode()[:500]])
def test_a_header_is_refused(start, tmp_path):
    _, path = started(tmp_path)
    data = path / "0.safetensors"
    data.write_bytes(start + data.read_bytes()[len(start) :])
    index = json.loads((path / "checkpoint.json").read_text())
    del index["checksum"]
    del index["checksums"]
    (path / "checkpoint.json").write_text(json.dumps(index))
    with pytest.raises(CommandError, match=r"0\.safetensors is no file of it$"):
        load(path)


# ---- the command ----


def train(corpus, *more):
    return main(["train", "--data", str(corpus), *SMALL, *map(str, more)])


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir [{}]", "!!python/name:os.mkdir", "!!python/module:os", "!unknown 5"]
)
def test_tags_in_yaml_run_nothing(tag, tmp_path, corpus, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(f"hidden_size: {tag.format(tmp_path / 'made')}\n")
    assert train(corpus, "--config", path, "--run-dir", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "is no YAML of settings: could not determine a constructor for the tag" in said and said.count("\n") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.yaml"]


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_no_text(path, tmp_path, capsys):
    assert train(path, "--run-dir", tmp_path / "run") == 2
    assert capsys.readouterr().err == f"onepass train: --data {path} is no file and no folder\n"


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, corpus):
    place = tmp_path / "tokens"
    text.prepare(place, [str(corpus)], 300, 16, lambda *_: None)
    record = json.loads((place / "tokens.json").read_text())
    (place / "tokens.json").write_text(json.dumps(record | {"vocab_size": 280}))
    with pytest.raises(CommandError, match=r"train\.bin must hold tokens below 280, but holds 29\d; remove"):
        text.prepare(place, [str(corpus)], 280, 16, lambda *_: None, keep=True)


@pytest.mark.parametrize(
    "name", ["config.yaml", "log.csv", "loss.png", "samples.txt", "tokens", "tokens/train.bin", "checkpoints"]
)
def test_a_link_out_of_the_runs_folder_is_refused(name, tmp_path, corpus, capsys):
    outside, run = tmp_path / "outside", tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside)
    assert train(corpus, "--run-dir", run, "--train-iters", 1) == 2
    assert f"{run / name} must be in the run's folder, but is a link to {outside}: " in capsys.readouterr().err
    assert not outside.exists() and [each.name for each in run.iterdir()] == [name.split("/")[0]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("ended") / "run"
    assert train(corpus, "--run-dir", folder, "--train-iters", 1, "--samples", 0) == 0
    return folder


@pytest.fixture
def at_once():
    """Interrupt what waits for a pipe."""

    def late(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path):
    os.mkfifo(path)
    return "a named pipe"


def bound(path):
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as made:  # a socket's path has at most 107 bytes
        made.bind(f"{short}/socket")
        os.rename(f"{short}/socket", path)
    return "a socket"


def device(path):
    path.symlink_to("/dev/zero")
    return "a device"


INDEX_OF_RUN = "checkpoints/step-00000001/checkpoint.json"
NOT_FILES = [
    *((pipe, name) for name in (INDEX_OF_RUN, "config.yaml", "tokens/tokens.json", "tokens/tokenizer.json", "log.csv")),
    (bound, INDEX_OF_RUN),
    (bound, "log.csv"),
    (device, INDEX_OF_RUN),
]


@pytest.mark.parametrize(("put", "name"), NOT_FILES, ids=[f"{put.__name__}-{name.split('/')[-1]}" for put, name in NOT_FILES])
def test_what_is_no_file_in_a_runs_folder_is_refused_at_once(put, name, ended, tmp_path, at_once, capsys):
    run = shutil.copytree(ended, tmp_path / "run")
    (run / name).unlink()
    kind = put(run / name)
    assert main(["train", "--device", "cpu", "--resume", str(run), "--train-iters", "2", "--no-verify-checksums"]) == 2
    said = capsys.readouterr().err
    assert f"{run / name}" in said and f"it must be a file, but is {kind}" in said and said.count("\n") == 1


WATCHED = ("socket.connect", "socket.bind", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class")
CHANGING = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink")


def test_a_run_writes_in_its_folder_alone_and_starts_nothing(tmp_path, corpus, monkeypatch):
    """Audit hooks see all files that Python opens, sockets, processes and unpickled classes."""
    run, found, on = tmp_path / "run", [], [False]
    assert train(corpus, "--run-dir", run, "--train-iters", 1) == 0  # imports, and their caches
    (tmp_path / "linked").symlink_to(run)  # a run's own folder may be a link

    def watch(event, args):
        if not on[0]:
            return
        if event in WATCHED:
            found.append((event, args))
        elif event == "open" and isinstance(args[0], (str, bytes)) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith((str(run), os.devnull)) and "__pycache__" not in path:
                found.append((event, path))
        elif event in CHANGING and not os.path.realpath(os.fsdecode(args[0])).startswith(str(run)):
            found.append((event, args))

    sys.addaudithook(watch)
    on[0] = True
    try:
        assert train(corpus, "--resume", tmp_path / "linked", "--train-iters", 3) == 0
    finally:
        on[0] = False
    assert found == []
    assert sorted(Path(run, "checkpoints").iterdir())[-1].name == "step-00000003"
