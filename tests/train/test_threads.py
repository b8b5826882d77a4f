"""The number of CPU threads on a busy machine, and the peak that a run's speed is shown against."""

import io

import pytest
import torch
from rich.console import Console

from onepass.runtime import cpu_threads as threads
from onepass.runtime.cpu_threads import CpuThreads, Probe, slow_threads
from onepass.train import live as live_module
from onepass.train.live import Live, MatrixPeak
from onepass.train.record import Line


class Machine:
    """Stands in for `torch` and the clock: what a probe finds, and how many threads are set."""

    def __init__(self, monkeypatch, cores):
        self.set, self.now, self.found, self.probed = cores, 100.0, {}, []
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.set)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(self, "set", count))
        monkeypatch.setattr(threads, "probe", self._probe)
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def _probe(self, count, most):
        self.probed.append(count)
        self.set = count
        return self.found[count]

    def is_idle(self):
        self.found = {count: Probe(100.0 * count, 0.98) for count in range(1, 65)}

    def is_busy(self, rates):
        self.found = {count: Probe(rate, 0.5) for count, rate in rates.items()}


def test_a_busy_machine_trains_with_fewer_threads_and_says_so(monkeypatch):
    machine, said = Machine(monkeypatch, 2), []
    machine.is_busy({2: 20.0, 1: 530.0})
    CpuThreads(said.append).choose()
    assert machine.set == 1
    assert said == [
        "The machine is busy, so training uses 1 thread: 2, which wait for each other, are 26.5 x slower. "
        "OMP_NUM_THREADS=2 keeps 2."
    ]


def test_others_say_that_fewer_threads_are_faster_and_change_nothing(monkeypatch):
    machine = Machine(monkeypatch, 2)
    machine.is_busy({2: 20.0, 1: 530.0})
    found = "the machine is busy: 2 threads, which wait for each other, are 26.5 x slower than 1"
    assert slow_threads() == (found, "set OMP_NUM_THREADS=1")
    assert machine.set == 2 and len(machine.probed) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert slow_threads() is None and len(machine.probed) == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    machine.is_idle()
    assert slow_threads() is None and machine.set == 2


def test_an_idle_machine_keeps_its_threads_after_one_look(monkeypatch):
    machine, said = Machine(monkeypatch, 64), []
    machine.is_idle()
    CpuThreads(said.append).choose()
    assert (machine.set, machine.probed, said) == (64, [64], [])


@pytest.mark.parametrize(
    ("rates", "chosen", "probed"),
    [
        ({8: 10.0, 7: 300.0, 4: 200.0}, 7, [8, 7, 4]),  # one core is busy
        ({8: 10.0, 7: 12.0, 4: 150.0, 2: 200.0, 1: 110.0}, 2, [8, 7, 4, 2, 1]),  # a container with two cores of eight
        ({8: 100.0, 7: 110.0, 4: 60.0}, 8, [8, 7, 4]),  # fewer are hardly faster: all stay
    ],
)
def test_the_most_threads_that_are_fast_are_used(rates, chosen, probed, monkeypatch):
    machine, said = Machine(monkeypatch, 8), []
    machine.is_busy(rates)
    CpuThreads(said.append).choose()
    assert (machine.set, machine.probed, len(said)) == (chosen, probed, int(chosen < 8))


def test_the_number_the_user_gave_stays(monkeypatch):
    machine = Machine(monkeypatch, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    machine.is_busy({2: 20.0, 1: 530.0})
    CpuThreads(pytest.fail).choose()
    assert (machine.set, machine.probed) == (2, [])


def test_a_machine_that_becomes_busy_during_a_run_and_idle_again(monkeypatch):
    machine, said = Machine(monkeypatch, 2), []
    machine.is_idle()
    used = CpuThreads(said.append)
    used.choose()
    machine.is_busy({2: 20.0, 1: 530.0})
    for speed in (9000.0, 15000.0, 12000.0, 300.0):  # the last is slow, but the machine was looked at just now
        used.watch(speed)
    assert (machine.set, said) == (2, [])
    machine.now += 31.0
    used.watch(12000.0)
    assert machine.set == 2
    used.watch(300.0)
    assert machine.set == 1 and "The machine is busy" in said[0]
    machine.is_idle()
    used.watch(8000.0)
    assert machine.set == 1
    machine.now += 31.0
    used.watch(8000.0)
    assert machine.set == 2 and said[1:] == ["The machine is less busy: training uses 2 threads."]


def test_a_probe_measures_threads_and_draws_no_random_numbers():
    state, before = torch.get_rng_state(), torch.get_num_threads()
    try:
        found = threads.probe(1, 1)
    finally:
        torch.set_num_threads(before)
    assert found.rate > 0 and 0 < found.share < 1.1
    assert torch.equal(torch.get_rng_state(), state)


# ---- the peak ----


@pytest.fixture
def measured(monkeypatch):
    """The FLOPs per second that the next measurements find."""
    found = []
    monkeypatch.setattr(live_module.MatrixPeak, "_measured", lambda self: setattr(self, "_last", self.clock) or found.pop(0))
    monkeypatch.setattr(live_module.MatrixPeak, "clock", 0.0, raising=False)
    monkeypatch.setattr("time.monotonic", lambda: MatrixPeak.clock)
    return found


def test_a_peak_that_a_run_exceeds_is_measured_again(measured, monkeypatch):
    measured[:] = [100.0, 400.0]
    found = MatrixPeak(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(MatrixPeak, "clock", 60.0)
    assert found.share(50.0) == 0.5 and len(measured) == 1
    assert found.share(215.0) == 215.0 / 400.0 and measured == []


def test_a_share_above_one_is_left_out(measured, monkeypatch):
    measured[:] = [100.0, 90.0]
    found = MatrixPeak(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(MatrixPeak, "clock", 60.0)
    assert found.share(215.0) is None and found.flops == 100.0
    assert found.share(215.0) is None  # not measured again at each step
    live = Live(Console(file=io.StringIO()), 10, 2.0, found)
    line = Line(3, 4.0, 0.1, 1.0, 100.0, 1.0)
    assert live.words(line) == "loss 4.000  100 tokens/s"
    assert live.words(Line(3, 4.0, 0.1, 1.0, 25.0, 1.0)) == "loss 4.000  25 tokens/s  50% of matmul peak"


def test_the_peak_of_this_machine_draws_no_random_numbers():
    state = torch.get_rng_state()
    found = MatrixPeak(torch.device("cpu"), torch.float32)
    assert found.flops > 1e6 and found.share(found.flops / 2) == 0.5
    assert torch.equal(torch.get_rng_state(), state)


# ---- the screen ----


def test_a_terminal_keeps_the_line_of_an_evaluation():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Live(console, 4, 1.0, None) as live:
        for step in range(4):
            live.step(Line(step, 4.0, 0.1, 1.0, 100.0, 1.0, eval_loss=3.5 if step == 1 else None))
    assert console.file.getvalue().count("step 2/4  loss 4.000  held-out loss 3.500  100 tokens/s") == 1
