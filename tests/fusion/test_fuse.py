"""The public function: what it takes, what it says, and how its own time grows."""

import logging
import operator
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
import onepass.fusion.backend
from onepass.fusion.backend import FusionBackend
from onepass.fusion.cost import LaunchCost
from onepass.fusion.graph_inputs import with_stable_addresses
from onepass.fusion.report import FusionReport

SLOW = {"max_autotune": True}


@pytest.fixture(autouse=True)
def ordinary(machine):
    machine(LaunchCost(bytes_per_us=1e6, launch_us=5.0))


def split_stack(x, weight):
    parts = torch.split(x, 8, dim=1)
    return F.relu(F.linear(torch.cat([torch.tanh(F.layer_norm(part, (8,))) for part in parts], 1), weight))


def inputs():
    torch.manual_seed(0)
    return torch.randn(4, 32, requires_grad=True), torch.randn(5, 32, requires_grad=True)


def agree(fused, fn):
    x, weight = inputs()
    y, want = fused(x, weight), fn(x, weight)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(torch.autograd.grad(y, (x, weight), dy), torch.autograd.grad(want, (x, weight), dy))


@pytest.mark.parametrize("compiler", ["none", pytest.param("inductor", marks=pytest.mark.slow)])
def test_split_stack(compiler):
    fused = onepass.fuse(split_stack, compiler=compiler)
    agree(fused, split_stack)
    found = {(found.operator, found.lanes, found.copied) for found in fused.report().found}
    assert {("native_layer_norm", 4, 0), ("tanh", 4, 0), ("native_layer_norm_backward", 4, 0)} <= found


def test_as_a_decorator():
    @onepass.fuse
    def plain(x, weight):
        """Words."""
        return split_stack(x, weight)

    @onepass.fuse(compiler="none")
    def with_options(x, weight):
        return split_stack(x, weight)

    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Words."
    agree(with_options, split_stack)


def test_as_a_method():
    class Holder:
        @onepass.fuse(compiler="none")
        def step(self, x, weight):
            return split_stack(x, weight) * self.scale

        scale = 2.0

    agree(Holder().step, lambda x, weight: split_stack(x, weight) * 2.0)


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.LayerNorm(4)])
def test_a_module_of_pytorchs_own(module):
    """Of which torch.compile's nn.Module.compile compiles nothing."""
    fused, x = onepass.fuse(module, compiler="none"), torch.randn(3, 4)
    torch.testing.assert_close(fused(x), module(x))
    assert len(fused.report().graphs) == 1
    assert list(fused.state_dict()) == list(module.state_dict())


