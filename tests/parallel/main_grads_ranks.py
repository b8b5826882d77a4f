"""Ranks of the tests of MainGrads and MasterWeights, and the model that they train. Each rank saves its results."""

import copy
import functools

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join
from parallel.poisoned import poisoned
from torch import nn
from torch.nn import functional as F

import onepass
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.master_weights import MasterWeights

FP32, BF16 = torch.float32, torch.bfloat16
BYTES = 2048  # bucket_bytes, with which the model has several buckets
STEPS, MICROBATCHES = 3, 2
CLIPPED = {FP32: 0.5, BF16: None}  # dtype of the weights -> max_norm of clip_


class Mixed(nn.Module):
    """PyTorch and onepass layers that are used twice, a tied weight, an unused and a frozen parameter.

    The tied weight is used by one operator of PyTorch and one of onepass.
    """

    def __init__(self, dtype=FP32, norms=None):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embedding = nn.Embedding(11, 20)
        self.first = onepass.nn.NormLinear(20, 36)
        self.norm = onepass.nn.RMSNorm(36)
        self.second = nn.Linear(36, 20)
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(20), requires_grad=False)
        self.last_norm = nn.Parameter(torch.ones(20))
        for parameter in self.parameters():
            parameter.data = drawn(torch.randn, parameter.shape, generator=generator) * 0.3
        self.to(dtype)
        if norms is not None:
            for parameter in (self.first.layer_norm_weight, self.norm.weight, self.last_norm):
                parameter.data = parameter.data.to(norms)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.frozen
        for _ in range(2):
            x = x + self.second(self.norm(F.gelu(self.first(x))))
        return onepass.norm_linear(x, self.last_norm, self.embedding.weight)

    def plain(self, tokens):
        """Run the same model by PyTorch alone."""
        x = self.embedding(tokens) * self.frozen
        for _ in range(2):
            h = F.linear(rms(x, self.first.layer_norm_weight), self.first.weight, self.first.bias)
            x = x + self.second(rms(F.gelu(h), self.norm.weight))
        return F.linear(rms(x, self.last_norm), self.embedding.weight)


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def loss(model, place, microbatch, plain=False):
    generator = torch.Generator().manual_seed(100 * place + microbatch)
    tokens, labels = drawn(torch.randint, 11, (2, 6, 4), generator=generator)
    logits = (model.plain if plain else model)(tokens)
    return F.cross_entropy(logits.flatten(0, 1).to(torch.promote_types(logits.dtype, FP32)), labels.flatten())


def exact(places, microbatches=MICROBATCHES, average=True):
    """Return name -> the fp64 gradient of these ranks' microbatches."""
    scale = len(places) if average else 1
    return {name: None if grad is None else grad / scale for name, grad in _exact(tuple(places), microbatches).items()}


@functools.cache
def _exact(places, microbatches):
    model = Mixed(torch.float64)
    for place in places:
        for microbatch in range(microbatches):
            loss(model, place, microbatch, plain=True).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def backwards(main_grads, model, place, first=0):
    """Run the backwards of all microbatches of a step."""
    with main_grads.accumulate():
        for microbatch in range(first, first + MICROBATCHES - 1):
            loss(model, place, microbatch).backward()
    loss(model, place, first + MICROBATCHES - 1).backward()


def parts(main_grads):
    """Return name -> this rank's part of a gradient, and its offset in the flattened gradient."""
    return {
        place.name: (start - place.start, bucket.flat[start:stop].clone())
        for bucket in main_grads.buckets
        for place, start, stop in bucket.parts()
    }


def said(call, *args):
    try:
        call(*args)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return ""


