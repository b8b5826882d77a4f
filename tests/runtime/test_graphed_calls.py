"""Graphs of forward and backward by shape, with the stand-in for a CUDA graph: whole loops, beside the same without."""

import copy
import gc
import random
import weakref
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from runtime import cpu_graph
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import graphed_calls as module
from onepass.gradients.graph_surroundings import Surroundings
from onepass.gradients.graphed_calls import GraphedCalls
from onepass.parallel import AdamW, MainGrads
from onepass.runtime.cuda_graph import CpuGenerators, whole_step
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
    assert graphed.said == ["a call before the last one's backward, whose result is still alive (delete what gets no backward)"]
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


class Config:
    def __init__(self, scale=1.0):
        self.scale = scale


class Scaled(nn.Module):
    """What Python computes with, and decides by, in a model."""

    def __init__(self):
        super().__init__()
        self.scale, self.function, self.config, self.scaling = 1.0, torch.tanh, Config(), {"default": 1.0}

    def forward(self, x):
        return self.scaling["default"] * self.config.scale * self.scale * self.function(x)


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
        (lambda made: setattr(made[0].weight, "data", made[0].weight.data.t().contiguous().t()), True),
        (lambda made: setattr(made[1], "scale", 2.0), True),
        (lambda made: setattr(made[1], "function", torch.exp), True),
        (lambda made: setattr(made[1].config, "scale", 3.0), True),
        (lambda made: setattr(made[1], "config", Config(3.0)), True),
        (lambda made: made[1].scaling.update(default=2.0), True),  # as PEFT's set_scale
        (lambda made: made.load_state_dict({**made.state_dict(), **model().state_dict()}), False),
    ],
)
def test_a_model_that_has_changed_is_captured_anew(change, again, graphs):
    made = model()
    made[1] = Scaled()
    graphed, _ = replaying(made)
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


def test_objects_that_are_others_and_say_the_same_hold():
    made = nn.Sequential(Scaled(), nn.Linear(1, 1, bias=False))
    made[0].config.scale, made[0].table = float("1.5"), torch.ones(3)
    surroundings = Surroundings(made)
    for table in (torch.ones(3), torch.zeros(1), torch.ones(1), np.ones(2)):
        made[0].config.scale, made[0].table = float("1.5"), table
        assert surroundings.hold() and surroundings.hold()


@pytest.mark.parametrize(
    "change",
    [
        lambda made: setattr(made[1].weight, "data", made[1].weight.data.clone()),
        lambda made: setattr(made[1].weight, "main_grad", torch.zeros(1, 1)),
        lambda made: made[1].weight.requires_grad_(False),
        lambda made: made[0].scaling.update(default=3.0),
    ],
)
def test_what_changes_beside_such_an_object_does_not_hold(change):
    made = nn.Sequential(Scaled(), nn.Linear(1, 1, bias=False))
    surroundings = Surroundings(made)
    made[0].table = torch.ones(3)
    assert surroundings.hold()
    made[0].table = torch.ones(3)
    change(made)
    assert not surroundings.hold() and not surroundings.hold()


@pytest.mark.parametrize(
    "change",
    [
        lambda made: setattr(made[0].config, "scale", 2.0),
        lambda made: setattr(made[0], "config", Config()),
        lambda made: setattr(made[0].config, "switch", True),
        lambda made: setattr(made[0], "switch", True),
        lambda made: setattr(made[1], "weight", nn.Parameter(made[1].weight.detach())),
        lambda made: setattr(made[1], "bias", nn.Parameter(torch.ones(1))),
        lambda made: made.add_module("2", nn.ReLU()),
        lambda made: made[2].register_forward_hook(_hook),
        lambda made: made[0].scaling.update(default=3.0),
    ],
)
def test_what_says_something_else_does_not_hold(change):
    made = nn.Sequential(Scaled(), nn.Linear(1, 1, bias=False), nn.ReLU())
    surroundings = Surroundings(made)
    assert surroundings.hold()
    change(made)
    assert not surroundings.hold() and not surroundings.hold()


def test_a_model_that_changes_all_the_time_is_left_alone(graphs):
    made = model()
    graphed = Graphed(made, max_graphs=1)
    for _ in range(6):
        made[0].weight.data = made[0].weight.data.clone()
        for x in batches(WARM + 1):
            graphed(x)["loss"].backward()
    assert len(graphs) == 2 * 4 and graphed.said == ["a model that changes again and again"]


