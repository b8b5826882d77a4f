"""linear_cross_entropy as a policy's head: passes without gradients, and rows that are not computed."""

import pytest
import torch
from ops.calls import backends
from ops.linear_cross_entropy_calls import products, tensors
from ops.linear_cross_entropy_oracle import BF16, DEVICE, FP32, op, taken

import onepass

on_a_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="of tensors on a CPU")

# ---- passes without gradients ----


def ratio_inputs(rows, dtype=BF16, V=900):
    hidden, weight, labels, *_ = tensors((rows,), 24, V, dtype=dtype)
    labels[::3] = -100
    return hidden, weight, labels


@backends
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("budget", (1 << 15, 1 << 20), ids=str)
def test_a_ratio_of_policies_starts_at_1(budget, dtype, backend):
    """log_prob's bits are those of the training call, whether its logits wait or are made again, whatever else it asks for."""
    inputs = ratio_inputs(60, dtype)
    options = {"reduction": "none", "chunk_bytes": budget, "backend": backend}
    with torch.no_grad():
        old = onepass.linear_cross_entropy(*inputs, return_stats=("log_prob",), **options)[1].log_prob
    new = onepass.linear_cross_entropy(*inputs, return_stats=("log_prob", "entropy"), **options)[1].log_prob
    assert new.requires_grad and torch.equal(old, new)


def test_the_ways_that_a_ratio_is_tested_with():
    inputs = ratio_inputs(60)
    variants = [
        onepass.explain("linear_cross_entropy", *inputs, reduction="none", chunk_bytes=budget, backend="torch").variant
        for budget in (1 << 15, 1 << 20)
    ]
    assert "made again in backward" in variants[0] and "their own gradient" in variants[1]


@on_a_cpu
@pytest.mark.parametrize("frozen", (False, True))
def test_a_pass_without_gradients_is_one_product_in_little_memory(frozen):
    """Also where inputs require grad, but no_grad is in force; and where they don't."""
    hidden, weight, labels = torch.randn(512, 16), torch.randn(8192, 16), torch.randint(8192, (512,))
    inputs = [hidden.requires_grad_(not frozen), weight.requires_grad_(not frozen), labels]

    def run():
        with torch.set_grad_enabled(frozen):
            return op(reduction="none", return_stats=("log_prob", "entropy"), chunk_bytes=1 << 20)(*inputs)

    found = taken(run)
    assert found.products(inputs) == 1 and found.most <= 1.25 * (1 << 20) + 100 * 512, found


@pytest.mark.parametrize(("asked", "count"), [("log_prob", 3), ("correct", 3), ("entropy", 3)])
def test_statistics_of_a_mean_take_no_fourth_product(asked, count):
    inputs = tensors((200,), 24, 3000, rest=False)[:3]
    call = lambda *t: (lambda loss, stats: loss + 0 * getattr(stats, asked).sum())(*op(return_stats=[asked])(*t))  # noqa: E731
    assert products(call, inputs) == count


def test_statistics_that_nobody_differentiates_leave_gradients_to_forward():
    """Of a long batch, where logits don't fit: of differentiable statistics logits are made again."""
    inputs = tensors((200,), 24, 3000, rest=False)[:3]
    for asked, words in ((["correct"], "gradients in forward"), (["log_prob"], "made again in backward")):
        said = onepass.explain("linear_cross_entropy", *inputs, return_stats=asked, chunk_bytes=2 << 20, backend="torch").variant
        assert words in said, said
