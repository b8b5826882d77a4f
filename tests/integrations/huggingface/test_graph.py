"""`apply(graph=True)` by a stand-in for CUDA graphs: Trainer's runs beside the same without, shapes, masks, other calls."""

import copy
import logging
import pickle
from unittest import mock

import pytest
import torch
import transformers
from integrations.huggingface.families import VOCABULARY, made, step
from integrations.huggingface.trainer import trained
from runtime import cpu_graph
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.dropout import Dropout

import onepass
from onepass.gradients import graphed_calls
from onepass.integrations import huggingface
from onepass.integrations.huggingface import graph
from onepass.kernels import philox
from onepass.runtime.process_setting import ProcessSetting

WARM = 3


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    monkeypatch.setattr(philox, "_on_device", ProcessSetting("seeds_on_device", False))  # as models go without undo
    with onepass.use_backend("torch"):
        yield cpu_graph.install(monkeypatch, graphed_calls, may_wait=True)


def pair(family="Llama", **options):
    """A model with graphs, its report, and the same without them."""
    model = made(family, **options)
    other = copy.deepcopy(model)
    applied = huggingface.apply(model, graph=True)
    huggingface.apply(other)
    return model, applied, other


def row(applied):
    return next(each for each in applied.rows if each.part == "graph")


def ids(rows=2, tokens=16):
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


class Collate:
    """Rows of changing length, with padding at their ends; every third batch is full."""

    def __init__(self, masked=True):
        self.count, self.masked = 0, masked

    def __call__(self, features):
        self.count += 1
        tokens = torch.stack([each["input_ids"] for each in features])[:, : 12 - self.count % 3]
        mask, labels = torch.ones_like(tokens), tokens.clone()
        if self.count % 3:
            mask[0, -3:] = 0
        labels[mask == 0] = -100
        return {"input_ids": tokens, "labels": labels} | ({"attention_mask": mask} if self.masked else {})


def llama():
    return made("Llama", num_hidden_layers=1)


def both(tmp_path, optimizer=lambda applied: None, model=llama, apply=None, collate=None, **options):
    """Losses and weights of Trainer's run with graphs and without, and the report."""
    found = []
    for graph_too in (True, False):
        torch.manual_seed(0)
        trains = model()
        applied = huggingface.apply(trains, graph=graph_too, **(apply or {}))
        losses = trained(trains, optimizer(applied), tmp_path, collate=collate and collate(), **options)
        found.append((losses, {name: p.detach().clone() for name, p in trains.named_parameters()}, applied))
    return found


def same(found, rtol=1e-5, atol=1e-5):
    """Products under the stand-in for replays are a unit in the last place apart. AdamW steps by gradients that are noise."""
    (one, weights, applied), (other, expected, _) = found
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=rtol, atol=atol)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-2, atol=1e-3)
    return applied


# ---- Trainer ----


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 1.0},
        {"optim": "sgd", "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 1, "average_tokens_across_devices": False},
        {"label_smoothing_factor": 0.1},
    ],
    ids=("clipped", "sgd", "smoothed"),
)
def test_trainer_trains_as_without(tmp_path, monkeypatch, options):
    monkeypatch.setattr(graph, "padded_length", lambda tokens: tokens)  # so that products are of the same sizes, to the bit
    applied = same(both(tmp_path, steps=6, **options))
    assert row(applied).by == "CUDA graphs of 1 shape" and row(applied).why is None


def test_trainer_evaluates_and_resumes_as_without(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "padded_length", lambda tokens: tokens)
    more = {"save_strategy": "steps", "save_steps": 3}
    whole = same(both(tmp_path / "whole", steps=6, **more))
    again = llama()
    applied = huggingface.apply(again, graph=True)
    trained(again, None, tmp_path / "resumed", steps=6, resume=str(tmp_path / "whole/checkpoint-3"), **more)
    for one, other in zip(again.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    assert row(applied).by == "CUDA graphs of 1 shape"


def test_main_grad_under_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "padded_length", lambda tokens: tokens)
    optimizer = lambda applied: applied.optimizer(lr=1e-2, max_norm=0.5)  # noqa: E731
    applied = same(both(tmp_path, optimizer, steps=6, apply={"main_grad": True}))
    assert row(applied).by == "CUDA graphs of 1 shape"


