"""LoRA on a Model: frozen weights, and an adapter in fp32 for each of Hugging Face's linear layers, as PEFT has them.

An adapter changes the rows of a weight that are Hugging Face's layer: q_proj is the first rows of linear_qkv. It starts as PEFT's
does, and `save_adapter` writes a folder that PEFT loads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.gpt.huggingface import their_config
from onepass.gpt.model import Model
from onepass.gpt.parts import Initializer
from onepass.gpt.settings import nearest
from onepass.gpt.weights import BLOCKS, LINEARS, import_safetensors
from onepass.nn.linear import ColumnParallelLinear, RowParallelLinear
from onepass.nn.sharding import DividedParameters, Division, whole_shape
from onepass.product.lora import LoRA

ALL = "all-linear"
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 24  # numbers of a weight that are summed in a call, whose sum may take a wide copy


class AdapterSettings(NamedTuple):
    """What a model's adapters were made with."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # the last parts of Hugging Face's layers' names
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class LinearAdapter(DividedParameters):
    """The LoRA of one of Hugging Face's linear layers: ``lora_a`` [rank, inputs] and ``lora_b`` [outputs, rank].

    Tensor-parallel ranks divide `lora_b` as a column-parallel layer's weight, and `lora_a` as a row-parallel layer's.

    Args:
        linear: the layer whose weight it changes.
        outputs: how ranks divide its outputs, where they do.
        rows: this rank's rows of the weight that it changes. None: all.
        start: of `lora_a`. Its name is Hugging Face's layer's.
    """

    def __init__(
        self,
        linear: ColumnParallelLinear | RowParallelLinear,
        outputs: Division | None,
        rows: tuple[int, int] | None,
        settings: AdapterSettings,
        start: Initializer,
    ) -> None:
        super().__init__(linear.tp_group)
        assert linear.weight is not None
        inputs = Division(1, linear.input_size) if isinstance(linear, RowParallelLinear) else None
        size = linear.output_size if outputs is None else outputs.size // self.ranks
        self.name, self.rows, self.scale, self.start_of_a = start.name, rows, settings.scale, start
        options: dict[str, Any] = {"device": linear.weight.device, "dtype": torch.float32}
        self.hold("lora_a", settings.rank, linear.weight.shape[1], division=inputs, **options)
        self.hold("lora_b", size, settings.rank, division=outputs, **options)
        self.gradient_accumulation_fusion = linear.gradient_accumulation_fusion
        self.reset_parameters()
        self.mark_parameters()

    def reset_parameters(self) -> None:
        """Start as PEFT does: `lora_a` kaiming-uniform, as torch.nn.Linear's weight, and `lora_b` zero."""
        self.start("lora_a", self._draw)
        self.start("lora_b", nn.init.zeros_)

    def _draw(self, a: Tensor) -> None:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=self.start_of_a.generator(a.device))

    def lora(self) -> LoRA:
        return LoRA(self.given(self.lora_a), self.given(self.lora_b), self.scale, self.rows)


# ---- a model's adapters ----


def add_adapters(
    model: Model, rank: int = 16, alpha: float = 32, modules: Sequence[str] = (ALL,), *, use_rslora: bool = False, seed: int = 0
) -> None:
    """Freeze a GPT-2's or Llama's weights, and give linear layers of its blocks LoRA adapters, which train.

        config, model = load_huggingface(folder)
        add_adapters(model, rank=16, alpha=32)
        ...
        save_adapter(model, "adapter", base=folder)    # peft.PeftModel.from_pretrained(base, "adapter")

    Args:
        rank: of each adapter.
        alpha: the adapters' product is multiplied by alpha / rank.
        modules: the last parts of the layers' names in Hugging Face's model, such as ``q_proj`` or ``c_attn``; ``all-linear``.
        use_rslora: multiply by alpha / sqrt(rank).
        seed: of the adapters' start.
    """
    kind = their_config(model.config)["model_type"]
    settings = AdapterSettings(rank, alpha, check_modules(modules, kind), use_rslora)
    if rank < 1:
        raise ValueError(f"rank must be at least 1, but is {rank}")
    if adapter_settings(model) is not None:
        raise ValueError("model must have no adapters, but has some")
    if len(model.layers) < model.config.num_layers:
        raise ValueError("model must be whole, but is a stage of a pipeline")
    model.requires_grad_(False)
    for number, block in model.layers.items():
        for ours, names in LINEARS[kind].items():
            _adapt(block.get_submodule(ours), f"{BLOCKS[kind]}.{number}", names, settings, seed)
    given: Any = model
    given.adapter_settings = settings


def check_modules(modules: Sequence[str], kind: str, argument: str = "modules") -> tuple[str, ...]:
    """Return the names of the layers that get adapters. Raise ValueError for one that no layer of the model has."""
    there = [*dict.fromkeys(name.rpartition(".")[2] for names in LINEARS[kind].values() for name in names)]
    if tuple(modules) == (ALL,):
        return tuple(there)
    for name in modules or ("",):
        if name not in there:
            what = {"gpt2": "GPT-2", "llama": "Llama"}[kind]
            raise ValueError(
                f"{argument} must be {ALL} or some of {', '.join(there)} for a {what}, but has {name!r}{nearest(name, there)}"
            )
    return tuple(name for name in there if name in modules)


