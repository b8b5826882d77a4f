"""Every example runs, as a reader would run it; and the pages show what runs have shown."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass.profiling.figures import OperatorRow

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {
    "finetune_huggingface": ("transformers", "accelerate"),
    "policy_verl": ("verl", "transformers"),
    "pretrain_megatron": ("megatron.core",),
    "pretrain_torchtitan": ("torchtitan", "datasets"),
    "train_accelerate": ("transformers", "accelerate"),
    "train_lightning": ("transformers", "lightning"),
    "train_trl": ("trl", "datasets"),
}
KEPT = sorted((ROOT / "benchmarks" / "results").glob("*/scripts/puzzlers*.json"))


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


puzzlers = loaded(ROOT / "examples" / "puzzlers.py")


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error::UserWarning:__main__", str(path), "--small", "--out", "found"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout and (tmp_path / "found").is_dir()
    assert [file.name for file in tmp_path.iterdir()] == ["found"]


# ---- puzzlers ----


@pytest.fixture(scope="module")
def figures():
    """Those of a run in which nothing is compiled: it takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(puzzlers, "ways", lambda x, weight: few_ways())
        patch.setattr(puzzlers, "commit", lambda: "abc")
        found, profiles = puzzlers.run(8, 4, torch.device("cpu"), lambda text: None)
    return found, profiles


def few_ways():
    fused = puzzlers.onepass.fuse(puzzlers.split_stack, compiler="none")
    return {"split_stack": puzzlers.split_stack, "combined": puzzlers.combined, "split_stack, fused": fused}


def test_what_ran(figures):
    ways = figures[0]["ways"]
    counts = {way: {name: count for name, count, _ in found["ran"]} for way, found in ways.items()}
    assert [counts[way]["aten::native_layer_norm"] for way in ways] == [16, 1, 1]
    assert [counts[way]["aten::tanh"] for way in ways] == [16, 1, 1]
    assert all(found["kernels"] == sum(counts[way].values()) for way, found in ways.items())
    assert not [name for way in counts.values() for name in way if "Torch" in name]  # dynamo's own ranges
    assert all(found["differs_by"] <= puzzlers.SAME for found in ways.values())


def test_a_compilers_kernels_lose_their_numbers():
    rows = [row("triton_norm_tanh_0", 1, 2.0), row("triton_norm_tanh_15", 1, 3.0), row("mm", 2, 4.0), row("nothing", 0, 1.0)]
    assert puzzlers.what_ran(SimpleNamespace(rows=rows, on_gpu=True)) == [("triton_norm_tanh", 2, 5.0), ("mm", 2, 4.0)]
    rows = [
        row("graph_2_cpp_fused_tanh_0", 1, 2.0),
        row("graph_3_cpp_fused_tanh_1", 1, 3.0),
        row("Torch-Compiled Region", 1, 9.0),
    ]
    assert puzzlers.what_ran(SimpleNamespace(rows=rows, on_gpu=False)) == [("cpp_fused_tanh", 2, 5.0)]


def row(name, count, us):
    return OperatorRow(name, count, us, 0.1, {"a kernel": count} if count else {})


def test_a_way_that_computes_something_else_is_no_way(monkeypatch):
    wrong = {"split_stack": puzzlers.split_stack, "mine": lambda x, weight: puzzlers.combined(x, weight) * 1.001}
    monkeypatch.setattr(puzzlers, "ways", lambda x, weight: wrong)
    with pytest.raises(RuntimeError, match="mine must give what split_stack gives, to 1e-05 of it, but differs by"):
        puzzlers.run(8, 4, torch.device("cpu"), lambda text: None)
    with pytest.raises(RuntimeError, match="nan"):
        puzzlers.checked("mine", torch.full((2,), torch.nan), torch.ones(2))


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_a_page_is_written(figures, on_gpu, small, tmp_path):
    found, profiles = figures
    ways = {  # as if tanh took longest: what takes least is not listed, and a busy machine chooses that
        name: way | {"ran": sorted(way["ran"], key=lambda each: each[0] != "aten::tanh")} for name, way in found["ways"].items()
    }
    found = found | {"on_gpu": on_gpu, "small": small, "ways": ways}
    if on_gpu:
        found["ways"] = {name: way | {"launches": 3.0} for name, way in found["ways"].items()}
    page, results = tmp_path / "docs" / "page.md", tmp_path / "results"
    page.parent.mkdir()
    name = puzzlers.marker(found)
    page.write_text(f"before\n<!-- {name} -->\nold\n<!-- /{name} -->\nafter\n")
    for _ in range(2):  # the second writes over the first
        puzzlers.write(found, profiles, page, results)
    text = page.read_text()
    assert text == f"before\n<!-- {name} -->\n{puzzlers.on_page(found)}\n<!-- /{name} -->\nafter\n"
    assert "commit abc" in text and "16 `aten::tanh`" in text and "old" not in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| split_stack")}) == 2  # of two tables
    kept = json.loads((results / "scripts" / f"puzzlers{'_small' if small else ''}.json").read_text())
    assert puzzlers.on_page(kept) == puzzlers.on_page(found)
    assert (page.parent / "images" / "puzzlers.png").exists() == on_gpu == ("](images/puzzlers.png)" in text)


