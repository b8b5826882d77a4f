"""What only a GPU shows of adapters: their kernels at real sizes, launches, who waits, graphs that drop anew, compilations."""

import pytest
import torch
from gpu.calls import captured, compilations, launched, memory_goes_back, nobody_waits, other_stream
from ops.calls import equal, relative

import onepass
from onepass import LoRA
from onepass.kernels import low_rank
from onepass.kernels.low_rank import NO_DROPOUT, RowDropout, lora_expand, lora_gradient, lora_shrink
from onepass.ops.linear.lora_linear import lora_linear_reference

__all__ = ["memory_goes_back"]
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DROPPED = RowDropout(6554, (1 << 62) + 7)
QKV = (0, 4096), (4096, 5120), (5120, 6144)


def drawn(*shape, dtype=BF16, scale=1.0, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(dtype)


def qkv(adapters=FP32, rank=16, **options):
    """x, a frozen weight, and adapters of q, k and v of Llama 8B."""
    x, weight = drawn(512, 4096).requires_grad_(), drawn(6144, 4096, scale=4096**-0.5, seed=1)
    loras = [
        LoRA(
            drawn(rank, 4096, dtype=adapters, scale=4096**-0.5, seed=2 + i).requires_grad_(),
            drawn(last - first, rank, dtype=adapters, seed=5 + i).requires_grad_(), 2.0, (first, last), **options,
        )
        for i, (first, last) in enumerate(QKV)
    ]  # fmt: skip
    return x, weight, loras


def documents(count=8, tokens=2048, rank=16, K=4096, N=6144, adapters=FP32):
    """x, a frozen weight, an adapter for each document, where they end (unevenly, the last rows belong to none), and dy."""
    ends = torch.linspace(3, tokens - 5, count, device="cuda").to(torch.int32)
    x, weight = drawn(tokens, K).requires_grad_(), drawn(N, K, scale=K**-0.5, seed=1)
    a = drawn(count, rank, K, dtype=adapters, scale=K**-0.5, seed=2).requires_grad_()
    return x, weight, a, drawn(count, N, rank, dtype=adapters, seed=3).requires_grad_(), ends, drawn(tokens, N, seed=4)


def step(x, weight, loras, dy=None):
    y = onepass.linear(x, weight, lora=loras)
    return y, *torch.autograd.grad(y, (x, *[t for lora in loras for t in lora[:2]]), torch.ones_like(y) if dy is None else dy)


# ---- kernels at real sizes ----


@pytest.mark.parametrize("dropout", (NO_DROPOUT, DROPPED), ids=("all", "dropout"))
@pytest.mark.parametrize("count", (None, 1, 8, 100))
@pytest.mark.parametrize(("C", "R"), ((4096, 16), (6144, 48), (14336, 130), (777, 3)))
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_products_are_those_of_the_formula(dtype, C, R, count, dropout):
    M = 3000
    x, t = drawn(M, C, dtype=dtype), drawn(M, R, dtype=dtype, seed=1)
    ends = None if count is None else torch.linspace(0, M - 5, count + 1, device="cuda")[1:].to(torch.int64)
    lead = () if count is None else (count,)
    of_rounding = 1e-5 if dtype is FP32 else 2.2e-3 if dtype is BF16 else 3e-4
    for w in (drawn(*lead, R, C, dtype=dtype, seed=2).mT, drawn(*lead, C, R, dtype=dtype, seed=3)):
        low, y = lora_shrink(x, w, ends, None, None, 0.7, dropout), lora_expand(t, w, x, ends, None, dropout)
        truth = low_rank._shrink_formula(x.double(), w.double(), ends, None, None, 0.7, dropout)
        assert relative(low, truth) < of_rounding
        assert relative(y, low_rank._expand_formula(t.double(), w.double(), x.double(), ends, None, dropout)) < of_rounding
    dw = lora_gradient(t, x, ends, None, False, dropout)
    assert relative(dw, low_rank._gradient_formula(t.double(), x.double(), ends, None, False, dropout)) < 1e-5


@pytest.mark.parametrize("options", ({}, {"dropout": 0.1}), ids=("plain", "dropout"))
@pytest.mark.parametrize("adapters", (FP32, BF16), ids=str)
def test_a_layer_of_documents_within_rounding(adapters, options):
    x, weight, a, b, ends, dy = documents(adapters=adapters)
    scales = [0.5, 1.0, 2.0, 0.7, 1.0, 1.5, 3.0, 1.0]

    def call(function, *tensors):
        torch.manual_seed(3)
        y = function(tensors[0], tensors[1], *tensors[2:4], scale=scales, ends=ends, **options)
        return y, *torch.autograd.grad(y, (tensors[0], *tensors[2:4]), tensors[4])

    found = call(onepass.lora_linear, x, weight, a, b, dy)
    wide = [t.detach().to(BF16).double().requires_grad_(t.requires_grad) for t in (x, weight, a, b, dy)]
    # the formula reads its seed of a tensor of the same device, and draws the same
    for mine, true in zip(found, call(lora_linear_reference, *wide), strict=True):
        assert relative(mine, true) < 6e-3


def test_wrong_ends_are_nan_and_validate_raises():
    x, weight, a, b, ends, _ = documents(tokens=300, K=256, N=128)
    ends[3] = 7  # below the one before
    assert onepass.lora_linear(x, weight, a, b, ends=ends).isnan().all()
    with onepass.validate(), pytest.raises(ValueError, match="ends must not fall"):
        onepass.lora_linear(x, weight, a, b, ends=ends)
    ends[:] = torch.tensor([1, 2, 3, 4, 5, 6, 7, 301], device="cuda")
    assert onepass.lora_linear(x, weight, a, b, ends=ends).isnan().all()
    with onepass.validate(), pytest.raises(ValueError, match="ends must be at most 300"):
        onepass.lora_linear(x, weight, a, b, ends=ends)


# ---- launches ----


@pytest.mark.parametrize("adapters", (FP32, BF16), ids=str)
def test_several_adapters_are_joined_and_taken_apart_by_one_launch_each(adapters):
    """Nothing is copied, filled or concatenated beside."""
    x, weight, loras = qkv(adapters)
    forward = launched(lambda: onepass.linear(x, weight, lora=loras))
    whole = launched(lambda: step(x, weight, loras, dy=weight.new_ones(512, 6144)))
    assert sum("_pack_kernel" in name for name in forward) == 1, forward
    assert sum("_pack_kernel" in name for name in whole) == 2, whole
    for name in forward:
        assert not any(word in name for word in ("CatArray", "copy", "Memcpy", "fill", "Fill")), forward
    assert len(forward) <= 7, forward  # cuBLAS divides long sums, and adds the parts by a kernel of its own


def test_an_adapter_of_the_products_type_is_not_copied():
    x, weight, loras = qkv(BF16)
    lora = loras[0]._replace(rows=None, b=drawn(6144, 16, seed=9).requires_grad_())
    names = launched(lambda: onepass.linear(x, weight, lora=lora))
    assert not [name for name in names if "_pack_kernel" in name or "copy" in name], names


def test_dropout_and_documents_launch_one_kernel_a_product():
    x, weight, a, b, ends, _ = documents()
    names = launched(lambda: onepass.lora_linear(x, weight, a.to(BF16), b.to(BF16), ends=ends, scale=2.0))
    assert sum("_shrink" in name for name in names) == sum("_expand" in name for name in names) == 1, names


# ---- who waits, graphs, compilations ----


@pytest.mark.parametrize("by", ("plain", "dropout", "documents"))
def test_a_call_waits_for_nothing_and_repeats(by):
    x, weight, loras = qkv()
    options = {"dropout": 0.1} if by == "dropout" else {}
    if by == "documents":
        options = {"ends": torch.tensor([100, 300, 300, 500], device="cuda")}
        loras = [lora._replace(a=lora.a.detach().expand(4, -1, -1).clone().requires_grad_(),
                               b=lora.b.detach().expand(4, -1, -1).clone().requires_grad_()) for lora in loras]  # fmt: skip
    loras = [lora._replace(**options) for lora in loras]
    torch.manual_seed(1)
    first = step(x, weight, loras)
    torch.manual_seed(1)
    with nobody_waits():
        second = step(x, weight, loras)
    assert equal(first, second)


def test_a_graph_replays_with_other_ends():
    x, weight, a, b, ends, dy = documents()

    def call():
        y = onepass.lora_linear(x, weight, a, b, ends=ends, scale=2.0)
        return y, *torch.autograd.grad(y, (x, a, b), dy)

    results, graph = captured(call)
    ends.copy_(torch.tensor([5, 5, 600, 700, 1200, 1300, 1300, 2048]))
    graph.replay()
    assert equal(results, call())


def test_each_replay_drops_other_numbers_and_backward_the_same():
    n = 512
    x, nothing = torch.ones(n, n, device="cuda", requires_grad=True), torch.zeros(n, n, device="cuda")
    eye = torch.eye(n, device="cuda")

    def call():
        y = onepass.lora_linear(x, nothing, eye, eye, dropout=0.25)
        return y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))

    (y, dx), graph = captured(call)
    seen = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(y, dx)  # x is ones: both are the mask
        seen.append(y.clone())
    assert not torch.equal(*seen)
    assert abs((seen[0] == 0).float().mean().item() - 0.25) < 0.01


