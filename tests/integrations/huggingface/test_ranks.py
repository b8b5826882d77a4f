"""transformers' models with onepass under DDP and fully_shard over two ranks, against one process."""

import copy
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parallel.worlds import PAIRS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import linears
from onepass.integrations.huggingface.loss import replace_loss
from onepass.integrations.huggingface.patches import Patches

transformers = pytest.importorskip("transformers", minversion="5")

WORLDS = PAIRS[:1]
VOCABULARY = 307


def rank_context():
    return onepass.use_backend("torch")


def fully_sharded(model, *own):
    """Shard the layers and each of `own` by itself, and the rest with the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, *own):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPED = {
    "DDP": DistributedDataParallel,
    "fully_shard": fully_sharded,
    "fully_shard, the head too": lambda model: fully_sharded(model, model.lm_head),
    "fully_shard, norm and head": lambda model: fully_sharded(model, [model.model.norm, model.lm_head]),
}
PUT = {"the loss": lambda model: replace_loss(model, Patches()), "all": huggingface.apply}


def new_model():
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, **layers)
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize("what", PUT)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_losses_and_gradients(group, wrapped, what):
    """Of the whole model with only the loss replaced, and with all of onepass."""
    alone = new_model()
    model = copy.deepcopy(alone)
    batches = torch.randint(VOCABULARY, (group.size(), 2, 12)).unbind()
    losses = [alone(input_ids=ids, labels=ids).loss for ids in batches]
    (sum(losses) / len(losses)).backward()
    PUT[what](model)
    called, mine = WRAPPED[wrapped](model), batches[group.rank()]
    outputs = called(input_ids=mine, labels=mine)
    outputs.loss.backward()
    assert outputs.logits.shape == (2, 12, 0)
    torch.testing.assert_close(outputs.loss, losses[group.rank()])
    for name, p in model.named_parameters():
        torch.testing.assert_close(getattr(p.grad, "full_tensor", lambda p=p: p.grad)(), alone.get_parameter(name).grad)


@pytest.mark.parametrize("wrapped", ("DDP", "fully_shard"))
def test_adapters(group, wrapped):
    """PEFT's adapters are in the products, and have the gradients of one process."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    alone = peft.get_peft_model(new_model(), config)
    model = copy.deepcopy(alone)
    batches = torch.randint(VOCABULARY, (group.size(), 2, 12)).unbind()
    losses = [alone(input_ids=ids, labels=ids).loss for ids in batches]
    (sum(losses) / len(losses)).backward()
    huggingface.apply(model)
    adapters = []
    called = DistributedDataParallel(model) if wrapped == "DDP" else fully_sharded(model.get_base_model())
    mine = batches[group.rank()]
    with pytest.MonkeyPatch.context() as patch:  # a rank goes on to other tests
        for name in ("linear", "norm_linear"):
            stock = getattr(linears, name)
            patch.setattr(linears, name, lambda *a, lora, s=stock, **o: adapters.append(len(lora)) or s(*a, lora=lora, **o))
        loss = called(input_ids=mine, labels=mine).loss
    loss.backward()
    together = 2 * [3, 2]  # q, k and v; gate and up, which FSDP gathers each by itself
    assert adapters == (together if wrapped == "DDP" else sum(together) * [1])
    torch.testing.assert_close(loss, losses[group.rank()])
    for name, p in model.named_parameters():
        expected = alone.get_parameter(name).grad
        assert (p.grad is None) is (expected is None)
        if expected is not None:
            torch.testing.assert_close(getattr(p.grad, "full_tensor", lambda p=p: p.grad)(), expected)


@contextmanager
def products():
    """The number of rows of each weight that LinearsMatch multiplies in the block."""
    rows = []
    with pytest.MonkeyPatch.context() as patch:  # a rank goes on to other tests
        for name, place in (("linear", 1), ("norm_linear", 2)):
            stock = getattr(linears, name)
            patch.setattr(linears, name, lambda *a, s=stock, i=place, **o: rows.append(a[i].shape[0]) or s(*a, **o))
        yield rows


GATHERED = {
    "as they come": {},
    "once": {"reshard_after_forward": False},
    "in fp32 of bf16, reduced in fp32": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
}


@pytest.mark.parametrize("gathered", GATHERED)
def test_weights_of_one_product_are_gathered_together(group, gathered):
    """From the second forward on q, k and v are one product, and gate and up, with the gradients of products of their own."""
    apart, model = new_model(), new_model()
    model.load_state_dict(apart.state_dict())
    mesh = init_device_mesh("cpu", (group.size(),))
    for each in (apart, model):
        huggingface.apply(each)
        for part in (*each.model.layers, each):
            fully_shard(part, mesh=mesh, **GATHERED[gathered])
    ids = torch.randint(VOCABULARY, (6, 2, 12), generator=torch.Generator().manual_seed(group.rank()))

    def trained(each, counts):
        optimizer, losses = torch.optim.SGD(each.parameters(), lr=0.1), []
        for step in range(3):
            with products() as rows:
                first, second = (each(input_ids=some, labels=some).loss for some in ids[2 * step : 2 * step + 2])
            counts.append(rows)
            with torch.no_grad():
                each(input_ids=ids[0])
            each.set_requires_gradient_sync(False)
            first.backward()
            each.set_requires_gradient_sync(True)
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(first), float(second)]
        return losses, [p.detach().full_tensor() for p in each.parameters()]

    counts = []
    with patch.object(linears, "pack_gathers", lambda weights: False):
        expected, weights = trained(apart, [])
    losses, after = trained(model, counts)
    one, separate = [192, 192] * 2, [64, 64, 64, 96, 96] * 2
    assert counts[0] == 2 * separate and counts[2] == 2 * one, counts
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if "bf16" in gathered else {}
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **tolerance)
    for mine, theirs in zip(after, weights, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def losses_of(called, parameters, ids):
    """Return the losses of four steps of a batch."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for _ in range(4):
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrapped", ("DDP", "fully_shard"))
def test_eight_bits(group, wrapped):
    """Each step sees the weights of the one before, gathered ones too."""
    alone = new_model()
    model, ids = copy.deepcopy(alone), torch.randint(VOCABULARY, (2, 12))  # the same for each rank, and so the gradients' mean
    expected = losses_of(alone, alone.parameters(), ids)
    huggingface.apply(model, precision="fp8")
    called = WRAPPED[wrapped](model)
    losses = losses_of(called, called.parameters(), ids)
    assert expected[-1] < expected[0] - 0.3
    assert losses == pytest.approx(expected, rel=1e-2) and losses != pytest.approx(expected, rel=1e-6)
