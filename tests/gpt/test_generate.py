"""Model.generate: under batch_invariant() its log-probabilities have the bits of the training forward's."""

import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpt.small_models import BIASES, EXPERTS, SHAPE
from ops.calls import needs_triton
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from onepass.gpt import Config, Model, add_adapters
from onepass.gpt import generate as module
from onepass.gpt.generate import Sampling, stops_of

LENGTHS = (5, 1, 70)
NEW = 64
VARIANTS = {
    "llama": {},
    "interleaved": {"rotary_interleaved": True, "rotary_percent": 0.5},
    "gpt-2": BIASES | {"gated_linear_unit": False, "activation_func": "gelu"},
    "heads normed": {"qk_layernorm": True, "layernorm_zero_centered_gamma": True},
    "rope by PyTorch": {"apply_rope_fusion": False, "qk_layernorm": True},
    "no positions": {"position_embedding_type": "none"},
    "softcap": {"final_logit_softcapping": 3.0, "untie_embeddings_and_output_weights": True},
    "experts": EXPERTS | {"moe_aux_loss_coeff": 0.0},
    "bf16": {"params_dtype": "bf16"},
}


@pytest.fixture(autouse=True)
def _formulas(request):
    """The CPU's formulas, unless a test asks for kernels."""
    with onepass.use_backend("auto" if "kernels" in request.node.name else "torch"):
        yield


def made(**options):
    model = Model(Config(**SHAPE | {"max_position_embeddings": 160} | options), seed=2)
    for parameter in model.parameters():
        parameter.data *= 15 if parameter.dim() > 1 else 1  # attention that says something
    return model


def prompts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(SHAPE["vocab_size"], (length,), generator=generator) for length in lengths]


def generators(count):
    return [torch.Generator().manual_seed(at) for at in range(count)]


def in_training(model, given, tokens):
    """The tokens' log-probabilities by the training loss: of each sequence alone, of all in one row, and in a padded batch."""
    wholes = [torch.cat([prompt, row]) for prompt, row in zip(given, tokens, strict=True)]
    inputs, labels = [whole[:-1] for whole in wholes], [whole[1:] for whole in wholes]
    firsts = [len(prompt) - 1 for prompt in given]
    alone = [model(x[None], y[None], reduction="none")[0] for x, y in zip(inputs, labels, strict=True)]
    bounds = torch.tensor([0, *map(len, inputs)]).cumsum(0).int()
    packed = model(torch.cat(inputs)[None], torch.cat(labels)[None], cu_seqlens=bounds, reduction="none")[0]
    padded = model(*(torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (inputs, labels)), reduction="none")
    for rows in (alone, packed.split([*map(len, inputs)]), padded):
        yield torch.stack([-row[first : first + tokens.shape[1]] for row, first in zip(rows, firsts, strict=True)])


def check_bits(model, lengths=LENGTHS, new=NEW, **options):
    given = prompts(lengths)
    with onepass.batch_invariant():
        found = model.generate(given, new, return_log_probs=True, generator=generators(len(given)), **options)
        for at, prompt in enumerate(given):
            own = generators(len(given))[at]
            alone = model.generate(prompt[None], new, return_log_probs=True, generator=own, **options)
            assert torch.equal(alone.tokens[0], found.tokens[at]) and torch.equal(alone.log_probs[0], found.log_probs[at])
        with torch.no_grad():
            for expected in in_training(model, given, found.tokens):
                assert torch.equal(found.log_probs, expected), "log-probabilities differ from the training forward's"
    return found


SAMPLINGS = {"greedy": {"temperature": 0.0}, "drawn": {"temperature": 0.8, "top_k": 20, "top_p": 0.9}}


# each kind of model by one kind of sampling, in turn, and the first by both
@pytest.mark.parametrize(("name", "sampling"), [*zip(VARIANTS, [*SAMPLINGS] * 5, strict=False), ("llama", "drawn")])
def test_log_probabilities_have_the_bits_of_training(name, sampling):
    found = check_bits(made(**VARIANTS[name]), **SAMPLINGS[sampling])
    assert found.tokens.shape == found.log_probs.shape == (3, NEW) and found.log_probs.dtype == torch.float32


