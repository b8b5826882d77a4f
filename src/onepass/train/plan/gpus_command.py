"""`onepass plan --gpus`: time, memory and the best layouts of a run over many GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from math import log2
from typing import Any

from onepass.gpt import Config
from onepass.gpt.memory import uncounted
from onepass.runtime.errors import CommandError
from onepass.train.flags import NAMES, merge_settings
from onepass.train.memory import OUTSIDE
from onepass.train.options import Options
from onepass.train.plan.block_time import Run
from onepass.train.plan.layouts import DIVISION, GPULayout, Wanted, check_wanted, describe, layouts, runs_by, why_not
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


def run(args: argparse.Namespace, written: Mapping[str, Any] | None) -> int:
    """Plan a run. `written` are the settings of its file."""
    gpus: int = args.gpus
    if gpus < 1:
        raise CommandError(f"--gpus must be at least 1, but is {gpus}")
    settings = _settings(args, written)
    batch = _batch(settings, gpus)
    _check(settings, gpus, batch)
    planned = best_layouts(settings, gpus, batch)
    if not planned:
        raise CommandError(_nothing(settings, gpus, batch))
    growth = grow(settings._replace(wanted=settings.wanted._replace(data=None)), gpus, batch)
    if args.json:
        print(json.dumps(as_json(settings, gpus, batch, planned, growth), indent=1))
        return 0
    best = planned[0]
    print(title(settings, best.layout), "", *layout_lines(planned, settings.run), sep="\n")
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


def _settings(args: argparse.Namespace, written: Mapping[str, Any] | None) -> SearchSettings:
    flags = _flags(args)
    given = {**(written or {}), **flags}
    _check_types(given)
    gpu = gpu_named(args.gpu or "h100")
    for name in _UNEVEN:
        if given.get(name):
            raise CommandError(f"{name} must not be given with --gpus, which tries even stages alone, but is {given[name]}")
    if gpu is None:
        raise CommandError(f"--gpu must be one of {', '.join(GPUS)} with --gpus, whose rates are known, but is {args.gpu}")
    if args.ranks is not None:
        raise CommandError(f"--ranks must not be given with --gpus, which is the number of ranks, but is {args.ranks}")
    free: dict[str, Any] = {"micro_batch_size": 1}  # a preset's own fixes nothing
    recompute: Any = (None, "selective", "full")
    if "recompute_granularity" in given:
        recompute = (given["recompute_granularity"],)
    elif given.get("recompute_num_layers") is not None:
        recompute = ("selective", "full")
        free["recompute_granularity"] = "full"
    file = None if written is None else _of_whole(written)
    line = {name: value for name, value in free.items() if name not in given} | _of_whole(flags)
    whole, options = merge_settings(args.preset, file, line, on_gpu=True)
    if why := uncounted_time(whole, options):
        raise CommandError(f"{why}: its time is not counted")
    if whole.fp8_format is not None and not gpu.product_fp8.value:
        raise CommandError(
            f"fp8_format must be None with --gpu {gpu.name}, as {gpu.product_fp8.source}, but is {whole.fp8_format}"
        )
    wanted = Wanted(
        given.get("tensor_model_parallel_size"), _pipeline(given), args.dp, args.cp, _stages(given, whole),
        given.get("micro_batch_size"), given.get("pipeline_schedule"), _shards(given),
    )  # fmt: skip
    return SearchSettings(Run(whole, options.seq_length, gpu, state_bytes(options)), options, wanted, recompute)


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the command line, those of --tp and --pp under their own names."""
    flags = {name: value for name, value in vars(args).items() if name in NAMES}
    for short, long in _SHORT.items():
        said = getattr(args, short)
        if said is not None and flags.setdefault(long, said) != said:
            raise CommandError(f"--{short} and {long} must be the same, but are {said} and {flags[long]}")
    return flags


def _of_whole(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in DIVISION}


