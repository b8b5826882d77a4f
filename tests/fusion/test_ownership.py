"""What the caller gets has memory of its own: who writes to an output, an input or a gradient changes nothing else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fusion.programs import check
from torch import nn

import onepass
from onepass.fusion.graph_inputs import with_stable_addresses

pytestmark = pytest.mark.usefixtures("machine")
F64 = torch.float64
compilers = pytest.mark.parametrize("compiler", ["none", pytest.param("inductor", marks=pytest.mark.slow)])


def randn(*sizes, grad=False):
    return torch.randn(*sizes, dtype=F64, requires_grad=grad)


def same_after(program, fn, **options):
    """Assert that `program`, given the function, returns the same with the fused one."""
    found = []
    for each in (fn, onepass.fuse(fn, **options)):
        torch.manual_seed(0)
        found.append(program(each))
    torch.testing.assert_close(*found)


# ---- a cat of slices, or of lanes, is a copy ----


@compilers
def test_a_cat_of_an_inputs_slices(compiler):
    def program(fn):
        x = randn(6, 2)
        y = fn(x)
        y.zero_()
        return x

    same_after(program, lambda x: torch.cat(x.chunk(3)[1:]), compiler=compiler)


@compilers
def test_an_input_written_behind_the_cat_of_its_slices(compiler):
    def written(x):
        y = torch.cat(x.chunk(2))
        x.add_(1)
        return y

    same_after(lambda fn: fn(randn(6, 2)), written, compiler=compiler)


@compilers
def test_lanes_beside_their_cat(compiler):
    def beside(x):
        lanes = [torch.sin(p) for p in x.chunk(2)]
        return torch.cat(lanes), torch.cat(lanes), lanes

    def program(fn):
        one, other, (lane, _) = fn(randn(6, 2))
        one[:2].zero_()
        lane.zero_()
        return one, other

    same_after(program, beside, compiler=compiler)


def saved_lanes(x):
    lanes = [torch.sin(p) for p in x.chunk(2)]
    return torch.cat(lanes), sum((p * p).sum() for p in lanes)


def saved_cat(x):
    lanes = [torch.sin(p) for p in x.chunk(2)]
    cat = torch.cat(lanes)
    return lanes[0], (cat * cat).sum()


@compilers
@pytest.mark.parametrize("fn", [saved_lanes, saved_cat])
def test_a_write_before_backward(fn, compiler):
    def program(fn):
        x = randn(6, 2, grad=True)
        y, loss = fn(x)
        with torch.no_grad():
            y.zero_()
        loss.backward()
        return x.grad

    same_after(program, fn, compiler=compiler)


def test_a_cat_nobody_can_write_to_is_none():
    graphs = check(lambda x: torch.cat([torch.sin(p) for p in x.chunk(2)]) * 2, randn(6, 2, grad=True)).report().graphs
    assert [graph.after.operators for graph in graphs] == [2, 5]


def test_gradients_that_accumulate_have_memory_of_their_own():
    def added(x, z):
        return torch.cat([a + b for a, b in zip(x.chunk(2), z.chunk(2), strict=True)])

    def program(fn):
        x, z, dy = randn(6, 2, grad=True), randn(6, 2, grad=True), randn(6, 2)
        for _ in range(3):
            fn(x, z).backward(dy)
        return x.grad, z.grad, dy

    same_after(program, added, compiler="none")


# ---- lanes that leave can be written to ----


def doubled(x):
    a, b = (p * 2 for p in x.chunk(2))
    return a, b.sin()


def test_lanes_written_in_place_before_backward():
    def program(fn):
        x = randn(6, 2, grad=True)
        a, b = fn(x)
        a.mul_(3)
        b += 1
        (a.sum() + b.square().sum()).backward()
        return a, b, x.grad

    same_after(program, doubled, compiler="none")


def test_rows_of_one_product_written_in_place():
    layers = nn.ModuleList(nn.Linear(4, 3, dtype=F64) for _ in range(2))

    def projected(x):
        q, k = (layer(x) for layer in layers)
        return q, k.square()

    def program(fn):
        x = randn(1, 4, grad=True)
        q, k = fn(x)
        q.mul_(2)
        (q.sum() + k.sum()).backward()
        return x.grad

    same_after(program, projected, compiler="none")


def test_lanes_made_without_gradients():
    def program(fn):
        weight = randn(2, grad=True)
        with torch.no_grad():
            a, _ = fn(randn(6, 2))
        b, c = fn(randn(6, 2))
        a.detach_()
        b.mul_(weight)
        return b.requires_grad, c.requires_grad

    same_after(program, doubled, compiler="none")


def saved_results(*parts):
    return [torch.tanh(p) for p in parts]


def saved_operands(*parts):
    results = [torch.sin(p) for p in parts]
    return results[0], results[1], sum((p.square() * q).sum() for p, q in zip(results, parts, strict=True))


@compilers
@pytest.mark.parametrize("fn", [saved_results, saved_operands])
@pytest.mark.parametrize("apart", (False, True), ids=("slices", "tensors"))
def test_a_write_to_what_backward_reads_is_an_error_as_it_was(fn, apart, compiler):
    def of_slices(whole):
        return fn(*whole.chunk(2))

    called, sizes = (fn, [(3, 2)] * 2) if apart else (of_slices, [(6, 2)])
    for each in (called, onepass.fuse(called, compiler=compiler)):
        for written in range(2):
            results = each(*(randn(*size, grad=True) for size in sizes))
            with torch.no_grad():
                results[written].zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                sum(result.sum() for result in results).backward()


def one_read(x, w):
    a, b = (p * 2 for p in x.chunk(2))
    return a, b, (b * w).sum()


@compilers
def test_a_write_to_what_backward_does_not_read_is_none(compiler):
    def program(fn):
        x, w = randn(6, 2, grad=True), randn(3, 2, grad=True)
        a, _, loss = fn(x, w)
        with torch.no_grad():
            a.zero_()
        loss.backward()
        return x.grad, w.grad

    same_after(program, one_read, compiler=compiler)


def test_a_transposed_transpose_is_a_second_tensor():
    def twice(x):
        y = x.sin()
        return y, y.t().t()

    a, b = onepass.fuse(twice, compiler="none")(randn(3, 4))
    assert a is not b


# ---- parameters that the graph writes to ----


@compilers
def test_weights_written_by_the_function(compiler):
    """One tensor of all is their memory, which a compiler doesn't know: it writes the new weights before it reads the old."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(64)) for _ in range(3))

        def forward(self, x):
            lanes = [torch.tanh(p * w) for p, w in zip(x.chunk(3, 1), self.weights, strict=True)]
            with torch.no_grad():
                for weight in self.weights:
                    weight.mul_(2)
            return lanes

    written = Written()
    fused = onepass.fuse(copy.deepcopy(written), compiler=compiler)
    x = torch.randn(6, 192)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fused(x), written(x))
    torch.testing.assert_close(list(fused.parameters()), list(written.parameters()))


