"""A Hugging Face model by transformers' Trainer under DeepSpeed ZeRO-3, with onepass in one line.

    torchrun --nproc-per-node 8 examples/scale/deepspeed_trainer.py --model meta-llama/Llama-3.1-8B
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/scale/deepspeed_trainer.py --steps 10

On several machines torchrun takes --nnodes and --rdzv-endpoint. Without --model it trains a tiny one. The text is that of
Python's standard library, a byte a token. --plain leaves onepass away: the losses are the same to rounding.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from onepass.integrations import huggingface

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}


def text(length: int) -> list[dict[str, torch.Tensor]]:
    every = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40])
    rows = torch.tensor(list(every[: len(every) // length * length])).view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def load(name: str | None) -> Any:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    set_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a name on the Hub, or a folder (a tiny Llama)")
    parser.add_argument("--deepspeed", default=str(Path(__file__).with_name("deepspeed_zero3.json")), help="DeepSpeed's options")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--out", default="trained", help="folder of checkpoints (trained)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--plain", action="store_true", help="without onepass")
    args = parser.parse_args()

    if not torch.cuda.is_available():
        deepspeed.init_distributed("gloo")
    options = TrainingArguments(  # before the model: ZeRO-3 then parts its weights as they are loaded
        args.out, deepspeed=args.deepspeed, max_steps=args.steps, per_device_train_batch_size=2, learning_rate=1e-3,
        bf16=args.model is not None, gradient_checkpointing=args.model is not None, logging_steps=1, save_steps=50,
        report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    model = load(args.model)
    if not args.plain:
        applied = huggingface.apply(model)  # the one line
        if options.process_index == 0:
            print(applied)
    trainer = Trainer(model, options, train_dataset=text(args.length))
    trainer.train(resume_from_checkpoint=args.resume or None)


if __name__ == "__main__":
    main()
