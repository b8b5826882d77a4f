"""What `onepass doctor` looks at, and how it is shown."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from onepass.doctor.environment import BROKEN, GPU_SLOWERS, OK, OLDEST_TRANSFORMERS, SLOWERS, WARNING, Check, Diagnosis
from onepass.kernels import language
from onepass.kernels.language import triton
from onepass.runtime import backend
from onepass.runtime.errors import install_hint, version_of
from onepass.runtime.op import OPS
from onepass.runtime.samples import Sample, weights_of
from onepass.runtime.sizes import is_lost
from onepass.runtime.units import counted

T = TypeVar("T")


def diagnose() -> Diagnosis:
    broken: list[Check] = []  # the probes that raised
    devices = [torch.device("cpu"), *_tried("GPUs", _gpus, broken)]
    diagnosis = Diagnosis(_versions(), _devices(devices, broken), _backends(devices, broken))
    checks: list[Check] = []
    for trap in _TRAPS:
        checks += _tried(_title(trap), trap, checks)
    for device in devices[1:]:
        for ask in _GPU_TRAPS:
            checks += _tried(f"{_title(ask)} of {device}", partial(ask, device), checks)
    for device in devices:
        _test_ops(device, checks)
    diagnosis.checks = broken + checks
    return diagnosis


def _test_ops(device: torch.device, checks: list[Check]) -> None:
    """Add the self-tests of all ops, or those up to one after which the process can't use the device."""
    tests = [(op, name) for op in sorted(OPS) for name in backend.NATIVE]
    for done, (op, name) in enumerate(tests, 1):
        raised = len(checks)
        checks += _tried(f"self-test of {op}, {name} on {device}", partial(_self_test, op, device, name), checks)
        if len(checks) > raised and checks[-1].verdict == BROKEN and done < len(tests) and is_lost(device):
            found = f"not tried, {counted(len(tests) - done, 'self-test')}: after that error a process can't use its GPU"
            checks.append(Check(f"other ops on {device}", BROKEN, found, "please report the op above: `onepass doctor --json`"))
            return


def _tried(name: str, probe: Callable[[], Iterable[T]], checks: list[Check]) -> list[T]:
    """Return a probe's results. If it raises, add a broken check and return []: errors of any library are to be reported."""
    try:
        return list(probe())
    except Exception as error:
        lines = str(error).strip().splitlines()
        found = f"{type(error).__name__}: {lines[0] if lines else ''}"
        checks.append(Check(name, BROKEN, found, "if nothing else named here explains it: does plain PyTorch work there?"))
        return []


def _title(trap: Callable[..., Any]) -> str:
    return trap.__name__.strip("_").replace("_", " ")


# ---- hardware and versions ----


def _versions() -> dict[str, str]:
    return {
        "onepass": version_of("onepass") or "not installed",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else "none",
        "numpy": version_of("numpy") or "none",
        "cuda": torch.version.cuda or "none (a CPU build of PyTorch)",
    }


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _devices(devices: list[torch.device], broken: list[Check]) -> list[dict[str, Any]]:
    facts_of: list[dict[str, Any]] = []
    for device in devices:
        facts = _tried(f"properties of {device}", partial(_facts, device), broken)
        facts_of.append({"device": str(device)} | (dict(facts) or {"name": "it does not answer"}))
    return facts_of


def _facts(device: torch.device) -> Iterable[tuple[str, Any]]:
    if device.type == "cpu":
        return {"name": platform.processor() or platform.machine(), "cores": os.cpu_count()}.items()
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }.items()


def _backends(devices: list[torch.device], broken: list[Check]) -> dict[str, dict[str, dict[str, str | None]]]:
    """Return op -> device -> backend -> reason. A backend whose probe raises is left out, and a broken check is added."""
    reasons: dict[str, dict[str, dict[str, str | None]]] = {}
    for op in sorted(OPS):
        reasons[op] = {}
        for device in devices:
            names = ("triton", "torch", *OPS[op].others)
            asked = (_tried(f"{name} for {op} on {device}", partial(_reason, op, device, name), broken) for name in names)
            reasons[op][str(device)] = dict(pair for pairs in asked for pair in pairs)
    return reasons


