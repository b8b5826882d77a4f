"""Verdicts on traces made by hand, and suggestions only where something was seen that supports them."""

import pytest
from profiling.made import NOTHING, Made, launch_bound, matrix_products, number, numbers, tensor

from onepass.profiling.verdict import VERDICTS
from onepass.runtime.ceilings import Ceilings
from onepass.runtime.formula import FORMULA_RANGE

VOCABULARY = 32000


def calls_of(profile):
    return [suggestion.call for suggestion in profile.suggestions]


def queued(*ops, us=100.0, steps=2, ignored=0.0):
    """Operators with a kernel each, of `us`, back to back on the GPU."""
    made = Made()
    made.steps(*((100_000.0 * i, 50_000.0) for i in range(steps)))
    for i in range(steps):
        for j, (name, *inputs) in enumerate(ops):
            at = 100_000.0 * i + 10 * j
            made.op(name, at, 8, *inputs)
            made.kernel(f"kernel of {name}", at + 2, 100_000.0 * i + 1000 + us * j, us)
    return made.profile(wall=us * len(ops), ignored=ignored)


# ---- verdicts ----


def test_launch_bound():
    found = launch_bound().profile(wall=100)
    assert found.verdict == "launch-bound"
    assert "idle for 90% of a step (90 us of 100 us): 10 launches" in found.reasons[0]


@pytest.mark.parametrize(("wall", "verdict"), [(13.0, "mixed"), (14.0, "launch-bound")])
def test_a_quarter_of_the_time_makes_it_launch_bound(wall, verdict):
    assert launch_bound().profile(wall=wall).verdict == verdict


def test_bandwidth_bound():
    found = queued(("aten::add", tensor(4096, 4096), tensor(4096, 4096), number(1)), us=250.0)
    assert found.rows[0].of_copy == pytest.approx(0.805, abs=1e-3)
    assert found.verdict == "bandwidth-bound"
    assert "100% of the time reaches 0.5 or more of the copy bandwidth: aten::add" in found.reasons[0]


def test_compute_bound():
    assert matrix_products(us=30.0).profile(wall=60).verdict == "compute-bound"


def test_neither():
    found = matrix_products(us=300.0).profile(wall=600)
    assert found.verdict == "mixed"
    assert "most of the time comes near to neither" in found.reasons[0]
    assert "100% below both" in found.reasons[1]


def test_both_by_halves_is_mixed():
    add = ("aten::add", tensor(4096, 4096), tensor(4096, 4096), number(1))
    product = ("aten::mm", tensor(4096, 1024, dtype="c10::Half"), tensor(1024, 2048, dtype="c10::Half"))
    found = queued(add, product, product, ("aten::sort", tensor(5)), ("aten::sort", tensor(5)), us=210.0)
    assert {row.near for row in found.rows} == {"bandwidth", "compute", None}
    assert found.verdict == "mixed"
    assert "near to neither" not in found.reasons[0]
    assert "40% of unknown bytes and flops" in found.reasons[1]


def test_long_gaps_are_no_wait_for_launches():
    made = Made()
    made.steps((0, 20_000))
    for i in range(3):
        made.kernel("work", 10 + 8000 * i, 20 + 8000 * i, 100)
    made.call("cudaDeviceSynchronize", 200, 100)
    found = made.profile(wall=24_000)
    assert found.verdict == "mixed"
    assert "few long gaps, the longest 7.9 ms between work and work: the CPU does something else there" in found.reasons[0]
    assert "1 times a step the CPU waits for the GPU" in found.reasons[0]


@pytest.mark.parametrize(("wall", "verdict"), [(200.0, "launch-bound"), (201.0, "mixed")])
def test_dispatch_bound_on_a_cpu(wall, verdict):
    made = Made()
    made.steps((0, 200))
    for i in range(20):
        made.op("aten::tanh", 10 * i, 8, tensor(8))
    found = made.profile(wall=wall)
    assert found.verdict == verdict
    if verdict == "launch-bound":
        assert found.reasons[0].startswith("dispatch-bound, since this is a CPU: 20 operators, one every 10 us")


def test_python_between_operators():
    made = Made()
    made.steps((0, 1000))
    made.op("aten::tanh", 100, 300, tensor(8))
    made.op("MulBackward0", 500, 100)
    found = made.profile(wall=900)
    assert found.verdict == "launch-bound"
    assert "1 operator, and 70% of the time is outside them, in Python and autograd" in found.reasons[0]


def test_a_cpu_at_work():
    made = Made()
    made.steps((0, 1010))
    made.op("aten::add", 5, 1000, tensor(10**5), tensor(10**5), number(1))
    assert made.profile(wall=900, ceilings=Ceilings(2.0, 1, None)).verdict == "bandwidth-bound"


