"""The memory that a step is planned to take, beside what GPUs took, and what `onepass plan` says of it."""

import json
import time
from pathlib import Path

import pytest
import torch

from onepass import cli
from onepass.gpt import preset
from onepass.gpt.memory import recomputed_share
from onepass.train.layout import ParallelLayout
from onepass.train.memory import (
    MemoryPlan,
    check_counted,
    compare_memory,
    describe_memory,
    memory_of_run,
)
from onepass.train.options import TRAINING, Options

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results"
GIB = 1 << 30
H100 = int(79.2 * GIB)
EIGHT_B = {"num_layers": 4, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8}
STEPS = {  # the file's row: the preset and its changes, the training's
    ("h100/scripts/gpt_124M", "124M", "onepass"): ({}, {}),
    ("h100/scripts/gpt_1B", "1B", "onepass"): ({}, {}),
    ("h100/scripts/gpt_fp8_1B", "1B", "onepass, fp8"): ({"fp8_format": "hybrid"}, {}),
    ("h100/scripts/gpt_fp8_8B", "8B_four_layers", "onepass"): (EIGHT_B, {"seq_length": 8192, "micro_batch_size": 1}),
    ("h100/scripts/gpt_fp8_8B", "8B_four_layers", "onepass, fp8"): (
        EIGHT_B | {"fp8_format": "hybrid"}, {"seq_length": 8192, "micro_batch_size": 1}
    ),
    ("h200/scripts/gpt_8B", "8B", "onepass, 8-bit moments, in backward, selective 6"): (
        {"recompute_granularity": "selective", "recompute_num_layers": 6},
        {"optimizer_moments": "8bit", "step_in_backward": True},
    ),
}  # fmt: skip
RANKS = json.loads((MEASURED / "h100/scripts/gpt_parallel_2.json").read_text())["rows"]


def planned(config, options, ranks=1, gpu=H100):
    return MemoryPlan(config, ranks).of_step(config, options, gpu)


@pytest.mark.parametrize("row", STEPS, ids=" ".join)
def test_a_step_takes_what_was_measured(row):
    (file, case, way), (model, training) = row, STEPS[row]
    name = "1B" if case == "8B_four_layers" else case
    config = preset(name, params_dtype="bf16", **model)
    options = Options.from_dict(TRAINING[name] | training | {"cuda_graphs": False})
    measured = json.loads((MEASURED / f"{file}.json").read_text())["rows"][case][way]["peak_gib"]
    assert planned(config, options).total / GIB == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("name", [name for name, row in RANKS.items() if row["case"] != "pp" and "pp" not in name])
def test_so_do_ranks(name):
    row = RANKS[name]
    config = preset("1B", params_dtype="bf16", **row["model"])
    kept = {"seq_length": 4096, "cuda_graphs": False, "release_main_grads": False}
    options = Options.from_dict(
        kept | {"micro_batch_size": row["micro"], "global_batch_size": row["sequences"]} | row["training"]
    )
    step = planned(config, options, ranks=row["ranks"])
    assert step.total / GIB == pytest.approx(row["peak_gib"], rel=0.02)


def test_optimizers_state():
    config, options = preset("124M", params_dtype="bf16"), Options.from_dict(TRAINING["124M"])
    count = config.parameters_count()
    moments = {
        name: planned(config, options.replace(optimizer_moments=name)).update.moments / count for name in ("fp32", "bf16", "8bit")
    }
    wide = 768 * (50304 + 1024 + 25) + 12 * 768 * 2  # embeddings and norms keep fp32
    coded = 8 * wide / count + (2 + 8 / 256) * (1 - wide / count)
    assert moments == pytest.approx({"fp32": 8, "bf16": 4, "8bit": coded}, rel=0.02)
    away = planned(config, options.replace(offload_optimizer=True)).update
    assert away.masters == 0 and away.moments == pytest.approx(10 * count, rel=1e-3)  # all of it passes at once
    large = preset("8B", params_dtype="bf16")
    passing = planned(large, Options.from_dict(TRAINING["8B"] | {"offload_optimizer": True})).update.moments
    assert passing == pytest.approx(10 * 3 * 2**26, rel=0.01)
    options = Options.from_dict(TRAINING["8B"])
    whole, part = planned(large, options), planned(large, options.replace(step_in_backward=True))
    assert whole.update.gradients / large.parameters_count() == pytest.approx(4, rel=1e-3)
    head = 4 * 128256 * 4096  # of the head and of the embedding, which come apart
    assert head <= part.loss.gradients < head + 2**29 and head <= part.update.gradients < head + 2**30
    assert part.backward.gradients < head + 2**30


