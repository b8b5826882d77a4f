"""Flat gradient buffers over a model's parameters, reduced over the data-parallel ranks while backward still runs.

Every trainable parameter gets `main_grad`, a view of a flat buffer. The last parameters of the model lie first, roughly the order
in which gradients come, and the buffer is cut into buckets. A bucket's reduction starts when all its gradients of the last
microbatch have come. Buckets are reduced in the same order on all ranks: a full one waits for those before it. `finish` starts
the rest, so a parameter without a gradient, on one rank or on all, blocks nobody.

A gradient gets into main_grad in one of three ways:
- An op of onepass adds it there (`onepass.gradients.main_grad`) and gives autograd None: the parameter's hook still runs.
- Another op's comes as `.grad`: the parameter's hook adds it in main_grad's type and sets `.grad` to None.
- A caller puts it in `.grad`, as zero-bubble schedules do: the next hook or `finish` adds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.distributed.collectives import group_of_several
from onepass.gradients.buckets import (
    BUCKET_BYTES,
    RELEASED_BYTES,
    TYPES,
    Bucket,
    BucketSlice,
    check_agreement,
    check_alike,
    check_parameter,
    named_parameters,
    plan_buckets,
    plan_buffers,
    size_of,
)
from onepass.gradients.gradient_norm import gradient_norm, scale_gradient
from onepass.gradients.main_grad import add_gradient, is_capturing, is_placeholder
from onepass.gradients.module_tree import ModuleTree
from onepass.gradients.packed_params import releasable_buffers
from onepass.gradients.parameter_hooks import ParameterHooks
from onepass.gradients.releasable_storage import ReleasableBuffer, buffer_of, ensure_written
from onepass.runtime.cuda_graph import current_step
from onepass.runtime.moved import renamed
from onepass.runtime.process_setting import validating


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
            optimizer.step()                    # `AdamW`, `MasterWeights`, or one with `reads_main_grad = True`

    `requires_grad_` may be called at any time, alike on all ranks. A step trains those that require a gradient in its `finish`,
    and the others stand still. A frozen parameter gets memory in the first `zero_` or `finish` after it is unfrozen.

    All ranks must start with the same weights; nothing is broadcast. A parameter's gradient comes once in a backward, also where
    it is tied or its layer is used several times. Reentrant checkpointing runs backwards within the backward: there it comes once
    for each of them, which raises. Keep a reference to the object: its collection is a `close`.

    Capture a CUDA graph of a whole backward in `accumulate`. Each replay is a microbatch, and must come before the last backward
    or before `finish`. Modules from torch.cuda.make_graphed_callables need nothing special (`onepass.graphed`), nor does a step
    that is captured as a whole (`onepass.graphed_step`).

    Args:
        parameters: a module, parameters, or pairs of a name and a parameter, in an order that is the same on all ranks. Frozen
            ones take no memory. Packed ones (`onepass.gradients.packed_params`), on all ranks or on none, get packed main_grads.
        group: the data-parallel ranks; None is all of them. With one rank, or torch.distributed not initialised, nothing is sent.
        dtype: of the buffers, and of the sums over microbatches and over ranks: a 16-bit type rounds each of these sums.
        bucket_bytes: a bucket's size. A larger parameter, or larger packed parameters, have a bucket of their own.
        shard: reduce-scatter instead of all-reduce (ZeRO-1). After `finish` main_grad is valid in this rank's part of each
            bucket (`Bucket.mine`) and undefined elsewhere.
        average: divide by the number of ranks, before the sum.
        release: give the buffers' memory to activations between steps. It comes with a step's first gradients and goes with
            `zero_`, or with a step of `AdamW` with zero=True. Read main_grad after `finish` or `fill_` only. Before that nobody
            else may read it or add to it: the access crashes, or finds something else. No CUDA graph may add to it or step by it.
        tp_group: the tensor-parallel ranks, for `norm` and `clip_`. Parameters with a true `tensor_model_parallel` differ from
            rank to rank and count on each; the others count on the group's rank 0.
        pp_group: the stages of a pipeline, for `norm` and `clip_`: each has parameters of its own.
    """

    advice = "use onepass.parallel.AdamW(main_grads), or MasterWeights(main_grads, ...) around any torch optimizer"  # in errors

    def __init__(
        self,
        parameters: nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        *,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = BUCKET_BYTES,
        shard: bool = False,
        average: bool = True,
        release: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        pp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.given: list[tuple[str, Any]] = named_parameters(parameters)
        if dtype not in TYPES:
            raise TypeError(f"dtype must be torch.float32, torch.float16 or torch.bfloat16, but is {dtype!r}")
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, but is {bucket_bytes}")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group, self.tp_group = group_of_several(group), group_of_several(tp_group, "tp_group")
        self.pp_group = group_of_several(pp_group, "pp_group")
        self.ranks = 1 if self.group is None else self.group.size()
        self.dtype, self.shard, self.releases = dtype, shard and self.ranks > 1, release
        self._module = weakref.ref(parameters) if isinstance(parameters, nn.Module) else lambda: None
        self._complete: ModuleTree | None = None  # of the module, when it had all parameters
        self._limit = bucket_bytes // dtype.itemsize
        self._average = average and self.ranks > 1
        self.named: list[tuple[str, Any]] = []  # those with a main_grad: what was trainable at one time
        self.trained = {id(parameter) for _, parameter in self.given if parameter.requires_grad}  # as of the last `finish`
        self.buffers: list[Tensor] = []
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._released: list[ReleasableBuffer] = []
        self._hooks = ParameterHooks(self, self._released)
        self._accumulating = False
        self._clear: list[int] | None = None  # the buffers' versions when an optimizer left zeros in them
        self._add_buckets(self._unplaced())
        self.begun = 0  # steps
        self._stepper: Callable[[], Callable[[Bucket], None] | None] = lambda: None
        self._open()
        if release:
            self._give_back()

    @property
    def module(self) -> nn.Module | None:
        """The module whose parameters these are, if it was given and lives."""
        return self._module()

    # ---- layout ----

    def _unplaced(self) -> list[tuple[str, Any]]:
        """Return trainable parameters without a main_grad."""
        unplaced = [(name, p) for name, p in self.given if p.requires_grad and id(p) not in self._bucket_of]
        for name, parameter in unplaced:
            check_parameter(name, parameter)
        return unplaced

    def follow(self) -> None:
        """Give main_grads to parameters that were unfrozen since. Raises where a parameter has lost its own."""
        if not self._hooks.remove.alive:  # closed
            return
        for name, parameter in self.named:
            if "main_grads" not in parameter.__dict__:
                raise RuntimeError(
                    f"parameters must stay the same tensors, but {name} was swapped for another, as by torch.utils.swap_tensors: "
                    "close() this MainGrads, and make it and its optimizer anew"
                )
        if validating() and self.group is not None:  # before memory is given: the ranks agree on that, too
            trained = [name for name, parameter in self.given if parameter.requires_grad]
            check_alike("parameters that require a gradient", trained, self.group)
        unplaced = self._unplaced()
        if unplaced:
            if is_capturing(self.buffers[0]):
                raise RuntimeError(f"{unplaced[0][0]} must be unfrozen before a capture, as its gradient needs memory")
            self._add_buckets(unplaced)

    def _add_buckets(self, named: list[tuple[str, Any]]) -> None:
        """Lay the parameters' gradients in new buckets, behind those that are there."""
        planned = plan_buckets(named, self._limit)
        if validating() and self.group is not None:
            check_agreement(planned, f"dtype {self.dtype} and shard {self.shard}", self.group)
        buffers, buckets = self._allocate(planned)
        self.named += named
        self.buffers += buffers
        self.buckets += buckets
        self._complete = None
        for bucket in buckets:
            for place in bucket.places:
                self._bucket_of[id(place.parameter)] = bucket
                self._hooks.attach(place.parameter, bucket.flat[place.start : place.stop].view(place.parameter.shape))
        if self.releases:
            main_grads = [place.parameter.main_grad for bucket in buckets for place in bucket.places]
            self._released += releasable_buffers(buffers, main_grads, [parameter for _, parameter in named])

    def _allocate(self, planned: list[list[BucketSlice]]) -> tuple[list[Tensor], list[Bucket]]:
        """Allocate one buffer for each device and type of parameters, as weights are gathered in their own type. With `release`
        there are several, each of which gets its memory by itself."""
        sizes = [size_of(places, self.ranks) for places in planned]
        keys = plan_buffers(planned, sizes, RELEASED_BYTES // self.dtype.itemsize if self.releases else None)
        totals = dict.fromkeys(keys, 0)
        for key, size in zip(keys, sizes, strict=True):
            totals[key] += size
        buffers = {key: torch.zeros(total, dtype=self.dtype, device=key[0]) for key, total in totals.items()}
        rest = dict(buffers)
        buckets = []
        for index, (places, key, size) in enumerate(zip(planned, keys, sizes, strict=True), len(self.buckets)):
            flat, rest[key] = rest[key][:size], rest[key][size:]
            first, length = 0, size
            if self.shard:
                assert self.group is not None
                length = size // self.ranks
                first = self.group.rank() * length
            buckets.append(Bucket(index, places, flat, flat[first : first + length], first))
        return list(buffers.values()), buckets

    # ---- a step ----

    def zero_(self) -> None:
        """Begin a step: clear buffers, `.grad` and flags. After `mark_zeroed` the buffers are not cleared again."""
        self._check_none_held("zero_()", "or clear() what is deferred")
        self._wait()
        self.follow()
        if self.releases:
            self._give_back()
        elif is_capturing(self.buffers[0]) or self._clear != [buffer._version for buffer in self.buffers]:
            for buffer in self.buffers:
                buffer.zero_()
        elif self.shard:
            torch._foreach_zero_([part for bucket in self.buckets for part in bucket.others()])
        self._open()

    def mark_zeroed(self) -> None:
        """Tell MainGrads that the optimizer left zeros in this rank's parts (`Bucket.mine`); with release, anything."""
        self._finished = False
        if self.releases:
            self._give_back()
        else:
            self._clear = [buffer._version for buffer in self.buffers]

    cleared = renamed("cleared", mark_zeroed)

    def _give_back(self) -> None:
        for bucket in self.buckets:
            bucket.wait_for_gradients()
        for released in self._released:
            released.release()

    def fill_(self) -> None:
        """With `release`, allocate all memory now, with zeros where there is no gradient. Call it before reading main_grad."""
        for buffer in self.buffers:
            ensure_written(buffer)

    @contextmanager
    def filled(self, buckets: Iterable[Bucket]) -> Iterator[None]:
        """Have buckets' memory in the block, so that views can be made; release what had none before."""
        empty = [bucket for bucket in buckets if (each := buffer_of(bucket.flat)) is not None and not each.has_memory]
        for bucket in empty:
            ensure_written(bucket.flat)
        try:
            yield
        finally:
            self.give_back(empty)

    def _open(self) -> None:
        self.begun += 1
        self._next = 0  # the first bucket whose reduction has not begun
        self._overdue: list[Tensor] = []  # parameters whose gradients came after their reduction began
        self._finished = False
        self._clear = None
        for bucket in self.buckets:
            bucket.expect_all()
            bucket.held.clear()
            bucket.streams.clear()
            for place in bucket.places:
                place.parameter.grad = None
                place.parameter.grad_added_to_main_grad = False

    def step_by(self, step: Callable[[Bucket], None] | None) -> None:
        """Give each bucket to an optimizer's method, held weakly, as soon as its gradients are whole. None: to nobody."""
        if step is None:
            self._stepper = lambda: None
            return
        if self.group is not None or self.tp_group is not None or self.pp_group is not None:
            raise ValueError("in_backward is for one rank, but main_grads has groups of several: leave in_backward False")
        if not self.releases:
            raise ValueError("in_backward needs gradients whose memory can be given back: make MainGrads(..., release=True)")
        self._stepper = weakref.WeakMethod(step)

    def give_back(self, buckets: Iterable[Bucket]) -> None:
        """Free the memory of released buckets before the step's end."""
        for buffer in {id(each): each for bucket in buckets if (each := buffer_of(bucket.flat)) is not None}.values():
            buffer.release()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Start no reduction in this block: its backwards are not the last microbatch's (DDP's `no_sync`)."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def finish(self) -> None:
        """Start the remaining reductions, and wait for all. On a GPU the current stream waits, not the CPU."""
        self._check_still_there()
        for parameter in self._overdue:
            self.check_open(parameter)
        for bucket in self.buckets:
            for place in bucket.places:
                if place.parameter.grad is not None:
                    self.check_open(place.parameter)
        self._check_none_held("finish()")
        self._choose_trained()
        for bucket in self.buckets[self._next :]:
            for place in bucket.places:
                self._take(place.parameter)
            self._start(bucket)
        self._wait()
        for bucket in self.buckets:
            bucket.wait_for_gradients()
        self._finished = True
        if self._stepper() is not None:  # and has freed the memory
            return
        self.fill_()
        frozen = [parameter.main_grad for _, parameter in self.named if id(parameter) not in self.trained]
        if frozen:  # as of a backward before it was frozen: neither a norm nor the next step is to have it
            torch._foreach_zero_(frozen)

    def _choose_trained(self) -> None:
        """Take those parameters into the step that require a gradient now."""
        self.follow()
        self.note_trained()
        if (step := current_step()) is not None:
            step.given += [parameter for _, parameter in self.given]

    def note_trained(self) -> None:
        self.trained = {id(parameter) for _, parameter in self.named if parameter.requires_grad}

    def _check_still_there(self) -> None:
        """Raise where the module's parameters were replaced, as fully_shard does: the new ones' gradients go elsewhere."""
        module = self._module()
        if module is None or (self._complete is not None and self._complete.is_unchanged()):
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
        """Remove hooks and main_grad from the parameters."""
        self._wait()
        self._hooks.remove()

    # ---- gradients come ----

    def _on_gradient(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[id(parameter)]
        # Autograd synchronises its hooks' streams with what follows the backward, but not streams on which ops added gradients.
        bucket.wait_for_gradients()
        bucket.note_stream()
        if self._accumulating:
            if bucket.closed or self._next:
                self._overdue.append(parameter)
                raise RuntimeError(_reject_overdue(self._name(parameter), "the step's reductions had begun"))
            self._take(parameter)
            return
        if is_capturing(parameter) and current_step() is None:
            raise RuntimeError(
                f"{self._name(parameter)}'s gradient must be captured in `with main_grads.accumulate():`, but was outside of it: "
                "a CUDA graph's replay calls no hooks, which count gradients and start reductions"
            )
        if bucket.closed or id(parameter) not in bucket.missing:
            self._overdue.append(parameter)
            self.check_open(parameter)
            raise RuntimeError(_reject_overdue(self._name(parameter), "another one's outside of accumulate()"))
        self._take(parameter)
        del bucket.missing[id(parameter)]
        self._start_full(bucket)

    def _take(self, parameter: Any) -> None:
        """Add `.grad` to main_grad. The flag does not exclude a `.grad`: another op of a tied weight may have made it."""
        grad = parameter.grad
        parameter.grad_added_to_main_grad = False
        if grad is None:
            return
        parameter.grad = None
        if not is_placeholder(grad):
            grad = grad.detach()  # create_graph gives it a graph
            if grad.is_sparse:
                ensure_written(parameter.main_grad).add_(grad.to(self.dtype))
            else:
                add_gradient(parameter.main_grad, grad, None)

    def added_here(self, parameter: Tensor) -> None:
        """Note that the current stream adds the parameter's gradient: its hook, reductions and `finish` wait for the stream."""
        self._bucket_of[id(parameter)].note_stream()

    def _start_full(self, come: Bucket) -> None:
        """Start the reductions of full buckets, in order, or step the one that a gradient has come to."""
        if self._stepper() is not None:
            if come.is_full():
                self._start(come)
            return
        for bucket in self.buckets[self._next :]:
            if not bucket.is_full():
                return
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        bucket.closed = True
        if (step := self._stepper()) is not None:
            bucket.wait_for_gradients()
            step(bucket)
            return
        self._next = bucket.index + 1
        if self.group is None:
            return
        bucket.wait_for_gradients()
        ensure_written(bucket.flat)
        op = dist.ReduceOp.SUM
        if self._average and bucket.flat.is_cuda and "cuda:nccl" in dist.get_backend_config(self.group):
            op = dist.ReduceOp.AVG  # NCCL divides as it reads, before it adds
        elif self._average:
            bucket.flat.div_(self.ranks)
        if self.shard:
            # PyTorch 2.13 renames it, and warns at the old name
            reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            bucket.work = reduce_scatter(bucket.mine, bucket.flat, op, self.group, async_op=True)
        else:
            bucket.work = dist.all_reduce(bucket.flat, op, self.group, async_op=True)

    def _wait(self) -> None:
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    # ---- deferred gradients ----

    def check_open(self, parameter: Tensor) -> None:
        """Raise where the reduction of the parameter's bucket has begun: adding to main_grad would lose a gradient."""
        if self._bucket_of[id(parameter)].closed:
            raise RuntimeError(_reject_overdue(self._name(parameter), "the reduction of its bucket had begun"))

    def hold(self, parameter: Tensor) -> None:
        """Make the parameter's bucket wait for `unhold`, as a gradient is deferred. Raises where its reduction has begun."""
        self.check_open(parameter)
        self._bucket_of[id(parameter)].held.add(id(parameter))

    def unhold(self, parameter: Tensor) -> None:
        """Note that the deferred gradients are in main_grad, and start the bucket's reduction where nothing is missing."""
        self.added_here(parameter)
        self.give_up(parameter)
        self._start_full(self._bucket_of[id(parameter)])

    def give_up(self, parameter: Tensor) -> None:
        """Note that the parameter's deferred gradients were discarded."""
        self._bucket_of[id(parameter)].held.discard(id(parameter))

    def _check_none_held(self, what: str, otherwise: str = "") -> None:
        for bucket in self.buckets:
            for place in bucket.places:
                if id(place.parameter) in bucket.held:
                    advice = f"flush them first{', ' + otherwise if otherwise else ''}"
                    raise RuntimeError(f"{what} must come after all gradients, but {place.name}'s are deferred: {advice}")

    def _name(self, parameter: Tensor) -> str:
        return next(place.name for place in self._bucket_of[id(parameter)].places if place.parameter is parameter)

    # ---- the whole gradient ----

    @torch.no_grad()
    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole gradient, over shards, tp_group and pp_group, in fp32. The CPU does not wait."""
        self.check_finished("norm()")
        if self._stepper() is not None:
            raise RuntimeError("norm() has no gradients where they were stepped in backward: the optimizer's step() returns it")
        return gradient_norm(self, norm_type)

    @torch.no_grad()
    def clip_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradient to a norm of at most max_norm, as `torch.nn.utils.clip_grad_norm_` does. Return its norm before."""
        self.check_finished("clip_()")
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be 0 or more, but is {max_norm}")
        total = self.norm(norm_type)
        scale_gradient(self, (max_norm / (total + 1e-6)).clamp(max=1.0))
        return total

    def check_finished(self, what: str) -> None:
        """Raise where `finish` has not run, or where a CUDA graph would record the addresses of releasable memory."""
        if not self._finished:
            raise RuntimeError(f"{what} must come after finish(), which this step's gradients have not seen")
        for buffer in self._released:
            buffer.check_no_capture()


def _reject_overdue(name: str, after: str) -> str:
    return (
        f"{name} must get its gradients before the step's reductions, but got one after {after}: run every backward but the "
        "last in `with main_grads.accumulate():`, flush deferred gradients before finish(), begin the next step with zero_()"
    )
