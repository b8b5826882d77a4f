"""Packed and padded batches, windows, softcaps and sinks: transformers' numbers, without its masks."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import FAMILIES, VOCABULARY, assert_alike, batch, both, made, step  # noqa: E402
from integrations.huggingface.trainer import trained  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402
from onepass.integrations.huggingface import attentions, documents, interfaces, masks  # noqa: E402
from onepass.integrations.huggingface.masks import Stack  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*position_ids begin again within a row:UserWarning")  # test_masks.py has it
PACKED = [  # whose masks onepass makes
    *sorted(set(FAMILIES) - {"GPT2", "OPT"}), "Ernie4_5_Moe", "Glm4", "Llama4Text", "Ministral3", "MiniMaxM2", "Olmo3", "SmolLM3",
]  # fmt: skip
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}  # Qwen 2's second layer
NAMED = ("Llama", "Qwen3", "Mistral", "Ministral3", "Gemma2", "Gemma3Text", "GptOss")
LENGTHS = (7, 5, 1, 11)


@pytest.fixture
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


by_pytorch = pytest.mark.usefixtures("_by_pytorch")


def padded(side):
    given = batch()
    mask = torch.ones_like(given["input_ids"])
    mask[0, -4:] = 0
    mask[1, -1:] = 0
    given["labels"][mask == 0] = -100
    if side == "left":
        mask = mask.flip(1)
        given["labels"] = torch.where(mask.cumsum(1) > 1, given["input_ids"], -100)  # a padded token predicts the first
    return given | {"attention_mask": mask}


def packed(by="position_ids"):
    """One row of documents, as DataCollatorWithFlattening makes it."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=by != "position_ids")
    ids = torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(5))
    return collate([{"input_ids": row.tolist()} for row in ids.split(LENGTHS)]) | {"use_cache": False}


ROWS = batch() | {
    "use_cache": False,
    "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]),
}
BATCHES = {"right": padded("right"), "left": padded("left"), "packed": packed(), "packed rows": ROWS}


@pytest.fixture
def markers(monkeypatch):
    """The shapes of the markers that stacks passed, None for transformers' masks."""
    found, stock = [], Stack.marker

    def marker(*args):
        made = stock(*args)
        found.append(None if made is None else tuple(made.shape))
        return made

    monkeypatch.setattr(Stack, "marker", marker)
    return found


def of_stack(applied):
    """The row that says what takes the place of masks."""
    (row,) = (row for row in applied.rows if row.kind.endswith("Model"))
    return row


@by_pytorch
@pytest.mark.parametrize("family", PACKED)
def test_batches_are_transformers_own(family, markers):
    model, before, applied = both(family)
    for kind, given in BATCHES.items():
        markers.clear()
        assert_alike(step(model, **given), step(before, **given))
        if family == "GptOss" and "packed" in kind:  # its own masks don't part documents
            assert markers == [None] and "position_ids, by which its own masks part nothing" in of_stack(applied).why, kind
        else:
            assert markers == [(5, 1, 1, 1)] and of_stack(applied).why is None, kind  # four documents


@by_pytorch
@pytest.mark.parametrize("family", ("Llama", "Mistral", "Gemma2"))
def test_eager_models_too(family, markers):
    """Some versions of transformers make Gemma 2 eager."""
    model, before, applied = both(family, attn_implementation="eager")
    for given in BATCHES.values():
        assert_alike(step(model, **given), step(before, **given))
    assert markers == [(5, 1, 1, 1)] * len(BATCHES) and of_stack(applied).why is None


@by_pytorch
@pytest.mark.parametrize("kind", BATCHES)
def test_windows_of_some_layers(kind, markers):
    model, before, applied = both("Qwen2", **SLIDING)
    assert_alike(step(model, **BATCHES[kind]), step(before, **BATCHES[kind]))
    assert markers != [None] and "windows of 4" in str(applied)
    assert [layer.self_attn._onepass.reach.window for layer in model.model.layers] == [None, 4]


