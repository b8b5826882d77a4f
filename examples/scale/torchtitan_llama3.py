"""Llama 3 by torchtitan on several machines, with onepass's overrides: each function is a config. On each machine:

    PYTHONPATH=examples/scale torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m torchtitan.train --module torchtitan_llama3 --config llama3_8b --hf_assets_path /shared/Llama-3.1-8B \\
        --dump_folder /shared/run --checkpoint.enable

FSDP2 is over all GPUs; --parallelism.tensor_parallel_degree 8 makes it tensor parallel within a machine, FSDP2 between them.
With --parallelism.context_parallel_degree 2 add --override.imports onepass.integrations.torchtitan.block
onepass.integrations.torchtitan.loss: attention is torchtitan's then.

Run by hand: llama3_debugmodel, torchtitan 0.3.0, PyTorch 2.14.1, two and four ranks of two nodes on one CPU host, gloo: FSDP2,
tensor parallel, both, context parallel, with the losses of torchtitan's own config (docs/notes/0044-recipes.md).
tests/scale/test_recipes.py parses such flags where torchtitan is installed. Only read: several hosts, NCCL, an 8B and its data.
"""

from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer


def with_onepass(config: Trainer.Config) -> Trainer.Config:
    config.override.imports = [
        ("onepass.integrations.torchtitan.block", {"flex_as_documents": True}),
        "onepass.integrations.torchtitan.loss",
    ]
    config.training.disable_cuda_graphs = True  # documents differ in number from batch to batch
    return config


def llama3_8b() -> Trainer.Config:
    return with_onepass(config_registry.llama3_8b())


def llama3_debugmodel() -> Trainer.Config:
    """A small one. Its text and tokenizer are in a clone of torchtitan: run it there."""
    return with_onepass(config_registry.llama3_debugmodel())
