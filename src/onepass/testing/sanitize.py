"""Run every kernel under NVIDIA's compute-sanitizer: memory errors, races, uninitialised reads, wrong barriers.

    python -m onepass.testing.sanitize                   # all four tools, each in a process of its own
    python -m onepass.testing.sanitize --tool racecheck --only norm

The calls are the samples of all ops, forward and backward, in the types that kernels take, and a step of AdamW. Each tensor has
memory of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that an access past its end is seen. A first run, without a tool, fills
Triton's cache. Reports about kernels that are not ours are left out, as racecheck accuses those of cuBLAS, and so are those of
`ALLOWED`. Under initcheck products are written twice: it does not see what the copy engine writes for cuBLAS. Exit status: 0
clean, 1 findings, 2 no compute-sanitizer or no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from onepass.bench.options import short
from onepass.gradients.adamw import AdamW
from onepass.gradients.written_weights import follow_by_kernel
from onepass.kernels import fp8_cast
from onepass.kernels.decode import decode_four_bits, decode_int8
from onepass.kernels.fp8 import new_notes
from onepass.kernels.fp8_transpose import transpose_codes
from onepass.kernels.grouped_kernels import multiply_rows
from onepass.kernels.launch import Bound, Kernel
from onepass.kernels.mapped_rows import order_by_map, spread_by_map, sum_by_map
from onepass.kernels.token_rows import order_rows, spread_rows, sum_rows
from onepass.ops.activation import fp8 as activation_fp8
from onepass.ops.activation.bias_activation import bias_activation
from onepass.ops.activation.formula import ActivationOptions
from onepass.ops.activation.fp8_kernels import ActivationNeeds
from onepass.ops.attention.document_kernels import checked_boundaries, make_nan
from onepass.ops.dropout.dropout_add import dropout_add
from onepass.ops.loss.cross_entropy import cross_entropy
from onepass.ops.loss.linear_cross_entropy import linear_cross_entropy
from onepass.ops.loss.linear_divergence import linear_divergence
from onepass.ops.norm.formula import NormOptions
from onepass.ops.norm.fp8 import norm_codes, norm_codes_transposed
from onepass.ops.norm.norm import layer_norm, rms_norm
from onepass.ops.norm.ragged import kernels as ragged_kernels
from onepass.parallel import MainGrads
from onepass.product.fp8.scales import FP8Scales
from onepass.runtime.fp8 import E4M3, FP8Target
from onepass.runtime.fp8_recipe import FP8Recipe
from onepass.runtime.sizes import ceil_div
from onepass.testing.aot import package_modules
from onepass.testing.contract import subjects
from onepass.testing.faults import PRODUCTS, wrapped

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ALLOWED = dict.fromkeys(
    (("initcheck", name) for name in ("_dk_dv_kernel", "_grouped_rows_kernel")),
    "reads tensor descriptors, which initcheck doesn't see Triton write",
)
COMPILE = "(compile)"  # the run before, without a tool
_OPTIONS = {"memcheck": ("--report-api-errors", "no")}  # PyTorch asks the driver questions whose answer is an error
_SECONDS = 600  # that a tool may take
_CALL = "onepass call: "  # printed before each call, so that a report can be told its call

_LINE = re.compile(r"^=========(?: (?P<text>.*))?$")
_KERNEL = re.compile(
    r"\bat (?:void )?(?P<kernel>[\w:<>,~ ]+?)(?:\(.*?\))?\+0x[0-9a-f]+|"  # at _rows_kernel+0x40 in backward.py:77
    r"\bat 0x[0-9a-f]+ in (?:\S+:\d+:)?(?:void )?(?P<older>[\w:<>,~ ]+)"  # at 0x40 in backward.py:77:_rows_kernel
)
_NOT_REPORTS = re.compile(
    r"^(COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY|Target application|Program hit|No attachable|"
    r"Internal Sanitizer|Error: (?!Race|Potential)|Warning: (?!Race|Potential))"
)


@dataclass(frozen=True)
class Violation:
    """One report of a tool."""

    what: str  # its first line
    kernel: str  # "" where the report names none
    call: str  # the last call that was announced before it


@dataclass
class ToolReport:
    """What one tool found."""

    tool: str
    calls: int = 0
    findings: list[Violation] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)  # reports that are left out, by kernel and why
    failure: str = ""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not self.findings and not self.failure


# ---- reading compute-sanitizer's output ----


def parse(lines: Iterable[str]) -> Iterator[Violation]:
    """Yield the reports in the output of compute-sanitizer and of the program under it.

    A report is a line without indentation and the indented lines after it. Its kernel is the first that an address is in.
    """
    call, head, kernel = "", "", ""
    for line in lines:
        match = _LINE.match(line.rstrip())
        text = "" if match is None else match["text"] or ""
        inside = match is not None and text.startswith(" ")
        if head and not inside:
            yield Violation(head, kernel, call)
            head = ""
        if match is None:
            call = line.strip().removeprefix(_CALL) if line.startswith(_CALL) else call
        elif text and not inside and not _NOT_REPORTS.match(text):
            head, kernel = text, _kernel_in(text)
        elif inside and head and not kernel:
            kernel = _kernel_in(text)
    if head:
        yield Violation(head, kernel, call)


def _kernel_in(text: str) -> str:
    found = _KERNEL.search(text)
    return (found["kernel"] or found["older"]).strip() if found else ""


def sort_findings(tool: str, lines: Iterable[str], ours: frozenset[str]) -> ToolReport:
    """Return a tool's report. A finding that is allowed or in a kernel that is not one of `ours` is only counted."""
    report = ToolReport(tool)
    lines = list(lines)
    report.calls = sum(line.startswith(_CALL) for line in lines)
    for finding in parse(lines):
        why = ALLOWED.get((tool, finding.kernel), "is not ours" if finding.kernel and finding.kernel not in ours else "")
        if why:
            report.others[f"{finding.kernel}, which {why}"] += 1
        else:
            report.findings.append(finding)
    return report


