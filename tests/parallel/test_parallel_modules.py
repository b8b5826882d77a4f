"""Modules divided over ranks, against the undivided module in fp64.

A case makes its modules from one seed and runs them. With each result it returns how the ranks' parts make the whole: the
dimension to concatenate along, ALIKE if all ranks have the whole, or SUM. Without a group it runs the undivided module.
"""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel.meeting import drawn, error_of, gather, halves
from parallel.worlds import FOURS, PAIRS, World
from torch import nn

import onepass
from onepass.nn import (
    ColumnParallelLinear,
    LayerNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    embedding,
    linear,
    sharded_state_dict,
)
from onepass.nn.sharding import Division, part_of, range_of
from onepass.ops.embedding import embedding as embedding_op

WORLDS = [*PAIRS, *FOURS]
of_two = pytest.mark.parametrize("world", PAIRS, indirect=True, scope="module")
of_four = pytest.mark.parametrize("world", FOURS, indirect=True, scope="module")
S, B, K, N = 8, 2, 12, 16  # sequence, batch, and the features of x and of y
ALIKE, SUM = "alike", "sum"


def numbers(*shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return drawn(torch.randn, shape, generator=generator, dtype=torch.float64)


def part(t, dim, group):
    """Return this rank's part of a tensor, divided as by torch.chunk."""
    if group is None or dim in (ALIKE, SUM):
        return t.clone()
    parts = t.chunk(group.size(), dim)
    return (parts[group.rank()] if group.rank() < len(parts) else t.narrow(dim, 0, 0)).contiguous()


def made(make, seed=5):
    """Return a module that is initialised from a seed, and the random state afterwards."""
    torch.manual_seed(seed)
    module = make()
    on_gpu = torch.get_default_device().type == "cuda"
    return module, torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()


def starts(module, state, dims):
    return {"random state": (state, ALIKE)} | {
        f"start of {name}": (parameter.detach().clone(), dims.get(name, ALIKE)) for name, parameter in module.named_parameters()
    }


def grads(module, dims):
    return {name: (parameter.grad, dims.get(name, ALIKE)) for name, parameter in module.named_parameters()}


def column(x_dim=ALIKE, y_dim=-1, dx_dim=None, init=None, given=False, **options):
    def case(group):
        options.setdefault("dtype", torch.float64)
        layer, state = made(lambda: ColumnParallelLinear(K, N, tp_group=group, init_method=init, **options))
        dims = {"weight": 0, "bias": 0}
        found = starts(layer, state, dims)
        x = part(numbers(S, B, K).to(options["dtype"]), x_dim, group).requires_grad_()
        dy = part(numbers(S, B, N), y_dim, group).to(x.dtype)
        y, bias = layer(x, layer.weight, runtime_gather_output=True) if given else layer(x)
        (y if bias is None else y + bias).backward(dy)
        left = {} if bias is None else {"bias left": (bias.detach(), 0)}
        return found | {"y": (y.detach(), y_dim), "dx": (x.grad, dx_dim or x_dim), **left} | grads(layer, dims)

    return case


def row(x_dim=-1, y_dim=ALIKE, **options):
    def case(group):
        layer, state = made(lambda: RowParallelLinear(K, N, tp_group=group, dtype=torch.float64, **options))
        dims = {"weight": 1}
        found = starts(layer, state, dims)
        x = part(numbers(S, B, K), x_dim, group).requires_grad_()
        y, bias = layer(x)
        (y if bias is None else y + bias).backward(part(numbers(S, B, N), y_dim, group))
        left = {} if bias is None else {"bias left": (bias.detach(), ALIKE)}
        summed = dims | ({"bias": SUM} if options.get("sequence_parallel") else {})
        return found | {"y": (y.detach(), y_dim), "dx": (x.grad, x_dim), **left} | grads(layer, summed)

    return case


def ids_of(*shape, rows):
    return drawn(torch.randint, rows, shape, generator=torch.Generator().manual_seed(1))


def looked_up(rows, y_dim=ALIKE, **options):
    def case(group):
        layer, state = made(lambda: VocabParallelEmbedding(rows, K, tp_group=group, dtype=torch.float64, **options))
        found = starts(layer, state, {"weight": 0})
        y = layer(ids_of(B, S, rows=rows))
        dy = numbers(S, B, K) if y_dim == 0 else numbers(B, S, K)
        y.backward(part(dy, y_dim, group))
        return found | {"y": (y.detach(), y_dim)} | grads(layer, {"weight": 0})

    return case


def tied(rows, module, gathers, sequence_parallel=False):
    """Return a case of an embedding and an output layer with a tied weight, over two microbatches."""

    def case(group):
        dtype = torch.float32 if gathers else torch.float64
        table, state = made(lambda: VocabParallelEmbedding(
            rows, K, tp_group=group, dtype=dtype, reduce_scatter_embeddings=sequence_parallel))  # fmt: skip
        weight = table.weight
        options = {"tp_group": group, "sequence_parallel": sequence_parallel}
        head = ColumnParallelLinear(K, rows, bias=False, dtype=dtype, **options) if module else None
        if head is not None:
            head.weight = weight
        else:
            options["allreduce_dgrad"] = not sequence_parallel
        if gathers:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        for microbatch in range(2):
            hidden = table((ids_of(B, S, rows=rows) + microbatch) % rows)
            logits = onepass.linear(hidden, weight, **options) if head is None else head(hidden)[0]
            whole = numbers(*((S, B) if sequence_parallel else (B, S)), rows).to(dtype)
            logits.backward(part(whole, -1, group))
        assert not gathers or not weight.grad.any()
        return starts(table, state, {"weight": 0}) | {"weight": (weight.main_grad if gathers else weight.grad, 0)}

    return case


CASES = {
    "column": column(),
    "column of fp32": column(dtype=torch.float32),
    "column without bias": column(bias=False),
    "column, its own start": column(init=lambda weight: nn.init.normal_(weight, 1.0, 3.0)),
    "column, gathered": column(y_dim=ALIKE, gather_output=True),
    "column, gathered by the call": column(y_dim=ALIKE, given=True),
    "column, sequence": column(x_dim=0, sequence_parallel=True),
    "column, bias left": column(skip_bias_add=True),
    "column, dx in parts": column(dx_dim=SUM, allreduce_dgrad=False),
    "row": row(),
    "row without bias": row(bias=False),
    "row of a whole x": row(x_dim=ALIKE, input_is_parallel=False),
    "row, sequence": row(y_dim=0, sequence_parallel=True),
    "row, bias left": row(skip_bias_add=True),
    "row, sequence, bias left": row(y_dim=0, sequence_parallel=True, skip_bias_add=True),
    "embedding": looked_up(12),
    "embedding, uneven": looked_up(11),
    "embedding, a rank without rows": looked_up(5),
    "embedding, scattered": looked_up(11, y_dim=0, reduce_scatter_embeddings=True),
    "embedding, its own start": looked_up(11, init_method=lambda weight: nn.init.normal_(weight, 1.0, 3.0)),
    "tied": tied(11, module=False, gathers=False),
    "tied, main_grad": tied(11, module=False, gathers=True),
    "tied module, main_grad": tied(12, module=True, gathers=True),
    "tied module, sequence, main_grad": tied(12, module=True, gathers=True, sequence_parallel=True),
}


def compare(group, name):
    """Check that the whole made of the ranks' parts is what the undivided module has; its start to the last bit."""
    found = gather(group, CASES[name](group))
    for key, (expected, dim) in CASES[name](None).items():
        parts = [rank[key][0] for rank in found]
        assert {rank[key][1] for rank in found} == {dim}
        assert dim != ALIKE or all(torch.equal(one, parts[0]) for one in parts)
        got = parts[0] if dim == ALIKE else sum(parts) if dim == SUM else torch.cat(parts, dim)
        assert got.dtype == expected.dtype
        if key.startswith(("start", "random state", "bias left")):
            assert torch.equal(got, expected), key
        else:
            tight = {"rtol": 1e-12, "atol": 1e-12} if got.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(got, expected, **tight, msg=lambda said, key=key: f"{key}: {said}")


@pytest.mark.parametrize("name", CASES)
def test_as_undivided(group, name):
    compare(group, name)


@of_four
@pytest.mark.parametrize("name", ("column, sequence", "row, sequence"))
def test_in_groups_of_two_of_four(group, name):
    compare(halves(), name)


def test_the_undivided_start_is_torchs():
    torch.manual_seed(5)
    layer = ColumnParallelLinear(12, 16)
    torch.manual_seed(5)
    assert torch.equal(layer.weight, torch.nn.Linear(12, 16).weight)


def test_ids_of_nobody(group):
    """Unchecked, as on a GPU, rows are NaN on all ranks, without a gradient."""
    layer, _ = made(lambda: VocabParallelEmbedding(11, K, tp_group=group))
    ids = torch.tensor([2, -1, 10, 11, 7])
    with mock.patch.object(embedding_op, "_ids_are_sound", return_value=False):
        y = layer(ids)
    y.backward(torch.tensor([1.0, torch.nan, 2.0, torch.nan, 3.0]).unsqueeze(-1).expand(5, K))
    assert y.isnan().all(1).tolist() == [False, True, False, True, False]
    assert torch.cat(gather(group, layer.weight.grad))[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 3, 0, 0, 2]
    with onepass.validate(), pytest.raises(IndexError, match=r"^ids must be from 0 to 10"):
        layer(ids)


def test_a_copy_has_the_same_group(group):
    layer, _ = made(lambda: RowParallelLinear(K, N, tp_group=group, sequence_parallel=True))
    other = copy.deepcopy(nn.Sequential(layer))[0]
    assert other.tp_group is group and other.weight is not layer.weight and other.bias.sequence_parallel is True
    assert other.weight.tensor_model_parallel is True and other.weight.partition_dim == 1
    x = part(numbers(S, B, K).float(), -1, group)
    assert torch.equal(other(x)[0], layer(x)[0])


@of_two
def test_compiled_without_a_break(group):
    def case(compiling):
        table, _ = made(lambda: VocabParallelEmbedding(11, K, tp_group=group, reduce_scatter_embeddings=True))
        options = {"tp_group": group, "sequence_parallel": True}
        (up, down), _ = made(lambda: nn.ModuleList([ColumnParallelLinear(K, 24, **options), RowParallelLinear(24, K, **options)]))
        table.weight.main_grad = torch.zeros_like(table.weight)

        def function(ids):
            return down(nn.functional.gelu(up(table(ids))[0]))[0] * 1

        ids = ids_of(B, S, rows=11)
        y = (torch.compile(function, backend="aot_eager", fullgraph=True) if compiling else function)(ids)
        y.backward(part(numbers(S, B, K).float(), 0, group))
        return [y.detach(), table.weight.main_grad, *(parameter.grad for layer in (up, down) for parameter in layer.parameters())]

    for mine, eager in zip(case(True), case(False), strict=True):
        torch.testing.assert_close(mine, eager)


def test_errors_say_what_to_do_before_anything_is_sent(group):
    ranks, x, tp = group.size(), torch.ones(S, B, K), {"tp_group": group}
    column, row = ColumnParallelLinear(K, N, **tp), RowParallelLinear(K, N, **tp)
    table, sent = VocabParallelEmbedding(11, K, reduce_scatter_embeddings=True, **tp), AssertionError("something was sent")
    with (
        mock.patch.object(linear, "linear", side_effect=sent),
        mock.patch.object(embedding, "reduce_scatter_sequence", side_effect=sent),
    ):
        said = error_of(ColumnParallelLinear, K, ranks * 4 + 1, **tp)
        assert said == f"output_size must be a multiple of {ranks}, the size of tp_group, but is {ranks * 4 + 1}"
        said = error_of(ColumnParallelLinear, K, ranks, stride=2, **tp)
        assert said == f"output_size must be a multiple of {2 * ranks}, the size of tp_group times stride, but is {ranks}"
        said = error_of(RowParallelLinear, ranks * 4 + 1, N, **tp)
        assert said == f"input_size must be a multiple of {ranks}, the size of tp_group, but is {ranks * 4 + 1}"
        said = error_of(row, x)
        assert said.startswith(f"x's last dimension must be {K // ranks}, this rank's part of input_size, but x has")
        for layer, short in ((RowParallelLinear(K, N, input_is_parallel=False, **tp), K // ranks), (column, K - 1)):
            assert error_of(layer, x[..., :short]).startswith(f"x's last dimension must be {K}, input_size, but x has shape")
        said = error_of(column, x, torch.ones(N, K))
        assert said == f"weight must have shape {(N // ranks, K)}, this rank's part, but has {(N, K)}"
        said = error_of(table, ids_of(B, S + 1, rows=11))
        assert said.startswith("ids must have shape [batch, sequence] for reduce_scatter_embeddings, its sequence a multiple")
        said = error_of(ColumnParallelLinear, K, N, tp_group=dist.GroupMember.NON_GROUP_MEMBER)
        assert said.startswith("tp_group must be None or a torch.distributed.ProcessGroup that has this rank, but is ")
    shown = repr(ColumnParallelLinear(K, N, sequence_parallel=True, **tp))
    assert shown == f"ColumnParallelLinear({K}, {N}, bias=True, tp={ranks}, sequence_parallel=True)"
    where = f"vocab_range={range_of(11, group.rank(), ranks)}, tp={ranks}, reduce_scatter_embeddings=True"
    assert repr(table) == f"VocabParallelEmbedding(11, {K}, {where})"


@pytest.mark.parametrize("size", (1, 4, 5, 11, 12))
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_parts_are_torchs_chunks(size, ranks):
    whole = torch.randn(3, size)
    parts = [part_of(whole, Division(1, size), rank, ranks) for rank in range(ranks)]
    chunks = whole.chunk(ranks, 1)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, chunks, strict=False))
    assert not any(mine.numel() for mine in parts[len(chunks) :])


@pytest.mark.parametrize("ranks", (1, 2))
def test_blocks_may_differ_in_size(ranks):
    """Of queries, keys and values each rank has its part."""
    whole = torch.arange(16)
    division = Division(0, 16, 3, (8, 4, 4))
    parts = [part_of(whole, division, rank, ranks) for rank in range(ranks)]
    expected = [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]] if ranks == 2 else [list(range(16))]
    assert [part.tolist() for part in parts] == expected


