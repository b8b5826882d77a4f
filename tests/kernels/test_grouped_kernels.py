"""Grouped products of rows by Triton: beside fp64, at the edges of groups and tiles, and mutants of both kernels."""

from types import SimpleNamespace

import pytest
import torch

from onepass.kernels import grouped_kernels, grouped_product
from onepass.kernels.layout import lies_evenly
from onepass.product import grouped
from onepass.testing.interpreter_bounds import OutOfBoundsError
from onepass.testing.mutants import copy_package, mutate

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = 16  # rows of a tile
CASES = {  # rows of groups, N, K, rows after the last group's
    "several": ((5, 0, 150, 16), 48, 136, 0), "one": ((19,), 32, 16, 0), "empty at the ends": ((0, 17, 0), 8, 24, 0),
    "none": ((0, 0), 16, 16, 3), "rows of no group": ((7, 20), 40, 8, 5),
}  # fmt: skip


def drawn(case):
    sizes, N, K, more = CASES[case]
    generator = torch.Generator().manual_seed(N + K)
    rows = sum(sizes) + more
    dy, x = (torch.randn(rows, width, generator=generator).bfloat16() for width in (N, K))
    weight = torch.randn(len(sizes), N, K, generator=generator).bfloat16()
    dy[sum(sizes) :] = x[sum(sizes) :] = torch.nan
    return *(t.to(DEVICE) for t in (dy, x, weight)), torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def near(found, exact, apart=2**-8):
    """Whether bf16 numbers are those of fp64, rounded once."""
    return bool(((found.double() - exact).abs() <= apart * exact.abs() + 1e-4).all())


def rows_are_right(module, case, transposed):
    _, x, weight, ends = drawn(case)
    given = weight.mT.contiguous().mT if transposed else weight
    found, bounds = module.multiply_rows(x, given, ends), [0, *ends.tolist()]
    exact = [x[s:e].double() @ w.double().T for s, e, w in zip(bounds, bounds[1:], weight, strict=False)]
    return near(found[: bounds[-1]], torch.cat(exact))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(grouped_kernels, "_BLOCK", SMALL)
    grouped_kernels._plan.cache_clear()
    yield
    grouped_kernels._plan.cache_clear()


@pytest.mark.parametrize("processors", (1, 3))
@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("case", CASES)
def test_rows(case, transposed, processors, monkeypatch):
    monkeypatch.setattr(grouped_kernels, "processors", lambda device: processors)
    assert rows_are_right(grouped_kernels, case, transposed)


@pytest.mark.parametrize("transposed", (False, True))
def test_layers_of_experts_run_by_them(transposed, monkeypatch):
    calls = []

    def takes(a, b, rows):
        calls.append(rows)
        return True

    dy, x, weight, ends = drawn("several")
    weight = (weight.mT.contiguous() if transposed else weight).requires_grad_()
    x.requires_grad_()
    options = grouped.GroupedOptions(transposed=transposed)
    found = []
    for by_kernels in (True, False):
        if by_kernels:
            for module in (grouped, grouped_product):
                monkeypatch.setattr(module, "torch_can_group", lambda *_: True)
            monkeypatch.setattr(grouped_product, "triton_multiplies", takes)
        else:
            monkeypatch.undo()
        y = grouped.multiply_grouped_rows(x, weight, ends, torch.bfloat16, options)
        found.append([y.detach(), *torch.autograd.grad(y, (x, weight), dy)])
    assert calls == [171, 171]  # forward and backward
    for ours, loops in zip(*found, strict=True):
        assert near(ours, loops.double(), 2**-7)


