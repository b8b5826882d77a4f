"""Routers of every family by `onepass.route`, by trial of what they compute."""

import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import made  # noqa: E402

import onepass  # noqa: E402
from onepass.integrations import huggingface  # noqa: E402
from onepass.integrations.huggingface import routers as module  # noqa: E402
from onepass.integrations.huggingface.routers import find_router  # noqa: E402
from onepass.ops.routing.route import route_reference  # noqa: E402
from onepass.testing.mutants import mutate  # noqa: E402

ROUTERS = {
    **dict.fromkeys(("Mixtral", "Qwen3Next", "Qwen3_5MoeText", "GptOss", "GraniteMoe"), "route: softmax, normalised, top 2"),
    "Qwen3Moe": "route: softmax, top 2",
    "DeepseekV3": "route: sigmoid, normalised, top 2, 1 of 2 groups, times 2.5",
    "Glm4Moe": "route: sigmoid, normalised, top 2, 1 of 2 groups",
    "MiniMaxM2": "route: sigmoid, normalised, top 2",
    "NemotronH": "route: sigmoid, normalised, top 2",
}


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def routers_of(applied):
    return {row.name: row for row in applied.replaced if row.by.startswith("route: ")}


@pytest.mark.parametrize("family", ROUTERS)
def test_every_familys_router_is_found(family):
    """test_experts compares losses and gradients."""
    found = routers_of(huggingface.apply(made(family)))
    assert {row.by for row in found.values()} == {ROUTERS[family]}


class Router(nn.Module):
    """As DeepSeek V3's."""

    experts, hidden, k, count, top, scale = 16, 8, 4, 4, 2, 2.5

    def __init__(self):
        super().__init__()
        self.num_group, self.topk_group, self.top_k, self.hidden_dim = self.count, self.top, self.k, self.hidden
        self.weight = nn.Parameter(torch.randn(self.experts, self.hidden))
        self.register_buffer("bias", torch.randn(self.experts) * 0.2)

    def scores(self, logits):
        return logits.sigmoid()

    def choose(self, scores):
        grouped = (scores + self.bias).view(-1, self.num_group, self.experts // self.num_group)
        best = grouped.topk(2, -1)[0].sum(-1).topk(self.topk_group, -1).indices
        kept = torch.zeros_like(grouped[..., 0]).scatter(1, best, 1).bool()
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1).topk(self.top_k, -1, sorted=False).indices

    def weigh(self, chosen):
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * self.scale

    def forward(self, x):
        logits = nn.functional.linear(x.view(-1, self.hidden_dim).float(), self.weight.float())
        scores = self.scores(logits)
        indices = self.choose(scores)
        return logits, self.weigh(scores.gather(1, indices)), indices


def changed(**methods):
    return type("Changed", (Router,), methods)()


def _of_the_choice(self, x):
    """Weight by the scores that choose."""
    logits = nn.functional.linear(x.float(), self.weight.float())
    indices = self.choose(logits.sigmoid())
    return logits, self.weigh((logits.sigmoid() + self.bias).gather(1, indices)), indices


OTHERS = {  # computed otherwise: left alone
    "another score": {"scores": lambda self, logits: logits.tanh()},
    "weights by the choice's scores": {"forward": _of_the_choice},
    "weights squared": {"weigh": lambda self, chosen: chosen.square()},
    "the least": {"k": 1, "choose": lambda self, scores: (scores + self.bias).argmin(-1, keepdim=True)},  # all weights alike
    "noise in training": {"scores": lambda self, logits: (logits + torch.rand_like(logits) * self.training).sigmoid()},
    "noise in evaluation": {"scores": lambda self, logits: (logits + logits.flip(1) * (not self.training)).sigmoid()},
    "two results": {"forward": lambda self, x: Router.forward(self, x)[:2]},
}


def test_what_a_router_computes_is_found():
    match = find_router(Router())
    assert str(match.options) == "route: sigmoid, normalised, top 4, 2 of 4 groups, times 2.5"
    assert match.wide == (True, True)
    plain = find_router(changed(choose=lambda self, scores: (scores + self.bias).topk(4, -1).indices, weigh=lambda self, c: c))
    assert str(plain.options) == "route: sigmoid, top 4"


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left(name):
    assert find_router(changed(**OTHERS[name]).eval()) is None


MUTANTS = {
    "choices are not compared": ("_scale_of", "not torch.equal(chosen, expected)", "False", "the least"),
    "weights are not compared": (
        "_scale_of",
        "if close(weights, right * scale, 2e-6 * max(1.0, abs(scale)))",
        "if scale",
        "weights squared",
    ),
    "a trial in evaluation": ("_Trial.match", "(True, False)", "(False, False)", "noise in training"),
    "a trial in training": ("_Trial.match", "(True, False)", "(True, True)", "noise in evaluation"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    *change, shown = MUTANTS[name]
    mutant = mutate(module, *change)
    assert mutant.find_router(changed(**OTHERS[shown]).eval()) is not None


def test_a_changed_router_runs_its_own_code():
    model = made("DeepseekV3")
    applied = huggingface.apply(model)
    row = next(iter(routers_of(applied).values()))
    router = model.get_submodule(row.name)
    x = torch.randn(6, router.weight.shape[1])
    for k in (2, 3):
        router.top_k = k
        assert router(x)[2].shape == (6, k)
    assert "top_k" in row.now(model).why
    applied.undo()
    assert "forward" not in vars(router)


def test_bf16_tokens_have_fp32_logits_and_the_buffers_bias():
    match = find_router(Router().bfloat16())
    x = torch.randn(7, 8, dtype=torch.bfloat16)
    logits, weights, chosen = match(x, None)
    assert (logits.dtype, weights.dtype, chosen.dtype) == (torch.float32, torch.float32, torch.int64)
    right = route_reference(logits, bias=match.module.bias, **match.options._asdict())
    assert torch.equal(chosen, right.chosen)
    same = copy.deepcopy(match.module)
    same.bias.add_(torch.arange(16.0).bfloat16())
    assert not torch.equal(chosen.sort().values, find_router(same)(x, None)[2].sort().values)


def test_weights_that_the_code_casts_have_the_tokens_type():
    cast = changed(
        forward=lambda self, x: tuple(each.to(x.dtype) if i == 1 else each for i, each in enumerate(Router.forward(self, x)))
    )
    match = find_router(cast)
    assert match.wide == (True, False)
    logits, weights, _ = match(torch.randn(3, 8, dtype=torch.bfloat16), None)
    assert (logits.dtype, weights.dtype) == (torch.float32, torch.bfloat16)
