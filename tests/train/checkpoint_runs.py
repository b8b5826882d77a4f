"""Small training runs with checkpoints, on one rank and on several, and an independent reader of the checkpoints."""

import json
import re
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from parallel.adamw_oracle import rounded
from safetensors.torch import load_file

import onepass
from onepass.gpt import Config
from onepass.nn.sharding import part_of
from onepass.runtime.errors import CommandError
from onepass.train import checkpoint, checksums
from onepass.train.batches import TokenBatch
from onepass.train.layout import ParallelLayout, _groups
from onepass.train.options import Options
from onepass.train.setup import make
from onepass.train.updates import MainGradUpdate

SHAPE = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 33,
    "max_position_embeddings": 16, "add_qkv_bias": True, "normalization": "LayerNorm",
}  # fmt: skip
KINDS = {
    "llama": {"untie_embeddings_and_output_weights": True},
    "gpt-2": {"position_embedding_type": "learned_absolute", "add_bias_linear": True, "gated_linear_unit": False},
    "experts": {  # data-parallel shards of replicated parameters end at different offsets on different tensor-parallel ranks
        "num_moe_experts": 3, "moe_ffn_hidden_size": 10, "position_embedding_type": "learned_absolute",
        "max_position_embeddings": 200,
    },
}  # fmt: skip
TENSOR, PIPELINE, ZERO, FSDP, NARROW, RELEASED = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "global_batch_size": 4},
    {"use_distributed_optimizer": True},
    {"use_fsdp": True},
    {"params_dtype": "bf16"},
    {"release_main_grads": True},
)
LAYOUTS = {  # in this order: each layout loads the previous one's checkpoint
    2: {
        "tensor": TENSOR,
        "pipeline": PIPELINE | RELEASED,
        "zero": ZERO,
        "data": RELEASED,
        "fsdp": FSDP,
        "zero, bf16": ZERO | NARROW | RELEASED,
        "fsdp, bf16": FSDP | NARROW,
    },
    4: {"tensor, zero": TENSOR | ZERO, "zero": ZERO, "tensor, fsdp": TENSOR | FSDP, "tensor, data": TENSOR | NARROW},
}
KIND = {2: "llama", 4: "experts"}  # ranks -> kind of model
B, S = 4, 8


def configured(kind="llama", **settings):
    names = Options.names()
    config = Config(**SHAPE | KINDS[kind] | {name: value for name, value in settings.items() if name not in names})
    given = {"micro_batch_size": 2, "seq_length": S, "weight_decay": 0.3}
    return config, Options(**given | {name: value for name, value in settings.items() if name in names})


def alone():
    return ParallelLayout(torch.device("cpu"))


def batch(step, layout):
    tokens = torch.randint(SHAPE["vocab_size"], (B, S + 1), generator=torch.Generator().manual_seed(step))
    own = tokens.chunk(layout.data.size)[layout.data.rank]
    return TokenBatch(own[:, :-1], own[:, 1:])


def go(trained, layout, first, last):
    """Train these steps. Return their losses and gradient norms."""
    found = []
    for step in range(first, last):
        trained.update.set_rate(0.01 / (step + 1))
        loss, norm = trained.steps.run(batch(step, layout))
        trained.update.step(0.01 / (step + 1))
        found.append((loss.item(), norm.item()))
    return found


def saved(folder, step, trained, config, options, layout):
    checkpoint.save(folder / "checkpoints", step, trained, config, options, layout)
    return checkpoint.find(folder)


def started(folder, kind="llama", steps=2, **settings):
    """Train some steps on one rank. Return the trained model and its checkpoint's path."""
    config, options = configured(kind, **settings)
    trained = make(config, options, alone())
    go(trained, alone(), 0, steps)
    return trained, saved(folder, steps, trained, config, options, alone())


def whole(path):
    """Return all whole tensors of a checkpoint, assembled by the shapes and ranges in its files."""
    shapes = {name: said["shape"] for name, said in json.loads((path / "checkpoint.json").read_text())["tensors"].items()}
    found = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for file in path.glob("*.safetensors"):
        for key, part in load_file(file).items():
            name, where = re.fullmatch(r"([^[]+)(?:\[(.*)\])?", key).groups()
            ranges = [slice(*map(int, each.split(":"))) for each in where.split(", ")] if where else []
            assert found[name][tuple(ranges)].isnan().all(), key  # no part is saved twice
            found[name][tuple(ranges)] = part
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


# ---- on several ranks ----


rank_context = partial(onepass.use_backend, "torch")


def run_layouts(group, folder):
    """Run all layouts. Each loads the previous one's checkpoint, saves it again, trains, saves, and resumes from that."""
    found, path, ranks = {}, checkpoint.find(folder / "one"), group.size()
    for at, (name, settings) in enumerate(LAYOUTS[ranks].items()):
        path, found[name] = case(folder / name, path, 2 + 2 * at, KIND[ranks], settings)
    found["full"] = full(folder / "full", group.rank())
    found["first loss"] = [first_loss(settings | NARROW) for settings in ({}, FSDP, FSDP | {"recompute_granularity": "full"})]
    found["damaged"] = damaged(folder / "damaged", group.rank())
    return found


