"""What a CPU shows of `graphed_step`: a graph's stand-in records a step's operators, and replays them without Python."""

import logging
import weakref

import pytest
import torch
from runtime import cpu_graph
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import onepass
from onepass.gradients import graphed_step as module
from onepass.parallel import AdamW, MainGrads, MasterWeights

SIZE, ROWS = 6, 5


@pytest.fixture(autouse=True)
def _plain_backend():
    with onepass.use_backend("torch"):
        yield


@pytest.fixture
def graphs(monkeypatch):
    return cpu_graph.install(monkeypatch, module)


def model(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, 8), nn.Tanh(), nn.Dropout(dropout), onepass.nn.Linear(8, 3))


def batches(count, rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, SIZE, generator=generator) for _ in range(count)]


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def stepper(made, optimizer, first=False, to_none=True):
    """A step that clears gradients at its end, or first."""

    def train_step(x, scale=1.0):
        if first:
            optimizer.zero_grad(to_none)
        loss = scale * made(x).square().mean()
        loss.backward()
        optimizer.step()
        if not first:
            optimizer.zero_grad(to_none)
        return {"loss": loss}

    return train_step


def trained(made, step, xs):
    losses = [step(x)["loss"].item() for x in xs]
    return losses, [parameter.detach().clone() for parameter in made.parameters()]


def same(found, expected):
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


# ---- steps alike ----


@pytest.mark.parametrize("first", (False, True), ids=("zero_grad last", "zero_grad first"))
@pytest.mark.parametrize("to_none", (True, False), ids=("none", "zeros"))
def test_steps_are_those_of_the_function(graphs, first, to_none):
    xs, (made, other) = batches(7), (model(), model())
    expected = trained(made, stepper(made, sgd(made.parameters()), first, to_none), xs)
    step = onepass.graphed_step(stepper(other, sgd(other.parameters()), first, to_none), warmup=2)
    same(trained(other, step, xs), expected)
    assert step.graphs == 1 and len(set(expected[0])) == 7


def test_warm_ups_run_and_later_calls_replay(graphs):
    made = model()
    calls, inner = [], stepper(made, sgd(made.parameters()))

    def train_step(x):
        calls.append(x)
        return inner(x)

    step = onepass.graphed_step(train_step, warmup=3)
    for count, x in enumerate(batches(6), 1):
        step(x)
        assert len(calls) == min(count, 4)
    assert len({x.data_ptr() for x in calls}) == 1  # of the graph, to which each input is copied


@pytest.mark.parametrize("kind", ("AdamW", "AdamW, zeroed after", "MasterWeights"))
def test_main_grads_need_no_accumulate(graphs, kind):
    def build():
        dtype = torch.bfloat16 if kind == "MasterWeights" else torch.float32  # AdamW's formula waits for a CPU in bf16
        made = model().to(dtype)
        main_grads = MainGrads(made)
        if kind == "MasterWeights":
            optimizer = MasterWeights(main_grads, lambda groups: sgd(groups))
        else:
            optimizer = AdamW(main_grads, lr=torch.tensor(0.01))

        def train_step(x):
            if kind != "AdamW, zeroed after":
                main_grads.zero_()
            loss = made(x.to(dtype)).float().square().mean()
            loss.backward()
            main_grads.finish()
            if kind == "MasterWeights":
                optimizer.step()
            else:
                optimizer.step(zero=True)
            if kind == "AdamW, zeroed after":
                main_grads.zero_()
            return {"loss": loss}

        return made, train_step, main_grads

    xs = batches(6)
    made, train_step, _ = build()
    expected = trained(made, train_step, xs)
    made, train_step, main_grads = build()
    step = onepass.graphed_step(train_step, warmup=1)
    same(trained(made, step, xs), expected)
    assert step.graphs == 1
    version = made[0].weight._version
    step(xs[0])
    assert made[0].weight._version == version + 1  # once a replay: caches must see it
    main_grads.zero_()
    made(xs[0].to(made[0].weight.dtype)).float().sum().backward()  # the books are open
    main_grads.finish()


