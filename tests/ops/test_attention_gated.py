"""attention(gated=True): each head's query is followed by its gate, and no pass over memory is one too many."""

import importlib
from itertools import pairwise

import pytest
import torch
from ops.calls import backends, equal, gradients, needs_triton, refused
from ops.oracle import BF16, DEVICE, FP32

import onepass
from onepass.ops.attention import attention_reference, by_cudnn, choice, gate_kernels
from onepass.ops.attention.backward import attend_backward
from onepass.ops.attention.forward import attend
from onepass.testing.poison import bytes_kept, saved_tensors

module = importlib.import_module("onepass.ops.attention.attention")
HEADS, GROUPS, D = 4, 2, 16
COLUMNS = 2 * (HEADS + GROUPS) * D
GATES = ["_gate_forward_kernel", "_gate_backward_kernel"]


def tensors(B=2, S=19, dtype=BF16):
    """qkv, the weights of norms, and tables."""
    qkv, weights = torch.randn(B, S, COLUMNS, device=DEVICE).to(dtype), torch.randn(2, D, device=DEVICE)
    angles = torch.randn(S, 4, device=DEVICE)
    return qkv.requires_grad_(), [weight.requires_grad_() for weight in weights.clone().unbind()], (angles.cos(), angles.sin())


def op(tables=(None, None), **options):
    def call(qkv, *weights):
        return onepass.attention(qkv, HEADS, GROUPS, gated=True, **named(weights, tables), **options)

    return call


def apart(qkv):
    """The same projection without gates, and the gates."""
    both, rest = qkv.split((2 * HEADS * D, 2 * GROUPS * D), -1)
    q, gates = (x.flatten(-2) for x in both.unflatten(-1, (HEADS, 2 * D)).chunk(2, -1))
    return torch.cat([q, rest], -1), gates


@pytest.mark.parametrize("normed", (False, True))
@pytest.mark.parametrize("dtype", (FP32, torch.float64))
def test_it_is_attention_times_its_gates_sigmoid(dtype, normed):
    qkv, weights, tables = tensors(dtype=dtype)
    given = (qkv, *weights) if normed else (qkv,)

    def by_hand(qkv, *weights):
        plain, gates = apart(qkv)
        return onepass.attention(plain, HEADS, GROUPS, **named(weights, tables), backend="torch") * gates.sigmoid()

    def reference(qkv, *weights):
        return attention_reference(qkv, HEADS, GROUPS, **named(weights, tables), gated=True)

    for ours in (op(tables, backend="torch"), reference):
        for one, other in zip(gradients(ours, given), gradients(by_hand, given), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def named(weights, tables):
    return {"cos": tables[0], "sin": tables[1], **dict(zip(("q_weight", "k_weight"), weights, strict=False))}


@needs_triton
@pytest.mark.parametrize("normed", (False, True))
def test_each_tensor_is_moved_once(normed, kernels_launched, monkeypatch):
    qkv, weights, tables = tensors()
    leaves = [qkv, *(weights if normed else [])]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", None)
        y = op(tables, overwrite=True, backend="triton")(qkv * 1, *leaves[1:])
        torch.autograd.grad(y, leaves, torch.randn(2, 19, HEADS * D, device=DEVICE).to(BF16))
    back = "_rope_norm_backward_kernel" if normed else "_rope_kernel"
    forward, backward = ["_rope_kernel", "_attend_kernel", GATES[0]], [GATES[1], "_dq_kernel", "_dk_dv_kernel", back]
    assert kernels_launched == forward + backward


@needs_triton
def test_cudnns_passes_between_ours(monkeypatch, kernels_launched):
    """PyTorch's ops of cuDNN take q, k and v apart, and gradients go from there to their places."""
    calls = []

    def backward(call):
        calls.append(call)
        made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v)]
        attend_backward(call, tuple(made))
        return tuple(made)

    qkv, weights, tables = tensors()
    expected = gradients(op(tables, backend="triton"), (qkv, *weights))
    del kernels_launched[:]
    monkeypatch.setattr(module, "pytorch_is_faster", lambda qkv, D, options, *_: not options.in_order)
    monkeypatch.setattr(module, "parts_by_cudnn", lambda *_: True)
    monkeypatch.setattr(module, "attend_by_cudnn", attend)
    monkeypatch.setattr(module, "attend_backward_in_any_order", backward)
    assert equal(gradients(op(tables, deterministic=False, backend="triton"), (qkv, *weights)), expected)
    assert [call.options.kernels for call in calls] == [choice.PYTORCH]
    assert kernels_launched.count("_rope_norm_backward_kernel") == 1 and kernels_launched[2] == GATES[0]
    for given in ((qkv,), (qkv.detach(), *weights)):
        expected = gradients(op(tables, backend="triton"), given)
        assert equal(gradients(op(tables, deterministic=False, backend="triton"), given), expected)


