"""The oracle of bias_activation: `judge_case` decides whether a module computes a case within the error budget.

The real module must pass every case, and each mutant must fail one.
"""

import contextlib
import itertools
from dataclasses import dataclass, replace

import torch

from onepass.ops.activation import bias_activation as real
from onepass.runtime.saved import fp8_dequantise, fp8_quantise
from onepass.testing.budget import BudgetReport, Finding, compare, run
from onepass.testing.poison import poisoned, unchanged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = ("gelu", "gelu_exact", "quick_gelu", "silu", "relu", "squared_relu")
GATED = ("swiglu", "geglu", "geglu_exact", "quick_geglu", "reglu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
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

    def __str__(self) -> str:
        parts = [self.activation, str(self.dtype), "x".join(map(str, (*self.lead, self.H))), f"bias={self.bias}"]
        parts += [f"weight={self.weight}{'[1]' if self.weight_column else ''}"] if self.weight else []
        parts += [f"clamp={self.clamp}"] if self.clamp else []
        parts += [f"offset={self.offset}"] if self.offset else []
        parts += [self.save, self.layout, f"dy={self.dy_layout}"]
        parts += [f"linear={self.linear_layout}"] if self.linear_layout else []
        return "-".join(part.replace("torch.", "") for part in parts)


# ---- adversarial inputs ----


def laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in another memory layout. "expanded" repeats the first row."""
    if layout == "strided":  # every second element
        wide = torch.full((*t.shape, 2), float("nan"), dtype=t.dtype, device=t.device)
        return wide[..., 0].copy_(t)
    if layout == "sliced":  # rows of a wider tensor, from an odd offset
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 5), float("nan"), dtype=t.dtype, device=t.device)
        return wide[..., 3 : 3 + t.shape[-1]].copy_(t)
    if layout == "transposed" and t.dim() > 1:  # the last two dimensions
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "swapped" and t.dim() > 2:  # the first two dimensions: whole rows, but not evenly spaced
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "followed" and t.dim() > 2:  # each sequence is followed by a row of NaN
        longer = torch.full((*t.shape[:-2], t.shape[-2] + 1, t.shape[-1]), float("nan"), dtype=t.dtype, device=t.device)
        return longer[..., :-1, :].copy_(t)
    if layout == "expanded":
        return t.reshape(-1, t.shape[-1])[0].expand(t.shape)
    if layout == "unaligned":
        flat = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype, device=t.device)
        return flat[1:].view(t.shape).copy_(t)
    return t.contiguous()


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
    names = vars(module.kernels)

    def forward(M, H, fp8):
        block_h = 64 if fp8 or H > 32 else names["power_of_two"](H)
        return names["ColumnTiles"](16, block_h, names["ceil_div"](H, block_h), names["ceil_div"](M, 16), 16, 4)

    def backward(M, H, *_):
        block_h = min(names["power_of_two"](H), 64)
        rows = 12 if M > 12 else names["ceil_div"](M, 4) * 4  # three blocks of 4
        return names["ColumnTiles"](4, block_h, names["ceil_div"](H, block_h), names["ceil_div"](M, rows), rows, 4, 1)

    # counters persist from call to call, as on a GPU, so that one that isn't reset is found
    counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)

    def scratch(floats, count, device):
        assert count <= counters.numel()
        return torch.empty(floats, dtype=torch.float32, device=device), counters[:count]

    changes = {"_forward_tiles": forward, "_backward_tiles": backward, "stream_scratch": scratch}
    before = {name: names[name] for name in changes}
    names.update(changes)
    for plan in ("_forward_plan", "_backward_plan"):
        names[plan].cache_clear()
    try:
        yield counters
    finally:
        names.update(before)
        for plan in ("_forward_plan", "_backward_plan"):
            names[plan].cache_clear()


# ---- the oracle ----


def call(module, case: Case, backend: str = "triton"):
    def op(x, bias, token_weight, linear):
        options = {**case.options, "token_weight": token_weight, "linear": linear, "save": case.save, "backend": backend}
        return module.bias_activation(x, bias, case.activation, **options)

    return op


def formula(case: Case):
    def reference(x, bias, token_weight, linear):
        return real.bias_activation_reference(x, bias, token_weight, activation=case.activation, linear=linear, **case.options)

    return reference


def wide(case: Case, inputs, dy, dtype):
    """Return the formula's results in `dtype`. With save="fp8" the gradients are those at the saved x."""
    results = run(formula(case), inputs, dy, dtype)
    if case.save != "fp8":
        return results
    parts = 2 if case.gated else 1
    kept = fp8_dequantise(*fp8_quantise(inputs["x"], parts), torch.float32, parts)
    return run(formula(case), {**inputs, "x": kept}, dy, dtype) | {"y": results["y"]}


def judge_case(module, case: Case, backend: str = "triton") -> BudgetReport:
    """Judge a case against the budget, in poisoned memory. Inputs that the module must not write are checked too."""
    trials = []
    seeds = range(4 if case.H * len(case.lead) < 32 else 1)  # outputs of few elements are pooled over seeds
    with small_tiles(module) as counters:
        for seed in seeds:
            inputs, dy = draw(case, seed)
            try:
                with poisoned(), unchanged(**inputs, dy=dy):
                    ours = run(call(module, case, backend), inputs, dy)
                    assert not counters.any(), "an arrival counter was not set back"
            except AssertionError as error:
                return BudgetReport([Finding("memory", str(error), float("nan"), 0.0, 0.0)])
            trials.append((ours, wide(case, inputs, dy, FP32), wide(case, inputs, dy, torch.float64)))
    return compare(trials, case.dtype)


# ---- the cases ----

SHAPES = (((3, 7), 72), ((37,), 65), ((), 33), ((2, 1, 3, 2), 130), ((5, 4), 1), ((1,), 1))
LAYOUTS = ("contiguous", "strided", "sliced", "transposed", "swapped", "expanded", "unaligned")
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
