"""Random programs: fused they give the same values and gradients, and the groups planted in them are found, no others."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from fusion.programs import (
    FREE_COPIES,
    LONE,
    NO_COPIES,
    SQUEEZED,
    STEPS,
    WAYS,
    Planted,
    Program,
    check,
    same,
    uneven_widths,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.fusion import ragged
from onepass.fusion.graph import aten
from onepass.fusion.rewrite import rewrite

F64 = torch.float64


def often(times):
    return settings(max_examples=times, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def on(machine, program, *inputs, **tolerances):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onepass.fusion.backend.machine_of", lambda device: machine)
        torch._dynamo.reset()
        return check(program, *inputs, **tolerances)


# ---- planted groups ----


@st.composite
def planted(draw):
    way = draw(st.sampled_from(sorted(WAYS)))
    lanes = draw(st.integers(2, 5))
    rank = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 5, 0)), min_size=rank, max_size=rank))
    dim = draw(st.integers(0, rank - 1))
    width = draw(st.integers(1, 3))
    sizes[dim] = lanes if way in SQUEEZED else sum(uneven_widths(lanes, width)) if way == "uneven" else lanes * width
    sizes[dim] += 2 * (way == "inner")
    lane_rank = rank - (way in SQUEEZED)
    possible = [
        name
        for name, step in sorted(STEPS.items())
        if lane_rank >= step.rank and (step.empty or 0 not in sizes) and (step.uneven or way != "uneven")
    ]
    steps = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=4))
    return Planted(
        way, lanes, tuple(sizes), dim, tuple(steps),
        end=draw(st.sampled_from(("cat", "return") if way == "uneven" else ("cat", "cat 0", "stack", "sum", "return"))),
        layout=draw(st.sampled_from(("", "transposed", "strided", "offset", "expanded"))),
        lone=draw(st.integers(0, len(LONE) - 1)),
        decoy=draw(st.booleans()) and not STEPS[steps[0]].weights,
    )  # fmt: skip


programs = st.lists(planted(), min_size=1, max_size=4).map(tuple)


def found_beside_copies(fused):
    """What was found, less the copies that a reshape of lanes needs where they lie apart."""
    return Counter({kind: times for kind, times in fused.inference.items() if kind[0] != "clone"})


@often(4)
@given(programs)
def test_exactly_the_planted_groups_are_found(groups):
    program = Program(groups)
    assert found_beside_copies(on(NO_COPIES, program, *program.inputs(), rtol=1e-11)) == program.found


@often(3)
@given(programs)
def test_where_copies_are_free_values_stay(groups):
    program = Program(groups)
    found = found_beside_copies(on(FREE_COPIES, program, *program.inputs(), rtol=1e-11))
    assert sum(found.values()) >= sum(program.found.values())


@often(2)
@given(programs, st.sampled_from((torch.float32, torch.bfloat16)))
def test_other_types(groups, dtype):
    program = Program(tuple(group for group in groups if "single" not in group.steps), dtype)
    if program.groups:
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        on(NO_COPIES, program, *program.inputs(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_way_to_cut_is_found(way):
    width = sum(uneven_widths(3, 2)) if way == "uneven" else 3 if way in SQUEEZED else 6 + 2 * (way == "inner")
    groups = []
    for dim in range(3):
        sizes = [4, 4, 4]
        sizes[dim] = width
        groups.append(Planted(way, 3, tuple(sizes), dim, ("silu", "half"), "cat"))
    program = Program(tuple(groups))
    assert on(NO_COPIES, program, *program.inputs()).inference == program.found


@pytest.mark.parametrize("first", range(0, len(STEPS), 8))
def test_every_step_is_found(first):
    steps = sorted(STEPS)[first : first + 8]
    groups = tuple(Planted("chunk", 3, (2, 6, 4), 1, (name,), "return") for name in steps)
    program = Program(groups)
    assert found_beside_copies(on(NO_COPIES, program, *program.inputs(), rtol=1e-11)) == program.found


@pytest.mark.parametrize("lanes", (2, 5))
@pytest.mark.parametrize("shape", ((3, 4), (2, 1, 3), (5,)))
def test_separate_tensors_are_one_group_where_copies_pay(lanes, shape):
    def separate(*xs):
        return [F.layer_norm(torch.tanh(x) * 2, shape[-1:]) for x in xs]

    inputs = [torch.randn(shape, dtype=F64, requires_grad=True) for _ in range(lanes)]
    norm = Counter({("native_layer_norm", lanes): 1})  # takes its lanes from wherever they lie
    together = on(FREE_COPIES, separate, *inputs)
    assert together.inference == (norm + Counter({("tanh", lanes): 1, ("mul", lanes): 1}) if lanes > 2 else norm)
    if lanes > 2:  # the copy is a launch too
        assert together.report().graphs[0].found[0].copied == sum(x.numel() * 8 for x in inputs)
    apart = on(NO_COPIES, separate, *inputs)
    assert apart.inference == norm and apart.report().refused


# ---- any program ----

UNARY = (torch.tanh, F.silu, F.relu, torch.sin, lambda x: x * 2, lambda x: x.softmax(-1), lambda x: F.layer_norm(x, x.shape[-1:]))
SHAPING = (
    lambda x, k: x[:, : max(1, k % (x.shape[1] + 1))],
    lambda x, k: x[:, min(k, x.shape[1] - 1) :],
    lambda x, k: x.chunk(2, 1)[-1],
    lambda x, k: x.chunk(3, 0)[0],
    lambda x, k: x[k % x.shape[0]][None],
    lambda x, k: x.t(),
    lambda x, k: x.reshape(-1, 2) if x.numel() % 2 == 0 else x,
    lambda x, k: x.sum(k % 2, keepdim=True),
    lambda x, k: x.mean(k % 2, keepdim=True).expand(x.shape),
    lambda x, k: x.flip(0),
)


class AnyProgram(nn.Module):
    """Each instruction takes tensors from those there are, by number, and adds what it makes to them."""

    def __init__(self, instructions):
        super().__init__()
        self.instructions = instructions
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(n, k, dtype=F64)) for k in (2, 3, 4, 6) for n in (2, 4, 2))

    def forward(self, *inputs):
        pool = [x * 1.0 for x in inputs]
        for kind, a, b, k in self.instructions:
            x, y = pool[a % len(pool)], pool[b % len(pool)]
            if kind == "all":  # one operator of every part
                parts = x.chunk(1 + k % 4, b % 2)
                pool.extend(UNARY[a % len(UNARY)](p) for p in parts)
            elif kind == "one":
                pool.append(UNARY[k % len(UNARY)](x))
            elif kind == "shape":
                pool.append(SHAPING[k % len(SHAPING)](x, b))
            elif kind == "two":
                pool.append(self._two(x, y, k))
            elif kind == "cat":
                alike = [z for z in pool if z.shape[1 - k % 2] == x.shape[1 - k % 2]]
                pool.append(torch.cat([alike[(a + i * b) % len(alike)] for i in range(2 + k % 3)], k % 2))
            elif kind == "linear":
                fitting = [w for w in self.layers if w.shape[1] == x.shape[1]]
                pool.extend(F.linear(x, w) * 0.3 for w in fitting[: 1 + k % 3])
            else:  # write
                fresh = x.clone()
                columns = fresh[:, k % x.shape[1] :]
                columns.add_(torch.tanh(y.sum()))
                fresh[b % x.shape[0]].mul_(0.5)
                pool.extend((columns, fresh))
            pool = [z for z in pool[:4] if z.numel() < 200] + [z for z in pool[4:] if z.numel() < 200][-12:]
        return pool[-9:]

    @staticmethod
    def _two(x, y, k):
        if x.shape != y.shape and 1 not in (*x.shape, *y.shape):
            return x @ y * 0.2 if x.shape[1] == y.shape[0] else x * y.mean()
        if not all(m == n or 1 in (m, n) for m, n in zip(x.shape, y.shape, strict=True)):
            return x - y.sum()
        return (x - y, x * torch.sigmoid(y), torch.where(x > y, x, y))[k % 3]


instruction = st.tuples(
    st.sampled_from(("all", "all", "one", "shape", "two", "cat", "linear", "write")),
    st.integers(0, 11),
    st.integers(0, 11),
    st.integers(0, 11),
)


@often(4)
@given(st.lists(instruction, min_size=3, max_size=14).map(tuple), st.booleans())
def test_any_program_is_itself(instructions, free):
    inputs = [torch.randn(sizes, dtype=F64, requires_grad=True) for sizes in ((4, 6), (4, 6), (3, 4), (6, 2))]
    on(FREE_COPIES if free else NO_COPIES, AnyProgram(instructions), *inputs, rtol=1e-9, atol=1e-9)


# ---- rms_norm, which on a CPU is no operator of its own ----


class OnCPU(Interpreter):
    """Runs a graph in which rms_norm is one operator."""

    def call_function(self, target, args, kwargs):
        if target is aten._fused_rms_norm.default:
            x, sizes, weight, eps = args
            dims = [x.dim() - 1 - i for i in range(len(sizes))]
            rstd = torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + eps)
            y = x * rstd
            return y if weight is None else y * weight, rstd
        if target is aten._fused_rms_norm_backward.default:
            dy, x, sizes, rstd, weight, mask = args
            assert list(rstd.shape) == [*x.shape[: x.dim() - len(sizes)], *[1] * len(sizes)]
            dims = [x.dim() - 1 - i for i in range(len(sizes))]
            g = dy if weight is None else dy * weight
            dx = rstd * (g - x * rstd * (g * x * rstd).mean(dims, keepdim=True))
            dw = (dy * x * rstd).sum(list(range(x.dim() - len(sizes)))) if mask[1] else None
            return dx, dw
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("weighted", (False, True, "one"))
@pytest.mark.parametrize("dim", (0, 1, 2))
@pytest.mark.parametrize("normalized", (1, 2))
def test_the_whole_rms_norm(weighted, dim, normalized):
    sizes = [4, 4, 4]
    sizes[dim] = 8
    lane = torch.empty(sizes).chunk(2, dim)[0].shape
    x, *vectors = (
        torch.randn(sizes, dtype=F64),
        torch.rand(lane[-normalized:], dtype=F64),
        torch.rand(lane[-normalized:], dtype=F64),
    )
    dy = torch.randn(lane if weighted == "one" else sizes, dtype=F64)  # the same for all lanes, or slices

    def both_ways(x, w0, w1, dy):
        found = []
        half = x.shape[dim] // 2
        gradients = (dy, dy) if weighted == "one" else dy.split(half, dim)
        for p, w, d in zip(x.split(half, dim), (w0, w0 if weighted == "one" else w1), gradients, strict=True):
            w = w if weighted else None
            y, rstd = aten._fused_rms_norm.default(p, list(lane[-normalized:]), w, 1e-6)
            dx, dw = aten._fused_rms_norm_backward.default(d, p, list(lane[-normalized:]), rstd, w, [True, bool(weighted)])
            found.extend((y, dx, dw) if weighted else (y, dx))
        return found

    inputs = (x, *vectors, dy)
    with FakeTensorMode():
        graph = make_fx(both_ways, pre_dispatch=True)(*(torch.empty(t.shape, dtype=F64, device="cuda") for t in inputs))
    wanted = OnCPU(graph).run(*inputs)
    placeholders = graph.graph.find_nodes(op="placeholder")
    report = rewrite(graph.graph, set(placeholders[1:3]), FREE_COPIES, compiled=False)
    graph.recompile()
    found = Counter((f.operator, f.lanes) for f in report.found)
    assert found["_fused_rms_norm", 2] == 1 and found["_fused_rms_norm_backward", 2] == 1
    same(OnCPU(graph).run(*inputs), wanted, 1e-12, 1e-12)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, F64), ids=str)
def test_no_epsilon_is_that_of_the_arithmetic(dtype, monkeypatch):
    """A norm of 16-bit rows is computed in fp32, and so is its default."""
    monkeypatch.setattr(ragged, "triton_unsupported", lambda x: None)  # as on a GPU
    shapes = [(8, width) for width in (64, 96, 128)]

    def norms(*tensors):
        rows, weights = tensors[:3], tensors[3:]
        return [aten._fused_rms_norm.default(x, [x.shape[-1]], w, None)[0] for x, w in zip(rows, weights, strict=True)]

    with FakeTensorMode():
        given = [torch.empty(shape, dtype=dtype, device="cuda") for shape in (*shapes, *(shape[1:] for shape in shapes))]
        graph = make_fx(norms, pre_dispatch=True)(*given)
    weights = set(graph.graph.find_nodes(op="placeholder")[3:])
    rewrite(graph.graph, weights, FREE_COPIES, compiled=False)
    (node,) = (node for node in graph.graph.nodes if "ragged_norm_forward" in str(node.target))
    eps = node.args[4]
    assert eps == torch.finfo(F64 if dtype is F64 else torch.float32).eps
