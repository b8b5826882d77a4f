"""Our ops and modules under torch's fully_shard, against the unsharded model in fp64, and against PyTorch alone."""

from functools import cache
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel.meeting import drawn, error_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import fsdp
from onepass.gradients.fsdp import FSDPMainGrads
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.sharded_adamw import ShardedAdamW

pytestmark = pytest.mark.skipif(
    not fsdp._TESTED[0] <= tuple(map(int, torch.__version__.split(".")[:2])) <= fsdp._TESTED[1],
    reason="FSDPMainGrads refuses this PyTorch",
)
SIZE, ROWS, LAYERS, MICROBATCHES = 16, 5, 2, 3
BF16 = torch.bfloat16
CASES = {  # case -> options of `train`
    "gathered once": {"reshard": False},
    "gathered twice": {"reshard": True},
    "reduced each time": {"each": True},
    "a backward at the end": {"at_the_end": True},
    "checkpointed": {"checkpointed": True},
    "compiled": {"compiled": True},
    "bf16": {"mixed": True},
    "bf16, gathered once": {"mixed": True, "reshard": False},
    "bf16, checkpointed": {"mixed": True, "checkpointed": True},
    "bf16, compiled": {"mixed": True, "compiled": True},
    "frozen": {"frozen": ("mix", "blocks.0.up.weight", "blocks.1.norm.weight")},
    "main_grad": {"main_grad": True},
    "in products": {"in_products": True},
    "in products, reduced each time": {"in_products": True, "each": True},
    "in products, a backward at the end": {"in_products": True, "at_the_end": True},
    "in products, bf16": {"in_products": True, "mixed": True},
    "in products, bf16, checkpointed": {"in_products": True, "mixed": True, "checkpointed": True, "reshard": False},
    "in products, frozen": {"in_products": True, "frozen": ("mix", "blocks.0.up.weight", "blocks.1.norm.weight")},
}


class Block(nn.Module):
    """onepass modules, and an op on a parameter of the user's; or the same by PyTorch alone."""

    def __init__(self, plain):
        super().__init__()
        self.plain = plain
        self.up = onepass.nn.NormLinear(SIZE, 2 * SIZE, norm="layer_norm")
        self.activation = onepass.nn.BiasActivation(2 * SIZE, "gelu")
        self.norm = onepass.nn.RMSNorm(2 * SIZE)
        self.middle = onepass.nn.Linear(2 * SIZE, 4 * SIZE)
        self.down = nn.Parameter(torch.empty(SIZE, 2 * SIZE))

    def forward(self, x):
        if self.plain:
            return self.by_torch(x)
        h = self.middle(self.norm(self.activation(self.up(x))))
        return x + onepass.activation_linear(h, self.down, activation="swiglu")

    def by_torch(self, x):
        up, norm, middle = self.up, self.norm, self.middle
        normed = F.layer_norm(x, (SIZE,), up.layer_norm_weight, up.layer_norm_bias, up.eps)
        h = F.gelu(F.linear(normed, up.weight, up.bias) + self.activation.bias, approximate="tanh")
        gate, value = F.linear(F.rms_norm(h, (2 * SIZE,), norm.weight, norm.eps), middle.weight, middle.bias).chunk(2, -1)
        return x + F.linear(F.silu(gate) * value, self.down)


class Model(nn.Module):
    """Blocks between two uses of one weight, which belongs to the root module: by onepass and by PyTorch."""

    def __init__(self, plain=False, checkpointed=False):
        super().__init__()
        self.plain, self.checkpointed = plain, checkpointed
        self.mix = nn.Parameter(torch.empty(SIZE, SIZE))
        self.blocks = nn.ModuleList(Block(plain) for _ in range(LAYERS))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(drawn(torch.randn, parameter.shape, generator=generator).mul_(0.3))

    def forward(self, x):
        x = (F.linear if self.plain else onepass.linear)(x, self.mix)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.linear(x, self.mix)