def test_a_model_that_changes_at_each_call_is_left_alone(graphs):
    made = model()
    graphed = Graphed(made, max_graphs=1)
    for at, x in enumerate(batches(6)):
        made[1].calls = at
        graphed(x)["loss"].backward()
    assert not graphs and graphed.said == ["a model that changes again and again"]


def test_dropouts_rate_is_read_at_each_call():
    made = model()
    made.append(nn.Dropout(0.5))
    graphed, _ = replaying(made)
    made[3].p = 1.0
    assert graphed(batches(1)[0])["loss"] == 0


def test_a_weight_of_one_place_and_another_layout():
    made = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())
    graphed, _ = replaying(made)
    made[0].weight.data = made[0].weight.data.t()
    x = batches(1)[0]
    assert torch.equal(graphed(x)["loss"], graphed.forward(x)["loss"])


def test_two_shapes_of_a_model_whose_weights_were_replaced():
    graphed, made = replaying()
    for x in batches(WARM + 1, (7,)):
        graphed(x)["loss"].backward()
    before = set(graphed.calls._grads.values())
    for parameter in made.parameters():
        parameter.data = parameter.data.clone()
    made.zero_grad()
    trained(graphed, made, batches(2 * WARM + 4, (ROWS, 7)))
    assert graphed.calls.graphs == 2
    one, other = (shape.graphs.grads for shape in graphed.calls._shapes.values())
    assert [a.data_ptr() for a in one] == [b.data_ptr() for b in other]
    assert not before & set(graphed.calls._grads.values())


def test_another_main_grad_is_another_place():
    made = model()
    weight = made[2].weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(3, 8), False
    graphed, _ = replaying(made)
    weight.main_grad = torch.zeros(3, 8)
    graphed(batches(1)[0])["loss"].backward()
    assert weight.main_grad.any()


def test_kinds_of_numbers_are_kinds_of_shapes():
    made = model()
    graphed = Graphed(made, lambda x: {"loss": made(x.float()).mean(), "more": x + 1})
    for _ in range(WARM + 1):
        for dtype in (torch.float32, torch.int64):
            graphed(torch.ones(ROWS, SIZE, dtype=dtype))["loss"].backward()
    assert graphed.calls.graphs == 2 and graphed(torch.ones(ROWS, SIZE, dtype=torch.int64))["more"].dtype == torch.int64


# ---- captures that fail ----


def test_all_calls_of_a_module_run_on_the_graphs_stream(monkeypatch):
    """What accumulates gradients belongs to a call's stream: that of another would be drawn into a capture."""
    entered = []

    @contextmanager
    def side_stream(device, stream=None):
        entered.append(stream)
        yield "the graphs' stream"

    monkeypatch.setattr(module, "side_stream", side_stream)
    made = model()
    graphed = Graphed(made, max_graphs=1)
    others = torch.ones(ROWS, SIZE, requires_grad=True), torch.ones(7, SIZE)  # with a gradient, and of one shape too many
    for x in (batches(1)[0], *others):
        graphed(x)["loss"].backward()
    graphed.calls.run_without(graphed.forward, (others[0],), {})
    assert entered == [None, *["the graphs' stream"] * 3]


@pytest.mark.parametrize("draw", (random.random, np.random.rand), ids=("python", "numpy"))
def test_what_a_call_draws_on_the_cpu_is_drawn_at_each(draw):
    random.seed(1), np.random.seed(1)
    made = model()
    graphed = Graphed(made, lambda x: {"loss": made(x).square().mean() * draw()})
    x, found = batches(1)[0], []
    for _ in range(2 * WARM + 4):
        loss = graphed(x)["loss"]
        loss.backward()
        found.append(loss.item())
    random.seed(1), np.random.seed(1)
    assert found == [graphed.forward(x)["loss"].item() for _ in found]  # a capture that failed has drawn nothing
    assert graphed.said == ["a shape whose capture failed: it draws random numbers on the CPU, which a replay can't draw anew"]


@pytest.mark.parametrize("draw", (random.random, np.random.rand, lambda: torch.rand(1).item()), ids=("python", "numpy", "torch"))
def test_what_draws_on_the_cpu_is_seen_and_undone(draw):
    generators = CpuGenerators()
    assert generators.unchanged()
    first = draw()
    assert not generators.unchanged()
    generators.restore()
    assert generators.unchanged() and draw() == first


