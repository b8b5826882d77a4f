"""Ranks of tests/parallel/test_fsdp.py: train under fully_shard, with onepass and by PyTorch alone. Results are saved."""

import os

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

if os.environ.get("TRITON_INTERPRET"):  # a spawned process doesn't import conftest
    import onepass.testing.interpreter

import onepass
from onepass.gradients.main_grads import MainGrads

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
    """Blocks between two uses of one weight, which belongs to the root module."""

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
        mixed = F.linear if self.plain else onepass.linear
        x = mixed(x, self.mix)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return mixed(x, self.mix)


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


def trained(rank, mesh, plain=False, each=False, at_the_end=False, main_grad=False, **options):
    """Return the whole gradients, summed over the microbatches and averaged over the ranks."""
    model = sharded(mesh, plain, **options)
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
    if losses:
        sum(losses).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is None or type(grad).__name__ == "DTensor" for grad in grads.values())
    assert not main_grad or not any(p.main_grad.any() or p.grad_added_to_main_grad for p in model.parameters())
    return {name: None if grad is None else grad.full_tensor() for name, grad in grads.items()}


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