def test_nothing_ran():
    found = Made().profile()
    assert found.verdict == "mixed"
    assert found.reasons == ("nothing ran that the profiler could see",)
    assert not found.suggestions
    assert str(found)


def test_verdicts_have_the_names_that_the_documentation_lists():
    assert VERDICTS == ("launch-bound", "bandwidth-bound", "compute-bound", "mixed")


# ---- suggestions ----

HIDDEN = tensor(4096, 1024)
NORM = ("aten::native_layer_norm", HIDDEN, numbers("[1024]"), tensor(1024), tensor(1024), number(1e-5))
RMS = ("aten::_fused_rms_norm", HIDDEN, numbers("[1024]"), tensor(1024), NOTHING)
ADD = ("aten::add", HIDDEN, HIDDEN, number(1))
MUL = ("aten::mul", HIDDEN, HIDDEN)
SORT = ("aten::sort", HIDDEN)


def test_nothing_is_suggested_where_nothing_was_seen():
    assert calls_of(queued(SORT, ADD, MUL)) == []


@pytest.mark.parametrize(
    ("op", "call"), [(NORM, "onepass.layer_norm(x, weight, ...)"), (RMS, "onepass.rms_norm(x, weight, ...)")]
)
def test_norms(op, call):
    found = queued(op, SORT)
    assert calls_of(found) == [call]
    assert found.suggestions[0].saw == f"1 {op[0]}, 100 us together"
    assert found.suggestions[0].us == 100


def test_a_norm_after_an_addition_takes_it_in():
    assert "; 1 follow an addition of their shape: residual=" in queued(ADD, NORM, SORT, NORM).suggestions[0].saw
    assert "addition" not in queued(ADD, SORT, NORM).suggestions[0].saw


def test_a_norm_as_fast_as_a_copy_stays():
    assert calls_of(queued(NORM, us=34.0)) == []  # 33.6 MB
    assert calls_of(queued(NORM, us=40.0)) != []


def test_an_rms_norm_written_out():
    rows = tensor(4096, 1)
    ops = [
        ("aten::pow", HIDDEN, number(2)), ("aten::mean", HIDDEN, numbers("[-1]"), number(True), NOTHING),
        ("aten::add", rows, number(1e-6), number(1)), ("aten::rsqrt", rows), ("aten::mul", HIDDEN, rows), MUL,
    ]  # fmt: skip
    found = queued(*ops, SORT)
    assert calls_of(found) == ["onepass.rms_norm(x, weight)"]
    assert found.suggestions[0].saw == "1 RMS norms written out in 6 operators, 600 us"
    assert calls_of(queued(*ops[:3], SORT, *ops[4:])) == []
    cast = ("aten::copy_", HIDDEN, HIDDEN)
    narrow = queued(ADD, cast, *ops[:5], cast, ops[5], SORT)
    assert narrow.suggestions[0].saw == (
        "1 RMS norms written out in 6 operators, 600 us; 1 follow an addition of their shape: residual= takes it in"
    )


@pytest.mark.parametrize(("name", "plain", "gated"), [("gelu", "gelu", "geglu"), ("silu", "silu", "swiglu")])
def test_activations(name, plain, gated):
    op = (f"aten::{name}", HIDDEN, *([NOTHING] if name == "gelu" else []))
    assert calls_of(queued(op, SORT, MUL)) == [f'onepass.bias_activation(x, bias, "{plain}")']
    found = queued(op, MUL, SORT)
    assert calls_of(found) == [f'onepass.bias_activation(x, bias, "{gated}")']
    assert found.suggestions[0].us == 200


@pytest.mark.parametrize("between", [(), (("aten::copy_", tensor(64, 1024), tensor(64, 1024)),)], ids=("", "autocast"))
def test_a_gate_whose_other_factor_is_made_after_the_activation(between):
    up = ("aten::mm", tensor(4096, 64), tensor(64, 1024))
    found = queued(("aten::silu", HIDDEN), *between, up, MUL, SORT)
    assert calls_of(found) == ['onepass.bias_activation(x, bias, "swiglu")']
    assert "1 are multiplied with a tensor of their shape" in found.suggestions[0].saw
    down = ("aten::mm", HIDDEN, tensor(1024, 64))
    assert calls_of(queued(("aten::silu", HIDDEN), down, MUL)) == ['onepass.bias_activation(x, bias, "silu")']
    scaled = ("aten::mul", HIDDEN, number(2))
    assert calls_of(queued(("aten::silu", HIDDEN), up, scaled)) == ['onepass.bias_activation(x, bias, "silu")']


