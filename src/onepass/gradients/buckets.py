"""The layout of gradients in flat buffers: which parameters lie in which bucket, and which rank has which part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.gradients.eight_bits import BLOCK
from onepass.gradients.main_grad import is_capturing
from onepass.gradients.packed_params import packed_groups

TYPES = (torch.float32, torch.float16, torch.bfloat16)
ALIGNED = 64  # elements: where a parameter and a rank's part begin, for matrix products and NCCL
BUCKET_BYTES = 32 << 20
RELEASED_BYTES = 256 << 20  # of a releasable buffer: small enough to come one by one, as a step's norm is a launch for each


@dataclass(eq=False)
class BucketSlice:
    """A parameter's gradient in its bucket."""

    name: str
    parameter: Any  # a Tensor that carries main_grad
    start: int
    stop: int


@dataclass(eq=False)
class Bucket:
    """A stretch of a buffer that one collective reduces, of parameters of one type."""

    index: int
    places: list[BucketSlice]
    flat: Tensor
    mine: Tensor  # the part of flat that this rank reduces: all of it, or its shard
    first: int  # where in flat `mine` begins
    missing: dict[int, Any] = field(init=False)  # parameters whose last microbatch's gradient has not come, by id
    held: set[int] = field(default_factory=set)  # parameters with deferred gradients, which come after backward
    streams: dict[int, torch.cuda.Stream] = field(default_factory=dict)  # on which gradients were added
    work: Any = None  # the reduction under way
    closed: bool = False  # its reduction has begun in this step, or it was stepped

    def __post_init__(self) -> None:
        self.expect_all()

    def expect_all(self) -> None:
        """Note that the step's gradients are all to come."""
        self.closed = False
        self.missing = {id(place.parameter): place.parameter for place in self.places}

    def parts(self) -> Iterator[tuple[BucketSlice, int, int]]:
        """Yield the overlap of `mine` with each parameter, as a stretch of flat."""
        for place in self.places:
            start, stop = max(place.start, self.first), min(place.stop, self.first + self.mine.numel())
            if start < stop:
                yield place, start, stop

    def is_full(self) -> bool:
        """Whether no gradient is to come. Frozen parameters get none, whenever they were frozen."""
        return not self.held and not any(parameter.requires_grad for parameter in self.missing.values())

    def note_stream(self) -> None:
        """Note that the current stream adds a gradient. The parameter's hook may run on another stream: autograd runs it where
        it met the parameter first, in any graph that is alive."""
        if self.flat.is_cuda:
            stream = torch._C._cuda_getCurrentRawStream(self.flat.get_device())
            if stream not in self.streams and not is_capturing(self.flat):  # making the object takes as long as the rest
                self.streams[stream] = torch.cuda.current_stream(self.flat.device)

    def wait_for_gradients(self) -> None:
        """Make the current stream wait, not the CPU. A capturing stream does not: a graph can't wait for work outside of it."""
        for raw, stream in self.streams.items():
            if raw != torch._C._cuda_getCurrentRawStream(stream.device_index) and not is_capturing(self.flat):
                torch.cuda.current_stream(stream.device).wait_stream(stream)

    def others(self) -> tuple[Tensor, Tensor]:
        """Return what lies before and after `mine`."""
        return self.flat[: self.first], self.flat[self.first + self.mine.numel() :]


