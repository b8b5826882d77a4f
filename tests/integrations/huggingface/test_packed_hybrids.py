"""Packed batches of hybrids: attention, convolutions, scans and delta rules part documents, or a warning says what doesn't."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import VOCABULARY, assert_alike, batch, made, mutant_tests, step

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import convolutions, document_trials, masks
from onepass.integrations.huggingface.document_trials import parts_documents

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
APART = ("Qwen3Next", "Qwen3_5Text", "NemotronH", "GraniteMoeHybrid", "FalconH1", "Bamba", "Lfm2")
LINEAR = {"MiniMax": {"layer_types": ["linear_attention", "full_attention"]}}
TOGETHER = {  # who says so
    "KimiLinear": "packed documents see each other in KimiLinearDeltaAttention",
    "MiniMax": "packed documents see each other in MiniMaxLightningAttention",
    "Zamba2": "nothing is known of boundaries",
}
BATCHES = {"one row": [[7, 5, 1, 11]], "rows": [[7, 5], [12], [1, 11]]}


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def packed(rows, *names):
    """A batch, with its positions or lengths, and each document alone."""
    lengths = [n for row in rows for n in row]
    ids = torch.randint(3, VOCABULARY, (len(rows), sum(rows[0])), generator=torch.Generator().manual_seed(5))
    documents = [part[None] for part in ids.flatten().split(lengths)]
    labels = torch.cat([part.index_fill(1, torch.tensor([0]), -100) for part in documents], 1).view(ids.shape)
    given = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).view(ids.shape),
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
    }
    return {"input_ids": ids, "labels": labels} | {name: given[name] for name in names}, documents


def alone(model, documents):
    """Return the loss and the gradients of documents that are batches of their own."""
    model.zero_grad()
    count = sum(part.shape[1] - 1 for part in documents)
    losses = [
        model(input_ids=part, labels=part, num_items_in_batch=count, use_cache=False).loss
        for part in documents
        if part.shape[1] > 1
    ]
    loss = sum(losses)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_apart(family, rows, names, apply=huggingface.apply, **options):
    model = made(family, **options)
    before, _ = copy.deepcopy(model), apply(model)
    given, documents = packed(rows, *names)
    assert_alike(step(model, **given), alone(before, documents), 1e-4)
    return model, before, given, documents


@pytest.mark.parametrize("names", [("position_ids",), ("position_ids", "cu_seq_lens_q")], ids=("positions", "lengths"))
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("family", APART)
def test_each_document_trains_as_it_does_alone(family, rows, names):
    assert_apart(family, BATCHES[rows], names)


@pytest.mark.parametrize("family", ("Qwen3_5Text", "NemotronH"))
def test_a_model_that_is_loaded_trains_as_before(family, tmp_path):
    """Without a cache, which the model's code would make of every token."""
    model = made(family)
    before, _ = copy.deepcopy(model), huggingface.apply(model)
    given, documents = packed(BATCHES["one row"], "position_ids")
    torch.save(model, tmp_path / "model.pt")
    for other in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(model)):
        other(**given)
        outputs = other(**batch())
        assert outputs.logits.numel() == 0 and outputs.get("past_key_values") is outputs.get("cache") is None
        assert_alike(step(other, **given), alone(before, documents), 1e-4)


def test_layers_without_any_attention():
    assert_apart("GraniteMoeHybrid", BATCHES["rows"], ("position_ids",), layer_types=["mamba", "mamba"])


@pytest.mark.parametrize("family", ("Qwen3_5Text", "NemotronH", "GraniteMoeHybrid"))
def test_checkpointed(family):
    model, before, given, documents = assert_apart(family, BATCHES["one row"], ("position_ids",))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_alike(step(model, **given), alone(before, documents), 1e-4)


