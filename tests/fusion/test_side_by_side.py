"""Parameters in one storage: each remains itself, and whichever way its numbers change, the next call sees them."""

import copy

import numpy as np
import pytest
import safetensors.torch as safetensors
import torch
import torch.nn.functional as F
from fusion.programs import same
from torch import nn

from onepass.fusion.fused import fuse

F64 = torch.float64
pytestmark = pytest.mark.usefixtures("machine")


class Layers(nn.Module):
    """Two groups of parameters that are used together: the layers', one behind the other, and the norms', stacked."""

    def __init__(self, dtype=F64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, w, dtype=dtype) for w in (4, 2, 6))
        self.norms = nn.ModuleList(nn.LayerNorm(4, dtype=dtype) for _ in range(3))
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(-1, 1)

    def forward(self, x):
        y = torch.cat([layer(x) for layer in self.layers], -1)
        return torch.cat([torch.tanh(norm(p)) for norm, p in zip(self.norms, y.chunk(3, -1), strict=True)], -1)


def weights(module):
    return [layer.weight for layer in module.layers]


def merged(module):
    """Whether the layers' weights lie in one storage, one behind the other."""
    first, *rest = parts = weights(module)
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            return False
        end += part.numel() * part.element_size()
    return all(part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part in rest)


def as_written(module):
    """The same weights, computed as written."""
    written = Layers()
    written.load_state_dict({name: p.detach().clone() for name, p in module.state_dict().items()})
    return written.to(next(module.parameters()).dtype)


def agree(fused, rtol=1e-10, shape=(3, 6)):
    """Values and gradients are those of the weights as they are now, with and without autograd."""
    written = as_written(fused)
    x = torch.randn(shape, dtype=next(fused.parameters()).dtype, requires_grad=True)
    with torch.no_grad():
        same([fused(x)], [written(x)], rtol, rtol)
    mine, theirs = fused(x), written(x)
    same([mine], [theirs], rtol, rtol)
    wanted = [p for p in fused.parameters() if p.requires_grad]
    theirs_wanted = [q for p, q in zip(fused.parameters(), written.parameters(), strict=True) if p.requires_grad]
    scale = torch.rand_like(mine)
    same(
        torch.autograd.grad((mine * scale).sum(), [x, *wanted]),
        torch.autograd.grad((theirs * scale).sum(), [x, *theirs_wanted]),
        rtol * 100, rtol * 100,
    )  # fmt: skip


def why_copied(fused):
    return {whole.why_copied for graph in fused.report().graphs for whole in graph.wholes} - {None}


@pytest.fixture
def fused():
    found = fuse(Layers(), compiler="none")
    agree(found)
    return found


def test_parameters_become_parts_of_one_storage_and_stay_the_same_objects():
    written = Layers()
    before = {name: p.detach().clone() for name, p in written.named_parameters()}
    objects = dict(written.named_parameters())
    fused = fuse(written, compiler="none")
    assert not merged(fused)
    with torch.no_grad():
        fused(torch.randn(2, 6, dtype=F64))
    assert merged(fused) and merged(written)
    for name, p in fused.named_parameters():
        assert p is objects[name] and isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0)
    assert not why_copied(fused)


def test_they_stay_where_they_are(fused):
    places = [p.data_ptr() for p in fused.parameters()]
    for _ in range(3):
        agree(fused)
    assert places == [p.data_ptr() for p in fused.parameters()]
    assert all(whole.moves <= 1 for graph in fused.report().graphs for whole in graph.wholes)


def test_numbers_written_in_place(fused):
    with torch.no_grad():
        for index, p in enumerate(fused.parameters()):
            p.mul_(1.5) if index % 2 else p.copy_(torch.rand_like(p))
    assert merged(fused)
    agree(fused)
    fused.layers[1].weight.data.zero_()
    fused.layers[2].weight.data[1, 2] = 9.0
    fused.norms[0].bias.data.add_(1)
    agree(fused)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_an_optimizer_made_before_and_one_made_after(options):
    written = Layers()
    early = torch.optim.Adam(written.parameters(), lr=0.1, **options)
    fused = fuse(written, compiler="none")
    agree(fused)
    late = torch.optim.Adam(fused.parameters(), lr=0.1, **options)
    for optimizer in (early, late, early):
        before = [p.detach().clone() for p in fused.parameters()]
        optimizer.zero_grad()
        fused(torch.randn(3, 6, dtype=F64)).pow(2).sum().backward()
        optimizer.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, fused.parameters(), strict=True))
        agree(fused)
    assert merged(fused)


