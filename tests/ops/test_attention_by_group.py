"""attention(by_group=True): Megatron-core's layout of a projection, in which no pass over memory is one too many."""

import importlib

import pytest
import torch
from ops.attention_oracle import Case, by_group, computed, draw, grouped_cases
from ops.calls import backends, equal, gradients, needs_triton
from ops.oracle import BF16, DEVICE
from ops.test_attention import COLUMNS, GROUPS, HEADS, tensors

import onepass
from onepass.ops.attention import by_pytorch, rope_kernels, rope_norm_kernels
from onepass.testing.poison import bytes_kept, saved_tensors

module = importlib.import_module("onepass.ops.attention.attention")
D = 16


def projection(B=2, S=19):
    """What linear_qkv returns, as [B, S, ...]: its memory is [S, B, ...]. With tables."""
    _, cos, sin = tensors(S=S)
    mixed_qkv = torch.randn(S, B, COLUMNS, device=DEVICE).to(BF16).requires_grad_()
    return mixed_qkv.transpose(0, 1), cos, sin


def call(cos, sin, **options):
    return lambda qkv: onepass.attention(qkv, HEADS, GROUPS, cos=cos, sin=sin, by_group=True, **options)


@backends
@pytest.mark.parametrize("case", [case for case in grouped_cases() if case.norm is None], ids=str)
def test_it_is_attention_of_the_same_heads(case, backend):
    """Bit by bit, whatever is normalised, rotated or masked."""
    given = draw(case)
    plain = Case(**{**vars(case), "by_group": False})
    y, dqkv, *_ = computed(module, case, *given, backend)
    expected, wanted, *_ = computed(module, plain, *given, backend)
    assert equal((y, dqkv), (expected, wanted))


@needs_triton
@pytest.mark.parametrize("deterministic", (True, False))
def test_each_tensor_is_moved_once(deterministic, kernels_launched, monkeypatch):
    """One rotation forward and one backward change the layout: nothing is contiguous()ed, and no parts are joined."""
    monkeypatch.setattr(module, "pytorch_is_faster", lambda qkv, D, options, *_: not options.in_order)
    qkv, cos, sin = projection()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", None)
        y = call(cos, sin, deterministic=deterministic, backend="triton")(qkv)
        (dqkv,) = torch.autograd.grad(y, qkv, torch.randn(19, 2, HEADS * D, device=DEVICE).to(BF16).transpose(0, 1))
    attention = ["_attend_kernel", "_dq_kernel", "_dk_dv_kernel"] if deterministic else []
    assert kernels_launched == ["_rope_kernel", *attention, "_rope_kernel"]
    assert y.transpose(0, 1).is_contiguous() and dqkv.transpose(0, 1).is_contiguous()


@needs_triton
@pytest.mark.parametrize("each", (False, True), ids=("one table", "a table a sequence"))
@pytest.mark.parametrize("layout", ("swapped", "contiguous"))
@pytest.mark.parametrize("sizes", ((2, 9, 4, 2, 16), (1, 9, 4, 2, 16), (4, 5, 16, 4, 64)), ids=str)
def test_the_rotation_reads_in_place(sizes, layout, each, monkeypatch):
    """The last sizes fill a tile by groups."""
    case = Case(*sizes, layout=layout, each=each, norm=False, by_group=True)
    monkeypatch.setattr(rope_kernels, "readable", None)
    monkeypatch.setattr(rope_norm_kernels, "readable", None)
    computed(module, case, *draw(case))


@needs_triton
@pytest.mark.parametrize("normed", (False, True))
def test_what_is_kept(normed):
    """q, k and v, y and its statistics. With a norm the projection as it came, and q and k beside it."""
    qkv, cos, sin = projection(S=64)
    weights = {name: torch.ones(D, device=DEVICE, requires_grad=True) for name in ("q_weight", "k_weight")} if normed else {}
    with saved_tensors() as kept:
        call(cos, sin, backend="triton", **weights)(qkv * 1)
    tokens = 2 * 64
    beside = (HEADS + GROUPS) * D * 2 if normed else 0
    tables = cos.nbytes + sin.nbytes + (2 * D * 4 if normed else 0)
    assert bytes_kept(kept) == tokens * (COLUMNS * 2 + beside + HEADS * D * 2 + HEADS * 4) + tables


