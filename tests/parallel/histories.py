"""Random histories of a training loop, judged by torch.optim.AdamW."""

import random
from typing import NamedTuple

import torch
from parallel.meeting import drawn
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

import onepass
from onepass.parallel import AdamW, MainGrads, MasterWeights, ShardedAdamW

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = ((8, 6), (6, 6), (70,), (2, 5))  # the first two are weights of products, which add to main_grad themselves
OPTIONS = {"lr": 0.02, "weight_decay": 0.3}
KINDS = {
    "AdamW": lambda main_grads: AdamW(main_grads, **OPTIONS),
    "MasterWeights": lambda main_grads: MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, **OPTIONS)),
}


class Layers(nn.Module):
    """Parameters whose gradients are small whole numbers, exact in every type and every order of sums."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(drawn(torch.randn, *shape, generator=generator).to(dtype) for shape in SHAPES)

    def forward(self, inputs, factor):
        total = 0.0
        for weight, (x, dy) in zip(self.weights, inputs, strict=True):
            x, dy = x.to(weight.dtype), dy.to(weight.dtype) * factor
            y = onepass.linear(x, weight) if len(x) == 3 else weight * x
            total = total + (y * dy).float().sum()
        return total


def inputs_of(seed):
    generator = torch.Generator().manual_seed(seed)

    def whole(*shape):
        return drawn(torch.randint, -2, 3, shape, generator=generator).float()

    products = [(whole(3, shape[1]), whole(3, shape[0])) for shape in SHAPES[:2]]
    return [*products, *((whole(*shape), torch.ones(shape)) for shape in SHAPES[2:])]


# ---- ways to write a weight ----


def _by_numpy(weight, new, layers):
    bits = {2: torch.int16, 4: torch.int32}[weight.element_size()]
    if weight.is_cpu:
        weight.detach().view(bits).numpy()[...] = new.view(bits).numpy()


def _by_state_dict(weight, new, layers):
    state = {name: new if each is weight else each for name, each in layers.named_parameters()}
    layers.load_state_dict(state)


def _by_another_optimizer(weight, new, layers):
    weight.grad = weight.detach() - new
    torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None


def _swapped_and_back(weight, new, layers):
    before = weight.detach().clone()
    weight.data.copy_(new)
    weight.data.copy_(before)


def _with_other_memory(weight, new, layers):
    weight.data = new.clone()


def _by_model_state_dict(weight, new, layers):
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(layers, options=options)
    name = next(name for name, each in layers.named_parameters() if each is weight)
    set_model_state_dict(layers, state | {name: new}, options=options)


WRITES = {
    "copy_": lambda weight, new, layers: weight.detach().copy_(new),
    ".data": lambda weight, new, layers: weight.data.mul_(0).add_(new),
    "load_state_dict": _by_state_dict,
    "numpy": _by_numpy,
    "zeros": lambda weight, new, layers: weight.data.zero_(),
    "swap and back": _swapped_and_back,
    "optimizer": _by_another_optimizer,
    "memory": _with_other_memory,
}
SHARD_WRITES = {
    "copy_": lambda weight, new, layers: weight.detach().copy_(distribute_tensor(new, weight.device_mesh, weight.placements)),
    "shard": lambda weight, new, layers: weight.to_local().data.mul_(-2),
    "set_model_state_dict": _by_model_state_dict,
}


# ---- histories ----


class History(NamedTuple):
    """What happens between steps, by a seed: layers are frozen, unfrozen and written, before zero_() and after it."""

    seed: int
    steps: int = 14
    factor: int = 1  # of this rank's gradients
    mean: int = 1  # of all ranks' factors
    writes: tuple[str, ...] = tuple(WRITES)  # or of SHARD_WRITES


class Training(NamedTuple):
    layers: Layers
    main_grads: MainGrads | None
    optimizer: object
    dtype: torch.dtype


def made(kind, dtype, **options):
    """Train the first and the third layer at first."""
    layers = Layers(dtype)
    for place in (1, 3):
        layers.weights[place].requires_grad_(False)
    if kind == "ShardedAdamW":
        return Training(layers, None, ShardedAdamW(layers.parameters(), **OPTIONS, **options), dtype)
    main_grads = MainGrads(layers, **options)
    return Training(layers, main_grads, KINDS[kind](main_grads), dtype)


def masters_of(training):
    """Yield each layer's place, its fp32 numbers, and where in the flattened layer they begin."""
    layers, _, optimizer, _ = training
    places = {id(weight): place for place, weight in enumerate(layers.weights)}
    if isinstance(optimizer, MasterWeights):
        for parameter, master, start in optimizer.pieces():
            yield places[id(parameter)], master.detach().flatten(), start
    if isinstance(optimizer, AdamW):
        for name, kind, tensor, start, _ in optimizer.masters():
            if kind == "master":
                yield int(name.removeprefix("weights.")), tensor, start


