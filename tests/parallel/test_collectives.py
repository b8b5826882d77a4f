"""Collectives and their gradients against the unsharded computation."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from parallel.meeting import drawn, error_of, every_other_rank
from parallel.worlds import FOURS, PAIRS

import onepass
from onepass.distributed import collectives

WORLDS = [*PAIRS, *FOURS]
of_two = pytest.mark.parametrize("world", PAIRS, indirect=True, scope="module")
of_four = pytest.mark.parametrize("world", FOURS, indirect=True, scope="module")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (3, 0, 5, 1)  # columns of each rank's part in gather_last; one rank has none


# ---- each mapping: its call, and each rank's input and incoming gradient ----


def numbers(kind, place, shape, dtype):
    """Return random numbers that are the same on every rank. `place` is the rank within its group that they are for."""
    generator = torch.Generator().manual_seed(1000 * kind + place)
    return drawn(torch.randn, shape, generator=generator, dtype=torch.float64).to(dtype)


# name -> (call, x's shape on each rank, y's shape on each rank, whether all ranks have the same x, and the same dy)
def cases(ranks):
    widths, whole = WIDTHS[:ranks], sum(WIDTHS[:ranks])
    return {
        "copy_to_group": (collectives.copy_to_group, [(3, 2, 5)] * ranks, [(3, 2, 5)] * ranks, True, False),
        "sum_over_group": (collectives.sum_over_group, [(3, 2, 5)] * ranks, [(3, 2, 5)] * ranks, False, True),
        "gather_last": (collectives.gather_last, [(3, 2, 5)] * ranks, [(3, 2, 5 * ranks)] * ranks, False, True),
        "gather_last uneven": (collectives.gather_last, [(3, 2, w) for w in widths], [(3, 2, whole)] * ranks, False, True),
        "gather_last sizes": (
            lambda x, group: collectives.gather_last(x, group, sizes=widths),
            [(3, 2, w) for w in widths],
            [(3, 2, whole)] * ranks,
            False,
            True,
        ),
        "split_last": (collectives.split_last, [(3, 2, 4 * ranks)] * ranks, [(3, 2, 4)] * ranks, True, False),
        "gather_sequence": (collectives.gather_sequence, [(3, 2, 5)] * ranks, [(3 * ranks, 2, 5)] * ranks, False, False),
        "gather_sequence alike": (
            lambda x, group: collectives.gather_sequence(x, group, sum_gradient=False),
            [(3, 2, 5)] * ranks,
            [(3 * ranks, 2, 5)] * ranks,
            False,
            True,
        ),
        "reduce_scatter_sequence": (
            collectives.reduce_scatter_sequence, [(3 * ranks, 2, 5)] * ranks, [(3, 2, 5)] * ranks, False, False,
        ),
        "split_sequence": (collectives.split_sequence, [(3 * ranks, 2, 5)] * ranks, [(3, 2, 5)] * ranks, True, False),
    }  # fmt: skip


def inputs(name, ranks, dtype):
    """Return x and dy of every rank in the group."""
    _, of_x, of_y, same_x, same_dy = cases(ranks)[name]
    xs = [numbers(0, 0 if same_x else place, shape, dtype) for place, shape in enumerate(of_x)]
    dys = [numbers(1, 0 if same_dy else place, shape, dtype) for place, shape in enumerate(of_y)]
    return xs, dys


def strided(t):
    """Return the same values with stride 2, with other values between them."""
    return torch.stack([t, torch.full_like(t, 777)], -1)[..., 0]


NAMES = list(cases(2))
names = pytest.mark.parametrize("name", NAMES)
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


def whole(name, ranks, dtype):
    """Return each place's y and dx, unsharded and in fp64."""
    xs, dys = inputs(name, ranks, dtype)
    same_x, same_dy = cases(ranks)[name][3:]
    leaves = [x.double().requires_grad_() for x in xs]
    if same_x:  # one tensor, which all ranks have
        leaves = leaves[:1] * ranks
    total = sum(leaves) if name in ("sum_over_group", "reduce_scatter_sequence") else None
    ys = {
        "copy_to_group": lambda: leaves,
        "sum_over_group": lambda: [total] * ranks,
        "gather_last": lambda: [torch.cat(leaves, -1)] * ranks,
        "split_last": lambda: leaves[0].chunk(ranks, -1),
        "gather_sequence": lambda: [torch.cat(leaves)] * ranks,
        "reduce_scatter_sequence": lambda: total.chunk(ranks),
        "split_sequence": lambda: leaves[0].chunk(ranks),
    }[name.partition(" ")[0]]()
    if same_dy:  # one result, which all ranks have
        torch.autograd.backward(ys[0], dys[0].double())
    else:
        torch.autograd.backward(ys, [dy.double() for dy in dys])
    return [(y.detach(), leaf.grad) for y, leaf in zip(ys, leaves, strict=True)]