@needs_triton
@pytest.mark.parametrize("params_dtype", ("bf16", "fp32"))
def test_kernels_too(params_dtype):
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1}
    check_bits(made(**sizes, params_dtype=params_dtype), (3, 62), 5)


def test_a_cache_of_other_keys_is_caught(monkeypatch):
    """The check sees a hundred-thousandth, of one key."""
    real = module.KeyValueCache.advance

    def advance(cache):
        real(cache)
        for layer in cache.layers:
            layer.keys[:, 0] *= 1.00001

    monkeypatch.setattr(module.KeyValueCache, "advance", advance)
    with pytest.raises(AssertionError, match="training"):
        check_bits(made(), new=12, temperature=0.0)


@pytest.mark.parametrize("name", [*VARIANTS, "native", "no fusion"])
def test_without_the_switch_it_is_right(name):
    options = {"native": {"cross_entropy_fusion_impl": "native"}, "no fusion": dict(Config().reference().to_dict())}
    kept = {"norm_fusion", "norm_linear_fusion", "attention_fusion", "cross_entropy_loss_fusion", "bias_activation_fusion"}
    chosen = VARIANTS.get(name) or {key: value for key, value in options.get(name, {}).items() if name == "native" or key in kept}
    model, given = made(**chosen), prompts()
    found = model.generate(given, 20, temperature=0.0, return_log_probs=True)
    close = {"rtol": 0.02, "atol": 0.1} if name == "bf16" else {"rtol": 1e-4, "atol": 1e-4}
    for expected in in_training(model, given, found.tokens):
        torch.testing.assert_close(found.log_probs, expected, **close)
    if name != "bf16":
        for prompt, row in zip(given, found.tokens, strict=True):
            logits = model(torch.cat([prompt, row])[None])[0]
            assert torch.equal(logits[len(prompt) - 1 : -1].argmax(-1), row)


def test_a_loss_that_balances_experts_is_for_training():
    """Generation adds it to nothing; an evaluation's mean has it; a token's own loss would have all tokens' in it."""
    given = prompts((5,))
    balanced, plain = (made(**EXPERTS | {"moe_aux_loss_coeff": each, "num_layers": 1}) for each in (0.1, 0.0))
    x = given[0][None]
    with onepass.batch_invariant():
        found = balanced.generate(given, 2, return_log_probs=True)
        with torch.no_grad():
            assert torch.equal(found.log_probs, next(in_training(plain, given, found.tokens)))
            assert balanced(x, x) > plain(x, x)
            with pytest.raises(RuntimeError, match="reduction 'none' with moe_aux_loss_coeff can't run under"):
                balanced(x, x, reduction="none")
        with pytest.raises(RuntimeError, match="route with aux can't run under"):
            balanced(x, x)


def test_adapters_take_part():
    model = made()
    add_adapters(model, rank=2)
    before = model.generate(prompts(), 8, temperature=0.0, return_log_probs=True)
    for name, parameter in model.named_parameters():
        if "lora" in name or "adapter" in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(4))
    after = model.generate(prompts(), 8, temperature=0.0, return_log_probs=True)
    assert not torch.equal(before.log_probs, after.log_probs)
    torch.testing.assert_close(after.log_probs, next(in_training(model, prompts(), after.tokens)), rtol=1e-4, atol=1e-4)


# ---- prompts, ends and random numbers ----


def test_prompts_come_in_three_ways():
    model, given = made(), prompts((4, 4, 4))
    bounds = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    results = [
        model.generate(given, 6, temperature=0.0),
        model.generate(torch.stack(given), 6, temperature=0.0),
        model.generate(torch.cat(given)[None], 6, cu_seqlens=bounds, temperature=0.0),
    ]
    assert all(torch.equal(results[0].tokens, each.tokens) for each in results)
    assert results[0].log_probs is None and results[0].tokens.shape == (3, 6)


