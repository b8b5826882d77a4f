"""What type checkers say that ops return, by their flags. Nothing runs this: mypy, which CI runs, fails where it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import assert_type

import onepass
from onepass.ops.loss.formula import NamedStats, Stats
from onepass.runtime.fp8 import FP8Tensor


def losses(hidden: Tensor, weight: Tensor, labels: Tensor, flag: bool, names: Sequence[str]) -> None:
    head = hidden, weight, labels
    assert_type(onepass.linear_cross_entropy(*head), Tensor)
    assert_type(onepass.linear_cross_entropy(*head, reduction="none", z_loss=1e-4, return_stats=False), Tensor)
    assert_type(onepass.linear_cross_entropy(*head, return_stats=True), tuple[Tensor, Stats])
    assert_type(onepass.linear_cross_entropy(*head, return_stats=names), tuple[Tensor, NamedStats])
    assert_type(onepass.linear_cross_entropy(*head, return_stats=flag), Tensor | tuple[Tensor, Stats | NamedStats])
    assert_type(onepass.linear_cross_entropy(*head, return_stats=("entropy",))[1].entropy, Tensor | Any)
    assert_type(onepass.cross_entropy(hidden, labels), Tensor)
    assert_type(onepass.cross_entropy(hidden, labels, return_stats=True), tuple[Tensor, Stats])
    assert_type(onepass.cross_entropy(hidden, labels, return_stats=["entropy"]), tuple[Tensor, NamedStats])
    assert_type(onepass.cross_entropy(hidden, labels, return_stats=flag), Tensor | tuple[Tensor, Stats | NamedStats])


def norms(x: Tensor, weight: Tensor, h: Tensor | None, flag: bool) -> None:
    assert_type(onepass.norm_linear(x, None, weight), Tensor)
    assert_type(onepass.norm_linear(x, None, weight, return_norm_output=True), tuple[Tensor, Tensor])
    assert_type(onepass.norm_linear(x, None, weight, return_input=True), tuple[Tensor, Tensor])
    assert_type(onepass.norm_linear(x, None, weight, residual=x), tuple[Tensor, Tensor])
    assert_type(onepass.norm_linear(x, None, weight, residual=h, return_input=True), tuple[Tensor, Tensor])
    assert_type(onepass.norm_linear(x, None, weight, residual=x, return_norm_output=True), tuple[Tensor, Tensor, Tensor])
    both = onepass.norm_linear(x, None, weight, residual=h, return_norm_output=True, return_input=True)
    assert_type(both, tuple[Tensor, Tensor, Tensor])
    assert_type(onepass.norm_linear(x, None, weight, residual=h, return_norm_output=flag), Tensor | tuple[Tensor, ...])
    assert_type(onepass.rms_norm(x, weight), Tensor)
    assert_type(onepass.rms_norm(x, weight, residual=x), tuple[Tensor, Tensor])
    assert_type(onepass.layer_norm(x, weight, out="fp8"), FP8Tensor)


def others(x: Tensor, weight: Tensor, split: Sequence[int] | None) -> None:
    assert_type(onepass.bias_activation(x), Tensor)
    assert_type(onepass.causal_conv1d(x, weight), Tensor)
    assert_type(onepass.causal_conv1d(x, weight, split=(8, 8)), tuple[Tensor, ...])
    assert_type(onepass.causal_conv1d(x, weight, split=split), Tensor | tuple[Tensor, ...])
