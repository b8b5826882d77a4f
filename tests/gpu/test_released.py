"""What only a GPU shows of `MainGrads(release=True)`: memory, streams, captures, tables of addresses."""

import pytest
import torch
from gpu.calls import memory_goes_back, other_stream  # noqa: F401
from parallel.poisoned import have_memory, poisoned
from torch import nn

import onepass
from onepass.gpt import Model, preset
from onepass.parallel import AdamW, MainGrads

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
SIZE, MIB = 1024, 1 << 20
GPT = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 128}


def layers(number=6, release=True):
    """Each gradient 4 MiB, in a buffer of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(onepass.nn.Linear(SIZE, SIZE, bias=False) for _ in range(number))).to("cuda", torch.bfloat16)
    with poisoned(large=1, buffer=1):
        main_grads = MainGrads(model, release=release, bucket_bytes=1)
    return model, main_grads, AdamW(main_grads, lr=1e-2)


def batch(step):
    return torch.randn(64, SIZE, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(step))


def test_memory_is_somebody_elses_between_steps():
    model, main_grads, optimizer = layers()
    before = torch.cuda.memory_allocated()
    main_grads.fill_()
    assert torch.cuda.memory_allocated() - before == 6 * 4 * MIB
    main_grads.zero_()
    assert torch.cuda.memory_allocated() == before
    for step in range(2):
        model(batch(step)).sum().backward()
        main_grads.finish()
        assert have_memory(main_grads) == [True] * 6
        optimizer.step(1.0, zero=True)
        assert have_memory(main_grads) == [False] * 6


def gpt_steps(release, side=None):
    """Norms and weights of some steps; each time somebody else has what was the gradients', and more of it."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = Model(preset("tiny", params_dtype="bf16", **GPT), device=torch.device("cuda"))
    norms, junk = [], []
    with poisoned(large=1 << 16, buffer=1 << 20):
        main_grads = MainGrads(model, release=release, bucket_bytes=1 << 19)
        optimizer = AdamW(main_grads, lr=1e-3)
        for step in range(5):
            tokens = torch.randint(1000, (3, 8, 129), generator=torch.Generator().manual_seed(step)).cuda()
            main_grads.zero_()
            junk.append(torch.full((step * 300_000,), float("nan"), device="cuda"))
            for part in tokens[:-1]:
                with main_grads.accumulate():
                    model(part[:, :-1], part[:, 1:]).backward()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):  # None: the same
                model(tokens[-1][:, :-1], tokens[-1][:, 1:]).backward()
            main_grads.finish()
            norms.append(optimizer.step(1.0, zero=True))
    return [norm.item() for norm in norms], [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stream", [False, True], ids=["one stream", "two streams"])
def test_a_gpts_steps_are_the_same_bits(stream):
    side = torch.cuda.Stream() if stream else None
    kept, released = gpt_steps(False), gpt_steps(True, side)
    assert kept[0] == released[0]
    assert all(torch.equal(one, two) for one, two in zip(kept[1], released[1], strict=True))


def test_what_is_given_back_on_another_stream_is_free_when_that_is_done():
    """The optimizer steps on a stream that is late; activations then take the memory on the one where it comes."""
    found = []
    for release in (False, True):
        model, main_grads, optimizer = layers(release=release)
        side = torch.cuda.Stream()
        for step in range(3):
            main_grads.zero_()
            model(batch(step)).float().square().mean().backward()
            main_grads.finish()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)
                optimizer.step(1.0, zero=True)
            taken = [torch.full((SIZE, SIZE), float("nan"), device="cuda") for _ in range(6)]
            torch.cuda.current_stream().wait_stream(side)
            del taken
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def captured_backward(model, main_grads, optimizer, x):
    with main_grads.accumulate():
        model(x).sum().backward()


def captured_step(model, main_grads, optimizer, x):
    optimizer.step(1.0, zero=True)


@pytest.mark.parametrize("what", [captured_backward, captured_step])
def test_captures_are_refused(what):
    model, main_grads, optimizer = layers(2)
    x = batch(0)
    for _ in range(2):  # the first: kernels and memory that a capture must not be the first to meet
        model(x).sum().backward()
        main_grads.finish()
        optimizer.step(1.0)
        main_grads.zero_()
    if what is captured_step:
        model(x).sum().backward()
        main_grads.finish()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="release=True gives its buffers' memory back"), torch.cuda.graph(graph):
        what(model, main_grads, optimizer, x)
