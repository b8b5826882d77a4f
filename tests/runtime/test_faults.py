"""Faults in the middle of a step: what must last is as it was, and the next step works."""

import pytest
import torch
from ops.calls import DELEGATED

from onepass import use_backend
from onepass.gradients.adamw import AdamW
from onepass.kernels.language import INTERPRETED, triton
from onepass.nn import MLP, LinearCrossEntropy, NormLinear, VocabParallelEmbedding
from onepass.parallel import MainGrads
from onepass.testing.contract import subjects
from onepass.testing.faults import (
    Fault,
    InjectedError,
    Step,
    allocation_faults,
    broken_by_fork,
    broken_by_threads,
    hook_faults,
    inject,
    interrupt_faults,
    op_step,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAMPLES = sorted(subjects("torch", DEVICE))
MOST = 1 if INTERPRETED else None  # faults of a kind in an op's kernels


# x and its residual get one gradient, which PyTorch copies for the second after the op's backward has ended.
SHARES_A_GRADIENT = ("dropout_add", "dropout_add: bias", "layer_norm: residual", "rms_norm: residual", "norm_linear: all outputs")

# In the interpreter, one sample of each op by its kernels.
CALLS = [(sample, "torch") for sample in SAMPLES]
BY_KERNELS = [] if triton is None else [sample for sample in SAMPLES if not sample.startswith(DELEGATED)]
CALLS += [(sample, "triton") for sample in BY_KERNELS if not (INTERPRETED and ":" in sample)]


@pytest.mark.parametrize(("sample", "backend"), CALLS)
def test_an_op_survives_faults(sample, backend):
    step = op_step(subjects(backend, DEVICE)[sample])
    most = MOST if backend == "triton" else 4 if ":" in sample else 20
    known = ("main_grad",) if sample in SHARES_A_GRADIENT else ()
    report = inject(step, allocation_faults(step, most), known)
    assert report.happened
    assert not report.broken, "\n".join(report.broken)
    report = inject(step, hook_faults())
    assert not report.broken, "\n".join(report.broken)
    interrupts = {1: 2, 4: 4}.get(most, 12)
    report = inject(step, interrupt_faults(step, interrupts), ("main_grad",))  # which is the caller's to clear
    assert report.happened
    assert not report.broken, "\n".join(report.broken)


@pytest.mark.parametrize("sample", SAMPLES)
def test_an_op_runs_in_threads(sample):
    backend = "torch" if INTERPRETED or triton is None else "triton"  # the interpreter is for one thread
    assert not broken_by_threads(lambda: op_step(subjects(backend, DEVICE)[sample]))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="CUDA does not fork")
def test_ops_run_in_a_fork():
    calls = [*[("torch", sample) for sample in SAMPLES], *[("triton", sample) for sample in BY_KERNELS]]
    assert not broken_by_fork([op_step(subjects(backend, DEVICE)[sample]) for backend, sample in calls])


# ---- a model, MainGrads and AdamW ----


def model_steps(dtype=torch.float32):
    """Return a model, the step that makes its gradients, and the step that updates it."""
    torch.manual_seed(0)
    embedding, head = VocabParallelEmbedding(23, 8), LinearCrossEntropy(8, 23, bias=True)
    model = torch.nn.ModuleList([embedding, NormLinear(8, 8, norm="layer_norm"), MLP(8, 12), head]).to(DEVICE, dtype)
    main_grads = MainGrads(model)
    optimizer = AdamW(main_grads, lr=0.1)
    tokens = torch.arange(18, device=DEVICE).view(2, 9).remainder(23)

    def gradients():
        main_grads.zero_()
        h = embedding(tokens[:, :-1])
        for layer in model[1:-1]:
            h = layer(h)
        head(h, tokens[:, 1:]).backward()
        main_grads.finish()
        return {f"main_grad of {name}": parameter.main_grad for name, parameter in model.named_parameters()}

    def state():
        found = dict(model.named_parameters())
        for name, parameter in model.named_parameters():
            found |= {f"{kind} of {name}": t for kind, t in optimizer.state[parameter].items()}
        return found

    def update():
        optimizer.step(max_norm=1.0)
        return state()

    def prepare():  # so that the update has options that the one before did not have
        optimizer.param_groups[0]["lr"] = 0.3
        optimizer.step(max_norm=2.0)
        optimizer.param_groups[0]["lr"] = 0.1

    gradients()
    return model, Step("gradients", gradients, state), Step("update", update, state, prepare=prepare)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_a_model_survive_faults(dtype):
    _, step, _ = model_steps(dtype)
    with use_backend("torch"):
        for faults in (allocation_faults(step), hook_faults(), interrupt_faults(step, 30)):
            report = inject(step, faults)
            assert report.happened
            assert not report.broken, "\n".join(report.broken)


