"""Buffers without memory between steps, by whatever is added to them in whatever order: beside one that always has some."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.poisoned import poisoned

from onepass.gradients import packed_params as joined
from onepass.gradients.main_grad import add_gradient
from onepass.gradients.releasable_storage import ReleasableBuffer, buffer_of, ensure_written, is_first_write, mark_written
from onepass.ops.embedding.gradient import add_rows

ROWS, COLUMNS, GAP = (4, 3, 6, 1), 8, 5  # of the parameters, and what lies between some of them


def laid():
    """Four main_grads in a buffer: a gap, two that lie together, a gap, one, one that is small."""
    starts = [GAP, GAP + 32, 2 * GAP + 56, 2 * GAP + 104]
    flat = torch.zeros(2 * GAP + 115)
    main_grads = [flat[at : at + rows * COLUMNS].view(rows, COLUMNS) for at, rows in zip(starts, ROWS, strict=True)]
    return flat, main_grads


def released():
    flat, main_grads = laid()
    both = main_grads[:2]
    return ReleasableBuffer(flat, main_grads, [(both, joined.concat_no_grad(both))]), flat, main_grads


def of_parameter(index):
    return lambda main_grads: main_grads[index]


def as_one(main_grads):
    found = buffer_of(main_grads[0])
    return main_grads[0].as_strided((7, COLUMNS), (COLUMNS, 1)) if found is None else found.alias_of(main_grads[:2])


# what an op adds to, and how: the product, a row looked up, a kernel that adds by itself, to all of it or to a part
PLACES = [*(of_parameter(index) for index in range(4)), as_one]


def product(place, seed):
    generator = torch.Generator().manual_seed(seed)
    dy, x = (torch.randn(3, size, generator=generator) for size in place.shape)
    add_gradient(place, dy, x)


def vector(place, seed):
    add_gradient(place, torch.randn(place.shape, generator=torch.Generator().manual_seed(seed)), None)


def rows(place, seed):
    generator = torch.Generator().manual_seed(seed)
    add_rows(place, torch.randn(2, COLUMNS, generator=generator), torch.randint(place.shape[0], (2,), generator=generator))


def kernel(place, seed):
    ensure_written(place).add_(torch.randn(place.shape, generator=torch.Generator().manual_seed(seed)))


def columns(place, seed):
    ensure_written(place)[:, 1:3].add_(float(seed))


def some_rows(place, seed):
    add_gradient(ensure_written(place)[1:], torch.full((place.shape[0] - 1, COLUMNS), float(seed)), None)


def look(place, seed):
    ensure_written(place)


WAYS = [product, vector, rows, kernel, columns, some_rows, look]
STEP = st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(WAYS)), max_size=6)


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(STEP, min_size=1, max_size=4))
def test_as_a_buffer_that_is_always_there(steps):
    with poisoned():
        buffer, flat, main_grads = released()
        other, theirs = laid()
        for step in steps:
            for seed, (place, way) in enumerate(step):
                way(place(main_grads), seed)
                way(place(theirs), seed)
            ensure_written(flat)
            assert torch.equal(flat, other)
            buffer.release()
            other.zero_()
            assert not flat.untyped_storage().nbytes()
        buffer.detach_views()


def test_what_comes_first_is_written_over_and_only_once():
    with poisoned():
        buffer, flat, main_grads = released()
        assert not is_first_write(main_grads[0])  # zeros, which it began with
        buffer.release()
        assert is_first_write(main_grads[0]) and main_grads[0].isnan().all()
        mark_written(main_grads[0])
        assert not is_first_write(main_grads[0]) and main_grads[0].isnan().all()
        assert not is_first_write(main_grads[3]) and not main_grads[3].any()  # a small one has zeros
        assert not is_first_write(as_one(main_grads)) and not main_grads[1].any()  # a part of which is there
        assert is_first_write(main_grads[2].view(-1))
        mark_written(main_grads[2])
        assert not torch.cat([flat[:GAP], flat[61 : 61 + GAP], flat[-3:]]).any()  # what lies between
        buffer.release()
        assert is_first_write(as_one(main_grads))
        mark_written(as_one(main_grads))
        assert not is_first_write(main_grads[1])
        part, turned, shifted = main_grads[2][1:], main_grads[0].t(), flat[GAP - 1 : GAP + 31]
        buffer.release()
        assert not is_first_write(part) and not main_grads[2].any()
        assert not is_first_write(turned)  # not in its order: zeros, to be added to
        assert not main_grads[0].any()
        buffer.release()
        assert not is_first_write(shifted) and not main_grads[0].any()  # as large as the first, but not in its place
        buffer.detach_views()


def test_only_those_in_their_order_are_known_as_one():
    buffer, _, (first, second, third, _) = released()
    assert buffer.alias_of([first, second]).shape == (7, COLUMNS)
    assert buffer.alias_of([second, first]) is buffer.alias_of([first]) is buffer.alias_of([first, second, third]) is None
    buffer.detach_views()


def test_what_numpy_has_seen_keeps_its_memory():
    with poisoned():
        buffer, flat, main_grads = released()
        flat.fill_(7).numpy()
        for _ in range(2):
            buffer.release()
            assert is_first_write(main_grads[0])
            assert not ensure_written(main_grads[1]).any() and not flat[:GAP].any()
        buffer.detach_views()


def test_others_are_left_alone():
    main_grad = torch.ones(3, 4)
    assert ensure_written(main_grad) is main_grad and not is_first_write(main_grad) and buffer_of(main_grad) is None
    buffer, flat, _ = released()
    assert buffer_of(flat) is buffer and not is_first_write(main_grad) and buffer_of(main_grad) is None
    buffer.detach_views()
    assert buffer_of(flat) is None


@pytest.mark.parametrize("type_of_it", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_the_first_product_in_every_type(type_of_it, operand, tokens):
    flat, plain = torch.zeros(64, dtype=type_of_it), torch.zeros(8, 8, dtype=type_of_it)
    dy, x = torch.randn(tokens, 8).to(operand), torch.randn(tokens, 8).to(operand)
    with poisoned():
        main_grad = flat.view(8, 8)
        buffer = ReleasableBuffer(flat, [main_grad], [])
        buffer.release()
        with patch.object(ReleasableBuffer, "ensure_written", side_effect=AssertionError("zeros were written")):
            for _ in range(2):
                add_gradient(main_grad, dy, x)
                add_gradient(plain, dy, x)
                assert torch.equal(main_grad, plain)
        buffer.detach_views()
