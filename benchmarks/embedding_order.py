"""embedding's forward by itself, with other constants: time of the look-up, with and without the order of tokens beside it.

    python benchmarks/embedding_order.py --tokens 16384 --features 2048 --rows 128256

Of each constant some values, the others as they are: eighths of the launch after which the second digit begins, segments of the
tokens, programs to a multiprocessor, numbers of rows that a program looks up. "alone" is the kernel where no gradient is asked
for: what the order costs is above it. Times are the GPU's own, each of a call that finds the L2 overwritten
(onepass.runtime.ceilings).
"""

import argparse

import torch
import torch.nn.functional as F

from onepass.bench import embedding as bench
from onepass.ops.embedding import forward
from onepass.ops.embedding.forward import EmbeddingOptions, OrderTiles, look_up
from onepass.runtime.ceilings import clock_for

KINDS = ("words", "uniform", "alike")
ORDERS = [
    *(OrderTiles(second_at, 64, 2) for second_at in (0, 2, 6)),
    *(OrderTiles(4, *each) for each in ((32, 2), (32, 3), (64, 1), (64, 3), (128, 1), (128, 2))),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=128256)
    args = parser.parse_args()
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(args.rows, args.features, device=device, dtype=torch.bfloat16)
    ids = {kind: bench.ids_of(kind, args.tokens, args.rows, device, generator) for kind in KINDS}
    clock = clock_for(device)
    options = EmbeddingOptions(-1, 0, args.rows)

    def report(name, call):
        took = (f"{kind} {1e3 * clock.median(lambda _, kind=kind: call(ids[kind])):6.1f}" for kind in KINDS)
        print(f"{name:44} {'   '.join(took)} us")

    print(f"{torch.cuda.get_device_name()}, {args.tokens} x {args.features} of {args.rows} bf16")
    report("F.embedding", lambda each: F.embedding(each, weight))
    stock_order, stock_tile = forward._ORDER, forward._TILE
    for tile in (stock_tile, 4096, 16384):
        forward._TILE = tile
        for order in (stock_order, *(ORDERS if tile == stock_tile else ())):
            forward._ORDER = order
            forward._plan.cache_clear()
            if order is stock_order:
                report(f"{tile} numbers, alone", lambda each: look_up(each, weight, options, False))
            said = f"second at {order.second_at}/8, {order.segments} segments, {order.resident} resident"
            report(f"{tile} numbers, {said}", lambda each: look_up(each, weight, options, True))
    source, target = (torch.empty(args.tokens, args.features, device=device, dtype=weight.dtype) for _ in range(2))
    print(f"{'a copy':44} {1e3 * clock.median(lambda _: target.copy_(source)):6.1f} us")


if __name__ == "__main__":
    main()
