"""What only a GPU shows of forward and backward in CUDA graphs by shape: bits, random numbers, memory, failures, Trainer."""

import copy
import gc

import pytest
import torch
from gpu.calls import captured, memory_goes_back, nobody_waits, other_stream  # noqa: F401  # the first is a fixture
from torch import nn

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import made
from integrations.huggingface.trainer import trained

import onepass
from onepass.gradients.graphed_calls import GraphedCalls
from onepass.integrations import huggingface
from onepass.integrations.huggingface import graph as graph_module
from onepass.kernels.philox import seeds_on_device

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
CUDA, BF16, WARM = torch.device("cuda", 0), torch.bfloat16, 3
LARGER = {"vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}


class Block(nn.Module):
    def __init__(self, size=256):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = onepass.nn.NormLinear(size, 2 * size), nn.Linear(size, size)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return onepass.dropout_add(self.drop(self.second(onepass.bias_swiglu(self.first(x)))), x, p=0.2)


def loop(call, module, rows, accumulate, steps=24, autocast=False):
    """Losses, weights and the random number after each backward, of a loop with clipping and fused AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    generator, found = torch.Generator().manual_seed(1), []
    for at in range(steps):
        x = torch.randn(rows[at % len(rows)], 256, generator=generator).to(CUDA, next(module.parameters()).dtype)
        torch.manual_seed(at)
        with torch.autocast("cuda", BF16, enabled=autocast):
            loss = call(x)
        (loss / accumulate).backward()
        found.append((loss.item(), torch.rand(1, device=CUDA).item()))
        if (at + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found, [parameter.detach().clone() for parameter in module.parameters()]


def same(found, expected):
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


def graphed(module, said):
    calls = GraphedCalls(said.append)

    def function(x):
        return module(x).float().square().mean()

    def call(x):
        return calls.run(module, function, (x,), {}) if calls.supports(module) else function(x)

    return calls, function, call


@pytest.mark.parametrize("autocast", (False, True), ids=("bf16", "autocast"))
@pytest.mark.parametrize("accumulate", (1, 3))
@pytest.mark.parametrize("rows", ((512,), (512, 512, 384)), ids=("one shape", "two"))
def test_a_loop_has_the_same_bits(rows, accumulate, autocast):
    dtype, said = torch.float32 if autocast else BF16, []
    one, other = (Block().to(CUDA, dtype) for _ in range(2))
    calls, _, call = graphed(one, said)
    _, function, _ = graphed(other, said)
    with seeds_on_device():
        found = loop(call, one, rows, accumulate, autocast=autocast)
        expected = loop(function, other, rows, accumulate, autocast=autocast)
    same(found, expected)
    assert calls.graphs == len(rows[-2:] if len(rows) == 3 else rows) and not said


def test_replays_follow_eager_calls_whose_results_are_alive():
    """What accumulates gradients stays alive with a result: it must belong to the stream of captures."""
    module, said = Block().to(CUDA, BF16), []
    calls, _, call = graphed(module, said)
    kept = []
    for rows in (512, 384, 256):
        for _ in range(WARM + 2):
            kept.append(call(torch.randn(rows, 256, device=CUDA, dtype=BF16)))
            kept[-1].backward()
    assert calls.graphs == 3 and not said


def test_a_replay_sets_the_flags_of_its_capture():
    module, said = Block().to(CUDA, BF16), []
    weight = module.first.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
    calls, _, call = graphed(module, said)
    x = torch.randn(64, 256, device=CUDA, dtype=BF16)
    for _ in range(WARM + 1):
        call(x).backward()
    weight.grad_added_to_main_grad = False
    before = weight.main_grad.clone()
    loss = call(x)
    assert calls.graphs == 1 and not weight.grad_added_to_main_grad
    loss.backward()
    assert weight.grad_added_to_main_grad and not torch.equal(weight.main_grad, before)


def test_a_capture_that_fails_leaves_everything_usable():
    module, said = Block().to(CUDA, BF16), []
    calls = GraphedCalls(said.append)

    def function(x):
        y = module(x)
        return y.float().square().mean() * (1 + 0 * y.float().sum().item())

    for _ in range(2 * WARM + 4):  # with a second try
        assert calls.supports(module)
        calls.run(module, function, (torch.randn(64, 256, device=CUDA, dtype=BF16),), {}).backward()
        torch.rand(3, device=CUDA)
    torch.cuda.empty_cache()
    assert calls.graphs == 0 and len(said) == 1 and said[0].startswith("a shape whose capture failed: ")
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


def test_shapes_share_memory():
    module, said = Block(1024).to(CUDA, BF16), []
    calls = GraphedCalls(said.append)

    def step(rows):
        assert calls.supports(module)
        calls.run(module, lambda x: module(x).float().mean(), (torch.ones(rows, 1024, device=CUDA, dtype=BF16),), {}).backward()
        module.zero_grad()

    reserved = []
    for rows in (16384, 16000, 15000, 14000):
        for _ in range(WARM + 1):
            step(rows)
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert calls.graphs == 4
    assert reserved[-1] < 1.5 * reserved[0]  # inputs of each shape are apart


# ---- models of transformers ----


def pair(family="Llama", dtype=BF16, main_grad=False, **options):
    torch.manual_seed(0)
    model = made(family, **options).to(CUDA, dtype).train()
    other = copy.deepcopy(model)
    applied = huggingface.apply(model, graph=True, main_grad=main_grad)
    return (model, applied), (other, huggingface.apply(other, main_grad=main_grad))


def row(applied):
    return next(each for each in applied.rows if each.part == "graph")


def ids(rows=4, tokens=64, seed=1):
    return torch.randint(3, 96, (rows, tokens), generator=torch.Generator().manual_seed(seed)).to(CUDA)


def model_steps(model, applied, main_grad, count=8, accumulate=2):
    more = {"max_norm": 1.0} if main_grad else {}
    optimizer = applied.optimizer(lr=1e-3, **more) if main_grad else torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found = []
    for at in range(count):
        torch.manual_seed(at)
        loss = model(input_ids=ids(seed=at), labels=ids(seed=at), use_cache=False).loss
        loss.backward()
        found.append(loss.item())
        if (at + 1) % accumulate == 0:
            if not main_grad:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("family", "options"),
    [("Llama", {}), ("Qwen3", {}), ("GPT2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0}), ("Qwen3Moe", {})],
)
@pytest.mark.parametrize("main_grad", (False, True), ids=("grad", "main_grad"))
def test_models_have_the_same_bits(family, options, main_grad):
    (model, applied), (other, plain) = pair(family, main_grad=main_grad, **options)
    same(model_steps(model, applied, main_grad), model_steps(other, plain, main_grad))  # both draw as graphs do
    assert row(applied).by == "CUDA graphs of 1 shape" and row(applied).why is None
    applied.undo()


def test_attentions_dropout_is_pytorchs():
    """It may take another kernel in a capture, or have other last bits: replays drop anew, and train."""
    (model, applied), _ = pair("GPT2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.5)
    batch = {"input_ids": ids(), "labels": ids()}
    losses = {steps_of(model, [batch], 1).item() for _ in range(WARM + 6)}
    assert len(losses) == WARM + 6
    assert row(applied).by == "CUDA graphs of 1 shape" and row(applied).why is None
    applied.undo()


def test_a_replay_waits_for_nobody():
    (model, applied), _ = pair()
    tokens = ids()
    for _ in range(WARM + 1):
        model(input_ids=tokens, labels=tokens).loss.backward()
    with nobody_waits():
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert row(applied).why is None
    applied.undo()


def steps_of(model, given, count):
    """Steps as people write them: the last call's loss is alive during the next call."""
    for at in range(count):
        loss = model(use_cache=False, **given[at % len(given)]).loss
        loss.backward()
        model.zero_grad()
    return loss


def test_calls_without_a_graph_whose_results_are_alive_at_a_capture():
    (model, applied), _ = pair()
    batch = {"input_ids": ids(), "labels": ids()}
    positions = torch.arange(64, device=CUDA)[None].repeat(4, 1)
    steps_of(model, [batch, {**batch, "position_ids": positions}], 2 * WARM + 4)
    assert row(applied).by == "CUDA graphs of 1 shape"
    assert row(applied).why == "calls without: position_ids, whose documents have to be counted,"
    applied.undo()


def test_a_result_from_before_apply_costs_a_try_at_most():
    model, batch = made("Llama").to(CUDA, BF16).train(), {"input_ids": ids(), "labels": ids()}
    before = model(**batch).loss
    applied = huggingface.apply(model, graph=True)
    steps_of(model, [batch], WARM + 1)
    before.backward()
    del before
    steps_of(model, [batch], WARM + 1)
    assert row(applied).by == "CUDA graphs of 1 shape" and row(applied).why is None
    applied.undo()


def test_a_graph_of_ones_own_around_the_model():
    (model, applied), (other, _) = pair()
    batch = {"input_ids": ids(), "labels": ids()}
    loss, graph = captured(lambda: model(use_cache=False, **batch).loss)
    graph.replay()
    torch.testing.assert_close(loss, other(use_cache=False, **batch).loss)
    del loss, graph
    steps_of(model, [batch], WARM + 1)
    assert row(applied).by == "CUDA graphs of 1 shape" and row(applied).why is None
    applied.undo()


def test_a_whole_steps_graph_around_the_model():
    (model, applied), (other, _) = pair()
    batch, losses = {"input_ids": ids(), "labels": ids()}, []
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)

        def step(each=each, optimizer=optimizer, **given):
            loss = each(**given).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = onepass.graphed_step(step)
        losses.append([run(**batch).item() for _ in range(6)])
    assert losses[0] == losses[1]
    assert row(applied).by == "CUDA graphs, of no shape yet" and row(applied).why is None
    applied.undo()


