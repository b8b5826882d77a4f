"""AdamW of shards over two ranks, against MasterWeights."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from parallel.meeting import drawn, error_of, formulas_on_cpus, gather
from parallel.mixed_model import BF16, BYTES, FP32, Mixed, backwards
from parallel.poisoned import poisoned

import onepass
from onepass.parallel import AdamW, MainGrads, MasterWeights

types = pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
CLIP = 0.5


def made(dtype, shard=True, release=False):
    model = Mixed(dtype, norms=FP32)
    main_grads = MainGrads(model, bucket_bytes=BYTES, shard=shard, release=release)
    return model, main_grads, AdamW(main_grads, groups_of(model))


def groups_of(model):
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]  # includes the frozen parameter
    return [{"params": decay, **OPTIONS}, {"params": rest, "weight_decay": 0.0, "lr": 0.03}]


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def alike(one, other):
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


def train(model, main_grads, optimizer, steps):
    """Train, and return the last step's norm. Backwards run formulas."""
    for step in steps:
        main_grads.zero_()
        with onepass.use_backend("torch"):
            backwards(main_grads, model, dist.get_rank(), first=10 * step)
        main_grads.finish()
        norm = optimizer.step(CLIP, zero=True)
    return norm


@types
def test_sharded_it_is_as_master_weights(group, dtype):
    """Clipped by the whole gradient's norm. All buffers end up zero."""
    model, main_grads, optimizer = made(dtype)
    start = weights_of(model)
    norm = train(model, main_grads, optimizer, range(3))
    main_grads.zero_()
    assert not any(buffer.any() for buffer in main_grads.buffers)
    with poisoned():
        again = made(dtype, release=True)
        train(*again, range(3))

    other = Mixed(dtype, norms=FP32)
    theirs = MainGrads(other, bucket_bytes=BYTES, shard=True)
    weights = MasterWeights(theirs, lambda groups: torch.optim.AdamW(groups, fused=True), groups_of(other))
    with onepass.use_backend("torch"):
        for step in range(3):
            theirs.zero_()
            backwards(theirs, other, group.rank(), first=10 * step)
            theirs.finish()
            their_norm = theirs.clip_(CLIP)
            weights.step()
    ours = weights_of(model)
    assert norm.item() == pytest.approx(their_norm.item(), rel=1e-5)
    assert alike(ours, weights_of(again[0])) and alike(ours, gather(group, ours)[0]) and not alike(ours, start)
    for name, weight in weights_of(other).items():
        torch.testing.assert_close(ours[name], weight, rtol=2**-7 if dtype is BF16 else 1e-5, atol=1e-6)
    states = sum(stop - begin for _, kind, _, begin, stop in optimizer.masters() if kind == "exp_avg")
    assert sum(gather(group, states)) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_sharded_states_come_back(group):
    """In a new model, from the optimizer's state alone."""
    one, two, mine = made(BF16), made(BF16), [group.rank(), 2]
    with onepass.use_backend("torch"):
        train(*one, range(2))
        state = copy.deepcopy(one[2].state_dict())
        train(*one, range(2, 3))
        with torch.no_grad():
            for parameter in two[0].parameters():
                if parameter.requires_grad:
                    parameter.mul_(2.0)
        said = error_of(two[2].load_state_dict, {**state, "shard": [mine[0] + 1, 2]})
        assert said == f"state must be of [rank, ranks] {mine}, but is of {[mine[0] + 1, 2]}"
        two[2].load_state_dict(state)
        train(*two, range(2, 3))
        assert alike(weights_of(one[0]), weights_of(two[0]))
        two[0].second.weight.data = two[0].second.weight.data.clone()
        two[1].finish()
        assert "must stay where they were put with shard=True" in error_of(two[2].step)


@types
def test_a_rank_whose_shard_holds_no_parameter(group, dtype):
    """A parameter is so small that rank 0 steps all of it and rank 1 nothing: with AdamW, resumed, and with MasterWeights."""
    trained = []
    for make in (
        partial(AdamW, **OPTIONS),
        lambda main_grads: MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, **OPTIONS)),
    ):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=dtype))
        main_grads = MainGrads([weight], shard=True)
        optimizer = make(main_grads)
        with onepass.use_backend("torch"):
            for _ in range(3):
                main_grads.zero_()
                (weight.float() ** 2).sum().backward()
                main_grads.finish()
                if isinstance(optimizer, AdamW):
                    optimizer.step(CLIP, zero=True)
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                else:
                    main_grads.clip_(CLIP)
                    optimizer.step()
        assert sum(1 for bucket in main_grads.buckets for _ in bucket.parts()) == (group.rank() == 0)
        trained.append(weight.detach())
    assert all(map(torch.equal, trained, gather(group, trained)[0]))
    torch.testing.assert_close(*trained)
    assert not torch.equal(trained[0].float(), torch.linspace(-1, 1, 6))


def test_pieces_of_all_ranks_are_the_whole(group):
    mine = [(name, kind, *span) for name, kind, _, *span in made(BF16)[2].masters()]
    pieces = [piece for each in gather(group, mine) for piece in each]
    for name in {name for name, *_ in pieces}:
        spans = sorted(span for other, kind, *span in pieces if (other, kind) == (name, "master"))
        assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("offload", [None, "state"])
def test_moments_in_eight_bits_are_those_of_one_rank(group, offload):
    """Blocks and draws are the parameter's own, wherever ranks cut it."""
    found = []
    for shard in (False, True):
        draw = partial(drawn, torch.randn, generator=torch.Generator().manual_seed(1))
        weights = [torch.nn.Parameter(draw(shape).to(BF16)) for shape in ((24, 256), (300,), (7, 512))]
        main_grads = MainGrads(weights, shard=shard)
        optimizer = AdamW(main_grads, **OPTIONS, moments="8bit", offload=offload if shard else None)
        with formulas_on_cpus():
            for _ in range(3):
                main_grads.zero_()
                for weight in weights:
                    weight.main_grad.copy_(draw(weight.shape))
                main_grads.finish()
                optimizer.step()
        stored = [(parameter is weights[0], start, state.stored) for parameter, state, start in optimizer.parameter_states()]
        found.append((weights, [each for each in stored if each[0]]))
    (one, [(_, _, whole)]), (two, parts) = found
    assert all(map(torch.equal, one, two)) and sum(gather(group, len(parts))) == 2
    for _, start, stored in parts:
        assert "exp_avg_code" in stored
        for name, each in stored.items():
            first = start // 256 if name.endswith("scale") else start
            assert torch.equal(each.cpu(), whole[name][first : first + len(each)].cpu()), name