def named_parameters(parameters: nn.Module | Iterable[Any]) -> list[tuple[str, Tensor]]:
    """Return all parameters by name, frozen ones too. Raises where one is there twice, or none requires a gradient."""
    if isinstance(parameters, Tensor):  # iterating over it would give its rows
        raise TypeError("parameters must be a module or parameters, but is one tensor: put it in a list")
    listed = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
    named = [each if isinstance(each, tuple) else (f"parameter {index}", each) for index, each in enumerate(listed)]
    names: set[str] = set()
    seen: set[int] = set()
    for name, parameter in named:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters must be a module or parameters, but {name} is a {type(parameter).__name__}")
        if id(parameter) in seen or name in names:
            raise ValueError(f"parameters must have each parameter and name once, but {name} is there twice")
        seen.add(id(parameter))
        names.add(name)
    if not any(parameter.requires_grad for _, parameter in named):
        frozen = f"has {len(named)} frozen ones only" if named else "is empty"
        raise ValueError(f"parameters must have one that requires a gradient, but {frozen}")
    return named


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise where `MainGrads` can't hold the parameter's gradient."""
    if type(parameter).__name__ == "DTensor":
        raise TypeError(
            f"parameters must be plain tensors, but {name} is a DTensor: fully_shard sums and reduces gradients itself and puts "
            "them in .grad, so leave MainGrads away; for tensor parallelism use onepass.nn's parallel layers"
        )
    if parameter.dtype not in TYPES:
        raise TypeError(f"parameters must be fp32, fp16 or bf16, but {name} is {parameter.dtype}")
    if not parameter.is_leaf:
        raise ValueError(f"parameters must be leaves of autograd's graph, but {name} is what an operator returned")
    if getattr(parameter, "main_grad", None) is not None:
        raise ValueError(f"parameters must have no main_grad yet, but {name} has: close() the MainGrads that it belongs to")


def kind_of(parameter: Tensor) -> tuple[torch.device, torch.dtype]:
    return parameter.device, parameter.dtype


def plan_buckets(named: list[tuple[str, Any]], limit: int) -> list[list[BucketSlice]]:
    """Return the buckets, of up to `limit` elements, in the order in which their last gradients are expected."""
    names = {id(parameter): name for name, parameter in named}
    filling: dict[tuple[torch.device, torch.dtype], tuple[int, list[BucketSlice]]] = {}
    full = []
    for order, together in enumerate(reversed(packed_groups([parameter for _, parameter in named]))):
        kind = kind_of(together[0])
        _, places = filling.get(kind, (order, []))
        size = sum(round_up(parameter.numel(), ALIGNED) for parameter in together)
        if places and round_up(places[-1].stop, ALIGNED) + size > limit:
            full.append(filling[kind])
            places = []
        for number, parameter in enumerate(together):
            aligned = ALIGNED if number else max(map(_alignment, together))  # packed ones stay packed
            start = round_up(places[-1].stop, aligned) if places else 0
            places = [*places, BucketSlice(names[id(parameter)], parameter, start, start + parameter.numel())]
        filling[kind] = order, places
    return [places for _, places in sorted([*full, *filling.values()], key=lambda each: each[0])]


def _alignment(parameter: Tensor) -> int:
    """Where a parameter may begin. Ranks cut matrices between blocks of 8-bit moments."""
    return BLOCK if parameter.dim() > 1 and not parameter.numel() % BLOCK else ALIGNED


def size_of(places: list[BucketSlice], ranks: int) -> int:
    """Return the elements of a bucket, of which each rank has as many."""
    unit = ALIGNED if ranks == 1 else max(_alignment(place.parameter) for place in places)
    return round_up(places[-1].stop, unit * ranks)


def plan_buffers(
    planned: list[list[BucketSlice]], sizes: list[int], limit: int | None
) -> list[tuple[torch.device, torch.dtype, int]]:
    """Return each bucket's buffer: one for each device and type of parameters, or several of up to `limit` elements."""
    numbers: dict[tuple[torch.device, torch.dtype], int] = {}
    filled: dict[tuple[torch.device, torch.dtype], int] = {}  # elements in the last buffer
    found = []
    for places, size in zip(planned, sizes, strict=True):
        kind = kind_of(places[0].parameter)
        before = filled.get(kind, 0)
        if limit is not None and before and before + size > limit:
            numbers[kind], before = numbers.get(kind, 0) + 1, 0
        filled[kind] = before + size
        found.append((*kind, numbers.get(kind, 0)))
    return found


def round_up(size: int, multiple: int) -> int:
    return max(1, math.ceil(size / multiple)) * multiple


def check_agreement(planned: list[list[BucketSlice]], options: str, group: dist.ProcessGroup) -> None:
    """Raise on every rank if options, parameters or their places differ. The error names the first that does."""
    places = [(index, place) for index, bucket in enumerate(planned) for place in bucket]
    mine = [options, *(f"{_describe(place)} at element {place.start} of bucket {index}" for index, place in places)]
    check_alike("parameters and options", mine, group)


def check_alike(what: str, mine: list[str], group: dist.ProcessGroup) -> None:
    """Raise on every rank if the ranks' lists differ."""
    all_of_them = [mine] * group.size()
    dist.all_gather_object(all_of_them, mine, group=group)
    for rank, theirs in enumerate(all_of_them):
        for first, other in zip_longest(all_of_them[0], theirs, fillvalue="nothing"):
            if first != other:
                raise RuntimeError(
                    f"{what} must be the same, in one order, on all ranks of group, but its rank 0 has {first} where its rank "
                    f"{rank} has {other}"
                )


def _describe(place: BucketSlice) -> str:
    return f"{place.name} of shape {tuple(place.parameter.shape)} and {place.parameter.dtype}"