def _check_types(given: Mapping[str, Any]) -> None:
    """Check what of a file is not the whole model's, and so in no configuration."""
    for flag in Config.flags():
        value = given.get(flag.field)
        if flag.field in DIVISION and value is not None and type(value) is not flag.type:
            raise CommandError(f"{flag.field} must be of type {flag.type.__name__}, but is {value!r}")


def _pipeline(given: Mapping[str, Any]) -> int | None:
    """Return the ranks of a pipeline where they are fixed. Some models can have no more than one."""
    ranks: int | None = given.get("pipeline_model_parallel_size")
    for name, fixed, why in (
        ("load_hf", given.get("load_hf") is not None, "a stage doesn't load its part of a folder"),
        ("untie_embeddings_and_output_weights", given.get("untie_embeddings_and_output_weights") is False,
         "the first stage and the last would each have the weight"),
    ):  # fmt: skip
        if fixed and ranks not in (None, 1):
            raise CommandError(f"--pp must be 1 with {name} {given[name]}, as {why}, but is {ranks}")
        if fixed:
            return 1
    return ranks


def _stages(given: Mapping[str, Any], config: Config) -> int | None:
    """Return the stages of a pipeline's rank where they are fixed."""
    number: int | None = given.get("virtual_pipeline_model_parallel_size")
    blocks, ranks = given.get("num_layers_per_virtual_pipeline_stage"), given.get("pipeline_model_parallel_size")
    if blocks is None:
        return number
    if ranks is None:
        raise CommandError(f"--pp must be given with num_layers_per_virtual_pipeline_stage, which is {blocks}")
    try:
        return config.replace(
            untie_embeddings_and_output_weights=True, pipeline_model_parallel_size=ranks,
            virtual_pipeline_model_parallel_size=number, num_layers_per_virtual_pipeline_stage=blocks,
        ).stages_per_rank  # fmt: skip
    except ValueError as error:
        raise CommandError(str(error)) from None


def _shards(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what data-parallel ranks may divide. Both flags may be true, false or free."""
    fsdp, optimizer = given.get("use_fsdp"), given.get("use_distributed_optimizer")
    if fsdp:
        return ("fsdp",)
    first = "nothing" if optimizer is False else "optimizer"
    return (first,) if optimizer or fsdp is False else (first, "fsdp")


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


def _batch(settings: SearchSettings, gpus: int) -> int:
    """Return the sequences of a step.

    By default they have about four million tokens, and each GPU has as many microbatches: a power of two.
    """
    given, micro = settings.options.global_batch_size, settings.wanted.micro or 1
    if given is None:
        each = _TOKENS / settings.run.sequence / gpus / micro
        return gpus * micro * (1 << max(0, round(log2(each))))
    if given < 1:
        raise CommandError(f"global_batch_size must be at least 1, but is {given}")
    return given


def _check(settings: SearchSettings, gpus: int, batch: int) -> None:
    """Raise CommandError if the layout that is wanted is impossible."""
    wanted, config, sequence = settings.wanted, settings.run.config, settings.run.sequence
    if sequence > config.max_position_embeddings:
        raise CommandError(
            f"seq_length must be at most max_position_embeddings, {config.max_position_embeddings}, but is {sequence}"
        )
    if why := check_wanted(wanted, gpus):
        raise CommandError(why)
    if next(layouts(config, wanted, gpus, batch, sequence), None) is not None:
        return
    layout = GPULayout(
        wanted.tensor or 1, wanted.pipeline or 1, wanted.data or 1, wanted.context or 1, wanted.stages or 1, wanted.micro or 1,
        batch, wanted.shards[0], wanted.schedule or ("1f1b" if wanted.stages in (None, 1) else "interleaved"),
    )  # fmt: skip
    if layout.gpus < gpus and wanted.data is None:
        layout = layout._replace(data=gpus // layout.gpus)
    raise CommandError(
        why_not(config, layout, sequence) or f"no layout of {gpus} GPUs divides {batch} sequences and the model evenly"
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
