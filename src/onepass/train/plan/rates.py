"""The rates that a plan counts with, each beside where it comes from: a measurement of this project, or a publication.

`benchmarks/planned.py` derives what was measured from benchmarks/results/h200/scripts/rates.json, and a test compares them. What
nobody here has is published: other GPUs' peaks and memory, more than two GPUs in a node, and network cards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onepass.train.options import Options

_MEASURED = "two H200s: benchmarks/results/h200/scripts/rates.json"
_MEASURED_H100 = "an H100: benchmarks/results/h100/norm.json, its copy"
_ATTENTION = "an H200: benchmarks/results/h200/attention.json"
_ATTENTION_H100 = "as on an H200, by benchmarks/results/h100 and h200/attention.json"
_IN_STEPS = f"{_MEASURED}, kernels of steps"
_DATA_SHEET = "NVIDIA's data sheet"
_SHARE_OF_MEMORY = f"{_DATA_SHEET}, times what an H200's copy reaches"
_NCCL = "NCCL's own model, NVIDIA/nccl src/graph/tuning.cc at 01afd20"
_PYTORCH = "torch.cuda's total_memory"


class Rate(NamedTuple):
    value: float
    source: str


class Links(NamedTuple):
    """What connects GPUs. Bytes a second are those that a ring's rank sends in one direction."""

    pair: Rate  # of two GPUs: what is gathered or scattered
    pair_reduce: Rate  # and what is all-reduced
    pair_start: Rate  # seconds of a collective of two
    node: Rate  # of more GPUs in one node
    card: Rate  # of a network card, of which each GPU has one
    start: Rate  # seconds of a collective of more
    hop: Rate  # and from a GPU to the next one in a node
    card_hop: Rate  # or in another node


class GPURates(NamedTuple):
    """A kind of GPU."""

    name: str
    memory: Rate  # bytes
    peak: Rate  # dense bf16 FLOP/s, over which MFU is
    copy: Rate  # bytes a second, read and written
    product: Rate  # bf16 FLOP/s of products that follow one another for a second
    product_fp8: Rate
    depth: Rate  # by which a product's sums are longer, for a tile's start and end
    product_start: Rate  # seconds of a product beside these
    added: Rate  # part of what an fp32 sum reads and writes that its product doesn't hide
    attention_64: tuple[Rate, Rate]  # FLOP/s forward and backward, of heads of up to 64
    attention_128: tuple[Rate, Rate]
    attention_start: tuple[Rate, Rate]  # seconds of a call beside that
    any_order: tuple[Rate, Rate]  # of attention's backward, heads of 64 and of 128, the time of one whose order of sums is free
    attention_blocks: Rate  # blocks of 128 keys, over groups, that fill a GPU in backward
    passes: Rate  # of a copy's rate
    optimizer: Rate  # of a copy's rate
    slowdown: Rate  # seconds that work takes longer, for each in which something is sent under it
    links: Links

    def scaled(self, name: str, memory: Rate, peak: Rate, copy: Rate, links: Links) -> GPURates:
        """Return another GPU's rates, whose arithmetic is assumed to reach the same share of its peak."""
        factor, source = peak.value / self.peak.value, f"assumed: the share of its peak that an {self.name.upper()} reaches"

        def times(rate: Rate) -> Rate:
            return Rate(rate.value * factor, source)

        def pair(rates: tuple[Rate, Rate]) -> tuple[Rate, Rate]:
            return times(rates[0]), times(rates[1])

        return self._replace(
            name=name, memory=memory, peak=peak, copy=copy, links=links,
            product=times(self.product), product_fp8=times(self.product_fp8),
            attention_64=pair(self.attention_64), attention_128=pair(self.attention_128),
        )  # fmt: skip


_HOPPER_LINKS = Links(
    pair=Rate(2.69e11, _MEASURED),
    pair_reduce=Rate(3.30e11, _MEASURED),
    pair_start=Rate(2.1e-5, _MEASURED),
    node=Rate(3.7e11, "NVIDIA/nccl-tests issue 212: NCCL over eight H100s"),
    card=Rate(4.7e10, "NVIDIA/nccl-tests issue 290: a 400 Gb/s card"),
    start=Rate(8.4e-6, _NCCL),
    hop=Rate(3.4e-6, _NCCL),
    card_hop=Rate(9.6e-6, _NCCL),
)

