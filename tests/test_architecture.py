"""The house, held: imports point down only, every op has its test, case file and note, and importing onepass does little."""

import ast
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "onepass"

# Who may import whom: a part may use those named here, and itself only where it is named. onepass/__init__.py is "".
_BELOW_GPT = {"nn", "ops", "parallel", "kernels", "runtime"}
_EVERYTHING = {*_BELOW_GPT, "gpt", "train", "fusion", "profiling", "integrations", "bench", "testing", "doctor"}
ALLOWED = {
    "": {"nn", "integrations", "ops", "kernels", "runtime", "parallel", "fusion", "profiling"},
    "runtime": {"runtime"},
    "kernels": {"kernels", "runtime"},
    "parallel": {"parallel", "runtime", "kernels.adamw", "kernels.adamw_formula"},
    "ops": {"kernels", "runtime", "parallel.collectives", "parallel.deferred", "parallel.product", "parallel.vocabulary"},
    "nn": {"nn", "ops", "kernels", "runtime", "parallel"},
    "gpt": {"gpt", *_BELOW_GPT},
    "fusion": {"fusion", *_BELOW_GPT},
    "profiling": {"profiling", *_BELOW_GPT},
    "integrations": {"integrations", *_BELOW_GPT},
    "train": {"train", "gpt", "fusion", "profiling", *_BELOW_GPT},
    "bench": _EVERYTHING,
    "testing": _EVERYTHING,
    "doctor": _EVERYTHING,
    "cli": _EVERYTHING,
    "__main__": {"cli"},
}
FILES = sorted(PACKAGE.rglob("*.py"))
OPS = sorted(path.stem for path in (PACKAGE / "ops").iterdir() if path.stem != "__init__" and path.suffix == ".py")
OPS += sorted(path.name for path in (PACKAGE / "ops").iterdir() if (path / "__init__.py").exists())


def _functions(room):
    """The public functions of a room: norm holds two."""
    files = [PACKAGE / "ops" / f"{room}.py", *(PACKAGE / "ops" / room).glob("*.py")]
    sources = [path.read_text() for path in files if path.exists()]
    return [name for source in sources for name in re.findall(r"^register_op\((\w+),", source, re.MULTILINE)]


def _name(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _is_module(name):
    path = PACKAGE.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def _imported(path):
    """The modules of onepass that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "onepass")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module.split(".")[0] == "onepass":
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    yield module if _is_module(module) else node.module


def _parts(module):
    """onepass.parallel.collectives: both "parallel" and "parallel.collectives"; onepass itself: ""."""
    names = module.split(".")[1:]
    return {".".join(names[:1]), ".".join(names[:2])}


def _violations(path):
    allowed = ALLOWED[_name(path).partition(".")[2].split(".")[0]] | _room(path)
    return [module for module in _imported(path) if not _parts(module) & allowed]


def _room(path):
    """An op that has grown into a folder imports from it."""
    names = path.relative_to(PACKAGE).parts
    return {f"ops.{names[1]}"} if names[0] == "ops" and len(names) > 2 else set()


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_point_down(path):
    assert not _violations(path)


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("runtime/new.py", "from onepass.ops import bias_activation"),
        ("kernels/new.py", "import onepass.ops.bias_activation"),
        ("ops/new.py", "from onepass.ops.bias_activation import bias_activation"),
        ("ops/new.py", "def f():\n    from onepass import testing"),
        ("ops/new.py", "import onepass"),
        ("nn/new.py", "from onepass.bench import command"),
    ],
)
def test_a_wrong_import_would_be_seen(place, line, tmp_path, monkeypatch):
    path = tmp_path / "onepass" / place
    path.parent.mkdir(parents=True)
    path.write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "onepass")
    assert _violations(path)


def test_every_part_has_its_place():
    parts = {_name(path).partition(".")[2].split(".")[0] for path in FILES}
    assert parts <= set(ALLOWED)


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_its_five_places(op):
    assert list((ROOT / "tests" / "ops").glob(f"test_{op}*.py"))
    assert (PACKAGE / "bench" / f"{op}.py").exists()
    notes = [note.read_text() for note in (ROOT / "docs" / "notes").glob("[0-9][0-9][0-9][0-9]-*.md")]
    assert any(op in note for note in notes)
    assert _functions(op)
    for name in _functions(op):
        assert re.search(rf'"{name}"', (PACKAGE / "__init__.py").read_text())


@pytest.mark.parametrize("op", OPS)
def test_the_sections_of_a_room_are_in_order(op):
    path = PACKAGE / "ops" / f"{op}.py"
    if not path.exists():
        pytest.skip("a folder")
    source = path.read_text()
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree)
    assert docstring
    assert docstring.startswith(op)
    lines = {node.name: node.lineno for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    decorated = [
        (node.lineno, ast.unparse(decorator))
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    ]
    kernels = [line for line, decorator in decorated if decorator == "kernel"]
    autograd = [
        node.lineno
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases)
    ]
    registered = [number for number, line in enumerate(source.splitlines(), 1) if re.match(r"_\w+ = registered\(", line)]
    sections = [
        [lines[f"{name}_reference"] for name in _functions(op)],
        kernels,
        registered,
        autograd,
        [lines["unsupported"]],
        [lines[name] for name in _functions(op)],
    ]
    found = [section for section in sections if section]
    assert all(max(above) < min(below) for above, below in pairwise(found)), sections
    public = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}  # the last of overloaded ones
    assert all(ast.get_docstring(public[name]) for name in _functions(op))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 500


def test_the_version_is_in_one_place():
    versions = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(versions) == 1
    assert not [path for path in FILES if f'"{versions[0]}"' in path.read_text()]


def test_no_package_has_the_name_of_a_public_function():
    import onepass

    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert not packages & {name for name in onepass.__all__ if callable(getattr(onepass, name))}


_IMPORT = """
import json, sys, torch
before = set(sys.modules), dict(vars(torch)), dict(vars(torch.nn.functional)), dict(vars(torch.Tensor))
asked = []
def watch(module, name):
    was = getattr(module, name)
    setattr(module, name, lambda *args: asked.append(name) or was(*args))
for name in ("is_available", "device_count", "get_device_capability", "get_device_properties", "init", "_lazy_init"):
    watch(torch.cuda, name)
watch(torch.backends.cudnn, "version")
import onepass
after = dict(vars(torch)), dict(vars(torch.nn.functional)), dict(vars(torch.Tensor))
print(json.dumps({
    "loaded": sorted({name.split(".")[0] for name in set(sys.modules) - before[0]}),
    "ours": sorted(name for name in sys.modules if name.split(".")[0] == "onepass"),
    "patched": [name for was, now in zip(before[1:], after) for name in was if now.get(name) is not was[name]],
    "context": torch.cuda.is_initialized(),
    "asked": asked,
}))
"""


@pytest.fixture(scope="module")
def imported():
    """What a bare `import onepass` does, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", _IMPORT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_leaves_gpus_alone(imported):
    """Not even asked for: after that no fork may use one, as a loader's workers."""
    assert imported["context"] is False and imported["asked"] == []


def test_importing_patches_nothing(imported):
    assert imported["patched"] == []


def test_importing_loads_nobody_heavy(imported):
    heavy = {"transformers", "megatron", "transformer_engine", "apex", "liger_kernel", "quack", "matplotlib", "rich", "pytest"}
    assert not heavy & set(imported["loaded"])


def test_importing_loads_no_tools(imported):
    tools = {"bench", "testing", "doctor", "cli"}
    assert not [name for name in imported["ours"] if tools & set(name.split(".")[1:2])]
