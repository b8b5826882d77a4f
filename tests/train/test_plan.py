"""`onepass plan --gpus`: its rates are those that were measured, its times near steps', and its answers add up."""

import importlib.util
import json
from itertools import product
from pathlib import Path

import pytest
from train.test_memory import run as plan

from onepass.gpt import Config, preset
from onepass.runtime.errors import CommandError
from onepass.train import stages
from onepass.train.options import Options
from onepass.train.plan import table
from onepass.train.plan.block_time import ATTENTION, HEAD, PASSES, PRODUCTS, TENSOR, Run
from onepass.train.plan.layout_memory import layout_memory, parameters
from onepass.train.plan.layouts import NODE, GPULayout, layout_of, why_not
from onepass.train.plan.links import Group, bandwidth, gather_time, reduce_time
from onepass.train.plan.rates import A100, B200, GPUS, H100, H200, named_rates
from onepass.train.plan.step_time import BUBBLE, DATA, OPTIMIZER, least_time, step_time

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("planned", ROOT / "benchmarks" / "planned.py")
planned = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planned)

LARGEST = 0.08  # error of a step's time
LARGEST_GIB = 0.02  # and of an H100's memory, whose rows are of the commits whose memory is counted


# ---- beside what was measured ----


def test_rates_are_those_that_were_measured():
    measured = planned.rates()
    ours = {name: rate.value for name, _, rate in named_rates(H200)}
    assert measured.keys() < ours.keys()
    for name, value in measured.items():
        assert ours[name] == pytest.approx(value, rel=0.015), name


@pytest.mark.parametrize("row", planned.measured_rows(), ids=lambda row: f"{row.gpu} {row.name}")
def test_a_steps_time_is_near_what_was_measured(row):
    if row.cpu_decides:
        assert row.planned_ms < row.ms  # a plan counts what the GPU does
    else:
        assert abs(row.error) < LARGEST


