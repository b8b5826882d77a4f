"""Each mutant is a small, plausible slip, and the oracle that the real room passes must catch it."""

import pytest
import torch
from parallel.adamw_oracle import BF16, CASES, FP32, Case, judge

pytest.importorskip("triton")
from onepass.gradients import adamw as room
from onepass.gradients import adamw_formula as formula
from onepass.gradients import adamw_kernels as kernels
from onepass.gradients import main_grads as buffers
from onepass.testing.mutants import mutate

LONG = Case(((40000,), (33,)), BF16, ({"lr": 0.1, "weight_decay": 0.5},), 0.5)  # several chunks
MASTERS = [0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 0x00000001, 0x807FFFFF]  # ties, carries, the largest, the smallest
MUTANTS = {  # name: module, what is there, what stands there instead, the backend[, how often it is there]
    # ---- the formula ----
    "no bias correction of exp_avg": (kernels, "(lr / _correction(beta1, step))", "(lr + 0.0 * _correction(beta1, step))", "triton"),
    "no bias correction of exp_avg_sq": (kernels, "(1.0 / tl.sqrt(_correction(beta2, step)))", "(1.0 + 0.0 * _correction(beta2, step))", "triton"),
    "the step before this one": (kernels, "tl.exp(step.to(tl.float64) * tl.log(beta))", "tl.exp((step.to(tl.float64) + 1) * tl.log(beta))", "triton"),
    "steps are not counted": (kernels, "    tl.store(step_ptr, step)\n", "    tl.store(step_ptr, step - 1.0)\n", "triton"),
    "betas exchanged": (kernels, "beta2 = tl.load(options_ptr + 2 * GROUPS + group", "beta2 = tl.load(options_ptr + GROUPS + group", "triton"),
    "beta2 in one number": (kernels, "tl.store(row + 6, (beta2 - _upper(beta2)).to(tl.float32), mask=inside)", "tl.store(row + 6, (beta2 - beta2).to(tl.float32), mask=inside)", "triton"),
    "exp_avg_sq of the gradient": (kernels, "weight2 * grad * grad", "weight2 * grad", "triton"),
    "the gradient unscaled": (kernels, "other=0.0) * factor", "other=0.0)", "triton"),
    "scaled up too": (kernels, "factor = tl.where(factor > 1.0, 1.0, factor)", "factor += 0.0", "triton"),
    "decay without the rate": (kernels, "(lr * weight_decay)", "(weight_decay)", "triton"),
    "decay after the step": (kernels, "master = tl.fma(-decay, master, master) - tl.div_rn(step_size * exp_avg, deviation)", "master = (1 - decay) * (master - tl.div_rn(step_size * exp_avg, deviation))", "triton"),
    "decay of the gradient": (kernels, "master = tl.fma(-decay, master, master) -", "master = master -", "triton"),
    "eps within the root": (kernels, "tl.sqrt_rn(exp_avg_sq) * correction + eps", "tl.sqrt_rn(exp_avg_sq + eps) * correction", "triton"),
    "eps of the first group": (kernels, "tl.load(options_ptr + 3 * GROUPS + group", "tl.load(options_ptr + 3 * GROUPS + 0 * group", "triton"),
    "all in the first group": (kernels, "row = scalars_ptr + tl.load(chunk + 4) * ROW", "row = scalars_ptr + tl.load(chunk + 4) * 0", "triton"),
    # ---- masters ----
    "rounded down": (kernels, "((bits + 0x8000) >> 16)", "(bits >> 16)", "triton"),
    "ties to even": (kernels, "((bits + 0x8000) >> 16)", "((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)", "triton"),
    "low without a sign": (kernels, "other=0).to(tl.int32)\n        bits", "other=0).to(tl.int32) & 0xFFFF\n        bits", "triton"),
    "low is not kept": (kernels, "tl.store(rest_ptr + state, bits.to(tl.int16), mask=inside)", "tl.store(rest_ptr + state, (bits * 0).to(tl.int16), mask=inside)", "triton"),
    "NaN rounded as a number": (kernels, "tl.where(master == master, master.to(tl.int32, bitcast=True), 0x7FC00000)", "master.to(tl.int32, bitcast=True)", "triton"),
    "fp16's master from the weight": (kernels, "return tl.load(rest_ptr + state, mask=inside, other=0.0)", "return tl.load(weights, mask=inside, other=0.0).to(tl.float32)", "triton"),
    "fp16's master is not kept": (kernels, "            tl.store(rest_ptr + state, master, mask=inside)\n", "            tl.store(rest_ptr + state, master, mask=inside & (state < 0))\n", "triton"),
    # ---- places ----
    "the first chunk only": (kernels, "place + start for place", "place for place", "triton"),
    "a chunk left out": (kernels, "for start in range(0, stretch.weight.numel(), _CHUNK):", "for start in range(0, stretch.weight.numel(), 2 * _CHUNK):", "triton"),
    "a block left out": (kernels, "for start in range(0, size, BLOCK):", "for start in range(0, size, 2 * BLOCK):", "triton"),
    "a value left out": (kernels, "inside = at < size", "inside = at < size - 1", "triton"),
    "a value too many": (kernels, "inside = at < size", "inside = at <= size", "triton"),
    "even whatever the sizes": (kernels, "return not stretch.weight.numel() % _MULTIPLE and", "return", "triton"),
    "the state at the gradient's place": (kernels, "state = state_at + at", "state = at", "triton"),
    "the gradient is left": (kernels, "_bind_adamw(batch.align, split, zero)", "_bind_adamw(batch.align, split, False)", "triton"),
    "the gradient is cleared": (kernels, "_bind_adamw(batch.align, split, zero)", "_bind_adamw(batch.align, split, True)", "triton"),
    # ---- options and buffers ----
    "options of another group": (room, "for place, value in enumerate(values):", "for place, value in enumerate(values[:-1][::-1] + values[-1:]):", "triton"),
    "options are written once": (room, "elif fixed or self.known[place] != value:", "elif fixed or self.known[place] == 0.0:", "triton"),
    "said to be clear when it is not": (room, "if zero and not any(", "if not any(", "triton"),
    "said to be finished when it is clear": (buffers, "with release, whatever it was.\"\"\"\n        self._finished = False\n", "with release, whatever it was.\"\"\"\n", "triton"),
    # ---- PyTorch's operators ----
    "torch: rounded down": (formula, "bits.add_(0x8000).bitwise_right_shift_(16)", "bits.bitwise_right_shift_(16)", "torch"),
    "torch: NaN rounded as a number": (formula, "        master.masked_fill_(master.isnan(), torch.nan)\n", "        pass\n", "torch"),
    "torch: the first block only": (formula, "range(0, stretch.weight.numel(), size)", "range(0, min(size, stretch.weight.numel()), size)", "torch"),
    "torch: low is not kept": (formula, "_split_(block.weight, block.rest, master)", "_split_(block.weight, block.rest.clone(), master)", "torch"),
    "torch: fp16's weight is not written": (formula, "            block.weight.copy_(master)\n", "            block.weight.copy_(block.weight)\n", "torch"),
    "torch: low without a sign": (formula, ".bitwise_left_shift_(16).add_(low)", ".bitwise_left_shift_(16).add_(low.int() & 0xFFFF)", "torch"),
    "torch: the gradient unscaled": (formula, "torch.mul(block.grad, factor, out=grads[:size])", "block.grad", "torch"),
    "torch: scaled in place": (formula, "torch.mul(block.grad, factor, out=grads[:size])", "block.grad.mul_(factor)", "torch"),
    "torch: the gradient is left": (room, "        if zero:\n            torch._foreach_zero_", "        if not zero:\n            torch._foreach_zero_", "torch"),
    "torch: steps are not counted": (room, "        self.step += 1\n", "        self.step += 0 if self.step else 1\n", "torch"),
}  # fmt: skip


def wrong(copy):
    """What a room gets wrong, or nothing."""

    def named(parameters):
        return copy.MainGrads({f"p{place}": parameter for place, parameter in enumerate(parameters)}.items())

    copy.step_formula.__globals__["_A_THREADS"] = 1 << 10  # several blocks
    for case in (CASES["bf16"], LONG, CASES["fp16"], CASES["small"], CASES["late"]):
        found = judge(copy, named, case)
        if found:
            return found
    for look in (_masters, _schedule, _clear, _alone, _still):
        found = look(copy, named)
        if found:
            return found
    return ""


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


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    module, old, new, backend, *times = MUTANTS[name]
    mutant = mutate(module, old, new, room=room, times=times[0] if times else 1)
    with mutant.backend.use_backend(backend):
        assert wrong(mutant)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_copy_without_a_change_passes(backend):
    copy = mutate(kernels, "_CHUNK, _BLOCK, _WARPS = 16384,", "_CHUNK, _BLOCK, _WARPS = 2 * 8192,", room=room)
    assert copy is not room and copy.AdamW is not room.AdamW
    with copy.backend.use_backend(backend):
        assert not wrong(copy)