@needs_triton
def test_what_is_not_causal_is_not_given_to_cudnn(monkeypatch):
    """PyTorch's ops of it are called for causal attention: of another they would return that, without an error."""

    def attend(*_):
        raise AssertionError("as causal attention")

    monkeypatch.setattr(module, "pytorch_is_faster", lambda qkv, D, options, *_: not options.in_order)
    monkeypatch.setattr(module, "parts_by_cudnn", lambda *_: True)
    monkeypatch.setattr(module, "attend_by_cudnn", attend)
    qkv, weights, tables = tensors()
    found = gradients(op(tables, deterministic=False, causal=False, backend="triton"), (qkv, *weights))
    expected = gradients(op(tables, causal=False, backend="torch"), (qkv.detach().float().requires_grad_(), *weights))
    assert all((one - other).norm() < 2e-2 * other.norm() for one, other in zip(found, expected, strict=True))


@needs_triton
def test_pytorchs_attention_elsewhere(monkeypatch):
    """Where its choice of kernels is not cuDNN's, gates are taken out first."""
    monkeypatch.setattr(module, "pytorch_is_faster", lambda qkv, D, options, *_: not options.in_order)
    qkv, weights, tables = tensors()
    assert not by_cudnn.parts_by_cudnn(qkv, D, D) or DEVICE == "cuda"
    monkeypatch.setattr(module, "parts_by_cudnn", lambda *_: False)
    found = gradients(op(tables, deterministic=False, backend="triton"), (qkv, *weights))
    expected = gradients(op(tables, backend="torch"), (qkv.detach().float().requires_grad_(), *weights))
    assert all((one - other).norm() < 2e-2 * other.norm() for one, other in zip(found, expected, strict=True))


@needs_triton
def test_what_is_kept():
    """The projection as it came, q and k beside it, y before its gates and its statistics."""
    qkv, weights, tables = tensors(S=64)
    with saved_tensors() as kept:
        op(tables, backend="triton")(qkv * 1, *weights)
    beside = (HEADS + GROUPS) * D * 2 + HEADS * D * 2 + HEADS * 4
    assert bytes_kept(kept) == 2 * 64 * (COLUMNS * 2 + beside) + sum(t.nbytes for t in (*tables, *weights))


@backends
def test_strides(backend):
    """A part of wider rows, and gradients that are expanded or strided."""
    qkv, weights, tables = tensors()
    call = op(tables, backend=backend)
    wide = torch.randn(2, 2 * 19, COLUMNS + 8, device=DEVICE).to(BF16)
    wide[:, ::2, 8:] = qkv.detach()
    sliced = wide[:, ::2, 8:].detach().requires_grad_()
    found, expected = gradients(call, (sliced, *weights)), gradients(call, (qkv, *weights))
    assert equal(found, expected)
    for dy in (torch.ones(1, 1, 1).expand(2, 19, HEADS * D), torch.randn(2, HEADS * D, 19).mT):
        dy = dy.to(DEVICE, BF16)
        grads = [torch.autograd.grad(call(qkv, *weights), qkv, given)[0] for given in (dy, dy.contiguous())]
        assert equal(grads[:1], grads[1:])


