"""gated_delta_rule by wheels, of which there are stand-ins here: how they are called, which is chosen, and the contract."""

from types import SimpleNamespace

import pytest
import torch
from ops.calls import equal, gradients, needs_triton
from ops.delta_oracle import Case, draw, judge_case, options_of, small_cases
from ops.delta_wheels import stand_in
from ops.oracle import BF16, DEVICE, FP32

import onepass
import onepass.ops.delta.gated_delta_rule as module
from onepass.kernels import fla
from onepass.ops.delta import by_wheels
from onepass.ops.delta.by_wheels import DeltaInputs
from onepass.runtime.wheels import find_wheel
from onepass.testing.contract import CHECKS, subjects
from onepass.testing.row_contract import gives_rows_the_same_bits

pytestmark = [needs_triton, pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the wheels themselves")]
WHEELS = ("fla", "flash_qla")


@pytest.mark.parametrize("wheel", WHEELS)
@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_within_the_budget_of_the_recurrence(case, wheel):
    backend = ("triton", wheel)[small_cases().index(case) % 2]  # either name is that of the same kernels
    with stand_in(wheel=wheel) as wheels:
        report = judge_case(module, case, backend)
    assert report, f"{case}\n{report}"
    assert wheels.called == [wheel] * 2


HELD = tuple(check for check in CHECKS if check is not gives_rows_the_same_bits)  # these refuse: a test of its own


@pytest.mark.parametrize("check", HELD, ids=lambda check: check.__name__)
@pytest.mark.parametrize("sample", ("gated_delta_rule", "gated_delta_rule: documents"))
def test_it_holds_the_contract(sample, check):
    with stand_in(wheel="fla"):
        check(subjects("triton", torch.device(DEVICE))[sample])


def given(**changes):
    case = Case(dtype=BF16, **changes)
    tensors = [None if t is None else t.requires_grad_() for t in draw(case)[0].values()]
    return tensors, options_of(case)


def test_none_runs_under_batch_invariant():
    tensors, _ = given()
    with stand_in() as wheels, onepass.batch_invariant():
        assert "nothing, as FlashQLA" in onepass.explain("gated_delta_rule", *tensors[:5]).variant
        for backend, who in (("auto", "gated_delta_rule by FlashQLA"), ("fla", "backend 'fla'")):
            with pytest.raises(RuntimeError, match=f"{who} .*batch_invariant"):
                onepass.gated_delta_rule(*tensors[:5], backend=backend)
    assert wheels.called == []


def test_the_first_wheel_that_takes_a_call_is_chosen():
    tensors, _ = given()
    with stand_in() as wheels:
        said = onepass.explain("gated_delta_rule", *tensors[:5])
        onepass.gated_delta_rule(*tensors[:5])
        onepass.gated_delta_rule(*tensors[:5], backend="fla")
    assert wheels.called == ["flash_qla", "fla"]
    assert said.backend == "triton" and said.variant.startswith("FlashQLA") and said.reasons["fla"] is None
    with stand_in(wheel="fla") as wheels:
        said = onepass.explain("gated_delta_rule", *tensors[:5], cu_seqlens=None)
        onepass.gated_delta_rule(*tensors[:5])
        with pytest.raises(RuntimeError, match="'flash_qla' can't take this call of gated_delta_rule: it is not installed"):
            onepass.gated_delta_rule(*tensors[:5], backend="flash_qla")
    assert wheels.called == ["fla"] and said.variant.startswith("FLA")


def test_documents_are_said_to_be_read():
    tensors, options = given(B=1, ends=(3, 70))
    with stand_in():
        assert "host reads" in onepass.explain("gated_delta_rule", *tensors[:5], cu_seqlens=options["cu_seqlens"]).variant


@pytest.mark.parametrize("wheel", WHEELS)
def test_wrong_boundaries_make_nan_and_reach_no_kernel(monkeypatch, wheel):
    monkeypatch.setattr("onepass.runtime.documents.are_readable", lambda cu_seqlens: False)
    tensors, _ = given(B=1, ends=(1, 2, 70))
    for ends in ((0, 9, 5, 70), (0, 4, 8, 60), (0, 4, 1 << 20, 70)):
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)

        def call(*ts, cu_seqlens=cu_seqlens):
            return onepass.gated_delta_rule(*ts[:5], cu_seqlens=cu_seqlens, backend=wheel)

        with stand_in(wheel=wheel):
            y, *grads = gradients(call, tensors)
        assert y.isnan().all() and all(t.isnan().any() for t in grads)


