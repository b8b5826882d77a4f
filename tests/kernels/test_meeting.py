"""meeting: numbers that programs which run at the same time pass each other, and the interpreter's turns that let them."""

import time

import pytest
import torch

from onepass.kernels.column_reduce import helper_count, join_helpers, leave_helpers, share_strips
from onepass.kernels.grid_sync import await_all, clear, publish
from onepass.kernels.language import jit
from onepass.testing.poison import poisoned, unchanged

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU would wait for ever")
options = {"launch_cooperative_grid": True} if DEVICE == "cuda" else {}
NUMBERS = [0.0, -0.0, 1.0, -1.5, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-40, 3.4e38, -2.0, 7.25]


def words(count):
    return torch.zeros(count, dtype=torch.int64, device=DEVICE)


@jit
def _pass_kernel(in_ptr, out_ptr, word_ptr, ROUNDS: tl.constexpr, N: tl.constexpr):
    """Each program publishes a number a round, and takes everybody's."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, N)
    for turn in range(ROUNDS):
        slot = word_ptr + turn % 2 * N
        publish(slot + program, tl.load(in_ptr + turn * programs + program), turn + 1)
        numbers = await_all(slot + tl.minimum(i, programs - 1), turn + 1)
        at = out_ptr + (turn * programs + program) * programs
        tl.store(at + i, numbers, mask=i < programs)
        tl.debug_barrier()  # all threads have theirs before one of them publishes into a slot that others still wait at


@jit
def _wait_kernel(out_ptr, word_ptr, N: tl.constexpr):
    """The first program publishes nothing, and all wait for it."""
    program = tl.program_id(0)
    if program > 0:
        publish(word_ptr + program, program.to(tl.float32), 1)
    i = tl.arange(0, N)
    tl.store(out_ptr + i, await_all(word_ptr + tl.minimum(i, tl.num_programs(0) - 1), 1))


@jit
def _chain_kernel(in_ptr, out_ptr, word_ptr):
    """Each program waits for the one after it, so the last has to come first."""
    program, last = tl.program_id(0), tl.num_programs(0) - 1
    number = tl.load(in_ptr)
    if program < last:
        number = tl.sum(await_all(word_ptr + program + 1 + tl.zeros([1], tl.int32), 1), 0) + 1.0
    publish(word_ptr + program, number, 1)
    tl.store(out_ptr + program, number)


@jit
def _fail_kernel(x_ptr, y_ptr, word_ptr):
    """The last program fails while the others wait for it."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.static_assert(False, "on purpose")
    await_all(word_ptr + tl.arange(0, 1), 1)


@jit
def _clear_kernel(word_ptr, count):
    clear(word_ptr, count)


@jit
def _sums_kernel(partial_ptr, out_ptr, arrived_ptr, last_ptr, H: tl.constexpr, BLOCK_H: tl.constexpr, ALL: tl.constexpr):
    """Each program stores a row of partials, and the last ones sum them."""
    program = tl.program_id(0)
    i = tl.arange(0, BLOCK_H)
    tl.store(partial_ptr + program * H + i, (program + 1 + i).to(tl.float32), mask=i < H)
    helpers = tl.num_programs(0) if ALL else helper_count()
    helper = join_helpers(arrived_ptr, tl.num_programs(0), helpers)
    if helper >= 0:
        share_strips(partial_ptr, out_ptr, None, helper, helpers, tl.num_programs(0), H, False, 4, 16)
        if leave_helpers(arrived_ptr, helpers):
            tl.store(last_ptr + program, 1)


def bits(numbers):
    return numbers.view(torch.int32)


@pytest.mark.parametrize("programs", [1, 2, 3, 12])
def test_numbers_arrive_bit_for_bit(programs):
    rounds = 12 // programs
    numbers = torch.tensor(NUMBERS[: rounds * programs], device=DEVICE).view(rounds, programs)
    numbers.view(torch.int32)[-1, -1] = 0x7FC12345  # a NaN that carries something
    with poisoned():
        out, word = torch.empty(rounds, programs, programs, device=DEVICE), words(2 * 16)
        with unchanged(numbers=numbers):
            _pass_kernel[(programs,)](numbers, out, word, rounds, 16, **options)
    assert torch.equal(bits(out), bits(numbers)[:, None].expand(-1, programs, -1))


def test_rounds_that_use_a_slot_again():
    numbers = torch.randn(9, 5, device=DEVICE)
    out = torch.empty(9, 5, 5, device=DEVICE)
    _pass_kernel[(5,)](numbers, out, words(32), 9, 16, **options)
    assert torch.equal(out, numbers[:, None].expand(-1, 5, -1))


def test_programs_that_wait_for_later_ones_get_through():
    out = torch.empty(20, device=DEVICE)
    _chain_kernel[(20,)](torch.ones(1, device=DEVICE), out, words(20), **options)
    assert out.tolist() == [20.0 - i for i in range(20)]


@interpreted
def test_what_never_comes_raises_and_quickly():
    for _ in range(2):  # the first leaves nothing behind that would hinder another
        start = time.process_time()
        with pytest.raises(Exception, match="3 programs wait for each other"):
            _wait_kernel[(3,)](torch.empty(4), words(4), 4)
        assert time.process_time() - start < 20
    out = torch.empty(3)
    _chain_kernel[(3,)](torch.ones(1), out, words(3))
    assert out.tolist() == [3.0, 2.0, 1.0]


@interpreted
def test_a_failure_is_told_while_others_wait():
    with pytest.raises(Exception, match="on purpose"):
        _fail_kernel[(3,)](torch.empty(1), torch.empty(1), words(4))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_clear_leaves_zeros_and_the_neighbours(count):
    word = torch.full((count + 5,), -1, dtype=torch.int64, device=DEVICE)
    _clear_kernel[(1,)](word, count)
    assert not word[:count].any() and (word[count:] == -1).all()


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("H", [1, 50])
@pytest.mark.parametrize("everybody", [False, True])
def test_the_last_to_arrive_share_the_sums(programs, H, everybody):
    arrived, last = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (2, programs))
    for _ in range(2):
        with poisoned():
            partial, out = torch.empty(programs, H, device=DEVICE), torch.empty(H, device=DEVICE)
            _sums_kernel[(programs,)](partial, out, arrived, last, H, 64, everybody, **options)
        assert torch.equal(out, partial.sum(0)) and not arrived.any()
    assert 1 <= last.sum() <= 2  # one a launch
