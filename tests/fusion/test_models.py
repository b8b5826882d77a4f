"""Modules as people write them: a recommender, a transformer block, branches and loops; fused they stay modules."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from fusion.programs import FREE_COPIES, NO_COPIES, check, same
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from onepass.fusion.fused import fuse
from onepass.fusion.rewrite import rewrite

F64 = torch.float64
pytestmark = [
    pytest.mark.usefixtures("machine"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo's own
]


def randomized(module, dtype=F64):
    """No weight is the same as another, and none is 0 or 1."""
    for p in module.parameters():
        nn.init.uniform_(p, -0.5, 0.9)
    return module.to(dtype)


class Recommender(nn.Module):
    """Embeddings, a norm and an activation for each, towers, products of all with all, an MLP."""

    def __init__(self, widths=(8, 8, 8, 8), dense=6, out=5):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(11, w) for w in widths)
        self.norms = nn.ModuleList(nn.LayerNorm(w) for w in widths)
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(w, 7), nn.ReLU(), nn.Linear(7, out, bias=False), nn.Tanh()) for w in widths
        )
        self.bottom = nn.Sequential(nn.Linear(dense, 7), nn.ReLU(), nn.Linear(7, out))
        pairs = (len(widths) + 1) * len(widths) // 2
        self.top = nn.Sequential(nn.Linear(pairs + out, 9), nn.ReLU(), nn.Linear(9, 1), nn.Sigmoid())

    def forward(self, dense, ids):
        looked_up = [table(i) for table, i in zip(self.tables, ids.unbind(1), strict=True)]
        normed = [F.gelu(norm(e)) for norm, e in zip(self.norms, looked_up, strict=True)]
        features = [self.bottom(dense), *(tower(e) for tower, e in zip(self.towers, normed, strict=True))]
        stacked = torch.stack(features, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        n = len(features)
        below = torch.tril_indices(n, n, -1)
        return self.top(torch.cat([features[0], products[:, below[0], below[1]]], 1)), torch.cat(normed, 1)


class RMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.promote_types(dtype, torch.float32))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Block(nn.Module):
    def __init__(self, hidden=16, heads=4, kv_heads=2, width=4, middle=24, bias=False):
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.q_norm, self.k_norm = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(hidden, n * width, bias=bias) for n in (heads, kv_heads, kv_heads))
        self.o = nn.Linear(heads * width, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, middle, bias=bias), nn.Linear(hidden, middle, bias=bias)
        self.down = nn.Linear(middle, hidden, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(batch, length, n, self.width).transpose(1, 2)
            for layer, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        angles = torch.arange(length, dtype=x.dtype)[:, None] / 10 ** torch.arange(self.width // 2, dtype=x.dtype)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        q, k = rotated(self.q_norm(q), cos, sin), rotated(self.k_norm(k), cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.o(y)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Branches(nn.Module):
    """Loops over parts, branches by setting and by size, an early return, a submodule used twice."""

    def __init__(self, parts=4, depth=2):
        super().__init__()
        self.parts, self.depth, self.mode = parts, depth, "sum"
        self.shared = nn.Linear(4, 4)
        self.own = nn.ModuleList(nn.Linear(4, 4) for _ in range(parts))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(parts))

    def forward(self, x, skip=False):
        lanes = list(x.chunk(self.parts, -1))
        if skip:
            return torch.cat([torch.tanh(p) for p in lanes], -1)
        for level in range(self.depth):
            for i, p in enumerate(lanes):
                if level % 2 == 0:
                    lanes[i] = self.norms[i](self.shared(p))
                elif i % 2:
                    lanes[i] = F.relu(self.own[i](p)) + p
                else:
                    lanes[i] = p * torch.sigmoid(self.own[i](p))
        if self.mode == "sum":
            return sum(lanes) if x.dim() == 2 else torch.stack(lanes).mean(0)
        return torch.cat(lanes, -1)


def dense_and_ids(module, batch=3):
    return torch.randn(batch, 6, dtype=F64, requires_grad=True), torch.randint(0, 11, (batch, len(module.tables)))


@pytest.mark.parametrize(("widths", "copies"), [((8, 8, 8), True), ((8, 8, 8), False), ((4, 8, 12), True), ((8, 8, 4, 4), False)])
def test_a_recommender(widths, copies, machine):
    if not copies:
        machine(NO_COPIES)
    model = randomized(Recommender(widths))
    fused = check(model, *dense_and_ids(model), rtol=1e-9, atol=1e-11)
    if copies and len(set(widths)) == 1:
        lanes = len(widths)
        for operator in ("native_layer_norm", "gelu", "relu", "tanh", "addmm", "mm"):
            assert fused.inference[operator, lanes] >= 1, operator


@pytest.mark.parametrize(("bias", "copies"), [(False, True), (True, False)])
def test_a_llama_block(bias, copies, machine):
    if not copies:
        machine(NO_COPIES)
    model = randomized(Block(bias=bias))
    fused = check(model, torch.randn(2, 5, 16, dtype=F64, requires_grad=True), rtol=1e-9, atol=1e-10)
    assert fused.inference["linear", 3] == 1 and fused.inference["linear", 2] == 1
    trained = {(f.operator, f.lanes) for f in fused.report().graphs[-1].found}
    assert {("linear", 3), ("linear", 2), ("linear's weight gradient", 2), ("linear's input gradient", 2)} <= trained


@pytest.mark.slow
def test_two_llama_blocks_in_a_row():
    model = randomized(nn.Sequential(Block(), Block()))
    fused = check(model, torch.randn(2, 3, 16, dtype=F64, requires_grad=True), rtol=1e-8, atol=1e-9)
    assert fused.inference["linear", 3] == 2


def test_branches_and_loops():
    model = randomized(Branches())
    for shape in ((3, 16), (2, 3, 16)):
        check(model, torch.randn(shape, dtype=F64, requires_grad=True), rtol=1e-9, atol=1e-10)
    check(model, torch.randn(3, 16, dtype=F64, requires_grad=True), True)


def test_one_fused_module_with_branches_taken_in_turn():
    model = randomized(Branches())
    fused = fuse(model, compiler="none")
    for shape, skip, mode in (
        ((3, 16), False, "sum"),
        ((3, 16), True, "sum"),
        ((2, 3, 16), False, "sum"),
        ((3, 16), False, "cat"),
        ((3, 16), False, "sum"),
    ):
        fused.mode = model.mode = mode
        x = torch.randn(shape, dtype=F64)
        same([fused(x, skip=skip)], [model(x, skip=skip)], 1e-9, 1e-11)


# ---- linear layers of one input ----


class Layers(nn.Module):
    def __init__(self, widths, bias=False, ends=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, w, bias=bias) for w in widths)
        self.ends = ends or (lambda ys: ys)

    def forward(self, x):
        return self.ends([layer(x) for layer in self.layers])


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize(("shape", "widths"), [((4, 6), (3, 5, 1)), ((2, 3, 6), (4, 4)), ((1, 6), (4, 4)), ((6,), (3, 5))])
def test_layers_of_one_input(widths, shape, bias):
    model = randomized(Layers(widths, bias))
    fused = check(model, torch.randn(shape, dtype=F64, requires_grad=True), rtol=1e-9, atol=1e-11)
    if len(shape) == 2:
        assert fused.inference["linear", len(widths)] == 1


def test_layers_some_of_which_get_no_gradient():
    class Some(Layers):
        def forward(self, x):
            a, b, c = (layer(x) for layer in self.layers)
            return a * 2, b.detach(), c.sigmoid() * b.detach()

    check(randomized(Some((4, 4, 4))), torch.randn(3, 6, dtype=F64, requires_grad=True), rtol=1e-9)
    check(randomized(Some((4, 4, 4))), torch.randn(3, 6, dtype=F64), rtol=1e-9)


def test_layers_of_which_one_waits_for_another():
    class Chained(Layers):
        def forward(self, x):
            a = self.layers[0](x)
            b = self.layers[1](x) * a.sum()
            return torch.tanh(a) + b, self.layers[2](x) + self.layers[0](x + b.mean())

    check(randomized(Chained((4, 4, 4))), torch.randn(3, 6, dtype=F64, requires_grad=True), rtol=1e-9)


def test_a_weight_gradient_that_leads_into_another_layers_gradient():
    """As one product of all gradients it would wait for itself."""

    def joint(x, a, b, da):
        ya, yb = x @ a.t(), x @ b.t()
        ga = da.t() @ x
        db = yb * ga.sum()
        return ya, yb, ga, db.t() @ x, da @ a + db @ b

    given = [torch.randn(sizes, dtype=F64) for sizes in ((3, 6), (4, 6), (4, 6), (3, 4))]
    graph = make_fx(joint, tracing_mode="fake")(*given)
    found = rewrite(graph.graph, set(graph.graph.find_nodes(op="placeholder")[1:3]), FREE_COPIES, compiled=False).found
    graph.recompile()
    assert [f.operator for f in found if "weight gradient" in f.operator] == []
    same(graph(*given), joint(*given), 1e-12, 1e-12)


def test_layers_whose_input_is_written_between_them():
    class Written(Layers):
        def forward(self, x):
            x = x * 1
            a = self.layers[0](x)
            x[:, 0] += a.detach().sum()
            return a, self.layers[1](x), self.layers[2](x)

    fused = check(randomized(Written((4, 4, 4))), torch.randn(3, 6, dtype=F64), rtol=1e-9, grad=False)
    assert fused.inference["linear", 2] == 1 and not fused.inference["linear", 3]


def test_a_layer_used_twice_on_one_input():
    class Twice(Layers):
        def forward(self, x):
            return self.layers[0](x) + self.layers[1](x), self.layers[0](x).sin(), self.layers[0](x * 2) * self.layers[1](x * 2)

    check(randomized(Twice((4, 4))), torch.randn(3, 6, dtype=F64, requires_grad=True), rtol=1e-9, atol=1e-11)


def test_layers_with_and_without_bias_and_frozen_ones():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 4, bias=b) for b in (True, False, True, False, True))
            self.layers[0].weight.requires_grad_(False)
            self.layers[3].requires_grad_(False)
            self.layers[4].bias.requires_grad_(False)

        def forward(self, x):
            return [layer(x) for layer in self.layers]

    check(randomized(Mixed()), torch.randn(3, 6, dtype=F64, requires_grad=True), rtol=1e-9)


def test_second_derivatives_are_refused_or_right():
    """torch.compile has no double backward: it says so, and never gives a wrong one."""
    model = randomized(Layers((4, 4)))
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)
    y = fuse(model, compiler="none")(x)
    (g,) = torch.autograd.grad((y[0] * y[1]).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"(?i)double backward|does not require grad|twice"):
        torch.autograd.grad(g.pow(2).sum(), x)


# ---- it stays a module ----


def test_parameters_names_and_type_stay():
    model = randomized(Block())
    fused = fuse(model, compiler="none")
    assert isinstance(fused, Block) and isinstance(fused, nn.Module)
    assert list(fused.state_dict()) == list(model.state_dict())
    fused(torch.randn(1, 3, 16, dtype=F64))
    assert all(a is b for a, b in zip(fused.parameters(), model.parameters(), strict=True))
    assert fused.heads == 4 and fused.norm1 is model.norm1
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in model.named_modules()]


def test_training_steps_are_those_of_the_module_as_written():
    written = randomized(Block())
    fused = fuse(copy.deepcopy(written), compiler="none")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (written, fused)]
    for _ in range(5):
        x = torch.randn(2, 4, 16, dtype=F64)
        losses = []
        for model, optimizer in zip((written, fused), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=1e-12)
    same(fused.parameters(), written.parameters(), 1e-8, 1e-10)


def test_hooks_fire_each_time():
    model = randomized(Branches())
    fused = fuse(model, compiler="none")
    seen = []
    fused.register_forward_pre_hook(lambda module, args: seen.append("before"))
    fused.register_forward_hook(lambda module, args, output: seen.append("after"))
    fused.register_full_backward_hook(lambda module, given, asked: seen.append("backward"))
    x = torch.randn(3, 16, dtype=F64, requires_grad=True)
    wanted = model(x)
    for _ in range(2):
        seen.clear()
        y = fused(x)
        same([y], [wanted], 1e-9, 1e-11)
        y.sum().backward()
        assert seen == ["before", "after", "backward"]


def test_a_hook_on_a_submodule_fires():
    model = randomized(Branches())
    seen = []
    model.shared.register_forward_hook(lambda module, args, output: seen.append(1) or output * 2)
    fused, x = fuse(model, compiler="none"), torch.randn(3, 16, dtype=F64)
    for _ in range(2):
        mine = fused(x)
        assert len(seen) == 4
        seen.clear()
        same([mine], [model(x)], 1e-9, 1e-11)
        seen.clear()


def test_training_and_evaluation_differ():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(6, dtype=F64)

        def forward(self, x):
            return torch.cat([self.drop(torch.tanh(p)) for p in self.norm(x).chunk(3, 1)], 1)

    written, fused = Dropped(), fuse(Dropped(), compiler="none")
    x = torch.randn(5, 6, dtype=F64)
    for training in (True, False, True):
        results = []
        for model in (written, fused):
            assert model.train(training) is model and model.drop.training is training
            torch.manual_seed(2)
            results.append(model(x))
        same([results[1]], [results[0]], 1e-12, 1e-12)
        same(fused.buffers(), written.buffers(), 1e-12, 1e-12)


@pytest.mark.parametrize("called", (False, True))
@pytest.mark.parametrize("how", ("deepcopy", "pickle", "save"))
def test_copies_are_fused_and_independent(how, called):
    fused = fuse(randomized(Branches(parts=2, depth=1)), compiler="none")
    x = torch.randn(3, 8, dtype=F64)
    if called:
        fused(x)
    if how == "deepcopy":
        other = copy.deepcopy(fused)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(fused))
    else:
        file = io.BytesIO()
        torch.save(fused, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert type(other) is type(fused)
    same([other(x)], [fused(x)], 0, 0)
    assert other.report().found and other.report() is not fused.report()
    before = fused(x)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    same([fused(x)], [before], 0, 0)
    assert not torch.equal(other(x), before)


def test_a_state_dict_of_a_fused_module_goes_into_the_one_as_written():
    fused, written = fuse(randomized(Block()), compiler="none"), randomized(Block())
    x = torch.randn(1, 3, 16, dtype=F64)
    fused(x)
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    written.load_state_dict(torch.load(file))
    same([fused(x)], [written(x)], 1e-9, 1e-11)


def test_fused_modules_within_a_fused_module():
    inner = fuse(randomized(Branches()), compiler="none")
    outer = nn.Sequential(nn.Linear(16, 16, dtype=F64), inner, nn.Linear(4, 16, dtype=F64), inner)
    fused = fuse(outer, compiler="none")
    x = torch.randn(3, 16, dtype=F64)
    written = nn.Sequential(*outer)
    for _ in range(2):
        same([fused(x)], [outer(x)], 1e-9, 1e-11)
        same([fused(x)], [written(x)], 1e-9, 1e-11)


def test_a_fused_module_is_not_fused_again():
    with pytest.raises(ValueError, match="fused already"):
        fuse(fuse(Branches(), compiler="none"))
    with pytest.raises(ValueError, match="fused already"):
        fuse(fuse(math.sqrt))


def test_a_module_changed_after_it_was_fused():
    model = randomized(Branches())
    fused, x = fuse(model, compiler="none"), torch.randn(3, 16, dtype=F64)
    fused(x)
    model.own[1] = randomized(nn.Linear(4, 4))  # the same list of layers
    same([fused(x)], [model(x)], 1e-9, 1e-11)
    replacement = randomized(nn.Linear(4, 4))
    fused.shared = model.shared = replacement
    same([fused(x)], [model(x)], 1e-9, 1e-11)


def test_two_instances_keep_their_own_weights():
    models = [randomized(Block()) for _ in range(3)]
    fused = [fuse(m, compiler="none") for m in models]
    x = torch.randn(1, 3, 16, dtype=F64)
    for _ in range(2):
        for one, written in zip(fused, models, strict=True):
            same([one(x)], [written(x)], 1e-9, 1e-11)


def test_one_fused_function_of_many_modules():
    """The weights are arguments of the graph: one compilation serves several modules of a kind."""
    models = [randomized(Layers((4, 4))) for _ in range(3)]
    call = fuse(lambda model, x: model(x), compiler="none")
    x = torch.randn(2, 6, dtype=F64)
    for _ in range(2):
        for model in models:
            same(call(model, x), model(x), 1e-9, 1e-11)


def test_settings_that_do_not_go_together():
    with pytest.raises(ValueError, match="compiler must be one of"):
        fuse(torch.sin, compiler="gcc")
    with pytest.raises(ValueError, match="dynamic"):
        fuse(torch.sin, cuda_graph=True, dynamic=True)
    with pytest.raises(TypeError, match="fn_or_module must be"):
        fuse(3)

    @fuse(compiler="none")
    def decorated(x):
        """What it says."""
        return [torch.tanh(p) for p in x.chunk(2)]

    assert decorated.__doc__ == "What it says." and decorated.__name__ == "decorated"
    x = torch.randn(4)
    same(decorated(x), [torch.tanh(p) for p in x.chunk(2)], 0, 0)
    assert decorated.report().found


# ---- with a compiler ----


@pytest.mark.slow
def test_a_recommender_by_inductor():
    model = randomized(Recommender((8, 8)), torch.float32)
    dense, ids = dense_and_ids(model)
    check(model, dense.detach().float().requires_grad_(), ids, rtol=1e-3, atol=1e-4, compiler="inductor", inference=False)
