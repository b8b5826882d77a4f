"""What mamba_chunk_scan is by the formula, and how it behaves with what people hand to it. Wheels have a file of their own."""

import math
from itertools import pairwise

import pytest
import torch
from ops.calls import equal, gradients, refused
from ops.oracle import BF16, DEVICE, FP32
from ops.scan_oracle import Case, draw, judge_case, small_cases

import onepass
import onepass.ops.scan.mamba_chunk_scan as module
from onepass.testing.poison import bytes_kept, saved_tensors


def tensors(**changes):
    """x, dt, A, B, C, D and dt's bias, which ask for a gradient, and states."""
    inputs, _ = draw(Case(**{"state": FP32, **changes}))
    return [None if t is None else t.requires_grad_() for t in inputs.values()]


def boundaries(*ends):
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def op(**options):
    def call(*given):
        named = dict(zip(("D", "dt_bias", "initial_states"), given[5:], strict=True))
        return onepass.mamba_chunk_scan(*given[:5], **named, dt_softplus=True, backend="torch", **options)

    return call


# ---- what it computes ----


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_within_the_budget_of_the_recurrence(case):
    report = judge_case(module, case)
    assert report, f"{case}\n{report}"


def test_one_head_by_hand():
    """Two tokens of one number: S = e^(dt A) S + dt x B, then y = S C + D x."""
    x, dt, B, C = (torch.tensor(t, device=DEVICE).view(1, 2, 1) for t in ([2, 3.0], [0.5, 4.0], [1, 0.5], [4, -1.0]))
    A, D = (torch.tensor([t], device=DEVICE) for t in (-0.3, 10.0))
    y, final = onepass.mamba_chunk_scan(
        x[..., None], dt, A, B[..., None], C[..., None], D=D, dt_limit=(0, 1.5), return_final_states=True, backend="torch"
    )
    first = 0.5 * 2
    second = math.exp(-0.3 * 1.5) * first + 1.5 * 3 * 0.5
    torch.testing.assert_close(y.flatten(), torch.tensor([4 * first + 20, -second + 30], device=DEVICE))
    torch.testing.assert_close(final.flatten(), torch.tensor([second], device=DEVICE))


