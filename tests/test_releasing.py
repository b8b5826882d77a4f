"""What publishing needs agrees: one version, workflows and forms that parse, commands that exist, files in the archive."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

tomllib = pytest.importorskip("tomllib")  # Python 3.11's

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
RECIPE = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())


PUBLISH = ROOT / ".github" / "workflows" / "publish.yml"


def steps(workflow):
    """The steps of its jobs. A job that is another workflow has none."""
    return [step for job in yaml.safe_load(workflow.read_text())["jobs"].values() for step in job.get("steps", [])]


def test_the_version_is_that_of_pyproject():
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert next(version for version, _ in headings if version != "Unreleased") == PROJECT["version"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d|YYYY-MM-DD", date) for version, date in headings if version != "Unreleased")
    assert str(CITATION["version"]) == PROJECT["version"] == RECIPE["context"]["version"]
    recipes = "".join(path.read_text() for path in (ROOT / "examples" / "scale").glob("*.yaml"))
    assert set(re.findall(r"/onepass:(\S+)", recipes)) == {PROJECT["version"].rpartition(".")[0]}


def test_the_citation_has_what_its_format_demands():
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()
    assert CITATION["cff-version"] == "1.2.0"
    assert (CITATION["type"], CITATION["license"]) == ("software", PROJECT["license"])
    assert all("name" in author or "family-names" in author for author in CITATION["authors"])


def test_the_recipe_needs_what_pyproject_needs():
    conda = {requirement.replace(" ", "") for requirement in RECIPE["requirements"]["run"]} - {"__linux"}
    pip = {requirement.replace("torch>", "pytorch>") for requirement in PROJECT["dependencies"]}
    assert conda == pip | {f"python{PROJECT['requires-python']}"}
    assert RECIPE["build"]["python"]["entry_points"] == [f"{name} = {at}" for name, at in PROJECT["scripts"].items()]
    assert (RECIPE["package"]["name"], RECIPE["about"]["license"]) == (PROJECT["name"], PROJECT["license"])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_no_more(workflow):
    """What publishes has a token of the index alone, and runs nothing of the tree's."""
    read = yaml.safe_load(workflow.read_text())
    assert read["permissions"] in ({}, {"contents": "read"})
    for job in read["jobs"].values():
        assert job.get("permissions", {}) in ({}, {"contents": "read"}, {"id-token": "write"})
        if "id-token" in job.get("permissions", {}):
            assert job["environment"] and job["needs"] and not [step for step in job["steps"] if "run" in step]
        for step in job.get("steps", []):
            assert step.get("uses", "").startswith("actions/checkout@") <= ("persist-credentials" in step.get("with", {}))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_exists(workflow):
    assert True in yaml.safe_load(workflow.read_text())  # YAML 1.1 reads the key `on` so
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])
            continue
        command = step["run"].split()[0]
        assert command in ("grep", "ls") or (command.startswith(".ci/") and os.access(ROOT / command, os.X_OK)), command


def test_the_publishing_workflow_wants_the_tag_to_be_the_version(tmp_path):
    """As the shell runs it: with the right tag and a date, with a placeholder, and with another tag."""
    (dated,) = [step["run"] for step in steps(PUBLISH) if "changelog" in step.get("name", "")]
    (named,) = [step["run"] for step in steps(PUBLISH) if "tag" in step.get("name", "")]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "onepass-1.2.0.tar.gz").touch()

    def passes(command, tag, date="2027-01-02"):
        (tmp_path / "CHANGELOG.md").write_text(f"## [Unreleased]\n\n## [1.2.0] - {date}\n")
        env = os.environ | {"GITHUB_REF_NAME": tag}
        return subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True).returncode == 0

    assert passes(dated, "v1.2.0") and passes(named, "v1.2.0")
    assert not passes(dated, "v1.2.0", "YYYY-MM-DD") and not passes(dated, "v1.3.0") and not passes(named, "v1.3.0")


def test_a_tag_is_published_after_every_check():
    jobs = yaml.safe_load(PUBLISH.read_text())["jobs"]
    assert jobs["publish"]["needs"] == "build" and jobs["build"]["needs"] == "checks"
    called = ROOT / jobs["checks"]["uses"]
    assert "workflow_call" in yaml.safe_load(called.read_text())[True]
    assert ".ci/run" in [step.get("run") for step in steps(called)]
    commands = [step.get("run") for step in steps(PUBLISH)]
    assert commands.index(".ci/readme") < commands.index(".ci/release dist")


def test_the_readme_of_a_release_has_links_that_an_index_can_follow(tmp_path):
    for name in (".ci/readme", "README.md", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for folder in ("docs", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "examples", "SECURITY.md"):
        (tmp_path / folder).symlink_to(ROOT / folder)

    def run():
        return subprocess.run([sys.executable, tmp_path / ".ci" / "readme"], capture_output=True, text=True)

    assert "[project.urls]" in run().stderr and (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()
    address = "https://host.example/onepass"
    with (tmp_path / "pyproject.toml").open("a") as project:
        project.write(f'\n[project.urls]\nRepository = "{address}/"\n')
    assert run().returncode == 0
    text, version = (tmp_path / "README.md").read_text(), PROJECT["version"]
    links = re.findall(r'\]\(([^)\s]+)\)|\b(?:href|src|srcset)="([^"]+)"', text)
    assert not [link for link in map("".join, links) if not link.startswith(("https://", "#"))]
    assert f'src="{address}/raw/v{version}/docs/images/steps-light.svg"' in text
    assert f"]({address}/blob/v{version}/docs/lora.md#what-it-brings)" in text
    assert re.sub(f"{address}/(blob|raw)/v{version}/", "", text) == (ROOT / "README.md").read_text()


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_the_doctor(form):
    read = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= read.keys()
    asked = {field["id"]: field for field in read["body"] if field["type"] != "markdown"}
    assert {field["type"] for field in asked.values()} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in asked.values())
    assert asked["doctor"]["validations"] == {"required": True}
    assert {"bug", "wrong_number", "slow_kernel"} == {path.stem for path in FORMS}


def test_the_archive_has_what_the_tree_has(tmp_path):
    """Of the real backend, on a tree of a file in each place."""
    pytest.importorskip("setuptools", "77")
    kept = [
        ".ci/run", ".github/workflows/ci.yml", ".github/PULL_REQUEST_TEMPLATE.md", "CHANGELOG.md", "CITATION.cff",
        "CONTRIBUTING.md", "LICENSE", "README.md", "RELEASING.md", "SECURITY.md", "constraints-cpu.txt", "docs/install.md",
        "recipe/recipe.yaml",
        "src/onepass/py.typed", "tests/conftest.py", "pyproject.toml", "MANIFEST.in",
    ]  # fmt: skip
    for name in [*kept, "src/onepass/__init__.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in (".venv/x.py", "runs/a.csv", "tests/__pycache__/x.pyc", "docs/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "dist" / f"onepass-{PROJECT['version']}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(kept) <= names
    assert not [name for name in names if name.startswith((".venv", "runs")) or name.endswith(".pyc")]
