"""A training step of the model 1B on several GPUs of one host: data parallel, tensor parallel, and in a pipeline.

    python benchmarks/gpt_parallel.py [--case NAME ...] [--row NAME ...] [--ranks N] [--json FILE] [--traces DIR] [--small]

It starts its own ranks, one a GPU. Each row is a model of its own, trained on the same random tokens by the trainer's own step:
bf16 weights, fp32 main_grad (kept, also on one GPU), masters and moments, clipping, deterministic. Sequences have 4096 tokens.

    one     one GPU, what the others are set against: 4 sequences a step, 8, 4 microbatches of 4, and 8 of 1 as a pipeline's
    dp      a rank has 4 sequences a step, with a whole optimizer or a part of it (sharded), or 4 microbatches of 4; gradients
            are reduced under the last backward
    tp_sp   2 ranks with tensor and sequence parallelism: 4 sequences a step for both (strong), and 8, as many a rank (weak)
    pp      2 stages, 8 microbatches of 1 sequence, a head that is not tied to the embedding; "later" is with
            defer_embedding_wgrad_compute, of the first 2 microbatches or of all 8; "uneven" has fewer layers in the last
            stage, so that with the head it has as much to do as the first
    fp8     the same in eight bits, delayed scaling, set against one GPU in eight bits
    graphs  124M, 16 sequences of 1024 tokens a rank, with a CUDA graph and without; only by --case, and alone. Reductions are
            under the last backward, or after its replay
    packed  the same with a document's end every 256 tokens or so, at random places, set against one GPU with as many

Scaling is tokens a second, over the ranks times those of the row on one GPU that is named beside it. Milliseconds are of steps
that follow each other, optimizer included, on the slowest rank: the median of the rounds. The loss is of the same step in all
rows; "apart" is how far it is from that of the first row with the same model and sequences: rounding, no more.

The pipelines' second table is read from a trace of one step. Busy is a GPU that runs forwards, backwards and weights' gradients;
what only sends or receives waits. All of it is of the time from the first of these kernels on any rank to the last on any.

    flush        from the end of the last rank's last backward to the end; idle: what of it that rank is not busy
    drain        from the end of the first rank's last forward to the end
    idle 0, 1    what a rank is not busy, of the whole
    traced       the whole; the profiler may slow the CPU down, and "ms a step" is without it, and with the optimizer

--small is a model that two processes without GPUs can train, over gloo, where busy is by the clock on the wall.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from measuring import write
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import onepass
from onepass.gpt import Config, preset
from onepass.parallel import DeferredWgrad
from onepass.profiling.trace import STEP, length, union
from onepass.train.batches import TokenBatch
from onepass.train.layout import ParallelLayout, _groups
from onepass.train.options import Options
from onepass.train.setup import Trained, make

PATIENCE = 120  # seconds without a row after which ranks are stopped, and those of a collective
CASES, GRAPHS = ("one", "dp", "tp_sp", "pp"), "graphs"


@dataclass(frozen=True)
class Size:
    preset: str
    dtype: str
    length: int
    document: int  # tokens of one where documents are packed, on average
    warm: int  # steps before the first round
    rounds: int
    steps: int  # of a round


REAL = Size("1B", "bf16", 4096, 256, 2, 3, 3)
SHORT = Size("124M", "bf16", 1024, 256, 8, 5, 10)
SMALL = Size("tiny", "fp32", 32, 8, 1, 2, 1)


@dataclass(frozen=True)
class Row:
    name: str
    case: str
    ranks: int
    sequences: int  # of a step, on all ranks
    micro: int  # sequences of a forward and backward, on one rank
    beside: str | None = None  # the row that scaling is over
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    packed: bool = False

    def config(self, size: Size) -> Config:
        return preset(size.preset, params_dtype=size.dtype, **self.model)

    def options(self, size: Size) -> Options:
        kept = {"release_main_grads": False, "cuda_graphs": False} | self.training  # what one GPU would do, and several do not
        return Options(seq_length=size.length, micro_batch_size=self.micro, global_batch_size=self.sequences, **kept)

    @property
    def alike(self) -> tuple[bool, bool, bool, int]:
        """The same in rows that should have the same loss."""
        untied = self.model.get("untie_embeddings_and_output_weights", False)
        return untied, "fp8_format" in self.model, self.packed, self.sequences


UNTIED = {"untie_embeddings_and_output_weights": True}
FP8 = {"fp8_format": "hybrid"}
SHARDED = {"use_distributed_optimizer": True}
GRAPH = {"cuda_graphs": True}
LATER = {"defer_embedding_wgrad_compute": True}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = UNTIED | {"pipeline_model_parallel_size": 2}


def layers_beside_head(config: Config, multiple: int = 1) -> int:
    """How many layers the last of two ranks is to have, so that with the head they are half of all: the nearest such multiple."""
    # A parameter is a multiplication a token. 1B's head, vocab_size x hidden_size, has as many as 4.3 of its 16 blocks:
    # (16 - 4.3) / 2 is 5.8, so the last rank has 6 layers and the first one 10.
    block = config.replace(num_layers=2).parameters_count() - config.replace(num_layers=1).parameters_count()
    exact = (config.num_layers - config.vocab_size * config.hidden_size / block) / 2
    return max(1, round(exact / multiple)) * multiple


def all_rows(size: Size, ranks: int) -> list[Row]:
    alone = "one, 8 x 1"
    two = {"virtual_pipeline_model_parallel_size": 2}  # stages a rank
    uneven, both = ({"num_layers_in_last_pipeline_stage": layers_beside_head(preset(size.preset), n)} for n in (1, 2))

    def pipeline(name: str, model: dict[str, Any], schedule: str = "1f1b") -> Row:
        return Row(name, "pp", 2, 8, 1, alone, STAGES | model, {"pipeline_schedule": schedule})

    return [
        Row("one, 4", "one", 1, 4, 4),
        Row("one, 8", "one", 1, 8, 8),
        Row("one, 4 x 4", "one", 1, 16, 4),
        Row(alone, "one", 1, 8, 1, model=UNTIED),
        Row("dp", "dp", ranks, 4 * ranks, 4, "one, 4"),
        Row("dp, sharded", "dp", ranks, 4 * ranks, 4, "one, 4", training=SHARDED),
        Row("dp, 4 x 4", "dp", ranks, 16 * ranks, 4, "one, 4 x 4"),
        Row("tp + sp, strong", "tp_sp", 2, 4, 4, "one, 4", TENSOR),
        Row("tp + sp, weak", "tp_sp", 2, 8, 8, "one, 4", TENSOR),
        Row("one, 4, fp8", "one", 1, 4, 4, model=FP8),
        Row("dp, sharded, fp8", "dp", ranks, 4 * ranks, 4, "one, 4, fp8", FP8, SHARDED),
        Row("tp + sp, weak, fp8", "tp_sp", 2, 8, 8, "one, 4, fp8", TENSOR | FP8),
        Row("one, 4, packed", "one", 1, 4, 4, packed=True),
        Row("dp, sharded, packed", "dp", ranks, 4 * ranks, 4, "one, 4, packed", training=SHARDED, packed=True),
        Row("tp + sp, weak, packed", "tp_sp", 2, 8, 8, "one, 4, packed", TENSOR, packed=True),
        pipeline("pp", {}),
        pipeline("pp, 2 later", LATER | {"wgrad_deferral_limit": 2}),
        pipeline("pp, 8 later", LATER),
        pipeline("pp, interleaved", two, "interleaved"),
        pipeline("pp, zero-bubble", {}, "zero-bubble"),
        pipeline("pp, uneven", uneven),
        pipeline("pp, uneven, 2 later", uneven | LATER | {"wgrad_deferral_limit": 2}),
        pipeline("pp, uneven, interleaved", both | two, "interleaved"),
        pipeline("pp, uneven, zero-bubble", uneven, "zero-bubble"),
        Row("one, 16", GRAPHS, 1, 16, 16),
        Row("one, 16, graph", GRAPHS, 1, 16, 16, training=GRAPH),
        Row("dp, 16", GRAPHS, ranks, 16 * ranks, 16, "one, 16"),
        Row("dp, 16, graph", GRAPHS, ranks, 16 * ranks, 16, "one, 16, graph", training=GRAPH),
        Row("dp, 16, sharded", GRAPHS, ranks, 16 * ranks, 16, "one, 16", training=SHARDED),
        Row("dp, 16, sharded, graph", GRAPHS, ranks, 16 * ranks, 16, "one, 16, graph", training=SHARDED | GRAPH),
    ]


def size_of(rows: list[Row], small: bool) -> Size:
    if small:
        return SMALL
    return SHORT if all(row.case == GRAPHS for row in rows) else REAL


# ---- on a rank ----


def run(rank: int, rows: list[Row], small: bool, folder: str, traces: str | None) -> None:
    """Measures rows that have as many ranks, and leaves what each found in the folder."""
    size, ranks = size_of(rows, small), rows[0].ranks
    device = joined(rank, ranks, small, folder)
    layouts: dict[tuple[int, int], ParallelLayout] = {}
    for at, row in enumerate(rows):
        config = row.config(size)
        divided = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        if divided not in layouts:
            layouts[divided] = _groups(config, device) if ranks > 1 else ParallelLayout(device)
        found = measured(row, size, layouts[divided], Path(traces or folder))
        written = answer(folder, at, rank)
        written.with_suffix(".part").write_text(json.dumps(found))
        written.with_suffix(".part").rename(written)  # there whole or not at all
    if ranks > 1:
        dist.destroy_process_group()


def joined(rank: int, ranks: int, small: bool, folder: str) -> torch.device:
    """This rank's device, settled as a training run's."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch 2.13's profiler says when it starts and stops
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device("cpu") if small else torch.device("cuda", rank)
    if small:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        onepass.use_backend("torch")
    else:
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group(
            "gloo" if small else "cpu:gloo,cuda:nccl",
            init_method=f"file://{folder}/meeting",
            rank=rank, world_size=ranks,
            timeout=timedelta(seconds=PATIENCE),
            device_id=None if small else device,
        )  # fmt: skip
    return device


