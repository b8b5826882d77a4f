"""AdamW over `MainGrads` in one pass: each gradient, moment and weight is read once and written once.

    the weights     what is kept beside exp_avg and exp_avg_sq, fp32        bytes moved a parameter, the gradient cleared
    bf16            16 more bits of an fp32 master (`gradients/adamw_formula.py`)         32
    fp16            an fp32 master                                                      36
    fp32            nothing                                                             32

State lies in flat buffers, as gradients do. With shard it covers this rank's parts only, and the weights are gathered. One launch
for each type of weights steps all of them, by a table of addresses that is made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.adamw_formula import AdamWSlice, master_in_gradient, master_of, put_from_gradient, store_master
from onepass.gradients.adamw_stepper import AdamWStepper, check_max_norm, check_options
from onepass.gradients.buckets import Bucket
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
from onepass.gradients.optimizer_state import check_sizes, loading, set_options
from onepass.kernels.device_tables import is_capturing

KINDS = ("master", "exp_avg", "exp_avg_sq")
State = tuple[str, str, Tensor, int, int]  # what `masters` yields
_BESIDE = {torch.bfloat16: torch.int16, torch.float16: torch.float32}  # type of what is kept beside a weight of this type


@dataclass(eq=False)
class _ParameterShard:
    """The part of a parameter that this rank steps."""

    name: str
    parameter: Tensor
    start: int  # where in the flattened parameter it begins
    stretch: AdamWSlice

    @property
    def stop(self) -> int:
        return self.start + self.stretch.weight.numel()

    def tensor(self, kind: str) -> Tensor:
        """Return the master or a moment in fp32, one-dimensional. Masters of bf16 weights are copies."""
        tensor: Tensor = master_of(self.stretch) if kind == "master" else getattr(self.stretch, kind)
        return tensor


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
    ) -> None:
        check_fp32(main_grads)
        in_groups = parameter_groups(main_grads, groups)
        self._main_grads, self._made = main_grads, False
        self._laid = 0  # buckets whose parameters have state
        self._where: list[tuple[int, bool, bool]] = []  # the parameters' addresses, and which are trained
        super().__init__(in_groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._made = True
        for group in self.param_groups:
            check_options(group)
        self._row_of = {id(parameter): row for row, parameter in enumerate(self._parameters())}
        self._pieces: list[_ParameterShard] = []
        self._steppers: dict[torch.device, AdamWStepper] = {}
        with torch.no_grad():
            self._gathered = GatheredWeights(main_grads) if main_grads.shard else None
            self._follow()

    def _add_state(self, buckets: list[Bucket]) -> None:
        """Allocate state for the parameters of buckets that are new."""
        main_grads = self._main_grads
        if self._gathered:
            self._gathered.extend()
        with main_grads.filled():
            pieces = self._make_shards(buckets)
        for bucket in buckets:
            device = bucket.flat.device
            if device not in self._steppers:
                self._steppers[device] = AdamWStepper(device, self.param_groups)
        self._reload(pieces)
        for piece in pieces:
            self.state[piece.parameter] = self._state_of(piece)
        self._pieces += pieces
        if self._gathered:
            self._gathered.lay()

    def _make_shards(self, buckets: list[Bucket]) -> list[_ParameterShard]:
        """Allocate state for the gradients that this rank reduces, and return where all of it lies."""
        kinds = [(bucket.flat.device, bucket.places[0].parameter.dtype) for bucket in buckets]
        sizes = [bucket.mine.numel() for bucket in buckets]
        totals = {kind: sum(size for size, other in zip(sizes, kinds, strict=True) if other == kind) for kind in set(kinds)}
        state = {kind: _state(*kind, total) for kind, total in totals.items()}
        begun = dict.fromkeys(kinds, 0)
        pieces = []
        for kind, bucket in zip(kinds, buckets, strict=True):
            exp_avg, exp_avg_sq, rest = state[kind]
            for place, start, stop in bucket.parts():
                weight = self._gathered.flat[bucket.index][start:stop] if self._gathered else _flat(place.name, place.parameter)
                at = slice(begun[kind] + start - bucket.first, begun[kind] + stop - bucket.first)
                beside = None if rest is None else rest[at]
                row = self._row_of[id(place.parameter)]
                stretch = AdamWSlice(weight, bucket.flat[start:stop], exp_avg[at], exp_avg_sq[at], beside, row)
                pieces.append(_ParameterShard(place.name, place.parameter, start - place.start, stretch))
            begun[kind] += bucket.mine.numel()
        return pieces

    def _state_of(self, piece: _ParameterShard) -> dict[str, Tensor]:
        """Return the state of torch's AdamW, in the parameter's shape, and what is kept beside the weight. One-dimensional with
        shard."""
        stretch = piece.stretch
        step = self._steppers[stretch.weight.device].counts[stretch.row]
        state = {"step": step, "exp_avg": stretch.exp_avg, "exp_avg_sq": stretch.exp_avg_sq}
        if stretch.rest is not None:
            state["low" if stretch.rest.dtype is torch.int16 else "master"] = stretch.rest
        shape = (-1,) if self._gathered else piece.parameter.shape
        return {name: tensor if name == "step" else tensor.view(shape) for name, tensor in state.items()}

    # ---- a step ----

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, max_norm: float | None = None, *, zero: bool = False, norm: Tensor | None = None
    ) -> Tensor | None:
        """Step the weights. `main_grads.finish()` comes before, `main_grads.zero_()` after.

        Args:
            max_norm: step by the gradient scaled to a norm of at most this, as `main_grads.clip_` scales it. The buffers keep it
                unscaled. The norm before is returned, a tensor on the device. None scales nothing and returns None.
            zero: clear the buffers in the same pass; those of `MainGrads(release=True)` free their memory.
            norm: what `main_grads.norm()` returned, if it was called already.
        """
        main_grads = self._main_grads
        main_grads.check_finished("step()")
        check_max_norm(max_norm)
        self._follow()
        if max_norm is None:
            norm = None
        elif norm is None:
            norm = main_grads.norm()
        for stepper in self._steppers.values():
            stepper.run(self.param_groups, norm, max_norm, zero and not main_grads.releases)
        if zero and not any(map(is_capturing, self._steppers)):  # a capture has cleared nothing yet
            main_grads.mark_zeroed()
        self.publish()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`main_grads.zero_()`."""
        self._main_grads.zero_()

    def _follow(self) -> None:
        """Make state for what was unfrozen. Make the tables of addresses anew where other parameters are trained than in the last
        step, or where they lie elsewhere, as by `module.to`."""
        buckets, trained = self._main_grads.buckets, self._main_grads.trained
        if self._laid == len(buckets) and self._where == [*self._places()]:
            return
        if any(map(is_capturing, self._steppers)):
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
            for piece in self._pieces:
                piece.stretch = piece.stretch._replace(weight=_flat(piece.name, piece.parameter))
        stepped = [piece.stretch for piece in self._pieces if id(piece.parameter) in trained]
        for device, stepper in self._steppers.items():
            stepper.lay([stretch for stretch in stepped if stretch.exp_avg.device == device])
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
        self._reload(self._pieces)

    def _reload(self, pieces: list[_ParameterShard]) -> None:
        for piece in pieces:
            weight, rest = piece.parameter.detach().reshape(-1)[piece.start : piece.stop], piece.stretch.rest
            if rest is not None and rest.dtype is torch.int16:
                rest.zero_()
            elif rest is not None:
                rest.copy_(weight)

    # ---- states ----

    def masters(self) -> Iterator[State]:
        """Yield what a checkpoint keeps of this rank: a parameter's name, "master", "exp_avg" or "exp_avg_sq", the fp32 numbers,
        and their start and stop in the flattened parameter. Masters of bf16 weights are copies, made one at a time; the other
        tensors are those that `step` uses. Write masters by `set_master`: in place, that of an fp16 weight is lost at the next
        call, which takes the weight again."""
        self._follow()
        for piece in self._pieces:
            for kind in KINDS:
                yield piece.name, kind, piece.tensor(kind), piece.start, piece.stop

    @contextmanager
    def masters_in_gradients(self) -> Iterator[list[State]]:
        """Yield what `masters` yields, without copies and writable: in this block the gradients' memory holds the masters of bf16
        weights. At its end, also after an error, weights follow their masters and gradients are zeros. Call `publish` after a
        block that wrote. Gradients from before are lost, and none may come in the block."""
        self.zero_grad()
        self._follow()
        self._main_grads.fill_()
        unpacked: list[_ParameterShard] = []  # whose masters must be put back
        states: list[State] = []
        try:
            for piece in self._pieces:
                master = master_in_gradient(piece.stretch)
                unpacked.append(piece)
                for kind in KINDS:
                    tensor = master if kind == "master" else piece.tensor(kind)
                    states.append((piece.name, kind, tensor, piece.start, piece.stop))
            yield states
        finally:
            for piece in unpacked:
                put_from_gradient(piece.stretch)
            self.zero_grad()

    @torch.no_grad()
    def set_master(self, name: str, kind: str, values: Tensor, start: int, stop: int) -> None:
        """Write what `masters` yielded, or a part of it; weights follow their masters. Call `publish` after the last."""
        pieces = [piece for piece in self._pieces if piece.name == name and piece.start <= start <= stop <= piece.stop]
        if not pieces or kind not in KINDS:
            raise ValueError(
                f"name, kind, start and stop must be of what masters() gives, but are {name}, {kind}, {start}, {stop}"
            )
        if values.numel() != stop - start:
            raise ValueError(f"values must be {stop - start} numbers, but are {values.numel()}")
        whole = pieces[0].stretch._replace(grad=pieces[0].stretch.exp_avg)  # the gradient may have no memory
        part = whole.part(start - pieces[0].start, stop - pieces[0].start)
        values = values.reshape(-1).to(part.weight.device, torch.float32)
        if kind == "master":
            store_master(part, values)
        else:
            getattr(part, kind).copy_(values)

    @torch.no_grad()
    def set_masters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole fp32 masters by their parameters' names, of which this rank takes what it steps. Unknown names are ignored.
        Weights follow, on all ranks."""
        self._main_grads.follow()
        self._follow()
        pieces: dict[str, list[_ParameterShard]] = {}
        for piece in self._pieces:
            pieces.setdefault(piece.name, []).append(piece)
        for name, whole in named:
            for piece in pieces.get(name, ()):
                store_master(piece.stretch, whole.reshape(-1)[piece.start : piece.stop])
        self.publish()

    def set_step(self, step: int) -> None:
        """Set the number of steps made, of parameters that have state. One that is unfrozen later begins anew."""
        for piece in self._pieces:
            self.state[piece.parameter]["step"].fill_(step)

    def state_dict(self) -> dict[str, Any]:
        """Return torch.optim.AdamW's state with each weight in fp32 as "master", a copy for bf16; with shard this rank's."""
        packed = super().state_dict()
        places = {id(parameter): place for place, parameter in enumerate(self._parameters())}
        for piece in self._pieces:
            state = self.state[piece.parameter]
            packed["state"][places[id(piece.parameter)]] = {
                "step": state["step"].clone(),  # optimizers add to it in place
                "exp_avg": state["exp_avg"],
                "exp_avg_sq": state["exp_avg_sq"],
                "master": piece.tensor("master").view(state["exp_avg"].shape),
            }
        return {**packed, "shard": shard_of(self._main_grads)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, and write the model's weights by their masters. torch.optim's states have no masters, and fp32 weights
        then stay unchanged. Parameters without a state begin anew. A state must be of the same rank and number of ranks."""
        self._main_grads.follow()
        self._follow()
        with loading(self, state_dict) as state:
            self._check_state(state)
            set_options(self.param_groups, state["param_groups"])
            places = {id(parameter): place for place, parameter in enumerate(self._parameters())}
            for piece in self._pieces:
                theirs = state["state"].get(places[id(piece.parameter)])
                if theirs is None:  # it was not trained
                    self._reload([piece])
                    theirs = {"step": torch.zeros(()), **{kind: torch.zeros_like(piece.tensor(kind)) for kind in KINDS[1:]}}
                self.state[piece.parameter]["step"].copy_(theirs["step"])
                for kind in KINDS:
                    if kind in theirs:
                        self.set_master(piece.name, kind, theirs[kind], piece.start, piece.stop)
            self.publish()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        check_shard(state, self._main_grads)
        check_sizes(self.param_groups, state["param_groups"])
        placed = {id(parameter) for _, parameter in self._main_grads.named}
        pieces = {id(piece.parameter): piece for piece in self._pieces}
        for place, parameter in enumerate(self._parameters()):
            saved, piece = state["state"].get(place), pieces.get(id(parameter))
            if saved is not None and id(parameter) not in placed:
                raise ValueError(
                    f"state must be of parameters that were trainable here, but has parameter {place}, which never was: unfreeze "
                    "it before you load the state, then freeze it again"
                )
            if saved is None or piece is None:
                continue
            shape = tuple(self.state[parameter]["exp_avg"].shape)
            for kind in KINDS if piece.stretch.rest is not None else KINDS[1:]:
                there = tuple(saved[kind].shape) if kind in saved else None
                if there != shape:
                    raise ValueError(f"state must have {kind} of shape {shape} for {piece.name}, but has {there}")

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._made:
            raise RuntimeError("groups must be given when AdamW is made, as gradients' places are: make MainGrads and AdamW anew")
        super().add_param_group(param_group)


# ---- state and checks ----


def _state(device: torch.device, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Allocate exp_avg, exp_avg_sq and what is kept beside the weight."""
    exp_avg, exp_avg_sq = (torch.zeros(size, device=device) for _ in range(2))
    beside = _BESIDE.get(dtype)
    return exp_avg, exp_avg_sq, None if beside is None else torch.zeros(size, dtype=beside, device=device)


def _flat(name: str, parameter: Tensor) -> Tensor:
    if not parameter.is_contiguous():
        raise ValueError(f"{name} must be contiguous, but has strides {parameter.stride()}: MasterWeights takes any")
    return parameter.detach().view(-1)
