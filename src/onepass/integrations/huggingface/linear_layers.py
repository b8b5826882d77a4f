"""One linear layer of a model: torch's, Transformers' Conv1D, one of four bits or int8, or PEFT's LoRA around one of these.

What a layer's LoRA is can change at any time, so each call looks. Plain adapters, one, several or one for each sample, are the
op's; what else PEFT knows runs by its own code: variants such as DoRA, merged and disabled adapters. Dropout has a mask for each
product, which layers that share it share, where PEFT draws one for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from onepass.integrations.huggingface.patches import Patches
from onepass.integrations.huggingface.snapshot import SILENT, hooked
from onepass.integrations.huggingface.zero import is_partitioned
from onepass.kernels.device_tables import device_table
from onepass.ops.linear.linear import linear
from onepass.product.frozen.taken import frozen_weight
from onepass.product.frozen.weight import FrozenWeight
from onepass.product.lora import MOST_DOCUMENTS, LoRA
from onepass.runtime.dispatch import under_functorch
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.sharding import has_dtensor


def is_linear(module: nn.Module | None) -> bool:
    """Whether the module is nn.Linear itself, or Transformers' Conv1D, whose weight is transposed, with a plain weight.

    Or a layer whose weight `frozen_weight` takes.
    """
    if module is None or not Patches.own(module) or makes_weight(module):
        return False
    if type(module) is nn.Linear or is_conv1d(module):
        weight: Any = module._parameters["weight"]
        if not hasattr(type(weight), "__tensor_flatten__") or has_dtensor(weight):  # torchao's quantised ones have it
            return type(module) is nn.Linear or not keeps_gathered(module)
    return is_frozen(module)


def makes_weight(module: nn.Module) -> bool:
    """Whether the weight is no parameter, but made for each call: by PyTorch's parametrizations, its pruning, or PEFT's."""
    return "weight" not in module._parameters


def keeps_gathered(module: nn.Module) -> bool:
    """Whether a product would keep what ZeRO-3 has gathered until backward: it saves Conv1D's weight as a view."""
    return is_conv1d(module) and is_partitioned(module._parameters["weight"])


def is_frozen(module: nn.Module) -> bool:
    """Whether the layer keeps its weight in few bits that `frozen_weight` takes."""
    kind, weight = type(module), module._parameters.get("weight")  # type: Any, Any
    if kind is nn.Linear:
        if isinstance(weight, FrozenWeight) or type(weight).__name__ == "NF4Tensor":
            return True
        return type(weight).__name__ == "Int8Tensor" and weight.act_quant_kwargs is None and weight.act_pre_scale is None
    if kind.__name__ == "Linear8bitLt":
        return weight.dtype is torch.int8
    return kind.__name__ == "Linear4bit" and getattr(weight, "bnb_quantized", False)


def is_like_linear(module: nn.Module | None) -> bool:
    """Whether the module says the sizes of a linear layer: PEFT's around one, bitsandbytes' or torchao's, and the like."""
    return isinstance(getattr(module, "in_features", None), int) and isinstance(getattr(module, "out_features", None), int)


