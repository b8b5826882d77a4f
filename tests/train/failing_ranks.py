"""A rank of a run whose text is empty."""

import contextlib
import io
import os
from pathlib import Path

import torch
import torch.distributed as dist

import onepass
from onepass.cli import main
from onepass.train import layout, loop


def run(rank, ranks, folder, backend):
    torch.set_num_threads(1)
    folder, said = Path(folder), io.StringIO()
    store = f"file://{folder / 'store'}"
    stock = dist.init_process_group
    dist.init_process_group = lambda *args, **options: stock(*args, **options, init_method=store, rank=rank, world_size=ranks)
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": str(rank)}
    layout._TURN_S = 0.0
    loop.MatrixPeak = lambda *args: None
    (folder / "empty.txt").touch()
    arguments = ["--device", "cpu", "--data", str(folder / "empty.txt"), "--run-dir", str(folder / "run")]
    with onepass.use_backend("torch"), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main(["train", *arguments, "--num-layers", "1"])
    torch.save({"status": status, "said": said.getvalue()}, folder / f"{rank}.pt")
