"""The `onepass` command: train, plan, bench, profile, explain, fuzz, doctor. A subcommand imports what it needs when used."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from inspect import Parameter, signature
from typing import Any, NoReturn
from unittest import mock

from onepass.runtime.errors import CommandError

if typing.TYPE_CHECKING:
    import torch
    from torch import Tensor

    from onepass.runtime.backend import Explanation
    from onepass.runtime.op import Op


class _Parser(argparse.ArgumentParser):
    example: Callable[[], str] | None = None  # a command line that works

    def error(self, message: str) -> NoReturn:  # one line; --help prints the usage
        example = f"; such as: {self.example()}" if self.example is not None else ""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help{example})\n")

    def format_help(self) -> str:
        """Begin with what the command does, and not with its usage."""
        description, self.description = self.description, None
        formatter = self._get_formatter()
        formatter.add_text(description)
        try:
            return f"{formatter.format_help()}\n{super().format_help()}"
        finally:
            self.description = description


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 success, 1 an error or something broken, 2 a request that can't be met, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_advice(unknown, args)}")
    try:
        return int(args.run(args))
    except CommandError as refused:
        print(f"onepass {args.command}: {refused}", file=sys.stderr)
        return refused.status
    except KeyboardInterrupt:
        return 130


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    """Return the parser. Only the subcommand that argv names gets its arguments, because they cost imports."""
    parser = _Parser(prog="onepass", description="Fused training kernels for PyTorch: train, measure, explain, check.")
    parser.add_argument("--version", action="version", version=f"onepass {version('onepass')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = next((arg for arg in argv if not arg.startswith("-")), None)
    for name, (summary, fill) in _COMMANDS.items():
        description = summary[0].upper() + summary[1:] + "."
        command = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
        if name == named:
            if isinstance(fill, str):
                _add_module(command, fill)
            else:
                fill(command, argv)
            command.set_defaults(command=name, options=list(command._option_string_actions), parser=command)
    return parser


def _advice(unknown: Sequence[str], args: argparse.Namespace) -> str:
    """Say what a command has in place of options that other programs have, or else which option is the nearest."""
    options = [each.partition("=")[0] for each in unknown]
    in_place = {option: ours for option in options if (ours := args.in_place_of(option))}
    if in_place:
        return "".join(f"; in place of {option}: {ours}" for option, ours in in_place.items())
    near = difflib.get_close_matches(options[0], args.options, 1)
    return f": did you mean {near[0]}?" if near else ""


def _add_module(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the arguments of a module that has a command: `add_arguments`, `run`, and `in_place_of` if it knows others' options."""
    module = importlib.import_module(name)
    module.add_arguments(parser)
    parser.set_defaults(run=module.run, in_place_of=getattr(module, "in_place_of", lambda option: None))


# ---- explain: shapes describe the call, and fake tensors allocate no memory ----

_H200_PROCESSORS = 132