def batch(rank, microbatch):
    return drawn(torch.randn, ROWS, SIZE, generator=torch.Generator().manual_seed(10 * rank + microbatch))


def loss(model, x):
    return model(x).square().mean(dtype=torch.promote_types(x.dtype, torch.float32))


@cache
def mesh():
    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))


def sharded(plain=False, reshard=True, mixed=False, compiled=False, checkpointed=False, frozen=()):
    model = Model(plain, checkpointed)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
    for block in model.blocks:
        if compiled:
            block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block, mesh=mesh(), reshard_after_forward=reshard, mp_policy=policy)
    return fully_shard(model, mesh=mesh(), reshard_after_forward=reshard, mp_policy=policy)


@cache
def train(plain=False, each=False, at_the_end=False, main_grad=False, in_products=False, **options):
    """Return the whole gradients, summed over the microbatches and averaged over the ranks."""
    model = sharded(plain, **options)
    in_products = FSDPMainGrads(model) if in_products else None
    assert in_products is None or in_products.reason is None
    if main_grad:  # on the sharded parameters: ops see unsharded ones without it
        for parameter in model.parameters():
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(parameter.shape), False
    losses = []
    for microbatch in range(MICROBATCHES):
        last = microbatch == MICROBATCHES - 1
        model.set_requires_gradient_sync(each or last)
        model.set_is_last_backward(last)
        losses.append(loss(model, batch(dist.get_rank(), microbatch)))
        if not at_the_end:
            losses.pop().backward()
            assert in_products is None or last or each or all(each.buffer.has_memory for each in in_products._held.values())
    if losses:
        sum(losses).backward()
    assert in_products is None or not any(each.buffer.has_memory for each in in_products._held.values())
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is None or type(grad).__name__ == "DTensor" for grad in grads.values())
    assert not main_grad or not any(p.main_grad.any() or p.grad_added_to_main_grad for p in model.parameters())
    return {name: None if grad is None else grad.full_tensor() for name, grad in grads.items()}


