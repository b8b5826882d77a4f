"""Creates this rank's model, update and steps: fused, or with PyTorch operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onepass.gpt import Config, Model, add_adapters, load_huggingface
from onepass.gpt.lora import adapter_settings, describe_adapters, frozen_digest
from onepass.runtime.errors import CommandError
from onepass.train.embedding_copy import CopiedEmbeddingUpdate
from onepass.train.layout import ParallelLayout
from onepass.train.measured_steps import ComparedSteps, MeasuredSteps
from onepass.train.options import Options
from onepass.train.stages import Stages, check
from onepass.train.steps import GraphedSteps, TrainSteps
from onepass.train.updates import FsdpUpdate, MainGradUpdate, PlainUpdate, Update


@dataclass
class Trained:
    model: nn.Module  # a `Model`, or this rank's `Stages` of one
    update: Update
    steps: TrainSteps
    adapters: dict[str, Any] | None = None  # of a LoRA run: its settings, and the hash of the frozen weights


def make(
    config: Config,
    options: Options,
    layout: ParallelLayout,
    plain: bool = False,
    say: Callable[[str], None] | None = None,
    lenient: bool = False,
) -> Trained:
    """Create what this rank trains. `plain`: the baseline without onepass ops.

    On one rank the baseline has fp32 weights and PyTorch's AdamW, under autocast if the configuration's dtype is narrower. On
    several ranks its model uses PyTorch operators, while gradients and AdamW are onepass's.

    Args:
        say: takes a line for the log.
        lenient: run without a CUDA graph what options.cuda_graphs asks for in vain.
    """
    alone = plain and layout.ranks == 1
    used = config.reference() if plain else config
    autocast = config.dtype if alone and config.dtype != torch.float32 else None
    used = used.replace(params_dtype="fp32") if alone else used
    check(used, options, layout.data.size)
    if layout.pipeline.size > 1:
        return _pipelined(used, options, layout)
    model = _model(used, options, layout)
    adapters = None if options.lora_rank is None else _adapted(model, options, say)
    update = _update(model, options, layout, alone)
    if not plain and _may_have_graphs(used, options, layout, update):
        reason = _why_not_measured(used, update)
        if reason is None:
            measured = MeasuredSteps if layout.ranks == 1 else ComparedSteps
            steps = measured(model, used, options, update, autocast, say=say, group=layout.tensor.group)
            return Trained(model, update, steps, adapters)
        if say is not None:
            say(f"CUDA graph: not tried with {reason}; --cuda-graphs captures one")
    if options.cuda_graphs and not plain and lenient:
        steps = MeasuredSteps(model, used, options, update, autocast, decided=True, group=layout.tensor.group)
        return Trained(model, update, steps, adapters)
    kind = GraphedSteps if options.cuda_graphs and not plain else TrainSteps
    return Trained(model, update, kind(model, used, options, update, autocast), adapters)


def _model(config: Config, options: Options, layout: ParallelLayout) -> Model:
    """Create this rank's model, with the weights of a Hugging Face folder where options name one."""
    if options.load_hf is None:
        return Model(config, tp_group=layout.tensor.group, device=layout.device, seed=options.seed)
    try:
        changes = config.to_dict()
        return load_huggingface(options.load_hf, tp_group=layout.tensor.group, device=layout.device, **changes)[1]
    except (ValueError, FileNotFoundError) as error:
        raise CommandError(f"--load-hf {options.load_hf}: {error}") from None


def _adapted(model: Model, options: Options, say: Callable[[str], None] | None) -> dict[str, Any]:
    """Give the model adapters. Return what a checkpoint of them depends on."""
    assert options.lora_rank is not None
    settings = options.lora_rank, options.lora_alpha, options.lora_modules
    add_adapters(model, *settings, use_rslora=options.lora_use_rslora, seed=options.seed)
    if say is not None:
        say(describe_adapters(model))
    made = adapter_settings(model)
    assert made is not None
    return {**made._asdict(), "modules": list(made.modules), "frozen": frozen_digest(model)}


def _why_not_measured(config: Config, update: Update) -> str | None:
    """Return why the first steps decide nothing about a CUDA graph, where a run that could have one leaves that to its user."""
    if isinstance(update, MainGradUpdate) and update.main_grads.releases:
        return "gradients whose memory is released, which a graph would keep"
    if config.attention_dropout:  # seen on an H200: other last bits by cuDNN, and another kernel where that is off
        return "attention dropout, which PyTorch's attention computes otherwise in a graph"
    return None


def _may_have_graphs(config: Config, options: Options, layout: ParallelLayout, update: Update) -> bool:
    """Whether graphs fit the options, and a run that is told nothing is to decide."""
    return (
        options.cuda_graphs is None
        and layout.device.type == "cuda"
        and isinstance(update, MainGradUpdate)  # not FSDP's
        and not config.cpu_offloading
        and not options.offload_optimizer
    )


def _pipelined(config: Config, options: Options, layout: ParallelLayout) -> Trained:
    from onepass.train.pipeline import PipelinedSteps  # torch.distributed.pipelining takes a second to import

    stages = Stages(config, layout, options.seed)
    update = (CopiedEmbeddingUpdate if config.mtp_num_layers else MainGradUpdate)(stages, options, layout)
    return Trained(stages, update, PipelinedSteps(stages, config, options, layout, update))


def _update(model: Model, options: Options, layout: ParallelLayout, alone: bool) -> Update:
    if alone:
        return PlainUpdate(model, options, layout)
    if options.use_fsdp and layout.data.group is not None:
        return FsdpUpdate(model, options, layout)
    return MainGradUpdate(model, options, layout)
