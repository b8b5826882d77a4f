"""apply(model, batch_invariant=True): what the report says, what can't be, and what undo leaves."""

import copy
import warnings

import pytest
import torch
from integrations.huggingface.families import VOCABULARY, made

import onepass
from onepass.integrations import huggingface
from onepass.runtime.batch_invariance import invariant

MODELS = ("Llama", "Qwen3", "Qwen3Moe")


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield
    assert not invariant()


@pytest.fixture
def applied(request):
    """A function that applies onepass, which the test's end takes back."""

    def apply(model, **options):
        result = huggingface.apply(model, batch_invariant=True, **options)
        request.addfinalizer(lambda: result._patches and result.undo())
        return result

    return apply


def ids(*shape, seed=0):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


# ---- the switch ----


def test_forward_and_backward_are_under_it_and_undo_takes_it_back():
    model, seen = made("Llama"), []
    applied = huggingface.apply(model, batch_invariant=True)
    result = model(input_ids=ids(2, 6), labels=ids(2, 6)).loss
    result.register_hook(lambda _: seen.append(invariant()))
    result.backward()
    assert seen == [True] and invariant()
    applied.undo()
    assert not invariant()
    with pytest.raises(RuntimeError, match="nothing to undo"):
        applied.undo()


@pytest.mark.parametrize("first_ends_first", (True, False))
def test_two_models_keep_it_until_both_are_undone(first_ends_first):
    models = [huggingface.apply(made("Llama"), batch_invariant=True) for _ in range(2)]
    plain = huggingface.apply(made("Llama"))
    first, second = models if first_ends_first else models[::-1]
    first.undo()
    assert invariant()
    plain.undo()
    assert invariant()
    second.undo()
    assert not invariant()


def test_what_fails_leaves_it_off():
    with pytest.raises(ValueError, match="there is nothing to replace"):
        huggingface.apply(torch.nn.Linear(4, 4), batch_invariant=True)
    assert not invariant()


def test_a_copy_needs_no_switch_of_its_own(applied):
    model = made("Llama")
    applied(model)
    copied, rows = copy.deepcopy(model), ids(2, 6)
    assert torch.equal(copied(input_ids=rows, use_cache=False).logits, model(input_ids=rows, use_cache=False).logits)


# ---- what can't be ----


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_dropout": 0.1}, r"model.layers.0.self_attn.attention_dropout must be 0 with batch_invariant.*but is 0.1"),
        ({"family": "GPT2"}, r"transformer.drop.p must be 0 with batch_invariant, as what is drawn depends on a token's place"),
    ],
)
def test_dropout_is_refused_by_name(changes, said):
    if changes == {"family": "GPT2"}:
        import transformers

        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY))
    else:
        model = made("Llama", **changes)
    with pytest.raises(ValueError, match=said):
        huggingface.apply(model, batch_invariant=True)
    assert not invariant() and not [each for each in model.modules() if "_onepass" in vars(each)]


@pytest.mark.parametrize("precision", ("fp8", onepass.FP8Recipe(scaling="current")))
def test_scales_of_whole_tensors_are_refused(precision):
    with pytest.raises(ValueError, match=r"FP8Recipe\(scaling='row'\), but has '(delayed|current)' ones"):
        huggingface.apply(made("Llama"), precision=precision, batch_invariant=True)
    assert not invariant()


def test_attention_by_transformers_warns(applied):
    model = made("Llama").eval()
    applied(model)
    with pytest.warns(UserWarning, match="attention is transformers' own, whose bits may depend on the batch"):
        model(input_ids=ids(2, 6), use_cache=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=ids(2, 6), use_cache=False)


# ---- the report ----


@pytest.mark.parametrize("family", MODELS)
def test_the_report_of_a_model_that_is_all_onepass(family, applied):
    last = applied(made(family)).rows[-1]
    assert (last.part, last.by, last.why) == ("bits", "batch_invariant, of the process", None)


@pytest.mark.parametrize(
    ("family", "options", "others"),
    [
        ("Llama", {"qkv": False}, "model.layers.*.self_attn"),
        ("Llama", {"rope": False}, "model.layers.*.self_attn"),
        ("Qwen3Moe", {"mlp": False}, "model.layers.*.mlp.experts, model.layers.*.mlp.gate"),
        ("Llama", {"loss": False, "mlp": False, "norm": True}, None),
    ],
)
def test_the_report_names_what_is_not(family, options, others, applied):
    why = applied(made(family), **options).rows[-1].why
    assert why == (others and f"not onepass's, and may mix rows: {others}")


def test_the_report_follows_the_model_and_the_switch(applied):
    model = made("Llama")
    report = applied(model)
    model.model.layers[1].add_module("extra", torch.nn.LayerNorm(8))
    assert report.rows[-1].why == "not onepass's, and may mix rows: model.layers.*.extra"
    assert "batch_invariant" in str(report)
    with onepass.batch_invariant(False):
        assert report.rows[-1].why == "onepass.batch_invariant() is off by now" and report.rows[-1].by is None
