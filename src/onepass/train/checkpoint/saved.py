"""Save and load weights and optimizer state, on all ranks together."""

from __future__ import annotations

import errno
import math
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onepass.gpt import Config
from onepass.runtime.errors import CommandError
from onepass.train.checkpoint import folders, nodes, parts, scales
from onepass.train.checkpoint.compatibility import (
    check_compatible,
    check_recipe,
    check_same_adapters,
    facts_of,
    scales_there,
)
from onepass.train.files import write_atomically
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options
from onepass.train.updates import MainGradUpdate

if TYPE_CHECKING:
    from onepass.train.setup import Trained

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BYTES_A_PARAMETER = 12  # the weight and two moments


def save(
    folder: Path, step: int, trained: Trained, config: Config, options: Options, layout: ParallelLayout, *,
    vocabulary: str | None = None,
) -> None:  # fmt: skip
    """Save a checkpoint of `step` steps in `folder`, and remove older ones there. It is written completely or not at all.

    Args:
        vocabulary: the hash of the tokenizer's vocabulary, `onepass.train.text.Tokens.vocabulary`, for `check_vocabulary`.
    """
    from onepass.train.checkpoint import storage  # slow to import

    try:
        number = 1 + max(layout.on_each_disk(lambda: folders.newest_number(folder)))
        facts = layout.on_first(lambda: _facts(step, number, trained, config, options, vocabulary))
        facts |= {"nodes": {storage.file_of_rank(rank): host for rank, host in enumerate(layout.hosts)}} if layout.disks else {}
        part = folder / layout.on_each_disk(lambda: folders.begin(folder, step).name)[0]
        of_scales = [*scales.scale_chunks(trained.model)]
        with parts.chunks(trained.model, trained.update, layout) as chunks:
            own = [chunk for chunk in [*chunks, *of_scales] if not chunk.alike or layout.tensor.rank == 0]
            storage.write(part, own, facts, layout.rank, layout.ranks == 1)
        if layout.disks:
            index = layout.on_first(lambda: (part / folders.INDEX).read_bytes())
            layout.on_each_disk(lambda: write_atomically(part / folders.INDEX, index))
        layout.on_each_disk(lambda: folders.finish(part))
        layout.on_each_disk(lambda: folders.keep(folder, options.keep_checkpoints))  # others stay until all have this one
    except OSError as error:
        if layout.rank == layout.sharers[0]:
            shutil.rmtree(folder / f"step-{step:08}.part", ignore_errors=True)
        raise CommandError(_unwritten(folder, step, trained, config, error)) from None


def _facts(
    step: int, number: int, trained: Trained, config: Config, options: Options, vocabulary: str | None
) -> dict[str, Any]:  # fmt: skip
    return {
        "format": folders.FORMAT,
        "step": step,
        "number": number,
        "id": uuid.uuid4().hex,
        "vocabulary": vocabulary,
        "model": facts_of(config),
        "config": config.to_dict(),
        "options": options.to_dict(),
        "lora": trained.adapters,
        "last_norm": _last_norm(trained),
    }


def _last_norm(trained: Trained) -> float | None:
    """Return the norm by which the next step clips, where it steps in backward."""
    steps = trained.update.optimizer.backward_steps if isinstance(trained.update, MainGradUpdate) else None
    norm = None if steps is None or steps.last.norm is None else float(steps.last.norm)
    return norm if norm is not None and math.isfinite(norm) else None  # by another nothing is clipped


def _unwritten(folder: Path, step: int, trained: Trained, config: Config, error: OSError) -> str:
    if error.errno not in _FULL:
        return f"the checkpoint of step {step} can't be written to {folder}: {error.strerror}"
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    stepped = config.parameters_count()
    if trained.adapters is not None:
        stepped = sum(each.numel() for each in trained.model.parameters() if each.requires_grad)
    needed, free = stepped * _BYTES_A_PARAMETER, shutil.disk_usage(there).free
    return (
        f"the checkpoint of step {step} needs {_size(needed)} in {folder}, where {_size(free)} are free: {error.strerror}; "
        "those before it are as they were"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def check(path: Path, config: Config) -> dict[str, Any]:
    """Return the checkpoint's index. Raise CommandError if it is of another model."""
    index = folders.read_index_or_advise(path)
    check_compatible(path, index["model"], config)
    check_recipe(path, index.get("config"), config)
    return index


def renamed(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a resumed run's settings under today's names. Before there was norm_fusion, persist_layer_norm had its meaning."""
    if settings.get("persist_layer_norm") is not False or "norm_fusion" in settings:
        return settings
    saved = folders.read_index_or_advise(path).get("config")
    return settings if isinstance(saved, dict) and "norm_fusion" in saved else settings | {"norm_fusion": False}


def describe_scales(path: Path, config: Config) -> str | None:
    """Return what a run in eight bits says of a checkpoint that doesn't have all of its scales, or None."""
    return scales_there(folders.read_index(path)["tensors"], config)


def check_vocabulary(path: Path, vocabulary: str) -> None:
    """Raise CommandError if the checkpoint is of a model that was trained on another tokenizer's tokens."""
    if folders.read_index(path).get("vocabulary") not in (None, vocabulary):  # versions before checksums saved none
        raise CommandError(
            f"the checkpoint {path} must be of this run's tokenizer, but is of another, on whose tokens it was trained: "
            "give --data the texts of its run, or begin a new run"
        )


def load(path: Path, trained: Trained, config: Config, layout: ParallelLayout, *, verify: bool = True) -> int:
    """Load a checkpoint of the same model, saved under any layout. Return the step to continue from.

    Args:
        verify: compare the files with their checksums before anything is changed.
    """
    from onepass.train.checkpoint import storage

    index = layout.agree(lambda: check(path, config))
    check_same_adapters(path, index.get("lora"), trained.adapters)
    try:
        loaded = scales.LoadedScales(trained.model, index["tensors"])
        with parts.chunks(trained.model, trained.update, layout, write=True) as chunks:
            own = [*chunks, *loaded.chunks]
            if layout.nodes > 1:
                nodes.fetch(path, layout.agree(lambda: storage.files_needed(path, own, index)), index, layout)
            if verify:
                nodes.verify_on_nodes(path, index, layout)
            storage.read(path, own, index, layout.ranks == 1)
    except (OSError, folders.Damaged) as error:
        why = error.strerror if isinstance(error, OSError) else error
        better = layout.on_first(lambda: folders.advice(path))
        raise CommandError(f"the checkpoint {path} is damaged: {why}{better}") from None
    step = int(index["step"])
    parts.set_step(trained.update, step)
    if isinstance(trained.update, MainGradUpdate):
        trained.update.publish()
        if (steps := trained.update.optimizer.backward_steps) is not None and index.get("last_norm") is not None:
            steps.last.norm = torch.tensor(index["last_norm"], device=layout.device)
    loaded.put()
    return step
