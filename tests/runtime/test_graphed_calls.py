"""Graphs of forward and backward by shape, with the stand-in for a CUDA graph: whole loops, beside the same without."""

import copy

import pytest
import torch
from runtime import cpu_graph
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import graphed_calls as module
from onepass.gradients.graphed_calls import GraphedCalls
from onepass.parallel import AdamW, MainGrads
from onepass.runtime.dispatch import NotTwiceDifferentiable

SIZE, ROWS, WARM = 6, 5, 3


@pytest.fixture(autouse=True)
def _plain_backend():
    with onepass.use_backend("torch"):
        yield


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    return cpu_graph.install(monkeypatch, module)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, 8), nn.Tanh(), onepass.nn.Linear(8, 3))


def batches(count, rows=(ROWS,)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows[at % len(rows)], SIZE, generator=generator) for at in range(count)]


class Graphed:
    """A module whose calls may be graphs, as a function of its inputs."""

    def __init__(self, made, forward=None, **options):
        self.said = []
        self.module, self.forward = made, forward or (lambda x: {"loss": made(x).square().mean(), "by": "mean", "none": None})
        self.calls = GraphedCalls(self.said.append, **options)

    def __call__(self, *args, **kwargs):
        if not self.calls.supports(self.module):
            return self.forward(*args, **kwargs)
        return self.calls.run(self.module, self.forward, args, kwargs)


