"""Each mutant is a small, plausible slip, and the oracle that the real module passes must catch it."""

import pytest
from ops.bias_activation_oracle import judge_case, main_cases
from ops.mutants import mutant_tests
from ops.oracle import DEVICE

import onepass.ops.activation.bias_activation as module

pytest.importorskip("triton")
from onepass.kernels import column_reduce as strips
from onepass.kernels import rows
from onepass.ops.activation import activations, kernels, saved_rows

CASES = main_cases()
MUTANTS = {  # name: module, function, what is there, what stands there instead, the place of a case that catches it
    "bias rounded to bf16 before the add": (rows, "load_vector", "(vector_ptr + columns, mask=inside, other=0.0)", "(vector_ptr + columns, mask=inside, other=0.0).to(tl.bfloat16)", 0),
    "x rounded to bf16": (saved_rows, "load_rows", "(tl.float32)", "(tl.bfloat16).to(tl.float32)", 0),
    "linear half's bias in backward is the gate's": (kernels, "_backward_kernel", "(bias_ptr, columns + H", "(bias_ptr, columns", 0),
    "linear half's bias in forward is the gate's": (kernels, "_forward_kernel", "columns + H", "columns", 0),
    "clamp before the bias": (kernels, "_forward_kernel", "z = x + load_vector", "if clamp is not None:\n        x = tl.where(x > clamp, clamp, x)\n    z = x + load_vector", 10),
    "upper clamp's edge passes no gradient": (kernels, "_backward_kernel", "z <= clamp", "z < clamp", 41),
    "lower clamp's edge passes no gradient": (kernels, "_backward_kernel", "linear >=", "linear >", 47),
    "gate clamped on both sides": (kernels, "clamp_halves", "clamp, gate", "clamp, tl.where(gate < -clamp, -clamp, gate)", 41),
    "gate's derivative at the unclamped value": (kernels, "_backward_kernel", "z, linear = clamp", "_, linear = clamp", 41),
    "clamped values pass gradient": (kernels, "_backward_kernel", "dz, dz2 = tl.where(passes, dz, 0.0), tl.where(passes2, dz2, 0.0)", "dz = tl.where(passes, dz, 0.0)", 41),
    "offset before the clamp": (kernels, "_forward_kernel", "clamp is not None:\n            z, linear = clamp_halves(z, linear, clamp)\n        if offset is not None:\n            linear += offset", "offset is not None:\n            linear += offset\n        if clamp is not None:\n            z, linear = clamp_halves(z, linear, clamp)", 41),
    "offset forgotten in backward": (kernels, "_backward_kernel", "            if offset is not None:\n                linear += offset\n        ", "        ", 0),
    "token weight in its own gradient": (kernels, "_backward_kernel", " * dy, 0.", " * dy * tl.load(weight_ptr + rows)[:, None].to(tl.float32), 0.", 0),
    "token weight's gradient of the next tile's row": (kernels, "_backward_kernel", "M.to(tl.int64)", "(M.to(tl.int64) - 1)", 4),
    "token weight forgotten in backward": (kernels, "_backward_kernel", "            dy *= weight\n", "", 0),
    "bias gradient rounded a strip": (kernels, "_backward_kernel", "(dbias, 0)", "(dbias, 0).to(tl.bfloat16).to(tl.float32)", 0),
    "dx rounded through bf16": (kernels, "_backward_kernel", "dz, mask", "dz.to(tl.bfloat16).to(tl.float32), mask", 0),
    "bias gradient of dx as stored": (kernels, "_backward_kernel", "dbias += tl.where(inside, dz", "dbias += tl.where(inside, dz.to(dx_ptr.dtype.element_ty).to(tl.float32)", 28),
    "strips overlap by a block": (kernels, "_backward_kernel", "0, ROWS,", "0, ROWS + 1,", 1),
    "strips lose their last block": (kernels, "_backward_kernel", "0, ROWS,", "0, ROWS - BLOCK_M,", 0),
    "last arriver sums a strip too few": (strips, "add_strips", " < STRIPS", " < STRIPS - 1", 0),
    "second to last arriver sums": (strips, "arrive_at", "programs - 1", "tl.maximum(programs - 2, 0)", 26),
    "counter not set back": (kernels, "_backward_kernel", "            tl.store(arrived_ptr + tile, 0)\n", "", 0),
    "counter of the first tile for all": (kernels, "_backward_kernel", "arrived_ptr, tile", "arrived_ptr, 0", 28),
    "last row lost": (kernels, "_backward_kernel", "rows < M", "rows < M - 1", 0),
    "last column lost": (kernels, "_backward_kernel", "(columns < H)", "(columns < H - 1)", 0),
    "a store one row too far": (kernels, "_forward_kernel", "(rows < M)", "(rows <= M)", 0),
    "row stride taken for the width": (saved_rows, "load_rows", " * X_ROW +", " * (H * PARTS) +", 41),
    "erf by tanh": (activations, "_gelu_exact", "tl.where(z > 0.0, 1.0 - tail, tail)", "_gelu_sigmoid(z)[0]", 40),
    "erf's polynomial shortened": (activations, "_normal_tail", "0.0356757128203033 * t - ", "-", 24),
    "gelu's derivative with digits cancelled": (activations, "_gelu_derivative", "z * s * rest", "(z * s - z * s * s)", 0),
    "last row counted again where its block ends later": (kernels, "_backward_kernel", "real[:, None] & ", "", 0),
    "relu's edge has a slope": (activations, "_relu_derivative", "z <= 0.0", "z < 0.0", 47),
    "quick gelu's constant in the derivative": (activations, "_quick_gelu_derivative", "s + 1.702", "s + 1.7", 41),
    "gelu's cubic term in the derivative": (activations, "_gelu_derivative", "_GELU_1 + 3", "_GELU_1 + 2", 0),
    "linear tensor by the gate's stride in forward": (kernels, "_forward_kernel", "aligned(LINEAR_ROW, ALIGN)", "X_ROW", 47),
    "linear tensor by the gate's stride in backward": (kernels, "_backward_kernel", "aligned(LINEAR_ROW, ALIGN)", "X_ROW", 47),
    "linear tensor's row as wide as two": (kernels, "activation_backward", "H = dy.shape[-1]", "H = x.shape[-1] // act.parts", 41),
    "gate's gradient in rows of two": (kernels, "_backward_kernel", "H if linear_ptr is not None else PARTS * H", "PARTS * H", 41),
    "linear tensor's gradient is the gate's": (kernels, "_backward_kernel", "columns[None, :], dz2", "columns[None, :], dz", 41),
    "linear tensor's gradient before the clamp": (kernels, "_backward_kernel", "dz, dz2 = tl.where(passes, dz, 0.0), tl.where(passes2, dz2, 0.0)", "dz, dz2 = tl.where(passes, dz, 0.0), tl.where(passes2, dz2, 0.0) if linear_ptr is None else dz2", 41),
    "fp8 scale off by one step on reading": (saved_rows, "fp8_decode", "exponents <", "(exponents + 1) <", 16),
    "fp8 exponents of the second half read from the first": (saved_rows, "load_rows", " + PART * runs", "", 30),
    "fp8 rounds down": (saved_rows, "fp8_encode", "(size_bits + 0x7FFFF + ((size_bits >> 20) & 1))", "size_bits", 16),
    "fp8 runs counted over the whole row": (saved_rows, "load_rows", "(H, RUN)", "(H * PARTS, RUN) // PARTS", 30),
}


if DEVICE == "cuda":  # one needs the full product of features; of the other a GPU does not decide alike which program comes last
    MUTANTS = {name: row for name, row in MUTANTS.items() if name not in ("second to last arriver sums", "gelu's derivative with digits cancelled")}

test_mutants_are_caught, test_a_copy_without_a_change_passes = mutant_tests(module, MUTANTS, CASES, judge_case, CASES[:12])
