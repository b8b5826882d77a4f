"""transformers' attn_implementation="onepass": `onepass.attention` without `apply`, beside sdpa and eager."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import SMALL, VOCABULARY, assert_alike, batch, made, step  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_bidirectional_mask, create_causal_mask  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402
from onepass.integrations.huggingface import attention_interface, attention_masks, documents  # noqa: E402
from onepass.integrations.huggingface.attention_masks import Sight, onepass_mask, sight_of  # noqa: E402
from onepass.integrations.huggingface.documents import documents_of_padding  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*RoPE scaling factor", "ignore:.*gradient_checkpointing:FutureWarning")


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


@pytest.fixture
def attended(monkeypatch):
    """Return the calls that come to `onepass.attention`: their documents and window."""
    calls, attend = [], attention_interface.attend_heads

    def record(q, k, v, documents, **options):
        calls.append((documents, options["window"]))
        return attend(q, k, v, documents, **options)

    monkeypatch.setattr(attention_interface, "attend_heads", record)
    return calls


FAMILIES = {
    "Llama": "sdpa",
    "Mistral": "sdpa",
    "Gemma2": "eager",
    "GptOss": "eager",
    "Qwen3": "sdpa",
}  # and what has all it needs
OPTIONS = {"Gemma2": {"attn_logit_softcapping": 0.1}, "GptOss": {"output_router_logits": False}}  # a softcap of small scores
LENGTHS = torch.tensor([0, 4, 10, 12], dtype=torch.int32)
PACKED = {"position_ids": torch.tensor([[*range(4), *range(6), *range(2)]]), "use_cache": False}
BOUNDARIES = {"cu_seq_lens_q": LENGTHS, "cu_seq_lens_k": LENGTHS, "max_length_q": 6, "max_length_k": 6}


def padded(side):
    given = batch(masked=True)
    if side == "left":
        given["attention_mask"], given["labels"] = (
            given["attention_mask"].flip(1),
            given["labels"].masked_fill(given["attention_mask"].flip(1) == 0, -100),
        )
        given["labels"][:, :5] = -100  # a hidden token predicts the first kept one
    return given


def packed():
    whole = batch()
    return {"input_ids": whole["input_ids"][:1], "labels": whole["labels"][:1], **PACKED}


BATCHES = {
    "rows": batch,
    "padded on the right": lambda: padded("right"),
    "padded on the left": lambda: padded("left"),
    "packed": packed,
}


COMPARED = [  # gpt-oss's own masks part no documents by positions
    (family, kind) for family in FAMILIES for kind in BATCHES if (family, kind) != ("GptOss", "packed")
]


def pair(model, other="sdpa", name="onepass"):
    before = copy.deepcopy(model)
    before.set_attn_implementation(other)
    model.set_attn_implementation(name)
    return model, before


# ---- causal models ----


@pytest.mark.parametrize(("family", "kind"), COMPARED)
def test_losses_and_gradients(family, kind, attended):
    model, before = pair(made(family, **OPTIONS.get(family, {})), FAMILIES[family])
    assert_alike(step(model, **BATCHES[kind]()), step(before, **BATCHES[kind]()))
    assert len(attended) == 2
    assert all((found is None) is (kind == "rows") for found, _ in attended)
    assert [window for _, window in attended] == {"Mistral": [5, 5]}.get(
        family, [5, None] if FAMILIES[family] == "eager" else [None] * 2
    )


@pytest.mark.parametrize("kind", BATCHES)
def test_in_fp64(kind, attended):
    model, before = pair(made("Mistral").double())
    assert_alike(step(model, **BATCHES[kind]()), step(before, **BATCHES[kind]()), 1e-6)  # transformers' norms and loss are fp32


def test_by_kernels_a_document_has_its_own_bits():
    q, k, v = (torch.randn(1, heads, 12, 16).bfloat16().requires_grad_() for heads in (4, 2, 2))
    module, dy = SimpleNamespace(is_causal=True, training=True), torch.randn(1, 12, 4, 16).bfloat16()

    def attend(first, end, **options):
        parts = [x.detach()[:, :, first:end].requires_grad_() for x in (q, k, v)]
        y = attention_interface.onepass_attention_forward(module, *parts, None, softcap=20.0, **options)[0]
        return y.detach(), *(x.transpose(1, 2) for x in torch.autograd.grad(y, parts, dy[:, first:end]))

    with onepass.use_backend("triton"):
        together = attend(0, 12, cu_seq_lens_q=LENGTHS, cu_seq_lens_k=LENGTHS)
        for first, end in ((0, 4), (4, 10), (10, 12)):
            for found, alone in zip(together, attend(first, end), strict=True):
                assert torch.equal(found[:, first:end], alone)


def test_boundaries_need_no_positions(attended):
    given = packed() | BOUNDARIES
    model, before = pair(made())
    expected = step(before, **packed())
    del given["use_cache"]
    assert_alike(step(model, **given), expected)
    assert all(found is LENGTHS for found, _ in attended)


def test_positions_that_begin_again_part_documents_in_spite_of_a_cache(attended, monkeypatch):
    """As transformers has it with flash attention. Its masks don't look at them then."""
    looks, look = [], documents.documents_of_rows
    monkeypatch.setattr(
        attention_interface, "documents_of_rows", lambda *args, **options: looks.append(1) or look(*args, **options)
    )
    model, before = pair(made())
    given = packed()
    expected = step(before, **given)
    assert_alike(step(model, **given | {"use_cache": True}), expected)
    assert len(looks) == 1  # for both layers
    assert_alike(step(model, **given | {"use_cache": True, "attention_mask": torch.ones(1, 12)}), expected)