@cache
def exact():
    model, ranks = Model(plain=True).double(), dist.get_world_size()
    for rank in range(ranks):
        for microbatch in range(MICROBATCHES):
            (loss(model, batch(rank, microbatch).double()) / ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def error(grad, name):
    reference = exact()[name]
    return ((grad.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_gradients(group, name):
    mine, frozen = train(**CASES[name]), CASES[name].get("frozen", ())
    assert mine.keys() == exact().keys()
    for key, grad in mine.items():
        if key in frozen:
            assert grad is None, key
            continue
        assert grad.dtype == torch.float32, key
        if CASES[name].get("mixed"):
            theirs = error(train(plain=True, mixed=True)[key], key)
            few = grad.numel() <= 32  # numbers, whose roundings have no spread to compare
            assert error(grad, key) <= (2 if few else 1.25) * theirs + 1e-3, key
        else:
            assert error(grad, key) <= 1e-5, key


def test_gradients_in_products_are_not_rounded(group):
    """Of a bf16 weight over three microbatches, alike on all ranks: in products, and by FSDP2."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (drawn(torch.randn, MICROBATCHES, ROWS, SIZE, generator=generator).to(BF16) for _ in range(2))
    expected = sum(d.double().T @ b.double() for b, d in zip(x, dy, strict=True))
    errors = []
    for in_products in (True, False):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        model = fully_shard(onepass.nn.Linear(SIZE, SIZE, bias=False), mesh=mesh(), mp_policy=policy)
        main_grads = FSDPMainGrads(model) if in_products else None
        for microbatch in range(MICROBATCHES):
            model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
            model(x[microbatch]).backward(dy[microbatch])
        errors.append(float((model.weight.grad.full_tensor().double() - expected).abs().max() / expected.abs().max()))
        assert main_grads is None or main_grads.reason is None
    in_products, by_pytorch = errors
    assert in_products < 1e-6 < 1e-4 < by_pytorch  # PyTorch rounds each microbatch's to bf16


def test_what_is_undone_is_fsdps_own(group):
    """Steps are those without FSDPMainGrads, after it was undone."""
    first, second, rank = sharded(), sharded(), group.rank()
    main_grads = FSDPMainGrads(first)
    loss(first, batch(rank, 0)).backward()
    first.zero_grad()
    main_grads.undo()
    for model in (first, second):
        loss(model, batch(rank, 1)).backward()
    grads = zip(*([p.grad.full_tensor() for p in model.parameters()] for model in (first, second)), strict=True)
    assert all(torch.equal(a, b) for a, b in grads)
    assert not any(getattr(p, "main_grad", None) is not None for p in first.parameters())
    FSDPMainGrads(first)  # once more


def test_under_an_unknown_pytorch_fsdp_reduces(group):
    model = sharded()
    newer = patch.object(torch, "__version__", "3.0.1"), patch.object(fsdp, "TORCH", (3, 0))
    with newer[0], newer[1], pytest.warns(UserWarning, match=r"PyTorch 3\.0\.1 is not one of 2\.11 to 2\.15") as caught:
        main_grads = FSDPMainGrads(model)
    assert main_grads.reason in str(caught[0].message)
    loss(model, batch(group.rank(), 0)).backward()
    main_grads.undo()
    assert all(p.grad is not None for p in model.parameters())


def test_models_that_cannot_be_taken(group):
    assert "model must be sharded by fully_shard" in error_of(FSDPMainGrads, nn.Linear(4, 4))
    twice = sharded()
    kept = FSDPMainGrads(twice)
    assert "has FSDPMainGrads already" in error_of(FSDPMainGrads, twice) and kept.reason is None
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    said = error_of(FSDPMainGrads, fully_shard(nn.Linear(4, 4), mesh=mesh(), mp_policy=policy))
    assert "must reduce gradients in fp32" in said and "reduce_dtype=torch.float32" in said


# ---- AdamW ----


def optimized(make):
    """Return a model of two groups, one without decay, and an optimizer over them."""
    model = sharded()
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return model, make([{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}], lr=0.01, weight_decay=0.1)


def train_steps(model, optimizer, steps):
    """Train, clipping gradients; return their norms."""
    norms, kept = [], []
    for step in steps:
        loss(model, batch(dist.get_rank(), step)).backward()
        kept += [p.grad for p in model.parameters()]  # so that those of each step have other memory
        if isinstance(optimizer, ShardedAdamW):
            norms.append(optimizer.step(max_norm=0.05, norm=optimizer.norm() if step % 2 else None))
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor())
            optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ShardedAdamW):
        steppers = [stepper for part in set(optimizer._part_of.values()) for stepper in part.steppers.values()]
        batches = [batch for stepper in steppers for _, _, some in stepper.passages for batch in some]
        held = [t for batch in batches for t in (*batch.sources, batch.tensors[1])]
        assert held and not any(t.numel() for t in held), "gradients stay in memory"
    return torch.stack(norms)


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def weights(model):
    return torch.cat([p.detach().full_tensor().view(-1) for p in model.parameters()])


def close(a, b):
    return float((a - b).norm() / b.norm()) <= 1e-6


def test_adamw_on_shards_is_torchs_and_so_are_its_checkpoints(group, tmp_path):
    """Each goes on from its own checkpoint and from the other's."""
    mine, theirs = optimized(ShardedAdamW), optimized(torch.optim.AdamW)
    assert close(*(train_steps(*each, range(3)) for each in (mine, theirs)))
    assert close(*(weights(model) for model, _ in (mine, theirs)))
    parameter = next(iter(mine[0].parameters()))
    assert mine[1].state[parameter]["exp_avg"].placements == parameter.placements
    for name, trained in (("mine", mine), ("theirs", theirs)):
        dcp.save(state_of(*trained), checkpoint_id=str(tmp_path / name))
    train_steps(*theirs, range(3, 5))
    for kind, source in ((torch.optim.AdamW, "mine"), (ShardedAdamW, "theirs"), (ShardedAdamW, "mine")):
        model, optimizer = optimized(kind)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=str(tmp_path / source))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train_steps(model, optimizer, range(3, 5))
        assert close(weights(model), weights(theirs[0])), (kind, source)


def test_moments_in_eight_bits_on_shards(group):
    """The first rank's have the bits of the whole; others draw by their own places."""
    device, found = mesh().device_type, []
    for divided in (False, True):
        generator = torch.Generator().manual_seed(1)
        model = nn.Sequential(nn.Linear(512, 6, dtype=BF16), nn.Linear(6, 256, dtype=BF16))
        for p in model.parameters():
            p.data = drawn(torch.randn, p.shape, generator=generator).to(BF16)
        model = fully_shard(model.to(device), mesh=mesh()) if divided else model.to(device)
        optimizer = ShardedAdamW(model.parameters(), lr=0.1, moments="8bit", masters=True)
        for _ in range(3):
            for p in model.parameters():
                gradient = drawn(torch.randn, p.shape, generator=generator).to(BF16)
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if divided else gradient
            optimizer.step(max_norm=1e9, norm=torch.ones((), device=device))
        found.append([p.detach().to_local() if divided else p.detach() for p in model.parameters()])
        assert any(name.endswith("code") for state in optimizer.state_dict()["state"].values() for name in state)
    for whole, part in zip(*found, strict=True):
        expected = whole.chunk(dist.get_world_size())[dist.get_rank()]
        assert (
            torch.equal(part, expected)
            if not dist.get_rank()
            else (part - expected).float().norm() < 1e-2 * expected.float().norm()
        )


def test_a_rank_without_a_part_counts_steps_too(group):
    """Or a checkpoint would have the count of that rank."""
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 1, bias=False))
    fully_shard(model, mesh=mesh())
    optimizer = ShardedAdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [float(state["step"]) for state in optimizer.state.values()] == [3.0, 3.0]