def test_data_given_other_memory(fused):
    for p in fused.parameters():
        p.data = torch.rand_like(p)
        agree(fused)
    assert merged(fused)


def test_two_parameters_exchange_their_memory(fused):
    a, c = fused.norms[0].weight, fused.norms[2].weight
    a.data, c.data = c.data, a.data
    agree(fused)


def test_a_parameter_takes_a_part_of_anothers_memory(fused):
    fused.norms[0].weight.data = fused.norms[1].weight.data
    agree(fused)
    with torch.no_grad():
        fused.norms[0].weight.fill_(0.5)
    assert (fused.norms[1].weight == 0.5).all()  # as whoever did it wanted it
    agree(fused)


def test_to_another_type_and_back(fused):
    fused.float()
    agree(fused, 1e-5)
    fused.to(F64)
    agree(fused)
    fused.half().double()
    agree(fused)


@pytest.mark.parametrize("assign", (False, True))
def test_load_state_dict(fused, assign):
    for _ in range(2):
        fused.load_state_dict(Layers().state_dict(), assign=assign)
        agree(fused)
    assert merged(fused) or why_copied(fused)


def test_a_state_dict_that_is_held():
    fused = fuse(Layers(), compiler="none")
    held = fused.state_dict()
    places = {name: p.data_ptr() for name, p in fused.named_parameters()}
    for _ in range(2):
        agree(fused)
    assert {name: p.data_ptr() for name, p in fused.named_parameters()} == places
    assert why_copied(fused)
    with torch.no_grad():
        held["layers.0.weight"].fill_(0.25)
        held["norms.1.bias"].fill_(0.5)
    assert (fused.layers[0].weight == 0.25).all()
    agree(fused)


def test_a_state_dict_held_after_they_were_laid(fused):
    held = fused.state_dict()
    held["layers.1.weight"].fill_(0.25)
    assert (fused.layers[1].weight == 0.25).all()
    agree(fused)
    loaded = Layers()
    loaded.load_state_dict(held)
    held["layers.0.bias"].zero_()
    agree(fused)
    assert merged(fused)


HOLDERS = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "view": lambda p: p.view(-1),
    "row": lambda p: p[0],
    "transposed": lambda p: p.t(),
    "storage": lambda p: p.untyped_storage(),
    "numpy": lambda p: p.data.numpy(),
}


@pytest.mark.parametrize("held", HOLDERS)
def test_memory_that_somebody_holds_is_not_left_behind(held):
    """Who held a view of a parameter before fusing goes on seeing the parameter."""
    model = Layers()
    with torch.no_grad():
        kept = HOLDERS[held](model.layers[1].weight)
    fused = fuse(model, compiler="none")
    agree(fused)
    with torch.no_grad():
        model.layers[1].weight.fill_(0.75)
    if isinstance(kept, torch.UntypedStorage):
        assert kept.data_ptr() == model.layers[1].weight.data_ptr()
    else:
        assert (torch.as_tensor(kept) == 0.75).all()
    agree(fused)


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4, dtype=F64) for _ in range(3))
            self.b.weight = self.a.weight

        def forward(self, x):
            return (
                self.a(x),
                self.b(x),
                self.c(x),
                [torch.tanh(m(p)) for m, p in zip((self.a, self.b, self.c), x.chunk(3, 0), strict=True)],
            )

    model = Tied()
    fused, x = fuse(model, compiler="none"), torch.randn(6, 4, dtype=F64)
    for _ in range(2):
        mine, theirs = fused(x), model(x)
        same([*mine[:3], *mine[3]], [*theirs[:3], *theirs[3]], 1e-12, 1e-12)
        mine = torch.autograd.grad(sum(y.pow(2).sum() for y in (*mine[:3], *mine[3])), list(fused.parameters()))
        same(
            mine,
            torch.autograd.grad(sum(y.pow(2).sum() for y in (*theirs[:3], *theirs[3])), list(model.parameters())),
            1e-11,
            1e-11,
        )
        with torch.no_grad():
            model.a.weight.mul_(1.1)
    assert fused.b.weight is fused.a.weight