@by_pytorch
@pytest.mark.parametrize("family", ("Mistral", "Gemma2", "Gemma3Text", "GptOss"))
def test_a_window_alone(family, markers):
    model, before, _ = both(family)
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert markers == [(1, 1, 0, 0)]


@by_pytorch
@pytest.mark.parametrize("family", NAMED)
def test_each_document_is_as_it_is_alone(family):
    model, _, _ = both(family)
    model.eval()
    given = packed("cu_seq_lens_q")
    ids = given["input_ids"]
    with torch.no_grad():
        together = model(**{name: value for name, value in given.items() if name != "labels"}).logits
        alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)
    other = ids.clone()
    other[:, :7] = 3  # another first document
    with torch.no_grad():
        changed = model(**given | {"input_ids": other, "labels": None}).logits
    other_sums = 1e-5 if family == "GptOss" else 0  # experts get other numbers of rows, which two threads sum in another order
    torch.testing.assert_close(changed[:, 7:], together[:, 7:], rtol=other_sums, atol=other_sums)


def error(found, exact):
    return sum((found[1][name].float() - grad).square().sum() for name, grad in exact[1].items()).sqrt()


@pytest.mark.parametrize("kind", ("right", "packed"))
@pytest.mark.parametrize("family", ("Llama", "Mistral", "Gemma2", "Gemma3Text", "GptOss"))
def test_in_bf16_by_kernels_it_is_as_near(family, kind, markers):
    model, before, _ = both(family, **({"output_router_logits": False} if family == "GptOss" else {}))
    given, theirs = BATCHES[kind], BATCHES[kind]
    if (family, kind) == ("GptOss", "packed"):
        given, theirs = packed("cu_seq_lens_q"), packed_by_hand(torch.bfloat16)
    with onepass.use_backend("torch"):
        exact = step(copy.deepcopy(model), **given)
    found, plain = step(model.bfloat16(), **given), step(before.bfloat16(), **theirs)
    assert set(markers) == {(5, 1, 1, 1)}
    assert error(found, exact) < 1.25 * error(plain, exact)


def packed_by_hand(dtype):
    """With masks for gpt-oss, whose own don't part documents."""
    given = packed()
    document = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    seen = (document[:, None] == document[None, :]).tril()
    kinds = {"full_attention": seen, "sliding_attention": seen.triu(-4)}
    hidden = {name: torch.zeros(24, 24, dtype=dtype).masked_fill(~kind, -torch.inf)[None, None] for name, kind in kinds.items()}
    return given | {"attention_mask": hidden}


@by_pytorch
def test_lengths_part_documents_where_positions_do_not():
    model, before, _ = both("GptOss", output_router_logits=False)
    assert_alike(step(model, **packed("cu_seq_lens_q")), step(before, **packed_by_hand(torch.float32)))


# ---- mutants: what the tests above would catch ----


def _later(function):
    def mutant(given, padding):
        return function(given, padding).roll(1, 1).index_fill(1, torch.tensor([0]), True)

    return mutant


def _no_padding(function):
    def mutant(given, padding):
        return function(torch.ones_like(given) if padding else given, padding)

    return mutant


MUTANTS = {
    "a boundary off by one": ("Llama", "packed", lambda patch, model: patch(documents, "starts_of", _later)),
    "a padded token seen": ("Llama", "left", lambda patch, model: patch(documents, "starts_of", _no_padding)),
    "a window of one more": (
        "Mistral",
        "packed",
        lambda patch, model: [setattr(layer.self_attn._onepass, "reach", interfaces.KeyRange(6)) for layer in model.model.layers],
    ),
    "a window of one more, by the module's code": (
        "Gemma3Text",
        "packed",
        lambda patch, model: [setattr(layer.self_attn._onepass, "reach", interfaces.KeyRange(6)) for layer in model.model.layers],
    ),
    "no cap": ("Gemma2", "right", lambda patch, model: [uncap(layer.self_attn._onepass) for layer in model.model.layers]),
    "no sinks, by the module's code": ("GptOss", "right", lambda patch, model: patch(interfaces, "attention", _without("sinks"))),
    "no documents": ("Qwen3", "packed", lambda patch, model: patch(attentions, "attention", _without("cu_seqlens"))),
    "another scale": ("Qwen3", "packed", lambda patch, model: patch(attentions, "attention", _without("scale", 0.2))),
    "no documents, by the module's code": (
        "GptOss",
        "right",
        lambda patch, model: patch(interfaces, "attention", _without("cu_seqlens")),
    ),
    "another scale, by the module's code": (
        "GptOss",
        "right",
        lambda patch, model: patch(interfaces, "attention", _without("scale", 0.2)),
    ),
}


