"""The README's figures are those of the results that are kept."""

import importlib.util
import json
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


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*/*.json")), ids=lambda path: path.stem)
def test_a_result_has_a_commit(path):
    assert json.loads(path.read_text())["commit"]


def test_the_readme_says_what_was_measured():
    readme = (ROOT / "README.md").read_text()
    assert "gelu 16384 x 16384" in readme
    assert figures.with_figures(readme) == readme, "python benchmarks/figures.py brings the README up to date"


def test_each_op_has_a_table_under_its_name(kept, tmp_path):
    for op in ("rope", "layer_norm"):
        (tmp_path / f"{op}.json").write_text(json.dumps(kept))
    made = figures.with_figures(f"before {figures.START} old {figures.END} after", tmp_path)
    assert made.startswith("before ")
    assert made.endswith(" after")
    assert "old" not in made
    assert made.index("### layer_norm") < made.index("### rope")
    assert made.count("commit 0123456789ab.") == made.count("| onepass | eager |") == 2


def test_other_peers_or_none_make_a_table_too(kept):
    """Columns follow from who was timed."""
    kept["rows"] = [row for row in kept["rows"] if row["ours"] or row["contender"] == "copy"]
    for times in kept["cpu_time"]:
        times["contenders"] = {"onepass": times["contenders"]["onepass"], "Apex": times["contenders"]["eager"]}
    assert "| | onepass | Apex | F.rms_norm(x) |" in figures.table("layer_norm", kept)


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
