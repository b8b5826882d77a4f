"""Where a call masks nothing nobody looks for a mask, and no compiler makes one; everywhere else masks are as they were."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import FAMILIES, assert_alike, batch, both, made, step  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402
from onepass.integrations.huggingface.layers import LayerMatch  # noqa: E402
from onepass.integrations.huggingface.masks import Stack  # noqa: E402

# Those whose layers and stack pass a prepared mask on. OPT counts positions by its mask, GPT-2 passes it by place.
KNOWN = set(FAMILIES) - {"GPT2", "OPT"}


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def masks_of(model, **given):
    """What the compiled model gives to SDPA, in each layer: whether a mask, and whether it is causal by itself."""
    found = []

    def read(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention or "scaled_dot_product" in str(node.target):
                mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
                found.append((mask is not None, node.kwargs.get("is_causal", False)))
        return graph.forward

    torch._dynamo.reset()
    model(**given)  # whether it runs at all
    torch.compile(model, fullgraph=True, backend=read)(**given)
    return found


MASKED, PLAIN = (True, False), (False, True)
ONE = {"num_hidden_layers": 1}  # where dynamo reads all of transformers' code, which takes seconds


@pytest.mark.slow
def test_a_call_that_masks_nothing():
    model, _, _ = both(**ONE)
    given = batch() | {"use_cache": False}
    assert masks_of(model, **given) == [PLAIN]
    assert masks_of(model, **given, attention_mask=torch.ones_like(given["input_ids"])) == [MASKED]


@pytest.mark.slow
@pytest.mark.parametrize("given", ("packed", "padded"))
def test_compiled_it_masks_what_it_masked(given):
    model, before, _ = both(**ONE)
    more = {"position_ids": torch.arange(12).remainder(5).expand(2, -1)} if given == "packed" else {}
    call = batch(masked=given == "padded") | more | {"use_cache": False}
    assert_alike(step(torch.compile(model, fullgraph=True, backend="aot_eager"), **call), step(before, **call))


@pytest.mark.slow
def test_a_window_is_a_mask():
    model, _, _ = both("Mistral", **ONE)
    assert masks_of(model, **batch(), use_cache=False) == [MASKED]


def test_a_mask_that_is_asked_for_otherwise_is_kept():
    model, before, _ = both()
    given = batch() | {"is_causal": False, "attention_mask": {"full_attention": None}}
    del given["attention_mask"]
    assert_alike(step(model, **given), step(before, **given))
    for each in (model, before):
        each.set_attn_implementation("eager")
    assert_alike(step(model, **batch()), step(before, **batch()))


@pytest.mark.parametrize("family", ("Llama", "Mistral", "GPT2"))  # by markers, with windows, and by transformers' masks
@pytest.mark.parametrize("loss", (True, False))
def test_training_parts_packed_rows_though_nobody_says_that_it_needs_no_cache(family, loss):
    """loss: by the model; else outside of it, as trainers do, where the stack of layers sees to it."""
    model, before, _ = both(family)
    given = batch() | {"position_ids": torch.arange(12).remainder(5).expand(2, -1)}
    if loss:
        assert_alike(step(model, **given), step(before, **given, use_cache=False))
    elif family != "GPT2":
        del given["labels"]
        found, expected = model(**given), before(**given, use_cache=False)
        assert found.past_key_values is None
        torch.testing.assert_close(found.logits, expected.logits)
        asked = model(**given | {"position_ids": torch.arange(12)[None]}, use_cache=True)
        assert asked.past_key_values.get_seq_length() == 12


@pytest.mark.parametrize("how", ("eval", "asked", "GptOss"))
def test_packed_rows_that_are_one_sequence_are_warned_of_once(how):
    model, before, _ = both("GptOss" if how == "GptOss" else "Llama")
    plain = {"input_ids": batch()["input_ids"], **({"use_cache": True} if how == "asked" else {})}
    given = plain | {"position_ids": torch.arange(12).remainder(5).expand(2, -1)}
    if how == "eval":
        model.eval()
    model(**plain)
    model(**plain, position_ids=torch.arange(12)[None])
    line = "cu_seq_lens_q" if how == "GptOss" else "use_cache=False"
    with pytest.warns(UserWarning, match=f"position_ids begin again within a row.*{line}"):
        found = model(**given).logits
    torch.testing.assert_close(model(**given).logits, found)
    torch.testing.assert_close(found, before(**given).logits)


def known(model):
    return [part._onepass for part in model.modules() if isinstance(vars(part).get("_onepass"), Stack)]


@pytest.mark.parametrize("family", FAMILIES)
def test_which_stacks_mask_no_more_than_what_follows(family):
    model, _, applied = both(family)
    assert len(known(model)) == (family in KNOWN)
    applied.undo()
    assert not known(model)


@pytest.mark.parametrize(
    ("family", "options"),
    (
        ("Llama", {"is_causal": False}),
        ("Gemma3Text", {"use_bidirectional_attention": True}),
    ),
    ids=str,
)
def test_not_one_that_sees_more_or_is_told_otherwise(family, options):
    model, before, applied = both(family, **options)
    assert not known(model)
    assert any(row.why and row.name == "model" for row in applied.left)
    alike(model, before)


class Layers(torch.nn.Module):
    """A stack that has no configuration."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, **options):
        for layer in self.layers:
            x = layer(x, **options)
        return x


