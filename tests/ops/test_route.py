"""What route is, and how it behaves under autograd, the compiler and whatever else people do to an op."""

import math

import pytest
import torch
from ops import route_oracle as oracle
from ops.calls import backends, equal, needs_triton, refused
from ops.oracle import BF16, DEVICE, FP32
from ops.route_oracle import NAN, Case, judge_case, small_tiles

import onepass
import onepass.ops.routing.route as module
from onepass.ops.routing import kernels
from onepass.testing.poison import bytes_kept, saved_tensors

OPTIONS = {
    "softmax": {}, "sigmoid": {"score": "sigmoid"}, "plain": {"normalise": False},
    "groups": {"groups": (4, 2), "score": "sigmoid"},
}  # fmt: skip
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def scores(*shape, dtype=FP32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 9, 24)), generator=generator).to(DEVICE, dtype).requires_grad_()


def step(logits, backend, k=3, **options):
    """Every result, and dlogits of weights and losses."""
    logits = logits.detach().requires_grad_()
    routing = onepass.route(logits, k, aux=0.5, z=0.25, backend=backend, **options)
    dy = torch.linspace(-1, 2, routing.weights.numel(), device=DEVICE).view(routing.weights.shape)
    (dlogits,) = torch.autograd.grad((routing.weights * dy).sum() + routing.aux_loss + 2 * routing.z_loss, logits)
    return [*(t.detach() for t in routing if t is not None), dlogits]


# ---- what it computes ----


@backends
def test_the_formula_by_hand(backend):
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 1.0]], device=DEVICE)
    a, b = math.exp(2.0), math.exp(1.0)
    routing = onepass.route(logits, 2, aux=1.0, z=1.0, backend=backend)
    assert routing.chosen.tolist() == [[1, 2], [2, 0]] and routing.counts.tolist() == [1, 1, 2]
    torch.testing.assert_close(routing.weights[0], torch.tensor([a / (a + b), b / (a + b)], device=DEVICE))
    p = logits.softmax(-1)
    aux = 3 * (torch.tensor([0.25, 0.25, 0.5], device=DEVICE) * p.mean(0)).sum()
    torch.testing.assert_close(routing.aux_loss, aux)
    torch.testing.assert_close(routing.z_loss, logits.logsumexp(-1).square().mean())
    bias = torch.tensor([1.0, 0.0, 0.0], device=DEVICE)
    routing = onepass.route(logits, 2, score="sigmoid", bias=bias, normalise=False, scale=2.0, backend=backend)
    assert routing.chosen.tolist() == [[0, 1], [0, 2]]
    torch.testing.assert_close(routing.weights, 2 * logits.sigmoid().gather(1, routing.chosen))
    assert routing.aux_loss is None and routing.z_loss is None and routing.kept is None


@backends
def test_groups_are_those_of_the_two_best(backend):
    """Group 0 has the best expert, group 1 the best two."""
    logits = torch.tensor([[3.0, -9.0, -9.0, 2.5, 2.4, -9.0]], device=DEVICE)
    routing = onepass.route(logits, 2, score="sigmoid", groups=(2, 1), backend=backend)
    assert routing.chosen.tolist() == [[3, 4]]
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0, 0.0, 0.0], device=DEVICE)
    routing = onepass.route(logits, 3, score="sigmoid", groups=(2, 1), bias=bias, backend=backend)
    assert routing.chosen.tolist() == [[1, 0, 2]]


@needs_triton
@pytest.mark.parametrize("case", [*oracle.main_cases(), *oracle.real_cases()], ids=str)
def test_within_the_budget(case):
    report = judge_case(module, case)
    assert report, f"{case}\n{report}"


@pytest.mark.parametrize("case", oracle.main_cases(), ids=str)
def test_the_torch_backend_is_within_the_budget(case):
    report = judge_case(module, case, "torch")
    assert report, f"{case}\n{report}"


@backends
@options
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_tokens(shape, options, backend):
    *results, dlogits = step(scores(*shape), backend, **options)
    assert dlogits.shape == shape and results[0].shape == (*shape[:-1], 3)
    assert not results[2].any() and results[3] == results[4] == 0


@backends
@options
def test_equal_experts_are_chosen_in_their_order(options, backend):
    logits = torch.zeros(5, 24, device=DEVICE)
    assert (onepass.route(logits, 5, backend=backend, **options).chosen == torch.arange(5, device=DEVICE)).all()
    logits[:, 7] = logits[:, 20] = 1.0
    expected = [7, 20, 0] if "groups" not in options else [7, 20, 6]
    assert onepass.route(logits, 3, backend=backend, **options).chosen.tolist() == [expected] * 5
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0]], device=DEVICE)
    assert onepass.route(logits, 2, backend=backend).chosen.tolist() == [[0, 1]]


