"""Ranks of tests/gpt/test_parallel.py: run models under tensor and sequence parallelism, and save the results for the tests."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel.meeting import join

from onepass.gpt import Config, Model, load_huggingface, save_huggingface
from onepass.nn import sharded_state_dict
from onepass.nn.sharding import part_of
from onepass.parallel import MainGrads, reduce_sequence_parallel_grads

B, S = 2, 12
SHAPE = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 37,
    "max_position_embeddings": 16,
}  # fmt: skip
BIASES = {"add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
EXPERTS = {"num_moe_experts": 3, "moe_ffn_hidden_size": 8, "moe_aux_loss_coeff": 0.1}
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
SEQUENCE = {"sequence_parallel": True}
CASES = {
    "llama": {},
    "llama, sequence": SEQUENCE,
    "norm alone, sequence": SEQUENCE | {"norm_linear_fusion": False, "qk_layernorm": True},
    "gpt-2": BIASES | {"gated_linear_unit": False, "activation_func": "gelu", "qk_layernorm": True},
    "gpt-2, sequence": SEQUENCE | BIASES | {"gated_linear_unit": False, "activation_func": "gelu"},
    "native": {"cross_entropy_fusion_impl": "native", "untie_embeddings_and_output_weights": True},
    "native, sequence": SEQUENCE | {"cross_entropy_fusion_impl": "native", "final_logit_softcapping": 2.0},
    "no fusion, sequence": SEQUENCE | BIASES | {"reference": True},
    "experts": EXPERTS,
    "experts, sequence": SEQUENCE | EXPERTS,
    "recomputed, sequence": SEQUENCE | {"recompute_granularity": "full"},
    "attention recomputed": {"recompute_granularity": "selective"},
    "dropout": BIASES | {"hidden_dropout": 0.5},
    "dropout, sequence": SEQUENCE | BIASES | {"hidden_dropout": 0.5},
    "two tokens more": MTP,
    "two tokens more, packed, learned positions, sequence": SEQUENCE | MTP | BIASES | {"packed": True},
    "packed": {"packed": True},
    "packed, sequence": SEQUENCE | {"packed": True},
    "packed, learned positions, sequence": SEQUENCE | BIASES | {"packed": True},
    "packed, no fusion, sequence": SEQUENCE | {"packed": True, "reference": True},
}


def configured(ranks, reference=False, packed=False, **options):
    """Return a case's Config for this number of tensor-parallel ranks."""
    options |= {"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1 and options.get("sequence_parallel", False)}
    config = Config(**SHAPE, **options)
    return config.reference() if reference else config


def given(seed=0):
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


def case(group, **options):
    """Return losses (masked, by row, summed), logits, the gradients, and the initial parameters."""
    config = configured(group.size() if group is not None else 1, **options)
    model = started(config, group)
    tokens, labels, mask = given()
    torch.manual_seed(11)
    found = {"start": {name: t.detach().clone() for name, t in model.named_parameters()}}
    packing = {"cu_seqlens": torch.tensor([[0, 5, 12], [0, 12, 12]], dtype=torch.int32)} if options.get("packed") else {}
    found["loss"] = model(tokens, labels, **packing)
    found["loss"].backward()
    reduce_sequence_parallel_grads(model, group)
    found["grads"] = {name: t.grad for name, t in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        found |= {"masked": model(tokens, labels, loss_mask=mask, **packing)}
        found |= {"rows": model(tokens, labels, reduction="none", **packing)}
        found |= {"sum": model(tokens, labels, reduction="sum", **packing), "logits": model(tokens, **packing)}
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    world = dist.group.WORLD
    found = {name: case(world, **options) for name, options in CASES.items()}
    found["main_grad"] = [with_main_grads(world, fusion) for fusion in (True, False)]
    found["eight bits"] = [eight_bits(world, sequence) for sequence in (False, True)]
    found["copied"], found["loaded"] = copied(world), loaded(world, folder)
    dcp.save(sharded_state_dict(started(configured(ranks), world)), checkpoint_id=f"{folder}/saved")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def copied(group):
    """Whether a deep copy has the same group and computes the same."""
    for options in (BIASES | SEQUENCE, EXPERTS):
        model = started(configured(2, **options), group)
        other = copy.deepcopy(model)
        if other.tp_group is not group or not torch.equal(other(*given()[:2]), model(*given()[:2])):
            return False
    return True


def loaded(group, folder):
    """Return the logits of a model loaded from a Hugging Face folder, whole and tensor-parallel."""
    own = f"{folder}/huggingface-{dist.get_rank()}"
    whole = Model(configured(1, rotary_base=500.0), seed=8)
    save_huggingface(whole, own)
    _, model = load_huggingface(own, tp_group=group, tensor_model_parallel_size=2, sequence_parallel=True)
    with torch.no_grad():
        return whole(given()[0]), model(given()[0])


def eight_bits(group, sequence, precision=True):
    """Return the losses of three steps in eight bits, and the gradients of the first."""
    ranks = 1 if group is None else group.size()
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 37}
    spread = {"tensor_model_parallel_size": ranks, "sequence_parallel": sequence and ranks > 1}
    config = Config(**SHAPE | sizes, **spread, **({"fp8_format": "hybrid"} if precision else {}))
    model = Model(config, tp_group=group, seed=3)
    found, optimizer = {"losses": []}, torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(*given(step)[:2])
        loss.backward()
        reduce_sequence_parallel_grads(model, group)
        found["losses"].append(loss.detach())
        found.setdefault("grads", {name: t.grad.clone() for name, t in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return found


def with_main_grads(group, fusion):
    """Return the gradients of two microbatches in MainGrads' buffers, added by the ops or by MainGrads' hooks."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    config = configured(2, sequence_parallel=True, gradient_accumulation_fusion=fusion, **BIASES)
    model = started(config, group).float()
    grads = MainGrads(model, group=alone)
    with grads.accumulate():
        model(*given(0)[:2]).backward()
    model(*given(1)[:2]).backward()
    grads.finish()
    reduce_sequence_parallel_grads(model, group)
    found = {name: t.main_grad.clone() for name, t in model.named_parameters()}
    grads.close()
    return found
