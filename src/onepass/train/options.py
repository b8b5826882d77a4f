"""The trainer's settings; `onepass.gpt.Config` has the model's. Settings that Megatron has too have Megatron's names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from onepass.gpt.settings import Settings, setting
from onepass.kernels.invariant_product import batch_invariant

NEEDED_FUSIONS = ("attention_fusion", "norm_fusion", "cross_entropy_loss_fusion")  # by batch_invariant: PyTorch's may mix rows


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """Settings of text, steps, optimizer, logging and checkpoints. The defaults train the preset tiny on a CPU."""

    # ---- text ----
    data: tuple[str, ...] = setting((), "text files, or folders of them; Python's own library where none is given")
    seq_length: int = setting(128, "tokens of a sequence")
    pack: bool = setting(False, "fill sequences with documents, each of which sees itself only; off: with parts of the text")

    # ---- weights to begin with, and which of them train ----
    load_hf: str | None = setting(None, "a GPT-2's or Llama's Hugging Face folder: begin with its model, weights and tokenizer")
    lora_rank: int | None = setting(None, "freeze the weights, and train LoRA adapters of this rank beside them")
    lora_alpha: float = setting(32.0, "adapters are multiplied by lora_alpha / lora_rank")
    lora_modules: tuple[str, ...] = setting(
        ("all-linear",), "Hugging Face's linear layers that have adapters, such as q_proj v_proj; all-linear is all but the head"
    )
    lora_use_rslora: bool = setting(False, "multiply adapters by lora_alpha / sqrt(lora_rank)")

    # ---- steps ----
    micro_batch_size: int = setting(16, "sequences of a forward and backward on one rank")
    global_batch_size: int | None = setting(None, "sequences of a step on all ranks; one micro batch on each")
    train_iters: int = setting(500, "steps")
    seed: int = setting(1234, "of the weights' start, the order of the text and dropout")

    # ---- optimizer: AdamW on fp32 weights ----
    lr: float = setting(3e-3, "largest learning rate")
    min_lr: float | None = setting(None, "learning rate at the end; a tenth of lr")
    lr_decay_style: Literal["cosine", "linear", "constant"] = setting("cosine", "how the learning rate falls")
    lr_warmup_iters: int = setting(50, "steps in which it rises")
    weight_decay: float = setting(0.1, "of matrices; norms and biases have none")
    adam_beta1: float = setting(0.9, "AdamW's")
    adam_beta2: float = setting(0.95, "AdamW's")
    adam_eps: float = setting(1e-8, "AdamW's")
    clip_grad: float = setting(1.0, "largest norm of a step's gradient; 0 leaves it as it is")
    optimizer_moments: Literal["fp32", "bf16", "8bit"] = setting(
        "fp32", "type of AdamW's moments; with 8bit embeddings and norms keep fp32"
    )
    step_in_backward: bool = setting(
        False,
        "step weights as their gradients come, whose memory then serves the next ones; clips by the norm of the step before",
    )
    offload_optimizer: bool = setting(False, "keep masters and moments in the host's memory")

    # ---- logging and checkpoints ----
    log_interval: int = setting(1, "steps between two lines of log.csv")
    eval_interval: int = setting(100, "steps between two evaluations; 0 is only at the end")
    eval_iters: int = setting(8, "batches of an evaluation")
    save_interval: int = setting(0, "steps between two checkpoints; 0 is by save_minutes, and at the end")
    save_minutes: float = setting(10.0, "minutes between two checkpoints where save_interval is 0; 0 is only at the end")
    keep_checkpoints: int = setting(2, "newest checkpoints that are kept; 0 is all")
    verify_checksums: bool = setting(True, "compare tokens and checkpoint with their checksums when they are loaded")
    samples: int = setting(2, "texts that the model writes at the end")
    sample_tokens: int = setting(160, "their length")
    table: bool = setting(True, "measure the model by PyTorch's own operators at the end, for the table")
    fusion_table: bool = setting(True, "measure the run without each of its fusions at the end, for a second table")

    # ---- how a step runs ----
    use_distributed_optimizer: bool = setting(False, "each data-parallel rank keeps a part of the optimizer's state (ZeRO-1)")
    use_fsdp: bool = setting(False, "each data-parallel rank keeps a part of weights, gradients and state (PyTorch's FSDP2)")
    pipeline_schedule: Literal["1f1b", "interleaved", "zero-bubble"] = setting("1f1b", "order of a pipeline's microbatches")
    release_main_grads: bool | None = setting(None, "lend activations gradients' memory between steps; large models, one GPU: on")
    cuda_graphs: bool | None = setting(
        None, "replay forward and backward as a CUDA graph; on one GPU, where first steps show it to pay: on"
    )
    deterministic: bool = setting(True, "bitwise the same at every run")
    batch_invariant: bool = setting(False, "a token's bits depend on no other sequence: not on microbatches, packing, data ranks")

    def contradictions(self) -> Iterator[str]:
        for name, value in self.to_dict().items():
            if isinstance(value, float) and not math.isfinite(value):
                yield f"{name} must be finite, but is {value}"
        for name in ("seq_length", "micro_batch_size", "train_iters", "log_interval", "sample_tokens", "lora_rank"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                yield f"{name} must be at least 1, but is {getattr(self, name)}"
        for name in (
            "lr_warmup_iters", "eval_interval", "eval_iters", "save_interval", "save_minutes", "keep_checkpoints", "samples",
            "lr", "min_lr", "weight_decay", "clip_grad", "adam_eps", "seed",
        ):  # fmt: skip
            if (getattr(self, name) or 0) < 0:
                yield f"{name} must be at least 0, but is {getattr(self, name)}"
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name} must be from 0 to below 1, but is {getattr(self, name)}"
        if self.global_batch_size is not None and self.global_batch_size % self.micro_batch_size:
            yield (
                f"global_batch_size must be a multiple of micro_batch_size, {self.micro_batch_size}, "
                f"but is {self.global_batch_size}"
            )
        if self.min_lr is not None and self.min_lr > self.lr:
            yield f"min_lr must be at most lr, {self.lr:g}, but is {self.min_lr:g}"
        for name in ("lora_alpha", "lora_modules", "lora_use_rslora") if self.lora_rank is None else ():
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default:
                yield f"{name} must be {default} without lora_rank, but is {value}"
        if self.use_fsdp and self.use_distributed_optimizer:
            yield "use_fsdp and use_distributed_optimizer must not both be true: FSDP divides the optimizer's state already"
        if self.use_fsdp and self.cuda_graphs:
            yield "cuda_graphs must be false with use_fsdp, whose gathers a graph would leave out, but is true"
        for name in ("step_in_backward", "offload_optimizer"):
            if getattr(self, name) and self.cuda_graphs:
                yield f"cuda_graphs must be false with {name}, whose work a graph would not repeat, but is true"
        if self.step_in_backward and self.release_main_grads is False:
            yield "release_main_grads must be true or not given with step_in_backward, which gives gradients' memory back"
        for name in ("use_fsdp", "use_distributed_optimizer"):
            if self.step_in_backward and getattr(self, name):
                yield f"{name} must be false with step_in_backward, which is for one rank, but is true"
        if self.release_main_grads and self.cuda_graphs:
            yield "release_main_grads must be false with cuda_graphs, which know one place of each gradient, but is true"
        if self.release_main_grads and self.use_fsdp:
            yield "release_main_grads must be false with use_fsdp, which divides and frees gradients itself, but is true"

        if self.batch_invariant and not self.deterministic:
            yield "deterministic must be true with batch_invariant, as sums in any order have any bits, but is false"

    def invariance(self, plain: bool = False) -> AbstractContextManager[None]:
        """Return a block under `onepass.batch_invariant()` where the run asks for it. PyTorch's operators run without."""
        return batch_invariant() if self.batch_invariant and not plain else nullcontext()

    @property
    def lowest_lr(self) -> float:
        """min_lr, or its default: a tenth of lr."""
        return self.lr / 10 if self.min_lr is None else self.min_lr


# The default training settings of each preset.
TRAINING: dict[str, dict[str, int | float]] = {
    "tiny": {},
    "124M": {"seq_length": 1024, "micro_batch_size": 16, "lr": 6e-4, "lr_warmup_iters": 100, "train_iters": 1000},
    "350M": {"seq_length": 1024, "micro_batch_size": 8, "lr": 3e-4, "lr_warmup_iters": 100, "train_iters": 1000},
    "1B": {"seq_length": 4096, "micro_batch_size": 4, "lr": 2e-4, "lr_warmup_iters": 100, "train_iters": 1000},
    "7B": {"seq_length": 4096, "micro_batch_size": 1, "lr": 1e-4, "lr_warmup_iters": 100, "train_iters": 1000},
    "8B": {"seq_length": 8192, "micro_batch_size": 1, "lr": 1e-4, "lr_warmup_iters": 100, "train_iters": 1000},
    "70B": {"seq_length": 8192, "micro_batch_size": 1, "lr": 1e-4, "lr_warmup_iters": 100, "train_iters": 1000},
    "405B": {"seq_length": 8192, "micro_batch_size": 1, "lr": 1e-4, "lr_warmup_iters": 100, "train_iters": 1000},
}
