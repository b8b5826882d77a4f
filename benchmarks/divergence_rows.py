"""The rows' kernel of linear_divergence by itself, for pieces of other sizes: time of a chunk of rows, forward and gradient.

    python benchmarks/divergence_rows.py --rows 4096 --columns 151936

The share is that of a copy of as many bytes as both heads' logits, read once, and the gradient. More than one read is what caches
don't hold. Times are the GPU's own, each of a call that finds the L2 overwritten (onepass.runtime.ceilings).
"""

import argparse
from functools import partial
from unittest import mock

import torch
from measuring import median_ms

from onepass.ops.loss.linear_divergence import kernels
from onepass.ops.loss.linear_divergence.formula import KINDS, PLANES, DivergenceTerms
from onepass.ops.loss.linear_divergence.rows import LogitRows

TILES = [(4096, 8, 1), (4096, 16, 1), (4096, 32, 1), (8192, 16, 1), (8192, 32, 1), (16384, 32, 1), (32768, 32, 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=151936)
    parser.add_argument("--kind", choices=KINDS, help="one kind only")
    args = parser.parse_args()
    shape = args.rows, args.columns
    x, teacher, out = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    labels = torch.zeros(args.rows, device="cuda", dtype=torch.int64)
    numbers, losses = torch.empty(PLANES, args.rows, device="cuda"), torch.empty(args.rows, device="cuda")
    source, target = (torch.empty(3 * x.numel() // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copy = median_ms(partial(target.copy_, source))
    print(f"{torch.cuda.get_device_name()}, {args.rows} x {args.columns} bf16; a copy of as many bytes: {copy:.3f} ms")
    logits = LogitRows(x, out, teacher, labels, args.columns)
    for kind in KINDS if args.kind is None else (args.kind,):
        terms = DivergenceTerms(kind=kind)
        for tiles in (None, *(kernels.PieceTiles(*each) for each in TILES)):
            chosen = kernels.tiles_of_rows if tiles is None else lambda *_, tiles=tiles: tiles
            with mock.patch.object(kernels, "tiles_of_rows", chosen):
                kernels._plan.cache_clear()
                runs = [partial(kernels.whole_rows, logits, terms, numbers, losses, gradient) for gradient in (True, False)]
                both, forward = map(median_ms, runs)
            said = "as it is" if tiles is None else str(tuple(tiles))
            print(f"{kind:10} {said:16} {both:.3f} ms, {copy / both:.2f} of a copy; divergences alone {forward:.3f} ms")


if __name__ == "__main__":
    main()
