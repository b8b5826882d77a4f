"""What the tests of attn_implementation="onepass" would catch."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, batch, made, step  # noqa: E402
from integrations.huggingface.test_attention_interface import (  # noqa: E402
    BATCHES,
    BOTH_STACKS,
    COMPARED,
    ENCODERS,
    FAMILIES,
    OPTIONS,
    _by_pytorch,  # noqa: F401
    packed,
    padded,
    pair,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from onepass.integrations.huggingface import attention_interface, attention_masks, documents  # noqa: E402
from onepass.testing.mutants import mutate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*RoPE scaling factor", "ignore:.*gradient_checkpointing:FutureWarning")


def implementation_is_right(interface, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mutant", interface.onepass_attention_forward)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "mutant", interface.onepass_mask)
    for family in ("Mistral", "GptOss", "Gemma2"):
        model, before = pair(made(family, **OPTIONS.get(family, {})), FAMILIES[family], "mutant")
        for kind in (kind for of, kind in COMPARED if of == family):
            assert_alike(step(model, **BATCHES[kind]()), step(before, **BATCHES[kind]()))
        ids = batch()["input_ids"]
        for options in ({}, {"cache_implementation": "static"}):
            found, expected = (
                each.eval().generate(ids, max_new_tokens=6, do_sample=False, **options) for each in (model, before)
            )
            assert torch.equal(found, expected)
    config = transformers.ModernBertConfig(**ENCODERS["ModernBert"])
    model, before = pair(transformers.AutoModelForMaskedLM.from_config(config), name="mutant")
    assert_alike(step(model, **padded("left")), step(before, **padded("left")))
    model, before = pair(
        transformers.BartForConditionalGeneration(transformers.BartConfig(**BOTH_STACKS["Bart"][0])), name="mutant"
    )
    given = padded("left") | {"labels": batch()["labels"]}
    assert_alike(step(model, **given), step(before, **given))
    model, before = pair(made(), name="mutant")
    assert_alike(step(model, **packed() | {"use_cache": True}), step(before, **packed()))


MUTANTS = {
    "one key fewer": (attention_masks, "sight_of", "window - 2", "window - 3"),
    "causal the other way": (attention_masks, "sight_of", "kind == 2", "kind == 3"),
    "padding is no document": (attention_masks, "_find_sight", "documents=documents_of_padding(attention_mask), ", ""),
    "positions without a window": (attention_masks, "_find_sight", "Sight(True, local_size,", "Sight(True, None,"),
    "padding on one side": (documents, "documents_of_padding", "begin + first", "begin"),
    "a window of one side": (
        attention_interface,
        "onepass_attention_forward",
        "(sight.window, sight.window)",
        "(sight.window, 0)",
    ),
    "no sinks": (attention_interface, "onepass_attention_forward", '"s_aux": s_aux', '"s_aux": None'),
    "no softcap": (attention_interface, "onepass_attention_forward", '"softcap": softcap', '"softcap": None'),
    "other states as its own": (attention_interface, "_takes", "not sight.causal and not", "sight.causal and not"),
    "positions are not looked at": (attention_interface, "_documents_by_positions", "return known[1]", "return None"),
    "an empty cache is seen": (attention_interface, "onepass_attention_forward", "1 < tokens < key.shape[2]", "False"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    monkeypatch.setenv("ONEPASS_BACKEND", "torch")  # a mutant has a use_backend of its own
    with monkeypatch.context() as patched:
        patched.delenv("TRITON_INTERPRET", raising=False)  # the copy runs formulas
        mutant = mutate(*MUTANTS[name], entry=attention_interface)
    with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError)):
        implementation_is_right(mutant, monkeypatch)


@pytest.mark.slow
def test_without_a_mutant_it_is_right(monkeypatch):
    implementation_is_right(attention_interface, monkeypatch)
