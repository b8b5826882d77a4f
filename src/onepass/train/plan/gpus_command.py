"""`onepass plan --gpus`: time, memory and the best layouts of a run over many GPUs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from onepass.gpt import Config
from onepass.gpt.memory import uncounted
from onepass.runtime.errors import CommandError
from onepass.train.memory import OUTSIDE
from onepass.train.options import Options
from onepass.train.plan.block_time import Run
from onepass.train.plan.layouts import GPULayout, Wanted, check_wanted, describe, layouts, runs_by, undivided, why_not
from onepass.train.plan.rates import GPUS, GPURates, state_bytes
from onepass.train.plan.search import SearchSettings, best_layouts, smallest
from onepass.train.plan.table import as_json, grow, growth_lines, layout_lines, memory_line, part_lines, rate_lines, title

_GIB = 1 << 30
_TOKENS = 1 << 22  # of a step on all GPUs, where no number of sequences is given
_UNEVEN = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "defer_embedding_wgrad_compute"
_SHORT = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("many GPUs")
    group.add_argument("--gpus", type=int, metavar="INT", help="GPUs of the run: plan its time and its layout too")
    for short, what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"), ("cp", "context")):
        group.add_argument(f"--{short}", type=int, metavar="INT", help=f"{what}-parallel ranks; what plans best")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def gpu_named(name: str) -> GPURates | None:
    return GPUS.get(name.lower())


def run(args: argparse.Namespace, config: Config, options: Options) -> int:
    settings = _settings(args, config, options)
    batch = _batch(args, options, settings)
    gpus: int = args.gpus
    _check(args, settings, batch)
    planned = best_layouts(settings, gpus, batch)
    if not planned:
        raise CommandError(_nothing(settings, gpus, batch))
    growth = grow(settings._replace(wanted=settings.wanted._replace(data=None)), gpus, batch)
    if args.json:
        print(json.dumps(as_json(settings, gpus, batch, planned, growth), indent=1))
        return 0
    best = planned[0]
    print(title(settings, gpus, batch), "", *layout_lines(planned, settings.run), sep="\n")
    if any(runs_by(each.layout) != "onepass train" for each in planned):
        print(f"  * not by onepass train, which has no context parallelism, but by {runs_by(best.layout)}")
    print(
        "",
        f"A step of {describe(best.layout)}, on the rank that is done last:",
        "",
        *part_lines(best),
        memory_line(best),
        sep="\n",
    )
    print("", "The best layouts of fewer and of more GPUs:", "", *growth_lines(growth, settings.run), sep="\n")
    print("", "Rates:", "", *rate_lines(settings.run.gpu), sep="\n")
    return 0


def _settings(args: argparse.Namespace, config: Config, options: Options) -> SearchSettings:
    gpu = gpu_named(args.gpu or "h100")
    for name in _UNEVEN:
        if getattr(config, name):
            raise CommandError(
                f"{name} must not be given with --gpus, which tries even stages alone, but is {getattr(config, name)}"
            )
    if gpu is None:
        raise CommandError(f"--gpu must be one of {', '.join(GPUS)} with --gpus, whose rates are known, but is {args.gpu}")
    if args.ranks is not None:
        raise CommandError(f"--ranks must not be given with --gpus, which is the number of ranks, but is {args.ranks}")
    whole = undivided(config)
    if why := uncounted_time(whole, options):
        raise CommandError(f"{why}: its time is not counted")
    if whole.fp8_format is not None and not gpu.product_fp8.value:
        raise CommandError(
            f"fp8_format must be None with --gpu {gpu.name}, as {gpu.product_fp8.source}, but is {whole.fp8_format}"
        )
    given = vars(args)
    wanted = {short: _one_of(given, short, long) for short, long in _SHORT.items()}
    shard = next(
        (name for name, flag in (("fsdp", "use_fsdp"), ("optimizer", "use_distributed_optimizer")) if given.get(flag)), None
    )
    stages = config.stages_per_rank if config.stages_per_rank > 1 else None
    recompute: Any = (given["recompute_granularity"],) if "recompute_granularity" in given else (None, "selective", "full")
    return SearchSettings(
        Run(whole, options.seq_length, gpu, state_bytes(options)),
        options,
        Wanted(
            wanted["tp"], wanted["pp"], args.dp, args.cp, stages, given.get("micro_batch_size"), shard,
            given.get("pipeline_schedule"),
        ),
        recompute,
    )  # fmt: skip


def _one_of(given: dict[str, Any], short: str, long: str) -> int | None:
    """Return the number of ranks, which two flags may say."""
    said = {given[name] for name in (short, long) if given.get(name) is not None}
    if len(said) > 1:
        raise CommandError(f"--{short} and {long} must be the same, but are {given[short]} and {given[long]}")
    return said.pop() if said else None


def uncounted_time(config: Config, options: Options) -> str | None:
    """Return why a run's time is not counted, or None."""
    wanted: dict[str, Any] = {"num_moe_experts": None, "activation_func_fp8_input_store": False, "params_dtype": "bf16"}
    found = [*uncounted(config)]
    found += [
        f"{name} must be {value}, but is {getattr(config, name)}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    more = {"offload_optimizer": False, "step_in_backward": False, "lora_rank": None, "cuda_graphs": None}
    found += [
        f"{name} must be {value}, but is {getattr(options, name)}"
        for name, value in more.items()
        if getattr(options, name) != value
    ]
    return next(iter(found), None)


def _batch(args: argparse.Namespace, options: Options, settings: SearchSettings) -> int:
    """Return the sequences of a step: by default those of four million tokens, and one microbatch for each GPU at least."""
    if options.global_batch_size is not None:
        return options.global_batch_size
    return max(_TOKENS // options.seq_length, args.gpus or 1)


def _check(args: argparse.Namespace, settings: SearchSettings, batch: int) -> None:
    """Raise CommandError if the layout that is wanted is impossible."""
    wanted, config, sequence = settings.wanted, settings.run.config, settings.run.sequence
    if args.gpus < 1:
        raise CommandError(f"--gpus must be at least 1, but is {args.gpus}")
    if sequence > config.max_position_embeddings:
        raise CommandError(
            f"seq_length must be at most max_position_embeddings, {config.max_position_embeddings}, but is {sequence}"
        )
    if why := check_wanted(wanted, args.gpus):
        raise CommandError(why)
    if next(layouts(config, wanted, args.gpus, batch, sequence), None) is not None:
        return
    layout = GPULayout(
        wanted.tensor or 1, wanted.pipeline or 1, wanted.data or 1, wanted.context or 1, wanted.stages or 1, wanted.micro or 1,
        batch, wanted.shard or "optimizer", wanted.schedule or "1f1b",
    )  # fmt: skip
    if layout.gpus < args.gpus and wanted.data is None:
        layout = layout._replace(data=args.gpus // layout.gpus)
    raise CommandError(
        why_not(config, layout, sequence) or f"no layout of {args.gpus} GPUs divides {batch} sequences and the model evenly"
    )


def _nothing(settings: SearchSettings, gpus: int, batch: int) -> str:
    room, found = settings.run.gpu.memory.value, smallest(settings, gpus, batch)
    assert found is not None  # _check has found a layout
    layout, memory = found
    least = (memory.total + OUTSIDE) / _GIB
    return (
        f"the model doesn't fit {gpus} {settings.run.gpu.name}: {describe(layout)} takes the least, {least:.1f} GiB of a GPU's "
        f"{room / _GIB:.1f}; it needs more GPUs, or --optimizer-moments 8bit"
    )
