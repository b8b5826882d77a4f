"""The trainer's settings: types, contradictions, the learning rate, where settings come from."""

import argparse
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest

from onepass.cli import main
from onepass.gpt import Config
from onepass.gpt.settings import read_yaml
from onepass.train import command
from onepass.train.foreign_flags import MEGATRON, OTHERS, in_place_of
from onepass.train.options import TRAINING, Options
from onepass.train.updates import learning_rate


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"seq_length": 0}, "seq_length must be at least 1, but is 0"),
        ({"train_iters": 0}, "train_iters must be at least 1"),
        ({"lr": -1.0}, "lr must be at least 0, but is -1.0"),
        ({"clip_grad": -0.5}, "clip_grad must be at least 0"),
        ({"clip_grad": math.nan}, "clip_grad must be finite, but is nan"),
        ({"save_minutes": math.inf}, "save_minutes must be finite, but is inf"),
        ({"save_minutes": -1.0}, "save_minutes must be at least 0, but is -1.0"),
        ({"seed": 1 << 63}, "seed must be below 2**63 in size, but has 64 bits"),
        ({"lr": 10**400}, "lr must be below 2**63 in size, but has 1329 bits"),
        ({"adam_beta2": 1.0}, "adam_beta2 must be from 0 to below 1, but is 1.0"),
        ({"global_batch_size": 7}, "global_batch_size must be a multiple of micro_batch_size, 16, but is 7"),
        ({"min_lr": 1.0}, "min_lr must be at most lr, 0.003, but is 1"),
        ({"use_fsdp": True, "use_distributed_optimizer": True}, "must not both be true"),
        ({"use_fsdp": True, "cuda_graphs": True}, "cuda_graphs must be false with use_fsdp"),
        ({"release_main_grads": True, "cuda_graphs": True}, "release_main_grads must be false with cuda_graphs"),
        ({"release_main_grads": True, "use_fsdp": True}, "release_main_grads must be false with use_fsdp"),
        ({"seq_length": "long"}, "seq_length must be a whole number, but is 'long'"),
        ({"train_iters": True}, "train_iters must be a whole number, but is True"),
        ({"lr_decay_style": "cosin"}, "lr_decay_style must be 'cosine' or 'linear' or 'constant', but is 'cosin'"),
        ({"data": "a.txt"}, "data must be a list of texts, but is 'a.txt'"),
        ({"train_itters": 5}, "'train_itters' is no setting; did you mean 'train_iters'?"),
        ({"zzz": 5}, "'zzz' is no setting"),
    ],
)
def test_what_cannot_be_raises(values, said):
    with pytest.raises(ValueError) as raised:
        Options.from_dict(values)
    assert said in str(raised.value)


def test_values_that_are_as_good():
    assert Options(lr=1, data=["a", "b"]) == Options(lr=1.0, data=("a", "b"))
    assert Options(lr=1.0).lowest_lr == 0.1
    assert Options.from_dict(Options(lr=2.0).to_dict()) == Options(lr=2.0)


def test_presets_of_model_and_training_are_settings():
    for values in TRAINING.values():
        Options.from_dict(values)
    assert not set(Config.names()) & set(Options.names())  # one file has both


