"""The oracle of route (see `oracle`).

What is chosen and counted must be exact. Logits are drawn so that fp32 can choose: where two scores that a bias or groups are
compared by are nearly equal, the token gets other logits. Weights, losses and gradients have the budget of errors.
"""

import contextlib
from dataclasses import dataclass, replace

import torch
from ops.oracle import BF16, DEVICE, FP16, FP32, Counters, NamedCase, broken, judge_call, laid_out, replaced

from onepass.ops.routing import route as real
from onepass.testing.budget import BudgetReport, run

LAYOUTS = ("contiguous", "strided", "sliced", "transposed", "unaligned")
_GAP = 1e-5  # of scores, which fp32 has to 1e-7
NAN = float("nan")


@dataclass(frozen=True)
class Case(NamedCase):
    shape: tuple[int, ...] = (37, 40)
    k: int = 4
    score: str = "softmax"
    normalise: bool = True
    groups: tuple[int, int] | None = None
    scale: float = 1.0
    aux: float | None = None
    z: float | None = None
    bias: float = 0.0  # its standard deviation; 0: none
    dtype: torch.dtype = FP32
    size: float = 1.5  # the standard deviation of the logits
    ties: bool = False  # logits are few numbers
    nan: bool = False  # a token has NaN, and one -inf
    layout: str = "contiguous"
    path: str = "small"  # tiles; "" for the real ones
    quiet: str = ""  # outputs that get no gradient

    @property
    def options(self):
        names = ("k", "score", "normalise", "groups", "scale", "aux", "z")
        return {name: getattr(self, name) for name in names}


# ---- inputs ----


def _gaps(case, logits, bias):
    """Return the least difference, in fp64, of two scores that the choice of each token depends on."""
    x = logits.double().reshape(-1, case.shape[-1])
    scores = (x.sigmoid() if case.score == "sigmoid" else x.softmax(-1)) + (0 if bias is None else bias.double())
    compared = [scores] if bias is not None else []
    if case.groups is not None:
        compared.append(scores.unflatten(-1, (case.groups[0], -1)).topk(2).values.sum(-1))
    ranked = [each.sort(-1).values for each in compared if each.shape[-1] > 1]
    return torch.stack([each.diff(dim=-1).amin(-1) for each in ranked]).amin(0) if ranked else torch.ones(len(x))


def draw(case, seed=0):
    """Return the inputs, incoming gradients, and the bias, which has none."""
    generator = torch.Generator().manual_seed(seed)

    def normals(*shape):
        return torch.randn(shape, generator=generator)

    logits = (case.size * normals(*case.shape)).to(case.dtype)
    bias = case.bias * normals(case.shape[-1]) if case.bias else None
    if case.ties:
        logits = (logits * 2).round().to(case.dtype)
    rows = logits.view(-1, case.shape[-1])
    fair = _gaps(case, logits, bias) > _GAP
    rows[~fair] = rows[fair.nonzero()[0]]
    if case.nan:
        rows[1, 3] = NAN
        rows[2, ::2] = -float("inf")
    inputs = {"logits": laid_out(logits.to(DEVICE), case.layout)}
    dys = [None if "weights" in case.quiet else normals(*case.shape[:-1], case.k)]
    dys += [None if name in case.quiet else normals() for name in ("aux", "z") if getattr(case, name) is not None]
    return inputs, tuple(None if dy is None else dy.to(DEVICE) for dy in dys), None if bias is None else bias.to(DEVICE)


# ---- tiles so small that there are several programs, and the last one's rows are partial ----


@contextlib.contextmanager
def small_tiles(module, case):
    names = module.route_forward.__globals__
    counters = Counters()
    changes = {"stream_scratch": counters.scratch}
    if case.path:
        tiles, power_of_two = names["RouteTiles"], names["power_of_two"]
        changes |= {"_tiles": lambda C, *_: tiles(4, power_of_two(C), 1, 1), "processors": lambda device: 3, "_PARTIALS": 64}
    with replaced(names, [names["_forward_plan"], names["_backward_plan"]], **changes):
        yield counters


# ---- the oracle ----


def _floating(routing):
    return tuple(y for y in (routing.weights, routing.aux_loss, routing.z_loss) if y is not None)


