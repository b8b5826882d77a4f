"""Training in eight bits: resumed to the bit, with codes of the weights as they are, and a log that tells what saturates."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
from parallel.worlds import PAIRS
from train.checkpoint_runs import alone, configured, saved, whole
from train.fp8_runs import EXPERTS, FP8, LAYOUTS, found_on_ranks, go, resumed, scales, states, weights
from train.test_run import SMALL, log, train

import onepass
from onepass.cli import main
from onepass.gpt import Config
from onepass.kernels.language import triton
from onepass.nn.precision import fp8_layers
from onepass.product.fp8.scales import FP8Scales
from onepass.runtime.errors import CommandError
from onepass.train import checkpoint, command
from onepass.train.layout import ParallelLayout
from onepass.train.precision import describe_precision
from onepass.train.setup import make
from onepass.train.steps import TrainSteps

pytestmark = pytest.mark.usefixtures("by_formula")
WORLDS = PAIRS[:1]
CPU = torch.device("cpu")
QUICK = "--no-table", "--no-fusion-table", "--samples", 0


def equal(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


# ---- what goes on with the same bits ----


EVALUATED = {"scales set by an evaluation": (1,), "scales of before": ()}


@pytest.mark.parametrize("evaluated", EVALUATED.values(), ids=EVALUATED)
@pytest.mark.parametrize("settings", [{}, {"params_dtype": "bf16"}], ids=["fp32", "bf16"])
def test_a_resumed_run_is_the_run(settings, evaluated, tmp_path):
    trained, other, lines, (path, again) = resumed(tmp_path, alone(), settings, evaluated)
    assert lines[0] == lines[1]
    assert weights(trained).equal(weights(other))
    assert equal(scales(trained), scales(other)) and scales(trained)
    assert equal(whole(path), whole(again))


@pytest.mark.skipif(triton is None, reason="triton is not installed")
def test_a_resumed_run_is_the_run_by_kernels(tmp_path, monkeypatch):
    monkeypatch.undo()
    with onepass.use_backend("triton"):
        trained, other, lines, _ = resumed(tmp_path, alone(), {"num_layers": 1}, (1,))  # a layer takes the interpreter long
    assert lines[0] == lines[1] and weights(trained).equal(weights(other)) and equal(scales(trained), scales(other))


@pytest.mark.parametrize(
    "settings",
    [
        {"fp8_amax_history_len": 1, "fp8_margin": 2, "fp8_format": "e4m3"},
        {"fp8_amax_compute_algo": "most_recent", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0},
        {"fp8_recipe": "tensorwise"},
        {"fp8_recipe": "rowwise"},
        EXPERTS,
        {"mtp_num_layers": 1},
        {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, "params_dtype": "bf16"},
        {"gradient_accumulation_fusion": False},
    ],
    ids=lambda settings: "-".join(settings) or "defaults",
)
def test_with_other_settings(settings, tmp_path):
    trained, other, lines, (path, _) = resumed(tmp_path, alone(), settings, (1,))
    assert lines[0] == lines[1] and weights(trained).equal(weights(other)) and equal(scales(trained), scales(other))
    assert any(name.startswith("fp8.history.") for name in whole(path)) is ("fp8_recipe" not in settings)
    assert any(name.startswith("fp8.history.mtp.") for name in whole(path)) is ("mtp_num_layers" in settings)


def test_the_scales_of_a_checkpoint_matter(tmp_path):
    """A run whose scales are lost is another: or the tests above tell nothing."""
    config, options = configured(**FP8)
    first, second = (make(config, options.replace(seed=seed), alone()) for seed in (1, 2))
    go(first, alone(), 0, 2)
    path = saved(tmp_path, 2, first, config, options, alone())
    checkpoint.load(path, second, config, alone())
    for each in fp8_layers(second.model):
        del each.weight.fp8
    assert go(first, alone(), 2, 4) != go(second, alone(), 2, 4)


def test_saturations_are_counted_on_in_a_resumed_run(tmp_path):
    config, options = configured(**FP8)
    trained, other = (make(config, options.replace(seed=seed), alone()) for seed in (1, 2))
    go(trained, alone(), 0, 1)
    for number, state in enumerate(states(trained).values()):
        state.scales.total[:] = torch.tensor([[number, (1 << 24) + 1, (5 << 30) + 3], [1 << 25, 1, number]])
    counts = onepass.nn.fp8_saturations, onepass.nn.fp8_underflows
    before = [count(trained.model) for count in counts]
    assert [each["weight"] for each in before[0].values()] == [(1 << 24) + 1] * len(before[0])
    checkpoint.load(saved(tmp_path, 1, trained, config, options, alone()), other, config, alone())
    assert [count(other.model) for count in counts] == before


# ---- checkpoints of other recipes ----


def test_a_run_in_16_bits_goes_on_in_eight_and_back(tmp_path):
    config, options = configured(ffn_hidden_size=32)
    narrow = config.replace(fp8_format="hybrid")
    trained = make(config, options, alone())
    go(trained, alone(), 0, 2)
    path = saved(tmp_path / "16", 2, trained, config, options, alone())
    for _ in range(2):  # the second time over scales of another run
        other = make(narrow, options, alone())
        go(other, alone(), 0, 1)
        assert checkpoint.load(path, other, narrow, alone()) == 2
        assert weights(other).equal(weights(trained)) and all(state.is_fresh for state in states(other).values())
    lines = go(other, alone(), 2, 4)
    assert torch.tensor(lines).isfinite().all()
    path = saved(tmp_path / "8", 4, other, narrow, options, alone())
    assert checkpoint.load(path, trained, config, alone()) == 4 and weights(other).equal(weights(trained))


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ({"fp8_amax_history_len": 4}, {}, "--fp8-amax-history-len is 4 there and 16 here"),
        ({}, {"fp8_margin": 1}, "--fp8-margin is 0 there and 1 here"),
        ({}, {"fp8_format": "e4m3"}, "--fp8-format is hybrid there and e4m3 here"),
        ({"fp8_recipe": "rowwise"}, {}, "--fp8-recipe is rowwise there and delayed here"),
        ({}, {"fp8_amax_compute_algo": "most_recent"}, "--fp8-amax-compute-algo is max there and most_recent here"),
    ],
)
def test_another_recipe_is_named(theirs, ours, said, tmp_path):
    config, options = configured(**FP8 | theirs)
    trained = make(config, options, alone())
    go(trained, alone(), 0, 1)
    path = saved(tmp_path, 1, trained, config, options, alone())
    config, options = configured(**FP8 | ours)
    trained = make(config, options, alone())
    go(trained, alone(), 0, 1)
    before, state = weights(trained), scales(trained)
    with pytest.raises(CommandError, match="must be of this run's eight-bit recipe, but is of another") as raised:
        checkpoint.load(path, trained, config, alone())
    assert said in str(raised.value)
    assert weights(trained).equal(before) and equal(scales(trained), state)


def test_what_a_run_says_of_scales_that_are_not_there(tmp_path):
    ends = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
    paths = {}
    for name, settings in {"16": {"ffn_hidden_size": 32}, "8": FP8, "ends": FP8 | ends}.items():
        config, options = configured(**settings)
        trained = make(config, options, alone())
        go(trained, alone(), 0, 1)
        paths[name] = saved(tmp_path / name, 1, trained, config, options, alone()), config
    said = {(theirs, ours): checkpoint.describe_scales(paths[theirs][0], paths[ours][1]) for theirs in paths for ours in paths}
    assert said["16", "16"] is said["8", "8"] is said["ends", "ends"] is said["8", "ends"] is None
    assert said["16", "8"] == "the checkpoint has no scales of eight-bit products: they start anew"
    assert said["8", "16"] == "the checkpoint's eight-bit scales are left out: this run has none"
    assert said["ends", "8"] == "the checkpoint has no scales for block 1: they start anew"
    index = json.loads((paths["8"][0] / "checkpoint.json").read_text())
    assert checkpoint.describe_scales(paths["8"][0], paths["8"][1].replace(fp8_recipe="rowwise")) is None
    assert index["config"]["fp8_format"] == "hybrid"


# ---- recomputation and microbatches ----


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("delayed", "fp32"), ("delayed", "bf16"), ("tensorwise", "bf16"), ("rowwise", "bf16")]
)
def test_recomputed_blocks_have_the_same_bits(recipe, dtype):
    found = {}
    for granularity in (None, "selective", "full"):
        settings = {"recompute_granularity": granularity, "global_batch_size": 4, "params_dtype": dtype, "fp8_recipe": recipe}
        config, options = configured(**FP8 | settings)
        trained = make(config, options.replace(micro_batch_size=1), alone())
        found[granularity] = go(trained, alone(), 0, 2), weights(trained), scales(trained)
    for granularity in ("selective", "full"):
        lines, numbers, state = found[granularity]
        assert lines == found[None][0] and numbers.equal(found[None][1])
        assert all(t.equal(found[None][2][name]) for name, t in state.items() if not name.endswith("saturated"))


def test_microbatches_share_scales(monkeypatch):
    config, options = configured(**FP8)
    trained = make(config, options.replace(micro_batch_size=1), alone())
    refreshed = []
    stock = FP8Scales.refresh
    monkeypatch.setattr(FP8Scales, "refresh", lambda scales: (refreshed.append(scales), stock(scales)))
    go(trained, alone(), 0, 3)
    assert len(refreshed) == 2 * len(states(trained))  # of three steps, of four microbatches each


# ---- several ranks ----


@pytest.fixture(scope="module")
def found(world, tmp_path_factory):
    return world.run(found_on_ranks, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_resume_to_the_bit(found, name):
    for rank in found:
        mine = rank[name]
        assert mine["lines"][0] == mine["lines"][1] and mine["weights"][0].equal(mine["weights"][1])
        assert equal(*mine["scales"]) and mine["scales"][0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_follow_the_weights_on_all_ranks(found, name):
    for rank in found:
        assert rank[name]["used"] and not rank[name]["stale"]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if "pipeline" not in name])
def test_ranks_of_a_layer_have_the_same_scales(found, name):
    assert equal(found[0][name]["scales"][0], found[1][name]["scales"][0])


def test_stages_save_the_scales_of_their_layers(found):
    for name, more in (("pipeline", set()), ("pipeline, mtp", {"mtp.0"})):
        layers = [{".".join(key.split(".")[:2]) for key in rank[name]["scales"][0]} for rank in found]
        assert layers == [{"layers.0"}, {"layers.1", *more}]


def test_layouts_agree_and_take_each_others_scales(found):
    for rank in found:
        assert rank["another layout"].keys() == rank["data"]["scales"][0].keys()
        for name in ("zero", "fsdp"):
            for mine, theirs in zip(rank[name]["lines"][0], rank["data"]["lines"][0], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-3)


def test_a_load_between_steps_is_seen(found):
    for rank in found:
        assert rank["loaded between steps"] == []


def test_fully_shards_updates_are_seen_by_the_optimizers_step_alone(found):
    for rank in found:
        unseen, seen = (rank[name]["scales"][0] for name in ("fsdp, steps are not counted", "fsdp"))
        assert not any(steps.any() for key, steps in unseen.items() if key.endswith(".steps"))
        assert all(steps.all() for key, steps in seen.items() if key.endswith(".steps"))


# ---- the log and the command line ----


@pytest.mark.parametrize("more", ((), ("--mtp-num-layers", 1)), ids=("", "multi-token prediction"))
def test_a_resumed_run_goes_on_exactly(more, tmp_path, corpus, capsys):
    folder, options = tmp_path / "run", (*QUICK, "--save-interval", 3, "--keep-checkpoints", 0, "--fp8-format", "hybrid")
    assert train(corpus, "--run-dir", folder, *options, *more) == 0
    rows = log(folder)
    assert all(row["saturated"].isdigit() and row["underflowed"].isdigit() for row in rows)
    said = capsys.readouterr().out
    assert "saturated" in said and "run in eight bits (e4m3, gradients in e5m2; delayed scales of 16 steps)" in said
    last, gone = folder / "checkpoints" / "step-00000006", tmp_path / "gone"
    last.rename(gone)
    assert main(["train", "--device", "cpu", "--resume", str(folder), "--no-table", "--no-fusion-table", "--samples", "0"]) == 0
    assert equal(whole(last), whole(gone))
    again = log(folder)
    same = "step", "loss", "grad_norm", "eval_loss", "saturated", "underflowed"
    assert [[row[key] for key in same] for row in rows] == [[row[key] for key in same] for row in again]
    assert main(["train", "--device", "cpu", "--resume", str(folder), "--fp8-margin", "2", *map(str, QUICK)]) == 2
    assert "--fp8-margin is 0 there and 2 here" in capsys.readouterr().err
    assert log(folder) == again


def test_a_run_in_16_bits_has_no_column_and_gets_one_when_it_goes_on_in_eight(tmp_path, corpus, capsys):
    folder = tmp_path / "run"
    assert train(corpus, "--run-dir", folder, *QUICK, "--save-interval", 3) == 0
    assert "saturated" not in log(folder)[0]
    capsys.readouterr()
    more = "--train-iters", "8", "--fp8-format", "e4m3"
    assert main(["train", "--device", "cpu", "--resume", str(folder), *more, *map(str, QUICK)]) == 0
    assert "they start anew" in capsys.readouterr().out
    rows = log(folder)
    assert [row["saturated"].isdigit() for row in rows] == [False] * 6 + [True] * 2


def test_a_step_that_overflows_is_told_and_recovered_from(tmp_path, corpus, capsys, monkeypatch):
    """Activations are ten thousand times as large in one step. Scales of the steps before are far too large for it."""
    factor, stock, steps = [1.0], TrainSteps.run, []

    def run(self, given):
        factor[0] = 1e4 if len(steps) == 5 else 1.0
        if not steps:
            for block in self.model.layers.values():
                block.mlp.linear_fc2.register_forward_pre_hook(lambda layer, args: (args[0] * factor[0], *args[1:]))
        steps.append(stock(self, given))
        return steps[-1]

    monkeypatch.setattr(TrainSteps, "run", run)
    more = "--fp8-format", "hybrid", "--train-iters", 30, "--fp8-amax-history-len", 4, "--eval-interval", 0
    assert train(corpus, "--run-dir", tmp_path / "run", *QUICK, *more) == 0
    said, rows = capsys.readouterr().out, log(tmp_path / "run")
    warned = re.findall(r"step (\d+)/30  warning: ([\d.]+)% of the .* of layers\.\d\.mlp\.linear_fc\d saturates in", said)
    assert warned[0][0] == "6" and float(warned[0][1]) > 30
    over = re.findall(r"step (\d+)/30  no tensor of the eight-bit products loses many numbers any more", said)
    assert 6 < int(over[0]) < 12  # as long as the history has that step: small numbers round to zero
    assert int(rows[7]["underflowed"]) > 1000 > int(rows[-1]["underflowed"])
    assert int(rows[5]["saturated"]) > 10_000 and int(rows[-1]["saturated"]) < 100
    assert all(torch.tensor(float(row["loss"])).isfinite() for row in rows)
    assert float(rows[-1]["loss"]) < float(rows[4]["loss"]) < float(rows[0]["loss"])


def test_the_summary_says_what_stays_in_16_bits():
    shape = {"num_layers": 4, "params_dtype": "bf16", "fp8_format": "hybrid"}
    assert describe_precision(Config(), CPU) == ""
    assert describe_precision(Config(**shape), CPU) == (
        "The products of all blocks run in eight bits (e4m3, gradients in e5m2; delayed scales of 16 steps); embedding, head and "
        "norms stay in bf16."
    )
    ends = {"first_last_layers_bf16": True, "fp8_recipe": "rowwise", "num_moe_experts": 4, "fp8_format": "e4m3"}
    assert describe_precision(Config(**shape | ends), CPU) == (
        "The products of blocks 2 to 3 of 4 run in eight bits (e4m3; rowwise scales), those of experts in e4m3 with scales by "
        "row and weight gradients in bf16; embedding, head, norms and weight gradients stay in bf16."
    )
    assert describe_precision(Config(**shape | ends | {"moe_ffn_hidden_size": 40, "fp8_recipe": "delayed"}), CPU) == (
        "The products of blocks 2 to 3 of 4 run in eight bits (e4m3; delayed scales of 16 steps); embedding, head, norms and "
        "experts (the experts' sizes, 128 x 40, are not multiples of 16) stay in bf16."
    )
    odd = {"ffn_hidden_size": 100, "num_layers_at_start_in_bf16": 2, "first_last_layers_bf16": True, "fp8_wgrad": False}
    assert describe_precision(Config(**shape | odd), CPU) == (
        "The products of block 3 of 4 run in eight bits (e4m3, gradients in e5m2; delayed scales of 16 steps); embedding, head, "
        "norms, weight gradients, linear_fc1 (200 x 128: not multiples of 16) and linear_fc2 (128 x 100: not multiples of 16) "
        "stay in bf16."
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fp8-format", "e5m2"], "argument --fp8-format: invalid choice: 'e5m2'"),
        (["--fp8-recipe", "mxfp8"], "argument --fp8-recipe: invalid choice: 'mxfp8'"),
        (["--fp8-margin", "1"], "fp8_margin must be 0 without fp8_format, but is 1"),
        (["--fp8-format", "hybrid", "--fp8-margin", "20"], "fp8_margin must be from 0 to 8, but is 20"),
        (["--no-fp8-wgrad"], "fp8_wgrad must be true without fp8_format, but is false"),
        (
            ["--fp8-format", "hybrid", "--pipeline-schedule", "zero-bubble", "--pipeline-model-parallel-size", "2"],
            "pipeline_schedule must not be 'zero-bubble' with fp8_format",
        ),
    ],
)
def test_what_cannot_be_is_one_line(arguments, said, capsys, corpus):
    with pytest.MonkeyPatch.context() as patch:
        if "zero-bubble" in arguments:
            patch.setenv("WORLD_SIZE", "2")
            patch.setattr(command, "started", lambda *_: nullcontext(ParallelLayout(torch.device("cpu"))))
        patch.setattr("time.sleep", lambda seconds: None)
        try:
            status = main(["train", "--device", "cpu", "--data", str(corpus), *SMALL, "--global-batch-size", "16", *arguments])
        except SystemExit as ended:
            status = ended.code
    assert status == 2 and said in capsys.readouterr().err


def test_megatrons_flags_are_the_fields():
    flags = {flag.field: (flag.on, flag.off) for flag in Config.flags() if flag.field.startswith(("fp8_", "first_last"))}
    assert flags == {
        "fp8_format": ("--fp8-format", None),
        "fp8_recipe": ("--fp8-recipe", None),
        "fp8_margin": ("--fp8-margin", None),
        "fp8_amax_history_len": ("--fp8-amax-history-len", None),
        "fp8_amax_compute_algo": ("--fp8-amax-compute-algo", None),
        "fp8_wgrad": ("--fp8-wgrad", "--no-fp8-wgrad"),
        "first_last_layers_bf16": ("--first-last-layers-bf16", "--no-first-last-layers-bf16"),
    }
