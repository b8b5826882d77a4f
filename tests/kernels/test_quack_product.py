"""QuACK's grouped product, by a stand-in: when it is taken, and what main_grad, flags and errors are then."""

import types

import pytest
import torch
import torch.nn.functional as F

from onepass.gradients import releasable_storage
from onepass.kernels import grouped_product, quack_product
from onepass.ops.experts import experts
from onepass.ops.linear.grouped import grouped_linear
from onepass.parallel import MainGrads
from onepass.product import grouped
from onepass.runtime import wheels

BF16 = torch.bfloat16
SIZES, N, K = (5, 0, 9, 2), 16, 24


def by_groups(A, B, out, cu_seqlens_k, tuned, keep):
    assert tuned is False
    for g, (start, end) in enumerate(zip(cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist(), strict=True)):
        product = A[:, start:end].float() @ B[start:end].float()
        out[g] = out[g] + product if keep else product


@pytest.fixture
def calls(monkeypatch):
    """A stand-in for QuACK's and PyTorch's products on a CPU. Return its calls: rows', or whether a gradient's was added."""
    made = []

    def function(keep):
        def call(A, B, out, tuned, cu_seqlens_k=None, cu_seqlens_m=None):
            made.append("rows" if cu_seqlens_k is None else keep)
            if cu_seqlens_k is not None:
                by_groups(A, B, out, cu_seqlens_k, tuned, keep)
                return
            assert tuned is False
            for g, (start, end) in enumerate(zip(cu_seqlens_m[:-1].tolist(), cu_seqlens_m[1:].tolist(), strict=True)):
                out[start:end] = A[start:end].float() @ B[g].float()

        return call

    functions = quack_product.QuackFunctions(function(False), function(True))
    monkeypatch.setattr(quack_product, "quack_functions", lambda: functions)
    monkeypatch.setattr(grouped, "torch_can_group", lambda *_: True)
    monkeypatch.setattr(grouped, "quack_adds", lambda a, main_grad, *_: main_grad.dtype is torch.float32)
    return made


@pytest.fixture
def all_calls(calls, monkeypatch):
    """The same, of all products."""
    monkeypatch.setattr(grouped_product, "torch_can_group", lambda *_: True)
    monkeypatch.setattr(grouped_product, "quack_multiplies", lambda *_, **__: True)
    return calls


def drawn():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), K, generator=generator).to(BF16)
    weight = torch.nn.Parameter(torch.randn(len(SIZES), N, K, generator=generator).to(BF16))
    return x, weight, torch.tensor(SIZES).cumsum(0, dtype=torch.int32), torch.randn(sum(SIZES), N, generator=generator).to(BF16)


def expected(x, dy, ends):
    out = torch.full((len(SIZES), N, K), torch.nan)
    by_groups(dy.t(), x, out, F.pad(ends, (1, 0)), False, False)
    return out


def test_it_adds_to_main_grad_and_sets_the_flag(calls):
    x, weight, ends, dy = drawn()
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    grouped_linear(x, weight, ends).backward(dy)
    assert calls == [True] and weight.grad_added_to_main_grad and not weight.grad.any()
    assert weight.main_grad.equal(1 + expected(x, dy, ends))


@pytest.mark.parametrize("transposed", (False, True))
def test_it_multiplies_rows_and_makes_gradients(all_calls, transposed):
    x, weight, ends, dy = drawn()
    x.requires_grad_()
    if transposed:
        weight = torch.nn.Parameter(weight.detach().mT.contiguous())
    options = grouped.GroupedOptions(transposed=transposed)
    y = grouped.multiply_grouped_rows(x, weight, ends, BF16, options)
    y.backward(dy)
    assert all_calls == ["rows", "rows", False]
    whole = weight.detach().mT if transposed else weight.detach()
    of_rows = whole.repeat_interleave(torch.tensor(SIZES), 0).float()
    torch.testing.assert_close(y, (of_rows @ x.detach().float().unsqueeze(-1)).squeeze(-1).to(BF16))
    torch.testing.assert_close(x.grad, (dy.float().unsqueeze(1) @ of_rows).squeeze(1).to(BF16))
    found = weight.grad.mT if transposed else weight.grad
    torch.testing.assert_close(found, expected(x.detach(), dy, ends).to(BF16))


