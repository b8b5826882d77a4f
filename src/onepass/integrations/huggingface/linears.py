"""Runs several linear layers that share an input as one product, together with the norm before them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from onepass.gradients.packed_gathers import pack_gathers
from onepass.gradients.packed_params import are_packed, concat, pack, unpack
from onepass.integrations.huggingface.linear_layers import (
    base_of,
    bias_of,
    is_conv1d,
    is_frozen,
    is_linear,
    is_lora,
    keeps_gathered,
    lora_of,
    precision_of,
    sizes_of,
    weight_of,
)
from onepass.integrations.huggingface.norms import NormMatch
from onepass.integrations.huggingface.patches import Patches
from onepass.integrations.huggingface.probe import thread
from onepass.integrations.huggingface.snapshot import hooked
from onepass.integrations.huggingface.zero import gathered, is_partitioned
from onepass.ops.linear.linear import linear
from onepass.ops.norm.compiled_projections import norm_projections, projections, use_compiled_projections
from onepass.ops.norm.norm_linear import norm_linear
from onepass.product.frozen.fp8 import freeze_weight
from onepass.product.frozen.taken import frozen_weight
from onepass.product.frozen.weight import FrozenWeight
from onepass.product.lora import LoRA
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.fp8_recipe import FP8Recipe

LINEARS_CHANGED = "its linear layers are hooked, wrapped or others, or have other biases"


class FoldedNorm:
    """A norm that is fused into the product after it. It normalises the sum of its input and `residual`; h gets the sum.

    This is no dataclass, because FSDP's hooks would pass on a copy.
    """

    def __init__(self, norm: NormMatch, residual: Tensor | None = None) -> None:
        self.norm, self.residual = norm, residual
        self.h: Tensor | None = None

    def unfold(self, x: Tensor) -> Tensor:
        """Return the norm's output, for layers that are called one by one."""
        normed: Tensor
        normed, self.h = (self.norm(x), x) if self.residual is None else self.norm(x, self.residual)
        return normed


