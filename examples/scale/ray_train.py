"""A Hugging Face model by Ray Train's TorchTrainer, with onepass in one line. A worker or a node that dies is replaced.

    python examples/scale/ray_train.py --workers 16 --out /shared/trained    # joins the cluster that runs, or starts one
    torchrun --nproc-per-node 2 examples/scale/ray_train.py --out trained    # the same function without Ray

`train` is what each worker runs, and knows no engine. --out is a folder that all nodes see. The model is tiny and learns the
text of Python's standard library, a byte a token; each step's loss goes to losses.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from onepass.integrations import huggingface

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
State = dict[str, Any]  # of a checkpoint
ROWS, LENGTH = 2, 128  # of a worker's batch


def text() -> torch.Tensor:
    every = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40])
    return torch.tensor(list(every[: len(every) // LENGTH * LENGTH])).view(-1, LENGTH)


def train(options: dict[str, Any], last: State | None, report: Callable[[int, float, State | None], None]) -> None:
    """Train from the last checkpoint on.

    Args:
        report: is called after each step, by all ranks, and by rank 0 with a state where one is to be kept.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY)).to(device).train()
    huggingface.apply(model)  # the one line, before DDP wraps the model
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if last is not None:
        first = last["step"]
        model.load_state_dict(last["model"])
        optimizer.load_state_dict(last["optimizer"])
    rows, losses = text().to(device), Path(options["out"]) / "losses.jsonl"
    if rank == 0:  # steps after the checkpoint come again
        lines = losses.read_text().splitlines(keepends=True) if losses.exists() else []
        losses.write_text("".join(lines[:first]))
    for step in range(first, options["steps"]):
        batch = rows[(torch.arange(ROWS, device=device) + (step * ranks + rank) * ROWS) % len(rows)]
        loss = wrapped(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        due = rank == 0 and (step + 1) % options["save_every"] == 0
        state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()} if due else None
        if rank == 0:
            with losses.open("a") as file:
                file.write(json.dumps({"step": step + 1, "loss": mean.item()}) + "\n")
        report(step + 1, mean.item(), state)


# ---- by Ray ----


def worker(options: dict[str, Any]) -> None:
    import ray.train

    def report(step: int, loss: float, state: State | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            if state is not None:
                torch.save(state, Path(folder) / "state.pt")
            kept = None if state is None else ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step, "loss": loss}, checkpoint=kept)

    last = None
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            last = torch.load(Path(folder) / "state.pt", map_location="cpu")
    train(options, last, report)


def by_ray(options: dict[str, Any], workers: int) -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init()
    run = RunConfig(
        name="onepass",
        storage_path=options["out"],
        failure_config=FailureConfig(max_failures=3),  # after each, all workers start again from the last checkpoint
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    scaling = ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available(), placement_strategy="SPREAD")
    print(TorchTrainer(worker, train_loop_config=options, scaling_config=scaling, run_config=run).fit().metrics)


# ---- by torchrun ----


def by_torchrun(options: dict[str, Any]) -> None:
    dist.init_process_group()
    path = Path(options["out"]) / "state.pt"

    def report(step: int, loss: float, state: State | None) -> None:
        if state is not None:
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

    train(options, torch.load(path, map_location="cpu") if path.exists() else None, report)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2, help="Ray's (2); torchrun has its own number")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10, help="steps (10)")
    parser.add_argument("--out", type=Path, default=Path("trained"), help="folder that all nodes see (trained)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    options = {"steps": args.steps, "save_every": args.save_every, "out": str(args.out.resolve())}
    if "RANK" in os.environ:
        by_torchrun(options)
    else:
        by_ray(options, args.workers)


if __name__ == "__main__":
    main()
