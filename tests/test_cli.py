"""The command as it is typed: what it prints, on which stream, and its exit status."""

import ast
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from ops.calls import DELEGATED

from onepass import cli
from onepass.runtime import backend
from onepass.runtime import op as op_records
from onepass.testing import aot, sanitize
from onepass.train import foreign_flags


def _run(capsys, *argv):
    """Exit status, stdout, stderr."""
    try:
        status = cli.main(argv)
    except SystemExit as stopped:  # argparse's own way out
        status = stopped.code or 0
    out, err = capsys.readouterr()
    return status, out, err


def test_help_names_the_commands_that_exist_and_no_other(capsys):
    status, out, _ = _run(capsys, "--help")
    assert status == 0
    assert all(f"    {name} " in out for name in ("train", "plan", "bench", "profile", "explain", "doctor"))


def test_version(capsys):
    from onepass import __version__

    assert _run(capsys, "--version") == (0, f"onepass {__version__}\n", "")


def test_help_loads_no_command():
    code = "import sys; from onepass import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in sys.modules if name.startswith(('onepass.bench', 'onepass.doctor', 'rich'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        ("train", "Train a GPT on text files"),
        ("plan", "Say how much GPU memory"),
        ("bench", "Measure ops against their peers"),
        ("profile", "Run a script and say what it does"),
        ("explain", "Say which backend and kernels"),
        ("doctor", "Look for what is broken or slow"),
    ],
)
def test_each_command_has_help_that_begins_with_what_it_does(command, begins, capsys):
    status, out, _ = _run(capsys, command, "--help")
    assert status == 0
    assert out.startswith(begins)
    assert f"\nusage: onepass {command}" in out
    assert out.index("\nusage") < out.index("\noptions:") < out.index("usage") + 1000  # not a screen of flags, but all ops


def test_help_begins_with_what_the_package_does(capsys):
    assert _run(capsys, "--help")[1].startswith("Fused training kernels for PyTorch")


def test_explain_on_a_cpu(capsys):
    status, out, err = _run(capsys, "explain", "bias_activation", "--shape", "16,32", "--device", "cpu", "--dtype", "fp64")
    assert (status, err) == (0, "")
    assert out.startswith("bias_activation: torch (auto, because x is torch.float64)")


def test_explain_prints_what_explain_returns(capsys):
    x, bias = torch.empty(16, 32), torch.empty(32)
    options = "--shape 16,32 --device cpu --dtype fp32 --activation swiglu --clamp 7 --linear-offset 1 --bias"
    status, out, _ = _run(capsys, "explain", "bias_activation", *options.split())
    assert status == 0
    assert out.strip() == str(backend.explain("bias_activation", x, bias, "swiglu", clamp=7.0, linear_offset=1.0))


def test_explain_describes_a_call_of_training_unless_told_otherwise(capsys):
    given = ["linear_cross_entropy", "--shape", "64,32", "--weight", "1000,32", "--labels", "64", "--device", "cpu"]
    status, out, err = _run(capsys, "explain", *given, "--dtype", "fp32")
    assert (status, err) == (0, "") and "one chunk, its logits wait for backward; " in out and "gradients included" in out
    status, out, err = _run(capsys, "explain", *given, "--dtype", "fp32", "--no-grad")
    assert (status, err) == (0, "") and "one chunk, no gradients; " in out
    assert "backward" not in out and "gradients included" not in out


def test_explain_takes_the_names_of_eight_bits(capsys):
    x, weight = torch.empty(16, 32), torch.empty(48, 32)
    given = "--shape 16,32 --device cpu --dtype fp32"
    status, out, _ = _run(capsys, "explain", "rms_norm", *given.split(), "--out", "fp8", "--no-grad")
    assert (status, out.strip()) == (0, str(backend.explain("rms_norm", x, out="fp8")))
    status, out, err = _run(capsys, "explain", "linear", *given.split(), "--weight", "48,32", "--precision", "fp8")
    assert (status, err) == (0, "")
    assert out.strip() == str(backend.explain("linear", x, weight, precision="fp8"))


def test_explain_gives_a_linear_layer_a_bias_of_its_outputs(capsys):
    options = "--shape 16,32 --device cpu --norm-weight 32 --weight 48,32 --bias"
    status, out, err = _run(capsys, "explain", "norm_linear", *options.split())
    assert (status, err) == (0, "")
    assert out.startswith("norm_linear: ")


@pytest.mark.skipif("torch.cuda.is_available()")
def test_explain_for_a_gpu_that_is_not_here():
    """In a process without the interpreter. 2^44 elements: were they allocated, it would fail."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "ONEPASS_BACKEND")}
    options = "--shape 268435456,65536 --activation swiglu --save fp8 --token-weight --device cuda:3"
    argv = [sys.executable, "-m", "onepass.cli", "explain", "bias_activation", *options.split()]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bias_activation: triton (chosen by auto)")
    assert "x saved as 'fp8'" in done.stdout
    assert "no GPU here" in done.stdout


_EVERY_OP_ON_A_GPU = """
import sys
sys.modules["triton"] = None  # as where PyTorch's CPU build is installed
from onepass.cli import main
for line in sys.stdin:
    status = main(["explain", *line.split(), "--device", "cuda"])
    assert status == 0, line
