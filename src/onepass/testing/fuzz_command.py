"""`onepass fuzz`: random cases of ops, and random histories of layers in eight bits, with a table of what failed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from onepass.bench.options import find_device
from onepass.kernels.language import INTERPRETED
from onepass.runtime.errors import CommandError
from onepass.runtime.op import OPS
from onepass.testing import fuzz
from onepass.testing.fuzz import NUMBERS, Tally, fuzz_cases
from onepass.testing.fuzz_histories import HISTORIES, run_history

_NAMES = [*sorted(OPS), HISTORIES]
_LINE_SECONDS = 30.0  # between lines of progress where stderr is no terminal
_SHOWN = 10  # failing cases that are printed
_LARGEST_SEED = 10**12  # generators take 64 bits, and have a thousand seeds a case


def add_arguments(parser: Any) -> None:
    parser.add_argument("op", nargs="?", metavar="OP", choices=_NAMES, help=f"one of {', '.join(_NAMES)} (default: all)")
    parser.add_argument("--cases", type=int, default=100, help="of each op (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next has the next (%(default)s)")
    parser.add_argument("--choices", type=_choices, help="of one case, as a failure prints them")
    parser.add_argument(
        "--without", action="append", default=[], choices=NUMBERS, help="numbers to leave out, such as 'inf and NaN'"
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu (default: cuda where there is one, else cpu)")
    parser.set_defaults(run=run)


def _choices(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


_choices.__name__ = "choices"  # argparse prints this name in error messages


def run(args: Any) -> int:
    if args.choices is not None and (args.op is None or args.cases != 1):
        raise CommandError("--choices needs OP and --cases 1")
    if args.cases < 1:
        raise CommandError(f"--cases must be at least 1, but is {args.cases}")
    if abs(args.seed) > _LARGEST_SEED:
        raise CommandError(f"--seed must be from {-_LARGEST_SEED} to {_LARGEST_SEED}, but is {args.seed}")
    device = find_device(args.device)
    tallies = []
    for name in [args.op] if args.op else _NAMES:
        how = {"seen": _shown(args.cases), "device": device, "without": args.without}
        how |= {} if args.choices is None else {"choices": args.choices, "shrinks": 0}
        run_one = run_history if name == HISTORIES else partial(fuzz.run_case, OPS[name])
        tallies.append(fuzz_cases(name, run_one, args.cases, args.seed, **how))
        if tallies[-1].ended:
            print(f"{tallies[-1].op} ended after {tallies[-1].cases} cases, {tallies[-1].ended}", flush=True)
            break
    print("\n".join(_table(tallies)))
    print(_summary(tallies))
    if device.type == "cpu" and not INTERPRETED:
        print("Triton's kernels did not run: they need a GPU, or TRITON_INTERPRET=1 on a CPU")
    return int(any(tally.failed or tally.ended for tally in tallies))


def _shown(cases: int) -> Callable[[Tally], None]:
    """Return what shows progress, and each failing case as soon as it is there."""
    last, said = [time.perf_counter()], [0]

    def seen(tally: Tally) -> None:
        now = time.perf_counter()
        if said[0] < min(len(tally.failed), _SHOWN):
            said[0], outcome = len(tally.failed), tally.failed[-1]
            lines = (f"  {outcome.op}({outcome.what})", *(f"  {failure}" for failure in outcome.failures))
            print(outcome.line, *lines, sep="\n", flush=True)
        words = f"{tally.op} {tally.cases}/{cases}, {len(tally.failed)} failed, {tally.seconds:.0f} s"
        if sys.stderr.isatty() and (now - last[0] > 0.2 or tally.cases == cases):
            last[0] = now
            print(f"\r{words:79}", end="\r" if tally.cases == cases else "", file=sys.stderr, flush=True)
        elif not sys.stderr.isatty() and now - last[0] > _LINE_SECONDS:
            last[0] = now
            print(words, file=sys.stderr, flush=True)

    return seen


def _summary(tallies: list[Tally]) -> str:
    cases, failed = sum(tally.cases for tally in tallies), sum(len(tally.failed) for tally in tallies)
    return f"{failed} of {cases} cases failed: the commands above repeat them" if failed else f"none of {cases} cases failed"


def _table(tallies: list[Tally]) -> Iterator[str]:
    yield f"{'op':22} {'cases':>7} {'formula':>8} {'kernels':>8} {'failed':>7} {'seconds':>8}"
    for tally in tallies:
        ran = f"{tally.ran['torch']:8} {tally.ran['triton']:8}"
        yield f"{tally.op:22} {tally.cases:7} {ran} {len(tally.failed):7} {tally.seconds:8.1f}"