def uncap(match):
    object.__setattr__(match.whole, "softcap", None)


def _without(name, value=None):
    return lambda function: lambda *args, **options: function(*args, **options | {name: value})


@by_pytorch
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(mutant, monkeypatch):
    family, kind, break_it = MUTANTS[mutant]
    model, before, applied = both(family, attn_logit_softcapping=0.5) if family == "Gemma2" else both(family)
    if family == "GptOss":  # by its own code, which then rotates too
        applied.undo()
        huggingface.apply(model, rope=False)
    for each in (model, before):
        for name, parameter in each.named_parameters():
            parameter.data.mul_(10 if "q_proj" in name or "k_proj" in name else 1)  # scores that a cap bends
    expected = step(before, **BATCHES[kind])
    assert_alike(step(model, **BATCHES[kind]), expected)
    break_it(lambda module, name, change: monkeypatch.setattr(module, name, change(getattr(module, name))), model)
    with pytest.raises(AssertionError):
        assert_alike(step(model, **BATCHES[kind]), expected)


# ---- what stays transformers' own ----


def test_an_sdpa_that_drops_the_softcap_is_named(monkeypatch):
    """As in transformers 5.17. Newer ones refuse Gemma 2 by SDPA."""
    interfaces = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    sdpa = interfaces["sdpa"]
    monkeypatch.setitem(interfaces, "sdpa", lambda *args, softcap=None, **options: sdpa(*args, **options))
    model = made("Gemma2")
    model.config._attn_implementation = "sdpa"
    (row,) = [row for row in huggingface.apply(model).left if row.name == "model"]
    assert row.why == "SDPA drops its softcap: load it with attn_implementation='eager', or by a newer transformers"


def causal(*, windowed=False):
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    return (mask.triu(-2) if windowed else mask)[None, None].expand(2, -1, -1, -1)


def holes():
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, 3:5] = 0
    return mask


LEFT = {
    "a mask of one's own": ("Llama", {"attention_mask": causal(windowed=True)}, "attention_mask of another shape"),
    "a window and a cache": ("Mistral", {"use_cache": True}, "a cache"),
    "masks by kind": ("Gemma2", {"attention_mask": dict.fromkeys(("full_attention", "sliding_attention"))}, "attention_mask"),
    "a cache": ("Llama", {"use_cache": True}, "a cache"),
    "a cache for positions": ("Llama", {"position_ids": ROWS["position_ids"], "use_cache": True}, "a cache"),
    "holes": ("Llama", {"attention_mask": holes()}, "attention_mask with holes"),
    "another argument": ("Llama", {"output_attentions": True}, "output_attentions"),
    "both ways": ("Llama", {"is_causal": False}, "is_causal"),
    "lengths and a mask": (
        "Llama",
        {"cu_seq_lens_q": torch.tensor([0, 24], dtype=torch.int32), "attention_mask": holes()},
        "both cu_seq_lens_q and attention_mask",
    ),
    "lengths of int64": ("Llama", {"cu_seq_lens_q": torch.tensor([0, 12, 24])}, "cu_seq_lens_q"),
}


@by_pytorch
@pytest.mark.parametrize("what", LEFT)
def test_left_to_transformers_and_said_so(what, markers):
    family, given, why = LEFT[what]
    model, before, applied = both(family)
    assert_alike(step(model, **batch() | given), step(before, **batch() | given))
    assert markers == [None]
    row = of_stack(applied)
    assert row.why.startswith("transformers' masks in calls with ") and why in row.why
    assert row.by is not None  # other calls are not


