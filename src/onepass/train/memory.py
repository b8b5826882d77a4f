"""The GPU memory of a step, by arithmetic: what stays, what a microbatch keeps, and where in the step there is most of it.

    weights      params_dtype; fp32 norms. With the rotary tables
    masters      2 bytes a bf16 parameter, whose bits they go on (gradients/adamw_formula.py)
    moments      as optimizer_moments says. With offload, what passes through the GPU
    gradients    flat fp32 buffers; released ones come with a step's gradients, and go with the optimizer's step, or one by one
    activations  gpt/memory.py
    working      the head's logits and gradient, or what backward of a block has beside its activations; cuBLAS's workspaces

A step has most memory in the head's loss, which makes gradients in forward, in a block's backward, or in the optimizer's step.
`OUTSIDE` comes on top: what PyTorch's allocator does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from onepass.gpt import Config, Model
from onepass.gpt.memory import BlockMemory, block_memory, ends_bytes, rank_config, uncounted
from onepass.gradients.adamw_state import PASSAGE, embeddings_of
from onepass.gradients.buckets import BUCKET_BYTES, RELEASED_BYTES, plan_buckets, plan_buffers, size_of
from onepass.gradients.eight_bits import BLOCK
from onepass.gradients.offloaded_state import SLOTS
from onepass.runtime.units import size as _size
from onepass.train.layout import ParallelLayout
from onepass.train.options import Options
from onepass.train.plan.head import head_plan
from onepass.train.updates import releases

OUTSIDE = 1 << 30  # CUDA's context and kernels, and the allocator's gaps
_MASTER_BYTES = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}
_FP32 = 4
MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 2 * _FP32 / BLOCK}  # both of a parameter's, and their scales
CUBLAS = 2 * (32 << 20)  # a workspace for each of forward's and backward's threads


class MemoryAt(NamedTuple):
    """Bytes of one rank at a time in a step. `layers` has the blocks' activations by tensor."""

    weights: int
    masters: int
    moments: int
    gradients: int
    layers: dict[str, int]
    ends: int  # activations of what is before and after the blocks
    working: int

    @property
    def activations(self) -> int:
        return sum(self.layers.values()) + self.ends

    @property
    def total(self) -> int:
        return sum(self[:4]) + self.activations + self.working


class StepMemory(NamedTuple):
    """The memory in the head's loss, in backward where it is most, and in the optimizer's step."""

    loss: MemoryAt
    backward: MemoryAt
    update: MemoryAt

    @property
    def total(self) -> int:
        return max(at.total for at in self)


