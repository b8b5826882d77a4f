"""AdamW over `.grad` in one pass: of plain parameters, and of DTensors as FSDP2's and tensor parallelism's.

    the weights                      moments     bytes moved a parameter
    fp32                             fp32        28
    bf16                             bf16        14, as torch.optim.AdamW's, which keeps moments in the weights' type
    bf16 with masters of 32 bits     fp32        26; the weight has half of a master, and 16 bits lie beside it
    bf16 with masters of 32 bits     8 bits      14; codes, and a scale for each 256 (`gradients/eight_bits.py`)

Each rank steps its part by the kernels of `onepass.parallel.AdamW`: they read the gradient, and read and write the weight and its
state, once. The state has torch.optim.AdamW's layout, and its DTensors lie as their parameters do. It is flat, so that one table
of addresses serves a device and a type. Gradients are others in each step, and the table follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from onepass.distributed.collectives import start_all_gather
from onepass.gradients.adamw_state import (
    CODES,
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
    state_types,
    take_moments,
)
from onepass.gradients.adamw_stepper import AdamWStepper, check_max_norm, check_options
from onepass.gradients.dtensor_parts import layout_of, local_part, placed_as
from onepass.gradients.eight_bits import BLOCK
from onepass.gradients.offloaded_state import StateRings
from onepass.gradients.optimizer_state import check_sizes, loading, set_options, states_of
from onepass.gradients.releasable_storage import storage_id
from onepass.gradients.step_in_backward import (
    BackwardSteps,
    StepInBackward,
    close_others,
    how_in_backward,
    parts_of,
    take_norm,
    with_norm,
)
from onepass.runtime.sharding import has_dtensor

_BYTES = 32  # a gradient's address modulo this decides how it is read
_KINDS: dict[str | None, torch.dtype | None] = TYPES | {None: None}  # of moments


class _SteppedParameters:
    """Parameters that are stepped together: a stepper for each device, whose tables have the addresses of the last step."""

    def __init__(self) -> None:
        self.steppers: dict[torch.device, AdamWStepper] = {}
        self.layout: list[tuple[Any, ...]] = []  # of the gradients: weight, type, storage, offset, alignment

    def step(
        self, groups: list[dict[str, Any]], given: list[tuple[ParameterState, Tensor]], norm: Tensor | None,
        max_norm: float | None,
    ) -> None:  # fmt: skip
        self._lay(given)
        for stepper in self.steppers.values():
            stepper.run(groups, norm, max_norm, False)
            stepper.move_gradients([torch.empty(0) for _ in stepper.stretches])  # their memory is the caller's to free
        torch.autograd.graph.increment_version([shard.weight for shard, _ in given])

    def _lay(self, given: list[tuple[ParameterState, Tensor]]) -> None:
        """Make tables of addresses, or let those of the last step follow gradients that lie alike: many times as fast."""
        firsts: dict[int, tuple[int, int]] = {}  # storage -> its number, and the offset of its first gradient
        layout = []
        for shard, grad in given:
            number, first = firsts.setdefault(storage_id(grad), (len(firsts), int(grad.storage_offset())))
            place = int(grad.storage_offset()) - first, grad.data_ptr() % _BYTES
            layout.append((shard.weight.data_ptr(), grad.dtype, number, *place))
        for device, stepper in self.steppers.items():
            mine = [(shard, grad) for shard, grad in given if shard.device == device]
            if layout == self.layout:
                stepper.move_gradients([part for shard, grad in mine for part in shard.grads_of(grad)])
            else:
                stepper.lay(passed for shard, grad in mine for passed in shard.slices(shard.grads_of(grad)))
        self.layout = layout


class ShardedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW over plain parameters and DTensors of fp32 and bf16, in one pass.

        optimizer = ShardedAdamW(model.parameters(), lr=1e-3)    # after fully_shard
        ...
        norm = optimizer.step(max_norm=1.0)
        optimizer.zero_grad()

    FSDP2 keeps fp32 shards and casts them for the forward pass, so that these are the masters of a model that computes in bf16.
    `torch.distributed.checkpoint` saves and loads the state, and loads torch.optim.AdamW's, as it does for this one's. A
    parameter without a gradient stays as it is and counts no step. A frozen one has no state before its first gradient.

    Args:
        params: parameters, or groups of them with options, as for torch.optim.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        moments: ``fp32``, ``bf16`` or ``8bit``. None is each weight's own type, as in torch.optim.AdamW. A group may have its
            own. In 8 bits are matrices whose rows have a multiple of 256 numbers; other parameters' moments are fp32 then. Give
            embeddings a group of fp32.
        masters: step fp32 masters of bf16 weights. A master is its weight and 16 bits more, the state's "low". Steps that are too
            small for a bf16 weight add up in it.
        in_backward: step parameters in backward, as soon as their gradients are whole, and free these. `step` steps what is
            left. `StepInBackward` clips. On several ranks parameters must be DTensors, as FSDP2's.
        offload: ``state`` keeps masters' bits and moments in the host's memory. They pass through the device part by part.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: Moments | None = None,
        masters: bool = False,
        in_backward: bool | StepInBackward = False,
        offload: Literal["state"] | None = None,
    ) -> None:
        early = how_in_backward(in_backward)
        self._masters, self._rings = masters, StateRings(offload)
        # torch's own options too: a checkpoint of one is one of the other
        defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
        self._made = False
        # copies, as torch's own changes the caller's groups
        given: Any = [dict(each) if isinstance(each, dict) else each for each in params]
        super().__init__(given, defaults | {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._made = True
        self._check_groups(self.param_groups)
        self._moments = take_moments(self.param_groups, moments, _KINDS)
        self._rows = {parameter: row for row, parameter in enumerate(self._parameters())}
        self._shards: dict[Tensor, ParameterState] = {}
        close_others(list(self._rows))
        divided = parts_of(list(self._rows)) if early else [list(self._rows)]
        self._part_of: dict[Tensor, _SteppedParameters] = {}
        for part in divided:
            self._part_of |= dict.fromkeys(part, _SteppedParameters())
        self._add_state([parameter for parameter in self._rows if parameter.requires_grad])
        self._in_backward = BackwardSteps(self, divided, early) if early else None

    def _check_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        for group in groups:
            check_options(group)
            for option in ("amsgrad", "maximize", "differentiable"):
                if group.get(option):
                    raise ValueError(f"{option} must be False, but is {group[option]!r}: torch.optim.AdamW has it")
            for parameter in group["params"]:
                if isinstance(parameter, Tensor) and parameter.dtype not in (torch.float32, torch.bfloat16):
                    raise TypeError(
                        f"parameters must be fp32 or bf16, but one is {parameter.dtype}: `onepass.parallel.AdamW` keeps masters "
                        "of fp16 beside MainGrads"
                    )

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def _add_state(self, parameters: Iterable[Tensor]) -> None:
        """Allocate the state of these parameters, that of a part's on a device in one piece."""
        found: dict[torch.device, dict[_SteppedParameters, list[Tensor]]] = {}
        for parameter in parameters:
            mine = _part(parameter)
            if not mine.is_contiguous():
                raise ValueError(f"parameters must be contiguous, but one of shape {tuple(parameter.shape)} is not")
            found.setdefault(mine.device, {}).setdefault(self._part_of[parameter], []).append(parameter)
        for device, some in found.items():
            for part, those in some.items():
                if device not in part.steppers:
                    part.steppers[device] = AdamWStepper(device, self.param_groups)
                wanted = [(_part(each).numel(), self._types_of(each)) for each in those]
                for each, (stored, passed) in zip(those, allocate_state(device, wanted, self._rings.of(device)), strict=True):
                    self._shards[each] = ParameterState(_part(each).view(-1), stored, self._rows[each], device, passed=passed)
        self._adopt()

    def _types_of(self, parameter: Tensor) -> Types:
        """Return the types of a parameter's state."""
        part = _part(parameter)
        moments = _KINDS[self._moments[parameter]] or part.dtype
        if moments is torch.int8 and (part.dim() < 2 or parameter.shape[-1] % BLOCK or part.shape[-1] != parameter.shape[-1]):
            moments = torch.float32  # blocks are of whole rows, so that all ranks divide alike
        return state_types(moments, {LOW: torch.int16} if self._masters and part.dtype is torch.bfloat16 else {})

    def _adopt(self) -> None:
        """Make the state the tensors that kernels write, or those in the host's memory."""
        for parameter, shard in self._shards.items():
            state = {name: _as_parameter(each, parameter, BLOCK if name in SCALES else 1) for name, each in shard.stored.items()}
            self.state[parameter] = {"step": self._step_of(parameter, shard), **state}

    def _step_of(self, parameter: Tensor, shard: ParameterState) -> Tensor:
        return self._part_of[parameter].steppers[shard.device].counts[shard.row]

    # ---- a step ----

    @torch.no_grad()
    def norm(self, tp_group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the norm of all gradients over all ranks, on the device. Collective.

        tp_group: the tensor-parallel ranks. Parameters with a true `tensor_model_parallel` differ from rank to rank; others are
            the same there, and counted once.
        """
        trained = [(parameter, parameter.grad) for parameter in self._rows if parameter.grad is not None]
        if tp_group is None:
            return _norm([grad for _, grad in trained])
        every = tp_group.rank() == 0
        own = _norm([grad for parameter, grad in trained if every or getattr(parameter, "tensor_model_parallel", False)])
        device = next(iter(self._rows)).device  # of a rank without gradients, too: all ranks gather
        norms = start_all_gather(own.to(device).view(1), tp_group).wait()
        whole: Tensor = torch.linalg.vector_norm(norms)
        return whole

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None, norm: Tensor | None = None) -> Any:
        """Step the weights.

        Args:
            closure: computes the loss and gradients again; its loss is returned.
            max_norm: step by the gradient scaled to a norm of at most this, over all ranks. Gradients stay unscaled, and the norm
                before is returned, a tensor on the device. Collective.
            norm: what `norm()` has returned for these gradients; None computes it where max_norm asks for it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_max_norm(max_norm)
        if any(parameter not in self._rows for parameter in self._parameters()):
            raise RuntimeError(
                "the groups' parameters are others than when ShardedAdamW was made, as accelerate's FSDP2 and DeepSpeed replace "
                "them: make it after fully_shard, or after what wraps the model. DeepSpeed takes torch.optim.AdamW, or its own"
            )
        if self._in_backward is not None:
            if max_norm is not None or norm is not None:
                raise ValueError("max_norm must be given as StepInBackward(max_norm=...), as backward has stepped already")
            found = self._in_backward.finish()
            return found if closure is None else loss
        if max_norm is None:
            norm = None
        elif norm is None:
            norm = self.norm()
        self.step_some(list(self._rows), norm, max_norm)
        return norm if closure is None else loss

    @torch.no_grad()
    def step_some(self, parameters: list[Tensor], norm: Tensor | None, max_norm: float | None) -> None:
        """Step those of these that have a gradient."""
        new = [p for p in parameters if p.grad is not None and p not in self._shards]
        if new:
            self._add_state(new)
        given: dict[_SteppedParameters, list[tuple[ParameterState, Tensor]]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            shard = self._shards[parameter]
            if local_part(parameter).data_ptr() != shard.weight.data_ptr():  # as after module.to
                if parameter.dtype is not shard.weight.dtype:
                    raise RuntimeError(
                        f"parameters must keep the type that they had when their optimizer was made, {shard.weight.dtype}, but "
                        f"one is {parameter.dtype} by now: make the optimizer after converting the model"
                    )
                shard.weight = _part(parameter).view(-1)
            given.setdefault(self._part_of[parameter], []).append((shard, _grad_part(parameter)))
        for part, some in given.items():
            part.step(self.param_groups, some, norm, max_norm)

    def accumulate(self) -> AbstractContextManager[None]:
        """In this block gradients of microbatches add up in `.grad`. With in_backward nobody steps in it: the last microbatch's
        backward comes after it."""
        return nullcontext() if self._in_backward is None else self._in_backward.accumulate()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._in_backward is not None:
            self._in_backward.forget()
        super().zero_grad(set_to_none)

    # ---- states ----

    def parameter_states(self) -> Iterator[tuple[Tensor, ParameterState, int]]:
        """Yield each parameter that has a state, the state of this rank's part, and 0, where in the part it begins."""
        self._rings.settle()
        for parameter, state in self._shards.items():
            yield parameter, state, 0

    def state_dict(self) -> dict[str, Any]:
        """Return torch.optim.AdamW's state. Its steps are copies, one each, as optimizers add to them in place."""
        self._rings.settle()
        found = super().state_dict()
        found["state"] = {key: {**state, "step": state["step"].clone()} for key, state in found["state"].items()}
        return with_norm(found, self._in_backward)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this optimizer or of torch.optim.AdamW. It is copied where the kernels have it, in their types. Without
        "low" in it, masters are the weights."""
        self._rings.settle()
        with loading(self, state_dict) as state:
            check_sizes(self.param_groups, state["param_groups"])
            self._check_groups(state["param_groups"])
            loaded = states_of(self.param_groups, state)
            for parameter, theirs in loaded.items():
                check_state(theirs, tuple(parameter.shape))
            set_options(self.param_groups, state["param_groups"])
            take_norm(self.param_groups, self._in_backward)
            self._add_state([parameter for parameter in loaded if parameter not in self._shards])
            for parameter, shard in self._shards.items():
                theirs = loaded.get(parameter, {})
                self._step_of(parameter, shard).fill_(theirs.get("step", 0))
                kept = (name for name in (*MOMENTS, *CODES, *SCALES, LOW, MASTER) if name in theirs)
                shard.load({name: _part(placed_as(theirs[name], parameter)).reshape(-1) for name in kept})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._made:
            raise RuntimeError("groups must be given when ShardedAdamW is made, as state's places are: make it anew")
        super().add_param_group(param_group)


# ---- DTensors ----


def _part(tensor: Any) -> Tensor:
    """This rank's part, in the tensor's own memory."""
    return local_part(tensor).detach()


def _grad_part(parameter: Any) -> Tensor:
    grad = _part(placed_as(parameter.grad, parameter))
    if grad.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"gradients must be fp32 or bf16, but one is {grad.dtype}")
    return grad.contiguous().view(-1)


def _as_parameter(flat: Tensor, parameter: Any, numbers: int = 1) -> Tensor:
    """A tensor of the state in the parameter's shape, a DTensor where that is one. It has one for so many numbers of a row."""
    mine, whole = (_rows_of(shape, numbers) for shape in (_part(parameter).shape, parameter.shape))
    if not has_dtensor(parameter):
        return flat.view(mine)
    from torch.distributed.tensor import DTensor

    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        flat.view(mine), parameter.device_mesh, parameter.placements, run_check=False, shape=whole, stride=stride
    )  # fmt: skip


def _rows_of(shape: torch.Size, numbers: int) -> torch.Size:
    return shape if numbers == 1 else torch.Size((*shape[:-1], shape[-1] // numbers))


def _norm(grads: list[Tensor]) -> Tensor:
    """The norm of all gradients, those of each mesh summed over it."""
    if not grads:
        return torch.zeros(())
    by_mesh: dict[Any, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(layout_of(grad), []).append(grad)
    norms = [_norm_of(alike) for alike in by_mesh.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def _norm_of(grads: list[Any]) -> Tensor:
    """The norm of these over all ranks of their mesh. Norms of bf16 are summed in fp32."""
    wide: Any = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0, torch.float32)))
    return wide.full_tensor() if has_dtensor(wide) else wide  # type: ignore[no-any-return]
