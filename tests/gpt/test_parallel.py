"""Models over two tensor-parallel ranks, over gloo, against one rank."""

import copy
from functools import cache

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gpt.small_models import BIASES, EXPERTS, SHAPE, batch, configured, started
from ops.calls import relative
from parallel.meeting import gather, own_group
from parallel.worlds import PAIRS

from onepass.gpt import Config, Model, load_huggingface, save_huggingface
from onepass.nn import sharded_state_dict
from onepass.parallel import MainGrads, reduce_sequence_parallel_grads

WORLDS = PAIRS[:1]
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
    "products again": {"recompute_granularity": "selective"},
    "products again, packed, sequence": SEQUENCE | {"recompute_granularity": "selective", "packed": True},
    "products again, experts, sequence": SEQUENCE | EXPERTS | {"recompute_granularity": "selective"},
    "dropout": BIASES | {"hidden_dropout": 0.5},
    "dropout, sequence": SEQUENCE | BIASES | {"hidden_dropout": 0.5},
    "two tokens more": MTP,
    "two tokens more, packed, learned positions, sequence": SEQUENCE | MTP | BIASES | {"packed": True},
    "packed": {"packed": True},
    "packed, sequence": SEQUENCE | {"packed": True},
    "packed, learned positions, sequence": SEQUENCE | BIASES | {"packed": True},
    "packed, no fusion, sequence": SEQUENCE | {"packed": True, "reference": True},
}


def case(group, **options):
    """Return losses (masked, by row, summed), logits, the gradients, and the initial parameters."""
    config = configured(group.size() if group is not None else 1, **options)
    model = started(config, group)
    tokens, labels, mask = batch()
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


def divisions(model):
    return {
        f"{path}.{name}": division
        for path, module in model.named_modules()
        for name, division in getattr(module, "_divisions", {}).items()
    }


def together(parts, division):
    """Return the whole parameter, or its gradient, of the ranks' parts."""
    if division is None:
        assert torch.allclose(parts[0], parts[1], rtol=1e-12, atol=1e-15)
        return parts[0]
    sizes = [[block // 2 for block in division.blocks()]] * 2
    if len(division.blocks()) == 1:  # the last rank may have less
        sizes = [[part.shape[division.dim]] for part in parts]
    blocks = [part.split(size, division.dim) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat([torch.cat(each, division.dim) for each in zip(*blocks, strict=True)], division.dim)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_as_one(group, name):
    mine, expected = case(group, **CASES[name]), case(None, **CASES[name])
    for what in ("loss", "masked", "rows", "sum", "logits"):
        assert relative(mine[what], expected[what]) < 1e-12, what
    division, ranks = divisions(started(configured(1, **CASES[name]))), gather(group, mine)
    for kind, bound in (("start", 0.0), ("grads", 1e-12)):
        for key, t in expected[kind].items():
            whole = together([rank[kind][key] for rank in ranks], division.get(key))
            assert (whole - t).norm() <= bound * t.norm() + 1e-18, (kind, key)  # a key's bias has none, but for rounding


@pytest.mark.parametrize("fusion", (True, False))
def test_gradients_come_to_main_grad_by_the_ops_or_by_the_hooks(group, fusion):
    """Of two microbatches."""
    config = configured(2, sequence_parallel=True, gradient_accumulation_fusion=fusion, **BIASES)
    model, whole = started(config, group).float(), started(configured(1, **BIASES)).float()
    grads = MainGrads(model, group=own_group())
    with grads.accumulate():
        model(*batch(0)[:2]).backward()
    model(*batch(1)[:2]).backward()
    grads.finish()
    reduce_sequence_parallel_grads(model, group)
    for seed in range(2):
        whole(*batch(seed)[:2]).backward()
    division, ranks = divisions(whole), gather(group, {name: t.main_grad for name, t in model.named_parameters()})
    for name, parameter in whole.named_parameters():
        assert relative(together([rank[name] for rank in ranks], division.get(name)), parameter.grad) < 1e-5, name
    grads.close()


@pytest.mark.parametrize("options", (BIASES | SEQUENCE, EXPERTS), ids=("biases", "experts"))
def test_a_copy_has_the_same_group(group, options):
    model = started(configured(2, **options), group)
    other = copy.deepcopy(model)
    assert other.tp_group is group and torch.equal(other(*batch()[:2]), model(*batch()[:2]))


def test_a_folder_of_hugging_faces_is_divided(group, tmp_path):
    folder = str(tmp_path / str(group.rank()))
    whole = Model(configured(1, rotary_base=500.0), seed=8)
    save_huggingface(whole, folder)
    _, model = load_huggingface(folder, tp_group=group, tensor_model_parallel_size=2, sequence_parallel=True)
    with torch.no_grad():
        torch.testing.assert_close(model(batch()[0]), whole(batch()[0]))


def save(group, folder):
    dcp.save(sharded_state_dict(started(configured(2), group)), checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_one_rank_loads_what_two_saved(world, tmp_path):
    world.run(save, str(tmp_path))
    model = started(configured(1))
    for parameter in model.parameters():
        parameter.data.zero_()
    dcp.load(sharded_state_dict(model), checkpoint_id=str(tmp_path), no_dist=True)
    for name, t in started(configured(1)).state_dict().items():
        assert torch.equal(model.state_dict()[name], t), name


def eight_bits(group, sequence, precision=True):
    """Return the losses of three steps in eight bits, and the gradients of the first."""
    ranks = 1 if group is None else group.size()
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 37}
    spread = {"tensor_model_parallel_size": ranks, "sequence_parallel": sequence and ranks > 1}
    config = Config(**SHAPE | sizes, **spread, **({"fp8_format": "hybrid"} if precision else {}))
    model = Model(config, tp_group=group, seed=3)
    found, optimizer = {"losses": []}, torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(*batch(step)[:2])
        loss.backward()
        reduce_sequence_parallel_grads(model, group)
        found["losses"].append(loss.detach())
        found.setdefault("grads", {name: t.grad.clone() for name, t in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return found


@cache
def on_one_rank(precision):
    return eight_bits(None, False, precision)


@pytest.mark.parametrize("sequence", (False, True))
def test_two_ranks_in_eight_bits_are_as_one(world, sequence):
    single, exact = on_one_rank(True), on_one_rank(False)
    for ours in world.run(eight_bits, sequence):
        for a, b, c in zip(ours["losses"], single["losses"], exact["losses"], strict=True):
            assert abs(a - c) < 0.02 and abs(a - b) < 0.02 and a != c
        for name in ("layers.0.input_layernorm.weight", "layers.1.pre_mlp_layernorm.weight"):
            assert relative(ours["grads"][name], exact["grads"][name]) < 0.158  # 16 dB
