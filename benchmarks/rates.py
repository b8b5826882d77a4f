"""The rates that `onepass plan --gpus` counts with: of products, attention, passes, optimizer, collectives, calls; and of steps.

    python benchmarks/rates.py [--json FILE] [--section NAME ...] [--small]
    torchrun --nproc_per_node 2 benchmarks/rates.py --json FILE

bf16, random data, deterministic, as a training run is. Every time is of calls that follow one another without a pause for some
tens of milliseconds, so that clocks and power are those of a long run; caches are as the call before left them.

    copies       a copy by its bytes, read and written
    products     forward, input's gradient, weight's gradient added to an fp32 main_grad; of tokens x in x out. "in a row": all of
                 one block's, one after another, beside the sum of their times
    eight_bits   the same in e4m3 and e5m2, of codes that are there
    attention    onepass.attention with rotation; "packed" is of documents of 256 tokens or so
    passes       rms_norm with a residual, and bias_activation's swiglu, and the bytes that they move
    head         linear_cross_entropy into main_grad
    optimizer    AdamW's step over MainGrads, clipped, which zeroes gradients
    sustained    all products of a block, one after another for a second
    host         the CPU's time of a step of few tokens, by blocks
    steps        whole steps of benchmarks/gpt_parallel.py and of four blocks of 8B, and their kernels' times by name
    collectives  on two GPUs: by bytes, of the whole tensor. "exchange" is a send and a receive at once, "send" one way
    overlap      a collective and products, or copies, each while the other is under way, over each alone
    steps_of_two steps of benchmarks/gpt_parallel.py on two GPUs

Both ranks do everything, alone until the last three sections, for which they join; the first one's figures are kept. --small is a
size for CPUs, by the clock on the wall.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import gpt_parallel
import torch
import torch.distributed as dist
from measuring import common, kernels, need_gpus, write
from torch import Tensor

import onepass
from onepass.gpt import preset
from onepass.kernels.cublaslt import add_scaled_product, scaled_product
from onepass.parallel import AdamW, MainGrads
from onepass.profiling.trace import length, union
from onepass.train.batches import TokenBatch
from onepass.train.layout import ParallelLayout, _groups
from onepass.train.options import Options
from onepass.train.setup import make

Call = Callable[[], object]
LEAST_MS = 25.0  # of calls that are timed together
MOST = 400  # of them
PATIENCE = timedelta(seconds=60)  # of a collective
DOCUMENT = 256  # tokens of one, on average


class Sizes:
    """What is measured, on a GPU or small enough for a CPU."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.copies = [1 << n for n in ((16, 18) if small else (22, 24, 26, 28, 30))]  # bytes read and written
        blocks = {"tiny": (128, 384, 384, 1)} if small else BLOCKS
        self.blocks = {f"{name}, tp {tp}": _linears(*block, tp) for name, block in blocks.items() for tp in TENSOR[name]}
        self.tokens = (32,) if small else (4096, 8192, 16384)
        self.heads = [(32, 128, 2048)] if small else [(16384, 2048, 128256), (8192, 4096, 128256), (16384, 768, 50304)]
        self.attention = SMALL_ATTENTION if small else ATTENTION
        self.passes = [(32, 128)] if small else [(4096, 8192), (8192, 4096), (16384, 2048), (16384, 768)]
        self.parameters = [1 << 12] if small else [1 << 26, 1 << 28, 1 << 30]
        self.messages = [1 << n for n in ((12, 14) if small else range(16, 31, 2))]
        self.beside = (64, 64, 64) if small else (8192, 4096, 14336)


# name: hidden, columns of q, k and v, ffn, gated parts
BLOCKS = {
    "124M": (768, 2304, 3072, 1),
    "1B": (2048, 3072, 8192, 2),
    "8B": (4096, 6144, 14336, 2),
    "70B": (8192, 10240, 28672, 2),
    "405B": (16384, 18432, 53248, 2),
}
TENSOR = {"tiny": (1,), "124M": (1,), "1B": (1, 2), "8B": (1, 2, 4), "70B": (4, 8), "405B": (8,)}
SUSTAINED = (
    ("124M, tp 1", 16384),
    ("1B, tp 1", 16384),
    ("1B, tp 2", 16384),
    ("8B, tp 1", 8192),
    ("70B, tp 8", 8192),
    ("405B, tp 8", 8192),
)
# sequences, tokens, heads, groups, width
ATTENTION = [
    (4, 4096, 32, 8, 64), (8, 4096, 16, 4, 64), (1, 4096, 32, 8, 64), (16, 1024, 12, 12, 64), (1, 8192, 32, 8, 128),
    (1, 8192, 8, 1, 128), (2, 4096, 8, 1, 128), (4, 2048, 32, 8, 128), (1, 32768, 8, 1, 128),
]  # fmt: skip
SMALL_ATTENTION = [(2, 32, 4, 4, 16)]