H200 = GPURates(
    name="h200",
    memory=Rate(139.8 * 2**30, _PYTORCH),
    peak=Rate(9.89e14, _DATA_SHEET),
    copy=Rate(4.22e12, _MEASURED),
    product=Rate(6.99e14, _MEASURED),
    product_fp8=Rate(1.322e15, _MEASURED),
    depth=Rate(89, _MEASURED),
    product_start=Rate(3.7e-6, _MEASURED),
    added=Rate(0.459, _MEASURED),
    attention_64=(Rate(4.05e14, _IN_STEPS), Rate(3.17e14, _IN_STEPS)),
    attention_128=(Rate(6.06e14, _IN_STEPS), Rate(3.50e14, _IN_STEPS)),
    attention_start=(Rate(4.4e-5, _MEASURED), Rate(1.11e-4, _MEASURED)),
    any_order=(Rate(1.0, _ATTENTION), Rate(0.86, _ATTENTION)),
    attention_blocks=Rate(128, _MEASURED),
    passes=Rate(0.964, _MEASURED),
    optimizer=Rate(0.942, _MEASURED),
    slowdown=Rate(0.183, _MEASURED),
    links=_HOPPER_LINKS,
)
# the same chip and power as an H200, with slower memory, which leaves more of the power
H100 = H200._replace(
    name="h100",
    memory=Rate(79.1 * 2**30, _PYTORCH),
    copy=Rate(3.02e12, _MEASURED_H100),
    attention_64=(Rate(1.09 * 4.05e14, _ATTENTION_H100), Rate(1.06 * 3.17e14, _ATTENTION_H100)),
    attention_128=(Rate(1.10 * 6.06e14, _ATTENTION_H100), Rate(1.11 * 3.50e14, _ATTENTION_H100)),
    any_order=(Rate(0.92, _ATTENTION_H100), Rate(0.88, _ATTENTION_H100)),
)
_AMPERE_LINKS = _HOPPER_LINKS._replace(
    pair=Rate(2.35e11, "stas00/ml-engineering, network: nccl-tests in an A100 node"),
    pair_reduce=Rate(2.35e11, "stas00/ml-engineering, network: nccl-tests in an A100 node"),
    node=Rate(2.35e11, "stas00/ml-engineering, network: nccl-tests in an A100 node"),
    card=Rate(2.35e10, "assumed: a 200 Gb/s card reaches the share of a 400 Gb/s one"),
)
_NVLINK_5 = "assumed: twice NVLink 4's, as their data sheets are"
_BLACKWELL_LINKS = _HOPPER_LINKS._replace(
    pair=Rate(2 * 2.69e11, _NVLINK_5), pair_reduce=Rate(2 * 3.30e11, _NVLINK_5), node=Rate(2 * 3.7e11, _NVLINK_5)
)
A100 = H200.scaled(
    "a100", Rate(79.1 * 2**30, _PYTORCH), Rate(3.12e14, _DATA_SHEET), Rate(0.88 * 2.039e12, _SHARE_OF_MEMORY), _AMPERE_LINKS,
)._replace(product_fp8=Rate(0.0, "an A100 has no products in eight bits"))  # fmt: skip
B200 = H200.scaled(
    "b200", Rate(178.3 * 2**30, _PYTORCH), Rate(2.25e15, _DATA_SHEET), Rate(0.88 * 8e12, _SHARE_OF_MEMORY), _BLACKWELL_LINKS,
)  # fmt: skip
GPUS = {gpu.name: gpu for gpu in (A100, H100, H200, B200)}

_UNITS = {
    "memory": "bytes", "peak": "FLOP/s", "copy": "B/s", "product": "FLOP/s", "product_fp8": "FLOP/s", "product_start": "s",
    "attention_64": "FLOP/s", "attention_128": "FLOP/s", "attention_start": "s", "pair": "B/s", "pair_reduce": "B/s",
    "pair_start": "s", "node": "B/s", "card": "B/s", "start": "s", "hop": "s", "card_hop": "s",
}  # fmt: skip


def named_rates(gpu: GPURates) -> Iterator[tuple[str, str, Rate]]:
    """Yield each of a GPU's rates with its name and unit."""
    for fields in (gpu, gpu.links):
        for name, rate in fields._asdict().items():
            if isinstance(rate, Rate):
                yield name, _UNITS.get(name, ""), rate
            elif isinstance(rate, tuple) and name != "links":
                for which, each in zip(("64", "128") if name == "any_order" else ("forward", "backward"), rate, strict=True):
                    yield f"{name} {which}", _UNITS.get(name, ""), each


# bytes that AdamW reads and writes of a parameter: its gradient twice, and zeros; weight, master and both moments
_STATE = {"fp32": 36.0, "bf16": 28.0, "8bit": 24.1}


def state_bytes(options: Options) -> float:
    return _STATE[options.optimizer_moments]
