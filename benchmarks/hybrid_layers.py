"""What the kernels of a model's layers take, one kind beside another: products, attention, delta rule or scan, and all the rest.

    python benchmarks/hybrid_layers.py --case qwen3_5                        # 1 x 16384 tokens through 24 layers
    python benchmarks/hybrid_layers.py --case gemma4 --way onepass --json out.json

One GPU, bf16, forward and backward of a case of `onepass bench huggingface` without its head, its loss and its optimizer.
"eager" is transformers with the packages that it takes for hybrids, where these are installed. Times are of kernels in one
traced step, by their names: what is none of the named kinds is norms, convolutions, activations, rotations, gates, residuals,
copies and embeddings. Kernels that run side by side count twice.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from measuring import need_gpus, write
from torch.profiler import ProfilerActivity, profile

from onepass.bench.huggingface_cases import EAGER, LIGER, OURS, cases
from onepass.bench.huggingface_process import as_contender, new_model, tokens

DEVICE = torch.device("cuda", 0)
WAYS = (EAGER, LIGER, OURS)
SHAPE = (1, 16384)
# the first that a kernel's name holds, in this order
KINDS = {
    "delta rule": r"tilelang|gated_delta|gdr|kkt|chunk_(fwd|bwd|local|scan|state)|recompute_w_u|state_passing|bmm_chunk",
    "attention": r"attn|fmha|sdpa|flash|attend|attention|_dq_kernel|_dk_dv_kernel|_dsinks_kernel",
    "products": r"gemm|nvjet|cutlass|cublas|splitK|grouped",
}
_WARM = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", default="qwen3_5", help="the beginning of a case's name (%(default)s)")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this one (can be repeated)")
    parser.add_argument("--top", type=int, default=12, help="kernels of the rest that are shown (%(default)s)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpus()
    case = replace(next(case for case in cases(quick=False) if case.name.startswith(args.case)), sequences=1, length=SHAPE[1])
    rows = []
    for way in args.way or WAYS:
        times = kernels_ms(case, way)
        gc.collect()
        torch.cuda.empty_cache()
        kinds = by_kind(times)
        rest = sorted(((ms, name) for name, ms in times.items() if kind_of(name) == "rest"), reverse=True)
        print(f"{case.name}, 1 x {case.length}, {way}: " + ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in kinds.items()))
        for ms, name in rest[: args.top]:
            print(f"    {ms:7.2f} ms  {name[:120]}")
        rows.append({"case": case.name, "shape": list(SHAPE), "way": way, "ms": kinds, "rest": [[n, ms] for ms, n in rest[:40]]})
        write(args.json, DEVICE, op="hybrid_layers", rows=rows)


def kernels_ms(case, way: str) -> dict[str, float]:
    """Return the milliseconds of each kernel's name in a step."""
    model = new_model(case, DEVICE, case.ours if way == OURS else None)
    as_contender(model, way)
    batch = next(tokens(case, DEVICE))

    for _ in range(_WARM):
        _step(model, batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        _step(model, batch)
        torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.time_range.elapsed_us() / 1e3
    return times


def _step(model, batch: torch.Tensor) -> None:
    model.model(input_ids=batch).last_hidden_state.sum().backward()
    model.zero_grad()


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "rest")


def by_kind(times: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds of each kind, in the order of KINDS, and of the rest."""
    found = dict.fromkeys([*KINDS, "rest"], 0.0)
    for name, ms in times.items():
        found[kind_of(name)] += ms
    return found


if __name__ == "__main__":
    main()
