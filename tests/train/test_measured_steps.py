"""Steps that decide on a CUDA graph, and those of one, with stand-ins for the clock and for the graph."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from runtime import cpu_graph
from train.checkpoint_runs import alone, batch, configured, go
from train.fp8_runs import FP8

import onepass
from onepass.cli import main
from onepass.kernels import philox
from onepass.train import command, measured_steps, setup, steps, table
from onepass.train.layout import ParallelLayout
from onepass.train.measured_steps import MeasuredSteps
from onepass.train.options import Options
from onepass.train.setup import make
from onepass.train.steps import GraphedSteps, TrainSteps

dropout_add = import_module("onepass.ops.dropout.dropout_add")
activation = import_module("onepass.ops.activation.bias_activation")
NOT_TIMED, TIMED = 3, 5
OPTIMIZER = {"params_dtype": "fp32", "clip_grad": 0.0}


@pytest.fixture
def graphs(monkeypatch):
    """Let this CPU capture. What was captured is in the list."""
    captured = []

    def record(*args):
        captured.append(cpu_graph.record(*args, may_wait=True))
        return captured[-1]

    cpu_graph.in_training(monkeypatch, steps, capture=record)
    return captured


@pytest.fixture
def clock(monkeypatch, graphs):
    """A clock on which a microbatch's calls take `calls` and the GPU ends after `whole` seconds, and 8 and 8 GiB of memory."""
    found = SimpleNamespace(now=0.0, calls=[0.04], whole=0.041, waits=0, memory=(8 << 30, 8 << 30))
    stock = TrainSteps._micro

    def micro(self, part, share):
        found.began = found.now
        found.now += found.calls[0]
        return stock(self, part, share)

    def synchronize(device):
        found.waits += 1
        if found.waits % 2 == 0:
            found.now = max(found.now, found.began + found.whole)
            found.calls[:] = found.calls[1:] or found.calls

    monkeypatch.setattr(TrainSteps, "_micro", micro)
    monkeypatch.setattr(measured_steps, "synchronize", synchronize)
    monkeypatch.setattr(measured_steps, "perf_counter", lambda: found.now)
    monkeypatch.setattr(measured_steps, "memory_of_graph", lambda device: found.memory)
    return found


def measured(**settings):
    """A run whose steps decide, and the lines that it says."""
    config, options = configured(**OPTIMIZER | settings)
    trained, said = make(config, options, alone()), []
    trained.steps = MeasuredSteps(trained.model, config, options, trained.update, None, say=said.append)
    return trained, said


def as_eager(trained, last=14, replays=False, **settings):
    """Train beside TrainSteps, to the bit. Products under the stand-in for replays are a unit in the last place apart."""
    config, options = configured(**OPTIMIZER | settings)
    expected = make(config, options, alone())
    torch.manual_seed(7)
    found = torch.tensor(go(trained, alone(), 0, last))
    torch.manual_seed(7)
    within = {"rtol": 1e-4, "atol": 1e-4} if replays else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(found, torch.tensor(go(expected, alone(), 0, last)), **within)
    for one, other in zip(trained.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, **within)


def test_steps_that_wait_for_the_cpu_are_captured(clock, graphs):
    trained, said = measured()
    as_eager(trained, replays=True)
    assert said == ["CUDA graph: captured, as a microbatch's calls take the CPU 40.0 of its 41.0 ms"]
    assert trained.steps.replays and len(graphs) == 1
    assert graphs[0][0].replays == 2 * (14 - NOT_TIMED - TIMED)  # of two microbatches
    assert clock.waits == 2 * TIMED  # once a step


def test_the_first_steps_are_not_timed_and_one_slow_step_decides_nothing(clock, graphs):
    clock.calls = [0.01, 0.04, 0.01, 0.04, 0.01]
    trained, said = measured()
    go(trained, alone(), 0, NOT_TIMED)
    assert clock.waits == 0
    go(trained, alone(), NOT_TIMED, 10)
    assert said == ["CUDA graph: not needed, as a microbatch's calls take the CPU 10.0 of its 41.0 ms"]
    assert not trained.steps.replays and not graphs


def test_no_reduction_is_timed(clock, graphs, monkeypatch):
    """Those of data-parallel ranks start in `finish` of steps that are timed."""
    trained, _ = measured()
    began, stock = [], TrainSteps._micro

    def micro(*given):
        began.append(trained.update.main_grads._accumulating)
        return stock(*given)

    monkeypatch.setattr(TrainSteps, "_micro", micro)
    go(trained, alone(), 0, NOT_TIMED + TIMED)
    last_ones = began[1::2]  # of two microbatches
    assert last_ones == [False] * NOT_TIMED + [True] * TIMED


