"""Every notebook runs, cell by cell, and shows what its cells end with. None keeps outputs: those would be another machine's."""

import ast
import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import torch

import onepass

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
NEEDS = {"huggingface": "transformers"}


def cells_of(path, kind):
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def run(path):
    """Run the code cells in one namespace, as Jupyter does. Return what each shows: the text of its last expression, or None."""
    names, shown = {"__name__": "__main__"}, []
    for number, source in enumerate(cells_of(path, "code"), 1):
        tree = ast.parse(source)
        last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
        try:
            exec(compile(tree, f"{path.name}, code cell {number}", "exec"), names)
            value = eval(compile(last, f"{path.name}, code cell {number}", "eval"), names) if last else None
        except Exception as error:
            raise RuntimeError(f"{path.name}, code cell {number} failed: {error!r}") from error
        shown.append(None if value is None else getattr(value, "_repr_html_", value.__repr__)())
    return shown


@pytest.fixture
def _as_a_reader():
    """As in a process of its own: without a GPU no kernels, which the tests' interpreter would run. Threads are set back."""
    threads = torch.get_num_threads()
    with contextlib.nullcontext() if torch.cuda.is_available() else onepass.use_backend("torch"):
        yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_as_a_reader")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        shown = [text for text in run(path) if text is not None]
    assert len(shown) >= 2 and all(shown)
    assert any(text.lstrip().startswith("<") for text in shown), "no cell shows a table"
    assert not any(" object at 0x" in text for text in shown)
    assert not list(tmp_path.iterdir())


def test_an_error_names_its_cell(tmp_path):
    sources = ["x = 1\nx", "# a title", "y = x + 1\ny / 0"]
    cells = [{"cell_type": "markdown" if "#" in source else "code", "source": [source]} for source in sources]
    path = tmp_path / "broken.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    with pytest.raises(RuntimeError, match=r"broken.ipynb, code cell 2 failed: ZeroDivisionError"):
        run(path)
    path.write_text(json.dumps({"cells": cells[:1]}))
    assert run(path) == ["1"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_without_outputs_and_its_links_hold(path):
    book = json.loads(path.read_text())
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    links = re.findall(r"\]\(([^)#:]+)", "\n".join(cells_of(path, "markdown")))
    assert links and not [link for link in links if not (path.parent / link).exists()]


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["huggingface", "profile_and_fuse", "your_model"]
    listed = (ROOT / "docs" / "README.md").read_text()
    assert all(f"../examples/{path.name}" in listed for path in NOTEBOOKS)
