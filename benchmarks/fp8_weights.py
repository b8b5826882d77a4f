"""What a weight in eight bits costs a call: its own scale and codes, made anew each time.

    python benchmarks/fp8_weights.py            # 1B's MLP at 16384, 4096 and 1024 tokens, and one row without gradients
    python benchmarks/fp8_weights.py --size 8B

The scale takes one pass over the weight (2 bytes a number), codes by rows 3, transposed ones 3. "microbatch" is forward and
backward of an MLP with fp32 main_grads; its weights' passes are in it, and stand beside it by themselves. Times are the GPU's
own, each of a call that finds the L2 overwritten (onepass.runtime.ceilings).
"""

import argparse
from functools import partial

import torch

import onepass
from onepass.kernels.fp8_cast import cast_tensor
from onepass.runtime.ceilings import clock_for
from onepass.runtime.fp8 import E4M3, FP8Target

SIZES = {"1B": (2048, 8192), "8B": (4096, 14336)}
BF16 = torch.bfloat16


def mlp_of(hidden, inner, precision):
    torch.manual_seed(0)
    mlp = onepass.nn.MLP(hidden, inner, "swiglu", precision=precision, device="cuda", dtype=BF16)
    for parameter in mlp.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    return mlp


def microbatch(mlp, x, dy):
    mlp(x).backward(dy)
    x.grad = None


def measure(hidden, inner):
    clock = clock_for(torch.device("cuda"))

    def median_us(run):
        return 1e3 * clock.median(lambda _: run())

    fp8, bf16 = mlp_of(hidden, inner, "fp8"), mlp_of(hidden, inner, None)
    weights = [parameter.detach() for parameter in fp8.parameters() if parameter.dim() == 2]
    numbers = sum(weight.numel() for weight in weights)
    scale = torch.ones((), device="cuda")

    def passes(run):
        for weight in weights:
            run(weight)

    x = torch.randn(64, hidden, device="cuda", dtype=BF16).requires_grad_()
    microbatch(fp8, x, torch.randn_like(x))
    states = [parameter.fp8 for parameter in fp8.parameters() if parameter.dim() == 2]

    def scales():
        for state, weight in zip(states, weights, strict=True):
            state.scales.measure("weight", partial(cast_tensor, weight, codes=False))

    target = FP8Target(E4M3, scale)
    rows = partial(passes, lambda weight: cast_tensor(weight, target))
    transposed = partial(passes, lambda weight: cast_tensor(weight, target, codes=False, turned=True))
    print(f"{hidden} -> 2 x {inner} -> {hidden}: {numbers / 1e6:.0f}M numbers")
    for what, run, moved in (("scale", scales, 2), ("codes by rows", rows, 3), ("transposed codes", transposed, 3)):
        took = median_us(run)
        print(f"  weights' {what:24} {took:9.1f} us {moved * numbers / took / 1e6:8.2f} TB/s")
    for tokens in (16384, 4096, 1024):
        x = torch.randn(tokens, hidden, device="cuda", dtype=BF16).requires_grad_()
        dy = torch.randn_like(x)
        for mlp in (fp8, bf16):  # a step with a history: scales are delayed from here on
            microbatch(mlp, x, dy)
            with torch.no_grad():
                torch._foreach_mul_(list(mlp.parameters()), 1.0)
            for _ in range(3):
                microbatch(mlp, x, dy)
                torch.cuda.synchronize()
        took = [median_us(partial(microbatch, mlp, x, dy)) for mlp in (fp8, bf16)]
        print(f"  microbatch of {tokens:6} tokens: fp8 {took[0]:9.1f} us, bf16 {took[1]:9.1f} us, {took[0] / took[1]:.3f}")
    with torch.no_grad():
        x = torch.randn(1, hidden, device="cuda", dtype=BF16)
        took = [median_us(partial(mlp, x)) for mlp in (fp8, bf16)]
        print(f"  one row without gradients: fp8 {took[0]:9.1f} us, bf16 {took[1]:9.1f} us")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1B")
    print(torch.cuda.get_device_name(), torch.__version__)
    measure(*SIZES[parser.parse_args().size])


if __name__ == "__main__":
    main()
