"""How wrong attention's gradients of q and k are where softmaxes are sharp, by each package's kernels: the table in numerics.md.

    python benchmarks/attention_sharp_scores.py [--tokens 512] [--width 64] [--seeds 8]
    TRITON_INTERPRET=1 python benchmarks/attention_sharp_scores.py    # onepass's kernels on a CPU

Each number is the relative RMS error of dq and dk over that of the formula in fp32 whose products have bf16 operands, both
against fp64: two heads of normal numbers, causal, the mean of the seeds. Rows are standard deviations of the scores. "stored y"
is that formula with delta made as the kernels make it, the sum of dy y, of the y that is stored; it is the sum of p dp otherwise.
"""

from __future__ import annotations

import argparse
import os

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onepass.ops.attention.attention import attend_with, attention
from onepass.runtime.backend import find_op

if os.environ.get("TRITON_INTERPRET") == "1":
    import onepass.testing.interpreter  # noqa: F401

BY = ("onepass", "cudnn", "flash_attn", "torch")
SPREADS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
HEADS = 2


def exact(qkv: Tensor, dy: Tensor, scale: float) -> Tensor:
    leaf = qkv.double().requires_grad_()
    q, k, v = leaf.unflatten(-1, (3, HEADS, -1)).unbind(2)
    y = _softmax(q, k, scale) @ v.transpose(1, 2)
    return torch.autograd.grad(y.transpose(1, 2).flatten(2), leaf, dy.double())[0]


def rounded_formula(qkv: Tensor, dy: Tensor, scale: float, stored_y: bool) -> Tensor:
    """In fp32, with operands of products and results in bf16."""

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    q, k, v = (x.transpose(1, 2) for x in qkv.float().unflatten(-1, (3, HEADS, -1)).unbind(2))
    p, dy = _softmax(q.transpose(1, 2), k.transpose(1, 2), scale), dy.float().unflatten(-1, (HEADS, -1)).transpose(1, 2)
    highest, dp = p.amax(-1, keepdim=True), dy @ v.mT
    y = rounded(rounded(p / highest) @ v * highest)
    ds = rounded(p * (dp - (dy * y if stored_y else p * dp).sum(-1, keepdim=True)))
    parts = ds @ k * scale, ds.mT @ q * scale, rounded(p).mT @ dy
    return torch.stack([part.transpose(1, 2) for part in parts], 2).flatten(2).bfloat16()


def _softmax(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * scale
    return scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def gradient(by: str, qkv: Tensor, dy: Tensor, scale: float) -> Tensor:
    leaf = qkv.clone().requires_grad_()
    if by == "onepass":  # its own kernels, which have no backend's name
        y = attend_with(by, find_op(attention).call(leaf, HEADS, scale=scale))
    else:
        y = attention(leaf, HEADS, scale=scale, backend=by)
    return torch.autograd.grad(y, leaf, dy)[0]


def ratio(by: str, spread: float, tokens: int, width: int, seed: int, device: torch.device) -> float:
    generator, scale = torch.Generator().manual_seed(seed), spread * width**-0.5
    qkv, dy = (torch.randn(1, tokens, n * HEADS * width, generator=generator).to(device, torch.bfloat16) for n in (3, 1))
    found = rounded_formula(qkv, dy, scale, True) if by == "stored y" else gradient(by, qkv, dy, scale)
    right, plain = exact(qkv, dy, scale), rounded_formula(qkv, dy, scale, False)
    of_q_and_k = slice(0, 2 * HEADS * width)
    mine, its = ((x.double() - right)[..., of_q_and_k].norm() for x in (found, plain))
    return float(mine / its)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 512), ("width", 64), ("seeds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table, missing = Table("scores' deviation", "stored y", *BY), {}
    for spread in SPREADS:
        row = []
        for by in ("stored y", *BY):
            try:
                ratios = [ratio(by, spread, args.tokens, args.width, seed, device) for seed in range(args.seeds)]
                row.append(f"{sum(ratios) / len(ratios):.2f}")
            except (RuntimeError, ValueError) as error:
                missing[by] = str(error)
                row.append("")
        table.add_row(f"{spread:g}", *row)
    console = Console()
    console.print(table)
    for by, why in missing.items():
        console.print(f"{by}: {why}", highlight=False)


if __name__ == "__main__":
    main()
