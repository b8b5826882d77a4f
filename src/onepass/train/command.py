"""`onepass train`: read settings from a preset, a file and flags, train, and show text samples and tables."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.text import Text

from onepass.gpt import Config
from onepass.gpt.huggingface import their_config
from onepass.gpt.lora import check_modules
from onepass.runtime.cpu_threads import CpuThreads
from onepass.runtime.errors import CommandError, install_hint
from onepass.runtime.fp8 import unfit_gpu
from onepass.runtime.units import counted
from onepass.train import checkpoint, stages, text
from onepass.train.beginning import Beginning, find_beginning, find_place
from onepass.train.checkpoint.compatibility import facts_of
from onepass.train.disks import describe_disks, find_disks
from onepass.train.flags import add_flag, add_preset, config_of_folder, merge_settings, read_file
from onepass.train.foreign_flags import in_place_of as in_place_of  # the command line asks for it
from onepass.train.layout import (
    ParallelLayout,
    check_agreement,
    device_of_this_rank,
    divided,
    one_line_of_all_ranks,
    ranks_there,
    started,
)
from onepass.train.loop import Diverged, TrainRun
from onepass.train.options import NEEDED_FUSIONS, Options
from onepass.train.precision import describe_precision
from onepass.train.record import Line, draw
from onepass.train.restarts import unmark
from onepass.train.run_lock import PATIENCE_S, locked
from onepass.train.samples import TextSample
from onepass.train.table import Variant, compare, each_off, table, table_of_fusions
from onepass.train.watch import watched

T = TypeVar("T")
_LONGEST_TIMEOUT = 1e6  # minutes
_NEEDED = {name: name for name in ("numpy", "safetensors", "tokenizers", "matplotlib", "tensorboard")} | {"yaml": "PyYAML"}

_INVARIANT = "A token's bits depend on no other sequence (batch_invariant). "
_PERSIST = "persist_layer_norm changes nothing: norms are onepass's, and PyTorch's with --no-norm-fusion. "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a GPT on text files, by default a small one on Python's own library, which takes a CPU two to three minutes. "
        "Each fusion has a flag; at the end tables say what they brought, together and each alone."
    )
    parser.usage = "%(prog)s [OPTION ...]"  # all of them would fill a screen, and stand below
    add_preset(parser)
    parser.add_argument("--run-dir", dest="folder", type=Path, metavar="DIR", help="folder of this run (runs/<time>)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with this run, or from this checkpoint of it")
    parser.add_argument(
        "--resume-if-exists",
        action="store_true",
        help="go on with the run in --run-dir from its newest good checkpoint, or begin one: for commands that are started again",
    )
    parser.add_argument(
        "--distributed-timeout-minutes",
        type=float,
        default=10.0,
        metavar="FLOAT",
        help="how long ranks wait for one another before the run ends (10.0)",
    )
    parser.add_argument("--compare", action="store_true", help="train by PyTorch's operators too, and draw both curves")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="a GPU if there is one")
    for title, all_flags in (("model", Config.flags()), ("training", Options.flags())):
        group = parser.add_argument_group(title)
        for flag in all_flags:
            add_flag(group, flag)


def run(args: argparse.Namespace) -> int:
    with one_line_of_all_ranks():
        try:
            return _run(args)
        except Diverged as diverged:
            raise CommandError(str(diverged), status=1) from None
        except OSError as error:
            if error.strerror is None:
                raise
            raise CommandError(f"{error.filename}: {error.strerror}" if error.filename else error.strerror) from None


def _run(args: argparse.Namespace) -> int:
    _check_packages()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = device_of_this_rank() if args.device != "cpu" else torch.device("cpu")
    if args.device == "cuda" and device.type != "cuda":
        raise CommandError("--device cuda, but there is no GPU that PyTorch sees")
    timeout = timedelta(minutes=_timeout(args))
    with started(device, timeout) as layout, watched(layout, timeout) as watch:
        given = ("resume", "compare", "resume_if_exists", "distributed_timeout_minutes")
        check_agreement({"run_dir": args.folder, **{name: getattr(args, name) for name in given}}, layout)
        place = find_place(args, layout)
        layout = replace(layout, disks=find_disks(place.folder, layout))
        console = Console(
            highlight=False, markup=False, emoji=False, quiet=not layout.first, width=None if sys.stdout.isatty() else 118
        )  # fmt: skip
        patience = PATIENCE_S if place.again else 0
        with locked(place.folder, layout, partial(console.print, soft_wrap=True), patience):
            begin = find_beginning(args, place, layout)
            written = _written(args, begin.resume, layout)
            config, options = _agreed(layout, lambda: merge_settings(args.preset, written, vars(args), device.type == "cuda"))
            _agreed(layout, lambda: _check(config, options, device))
            if begin.resume is not None:
                begin.check(config, layout)
            _settle(options)
            layout = divided(layout, config, options, timeout)
            if watch is not None:
                watch.add(layout)
            return _train(args, config, options, layout, begin, console)


def _timeout(args: argparse.Namespace) -> float:
    minutes = float(args.distributed_timeout_minutes)
    if not 0 < minutes <= _LONGEST_TIMEOUT:
        raise CommandError(f"--distributed-timeout-minutes must be above 0 and at most {_LONGEST_TIMEOUT}, but is {minutes}")
    return minutes


def _agreed(layout: ParallelLayout, act: Callable[[], T]) -> T:
    """Call act on all ranks and return this rank's result. An error that not all ranks have says whose it is."""
    results: list[T] = []

    def attempt() -> tuple[str | None, int]:
        try:
            results.append(act())
        except CommandError as error:
            return str(error), error.status
        return None, 0

    found = layout.on_all(attempt)
    for rank, (failure, status) in enumerate(found):
        if failure is not None:
            raise CommandError(failure if found.count(found[0]) == len(found) else f"{layout.place(rank)}: {failure}", status)
    return results[0]


