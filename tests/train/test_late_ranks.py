"""Runs in which a rank is late end. Ranks run late_ranks.py."""

import shutil

import pytest
import torch.distributed as dist
from parallel import worlds
from train import late_ranks

SEEDS = range(2)  # each with another layout


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize("world", worlds.PAIRS)
def test_a_run_ends_whichever_rank_is_late_in_whichever_phase(world, tmp_path, corpus):
    shutil.copy(corpus, tmp_path / "text.txt")
    phases = {phase for phase, *_ in late_ranks.PHASES}
    for found in worlds.found_by(late_ranks.run, world, tmp_path, SEEDS):
        assert found == {seed: {"status": 0, "said": "", "phases": phases} for seed in SEEDS}
