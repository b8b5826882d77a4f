"""The time of a step by arithmetic: microbatches through stages, then what of reductions nothing hides, and the optimizer."""

from __future__ import annotations

from typing import NamedTuple

from onepass.gradients.buckets import BUCKET_BYTES
from onepass.train.plan.block_time import (
    HEAD,
    NOTHING,
    PASSES,
    Passes,
    Run,
    Share,
    block_passes,
    embedding_passes,
    head_passes,
    linears,
    overlapped,
)  # fmt: skip
from onepass.train.plan.layout_memory import block_parameters, parameters, without_recomputation
from onepass.train.plan.layouts import GPULayout, blocks_of, pipeline_of
from onepass.train.plan.links import gather_time, groups, reduce_time, send_time
from onepass.train.plan.schedule import PipelineTime, pipeline_time

OPTIMIZER, DATA, BUBBLE = "optimizer", "data-parallel communication", "pipeline bubble"
_BF16, _FP32 = 2, 4
_MEGATRON_BUCKET, _MEGATRON_BUCKET_OF_RANK = 40_000_000, 1_000_000  # parameters, by default
_CODES = 5  # bytes that a weight is read and written by, in bf16 and as two codes


class StepTime(NamedTuple):
    """The seconds of a step, and of which work, on the rank that is done last. The parts' sum is the step."""

    seconds: float
    parts: dict[str, float]

    @property
    def exposed(self) -> float:
        """The share of the step in which ranks do nothing but communicate, or wait for each other."""
        return sum(value for name, value in self.parts.items() if "communication" in name or name == BUBBLE) / self.seconds


class RankTime(NamedTuple):
    """What a rank adds to its stages' time: what of reductions is exposed, and the optimizer."""

    data: float
    update: float


def step_time(run: Run, layout: GPULayout) -> StepTime:
    """Return the time of a step."""
    stages = stage_passes(run, layout)
    timing = pipeline_time([stage.stage for stage in stages], pipeline_of(layout, _send(run, layout), run.ours))
    return _of_last_rank(run, layout, stages, timing)


def least_time(run: Run, layout: GPULayout) -> float:
    """Return a lower bound of a step's time, without running through its schedule."""
    stages = stage_passes(run, layout)
    times = [stage.stage for stage in stages]
    busy = [
        sum(t.forward + t.backward for t in times[r :: layout.pipeline]) * layout.microbatches for r in range(layout.pipeline)
    ]
    bubble = (layout.pipeline - 1) * min(each.forward + each.backward for each in times)
    return max(
        each + bubble * (layout.schedule != "zero-bubble") + sum(rank_time(run, layout, rank, stages))
        for rank, each in enumerate(busy)
    )


def stage_passes(run: Run, layout: GPULayout) -> list[Passes]:
    """Return the time of a microbatch in each stage."""
    share, again = Share.of(run, layout), run.config.recompute_num_layers
    one = _block(run, layout)
    stages = [NOTHING.plus(one, blocks if again is None else min(again, blocks)) for blocks in blocks_of(run.config, layout)]
    if again is not None:
        plain = _block(run._replace(config=without_recomputation(run.config)), layout)
        plains = (max(0, blocks - again) for blocks in blocks_of(run.config, layout))
        stages = [stage.plus(plain, blocks) for stage, blocks in zip(stages, plains, strict=True)]
    stages[0] = stages[0].plus(embedding_passes(run, share))
    last = head_passes(run, share, layout.deferred is not None or layout.schedule == "zero-bubble")
    if layout.deferred is not None:  # in the flush
        left = (layout.deferred or layout.microbatches) / layout.microbatches
        last = last.plus(Passes({}, {HEAD: -left * last.weight}))
    stages[-1] = stages[-1].plus(last)
    return stages


def _block(run: Run, layout: GPULayout) -> Passes:
    one = block_passes(run, Share.of(run, layout))
    return one.plus(_sharded_block(run, layout, one)) if layout.shard == "fsdp" else one


def _send(run: Run, layout: GPULayout) -> float:
    if layout.pipeline == 1:
        return 0.0
    size = Share.of(run, layout).rows // layout.tensor * run.config.hidden_size * _BF16
    return send_time(run.gpu.links, groups(layout)["pipeline"], size)


