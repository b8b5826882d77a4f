"""The house, held: imports point down only, every op has its test, case file and note, and importing onepass does little."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "onepass"

# Who may import whom: a part may use those named here, and itself only where it is named. onepass/__init__.py is "".
_BELOW_GPT = {"nn", "ops", "product", "gradients", "parallel", "distributed", "kernels", "runtime"}
_EVERYTHING = {*_BELOW_GPT, "gpt", "train", "fusion", "profiling", "integrations", "bench", "testing", "doctor"}
ALLOWED = {
    "": {*_BELOW_GPT, "gpt", "integrations", "fusion", "profiling"},
    "runtime": {"runtime"},
    "kernels": {"kernels", "runtime"},
    "distributed": {"distributed", "kernels", "runtime"},
    "gradients": {"gradients", "distributed", "kernels", "runtime"},
    "parallel": {"gradients"},  # its public names
    "product": {"product", "gradients", "distributed", "kernels", "runtime"},
    "ops": {"product", "gradients", "distributed", "kernels", "runtime"},
    "nn": _BELOW_GPT,
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
OPS = {  # the files that define public ops, and which
    path: found
    for path in sorted((PACKAGE / "ops").rglob("*.py"))
    if (found := re.findall(r"^define_op\(\s*(\w+),", path.read_text(), re.MULTILINE))
}


def _op_name(path):
    return path.parent.name if path.stem == "__init__" else path.stem


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


MADE_OF = {"experts": ("activation", "linear")}  # ops that are others', one after another


def _parts(module):
    """onepass.ops.norm.norm: both "ops" and "ops.norm"; onepass itself: ""."""
    names = module.split(".")[1:]
    return {".".join(names[:1]), ".".join(names[:2])}


def _violations(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    family = {f"ops.{name}" for name in (parts[1], *MADE_OF.get(parts[1], ()))} if parts[0] == "ops" else set()
    allowed = ALLOWED["" if parts == ("__init__",) else parts[0]] | family
    return [module for module in _imported(path) if not _parts(module) & allowed]


def test_imports_point_down():
    assert not {_name(path): found for path in FILES if (found := _violations(path))}


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("runtime/new.py", "from onepass.ops import bias_activation"),
        ("kernels/new.py", "import onepass.ops.activation.bias_activation"),
        ("ops/norm/new.py", "from onepass.ops.activation.bias_activation import bias_activation"),
        ("ops/norm/new.py", "def f():\n    from onepass import testing"),
        ("ops/norm/new.py", "import onepass"),
        ("nn/new.py", "from onepass.bench import command"),
    ],
)
def test_a_wrong_import_would_be_seen(place, line, tmp_path, monkeypatch):
    path = tmp_path / "onepass" / place
    path.parent.mkdir(parents=True)
    path.write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "onepass")
    assert _violations(path)


def _circle(files):
    """Return the names of modules that import each other in a circle, wherever in the files they do; or nothing."""
    try:
        TopologicalSorter({_name(path): set(_imported(path)) - {_name(path)} for path in files}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_imports_go_round_in_circles():
    assert not _circle(FILES)


@pytest.mark.parametrize(
    "line",
    [
        "from onepass.fusion.a import f",
        "def g():\n    from onepass.fusion import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from onepass.fusion.a import f",
    ],
)
def test_a_circle_would_be_seen(line, tmp_path, monkeypatch):
    folder = tmp_path / "onepass" / "fusion"
    folder.mkdir(parents=True)
    lines = {"a": "from onepass.fusion.b import g", "b": "import onepass.fusion.c", "c": line}
    for name, text in lines.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "onepass")
    assert set(_circle(sorted(folder.glob("*.py")))) == {f"onepass.fusion.{name}" for name in lines}


def _closure(module):
    """Return the modules that an import of this one may load, whenever it does."""
    files = {_name(path): path for path in FILES}
    loaded, waiting = {module}, [module]
    while waiting:
        new = set(_imported(files[waiting.pop()])) - loaded
        loaded |= new
        waiting += new
    return loaded


@pytest.mark.parametrize(("module", "most"), [("ops.norm.norm", 31), ("ops.linear.linear", 28)])
def test_an_op_is_read_from_few_files(module, most):
    assert len(_closure(f"onepass.{module}")) <= most


def test_a_norm_reads_no_product():
    assert not [name for name in _closure("onepass.ops.norm.norm") if name.startswith(("onepass.product", "onepass.distributed"))]


def test_every_part_has_its_place():
    parts = {_name(path).partition(".")[2].split(".")[0] for path in FILES}
    assert parts <= set(ALLOWED)


@pytest.mark.parametrize("path", OPS, ids=_op_name)
def test_an_op_has_its_five_places(path):
    op = _op_name(path)
    assert list((ROOT / "tests" / "ops").glob(f"test_{op}*.py"))
    assert (PACKAGE / "bench" / f"{op}.py").exists()
    notes = [note.read_text() for note in (ROOT / "docs" / "notes").glob("[0-9][0-9][0-9][0-9]-*.md")]
    assert any(op in note for note in notes)
    for name in OPS[path]:
        assert re.search(rf'"{name}"', (PACKAGE / "__init__.py").read_text())


def test_a_class_name_exists_once():
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(_name(path))
    assert not {name: places for name, places in found.items() if len(places) > 1}


@pytest.mark.parametrize("path", OPS, ids=_op_name)
def test_the_sections_of_an_op_are_in_order(path):
    op = _op_name(path)
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
    registered = [
        number for number, line in enumerate(source.splitlines(), 1) if re.match(r"\w+ = (?:registered|Registered)\(", line)
    ]
    sections = [
        [lines[f"{name}_reference"] for name in OPS[path]],
        kernels,
        registered,
        autograd,
        [lines[name] for name in OPS[path]],
        [number for number, line in enumerate(source.splitlines(), 1) if line.startswith("define_op(")],
    ]
    found = [section for section in sections if section]
    assert all(max(above) < min(below) for above, below in pairwise(found)), sections
    public = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}  # the last of overloaded ones
    assert all(ast.get_docstring(public[name]) for name in OPS[path])


def test_files_are_short():
    assert not [_name(path) for path in FILES if len(path.read_text().splitlines()) > 500]


_MANY, _MOST_WITH_MANY = 10, 80  # the second may only fall: options, layouts, plans and what a kernel knows of a row are records


def test_few_functions_have_many_arguments():
    """Kernels are among them. Neither self nor ctx counts, nor *args; and overloads repeat what they are of."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "overload" not in map(ast.unparse, node.decorator_list):
                names = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
                if len(names - {"self", "cls", "ctx"}) > _MANY:
                    found.append(f"{_name(path)}.{node.name}")
    assert len(found) <= _MOST_WITH_MANY, found


