"""The time of a microbatch in one block, in the head and in the embedding, on one rank: what is computed, and what is sent.

Forward of a block gathers x before two products and sums y after two (tensor and sequence parallel). Backward gathers dy twice,
under the product of this rank's own rows. It sums dx twice and gathers x twice, under other products. What is sent under work
still slows it down, by a share of its own time: NCCL takes some of the GPU's processors, and memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from onepass.gpt import Config
from onepass.gpt.memory import rank_config
from onepass.train.plan.head import head_plan
from onepass.train.plan.layouts import GPULayout
from onepass.train.plan.links import Group, gather_time
from onepass.train.plan.rates import GPURates
from onepass.train.plan.schedule import StageTimes

PRODUCTS, ATTENTION, PASSES, HEAD = "products", "attention", "memory-bound passes", "head and loss"
AGAIN, TENSOR, CONTEXT = "recomputation", "tensor-parallel communication", "context-parallel communication"
_BF16, _FP32 = 2, 4
_KEYS = 128  # of a block of attention's backward
_CODES = 3  # bytes that a number of a product's operands is cast and transposed by


class Run(NamedTuple):
    """What a step's time depends on, except the layout.

    config: of the whole model, undivided.
    seen: tokens that a token sees, on average, in its document; a sequence where there are none.
    ours: it runs as `onepass train` does. Otherwise as Megatron with its overlaps: what tensor-parallel ranks send is under their
        products, weights are gathered under forward, and stages don't wait in step.
    deterministic: attention's backward adds in a fixed order.
    """

    config: Config
    sequence: int
    gpu: GPURates
    state: float  # bytes that the optimizer reads and writes of a parameter
    seen: float | None = None
    ours: bool = True
    deterministic: bool = True


class Passes(NamedTuple):
    """Seconds of a microbatch's forward and backward, by what takes them.

    weight: what of backward makes weights' gradients.
    """

    forward: dict[str, float]
    backward: dict[str, float]
    weight: float = 0.0

    def plus(self, other: Passes, count: int = 1) -> Passes:
        """Return the sum of these and `count` times others."""
        forward, backward = (
            {name: own.get(name, 0.0) + count * more.get(name, 0.0) for name in (*own, *more)}
            for own, more in zip(self[:2], other[:2], strict=True)
        )
        return Passes(forward, backward, self.weight + count * other.weight)

    @property
    def stage(self) -> StageTimes:
        return StageTimes(sum(self.forward.values()), sum(self.backward.values()), self.weight)


NOTHING = Passes({}, {})


class Share(NamedTuple):
    """A rank's share of a microbatch: its rows of the sequences, and the ranks that share each row."""

    rows: int
    tensor: int
    context: int

    @classmethod
    def of(cls, run: Run, layout: GPULayout) -> Share:
        return cls(layout.micro * run.sequence // layout.context, layout.tensor, layout.context)


def overlapped(gpu: GPURates, work: float, sent: float) -> float:
    """Return the seconds that sending adds to work that it runs under."""
    return max(sent - work, gpu.slowdown.value * sent)


# ---- products ----


def product_time(gpu: GPURates, M: int, N: int, K: int, *, eight_bits: bool = False, sums: bool = False) -> float:
    """Return the seconds of an [M, K] x [K, N] product. `sums`: it is added to an fp32 tensor."""
    rate = gpu.product_fp8 if eight_bits else gpu.product
    seconds = 2.0 * M * N * (K + gpu.depth.value) / rate.value + gpu.product_start.value
    return seconds + (gpu.added.value * 2 * _FP32 * M * N / gpu.copy.value if sums else 0.0)


def linears(config: Config, tensor: int) -> list[tuple[int, int]]:
    """Return a block's linear layers on one of `tensor` ranks, as in x out."""
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_size // tensor
    qkv = heads + 2 * config.query_groups * config.head_size // tensor
    ffn = config.ffn_size // tensor
    return [(hidden, qkv), (heads, hidden), (hidden, (2 if config.gated_linear_unit else 1) * ffn), (ffn, hidden)]


# ---- a block ----


@lru_cache(512)
def block_passes(run: Run, share: Share) -> Passes:
    """Return the time of a block that recomputes as the configuration says, that included."""
    config, gpu, (rows, tensor, _) = run.config, run.gpu, share
    eight, layers = config.fp8_format is not None, linears(config, tensor)
    forward = [product_time(gpu, rows, outer, inner, eight_bits=eight) for inner, outer in layers]
    inputs = sum(product_time(gpu, rows, inner, outer, eight_bits=eight) for inner, outer in layers)
    weights = sum(
        product_time(gpu, outer, inner, rows, eight_bits=eight and config.fp8_recipe != "rowwise", sums=True)
        for inner, outer in layers
    )
    mixed, moved = _attention(run, share), _moved(config, share)
    speed = gpu.passes.value * gpu.copy.value
    sent = gather_time(gpu.links, Group(tensor), rows * config.hidden_size * _BF16)
    ring = _ring(run, share, mixed)
    passes = Passes(
        {PRODUCTS: sum(forward), ATTENTION: mixed[0], PASSES: moved[0] / speed, TENSOR: 4 * sent, CONTEXT: ring[0]},
        {PRODUCTS: inputs + weights, ATTENTION: mixed[1], PASSES: moved[1] / speed, CONTEXT: ring[1]},
        weights,
    )
    own = (inputs + weights) / 2 / len(layers)  # a product of backward, on average
    passes.backward[TENSOR] = 2 * overlapped(gpu, own / tensor, sent) + 4 * overlapped(gpu, own, sent)
    if not run.ours:
        passes.forward[TENSOR], passes.backward[TENSOR] = (count * overlapped(gpu, own, sent) for count in (4, 6))
    passes.backward[AGAIN] = _again(config, passes, forward, moved[0] / speed)
    return passes


def _attention(run: Run, share: Share) -> tuple[float, float]:
    """Return the seconds of attention, forward and backward, with the rotation. A context-parallel ring shares it evenly."""
    config, gpu = run.config, run.gpu
    heads, groups = (count * config.head_size // share.tensor for count in (config.num_attention_heads, config.query_groups))
    seen = run.sequence if run.seen is None else run.seen
    flops = 2.0 * share.rows * seen * heads
    wide = config.head_size > 64
    forward, backward = gpu.attention_128 if wide else gpu.attention_64
    blocks = max(1, config.query_groups // share.tensor) * share.rows / _KEYS
    idle = max(1.0, gpu.attention_blocks.value / blocks)  # a block of keys is one processor's
    rotated = share.rows * (heads + groups) * 2 * _BF16 / gpu.copy.value if config.position_embedding_type == "rope" else 0.0
    times = flops / forward.value, 2.5 * flops / backward.value * (idle if run.deterministic else gpu.any_order[wide].value)
    return times[0] + rotated + gpu.attention_start[0].value, times[1] + rotated + gpu.attention_start[1].value


def _moved(config: Config, share: Share) -> tuple[float, float]:
    """Return the bytes that norms and the activation read and write, forward and backward.

    A norm adds what is pending: it reads two tensors and writes two; backward reads three, and writes two, rows made again among
    them. The activation reads its input and writes its output; backward makes the output again. In eight bits backward transposes
    the codes of each product's operands.
    """
    stream = share.rows // share.tensor * config.hidden_size * _BF16
    inner, parts = share.rows * config.ffn_size // share.tensor * _BF16, 2 if config.gated_linear_unit else 1
    forward, backward = 2 * 4 * stream + (parts + 1) * inner, 2 * 5 * stream + (2 * parts + 2) * inner
    if config.add_bias_linear or config.hidden_dropout:
        forward, backward = forward + 2 * 3 * stream, backward + 2 * 2 * stream
    if config.fp8_format is not None:
        backward += _CODES * share.rows * sum(map(sum, linears(config, share.tensor)))
    return forward, backward


def _again(config: Config, passes: Passes, forward: list[float], moved: float) -> float:
    """Return the seconds of what a block's backward computes again."""
    if config.recompute_granularity is None:
        return 0.0
    if config.recompute_granularity == "selective":  # the products before attention and activation
        return forward[0] + forward[2] + moved / 4
    return sum(passes.forward.values()) - forward[3]


def _ring(run: Run, share: Share, mixed: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds that keys and values take around the ring of context-parallel ranks, beyond attention's own."""
    if share.context == 1:
        return 0.0, 0.0
    config, links = run.config, run.gpu.links
    size = 2 * share.rows * config.query_groups * config.head_size // share.tensor * _BF16
    sent = gather_time(links, Group(share.context, share.tensor), size * share.context, share.context - 1)
    return overlapped(run.gpu, mixed[0], sent), overlapped(run.gpu, mixed[1], 2 * sent)


# ---- what is before and after the blocks ----


@lru_cache(512)
def head_passes(run: Run, share: Share, deferred: bool = False) -> Passes:
    """Return the time of the head and its loss, which makes gradients in forward. A deferred one makes logits again."""
    gpu, (rows, tensor, _) = run.gpu, share
    config = run.config.replace(tensor_model_parallel_size=tensor)
    plan = head_plan(config, rows, int(gpu.memory.value), deferred, (gpu.product.value, gpu.passes.value * gpu.copy.value))
    vocabulary = rank_config(config).vocab_size
    sent = gather_time(gpu.links, Group(tensor), rows * config.hidden_size * _BF16)
    product = product_time(gpu, rows, vocabulary, config.hidden_size)
    again = 2 * product + rows * vocabulary * _BF16 / gpu.copy.value if deferred else 0.0
    return Passes({HEAD: plan.seconds, TENSOR: sent}, {HEAD: again, TENSOR: sent}, again)


@lru_cache(512)
def embedding_passes(run: Run, share: Share) -> Passes:
    """Return the time in which rows are looked up, and their gradients sorted and added."""
    stream = share.rows // share.tensor * run.config.hidden_size * _BF16
    speed = run.gpu.passes.value * run.gpu.copy.value
    return Passes({PASSES: 2 * stream / speed}, {PASSES: 4 * stream / speed})
