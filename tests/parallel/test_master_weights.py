"""The masters that MainGrads feeds, in one process; over ranks: test_main_grads_ranks.py."""

import pytest
import torch
from parallel.mixed_model import BF16, BYTES, FP32, Mixed, backwards
from torch import nn

import onepass
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.master_weights import MasterWeights


@pytest.fixture(autouse=True)
def _plain_backend():
    with onepass.use_backend("torch"):
        yield


@pytest.mark.parametrize("norms", [BF16, FP32], ids=str)
def test_master_weights_as_a_loop_by_hand(norms):
    model, other = Mixed(BF16, norms), Mixed(BF16, norms)
    main_grads = MainGrads(model, bucket_bytes=BYTES)
    weights = MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1))
    trainable = [p for p in other.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in trainable]
    by_hand = torch.optim.AdamW(masters, lr=0.02, weight_decay=0.1)
    theirs = MainGrads(other)
    for step in range(5):
        main_grads.zero_()
        backwards(main_grads, model, 0, first=10 * step)
        main_grads.finish()
        weights.step()
        theirs.zero_()
        backwards(theirs, other, 0, first=10 * step)
        for master, parameter in zip(masters, trainable, strict=True):
            master.grad = parameter.main_grad.clone()
        by_hand.step()
        with torch.no_grad():
            for master, parameter in zip(masters, trainable, strict=True):
                parameter.copy_(master)
    for (name, mine), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, expected), name
    assert not torch.equal(model.second.weight, Mixed(BF16, norms).second.weight)
    assert all(p.grad is None for p in model.parameters())


def test_masters_keep_what_bf16_would_lose_and_take_no_copy_of_fp32():
    narrow, wide = nn.Parameter(torch.ones(4, dtype=BF16)), nn.Parameter(torch.ones(4))
    main_grads = MainGrads([narrow, wide])
    weights = MasterWeights(main_grads, lambda groups: torch.optim.SGD(groups, lr=2.0**-10))
    assert weights.optimizer.param_groups[0]["params"][1] is wide
    for step in range(8):
        main_grads.zero_()
        (narrow.sum() + wide.sum()).backward()
        main_grads.finish()
        weights.step()
        weights.optimizer.zero_grad()  # harmless
        assert wide.tolist() == [1 - (step + 1) * 2.0**-10] * 4
    assert narrow.tolist() == [1 - 2.0**-7] * 4
    with torch.no_grad():
        narrow.fill_(3.0)
    weights.reload()
    main_grads.zero_()
    main_grads.finish()
    weights.step()
    assert narrow.tolist() == [3.0] * 4


def test_pieces_are_what_is_stepped_and_publish_takes_what_is_written_there():
    narrow, wide = nn.Parameter(torch.ones(2, 2, dtype=BF16)), nn.Parameter(torch.ones(4))
    weights = MasterWeights(MainGrads([narrow, wide]), lambda groups: torch.optim.SGD(groups, lr=1.0))
    pieces = {id(parameter): (weight, start) for parameter, weight, start in weights.pieces()}
    assert pieces[id(wide)][0] is wide and pieces[id(narrow)][0] is weights.optimizer.param_groups[0]["params"][0]
    assert pieces[id(narrow)][0].shape == (2, 2) and pieces[id(narrow)][0].dtype == FP32
    assert [start for _, start in pieces.values()] == [0, 0]
    with torch.no_grad():
        pieces[id(narrow)][0].fill_(3.0)
    weights.publish()
    assert narrow.tolist() == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_groups_keep_their_options(dtype):
    one, two, three = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(3))
    main_grads = MainGrads([one, two, three])
    groups = [{"params": [three, one], "lr": 0.25}, {"params": iter([two])}]
    weights = MasterWeights(main_grads, lambda groups: torch.optim.SGD(groups, lr=0.5), groups)
    (one.sum() + two.sum() + three.sum()).backward()
    main_grads.finish()
    weights.step()
    assert [weight.tolist() for weight in (one, two, three)] == [[0.75] * 2, [0.5] * 2, [0.75] * 2]


def test_a_schedule_of_the_learning_rate():
    weight = nn.Parameter(torch.ones(2, dtype=BF16))
    main_grads = MainGrads([weight])
    weights = MasterWeights(main_grads, lambda groups: torch.optim.SGD(groups, lr=0.5))
    schedule = torch.optim.lr_scheduler.LambdaLR(weights.optimizer, lambda step: 0.5**step)
    for _ in range(2):
        main_grads.zero_()
        weight.sum().backward()
        main_grads.finish()
        weights.step()
        schedule.step()
    assert weight.tolist() == [0.25, 0.25]