def answer(folder: str, at: int, rank: int) -> Path:
    return Path(folder, f"{at}-{rank}.json")


def measured(row: Row, size: Size, layout: ParallelLayout, folder: Path) -> dict[str, Any]:
    gc.collect()  # the row before
    on_gpu = layout.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = stepper(row, size, layout)
    for _ in range(size.warm):
        step()
    times: list[float] = []
    queued: list[float] = []
    for _ in range(size.rounds):
        together(layout)
        begun = time.perf_counter()
        for _ in range(size.steps):
            loss, norm = step()
        queued.append((time.perf_counter() - begun) / size.steps * 1e3)
        synchronize(layout)
        times.append((time.perf_counter() - begun) / size.steps * 1e3)
    found = {
        "ms": times,
        "host_ms": median(queued),
        "loss": float(layout.average(loss)),
        "norm": float(norm),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }
    if row.case == "pp":
        name = "".join(letter if letter.isalnum() else "_" for letter in row.name)
        found["spans"] = traced(step, layout, folder / f"{name}-rank{layout.rank}.json.gz")
    return found


def stepper(row: Row, size: Size, layout: ParallelLayout) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A step, which returns its loss and its gradient's norm."""
    made: Trained = make(row.config(size), row.options(size), layout)
    vocabulary, random = row.config(size).vocab_size, torch.Generator().manual_seed(1)
    text = torch.randint(vocabulary, (row.sequences, size.length + 1), generator=random)
    cuts = torch.stack([torch.randperm(size.length - 1, generator=random)[: size.length // size.document] for _ in text]) + 1
    ends = F.pad(F.pad(cuts.sort().values, (1, 0)), (0, 1), value=size.length).int()
    own, documents = (of_all.chunk(layout.data.size)[layout.data.rank].to(layout.device) for of_all in (text, ends))
    batch = TokenBatch(own[:, :-1], own[:, 1:], documents if row.packed else None)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        found = made.steps.run(batch)
        made.update.step(1e-4)
        return found

    return step


def synchronize(layout: ParallelLayout) -> None:
    if layout.device.type == "cuda":
        torch.cuda.synchronize()


def together(layout: ParallelLayout) -> None:
    """All ranks begin at once, with nothing under way."""
    synchronize(layout)
    layout.wait_for_all()


# ---- what a pipeline's trace says ----

Span = tuple[str, float, float]  # what of a step's work, and its start and end in milliseconds
MARK = "pp "
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def traced(step: Callable[[], object], layout: ParallelLayout, path: Path) -> list[Span]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if layout.device.type == "cuda" else [])]
    with marked(), profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1), acc_events=True) as profiler:
        step()  # this one starts the profiler up
        together(layout)
        profiler.step()
        with record_function(STEP):
            step()
            synchronize(layout)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as file:
        return work(json.load(file), layout.device.type == "cuda")