def test_pytorchs_product_gets_what_it_can_read(monkeypatch):
    """It raises, or ends the use of the GPU, for what does not begin, or whose rows do not follow, at multiples of 16 bytes."""
    given = []

    def grouped_mm(a, b, *, offs):
        given.extend((a, b))
        return a.new_zeros(a.shape[0], b.shape[-1])

    def one_later(x):
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    monkeypatch.setattr(grouped_product.F, "grouped_mm", grouped_mm)
    a, b, ends = torch.randn(24, 8).bfloat16(), torch.randn(4, 16, 8).bfloat16(), torch.tensor((3, 3, 20, 24), dtype=torch.int32)
    apart = torch.randn(4, 16, 11).bfloat16()[..., 1:9]
    calls = (a, b), (a.mT.contiguous().mT, apart), (one_later(a), one_later(b)), (a[:1].expand(24, 8), b)
    for rows, weight in calls:
        del given[:]
        grouped_product._rows_by_torch(rows, weight, ends)
        grouped_product.grouped_gradient(rows, rows, ends)
        first, second, transposed, others = given
        assert first.equal(rows) and second.equal(weight.mT) and transposed.equal(rows.mT) and others.equal(rows)
        assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (first, transposed.mT, others))
        assert lies_evenly(second)
    assert grouped_product._readable_rows(a) is a and grouped_product._readable_rows(a.mT) is not a.mT
    assert lies_evenly(b) and lies_evenly(b.mT) and not lies_evenly(apart) and not lies_evenly(one_later(b))


def test_pytorchs_product_gets_no_more_groups_than_it_takes(monkeypatch):
    monkeypatch.setattr(grouped_product, "compute_capability", lambda device: (9, 0))
    x = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=None)
    assert grouped_product.torch_can_group(x, torch.empty(1023, 16, 16, device="meta"))
    assert not grouped_product.torch_can_group(x, torch.empty(1024, 16, 16, device="meta"))


def test_who_takes_rows(monkeypatch):
    def takes(rows=1024, groups=8, dtype=torch.bfloat16, x=None, weight=None):
        x = torch.zeros(4, 16, dtype=dtype) if x is None else x
        weight = torch.zeros(groups, 8, 16, dtype=dtype) if weight is None else weight
        return grouped_kernels.triton_multiplies(x.to(DEVICE), weight.to(DEVICE), rows)

    monkeypatch.setattr(grouped_kernels, "compute_capability", lambda device: (9, 0))
    assert takes() and takes(weight=torch.zeros(8, 16, 8, dtype=torch.bfloat16).mT)
    assert not takes(rows=1023) and not takes(dtype=torch.float16) and not takes(1 << 20, 1025)
    assert not takes(weight=torch.zeros(8, 16392, 16, dtype=torch.bfloat16))
    assert not takes(weight=torch.zeros(8, 16, 16, dtype=torch.bfloat16)[:, ::2])
    assert not takes(x=torch.zeros(4, 32, dtype=torch.bfloat16)[:, ::2])
    assert not takes(x=torch.zeros(65, dtype=torch.bfloat16)[1:].view(4, 16))
    monkeypatch.setattr(grouped_kernels, "compute_capability", lambda device: (10, 0))
    assert not takes()


MUTANTS = {
    "a list without the groups before": ("_list_kernel", "groups < own", "groups < 0"),
    "too few tiles": ("_list_kernel", "tiles = (end - start + BLOCK_M - 1)", "tiles = (end - start)"),
    "rows from 0": ("_list_kernel", "start + tile * BLOCK_M", "tile * BLOCK_M"),
    "the next group's rows are stored": ("_list_kernel", "at + 2, end", "at + 2, end + 1"),
    "another group's matrix": ("_grouped_rows_kernel", "b.load([group, column, k])", "b.load([0, column, k])"),
    "another group's transposed matrix": ("_grouped_rows_kernel", "b.load([group, k, column])", "b.load([0, k, column])"),
    "one column of tiles": ("_grouped_rows_kernel", "tile % ACROSS * BLOCK_N", "0"),
    "half of a tile": ("_store", "at + BLOCK_M,", "at,"),
}  # fmt: skip


def all_is_right(module, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", SMALL)
    monkeypatch.setattr(module, "processors", lambda device: 3)
    return all(rows_are_right(module, case, transposed) for case in CASES for transposed in (False, True))


@pytest.mark.skipif(DEVICE == "cuda", reason="tiles that nobody listed would end a GPU's process")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    try:
        right = all_is_right(mutate(grouped_kernels, *MUTANTS[name]), monkeypatch)
    except OutOfBoundsError:
        return
    assert not right


def test_a_copy_without_a_change_passes(monkeypatch):
    assert all_is_right(copy_package(grouped_kernels), monkeypatch)