def test_the_learning_rate():
    options = Options(lr=1.0, min_lr=0.2, lr_warmup_iters=4, train_iters=15)
    rates = [learning_rate(step, options) for step in range(15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[14] == pytest.approx(0.2) and rates[9] == pytest.approx(0.6)
    assert all(a >= b for a, b in pairwise(rates[3:]))
    line = Options(lr=1.0, min_lr=0.0, lr_warmup_iters=0, train_iters=11, lr_decay_style="linear")
    assert [learning_rate(step, line) for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    flat = Options(lr=1.0, lr_warmup_iters=0, lr_decay_style="constant")
    assert {learning_rate(step, flat) for step in range(500)} == {1.0}
    assert learning_rate(0, Options(train_iters=1, lr_warmup_iters=0)) == Options().lr
    assert all(math.isfinite(learning_rate(s, Options(train_iters=3, lr_warmup_iters=50))) for s in range(3))


# ---- the command line ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hiden-size", "64"], "onepass train: unrecognized arguments: --hiden-size 64: did you mean --hidden-size?"),
        (["--hiden-size", "64"], "(see onepass train --help)"),
        (
            ["--swiglu", "--learning_rate=3e-4", "--hiden-size", "64"],
            "in place of --swiglu: --gated-linear-unit --activation-func silu; in place of --learning_rate: --lr (see",
        ),
        (["--num-attention-heads", "3"], "num_attention_heads"),
        (["--preset", "tin"], "7B, 8B, 70B, 405B, but is 'tin'; did you mean 'tiny'?"),
        (["--config", "/nowhere/x.yaml"], "--config /nowhere/x.yaml can't be read: No such file or directory"),
        (["--data", "/nowhere/x.txt"], "--data /nowhere/x.txt is no file and no folder"),
        (["--resume", "/nowhere"], "/nowhere"),
        (["--params-dtype", "fp16"], "params_dtype must be bf16 or fp32 in training, but is fp16"),
        (["--seq-length", "4096"], "seq_length must be at most max_position_embeddings, 1024, but is 4096"),
        (["--tensor-model-parallel-size", "2"], "torchrun --nproc-per-node 2 -m onepass train"),
        (["--vocab-size", "100"], "--vocab-size must be at least 257"),
        (["--cuda-graphs"], "cuda_graphs must be false on a CPU"),
        (["--use-fsdp"], "use_fsdp must be false with one data-parallel rank"),
        (["--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
        (["--lr", "nan"], "lr must be finite, but is nan"),
        (["--seed", str(1 << 70)], "seed must be below 2**63 in size, but has 71 bits"),
        (["--vocab-size", str(1 << 40)], "num_layers 4, hidden_size 128, vocab_size 1099511627776 must fit in this machine's"),
        (["--micro-batch-size", str(1 << 40)], "micro_batch_size 1099511627776, seq_length 128, hidden_size 128 must fit in"),
        (["--global-batch-size", str(1 << 40)], "global_batch_size 1099511627776, micro_batch_size 16, seq_length 128 must fit"),
        (["--max-position-embeddings", str(1 << 40)], "max_position_embeddings 1099511627776 must fit in this machine's"),
        (["--samples", str(1 << 40)], "samples 1099511627776, vocab_size 2048 must fit in this machine's"),
        (["--lr-decay-style", "none"], "invalid choice: 'none'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["train", "--device", "cpu", *arguments])
    except SystemExit as ended:  # argparse's own
        status = ended.code
    written = capsys.readouterr().err.strip()
    assert status == 2 and said in written and "\n" not in written
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "the text is empty"), (b"\xff\xfe\x00", "it is not UTF-8 text"), (b"too few words", "the text is too short")],
)
def test_a_text_that_is_none_leaves_nothing(content, said, capsys, tmp_path, monkeypatch):
    text, folder = tmp_path / "text", tmp_path / "folder"
    text.write_bytes(content)
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main(["train", "--device", "cpu", "--data", str(text)]) == 2
    written = capsys.readouterr().err.strip()
    assert said in written and "\n" not in written
    assert list(folder.iterdir()) == []


def test_other_trainers_flags_are_answered_as_on_the_page(capsys):
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    tables = re.findall(r"^\| [^|`]+ \| `onepass train` \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.M)
    rows = "".join(tables).replace("`", "").splitlines()
    assert rows == [f"| {theirs} | {ours} |" for theirs, ours in (MEGATRON | OTHERS).items()]
    for theirs, ours in (MEGATRON | OTHERS).items():
        assert all(flag in parser._option_string_actions for flag in re.findall("--[a-z0-9-]+", ours)), ours
        for flag in theirs.split(", "):
            assert flag not in parser._option_string_actions, f"{flag} is an option by now: its row goes"
            assert in_place_of(flag) == ours


def test_a_file_may_name_settings_as_the_flags_do(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("norm_epsilon: 1e-6\nrope_fusion: false\nlr: 0.5\n")
    flags = [*Config.flags(), *Options.flags()]
    assert read_yaml(path, flags) == {"layernorm_epsilon": 1e-6, "apply_rope_fusion": False, "lr": 0.5}
    every = {flag.on.removeprefix("--").replace("-", "_"): flag.field for flag in flags}
    path.write_text("".join(f"{name}: 1\n" for name in every))
    assert read_yaml(path, flags) == dict.fromkeys(every.values(), 1)


def test_help_says_how_each_fusion_goes_off(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = "".join(capsys.readouterr().out.split())  # lines end at hyphens too
    assert "(on;--no-rope-fusion)" in said and "(on;--no-norm-linear-fusion)" in said and "(off)" in said


def test_a_file_of_settings_with_a_wrong_name(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    for text, said in (
        ("norm_epsilon: 1e-6\nlayernorm_epsilon: 1e-5\n", "has 'norm_epsilon' and 'layernorm_epsilon', which are the same"),
        ("hidden_sise: 64\n", "'hidden_sise' is no setting; did you mean 'hidden_size'?"),
        ("learning_rate: 1e-3\n", "'learning_rate' is no setting; in place of it: --lr"),
        ("[1, 2]\n", "must hold settings"),
        ("hidden_size: [\n", "is no YAML of settings"),
        ("hidden_size: many\n", "hidden_size must be a whole number, but is 'many'"),
        ("lr: &a [1, 1]\nmin_lr: [*a, *a]\n", "line 2 must have a value, but has *a, which is several"),
        ("lr: &a {min_lr: *a}\n", "line 1 must have a value, but has *a, which is several"),
        ("lr: &a .nan\nmin_lr: *a\n", "lr must be finite, but is nan"),
    ):
        path.write_text(text)
        assert main(["train", "--device", "cpu", "--config", str(path)]) == 2
        written = capsys.readouterr().err.strip()
        assert said in written and "\n" not in written
