"""Bad input: an error that names the argument, what it was and what it must be."""

import pytest
import torch
from ops.calls import refused

import onepass

X = torch.ones(2, 6)
BAD = {
    "residual to broadcast": ((X, X[0], 0.1), {}, ValueError, ("residual must have x's shape (2, 6)", "(6,)")),
    "p below 0": ((X, X, -0.1), {}, ValueError, ("p must be a probability, from 0 to 1", "-0.1")),
    "p above 1": ((X, X, 1.1), {}, ValueError, ("p must be a probability", "1.1")),
    "p NaN": ((X, X, float("nan")), {}, ValueError, ("p must be a probability", "nan")),
    "p a word": ((X, X, "0.1"), {}, TypeError, ("p must be a number", "'0.1'")),
    "p out of range in evaluation": ((X, X, 2.0), {"training": False}, ValueError, ("p must be a probability", "2.0")),
    "a group's number": ((X, X, 0.1), {"tp_group": 2}, TypeError, ("tp_group must be None or", "2")),
    "rows of nothing": ((X[0], X[0], 0.1), {"sequence_parallel": True}, ValueError, ("x must have at least two", "(6,)")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    refused(onepass.dropout_add, *BAD[name])
