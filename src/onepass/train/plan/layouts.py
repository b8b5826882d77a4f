"""Layouts of a run over GPUs: how many of them share what, which are possible, and who can run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onepass.gpt import Config
from onepass.runtime.units import listed
from onepass.train.options import Options
from onepass.train.plan.schedule import Pipeline
from onepass.train.stages import sequences

DIVISION = (
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "defer_embedding_wgrad_compute", "wgrad_deferral_limit",
)  # fmt: skip
NODE = 8  # GPUs that NVLink connects


class GPULayout(NamedTuple):
    """How a step is divided.

    tensor, pipeline, data, context: ranks of each kind. Together they are the GPUs.
    stages: of a pipeline's rank (interleaved where there are several).
    micro: sequences of a microbatch. batch: sequences of a step on all ranks.
    shard: what data-parallel ranks divide: nothing, the "optimizer" (ZeRO-1), or all by "fsdp".
    schedule: of the pipeline.
    last: blocks of the last pipeline rank, where it has fewer than the others.
    deferred: microbatches whose head makes its weight's gradient in the flush; 0 is all of them.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    stages: int = 1
    micro: int = 1
    batch: int = 1
    shard: str = "optimizer"
    schedule: str = "1f1b"
    last: int | None = None
    deferred: int | None = None

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def microbatches(self) -> int:
        """Of a step on one rank."""
        return self.batch // (self.data * self.micro)

    @property
    def replicas(self) -> int:
        """Ranks that have the same weights."""
        return self.data * self.context


def why_not(config: Config, layout: GPULayout, sequence: int) -> str | None:
    """Return why a model can't be divided so, or None."""
    if layout.tensor > NODE:
        return f"tp must be at most {NODE}, the GPUs of a node, but is {layout.tensor}"
    multiples = {
        "num_attention_heads": (config.num_attention_heads, "tp", layout.tensor),
        "num_query_groups": (config.query_groups, "tp", layout.tensor),
        "ffn_hidden_size": (config.ffn_size, "tp", layout.tensor),
        "seq_length": (sequence, "2 x tp x cp", 2 * layout.tensor * layout.context if layout.context > 1 else layout.tensor),
        "global_batch_size": (layout.batch, "dp x micro_batch_size", layout.data * layout.micro),
    }
    for name, (size, what, parts) in multiples.items():
        if size % parts:
            return f"{name} must be a multiple of {what}, {parts}, but is {size}"
    places = layout.pipeline * layout.stages
    if config.num_layers < places:
        return f"pp x stages must be at most num_layers, {config.num_layers}, but is {places}"
    if layout.shard == "fsdp" and layout.replicas == 1:
        return "dp must be above 1 with FSDP, as one rank shares nothing, but is 1"
    return _why_no_schedule(config, layout) if layout.pipeline > 1 else _why_no_pipeline(layout)


def _why_no_pipeline(layout: GPULayout) -> str | None:
    if layout.stages > 1:
        return f"pp must be above 1 with {layout.stages} stages a rank, but is 1"
    if layout.schedule != "1f1b":
        return f"pp must be above 1 with pipeline_schedule {layout.schedule!r}, but is 1"
    return None