class MemoryPlan:
    """Counts a step's memory for settings of one model.

    Args:
        config: of the model; `onepass.gpt.memory.uncounted` says which settings are not counted.
        ranks: of all tensor-parallel and data-parallel groups.
    """

    def __init__(self, config: Config, ranks: int = 1) -> None:
        self.ranks, self.data = ranks, ranks // config.tensor_model_parallel_size
        self.model = Model(rank_config(config), device="meta", seed=0)
        self.named = [*self.model.named_parameters()]

    def microbatches(self, options: Options) -> int:
        """Return how many of them a rank has in a step."""
        return max(1, (options.global_batch_size or 0) // (options.micro_batch_size * self.data))

    def of_step(self, config: Config, options: Options, gpu: int) -> StepMemory:
        """Return the memory of a step on GPUs of so many bytes. `config` may recompute otherwise than the plan's own."""
        shared = self.data if options.use_distributed_optimizer else 1
        weights = sum(tensor.nbytes for tensor in [*self.model.parameters(), *self.model.buffers()])
        masters, moments = self._state(options, shared)
        tokens = options.micro_batch_size * options.seq_length
        blocks = [block_memory(config, tokens, at) for at in range(config.num_layers)]
        come = self._gradients(options)

        def at(gradients: int, layers: list[BlockMemory], ends: int, working: int) -> MemoryAt:
            kept: Counter[str] = Counter()
            for block in layers:
                kept.update(block.kept)
            return MemoryAt(weights, masters, moments, gradients, dict(kept), ends, working + CUBLAS)

        loss = at(come[0], blocks, ends_bytes(config, tokens), head_plan(config, tokens, gpu).bytes)
        backwards = [
            at(come[len(blocks) - number], blocks[: number + 1], 0, block.again + block.backward)
            for number, block in enumerate(blocks)
        ]
        return StepMemory(loss, max(backwards, key=lambda each: each.total), at(come[-1], [], 0, 0))

    def _state(self, options: Options, shared: int) -> tuple[int, int]:
        """Return the bytes of masters' bits and of moments."""
        kind, embeddings = options.optimizer_moments, {id(each) for each in embeddings_of(self.model)}
        masters = moments = 0.0
        for _, parameter in self.named:
            masters += parameter.numel() * _MASTER_BYTES[parameter.dtype]
            coded = kind != "8bit" or (id(parameter) not in embeddings and parameter.dim() > 1 and not parameter.numel() % BLOCK)
            moments += parameter.numel() * MOMENT_BYTES[kind if coded else "fp32"]
        if not options.offload_optimizer:
            return int(masters) // shared, int(moments) // shared
        numbers = sum(parameter.numel() for _, parameter in self.named) // shared
        return 0, int(min(numbers, SLOTS * PASSAGE) / numbers * (masters + moments)) // shared

    def _gradients(self, options: Options) -> list[int]:
        """Return the gradients' bytes at the head, at each block's backward from the last one on, and at the end."""
        released = releases(self.model, options, ParallelLayout(torch.device("cuda"), ranks=self.ranks))
        buffers = self._buffers(released)
        whole, stages = sum(size for _, size in buffers), len(self.model.layers) + 2
        if not released or self.microbatches(options) > 1:  # those of earlier microbatches are there
            return [whole] * stages
        come: set[str] = set()
        found, early = [], options.step_in_backward
        for names in self._order():
            stepped, come = come if early else set(), come | names
            found.append(sum(size for those, size in buffers if not come.isdisjoint(those) and not those <= stepped))
        return [*found, sum(size for those, size in buffers if not early or not those <= come)]

    def _buffers(self, released: bool) -> list[tuple[set[str], int]]:
        """Return the buffers of `MainGrads`: whose gradients lie in each, and its bytes."""
        planned = plan_buckets(self.named, BUCKET_BYTES // _FP32)
        sizes = [size_of(places, self.data) for places in planned]
        found: dict[Any, tuple[set[str], int]] = {}
        for key, places, size in zip(
            plan_buffers(planned, sizes, RELEASED_BYTES // _FP32 if released else None), planned, sizes, strict=True
        ):
            names, total = found.get(key, (set(), 0))
            found[key] = names | {place.name for place in places}, total + size * _FP32
        return [*found.values()]

    def _order(self) -> Iterator[set[str]]:
        """Yield names of parameters whose gradients come before the most of the head, and then of each block's backward."""
        head = "output_layer.weight" if "output_layer.weight" in dict(self.named) else "embedding.word_embeddings.weight"
        yield {head}
        before = {name for name, _ in self.model.named_parameters() if name.startswith("final_layernorm.")}
        for block in reversed([*self.model.layers.items()]):
            prefix, parameters = f"layers.{block[0]}.", [name for name, _ in block[1].named_parameters()]
            yield before | {prefix + name for name in parameters if name.startswith(("mlp.linear_fc2.", "mlp.experts.weight2"))}
            before = {prefix + name for name in parameters}


def check_counted(config: Config, options: Options) -> str | None:
    """Return why a run's memory is not counted, or None."""
    more = {"use_fsdp": False, "lora_rank": None, "cuda_graphs": None}
    wrong = [f"{name} must be {value}" for name, value in more.items() if getattr(options, name) not in (value, False)]
    return next(iter([*uncounted(config), *wrong]), None)


# ---- what a run says ----


def memory_of_run(config: Config, options: Options, layout: ParallelLayout) -> StepMemory | None:
    """Return the memory of a rank's steps, or None where it is not counted."""
    if check_counted(config, options) is not None:
        return None
    device = layout.device
    there = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 16 << 30
    return MemoryPlan(config, layout.ranks).of_step(config, options, there)


def describe_memory(step: StepMemory, blocks: int) -> str:
    """Return a line on where a run's memory goes."""
    at = step.update
    state = {"weights": at.weights, "masters": at.masters, "moments": at.moments, "gradients": at.gradients}
    said = [f"{name} {_size(count)}" for name, count in state.items() if count]
    each = [f"{name} {_size(count / blocks)}" for name, count in step.loss.layers.items()]
    kept = sum(step.loss.layers.values())
    said.append(f"activations {_size(kept)}, {_size(kept / blocks)} a block ({', '.join(each)})")
    return f"Memory: {', '.join(said)}."


def compare_memory(step: StepMemory, peak: int) -> str:
    """Return a line on what a GPU has taken at most, beside what was planned."""
    return f"Memory at most: {_size(peak)}; planned: {_size(step.total)} ({peak / step.total - 1:+.1%})."
