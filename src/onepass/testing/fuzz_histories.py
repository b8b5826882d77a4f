"""Random histories of one layer in eight bits: calls one after another, each judged against the same layer in fp64.

    onepass fuzz fp8_histories

Scales may come from the calls before, so a call can be right or wrong by its past: inputs of zeros, tiny and huge ones, weights
written behind the optimizer's back, calls with and without gradients, microbatches and steps. The promise is that no error is
silent: a result past its budget comes with numbers that `onepass.nn.fp8_saturations` or `fp8_underflows` counted in that call.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onepass.nn import Linear, NormLinear, fp8_saturations, fp8_underflows, set_precision
from onepass.ops.activation.activation_linear import activation_linear
from onepass.runtime.backend import use_backend
from onepass.runtime.fp8 import unfit_gpu
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.random_calls import BF16, FP32, Draw, RandomTensor
from onepass.testing.fuzz import BACKENDS, NUMBERS, Outcome, draw_values

HISTORIES = "fp8_histories"
WIDTH, COLUMNS = 64, 32  # of x and of y


class _ActivationLayer(Linear):
    """An MLP's second half: one product, so that its error is that of one."""

    def forward(self, x: Tensor) -> Tensor:
        return activation_linear(x, self.weight, self.bias, "swiglu", precision=self.precision)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": partial(Linear, WIDTH, COLUMNS),
    "NormLinear": partial(NormLinear, WIDTH, COLUMNS),
    "NormLinear, layer_norm": partial(NormLinear, WIDTH, COLUMNS, norm="layer_norm"),
    "activation_linear": partial(_ActivationLayer, WIDTH // 2, COLUMNS),
}
RECIPES = (
    FP8Recipe(), FP8Recipe(amax_history_len=1), FP8Recipe(amax_compute_algo="most_recent"), FP8Recipe(margin=2),
    FP8Recipe(format="e4m3"), FP8Recipe(wgrad=False), FP8Recipe("current"), FP8Recipe("row"), FP8Recipe("row", format="e4m3"),
)  # fmt: skip
WAYS = ("step", "microbatch", "no_grad", "eval")  # forward, backward and a step; without the step; and forward alone
WEIGHTS = ("as they are", "times 30", "over 30", "zeros", "drawn anew")  # what is done to them before a call, by `.data`
BUDGET = {"y": 0.12, "dx": 0.25, "dweight": 0.25}  # relative RMS; e4m3 has three bits, e5m2 two
_LONGEST = 6


class _Event(NamedTuple):
    """One call of a history."""

    rows: int
    numbers: str  # of x
    incoming: str  # numbers of dy
    way: str
    weights: str

    def __str__(self) -> str:
        said = f"{self.way} of {self.rows} rows {self.numbers}"
        said += f", dy {self.incoming}" if self.way in WAYS[:2] else ""
        return said if self.weights == WEIGHTS[0] else f"{said}, weights {self.weights}"


def run_history(
    seed: int,
    choices: Sequence[int] | None = None,
    *,
    device: torch.device | None = None,
    without: Sequence[str] = (),
    backends: Sequence[str] = BACKENDS,
) -> Outcome:
    """Run one history by each backend that takes it.

    Args:
        choices: what to take in place of the seed's own choices; numbers still come from the seed.
        without: numbers of NUMBERS to leave out.
    """
    device = torch.device("cpu") if device is None else device
    draw = Draw(random.Random(f"{HISTORIES} {seed}"), choices)
    kind, recipe = draw.choose(tuple(LAYERS)), draw.choose(RECIPES)
    dtype, bias = draw.choose((FP32, BF16)), draw.flag()
    # of an activation of numbers far apart, one that cancels may be all of a gradient
    known = [numbers for numbers in NUMBERS[: 4 if kind == "activation_linear" else 5] if numbers not in without]
    likely = 8, *(1 for _ in WEIGHTS[1:])
    events = [
        _Event(draw.choose((16, 1, 40)), draw.choose(known), draw.choose(known), draw.choose(WAYS), draw.choose(WEIGHTS, likely))
        for _ in range(draw.choose(range(1, _LONGEST + 1)))
    ]
    said = [f"{kind} {str(dtype).removeprefix('torch.')}", f"bias={bias}", str(recipe), *map(str, events)]
    found = Outcome(HISTORIES, seed, tuple(draw.taken), choices is not None, "; ".join(said))
    for backend in backends if device.type != "cuda" or unfit_gpu(device) is None else ():
        torch.manual_seed(seed)
        layer = LAYERS[kind](bias=bias, precision=recipe, device=device, dtype=dtype)
        try:
            with use_backend(backend):
                found.failures += [f"{backend}: {words}" for words in _judged(layer, events, dtype, seed, device)]
        except Exception as error:
            if "can't take this call" in str(error):  # no kernels here
                continue
            found.failures.append(f"{backend}: {type(error).__name__}: {error}")
        found.ran.append(backend)
    return found