def _why_no_schedule(config: Config, layout: GPULayout) -> str | None:
    """Return why a pipeline can't run a layout's schedule, or None: what `onepass.train.stages.check` refuses."""
    ranks, schedule, number = layout.pipeline, layout.schedule, layout.microbatches
    if layout.shard == "fsdp":
        return f"pp must be 1 with FSDP, whose gathers each microbatch would repeat, but is {ranks}"
    if schedule == "1f1b" and layout.stages > 1:
        return f"stages of a rank must be 1 with pipeline_schedule '1f1b', but are {layout.stages}"
    if schedule == "interleaved" and layout.stages == 1:
        return "stages of a rank must be above 1 with pipeline_schedule 'interleaved', but are 1"
    if schedule == "zero-bubble" and config.fp8_format is not None:
        return "pipeline_schedule must not be 'zero-bubble' with fp8_format: weight gradients in eight bits are not put off"
    if number < ranks:
        return f"microbatches must be at least pp, {ranks}, but are {number}: global_batch_size / (dp x micro_batch_size)"
    if schedule != "1f1b" and number % (rounds := number // ranks):
        return f"microbatches must be a multiple of {rounds}, the rounds that pp {ranks} runs them in, but are {number}"
    if layout.stages > 1 and config.num_layers % (places := ranks * layout.stages):
        return f"num_layers must be a multiple of pp x stages, {places}, but is {config.num_layers}"
    return None


def runs_by(layout: GPULayout) -> str:
    """Say which trainers have the layout."""
    if layout.context > 1:
        return "Megatron, torchtitan" if layout.shard != "fsdp" else "torchtitan"
    return "onepass train"


def pipeline_of(layout: GPULayout, send: float = 0.0, in_step: bool = True) -> Pipeline:
    """Return how a layout's stages run. `in_step`: as torch runs several of a rank, not as Megatron does."""
    several = layout.schedule != "1f1b"
    return Pipeline(layout.pipeline, layout.microbatches, layout.schedule == "zero-bubble", several and in_step, send)


def blocks_of(config: Config, layout: GPULayout) -> list[int]:
    """Return the blocks of each stage. What doesn't divide evenly is left to the first ones, as the last one has the head."""
    places = layout.pipeline * layout.stages
    if layout.last is None:
        each, left = divmod(config.num_layers, places)
        return [each + (at < left) for at in range(places)]
    each, left = divmod(config.num_layers - layout.last, layout.pipeline - 1)
    ranks = [each + (at < left) for at in range(layout.pipeline - 1)] + [layout.last]
    return [blocks // layout.stages for blocks in ranks] * layout.stages


def layout_of(config: Config, options: Options, gpus: int) -> GPULayout:
    """Return the layout that a run's settings have on so many GPUs."""
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    data = gpus // (tensor * pipeline)
    shard = "fsdp" if options.use_fsdp else "optimizer" if options.use_distributed_optimizer else "nothing"
    return GPULayout(
        tensor, pipeline, data, 1, config.stages_per_rank, options.micro_batch_size, sequences(config, options, data), shard,
        options.pipeline_schedule, config.num_layers_in_last_pipeline_stage,
        config.wgrad_deferral_limit if config.defer_embedding_wgrad_compute else None,
    )  # fmt: skip


def undivided(config: Config) -> Config:
    """Return the configuration of a whole model."""
    return config.replace(**{name: getattr(Config, name) for name in DIVISION})


def parameters_count(config: Config, layout: GPULayout) -> int:
    """Return a whole model's parameters. In a pipeline embedding and output layer are in different stages, and not tied."""
    return (config.replace(untie_embeddings_and_output_weights=True) if layout.pipeline > 1 else config).parameters_count()


class Wanted(NamedTuple):
    """What a user has fixed of a layout; None is free. `shards` are those that are left."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    context: int | None = None
    stages: int | None = None
    micro: int | None = None
    schedule: str | None = None
    shards: tuple[str, ...] = ("optimizer", "fsdp")


_NAMES = {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp"}
_MICRO = 1, 2, 4
_STAGES = 1, 2, 4, 5, 8, 10


def check_wanted(wanted: Wanted, gpus: int) -> str | None:
    """Return why what is wanted can't be had on so many GPUs, or None."""
    fixed = {short: getattr(wanted, name) for name, short in _NAMES.items() if getattr(wanted, name) is not None}
    for name, size in fixed.items():
        if size < 1:
            return f"--{name} must be at least 1, but is {size}"
    if wanted.stages is not None and wanted.stages < 1:
        return f"virtual_pipeline_model_parallel_size must be at least 1, but is {wanted.stages}"
    together = 1
    for size in fixed.values():
        together *= size
    said = " x ".join(f"{name} {size}" for name, size in fixed.items())
    if len(fixed) == len(_NAMES) and together != gpus:
        return f"{said} must be --gpus, {gpus}, together, but are {together}"
    if gpus % together:
        return f"--gpus must be a multiple of {said}{f', {together}' if len(fixed) > 1 else ''}, but is {gpus}"
    return None


def layouts(config: Config, wanted: Wanted, gpus: int, batch: int, sequence: int) -> Iterator[GPULayout]:
    """Yield the possible layouts of so many GPUs. Context parallelism is only tried where it is wanted."""
    for tensor in _free(wanted.tensor, _divisors(min(gpus, NODE))):
        for context in _free(wanted.context, [1]):
            for pipeline in _free(wanted.pipeline, _divisors(gpus)):
                if gpus % (tensor * context * pipeline):
                    continue
                data = gpus // (tensor * context * pipeline)
                if wanted.data not in (None, data):
                    continue
                for micro in _free(wanted.micro, _MICRO):
                    yield from _of_ranks(config, wanted, GPULayout(tensor, pipeline, data, context, 1, micro, batch), sequence)


def _of_ranks(config: Config, wanted: Wanted, layout: GPULayout, sequence: int) -> Iterator[GPULayout]:
    """Yield a layout with each way to run its pipeline and to divide what data-parallel ranks have alike."""
    for shard in wanted.shards if layout.data > 1 or len(wanted.shards) == 1 else ["nothing"]:
        for stages in _free(wanted.stages, _STAGES if layout.pipeline > 1 else [1]):
            default = "interleaved" if stages > 1 else "1f1b"
            made = layout._replace(shard=shard, stages=stages, schedule=wanted.schedule or default)
            if why_not(config, made, sequence) is None:
                yield made


def _free(fixed: object, choices: object) -> list:  # type: ignore[type-arg]
    return [fixed] if fixed is not None else list(choices)  # type: ignore[call-overload]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def describe(layout: GPULayout) -> str:
    """Return a layout in a few words: tp 8, pp 4 x 2, dp 16."""
    stages = f" x {layout.stages}" if layout.stages > 1 else ""
    parts = [f"tp {layout.tensor}", f"pp {layout.pipeline}{stages}", f"cp {layout.context}", f"dp {layout.data}"]
    said = [part for part in parts if not part.endswith(" 1")]
    return listed(said) or "one GPU"
