"""What the files in benchmarks share: on a machine without a GPU they end in a sentence, before anything is made."""

import ast
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ON_A_CPU = {"attention_sharp_scores", "gpt_losses", "gpt_parallel", "lookups", "lora_curve", "planned", "trl_head"}


@pytest.fixture
def measuring(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    import measuring

    return measuring


def test_a_script_has_no_name_of_a_folder_of_tests():
    """Both are on the path in one process, where the first one imported would be taken for the other."""
    folders = {folder.name for folder in BENCHMARKS.parent.joinpath("tests").iterdir() if folder.is_dir()}
    assert {"gpt", "bench"} < folders
    assert not folders & {script.stem for script in BENCHMARKS.glob("*.py")}


@pytest.mark.parametrize(
    ("there", "wanted", "said"),
    [
        (0, (), "some.py: needs a GPU, and PyTorch sees none here\n"),
        (1, (2, "--small needs none"), "some.py: needs 2 GPUs, and PyTorch sees 1 here; --small needs none\n"),
        (2, (2,), ""),
    ],
)
def test_too_few_gpus_are_one_sentence(there, wanted, said, measuring, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    if said:
        with pytest.raises(SystemExit) as ended:
            measuring.need_gpus(*wanted)
        assert ended.value.code == 2
    else:
        measuring.need_gpus(*wanted)
    assert capsys.readouterr().err == said


def test_ranks_without_torchrun_are_one_sentence(measuring, capsys):
    with pytest.raises(SystemExit):
        measuring.join_ranks()
    assert "is started by torchrun" in capsys.readouterr().err


def test_every_file_that_measures_looks_for_a_gpu_first():
    looking, running = set(), set()
    for path in BENCHMARKS.glob("*.py"):
        tree = ast.parse(path.read_text())
        main = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
        calls = {ast.unparse(node.func) for each in main for node in ast.walk(each) if isinstance(node, ast.Call)}
        running |= {path.stem} if main else set()
        looking |= {path.stem} if calls & {"need_gpus", "join_ranks"} else set()
    assert running - looking == ON_A_CPU
