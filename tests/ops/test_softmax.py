"""What softmax is, and how it behaves under autograd, the compiler and whatever else people do to an op."""

import math

import pytest
import torch
from ops import softmax_oracle as oracle
from ops.calls import backends, equal, gradients, needs_triton, refused
from ops.oracle import BF16, DEVICE, FP32, laid_out
from ops.softmax_oracle import INF, LAYOUTS, NAN, judge_case, small_tiles

import onepass
import onepass.ops.softmax.softmax as module
from onepass.ops.softmax import kernels
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged

paths = pytest.mark.parametrize("path", ("", "rows", "single"))


def scores(*shape, dtype=FP32):
    return torch.randn(*(shape or (2, 3, 7, 24)), device=DEVICE).to(dtype).requires_grad_()


def left_out(*shape):
    mask = torch.rand(*shape, device=DEVICE) < 0.3
    mask[..., 0] = False
    return mask


# ---- what it computes ----


@backends
def test_the_formula_by_hand(backend):
    x, mask, scale = [[1.0, -2.0, 4.0], [0.5, 3.0, 1.0]], [[False, False, True], [True, True, True]], 0.5
    given = {"x": torch.tensor(x, device=DEVICE), "mask": torch.tensor(mask, device=DEVICE)}
    a, b = math.exp(0.5), math.exp(-1.0)
    y = onepass.softmax(given["x"], scale=scale, mask=given["mask"], backend=backend)
    torch.testing.assert_close(y, torch.tensor([[a / (a + b), b / (a + b), 0.0], [0.0, 0.0, 0.0]], device=DEVICE))
    c, d = math.exp(0.25), math.exp(1.5)
    y = onepass.softmax(given["x"], scale=scale, causal=True, backend=backend)
    torch.testing.assert_close(y, torch.tensor([[1.0, 0.0, 0.0], [c / (c + d), d / (c + d), 0.0]], device=DEVICE))
    torch.testing.assert_close(onepass.softmax(given["x"], backend=backend), given["x"].softmax(-1))


@needs_triton
@pytest.mark.parametrize("case", [*oracle.main_cases(), *oracle.real_cases()], ids=str)
def test_within_the_budget(case):
    report = judge_case(module, case)
    assert report, f"{case}\n{report}"


@pytest.mark.parametrize("case", [case for case in oracle.main_cases() if case.path == "rows"], ids=str)
def test_the_torch_backend_is_within_the_budget(case):
    report = judge_case(module, case, "torch")
    assert report, f"{case}\n{report}"


@backends
@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 8), (0, 2000), (3, 0), (0,)])
def test_nothing_gives_nothing(shape, backend):
    y, dx = gradients(lambda x: onepass.softmax(x, causal=x.dim() > 1, backend=backend), [scores(*shape)])
    assert y.shape == dx.shape == shape


@backends
@paths
@pytest.mark.parametrize("causal", (False, True))
def test_what_is_left_out_is_zero_whatever_it_was(causal, path, backend):
    x, mask = scores(4, 6, 24).detach(), left_out(4, 6, 24)
    mask[1, 2] = True
    nothing = mask | (torch.arange(24, device=DEVICE) > torch.arange(6, device=DEVICE)[:, None] if causal else False)
    dy = torch.randn_like(x)
    results = []
    for value in (0.0, NAN, INF, -INF):
        given = torch.where(nothing, value, x).requires_grad_()
        with small_tiles(module, path):
            y = onepass.softmax(given, mask=mask, causal=causal, backend=backend)
            (dx,) = torch.autograd.grad(y, given, torch.where(nothing, value, dy))
        results.append((y.detach(), dx))
        assert not y[nothing].any() and not dx[nothing].any() and y.isfinite().all() and dx.isfinite().all()
    assert all(equal(results[0], each) for each in results[1:])
    assert not results[0][0][1, 2].any()


