"""The README's first screen: rows are of results beside which eager or a peer was measured, and pictures are up to date."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import first_screen  # noqa: E402
import fusion_tables  # noqa: E402

sys.path.pop(0)
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def rows():
    return first_screen.rows_of([RESULTS / "h200", RESULTS / "h100"])


def model_file(folder, name, device, rows):
    (folder / "scripts").mkdir(parents=True, exist_ok=True)
    found = [{"case": "a", "status": "ok", "contender": name, "ms": ms, "peak_gib": gib} for name, ms, gib in rows]
    (folder / "scripts" / name).write_text(json.dumps({"device": device, "rows": found}))


def test_gains_are_of_one_run_and_the_peer_is_the_fastest_of_any(tmp_path):
    h100, h200 = tmp_path / "h100", tmp_path / "h200"
    model_file(h200, "lora_peers.json", "NVIDIA H200", [("onepass", 10.0, 1.0), ("Liger + Unsloth", 11.0, 1.2)])
    model_file(h100, "lora.json", "NVIDIA H100 80GB", [("eager", 30.0, 4.0), ("onepass", 12.0, 1.0), ("Liger", 24.0, 2.0)])
    row = first_screen.row_of("task", first_screen.runs_of_models([h200, h100], "a"))
    assert (row.gpu, row.eager.ms, row.ours.ms) == ("H100", 30.0, 12.0)
    assert (row.peer, row.over_peer) == ("Liger + Unsloth", 1.1)
    made = first_screen.table([row]).splitlines()[-1]
    assert made == "| task (H100) | 30.0 ms | 12.0 ms | **2.50 x** | 1.10 x Liger + Unsloth (H200) | 4.0 → 1.0 |"


def test_a_peer_of_a_run_on_the_same_gpu_needs_no_name_of_it(tmp_path):
    model_file(tmp_path, "lora.json", "NVIDIA H200", [("onepass", 10.0, 1.0), ("Liger + Unsloth", 11.0, 1.2)])
    model_file(tmp_path, "huggingface.json", "NVIDIA H200", [("eager", 30.0, 4.0), ("onepass", 12.0, 1.0)])
    row = first_screen.row_of("task", first_screen.runs_of_models([tmp_path], "a"))
    assert first_screen.table([row]).endswith("| **2.50 x** | 1.10 x Liger + Unsloth | 4.0 → 1.0 |")


def test_our_other_ways_are_no_peers_and_what_failed_is_no_row(tmp_path):
    model_file(tmp_path, "huggingface.json", "NVIDIA H200", [("onepass", 10.0, 1.0), ("onepass + torch.compile", 9.0, 1.0)])
    row = first_screen.row_of("task", first_screen.runs_of_models([tmp_path], "a"))
    assert row.peer is None
    assert first_screen.table([row]).splitlines()[-1] == "| task |  | 10.0 ms |  |  | 1.0 |"
    assert first_screen.row_of("task", first_screen.runs_of_models([tmp_path], "b")) is None
    assert first_screen.row_of("task", first_screen.runs_of_models([tmp_path], "a"), "onepass fp8") is None


def test_without_eager_memory_is_the_peer_s(tmp_path):
    model_file(tmp_path, "huggingface.json", "NVIDIA H200", [("onepass", 10.0, 2.0), ("Liger", 12.0, 3.0)])
    row = first_screen.row_of("task", first_screen.runs_of_models([tmp_path], "a"))
    assert first_screen.table([row]).splitlines()[-1] == "| task |  | 10.0 ms |  | 1.20 x Liger | 3.0 (peer) → 2.0 |"


def test_without_eager_all_of_a_row_is_of_the_best_peer_s_run(tmp_path):
    h100, h200 = tmp_path / "h100", tmp_path / "h200"
    model_file(h200, "lora.json", "NVIDIA H200", [("onepass", 8.0, 5.0), ("Liger", 12.0, 6.0), ("Unsloth", 16.0, 7.0)])
    model_file(h100, "lora_peers.json", "NVIDIA H100 80GB", [("onepass", 10.0, 2.0), ("Liger", 12.0, 3.0)])
    for folders in ([h200, h100], [h100, h200]):
        row = first_screen.row_of("task", first_screen.runs_of_models(folders, "a"))
        assert first_screen.table([row]).splitlines()[-1] == "| task (H100) |  | 10.0 ms |  | 1.20 x Liger | 3.0 (peer) → 2.0 |"


def test_the_command_of_one_card_is_that_which_was_measured():
    assert f"| `{first_screen.ONE_CARD}` | 71 GiB" in README
    assert f"{first_screen.ONE_CARD}\n```\n\ntakes 71.2 GiB" in (ROOT / "docs" / "train" / "memory.md").read_text()


def test_a_step_measured_without_its_fusions_brings_eager(tmp_path):
    ways = {"whole": {"ms": 10.0, "peak_gib": 1.0}, "eager": {"ms": 20.0, "peak_gib": 2.0}, "norm_fusion": {"error": "x"}}
    (tmp_path / "scripts").mkdir()
    found = {"gpu": "NVIDIA H200", "rows": {"1B": {"ways": ways}}}
    (tmp_path / "scripts" / "fusions_1B.json").write_text(json.dumps(found))
    row = first_screen.row_of("task", first_screen.runs_of_fusions([tmp_path], "1B", "onepass"))
    assert first_screen.table([row]).splitlines()[-1] == "| task | 20.0 ms | 10.0 ms | **2.00 x** |  | 2.0 → 1.0 |"


def test_a_small_model_under_trainer_is_set_beside_its_peers(tmp_path):
    ways = {"eager": 42.0, "liger": 38.0, "compile": 22.0, "onepass": 40.0, "onepass graph": 20.0, "graphed_step": 16.0}
    found = {"gpu": "NVIDIA H200", "rows": {name: {"ms": ms, "peak_gib": 2.0} for name, ms in ways.items()}}
    found["rows"]["onepass graph, main_grad"] = {"error": "x"}
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "graphed_trainer.json").write_text(json.dumps(found))
    row = first_screen.row_of("task", first_screen.runs_of_trainer([tmp_path]), first_screen.GRAPHED)
    assert (
        first_screen.table([row]).splitlines()[-1]
        == "| task | 42.0 ms | 20.0 ms | **2.10 x** | 1.10 x torch.compile | 2.0 → 2.0 |"
    )


def test_a_gain_is_shown_by_the_ninth_line():
    lines = README.splitlines()
    first = next(number for number, line in enumerate(lines, 1) if re.search(r"\d+ to \d+ ms|\*\*\d\.\d\d x\*\*", line))
    assert first <= 9


def test_nothing_is_hidden_in_the_readme():
    comments = re.findall(r"<!--(.*?)-->", README, re.DOTALL)
    assert comments
    assert not [comment for comment in comments if "\n" in comment]


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_pictures_show_what_was_measured(rows, scheme):
    path = first_screen.PICTURES[scheme]
    drawn = first_screen.picture(rows.values(), scheme)
    assert path.read_text() == drawn, "python benchmarks/figures.py brings it up to date"
    assert path.relative_to(ROOT).as_posix() in README


def test_bars_are_shares_of_eager_s_and_texts_lie_within(rows):
    svg = ET.fromstring(first_screen.picture(rows.values(), "light"))
    name = svg.tag.removesuffix("svg")
    width, height = (float(svg.get(side)) for side in ("width", "height"))
    bars = [bar for bar in svg.iter(f"{name}rect") if float(bar.get("height")) == first_screen.BAR]
    shown = first_screen.drawn(rows.values())
    assert len(bars) == 4 * len(shown)
    shares = [float(ours.get("width")) / float(whole.get("width")) for whole, ours in zip(bars[::2], bars[1::2], strict=True)]
    expected = [getattr(row.ours, name) / getattr(row.eager, name) for name in ("ms", "gib") for row in shown]
    assert shares == pytest.approx(expected, abs=1e-3)
    for part in (*svg.iter(f"{name}rect"), *svg.iter(f"{name}text")):
        assert 0 <= float(part.get("x")) <= width and 0 <= float(part.get("y")) <= height
    labels = [part for part in svg.iter(f"{name}text") if part.get("text-anchor") is None]
    longest = max(len(part.text) for part in labels)
    assert longest * 6.5 + 75 < first_screen.PANEL  # 13 px letters, beside figures of up to eleven
    assert svg.find(f"{name}title").text == first_screen.said(rows.values())


def fusion_results(folder, model, **ways):
    cost = {name: {"ms": ms, "peak_gib": gib} for name, (ms, gib) in ways.items()}
    row = {"sequences": 4, "length": 4096, "graphed": model == "124M", "ways": cost | {"bias_dropout_fusion": {"error": "x"}}}
    found = {"commit": "c", "gpu": "NVIDIA H200", "versions": {"torch": "2"}, "deterministic": False, "rows": {model: row}}
    (folder / f"fusions_{model}.json").write_text(json.dumps(found))


def test_each_fusion_has_a_row_a_model_and_its_op_a_sentence(tmp_path):
    fusion_results(tmp_path, "mixture", whole=(50.0, 5.0), norm_fusion=(55.0, 5.0))
    fusion_results(tmp_path, "1B", whole=(100.0, 10.0), norm_fusion=(101.6, 10.5), eager=(150.0, 20.0))
    lines = fusion_tables.table([tmp_path]).splitlines()
    assert lines[2] == "- 1B: 4 x 4096 tokens, sums in any order; NVIDIA H200, torch 2; commit c."
    assert lines[-5:] == [
        "| the step | 1B, ms | GiB | mixture, ms | GiB |",
        "|---|---|---|---|---|",
        "| with all of them | 100.0 | 10.0 | 50.0 | 5.0 |",
        "| without norms, with the residual's sums | 101.6 (**+1.6%**) | 10.5 (**+5%**) | 55.0 (**+10.0%**) | 5.0 (**+0%**) |",
        "| by PyTorch's operators, uncompiled | 150.0 (**+50.0%**) | 20.0 (**+100%**) |  |  |",
    ]
    said = fusion_tables.sentences([tmp_path], "page.md")
    assert said["brings-norms"].startswith("**In a training step** of Llama 1B, 4 x 4096 tokens: 100.0 ms and 10.0 GiB; without")
    assert "101.6 ms and 10.5 GiB ([each fusion](page.md#what-each-fusion-brings-to-a-step))" in said["brings-norms"]
    assert said["brings-loss"] == ""  # not measured


def test_what_no_gpu_measured_is_not_on_a_page(tmp_path):
    assert fusion_tables.table([tmp_path]) == ""
    assert set(fusion_tables.sentences([tmp_path], "page.md").values()) == {""}