class Sent:
    """Record the name and the number of elements of each reduction in the block."""

    NAMES = [name for name in ("all_reduce", "reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]

    def __enter__(self):
        self.real, calls = {name: getattr(dist, name) for name in self.NAMES}, []
        for name in self.NAMES:
            setattr(dist, name, self.noting(name, calls))
        return calls

    def noting(self, name, calls):
        def noted(tensor, *args, **options):
            calls.append((name.removesuffix("_single").removesuffix("_tensor"), tensor.numel()))
            return self.real[name](tensor, *args, **options)

        return noted

    def __exit__(self, *exception):
        for name, real in self.real.items():
            setattr(dist, name, real)


def run(rank, ranks, folder, backend):
    """Run every scenario, in the same order on all ranks."""
    join(rank, ranks, folder, backend)
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    pairs = [dist.new_group(members) for members in ([[0, 2], [1, 3], [0, 1], [2, 3]] if ranks == 4 else [])]
    scenarios = [reduced, overlap, unused_on_one_rank, by_hand_and_held, norms, narrow, trained, resumed, agreement]
    with onepass.use_backend("torch"):
        found = {scenario.__name__: scenario(rank) for scenario in scenarios}
        found["alone"], found["backend"] = lonely(rank, alone), backend
        found["other"] = said(lambda: MainGrads(Mixed(), group=-100))
        if ranks == 4:
            data, tensor = pairs[rank % 2], pairs[2 + rank // 2]
            found["pairs"] = [reduced(rank, data, shard)["averaged"] for shard in (False, True)]
            found["tensor_parallel"] = [tensor_parallel(rank, data, tensor, shard) for shard in (False, True)]
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


# ---- scenarios ----


def reduced(rank, group=None, shard=False):
    """Run two steps, of which the second must not see the first. Gradients are averaged, summed or sharded, released or not."""
    found = {}
    kinds = {"averaged": {"shard": shard}, "summed": {"average": False}, "shards": {"shard": True}}
    released = {f"{name}, released": {**options, "release": True} for name, options in kinds.items()}
    for name, options in {**kinds, **released}.items():
        with poisoned():
            model = Mixed()
            main_grads = MainGrads(model, group=group, bucket_bytes=BYTES, **options)
            backwards(main_grads, model, rank, first=5)
            main_grads.finish()
            main_grads.zero_()
            backwards(main_grads, model, rank)
            main_grads.finish()
            found[name] = parts(main_grads)
    return found


def overlap(rank):
    """Return the order of reductions and of gradients' hooks in a step."""
    found = {}
    for shard in (False, True):
        model = Mixed()
        main_grads = MainGrads(model, bucket_bytes=BYTES, shard=shard)
        with Sent() as calls:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
            with main_grads.accumulate():
                loss(model, rank, 0).backward()
                loss(model, rank, 1).backward()
            before = len([call for call in calls if isinstance(call, tuple)])
            calls.clear()
            loss(model, rank, 2).backward()
            backward = list(calls)
            main_grads.finish()
        sizes = [bucket.mine.numel() for bucket in main_grads.buckets]
        found[shard] = {"before": before, "backward": backward, "finish": calls[len(backward) :], "sizes": sizes}
    return found


def unused_on_one_rank(rank):
    """Leave a parameter unused on rank 0.

    On that rank its bucket and those after it wait for finish(); the order of reductions is the same on all ranks. With release,
    the unused gradient's memory holds stale data, which must not be sent.
    """
    found = []
    for release in (False, True):
        generator = torch.Generator().manual_seed(3)
        weights = [nn.Parameter(drawn(torch.randn, 40 + 50 * index, generator=generator)) for index in range(5)]
        with poisoned():
            main_grads = MainGrads(weights, bucket_bytes=4, release=release)
            with Sent() as calls:
                sum((index + 1) * (rank + 1) * w.sum() for index, w in enumerate(weights) if (rank, index) != (0, 3)).backward()
                backward = len(calls)
                main_grads.finish()
        found.append({"backward": backward, "sent": calls, "grads": [w.main_grad.mean() for w in weights]})
    return found


def by_hand_and_held(rank):
    """Set .grad by hand, without a hook, and hold a gradient that is added later."""
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    main_grads = MainGrads([two, one], bucket_bytes=4)  # `one` is in the first bucket
    one.grad = torch.full((3,), rank + 1.0)
    with Sent() as calls:
        main_grads.hold(one)
        (one.sum() + two.sum()).backward()
        held = len(calls)
        too_early = said(main_grads.finish)
        one.main_grad += 10.0
        main_grads.unhold(one)
        released = len(calls)
        too_late = said(lambda: main_grads.check_open(one)), said(lambda: main_grads.hold(one))
        main_grads.finish()
    return {"sent": [held, released, len(calls)], "said": [too_early, *too_late], "grads": [one.main_grad, two.main_grad]}


def norms(rank):
    found = {}
    for shard in (False, True):
        model = Mixed()
        main_grads = MainGrads(model, bucket_bytes=BYTES, shard=shard)
        backwards(main_grads, model, rank)
        main_grads.finish()
        found[shard] = [main_grads.norm(p) for p in (2.0, 1.0, float("inf"))]
        found[shard].append(main_grads.clip_(0.05))
        found[shard].append(main_grads.norm())
        main_grads.zero_()
        model.second.weight.main_grad[0, 0] = float("nan")
        main_grads.finish()
        found[shard] += [main_grads.norm(), main_grads.norm(float("inf"))]
    return found


def tensor_parallel(rank, data, tensor, shard):
    """Clip the gradients of one sharded and two replicated tensor-parallel parameters."""
    cut, whole, other = (nn.Parameter(torch.zeros(100)) for _ in range(3))
    cut.tensor_model_parallel, whole.tensor_model_parallel = True, False
    main_grads = MainGrads([cut, whole, other], group=data, shard=shard, tp_group=tensor)
    place = tensor.rank()
    (cut * (1.0 + place) + whole * 3.0 + other * 4.0).sum().backward()
    main_grads.finish()
    norm = main_grads.clip_(1.0)
    return norm, main_grads.norm()


def narrow(rank):
    """Use bf16 buffers for an fp32 and a bf16 parameter."""
    one, two = nn.Parameter(torch.ones(7)), nn.Parameter(torch.ones(9, dtype=BF16))
    main_grads = MainGrads([one, two], dtype=BF16, average=False)
    with main_grads.accumulate():
        (one * (1 + 2.0**-9)).sum().backward()
    (one.sum() + two.sum() * (rank + 1)).backward()
    main_grads.finish()
    return [one.main_grad, two.main_grad, len(main_grads.buffers)]


def weights_for(model, main_grads):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]  # includes the frozen parameter
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.03}]
    return MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, lr=0.02), groups)


