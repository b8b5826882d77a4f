"""The cases of `onepass bench huggingface`: models and their sizes, contenders, and acceptance bars for onepass."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from onepass.bench.model import worst

EAGER, COMPILED, LIGER, UNSLOTH, AXOLOTL = _OTHERS = "eager", "torch.compile", "Liger", "Liger + Unsloth", "Liger + axolotl"
OURS, OURS_TORCHS_ADAMW, OURS_GRAPHED, OURS_COMPILED, OURS_FP8, OURS_PACKED = MINE = (
    "onepass", "onepass, torch's AdamW", "onepass, CUDA graph", "onepass + torch.compile", "onepass fp8", "onepass packed",
)  # fmt: skip
CONTENDERS = (*_OTHERS, *MINE)
# Peers' packages, as peers.py names them. Unsloth's and axolotl's functions are of layers with LoRA, and Liger does the rest.
NEEDS = {LIGER: ("Liger",), UNSLOTH: ("Liger", "Unsloth"), AXOLOTL: ("Liger", "axolotl")}
TAKEN = ("FLA", "FlashQLA", "causal-conv1d", "mamba-ssm")  # by transformers' own code for hybrids, where they are installed
_FP8_FAR = (("loss_apart", 2e-2), ("error_of_eager", 30.0))  # a product's gradient is 1/16 off, as e5m2 is; bf16's is 1/300


@dataclass(frozen=True)
class AcceptanceBar:
    """An upper bound of a contender's figure: a number, or a multiple of another contender's figure."""

    contender: str
    figure: str  # a key of FIGURES
    most: float
    of: str | None = None


# The figures of acceptance bars: description and number format.
FIGURES = {
    "ms": ("ms a step", ".1f"),
    "peak_gib": ("peak GiB", ".2f"),
    "loss_apart": ("losses' distance to eager's", ".1e"),
    "error_of_eager": ("gradients' error over eager's", ".2f"),
}
RIGHT = ("loss_apart", "error_of_eager")  # a onepass contender above such a bar is wrong, not slow


@dataclass(frozen=True)
class ModelCase:
    name: str
    family: str  # transformers' model_type
    sequences: int
    length: int
    sizes: dict[str, Any]
    attention: str = "sdpa"
    asked: tuple[AcceptanceBar, ...] = ()
    error_of_eager: float = 1.25
    loss_apart: float = 2e-3
    ignored: float = 0.0  # part of each sequence, at its beginning, whose labels are -100, as a prompt's
    chats: tuple[int, int] | None = None  # each sequence is a chat of so many tokens, at least and at most, and padding after it
    lora_rank: int = 0  # of PEFT's adapters of all linear layers but the head, beside frozen weights; 0: all weights train
    adapters: str = "fp32"  # their type, PEFT's default
    checkpointed: bool = False  # layers are recomputed in backward
    ours: str | None = None  # the attention that onepass is applied to, where it is not that of the others
    graphed: bool = False  # so small that its steps by graphed_step are a contender
    four_bits: bool = False  # the layers' frozen weights are bitsandbytes' NF4, as QLoRA has them

    @property
    def lengths(self) -> list[int]:
        """How many tokens of each sequence are no padding: the same in every process and every step.

        Lengths of chats are uniform. Each is drawn from another part of the range, so that few of them have the range's mean.
        """
        if self.chats is None:
            return [self.length] * self.sequences
        drawn, (least, most) = random.Random(0), self.chats
        lengths = [int(least + (most - least + 1) * (at + drawn.random()) / self.sequences) for at in range(self.sequences)]
        drawn.shuffle(lengths)
        return lengths

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def contenders(self) -> tuple[str, ...]:
        left_out = {OURS_PACKED} if self.chats is None else set()
        left_out |= set() if self.lora_rank else {UNSLOTH, AXOLOTL}
        left_out |= set() if self.graphed else {OURS_GRAPHED}
        left_out |= {COMPILED, OURS_COMPILED, OURS_FP8} if self.four_bits else set()  # compiled, such layers are their own code
        return tuple(name for name in CONTENDERS if name not in left_out)

    @property
    def title(self) -> str:
        chats = "" if self.chats is None else ", chats of {} to {} tokens".format(*self.chats)
        lora = f", LoRA of rank {self.lora_rank} in {self.adapters} on all linear layers" if self.lora_rank else ""
        more = (", frozen weights in NF4" if self.four_bits else "") + (", layers recomputed" if self.checkpointed else "")
        return f"{self.family} {self.sequences} x {self.length} bf16, {self.attention} attention{chats}{lora}{more}"

    @property
    def bars(self) -> tuple[AcceptanceBar, ...]:
        far = (("loss_apart", self.loss_apart), ("error_of_eager", self.error_of_eager))
        mine = [name for name in MINE if name in self.contenders]
        return (*self.asked, *(AcceptanceBar(name, *bar) for name in mine for bar in (_FP8_FAR if name == OURS_FP8 else far)))


def cases(quick: bool) -> list[ModelCase]:
    return _QUICK if quick else _REAL


_LLAMA_1B = {
    "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
}  # fmt: skip
_LLAMA_124M = {
    "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 12,
    "vocab_size": 50304, "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
}  # fmt: skip
_QWEN3_600M = {
    "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
_GEMMA2_2B = {
    "num_hidden_layers": 26, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256, "vocab_size": 256000,
}  # fmt: skip
_QWEN3_5_2B = {
    "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "vocab_size": 248320, "tie_word_embeddings": True,
}  # fmt: skip
_GPT_OSS_20B = {"num_hidden_layers": 4, "num_local_experts": 32, "vocab_size": 201088}
_QWEN3_MOE_30B = {
    "num_hidden_layers": 4, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
_GEMMA4_2B = {"num_hidden_layers": 30, "hidden_size": 2304, "intermediate_size": 9216, "vocab_size": 262144}
_DEEPSEEK_16B = {
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408, "vocab_size": 163840,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1, "q_lora_rank": None,
    "max_position_embeddings": 8192,
}  # fmt: skip
_TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3_5_TINY = (
    _TINY
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
    | {"layer_types": ["linear_attention", "full_attention"]}
)

_COMPILES = AcceptanceBar(OURS_COMPILED, "ms", 1.0, OURS)
_BEATS_LIGER = (AcceptanceBar(OURS, "ms", 1.0, LIGER), AcceptanceBar(OURS, "peak_gib", 1.0, LIGER))


def _of_hybrids(of_eager: float, of_liger: float | None = None) -> tuple[AcceptanceBar, ...]:
    """Return the bars of a model that transformers runs by the packages it finds, flash-linear-attention and causal-conv1d."""
    bars = (AcceptanceBar(OURS, "ms", of_eager, EAGER), AcceptanceBar(OURS, "peak_gib", 0.60, EAGER))
    return bars if of_liger is None else (*bars, AcceptanceBar(OURS, "ms", of_liger, LIGER))


_REAL = [
    ModelCase(
        "llama_1b 4x4096", "llama", 4, 4096, _LLAMA_1B,
        asked=(
            AcceptanceBar(OURS, "ms", 0.90, LIGER), AcceptanceBar(OURS, "peak_gib", 22.0), _COMPILES,
            AcceptanceBar(OURS_FP8, "ms", 0.78, LIGER),
        ),
    ),
    ModelCase(
        "llama_1b 4x4096 ignored", "llama", 4, 4096, _LLAMA_1B, asked=(AcceptanceBar(OURS, "ms", 0.90, LIGER),), ignored=0.6
    ),
    ModelCase(
        "llama_1b 16x1024 chats", "llama", 16, 1024, _LLAMA_1B, asked=(AcceptanceBar(OURS_PACKED, "ms", 0.60, OURS),),
        chats=(40, 1000),
    ),
    ModelCase("llama_1b 1x1024", "llama", 1, 1024, _LLAMA_1B, asked=(AcceptanceBar(OURS, "ms", 0.95, EAGER),)),
    # So few operations a launch that the CPU decides.
    ModelCase(
        "llama_124m 8x1024", "llama", 8, 1024, _LLAMA_124M, graphed=True,
        asked=(AcceptanceBar(OURS_GRAPHED, "ms", 0.50, LIGER), AcceptanceBar(OURS_GRAPHED, "ms", 0.88, COMPILED)),
    ),
    ModelCase("qwen3_0.6b 4x4096", "qwen3", 4, 4096, _QWEN3_600M, asked=_BEATS_LIGER),
    # SDPA has no softcapping, and eager attention saves the scores: only one sequence fits.
    ModelCase("gemma2_2b 1x4096", "gemma2", 1, 4096, _GEMMA2_2B, "eager", _BEATS_LIGER),
    # Slices of true widths: Qwen3.5 is whole, Qwen3-MoE has 4 of 48 layers, gpt-oss 4 of 24, DeepSeek V3's code 4 of a 16B's 27.
    ModelCase("qwen3_moe_30b 4x4096", "qwen3_moe", 4, 4096, _QWEN3_MOE_30B, asked=_of_hybrids(0.60)),
    ModelCase("qwen3_5_2b 4x4096", "qwen3_5_text", 4, 4096, _QWEN3_5_2B, asked=_of_hybrids(0.80, 0.92)),
    # Transformers' own two attentions with sinks are 3.6e-3 apart at the first step, before anything is trained.
    ModelCase(
        "gpt_oss_20b 4x4096", "gpt_oss", 4, 4096, _GPT_OSS_20B, "flex_attention", _of_hybrids(0.60), ours="eager",
        loss_apart=1e-2,
    ),
    ModelCase("gemma4_2b 1x8192", "gemma4_text", 1, 8192, _GEMMA4_2B, asked=_of_hybrids(0.85, 0.85)),
    ModelCase("deepseek_v3_16b 4x4096", "deepseek_v3", 4, 4096, _DEEPSEEK_16B, asked=_of_hybrids(0.65)),
    # Losses of this many random layers in bf16 are no nearer: eager's with adapters in fp32 and in bf16 are 1e-2 apart, too.
    ModelCase(
        "lora_8b 2x2048", "llama", 2, 2048, _LLAMA_8B, lora_rank=16, loss_apart=1.5e-2,
        asked=(
            AcceptanceBar(OURS, "ms", 245.0), AcceptanceBar(OURS, "ms", 0.67, COMPILED), AcceptanceBar(OURS, "ms", 0.57, LIGER),
            AcceptanceBar(OURS_FP8, "ms", 170.0), AcceptanceBar(OURS, "peak_gib", 30.0),
        ),
    ),
    ModelCase("lora_8b 2x2048 bf16", "llama", 2, 2048, _LLAMA_8B, lora_rank=16, loss_apart=1.5e-2, adapters="bf16"),
    ModelCase(
        "lora_8b 2x2048 nf4", "llama", 2, 2048, _LLAMA_8B, lora_rank=16, loss_apart=1.5e-2, four_bits=True,
        asked=(AcceptanceBar(OURS, "peak_gib", 17.0),),
    ),
    ModelCase(
        "lora_8b 4x4096 checkpointed", "llama", 4, 4096, _LLAMA_8B, lora_rank=16, loss_apart=1.5e-2, checkpointed=True,
        asked=(AcceptanceBar(OURS, "ms", 0.75, LIGER),),
    ),
]  # fmt: skip
# The norms of tiny models have few gradient elements, whose errors vary by chance: error_of_eager is larger.
_QUICK = [
    ModelCase("llama_tiny 2x64", "llama", 2, 64, _TINY, error_of_eager=2.0),
    ModelCase("llama_tiny 4x64 chats", "llama", 4, 64, _TINY, error_of_eager=2.0, chats=(4, 60)),
    ModelCase("lora_tiny 2x64", "llama", 2, 64, _TINY, error_of_eager=2.0, lora_rank=4),
    ModelCase("qwen3_5_tiny 2x64", "qwen3_5_text", 2, 64, _QWEN3_5_TINY, error_of_eager=2.0),
    ModelCase("gemma2_tiny 2x64", "gemma2", 2, 64, _TINY | {"query_pre_attn_scalar": 16}, "eager", error_of_eager=2.0),
]


@dataclass
class ModelResult:
    """One contender's figures on one case. Its process fills in the measurements, `compare` the distances from eager."""

    contender: str
    status: str = "ok"  # "ok", "error", "skipped"
    message: str | None = None
    ms: float | None = None  # per step, the median of the rounds
    ms_range: list[float] = field(default_factory=list)
    cpu_ms: float | None = None  # per step, until the CPU has queued all work
    peak_gib: float | None = None
    first_s: float | None = None  # the first step, including compilation
    seconds: float | None = None  # the whole process
    losses: list[float] = field(default_factory=list)
    losses_again: list[float] = field(default_factory=list)  # eager's losses in a second training
    errors: dict[str, float] = field(default_factory=dict)  # kind of parameter -> gradient error against fp32
    loss_apart: float | None = None  # the largest distance from eager's losses; for eager, from its second training's
    error_of_eager: float | None = None  # the worst ratio of an error to eager's of the same kind

    @property
    def mine(self) -> bool:
        return self.contender in MINE

    @property
    def worst_error(self) -> float | None:
        return worst(self.errors.values())


