"""A head with LoRA: whole calls beside the same frozen head without it, and ways to make its logits.

    python benchmarks/lora_head.py --shape 8192 4096 151936 --rank 16

Shares are of the products that a frozen head cannot do without: two of tokens x hidden x vocabulary, or one without gradients.
Times are the GPU's own, each of a call that finds the L2 overwritten (onepass.runtime.ceilings).
"""

import argparse
from functools import partial

import torch
from measuring import median_ms, peak_mib

import onepass
from onepass.ops.loss.head import operands

BF16, FP32 = torch.bfloat16, torch.float32


def step(hidden, weight, labels, lora, asking, **options):
    with torch.set_grad_enabled(asking):
        found = onepass.linear_cross_entropy(hidden, weight, labels, lora=lora, **options)
    if asking:
        values = found if isinstance(found, torch.Tensor) else found[1].log_prob + found[1].entropy
        values.backward(torch.ones_like(values))


def calls(hidden, weight, labels, lora):
    """Print time and memory of calls, with LoRA and without."""
    d = torch.empty(len(hidden), len(weight), device="cuda", dtype=BF16)
    floor = [median_ms(partial(torch.mm, hidden.detach(), weight.t(), out=d)), median_ms(partial(torch.mm, d, weight))]
    del d
    print(f"products: {floor[0]:.2f} and {floor[1]:.2f} ms")
    policy = {"reduction": "none", "return_stats": ("log_prob", "entropy")}
    for name, asking, options in (("mean", True, {}), ("log_prob", True, policy), ("log_prob forward", False, policy)):
        for said, given in (("lora", lora), ("frozen", None)):
            run = partial(step, hidden, weight, labels, given, asking, **options)
            run()
            peak, time = peak_mib(run), median_ms(run)
            print(f"{name:18} {said:7} {time:7.2f} ms, {time / (sum(floor) if asking else floor[0]):.3f}; {peak:.0f} MiB")


def logits(hidden, weight, lora, rows):
    """Print time and error of a chunk's logits: as the op makes them, and by two products."""
    hidden, a, b = hidden.detach()[:rows], lora.a.detach().to(BF16), lora.b.detach().to(BF16)
    head = operands.Head(hidden, weight, None, False, True, lora=onepass.LoRA(a, b, lora.scale))
    out, wide = (torch.empty(rows, len(weight), device="cuda", dtype=dtype) for dtype in (BF16, FP32))

    def twice_rounded(first, second):
        torch.mm(*first, out=out)
        torch.addmm(out, *second, out=out)

    def in_fp32():
        low = head.low(hidden)
        torch.mm(hidden, weight.t(), out_dtype=FP32, out=wide)
        torch.addmm(wide, low, b.t(), out_dtype=FP32, out=wide)
        out.copy_(wide)

    low = head.low(hidden)
    large, thin = (hidden, weight.t()), (low, b.t())
    ways = {
        "one product, no LoRA": partial(torch.mm, *large, out=out),
        "as the op": partial(operands.make_logits, head, hidden, 0, len(weight), (out, None)),
        "added to rounded": partial(twice_rounded, large, thin),
        "thin one rounded": partial(twice_rounded, thin, large),
        "fp32, then rounded": in_fp32,
    }
    some = slice(0, 64)
    exact = hidden[some].double() @ weight.double().t() + low[some].double() @ b.double().t()
    for name, run in ways.items():
        time = median_ms(run)
        error = float((out[some].double() - exact).norm() / exact.norm())
        print(f"logits of {rows} tokens, {name:21} {time:7.3f} ms, relative error {error:.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=(8192, 4096, 151936), metavar=("TOKENS", "HIDDEN", "VOCABULARY"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4096, help="tokens of a chunk whose logits are made in several ways")
    args = parser.parse_args()
    tokens, inner, vocabulary = args.shape
    draw = partial(torch.randn, device="cuda")
    hidden = draw(tokens, inner, dtype=BF16).requires_grad_()
    weight = draw(vocabulary, inner, dtype=BF16).mul_(inner**-0.5)
    a, b = draw(args.rank, inner).mul_(inner**-0.5).requires_grad_(), draw(vocabulary, args.rank).mul_(0.1).requires_grad_()
    labels, lora = torch.randint(vocabulary, (tokens,), device="cuda"), onepass.LoRA(a, b, 2.0)
    print(f"{torch.cuda.get_device_name()}, {tokens} x {inner} x {vocabulary} bf16, rank {args.rank}")
    calls(hidden, weight, labels, lora)
    logits(hidden, weight, lora, min(args.rows, tokens))


if __name__ == "__main__":
    main()
