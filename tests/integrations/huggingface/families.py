"""Small random models of the families that most tests run on."""

import copy

from onepass.integrations import huggingface
from onepass.integrations.huggingface import families
from onepass.integrations.huggingface.families import MOE, SMALL, SPECIAL, VOCABULARY, assert_alike, batch, step
from onepass.integrations.huggingface.families import tiny_model as made

__all__ = ["FAMILIES", "MOE", "SMALL", "SPECIAL", "VOCABULARY", "assert_alike", "batch", "both", "made", "step"]

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
