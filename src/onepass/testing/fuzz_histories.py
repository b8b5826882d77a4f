"""Random histories of a layer or an MLP in eight bits: calls one after another, each judged against the same in fp64.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onepass.nn import MLP, Linear, NormLinear, fp8_saturations, fp8_underflows, set_precision
from onepass.ops.activation.activation_linear import activation_linear
from onepass.runtime.backend import use_backend
from onepass.runtime.fp8 import unfit_gpu
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.random_calls import BF16, FP32, Draw, RandomTensor
from onepass.testing.fuzz import BACKENDS, NUMBERS, Outcome, draw_values, keeps_generators

HISTORIES = "fp8_histories"
WIDTH, COLUMNS, FFN = 64, 32, 48  # of x, of a layer's y, and of an MLP's activation


class _ActivationLayer(Linear):
    """An MLP's second half: one product, so that its error is that of one."""

    def forward(self, input: Tensor, **options: Any) -> Tensor:
        return activation_linear(input, self.weight, self.bias, "swiglu", precision=self.precision, **options)


class _NormMLP(MLP):
    """An MLP whose first product takes a norm in, as in a transformer's layer."""

    def __init__(self, hidden_size: int, *sizes: Any, bias: bool, **options: Any) -> None:
        super().__init__(hidden_size, *sizes, bias=bias, **options)
        assert self.linear_fc1.weight is not None
        self.linear_fc1 = NormLinear(hidden_size, len(self.linear_fc1.weight), bias=False, **options)  # type: ignore[assignment]

    def forward(self, x: Tensor, per_token_scale: Tensor | None = None, **options: Any) -> Any:
        return self.rest(self.linear_fc1(x), None, per_token_scale, **options)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": partial(Linear, WIDTH, COLUMNS),
    "NormLinear": partial(NormLinear, WIDTH, COLUMNS),
    "NormLinear, layer_norm": partial(NormLinear, WIDTH, COLUMNS, norm="layer_norm"),
    "activation_linear": partial(_ActivationLayer, WIDTH // 2, COLUMNS),
    "MLP": partial(MLP, WIDTH, FFN),
    "MLP, gelu": partial(MLP, WIDTH, FFN, "gelu"),
    "norm and MLP": partial(_NormMLP, WIDTH, FFN),
}
MLPS = ("MLP", "MLP, gelu", "norm and MLP")
RECIPES = (
    FP8Recipe(), FP8Recipe(amax_history_len=1), FP8Recipe(amax_compute_algo="most_recent"), FP8Recipe(margin=2),
    FP8Recipe(format="e4m3"), FP8Recipe(wgrad=False), FP8Recipe("current"), FP8Recipe("row"), FP8Recipe("row", format="e4m3"),
)  # fmt: skip
WAYS = ("step", "microbatch", "no_grad", "eval")  # forward, backward and a step; without the step; and forward alone
WEIGHTS = ("as they are", "times 30", "over 30", "zeros", "drawn anew")  # what is done to them before a call, by `.data`
RESULTS, GRADIENTS = 0.12, 0.25  # relative RMS; e4m3 has three bits, e5m2 two
SUMS = "dbias", "dlinear_fc2.bias"  # of dy as it came, before it has eight bits
_LONGEST = 6


class _Event(NamedTuple):
    """One call of a history."""

    rows: int
    numbers: str  # of x
    incoming: str  # numbers of dy
    way: str
    weights: str
    which: int  # of an MLP's weights

    def __str__(self) -> str:
        words = f"{self.way} of {self.rows} rows {self.numbers}"
        words += f", dy {self.incoming}" if self.way in WAYS[:2] else ""
        return words if self.weights == WEIGHTS[0] else f"{words}, weight {self.which + 1} {self.weights}"