def judged(history, training):
    """Live the history here and by torch.optim.AdamW. Return the first difference, or an empty string."""
    layers, main_grads, optimizer, dtype = training
    draw = random.Random(history.seed)
    oracle = [_whole(weight).float().clone().requires_grad_(weight.requires_grad) for weight in layers.weights]
    theirs = torch.optim.AdamW(oracle, foreach=False, **OPTIONS)
    slack = [torch.zeros_like(each) for each in oracle]  # what AdamW's low bits of before may be off by
    lived = []

    def event():
        place = draw.randrange(len(SHAPES))
        weight, exact = layers.weights[place], oracle[place]
        what = draw.choice(("freeze", "unfreeze", "unfreeze", *history.writes))
        lived.append(f"{what} {place}")
        if what in ("freeze", "unfreeze"):
            for each in (weight, exact):
                each.requires_grad_(what == "unfreeze")
            return
        before = _whole(weight).clone()
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        writes = SHARD_WRITES if isinstance(weight, DTensor) else WRITES
        writes[what](weight, drawn(torch.randn, *weight.shape, generator=generator).to(dtype), layers)
        with torch.no_grad():
            written = _whole(weight) != before
            exact.copy_(torch.where(written, _whole(weight).float(), exact))
            if dtype is BF16 and isinstance(optimizer, AdamW | ShardedAdamW):
                slack[place].copy_(torch.where(written, exact.abs() * 2.0**-8 + 1e-30, slack[place]))

    for step in range(history.steps):
        for _ in range(draw.randrange(3)):
            event()
        theirs.zero_grad()
        if main_grads is None:
            optimizer.zero_grad()
        else:
            main_grads.zero_()
        if draw.random() < 0.3:
            event()
        inputs = inputs_of(step)
        if any(weight.requires_grad for weight in layers.weights):
            layers(inputs, history.factor).backward()
            Layers.forward(_Weights(oracle), inputs, history.mean).backward()
        if main_grads is not None:
            main_grads.finish()
        if isinstance(optimizer, AdamW) and draw.random() < 0.5:
            optimizer.step(zero=True)
        else:
            optimizer.step()
        theirs.step()
        lived.append("step")
        wrong = _apart(training, oracle, slack)
        if wrong:
            return f"{wrong} after {', '.join(lived)}"
    return ""


class _Weights(NamedTuple):
    weights: list


def _whole(weight):
    return weight.detach().full_tensor() if isinstance(weight, DTensor) else weight.detach()


def _apart(training, oracle, slack):
    for place, master, start in masters_of(training):
        there = slice(start, start + master.numel())
        exact, more = oracle[place].detach().flatten()[there], slack[place].flatten()[there]
        off = (master - exact).abs()
        if not (off <= 2e-5 * exact.abs() + 2e-6 + more).all():
            return f"layer {place} is off by {off.max().item():.3g}"
    for place, (weight, exact) in enumerate(zip(training.layers.weights, oracle, strict=True)):
        rounding = {FP32: 0.0, FP16: 2.0**-10, BF16: 2.0**-8}[training.dtype]
        off = (_whole(weight).float() - exact.detach()).abs()
        if not (off <= (2e-5 + rounding) * exact.detach().abs() + 2e-6 + slack[place]).all():
            return f"the weight of layer {place} is off by {off.max().item():.3g}"
    return ""
