"""Runs that begin with a Hugging Face folder, and that train adapters of its model or of a preset's."""

import json
import re
import shlex
import shutil

import pytest
import torch
from parallel.worlds import PAIRS
from safetensors.torch import load_file
from train import checkpoint_runs
from train.checkpoint_runs import FSDP, TENSOR, ZERO, alone, configured, go, refused, saved, whole
from train.test_run import log, losses

from onepass.cli import main
from onepass.gpt import Config, Model, load_huggingface, save_huggingface
from onepass.gpt.lora import adapter_files
from onepass.train import checkpoint, text
from onepass.train.batches import Batches
from onepass.train.layout import _groups
from onepass.train.options import Options
from onepass.train.setup import make

WORLDS = PAIRS[:1]
rank_context = checkpoint_runs.rank_context
CONFIG = Config(
    num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, vocab_size=300, max_position_embeddings=64
)
RUN = shlex.split(
    "--seq-length 16 --micro-batch-size 4 --train-iters 4 --eval-iters 1 --lr-warmup-iters 2 --samples 0 --no-fusion-table"
)
LORA = {"lora_rank": 2, "lora_alpha": 4.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    """A Llama's folder, with a tokenizer that begins texts and cuts them, and that has another end than onepass's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    path = tmp_path_factory.mktemp("base")
    save_huggingface(Model(CONFIG, seed=4), path)
    edit(path, eos_token_id=[1, 0])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<begin>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([corpus.read_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    tokenizer.enable_truncation(8)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def edit(folder, **changes):
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))


def train(*arguments):
    return main(["train", "--device", "cpu", *map(str, arguments)])


def test_adapters_of_a_folders_model(tmp_path, folder, corpus, capsys):
    """The run begins with the folder's weights, its adapters are on disk, and a resumed run has the same bits."""
    first, half = tmp_path / "first", tmp_path / "half"
    lora = "--lora-rank", 2, "--lora-alpha", 4, "--lora-modules", "q_proj", "v_proj", "down_proj"
    saves = "--save-interval", 2, "--keep-checkpoints", 0
    assert train("--data", corpus, "--load-hf", folder, *RUN, *lora, *saves, "--run-dir", first) == 0
    said = capsys.readouterr().out
    count = CONFIG.parameters_count()
    trained = 2 * 2 * (2 * (32 + 32) + 64 + 32)  # layers, rank, q and v, down
    assert f"on q_proj, v_proj, down_proj: {trained:,} of {count + trained:,} parameters train" in said
    assert "operators in a step" in said and "samples" not in said
    assert re.search(r"first has log\.csv, loss\.png, adapter and the checkpoints", said.replace("\n", " "))
    config = json.loads((first / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 4, str(folder))
    adapter = load_file(first / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 3 * 2 and all(tensor.any() for tensor in adapter.values())
    tensors = whole(first / "checkpoints" / "step-00000004")
    assert len(tensors) == 3 * len(adapter)  # no frozen weight, and moments of the others
    assert first_loss(folder, first) == pytest.approx(float(log(first)[0]["loss"]), rel=1e-5)

    shutil.copytree(first, half)
    shutil.rmtree(half / "checkpoints" / "step-00000004")
    shutil.rmtree(half / "adapter")
    assert train("--resume", half, "--no-table") == 0
    assert losses(half) == losses(first) and [row["eval_loss"] for row in log(half)] == [row["eval_loss"] for row in log(first)]
    assert {name: t.tolist() for name, t in load_file(half / "adapter" / "adapter_model.safetensors").items()} == {
        name: t.tolist() for name, t in adapter.items()
    }
    capsys.readouterr()
    other = copied(folder, tmp_path / "other")
    _, model = load_huggingface(other)
    with torch.no_grad():
        model.layers["1"].mlp.linear_fc1.weight[0, 0] += 1
    save_huggingface(model, other)
    edit(other, eos_token_id=[1, 0])
    assert train("--resume", half, "--load-hf", other) == 2
    assert "must be of adapters of these frozen weights, but is of others'" in capsys.readouterr().err


def first_loss(folder, run):
    """Return the loss of the folder's model on the tokens of a run's first step."""
    tokens = text.load(run / "tokens", CONFIG.vocab_size)
    assert tokens.end == 1
    batch = Batches(tokens.train, 4, 16, Options().seed, 0, 1, torch.device("cpu")).of_step(0)
    with torch.no_grad():
        return load_huggingface(folder)[1](batch.tokens, batch.labels).item()


def copied(folder, to):
    shutil.copytree(folder, to)
    return to


def test_all_weights_of_a_folders_model(tmp_path, folder, corpus, capsys):
    run = tmp_path / "run"
    assert train("--data", corpus, "--load-hf", folder, *RUN, "--no-table", "--params-dtype", "bf16", "--run-dir", run) == 0
    assert first_loss(folder, run) == pytest.approx(float(log(run)[0]["loss"]), rel=1e-3)
    assert not (run / "adapter").exists() and "LoRA" not in capsys.readouterr().out
    place = "layers.0.mlp.linear_fc2.weight"
    before, after = load_huggingface(folder)[1].state_dict()[place], whole(checkpoint.find(run))[place]
    assert 0 < (after - before).norm() / before.norm() < 1.0


# ---- the tokenizer ----


def test_texts_are_what_the_folders_tokenizer_makes_of_them(tmp_path, folder):
    (tmp_path / "a.txt").write_text("def f1(x):\n    return x + 1\n" * 30)
    (tmp_path / "b.txt").write_text("return x" * 30 + "<end>")
    given = text.folder_tokenizer(folder, 300)
    tokens = text.prepare(tmp_path / "t", [str(tmp_path / f"{n}.txt") for n in "ab"], 300, 8, lambda *_: None, given=given)
    numbers = [*tokens.train.tolist(), *tokens.valid.tolist()]
    assert numbers[0] == 0 and numbers[-1] == tokens.end == 1 and numbers.count(0) == numbers.count(1) == 2
    assert tokens.tokenizer.decode(numbers) in (
        "def f1(x):\n    return x + 1\n" * 30 + "return x" * 30, "return x" * 30 + "def f1(x):\n    return x + 1\n" * 30
    )  # fmt: skip
    other = given._replace(end=0)
    said = refused(lambda: text.prepare(tmp_path / "t", [str(tmp_path)], 300, 8, lambda *_: None, keep=True, given=other))
    assert "but their tokenizer is another: the model was trained on those tokens" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "must have a tokenizer.json, but has none: transformers writes it"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json can't be read: "),
        (lambda folder: edit(folder, eos_token_id=None), "must have eos_token_id, a token below 290, but has None"),
        (lambda folder: edit(folder, eos_token_id=290), "must have eos_token_id, a token below 290, but has 290"),
    ],
    ids=["none", "empty", "no end", "another's end"],
)
def test_a_tokenizer_that_is_none(tmp_path, folder, change, said):
    other = copied(folder, tmp_path / "other")
    change(other)
    assert said in refused(lambda: text.folder_tokenizer(other, 300))


def test_a_tokenizer_of_another_model(folder):
    assert "tokenizer.json must be of the model's vocab_size, 280, or fewer tokens, but is of 290" in refused(
        lambda: text.folder_tokenizer(folder, 280)
    )


# ---- what can't be ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--load-hf", "nowhere"], "--load-hf nowhere: folder must hold config.json, but nowhere does not"),
        (["--load-hf", "FOLDER", "--num-layers", "3"], "num_layers must be 2, as in --load-hf FOLDER, but is 3"),
        (["--load-hf", "FOLDER", "--preset", "tiny"], "--preset must not be given with --load-hf, whose folder has the model"),
        (["--load-hf", "FOLDER", "--untie-embeddings-and-output-weights"], "must be False, as in --load-hf FOLDER, but is True"),
        (["--lora-rank", "0"], "lora_rank must be at least 1, but is 0"),
        (["--lora-alpha", "3"], "lora_alpha must be 32.0 without lora_rank, but is 3.0"),
        (["--lora-modules", "q_proj"], "lora_modules must be ('all-linear',) without lora_rank, but is ('q_proj',)"),
        (["--lora-rank", "4", "--lora-modules", "q"], "lora_rank 4: lora_modules must be all-linear or some of q_proj, k_proj"),
        (["--lora-rank", "4", "--num-experts", "2"], "lora_rank 4: num_moe_experts must be None for a Llama of Hugging Face's"),
        (["--lora-rank", "4", "--mtp-num-layers", "1"], "lora_rank 4: mtp_num_layers must be None for a Llama of Hugging Face's"),
        (
            ["--lora-rank", "4", "--pipeline-model-parallel-size", "2"],
            "lora_rank must be None with pipeline_model_parallel_size 2",
        ),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_adapters_and_folders_are_not_for(arguments, said, folder, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train("--data", corpus, *(str(folder) if each == "FOLDER" else each for each in arguments)) == 2
    written = capsys.readouterr().err.strip()
    assert said.replace("FOLDER", str(folder)) in written and "\n" not in written


# ---- ranks ----

LLAMA = {"normalization": "RMSNorm", "add_qkv_bias": False, "global_batch_size": 4, **LORA}


def test_ranks_train_the_adapters_of_one_rank(world, tmp_path):
    """In each layout, from the checkpoint of the one before."""
    config, options = configured(**LLAMA)
    trained = make(config, options, alone())
    lines = go(trained, alone(), 0, 1)
    saved(tmp_path / "start", 1, trained, config, options, alone())
    lines += go(trained, alone(), 1, 4)
    expected = adapter_files(trained.model)["adapter_model.safetensors"]
    (tmp_path / "expected.safetensors").write_bytes(expected)
    wanted = load_file(tmp_path / "expected.safetensors")
    found, second = world.run(run_layouts, str(tmp_path))
    assert found["lines"] == pytest.approx([number for line in lines[1:] for number in line], rel=1e-4)
    assert found["adapter"].keys() == wanted.keys() and second["lines"] == found["lines"]
    for name, tensor in wanted.items():
        torch.testing.assert_close(found["adapter"][name], tensor, rtol=1e-3, atol=1e-6)


def run_layouts(group, folder):
    from pathlib import Path

    from safetensors.torch import load

    place, lines = Path(folder), []
    path = checkpoint.find(place / "start" / "checkpoints" / "step-00000001")
    for step, layout_settings in enumerate((TENSOR, ZERO, FSDP), 1):
        config, options = configured(**LLAMA, **layout_settings)
        layout = _groups(config, torch.device("cpu"))
        trained = make(config, options, layout)
        assert checkpoint.load(path, trained, config, layout) == step
        for loss, norm in go(trained, layout, step, step + 1):
            lines += [layout.average(torch.tensor(loss)).item(), norm]
        path = saved(place / str(step), step + 1, trained, config, options, layout)
    return {"lines": lines, "adapter": load(adapter_files(trained.model)["adapter_model.safetensors"])}


def test_settings_are_the_adapters():
    config, options = configured(**LLAMA, lora_use_rslora=True, lora_modules=("v_proj",))
    made = [adapter_files(make(config, options.replace(seed=seed), alone()).model) for seed in (1, 1, 2)]
    said = json.loads(made[0]["adapter_config.json"])
    assert (said["use_rslora"], said["target_modules"], said["r"], said["lora_alpha"]) == (True, ["v_proj"], 2, 4)
    assert made[0] == made[1] and made[0]["adapter_model.safetensors"] != made[2]["adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (LORA, {}, "must be of all weights, as lora_rank is None, but is of LoRA adapters"),
        ({}, LORA, "must be of LoRA adapters, as lora_rank is given, but is of all weights"),
        (LORA, LORA | {"lora_alpha": 5.0}, "but is of others: lora_alpha is 4.0 there and 5.0 here"),
        (LORA, LORA | {"seed": 3}, "must be of adapters of these frozen weights, but is of others'"),
    ],
    ids=["adapters", "weights", "alpha", "seed"],
)
def test_a_checkpoint_of_others(before, now, said, tmp_path):
    shape = {name: value for name, value in LLAMA.items() if name not in LORA}
    config, options = configured(**shape, **before)
    path = saved(tmp_path, 0, make(config, options, alone()), config, options, alone())
    config, options = configured(**shape, **now)
    assert said in refused(lambda: checkpoint.load(path, make(config, options, alone()), config, alone()))