@needs_triton
@paths
def test_causal_reads_nothing_right_of_the_diagonal_but_a_run(path):
    """Runs are of 16 bytes. That more is not read is seen by memory that is not there."""
    rows, columns = 5, 64
    x, dy = (torch.randn(rows, columns, device=DEVICE) for _ in range(2))
    with small_tiles(module, path):
        y = onepass.softmax(x, causal=True, backend="triton")
        few = x[:, :8].contiguous()
        assert torch.equal(y[:, :8], onepass.softmax(few, causal=True, backend="triton")) and not y[:, 8:].any()
        dx = kernels.softmax_backward(dy, y, kernels.SoftmaxOptions(1.0, True))
    assert not dx[:, 8:].any()


@backends
def test_outputs_are_tensors_of_their_own(backend):
    x = scores(4, 3, 24).detach()
    for layout in LAYOUTS:
        given = laid_out(x, layout)
        y = onepass.softmax(given, backend=backend)
        assert y._base is None and y.untyped_storage().nbytes() == y.nbytes
        assert y.is_contiguous() or backend == "torch"


@backends
def test_scores_as_low_as_an_additive_mask(backend):
    """Nothing overflows on the way: a row of the lowest number there is is no row of -inf."""
    for dtype in (FP32, BF16):
        x = torch.full((3, 24), torch.finfo(dtype).min, dtype=dtype, device=DEVICE)
        x[1:, :4] = 1.0
        y = onepass.softmax(x, mask=torch.zeros(24, dtype=torch.bool, device=DEVICE), backend=backend)
        torch.testing.assert_close(y, x.float().softmax(-1).to(dtype))


# ---- masks ----


@needs_triton
def test_masks_are_read_where_they_lie(monkeypatch):
    x = scores(2, 3, 5, 24).detach()
    seen = []
    stock = kernels._mask_as_rows
    monkeypatch.setattr(kernels, "_mask_as_rows", lambda mask, shape: seen.append((mask, stock(mask, shape))) or seen[-1][1])
    for shape in ((2, 3, 5, 24), (2, 1, 5, 24), (1, 3, 1, 24), (2, 3, 5, 1), (5, 24), (24,), (1,), (3, 5, 24)):
        mask = left_out(*shape)
        onepass.softmax(x, mask=mask, backend="triton")
        given, (used, lies) = seen.pop()
        assert used is given is mask and lies.column in (0, 1)
    onepass.softmax(x, mask=left_out(24, 5).t(), backend="triton")
    assert seen[-1][1][0].shape == (5, 24)  # a copy, but of its own size
    onepass.softmax(x[:, :, None], mask=left_out(2, 1, 1, 5, 24), backend="triton")
    assert seen[-1][1][0] is seen[-1][0]
    wide = scores(2, 2, 2, 2, 3, 24).detach()
    onepass.softmax(wide, mask=left_out(2, 1, 2, 1, 3, 24), backend="triton")
    assert seen[-1][1][0].shape == wide.shape


def test_levels_of_a_mask():
    def lies(shape, x_shape, stride=None):
        mask = torch.empty(shape) if stride is None else torch.empty_strided(shape, stride)
        return kernels.mask_layout(mask.shape, mask.stride(), torch.Size(x_shape))

    assert lies((32, 32, 64, 128), (32, 32, 64, 128))[:1] == (1,)
    assert lies((32, 1, 64, 128), (32, 32, 64, 128)) == (3, 64, 32, 128, 0, 64 * 128, 1)
    assert lies((64, 128), (32, 32, 64, 128)) == (2, 64, 1024, 128, 0, 0, 1)
    assert lies((32, 1, 1, 128), (32, 8, 64, 128)) == (2, 512, 32, 0, 128, 0, 1)
    assert lies((128,), (32, 8, 64, 128)) == (1, 16384, 1, 0, 0, 0, 1)
    assert lies((8, 1), (8, 128)) == (1, 8, 1, 1, 0, 0, 0)
    assert lies((2, 1, 2, 1, 3, 8), (2, 2, 2, 2, 3, 8)) is None
    assert lies((4, 8), (4, 8), (1, 4)) is None


# ---- autograd ----


