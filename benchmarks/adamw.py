"""A whole optimizer step, in one pass and in several: over fp32 gradients in main_grad, and over `.grad` in the weights' type.

    python benchmarks/adamw.py [--json FILE] [--dtype bf16] [--small]

Weights of the shapes of Llama 1B (16 layers, hidden 2048, MLP 8192, vocabulary 128256, tied: 1.24 billion), gradients as
MainGrads has them. Milliseconds, medians over the rounds; peak MiB above what was there before the step:

    onepass            AdamW.step(zero=True), and zero_(), which then writes nothing
    onepass, clipped   the same with max_norm=1, whose norm reads the gradient once more
    masters            MasterWeights over torch.optim.AdamW(fused=True), and zero_()
    masters, clipped   the same with clip_(1) before
    apex               the same with Apex's FusedAdam, where it is installed
    .grad: onepass     ShardedAdamW, moments in the weights' type; with masters, and moments in fp32 or 8 bits; clipped in step
    .grad: torch       torch.optim.AdamW(fused=True); clipped by clip_grad_norm_

"of copy" is the bandwidth that the step's bytes make of the time, as a part of what a copy reaches in the same run. The bytes are
32 a parameter (34 of fp16; 4 more where clipped). Of .grad they are 14 in bf16 (with masters 26, and 14 in 8 bits; 2 more where
clipped), 28 in fp32 (4 more). The bar is .85. --small is a size for a CPU, by the clock on the wall.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import need_gpus, write
from rich.console import Console
from rich.table import Table
from torch import nn

from onepass.parallel import AdamW, MainGrads, MasterWeights, ShardedAdamW
from onepass.runtime.ceilings import clock_for, copy_bandwidth

MakeStep = Callable[[MainGrads, float | None], Callable[[], object]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CLIP = 1.0


def shapes(layers: int, hidden: int, inner: int, vocabulary: int) -> Iterator[tuple[int, ...]]:
    yield vocabulary, hidden
    for _ in range(layers):
        yield from ((hidden,), (hidden + hidden // 2, hidden), (hidden, hidden), (hidden,), (2 * inner, hidden), (hidden, inner))
    yield (hidden,)


def _torchs(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-4, fused=True)


def _apexs(groups: Any) -> torch.optim.Optimizer:
    from apex.optimizers import FusedAdam

    return FusedAdam(groups, lr=1e-4, adam_w_mode=True)  # type: ignore[no-any-return]


def onepass_step(main_grads: MainGrads, clip: float | None) -> Callable[[], object]:
    optimizer = AdamW(main_grads, lr=1e-4)

    def step() -> None:
        main_grads.finish()
        optimizer.step(clip, zero=True)
        main_grads.zero_()

    return step


def masters_step(make: Callable[[Any], torch.optim.Optimizer], main_grads: MainGrads, clip: float | None) -> Callable[[], object]:
    weights = MasterWeights(main_grads, make)

    def step() -> None:
        main_grads.finish()
        if clip is not None:
            main_grads.clip_(clip)
        weights.step()
        main_grads.zero_()

    return step


class Bench:
    def __init__(self, sizes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device, rounds: int) -> None:
        self.sizes, self.dtype, self.device, self.rounds = sizes, dtype, device, rounds
        self.parameters = sum(torch.Size(size).numel() for size in sizes)
        self.clock = clock_for(device)
        self.held = torch.cuda.memory_allocated() if device.type == "cuda" else 0  # by the clock
        self.copy = 1e9 * copy_bandwidth(self.clock, min(1 << 30, 4 * self.parameters))

    def weights(self) -> list[nn.Parameter]:
        torch.manual_seed(0)
        return [nn.Parameter((torch.randn(size, device=self.device) * 0.02).to(self.dtype)) for size in self.sizes]

    def of_main_grads(self, name: str, make: MakeStep, clip: float | None) -> dict[str, Any]:
        main_grads = MainGrads(self.weights())
        for buffer in main_grads.buffers:
            buffer.normal_()
        floor = (34 if self.dtype is torch.float16 else 32) + 4 * (clip is not None)
        found = self.row(name, make(main_grads, clip), clip, floor)
        main_grads.close()
        return found

    def of_grads(self, name: str, make: Callable[[list[nn.Parameter]], Any], floor: int, clip: float | None) -> dict[str, Any]:
        weights = self.weights()
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = make(weights)

        def step() -> None:
            if clip is None or isinstance(optimizer, ShardedAdamW):
                optimizer.step(**({} if clip is None else {"max_norm": clip}))
            else:
                nn.utils.clip_grad_norm_(weights, clip)
                optimizer.step()

        return self.row(name, step, clip, floor + weights[0].element_size() * (clip is not None))

    def row(self, name: str, step: Callable[[], object], clip: float | None, floor: int) -> dict[str, Any]:
        step()  # state is made
        ms = self.clock.median(lambda _: step(), rounds=self.rounds)
        found = {"name": name + (", clipped" if clip is not None else ""), "ms": ms}
        found["of_copy"] = floor * self.parameters / (ms / 1e3) / self.copy
        if self.device.type == "cuda":
            found["kept_mib"] = (torch.cuda.memory_allocated() - self.held) / 2**20
            torch.cuda.reset_peak_memory_stats()
            step()
            found["peak_mib"] = (torch.cuda.max_memory_allocated() - self.held) / 2**20 - found["kept_mib"]
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        makes: dict[str, MakeStep] = {
            "onepass": onepass_step,
            "masters": lambda main_grads, clip: masters_step(_torchs, main_grads, clip),
        }
        if self.device.type == "cuda" and importlib.util.find_spec("apex"):
            makes["apex"] = lambda main_grads, clip: masters_step(_apexs, main_grads, clip)
        for name, make in makes.items():
            for clip in (None, CLIP):
                yield self.of_main_grads(name, make, clip)
        if self.dtype is torch.float16:
            return  # ShardedAdamW has no masters of fp16
        floor = 7 * self.dtype.itemsize
        over_grad: dict[str, tuple[Callable[[list[nn.Parameter]], Any], int]] = {
            ".grad: onepass": (partial(ShardedAdamW, lr=1e-4), floor),
            ".grad: torch": (_torchs, floor),
        }
        if self.dtype is torch.bfloat16:
            kept = partial(ShardedAdamW, lr=1e-4, masters=True)
            over_grad[".grad: onepass, masters"] = partial(kept, moments="fp32"), 26
            over_grad[".grad: onepass, masters, 8 bits"] = partial(kept, moments="8bit"), 14
        for name, (made, bytes_moved) in over_grad.items():
            for clip in (None, CLIP):
                yield self.of_grads(name, made, bytes_moved, clip)


def table(rows: list[dict[str, Any]], title: str) -> Table:
    made = Table("", "ms", "of copy", "kept MiB", "peak MiB above", title=title)
    for row in rows:
        memory = [f"{row[key]:.0f}" if key in row else "" for key in ("kept_mib", "peak_mib")]
        made.add_row(row["name"], f"{row['ms']:.2f}", f"{row['of_copy']:.2f}", *memory)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not args.small:
        need_gpus(otherwise="--small needs none")
    device = torch.device("cpu" if args.small else "cuda")
    sizes = [*shapes(2, 512, 2048, 8192)] if args.small else [*shapes(16, 2048, 8192, 128256)]
    bench = Bench(sizes, DTYPES[args.dtype], device, 7 if args.small else 20)
    rows = [*bench.rows()]
    title = f"{bench.parameters / 1e9:.3f} billion {args.dtype} weights, copy {bench.copy / 1e12:.2f} TB/s"
    Console(width=130).print(table(rows, title))
    write(args.json, device, dtype=args.dtype, copy=bench.copy, rows=rows)


if __name__ == "__main__":
    main()
