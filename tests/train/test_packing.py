"""Documents packed into rows: which tokens a step sees, what they predict, and that a run goes on exactly."""

import re
from itertools import pairwise

import numpy
import pytest
import torch
from train.test_run import log, losses, train

from onepass.cli import main
from onepass.gpt import Config
from onepass.gpt.settings import read_yaml
from onepass.runtime.errors import CommandError
from onepass.train import packing, samples
from onepass.train.batches import TokenBatch
from onepass.train.loop import TrainRun
from onepass.train.packing import Documents, PackedBatches
from onepass.train.steps import GraphedSteps

CPU = torch.device("cpu")
END, LENGTH = 0, 16
QUICK = "--no-table", "--no-fusion-table"


def text(lengths):
    """Documents of so many tokens without their end. Each token is another number, so that it tells its place."""
    numbers, found = iter(range(1, 1 << 20)), []
    for length in lengths:
        found += [*(next(numbers) for _ in range(length)), END]
    return numpy.array(found, dtype=numpy.uint32)


LENGTHS = [5, 40, 1, 0, 16, 7, 33, 2, 9, 12]
TEXT = text(LENGTHS)


def batches(size=4, seed=3, rank=0, ranks=1, numbers=TEXT, length=LENGTH):
    return PackedBatches(Documents(numbers, END), numbers, size, length, seed, rank, ranks, CPU)


def pieces(batch):
    """The inputs and labels of each document of a batch."""
    for tokens, labels, boundaries in zip(*batch, strict=True):
        sizes = boundaries.diff()
        yield from zip(tokens.split(sizes.tolist()), labels.split(sizes.tolist()), strict=True)


@pytest.fixture(scope="module")
def folder_of_texts(tmp_path_factory):
    """Fifty documents of one to forty lines."""
    folder = tmp_path_factory.mktemp("texts")
    for at in range(50):
        folder.joinpath(f"{at}.txt").write_text("".join(f"x{at} = {line}\n" for line in range(1 + at * 7 % 40)))
    return folder


def test_documents_are_between_ends():
    found = Documents(TEXT, END)
    assert found.inputs.tolist() == [length for length in LENGTHS if length]
    assert [TEXT[start] for start in found.starts[:3]] == [1, 6, 46]
    assert Documents(TEXT[:-1], END).inputs.tolist()[-1] == 11  # the end of the text is one too
    with pytest.raises(CommandError, match="no document of two tokens"):
        Documents(text([0, 0]), END)


def test_ends_are_found_over_blocks(monkeypatch):
    whole = Documents(TEXT, END)
    monkeypatch.setattr(packing, "_BLOCK", 7)
    assert Documents(TEXT, END).starts.tolist() == whole.starts.tolist()


def test_an_epoch_has_each_token_once_and_nothing_else():
    total, steps, batch = sum(LENGTHS), 8, batches(size=5)
    inputs = torch.cat([batch.of_step(step).tokens.flatten() for step in range(steps)])
    assert len(inputs) > 5 * total
    for epoch in range(5):
        assert sorted(inputs[epoch * total : (epoch + 1) * total].tolist()) == list(range(1, total + 1))
    assert inputs[:total].tolist() != inputs[total : 2 * total].tolist()


def test_a_token_predicts_the_next_of_its_document_and_the_last_one_the_end():
    stops = {total for total in numpy.cumsum(LENGTHS)}
    for step in range(5):
        batch = batches().of_step(step)
        assert batch.tokens.shape == batch.labels.shape == (4, LENGTH)
        assert batch.cu_seqlens.dtype == torch.int32 and (batch.cu_seqlens[:, 0] == 0).all()
        assert (batch.cu_seqlens[:, -1] == LENGTH).all() and (batch.cu_seqlens.diff() >= 0).all()
        for tokens, labels in pieces(batch):
            assert (tokens.diff() == 1).all()  # one document
            expected = [0 if token in stops else token + 1 for token in tokens.tolist()]
            assert labels.tolist() == expected


def test_a_row_divides_a_document_and_the_rest_begins_the_next():
    cut = 0
    tokens, _, boundaries = batches(size=8).of_step(0)
    for row, following in pairwise(tokens):
        cut += int(following[0] == row[-1] + 1 and int(row[-1]) not in numpy.cumsum(LENGTHS))
    assert cut > 2 and boundaries.diff().max() == LENGTH


def test_steps_see_the_same_on_any_layout_and_ranks_distinct_rows():
    for step in (0, 1, 70):
        one = batches(size=8).of_step(step)
        parts = [batches(size=8, rank=rank, ranks=4).of_step(step) for rank in range(4)]
        for what in ("tokens", "labels"):
            assert torch.equal(torch.cat([getattr(part, what) for part in parts]), getattr(one, what))
        assert len({tuple(row.tolist()) for row in one.tokens}) == 8
        assert sum(1 for part in parts for _ in pieces(part)) >= sum(1 for tokens, _ in pieces(one) if len(tokens))
    again, other = batches(size=8), batches(size=8, seed=4)
    again.of_step(0)  # in another order
    assert torch.equal(again.of_step(70).tokens, one.tokens) and not torch.equal(other.of_step(70).tokens, one.tokens)


