"""Both heads as models have them: LoRA over a shared vocabulary, sharded by fully_shard, gathered as by ZeRO-3; against fp64."""

import pytest
import torch
import torch.distributed as dist
from parallel import test_linear_cross_entropy as cross_entropy
from parallel import test_linear_divergence as divergence
from parallel.meeting import drawn, formulas_on_cpus, gather
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy_reference
from onepass.ops.loss.linear_divergence import linear_divergence_reference

rank_context = formulas_on_cpus
FP64 = torch.float64
RANK, SCALE, UPSTREAM = 3, 0.6, 1.7
VOCABULARY, WIDTH, TOKENS, TEACHER = 50, 12, 9, 8
kinds = pytest.mark.parametrize("kind", ("cross_entropy", "divergence"))
SHARDED = {  # case -> options of `Model` and of `fsdp`
    "whole": {},
    "bias": {"bias": True},
    "rows": {"rows": True},
    "frozen": {"frozen": True},
    "tied": {"tied": True},
    "tied rows": {"tied": True, "rows": True},
    "tied, checkpointed": {"tied": True, "checkpointed": True},
    "head by itself": {"alone": True},
    "head by itself, rows": {"alone": True, "rows": True, "bias": True},
    "lora": {"lora": True, "frozen": True},
    "lora rows": {"lora": True, "rows": True, "alone": True},
    "lora tied": {"lora": True, "tied": True, "rows": True},
}
# forward runs again inside of backward there, and releases what backward needs
GATHERED = [name for name, options in SHARDED.items() if not options.get("checkpointed")]


def close(mine, exact, what):
    size = float(exact.abs().max())
    torch.testing.assert_close(mine.to(FP64), exact, rtol=1e-4, atol=1e-5 * size, msg=lambda m: f"{what}: {m}")


# ---- LoRA of a vocabulary that ranks share ----


