"""What `onepass bench` prints: one legend, ratios that all are speeds, and who waits for the CPU."""

import re

import pytest

from onepass.bench.model import BenchCase, CaseResult, Measured
from onepass.bench.report import bound_by_calls, kept_in_all, less_memory
from onepass.cli import main


def result_of(**fields):
    ours = Measured("onepass", ours=True, **{"forward_ms": 0.02, "backward_ms": 0.05, "peak_mib": 1.0, **fields})
    case = BenchCase("norm", "rms", (8, 8), None, 1, 1)
    return CaseResult(case, Measured("copy"), [ours, Measured("eager", forward_ms=9.0, cpu_forward_us=99.0, cpu_both_us=99.0)])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cpu_forward_us": 30.0, "cpu_both_us": 70.0}, "forward, 30 us for the GPU's 20"),
        ({"cpu_forward_us": 10.0, "cpu_both_us": 70.0}, "backward, 60 us for the GPU's 50"),
        ({"cpu_forward_us": 30.0, "cpu_both_us": 90.0}, "forward, 30 us for the GPU's 20; backward, 60 us for the GPU's 50"),
        ({"cpu_forward_us": 20.0, "cpu_both_us": 70.0}, None),
        ({"status": "wrong", "cpu_forward_us": 30.0, "cpu_both_us": 90.0}, None),
        ({}, None),
    ],
)
def test_a_case_that_waits_for_the_cpu(fields, said):
    assert bound_by_calls(result_of(**fields)) == (said and f"bound by the CPU's calls: {said}")


def test_memory_is_set_beside_the_peer_that_takes_least():
    result = result_of(kept_mib=0.5, peak_mib=8.0)
    assert less_memory(result) is None  # the peer's is unknown
    result.rows += [
        Measured("separate", floor=True, kept_mib=0.1, peak_mib=0.1),  # the products alone
        Measured("Liger", kept_mib=3.0, peak_mib=7.0),
        Measured("slim", status="wrong", kept_mib=0.0, peak_mib=0.0),
        Measured("eager", kept_mib=4.0, peak_mib=6.0),
    ]
    assert less_memory(result) == "memory: 512 KiB kept for backward, Liger 3.0 MiB; 8.0 MiB at most, eager 6.0 MiB"
    assert kept_in_all([result]) is None  # its own line says it
    said = "kept for backward, 2 cases together: 1.0 MiB by onepass, 6.0 MiB by the peers that keep least"
    assert kept_in_all([result, result_of(), result]) == said


@pytest.mark.usefixtures("one_round")
def test_ratios_are_speeds(capsys):
    assert main(["bench", "norm_linear", "--quick", "--case", "rms", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "bound by the CPU" not in said and "memory: " in said
    assert said.count("more is better") == 1 and said.count("F.rms_norm(x)") == 1
    tables = re.split(r"\n\n", said)
    table = next(each for each in tables if "CPU time of a call" in each)
    mine = float(re.search(r"^> onepass +([\d.]+)", table, re.M).group(1))
    theirs, ratio = map(float, re.search(r"^  eager +([\d.]+) .* ([\d.]+) / [\d.]+ x", table, re.M).groups())
    assert ratio == pytest.approx(theirs / mine, abs=0.02)
    case = next(each for each in tables if "f+b over separate" in each)
    ours, separate, eager = (
        [float(x) for x in re.search(rf"^{name} +([\d.]+) +([\d.]+) +([\d.]+) x", case, re.M).groups()]
        for name in ("> onepass", "  separate", "  eager")
    )
    assert separate[2] == 1.0
    for row in (ours, eager):
        assert row[2] == pytest.approx(sum(separate[:2]) / sum(row[:2]), rel=0.02, abs=0.006)