def judge_case(module, case, backend="triton") -> BudgetReport:
    """Judge a case in poisoned memory. A choice or a count that is not the formula's breaks it."""
    found, biases = [], []

    def draw_inputs(seed):
        inputs, dys, bias = draw(case, seed)
        biases.append(bias)
        return inputs, dys

    def call(logits):
        routing = module.route(logits, bias=biases[-1], backend=backend, **case.options)
        found.append((logits.detach(), biases[-1], routing.chosen, routing.counts))
        return _floating(routing)

    def formula(inputs, dys, dtype):
        bias = None if biases[-1] is None else biases[-1].to(dtype)
        return run(lambda logits: _floating(real.route_reference(logits, bias=bias, **case.options)), inputs, dys, dtype)

    with small_tiles(module, case) as counters:
        report = judge_call(call, formula, draw_inputs, case.dtype, counters if backend == "triton" else None, few=True)
    for logits, bias, chosen, counts in found:
        exact = real.route_reference(logits.double(), bias=None if bias is None else bias.double(), **case.options)
        finite = logits.isfinite().all(-1)
        if not torch.equal(chosen[finite], exact.chosen[finite]):
            return broken("chosen", f"{int((chosen != exact.chosen).sum())} are others")
        if not torch.equal(counts.long(), chosen.flatten().bincount(minlength=case.shape[-1])) or counts.dtype is not torch.int32:
            return broken("counts", "not those of what was chosen")
    return report


# ---- the cases ----


def main_cases():
    """Return cases of every option, with types, layouts and numbers of experts in turn: for the mutants and for a GPU."""
    losses, sigmoid = {"aux": 0.5, "z": 0.25}, {"score": "sigmoid"}
    kinds = (
        {}, {"normalise": False, "scale": 2.5}, sigmoid, sigmoid | {"normalise": False, "scale": 2.5},
        {"bias": 0.1}, {"bias": 0.1, "normalise": False}, sigmoid | {"bias": 0.3}, {"groups": (4, 2)},
        sigmoid | {"groups": (4, 2), "bias": 0.3, "scale": 2.5}, {"groups": (4, 3), "normalise": False},
    )  # fmt: skip
    shapes = ((37, 40), (2, 9, 24), (13, 32), (5, 60), (3, 1, 5, 8))
    cases = []
    for turn, (kind, more) in enumerate((kind, more) for kind in kinds for more in ({}, losses)):
        shape = shapes[turn % 5]
        dtype, layout = (FP32, BF16, FP16)[turn % 3], LAYOUTS[turn // 2 % 5]
        cases.append(Case(shape, min(4, shape[-1]), dtype=dtype, layout=layout, **kind, **more))
    plain = Case(**losses)
    cases += [
        replace(plain, k=1), replace(plain, k=1, score="sigmoid"), replace(plain, k=40), replace(plain, shape=(6, 1), k=1),
        replace(plain, shape=(40,)), replace(plain, ties=True, k=20), replace(plain, ties=True, score="sigmoid", size=3.0),
        replace(plain, aux=None), replace(plain, z=None, score="sigmoid"), replace(plain, nan=True, aux=None, z=None),
        replace(plain, nan=True, aux=None, z=None, score="sigmoid", normalise=False), replace(plain, size=20.0),
        replace(plain, size=20.0, score="sigmoid"), replace(plain, size=1e-3), replace(plain, quiet="weights"),
        replace(plain, quiet="weights", score="sigmoid"), replace(plain, quiet="aux"),
        replace(plain, quiet="aux z", score="sigmoid"), replace(plain, k=40, bias=1.0, score="sigmoid"),
        replace(plain, k=40, bias=1.0),
    ]  # fmt: skip
    return cases


def real_cases():
    """Return cases with the real tiles, for numbers of experts that are powers of two and not. They have few tokens."""
    cases = [Case((19, E), min(8, E), aux=0.5, z=0.25, dtype=dtype, path="")
             for E in (1, 2, 60, 96, 128, 160, 256, 384, 1024) for dtype in (FP32, BF16)]  # fmt: skip
    deepseek = Case((11, 256), 8, "sigmoid", groups=(8, 4), scale=2.5, aux=0.1, bias=0.3, path="")
    return [*cases, deepseek, replace(deepseek, shape=(7, 160), groups=(8, 3), k=6), replace(deepseek, dtype=BF16)]