class LinearsMatch:
    """Linear layers of one module that share an input, with the LoRA that PEFT puts around some of them, before or after."""

    def __init__(self, owner: nn.Module, names: tuple[str, ...]) -> None:
        self.owner, self.names = owner, names
        self.linears = [base_of(owner.get_submodule(name)) for name in names]  # without PEFT's layers around them
        self.sizes = [sizes_of(module)[1] for module in self.linears]
        self.biased = bias_of(self.linears[0]) is not None
        self.frozen = is_frozen(self.linears[0])
        self.whole: tuple[FrozenWeight, list[Tensor]] | None = None  # codes that `freeze` has made, and the layers' parts of them
        self.kind = self._kind()  # device and dtype when they were packed
        self._asked = False  # FSDP2 to gather the weights into one storage
        self._found: dict[int, list[LoRA]] = {}  # adapters that `intact` has seen, by thread

    @property
    def input_size(self) -> int:
        return sizes_of(self.linears[0])[0]

    def replace(self, patches: Patches) -> None:
        """Pack the layers' parameters until the patches are undone."""
        if len(self.linears) > 1 and not self.frozen:
            self.pack()
            patches.on_undo(self.owner.register_state_dict_post_hook(give_own_storages).remove)
            patches.on_undo(self.unpack)

    @classmethod
    def found(cls, owner: nn.Module, names: tuple[str, ...]) -> LinearsMatch | None:
        """Return a match if these are linear layers that can run as one."""
        children = [owner._modules.get(name) for name in names]
        there = [base_of(child) for child in children]
        if not all(map(is_linear, there)) or (len(names) > 1 and any(map(is_conv1d, there))):
            return None
        if len(set(map(is_frozen, there))) > 1:
            return None
        if any(is_lora(child) and isinstance(lora_of(child), str) for child in children):
            return None
        if len({id(module.weight) for module in there}) < len(there):  # tied
            return None
        if len({sizes_of(module)[0] for module in there}) > 1 or len({bias_of(module) is None for module in there}) > 1:
            return None
        return cls(owner, names)

    def freeze(self, recipe: FP8Recipe, layouts: int) -> None:
        """Put codes of eight bits in the place of the layers' frozen weights, whose memory is freed."""
        whole: Any
        if len(self.linears) == 1:
            whole = freeze_weight(self.linears[0], recipe, layouts=layouts)
        else:
            whole = freeze_weight(self.weights(), recipe, layouts=layouts)
            for module, part in zip(self.linears, whole.parts(self.sizes), strict=True):
                module.weight = nn.Parameter(part, requires_grad=False)
        self.frozen, self.whole = True, (whole, [module.weight for module in self.linears])

    def unpack(self) -> None:
        """Give parameters their own storages. Code that saves a model drops all but one of the tensors that share a storage."""
        unpack([weight_of(module) for module in self.linears])
        biases = self._biases()
        if all(bias is not None for bias in biases):
            unpack(biases)

    def pack(self) -> None:
        """Lay out the weights contiguously in memory, and the biases, so that concatenating them copies nothing."""
        self.kind = self._kind()
        if len(self.linears) > 1 and not is_partitioned(self.linears[0].weight):
            pack(self.weights())
            if self.biased:
                pack(self._biases())

    def intact(self) -> bool:
        """Whether these are still the owner's children, without hooks, with or without biases as before, and around them nothing
        but plain LoRA."""
        children, biased, first = self.owner._modules, self.biased, 0
        adapters: list[LoRA] = []
        wrapped = False
        for name, module, size in zip(self.names, self.linears, self.sizes, strict=True):
            child = children.get(name)
            if child is not module:
                wrapped, lora = True, self._plain_lora(child, module)
                if lora is None:
                    return False
                adapters += lora if len(self.names) == 1 else [one._replace(rows=(first, first + size)) for one in lora]
            if not is_linear(module) or hooked(module) or (bias_of(module) is not None) is not biased:
                return False
            if is_frozen(module) is not self.frozen:
                return False
            first += size
        if any([adapter.dropout != adapters[0].dropout for adapter in adapters]):  # adapters of one product share the mask
            return False
        self._found.pop(thread(), None)
        if wrapped:
            self._found[thread()] = adapters
        return not self.frozen or ((self.whole is not None or torch.is_grad_enabled()) and not torch.compiler.is_compiling())

    def change(self) -> str | None:
        """Return why they are not intact, or None."""
        intact = self.intact()
        self._found.pop(thread(), None)  # nobody calls the layers now: PEFT may take its own off before somebody does
        if intact:
            return None
        if any(map(keeps_gathered, self.linears)):
            return "its weights are stored transposed, of which a product would keep what DeepSpeed ZeRO-3 gathers"
        found = [lora_of(child) for name in self.names if is_lora(child := self.owner._modules.get(name))]
        for lora in found:
            if isinstance(lora, str):
                return lora
        rates = {one.dropout for lora in found for one in lora}  # type: ignore[union-attr]
        return "its LoRAs have other rates of dropout, and each a product of its own" if len(rates) > 1 else LINEARS_CHANGED

    @staticmethod
    def _plain_lora(child: nn.Module | None, module: nn.Module) -> list[LoRA] | None:
        """Return what a child around the layer adds to it, or None where that is no plain LoRA."""
        if not is_lora(child) or base_of(child) is not module or torch.compiler.is_compiling() or under_functorch():
            return None
        lora = None if hooked(child) or not Patches.own(child) else lora_of(child)  # type: ignore[arg-type]
        return lora if isinstance(lora, list) else None

    def are_wrapped(self) -> bool:
        """Whether PEFT's layers are around some of them."""
        children = self.owner._modules
        return any([children[name] is not module for name, module in zip(self.names, self.linears, strict=True)])

    def adapters(self) -> list[LoRA]:
        """Return what PEFT's layers add, as adapters of the one weight, and as `intact` has found them right before.

        To look twice takes 3 % of a step's time on the CPU.
        """
        found = self._found.pop(thread(), None)
        if not self.are_wrapped():
            return []
        if found is None:  # another call has taken them
            self.intact()
            found = self._found.pop(thread(), [])
        return found

    def _kind(self) -> tuple[torch.device, torch.dtype]:
        weight = self.linears[0]._parameters["weight"]
        assert weight is not None
        return weight.device, weight.dtype

    def _lies_apart(self) -> bool:
        """Whether concatenating the weights would copy them, and save the copy for backward.

        This holds under FSDP, which gathers each layer's weight for a moment only, and under FSDP2 in the first forward. Codes
        that lie apart have scales of their own.
        """
        if self.frozen:
            return self.whole is not None and not self._is_whole()
        if len(self.linears) == 1 or torch.compiler.is_compiling():
            return False
        if self.kind != self._kind():  # the model was moved since, as Trainer does
            self.pack()
        weights = self.weights()
        if are_packed(weights):
            return False
        if not self._asked:
            self._asked = pack_gathers(weights) is not None
        return True

    def _one_by_one(self, x: Tensor, folded: FoldedNorm | None, biased: bool, adapters: list[LoRA]) -> Tensor:
        x, made, first = x if folded is None else folded.unfold(x), [], 0
        for module, size in zip(self.linears, self.sizes, strict=True):
            own = [adapter._replace(rows=None) for adapter in adapters if adapter.rows == (first, first + size)]
            bias = bias_of(module) if biased else None
            made.append(linear(x, weight_of(module, x.dtype), bias, lora=own or None, precision=precision_of(module)))
            first += size
        return torch.cat(made, -1)

    def precision(self) -> FP8Recipe | None:
        return precision_of(self.linears[0])

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight. `dtype`: of the rows that it is multiplied by, as codes may not know it."""
        if not self.frozen:
            return concat(self.weights())
        if len(self.linears) == 1:
            return weight_of(self.linears[0], dtype)
        return frozen_weight(*self.linears, dtype=dtype) if self.whole is None else self.whole[0]

    def _is_whole(self) -> bool:
        """Whether the layers' weights are still the parts of the codes that `freeze` has made, in the same memory."""
        whole, parts = cast(Any, self.whole)
        place = whole.codes.data_ptr()
        for module, part in zip(self.linears, parts, strict=True):
            now: Any = module._parameters["weight"]
            if now is not part or now.codes.data_ptr() != place or now.dtype is not whole.dtype:
                return False
            place += now.numel()  # a byte each
        return True

    def bias(self) -> Tensor | None:
        return concat(self._biases()) if self.biased else None

    def weights(self) -> list[Tensor]:
        return [gathered(weight_of(module)) for module in self.linears]

    def _biases(self) -> list[Tensor]:
        return [module.bias for module in self.linears]

    def __call__(self, x: Tensor, folded: FoldedNorm | None = None, *, biased: bool = True) -> Tensor:
        """Return x, or its norm, times the concatenated weights. `biased=False` leaves the bias to a later op."""
        adapters = self.adapters()
        if self._lies_apart():
            return self._one_by_one(x, folded, biased, adapters)
        precision, lora = self.precision(), adapters or None
        if torch.compiler.is_compiling():
            several = self.weights(), self._biases() if biased and self.biased else [], precision
            if use_compiled_projections(x, None if folded is None else folded.residual, *several):
                return _of_several(x, folded, *several)
        bias = self.bias() if biased else None
        if folded is None:
            return linear(x, self.weight(x.dtype), bias, precision=precision, lora=lora)
        norm = folded.norm
        options: dict[str, Any] = {"norm": "layer_norm" if norm.layer else "rms_norm", "norm_bias": norm.bias, **norm.options}
        options |= {"residual": folded.residual, "return_input": True, "precision": precision, "lora": lora}
        y, folded.h = norm_linear(x, norm.weight, self.weight(x.dtype), bias, **options)
        return y  # type: ignore[no-any-return]


def _of_several(
    x: Tensor, folded: FoldedNorm | None, weights: list[Tensor], biases: list[Tensor], precision: FP8Recipe | None
) -> Tensor:
    if folded is None:
        return projections(x, weights, biases, precision)
    norm = folded.norm
    y, folded.h = norm_projections(x, folded.residual, norm.weight, norm.bias, norm.kernel_options, weights, biases, precision)
    return y


def give_own_storages(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give each of this module's tensors in a state dict a storage of exactly its size, in the same memory.

    Code that saves tensors keeps one of those that share a storage, and drops the others.
    """
    for name, tensor in state.items():
        mine = name.startswith(prefix) and type(tensor) is Tensor and tensor.device.type != "meta"
        if mine and tensor.untyped_storage().nbytes() != tensor.nbytes:
            state[name] = from_dlpack(tensor)
