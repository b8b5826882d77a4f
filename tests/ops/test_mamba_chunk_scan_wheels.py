"""mamba_chunk_scan by wheels, of which there are stand-ins here: how they are called, which is chosen, and the contract."""

from types import SimpleNamespace

import pytest
import torch
from ops.calls import equal, gradients, needs_triton
from ops.oracle import BF16, DEVICE, FP32
from ops.scan_oracle import Case, draw, judge_case, options_of, small_cases
from ops.scan_wheels import stand_in

import onepass
import onepass.ops.scan.mamba_chunk_scan as module
from onepass.kernels import fla
from onepass.ops.scan import by_wheels
from onepass.ops.scan.chunks import ScanInputs
from onepass.runtime.wheels import find_wheel
from onepass.testing.contract import CHECKS, subjects
from onepass.testing.row_contract import gives_rows_the_same_bits

pytestmark = [needs_triton, pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the wheels themselves")]
WHEELS = ("mamba_ssm", "fla")


def has_states_of_documents(case):
    return case.ends is not None and (case.final or case.state is not None)


CASES = [(case, "mamba_ssm") for case in small_cases() if not has_states_of_documents(case)]
CASES += [(case, "fla") for case in small_cases() if case.dtype is FP32]  # in 16 bits x times dt is rounded


@pytest.mark.parametrize(("case", "wheel"), CASES, ids=str)
def test_within_the_budget_of_the_recurrence(case, wheel):
    backend = ("triton", wheel)[small_cases().index(case) % 2]  # either name is that of the same kernels
    with stand_in(wheel=wheel) as wheels:
        report = judge_case(module, case, backend)
    assert report, f"{case}\n{report}"
    assert set(wheels.called) == {wheel}


HELD = tuple(check for check in CHECKS if check is not gives_rows_the_same_bits)  # these refuse: a test of its own


@pytest.mark.parametrize("check", HELD, ids=lambda check: check.__name__)
@pytest.mark.parametrize("sample", ("mamba_chunk_scan", "mamba_chunk_scan: documents"))
@pytest.mark.parametrize("wheel", WHEELS)
def test_it_holds_the_contract(sample, wheel, check):
    if wheel == "mamba_ssm" and ":" in sample:
        pytest.skip("it has no states of documents")
    with stand_in(wheel=wheel):
        check(subjects("triton", torch.device(DEVICE))[sample])


def given(**changes):
    case = Case(dtype=BF16, **changes)
    x, dt, A, B, C, D, bias, state = (None if t is None else t.requires_grad_() for t in draw(case)[0].values())
    return (x, dt, A, B, C), {"D": D, "dt_bias": bias, "initial_states": state, **options_of(case)}


def test_none_runs_under_batch_invariant():
    tensors, options = given()
    with stand_in() as wheels, onepass.batch_invariant():
        assert "nothing, as mamba-ssm" in onepass.explain("mamba_chunk_scan", *tensors, **options).variant
        for backend, who in (("auto", "mamba_chunk_scan by mamba-ssm"), ("fla", "backend 'fla'")):
            with pytest.raises(RuntimeError, match=f"{who} .*batch_invariant"):
                onepass.mamba_chunk_scan(*tensors, **options, backend=backend)
    assert wheels.called == []


def test_the_first_wheel_that_takes_a_call_is_chosen():
    tensors, options = given()
    with stand_in() as wheels:
        said = onepass.explain("mamba_chunk_scan", *tensors, **options)
        onepass.mamba_chunk_scan(*tensors, **options)
        onepass.mamba_chunk_scan(*tensors, **options, backend="fla")
    assert wheels.called == ["mamba_ssm", "fla"]
    assert said.backend == "triton" and said.variant.startswith("mamba-ssm") and "256 tokens" in said.variant
    assert said.reasons["fla"] is None
    with stand_in(wheel="fla") as wheels:
        said = onepass.explain("mamba_chunk_scan", *tensors, **options)
        onepass.mamba_chunk_scan(*tensors, **options)
        with pytest.raises(RuntimeError, match="'mamba_ssm' can't take this call of mamba_chunk_scan: it is not installed"):
            onepass.mamba_chunk_scan(*tensors, backend="mamba_ssm")
    assert wheels.called == ["fla"] and said.variant.startswith("FLA") and "64 tokens" in said.variant


@pytest.mark.parametrize("wheel", WHEELS)
def test_main_grads_of_vectors(wheel):
    tensors, options = given()
    vectors = [options["D"], options["dt_bias"]]
    with stand_in(wheel=wheel):
        exact = torch.autograd.grad(onepass.mamba_chunk_scan(*tensors, **options).float().square().sum(), vectors)
        for vector in vectors:
            vector.main_grad = torch.ones_like(vector, dtype=FP32)
        onepass.mamba_chunk_scan(*tensors, **options).float().square().sum().backward()
    for vector, grad in zip(vectors, exact, strict=True):
        torch.testing.assert_close(vector.main_grad, 1 + grad.float(), rtol=2e-2, atol=2e-2 * float(grad.abs().max()))
        assert vector.grad is None


def test_states_of_documents_are_fla_s_and_its_host_reads():
    tensors, options = given(B=1, ends=(3, 70))
    with stand_in():
        assert "host reads" not in onepass.explain("mamba_chunk_scan", *tensors, **options).variant
        for more in ({"return_final_states": True}, {"initial_states": torch.zeros(2, 4, 5, 8)}):
            said = onepass.explain("mamba_chunk_scan", *tensors, **options | more)
            assert "FLA" in said.variant and "host reads" in said.variant
            assert "no states of documents" in said.reasons["mamba_ssm"]


@pytest.mark.parametrize("wheel", WHEELS)
def test_wrong_boundaries_make_nan_and_reach_no_kernel(monkeypatch, wheel):
    monkeypatch.setattr("onepass.runtime.documents.are_readable", lambda cu_seqlens: False)
    tensors, _ = given(B=1, ends=(1, 2, 70))
    for ends in ((0, 9, 5, 70), (0, 4, 8, 60), (0, 4, 1 << 20, 70)):
        cu_seqlens = torch.tensor(ends, dtype=torch.int32)

        def call(*ts, cu_seqlens=cu_seqlens):
            return onepass.mamba_chunk_scan(*ts, cu_seqlens=cu_seqlens, backend=wheel)

        with stand_in(wheel=wheel):
            y, *grads = gradients(call, tensors)
        assert y.isnan().all() and all(t.isnan().any() for t in grads)


@pytest.mark.parametrize("wheel", WHEELS)
def test_a_state_that_nobody_differentiates_and_frozen_tensors(wheel):
    tensors, options = given(state=BF16, final=True)
    state = options.pop("initial_states")
    asked = [*tensors, options["D"], options["dt_bias"]]
    with stand_in(wheel=wheel):
        y, final = onepass.mamba_chunk_scan(*tensors, initial_states=state.detach(), **options)
        grads = torch.autograd.grad(y.sum(), asked)
        again = torch.autograd.grad(onepass.mamba_chunk_scan(*tensors, initial_states=state, **options)[0].sum(), [*asked, state])
    assert final.dtype is FP32 and equal(grads, again[:7]) and again[7].dtype is BF16
    assert [t.dtype for t in grads] == [t.dtype for t in asked]


# ---- who refuses what ----


def inputs(device="cuda", P=64, N=128, dtype=BF16, S=8, **changes):
    """What a refusal looks at, of a GPU that is not here."""

    def tensor(*shape, dtype=dtype):
        t = torch.empty(shape, dtype=dtype, device="meta")
        return SimpleNamespace(is_cuda=device == "cuda", device=device, dtype=dtype, shape=t.shape, stride=t.stride)

    rows = tensor(1, S, 2, N)
    return ScanInputs(tensor(1, S, 4, P), tensor(1, S, 4), tensor(4), rows, rows, *[None] * 4)._replace(**changes)


@pytest.fixture
def installed(monkeypatch):
    for name in ("mamba_functions", "fla_functions"):
        monkeypatch.setattr(by_wheels, name, lambda: (None, None, None))
    monkeypatch.setattr(fla, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(fla, "triton", SimpleNamespace(__version__="3.7.1"))


def test_fla_is_refused_where_its_gradients_are_wrong(monkeypatch, installed):
    monkeypatch.setattr(fla, "triton", SimpleNamespace(__version__="3.6.0"))
    assert "wrong with Triton" in by_wheels.fla_refuses(inputs(), False, True)
    assert by_wheels.fla_refuses(inputs(), False, False) is None  # forward is right
    monkeypatch.setattr(fla, "compute_capability", lambda device: (10, 0))
    assert by_wheels.fla_refuses(inputs(), False, True) is None


def test_what_each_refuses(monkeypatch, installed):
    for refuses in by_wheels.REFUSALS.values():
        assert refuses(inputs(), True, True) is None
        assert "x is on cpu" in refuses(inputs("cpu"), True, True)
        assert "x is torch.float32" in refuses(inputs(dtype=FP32), True, True)
        assert "C is torch.float16" in refuses(inputs(C=inputs(dtype=torch.float16).C), True, True)
        assert "512" in refuses(inputs(N=512), True, True)
    assert "heads of 63" in by_wheels.fla_refuses(inputs(P=63), True, True)
    for large in (inputs(S=1 << 27), inputs(dt=SimpleNamespace(shape=(1, 1 << 20, 4), stride=lambda: (0, 1 << 12, 1)))):
        assert "32 bits" in by_wheels.mamba_refuses(large, True, True)
    assert by_wheels.mamba_refuses(inputs(S=1 << 20), True, True) is None
    documents = inputs(cu_seqlens=object())
    assert by_wheels.mamba_refuses(documents, False, True) is None
    assert "states of documents" in by_wheels.mamba_refuses(documents, True, True)
    assert "states of documents" in by_wheels.mamba_refuses(documents._replace(states=object()), False, True)
    monkeypatch.setattr(by_wheels, "mamba_functions", lambda: "mamba-ssm is not installed (pip install mamba-ssm)")
    monkeypatch.setattr(by_wheels, "fla_functions", lambda: "FLA is not installed")
    name, reason = find_wheel(by_wheels.REFUSALS, inputs(), True, True)
    assert not name and reason == "mamba-ssm is not installed (pip install mamba-ssm); FLA is not installed"


def test_an_fla_whose_exponents_are_natural_is_not_taken(monkeypatch):
    by_wheels.fla_functions.cache_clear()
    monkeypatch.setattr(by_wheels, "find_functions", lambda wheel: (lambda: None,) * 4)
    monkeypatch.setattr(by_wheels, "version_of", lambda package: "0.3.0")
    try:
        assert "FLA 0.3.0 is older" in by_wheels.fla_functions()
    finally:
        by_wheels.fla_functions.cache_clear()