# ---- the calls ----


def our_kernels() -> frozenset[str]:
    """Return the names that our kernels have on a GPU."""
    return frozenset(v.jit.fn.__name__ for module in package_modules() for v in vars(module).values() if isinstance(v, Kernel))


def run_calls(device: torch.device, only: str = "") -> None:
    """Run all calls whose name contains `only`, by our kernels. Print each call's name first."""
    for name, call in (*_samples(device), *_more_calls(device)):
        if only in name:
            print(f"{_CALL}{name}", flush=True)
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def _samples(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the samples of all ops, in each of two types that the kernels take."""
    for name, subject in subjects("triton", device).items():
        for dtype in (torch.float32, torch.bfloat16):
            tensors = subject.tensors(dtype)
            if subject.op.unsupported(subject.sample.call(subject.op.call, *tensors)) is None:
                yield f"{name} {short(dtype)}", partial(subject.gradients, tensors)


def _check_boundaries(device: torch.device) -> None:
    """Have right and wrong boundaries checked, as other packages' attention does."""
    for ends in ((0, 70, 100), (0, 130, 100)):
        boundaries, wrong = checked_boundaries(torch.tensor(ends, dtype=torch.int32, device=device), 100)
        make_nan(boundaries.new_empty(3000, dtype=torch.float32), wrong)


def _more_calls(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield calls of the kernels that the samples are too small for, or that an option runs."""

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    def backward(function: Callable[..., Any], *args: Any, **options: Any) -> None:
        y = function(*args, **options, backend="triton")
        ys = y if isinstance(y, tuple) else (y,)
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])

    for width in (1025, 5001, 12301, 70001):
        for dtype in (torch.bfloat16, torch.float32):
            for function, vectors in ((rms_norm, 1), (layer_norm, 2)):
                x, residual, *some = (draw(*shape, dtype=dtype) for shape in ((5, width), (5, width), *((width,),) * vectors))
                name = f"{function.__name__} 5x{width} {short(dtype)} residual"
                yield name, partial(backward, function, x, *some, residual=residual)
    yield "rms_norm 1100x203", partial(backward, rms_norm, draw(1100, 203), draw(203))  # fewer rows meet nowhere
    yield "attention's boundaries", partial(_check_boundaries, device)
    yield "dropout_add p", partial(backward, dropout_add, draw(37, 203), draw(37, 203), p=0.3, bias=draw(203))
    for activation in ("gelu", "swiglu"):
        more = {"token_weight": draw(37, dtype=torch.float32), "dropout": 0.1, "save": "fp8"}
        yield (
            f"bias_activation {activation} all",
            partial(backward, bias_activation, draw(37, 406), draw(406), activation, **more),
        )
    wide = draw(300, 2050), draw(2050), "swiglu"  # so wide that a token weight's gradient is summed over programs
    yield "bias_activation token_weight", partial(backward, bias_activation, *wide, token_weight=draw(300))
    labels = torch.arange(37, device=device).mul(135).remainder(5003)
    yield "cross_entropy 37x5003", partial(backward, cross_entropy, draw(37, 5003), labels)
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"chunk_bytes": 1 << 16},
        {"grad_scale": 1.0},
        {"softcap": 5.0, "label_smoothing": 0.1},
    )
    for columns in (8, 61):  # of few, gradients are made in forward
        for more in ways:
            name = f"linear_cross_entropy 37x{columns}x5003 {' '.join(more)}"
            yield name, partial(backward, linear_cross_entropy, draw(37, columns), draw(5003, columns), labels, **more)
    teacher = draw(37, 13).detach(), draw(5003, 13).detach()
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        for reduction in ("mean", "none"):
            run = partial(linear_divergence, kind=kind, reduction=reduction)
            yield f"linear_divergence {kind} {reduction}", partial(backward, run, draw(37, 61), draw(5003, 61), *teacher, labels)
    yield "fp8 cast", partial(_fp8_casts, draw(37, 208).detach(), draw(5, 12304).detach())
    for activation, x in (("gelu", draw(37, 208)), ("swiglu", draw(5, 416)), ("swiglu", draw(5, 2 * 8208))):
        yield f"activation codes {activation} {x.shape[-1]}", partial(_activation_codes, activation, x.detach())
    for width in (208, 5008, 12304, 70000):
        yield f"fp8 norm 37x{width}", partial(_fp8_norms, draw(37, width).detach())
    yield "decode", partial(_decodes, device)
    yield "experts' rows", partial(_experts_rows, draw(37 * 3, 203).detach())
    yield "grouped products", partial(_grouped_products, *(draw(300, width).detach().bfloat16() for width in (264, 136)))
    yield "ragged_norm", partial(_ragged_norm, [draw(37, width).detach() for width in (1, 33, 255, 1000, 2001)])
    yield "adamw", partial(_adamw_step, device)


def _decodes(device: torch.device) -> None:
    """Decode weights whose last block is whole or not, by scales that are codes or not, and int8 of rows."""
    for count in (4096, 5001):
        out, codes = torch.empty(count, device=device), torch.arange(ceil_div(count, 2), device=device).to(torch.uint8)
        table, absmax = torch.linspace(-1, 1, 273, device=device), torch.rand(ceil_div(count, 64), device=device)
        decode_four_bits(out, codes, table, absmax, None, 64, 1)
        decode_four_bits(out, codes, table, absmax.mul(255).to(torch.uint8), absmax, 64, 256)
    rows = torch.arange(37 * 203, device=device).to(torch.int8).view(37, 203)
    decode_int8(torch.empty(37, 203, device=device), rows, torch.rand(37, device=device), 1 / 127)


def _experts_rows(x: Tensor) -> None:
    """Sort the rows of 37 tokens, some of which choose experts that there aren't, spread and sum them."""
    chosen = torch.arange(x.shape[0], device=x.device).mul_(7).remainder_(19).view(37, 3) - 1
    order_rows(chosen, x[:37, :3], 17)
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    spread_rows(x[:37], rows // 3, rows.view(37, 3))
    sum_rows(x, chosen.int(), None)
    taken = (torch.arange(37 * 17, device=x.device) % 5 == 0).view(37, 17)
    count = taken.numel() // 5 + 1
    order = order_by_map(taken, count)
    sum_by_map(x.new_zeros(count, 203), order)
    spread_by_map(x[:37], order)


def _grouped_products(dy: Tensor, x: Tensor) -> None:
    """Multiply rows of groups of 0, 129 and 131, of 300, with matrices in both layouts."""
    ends = torch.tensor((0, 129, 260), dtype=torch.int32, device=x.device)
    weight = x.new_zeros(3, dy.shape[1], x.shape[1])
    multiply_rows(x, weight, ends)
    multiply_rows(dy, weight.mT, ends)


def _fp8_casts(*xs: Tensor) -> None:
    for x in xs:
        noted = new_notes(x.device)
        fp8_cast.cast_rows(x)
        target = FP8Target(E4M3, torch.ones((), device=x.device), *noted)
        codes, _ = fp8_cast.cast_tensor(x, target, transposed=True)
        assert codes is not None
        transpose_codes(codes)
        scales = FP8Scales(FP8Recipe(), x.device)
        scales.measure("input", partial(fp8_cast.cast_tensor, x, codes=False))
        scales.refresh()
    fp8_cast.cast_columns(xs[0][:32].expand(2, -1, -1).contiguous())


def _activation_codes(activation: str, x: Tensor) -> None:
    options = ActivationOptions(activation, None, None)
    bias, weight = torch.ones_like(x[0]), torch.ones(len(x), device=x.device)
    noted = new_notes(x.device)
    target = FP8Target(E4M3, torch.ones((), device=x.device), *noted)
    for to in (FP8Target(), target):
        y, _ = activation_fp8.activation_codes(x, bias, weight, options, to, use_triton=True)
    activation_fp8.activation_backward_codes(
        torch.ones_like(y, dtype=x.dtype), x, bias, weight, options, target, target,
        ActivationNeeds(dbias=True, dtoken_weight=True), use_triton=True,
    )  # fmt: skip


def _fp8_norms(x: Tensor) -> None:
    for layer in (False, True):
        options, vectors = NormOptions(layer, 1e-6, False), (x[0].contiguous(), x[1].contiguous() if layer else None)
        noted = new_notes(x.device)
        target = FP8Target(E4M3, torch.ones((), device=x.device), *noted)
        norm_codes(x, None, *vectors, options, FP8Target(), False)
        _, _, h, stats = norm_codes(x, x, *vectors, options, target, True)
        assert h is not None
        norm_codes_transposed(h, stats, *vectors, options, target)
        norm_codes_transposed(h, None, *vectors, options, target)


def _ragged_norm(xs: list[Tensor]) -> None:
    weights = [x[0].contiguous() for x in xs]
    _, mean, rstd = ragged_kernels.ragged_forward(xs, weights, weights, True, 1e-5, True)
    ragged_kernels.ragged_backward(xs, xs, weights, mean, rstd, True, True, True, True)


@contextlib.contextmanager
def _launched() -> Iterator[set[str]]:
    """Collect the names of the kernels that are launched in the block."""
    names: set[str] = set()
    stock = Bound.__call__

    def launch(bound: Bound, grid: Any, *args: Any) -> None:
        names.add(bound.kernel.jit.fn.__name__)
        stock(bound, grid, *args)

    with mock.patch.object(Bound, "__call__", launch):
        yield names


def _products_seen() -> contextlib.AbstractContextManager[None]:
    """Write the results of products once more, by a kernel whose writes initcheck sees."""

    def seen(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def product(*args: Any, **kwargs: Any) -> Tensor:
            y = stock(*args, **kwargs)
            y.data.mul_(1)  # without a new version for autograd
            return y

        return product

    return wrapped(PRODUCTS, seen)


def _adamw_step(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.randn(37, 29, device=device).to(dtype))
        main_grads = MainGrads([weight])
        main_grads.zero_()
        weight.square().sum().backward()
        main_grads.finish()
        AdamW(main_grads).step(max_norm=1.0)
    follow_by_kernel(weight.detach(), torch.zeros_like(weight, dtype=torch.float32, requires_grad=False))


# ---- the command ----


def _run_tool(tool: str, sanitizer: str, only: str) -> ToolReport:
    """Run the calls under one tool, in a process of its own. Without a tool they are run to be compiled."""
    command = [sys.executable, "-m", "onepass.testing.sanitize", "--calls", "--only", only]
    if tool == "initcheck":
        command.append("--products-seen")
    if tool != COMPILE:
        command = [sanitizer, "--tool", tool, "--print-limit", "1000000", *_OPTIONS.get(tool, ()), *command]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return ToolReport(tool, failure=f"did not end in {_SECONDS} s", seconds=time.monotonic() - start)
    lines = done.stdout.splitlines()
    report = sort_findings(tool, lines, our_kernels())
    report.seconds = time.monotonic() - start
    if done.returncode or not report.calls:
        last = next((line for line in reversed(lines) if line.strip() and not line.startswith("=========")), "nothing was run")
        report.failure = f"exit status {done.returncode}: {last.strip()}"
    return report


def table(reports: list[ToolReport]) -> Iterator[str]:
    yield f"{'tool':10} {'calls':>6} {'findings':>9} {'others':>7} {'seconds':>8}"
    for report in reports:
        counts = f"{report.calls:6} {len(report.findings):9} {report.others.total():7}"
        yield f"{report.tool:10} {counts} {report.seconds:8.0f}{'  ' * bool(report.failure)}{report.failure}"
    for report in reports:
        for (what, kernel, call), count in Counter((f.what, f.kernel, f.call) for f in report.findings).items():
            yield f"{report.tool}: {call}: {kernel or 'no kernel named'}: {what}{f' ({count} times)' if count > 1 else ''}"
        for words, count in report.others.items():
            yield f"{report.tool}: left out {count} of {words}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m onepass.testing.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="may be given several times (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="samples whose name contains this")
    parser.add_argument("--calls", action="store_true", help="run the calls themselves, without a sanitizer")
    parser.add_argument("--products-seen", action="store_true", help="with --calls: write products twice, as initcheck needs it")
    args = parser.parse_args(argv)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    missing = "compute-sanitizer is not on the PATH" if sanitizer is None and not args.calls else ""
    missing = "there is no GPU" if not torch.cuda.is_available() else missing
    if missing:
        print(f"onepass.testing.sanitize: {missing}, so nothing was checked", file=sys.stderr)
        return 2
    if args.calls:
        with _launched() as names, _products_seen() if args.products_seen else contextlib.nullcontext():
            run_calls(torch.device("cuda"), args.only)
        rest = our_kernels() - names
        if rest and not args.only:
            print(f"no call launches {', '.join(sorted(rest))}")
        return int(bool(rest) and not args.only)
    assert sanitizer is not None
    reports = [_run_tool(COMPILE, sanitizer, args.only)]
    if reports[0].clean:
        reports += [_run_tool(tool, sanitizer, args.only) for tool in args.tool or TOOLS]
    print("\n".join(table(reports)))
    return int(not all(report.clean for report in reports))


if __name__ == "__main__":
    sys.exit(main())