def test_positions_without_a_mask(attended, monkeypatch):
    """As other code calls the function: the host looks once for all layers, and a graph has the same documents."""
    looks, look = [], documents.documents_of_rows
    monkeypatch.setattr(
        attention_interface, "documents_of_rows", lambda *args, **options: looks.append(1) or look(*args, **options)
    )
    torch.manual_seed(7)
    module, q, positions = (
        SimpleNamespace(is_causal=True, training=True),
        torch.randn(1, 2, 12, 8),
        PACKED["position_ids"].clone(),
    )

    def attend(q, positions):
        return attention_interface.onepass_attention_forward(module, q, q, q, None, position_ids=positions, sliding_window=3)[0]

    expected = [attend(q, positions) for _ in range(3)][-1]
    assert len(looks) == 1 and attended[0][0].equal(LENGTHS)
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="eager")(q, positions), expected)
    positions.copy_(torch.arange(12))  # in place: they are looked at anew
    assert (attend(q, positions) - expected)[:, 4:].abs().amax() > 0.1 and len(looks) == 2
    with torch.inference_mode():
        kept = PACKED["position_ids"].clone()
        torch.testing.assert_close(attend(q, kept), expected)
        kept.copy_(positions)
        torch.testing.assert_close(attend(q, kept), attend(q, positions))


def test_values_of_another_size_than_keys(attended):
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = transformers.DeepseekV3Config(**SMALL | sizes | {"num_key_value_heads": 4, "first_k_dense_replace": 2})
    model, before = pair(transformers.AutoModelForCausalLM.from_config(config))
    assert_alike(step(model, **padded("left")), step(before, **padded("left")))
    assert len(attended) == 2


