"""What attention is, and how it behaves under autograd, the compiler and whatever else people do to an op."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from ops.attention_oracle import Case, computed, draw, judge_case, real_cases, small_cases
from ops.calls import backends, equal, gradients, needs_triton, relative
from ops.oracle import BF16, DEVICE, FP32
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.ops.attention import by_pytorch
from onepass.ops.attention.formula import parts_of
from onepass.ops.attention.forward import lse_size
from onepass.testing.poison import bytes_kept, poisoned, saved_tensors, unchanged

module = importlib.import_module("onepass.ops.attention.attention")

overwriting = pytest.mark.parametrize("overwrite", (False, True), ids=("kept", "overwritten"))
HEADS, GROUPS, D = 4, 2, 16
COLUMNS = (HEADS + 2 * GROUPS) * D


def tensors(B=2, S=19, dtype=BF16, R=8):
    """qkv, which asks for a gradient, and tables."""
    qkv = torch.randn(B, S, COLUMNS, device=DEVICE).to(dtype).requires_grad_()
    angles = torch.randn(S, R // 2, device=DEVICE)
    return qkv, angles.cos(), angles.sin()


def op(cos=None, sin=None, **options):
    """Of a qkv that is no leaf."""
    return lambda qkv: onepass.attention(qkv * 1, HEADS, GROUPS, cos=cos, sin=sin, **options)


# ---- what it computes ----


@pytest.mark.parametrize("rotated", (False, True))
@pytest.mark.parametrize("groups", (1, 2, 6))
def test_the_reference_is_pytorchs_attention(groups, rotated):
    qkv = torch.randn(2, 9, (6 + 2 * groups) * 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(9, 3, dtype=torch.float64)
    cos, sin = (angles.cos(), angles.sin()) if rotated else (None, None)
    q, k, v = parts_of(qkv, 6, groups)
    if rotated:
        q, k = onepass.rope(q, k, cos, sin, backend="torch")
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True, scale=0.7)
    got = module.attention_reference(qkv, 6, groups, cos=cos, sin=sin, scale=0.7)
    torch.testing.assert_close(got, expected.transpose(1, 2).flatten(2), rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(got)
    pairs = (got, dy), (expected.transpose(1, 2).flatten(2), dy)
    one, other = (torch.autograd.grad(y, qkv, dy, retain_graph=True)[0] for y, dy in pairs)
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@backends
@pytest.mark.parametrize("case", small_cases() + real_cases(), ids=str)
def test_within_the_budget(case, backend):
    report = judge_case(module, case, backend)
    assert report, report


@backends
def test_overwriting_changes_no_bit(backend):
    case = Case(S=70, R=8)
    drawn = draw(case)
    one, other = (
        computed(module, Case(S=70, R=8, overwrite=each), *drawn, backend)[:2] for each in (False, True)
    )  # fmt: skip
    assert equal(one, other)


@backends
def test_large_scores_overflow_nothing(backend):
    case = Case(S=70, spread=300.0, R=0)
    qkv, cos, sin, dy = draw(case)
    y, dqkv, _ = computed(module, case, qkv, cos, sin, dy, backend)
    assert y.isfinite().all() and dqkv.isfinite().all()


@needs_triton
def test_rows_that_see_nothing_in_their_first_keys():
    """Scores of minus infinity in a whole tile of keys: nothing of those, and no NaN."""
    qkv = torch.randn(1, 130, COLUMNS, device=DEVICE).to(BF16)
    q, k, _ = parts_of(qkv, HEADS, GROUPS)
    k[:, :64, :, 0], q[:, :, :, 0], q[:, 64:, :, 0] = -1e30, 0.0, 1e30
    k[:, 64:, :, 0] = 0.0
    got = onepass.attention(qkv, HEADS, GROUPS, backend="triton")[:, 64:]
    expected = onepass.attention(qkv[:, 64:], HEADS, GROUPS, backend="triton")
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("part", ("q", "k", "v"))
def test_nan_and_infinities_come_through(part, value):
    """A query's are its own, a key's or a value's are those of all tokens from it on."""
    qkv, _, _, _ = draw(Case(B=2, S=40))
    at = parts_of(qkv, HEADS, GROUPS)["qkv".index(part)]
    at[0, 20, 0, 3] = value
    y = onepass.attention(qkv, HEADS, GROUPS, backend="triton").unflatten(-1, (HEADS, D))
    heads = range(1 if part == "q" else HEADS // GROUPS)
    through = (~y.isfinite()).any(-1)[0]
    if part == "k" and value == math.inf:  # a score of minus infinity is a softmax of 0
        through |= (parts_of(qkv, HEADS, GROUPS)[0][0, :, :, 3] < 0) & (torch.arange(40, device=DEVICE) >= 20)[:, None]
    for head in heads:
        assert through[20 : 21 if part == "q" else None, head].all()
    assert y[1].isfinite().all() and y[0, :, HEADS // GROUPS :].isfinite().all()
    if part != "v":  # zeros times a later infinite value are NaN, in as many rows as are multiplied together
        assert y[0, :20].isfinite().all()


@backends
@pytest.mark.parametrize(("B", "S"), ((0, 5), (2, 0)))
@pytest.mark.parametrize("rotated", (False, True))
def test_nothing_to_do_launches_nothing(B, S, rotated, backend, kernels_launched):
    qkv, cos, sin = tensors(B, S)
    y, dqkv = gradients(op(*((cos, sin) if rotated else ()), overwrite=True, backend=backend), [qkv])
    assert y.shape == (B, S, HEADS * D) and dqkv.shape == qkv.shape and not kernels_launched


# ---- in qkv's memory, and what is launched and kept ----


@backends
@overwriting
def test_what_is_overwritten(overwrite, backend):
    qkv, cos, sin = tensors()
    made = qkv * 1
    before = made.detach().clone()
    onepass.attention(made, HEADS, GROUPS, cos=cos, sin=sin, overwrite=overwrite, backend=backend)
    q, k, v = parts_of(before, HEADS, GROUPS)
    rotated = torch.cat([*onepass.rope(q, k, cos, sin, backend=backend), v], 2).flatten(2)
    assert torch.equal(made, rotated if overwrite else before)


@needs_triton
def test_launches(kernels_launched):
    qkv, cos, sin = tensors()
    kernels = ["_attend_kernel", "_dq_kernel", "_dk_dv_kernel"]
    gradients(op(backend="triton"), [qkv])
    assert kernels_launched == kernels
    for overwrite in (False, True):
        kernels_launched.clear()
        gradients(op(cos, sin, overwrite=overwrite, backend="triton"), [qkv])
        assert kernels_launched == ["_rope_kernel", *kernels, "_rope_kernel"]


@backends
@pytest.mark.parametrize("pairs", (1, 3, 8))
def test_tables_of_any_strides(pairs, backend):
    qkv, cos, sin = tensors()
    cos, sin = cos[..., :pairs].contiguous(), sin[..., :pairs].contiguous()
    apart = [torch.stack([table, -table], -1)[..., 0] for table in (cos, sin)]
    assert all(table.stride(-1) == 2 for table in apart)
    plain, other = (gradients(op(*tables, backend=backend), [qkv]) for tables in ((cos, sin), apart))
    assert all(torch.equal(mine, its) for mine, its in zip(plain, other, strict=True))


@needs_triton
@overwriting
def test_what_is_kept(overwrite):
    """One tensor of qkv's size, which is qkv itself where it may be; the result, and a number a head and token."""
    qkv, cos, sin = tensors()
    made = qkv * 1
    with saved_tensors() as kept:
        y = onepass.attention(made, HEADS, GROUPS, cos=cos, sin=sin, overwrite=overwrite, backend="triton")
    statistics = 4 * HEADS * qkv.shape[0] * lse_size(qkv.shape[1])
    assert bytes_kept(kept, cos, sin, y) == 2 * made.numel() + statistics
    assert bytes_kept(kept, cos, sin, y, made) == (0 if overwrite else 2 * made.numel()) + statistics


@needs_triton
def test_gradients_come_in_one_tensor():
    qkv, cos, sin = tensors()
    made = qkv * 1
    y = onepass.attention(made, HEADS, GROUPS, cos=cos, sin=sin, overwrite=True, backend="triton")
    dy = torch.randn_like(y)
    with poisoned() as allocations:
        (dqkv,) = torch.autograd.grad(y, qkv, dy)
    statistics = 4 * HEADS * 2 * lse_size(19)
    found = [size for _, size, what in allocations.made if size > statistics and "int8" not in what]  # but for descriptors
    assert found == [2 * made.numel()]
    assert dqkv.is_contiguous()


@backends
@pytest.mark.parametrize("view", (False, True))
def test_who_has_saved_what_is_overwritten_is_told(view, backend):
    qkv, cos, sin = tensors()
    made = qkv.float() * 1
    made = made.to(BF16)
    squared = made.square()
    rows = made.view(1, -1, COLUMNS).view(made.shape) if view else made
    y = onepass.attention(rows, HEADS, GROUPS, cos=cos, sin=sin, overwrite=True, backend=backend)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


@backends
def test_a_leaf_that_asks_for_nothing_may_be_overwritten(backend):
    qkv, cos, sin = tensors()
    frozen = qkv.detach().clone()
    y = onepass.attention(frozen, HEADS, GROUPS, cos=cos, sin=sin, overwrite=True, backend=backend)
    assert not torch.equal(frozen, qkv) and not y.requires_grad
    with torch.no_grad():
        assert torch.equal(y, op(cos, sin, backend=backend)(qkv))


@backends
def test_one_of_several_views_may_be_overwritten(backend):
    """As what a Function returns beside something else, or a part of a wider tensor."""

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone().view(2, 19, COLUMNS), x.clone().view(2, 19, COLUMNS)

        @staticmethod
        def backward(ctx, one, other):
            return one + other

    qkv, cos, sin = tensors()
    call = {"cos": cos, "sin": sin, "overwrite": True, "backend": backend}
    expected = gradients(op(**call), [qkv])
    assert equal(expected, gradients(lambda x: onepass.attention(Two.apply(x)[0], HEADS, GROUPS, **call), [qkv]))
    wide = lambda x: (torch.cat([x, x], -1) * 1)[..., :COLUMNS]  # noqa: E731
    assert equal(expected, gradients(lambda x: onepass.attention(wide(x), HEADS, GROUPS, **call), [qkv]))


@backends
def test_numbers_in_one_place_are_not_overwritten(backend):
    qkv, cos, sin = tensors(B=1)
    rows = qkv.detach().clone()
    expanded = rows.expand(3, 19, COLUMNS)
    with unchanged(rows=rows):
        y = onepass.attention(expanded, HEADS, GROUPS, cos=cos, sin=sin, overwrite=True, backend=backend)
    assert torch.equal(y[2], op(cos, sin, backend=backend)(qkv.detach())[0])


# ---- autograd ----


@backends
def test_a_retained_graph_of_what_was_overwritten(backend):
    qkv, cos, sin = tensors()
    y = op(cos, sin, overwrite=True, backend=backend)(qkv)
    dy = torch.randn_like(y)
    with unchanged(y=y, dy=dy):
        first, again = (torch.autograd.grad(y, qkv, dy, retain_graph=True) for _ in range(2))
    assert equal(first, again)


def test_transforms_overwrite_nothing():
    qkv, cos, sin = (t.detach().float() for t in tensors(S=5))
    call = lambda x: onepass.attention(x, HEADS, GROUPS, cos=cos, sin=sin, overwrite=True)  # noqa: E731
    many = torch.randn(3, *qkv.shape, device=DEVICE)
    with unchanged(qkv=qkv, many=many):
        torch.func.jvp(call, (qkv,), (torch.randn_like(qkv),))
        mapped = torch.func.vmap(call)(many)
    torch.testing.assert_close(mapped, torch.stack([op(cos, sin)(x) for x in many]))


# ---- what people wrap around it ----


@backends
@pytest.mark.parametrize("reentrant", (True, False))
def test_a_checkpointed_region_that_makes_qkv(reentrant, backend):
    x, cos, sin = tensors()
    weight = torch.randn(COLUMNS, COLUMNS, device=DEVICE).to(BF16).requires_grad_()

    def block(x, weight):
        return onepass.attention(F.linear(x, weight), HEADS, GROUPS, cos=cos, sin=sin, overwrite=True, backend=backend) * 2

    again = gradients(lambda *given: checkpoint(block, *given, use_reentrant=reentrant), (x, weight))
    assert equal(gradients(block, (x, weight)), again)


@backends
@pytest.mark.parametrize("reentrant", (True, False))
def test_a_checkpointed_region_that_begins_with_qkv(reentrant, backend):
    qkv, cos, sin = tensors()

    def step(overwrite, again):
        mixed = lambda x: onepass.attention(x, HEADS, GROUPS, cos=cos, sin=sin, overwrite=overwrite, backend=backend)  # noqa: E731
        return gradients(lambda x: checkpoint(mixed, x * 1, use_reentrant=reentrant) if again else mixed(x * 1), [qkv])

    assert equal(step(False, True), step(False, False))
    with pytest.raises((RuntimeError, ValueError), match=r"modified by an inplace|a leaf that requires grad"):
        step(True, True)


@backends
def test_a_compiler_is_given_nothing_that_overwrites(backend):
    qkv, cos, sin = tensors()
    call = op(cos, sin, overwrite=True, backend=backend)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: call(x * 2) * 2, fullgraph=True, backend="aot_eager")
    want, got = gradients(lambda x: call(x * 2) * 2, [qkv]), gradients(compiled, [qkv])
    assert equal(want, got) if backend == "triton" else relative(got[1], want[1].double()) < 1e-2
    with torch.no_grad():
        assert relative(compiled(qkv), want[0].double()) < 1e-2


@needs_triton
def test_registered_ops_with_tables_are_sound():
    """The contract's sample has no tables."""
    qkv, cos, sin = (t.detach() for t in tensors(S=8))
    tests = "test_schema", "test_faketensor"  # the contract has the rest
    options = HEADS, GROUPS, False, 0.25, -1, 0, 0.0, 1e-6, False, True, "", False, False, False
    some = torch.tensor([0, 2, 8]).int().to(DEVICE), torch.randn(HEADS, device=DEVICE)
    weights = torch.randn(2, 16, device=DEVICE).unbind()
    for documents, sinks, norm in ((None, None, (None, None)), (*some, (None, None)), (*some, weights)):
        x = qkv if documents is None else qkv[:1]
        given = cos, sin, documents, sinks, *norm
        torch.library.opcheck(module._forward_op.op, (x, *given, *options), test_utils=tests)
        y, lse, rotated = module._forward_op.op(x, *given, *options)
        came = None if norm[0] is None else x
        for of in ((True, True, True, False), (False, True, False, True), (True, False, True, True)):
            back = torch.randn_like(y), rotated, y, lse.nan_to_num(posinf=torch.inf), *given, came, *options, *of
            torch.library.opcheck(module._backward_op.op, back, test_utils=tests)
    call = cos, sin, *options
    for x in (qkv, qkv.mT.contiguous().mT):
        torch.library.opcheck(by_pytorch.rotate_op.op, (x, *call), test_utils=tests)
    parts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts_of(qkv, HEADS, GROUPS)]
    torch.library.opcheck(by_pytorch.rotate_back_op.op, (*parts, *call), test_utils=tests)
    torch.library.opcheck(by_pytorch.normed_op.op, (qkv, cos, sin, *weights, *options), test_utils=tests)
    for of in ((True,) * 4, (False, False, True, False)):
        back = *parts, qkv, cos, sin, *weights, *options, *of
        torch.library.opcheck(by_pytorch.normed_back_op.op, back, test_utils=tests)


