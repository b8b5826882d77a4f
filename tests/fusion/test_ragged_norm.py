"""ragged_norm: many norms in one launch, as two operators of graphs; and the tables that its kernels look up."""

import pytest
import torch
from fusion.ragged_norm_oracle import BF16, DEVICE, FP32, Case, draw, judge_case, lanes_of, real_cases, small, small_cases
from ops.calls import backends, equal, needs_triton, says
from ops.oracle import laid_out
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.kernels import device_tables as tables
from onepass.kernels.language import triton
from onepass.ops.norm.ragged import kernels
from onepass.ops.norm.ragged import lanes as ragged_lanes
from onepass.ops.norm.ragged import ragged_norm as module
from onepass.runtime.backend import use_backend

forward, backward = torch.ops.onepass.ragged_norm_forward, torch.ops.onepass.ragged_norm_backward


def both(case, xs, weights, biases, dys):
    """All six results of the registered operators."""
    found = forward(xs, weights, biases, case.norm, case.eps, case.packed)
    asked = len(weights) > 0, case.layer
    return [*found, *backward(dys, xs, weights, found[1], found[2], case.norm, case.packed, *asked)]


# ---- what it computes ----


@needs_triton
@pytest.mark.parametrize("case", small_cases() + real_cases(), ids=str)
def test_within_the_budget(case):
    report = judge_case(module, case)
    assert report, f"{case}\n{report}"


@pytest.mark.parametrize("case", real_cases(), ids=str)
def test_the_plain_path_too(case):
    report = judge_case(module, case, "torch")
    assert report, f"{case}\n{report}"