def tolerance(dtype, group):
    """Return that of sums over a group. 16-bit ones are in fp32 and rounded once, but NCCL rounds every one of several."""
    if dtype == torch.float32:
        return {"rtol": 1e-6, "atol": 1e-6}
    roundings = 0 if dist.get_backend() == "gloo" else group.size() - 2
    return {"rtol": 0, "atol": roundings * torch.finfo(dtype).eps / 2 * 8}  # the sums are less than 8


def check(name, group, dtype, layout=torch.clone):
    """Run forward, and backward twice through the graph. Compare this rank's results with the unsharded."""
    call, place = cases(group.size())[name][0], group.rank()
    xs, dys = inputs(name, group.size(), dtype)
    x, dy = layout(xs[place]).requires_grad_(), layout(dys[place])
    y = call(x, group)
    y.backward(dy, retain_graph=True)
    dx = x.grad.clone()
    y.backward(dy)  # accumulates into x.grad in place
    assert torch.equal(x.grad, 2 * dx)
    assert torch.equal(x, xs[place]) and torch.equal(dy, dys[place])
    assert torch.equal(torch.autograd.grad(call(x, group), x, dy)[0], dx)
    for mine, wanted in zip((y.detach(), dx), whole(name, group.size(), dtype)[place], strict=True):
        assert mine.dtype == dtype and mine.shape == wanted.shape
        torch.testing.assert_close(mine, wanted.to(dtype), **tolerance(dtype, group))


@types
@names
def test_as_unsharded(group, name, dtype):
    check(name, group, dtype)


@of_four
@types
@names
def test_as_unsharded_in_groups_of_every_other_rank(group, name, dtype):
    check(name, every_other_rank(), dtype)


@names
def test_strided_inputs_and_gradients(group, name):
    check(name, group, torch.bfloat16, strided)


def test_no_tokens_and_expanded_gradients(group):
    """sum() gives expanded ones."""
    ranks = group.size()
    widths = {"gather_last": 4 * ranks, "split_last": 4 // ranks}
    for name in dict.fromkeys(name.partition(" ")[0] for name in NAMES):
        x = torch.zeros(0, 4, dtype=torch.bfloat16 if "sequence" in name else torch.float32, requires_grad=True)
        y = getattr(collectives, name)(x, group)
        y.sum().backward()
        assert y.shape == (0, widths.get(name, 4)) and x.grad.shape == (0, 4)
    x = torch.ones(2, 3, requires_grad=True)
    collectives.copy_to_group(x, group).sum().backward()
    collectives.gather_sequence(x, group).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0 * ranks))


class Sent:
    """Record the names of the collectives that the block starts."""

    def __enter__(self):
        self.real, self.names = collectives._ops, []
        collectives._ops = self
        return self.names

    def __getattr__(self, name):
        if name != "wait_tensor":
            self.names.append(name)
        return getattr(self.real, name)

    def __exit__(self, *exception):
        collectives._ops = self.real


