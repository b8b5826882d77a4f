"""Ranks of tests/parallel/test_linear_cross_entropy_module.py: each runs every scenario and saves its results for the tests."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel.meeting import drawn, join
from torch import nn

import onepass
from onepass.nn import LinearCrossEntropy, VocabParallelEmbedding, sharded_state_dict
from onepass.parallel import MainGrads

S, B, D = 6, 2, 12  # sequence, batch and hidden_size
VOCABULARIES = (77, 1)  # the last rank's shard is smaller, or empty
OPTIONS = {"softcap": 3.0, "logit_scale": 0.5, "z_loss": 1e-2}


class Model(nn.Module):
    """An embedding, and an output layer with a tied weight and a bias."""

    def __init__(self, size, group, sequence=False):
        super().__init__()
        self.embedding = VocabParallelEmbedding(size, D, tp_group=group, reduce_scatter_embeddings=sequence)
        self.head = LinearCrossEntropy(D, size, bias=True, tp_group=group, sequence_parallel=sequence, **OPTIONS)
        self.head.weight = self.embedding.weight

    def hidden(self, ids):
        return torch.tanh(self.embedding(ids))

    def forward(self, ids, labels, **options):
        return self.head(self.hidden(ids), labels, **options)


def model(size, group, sequence=False, seed=5):
    device = torch.get_default_device()
    torch.manual_seed(seed)
    with torch.device("cpu"):  # the test draws the same random numbers
        made = Model(size, group, sequence)
    return made.to(device)


def given(size, microbatch):
    """Return ids [batch, sequence] and their labels, of which one is ignored."""
    generator = torch.Generator().manual_seed(microbatch)
    ids, labels = drawn(torch.randint, size, (2, B, S), generator=generator)
    labels[0, 2] = -100
    return ids, labels


def run(rank, ranks, folder, backend):
    """Run every scenario, in the same order on all ranks."""
    join(rank, ranks, folder, backend)
    world, found = dist.group.WORLD, {}
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    with onepass.use_backend("torch" if backend == "gloo" else "triton"):
        for size in VOCABULARIES:
            for sequence in (False, True):
                found[size, sequence] = trained(size, world, alone, sequence)
        found["data parallel"] = data_parallel(rank, world)
    found["said"] = said(world)
    dcp.save(sharded_state_dict(model(77, world)), checkpoint_id=f"{folder}/saved")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def trained(size, world, alone, sequence):
    """Train two microbatches, the second with grad_scale. Return losses, gradients, their norm and logits."""
    both = model(size, world, sequence)
    found = {"start": {name: t.clone() for name, t in both.state_dict().items()}}
    main_grads, losses = MainGrads(both, group=alone, tp_group=world), []
    for microbatch, options in ((0, {}), (1, {"grad_scale": 1.0})):
        ids, labels = given(size, microbatch)
        labels = labels.t().contiguous() if sequence else labels
        loss = both(ids, labels, **options)
        if microbatch == 0:
            with main_grads.accumulate():
                loss.backward()
        else:
            loss.backward()
        losses.append(loss.detach())
    main_grads.finish()
    with torch.no_grad():
        logits = both.head.logits(both.hidden(given(size, 0)[0]))
    grads = {name: t.main_grad.clone() for name, t in both.named_parameters()}
    return found | {"losses": losses, "grads": grads, "norm": main_grads.norm(), "logits": logits, **through_logits(size, both)}


def through_logits(size, both):
    """Return hidden states and their gradient through `logits`, which are the same on all ranks."""
    hidden = both.hidden(given(size, 0)[0]).detach().requires_grad_()
    (dhidden,) = torch.autograd.grad(both.head.logits(hidden).square().sum(), hidden)
    return {"hidden": hidden.detach(), "dhidden": dhidden}


def data_parallel(rank, world):
    """Train with data parallelism: each rank has its own tokens and the whole vocabulary."""
    both = model(77, None)
    main_grads = MainGrads(both, group=world)
    both(*given(77, rank)).backward()
    main_grads.finish()
    return {name: t.main_grad for name, t in both.named_parameters()}


def said(world):
    """Return the module's repr, and the errors of wrong calls, which raise before anything is sent."""
    head = LinearCrossEntropy(D, 77, tp_group=world, sequence_parallel=True)
    found = [repr(head)]
    hidden, labels = torch.ones(S, D), torch.zeros(2 * S, dtype=torch.int64)
    calls = (
        lambda: head(hidden, labels, weight=torch.ones(77, D)),
        lambda: head.logits(hidden[:, :-1]),
        lambda: head(hidden, labels[:-1]),
    )
    for call in calls:
        try:
            call()
        except ValueError as error:
            found.append(str(error))
    return found