def _reason(op: str, device: torch.device, name: str) -> Iterator[tuple[str, str | None]]:
    known, sample = OPS[op], _sample(op)
    tensors = sample.tensors(device, torch.bfloat16)
    if name == "torch":
        yield name, None
    else:
        call = sample.call(known.call, *tensors)
        yield name, known.unsupported(call) if name == "triton" else sample.call(known.others[name].unsupported, *tensors)


def _sample(op: str) -> Sample:
    sample: Sample = OPS[op].samples.SAMPLES[op]
    return sample


# ---- known traps ----


def _triton_version() -> Iterator[Check]:
    supported = ", ".join(version + "x" for version in language.SUPPORTED)
    if triton is None:
        advice = install_hint("triton")
        if _gpus():
            yield Check("triton", WARNING, "not installed: everything runs as plain PyTorch", advice)
        else:
            yield Check("triton", OK, f"not installed, nor needed on a CPU (to test kernels here: {advice})")
    elif not triton.__version__.startswith(language.SUPPORTED):
        advice = f"install a Triton that was tried ({supported}), the one your PyTorch asks for"
        yield Check("triton", WARNING, f"{triton.__version__} was never tried with these kernels", advice)
    else:
        yield Check("triton", OK, f"{triton.__version__} is one of {supported}")


def _interpreter() -> Iterator[Check]:
    if not language.INTERPRETED:
        return
    if _gpus():
        found = "TRITON_INTERPRET=1 is set: no kernel runs on the GPU, all its calls are plain PyTorch"
        yield Check("TRITON_INTERPRET", BROKEN, found, "unset TRITON_INTERPRET; it is for testing kernels on a CPU")
    else:
        yield Check("TRITON_INTERPRET", WARNING, "kernels run in Triton's interpreter, for tests only: a thousand times slower")


def _numpy() -> Iterator[Check]:
    if triton is None:
        return
    name, version = "numpy and the interpreter", version_of("numpy")
    in_use, unused = language.INTERPRETED, "" if language.INTERPRETED else " (it is not in use)"
    if version is None:
        found = f"numpy is not installed, and Triton's interpreter needs it{unused}"
        yield Check(name, BROKEN if in_use else OK, found, install_hint("test") if in_use else "")
    elif tuple(int(part) for part in version.split(".")[:2]) >= (2, 4):
        found = f"range() over a run-time argument raises in the interpreter under numpy {version}{unused}"
        repair = "import onepass.testing.interpreter before running kernels, as our tests do"
        yield Check(name, WARNING if in_use else OK, found, repair)
    else:
        yield Check(name, OK, f"numpy {version} agrees with Triton's interpreter")


def _chosen_backend() -> Iterator[Check]:
    name = os.environ.get("ONEPASS_BACKEND")
    known = ["auto", *backend.known_backends()]
    if not name:
        yield Check("ONEPASS_BACKEND", OK, "not set")
    elif name not in known:
        found = f"{name!r} is no backend that is known here: unless your program registers one, every call raises"
        yield Check("ONEPASS_BACKEND", BROKEN, found, f"set it to one of {', '.join(known)}, or unset it")
    elif name == "torch" and _gpus():
        yield Check("ONEPASS_BACKEND", WARNING, "'torch': no kernel runs on the GPU", "unset it to have the kernels")
    elif name == "triton" and not _gpus() and not language.INTERPRETED:
        yield Check("ONEPASS_BACKEND", BROKEN, "'triton', but there is no GPU: every call raises", "unset it, or set it to auto")
    else:
        yield Check("ONEPASS_BACKEND", OK, repr(name))


def _capability(device: torch.device) -> Iterator[Check]:
    major, minor = torch.cuda.get_device_capability(device)
    found = f"{device} has compute capability {major}.{minor}"
    if (major, minor) < (8, 0):
        yield Check("capability", WARNING, f"{found}, and the kernels want 8.0", "set ONEPASS_BACKEND=torch on this machine")
    else:
        yield Check("capability", OK, found)


def _driver() -> Iterator[Check]:
    if torch.version.cuda and not torch.cuda.is_available():
        found = f"PyTorch is built for CUDA {torch.version.cuda}, but sees no GPU"
        yield Check("driver", WARNING, found, "compare with nvidia-smi; look at CUDA_VISIBLE_DEVICES and the driver's version")


