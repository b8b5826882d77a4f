"""Programs that run at the same time exchange numbers through memory, without a barrier and without resets between rounds.

A number travels in one 64-bit word with its round. A reader that finds the round has the number that belongs to it; until then it
reads again. So neither side waits for its other writes to become visible, as it would with a counter. Words start as zeros (round
0), rounds count from 1, and the launch's last program sets the words back to zeros.
"""

from __future__ import annotations

from onepass.kernels.language import PTX, device_function, tl


@device_function
def yield_to_programs():
    """Let other programs run while this one waits. It does nothing on a GPU; the interpreter replaces it."""
    return 0


@device_function
def publish(word_ptr, value, round):
    """Store an fp32 number and its round in one word, which arrives whole."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(word_ptr, ((tl.zeros_like(bits) + round) << 32) | bits)


@device_function
def await_all(word_ptrs, round):
    """Read the numbers of these words (a block of pointers), each as soon as it is there.

    Each thread polls by itself. Before words are used for a later round, something must synchronise a program's threads, such as
    a sum over the numbers.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred early; .reg .b64 word; .reg .b32 number, found;
            again: ld.volatile.global.b64 word, [$1];
            mov.b64 {number, found}, word;
            setp.lt.s32 early, found, $2;
            @early bra again;
            mov.b32 $0, number;
            }""",
            "=f,l,r", [word_ptrs, round], dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = tl.load(word_ptrs)
        while tl.min((words >> 32).to(tl.int32), 0) < round:
            yield_to_programs()
            words = tl.load(word_ptrs)
        return words.to(tl.int32).to(tl.float32, bitcast=True)


@device_function
def clear(word_ptr, count):
    """Set `count` words to zeros, for the next launch."""
    for first in range(0, count, 1024):
        at = first + tl.arange(0, 1024)
        tl.store(word_ptr + at, tl.zeros([1024], tl.int64), mask=at < count)