LOGITS = tensor(512, VOCABULARY)
LABELS = tensor(512, dtype="long int")
LOSS = [
    ("aten::_log_softmax", LOGITS, number(1), number(False)),
    ("aten::nll_loss_forward", LOGITS, LABELS, NOTHING, number(1), number(-100)),
]
HEAD = ("aten::mm", tensor(512, 1024), tensor(1024, VOCABULARY))


def test_a_large_vocabulary():
    found = queued(HEAD, *LOSS)
    assert calls_of(found) == ["onepass.linear_cross_entropy(hidden, weight, labels)"]
    assert "the logits are 512 x 32,000, made by a matrix product" in found.suggestions[0].saw
    assert calls_of(queued(*LOSS)) == ["onepass.cross_entropy(logits, labels)"]


def test_labels_without_a_loss_cost_their_share_of_the_loss_and_the_products():
    dweight = ("aten::mm", tensor(VOCABULARY, 512), tensor(512, 1024))
    other = ("aten::mm", tensor(512, 1024), tensor(1024, 1024))
    found = queued(HEAD, *LOSS, dweight, other, ignored=0.5)
    assert [(s.call.partition(",")[0], s.us) for s in found.suggestions] == [
        ("onepass.linear_cross_entropy(hidden", 200.0),
        ("onepass.linear_cross_entropy(hidden[kept]", 200.0),
    ]
    assert "50% of the labels" in found.suggestions[1].saw
    assert len(queued(HEAD, *LOSS, ignored=0.05).suggestions) == 1
    assert calls_of(queued(HEAD, ignored=0.5)) == []


def test_losses_written_in_other_ways():
    ours = ["onepass.linear_cross_entropy(hidden, weight, labels)"]
    sizes = 4, VOCABULARY, 128  # of logits with the classes in the middle
    transposed = ("aten::_log_softmax", tensor(*sizes), number(1), number(False))
    assert calls_of(queued(HEAD, transposed, ("aten::nll_loss2d_forward", tensor(*sizes)))) == ours
    gather = ("aten::gather", LOGITS, number(1), tensor(512, 1, dtype="long int"), number(False))
    assert calls_of(queued(HEAD, LOSS[0], gather)) == ours
    assert calls_of(queued(HEAD, LOSS[0], ("aten::gather", HIDDEN, *gather[2:]))) == []
    many = tensor(1 << 13, 1 << 11)
    softmax = ("aten::_log_softmax", many, number(-1), number(False))
    head = ("aten::mm", tensor(1 << 13, 64), tensor(64, 1 << 11))
    assert calls_of(queued(head, softmax, ("aten::nll_loss_forward", many))) == ours


def test_a_small_vocabulary_or_no_loss_is_left_alone():
    small = tensor(512, 1000)
    assert calls_of(queued(HEAD, ("aten::_log_softmax", small, number(1), number(False)), LOSS[1])) == []
    assert calls_of(queued(HEAD, LOSS[0])) == []


def accumulating(*inputs, within="torch::autograd::AccumulateGrad", product=(64, 8, 64), of=None):
    """A gradient that a product makes, inside the node `of`, and that is added to another."""
    rows, inner, columns = product
    made = Made()
    made.steps((0, 100))
    made.op(of or "MmBackward0", 0, 20)
    made.op("aten::mm", 2, 10, tensor(rows, inner), tensor(inner, columns))
    made.kernel("product", 5, 10, 20)
    made.op(within, 25, 50)
    made.op("aten::add_", 30, 40, *inputs, number(1))
    made.kernel("add", 35, 60, 20)
    return calls_of(made.profile(wall=20))


def test_weight_gradients_that_are_added():
    ours = ["onepass.linear(x, weight) with weight.main_grad (onepass.parallel.MainGrads)"]
    weight, bias = tensor(32, 64), tensor(64)
    assert accumulating(weight, weight, product=(32, 8, 64)) == ours
    assert accumulating(weight, weight, product=(64, 8, 32)) == ours  # whose transpose is the gradient
    assert accumulating(weight, weight, product=(32, 8, 65)) == []  # a leaf that no product's gradient is for
    assert accumulating(bias, bias) == []
    assert accumulating(weight, weight, product=(32, 8, 64), within="MulBackward0") == []


def test_a_gradient_that_an_op_of_onepass_makes_needs_main_grads_only():
    weight = tensor(32, 64)
    assert accumulating(weight, weight, product=(32, 8, 64), of="_LinearBackward") == ["onepass.parallel.MainGrads(model)"]


