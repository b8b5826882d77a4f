"""What only a GPU shows of `MainGrads(release=True)`: memory, streams, captures, tables of addresses."""

from contextlib import nullcontext

import pytest
import torch
from gpu.calls import deterministic_algorithms, memory_goes_back, other_stream  # noqa: F401
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


def asked_for():
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_memory_is_somebody_elses_between_steps():
    model, main_grads, optimizer = layers()
    before = asked_for()
    main_grads.fill_()
    assert asked_for() - before == 6 * 4 * MIB
    main_grads.zero_()
    assert asked_for() == before
    for step in range(2):
        main_grads.zero_()
        model(batch(step)).sum().backward()
        main_grads.finish()
        assert have_memory(main_grads) == [True] * 6
        optimizer.step(1.0, zero=True)
        assert have_memory(main_grads) == [False] * 6


def gpt_steps(release, side=None, junk=0):
    """Gradients' norms and weights of some steps; each time somebody else has what was the gradients', and more of it."""
    torch.manual_seed(0)
    model = Model(preset("tiny", params_dtype="bf16", **GPT), device=torch.device("cuda"))
    norms, others = [], []
    with poisoned(large=1 << 16, buffer=1 << 20), deterministic_algorithms():
        main_grads = MainGrads(model, release=release, bucket_bytes=1 << 19)
        optimizer = AdamW(main_grads, lr=1e-3)
        for step in range(5):
            tokens = torch.randint(1000, (3, 8, 129), generator=torch.Generator().manual_seed(step)).cuda()
            main_grads.zero_()
            others.append(torch.full((step * junk,), float("nan"), device="cuda"))
            for at, part in enumerate(tokens):
                if at == 0 and side is not None:  # memory comes there, and late
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side), main_grads.accumulate():
                        torch.cuda._sleep(50_000_000)
                        model(part[:, :-1], part[:, 1:]).backward()
                    continue
                with nullcontext() if at == 2 else main_grads.accumulate():
                    model(part[:, :-1], part[:, 1:]).backward()
            main_grads.finish()
            norms.append(optimizer.step(1.0, zero=True))
    return [norm.item() for norm in norms], [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stream", [False, True], ids=["one stream", "two streams"])
def test_a_gpts_steps_are_the_same(stream):
    """Bit by bit wherever memory comes; beside buffers that stay to rounding, as the norm is taken a buffer at a time."""
    kept, one = gpt_steps(False), gpt_steps(True, junk=300_000)
    two = gpt_steps(True, torch.cuda.Stream() if stream else None, junk=700_000)
    assert one[0] == two[0] and all(torch.equal(mine, other) for mine, other in zip(one[1], two[1], strict=True))
    assert one[0] == pytest.approx(kept[0], rel=1e-2) and one[0][0] == pytest.approx(kept[0][0], rel=1e-5)


def test_what_is_given_back_on_another_stream_is_free_when_that_is_done():
    """The optimizer steps on a stream that is late; activations then take the memory on the one where it comes."""
    found = []
    for release in (False, True):
        model, main_grads, optimizer = layers(release=release)
        side, norms = torch.cuda.Stream(), []
        for step in range(3):
            main_grads.zero_()
            model(batch(step)).float().square().mean().backward()
            main_grads.finish()
            norms.append(main_grads.norm())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)
                optimizer.step(zero=True)
            taken = [torch.full((SIZE, SIZE), float("nan"), device="cuda") for _ in range(6)]
            torch.cuda.current_stream().wait_stream(side)
            del taken
        found.append([norm.item() for norm in norms])
    assert found[0] == pytest.approx(found[1], rel=1e-3)  # NaN if activations had got there


def captured_backward(model, main_grads, optimizer, x):
    with main_grads.accumulate():
        model(x).sum().backward()


def captured_step(model, main_grads, optimizer, x):
    optimizer.step(1.0, zero=True)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # nothing is captured before it is refused
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
