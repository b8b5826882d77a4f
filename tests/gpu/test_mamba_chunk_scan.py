"""mamba_chunk_scan by the wheels that are installed, on a GPU."""

import pytest
import torch
from ops.calls import equal, gradients, relative
from ops.scan_oracle import Case, draw, formula, options_of

import onepass
from onepass.ops.scan import by_wheels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64
CASES = (
    Case(S=300, H=8, P=64, N=128, dtype=BF16, dt=BF16, final=True, state=BF16),
    Case(S=64, P=64, N=64, dtype=FP16, G=1, limit=(0.2, 0.6)),
    Case(B=1, S=600, P=64, N=128, dtype=BF16, ends=(1, 65, 65, 200, 512, 600)),
    Case(B=1, S=333, P=64, N=128, dtype=BF16, ends=(1, 65, 65, 200, 333), final=True, state=torch.float32),
    Case(S=530, P=80, N=32, dtype=BF16, vectors=(), layout="part"),
)


@pytest.fixture(params=tuple(by_wheels.REFUSALS))
def wheel(request):
    functions = by_wheels.fla_functions() if request.param == "fla" else by_wheels.mamba_functions()
    if isinstance(functions, str):
        pytest.skip(functions)
    return request.param


def call(wheel, case):
    def scan(*ts):
        named = dict(zip(("D", "dt_bias", "initial_states"), ts[5:], strict=True))
        return onepass.mamba_chunk_scan(*ts[:5], **named, backend=wheel, **options_of(case))

    return scan


def taken(wheel, case):
    """The case's tensors, which ask for gradients; skips where the wheel refuses them."""
    tensors = [None if t is None else t.requires_grad_() for t in draw(case)[0].values()]
    options = options_of(case) | {"initial_states": tensors[7]}
    reason = onepass.explain("mamba_chunk_scan", *tensors[:5], **options).reasons[wheel]
    if reason is not None:
        pytest.skip(reason)
    return tensors


@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_a_rounding_of_operands(wheel, case):
    tensors = taken(wheel, case)
    found = gradients(call(wheel, case), tensors)
    wide = [None if t is None else t.detach().to(FP64).requires_grad_() for t in tensors]
    for ours, exact in zip(found, gradients(formula(case), wide), strict=True):
        assert relative(ours, exact) < (2e-2 if case.dtype is BF16 else 4e-3)


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_calls_are_bitwise_equal_and_compile(wheel, case):
    tensors = taken(wheel, case)
    first = gradients(call(wheel, case), tensors)
    assert all(equal(first, gradients(call(wheel, case), tensors)) for _ in range(20))
    torch._dynamo.reset()
    assert equal(first, gradients(torch.compile(call(wheel, case), fullgraph=True), tensors))


def test_wrong_boundaries_make_nan(wheel):
    case = CASES[2]
    tensors = taken(wheel, case)
    wrong = torch.tensor((0, 200, 100, 1 << 20, 300, 512, 600), dtype=torch.int32, device="cuda")
    y = onepass.mamba_chunk_scan(*tensors[:5], cu_seqlens=wrong, backend=wheel)
    assert y.isnan().all() and all(t.isnan().any() for t in torch.autograd.grad(y.sum(), tensors[:5]))