def test_gradients_of_earlier_microbatches_are_there_in_each_forward():
    config, options = preset("1B", params_dtype="bf16"), Options.from_dict(TRAINING["1B"])
    one, two = planned(config, options), planned(config, options.replace(global_batch_size=8))
    assert one.loss.gradients < 0.25 * two.loss.gradients
    assert two.loss.gradients == two.update.gradients == one.update.gradients


def test_the_first_two_of_four_blocks_are_recomputed():
    base = preset("tiny", params_dtype="bf16")
    none, two, full = (
        planned(base.replace(recompute_granularity=how, recompute_num_layers=layers), Options()).loss.layers
        for how, layers in ((None, None), ("full", 2), ("full", None))
    )
    assert two["input"] == full["input"] / 2
    selective = base.replace(recompute_granularity="selective", recompute_num_layers=2)
    assert planned(selective, Options()).loss.layers["MLP"] == none["MLP"] / 2
    assert 2 * recomputed_share(selective, 128) == recomputed_share(selective.replace(recompute_num_layers=None), 128)
    assert {name: 2 * size for name, size in two.items() if name != "input"} == none


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({"attention_fusion": False}, {}, "attention_fusion must be True, but is False"),
        ({"mtp_num_layers": 1}, {}, "mtp_num_layers must be None, but is 1"),
        ({}, {"use_fsdp": True}, "use_fsdp must be False"),
        ({}, {"lora_rank": 4}, "lora_rank must be None"),
        ({}, {}, None),
    ],
)
def test_what_is_not_counted(config, options, said):
    assert check_counted(preset("tiny", **config), Options(**options)) == said


def test_what_a_run_says():
    config, options = preset("8B", params_dtype="bf16"), Options.from_dict(TRAINING["8B"])
    step = memory_of_run(config, options, ParallelLayout(torch.device("cpu")))
    assert describe_memory(step, 32) == (
        "Memory: weights 15 GiB, masters 15 GiB, moments 59.8 GiB, gradients 29.9 GiB, activations 23 GiB, 737 MiB a block "
        "(residual stream 128 MiB, queries, keys, values 96 MiB, attention's output 65 MiB, MLP 448 MiB)."
    )
    assert compare_memory(step, int(1.02 * step.total)).endswith(" (+2.0%).")
    assert memory_of_run(config.reference(), options, ParallelLayout(torch.device("cpu"))) is None


# ---- the command ----


def run(capsys, *argv):
    try:
        status = cli.main(("plan", *argv))
    except SystemExit as stopped:
        status = stopped.code
    out, err = capsys.readouterr()
    return status, out, err


def gib_of(line):
    return float(line[46:].split()[0])