def test_a_sequence_ends_with_a_stop_token():
    model, given = made(), prompts((4, 9, 3))
    free = model.generate(given, 40, temperature=0.0, return_log_probs=True)
    stop = free.tokens[0, 2].item()
    found = model.generate(given, 40, temperature=0.0, return_log_probs=True, stop_tokens=stop)
    for row in range(3):
        ends = (free.tokens[row] == stop).nonzero().flatten().tolist() or [found.tokens.shape[1] - 1]
        count = ends[0] + 1
        assert found.lengths[row] == count
        assert torch.equal(found.tokens[row, :count], free.tokens[row, :count])
        assert (found.tokens[row, count:] == found.tokens[row, count - 1]).all()
        torch.testing.assert_close(found.log_probs[row, :count], free.log_probs[row, :count])
        assert not found.log_probs[row, count:].any()
    everything = model.generate(given, 40, stop_tokens=range(SHAPE["vocab_size"]), return_log_probs=True)
    assert everything.tokens.shape == everything.log_probs.shape == (3, 1) and everything.lengths.tolist() == [1, 1, 1]


def test_stop_tokens_are_whole_numbers():
    for one in (3, np.int64(3), torch.tensor(3), np.array(3), [3], {3}, torch.tensor([3]), np.array([3]), (np.int64(3),)):
        assert stops_of(one) == (3,)
    assert stops_of(None) == stops_of([]) == () and stops_of(torch.tensor([3, 4])) == stops_of(range(3, 5)) == (3, 4)
    for wrong in (2.7, [2.7], [2, None], torch.tensor(2.7), torch.tensor([2.7]), "3", object()):
        with pytest.raises(TypeError, match="stop_tokens must be a whole number, whole numbers or None, but is"):
            made().generate(prompts(), 2, stop_tokens=wrong)


def test_tokens_are_drawn_by_their_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(20_000, 4)
    generator = torch.Generator().manual_seed(3)

    def shares(**options):
        return torch.bincount(Sampling(generator=generator, **options).choose(logits)[0], minlength=4) / 20_000

    p = logits[0].softmax(-1)
    torch.testing.assert_close(shares(), p, rtol=0, atol=0.02)
    torch.testing.assert_close(shares(temperature=2.0), (logits[0] / 2).softmax(-1), rtol=0, atol=0.02)
    torch.testing.assert_close(shares(top_k=2), torch.cat([torch.zeros(2), p[2:] / p[2:].sum()]), rtol=0, atol=0.02)
    torch.testing.assert_close(shares(top_p=0.7), torch.cat([torch.zeros(2), p[2:] / p[2:].sum()]), rtol=0, atol=0.02)
    assert shares(top_p=0.6).tolist() == shares(top_k=1).tolist() == shares(temperature=0.0).tolist() == [0, 0, 0, 1]
    for temperature in (1e-39, 1e-50, 5e-324):
        assert shares(temperature=temperature).tolist() == [0, 0, 0, 1]
        tied = Sampling(temperature, generator=generator).choose(torch.tensor([0.0, 3.0, 3.0]).expand(200, 3))[0]
        assert tied.unique().tolist() == [1, 2]
    assert shares(top_p=1e-320).tolist() == [0, 0, 0, 1]