def _adapt(linear: Any, at: str, names: tuple[str, ...], settings: AdapterSettings, seed: int) -> None:
    division = linear._divisions["weight"]
    outputs: list[Division | None] = [division if division.dim == 0 else None]
    rows: list[tuple[int, int] | None] = [None]
    if len(names) > 1:  # a block of the weight's rows for each
        outputs = [Division(0, size) for size in division.blocks()]
        rows = [*pairwise(accumulate((size // linear.ranks for size in division.blocks()), initial=0))]
    adapters = {
        short: LinearAdapter(linear, each, own, settings, Initializer(seed, 1.0, f"{at}.{name}"))
        for name, each, own in zip(names, outputs, rows, strict=True)
        if (short := name.rpartition(".")[2]) in settings.modules
    }
    if adapters:
        linear.adapters = nn.ModuleDict(adapters)


def adapter_settings(model: nn.Module) -> AdapterSettings | None:
    """Return what a model's adapters were made with, or None where it has none."""
    settings: AdapterSettings | None = getattr(model, "adapter_settings", None)
    return settings


# ---- PEFT's folder ----


def save_adapter(model: Model, folder: str | Path, *, base: str | None = None) -> None:
    """Save a model's adapters as a folder that `peft.PeftModel.from_pretrained` loads. All ranks of the model call it.

    Args:
        folder: created if missing. Existing files of the same names are replaced.
        base: the folder or the name of the model that the adapters are of, for PEFT's config.
    """
    files = adapter_files(model, base)
    if model.tp_group is None or model.tp_group.rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)


def adapter_files(model: Model, base: str | None = None) -> dict[str, bytes]:
    """Return the contents of an adapter's folder by the files' names. All ranks of the model call it."""
    settings = adapter_settings(model)
    if settings is None:
        raise ValueError("model must have adapters, as add_adapters makes them, but has none")
    kind = their_config(model.config)["model_type"]
    tensors = {
        f"base_model.model.{adapter.name}.{theirs}.weight": _whole(adapter, ours)
        for adapter in model.modules()
        if isinstance(adapter, LinearAdapter)
        for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B"))
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha == int(settings.alpha) else settings.alpha,
        "use_rslora": settings.use_rslora,
        "target_modules": list(settings.modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": kind == "gpt2",  # c_attn and others of GPT-2 have their weights transposed
        "inference_mode": True,
    }
    data: bytes = import_safetensors().torch.save(tensors, metadata={"format": "pt"})
    return {"adapter_config.json": (json.dumps(config, indent=2) + "\n").encode(), "adapter_model.safetensors": data}


def _whole(adapter: LinearAdapter, name: str) -> Tensor:
    """Return an adapter's tensor, gathered from the ranks that divide it."""
    parameter: Any = getattr(adapter, name).detach()
    own = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.contiguous()  # of fully_shard
    division = adapter._divisions.get(name)
    if division is not None and adapter.ranks > 1:
        parts = [torch.empty_like(own) for _ in range(adapter.ranks)]
        dist.all_gather(parts, own, group=adapter.tp_group)
        sizes = [block // adapter.ranks for block in division.blocks()]
        blocks = zip(*(part.split(sizes, division.dim) for part in parts), strict=True)
        own = torch.cat([part for block in blocks for part in block], division.dim)
    return own.cpu()  # type: ignore[no-any-return]


# ---- what the adapters are beside ----


def describe_adapters(model: Model) -> str:
    """Return a sentence: what the adapters are of, and how many parameters train."""
    settings = adapter_settings(model)
    assert settings is not None
    trained = sum(
        math.prod(whole_shape(parameter, adapter._divisions[name]) if name in adapter._divisions else parameter.shape)
        for adapter in model.modules()
        if isinstance(adapter, LinearAdapter)
        for name, parameter in adapter.named_parameters()
    )
    there = model.config.parameters_count() + trained
    return (
        f"LoRA of rank {settings.rank} on {', '.join(settings.modules)}: {trained:,} of {there:,} parameters train, "
        f"{trained / there:.2%}."
    )


@torch.no_grad()
def frozen_digest(model: Model) -> str:
    """Return a hash of the frozen weights' bits: of the sum of each, the same however ranks divide them."""
    frozen: list[Any] = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    sums = torch.stack([_sum_of_bits(parameter) for parameter in frozen])
    if model.tp_group is not None:
        divided = torch.tensor([getattr(each, "tensor_model_parallel", False) for each in frozen], device=sums.device)
        parts = sums * divided
        dist.all_reduce(parts, group=model.tp_group)
        sums = torch.where(divided, parts, sums)
    return hashlib.sha256(json.dumps(sums.tolist()).encode()).hexdigest()


def _sum_of_bits(weight: Tensor) -> Tensor:
    bits = weight.detach().view(_BITS[weight.element_size()]).flatten()
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.split(_AT_ONCE)]).sum()
