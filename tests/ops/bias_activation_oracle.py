"""The oracle of bias_activation (see `oracle`)."""

import contextlib
import itertools
from dataclasses import dataclass, replace
from functools import partial

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, LAYOUTS, Counters, NamedCase, judge_call, laid_out, replaced

from onepass.kernels.language import device_function
from onepass.ops.activation import bias_activation as real
from onepass.runtime.saved import fp8_dequantise, fp8_quantise
from onepass.testing.budget import BudgetReport, run

PLAIN = ("gelu", "gelu_exact", "quick_gelu", "silu", "relu", "squared_relu")
GATED = ("swiglu", "geglu", "geglu_exact", "quick_geglu", "reglu")


@dataclass(frozen=True)
class Case(NamedCase):
    """One call. H is y's last dimension, `lead` the others."""

    activation: str = "gelu"
    lead: tuple[int, ...] = (3, 7)
    H: int = 72
    dtype: torch.dtype = FP32
    bias: torch.dtype | None = FP32
    weight: torch.dtype | None = None
    weight_column: bool = False  # [..., 1] rather than [...]
    clamp: float | None = None
    offset: float = 0.0
    save: str = "input"
    layout: str = "contiguous"
    dy_layout: str = "contiguous"
    linear_layout: str | None = None  # of the linear part as a tensor of its own

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def W(self) -> int:
        return 2 * self.H if self.gated else self.H

    @property
    def options(self) -> dict[str, object]:
        return {"clamp": self.clamp, "linear_offset": self.offset} if self.gated else {}


@device_function
def cubed(z):
    """A user's own activation."""
    return z * z * z


@device_function
def cubed_derivative(z):
    return 3.0 * z * z


# ---- adversarial inputs ----


def draw(case: Case, seed: int = 0):
    """Return x, bias, token_weight, linear or not, and dy. They are drawn on the CPU, so every machine gets the same values."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    x = 1.5 * randn(*case.lead, case.W)
    if case.gated and case.save == "fp8":
        x[..., case.H :] *= 100  # the halves have different scales
    bias = None if case.bias is None else randn(case.W).to(case.bias)
    x = x.to(case.dtype)
    if bias is not None:
        bias[::3] = (bias[::3] * 8).round().clamp(-16, 16) / 8  # in these columns x + bias can equal an edge exactly
    shift = torch.zeros(case.W) if bias is None else bias.float()
    rows = x.view(-1, case.W)  # exact edges: relu's, and both of a clamp, at which the gradient passes
    for row, edge in enumerate((0.0, case.clamp, None if case.clamp is None else -case.clamp)):
        if edge is not None and row < len(rows):
            rows[row, ::3] = (edge - shift[::3]).to(case.dtype)
    weight = None
    if case.weight is not None:
        weight = (0.5 + torch.rand(case.lead, generator=generator)).to(case.weight)
        weight = weight[..., None] if case.weight_column else weight
    dy = randn(*case.lead, case.H).to(case.dtype)
    linear = None
    if case.linear_layout is not None:
        linear = laid_out(x[..., case.H :].to(DEVICE), case.linear_layout)
        x = x[..., : case.H]
    x, dy = (laid_out(t.to(DEVICE), layout) for t, layout in ((x, case.layout), (dy, case.dy_layout)))
    return {
        "x": x,
        "bias": bias if bias is None else bias.to(DEVICE),
        "token_weight": weight if weight is None else weight.to(DEVICE),
        "linear": linear,
    }, dy


# ---- tiles so small that there are several of each kind, and the last one is partial ----


@contextlib.contextmanager
def small_tiles(module):
    """Patch the tiles: few, large programs for the interpreter, several column tiles and strips, the last strip partial.

    A mutant has its own kernels, which are found from what it imports.
    """
    names, counters = vars(module.kernels), Counters()

    def forward(M, H, fp8):
        block_h = 64 if fp8 or H > 32 else names["power_of_two"](H)
        return names["ColumnTiles"](16, block_h, names["ceil_div"](H, block_h), names["ceil_div"](M, 16), 16, 4)

    def backward(M, H, *_):
        block_h = min(names["power_of_two"](H), 64)
        rows = 12 if M > 12 else names["ceil_div"](M, 4) * 4  # three blocks of 4
        return names["ColumnTiles"](4, block_h, names["ceil_div"](H, block_h), names["ceil_div"](M, rows), rows, 4, 1)

    changes = {"_forward_tiles": forward, "_backward_tiles": backward}
    with replaced(names, [names["_forward_plan"], names["_backward_plan"]], stream_scratch=counters.scratch, **changes):
        yield counters


# ---- the oracle ----


def call(module, case: Case, backend: str = "triton", **more):
    def op(x, bias, token_weight, linear):
        options = {**case.options, "token_weight": token_weight, "linear": linear, "save": case.save, "backend": backend, **more}
        return module.bias_activation(x, bias, case.activation, **options)

    return op


def plain_formula(case: Case):
    def reference(x, bias, token_weight, linear):
        return real.bias_activation_reference(x, bias, token_weight, activation=case.activation, linear=linear, **case.options)

    return reference


def wide(case: Case, inputs, dy, dtype, formula=None):
    """Return the formula's results in `dtype`. With save="fp8" the gradients are those at the saved x."""
    formula = formula or plain_formula(case)
    results = run(formula, inputs, dy, dtype)
    if case.save != "fp8":
        return results
    parts = 2 if case.gated else 1
    kept = fp8_dequantise(*fp8_quantise(inputs["x"], parts), torch.float32, parts)
    return run(formula, {**inputs, "x": kept}, dy, dtype) | {"y": results["y"]}


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    with small_tiles(module) as counters:
        few = case.H * len(case.lead) < 32
        return judge_call(call(module, case, backend), partial(wide, case), partial(draw, case), case.dtype, counters, few)


