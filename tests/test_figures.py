"""The README's figures are those of the results that are kept."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)


def test_the_readme_says_what_was_measured():
    readme = (ROOT / "README.md").read_text()
    assert "gelu 16384 x 16384" in readme
    assert figures.with_figures(readme) == readme, "python benchmarks/figures.py brings the README up to date"
