"""Runs several linear layers that share an input as one product, together with the norm before them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from onepass.gradients.packed_params import are_packed, concat, pack, unpack
from onepass.integrations.huggingface.norms import NormMatch
from onepass.integrations.huggingface.patches import Patches
from onepass.integrations.huggingface.snapshot import hooked
from onepass.ops.linear.linear import linear
from onepass.ops.norm.compiled_projections import norm_projections, projections, use_compiled_projections
from onepass.ops.norm.norm_linear import norm_linear
from onepass.runtime.dispatch import fast_apply, needs_dispatcher, needs_grad, under_functorch
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.sharding import has_dtensor

LINEARS_CHANGED = "its linear layers are hooked, wrapped or others, or have other biases"


class FoldedNorm:
    """A norm that is fused into the product after it. It normalises the sum of its input and `residual`; h gets the sum.

    This is no dataclass, because FSDP's hooks would pass on a copy.
    """

    def __init__(self, norm: NormMatch, residual: Tensor | None = None) -> None:
        self.norm, self.residual = norm, residual
        self.h: Tensor | None = None


def is_linear(module: nn.Module | None) -> bool:
    """Whether the module is nn.Linear itself, or Transformers' Conv1D, whose weight is transposed, with a plain weight."""
    if module is None or not Patches.own(module) or not (type(module) is nn.Linear or is_conv1d(module)):
        return False
    weight: Any = module.weight
    return not hasattr(type(weight), "__tensor_flatten__") or has_dtensor(weight)  # torchao's quantised ones have it


def is_like_linear(module: nn.Module | None) -> bool:
    """Whether the module says the sizes of a linear layer: PEFT's around one, bitsandbytes' or torchao's, and the like."""
    return isinstance(getattr(module, "in_features", None), int) and isinstance(getattr(module, "out_features", None), int)


def is_conv1d(module: nn.Module | None) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def weight_of(module: nn.Module) -> Tensor:
    """Return the weight as [N, K]."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if is_conv1d(module) else weight


def bias_of(module: nn.Module) -> Tensor | None:
    return module.bias  # type: ignore[return-value]


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs)."""
    if not is_linear(module):
        return module.in_features, module.out_features  # type: ignore[return-value]
    outputs, inputs = weight_of(module).shape
    return inputs, outputs


def precision_of(module: nn.Module) -> FP8Recipe | None:
    """Return the recipe of the layer's products in eight bits, or None where they have their own type.

    Evaluation, in eval mode and without gradients, has that. So it sees weights that PEFT's merge writes through `weight.data`,
    which leaves no trace.
    """
    recipe: FP8Recipe | None = vars(module).get("precision")
    return recipe if recipe is not None and (module.training or torch.is_grad_enabled()) else None


def linear_of(module: nn.Module, x: Tensor, *, biased: bool = True) -> Tensor:
    """Return the layer's product with x."""
    return linear(x, weight_of(module), bias_of(module) if biased else None, precision=precision_of(module))


def by_linear(self: Any, input: Tensor) -> Tensor:
    """The forward of a linear layer whose gradients or precision are onepass's."""
    if not torch.is_grad_enabled() and precision_of(self) is None:
        return type(self).forward(self, input)  # type: ignore[no-any-return]
    return linear_of(self, input)