GATHER, TOTAL, SCATTER = ["all_gather_into_tensor"], ["all_reduce"], ["reduce_scatter_tensor"]


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("copy_to_group", [], TOTAL),
        ("sum_over_group", TOTAL, []),
        ("gather_last", GATHER * 2, []),
        ("gather_last uneven", GATHER * 2, []),
        ("gather_last sizes", GATHER, []),
        ("split_last", [], GATHER),
        ("gather_sequence", GATHER, SCATTER),
        ("gather_sequence alike", GATHER, []),
        ("reduce_scatter_sequence", SCATTER, GATHER),
        ("split_sequence", [], GATHER),
    ],
)
def test_what_is_sent_and_that_a_gradient_is_not_differentiated(group, name, forward, backward):
    if dist.get_backend() == "gloo":  # all_gather_into_tensor makes a process over gloo crash at times
        forward, backward = ([op.replace("into_tensor", "into_tensor_out") for op in ops] for ops in (forward, backward))
    call, (xs, dys) = cases(group.size())[name][0], inputs(name, group.size(), torch.float32)
    x = xs[group.rank()].requires_grad_()
    with Sent() as sent:
        y = call(x, group)
    assert sent == forward
    with Sent() as sent:
        y.backward(dys[group.rank()])
    assert sent == backward
    assert not call(x.detach(), group).requires_grad
    assert "differentiable once" in error_of(torch.autograd.grad, call(x, group).square().sum(), x, create_graph=True)


@types
def test_bare_pieces(group, dtype):
    """Of strided inputs that require gradients."""
    ranks, rank = group.size(), group.rank()
    xs = [numbers(2, place, (4, 3), dtype) for place in range(ranks)]
    x, total, close = strided(xs[rank]).requires_grad_(), sum(x.double() for x in xs), tolerance(dtype, group)
    gathering, scattering = collectives.start_all_gather(x, group), collectives.start_reduce_scatter(x, group)
    part, gathered = scattering.wait(), gathering.wait()
    assert scattering.wait() is part and gathering.wait() is gathered
    assert not gathered.requires_grad and not part.requires_grad and part.dtype == dtype
    assert torch.equal(x, xs[rank]) and torch.equal(gathered, torch.cat(xs))
    torch.testing.assert_close(part, total.chunk(ranks)[rank].to(dtype), **close)
    for layout in (torch.clone, strided):
        mine = layout(x.detach())
        work = collectives.start_all_reduce(mine, group)
        work.wait()
        torch.testing.assert_close(mine, total.to(dtype), **close)
        mine.zero_()
        assert not work.wait().any(), "a second wait() overwrites what was written since"