def test_not_one_without_a_configuration():
    applied = huggingface.apply(torch.nn.Sequential(Layers(made("Llama").model.layers)))
    (row,) = [row for row in applied.left if row.kind == "Layers"]
    assert row.why == "it has no configuration"


def test_not_a_model_that_is_the_stack_itself():
    """Whose forward's signature is read, by Trainer say."""
    model = made().model
    huggingface.apply(model)
    assert not known(model) and "forward" not in vars(model)


def test_not_one_whose_attentions_see_both_ways():
    model = made()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    huggingface.apply(model)
    assert not known(model)


@pytest.fixture
def seen(monkeypatch):
    """The shapes of the masks that a model's layers are given in a call."""
    found = []
    stock = LayerMatch.__call__

    def called(layer, x, given):
        mask = given["attention_mask"]
        found.append(None if mask is None else tuple(mask.shape))
        return stock(layer, x, given)

    def call(model, **given):
        found.clear()
        model(**given)
        return list(found)

    monkeypatch.setattr(LayerMatch, "__call__", called)
    return call


NOTHING = [(1, 1, 0, 0)] * 2


def test_in_a_call(seen):
    model, _, _ = both()
    given = batch()
    ids = given["input_ids"]
    assert seen(model, **given) == NOTHING
    assert seen(model, input_ids=ids, use_cache=False) == NOTHING
    assert seen(model, input_ids=ids) != NOTHING  # a cache is made
    assert seen(model, **given, attention_mask=torch.ones_like(ids)) == NOTHING
    assert seen(model, **batch(masked=True)) == [(4, 1, 1, 1)] * 2  # boundaries of three documents
    positions = torch.arange(12).remainder(5).expand(2, -1)
    assert seen(model, **given, use_cache=False, position_ids=positions) == [(7, 1, 1, 1)] * 2
    assert seen(model, **given, use_cache=False, position_ids=torch.arange(12)[None]) == NOTHING
    assert seen(model, **given, attention_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool)) == [(2, 1, 12, 12)] * 2
    model.set_attn_implementation("eager")
    assert seen(model, **given) == [(2, 1, 12, 12)] * 2


def alike(model, before, **given):
    assert_alike(step(model, **batch(), **given), step(before, **batch(), **given))


@pytest.mark.parametrize(("where", "compiled"), (("layer", False), ("attention", False), ("layer", True)))
def test_a_mask_that_a_hook_adds(where, compiled):
    def windowed(module, args, options):
        return args, options | {"attention_mask": torch.ones(12, 12, dtype=torch.bool).tril().triu(-2)[None, None]}

    model, before, _ = both(**(ONE if compiled else {}))
    for each in (model, before):
        for layer in each.model.layers:
            (layer if where == "layer" else layer.self_attn).register_forward_pre_hook(windowed, with_kwargs=True)
    expected = step(before, **batch())
    assert_alike(step(torch.compile(model, backend="aot_eager") if compiled else model, **batch()), expected)


@pytest.mark.parametrize("where", ("layer", "attention"))
@pytest.mark.parametrize("how", ("forward", "hook"))
def test_who_looks_sees_what_was_there_before(where, how):
    model, _, _ = both()
    found = []
    layer = model.model.layers[0]
    watched = layer if where == "layer" else layer.self_attn
    if how == "hook":
        watched.register_forward_pre_hook(lambda module, args, options: found.append(options["attention_mask"]), with_kwargs=True)
    else:
        stock = watched.forward
        watched.forward = lambda *args, **options: found.append(options["attention_mask"]) or stock(*args, **options)
    model(**batch())
    assert found == [None]


def test_a_stack_with_a_forward_of_its_own_keeps_it():
    model = made()
    stack = model.model
    stack.forward = mine = stack.forward
    huggingface.apply(model)
    assert stack.forward is mine


class Windowed(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    """Makes a mask of its own where it is given none."""

    def forward(self, hidden_states, attention_mask=None, **options):
        if attention_mask is None:
            attention_mask = torch.ones(2 * (hidden_states.shape[-2],), dtype=torch.bool).tril().triu(-2)[None, None]
        return super().forward(hidden_states, attention_mask=attention_mask, **options)


@pytest.mark.parametrize("which", (slice(None), slice(1)), ids=("all", "one"))
@pytest.mark.parametrize("options", ({}, {"norm": False}))
def test_a_layer_that_makes_a_mask_of_its_own(options, which):
    model = made()
    for layer in model.model.layers[which]:
        layer.__class__ = Windowed
    before = copy.deepcopy(model)
    huggingface.apply(model, **options)
    assert not known(model)
    alike(model, before)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # transformers' own
@pytest.mark.parametrize("reentrant", (True, False))
def test_checkpointed(reentrant, seen):
    model, before, _ = both()
    for each in (model, before):
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
        each.enable_input_require_grads()
    assert seen(model, **batch()) == NOTHING
    alike(model, before)


def test_a_copy_and_a_pickle_leave_masks_out_too(seen):
    model, _, _ = both()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert seen(other, **batch(), use_cache=False) == NOTHING
