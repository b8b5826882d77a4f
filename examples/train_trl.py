"""A trainer of TRL, as it is and with onepass in one line: the same losses.

    python examples/train_trl.py [--trainer SFT | DPO | KTO | GRPO | RLOO] [--size tiny | 1B] [--steps N] [--out DIR] [--small]

Nothing is downloaded: the model, its tokenizer and the words that it learns are made here. "tiny" takes seconds on a CPU; "1B"
has the sizes of Llama 3.2 1B and wants a GPU of 80 GB. The losses of both runs go into DIR (trained).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging

from onepass.integrations import trl as onepass_trl

TRAINERS = ("SFT", "DPO", "KTO", "GRPO", "RLOO")
SAME = 0.02  # how far apart losses and norms of a step may be: a run rounds in its own way, and a step builds on those before it


@dataclass(frozen=True)
class Size:
    rows: int  # of a step
    words: int  # of a prompt, and of an answer
    rate: float
    dtype: torch.dtype
    model: dict[str, Any]


SIZES = {
    "tiny": Size(
        4, 16, 1e-3, torch.float32,
        {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 512},
    ),
    "1B": Size(
        4, 1024, 1e-5, torch.bfloat16,
        {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    ),
}  # fmt: skip


# ---- a model and something to learn ----


def new_model(size: Size) -> Any:
    set_seed(0)
    config = AutoConfig.for_model("llama", **size.model, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=size.dtype)


def vocabulary(size: Size) -> list[str]:
    return ["<pad>", "<eos>", "<unk>", *(f"w{at}" for at in range(size.model["vocab_size"] - 3))]


def new_tokenizer(size: Size) -> Any:
    known = {word: at for at, word in enumerate(vocabulary(size))}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def data(trainer: str, size: Size, rows: int) -> Any:
    """Rows as the trainer takes them. An answer counts on from a random word; a bad one is random."""
    words, generator = vocabulary(size)[3:], torch.Generator().manual_seed(0)

    def row(at: int) -> dict[str, Any]:
        first = int(torch.randint(len(words), (), generator=generator))
        counted = [words[(first + step) % len(words)] for step in range(2 * size.words)]
        prompt, good = " ".join(counted[: size.words]) + " ", " ".join(counted[size.words :])
        bad = " ".join(words[int(word)] for word in torch.randint(len(words), (size.words,), generator=generator))
        if trainer == "SFT":
            return {"prompt": prompt, "completion": good}
        if trainer == "DPO":
            return {"prompt": prompt, "chosen": good, "rejected": bad}
        if trainer == "KTO":
            return {"prompt": prompt, "completion": bad if at % 2 else good, "label": not at % 2}
        return {"prompt": prompt}

    return Dataset.from_list([row(at) for at in range(rows)])


def even_words(completions: list[str], **_: Any) -> list[float]:
    """A reward: the share of an answer's words whose number is even."""
    answers = [[word for word in text.split() if word[0] == "w"] for text in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in answer) / max(1, len(answer)) for answer in answers]


# ---- training it ----


class Watch(TrainerCallback):
    """What the trainer says of each step, and when."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []  # of gradients: a policy's loss is 0 on its own samples
        self.ends: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            self.norms.append(float(logs["grad_norm"]))
            self.ends.append(time.perf_counter())

    def step(self) -> float:
        """Seconds of the step in the middle: the first ones also compile kernels."""
        return statistics.median(end - start for start, end in pairwise(self.ends))


def train(name: str, size: Size, steps: int, out: Path) -> Watch:
    options: dict[str, Any] = {
        "output_dir": str(out), "max_steps": steps, "per_device_train_batch_size": size.rows, "learning_rate": size.rate,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": 0,
        "bf16": size.dtype is torch.bfloat16, "dataloader_pin_memory": torch.cuda.is_available(),
    }  # fmt: skip
    more: dict[str, Any] = {}
    if name in ("GRPO", "RLOO"):
        options |= {"num_generations": 2, "max_completion_length": size.words, "beta": 0.0}
        more["reward_funcs"] = even_words
    else:
        options["max_length"] = 2 * size.words + 1
    if name in ("DPO", "KTO"):
        more["ref_model"] = new_model(size)
    watch, model = Watch(), new_model(size)
    trainer = getattr(trl, f"{name}Trainer")(
        model, args=getattr(trl, f"{name}Config")(**options), train_dataset=data(name, size, steps * size.rows),
        processing_class=new_tokenizer(size), callbacks=[watch], **more,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return watch


# ---- both ways ----


def shown(plain: Watch, ours: Watch) -> Table:
    table = Table("step", "loss as it is", "with onepass", "gradients' norm as it is", "with onepass")
    last = len(plain.losses) - 1
    for step in sorted({*range(0, last, max(1, last // 8)), last}):
        values = plain.losses[step], ours.losses[step], plain.norms[step], ours.norms[step]
        table.add_row(str(step + 1), *(f"{value:.4f}" for value in values))
    table.add_section()
    table.add_row("s a step", f"{plain.step():.3f}", f"{ours.step():.3f}", "", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trainer", choices=TRAINERS, default="SFT")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="of each run (20)")
    parser.add_argument("--out", type=Path, default=Path("trained"), help="folder for the losses (trained)")
    parser.add_argument("--small", action="store_true", help="5 steps")
    args = parser.parse_args()
    size, steps = SIZES[args.size], args.steps or (5 if args.small else 20)
    console = Console(width=118)
    logging.disable_progress_bar()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # more would wait for each other wherever the machine has something else to do

    plain = train(args.trainer, size, steps, args.out)
    gc.collect()  # the trainer holds itself, and with it the model

    installed = onepass_trl.install()  # the one line
    ours = train(args.trainer, size, steps, args.out)

    print(installed)
    installed.undo()
    console.print(shown(plain, ours))
    both = zip(plain.losses + plain.norms, ours.losses + ours.norms, strict=True)
    apart = max(abs(a - b) / max(1, abs(a)) for a, b in both)
    if not apart <= SAME:
        raise SystemExit(f"losses and norms of both runs must be within {SAME} of each other, but are {apart:.2g} apart")
    console.print(f"losses and norms are at most {apart:.1e} apart")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "losses.json").write_text(json.dumps({"as it is": plain.losses, "with onepass": ours.losses}) + "\n")


if __name__ == "__main__":
    main()
