"""docs/compatibility.md says what the code knows of versions, and each integration has its row and a page with the same parts."""

import re
from pathlib import Path

import pytest

from onepass.gradients import fsdp
from onepass.integrations import tested
from onepass.kernels import language

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
PACKAGES = PAGE.partition("\n## Packages")[2]
ROWS = {
    row[0].strip(): [cell.strip() for cell in row[1:]] for row in re.findall(r"^\|(.+?)\|(.+?)\|(.*?)\|(.*?)\|$", PACKAGES, re.M)
}
INTEGRATIONS = {
    path.stem for path in (ROOT / "src" / "onepass" / "integrations").iterdir() if path.suffix == ".py" or path.is_dir()
} - {
    "__init__", "__pycache__", "attention_backends", "compiled_mlp", "delta_net", "norm_backends", "seams", "tested",
    "torchtitan_attention", "torchtitan_configs", "torchtitan_experts", "torchtitan_loss",
    "vllm",  # tried with a stub, and with no version
}  # fmt: skip
PAGES = {"huggingface": "transformers", "megatron": "megatron-core", "torchtitan": "torchtitan", "trl": "trl", "verl": "verl"}


@pytest.mark.parametrize("package", tested.TESTED)
def test_the_page_has_the_versions_of_the_code(package):
    assert ROWS[package][0] == ", ".join(tested.TESTED[package])


def test_every_row_is_of_a_package_that_the_code_knows():
    assert ROWS.keys() - {"package", "---"} == tested.TESTED.keys()


def test_every_integration_has_a_row():
    assert INTEGRATIONS
    known = " ".join(tested.TESTED)
    assert not [name for name in INTEGRATIONS if PAGES.get(name, name) not in known]


@pytest.mark.parametrize("name", sorted(INTEGRATIONS & PAGES.keys()))
def test_a_page_says_what_is_replaced_and_what_not_and_how_to_undo(name):
    page = (ROOT / "docs" / f"{name}.md").read_text()
    headings = re.findall(r"^## (.*)$", page, re.M)
    assert "pip install" in page
    assert {"What is replaced", "Undo and errors", "Versions"} <= set(headings)
    assert {"What is not", "What is refused", "What stays as it was"} & set(headings)
    assert {"Speed", "Figures"} & set(headings)
    versions = page.partition("## Versions")[2].partition("\n## ")[0]
    assert all(version in versions for version in tested.TESTED[PAGES[name]])


def test_fsdp2_and_triton():
    (first, last), supported = fsdp._TESTED, [version.rstrip(".") for version in language.SUPPORTED]
    assert f"PyTorch {'.'.join(map(str, first))} to {'.'.join(map(str, last))}" in PAGE
    assert f"Triton of {', '.join(supported[:-1])} or {supported[-1]}" in PAGE
