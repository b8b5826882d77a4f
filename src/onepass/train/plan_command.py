"""`onepass plan`: the GPU memory of a training step, and what to change where it does not fit. It needs no GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from onepass.gpt import Config
from onepass.gpt.memory import recomputed_share
from onepass.runtime.errors import CommandError
from onepass.runtime.units import counted
from onepass.train.flags import add_flag, add_preset, merge_settings, read_file
from onepass.train.foreign_flags import in_place_of as in_place_of  # the command line asks for it
from onepass.train.memory import OUTSIDE, MemoryAt, MemoryPlan, StepMemory, check_counted
from onepass.train.options import Options
from onepass.train.plan import gpus_command
from onepass.train.plan.rates import GPUS

_OPTIONS = (
    "load_hf", "seq_length", "micro_batch_size", "global_batch_size", "release_main_grads", "use_distributed_optimizer",
    "use_fsdp", "optimizer_moments", "step_in_backward", "offload_optimizer", "pipeline_schedule",
)  # fmt: skip
_ALIASES = {"seq_length": ("--seq",)}
_MOMENTS = ("fp32", "bf16", "8bit")  # the larger ones first
_GRANULARITIES = (None, "selective", "full")
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say how much GPU memory a training step takes, for what, and what to change where it does not fit. With --gpus also how "
        "long it takes, by which layout. It takes the flags of `onepass train` that change these, and no GPU."
    )
    parser.usage = "%(prog)s [OPTION ...]"
    add_preset(parser)
    parser.add_argument("--gpu", metavar="NAME", help=f"{', '.join(GPUS)}, or the GiB of a GPU's memory (80; with --gpus h100)")
    parser.add_argument("--ranks", type=int, metavar="INT", help="GPUs of the run (tensor_model_parallel_size)")
    gpus_command.add_arguments(parser)
    memory = parser.add_argument_group("training")
    for flag in Options.flags():
        if flag.field in _OPTIONS:
            add_flag(memory, flag, *_ALIASES.get(flag.field, ()))
    model = parser.add_argument_group("model")
    for flag in Config.flags():
        add_flag(model, flag)


class PlannedRun(NamedTuple):
    """What a plan depends on, except the GPU and the number of ranks."""

    config: Config
    options: Options


class Change(NamedTuple):
    """Settings that lower a step's memory, and what they cost."""

    values: dict[str, Any]
    cost: str = ""

    def apply(self, settings: PlannedRun) -> PlannedRun:
        return PlannedRun._make(each.replace(**{n: v for n, v in self.values.items() if n in each.names()}) for each in settings)

    def __str__(self) -> str:
        flags = {flag.field: flag for kind in (Config, Options) for flag in kind.flags()}
        return " ".join(flags[name].on + ("" if value is True else f" {value}") for name, value in self.values.items())


def run(args: argparse.Namespace) -> int:
    written = None if args.config is None else read_file(args.config, pipe=True)
    if args.gpus is not None:
        return gpus_command.run(args, written)
    config, options = merge_settings(args.preset, written, vars(args), on_gpu=True)
    try:
        args.gpu = _gib(args.gpu)
        ranks = _check(args, config, options)
    except ValueError as error:
        raise CommandError(str(error)) from None
    settings, plan, gpu = PlannedRun(config, options), MemoryPlan(config, ranks), int(args.gpu * _GIB)
    step = plan.of_step(*settings, gpu)
    if args.json:
        print(json.dumps(_json(settings, plan, step, gpu), indent=1))
        return 0
    print(_title(args, settings, plan), "", *table(step, config.num_layers), "", sep="\n")
    print(*_advice(settings, plan, step, gpu), sep="\n")
    return 0


def _gib(given: str | None) -> float:
    """Return a GPU's memory from its name or its GiB."""
    named = None if given is None else gpus_command.gpu_named(given)
    if given is None or named is not None:
        return 80.0 if named is None else named.memory.value / _GIB
    try:
        return float(given)
    except ValueError:
        names = ", ".join(GPUS)
        raise CommandError(f"--gpu must be one of {names}, or a GPU's memory in GiB, such as 80, but is {given!r}") from None


def _check(args: argparse.Namespace, config: Config, options: Options) -> int:
    """Return the number of ranks. Raise CommandError for settings that are not counted or contradict each other."""
    for name in ("tp", "pp", "dp", "cp"):
        if (given := getattr(args, name)) is not None:
            raise CommandError(f"--{name} must not be given without --gpus, whose layout it is part of, but is {given}")
    if why := check_counted(config, options):
        raise CommandError(f"{why}: this is not counted")
    if not 0 < args.gpu < 1 << 20:
        raise CommandError(f"--gpu must be a GPU's memory in GiB, such as 80, but is {args.gpu:g}")
    tensor = config.tensor_model_parallel_size
    ranks: int = tensor if args.ranks is None else args.ranks
    if ranks < 1 or ranks % tensor:
        raise CommandError(f"--ranks must be a multiple of tensor_model_parallel_size, {tensor}, but is {ranks}")
    if options.step_in_backward and ranks > 1:
        raise CommandError(f"step_in_backward must be false on several ranks, {ranks}, but is true")
    if options.seq_length > config.max_position_embeddings:
        raise CommandError(
            f"seq_length must be at most max_position_embeddings, {config.max_position_embeddings}, but is {options.seq_length}"
        )
    return ranks


def _json(settings: PlannedRun, plan: MemoryPlan, step: StepMemory, gpu: int) -> dict[str, Any]:
    """Return a step's memory in bytes, where the loss is made, in backward and in the optimizer's step."""
    found = {name: {**at._asdict(), "total": at.total} for name, at in step._asdict().items()}
    total = {"total": step.total, "outside": OUTSIDE, "gpu": gpu, "fits": step.total + OUTSIDE <= gpu}
    return {"parameters": settings.config.parameters_count(), "ranks": plan.ranks, "memory": found, **total}