def adapters(width, rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [(0.5 * drawn(torch.randn, *shape, generator=generator)).to(dtype) for shape in ((RANK, width), (rows, RANK))]


def lora_of(group, file):
    """Return a, whole, and this rank's rows of b, as parameters."""
    a, b = adapters(file.D, sum(file.VOCABULARY[2]))
    return nn.Parameter(a), nn.Parameter(file.part(b, group).clone())


def compare(group, file, loss, reference, tensors, whole, divided=()):
    """Compare the loss and gradients, which are in main_grad where there is one, with those of the whole in fp64."""
    loss.backward(torch.full_like(loss, UPSTREAM))
    leaves = {name: t.requires_grad_() for name, t in whole.items()}
    exact = reference(*leaves.values())
    exact.backward(torch.full_like(exact, UPSTREAM))
    close(loss.detach(), exact.detach(), "loss")
    for name, t in tensors.items():
        grad, wanted = getattr(t, "main_grad", t.grad), leaves[name].grad
        if name in ("weight", "bias", "b"):
            wanted = file.part(wanted, group)
        elif name in divided:
            grad = torch.cat(gather(group, grad))
        close(grad.reshape(wanted.shape), wanted, name)
        assert name != "a" or all(torch.equal(grad, other) for other in gather(group, grad))


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize("way", (*cross_entropy.WAYS, "main_grad"))
def test_lora_of_a_shared_vocabulary(group, way, sequence):
    hidden, weight, bias, labels, _ = cross_entropy.inputs(group, sequence)
    a, b = lora_of(group, cross_entropy)
    for parameter in (a, b) if way == "main_grad" else ():
        parameter.main_grad = torch.zeros_like(parameter)
    options = {"grad_scale": UPSTREAM} if way == "known_grad_scale" else {}
    with cross_entropy.forced(way if way in cross_entropy.WAYS else "recompute"):
        loss = onepass.linear_cross_entropy(
            hidden, weight, labels, group, "sum", sequence_parallel=sequence, bias=bias, lora=onepass.LoRA(a, b, SCALE), **options
        )
        *whole, all_labels, _ = cross_entropy.whole(FP64)
        whole += adapters(cross_entropy.D, len(whole[1]), FP64)

        def reference(hidden, weight, bias, a, b):
            return linear_cross_entropy_reference(hidden, weight, all_labels, "sum", bias=bias, lora=onepass.LoRA(a, b, SCALE))

        tensors = {"hidden": hidden, "weight": weight, "bias": bias, "a": a, "b": b}
        whole = dict(zip(tensors, whole, strict=True))
        compare(group, cross_entropy, loss, reference, tensors, whole, ("hidden",) if sequence else ())


def test_log_prob_of_a_call_without_gradients_has_the_same_bits(group):
    hidden, weight, _, labels, _ = cross_entropy.inputs(group, True)
    lora = onepass.LoRA(*lora_of(group, cross_entropy), SCALE)
    asked = {"reduction": "none", "sequence_parallel": True, "return_stats": ("log_prob",), "lora": lora}
    trained = onepass.linear_cross_entropy(hidden, weight, labels, group, **asked)[1].log_prob
    with torch.no_grad():
        alone = onepass.linear_cross_entropy(hidden, weight, labels, group, **asked)[1].log_prob
    assert torch.equal(trained, alone)


@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("kind", ("forward_kl", "jsd"))
def test_divergence_with_lora_of_a_shared_vocabulary(group, kind, reduction):
    student, weight, _, teacher, teacher_weight, labels = divergence.inputs(group)
    a, b = lora_of(group, divergence)
    loss = onepass.linear_divergence(
        student, weight, teacher, teacher_weight, labels, kind=kind, reduction=reduction, tp_group=group,
        student_lora=onepass.LoRA(a, b, SCALE), chunk_bytes=8 << 18,
    )  # fmt: skip
    whole_student, whole_weight, _, *teachers = divergence.whole(FP64)
    tensors = {"student": student, "weight": weight, "a": a, "b": b}
    whole = dict(zip(tensors, (whole_student, whole_weight, *adapters(divergence.D, len(whole_weight), FP64)), strict=True))

    def reference(student, weight, a, b):
        lora = onepass.LoRA(a, b, SCALE)
        return linear_divergence_reference(student, weight, *teachers, kind=kind, reduction=reduction, student_lora=lora)

    compare(group, divergence, loss, reference, tensors, whole)


# ---- parameters that are whole for a moment ----


class Head(nn.Module):
    """A head and its loss, by onepass or by a formula. A tied one has the embedding's weight."""

    def __init__(self, kind, plain, embedding, bias=False, lora=False, tied=False, frozen=False, rows=False):
        super().__init__()
        self.kind, self.plain, self.rows = kind, plain, rows
        self.tied = [embedding] if tied else []  # a list: no child of this module
        make = onepass.nn.LinearCrossEntropy if kind == "cross_entropy" else onepass.nn.LinearDivergence
        self.loss = make(WIDTH, VOCABULARY, bias=bias, skip_weight_param_allocation=tied)
        self.a = nn.Parameter(torch.empty(RANK, WIDTH)) if lora else None
        self.b = nn.Parameter(torch.empty(VOCABULARY, RANK)) if lora else None
        if frozen and not tied:
            self.loss.weight.requires_grad_(False)

    def forward(self, hidden, labels, teacher, teacher_weight):
        weight = self.tied[0].weight if self.tied else self.loss.weight
        lora = None if self.a is None else onepass.LoRA(self.a, self.b, SCALE)
        reduction = "none" if self.rows else "mean"
        more = (labels,) if self.kind == "cross_entropy" else (teacher, teacher_weight, labels)
        if not self.plain:
            losses = self.loss(hidden, *more, weight=weight, lora=lora, reduction=reduction)
        elif self.kind == "cross_entropy":
            losses = linear_cross_entropy_reference(hidden, weight, labels, reduction, bias=self.loss.bias, lora=lora)
        else:
            options = {"student_bias": self.loss.bias, "student_lora": lora}
            losses = linear_divergence_reference(hidden, weight, *more, reduction=reduction, **options)
        weights = torch.linspace(0.5, 1.5, losses.numel(), dtype=losses.dtype, device=losses.device)
        return (losses * weights.view(losses.shape)).sum()


class Model(nn.Module):
    """An embedding, whose weight the head may share, a layer, and the head."""

    def __init__(self, kind, plain=False, tied=False, checkpointed=False, **options):
        super().__init__()
        self.tied, self.checkpointed = tied, checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = Head(kind, plain, self.embedding, tied=tied, **options)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(drawn(torch.randn, parameter.shape, generator=generator).mul_(0.5))

    def forward(self, ids, labels, teacher, teacher_weight):
        hidden = torch.tanh(self.body(self.embedding(ids)))
        inputs = hidden, labels, teacher, teacher_weight
        return checkpoint(self.head, *inputs, use_reentrant=False) if self.checkpointed else self.head(*inputs)


def batch(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(10 + rank)
    ids, labels = (drawn(torch.randint, 0, VOCABULARY, (TOKENS,), generator=generator) for _ in range(2))
    labels[rank] = -100
    teacher, teacher_weight = (drawn(torch.randn, n, TEACHER, generator=generator).to(dtype) for n in (TOKENS, VOCABULARY))
    return ids, labels, teacher, teacher_weight


def options_of(name):
    """Return a case's options of `Model`."""
    return {key: value for key, value in SHARDED[name].items() if key != "alone"}


def agree(group, kind, name, loss, grads):
    """Compare this rank's loss, and the gradients of all ranks' mean, with those of the unsharded model."""
    model, ranks = Model(kind, plain=True, **options_of(name) | {"checkpointed": False}).double(), group.size()
    for rank in range(ranks):
        exact = model(*batch(rank, FP64))
        (exact / ranks).backward()
        if rank == group.rank():
            close(loss.detach(), exact.detach(), "loss")
    wanted = {key: p.grad for key, p in model.named_parameters()}
    assert grads.keys() == wanted.keys()
    for key, grad in grads.items():
        assert (grad is None) == (wanted[key] is None), key
        if grad is not None:
            close(grad, wanted[key], key)


@kinds
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("reshard", (True, False))
def test_under_fully_shard(group, name, kind, reshard):
    mesh = init_device_mesh(torch.get_default_device().type, (group.size(),))
    model = Model(kind, **options_of(name))
    for module in (model.body, model.head) if SHARDED[name].get("alone") else (model.body,):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    loss = model(*batch(group.rank()))
    loss.backward()
    grads = {key: None if p.grad is None else p.grad.full_tensor() for key, p in model.named_parameters()}
    agree(group, kind, name, loss, grads)


class Gathered:
    """Parameters that are whole while a module runs, forward or backward, as ZeRO-3's: their memory is released in between."""

    def __init__(self, module, parameters, rank, ranks):
        self.parameters, self.rank, self.ranks = list(parameters), rank, ranks
        for p in self.parameters:
            if not hasattr(p, "shard"):  # a tied one is gathered by two modules
                p.shard, p.whole = p.detach().flatten().tensor_split(ranks)[rank].clone(), p.shape
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda *_: self.release())
        module.register_full_backward_pre_hook(lambda *_: self.gather())
        self.release()

    def gather(self):
        for p in self.parameters:
            flat = torch.empty(p.whole.numel(), dtype=p.dtype, device=p.device)
            for source, part in enumerate(flat.tensor_split(self.ranks)):
                dist.broadcast(part.copy_(p.shard) if source == self.rank else part, source)
            p.data = flat.view(p.whole)

    def release(self):
        for p in self.parameters:
            p.data.untyped_storage().resize_(0)  # who reads it meanwhile finds no memory
            p.data = torch.empty(0, dtype=p.dtype, device=p.device)


@kinds
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_as_by_zero_3(group, name, kind):
    model, ranks = Model(kind, **options_of(name)), group.size()
    tied = [model.embedding.weight] if model.tied else []
    for module, more in ((model.embedding, []), (model.head, tied)):  # F.linear saves a view: ZeRO-3 replaces it
        Gathered(module, [*module.parameters(), *more], group.rank(), ranks)
    loss = model(*batch(group.rank()))
    loss.backward()
    grads = {key: p.grad for key, p in model.named_parameters()}
    for grad in grads.values():
        if grad is not None:
            dist.all_reduce(grad, dist.ReduceOp.SUM)
            grad /= ranks
    agree(group, kind, name, loss, grads)