def test_layers_that_the_cpu_drops_are_dropped_at_each_call():
    (model, applied), _ = pair("OPT", layerdrop=0.5)
    batch = {"input_ids": ids(), "labels": ids()}
    losses = {round(steps_of(model, [batch], 1).item(), 3) for _ in range(24)}
    assert len(losses) > 1
    applied.undo()


def test_undo_frees_the_graphs_memory():
    torch.manual_seed(0)
    model = made("Llama", **LARGER).to(CUDA, BF16).train()
    tokens, reserved = ids(rows=64, tokens=512), []

    def note():
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())

    note()
    applied = huggingface.apply(model, graph=True)
    steps_of(model, [{"input_ids": tokens, "labels": tokens}], WARM + 2)
    note()
    applied.undo()
    note()
    before, graphed, after = reserved
    assert after - before < (graphed - before) / 4, reserved


def test_rows_that_are_padded_are_as_near_as_without():
    (model, applied), (other, _) = pair(**LARGER, dtype=torch.float32)
    for tokens in (61, 50, 57, 64, 49, 62):
        given = ids(tokens=tokens)
        mask, labels = torch.ones_like(given), given.clone()
        mask[0, -9:] = 0
        labels[mask == 0] = -100
        losses = [each(input_ids=given, labels=labels, attention_mask=mask).loss for each in (model, other)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        for loss in losses:
            loss.backward()
    for one, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    assert row(applied).by == "CUDA graphs of 1 shape" and row(applied).why is None
    applied.undo()


@pytest.mark.parametrize("options", ({}, {"bf16": True}, {"label_smoothing_factor": 0.1}), ids=("", "autocast", "smoothed"))
def test_trainer_trains_as_without(tmp_path, options, monkeypatch):
    monkeypatch.setattr(graph_module, "padded_length", lambda tokens: tokens)
    found = []
    for graph in (True, False):
        torch.manual_seed(0)
        model = made("Llama", **LARGER).to(torch.float32 if options else BF16)
        applied = huggingface.apply(model, graph=graph)
        found.append(trained(model, None, tmp_path, steps=8, use_cpu=False, max_grad_norm=1.0, learning_rate=1e-3, **options))
        if graph:
            assert row(applied).by == "CUDA graphs of 1 shape" and row(applied).why is None
            applied.undo()
    assert found[0] == found[1] and len(found[0]) == 8
