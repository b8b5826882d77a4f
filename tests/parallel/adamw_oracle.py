"""The oracle of AdamW: its formula in fp64, cases, and `judge`, which compares each step with the formula."""

import math
from typing import NamedTuple

import torch
from torch import nn

from onepass.parallel import MainGrads

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = 2.0**-24  # half a unit in the last place of fp32, relative


def adamw_reference(weight, grad, exp_avg, exp_avg_sq, step, lr, betas, eps, weight_decay):
    """Return the new weight and moments. `step` is the number of this step, from 1."""
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    deviation = exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + eps
    return weight * (1 - lr * weight_decay) - lr / (1 - beta1**step) * exp_avg / deviation, exp_avg, exp_avg_sq


def named(parameters):
    """Return a MainGrads of the parameters, named p0, p1, ..."""
    return MainGrads({f"p{place}": parameter for place, parameter in enumerate(parameters)}.items())


def fed(main_grads, grads):
    """Put a step's gradients into main_grad and call finish(), as after a backward."""
    main_grads.zero_()
    for (_, parameter), grad in zip(main_grads.named, grads, strict=True):
        parameter.main_grad.copy_(grad)
    main_grads.finish()


class Case(NamedTuple):
    """The parameters' shapes and dtype, their groups, and the options of a step."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    groups: tuple[dict, ...] = ({},)  # the options of each group; parameters are dealt to the groups in turn
    max_norm: float | None = None
    zero: bool = False
    begun: int = 0  # steps before the first


SHAPES = ((40, 24), (7,), (1,), (16400,), (0,), (5, 13), ())
OPTIONS = ({"lr": 2e-3, "weight_decay": 0.1}, {"betas": (0.8, 0.95), "eps": 1e-6, "lr": 1e-2, "weight_decay": 0.0}, {})
CASES = {
    "bf16": Case(SHAPES, BF16, OPTIONS, 0.5, True),
    "fp32": Case(SHAPES, FP32, OPTIONS, 0.5, True),
    "fp16": Case(SHAPES, FP16, OPTIONS, 0.5, True),
    "one group": Case(((64, 64), (33,)), BF16),
    "late": Case(((64, 64),), FP32, begun=3000),
    "small": Case(((64, 64),), BF16, max_norm=1e9),  # the norm is below max_norm
}


def parameters_of(case):
    generator = torch.Generator().manual_seed(5)
    device = torch.get_default_device()
    return [
        nn.Parameter((torch.randn(shape, generator=generator, device="cpu") * 0.02).to(device, case.dtype))
        for shape in case.shapes
    ]


def gradients_of(case, step):
    """Return gradients of very different magnitudes, with some exact zeros."""
    generator = torch.Generator().manual_seed(100 + step)
    made = []
    for shape in case.shapes:
        size = 10.0 ** torch.randn((), generator=generator, device="cpu")
        grad = torch.randn(shape, generator=generator, device="cpu") * size
        made.append((grad * (torch.rand(shape, generator=generator, device="cpu") > 0.1)).to(torch.get_default_device()))
    return made


def groups_of(case, parameters):
    count = len(case.groups)
    return [{"params": parameters[place::count], **options} for place, options in enumerate(case.groups)]


def kept(optimizer, parameters):
    """Return each parameter's fp32 master and moments, whole."""
    found = {name: dict.fromkeys(("master", "exp_avg", "exp_avg_sq")) for name, _ in optimizer._main_grads.named}
    for name, kind, tensor, start, stop in optimizer.masters():
        assert tensor.dtype == FP32 and tensor.numel() == stop - start
        found[name][kind] = tensor.clone()
    empty = torch.zeros(0)
    return [tuple(empty if each is None else each for each in found[name].values()) for name, _ in optimizer._main_grads.named]


def judge(module, main_grads_of, case, steps=3):
    """Compare each step, from the state before it, with the fp64 formula. Return the first error or an empty string."""
    parameters = parameters_of(case)
    main_grads = main_grads_of(parameters)
    optimizer = module.AdamW(main_grads, groups_of(case, parameters))
    optimizer.set_step(case.begun)
    for step in range(1, steps + 1):
        main_grads.zero_()
        grads = gradients_of(case, step)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.main_grad.copy_(grad)
        main_grads.finish()
        before = kept(optimizer, parameters)
        norm = optimizer.step(case.max_norm, zero=case.zero)
        wrong = _wrong(case, optimizer, parameters, grads, before, case.begun + step, norm)
        if wrong:
            return f"step {step}: {wrong}"
    return ""


def _wrong(case, optimizer, parameters, grads, before, number, norm):
    scaled = grads
    if case.max_norm is None:
        assert norm is None
    else:
        expected = torch.cat([grad.double().flatten() for grad in grads]).norm()
        if not torch.isclose(norm.double(), expected, rtol=1e-6):
            return f"norm {norm} where it is {expected}"
        factor = (case.max_norm / (norm + 1e-6)).clamp(max=1.0)  # rounded where clip_ rounds it
        scaled = [grad * factor for grad in grads]
    after = kept(optimizer, parameters)
    for place, (parameter, grad) in enumerate(zip(parameters, scaled, strict=True)):
        options = optimizer.param_groups[place % len(case.groups)]
        options = {key: options[key] for key in ("lr", "betas", "eps", "weight_decay")}
        old = [each.double() for each in before[place]]
        expected = adamw_reference(old[0], grad.double().flatten(), *old[1:], number, **options)
        update = options["lr"] * 3e-6 * 20  # the update's own rounding error
        for what, new, right, size in zip(
            ("master", "exp_avg", "exp_avg_sq"), after[place], expected, (update, 0, 0), strict=True
        ):
            most = right.abs().max().item() if right.numel() and what != "master" else 0.0
            slack = 4 * EPS * right.abs() + size + 4 * EPS * most * (what == "exp_avg") + 2.0**-140
            if (~((new.double() - right).abs() <= slack)).any():
                return f"{what} of {place} is off by {(new.double() - right).abs().max().item():.3g} of {most:.3g}"
        if not torch.equal(parameter.detach().flatten(), rounded(after[place][0], case.dtype)):
            return f"weight {place} is not its master, rounded"
        left = torch.zeros_like(grad) if case.zero else grads[place]
        if not torch.equal(parameter.main_grad, left):
            return f"gradient {place} is not as it was left"
    return ""


def rounded(master, dtype):
    """Round an fp32 master to the nearest value. bf16 ties round away from zero, as AdamW documents."""
    if dtype is not BF16:
        return master.to(dtype)
    down = (master.view(torch.int32) & ~0xFFFF).view(FP32)  # towards zero
    up = ((master.view(torch.int32) & ~0xFFFF) + 0x10000).view(FP32)
    nearer = (master.double() - down.double()).abs() < (up.double() - master.double()).abs()
    return torch.where(nearer, down, up).to(BF16)