# ---- the table ----


def _title(args: argparse.Namespace, settings: PlannedRun, plan: MemoryPlan) -> str:
    config, options = settings
    tensor = config.tensor_model_parallel_size
    layout = f"{plan.ranks} GPUs, tensor {tensor} x data {plan.data}, each" if plan.ranks > 1 else "one GPU"
    return (
        f"{config.parameters_count() / 1e6:,.1f}M parameters in {config.params_dtype}, microbatches of "
        f"{options.micro_batch_size} x {options.seq_length} tokens, on {layout} of {args.gpu:g} GiB"
    )


def table(step: StepMemory, blocks: int) -> list[str]:
    """Return the lines of a step's memory: where the loss is made, in backward, and in the optimizer's step."""
    tensors = dict.fromkeys(name for at in step for name in at.layers)
    each = sum(step.loss.layers.values()) / blocks / _GIB
    rows: dict[str, Callable[[MemoryAt], int]] = {
        "weights": lambda at: at.weights,
        "masters": lambda at: at.masters,
        "moments": lambda at: at.moments,
        "gradients": lambda at: at.gradients,
        f"activations of {counted(blocks, 'block')}, {each:.3g} each": lambda at: sum(at.layers.values()),
        **{f"  {name}": partial(_layers_of, name) for name in tensors},
        "activations of embedding and head": lambda at: at.ends,
        "working memory": lambda at: at.working,
        "together": lambda at: at.total,
    }
    head = f"{'GiB':40}{'loss':>11}{'backward':>11}{'optimizer':>11}"
    lines = [head, *(f"{name:40}{''.join(_cell(of(at)) for at in step)}" for name, of in rows.items())]
    return [f"  {line.rstrip()}" for line in lines]


def _layers_of(name: str, at: MemoryAt) -> int:
    return at.layers.get(name, 0)


def _cell(size: int) -> str:
    return f"{size / _GIB:11.2f}" if size else " " * 11


# ---- what to change ----


def _advice(settings: PlannedRun, plan: MemoryPlan, step: StepMemory, gpu: int) -> Iterator[str]:
    room = gpu - OUTSIDE - step.total
    about = f"beside {OUTSIDE / _GIB:g} GiB for CUDA's context, kernels and the allocator's gaps"
    if room >= 0:
        yield f"It fits, with {room / _GIB:.1f} GiB to spare {about}."
        return
    yield f"It does not fit: {-room / _GIB:.1f} GiB too much, {about}. What to change, the cheapest first:"
    yield ""
    changes = [*_changes(settings, plan)]
    for change in changes:
        yield _line(change, plan.of_step(*change.apply(settings), gpu), gpu)
    blocks = settings.config.num_layers

    def fits(change: Change) -> bool:
        return plan.of_step(*change.apply(settings), gpu).total + OUTSIDE <= gpu

    chosen = _together(changes, blocks, fits)
    yield ""
    if chosen is None:
        yield "All of these together do not fit. What is left are more GPUs: --tensor-model-parallel-size, with --ranks."
    else:
        changed = chosen.apply(settings)
        share = recomputed_share(changed.config, changed.options.seq_length)
        yield "The cheapest that fits:"
        yield _line(chosen._replace(cost=f"{share:.0%} more arithmetic" if share else ""), plan.of_step(*changed, gpu), gpu)


def _line(change: Change, step: StepMemory, gpu: int) -> str:
    fits = "fits" if step.total + OUTSIDE <= gpu else "does not fit"
    return f"  {change!s:44}{step.total / _GIB:9.2f} GiB, {fits}{'; ' * bool(change.cost)}{change.cost}"


def _changes(settings: PlannedRun, plan: MemoryPlan) -> Iterator[Change]:
    """Yield each change by itself, those that cost least first."""
    config, options = settings
    if plan.data > 1 and not options.use_distributed_optimizer:
        yield Change({"use_distributed_optimizer": True}, "the same bytes sent, in two parts")
    if not options.step_in_backward and plan.ranks == 1 and plan.microbatches(options) == 1:
        yield Change({"step_in_backward": True}, "clips by the norm of the step before")
    for moments in _MOMENTS[_MOMENTS.index(options.optimizer_moments) + 1 :]:
        yield Change({"optimizer_moments": moments}, "moments are rounded")
    for granularity in _GRANULARITIES[_GRANULARITIES.index(config.recompute_granularity) + 1 :]:
        share = recomputed_share(config.replace(recompute_granularity=granularity, recompute_num_layers=None), options.seq_length)
        every = {} if config.recompute_num_layers is None else {"recompute_num_layers": config.num_layers}
        yield Change({"recompute_granularity": granularity, **every}, f"{share:.0%} more arithmetic than without")
    size = options.micro_batch_size // 2
    while size:
        yield Change({"micro_batch_size": size}, "smaller products")
        size //= 2
    if not options.offload_optimizer:
        yield Change({"offload_optimizer": True}, "masters and moments cross PCIe in each step")


def _together(changes: Iterable[Change], blocks: int, fits: Callable[[Change], bool]) -> Change | None:
    """Return as many of the changes, in their order, as are needed to fit, without those that later ones made idle. Of blocks no
    more are recomputed than must be."""
    values: dict[str, Any] = {}
    for change in changes:
        values |= change.values
        if fits(Change(values)):
            break
    else:
        return None
    for name in [*values]:
        rest = {other: value for other, value in values.items() if other != name}
        values = rest if fits(Change(rest)) else values
    fewer = (Change(values | {"recompute_num_layers": count}) for count in range(1, blocks) if "recompute_granularity" in values)
    return next(filter(fits, fewer), Change(values))