def trained(call, made, xs, accumulate=1, to_none=True, optimizer=None):
    """Losses of a loop as people write it, with clipping and a schedule, and the weights after it."""
    optimizer = optimizer or torch.optim.AdamW(made.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for at, x in enumerate(xs, 1):
        found = call(x)
        (found["loss"] / accumulate).backward()
        losses.append(found["loss"].item())
        if at % accumulate == 0:
            nn.utils.clip_grad_norm_(made.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(to_none)
    return losses, [parameter.detach().clone() for parameter in made.parameters()]


def same(found, expected):
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


# ---- loops ----


@pytest.mark.parametrize("to_none", (True, False), ids=("none", "zeros"))
@pytest.mark.parametrize("accumulate", (1, 3))
@pytest.mark.parametrize("rows", ((ROWS,), (ROWS, ROWS, 7)), ids=("one shape", "two"))
def test_a_loop_has_the_same_bits(graphs, rows, accumulate, to_none):
    xs, one, other = batches(24, rows), model(), model()
    graphed = Graphed(one)
    found = trained(graphed, one, xs, accumulate, to_none)
    same(found, trained(Graphed(other).forward, other, xs, accumulate, to_none))
    assert graphed.calls.graphs == len(set(rows)) and not graphed.said and len(set(found[0])) == 24
    replays = sum(graph.replays for graph, _ in graphs)
    assert replays == 2 * (24 - WARM * len(set(rows)))  # forward and backward


def test_gradients_are_added_by_hand_between_microbatches():
    """A graph's memory is overwritten by its next replay: what `.grad` holds must have moved."""
    made, other = model(), model()
    graphed = Graphed(made)
    trained(graphed, made, batches(WARM + 1))
    other.load_state_dict(made.state_dict())
    first, second = batches(2)
    graphed(first)["loss"].backward()
    before = [parameter.grad.clone() for parameter in made.parameters()]
    graphed(second)  # forward alone, which may have memory that gradients had
    assert all(torch.equal(p.grad, grad) for p, grad in zip(made.parameters(), before, strict=True))


def test_each_shape_has_a_graph_up_to_a_number(graphs):
    made = model()
    graphed = Graphed(made, max_graphs=2)
    trained(graphed, made, batches(40, (2, 3, 4, 5)))
    assert graphed.calls.graphs == 2 and len(graphs) == 4
    assert graphed.said == ["other shapes than the first 2, which have graphs"]


def test_gradients_of_all_shapes_have_one_place():
    made = model()
    graphed = Graphed(made)
    trained(graphed, made, batches(4 * WARM, (2, 3)))
    one, other = (shape.graphs.grads for shape in graphed.calls._shapes.values())
    assert [a.data_ptr() for a in one] == [b.data_ptr() for b in other]


def test_numbers_and_autocast_belong_to_the_shape():
    made = model()
    graphed = Graphed(made, lambda x, scale=1.0: {"loss": scale * made(x).float().square().mean()})
    x = batches(1)[0]
    for _ in range(WARM + 1):
        for scale in (1.0, 2.0):
            graphed(x, scale=scale)["loss"].backward()
    assert graphed.calls.graphs == 2 and graphed(x, scale=2.0)["loss"] == 2 * graphed.forward(x)["loss"]
    for _ in range(WARM + 2):
        with torch.autocast("cpu", torch.bfloat16):
            expected = graphed.forward(x)["loss"]
            graphed(x)["loss"].backward()
        made[0].weight.data.mul_(1.5)  # a weight that was cast before would stay as it was
        with torch.autocast("cpu", torch.bfloat16):
            found = graphed(x)["loss"]
        assert found != expected and found == _under_autocast(graphed.forward, x)
        found.backward()
    assert graphed.calls.graphs == 3


def _under_autocast(function, x):
    with torch.autocast("cpu", torch.bfloat16):
        return function(x)["loss"]


# ---- gradients ----


def replaying(made=None, forward=None):
    """A module whose next call is a replay."""
    made = made or model()
    graphed = Graphed(made, forward)
    for x in batches(WARM + 1):
        graphed(x)["loss"].backward()
    made.zero_grad()
    assert graphed.calls.graphs == 1
    return graphed, made


def test_torch_autograd_grad_returns_gradients_that_stay():
    graphed, made = replaying()
    first, second = batches(2)
    found = torch.autograd.grad(graphed(first)["loss"], [made[0].weight])
    expected = torch.autograd.grad(graphed.forward(first)["loss"], [made[0].weight])
    graphed(second)["loss"].backward()
    assert torch.equal(found[0], expected[0]) and made[0].weight.grad is not None
    assert not torch.equal(made[0].weight.grad, found[0])


def test_hooks_after_accumulation_run():
    graphed, made = replaying()
    seen = []
    handle = made[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    graphed(batches(1)[0])["loss"].backward()
    handle.remove()
    assert len(seen) == 1 and torch.equal(seen[0], made[0].weight.grad)


def test_weights_that_the_loss_does_not_reach_get_none():
    made = model()
    made.append(nn.Linear(2, 2))
    graphed = Graphed(made, lambda x: {"loss": made[:3](x).square().mean()})
    trained(graphed, made, batches(WARM + 2))
    graphed(batches(1)[0])["loss"].backward()
    assert made[3].weight.grad is None and made[0].weight.grad is not None


def test_the_loss_alone_has_a_gradient_where_there_is_one(graphs):
    def forward(x):
        y = made(x)
        return {"loss": y.square().mean(), "logits": y, "count": torch.tensor(x.shape[0])}

    made = model()
    graphed, _ = replaying(made, forward)
    x = batches(1)[0]
    found, expected = graphed(x), forward(x)
    assert torch.equal(found["logits"], expected["logits"]) and found["count"] == ROWS and not found["count"].requires_grad
    with pytest.raises(RuntimeError, match="gradients must come by the loss"):
        found["logits"].sum().backward()
    found["loss"].backward()
    logits = found["logits"].detach().clone()
    replays = graphs[0][0].replays
    graphed(2 * x)
    assert torch.equal(found["logits"], logits) and graphs[0][0].replays == replays + 1  # a replay's results are one's own


def test_a_loss_outside_of_the_call():
    made, other = model(), model()
    graphed = Graphed(made, lambda x: {"logits": made(x), "more": made(x)})
    plain = Graphed(other, lambda x: {"logits": other(x), "more": other(x)})
    outside = lambda call: lambda x: {"loss": call(x)["logits"].exp().mean()}  # noqa: E731
    same(trained(outside(graphed), made, batches(9)), trained(outside(plain.forward), other, batches(9)))
    assert graphed.calls.graphs == 1


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_one_backward_once_differentiable():
    graphed, _ = replaying()
    x = batches(1)[0]
    loss = graphed(x)["loss"]
    with pytest.raises(NotTwiceDifferentiable):
        loss.backward(create_graph=True)
    del loss  # whose backward may come still
    loss = graphed(x)["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has one backward"):
        loss.backward()


def test_a_call_before_the_last_ones_backward_runs_as_it_is(graphs):
    graphed, made = replaying()
    first, second = batches(2)
    one, other = graphed(first)["loss"], graphed(second)["loss"]
    assert graphed.said == ["a call before the last one's backward"]
    (one + other).backward()
    found = [parameter.grad.clone() for parameter in made.parameters()]
    made.zero_grad()
    (graphed.forward(first)["loss"] + graphed.forward(second)["loss"]).backward()
    for parameter, grad in zip(made.parameters(), found, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    before = graphs[0][0].replays
    del one, other
    graphed(first)  # whose result goes without a backward
    graphed(second)["loss"].backward()
    assert graphs[0][0].replays == before + 2


# ---- main_grad ----


@pytest.mark.parametrize("accumulate", (1, 2))
def test_main_grad_has_the_same_bits(accumulate):
    found = []
    for graphed in (True, False):
        made = model()
        main_grads = MainGrads(made)
        optimizer = AdamW(main_grads, lr=0.1)
        call = Graphed(made)
        for at, x in enumerate(batches(16)):
            if at % accumulate == 0:
                main_grads.zero_()
            loss = (call if graphed else call.forward)(x)["loss"]
            if at % accumulate < accumulate - 1:
                with main_grads.accumulate():
                    loss.backward()
            else:
                loss.backward()
                main_grads.finish()
                optimizer.step(max_norm=0.1)
        assert call.calls.graphs == graphed and all(parameter.grad is None for parameter in made.parameters())
        found.append(([loss.item()], [p.detach() for p in made.parameters()] + [p.main_grad for p in made.parameters()]))
    same(*found)


def test_main_grad_takes_no_pass_of_torch_autograd_grad():
    made = model()
    main_grads = MainGrads(made)
    graphed = Graphed(made)
    for x in batches(WARM + 1):
        main_grads.zero_()
        graphed(x)["loss"].backward()
    before = made[2].weight.main_grad.clone()
    with pytest.raises(RuntimeError, match="and a CUDA graph adds to"):
        torch.autograd.grad(graphed(batches(1)[0])["loss"], [made[2].weight])
    assert torch.equal(made[2].weight.main_grad, before)
    main_grads.close()


def test_a_replay_sets_the_flags_of_its_capture():
    made = model()
    weight = made[2].weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(3, 8), False
    graphed, _ = replaying(made)
    assert weight.grad_added_to_main_grad
    weight.grad_added_to_main_grad = False
    before = weight.main_grad.clone()
    loss = graphed(batches(1)[0])["loss"]
    assert not weight.grad_added_to_main_grad
    loss.backward()
    assert weight.grad_added_to_main_grad and not torch.equal(weight.main_grad, before)


def test_memory_that_is_released_can_not_be_a_graphs():
    made = model()
    main_grads = MainGrads(made, release=True)
    graphed = Graphed(made)
    graphed(batches(1)[0])["loss"].backward()
    assert graphed.said == ["gradients whose memory is released"]
    main_grads.close()


# ---- what runs as it is ----


def _hook(*_):
    return None


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("change", "x", "reason"),
    [
        (lambda made: made.requires_grad_(False), None, "a model without a trained weight"),
        (lambda made: made[1].register_forward_hook(_hook), None, "hooks on modules, which a replay would not call"),
        (lambda made: made[0].weight.register_hook(_hook), None, "hooks on weights' gradients"),
        (lambda made: None, torch.ones(ROWS, SIZE, requires_grad=True), "an input that requires a gradient"),
        (lambda made: None, torch.ones(ROWS, SIZE).as_subclass(Sub), "a Sub among the inputs"),
        (lambda made: made[1].to("meta").register_buffer("b", torch.ones(1, device="meta")), None, "weights on cpu and meta"),
    ],
)
def test_reasons_are_said_once(change, x, reason, graphs):
    made = model()
    change(made)
    graphed = Graphed(made)
    for _ in range(WARM + 2):
        graphed(batches(1)[0] if x is None else x)
    assert graphed.said == [reason] and list(graphed.calls.reasons) == [reason] and not graphs


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (lambda made: made[0].requires_grad_(False), True),
        (lambda made: setattr(made[0].weight, "data", made[0].weight.data.clone()), True),
        (lambda made: made[1].eval(), True),
        (lambda made: made.__setitem__(1, nn.ReLU()), True),
        (lambda made: made[0].register_parameter("bias", None), True),
        (lambda made: made.load_state_dict(model().state_dict()), False),
    ],
)
def test_a_model_that_has_changed_is_captured_anew(change, again, graphs):
    graphed, made = replaying()
    change(made)
    other = copy.deepcopy(made)
    for x in batches(WARM + 2):
        found, expected = graphed(x)["loss"], Graphed(other).forward(x)["loss"]
        assert torch.equal(found, expected)
        for each, loss in ((made, found), (other, expected)):
            each.zero_grad()
            loss.backward()
        for one, theirs in zip(made.parameters(), other.parameters(), strict=True):
            assert one.grad is theirs.grad or torch.equal(one.grad, theirs.grad)
    assert len(graphs) == (4 if again else 2)


def test_a_model_that_changes_all_the_time_is_left_alone(graphs):
    made = model()
    graphed = Graphed(made, max_graphs=1)
    for _ in range(6):
        made[0].weight.data = made[0].weight.data.clone()
        for x in batches(WARM + 1):
            graphed(x)["loss"].backward()
    assert len(graphs) == 2 * 4 and graphed.said == ["a model that was changed again and again after captures"]


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (lambda made, x: made(x) * made(x).sum().item(), "operation not permitted when stream is capturing"),
        (lambda made, x: checkpoint(made, x, use_reentrant=True), "checkpointing needs use_reentrant=False"),
    ],
)
def test_a_capture_that_fails_leaves_a_loop_as_it_is(inner, reason):
    def forward(made):
        return lambda x: {"loss": inner(made, x.detach().clone().requires_grad_()).square().mean()}

    made, other = model(), model()
    graphed, plain, xs = Graphed(made, forward(made)), Graphed(other, forward(other)), batches(9)
    same(trained(graphed, made, xs), trained(plain.forward, other, xs))
    assert len(graphed.said) == 1 and graphed.said[0].startswith("a shape whose capture failed: ") and reason in graphed.said[0]
    assert graphed.calls.graphs == 0


def test_results_that_can_not_be_made_anew():
    made = model()
    graphed = Graphed(made, lambda x: {"loss": made(x).mean(), "cache": object()})
    trained(graphed, made, batches(WARM + 3))
    assert graphed.said == ["a shape whose capture failed: it returns a object, which a replay can't make anew"]


def test_several_ranks_have_no_graphs(monkeypatch):
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    made = model()
    graphed = Graphed(made)
    trained(graphed, made, batches(WARM + 2))
    assert graphed.said == ["several ranks, whose reductions a graph would leave out"]
