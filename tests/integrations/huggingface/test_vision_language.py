"""Models of images and text: the text part is that of its family, beside a tower with tables of positions of its own."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

import transformers
from integrations.huggingface.families import SMALL, assert_alike, made, step

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import rotation
from onepass.integrations.huggingface.families import FAMILIES

IMAGE = 5  # the token whose embeddings an image replaces
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWENS = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
MODELS = {  # the text's options, the tower's, others, and the text's own family
    "Qwen2_5_VL": (SMALL | _MROPE, _QWENS, {}, "Qwen2"),
    "Qwen3VL": (
        SMALL | {"head_dim": 8} | _MROPE, _QWENS | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, {}, "Qwen3",
    ),
    "Qwen3_5": (FAMILIES["Qwen3_5Text"], _QWENS | {"num_position_embeddings": 16}, {}, "Qwen3_5Text"),
    "Gemma3": (FAMILIES["Gemma3Text"], _TOWER, {"mm_tokens_per_image": 4}, "Gemma3Text"),
    "Mistral3": (SMALL | {"model_type": "mistral"}, _TOWER | {"model_type": "pixtral"}, {"spatial_merge_size": 1}, "Mistral"),
    "Llava": (SMALL | {"model_type": "llama"}, _TOWER | {"model_type": "clip_vision_model"}, {}, "Llama"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def vision_language(name):
    text, tower, others, _ = MODELS[name]
    tokens = {key: IMAGE for key in ("image_token_id", "image_token_index")}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=tower, **tokens, **others)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).train()


def batch_of(name):
    """Two rows of text with an image in each, of four tokens."""
    ids = torch.randint(10, 90, (2, 14), generator=torch.Generator().manual_seed(7))
    ids[:, 2:6] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    given = {"input_ids": ids, "labels": labels}
    random = torch.Generator().manual_seed(8)
    if "Qwen" in name:  # 4 x 4 patches, of which each 2 x 2 are a token
        pixels = torch.randn(2 * 16, 3 * 2 * 14 * 14, generator=random)
        given |= {
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    else:
        given["pixel_values"] = torch.randn(2, 3, 28, 28, generator=random)
    if name == "Gemma3":
        given["token_type_ids"] = (ids == IMAGE).long()
    if name == "Mistral3":
        given["image_sizes"] = torch.tensor([[28, 28]] * 2)
    return given


def rows_of_text(applied):
    found = [(row.part, row.by) for row in applied.rows if "language_model" in row.name or row.part == "loss"]
    return sorted({(part, by or "") for part, by in found})


@pytest.mark.parametrize("name", MODELS)
def test_the_text_part_is_its_familys(name):
    model = vision_language(name)
    before = copy.deepcopy(model)
    applied = huggingface.apply(model)
    found = [row for row in rows_of_text(applied) if row[1] != "embedding"]  # towers have some of places
    assert {part for part, by in found if by} == {"loss", "mlp", "norm", "qkv", "rope"}
    text, _, _, family = MODELS[name]
    own = made(family, **{key: value for key, value in text.items() if key not in ("model_type", "rope_parameters")})
    expected = sorted({(row.part, row.by or "") for row in huggingface.apply(own).rows if row.by != "embedding"})
    assert [row for row in found if "documents" not in row[1]] == [row for row in expected if "documents" not in row[1]]
    given = batch_of(name)
    assert_alike(step(model, **given), step(before, **given))
    text_alone = {key: given[key] for key in ("input_ids", "labels")}
    text_alone["input_ids"] = text_alone["input_ids"].where(text_alone["input_ids"] != IMAGE, 11)
    assert_alike(step(model, **text_alone), step(before, **text_alone))


def test_tables_of_a_tower_are_not_the_texts():
    model = vision_language("Qwen3VL")
    assert rotation.part_with_tables(model, "model.language_model.layers.0.self_attn") is model.model.language_model
    assert rotation.part_with_tables(model, "model.visual.blocks.0.attn") is model.model.visual
    assert rotation.part_with_tables(model, "lm_head") is model
