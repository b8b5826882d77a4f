"""A GPT of megatron-core with onepass, in one process: python examples/pretrain_megatron.py [--size 1b] [--steps 20]

megatron-core comes by `pip install megatron-core`. The small size runs on a CPU in seconds; 1b wants a GPU.
"""

import argparse
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from onepass.integrations import megatron

SIZES = {  # layers, hidden, feed-forward, heads, groups, vocabulary, sequence
    "small": (2, 64, 128, 4, 2, 256, 32),
    "1b": (16, 2048, 8192, 32, 8, 128256, 4096),
}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--size", choices=SIZES, default="small")
    arguments.add_argument("--small", action="store_const", const="small", dest="size")
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--out", type=Path, default=Path("pretrain_megatron"), help="a folder for losses.txt")
    args = arguments.parse_args()
    warnings.simplefilter("ignore")
    gpu = torch.cuda.is_available()
    if not gpu:  # megatron-core asks CUDA for its device
        torch.cuda.current_device = lambda: "cpu"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)

    installed = megatron.install()
    print(installed)

    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    if gpu:
        model_parallel_cuda_manual_seed(1)
    layers, hidden, wide, heads, groups, vocabulary, length = SIZES[args.size]
    kind = torch.bfloat16 if gpu else torch.float32
    config = TransformerConfig(
        num_layers=layers, hidden_size=hidden, ffn_hidden_size=wide, num_attention_heads=heads, num_query_groups=groups,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, bias_activation_fusion=True, bias_dropout_fusion=True, apply_rope_fusion=True,
        masked_softmax_fusion=False, bf16=gpu, params_dtype=kind, pipeline_dtype=kind, use_cpu_initialization=not gpu,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=megatron.gpt_layer_spec(config), vocab_size=vocabulary,
        max_sequence_length=length, position_embedding_type="rope", share_embeddings_and_output_weights=True,
    )  # fmt: skip
    print(megatron.apply(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = "cuda" if gpu else "cpu"
    tokens = torch.randint(vocabulary, (2, length + 1), device=device, generator=torch.Generator(device).manual_seed(0))
    positions = torch.arange(length, device=device)[None].expand(2, -1)
    losses = []
    for step in range(args.steps):
        loss = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{float(loss.detach()):.3f}")
        print(f"step {step}: loss {losses[-1]}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "losses.txt").write_text("\n".join(losses) + "\n")
    installed.undo()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
