"""bias_activation against fp64, in every combination of its features."""

import itertools

import pytest
from ops.bias_activation_oracle import CLAMPS, GATED, LAYOUTS, PLAIN, SHAPES, Case, judge_case, main_cases
from ops.oracle import BF16, DEVICE, FP16, FP32

import onepass.ops.activation.bias_activation as module

pytest.importorskip("triton")


@pytest.mark.parametrize("case", main_cases(), ids=str)
def test_budget(case):
    report = judge_case(module, case)
    assert report, report


@pytest.mark.skipif(DEVICE == "cuda", reason="600 kernels to compile; the cases above have every feature")
@pytest.mark.parametrize("dtype", (FP32, FP16, BF16))
@pytest.mark.parametrize("activation", (*PLAIN, *GATED))
def test_every_combination(activation, dtype):
    clamps = CLAMPS if activation in GATED else CLAMPS[:1]
    layouts = itertools.cycle(LAYOUTS)
    shapes = itertools.cycle((((3,), 33), ((4,), 40)))  # few programs: tiles and strips are the cases' above
    for bias, weight, (clamp, offset) in itertools.product(
        (None, dtype, FP32 if dtype != FP32 else BF16), (None, FP32, BF16), clamps
    ):
        lead, H = next(shapes)
        case = Case(activation, lead, H, dtype, bias, weight, bias is None, clamp, offset, "input", next(layouts), next(layouts))
        report = judge_case(module, case)
        assert report, f"{case}\n{report}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ("silu", "swiglu"))
def test_layouts(activation, layout):
    for lead, H in SHAPES:
        case = Case(activation, lead, H, BF16, BF16, layout=layout, dy_layout=layout)
        report = judge_case(module, case)
        assert report, f"{case}\n{report}"
