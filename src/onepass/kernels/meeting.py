"""Programs that run at the same time pass each other numbers through memory, with no barrier and nothing to set back between.

A number travels in one 64-bit word with the number of its round: who reads the round reads the number that belongs to it, and
who does not find it yet looks again. So neither side waits for its other writes to be visible, which a counter would ask of it.
Words start as zeros (round 0), rounds count from 1, and the launch's last program sets the words back to zeros.
"""

from __future__ import annotations

from onepass.runtime.lang import PTX, device_function, tl


@device_function
def others_go_on():
    """What a program does that waits: nothing, on a GPU. The interpreter runs other programs meanwhile."""
    return 0


@device_function
def publish(word_ptr, value, round):
    """An fp32 number and its round, in one word that arrives whole."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(word_ptr, ((tl.zeros_like(bits) + round) << 32) | bits)


@device_function
def await_all(word_ptrs, round):
    """The numbers of these words (a block of pointers), each as soon as it is there.

    Each thread looks by itself: before words are used for a later round, something must join a program's threads, as a sum of
    what they found does.
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
            others_go_on()
            words = tl.load(word_ptrs)
        return words.to(tl.int32).to(tl.float32, bitcast=True)


@device_function
def clear(word_ptr, count):
    """Zeros in `count` words, for the next launch."""
    for first in range(0, count, 1024):
        at = first + tl.arange(0, 1024)
        tl.store(word_ptr + at, tl.zeros([1024], tl.int64), mask=at < count)
