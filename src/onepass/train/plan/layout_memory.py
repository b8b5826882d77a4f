"""The GPU memory of a layout's fullest rank, by arithmetic. `onepass.train.memory` counts one GPU in more detail."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from onepass.gpt import Config
from onepass.gpt.memory import block_memory, ends_bytes, stream_bytes
from onepass.train.memory import CUBLAS, MOMENT_BYTES
from onepass.train.options import Options
from onepass.train.plan.head import head_plan
from onepass.train.plan.layouts import GPULayout, blocks_of, pipeline_of

_BF16, _FP32 = 2, 4


class Parameters(NamedTuple):
    """Parameters of a part of the model on one rank, with its whole share of what tensor-parallel ranks divide."""

    blocks: float
    embedding: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


def parameters(config: Config, layout: GPULayout) -> list[Parameters]:
    """Return the parameters of each stage, on one rank."""
    block = block_parameters(config) / layout.tensor
    table = config.vocab_size * config.hidden_size / layout.tensor
    stages = [Parameters(blocks * block) for blocks in blocks_of(config, layout)]
    positions = config.max_position_embeddings * config.hidden_size
    stages[0] = stages[0]._replace(embedding=table + positions * (config.position_embedding_type == "learned_absolute"))
    return stages if config.tied and layout.pipeline == 1 else [*stages[:-1], stages[-1]._replace(head=table)]


@lru_cache(64)
def without_recomputation(config: Config) -> Config:
    return config.replace(recompute_granularity=None, recompute_num_layers=None)


@lru_cache(64)
def block_parameters(config: Config) -> int:
    one, two = (config.replace(num_layers=layers, recompute_num_layers=None) for layers in (1, 2))
    return two.parameters_count() - one.parameters_count()


class RankMemory(NamedTuple):
    """Bytes of one rank at its most."""

    weights: float
    state: float  # masters and moments
    gradients: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        return sum(self)


def layout_memory(config: Config, options: Options, layout: GPULayout, gpu: int) -> RankMemory:
    """Return the memory of the fullest rank."""
    stages = parameters(config, layout)
    ranks = range(layout.pipeline) if layout.pipeline <= 2 else (0, 1, layout.pipeline - 1)
    return max((_rank(config, options, layout, stages, rank, gpu) for rank in ranks), key=lambda memory: memory.total)


def _rank(config: Config, options: Options, layout: GPULayout, stages: list[Parameters], rank: int, gpu: int) -> RankMemory:
    own = [stages[number] for number in range(rank, len(stages), layout.pipeline)]
    count = sum(part.total for part in own)
    rows = layout.micro * options.seq_length // layout.context
    moments = MOMENT_BYTES[options.optimizer_moments]
    kept, busy, ends, head, stream = _microbatch(config, layout.tensor, rows, gpu)
    if config.recompute_num_layers is not None:  # of each stage
        mine = blocks_of(config, layout)[rank :: layout.pipeline]
        share = sum(min(config.recompute_num_layers, blocks) for blocks in mine) / sum(mine)
        kept = share * kept + (1 - share) * _microbatch(without_recomputation(config), layout.tensor, rows, gpu)[0]
    last = rank == layout.pipeline - 1
    activations = kept * _held_blocks(config, layout, rank) + (ends if last else 0)
    most = max(busy, head) if last else busy
    if layout.pipeline > 1:  # what has come and waits, and what is sent
        activations += 2 * stream
    if layout.shard == "fsdp":
        apart = (
            2 * block_parameters(config) / layout.tensor + count - own[0].blocks
        )  # the next block is there before this one goes
        shared = count / layout.replicas
        # a step's earlier microbatches keep their gradients whole; a single one's come as activations go
        gradients = count * _FP32 if layout.microbatches > 1 else max(0.0, shared * _FP32 - activations)
        working = most + apart * _FP32 + CUBLAS
        return RankMemory(shared * _FP32 + apart * _BF16, shared * moments, gradients, activations, working)
    shared = 1 if layout.shard == "nothing" else layout.replicas
    return RankMemory(count * _BF16, count * (2 + moments) / shared, count * _FP32, activations, float(most + CUBLAS))


@lru_cache(512)
def _microbatch(config: Config, tensor: int, rows: int, gpu: int) -> tuple[float, int, int, int, int]:
    """Return bytes of a microbatch: kept by a block, at work in its backward, kept by the head, at work there, and a stream."""
    config = config.replace(tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1)
    block = block_memory(config, rows)
    sizes = ends_bytes(config, rows), head_plan(config, rows, gpu).bytes, stream_bytes(config, rows)
    return sum(block.kept.values()), block.again + block.backward, *sizes


def _held_blocks(config: Config, layout: GPULayout, rank: int) -> float:
    """Return how many blocks' activations a rank keeps at its most, over its microbatches in flight."""
    mine = blocks_of(config, layout)[rank :: layout.pipeline]
    how, split = pipeline_of(layout), layout.schedule == "zero-bubble"
    after = layout.pipeline - 1 - rank
    if layout.stages == 1 and not split:
        held = after + 1
    else:
        held = (layout.stages - 1) * how.round_size + (1 + rank + after if split else 2 * after + 1)
    return min(held, layout.microbatches * layout.stages) * sum(mine) / layout.stages