def _linears(hidden: int, qkv: int, ffn: int, parts: int, ranks: int) -> list[tuple[int, int]]:
    """Return a block's linear layers, as in x out, of sizes that a tensor-parallel rank has."""
    return [(hidden, qkv // ranks), (hidden // ranks, hidden), (hidden, parts * ffn // ranks), (ffn // ranks, hidden)]


class Meter:
    """Times calls on this rank's device, as they follow one another."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def of(self, *calls: Call, least_ms: float = LEAST_MS) -> float:
        """Return the milliseconds of all `calls` once, from as many rounds of them as take so long. Ranks that have joined do as
        many, as they may wait for each other."""
        for call in calls:
            call()
        self.wait()
        begun = time.perf_counter()
        for call in calls:
            call()
        self.wait()
        rounds = max(3, min(MOST, int(least_ms / 1e3 / max(time.perf_counter() - begun, 1e-6)))) if self.on_gpu else 2
        if dist.is_initialized():
            shared = torch.tensor(rounds, device=self.device)
            dist.all_reduce(shared)
            rounds = int(shared) // dist.get_world_size()
        return self._timed(calls, rounds) / rounds

    def _timed(self, calls: tuple[Call, ...], rounds: int) -> float:
        if not self.on_gpu:
            begun = time.perf_counter()
            for _, call in itertools.product(range(rounds), calls):
                call()
            return (time.perf_counter() - begun) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # 10 ms, in which the CPU queues calls ahead
        start.record()
        for _, call in itertools.product(range(rounds), calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))


Rows = Iterator[tuple[str, dict[str, Any]]]


def _random(meter: Meter, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=meter.device, dtype=dtype)


# ---- one GPU ----


def copies(meter: Meter, sizes: Sizes) -> Rows:
    for moved in sizes.copies:
        source = _random(meter, moved // 4)
        yield str(moved), {"bytes": moved, "ms": meter.of(partial(torch.empty_like(source).copy_, source))}


class Products:
    """A linear layer's three products, in bf16 or of codes in eight bits."""

    def __init__(self, meter: Meter, tokens: int, inner: int, outer: int, eight_bits: bool = False) -> None:
        x, self.dy = _random(meter, tokens, inner), _random(meter, tokens, outer)
        weight = _random(meter, outer, inner)
        grad = torch.zeros(outer, inner, device=meter.device)
        if eight_bits:
            self.calls = self._of_codes(meter, x, weight, grad)
            return
        wide = {"out_dtype": torch.float32, "out": grad} if meter.on_gpu else {}
        add = partial(torch.addmm, grad, self.dy.t(), x, **wide)
        self.calls = {
            "forward": partial(torch.mm, x, weight.t()),
            "dgrad": partial(torch.mm, self.dy, weight),
            "wgrad": add if meter.on_gpu else lambda: grad.add_(torch.mm(self.dy.t(), x)),
        }

    def _of_codes(self, meter: Meter, x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Call]:
        one = torch.ones((), device=meter.device)
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        narrow, narrow_t = x.to(e4m3), x.t().contiguous().to(e4m3)
        w, w_t = weight.to(e4m3), weight.t().contiguous().to(e4m3)
        dy, dy_t = self.dy.to(e5m2), self.dy.t().contiguous().to(e5m2)
        return {
            "forward": lambda: scaled_product(narrow, one, w, one, torch.bfloat16, fast=True),
            "dgrad": lambda: scaled_product(dy, one, w_t, one, torch.bfloat16),
            "wgrad": lambda: add_scaled_product(grad, dy_t, one, narrow_t, one),
        }


def products(meter: Meter, sizes: Sizes, eight_bits: bool = False) -> Rows:
    for name, block in sizes.blocks.items():
        if eight_bits and name.startswith(("124M", "405B")):
            continue
        for tokens in sizes.tokens:
            if tokens == 4096 and (eight_bits or name.startswith(("124M", "1B"))):
                continue
            layers = [Products(meter, tokens, *layer, eight_bits) for layer in block]
            total = 0.0
            for (inner, outer), layer in zip(block, layers, strict=True):
                times = {each: meter.of(call) for each, call in layer.calls.items()}
                total += sum(times.values())
                yield f"{name}: {tokens} x {inner} x {outer}", {"tokens": tokens, "in": inner, "out": outer, **times}
            forward = [layer.calls["forward"] for layer in layers]
            backward = [layer.calls[each] for layer in reversed(layers) for each in ("dgrad", "wgrad")]
            yield f"{name}: {tokens}, in a row", {"ms": meter.of(*forward, *backward), "sum": total}
            del layers, forward, backward, layer
            _free(meter)


def sustained(meter: Meter, sizes: Sizes) -> Rows:
    for name, tokens in (("tiny, tp 1", 32),) if sizes.small else SUSTAINED:
        layers = [Products(meter, tokens, *layer) for layer in sizes.blocks[name]]
        calls = [layer.calls["forward"] for layer in layers]
        calls += [layer.calls[each] for layer in reversed(layers) for each in ("dgrad", "wgrad")]
        flops = sum(6 * tokens * inner * outer for inner, outer in sizes.blocks[name])
        yield f"{name}: {tokens}", {"ms": meter.of(*calls, least_ms=1e3), "flops": flops}
        del layers, calls
        _free(meter)


def attentions(meter: Meter, sizes: Sizes) -> Rows:
    for B, S, heads, groups, width in sizes.attention:
        qkv = _random(meter, B, S, (heads + 2 * groups) * width).requires_grad_()
        table = torch.randn(S, width // 2, device=meter.device)
        cuts = torch.randperm(B * S - 1)[: B * S // DOCUMENT].add_(1).sort().values  # documents end at random places
        ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([B * S])]).int().to(meter.device)
        for packed in (False, True):
            rows = qkv.view(1, B * S, -1) if packed else qkv
            cos = table.repeat(B, 1) if packed else table
            options = {"cos": cos, "sin": cos} | ({"cu_seqlens": ends} if packed else {})
            call = partial(onepass.attention, rows, heads, groups, **options)
            y = call()
            dy = torch.randn_like(y)
            backward = partial(torch.autograd.grad, y, qkv, dy, retain_graph=True)
            name = f"{'packed ' * packed}{B} x {S} x {heads} x {groups} x {width}"
            yield name, {"forward": meter.of(call), "backward": meter.of(backward)}
            del y, dy, backward, call
        _free(meter)


def passes(meter: Meter, sizes: Sizes) -> Rows:
    for rows, columns in sizes.passes:
        x, residual = (_random(meter, rows, columns).requires_grad_() for _ in range(2))
        weight = torch.ones(columns, device=meter.device, requires_grad=True)
        yield from _pass(
            f"norm {rows} x {columns}", meter, partial(onepass.rms_norm, x, weight, residual=residual), 4 * x.nbytes, 5
        )
        wide = _random(meter, rows, 2 * columns).requires_grad_()
        yield from _pass(
            f"swiglu {rows} x {columns}", meter, partial(onepass.bias_activation, wide, None, "swiglu"), 3 * x.nbytes, 5
        )
        _free(meter)


def _pass(name: str, meter: Meter, call: Callable[[], Any], moved: int, backward_tensors: int) -> Rows:
    made = call()
    outputs = made if isinstance(made, tuple) else (made,)
    given = [torch.randn_like(each) for each in outputs]
    inputs = [each for each in (*call.args, *call.keywords.values()) if isinstance(each, Tensor)]  # type: ignore[attr-defined]
    backward = partial(torch.autograd.grad, outputs, inputs, given, retain_graph=True)
    yield name, {
        "forward": meter.of(call), "forward_bytes": moved,
        "backward": meter.of(backward), "backward_bytes": backward_tensors * outputs[0].nbytes,
    }  # fmt: skip


def heads(meter: Meter, sizes: Sizes) -> Rows:
    for tokens, hidden, vocabulary in sizes.heads:
        x = _random(meter, tokens, hidden).requires_grad_()
        weight = torch.nn.Parameter(_random(meter, vocabulary, hidden) * hidden**-0.5)
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        labels = torch.randint(vocabulary, (tokens,), device=meter.device)

        def both(x: Tensor = x, weight: Tensor = weight, labels: Tensor = labels) -> None:
            onepass.linear_cross_entropy(x, weight, labels).backward()
            x.grad = None

        layer = Products(meter, tokens, hidden, vocabulary)
        times = {each: meter.of(call) for each, call in layer.calls.items()}
        del layer
        _free(meter)
        yield f"{tokens} x {hidden} x {vocabulary}", {"ms": meter.of(both), **times}


def optimizer(meter: Meter, sizes: Sizes) -> Rows:
    for count in sizes.parameters:
        rows = [torch.nn.Parameter(_random(meter, count // 16 // 32, 32) * 0.02) for _ in range(16)]
        main_grads = MainGrads(rows)
        made = AdamW(main_grads, lr=1e-4)

        def step(main_grads: MainGrads = main_grads, made: AdamW = made) -> None:
            main_grads.finish()
            made.step(1.0, zero=True)
            main_grads.zero_()

        yield str(count), {"parameters": count, "ms": meter.of(step)}
        main_grads.close()
        del rows, main_grads, made, step
        _free(meter)


def host(meter: Meter, sizes: Sizes) -> Rows:
    for name, blocks in (("tiny", (2, 4)),) if sizes.small else (("124M", (6, 12)), ("1B", (8,))):
        for count in blocks:
            step = _step(meter, name, {"num_layers": count}, 1, 64)
            for _ in range(3):
                step()
            meter.wait()
            begun = time.perf_counter()
            for _ in range(5):
                step()
            queued = (time.perf_counter() - begun) / 5 * 1e3
            meter.wait()
            yield f"{name}, {count} blocks", {"host_ms": queued, "ms": (time.perf_counter() - begun) / 5 * 1e3}
            _free(meter)


def _step(meter: Meter, name: str, changes: dict[str, Any], sequences: int, tokens: int) -> Call:
    """A step on one rank, by the trainer's own parts."""
    config = preset(name, params_dtype="bf16" if meter.on_gpu else "fp32", **changes)
    options = Options(seq_length=tokens, micro_batch_size=sequences, release_main_grads=False, cuda_graphs=False)
    made = make(config, options, ParallelLayout(meter.device))
    text = torch.randint(config.vocab_size, (sequences, tokens + 1), device=meter.device)
    batch = TokenBatch(text[:, :-1], text[:, 1:])

    def step() -> None:
        made.steps.run(batch)
        made.update.step(1e-5)

    return step


# ---- two GPUs ----


def _collectives(meter: Meter, moved: int) -> dict[str, Call]:
    """Collectives of a tensor of so many bytes. What has parts is gathered or summed in bf16, and all-reduced in fp32."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, part = _random(meter, moved // 2), _random(meter, moved // 2 // ranks)
    other, wide = torch.empty_like(whole), _random(meter, moved // 4, dtype=torch.float32)
    wide_part = torch.empty(moved // 4 // ranks, device=meter.device)
    beside = (rank + 1) % ranks

    def exchange(both: bool = True) -> Any:
        ops = [dist.P2POp(dist.isend, whole, beside)] if both or rank == 0 else []
        ops += [dist.P2POp(dist.irecv, other, beside)] if both or rank == 1 else []
        works = dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()

    return {
        "all_reduce fp32": lambda: dist.all_reduce(wide),
        "all_reduce bf16": lambda: dist.all_reduce(whole),
        "all_gather bf16": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter bf16": lambda: dist.reduce_scatter_tensor(part, whole),
        "reduce_scatter fp32": lambda: dist.reduce_scatter_tensor(wide_part, wide),
        "all_to_all bf16": lambda: dist.all_to_all_single(other, whole),
        "exchange": exchange,
        "send": partial(exchange, False),
    }


def collectives(meter: Meter, sizes: Sizes) -> Rows:
    for moved in sizes.messages:
        calls = _collectives(meter, moved)
        yield str(moved), {"bytes": moved, **{name: meter.of(call) for name, call in calls.items()}}
        _free(meter)


def overlap(meter: Meter, sizes: Sizes) -> Rows:
    """Collectives on a stream of their own beside products or copies; the longer side is under way all the time."""
    tokens, inner, outer = sizes.beside
    linear = Products(meter, tokens, inner, outer).calls
    source = _random(meter, sizes.messages[-1] // 4)
    work: dict[str, Call] = {**linear, "copy": partial(torch.empty_like(source).copy_, source)}
    sent = _collectives(meter, sizes.messages[-2])
    for name in ("all_reduce fp32", "all_gather bf16", "reduce_scatter bf16", "exchange"):
        for beside, call in work.items():
            alone = meter.of(call), meter.of(sent[name])
            yield f"{name} beside {beside}", {
                "alone": alone[0], "sent_alone": alone[1],
                "beside": _beside(meter, call, sent[name], alone, 2.0)[0],
                "sent_beside": _beside(meter, call, sent[name], alone, 0.4)[1],
            }  # fmt: skip


def _beside(meter: Meter, call: Call, sent: Call, alone: tuple[float, float], more: float) -> tuple[float, float]:
    """Return the milliseconds of a call and of a collective, where the collectives take `more` times as long as the calls."""
    if not meter.on_gpu:
        return meter.of(call), meter.of(sent)
    counts = torch.tensor([max(3, LEAST_MS / alone[0]), max(3, more * LEAST_MS / alone[1])], device=meter.device)
    dist.all_reduce(counts)
    calls, sends = (int(count) for count in counts / dist.get_world_size())
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    start, end, sent_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(60_000_000)
    start.record()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(sends):
            sent()
        sent_end.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / calls, float(start.elapsed_time(sent_end)) / sends


# ---- steps ----

STEPS = "one, 4", "one, 4, fp8", "dp", "dp, sharded", "tp + sp, strong", "tp + sp, weak", "pp", "pp, uneven"


def steps(meter: Meter, sizes: Sizes) -> Rows:
    """Steps of benchmarks/gpt_parallel.py's rows that have one rank, and of four blocks of 8B."""
    yield from _rows(meter, sizes, 1)
    if not sizes.small:
        four = {"num_layers": 4, "untie_embeddings_and_output_weights": False}
        for name, more in (("8B, four blocks", {}), ("8B, four blocks, fp8", {"fp8_format": "hybrid"})):
            yield name, _measured(meter, _step(meter, "8B", four | more, 1, 8192))
            _free(meter)


def steps_of_two(meter: Meter, sizes: Sizes) -> Rows:
    return _rows(meter, sizes, dist.get_world_size())


def _rows(meter: Meter, sizes: Sizes, ranks: int) -> Rows:
    size = gpt_parallel.SMALL if sizes.small else gpt_parallel.REAL
    rows = {row.name: row for row in gpt_parallel.all_rows(size, max(2, ranks))}
    for name in STEPS:
        row = rows[name]
        if row.ranks != ranks or (sizes.small and row.case == "pp"):
            continue
        layout = _groups(row.config(size), meter.device) if ranks > 1 else ParallelLayout(meter.device)
        yield name, _measured(meter, gpt_parallel.stepper(row, size, layout))
        _free(meter)


def _measured(meter: Meter, step: Call) -> dict[str, Any]:
    for _ in range(2):
        step()
    found: dict[str, Any] = {"ms": meter.of(step)}
    if not meter.on_gpu:
        return found
    ran = kernels(step)
    by_name: dict[str, list[float]] = {}
    for name, (start, end) in ran:
        short = re.sub(r"\s+", " ", name)[:110]
        count, total = by_name.setdefault(short, [0, 0.0])
        by_name[short] = [count + 1, total + end - start]
    sent = union([span for name, span in ran if "nccl" in name.lower()])
    rest = union([span for name, span in ran if "nccl" not in name.lower()])
    found |= {"sent_ms": length(sent), "busy_ms": length(rest), "both_ms": common(sent, rest)}
    found["kernels"] = {
        name: [count, round(total, 4)] for name, (count, total) in sorted(by_name.items(), key=lambda e: -e[1][1])
    }
    return found


def _free(meter: Meter) -> None:
    gc.collect()
    if meter.on_gpu:
        torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[Meter, Sizes], Rows]] = {
    "copies": copies, "products": products, "sustained": sustained, "passes": passes, "head": heads, "optimizer": optimizer,
    "eight_bits": partial(products, eight_bits=True), "attention": attentions, "steps": steps, "host": host,
    "collectives": collectives, "overlap": overlap, "steps_of_two": steps_of_two,
}  # fmt: skip
OF_TWO = "collectives", "overlap", "steps_of_two"


def settled(small: bool) -> torch.device:
    """Return this rank's device, with a training run's settings."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if small:
        torch.set_num_threads(1)
        onepass.use_backend("torch")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join(device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE, device_id=device if on_gpu else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--section", action="append", choices=SECTIONS, metavar="NAME", help=", ".join(SECTIONS))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if not args.small:
        need_gpus(otherwise="--small needs none")
    device = settled(args.small)
    ranks, first = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    meter, sizes, found, begun = Meter(device), Sizes(args.small), {}, time.perf_counter()
    for section, measure in SECTIONS.items():
        if (args.section and section not in args.section) or (section in OF_TWO and ranks == 1):
            continue
        if section in OF_TWO and not dist.is_initialized():
            join(device)
        rows = found[section] = {}
        try:
            for name, row in measure(meter, sizes):
                rows[name] = row
                if first:
                    said = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if not isinstance(value, dict))
                    print(f"{time.perf_counter() - begun:6.1f} s  {section}: {name}: {said}", flush=True)
        except Exception as error:  # the sections after it are worth their time all the same
            rows["error"] = {"error": repr(error)}
            print(f"{section} failed: {error!r}", flush=True)
        if first:
            write(args.json, device, ranks=ranks, sections=found)
    if dist.is_initialized():
        dist.destroy_process_group()
    if any("error" in rows for rows in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