def test_what_models_write():
    """transformers' own function, where it is installed."""
    mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    x, dt, A, B, C, D, bias, state = (t.detach() for t in tensors())
    given = {"D": D, "dt_bias": bias, "initial_states": state, "dt_softplus": True, "return_final_states": True}
    expected = mamba.mamba2_chunk_scan.__wrapped__(x, dt, A, B, C, 32, dt_limit=(0.1, 1.0), **given)
    found = onepass.mamba_chunk_scan(x, dt, A, B, C, dt_limit=(0.1, 1.0), backend="torch", **given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ---- documents ----


def test_a_document_has_the_bits_that_it_has_alone():
    ends = (0, 0, 1, 65, 130, 137, 200)
    given = tensors(B=1, S=200, ends=ends[1:])
    y, final, *grads = gradients(op(cu_seqlens=boundaries(*ends), return_final_states=True), given)
    dys = [torch.linspace(-1, 2 + i, t.numel(), device=DEVICE).view(t.shape) for i, t in enumerate((y, final))]
    for i, (first, end) in enumerate(pairwise(ends)):
        own = [t[:, first:end] if t.dim() > 2 else t for t in given]
        own[7] = given[7][i : i + 1]
        alone = [t.detach().requires_grad_() for t in own]
        found = op(return_final_states=True)(*alone)
        assert equal(found, [y[:, first:end], final[i : i + 1]]), i
        mine = torch.autograd.grad(found, alone, [dys[0][:, first:end], dys[1][i : i + 1]])
        for at in (0, 1, 3, 4):
            torch.testing.assert_close(mine[at], grads[at][:, first:end])
        torch.testing.assert_close(mine[7], grads[7][i : i + 1])


def test_wrong_boundaries_make_nan_where_nobody_reads_them(monkeypatch):
    monkeypatch.setattr("onepass.runtime.documents.are_readable", lambda cu_seqlens: False)
    for ends in ((0, 9, 5, 70), (0, 4, 8, 60), (3, 4, 8, 70), (0, 4, 1 << 20, 70), (0, -5, 8, 70)):
        given = tensors(B=1, ends=(1, 2, 70))
        y, *grads = gradients(op(cu_seqlens=boundaries(*ends)), given)
        assert y.isnan().all(), ends
        assert all(t.isnan().any() for t in grads[:5])


# ---- autograd, and what people wrap around it ----


@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_arguments_are_kept_and_nothing_else(dtype):
    given = tensors(dtype=dtype)
    with saved_tensors() as kept:
        ys = op(return_final_states=True)(*given)
    assert bytes_kept(kept, *ys, *given) == 0


@pytest.mark.parametrize("final", (False, True))
@pytest.mark.parametrize("changes", ({"B": 0}, {"S": 0}, {"S": 0, "B": 1, "ends": (0, 0)}, {"B": 0, "state": None}))
def test_nothing_to_do(changes, final):
    given = tensors(final=final, **changes)
    options = {"cu_seqlens": boundaries(0, 0, 0)} if "ends" in changes else {}
    found = gradients(op(return_final_states=final, **options), given)
    if final and given[7] is not None:
        assert torch.equal(found[1], given[7])  # the states pass through
    assert len(found) == 1 + final + sum(t is not None for t in given)


def test_autocast_leaves_the_types():
    given = tensors()
    with torch.autocast(DEVICE, BF16):
        y, final = op(return_final_states=True)(*given)
    assert y.dtype is final.dtype is FP32 and equal((y, final), op(return_final_states=True)(*given))


# ---- what is said of a call ----


def test_explain_says_why_no_wheel_takes_it():
    given = tensors(dtype=BF16)
    said = onepass.explain(onepass.mamba_chunk_scan, *given[:5])
    assert set(said.reasons) == {"triton", "torch", "mamba_ssm", "fla"}
    if DEVICE == "cpu":
        assert said.backend == "torch" and "chunks of 64 tokens" in said.variant
        assert all("x is on cpu" in said.reasons[name] for name in ("triton", "mamba_ssm", "fla"))
        for name in ("triton", "mamba_ssm"):
            with pytest.raises(RuntimeError, match="x is on cpu"):
                onepass.mamba_chunk_scan(*given[:5], backend=name)


_X, _B, _DT, _A = torch.ones(1, 5, 4, 3), torch.ones(1, 5, 2, 6), torch.zeros(1, 5, 4), torch.ones(4)
_GIVEN = {"x": _X, "dt": _DT, "A": _A, "B": _B, "C": _B}
_TWO = {name: t if name == "A" else t.expand(2, *t.shape[1:]) for name, t in _GIVEN.items()}


@pytest.mark.parametrize(
    ("raised", "words", "changes"),
    [
        (TypeError, ("x must be a floating-point tensor",), {"x": _X.long()}),
        (TypeError, ("A must be a floating-point tensor", "NoneType"), {"A": None}),
        (TypeError, ("D must be a floating-point tensor", "or None"), {"D": 1.0}),
        (ValueError, ("x must have shape [B, S, H, P]", "(5, 4, 3)"), {"x": _X[0]}),
        (ValueError, ("dt must have shape (1, 5, 4)", "(1, 5, 2)"), {"dt": _DT[..., :2]}),
        (ValueError, ("A must have shape (4,)", "(3,)"), {"A": _A[:3]}),
        (ValueError, ("dt_bias must have shape (4,)", "(1,)"), {"dt_bias": _A[:1]}),
        (ValueError, ("B must have shape [1, 5, G, N]", "divisor of x's 4", "(1, 5, 3, 6)"), {"B": torch.ones(1, 5, 3, 6)}),
        (ValueError, ("B must have shape", "(1, 4, 2, 6)"), {"B": _B[:, :4]}),
        (ValueError, ("C must have B's shape (1, 5, 2, 6)", "(1, 5, 1, 6)"), {"C": _B[:, :, :1]}),
        (ValueError, ("dt must be on cpu, as x", "meta"), {"dt": _DT.to("meta")}),
        (TypeError, ("dt_limit must be two numbers", "0.1"), {"dt_limit": 0.1}),
        (TypeError, ("dt_limit must be a number", "'1'"), {"dt_limit": (0, "1")}),
        (ValueError, ("dt_limit must begin with the lesser", "(2, 1)"), {"dt_limit": (2, 1)}),
        (ValueError, ("initial_states must have shape (1, 4, 3, 6)", "(1, 4, 6, 3)"), {"initial_states": torch.ones(1, 4, 6, 3)}),
        (
            ValueError,
            ("initial_states must have shape (2, 4, 3, 6)", "(1, 4, 3, 6)"),
            {"initial_states": torch.ones(1, 4, 3, 6), "cu_seqlens": torch.tensor((0, 2, 5)).int()},
        ),
        (ValueError, ("cu_seqlens must end with 5",), {"cu_seqlens": torch.tensor((0, 4)).int()}),
        (ValueError, ("x must be one row of tokens",), _TWO | {"cu_seqlens": torch.tensor((0, 5)).int()}),
    ],
)
def test_what_is_wrong_is_said(raised, words, changes):
    refused(onepass.mamba_chunk_scan, (), _GIVEN | changes, raised, words)
