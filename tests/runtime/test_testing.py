"""The tools that test the ops are themselves able to fail."""

import os
import subprocess
import sys

import pytest
import torch

from onepass.kernels import layout
from onepass.kernels.language import triton
from onepass.runtime import op as op_records
from onepass.testing.budget import compare, judge, judge_seeds
from onepass.testing.mutants import mutate
from onepass.testing.poison import GUARD, assert_written, bytes_kept, poisoned, saved_tensors, unchanged


def exact_formula(x, scale):
    return torch.nn.functional.silu(x) * scale, (x * scale).sum(-1)


def rounded_once(x, scale):
    return tuple(t.to(x.dtype) for t in exact_formula(x.float(), scale.float()))


def drawn(dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    x, scale = torch.randn(40, 64).to(dtype), torch.rand(64).to(dtype)
    return {"x": x, "scale": scale}, (torch.randn(40, 64).to(dtype), torch.randn(40).to(dtype))


# ---- the budget ----


def test_the_baseline_is_within_its_own_budget():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        report = judge(rounded_once, exact_formula, *drawn(dtype))
        assert report, report
        assert {finding.output for finding in report.findings} == {"y0", "y1", "dx", "dscale"}


SLIPS = {
    "rounded often": (torch.bfloat16, lambda x, scale: exact_formula(x, scale)),
    "rounded in between": (torch.float32, lambda x, scale: tuple(t.bfloat16().float() for t in rounded_once(x, scale))),
    "one per cent": (torch.bfloat16, lambda x, scale: tuple(t * 1.01 for t in rounded_once(x, scale))),
    "rows exchanged": (torch.bfloat16, lambda x, scale: (rounded_once(x, scale)[0], rounded_once(x, scale)[1].flip(0))),
    "half of a gradient lost": (torch.bfloat16, lambda x, scale: rounded_once(x, scale.detach() / 2 + scale / 2)),
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_are_found(name):
    dtype, slip = SLIPS[name]
    report = judge(slip, exact_formula, *drawn(dtype))
    assert not report and "TOO FAR" in str(report)


def test_one_bad_entry_and_one_bad_row_are_found():
    exact = torch.randn(1000, 256, dtype=torch.float64)
    baseline = exact.float().bfloat16()
    entry, row = baseline.clone(), baseline.clone()
    entry[3, 5] += 0.125
    row[7] *= 1.004  # half a step: small beside the rest
    assert compare([({"y": baseline}, {"y": baseline.float()}, {"y": exact})])
    for ours in (entry, row):
        assert not compare([({"y": ours}, {"y": baseline.float()}, {"y": exact})])


@pytest.mark.parametrize("shape", [(1,), (3, 50)])
@pytest.mark.parametrize("true", [0.0, 1.0])
def test_nan_is_never_within_the_budget(shape, true):
    exact = torch.full(shape, true, dtype=torch.float64)
    ours = exact.float()
    assert compare([({"y": ours}, {"y": ours}, {"y": exact})])
    wrong = ours.clone()
    wrong.view(-1)[0] = float("nan")
    for trials in ([wrong], [ours, wrong], [wrong, ours]):
        assert not compare([({"y": got}, {"y": ours}, {"y": exact}) for got in trials])


def test_overflow_must_be_where_the_baseline_overflows():
    exact = torch.tensor([1e6, 1.0, float("nan"), -float("inf")] * 20, dtype=torch.float64)
    baseline = exact.float()
    assert compare([({"y": exact.half()}, {"y": baseline}, {"y": exact})])
    for at, value in ((0, 65504.0), (2, 0.0), (3, float("inf"))):
        ours = exact.half()
        ours[at] = value
        assert not compare([({"y": ours}, {"y": baseline}, {"y": exact})])


def test_few_numbers_are_pooled_over_seeds():
    def cases(slip):
        for seed in range(6):
            torch.manual_seed(seed)
            yield {"x": torch.randn(1, 1), "slip": None}, torch.ones(1, 1)

    def ours(slip):
        return lambda x, _: torch.nn.functional.silu(x) * (1 + slip)

    def formula(x, _):
        return torch.nn.functional.silu(x)

    assert judge_seeds(ours(0.0), formula, cases(0.0))
    assert not judge_seeds(ours(1e-5), formula, cases(1e-5))


def test_a_wrong_shape_and_nothing_at_all_fail():
    y = torch.zeros(2, 3)
    assert not compare([({"y": y}, {"y": y.T}, {"y": y.T.double()})])
    assert not compare([({}, {}, {})])


# ---- memory ----


def test_unwritten_memory_shows():
    with poisoned():
        made = [torch.empty(5), torch.empty_like(torch.ones(3).bfloat16()), torch.ones(2).new_empty((2, 3))]
        made.append(torch.empty_strided((2, 2), (1, 2)))
        codes, counts = torch.empty(4, dtype=torch.uint8), torch.empty(4, dtype=torch.int32)
        zeros = torch.zeros(4, dtype=torch.int32)
    assert all(t.isnan().all() for t in made) and (codes == 255).all() and (counts == 0x7A7A7A7A).all() and not zeros.any()
    assert made[3].stride() == (1, 2) and not torch.empty(0).requires_grad
    with pytest.raises(AssertionError, match="y: 5 of 5 elements never written"):
        assert_written(y=made[0])
    assert "new_empty" not in vars(torch.Tensor)


@pytest.mark.parametrize("offset", [-1, 6, -GUARD // 4, 6 + GUARD // 4 - 1])
def test_a_write_outside_shows(offset):
    def stray():
        with poisoned():
            y = torch.empty(2, 3).fill_(1.0)
            y.as_strided((1,), (1,), y.storage_offset() + offset).fill_(0.0)

    with pytest.raises(AssertionError, match=r"\(2, 3\) torch.float32: 4 bytes written (before|after) it"):
        stray()


def test_changed_inputs_show():
    base = torch.ones(4, 4)
    view = base[:, 1:3]
    for change in (lambda: view.add_(1), lambda: base[0].zero_(), lambda: view.data.mul_(-1)):
        with pytest.raises(AssertionError, match=r"x: .* bytes of its storage were changed"), unchanged(x=view):
            change()
    with pytest.raises(AssertionError, match="x was written in place"), unchanged(x=view):
        view.copy_(view.clone())
    with unchanged(x=view, nothing=None):
        view + 1


def test_what_autograd_keeps_is_seen():
    x = torch.ones(8, requires_grad=True)
    with saved_tensors() as kept:
        x.sin().exp()
    assert len(kept) == 2 and bytes_kept(kept) == 64 and bytes_kept(kept, x) == 32


# ---- mutants ----


def test_a_mutant_must_follow_the_code():
    with pytest.raises(ValueError, match=r"'no such text' must be in onepass.kernels.layout:as_rows once, but is there 0 times"):
        mutate(layout, "as_rows", "no such text", "other")
    with pytest.raises(ValueError, match=r"once, but is there \d+ times: the mutant has to follow the code"):
        mutate(layout, "", "stride", "strides")
    with pytest.raises(ValueError, match="must have one no_such_function, but has 0"):
        mutate(layout, "no_such_function", "stride", "strides")


def test_a_mutant_is_found_however_lines_are_broken():
    mutant = mutate(layout, "as_rows", "(x.contiguous(),\n    x.shape[-1])", "None")
    assert mutant.as_rows(torch.ones(4, 6).T) is None


def test_a_mutant_leaves_the_real_one_alone():
    before, op = dict(sys.modules), op_records.OPS["bias_activation"]
    mutant = mutate(layout, "_levels", "x.stride(-1) != 1", "x.stride(-1) == 1")
    x = torch.ones(4, 6)[:, :3]
    assert mutant is not layout and layout.as_rows(x)[0] is x and mutant.as_rows(x)[0] is not x
    assert op_records.OPS["bias_activation"] is op
    assert {name: module for name, module in sys.modules.items() if name.startswith("onepass")} == {
        name: module for name, module in before.items() if name.startswith("onepass")
    }


# ---- the interpreter ----


@pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs the interpreter")
def test_the_interpreter_refuses_to_come_late():
    code = "import os, onepass; os.environ['TRITON_INTERPRET'] = '1'; import onepass.testing.interpreter"
    late = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=late, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "needs TRITON_INTERPRET=1 in the environment before onepass" in done.stderr