@pytest.mark.parametrize("family", APART)
def test_no_document_reads_another(family):
    model = made(family).eval()
    huggingface.apply(model)
    given, documents = packed(BATCHES["one row"], "position_ids")
    given |= {"labels": None, "use_cache": False}
    with torch.no_grad():
        y = model(**given).logits
        given["input_ids"] = torch.cat([torch.full_like(documents[0], 3), *documents[1:]], 1)
        changed = model(**given).logits
    assert not torch.equal(changed[:, :7], y[:, :7])
    slack = 1e-6 if family in ("Qwen3Next", "NemotronH", "GraniteMoeHybrid") else 0  # experts' products have other rows
    torch.testing.assert_close(changed[:, 7:], y[:, 7:], rtol=slack, atol=slack)


@pytest.mark.parametrize(("family", "name"), [*zip(TOGETHER, ("position_ids", "cu_seq_lens_q", "position_ids"), strict=True)])
def test_what_parts_no_documents_warns_and_is_reported(family, name):
    model = made(family, **LINEAR.get(family, {}))
    applied = huggingface.apply(model)
    assert "packed documents" in next(row.why for row in applied.rows if row.name == "model")
    step(model, **batch())  # without documents nothing warns
    given, _ = packed(BATCHES["one row"], name)
    with pytest.warns(UserWarning, match=f"{family}Model: .*{TOGETHER[family]}"):
        step(model, **given)
    step(model, **given)  # it says so once
    applied.undo()
    assert "forward" not in vars(model.model)


def test_a_model_that_hands_nothing_on_is_reported():
    applied = huggingface.apply(made("Mamba2"))
    (row,) = (row for row in applied.left if row.name == "backbone")
    assert row.why.startswith("packed documents may see each other")


@pytest.mark.parametrize("name", ("position_ids", "cu_seq_lens_q"))
def test_with_a_cache_nothing_parts_documents_and_a_warning_says_so(name):
    model = made("NemotronH").eval()
    huggingface.apply(model)
    given, _ = packed(BATCHES["one row"], name)
    with pytest.warns(UserWarning, match="NemotronHModel: .*with a cache"), torch.no_grad():
        model(**given | {"use_cache": True})


class Reads(torch.nn.Module):
    """A mixer by this code."""

    def __init__(self, code):
        super().__init__()
        self.proj, self.code = torch.nn.Linear(6, 6), code

    def forward(self, x, **given):
        return self.code(self.proj(x), given.get("cu_seq_lens_q"))


def parted(y, boundaries):
    parts = [y] if boundaries is None else y.split(boundaries.diff().tolist(), 1)
    return torch.cat([part.cumsum(1) for part in parts], 1)


def test_what_the_trial_says():
    assert parts_documents(Reads(parted))
    for code in (
        lambda y, boundaries: y.cumsum(1),  # whatever the boundaries
        lambda y, boundaries: y,  # it mixes nothing, so nothing is shown
        lambda y, boundaries: parted(y, None if boundaries is None else (boundaries - 1).clamp(0) + (boundaries == 8).int()),
        lambda y, boundaries: y.fail(),
    ):
        assert not parts_documents(Reads(code))


# ---- mutants ----


def all_is_right(applied):
    for family in ("NemotronH", "Qwen3_5Text", "GraniteMoeHybrid", "Bamba"):
        for rows in BATCHES.values():
            assert_apart(family, rows, ("position_ids",), applied.apply)
    warned = applied.apply(made("KimiLinear"))
    assert "packed documents" in next(row.why for row in warned.rows if row.name == "model")


MUTANTS = {
    "no boundaries for mixers": (masks, "_forward", "options[LENGTHS_OF_Q] = documents", "pass"),
    "kinds of layers unseen": (masks, "_layer", "isinstance(value, str | int)", "False"),
    "no mixer leaks": (masks, "_mixing", "leaks.add(type(module).__name__)", "pass"),
    "rows by themselves, in convolutions": (convolutions, "convolution_of", "(as_one_row(x), documents.int())", "((x,), None)"),
    "whatever it computes": (document_trials, "parts_documents", "(together - expected).abs().max() < _SLACK * largest and", ""),
}


test_a_mutant_is_found, test_what_mutants_are_tried_on_is_right = mutant_tests(MUTANTS, all_is_right, AttributeError, UserWarning)