def is_conv1d(module: nn.Module | None) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def weight_of(module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight as [N, K]. `dtype`: of the rows that it is multiplied by, which one of int8 doesn't know."""
    weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
    if not isinstance(weight, FrozenWeight) and is_frozen(module):
        return frozen_weight(module, dtype=dtype)
    return weight.t() if is_conv1d(module) else weight


def bias_of(module: nn.Module) -> Tensor | None:
    return module.bias  # type: ignore[return-value]


def sizes_of(module: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs)."""
    if not is_linear(module) or is_frozen(module):
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
    few_rows = is_frozen(module) and (torch.compiler.is_compiling() or not torch.is_grad_enabled())  # which theirs is made for
    if few_rows or makes_weight(module) or keeps_gathered(module):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    return linear(x, weight_of(module, x.dtype), bias_of(module) if biased else None, precision=precision_of(module))


def by_linear(self: Any, input: Tensor) -> Tensor:
    """The forward of a linear layer whose gradients or precision are onepass's."""
    if not torch.is_grad_enabled() and precision_of(self) is None:
        return type(self).forward(self, input)  # type: ignore[no-any-return]
    return linear_of(self, input)


# ---- PEFT's LoRA around it ----

_LORA_LAYERS = frozenset(
    (f"peft.tuners.lora.{file}", name)
    for file, name in (
        ("layer", "Linear"), ("bnb", "Linear4bit"), ("bnb", "Linear8bitLt"), ("torchao", "TorchaoLoraLinear")
    )
)  # fmt: skip


def is_lora(module: nn.Module | None) -> bool:
    """Whether the module is PEFT's LoRA layer around a linear layer."""
    return (type(module).__module__, type(module).__name__) in _LORA_LAYERS


def base_of(module: Any) -> Any:
    """Return the layer that PEFT's LoRA wraps, or the module itself."""
    return module.base_layer if is_lora(module) else module


def lora_of(layer: Any, names: Iterable[str] | None = None) -> list[LoRA] | str:
    """Return what the layer adds to its base layer now, or why that is no plain LoRA. Each call of a layer pays for this.

    Args:
        names: of adapters to return in place of the active ones.
    """
    modules = layer._modules  # an attribute that nn.Module looks up takes 1 us
    base = modules["base_layer"]
    if not is_linear(base) or hooked(base, SILENT):
        return "the layer that its LoRA wraps is no plain torch.nn.Linear"
    if layer.fan_in_fan_out is not is_conv1d(base):
        return "its LoRA has a transposed weight"
    if layer.disable_adapters:
        return "its LoRA is disabled and merged" if layer.merged else []
    adapters: list[LoRA] = []
    in_a, in_b = modules["lora_A"]._modules, modules["lora_B"]._modules
    for name in () if layer.merged else layer.active_adapters if names is None else names:
        if name not in in_a:
            continue
        if name in layer.lora_variant:
            return f"its LoRA is a variant, {type(layer.lora_variant[name]).__name__}"
        dropout = modules["lora_dropout"]._modules[name]
        if type(dropout) not in (nn.Identity, nn.Dropout) or hooked(dropout):
            return f"its LoRA has a {type(dropout).__name__} of its own before it"
        a, b = _weight_of_part(in_a[name]), _weight_of_part(in_b[name])
        if a is None or b is None:
            return "its LoRA is made of other than torch.nn.Linear without a bias"
        for weight in (a, b):
            if type(weight) is not nn.Parameter and type(weight) is not Tensor:
                return f"its LoRA's weights are of {type(weight).__name__}"
            if weight.dtype is not torch.float32 and weight.dtype is not (dtype := _dtype_of(base)):
                return f"its LoRA's weights are {weight.dtype} beside {dtype}"
        rate = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
        if adapters and rate != adapters[0].dropout:
            return "its active LoRAs have other rates of dropout"
        adapters.append(LoRA(a, b, float(layer.scaling[name]), None, rate))
    return adapters


def _dtype_of(base: Any) -> torch.dtype:
    """Return the type of a base layer's rows. In bitsandbytes' int8 that is anybody's, and this is the codes'."""
    dtype: torch.dtype = base.weight.dtype if type(base).__name__ == "Linear8bitLt" else weight_of(base).dtype
    return dtype


def _weight_of_part(part: Any) -> Tensor | None:
    parameters: dict[str, Any] = part._parameters
    plain = type(part) is nn.Linear and parameters["bias"] is None and "forward" not in vars(part) and not hooked(part, SILENT)
    return parameters["weight"] if plain else None


def by_lora(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """The forward of PEFT's layer. `options`: what PEFT's hooks give its layers, such as a name for each sample."""
    samples: Sequence[str] = options["adapter_names"] if options.keys() == {"adapter_names"} else ()
    names = [name for name in dict.fromkeys(samples) if name in self.lora_A] if samples else None
    adapters: list[LoRA] | str = []
    if not (args or len(options) > bool(samples) or torch.compiler.is_compiling() or under_functorch()):
        adapters = lora_of(self, names)
    base = self.base_layer
    plain = torch.is_grad_enabled() if is_frozen(base) else type(base.weight) in (Tensor, nn.Parameter)
    if not adapters or isinstance(adapters, str) or hooked(base) or not plain or (samples and len(samples) != len(x)):
        made: Tensor = type(self).forward(self, x, *args, **options)
        return made
    if names is not None:
        return _by_sample(base, x, samples, dict(zip(names, adapters, strict=True)))
    return linear(x, weight_of(base, x.dtype), bias_of(base), lora=adapters, precision=precision_of(base))


def _by_sample(base: Any, x: Tensor, samples: Sequence[str], adapters: dict[str, LoRA]) -> Tensor:
    """Return the product where sample i, x[i], has the adapter of its name, or none: a run of samples is a document of the op.

    Where copies of adapters for all runs would be larger than those of all rows, samples are put in order of their adapters.
    """
    first = next(iter(adapters.values()))
    each, rank = x.shape[1:-1].numel(), max([adapter.a.shape[0] for adapter in adapters.values()])
    known, order = [name if name in adapters else None for name in samples], list(range(len(samples)))
    runs = _runs_of(known)
    if len(runs) > MOST_DOCUMENTS or len(runs) * rank > len(samples) * each:
        order = sorted(order, key=lambda i: (known[i] is None, known[i]))
        x, runs = _taken(x, order), _runs_of([known[i] for i in order])
    if runs[-1][0] is None:
        del runs[-1]
    none = LoRA(first.a[:0], first.b[:, :0], 0.0)
    a, b, scales = zip(*[adapters.get(name, none)[:3] for name, _ in runs], strict=True)  # type: ignore[arg-type]
    ends = device_table(tuple(accumulate([count * each for _, count in runs])), x.device)
    joined = pad_sequence([*a], True), pad_sequence([one.t() for one in b], True).mT  # of one rank, with zeros
    lora = LoRA(*joined, scales, None, first.dropout, ends)
    y = linear(x, weight_of(base, x.dtype), bias_of(base), lora=lora, precision=precision_of(base))
    return _taken(y, sorted(order, key=order.__getitem__))


def _taken(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return x's samples in this order."""
    return x if order == sorted(order) else x[device_table(tuple(order), x.device)]


def _runs_of(names: Iterable[str | None]) -> list[tuple[str | None, int]]:
    """Return each name and how often it follows itself."""
    return [(name, len(list(run))) for name, run in groupby(names)]


def call_layer(module: nn.Module, x: Tensor) -> Tensor:
    """Return the layer's result. PEFT's runs by the op, also where it was put there after onepass."""
    if is_lora(module) and "forward" not in vars(module) and not hooked(module):
        return by_lora(module, x)
    return module(x)  # type: ignore[no-any-return]


# ---- for recognition ----


def tiny(module: nn.Module, inputs: int, outputs: int, seed: int) -> nn.Linear:
    """Return a small random nn.Linear in fp64, with a bias if the module has one."""
    made = nn.Linear(inputs, outputs, bias=getattr(module, "bias", None) is not None, dtype=torch.float64, device="cpu")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=random) / inputs**0.5)
    return made
