"""Small random models of the families that most tests run on."""

import copy

import pytest
import torch

from onepass.integrations import huggingface
from onepass.integrations.huggingface import applied as applied_module
from onepass.integrations.huggingface import families
from onepass.integrations.huggingface.families import MOE, SMALL, SPECIAL, VOCABULARY, assert_alike, batch, step
from onepass.integrations.huggingface.families import tiny_model as made
from onepass.testing.mutants import mutate

__all__ = [
    "FAMILIES", "MOE", "SMALL", "SPECIAL", "VOCABULARY", "assert_alike", "assert_documents_are_apart", "batch", "both", "made",
    "mutant_of", "mutant_tests", "step",
]  # fmt: skip

FAMILIES = {  # test_families.py runs all
    name: families.FAMILIES[name]
    for name in (
        "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3Text", "Phi3", "GPT2", "GPTNeoX", "OPT", "Mixtral",
        "Qwen3Moe", "Granite", "Cohere", "StableLm", "Olmo2", "GptOss",
    )
}  # fmt: skip


def both(family="Llama", *, main_grad=False, release_main_grad=False, precision=None, **options):
    """Return a model with onepass applied, its copy from before, and the report."""
    model = made(family, **options)
    before = copy.deepcopy(model)
    applied = huggingface.apply(model, main_grad=main_grad, release_main_grad=release_main_grad, precision=precision)
    return model, before, applied


def assert_documents_are_apart(family, lengths, tolerance, apply=huggingface.apply, **options):
    """Compare documents of these lengths in one row, with their boundaries, and each alone."""
    model = made(family, **options).eval()
    apply(model)
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(5))
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    packed = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries, "max_length_q": max(lengths), "max_length_k": max(lengths), "use_cache": False,
    }  # fmt: skip
    with torch.no_grad():
        together = model(input_ids=ids, **packed).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=tolerance, atol=tolerance)


def mutant_of(monkeypatch, module, *change):
    """Return huggingface.applied of a onepass with this change in `module`, by PyTorch until the test ends."""
    monkeypatch.setenv("ONEPASS_BACKEND", "torch")  # a mutant has a use_backend of its own
    with monkeypatch.context() as patched:
        patched.delenv("TRITON_INTERPRET", raising=False)
        return mutate(module, *change, entry=applied_module)


def mutant_tests(mutants, is_right, *more):
    """Return two tests: each mutant raises in `is_right`, one of the usual errors or of `more`, and what is there does not."""
    errors = AssertionError, RuntimeError, TypeError, ValueError, *more

    @pytest.mark.slow
    @pytest.mark.parametrize("name", mutants)
    def test_a_mutant_is_found(name, monkeypatch):
        mutant = mutant_of(monkeypatch, *mutants[name])
        with pytest.raises(errors):
            is_right(mutant)

    def test_what_mutants_are_tried_on_is_right():
        is_right(applied_module)

    return test_a_mutant_is_found, test_what_mutants_are_tried_on_is_right
