"""Training steps of Hugging Face models on two GPUs over NCCL, against the same on each of the two by itself.

    torchrun --nproc_per_node 2 benchmarks/two_gpus.py [--case NAME ...] [--json FILE] [--profile]
    python benchmarks/two_gpus.py                                       # one GPU by itself

    8b            Llama 3 8B's shape under FSDP2; weights in bf16 with masters, moments in 8 bits
    8b_backward   the same, stepped in backward
    8b_fp8        the same as 8b, with products of the blocks in eight bits
    lora_ddp      adapters of rank 16 on all linear layers of 8B, under DDP
    lora_fsdp     the same under FSDP2
    moe           4 layers of Qwen3 30B-A3B under FSDP2, moments in fp32

--way says how they run together, several words with commas between: `plain` FSDP2; `keep`, weights stay gathered from forward to
backward; `gather` and `copies`, by copy engines (`use_copy_engines`) gathers alone, and reductions too; `ctas4` and such, so many
blocks of NCCL's at most; `fp32`, reduced in fp32. Under DDP `bucket` reduces all adapters at once.

Weights are random and `huggingface.apply` has replaced what it knows. Losses of one batch differ in eight bits, as each rank has
its own scales of activations. First each rank runs a case alone, without wrapping the
model, both at the same time. Then they run it together, each with as many tokens as before. Scaling is the tokens a second of
both together over the sum of those of each alone. Gradients are clipped. Alone weights are stepped after backward in all cases.

FSDP2 shards each layer, the embedding, and the final norm with the head. Gradients are reduced in the weights' type, which for
two ranks is rounded once, as reduced in fp32 and then stored. CPU milliseconds are those until a step's calls have returned.

--profile traces one step more: the milliseconds of kinds of kernels, of NCCL's kernels by themselves, and without any kernel.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import kernels, need_gpus, step_ms, write
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from onepass.integrations import huggingface
from onepass.parallel import ShardedAdamW, StepInBackward, use_copy_engines

LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "rope_theta": 5e5, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN_MOE = {
    "num_hidden_layers": 4, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960,
}  # fmt: skip
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 512, "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
KINDS = {
    "NCCL": r"nccl",
    "attention": r"attn|fmha|sdpa|flash|attend|attention|_dq_kernel|_dk_dv_kernel",
    "products": r"gemm|nvjet|cutlass|cublas|splitK|grouped",
    "FSDP2's copies": r"split_with_sizes|chunk_cat|CatArray|cat_batched|Memcpy|Memset|copy_kernel|direct_copy",
}
RANGES = r"nccl:|FSDP::|Optimizer\.|DistributedDataParallel"  # of the profiler, which has them beside kernels
NORM = 1.0


@dataclass(frozen=True)
class Case:
    family: str
    sizes: dict[str, Any]
    sequences: int = 4
    length: int = 4096
    wrapped: str = "fsdp"
    precision: str | None = None
    rank: int = 0  # of adapters beside frozen weights
    moments: str | None = "8bit"
    in_backward: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


CASES = {
    "8b": Case("llama", LLAMA),
    "8b_backward": Case("llama", LLAMA, in_backward=True),
    "8b_fp8": Case("llama", LLAMA, precision="fp8"),
    "lora_ddp": Case("llama", LLAMA, rank=16, wrapped="ddp", moments=None),
    "lora_fsdp": Case("llama", LLAMA, rank=16, moments=None),
    "moe": Case("qwen3_moe", QWEN_MOE, moments="fp32"),
}


# ---- a model and its step ----


def new_model(case: Case, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        config = AutoConfig.for_model(case.family, **case.sizes, tie_word_embeddings=False, use_cache=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
        if case.rank:
            from peft import LoraConfig, get_peft_model

            options = {"r": case.rank, "lora_alpha": 2 * case.rank, "target_modules": "all-linear", "init_lora_weights": False}
            model = get_peft_model(model, LoraConfig(**options, task_type="CAUSAL_LM"))
    return model


def shard(model: Any, case: Case, device: torch.device, way: list[str]) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    ctas = next((int(word[4:]) for word in way if word.startswith("ctas")), None)
    if ctas is not None:
        options: Any = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = ctas
        mesh = DeviceMesh.from_group(dist.new_group(pg_options=options), device.type)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if "fp32" in way else None)
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    whole = model.get_base_model() if case.rank else model
    for layer in whole.model.layers:
        fully_shard(layer, **shared, reshard_after_forward="keep" not in way)
    fully_shard(whole.model.embed_tokens, **shared, reshard_after_forward=False)  # backward doesn't read it
    fully_shard([whole.model.norm, whole.lm_head], **shared, reshard_after_forward=False)  # backward begins with them
    fully_shard(whole, **shared)
    if "copies" in way or "gather" in way:
        use_copy_engines(whole, reduce="copies" in way)


def build(case: Case, device: torch.device, way: list[str] | None) -> tuple[Callable[..., Any], ShardedAdamW]:
    """way: None alone."""
    model = new_model(case, device)
    applied = huggingface.apply(model, precision=case.precision, frozen_layouts=2 if case.precision and case.rank else None)
    called: Any = model
    if way is not None and case.wrapped == "fsdp":
        shard(model, case, device, way)
    elif way is not None:
        ids = None if device.type == "cpu" else [device.index]
        whole = {"bucket_cap_mb": 4096} if "bucket" in way else {}
        called = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **whole)
    early = StepInBackward(max_norm=NORM) if case.in_backward and way is not None else False
    optimizer: Any = applied.optimizer(lr=1e-5, moments=case.moments, masters=not case.rank, in_backward=early)
    return called, optimizer


def step(called: Callable[..., Any], optimizer: ShardedAdamW, ids: Tensor, clip: bool) -> Tensor:
    loss: Tensor = called(input_ids=ids, labels=ids).loss
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step(max_norm=NORM if clip else None)
    optimizer.zero_grad()
    return loss.detach()


# ---- measurements ----


def measure(case: Case, device: torch.device, args: argparse.Namespace, way: list[str] | None) -> dict[str, Any]:
    rank, ranks = int(os.environ.get("RANK", 0)), 1 if way is None else dist.get_world_size()
    called, optimizer = build(case, device, way)
    generator = torch.Generator().manual_seed(1 + rank)
    ids = torch.randint(case.sizes["vocab_size"], (case.sequences, case.length), generator=generator).to(device)

    def once() -> Tensor:
        return step(called, optimizer, ids, way is None or not case.in_backward)

    losses = torch.stack([once() for _ in range(args.warm)])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, cpu_times = step_ms(once, args.rounds, args.steps)
    found: dict[str, Any] = {"ms": statistics.median(times), "ms_range": [min(times), max(times)]}
    found["cpu_ms"] = statistics.median(cpu_times)
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    if args.profile:
        found["profile"] = summary(kernels(once))
    if ranks > 1:
        dist.all_reduce(losses)
        same = ids.clone()
        dist.broadcast(same, 0)
        last = called(input_ids=same, labels=same).loss.detach().float().view(1)
        everywhere = [torch.empty_like(last) for _ in range(ranks)]
        dist.all_gather(everywhere, last)
        found["losses_of_one_batch"] = [float(each) for each in everywhere]
    found["losses"] = (losses / ranks).tolist()
    return found


def summary(traced: list[tuple[str, tuple[float, float]]]) -> dict[str, Any]:
    """Return a step's milliseconds: of kinds of kernels, of NCCL's alone, and without kernels, between the first and the last."""
    kinds: dict[str, float] = defaultdict(float)
    traced = [each for each in traced if not re.match(RANGES, each[0])]
    for name, (start, end) in traced:
        kinds[next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "rest")] += end - start
    edges = []
    for name, (start, end) in traced:
        is_nccl = "nccl" in name.lower()
        edges += [(start, is_nccl, 1), (end, is_nccl, -1)]
    running, alone, idle, before = {False: 0, True: 0}, 0.0, 0.0, None
    for at, is_nccl, change in sorted(edges, key=lambda edge: edge[0]):
        if before is not None and not running[False]:
            alone, idle = (alone + at - before, idle) if running[True] else (alone, idle + at - before)
        running[is_nccl] += change
        before = at
    names: dict[str, float] = defaultdict(float)
    for name, (start, end) in traced:
        names[name] += end - start
    top = sorted(names.items(), key=lambda each: -each[1])[:40]
    return {"kinds": dict(kinds), "nccl_alone": alone, "idle": idle, "top": [[name[:110], ms] for name, ms in top]}


def show(rank: int, name: str, way: str, found: dict[str, Any], more: str = "") -> None:
    if rank:
        return
    if "error" in found:
        print(f"{name:12} {way:12} {found['error']}", flush=True)
        return
    times = f"{found['ms']:8.1f} ms  CPU {found['cpu_ms']:7.1f}  {found['tokens_s']:10,.0f} tokens/s"
    losses = f"loss {found['losses'][0]:.4f} -> {found['losses'][-1]:.4f}"
    print(f"{name:12} {way:12} {times}  {found['peak_gib']:6.1f} GiB  {losses}  {more}", flush=True)
    if "profile" in found:
        told = found["profile"]
        kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in told["kinds"].items())
        print(f"    {kinds} ms; NCCL alone {told['nccl_alone']:.1f}, no kernel {told['idle']:.1f}", flush=True)


def tried(case: Case, device: torch.device, args: argparse.Namespace, way: list[str] | None) -> dict[str, Any]:
    """Measure a case. What fails on all ranks, as a case that doesn't fit, has its error as the result."""
    try:
        found = measure(case, device, args, way)
        found["tokens_s"] = case.tokens / found["ms"] * 1e3
    except (RuntimeError, ValueError) as error:
        found = {"error": str(error).splitlines()[0]}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def of_all(found: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    everywhere: list[Any] = [found]
    if ranks > 1:
        everywhere = [None] * ranks
        dist.all_gather_object(everywhere, found)
    return everywhere


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="only this one (can be repeated)")
    parser.add_argument("--way", action="append", help="how ranks run together (can be repeated; keep)")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sequences", type=int, help="sequences a rank")
    parser.add_argument("--length", type=int)
    parser.add_argument("--together", action="store_true", help="leave out the ranks by themselves")
    parser.add_argument("--warm", type=int, default=3, help="steps before those that are timed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="steps of a round (%(default)s)")
    parser.add_argument("--profile", action="store_true", help="trace a step, too")
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU over gloo")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.small:
        need_gpus(otherwise="--small needs none")
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu") if args.small else torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if not args.small:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("gloo" if args.small else "nccl", device_id=None if args.small else device)
    chosen = {name: chosen_sizes(CASES[name], args) for name in args.case or CASES}
    sizes = {name: [case.sizes["num_hidden_layers"], case.sequences, case.length] for name, case in chosen.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, case in chosen.items():
        row = rows[name] = {"alone": [], "together": {}, "scaling": {}}
        if not args.together:
            row["alone"] = of_all(tried(case, device, args, None), ranks)
            for place, found in enumerate(row["alone"]):
                show(rank, name, f"alone, {place}", found)
        for way in args.way or ["keep"] if ranks > 1 else []:
            row["together"][way] = of_ranks = of_all(tried(case, device, args, way.split(",")), ranks)
            found, more = max(of_ranks, key=lambda each: each.get("ms", float("inf"))), ""
            if row["alone"] and not any("error" in each for each in (*row["alone"], *of_ranks)):
                row["scaling"][way] = ranks * found["tokens_s"] / sum(each["tokens_s"] for each in row["alone"])
                more = f"scaling {row['scaling'][way]:.1%}"
            show(rank, name, way, found, more)
            if "error" not in found and rank == 0:
                print(f"    losses of one batch on the ranks: {found['losses_of_one_batch']}", flush=True)
        if rank == 0:
            write(args.json, device, op="two_gpus", ranks=ranks, sizes=sizes, rows=rows)
    if ranks > 1:
        dist.destroy_process_group()


def chosen_sizes(case: Case, args: argparse.Namespace) -> Case:
    sizes = case.sizes | ({name: size for name, size in SMALL.items() if name in case.sizes} if args.small else {})
    if args.layers is not None:
        sizes = sizes | {"num_hidden_layers": args.layers}
    sequences, length = (2, 32) if args.small else (case.sequences, case.length)
    return replace(case, sizes=sizes, sequences=args.sequences or sequences, length=args.length or length)


if __name__ == "__main__":
    main()
