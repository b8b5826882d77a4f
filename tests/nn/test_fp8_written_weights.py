"""Whichever way a weight is written, the next call in eight bits sees it: its results are those of a layer made fresh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onepass
from onepass import FP8Recipe
from onepass.kernels.language import triton
from onepass.ops.linear.grouped import grouped_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N, K, TOKENS = 48, 64, 20
EXPERTS = 2
ENDS = torch.tensor([7, TOKENS], dtype=torch.int32, device=DEVICE)
RECIPES = {"delayed": FP8Recipe(), "current": FP8Recipe(scaling="current"), "row": FP8Recipe(scaling="row")}
needs_gloo = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")


# ---- what is called ----


class Experts(nn.Module):
    def __init__(self, precision):
        super().__init__()
        self.precision, self.weight = precision, nn.Parameter(torch.empty(EXPERTS, N, K, device=DEVICE))

    def forward(self, x):
        return grouped_linear(x, self.weight, ENDS, self.precision)


def linear(precision):
    return onepass.nn.Linear(K, N, bias=False, precision=precision, device=DEVICE)


def norm_linear(precision):
    return onepass.nn.NormLinear(K, N, bias=False, precision=precision, device=DEVICE)


def compiled(precision):
    torch._dynamo.reset()
    layer = linear(precision)
    layer.compile(backend="aot_eager", fullgraph=True)
    return layer


def sharded(precision):
    from torch.distributed.fsdp import fully_shard

    mesh, layer = dist.init_device_mesh(DEVICE.type, (1,)), linear(precision)
    layer.root = [fully_shard(nn.Sequential(fully_shard(layer, mesh=mesh)), mesh=mesh)]
    return layer


def call(layer, x):
    """Call what is called in a model: a root of fully_shard stays whole after forward, its layers don't."""
    return layer.root[0](x) if hasattr(layer, "root") else layer(x)


KINDS = {"linear": linear, "norm": norm_linear, "experts": Experts}
CASES = [*(("linear", scaling) for scaling in RECIPES), ("norm", "delayed"), ("experts", "row")]


@pytest.fixture(scope="module")
def one_rank():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()
    else:
        yield


# ---- ways to write a weight; `new` is of its type: a DTensor under fully_shard ----


@torch.no_grad()
def copied(layer, new):
    layer.weight.copy_(new)


def data_copied(layer, new):
    layer.weight.data.copy_(new)


def data_stepped(layer, new):
    """As optimizers step that are none of torch's."""
    layer.weight.data.sub_(layer.weight.data - new)
    layer.weight.data.copy_(new)  # what rounding left


def data_replaced(layer, new):
    layer.weight.data = new.clone()


def data_swapped(layer, new):
    """As averages of weights are put in place and taken out."""
    average = nn.Parameter(new.clone())
    layer.weight.data, average.data = average.data, layer.weight.data


def loaded(layer, new):
    layer.load_state_dict({**layer.state_dict(), "weight": new})


def assigned(layer, new):
    layer.load_state_dict({**layer.state_dict(), "weight": new}, assign=True)


def set_by_checkpoint(layer, new):
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(layer, {**layer.state_dict(), "weight": new})


def by_numpy(layer, new):
    local(layer.weight).detach().numpy()[...] = local(new).numpy()


def by_memory(layer, new):
    """As a shard is written by who knows where it lies."""
    local(layer.weight).detach().untyped_storage().copy_(local(new).untyped_storage())


def tensors_swapped(layer, new):
    torch.utils.swap_tensors(layer.weight, nn.Parameter(new.clone()))


def module_swapped(layer, new):
    layer.weight = nn.Parameter(new.clone())


def from_vector(layer, new):
    others = [p for p in layer.parameters() if p is not layer.weight]
    nn.utils.vector_to_parameters(torch.cat([new.flatten(), *(p.detach().flatten() for p in others)]), [layer.weight, *others])


def optimizer_stepped(layer, new):
    layer.weight.grad = layer.weight.detach() - new
    torch.optim.SGD([layer.weight], lr=1.0).step()
    with torch.no_grad():
        layer.weight.copy_(new)  # what rounding left


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


SHARDED = (copied, data_copied, data_stepped, loaded, set_by_checkpoint, by_numpy, by_memory, optimizer_stepped)
WRITES = (*SHARDED, data_replaced, data_swapped, assigned, tensors_swapped, module_swapped, from_vector)


# ---- moments ----


