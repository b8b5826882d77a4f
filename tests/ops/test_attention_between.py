"""PyTorch's attention between our rotations: `attention(..., deterministic=False)` where that is faster."""

import importlib

import pytest
import torch
from ops.calls import Operators, gradients, needs_triton, relative
from ops.oracle import BF16, DEVICE
from ops.test_attention import COLUMNS, GROUPS, HEADS, op, overwriting, tensors

import onepass
from onepass.testing.poison import bytes_kept, saved_tensors

module = importlib.import_module("onepass.ops.attention.attention")

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def _faster(monkeypatch):
    """As on a GPU that has a faster one."""
    monkeypatch.setattr(module, "pytorch_is_faster", lambda qkv, head_size, options, *_: not options.in_order)


def reference(cos, sin):
    return lambda qkv: module.attention_reference(qkv.float(), HEADS, GROUPS, cos=cos, sin=sin)


def both(function, tensors):
    """What it returns, and the gradient of its squares."""
    y = function(*tensors)
    (grad,) = torch.autograd.grad(y.float().square().sum(), tensors)
    return y.detach(), grad


@overwriting
@pytest.mark.parametrize("rotated", (False, True))
def test_it_is_the_same_attention(rotated, overwrite, kernels_launched):
    qkv, *tables = tensors()
    tables = tables if rotated else (None, None)
    y, dqkv = both(op(*tables, overwrite=overwrite, deterministic=False), [qkv])
    expected, wanted = both(reference(*tables), [qkv])
    assert relative(y, expected) < 1e-2 and relative(dqkv, wanted) < 1e-2
    assert kernels_launched == ["_rope_kernel"] * (2 if rotated else 0)
    assert dqkv.is_contiguous()


@pytest.mark.parametrize("switch", ("option", "torch"))
def test_determinism_that_is_asked_for_is_had(switch, kernels_launched):
    qkv, cos, sin = tensors()
    torch.use_deterministic_algorithms(switch == "torch")
    options = {} if switch == "option" else {"deterministic": False}
    gradients(op(cos, sin, **options), [qkv])
    assert kernels_launched == ["_rope_kernel", "_attend_kernel", "_dq_kernel", "_dk_dv_kernel", "_rope_kernel"]


def test_nothing_of_q_and_k_is_kept_beside_qkv():
    qkv, cos, sin = tensors()
    made = qkv * 1
    with saved_tensors() as kept:
        y = onepass.attention(made, HEADS, GROUPS, cos=cos, sin=sin, overwrite=True, deterministic=False)
    seeds = 16  # of a dropout that there isn't, which PyTorch keeps on a GPU
    assert bytes_kept(kept, cos, sin, y, made) <= 4 * HEADS * qkv.shape[0] * qkv.shape[1] + seeds  # the logarithms


def laid(qkv, layout):
    if layout == "strided":
        return qkv.mT.contiguous().mT
    return (
        torch.nn.functional.pad(qkv, (8, 8))[..., 8:-8]
        if layout == "sliced"
        else qkv.transpose(0, 1).contiguous().transpose(0, 1)
    )


@overwriting
@pytest.mark.parametrize("layout", ("strided", "sliced", "sequence first"))
def test_wherever_it_lies(layout, overwrite):
    qkv, cos, sin = tensors()
    y, dqkv = both(
        lambda x: onepass.attention(
            laid(x, layout) * 1, HEADS, GROUPS, cos=cos, sin=sin, overwrite=overwrite, deterministic=False
        ),
        [qkv],
    )
    straight = lambda x: onepass.attention(  # noqa: E731
        laid(x * 1, layout), HEADS, GROUPS, cos=cos, sin=sin, overwrite=overwrite, deterministic=False
    )
    expected, wanted = both(reference(cos, sin), [qkv])
    for found, grad in ((y, dqkv), both(straight, [qkv])):
        assert relative(found, expected) < 1e-2 and relative(grad, wanted) < 1e-2


def test_pytorch_asked_for_by_name_launches_nothing(kernels_launched):
    qkv, cos, sin = tensors()
    gradients(op(cos, sin, overwrite=True, deterministic=False, backend="torch"), [qkv])
    assert kernels_launched == []


@overwriting
@pytest.mark.parametrize("layout", ("as made", "strided", "sliced"))
def test_compiled(layout, overwrite, kernels_launched):
    torch._dynamo.reset()
    qkv, cos, sin = tensors()

    def function(x):
        made = x * 1 if layout == "as made" else laid(x * 1, layout)
        return onepass.attention(made, HEADS, GROUPS, cos=cos, sin=sin, overwrite=overwrite, deterministic=False)

    eager = both(function, [qkv])
    kernels_launched.clear()
    for found, expected in zip(both(torch.compile(function, fullgraph=True, backend="aot_eager"), [qkv]), eager, strict=True):
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert kernels_launched == ["_rope_kernel", "_rope_kernel"]
    with torch.no_grad():
        assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(qkv), eager[0])


def test_compiled_by_pytorch_the_compiler_sees_all(kernels_launched):
    qkv, cos, sin = tensors()
    plain = op(cos, sin, overwrite=True, deterministic=False, backend="torch")
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for found, expected in zip(both(compiled, [qkv]), both(plain, [qkv]), strict=True):
        assert relative(found, expected) < 1e-2
    assert kernels_launched == []


def test_by_pytorch_backward_that_is_watched_launches_nothing(kernels_launched):
    qkv, cos, sin = tensors()
    y = onepass.attention(qkv * 1, HEADS, GROUPS, cos=cos, sin=sin, deterministic=False, backend="torch")
    with Operators() as seen:
        torch.autograd.grad(y.sum(), qkv)
    assert kernels_launched == [] and not any(name.startswith("onepass") for name in seen.names)


def test_a_policy_of_checkpointing_sees_the_rotation():
    qkv, cos, sin = tensors()
    with Operators() as seen:
        both(op(cos, sin, deterministic=False), [qkv])
    assert [name for name in seen.names if "rotated" in name] == [
        "onepass.attention_rotated.default",
        "onepass.attention_rotated_back.default",
    ]


@pytest.mark.parametrize("backend", (None, "torch"))
def test_a_second_derivative_through_the_rotation_raises(backend):
    qkv, cos, sin = tensors()
    y = op(cos, sin, deterministic=False, backend=backend)(qkv)
    with pytest.raises(RuntimeError, match="once"):
        torch.autograd.grad(y.float().sum(), qkv, create_graph=True)


def test_explain_says_so():
    qkv = torch.randn(1, 5, COLUMNS, device=DEVICE).to(BF16)
    cos = sin = torch.ones(5, 4, device=DEVICE)
    said = onepass.explain("attention", qkv, HEADS, GROUPS, cos=cos, sin=sin, overwrite=True, deterministic=False).variant
    assert said == "q and k rotated by rope's kernel in place; torch.nn.functional.scaled_dot_product_attention"
    assert "tiles" in onepass.explain("attention", qkv, HEADS, GROUPS, cos=cos, sin=sin).variant
