"""Every Python block of the README and of the docs runs, as a reader would run them: one page, top to bottom, one file."""

import ast
import fnmatch
import importlib
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch

from onepass import cli
from onepass.ops.activation import activations
from onepass.runtime import op as op_records

ROOT = Path(__file__).parents[1]
CI = runpy.run_path(str(ROOT / ".ci" / "pages"))  # which runs each page in the environment that it asks for
NEEDS = {  # what a page begins with installing
    "docs/extending.md": "triton", "docs/lora.md": "peft", "docs/megatron.md": "megatron.core",
    "docs/torchtitan.md": "torchtitan", "docs/trl.md": "trl", "docs/verl.md": "verl",
}  # fmt: skip
PUBLIC = (  # modules whose `__all__` the reference lists
    "onepass", "onepass.nn", "onepass.parallel", "onepass.gpt",
    "onepass.integrations.huggingface", "onepass.integrations.megatron",
)  # fmt: skip
MOST_WORDS = 3500  # of a page; notes and the changelog, which grow by additions, may have more
COMMANDS = runpy.run_path(str(ROOT / ".ci" / "commands"))
PAGES = CI["pages"]()
MARKDOWN = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.fixture
def _as_before():
    """What a page registers is forgotten again."""
    tables = [activations.ACTIVATIONS, *(op.others for op in op_records.OPS.values())]
    before = [dict(table) for table in tables]
    yield
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)
    if "accelerate" in sys.modules:  # a Trainer's state is one for the process
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT asks transformers by an old name
@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("page", PAGES, ids=CI["name_of"])
def test_python_runs(page, tmp_path, monkeypatch):
    if (needed := NEEDS.get(CI["name_of"](page))) is not None:
        warnings.simplefilter("default")  # the package's own
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "page.py"  # a file: Triton reads the source of its functions
    script.write_text(CI["script_of"](page))
    runpy.run_path(str(script))


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_in_the_reference(module):
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(r"^\.\. [\w:]+:: (\S+)", reference, re.MULTILINE))
    names = {f"{module}.{name}" for name in importlib.import_module(module).__all__} - set(PUBLIC)
    assert names <= listed, f"not in docs/api: {sorted(names - listed)}"


def test_pages_name_files_that_exist():
    links = [(page, link) for page in MARKDOWN for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert links
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]


def test_pages_name_sections_that_exist():
    links = [(page, *link) for page in MARKDOWN for link in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())]
    assert links
    missing = [(page.name, to, at) for page, to, at in links if at not in _sections(page.parent / to if to else page)]
    assert not missing


def _sections(page):
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_page_is_no_book():
    """Who looks for something finds it, with a screen or two to read."""
    words = {CI["name_of"](page): len(page.read_text().split()) for page in MARKDOWN}
    exempt = [page for page in words if page == "CHANGELOG.md" or page.startswith("docs/notes/")]
    assert not {page: count for page, count in words.items() if count > MOST_WORDS and page not in exempt}


def test_no_two_pages_have_one_title():
    """As the site's sidebar has them, too."""
    titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in MARKDOWN]
    first = (ROOT / "docs" / "README.md").read_text()
    for names in (titles, re.findall(r"^- \[([^]]+)\]", first, re.MULTILINE)):
        assert not [name for name in names if names.count(name) > 1]


def test_activations_and_options_are_named():
    page = (ROOT / "docs" / "ops" / "activations.md").read_text()
    built_in = sorted(activations._BUILT_IN)
    assert not [name for name in built_in if f"`{name}`" not in page]
    assert not [save for save in ("input", "fp8", "offload") if f'`"{save}"`' not in page]


def test_python_is_marked_as_python():
    assert CI["INSTALLS"].keys() <= NEEDS.keys()
    kinds = {(page.name, kind) for page in MARKDOWN for kind in re.findall(r"^```(\S+)$", page.read_text(), re.MULTILINE)}
    assert {kind for page, kind in kinds if page != "packing.md"} <= {"python", "sh", "yaml", "{eval-rst}"}


def test_every_shell_command_is_known_to_ci():
    """Those that CI doesn't run are left out by name, and all of onepass's have options that there are."""
    shown = set(COMMANDS["commands"]())
    run = {command for command in shown if COMMANDS["why_left_out"](command) is None}
    assert len(run) >= 12
    assert COMMANDS["SHORTER"].keys() <= run
    assert not [pattern for pattern in COMMANDS["LEFT_OUT"] if not fnmatch.filter(shown, pattern)]
    for command in shown:
        words = shlex.split(command)
        words = words[words.index("onepass") + 1 :] if "onepass" in words else []
        if words:
            cli._parser(words).parse_args(words)


def test_install_names_every_extra():
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras, page = re.findall(r"^(\w+) = \[", section, re.MULTILINE), (ROOT / "docs" / "install.md").read_text()
    assert "huggingface" in extras
    assert not [extra for extra in extras if f"| `{extra}` |" not in page]


def test_ci_runs_the_readme_command():
    ci, readme = (ROOT / ".ci" / "run").read_text(), (ROOT / "README.md").read_text()
    pattern = re.search(r"grep -m 1 '(.*)' README.md", ci)[1]
    found = [line for line in readme.splitlines() if re.search(pattern, line)]
    assert len(found) == 1
    assert found[0].startswith("python3 -m venv .venv && ")


def test_formulas_of_activations():
    z = torch.linspace(-4, 4, 101, dtype=torch.float64)
    u = (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)
    torch.testing.assert_close(activations.find_activation("gelu").formula(z), z * torch.sigmoid(2 * u))
    torch.testing.assert_close(activations.find_activation("quick_gelu").formula(z), z * torch.sigmoid(1.702 * z))


def test_troubleshooting_quotes_what_the_code_says():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| .*\|$", page, re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row) if len(text.strip("…. ")) > 8]
    assert len(quoted) > 50
    said = "\n".join(_texts_of_the_code())
    others = {"ModuleNotFoundError: No module named 'triton'"}  # Python's
    unknown = [text for text in quoted if not re.search(_pattern(text), said) and text not in others]
    assert not unknown


def _pattern(quoted):
    return ".*".join(re.escape(part) for part in quoted.strip("…").split("…"))


def _texts_of_the_code():
    """Each string of the package in a line, with … where a value is put in."""
    for path in (ROOT / "src" / "onepass").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "…" for part in parts]
            if all(isinstance(text, str) for text in texts) and isinstance(node, ast.JoinedStr | ast.Constant):
                yield "".join(texts).replace("\n", " ")
