"""The figures in the README and the docs are those of the stored results."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)


@pytest.fixture
def kept():
    """A result as it is kept, with a commit."""
    return json.loads((figures.RESULTS / "bias_activation.json").read_text()) | {"commit": "0123456789ab"}


@pytest.fixture(scope="module")
def every():
    return figures.all_figures()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*/*.json")), ids=lambda path: path.stem)
def test_a_result_has_a_commit(path):
    assert json.loads(path.read_text())["commit"]


@pytest.mark.parametrize("path", figures.PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_say_what_was_measured(path, every):
    page = path.read_text()
    assert figures.with_figures(page, every) == page, "python benchmarks/figures.py brings it up to date"


def test_each_figure_has_one_place(every):
    pages = "".join(path.read_text() for path in figures.PAGES)
    assert "of the time of the separate calls" in pages and not re.search(r"separate's|s's time", pages)
    for name, made in every.items():
        assert pages.count(f"<!-- {name} -->") == pages.count(f"<!-- /{name} -->") == 1
        assert made in pages
    assert "gelu 16384 x 16384" in pages
    assert "| 8192 x 4096 x 128256 |" in pages


def test_an_op_without_results_has_a_row_without_figures(kept, tmp_path):
    (tmp_path / "norm.json").write_text(json.dumps(kept))
    lines = figures.ops_table(tmp_path).splitlines()
    assert len(lines) == 2 + len(figures.OPS_ROWS)
    by_op = {name: next(line for line in lines if f"`{name}`" in line) for name in ("rms_norm", "softmax", "fuse")}
    assert by_op["rms_norm"].startswith("| [`layer_norm`, `rms_norm`](ops/norms.md) | ")
    assert "(figures/norms.md#norm) | **" in by_op["rms_norm"]
    assert by_op["softmax"].endswith(" |  |  |  |")
    assert by_op["fuse"].startswith("| [`fuse`](fusion.md) | ")


def test_an_op_that_no_row_names_is_no_figure(kept, tmp_path):
    (tmp_path / "new_op.json").write_text(json.dumps(kept))
    for made in (figures.ops_table, figures.tables):
        with pytest.raises(ValueError, match=r"OPS_ROWS of figures\.py has no row for new_op"):
            made(tmp_path)


def test_steps_of_any_order_have_a_table_of_their_own(tmp_path):
    ways = {"onepass": {"ms": 10.0, "peak_gib": 1.0, "tokens_per_s": 5.0, "of_peak": 0.5}}
    ways["plain"] = ways["onepass"] | {"ms": 12.0, "peak_gib": 2.0}
    results = {"commit": "0123", "gpu": "NVIDIA H200", "versions": {"torch": "2.11"}, "rows": {"1B": ways}}
    (tmp_path / "gpt_1B.json").write_text(json.dumps(results))
    assert "| 1B, 4 x 4096, H200 | onepass | 10.0 | 5 | **1.20 x** | 0.50 | 1.0 | **0.50** |" in figures.training_tables(tmp_path)
    (tmp_path / "gpt_free_1B.json").write_text(json.dumps(results | {"commit": "4567"}))
    made = figures.training_tables(tmp_path)
    assert made.index("commit 0123") < made.index("--no-deterministic") < made.index("commit 4567")
    assert made.count("| 1B, 4 x 4096, H200 | onepass |") == 2


def test_each_op_has_a_section_on_its_page_and_each_gpu_a_table(kept, tmp_path):
    gpus = [tmp_path / "h200", tmp_path / "h100"]
    for gpu in gpus:
        gpu.mkdir()
        for op in ("rope", "norm", "gated_norm"):
            (gpu / f"{op}.json").write_text(json.dumps(kept | {"commit": f"of an {gpu.name}"}))
    pages = figures.tables(*gpus[:1], gpus[1:])
    assert pages.keys() == {"attention", "norms"}
    made = figures.between("before <!-- norms --> old <!-- /norms --> after", "norms", pages["norms"])
    assert made.startswith("before ")
    assert made.endswith(" after")
    assert "old" not in made
    assert made.index("## norm\n") < made.index("of an h200.") < made.index("of an h100.") < made.index("## gated_norm\n")
    assert made.count(figures.CPU_TIME) == 4


def test_other_peers_or_none_make_a_table_too(kept):
    """Columns follow from who was timed."""
    kept["rows"] = [row for row in kept["rows"] if row["ours"] or row["contender"] == "copy"]
    for times in kept["cpu_time"]:
        times["contenders"] = {"onepass": times["contenders"]["onepass"], "Apex": times["contenders"]["eager"]}
    assert f"| {figures.CPU_TIME} | onepass | Apex | F.rms_norm(x) |" in figures.table("layer_norm", kept)


def test_graph_times_have_a_table_of_their_own(kept):
    small = next(row["case"] for row in kept["rows"])
    assert figures.GRAPH_TIME not in figures.table("norm", kept)
    for row in kept["rows"]:
        if row["case"] == small and row["contender"] in ("onepass", "eager"):
            row |= {"forward_graph_us": 4.04, "backward_graph_us": 11.26}
    made = figures.table("norm", kept)
    assert f"| {figures.GRAPH_TIME} | onepass | eager |" in made
    assert "| gelu 16384 x 16384 | 4.0 / 11.3 | 4.0 / 11.3 |  |" in made  # who couldn't be captured has an empty place


def set_against(kept, name):
    """The same result, as that of an op with a reference."""
    for case in {row["case"]: None for row in kept["rows"]}:
        rows = [row for row in kept["rows"] if row["case"] == case]
        whole = next(row["forward_ms"] + row["backward_ms"] for row in rows if row["contender"] == name)
        for row in rows:
            copy = row["contender"] == "copy"
            row |= {"reference": name, "both_of_reference": None if copy else (row["forward_ms"] + row["backward_ms"]) / whole}
            row |= {"kept_mib": None if copy else 128.3 if row["ours"] else 256.0}
    return kept


def test_an_op_of_matrix_products_is_set_against_its_reference(kept):
    made = figures.table("norm_linear", set_against(kept, "eager"))
    assert "| tokens x in x out | ms, forward / backward | both, over eager | best peer |" in made
    line = next(line for line in made.splitlines() if line.startswith("| gelu 16384 x 16384 |"))
    ours = next(row for row in kept["rows"] if row["ours"])
    assert f"**{ours['both_of_reference']:.3f}**" in line
    assert "| 128 / 256 |" in line
    assert "eager" not in line  # it's no peer of its own
    assert "of copy" not in made


def test_without_its_reference_it_is_no_figure(kept):
    rows = set_against(kept, "eager")["rows"]
    next(row for row in rows if row["ours"])["both_of_reference"] = None
    with pytest.raises(ValueError, match="what ours is set against is missing in gelu"):
        figures.table("norm_linear", kept)


def test_cases_keep_their_order(kept):
    made = figures.table("norm", kept)
    names = [f"| {row['variant']} {' x '.join(map(str, row['shape']))} |" for row in kept["rows"] if row["ours"]]
    assert sorted(names, key=made.index) == names


def test_without_a_commit_it_is_no_figure(kept):
    with pytest.raises(ValueError, match=r"rope\.json has no commit"):
        figures.table("rope", kept | {"commit": None})


def test_what_is_wrong_is_no_figure(kept):
    next(row for row in kept["rows"] if row["ours"])["status"] = "wrong"
    with pytest.raises(ValueError, match="ours is wrong, or raised, in gelu"):
        figures.table("rope", kept)


def test_an_empty_folder_is_no_figure(tmp_path):
    with pytest.raises(ValueError, match="holds no results"):
        figures.tables(tmp_path)


def test_the_loss_has_a_line_a_case_and_one_a_case_over_several(tmp_path):
    way = {"over_floor": 1.0149, "peak_mib": 1382.4}
    promised = "onepass, main_grad and grad_scale"
    ways = {"onepass": way, promised: way | {"over_floor": 1.2}, "Liger": {"error": "OutOfMemoryError"}}
    versions = {"torch": "2.11", "triton": "3.6", "peers": {"Liger": "0.8.5"}}
    rows = {"8 x 4 x 2": {"floors_ms": {"three": 12.34}, "ways": ways}}
    one = {"commit": "0123", "gpu": "NVIDIA H200", "versions": versions, "rows": rows}
    (tmp_path / "linear_cross_entropy.json").write_text(json.dumps(one))
    assert figures.loss_tables(tmp_path).splitlines()[-1] == "| 8 x 4 x 2 | 12.3 | **1.01 / 1.4** | **1.20 / 1.4** |  |  |  |  |"
    share = {"of_its_share": 0.984, "peak_mib": 1024}
    names = ("tensor parallel", "and sequence parallel", "tensor parallel, main_grad and grad_scale")
    two = one | {"rows": {"8 x 4 x 2": {"ranks": 2, "ways": dict.fromkeys(names, share)}}}
    (tmp_path / "linear_cross_entropy_2.json").write_text(json.dumps(two))
    made = figures.loss_tables(tmp_path)
    assert made.splitlines()[-1] == "| 8 x 4 x 2 | 2 | **0.98** / 1.0 | **0.98** / 1.0 | **0.98** / 1.0 |"
    assert "2 GPUs: torch 2.11, commit 0123." in made


def in_eight_bits(op, variant, times):
    """Rows as `onepass bench` writes them, of contenders' times, beside a copy's."""
    row = {"op": op, "case": f"{variant} 8x4x2", "variant": variant, "shape": [8, 4, 2], "status": "ok"}
    row |= {"reference": "onepass bf16", "both_of_reference": None, "forward_ms": 0.1, "backward_ms": 0.2, "peak_mib": None}
    rows = [row | {"contender": "copy", "ours": False}]
    for name, ms in times.items():
        whole = {"forward_ms": ms - 1.0, "backward_ms": 1.0, "both_of_reference": ms / times["onepass bf16"]}
        rows.append(row | whole | {"contender": name, "ours": name.startswith("onepass"), "peak_mib": 10 * ms})
    return rows


PRODUCT = {"onepass": 3.0, "onepass row": 3.5, "onepass bf16": 4.0, "torchao tensorwise": 6.0}


def passes(shares):
    row = {"op": "fp8_passes", "case": "norm 8x4", "variant": "norm", "shape": [8, 4], "status": "ok", "reference": None}
    return [row | {"contender": name, "ours": name == "onepass", "forward_of_copy": share} for name, share in shares.items()]


def test_eight_bits_are_left_out_of_other_tables(kept, tmp_path):
    path = tmp_path / "linear.json"
    path.write_text(json.dumps(set_against(kept, "eager")))
    expected = figures.tables(tmp_path), figures.ops_table(tmp_path)
    kept["rows"] = in_eight_bits("linear", "plain fp8", PRODUCT) + kept["rows"]
    kept["cpu_time"].insert(0, kept["cpu_time"][0] | {"op": "linear", "variant": "plain fp8"})
    path.write_text(json.dumps(kept))
    (tmp_path / "fp8_passes.json").write_text(json.dumps(kept | {"rows": passes({"copy": 1.0, "onepass": 0.9}), "cpu_time": []}))
    assert (figures.tables(tmp_path), figures.ops_table(tmp_path)) == expected


def test_steps_in_eight_bits_are_left_out_of_other_tables(tmp_path):
    way = {"ms": 12.0, "peak_gib": 2.0, "tokens_per_s": 5.0, "of_peak": 0.5}
    ways = {"onepass": way, "plain": way}
    results = {"commit": "0123", "gpu": "NVIDIA H200", "versions": {"torch": "2.11"}, "deterministic": True, "rows": {"1B": ways}}
    path = tmp_path / "gpt_1B.json"
    path.write_text(json.dumps(results))
    expected = figures.training_tables(tmp_path)
    ways |= {"onepass, fp8": way | {"ms": 9.0}, "plain, torchao tensorwise": way | {"ms": 10.0}}
    path.write_text(json.dumps(results))
    del ways["plain"]
    (tmp_path / "gpt_8B_four_layers.json").write_text(json.dumps(results | {"commit": "4567"}))
    assert figures.training_tables(tmp_path) == expected
    row = {"op": "huggingface", "case": "a", "shape": [2, 8], "status": "ok", "ms": 12.0, "peak_gib": 2.0}
    rows = [row | {"contender": name, "loss_apart": 0.0, "error_of_eager": 1.0} for name in ("eager", "onepass", "onepass fp8")]
    versions = {"torch": "2.11", "transformers": "5.0", "peers": {"Liger": "0.8.5"}}
    path.write_text(json.dumps({"commit": "0123", "device": "H200", "versions": versions, "rows": rows}))
    made = figures.huggingface_table(path)
    assert "| a | onepass | 12.0 |" in made
    assert "fp8" not in made


def test_eight_bits_have_a_table_for_each_gpu(kept, tmp_path):
    scripts = tmp_path / "h200" / "scripts"
    for folder in (scripts, tmp_path / "h100"):
        folder.mkdir(parents=True)
    assert figures.fp8_tables(tmp_path) == "Not measured yet."
    kept |= {"cpu_time": [], "rows": kept["rows"] + in_eight_bits("linear", "plain fp8", PRODUCT)}
    kept["versions"] |= {"torch": "2.11", "triton": "3.6", "peers": {"torchao": "0.18", "Apex": "0.1"}}
    (tmp_path / "h200" / "linear.json").write_text(json.dumps(kept))
    rows = passes({"copy": 1.0, "onepass": 0.94, "eager": 0.3, "torch.compile": 0.8})
    hardware = kept["hardware"] | {"name": "NVIDIA H100"}
    (tmp_path / "h100" / "fp8_passes.json").write_text(json.dumps(kept | {"hardware": hardware, "rows": rows}))
    ways = {"onepass": 10.0, "onepass, fp8": 8.0, "onepass, fp8 rowwise": 9.0, "plain, bf16 weights, torchao tensorwise": 16.0}
    found = {name: {"ms": ms, "peak_gib": 2.0} for name, ms in ways.items()} | {"onepass, fp8 tensorwise": {"error": "x"}}
    facts = {"commit": "4567", "versions": {"torch": "2.12", "triton": "3.6"}}
    steps = facts | {"gpu": "NVIDIA H200", "deterministic": False, "rows": {"8B_four_layers": found}}
    (scripts / "gpt_fp8_8B.json").write_text(json.dumps(steps))
    row = {"op": "huggingface", "case": "llama", "status": "ok", "peak_gib": 2.0}
    models = {"Liger": 12.0, "onepass": 10.0, "onepass fp8": 9.0}
    rows = [row | {"contender": name, "ms": ms} for name, ms in models.items()]
    rows.append(row | {"contender": "eager", "status": "skipped"})
    (scripts / "huggingface.json").write_text(json.dumps(facts | {"device": "NVIDIA H200", "rows": rows}))
    assert figures.fp8_tables(tmp_path).splitlines() == [
        "One NVIDIA H100, torch 2.11, triton 3.6, torchao 0.18; commit 0123456789ab.",
        "",
        "| rows x columns of y | forward | best peer | copy |",
        "|---|---|---|---|",
        "| norm 8 x 4 | **.94** | .80 torch.compile | 1.00 |",
        "",
        "One NVIDIA H200, torch 2.12, 2.11, triton 3.6, torchao 0.18; commit 4567, 0123456789ab.",
        "",
        "| | ms, forward and backward | over onepass bf16 | over torchao tensorwise | over Liger | memory, over onepass bf16 |",
        "|---|---|---|---|---|---|",
        "| step of 8B four layers, 1 x 8192, any order, delayed | 8.00 | **0.80** | **0.50** |  | 1.00 |",
        "| step of 8B four layers, 1 x 8192, any order, rowwise | 9.00 | **0.90** | **0.56** |  | 1.00 |",
        "| step of Hugging Face's llama | 9.00 | **0.90** |  | **0.75** | 1.00 |",
        "| linear plain 8 x 4 x 2 | 3.00 | **0.75** | **0.50** |  | 0.75 |",
    ]


def test_eight_bits_that_are_wrong_are_no_figure(kept, tmp_path):
    rows = in_eight_bits("linear", "plain fp8", PRODUCT)
    next(row for row in rows if row["contender"] == "onepass row")["status"] = "wrong"
    (tmp_path / "linear.json").write_text(json.dumps(kept | {"rows": rows}))
    with pytest.raises(ValueError, match="ours is wrong, or raised, in plain fp8"):
        figures.fp8_table(tmp_path)


def test_two_gpus_are_as_fast_as_the_slower_one(tmp_path):
    alone = [{"ms": 10.0, "tokens_s": 100.0, "peak_gib": 3.0}, {"ms": 10.5, "tokens_s": 95.0, "peak_gib": 3.0}]
    together = [{"ms": 10.9, "tokens_s": 92.0, "peak_gib": 2.0}, {"ms": 11.0, "tokens_s": 90.9, "peak_gib": 2.1}]
    row = {"alone": alone, "together": {"keep": together, "plain": together}, "scaling": {"keep": 0.932}}
    found = {
        "ranks": 2,
        "gpu": "GPU",
        "versions": {"torch": "2"},
        "commit": "c",
        "sizes": {"8b": [32, 4, 4096]},
        "rows": {"8b": row},
    }
    path = tmp_path / "two_gpus.json"
    path.write_text(json.dumps(found))
    made = figures.two_gpus_table(path).splitlines()
    assert made[0] == "2 GPU, torch 2, by `benchmarks/two_gpus.py`; commit c."
    assert made[-2:] == [
        "| 8b | 32, 4 x 4096 | keep | 10.0, 10.5 | 11.0 | 182 | 93.2% | 2.1 |",
        "| 8b | 32, 4 x 4096 | plain | 10.0, 10.5 | 11.0 | 182 |  | 2.1 |",
    ]
