"""What only a GPU shows of steps in CUDA graphs: bits of steps without one, random numbers, errors, and runs that decide."""

import gc
import importlib.util
import warnings

import pytest
import torch
from gpu.calls import memory_goes_back, nobody_waits, other_stream  # noqa: F401  # the first is a fixture
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.gpt import preset
from onepass.nn import fp8_saturations
from onepass.parallel import AdamW, MainGrads, MasterWeights
from onepass.runtime.cuda_graph import capture, side_stream
from onepass.train import measured_steps
from onepass.train.batches import TokenBatch
from onepass.train.layout import ParallelLayout
from onepass.train.measured_steps import MeasuredSteps
from onepass.train.options import Options
from onepass.train.setup import make
from onepass.train.steps import GraphedSteps, TrainSteps

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
BF16 = torch.bfloat16
ROWS, SIZE, STEPS = 256, 512, 8
CUDA = torch.device("cuda", 0)
needs_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs products in eight bits"
)


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = onepass.nn.NormLinear(SIZE, 2 * SIZE), nn.Linear(SIZE, SIZE)
        self.dropout = dropout
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=SIZE**-0.5, generator=generator)

    def forward(self, x):
        y = self.second(onepass.bias_swiglu(self.first(x)))
        return onepass.dropout_add(y, x, p=self.dropout) if self.dropout else x + y


def lr(value=1e-2):
    return torch.tensor(value, device=CUDA)


# Each makes an optimizer, and what a step does after the backward.
def torch_adamw(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": lr(), "capturable": True} | options)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    return optimizer, update


def torch_sgd(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return optimizer, update


def onepass_adamw(model, **options):
    main_grads = MainGrads(model)
    optimizer = AdamW(main_grads, lr=lr(), **options)

    def update():
        main_grads.finish()
        optimizer.step(max_norm=1.0, zero=True)
        main_grads.zero_()

    return optimizer, update


def master_weights(model):
    main_grads = MainGrads(model)
    weights = MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, lr=lr(), capturable=True))

    def update():
        main_grads.finish()
        main_grads.clip_(1.0)
        weights.step()
        main_grads.zero_()

    return weights.optimizer, update


OPTIMIZERS = {
    "AdamW": torch_adamw,
    "fused AdamW": lambda model: torch_adamw(model, fused=True),
    "SGD": torch_sgd,
    "onepass.AdamW": onepass_adamw,
    "onepass.AdamW in 8 bits": lambda model: onepass_adamw(model, moments="8bit"),
    "MasterWeights": master_weights,
}


def built(kind="onepass.AdamW", model=None, dropout=0.0):
    model = (Block(dropout) if model is None else model).to(CUDA, BF16)
    optimizer, update = OPTIMIZERS[kind](model)

    def train_step(x):
        loss = model(x).float().square().mean()
        loss.backward()
        update()
        return loss

    return model, optimizer, train_step


def batches(count=STEPS, rows=ROWS, seed=0):
    generator = torch.Generator(CUDA).manual_seed(seed)
    return [torch.randn(rows, SIZE, device=CUDA, dtype=BF16, generator=generator) for _ in range(count)]


def trained(model, step, xs):
    losses = [step(x).detach() for x in xs]  # no copies: results stay
    return [loss.item() for loss in losses], [parameter.detach().clone() for parameter in model.parameters()]


def same(found, expected):
    assert found[0] == expected[0] and len(set(found[0])) > 1
    assert all(map(torch.equal, found[1], expected[1]))


# ---- steps alike ----


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_have_the_bits_of_steps_without_a_graph(kind):
    model, _, train_step = built(kind)
    expected = trained(model, train_step, batches())
    model, _, train_step = built(kind)
    step = onepass.graphed_step(train_step)
    same(trained(model, step, batches()), expected)
    assert step.graphs == 1
    with nobody_waits():
        step(batches(1)[0])


@pytest.mark.parametrize("kind", ("AdamW", "onepass.AdamW"))
def test_nothing_is_warned_of(kind):
    _, _, train_step = built(kind)
    step = onepass.graphed_step(train_step)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for x in batches():
            step(x)
    assert not [str(each.message) for each in seen]


def test_shapes_share_memory_and_take_turns():
    xs = [x for n in range(6) for x in batches(1, (ROWS, 2 * ROWS, 24)[n % 3], n)]
    model, _, train_step = built("AdamW")
    expected = trained(model, train_step, [*xs, *xs])
    model, _, train_step = built("AdamW")
    step = onepass.graphed_step(train_step, warmup=1)
    same(trained(model, step, [*xs, *xs]), expected)
    assert step.graphs == 3


def test_evaluations_and_backwards_between_replays_see_the_weights():
    model, _, train_step = built()
    other, _, other_step = built()
    step = onepass.graphed_step(other_step, warmup=2)
    for x in batches():
        train_step(x)
        step(x)
        with torch.no_grad():
            assert torch.equal(model(x), other(x))


