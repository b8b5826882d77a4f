"""What must not be fused, or not as one might think: values and gradients stay those of the function as written."""

import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from fusion.programs import FREE_COPIES, NO_COPIES, check, found_in, leaves, same, step
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.fusion.fused import fuse
from onepass.fusion.rewrite import rewrite

F64 = torch.float64


from_inside = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own


@pytest.fixture(autouse=True)
def each_machine(request, machine):
    """Copies pay, so that all that can be fused is, and where a test is told so they don't."""
    machine(FREE_COPIES if getattr(request, "param", "copies") == "copies" else NO_COPIES)


both_machines = pytest.mark.parametrize("each_machine", ("copies", "no copies"), indirect=True)


def randn(*sizes, grad=True, dtype=F64):
    return torch.randn(*sizes, dtype=dtype, requires_grad=grad)


def total(found, operator):
    return sum(lanes * times for (name, lanes), times in found.items() if name == operator)


# ---- dependent lanes ----


@both_machines
def test_a_slice_that_feeds_another_is_not_in_its_group():
    def chained(x):
        a, b, c = x.chunk(3, 1)
        a = torch.tanh(a)
        b = torch.tanh(b + a)
        c = torch.tanh(c + b)
        return torch.cat([a, b, c], 1)

    assert total(check(chained, randn(4, 6)).inference, "tanh") == 0


def test_two_lanes_are_free_and_one_waits_for_them():
    def waits(x):
        a, b, c = x.chunk(3, 1)
        a, b = torch.tanh(a), torch.tanh(b)
        return torch.cat([a, b, torch.tanh(c + a * b)], 1)

    assert check(waits, randn(4, 6)).inference["tanh", 2] == 1


@both_machines
def test_two_groups_of_which_each_waits_for_the_other_are_not_both_contracted():
    def crossed(x, y):
        a0, a1 = x.chunk(2)
        b0, b1 = y.chunk(2)
        t0, s1 = torch.tanh(a0), torch.sin(b1)
        s0 = torch.sin(t0 + b0)  # sin 0 waits for tanh 0 ...
        t1 = torch.tanh(s1 + a1)  # ... and tanh 1 for sin 1
        return t0, t1, s0, s1

    found = check(crossed, randn(4, 3), randn(4, 3)).inference
    assert not found["tanh", 2] and not found["sin", 2]


def test_a_group_between_the_lanes_of_another():
    def between(x):
        a, b = x.chunk(2)
        first = torch.tanh(a)
        middle = torch.stack([torch.sin(first), torch.sin(first * 2)]).sum(0)
        return first, torch.tanh(b + middle)

    check(between, randn(4, 3))


def test_a_wait_hidden_behind_views():
    def hidden(x):
        a, b = x.chunk(2, 0)
        a = torch.tanh(a)
        b = torch.tanh(a.t().reshape(3, 2).t().contiguous().view(2, 3)[:, :3] + b)
        return a, b

    assert total(check(hidden, randn(4, 3)).inference, "tanh") == 0


# ---- writes ----


@both_machines
def test_a_slice_overwritten_between_two_lanes():
    def overwritten(x):
        x = x.clone()
        a = torch.tanh(x[:, :2])
        x[:, 2:4] = a  # the second lane sees what the first gave
        return torch.tanh(x[:, 2:4]), torch.tanh(x[:, 4:]), a

    assert check(overwritten, randn(3, 6)).inference["tanh", 3] == 0


def test_a_slice_overwritten_in_place_in_the_argument():
    def overwritten(x, y):
        a = torch.tanh(x[:, :2])
        x[:, :2].mul_(y)
        b = torch.tanh(x[:, :2])
        return a, b, torch.tanh(x[:, 2:4])

    y, fused = randn(3, 2, grad=False), fuse(overwritten, compiler="none")
    for _ in range(2):
        mine = randn(3, 4, grad=False)
        theirs = mine.clone()
        same(fused(mine, y), overwritten(theirs, y), 0, 0)
        same([mine], [theirs], 0, 0)


def test_lanes_written_in_place():
    def in_place(x):
        x = x * 1
        for i in range(3):
            x[:, 2 * i : 2 * i + 2].tanh_()
        return x

    check(in_place, randn(4, 6), grad=False)


def test_lanes_written_in_place_while_their_neighbours_are_read():
    def in_place(x):
        x = x * 1
        for i, j in ((0, 2), (2, 4), (4, 0)):
            x[:, i : i + 2].add_(torch.tanh(x[:, j : j + 2]))
        return x

    check(in_place, randn(4, 6))


def test_overlapping_slices_that_are_written():
    def overlapping(x):
        x = x * 1
        for i in range(4):
            x[:, i : i + 2] += torch.tanh(x[:, i : i + 2])
        return x

    assert total(check(overlapping, randn(4, 5)).inference, "tanh") == 0


