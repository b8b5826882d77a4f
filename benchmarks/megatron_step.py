"""A training step of megatron-core's GPT 1B on one GPU: stock by its local spec, with install(), and with our spec and head too.

    python benchmarks/megatron_step.py [--batch 2] [--json FILE]
    python benchmarks/megatron_step.py --batch 4 --ways split spec split spec    # these, in turns
    python benchmarks/megatron_step.py --way stock                               # one way, in this process

"split" is our spec and head with Megatron's own SelfAttention, which takes queries, keys and values apart; "spec" has
FusedQKVSelfAttention. --profile adds the milliseconds a step of the kernels that took longest.

16 layers of 2048, 8192 wide, 32 heads in 8 groups, a tied vocabulary of 128256, sequences of 4096; bf16, fp32 main_grad and
Megatron's own optimizer. Stock's settings are the best that run without Transformer Engine and Apex. Each way is a process,
whose memory is not divided into segments of fixed sizes: stock needs nearly all of an H100's for two sequences.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import need_gpus, step_ms, write

WAYS = ("stock", "install", "split", "spec")
LENGTH, VOCABULARY = 4096, 128256


def build(way: str) -> tuple[Any, Any]:
    """Return the model within DistributedDataParallel, and its optimizer."""
    if way != "stock":
        from onepass.integrations import megatron

        print(megatron.install(), file=sys.stderr)
    import megatron.core.parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention

    ps.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    ours = way != "stock"
    config = TransformerConfig(
        num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_query_groups=8, hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, bias_activation_fusion=True,
        bias_dropout_fusion=True, masked_softmax_fusion=False, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, normalization="RMSNorm", layernorm_epsilon=1e-5, gradient_accumulation_fusion=ours,
        persist_layer_norm=False, apply_rope_fusion=ours, cross_entropy_loss_fusion=True, attention_softmax_in_fp32=False,
    )  # fmt: skip
    by_spec = way in ("split", "spec")
    spec = megatron.gpt_layer_spec(config) if by_spec else get_gpt_layer_local_spec(normalization="RMSNorm")
    if way == "split":
        spec.submodules.self_attention.module = SelfAttention
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True, position_embedding_type="rope", rotary_base=500000,
    ).cuda().bfloat16()  # fmt: skip
    if by_spec:
        print(megatron.apply(model), file=sys.stderr)
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = DistributedDataParallel(config, options, model)
    adam = OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0)
    return wrapped, get_megatron_optimizer(adam, [wrapped])


def kernel_times(step: Callable[[], Any]) -> dict[str, float]:
    """Return the milliseconds of the kernels that take longest in a step, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        step()
        torch.cuda.synchronize()
    times = sorted(((event.device_time_total / 1e3, event.key) for event in found.key_averages()), reverse=True)
    return {name[:100]: round(time, 2) for time, name in times[:40]}


def measure(way: str, batch: int, profiled: bool = False) -> dict[str, Any]:
    from torch.cuda import max_memory_allocated, reset_peak_memory_stats

    warnings.simplefilter("ignore")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    model, optimizer = build(way)
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    tokens = torch.randint(VOCABULARY, (batch, LENGTH + 1), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    positions = torch.arange(LENGTH, device="cuda")[None].expand(batch, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda"), 1)

    def step() -> torch.Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        finalize_model_grads([model], None)
        optimizer.step()
        return loss.detach()

    losses = [round(float(step()), 3) for _ in range(4)]
    reset_peak_memory_stats()
    times, _ = step_ms(step, rounds=4, steps=3)
    memory = round(max_memory_allocated() / 2**30, 1)
    row = {"way": way, "batch": batch, "ms": round(statistics.median(times), 1), "gib": memory, "losses": losses}
    if profiled:
        row["kernels"] = kernel_times(step)
    dist.destroy_process_group()
    return row


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--way", choices=WAYS, help="measure this one in this process")
    arguments.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="measure these, in this order")
    arguments.add_argument("--profile", action="store_true", help="add the times of kernels")
    arguments.add_argument("--batch", type=int, default=2)
    arguments.add_argument("--json", type=Path)
    args = arguments.parse_args()
    need_gpus()
    if args.way:
        print(json.dumps(measure(args.way, args.batch, args.profile)))
        return
    found = []
    for way in args.ways:
        command = [sys.executable, __file__, "--way", way, "--batch", str(args.batch), *["--profile"] * args.profile]
        env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
        lines = done.stdout.splitlines()
        found.append(json.loads(lines[-1]) if done.returncode == 0 else {"way": way, "batch": args.batch, "failed": True})
        print(found[-1], flush=True)
    write(args.json, torch.device("cuda", 0), rows=found)


if __name__ == "__main__":
    main()
