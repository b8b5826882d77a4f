"""What only a GPU shows of lean AdamW: copies to and from the host and steps wait for each other, and the CPU for nobody."""

import pytest
import torch
from gpu.calls import memory_goes_back, nobody_waits
from parallel.adamw_oracle import BF16
from parallel.test_moments import MOMENTS, WAYS
from torch import nn

from onepass.gradients import adamw
from onepass.parallel import AdamW, MainGrads, ShardedAdamW

__all__ = ["memory_goes_back"]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(MainGrads.__init__.__globals__, "RELEASED_BYTES", 8 << 20)
    monkeypatch.setitem(adamw.allocate_state.__globals__, "PASSAGE", 3 << 18)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 1024, dtype=BF16), *(nn.Linear(1024, 1024, dtype=BF16) for _ in range(6)))


def made(moments, way):
    model = model_of()
    main_grads = MainGrads(model, release=True, bucket_bytes=4 << 20)
    return model, main_grads, AdamW(main_grads, moments=moments, **WAYS[way])


def loss(model, step):
    ids = torch.arange(64) * (step + 3) % 256
    return model(ids).float().square().mean()


def slowed(optimizer):
    """Keep the streams of copies busy, so that a step that doesn't wait for them finds what was there before."""
    for ring in optimizer._rings.values():
        for stream in ring._streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)


def trained(model, main_grads, optimizer, steps=range(4)):
    for step in steps:
        main_grads.zero_()
        with optimizer.accumulate():
            loss(model, step).backward()
        slowed(optimizer)
        loss(model, step + 10).backward()
        main_grads.finish()
        slowed(optimizer)
        optimizer.step()
    optimizer._rings.settle()
    return [each.clone() for _, state, _ in optimizer.parameter_states() for each in (state.weight, *state.stored.values())]


def alike(a, b):
    return all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in zip(a, b, strict=True))


@pytest.mark.parametrize("way", [*WAYS][1:])
@pytest.mark.parametrize("moments", MOMENTS)
def test_all_ways_have_the_same_bits(moments, way):
    lean = made(moments, way)
    assert alike(trained(*made(moments, "after")), trained(*lean))
    if "offload" in WAYS[way] or way == "both":
        ring = lean[2]._rings[torch.device("cuda", 0)]
        assert len(ring.passages) > 6 and ring.rate() > 1e9
        assert all(stored.is_pinned() for passage in ring.passages for stored, _ in passage.pairs)


def test_a_step_that_does_not_wait_for_copies_is_seen(monkeypatch):
    usual, (model, main_grads, optimizer) = trained(*made("8bit", "after")), made("8bit", "offload")
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda *_: None)
    assert not alike(usual, trained(model, main_grads, optimizer))


@pytest.mark.parametrize("moments", ["8bit", "fp32"])
def test_sharded_adamw_passes_its_state_too(moments):
    found = []
    for options in ({}, {"offload": "state"}, {"offload": "state", "in_backward": True}):
        model = model_of()
        optimizer = ShardedAdamW(model.parameters(), moments=moments, masters=True, **options)
        for step in range(4):
            slowed(optimizer)
            loss(model, step).backward()
            slowed(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        optimizer._rings.settle()
        found.append([each.clone() for weight in model.parameters() for each in (weight, *optimizer.state[weight].values())])
    assert alike(found[0], found[1]) and alike(found[0], found[2])


@pytest.mark.parametrize("way", WAYS)
def test_the_cpu_waits_for_nobody(way):
    model, main_grads, optimizer = made("8bit", way)
    trained(model, main_grads, optimizer, range(2))
    main_grads.zero_()
    value = loss(model, 2)
    with nobody_waits():
        value.backward()
        main_grads.finish()
        optimizer.step()
    torch.cuda.synchronize()


def test_gradients_take_the_memory_of_a_few_parameters():
    peaks = {}
    for way in ("after", "in backward"):
        model, main_grads, optimizer = made("8bit", way)
        trained(model, main_grads, optimizer, range(1))
        main_grads.zero_()
        value = loss(model, 2)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value.backward()
        main_grads.finish()
        optimizer.step()
        peaks[way] = torch.cuda.max_memory_allocated() - before
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert peaks["after"] > 0.95 * whole and peaks["in backward"] < 0.75 * whole
