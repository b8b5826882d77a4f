"""What layer_norm and rms_norm are, and how they behave under autograd, the compiler and whatever else people do to an op."""

import math

import pytest
import torch
from ops.calls import Operators, backends, equal, gradients, needs_triton, outputs
from ops.norm_oracle import LAYOUTS, small_tiles
from ops.oracle import BF16, DEVICE, FP32, laid_out
from torch.nn import functional as F

import onepass
import onepass.ops.norm.norm as module
from onepass.ops.norm import backward as norm_backward
from onepass.ops.norm import kernels
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged

kinds = pytest.mark.parametrize("layer", (True, False), ids=("layer", "rms"))
memory_efficient_or_not = pytest.mark.parametrize("memory_efficient", (False, True), ids=("", "memory_efficient"))
paths = pytest.mark.parametrize("path", ("rows", "chunks", "shared"))


def tensors(lead=(3, 2), H=40, dtype=FP32, layer=True):
    """x, weight, bias (of layer_norm) and residual, all of which ask for a gradient."""
    x, residual = (torch.randn(*lead, H, device=DEVICE, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(H, device=DEVICE, dtype=dtype) for _ in range(2))
    return [t if t is None else t.requires_grad_() for t in (x, weight, bias if layer else None, residual)]


def op(layer=True, **options):
    def norm(x, weight=None, bias=None, residual=None):
        if layer:
            return onepass.layer_norm(x, weight, bias, residual=residual, **options)
        return onepass.rms_norm(x, weight, residual=residual, **options)

    return norm


# ---- what it computes ----


@backends
def test_the_formulas_by_hand(backend):
    x, weight, bias, eps = [1.0, -2.0, 4.0, 0.5], [0.5, 1.0, -1.0, 2.0], [0.0, 1.0, 0.25, -1.0], 0.25
    mean = sum(x) / 4
    rms = math.sqrt(sum(a * a for a in x) / 4 + eps)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in x) / 4 + eps)
    given = [torch.tensor(t, device=DEVICE) for t in (x, weight, bias)]
    for centered in (0, 1):
        options = {"zero_centered_gamma": bool(centered), "backend": backend}
        expected = torch.tensor([a / rms * (w + centered) for a, w in zip(x, weight, strict=True)], device=DEVICE)
        torch.testing.assert_close(onepass.rms_norm(*given[:2], eps, **options), expected)
        expected = [(a - mean) / deviation * (w + centered) + b for a, w, b in zip(x, weight, bias, strict=True)]
        torch.testing.assert_close(onepass.layer_norm(*given, eps, **options), torch.tensor(expected, device=DEVICE))
    torch.testing.assert_close(onepass.layer_norm(given[0], backend=backend), F.layer_norm(given[0], (4,)))
    torch.testing.assert_close(onepass.rms_norm(given[0], backend=backend), F.rms_norm(given[0], (4,), eps=1e-6))


@needs_triton
@kinds
@paths
@memory_efficient_or_not
def test_nan_and_infinities_stay_in_their_rows(layer, path, memory_efficient):
    inputs = tensors((5,), layer=layer)
    for value in (float("nan"), float("inf")):
        with torch.no_grad():
            inputs[0][2, 3] = value
        with small_tiles(module, path):
            y, h, dx, *_ = gradients(op(layer, backend="triton", memory_efficient=memory_efficient), inputs)
        for t in (y, dx):
            rows = t.isfinite().all(-1)
            assert not rows[2] and rows.sum() == 4
            if value != value:
                assert t[2].isnan().all()
        assert h.isfinite().sum() == h.numel() - 1


@backends
@kinds
def test_outputs_are_tensors_of_their_own(layer, backend):
    x, weight, bias, residual = (t if t is None else t.detach() for t in tensors((4, 3), layer=layer))
    for layout in LAYOUTS:
        for some in (residual, None, x):
            given = laid_out(x, layout)
            y, *h = outputs(op(layer, backend=backend)(given, weight, bias, some))
            for out in (y, *h):
                assert out._base is None and out.untyped_storage().nbytes() == out.nbytes
                assert out.is_contiguous() or backend == "torch"
                inside = {t.untyped_storage().data_ptr() for t in (given, x, weight, bias, residual) if t is not None}
                assert out.untyped_storage().data_ptr() not in inside
            assert not h or y.data_ptr() != h[0].data_ptr()


# ---- autograd ----


@needs_triton
@paths
def test_a_kernel_is_asked_for_no_gradient_that_nobody_wants(path, monkeypatch):
    calls = []
    stock = kernels.backward_into
    with small_tiles(module, path):
        monkeypatch.setattr(kernels, "backward_into", lambda *args: calls.append(args[8:11]) or stock(*args))
        for frozen in range(7):
            inputs = tensors()[:3]
            for i, t in enumerate(inputs):
                t.requires_grad_(not frozen & 1 << i)
            gradients(op(True), inputs)
            assert calls.pop() == tuple(not frozen & 1 << i for i in range(3)) and not calls