@pytest.mark.parametrize(("calls", "captured"), [(0.0359, False), (0.0361, True)])
def test_nine_tenths_decide(clock, graphs, calls, captured):
    clock.calls, clock.whole = [calls], 0.04
    trained, said = measured()
    go(trained, alone(), 0, 9)
    assert trained.steps.replays is captured and len(graphs) == captured and len(said) == 1


def test_a_graph_that_would_leave_evaluations_too_little_is_not_captured(clock, graphs):
    clock.memory = 5 << 30, 3 << 30
    trained, said = measured()
    as_eager(trained)
    assert said == [
        "CUDA graph: not captured, as its 5.0 GiB would leave evaluations 3.0, though a microbatch's calls take the CPU 40.0 of "
        "its 41.0 ms"
    ]
    assert not trained.steps.replays and not graphs


def test_memory_is_what_a_step_needs_and_what_is_left_then(monkeypatch):
    for name, value in (
        ("memory_allocated", 3), ("max_memory_allocated", 10), ("memory_reserved", 12), ("mem_get_info", (8, 100)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert measured_steps.memory_of_graph(torch.device("cuda")) == (7, 10)  # 8 + 12 - 3 are free for us, of which it takes 7


def test_a_capture_that_fails_leaves_the_step_as_it_was(clock, graphs, monkeypatch):
    def fail(call, device):
        torch.rand(3)
        call()  # which adds to gradients
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be ...")

    monkeypatch.setattr(steps, "capture", fail)
    trained, said = measured(hidden_dropout=0.25)
    as_eager(trained, hidden_dropout=0.25)
    assert said == [
        "CUDA graph: not captured, though a microbatch's calls take the CPU 40.0 of its 41.0 ms, as that failed: CUDA error: "
        "operation not permitted when stream is capturing"
    ]
    assert not trained.steps.replays


def test_other_errors_are_not_taken_for_the_captures(clock, graphs, monkeypatch):
    monkeypatch.setattr(cpu_graph.Graph, "replay", lambda self: torch.ones(2) @ torch.ones(3))
    trained, _ = measured()
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        go(trained, alone(), 0, 9)


# ---- who measures ----


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"hidden_dropout": 0.1}, None),
        (FP8, None),
        ({"lora_rank": 2}, None),
        ({"attention_dropout": 0.1}, "attention dropout"),
        ({"release_main_grads": True}, "gradients whose memory is released"),
    ],
)
def test_why_a_run_decides_nothing(settings, reason):
    config, options = configured(**settings)
    update = make(config, options.replace(lora_rank=None), alone()).update
    found = setup._why_not_measured(config, update)
    assert found is reason is None or found.startswith(f"{reason}, ")


def test_a_run_says_why_it_decides_nothing(monkeypatch):
    monkeypatch.setattr(setup, "_may_have_graphs", lambda *_: True)
    said = []
    assert type(make(*configured(release_main_grads=True), alone(), say=said.append).steps) is TrainSteps
    reason = "gradients whose memory is released, which a graph would keep"
    assert said == [f"CUDA graph: not tried with {reason}; --cuda-graphs captures one"]


@pytest.mark.parametrize(
    ("settings", "device", "may"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"cuda_graphs": False}, "cuda", False),
        ({"cuda_graphs": True}, "cuda", False),
        ({"cpu_offloading": True}, "cuda", False),
        ({"offload_optimizer": True}, "cuda", False),
    ],
)
def test_who_may_have_a_graph(settings, device, may):
    config, options = configured(**settings)
    update = make(*configured(), alone()).update
    assert setup._may_have_graphs(config, options, ParallelLayout(torch.device(device)), update) is may
    plain = make(*configured(), alone(), plain=True).update
    assert not setup._may_have_graphs(config, options, ParallelLayout(torch.device(device)), plain)


def test_dropout_draws_as_in_a_graph_in_steps_without_one(monkeypatch):
    """Also in backward, where checkpointed layers run again. Before and after it is as it was."""
    drawn = []
    monkeypatch.setattr(activation, "draw_seed", lambda *given: drawn.append(philox._as_graphs_do()) or philox.draw_seed(*given))
    monkeypatch.setattr(dropout_add, "draw_seed", activation.draw_seed)
    for rate in (0.25, 0.0):
        config, options = configured(**OPTIMIZER, hidden_dropout=rate, recompute_granularity="full")
        go(make(config, options, alone()), alone(), 0, 1)
        assert bool(drawn) is bool(rate) and all(drawn) and not philox._as_graphs_do()
        drawn.clear()


def test_make_hands_on_what_takes_the_line(monkeypatch):
    monkeypatch.setattr(setup, "_may_have_graphs", lambda *_: True)
    config, options = configured()
    said = []
    made = make(config, options, alone(), say=said.append)
    assert type(made.steps) is MeasuredSteps
    made.steps._reason = "because"
    made.steps._report("this")
    assert said == ["CUDA graph: this"]
    assert make(config, options, alone()).steps._say("no one listens") is None