def test_a_backend_of_torch_compile(caplog):
    with caplog.at_level(logging.INFO, "onepass.fusion"):
        agree(torch.compile(split_stack, backend="onepass", options={"compiler": "none"}), split_stack)
    assert "native_layer_norm" in caplog.text


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda: onepass.fuse(3), TypeError, "fn_or_module must be a function or an nn.Module, but is a int"),
        (lambda: onepass.fuse(split_stack, compiler="gcc"), ValueError, "auto, inductor, none, but is 'gcc'"),
        (lambda: onepass.fuse(split_stack, cuda_graph=True, dynamic=True), ValueError, "fixed shapes"),
        (lambda: onepass.fuse(split_stack, cuda_graph=True, compiler="none"), ValueError, "needs the compiler 'inductor'"),
        (lambda: onepass.fuse(split_stack, compiler="none", options=SLOW), ValueError, "compiler is 'none': max_autotune"),
        (lambda: onepass.fuse(split_stack, options={"max_autotun": True}), ValueError, "but max_autotun is none"),
        (lambda: onepass.fuse(split_stack, options={"joint_custom_pre_pass": None}), ValueError, "must leave out joint_custom"),
        (lambda: onepass.fuse(onepass.fuse(split_stack)), ValueError, "fused already"),
        (lambda: onepass.fuse(onepass.fuse(nn.Linear(2, 2))), ValueError, "fused already"),
    ],
)
def test_what_is_wrong_is_said(given, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        given()


def test_a_cuda_graph_needs_a_gpu():
    fused = onepass.fuse(split_stack, cuda_graph=True)
    with pytest.raises(Exception, match="cuda_graph=True needs a GPU"):
        fused(*inputs())


# ---- the report ----


def test_the_report_before_the_first_call():
    assert "nothing compiled yet" in str(onepass.fuse(split_stack).report())


def test_the_report_says_what_was_fused_and_what_not():
    def program(x):
        parts = x.chunk(4, 1)
        return torch.cat([F.dropout(torch.tanh(part), 0.5) for part in parts], 1)

    fused = onepass.fuse(program, compiler="none")
    fused(torch.randn(3, 16))
    report = fused.report()
    (graph,) = report.graphs
    assert [(found.operator, found.lanes) for found in report.found] == [("tanh", 4)]
    assert any("random numbers" in refused.why and refused.lanes == 4 for refused in report.refused)
    assert graph.before.operators - graph.after.operators == 3
    assert graph.times is None
    text = str(report)
    for words in ("tanh", "one view, no copy", "left as it was", "random numbers", "operators", "->", "predicted"):
        assert words in text


def test_nothing_to_fuse_is_said():
    fused = onepass.fuse(lambda x: torch.tanh(x) * 2, compiler="none")
    fused(torch.randn(3))
    assert "nothing to fuse" in str(fused.report())


def test_the_report_measures():
    fused = onepass.fuse(split_stack, compiler="none")
    fused(*inputs())
    (graph,) = fused.report(measure=True).graphs
    assert graph.times.written > 0
    assert graph.times.fused > 0
    assert "measured: as written" in str(fused.report())


def test_measuring_changes_nothing_of_the_users():
    fused = onepass.fuse(lambda x: torch.cat([torch.tanh(part) for part in x.chunk(2, 1)], 1), compiler="none", dynamic=True)
    fused(torch.randn(3, 4))
    before = torch.get_rng_state()
    assert fused.report(measure=True).graphs[0].times.fused > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_report_is_of_its_own_function():
    first, second = (onepass.fuse(fn, compiler="none") for fn in (split_stack, lambda x: x.sin()))
    first(*inputs())
    assert isinstance(second.report(), FusionReport)
    assert not second.report().graphs


# ---- time ----


def chain(groups):
    def program(x):
        for _ in range(groups):
            x = torch.cat([torch.tanh(F.layer_norm(part, (4,))) for part in x.split(4, 1)], 1)
        return x

    return program


@pytest.mark.slow
def test_fusing_takes_time_in_proportion(monkeypatch):
    """Under 5 s for a thousand operators, and no quadratic growth: four times the operators in at most eight times the time.

    By the thread's own clock, as other tests run on these cores.
    """
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    seconds = []
    for groups in (8, 32):  # of 33 operators each, forward alone
        torch._dynamo.reset()
        fused = onepass.fuse(chain(groups), compiler="none")
        with torch.no_grad():
            fused(torch.randn(3, 64))
        (graph,) = fused.report().graphs
        assert graph.before.operators == 33 * groups
        assert graph.after.operators == 2 * groups
        seconds.append(graph.seconds)
    assert seconds[1] < 8 * max(seconds[0], 0.1)
    assert seconds[0] < 5


# ---- inputs of CUDA graphs ----


def test_inputs_in_few_places_are_read_where_they_are():
    seen = []

    def compiled(given):
        seen.append(given[1].data_ptr())
        return operator.add(*given)

    call = with_stable_addresses(compiled, [1])
    still, places = torch.ones(3), [torch.full((3,), float(i)) for i in range(12)]
    for _ in range(2):
        for i, moving in enumerate(places):
            torch.testing.assert_close(call([still, moving]), still + i)
    own = set(seen[8:12])
    assert seen[:8] == [x.data_ptr() for x in places[:8]] == seen[12:20]
    assert len(own) == 1  # what comes from ever new places is copied to one
    assert own.isdisjoint(x.data_ptr() for x in places)
    assert with_stable_addresses(compiled, []) is compiled


def test_what_is_written_to_a_copy_comes_back():
    """As a state that a function adds to, of which there are more than graphs."""

    def compiled(given):
        given[0].add_(given[1])
        return given[0] * 2

    states, step = [torch.full((3,), float(i)) for i in range(12)], torch.ones(3)
    call = with_stable_addresses(compiled, [0, 1], {0})
    for i, state in enumerate(states):
        given = [state, step.clone()]
        torch.testing.assert_close(call(given), torch.full((3,), 2.0 * i + 2))
        torch.testing.assert_close(state, torch.full((3,), i + 1.0))
        assert given[1].eq(1).all()


def test_a_backend_takes_options_of_inductor():
    assert FusionBackend(options={"max_autotune": False}).options == {"max_autotune": False}
