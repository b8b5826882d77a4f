"""Ranks of tests/parallel/test_parallel_modules.py: run tensor-parallel modules, and save the results for the tests.

A case makes its modules from one seed and runs them. With each result it returns how the ranks' parts make the whole: the
dimension to concatenate along, ALIKE if all ranks have the whole, or SUM. Without a group it runs the undivided module.
"""

import copy
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel.meeting import drawn, join
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
from onepass.ops.embedding import embedding as embedding_op

S, B, K, N = 8, 2, 12, 16  # sequence, batch, and the features of x and of y
ALIKE, SUM = "alike", "sum"


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    world = dist.group.WORLD
    found = {name: case(world) for name, case in CASES.items()}
    found["undivided"] = {name: case(None) for name, case in CASES.items()} if rank == 0 else {}
    found["errors"] = errors(world)
    found["nobody's ids"] = ids_of_nobody(world)
    found["copied"] = copied(world)
    if ranks == 2:
        found["compiled"] = compiled(world)
        dcp.save(sharded_state_dict(model(world)), checkpoint_id=f"{folder}/saved by 2")
    else:
        pairs = [dist.new_group(those) for those in ([0, 1], [2, 3])]
        halves = model(world, seed=9)
        dcp.load(sharded_state_dict(halves), checkpoint_id=f"{folder}/saved by 2")
        found["loaded"] = halves.state_dict()
        dcp.save(sharded_state_dict(model(world)), checkpoint_id=f"{folder}/saved by 4")
        dcp.save(sharded_state_dict(model(pairs[rank // 2])), checkpoint_id=f"{folder}/saved by 2 pairs")
        found["pair"] = CASES["mlp, sequence"](pairs[rank // 2])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


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


class MLP(nn.Module):
    def __init__(self, group, activation, sequence_parallel, fused):
        super().__init__()
        options = {"tp_group": group, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
        gated = activation == "swiglu"
        self.activation = activation
        self.up = ColumnParallelLinear(K, (1 + gated) * 24, stride=1 + gated, skip_bias_add=fused, **options)
        self.down = RowParallelLinear(24, K, **options)

    def forward(self, x):
        h, bias = self.up(x)
        if bias is None:
            return self.down(nn.functional.gelu(h))[0]
        return self.down(onepass.bias_activation(h, bias, self.activation, backend="torch"))[0]


def mlp(activation="gelu", sequence_parallel=False, fused=True):
    def case(group):
        block, state = made(lambda: MLP(group, activation, sequence_parallel, fused))
        dims = {"down.weight": 1}
        if activation == "gelu":
            dims |= {"up.weight": 0, "up.bias": 0}
        else:  # None: a rank has a part of each half, which the test can't simply concatenate
            dims |= {"up.weight": None, "up.bias": None}
        found = starts(block, state, dims)
        divided = 0 if sequence_parallel else ALIKE
        x = part(numbers(S, B, K), divided, group).requires_grad_()
        y = block(x)
        y.backward(part(numbers(S, B, K) + 1, divided, group))
        summed = dims | ({"down.bias": SUM} if sequence_parallel else {})
        found |= {"y": (y.detach(), divided), "dx": (x.grad, divided)} | grads(block, summed)
        return {name: (t, dim) for name, (t, dim) in found.items() if dim is not None}

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
    "mlp": mlp(),
    "mlp, unfused": mlp(fused=False),
    "mlp, sequence": mlp(sequence_parallel=True),
    "mlp, gated": mlp("swiglu"),
    "mlp, gated, sequence": mlp("swiglu", sequence_parallel=True),
    "tied": tied(11, module=False, gathers=False),
    "tied, main_grad": tied(11, module=False, gathers=True),
    "tied module, main_grad": tied(12, module=True, gathers=True),
    "tied module, sequence, main_grad": tied(12, module=True, gathers=True, sequence_parallel=True),
}


def model(group, seed=5):
    """Return the modules that are saved to and loaded from checkpoints."""
    device = torch.get_default_device()
    torch.manual_seed(seed)
    with torch.device("cpu"):  # the test draws the same random numbers
        made = nn.ModuleDict({
            "embedding": VocabParallelEmbedding(11, K, tp_group=group),
            "few": VocabParallelEmbedding(5, K, tp_group=group, dtype=torch.bfloat16),
            "norm": LayerNorm(K),
            "up": ColumnParallelLinear(K, N, stride=2, tp_group=group),
            "down": RowParallelLinear(N, K, tp_group=group),
        })  # fmt: skip
        nn.init.normal_(made["norm"].weight)
    return made.to(device)


def ids_of_nobody(group):
    """Look up ids outside the table, unchecked as on a GPU: rows are NaN on all ranks, without a gradient."""
    layer, _ = made(lambda: VocabParallelEmbedding(11, K, tp_group=group))
    ids = torch.tensor([2, -1, 10, 11, 7])
    with mock.patch.object(embedding_op, "_ids_are_sound", return_value=False):
        y = layer(ids)
    y.backward(torch.tensor([1.0, torch.nan, 2.0, torch.nan, 3.0]).unsqueeze(-1).expand(5, K))
    try:
        with onepass.validate():
            layer(ids)
    except IndexError as error:
        said = str(error)
    return {"y": y.detach(), "dweight": layer.weight.grad, "said": said}


def copied(group):
    """Whether a deep copy computes the same. Assert that it keeps the group and the parameters' attributes."""
    layer, _ = made(lambda: RowParallelLinear(K, N, tp_group=group, sequence_parallel=True))
    other = copy.deepcopy(nn.Sequential(layer))[0]
    assert other.tp_group is group and other.weight is not layer.weight and other.bias.sequence_parallel is True
    assert other.weight.tensor_model_parallel is True and other.weight.partition_dim == 1
    x = part(numbers(S, B, K).float(), -1, group)
    return torch.equal(other(x)[0], layer(x)[0])


def compiled(group):
    def case(compiling):
        table, _ = made(lambda: VocabParallelEmbedding(11, K, tp_group=group, reduce_scatter_embeddings=True))
        block, _ = made(lambda: MLP(group, "gelu", True, True).float())
        table.weight.main_grad = torch.zeros_like(table.weight)

        def function(ids):
            return block(table(ids)) * 1

        ids = ids_of(B, S, rows=11)
        y = (torch.compile(function, backend="aot_eager", fullgraph=True) if compiling else function)(ids)
        y.backward(part(numbers(S, B, K).float(), 0, group))
        return [y.detach(), table.weight.main_grad, *(parameter.grad for parameter in block.parameters())]

    return case(True), case(False)


def errors(group):
    said = []
    ranks, x = group.size(), torch.ones(S, B, K)
    row = RowParallelLinear(K, N, tp_group=group)
    table = VocabParallelEmbedding(11, K, tp_group=group, reduce_scatter_embeddings=True)

    def attempt(function):
        try:
            function()
        except (ValueError, TypeError) as error:
            said.append(str(error))

    sent = AssertionError("something was sent")
    with (
        mock.patch.object(linear, "linear", side_effect=sent),
        mock.patch.object(embedding, "reduce_scatter_sequence", side_effect=sent),
    ):
        attempt(lambda: ColumnParallelLinear(K, ranks * 4 + 1, tp_group=group))
        attempt(lambda: ColumnParallelLinear(K, ranks, stride=2, tp_group=group))
        attempt(lambda: RowParallelLinear(ranks * 4 + 1, N, tp_group=group))
        attempt(lambda: row(x))
        attempt(lambda: RowParallelLinear(K, N, tp_group=group, input_is_parallel=False)(x[..., : K // ranks]))
        attempt(lambda: ColumnParallelLinear(K, N, tp_group=group)(x[..., :-1]))
        attempt(lambda: ColumnParallelLinear(K, N, tp_group=group)(x, torch.ones(N, K)))
        attempt(lambda: table(ids_of(B, S + 1, rows=11)))
        attempt(lambda: ColumnParallelLinear(K, N, tp_group=dist.GroupMember.NON_GROUP_MEMBER))
    said.append(repr(ColumnParallelLinear(K, N, tp_group=group, sequence_parallel=True)))
    said.append(repr(table))
    return said