@contextmanager
def marked() -> Iterator[None]:
    """The parts of a pipeline's step under their names in a trace."""
    from onepass.train.pipeline import PipelineStage

    with ExitStack() as stack:
        for kind, method, name in (
            (PipelineStage, "forward_one_chunk", "forward"),
            (PipelineStage, "backward_one_chunk", "backward"),
            (PipelineStage, "backward_weight_one_chunk", "weights"),
            (DeferredWgrad, "flush", "flush"),
        ):
            stack.enter_context(mock.patch.object(kind, method, _named(getattr(kind, method), name)))
        yield


def _named(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def called(self: Any, *args: Any, **options: Any) -> Any:
        with record_function(" ".join([MARK + name, *map(str, args[:1])])):  # and the microbatch's number
            return method(self, *args, **options)

    return called


def work(trace: dict[str, Any], on_gpu: bool) -> list[Span]:
    """The kernels of a step's marked parts, by what launched them; without a GPU the parts themselves. On the host's clock."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    (whole,) = (mark for mark in marks if mark["name"] == STEP)
    parts = [mark for mark in marks if mark["name"].startswith(MARK) and _has(whole, mark["ts"])]
    ran = _kernels(events, parts) if on_gpu else [(part, part) for part in parts]
    base = trace.get("baseTimeNanoseconds", 0) / 1e6
    return [(part["name"].split()[1], base + event["ts"] / 1e3, base + (event["ts"] + event["dur"]) / 1e3) for part, event in ran]


def _kernels(events: list[dict[str, Any]], parts: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each of the parts' kernels, with its part. NCCL's are none: they run while they wait."""
    launched = {event["args"].get("correlation"): event["ts"] for event in events if event.get("cat") in _LAUNCHES}
    found = []
    for event in events:
        if event.get("cat") in _ON_GPU and "nccl" not in event["name"].lower():
            at = launched.get(event["args"].get("correlation"))
            part = None if at is None else next((part for part in parts if _has(part, at)), None)
            if part is not None:
                found.append((part, event))
    return found


def _has(mark: dict[str, Any], at: float) -> bool:
    return bool(mark["ts"] <= at <= mark["ts"] + mark["dur"])


def pipelined(ranks: list[list[Span]]) -> dict[str, Any]:
    """What the ranks' work says of a pipeline's step, in milliseconds, as the top of this file explains."""
    begin, end = min(start for rank in ranks for _, start, _ in rank), max(stop for rank in ranks for _, _, stop in rank)
    drain = max(stop for name, _, stop in ranks[0] if name == "forward")
    flush = max(stop for name, _, stop in ranks[-1] if name == "backward")
    return {
        "traced_ms": end - begin,
        "idle_ms": [_idle(rank, begin, end) for rank in ranks],
        "drain_ms": end - drain,
        "flush_ms": end - flush,
        "flush_idle_ms": _idle(ranks[-1], flush, end),
    }


def _idle(spans: list[Span], begin: float, end: float) -> float:
    return end - begin - length(union([(max(start, begin), stop) for _, start, stop in spans if stop > begin]))


# ---- over all ranks ----


def results(rows: list[Row], small: bool, traces: Path | None) -> Iterator[tuple[Row, list[dict[str, Any]] | str]]:
    """What each rank found of each row, or why there is nothing: then the rows after it have new processes."""
    for _, group in groupby(rows, lambda row: row.ranks):
        left = list(group)
        while left:
            try:
                for found in answers(left.copy(), small, traces):
                    yield left.pop(0), found
            except (mp.ProcessRaisedException, mp.ProcessExitedException, TimeoutError) as error:
                yield left.pop(0), str(error).strip()


def answers(rows: list[Row], small: bool, traces: Path | None) -> Iterator[list[dict[str, Any]]]:
    """One row after the other, as they are done. Raises where a rank fails or nothing comes any more; none is left running."""
    ranks, at = rows[0].ranks, 0
    with tempfile.TemporaryDirectory() as folder:
        args = (rows, small, folder, None if traces is None else str(traces))
        processes = mp.start_processes(run, args, ranks, join=False, start_method="spawn")
        limit, failure, ended = time.monotonic() + PATIENCE, None, False
        try:
            while not ended and failure is None:
                try:
                    ended = processes.join(timeout=0.2)
                except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                    failure = error  # what had been found is handed on first
                while at < len(rows) and all(answer(folder, at, rank).exists() for rank in range(ranks)):
                    yield [json.loads(answer(folder, at, rank).read_text()) for rank in range(ranks)]
                    at, limit = at + 1, time.monotonic() + PATIENCE
                if time.monotonic() > limit:
                    raise TimeoutError(f"nothing was heard of the ranks for {PATIENCE} seconds")
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        if failure is not None:
            raise failure


def described(row: Row, size: Size, found: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' findings as one row's: of each round the slowest rank's time."""
    times = [max(each) for each in zip(*(rank["ms"] for rank in found), strict=True)]
    told = {
        "ms": median(times),
        "ms_range": [min(times), max(times)],
        "host_ms": max(rank["host_ms"] for rank in found),
        "tokens_per_s": row.sequences * size.length / median(times) * 1e3,
        "peak_gib": found[0]["peak_gib"],
        "peak_gib_by_rank": [rank["peak_gib"] for rank in found],
        "loss": found[0]["loss"],
        "norm": found[0]["norm"],
    }
    return told | ({"pipeline": pipelined([rank["spans"] for rank in found])} if row.case == "pp" else {})


def compare(row: Row, rows: list[Row], told: dict[str, dict[str, Any]]) -> None:
    """Adds to what is told of a row what follows from rows before it, where they didn't fail."""
    own, yardstick = told[row.name], told.get(row.beside or "", {}).get("tokens_per_s")
    if yardstick is not None:
        own["scaling"] = own["tokens_per_s"] / (row.ranks * yardstick)
    first = next(other for other in rows if other.alike == row.alike and "loss" in told.get(other.name, {}))
    if first is not row:
        other = told[first.name]
        own |= {"apart": abs(own["loss"] - other["loss"]), "norm_apart": abs(own["norm"] / other["norm"] - 1)}
        own["apart_from"] = first.name


# ---- what is shown ----


def line(row: Row, told: dict[str, Any]) -> str:
    if "error" in told:
        return f"{row.name}: failed: {told['error']}"
    scaling = f", {told['scaling']:.1%} of {row.ranks} x '{row.beside}'" if "scaling" in told else ""
    said = f"{row.name}: {told['ms']:.1f} ms a step, {told['tokens_per_s']:,.0f} tokens/s{scaling}, loss {told['loss']:.4f}"
    if "pipeline" in told:
        parts = told["pipeline"]
        said += f", flush {parts['flush_ms']:.1f} ms, idle {parts['flush_idle_ms']:.1f} of it"
    return said


def table(rows: list[Row], told: dict[str, dict[str, Any]], size: Size) -> Table:
    columns = ("ranks", "sequences", "ms a step", "CPU ms", "tokens/s", "scaling", "beside", "peak GiB", "loss", "apart")
    made = Table("", *columns, title=f"{size.preset}, sequences of {size.length} tokens")
    for row in rows:
        own = told[row.name]
        if "error" in own:
            made.add_row(row.name, str(row.ranks), f"{row.sequences}", "failed")
            continue
        made.add_row(
            row.name, str(row.ranks), f"{row.sequences}", f"{own['ms']:.1f}", f"{own['host_ms']:.1f}",
            f"{own['tokens_per_s']:,.0f}", f"{own['scaling']:.1%}" if "scaling" in own else "", row.beside or "",
            f"{own['peak_gib']:.1f}" if own["peak_gib"] else "", f"{own['loss']:.4f}",
            f"{own['apart']:.0e}" if "apart" in own else "",
        )  # fmt: skip
    return made


def pipelines(rows: list[Row], told: dict[str, dict[str, Any]]) -> Table:
    made = Table("", "flush", "of it idle", "drain", "idle 0", "idle 1", "traced", title="a pipeline's step, ms")
    for row in rows:
        parts = told[row.name].get("pipeline")
        if parts is not None:
            keys = ("flush_ms", "flush_idle_ms", "drain_ms")
            times = [*(parts[key] for key in keys), *parts["idle_ms"], parts["traced_ms"]]
            made.add_row(row.name, *(f"{time:.1f}" for time in times))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=[*CASES, GRAPHS])
    parser.add_argument("--row", action="append", metavar="NAME", help="only this row, by its name; may be given several times")
    parser.add_argument("--ranks", type=int, help="of dp; all GPUs there are")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--traces", type=Path, metavar="DIR", help="keep the traces of the pipelines' ranks there")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    ranks = args.ranks or (2 if args.small else torch.cuda.device_count())
    if ranks < 2:
        parser.error(f"needs two GPUs or more, but there are {ranks}: --small needs none")
    cases, console = args.case or CASES, Console(width=130)
    if GRAPHS in cases and (args.small or len(cases) > 1):
        parser.error(f"--case {GRAPHS} is of a model of its own, on GPUs: without --small and without other cases")
    rows = [row for row in all_rows(SMALL if args.small else REAL, ranks) if row.case in cases]
    size = size_of(rows, args.small)
    if unknown := set(args.row or ()) - {row.name for row in rows}:
        parser.error(f"--row must be one of {', '.join(row.name for row in rows)}, but is {', '.join(sorted(unknown))}")
    rows = [row for row in rows if args.row is None or row.name in args.row]
    device = torch.device("cpu" if args.small else "cuda")
    told: dict[str, dict[str, Any]] = {}
    for row, found in results(rows, args.small, args.traces):
        if isinstance(found, str):
            told[row.name] = {"error": found}
        else:
            told[row.name] = described(row, size, found)
            compare(row, rows, told)
        print(line(row, told[row.name]), flush=True)
        kept = {row.name: asdict(row) | told[row.name] for row in rows if row.name in told}
        write(args.json, device, size=asdict(size), deterministic=True, rows=kept)
    console.print(table(rows, told, size))
    if any("pipeline" in own for own in told.values()):
        console.print(pipelines(rows, told))
    if any("error" in own for own in told.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
