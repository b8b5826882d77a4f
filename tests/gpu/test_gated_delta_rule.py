"""gated_delta_rule by the wheels that are installed, on a GPU."""

from itertools import pairwise

import pytest
import torch
from ops.calls import equal, gradients, relative
from ops.delta_oracle import Case, draw, formula, options_of

import onepass
from onepass.ops.delta import by_wheels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64
CASES = (
    Case(S=200, K=128, V=128, dtype=BF16, beta=BF16, final=True, state=BF16),
    Case(S=64, K=128, V=128, dtype=FP16, key_heads=1),
    Case(B=1, S=333, K=128, V=128, dtype=BF16, ends=(1, 65, 65, 200, 333), final=True, state=torch.float32),
    Case(S=130, K=64, V=32, dtype=BF16),
)


@pytest.fixture(params=tuple(by_wheels.REFUSALS))
def wheel(request):
    functions = by_wheels.fla_functions() if request.param == "fla" else by_wheels.qla_functions()
    if isinstance(functions, str):
        pytest.skip(functions)
    return request.param


def call(wheel, case):
    return lambda *ts: onepass.gated_delta_rule(*ts[:5], initial_state=ts[5], backend=wheel, **options_of(case))


def taken(wheel, case):
    """The case's tensors, which ask for gradients; skips where the wheel refuses them."""
    tensors = [None if t is None else t.requires_grad_() for t in draw(case)[0].values()]
    options = options_of(case) | {"initial_state": tensors[5]}
    reason = onepass.explain("gated_delta_rule", *tensors[:5], **options).reasons[wheel]
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


def test_documents_are_as_they_are_alone(wheel):
    case = CASES[2]
    tensors = taken(wheel, case)
    y, final = call(wheel, case)(*tensors)
    for document, (first, end) in enumerate(pairwise((0, *case.ends))):
        state, own = tensors[5][document : document + 1], [t[:, first:end] for t in tensors[:5]]
        if first == end:
            assert torch.equal(final[document], state[0])
        else:
            alone = onepass.gated_delta_rule(*own, initial_state=state, output_final_state=True, backend=wheel)
            assert equal((y[:, first:end], final[document : document + 1]), alone)


def test_wrong_boundaries_make_nan(wheel):
    case = CASES[2]
    tensors = taken(wheel, case)
    wrong = torch.tensor((0, 200, 100, 1 << 20, 300, 333), dtype=torch.int32, device="cuda")
    y = onepass.gated_delta_rule(*tensors[:5], cu_seqlens=wrong, backend=wheel)
    assert y.isnan().all() and all(t.isnan().any() for t in torch.autograd.grad(y.sum(), tensors[:5]))
