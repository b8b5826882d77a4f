"""Ranks of tests/integrations/huggingface/test_precision.py: train in eight bits under DDP and fully_shard, and save losses."""

import copy

import torch
import torch.distributed as dist
from integrations.huggingface.loss_ranks import CASES
from parallel.meeting import join

import onepass
from onepass.integrations import huggingface


def losses_of(called, parameters, batches):
    """Return the losses of a step of each batch."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for ids in batches:
        with onepass.use_backend("torch"):
            loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(rank, ranks, folder, backend):
    import transformers

    join(rank, ranks, folder, backend)
    torch.manual_seed(0)
    size = {"vocab_size": 307, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    start = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)).train()
    ids = torch.randint(307, (2, 12))  # the same for each rank, and so the gradients' mean
    alone = copy.deepcopy(start)
    found = {"alone": losses_of(alone, alone.parameters(), [ids] * 4)}
    for name in ("DDP", "fully_shard"):
        model = copy.deepcopy(start)
        huggingface.apply(model, precision="fp8")
        called = CASES[name](model)
        found[name] = losses_of(called, called.parameters(), [ids] * 4)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