class LinearsMatch:
    """Linear layers of one module that share an input."""

    def __init__(self, owner: nn.Module, names: tuple[str, ...]) -> None:
        self.owner, self.names = owner, names
        self.linears = [owner.get_submodule(name) for name in names]
        self.sizes = [sizes_of(module)[1] for module in self.linears]
        self.biased = bias_of(self.linears[0]) is not None
        self.kind = self._kind()  # device and dtype when they were packed

    def replace(self, patches: Patches) -> None:
        """Pack the layers' parameters until the patches are undone."""
        if len(self.linears) > 1:
            self.pack()
            patches.on_undo(self.owner.register_state_dict_post_hook(give_own_storages).remove)
            patches.on_undo(self.unpack)

    @classmethod
    def found(cls, owner: nn.Module, names: tuple[str, ...]) -> LinearsMatch | None:
        """Return a match if these are linear layers that can run as one."""
        modules = [owner._modules.get(name) for name in names]
        if not all(map(is_linear, modules)) or (len(names) > 1 and any(map(is_conv1d, modules))):
            return None
        there = [module for module in modules if module is not None]
        if len({id(module.weight) for module in there}) < len(there):  # tied
            return None
        if len({sizes_of(module)[0] for module in there}) > 1 or len({bias_of(module) is None for module in there}) > 1:
            return None
        return cls(owner, names)

    def unpack(self) -> None:
        """Give parameters their own storages. Code that saves a model drops all but one of the tensors that share a storage."""
        unpack(self.weights())
        biases = self._biases()
        if all(bias is not None for bias in biases):
            unpack(biases)

    def pack(self) -> None:
        """Lay out the weights contiguously in memory, and the biases, so that concatenating them copies nothing."""
        self.kind = self._kind()
        if len(self.linears) > 1:
            pack(self.weights())
            if self.biased:
                pack(self._biases())

    def intact(self) -> bool:
        """Whether these are still the owner's children, unwrapped, without hooks and with or without biases as before."""
        children, biased = self.owner._modules, self.biased
        return all(
            children.get(name) is module and is_linear(module) and not hooked(module) and (bias_of(module) is not None) is biased
            for name, module in zip(self.names, self.linears, strict=True)
        )

    def _kind(self) -> tuple[torch.device, torch.dtype]:
        weight = weight_of(self.linears[0])
        return weight.device, weight.dtype

    def _lies_apart(self) -> bool:
        """Whether concatenating the weights would copy them, and save the copy for backward.

        This holds under FSDP, which gathers each layer's weight for a moment only.
        """
        if len(self.linears) == 1 or torch.compiler.is_compiling():
            return False
        if self.kind != self._kind():  # the model was moved since, as Trainer does
            self.pack()
        return not are_packed(self.weights())

    def _one_by_one(self, x: Tensor, folded: FoldedNorm | None, biased: bool) -> Tensor:
        if folded is not None and folded.residual is not None:
            x, folded.h = folded.norm(x, folded.residual)
        elif folded is not None:
            x, folded.h = folded.norm(x), x
        return torch.cat([linear_of(module, x, biased=biased) for module in self.linears], -1)

    def precision(self) -> FP8Recipe | None:
        return precision_of(self.linears[0])

    def weight(self) -> Tensor:
        return concat(self.weights())

    def bias(self) -> Tensor | None:
        return concat(self._biases()) if self.biased else None

    def weights(self) -> list[Tensor]:
        return [weight_of(module) for module in self.linears]

    def _biases(self) -> list[Tensor]:
        return [module.bias for module in self.linears]  # type: ignore[misc]

    def __call__(self, x: Tensor, folded: FoldedNorm | None = None, *, biased: bool = True) -> Tensor:
        """Return x, or its norm, times the concatenated weights. `biased=False` leaves the bias to a later op."""
        if self._lies_apart():
            return self._one_by_one(x, folded, biased)
        precision = self.precision()
        if torch.compiler.is_compiling():
            several = self.weights(), self._biases() if biased and self.biased else [], precision
            if use_compiled_projections(x, None if folded is None else folded.residual, *several):
                return _of_several(x, folded, *several)
        bias = self.bias() if biased else None
        if folded is None:
            return linear(x, self.weight(), bias, precision=precision)
        norm = folded.norm
        options: dict[str, Any] = {"norm": "layer_norm" if norm.layer else "rms_norm", "norm_bias": norm.bias, **norm.options}
        options |= {"residual": folded.residual, "return_input": True, "precision": precision}
        y, folded.h = norm_linear(x, norm.weight, self.weight(), bias, **options)
        return y  # type: ignore[no-any-return]


def _of_several(
    x: Tensor, folded: FoldedNorm | None, weights: list[Tensor], biases: list[Tensor], precision: FP8Recipe | None
) -> Tensor:
    if folded is None:
        return projections(x, weights, biases, precision)
    norm = folded.norm
    y, folded.h = norm_projections(x, folded.residual, norm.weight, norm.bias, norm.kernel_options, weights, biases, precision)
    return y


class _Parts(torch.autograd.Function):
    """Split a product's columns into tensors that share its memory but are no views to autograd.

    Views by split can't be written in place, as OLMo does. With views by narrow, each gradient is as wide as the product and
    full of zeros, and autograd adds them up.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        storage, at, parts = made.untyped_storage(), made.storage_offset(), []
        for size in sizes:
            parts.append(made.new_empty(0).set_(storage, at, (*made.shape[:-1], size), made.stride()))
            at += size * made.stride(-1)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return torch.cat(grads, -1), None


_apart = fast_apply(_Parts)


def parts_of(made: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Split `made` into column ranges that can each be written in place. Nothing else may read `made` afterwards."""
    if len(sizes) > 1 and needs_grad(made) and not needs_dispatcher(made) and not under_functorch():
        return _apart(made, sizes)  # type: ignore[no-any-return]
    ends = list(accumulate(sizes))
    return tuple(made.narrow(-1, end - size, size) for end, size in zip(ends, sizes, strict=True))


def give_own_storages(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give each of this module's tensors in a state dict a storage of exactly its size, in the same memory.

    Code that saves tensors keeps one of those that share a storage, and drops the others.
    """
    for name, tensor in state.items():
        mine = name.startswith(prefix) and type(tensor) is Tensor and tensor.device.type != "meta"
        if mine and tensor.untyped_storage().nbytes() != tensor.nbytes:
            state[name] = from_dlpack(tensor)


def tiny(module: nn.Module, inputs: int, outputs: int, seed: int) -> nn.Linear:
    """Return a small random nn.Linear in fp64, with a bias if the module has one."""
    made = nn.Linear(inputs, outputs, bias=getattr(module, "bias", None) is not None, dtype=torch.float64, device="cpu")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=random) / inputs**0.5)
    return made