def test_an_argument_that_is_mutated_and_returned():
    def mutated(x):
        x.add_(1)
        return x, [torch.tanh(p) for p in x.chunk(2)]

    fused = fuse(mutated, compiler="none")
    for _ in range(2):
        mine = randn(4, 3, grad=False)
        theirs = mine.clone()
        (out, lanes), (_, wanted) = fused(mine), mutated(theirs)
        assert out is mine
        same([mine, *lanes], [theirs, *wanted], 0, 0)


def test_two_arguments_that_are_one_tensor():
    def both(x, y):
        x[:1].add_(1)
        return [torch.tanh(p) for p in (*x.chunk(2), *y.chunk(2))]

    fused = fuse(both, compiler="none")
    for _ in range(2):
        mine = randn(4, 3, grad=False)
        theirs = mine.clone()
        same(fused(mine, mine), both(theirs, theirs), 0, 0)
        same([mine], [theirs], 0, 0)
    mine = randn(4, 3, grad=False)
    theirs = mine.clone()
    same(fused(mine[:2], mine[1:3]), both(theirs[:2], theirs[1:3]), 0, 0)
    same([mine], [theirs], 0, 0)


def test_a_buffer_updated_between_lanes():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=F64))

        def forward(self, x):
            found = []
            for p in x.chunk(3, 1):
                self.calls += 1
                found.append(torch.tanh(p) + self.calls)
            return torch.cat(found, 1)

    written, fused = Counted(), fuse(Counted(), compiler="none")
    x = randn(2, 6)
    for _ in range(3):
        same([fused(x)], [written(x)], 0, 0)
        assert fused.calls == written.calls


def test_nothing_is_moved_past_a_write():
    """In a graph that is not functional: AOTAutograd's are, but for what it leaves at their ends."""

    def written(x):
        first, second, third = x[:2], x[2:4], x[4:]
        a = torch.tanh(first)
        x.add_(1)
        b = torch.tanh(second)
        x.mul_(2)
        return a, b, torch.tanh(third)

    x = torch.randn(6, 3, dtype=F64)
    graph = make_fx(written, tracing_mode="fake")(x.clone())
    report = rewrite(graph.graph, set(), FREE_COPIES, compiled=False)
    graph.recompile()
    same(graph(x.clone()), written(x.clone()), 0, 0)
    assert not report.found


# ---- slices that lie in other ways ----


def test_overlapping_slices():
    def overlapping(x):
        return torch.cat([torch.tanh(x[:, i : i + 3]) for i in range(3)], 1)

    found = check(overlapping, randn(4, 5)).inference
    assert found["tanh", 3] <= 1  # copied together, or left


def test_overlapping_slices_are_left_where_copies_do_not_pay(machine):
    machine(NO_COPIES)

    def overlapping(x):
        return [torch.tanh(x[:, i : i + 3]) for i in range(3)]

    fused = check(overlapping, randn(4, 5), grad=False)
    assert not fused.inference
    assert "copying" in fused.report().refused[0].why


@both_machines
@pytest.mark.parametrize("starts", [(0, 4, 8), (2, 0, 6), (0, 0, 2), (6, 2, 4, 0), (4, 4)])
def test_slices_with_gaps_out_of_order_or_twice(starts):
    def sliced(x):
        y = [torch.tanh(x[:, s : s + 2]) for s in starts]
        return torch.stack([v * (i + 1) for i, v in enumerate(y)]), torch.cat(y, 1), torch.cat(y[::-1], 0)

    check(sliced, randn(3, 10))


@both_machines
@pytest.mark.parametrize("steps", [slice(0, None, 2), slice(1, None, 2), slice(0, 8, 4)])
def test_every_second_slice(steps):
    def second(x):
        lanes = [torch.tanh(p) for p in list(x.chunk(8, 1))[steps]]
        return torch.cat(lanes, 1), x[:, ::2] + torch.tanh(x[:, 1::2])

    check(second, randn(3, 16))


@both_machines
def test_two_ways_to_cut_one_tensor():
    def twice(x):
        halves, quarters, rows = x.chunk(2, 1), x.chunk(4, 1), x.unbind(0)
        return torch.cat([*map(torch.tanh, halves), *map(torch.tanh, quarters)], 1), torch.stack([*map(torch.tanh, rows)])

    check(twice, randn(3, 8))


def test_a_lane_used_twice():
    def twice(x):
        a, b = x.chunk(2, 1)
        ta, tb = torch.tanh(a), torch.tanh(b)
        return ta + tb, ta - tb, ta * a, tb * b, torch.cat([ta, ta, tb], 1), torch.cat([tb, ta], 1)

    check(twice, randn(4, 6))


@both_machines
def test_lanes_that_meet_each_other():
    def pairs(x):
        a, b, c, d = (torch.tanh(p) for p in x.chunk(4, 1))
        return a - b, b - a, c - d, a - c, a - d, b * b, a * a, torch.where(a > b, a, b), torch.where(c > d, d, c)

    check(pairs, randn(4, 8))


