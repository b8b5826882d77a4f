"""How ranks share the losses on DTensors: see runtime/sharding.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onepass.ops.loss.formula import inverse_count, kept_weight
from onepass.ops.loss.targets import row_weights, split_labels
from onepass.runtime.sharding import (
    PARTIAL,
    WHOLE,
    Layout,
    Output,
    Split,
    all_as,
    first_split,
    leading_split,
    refuse,
    refuse_split,
    replicated,
    split_output,
)


def shard_cross_entropy(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided. Logits that are divided by columns are the vocabulary-parallel loss."""
    refuse(given, "tp_group", "inplace_backward")
    logits = given["logits"]
    if at["logits"] == logits.dim() - 1:
        columns = logits.dim() - 1
        labels = columns if given["labels"].is_floating_point() else WHOLE
        return Layout({"logits": columns, "labels": labels, "weight": WHOLE}, group="tp_group")
    rows = first_split(leading_split(at["logits"], logits), _rows_of_labels(given, at))
    return _by_rows(given, rows, {"logits": rows, "labels": rows, "weight": WHOLE}, {})


def _rows_of_labels(given: dict[str, Any], at: Mapping[str, Split]) -> Split:
    """How labels' rows are divided; what divides the columns of probabilities is gathered."""
    labels = given["labels"]
    return leading_split(at["labels"], labels) if labels.is_floating_point() else at["labels"]


def shard_linear_cross_entropy(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided where the weight is whole. A weight divided by rows is the vocabulary-parallel loss."""
    refuse(given, "tp_group", "deferred", "rows", "grad_scale")
    hidden, mask = given["hidden"], given["vocab_mask"]
    rows = first_split(leading_split(at["hidden"], hidden), _rows_of_labels(given, at))
    heads = ("weight", "bias", "lora.a", "lora.b")
    inputs: dict[str, Split]
    if at["weight"] == 0:
        if mask is not None and mask.dtype is torch.uint8:
            raise ValueError("vocab_mask must be of bools where the vocabulary is divided, but is of bits")
        inputs = {"weight": 0, "bias": 0, "lora.a": WHOLE, "lora.b": 0, "token_weight": WHOLE, "class_weight": WHOLE}
        labels = given["labels"]
        inputs["labels"] = labels.dim() - 1 if labels.is_floating_point() else WHOLE
        inputs["vocab_mask"] = WHOLE if mask is None else mask.dim() - 1
        sequence = rows == 0 and hidden.dim() > 1 and hidden.shape[0] % ranks == 0
        inputs["hidden"] = 0 if sequence else WHOLE  # the op gathers it, or sums its gradient
        return Layout(inputs, group="tp_group", options={"sequence_parallel": sequence})
    if at["weight"] != WHOLE:
        refuse_split("weight", at["weight"], "Shard(0) or Replicate")
    inputs = all_as(WHOLE, *heads, "class_weight") | {"hidden": rows, "labels": rows, "token_weight": rows}
    inputs["vocab_mask"] = rows if mask is not None and mask.dim() > 1 else WHOLE
    return _by_rows(given, rows, inputs, all_as(PARTIAL, *heads))


def shard_linear_divergence(given: dict[str, Any], at: Mapping[str, Split], ranks: int) -> Layout:
    """Rows are divided where the weights are whole. Weights divided by rows share the vocabulary, both alike."""
    refuse(given, "tp_group")
    student = given["student"]
    of_vocabulary = ("student_weight", "student_bias", "student_lora.b", "teacher_weight", "teacher_bias")
    for name in ("student_weight", "teacher_weight"):
        if at[name] not in (WHOLE, 0):
            refuse_split(name, at[name], "Shard(0) or Replicate")
    inputs: dict[str, Split]
    if at["student_weight"] == 0 or at["teacher_weight"] == 0:
        inputs = all_as(0, *of_vocabulary) | all_as(WHOLE, "student", "teacher", "labels", "student_lora.a")
        return Layout(inputs, group="tp_group")
    rows = first_split(*(leading_split(at[name], student) for name in ("student", "teacher")))
    if "labels" in at:
        rows = first_split(rows, at["labels"])
    inputs = all_as(WHOLE, *of_vocabulary, "student_lora.a") | all_as(rows, "student", "teacher", "labels")
    return _by_rows(given, rows, inputs, all_as(PARTIAL, *of_vocabulary, "student_lora.a"))


def _by_rows(
    given: dict[str, Any], rows: Split, inputs: dict[str, Split], gradients: dict[str, Split]
) -> Layout:
    """Each rank has the loss of its rows, or their sum. A mean is the sum of all, divided by what all ranks keep."""
    if rows == WHOLE:
        return Layout(inputs)
    each: Output = split_output(rows, given["labels"] if given["labels"] is not None else given["student"])
    if given["reduction"] == "none":
        return Layout(inputs, gradients, each)
    outputs = [PARTIAL, each] if given.get("return_stats") else PARTIAL
    if given["reduction"] != "mean":
        return Layout(inputs, gradients, outputs)
    return Layout(inputs, gradients, outputs, options={"reduction": "sum"}, finish=_mean)


def _mean(parts: dict[str, Any], result: Any, wrap: Callable[[Tensor], Any]) -> Any:
    """Divide the sum by the rows that all ranks keep, or by the sum of their weights."""
    total = result[0] if isinstance(result, tuple) else result
    labels, weight = parts["labels"], parts.get("token_weight")
    dtype = total.dtype
    if labels is None:
        rows = parts["student"][..., 0]
        count = torch.full((), rows.numel(), dtype=dtype, device=rows.device)
    else:
        labels, probabilities = split_labels(labels)
        weight = None if weight is None else weight.reshape(labels.shape)
        classes = parts.get("class_weight" if "hidden" in parts else "weight")
        weights = row_weights(labels, parts["ignore_index"], probabilities, classes, parts.get("label_smoothing", 0.0), weight)
        count = kept_weight(labels, parts["ignore_index"], weights.divisor(), dtype)
    mean = total * inverse_count(replicated(wrap(count)))
    return (mean, result[1]) if isinstance(result, tuple) else mean
