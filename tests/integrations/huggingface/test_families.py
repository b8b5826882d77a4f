"""Every family that docs/huggingface/families.md has in its table: its parts, a step, packing, generation, checkpoints."""

import copy
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import families
from onepass.integrations.huggingface.families import FAMILIES, assert_alike, batch, step, tiny_model
from onepass.integrations.tested import TESTED

PAGE = (Path(__file__).parents[3] / "docs" / "huggingface" / "families.md").read_text()
ROWS = families.rows_of(PAGE)
NEWEST = TESTED["transformers"][-1]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*RoPE scaling factor", "ignore:.*gradient_checkpointing:FutureWarning", "ignore:.*use_reentrant:FutureWarning"
)


def pair(family):
    model = tiny_model(family)
    before = copy.deepcopy(model)
    huggingface.apply(model)
    return model, before


@pytest.fixture
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


by_pytorch = pytest.mark.usefixtures("_by_pytorch")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_parts_that_the_page_says(family):
    """A part that is lost, or gained: the command in the docstring of `families` writes the page anew."""
    found, expected = families.cells_of(family), ROWS[family]
    assert found[:-1] == expected[:-1]
    if version("transformers") == NEWEST:  # reasons are of one version
        assert found == expected


def test_the_page_is_the_commands(tmp_path, capsys):
    assert list(ROWS) == list(FAMILIES) and f"with transformers {NEWEST}" in PAGE
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- {families.TABLE} -->\nold\n<!-- /{families.TABLE} -->\nafter\n")
    assert families.main(["Llama", "Phi3", "--page", str(page)]) == 0
    text = page.read_text()
    assert list(families.rows_of(text)) == ["Llama", "Phi3"] and text.startswith("before\n") and text.endswith("\nafter\n")
    assert families.main(["Llama"]) == 0
    assert capsys.readouterr().out.strip() in text.replace("| Phi3", "").replace("\n\n", "\n")
    page.write_text("no place")
    with pytest.raises(ValueError, match="the page must have a place"):
        families.main(["Llama", "--page", str(page)])


def test_numbers_that_differ_are_named(monkeypatch, capsys):
    stock = families.apply

    def broken(model):
        applied = stock(model)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.01)
        return applied

    monkeypatch.setattr(families, "apply", broken)
    assert families.main(["Llama"]) == 1
    assert capsys.readouterr().err.startswith("Llama: ")


@by_pytorch
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_evaluation_generation_and_a_saved_model(family, tmp_path):
    model, before = pair(family)
    for each in (model, before):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_alike(step(model, **batch()), step(before, **batch()))
    ids = batch()["input_ids"][:, :7]
    for each in (model, before):
        each.gradient_checkpointing_disable()
        each.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, before(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert model.generate(input_ids=ids, **options).equal(before.generate(input_ids=ids, **options))
    model.save_pretrained(tmp_path)
    loaded = type(before).from_pretrained(tmp_path).eval()
    huggingface.apply(loaded)
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, before(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
