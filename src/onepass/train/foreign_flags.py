"""What other trainers' flags are called in `onepass train`. docs/train.md has the same tables."""

from __future__ import annotations

MEGATRON = {
    "--swiglu": "--gated-linear-unit --activation-func silu",
    "--squared-relu": "--no-gated-linear-unit --activation-func squared_relu",
    "--bf16, --fp16": "--params-dtype bf16",
    "--data-path, --train-data-path": "--data, of texts",
    "--tokenizer-type, --tokenizer-model, --vocab-file, --merge-file": "--vocab-size; a tokenizer is trained on the text",
    "--save": "--run-dir",
    "--load": "--resume",
    "--train-samples, --lr-decay-iters": "--train-iters, in steps",
    "--group-query-attention": "--num-query-groups alone",
    "--deterministic-mode": "--deterministic, the default",
    "--use-torch-fsdp2, --use-megatron-fsdp": "--use-fsdp",
    "--no-bias-swiglu-fusion, --no-bias-gelu-fusion": "--no-bias-activation-fusion",
    "--no-masked-softmax-fusion": "--no-attention-fusion",
    "--enable-cuda-graph, --cuda-graph-impl": "--cuda-graphs",
    "--transformer-impl, --use-mcore-models": "nothing; each fusion has a flag",
    "--use-flash-attn, --attention-backend": "nothing; attention is fused by default",
    "--recompute-activations": "--recompute-granularity selective",
    "--recompute-modules": "nothing; selective has the products before attention and activation",
    "--overlap-grad-reduce": "nothing; gradients are reduced under backward",
    "--exit-interval, --exit-duration-in-mins": "nothing; SIGTERM and Ctrl-C end a run, with a checkpoint",
}

OTHERS = {  # Hugging Face's Trainer, nanoGPT and other trainers
    "--learning-rate": "--lr",
    "--epochs, --num-epochs, --num-train-epochs": "--train-iters, in steps",
    "--steps, --max-steps, --max-iters, --num-steps": "--train-iters",
    "--batch-size, --per-device-train-batch-size": "--micro-batch-size, of one rank",
    "--gradient-accumulation-steps": "--global-batch-size, a step's sequences on all ranks",
    "--warmup-steps, --warmup-iters": "--lr-warmup-iters",
    "--lr-scheduler-type, --lr-scheduler": "--lr-decay-style",
    "--max-grad-norm, --grad-clip": "--clip-grad",
    "--beta1, --beta2": "--adam-beta1, --adam-beta2",
    "--adam-epsilon": "--adam-eps",
    "--model, --model-name-or-path": "--load-hf, of a folder; or --preset, or sizes, from scratch",
    "--n-layer, --n-layers, --num-hidden-layers": "--num-layers",
    "--n-head, --n-heads, --num-heads": "--num-attention-heads",
    "--num-key-value-heads, --n-kv-heads": "--num-query-groups",
    "--n-embd, --d-model, --dim": "--hidden-size",
    "--intermediate-size": "--ffn-hidden-size",
    "--block-size, --context-length, --max-length, --max-seq-length": "--seq-length, up to --max-position-embeddings",
    "--dropout": "--hidden-dropout, --attention-dropout",
    "--dtype, --precision, --mixed-precision": "--params-dtype; for eight bits --fp8-format",
    "--gradient-checkpointing, --recompute": "--recompute-granularity selective or full",
    "--packing": "--pack",
    "--dataset, --dataset-name, --train-file": "--data",
    "--output-dir, --out-dir": "--run-dir",
    "--resume-from-checkpoint": "--resume",
    "--logging-steps": "--log-interval",
    "--eval-steps": "--eval-interval",
    "--save-steps": "--save-interval",
    "--save-total-limit": "--keep-checkpoints",
    "--lora-r, --use-peft": "--lora-rank",
    "--lora-target-modules, --lora-target-linear": "--lora-modules",
    "--use-rslora": "--lora-use-rslora",
    "--compile, --torch-compile": "nothing; the model runs as it is",
    "--fsdp": "--use-fsdp",
    "--zero-stage, --deepspeed": "--use-distributed-optimizer, which is ZeRO-1",
}

_OURS = {flag: ours for table in (MEGATRON, OTHERS) for flags, ours in table.items() for flag in flags.split(", ")}


def in_place_of(flag: str) -> str | None:
    """Return what `onepass train` has in place of another trainer's flag, which may have underscores for hyphens."""
    return _OURS.get(flag.replace("_", "-"))
