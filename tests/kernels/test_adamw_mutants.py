"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
import torch
from parallel.adamw_oracle import BF16, CASES, FP32, Case, judge

pytest.importorskip("triton")
from onepass.gradients import adamw as module
from onepass.gradients import adamw_formula as formula
from onepass.gradients import adamw_kernels as kernels
from onepass.gradients import adamw_stepper as stepper
from onepass.gradients import main_grads as buffers
from onepass.testing.mutants import copy_package, mutate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = Case(((40000,), (33,)), BF16, ({"lr": 0.1, "weight_decay": 0.5},), 0.5)  # several chunks
MASTERS = [0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 0x00000001, 0x807FFFFF]  # ties, carries, the largest, the smallest
MUTANTS = {  # name: module, function, what is there, what stands there instead, the backend
    # ---- the formula ----
    "no bias correction of exp_avg": (kernels, "_scalars_kernel", " / _correction", " + 0.0 * _correction", "triton"),
    "no bias correction of exp_avg_sq": (kernels, "_scalars_kernel", " / tl.sqrt(_correction(beta2, step))", " + 0.0 * _correction(beta2, step)", "triton"),
    "the step before this one": (kernels, "_correction", "step.to(tl.float64)", "(step.to(tl.float64) + 1)", "triton"),
    "steps are not counted": (kernels, "_scalars_kernel", "steps_ptr + place, step", "steps_ptr + place, step - 1.0", "triton"),
    "betas exchanged": (kernels, "_scalars_kernel", "2 * GROUPS", "GROUPS", "triton"),
    "beta2 in one number": (kernels, "_scalars_kernel", " - _upper(beta2)", " - beta2", "triton"),
    "exp_avg_sq of the gradient": (kernels, "_adamw_kernel", "grad * grad", "grad", "triton"),
    "the gradient unscaled": (kernels, "_adamw_kernel", " * factor", "", "triton"),
    "scaled up too": (kernels, "_scalars_kernel", " = tl.where(factor > 1.0, 1.0, factor)", " += 0.0", "triton"),
    "decay without the rate": (kernels, "_scalars_kernel", "lr * weight_decay", "weight_decay", "triton"),
    "decay after the step": (kernels, "_adamw_kernel", "tl.fma(-decay, master, master) - step", "(1 - decay) * (master - step)", "triton"),
    "decay of the gradient": (kernels, "_adamw_kernel", "tl.fma(-decay, master, master)", "master", "triton"),
    "eps within the root": (kernels, "_adamw_kernel", "tl.sqrt_rn(exp_avg_sq) * correction + eps", "tl.sqrt_rn(exp_avg_sq + eps) * correction", "triton"),
    "eps of the first group": (kernels, "_scalars_kernel", "3 * GROUPS + ", "3 * GROUPS + 0 * ", "triton"),
    "the steps of another": (kernels, "_scalars_kernel", "(steps_ptr + place, mask", "(steps_ptr + place * 0, mask", "triton"),
    "the last row left out": (kernels, "_scalars_kernel", "at < ROWS", "at < ROWS - 1", "triton"),
    "all in the first group": (kernels, "_adamw_kernel", "(chunk + 4) * ROW", "(chunk + 4) * 0", "triton"),
    # ---- masters ----
    "rounded down": (kernels, "_store_master", "(bits + 0x8000)", "bits", "triton"),
    "ties to even": (kernels, "_store_master", " + 0x8000", " + 0x7FFF + ((bits >> 16) & 1)", "triton"),
    "low without a sign": (kernels, "_load_master", "(tl.int32)\n        ", "(tl.int32) & 0xFFFF\n        ", "triton"),
    "low is not kept": (kernels, "_store_master", "state, bits", "state, (bits * 0)", "triton"),
    "NaN rounded as a number": (kernels, "_store_master", "tl.minimum(master.to(tl.int32, bitcast=True), 0x7FC00000)", "master.to(tl.int32, bitcast=True)", "triton"),
    "fp16's master from the weight": (kernels, "_load_master", "== weight, master,", "!= weight, master,", "triton"),
    "fp16's weight is not looked at": (kernels, "_load_master", "== weight, master,", "== weight, master, master) + 0.0 * tl.where(True, 0.0,", "triton"),
    "a zero and old low bits are NaN": (kernels, "_load_master", "master == master, master,", "master == master, master, master) + 0.0 * tl.where(True, 0.0,", "triton"),
    "fp16's master is not kept": (kernels, "_store_master", "state, master, mask=inside", "state, master, mask=inside & (state < 0)", "triton"),
    # ---- places ----
    "the first chunk only": (kernels, "_batch", " + start for", " for", "triton"),
    "a chunk left out": (kernels, "_batch", "numel(), ", "numel(), 2 * ", "triton"),
    "a block left out": (kernels, "_adamw_kernel", "0, size, ", "0, size, 2 * ", "triton"),
    "a value left out": (kernels, "_adamw_kernel", "at < size", "at < size - 1", "triton"),
    "a value too many": (kernels, "_adamw_kernel", "at < size", "at <= size", "triton"),
    "even whatever the sizes": (kernels, "_is_even", "return not stretch.weight.numel() % _MULTIPLE and", "return", "triton"),
    "the state at the gradient's place": (kernels, "_adamw_kernel", "state = state_at + at", "state = at", "triton"),
    "the gradient is left": (kernels, "step_batch", "split, zero", "split, False", "triton"),
    "the gradient is cleared": (kernels, "step_batch", "split, zero", "split, True", "triton"),
    # ---- options and buffers ----
    "options of another group": (stepper, "AdamWStepper._write_options", "(values)", "(values[:-1][::-1] + values[-1:])", "triton"),
    "options are written once": (stepper, "AdamWStepper._write_options", "known[place] != value", "known[place] == 0.0", "triton"),
    "said to be clear when it is not": (module, "AdamW.step", "if zero and ", "if ", "triton"),
    "said to be finished when it is clear": (buffers, "MainGrads.mark_zeroed", 'anything."""\n        self._finished = False', 'anything."""', "triton"),
    # ---- PyTorch's operators ----
    "torch: rounded down": (formula, "_split_", "add_(0x8000).", "", "torch"),
    "torch: NaN rounded as a number": (formula, "_split_", "master.masked_fill_(master.isnan(), torch.nan)", "pass", "torch"),
    "torch: the first block only": (formula, "_blocks", "stretch.weight.numel()", "min(size, stretch.weight.numel())", "torch"),
    "torch: low is not kept": (formula, "step_formula", "rest, master", "rest.clone(), master", "torch"),
    "torch: fp16's weight is not written": (formula, "step_formula", "_put(block.weight, master)", "_put(block.weight, block.weight)", "torch"),
    "torch: low without a sign": (formula, "joined_master", "add_(low)", "add_(low.int() & 0xFFFF)", "torch"),
    "torch: the gradient unscaled": (formula, "step_formula", ".copy_(block.grad).mul_(factor)", ".copy_(block.grad)", "torch"),
    "torch: scaled in place": (formula, "step_formula", "grads[:size].copy_(block.grad).mul_(factor)", "block.grad.mul_(factor)", "torch"),
    "torch: the gradient is left": (stepper, "AdamWStepper._run_formula", "if zero:", "if not zero:", "torch"),
    "torch: steps are not counted": (stepper, "AdamWStepper._run_formula", "+= 1", "+= 0 if self.steps.any() else 1", "torch"),
    "torch: the steps of another": (formula, "_fused", "steps[row]", "steps[0]", "torch"),
    "torch: frozen ones are counted": (stepper, "AdamWStepper._run_formula", "[self.rows[:, 0]]", "[:]", "torch"),
    "torch: fp16's weight is not looked at": (formula, "master_of", "follow_weight(stretch.weight, stretch.rest)", "pass", "torch"),
    "torch: a zero and old low bits are NaN": (formula, "joined_master", "torch.where(master.isnan(), weight, master, out=master)", "pass", "torch"),
}  # fmt: skip


