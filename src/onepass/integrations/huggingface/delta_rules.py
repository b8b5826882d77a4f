"""The gated delta rule of a model's code: which function computes it, and one with its arguments that calls onepass's.

The model's function is tried as it is written in PyTorch. With `cu_seq_lens_q` documents are apart, which PyTorch's doesn't know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onepass.integrations.huggingface.documents import as_one_row
from onepass.integrations.huggingface.probe import close, randn
from onepass.ops.delta.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from onepass.ops.norm.norm import rms_norm

DELTA_RULE = "torch_chunk_gated_delta_rule"
_EPS = 1e-6  # of the lengths of q and k


def is_delta_rule(function: Callable[..., Any]) -> bool:
    """Whether this computes onepass's rule, with q and k made of length one before, where asked, and states in and out."""
    q, k, v = randn(2, 66, 1, 4), 0.4 * randn(2, 66, 1, 4, seed=2), randn(2, 66, 2, 3, seed=3)
    g, beta, state = -F.softplus(randn(2, 66, 2, seed=4)), randn(2, 66, 2, seed=5).sigmoid(), randn(2, 2, 4, 3, seed=6)
    states_given: tuple[dict[str, Any], ...] = ({}, {"initial_state": state, "output_final_state": True})
    for unit in (False, True):
        for given in states_given:
            first, second = (x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt() if unit else x for x in (q, k))
            exact: Any = gated_delta_rule_reference(first, second, v, g, beta, **given)
            expected, states = exact if given else (exact, None)
            try:
                with torch.no_grad():
                    y, final = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=unit, **given)
            except Exception:
                return False
            if not close(y, expected, 1e-4) or not (final is None if states is None else close(final, states, 1e-4)):
                return False
    return True


def delta_rule_of(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the model's arguments, which calls the model's where onepass's doesn't know one."""

    def correct(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        given: dict[str, Any] = {"initial_state": initial_state, "output_final_state": output_final_state}
        if cu_seqlens is not None and query.shape[0] > 1 and (initial_state is not None or output_final_state):
            others |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
            return stock(query, key, value, g=g, beta=beta, **given, **others)
        if use_qk_l2norm_in_kernel:
            query, key = _of_length_one(query), _of_length_one(key)
        if cu_seqlens is None:
            found: Any = gated_delta_rule(query, key, value, g, beta, **given)
        else:
            found = gated_delta_rule(*as_one_row(query, key, value, g, beta), cu_seqlens=cu_seqlens.int(), **given)
        return found if output_final_state else (found.view(value.shape), None)

    return correct


def _of_length_one(x: Tensor) -> Tensor:
    """Return x / |x| of each head: an RMSNorm whose weight is that of one, as kernels have it."""
    K = x.shape[-1]
    return rms_norm(x, x.new_full((K,), K**-0.5), eps=_EPS / K)
