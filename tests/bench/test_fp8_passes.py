"""The passes that write codes: all of their codes are checked, and their bytes are those of the note."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from bench import benching
from bench.benching import bench, made, only, wrong
from torch import Tensor

from onepass.bench import fp8_passes
from onepass.bench.model import Call, Result, outputs_of

every = pytest.mark.parametrize("variant", fp8_passes._WRITES)


given = partial(benching.given, fp8_passes, (40, 32))


@every
def test_every_contender_is_called_rightly(variant: str) -> None:
    case, inputs = given(variant)
    for contender in fp8_passes.BENCH.contenders(case):
        if not contender.compiles:
            assert not wrong(fp8_passes, case, inputs, contender.make(case), contender.ours), contender.name
    assert bool(inputs.tensors["amax"].any()) == (not variant.endswith((" row", " turned")))  # eager code notes nothing
    assert not inputs.tensors["saturated"].any()


@every
def test_each_output_is_checked_in_every_row(variant: str) -> None:
    case, inputs = given(variant)
    call = made(fp8_passes, case)
    for place, name in enumerate(fp8_passes._WRITES[variant]):
        assert wrong(fp8_passes, case, inputs, _without_a_row(call, place), ours=True) == [name]


def _without_a_row(call: Call, place: int) -> Call:
    def unwritten(*tensors: Tensor) -> Result:
        found = outputs_of(call(*tensors))
        found[place][17].view(torch.uint8).fill_(0x7F)  # NaN, as memory had it before
        return found

    return unwritten


def test_a_scale_that_is_another_row_s_is_wrong() -> None:
    case, inputs = given("norm by row")
    inputs.tensors["x"][7] *= 1000  # which a norm doesn't see
    call = made(fp8_passes, case)
    assert not wrong(fp8_passes, case, inputs, call, ours=True)
    assert wrong(fp8_passes, case, inputs, made(fp8_passes, given("norm")[0]), ours=True)


def test_the_bytes_of_a_number() -> None:
    moved = {variant: given(variant)[0].forward_bytes / (40 * 32) for variant in fp8_passes._WRITES}
    assert moved == {
        "cast": 3, "cast by row": 3, "cast turned": 3, "cast both": 4, "norm": 3, "norm by row": 3, "norm turned": 3,
        "swiglu": 5, "swiglu by row": 5, "swiglu backward": 11,
    }  # fmt: skip


@pytest.mark.usefixtures("one_round")
def test_a_run_has_no_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    only(monkeypatch, fp8_passes, given("cast both")[0])
    data, picture = tmp_path / "run.json", tmp_path / "run.png"
    assert bench("fp8_passes", "--json", str(data), "--plot", str(picture)) == 0
    found = json.loads(data.read_text())
    assert found["cpu_time"] == []  # ops launch passes, no user does
    rows = {row["contender"]: row for row in found["rows"]}
    assert set(rows) == {"copy", "onepass", "eager"}
    for row in rows.values():
        assert row["forward_ms"] > 0 and row["forward_of_copy"] > 0
        assert row["backward_ms"] is row["backward_of_copy"] is row["cpu_forward_us"] is None
    assert set(rows["onepass"]["errors"]) == {"y", "y turned"}
    said = capsys.readouterr().out
    assert "fp8_passes  cast both 40 x 32 bf16  0.0 MB forward\n" in said
    assert "backward us" not in said and "CPU us" not in said
    assert picture.exists()
