"""What the oracles of ops share: cases that print themselves, memory layouts, small tiles, counters, and the judge of a call.

An oracle's `judge_case` decides whether a module computes a case within the error budget. `module` is the real one, which must
pass every case, or a mutant, which must fail one.
"""

import contextlib
import types
from dataclasses import fields

import torch

from onepass.testing.budget import BudgetReport, Finding, compare, run
from onepass.testing.poison import poisoned, unchanged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
LAYOUTS = ("contiguous", "strided", "sliced", "transposed", "swapped", "expanded", "unaligned")


class NamedCase:
    """A dataclass of this kind prints the fields that are not their defaults: a test's name."""

    def __str__(self):
        said = [f"{f.name}={value}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return "-".join(said).replace("torch.", "") or "plain"


# ---- inputs ----


def laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in another memory layout. "expanded" repeats the first row."""
    if layout == "strided":  # every second element
        return nans(t, (*t.shape, 2))[..., 0].copy_(t)
    if layout == "sliced":  # rows of a wider tensor, from an odd offset
        return nans(t, (*t.shape[:-1], t.shape[-1] + 5))[..., 3 : 3 + t.shape[-1]].copy_(t)
    if layout == "transposed" and t.dim() > 1:  # the last two dimensions
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "swapped" and t.dim() > 2:  # the first two dimensions: whole rows, but not evenly spaced
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "followed" and t.dim() > 2:  # each sequence is followed by a row of NaN
        return nans(t, (*t.shape[:-2], t.shape[-2] + 1, t.shape[-1]))[..., :-1, :].copy_(t)
    if layout == "expanded":
        return t.reshape(-1, t.shape[-1])[0].expand(t.shape)
    if layout == "unaligned":
        return nans(t, (t.numel() + 1,))[1:].view(t.shape).copy_(t)
    return t.contiguous()


def nans(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=t.dtype, device=t.device)


def heads_laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values of heads [..., S, heads, H] in another memory layout.

    "part": a slice of each token's row. "heads first": heads before tokens. Others: as `laid_out`.
    """
    if layout == "part" and t.dim() > 2:
        wide = nans(t, (*t.shape[:-2], t.shape[-2] * t.shape[-1] + 5))
        return wide[..., 3:-2].unflatten(-1, t.shape[-2:]).copy_(t)
    if layout == "heads first" and t.dim() > 2:
        return t.transpose(-2, -3).contiguous().transpose(-2, -3)
    return laid_out(t, layout)


def normals(seed: int | torch.Generator):
    """Return a function that draws normal numbers on the CPU: every machine gets the same values."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return lambda *shape: torch.randn(shape, generator=generator)


# ---- small tiles: there are several of each kind, and the last one is partial ----


@contextlib.contextmanager
def replaced(names, caches=(), **changes):
    """Change a module's globals in the block, and empty caches. mock.patch.dict undoes what a kernel's first launch sets, too."""
    before = {name: names[name] for name in changes}
    names.update(changes)
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        names.update(before)
        for cache in caches:
            cache.cache_clear()


def modules_of(module) -> dict[str, dict]:
    """Return name -> globals of a module and of all onepass modules that it uses. A mutant's can't be imported."""
    found, queue = {}, [vars(module)]
    while queue:
        names = queue.pop()
        if names["__name__"] in found or not names["__name__"].startswith("onepass."):
            continue
        found[names["__name__"]] = names
        for value in names.values():
            value = getattr(value, "jit", value) if type(value).__name__ == "Kernel" else value
            value = value.fn if type(value).__name__ in ("InterpretedFunction", "JITFunction") else value
            value = getattr(value, "__wrapped__", value) if callable(value) and not isinstance(value, type) else value
            queue += [vars(value)] if isinstance(value, types.ModuleType) else []
            queue += [value.__globals__] if isinstance(value, types.FunctionType) else []
    return found


class Counters:
    """Counters that persist from call to call, as on a GPU. `clean` finds one that isn't reset, or a write past the end."""

    def __init__(self):
        self.words, self.taken = torch.full((1 << 14,), 7, dtype=torch.int32, device=DEVICE), 0

    def take(self, count):
        if count > self.taken:
            self.words[self.taken : count] = 0
            self.taken = count
        return self.words[:count]

    def scratch(self, floats, count, device):
        """What a kernel asks of `stream_scratch`."""
        return torch.empty(floats, dtype=torch.float32, device=device), self.take(count)

    def clean(self):
        return not self.words[: self.taken].any() and bool((self.words[self.taken :] == 7).all())


# ---- the judge ----


def broken(what: str, measure: str) -> BudgetReport:
    """The report of a call of which no number counts any more."""
    return BudgetReport([Finding(what, measure, float("nan"), 0.0, 0.0)])


def judge_call(call, formula, draw, dtype, counters=None, few=False) -> BudgetReport:
    """Judge a call against the budget in poisoned memory. Inputs that it must not write, counters and types are checked too.

    `draw` returns inputs and incoming gradients for a seed; outputs of `few` elements are pooled over seeds. `formula` returns
    the results for these and a dtype.
    """
    trials = []
    for seed in range(4 if few else 1):
        inputs, dy = draw(seed)
        dys = {f"dy{i}": t for i, t in enumerate(dy if isinstance(dy, tuple) else (dy,))}
        try:
            with poisoned(), unchanged(**inputs, **dys):
                ours = run(call, inputs, dy)
                assert counters is None or counters.clean(), "a counter was not set back, or one past them was set"
        except AssertionError as error:
            return broken("memory", str(error))
        ys = [t for name, t in ours.items() if name.startswith("y")]
        grads = [(ours[f"d{name}"], t) for name, t in inputs.items() if f"d{name}" in ours]
        typed = [*zip(ys, dys.values(), strict=True), *grads]
        assert all(given is None or found.dtype == given.dtype for found, given in typed), "results of another type"
        trials.append((ours, *(formula(inputs, dy, wide) for wide in (FP32, FP64))))
    return compare(trials, dtype)
