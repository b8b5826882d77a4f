"""The packages that onepass is compared with: which are installed, and their versions."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from onepass.bench.model import BenchCase, Call, Contender
from onepass.runtime.errors import version_of


@dataclass(frozen=True)
class PeerPackage:
    module: str  # what to import
    distribution: str  # what to install


T = TypeVar("T")
PACKAGES = {
    "Liger": PeerPackage("liger_kernel", "liger-kernel"),
    "CCE": PeerPackage("cut_cross_entropy", "cut-cross-entropy"),
    "Megatron-core": PeerPackage("megatron.core", "megatron-core"),
    "QuACK": PeerPackage("quack", "quack-kernels"),
    "TRL": PeerPackage("trl", "trl"),
    "transformers": PeerPackage("transformers", "transformers"),
    "flash-attn 4": PeerPackage("flash_attn.cute", "flash-attn-4"),
    "Apex": PeerPackage("apex", "apex"),
    "Transformer Engine": PeerPackage("transformer_engine", "transformer-engine"),
    "torchao": PeerPackage("torchao", "torchao"),
    "cuDNN frontend": PeerPackage("cudnn", "nvidia-cudnn-frontend"),
    "FLA": PeerPackage("fla", "flash-linear-attention"),
    "FlashQLA": PeerPackage("flash_qla", "flash-qla"),
    "causal-conv1d": PeerPackage("causal_conv1d", "causal-conv1d"),
    "mamba-ssm": PeerPackage("mamba_ssm", "mamba-ssm"),
    "Unsloth": PeerPackage("unsloth", "unsloth"),
    "axolotl": PeerPackage("axolotl", "axolotl"),
}


def find_peers() -> dict[str, str]:
    """Return the installed packages and their versions."""
    return {name: version for name, package in PACKAGES.items() if (version := _version(package)) is not None}


def _version(package: PeerPackage) -> str | None:
    try:
        if importlib.util.find_spec(package.module) is None:
            return None
    except (ImportError, ValueError):  # its parent package is missing, or it is partly installed
        return None
    return version_of(package.distribution) or "of unknown version"


def imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def unsloth_lora() -> Any:
    """Import Unsloth's module of LoRA functions alone.

    `import unsloth` patches torch, transformers and PEFT, which other contenders run by: the __init__ of its packages is not run.
    """
    for name in ("unsloth", "unsloth.kernels", "unsloth_zoo", "unsloth_zoo.temporary_patches"):
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"Unsloth needs {name}, which is not installed")
            sys.modules[name] = importlib.util.module_from_spec(spec)
    return importlib.import_module("unsloth.kernels.fast_lora")


def since_torch(version: str, module: Any, name: str) -> str | None:
    """Return why PyTorch's function can't run: this PyTorch has none. Return None if it is there."""
    return None if hasattr(module, name) else f"PyTorch {torch.__version__} has none, {version} has"


def needs_gpu() -> str | None:
    """Why kernels for GPUs can't run here, or None."""
    return None if torch.cuda.is_available() else "needs a GPU"


def needs_cute() -> str | None:
    """Why Liger's kernels in the CuTe DSL can't run here, or None."""
    return None if importlib.util.find_spec("cutlass") else "needs nvidia-cutlass-dsl"


def liger_cute(op: str) -> Callable[..., Any]:
    """Return one of Liger's functions in the CuTe DSL, for Hopper and later.

    Where Liger would run its Triton kernels instead, the first call raises, with Liger's reason.
    """
    function = partial(imported("liger_kernel.functional", op), impl="nvidia-cutedsl")
    checked: list[bool] = []

    def call(*args: Any, **options: Any) -> Any:
        if checked:
            return function(*args, **options)
        with mock.patch.dict(os.environ, LIGER_KERNEL_STRICT="1"):  # not for longer: Liger's others may use Triton for a part
            result = function(*args, **options)
        checked.append(True)
        return result

    return call


