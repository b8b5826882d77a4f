"""Losses that are not a causal model's: T5's and Whisper's, which their forwards compute themselves, and masked ones."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import VOCABULARY, assert_alike, step  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402
from onepass.integrations.huggingface.snapshot import FSDP  # noqa: E402


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "max_position_embeddings": 32,
}  # fmt: skip
WHISPER = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 6,
    "max_target_positions": 32, "dropout": 0.0, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3,
    "decoder_start_token_id": 2,
}  # fmt: skip
MODERN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
KINDS = {
    "T5ForConditionalGeneration": ("T5", T5),
    "T5ForConditionalGeneration, untied": ("T5", T5 | {"tie_word_embeddings": False}),  # not scaled before the head
    "BartForConditionalGeneration": ("Bart", BART),  # it adds a bias to its head's products
    "EsmForMaskedLM": ("Esm", BERT | {"pad_token_id": 1, "mask_token_id": 2}),  # as does a module around its head
    "WhisperForConditionalGeneration": ("Whisper", WHISPER),
    "BertForMaskedLM": ("Bert", BERT),
    "RobertaForMaskedLM": ("Roberta", BERT | {"pad_token_id": 1}),
    "ModernBertForMaskedLM": ("ModernBert", {**BERT, **MODERN}),
    "BertLMHeadModel": ("Bert", BERT | {"is_decoder": True}),
}


def made(kind):
    family, options = KINDS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, kind.partition(",")[0])(getattr(transformers, f"{family}Config")(**options)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        if kind.startswith("Bart"):
            model.final_logits_bias.normal_()
    return model


def inputs(kind):
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(7))
    labels = ids.flip(1).masked_fill(torch.arange(9) % 3 == 1, -100)
    if kind.startswith("Whisper"):
        return {"input_features": torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(8)), "labels": labels}
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_without_logits(kind):
    model, given = made(kind), inputs(kind)
    before = copy.deepcopy(model)
    applied = huggingface.apply(model)
    assert [row.by for row in applied.rows if row.part == "loss" and row.by != "embedding"] == ["linear_cross_entropy"]
    expected = step(before, **given)
    copies = {"itself": model, "copy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    for each in copies.values():
        assert_alike(step(each, **given), expected, 1e-4)
        assert model(**given).logits.shape == (2, 9, 0)
    outputs = model(**given, return_dict=False)
    torch.testing.assert_close(outputs[0].detach(), expected[0], rtol=1e-4, atol=1e-4)
    assert isinstance(outputs, tuple) and outputs[1].shape == (2, 9, 0)
    for each in (model.eval(), before.eval()):
        each.found = each(**given)
    torch.testing.assert_close(model.found.logits, before.found.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.found.loss, before.found.loss, rtol=1e-4, atol=1e-4)
    applied.undo()
    assert model.train()(**given).logits.shape == (2, 9, VOCABULARY)


def test_a_bias_of_another_type_is_added_by_the_models_own_code():
    model, given = made("BartForConditionalGeneration").bfloat16(), inputs("BartForConditionalGeneration")
    huggingface.apply(model)
    assert model(**given).logits.shape == (2, 9, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(**given).logits.shape == (2, 9, 0)
    model.bfloat16().final_logits_bias = model.final_logits_bias.float()
    assert model(**given).logits.shape == (2, 9, VOCABULARY)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("T5ForConditionalGeneration", "BertForMaskedLM"))
def test_compiled_as_one_graph(kind):
    model, given = made(kind), inputs(kind)
    before = copy.deepcopy(model)
    huggingface.apply(model)
    assert_alike(step(torch.compile(model, fullgraph=True, backend="aot_eager"), **given), step(before, **given), 1e-4)


@pytest.mark.parametrize("where", ("head", "around", "global", "FSDP"))
def test_who_looks_at_logits_gets_them(where):
    """A hook on the head, on a module around it, or on all modules; FSDP's on the head, which wait for a gradient of logits."""
    model, given = made("BertForMaskedLM"), inputs("BertForMaskedLM")
    before, seen = copy.deepcopy(model), []
    huggingface.apply(model)

    def hook(module, args, result):
        if module in (model.cls, model.cls.predictions.decoder, before.cls, before.cls.predictions.decoder):
            seen.append(result.shape)
            return 2 * result
        return None

    hook.__module__ = FSDP if where == "FSDP" else hook.__module__
    for each in (model, before):
        owner = {"head": each.cls.predictions.decoder, "FSDP": each.cls.predictions.decoder, "around": each.cls}.get(where)
        if owner is not None:
            owner.register_forward_hook(hook)
    handle = torch.nn.modules.module.register_module_forward_hook(hook) if where == "global" else None
    try:
        assert_alike(step(model, **given), step(before, **given), 1e-4)
    finally:
        if handle is not None:
            handle.remove()
    assert set(seen) == {(2, 9, VOCABULARY)} and len(seen) == (4 if where == "global" else 2)


LEFT = {
    "BertForPreTraining": ("Bert", BERT, "its forward can't be followed"),
    "DistilBertForMaskedLM": ("DistilBert", {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}, "its forward doesn't"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT)
def test_losses_that_are_left_say_why(kind):
    family, options, why = LEFT[kind]
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**{"vocab_size": 50, **options}))
    (row,) = (row for row in huggingface.apply(model).rows if row.part == "loss" and row.by != "embedding")
    assert row.by is None and row.why.startswith(why), row