def _of_last_rank(run: Run, layout: GPULayout, stages: list[Passes], timing: PipelineTime) -> StepTime:
    more = [rank_time(run, layout, rank, stages) for rank in range(layout.pipeline)]
    flush = 0.0
    if layout.deferred is not None:
        head = head_passes(run, Share.of(run, layout), True)
        flush = head.weight * (layout.deferred or layout.microbatches)
    ends = [end + (flush if rank == layout.pipeline - 1 else 0.0) for rank, end in enumerate(timing.ends)]
    seconds, rank = max((end + sum(own), rank) for rank, (end, own) in enumerate(zip(ends, more, strict=True)))
    parts: dict[str, float] = {}
    for stage in stages[rank :: layout.pipeline]:
        for each in stage[:2]:
            for name, value in each.items():
                parts[name] = parts.get(name, 0.0) + value * layout.microbatches
    if rank == layout.pipeline - 1 and flush:
        parts[HEAD] = parts.get(HEAD, 0.0) + flush
    parts[BUBBLE] = ends[rank] - sum(parts.values())
    parts[DATA] = parts.get(DATA, 0.0) + more[rank].data
    parts[OPTIMIZER] = more[rank].update
    return StepTime(seconds, {name: value for name, value in parts.items() if value > 1e-9})


# ---- what a rank does beside its stages: reductions and the optimizer ----


def rank_time(run: Run, layout: GPULayout, rank: int, stages: list[Passes]) -> RankTime:
    """Return the seconds of a rank's reductions that its last backward doesn't hide, and of its optimizer."""
    gpu, config = run.gpu, run.config
    own = parameters(config, layout)[rank :: layout.pipeline]
    count = sum(part.total for part in own)
    shared = 1 if layout.shard == "nothing" else layout.replicas
    state = run.state - (_FP32 if layout.shard == "fsdp" else 0)  # FSDP's gradients are freed, not zeroed
    update = count / shared * state / (gpu.optimizer.value * gpu.copy.value)
    if config.fp8_format is not None:  # codes of the new weights, and of their transposes
        update += sum(part.blocks for part in own) * _CODES / gpu.copy.value
    group = groups(layout)["replicas"]
    if group.size == 1:
        return RankTime(0.0, update)
    late = own[0].embedding  # its gradient comes last, and nothing is left to hide its reduction; a tied head's is in it
    send = reduce_time if layout.shard == "nothing" else gather_time
    calls = _calls(run, layout, sum(part.blocks for part in own))
    window = sum(stage.stage.backward for stage in stages[rank :: layout.pipeline][:1])
    early = send(gpu.links, group, (count - late) * _FP32, calls)
    data = overlapped(gpu, window, early) + send(gpu.links, group, late * _FP32)
    if layout.shard == "optimizer":
        gathered = gather_time(gpu.links, group, count * _BF16, calls)
        forward = sum(stage.stage.forward for stage in stages[rank :: layout.pipeline])
        data += gathered if run.ours else overlapped(gpu, forward, gathered)
    if layout.shard == "fsdp":  # what is outside of blocks is gathered before the first and reduced after the last
        ends = count - own[0].blocks
        data += gather_time(gpu.links, group, ends * _BF16) * layout.microbatches
    return RankTime(data, update)


def _calls(run: Run, layout: GPULayout, count: float) -> int:
    """Return in how many collectives the blocks' gradients of so many parameters are reduced: one a bucket."""
    if not run.ours:
        return round(count / max(_MEGATRON_BUCKET, _MEGATRON_BUCKET_OF_RANK * layout.replicas)) + 1
    sizes = [inner * outer * _FP32 for inner, outer in linears(run.config, layout.tensor)]
    return round(count * _FP32 / sum(sizes) * sum(min(1.0, size / BUCKET_BYTES) for size in sizes)) + 1


def _sharded_block(run: Run, layout: GPULayout, block: Passes) -> Passes:
    """Return what FSDP adds to a block: weights are gathered for forward and for backward, under the block before, and copied."""
    gpu, group = run.gpu, groups(layout)["replicas"]
    weights = block_parameters(run.config) / layout.tensor * _BF16
    sent = gather_time(gpu.links, group, weights)
    copied = 2 * weights / (gpu.passes.value * gpu.copy.value)
    forward, backward = (overlapped(gpu, sum(each.values()), sent) for each in block[:2])
    return Passes({PASSES: copied, DATA: forward}, {PASSES: copied, DATA: backward})