def test_one_partner_for_several_lanes():
    def partners(x, y):
        lanes, others = x.chunk(3, 1), y.chunk(2, 1)
        return [a - b for a in lanes for b in others], [b - a for a in lanes for b in others], [a / (1 + a * a) for a in lanes]

    check(partners, randn(4, 6), randn(4, 4))


def test_the_same_tensor_in_several_lanes():
    def same_one(x, y):
        return [torch.tanh(t) * (i + 1) for i, t in enumerate((x, y, x, x))], [x + t for t in (x, y, x)]

    check(same_one, randn(4, 3), randn(4, 3))


def test_operands_swap_places():
    def swapped(x):
        a, b = x.chunk(2, 1)
        return a - b, b - a, torch.cat([a / (b * b + 1), b / (a * a + 1)], 1)

    check(swapped, randn(4, 6))


def test_lanes_in_another_order_on_each_side():
    def crossed(x, y):
        return torch.cat([a - b for a, b in zip(x.chunk(4, 1), y.chunk(4, 1)[::-1], strict=True)], 1)

    check(crossed, randn(3, 8), randn(3, 8))


def test_a_hundred_lanes():
    def many(x):
        return torch.cat([torch.tanh(p) * 2 for p in x.chunk(100, 1)], 1)

    found = check(many, randn(2, 200)).inference
    assert found == Counter({("tanh", 100): 1, ("mul", 100): 1})


def test_two_lanes_are_a_group():
    assert found_in(lambda x: [torch.tanh(p) for p in x.chunk(2, 1)], randn(2, 4)) == Counter({("tanh", 2): 1})


def test_one_lane_is_none():
    assert not found_in(lambda x: [torch.tanh(p) for p in x.chunk(1, 1)], randn(2, 4))


def test_part_of_the_lanes_take_another_way():
    def ways(x):
        lanes = [torch.tanh(p) for p in x.chunk(4, 1)]
        lanes = [F.relu(y) if i in (0, 2) else torch.sin(y) for i, y in enumerate(lanes)]
        return torch.cat([y * 2 for y in lanes], 1)

    found = check(ways, randn(3, 8)).inference
    assert found["tanh", 4] == 1


def test_cats_of_parts_of_a_group():
    def joined(x):
        a, b, c, d = (torch.tanh(p) for p in x.chunk(4, 1))
        return (
            torch.cat([a, b], 1),
            torch.cat([c, b], 1),
            torch.cat([b, c, x, a], 1),
            torch.cat([a, b, c, d], 0),
            torch.stack([c, d]),
        )

    check(joined, randn(3, 8))


def test_a_cat_of_slices_of_the_input():
    def joined(x):
        a, b, c = x.chunk(3, 1)
        return torch.cat([a, b, c], 1) * 2, torch.cat([b, c], 1), torch.cat([c, a], 1), torch.cat([a, b], 0)

    check(joined, randn(3, 6))


@pytest.mark.parametrize("dim", (0, 1, 2))
@pytest.mark.parametrize("other", (0, 1, 2))
def test_a_cat_of_slices_along_any_dimension(dim, other):
    def joined(x):
        return torch.cat(x.chunk(2, dim), other) * 2, torch.cat([torch.tanh(p) for p in x.chunk(2, dim)], other)

    check(joined, randn(2, 4, 6))


@both_machines
def test_uneven_lanes_in_every_end():
    def uneven(x):
        a, b, c = x.split([1, 3, 2], 1)
        lanes = [torch.tanh(p) * 2 for p in (a, b, c)]
        return (
            torch.cat(lanes, 1),
            torch.cat([lanes[2], lanes[0]], 1),
            [p.sum(0) for p in lanes],
            [p.sum(1) for p in lanes],
            lanes,
        )

    check(uneven, randn(3, 6))


def test_scalars_of_other_types_are_other_operators():
    def scalars(x, n):
        a, b, c = x.chunk(3, 1)
        return a * 1, b * 1.0, c * True, n[:1] * 1, n[1:] * 1.0

    check(scalars, randn(2, 6), torch.arange(2))


def test_types_that_only_look_alike():
    def mixed(x, y, n):
        return [torch.tanh(t) for t in (x, y, n, n.to(torch.float32))], [t + 1 for t in (x, y, n)]

    check(mixed, randn(2, 3), torch.randn(2, 3), torch.ones(2, 3, dtype=torch.int64))


def test_broadcast_operands():
    def broadcast(x, row, column, number):
        lanes = x.chunk(2, -1)
        return (
            [p + row for p in lanes],
            [p * column for p in lanes],
            [p - number for p in lanes],
            [p.sum(-1) + number for p in lanes],
        )

    check(broadcast, randn(2, 3, 8), randn(4), randn(3, 1), randn(()))
    check(broadcast, randn(3, 8), randn(1, 2, 1, 4), randn(2, 3, 1), randn(1))


