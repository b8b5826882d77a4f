"""Runs of `onepass train` that decide on a CUDA graph have the bits of runs without: with dropout, eight bits and adapters."""

import pytest
import torch
from gpu.calls import memory_goes_back, other_stream  # noqa: F401  # the first is a fixture

from onepass.gpt import preset
from onepass.train import measured_steps
from onepass.train.batches import TokenBatch
from onepass.train.layout import ParallelLayout
from onepass.train.measured_steps import MeasuredSteps
from onepass.train.options import Options
from onepass.train.setup import make

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
GPT2 = {  # dropout and adapters: a Llama's checkpoints of Hugging Face have no dropout
    "normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "add_bias_linear": True,
    "gated_linear_unit": False, "activation_func": "gelu",
}  # fmt: skip
KINDS = {
    "hidden dropout": ({"hidden_dropout": 0.1}, {}),
    "dropout, recomputed": ({"hidden_dropout": 0.1, "recompute_granularity": "selective"}, {}),
    "eight bits": ({"fp8_format": "hybrid", "fp8_recipe": "delayed"}, {}),
    "adapters": ({}, {"lora_rank": 4}),
    "adapters, dropout": ({**GPT2, "hidden_dropout": 0.1}, {"lora_rank": 4}),
}


def steps_of(config, options, count=14):
    """Losses, norms and the next random number of each step, which is seeded as a run seeds it; and what was said."""
    said, found = [], []
    made = make(config, options, ParallelLayout(torch.device("cuda", 0)), say=said.append)
    tokens = torch.randint(config.vocab_size, (count, 8, 129), generator=torch.Generator().manual_seed(1)).cuda()
    for number, batch in enumerate(tokens):
        torch.manual_seed(number)
        loss, norm = made.steps.run(TokenBatch(batch[:, :-1], batch[:, 1:]))
        made.update.step(1e-2)
        found.append((loss.item(), norm.item(), torch.rand(1, device="cuda").item()))
    return made.steps, found, [line for line in said if line.startswith("CUDA graph")]


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_a_run_without(kind, monkeypatch):
    monkeypatch.setattr(measured_steps, "_WAITS", 0.0)
    if kind == "eight bits" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs products in eight bits")
    changes, more = KINDS[kind]
    config = preset("tiny", params_dtype="bf16", **changes)
    options = Options(micro_batch_size=4, release_main_grads=False, **more)
    steps, found, said = steps_of(config, options)
    _, expected, _ = steps_of(config, options.replace(cuda_graphs=False))
    assert type(steps) is MeasuredSteps and steps.replays and said[0].startswith("CUDA graph: captured, as")
    assert found == expected