def test_many_in_flight(group):
    """Wait in another order. Inputs are freed and the memory is reused."""
    works, ranks = [], range(group.size())
    for index in range(8):
        x = torch.full((1000, 8), float(group.rank() + index))
        works += [collectives.start_all_gather(x, group), collectives.start_reduce_scatter(x.bfloat16(), group)]
        del x
        torch.full((1000, 8), float("nan"))
    buffer = torch.full((6, 1000), float(group.rank()))
    rows = [collectives.start_all_reduce(row, group) for row in buffer]
    found = [work.wait() for work in reversed(works)][::-1]
    for work in reversed(rows):
        work.wait()
    for index, (gathered, part) in enumerate(zip(found[::2], found[1::2], strict=True)):
        each = [float(place + index) for place in ranks]
        assert torch.equal(gathered, torch.tensor(each).repeat_interleave(1000)[:, None].expand(-1, 8))
        assert torch.equal(part, torch.full((1000 // len(ranks), 8), sum(each)).bfloat16())
    assert torch.equal(buffer, torch.full((6, 1000), float(sum(ranks))))


def test_errors_name_the_argument_and_nothing_is_sent(group):
    ranks, place = group.size(), group.rank()
    odd = torch.zeros(ranks + 1, 2 * ranks - 1)
    right, wrong = list(range(ranks)), list(range(ranks))
    right[place], wrong[place] = 2 * ranks - 1, 6
    first = f"x's first dimension must be a multiple of {ranks}, the size of group, but is {ranks + 1}: x has shape"
    last = f"x's last dimension must be a multiple of {ranks}, the size of group, but is {2 * ranks - 1}: x has shape"
    with Sent() as sent:
        for call in (collectives.reduce_scatter_sequence, collectives.start_reduce_scatter, collectives.split_sequence):
            assert error_of(call, odd, group).startswith(first)
        assert error_of(collectives.split_last, odd, group).startswith(last)
        for call in (collectives.gather_sequence, collectives.gather_last):
            assert error_of(call, torch.tensor(1.0), group) == "x must have at least one dimension, but has shape ()"
        for sizes in ([1], [-1] * ranks):
            said = error_of(collectives.gather_last, odd, group, sizes=sizes)
            assert said == f"sizes must be {ranks} numbers from 0 on, one a rank of group, but is {sizes}"
        said = error_of(collectives.gather_last, odd, group, sizes=wrong)
        assert said == f"sizes must be {right}, as x's last dimension on each rank of group, but is {wrong}"
    assert sent == []


def test_under_validate_ranks_that_differ_are_told(group):
    ranks, rank = group.size(), group.rank()
    longer, last = torch.ones(ranks * (1 + rank), 4), rank == ranks - 1
    words, ones = "must be the same on all ranks of group, but is", [1] * (ranks - 1)
    differing = f"of shape ({ranks}, 4) and torch.float32 on its rank 0 and of shape ({2 * ranks}, 4)"
    with onepass.validate():
        for name in ("gather_sequence", "reduce_scatter_sequence", "sum_over_group", "start_all_reduce"):
            assert error_of(getattr(collectives, name), longer, group).startswith(f"x {words} {differing}")
        said = error_of(collectives.gather_last, longer, group)
        assert said.startswith(f"x, but for its last dimension, {words} of shape ({ranks},)")
        said = error_of(collectives.gather_last, torch.ones(2, 1), group, sizes=[*ones, 1 + (rank > 0)])
        assert said.startswith(f"sizes {words} {[*ones, 1]} on its rank 0 and {[*ones, 2]} on its rank 1")
        said = error_of(collectives.gather_last, torch.ones(2, 1 + last), group, sizes=[*ones, 1])
        assert said.startswith(f"sizes must be {[*ones, 2]}, as x's last dimension on each rank of group, but")
        said = error_of(collectives.gather_sequence, torch.ones(2, 1).to(TYPES[rank % 2]), group)
        assert "torch.float32 on its rank 0 and of shape (2, 1) and torch.bfloat16 on its rank 1" in said
        assert torch.equal(longer, torch.ones(ranks * (1 + rank), 4))
        for name in NAMES:
            check(name, group, torch.float32)


@of_two
def test_compiled_without_a_break(group):
    """All mappings and asynchronous collectives in one graph."""
    def chain(x):
        y = collectives.copy_to_group(x, group)
        y = collectives.gather_sequence(y * 2, group)
        y = collectives.reduce_scatter_sequence(y.sin(), group)
        y = collectives.gather_last(y.cos(), group, sizes=[y.shape[-1]] * group.size())
        y = collectives.split_last(y.sin(), group)
        y = collectives.sum_over_group(y.cos(), group)
        return collectives.split_sequence(collectives.gather_sequence(y, group, sum_gradient=False) * 3, group)

    def pieces(x):
        part = collectives.start_reduce_scatter(x, group).wait()
        return collectives.start_all_reduce(collectives.start_all_gather(part * 2, group).wait() + 1, group).wait() * 3

    def both(x):
        return chain(x), pieces(x)

    x, found = numbers(3, group.rank(), (4, 6), torch.bfloat16).requires_grad_(), []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        y, *others = function(x)
        found.append([y.detach(), torch.autograd.grad(y.float().square().sum(), x)[0], *others])
    torch.testing.assert_close(*found)


def handed_back(x, group):
    """Return whether every function returns x itself."""
    mappings = [getattr(collectives, name.partition(" ")[0])(x, group) for name in cases(2)]
    pieces = collectives.start_all_gather, collectives.start_reduce_scatter, collectives.start_all_reduce
    return all(y is x for y in [*mappings, *(start(x, group).wait() for start in pieces)])


@cache
def groups_of_one():
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())]


def test_a_group_of_one_and_a_group_without_this_rank(group):
    alone, others = groups_of_one()[group.rank()], groups_of_one()[group.rank() - 1]
    with Sent() as sent:
        assert handed_back(torch.ones(4, 3, requires_grad=True), alone)
    assert sent == []
    for name in ("copy_to_group", "sum_over_group", "gather_last", "start_all_reduce"):
        said = error_of(getattr(collectives, name), torch.ones(4, 3), others)
        assert said.startswith("group must be None or a torch.distributed.ProcessGroup that has this rank, but is")


def test_without_a_group_and_without_torch_distributed():
    x = torch.ones(3, 5, requires_grad=True)
    assert not dist.is_initialized()
    assert handed_back(x, None)