@needs_fp8
@pytest.mark.parametrize("scaling", ("delayed", "current", "row"))
@pytest.mark.parametrize("kind", ("AdamW", "onepass.AdamW"))
def test_eight_bits(scaling, kind):
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        mlp = onepass.nn.MLP(SIZE, 2 * SIZE, precision=onepass.FP8Recipe(scaling), device="cuda", dtype=BF16)
        model, _, step = built(kind, mlp)
        step = onepass.graphed_step(step) if graphed else step
        losses = []
        for x in batches():
            losses.append(step(x).item())
            with torch.no_grad():
                losses.append(model(x).float().square().mean().item())
        found.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    same(found[1], found[0])


def test_a_schedule_writes_the_learning_rate():
    found = []
    for graphed in (False, True):
        for kind in ("AdamW", "onepass.AdamW"):
            model, optimizer, step = built(kind)
            step = onepass.graphed_step(step) if graphed else step
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
            losses = []
            for x in batches():
                losses.append(step(x).item())
                schedule.step()
            found.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    same(found[2], found[0])
    same(found[3], found[1])


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("kind", ("plain", "applied", "main_grad"))
def test_a_hugging_face_model(kind):
    from transformers import LlamaConfig, LlamaForCausalLM

    from onepass.integrations import huggingface

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000
    )
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(CUDA, BF16)
        applied = None if kind == "plain" else huggingface.apply(model, main_grad=kind == "main_grad")
        if kind == "main_grad":
            optimizer = applied.optimizer(lr=lr(1e-3), max_norm=1.0)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr(1e-3), capturable=True)

        def train_step(model=model, optimizer=optimizer, **batch):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = onepass.graphed_step(train_step) if graphed else train_step
        generator = torch.Generator(CUDA).manual_seed(1)
        losses = []
        for _ in range(STEPS):
            tokens = torch.randint(1000, (4, 128), device=CUDA, generator=generator)
            losses.append(step(input_ids=tokens, labels=tokens).item())
        found.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
        assert not graphed or step.graphs == 1
    same(found[1], found[0])


# ---- random numbers ----


class Dropping(nn.Module):
    """PyTorch's dropout, or onepass's."""

    def __init__(self, ours):
        super().__init__()
        self.linear, self.ours = nn.Linear(SIZE, SIZE), ours

    def forward(self, x):
        y = self.linear(x)
        return onepass.dropout_add(y, x, p=0.5) if self.ours else x + F.dropout(y, 0.5)


@pytest.mark.parametrize("ours", (False, True), ids=("torch", "onepass"))
def test_dropout_differs_from_replay_to_replay_and_a_seed_repeats_it(ours):
    torch.manual_seed(0)
    model = Dropping(ours).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train_step(x):
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return y

    step = onepass.graphed_step(train_step, warmup=1)
    x = torch.ones(64, SIZE, device=CUDA)
    found = [step(x) for _ in range(5)]
    assert step.graphs == 1
    for at, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[at + 1 :])
    again = []
    for _ in range(2):
        torch.manual_seed(3)
        again.append(step(x))
        torch.rand(5, device=CUDA)
    assert torch.equal(*again)


# ---- what raises, and what is left ----


def test_a_step_that_waits_raises_and_cuda_goes_on():
    model, _, inner = built("AdamW")
    waits = True

    def train_step(x):
        loss = inner(x)
        return loss.item() if waits else loss

    step = onepass.graphed_step(train_step, warmup=1)
    xs = batches()
    step(xs[0])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"train_step can't be captured in a CUDA graph: .*\.item\(\)"):
        step(xs[1])
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.rand(3, device=CUDA)
    torch.cuda.empty_cache()
    waits = False
    losses = [step(x).item() for x in xs[1:]]
    assert step.graphs == 1
    model, _, inner = built("AdamW")
    expected = [inner(x).item() for x in xs]
    assert losses == expected[1:]


def test_an_optimizer_that_is_not_capturable_raises_before_it_steps():
    model, _, _ = built("AdamW")
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(x):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"AdamW must have capturable=True"):
        onepass.graphed_step(train_step)(batches(1)[0])
    assert all(map(torch.equal, model.parameters(), before))


def test_tensors_of_the_cpu_raise_and_so_does_a_number_that_changes():
    _, optimizer, train_step = built("SGD")
    step = onepass.graphed_step(train_step, warmup=1)
    for x in batches(3):
        step(x)
    with pytest.raises(ValueError, match=r"args\[0\] must be on cuda:0, where the parameters are, but is on cpu"):
        step(torch.zeros(ROWS, SIZE))
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match=r"SGD's lr must stay 0.01, but is 0.5"):
        step(batches(1)[0])
    with pytest.raises(ValueError, match=r"kwargs\['x'\] must be on cuda:0"):  # before the first update
        onepass.graphed_step(lambda x: train_step(x.to(CUDA, BF16)))(x=torch.zeros(ROWS, SIZE))


def test_released_gradients_raise():
    model = Block().to(CUDA, BF16)
    main_grads = MainGrads(model, release=True)
    optimizer = AdamW(main_grads)

    def train_step(x):
        model(x).float().square().mean().backward()
        main_grads.finish()
        optimizer.step(zero=True)
        main_grads.zero_()

    step = onepass.graphed_step(train_step, warmup=1)
    step(batches(1)[0])
    with pytest.raises(RuntimeError, match=r"can't be captured in a CUDA graph: .*release=True"):
        step(batches(1)[0])
    torch.rand(3, device=CUDA)