def _compiler() -> Iterator[Check]:
    if not _gpus() or triton is None:
        return
    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    path = next(filter(None, map(shutil.which, wanted)), None)
    if path is None:
        found = f"none of {', '.join(wanted)} is on the path, and Triton builds its launcher with one"
        yield Check("C compiler", BROKEN, found, "install gcc, or set CC to a compiler (apt install gcc libc6-dev)")
    else:
        yield Check("C compiler", OK, path)


def _triton_cache() -> Iterator[Check]:
    if triton is None:
        return
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
    directory = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    if _writable(directory):
        yield Check("Triton's cache", OK, str(directory))
    else:
        advice = "set TRITON_CACHE_DIR to a directory that can be written, local to this machine"
        yield Check("Triton's cache", BROKEN if _gpus() else WARNING, f"{directory} can't be written", advice)


def _writable(directory: Path) -> bool:
    """Whether files can be created there, or in the nearest existing parent. It creates one: os.access misleads for root."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _addmm(device: torch.device) -> Iterator[Check]:
    """Check addmm(out_dtype=), with which a matrix product adds a weight's gradient to an fp32 main_grad. Only CUDA needs it."""
    out, a = torch.zeros(16, 16, device=device), torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    except (TypeError, RuntimeError) as error:
        found = f"torch {torch.__version__} can't do it on {device}: {str(error).strip().splitlines()[0]}"
        yield Check("addmm(out_dtype=)", WARNING, found, "a newer PyTorch: without it a gradient is made before it is added")
    else:
        yield Check("addmm(out_dtype=)", OK, f"works on {device}")


# ---- huggingface.apply, on tiny models of the installed transformers ----

_TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """A family of models: its configuration, the parts of it that apply replaces, and the name of its last norm."""

    config: dict[str, Any]
    parts: tuple[str, ...]
    norm: str