@backends
def test_under_autocast(backend):
    qkv, cos, sin = tensors()
    wide = qkv.detach().float().requires_grad_()
    expected = gradients(op(cos, sin, backend=backend), [qkv])
    with torch.autocast(DEVICE, BF16):
        y, dqkv = gradients(op(cos, sin, overwrite=True, backend=backend), [wide])
    assert (y.dtype, dqkv.dtype) == (BF16, FP32)
    assert equal([y, dqkv.to(BF16)], expected)


@backends
def test_overwriting_in_inference_mode(backend):
    qkv, cos, sin = tensors()
    with torch.inference_mode():
        y = op(cos, sin, overwrite=True, backend=backend)(qkv)
    assert torch.equal(y, op(cos, sin, backend=backend)(qkv).detach())


# ---- what is said of a call ----


@needs_triton
def test_explain_names_the_kernels():
    qkv, cos, sin = (t.detach() for t in tensors())
    said = onepass.explain("attention", qkv, HEADS, GROUPS, cos=cos, sin=sin, overwrite=True)
    assert said.backend == "triton"
    for words in ("tiles of queries x keys", "rotated by rope's kernel in place", "keeps qkv, y"):
        assert words in said.variant
    assert "into a copy" in onepass.explain("attention", qkv, HEADS, GROUPS, cos=cos, sin=sin).variant
    assert "rotated" not in onepass.explain("attention", qkv, HEADS, GROUPS).variant
    assert "nothing to do" in onepass.explain("attention", qkv[:0], HEADS, GROUPS).variant
    said = onepass.explain("attention", qkv, HEADS, GROUPS, cos=cos, sin=sin, backend="torch")
    assert "scaled_dot_product_attention, after q and k are rotated" in said.variant


@needs_triton
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.ones(1, 2, COLUMNS), "qkv is torch.float32, and the kernels take 16 bits"),
        (
            torch.ones(1, 2, 8 * 24).bfloat16(),
            "heads of 24 are none of 16, 32, 64, 80, 96, 128, 192, 256, 512, which the kernels take; torch takes any",
        ),
        (torch.ones(1, 1, 1).bfloat16().expand(1, (1 << 20) + 1, COLUMNS), "1048577 tokens are more than 1048576"),
    ],
    ids=("fp32", "heads", "tokens"),
)
def test_what_the_kernels_can_not_take(given, reason):
    given = given.to(DEVICE)
    said = onepass.explain("attention", given, HEADS, GROUPS)
    assert said.backend == "torch" and said.reasons["triton"] == reason
    with pytest.raises(RuntimeError, match=reason):
        onepass.attention(given, HEADS, GROUPS, backend="triton")
    if given.shape[1] < 100:
        expected = module.attention_reference(given, HEADS, GROUPS)
        torch.testing.assert_close(onepass.attention(given, HEADS, GROUPS), expected)