def liger_rows(
    make: Callable[[BenchCase, Callable[..., Any]], Call], module: str, function: str, cute: str, lacks: str | None = None
) -> list[Contender]:
    """Return the rows of Liger's kernels in Triton, and in the CuTe DSL.

    Args:
        make: returns the call of a case by either function.
        module, function: where the autograd function of the kernels in Triton is.
        cute: what the function with kernels in the CuTe DSL is called.
        lacks: see Contender.
    """
    return [
        Contender("Liger", lambda case: make(case, imported(module, function).apply), "Liger", lacks=lacks),
        Contender("Liger CuTe", lambda case: make(case, liger_cute(cute)), "Liger", lacks=lacks or needs_cute()),
    ]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function as a user with fixed shapes does."""
    # inductor's pool of worker processes would start at the first call and keep the CPUs busy while others are timed
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    wrapped: Callable[..., Any] = torch.compile(function, dynamic=False)
    return wrapped


def with_parameters(module: Any, names: tuple[str, ...], run: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a peer's module as a function of its input and its parameters. The function sets them on the module.

    `names` may be those of submodules' parameters. `run`: what is called in place of the module, such as its compiled form.
    """
    held: list[Tensor] = []
    run = run or module

    def call(x: Tensor, *parameters: Tensor) -> Any:
        if not held or held[0] is not parameters[0]:
            held[:] = parameters
            for name, parameter in zip(names, parameters, strict=True):
                path, _, last = name.rpartition(".")
                setattr(module.get_submodule(path) if path else module, last, parameter)
        return run(x)

    return call


def forget_compiled() -> None:
    """Reset torch.compile, so that the next case is compiled for its own shapes.

    After a second shape the compiler would switch to dynamic shapes, and after eight recompilations give up. Peers that compile
    inside, and torch.compile itself, would then be slower than in a training run, where shapes are fixed.
    """
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


class _Replaced(torch.autograd.Function):
    """Substitute other tensors for some, which get the gradients of those."""

    @staticmethod
    def forward(ctx: Any, others: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(other.detach() for other in others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads


def on_copies(call: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Give `call`, which writes over its first `count` arguments, copies of them. They are made once, and not timed."""
    copies: dict[int, list[Tensor]] = {}  # by the address of the first argument; only the last are kept

    def called(*args: Tensor) -> Any:
        key = args[0].data_ptr()
        if key not in copies:
            copies.clear()
            copies[key] = [t.detach().clone() for t in args[:count]]
        replaced: tuple[Tensor, ...] = _Replaced.apply(copies[key], *args[:count])  # type: ignore[no-untyped-call]
        return call(*replaced, *args[count:])

    return called


def once(make: Callable[..., T]) -> Callable[..., T]:
    """Return a function that keeps what `make` returns for tensors, and makes it anew for others. So it is not timed."""
    held: list[tuple[Tensor, T]] = []

    def made(*tensors: Tensor) -> T:
        if not held or held[0][0] is not tensors[0]:
            held[:] = [(tensors[0], make(*tensors))]
        return held[0][1]

    return made


def wide(*parameters: Tensor) -> list[Tensor]:
    return [parameter.detach().float() for parameter in parameters]


def in_fp32() -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that returns parameters in fp32, converted once and not timed. Their gradients go to the parameters."""
    converted = once(wide)
    return lambda *parameters: _Replaced.apply(converted(*parameters), *parameters)  # type: ignore[no-untyped-call]


# ---- a floor: the products that a loss of hidden states can't do without, by cuBLAS ----


class _HeadProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, by_token: int, *teacher: Tensor) -> Any:
        logits = hidden @ weight.t()
        if teacher:
            teacher[0] @ teacher[1].t()
        ctx.save_for_backward(hidden, weight, logits)
        ctx.gathers = hasattr(weight, "main_grad")
        if not by_token:
            return hidden.new_zeros(1)
        return tuple(hidden.new_zeros(hidden.shape[0], dtype=torch.float32) for _ in range(by_token))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, logits = ctx.saved_tensors
        dhidden, dweight = logits @ weight, logits.t() @ hidden if ctx.needs_input_grad[1] else None
        # with a main_grad the floor has the product, without the addition
        return dhidden, None if ctx.gathers else dweight, *(None for _ in ctx.needs_input_grad[2:])


def head_products(hidden: Tensor, weight: Tensor, *teacher: Tensor, by_token: int = 0) -> Any:
    """Make the logits, and in backward their products with the weight and, unless it is frozen, with the hidden states.

    The logits stand in for their own gradient, which has the same shape.

    Args:
        teacher: another head's hidden states and weight, whose logits are made too.
        by_token: how many numbers each token has, 0 of a mean.
    """
    return _HeadProducts.apply(hidden, weight, by_token, *teacher)  # type: ignore[no-untyped-call]