def test_hooks_on_saved_tensors_run_at_each_call():
    graphed, _ = replaying()
    packed = []
    for x in batches(2):
        before = len(packed)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(1) or tensor, lambda tensor: tensor):
            graphed(x)["loss"].backward()
        assert len(packed) > before
    assert graphed.said == ["hooks on saved tensors, which a replay would not call"]


@pytest.mark.parametrize("around", ("a step's graph", "a capture"))
def test_a_part_of_another_graph_has_none(around, graphs, monkeypatch):
    made = model()
    graphed = Graphed(made)
    with monkeypatch.context() as patched, whole_step() if around == "a step's graph" else nullcontext():
        if around == "a capture":
            patched.setattr(module, "is_capturing", lambda device: True)
        trained(graphed, made, batches(WARM + 2))
    assert not graphs and not graphed.said
    trained(graphed, made, batches(WARM + 2))
    assert graphed.calls.graphs == 1


def deep_or_not():
    """A module, and its calls: those of seven rows use one weight more."""
    made = model()
    made.append(nn.Linear(3, 3))
    return made, Graphed(made, lambda x: {"loss": (made(x) if x.shape[0] == 7 else made[:3](x)).square().mean()})


def test_each_shape_has_its_own_weights():
    _, graphed = deep_or_not()
    for x in batches(12, (7, ROWS)):
        graphed(x)["loss"].backward()
    assert graphed.calls.graphs == 2 and not graphed.said


def test_of_two_calls_before_their_backwards_both_have_all_weights():
    """A backward that is another call's would hide what a reentrant checkpoint trains."""
    made, graphed = deep_or_not()
    for x, y in zip(batches(WARM, (7,)), batches(WARM), strict=True):
        (graphed(x)["loss"] + graphed(y)["loss"]).backward()
    one, other = (shape.reached for shape in graphed.calls._shapes.values())
    assert one == other == {id(parameter) for parameter in made.parameters()}


def test_a_failed_capture_is_tried_once_more():
    made, waits = model(), [True]
    graphed = Graphed(made, lambda x: {"loss": made(x).square().mean() * (made(x).sum().item() if waits[0] else 1.0)})
    for at, x in enumerate(batches(2 * WARM + 3)):
        waits[0] = at <= WARM  # the first capture's call
        graphed(x)["loss"].backward()
    assert graphed.calls.graphs == 1 and not graphed.said


def test_after_a_failed_capture_others_have_memory_of_their_own():
    made = model()
    graphed = Graphed(made, lambda x: {"loss": made(x).square().mean() * (made(x).sum().item() if x.shape[0] == 7 else 1.0)})
    for rows in (7, ROWS):
        for x in batches(2 * WARM + 2, (rows,)):
            graphed(x)["loss"].backward()
    assert graphed.calls.graphs == 1 and len(graphed.said) == 1


def test_memory_that_can_not_be_freed_is_a_failed_capture(monkeypatch):
    def free_memory(device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(module, "free_memory", free_memory)
    made = model()
    graphed = Graphed(made)
    trained(graphed, made, batches(2 * WARM + 3))
    assert graphed.said == ["a shape whose capture failed: operation not permitted when stream is capturing"]


def test_what_is_forgotten_is_freed():
    graphed, made = replaying()
    graphed(batches(1, (7,))[0])["loss"].backward()  # the first of another shape
    assert all(parameter._post_accumulate_grad_hooks for parameter in made.parameters())
    shape = weakref.ref(next(iter(graphed.calls._shapes.values())))
    graphed.calls.forget()
    gc.collect()
    assert shape() is None and graphed.calls._pool is None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in made.parameters())
    trained(graphed, made, batches(WARM + 1))
    assert graphed.calls.graphs == 1


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
    trained(graphed, made, batches(2 * WARM + 2))
    assert graphed.said == ["a shape whose capture failed: it returns a object, which a replay can't make anew"]


def test_several_ranks_have_no_graphs(monkeypatch):
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    made = model()
    graphed = Graphed(made)
    trained(graphed, made, batches(WARM + 2))
    assert graphed.said == ["several ranks, whose reductions a graph would leave out"]