def test_a_step_s_first_gradient_is_written_and_the_next_added(calls, monkeypatch):
    monkeypatch.setattr(releasable_storage, "_LARGE", 0)
    x, weight, ends, dy = drawn()
    model = torch.nn.Module()
    model.weight = weight
    main_grads = MainGrads(model, release=True)
    releasable_storage.buffer_of(weight.main_grad).release()
    with main_grads.accumulate():
        grouped_linear(x, weight, ends).backward(dy)
    grouped_linear(x, weight, ends).backward(dy)
    torch.testing.assert_close(weight.main_grad, 2 * expected(x, dy, ends))
    assert calls == [False, True]


def test_who_asks_for_the_gradient_itself_gets_pytorch_s(calls):
    x, weight, ends, dy = drawn()
    weight.main_grad = torch.zeros(weight.shape)
    (grad,) = torch.autograd.grad(grouped_linear(x, weight, ends), weight, dy)
    assert not calls and not weight.main_grad.any() and grad.dtype is BF16
    weight.main_grad = torch.zeros(weight.shape, dtype=BF16)
    grouped_linear(x, weight, ends).backward(dy)
    assert not calls and weight.main_grad.any()


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError, "^no memory"),
        (
            ImportError("libcute"),
            RuntimeError,
            "failed: ImportError: libcute\nrepair the installation of quack-kernels",
        ),
    ],
)
def test_a_product_that_fails_says_so_and_marks_nothing(calls, monkeypatch, error, raised, said):
    x, weight, ends, dy = drawn()
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(quack_product, "quack_functions", lambda: quack_product.QuackFunctions(fails, fails))
    with pytest.raises(raised, match=said):
        grouped_linear(x, weight, ends).backward(dy)
    assert not weight.grad_added_to_main_grad