def test_a_capture_that_fails_leaves_memory_random_numbers_and_other_graphs():
    draw = lambda: torch.rand(5, device=CUDA)  # noqa: E731
    with side_stream(CUDA):
        draw()
        graph, numbers = capture(draw, CUDA)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved, state = torch.cuda.memory_reserved(), torch.cuda.get_rng_state()

    def fail():
        large = torch.empty(64 << 20, device=CUDA)
        return (large[:3] + draw()[:3]).sum().item()

    with pytest.raises(RuntimeError), side_stream(CUDA):
        capture(fail, CUDA)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved + (2 << 20)
    seen = []
    for _ in range(2):
        torch.manual_seed(5)
        graph.replay()
        seen.append((numbers.clone(), draw()))
    assert all(map(torch.equal, *seen)) and not torch.equal(*seen[0])
    graph.replay()
    assert not torch.equal(numbers, seen[1][0])
    with side_stream(CUDA):
        other, more = capture(draw, CUDA)
    other.replay()
    assert more.any()


# ---- runs that decide ----

SMALL = {"params_dtype": "bf16"}


def run_of(kind, said=None, **settings):
    config = preset("tiny", **SMALL | settings)
    options = Options(micro_batch_size=4, cuda_graphs=False)
    made = make(config, options, ParallelLayout(CUDA))
    if kind is not TrainSteps:
        more = {"say": said.append} if kind is MeasuredSteps else {}
        made.steps = kind(made.model, config, options, made.update, **more)
    return made


def token_batches(count):
    tokens = torch.randint(1000, (count, 8, 129), generator=torch.Generator().manual_seed(1)).cuda()
    return [TokenBatch(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def steps_of(made, count=12):
    found = []
    for batch in token_batches(count):
        loss, norm = made.steps.run(batch)
        made.update.step(1e-2)
        found.append((loss.item(), norm.item()))
    found.append(made.steps.loss(token_batches(1)[0]).item())
    return found


@pytest.mark.parametrize(("share", "word"), [(0.0, "captured, as"), (2.0, "not needed, as")])
def test_a_run_decides_and_has_the_bits_of_one_that_was_told(share, word, monkeypatch):
    monkeypatch.setattr(measured_steps, "_WAITS", share)
    said = []
    made = run_of(MeasuredSteps, said)
    assert steps_of(made) == steps_of(run_of(TrainSteps))
    assert len(said) == 1 and said[0].startswith(f"CUDA graph: {word} a microbatch's calls take the CPU")
    assert made.steps.replays is (share == 0.0)


def test_by_default_a_run_on_one_gpu_decides():
    layout = ParallelLayout(CUDA)
    assert type(make(preset("tiny", **SMALL), Options(micro_batch_size=4), layout).steps) is MeasuredSteps
    assert type(make(preset("tiny", **SMALL), Options(micro_batch_size=4), layout, plain=True).steps) is TrainSteps


def test_a_run_whose_capture_fails_goes_on_without(monkeypatch):
    monkeypatch.setattr(measured_steps, "_WAITS", 0.0)
    said = []
    made = run_of(MeasuredSteps, said)

    def wait(module, args, found):
        if torch.cuda.is_current_stream_capturing():
            (found[0] if isinstance(found, tuple) else found).float().sum().item()

    made.model.final_layernorm.register_forward_hook(wait)
    assert steps_of(made) == steps_of(run_of(TrainSteps))
    assert len(said) == 1 and "not captured, though" in said[0] and "as that failed:" in said[0]
    torch.rand(3, device=CUDA)
    torch.cuda.empty_cache()


def test_a_warm_up_uses_up_no_random_numbers():
    made = run_of(GraphedSteps, hidden_dropout=0.1)
    torch.manual_seed(2)
    made.steps.run(token_batches(1)[0])
    after = torch.cuda.get_rng_state()
    again = run_of(GraphedSteps, hidden_dropout=0.1)
    again.steps.run(token_batches(1)[0])
    torch.manual_seed(2)
    again.steps.run(token_batches(1)[0])  # replays alone
    assert torch.equal(after, torch.cuda.get_rng_state())


@needs_fp8
def test_a_warm_up_counts_no_saturated_numbers():
    """Of a step whose numbers are far too large for scales of the steps before."""
    found = []
    for kind in (TrainSteps, GraphedSteps):
        made = run_of(TrainSteps, fp8_format="hybrid")
        first, second = token_batches(2)
        made.steps.run(first)
        made.update.step(1e-3)
        for block in made.model.layers.values():
            block.mlp.linear_fc2.register_forward_pre_hook(lambda layer, args: (args[0] * 1e4, *args[1:]))
        made.steps = kind(made.model, made.model.config, made.update.options, made.update)
        made.steps.run(second)
        made.update.step(1e-3)
        found.append({name: counts["input"] for name, counts in fp8_saturations(made.model).items()})
    assert found[0] == found[1] and any(found[0].values())