def test_adamw_says_what_it_does_not_take(group):
    model, optimizer = optimized(ShardedAdamW)
    low = fully_shard(nn.Linear(4, 4).half(), mesh=mesh())
    assert "parameters must be fp32 or bf16, but one is torch.float16" in error_of(ShardedAdamW, low.parameters())
    groups = [{**group, "amsgrad": True} for group in optimizer.state_dict()["param_groups"]]
    state = torch.optim.AdamW(model.parameters(), amsgrad=True).state_dict() | {"param_groups": groups}
    assert "amsgrad must be False" in error_of(optimizer.load_state_dict, state)
    said = error_of(optimizer.add_param_group, {"params": [nn.Parameter(torch.ones(2))]})
    assert "groups must be given when ShardedAdamW is made" in said


# ---- main_grad ----


def test_a_dtensors_gradient_has_no_main_grad_to_go_to(group):
    """As in tensor parallelism by DTensors."""
    x, weight = (distribute_tensor(torch.ones(ROWS, SIZE), mesh(), [Replicate()]) for _ in range(2))
    weight = nn.Parameter(weight)
    onepass.linear(x, weight).sum().backward()
    assert torch.equal(weight.grad.full_tensor(), torch.full((ROWS, SIZE), float(ROWS)))
    weight.main_grad = torch.zeros(ROWS, SIZE)
    with pytest.raises(TypeError, match="main_grad must be a plain weight's, but its weight is a DTensor"):
        onepass.linear(x, weight)


def test_main_grads_says_that_fully_shard_has_gradients_already(group):
    """Made after fully_shard, and before it."""
    said = error_of(MainGrads, sharded())
    assert "parameters must be plain tensors, but mix is a DTensor" in said and ".grad" in said
    model = Model()
    main_grads = MainGrads(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh())
    fully_shard(model, mesh=mesh())
    main_grads.zero_()
    loss(model, batch(group.rank(), 0)).backward()
    said = error_of(main_grads.finish)
    assert "parameters must be the module's" in said and "but mix is another one" in said and ".grad" in said