def test_gradients_of_another_backward_are_cleared_where_the_step_clears_first(graphs):
    """In the graph too, though MainGrads' buffers were clear at the capture."""
    made = model()
    main_grads = MainGrads(made)
    optimizer = AdamW(main_grads, lr=torch.tensor(0.01))

    def train_step(x):
        main_grads.zero_()
        made(x).square().mean().backward()
        main_grads.finish()
        norm = main_grads.norm()
        optimizer.step(zero=True)
        return {"norm": norm}

    step = onepass.graphed_step(train_step, warmup=1)
    xs = batches(3)
    for x in xs[:2]:
        step(x)
    before = [parameter.detach().clone() for parameter in made.parameters()]
    main_grads.buffers[0].fill_(100.0)
    norm = step(xs[2])["norm"]
    for parameter, value in zip(made.parameters(), before, strict=True):
        parameter.data.copy_(value)
    main_grads.zero_()
    made(xs[2]).square().mean().backward()
    main_grads.finish()
    assert torch.equal(main_grads.norm(), norm)


def test_inputs_and_results_may_be_nested_and_results_stay(graphs):
    made, optimizer = (one := model()), sgd(one.parameters())

    def train_step(batch, *, scale):
        loss = scale * made(batch["x"][0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, [loss * 2, "said"], batch["x"][0]

    step = onepass.graphed_step(train_step, warmup=1)
    kept, xs = [], batches(4)
    for x in xs:
        kept.append(step({"x": (x, None)}, scale=2.0))
    assert len({loss.item() for loss, *_ in kept}) == 4 and not any(loss.requires_grad for loss, *_ in kept)
    assert all(torch.equal(rest[0], loss * 2) and rest[1] == "said" for loss, rest, _ in kept)
    assert all(torch.equal(x, given) for x, (*_, given) in zip(xs, kept, strict=True))


def test_a_graph_for_each_shape_and_constant_up_to_a_number(graphs, caplog):
    made = model()
    seen, inner = [], stepper(made, sgd(made.parameters()))

    def train_step(x, scale=1.0):
        seen.append((len(x), scale))
        return inner(x, scale)

    step = onepass.graphed_step(train_step, warmup=1, max_graphs=2)
    with caplog.at_level(logging.WARNING, "onepass"):
        for _ in range(3):
            for rows, scale in ((4, 1.0), (5, 1.0)):
                step(*batches(1, rows), scale=scale)
        assert step.graphs == 2 and len(seen) == 4 and not caplog.records
        for _ in range(3):
            step(*batches(1, 4), scale=2.0)
    assert step.graphs == 2 and seen[4:] == [(4, 2.0)] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "graphed_step: max_graphs is 2: steps of other shapes run without a graph"
    ]
    losses = {step(*batches(1, rows), scale=1.0)["loss"].item() for rows in (4, 5)}
    assert len(losses) == 2 and len(seen) == 7


def test_dropout_differs_from_replay_to_replay_and_a_seed_repeats_it(graphs):
    made = model(dropout=0.5)
    step = onepass.graphed_step(stepper(made, sgd(made.parameters(), lr=0.0)), warmup=1)
    x = batches(1)[0]
    losses = [step(x)["loss"].item() for _ in range(4)]
    assert len(set(losses)) == 4
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(step(x)["loss"].item())
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ("torch", "onepass"))
def test_a_learning_rate_may_be_a_tensor(graphs, kind):
    def build():
        made = model()
        if kind == "torch":
            optimizer = sgd(made.parameters(), lr=torch.tensor(0.1), fused=True)  # the others wait for the number
            return made, optimizer, stepper(made, optimizer)
        main_grads = MainGrads(made)
        optimizer = AdamW(main_grads, lr=torch.tensor(0.1))

        def train_step(x):
            loss = made(x).square().mean()
            loss.backward()
            main_grads.finish()
            optimizer.step(zero=True)
            main_grads.zero_()
            return {"loss": loss}

        return made, optimizer, train_step

    found = []
    for graphed in (False, True):
        made, optimizer, step = build()
        step = onepass.graphed_step(step, warmup=1) if graphed else step
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        losses = []
        for x in batches(6):
            losses.append(step(x)["loss"].item())
            schedule.step()
        found.append((losses, [parameter.detach().clone() for parameter in made.parameters()]))
    same(found[1], found[0])