def test_kernels_drop_what_the_formula_drops():
    x, weight, loras = qkv(FP32)
    x, weight = x.detach().float()[:, :512].contiguous(), weight.float()[:64, :512].contiguous()
    a, b = loras[0].a.detach()[:, :512].contiguous(), loras[0].b.detach()[:64].contiguous()
    torch.manual_seed(3)
    y = onepass.lora_linear(x, weight, a, b, dropout=0.3)
    torch.manual_seed(3)
    assert relative(y, lora_linear_reference(x, weight, a, b, dropout=0.3)) < 1e-4


@pytest.mark.parametrize("mode", (None, "reduce-overhead"))
def test_compiled(mode):
    x, weight, a, b, ends, dy = documents(tokens=512, K=512, N=256)

    def call(x, a, b):
        return onepass.lora_linear(x, weight, a, b, ends=ends, scale=2.0)

    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x, a, b)
        found = [y.detach().clone(), *[grad.clone() for grad in torch.autograd.grad(y, (x, a, b), dy)]]
    z = call(x, a, b)
    for mine, other in zip(found, (z, *torch.autograd.grad(z, (x, a, b), dy)), strict=True):
        assert relative(mine, other) < 6e-3


def test_a_new_number_of_rows_compiles_nothing():
    kernels = low_rank._shrink_kernel, low_rank._expand_kernel, low_rank._gradient_kernel

    def call(tokens):
        x, weight, a, b, ends, dy = documents(tokens=tokens, K=512, N=256)
        y = onepass.lora_linear(x, weight, a, b, ends=ends, dropout=0.1)
        torch.autograd.grad(y, (x, a, b), dy)

    call(512)
    before = compilations(*kernels)
    for tokens in (1, 17, 333, 4096):
        call(max(tokens, 16))
    assert compilations(*kernels) == before > 0
