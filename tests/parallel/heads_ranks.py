"""Ranks of tests/parallel/test_heads.py: heads with LoRA, under fully_shard and gathered as ZeRO-3 does. Results are saved."""


import torch
import torch.distributed as dist
from parallel import linear_cross_entropy_ranks, linear_divergence_ranks
from parallel.linear_cross_entropy_ranks import WAYS, D, forced
from parallel.meeting import drawn, join
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import onepass

RANK, SCALE, UPSTREAM = 3, 0.6, 1.7
VOCABULARY, WIDTH, TOKENS, TEACHER = 50, 12, 9, 8
KINDS = ("cross_entropy", "divergence")
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


def run(rank, ranks, folder, backend):
    """Run every scenario, in the same order on all ranks."""
    join(rank, ranks, folder, backend)
    found = {}
    with onepass.use_backend("torch" if backend == "gloo" else "triton"):
        for scenario in (vocabulary, divergences, sharded, gathered):
            found[scenario.__name__] = scenario(rank, ranks, dist.group.WORLD)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


# ---- LoRA of a vocabulary that ranks share ----


def adapters(width, rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [(0.5 * drawn(torch.randn, *shape, generator=generator)).to(dtype) for shape in ((RANK, width), (rows, RANK))]


def lora_of(width, rows, part, dtype, main=False):
    """Return a, whole, and this rank's rows of b, as parameters."""
    a, b = adapters(width, rows, dtype)
    parameters = nn.Parameter(a), nn.Parameter(part(b).clone())
    for parameter in parameters if main else ():
        parameter.main_grad = torch.zeros_like(parameter)
    return parameters


def results(loss, tensors, main=()):
    loss.backward(torch.full_like(loss, UPSTREAM))
    found = {"loss": loss.detach()}
    return found | {name: t.main_grad if name in main else t.grad for name, t in tensors.items()}


def vocabulary(rank, ranks, group):
    """Run each way, with parts of the sequence and without; with main_grad; and the bits of a call without gradients."""
    part = lambda t: linear_cross_entropy_ranks.part(t, rank, ranks)  # noqa: E731
    found = {}
    for way in (*WAYS, "main_grad"):
        for sequence in (False, True):
            hidden, weight, bias, labels, _ = linear_cross_entropy_ranks.inputs(rank, ranks, sequence)
            main = ("a", "b") if way == "main_grad" else ()
            a, b = lora_of(D, sum(linear_cross_entropy_ranks.VOCABULARY[2]), part, torch.float32, bool(main))
            options = {"grad_scale": UPSTREAM} if way == "known_grad_scale" else {}
            with forced(way if way in WAYS else "recompute"):
                loss = onepass.linear_cross_entropy(
                    hidden, weight, labels, group, "sum", sequence_parallel=sequence, bias=bias,
                    lora=onepass.LoRA(a, b, SCALE), **options,
                )  # fmt: skip
                found[way, sequence] = results(loss, {"hidden": hidden, "weight": weight, "bias": bias, "a": a, "b": b}, main)
    hidden, weight, bias, labels, _ = linear_cross_entropy_ranks.inputs(rank, ranks, True)
    lora = onepass.LoRA(*lora_of(D, sum(linear_cross_entropy_ranks.VOCABULARY[2]), part, torch.float32), SCALE)
    asked = {"reduction": "none", "sequence_parallel": True, "return_stats": ("log_prob",), "lora": lora}
    trained = onepass.linear_cross_entropy(hidden, weight, labels, group, **asked)[1].log_prob
    with torch.no_grad():
        alone = onepass.linear_cross_entropy(hidden, weight, labels, group, **asked)[1].log_prob
    return found | {"same bits": torch.equal(trained, alone)}


def divergences(rank, ranks, group):
    part = lambda t: linear_divergence_ranks.part(t, rank, ranks)  # noqa: E731
    found = {}
    for kind in ("forward_kl", "jsd"):
        for reduction in ("mean", "none"):
            student, weight, _, teacher, teacher_weight, labels = linear_divergence_ranks.inputs(rank, ranks)
            a, b = lora_of(D, sum(linear_divergence_ranks.VOCABULARY[2]), part, torch.float32)
            loss = onepass.linear_divergence(
                student, weight, teacher, teacher_weight, labels, kind=kind, reduction=reduction, tp_group=group,
                student_lora=onepass.LoRA(a, b, SCALE), chunk_bytes=8 << 18,
            )  # fmt: skip
            found[kind, reduction] = results(loss, {"student": student, "weight": weight, "a": a, "b": b})
    return found


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
            formula = onepass.ops.loss.linear_cross_entropy.linear_cross_entropy_reference
            losses = formula(hidden, weight, labels, reduction, bias=self.loss.bias, lora=lora)
        else:
            formula = onepass.ops.loss.linear_divergence.linear_divergence_reference
            losses = formula(
                hidden, weight, *more, reduction=reduction, student_bias=self.loss.bias, student_lora=lora
            )  # fmt: skip
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
        given = hidden, labels, teacher, teacher_weight
        return checkpoint(self.head, *given, use_reentrant=False) if self.checkpointed else self.head(*given)


def batch(rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(10 + rank)
    ids, labels = (drawn(torch.randint, 0, VOCABULARY, (TOKENS,), generator=generator) for _ in range(2))
    labels[rank] = -100
    teacher, teacher_weight = (drawn(torch.randn, n, TEACHER, generator=generator).to(dtype) for n in (TOKENS, VOCABULARY))
    return ids, labels, teacher, teacher_weight


def sharded(rank, ranks, group):
    """Train one step under fully_shard; return the loss and the whole gradients."""
    mesh = init_device_mesh(torch.get_default_device().type, (ranks,))
    found = {}
    for kind in KINDS:
        for name, options in SHARDED.items():
            for reshard in (True, False):
                options = dict(options)
                alone = options.pop("alone", False)
                model = Model(kind, **options)
                for module in (model.body, model.head) if alone else (model.body,):
                    fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
                fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
                loss = model(*batch(rank))
                loss.backward()
                grads = {key: None if p.grad is None else p.grad.full_tensor() for key, p in model.named_parameters()}
                found[kind, name, reshard] = {"loss": loss.detach(), **grads}
    return found


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


def gathered(rank, ranks, group):
    """Train one step with gathered parameters; return the loss and the gradients, averaged over the ranks."""
    found = {}
    for kind in KINDS:
        for name in GATHERED:
            options = {key: value for key, value in SHARDED[name].items() if key != "alone"}
            model = Model(kind, **options)
            tied = [model.embedding.weight] if model.tied else []
            for module, more in ((model.embedding, []), (model.head, tied)):  # F.linear saves a view: ZeRO-3 replaces it
                Gathered(module, [*module.parameters(), *more], rank, ranks)
            loss = model(*batch(rank))
            loss.backward()
            grads = {}
            for key, p in model.named_parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                grads[key] = None if p.grad is None else p.grad / ranks
            found[kind, name] = {"loss": loss.detach(), **grads}
    return found
