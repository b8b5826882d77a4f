"""What gated_delta_rule is by the formula, and how it behaves with what people hand to it. Wheels have a file of their own."""

import math
from itertools import pairwise

import pytest
import torch
from ops.calls import equal, gradients, refused
from ops.delta_oracle import Case, draw, judge_case, small_cases
from ops.oracle import BF16, DEVICE, FP32

import onepass
import onepass.ops.delta.gated_delta_rule as module
from onepass.testing.poison import bytes_kept, saved_tensors


def tensors(**changes):
    """q, k, v, g and beta, which ask for a gradient, and a state."""
    inputs, _ = draw(Case(**{"state": FP32, **changes}))
    return [t.requires_grad_() for t in inputs.values()]


def boundaries(*ends):
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def op(**options):
    return lambda *given: onepass.gated_delta_rule(*given[:5], initial_state=given[5], backend="torch", **options)


# ---- what it computes ----


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_within_the_budget_of_the_recurrence(case):
    report = judge_case(module, case)
    assert report, f"{case}\n{report}"


def test_one_head_by_hand():
    """Two tokens of one number: S = e^g S, then S += k beta (v - k S), then y = scale q S."""
    q, k, v, g, beta = (
        torch.tensor(t, device=DEVICE).view(1, 2, 1) for t in ([2, 3.0], [1, 0.5], [4, -1.0], [-0.1, -0.2], [0.5, 0.8])
    )
    y, final = onepass.gated_delta_rule(
        *(t[..., None] for t in (q, k, v)), g, beta, scale=0.25, output_final_state=True, backend="torch"
    )
    first = 0.5 * 4
    second = math.exp(-0.2) * first
    second += 0.5 * 0.8 * (-1 - 0.5 * second)
    torch.testing.assert_close(y.flatten(), torch.tensor([0.25 * 2 * first, 0.25 * 3 * second], device=DEVICE))
    torch.testing.assert_close(final.flatten(), torch.tensor([second], device=DEVICE))


def test_what_models_write():
    """transformers' own function, where it is installed."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, g, beta, state = (t.detach() for t in tensors())
    expected = qwen.torch_chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
    for one, other in zip(op(output_final_state=True)(q, k, v, g, beta, state), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ---- documents ----


def test_a_document_has_the_bits_that_it_has_alone():
    ends = (0, 0, 1, 65, 130, 137, 200)
    given = tensors(B=1, S=200, ends=ends[1:])
    y, final, *grads = gradients(op(cu_seqlens=boundaries(*ends), output_final_state=True), given)
    dys = [torch.linspace(-1, 2 + i, t.numel(), device=DEVICE).view(t.shape) for i, t in enumerate((y, final))]
    for i, (first, end) in enumerate(pairwise(ends)):
        own = (*(t[:, first:end] for t in given[:5]), given[5][i : i + 1])
        alone = [t.detach().requires_grad_() for t in own]
        found = op(output_final_state=True)(*alone)
        assert equal(found, [y[:, first:end], final[i : i + 1]]), i
        mine = torch.autograd.grad(found, alone, [dys[0][:, first:end], dys[1][i : i + 1]])
        for a, b in zip(mine, (*(t[:, first:end] for t in grads[:5]), grads[5][i : i + 1]), strict=True):
            torch.testing.assert_close(a, b)


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
        ys = op(output_final_state=True)(*given)
    assert bytes_kept(kept, *ys, *given) == 0


@pytest.mark.parametrize("final", (False, True))
@pytest.mark.parametrize("changes", ({"B": 0}, {"S": 0}, {"S": 0, "B": 1, "ends": (0, 0)}, {"B": 0, "state": None}))
def test_nothing_to_do(changes, final):
    given, _ = draw(Case(final=final, **{"state": FP32, **changes}))
    given = [None if t is None else t.requires_grad_() for t in given.values()]
    options = {"cu_seqlens": boundaries(0, 0, 0)} if "ends" in changes else {}
    found = gradients(op(output_final_state=final, **options), given)
    if final and given[5] is not None:
        assert torch.equal(found[1], given[5])  # the state passes through
    assert len(found) == 1 + final + sum(t is not None for t in given)


def test_autocast_leaves_the_types():
    given = tensors()
    with torch.autocast(DEVICE, BF16):
        y, final = op(output_final_state=True)(*given)
    assert y.dtype is final.dtype is FP32 and equal((y, final), op(output_final_state=True)(*given))


# ---- what is said of a call ----


def test_explain_says_why_no_wheel_takes_it():
    given = tensors(dtype=BF16)
    said = onepass.explain(onepass.gated_delta_rule, *given[:5])
    assert set(said.reasons) == {"triton", "torch", "fla", "flash_qla"}
    if DEVICE == "cpu":
        assert said.backend == "torch" and "chunks of 64 tokens" in said.variant
        assert all("q is on cpu" in said.reasons[name] for name in ("triton", "fla", "flash_qla"))
        for name in ("triton", "fla"):
            with pytest.raises(RuntimeError, match="q is on cpu"):
                onepass.gated_delta_rule(*given[:5], backend=name)


_Q, _V, _G = torch.ones(1, 5, 2, 6), torch.ones(1, 5, 4, 3), torch.zeros(1, 5, 4)
_GIVEN = {"q": _Q, "k": _Q, "v": _V, "g": _G, "beta": _G}
_TWO = {name: t.expand(2, *t.shape[1:]) for name, t in _GIVEN.items()}


@pytest.mark.parametrize(
    ("raised", "words", "changes"),
    [
        (TypeError, ("q must be a floating-point tensor",), {"q": _Q.long()}),
        (TypeError, ("beta must be a floating-point tensor", "NoneType"), {"beta": None}),
        (ValueError, ("q must have shape [B, S, heads, K]", "(5, 2, 6)"), {"q": _Q[0]}),
        (ValueError, ("k must have q's shape (1, 5, 2, 6)", "(1, 5, 1, 6)"), {"k": _Q[:, :, :1]}),
        (ValueError, ("v must have shape [1, 5, H, V]", "multiple of q's 2", "(1, 5, 3, 3)"), {"v": _V[:, :, :3]}),
        (ValueError, ("v must have shape", "(1, 4, 4, 3)"), {"v": _V[:, :4]}),
        (ValueError, ("g must have shape (1, 5, 4)", "(1, 5, 2)"), {"g": _G[..., :2]}),
        (ValueError, ("beta must be on cpu, as q", "meta"), {"beta": _G.to("meta")}),
        (TypeError, ("scale must be a number", "'1'"), {"scale": "1"}),
        (ValueError, ("initial_state must have shape (1, 4, 6, 3)", "(1, 4, 3, 6)"), {"initial_state": torch.ones(1, 4, 3, 6)}),
        (
            ValueError,
            ("initial_state must have shape (2, 4, 6, 3)", "(1, 4, 6, 3)"),
            {"initial_state": torch.ones(1, 4, 6, 3), "cu_seqlens": torch.tensor((0, 2, 5)).int()},
        ),
        (ValueError, ("cu_seqlens must end with 5",), {"cu_seqlens": torch.tensor((0, 4)).int()}),
        (ValueError, ("q must be one row of tokens",), _TWO | {"cu_seqlens": torch.tensor((0, 5)).int()}),
    ],
)
def test_what_is_wrong_is_said(raised, words, changes):
    refused(onepass.gated_delta_rule, (), _GIVEN | changes, raised, words)