def test_the_version_is_in_one_place():
    versions = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(versions) == 1
    ours = [path for path in FILES if path.name != "tested.py"]  # which has versions of other packages
    assert not [path for path in ours if f'"{versions[0]}"' in path.read_text()]


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
jitted = []
try:
    import triton
    stock = triton.jit
    triton.jit = lambda *args, **options: jitted.append(args) or stock(*args, **options)
except ImportError:
    pass
before = (set(sys.modules), *before[1:])
import onepass
after = dict(vars(torch)), dict(vars(torch.nn.functional)), dict(vars(torch.Tensor))
print(json.dumps({
    "loaded": sorted({name.split(".")[0] for name in set(sys.modules) - before[0]}),
    "ours": sorted(name for name in sys.modules if name.split(".")[0] == "onepass"),
    "patched": [name for was, now in zip(before[1:], after) for name in was if now.get(name) is not was[name]],
    "context": torch.cuda.is_initialized(),
    "asked": asked,
    "jitted": len(jitted),
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
    heavy |= {"trl", "verl", "torchtitan", "accelerate", "peft"}
    assert not heavy & set(imported["loaded"])


def test_importing_loads_ops_and_what_is_below_them(imported):
    """Not what only tools and trainers need: it would be most of the time that an import takes."""
    folders = {name.split(".")[1] for name in imported["ours"] if "." in name}
    assert folders == {"nn", "ops", "product", "gradients", "parallel", "distributed", "kernels", "runtime", "integrations"}
    integrations = [name for name in imported["ours"] if name.startswith("onepass.integrations.")]
    assert integrations == ["onepass.integrations.attention_backends", "onepass.integrations.norm_backends"]
    assert not [name for name in imported["ours"] if name.endswith(".samples")]


def test_importing_reads_no_kernels_source(imported):
    """Triton reads a kernel's source as it is made: of all of them that takes as long as the rest of the import."""
    assert imported["jitted"] == 0


def test_names_that_are_loaded_at_first_use_are_public():
    import onepass

    assert set(onepass.__all__) <= set(dir(onepass))
    assert all(callable(getattr(onepass, name)) for name in ("fuse", "profile", "compare"))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onepass.nothing


def test_the_model_is_there_at_first_use():
    code = "import sys, onepass; loaded = 'onepass.gpt' in sys.modules; print(loaded, onepass.gpt.Config().num_layers)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.stdout == "False 4\n", done.stderr


def test_module_paths_of_the_release_before_answer():
    from onepass.runtime.moved import MOVED

    for old, new in MOVED.items():
        assert _is_module(f"onepass.{new}") and not _is_module(f"onepass.{old}"), old
    with pytest.warns(DeprecationWarning, match=r"onepass.parallel.collectives has moved to onepass.distributed.collectives"):
        old = importlib.import_module("onepass.parallel.collectives")
    assert old.start_all_reduce is importlib.import_module("onepass.distributed.collectives").start_all_reduce
    for path, name in (("norm", "rms_norm"), ("attention", "attention"), ("linear", "linear")):
        assert callable(getattr(importlib.import_module(f"onepass.ops.{path}"), name))
