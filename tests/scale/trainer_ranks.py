"""What `accelerate launch` starts in test_recipes.py: examples/scale/trainer_fsdp2.py several times, each as a process of its own
would run it. accelerate knows FSDP of accelerators only: here the CPU is one."""

import os
import runpy
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

import onepass

RECIPE = str(Path(__file__).parents[2] / "examples" / "scale" / "trainer_fsdp2.py")
RUNS = {  # the folder and further options of each
    "ours": (),
    "stock": ("--without-onepass",),
    "lora": ("--lora",),
    "stock lora": ("--lora", "--without-onepass"),
}


def run(folder, *options):
    AcceleratorState._reset_state(reset_partial_state=True)
    sys.argv = [RECIPE, "--out", folder, "--steps", "4", "--save-steps", "2", *options]
    runpy.run_path(RECIPE, run_name="__main__")


def main():
    warnings.simplefilter("ignore")
    PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    sharded, checkpointed, train = [], [], Trainer._inner_training_loop

    def watched(self, *args, **options):
        output = train(self, *args, **options)
        modules = list(self.model.modules())
        sharded.append(sum(isinstance(module, FSDPModule) for module in modules))
        checkpointed.append(sum(isinstance(module, CheckpointWrapper) for module in modules))
        return output

    Trainer._inner_training_loop = watched
    with onepass.use_backend("torch"):
        for folder, options in RUNS.items():
            run(folder, *options)
        dist.barrier()
        if os.environ["RANK"] == "0":  # the folder is one of all machines
            shutil.rmtree("ours/checkpoint-4")
            shutil.copytree("ours", "resumed")
        dist.barrier()
        run("resumed")
    assert min(sharded) >= 3 and min(checkpointed) == 2, (sharded, checkpointed)  # each layer, and the model
    dist.destroy_process_group()


main()
