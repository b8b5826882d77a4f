"""transformers' Trainer under FSDP2 on several machines, with onepass in one line, all weights or LoRA. On each machine:

    accelerate launch --config_file examples/scale/fsdp2.yaml --machine_rank N --main_process_ip HOST \
        examples/scale/trainer_fsdp2.py --model meta-llama/Llama-3.1-8B --out /shared/run [--lora]

HOST is the machine of rank 0, --out a folder that all machines see. Started again, it goes on from the newest checkpoint there.
Without --model it trains a small Llama that is made here, a byte a token. The text is that of Python's standard library.

Run by tests/scale/test_recipes.py: two launches with one rank each on one host's CPU, gloo, and accelerate told that a CPU is an
accelerator. FSDP2 splits the model, checkpoints are in parts, losses are those of --without-onepass, and a resumed run has their
bits. Run by hand: the same, as a process each. Only read: several hosts, NCCL, and --model.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from onepass.integrations import huggingface

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip


def model_and_tokens(name: str | None) -> tuple[Any, torch.Tensor]:
    """Return the model and a text's tokens."""
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
    if name is None:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL)), torch.tensor(list(text[:100_000]))
    tokens = AutoTokenizer.from_pretrained(name)(text.decode(errors="replace"), return_tensors="pt").input_ids[0]
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder of weights, or a name of Hugging Face's hub")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 16 beside all linear layers of blocks")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("trained"))
    parser.add_argument("--without-onepass", action="store_true", help="to compare")
    args = parser.parse_args()
    set_seed(0)
    model, tokens = model_and_tokens(args.model)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    if not args.without_onepass:
        applied = huggingface.apply(model)  # the one line, before FSDP2 wraps the model
        PartialState().print(applied)
    rows = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    settings = TrainingArguments(
        str(args.out), max_steps=args.steps, save_steps=args.save_steps, per_device_train_batch_size=2, learning_rate=args.rate,
        logging_steps=1, report_to="none", seed=0, ddp_timeout=600,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if args.out.is_dir() else None)
    if trainer.is_world_process_zero():
        losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        (args.out / "losses.json").write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    main()