@pytest.mark.parametrize("layer", (True, False), ids=("layer", "rms"))
def test_fp64_stays_fp64(layer):
    case = Case(layer=layer)
    given = [[t.double().requires_grad_() for t in group] for group in draw(case)]
    xs, weights, biases, dys = given
    ys = module.ragged_norm_reference(xs, weights, biases, norm=case.norm, eps=case.eps)
    exact = torch.autograd.grad(ys, [*xs, *weights], [dy.detach() for dy in dys])
    y, mean, rstd, dx, dweight, _ = both(case, *([t.detach() for t in group] for group in given))
    assert {t.dtype for t in (y, mean, rstd, dx, dweight)} == {torch.float64}
    torch.testing.assert_close(y, torch.cat(ys, -1).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx, torch.cat(exact[: len(xs)], -1), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(dweight, torch.cat(exact[len(xs) :]), rtol=1e-11, atol=1e-11)


@backends
@pytest.mark.parametrize("packed", (True, False), ids=("packed", "flat"))
@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows(lead, packed, backend):
    case = Case(lead=lead, packed=packed)
    with use_backend(backend):
        y, mean, rstd, dx, dweight, dbias = both(case, *draw(case))
    total = sum(case.widths)
    assert y.shape == dx.shape == ((*lead, total) if packed else (0,))
    assert mean.shape == rstd.shape == (len(case.widths), 0)
    assert dweight.shape == dbias.shape == (total,) and not dweight.any() and not dbias.any()


@backends
def test_nan_and_infinities_stay_in_their_rows_and_lanes(backend):
    case = Case(widths=(20, 40), lead=(9,))
    xs, weights, biases, dys = draw(case)
    for value in (float("nan"), float("inf")):
        xs[1][4, 7] = value
        with use_backend(backend), small(module, case):
            y, _, _, dx, *_ = both(case, xs, weights, biases, dys)
        for whole in (y, dx):
            first, second = whole.split(case.widths, -1)
            assert first.isfinite().all()
            assert not second[4].isfinite().any()
            assert second.isfinite().all(-1).sum() == 8


@backends
def test_the_same_every_time(backend):
    case = Case(lead=(21,), dtype=BF16)
    given = draw(case)
    with use_backend(backend), small(module, case):
        first = both(case, *given)
        assert all(equal(both(case, *given), first) for _ in range(2))


@needs_triton
@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs have no bounds to tell")
def test_other_tensors_at_the_same_addresses():
    """The interpreter asks which tensors a kernel may reach, also where a table of addresses is known."""
    case = Case(lead=(21,))
    given = draw(case)
    memory = [[bytearray(t.numel() * t.element_size()) for t in group] for group in given]

    def anew():
        made = []
        for group, places in zip(given, memory, strict=True):
            made.append([torch.frombuffer(place, dtype=t.dtype).view(t.shape) for t, place in zip(group, places, strict=True)])
            for to, t in zip(made[-1], group, strict=True):
                to.copy_(t)
        return made

    with use_backend("triton"):
        first = both(case, *anew())
        assert equal(both(case, *anew()), first)


@backends
def test_flat_and_packed_hold_the_same(backend):
    case = Case(lead=(3, 5))
    given = draw(case)
    with use_backend(backend):
        packed, flat = (both(Case(lead=case.lead, packed=each), *given) for each in (True, False))
    widths = list(case.widths)
    for i in (0, 3):
        assert equal(lanes_of(packed[i], widths, case.lead, True), lanes_of(flat[i], widths, case.lead, False))
    assert equal(packed[1:3] + packed[4:], flat[1:3] + flat[4:])


@backends
def test_vectors_that_are_not_contiguous(backend):
    case = Case(widths=(20, 40), lead=(7,))
    xs, weights, biases, dys = draw(case)
    strided = [[laid_out(t, "strided") for t in group] for group in (weights, biases)]
    with use_backend(backend):
        expected = both(case, xs, weights, biases, dys)
        assert equal(both(case, xs, *strided, dys), expected) and equal(both(case, xs, *strided, dys), expected)


# ---- launches and tables ----


@pytest.fixture
def fresh():
    for cache in (ragged_lanes._plans, tables._kept):
        cache.clear()


@needs_triton
def test_one_launch_forward_and_one_backward(monkeypatch, fresh):
    launched = []
    stock = kernels.Bound.__call__
    monkeypatch.setattr(kernels.Bound, "__call__", lambda self, *args: launched.append(self.kernel) or stock(self, *args))
    case = Case(widths=(1, 16, 100, 30), lead=(5,))
    both(case, *draw(case))
    assert launched == [kernels._lanes_forward_kernel, kernels._lanes_backward_kernel]


@needs_triton
def test_what_is_known_already_is_sent_once(monkeypatch, fresh):
    sent = []
    stock = tables._sent
    monkeypatch.setattr(tables, "_sent", lambda *args: sent.append(args) or stock(*args))
    case = Case(lead=(5,), slices=True, biases=False)
    xs, weights, biases, dys = draw(case)
    expected = both(case, xs, weights, biases, dys)
    assert len(sent) == 4  # of lanes and of addresses, forward and backward
    assert equal(both(case, xs, weights, biases, dys), expected)
    elsewhere = list(torch.cat(xs, -1).split(case.widths, -1))  # another tensor: the same distances
    assert equal(both(case, elsewhere, weights, biases, dys), expected)
    fewer = [[t[:3] for t in group] for group in (xs, dys)]
    assert torch.equal(both(case, fewer[0], weights, biases, fewer[1])[0], expected[0][:3])
    assert len(sent) == 4


@needs_triton
def test_new_addresses_are_not_taken_for_the_old(fresh):
    case = Case(widths=(20, 40, 16), lead=(5,))
    given = draw(case)
    with use_backend("torch"):
        expected = both(case, *given)
    order = torch.randperm(12).tolist()
    for seed in range(3):  # separate tensors, each time in other places
        flat = [t for group in given for t in group]
        moved = {i: flat[i].clone() for i in (order if seed % 2 else reversed(order))}
        again = [[moved[group * 3 + lane] for lane in range(3)] for group in range(4)]
        for ours, plain in zip(both(case, *again), expected, strict=True):
            torch.testing.assert_close(ours, plain)


@needs_triton
def test_other_widths_or_strides_at_the_same_addresses(fresh):
    whole = torch.randn(6, 48, device=DEVICE)
    again = whole.reshape(-1)
    groups = [
        [whole[:, :16], whole[:, 16:48]],
        [whole[:, :16], whole[:, 16:40]],
        [whole[:, :16], whole[:, 16:32]],
        [whole[:, :16], again[16 : 16 + 96].view(6, 16)],  # as contiguous as the one before is not
    ]
    for xs in groups * 2:
        y, *_ = forward(xs, [], [], "rms_norm", 1e-5, False)
        expected = torch.cat([each.reshape(-1) for each in module.ragged_norm_reference(xs, [], [], norm="rms_norm", eps=1e-5)])
        torch.testing.assert_close(y, expected)


@needs_triton
def test_other_types_of_vectors_at_the_same_addresses(fresh):
    case = Case(widths=(16, 16), lead=(3,), biases=False)
    xs, _, _, dys = draw(case)
    buffer = torch.zeros(64, dtype=FP32, device=DEVICE)
    for dtype in (FP32, BF16, FP32):
        values = torch.randn(2, 16, dtype=dtype, device=DEVICE)
        weights = list(buffer.view(dtype)[:64].view(2, -1)[:, :16])
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
        y, *_ = both(case, xs, weights, [], dys)
        expected = torch.cat(module.ragged_norm_reference(xs, list(values), [], norm="layer_norm", eps=case.eps), -1)
        torch.testing.assert_close(y, expected)


@needs_triton
def test_caches_end(monkeypatch, fresh):
    monkeypatch.setattr(tables, "MOST", 3)
    monkeypatch.setattr(ragged_lanes, "_MOST_PLANS", 2)
    monkeypatch.setattr(ragged_lanes, "_MOST_OF_A_KIND", 2)
    x = torch.randn(4, 200, device=DEVICE)
    for turn in range(2):
        for start in range(4):
            for width in (8, 9 + turn, 20):
                xs = [x[:, start : start + width], x[:, 100 + start : 110]]
                y, *_ = forward(xs, [], [], "rms_norm", 1e-5, True)
                expected = torch.cat(module.ragged_norm_reference(xs, [], [], norm="rms_norm", eps=1e-5), -1)
                torch.testing.assert_close(y, expected)
                assert len(tables._kept) <= 3 and len(ragged_lanes._plans) <= 2
                for plans in ragged_lanes._plans.values():
                    assert len(plans) <= 2 and all(len(plan.seen) <= 2 for plan in plans)


@needs_triton
def test_a_table_is_as_new_when_it_comes_back(monkeypatch, fresh):
    monkeypatch.setattr(tables, "MOST", 2)
    device = torch.empty(0, device=DEVICE).device  # with its number
    first = tables.device_table((1, 2), device)
    tables.device_table((3,), device)
    assert tables.device_table((1, 2), device) is first  # and was used last
    tables.device_table((4,), device)
    assert tables.device_table((1, 2), device) is first
    assert tables.device_table((3,), device).tolist() == [3]


def test_tables_of_other_devices_are_others(fresh):
    assert {tables.device_table((1, 2), torch.device(device)).device.type for device in ("meta", "cpu", "meta")} == {
        "meta",
        "cpu",
    }
    assert tables.device_table((1, 2), torch.device("cpu")).tolist() == [1, 2]


def test_numbers_that_travel_in_launches():
    numbers = (0, 1, -1, 2**31, -(2**33) - 5, 2**47 + 3, *range(200))
    table = tables._written(numbers, torch.device(DEVICE))
    assert table.dtype == torch.int64 and tuple(table.tolist()) == numbers


@needs_triton
def test_each_stream_waits_once(monkeypatch, fresh):
    waits = []
    monkeypatch.setattr(tables, "_hand_over", lambda table: waits.append(id(table)))
    device = torch.device(DEVICE)
    found = []
    for stream in (1, 2, 1, 2, 3):
        monkeypatch.setattr(tables, "stream_key", lambda device, stream=stream: (0, stream))
        found.append(tables.device_table((5, 6), device))
    assert len({id(t) for t in found}) == 1 and waits == [id(found[0])] * 3


@needs_triton
def test_under_capture_nothing_is_kept_and_what_was_kept_stays(monkeypatch, fresh):
    """As far as it can be seen without a GPU: the interpreter runs what a graph would hold."""
    case = Case(widths=(20, 40), lead=(5,))
    xs, weights, biases, dys = draw(case)
    expected = both(case, xs, weights, biases, dys)
    kept, seen = dict(tables._kept), [dict(plan.seen) for plans in ragged_lanes._plans.values() for plan in plans]
    monkeypatch.setattr(tables, "_of_graphs", {})
    for each in (tables, ragged_lanes):
        monkeypatch.setattr(each, "is_capturing", lambda device: True)
    assert equal(both(case, xs, weights, biases, dys), expected)
    assert {id(t) for t in tables._of_graphs.values()} == {id(t) for t, _ in kept.values()}
    moved = [torch.cat([t, t])[5:].clone() for t in xs]
    assert equal(both(case, moved, weights, biases, dys), expected)
    assert {*tables._kept} == {*kept}
    assert [dict(plan.seen).keys() for plans in ragged_lanes._plans.values() for plan in plans] == [each.keys() for each in seen]


# ---- how the work is shared out ----


@needs_triton
@pytest.mark.parametrize("widths", [(32,), (32, 64, 512) * 20, (1, 5000), tuple(range(1, 300, 7)), (128,) * 1000], ids=len)
def test_every_row_of_every_lane_has_one_program(widths):
    for tile in (1024, 2048):
        span, programs = kernels.forward_programs(widths, tile)
        rows = {(lane, first) for lane, first in ((each >> 32, each & 0xFFFFFFFF) for each in programs)}
        assert len(rows) == len(programs)
        for lane, width in enumerate(widths):
            tall = kernels._tall(kernels.kind_of(width), tile)
            assert span % tall == 0 and {first for at, first in rows if at == lane} == set(range(0, span, tall))


@needs_triton
@pytest.mark.parametrize("widths", [(32,), (32, 64, 512) * 20, (1, 5000), (128,) * 1000, (16384,) * 3], ids=len)
def test_programs_are_shared_out_by_work_and_few_wait(widths):
    strips, helpers = kernels.backward_shares(widths, 132)
    assert min(strips) >= 1 and len(strips) == len(widths)
    assert sum(strips) <= max(4 * 3 * 132 * 1.1, 2 * len(widths))
    assert strips[widths.index(max(widths))] == max(strips)
    assert all(1 <= each <= max(1, strip // 2) for each, strip in zip(helpers, strips, strict=True))
    assert sum(each for each in helpers if each > 1) <= 66  # what waits leaves half of the multiprocessors to the others


# ---- as operators of graphs ----


@backends
@pytest.mark.parametrize("case", [Case(lead=(3, 2)), Case(layer=False, vectors=None, packed=False, dtype=BF16)], ids=str)
def test_opcheck(case, backend):
    xs, weights, biases, dys = draw(case)
    with use_backend(backend):
        _, mean, rstd = forward(xs, weights, biases, case.norm, 1e-5, case.packed)
        given = xs, weights, biases, case.norm, 1e-5, case.packed
        torch.library.opcheck(forward.default, given, test_utils=("test_schema", "test_faketensor"))
        asked = len(weights) > 0, case.layer
        given = dys, xs, weights, mean, rstd, case.norm, case.packed, *asked
        torch.library.opcheck(backward.default, given, test_utils=("test_schema", "test_faketensor"))


def test_in_a_graph_as_it_is():
    case = Case(lead=(5,))
    given = draw(case)
    graph = make_fx(lambda *groups: both(case, *groups), tracing_mode="symbolic")(*given)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(forward.default) == 1 and targets.count(backward.default) == 1
    assert equal(graph(*given), both(case, *given))


@pytest.mark.parametrize("packed", (True, False), ids=("packed", "flat"))
def test_compiles_whole_and_for_any_number_of_rows(packed):
    case = Case(packed=packed)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *groups: [t * 2 for t in both(case, *groups)], fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (5, 7):
        given = draw(Case(lead=(rows,)))
        assert equal(compiled(*given), [t * 2 for t in both(case, *given)])


# ---- what is wrong ----


def wrong(**changes):
    case = Case(widths=(4, 6), lead=(3,))
    xs, weights, biases, _ = draw(case)
    given = {"xs": xs, "weights": weights, "biases": biases, "norm": "layer_norm", "eps": 1e-5, "packed": True} | changes
    return forward(*given.values())


def _zeros(*shape, **options):
    return torch.zeros(*shape, device=DEVICE, **options)


WRONG = {
    "no lanes": ({"xs": [], "weights": [], "biases": []}, ValueError, ("xs", "at least one")),
    "unequal leads": ({"xs": [_zeros(3, 4), _zeros(2, 6)]}, ValueError, ("xs[1]", "leading dimensions (3,)", "(2, 6)")),
    "more dimensions": ({"xs": [_zeros(3, 4), _zeros(3, 1, 6)]}, ValueError, ("xs[1]", "leading dimensions (3,)")),
    "as many values": ({"xs": [_zeros(3, 4), _zeros(9, 2)]}, ValueError, ("xs[1]", "leading dimensions (3,)")),
    "another type": ({"xs": [_zeros(3, 4), _zeros(3, 6).half()]}, TypeError, ("xs[1]", "float32", "float16")),
    "integers": ({"xs": [_zeros(3, 4).long()] * 2}, TypeError, ("xs[0]", "floating-point")),
    "no width": ({"xs": [_zeros(3, 4), _zeros(3, 0)]}, ValueError, ("xs[1]", "at least 1")),
    "no dimension": ({"xs": [_zeros(()), _zeros(())]}, ValueError, ("xs[0]", "at least 1")),
    "a weight too few": ({"weights": [_zeros(4)]}, ValueError, ("weights", "2 tensors", "has 1")),
    "a long weight": ({"weights": [_zeros(4), _zeros(7)]}, ValueError, ("weights[1]", "(6,)", "(7,)")),
    "a bias of two types": ({"biases": [_zeros(4), _zeros(6).half()]}, TypeError, ("biases[1]", "float32", "float16")),
    "a matrix": ({"biases": [_zeros(4), _zeros(1, 6)]}, ValueError, ("biases[1]", "(6,)", "(1, 6)")),
    "no such norm": ({"norm": "norm"}, ValueError, ("norm", "layer_norm, rms_norm", "'norm'")),
    "no eps": ({"eps": 0.0}, ValueError, ("eps", "above 0")),
}


@backends
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name, backend):
    changes, kind, words = WRONG[name]
    with use_backend(backend), pytest.raises(kind) as raised:
        wrong(**changes)
    says(words, raised)


@backends
def test_what_is_wrong_is_said_again(backend):
    """Plans and tables are kept of what was right only."""
    wrong()
    for _ in range(2):
        with use_backend(backend), pytest.raises(ValueError, match="leading dimensions"):
            wrong(xs=[_zeros(3, 4), _zeros(9, 2)])
        with use_backend(backend), pytest.raises(ValueError, match="weights"):
            wrong(weights=[_zeros(4), _zeros(7)])


@backends
def test_wrong_gradients_are_said(backend):
    case = Case(widths=(4, 6), lead=(3,))
    xs, weights, biases, dys = draw(case)
    _, mean, rstd = forward(xs, weights, biases, case.norm, 1e-5, True)
    changes = [
        ({"dys": dys[:1]}, ValueError, ("dys", "2 tensors", "has 1")),
        ({"dys": [dys[0], dys[1][:2]]}, ValueError, ("dys[1]", "(3, 6)", "(2, 6)")),
        ({"dys": [dy.half() for dy in dys]}, TypeError, ("dys[0]", "float32", "float16")),
        ({"rstd": rstd[:1]}, ValueError, ("rstd", "(2, 3)", "(1, 3)")),
        ({"mean": mean[:, :2]}, ValueError, ("mean", "(2, 3)", "(2, 2)")),
        ({"weights": []}, ValueError, ("weight_gradient", "no weights")),
        ({"norm": "rmsnorm"}, ValueError, ("norm", "'rmsnorm'")),
    ]
    for change, kind, words in changes:
        given = {"dys": dys, "xs": xs, "weights": weights, "mean": mean, "rstd": rstd, "norm": "layer_norm"} | change
        with use_backend(backend), pytest.raises(kind) as raised:
            backward(*given.values(), True, True, True)
        says(words, raised)


def test_fakes_say_it_too():
    with torch._subclasses.FakeTensorMode(), pytest.raises(ValueError, match="leading dimensions"):
        forward([torch.empty(3, 4), torch.empty(2, 6)], [], [], "rms_norm", 1e-5, True)


@pytest.mark.skipif(triton is not None and DEVICE == "cpu", reason="the interpreter takes CPU tensors")
def test_without_kernels_the_choice_of_them_raises():
    case = Case()
    with use_backend("triton"), pytest.raises(RuntimeError, match="ragged_norm"):
        both(case, *([t.cpu() for t in group] for group in draw(case)))


def test_who_is_chosen_for_one_norm_by_another_package_says_nothing_here(monkeypatch):
    case = Case()
    given = draw(case)
    expected = both(case, *given)
    monkeypatch.setattr("onepass.runtime.backend.current_backend", lambda: "somebody's")
    assert equal(both(case, *given), expected)