def test_an_update_by_the_formula_says_where_it_broke_off():
    """Its step number, then its moments, are written before all is allocated."""
    _, _, step = model_steps(torch.bfloat16)
    before, broken_off = {name: t.clone() for name, t in step.lasting().items()}, 0
    with use_backend("torch"):
        for fault in allocation_faults(step):
            with pytest.raises(torch.OutOfMemoryError) as raised, fault.context():
                step.run()
            ahead = [name for name, t in step.lasting().items() if not t.equal(before[name])]
            assert not ahead or "exp_avg_sq are ahead, and the step is counted. Load a checkpoint" in str(raised.value)
            broken_off += bool(ahead)
            for name, t in step.lasting().items():
                t.data.copy_(before[name])
    assert broken_off


@pytest.mark.skipif(triton is None, reason="triton is not installed")
def test_an_update_by_kernels_survives_faults():
    _, _, step = model_steps(torch.bfloat16)
    with use_backend("triton"):
        report = inject(step, allocation_faults(step, 4))
        assert report.happened
        assert not report.broken, "\n".join(report.broken)
        report = inject(step, interrupt_faults(step, 6), exempt=("",))  # before or after a launch: it can't say
        assert report.happened
        assert not report.broken, "\n".join(report.broken)


@pytest.mark.parametrize("where", ("forward", "gradient", "accumulated"))
def test_gradients_of_a_model_survive_a_hook_that_raises(where):
    model, step, _ = model_steps()
    layer = model[2]
    parameter = next(layer.parameters())

    def raises(*args):
        raise InjectedError(where)

    class Hooked:
        def __enter__(self):
            register = {
                "forward": layer.register_forward_hook,
                "gradient": parameter.register_hook,
                "accumulated": parameter.register_post_accumulate_grad_hook,
            }[where]
            self.handle = register(raises)

        def __exit__(self, *error):
            self.handle.remove()

    with use_backend("torch"):
        report = inject(step, [Fault(f"{where} hook", Hooked, InjectedError)])
    assert report.happened == 1
    assert not report.broken, "\n".join(report.broken)


# ---- the kit itself ----


def _counter_step(careful):
    """Return a step that adds 1 to a tensor, before or after it allocates."""
    total = torch.zeros(3)

    def run():
        if not careful:
            total.add_(1)
        torch.empty(5)
        if careful:
            total.add_(1)
        return {"total": total}

    return Step("counter", run, lambda: {"total": total})


@pytest.mark.parametrize("careful", (True, False))
def test_a_change_before_an_error_is_found(careful):
    step = _counter_step(careful)
    report = inject(step, allocation_faults(step))
    assert report.happened
    assert bool(report.broken) is not careful
    assert careful or "total is not as it was" in report.broken[0]
    assert not inject(step, allocation_faults(step), ("total",)).broken


def test_an_error_may_name_what_it_left():
    total = torch.zeros(3)

    class Fails:
        def __enter__(self):
            self.fails = True
            steps.append(self)

        def __exit__(self, *error):
            steps.clear()

    steps = []

    def run():
        total.add_(1)
        if steps:
            raise InjectedError("total has been added to")
        return {"total": total}

    assert not inject(Step("told", run, lambda: {"total": total}), [Fault("told", Fails, InjectedError)]).broken
