"""Load and save Hugging Face folders of GPT-2 and Llama models: config.json and safetensors, in one file or in shards.

A parameter of Model is one Hugging Face tensor, or several concatenated along dim 0: q_proj, k_proj and v_proj; gate_proj and
up_proj. GPT-2 stores the weights of its blocks' linear layers transposed. Nothing is rounded: a load followed by a save gives the
same weights bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.gpt.config import Config
from onepass.gpt.huggingface import config_of, their_config
from onepass.gpt.model import Model
from onepass.nn.sharding import Division, part_of
from onepass.runtime.errors import install_hint
from onepass.runtime.regular_file import read_regular

_CONFIG, _WHOLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_MOST_POSITIONS = 1 << 24
LONGEST_JSON = 64 << 20  # bytes; an index of 100,000 tensors has 10 MB


# The linear layers of a block, by the kind of model, and Hugging Face's layers that each consists of.
LINEARS: dict[str, dict[str, tuple[str, ...]]] = {
    "gpt2": {
        "self_attention.linear_qkv": ("attn.c_attn",),
        "self_attention.linear_proj": ("attn.c_proj",),
        "mlp.linear_fc1": ("mlp.c_fc",),
        "mlp.linear_fc2": ("mlp.c_proj",),
    },
    "llama": {
        "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.linear_proj": ("self_attn.o_proj",),
        "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": ("mlp.down_proj",),
    },
}
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers"}  # the name of Hugging Face's list of blocks


class Entry(NamedTuple):
    """A parameter of Model, and the Hugging Face tensors that it consists of."""

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False


def entries(config: Config, kind: str) -> Iterator[Entry]:
    """Yield an entry for each parameter of a model of this kind, ``gpt2`` or ``llama``."""
    yield from (_gpt2 if kind == "gpt2" else _llama)(config)


def _gpt2(config: Config) -> Iterator[Entry]:
    yield Entry("embedding.word_embeddings.weight", ("transformer.wte.weight",))
    yield Entry("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    parts = {"input_layernorm": ("ln_1",), "pre_mlp_layernorm": ("ln_2",), **LINEARS["gpt2"]}
    for layer in range(config.num_layers):
        for ours, (theirs,) in parts.items():
            at = f"layers.{layer}.{ours}", f"{BLOCKS['gpt2']}.{layer}.{theirs}"
            yield Entry(f"{at[0]}.weight", (f"{at[1]}.weight",), "linear" in ours)
            yield Entry(f"{at[0]}.bias", (f"{at[1]}.bias",))
    for name in ("weight", "bias"):
        yield Entry(f"final_layernorm.{name}", (f"transformer.ln_f.{name}",))
    if not config.tied:
        yield Entry("output_layer.weight", ("lm_head.weight",))


def _llama(config: Config) -> Iterator[Entry]:
    yield Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    for layer in range(config.num_layers):
        at = f"{BLOCKS['llama']}.{layer}"
        for ours, theirs in norms.items():
            yield Entry(f"layers.{layer}.{ours}.weight", (f"{at}.{theirs}.weight",))
        for ours, several in LINEARS["llama"].items():
            for name in ("weight", "bias") if config.add_bias_linear else ("weight",):
                yield Entry(f"layers.{layer}.{ours}.{name}", tuple(f"{at}.{each}.{name}" for each in several))
    yield Entry("final_layernorm.weight", ("model.norm.weight",))
    if not config.tied:
        yield Entry("output_layer.weight", ("lm_head.weight",))


# ---- load ----


def load_huggingface(
    folder: str | Path,
    *,
    tp_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    **changes: Any,
) -> tuple[Config, Model]:
    """Return (config, model) of a GPT-2 or Llama folder that Hugging Face's `save_pretrained` has written.

    Args:
        folder: holds config.json and safetensors files. Pickle files, which can run code, are never read.
        tp_group: the tensor-parallel group; each rank gets its shard of the model.
        device: the parameters' device.
        changes: fields of the configuration to change, such as ``params_dtype="bf16"`` or the fusions.
    """
    folder = Path(folder)
    theirs = read_config(folder)
    config, kind = config_of(theirs).replace(**changes), str(theirs["model_type"])
    files = _Files(folder, kind)
    if config.parameters_count() > files.size:  # before a model of that size is created
        raise ValueError(
            f"{_CONFIG} must be of the weights beside it, but is of {config.parameters_count():,} parameters, and the files have "
            f"{files.size:,} bytes"
        )
    if config.max_position_embeddings > _MOST_POSITIONS:  # rotary tables have a row for each
        raise ValueError(f"max_position_embeddings must be at most {_MOST_POSITIONS}, but is {config.max_position_embeddings}")
    model = Model(config, tp_group=tp_group, device="meta", seed=0)
    model.to_empty(device=device or torch.get_default_device())
    homes = _homes(model)
    with torch.no_grad():
        for entry in entries(config, kind):
            _put(homes[entry.ours], entry, [files.tensor(name) for name in entry.theirs])
    files.check_all_used()
    return config, model


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json."""
    path = folder / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"folder must hold {_CONFIG}, but {folder} does not")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ValueError if it is another thing, or too large."""
    if path.stat().st_size > LONGEST_JSON:
        raise ValueError(f"{path} must be of at most {LONGEST_JSON} bytes, but is of {path.stat().st_size}")
    try:
        parsed = json.loads(read_regular(path).decode())
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{path} must be JSON, but is not: {why}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must be a JSON object, but is {parsed!r:.50}")
    return parsed


class _Home(NamedTuple):
    """The module that holds a parameter, and how the module divides it over ranks."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> Tensor:
        parameter: Tensor = getattr(self.module, self.name)
        return parameter

    @property
    def division(self) -> Division | None:
        division: Division | None = getattr(self.module, "_divisions", {}).get(self.name)
        return division

    @property
    def zero_centered(self) -> bool:
        return self.name == "weight" and bool(getattr(self.module, "zero_centered_gamma", False))