def test_frozen_weights(fused):
    fused.layers[0].requires_grad_(False)
    fused.norms[1].weight.requires_grad_(False)
    agree(fused)
    fused.requires_grad_(False)
    x = torch.randn(3, 6, dtype=F64)
    same([fused(x)], [as_written(fused)(x)], 1e-10, 1e-10)
    fused.requires_grad_(True)
    agree(fused)


def test_two_functions_over_sets_of_parameters_that_overlap():
    """Each would have another order: they mustn't move the parameters from under each other and use what was."""
    model = Layers()
    a, b, c = model.layers

    def first(x):
        return torch.cat([a(x), b(x), c(x)], 1)

    def second(x):
        return torch.cat([c(x), a(x)], 1)

    def third(x):
        return torch.cat([b(x), a(x)], 1)

    fused = [(fn, fuse(fn, compiler="none")) for fn in (first, second, third)]
    x = torch.randn(3, 6, dtype=F64)
    for _ in range(4):
        for fn, quick in fused:
            same([quick(x)], [fn(x)], 1e-12, 1e-12)
            wanted = [p for p in model.layers.parameters()]
            same(
                torch.autograd.grad(quick(x).pow(2).sum(), wanted, allow_unused=True),
                torch.autograd.grad(fn(x).pow(2).sum(), wanted, allow_unused=True),
                1e-11, 1e-11,
            )  # fmt: skip
            with torch.no_grad():
                for p in wanted:
                    p.mul_(1.01)


def test_a_backward_that_runs_after_the_weights_were_laid_anew():
    """What forward kept is still there for its backward."""
    model = Layers()
    fused = fuse(model, compiler="none")
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    y = fused(x)
    for p in model.parameters():
        p.data = torch.rand_like(p)
    fused(x)
    (mine,) = torch.autograd.grad(y.pow(2).sum(), x)
    torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-11)


def test_a_weight_written_between_forward_and_backward_is_an_error_as_it_was():
    """Autograd's own check: weights that backward needs must be those of forward."""
    for fn in (lambda m: m, lambda m: fuse(m, compiler="none")):
        model = fn(Layers())
        x = torch.randn(3, 6, dtype=F64, requires_grad=True)
        loss = model(x).pow(2).sum()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_parameters_that_are_parts_of_a_flat_buffer():
    """As distributed optimizers keep them: whoever owns the buffer must go on seeing the parameters."""
    model = Layers()
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for p in parameters:
        p.data = flat[offset : offset + p.numel()].view(p.shape)
        offset += p.numel()
    fused = fuse(model, compiler="none")
    for _ in range(2):
        agree(fused)
        flat.mul_(1.1)
    offset = 0
    for p in parameters:
        assert p.data_ptr() == flat[offset:].data_ptr()
        offset += p.numel()
    agree(fused)


def test_neighbours_in_a_flat_buffer_need_no_copy():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat = torch.randn(10, 6, dtype=F64)
            self.a, self.b = nn.Parameter(self.flat[:4]), nn.Parameter(self.flat[4:])

        def forward(self, x):
            return F.linear(x, self.a), F.linear(x, self.b)

    model = Plain()
    fused, x = fuse(model, compiler="none"), torch.randn(3, 6, dtype=F64)
    for _ in range(2):
        same(fused(x), model(x), 1e-12, 1e-12)
        model.flat.mul_(2)
    assert not why_copied(fused) and model.a.data_ptr() == model.flat.data_ptr()


def test_neighbours_in_memory_may_be_strangers():
    """Two storages, the second of which begins where the first one ends."""
    memory = np.random.default_rng(0).standard_normal(60)
    a, b = (nn.Parameter(torch.from_numpy(part).view(5, 6)) for part in (memory[:30], memory[30:]))
    assert b.data_ptr() == a.data_ptr() + a.untyped_storage().nbytes()

    def both(x):
        return F.linear(x, a), F.linear(x, b)

    fused, x = fuse(both, compiler="none"), torch.randn(3, 6, dtype=F64)
    for _ in range(2):
        same(fused(x), both(x), 1e-12, 1e-12)


def test_parameters_that_lie_backwards_or_overlap():
    class Plain(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(p) for p in parts])

        def forward(self, x):
            return [F.linear(x, p) for p in self.parts]

    flat = torch.randn(12, 6, dtype=F64)
    x = torch.randn(3, 6, dtype=F64)
    for parts in (
        (flat[4:8], flat[:4]),
        (flat[:4], flat[2:6]),
        (flat[::2], flat[1::2]),
        (flat[:6].t(), flat[6:].t()),
        (flat[:0], flat[:3]),
        (flat[:3], flat[3:3], flat[3:5]),
    ):
        model = Plain(parts)
        fused = fuse(model, compiler="none")
        for _ in range(2):
            same(fused(x), model(x), 1e-12, 1e-12)
            flat.mul_(1.5)
        torch._dynamo.reset()


