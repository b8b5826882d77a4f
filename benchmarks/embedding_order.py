"""embedding's forward by itself, with other constants: time of the look-up, with and without the order of tokens beside it.

    python benchmarks/embedding_order.py --tokens 16384 --features 2048 --rows 128256

Of each constant some values, the others as they are: eighths of the launch after which the second digit begins, segments of the
tokens, programs to a multiprocessor, numbers of rows that a program looks up. "alone" is the kernel where no gradient is asked
for: what the order costs is above it. A write of 512 MiB before each call empties the L2, and hides the call's CPU time.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F

from onepass.bench import embedding as bench
from onepass.ops.embedding import forward
from onepass.ops.embedding.forward import EmbeddingOptions, OrderTiles, look_up

KINDS = ("words", "uniform", "alike")
ORDERS = [
    *(OrderTiles(second_at, 64, 2) for second_at in (0, 2, 6)),
    *(OrderTiles(4, *each) for each in ((32, 2), (32, 3), (64, 1), (64, 3), (128, 1), (128, 2))),
]


def median_us(run, flush, rounds=25, unmeasured=5):
    times = []
    for _ in range(rounds + unmeasured):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return sorted(times[unmeasured:])[rounds // 2]


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
    flush = torch.empty(1 << 29, device=device, dtype=torch.uint8)
    options = EmbeddingOptions(-1, 0, args.rows)

    def report(name, call):
        took = (f"{kind} {median_us(partial(call, ids[kind]), flush):6.1f}" for kind in KINDS)
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
    print(f"{'a copy':44} {median_us(partial(target.copy_, source), flush):6.1f} us")


if __name__ == "__main__":
    main()
