"""apply(model, batch_invariant=True): the bits of models, what the report says, what can't be, and what undo leaves."""

import copy
import warnings

import pytest
import torch
from integrations.huggingface.families import VOCABULARY
from integrations.huggingface.families import made as made_with_balance

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import applied as applied_module
from onepass.runtime.batch_invariance import invariant
from onepass.testing.invariance import check_batches, check_packing

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers' and PEFT's own
MODELS = ("Llama", "Qwen3", "Qwen3Moe")
LENGTHS = 5, 9, 3, 12, 1


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


def made(family, **options):
    """Return a tiny model, of a mixture without the loss that balances experts."""
    more = {"output_router_logits": False} if family == "Qwen3Moe" else {}
    return made_with_balance(family, **more | options)


def ids(*shape, seed=0):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def packs(*lengths):
    return [ids(length, seed=length) for length in lengths]


# ---- bits ----


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("family", MODELS)
def test_rows_of_a_batch(family, training, applied):
    model = made(family).train(training)
    applied(model)
    report = check_batches(model, input_ids=ids(5, 9), splits=6)
    report.raise_if_different()
    assert any("self_attn" in name for name in report.looked_at)


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("family", MODELS)
def test_packed_documents(family, training, applied):
    model = made(family).train(training)
    applied(model)
    check_packing(model, packs(*LENGTHS)).raise_if_different()


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("family", MODELS)
def test_padding(family, side, applied):
    """A row's tokens have the bits that they have alone, however many pads are beside them."""
    model = made(family).train()
    applied(model)
    documents, most = packs(*LENGTHS), max(LENGTHS)
    rows, mask = torch.zeros(len(LENGTHS), most, dtype=torch.long), torch.zeros(len(LENGTHS), most, dtype=torch.long)
    places = [slice(most - n, None) if side == "left" else slice(n) for n in LENGTHS]
    for at, (place, document) in enumerate(zip(places, documents, strict=True)):
        rows[at, place], mask[at, place] = document, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    together = model(input_ids=rows, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for at, (place, document) in enumerate(zip(places, documents, strict=True)):
        alone = model(input_ids=document[None], use_cache=False).logits[0]
        assert torch.equal(together[at, place], alone)


def embedding_gradient(model, rows):
    """The gradient of the word embeddings' results: the model's input."""
    embeddings = model.get_input_embeddings()(rows).detach().requires_grad_()
    model(inputs_embeds=embeddings, labels=rows, use_cache=False).loss.mul(rows.numel()).backward()
    return embeddings.grad


@pytest.mark.parametrize("family", MODELS)
def test_gradient_checkpointing_and_the_fused_loss(family, applied):
    model = made(family).train()
    applied(model)
    rows = ids(4, 9)
    before = model(input_ids=rows, labels=rows, use_cache=False).loss
    kept = embedding_gradient(model, rows)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(model(input_ids=rows, labels=rows, use_cache=False).loss, before)
    assert torch.equal(embedding_gradient(model, rows), kept)
    check_batches(model, input_ids=rows, use_cache=False, splits=4).raise_if_different()


@pytest.mark.parametrize("when", ("before", "after"))
def test_with_peft(when, applied):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = made("Llama")
    if when == "before":
        model = peft.get_peft_model(model, config)
        report = applied(model)
    else:
        report = applied(model)
        model = peft.get_peft_model(model, config)
    model.train()
    assert report.rows[-1].why is None
    check_batches(model, input_ids=ids(5, 8), use_cache=False, splits=6).raise_if_different()
    check_packing(model, packs(4, 7)).raise_if_different()


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


def test_a_switch_that_raises_leaves_the_model_as_it_was(monkeypatch):
    """As without the library that has the products."""

    def switch():
        raise RuntimeError("there is no library")

    model = made("Llama")
    monkeypatch.setattr(applied_module, "switch", switch)
    with pytest.raises(RuntimeError, match="no library"):
        huggingface.apply(model, batch_invariant=True)
    assert not [each for each in model.modules() if "_onepass" in vars(each)] and not invariant()
    huggingface.apply(model).undo()


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


def test_the_loss_that_balances_experts_is_refused():
    model = made("Qwen3Moe", output_router_logits=True)
    with pytest.raises(ValueError, match=r"config.output_router_logits must be False with batch_invariant.*but is True"):
        huggingface.apply(model, batch_invariant=True)
    assert not invariant()


@pytest.mark.parametrize("precision", ("fp8", onepass.FP8Recipe(scaling="current")))
def test_scales_of_whole_tensors_are_refused(precision):
    with pytest.raises(ValueError, match=r"FP8Recipe\(scaling='row'\), but has '(delayed|current)' ones"):
        huggingface.apply(made("Llama"), precision=precision, batch_invariant=True)
    assert not invariant()


def test_there_is_no_cache_unless_one_is_asked_for_which_warns(applied):
    model = made("Llama").eval()
    applied(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(input_ids=ids(2, 6)).past_key_values is None
    with pytest.warns(UserWarning, match="attention is transformers' own, whose bits may depend on the batch"):
        assert model(input_ids=ids(2, 6), use_cache=True).past_key_values is not None
    with pytest.warns(UserWarning, match="attention is transformers' own"):
        assert model.generate(input_ids=ids(2, 6), max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (2, 9)


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
        ("GPT2", {}, "transformer (its code doesn't pass a mask on to its layers)"),
    ],
)
def test_the_report_names_what_is_not(family, options, others, applied):
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if family == "GPT2" else {}
    why = applied(made(family, **off), **options).rows[-1].why
    assert why == (others and f"not onepass's, and may mix rows: {others}")


def test_the_report_follows_the_model_and_the_switch(applied):
    model = made("Llama")
    report = applied(model)
    model.model.layers[1].add_module("extra", torch.nn.LayerNorm(8))
    assert report.rows[-1].why == "not onepass's, and may mix rows: model.layers.*.extra"
    assert "batch_invariant" in str(report)
    with onepass.batch_invariant(False):
        assert report.rows[-1].why == "onepass.batch_invariant() is off by now" and report.rows[-1].by is None
