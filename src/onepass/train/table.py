"""Compares this run with PyTorch operators, and with itself without each fusion.

Each variant runs a few steps from the same initial weights on the same text.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from rich.table import Table

from onepass.gpt import Config, Model
from onepass.parallel import MainGrads
from onepass.profiling.record import profile, run
from onepass.train.batches import Batches
from onepass.train.layout import ParallelLayout
from onepass.train.options import NEEDED_FUSIONS, Options
from onepass.train.setup import make
from onepass.train.updates import learning_rate

_STEPS = 6
_RESTLESS = 1.5  # rounds that differ by this factor mean that the machine is busy
_BYTES = 20  # per parameter: weight, gradient, moments, master


@dataclass
class Side:
    """Measurements of one variant."""

    step_ms: float
    memory_gib: float | None  # peak memory of the GPU
    launches: float  # kernels of a step; operators on a CPU
    losses: list[float]
    loss_mib: float = 0.0  # peak memory of final norm, output layer and loss, in forward and backward
    unrest: float = 1.0  # the longest round's time over the shortest round's


class Variant(NamedTuple):
    """A way to train on a text. `plain`: with PyTorch operators."""

    config: Config
    options: Options
    layout: ParallelLayout
    batches: Batches
    plain: bool = False


Step = Callable[[int, float], torch.Tensor]  # takes its number and the learning rate, and returns the loss


def compare(fused: Variant) -> tuple[Side, Side]:
    """Measure the run as configured, and with PyTorch operators."""
    variants = fused, fused._replace(plain=True)
    ours, theirs = map(_measured, variants)
    if _side_by_side(fused, 2):
        for side, timed in zip((ours, theirs), _in_turns([*map(_stepper, variants)]), strict=True):
            side.step_ms, side.unrest = timed
    return ours, theirs


def _measured(variant: Variant) -> Side:
    layout = variant.layout
    _forget(layout.device)
    step = _stepper(variant)
    losses = [float(layout.average(step(number, learning_rate(number, variant.options)))) for number in range(_STEPS)]
    memory = _memory_gib(layout)
    profiled = profile(step, 0, 0.0, warmup=0, steps=1)
    del step  # free this variant before the memory of its loss is measured
    _forget(layout.device)
    return Side(profiled.wall_us / 1e3, memory, sum(profiled.kernel_names().values()), losses, _loss_mib(variant))


def _stepper(variant: Variant) -> Step:
    config, options, layout, batches, plain = variant
    trained = make(config, options, layout, plain=plain, lenient=True)

    def step(number: int, lr: float) -> torch.Tensor:
        trained.update.set_rate(lr)
        with options.invariance(plain):
            loss, _ = trained.steps.run(batches.of_step(number))
        trained.update.step(lr)
        return loss

    return step


def _side_by_side(variant: Variant, ways: int) -> bool:
    """Whether all variants exist at once, so that their steps can alternate.

    They do on a CPU, where other load would otherwise slow one variant more than another. On a GPU each variant runs alone,
    because its memory is measured.
    """
    return variant.layout.device.type == "cpu" and ways * _BYTES * variant.config.parameters_count() < 1 << 30


def _in_turns(steps: list[Step]) -> list[tuple[float, float]]:
    """Return for each step function the milliseconds of its fastest round, and the ratio of its slowest round to that.

    The first round allocates and compiles, and does not count.
    """
    rounds = [[run(partial(step, 0, 0.0), calls)[0] / 1e3 for step in steps] for calls in (1, 2, 2, 2)]
    return [(min(times), max(times) / min(times)) for times in zip(*rounds[1:], strict=True)]


def _memory_gib(layout: ParallelLayout) -> float | None:
    return torch.cuda.max_memory_allocated(layout.device) / 2**30 if layout.device.type == "cuda" else None


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# ---- each fusion's effect ----

# The fusions that can be switched off, and the settings that must be off (or 0) with them.
_FUSIONS: dict[str, tuple[str, ...]] = {
    "attention_fusion": (),
    "apply_rope_fusion": ("attention_fusion",),
    "norm_linear_fusion": (),
    "norm_fusion": ("norm_linear_fusion", "memory_efficient_layer_norm"),
    "bias_activation_fusion": ("activation_func_fp8_input_store", "cpu_offloading"),
    "bias_dropout_fusion": (),
    "cross_entropy_loss_fusion": ("fp32_logits",),
    "gradient_accumulation_fusion": ("defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
}


@dataclass
class Without:
    """The run with some of its fusions off."""

    flags: list[str]  # as on the command line
    step_ms: float
    memory_gib: float | None
    unrest: float = 1.0  # as in Side


def fusions(config: Config) -> list[list[str]]:
    """Return for each fusion the settings to switch off together. Fusions that are off or without effect are left out."""
    idle = set() if config.hidden_dropout or config.add_bias_linear else {"bias_dropout_fusion"}
    if config.position_embedding_type != "rope":
        idle.add("apply_rope_fusion")
    if (config.qk_layernorm and not config.norms_in_attention) or config.attention_dropout:
        idle.add("attention_fusion")
    asked = [[name, *others] for name, others in _FUSIONS.items() if getattr(config, name) and name not in idle]
    return [[name for name in names if getattr(config, name)] for names in asked]


def each_off(whole: Variant) -> Iterator[Without]:
    """Measure the run as configured, then without each of its fusions, then as configured again.

    The last repeats the first because machines become slower while they are measured.
    """
    flags = {flag.field: flag.off for flag in Config.flags()}
    needed = NEEDED_FUSIONS if whole.options.batch_invariant else ()
    ways = [[], *(names for names in fusions(whole.config) if not set(names) & set(needed)), []]
    for together in [ways] if _side_by_side(whole, len(ways)) else [[way] for way in ways]:
        _forget(whole.layout.device)
        steps = [_stepper(whole._replace(config=without(whole.config, names))) for names in together]
        for names, (step_ms, unrest) in zip(together, _in_turns(steps), strict=True):
            named = [off for name in names if (off := flags[name]) is not None]
            yield Without(named, step_ms, _memory_gib(whole.layout), unrest)
        del steps  # free this variant before the next one's memory is measured


def without(config: Config, names: list[str]) -> Config:
    return config.replace(**{name: type(getattr(config, name))(0) for name in names})


def table_of_fusions(runs: list[Without]) -> Table:
    title = "What each fusion brings: this run without it"
    made = Table("", "time of a step, ms", "difference", title=title, title_justify="left")
    if runs[0].memory_gib is not None:
        made.add_column("peak memory, GiB")
        made.add_column("difference")
    whole = min(runs[0], runs[-1], key=lambda each: each.step_ms)
    for each in [whole, *runs[1:-1]]:
        row = [" ".join(each.flags) or "with all of them", f"{each.step_ms:,.1f}", _than(each.step_ms, whole.step_ms)]
        if each.memory_gib is not None and whole.memory_gib is not None:
            row += [f"{each.memory_gib:,.2f}", _than(each.memory_gib, whole.memory_gib)]
        made.add_row(*row)
    made.caption = _unrest(runs)
    return made


def _than(without: float, whole: float) -> str:
    return f"{without / whole - 1:+.1%}" if without != whole else ""


# ---- the memory of the loss ----


def _loss_mib(variant: Variant) -> float:
    """Return the peak memory of the loss in MiB: one microbatch through a last stage without blocks."""
    config, options, layout, _, plain = variant
    used = config.reference() if plain else config
    used = used.replace(untie_embeddings_and_output_weights=True, defer_embedding_wgrad_compute=False, mtp_num_layers=None)
    device = layout.device
    head = Model(used, tp_group=layout.tensor.group, layers=range(0), first=False, device=device, seed=0)
    head.requires_grad_(options.lora_rank is None)
    shape = options.micro_batch_size, options.seq_length // config.sequence_ranks
    hidden = torch.randn(*shape, config.hidden_size, device=device, dtype=used.dtype, requires_grad=True)
    labels = torch.randint(config.vocab_size, (options.micro_batch_size, options.seq_length), device=device)
    grads = None if plain or options.lora_rank is not None else MainGrads(head)

    def call() -> None:
        if grads is not None:
            grads.zero_()
        head(hidden, labels).backward()
        head.zero_grad()
        hidden.grad = None

    with options.invariance(plain):
        peak = profile(call, warmup=1, steps=1).peak_bytes or 0
    if grads is not None:
        grads.close()
    return peak / 2**20


# ---- the table ----


def table(fused: Side, plain: Side, on_gpu: bool) -> Table:
    title = "This run with onepass, and with PyTorch's operators"
    made = Table("", "onepass", "PyTorch", "difference", title=title, title_justify="left")
    made.add_row("time of a step, ms", f"{fused.step_ms:,.1f}", f"{plain.step_ms:,.1f}", _faster(fused.step_ms, plain.step_ms))
    rows = [("peak memory of the loss, MiB", fused.loss_mib, plain.loss_mib, 1)]
    if fused.memory_gib is not None and plain.memory_gib is not None:
        rows.append(("peak memory of the run, GiB", fused.memory_gib, plain.memory_gib, 2))
    rows.append((f"{'kernels' if on_gpu else 'operators'} in a step", fused.launches, plain.launches, 0))
    for name, ours, theirs, digits in rows:
        made.add_row(name, f"{ours:,.{digits}f}", f"{theirs:,.{digits}f}", _less(ours, theirs))
    apart = max(abs(a - b) for a, b in zip(fused.losses, plain.losses, strict=True))
    steps = len(fused.losses)
    made.add_row(f"loss after {steps} steps", f"{fused.losses[-1]:.4f}", f"{plain.losses[-1]:.4f}", f"at most {apart:.1e}")
    made.caption = _unrest([fused, plain])
    return made


def _unrest(timed: Iterable[Side | Without]) -> str | None:
    most = max(each.unrest for each in timed)
    if most < _RESTLESS:
        return None
    return f"The machine was busy: times of the same step differ by up to {most:.1f} x, and ratios may be as far off."


def _less(ours: float, theirs: float) -> str:
    if not theirs or ours == theirs:
        return "as much" if ours == theirs else "more"
    return f"{abs(ours / theirs - 1):.0%} {'less' if ours < theirs else 'more'}"


def _faster(ours: float, theirs: float) -> str:
    return f"{theirs / ours:.2f} x faster" if theirs >= ours else f"{ours / theirs:.2f} x slower"