# ---- what was an error, or another number ----


def test_an_empty_slice_that_begins_behind_its_end():
    def sliced(x):
        return x[:3].sin().sum() + x[3:1].sum() + x[3:4].exp().sum() + x[4:].cos().sum()

    check(sliced, randn(6, 2, grad=True))


@pytest.mark.parametrize("slices", [lambda x: [x, x], lambda x: x.chunk(2)], ids=["shared", "slices"])
def test_numbers_take_no_part_in_the_type_of_a_comparison(slices):
    def compared(x, numbers):
        return [part > number for part, number in zip(slices(x), numbers.unbind(), strict=True)]

    check(compared, torch.full((4,), 0.1), torch.tensor([0.1, 0.2], dtype=F64))


def test_layers_whose_outputs_go_back_through_their_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(randn(width, 4)) for width in (3, 5))

        def forward(self, x):
            a, b = (F.linear(x, weight) @ weight for weight in self.weights)
            return a + b

    check(Tied(), randn(6, 4, grad=True))


def test_norms_with_weights_of_another_type():
    """As autocast gives them on a CPU: their statistics are fp32, though their trace says bf16."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 3, bias=i < 2) for i in range(4))
            self.norms = nn.ModuleList(nn.LayerNorm(3) for _ in range(4))

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return [norm(layer(x)).tanh() for norm, layer in zip(self.norms, self.layers, strict=True)]

    torch.manual_seed(0)
    check(Normed(), torch.randn(5, 4), rtol=5e-2, atol=5e-2)


def test_a_bias_adds_no_rounding():
    """In bf16 the product is rounded once, with its bias."""

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 16) for _ in range(3))

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return [layer(x) for layer in self.layers]

    torch.manual_seed(0)
    found = check(Biased(), torch.randn(50, 64), rtol=0, atol=0, grad=False).inference
    assert found["addmm", 3] == 1


def test_one_layer_of_several_inputs_is_a_taller_product_with_its_bias():
    layer = nn.Linear(64, 16).bfloat16()

    def several(a, b, c):
        return [torch.nn.functional.gelu(layer(x)) for x in (a, b, c)]

    torch.manual_seed(0)
    found = check(several, *(torch.randn(50, 64, dtype=torch.bfloat16) for _ in range(3)), rtol=0, atol=0, grad=False).inference
    assert found["addmm", 3] == 1


def test_an_expanded_input_is_copied_once():
    call = with_stable_addresses(lambda inputs: inputs[0].sum(), [0])
    kept = [torch.full((2,), float(i)) for i in range(20)]
    for x in kept:
        assert call([x.expand(3, 2)]) == 3 * x.sum()
