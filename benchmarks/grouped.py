"""Experts' grouped products, bf16 beside eight bits: each product and pass by itself, and the experts' MLP forward and backward.

    python benchmarks/grouped.py                # all shapes
    python benchmarks/grouped.py --shape mixtral

Rows are spread over the experts as a random router spreads them. Weights have an fp32 main_grad. Times are the GPU's own, each of
a call that finds the L2 overwritten (onepass.runtime.ceilings). Decibels are those of y against bf16's own.
"""

import argparse
import math
from functools import partial

import torch
from measuring import need_gpus

from onepass.kernels.fp8_cast import cast_columns, cast_rows
from onepass.kernels.grouped_product import grouped_product, scaled_grouped_product, unfit_for_scaled_groups
from onepass.ops.activation.grouped import activation_grouped_linear
from onepass.ops.linear.grouped import grouped_linear
from onepass.runtime.ceilings import clock_for

SHAPES = {  # tokens, experts of a token, experts, hidden, inner
    "mixtral": (8192, 2, 8, 4096, 14336),
    "deepseek": (16384, 6, 64, 2048, 1408),
    "qwen3": (16384, 8, 128, 2048, 768),
}
BF16 = torch.bfloat16


def measure(name, clock):
    tokens, k, experts, hidden, inner = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).to(BF16)

    chosen = torch.rand(tokens, experts, device="cuda", generator=generator).topk(k).indices
    ends = chosen.flatten().bincount(minlength=experts).cumsum(0).int()
    M = tokens * k
    x, dy, token_weight = random(M, hidden).requires_grad_(), random(M, hidden), torch.rand(M, device="cuda")
    up, down = torch.nn.Parameter(random(experts, 2 * inner, hidden)), torch.nn.Parameter(random(experts, hidden, inner))
    with torch.no_grad():
        up.div_(hidden**0.5)
        down.div_(inner**0.5)
    for weight in (up, down):
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    print(f"\n{name}: {M} rows, {experts} experts, {hidden} -> 2 x {inner} -> {hidden}")

    def report(what, run, per=None):
        took = 1e3 * clock.median(lambda _: run())
        print(f"  {what:44} {took:9.1f} us{'' if per is None else f'{per / took / 1e6:8.3f} TB/s'}")

    h = random(M, 2 * inner)
    for said, a, weight in (("x -> up", x.detach(), up.detach()), ("d up -> dx", h, up.detach().mT)):
        codes = *cast_rows(a), *cast_rows(weight)
        report(f"{said}, bf16", partial(grouped_product, a, weight, ends))
        report(f"{said}, eight bits", partial(scaled_grouped_product, *codes, ends, BF16))
    report("cast of x by row", lambda: cast_rows(x.detach()), 3 * x.numel())
    report("cast of the weight by row", lambda: cast_rows(up.detach()), 3 * up.numel())
    report("cast of the weight's columns, transposed", lambda: cast_columns(up.detach()), 5 * up.numel())

    def call(precision):
        h = grouped_linear(x, up, ends, precision)
        y = activation_grouped_linear(h, down, ends, "swiglu", token_weight=token_weight, precision=precision)
        y.backward(dy)
        return y.detach()

    ways = {"bf16": None, "eight bits": "fp8"}
    unfit = next(filter(None, (unfit_for_scaled_groups(weight.shape, BF16, weight.device) for weight in (up, down))), None)
    if unfit is not None:
        del ways["eight bits"]
        print(f"  no MLP in eight bits: {unfit}")
    for said, precision in ways.items():
        report(f"MLP, forward and backward, {said}", partial(call, precision))
        for _ in range(2):
            call(precision)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(precision)
        print(f"  {'peak above what is held':44} {(torch.cuda.max_memory_allocated() - before) / 2**20:9.1f} MiB")
    if unfit is None:
        exact = call(None).float()
        lost = (call("fp8").float() - exact).square().sum()
        print(f"  {'y, eight bits against bf16':44} {10 * math.log10(exact.square().sum() / lost):9.1f} dB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES)
    args = parser.parse_args()
    need_gpus()
    unfit = unfit_for_scaled_groups((8, 8192, 8192), BF16, torch.device("cuda", torch.cuda.current_device()))
    if unfit is not None:
        raise SystemExit(unfit)
    clock = clock_for(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for name in SHAPES if args.shape is None else [args.shape]:
        measure(name, clock)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
