"""A Llama of nn.Linear, as torchao converts it to eight bits, and its compiled training step: a peer in benchmarks/gpt.py.

All in bf16, parameters and moments too, the fastest that torchao's recipes have. AdamW is PyTorch's fused one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.gpt import Config


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        D, heads, groups = config.hidden_size, config.num_attention_heads, config.num_query_groups or config.num_attention_heads
        self.width, self.heads, self.groups = D // heads, heads, groups
        self.attention_norm, self.mlp_norm = nn.RMSNorm(D, eps=1e-5), nn.RMSNorm(D, eps=1e-5)
        self.qkv = nn.Linear(D, (heads + 2 * groups) * self.width, bias=False)
        self.o = nn.Linear(D, D, bias=False)
        self.up = nn.Linear(D, 2 * config.ffn_hidden_size, bias=False)
        self.down = nn.Linear(config.ffn_hidden_size, D, bias=False)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(h)).unflatten(-1, (self.heads + 2 * self.groups, self.width))
        q, k, v = (part.transpose(1, 2) for part in qkv.split([self.heads, self.groups, self.groups], 2))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = h + self.o(attended.transpose(1, 2).flatten(2))
        gate, linear = self.up(self.mlp_norm(h)).chunk(2, -1)
        return h + self.down(F.silu(gate) * linear)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, config: Config, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-5)
        width = config.hidden_size // config.num_attention_heads
        angles = torch.outer(torch.arange(length), config.rotary_base ** -(torch.arange(0, width, 2) / width))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        return F.cross_entropy(F.linear(self.norm(h), self.embedding.weight).float().flatten(0, 1), labels.flatten())


def stepper(config: Config, tokens: Tensor, recipe: str) -> Callable[[], Tensor]:
    """Return a training step of the model that torchao converts by one of its recipes. `tokens`: one more than the inputs."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    with torch.device(tokens.device):
        plain = Llama(config, tokens.shape[1] - 1).to(torch.bfloat16)
    plain = convert_to_float8_training(plain, config=Float8LinearConfig.from_recipe_name(recipe))
    model, parameters = torch.compile(plain), list(plain.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def step() -> Tensor:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
