"""Flat gradient buffers over a model's parameters, reduced over the data-parallel ranks while backward still runs.

Every trainable parameter gets `main_grad`, a view of a flat buffer. The last parameters of the model lie first, which is roughly
the order in which gradients come, and the buffer is cut into buckets. When the last microbatch's gradients of a bucket are all
there, its reduction starts. The order of the buckets is the same on all ranks: one that is full waits for those before it, and
`finish` starts what is left, so that a parameter without a gradient, on one rank or on all, holds nobody up.

A gradient gets into main_grad in one of three ways (`onepass.runtime.main_grad` has the first):
- an op of onepass adds it there itself and gives autograd none: the parameter's hook is called all the same;
- another op's comes as `.grad`: the parameter's hook adds it in main_grad's type and sets `.grad` to None at once;
- somebody put it in `.grad` by hand, as zero-bubble schedules do: the next hook or `finish` adds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.parallel.buckets import (
    ALIGNED,
    TYPES,
    Bucket,
    Place,
    check_agreement,
    plan_buckets,
    plan_buffers,
    round_up,
    trainable_of,
)
from onepass.parallel.collectives import start_all_gather, with_others
from onepass.parallel.module_tree import ModuleTree
from onepass.runtime.joined import as_laid, as_one, lie_together
from onepass.runtime.main_grad import add_gradient, capturing, is_placeholder, main_grad_of
from onepass.runtime.released import ReleasedBuffer, ready, storage_of
from onepass.runtime.validation import validating

_RELEASED_BYTES = 256 << 20  # of a buffer that is released: they come one after another, and a step's norm is a launch for each


class MainGrads:
    """Gradients of a model's parameters in flat buffers, reduced over data-parallel ranks under backward.

        main_grads = MainGrads(model)
        for step in range(steps):
            main_grads.zero_()
            with main_grads.accumulate():       # every microbatch but the last
                loss(...).backward()
            loss(...).backward()                # the last: reductions start as buckets fill
            main_grads.finish()
            main_grads.clip_(1.0)
            optimizer.step()                    # `MasterWeights`, or anything that reads main_grad

    The weights are to be the same on all ranks at the start; nothing is broadcast. A parameter's gradient comes once in a
    backward, also where it is tied or its layer is used several times (under reentrant checkpointing, which runs backwards in
    the backward, it comes once for each of them, and that raises). The object must be kept: dropped, it lets go of the
    parameters as `close` does.

    A CUDA graph of a whole backward is captured in `accumulate`, and each replay is a microbatch like those in it: it must come
    before the backward that is the last, or before `finish`. What torch.cuda.make_graphed_callables makes is as any module
    (`onepass.graphed`).

    Args:
        parameters: a module, parameters, or pairs of a name and a parameter, in an order that is the same on all ranks. Frozen
            ones are skipped. Those that were laid together before (`onepass.runtime.joined`), on all ranks or on none, have their
            main_grads one after another too.
        group: the data-parallel ranks; None is all of them. With one rank, or torch.distributed not initialised, nothing is sent.
        dtype: of the buffers, and of the sums over microbatches and over ranks: with a 16-bit type every one of them is rounded.
        bucket_bytes: a bucket's size. A parameter that is larger, or several laid together, has one of its own.
        shard: reduce-scatter instead of all-reduce (ZeRO-1). After `finish` main_grad is right in this rank's part of each
            bucket (`Bucket.mine`) and undefined elsewhere.
        average: divide by the number of ranks, before the sum.
        release: the buffers' memory is activations' between steps: it comes with the step's first gradients and goes with
            `zero_`, or a step of `AdamW` with zero=True. main_grad can be read from `finish` on, or after `fill_`. Before, nobody
            else may read it or add to it: there is no memory, which is a crash, or something else in it. No CUDA graph can be
            captured that adds to it or steps by it.
        tp_group: the tensor-parallel ranks, for `norm` and `clip_`. Parameters with a true `tensor_model_parallel` differ from
            rank to rank and count on each; the others count on the group's rank 0.
        pp_group: the stages of a pipeline, for `norm` and `clip_`: each has parameters of its own.
    """

    def __init__(
        self,
        parameters: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        *,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = 32 << 20,
        shard: bool = False,
        average: bool = True,
        release: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        pp_group: dist.ProcessGroup | None = None,
    ) -> None:
        named = trainable_of(parameters)
        if dtype not in TYPES:
            raise TypeError(f"dtype must be torch.float32, torch.float16 or torch.bfloat16, but is {dtype!r}")
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, but is {bucket_bytes}")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group, self.tp_group = with_others(group), with_others(tp_group, "tp_group")
        self.pp_group = with_others(pp_group, "pp_group")
        self.ranks = 1 if self.group is None else self.group.size()
        self.named, self.dtype, self.shard, self.releases = named, dtype, shard and self.ranks > 1, release
        self._module = weakref.ref(parameters) if isinstance(parameters, nn.Module) else lambda: None
        self._complete: ModuleTree | None = None  # the module when it had all of the parameters
        planned = plan_buckets(named, bucket_bytes // dtype.itemsize)
        if validating() and self.group is not None:
            check_agreement([[(place.name, place.start, place.stop) for place in places] for places in planned], self.group)

        self.buffers, self.buckets = self._allocated(planned)
        self._average = average and self.ranks > 1
        self._bucket_of = {id(place.parameter): bucket for bucket in self.buckets for place in bucket.places}
        handles = []
        for bucket in self.buckets:
            for place in bucket.places:
                parameter = place.parameter
                parameter.main_grad = bucket.flat[place.start : place.stop].view(parameter.shape)
                parameter.main_grads = _Owner(self)
                hook = partial(_arrived, weakref.ref(self))  # no cycle through the parameter: buffers are freed at once
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._released = self._to_be_released() if release else []
        self._finalizer = weakref.finalize(self, _let_go, [parameter for _, parameter in named], handles, self._released)
        self._finalizer.atexit = False
        self._accumulating = False
        self._clear: list[int] | None = None  # the buffers' versions when somebody left zeros in them
        self._open()
        if release:
            self._give_back()

    def _allocated(self, planned: list[list[Place]]) -> tuple[list[Tensor], list[Bucket]]:
        """One buffer for each device and type of parameters, as weights are gathered in their own type; of what is released
        several, each of which comes by itself."""
        whole = ALIGNED * self.ranks
        sizes = [round_up(places[-1].stop, whole) for places in planned]
        keys = plan_buffers(planned, sizes, _RELEASED_BYTES // self.dtype.itemsize if self.releases else None)
        totals = dict.fromkeys(keys, 0)
        for key, size in zip(keys, sizes, strict=True):
            totals[key] += size
        buffers = {key: torch.zeros(total, dtype=self.dtype, device=key[0]) for key, total in totals.items()}
        rest = dict(buffers)
        buckets = []
        for index, (places, key, size) in enumerate(zip(planned, keys, sizes, strict=True)):
            flat, rest[key] = rest[key][:size], rest[key][size:]
            first, length = 0, size
            if self.shard:
                assert self.group is not None
                length = size // self.ranks
                first = self.group.rank() * length
            buckets.append(Bucket(index, places, flat, flat[first : first + length], first))
        return list(buffers.values()), buckets

    def _to_be_released(self) -> list[ReleasedBuffer]:
        own: dict[int, list[Tensor]] = {storage_of(buffer): [] for buffer in self.buffers}
        for bucket in self.buckets:
            own[storage_of(bucket.flat)] += [place.parameter.main_grad for place in bucket.places]
        together: dict[int, list[tuple[list[Any], Tensor]]] = {storage: [] for storage in own}
        for laid in as_laid([parameter for _, parameter in self.named]):
            main_grads: list[Any] = [main_grad_of(parameter) for parameter in laid]
            for first, last in combinations(range(len(laid) + 1), 2):
                if last - first > 1 and lie_together(run := main_grads[first:last]):
                    together[storage_of(run[0])].append((run, as_one(run)))
        return [ReleasedBuffer(buffer, own[storage_of(buffer)], together[storage_of(buffer)]) for buffer in self.buffers]

    # ---- a step ----

    def zero_(self) -> None:
        """Begin a step: clear buffers, `.grad` and flags. What `cleared` was told of is not written again."""
        self._check_none_held("zero_()", "or clear() what is deferred")
        self._wait()
        if self.releases:
            self._give_back()
        elif self._clear != [buffer._version for buffer in self.buffers]:
            for buffer in self.buffers:
                buffer.zero_()
        elif self.shard:
            torch._foreach_zero_([part for bucket in self.buckets for part in bucket.others()])
        self._open()

    def cleared(self) -> None:
        """Whoever used the gradients of this rank's parts (`Bucket.mine`) has left zeros there; with release, whatever it was."""
        self._finished = False
        if self.releases:
            self._give_back()
        else:
            self._clear = [buffer._version for buffer in self.buffers]

    def _give_back(self) -> None:
        for bucket in self.buckets:
            bucket.wait_for_gradients()
        for released in self._released:
            released.release()

    def fill_(self) -> None:
        """With release: have all memory now, zeros where there is no gradient, for who reads or writes main_grad."""
        for buffer in self.buffers:
            ready(buffer)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """In the block there is memory, for views to be made of it, and after it where there was some before."""
        empty = [released for released in self._released if not released.has_memory]
        self.fill_()
        try:
            yield
        finally:
            for released in empty:
                released.release()

    def _open(self) -> None:
        self._next = 0  # the first bucket whose reduction has not begun
        self._late: list[Tensor] = []  # parameters whose gradients came where none was to come any more
        self._finished = False
        self._clear = None
        for bucket in self.buckets:
            bucket.missing = {id(place.parameter) for place in bucket.places}
            bucket.held.clear()
            bucket.streams.clear()
            for place in bucket.places:
                place.parameter.grad = None
                place.parameter.grad_added_to_main_grad = False

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward in this block is not the last microbatch's: no reduction starts (DDP's `no_sync`)."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def finish(self) -> None:
        """Start the reductions that have not begun, and wait for all. On a GPU the current stream waits, not the CPU."""
        self._check_still_there()
        for parameter in self._late:
            self.check_open(parameter)
        for bucket in self.buckets:
            for place in bucket.places:
                if place.parameter.grad is not None:
                    self.check_open(place.parameter)
        self._check_none_held("finish()")
        for bucket in self.buckets[self._next :]:
            for place in bucket.places:
                self._take(place.parameter)
            self._start(bucket)
        self._wait()
        for bucket in self.buckets:
            bucket.wait_for_gradients()
        self.fill_()
        self._finished = True

    def _check_still_there(self) -> None:
        """Others in their place, as fully_shard puts there, get their gradients elsewhere."""
        module = self._module()
        if module is None or (self._complete is not None and self._complete.is_as_it_was()):
            return
        there = {id(parameter) for parameter in module.parameters()}
        gone = [name for name, parameter in self.named if id(parameter) not in there]
        if gone:
            raise RuntimeError(
                f"parameters must be the module's as long as MainGrads has them, but {gone[0]} is another one by now: make "
                "MainGrads after what replaces parameters. Under fully_shard leave it away, gradients come in .grad there"
            )
        self._complete = ModuleTree(module, set(self._bucket_of))

    def close(self) -> None:
        """Take hooks and main_grad from the parameters."""
        self._wait()
        self._finalizer()

    # ---- gradients come ----

    def _arrived(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[id(parameter)]
        # Autograd orders its hooks' streams before what follows the backward, but gradients that ops added it knows nothing of.
        bucket.wait_for_gradients()
        bucket.note_stream()
        if self._accumulating:
            if self._next:
                self._late.append(parameter)
                raise RuntimeError(_late(self._name(parameter), "the step's reductions had begun"))
            self._take(parameter)
            return
        if capturing(parameter):
            raise RuntimeError(
                f"{self._name(parameter)}'s gradient must be captured in `with main_grads.accumulate():`, but was outside of it: "
                "a CUDA graph's replay calls no hooks, which count gradients and start reductions"
            )
        if bucket.index < self._next or id(parameter) not in bucket.missing:
            self._late.append(parameter)
            self.check_open(parameter)
            raise RuntimeError(_late(self._name(parameter), "another one's outside of accumulate()"))
        self._take(parameter)
        bucket.missing.discard(id(parameter))
        if not bucket.missing:
            self._start_full()

    def _take(self, parameter: Any) -> None:
        """Add `.grad` to main_grad. The flag does not say that there is none: a tied weight's may be another op's."""
        grad = parameter.grad
        parameter.grad_added_to_main_grad = False
        if grad is None:
            return
        parameter.grad = None
        if not is_placeholder(grad):
            grad = grad.detach()  # under create_graph it has a graph
            if grad.is_sparse:
                ready(parameter.main_grad).add_(grad.to(self.dtype))
            else:
                add_gradient(parameter.main_grad, grad, None)

    def added_here(self, parameter: Tensor) -> None:
        """A gradient of it is added on the current stream: its hook, reductions and `finish` wait for that."""
        self._bucket_of[id(parameter)].note_stream()

    def _start_full(self) -> None:
        for bucket in self.buckets[self._next :]:
            if bucket.missing or bucket.held:
                return
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        self._next = bucket.index + 1
        if self.group is None:
            return
        bucket.wait_for_gradients()
        ready(bucket.flat)
        op = dist.ReduceOp.SUM
        if self._average and bucket.flat.is_cuda and "cuda:nccl" in dist.get_backend_config(self.group):
            op = dist.ReduceOp.AVG  # NCCL divides while it reads, before it adds
        elif self._average:
            bucket.flat.div_(self.ranks)
        if self.shard:
            # PyTorch 2.13 has another name for it, and warns at the one before
            reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            bucket.work = reduce_scatter(bucket.mine, bucket.flat, op, self.group, async_op=True)
        else:
            bucket.work = dist.all_reduce(bucket.flat, op, self.group, async_op=True)

    def _wait(self) -> None:
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    # ---- for gradients that come after backward ----

    def check_open(self, parameter: Tensor) -> None:
        """Raise where the reduction of the parameter's bucket has begun, so that adding to main_grad would lose a gradient."""
        if self._bucket_of[id(parameter)].index < self._next:
            raise RuntimeError(_late(self._name(parameter), "the reduction of its bucket had begun"))

    def hold(self, parameter: Tensor) -> None:
        """The parameter's bucket is to wait for `unhold`: a gradient of it is kept for later. Raises where it is too late."""
        self.check_open(parameter)
        self._bucket_of[id(parameter)].held.add(id(parameter))

    def unhold(self, parameter: Tensor) -> None:
        """All that was kept for later is in main_grad: the bucket's reduction starts, where nothing else is missing."""
        self.added_here(parameter)
        self.give_up(parameter)
        self._start_full()

    def give_up(self, parameter: Tensor) -> None:
        """What was kept of the parameter's gradient for later is thrown away."""
        self._bucket_of[id(parameter)].held.discard(id(parameter))

    def _check_none_held(self, what: str, otherwise: str = "") -> None:
        for bucket in self.buckets:
            for place in bucket.places:
                if id(place.parameter) in bucket.held:
                    said = f"flush them first{', ' + otherwise if otherwise else ''}"
                    raise RuntimeError(f"{what} must come after all gradients, but {place.name}'s are deferred: {said}")

    def _name(self, parameter: Tensor) -> str:
        return next(place.name for place in self._bucket_of[id(parameter)].places if place.parameter is parameter)

    # ---- the whole gradient ----

    @torch.no_grad()
    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole gradient, over shards, tp_group and pp_group too, in fp32. The CPU does not wait for it."""
        self.check_finished("norm()")
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive, but is {norm_type}")
        device, all_count = self.buffers[0].device, self.tp_group is None or self.tp_group.rank() == 0
        if all_count and device.type == "cuda" and not self.shard:  # foreach would have a launch for every 20 million numbers
            each = [torch.linalg.vector_norm(buffer, norm_type, dtype=torch.float32) for buffer in self.buffers]
        else:
            parts = [bucket.mine for bucket in self.buckets] if all_count else self._parts_of_this_rank()
            each = list(torch._foreach_norm(parts, norm_type, dtype=torch.float32)) if parts else []
        total = torch.stack([*(norm.to(device) for norm in each), torch.zeros((), device=device)])
        for group in (self.group if self.shard else None, self.tp_group, self.pp_group):
            # norms of norms, gathered: nothing overflows as a square would, and a maximum keeps NaN
            total = start_all_gather(torch.linalg.vector_norm(total, norm_type).view(1), group).wait()
        whole: Tensor = torch.linalg.vector_norm(total, norm_type)
        return whole

    def _parts_of_this_rank(self) -> list[Tensor]:
        """Of parameters that other tensor-parallel ranks don't have too."""
        return [
            bucket.flat[start:stop]
            for bucket in self.buckets
            for place, start, stop in bucket.parts()
            if getattr(place.parameter, "tensor_model_parallel", False)
        ]

    @torch.no_grad()
    def clip_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradient to a norm of at most max_norm, as torch.nn.utils.clip_grad_norm_ does; the norm it had."""
        self.check_finished("clip_()")
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be 0 or more, but is {max_norm}")
        total = self.norm(norm_type)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for bucket in self.buckets:  # and not what lies between parameters, which would stay NaN
            parts = [bucket.flat[start:stop] for _, start, stop in bucket.parts()]
            if parts:
                torch._foreach_mul_(parts, factor.to(bucket.flat.device))
        return total

    def check_finished(self, what: str) -> None:
        """Raise where gradients are not whole yet, or where a CUDA graph would take them to lie here at every replay."""
        if not self._finished:
            raise RuntimeError(f"{what} must come after finish(), which this step's gradients have not seen")
        for buffer in self._released:
            buffer.check_no_capture()


# ---- what parameters carry and call ----


class _Owner(weakref.ref["MainGrads"]):
    """Of a parameter's main_grad. Not to be pickled with a parameter: nor would its buffer be, which is a step's."""

    __slots__ = ()

    def added_here(self, parameter: Tensor) -> None:
        main_grads = self()
        if main_grads is not None:
            main_grads.added_here(parameter)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a module can't be saved or sent whole while MainGrads has its parameters: save its state_dict(), or close() before"
        )


def _arrived(owner: weakref.ref[MainGrads], parameter: Tensor) -> None:
    main_grads = owner()
    if main_grads is not None:
        main_grads._arrived(parameter)


def _let_go(parameters: list[Any], handles: list[Any], released: list[ReleasedBuffer]) -> None:
    for handle in handles:
        handle.remove()
    for buffer in released:
        buffer.forget()
    for parameter in parameters:
        for name in ("main_grad", "main_grads", "grad_added_to_main_grad"):
            parameter.__dict__.pop(name, None)


def _late(name: str, after: str) -> str:
    return (
        f"{name} must get its gradients before the step's reductions, but got one after {after}: run every backward but the "
        "last in `with main_grads.accumulate():`, flush deferred gradients before finish(), begin the next step with zero_()"
    )