# ---- the cases ----

SHAPES = (((3, 7), 72), ((37,), 65), ((), 33), ((2, 1, 3, 2), 130), ((5, 4), 1), ((1,), 1))
CLAMPS = ((None, 0.0), (1.0, 0.0), (None, 1.0), (0.75, 0.5))


def two_tensor_cases() -> list[Case]:
    """Return every gated activation in every dtype, its gate and its linear part in two tensors that lie differently."""
    found = []
    for i, (dtype, activation) in enumerate(itertools.product((FP32, BF16, FP16), GATED)):
        lead, H = SHAPES[i % len(SHAPES)]
        layouts = LAYOUTS[i % 7], LAYOUTS[(i // 2) % 7], LAYOUTS[(i + 2) % 7]
        weight = (None, FP32, dtype)[i % 3]
        found.append(Case(activation, lead, H, dtype, None, weight, i % 2 == 1, *CLAMPS[i % 4], "input", *layouts))
    return found


def main_cases() -> list[Case]:
    """Return every activation in every dtype, with the other features in turn: for the mutants and for a GPU."""
    cases, turn = [], itertools.count()
    for dtype, activation in itertools.product((FP32, BF16, FP16), (*PLAIN, *GATED)):
        i = next(turn)
        lead, H = SHAPES[i % len(SHAPES)] if i % 2 else SHAPES[i % 4 // 2]
        clamp, offset = CLAMPS[i % 4] if activation in GATED else (None, 0.0)
        cases.append(
            Case(
                activation, lead, H, dtype, (dtype, FP32, None)[i % 3], (None, FP32, dtype)[(i + i // 3) % 3], i % 2 == 1,
                clamp, offset, ("input", "fp8", "offload")[(i + i // 10) % 3], LAYOUTS[i % 7], LAYOUTS[(i // 3) % 7],
            )
        )  # fmt: skip
    base = Case("swiglu", (37,), 130, BF16, FP32, FP32, False, 1.0, 1.0)
    cases += [
        replace(base, dtype=FP32),
        base,
        replace(base, save="fp8"),
        replace(base, activation="geglu", save="fp8", dtype=FP32),
    ]
    cases += two_tensor_cases()
    cases += [Case("gelu_exact", (37,), 200, save="fp8"), Case("relu", (41,), 72, BF16, FP32, BF16), Case("gelu", (300,), 40)]
    return [Case("geglu", (3,), 33, FP32, FP32, FP32, False, None, 1.0), *cases]  # first: a gate near 4, a large linear half
