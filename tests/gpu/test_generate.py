"""Model.generate on a GPU: 512 tokens' log-probabilities are 0 apart from the training forward's, and no step waits."""

from contextlib import ExitStack

import pytest
import torch
from gpu.calls import memory_goes_back, nobody_waits  # noqa: F401

import onepass
from onepass.gpt import Config, Model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (1, 37, 300, 64)
SHAPE = {
    "num_layers": 3, "hidden_size": 1024, "ffn_hidden_size": 2816, "num_attention_heads": 16, "num_query_groups": 4,
    "vocab_size": 32000, "max_position_embeddings": 1024, "params_dtype": "bf16",
}  # fmt: skip
VARIANTS = {
    "heads of 64": {},
    "heads of 128": {"num_attention_heads": 8, "num_query_groups": 2},
    "heads of 256": {"num_attention_heads": 4, "num_query_groups": 1},
    "heads normed": {"qk_layernorm": True, "num_attention_heads": 8},
    "gpt-2": {
        "num_query_groups": None, "add_bias_linear": True, "normalization": "LayerNorm", "gated_linear_unit": False,
        "position_embedding_type": "learned_absolute", "activation_func": "gelu",
    },
    "fp32 logits": {"fp32_logits": True, "untie_embeddings_and_output_weights": True},
}  # fmt: skip
NEW = 512


def made(**options):
    model = Model(Config(**SHAPE | options), seed=2, device="cuda")
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.dim() > 1 else 1
    return model


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32000, (length,), generator=generator).cuda() for length in lengths]


def in_training(model, given, tokens):
    """The tokens' log-probabilities by the training loss: alone, packed in one row, in a padded batch; with gradients too."""
    wholes = [torch.cat([prompt, row]) for prompt, row in zip(given, tokens, strict=True)]
    inputs, labels = [whole[:-1] for whole in wholes], [whole[1:] for whole in wholes]
    bounds = torch.tensor([0, *map(len, inputs)]).cumsum(0).int().cuda()
    alone = [model(x[None], y[None], reduction="none")[0] for x, y in zip(inputs, labels, strict=True)]
    packed = model(torch.cat(inputs)[None], torch.cat(labels)[None], cu_seqlens=bounds, reduction="none")[0]
    padded = model(*(torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (inputs, labels)), reduction="none")
    for way, rows in (("alone", alone), ("packed", packed.split([*map(len, inputs)])), ("padded", padded)):
        yield way, torch.stack([-row[len(each) - 1 :][: tokens.shape[1]] for row, each in zip(rows, given, strict=True)]).detach()


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("name", VARIANTS)
def test_log_probabilities_are_0_apart_from_trainings(name, temperature):
    model, given = made(**VARIANTS[name]), prompts()
    with onepass.batch_invariant():
        random = torch.Generator("cuda").manual_seed(3)
        found = model.generate(given, NEW, temperature=temperature, generator=random, return_log_probs=True)
        for way, expected in in_training(model, given, found.tokens):
            apart = (found.log_probs - expected).abs().max().item()
            assert torch.equal(found.log_probs, expected), f"{way}: {apart} apart"
    assert found.log_probs.isfinite().all() and found.tokens.unique().numel() > 20


def test_a_prompt_alone_has_the_tokens_that_it_has_among_others():
    model, given = made(), prompts()
    seeds = lambda: [torch.Generator("cuda").manual_seed(at) for at in range(len(given))]  # noqa: E731
    with onepass.batch_invariant():
        together = model.generate(given, 100, generator=seeds(), return_log_probs=True)
        for at, prompt in enumerate(given):
            alone = model.generate([prompt], 100, generator=seeds()[at], return_log_probs=True)
            assert torch.equal(alone.tokens[0], together.tokens[at])
            assert torch.equal(alone.log_probs[0], together.log_probs[at])


def test_without_the_switch_it_is_near():
    model, given = made(), prompts()
    found = model.generate(given, 64, temperature=0.0, return_log_probs=True)
    for _, expected in in_training(model, given, found.tokens):
        assert (found.log_probs - expected).abs().mean() < 0.05


def test_no_step_waits():
    model, given = made(), prompts()
    model.generate(given, 3)
    real = model.embedding.forward

    def counted(*args):
        steps.append(None)
        if len(steps) == 3:
            stack.enter_context(nobody_waits())
        if len(steps) == 6:  # what comes after the last step asks whether all is finite
            stack.close()
        return real(*args)

    steps = []
    with ExitStack() as stack:
        model.embedding.forward = counted
        model.generate(given, 6)
    assert len(steps) == 6