@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointed(reentrant, attended):
    model, before = pair(made("Mistral"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_alike(step(model, **packed()), step(before, **packed()))
    assert len(attended) == 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's compiler reads it
@pytest.mark.parametrize("kind", ("padded on the left", "packed"))
def test_compiled_layers(kind):
    torch.compiler.reset()
    model, before = pair(made("Gemma2", **OPTIONS["Gemma2"]), "eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert_alike(step(model, **BATCHES[kind]()), step(before, **BATCHES[kind]()))


@pytest.mark.parametrize("kind", ("padded on the left", "boundaries"))
def test_compiled(kind):
    torch.compiler.reset()
    model, before = pair(made(num_hidden_layers=1))
    given = BATCHES["packed" if kind == "boundaries" else kind]() | {"use_cache": False}
    expected = step(before, **given)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_alike(step(compiled, **given | (BOUNDARIES if kind == "boundaries" else {})), expected)


@pytest.mark.parametrize("cache", (None, "static"))
@pytest.mark.parametrize("family", FAMILIES)
def test_generation(family, cache, attended):
    model, before = pair(made(family, **OPTIONS.get(family, {})).eval(), FAMILIES[family])
    given = {name: value for name, value in padded("left").items() if name != "labels"}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    assert torch.equal(model.generate(**given, **options), before.generate(**given, **options))
    assert cache == "static" or len(attended) == 2  # the prompt, in two layers
    alone = {"input_ids": given["input_ids"][:1]}
    assert torch.equal(model.generate(**alone, **options), before.generate(**alone, **options))


def test_a_model_that_is_loaded(tmp_path, attended):
    made("Mistral").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="onepass").train()
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert len(attended) == 2


def test_trainer(tmp_path, attended):
    data = [{"input_ids": torch.randint(3, VOCABULARY, (length,)).tolist()} for length in (5, 7, 4, 8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, save_strategy="no", report_to="none", use_cpu=True
    )
    model = made()
    model.set_attn_implementation("onepass")
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    transformers.Trainer(model, arguments, collator, data).train()
    assert [len(found) for found, _ in attended] == [5, 5]


@pytest.mark.parametrize("family", ("Mistral", "GptOss"))
def test_apply_too(family):
    model, before = pair(made(family, **OPTIONS.get(family, {})), FAMILIES[family])
    plain = copy.deepcopy(before)
    found, expected = huggingface.apply(model), huggingface.apply(plain)
    assert [(row.name, row.by) for row in found.rows] == [(row.name, row.by) for row in expected.rows]
    for kind in ("rows", "padded on the left"):
        assert_alike(step(model, **BATCHES[kind]()), step(before, **BATCHES[kind]()))
    found.undo()
    assert_alike(step(model, **batch()), step(before, **batch()))


# ---- encoders, and attention to other states ----

_TINY = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
_STACKS = {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
}
ENCODERS = {
    "Bert": _TINY | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "ModernBert": _TINY | {"local_attention": 6, "global_attn_every_n_layers": 2} | _SPECIAL,
}
BOTH_STACKS = {  # and the calls of attention that `onepass.attention` takes
    "Bart": ({"vocab_size": VOCABULARY, "d_model": 32, "dropout": 0.0, "decoder_start_token_id": 2} | _STACKS, 1),
    "T5": (
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "num_layers": 1,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "d_ff": 48,
        },
        0,
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name, attended):
    config = getattr(transformers, f"{name}Config")(**ENCODERS[name])
    model, before = pair(transformers.AutoModelForMaskedLM.from_config(config))
    for kind in ("rows", "padded on the left"):
        assert_alike(step(model, **BATCHES[kind]()), step(before, **BATCHES[kind]()))
    assert len(attended) == 4
    assert {window for _, window in attended} == ({None} if name == "Bert" else {None, (3, 3)})


@pytest.mark.parametrize("name", BOTH_STACKS)
def test_padding_hides_keys_from_queries_of_other_tokens(name, attended):
    """Here as many queries as keys: the decoder's tokens stand where the encoder's padding is."""
    sizes, calls = BOTH_STACKS[name]
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model, before = pair(kind(getattr(transformers, f"{name}Config")(**sizes)))
    given = padded("left") | {"labels": batch()["labels"]}
    assert_alike(step(model, **given), step(before, **given))
    assert len(attended) == calls


def test_pictures(attended):
    config = transformers.ViTConfig(**{**_TINY, "vocab_size": None}, image_size=8, patch_size=4)
    model, before = pair(transformers.ViTModel(config))
    pixels = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(pixels).last_hidden_state, before(pixels).last_hidden_state)
    assert len(attended) == 2


# ---- masks ----

LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
HOLES = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


def mask_by(implementation, create=create_causal_mask, mask=None, **options):
    config = SimpleNamespace(_attn_implementation=implementation, sliding_window=2)
    config = SimpleNamespace(**vars(config), **options.pop("config", {}))
    no_cache = () if "bidirectional" in create.__name__ else (None,)  # its name differs between versions
    return create(config, torch.zeros(2, 6, 4), mask, *no_cache, **options)


MARKED = {
    "causal": {},
    "a window": {"create": masking_utils.create_sliding_window_causal_mask},
    "padded": {"mask": LEFT},
    "a window, padded": {"create": masking_utils.create_sliding_window_causal_mask, "mask": LEFT},
    "packed": {"position_ids": POSITIONS},
    "a window, packed": {"create": masking_utils.create_sliding_window_causal_mask, "position_ids": POSITIONS},
    "bidirectional": {"create": create_bidirectional_mask},
    "bidirectional, padded": {"create": create_bidirectional_mask, "mask": LEFT},
    "a window on both sides": {"create": masking_utils.create_bidirectional_sliding_window_mask},
    "a window on both sides, padded": {"create": masking_utils.create_bidirectional_sliding_window_mask, "mask": LEFT},
}


@pytest.mark.parametrize("what", MARKED)
def test_markers_say_what_masks_hide(what):
    marker, eager = mask_by("onepass", **MARKED[what]), mask_by("eager", **MARKED[what])
    sight = sight_of(marker)
    assert marker.untyped_storage().nbytes() <= 28
    expected = torch.ones(2, 1, 6, 6, dtype=torch.bool) if eager is None else (eager == 0).expand(2, 1, 6, 6)
    found = sight.mask(2, 6, marker.device)
    found = torch.ones_like(expected) if found is None else found.expand(2, 1, 6, 6)
    kept = LEFT.bool() if "padded" in what else torch.ones(2, 6, dtype=torch.bool)
    assert torch.equal(found[:, 0][kept], expected[:, 0][kept])


NOT_MARKED = {
    "an overlay": {"or_mask_function": lambda b, h, q, k: k == 0},
    "another": {"and_mask_function": lambda b, h, q, k: k != 1},
    "blocks": {"block_sequence_ids": torch.tensor([[0, 0, -1, -1, 1, 1]] * 2)},
    "blocks, packed": {"block_sequence_ids": torch.tensor([[0, 0, -1, -1, 1, 1]] * 2), "position_ids": POSITIONS},
    "chunks": {"create": masking_utils.create_chunked_causal_mask, "config": {"attention_chunk_size": 4}},
    "holes": {"mask": HOLES},
    "a mask that is asked for": {"allow_is_causal_skip": False},
    "more keys than queries": {"mask": torch.ones(2, 9)},
    "of other states": {"create": create_bidirectional_mask, "mask": LEFT[:, :4], "encoder_hidden_states": torch.zeros(2, 4, 4)},
}


@pytest.mark.parametrize("what", NOT_MARKED)
def test_other_masks_are_sdpas(what):
    found, expected = mask_by("onepass", **NOT_MARKED[what]), mask_by("sdpa", **NOT_MARKED[what])
    assert found.dtype == torch.bool
    assert torch.equal(found, expected)


def test_a_mask_function_of_ones_own_is_no_marker():
    ask = {"mask_function": lambda b, h, q, k: k <= q, "attention_mask": LEFT.bool()}
    assert onepass_mask(2, 6, 6, **ask).dtype == torch.bool


@pytest.mark.parametrize("window", (None, 0, 4))
@pytest.mark.parametrize("causal", (True, False))
def test_a_marker_keeps_what_it_says(causal, window):
    for bounds in (None, LENGTHS):
        for is_padded in (False, True):
            found = sight_of(Sight(causal, window, bounds, is_padded).marker("cpu"))
            assert found[:2] == (causal, window) and found.padded is is_padded
            assert found.documents is None if bounds is None else torch.equal(found.documents, bounds)
    assert sight_of(torch.ones(2, 1, 6, 6, dtype=torch.bool)) is None
    assert sight_of(LENGTHS.view(-1, 1, 1, 1)) is None  # apply's


def test_padding_without_a_look():
    assert documents_of_padding(LEFT).tolist() == [0, 2, 6, 6, 6, 12, 12]
    assert documents_of_padding(LEFT.flip(1)).tolist() == [0, 0, 4, 6, 6, 12, 12]
    assert documents_of_padding(torch.zeros(1, 3)).tolist() == [0, 0, 3, 3]
    assert set(documents_of_padding(HOLES).tolist()) == {-1}


@pytest.mark.parametrize("side", ("left", "right"))
def test_documents_that_no_kernel_takes_are_a_mask(side, attended, monkeypatch):
    """As on a GPU in fp32, and in graphs of a CPU: nobody reads the boundaries."""
    monkeypatch.setattr(attention_interface, "are_readable", lambda documents: False)
    for family in ("Mistral", "Gemma2"):
        model, before = pair(made(family, **OPTIONS.get(family, {})), FAMILIES[family])
        assert_alike(step(model, **padded(side)), step(before, **padded(side)))
    assert not attended


def test_holes_that_nobody_looks_for_are_nan(monkeypatch):
    monkeypatch.setattr(attention_interface, "are_readable", lambda documents: False)
    monkeypatch.setattr(attention_masks, "can_count", lambda mask: False)
    model = made().eval()
    model.set_attn_implementation("onepass")
    mask = torch.ones(2, 12)
    mask[0, 4] = 0
    assert model(batch()["input_ids"], attention_mask=mask).logits.isnan().all()


# ---- what is refused ----


def attend(mask=None, tokens=6, keys=6, **options):
    q, k = torch.randn(2, 4, tokens, 8), torch.randn(2, 2, keys, 8)
    return attention_interface.onepass_attention_forward(SimpleNamespace(is_causal=True, training=True), q, k, k, mask, **options)


class Softcapped(torch.nn.Module):
    """A module whose code has no eager attention."""

    num_key_value_groups = 1

    def forward(self, hidden_states, others):
        pass


PADDING = mask_by("onepass", mask=LEFT)
REFUSED = {
    "dropout of attention must be 0 .* but is 0.1": {"dropout": 0.1},
    "output_attentions must be False": {"output_attentions": True},
    "indices must be None": {"indices": torch.zeros(1)},
    r"attention_mask must be bool or floating, .* is torch.int64 \(2, 6\)": {"mask": LEFT},
    "attention_mask must be bool or floating, .* is a str": {"mask": "causal"},
    "cu_seq_lens_q must not be given with an attention_mask": {"mask": PADDING, "cu_seq_lens_q": LENGTHS},
    "must be boundaries of documents in one row": {"cu_seq_lens_q": LENGTHS},
    "cu_seq_lens_q must be None where there are more or fewer keys": {"cu_seq_lens_q": LENGTHS, "keys": 7, "is_causal": False},
    "key must have query's rows and tokens, 2 and 6, .* but has 2 and 7": {"mask": PADDING, "keys": 7},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words):
    with pytest.raises(ValueError, match=words):
        attend(**REFUSED[words])


@pytest.mark.parametrize(
    "options", ({"tokens": 1, "is_causal": False}, {"mask": torch.ones(2, 1, 6, 6).bool()}), ids=("cache", "mask")
)
def test_what_goes_to_pytorchs_attention_is_refused_under_batch_invariant(options):
    with onepass.batch_invariant(), pytest.raises(RuntimeError, match=r"fewer queries than keys, or by a mask .*batch_invariant"):
        attend(**options)
    with onepass.batch_invariant():
        attend()


def test_a_softcap_under_a_mask_needs_the_models_own_code():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="Softcapped has no eager_attention_forward"):
        attention_interface.onepass_attention_forward(Softcapped(), q, q, q, torch.ones(1, 1, 3, 3).bool(), softcap=5.0)


def test_a_model_that_asks_for_dropout():
    model = made(attention_dropout=0.1)
    model.set_attn_implementation("onepass")
    with pytest.raises(ValueError, match="set the configuration's"):
        model(**batch())
    model.eval()(**batch())


def test_a_model_whose_attention_has_no_interface_raises():
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="onepass")
    with pytest.raises(RuntimeError, match="must match the size"):
        model(**padded("left"))


def test_the_name_is_registered_once(monkeypatch):
    assert ALL_ATTENTION_FUNCTIONS["onepass"] is attention_interface.onepass_attention_forward
    assert ALL_MASK_ATTENTION_FUNCTIONS["onepass"] is onepass_mask
    monkeypatch.setattr(attention_interface, "onepass_attention_forward", None)
    attention_interface.register()
    assert ALL_ATTENTION_FUNCTIONS["onepass"] is not None
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    attention_interface.register()  # without transformers
