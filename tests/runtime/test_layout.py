"""as_rows and as_groups: rows as they lie where they are evenly spaced, a copy elsewhere; and scratch memory that stays zero."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepass.kernels.layout import as_groups, as_rows
from onepass.kernels.scratch import stream_scratch
from onepass.runtime.sizes import ceil_div, power_of_two, processors


def test_views_of_rows_are_not_copied():
    x = torch.randn(4, 6, 10)
    for view, stride in (
        (x, 10),
        (x[..., 2:7], 10),
        (x[:, 1:2], 60),
        (x[:, ::2], 20),
        (x[1:, :, 3:], 10),
        (x[0, 0], 10),
        (x[:1, :1], 10),
    ):
        rows, row = as_rows(view)
        assert rows.data_ptr() == view.data_ptr(), view.shape
        assert row == stride or view[..., 0].numel() == 1


def test_everything_else_is_copied():
    x = torch.randn(4, 6, 10)
    for view in (
        x[..., ::2],
        x.transpose(1, 2),
        x.transpose(0, 1),
        x[:, 1:5],
        x[:1].expand(4, 6, 10),
        x[..., :1].expand(4, 6, 10),
    ):
        rows, row = as_rows(view)
        assert rows.is_contiguous() and row == view.shape[-1] and rows.data_ptr() != view.data_ptr()
        assert torch.equal(rows, view)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from((0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 20, 24, 40))), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_rows_hold_the_same_numbers_however_they_lay(sizes, offset):
    size, stride = zip(*sizes, strict=True)
    view = torch.arange(600.0).as_strided(size, stride, offset)
    rows, row = as_rows(view)
    count = view.numel() // size[-1]
    assert row >= size[-1] or count == 1
    assert torch.equal(rows.as_strided((count, size[-1]), (row, 1)), view.reshape(count, size[-1]))

    rows, (row, gap, inner) = as_groups(view, True)
    starts = [r * row + (r // inner * gap if inner else 0) for r in range(count)]
    assert inner or gap is None
    for start, expected in zip(starts, view.reshape(count, size[-1]), strict=True):
        assert torch.equal(rows.as_strided((size[-1],), (1,), rows.storage_offset() + start), expected)


def test_heads_in_wider_rows_are_not_copied():
    wide = torch.randn(3, 4, 20)
    heads = wide[..., 3:18].view(3, 4, 5, 3)
    for view, lies in (
        (wide, (20, None, 0)),
        (wide[..., :7], (20, None, 0)),
        (heads, (3, 5, 5)),
        (heads[:, :, 1:4], (3, 11, 3)),
        (heads[:1].transpose(1, 2), (20, -77, 4)),
        (heads[:, :1], (3, 65, 5)),
    ):
        rows, found = as_groups(view, True)
        assert rows is view and found == lies
    for view in (heads[:, 1], heads.transpose(1, 2), heads[..., :1].expand(3, 4, 5, 3), heads[:, :, :1].expand(3, 4, 5, 3)):
        rows, found = as_groups(view, True)
        assert rows.is_contiguous() and found == (3, None, 0)
    assert as_groups(heads, False)[1] == (3, None, 0)
    many = torch.empty(2, 3, 129 * 2)
    assert as_groups(many[..., 2:].view(2, 3, 128, 2), True)[1] == (2, 2, 128)
    assert as_groups(torch.empty(2, 3, 130 * 2)[..., 2:].view(2, 3, 129, 2), True)[1] == (2, None, 0)


def test_sizes():
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert processors(torch.device("cpu")) == 1


def test_scratch_gives_zeros_to_count_with():
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for floats, counters in ((10, 3), (1 << 18, 1 << 17), (5, 2)):
        partial, arrived = stream_scratch(floats, counters, device)
        assert partial.numel() >= floats and arrived.numel() >= counters
        assert partial.dtype == torch.float32 and arrived.dtype == torch.int32 and not arrived.any()
