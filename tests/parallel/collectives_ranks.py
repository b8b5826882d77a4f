"""Ranks of tests/parallel/test_collectives.py: each rank runs every scenario and saves its results for the tests."""

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join

import onepass
from onepass.parallel import collectives

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (3, 0, 5, 1)  # columns of each rank's part in gather_last; one rank has none


def run(rank, ranks, folder, backend):
    """Run every scenario, in the same order on all ranks."""
    join(rank, ranks, folder, backend)
    made = groups(ranks)
    scenarios = [mappings, layouts, empty, sent, again, bare, in_flight, errors, agreement]
    if ranks == 2:  # only here: the compiler takes longest
        scenarios.append(compiled)
    found = {scenario.__name__: scenario(made["world"]) for scenario in scenarios}
    found["backend"] = backend
    found["strided_groups"] = mappings(made["strided"])
    found["alone"] = alone(made["alone"], made["others"])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def groups(ranks):
    """Return the groups: all ranks, every other rank, this rank alone, and one without this rank. All ranks create all groups."""
    each = [dist.new_group([rank]) for rank in range(ranks)]
    all_members = dict.fromkeys(members(ranks, rank) for rank in range(ranks))
    strided = {those: dist.new_group(list(those)) for those in all_members}
    rank = dist.get_rank()
    return {"world": dist.group.WORLD, "strided": strided[members(ranks, rank)], "alone": each[rank], "others": each[rank - 1]}


def members(ranks, rank):
    """Return the members of this rank's strided group: of four ranks (0, 2) or (1, 3), of two ranks both."""
    return (0, 1) if ranks == 2 else (rank % 2, rank % 2 + 2)


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


def called(name, group, dtype, layout=torch.clone):
    """Run forward, and backward twice through the graph. Return the results, and whether the inputs are unchanged."""
    call = cases(group.size())[name][0]
    xs, dys = inputs(name, group.size(), dtype)
    x = layout(xs[group.rank()]).requires_grad_()
    dy = layout(dys[group.rank()])
    y = call(x, group)
    y.backward(dy, retain_graph=True)
    first = x.grad.clone()
    y.backward(dy)  # accumulates into x.grad in place
    unchanged = torch.equal(x, xs[group.rank()]) and torch.equal(dy, dys[group.rank()])
    (third,) = torch.autograd.grad(call(x, group), x, dy)
    return {"y": y.detach(), "dx": first, "twice": x.grad, "third": third, "unchanged": unchanged}


# ---- scenarios ----


def mappings(group):
    return {(name, dtype): called(name, group, dtype) for name in cases(group.size()) for dtype in TYPES}


def layouts(group):
    return {name: called(name, group, torch.bfloat16, strided) for name in cases(group.size())}


def empty(group):
    """Call the mappings without tokens, and with an expanded incoming gradient, as sum() gives."""
    found = {}
    for name in ("copy_to_group", "sum_over_group", "gather_last", "split_last"):
        x = torch.zeros(0, 4, requires_grad=True)
        y = getattr(collectives, name)(x, group)
        y.sum().backward()
        found[name] = y.shape, x.grad.shape
    for name in ("gather_sequence", "reduce_scatter_sequence", "split_sequence"):
        x = torch.zeros(0, 4, dtype=torch.bfloat16, requires_grad=True)
        y = getattr(collectives, name)(x, group)
        y.sum().backward()
        found[name] = y.shape, x.grad.shape
    x = torch.ones(2, 3, requires_grad=True)
    collectives.copy_to_group(x, group).sum().backward()
    collectives.gather_sequence(x, group).sum().backward()
    return found, x.grad


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


def sent(group):
    """Return the collectives of each forward and backward, and whether y requires a gradient when x doesn't."""
    found = {}
    for name, (call, *_) in cases(group.size()).items():
        xs, dys = inputs(name, group.size(), torch.float32)
        x = xs[group.rank()].requires_grad_()
        with Sent() as forward:
            y = call(x, group)
        with Sent() as backward:
            y.backward(dys[group.rank()])
        found[name] = forward, backward, call(x.detach(), group).requires_grad
    return found


def again(group):
    """Return the errors of differentiating a gradient."""
    said = []
    for name, (call, *_) in cases(group.size()).items():
        xs, _ = inputs(name, group.size(), torch.float32)
        x = xs[group.rank()].requires_grad_()
        y = call(x, group)
        try:
            torch.autograd.grad(y.square().sum(), x, create_graph=True)
        except RuntimeError as error:
            said.append(str(error))
    return said


