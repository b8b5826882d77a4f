"""AdamW over `MainGrads` in one pass: each gradient, moment and weight is read once and written once.

    the weights     what is kept beside exp_avg and exp_avg_sq, fp32        bytes moved a parameter, the gradient cleared
    bf16            16 more bits of an fp32 master (`gradients/adamw_formula.py`)         32
    fp16            an fp32 master                                                      36
    fp32            nothing                                                             32

In 8 bits moments are codes, and a step moves 20 bytes for 32. State lies in flat memory, as gradients do. With shard it covers
this rank's parts only, and the weights are gathered. One launch for each type of weights steps all of them, by a table of
addresses that is made once. In backward, or with state in the host's memory, each 64 million numbers or so have launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onepass.gradients.adamw_state import (
    LOW,
    MASTER,
    MOMENTS,
    SCALES,
    TYPES,
    Moments,
    ParameterState,
    Types,
    allocate_state,
    check_state,
    embeddings_of,
    state_types,
    take_moments,
)
from onepass.gradients.adamw_stepper import AdamWStepper, check_max_norm, check_options
from onepass.gradients.buckets import Bucket
from onepass.gradients.eight_bits import BLOCK
from onepass.gradients.gathered_weights import (
    GatheredWeights,
    bump_version,
    check_fp32,
    check_groups,
    check_shard,
    parameter_groups,
    shard_of,
)
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.offloaded_state import StateRings
from onepass.gradients.optimizer_state import check_sizes, loading, set_options, states_of
from onepass.gradients.releasable_storage import storage_id
from onepass.gradients.step_in_backward import BucketSteps, StepInBackward, how_in_backward, take_norm, with_norm
from onepass.kernels.device_tables import is_capturing

KINDS = (MASTER, *MOMENTS)
State = tuple[str, str, Tensor, int, int]  # what `masters` yields
_BESIDE: dict[torch.dtype, Types] = {torch.bfloat16: {LOW: torch.int16}, torch.float16: {MASTER: torch.float32}}  # the weights


@dataclass(eq=False)
class _ParameterShard:
    """The part of a parameter that this rank steps."""

    name: str
    parameter: Tensor
    start: int  # where in the flattened parameter it begins
    state: ParameterState
    grads: list[Tensor]  # of each of the state's slices

    @property
    def stop(self) -> int:
        return self.start + self.state.weight.numel()


class _LaidParameter(NamedTuple):
    """Where a part of a parameter and of its gradient lies."""

    name: str
    parameter: Tensor
    weight: Tensor
    grad: Tensor
    start: int  # in the flattened parameter
    in_blocks: bool  # whether its blocks are the parameter's


class _SteppedBuckets:
    """Buckets that are stepped together, of one device in backward."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.pieces: list[_ParameterShard] = []
        self.steppers: dict[torch.device, AdamWStepper] = {}


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW over the parameters of a `MainGrads`, with fp32 masters of bf16 and fp16 weights, in one pass.

        optimizer = AdamW(main_grads, lr=1e-3)
        ...
        main_grads.finish()
        norm = optimizer.step(max_norm=1.0, zero=True)
        main_grads.zero_()                                  # the buffers are clear already

    It is a torch optimizer: schedulers set the groups' options, which may change at every step. A learning rate may be a tensor,
    which a CUDA graph's replays read. With `MainGrads(shard=True)` a rank keeps masters and state of its part, and `step`,
    `publish` and `load_state_dict` are collective.

    As by torch.optim.AdamW, a frozen parameter stands still, one that is unfrozen later trains, and each counts its own steps.
    Weights may be written by others: the next step starts from them. The low bits of a bf16 weight's master stay, at most
    half a unit in its last place; `reload` drops them.

    Args:
        main_grads: of fp32, with the parameters to be trained.
        groups: the model's parameters in groups with options, as for torch.optim: `{"params": [...], "weight_decay": 0.0}`.
            Each parameter of main_grads is in one. None is one group of all.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; defaults for groups without them.
        moments: ``fp32``, ``bf16`` or ``8bit``. A group may have its own. In 8 bits are matrices of a multiple of 256 numbers.
            Others have fp32 then, and so have embeddings where main_grads was given a module.
        in_backward: step weights in backward, as soon as the gradients of their part are whole, and give the part's memory back.
            `StepInBackward` clips. `step` ends the step then. For one rank, and `MainGrads(release=True)`.
        offload: ``state`` keeps masters' bits and moments in the host's memory. They pass through the device part by part.
    """

    reads_main_grad = True

    def __init__(
        self,
        main_grads: MainGrads,
        groups: Iterable[Mapping[str, Any]] | None = None,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: Moments = "fp32",
        in_backward: bool | StepInBackward = False,
        offload: Literal["state"] | None = None,
    ) -> None:
        check_fp32(main_grads)
        self._rings = StateRings(offload)
        in_groups = parameter_groups(main_grads, groups)
        self._main_grads, self._made = main_grads, False
        early = how_in_backward(in_backward)
        self._moments = self._kinds(in_groups, moments)
        self._laid = 0  # buckets whose parameters have state
        self._where: list[tuple[int, bool, bool]] = []  # the parameters' addresses, and which are trained
        super().__init__(in_groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._made = True
        for group in self.param_groups:
            check_options(group)
        self._row_of = {id(parameter): row for row, parameter in enumerate(self._parameters())}
        self._parts: list[_SteppedBuckets] = []
        self._part_of: dict[int, _SteppedBuckets] = {}  # by buckets' indices
        main_grads.step_by(None)  # whoever did before
        self.backward_steps = BucketSteps(main_grads, self, early) if early else None
        with torch.no_grad():
            self._gathered = GatheredWeights(main_grads) if main_grads.shard else None
            self._follow()

    def _kinds(self, groups: list[dict[str, Any]], moments: str) -> dict[Tensor, str | None]:
        """Return each parameter's kind of moments. Embeddings have fp32 for 8 bits, but where their group says otherwise."""
        embeddings = embeddings_of(self._main_grads.module) if moments == "8bit" else set()
        named = [group for group in groups if "moments" in group]
        own = take_moments(named, None, TYPES)
        found = take_moments(groups, moments, TYPES)
        return found | dict.fromkeys(embeddings & {*found}, "fp32") | own

    def _add_state(self, buckets: list[Bucket]) -> None:
        """Allocate state for the parameters of buckets that are new."""
        if self._gathered:
            self._gathered.extend()
        parts = [_SteppedBuckets(some) for some in self._divided(buckets)]
        for part in parts:
            with self._main_grads.filled(part.buckets):
                self._allocate(part)
        self._reload(piece for part in parts for piece in part.pieces)
        for part in parts:
            for piece in part.pieces:
                self.state[piece.parameter] = self._state_of(part, piece)
        self._parts += parts
        self._part_of |= {bucket.index: part for part in parts for bucket in part.buckets}
        if self._gathered:
            self._gathered.lay()

    def _allocate(self, part: _SteppedBuckets) -> None:
        """Allocate state for the gradients of a part that this rank reduces."""
        for device in dict.fromkeys(bucket.flat.device for bucket in part.buckets):
            places = [place for each in part.buckets if each.flat.device == device for place in self._places_in(each)]
            wanted = [(place.weight.numel(), self._types_of(place)) for place in places]
            part.steppers[device] = AdamWStepper(device, self.param_groups)
            for place, (stored, passed) in zip(places, allocate_state(device, wanted, self._rings.of(device)), strict=True):
                row = self._row_of[id(place.parameter)]
                state = ParameterState(place.weight, stored, row, device, place.start, passed)
                part.pieces.append(_ParameterShard(*place[:2], place.start, state, state.grads_of(place.grad)))

    def _divided(self, buckets: list[Bucket]) -> list[list[Bucket]]:
        """Divide buckets into those that are stepped together: all, or in backward those of a buffer."""
        if self.backward_steps is None:
            return [buckets]
        keys = [storage_id(bucket.flat) for bucket in buckets]
        return [[bucket for bucket, other in zip(buckets, keys, strict=True) if other == key] for key in dict.fromkeys(keys)]

    def _places_in(self, bucket: Bucket) -> Iterator[_LaidParameter]:
        for place, start, stop in bucket.parts():
            weight = self._gathered.flat[bucket.index][start:stop] if self._gathered else _flat(place.name, place.parameter)
            in_blocks = not self._gathered or not place.start % BLOCK
            yield _LaidParameter(place.name, place.parameter, weight, bucket.flat[start:stop], start - place.start, in_blocks)

    def _types_of(self, place: _LaidParameter) -> Types:
        parameter, moments = place.parameter, TYPES[self._moments[place.parameter] or ""]
        if moments is torch.int8 and (parameter.dim() < 2 or parameter.numel() % BLOCK or not place.in_blocks):
            moments = torch.float32
        return state_types(moments, _BESIDE.get(parameter.dtype, {}))

    def _state_of(self, part: _SteppedBuckets, piece: _ParameterShard) -> dict[str, Tensor]:
        """Return the state of torch's AdamW, in the parameter's shape, and what is kept beside the weight. One-dimensional with
        shard."""
        shape = piece.parameter.shape
        rows = (*shape[:-1], shape[-1] // BLOCK) if shape and not shape[-1] % BLOCK else (-1,)
        shapes = {name: (-1,) if self._gathered else rows if name in SCALES else shape for name in piece.state.stored}
        step = part.steppers[piece.state.device].counts[piece.state.row]
        return {"step": step, **{name: each.view(shapes[name]) for name, each in piece.state.stored.items()}}

    # ---- a step ----

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, max_norm: float | None = None, *, zero: bool = False, norm: Tensor | None = None
    ) -> Tensor | None:
        """Step the weights. `main_grads.finish()` comes before, `main_grads.zero_()` after. With in_backward the weights are
        stepped already, and the norm is returned where `StepInBackward` has a max_norm.

        Args:
            max_norm: step by the gradient scaled to a norm of at most this, as `main_grads.clip_` scales it. The buffers keep it
                unscaled. The norm before is returned, a tensor on the device. None scales nothing and returns None.
            zero: clear the buffers in the same pass; those of `MainGrads(release=True)` free their memory.
            norm: what `main_grads.norm()` returned, if it was called already.
        """
        main_grads = self._main_grads
        main_grads.check_finished("step()")
        check_max_norm(max_norm)
        if self.backward_steps is not None:
            if max_norm is not None or norm is not None:
                raise ValueError("max_norm must be given as StepInBackward(max_norm=...), as backward has stepped already")
            main_grads.mark_zeroed()
            return self.backward_steps.finish()
        self._follow()
        if max_norm is None:
            norm = None
        elif norm is None:
            norm = main_grads.norm()
        for part in self._parts:
            self._run(part, norm, max_norm, zero and not main_grads.releases)
        if zero and not self._captures():  # a capture has cleared nothing yet
            main_grads.mark_zeroed()
        self.publish()
        return norm

    def _run(self, part: _SteppedBuckets, norm: Tensor | None, max_norm: float | None, zero: bool) -> None:
        for stepper in part.steppers.values():
            stepper.run(self.param_groups, norm, max_norm, zero)

    @torch.no_grad()
    def step_buckets(self, buckets: list[Bucket], norm: Tensor | None, max_norm: float | None) -> None:
        """Step one part in backward. `BucketSteps` calls it."""
        part = self._part_of[buckets[0].index]
        self._run(part, norm, max_norm, False)
        trained = self._main_grads.trained
        torch.autograd.graph.increment_version([each.parameter for each in part.pieces if id(each.parameter) in trained])

    def follow(self) -> None:
        """Know the parameters that are trained now, and where they lie. `BucketSteps` calls it once a step."""
        self._follow()

    def buckets_with(self, bucket: Bucket) -> list[Bucket]:
        """Return the buckets that are stepped with this one in backward."""
        if bucket.index >= self._laid:  # of a parameter that was unfrozen in this step
            self._follow()
        return self._part_of[bucket.index].buckets

    @property
    def stepped(self) -> list[str]:
        """Names of the parameters that were stepped in backward since the last step(): after an error their weights are new, and
        the others' are old."""
        return [] if self.backward_steps is None else [*self.backward_steps.stepped]

    def passes(self) -> tuple[int, float]:
        """Return the bytes of offloaded state that pass in a step, each way, and the bytes a second of a copy by itself."""
        rings = self._rings.values()
        return sum(ring.bytes for ring in rings), min((ring.rate() for ring in rings), default=0.0)

    def accumulate(self) -> AbstractContextManager[None]:
        """`main_grads.accumulate()`: the microbatches of a step but the last."""
        return self._main_grads.accumulate()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`main_grads.zero_()`."""
        self._main_grads.zero_()

    def _captures(self) -> bool:
        return any(is_capturing(device) for part in self._parts for device in part.steppers)

    def _follow(self) -> None:
        """Make state for what was unfrozen. Make the tables of addresses anew where other parameters are trained than in the last
        step, or where they lie elsewhere, as by `module.to`."""
        buckets, trained = self._main_grads.buckets, self._main_grads.trained
        if self._laid == len(buckets) and self._where == [*self._places()]:
            return
        if self._captures():
            raise RuntimeError(
                "the trained parameters and their places must be the same in a capture as in the last step(), but are others"
            )
        check_groups(self._main_grads, self.param_groups)
        if self._laid < len(buckets):
            self._add_state(buckets[self._laid :])
            self._laid = len(buckets)
        if self._gathered:
            self._gathered.check()
        else:
            for piece in self._pieces():
                if piece.parameter.dtype is not piece.state.weight.dtype:
                    raise RuntimeError(
                        f"parameters must keep the type that they had when their optimizer was made, but {piece.name} was "
                        f"{piece.state.weight.dtype} and is {piece.parameter.dtype}: make it after converting the model"
                    )
                piece.state.weight = _flat(piece.name, piece.parameter)
        for part in self._parts:
            stepped = [piece for piece in part.pieces if id(piece.parameter) in trained]
            for device, stepper in part.steppers.items():
                mine = [piece for piece in stepped if piece.state.device == device]
                stepper.lay(passed for piece in mine for passed in piece.state.slices(piece.grads))
        self._where = [*self._places()]  # with shard new ones have moved

    def _places(self) -> Iterator[tuple[int, bool, bool]]:
        for parameter in self._parameters():
            yield parameter.data_ptr(), parameter.requires_grad, id(parameter) in self._main_grads.trained

    @torch.no_grad()
    def publish(self) -> None:
        """With shard gather the weights, as `step` does. Call it after `set_master`."""
        if self._gathered:
            self._gathered.gather()
        else:
            bump_version(self._main_grads)

    @torch.no_grad()
    def reload(self) -> None:
        """Take the masters from the model's weights again, without bits that the weights don't have."""
        self._rings.settle()
        self._reload(self._pieces())

    def _reload(self, pieces: Iterable[_ParameterShard]) -> None:
        for piece in pieces:
            stored = piece.state.stored
            if LOW in stored:
                stored[LOW].zero_()
            elif MASTER in stored:
                stored[MASTER].copy_(piece.parameter.detach().reshape(-1)[piece.start : piece.stop])

    def _pieces(self) -> Iterator[_ParameterShard]:
        for part in self._parts:
            yield from part.pieces

    # ---- states ----

    def masters(self) -> Iterator[State]:
        """Yield what a checkpoint keeps of this rank: a parameter's name, "master", "exp_avg" or "exp_avg_sq", the fp32 numbers,
        and their start and stop in the flattened parameter. What is not stored in fp32 is a copy, made one at a time; the other
        tensors are those that `step` uses. Write by `set_master`: in place, a copy is lost, and so is the master of an fp16
        weight at the next call, which takes the weight again."""
        self._follow()
        self._rings.settle()
        for piece in self._pieces():
            for kind in KINDS:
                yield piece.name, kind, piece.state.read(kind), piece.start, piece.stop

    def parameter_states(self) -> Iterator[tuple[Tensor, ParameterState, int]]:
        """Yield each parameter that this rank steps, its state, and where in the flattened parameter that begins. Call `publish`
        after writing."""
        self._follow()
        self._rings.settle()
        for piece in self._pieces():
            yield piece.parameter, piece.state, piece.start

    @torch.no_grad()
    def set_master(self, name: str, kind: str, values: Tensor, start: int, stop: int) -> None:
        """Write what `masters` yielded, or a part of it; weights follow their masters. Call `publish` after the last."""
        pieces = [piece for piece in self._pieces() if piece.name == name and piece.start <= start <= stop <= piece.stop]
        if not pieces or kind not in KINDS:
            raise ValueError(
                f"name, kind, start and stop must be of what masters() gives, but are {name}, {kind}, {start}, {stop}"
            )
        if values.numel() != stop - start:
            raise ValueError(f"values must be {stop - start} numbers, but are {values.numel()}")
        self._rings.settle()
        pieces[0].state.write(kind, values, start - pieces[0].start, stop - pieces[0].start)

    @torch.no_grad()
    def set_masters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole fp32 masters by their parameters' names, of which this rank takes what it steps. Unknown names are ignored.
        Weights follow, on all ranks."""
        self._main_grads.follow()
        self._follow()
        self._rings.settle()
        pieces: dict[str, list[_ParameterShard]] = {}
        for piece in self._pieces():
            pieces.setdefault(piece.name, []).append(piece)
        for name, whole in named:
            for piece in pieces.get(name, ()):
                piece.state.write(MASTER, whole.reshape(-1)[piece.start : piece.stop])
        self.publish()

    def set_step(self, step: int) -> None:
        """Set the number of steps made, of parameters that have state. One that is unfrozen later begins anew."""
        for piece in self._pieces():
            self.state[piece.parameter]["step"].fill_(step)

    def state_dict(self) -> dict[str, Any]:
        """Return torch.optim.AdamW's state; with shard this rank's. Beside fp32 moments is each weight in fp32 as "master", a
        copy for bf16. Others have what is kept beside the weight, as `ShardedAdamW` has it."""
        self._rings.settle()
        packed = super().state_dict()
        places = {id(parameter): place for place, parameter in enumerate(self._parameters())}
        for piece in self._pieces():
            state = {**self.state[piece.parameter]}
            state["step"] = state["step"].clone()  # optimizers add to it in place
            if MOMENTS[0] in state and state[MOMENTS[0]].dtype is torch.float32:
                state.pop(LOW, None)
                state[MASTER] = piece.state.read(MASTER).view(state[MOMENTS[0]].shape)
            packed["state"][places[id(piece.parameter)]] = state
        return {**with_norm(packed, self.backward_steps), "shard": shard_of(self._main_grads)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, and write the model's weights by their masters. torch.optim's states have no masters, and fp32 weights
        then stay unchanged. Moments are converted to those that are kept here. Parameters without a state begin anew. A state
        must be of the same rank and number of ranks."""
        self._main_grads.follow()
        self._follow()
        self._rings.settle()
        with loading(self, state_dict) as state:
            check_shard(state, self._main_grads)
            check_sizes(self.param_groups, state["param_groups"])
            found = states_of(self.param_groups, state)
            self._check_states(found)
            set_options(self.param_groups, state["param_groups"])
            take_norm(self.param_groups, self.backward_steps)
            for piece in self._pieces():
                theirs = found.get(piece.parameter, {})  # none: it was not trained
                self.state[piece.parameter]["step"].fill_(theirs.get("step", 0))
                kept = {name: each.reshape(-1) for name, each in theirs.items() if name != "step" and isinstance(each, Tensor)}
                piece.state.load(kept)
            self.publish()

    def _check_states(self, found: Mapping[Tensor, Mapping[str, Any]]) -> None:
        placed = {id(parameter) for _, parameter in self._main_grads.named}
        pieces = {id(piece.parameter): piece for piece in self._pieces()}
        for place, parameter in enumerate(self._parameters()):
            saved, piece = found.get(parameter), pieces.get(id(parameter))
            if saved is not None and id(parameter) not in placed:
                raise ValueError(
                    f"state must be of parameters that were trainable here, but has parameter {place}, which never was: unfreeze "
                    "it before you load the state, then freeze it again"
                )
            if saved is not None and piece is not None:
                shape = (piece.state.weight.numel(),) if self._gathered else tuple(parameter.shape)
                check_state(saved, shape, piece.name, parameter.dtype is not torch.float32)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._made:
            raise RuntimeError("groups must be given when AdamW is made, as gradients' places are: make MainGrads and AdamW anew")
        super().add_param_group(param_group)


# ---- checks ----


def _flat(name: str, parameter: Tensor) -> Tensor:
    if not parameter.is_contiguous():
        raise ValueError(f"{name} must be contiguous, but has strides {parameter.stride()}: MasterWeights takes any")
    return parameter.detach().view(-1)
