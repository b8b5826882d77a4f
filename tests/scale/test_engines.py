"""The recipes for DeepSpeed and Ray run where these are installed. What needs neither runs everywhere."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

SCALE = Path(__file__).parents[2] / "examples" / "scale"
TORCHRUN = "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"


def run(folder, *command):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder):
    return [tuple(json.loads(line).values()) for line in (folder / "losses.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_rays_workers_run_by_torchrun_and_go_on_from_a_checkpoint(tmp_path):
    options = str(SCALE / "ray_train.py"), "--save-every", "2", "--steps", "3", "--out"
    run(tmp_path, *TORCHRUN, *options, "found")
    whole = losses(tmp_path / "found")
    assert [step for step, _ in whole] == [1, 2, 3] and whole[2][1] < whole[0][1]
    run(tmp_path, *TORCHRUN, *options, "found")  # goes on from step 2
    assert losses(tmp_path / "found") == whole
    if find_spec("ray") is not None:
        run(tmp_path, *options, "ray")
        assert losses(tmp_path / "ray") == whole


def test_rays_worker_begins_the_text_again_where_it_ends(tmp_path, monkeypatch):
    spec = spec_from_file_location("ray_train", SCALE / "ray_train.py")
    recipe = module_from_spec(spec)
    spec.loader.exec_module(recipe)
    monkeypatch.setattr(recipe, "text", lambda: torch.arange(3 * recipe.LENGTH).view(3, -1) % 256)
    monkeypatch.setattr(recipe.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(recipe.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(recipe.dist, "all_reduce", lambda mean: None)
    monkeypatch.setattr(recipe, "DistributedDataParallel", lambda model: model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe.train({"steps": 2, "save_every": 9, "out": str(tmp_path)}, None, lambda *step: None)
    assert [step for step, _ in losses(tmp_path)] == [1, 2]  # the second batch has the third row and the first


@pytest.mark.slow
def test_zero_3_gives_the_losses_of_the_plain_model(tmp_path):
    pytest.importorskip("deepspeed")
    script = *TORCHRUN, str(SCALE / "deepspeed_trainer.py"), "--steps", "3"
    ours, plain = run(tmp_path, *script), run(tmp_path, *script, "--plain")
    assert "linear_cross_entropy" in ours and "linear_cross_entropy" not in plain
    assert re.findall(r"'loss': '([\d.]+)'", ours) == re.findall(r"'loss': '([\d.]+)'", plain) != []


def test_deepspeeds_options_are_zero_3():
    options = json.loads((SCALE / "deepspeed_zero3.json").read_text())
    assert options["zero_optimization"]["stage"] == 3 and "optimizer" not in options  # Trainer's is torch's
