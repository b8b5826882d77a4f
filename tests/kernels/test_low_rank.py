"""Low-rank products by document and with dropout: the kernels against the formula in fp64, and what they read and write."""

import pytest
import torch

from onepass.kernels import low_rank, scratch
from onepass.kernels.low_rank import NO_DROPOUT, RowDropout, lora_expand, lora_gradient, lora_shrink
from onepass.runtime import sizes
from onepass.testing.mutants import copy_package, mutate
from onepass.testing.poison import assert_written, poisoned

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
M, C = 150, 72
COLUMNS = 1060  # of rows that programs share
DROPPED = RowDropout(20000, (1 << 62) + 12345, 7)
ENDS = {
    "one adapter": None,
    "some empty, rows left": [0, 40, 40, 97, 130],
    "all empty": [0, 0, 0],
    "one document": [M],
    "many in a tile": list(range(3, M, 7)),
}


def drawn(*shape, dtype=FP32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ends_of(name, dtype=torch.int32):
    return None if ENDS[name] is None else torch.tensor(ENDS[name], dtype=dtype, device=DEVICE)


def close(mine, true, dtype):
    """One rounding in 16 bits; fp32 sums of few numbers."""
    assert mine.shape == true.shape
    error = (mine.double() - true).norm() / true.norm().clamp(min=1e-30)
    assert error < (2.5e-3 if dtype is BF16 and mine.dtype is BF16 else 1e-6), error


@pytest.mark.parametrize(("column", "R"), list(enumerate((1, 5, 16, 130))))
@pytest.mark.parametrize(("row", "name"), list(enumerate(ENDS)))
def test_products_are_those_of_the_formula(row, name, column, R):
    """All ends with all ranks; each of these, and each type, with dropout and without."""
    dtype, dropout = (FP32, BF16)[(row + column) % 2], (NO_DROPOUT, DROPPED)[(row + column // 2) % 2]
    ends = ends_of(name)
    lead = () if ends is None else (len(ends),)
    x, t, bias, full = (drawn(*size, dtype=dtype, seed=i) for i, size in enumerate(((M, C), (M, R), (C,), (M, C))))
    by_rank, by_width = drawn(*lead, R, C, dtype=dtype, seed=5).mT, drawn(*lead, C, R, dtype=dtype, seed=6)
    scales = None if ends is None else drawn(*lead, R, seed=7).abs()
    for w in (by_rank, by_width):
        with poisoned():
            low = lora_shrink(x, w, ends, scales, None, 0.7, dropout)
            wide = [lora_expand(t, w, start, ends, None, dropout) for start in (None, bias, full)]
        assert_written(low=low)
        close(low, low_rank._shrink_formula(x.double(), w.double(), ends, scales, None, 0.7, dropout), dtype)
        for y, start in zip(wide, (None, bias.double(), full.double()), strict=True):
            assert_written(y=y)
            close(y, low_rank._expand_formula(t.double(), w.double(), start, ends, None, dropout), dtype)
    for transposed in (False, True):
        with poisoned():
            dw = lora_gradient(t, x, ends, None, transposed, dropout)
        assert_written(dw=dw)
        assert dw.dtype is FP32 and dw.is_contiguous()
        close(dw, low_rank._gradient_formula(t.double(), x.double(), ends, None, transposed, dropout), dtype)


def test_ends_of_64_bits_and_strided_rows():
    x, w, t = drawn(M, 2 * C)[:, :C], drawn(5, C, 2, 4, seed=1)[:, :, 0], drawn(M, 4, seed=2)
    bias = drawn(C, 2, seed=3)[:, 1]
    for dtype in (torch.int32, torch.int64):
        ends = ends_of("some empty, rows left", dtype)
        for function, formula, given in (
            (lora_shrink, low_rank._shrink_formula, (x, w, ends, None, None, 1.0, NO_DROPOUT)),
            (lora_gradient, low_rank._gradient_formula, (t, x, ends, None, False, NO_DROPOUT)),
            (lora_expand, low_rank._expand_formula, (t, w, x, ends, None, NO_DROPOUT)),
            (lora_expand, low_rank._expand_formula, (t, w, bias, ends, None, NO_DROPOUT)),
        ):
            wide = [one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in given]
            close(function(*given), formula(*wide), FP32)


def test_a_seed_in_memory_drops_the_same():
    x, w, t = drawn(M, C), drawn(C, 4, seed=1), drawn(M, 4, seed=2)
    seed, place = torch.tensor([DROPPED.number], device=DEVICE), DROPPED._replace(number=None)
    assert torch.equal(lora_shrink(x, w, None, None, seed, 1.0, place), lora_shrink(x, w, None, None, None, 1.0, DROPPED))
    assert torch.equal(lora_expand(t, w, None, None, seed, place), lora_expand(t, w, None, None, None, DROPPED))
    assert torch.equal(lora_gradient(t, x, None, seed, False, place), lora_gradient(t, x, None, None, False, DROPPED))


def test_all_three_drop_the_same_numbers():
    """With a for 1 and t for 1, shrink's rows of the identity are the mask, and so are expand's and the gradient's."""
    n = 64
    eye, ones = torch.eye(n, device=DEVICE), torch.ones(n, n, device=DEVICE)
    mask = lora_shrink(ones, eye, None, None, None, 1.0, DROPPED)
    assert mask.unique().tolist() == pytest.approx([0.0, 65536 / (65536 - 20000)])
    torch.testing.assert_close(lora_expand(eye, ones, None, None, None, DROPPED), mask)
    torch.testing.assert_close(lora_gradient(eye, ones, None, None, False, DROPPED), mask)


@pytest.mark.parametrize("wrong", ([10, 5, 20], [10, 50, M + 1], [-1, 50, 100], [0, 2**31 - 1, 3]))
def test_wrong_ends_are_nan_everywhere(wrong):
    ends = torch.tensor(wrong, dtype=torch.int32, device=DEVICE)
    x, t, w = drawn(M, C), drawn(M, 3, seed=1), drawn(3, C, 3, seed=2)
    for found in (
        lora_shrink(x, w, ends, None, None, 1.0, NO_DROPOUT),
        lora_expand(t, w, None, ends, None, NO_DROPOUT),
        lora_gradient(t, x, ends, None, True, NO_DROPOUT),
    ):
        assert found.isnan().all()


def test_a_document_of_nan_does_not_reach_its_neighbours():
    """Nor do rows after the last end, whatever lies there: all lie in the same tiles."""
    ends = torch.tensor([20, 30, 45], dtype=torch.int32, device=DEVICE)
    x, t, w = drawn(60, C), drawn(60, 3, seed=1), drawn(3, C, 3, seed=2)
    clean = [lora_shrink(x, w, ends, None, None, 1.0, NO_DROPOUT), lora_gradient(t, x, ends, None, False, NO_DROPOUT)]
    clean += [lora_expand(t, w, None, ends, None, NO_DROPOUT)]
    for spoilt in (x, t):
        spoilt[20:30] = spoilt[45:] = torch.nan
    w[1] = torch.inf
    low, dw, y = (
        lora_shrink(x, w, ends, None, None, 1.0, NO_DROPOUT),
        lora_gradient(t, x, ends, None, False, NO_DROPOUT),
        lora_expand(t, w, None, ends, None, NO_DROPOUT),
    )
    for mine, was in ((low, clean[0]), (y, clean[2])):
        assert torch.equal(mine[:20], was[:20]) and torch.equal(mine[30:45], was[30:45])
        assert not mine[45:].any() and mine[20:30].isnan().all()
    assert torch.equal(dw[::2], clean[1][::2]) and dw[1].isnan().all()


def test_no_rows():
    ends, w = torch.tensor([0, 0], device=DEVICE), drawn(2, C, 3)
    x, t = drawn(0, C), drawn(0, 3)
    assert lora_shrink(x, w, ends, None, None, 1.0, NO_DROPOUT).shape == (0, 3)
    assert lora_expand(t, w, None, ends, None, NO_DROPOUT).shape == (0, C)
    for given, shape in ((ends, (2, 3, C)), (None, (3, C))):
        dw = lora_gradient(t, x, given, None, False, NO_DROPOUT)
        assert dw.shape == shape and not dw.any()


def test_strips_without_documents_are_summed():
    """Many rows are divided among programs, and the sums of all are the whole."""
    x, t = drawn(3000, 40), drawn(3000, 4, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_rank, "processors", lambda device: 4)
        dw = lora_gradient(t, x, None, None, False, DROPPED)
        assert torch.equal(dw, lora_gradient(t, x, None, None, False, DROPPED))
    close(dw, low_rank._gradient_formula(t.double(), x.double(), None, None, False, DROPPED), FP32)


def shared_rows_are_right(module, R=5, dropout=DROPPED):
    """Whether rows whose columns several programs share have the formula's sums, in a second call too. C is no multiple."""
    x, ends = drawn(70, COLUMNS), torch.tensor([0, 31, 66], dtype=torch.int32, device=DEVICE)
    for given, lead in ((ends, (3,)), (None, ())):
        w, scales = drawn(*lead, COLUMNS, R, seed=1), None if given is None else drawn(*lead, R, seed=2)
        args = w, given, scales, None, 0.7, module.RowDropout(*dropout)
        low = [module.lora_shrink(x, *args) for _ in range(2)]
        exact = low_rank._shrink_formula(x.double(), w.double(), given, scales, None, 0.7, dropout)
        if not torch.equal(*low) or not (low[0].double() - exact).norm() < 1e-6 * exact.norm():
            return False
    return True


@pytest.fixture
def _many_processors(monkeypatch):
    """Let programs share rows, and their scratch outlast a call, as on a GPU."""
    memory = torch.full((1 << 18,), torch.nan), torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(sizes, "_processors", lambda device: 132)
    if DEVICE == "cpu":
        monkeypatch.setattr(scratch, "new_scratch", lambda *_: memory)


@pytest.mark.usefixtures("_many_processors")
@pytest.mark.parametrize(("R", "dropout"), ((1, DROPPED), (16, NO_DROPOUT), (130, DROPPED)))
def test_programs_share_rows(R, dropout):
    assert low_rank._shrink_plan((70, COLUMNS, R), (COLUMNS, 0, R, 1), 1.0, 0, (0, 1), False, 132)[2] > 1
    assert shared_rows_are_right(low_rank, R, dropout)


SHARED = {
    "a part left out": ("tl.static_range(PARTS)", "tl.static_range(PARTS - 1)"),
    "columns twice": ("range(part * OWN, width", "range(0, width"),
    "the last columns lost": ("tl.minimum((part + 1) * OWN, C)", "tl.minimum((part + 1) * OWN, C - BLOCK_C)"),
    "a counter that is not set back": ("tl.store(tile, 0)", "tl.store(tile, 1)"),
    "parts of another rank": ("tl.program_id(0) // PARTS * BLOCK_R", "tl.program_id(0) * BLOCK_R"),
    "one counter for all rows": ("arrived_ptr + block *", "arrived_ptr + 0 * block *"),
    "scaled twice": ("t *= scale", "t *= scale * (scale if PARTS > 1 else 1.0)"),
}


@pytest.mark.usefixtures("_many_processors")
@pytest.mark.parametrize("name", SHARED)
def test_a_mutant_of_shared_rows_is_found(name, monkeypatch):
    module = mutate(low_rank, "_shrink_kernel", *SHARED[name])
    monkeypatch.setattr(module, "processors", lambda device: 132)
    monkeypatch.setattr(module, "stream_scratch", scratch.stream_scratch)
    assert not shared_rows_are_right(module)


@pytest.mark.usefixtures("_many_processors")
def test_a_copy_without_a_change_passes(monkeypatch):
    module = copy_package(low_rank)
    monkeypatch.setattr(module, "processors", lambda device: 132)
    monkeypatch.setattr(module, "stream_scratch", scratch.stream_scratch)
    assert shared_rows_are_right(module)
