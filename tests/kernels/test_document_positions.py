"""Positions within documents: the kernel and the formula agree, for right and for wrong boundaries, and mutants are found."""

from contextlib import suppress

import pytest
import torch

from onepass.kernels import document_positions
from onepass.runtime.documents import positions_within
from onepass.testing.interpreter_bounds import OutOfBoundsError
from onepass.testing.mutants import mutate

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RIGHT = {
    "one": (0, 5), "one token": (0, 1), "two": (0, 3, 7), "empty ones": (0, 0, 4, 4, 4, 9, 9), "no tokens": (0, 0),
    "long": (0, 1, 1500, 2500), "many": (*range(0, 3000, 2), 3000), "as long as a program": (0, 1024, 2048),
    "even number": (0, 2, 5, 6), "as many as a program looks at": (*range(1025),),
}  # fmt: skip
WRONG = {
    "begins late": (1, 5), "begins before": (-1, 5), "falls": (0, 4, 3, 7), "falls at the end": (0, 9, 7),
    "ends early": (0, 3, 6),
    "ends late": (0, 3, 8), "falls late": (*range(2000), 1990, 2400), "all late": (90, 90, 7),
}  # fmt: skip
LENGTHS = {"ends early": 7, "ends late": 7}


def is_right(module, case):
    boundaries = torch.tensor((RIGHT | WRONG)[case], dtype=torch.int32, device=DEVICE)
    T = LENGTHS.get(case, int(boundaries[-1]))
    found = module.document_positions(boundaries, T)
    if case in WRONG:
        return found.shape == (T,) and bool((found == -1).all())
    expected = [token - first for first, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True)
                for token in range(first, end)]  # fmt: skip
    return found.dtype is torch.int32 and found.tolist() == expected == positions_within(boundaries, T).tolist()


@pytest.mark.parametrize("case", (*RIGHT, *WRONG))
def test_positions(case):
    assert is_right(document_positions, case)


APART = [0, 1, 2, 0, 1, 2, 3]


def apart(module):
    """Return positions of boundaries that don't lie beside each other."""
    boundaries = torch.tensor((0, 9, 3, 9, 7, 9), dtype=torch.int32, device=DEVICE)[::2]
    return module.document_positions(boundaries, 7).tolist()


def test_boundaries_may_lie_apart():
    assert apart(document_positions) == APART


MUTANTS = {
    "a first boundary that isn't 0 is right": ("(tl.load(cu_seqlens_ptr) != 0) | ", ""),
    "any last boundary is right": (" | (tl.load(cu_seqlens_ptr + ROWS - 1) != M)", ""),
    "boundaries may fall": ("(end < first)", "(end < 0)"),
    "boundaries may fall late": ("range(0, ROWS - 1, BLOCK)", "range(0, 1, BLOCK)"),
    "the last boundary is not looked at": ("at < ROWS - 1, other=0)\n        end", "at < ROWS - 2, other=0)\n        end"),
    "equal boundaries are wrong": ("(end < first)", "(end <= first)"),
    "a document begins after its first token": ("<= tokens", "< tokens"),
    "a halving too few": ("count.bit_length()", "count.bit_length() - 2"),
    "the document before": ("cu_seqlens_ptr + low))", "cu_seqlens_ptr + tl.maximum(low - 1, 0)))"),
    "the first program's tokens": ("tl.program_id(0) * BLOCK + ", ""),
    "distances between boundaries": ("cu_seqlens.contiguous()", "cu_seqlens"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    source, changed = MUTANTS[name]
    function = "_positions" if "cu_seqlens." in source or "count" in source else "_positions_kernel"
    mutant = mutate(document_positions, function, source, changed)
    with suppress(OutOfBoundsError):
        assert not all(is_right(mutant, case) for case in (*RIGHT, *WRONG)) or apart(mutant) != APART
