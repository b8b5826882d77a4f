"""Ranks of tests/parallel/test_adamw.py: train with AdamW on shards, and save the results for the tests."""

import copy

import torch
import torch.distributed as dist
from parallel.main_grads_ranks import BF16, BYTES, FP32, Mixed, backwards, said
from parallel.meeting import join
from parallel.poisoned import poisoned

import onepass
from onepass.parallel import AdamW, MainGrads, MasterWeights

TYPES = [FP32, BF16]
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
CLIP = 0.5


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    found = {"trained": {dtype: trained(rank, dtype) for dtype in TYPES}}
    with onepass.use_backend("torch"):
        found |= {"resumed": resumed(rank), "pieces": pieces(), "without": [without_a_part(dtype) for dtype in TYPES]}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def made(dtype, shard=True, release=False):
    model = Mixed(dtype, norms=FP32)
    main_grads = MainGrads(model, bucket_bytes=BYTES, shard=shard, release=release)
    return model, main_grads, AdamW(main_grads, groups_of(model))


def groups_of(model):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]  # includes the frozen parameter
    return [{"params": decay, **OPTIONS}, {"params": rest, "weight_decay": 0.0, "lr": 0.03}]


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(rank, model, main_grads, optimizer, steps, clip=CLIP):
    norms = []
    for step in steps:
        main_grads.zero_()
        with onepass.use_backend("torch"):
            backwards(main_grads, model, rank, first=10 * step)
        main_grads.finish()
        norms.append(optimizer.step(clip, zero=True))
    return norms


def trained(rank, dtype):
    """Train with AdamW and with MasterWeights, clipped by the whole gradient's norm. Check that all buffers end up zero."""
    model, main_grads, optimizer = made(dtype)
    start = weights_of(model)
    norms = train(rank, model, main_grads, optimizer, range(3))
    main_grads.zero_()
    cleared = not any(buffer.any() for buffer in main_grads.buffers)
    with poisoned():
        again = made(dtype, release=True)
        train(rank, *again, range(3))

    other = Mixed(dtype, norms=FP32)
    theirs = MainGrads(other, bucket_bytes=BYTES, shard=True)
    weights = MasterWeights(theirs, lambda groups: torch.optim.AdamW(groups, fused=True), groups_of(other))
    with onepass.use_backend("torch"):
        for step in range(3):
            theirs.zero_()
            backwards(theirs, other, rank, first=10 * step)
            theirs.finish()
            norm = theirs.clip_(CLIP)
            weights.step()
    return {
        "ours": weights_of(model),
        "released": weights_of(again[0]),
        "theirs": weights_of(other),
        "start": start,
        "cleared": cleared,
        "norms": (norms[-1].item(), norm.item()),
        "kept": sum(stop - begin for _, kind, _, begin, stop in optimizer.masters() if kind == "exp_avg"),
        "total": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def resumed(rank):
    """Save after two steps, and resume in a new model from the optimizer's state alone."""
    one = made(BF16)
    train(rank, *one, range(2))
    state = copy.deepcopy(one[2].state_dict())
    train(rank, *one, range(2, 3))
    two = made(BF16)
    with torch.no_grad():
        for parameter in two[0].parameters():
            if parameter.requires_grad:
                parameter.mul_(2.0)
    other = {**state, "shard": [state["shard"][0] + 1, state["shard"][1]]}
    words = said(two[2].load_state_dict, other)
    two[2].load_state_dict(state)
    train(rank, *two, range(2, 3))
    straight, again = weights_of(one[0]), weights_of(two[0])
    two[0].second.weight.data = two[0].second.weight.data.clone()
    two[1].finish()
    return {"straight": straight, "again": again, "said": words, "moved": said(two[2].step)}


def pieces():
    _, _, optimizer = made(BF16)
    return [(name, kind, start, stop) for name, kind, _, start, stop in optimizer.masters()]


def without_a_part(dtype):
    """Train a parameter so small that rank 0 steps all of it and rank 1 nothing: with AdamW, resumed, and with MasterWeights."""
    kinds = {
        "AdamW": lambda main_grads: AdamW(main_grads, **OPTIONS),
        "MasterWeights": lambda main_grads: MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, **OPTIONS)),
    }
    found = {}
    for name, make in kinds.items():
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=dtype))
        main_grads = MainGrads([weight], shard=True)
        optimizer = make(main_grads)
        for _ in range(3):
            main_grads.zero_()
            (weight.float() ** 2).sum().backward()
            main_grads.finish()
            if name == "AdamW":
                optimizer.step(CLIP, zero=True)
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            else:
                main_grads.clip_(CLIP)
                optimizer.step()
        found[name] = weight.detach().clone()
    found["parts"] = sum(1 for bucket in main_grads.buckets for _ in bucket.parts())
    return found
