"""Small models of tests of ranks and of packing, with random biases and norm weights."""

import torch

from onepass.gpt import Config, Model
from onepass.nn.sharding import part_of

B, S = 2, 12
SHAPE = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 37,
    "max_position_embeddings": 16,
}  # fmt: skip
BIASES = {"add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
EXPERTS = {"num_moe_experts": 3, "moe_ffn_hidden_size": 8, "moe_aux_loss_coeff": 0.1}


def configured(ranks, reference=False, packed=False, **options):
    """Return a case's Config for this number of tensor-parallel ranks."""
    options |= {"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1 and options.get("sequence_parallel", False)}
    config = Config(**SHAPE | options)
    return config.reference() if reference else config


def batch(seed=0):
    """Return tokens, labels of which one is ignored, and a loss mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SHAPE["vocab_size"], (B, S + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 3] = -100
    return tokens[:, :-1], labels, 0.5 + torch.rand(B, S, generator=generator)


def started(config, group=None, **part):
    """Return an fp64 model with random biases and norm weights. The whole vectors are the same for any number of ranks."""
    model = Model(config, tp_group=group, seed=3, **part).double()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                division = getattr(module, "_divisions", {}).get(name)
                generator = torch.Generator().manual_seed(sum(f"{path}.{name}".encode()))
                size = parameter.shape if division is None else (division.size,)
                drawn = torch.randn(size, generator=generator, dtype=torch.float64)
                parameter.data += 0.3 * (drawn if division is None else part_of(drawn, division, module.rank, module.ranks))
    return model