def _explain(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Add explain's arguments. The keyword options in the op's signature become command line options."""
    from onepass.bench.options import DTYPES
    from onepass.runtime.op import OPS

    ops = ", ".join(sorted(OPS))
    parser.add_argument("op", metavar="OP", type=_op, help=f"one of {ops}; its own options: onepass explain OP --help")
    parser.add_argument("--shape", type=_shape, required=True, help="of the op's first tensor, such as 16384,28672")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="of all tensors (%(default)s)")
    parser.add_argument("--device", help="cuda, cuda:1, cpu; a GPU need not be here (default: cuda where there is one, else cpu)")
    parser.add_argument("--no-grad", action="store_true", help="a call outside of training (default: what can be trained is)")
    op = next((arg for arg in argv if arg in OPS), None)
    if op is not None:
        _add_options(parser.add_argument_group(f"options of {op}"), OPS[op].function)
        vars(parser)["example"] = partial(_example, OPS[op])
    parser.set_defaults(run=_run_explain, in_place_of=lambda option: None)


def _op(text: str) -> str:
    from onepass.runtime.backend import find_op

    try:
        return find_op(text).name
    except ValueError as error:  # argparse says ArgumentTypeErrors' words only
        raise argparse.ArgumentTypeError(str(error)) from None


def _shape(text: str) -> tuple[int, ...]:
    shape = tuple(int(size) for size in text.split(","))
    if min(shape) < 0:
        raise ValueError(text)
    return shape


# Arguments that get no gradient.
_CONSTANT = ("cos", "sin", "class_weight", "teacher", "teacher_weight", "teacher_bias", "cross_entropy's weight")
_WRITING = ("inplace_backward", "overwrite")  # options that write the first tensor, which no leaf of autograd's lets them

_shape.__name__ = "shape"  # argparse prints this name in error messages


def _options(function: Callable[..., Any]) -> list[tuple[Parameter, Any]]:
    """Return the parameters after the first tensor that a command line can give, each with its type without None."""
    hints = typing.get_type_hints(function)
    found = []
    for parameter in list(signature(function).parameters.values())[1:]:
        hint = hints.get(parameter.name)
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        kinds = tuple(kind for kind in kinds if kind is not type(None))
        if len(kinds) > 1 and str in kinds:  # a name, or an object that it stands for
            kinds = (str,)
        if len(kinds) == 1 and (kinds[0] in (str, int, float, bool) or _is_tensor(kinds[0])):
            found.append((parameter, kinds[0]))
    return found


def _is_tensor(kind: Any) -> bool:
    from torch import Tensor

    return kind is Tensor


def _add_options(group: Any, function: Callable[..., Any]) -> None:
    for parameter, kind in _options(function):
        option, required = "--" + parameter.name.replace("_", "-"), parameter.default is Parameter.empty
        if _is_tensor(kind) and required:
            group.add_argument(option, type=_shape, required=True, metavar="SHAPE", help="its shape")
        elif _is_tensor(kind) or kind is bool:
            default = bool(parameter.default)
            about = "whether it is given" if _is_tensor(kind) else f"default: {'yes' if default else 'no'}"
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help=about)
        else:
            value = None if required else parameter.default
            shown = "" if value is None else f"default: {value}"
            group.add_argument(option, type=kind, required=required, default=value, metavar=kind.__name__.upper(), help=shown)


def _example(op: Op) -> str:
    """Return the command line of the op's sample."""
    import torch

    sample = op.samples.SAMPLES[op.name]

    def bound(*tensors: Tensor, **options: Any) -> dict[str, Any]:
        return signature(op.function).bind(*tensors, **options).arguments

    given = sample.call(bound, *sample.tensors(torch.device("cpu"), torch.float32))
    x, *_ = given.values()
    words = ["onepass explain", op.name, "--shape", _as_shape(x)]
    for parameter, kind in _options(op.function):
        if parameter.name in given:
            value = given[parameter.name]
            words.append("--" + parameter.name.replace("_", "-"))
            if _is_tensor(kind) and parameter.default is Parameter.empty:
                words.append(_as_shape(value))
            elif not _is_tensor(kind) and kind is not bool:
                words.append(str(value))
    return " ".join(words)


def _as_shape(t: Tensor) -> str:
    return ",".join(map(str, t.shape))


def _run_explain(args: argparse.Namespace) -> int:
    try:
        explanation, notes = _explained(args)
    except (ValueError, TypeError, RuntimeError) as error:
        hint = " (--no-grad describes a call without gradients)" if "require grad" in str(error) and not args.no_grad else ""
        print(f"onepass explain: {error}{hint}", file=sys.stderr)
        return 2
    print(explanation)
    for note in notes:
        print(f"  note   {note}")
    return 0


def _explained(args: argparse.Namespace) -> tuple[Explanation, list[str]]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from onepass.bench.options import DTYPES, find_device
    from onepass.runtime.backend import explain, find_op

    known = find_op(args.op)
    device = find_device(args.device, pretend=True)
    elsewhere = device.type == "cuda" and not torch.cuda.is_available()
    with FakeTensorMode(), _pretended_gpu() if elsewhere else contextlib.nullcontext():
        call = partial(_call, args, known, DTYPES[args.dtype])
        x, options = call(torch.device("meta") if elsewhere else device)  # a CPU build of PyTorch can't index GPU tensors
        plain = {"precision": None} if "precision" in options else {}  # a product in eight bits casts real weights
        known.function(x, **options | plain | {"backend": "torch"})  # raises what the call itself would raise
        x, options = call(device)
        explanation = explain(args.op, x, **options)
    if not elsewhere:
        return explanation, []
    return explanation, [
        f"no GPU here: tiles are those for {_H200_PROCESSORS} multiprocessors (H100, H200), and whether kernels can be compiled "
        "and launched there was not looked at (onepass doctor does, on that machine)"
    ]


def _call(args: argparse.Namespace, op: Op, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
    """Return the first tensor of the call that the command line describes, and its other arguments."""
    import torch

    first, types = next(iter(signature(op.function).parameters)), getattr(op.samples, "TYPES_OF", {})

    def trained(t: Tensor, name: str) -> Tensor:
        constant = name in _CONSTANT or f"{op.name}'s {name}" in _CONSTANT
        return t.requires_grad_(t.is_floating_point() and not constant and not args.no_grad)

    x = trained(torch.empty(args.shape, dtype=types.get(first, dtype), device=device), first)
    x.requires_grad_(x.requires_grad and not any(vars(args).get(option) for option in _WRITING))

    def fake(name: str, value: bool | tuple[int, ...]) -> Tensor | None:
        t = _fake(x, op, name, value, vars(args), types.get(name, dtype))
        return t if t is None else trained(t, name)

    options = {
        parameter.name: fake(parameter.name, value) if _is_tensor(kind) else value
        for parameter, kind in _options(op.function)
        for value in [getattr(args, parameter.name)]
    }
    return x, options


def _fake(
    x: Tensor, op: Op, name: str, value: bool | tuple[int, ...], given: dict[str, Any], dtype: torch.dtype
) -> Tensor | None:
    """Return a tensor, or None. The op's samples give its shape, by default x's last dimension."""
    if isinstance(value, tuple):
        return x.new_empty(value, dtype=dtype)
    if not value:
        return None
    shape = op.samples.SHAPES_OF.get(op.name, {}).get(name)
    return x.new_empty(x.shape[-1:] if shape is None else shape(x, given), dtype=dtype)


@contextlib.contextmanager
def _pretended_gpu() -> Iterator[None]:
    """Report the properties of an H200, the GPU of our measurements, on a machine without a GPU: tiles depend on them.

    Triton counts as installed, because PyTorch's builds for GPUs bring it.
    """
    from onepass.kernels import language

    properties = types.SimpleNamespace(
        multi_processor_count=_H200_PROCESSORS, shared_memory_per_block_optin=232448, total_memory=139 << 30, major=9, minor=0
    )
    installed = language.triton or types.SimpleNamespace()
    with (
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch.object(language, "triton", installed),
        mock.patch.object(language, "INTERPRETED", False),
    ):
        yield


_Fill = Callable[[argparse.ArgumentParser, list[str]], None]
_COMMANDS: dict[str, tuple[str, str | _Fill]] = {  # what it does, and the module that has it, or what adds its arguments
    "train": ("train a GPT that uses all of it, and see what each fusion brings", "onepass.train.command"),
    "plan": ("say how much memory and time training takes on one GPU or many, and what to change", "onepass.train.plan_command"),
    "bench": ("measure ops against their peers", "onepass.bench.command"),
    "profile": (
        "run a script and say what it does with the machine, and what of onepass would apply",
        "onepass.profiling.script",
    ),
    "explain": ("say which backend and kernels a call would take, and why, without running it", _explain),
    "fuzz": ("run random calls of every op against its formula in fp64", "onepass.testing.fuzz_command"),
    "doctor": ("look for what is broken or slow on this machine", "onepass.doctor"),
}


if __name__ == "__main__":
    sys.exit(main())
