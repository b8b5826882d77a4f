"""Ranks of tests/train/test_pipeline.py: train a tiny model with pipeline stages, and save the results for the tests."""

from pathlib import Path
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from parallel.meeting import join

import onepass
from onepass.gpt import Config, Model
from onepass.parallel import DeferredWgrad, MainGrads
from onepass.train import checkpoint, layout
from onepass.train.batches import Batches
from onepass.train.options import Options
from onepass.train.packing import Documents, PackedBatches
from onepass.train.setup import make

LENGTH, STEPS, END = 12, 3, 0
SHAPE = {
    "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 37,
    "max_position_embeddings": 16, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
OPTIONS = {"micro_batch_size": 2, "global_batch_size": 8, "seq_length": LENGTH, "seed": 5, "train_iters": STEPS}
GPT2 = {
    "add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False, "activation_func": "gelu",
}  # fmt: skip
LATER = {"defer_embedding_wgrad_compute": True}
EACH = {"num_layers_per_virtual_pipeline_stage": 1}
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
FIRST, LAST = ({f"num_layers_in_{which}_pipeline_stage": 1} for which in ("first", "last"))
LAST_OF_SIX = {"num_layers": 6, "num_layers_in_last_pipeline_stage": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}
INTERLEAVED, ZERO_BUBBLE = {"pipeline_schedule": "interleaved"}, {"pipeline_schedule": "zero-bubble"}
PACKED = {"pack": True}
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
# ranks -> case -> options of the model, and of its training
CASES = {
    2: {
        "1f1b": ({}, {}),
        "uneven": ({"num_layers": 3} | GPT2, {}),
        "seven microbatches": ({}, {"micro_batch_size": 1, "global_batch_size": 7}),
        "bf16": ({"params_dtype": "bf16"}, {}),
        "recomputed": ({"recompute_granularity": "full"}, {}),
        "experts": ({"num_moe_experts": 3, "moe_ffn_hidden_size": 8}, {}),
        "packed": (GPT2, PACKED),
        "packed, recomputed": ({"recompute_granularity": "full"}, PACKED),
        "packed, interleaved": (EACH, PACKED | INTERLEAVED),
        "packed, zero-bubble": (EACH, PACKED | ZERO_BUBBLE),
        "interleaved": (EACH, INTERLEAVED),
        "interleaved, three microbatches": (EACH, INTERLEAVED | {"global_batch_size": 6}),
        "interleaved, plain": (EACH | {"plain": True}, INTERLEAVED),
        "zero-bubble": (EACH, ZERO_BUBBLE),
        "zero-bubble, a stage each": (GPT2, ZERO_BUBBLE),
        "zero-bubble, three microbatches": (EACH, ZERO_BUBBLE | {"global_batch_size": 6}),
        "zero-bubble, plain": (EACH | {"plain": True}, ZERO_BUBBLE),
        "head later": (LATER, {}),
        "head later, one": (LATER | {"wgrad_deferral_limit": 1}, {}),
        "head later, interleaved": (LATER | EACH, INTERLEAVED),
        "head later, zero-bubble": (LATER | EACH, ZERO_BUBBLE),
        "less on the first": (FIRST | GPT2, {}),
        "less on the last": (LAST | LATER, {}),
        "less on the last, interleaved": (LAST_OF_SIX | VIRTUAL, INTERLEAVED),
        "less on the last, zero-bubble": (LAST_OF_SIX | VIRTUAL, ZERO_BUBBLE),
        "less on the last, zero-bubble, a stage each": (LAST, ZERO_BUBBLE),
        "less on the last, some recomputed": (LAST | {"recompute_granularity": "full", "recompute_num_layers": 2}, {}),
        "two tokens more": (MTP, {}),
        "two tokens more, bf16": (MTP | {"params_dtype": "bf16"}, {}),
        "two tokens more, packed": (MTP | GPT2, PACKED | {"release_main_grads": True}),
        "two tokens more, interleaved": (MTP | EACH, INTERLEAVED),
        "two tokens more, zero-bubble, one layer": (MTP | EACH | {"mtp_use_repeated_layer": True}, ZERO_BUBBLE),
        "two tokens more, head later": (MTP | LATER, {}),
        "two tokens more, plain": (MTP | GPT2 | {"plain": True}, {}),
    },
    4: {
        "four stages": ({}, {}),
        "four stages, zero-bubble": ({}, ZERO_BUBBLE | {"global_batch_size": 10}),
        "tensor, sequence": (SEQUENCE | LATER, {}),
        "tensor": ({"tensor_model_parallel_size": 2} | GPT2, {}),
        "tensor, sequence, zero-bubble": (SEQUENCE | EACH, ZERO_BUBBLE),
        "tensor, sequence, packed": (SEQUENCE, PACKED),
        "data, packed": ({}, PACKED),
        "data": ({}, {}),
        "data, sharded": (LATER, SHARDED),
        "data, sharded, interleaved": (EACH, SHARDED | INTERLEAVED),
        "data, sharded, zero-bubble": (EACH | LATER, SHARDED | ZERO_BUBBLE),
        "four stages, less on both": ({"num_layers": 6} | FIRST | LAST, {}),
        "four stages, less on the last, interleaved": (LAST_OF_SIX | VIRTUAL | {"num_layers": 14}, INTERLEAVED),
        "four stages, less on the last, zero-bubble": (LAST | {"num_layers": 7}, ZERO_BUBBLE),
        "data, sharded, less on the last, interleaved": (LAST_OF_SIX | VIRTUAL, SHARDED | INTERLEAVED),
        "tensor, sequence, less on the last": (SEQUENCE | LAST, {}),
        "two tokens more, four stages": (MTP, {}),
        "two tokens more, tensor, sequence": (MTP | GPT2 | SEQUENCE, {}),
        "two tokens more, data": (MTP, {}),
        "two tokens more, data, sharded": (MTP | GPT2, SHARDED),
    },
}


def settings(name, ranks):
    """Return a case's Config and Options, and whether it uses PyTorch's operators. One rank gets the undivided model."""
    model, training = next(cases[name] for cases in CASES.values() if name in cases)
    model, plain = SHAPE | model, model.get("plain", False)
    model.pop("plain", None)
    if ranks == 1:
        for key in [*SEQUENCE, *LATER, *EACH, *VIRTUAL, *FIRST, *LAST, "wgrad_deferral_limit"]:
            model.pop(key, None)
        training = {key: value for key, value in training.items() if key.endswith("batch_size") or key == "pack"}
    else:
        stages = 4 if "four stages" in name else 2
        model["pipeline_model_parallel_size"] = stages
    return Config(**model), Options(**(OPTIONS | training)), plain


def text():
    return numpy.random.default_rng(3).integers(0, SHAPE["vocab_size"], 400).astype(numpy.uint16)


def batches_of(options, divided):
    arguments = text(), options.global_batch_size, LENGTH, 5, divided.data.rank, divided.data.size, divided.device
    return PackedBatches(Documents(text(), END), *arguments) if options.pack else Batches(*arguments)


def trained(name, divided):
    """Train a few steps. Return losses, gradient norms, evaluation losses before and after, logits and parameter names."""
    config, options, plain = settings(name, divided.ranks)
    made = make(config, options, divided, plain and divided.ranks > 1)
    batches = batches_of(options, divided)
    before = divided.average(made.steps.loss(batches.of_step(7)))
    losses, norms = [], []
    for step in range(STEPS):
        loss, norm = made.steps.run(batches.of_step(step))
        made.update.step(3e-3)
        losses.append(divided.average(loss))
        norms.append(norm)
    made.model.eval()
    tokens = torch.from_numpy(text()[:20].astype(numpy.int64)).view(2, 10).to(divided.device)
    return {
        "losses": torch.stack(losses), "norms": torch.stack(norms), "before": before,
        "after": divided.average(made.steps.loss(batches.of_step(7))), "logits": made.steps.logits(tokens),
        "names": sorted(name for name, _ in made.model.named_parameters()),
    }  # fmt: skip


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    device = torch.get_default_device()
    torch.set_default_device("cpu")  # batches are drawn on the CPU, as in a training run
    onepass.use_backend("torch")
    found = {name: watched(name, layout._groups(settings(name, ranks)[0], device)) for name in CASES[ranks]}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


# each case trains one step from the previous case's checkpoint
HANDED_ON = {
    "1f1b": ("less on the last", "interleaved", "less on the last, zero-bubble, a stage each"),
    "two tokens more": ("two tokens more", "two tokens more, interleaved", "two tokens more, head later"),
}


def hand_on(rank, ranks, folder, backend, kind):
    """Train the steps of HANDED_ON[kind] and save their losses. The last checkpoint is left in the folder."""
    join(rank, ranks, folder, backend)
    onepass.use_backend("torch")
    losses, found = [], None
    for step, name in enumerate(HANDED_ON[kind]):
        config, options, _ = settings(name, ranks)
        divided = layout._groups(config, torch.device("cpu"))
        made = make(config, options.replace(seed=OPTIONS["seed"] + step), divided)  # later cases load weights
        if found is not None:
            assert checkpoint.load(found, made, config, divided) == step
        loss, _ = made.steps.run(batches_of(options, divided).of_step(step))
        made.update.step(3e-3)
        losses.append(loss)
        checkpoint.save(Path(folder) / "checkpoints", step + 1, made, config, options, divided)
        found = checkpoint.find(Path(folder))
    torch.save(torch.stack(losses), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def watched(name, divided):
    """Train a case. Return its results, and what flush, dw_builder, finish and forward calls saw."""
    seen = {"flushed": [], "handed": [], "begun": [], "forwards": []}
    with (
        looked_at(DeferredWgrad, "flush", lambda deferred: seen["flushed"].append(len(deferred))),
        looked_at(DeferredWgrad, "dw_builder", lambda deferred: seen["handed"].append(len(deferred._kept))),
        looked_at(MainGrads, "finish", lambda grads: seen["begun"].append(grads._next)),
        looked_at(Model, "forward", lambda model: seen["forwards"].append(1)),
    ):
        return trained(name, divided) | seen


def looked_at(kind, name, look):
    """Patch a method to call `look` with the object before each call."""
    method = getattr(kind, name)

    def looked(self, *args, **options):
        look(self)
        return method(self, *args, **options)

    return mock.patch.object(kind, name, looked)
