"""Whether adapters learn the same fused: losses by PEFT's code and by `apply`, beside what rounding and seeds do to PEFT's own.

    python benchmarks/lora_curve.py [--model 20M] [--steps N] [--sequences N] [--length N] [--seeds N] [--json FILE] [--quick]

A small Llama with random weights, the same in all runs and frozen, in bf16, and PEFT's LoRA of rank 16 on all linear layers, in
fp32. The text is the bytes of this repository's pages. A seed decides the adapters' first values and the batches. For each seed:

    PEFT             PEFT's and transformers' code
    onepass          the same after `huggingface.apply`
    PEFT, autocast   under bf16 autocast, as `Trainer(bf16=True)` runs it: adapters are rounded to bf16, as onepass does
    PEFT, reordered  each batch's sequences in the opposite order: sums of gradients in another
    PEFT, fp32       weights in fp32, whose values are those of bf16: what the others' rounding is measured by

Distances are of losses at the same step: the mean over steps and seeds, and the largest. Of PEFT's runs those of two seeds, too.
Without a GPU, or with --quick, it runs small.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measuring import write
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from onepass.integrations import huggingface
from onepass.runtime.errors import version_of

PAGES = Path(__file__).parents[1] / "docs"
BYTES = 256  # the vocabulary
MODELS = {"100K": (64, 176, 2), "20M": (640, 1728, 4), "60M": (768, 2048, 8), "120M": (1024, 2752, 9)}  # hidden, inner, layers
RUNS = ("PEFT", "onepass", "PEFT, autocast", "PEFT, reordered", "PEFT, fp32")
PAIRS = [
    ("onepass", "PEFT"),
    ("PEFT, autocast", "PEFT"),
    ("PEFT, reordered", "PEFT"),
    ("onepass", "PEFT, fp32"),
    ("PEFT", "PEFT, fp32"),
    ("PEFT, autocast", "PEFT, fp32"),
]
WARMUP = 20  # steps in which the learning rate rises
OTHER_SEED = "another seed"


def new_model(name: str, size: str, seed: int, device: torch.device) -> nn.Module:
    """Return a run's model. The frozen weights are the same in all runs, the adapters in those of a seed."""
    hidden, inner, layers = MODELS[size]
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=hidden // 32,
        initializer_range=hidden**-0.5, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    frozen = LlamaForCausalLM(config).bfloat16()
    torch.manual_seed(seed)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(frozen, adapters)
    if name == "PEFT, fp32":
        model = model.float()
    if name == "onepass":
        huggingface.apply(model)
    return model.to(device).train()


def losses(name: str, args: argparse.Namespace, text: torch.Tensor, seed: int, device: torch.device) -> torch.Tensor:
    """Return the loss of each step."""
    model = new_model(name, args.model, seed, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=0.0, fused=device.type == "cuda")
    random, found = torch.Generator().manual_seed(seed), []
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.length, (args.sequences, 1), generator=random)
        ids = text[starts + torch.arange(args.length)].to(device)
        ids = ids.flip(0) if name == "PEFT, reordered" else ids
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / WARMUP)
        with torch.autocast(device.type, torch.bfloat16, enabled=name == "PEFT, autocast"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.detach().double())
    return torch.stack(found).cpu()


def distances(found: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return how far runs are from each other. `found`: each run's losses, [seeds, steps]."""
    pairs = [(one, other, found[one], found[other]) for one, other in PAIRS]
    own = found["PEFT"]
    if len(own) > 1:
        pairs.append(("PEFT", OTHER_SEED, own, own.roll(1, 0)))
    rows = []
    for one, other, first, second in pairs:
        apart = first - second
        rows.append({"run": one, "beside": other, "mean": float(apart.abs().mean()), "most": float(apart.abs().max())})
        rows[-1]["end"] = float(apart[:, -len(apart[0]) // 6 :].mean(1).abs().max())  # of the means over the last steps
    return rows


def of_noise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return onepass's mean distances as shares of PEFT's own.

    Another order of sums moves the first losses by last bits of fp32, and those of 100 steps later as much as a rounding to bf16.
    """
    mean = {(row["run"], row["beside"]): row["mean"] for row in rows}
    shares = {
        "from PEFT, of PEFT's under autocast": (("onepass", "PEFT"), ("PEFT, autocast", "PEFT")),
        "from PEFT, of PEFT's in another order": (("onepass", "PEFT"), ("PEFT, reordered", "PEFT")),
        "from PEFT in fp32, of PEFT's": (("onepass", "PEFT, fp32"), ("PEFT", "PEFT, fp32")),
        "from PEFT, of another seed's": (("onepass", "PEFT"), ("PEFT", OTHER_SEED)),
    }
    return {name: mean[one] / mean[other] for name, (one, other) in shares.items() if mean.get(other)}


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", default=not on_gpu, help="run small")
    quick = parser.parse_known_args()[0].quick
    parser.add_argument("--model", choices=MODELS, default="100K" if quick else "20M")
    parser.add_argument("--sequences", type=int, default=4 if quick else 8)
    parser.add_argument("--length", type=int, default=32 if quick else 256)
    parser.add_argument("--steps", type=int, default=20 if quick else 300)
    parser.add_argument("--seeds", type=int, default=2 if quick else 3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, console = torch.device("cuda" if on_gpu else "cpu"), Console(width=130)
    text = torch.tensor(list(b"".join(path.read_bytes() for path in sorted(PAGES.glob("*.md")))))
    curves: dict[str, list[torch.Tensor]] = {name: [] for name in RUNS}
    for seed in range(args.seeds):
        for name in RUNS:
            curves[name].append(losses(name, args, text, seed, device))
            console.print(f"seed {seed}, {name}: {curves[name][-1][0]:.4f} -> {curves[name][-1][-10:].mean():.4f}")
    rows = distances({name: torch.stack(runs) for name, runs in curves.items()})
    shares = of_noise(rows)
    shown = Table("", "beside", "mean distance", "largest", "at the end", title=f"losses of {args.steps} steps, {args.model}")
    for row in rows:
        shown.add_row(row["run"], row["beside"], *[f"{row[key]:.2e}" for key in ("mean", "most", "end")])
    console.print(shown)
    for name, share in shares.items():
        console.print(f"onepass's mean distance {name}: {share:.2f}")
    settings = {"model": args.model, "tokens": args.sequences * args.length, "steps": args.steps, "lr": args.lr}
    settings |= {package: version_of(package) for package in ("peft", "transformers")}
    kept = {name: [[round(float(loss), 5) for loss in run] for run in runs] for name, runs in curves.items()}
    write(args.json, device, **settings, rows=rows, of_noise=shares, losses=kept)


if __name__ == "__main__":
    main()