def test_lanes_that_grow_by_broadcasting():
    def grows(x, y):
        a, b = x.unbind(0)
        c, d = y.chunk(2, 1)
        return a + c, b + d, c * a, d * b

    check(grows, randn(2, 3), randn(5, 6))
    check(grows, randn(2, 3), randn(4, 2, 3).detach().transpose(0, 1).requires_grad_())


# ---- what leaves ----


def test_a_view_beside_a_group():
    def beside(x):
        lanes = x.chunk(3, 1)
        return lanes[1], [torch.tanh(p) for p in lanes], x.t(), lanes[0][:, :1]

    x = randn(4, 6)
    outputs = check(beside, x)(x)
    assert outputs[0].data_ptr() == x[:, 2:].data_ptr() and outputs[2]._base is not None


def test_lanes_returned_can_be_written():
    """Lanes that leave are tensors of their own, as they were: who writes to one doesn't write to another."""

    def lanes(x):
        return [torch.tanh(p) for p in x.chunk(3, 1)]

    fused, x = fuse(lanes, compiler="none"), randn(2, 6, grad=False)
    for grad in (False, True):
        mine, theirs = fused(x.clone().requires_grad_(grad)), lanes(x)
        with torch.no_grad():
            mine[0].zero_()
        same([y.detach() for y in mine[1:]], theirs[1:], 0, 0)


def test_strides_of_lanes_that_leave():
    def lanes(x):
        return [torch.tanh(p) for p in x.chunk(3, 1)], [p.sum(0) for p in x.unbind(1)], [torch.sin(p) for p in x.unbind(0)]

    x = randn(2, 6)
    for mine, theirs in zip(leaves(fuse(lanes, compiler="none")(x)), leaves(lanes(x)), strict=True):
        assert mine.is_contiguous() == theirs.is_contiguous()
        mine.view(-1)


def test_an_output_that_is_an_input():
    def given_back(x, y):
        return x, [torch.tanh(p) for p in x.chunk(2)], y, x

    x, y = randn(4, 3), randn(2)
    found = check(given_back, x, y)(x, y)
    assert found[0] is x and found[3] is x and found[2] is y


def test_a_lane_returned_twice():
    def twice(x):
        a, b = (torch.tanh(p) for p in x.chunk(2))
        return a, b, a, a.view(-1), b[0]

    check(twice, randn(4, 3))


def test_an_output_nobody_asks_a_gradient_of():
    def some(x):
        lanes = [torch.tanh(p) for p in x.chunk(3, 1)]
        return lanes[0], lanes[1].detach(), lanes[2] > 0

    check(some, randn(2, 6))


def test_only_one_lane_gets_a_gradient():
    def lanes(x):
        return [F.layer_norm(p, (2,)) for p in x.chunk(3, 1)]

    fused = fuse(lanes, compiler="none")
    for index in range(3):
        x = randn(2, 6)
        (mine,) = torch.autograd.grad(fused(x)[index].pow(3).sum(), x)
        (theirs,) = torch.autograd.grad(lanes(x)[index].pow(3).sum(), x)
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_lanes_of_which_some_are_detached():
    def detached(x, y):
        lanes = [torch.tanh(p.detach() if i % 2 else p) for i, p in enumerate(x.chunk(4, 1))]
        with torch.no_grad():
            lanes.extend(torch.tanh(p) for p in y.chunk(4, 1))
        return torch.cat(lanes, 1) * y.sum()

    check(detached, randn(2, 8), randn(2, 8))


def test_one_incoming_gradient_for_all_lanes():
    def summed(x):
        first, second = x.chunk(2, 1), x.chunk(2, 0)
        return sum(F.layer_norm(p, (3,)) for p in first), sum(p.softmax(0) for p in second), sum(p.log_softmax(-1) for p in first)

    check(summed, randn(4, 6))


# ---- forward and backward ----