@backends
@options
@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, -NAN])
def test_a_strange_token_leaves_others_alone(value, options, backend):
    """Its own weights, chosen experts and gradient are its own affair, but no expert is chosen twice or missing."""
    logits = scores(13, 24).detach()
    strange = logits.clone()
    strange[4, 3] = value
    strange[5, :] = value

    def of(x):
        x = x.clone().requires_grad_()
        routing = onepass.route(x, 3, backend=backend, **options)
        return [routing.weights.detach(), routing.chosen, torch.autograd.grad(routing.weights.square().sum(), x)[0]]

    others = torch.tensor([i for i in range(13) if i not in (4, 5)], device=DEVICE)
    before, after = of(logits), of(strange)
    assert equal([t[others] for t in before], [t[others] for t in after])
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 24 for row in after[1].tolist())
    assert math.isinf(value) or after[0][4].isnan().any()


@backends
@pytest.mark.parametrize("options", [{}, {"normalise": False}, {"score": "sigmoid"}, {"groups": (3, 2)}], ids=str)
def test_experts_that_are_masked_have_no_weight_and_no_gradient(options, backend):
    """As by torch.softmax: the others are as if the masked ones, whose logits are -inf, were not there."""
    logits = scores(13, 24).detach()
    masked = torch.zeros_like(logits, dtype=torch.bool)
    masked[:, ::3] = True
    masked[2, 2:] = True  # fewer experts than k
    logits = logits.masked_fill(masked, -math.inf).requires_grad_()
    routing = onepass.route(logits, 4, aux=0.1, z=0.1, backend=backend, **options)
    loss = routing.weights.square().sum() + routing.aux_loss + routing.z_loss
    (grad,) = torch.autograd.grad(loss, logits)
    hidden = masked.gather(1, routing.chosen)
    assert (routing.weights[hidden] == 0).all() and hidden[2].sum() == 3 and hidden.sum() == 3
    assert routing.weights.isfinite().all() and loss.isfinite() and grad.isfinite().all() and (grad[masked] == 0).all()


@backends
def test_nan_of_a_token_reaches_its_weights_past_a_bias(backend):
    logits, bias = scores(4, 24).detach(), torch.zeros(24, device=DEVICE)
    bias[:3] = 100.0
    logits[1, 20] = NAN
    weights = onepass.route(logits, 3, bias=bias, backend=backend).weights
    assert weights[1].isnan().all() and weights[[0, 2, 3]].isfinite().all()


@backends
def test_experts_that_a_bias_alone_would_choose_have_weights(backend):
    """Their probabilities are 0 in fp32: 0 / 0 would be NaN."""
    logits = torch.full((3, 8), 500.0, device=DEVICE)
    logits[:, :2] = torch.tensor([1.0, 0.0])
    bias = torch.tensor([5.0, 5.0, 0, 0, 0, 0, 0, 0], device=DEVICE)
    routing = onepass.route(logits, 2, bias=bias, backend=backend)
    assert routing.chosen.tolist() == [[0, 1]] * 3
    torch.testing.assert_close(routing.weights, logits[:, :2].softmax(-1))


@needs_triton
def test_tokens_alone_have_the_bits_of_tokens_together():
    logits = scores(37, 40).detach()
    with small_tiles(module, Case()):
        whole, part = (onepass.route(x, 4, backend="triton") for x in (logits, logits[10:17]))
    assert equal([t[10:17] for t in whole[:2]], part[:2])


@needs_triton
@options
def test_any_number_of_programs_counts_alike(options):
    logits = scores(37, 24).detach()
    expected = step(logits, "torch", **options)
    for case in (Case(), Case(path="")):
        with small_tiles(module, case):
            found, again = (step(logits, "triton", **options) for _ in range(2))
        assert equal(found, again) and equal(found[1:3], expected[1:3])


# ---- capacity ----


def by_hand(weights, chosen, experts, most, drop):
    """Each expert's tokens, one by one."""
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    for expert in range(experts):
        places = (chosen == expert).nonzero().tolist()
        if drop == "probs":
            places.sort(key=lambda place: -weights[tuple(place)].item())
        for place in places[:most]:
            kept[tuple(place)] = True
    return kept