@pytest.mark.parametrize("masked", (True, False))
def test_lengths_that_change_are_padded_to_one(tmp_path, graphs, masked, caplog):
    caplog.set_level(logging.INFO, "onepass")
    options = {"collate": lambda: Collate(masked), "steps": 8, "max_grad_norm": 1.0}
    applied = same(both(tmp_path, **options), rtol=1e-4, atol=1e-4)
    assert row(applied).by == "CUDA graphs of 1 shape" and row(applied).why is None and len(graphs) == 2
    assert [each.getMessage() for each in caplog.records if "padded" in each.getMessage()] == [
        "graph: rows are padded to one of few lengths, 11 tokens to 16 and so on"
    ]


def test_dropout_of_trainer_is_that_without(tmp_path, monkeypatch):
    """The stand-in draws at each replay where the generator is, as a GPU's graph does."""
    monkeypatch.setattr(graph, "padded_length", lambda tokens: tokens)
    applied = same(both(tmp_path, model=lambda: made("GPT2", resid_pdrop=0.3, embd_pdrop=0.3, n_layer=1), steps=6))
    assert any(isinstance(part, Dropout) and part.p for part in applied.model.modules())
    assert row(applied).by == "CUDA graphs of 1 shape"


def test_seeds_are_drawn_as_in_graphs_until_undo():
    model = made("Llama")
    applied = huggingface.apply(model, graph=True)
    assert philox._as_graphs_do()
    applied.undo()
    assert not philox._as_graphs_do()


# ---- masks and lengths ----


def graphed_steps(model, count=WARM + 1, **given):
    return [step(model, **given, use_cache=False) for _ in range(count)][-1]


def agree(found, expected):
    torch.testing.assert_close(found[0], expected[0])
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)


MASKS = {
    "full": (lambda mask: mask, True),
    "ends": (lambda mask: mask[0].__setitem__(slice(13, None), 0), True),
    "beginnings": (lambda mask: mask[0].__setitem__(slice(0, 3), 0), False),
    "holes": (lambda mask: mask[0].__setitem__(slice(4, 6), 0), False),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_that_changes_nothing_is_left_out(kind):
    model, applied, other = pair()
    tokens, mask = ids(), torch.ones(2, 16, dtype=torch.long)
    change, left_out = MASKS[kind]
    change(mask)
    given = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}
    agree(graphed_steps(model, **given), graphed_steps(other, **given))
    (shape,) = model._onepass_graphs.calls._shapes.values()
    assert len(shape.inputs) == (2 if left_out else 3)
    assert row(applied).by == "CUDA graphs of 1 shape"


def test_a_mask_stays_where_what_it_hides_has_labels():
    model, _, other = pair()
    tokens, mask = ids(), torch.ones(2, 16, dtype=torch.long)
    mask[0, 12:] = 0
    given = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
    agree(graphed_steps(model, **given), graphed_steps(other, **given))
    (shape,) = model._onepass_graphs.calls._shapes.values()
    assert len(shape.inputs) == 3


def test_a_model_that_looks_ahead_is_not_padded():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).train()
    for part in model.modules():
        if isinstance(part, Dropout):
            part.p = 0.0
    other = copy.deepcopy(model)
    huggingface.apply(model, graph=True)
    huggingface.apply(other)
    tokens = ids(tokens=13)
    given = {"input_ids": tokens, "labels": tokens}
    found, expected = ([step(each, **given) for _ in range(WARM + 1)][-1] for each in (model, other))
    agree(found, expected)
    (shape,) = model._onepass_graphs.calls._shapes.values()
    assert shape.inputs[0].shape == (2, 13) and model._onepass_graphs.causal is False