"""


@pytest.mark.skipif("torch.cuda.is_available()")
def test_explain_has_an_answer_for_every_op_on_a_gpu_that_is_not_here():
    calls = {
        "activation_linear": "--shape 16,64 --weight 8,32",
        "attention": "--shape 4,1024,6144 --heads 16 --cos --sin",
        "bias_activation": "--shape 16,32 --bias --dropout 0.1",
        "causal_conv1d": "--shape 4,64,32 --weight 32,4 --bias",
        "cross_entropy": "--shape 32,1000 --labels 32 --weight --inplace-backward",
        "delta_gates": "--shape 4,64,32 --b 4,64,32 --a-log 32 --dt-bias 32",
        "dropout_add": "--shape 16,32 --residual 16,32 --p 0.1",
        "embedding": "--shape 4,512 --weight 1000,64",
        "experts": "--shape 64,32 --up 4,96,32 --down 4,32,48 --chosen 64,2 --weights 64,2 --up-bias --shared --clamp 7",
        "gated_delta_rule": "--shape 1,64,2,128 --k 1,64,2,128 --v 1,64,4,128 --g 1,64,4 --beta 1,64,4",
        "gated_norm_linear": "--shape 16,64 --z 16,64 --norm-weight 16 --weight 8,64 --group-size 16",
        "gated_rms_norm": "--shape 16,4,64 --z 16,4,64 --weight --activation sigmoid",
        "latent_attention": "--shape 2,512,8,192 --kv 2,512,8,256 --k-rope 2,512,64 --cos --sin --interleaved",
        "layer_norm": "--shape 16,32 --weight --bias",
        "linear": "--shape 16,32 --weight 8,32",
        "linear_cross_entropy": "--shape 8192,4096 --weight 128256,4096 --labels 8192 --class-weight",
        "linear_divergence": "--shape 32,16 --student-weight 100,16 --teacher 32,8 --teacher-weight 100,8 --labels --kind jsd",
        "lora_linear": "--shape 16,32 --weight 8,32 --lora-a 4,32 --lora-b 8,4",
        "mamba_chunk_scan": "--shape 1,64,4,64 --dt 1,64,4 --A 4 --B 1,64,2,16 --C 1,64,2,16 --D --dt-bias --dt-softplus",
        "norm_linear": "--shape 16,32 --norm-weight 32 --weight 8,32",
        "rms_norm": "--shape 16,32 --weight --residual",
        "rope": "--shape 1,16,2,64 --k 1,16,2,64 --cos 16,32 --sin 16,32",
        "route": "--shape 64,128 --k 8 --bias --aux 0.01",
        "softmax": "--shape 4,2,64,64 --mask",
    }
    assert calls.keys() == op_records.OPS.keys()
    unset = ("TRITON_INTERPRET", "ONEPASS_BACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    given = "\n".join(f"{op} {options}" for op, options in calls.items())
    done = subprocess.run(
        [sys.executable, "-c", _EVERY_OP_ON_A_GPU], input=given, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for op in calls:
        assert f"{op}: {'torch (auto, because ' if op in DELEGATED else 'triton (chosen by auto)'}" in done.stdout


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("explain", "linear_cross_entropy"), "--shape, --weight, --labels"),
        (("explain", "attention", "--shape", "4,8,96"), "--heads"),
        (("profile",), "SCRIPT"),
        ((), "COMMAND"),
    ],
)
def test_missing_arguments_are_named_all_at_once_and_no_others(argv, named, capsys):
    status, _, err = _run(capsys, *argv)
    assert status == 2
    assert f"the following arguments are required: {named} (see" in err


@pytest.mark.parametrize("op", sorted(op_records.OPS))
def test_an_error_of_explain_has_an_example_that_works(op, capsys):
    status, _, err = _run(capsys, "explain", op)
    assert (status, err.count("\n")) == (2, 1)
    example = err.partition("; such as: ")[2].removesuffix(")\n")
    assert example.startswith(f"onepass explain {op} --shape ")
    status, out, err = _run(capsys, *example.split()[1:], "--device", "cpu", "--dtype", "fp32")
    assert (status, err) == (0, "") and out.startswith(op)


# The files of messages, whose command they belong to, and flags of other programs that they name.
_MESSAGES = {"bench": "bench", "doctor": "doctor", "gpt": "train", "profiling": "profile", "train": "train"}
_MESSAGES |= dict.fromkeys(("train/plan_command.py", "train/plan/gpus_command.py", "train/plan/layouts.py"), "plan")
_OTHERS = {"bench/record.py": {"--error-unmatch", "--porcelain", "--short"}, "train/layout.py": {"--nproc-per-node"}}
_OTHERS["train/foreign_flags.py"] = {*foreign_flags._OURS}
_OTHERS["integrations/huggingface/families.py"] = {"--page"}
_OTHERS["testing/sanitize.py"] = {"--print-limit", "--report-api-errors"}


def _flags_named(path):
    """The flags in a file's strings, of which docstrings are none."""
    tree = ast.parse(path.read_text())
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    said = (string.value for string in strings if id(string) not in statements)
    return {flag for text in said for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text)}