@pytest.mark.parametrize("node", ("_NormFunction", "_FormulaFunctionBackward", FORMULA_RANGE))
def test_what_runs_inside_an_op_of_onepass_is_no_reason_for_one(node):
    def found(node):
        made = Made()
        made.steps((0, 100))
        (made.mark if node == FORMULA_RANGE else made.op)(node, 0, 50)
        made.op("aten::native_layer_norm", 5, 40, tensor(64, 64))
        made.kernel("norm", 10, 60, 20)
        return calls_of(made.profile(wall=20))

    assert found(node) == []
    assert found("SomebodysFunction") == ["onepass.layer_norm(x, weight, ...)"]


def adamw(*sizes, between=(), decay=True):
    """torch.optim's loop, for parameters of these sizes."""
    ops = []
    for n in sizes:
        p, one = tensor(n, 64), tensor()
        ops += [("aten::mul_", p, one)] * decay
        ops += [("aten::lerp_", p, p, number(0.1)), ("aten::mul_", p, one), ("aten::addcmul_", p, p, p), *between]
        ops += [("aten::sqrt", p), ("aten::div", p, one), ("aten::add_", p, one), ("aten::addcdiv_", p, p, p)]
    return queued(*ops)


def test_adamw_in_a_loop_over_parameters():
    found = adamw(64, 64, 128, between=[("aten::_local_scalar_dense", tensor())])
    assert calls_of(found) == ["onepass.parallel.AdamW(main_grads)"]
    assert found.suggestions[0].us == 3 * 8 * 100
    assert "3 parameters are stepped one after the other" in found.suggestions[0].saw
    assert adamw(64, decay=False).suggestions[0].us == 7 * 100
    assert calls_of(queued(("aten::sqrt", HIDDEN), ("aten::addcdiv_", HIDDEN, HIDDEN, HIDDEN))) == []


def slices(count, us=2.0, size=lambda i: 128):
    ops = []
    for i in range(count):
        part = tensor(64, size(i))
        ops += [("aten::sin", part), ("aten::tanh", part)]
    return queued(*ops, us=us)


def test_many_small_equal_operators():
    found = slices(16)
    assert calls_of(found) == ["onepass.fuse(fn)"]
    assert found.suggestions[0].saw.startswith(
        "32 small calls with the same shapes one after the other, such as aten::sin, aten::tanh 16 times, 64 us"
    )


def test_few_large_or_different_ones_are_left_alone():
    assert calls_of(slices(7)) == []
    assert calls_of(slices(16, us=50.0)) == []
    assert calls_of(slices(16, size=lambda i: 128 + i)) == []


def test_what_writes_in_place_is_an_optimizer_and_no_independent_call():
    assert calls_of(queued(*[("aten::mul_", HIDDEN, HIDDEN)] * 16, us=2.0)) == []


def test_a_launch_bound_step_of_fixed_shapes_could_be_a_graph():
    found = launch_bound().profile(wall=100)
    assert calls_of(found)[0] == "onepass.fuse(fn, cuda_graph=True)"
    assert found.suggestions[0].us == 90
    assert "the same 10 launches with the same shapes in each step, 90 us of idling" in found.suggestions[0].saw


def test_a_launch_bound_step_with_an_optimizer_is_a_graph_as_a_whole():
    made = launch_bound()
    made.mark("Optimizer.step#AdamW.step", 80, 10)
    assert calls_of(made.profile(wall=100))[0] == "onepass.graphed_step(train_step)"
    before = launch_bound()
    before.mark("Optimizer.step#AdamW.step", -80, 10)
    assert calls_of(before.profile(wall=100))[0] == "onepass.fuse(fn, cuda_graph=True)"


def test_no_graph_where_it_would_not_do():
    graph = "onepass.fuse(fn, cuda_graph=True)"
    assert graph not in calls_of(launch_bound().profile(wall=11))  # the GPU is busy
    assert graph not in calls_of(launch_bound(steps=1).profile(wall=100))  # nobody knows whether shapes change
    waits = launch_bound()
    waits.call("cudaStreamSynchronize", 50, 1)
    assert graph not in calls_of(waits.profile(wall=100))
    already = launch_bound()
    already.kernel("whole", 98, 150, 1, launch="cudaGraphLaunch")
    already.kernel("whole", 1098, 1150, 1, launch="cudaGraphLaunch")
    assert graph not in calls_of(already.profile(wall=100))


def test_what_is_not_worth_a_word_gets_none():
    assert calls_of(queued(NORM, *[SORT] * 99)) != []
    assert calls_of(queued(NORM, *[SORT] * 100)) == []


def test_words_have_verdict_reasons_and_suggestions():
    words = launch_bound().profile(wall=100).words()
    assert words.startswith("launch-bound: the GPU is idle")
    assert "onepass.fuse(fn, cuda_graph=True): the same 10 launches" in words