def case(folder, path, step, kind, settings):
    config, options = configured(kind, **settings)
    layout = _groups(config, torch.device("cpu"))
    drawn = None
    if config.params_dtype != "fp32":
        drawn = str(saved(folder / "drawn", 0, make(config, options, layout), config, options, layout))
    trained = make(config, options.replace(seed=5), layout)
    assert checkpoint.load(path, trained, config, layout) == step
    apart = [name for name, mine, theirs in own(trained, layout, whole(path), config) if not torch.equal(mine, theirs)]
    again = saved(folder / "again", step, trained, config, options, layout)
    lines = go(trained, layout, step, step + 1)
    trained.steps.loss(batch(99, layout))  # an evaluation leaves some FSDP weights unsharded
    half = saved(folder / "half", step + 1, trained, config, options, layout)
    lines += go(trained, layout, step + 1, step + 2)
    after = saved(folder / "after", step + 2, trained, config, options, layout)
    other = make(config, options.replace(seed=6), layout)
    checkpoint.load(half, other, config, layout)
    resumed = go(other, layout, step + 1, step + 2)
    paths = {"from": str(path), "again": str(again), "after": str(after), "drawn": drawn}
    return after, {**paths, "apart": apart, "lines": lines, "resumed": resumed}


def own(trained, layout, tensors, config):
    """Yield the name, the actual and the expected tensor of each of this rank's parameters, masters and moments."""
    divisions = {
        f"{path}.{name}": division
        for path, module in trained.model.named_modules()
        for name, division in getattr(module, "_divisions", {}).items()
    }
    kept = stretches(trained)
    for name, parameter in trained.model.named_parameters():
        for prefix in ("", "exp_avg.", "exp_avg_sq."):
            part = tensors[prefix + name]
            if name in divisions:
                part = part_of(part, divisions[name], layout.tensor.rank, layout.tensor.size)
            if not prefix:
                mine = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                yield name, mine, rounded(part.contiguous(), mine.dtype)
            if kept is None:
                mine = trained.update.optimizer.state[parameter][prefix.rstrip(".")] if prefix else parameter
                mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
                yield prefix + name, mine.flatten(), part.flatten()
            elif name in kept:
                yield prefix + name, kept[name][prefix.rstrip(".") or "master"], part.flatten()[stretch_of(trained, name)]


def stretches(trained):
    """Return parameter name -> kind -> tensor of onepass's AdamW state on this rank; None with PyTorch's optimizer."""
    if not isinstance(trained.update, MainGradUpdate):
        return None
    kept = {}
    for name, kind, tensor, *_ in trained.update.optimizer.masters():
        kept.setdefault(name, {})[kind] = tensor
    return kept


def stretch_of(trained, name):
    """Return the slice of the flattened parameter that this rank steps, from its gradient buckets."""
    parts = [part for bucket in trained.update.main_grads.buckets for part in bucket.parts()]
    return next(slice(start - place.start, stop - place.start) for place, start, stop in parts if place.name == name)


def first_loss(settings):
    config, options = configured(**settings)
    layout = _groups(config, torch.device("cpu"))
    return go(make(config, options, layout), layout, 0, 1)[0][0]


def full(folder, rank):
    """Save with a file size limit on the last rank. Return the error, the folders left, and whether find() is unchanged."""
    import resource

    config, options = configured(KIND[dist.get_world_size()], **ZERO)
    layout = _groups(config, torch.device("cpu"))
    trained = make(config, options, layout)
    before = saved(folder, 1, trained, config, options, layout)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == layout.ranks - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    said = refused(lambda: saved(folder, 2, trained, config, options, layout))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    layout.wait_for_all()
    left = sorted(each.name for each in (folder / "checkpoints").iterdir())
    return said, left, checkpoint.find(folder) == before


def damaged(folder, rank):
    """Return the errors of loading a checkpoint that the last rank doesn't have, one with a flipped bit, and one that is short.

    The second block's bit is seen by the second rank alone.
    """
    config, options = configured(KIND[dist.get_world_size()], **ZERO)
    layout = _groups(config, torch.device("cpu"))
    trained = make(config, options, layout)
    with patch.object(checksums, "BLOCK", 4096):
        saved(folder, 1, trained, config, options, layout)
    place = folder / "checkpoints" / "step-00000001" / "0.safetensors"
    path = folder / "nowhere" if rank == layout.ranks - 1 else place.parent
    gone = refused(lambda: checkpoint.load(path, trained, config, layout))
    before = [parameter.clone() for parameter in trained.model.parameters()]
    if rank == 0:
        flip(place, 4096 + 7)
    layout.wait_for_all()
    with patch.object(checksums, "BLOCK", 4096):
        flipped = refused(lambda: checkpoint.load(place.parent, trained, config, layout))
    assert all(map(torch.equal, before, trained.model.parameters()))
    layout.wait_for_all()
    if rank == 0:
        place.write_bytes(place.read_bytes()[:-4])
    layout.wait_for_all()
    return gone, flipped, refused(lambda: checkpoint.load(place.parent, trained, config, layout))


def flip(path, at, mask=0x40):
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def refused(act):
    try:
        act()
    except CommandError as error:
        return str(error)
    return None
