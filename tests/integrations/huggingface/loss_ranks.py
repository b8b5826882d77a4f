"""Ranks of tests/integrations/huggingface/test_loss.py: train under DDP and fully_shard, and save the results for the tests.

The models are: one with only the loss replaced, one with all of onepass, and one without onepass.
"""

import copy
from itertools import product

import torch
import torch.distributed as dist
from parallel.meeting import join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface.loss import replace_loss
from onepass.integrations.huggingface.patches import Patches


def fully_sharded(model, *own):
    """Shard the layers and each of `own` by itself, and the rest with the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, *own):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


CASES = {
    "DDP": DistributedDataParallel,
    "fully_shard": fully_sharded,
    "fully_shard, the head too": lambda model: fully_sharded(model, model.lm_head),
    "fully_shard, norm and head": lambda model: fully_sharded(model, [model.model.norm, model.lm_head]),
}


PUT = {"the loss": lambda model: replace_loss(model, Patches()), "all": huggingface.apply}


def step(called, model, ids):
    """Return the logits' shape, the loss, and the whole gradients."""
    with onepass.use_backend("torch"):
        outputs = called(input_ids=ids, labels=ids)
        outputs.loss.backward()
    grads = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    return tuple(outputs.logits.shape), outputs.loss.detach(), grads


def alone(model, batches):
    """Return each rank's loss, and the mean of the ranks' gradients, computed by one process."""
    losses = [step(model, model, ids)[1] for ids in batches]  # .grad accumulates
    return losses, {name: p.grad / len(batches) for name, p in model.named_parameters()}


def run(rank, ranks, folder, backend):
    import transformers

    join(rank, ranks, folder, backend)
    torch.manual_seed(0)
    size = {"vocab_size": 307, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    start = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)).train()
    batches = torch.randint(307, (ranks, 2, 12)).unbind()
    found = {"alone": alone(copy.deepcopy(start), batches)}
    for (name, wrapped), (what, put) in product(CASES.items(), PUT.items()):
        model = copy.deepcopy(start)
        put(model)
        found[f"{name}, {what}"] = step(wrapped(model), model, batches[rank])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
