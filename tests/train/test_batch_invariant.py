"""A run under onepass.batch_invariant(): which of its calls are under it, and what can't be."""

import pytest
import torch
from train.test_run import losses, train

import onepass
from onepass.cli import main
from onepass.gpt import Config, Model
from onepass.gpt.settings import read_yaml
from onepass.runtime.batch_invariance import invariant
from onepass.testing.invariance import check_batches
from onepass.train.command import _check_invariant
from onepass.train.options import NEEDED_FUSIONS, Options
from onepass.train.table import fusions

BRIEF = "--no-table", "--no-fusion-table"


@pytest.fixture
def seen(monkeypatch):
    """Whether the promise was in force in each forward, and in each backward, by the attention_fusion of the model."""
    asked, forward = {True: set(), False: set()}, Model.forward

    def recorded(self, *args, **options):
        places = asked[self.config.attention_fusion]
        result = forward(self, *args, **options)
        places.add(("forward", invariant()))
        if result.requires_grad:
            result.register_hook(lambda _: places.add(("backward", invariant())))
        return result

    monkeypatch.setattr(Model, "forward", recorded)
    return asked


def test_steps_evaluations_samples_and_tables_are_under_it_and_pytorch_is_not(tmp_path, corpus, capsys, seen):
    folder = tmp_path / "run"
    assert train(corpus, "--run-dir", folder, "--batch-invariant", "--compare") == 0
    assert seen[True] == {("forward", True), ("backward", True)}
    assert seen[False] == {("forward", False), ("backward", False)}
    assert not invariant()
    said = " ".join(capsys.readouterr().out.split())
    assert "A token's bits depend on no other sequence (batch_invariant)." in said
    assert "--no-norm-linear-fusion" in said and "--no-attention-fusion" not in said  # which could not run
    assert read_yaml(folder / "config.yaml")["batch_invariant"] is True


def test_a_resumed_run_keeps_it(tmp_path, corpus, seen):
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert train(corpus, "--run-dir", whole, "--batch-invariant", *BRIEF) == 0
    assert train(corpus, "--run-dir", half, "--batch-invariant", "--train-iters", 3, "--lr-decay-style", "constant", *BRIEF) == 0
    seen[True].clear()
    resumed = "--resume", str(half), "--train-iters", "6", "--lr-decay-style", "cosine"
    assert main(["train", "--device", "cpu", *resumed, *BRIEF]) == 0
    assert seen[True] == {("forward", True), ("backward", True)}
    assert len(losses(half)) == len(losses(whole)) == 6


def test_without_it_a_run_leaves_the_process_as_it_is(tmp_path, corpus, seen):
    with onepass.batch_invariant():
        assert train(corpus, "--run-dir", tmp_path, "--train-iters", 1, *BRIEF) == 0
    assert seen[True] == {("forward", True), ("backward", True)}


@pytest.mark.parametrize("changes", ({}, {"qk_layernorm": True}, {"num_moe_experts": 5, "moe_router_topk": 2}), ids=str)
def test_a_models_bits(changes):
    """Of sequences in parts of a batch, forward and backward; and of packed ones."""
    config = Config(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=2, vocab_size=100, **changes)
    model, tokens = Model(config, seed=0), torch.randint(100, (9, 13), generator=torch.Generator().manual_seed(1))
    lengths = 1, 5, 13, 8
    with onepass.batch_invariant():
        check_batches(model, tokens, splits=4, leave_out=("mlp.experts",)).raise_if_different()
        packed = torch.cat([row[:length] for row, length in zip(tokens, lengths, strict=False)])
        boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        found = model(packed[None], cu_seqlens=boundaries)[0].split(lengths)
        assert all(torch.equal(mine, model(row[None, : len(mine)])[0]) for mine, row in zip(found, tokens, strict=False))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--hidden-dropout", "0.1"], "hidden_dropout must be 0.0 with batch_invariant, as what is dropped depends on a token's"),
        (["--attention-dropout", "0.1"], "attention_dropout must be 0.0 with batch_invariant"),
        (["--fp8-format", "hybrid"], "fp8_recipe must be 'rowwise' with batch_invariant, as others are of all rows"),
        (["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"], "but is 'tensorwise'"),
        (["--no-attention-fusion"], "attention_fusion must be True with batch_invariant, as PyTorch's operators promise nothing"),
        (["--no-norm-fusion"], "norm_fusion must be True with batch_invariant"),
        (["--no-cross-entropy-loss-fusion"], "cross_entropy_loss_fusion must be True with batch_invariant"),
        (
            ["--num-experts", "4", "--moe-aux-loss-coeff", "0.01"],
            "moe_aux_loss_coeff must be 0.0 with batch_invariant, as its gradient depends on which experts all tokens chose",
        ),
        (["--no-deterministic"], "deterministic must be true with batch_invariant, as sums in any order have any bits"),
    ],
)
def test_what_cannot_keep_it_raises_before_anything_is_written(flags, said, tmp_path, corpus, capsys):
    assert train(corpus, "--run-dir", tmp_path / "run", "--batch-invariant", *flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and not invariant()


def test_scales_of_rows_are_taken():
    _check_invariant(Config(fp8_format="hybrid", fp8_recipe="rowwise"))


def test_each_fusion_that_it_needs_is_one_of_the_table():
    assert set(NEEDED_FUSIONS) <= {names[0] for names in fusions(Config())}
    assert not Options().batch_invariant