def test_a_hook_and_a_gradient_stay_with_the_parameter():
    model = Layers()
    seen = []
    model.layers[0].weight.register_hook(lambda g: seen.append(g.shape))
    fused = fuse(model, compiler="none")
    for _ in range(2):
        fused(torch.randn(3, 6, dtype=F64)).sum().backward()
    assert seen == [(4, 6)] * 2
    for p in fused.parameters():
        assert p.grad is not None and p.grad.shape == p.shape and p.grad.untyped_storage().nbytes() >= p.numel() * 8
    fused.zero_grad()
    agree(fused)


def test_gradients_of_neighbours_are_tensors_of_their_own(fused):
    """Clipping one in place must not touch another, nor gradient accumulation."""
    written = as_written(fused)
    for model in (fused, written):
        model.zero_grad()
    for _ in range(2):
        x = torch.randn(3, 6, dtype=F64)
        for model in (fused, written):
            model(x).pow(2).sum().backward()
            for i, p in enumerate(model.parameters()):
                p.grad.mul_(i + 1)
    same([p.grad for p in fused.parameters()], [p.grad for p in written.parameters()], 1e-9, 1e-10)


def test_many_moves_end_in_copies(caplog):
    fused = fuse(Layers(), compiler="none")
    for _ in range(20):
        for p in fused.parameters():
            p.data = torch.rand_like(p)
        agree(fused)
    assert any("times" in reason for reason in why_copied(fused))


def test_deepcopy_after_they_were_laid(fused):
    other = copy.deepcopy(fused)
    agree(other)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    agree(other)
    agree(fused)


def test_inference_mode_and_training_in_turn(fused):
    x = torch.randn(3, 6, dtype=F64)
    for _ in range(2):
        with torch.inference_mode():
            same([fused(x)], [as_written(fused)(x)], 1e-10, 1e-10)
        agree(fused)
        with torch.no_grad():
            for p in fused.parameters():
                p.mul_(1.1)


def test_first_call_in_inference_mode():
    fused = fuse(Layers(), compiler="none")
    with torch.inference_mode():
        fused(torch.randn(3, 6, dtype=F64))
    agree(fused)
    with torch.no_grad():
        for p in fused.parameters():
            p.mul_(1.1)
    agree(fused)
    torch.optim.SGD(fused.parameters(), lr=0.1).step()


def test_swapped_and_functional_parameters(fused):
    x = torch.randn(3, 6, dtype=F64)
    other = {name: torch.rand_like(p) for name, p in fused.named_parameters()}
    mine = torch.func.functional_call(fused, other, (x,))
    same([mine], [torch.func.functional_call(as_written(fused), other, (x,))], 1e-10, 1e-10)
    agree(fused)


def test_a_parameter_replaced_by_another(fused):
    fused.layers[1].weight = nn.Parameter(torch.rand(2, 6, dtype=F64))
    agree(fused)
    fused.layers[0] = nn.Linear(6, 4, dtype=F64)
    agree(fused)
    assert merged(fused)


def test_saved_files_hold_each_parameter_by_itself(fused, tmp_path):
    torch.save(fused.state_dict(), tmp_path / "state.pt")
    loaded = Layers()
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    same(loaded.parameters(), fused.parameters(), 0, 0)


def test_safetensors(fused, tmp_path):
    safetensors.save_file(fused.state_dict(), tmp_path / "state.safetensors")
    loaded = Layers()
    loaded.load_state_dict(safetensors.load_file(tmp_path / "state.safetensors"))
    same(loaded.parameters(), fused.parameters(), 0, 0)


@pytest.mark.slow
def test_with_a_compiler():
    fused = fuse(Layers(), compiler="inductor")
    agree(fused, 1e-8)
    with torch.no_grad():
        for p in fused.parameters():
            p.mul_(1.5)
    agree(fused, 1e-8)
    for p in fused.parameters():
        p.data = torch.rand_like(p)
    agree(fused, 1e-8)
    fused.load_state_dict(Layers().state_dict(), assign=True)
    agree(fused, 1e-8)