def test_eight_bit_weights_are_as_without_a_graph(graphs, fp8_by_formula):
    """Inputs differ in size, and scales look back two steps: a refresh too few or too many changes bits."""
    recipe = onepass.FP8Recipe("delayed", amax_history_len=2)
    sizes = (1.0, 16.0, 0.1, 0.1, 30.0, 1.0, 0.1, 0.1, 5.0)
    xs = [size * torch.randn(16, 32, generator=torch.Generator().manual_seed(n)) for n, size in enumerate(sizes)]
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        made = onepass.nn.MLP(32, 64, precision=recipe)
        step = stepper(made, sgd(made.parameters(), lr=0.01))
        step = onepass.graphed_step(step, warmup=3) if graphed else step
        found.append(trained(made, step, xs))
    same(found[1], found[0])
    assert step.graphs == 1


def test_a_graph_writes_no_scales_of_another_model(graphs, fp8_by_formula):
    """They may be gone by the time of a replay."""
    models = [onepass.nn.MLP(32, 64, precision="fp8") for _ in range(2)]
    other, own = (onepass.graphed_step(stepper(made, sgd(made.parameters())), warmup=1) for made in models)
    x = torch.randn(16, 32)
    for step in (other, own, own):
        step(x)
    weights = [(made.linear_fc1.weight, made.linear_fc2.weight) for made in models]
    counted = [[weight.fp8.scales.steps.clone() for weight in each] for each in weights]
    own(x)
    for each, before, steps in zip(weights, counted, (0, 1), strict=True):
        for weight, count in zip(each, before, strict=True):
            assert torch.equal(weight.fp8.scales.steps, count + steps)


def test_scales_must_stay(graphs, fp8_by_formula):
    """A load begins them anew: a replay would go on with those of before, in memory that is others' by then."""
    made = onepass.nn.MLP(32, 64, precision="fp8")
    step, x = onepass.graphed_step(stepper(made, sgd(made.parameters())), warmup=1), torch.randn(16, 32)
    for _ in range(3):
        step(x)
    kept = weakref.ref(made.linear_fc1.weight.fp8.scales)
    made.load_state_dict(made.state_dict())
    with pytest.raises(RuntimeError, match="scales must stay"):
        step(x)
    assert kept() is not None


def test_what_a_replayed_step_has_refreshed_is_not_refreshed_on_resume(graphs, fp8_by_formula):
    recipe = onepass.FP8Recipe("delayed", amax_history_len=2)
    made = onepass.nn.MLP(32, 64, precision=recipe)
    train = stepper(made, sgd(made.parameters(), lr=0.01))
    step, x = onepass.graphed_step(train, warmup=1), torch.randn(16, 32)
    train(x)
    assert all(state["updated"] for state in onepass.nn.fp8_state_dict(made).values())
    for _ in range(3):
        step(x)
    assert not any(state["updated"] for state in onepass.nn.fp8_state_dict(made).values())


# ---- without a GPU ----


def test_on_a_cpu_each_call_is_the_functions():
    made = model()
    seen, inner = [], stepper(made, torch.optim.AdamW(made.parameters()))  # not capturable

    def train_step(x, wrong=()):
        seen.append(x)
        return inner(x)

    step = onepass.graphed_step(train_step, warmup=1)
    xs = batches(4)
    results = [step(x, wrong=set()) for x in xs]
    assert all(one is other for one, other in zip(seen, xs, strict=True)) and step.graphs == 0
    assert all(result["loss"].requires_grad for result in results)
    assert not _global_optimizer_pre_hooks


# ---- what raises ----


def ready(graphs, optimizer=sgd, calls=3, **options):
    """A step that replays."""
    made = model()
    optimizer = optimizer(made.parameters(), **options)
    step = onepass.graphed_step(stepper(made, optimizer), warmup=1)
    for x in batches(calls):
        step(x)
    return made, optimizer, step


def test_a_number_among_the_options_must_stay(graphs):
    made, optimizer, step = ready(graphs)
    optimizer.param_groups[0]["lr"] = 0.05
    before = made[0].weight.clone()
    with pytest.raises(RuntimeError, match=r"SGD's lr must stay 0.1, but is 0.05 .*lr=torch.tensor\(..., device='cpu'\)"):
        step(batches(1)[0])
    assert torch.equal(made[0].weight, before)
    optimizer.param_groups[0]["lr"] = 0.1
    step(batches(1)[0])
    assert not torch.equal(made[0].weight, before)


