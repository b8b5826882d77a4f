"""AdamW over `MainGrads` in one pass: each gradient, moment and weight is read once and written once.

    the weights     what is kept beside exp_avg and exp_avg_sq, fp32        bytes moved a parameter, the gradient cleared
    bf16            16 more bits of an fp32 master (`gradients/adamw_formula.py`)         32
    fp16            an fp32 master                                                      34
    fp32            nothing                                                             32

State lies in flat buffers, as gradients do. With shard it covers this rank's parts only, and the weights are gathered. One launch
for each type of weights steps all of them, by a table of addresses that is made once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepass.gradients.adamw_formula import (
    AdamWSlice,
    master_in_gradient,
    master_of,
    put_from_gradient,
    step_formula,
    store_master,
)
from onepass.gradients.adamw_kernels import OPTIONS, SCALARS, AdamWBatch, batches_of, step_batch, write_scalars
from onepass.gradients.gathered_weights import GatheredWeights, bump_version, check_fp32, check_shard, parameter_groups, shard_of
from onepass.gradients.main_grads import MainGrads
from onepass.kernels.device_tables import is_capturing
from onepass.kernels.language import triton_unsupported
from onepass.runtime import backend

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
        found: Tensor = master_of(self.stretch) if kind == "master" else getattr(self.stretch, kind)
        return found


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW over the parameters of a `MainGrads`, with fp32 masters of bf16 and fp16 weights, in one pass.

        optimizer = AdamW(main_grads, lr=1e-3)
        ...
        main_grads.finish()
        norm = optimizer.step(max_norm=1.0, zero=True)
        main_grads.zero_()                                  # the buffers are clear already

    It is a torch optimizer: schedulers set the groups' options, which may change at every step. A learning rate may be a tensor,
    which a CUDA graph's replays read. With `MainGrads(shard=True)` a rank keeps masters and state of its part, and `step`,
    `publish` and `load_state_dict` are collective. After changing weights by other means, such as loading a checkpoint into the
    model, call `reload`.

    Args:
        main_grads: of fp32, with the parameters to be trained.
        groups: the model's parameters in groups with options, as for torch.optim: `{"params": [...], "weight_decay": 0.0}`.
            Each parameter of main_grads is in one; frozen ones are skipped. None is one group of all.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; defaults for groups without them.
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
        in_groups = [
            {**group, "params": [parameters[key] for key in group["params"]]} for group in parameter_groups(main_grads, groups)
        ]
        self._main_grads, self._made = main_grads, False
        self._where: list[int] | None = None  # the parameters' addresses
        super().__init__(in_groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._made = True
        for group in self.param_groups:
            check_options(group)
        with torch.no_grad():
            self._gathered = GatheredWeights(main_grads) if main_grads.shard else None
            with main_grads.filled():
                self._pieces = self._make_shards()
            self._steppers = {device: AdamWStepper(device, self.param_groups) for device in self._devices()}
            for piece in self._pieces:
                self.state[piece.parameter] = self._state_of(piece)
            self.reload()
        if self._gathered:
            self._gathered.lay()
        self._refresh_tables()

    def _make_shards(self) -> list[_ParameterShard]:
        """Allocate state for the gradients that this rank reduces, and return where all of it lies."""
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
                stretch = AdamWSlice(weight, bucket.flat[start:stop], exp_avg[at], exp_avg_sq[at], beside, group)
                pieces.append(_ParameterShard(place.name, place.parameter, start - place.start, stretch))
            begun[kind] += sizes[index]
        return pieces

    def _devices(self) -> list[torch.device]:
        return list(dict.fromkeys(bucket.flat.device for bucket in self._main_grads.buckets))

    def _state_of(self, piece: _ParameterShard) -> dict[str, Tensor]:
        """Return the state of torch's AdamW, in the parameter's shape, and what is kept beside the weight. One-dimensional with
        shard."""
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
            max_norm: step by the gradient scaled to a norm of at most this, as `main_grads.clip_` scales it. The buffers keep it
                unscaled. The norm before is returned, a tensor on the device. None scales nothing and returns None.
            zero: clear the buffers in the same pass; those of `MainGrads(release=True)` free their memory.
            norm: what `main_grads.norm()` returned, if it was called already.
        """
        main_grads = self._main_grads
        main_grads.check_finished("step()")
        if max_norm is not None and (not isinstance(max_norm, int | float) or not max_norm >= 0):
            raise ValueError(f"max_norm must be a number of 0 or more, or None, but is {max_norm!r}")
        self._refresh_tables()
        if max_norm is None:
            norm = None
        elif norm is None:
            norm = main_grads.norm()
        for stepper in self._steppers.values():
            stepper.run(self.param_groups, norm, max_norm, zero and not main_grads.releases)
        if zero and not any(map(is_capturing, self._steppers)):  # a capture has cleared nothing yet
            main_grads.cleared()
        self.publish()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`main_grads.zero_()`."""
        self._main_grads.zero_()

    def _refresh_tables(self) -> None:
        """Make the tables of addresses anew where a parameter was given other memory, as by `module.to`."""
        where = [parameter.data_ptr() for _, parameter in self._main_grads.named]
        if self._where == where:
            return
        if self._where is not None and self._gathered:
            raise RuntimeError("parameters must stay where AdamW has put them with shard=True, but one has other memory by now")
        if any(map(is_capturing, self._steppers)):
            raise RuntimeError("parameters must stay where they are in a capture, but one has other memory since the last step()")
        if not self._gathered:
            for piece in self._pieces:
                piece.stretch = piece.stretch._replace(weight=_flat(piece.name, piece.parameter))
        for device, stepper in self._steppers.items():
            stepper.lay([piece.stretch for piece in self._pieces if piece.stretch.weight.device == device])
        self._where = where

    @torch.no_grad()
    def publish(self) -> None:
        """With shard gather the weights, as `step` does. Call it after `set_master`."""
        if self._gathered:
            self._gathered.gather()
        else:
            bump_version(self._main_grads)

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
        """Yield what a checkpoint keeps of this rank: a parameter's name, "master", "exp_avg" or "exp_avg_sq", the fp32 numbers,
        and their start and stop in the flattened parameter. Masters of bf16 weights are copies, made one at a time; the other
        tensors are those that `step` uses."""
        for piece in self._pieces:
            for kind in KINDS:
                yield piece.name, kind, piece.tensor(kind), piece.start, piece.stop

    @contextmanager
    def masters_in_gradients(self) -> Iterator[list[State]]:
        """Yield what `masters` yields, without copies and writable: in this block the gradients' memory holds the masters of bf16
        weights. At its end, also after an error, weights follow their masters and gradients are zeros. Call `publish` after a
        block that wrote. Gradients from before are lost, and none may come in the block."""
        self._refresh_tables()
        self.zero_grad()
        self._main_grads.fill_()
        lent: list[_ParameterShard] = []
        found: list[State] = []
        try:
            for piece in self._pieces:
                master = master_in_gradient(piece.stretch)
                lent.append(piece)  # from here on its master must be put back
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
        """Write what `masters` yielded, or a part of it; weights follow their masters. Call `publish` after the last."""
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
            store_master(part, values)
        else:
            getattr(part, kind).copy_(values)

    @torch.no_grad()
    def set_masters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Load whole fp32 masters by their parameters' names, of which this rank takes what it steps. Unknown names are ignored.
        Weights follow, on all ranks."""
        pieces: dict[str, list[_ParameterShard]] = {}
        for piece in self._pieces:
            pieces.setdefault(piece.name, []).append(piece)
        for name, whole in named:
            for piece in pieces.get(name, ()):
                store_master(piece.stretch, whole.reshape(-1)[piece.start : piece.stop])
        self.publish()

    def set_step(self, step: int) -> None:
        """Set the number of steps made."""
        for stepper in self._steppers.values():
            stepper.step.fill_(step)

    def state_dict(self) -> dict[str, Any]:
        """Return torch.optim.AdamW's state with each weight in fp32 as "master", a copy for bf16; with shard this rank's."""
        found = super().state_dict()
        places = {id(parameter): place for place, parameter in enumerate(self._parameters())}
        steps = {device: iter(stepper.step.repeat(len(places)).unbind()) for device, stepper in self._steppers.items()}
        for piece in self._pieces:
            state = self.state[piece.parameter]
            found["state"][places[id(piece.parameter)]] = {
                "step": next(steps[piece.stretch.weight.device]),  # one each, as optimizers add to it in place
                "exp_avg": state["exp_avg"],
                "exp_avg_sq": state["exp_avg_sq"],
                "master": piece.tensor("master").view(state["exp_avg"].shape),
            }
        return {**found, "shard": shard_of(self._main_grads)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, and write the model's weights by their masters. torch.optim's states have no masters, and fp32 weights
        then stay unchanged. A state must be of the same rank and number of ranks."""
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state = before(self, state) or state
        self._check_state(state)
        for group, options in zip(self.param_groups, state["param_groups"], strict=True):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)  # where graphs read it
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


class AdamWStepper:
    """A device's step number, options and slices to step."""

    def __init__(self, device: torch.device, groups: list[dict[str, Any]]) -> None:
        self.device = device
        self.step = torch.zeros((), device=device)
        self.scalars = torch.zeros(len(groups) * SCALARS, device=device)
        # fp64: OPTIONS of all groups, then max_norm
        self.options = torch.zeros(len(groups) * OPTIONS + 1, dtype=torch.float64, device=device)
        self.places = self.options.unbind()
        self.known: list[float | None] = [0.0] * len(self.places)  # None: not known here
        self.stretches: list[AdamWSlice] = []
        self.batches: list[AdamWBatch] = []

    def lay(self, stretches: list[AdamWSlice]) -> None:
        self.stretches, self.batches = stretches, batches_of(stretches)

    def move_gradients(self, stretches: list[AdamWSlice]) -> None:
        """Take the gradients of these: the last ones but for their addresses, storages and offsets shared alike."""
        moved = {id(old.grad): new.grad for old, new in zip(self.stretches, stretches, strict=True)}
        self.stretches = stretches
        for batch in self.batches:
            batch.sources = [moved[id(source)] for source in batch.sources]
            batch.tensors = (batch.tensors[0], batch.sources[0], *batch.tensors[2:])

    def run(self, groups: list[dict[str, Any]], norm: Tensor | None, max_norm: float | None, zero: bool) -> None:
        norm = None if norm is None else norm.to(self.device)
        if self._use_triton():
            self._write_options(groups, max_norm)
            write_scalars(self.options, self.step, norm, self.scalars)
            for batch in self.batches:
                step_batch(batch, self.scalars, zero)
            return
        factor = None if norm is None or max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if factor is not None and factor.device.type == "cpu" and factor == 1:  # reading it waits for nothing on a CPU
            factor = None
        try:
            self._run_formula(groups, factor, zero)
        except RuntimeError as error:  # out of memory, most likely: kernels allocate nothing
            raise type(error)(
                f"{error}. AdamW's step broke off: some weights, exp_avg and exp_avg_sq are ahead, and the step is counted. Load "
                "a checkpoint"
            ) from error

    def _run_formula(self, groups: list[dict[str, Any]], factor: Tensor | None, zero: bool) -> None:
        self.step += 1
        for place, group in enumerate(groups):
            options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            options["beta1"], options["beta2"] = group["betas"]
            step_formula([each for each in self.stretches if each.group == place], self.step, factor, **options)
        if zero and self.stretches:  # with shard a rank may step nothing
            torch._foreach_zero_([each.grad for each in self.stretches])

    def _use_triton(self) -> bool:
        """Whether kernels step. No other package has kernels for this, so choosing one by `use_backend` changes nothing."""
        named = backend.current_backend()
        return backend.choose("AdamW", named if named in backend.NATIVE else "auto", triton_unsupported(self.step)) == "triton"

    def _write_options(self, groups: list[dict[str, Any]], max_norm: float | None) -> None:
        """Write the options that have changed, as arguments of launches; in a CUDA graph write all."""
        columns = [[group["lr"], *group["betas"], group["eps"], group["weight_decay"]] for group in groups]
        values = [
            *(value for option in zip(*columns, strict=True) for value in option),
            math.inf if max_norm is None else max_norm,
        ]
        fixed = is_capturing(self.device)
        changed = {}
        for place, value in enumerate(values):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                self.places[place].copy_(value)
                self.known[place] = None
            elif fixed or self.known[place] != value:
                changed[place], self.known[place] = float(value), None
        if changed:
            places, numbers = [self.places[place] for place in changed], list(changed.values())
            torch._foreach_zero_(places)
            torch._foreach_add_(places, numbers)
            for place, number in changed.items():  # not before they are written: that may fail
                self.known[place] = None if fixed else number


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


def check_options(group: Mapping[str, Any]) -> None:
    for name, value in (("lr", group["lr"]), ("eps", group["eps"]), ("weight_decay", group["weight_decay"])):
        if not isinstance(value, Tensor) and not value >= 0:
            raise ValueError(f"{name} must be 0 or more, but is {value}")
    for beta in group["betas"]:
        if not isinstance(beta, Tensor) and not 0 <= beta < 1:
            raise ValueError(f"betas must be at least 0 and below 1, but are {tuple(group['betas'])}")