def test_by_default_a_run_decides_and_a_run_can_be_told():
    assert Options().cuda_graphs is None
    flags = {flag.field: flag for flag in Options.flags()}
    assert "--no-cuda-graphs" in str(flags["cuda_graphs"])


# ---- graphs that were asked for ----


def graphed(**settings):
    config, options = configured(**OPTIMIZER | settings)
    trained = make(config, options, alone())
    trained.steps = GraphedSteps(trained.model, config, options, trained.update)
    return trained


@pytest.mark.parametrize("settings", ({}, {"hidden_dropout": 0.25}), ids=("", "dropout"))
def test_replays_are_steps_alike_and_warm_ups_use_up_no_random_numbers(graphs, settings):
    trained = graphed(**settings)
    as_eager(trained, 4, replays=True, **settings)
    assert trained.steps.replays and graphs[0][0].replays == 8


def test_warm_ups_count_no_saturated_numbers(graphs, fp8_by_formula):
    """Of a step whose numbers are far too large for scales of the steps before."""
    found = []
    for kind in (TrainSteps, GraphedSteps):
        config, options = configured(**OPTIMIZER | FP8)
        trained = make(config, options, alone())
        go(trained, alone(), 0, 2)
        for block in trained.model.layers.values():
            block.mlp.linear_fc2.register_forward_pre_hook(lambda layer, args: (args[0] * 1e4, *args[1:]))
        trained.steps = kind(trained.model, config, options, trained.update)
        before = onepass.nn.fp8_saturations(trained.model)
        trained.steps.run(batch(2, alone()))
        trained.update.step(1e-3)
        found.append((before, onepass.nn.fp8_saturations(trained.model)))
    assert found[0] == found[1] and found[0][0] != found[0][1]


# ---- a run ----


def test_a_table_runs_without_a_graph_what_can_not_be_captured(graphs, monkeypatch):
    config, options = configured(**OPTIMIZER, cuda_graphs=True)
    batches = SimpleNamespace(of_step=lambda number: batch(number, alone()))
    assert type(make(config, options, alone()).steps) is GraphedSteps
    found = []
    for captures in (True, False):
        if not captures:
            monkeypatch.setattr(steps, "capture", lambda call, device: torch.ones(2) @ torch.ones(3))
        step = table._stepper(table.Variant(config, options, alone(), batches))
        found.append([step(number, 0.01).item() for number in range(3)])
    assert found[0] == pytest.approx(found[1], rel=1e-5) and len(graphs) == 1 and graphs[0][0].replays == 6


def test_tensor_parallel_ranks_capture_together_or_not_at_all(graphs, monkeypatch):
    """Capturing holds no collective, so a rank's failure may be the others'. Warming up holds some, and ends the run."""
    config, options = configured(**OPTIMIZER, cuda_graphs=True)
    trained, reduced = make(config, options, alone()), []

    def stepper():
        return MeasuredSteps(trained.model, config, options, trained.update, None, decided=True, group="tensor")

    def all_reduce(flag, op, group):
        reduced.append((flag.item(), group))
        flag.fill_(1.0)  # another rank's failed

    monkeypatch.setattr(measured_steps.dist, "all_reduce", all_reduce)
    one, other = stepper(), make(config, options.replace(cuda_graphs=None), alone()).steps
    assert torch.equal(one.run(batch(0, alone()))[0], other.run(batch(0, alone()))[0])
    assert reduced == [(0.0, "tensor")] and not one.replays and one._graph is None
    monkeypatch.setattr(TrainSteps, "_micro", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        stepper().run(batch(0, alone()))
    assert len(reduced) == 1


def test_a_run_says_what_it_decided_and_its_tables_run_alike(clock, graphs, monkeypatch, tmp_path, corpus, capsys):
    monkeypatch.setattr(setup, "_may_have_graphs", lambda config, options, *_: options.cuda_graphs is None)
    given = []
    monkeypatch.setattr(command, "compare", lambda variant: given.append(variant.options) or (None, None))
    monkeypatch.setattr(command, "table", lambda *_: "the table")
    size = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--vocab-size", "300", "--seq-length", "16"]
    quick = ["--micro-batch-size", "2", "--train-iters", "11", "--eval-iters", "0", "--samples", "0", "--no-fusion-table"]
    assert main(["train", "--device", "cpu", "--data", str(corpus), "--run-dir", str(tmp_path / "run"), *size, *quick]) == 0
    said = capsys.readouterr().out
    assert said.count("CUDA graph: captured, as a microbatch's calls take the CPU 40.0 of its 41.0 ms") == 1
    assert graphs[0][0].replays == 3 and [options.cuda_graphs for options in given] == [True]
