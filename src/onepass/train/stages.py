"""Division of a model into pipeline stages, and checks for unsupported settings.

Rank r of p ranks has stage r, or with several stages per rank the stages r, r + p, r + 2 p, .... So the last rank has the last
stage, and the loss.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.gpt import Config, Model
from onepass.runtime.errors import CommandError
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options


class Stages(nn.Module):
    """This rank's stages as one module. Submodules have the names that they have in the whole model.

    A call runs the whole model without gradients: each rank runs its stages, and all get the loss or the logits.
    """

    def __init__(self, config: Config, layout: ParallelLayout, seed: int) -> None:
        super().__init__()
        self.config, self.pipeline = config, layout.pipeline
        self.division = divided(config)
        self.last = len(self.division) - 1
        numbers = range(self.pipeline.rank, self.last + 1, self.pipeline.size)
        self.own = {number: self._made(number, layout, seed) for number in numbers}
        parts = [*self.own.values()]
        self.embedding = self.own[0].embedding if 0 in self.own else None
        self.layers = nn.ModuleDict({n: block for part in parts for n, block in part.layers.items()})
        self.final_layernorm, self.output_layer, self.mtp = parts[-1].final_layernorm, parts[-1].output_layer, parts[-1].mtp

    @property
    def embedding_copy(self) -> nn.Module | None:
        """The last stage's copy of the embedding, for multi-token prediction. It is no submodule: the first stage owns it."""
        return self.own[self.last].embedding if self.last in self.own else None

    def _made(self, number: int, layout: ParallelLayout, seed: int) -> Model:
        return Model(
            self.config,
            tp_group=layout.tensor.group,
            layers=self.division[number],
            first=number == 0,
            last=number == self.last,
            device=layout.device,
            seed=seed,
        )

    @torch.no_grad()
    def forward(self, tokens: Tensor, labels: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the loss if labels are given, else logits, as `Model.forward` does."""
        x = tokens
        for number in range(self.last + 1):
            if number in self.own:
                x = self._received(tokens) if number else tokens
                x = self.own[number](x, labels, cu_seqlens=cu_seqlens)
                if number != self.last:
                    dist.send(x, group=self.pipeline.group, group_dst=(number + 1) % self.pipeline.size)
        shape = () if labels is not None else (*tokens.shape, self.config.vocab_size)
        dtype = torch.float32 if labels is not None else self.config.dtype
        return self.told(x if self.last in self.own else None, shape, dtype, tokens.device)

    def _received(self, tokens: Tensor) -> Tensor:
        x = torch.empty(self.hidden_shape(*tokens.shape), dtype=self.config.dtype, device=tokens.device)
        dist.recv(x, group=self.pipeline.group, group_src=(self.pipeline.rank - 1) % self.pipeline.size)
        return x

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int, int]:
        """Return the shape of hidden states between stages, for sequences of this length."""
        return batch, length // self.config.sequence_ranks, self.config.hidden_size

    def told(self, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Broadcast `value` from the rank of the last stage to all ranks of the pipeline. Other ranks pass None."""
        tensor = torch.empty(shape, dtype=dtype, device=device) if value is None else value.contiguous()
        dist.broadcast(tensor, group=self.pipeline.group, group_src=self.pipeline.size - 1)
        return tensor


def divided(config: Config) -> list[range]:
    """Return the range of blocks of each stage. All stages of a rank have equally many."""
    sizes = [number // config.stages_per_rank for number in _of_ranks(config)] * config.stages_per_rank
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _of_ranks(config: Config) -> list[int]:
    """Return how many blocks each rank has. The first and the last have what is configured; the others share the rest.

    If the division leaves a remainder, the first of these have one more, because the last rank also has the output layer.
    """
    first, last = (
        [] if number is None else [number]
        for number in (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage)
    )
    others, left = config.pipeline_model_parallel_size - len(first + last), config.num_layers - sum(first + last)
    return first + [left // others + (at < left % others) for at in range(others)] + last


def sequences(config: Config, options: Options, data_ranks: int) -> int:
    """Return the sequences of a step on all ranks.

    The default of global_batch_size is one microbatch for each rank of the pipeline, on each data-parallel rank.
    """
    return options.global_batch_size or options.micro_batch_size * data_ranks * config.pipeline_model_parallel_size


def microbatches(config: Config, options: Options, data_ranks: int) -> int:
    """Return the microbatches of a step on one rank."""
    return sequences(config, options, data_ranks) // (options.micro_batch_size * data_ranks)


def check(config: Config, options: Options, data_ranks: int) -> None:
    """Raise CommandError for settings that a pipeline does not support."""
    ranks, schedule = config.pipeline_model_parallel_size, options.pipeline_schedule
    at_once, size = options.micro_batch_size * data_ranks, sequences(config, options, data_ranks)
    if size % at_once:
        raise CommandError(
            f"global_batch_size must be a multiple of micro_batch_size {options.micro_batch_size} x {data_ranks} data-parallel "
            f"ranks, but is {size}"
        )
    several = ranks * config.tensor_model_parallel_size * data_ranks
    if options.step_in_backward and several > 1:
        raise CommandError(f"step_in_backward must be false on several ranks, {several}, but is true")
    if ranks == 1:
        if schedule != "1f1b":
            raise CommandError(
                f"pipeline_schedule must be '1f1b' with pipeline_model_parallel_size 1, where there is no pipeline, "
                f"but is {schedule!r}"
            )
        return
    _check_schedule(config, schedule)
    for name, why in (
        ("use_fsdp", "stages gather gradients in main_grad; use_distributed_optimizer divides the optimizer's state"),
        ("cuda_graphs", "a graph's replay would not wait for other stages"),
    ):
        if getattr(options, name):
            raise CommandError(f"{name} must be false with pipeline_model_parallel_size {ranks}, but is true: {why}")
    for name, why in (("load_hf", "a stage doesn't load its part of a folder"), ("lora_rank", "adapters are a whole model's")):
        if (value := getattr(options, name)) is not None:
            raise CommandError(f"{name} must be None with pipeline_model_parallel_size {ranks}, but is {value!r}: {why}")
    _check_microbatches(config, options, data_ranks)


def _check_schedule(config: Config, schedule: str) -> None:
    ranks, each = config.pipeline_model_parallel_size, config.num_layers_per_virtual_pipeline_stage
    name, value = "virtual_pipeline_model_parallel_size", config.virtual_pipeline_model_parallel_size
    if each is not None:
        name, value = "num_layers_per_virtual_pipeline_stage", each
    several = config.stages_per_rank > 1
    if schedule == "1f1b" and several:
        raise CommandError(
            f"{name} must be None with pipeline_schedule '1f1b', for which a rank has one stage, but is {value}: "
            "'interleaved' and 'zero-bubble' take several"
        )
    if schedule == "interleaved" and not several:
        raise CommandError(
            f"{name} must be given with pipeline_schedule 'interleaved', and leave each of {ranks} ranks several stages of "
            f"num_layers {config.num_layers}, but is {value}"
        )


def _check_microbatches(config: Config, options: Options, data_ranks: int) -> None:
    ranks, at_once = config.pipeline_model_parallel_size, options.micro_batch_size * data_ranks
    number = microbatches(config, options, data_ranks)
    size = f"but is {options.global_batch_size}: that is {number} of {at_once} sequences, micro_batch_size x data-parallel ranks"
    if number < ranks:
        raise CommandError(
            f"global_batch_size must have at least {ranks} microbatches with pipeline_model_parallel_size {ranks}, {size}"
        )
    rounds = number // ranks
    if options.pipeline_schedule != "1f1b" and number % rounds:
        raise CommandError(
            f"global_batch_size must have a multiple of {rounds} microbatches with pipeline_schedule "
            f"{options.pipeline_schedule!r}, which runs them in so many rounds on {ranks} ranks, {size}"
        )
