"""verl's fused log-probabilities and entropy under a policy's update, as they are and with onepass in one line.

    python examples/policy_verl.py [--size tiny | 1B] [--backend torch | triton] [--steps N] [--out DIR] [--small]

This is what an actor of verl does to its model: the forward with `use_fused_kernels=True`, PPO's clipped loss with an entropy
bonus, and a step of AdamW. There is no rollout: tokens, advantages, old log-probabilities are random. "tiny" takes seconds on a
CPU; "1B" has the sizes of Llama 3.2 1B and wants a GPU of 80 GB; "triton" is verl's other backend, for GPUs. The losses of both
runs go into DIR (updated).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from verl.models.transformers import dense_common

from onepass.integrations import verl as onepass_verl

SAME = 0.02  # how far apart the losses of a step may be: each run rounds in its own way, and a step builds on those before it
TEMPERATURE, CLIP, BONUS = 0.8, 0.2, 0.01


@dataclass(frozen=True)
class Size:
    tokens: int  # of a step
    rate: float
    dtype: torch.dtype
    model: dict[str, Any]


SIZES = {
    "tiny": Size(
        96, 1e-3, torch.float32,
        {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 512},
    ),
    "1B": Size(
        8192, 1e-5, torch.bfloat16,
        {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    ),
}  # fmt: skip


def new_model(size: Size, backend: str, device: str) -> Any:
    """Return a model with the forward that verl gives it."""
    set_seed(0)
    config = AutoConfig.for_model("llama", **size.model, tie_word_embeddings=True, use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=size.dtype)
    model.forward = partial(getattr(dense_common, f"forward_with_{backend}_backend"), model)
    return model.train()


def policy_loss(model: Any, tokens: Tensor, advantages: Tensor, seed: int) -> Tensor:
    output = model(input_ids=tokens, temperature=TEMPERATURE, return_dict=True)
    log_prob, entropy = output.log_probs.flatten(), output.entropy.flatten()
    torch.manual_seed(seed)
    old = log_prob.detach() + 0.1 * torch.randn(log_prob.shape).to(log_prob)
    ratio = (log_prob - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain + BONUS * entropy.float()).mean()


def update(size: Size, backend: str, steps: int) -> tuple[list[float], list[float]]:
    """Return each step's loss and its seconds."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = new_model(size, backend, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate)
    losses, times = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(size.model["vocab_size"], (1, size.tokens), generator=generator).to(device)
        advantages = torch.randn(size.tokens, generator=generator).to(device)
        start = time.perf_counter()
        loss = policy_loss(model, tokens, advantages, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the step
        times.append(time.perf_counter() - start)
    return losses, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch", help="of verl (torch)")
    parser.add_argument("--steps", type=int, help="of each run (20)")
    parser.add_argument("--out", type=Path, default=Path("updated"), help="folder for the losses (updated)")
    parser.add_argument("--small", action="store_true", help="5 steps")
    args = parser.parse_args()
    size, steps = SIZES[args.size], args.steps or (5 if args.small else 20)
    console = Console(width=118)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # more would wait for each other wherever the machine has something else to do

    plain, plain_times = update(size, args.backend, steps)

    installed = onepass_verl.install()  # the one line: in verl's own training, in every worker
    ours, our_times = update(size, args.backend, steps)

    print(installed)
    installed.undo()
    table = Table("step", "as it is", "with onepass", "apart")
    for step in sorted({*range(0, steps, max(1, steps // 8)), steps - 1}):
        table.add_row(str(step + 1), f"{plain[step]:.4f}", f"{ours[step]:.4f}", f"{abs(plain[step] - ours[step]):.1e}")
    table.add_section()
    table.add_row("s a step", f"{statistics.median(plain_times):.3f}", f"{statistics.median(our_times):.3f}", "")
    console.print(table)
    apart = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
    if not apart <= SAME:
        raise SystemExit(f"the losses of both runs must be within {SAME} of each other at every step, but are {apart:.2g} apart")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "losses.json").write_text(json.dumps({"as it is": plain, "with onepass": ours}) + "\n")


if __name__ == "__main__":
    main()
