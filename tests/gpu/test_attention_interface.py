"""transformers' attn_implementation="onepass" on a GPU, without `apply`: as near as the model's own attention in bf16."""

import copy

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from gpu.test_huggingface import LARGER, error
from integrations.huggingface.families import batch, made, step

from onepass.integrations import huggingface  # noqa: F401  (it registers the name)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAMILIES = {"Llama": "sdpa", "Mistral": "sdpa", "Gemma2": "eager", "GptOss": "eager", "Qwen3": "sdpa"}  # and what has all of it
LENGTHS = (31, 33, 32)


def packed():
    whole = batch(tokens=sum(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {name: whole[name][:1] for name in ("input_ids", "labels")} | {"position_ids": positions}


@pytest.mark.parametrize("kind", ["rows", "padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_as_near_as_the_models_own(family, kind):
    if (family, kind) == ("GptOss", "packed"):
        pytest.skip("the model's own masks part no documents by positions")
    of_experts = {"num_experts_per_tok": 4, "output_router_logits": False} if family == "GptOss" else {}
    exact = made(family, **LARGER, head_dim=32, **of_experts).cuda()
    model, plain = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    model.set_attn_implementation("onepass")
    for other in (plain, exact):
        other.set_attn_implementation(FAMILIES[family])
    given = packed() if kind == "packed" else batch(masked=kind == "padded", tokens=48)
    given = {name: value.cuda() for name, value in given.items()}
    found, own, expected = (step(each, **given, use_cache=False) for each in (model, plain, exact))
    assert error(found, expected) < 1.25 * error(own, expected)
    torch.testing.assert_close(found[0].float(), expected[0].float(), rtol=5e-3, atol=5e-3)


def test_compiled():
    model = made("Llama", **LARGER).cuda().bfloat16()
    model.set_attn_implementation("onepass")
    compiled = copy.deepcopy(model)
    compiled.forward = torch.compile(compiled.forward)
    given = {name: value.cuda() for name, value in batch(tokens=48).items()}
    found, expected = (step(each, **given, use_cache=False) for each in (compiled, model))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2)