def test_what_is_missing_is_said(monkeypatch):
    look, names = quack_product.quack_functions.__wrapped__, {"gemm": lambda A, B, out, cu_seqlens_m, cu_seqlens_k, tuned: None}
    monkeypatch.setattr(wheels.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(wheels, "import_module", lambda name: types.SimpleNamespace(**names))
    assert look() == "quack.gemm_interface.gemm_add_inplace of QuACK 9.9 lacks the function itself"
    names["gemm_add_inplace"] = lambda A, B, out, tuned: None
    assert look() == "quack.gemm_interface.gemm_add_inplace of QuACK 9.9 lacks cu_seqlens_k"
    names["gemm_add_inplace"] = names["gemm"]
    assert look() == (names["gemm"], names["gemm"])

    def broken(name):
        raise OSError("libcute is missing")

    monkeypatch.setattr(wheels, "import_module", broken)
    assert look() == "QuACK 9.9 can't be imported: OSError: libcute is missing (pip install quack-kernels)"


@pytest.mark.parametrize(
    ("multiplied", "added", "said"),
    [
        ((), ("up", "down"), "four backward, up and down's gradient into main_grad by QuACK"),
        ((), ("up",), "four backward, up's gradient into main_grad by QuACK"),
        (("up",), ("down",), "four backward, up's products and down's gradient into main_grad by QuACK"),
        (("up", "down"), (), "four backward, up and down's products by QuACK"),
        ((), (), "four backward; keeps"),
    ],
)
def test_explain_names_the_weights_it_is_taken_for(multiplied, added, said, monkeypatch):
    call = types.SimpleNamespace(
        x=torch.zeros(3, K), up=torch.zeros(4, 2 * N, K), down=torch.zeros(4, K, N), chosen=torch.zeros(3, 2, dtype=torch.int64),
        precision=None, recompute=False,
    )  # fmt: skip
    for weight in (call.up, call.down):
        weight.main_grad = torch.zeros_like(weight)
    places = [getattr(call, name).main_grad for name in added]
    weights = [(getattr(call, name), 6 * getattr(call, name)[0].numel()) for name in multiplied]
    monkeypatch.setattr(experts, "quack_adds", lambda x, main_grad: any(main_grad is place for place in places))
    monkeypatch.setattr(
        experts,
        "quack_multiplies",
        lambda x, weight, size, of_gradient=False: any(weight is w and size == count for w, count in weights),
    )
    assert said in experts.variant(call)


def test_explain_names_gradients_alone(monkeypatch):
    call = types.SimpleNamespace(
        x=torch.zeros(3, K), up=torch.zeros(4, 2 * N, K), down=torch.zeros(4, K, N), chosen=torch.zeros(3, 2, dtype=torch.int64),
        precision=None, recompute=False,
    )  # fmt: skip
    monkeypatch.setattr(experts, "quack_multiplies", lambda x, weight, size, of_gradient=False: of_gradient)
    assert "four backward, up and down's gradient by QuACK" in experts.variant(call)
    call.down.main_grad = torch.zeros_like(call.down)
    assert "four backward, up and down's gradient by QuACK" in experts.variant(call)  # before it is added
    monkeypatch.setattr(experts, "quack_adds", lambda *_: True)
    assert "four backward, up's gradient and down's gradient into main_grad by QuACK" in experts.variant(call)


def test_it_is_taken_on_hopper_for_large_16_bit_operands_alone(monkeypatch):
    monkeypatch.setattr(quack_product, "_LEAST_ADDED", 128)
    monkeypatch.setattr(quack_product, "_LEAST_MULTIPLIED", 128)
    monkeypatch.setattr(quack_product, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(quack_product, "has_address", lambda tensor: tensor is not hidden)
    monkeypatch.setattr(quack_product, "quack_functions", lambda: quack_product.QuackFunctions(None, None))

    def on_gpu(address=0, dtype=BF16, strides=(8, 1)):
        where = {"data_ptr": lambda: address, "stride": lambda: strides, "element_size": lambda: 2}
        return types.SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda"), **where)

    hidden, main_grad = on_gpu(), torch.zeros(2, 8, 8)
    adds, multiplies = quack_product.quack_adds, quack_product.quack_multiplies
    assert adds(on_gpu(), main_grad) and multiplies(on_gpu(), on_gpu(16), 128)
    assert not adds(torch.zeros(3, 8, dtype=BF16), main_grad) and not multiplies(torch.zeros(3, 8, dtype=BF16), on_gpu(), 128)
    assert not adds(on_gpu(dtype=torch.float16), main_grad) and not multiplies(on_gpu(dtype=torch.float16), on_gpu(), 128)
    assert not adds(hidden, main_grad) and not multiplies(hidden, on_gpu(), 128) and not multiplies(on_gpu(), hidden, 128)
    assert not adds(on_gpu(8), main_grad)
    assert not multiplies(on_gpu(8), on_gpu(), 128) and not multiplies(on_gpu(), on_gpu(8), 128)
    assert multiplies(on_gpu(strides=(1, 8)), on_gpu(), 128) and not multiplies(on_gpu(), on_gpu(strides=(64, 12, 1)), 128)
    assert not adds(on_gpu(), main_grad, on_gpu(8))
    assert not multiplies(on_gpu(), on_gpu(), 127) and not adds(on_gpu(), main_grad[:1])
    assert multiplies(on_gpu(), on_gpu(), 64, of_gradient=True) and not multiplies(on_gpu(), on_gpu(), 63, of_gradient=True)
    assert not adds(on_gpu(), main_grad.to(BF16))
    assert not adds(on_gpu(), main_grad.mT)
    assert not adds(on_gpu(), torch.zeros(129)[1:].view(2, 8, 8))
    monkeypatch.setattr(quack_product, "quack_functions", lambda: "QuACK is not installed")
    assert not adds(on_gpu(), main_grad) and not multiplies(on_gpu(), on_gpu(), 128)
    monkeypatch.setattr(quack_product, "quack_functions", lambda: quack_product.QuackFunctions(None, None))
    monkeypatch.setattr(quack_product, "compute_capability", lambda device: (10, 0))
    assert not adds(on_gpu(), main_grad) and not multiplies(on_gpu(), on_gpu(), 128)