def test_a_tensor_among_the_options_must_stay_the_same_one(graphs):
    _, optimizer, step = ready(graphs, lr=torch.tensor(0.1), fused=True)
    optimizer.param_groups[0]["lr"].fill_(0.05)
    step(batches(1)[0])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05)
    with pytest.raises(RuntimeError, match="SGD's lr must stay"):
        step(batches(1)[0])


def test_state_and_groups_must_stay(graphs):
    _, optimizer, step = ready(graphs)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"SGD must keep its state .*load_state_dict"):
        step(batches(1)[0])
    _, optimizer, step = ready(graphs)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match=r"SGD must keep .*add_param_group"):
        step(batches(1)[0])


def test_parameters_must_stay(graphs):
    made, _, step = ready(graphs)
    made[3].bias.data = made[3].bias.data.clone()
    with pytest.raises(RuntimeError, match="parameters must stay where they are"):
        step(batches(1)[0])


@pytest.mark.parametrize("kind", ("torch.optim", "AdamW", "MasterWeights"))
@pytest.mark.parametrize("first", (False, True))
def test_who_is_trained_must_stay(graphs, kind, first):
    """Also where the optimizer has none of the parameters, as MasterWeights' has none of what is frozen or not fp32."""
    made = model().to(torch.bfloat16 if kind == "MasterWeights" else torch.float32)
    made[0].weight.requires_grad_(first)
    main_grads = None if kind == "torch.optim" else MainGrads(made)
    if kind == "torch.optim":
        optimizer = sgd(made.parameters())
    else:
        optimizer = AdamW(main_grads) if kind == "AdamW" else MasterWeights(main_grads, sgd)

    def train_step(x):
        optimizer.zero_grad() if main_grads is None else main_grads.zero_()
        made(x).float().square().mean().backward()
        if main_grads is not None:
            main_grads.finish()
        optimizer.step()

    step = onepass.graphed_step(train_step, warmup=1)
    for x in batches(3):
        step(x.to(made[0].weight.dtype))
    assert step.graphs == 1
    made[0].weight.requires_grad_(not first)
    with pytest.raises(RuntimeError, match="parameters must stay frozen or trained, but requires_grad has changed"):
        step(batches(1)[0].to(made[0].weight.dtype))


def test_gradients_of_another_backward_raise(graphs):
    made, optimizer, step = ready(graphs)
    made(batches(1)[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"\.grad must be as train_step left it, .*\(8, 6\): call zero_grad\(\)"):
        step(batches(1)[0])
    optimizer.zero_grad()
    step(batches(1)[0])


def test_gradients_must_be_cleared_in_the_step(graphs):
    made = model()
    optimizer = sgd(made.parameters())

    def train_step(x):
        made(x).square().mean().backward()
        optimizer.step()

    step = onepass.graphed_step(train_step, warmup=1)
    for x in batches(4):
        step(x)  # gradients add up, as without a graph
    assert step.graphs == 1
    step = onepass.graphed_step(train_step, warmup=1)
    step(batches(1)[0])
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"\(8, 6\) is left in .grad: train_step itself must call zero_grad\(\)"):
        step(batches(1)[0])
    assert made[0].weight.grad is None and step.graphs == 0
    step = onepass.graphed_step(stepper(made, optimizer), warmup=1)
    step(batches(1)[0])
    made(batches(1)[0]).sum().backward()
    kept = made[0].weight.grad
    with pytest.raises(RuntimeError, match="is there before"):
        step(batches(1)[0])
    assert made[0].weight.grad is kept


@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.NAdam))
def test_an_optimizer_that_is_not_capturable_raises_before_it_steps(graphs, kind):
    made = model()
    before = made[0].weight.clone()
    step = onepass.graphed_step(stepper(made, kind(made.parameters())))
    with pytest.raises(ValueError, match=f"{kind.__name__} must have capturable=True"):
        step(batches(1)[0])
    assert torch.equal(made[0].weight, before)