def test_what_does_not_fit_is_told_what_to_change(capsys):
    began = time.process_time()
    status, out, err = run(capsys, "--preset", "8B", "--seq", "8192", "--gpu", "79")
    assert time.process_time() - began < 5
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("8,030.3M parameters in bf16, microbatches of 1 x 8192 tokens, on one GPU of 79 GiB")
    rows = {line[2:42].strip(): [float(cell) for cell in line[42:].split()] for line in lines[3 : lines.index("", 3)]}
    assert rows["weights"] == rows["masters"] == [14.96] * 3
    assert sum(rows[name][0] for name in rows if name != "together" and "each" not in name) == pytest.approx(
        rows["together"][0], abs=0.05
    )
    at = lines.index("The cheapest that fits:")
    assert "does not fit" not in lines[at + 1] and "fits" in lines[at + 1]
    flags = lines[at + 1].split("  ")[1].split()
    assert "It fits" in run(capsys, "--preset", "8B", "--gpu", "79", *flags)[1]
    for line in lines[:at]:  # each by itself is what the command says with that flag
        if line.startswith("  --"):
            changed = run(capsys, "--preset", "8B", "--gpu", "79", *line[2:46].split())[1]
            together = next(row for row in changed.splitlines() if row.startswith("  together"))
            assert max(map(float, together.split()[1:])) == gib_of(line)


def test_no_more_blocks_are_recomputed_than_must_be(capsys):
    argv = "--preset", "8B", "--gpu", "79", "--optimizer-moments", "8bit", "--micro-batch-size", "2", "--step-in-backward"
    line = run(capsys, *argv)[1].splitlines()[-1]
    assert line.startswith("  --recompute-granularity selective --recompute-num-layers ") and line.endswith(" more arithmetic")
    count = int(line.split()[3])
    assert "It fits" in run(capsys, *argv, *line.split()[:4])[1]
    assert "It does not fit" in run(capsys, *argv, *line.split()[:3], str(count - 1))[1]


@pytest.mark.parametrize(
    "more", [["--global-batch-size", "4"], ["--recompute-granularity", "selective", "--recompute-num-layers", "4"]]
)
def test_what_it_advises_it_takes(more, capsys):
    argv = "--preset", "8B", "--gpu", "60", *more
    lines = run(capsys, *argv)[1].splitlines()
    flags = lines[lines.index("The cheapest that fits:") + 1].split("  ")[1].split()
    status, out, _ = run(capsys, *argv, *flags)
    assert status == 0 and "It fits" in out
    assert "None" not in "".join(lines)


def test_what_fits_is_told_so(capsys):
    status, out, _ = run(capsys, "--gpu", "8")
    assert status == 0 and "It fits, with 6.9 GiB to spare" in out and "--step-in-backward" not in out


def test_nothing_helps(capsys):
    assert "All of these together do not fit" in run(capsys, "--preset", "8B", "--gpu", "10")[1]


def test_ranks_are_offered_the_distributed_optimizer_first(capsys):
    lines = run(capsys, "--preset", "8B", "--ranks", "8")[1].splitlines()
    assert "8 GPUs, tensor 1 x data 8, each of 80 GiB" in lines[0]
    changes = [line for line in lines if line.startswith("  --")]
    assert changes[0].startswith("  --use-distributed-optimizer ")


def test_a_runs_file(capsys, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("num_layers: 3\nparams_dtype: bf16\nseq_length: 64\ndata: [there]\n")
    assert "activations of 3 blocks" in run(capsys, "--config", str(path))[1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num-expert", "4"], "unrecognized arguments: --num-expert 4: did you mean --num-experts?"),
        (["--block-size", "64"], "in place of --block-size: --seq-length"),
        (["--no-attention-fusion"], "attention_fusion must be True, but is False: this is not counted"),
        (["--seq", "2048"], "seq_length must be at most max_position_embeddings, 1024, but is 2048"),
        (["--ranks", "3", "--tensor-model-parallel-size", "2"], "--ranks must be a multiple of tensor_model_parallel_size, 2"),
        (["--step-in-backward", "--ranks", "2"], "step_in_backward must be false on several ranks, 2, but is true"),
        (["--step-in-backward", "--cuda-graphs"], "unrecognized arguments: --cuda-graphs"),
        (["--gpu", "0"], "--gpu must be a GPU's memory in GiB, such as 80, but is 0"),
        (["--preset", "8b"], "--preset must be one of"),
        (["--num-attention-heads", "3"], "hidden_size must be a multiple of num_attention_heads, 3"),
    ],
)
def test_what_can_not_be_planned(argv, said, capsys):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1
