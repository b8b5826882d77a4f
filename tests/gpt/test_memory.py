"""What a block keeps for backward, as gpt/memory.py counts it, beside what autograd is given by a model with kernels."""

import pytest
import torch

import onepass
from onepass.gpt import Config, Model
from onepass.gpt.memory import block_memory, ends_bytes, stream_bytes, uncounted
from onepass.ops.routing import logits
from onepass.parallel import MainGrads

B, S = 2, 24
TOKENS = B * S
SHAPE = {
    "hidden_size": 128, "ffn_hidden_size": 192, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 256,
    "max_position_embeddings": 32, "params_dtype": "bf16", "untie_embeddings_and_output_weights": True,
}  # fmt: skip
GPT2 = {"add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
CASES = {
    "llama": {},
    "no groups": {"num_query_groups": None},
    "wide heads": {"kv_channels": 64},
    "gpt-2": GPT2 | {"gated_linear_unit": False, "activation_func": "gelu"},
    "dropout": GPT2 | {"hidden_dropout": 0.1},
    "norms of heads": {"qk_layernorm": True},
    "norms alone": {"norm_linear_fusion": False},
    "eight bits": {"fp8_format": "hybrid"},
    "activations in eight bits": {"activation_func_fp8_input_store": True},
    "experts": {"num_moe_experts": 4, "moe_ffn_hidden_size": 64},
    "three of six experts, norms alone": {
        "num_moe_experts": 6, "moe_ffn_hidden_size": 96, "moe_router_topk": 3, "norm_linear_fusion": False
    },
    "selective": {"recompute_granularity": "selective"},
    "selective, norms of heads": {"recompute_granularity": "selective", "qk_layernorm": True},
    "selective, experts": {"recompute_granularity": "selective", "num_moe_experts": 4},
    "selective, eight bits": {"recompute_granularity": "selective", "fp8_format": "hybrid"},
    "selective, activations in eight bits": {
        "recompute_granularity": "selective", "activation_func_fp8_input_store": True
    },
    "full": {"recompute_granularity": "full"},
    "full, experts": {"recompute_granularity": "full", "num_moe_experts": 4},
}  # fmt: skip


def kept(config):
    """Return the bytes of what a forward pass keeps for backward beside parameters, each piece of memory once."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(config, seed=1, device=device)
    grads = MainGrads(model)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage  # which stays, so that no other takes its place
        return tensor

    tokens = torch.randint(config.vocab_size, (B, S), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), onepass.use_backend("triton"):
        model(tokens, tokens, grad_scale=1.0)
    grads.close()
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("name", CASES)
def test_a_block_keeps_what_is_counted(name, monkeypatch):
    """To less than a byte a token. The smallest tensor that a layer could keep beside these has four."""
    monkeypatch.setattr(logits, "_has_tensor_cores", lambda *_: True)
    one, two = (Config(**SHAPE | CASES[name] | {"num_layers": layers}) for layers in (1, 2))
    assert not [*uncounted(one)]
    of_one, of_two = kept(one), kept(two)
    counted = sum(block_memory(one, TOKENS).kept.values())
    assert abs(of_two - of_one - counted) < TOKENS
    ends = ends_bytes(one, TOKENS) + stream_bytes(one, TOKENS)  # with hidden's gradient, which the loss has made in forward
    assert abs(of_one - counted - ends) < 8 * TOKENS