@backends
@pytest.mark.parametrize("drop", ("probs", "position"))
@pytest.mark.parametrize("factor", (0.5, 1.0, 1.3, 100.0))
def test_capacity(factor, drop, backend):
    logits = scores(2, 9, 8)
    plain = onepass.route(logits, 3, backend=backend)
    routing = plain.with_capacity(factor, drop)
    most = math.ceil(2 * 9 * 3 / 8 * factor)
    flat = [t.detach().flatten(0, 1) for t in plain[:2]]
    expected = by_hand(*flat, 8, most, drop).view(2, 9, 3)
    assert torch.equal(routing.kept, expected) and equal(routing[1:3], plain[1:3])
    assert torch.equal(routing.weights, plain.weights * expected)
    dy = torch.linspace(-1, 2, 54, device=DEVICE).view(2, 9, 3)
    found, wanted = (
        torch.autograd.grad(t, logits, g, retain_graph=True)[0]
        for t, g in ((routing.weights, dy), (plain.weights, dy * expected))
    )
    assert torch.equal(found, wanted)


@backends
def test_of_equal_weights_the_first_tokens_are_kept(backend):
    logits = torch.zeros(6, 2, device=DEVICE)
    for drop in ("probs", "position"):
        routing = onepass.route(logits, 1, backend=backend).with_capacity(1.0, drop)
        assert routing.kept.flatten().tolist() == [True] * 3 + [False] * 3 and routing.counts.tolist() == [6, 0]


@backends
def test_a_dropped_token_of_nan_is_zero(backend):
    logits = torch.zeros(4, 2, device=DEVICE)
    logits[3] = NAN
    routing = onepass.route(logits, 1, backend=backend).with_capacity(1, "position")
    assert routing.weights.isfinite().all()


# ---- autograd ----


@backends
def test_a_bias_gets_no_gradient(backend):
    bias = torch.zeros(24, device=DEVICE, requires_grad=True)
    routing = onepass.route(scores(), 3, bias=bias, aux=1.0, backend=backend)
    (grad,) = torch.autograd.grad(routing.weights.sum() + routing.aux_loss, bias, allow_unused=True)
    assert grad is None
    assert not onepass.route(scores().detach(), 3, bias=bias, backend=backend).weights.requires_grad


@needs_triton
def test_logits_and_choices_are_kept():
    logits = scores(64, 24)
    for aux, more in ((None, 0), (1.0, 24 * 4)):
        with saved_tensors() as kept:
            routing = onepass.route(logits, 3, aux=aux, z=1.0, backend="triton")
        assert bytes_kept(kept, logits) == 64 * 3 * 8 + more
        routing.weights.sum().backward()


@needs_triton
@options
def test_each_output_alone(options):
    """The gradient of one is that of all where the others' are zero."""
    logits = scores()
    for i in range(3):
        found = []
        for backend in ("triton", "torch"):
            routing = onepass.route(logits, 3, aux=0.5, z=0.25, backend=backend, **options)
            y = (routing.weights, routing.aux_loss, routing.z_loss)[i]
            found += torch.autograd.grad(y, logits, torch.linspace(1, 2, y.numel(), device=DEVICE).view(y.shape))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@needs_triton
def test_a_new_number_of_tokens_binds_nothing_new():
    kernels._forward_plan.cache_clear()
    for tokens in (1, 2, 5, 9, 16):
        onepass.route(scores(tokens, 24).detach(), 3, backend="triton")
    assert kernels._forward_plan.cache_info().currsize == 1


# ---- as models route ----


@backends
def test_as_mixtral_and_qwen_route(backend):
    logits = scores(31, 60).detach()
    probabilities, chosen = logits.softmax(-1).topk(6)
    routing = onepass.route(logits, 6, backend=backend)
    assert torch.equal(routing.chosen, chosen)
    torch.testing.assert_close(routing.weights, probabilities / probabilities.sum(-1, keepdim=True))
    torch.testing.assert_close(onepass.route(logits, 6, normalise=False, backend=backend).weights, probabilities)


@backends
def test_as_gpt_oss_routes(backend):
    logits = scores(31, 32).detach()
    best, chosen = logits.topk(4)
    routing = onepass.route(logits, 4, backend=backend)
    assert torch.equal(routing.chosen, chosen)
    torch.testing.assert_close(routing.weights, best.softmax(-1))


