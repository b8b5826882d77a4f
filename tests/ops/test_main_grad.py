"""main_grad of every parameter that a sample call of an op has, by formulas and by kernels, in every kind of pass.

How products and sums are added: tests/runtime/test_main_grad.py, test_main_grad_of_vectors.py. By each plan of a head:
test_linear_cross_entropy_main_grad.py. In eight bits: test_fp8_autograd.py. Failures: the contract, test_main_grad_failures.py.
"""

from dataclasses import replace

import pytest
import torch
from ops.calls import Operators, equal, nearly_equal, needs_triton, relative
from ops.oracle import BF16, DEVICE, FP32
from torch.utils.checkpoint import checkpoint

from onepass.gradients.main_grad import captured_by_grad
from onepass.testing.contract import subjects
from onepass.testing.poison import unchanged
from onepass.testing.subject import weighted_sum

SUBJECTS = {backend: subjects(backend, torch.device(DEVICE)) for backend in ("torch", "triton")}
for _found in SUBJECTS.values():
    _plain = _found["activation_linear"]
    for _save in ("fp8", "offload"):
        _found[f"activation_linear: {_save}"] = replace(
            _plain, sample=replace(_plain.sample, options=_plain.sample.options | {"save": _save})
        )


def is_parameter(name):
    return name.endswith(("weight", "bias", "lora.a", "lora.b")) and name not in ("token_weight", "teacher_weight")


SAMPLES = sorted(name for name, subject in SUBJECTS["torch"].items() if any(map(is_parameter, subject.names())))
SAMPLES.remove("cross_entropy: probabilities")  # its weight is of classes
SAMPLES.remove("route: sigmoid, groups, bias")  # its bias has no gradient
samples = pytest.mark.parametrize("sample", SAMPLES)
by_both = pytest.mark.parametrize("backend", [pytest.param("triton", marks=needs_triton), "torch"])


class Call:
    """A sample call whose parameters carry main_grads of ones, and the gradients that it has without these."""

    def __init__(self, sample, backend, main=FP32, flag=True, dtype=FP32):
        if backend == "triton" and sample.startswith("mamba_chunk_scan"):
            pytest.skip("its kernels are wheels', and want a GPU")
        self.subject = SUBJECTS[backend][sample]
        self.tensors = self.subject.tensors(dtype)
        named = dict(zip(self.subject.names(), self.tensors, strict=True))
        self.asking = [t for t in self.tensors if t.requires_grad]
        plain = dict(zip(map(id, self.asking), self.subject.gradients(self.tensors), strict=True))
        self.parameters = {name: t for name, t in named.items() if t.requires_grad and is_parameter(name)}
        self.values = [t for name, t in named.items() if t.requires_grad and not is_parameter(name)]
        self.expected = [plain[id(t)] for t in self.parameters.values()]
        self.of_values = [plain[id(t)] for t in self.values]
        for t in self.parameters.values() if main is not None else ():
            t.main_grad = torch.ones_like(t, dtype=main, requires_grad=False)
            if flag:
                t.grad_added_to_main_grad = False

    def loss(self):
        return weighted_sum(self.subject.run(*self.tensors))

    def main_grads(self):
        return {name: t.main_grad for name, t in self.parameters.items()}

    def check(self, times, flag=True, rtol=1e-5):
        """Assert that so many backward passes have been gathered, and told as Megatron's hooks are."""
        for (name, t), once in zip(self.parameters.items(), self.expected, strict=True):
            close = {"rtol": rtol, "atol": 2 * rtol * max(1.0, float(once.abs().max()))}
            torch.testing.assert_close(t.main_grad, 1 + times * once, msg=lambda m, name=name: f"{name}: {m}", **close)
            if flag:
                assert t.grad_added_to_main_grad is True and not t.grad.any() and t.grad.dtype is t.dtype, name
            else:
                assert t.grad is None and not hasattr(t, "grad_added_to_main_grad"), name

    def untouched(self):
        return all(t.grad_added_to_main_grad is False and t.grad is None for t in self.parameters.values())


