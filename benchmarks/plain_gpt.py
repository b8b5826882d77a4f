"""The fastest plain GPT that we can write, of nn.Linear and PyTorch's functions: the peer in benchmarks/gpt_steps.py.

Llamas and GPT-2s, as their Config says. q, k and v are one product, as are an MLP's gate and what it gates. Parameters and
moments are fp32 under autocast, or all bf16, which saves the casts and rounds each step. torchao converts the latter to eight
bits. AdamW is PyTorch's fused one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.gpt import Config

ACTIVATIONS = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh"), "gelu_exact": F.gelu, "relu": F.relu}


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        D, heads, groups = config.hidden_size, config.num_attention_heads, config.num_query_groups or config.num_attention_heads
        self.width, self.heads, self.groups = D // heads, heads, groups
        self.gated, self.activation = config.gated_linear_unit, ACTIVATIONS[config.activation_func]
        self.attention_norm, self.mlp_norm = norm_of(config), norm_of(config)
        linear = partial(nn.Linear, bias=config.add_bias_linear)
        self.qkv, self.o = linear(D, (heads + 2 * groups) * self.width), linear(D, D)
        inner = config.ffn_size
        self.up, self.down = linear(D, (1 + self.gated) * inner), linear(inner, D)

    def forward(self, h: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        qkv = self.qkv(self.attention_norm(h)).unflatten(-1, (self.heads + 2 * self.groups, self.width))
        q, k, v = (part.transpose(1, 2) for part in qkv.split([self.heads, self.groups, self.groups], 2))
        if tables:
            q, k = rotated(q, *tables), rotated(k, *tables)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        h = h + self.o(attended.transpose(1, 2).flatten(2))
        up = self.up(self.mlp_norm(h))
        if not self.gated:
            return h + self.down(self.activation(up))  # type: ignore[no-any-return]
        gate, linear = up.chunk(2, -1)
        return h + self.down(self.activation(gate) * linear)  # type: ignore[no-any-return]


def norm_of(config: Config) -> nn.Module:
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.layernorm_epsilon)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class PlainGPT(nn.Module):
    def __init__(self, config: Config, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype  # of the residual stream
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.position_embedding_type == "learned_absolute"
        self.positions = nn.Embedding(length, config.hidden_size) if learned else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = norm_of(config)
        if self.positions is None:
            width = config.hidden_size // config.num_attention_heads
            angles = torch.outer(torch.arange(length), config.rotary_base ** -(torch.arange(0, width, 2) / width))
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embedding(tokens)
        tables: tuple[Tensor, ...] = ()
        if self.positions is None:
            tables = self.cos, self.sin  # type: ignore[assignment]
        else:
            h = h + self.positions.weight
        h = h.to(self.dtype)
        for block in self.blocks:
            h = block(h, tables)
        logits = F.linear(self.norm(h), self.embedding.weight.to(h.dtype))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def stepper(config: Config, tokens: Tensor, way: str) -> Callable[[], Tensor]:
    """Return a training step. `tokens`: one more than the inputs. `way`: a name of benchmarks/gpt_steps.py."""
    in_bf16 = "bf16 weights" in way or way.startswith("torchao")
    with torch.device(tokens.device):
        plain: nn.Module = PlainGPT(config, tokens.shape[1] - 1, torch.bfloat16)
    plain = plain.to(torch.bfloat16) if in_bf16 else plain
    if way.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        plain = convert_to_float8_training(plain, config=Float8LinearConfig.from_recipe_name(way.partition(" ")[2]))
    model = torch.compile(plain, mode="reduce-overhead" if "CUDA graphs" in way else None)
    parameters = list(plain.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def step() -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=not in_bf16):
            loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
