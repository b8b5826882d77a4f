"""A training step of Llama 1B under FSDP2: gradients and AdamW by PyTorch, and by FSDPMainGrads and ShardedAdamW.

    python benchmarks/fsdp.py [--json FILE]
    torchrun --nproc_per_node 2 benchmarks/fsdp.py

The model is onepass.gpt's in all: fp32 shards, bf16 products, gradients reduced in fp32, clipping. Each rank has as many tokens.
The CPU's time is that of a step's calls: where it is near the step's, the GPU waits for it.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import join_ranks, step_ms, write
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from onepass.gpt import Model, preset
from onepass.parallel import FSDPMainGrads, ShardedAdamW

WAYS = ("FSDP2", "FSDP2, FSDPMainGrads", "FSDP2, FSDPMainGrads, ShardedAdamW")
BATCHES = ((1, 4), (4, 4))  # microbatches of a step, sequences of each; of fewer sequences, calls take the CPU longest
LENGTH, CLIP = 4096, 1.0


def build(way: str) -> tuple[Any, Any]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model: Any = Model(preset("1B", params_dtype="fp32"), device=torch.device("cuda"), seed=0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if "FSDPMainGrads" in way:
        model.main_grads = FSDPMainGrads(model)
    options = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if "ShardedAdamW" in way:
        return model, ShardedAdamW(model.parameters(), **options)
    return model, torch.optim.AdamW(model.parameters(), fused=True, **options)


def step(model: Any, optimizer: Any, microbatches: list[Tensor]) -> Tensor:
    losses = []
    for place, tokens in enumerate(microbatches):
        model.set_requires_gradient_sync(place == len(microbatches) - 1)
        loss = model(tokens[:, :-1], labels=tokens[:, 1:]) / len(microbatches)
        loss.backward()
        losses.append(loss.detach())
    if isinstance(optimizer, ShardedAdamW):
        optimizer.step(max_norm=CLIP)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


def measure(way: str, count: int, sequences: int) -> dict[str, Any]:
    model, optimizer = build(way)
    vocabulary = model.config.vocab_size
    torch.manual_seed(dist.get_rank())
    microbatches = [torch.randint(vocabulary, (sequences, LENGTH + 1), device="cuda") for _ in range(count)]
    losses = [float(step(model, optimizer, microbatches)) for _ in range(4)]
    torch.cuda.reset_peak_memory_stats()
    times, cpu_times = step_ms(lambda: step(model, optimizer, microbatches), rounds=5, steps=3)
    peak = torch.cuda.max_memory_allocated() / 2**30
    figures = {"ms": statistics.median(times), "ms_range": [min(times), max(times)], "cpu_ms": statistics.median(cpu_times)}
    return figures | {"peak_gib": peak, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    os.environ.update(alone | os.environ)
    device = join_ranks()
    rows: dict[str, dict[str, Any]] = {}
    for count, sequences in BATCHES:
        case = f"1B {count} x {sequences} x {LENGTH}"
        rows[case] = {}
        for way in WAYS:
            rows[case][way] = found = measure(way, count, sequences)
            if dist.get_rank() == 0:
                times = f"{found['ms']:7.1f} ms, CPU {found['cpu_ms']:6.1f}"
                print(f"{case:18} {way:36} {times} {found['peak_gib']:6.1f} GiB  loss {found['losses'][-1]:.4f}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        write(args.json, device, ranks=dist.get_world_size(), rows=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