@by_both
@samples
def test_16_bit_weights_gather_over_microbatches(sample, backend):
    """Sums are in fp32, and rounded to main_grad's type at most: bf16 in every third sample of a backend."""
    main = BF16 if (SAMPLES.index(sample) + (backend == "torch")) % 3 == 0 else FP32
    call = Call(sample, backend, main, dtype=BF16)
    for t in call.parameters.values():
        t.main_grad.zero_()
    places = [t.main_grad.data_ptr() for t in call.parameters.values()]
    call.loss().backward()
    for t, once in zip(call.parameters.values(), call.expected, strict=True):
        if main is FP32 and once.any():
            assert not t.main_grad.equal(t.main_grad.bfloat16().float()), "rounded before it was added"
    for _ in range(2):
        call.loss().backward()
    for t, once in zip(call.parameters.values(), call.expected, strict=True):
        assert relative(t.main_grad, 3 * once.double()) < 1e-2 or (not once.any() and not t.main_grad.any())
    assert [t.main_grad.data_ptr() for t in call.parameters.values()] == places


@by_both
@samples
def test_each_kind_of_pass_gets_what_it_asks_for(sample, backend):
    """Also a second one of a graph. A dispatch mode around backward alone sees the same, by registered ops."""
    call = Call(sample, backend)
    parameters = list(call.parameters.values())
    with unchanged(**call.main_grads()):
        assert equal(torch.autograd.grad(call.loss(), parameters), call.expected)
        for value, grad in zip(call.values, call.of_values, strict=True):
            assert nearly_equal(torch.autograd.grad(call.loss(), value), [grad])
            call.loss().backward(inputs=[value])
    assert call.untouched()
    loss = call.loss()
    loss.backward(retain_graph=True)
    call.check(1)
    loss.backward()
    call.check(2)
    loss = call.loss()
    with Operators() as mode:
        loss.backward()
    call.check(3)
    assert any("onepass.add" in name for name in mode.names), mode.names
    if backend == "torch":
        without = Call(sample, backend, flag=False)
        without.loss().backward()
        without.check(1, flag=False)


@by_both
@samples
def test_frozen_parameters_and_evaluation_write_nothing(sample, backend):
    call = Call(sample, backend)
    main_grads = call.main_grads()
    with torch.no_grad():
        call.loss()
    for t in call.parameters.values():
        t.requires_grad_(False)
    with unchanged(**main_grads):
        loss = call.loss()
        if loss.requires_grad:
            loss.backward()
    for t in call.parameters.values():
        t.main_grad = "not looked at"
    call.loss()
    assert call.untouched()


WRONG = {
    "shape": (lambda t: torch.zeros(*t.shape, 2, device=DEVICE), ValueError),
    "fp64": (lambda t: torch.zeros_like(t, dtype=torch.float64), TypeError),
    "integer": (lambda t: torch.zeros_like(t, dtype=torch.int32), TypeError),
    "device": (lambda t: torch.zeros_like(t, device="meta"), ValueError),
    "no tensor": (lambda t: [0.0], TypeError),
}


@by_both
@samples
def test_a_wrong_main_grad_raises_before_anything_is_written(sample, backend):
    call = Call(sample, backend)
    for make, error in list(WRONG.values())[: 1 if backend == "triton" else None]:  # the same function looks at them
        for name, t in call.parameters.items():
            main_grads = call.main_grads()
            own = main_grads.pop(name)
            t.main_grad = make(t.detach())
            with unchanged(**main_grads), pytest.raises(error, match="main_grad must"):
                call.loss()
            assert call.untouched()
            t.main_grad = own


