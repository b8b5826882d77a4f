"""Llama 3 by torchtitan's trainer, as it is and with onepass's overrides: the same losses, and what a step takes.

    python examples/pretrain_torchtitan.py [--size small | 1B] [--steps N] [--attention sdpa | flex] [--loss chunked | whole]
        [--names block loss ...] [--precision fp8] [--out DIR] [--small]

torchtitan comes by `pip install torchtitan`; nothing else is downloaded: tokens are random. The small size runs on a CPU in
seconds. 1B wants a GPU of 80 GB: bf16 by FSDP2 on one rank, blocks compiled in both runs. --loss says which of torchtitan's own
onepass's is compared with. DIR gets results.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.tools import utils

if not torch.cuda.is_available():  # before other modules copy them: without a GPU torchtitan means CUDA
    utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

GPU = torch.cuda.is_available()
OURS = "onepass.integrations.torchtitan"
NAMES = ("block", "loss")
SAME = {"small": 1e-4, "1B": 0.05}  # how far apart losses and norms of a step may be: a step builds on those before it
IN_FP8 = 0.2  # the same where onepass's products are in eight bits
WARM = 4  # steps that also compile


@dataclass(frozen=True)
class Size:
    model: str  # torchtitan's name
    rows: int  # of a step
    length: int  # tokens of each
    steps: int


SIZES = {"small": Size("debugmodel", 2, 64, 6), "1B": Size("1B", 4, 4096, 16)}


class Watch(MetricsProcessor):
    """What the trainer says of each step, and when. torchtitan's own asks CUDA for its memory."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    device_name = torch.cuda.get_device_name() if GPU else "cpu"

    def __init__(self, config: Any, **_: Any) -> None:
        self.config, self.color, self.device_memory_monitor = config, utils.NoColor(), self
        self.ntokens_since_last_log, self.data_loading_times = 0, []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.ends: list[float] = []

    def get_peak_stats(self) -> Any:
        return SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)

    def log(self, step: int, loss: float, largest_loss: float, norm: float, extra_metrics: Any = None) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self.ends.append(time.perf_counter())
        if GPU and step == WARM:
            torch.cuda.reset_peak_memory_stats()

    def close(self) -> None:
        """There is no file."""

    def results(self) -> dict[str, Any]:
        times = [end - start for start, end in pairwise(self.ends[WARM - 1 :])]
        gib = torch.cuda.max_memory_allocated() / 2**30 if GPU else None
        return {"losses": self.losses, "norms": self.norms, "ms": statistics.median(times) * 1e3, "gib": gib}


class Words(BaseDataLoader):
    """Rows of random tokens, each one document."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int

    def __init__(self, config: Any, *, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self.vocabulary, self.shape = config.vocabulary, (local_batch_size, seq_len + 1)

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1).contiguous()
        while True:
            tokens = torch.randint(self.vocabulary, self.shape, generator=generator)
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is none."""


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> Any:
        """Never called."""

    decode = get_vocab_size = encode


LOSSES = {"chunked": ChunkedLossWrapper, "whole": CrossEntropyLoss}


def new_config(size: Size, attention: str, loss: str, steps: int, out: Path) -> Any:
    spec = model_registry(size.model)
    if attention == "sdpa":  # whole rows, by cuDNN's kernel on a GPU
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    training = TrainingConfig(
        local_batch_size=size.rows, seq_len=size.length, steps=steps, disable_cuda_graphs=True,
        mixed_precision_param="bfloat16" if GPU else "float32",
    )  # fmt: skip
    config = Trainer.Config(
        model_spec=spec, training=training, loss=LOSSES[loss].Config(), optimizer=default_adamw(lr=1e-4),
        dataloader=Words.Config(vocabulary=spec.model.vocab_size), tokenizer=NoTokenizer.Config(), dump_folder=str(out),
        metrics=Watch.Config(log_freq=1),
    )  # fmt: skip
    config.debug.seed, config.debug.enable_structured_logging = 0, False
    config.lr_scheduler.warmup_steps = 2
    config.activation_checkpoint = None
    config.compile.enable = GPU
    return config


def train(config: Any) -> dict[str, Any]:
    trainer = Trainer(config)
    data = trainer.batch_generator(trainer.dataloader)
    for _ in range(config.training.steps):
        trainer.step += 1
        trainer.train_step(data)
    found = trainer.metrics_processor.results()
    trainer.close()
    return found


def options_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if args.attention == "flex" and name in ("block", "gqa", "attention"):
        options["flex_as_documents"] = True
    if args.precision and name in ("block", "gqa", "feed_forward"):
        options["precision"] = args.precision
    return options


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--size", choices=SIZES, default="small")
    arguments.add_argument("--small", action="store_const", const="small", dest="size")
    arguments.add_argument("--attention", choices=("sdpa", "flex"), default="sdpa")
    arguments.add_argument("--loss", choices=LOSSES, default="chunked")
    arguments.add_argument("--names", nargs="+", default=NAMES, help=f"onepass's overrides ({' '.join(NAMES)})")
    arguments.add_argument("--precision", choices=("fp8",), help="of onepass's products")
    arguments.add_argument("--steps", type=int)
    arguments.add_argument("--out", type=Path, default=Path("pretrain_torchtitan"))
    args = arguments.parse_args()
    if args.steps is not None and args.steps <= WARM:
        arguments.error(f"--steps must be above {WARM}, as the first {WARM} are not timed, but is {args.steps}")
    size = SIZES[args.size]
    os.environ.setdefault("LOCAL_RANK", "0")
    device = {"device_id": torch.device("cuda", 0)} if GPU else {}
    dist.init_process_group("nccl" if GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1, **device)
    found = {}
    for way in ("as it is", "with onepass"):
        config = new_config(size, args.attention, args.loss, args.steps or size.steps, args.out)
        if way == "with onepass":
            config.override.imports = [(f"{OURS}.{name}", options_of(name, args)) for name in args.names]
        found[way] = train(config)
        torch._dynamo.reset()
        gc.collect()
    stock, ours = found.values()
    print(f"{'':14} {'loss':>16} {'norm':>16} {'ms a step':>10} {'GiB':>6}")
    for way, each in found.items():
        losses, norms = (f"{each[name][0]:.4f}, {each[name][-1]:.4f}" for name in ("losses", "norms"))
        print(f"{way:14} {losses:>16} {norms:>16} {each['ms']:10.1f} {each['gib'] or float('nan'):6.1f}")
    memory = f" and {ours['gib'] / stock['gib']:.3f} of its memory" if GPU else ""
    print(f"with onepass a step takes {ours['ms'] / stock['ms']:.3f} of its time{memory}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(found) + "\n")
    apart = max(abs(a - b) for name in ("losses", "norms") for a, b in zip(stock[name], ours[name], strict=True))
    most = IN_FP8 if args.precision else SAME[args.size]
    if not apart <= most:
        raise SystemExit(f"losses and norms of both runs must be within {most}, but are {apart:.1e} apart")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