def test_whether_a_model_looks_ahead_is_not_known_of_weights_that_are_zeros(caplog):
    caplog.set_level(logging.INFO, "onepass")
    model, _, _ = pair()
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    tokens, graphs = ids(tokens=13), model._onepass_graphs
    graphed_steps(model, 1, input_ids=tokens, labels=tokens)
    assert graphs.causal is None and not caplog.messages
    for layer in model.model.layers:
        nn.init.ones_(layer.self_attn.o_proj.weight)
    graphed_steps(model, 1, input_ids=tokens, labels=tokens)
    assert graphs.causal is True
    model.config.attention_dropout = 0.5  # whatever changes, that is tried again
    model.model.layers[0].self_attn.is_causal = False
    graphs.calls.supports(model)
    graphed_steps(model, 1, input_ids=tokens, labels=tokens)
    assert graphs.asked == 1


def loss(model, **given):
    return model(**given, use_cache=False).loss


def ends_hidden(tokens=16, labelled=False):
    given = ids(tokens=tokens)
    mask = torch.ones_like(given)
    mask[0, 10:] = 0
    return {"input_ids": given, "labels": given if labelled else given.masked_fill(mask == 0, -100), "attention_mask": mask}


def mean_of_all(logits, labels, vocab_size, **options):
    summed = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")
    return summed / labels.numel()


def test_a_loss_that_counts_all_tokens_is_of_rows_as_they_are():
    model = made("Llama")
    model.loss_function = mean_of_all
    other = copy.deepcopy(model)
    huggingface.apply(model, graph=True)
    huggingface.apply(other)
    tokens = ids(tokens=13)
    torch.testing.assert_close(*(loss(each, input_ids=tokens, labels=tokens) for each in (model, other)))
    torch.testing.assert_close(*(loss(each, **ends_hidden(13)) for each in (model, other)))
    assert graph._is_causal(model, type(model).forward) is False  # by what it computes, whatever its name


def test_another_loss_after_captures_is_taken():
    model, _, other = pair()
    tokens = ids(tokens=13)
    graphed_steps(model, input_ids=tokens, labels=tokens)
    model.loss_function = other.loss_function = mean_of_all
    torch.testing.assert_close(*(loss(each, input_ids=tokens, labels=tokens) for each in (model, other)))


@pytest.mark.parametrize("given_by", ("config", "argument"))
def test_the_loss_that_balances_experts_counts_no_padding(given_by):
    model, _, other = pair("Mixtral", output_router_logits=False)
    given = ends_hidden()
    graphed_steps(model, 1, **given)
    assert model._onepass_graphs.causal
    if given_by == "config":
        model.config.output_router_logits = other.config.output_router_logits = True
    else:
        given["output_router_logits"] = True
    one, theirs = (each(**given, use_cache=False) for each in (model, other))
    torch.testing.assert_close(one.aux_loss, theirs.aux_loss, rtol=1e-5, atol=0)


def test_labels_that_are_shifted_already_keep_the_mask():
    model, _, other = pair()
    given = ends_hidden()
    given["shift_labels"] = torch.roll(given["input_ids"], -1, 1)  # with labels where the mask hides
    torch.testing.assert_close(*(loss(each, **given) for each in (model, other)))


def test_rows_are_no_longer_than_a_models_positions():
    model, _, other = pair("GPT2", n_positions=50, n_layer=1)
    for tokens in (49, 50):
        given = {"input_ids": ids(tokens=tokens), "labels": ids(tokens=tokens)}
        torch.testing.assert_close(*(loss(each, **given) for each in (model, other)))
    (shape,) = model._onepass_graphs.calls._shapes.values()
    assert shape.inputs[0].shape == (2, 50)
    model.config.n_positions = 20
    assert graph._length(50, graph._positions(model)) == 50


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model.embed_tokens, "neftune_noise_alpha", 5.0),
        lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"),
        lambda model: setattr(model.model.rotary_emb, "rope_type", {"full_attention": "longrope"}),
        lambda model: model.model.add_module("statistics", nn.BatchNorm1d(2)),
        lambda model: setattr(model.config, "output_hidden_states", True),
    ],
    ids=("noise", "rotation", "rotations", "statistics", "results"),
)
def test_rows_whose_length_counts_are_not_padded(change):
    model, _, _ = pair()
    change(model)
    tokens = ids(tokens=13)
    graphed_steps(model, 1, input_ids=tokens, labels=tokens)
    (shape,) = model._onepass_graphs.calls._shapes.values()
    assert shape.inputs[0].shape == (2, 13)


