"""Ranks of tests/parallel/test_fsdp.py: train under fully_shard, with onepass and by PyTorch alone. Results are saved."""

import warnings
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel.meeting import drawn, join
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

SIZE, ROWS, LAYERS, MICROBATCHES = 16, 5, 2, 3
BF16 = torch.bfloat16
CASES = {  # case -> options of `trained`
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


def run(rank, ranks, folder, backend="gloo"):
    """Run every scenario, in the same order on all ranks."""
    join(rank, ranks, folder, backend)
    mesh = init_device_mesh(torch.get_default_device().type, (ranks,))
    found = {name: trained(rank, mesh, **options) for name, options in CASES.items()}
    found["by PyTorch"] = trained(rank, mesh, plain=True, mixed=True)
    found["rounding"] = rounding(mesh)
    found["undone"] = undone(rank, mesh)
    found["refused"] = refused(mesh)
    found["stock"] = stock_elsewhere(rank, mesh)
    found["AdamW"] = sharded_adamw(rank, mesh, folder)
    found["AdamW said"] = sharded_adamw_said(mesh)
    found["MainGrads"] = main_grads_are_refused(rank, mesh)
    found["DTensor"] = main_grad_of_a_dtensor(mesh)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def sharded(mesh, plain=False, reshard=True, mixed=False, compiled=False, checkpointed=False, frozen=()):
    model = Model(plain, checkpointed)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32) if mixed else MixedPrecisionPolicy()
    for block in model.blocks:
        if compiled:
            block.compile(fullgraph=True, backend="aot_eager")
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def trained(rank, mesh, plain=False, each=False, at_the_end=False, main_grad=False, in_products=False, **options):
    """Return the whole gradients, summed over the microbatches and averaged over the ranks."""
    model = sharded(mesh, plain, **options)
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
        losses.append(loss(model, batch(rank, microbatch)))
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


def rounding(mesh):
    """Return the errors of a bf16 weight's gradient over three microbatches, alike on all ranks: in products, and by FSDP2."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (drawn(torch.randn, MICROBATCHES, ROWS, SIZE, generator=generator).to(BF16) for _ in range(2))
    expected = sum(d.double().T @ b.double() for b, d in zip(x, dy, strict=True))
    errors = []
    for in_products in (True, False):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        model = fully_shard(onepass.nn.Linear(SIZE, SIZE, bias=False), mesh=mesh, mp_policy=policy)
        main_grads = FSDPMainGrads(model) if in_products else None
        for microbatch in range(MICROBATCHES):
            model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)
            model(x[microbatch]).backward(dy[microbatch])
        errors.append(float((model.weight.grad.full_tensor().double() - expected).abs().max() / expected.abs().max()))
        assert main_grads is None or main_grads.reason is None
    return errors


def optimized(mesh, make):
    """Return a model of two groups, one without decay, and an optimizer over them."""
    model = sharded(mesh)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return model, make([{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}], lr=0.01, weight_decay=0.1)


def trained_steps(rank, model, optimizer, steps):
    """Train, clipping gradients; return their norms."""
    norms, kept = [], []
    for step in steps:
        loss(model, batch(rank, step)).backward()
        kept += [p.grad for p in model.parameters()]  # so that those of each step have other memory
        if isinstance(optimizer, ShardedAdamW):
            norms.append(optimizer.step(max_norm=0.05, norm=optimizer.norm() if step % 2 else None))
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor())
            optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, ShardedAdamW):
        batches = [batch for stepper in optimizer._steppers.values() for batch in stepper.batches]
        held = [t for batch in batches for t in (*batch.sources, batch.tensors[1])]
        assert held and not any(t.numel() for t in held), "gradients stay in memory"
    return torch.stack(norms)


def sharded_adamw(rank, mesh, folder):
    """Train by ShardedAdamW and by torch.optim.AdamW, then each from the other's checkpoint. Return weights and norms."""
    mine, theirs = optimized(mesh, ShardedAdamW), optimized(mesh, torch.optim.AdamW)
    found = {"norms": [trained_steps(rank, *each, range(3)) for each in (mine, theirs)]}
    found["weights"] = [weights(model) for model, _ in (mine, theirs)]
    for name, trained_so in (("mine", mine), ("theirs", theirs)):
        dcp.save(state_of(*trained_so), checkpoint_id=f"{folder}/{name}")
    kinds = {"theirs": torch.optim.AdamW, "mine": ShardedAdamW, "same": ShardedAdamW}
    for name, source in (("theirs", "mine"), ("mine", "theirs"), ("same", "mine")):
        model, optimizer = optimized(mesh, kinds[name])
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/{source}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        trained_steps(rank, model, optimizer, range(3, 5))
        found[f"{name} from {source}"] = weights(model)
    trained_steps(rank, *theirs, range(3, 5))
    found["on"] = weights(theirs[0])
    state = mine[1].state[next(iter(mine[0].parameters()))]["exp_avg"]
    found["state lies"] = [str(state.placements), str(next(iter(mine[0].parameters())).placements)]
    return found


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def weights(model):
    return torch.cat([p.detach().full_tensor().view(-1) for p in model.parameters()])