@keeps_generators
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
    is_mlp = kind in MLPS
    other = draw.choose((recipe, None, *RECIPES), (8, *(1 for _ in (None, *RECIPES)))) if is_mlp else recipe
    # of an activation of numbers far apart, one that cancels may be all of a gradient
    known = [numbers for numbers in NUMBERS[: 5 if "Linear" in kind else 4] if numbers not in without]
    # mostly usual calls: of an error that is counted nobody learns whether another is
    usual = 4, *(1 for _ in known[1:])
    events = [
        _Event(
            draw.choose((16, 1, 40)), draw.choose(known, usual), draw.choose(known, usual), draw.choose(WAYS, (3, 1, 1, 1)),
            draw.choose(WEIGHTS, (6, 2, 1, 1, 1)), draw.choose((0, 1) if is_mlp else (0,)),
        )
        for _ in range(draw.choose(range(1, _LONGEST + 1)))
    ]  # fmt: skip
    history = [f"{kind} {str(dtype).removeprefix('torch.')}", f"bias={bias}", str(recipe), *map(str, events)]
    if other != recipe:
        history.insert(3, f"its second product {other or 'in its own type'}")
    found = Outcome(HISTORIES, seed, tuple(draw.taken), choices is not None, "; ".join(history))
    for backend in backends if device.type != "cuda" or unfit_gpu(device) is None else ():
        torch.manual_seed(seed)
        layer = LAYERS[kind](bias=bias, precision=recipe, device=device, dtype=dtype)
        for name, parameter in layer.named_parameters():
            if name.endswith("norm_weight"):  # of ones, its gradient is that of the rows too
                parameter.data.add_(torch.randn_like(parameter), alpha=0.5)
        if is_mlp:
            set_precision(layer.get_submodule("linear_fc2"), other)
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
        _write([weight for weight in layer.parameters() if weight.dim() == 2][event.which], event.weights, generator)
        layer.train(event.way != "eval")
        before = _counts(layer)
        dy = None
        if event.way in WAYS[:2]:
            columns = getattr(layer, "out_features", WIDTH)
            dy = draw_values(RandomTensor((event.rows, columns), dtype), event.incoming, generator, device)
        exact = _exact(layer)
        ours = _results(layer, x, dy)
        with use_backend("torch"):
            right = _results(exact, x.double(), dy, ours.get("h"))
        if event.way == "step":
            optimizer.step()
        optimizer.zero_grad()
        counted = _counts(layer) - before
        for name, result in ours.items():
            error, allowed = _relative(result, right[name]), GRADIENTS if name.startswith("d") else RESULTS
            if name in SUMS:  # no count excuses an error
                allowed = 1.25 * _relative(right[name].to(result.dtype), right[name]) + 1e-6
            elif result.dim() == 1 and not error <= allowed:
                assert dy is not None
                with use_backend("torch"):
                    error = _relative(result, right[name], _size_of_terms(exact, x.double(), dy, ours.get("h"), name, generator))
            if not error <= allowed and (name in SUMS or not counted):
                silent = "" if name in SUMS else ", and nothing was counted"
                bad.append(f"call {at + 1}, {name}: off by {error:.3g} of its size, past {allowed:g}{silent}")
    return bad


def _results(layer: nn.Module, x: Tensor, dy: Tensor | None, h: Tensor | None = None) -> dict[str, Tensor]:
    """Return y, an MLP's h between its products, and with dy all gradients.

    Args:
        h: the value from which an MLP's second product and its gradients go on. A gate of large numbers is a step: rounding
            turns some of them, and what follows is right of the others.
    """
    found = {}

    def take_up(module: nn.Module, args: Any, output: Any) -> Any:
        up, *bias = output if isinstance(output, tuple) else (output,)
        found["h"] = up.detach()
        if h is not None:
            up = up + (h - up).detach()
        return (up, *bias) if bias else up

    hook = layer.linear_fc1.register_forward_hook(take_up) if isinstance(layer, MLP) else None
    with torch.set_grad_enabled(dy is not None):
        x = x.detach().requires_grad_()
        y = layer(x)
    if hook is not None:
        hook.remove()
    found["y"] = y.detach()
    if dy is not None:
        torch.autograd.backward(y, dy.to(y.dtype))
        grads = {"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}
        found |= {f"d{name}": grad.clone() for name, grad in grads.items() if grad is not None}
    return found


def _size_of_terms(layer: nn.Module, x: Tensor, dy: Tensor, h: Tensor | None, name: str, generator: torch.Generator) -> Tensor:
    """Return the largest size of a vector's gradient with dy and the weights of other signs: its own terms may cancel."""

    def signed(t: Tensor) -> Tensor:
        return t * (torch.randint(2, t.shape, generator=generator, device=t.device) * 2 - 1)

    sizes = []
    for of_weights in (False, False, True):
        other = copy.deepcopy(layer)
        other.zero_grad()
        for weight in other.parameters() if of_weights else ():
            if weight.dim() == 2:
                weight.data = signed(weight.data)
        sizes.append(_results(other, x, dy.double() if of_weights else signed(dy.double()), h)[name].norm())
    return torch.stack(sizes).amax()


def _write(weight: Tensor, how: str, generator: torch.Generator) -> None:
    """Write a weight as no optimizer does."""
    if how == "drawn anew":
        weight.data.normal_(0.0, WIDTH**-0.5, generator=generator)
    elif how != WEIGHTS[0]:
        weight.data.mul_({"times 30": 30.0, "over 30": 1 / 30, "zeros": 0.0}[how])


def _exact(layer: nn.Module) -> nn.Module:
    """The layer of now in fp64 and by the formula, without a history."""
    plain = copy.deepcopy(layer).double()
    set_precision(plain, None)
    return plain


def _counts(layer: nn.Module) -> int:
    return sum(sum(roles.values()) for counts in (fp8_saturations, fp8_underflows) for roles in counts(layer).values())


def _relative(ours: Tensor, right: Tensor, size: Tensor | None = None) -> float:
    """The error over the size, which is that of `right` unless given; infinite where only one is zero, or ours is not finite."""
    size, error = right.double().norm() if size is None else size, (ours.double() - right.double()).norm()
    if not error.isfinite():
        return float("inf")
    return 0.0 if error == 0 else float(error / size) if size > 0 else float("inf")