def test_figures_without_a_commit_are_not_written(figures, tmp_path):
    with pytest.raises(ValueError, match="a figure without a commit can't be repeated"):
        puzzlers.write(figures[0] | {"commit": None}, figures[1], tmp_path / "page.md", tmp_path)
    with pytest.raises(ValueError, match="the page must have the lines"):
        puzzlers.with_figures("no markers", figures[0])


def test_the_page_shows_kept_runs():
    blocks = re.findall(r"<!-- (puzzlers.*?) -->\n(.*?)<!-- /\1 -->", puzzlers.PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["puzzlers, GPU", "puzzlers, CPU, small", "puzzlers, CPU"]
    kept = [json.loads(path.read_text()) for path in KEPT]
    for name, shown in blocks:
        possible = [f"{puzzlers.on_page(run)}\n" for run in kept if puzzlers.marker(run) == name]
        assert shown in possible or not (shown or possible), f"examples/puzzlers.py --write brings {name!r} up to date"


def test_the_page_tells_the_same_program():
    page, script = puzzlers.PAGE.read_text(), (ROOT / "examples" / "puzzlers.py").read_text()
    said = [line for line in page.partition("```python")[2].partition("```")[0].splitlines() if line.startswith("    ")]
    assert len(said) == 6 and all(line.replace("16", "SLICES") in script for line in said)


# ---- finetune_huggingface ----


@pytest.fixture
def finetune(monkeypatch):
    for package in NEEDS["finetune_huggingface"]:
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("finetune_huggingface", ROOT / "examples" / "finetune_huggingface.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look
    spec.loader.exec_module(module)
    smaller = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    tiny = module.SIZES["tiny"]
    monkeypatch.setitem(module.SIZES, "tiny", dataclasses.replace(tiny, length=32, rate=1e-2, model=tiny.model | smaller))
    threads = torch.get_num_threads()
    with onepass.use_backend("torch"):
        yield module
    torch.set_num_threads(threads)


def finetuned(module, monkeypatch, out, steps=12):
    monkeypatch.setattr(sys, "argv", ["finetune_huggingface.py", "--steps", str(steps), "--out", str(out)])
    module.main()
    return json.loads((out / "losses.json").read_text())


@pytest.mark.slow
def test_finetuning_learns_the_same_with_onepass(finetune, monkeypatch, tmp_path, capsys):
    losses = finetuned(finetune, monkeypatch, tmp_path)
    assert set(losses) == {"as it is", "with onepass"} and len(losses["with onepass"]) == 12
    assert losses["with onepass"] == pytest.approx(losses["as it is"], abs=1e-4)
    assert losses["with onepass"][-1] < losses["with onepass"][0] - 0.5
    said = capsys.readouterr().out
    assert "onepass in LlamaForCausalLM" in said and "linear_cross_entropy" in said
    assert re.search(r"tokens/s +│ +[\d,]+ +│ +[\d,]+", said)
    saved = finetune.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert saved.config.hidden_size == 32


@pytest.mark.slow
def test_finetuning_says_where_losses_differ(finetune, monkeypatch, tmp_path):
    monkeypatch.setattr(finetune, "apply", lambda model: model.lm_head.weight.data.mul_(1.5))
    with pytest.raises(SystemExit, match=r"the losses of both runs must be within 0\.02"):
        finetuned(finetune, monkeypatch, tmp_path, steps=3)
    assert not (tmp_path / "losses.json").exists()