def compare(rows: list[ModelResult]) -> None:
    """Fill in each row's distance from eager, if eager was measured."""
    eager = next((row for row in rows if row.contender == EAGER and row.status == "ok"), None)
    for row in rows:
        if eager is None or row.status != "ok" or len(row.losses) != len(eager.losses):
            continue
        others = eager.losses_again if row is eager else eager.losses
        row.loss_apart = worst(abs(a - b) for a, b in zip(row.losses, others, strict=False))
        row.error_of_eager = worst((row.errors[kind] - 1e-6) / max(error, 1e-9) for kind, error in eager.errors.items())


def reached(bar: AcceptanceBar, rows: list[ModelResult]) -> tuple[float, bool] | None:
    """Return a bar's figure, or its ratio to the other contender's, and whether it is within the bar. None if unknown."""
    by_name = {row.contender: row for row in rows if row.status == "ok"}
    value = getattr(by_name.get(bar.contender), bar.figure, None)
    if bar.of is not None:
        other = getattr(by_name.get(bar.of), bar.figure, None)
        value = value / other if value is not None and other else None
    return None if value is None else (value, value <= at_most(bar, rows))


def at_most(bar: AcceptanceBar, rows: list[ModelResult]) -> float:
    """Return a bar's bound. For losses it is at least twice eager's distance from itself: the order of sums can cause that."""
    eager = next((row for row in rows if row.contender == EAGER), None)
    if bar.figure != "loss_apart" or eager is None or not eager.loss_apart or not math.isfinite(eager.loss_apart):
        return bar.most
    return max(bar.most, 2 * eager.loss_apart)