def _used(copy, name):
    """What the copy's stepper uses by this name."""
    return copy.AdamWStepper.run.__globals__[name]


def wrong(copy):
    """What a module gets wrong, or nothing."""

    def named(parameters):
        return copy.MainGrads({f"p{place}": parameter for place, parameter in enumerate(parameters)}.items())

    _used(copy, "step_formula").__globals__["_A_THREADS"] = 1 << 10  # several blocks
    for case in (CASES["small"], CASES["late"]):
        found = judge(copy, named, case)
        if found:
            return found
    for look in (_masters, _schedule, _clear, _alone, _frozen, _written, _large, _still):  # the quick ones first
        found = look(copy, named)
        if found:
            return found
    return ""


def _large(copy, named):
    return next(filter(None, (judge(copy, named, case) for case in (CASES["bf16"], CASES["fp16"], LONG))), "")


def _masters(copy, named):
    """Masters that a step leaves alone; and NaN."""
    bits = torch.tensor(MASTERS, dtype=torch.int64).to(torch.int32)
    parameter = torch.nn.Parameter(torch.zeros(len(bits) + 1, dtype=BF16))
    main_grads = named([parameter])
    optimizer = copy.AdamW(main_grads, weight_decay=0.0)
    optimizer.set_master("p0", "master", bits.view(FP32), 0, len(bits))
    main_grads.finish()
    parameter.main_grad.view(torch.int32)[-1] = 0x7FFFFFFF  # a NaN as GPUs make it
    optimizer.step()
    master = next(tensor for _, kind, tensor, _, _ in optimizer.masters() if kind == "master")
    same = torch.equal(master[:-1].view(torch.int32), bits)
    return "" if same and parameter[-1].isnan() and not parameter[:-1].isnan().any() else f"masters {master.tolist()}"