@backends
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_only_y_is_kept(dtype, backend):
    x, mask = scores(dtype=dtype), left_out(2, 1, 7, 24)
    with saved_tensors() as kept:
        y = onepass.softmax(x, mask=mask, causal=True, backend=backend)
    assert len(kept) == 1 and kept[0].data_ptr() == y.data_ptr() and bytes_kept(kept, y) == 0
    with unchanged(y=kept[0], mask=mask, x=x):
        y.square().sum().backward()


def test_blocks_of_rows_change_nothing(monkeypatch):
    from onepass.runtime import formula

    x, mask = scores(2, 3, 40, 24).cpu().detach().requires_grad_(), left_out(2, 1, 40, 24).cpu()
    call = lambda t: onepass.softmax(t, scale=0.5, mask=mask, causal=True, backend="torch")  # noqa: E731
    whole = gradients(call, [x])
    monkeypatch.setattr(formula, "_BLOCK", 100)
    assert equal(whole, gradients(call, [x]))


# ---- what people wrap around it ----


@needs_triton
def test_a_new_number_of_rows_binds_nothing_new():
    kernels._forward_plan.cache_clear()
    for rows in (1, 2, 5, 9, 16):
        onepass.softmax(scores(2, rows, 24).detach(), causal=True, backend="triton")
    assert kernels._forward_plan.cache_info().currsize == 1


# ---- what is said of a call ----


@needs_triton
def test_explain_names_the_kernels():
    x = torch.empty(2, 16, 64, device=DEVICE, dtype=BF16)
    said = onepass.explain(onepass.softmax, x, backend="triton").variant
    assert "32 rows a program" in said and "keeps y" in said
    wide = torch.empty(4, 16384, device=DEVICE, dtype=BF16)
    said = onepass.explain("softmax", wide, causal=True, backend="triton").variant
    assert "one row a program, in registers of 16 warps" in said and "right of the diagonal" in said
    assert "where it lies" in onepass.explain("softmax", x, mask=left_out(64), backend="triton").variant
    assert "copied" in onepass.explain("softmax", x, mask=left_out(64, 16).t(), backend="triton").variant
    assert "nothing to do" in onepass.explain("softmax", x[:0], backend="triton").variant
    assert "y saved" in onepass.explain("softmax", x, backend="torch").variant


@needs_triton
def test_what_the_kernels_do_not_take():
    x = torch.randn(2, 16385, device=DEVICE)
    assert "16385 columns" in onepass.explain("softmax", x).reasons["triton"]
    torch.testing.assert_close(onepass.softmax(x), x.softmax(-1))
    with pytest.raises(RuntimeError, match="16385 columns"):
        onepass.softmax(x, backend="triton")
    with pytest.raises(RuntimeError, match=r"x is torch\.float64"):
        onepass.softmax(x[:, :8].double(), backend="triton")


@pytest.mark.parametrize(
    ("raised", "words", "x", "options"),
    [
        (TypeError, ("scale", "number", "None"), torch.ones(2, 3), {"scale": None}),
        (TypeError, ("scale", "number", "True"), torch.ones(2, 3), {"scale": True}),
        (TypeError, ("scale", "number", "tensor"), torch.ones(2, 3), {"scale": torch.tensor(1.0)}),
        (ValueError, ("scale", "finite", "nan"), torch.ones(2, 3), {"scale": NAN}),
        (ValueError, ("scale", "finite", "inf"), torch.ones(2, 3), {"scale": INF}),
        (ValueError, ("x", "two dimensions", "causal", "(3,)"), torch.ones(3), {"causal": True}),
        (TypeError, ("mask", "torch.bool", "left out", "torch.float32"), torch.ones(2, 3), {"mask": torch.ones(2, 3)}),
        (ValueError, ("mask", "broadcastable", "(2, 3)", "(3, 2)"), torch.ones(2, 3), {"mask": torch.ones(3, 2) > 0}),
        (ValueError, ("mask", "broadcastable", "(2,)"), torch.ones(2, 1), {"mask": torch.ones(2) > 0}),
    ],
)
def test_what_is_wrong_is_said(raised, words, x, options):
    refused(onepass.softmax, (x,), options, raised, words)