def test_a_state_that_nobody_differentiates_and_frozen_tensors():
    tensors, _ = given(state=BF16)
    with stand_in():
        y, final = onepass.gated_delta_rule(*tensors[:5], initial_state=tensors[5].detach(), output_final_state=True)
        grads = torch.autograd.grad(y.sum(), tensors[:5])
        again = torch.autograd.grad(onepass.gated_delta_rule(*tensors[:5], initial_state=tensors[5]).sum(), tensors)
    assert final.dtype is FP32 and equal(grads, again[:5]) and again[5].dtype is BF16
    assert [t.dtype for t in grads] == [t.dtype for t in tensors[:5]]


@pytest.mark.parametrize("wheel", WHEELS)
def test_tensors_at_odd_addresses_are_copied(wheel):
    """As sequences of a batch are, past the first, or what lies in a flat buffer."""
    tensors, _ = given(state=BF16)
    odd = [torch.cat([t.new_zeros(1), t.detach().flatten()])[1:].view(t.shape).requires_grad_() for t in tensors]
    assert all(t.data_ptr() % 16 for t in odd)

    def call(*ts):
        found = onepass.gated_delta_rule(*ts[:5], initial_state=ts[5], output_final_state=True, backend=wheel)
        return [torch.cat([t.new_zeros(1), t.flatten()])[1:] for t in found]  # whose gradients lie so, too

    def gradients_of(ts):
        found = call(*ts)
        return [*found, *torch.autograd.grad(sum(t.float().square().sum() for t in found), ts)]

    with stand_in(wheel=wheel):
        assert equal(gradients_of(tensors), gradients_of(odd))


# ---- who refuses what ----


def inputs(device="cuda", K=128, V=128, dtype=BF16, **changes):
    """What a refusal looks at, of a GPU that is not here."""
    t = SimpleNamespace(is_cuda=device == "cuda", device=device, dtype=dtype, shape=(1, 8, 2, K))
    return DeltaInputs(t, t, SimpleNamespace(**{**vars(t), "shape": (1, 8, 2, V)}), None, None, None, None)._replace(**changes)


@pytest.fixture
def installed(monkeypatch):
    for name in ("fla_functions", "qla_functions"):
        monkeypatch.setattr(by_wheels, name, lambda: (None, None, None))
    for owner in (by_wheels, fla):
        monkeypatch.setattr(owner, "compute_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("version", "wrong"),
    [("3.3.1", False), ("3.4.0", True), ("3.6.0", True), ("3.7.0", True), ("3.7.1", False), ("3.10.0+git", False)],
)
def test_fla_is_refused_where_its_gradients_are_wrong(monkeypatch, installed, version, wrong):
    monkeypatch.setattr(fla, "triton", SimpleNamespace(__version__=version))
    reason = by_wheels.fla_refuses(inputs(), True)
    assert (reason is not None) is wrong
    assert not wrong or (version in reason and "Hopper" in reason and "3.7.1" in reason and "flash-qla" in reason)
    assert by_wheels.fla_refuses(inputs(), False) is None  # forward is right
    monkeypatch.setattr(fla, "compute_capability", lambda device: (10, 0))
    assert by_wheels.fla_refuses(inputs(), True) is None


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_wheel_that_is_named_compiles(wheel):
    tensors, _ = given()

    def call(*inputs):
        return onepass.gated_delta_rule(*inputs, backend=wheel)

    with stand_in(wheel=wheel):
        expected = gradients(call, tensors[:5])
        torch._dynamo.reset()
        assert equal(expected, gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), tensors[:5]))


def test_what_each_refuses(monkeypatch, installed):
    monkeypatch.setattr(fla, "triton", SimpleNamespace(__version__="3.7.1"))
    for refuses in by_wheels.REFUSALS.values():
        assert refuses(inputs(), True) is None
        assert "q is on cpu" in refuses(inputs("cpu"), True)
        assert "q is torch.float32" in refuses(inputs(dtype=FP32), True)
        assert "k is torch.float16" in refuses(inputs(k=inputs(dtype=torch.float16).k), True)
    assert "heads of 64 and 128 are not FlashQLA's 128" in by_wheels.qla_refuses(inputs(K=64), True)
    assert "wider than FLA's 256" in by_wheels.fla_refuses(inputs(K=320), True)
    monkeypatch.setattr(by_wheels, "compute_capability", lambda device: (8, 0))
    assert "9.0, 10.0 or 10.3, and this one is 8.0" in by_wheels.qla_refuses(inputs(), True)
    monkeypatch.setattr(by_wheels, "fla_functions", lambda: "FLA is not installed (pip install flash-linear-attention)")
    name, reason = find_wheel(by_wheels.REFUSALS, inputs(), True)
    assert not name and "FlashQLA's gradients need" in reason and "FLA is not installed" in reason
