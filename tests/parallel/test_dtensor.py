"""Every op on DTensors: results and gradients of the call on plain tensors, in every placement. Ranks run dtensor_ranks.py."""

import ast
import inspect

import pytest
import torch.distributed as dist
from parallel import dtensor_ranks
from parallel.worlds import PAIRS, found_by

from onepass import nn
from onepass.runtime.dispatch import TORCH
from onepass.runtime.op import OPS

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")

SUM = "P(sum)" if TORCH >= (2, 10) else "P"  # the name of a placement
CLOSE = 2e-5  # of the largest number: sums are made in another order
LESS_CLOSE = {
    ("attention", "triton"): 2e-2,  # the sample is in 16 bits
    ("softmax", "torch"): 2e-3,
    ("softmax", "compiled"): 2e-3,  # gradients are differences of numbers a thousand times as large
}
REFUSED = {  # op, tensor and placement -> what to do
    ("activation_linear", "weight", "S(1)"): "to Shard(0) or Replicate, as a gated activation needs whole rows",
    ("norm_linear", "weight", "S(1)"): "to Shard(0) or Replicate, as a norm needs whole rows",
    ("linear_cross_entropy", "weight", "S(1)"): "redistribute weight",
    ("linear_divergence", "student_weight", "S(1)"): "redistribute student_weight",
    ("linear_divergence", "teacher_weight", "S(1)"): "redistribute teacher_weight",
    ("embedding: a shard", "weight", "S(0)"): "vocab_size must be None",
}


@pytest.fixture(scope="module", params=PAIRS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(dtensor_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("by", ("torch", "triton", "compiled"))
@pytest.mark.parametrize("op", sorted(OPS))
def test_results_and_gradients_are_those_of_plain_tensors(found, op, by):
    cases = [(key[0], *way, case) for mine in found for key, ways in mine.items()
             if key[0].partition(":")[0] == op and key[1] == by for way, case in ways.items()]  # fmt: skip
    assert cases
    for name, argument, way, case in cases:
        expected = REFUSED.get((name, argument, way)) or REFUSED.get((op, argument, way))
        if expected:
            assert isinstance(case, str) and expected in case, (name, argument, way, case)
            continue
        assert not isinstance(case, str), (name, argument, way, case)
        limit = LESS_CLOSE.get((op, by), CLOSE)
        assert max(case["results"] + case["gradients"]) <= limit, (name, argument, way, case)
        for grad, leaf in zip(case["gradients lie"], case["leaves lie"], strict=True):
            assert grad == leaf or ("P" in leaf and grad == "R"), (name, argument, way, case)


@pytest.mark.parametrize(
    ("name", "argument", "way", "lie"),
    [
        ("rms_norm", "x", "S(0)", ["S(0)"]),
        ("rms_norm", "x", "S(1)", ["R"]),
        ("rms_norm", "x", SUM, ["R"]),
        ("rms_norm: residual", "residual", "S(0)", ["S(0)", "S(0)"]),
        ("gated_rms_norm", "z", "S(1)", ["S(1)"]),
        ("gated_rms_norm: the gate first", "x", "S(1)", ["R"]),
        ("softmax", "x", "S(0)", ["S(0)"]),
        ("linear", "weight", "S(0)", ["S(2)"]),
        ("linear", "weight", "S(1)", [SUM]),
        ("linear", "x", "S(0)", ["S(0)"]),
        ("norm_linear: all outputs", "weight", "S(0)", ["S(2)", "R", "R"]),
        ("norm_linear: all outputs", "x", "S(0)", ["S(0)", "S(0)", "S(0)"]),
        ("activation_linear", "weight", "S(0)", ["S(2)"]),
        ("bias_activation", "x", "S(1)", ["R"]),
        ("bias_activation: linear", "x", "S(0)", ["S(0)"]),
        ("bias_activation: linear", "x", "S(1)", ["S(1)"]),
        ("bias_activation: linear", "linear", "S(0)", ["S(0)"]),
        ("bias_activation: linear", "linear", "S(1)", ["S(1)"]),
        ("embedding", "weight", "S(0)", [SUM]),
        ("embedding", "weight", "S(1)", ["S(2)"]),
        ("attention", "qkv", "S(0)", ["S(0)"]),
        ("attention", "qkv", "S(1)", ["R"]),
        ("attention", "qkv", "S(2)", ["S(2)"]),
        ("rope", "q", "S(0)", ["S(0)", "S(0)"]),
        ("rope", "q", "S(1)", ["S(1)", "S(1)"]),
        ("rope", "q", "S(2)", ["S(2)", "R"]),
        ("linear_cross_entropy", "weight", "S(0)", ["R"]),
        ("cross_entropy", "logits", "S(1)", ["R"]),
    ],
)
def test_results_are_divided_by_the_rule(found, name, argument, way, lie):
    for mine in found:
        assert mine[name, "torch"][argument, way]["results lie"] == lie


def test_dropout_draws_by_the_first_rank_for_all(found):
    for mine in found:
        for way in ("R", "S(0)"):  # the elements that one rank would drop
            assert mine["dropout"][way][0] == 0 and mine["dropout"][way][2] < CLOSE, way
        differ, grad, _, alike = mine["dropout"]["S(1)"]
        assert differ and grad < CLOSE and not alike  # others, and no two ranks the same
    assert found[0]["dropout"] == found[1]["dropout"]


def test_column_and_row_parallel_plans(found):
    for mine in found:
        for way, parameters in mine["plans"].items():
            for name, (error, grad, lies) in parameters.items():
                assert error < CLOSE and grad == lies, (way, name, error, grad)


def test_modules(found):
    for mine in found:
        assert {*mine["modules"]} == {name for name in nn.__all__ if name[0].isupper()}
        assert max(mine["modules"].values()) < CLOSE, mine["modules"]


def test_calls_give_all_arguments():
    """What a public function forgot to hand to `run_on_shards` would silently be its default."""
    for name, op in OPS.items():
        function = ast.parse(inspect.getsource(op.function)).body[0]
        call = next(c for c in ast.walk(function) if isinstance(c, ast.Call) and getattr(c.func, "id", "") == "run_on_shards")
        given = {k.arg for k in call.keywords if k.arg}
        if any(k.arg is None for k in call.keywords):  # and those of the record `given`
            record = next(n.value for n in function.body if isinstance(n, ast.Assign) and n.targets[0].id == "given")
            given |= {key.value for key in record.keys}
        assert given == {*inspect.signature(op.function).parameters}, name


def test_a_mesh_of_two_dimensions(found):
    for mine in found:
        for errors in mine["two dimensions"]:
            assert max(errors) < CLOSE


def test_what_cannot_be_done_says_why(found):
    for mine in found:
        said = mine["said"]
        assert "tp_group must be left out where tensors are DTensors" in said["group"]
        assert "weight must be on x's mesh" in said["mesh"]
        assert "redistribute qkv" in said["heads"] and "2 ranks can't share 3 groups" in said["heads"]
        assert "dropout must be 0 where tensors are DTensors" in said["dropout"] and "dropout_add" in said["dropout"]
        assert "weight must have shape (8,)" in said["shape"]
        assert "main_grad" in said["main_grad"] and "weight is beside DTensors" in said["main_grad"]