class RowsMatter(TorchDispatchMode):
    """Sums of floats are other ones in a batch of one row, as cumsum's may be on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        if func is torch.ops.aten.cumsum.default and found.is_floating_point() and len(found) == 1:
            found[:, :-1] *= 1 - 1e-3
        return found


def test_top_p_adds_no_floats():
    """Whether .5 is reached after two of four equal tokens is a matter of their last bits."""
    logits = torch.zeros(7, 4)
    with RowsMatter():
        choose = lambda rows, at: Sampling(top_p=0.5, generator=generators(200)[at : at + 1] * len(rows)).choose(rows)[0]  # noqa: E731
        alone = torch.stack([choose(logits[:1], at) for at in range(200)])
        among = torch.stack([choose(logits, at)[:1] for at in range(200)])
    assert torch.equal(alone, among) and alone.unique().tolist() == [0, 1]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_logit_that_is_nan_raises(sampling):
    model = made(untie_embeddings_and_output_weights=True)
    model.embedding.word_embeddings.weight.data[7] = float("nan")
    given = [torch.tensor([1, 2]), torch.tensor([3, 7]), torch.tensor([4])]
    for stops in (None, range(SHAPE["vocab_size"])):
        with pytest.raises(RuntimeError, match=r"the highest logit must be finite, but in sequences \[1\] it is NaN or inf"):
            model.generate(given, 1, stop_tokens=stops, **SAMPLINGS[sampling])
    with pytest.raises(RuntimeError, match=r"\[0\]"):
        model.generate(given[2:], 3, temperature=0.0)
    assert model.generate(given[2:], 3, temperature=0.0, stop_tokens=7).tokens.tolist() == [
        [32, 7]
    ]  # nobody reads what follows 7
    model.output_layer.weight.data[3] = float("inf")
    with pytest.raises(RuntimeError, match="NaN or inf"):
        model.generate(given[:1], 3, **SAMPLINGS[sampling])


def test_hidden_states_are_kept_for_log_probabilities_only(monkeypatch):
    real, states = module._hidden_states, []

    def hidden_states(*args):
        h = real(*args)
        states.append(weakref.ref(h))
        living.append(sum(state() is not None for state in states))
        return h

    monkeypatch.setattr(module, "_hidden_states", hidden_states)
    for kept, most in ((False, 2), (True, 8)):
        states.clear()
        living = []
        made().generate(prompts(), 8, return_log_probs=kept)
        assert len(living) == 8 and max(living[:-1]) <= most and (living[-1] > 2) == kept


# ---- what is refused ----


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([torch.tensor([1])], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, but is 0"),
        ([torch.tensor([1])], {"max_new_tokens": 160}, "max_position_embeddings, 160, but the longest would have 161"),
        ([torch.tensor([1])], {"temperature": -1.0}, "temperature must be at least 0"),
        ([torch.tensor([1])], {"top_k": 0}, "top_k must be at least 1, but is 0"),
        ([torch.tensor([1])], {"top_p": 0.0}, "top_p must be above 0"),
        ([torch.tensor([1])], {"generator": []}, "one for each of 1 sequences, but is 0"),
        ([torch.tensor([1]), torch.tensor([], dtype=torch.int64)], {}, "prompt 1 must be"),
        ([torch.tensor([1.0])], {}, "prompt 0 must be"),
        ([], {}, "at least one prompt"),
        (torch.tensor([1]), {}, r"shape \[sequences, tokens\]"),
        ([torch.tensor([1])], {"cu_seqlens": torch.tensor([0, 1])}, "cu_seqlens must be None"),
    ],
)
def test_wrong_arguments_are_named(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        made().generate(tokens, **{"max_new_tokens": 3} | options)


def test_parts_of_a_model_and_dropout_are_refused():
    tokens = torch.tensor([[1, 2]])
    stage = Model(Config(**SHAPE, untie_embeddings_and_output_weights=True), layers=range(1), last=False, seed=1)
    with pytest.raises(ValueError, match="pipeline stage"):
        stage.generate(tokens, 2)
    model = made(hidden_dropout=0.1)
    with pytest.raises(ValueError, match=r"model\.eval"):
        model.generate(tokens, 2)
    assert model.eval().generate(tokens, 2).tokens.shape == (1, 2)
    model.config = model.config.replace(tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 2"):
        model.generate(tokens, 2)


def test_parameters_that_are_divided_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = made()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"its embedding\.word_embeddings\.weight is a DTensor"):
            model.generate(torch.tensor([[1, 2]]), 2)
    finally:
        dist.destroy_process_group()


def test_attention_by_pytorch_is_refused_under_the_switch():
    model = made(attention_fusion=False)
    with onepass.batch_invariant(), pytest.raises(RuntimeError, match="attention_fusion"):
        model(torch.tensor([[1, 2]]))