def _homes(model: Model) -> dict[str, _Home]:
    return {
        f"{path}.{name}": _Home(module, name)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }


def _put(home: _Home, entry: Entry, tensors: list[Tensor]) -> None:
    whole = torch.cat([each.t() if entry.transposed else each for each in tensors])
    if home.zero_centered:
        whole = whole.to(torch.promote_types(whole.dtype, torch.float32)) - 1
    rank, ranks = getattr(home.module, "rank", 0), getattr(home.module, "ranks", 1)
    part = whole if home.division is None or ranks == 1 else part_of(whole, home.division, rank, ranks)
    if part.shape != home.parameter.shape:
        names = " and ".join(entry.theirs)
        raise ValueError(f"{names} must make {entry.ours} {tuple(home.parameter.shape)}, but make {tuple(part.shape)}")
    home.parameter.copy_(part)


class _Files:
    """The tensors of a folder's safetensors files. Each is read when `tensor` asks for it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.used = kind, set[str]()
        index = folder / _INDEX
        if index.is_file():
            places = _read_object(index).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
                raise ValueError(f"{index} must have weight_map, the file of each tensor, but has {places!r:.50}")
            names = sorted(set(places.values()))
        elif (folder / _WHOLE).is_file():
            names = [_WHOLE]
        else:
            raise FileNotFoundError(f"folder must hold {_WHOLE} or {_INDEX}, but {folder} holds neither")
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise FileNotFoundError(f"{_INDEX} must name files beside it, but {name!r} is none")
        self.size = sum((folder / name).stat().st_size for name in names)
        files = [_opened(folder / name) for name in names]
        self.where = {self._full(key): (file, key) for file in files for key in file.keys()}  # noqa: SIM118

    def _full(self, key: str) -> str:
        """Add the prefix that the original GPT-2 files leave out."""
        bare = self.kind == "gpt2" and not key.startswith(("transformer.", "lm_head."))
        return f"transformer.{key}" if bare else key

    def tensor(self, name: str) -> Tensor:
        if name not in self.where:
            raise ValueError(f"folder must hold the weight {name}, but does not")
        self.used.add(name)
        file, key = self.where[name]
        weight: Tensor = file.get_tensor(key)
        if not weight.is_floating_point():
            raise ValueError(f"the weight {name} must be of floats, but is {weight.dtype}")
        return weight

    def check_all_used(self) -> None:
        """Raise ValueError for weights that were not used, other than buffers and lm_head.weight, a copy of a tied embedding."""
        buffers = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
        left = [name for name in self.where if name not in self.used and not name.endswith(buffers) and name != "lm_head.weight"]
        if left:
            raise ValueError(f"folder must hold a {self.kind} model's weights alone, but has {', '.join(sorted(left)[:3])} too")


def _opened(path: Path) -> Any:
    safetensors = import_safetensors()
    try:
        return safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file, but is not: {error}") from None


def import_safetensors() -> Any:
    """Return the package, with its part for PyTorch."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"Hugging Face's weights need safetensors: {install_hint('train')}") from error
    return safetensors


# ---- save ----


def save_huggingface(model: Model, folder: str | Path, *, shard_bytes: int = 5 << 30) -> None:
    """Save a folder that Hugging Face's `from_pretrained` reads: a GPT-2 if positions are learned, else a Llama.

    Args:
        model: a whole model, on one rank.
        folder: created if missing. Existing files of the same names are replaced.
        shard_bytes: the largest size of a file; larger models are split into several. A file exceeds it only where a single
            weight does.
    """
    theirs = their_config(model.config)
    if model.config.tensor_model_parallel_size > 1 or len(model.layers) < model.config.num_layers:
        raise ValueError("model must be whole, but is divided over ranks or stages: load its checkpoint on one rank first")
    save_file = import_safetensors().torch.save_file
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    homes = _homes(model)
    shards = list(_shards(entries(model.config, theirs["model_type"]), homes, shard_bytes))
    places: dict[str, str] = {}
    size = 0
    for at, shard in enumerate(shards):
        name = _WHOLE if len(shards) == 1 else f"model-{at + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {key: tensor for entry in shard for key, tensor in _theirs(homes[entry.ours], entry, model.config.dtype)}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        size += sum(t.nbytes for t in tensors.values())
    (folder / _INDEX).unlink(missing_ok=True)
    if len(shards) > 1:
        (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2) + "\n")
    (folder / _CONFIG).write_text(json.dumps(theirs, indent=2) + "\n")


def _shards(found: Iterator[Entry], homes: dict[str, _Home], most: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    size = 0
    for entry in found:
        own = homes[entry.ours].parameter.nbytes  # an upper bound: norms in fp32 are written in the model's dtype
        if shard and size + own > most:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += own
    yield shard


def _theirs(home: _Home, entry: Entry, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face names and tensors, in the model's dtype. Norms are cast too: there a model has one dtype."""
    whole = home.parameter.detach()
    if home.zero_centered:
        whole = whole.to(torch.promote_types(whole.dtype, torch.float32)) + 1
    whole = whole.to(dtype)
    parts: Any = [whole]
    if len(entry.theirs) > 1:
        assert home.division is not None
        parts = whole.split(home.division.blocks())
    for name, part in zip(entry.theirs, parts, strict=True):
        yield name, (part.t() if entry.transposed else part).contiguous().cpu()