_FAMILIES = {
    "llama": _Family({"num_key_value_heads": 2, "intermediate_size": 48}, ("norm", "mlp", "rope", "qkv", "loss"), "norm"),
    "gpt2": _Family({"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, ("norm", "mlp", "qkv", "loss"), "ln_f"),
}


def _huggingface_apply() -> Iterator[Check]:
    """Whether apply sees the parts of tiny models, leaves their numbers as they are, and notices a change."""
    version = version_of("transformers")
    if version is None:
        yield Check("huggingface.apply", OK, "transformers is not installed: there is nothing to apply to")
    elif int(version.split(".")[0]) < OLDEST_TRANSFORMERS:
        advice = f"install transformers {OLDEST_TRANSFORMERS} or later to use huggingface.apply"
        yield Check("huggingface.apply", WARNING, f"transformers {version} was never tried", advice)
    else:
        for family in _FAMILIES:
            checks: list[Check] = []
            name = f"huggingface.apply to {family} of transformers {version}"
            checks += _tried(name, partial(_applied, name, family), checks)
            yield from checks


def _applied(name: str, family: str) -> Iterator[Check]:
    from onepass.integrations import huggingface

    known, report = _FAMILIES[family], "please report it, with `onepass doctor --json`"
    transformers: Any = importlib.import_module("transformers")
    logging = transformers.utils.logging
    config = transformers.AutoConfig.for_model(family, **_TINY, **known.config)
    with torch.random.fork_rng(devices=[]), backend.use_backend("torch"), contextlib.ExitStack() as stack:
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        logging.set_verbosity_error()
        torch.manual_seed(0)
        before = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        model = copy.deepcopy(before)
        applied = huggingface.apply(model)
        whys = {row.part: row.why for row in applied.left}
        missing = [part for part in known.parts if part not in {row.part for row in applied.replaced}]
        apart = [_apart(model, before)]
        for each in (model, before):
            setattr(getattr(each, each.base_model_prefix), known.norm, torch.nn.Identity())
        apart.append(_apart(model, before))
        noticed = any("changed since" in (row.why or "") for row in applied.left)
    if not max(apart) <= 1e-4 or not noticed:
        found = f"gradients differ by {apart[0]:.1e}, and by {apart[1]:.1e} after a norm was replaced"
        yield Check(name, BROKEN, found if noticed else f"a norm that was replaced is not noticed; {found}", report)
    elif missing:
        left = "; ".join(f"{part}: {whys.get(part) or 'not recognised'}" for part in missing)
        yield Check(name, WARNING, f"slower than it could be, as some parts are left: {left}", report)
    else:
        yield Check(name, OK, f"replaces {', '.join(known.parts)}; gradients are the model's, also after a norm was replaced")


def _apart(model: Any, before: Any) -> float:
    """Return the relative distance of the gradients of two models."""
    ids = torch.arange(2 * 12).view(2, 12) % 61
    grads = []
    for each in (model, before):
        each.zero_grad()
        each(input_ids=ids, labels=ids).loss.backward()
        grads.append(torch.cat([p.grad.flatten() for p in each.parameters() if p.grad is not None]))
    ours, theirs = grads
    return float((ours - theirs).norm() / theirs.norm()) if ours.shape == theirs.shape else float("nan")


_TRAPS = (
    _triton_version, _driver, _interpreter, _numpy, _chosen_backend, _compiler, _triton_cache, *SLOWERS, _huggingface_apply,
)  # fmt: skip
_GPU_TRAPS = (_capability, _addmm, *GPU_SLOWERS)


# ---- self-test: forward and backward on each device, by each native backend that supports it, against fp64 ----


def _self_test(op: str, device: torch.device, name: str) -> Iterator[Check]:
    if name == "triton":
        if language.INTERPRETED and version_of("numpy"):
            import onepass.testing.interpreter  # noqa: F401
        if any(reason is not None for _, reason in _reason(op, device, name)):
            return
    dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if name == "torch" or not _refused(op, device, dtype)]
    worst = _worst([_excess(op, device, name, dtype) for dtype in dtypes])
    title, found = f"self-test of {op}, {name} on {device}", f"it and its gradients: {worst:.2f} of the allowed error"
    if worst <= 1:
        yield Check(title, OK, found)
    else:  # NaN too
        yield Check(title, BROKEN, found, "don't train with this: please report it, with `onepass doctor --json`")


def _refused(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels can't take the op's sample in this dtype, or None."""
    sample = _sample(op)
    known = OPS[op]
    return known.unsupported(sample.call(known.call, *sample.tensors(device, dtype)))


def _excess(op: str, device: torch.device, name: str, dtype: torch.dtype) -> float:
    """Return the worst error of the result and the gradients, as a fraction of the allowed error."""
    sample = _sample(op)
    tensors = sample.tensors(device, dtype)
    exactly = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    got = _run(partial(sample.call, OPS[op].function, backend=name), sample.frozen, *tensors)
    formula = partial(sample.call, sample.formula)
    baseline, exact = _run(formula, sample.frozen, *tensors), _run(formula, sample.frozen, *exactly)
    times = 1.25 * sample.roundings
    fractions = [_error(g, e) / (times * _error(b, e) + 1e-6) for g, b, e in zip(got, baseline, exact, strict=True)]
    return _worst(fractions)


def _run(function: Callable[..., Any], frozen: int, *tensors: Tensor) -> list[Tensor]:
    asked = [tensor.is_floating_point() and i < len(tensors) - frozen for i, tensor in enumerate(tensors)]
    leaves = [tensor.detach().requires_grad_(ask) for tensor, ask in zip(tensors, asked, strict=True)]
    result = function(*leaves)
    results = (result,) if isinstance(result, Tensor) else result
    ys = [y for y in results if y is not None and y.is_floating_point()]
    torch.autograd.backward(ys, list(map(weights_of, ys)))
    return [*(y.detach() for y in ys), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _worst(fractions: list[float]) -> float:
    return max(fractions, key=lambda fraction: (fraction != fraction, fraction))  # NaN is the worst; max alone may drop it


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="show every check, and which backends each op can use")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    diagnosis = diagnose()
    if args.json:
        json.dump(asdict(diagnosis) | {"broken": diagnosis.broken}, sys.stdout, indent=2)
        print()
    else:
        from onepass.doctor.report import show  # imports rich

        show(diagnosis, args.all)
    return 1 if diagnosis.broken else 0