@by_pytorch
def test_dropout_of_attention(markers):
    model, _, applied = both("Llama", attention_dropout=0.5)
    first, second = (step(model, **padded("right"))[0] for _ in range(2))
    assert markers == [None] * 2 and first != second
    assert "attention dropout" in of_stack(applied).why
    model.eval()
    model(input_ids=batch()["input_ids"], use_cache=False)
    assert markers[-1] == (1, 1, 0, 0)


@by_pytorch
def test_attention_weights_that_the_configuration_asks_for(markers):
    model, before, _ = both("Gemma2")
    ids = batch()["input_ids"]
    for each in (model, before):
        each.config.output_attentions = True
    found, expected = (each(input_ids=ids, use_cache=False).attentions for each in (model, before))
    torch.testing.assert_close(found, expected)
    assert markers == [None]


@by_pytorch
def test_an_implementation_that_is_set_later(markers):
    model, before, _ = both("Llama")
    for each in (model, before):
        each.set_attn_implementation("eager")
    assert_alike(step(model, **padded("left")), step(before, **padded("left")))
    assert markers == [None]


@by_pytorch
@pytest.mark.parametrize("what", ("sliding_window", "layer_types"))
def test_a_window_that_is_changed_later_has_its_effect(what, markers):
    model, before, applied = both("Gemma2")
    for each in (model, before):
        setattr(each.config, what, {"sliding_window": 3, "layer_types": ["full_attention"] * 2}[what])
    assert_alike(step(model, **packed()), step(before, **packed()))
    assert markers == [None]
    row = of_stack(applied)
    assert row.by is None and f"config.{what} was" in row.why


# ---- whoever makes the batch ----


@by_pytorch
def test_lengths_need_no_look_at_the_batch(monkeypatch):
    model, before, _ = both("Llama")
    given = packed("cu_seq_lens_q")
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"} <= given.keys()
    monkeypatch.setattr(masks, "documents_of_rows", None)
    assert_alike(step(model, **given), step(before, **packed()))


@by_pytorch
def test_boundaries_that_are_wrong_raise():
    model, _, _ = both("Llama")
    for wrong in ([0, 5], [1, 24], [0, 9, 4, 24]):
        given = packed() | {"cu_seq_lens_q": torch.tensor(wrong, dtype=torch.int32)}
        with pytest.raises(ValueError, match="cu_seqlens must"):
            model(**given)


@by_pytorch
@pytest.mark.parametrize("lengths", (False, True))
def test_trainer_with_flattening(lengths, tmp_path, markers):
    model = made("Llama")
    before = copy.deepcopy(model)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
    losses = [trained(before, torch.optim.SGD(before.parameters(), 1e-2), tmp_path / "a", collate=collate)]
    huggingface.apply(model)
    losses.append(trained(model, torch.optim.SGD(model.parameters(), 1e-2), tmp_path / "b", collate=collate))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    assert set(markers) == {(3, 1, 1, 1)}


@by_pytorch
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # transformers' own
@pytest.mark.parametrize("family", ("Mistral", "Gemma3Text", "GptOss"))
@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointed(family, reentrant, markers):
    model, before, _ = both(family)
    for each in (model, before):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
    assert_alike(step(model, **padded("left")), step(before, **padded("left")))
    assert markers == [(5, 1, 1, 1)]


@by_pytorch
@pytest.mark.slow
@pytest.mark.parametrize("family", ("Mistral", "Gemma3Text"))
def test_compiled(family):
    """Lengths are read in the graph. Positions and masks can't be counted there: transformers makes masks."""
    torch._dynamo.reset()
    model, before, _ = both(family, num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_alike(step(compiled, **packed("cu_seq_lens_q")), step(before, **packed()))
    if family == "Mistral":  # the other has masks of two kinds; what makes none of them is no family's
        assert_alike(step(compiled, **packed()), step(before, **packed()))