def test_forward_does_not_come_to_depend_on_backward():
    """The same operators stand at one depth in forward and in backward: as one they'd put backward's work into forward."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.sin(torch.sin(torch.sin(x)))

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return dy + torch.cos(x) * 0 + torch.sin(dy) * 0 + x * 0

    def custom(x, y):
        a, b = x.chunk(2, 1)
        return Function.apply(a), Function.apply(b), torch.sin(y), torch.sin(torch.sin(y))

    check(custom, randn(4, 6), randn(4, 3))


def test_a_second_backward_through_a_kept_graph():
    def lanes(x, w):
        return torch.cat([F.layer_norm(p, (2,), w) for p in x.chunk(3, 1)], 1)

    x, w = randn(4, 6), randn(2)
    y, wanted = fuse(lanes, compiler="none")(x, w), lanes(x, w)
    for scale in (1.0, 2.0, 3.0):
        mine = torch.autograd.grad(y.pow(2).sum() * scale, (x, w), retain_graph=True)
        theirs = torch.autograd.grad(wanted.pow(2).sum() * scale, (x, w), retain_graph=True)
        same(mine, theirs, 1e-12, 1e-12)


def test_gradients_that_accumulate():
    def lanes(x):
        return torch.cat([torch.tanh(p) for p in x.chunk(3, 1)], 1)

    fused, mine = fuse(lanes, compiler="none"), randn(4, 6)
    theirs = mine.detach().clone().requires_grad_()
    for _ in range(3):
        fused(mine).pow(2).sum().backward()
        lanes(theirs).pow(2).sum().backward()
    same([mine.grad], [theirs.grad], 1e-12, 1e-12)


def test_checkpointed():
    def block(x, w):
        return torch.cat([F.layer_norm(torch.tanh(p), (2,), w) for p in x.chunk(3, 1)], 1)

    def checkpointed(x, w):
        return torch.utils.checkpoint.checkpoint(
            block, torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False), w, use_reentrant=False
        )

    check(checkpointed, randn(4, 6), randn(2))
    fused = fuse(block, compiler="none")
    x, w = randn(4, 6), randn(2)
    y = torch.utils.checkpoint.checkpoint(fused, x, w, use_reentrant=False)
    same(torch.autograd.grad(y.pow(3).sum(), (x, w)), torch.autograd.grad(block(x, w).pow(3).sum(), (x, w)), 1e-12, 1e-12)


def test_a_function_with_its_own_backward():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.scale = scale
            return torch.tanh(x) * scale

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.scale, None  # not the derivative

    def lanes(x):
        return torch.cat([Scaled.apply(p, 2.0 if i < 2 else 3.0) for i, p in enumerate(x.chunk(4, 1))], 1)

    check(lanes, randn(4, 8))


def test_slices_of_an_input_add_their_gradients():
    def overlapping(x):
        return (
            x[:, :3].pow(2).sum()
            + x[:, 3:].pow(3).sum()
            + x[:, 1:4].sin().sum()
            + x[1].exp().sum()
            + x[-1].cos().sum()
            + x[:, 4].sum()
        )

    check(overlapping, randn(4, 6))


@pytest.mark.parametrize("dim", (0, 1, 2))
def test_gradients_of_slices_that_leave_gaps(dim):
    def gaps(x):
        return [torch.tanh(x.narrow(dim, s, 1)) * (s + 1) for s in (1, 2, 4)], x.select(dim, 3) * 2, x.select(dim, -1) * 3

    check(gaps, randn(6, 6, 6))


def test_the_gradient_of_one_slice_twice():
    def twice(x):
        a = x[:, :2]
        return a * 2, x[:, :2] * a, x[:, 2:] + x[:, :2]

    check(twice, randn(3, 4))


def test_empty_slices():
    def empty(x):
        return [torch.tanh(p) for p in (x[:, :0], x[:, :2], x[:, 2:2], x[:, 2:])], torch.cat(
            [x[:, :0], x[:, 0:2], x[:, 2:]], 1
        ) * 2

    check(empty, randn(3, 4))
    check(empty, randn(0, 4))


# ---- random numbers ----


@pytest.mark.parametrize("shape", ((4, 6), (3, 12)))
def test_dropout_in_lanes_draws_as_written(shape):
    def dropped(x):
        lanes = [F.dropout(torch.tanh(p), 0.5) * 2 for p in x.chunk(3, 1)]
        return torch.cat(lanes, 1) + torch.rand_like(x), torch.randn(3, dtype=F64)

    x = randn(*shape)
    fused = fuse(dropped, compiler="none")
    for fn_grad in (False, True):
        with torch.set_grad_enabled(fn_grad):
            torch.manual_seed(3)
            mine = fused(x), torch.rand(2)
            torch.manual_seed(3)
            theirs = dropped(x), torch.rand(2)
        same([*mine[0], mine[1]], [*theirs[0], theirs[1]], 0, 0)
    assert not any("dropout" in f.operator or "rand" in f.operator or "bernoulli" in f.operator for f in fused.report().found)


def test_random_operators_keep_their_order_around_groups():
    def noisy(x):
        a, b = x.chunk(2)
        first = torch.tanh(torch.tanh(torch.tanh(a)))
        noise = torch.randn_like(a)  # drawn here ...
        late = torch.rand_like(first) * first
        return torch.tanh(a) + noise, torch.tanh(b) + torch.rand_like(b), late, torch.bernoulli(torch.full_like(a, 0.5))

    fused, x = fuse(noisy, compiler="none"), randn(4, 3)
    torch.manual_seed(1)
    mine = fused(x)
    torch.manual_seed(1)
    same(mine, noisy(x), 0, 0)


def test_backward_of_dropout():
    def dropped(x):
        return torch.cat([F.dropout(p, 0.3) * p for p in x.chunk(3, 1)], 1)

    x, fused = randn(4, 6), fuse(dropped, compiler="none")
    torch.manual_seed(5)
    mine = step(fused, [x], [])
    torch.manual_seed(5)
    theirs = step(dropped, [x], [])
    same([mine[0], *mine[1]], [theirs[0], *theirs[1]], 1e-12, 1e-12)


# ---- what can't be traced, and what is traced again ----


@from_inside
def test_a_graph_break(capsys):
    def broken(x):
        lanes = [torch.tanh(p) for p in x.chunk(3, 1)]
        print("here")
        scale = lanes[0].sum().item()
        return torch.cat([F.relu(y * scale) for y in lanes], 1)

    check(broken, randn(4, 6))
    assert "here" in capsys.readouterr().out
    with pytest.raises(Exception, match=r"(?i)print|item|break|unsupported"):
        fuse(broken, compiler="none", fullgraph=True)(randn(4, 6))


def test_a_branch_on_the_data():
    def branches(x):
        lanes = [torch.tanh(p) for p in x.chunk(2, 1)]
        if lanes[0].sum() > 0:
            return torch.cat([y * 2 for y in lanes], 1)
        return torch.cat([torch.sin(y) for y in lanes], 1)

    fused = fuse(branches, compiler="none")
    for sign in (1.0, -1.0, 1.0):
        x = torch.ones(2, 4, dtype=F64) * sign
        same([fused(x)], [branches(x)], 1e-12, 1e-12)


def test_other_types_and_ranks_later():
    def lanes(x):
        return torch.cat([F.layer_norm(torch.tanh(p), p.shape[-1:]) for p in x.chunk(2, -1)], -1)

    fused = fuse(lanes, compiler="none")
    for sizes, dtype in (
        ((4, 6), F64),
        ((4, 6), torch.float32),
        ((2, 4, 6), torch.float32),
        ((6,), F64),
        ((4, 6), torch.bfloat16),
        ((4, 6), F64),
    ):
        x = torch.randn(sizes).to(dtype)
        same([fused(x)], [lanes(x)], 2e-2 if dtype == torch.bfloat16 else 1e-6, 1e-2 if dtype == torch.bfloat16 else 1e-6)


def compilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def changing(x, w):
    lanes = [F.layer_norm(torch.tanh(p), (2,), w) for p in x.chunk(3, 1)]
    lanes = [y * torch.sigmoid(y.reshape(-1).view(y.shape[0], 2)).sum(0) for y in lanes]
    return (
        torch.cat(lanes, 1),
        torch.stack([y.sum(1) for y in lanes]),
        [F.linear(y, w[None]) for y in lanes],
        lanes[0].expand(2, -1, -1),
    )


@pytest.mark.parametrize(("dynamic", "grad"), ((None, True), (True, False), ("marked", True)))
def test_a_changing_batch_compiles_as_often_as_with_torch_compile(dynamic, grad):
    def run(fn):
        torch._dynamo.utils.counters.clear()
        with torch.set_grad_enabled(grad):
            for batch in (4, 7, 2):
                x = randn(batch, 6, grad=grad)
                if dynamic == "marked":
                    torch._dynamo.mark_dynamic(x, 0)
                w = randn(2, grad=grad)
                outputs = fn(x, w)
                wanted = changing(x, w)
                same([*outputs[:2], *outputs[2], outputs[3]], [*wanted[:2], *wanted[2], wanted[3]], 1e-12, 1e-12)
                if grad:
                    mine = torch.autograd.grad(outputs[0].pow(2).sum() + outputs[1].sin().sum(), (x, w))
                    same(mine, torch.autograd.grad(wanted[0].pow(2).sum() + wanted[1].sin().sum(), (x, w)), 1e-11, 1e-11)
        return compilations()

    mode = dynamic is True or None
    times = run(fuse(changing, compiler="none", dynamic=mode))
    torch._dynamo.reset()
    assert times == run(torch.compile(changing, backend="aot_eager", dynamic=mode))


def test_a_changing_number_of_lanes_and_widths():
    def lanes(x, n):
        return torch.cat([torch.tanh(p) * 2 for p in x.chunk(n, 1)], 1), [F.relu(p) for p in x.chunk(n, 1)]

    fused = fuse(lanes, compiler="none")
    for width, n in ((6, 3), (6, 2), (7, 3)):
        x = randn(3, width)
        same(leaves(fused(x, n)), leaves(lanes(x, n)), 0, 0)


def test_a_dynamic_width():
    def lanes(x):
        return (
            torch.cat([torch.softmax(p, 1) for p in x.chunk(2, 1)], 1),
            [p * 2 for p in x.split(3, 1)],
            [p.sin() for p in x.unbind(0)],
        )

    fused = fuse(lanes, compiler="none", dynamic=True)
    for width in (6, 8, 10, 7):
        x = randn(3, width)
        mine, theirs = fused(x), lanes(x)
        same([mine[0], *mine[1], *mine[2]], [theirs[0], *theirs[1], *theirs[2]], 1e-12, 1e-12)


# ---- modes ----


def test_inference_mode():
    def lanes(x):
        return torch.cat([F.layer_norm(p, (2,)) for p in x.chunk(3, 1)], 1)

    fused, x = fuse(lanes, compiler="none"), randn(4, 6)
    with torch.inference_mode():
        same([fused(x)], [lanes(x)], 1e-12, 1e-12)
    check(lanes, x)
    with torch.inference_mode():
        y = torch.randn(4, 6, dtype=F64)
        same([fused(y)], [lanes(y)], 1e-12, 1e-12)


def test_autocast():
    def lanes(x, ws):
        return torch.cat([torch.tanh(F.linear(p, w)) for p, w in zip(x.chunk(3, 1), ws.unbind(0), strict=True)], 1)

    x, ws = torch.randn(4, 6, requires_grad=True), torch.randn(3, 5, 2, requires_grad=True)
    fused = fuse(lanes, compiler="none")
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = fused(x, ws), lanes(x, ws)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    same([mine], [theirs], 2e-2, 2e-2)
    same([fused(x, ws)], [lanes(x, ws)], 1e-5, 1e-5)
    gradients = torch.autograd.grad(mine.sum(), (x, ws)), torch.autograd.grad(theirs.sum(), (x, ws))
    same(*gradients, 5e-2, 5e-2)


def test_autocast_inside():
    def lanes(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            low = [F.linear(p, w) for p in x.chunk(2, 1)]
        return low, [F.linear(p, w) for p in x.chunk(2, 1)]

    x, w = torch.randn(4, 6), torch.randn(5, 3)
    (low, full), (low_wanted, full_wanted) = fuse(lanes, compiler="none")(x, w), lanes(x, w)
    same(low, low_wanted, 2e-2, 2e-2)
    same(full, full_wanted, 1e-5, 1e-5)


def test_a_function_of_no_tensors_and_one_without_operators():
    assert fuse(lambda n: n + 1, compiler="none")(2) == 3
    x = randn(2)
    assert fuse(lambda x: x, compiler="none")(x) is x


def test_structures_and_keywords():
    def structured(inputs, *, scale=2.0, flag=None):
        return {"a": [torch.tanh(inputs[k]) * scale for k in sorted(inputs)], "n": 3, "flag": flag}

    x = {"one": randn(2, 3), "two": randn(2, 3)}
    fused = fuse(structured, compiler="none")
    mine, theirs = fused(x, scale=3.0, flag="f"), structured(x, scale=3.0, flag="f")
    same(mine["a"], theirs["a"], 0, 0)
    assert mine["n"] == 3 and mine["flag"] == "f"


def test_errors_of_the_function_are_its_own():
    def bad(x):
        return [torch.tanh(p) @ torch.ones(5, 5, dtype=F64) for p in x.chunk(2, 1)]

    with pytest.raises(RuntimeError, match="5"):
        fuse(bad, compiler="none")(randn(2, 6))


def test_complex_numbers():
    def lanes(x):
        return torch.cat([torch.tanh(p) * 1j for p in x.chunk(2, 1)], 1), [p.abs() for p in x.chunk(2, 1)]

    x = torch.randn(3, 4, dtype=torch.complex128)
    mine, theirs = fuse(lanes, compiler="none")(x), lanes(x)
    same([mine[0], *mine[1]], [theirs[0], *theirs[1]], 1e-12, 1e-12)


def test_reductions_of_every_kind():
    def reduced(x):
        lanes = x.chunk(2, 1)
        many = [
            lambda p: p.sum(),
            lambda p: p.mean(),
            lambda p: p.sum(0),
            lambda p: p.sum((0, 2)),
            lambda p: p.mean(-1),
            lambda p: p.mean((1, 2), True),
            lambda p: p.amax(1),
            lambda p: p.amin((0, -1)),
            lambda p: p.amax(()),
            lambda p: p.prod(1),
            lambda p: p.argmax(1),
            lambda p: p.argmin(-1, True),
            lambda p: p.argmax(),
            lambda p: (p > 0).any(1),
            lambda p: (p > -9).all(0),
            lambda p: p.var(1),
            lambda p: p.var((0, 1), correction=0),
            lambda p: p.std(-1),
            lambda p: torch.var_mean(p, 1, keepdim=True)[1],
            lambda p: torch.var_mean(p, (0, 2))[0],
            lambda p: p.logsumexp((0, 1)),
            lambda p: p.norm(dim=-1),
            lambda p: p.sum(1, dtype=torch.float32),
            lambda p: p.cumsum(1),
            lambda p: p.max(1)[0],
            lambda p: p.sum(()),
            lambda p: p.sort(1)[0],
            lambda p: p.var(),
            lambda p: p.amax((0, 1, 2)),
            lambda p: p.sum((-1, -2), keepdim=True),
            lambda p: p.softmax(1),
            lambda p: p.log_softmax(-3),
        ]
        return [fn(p) for fn in many for p in lanes]

    check(reduced, randn(3, 4, 5), rtol=1e-10)


def test_views_of_every_kind():
    def viewed(x):
        lanes = [torch.tanh(p) for p in x.chunk(2, 1)]  # [3, 2, 4]
        many = [
            lambda p: p.reshape(6, 4),
            lambda p: p.reshape(3, 8),
            lambda p: p.reshape(-1),
            lambda p: p.view(3, 2, 2, 2),
            lambda p: p.transpose(0, 1),
            lambda p: p.permute(2, 0, 1),
            lambda p: p.unsqueeze(0),
            lambda p: p.unsqueeze(1),
            lambda p: p.unsqueeze(-1),
            lambda p: p[:, :1].squeeze(1),
            lambda p: p[:1].squeeze(),
            lambda p: p[..., :1].squeeze(-1).squeeze(0),
            lambda p: p[0],
            lambda p: p[:, 1],
            lambda p: p[..., -1],
            lambda p: p[1:],
            lambda p: p[:, 1:],
            lambda p: p[..., 1:3],
            lambda p: p[..., ::2],
            lambda p: p[..., -3:-1],
            lambda p: p.expand(2, 3, 2, 4),
            lambda p: p[:1].expand(5, 2, 4),
            lambda p: p[:, :1].expand(-1, 7, -1),
            lambda p: p.reshape(2, 3, 4),
            lambda p: p.flatten(1),
            lambda p: p.t() if p.dim() == 2 else p.mT,
            lambda p: p.unbind(0)[1],
            lambda p: p.split(2, 2)[1],
            lambda p: p.chunk(2, 1)[0],
            lambda p: p.movedim(0, -1),
            lambda p: p.reshape(1, 24),
            lambda p: p.reshape(4, 6),
            lambda p: p.reshape(3, 1, 2, 4),
            lambda p: p.swapaxes(1, 2).reshape(3, 8),
        ]
        return [torch.sin(fn(p)) * 2 for fn in many for p in lanes]

    check(viewed, randn(3, 4, 4))
    check(viewed, randn(4, 3, 4).detach().transpose(0, 1), grad=False)


def test_products_of_every_kind():
    def products(x, w, b, m):
        lanes = [torch.tanh(p) for p in x.chunk(2, -1)]  # [3, 5, 4]
        return (
            [F.linear(p, w, b) for p in lanes],
            [F.linear(p, w) for p in lanes],
            [p @ p.mT for p in lanes],
            [p[0] @ w.t() for p in lanes],
            [w @ p[1].t() for p in lanes],
            [torch.addmm(b, p[0], w.t()) for p in lanes],
            [torch.addmm(m, p[0], w.t(), beta=0.5, alpha=2) for p in lanes],
            [torch.bmm(p, p.mT) for p in lanes],
            [torch.bmm(p, p.mT[:, :, :2]) for p in lanes],
            [p[0, 0] @ w.t() for p in lanes],
            [torch.einsum("bsd,od->bso", p, w) for p in lanes],
            [torch.matmul(p, w.t()) for p in lanes],
            [torch.baddbmm(p, p.mT[:, :, :1].mT.expand(3, 5, 4)[:, :, :5].mT.mT, p.new_ones(3, 4, 4)) for p in lanes],
            [F.linear(p, w_, b_) for p, w_, b_ in zip(lanes, (w, w * 2), (b, b * 3), strict=True)],
        )

    check(products, randn(3, 5, 8), randn(6, 4), randn(6), randn(5, 6), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_norms_of_other_types(dtype):
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(
                [nn.LayerNorm(6) for _ in range(3)] + [nn.RMSNorm(6) for _ in range(3)] + [nn.LayerNorm((2, 6)) for _ in range(3)]
            )
            for norm in self.norms:
                for p in norm.parameters():
                    nn.init.uniform_(p, 0.5, 1.5)

        def forward(self, x):
            return torch.cat([norm(p) for norm, p in zip(self.norms, x.chunk(9, 1), strict=True)], 1)

    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    x = torch.randn(4, 18, 6).to(dtype).requires_grad_()
    check(Norms().to(dtype), x, rtol=tolerance, atol=tolerance * 8)


def test_a_partial_function():
    def scaled(x, scale):
        return [torch.tanh(p) * scale for p in x.chunk(2)]

    fused = fuse(functools.partial(scaled, scale=2.0), compiler="none")
    x = randn(4, 3)
    same(fused(x), scaled(x, 2.0), 0, 0)