def run(layer, x, dy):
    """Return y, and the gradients of x and the weight."""
    x = x.clone().requires_grad_()
    y = call(layer, x)
    layer.weight.grad = None
    y.backward(dy)
    return y.detach(), x.grad, local(layer.weight.grad)


def without_gradients(layer, x, dy):
    for _ in range(2):
        with torch.no_grad():
            call(layer, x)


def after_a_backward(layer, x, dy):
    run(layer, x, dy)


def between_microbatches(layer, x, dy):
    for _ in range(3):
        run(layer, x, dy)


def after_steps(layer, x, dy):
    for _ in range(2):
        run(layer, x, dy)
        optimizer_stepped(layer, layer.weight.detach() * 1.5)


MOMENTS = without_gradients, after_a_backward, between_microbatches, after_steps


def drawn(like):
    return torch.randn(like.shape, device=DEVICE) / 8


def like(parameter, values):
    if not hasattr(parameter, "to_local"):
        return values
    return dist.tensor.distribute_tensor(values, parameter.device_mesh, parameter.placements)


def check(make, fresh, precision, write, moment, factor):
    """Assert that after `moment` and `write` all results are those of a layer that never had other numbers."""
    torch.manual_seed(0)
    layer = make(precision)
    x, dy = torch.randn(TOKENS, K, device=DEVICE), torch.randn(TOKENS, N, device=DEVICE)
    old, new = drawn(layer.weight), drawn(layer.weight) * factor
    copied(layer, like(layer.weight, old))
    moment(layer, x, dy)
    write(layer, like(layer.weight, new.clone()))
    with torch.no_grad():
        evaluated = call(layer, x)
    found = run(layer, x, dy)
    other = fresh(precision)
    copied(other, new)
    expected = run(other, x, dy)
    assert expected[0].equal(evaluated)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("kind", "scaling"), CASES, ids=str)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_written_weight_is_seen(write, kind, scaling, by_formula):
    if DEVICE.type == "cuda" and write is by_numpy:
        pytest.skip("numpy sees no memory of a GPU")
    for moment in MOMENTS:
        check(KINDS[kind], KINDS[kind], RECIPES[scaling], write, moment, 30.0)


@pytest.mark.parametrize("write", (data_copied, by_memory), ids=lambda write: write.__name__)
def test_a_written_weight_is_seen_by_a_graph(write, by_formula):
    check(compiled, linear, RECIPES["delayed"], write, after_a_backward, 30.0)


@pytest.mark.parametrize("factor", (1.0, 1 / 30))
@pytest.mark.parametrize("write", (data_copied, copied), ids=lambda write: write.__name__)
def test_a_scale_follows_up_and_down(write, factor, by_formula):
    for moment in MOMENTS:
        check(linear, linear, RECIPES["delayed"], write, moment, factor)


@pytest.mark.parametrize("scaling", RECIPES)
@pytest.mark.parametrize("kind", (*KINDS.values(), compiled), ids=lambda kind: kind.__name__)
def test_an_evaluation_of_other_weights_between_forward_and_backward(kind, scaling, by_formula):
    """As an average that is swapped in and out: backward has the scale that its own forward had."""
    if kind is Experts and scaling != "row":
        pytest.skip("experts have a scale a row")
    torch.manual_seed(0)
    layer, fresh = (kind(RECIPES[scaling]) for _ in range(2))
    x, dy, weight = torch.randn(TOKENS, K, device=DEVICE), torch.randn(TOKENS, N, device=DEVICE), drawn(layer.weight)
    for each in (layer, fresh):
        copied(each, weight)
    average, own = nn.Parameter(weight / 30), x.clone().requires_grad_()
    y = call(layer, own)
    data_swapped(layer, average)
    with torch.no_grad():
        call(layer, x)
    layer.weight.data = weight.clone()
    y.backward(dy)
    expected = run(fresh, x, dy)
    assert own.grad.equal(expected[1]) and layer.weight.grad.equal(expected[2])


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("kind", ("linear", "norm"))
def test_by_kernels(kind):
    with onepass.use_backend("triton"):
        check(KINDS[kind], KINDS[kind], RECIPES["delayed"], data_copied, after_steps, 30.0)


@needs_gloo
@pytest.mark.parametrize("scaling", RECIPES)
@pytest.mark.parametrize("write", SHARDED, ids=lambda write: write.__name__)
def test_a_written_shard_is_seen(write, scaling, by_formula, one_rank):
    if DEVICE.type == "cuda":
        pytest.skip("gloo gathers no shards of a GPU")
    for moment in MOMENTS:
        check(sharded, linear, RECIPES[scaling], write, moment, 30.0)
