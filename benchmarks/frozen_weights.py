"""Frozen weights in few bits at a layer of Llama 8B: decoding beside its bytes, and products with LoRA beside a bf16 weight's.

    python benchmarks/frozen_weights.py                   # 4096 and 16384 rows
    python benchmarks/frozen_weights.py --json out.json

Shapes are those of q, k and v; o; gate and up; down. A step is forward, and backward to dx and an adapter of rank 16 in fp32.
Times are the GPU's own, each of a call that finds the L2 overwritten (onepass.runtime.ceilings). bitsandbytes is timed
where it is installed.
"""

import argparse
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from measuring import need_gpus, write

import onepass
from onepass.product.frozen.four_bits import FourBitWeight
from onepass.product.frozen.int8 import Int8Weight
from onepass.runtime.ceilings import clock_for, copy_bandwidth

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
BF16 = torch.bfloat16


def drawn_bf16(N, K):
    return torch.randn(N, K, device="cuda", dtype=BF16) / K**0.5


def drawn_nf4(N, K):
    """Return a doubly quantised weight of random codes."""
    blocks = N * K // 64
    tensors = {
        "codes": torch.randint(0, 256, (N * K // 2,), dtype=torch.uint8, device="cuda"),
        "table": torch.cat([torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 256), torch.tensor([1.0])]).cuda(),
        "absmax": torch.randint(0, 256, (blocks,), dtype=torch.uint8, device="cuda"),
        "nested_scale": torch.rand(blocks // 256, device="cuda") / K**0.5,
    }
    return FourBitWeight((N, K), BF16, tensors, ("nf4", 64, 256))


def drawn_int8(N, K):
    codes = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    return Int8Weight((N, K), BF16, {"codes": codes, "scale": torch.rand(N, device="cuda") / K**0.5}, (1 / 127,))


def moved(weight):
    """Return the bytes that decoding to bf16 reads and writes."""
    return sum(tensor.nbytes for tensor in weight.tensors.values()) + 2 * weight.numel()


def decoding(clock, copied):
    """Time decoding of each layer. `copied`: GB/s of a copy."""
    found = {}
    for name, shape in LAYERS.items():
        for kind, weight in (("nf4", drawn_nf4(*shape)), ("int8", drawn_int8(*shape))):
            ms, bytes_moved = clock.median(lambda _, weight=weight: weight.decoded(BF16)), moved(weight)
            speed = bytes_moved / ms / 1e6
            found[f"{name} {kind}"] = {"ms": ms, "bytes": bytes_moved, "of copy": speed / copied}
            print(f"  {name:8} {kind:5} {ms:8.4f} ms  {speed:6.0f} GB/s, {speed / copied:.2f} of a copy's")
        if find_spec("bitsandbytes") is not None:
            import bitsandbytes as bnb

            codes, state = bnb.functional.quantize_4bit(drawn_bf16(*shape), quant_type="nf4", compress_statistics=True)
            ms = clock.median(lambda _, codes=codes, state=state: bnb.functional.dequantize_4bit(codes, state))
            found[f"{name} bitsandbytes nf4"] = {"ms": ms}
            print(f"  {name:8} bitsandbytes' nf4 {ms:8.4f} ms")
    return found


def step(weight, x, dy, adapter, precision=None):
    y = onepass.lora_linear(x, weight, *adapter, scale=2.0, precision=precision)
    return torch.autograd.grad(y, (x, *adapter), dy)


def of_bitsandbytes(shape):
    """Return a Linear4bit's product with PEFT's adapter around it."""
    import bitsandbytes as bnb

    codes, state = bnb.functional.quantize_4bit(drawn_bf16(*shape), quant_type="nf4", compress_statistics=True)

    def run(x, dy, adapter):
        a, b = adapter
        y = bnb.matmul_4bit(x, codes.t(), quant_state=state)
        y = y + (2.0 * (x.float() @ a.t()) @ b.t()).to(BF16)
        return torch.autograd.grad(y, (x, a, b), dy)

    return run


def layers(clock, M):
    """Time a step of each layer by each kind of weight."""
    found = {}
    for name, (N, K) in LAYERS.items():
        x, dy = torch.randn(M, K, device="cuda", dtype=BF16, requires_grad=True), torch.randn(M, N, device="cuda", dtype=BF16)
        a, b = (torch.randn(*shape, device="cuda") / 64 for shape in ((16, K), (N, 16)))
        adapter = a.requires_grad_(), b.requires_grad_()
        plain = drawn_bf16(N, K)
        ways = {"bf16": partial(step, plain), "nf4": partial(step, drawn_nf4(N, K)), "int8": partial(step, drawn_int8(N, K))}
        ways["fp8, cast in each call"] = partial(step, plain, precision="fp8")
        ways["fp8, two layouts"] = partial(step, onepass.freeze_weight(plain))
        ways["fp8, rows alone"] = partial(step, onepass.freeze_weight(plain, layouts=1))
        if find_spec("bitsandbytes") is not None:
            ways["bitsandbytes nf4, adapters in fp32"] = of_bitsandbytes((N, K))
        for way, run in ways.items():
            for _ in range(3):
                run(x, dy, adapter=adapter)
            found.setdefault(way, {})[name] = clock.median(lambda _, run=run: run(x, dy, adapter=adapter))  # noqa: B023
    for way, times in found.items():
        times["layer"] = sum(times.values())
        each = "  ".join(f"{name} {ms:7.3f}" for name, ms in times.items())
        print(f"  {M:6} {way:36} {each}  {times['layer'] / found['bf16']['layer']:.3f} of bf16")
    return found


def host(clock):
    """Time the CPU for a tiny call."""
    x, plain = torch.randn(16, 64, device="cuda", dtype=BF16), torch.randn(64, 64, device="cuda", dtype=BF16)
    weights = {"bf16": plain, "nf4": drawn_nf4(256, 64), "fp8": onepass.freeze_weight(plain)}
    found = {name: clock.host_us(lambda weight=weight: onepass.linear(x, weight)) for name, weight in weights.items()}
    print("  host, us:", "  ".join(f"{name} {us:.1f}" for name, us in found.items()))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_gpus()
    device = torch.device("cuda")
    clock = clock_for(device)
    copied = copy_bandwidth(clock, 1 << 30)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; a copy moves {copied:.0f} GB/s")
    found = {"copy": copied, "decoding": decoding(clock, copied), "host": host(clock)}
    found["layers"] = {M: layers(clock, M) for M in args.rows}
    write(args.json, device, **found)


if __name__ == "__main__":
    main()