@backends
@kinds
@memory_efficient_or_not
def test_one_output_used_alone(layer, memory_efficient, backend):
    inputs = tensors(layer=layer)
    call = op(layer, backend=backend, memory_efficient=memory_efficient)
    grads = {}
    for used in ("y", "h"):
        leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
        y, h = call(*leaves)
        (y if used == "y" else h).sum().backward()
        grads[used] = [t.grad for t in leaves if t is not None]
    assert torch.equal(grads["h"][0], torch.ones_like(inputs[0])) and torch.equal(grads["h"][-1], grads["h"][0])
    assert all(g is None or not g.any() for g in grads["h"][1:-1])
    x = (inputs[0] + inputs[3]).detach().requires_grad_()
    alone = [x, *(t if t is None else t.detach().requires_grad_() for t in inputs[1:3])]
    call(*alone).sum().backward()
    expected = [t.grad for t in alone if t is not None]
    assert equal(grads["y"], [*expected, expected[0]])


@backends
@kinds
@pytest.mark.parametrize("used", ["y", "h", "both"])
def test_the_input_comes_back(layer, backend, used):
    """It is x itself, and what comes back through it is added to what comes back through y."""
    inputs = tensors(layer=layer)[:3]
    with torch.no_grad():
        assert op(layer, backend=backend, return_input=True)(*inputs)[1].data_ptr() == inputs[0].data_ptr()
    wanted, found = [], []
    for into, returned in ((wanted, False), (found, True)):
        leaves = [t if t is None else t.detach().requires_grad_() for t in inputs]
        given = op(layer, backend=backend, return_input=returned)(*leaves)
        y, h = given if returned else (given, leaves[0])
        assert h.data_ptr() == leaves[0].data_ptr() and h.requires_grad
        ((y * 3).sum() * (used != "h") + h.square().sum() * (used != "y")).backward()
        into += [y.detach(), *(t.grad for t in leaves if t is not None)]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@needs_triton
@kinds
def test_the_norms_backward_adds_the_inputs_gradient(layer):
    inputs = tensors(layer=layer)[:3]

    def additions(call):
        with Operators() as seen:
            ys = call(2 * inputs[0], *inputs[1:])
            torch.autograd.grad(ys, [t for t in inputs if t is not None], [torch.ones_like(y) for y in ys])
        return seen.additions

    apart = additions(lambda x, *vectors: (op(layer, backend="triton")(x, *vectors), x * 1))
    assert additions(op(layer, backend="triton", return_input=True)) == apart - 1


@backends
@kinds
def test_an_input_that_is_frozen_comes_back_frozen(layer, backend):
    x, *vectors = tensors(layer=layer)[:3]
    y, h = op(layer, backend=backend, return_input=True)(x.detach(), *vectors)
    assert y.requires_grad and not h.requires_grad
    y.sum().backward()
    assert vectors[0].grad.any()


@backends
@kinds
def test_x_is_the_residual_too(layer, backend):
    x, weight, bias, _ = tensors(layer=layer)
    y, h = op(layer, backend=backend)(x, weight, bias, x)
    assert torch.equal(h, 2 * x)
    (dx,) = torch.autograd.grad((y * 3).sum() + h.square().sum(), x)
    twice = (2 * x).detach().requires_grad_()
    z = op(layer, backend=backend)(twice, weight, bias)
    (expected,) = torch.autograd.grad((z * 3).sum() + twice.square().sum(), twice)
    torch.testing.assert_close(dx, 2 * expected)


@backends
@kinds
def test_x_and_the_residual_get_gradients_of_their_own(layer, backend):
    inputs = tensors(layer=layer)
    y, h = op(layer, backend=backend)(*inputs)
    dh = torch.randn_like(h)
    with unchanged(dh=dh):
        torch.autograd.backward((y, h), (torch.ones_like(y), dh))
        inputs[3].grad.zero_()  # as optimisers and clipping do
    assert inputs[0].grad.any()
    y, h = op(layer, backend=backend)(*inputs)
    with unchanged(dh=dh):
        h.backward(dh)
        inputs[0].grad.zero_()
    assert torch.equal(inputs[3].grad, dh)


@needs_triton
@kinds
def test_what_is_kept(layer):
    for residual in (False, True):
        x, weight, bias, other = tensors((9, 4), 100, BF16, layer)
        for memory_efficient in (False, True):
            with saved_tensors() as kept:
                call = op(layer, backend="triton", memory_efficient=memory_efficient)
                h = outputs(call(x, weight, bias, other if residual else None))[1:]
            statistics = 0 if memory_efficient else 36 * 4 * (2 if layer else 1)
            assert bytes_kept(kept, x, weight, bias, *h) == statistics
            assert (x.data_ptr() in {t.data_ptr() for t in kept}) != residual  # h is kept in the place of x
            assert len(kept) == (3 if layer else 2) + (0 if memory_efficient else 1)


# ---- what people wrap around it ----


@backends
@kinds
def test_compiling_gives_the_same(layer, backend):
    """Without statistics and without vectors. The contract has the rest."""
    inputs = tensors(dtype=BF16, layer=layer)
    call = op(layer, backend=backend, memory_efficient=True)

    def block(x, weight, bias, residual):
        return tuple(t * 2 for t in outputs(call(x, weight, bias, residual)))

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for some in (inputs, [inputs[0], None, None, None]):
        assert equal(gradients(block, some), gradients(compiled, some))