@by_both
@samples
def test_checkpointing_adds_once(sample, backend):
    """Reentrant by either backend, in turns."""
    reentrant = SAMPLES.index(sample) % 2 == (backend == "torch")
    call = Call(sample, backend)

    def run(*values):
        given = iter(values)
        return call.subject.run(*(next(given) if any(t is value for value in call.values) else t for t in call.tensors))

    if call.values or not reentrant:  # of none that asks for a gradient a reentrant region has none
        weighted_sum(checkpoint(run, *call.values, use_reentrant=reentrant)).backward()
        call.check(1)


@by_both
@samples
def test_megatron_fsdps_buffer_is_overwritten(sample, backend):
    """It is there in backward only, and holds anything."""
    call = Call(sample, backend, None)
    for t in call.parameters.values():
        t.__fsdp_param__, t.place, t.grad_added_to_main_grad = True, torch.empty_like(t, requires_grad=False), False
        t.get_main_grad = lambda t=t: t.place.fill_(float("nan"))
    for _ in range(2):
        call.loss().backward()
        for t, once in zip(call.parameters.values(), call.expected, strict=True):
            torch.testing.assert_close(t.place, once, rtol=1e-5, atol=2e-5 * max(1.0, float(once.abs().max())))
            assert t.grad_added_to_main_grad is True and not t.grad.any()


@by_both
@samples
def test_a_pass_that_warms_up_for_a_graph_leaves_main_grad_and_returns_zeros(sample, backend):
    call = Call(sample, backend)
    parameters = list(call.parameters.values())
    with captured_by_grad(parameters):
        loss = call.loss()
        with unchanged(**call.main_grads()):
            found = torch.autograd.grad(loss, [*parameters, *call.values])
    for grad, t in zip(found, parameters, strict=False):
        assert not grad.any() and grad.dtype is t.dtype
    assert equal(found[len(parameters) :], call.of_values)


@needs_triton
@samples
def test_a_launch_that_fails_leaves_main_grad_and_flags_as_they_were(sample, monkeypatch):
    call = Call(sample, "triton")
    loss = call.loss()

    def fail(*args):
        raise RuntimeError("no launch")

    monkeypatch.setattr("onepass.kernels.launch.Bound.__call__", fail)
    said, before = "", [t.clone() for t in call.main_grads().values()]
    try:
        loss.backward()
    except RuntimeError as error:
        said = str(error)
    if not said:
        pytest.skip("backward launches nothing of ours")
    assert "no launch" in said and call.untouched()
    assert equal(before, [*call.main_grads().values()])


INDUCTOR = "norm_linear: all outputs"  # has a product, and vectors of all kinds. Each takes seconds


_ALONE = [sample for sample in SAMPLES if ":" not in sample or sample.endswith(("fp8", "lora"))]
COMPILED = [(sample, "aot_eager", backend) for sample in _ALONE for backend in ("triton", "torch")]
COMPILED += [(INDUCTOR, "inductor", "triton")]


@pytest.mark.parametrize(
    ("sample", "how", "backend"),
    [pytest.param(*row, marks=needs_triton if row[2] == "triton" else ()) for row in COMPILED],
)
def test_compiled(sample, how, backend):
    """The same sums, flags and placeholders. A pass that asks for something else raises, and writes nothing."""
    call = Call(sample, backend)
    torch._dynamo.reset()
    op, options = call.subject.op.function, {"backend": backend}

    def run(*tensors):
        found = call.subject.sample.call(op, *tensors, **options)
        return found if isinstance(found, tuple) else (found,)

    compiled = torch.compile(run, fullgraph=True, backend=how)
    for times in (1, 2):
        weighted_sum(compiled(*call.tensors)).backward()
        # the compiler sees the formula: with save="fp8" the weight gets the gradient of the exact activation
        call.check(times, rtol=3e-2 if (sample, backend) == ("activation_linear: fp8", "torch") else 1e-5)
    for asked in (call.values[:1], list(call.parameters.values())):
        with unchanged(**call.main_grads()), pytest.raises(RuntimeError, match="main_grad must be gathered"):
            torch.autograd.grad(weighted_sum(compiled(*call.tensors)), asked or list(call.parameters.values()))