@backends
def test_as_deepseek_routes(backend):
    models = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = models.DeepseekV3Config(hidden_size=16, n_routed_experts=32, num_experts_per_tok=4, n_group=4, topk_group=2)
    gate = models.DeepseekV3TopkRouter(config).to(DEVICE)
    with torch.no_grad():
        gate.weight.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        gate.e_score_correction_bias.normal_(0, 0.1, generator=torch.Generator(DEVICE).manual_seed(1))
    logits, weights, chosen = gate(torch.randn(23, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE))
    routing = onepass.route(
        logits.detach(), 4, score="sigmoid", bias=gate.e_score_correction_bias, groups=(4, 2), scale=config.routed_scaling_factor,
        backend=backend,
    )  # fmt: skip
    order = chosen.argsort(-1)
    torch.testing.assert_close(routing.chosen.sort(-1).values, chosen.gather(-1, order))
    torch.testing.assert_close(routing.weights.gather(-1, routing.chosen.argsort(-1)), weights.detach().gather(-1, order))


@backends
def test_the_loss_is_that_of_transformers(backend):
    loss = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    logits = scores(31, 8).detach()
    # Mixtral's sums the shares of k choices, and route's has the mean: 1 where all experts get equally many
    torch.testing.assert_close(onepass.route(logits, 2, aux=2.0, backend=backend).aux_loss, loss((logits,), 8, 2))


# ---- what is said of a call ----


@needs_triton
def test_explain_names_the_kernels():
    logits = torch.empty(64, 128, device=DEVICE, dtype=BF16)
    assert "16 tokens a program" in onepass.explain(onepass.route, logits, 8, backend="triton").variant
    assert "nothing to do" in onepass.explain("route", logits[:0], 8, backend="triton").variant


@needs_triton
def test_what_the_kernels_do_not_take():
    logits = torch.randn(3, 1025, device=DEVICE)
    assert "1025 experts" in onepass.explain("route", logits, 2).reasons["triton"]
    assert torch.equal(onepass.route(logits, 2).chosen, logits.topk(2).indices)
    with pytest.raises(RuntimeError, match="1025 experts"):
        onepass.route(logits, 2, backend="triton")


@pytest.mark.parametrize(
    ("raised", "words", "k", "options"),
    [
        (ValueError, ("k", "1 to 12", "0"), 0, {}),
        (ValueError, ("k", "1 to 12", "13"), 13, {}),
        (ValueError, ("k", "int", "True"), True, {}),
        (ValueError, ("k", "int", "2.0"), 2.0, {}),
        (ValueError, ("score", "'sigmoid'", "'tanh'"), 2, {"score": "tanh"}),
        (TypeError, ("scale", "number", "None"), 2, {"scale": None}),
        (ValueError, ("scale", "finite", "inf"), 2, {"scale": math.inf}),
        (TypeError, ("aux", "number", "'1'"), 2, {"aux": "1"}),
        (ValueError, ("aux", "at least 0", "-1"), 2, {"aux": -1}),
        (ValueError, ("z", "finite", "nan"), 2, {"z": NAN}),
        (TypeError, ("groups", "two ints", "4"), 2, {"groups": 4}),
        (TypeError, ("groups", "two ints", "(4,)"), 2, {"groups": (4,)}),
        (ValueError, ("groups", "divide the 12 experts", "(5, 2)"), 2, {"groups": (5, 2)}),
        (ValueError, ("groups", "at least two", "(12, 2)"), 2, {"groups": (12, 2)}),
        (ValueError, ("groups", "from 1 to 4", "(4, 5)"), 2, {"groups": (4, 5)}),
        (ValueError, ("groups", "k = 4 experts", "(4, 1)"), 4, {"groups": (4, 1)}),
        (ValueError, ("bias", "(12,)", "(3, 12)"), 2, {"bias": torch.zeros(3, 12)}),
    ],
)
def test_what_is_wrong_is_said(raised, words, k, options):
    refused(onepass.route, (torch.zeros(3, 12), k), options, raised, words)


@pytest.mark.parametrize(
    ("raised", "words", "given"),
    [
        (TypeError, "factor must be a number, but is '2'", ("2",)),
        (ValueError, "factor must be above 0 and finite, but is 0", (0,)),
        (ValueError, "drop must be one of 'probs', 'position', but is 'last'", (1.0, "last")),
    ],
)
def test_what_is_wrong_of_a_capacity_is_said(raised, words, given):
    with pytest.raises(raised, match=words):
        onepass.route(torch.zeros(3, 12), 2).with_capacity(*given)