@backends
@pytest.mark.parametrize("sizes", ((0, 5), (2, 0), (1, 1)), ids=str)
def test_sizes(sizes, backend):
    qkv, weights, tables = tensors(*sizes)
    y, dqkv, *_ = gradients(op(tables, backend=backend), (qkv, *weights))
    assert y.shape == (*sizes, HEADS * D) and dqkv.shape == qkv.shape
    if sizes == (1, 1):  # the only key has all of the softmax
        plain, gates = apart(qkv.detach().float())
        v = plain[..., -GROUPS * D :].unflatten(-1, (GROUPS, D)).repeat_interleave(HEADS // GROUPS, -2).flatten(-2)
        torch.testing.assert_close(y.float(), v * gates.sigmoid(), rtol=1e-2, atol=1e-3)


@backends
def test_a_document_has_the_bits_that_it_has_alone(backend):
    qkv, weights, _ = tensors(B=1, S=40)
    ends = (0, 17, 17, 40)
    bounds = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    angles = torch.randn(23, 4, device=DEVICE)
    tables = angles.cos(), angles.sin()
    y, dqkv, *_ = gradients(lambda *t: 2 * op(tables, cu_seqlens=bounds, backend=backend)(*t), (qkv, *weights))
    for first, end in pairwise(ends):
        leaf = qkv[:, first:end].detach().requires_grad_()
        own = [table[: end - first] for table in tables]
        alone = 2 * op(own, backend=backend)(leaf, *(weight.detach() for weight in weights))
        assert torch.equal(y[:, first:end], alone)
        if end > first:
            whole = torch.linspace(-1, 2, y.numel(), device=DEVICE).view(y.shape).to(BF16)
            assert torch.equal(dqkv[:, first:end], torch.autograd.grad(alone, leaf, whole[:, first:end])[0])


@needs_triton
@pytest.mark.parametrize("D", (16, 80, 256))
@pytest.mark.parametrize("heads", (3, 8))
def test_the_kernels_by_themselves(heads, D):
    """Tiles that end within rows, and infinite gates."""
    options = module.AttentionOptions(heads, 1, False, 1.0, gated=True)
    qkv = 3 * torch.randn(2, 37, options.every * D, device=DEVICE)
    gates = gate_kernels.gates_of(qkv, options)
    gates[0, :3, 0] = torch.tensor([float("inf"), -float("inf"), float("nan")], device=DEVICE)[:, None]
    y, dy = (torch.randn(2, 37, heads * D, device=DEVICE) for _ in range(2))
    found, dqkv = gate_kernels.gate_op(y, qkv, options), torch.full_like(qkv, 7.0)
    leaves = [t.double().requires_grad_() for t in (y, gates.flatten(2))]
    expected = leaves[0] * leaves[1].sigmoid()
    of_y, of_gates = torch.autograd.grad(expected, leaves, dy.double())
    close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(found, expected.float(), **close)
    torch.testing.assert_close(gate_kernels.ungate(dy, y, qkv, dqkv, options), of_y.float(), **close)
    torch.testing.assert_close(gate_kernels.gates_of(dqkv, options).flatten(2), of_gates.float(), **close)
    others = torch.ones_like(dqkv, dtype=torch.bool)
    gate_kernels.gates_of(others, options).fill_(False)
    assert (dqkv[others] == 7).all()


@needs_triton
def test_registered_ops_are_sound():
    qkv, weights, tables = tensors(S=8)
    x, norm, tests = qkv.detach(), [weight.detach() for weight in weights], ("test_schema", "test_faketensor")
    options = HEADS, GROUPS, False, 0.25, -1, 0, 0.0, 1e-6, False, True, "", False, False, True
    for given, came in (((*tables, None, None, *norm), x), ((*tables, *[None] * 4), None), ([None] * 6, None)):
        torch.library.opcheck(module._forward_op.op, (x, *given, *options), test_utils=tests)
        y, lse, rotated = module._forward_op.op(x, *given, *options)
        rotated = x if given[0] is None else rotated
        torch.library.opcheck(gate_kernels.gate_op.op, (y, x, *options), test_utils=tests)
        back = torch.randn_like(y), rotated, y, lse, *given, came, *options, True, False, came is not None, came is not None
        torch.library.opcheck(module._backward_op.op, back, test_utils=tests)


@backends
def test_compiled(backend):
    qkv, weights, tables = tensors()
    torch._dynamo.reset()
    function = op(tables, backend=backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert equal(gradients(compiled, (qkv, *weights)), gradients(function, (qkv, *weights)))


@backends
def test_bad_input_is_named(backend):
    x = torch.ones(2, 3, 8 * 16).bfloat16()
    words = "qkv must have shape [B, S, 12 D]", "4 heads of queries, each with its gate", "(2, 3, 128)"
    refused(onepass.attention, (x, 4, 2), {"gated": True, "backend": backend}, ValueError, words)
    given = {"gated": True, "by_group": True, "backend": backend}
    refused(onepass.attention, (x, 2, 2), given, ValueError, ("gated must be False where qkv is by_group", "True"))


def test_explain_names_the_gates():
    qkv, _, _ = tensors()
    assert "gates" in onepass.explain("attention", qkv, HEADS, GROUPS, gated=True).variant