def bare(group):
    """Run the asynchronous collectives on strided inputs that require gradients."""
    found = {}
    for dtype in TYPES:
        x = strided(numbers(2, group.rank(), (4, 3), dtype)).requires_grad_()
        gathering, scattering = collectives.start_all_gather(x, group), collectives.start_reduce_scatter(x, group)
        part, whole = scattering.wait(), gathering.wait()
        same = scattering.wait() is part and gathering.wait() is whole and not whole.requires_grad and not part.requires_grad
        unchanged = torch.equal(x, numbers(2, group.rank(), (4, 3), dtype))
        totals = []
        for layout in (torch.clone, strided):
            total = layout(x.detach())
            work = collectives.start_all_reduce(total, group)
            work.wait()
            totals.append(total.clone())
            total.zero_()
            totals.append(work.wait().clone())  # a second wait() doesn't overwrite what was written since
        found[dtype] = whole, part, totals, same, unchanged
    return found


def in_flight(group):
    """Start many collectives and wait for them in another order. Their inputs are freed and the memory is reused."""
    works = []
    for index in range(8):
        x = torch.full((1000, 8), float(group.rank() + index))
        works.append(collectives.start_all_gather(x, group))
        works.append(collectives.start_reduce_scatter(x.bfloat16(), group))
        del x
        torch.full((1000, 8), float("nan"))
    buffer = torch.full((6, 1000), float(group.rank()))
    rows = [collectives.start_all_reduce(row, group) for row in buffer]
    found = [work.wait() for work in reversed(works)][::-1]
    for work in reversed(rows):
        work.wait()
    return found[::2], found[1::2], buffer


def errors(group):
    """Return the errors of wrong calls, and the collectives that were sent before them."""
    said = []
    odd = torch.zeros(group.size() + 1, 2 * group.size() - 1)
    wrong = list(range(group.size()))
    wrong[group.rank()] = 6  # but x has an odd number of columns
    with Sent() as names:
        for call in (
            lambda: collectives.reduce_scatter_sequence(odd, group),
            lambda: collectives.start_reduce_scatter(odd, group),
            lambda: collectives.split_sequence(odd, group),
            lambda: collectives.split_last(odd, group),
            lambda: collectives.gather_sequence(torch.tensor(1.0), group),
            lambda: collectives.gather_last(torch.tensor(1.0), group),
            lambda: collectives.gather_last(odd, group, sizes=[1]),
            lambda: collectives.gather_last(odd, group, sizes=[-1] * group.size()),
            lambda: collectives.gather_last(odd, group, sizes=wrong),
        ):
            try:
                call()
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said, names


def agreement(group):
    """Under validate(), all ranks raise if they differ; ranks that agree continue."""
    said = []
    ranks, rank = group.size(), group.rank()
    longer = torch.ones(ranks * (1 + rank), 4)
    last = rank == ranks - 1
    with onepass.validate():
        for call in (
            lambda: collectives.gather_sequence(longer, group),
            lambda: collectives.reduce_scatter_sequence(longer, group),
            lambda: collectives.sum_over_group(longer, group),
            lambda: collectives.start_all_reduce(longer, group),
            lambda: collectives.gather_last(longer, group),
            lambda: collectives.gather_last(torch.ones(2, 1), group, sizes=[1] * (ranks - 1) + [1 + (rank > 0)]),
            lambda: collectives.gather_last(torch.ones(2, 1 + last), group, sizes=[1] * ranks),
            lambda: collectives.gather_sequence(torch.ones(2, 1).to(TYPES[rank % 2]), group),
        ):
            try:
                call()
                said.append("")
            except (RuntimeError, ValueError) as error:
                said.append(str(error))
        agreeing = {name: called(name, group, torch.float32) for name in cases(group.size())}
    return said, longer, agreeing


def compiled(group):
    """Run all mappings and asynchronous collectives in one graph. Return the results without and with torch.compile."""

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

    x = numbers(3, group.rank(), (4, 6), torch.bfloat16).requires_grad_()
    found = []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        y, *others = function(x)
        found.append([y.detach(), torch.autograd.grad(y.float().square().sum(), x)[0], *others])
    return found


def alone(group, others):
    """Check that a group of one sends nothing, and return the errors of a group without this rank."""
    x = torch.ones(4, 3, requires_grad=True)
    with Sent() as names:
        same = handed_back(x, group)
    said = []
    for name in ("copy_to_group", "sum_over_group", "gather_last", "start_all_reduce"):
        try:
            getattr(collectives, name)(x, others)
        except TypeError as error:
            said.append(str(error))
    return names, same, said


def handed_back(x, group):
    """Whether every function returns x itself."""
    mappings = [getattr(collectives, name.partition(" ")[0])(x, group) for name in cases(2)]
    pieces = collectives.start_all_gather, collectives.start_reduce_scatter, collectives.start_all_reduce
    return all(y is x for y in [*mappings, *(start(x, group).wait() for start in pieces)])