@needs_triton
def test_registered_ops_are_sound():
    tests = "test_schema", "test_faketensor"  # the contract has the rest
    (qkv, cos, sin), weights = projection(S=8), torch.randn(2, D, device=DEVICE).unbind()
    qkv = qkv.detach()
    for sequence_first, x in ((True, qkv), (False, qkv.contiguous())):
        options = HEADS, GROUPS, False, 0.25, -1, 0, 0.0, 1e-6, False, True, "", True, sequence_first, False
        for tables, norm in (((cos, sin), (None, None)), ((cos, sin), weights), ((None, None), (None, None))):
            given = *tables, None, None, *norm
            torch.library.opcheck(module._forward_op.op, (x, *given, *options), test_utils=tests)
            y, lse, rotated = module._forward_op.op(x, *given, *options)
            came, of_norm = (None, False) if norm[0] is None else (x, True)
            back = torch.randn_like(y), rotated, y, lse, *given, came, *options, True, False, of_norm, of_norm
            torch.library.opcheck(module._backward_op.op, back, test_utils=tests)
        torch.library.opcheck(by_pytorch.rotate_op.op, (x, cos, sin, *options), test_utils=tests)
        torch.library.opcheck(by_pytorch.normed_op.op, (x, cos, sin, *weights, *options), test_utils=tests)
        parts = by_pytorch.rotate_op.op(x, cos, sin, *options)
        torch.library.opcheck(by_pytorch.rotate_back_op.op, (*parts, cos, sin, *options), test_utils=tests)
        for of in ((True,) * 4, (False, False, True, False)):
            back = *parts, x, cos, sin, *weights, *options, *of
            torch.library.opcheck(by_pytorch.normed_back_op.op, back, test_utils=tests)


@needs_triton
@pytest.mark.parametrize("grad", (True, False))
def test_a_norm_between_pytorchs_attention(grad, monkeypatch):
    monkeypatch.setattr(module, "pytorch_is_faster", lambda qkv, D, options, *_: not options.in_order)
    qkv, cos, sin = projection()
    weights = {name: torch.randn(D, device=DEVICE).requires_grad_(grad) for name in ("q_weight", "k_weight")}
    qkv = qkv.detach().requires_grad_(grad)
    y = call(cos, sin, deterministic=False, **weights)(qkv)
    expected = module.attention_reference(qkv.float(), HEADS, GROUPS, cos=cos, sin=sin, by_group=True, **weights)
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    if grad:
        dy, leaves = torch.randn_like(expected), (qkv, *weights.values())
        pairs = zip(torch.autograd.grad(y, leaves, dy.to(BF16)), torch.autograd.grad(expected, leaves, dy), strict=True)
        assert all((one - other).norm() < 2e-2 * other.norm() for one, other in pairs)


@backends
def test_compiled(backend):
    qkv, cos, sin = projection()
    torch._dynamo.reset()
    function = call(cos, sin, backend=backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert equal(gradients(compiled, [qkv.detach().requires_grad_()]), gradients(function, [qkv.detach().requires_grad_()]))


def test_explain_names_the_groups():
    qkv, cos, sin = projection()
    said = onepass.explain("attention", qkv, HEADS, GROUPS, cos=cos, sin=sin, by_group=True, overwrite=True).variant
    if onepass.explain("attention", qkv, HEADS, GROUPS).backend == "triton":
        assert "out of their groups" in said and "in place" not in said and "keeps the copy" in said
    else:
        assert "in place" not in said


def test_the_layout_of_the_tests_is_megatrons():
    case = Case(heads=4, groups=2, D=16)
    names = torch.arange(8.0).repeat_interleave(16).expand(1, 1, -1)
    assert by_group(case, names)[0, 0, ::16].tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