def _judged(layer: nn.Module, events: Sequence[_Event], dtype: torch.dtype, seed: int, device: torch.device) -> list[str]:
    """Run the calls, and return in words which errors were past their budget and not counted."""
    optimizer, bad = torch.optim.SGD(layer.parameters(), lr=0.0), []  # its steps are what histories move on
    for at, event in enumerate(events):
        generator = torch.Generator(device).manual_seed(seed * 1009 + at)
        x = draw_values(RandomTensor((event.rows, WIDTH), dtype), event.numbers, generator, device)
        _write(layer, event.weights, generator)
        layer.train(event.way != "eval")
        before = _counts(layer)
        dy = None
        if event.way in WAYS[:2]:
            dy = draw_values(RandomTensor((event.rows, COLUMNS), dtype), event.incoming, generator, device)
        with use_backend("torch"):
            right = _results(_exact(layer), x.double(), dy)
        ours = _results(layer, x, dy)
        if event.way == "step":
            optimizer.step()
        optimizer.zero_grad()
        counted = _counts(layer) - before
        for name, result in ours.items():
            error, allowed = _relative(result, right[name]), BUDGET[name]
            if not error <= allowed and not counted:
                bad.append(f"call {at + 1}, {name}: off by {error:.3g} of its size, past {allowed:g}, and nothing was counted")
    return bad


def _results(layer: nn.Module, x: Tensor, dy: Tensor | None) -> dict[str, Tensor]:
    """y, and with dy the gradients of x and of the weights."""
    if dy is None:
        with torch.no_grad():
            return {"y": layer(x)}
    x = x.detach().requires_grad_()
    y = layer(x)
    torch.autograd.backward(y, dy.to(y.dtype))
    assert x.grad is not None and isinstance(layer.weight, Tensor) and layer.weight.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dweight": layer.weight.grad.clone()}


def _write(layer: nn.Module, how: str, generator: torch.Generator) -> None:
    """Write the weights as no optimizer does."""
    assert isinstance(layer.weight, Tensor)
    if how == "drawn anew":
        layer.weight.data.normal_(0.0, WIDTH**-0.5, generator=generator)
    elif how != WEIGHTS[0]:
        layer.weight.data.mul_({"times 30": 30.0, "over 30": 1 / 30, "zeros": 0.0}[how])


def _exact(layer: nn.Module) -> nn.Module:
    """The layer of now in fp64 and by the formula, without a history."""
    plain = copy.deepcopy(layer).double()
    set_precision(plain, None)
    return plain


def _counts(layer: nn.Module) -> int:
    return sum(sum(roles.values()) for counts in (fp8_saturations, fp8_underflows) for roles in counts(layer).values())


def _relative(ours: Tensor, right: Tensor) -> float:
    """The error over the size; infinite where only one is zero, or ours is not finite."""
    size, error = right.double().norm(), (ours.double() - right.double()).norm()
    if not error.isfinite():
        return float("inf")
    return 0.0 if error == 0 else float(error / size) if size > 0 else float("inf")
