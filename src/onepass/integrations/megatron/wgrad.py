"""The functions of Apex's fused_weight_gradient_mlp_cuda, and the drain of deferred embedding gradients."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onepass.distributed.tensor_parallel import tp_layout
from onepass.gradients.deferred import DeferredWgrad
from onepass.gradients.main_grad import add_gradient

MODULE = "fused_weight_gradient_mlp_cuda"
DEFERRED = "onepass_deferred"  # where a weight keeps the DeferredWgrad of the head without logits


def wgrad_gemm_accum_fp32(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
    """Add dy.T @ x to an fp32 main_grad, in fp32."""
    if main_grad.dtype is not torch.float32:
        raise TypeError(f"main_grad must be fp32, but is {main_grad.dtype}")
    _accumulate(x, dy, main_grad)


def wgrad_gemm_accum_fp16(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
    """Add dy.T @ x to a main_grad of 16 bits, fp16 or bf16."""
    if main_grad.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"main_grad must be fp16 or bf16, but is {main_grad.dtype}")
    _accumulate(x, dy, main_grad)


def _accumulate(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
    with torch.no_grad():
        add_gradient(main_grad, dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))


def wgrad_module() -> ModuleType:
    module = ModuleType(MODULE, "onepass's functions in place of Apex's")
    vars(module).update(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16=wgrad_gemm_accum_fp16)
    return module


def drain_embedding_wgrad_compute(
    config: Any, embedding_activation_buffer: list[Tensor], grad_output_buffer: list[Tensor], weight: Any, tp_group: Any
) -> None:
    """Add the deferred gradients of the output layer, and those that a head without logits has kept.

    The next microbatch's rows are gathered under the product of this one's. Stock raises UnboundLocalError where one microbatch
    was deferred.
    """
    inputs, grads = embedding_activation_buffer, grad_output_buffer
    if len(inputs) != len(grads):
        raise ValueError(f"as many inputs as gradients must be deferred, but {len(inputs)} and {len(grads)} are")
    if inputs and hasattr(weight, "__fsdp_param__"):
        raise NotImplementedError("defer_embedding_wgrad_compute must be False with Megatron-FSDP, which overwrites main_grad")
    deferred = vars(weight).get(DEFERRED) or DeferredWgrad()
    layout = tp_layout(tp_group, by_row=False, sequence=config.sequence_parallel)
    for x, dy in zip(inputs, grads, strict=True):
        deferred.add_product(dy, x, weight, weight.main_grad, layout)
    inputs.clear()
    grads.clear()
    deferred.flush()
