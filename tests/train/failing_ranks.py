"""A rank of runs whose text is empty, or whose ranks were given different settings."""

import contextlib
import io
import os
from pathlib import Path

import torch
import torch.distributed as dist

import onepass
from onepass.cli import main
from onepass.train import layout, loop

CASES = {  # more arguments of each of two ranks
    "empty text": ((), ()),
    "layers": (("--num-layers", "1"), ("--num-layers", "2")),
    "type": (("--params-dtype", "fp32"), ("--params-dtype", "bf16")),
    "microbatches": (("--global-batch-size", "64"), ("--global-batch-size", "96")),
    "text": (("--data", "one.txt"), ("--data", "other.txt")),
    "folder": (("--run-dir", "one"), ("--run-dir", "other")),
    "comparison": ((), ("--compare",)),
}


def run(rank, ranks, folder, backend):
    torch.set_num_threads(1)
    folder, stock = Path(folder), dist.init_process_group
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    layout._TURN_S = 0.0
    loop.MatrixPeak = lambda *args: None
    os.chdir(folder)
    for name in ("empty.txt", "one.txt", "other.txt"):
        Path(name).touch()
    device = ["--device", "cuda" if backend == "nccl" else "cpu"]
    arguments = [*device, "--data", "empty.txt", "--run-dir", "run", "--num-layers", "1"]
    found = {}
    for case, more in CASES.items():
        place = {"init_method": f"file://{folder / case}", "rank": rank, "world_size": ranks}
        dist.init_process_group = lambda *args, place=place, **options: stock(*args, **options, **place)
        said = io.StringIO()
        with onepass.use_backend("torch"), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = main(["train", *arguments, *more[rank]])
        dist.destroy_process_group()  # a run that fails keeps it until its process ends
        found[case] = {"status": status, "said": said.getvalue()}
    torch.save(found, folder / f"{rank}.pt")