def test_numbers_of_items_are_one_shape():
    model, applied, other = pair()
    tokens = ids()
    for items in range(20, 32):
        given = {"input_ids": tokens, "labels": tokens, "num_items_in_batch": items}
        losses = [loss(each, **given) for each in (model, other)]
        torch.testing.assert_close(*losses)
        losses[0].backward()
    assert row(applied).by == "CUDA graphs of 1 shape" and row(applied).why is None


def test_a_cache_is_left_out_by_the_loss_without_logits_alone(graphs):
    model = made("Llama", use_cache=True)
    applied = huggingface.apply(model, loss=False, graph=True)
    for given in ({}, {"use_cache": None}):
        model(input_ids=ids(), labels=ids(), **given).loss.backward()
    assert row(applied).why == "calls without: a cache, which use_cache=False leaves out," and not graphs


def test_none_is_given_where_it_says_something():
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, use_cache=None, scale=2.0):
            found = super().forward(input_ids=input_ids, labels=labels, use_cache=use_cache)
            found.loss = found.loss * (1.0 if scale is None else scale)
            return found

    model = made("Llama")
    model.__class__ = Scaled
    huggingface.apply(model, loss=False, graph=True)
    twice, once = (loss(model, input_ids=ids(), labels=ids(), **given).item() for given in ({}, {"scale": None}))
    assert twice == 2 * once


def test_whether_a_model_is_causal_is_tried_without_a_trace():
    model, _, _ = pair()
    model.model.layers[0].eval()
    before = [part.training for part in model.modules()]
    state = torch.get_rng_state()
    assert graph._is_causal(model, type(model).forward) is True
    assert [part.training for part in model.modules()] == before and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("tokens", "length"), [(1, 16), (16, 16), (17, 32), (100, 112), (129, 144), (1000, 1024), (1025, 1152), (8192, 8192)]
)
def test_lengths_are_eight_an_octave(tokens, length):
    assert graph.padded_length(tokens) == length
    assert len({graph.padded_length(n) for n in range(1025, 2049)}) == 8


def test_logits_have_the_length_that_was_given():
    model = made("Llama")
    other = copy.deepcopy(model)
    huggingface.apply(model, loss=False, graph=True)
    tokens = ids(tokens=13)
    for _ in range(WARM + 1):
        found = model(input_ids=tokens, labels=tokens, use_cache=False)
        found.loss.backward()
        model.zero_grad()
    torch.testing.assert_close(found.logits, other(input_ids=tokens, use_cache=False).logits)


# ---- what runs as it is ----


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"position_ids": torch.arange(16)[None].repeat(2, 1)}, "position_ids, whose documents have to be counted,"),
        ({"use_cache": True}, "a cache, which use_cache=False leaves out,"),
    ],
)
def test_calls_that_can_not_be_graphs_say_why_once(given, reason, graphs, caplog, monkeypatch):
    model, applied, other = pair()
    tokens, beside = ids(), mock.Mock(wraps=cpu_graph.beside)
    monkeypatch.setattr(graphed_calls, "side_stream", beside)
    for _ in range(WARM + 2):
        found = step(model, input_ids=tokens, labels=tokens, **given)
    agree(found, step(other, input_ids=tokens, labels=tokens, **given))
    assert not graphs and (row(applied).by, row(applied).why) == ("CUDA graphs, of no shape yet", f"calls without: {reason}")
    assert caplog.messages == [f"graph: calls with {reason} run without a CUDA graph"]
    assert beside.call_count == WARM + 2  # where captures are