# ---- checkpoints ----


def model(group, seed=5):
    """Return the modules that are saved to and loaded from checkpoints."""
    device = torch.get_default_device()
    torch.manual_seed(seed)
    with torch.device("cpu"):  # the test and all ranks draw alike
        made = nn.ModuleDict({
            "embedding": VocabParallelEmbedding(11, K, tp_group=group),
            "few": VocabParallelEmbedding(5, K, tp_group=group, dtype=torch.bfloat16),
            "norm": LayerNorm(K),
            "up": ColumnParallelLinear(K, N, stride=2, tp_group=group),
            "down": RowParallelLinear(N, K, tp_group=group),
        })  # fmt: skip
        nn.init.normal_(made["norm"].weight)
    return made.to(device)


def divided(state, rank, ranks):
    """Return what a rank has of the undivided model's state."""
    divisions = {
        "embedding.weight": Division(0, 11),
        "few.weight": Division(0, 5),
        "up.weight": Division(0, 16, 2),
        "up.bias": Division(0, 16, 2),
        "down.weight": Division(1, 16),
    }
    return {key: part_of(t, divisions[key], rank, ranks) if key in divisions else t for key, t in state.items()}


def save(group, folder, of_halves=False):
    dcp.save(sharded_state_dict(model(halves() if of_halves else group)), checkpoint_id=folder)


def load(group, folder):
    parts = model(group, seed=9)
    dcp.load(sharded_state_dict(parts), checkpoint_id=folder)
    return parts.state_dict()


@of_four
def test_four_ranks_load_what_two_saved(world, tmp_path):
    pair = World(world.backend, 2)
    pair.run(save, str(tmp_path))
    pair.close()
    whole = model(None).state_dict()
    for rank, mine in enumerate(world.run(load, str(tmp_path))):
        expected = divided(whole, rank, 4)
        assert set(mine) == set(expected)
        assert all(torch.equal(mine[key], t) for key, t in expected.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_one_rank_loads_what_ranks_saved(world, tmp_path):
    whole = model(None).state_dict()
    for of_halves in (False, True)[: len(world) // 2]:
        folder = str(tmp_path / str(of_halves))
        world.run(save, folder, of_halves)
        one = model(None, seed=9)
        dcp.load(sharded_state_dict(one), checkpoint_id=folder, no_dist=True)
        assert all(torch.equal(one.state_dict()[key], t) for key, t in whole.items())
