"""`onepass profile script.py`: run a script as Python does, and record all of it or calls of one of its functions.

Exit status: 0 for success. 1 if the script failed; its traceback is printed. 2 if the request can't be met. 130 if the script was
interrupted; the profile of what was recorded so far is shown.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from onepass.profiling.model import Profile, show
from onepass.profiling.record import ProfilerInUse
from onepass.profiling.recorders import CallRecorder, RecordingDone, StepRecorder, WholeRecorder, say
from onepass.runtime.errors import CommandError, check_output, install_hint

_DECORATOR = "__onepass_profiled__"
_SECONDS = 20.0  # of a script on one rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a script and say what it does with the machine. Options stand before the script; what follows it is the script's."
    )
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="a Python file, run as python would")
    rest = parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")
    rest.required = False  # argparse would name it where SCRIPT is missing
    parser.add_argument(
        "--function", metavar="NAME",
        help="only calls of this function of the script's, such as train_step or Trainer.step; the script ends after the last",
    )  # fmt: skip
    parser.add_argument(
        "--skip", metavar="N", type=_count, default=3, help="calls of NAME, or optimizer steps, that warm up (%(default)s)"
    )
    parser.add_argument(
        "--steps", metavar="N", type=_positive, default=5,
        help="calls of NAME timed, then recorded (%(default)s); of several ranks without --function, optimizer steps recorded",
    )  # fmt: skip
    parser.add_argument("--skip-first", metavar="SECONDS", type=_seconds, default=0.0, help="without --function: begin later")
    parser.add_argument(
        "--seconds", metavar="SECONDS", type=_seconds,
        help=f"without --function: record so long, then end the script ({_SECONDS:g}; 0: all of it; of several ranks: --steps)",
    )  # fmt: skip
    parser.add_argument("--top", metavar="N", type=_positive, default=15, help="rows of the table (%(default)s)")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw the timeline (.png, .svg, .pdf)")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write a Chrome trace (.json, .json.gz)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures and words")


def _of_at_least(kind: Callable[[str], Any], least: float, name: str) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        value = kind(text)
        if not least <= value < float("inf"):
            raise ValueError(text)
        return value

    parsed.__name__ = name  # argparse prints it in error messages
    return parsed


_count, _positive = _of_at_least(int, 0, "number"), _of_at_least(int, 1, "number of at least 1")
_seconds = _of_at_least(float, 0, "number of seconds")


def run(args: argparse.Namespace) -> int:
    _check_outputs(args)
    recorder = _recorder(args, int(os.environ.get("WORLD_SIZE", "1")))
    try:
        source = args.script.read_bytes()
    except OSError as error:
        raise CommandError(f"SCRIPT can't be read: {error}") from None
    try:
        tree = ast.parse(source, str(args.script))
    except SyntaxError:
        traceback.print_exc(limit=0)
        return 1
    if args.function:
        _decorate(tree, args.function)
    try:
        status = _execute(tree, args, recorder)
        if status == 1:
            return status
        say("reading the trace, measuring the machine's ceilings")
        profile = recorder.profile()
    except ProfilerInUse as error:
        raise CommandError(f"SCRIPT must not profile itself while it is recorded: {error}") from None
    if not profile.rows:
        raise CommandError("nothing that PyTorch ran was seen while recording")
    _show(profile, args)
    return status


def _recorder(args: argparse.Namespace, ranks: int) -> CallRecorder | WholeRecorder:
    """Return what records the script. Several ranks count: by clocks they would end at different steps, and wait for others."""
    if args.function:
        return CallRecorder(args.function, args.skip, args.steps)
    if ranks == 1:
        return WholeRecorder(args.skip_first, _SECONDS if args.seconds is None else args.seconds)
    if args.seconds:
        raise CommandError(
            f"--seconds must be 0 for one of {ranks} ranks, but is {args.seconds:g}: a clock of each would end the script at "
            "different steps, and ranks would wait for others for ever; without it --steps counts optimizer steps"
        )
    if args.seconds is not None:
        return WholeRecorder(args.skip_first, 0.0)
    if args.skip_first:
        raise CommandError(f"--skip-first needs --seconds 0 for one of {ranks} ranks, as --skip counts optimizer steps")
    return StepRecorder(args.skip, args.steps)


# ---- output files: written at the end, but checked before the script runs ----

_SUFFIXES = {"picture": (".png", ".svg", ".pdf"), "trace": (".json", ".json.gz"), "json": (".json",)}


def _check_outputs(args: argparse.Namespace) -> None:
    if args.picture and importlib.util.find_spec("matplotlib") is None:
        raise CommandError(f"--picture needs matplotlib: {install_hint('bench')}")
    for option, suffixes in _SUFFIXES.items():
        check_output(option, getattr(args, option), suffixes)


def _show(profile: Profile, args: argparse.Namespace) -> None:
    show(profile, Console(highlight=False, width=None if sys.stdout.isatty() else 118), args.top)
    if args.picture:
        profile.picture(args.picture)
        print(f"picture in {args.picture}")
    if args.trace:
        profile.trace(args.trace)
        print(f"trace in {args.trace}")
    if args.json:
        run = {"schema": 1, "torch": torch.__version__, "script": str(args.script), "args": args.args, "function": args.function}
        args.json.write_text(json.dumps(run | profile.as_dict(), indent=1) + "\n")
        print(f"figures in {args.json}")


# ---- the script ----


def _execute(tree: ast.Module, args: argparse.Namespace, recorder: CallRecorder | WholeRecorder) -> int:
    """Run the script. Return 0, or 1 if it failed (its error is printed), or 130 if it was interrupted."""
    code = compile(tree, str(args.script), "exec")
    with _as_main(args.script, args.args) as module:
        vars(module)[_DECORATOR] = getattr(recorder, "decorate", None)
        try:
            with recorder:
                exec(code, vars(module))
        except RecordingDone:
            say("enough recorded: the script ended here")
        except KeyboardInterrupt:
            return 130
        except SystemExit as stopped:
            if stopped.code not in (None, 0):
                say(f"the script ended with {stopped.code!r}")
                return 1
        except ProfilerInUse:
            raise
        except BaseException as error:
            _print_error(error, str(args.script))
            return 1
    return 0


@contextmanager
def _as_main(script: Path, args: list[str]) -> Iterator[types.ModuleType]:
    module = types.ModuleType("__main__")
    vars(module).update(__file__=str(script), __builtins__=__builtins__)
    before = sys.argv, list(sys.path), sys.modules.get("__main__")
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    sys.modules["__main__"] = module
    try:
        yield module
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            sys.modules["__main__"] = before[2]


def _print_error(error: BaseException, script: str) -> None:
    """Print the traceback as Python does, without the frames above the script's own."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _decorate(tree: ast.Module, name: str) -> None:
    """Put the recorder's decorator outside the function's own decorators: a compiled function is called through them."""
    functions = dict(_functions(tree, ""))
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise CommandError(
            f"--function must name a function that the script defines with def, but is {name!r}; there are: {known}"
        )
    node = functions[name]
    decorator = ast.Name(_DECORATOR, ast.Load())
    node.decorator_list.insert(0, ast.copy_location(decorator, node))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name, child
        yield from _functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)
