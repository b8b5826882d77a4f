"""AdamW over `MainGrads` in one pass: each gradient, moment and weight is read once and written once.

    the weights     what is kept beside exp_avg and exp_avg_sq, fp32        bytes moved a parameter, the gradient cleared
    bf16            16 more bits of an fp32 master (`kernels/adamw_formula.py`)         32
    fp16            an fp32 master                                                      34
    fp32            nothing                                                             32

State lies in flat buffers, as gradients do: with shard for this rank's parts only, and the weights are gathered. A launch a type
of weights steps all of them, by a table of where they lie, which is made once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.kernels.adamw import OPTIONS, SCALARS, Batch, batches_of, step_batch, write_scalars
from onepass.kernels.adamw_formula import Stretch, master_in_gradient, master_of, put, put_from_gradient, step_formula
from onepass.parallel.main_grads import MainGrads
from onepass.parallel.weights import GatheredWeights, check_fp32, check_shard, grouped, shard_of, written
from onepass.runtime import backend
from onepass.runtime.lang import no_triton
from onepass.runtime.tables import capturing

KINDS = ("master", "exp_avg", "exp_avg_sq")
State = tuple[str, str, Tensor, int, int]  # as `masters` says
_BESIDE = {torch.bfloat16: torch.int16, torch.float16: torch.float32}  # what is kept beside a weight of this type


@dataclass(eq=False)
class _Piece:
    """Of a parameter, what this rank steps."""

    name: str
    parameter: Tensor
    start: int  # where in the flattened parameter it begins
    stretch: Stretch

    @property
    def stop(self) -> int:
        return self.start + self.stretch.weight.numel()

    def tensor(self, kind: str) -> Tensor:
        """In fp32, one-dimensional; bf16 weights' masters are a copy."""
        found: Tensor = master_of(self.stretch) if kind == "master" else getattr(self.stretch, kind)
        return found


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW over the parameters of a `MainGrads`, with fp32 masters of bf16 and fp16 weights, in one pass.

        optimizer = AdamW(main_grads, lr=1e-3)
        ...
        main_grads.finish()
        norm = optimizer.step(max_norm=1.0, zero=True)
        main_grads.zero_()                                  # the buffers are clear already

    It is a torch optimizer: schedulers set the groups' options, each of which may change at every step, and a learning rate
    may be a tensor, which a CUDA graph's replays read. With `MainGrads(shard=True)` a rank keeps masters and state of its part,
    and in `step`, `publish` and `load_state_dict` all ranks take part. Where weights are changed by other means, as by loading
    a checkpoint into the model, call `reload`.

    Args:
        main_grads: of fp32, with the parameters to be trained.
        groups: the model's parameters in groups with options, as for torch.optim: `{"params": [...], "weight_decay": 0.0}`.
            Each parameter of main_grads is in one; frozen ones are left out. None is one group of all.
        lr, betas, eps, weight_decay: as torch.optim.AdamW has them; of the groups that don't say.
    """

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
        parameters = {id(parameter): parameter for _, parameter in main_grads.named}
        in_groups = [{**group, "params": [parameters[key] for key in group["params"]]} for group in grouped(main_grads, groups)]
        self._main_grads, self._made = main_grads, False
        self._where: list[int] | None = None  # the parameters' addresses
        super().__init__(in_groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._made = True
        for group in self.param_groups:
            _check_options(group)
        with torch.no_grad():
            self._gathered = GatheredWeights(main_grads) if main_grads.shard else None
            with main_grads.filled():
                self._pieces = self._laid()
            self._steppers = {device: _Stepper(device, self.param_groups) for device in self._devices()}
            for piece in self._pieces:
                self.state[piece.parameter] = self._state_of(piece)
            self.reload()
        if self._gathered:
            self._gathered.lay()
        self._look()

    def _laid(self) -> list[_Piece]:
        """State for what this rank has the reduced gradients of, and where all of it lies."""
        groups = {id(parameter): place for place, group in enumerate(self.param_groups) for parameter in group["params"]}
        kinds = [(bucket.flat.device, bucket.places[0].parameter.dtype) for bucket in self._main_grads.buckets]
        sizes = [bucket.mine.numel() for bucket in self._main_grads.buckets]
        totals = {kind: sum(size for size, other in zip(sizes, kinds, strict=True) if other == kind) for kind in set(kinds)}
        state = {kind: _state(*kind, total) for kind, total in totals.items()}
        begun = dict.fromkeys(kinds, 0)
        pieces = []
        for index, (kind, bucket) in enumerate(zip(kinds, self._main_grads.buckets, strict=True)):
            exp_avg, exp_avg_sq, rest = state[kind]
            for place, start, stop in bucket.parts():
                weight = self._gathered.flat[index][start:stop] if self._gathered else _flat(place.name, place.parameter)
                at = slice(begun[kind] + start - bucket.first, begun[kind] + stop - bucket.first)
                beside = None if rest is None else rest[at]
                group = groups[id(place.parameter)]
                stretch = Stretch(weight, bucket.flat[start:stop], exp_avg[at], exp_avg_sq[at], beside, group)
                pieces.append(_Piece(place.name, place.parameter, start - place.start, stretch))
            begun[kind] += sizes[index]
        return pieces

    def _devices(self) -> list[torch.device]:
        return list(dict.fromkeys(bucket.flat.device for bucket in self._main_grads.buckets))

    def _state_of(self, piece: _Piece) -> dict[str, Tensor]:
        """What torch's AdamW has, in the parameter's shape, and what is kept beside the weight. With shard one-dimensional."""
        stretch = piece.stretch
        found = {"step": self._steppers[stretch.weight.device].step, "exp_avg": stretch.exp_avg, "exp_avg_sq": stretch.exp_avg_sq}
        if stretch.rest is not None:
            found["low" if stretch.rest.dtype is torch.int16 else "master"] = stretch.rest
        shape = (-1,) if self._gathered else piece.parameter.shape
        return {name: tensor if name == "step" else tensor.view(shape) for name, tensor in found.items()}

    # ---- a step ----

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, max_norm: float | None = None, *, zero: bool = False, norm: Tensor | None = None
    ) -> Tensor | None:
        """Step the weights. `main_grads.finish()` comes before, `main_grads.zero_()` after.

        Args:
            max_norm: step by the gradient scaled to a norm of at most this, as `main_grads.clip_` scales it; the buffers keep it
                unscaled. The norm that it had is returned, a tensor on the device. None: nothing is scaled, None is returned.
            zero: leave zeros in the buffers, in the same pass; those that `MainGrads(release=True)` has give their memory back.
            norm: what `main_grads.norm()` gave, for who has asked already.
        """
        main_grads = self._main_grads
        main_grads.check_finished("step()")
        if max_norm is not None and (not isinstance(max_norm, int | float) or not max_norm >= 0):
            raise ValueError(f"max_norm must be a number of 0 or more, or None, but is {max_norm!r}")
        self._look()
        if max_norm is None:
            norm = None
        elif norm is None:
            norm = main_grads.norm()
        for stepper in self._steppers.values():
            stepper.run(self.param_groups, norm, max_norm, zero and not main_grads.releases)
        if zero and not any(map(capturing, self._steppers)):  # what is captured is not done yet
            main_grads.cleared()
        self.publish()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`main_grads.zero_()`."""
        self._main_grads.zero_()

    def _look(self) -> None:
        """Where the parameters lie now. Tables are made anew where one was given other memory, as `module.to` gives it."""
        where = [parameter.data_ptr() for _, parameter in self._main_grads.named]
        if self._where == where:
            return
        if self._where is not None and self._gathered:
            raise RuntimeError("parameters must stay where AdamW has put them with shard=True, but one has other memory by now")
        if any(map(capturing, self._steppers)):
            raise RuntimeError("parameters must stay where they are in a capture, but one has other memory since the last step()")
        if not self._gathered:
            for piece in self._pieces:
                piece.stretch = piece.stretch._replace(weight=_flat(piece.name, piece.parameter))
        for device, stepper in self._steppers.items():
            stepper.lay([piece.stretch for piece in self._pieces if piece.stretch.weight.device == device])
        self._where = where

    @torch.no_grad()
    def publish(self) -> None:
        """With shard gather the weights, as `step` does at its end: for masters that were written by `set_master`."""
        if self._gathered:
            self._gathered.gather()
        else:
            written(self._main_grads)

    @torch.no_grad()
    def reload(self) -> None:
        """Take the masters from the model's weights again."""
        for piece in self._pieces:
            weight, rest = piece.parameter.detach().reshape(-1)[piece.start : piece.stop], piece.stretch.rest
            if rest is not None and rest.dtype is torch.int16:
                rest.zero_()
            elif rest is not None:
                rest.copy_(weight)

    # ---- states ----

    def masters(self) -> Iterator[State]:
        """All that a checkpoint keeps of this rank: a parameter's name, one of "master", "exp_avg" and "exp_avg_sq", the fp32
        numbers, and from where to where in the flattened parameter they are. The masters of bf16 weights are copies, made one
        at a time; the rest is what `step` uses."""
        for piece in self._pieces:
            for kind in KINDS:
                yield piece.name, kind, piece.tensor(kind), piece.start, piece.stop

    @contextmanager
    def masters_in_gradients(self) -> Iterator[list[State]]:
        """What `masters` gives, without copies and to be written: in this block the masters of bf16 weights lie where the
        gradients do. However it ends, weights then follow their masters and gradients are zeros. `publish` comes after a block
        that wrote. Gradients that are there before are lost, and none may come in the block."""
        self._look()
        self.zero_grad()
        self._main_grads.fill_()
        lent: list[_Piece] = []
        found: list[State] = []
        try:
            for piece in self._pieces:
                master = master_in_gradient(piece.stretch)
                lent.append(piece)  # from here on there is a whole master to be put back
                for kind in KINDS:
                    tensor = master if kind == "master" else piece.tensor(kind)
                    found.append((piece.name, kind, tensor, piece.start, piece.stop))
            yield found
        finally:
            for piece in lent:
                put_from_gradient(piece.stretch)
            self.zero_grad()

    @torch.no_grad()
    def set_master(self, name: str, kind: str, values: Tensor, start: int, stop: int) -> None:
        """Write what `masters` gave, or a part of it; weights follow their masters. `publish` comes after the last."""
        found = [piece for piece in self._pieces if piece.name == name and piece.start <= start <= stop <= piece.stop]
        if not found or kind not in KINDS:
            raise ValueError(
                f"name, kind, start and stop must be of what masters() gives, but are {name}, {kind}, {start}, {stop}"
            )
        if values.numel() != stop - start:
            raise ValueError(f"values must be {stop - start} numbers, but are {values.numel()}")
        whole = found[0].stretch._replace(grad=found[0].stretch.exp_avg)  # the gradient may have no memory
        part = whole.part(start - found[0].start, stop - found[0].start)
        values = values.reshape(-1).to(part.weight.device, torch.float32)
        if kind == "master":
            put(part, values)
        else:
            getattr(part, kind).copy_(values)

    @torch.no_grad()
    def set_masters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Whole masters by their parameters' names, in fp32, of which this rank takes what it steps; names that are none of these
        are passed over. Weights follow, on all ranks."""
        pieces: dict[str, list[_Piece]] = {}
        for piece in self._pieces:
            pieces.setdefault(piece.name, []).append(piece)
        for name, whole in named:
            for piece in pieces.get(name, ()):
                put(piece.stretch, whole.reshape(-1)[piece.start : piece.stop])
        self.publish()

    def set_step(self, step: int) -> None:
        """How many steps were made."""
        for stepper in self._steppers.values():
            stepper.step.fill_(step)

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, and each weight in fp32, its "master", a copy where it is bf16; with shard this rank's."""
        found = super().state_dict()
        places = {id(parameter): place for place, parameter in enumerate(self._parameters())}
        steps = {device: iter(stepper.step.repeat(len(places)).unbind()) for device, stepper in self._steppers.items()}
        for piece in self._pieces:
            state = self.state[piece.parameter]
            found["state"][places[id(piece.parameter)]] = {
                "step": next(steps[piece.stretch.weight.device]),  # each its own, to which its owner adds
                "exp_avg": state["exp_avg"],
                "exp_avg_sq": state["exp_avg_sq"],
                "master": piece.tensor("master").view(state["exp_avg"].shape),
            }
        return {**found, "shard": shard_of(self._main_grads)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a state back, and write the model's weights by their masters; torch.optim's have none of fp32 weights, which stay
        as they are. It must come from the same rank of as many."""
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = before(self, state) or state
        self._check_state(state)
        for group, options in zip(self.param_groups, state["param_groups"], strict=True):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)  # where graphs look for it
                elif key != "params":
                    group[key] = value
        places = {id(parameter): place for place, parameter in enumerate(self._parameters())}
        for piece in self._pieces:
            theirs = state["state"][places[id(piece.parameter)]]
            self.state[piece.parameter]["step"].copy_(theirs["step"])
            for kind in KINDS:
                if kind in theirs:
                    self.set_master(piece.name, kind, theirs[kind], piece.start, piece.stop)
        self.publish()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        check_shard(state, self._main_grads)
        mine, theirs = ([len(group["params"]) for group in groups] for groups in (self.param_groups, state["param_groups"]))
        if mine != theirs:
            raise ValueError(f"state must have groups of {mine} parameters, but has {theirs}")
        places = {id(parameter): place for place, parameter in enumerate(self._parameters())}
        steps = set()
        for piece in self._pieces:
            found = state["state"].get(places[id(piece.parameter)], {})
            shape = tuple(self.state[piece.parameter]["exp_avg"].shape)
            for kind in KINDS if piece.stretch.rest is not None else KINDS[1:]:
                there = tuple(found[kind].shape) if kind in found else None
                if there != shape:
                    raise ValueError(f"state must have {kind} of shape {shape} for {piece.name}, but has {there}")
            steps.add(float(found["step"]))
        if len(steps) > 1:
            raise ValueError(f"state must be of one step, but is of {sorted(steps)}")

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._made:
            raise RuntimeError("groups must be given when AdamW is made, as gradients' places are: make MainGrads and AdamW anew")
        super().add_param_group(param_group)


class _Stepper:
    """A device's step number and options, and what is stepped there."""

    def __init__(self, device: torch.device, groups: list[dict[str, Any]]) -> None:
        self.device = device
        self.step = torch.zeros((), device=device)
        self.scalars = torch.zeros(len(groups) * SCALARS, device=device)
        # in fp64: OPTIONS of all groups, then max_norm
        self.options = torch.zeros(len(groups) * OPTIONS + 1, dtype=torch.float64, device=device)
        self.places = self.options.unbind()
        self.known: list[float | None] = [0.0] * len(self.places)  # None: not known here
        self.stretches: list[Stretch] = []
        self.batches: list[Batch] = []

    def lay(self, stretches: list[Stretch]) -> None:
        self.stretches, self.batches = stretches, batches_of(stretches)

    def run(self, groups: list[dict[str, Any]], norm: Tensor | None, max_norm: float | None, zero: bool) -> None:
        norm = None if norm is None else norm.to(self.device)
        if self._native():
            self._write_options(groups, max_norm)
            write_scalars(self.options, self.step, norm, self.scalars)
            for batch in self.batches:
                step_batch(batch, self.scalars, zero)
            return
        factor = None if norm is None or max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if factor is not None and factor.device.type == "cpu" and factor == 1:  # there nobody waits for it
            factor = None
        self.step += 1
        for place, group in enumerate(groups):
            options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            options["beta1"], options["beta2"] = group["betas"]
            step_formula([each for each in self.stretches if each.group == place], self.step, factor, **options)
        if zero:
            torch._foreach_zero_([each.grad for each in self.stretches])

    def _native(self) -> bool:
        """Other packages' kernels are none for this, so to choose those says nothing here."""
        named = backend._in_force
        return backend.choose("AdamW", named if named in backend.NATIVE else "auto", no_triton(self.step)) == "triton"

    def _write_options(self, groups: list[dict[str, Any]], max_norm: float | None) -> None:
        """Numbers travel in launches, as many of them as have changed; in a graph all, as they are now."""
        columns = [[group["lr"], *group["betas"], group["eps"], group["weight_decay"]] for group in groups]
        values = [
            *(value for option in zip(*columns, strict=True) for value in option),
            math.inf if max_norm is None else max_norm,
        ]
        fixed = capturing(self.device)
        changed = []
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                self.places[place].copy_(value)
                self.known[place] = None
            elif fixed or self.known[place] != value:
                changed.append((self.places[place], float(value)))
                self.known[place] = None if fixed else float(value)
        if changed:
            torch._foreach_zero_([place for place, _ in changed])
            torch._foreach_add_([place for place, _ in changed], [value for _, value in changed])


# ---- what is kept ----


def _state(device: torch.device, dtype: torch.dtype, size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """exp_avg, exp_avg_sq, and what is beside the weight."""
    exp_avg, exp_avg_sq = (torch.zeros(size, device=device) for _ in range(2))
    beside = _BESIDE.get(dtype)
    return exp_avg, exp_avg_sq, None if beside is None else torch.zeros(size, dtype=beside, device=device)


def _flat(name: str, parameter: Tensor) -> Tensor:
    if not parameter.is_contiguous():
        raise ValueError(f"{name} must be contiguous, but has strides {parameter.stride()}: MasterWeights takes any")
    return parameter.detach().view(-1)


def _check_options(group: Mapping[str, Any]) -> None:
    for name, value in (("lr", group["lr"]), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if not isinstance(value, Tensor) and not value >= 0:
            raise ValueError(f"{name} must be 0 or more, but is {value}")
    for beta in group["betas"]:
        if not isinstance(beta, Tensor) and not 0 <= beta < 1:
            raise ValueError(f"betas must be at least 0 and below 1, but are {tuple(group['betas'])}")
