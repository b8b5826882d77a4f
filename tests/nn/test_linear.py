"""nn's linear layers and embedding on one rank: torch.nn's parameters, start and numbers, main_grad, marks, errors."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from onepass.nn import ColumnParallelLinear, Linear, RowParallelLinear, VocabParallelEmbedding, sharded_state_dict
from onepass.ops.embedding import embedding as embedding_op
from onepass.testing.poison import unchanged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINEARS = pytest.mark.parametrize("kind", (Linear, ColumnParallelLinear, RowParallelLinear))
def seeded(make, seed=5):
    torch.manual_seed(seed)
    return make()


def gathering(module):
    for parameter in module.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter, dtype=torch.float32), False
    return module


def output(found):
    return found[0] if isinstance(found, tuple) else found


def equal(state, other):
    return list(state) == list(other) and all(torch.equal(state[key], other[key]) for key in state)


# ---- linear layers ----


@LINEARS
@pytest.mark.parametrize("bias", (True, False))
def test_a_linear_layer_is_torchs(kind, bias):
    ours = seeded(lambda: kind(12, 20, bias=bias, device=DEVICE))
    theirs = seeded(lambda: nn.Linear(12, 20, bias=bias, device=DEVICE))
    assert equal(ours.state_dict(), theirs.state_dict())
    x = torch.randn(3, 5, 12, device=DEVICE)
    mine, yours = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = output(ours(mine)), theirs(yours)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(mine.grad, yours.grad)
    for got, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


@LINEARS
def test_state_dicts_are_exchanged(kind):
    ours, theirs = kind(12, 20, dtype=torch.float64), nn.Linear(12, 20, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    assert equal(ours.state_dict(), theirs.state_dict())
    seeded(ours.reset_parameters)
    theirs.load_state_dict(ours.state_dict())
    assert equal(ours.state_dict(), theirs.state_dict())


@LINEARS
def test_gradients_go_into_main_grad(kind):
    layer = gathering(kind(12, 20, device=DEVICE))
    x, dy = torch.randn(6, 12, device=DEVICE), torch.randn(6, 20, device=DEVICE)
    for _ in range(2):
        output(layer(x)).backward(dy)
        assert all(parameter.grad_added_to_main_grad for parameter in layer.parameters())
    torch.testing.assert_close(layer.weight.main_grad, 2 * dy.T @ x)
    torch.testing.assert_close(layer.bias.main_grad, 2 * dy.sum(0))
    assert not any(parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("kind", (ColumnParallelLinear, RowParallelLinear))
def test_a_bias_left_to_the_caller_comes_back(kind):
    x = torch.randn(4, 8)
    layer = kind(8, 6, skip_bias_add=True)
    y, bias = layer(x)
    assert bias is layer.bias
    torch.testing.assert_close(y, x @ layer.weight.T)
    assert kind(8, 6)(x)[1] is None
    assert kind(8, 6, bias=False, skip_bias_add=True)(x)[1] is None


@pytest.mark.parametrize("kind", (ColumnParallelLinear, RowParallelLinear))
def test_an_init_method_makes_the_weight_and_the_bias_is_zeros(kind):
    layer = kind(8, 6, init_method=lambda weight: weight.fill_(3.0))
    assert (layer.weight == 3).all() and not layer.bias.any()


def test_another_modules_weight():
    layer = ColumnParallelLinear(8, 6, skip_weight_param_allocation=True)
    assert list(layer.state_dict()) == ["bias"]
    weight, x = nn.Parameter(torch.randn(6, 8)), torch.randn(4, 8)
    torch.testing.assert_close(layer(x, weight)[0], F.linear(x, weight, layer.bias))
    with pytest.raises(ValueError, match="weight must be given with the call"):
        layer(x)
    with pytest.raises(ValueError, match=r"weight must have shape \(6, 8\), this rank's part, but has \(8, 6\)"):
        layer(x, weight.T)
    own = ColumnParallelLinear(8, 6, bias=False)
    torch.testing.assert_close(own(x, weight=weight)[0], x @ weight.T)


def test_one_rank_alone_has_the_whole_sequence():
    layer = RowParallelLinear(8, 6, sequence_parallel=True)
    assert layer.sequence_parallel is False and layer.bias.sequence_parallel is False
    assert ColumnParallelLinear(8, 6, sequence_parallel=True)(torch.ones(3, 8))[0].shape == (3, 6)


def _marks(parameter):
    return parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride


def _all_marked(column, row, embedding):
    assert _marks(column.weight) == _marks(column.bias) == (True, 0, 2)
    assert _marks(row.weight) == (True, 1, 1) and not hasattr(row.bias, "tensor_model_parallel")
    assert row.bias.sequence_parallel is False
    assert _marks(embedding.weight) == (True, 0, 1)


def test_parameters_carry_megatrons_marks():
    modules = nn.ModuleList([ColumnParallelLinear(8, 6, stride=2), RowParallelLinear(8, 6), VocabParallelEmbedding(5, 4)])
    _all_marked(*modules)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ColumnParallelLinear(0, 4), "input_size must be a size of at least 1, but is 0"),
        (lambda: RowParallelLinear(4, -1), "output_size must be a size of at least 1, but is -1"),
        (lambda: ColumnParallelLinear(4, 6, stride=0), "stride must be a size of at least 1, but is 0"),
        (lambda: ColumnParallelLinear(4, 7, stride=2), "output_size must be a multiple of 2, the size of tp_group times stride"),
        (lambda: ColumnParallelLinear(4, 6, stride=(4, 1)), r"stride must be blocks of 6 together, output_size, but is \[4, 1\]"),
        (lambda: ColumnParallelLinear(4, 6, stride=(6, 0)), r"stride\[1\] must be a size of at least 1, but is 0"),
        (
            lambda: ColumnParallelLinear(4, 6, gather_output=True, sequence_parallel=True),
            "gather_output and sequence_parallel exclude each other",
        ),
        (
            lambda: ColumnParallelLinear(4, 6, gather_output=True, skip_bias_add=True),
            "gather_output and skip_bias_add exclude each other",
        ),
        (lambda: ColumnParallelLinear(4, 6, gather_output=True, stride=2), "gather_output and stride exclude each other"),
        (
            lambda: ColumnParallelLinear(4, 6, stride=2)(torch.ones(4), runtime_gather_output=True),
            "runtime_gather_output and stride exclude each other",
        ),
        (
            lambda: ColumnParallelLinear(4, 6, allreduce_dgrad=True, sequence_parallel=True),
            "allreduce_dgrad and sequence_parallel exclude each other",
        ),
        (
            lambda: RowParallelLinear(4, 6, input_is_parallel=False, sequence_parallel=True),
            "sequence_parallel needs input_is_parallel=True",
        ),
        (lambda: ColumnParallelLinear(4, 6, init_method="normal"), "init_method must be a function of the weight or None"),
        (lambda: VocabParallelEmbedding(4, 6, init_method=1.0), "init_method must be a function of the weight or None"),
        (lambda: ColumnParallelLinear(4, 6, tp_group=-100), "tp_group must be None or a torch.distributed.ProcessGroup"),
        (lambda: VocabParallelEmbedding(4, 6, tp_group="tp"), "tp_group must be None or a torch.distributed.ProcessGroup"),
        (lambda: VocabParallelEmbedding(0, 6), "num_embeddings must be a size of at least 1, but is 0"),
        (lambda: VocabParallelEmbedding(4, 6.0), "embedding_dim must be a size of at least 1, but is 6.0"),
        (lambda: Linear(4, 6)(torch.ones(2, 5)), r"x's last dimension must be 4, in_features, but x has shape \(2, 5\)"),
        (lambda: ColumnParallelLinear(4, 6)(torch.ones(())), r"x's last dimension must be 4, input_size, but x has shape \(\)"),
        (lambda: RowParallelLinear(4, 6)(torch.ones(2, 5)), "x's last dimension must be 4, this rank's part of input_size"),
        (lambda: Linear(4, 6)([1.0] * 4), "x must be a tensor, but is a list"),
        (lambda: Linear(4, 6)(torch.ones(2, 4).double()), "weight must have x's type torch.float64"),
        (lambda: VocabParallelEmbedding(4, 6)(torch.ones(3)), "ids must be an int32 or int64 tensor, but is of torch.float32"),
        (lambda: VocabParallelEmbedding(4, 6)([1, 2]), "ids must be an int32 or int64 tensor, but is a list"),
        (lambda: VocabParallelEmbedding(4, 6)(torch.ones(3, dtype=torch.long, device="meta")), "ids must be on cpu, as weight"),
        (lambda: VocabParallelEmbedding(4, 6)(torch.tensor([0, 4])), "ids must be from 0 to 3, the rows of the vocabulary, but"),
        (lambda: VocabParallelEmbedding(4, 6)(torch.tensor([-1, 3])), "ids must be from 0 to 3, .* but are from -1 to 3"),
        (
            lambda: VocabParallelEmbedding(4, 6, reduce_scatter_embeddings=True)(torch.tensor([1, 2])),
            r"ids must have shape \[batch, sequence\] for reduce_scatter_embeddings",
        ),
    ],
)
def test_errors_say_what_to_do(make, words):
    with pytest.raises((ValueError, TypeError, IndexError), match=words):
        make()


def test_reprs():
    column = ColumnParallelLinear(8, 4, bias=False, skip_bias_add=True)
    assert repr(column) == "ColumnParallelLinear(8, 4, bias=False, tp=1, skip_bias_add=True)"
    assert repr(RowParallelLinear(8, 4, input_is_parallel=False)) == (
        "RowParallelLinear(8, 4, bias=True, tp=1, input_is_parallel=False)"
    )
    assert repr(VocabParallelEmbedding(8, 4)) == "VocabParallelEmbedding(8, 4)"
    assert repr(Linear(8, 4)) == repr(nn.Linear(8, 4))


def test_a_sharded_state_dict_of_one_rank_is_plain_and_shares_the_memory():
    model = nn.Sequential(ColumnParallelLinear(8, 6, stride=2), RowParallelLinear(3, 8), nn.LayerNorm(8))
    assert set(sharded_state_dict(model[1], prefix="the_")) == {"the_weight", "the_bias"}
    state = sharded_state_dict(model, prefix="model.")
    column = ["model.0.weight.0", "model.0.weight.1", "model.0.bias.0", "model.0.bias.1"]
    assert set(state) == {*column, *(f"model.{at}.{name}" for at in (1, 2) for name in ("weight", "bias"))}
    torch.testing.assert_close(torch.cat([state["model.0.weight.0"], state["model.0.weight.1"]]), model[0].weight.detach())
    for value in state.values():
        assert type(value) is torch.Tensor and not value.requires_grad
        value.fill_(2.0)
    assert all((parameter == 2).all() for parameter in model.parameters())


# ---- the embedding ----


def tokens(*shape, rows=11):
    return torch.randint(rows, shape, device=DEVICE)


def as_on_a_gpu():
    """Ids are not looked at."""
    return mock.patch.object(embedding_op, "_ids_are_sound", return_value=False)


@pytest.mark.parametrize("looked", (True, False))
@pytest.mark.parametrize("shape", ((), (0,), (7,), (3, 50)), ids=str)
def test_the_embedding_is_torchs(shape, looked):
    ours = seeded(lambda: VocabParallelEmbedding(11, 6, device=DEVICE))
    theirs = seeded(lambda: nn.Embedding(11, 6, device=DEVICE))
    assert equal(ours.state_dict(), theirs.state_dict())
    ids = tokens(*shape)
    with unchanged(ids=ids), as_on_a_gpu() if not looked else contextlib.nullcontext():
        y = ours(ids)
    expected = theirs(ids)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    with unchanged(dy=dy):
        y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_where_there_are_no_values_to_look_at():
    assert VocabParallelEmbedding(11, 6, device="meta")(torch.ones(3, dtype=torch.long, device="meta")).shape == (3, 6)
    with FakeTensorMode():
        assert VocabParallelEmbedding(11, 6)(torch.ones(3, dtype=torch.long)).shape == (3, 6)
    layer, ids = VocabParallelEmbedding(11, 6), torch.tensor([[1, 2], [3, 1]])
    assert torch.equal(torch.vmap(layer)(ids), layer(ids))


def test_the_sequence_comes_first_where_it_is_to_be_scattered():
    layer, ids = VocabParallelEmbedding(11, 6, reduce_scatter_embeddings=True), torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(layer(ids), layer.weight[ids].transpose(0, 1))