def _schedule(copy, named):
    parameter = torch.nn.Parameter(torch.zeros(8))
    main_grads = named([parameter])
    optimizer = copy.AdamW(main_grads, lr=1.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    for lr in (1.0, 0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        main_grads.zero_()
        parameter.main_grad.fill_(1.0)
        main_grads.finish()
        optimizer.step()
    return "" if parameter.tolist() == [-1.75] * 8 else f"weights {parameter.tolist()}"


def _clear(copy, named):
    parameter = torch.nn.Parameter(torch.zeros(8))
    main_grads = named([parameter])
    optimizer = copy.AdamW(main_grads)
    for zero in (False, True):
        main_grads.zero_()
        parameter.main_grad.fill_(1.0)
        main_grads.finish()
        optimizer.step(zero=zero)
        if not zero:
            main_grads.zero_()
            if parameter.main_grad.any():
                return "zero_() has left a gradient"
    try:
        main_grads.norm()
    except RuntimeError:
        return ""
    return "a norm of gradients that are gone"


def _alone(copy, named):
    """What lies behind a weight is somebody else's."""
    storage = torch.full((1100,), 7.0, dtype=BF16)
    main_grads = named([torch.nn.Parameter(storage[:1032])])
    optimizer = copy.AdamW(main_grads, lr=0.5, weight_decay=1.0)
    main_grads.finish()
    optimizer.step()
    found = storage.tolist() == [3.5] * 1032 + [7.0] * 68
    return "" if found else f"{storage[1030:1036]} behind a weight"


def _still(copy, named):
    """One gradient again and again: its square is what exp_avg_sq comes to, and stays at."""
    grad = torch.rand(512) + 0.5
    main_grads = named([torch.nn.Parameter(torch.zeros(512))])
    optimizer = copy.AdamW(main_grads, lr=0.0)
    optimizer.set_master("p0", "exp_avg_sq", grad.square(), 0, 512)
    main_grads.named[0][1].main_grad.copy_(grad)
    main_grads.finish()
    for _ in range(200):
        optimizer.step()
    found = next(tensor for _, kind, tensor, _, _ in optimizer.masters() if kind == "exp_avg_sq")
    off = (found.double() / grad.double().square() - 1).mean().abs().item()
    return "" if off < 2e-6 else f"exp_avg_sq wanders by {off:.2g}"


def _frozen(copy, named):
    """Forty weights, of which all but the last stand still in the first two steps. The last one's bias correction differs."""
    parameters = [torch.nn.Parameter(torch.zeros(8)) for _ in range(40)]
    main_grads = named(parameters)
    optimizer = copy.AdamW(main_grads, lr=1.0, eps=0.0, weight_decay=0.0)
    for step in range(3):
        for parameter in parameters[:-1]:
            parameter.requires_grad_(step == 2)
        main_grads.zero_()
        for parameter in parameters:
            parameter.main_grad.fill_(1.0)
        main_grads.finish()
        optimizer.step()
    far = [parameter.mean().item() for parameter in parameters]
    counted = [optimizer.state[parameter]["step"].item() for parameter in parameters]
    found = torch.allclose(torch.tensor(far), torch.tensor([-1.0] * 39 + [-3.0])) and counted == [1] * 39 + [3]
    return "" if found else f"weights {far}, counted {counted}"


def _written(copy, named):
    """Weights that are written between two steps."""
    for dtype in (BF16, torch.float16):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 64).to(dtype))
        main_grads = named([parameter])
        optimizer = copy.AdamW(main_grads, lr=1e-3, weight_decay=0.0)
        for kept in (1, 0):
            parameter.data.mul_(kept)
            main_grads.zero_()
            parameter.main_grad.fill_(1.0)
            main_grads.finish()
            optimizer.step()
        if not torch.allclose(parameter.float(), torch.full((64,), -1e-3), rtol=2**-7):
            return f"weights {parameter.tolist()}"
    return ""


def _skip_on_a_gpu(backend):
    if backend == "torch" and DEVICE == "cuda":
        pytest.skip("on a GPU PyTorch's AdamW rounds 1 - beta2 to fp32")


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    *change, backend = MUTANTS[name]
    _skip_on_a_gpu(backend)
    mutant = mutate(*change, entry=module)
    with _used(mutant, "backend").use_backend(backend), torch.device(DEVICE):
        try:
            found = wrong(mutant)
        except AssertionError:  # a read or write out of bounds
            return
    assert found


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_copy_without_a_change_passes(backend):
    _skip_on_a_gpu(backend)
    copy = copy_package(module)
    assert copy is not module and copy.AdamW is not module.AdamW
    with _used(copy, "backend").use_backend(backend), torch.device(DEVICE):
        assert not wrong(copy)