def test_rows_longer_than_the_text():
    numbers = text([2, 1])
    batch = batches(size=1, numbers=numbers).of_step(2)
    assert batch.tokens.shape == (1, LENGTH) and sorted(set(batch.tokens.flatten().tolist())) == [1, 2, 3]


def test_microbatches_have_their_own_boundaries():
    batch = batches().of_step(1)
    parts = batch.microbatches(2)
    assert [part.tokens.shape[0] for part in parts] == [2, 2]
    assert torch.equal(torch.cat([part.cu_seqlens for part in parts]), batch.cu_seqlens)
    plain = TokenBatch(batch.tokens, batch.labels)
    assert [part.documents for part in plain.microbatches(2)] == [{}, {}] and set(parts[0].documents) == {"cu_seqlens"}


def test_what_packing_saves():
    found = batches()
    rows = sum(-(-length // LENGTH) for length in LENGTHS)
    said = found.summary()
    assert "9 documents of 1 to 40 tokens, 2 of them longer than a row." in said
    assert f"With a document a row, {1 - 125 / (rows * 16):.0%} of the tokens computed would be padding" in said
    assert f"8 rows hold the text, not {rows}." in said
    spans = [len(tokens) for step in range(2) for tokens, _ in pieces(found.of_step(step))]
    epoch, left = [], sum(LENGTHS)
    for span in (span for span in spans if span):
        epoch.append(min(span, left))
        left -= epoch[-1]
    assert found.mean_span == pytest.approx(sum(span**2 for span in epoch) / sum(LENGTHS))


def test_a_graph_takes_boundaries_of_one_width_until_there_are_more():
    steps = GraphedSteps(torch.nn.Linear(1, 1), Config(), None, None)
    steps._graph = graph = object()
    rows = torch.tensor([[0, 3, 16], [0, 16, 16]], dtype=torch.int32)
    wide = steps._widened(rows)
    assert wide.shape == (2, 16) and torch.equal(wide[:, :3], rows) and (wide[:, 3:] == 16).all() and steps._graph is None
    steps._graph = graph
    assert steps._widened(rows[:, :2]).shape == (2, 16) and steps._graph is graph
    many = torch.arange(17, dtype=torch.int32)[None]
    assert steps._widened(many).shape == (1, 32) and steps._graph is None


# ---- runs ----


@pytest.mark.parametrize(
    "more",
    [(), ("--params-dtype", "bf16", "--micro-batch-size", 2, "--global-batch-size", 4), ("--hidden-dropout", 0.1),
     ("--num-experts", 3, "--recompute-granularity", "full"), ("--fp8-format", "hybrid"), ("--attention-dropout", 0.1)],
    ids=["fp32", "bf16, microbatches", "dropout", "experts, recomputed", "fp8", "attention dropout"],
)  # fmt: skip
def test_a_packed_run_goes_on_exactly(tmp_path, folder_of_texts, more):
    run = tmp_path / "run"
    options = "--pack", *QUICK, "--samples", 0, "--save-interval", 3, "--keep-checkpoints", 0, *more
    assert train(folder_of_texts, "--run-dir", run, *options) == 0
    whole = log(run)
    (run / "checkpoints" / "step-00000006").rename(run / "gone")
    assert main(["train", "--device", "cpu", "--resume", str(run), *QUICK, "--samples", "0"]) == 0
    assert [row["step"] for row in log(run)] == list("012345")
    for name in ("loss", "eval_loss", "grad_norm"):
        assert [row[name] for row in log(run)] == [row[name] for row in whole]
    assert read_yaml(run / "config.yaml")["pack"] is True


def test_a_packed_run_says_what_packing_saves_and_ends_samples(tmp_path, folder_of_texts, capsys, monkeypatch):
    drawn = []

    def end_after_two(logits, there, generator):
        drawn.append(1)
        return torch.full((len(logits), 1), run[0].tokens.end if len(drawn) > 2 else 40)

    run = []
    stock = TrainRun.samples
    monkeypatch.setattr(TrainRun, "samples", lambda self: (run.append(self), stock(self))[1])
    monkeypatch.setattr(samples, "_drawn", end_after_two)
    assert train(folder_of_texts, "--run-dir", tmp_path / "run", "--pack") == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"packing: (\d+) documents of \d+ to \d+ tokens, \d+ of them longer than a row\.", said)
    assert found and 40 < int(found[1]) < 50
    assert "operators in a step" in said and "--no-attention-fusion" in said
    tokens = run[0].tokens
    one = tokens.tokenizer.decode([40])
    starts = Documents(tokens.valid, tokens.end).starts
    prompts = [tokens.tokenizer.decode(tokens.valid[start : start + 5].tolist()) for start in starts]
    for sample in (tmp_path / "run" / "samples.txt").read_text().rstrip("\n").split("\n\n"):
        prompt, written = sample.split("|||")
        assert written == 2 * one and any(prompt.startswith(begins) for begins in prompts)


def test_a_packed_run_has_pytorchs_losses(tmp_path, folder_of_texts, capsys):
    assert train(folder_of_texts, "--run-dir", tmp_path / "run", "--pack", "--compare", *QUICK, "--samples", 0) == 0
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "run" / "reference")
    assert [float(a) for a in ours] == pytest.approx([float(b) for b in theirs], abs=1e-4)
    assert capsys.readouterr().out.count("packing: ") == 2