def _flags_of(command):
    parser = cli._parser([command])
    (commands,) = (action for action in parser._actions if action.choices)
    return set(commands.choices[command]._option_string_actions)


def test_flags_in_messages_are_flags_that_exist(capsys):
    package = Path(cli.__file__).parent
    known = {command: _flags_of(command) for command in cli._COMMANDS}
    for parse in (aot._arguments, sanitize.main):
        with pytest.raises(SystemExit):
            parse(["--help"])
    known["testing"] = set(re.findall(r"--[\w-]+", capsys.readouterr().out)) | known["fuzz"]
    named = 0
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        command = _MESSAGES.get(str(place), _MESSAGES.get(place.parts[0], ""))
        ours = known["testing"] if place.parts[0] == "testing" else known.get(command)
        flags = _flags_named(path) - _OTHERS.get(str(place), set()) - {"--help", "--version"}
        named += len(flags)
        assert flags <= (set().union(*known.values()) if ours is None else ours), place
    assert named > 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "required: OP, --shape"),
        ("nope", "op must be one of activation_linear"),
        ("nope --shape 3", "op must be one of activation_linear, attention, bias_activation"),
        ("bias_activation --shape 3,a", "invalid shape value: '3,a'"),
        ("bias_activation --shape 3,-1", "invalid shape value"),
        ("bias_activation --shape 3,5 --activation swiglu", "x must have an even last dimension"),
        ("bias_activation --shape 3,5 --activation nope", "activation must be one of gelu"),
        ("bias_activation --shape 3,5 --clamp 1", "clamp"),
        ("bias_activation --shape 3,5 --clamp much", "invalid float value"),
        ("bias_activation --shape 3,5 --save disk", "save must be one of"),
        ("bias_activation --shape 3,5 --backend nope", "backend must be one of auto"),
        ("bias_activation --shape 3,5 --dtype fp64 --backend triton", "backend 'triton' can't take this call"),
        ("bias_activation --shape 3,5 --device tpu", "--device must be cuda, cuda:N or cpu"),
        ("rms_norm --shape 3,5 --out fp8", "(--no-grad describes a call without gradients)"),
        ("bias_activation --shape 3,5 --wrong 1", "unrecognized arguments: --wrong"),
    ],
)
def test_explain_says_in_one_line_what_is_wrong(options, message, capsys):
    status, out, err = _run(capsys, "explain", *options.split())
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("onepass")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("argv", [(), ("nope",), ("serve",)])
def test_no_such_command(argv, capsys):
    status, out, err = _run(capsys, *argv)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1


def test_options_follow_an_ops_signature(capsys, monkeypatch):
    """An op nobody has thought of: required tensors by shape, optional ones by yes or no, the unsayable left out."""
    seen = {}

    def project(
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None = None,
        eps: float = 1e-6,
        *,
        group: object = None,
        fast: bool = False,
        limit: int | None = None,
        backend: str | None = None,
    ) -> torch.Tensor:
        seen.update(weight=weight.shape, residual=residual.shape, eps=eps, fast=fast, limit=limit)
        return x

    monkeypatch.setitem(op_records.OPS, "project", None)  # taken away again after the test
    op_records.define_op(
        project,
        check=lambda c: None,
        unsupported=lambda c: "no kernel",
        variant=lambda c: "",
        sharding=lambda c: None,
        samples_module="project_samples",
    )
    shapes = types.SimpleNamespace(SHAPES_OF={"project": {"residual": lambda x, given: x.shape}})
    monkeypatch.setitem(sys.modules, "project_samples", shapes)
    options = "--shape 4,8 --weight 16,8 --residual --fast --limit 3 --eps 0.1 --device cpu"
    status, out, _ = _run(capsys, "explain", "project", *options.split())
    assert status == 0
    assert out.startswith("project: torch (auto, because no kernel)")
    assert seen == {"weight": (16, 8), "residual": (4, 8), "eps": 0.1, "fast": True, "limit": 3}


def test_interruption(capsys, monkeypatch):
    from onepass import doctor

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert _run(capsys, "doctor")[0] == 130


def test_doctor_as_json(capsys):
    status, out, _ = _run(capsys, "doctor", "--json")
    assert json.loads(out)["broken"] is (status == 1)
