"""What two or four processes do together, each in its own; what they found is saved for the test that asked."""

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join

import onepass
from onepass.parallel import collectives

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (3, 0, 5, 1)  # of the parts that gather_last puts together; one rank has no columns


def run(rank, ranks, folder, backend):
    """What a spawned process runs: every scenario, in one order."""
    join(rank, ranks, folder, backend)
    made = groups(ranks)
    scenarios = [mappings, layouts, empty, sent, again, bare, in_flight, errors, agreement]
    if ranks == 2:  # the compiler takes longest
        scenarios.append(compiled)
    found = {scenario.__name__: scenario(made["world"]) for scenario in scenarios}
    found["backend"] = backend
    found["strided_groups"] = mappings(made["strided"])
    found["alone"] = alone(made["alone"], made["others"])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def groups(ranks):
    """All ranks; every other one; this one alone; one that this rank isn't in. All ranks make all of them."""
    each = [dist.new_group([rank]) for rank in range(ranks)]
    all_members = dict.fromkeys(members(ranks, rank) for rank in range(ranks))
    strided = {those: dist.new_group(list(those)) for those in all_members}
    rank = dist.get_rank()
    return {"world": dist.group.WORLD, "strided": strided[members(ranks, rank)], "alone": each[rank], "others": each[rank - 1]}


def members(ranks, rank):
    """Of four ranks 0 and 2, or 1 and 3; two are all there are."""
    return (0, 1) if ranks == 2 else (rank % 2, rank % 2 + 2)


# ---- each mapping: how it is called, what goes in at a rank, and what comes back ----


def numbers(kind, place, shape, dtype):
    """The same on every rank that asks; place is a rank's place in its group."""
    generator = torch.Generator().manual_seed(1000 * kind + place)
    return drawn(torch.randn, shape, generator=generator, dtype=torch.float64).to(dtype)


# name: (call, shape of x at a place, shape of y at a place, whether all ranks have the same x, and the same dy)
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
    """The x of every place in the group, and the dy."""
    _, of_x, of_y, same_x, same_dy = cases(ranks)[name]
    xs = [numbers(0, 0 if same_x else place, shape, dtype) for place, shape in enumerate(of_x)]
    dys = [numbers(1, 0 if same_dy else place, shape, dtype) for place, shape in enumerate(of_y)]
    return xs, dys


def strided(t):
    """The same numbers, with others between them."""
    return torch.stack([t, torch.full_like(t, 777)], -1)[..., 0]


def called(name, group, dtype, layout=torch.clone):
    """Forward and backward, twice over the graph; whether what went in is as it was."""
    call = cases(group.size())[name][0]
    xs, dys = inputs(name, group.size(), dtype)
    x = layout(xs[group.rank()]).requires_grad_()
    dy = layout(dys[group.rank()])
    y = call(x, group)
    y.backward(dy, retain_graph=True)
    first = x.grad.clone()
    y.backward(dy)  # adds to the first in place
    unchanged = torch.equal(x, xs[group.rank()]) and torch.equal(dy, dys[group.rank()])
    (third,) = torch.autograd.grad(call(x, group), x, dy)
    return {"y": y.detach(), "dx": first, "twice": x.grad, "third": third, "unchanged": unchanged}


# ---- scenarios ----


def mappings(group):
    return {(name, dtype): called(name, group, dtype) for name in cases(group.size()) for dtype in TYPES}


def layouts(group):
    return {name: called(name, group, torch.bfloat16, strided) for name in cases(group.size())}


def empty(group):
    """No token on any rank; the gradient of a sum is one number, expanded."""
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
    """The names of the collectives in the block."""

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
    """The collectives of each forward and backward; what isn't differentiated asks for no backward."""
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
    """What is said where a gradient is differentiated."""
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
    """The asynchronous pieces, of strided inputs that require gradients."""
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
            totals.append(work.wait().clone())  # again: what has been written since stays
        found[dtype] = whole, part, totals, same, unchanged
    return found


def in_flight(group):
    """Many at a time, waited for in another order, while what they were given is dropped and the memory used again."""
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
    """What is said, and how much was sent by then."""
    said = []
    odd = torch.zeros(group.size() + 1, 2 * group.size() - 1)
    wrong = list(range(group.size()))
    wrong[group.rank()] = 6  # x has an odd number of columns
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
    """Under validate() ranks that differ are told, all of them; ranks that agree go on."""
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
    """All mappings and bare pieces in one graph: what comes without the compiler, and with it."""

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
    """A group of one sends nothing; a group that this rank isn't in is refused."""
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
    """Whether every function gives x itself."""
    mappings = [getattr(collectives, name.partition(" ")[0])(x, group) for name in cases(2)]
    pieces = collectives.start_all_gather, collectives.start_reduce_scatter, collectives.start_all_reduce
    return all(y is x for y in [*mappings, *(start(x, group).wait() for start in pieces)])