def train(model, main_grads, weights, rank, steps, clip=None):
    for step in steps:
        main_grads.zero_()
        backwards(main_grads, model, rank, first=10 * step)
        main_grads.finish()
        if clip is not None:
            main_grads.clip_(clip)
        weights.step()


def trained(rank):
    """Train without shard, with shard, and with shard and release."""
    found = {}
    for dtype, clip in CLIPPED.items():
        for shard in (False, True, "released"):
            with poisoned():
                model = Mixed(dtype, norms=FP32)
                main_grads = MainGrads(model, bucket_bytes=BYTES, shard=bool(shard), release=shard == "released")
                weights = weights_for(model, main_grads)
                trainable = [p for p in model.parameters() if p.requires_grad]
                versions = [p._version for p in trainable]
                train(model, main_grads, weights, rank, range(STEPS), clip)
            moved = all(p._version > version for p, version in zip(trainable, versions, strict=True))
            sizes = sum(each["exp_avg"].numel() for each in weights.optimizer.state.values())
            found[dtype, shard] = {name: p.detach().clone() for name, p in model.named_parameters()}, sizes, moved
    return found


def resumed(rank):
    """Save after two steps and resume in a new model. Loading another rank's state raises and changes nothing."""
    found = {}
    for shard in (False, True):
        model = Mixed(BF16, norms=FP32)
        main_grads = MainGrads(model, bucket_bytes=BYTES, shard=shard)
        weights = weights_for(model, main_grads)
        train(model, main_grads, weights, rank, range(2))
        state = copy.deepcopy(weights.state_dict())  # state_dict() returns the optimizer's own tensors
        at_two = {name: p.detach().clone() for name, p in model.named_parameters()}
        train(model, main_grads, weights, rank, range(2, STEPS))
        straight = {name: p.detach().clone() for name, p in model.named_parameters()}

        other = Mixed(BF16, norms=FP32)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2.0)
        theirs = MainGrads(other, bucket_bytes=BYTES, shard=shard)
        again = weights_for(other, theirs)
        wrong = {**state, "shard": [state["shard"][0] + 1, state["shard"][1]]}
        name = next(iter(state["masters"]))
        short = {**state, "masters": {**state["masters"], name: state["masters"][name][:1]}}
        before = {name: p.detach().clone() for name, p in other.named_parameters()}
        words = said(again.load_state_dict, wrong), said(again.load_state_dict, short)
        same = all(torch.equal(p, before[name]) for name, p in other.named_parameters())
        again.load_state_dict(state)
        with torch.no_grad():
            other.frozen.copy_(model.frozen)
        loaded = {name: p.detach().clone() for name, p in other.named_parameters()}
        train(other, theirs, again, rank, range(2, STEPS))
        after = {name: p.detach().clone() for name, p in other.named_parameters()}
        found[shard] = {"said": words, "same": same, "loaded": (at_two, loaded), "trained": (straight, after)}
    return found


def agreement(rank):
    """What ranks that differ from the first are told, and those that agree."""
    others = rank > 0

    def made(layers=2, dtype=torch.float32, **options):
        return said(lambda: MainGrads([nn.Parameter(torch.ones(3 + layer, dtype=dtype)) for layer in range(layers)], **options))

    with onepass.validate():
        return {
            "shape": said(lambda: MainGrads([nn.Parameter(torch.ones(3 + rank))])),
            "layers": made(3 if others else 2),
            "type": made(dtype=BF16 if others else FP32),
            "options": made(dtype=BF16, shard=others),
            "buckets": made(bucket_bytes=4 if others else 1 << 20),
            "alike": made(),
        }


def lonely(rank, group):
    model = Mixed()
    with Sent() as calls:
        main_grads = MainGrads(model, group=group, shard=True)
        backwards(main_grads, model, rank)
        main_grads.finish()
        main_grads.norm()
    return calls, parts(main_grads)


# ---- for the tests ----


def close(got, expected):
    """Assert that gradients agree to fp32 rounding. A parameter without a gradient has zeros."""
    for name, grad in expected.items():
        if name in got:
            right = torch.zeros_like(got[name]) if grad is None else grad.float()
            torch.testing.assert_close(got[name], right, rtol=2e-5, atol=2e-6, msg=lambda words, name=name: f"{name}: {words}")


def main_grads_by_name(model):
    return {name: p.main_grad for name, p in model.named_parameters() if p.requires_grad}