def test_few_rows_are_decided_by_the_cpu_and_most_are_nearer():
    rows = planned.measured_rows()
    counted = [row for row in rows if not row.cpu_decides]
    assert len(rows) - len(counted) <= 2
    assert sorted(abs(row.error) for row in counted)[len(counted) // 2] < 0.03
    assert abs(sum(row.error for row in counted)) / len(counted) < 0.01  # and no more above than below


def test_memory_is_near_what_was_measured():
    rows = [
        row
        for row in planned.measured_rows()
        if row.gpu == "h100" and ("GPU" in row.name or row.options.release_main_grads is False)
    ]
    assert len(rows) > 10
    for row in rows:
        bound = 0.06 if row.layout.schedule == "zero-bubble" else LARGEST_GIB  # what deferred gradients keep is counted in part
        assert row.planned_gib == pytest.approx(row.gib, rel=bound), row.name


def test_published_rows_in_pipelines_are_near():
    rows = [row for row in planned.published_rows() if row.source is planned.MEGATRON]
    assert len(rows) == 9
    assert all(abs(row.error) < LARGEST for row in rows if row.layout.pipeline > 1)
    assert all(why_not(row.run.config, row.layout, row.run.sequence) is None for row in planned.published_rows())


# ---- arithmetic ----


def run_of(name="8B", gpu=H100, **changes):
    return Run(preset(name, params_dtype="bf16", **changes), 8192, gpu, 36.0)


@pytest.mark.parametrize(
    "layout",
    [
        GPULayout(),
        GPULayout(2, 2, 4, 1, 2, 1, 32, "optimizer", "interleaved"), GPULayout(1, 4, 2, 1, 1, 2, 64, "nothing", "zero-bubble"),
        GPULayout(4, 1, 16, 1, 1, 1, 16, "fsdp"), GPULayout(8, 4, 4, 2, 1, 1, 64),
        GPULayout(1, 2, 1, 1, 1, 1, 8, last=14, deferred=2),
    ],
)  # fmt: skip
def test_parts_are_the_step_and_no_lower_bound_is_above_it(layout):
    run = run_of()
    step = step_time(run, layout)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert all(seconds > 0 for seconds in step.parts.values())
    assert 0 <= step.exposed < 1
    if layout.deferred is None:
        assert least_time(run, layout) <= step.seconds * (1 + 1e-9)


def test_what_a_layout_changes():
    run = run_of()
    one, two = (step_time(run, GPULayout(batch=count)) for count in (4, 8))
    for name in (PRODUCTS, ATTENTION, PASSES, HEAD):
        assert two.parts[name] == pytest.approx(2 * one.parts[name])
    assert one.parts.keys() == {PRODUCTS, ATTENTION, PASSES, HEAD, "optimizer"}
    tensor = step_time(run, GPULayout(tensor=4, batch=4))
    assert tensor.parts[PRODUCTS] == pytest.approx(one.parts[PRODUCTS] / 4, rel=0.05) and tensor.parts[TENSOR] > 0
    few, many = (step_time(run, GPULayout(pipeline=4, batch=batch)) for batch in (8, 64))
    assert few.parts[BUBBLE] / few.seconds > 1.5 * many.parts[BUBBLE] / many.seconds
    near, far = (step_time(run, GPULayout(data=data, batch=data)).parts[DATA] for data in (8, 64))
    assert far > near
    eight = step_time(run._replace(config=run.config.replace(fp8_format="hybrid")), GPULayout(batch=4))
    assert eight.parts[PRODUCTS] < 0.6 * one.parts[PRODUCTS] and eight.parts[PASSES] > one.parts[PASSES]
    full = step_time(run._replace(config=run.config.replace(recompute_granularity="full")), GPULayout(batch=4))
    assert 1.15 < full.seconds / one.seconds < 1.35


def test_rings_share_a_nodes_cards():
    links = H100.links
    assert bandwidth(links, Group(8)) == links.node.value
    assert bandwidth(links, Group(8, 8)) == links.card.value  # one GPU of each node
    assert bandwidth(links, Group(16, 4)) == 2 * links.card.value
    assert bandwidth(links, Group(64)) == links.node.value  # eight cards send as much as NVLink
    assert Group(64).nodes == 8 and Group(16, 8).nodes == 16 and Group(4, 2).nodes == 1
    assert gather_time(links, Group(1), 1e9) == 0
    assert reduce_time(links, Group(16), 1e9) == pytest.approx(2 * gather_time(links, Group(16), 1e9))
    assert gather_time(links, Group(2), 1e9) == pytest.approx(0.5e9 / links.pair.value + links.pair_start.value)


def test_memory_of_layouts():
    config, options = preset("70B", params_dtype="bf16"), Options(seq_length=8192)
    gpu = int(H100.memory.value)
    whole = layout_memory(config, options, GPULayout(8, 1, 2, batch=2), gpu)
    assert whole.weights == pytest.approx(2 * 70.55e9 / 8, rel=0.01)
    assert whole.state == pytest.approx(10 * 70.55e9 / 8 / 2, rel=0.01)
    staged = layout_memory(config, options, GPULayout(8, 4, 2, batch=64), gpu)
    assert staged.weights == pytest.approx(whole.weights / 4, rel=0.1)
    sharded = layout_memory(config, options, GPULayout(8, 1, 32, batch=32, shard="fsdp"), gpu)
    assert sharded.state == pytest.approx(8 * 70.55e9 / 256, rel=0.01)
    # the first rank of 1F1B keeps a microbatch of each rank, so as much as without a pipeline
    assert staged.activations == pytest.approx(whole.activations, rel=0.02)


def test_a_runs_settings_as_a_layout():
    config = preset("1B", tensor_model_parallel_size=2, pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=True)
    options = Options(micro_batch_size=2, global_batch_size=32, use_distributed_optimizer=True)
    assert layout_of(config, options, 16) == GPULayout(2, 2, 4, 1, 1, 2, 32, "optimizer")


def test_layouts_are_those_that_training_takes():
    refused = 0
    kinds = [(1,), (1, 2, 4), (1, 2), (1, 2), (1, 2), (6, 8, 22), ("optimizer", "fsdp")]
    small = Config(num_layers=12, num_attention_heads=4, hidden_size=64, params_dtype="bf16", max_position_embeddings=64)
    for eight, schedule in (None, "1f1b"), (None, "interleaved"), (None, "zero-bubble"), ("hybrid", "zero-bubble"):
        config = small.replace(fp8_format=eight)
        for tensor, pipeline, data, several, micro, batch, shard in product(*kinds):
            layout = GPULayout(tensor, pipeline, data, 1, several, micro, batch, shard, schedule)
            try:
                made = config.replace(
                    tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
                    virtual_pipeline_model_parallel_size=several if several > 1 else None,
                    untie_embeddings_and_output_weights=pipeline > 1,
                )  # fmt: skip
                options = Options(
                    seq_length=64, micro_batch_size=micro, global_batch_size=batch, use_fsdp=shard == "fsdp",
                    use_distributed_optimizer=shard == "optimizer", pipeline_schedule=schedule,
                )  # fmt: skip
                stages.check(made, options, data)
                assert stages.microbatches(made, options, data) == layout.microbatches
                trains = (shard != "fsdp" or data > 1) and not (eight and pipeline > 1)  # command.py's own
            except (CommandError, ValueError):
                trains, refused = False, refused + 1
            assert (why_not(config, layout, 64) is None) == trains, (layout, why_not(config, layout, 64))
    assert refused > 300


def test_fsdp_zeroes_no_gradients():
    one, sharded = (step_time(run_of(), GPULayout(data=16, batch=16, shard=shard)) for shard in ("optimizer", "fsdp"))
    assert sharded.parts[OPTIMIZER] == pytest.approx(one.parts[OPTIMIZER] * 32 / 36)


def test_tied_models_are_untied_in_pipelines():
    config = preset("1B", params_dtype="bf16")
    untied, layout = config.replace(untie_embeddings_and_output_weights=True), GPULayout(pipeline=2, batch=8)
    assert config.tied and parameters(config, layout) == parameters(untied, layout)
    assert parameters(config, GPULayout()) != parameters(untied, GPULayout())


def test_blocks_that_recompute_are_counted_in_each_stage():
    config, gpu = preset("8B", params_dtype="bf16", recompute_granularity="full"), int(H100.memory.value)
    none = config.replace(recompute_granularity=None)

    def found(config, layout):
        memory = layout_memory(config, Options(seq_length=8192), layout, gpu)
        return memory.activations, step_time(run_of()._replace(config=config), layout).seconds

    for layout in (
        GPULayout(batch=8),
        GPULayout(pipeline=2, batch=8),
        GPULayout(pipeline=2, stages=2, batch=8, schedule="interleaved"),
    ):
        places = layout.pipeline * layout.stages
        half = config.replace(recompute_num_layers=16 // places)
        for few, some, most in zip(found(none, layout), found(half, layout), found(config, layout), strict=True):
            assert some == pytest.approx((few + most) / 2, rel=1e-3)
        assert found(config.replace(recompute_num_layers=32), layout) == pytest.approx(found(config, layout))


def test_every_rate_has_a_source():
    assert set(GPUS) == {"a100", "h100", "h200", "b200"}
    for gpu in GPUS.values():
        assert all(rate.source for _, _, rate in named_rates(gpu))
    assert A100.product.value / A100.peak.value == pytest.approx(H200.product.value / H200.peak.value)
    assert "assumed" in B200.product.source


# ---- the command ----


def test_the_command_says_what_is_best(capsys):
    status, out, err = plan(capsys, "--preset", "70B", "--gpus", "512")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("70.55B parameters in bf16, on 512 h100 in 64 nodes of 8; a step has 512 sequences of 8192 tokens")
    assert max(map(len, lines)) <= 118
    assert "1,024  " in out and "NVIDIA/nccl-tests issue 212" in out and "pipeline bubble" in out
    seconds = [float(line[57:66]) for line in lines[3:11]]
    assert seconds == sorted(seconds)


def test_json_has_everything(capsys):
    argv = "--preset", "8B", "--gpus", "16", "--gpu", "h200", "--tp", "2", "--json"
    told = json.loads(plan(capsys, *argv)[1])
    assert {each["layout"]["tensor"] for each in told["layouts"]} == {2}
    assert all(each["memory"]["total"] < H200.memory.value for each in told["layouts"])
    best = told["layouts"][0]
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    assert 0.3 < best["mfu"] < 0.8
    assert [each["gpus"] for each in told["growth"]] == [1 << n for n in range(11)]
    assert told["growth"][0]["weak"] is None  # tp is 2
    assert told["rates"]["card"]["source"]
    memory = json.loads(plan(capsys, "--preset", "1B", "--gpu", "h200", "--json")[1])
    assert memory["fits"] and memory["memory"]["loss"]["total"] <= memory["total"]


def test_settings_of_a_file_are_fixed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "_MOST", 1)
    file = tmp_path / "run.yaml"
    settings = {"params_dtype": "bf16", "tensor_model_parallel_size": 4, "micro_batch_size": 2, "use_fsdp": True}
    settings |= {"recompute_granularity": "full", "pipeline_schedule": "1f1b", "global_batch_size": 64}
    file.write_text(json.dumps(settings))  # YAML too
    argv = "--preset", "8B", "--gpus", "16", "--config", str(file), "--json"
    layouts = json.loads(plan(capsys, *argv)[1])["layouts"]
    assert [list(each["layout"].values())[:9] for each in layouts] == [[4, 1, 4, 1, 1, 2, 64, "fsdp", "1f1b"]]
    assert layouts[0]["recompute_granularity"] == "full"
    assert {each["layout"]["tensor"] for each in json.loads(plan(capsys, *argv, "--tp", "2")[1])["layouts"]} == {2}
    file.write_text(json.dumps(settings | {"use_fsdp": False, "use_distributed_optimizer": False}))
    layouts = json.loads(plan(capsys, *argv)[1])["layouts"]
    assert {each["layout"]["shard"] for each in layouts} == {"nothing"}
    file.write_text(json.dumps(settings | {"tensor_model_parallel_size": "4"}))
    assert "tensor_model_parallel_size must be of type int, but is '4'" in plan(capsys, *argv)[2]
    file.write_text(json.dumps(settings | {"untie_embeddings_and_output_weights": False}))
    assert "--pp must be 1 with untie_embeddings_and_output_weights False" in plan(capsys, *argv, "--pp", "2")[2]


def test_settings_of_the_search_need_no_others(capsys, monkeypatch):
    monkeypatch.setattr(table, "_MOST", 1)
    argv = "--preset", "8B", "--gpus", "8", "--global-batch-size", "32", "--json"

    def planned(*more):
        return json.loads(plan(capsys, *argv, *more)[1])["layouts"]

    assert {each["recompute_granularity"] for each in planned("--recompute-num-layers", "4")} == {"selective"}
    for more in ("--num-virtual-stages-per-pipeline-rank", "2"), ("--pp", "4", "--num-layers-per-virtual-pipeline-stage", "4"):
        assert {each["layout"]["stages"] for each in planned(*more)} == {2}
    for schedule, several in ("1f1b", False), ("interleaved", True):
        found = planned("--pp", "4", "--pipeline-schedule", schedule)
        assert found and all((each["layout"]["stages"] > 1) == several for each in found)
    tied = "--preset", "1B", "--gpus", "4", "--global-batch-size", "32"
    for more in ("--pp", "2"), ("--pipeline-model-parallel-size", "2"):
        assert plan(capsys, *tied, *more)[1].startswith("1.50B parameters")
    assert plan(capsys, *tied, "--pp", "1")[1].startswith("1.24B parameters")


@pytest.mark.parametrize("gpus", [24, 7])
def test_numbers_of_gpus_that_are_no_power_of_two(capsys, monkeypatch, gpus):
    monkeypatch.setattr(table, "_MOST", 64)
    told = json.loads(plan(capsys, "--preset", "8B", "--gpus", str(gpus), "--json")[1])
    assert told["sequences"] % gpus == 0 and 0.7 < told["sequences"] / 512 < 1.4
    assert told["layouts"][0]["layout"]["pipeline"] == 1
    assert [each["gpus"] for each in told["growth"]] == ([3, 6, 12, 24, 48] if gpus == 24 else [7, 14, 28, 56])
    for each in told["growth"]:
        assert each["weak"]["layout"]["batch"] * gpus == told["sequences"] * each["gpus"]
        assert each["weak"]["mfu"] > 0.5 and each["strong"]["mfu"] > 0.5


def test_context_parallelism_is_marked(capsys, monkeypatch):
    monkeypatch.setattr(table, "_MOST", 16)
    _, out, _ = plan(capsys, "--preset", "8B", "--gpus", "16", "--cp", "2")
    assert "cp 2" in out and "* not by onepass train" in out and "Megatron" in out
    assert "* not by" not in plan(capsys, "--preset", "8B", "--gpus", "16", "--tp", "2", "--pp", "2")[1]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpus", "0"], "--gpus must be at least 1, but is 0"),
        (["--gpus", "16", "--tp", "3"], "--gpus must be a multiple of tp 3, but is 16"),
        (["--gpus", "16", "--tp", "4", "--pp", "8"], "--gpus must be a multiple of tp 4 x pp 8, 32, but is 16"),
        (["--gpus", "16", "--tp", "2", "--pp", "2", "--dp", "2", "--cp", "1"], "tp 2 x pp 2 x dp 2 x cp 1 must be --gpus, 16"),
        (["--gpus", "12", "--tp", "3"], "num_attention_heads must be a multiple of tp, 3, but is 32"),
        (["--gpus", "16", "--tp", "16"], f"tp must be at most {NODE}, the GPUs of a node, but is 16"),
        (["--gpus", "64", "--pp", "64"], "pp x stages must be at most num_layers, 32, but is 64"),
        (
            ["--gpus", "8", "--dp", "8", "--global-batch-size", "12"],
            "global_batch_size must be a multiple of dp x micro_batch_size",
        ),
        (["--gpus", "8", "--pp", "2", "--use-fsdp"], "pp must be 1 with FSDP"),
        (["--gpus", "8", "--tp", "0"], "--tp must be at least 1, but is 0"),
        (
            ["--gpus", "8", "--tp", "2", "--tensor-model-parallel-size", "4"],
            "--tp and tensor_model_parallel_size must be the same",
        ),
        (["--gpus", "1"], "the model doesn't fit 1 h100: one GPU takes the least"),
        (
            ["--gpus", "8", "--gpu", "80"],
            "--gpu must be one of a100, h100, h200, b200 with --gpus, whose rates are known, but is 80",
        ),
        (["--gpus", "8", "--ranks", "8"], "--ranks must not be given with --gpus"),
        (["--gpus", "8", "--num-experts", "8"], "num_moe_experts must be None, but is 8: its time is not counted"),
        (["--gpus", "8", "--offload-optimizer"], "offload_optimizer must be False, but is True: its time is not counted"),
        (["--gpus", "8", "--gpu", "a100", "--fp8-format", "hybrid"], "an A100 has no products in eight bits"),
        (
            ["--gpus", "16", "--pp", "2", "--pipeline-model-parallel-size", "2", "--decoder-last-pipeline-num-layers", "15"],
            "num_layers_in_last_pipeline_stage must not be given with --gpus, which tries even stages alone, but is 15",
        ),
        (["--gpus", "8", "--global-batch-size", "0"], "global_batch_size must be at least 1, but is 0"),
        (["--gpus", "8", "--pp", "1", "--pipeline-schedule", "zero-bubble"], "pp must be above 1 with pipeline_schedule"),
        (["--gpus", "8", "--recompute-num-layers", "33"], "recompute_num_layers must be at most num_layers, 32, but is 33"),
        (
            ["--gpus", "8", "--num-virtual-stages-per-pipeline-rank", "0"],
            "virtual_pipeline_model_parallel_size must be at least 1",
        ),
        (["--gpus", "8", "--num-layers-per-virtual-pipeline-stage", "2"], "--pp must be given with num_layers_per_virtual"),
        (["--gpus", "8", "--pp", "4", "--num-layers-per-virtual-pipeline-stage", "3"], "num_layers must be a multiple of 12"),
        (["--tp", "2"], "--tp must not be given without --gpus"),
        (["--gpu", "h300"], "--gpu must be one of a100, h100, h200, b200, or a GPU's memory in GiB, such as 80, but is 'h300'"),
    ],
)
def test_what_can_not_be_planned(argv, said, capsys):
    status, out, err = plan(capsys, "--preset", "8B", *argv)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1


def test_names_of_gpus_have_their_memory(capsys):
    assert "on one GPU of 139.8 GiB" in plan(capsys, "--preset", "1B", "--gpu", "h200")[1]
    assert "on one GPU of 24 GiB" in plan(capsys, "--preset", "1B", "--gpu", "24")[1]