def test_evaluation_and_generation_run_as_they_are(graphs):
    model, applied, other = pair()
    tokens = ids()
    model.eval(), other.eval()
    for each in (model, other):
        for _ in range(WARM + 2):
            each(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        assert torch.equal(model.generate(tokens, max_new_tokens=3), other.generate(tokens, max_new_tokens=3))
    model.train()
    with torch.no_grad():
        for _ in range(WARM + 2):
            model(input_ids=tokens, labels=tokens)
    assert not graphs and row(applied).why is None


def test_a_compiled_model_says_that_it_has_no_graphs(graphs, caplog):
    model, applied, other = pair(num_hidden_layers=1)
    tokens, runs = ids(), torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(WARM + 2):
        found = runs(input_ids=tokens, labels=tokens, use_cache=False).loss
    torch.testing.assert_close(found, other(input_ids=tokens, labels=tokens, use_cache=False).loss)
    reason = "torch.compile around the model"
    assert not graphs and row(applied).why == f"calls without: {reason}"
    said = [record.message for record in caplog.records if record.name == "onepass"]  # PyTorch's compiler logs, too
    assert said == [f"graph: calls with {reason} run without a CUDA graph"]


def test_what_can_not_be_a_graph_raises():
    for given in ({"precision": "fp8"}, {"main_grad": True, "release_main_grad": True}):
        with pytest.raises(ValueError, match="graph must be False with"):
            huggingface.apply(made("Llama"), graph=True, **given)


# ---- copies, undo, PEFT ----


def test_undo_takes_graphs_away(graphs):
    model, applied, _ = pair()
    tokens = ids()
    graphed_steps(model, input_ids=tokens, labels=tokens)
    applied.undo()
    assert "forward" not in vars(model) and "_onepass_graphs" not in vars(model)
    replays = [each.replays for each, _ in graphs]
    plain = made("Llama")
    plain.load_state_dict(model.state_dict())
    agree(step(model, input_ids=tokens, labels=tokens), step(plain, input_ids=tokens, labels=tokens))
    assert [each.replays for each, _ in graphs] == replays
    assert not applied.rows[-1].match.graphs.calls.graphs


def test_wrappers_outlive_undo():
    model, applied, _ = pair()
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    applied.undo()
    tokens = ids()
    plain = made("Llama")
    plain.load_state_dict(model.state_dict())
    agree(step(model, input_ids=tokens, labels=tokens), step(plain, input_ids=tokens, labels=tokens))
    assert vars(model)["forward"].__name__ == "<lambda>"


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))), ids=("deepcopy", "pickle"))
def test_a_copy_begins_without_graphs(copied, graphs):
    model, _, _ = pair()
    tokens = ids()
    graphed_steps(model, input_ids=tokens, labels=tokens)
    other = copied(model)
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    count = len(graphs)
    found = graphed_steps(other, input_ids=tokens, labels=tokens)
    assert len(graphs) == count + 2 and other._onepass_graphs is not model._onepass_graphs
    assert found[0] != graphed_steps(model, input_ids=tokens, labels=tokens)[0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("before", (True, False))
def test_peft_before_and_after(before, graphs):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False, lora_dropout=0.0)
    found, tokens = [], ids()
    for graph_too in (True, False):
        torch.manual_seed(1)
        model = made("Llama")
        if before:
            model = peft.get_peft_model(model, config)
            applied = huggingface.apply(model, graph=graph_too)
        else:
            applied = huggingface.apply(model, graph=graph_too)
            graphed_steps(model, input_ids=tokens, labels=tokens)  # of the model without adapters
            model = peft.get_peft_model(model, config)
        model.train()
        found.append(graphed_steps(model, input_ids=tokens, labels=tokens))
        if graph_too:
            assert row(applied).by == "CUDA graphs of 1 shape" and len(graphs) == (2 if before else 4)
            with model.disable_adapter():
                assert model(input_ids=tokens, labels=tokens).loss != found[0][0]
            model.base_model.model.model.layers[0].mlp.down_proj.set_scale("default", 7.0)
            assert loss(model, input_ids=tokens, labels=tokens) != found[0][0]
    agree(*found)


def test_accelerates_autocast_around_a_graph(tmp_path):
    (found, _, applied), (expected, *_) = both(tmp_path, steps=6, bf16=True)
    assert found == pytest.approx(expected, rel=1e-2)
    assert row(applied).by == "CUDA graphs of 1 shape"
    applied.undo()
    assert "forward" not in vars(applied.model)