class Counting(torch.optim.SGD):
    """As others' optimizers do, in their state or among their options."""

    def __init__(self, parameters, where, **options):
        super().__init__(parameters, **options)
        self.where = where

    def step(self):
        super().step()
        if self.where == "state":
            for parameter in self.state:
                self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        elif self.where == "tensor":
            for parameter in self.state:
                self.state[parameter]["step"] = torch.empty((), device="meta")
        else:
            self.param_groups[0]["step"] = self.param_groups[0].get("step", 0) + 1


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("state", "Counting must have its state on cpu, but has step elsewhere"),
        ("tensor", "Counting must have its state on cpu, but has step elsewhere"),
        ("group", "step must stay 1, but is 2 .*itself"),
    ],
)
def test_so_does_one_that_counts_in_python(graphs, where, words):
    made = model()
    optimizer = Counting(made.parameters(), where, lr=0.1, momentum=0.9)
    step = onepass.graphed_step(stepper(made, optimizer), warmup=1)
    step(batches(1)[0])
    with pytest.raises((TypeError, RuntimeError), match=words):
        step(batches(1)[0])
    assert step.graphs == 0


@pytest.mark.parametrize("waits", ("item", "if"))
def test_a_step_that_waits_for_the_gpu_raises_and_leaves_gradients(graphs, waits):
    made = model()
    optimizer = sgd(made.parameters())

    def train_step(x):
        loss = made(x).square().mean()
        loss.backward()
        if waits == "item":
            loss.item()
        elif waits and loss < 0:
            return loss
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = onepass.graphed_step(train_step, warmup=1)
    step(batches(1)[0])
    before = made[0].weight.clone()
    with pytest.raises(RuntimeError, match=r"can't be captured in a CUDA graph: operation not permitted .*\.item\(\).*`if`"):
        step(batches(1)[0])
    assert all(parameter.grad is None for parameter in made.parameters()) and torch.equal(made[0].weight, before)
    waits = None
    step(batches(1)[0])
    assert step.graphs == 1 and not torch.equal(made[0].weight, before)


def test_other_errors_of_a_step_are_its_own(graphs):
    _, _, step = ready(graphs, calls=1)
    with pytest.raises(TypeError, match="unexpected keyword"):
        step(batches(1)[0], other=1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # a warm-up, as it is
        step(torch.ones(2, 7))
    with pytest.raises(RuntimeError, match=r"must call step\(\) of a torch.optim.Optimizer"):
        onepass.graphed_step(lambda x: None)(batches(1)[0])
    assert not _global_optimizer_pre_hooks


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ({"x": torch.ones(5, SIZE, device="meta")}, ValueError, r"kwargs\['x'\] must be on cpu, .* but is on meta"),
        ({"x": torch.ones(5, SIZE, requires_grad=True)}, ValueError, r"kwargs\['x'\] must not require a gradient"),
        ({"x": torch.ones(5, SIZE), "scale": {1}}, TypeError, r"kwargs\['scale'\] must be a tensor or a constant, but is a set"),
    ],
)
def test_inputs_must_be_tensors_of_the_device_or_constants(graphs, inputs, error, words):
    made = model()
    step = onepass.graphed_step(stepper(made, sgd(made.parameters())))
    step(batches(1)[0])
    with pytest.raises(error, match=words):
        step(**inputs)


def test_an_outer_autocast_raises(graphs):
    made, _, step = ready(graphs, calls=1)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=r"torch.autocast must begin in train_step"):
        step(batches(1)[0])
    optimizer = sgd(made.parameters())

    def train_step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = made(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = onepass.graphed_step(train_step, warmup=1)
    assert len({step(x).item() for x in batches(5)}) == 5


def test_a_grad_scaler_raises(graphs):
    made = model()
    optimizer = sgd(made.parameters())
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(RuntimeError, match="GradScaler must be left out"):
        onepass.graphed_step(stepper(made, optimizer))(batches(1)[0])


def test_several_ranks_raise(graphs, monkeypatch):
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    made = model()
    step = onepass.graphed_step(stepper(made, sgd(made.parameters())))
    with pytest.raises(RuntimeError, match=r"for one rank, but torch.distributed has 2"):
        step(batches(1)[0])


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"train_step": 3}, TypeError, "train_step must be callable"),
        ({"warmup": 0}, ValueError, "warmup must be at least 1, but is 0"),
        ({"max_graphs": 0}, ValueError, "max_graphs must be at least 1"),
    ],
)
def test_arguments_are_checked(given, error, words):
    with pytest.raises(error, match=words):
        onepass.graphed_step(given.pop("train_step", print), **given)