@needs_triton
@kinds
@pytest.mark.parametrize("layout", ("contiguous", "sliced", "transposed", "expanded"))
def test_registered_ops_are_what_they_say(layer, layout):
    x, weight, bias, residual = (t if t is None else t.detach() for t in tensors((4, 3), layer=layer))
    x, residual = laid_out(x, layout), laid_out(residual, layout)
    tests = ("test_schema", "test_faketensor")  # the contract has the rest
    for some, post, keep in ((residual, None, True), (None, residual, True), (residual, None, False)):
        torch.library.opcheck(kernels.forward.op, (x, some, weight, bias, post, layer, 1e-5, False, keep), test_utils=tests)
    _, h, kept = kernels.forward.op(x, residual, weight, bias, None, layer, 1e-5, True, True)
    dy = laid_out(torch.randn_like(h), layout)
    for needs in ((True, True, layer), (False, True, False), (True, False, False)):
        for stats in (kept, None):
            args = dy, h, h, weight, bias, stats, layer, 1e-5, True, *needs, FP32, needs[1]
            torch.library.opcheck(kernels.backward.op, args, test_utils=tests)


@backends
@kinds
def test_under_autocast(layer, backend):
    inputs = tensors(layer=layer)
    plain = gradients(op(layer, backend=backend), inputs)
    with torch.autocast(DEVICE, BF16):
        assert equal(plain, gradients(op(layer, backend=backend), inputs))
        hidden = F.linear(inputs[0], torch.ones(40, 40, device=DEVICE))
        y = op(layer, backend=backend)(hidden, inputs[1], inputs[2])
    assert hidden.dtype == y.dtype == BF16
    y.sum().backward()


# ---- what is said of a call ----


@needs_triton
@pytest.mark.parametrize(
    ("name", "H", "words"),
    [
        ("rms_norm", 64, ("forward with", "rows a program, in registers", "rows at a time a program, in registers")),
        ("layer_norm", 512, ("forward with", "rows a program, in registers", "rows at a time a program")),
        ("rms_norm", 4096, ("forward with one row a program, in pieces of", "chunks of")),
        ("layer_norm", 12288, ("forward with one row a program", "chunks of")),
        ("rms_norm", 12289, ("forward with one row a program", "programs a row, tiles of")),
        ("layer_norm", 262144, ("forward with one row a program", "programs a row, tiles of")),
    ],
)
def test_explain_names_the_kernels(name, H, words):
    x = torch.empty(1025, H, device=DEVICE, dtype=BF16)
    said = onepass.explain(name, x, backend="triton")
    assert all(word in said.variant for word in (*words, "keeps x and its rows' statistics")), said.variant
    memory_efficient = onepass.explain(name, x, backend="triton", memory_efficient=True).variant
    assert "keeps x only" in memory_efficient and ("once more" in memory_efficient) == (H > 4096)
    assert "keeps h and its" in onepass.explain(name, x, residual=x, backend="triton").variant
    assert "nothing to do" in onepass.explain(name, x[:0], backend="triton").variant
    weight = torch.empty(H, device=DEVICE, dtype=BF16)
    for asked in (False, True):
        few = onepass.explain(name, x[:3], weight.requires_grad_(asked), backend="triton").variant
        assert ("with a program a row" in few) == (H <= 8192) and ("beside" in few) == (asked and H <= 8192)
        many = onepass.explain(name, x, weight, backend="triton").variant
        assert ("as many programs" in many) == (not asked and (name == "rms_norm" or H <= 5120) and H <= 12288)
    heads = onepass.explain(name, torch.empty(2, 3, 6, H, device=DEVICE, dtype=BF16)[:, :, :4], backend="triton").variant
    assert ("with a program a row" in heads) == (1024 < H <= 8192)  # wider ones are copied


class _OnAGpu:
    """As much of a tensor as is asked of one that no GPU is there for."""

    def __init__(self, H):
        self.shape, self.dtype, self.device, self.is_cuda = (4, H), BF16, torch.device("cuda", 0), True


@pytest.mark.parametrize(("H", "needed"), [(12288, 2), (12289, 3), (65536, 11), (65537, 9), (131072, 16), (262144, 32)])
def test_rows_shared_by_programs_need_room_for_all_of_them(H, needed, monkeypatch):
    monkeypatch.setattr(kernels, "triton_unsupported", lambda x: None)
    for there in (needed - 1, needed):
        monkeypatch.setattr(norm_backward, "processors", lambda device, there=there: there)
        reason = kernels.norm_unsupported(_OnAGpu(H))
        assert (reason is None) == (there >= needed), reason
        assert reason is None or reason == f"rows of {H} need {needed} multiprocessors, and the GPU has {there}"
    tiles = [norm_backward.backward_tiles(H, layer, 4, False, 0, 216064) for layer in (False, True)]
    assert all(each.shared for each in tiles)
    assert max(-(-each.pieces // each.resident) for each in tiles) == needed
