"""What in the environment turns fast paths off without a word: variables, and packages that another package refuses or misses."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from onepass.ops.attention.by_flash import flash_functions
from onepass.runtime.cpu_threads import slow_threads
from onepass.runtime.errors import version_of

OK, WARNING, BROKEN = "ok", "warning", "broken"
OLDEST_TRANSFORMERS = 5  # that huggingface.apply was tried with


@dataclass
class Check:
    """The result of one check for a known problem, or of one self-test, with advice if it is not ok."""

    name: str
    verdict: str
    found: str
    advice: str = ""


@dataclass
class Diagnosis:
    versions: dict[str, str]
    devices: list[dict[str, Any]]
    backends: dict[str, dict[str, dict[str, str | None]]]  # op -> device -> backend -> why it can't be used, or None
    checks: list[Check] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return any(check.verdict == BROKEN for check in self.checks)


@dataclass(frozen=True)
class _Variable:
    """An environment variable, its value that makes programs slower, and how."""

    name: str
    value: str
    slower: str
    on_gpu: bool = True  # only there


_VARIABLES = (
    _Variable("CUDA_LAUNCH_BLOCKING", "1", "the CPU waits for each kernel before it launches the next"),
    _Variable("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "each tensor's memory is asked of the driver, which waits for the GPU"),
    _Variable("NVIDIA_TF32_OVERRIDE", "0", "fp32 products never take TF32, whatever the program sets"),
    _Variable("TRITON_ALWAYS_COMPILE", "1", "each process compiles its kernels anew"),
    _Variable("TORCH_COMPILE_DISABLE", "1", "torch.compile compiles nothing", on_gpu=False),
    _Variable("TORCHDYNAMO_DISABLE", "1", "torch.compile compiles nothing", on_gpu=False),
)


def _variables() -> Iterator[Check]:
    there = torch.cuda.device_count() > 0
    for variable in _VARIABLES:
        if os.environ.get(variable.name) == variable.value and (there or not variable.on_gpu):
            found = f"{variable.name}={variable.value} is set: {variable.slower}"
            yield Check("environment", WARNING, found, f"unset {variable.name}; it is for finding faults")


def _threads() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if torch.cuda.device_count():
        return
    if torch.get_num_threads() == 1 and cores > 1:
        found = f"PyTorch computes with one thread of {cores} cores (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')})"
        yield Check("threads", WARNING, found, f"set OMP_NUM_THREADS={cores}; torchrun sets 1, for each of its processes")
    elif slow := slow_threads():
        yield Check("threads", WARNING, *slow)


def _kernels_of_the_hub() -> Iterator[Check]:
    """Whether transformers takes the `kernels` that is installed. Else its decorators do nothing, and the slow code runs."""
    version, transformers = version_of("kernels"), version_of("transformers")
    if version is None or transformers is None:
        return
    utils: Any = importlib.import_module("transformers.utils.import_utils")
    low, high = (getattr(utils, f"KERNELS_{end}_VERSION", None) for end in ("MIN", "MAX"))
    if low is None or high is None:  # before 5.14
        return
    if utils.is_kernels_available():
        yield Check("kernels", OK, f"transformers {transformers} takes kernels {version}")
    else:
        found = f"transformers {transformers} does without kernels {version}: it takes {low} or newer, before {high}"
        advice = f"pip install 'kernels>={low},<{high}', or leave it out: huggingface.apply needs none"
        yield Check("kernels", WARNING, found, advice)


def _softcap_by_sdpa() -> Iterator[Check]:
    """Whether transformers runs Gemma 2 by SDPA, which has no softcap, as 5.17 does. Newer ones refuse it."""
    version = version_of("transformers")
    if version is None or int(version.split(".")[0]) < OLDEST_TRANSFORMERS:
        return
    gemma: Any = importlib.import_module("transformers.models.gemma2.modeling_gemma2")
    if gemma.Gemma2PreTrainedModel._supports_sdpa:
        found = f"transformers {version} runs Gemma 2 by SDPA, which drops its softcap"
        yield Check("softcap", WARNING, found, "load it with attn_implementation='eager', or by a newer transformers")


def _flash_attention(device: torch.device) -> Iterator[Check]:
    """Whether attention could take flash-attn-4's kernels, and doesn't."""
    if torch.cuda.get_device_capability(device)[0] == 9 and isinstance(reason := flash_functions(), str):
        found, _, advice = reason.partition(" (")
        yield Check("flash-attn-4", WARNING, f"{found}: attention takes up to 1.3 times as long", advice.rstrip(")"))


SLOWERS = _variables, _threads, _kernels_of_the_hub, _softcap_by_sdpa
GPU_SLOWERS = (_flash_attention,)