def _check_packages() -> None:
    import importlib.util

    missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(f"training needs {', '.join(missing)}: {install_hint('train')}")


# ---- settings ----


def _written(args: argparse.Namespace, resume: Path | None, layout: ParallelLayout) -> dict[str, Any] | None:
    """Read the settings of --config. Without it those of --resume are its config.yaml, which not every node may have."""

    def read() -> dict[str, Any] | None:
        own = args.config is None
        if own and args.resume is None:
            return None
        path = checkpoint.run_of(resume) / "config.yaml" if own and resume is not None else args.config
        if own and layout.nodes > 1 and not path.exists():
            return None
        values = read_file(path, pipe=not own and layout.ranks == 1)
        return values if resume is None else checkpoint.renamed(resume, values)

    mine = _agreed(layout, read)
    if args.config is not None or args.resume is None:
        return mine
    values = next((values for values in layout.on_all(lambda: mine) if values is not None), None)
    if values is None:
        raise CommandError(f"--resume {args.resume} must have its run's config.yaml on a node, but has none: give --config")
    return values


def _check(config: Config, options: Options, device: torch.device) -> None:
    """Raise CommandError for missing text files, and for settings of model and training that contradict each other."""
    text.find_files(options.data)
    if options.load_hf is not None:
        _check_folder_model(options.load_hf, config)
    elif config.vocab_size < text.SMALLEST:
        raise CommandError(
            f"--vocab-size must be at least {text.SMALLEST}, the bytes and the end of a text, but is {config.vocab_size}"
        )
    if config.params_dtype == "fp16":
        raise CommandError("params_dtype must be bf16 or fp32 in training, but is fp16, whose small gradients would vanish")
    if options.seq_length > config.max_position_embeddings:
        raise CommandError(
            f"seq_length must be at most max_position_embeddings, {config.max_position_embeddings}, but is {options.seq_length}"
        )
    model = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    data = max(1, ranks_there() // model)
    stages.check(config, options, data)
    if options.use_fsdp and data == 1:
        raise CommandError("use_fsdp must be false with one data-parallel rank, which shares nothing, but is true")
    if options.cuda_graphs and device.type != "cuda":
        raise CommandError("cuda_graphs must be false on a CPU, but is true")
    if options.lora_rank is not None:
        _check_adapters(config, options)
    if config.fp8_format is not None:
        _check_fp8(config, options, device)
    if options.batch_invariant:
        _check_invariant(config)
    _check_memory(config, options, device, data)


def _check_folder_model(folder: str, config: Config) -> None:
    """Raise CommandError where --load-hf's folder has another model than the settings, or no tokenizer that goes with it."""
    theirs, ours = facts_of(config_of_folder(folder)), facts_of(config)
    for name in {**theirs, **ours}:
        if theirs.get(name) != ours.get(name):
            raise CommandError(f"{name} must be {theirs.get(name)!r}, as in --load-hf {folder}, but is {ours.get(name)!r}")
    text.folder_tokenizer(Path(folder), config.vocab_size)


def _check_adapters(config: Config, options: Options) -> None:
    """Raise CommandError for a model that can't have adapters."""
    try:
        check_modules(options.lora_modules, their_config(config)["model_type"], "lora_modules")
    except ValueError as error:
        raise CommandError(f"lora_rank {options.lora_rank}: {error}") from None


def _check_fp8(config: Config, options: Options, device: torch.device) -> None:
    if device.type == "cuda" and (unfit := unfit_gpu(device)) is not None:
        raise CommandError(
            f"fp8_format must be None on this GPU: products in eight bits need compute capability 8.9 or later, but {unfit}"
        )
    if options.pipeline_schedule == "zero-bubble" and config.gradient_accumulation_fusion:
        raise CommandError(
            "pipeline_schedule must not be 'zero-bubble' with fp8_format: weight gradients in eight bits are not put off"
        )


def _check_invariant(config: Config) -> None:
    """Raise CommandError for settings under which a token's bits depend on its batch."""
    dropped, plain = (0.0, "what is dropped depends on a token's place"), (True, "PyTorch's operators promise nothing")
    needs: dict[str, tuple[object, str]] = {"hidden_dropout": dropped, "attention_dropout": dropped}
    needs |= dict.fromkeys(NEEDED_FUSIONS, plain)
    needs |= {"moe_aux_loss_coeff": (0.0, "its gradient depends on which experts all tokens chose")}
    needs |= {"fp8_recipe": ("rowwise", "others are of all rows")} if config.fp8_format is not None else {}
    for name, (needed, why) in needs.items():
        if (value := getattr(config, name)) != needed:
            raise CommandError(f"{name} must be {needed!r} with batch_invariant, as {why}, but is {value!r}")


def _check_memory(config: Config, options: Options, device: torch.device, data: int) -> None:
    """Raise CommandError for sizes that no machine with this one's memory can train: only what surely doesn't fit."""
    model = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    width, sequences = config.dtype.itemsize, stages.sequences(config, options, data)
    hidden = options.micro_batch_size * options.seq_length * config.hidden_size
    needed = {
        ("num_layers", "hidden_size", "vocab_size"): config.parameters_count() * width // model,
        ("micro_batch_size", "seq_length", "hidden_size"): hidden * width // config.tensor_model_parallel_size,
        ("global_batch_size", "micro_batch_size", "seq_length"): sequences * options.seq_length * 8 // data,  # token ids
        ("max_position_embeddings",): config.max_position_embeddings * 8,  # angles
        ("samples", "vocab_size"): options.samples * config.vocab_size * width,  # logits
    }
    there, values = _memory(device), {**config.to_dict(), **options.to_dict()}
    for names, size in needed.items():
        if size > there:
            sizes = ", ".join(f"{name} {values[name]}" for name in names if values[name] is not None)
            raise CommandError(f"{sizes} must fit in this machine's {_gib(there)}, but need at least {_gib(size)}")


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gib(size: int) -> str:
    return f"{size / 2**30:,.0f} GiB" if size >> 30 else f"{size} bytes"


def _settle(options: Options) -> None:
    """Seed PyTorch's random state. With options.deterministic make runs bitwise reproducible."""
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(options.deterministic)
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # takes time, does not change results


# ---- the run ----


def _train(
    args: argparse.Namespace, config: Config, options: Options, layout: ParallelLayout, begin: Beginning, console: Console
) -> int:  # fmt: skip
    folder = begin.folder
    layout.on_each_disk(begin.check_folder)
    begin.mark(layout)
    for said in begin.said:
        console.print(said, soft_wrap=True)
    console.print(_introduction(config, options, layout, folder), soft_wrap=True)
    threads = CpuThreads(partial(console.print, soft_wrap=True)) if layout.device.type == "cpu" else None
    if threads is not None:
        threads.choose()
    run = TrainRun(config, options, layout, folder, console, resume=begin.resume, verified=begin.verified, threads=threads)
    lines = run.train()
    curves = {"onepass": lines}
    if not run.stopped:
        _show_samples(run.samples(), console)
        run.release()
        if args.compare:
            run = _plain(run, folder, console)
            curves["PyTorch"] = run.train()
            run.release()
        if threads is not None and not run.stopped:
            threads.choose()
        if options.table and not run.stopped:
            with _unless_too_large("PyTorch's operators take", "--no-table", console):
                with console.status("measuring this run with onepass and with PyTorch's operators"):
                    fused, plain = compare(_variant(run))
                console.print("", table(fused, plain, layout.device.type == "cuda"), sep="\n")
        if options.fusion_table and not run.stopped:
            with _unless_too_large("A run without one of its fusions takes", "--no-fusion-table", console):
                with console.status("measuring the run without each of its fusions"):
                    runs = list(each_off(_variant(run)))
                console.print("", table_of_fusions(runs), sep="\n")
    _say_where(folder, lines, curves, console, layout)
    unmark(folder, layout)
    return 130 if run.signal == signal.SIGINT else 0


@contextmanager
def _unless_too_large(what: str, flag: str, console: Console) -> Iterator[None]:
    """Say in a line that there is no table where what it compares with does not fit the GPU. The run has ended by then."""
    try:
        yield
    except torch.OutOfMemoryError:
        console.print(f"{what} more memory than there is, so there is no table of it; {flag} does not try.", soft_wrap=True)


def _held_out(lines: list[Line]) -> str:
    losses = [line.eval_loss for line in lines if line.eval_loss is not None]
    return f"; on held-out text it is {losses[-1]:.3f}" if losses else ""


def _introduction(config: Config, options: Options, layout: ParallelLayout, folder: Path) -> str:
    on_gpu = layout.device.type == "cuda"
    device = torch.cuda.get_device_name(layout.device) if on_gpu else f"a CPU with {counted(torch.get_num_threads(), 'thread')}"
    size = stages.sequences(config, options, layout.data.size)
    sizes = f"tensor {layout.tensor.size} x data {layout.data.size} x pipeline {layout.pipeline.size}"
    ranks = f", {layout.ranks} ranks: {sizes}" if layout.ranks > 1 else ""
    precision = f"{said} " if (said := describe_precision(config, layout.device)) else ""
    norms = "" if config.persist_layer_norm or not config.norm_fusion else _PERSIST
    bits = _INVARIANT if options.batch_invariant else ""
    return (
        f"A GPT of {config.parameters_count() / 1e6:,.1f}M parameters in {config.params_dtype} trains for "
        f"{counted(options.train_iters, 'step')} of {size} x {options.seq_length} tokens, on {device}{ranks}. "
        f"{precision}{norms}{bits}{describe_disks(layout)}Its files are in {folder}."
    )


def _show_samples(samples: list[TextSample], console: Console) -> None:
    if samples:
        console.print("\nThe model continues held-out texts. What it wrote begins at |||.", soft_wrap=True)
    for sample in samples:
        console.print(Text.assemble("\n", (f"{sample.prompt}|||", "dim"), sample.written), soft_wrap=True)


def _plain(run: TrainRun, folder: Path, console: Console) -> TrainRun:
    """Return the same run with PyTorch operators, in the subfolder `reference`."""
    other = folder / "reference"
    run.layout.on_each_disk(lambda: other.mkdir(exist_ok=True))
    console.print("\nThe same run with PyTorch's operators:")
    return TrainRun(
        run.config, run.options, run.layout, other, console, tokens=folder / "tokens", plain=True, threads=run.threads
    )


def _variant(run: TrainRun) -> Variant:
    return Variant(run.config, run.options, run.layout, run.batches())


def _say_where(folder: Path, lines: list[Line], curves: dict[str, list[Line]], console: Console, layout: ParallelLayout) -> None:
    if not lines or not layout.first:
        return
    if len(curves) > 1:
        draw(folder / "loss.png", curves)
        ours, theirs = ({line.step: line.loss for line in curve} for curve in curves.values())
        apart = [abs(ours[step] - theirs[step]) for step in ours.keys() & theirs.keys()]  # either may have stopped early
        if apart:
            console.print(f"The two losses are at most {max(apart):.2g} apart.", soft_wrap=True)
    first, last = lines[0], lines[-1]
    files = [name for name in ("log.csv", "loss.png", "samples.txt", "adapter") if (folder / name).exists()]
    console.print(
        f"\nThe loss went from {first.loss:.3f} to {last.loss:.3f} in {last.seconds:.0f} s{_held_out(lines)}. "
        f"{folder} has {', '.join(files)} and the checkpoints",
        soft_wrap=True,
    )
