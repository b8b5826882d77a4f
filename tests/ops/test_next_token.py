"""Attention of a sequence's last token to its cache: the row that attention of the whole sequence has, bit for bit."""

import pytest
import torch
from ops.calls import backends, needs_triton
from ops.oracle import BF16, DEVICE, FP32

import onepass
from onepass.ops.attention import formula, forward, next_token, scores
from onepass.ops.attention.formula import AttentionOptions, parts_of
from onepass.testing.mutants import copy_package, mutate

LENGTHS = (1, 7, 64, 65, 130)
HEADS, GROUPS, D = 4, 2, 16
LONGEST = 150
OPTIONS = AttentionOptions(HEADS, GROUPS, False, D**-0.5)


def sequences(dtype):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(1, length, (HEADS + 2 * GROUPS) * D, generator=generator).to(DEVICE, dtype) for length in LENGTHS]


def attended(module, rows, options):
    """Return y [sequences, heads, D] of the last tokens, by a cache that holds garbage elsewhere."""
    keys, values = torch.full((2, len(rows), LONGEST, GROUPS, D), 1e4, device=DEVICE, dtype=rows[0].dtype)
    queries = []
    for at, row in enumerate(rows):
        q, k, v = (x[0] for x in parts_of(row, HEADS, GROUPS))
        keys[at, : len(k)], values[at, : len(v)] = k, v
        queries.append(q[-1])
    lengths = [row.shape[1] for row in rows]
    ends = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tiles = module.last_tiles(rows[0][:, :1], ends, LONGEST, options)
    return module.attend_last(torch.stack(queries), keys, values, lengths, tiles, options)


def check(module, dtype, backend, **options):
    rows, chosen = sequences(dtype), OPTIONS._replace(left=options["window"] - 1 if "window" in options else -1)
    with onepass.batch_invariant(), onepass.use_backend(backend):
        whole = torch.stack([onepass.attention(row, HEADS, GROUPS, **options)[0, -1].view(HEADS, D) for row in rows])
    switch = module.choose.__globals__["use_backend"]  # a mutant's is its own
    with switch(backend):
        together = attended(module, rows, chosen)
        alone = torch.cat([attended(module, [row], chosen) for row in rows])
    assert torch.equal(together, alone), "a sequence's result differs with the others"
    assert torch.equal(together, whole), "a result differs from the whole sequence's"


@backends
@pytest.mark.parametrize("options", ({}, {"window": 40}), ids=str)
def test_the_last_row_has_its_bits(backend, options):
    check(next_token, BF16, backend, **options)


def test_wide_types_take_tiles():
    check(next_token, FP32, "auto")


def test_tiles_of_queries_are_those_of_the_kernels():
    if DEVICE == "cpu":
        with onepass.use_backend("torch"):
            assert next_token.last_tiles(sequences(BF16)[0], torch.ones(1, dtype=torch.int32), LONGEST, OPTIONS) is None


MUTANTS = {
    "other blocks of keys": (next_token, "attend_last", "(q.device)), True", "(q.device))._replace(block_n=32), True"),
    "one key too many": (next_token, "last_tiles", "begins + ends,", "begins + ends + 1,"),
    "another tile": (next_token, "last_tiles", "(ends - 1).div", "ends.div"),
    "the sequences' caches side by side": (next_token, "last_tiles", "len(ends) * longest, longest", "len(ends), 1"),
    "every query's row is kept": (forward, "_attend_kernel", "queries == end - 1", "queries == first"),
    "the first sequence's query": (forward, "_attend_kernel", "tl.program_id(1).to(tl.int64) if LAST", "sequence if LAST"),
    "a query that doesn't see itself": (scores, "sees", "queries >= keys", "queries > keys"),
}
MUTANTS_OF_TILES = {
    "another place": (next_token, "_by_tiles", "divmod(len(keys) - 1, TILE)", "(len(keys) - 1) // TILE, 0"),
    "another tile": (next_token, "_by_tiles", "attend_tile(queries, at,", "attend_tile(queries, max(at - 1, 0),"),
    "tiles of another size": (formula, "", "TILE = 64", "TILE = 32"),
}


@needs_triton
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_kernel_are_caught(name):
    caught(MUTANTS[name], "triton")


@pytest.mark.parametrize("name", MUTANTS_OF_TILES)
def test_mutants_of_the_tiles_are_caught(name):
    caught(MUTANTS_OF_TILES[name], "torch")


def caught(change, backend):
    try:
        check(mutate(*change, entry=next_token), BF16 if backend == "triton" else FP32, backend)
    except (AssertionError, RuntimeError, IndexError, ValueError):
        return
    pytest.fail("nothing catches it")


@backends
def test_a_copy_without_a_change_passes(backend):
    check(copy_package(next_token), BF16 if backend == "triton" else FP32, backend)