def sharded_adamw_said(mesh):
    model, optimizer = optimized(mesh, ShardedAdamW)
    other = torch.optim.AdamW(model.parameters(), amsgrad=True)
    low = fully_shard(nn.Linear(4, 4).bfloat16(), mesh=mesh)
    calls = [
        lambda: ShardedAdamW(low.parameters()),
        lambda: optimizer.load_state_dict(other.state_dict() | {"param_groups": [
            {**group, "amsgrad": True} for group in optimizer.state_dict()["param_groups"]]}),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    ]  # fmt: skip
    said = []
    for call in calls:
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            said.append(str(error))
    return said


def undone(rank, mesh):
    """Return the largest difference that a step makes to one without FSDPMainGrads, after it was undone."""
    first, second = sharded(mesh), sharded(mesh)
    main_grads = FSDPMainGrads(first)
    loss(first, batch(rank, 0)).backward()
    first.zero_grad()
    main_grads.undo()
    for model in (first, second):
        loss(model, batch(rank, 1)).backward()
    grads = zip(*([p.grad.full_tensor() for p in model.parameters()] for model in (first, second)), strict=True)
    assert not any(getattr(p, "main_grad", None) is not None for p in first.parameters())
    FSDPMainGrads(first)  # once more
    return max(float((a - b).abs().max()) for a, b in grads)


def refused(mesh):
    """Return the errors of models that FSDPMainGrads doesn't take."""
    said = []
    twice = sharded(mesh)
    kept = FSDPMainGrads(twice)
    low = fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16))
    for model in (nn.Linear(4, 4), twice, low):
        try:
            FSDPMainGrads(model)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    assert kept.reason is None
    return said


def stock_elsewhere(rank, mesh):
    """Return the warning under a PyTorch that isn't known, and whether gradients are as without."""
    model = sharded(mesh)
    newer = patch.object(torch, "__version__", "3.0.1"), patch.object(fsdp, "TORCH", (3, 0))
    with newer[0], newer[1], warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        main_grads = FSDPMainGrads(model)
    loss(model, batch(rank, 0)).backward()
    main_grads.undo()
    return str(caught[0].message), main_grads.reason, all(p.grad is not None for p in model.parameters())


def main_grad_of_a_dtensor(mesh):
    """Pass DTensors to an op, as tensor parallelism by DTensors does. Return the gradient, and the error with main_grad."""
    x, weight = (distribute_tensor(torch.ones(ROWS, SIZE), mesh, [Replicate()]) for _ in range(2))
    weight = nn.Parameter(weight)
    onepass.linear(x, weight).sum().backward()
    weight.main_grad = torch.zeros(ROWS, SIZE)
    try:
        onepass.linear(x, weight)
    except TypeError as error:
        return weight.grad.full_tensor(), str(error)


def main_grads_are_refused(rank, mesh):
    """Return MainGrads' errors if it is made after fully_shard, and before it."""
    said = []
    try:
        MainGrads(sharded(mesh))
    except TypeError as error:
        said.append(str(error))
    model = Model()
    main_grads = MainGrads(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    main_grads.zero_()
    loss(model, batch(rank, 0)).backward()
    try:
        main_grads.finish()
    except RuntimeError as error:
        said.append(str(error))
    return said
