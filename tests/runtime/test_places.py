"""Gradients in their place: bit by bit those that are joined afterwards, and nothing joined where ops know the place."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import places
from onepass.gradients.places import columns_of, parts_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [48, 16, 2, 2]  # q, k and v; the output's gate; b; a
pytestmark = pytest.mark.usefixtures("kernels_only")


@pytest.fixture
def kernels_only():
    with onepass.use_backend("triton"):
        yield


@pytest.fixture
def cats(monkeypatch):
    """Return the number of columns of each tensor that is put together."""
    made, cat = [], torch.cat

    def counted(tensors, *args, **options):
        made.append(cat(tensors, *args, **options))
        return made[-1]

    monkeypatch.setattr(torch, "cat", counted)
    return made


class Chain(torch.nn.Module):
    """What a gated delta net does to the columns of one product, without the rule."""

    def __init__(self, apart=parts_of, dtype=torch.float32):
        super().__init__()
        shapes = {"weight": (48, 4), "a_log": (2,), "dt_bias": (2,), "norm_weight": (8,), "out": (12, 16)}
        torch.manual_seed(1)
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, device=DEVICE).to(dtype)))
        self.apart = apart

    def parts(self, rows):
        return self.apart(rows * 1.0, SIZES)

    def forward(self, rows, cu_seqlens=None):
        return self.follow(*self.parts(rows), cu_seqlens)

    def follow(self, qkv, z, b, a, cu_seqlens=None):
        options = {"split": (16, 16, 16), "l2_norm": (8, 8, None), "cu_seqlens": cu_seqlens}
        q, k, v = onepass.causal_conv1d(qkv, self.weight, **options)
        g, beta = onepass.delta_gates(a, b, self.a_log, self.dt_bias)
        y = q * k + (v.unflatten(-1, (2, 8)) * (g + beta).to(v.dtype)[..., None]).flatten(-2)
        return onepass.gated_norm_linear(y, z, self.norm_weight, self.out, group_size=8)


def rows_of(batch=2, dtype=torch.float32):
    return torch.randn(batch, 9, sum(SIZES), device=DEVICE).to(dtype).requires_grad_()


def gradients(chain, rows, *args, run=None, wanted=None):
    y = (chain if run is None else run)(rows, *args)
    wanted = [rows, *chain.parameters()] if wanted is None else wanted
    return torch.autograd.grad(y.square().sum(), wanted)


def assert_bits(found, right):
    for mine, other in zip(found, right, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("documents", [None, (0, 4, 4, 9)])
def test_gradients_have_the_same_bits_and_are_not_put_together(documents, dtype, cats):
    rows = rows_of(1 if documents else 2, dtype)
    documents = None if documents is None else torch.tensor(documents, dtype=torch.int32, device=DEVICE)
    found = gradients(Chain(dtype=dtype), rows, documents)
    assert not cats
    assert_bits(found, gradients(Chain(columns_of, dtype), rows, documents))


def test_gradients_are_those_of_the_formulas_in_fp64():
    rows = rows_of()
    with onepass.use_backend("torch"):
        exact = Chain(dtype=torch.float64)
        exact.load_state_dict(Chain().state_dict())
        right = gradients(exact, rows.detach().double().requires_grad_())
    for mine, wide in zip(gradients(Chain(), rows), right, strict=True):
        assert (mine - wide).square().mean().sqrt() < 1e-5 * wide.square().mean().sqrt()


def test_rows_that_lie_apart():
    rows = torch.randn(9, 2, sum(SIZES), device=DEVICE, requires_grad=True)
    apart = [lambda rows, sizes, split=split: split(rows.transpose(0, 1), sizes) for split in (parts_of, columns_of)]
    assert_bits(*(gradients(Chain(split), rows) for split in apart))


@pytest.mark.parametrize("part", range(4))
def test_a_part_that_another_reads_has_the_sum(part):
    class Twice(Chain):
        def forward(self, rows):
            parts = self.parts(rows)
            return self.follow(*parts) * parts[part].mean()

    rows = rows_of()
    assert_bits(gradients(Twice(), rows), gradients(Twice(columns_of), rows))


def test_a_part_that_the_same_op_reads_twice():
    class Twice(Chain):
        def forward(self, rows):
            qkv, *gates = self.parts(rows)
            return self.follow(qkv, *gates) + self.follow(qkv, *gates, torch.tensor((0, 4, 9), dtype=torch.int32, device=DEVICE))

    rows = rows_of(1)
    assert_bits(gradients(Twice(), rows), gradients(Twice(columns_of), rows))


@pytest.mark.parametrize("read", [(0,), (1,), (2, 3), (0, 2, 3)])
def test_what_no_op_reads_has_zeros(read):
    class Some(Chain):
        def parts(self, rows):
            return [part if i in read else part.detach() for i, part in enumerate(super().parts(rows))]

    rows = rows_of()
    assert_bits(gradients(Some(), rows), gradients(Some(columns_of), rows))


@pytest.mark.parametrize("frozen", ["rows", "parameters"])
def test_frozen_inputs(frozen, cats):
    rows, chain, other = rows_of(), Chain(), Chain(columns_of)
    if frozen == "rows":
        wanted = [list(each.parameters()) for each in (chain, other)]
    else:
        chain.requires_grad_(False)
        wanted = [[rows], [rows]]
    assert_bits(gradients(chain, rows, wanted=wanted[0]), gradients(other, rows, wanted=wanted[1]))
    assert not cats


def test_passes_over_a_retained_graph(cats):
    rows = rows_of()
    right = gradients(Chain(columns_of), rows)[0]
    loss = Chain()(rows).square().sum()
    scales = [torch.tensor(scale, device=DEVICE) for scale in (1.0, 2.0, 1.0)]
    found = [torch.autograd.grad(loss, rows, scale, retain_graph=True)[0] for scale in scales]
    assert_bits(found, [right, right * 2, right])
    assert not cats


def test_a_pass_that_ends_at_a_part_keeps_its_gradient():
    rows, chain = rows_of(), Chain()
    right = gradients(Chain(columns_of), rows)[0]
    parts = chain.parts(rows)
    loss = chain.follow(*parts).square().sum()
    some = torch.autograd.grad(loss, parts[:2], retain_graph=True)
    assert_bits(torch.autograd.grad(loss, rows, torch.tensor(2.0, device=DEVICE)), [right * 2])
    assert_bits(some, right.split(SIZES, -1)[:2])


def test_gradients_that_hooks_replace():
    def of(apart):
        chain, rows = Chain(apart), torch.full((2, 9, sum(SIZES)), 0.3, device=DEVICE, requires_grad=True)
        parts = chain.parts(rows)
        for part in parts[1:3]:
            part.register_hook(lambda grad: grad * 2)
        return torch.autograd.grad(chain.follow(*parts).square().sum(), rows)

    assert_bits(of(parts_of), of(columns_of))


def test_a_part_that_is_written_in_place():
    class Clamped(Chain):
        def parts(self, rows):
            parts = super().parts(rows)
            parts[0].clamp_(-0.5, 0.5)
            return parts

    rows = rows_of()
    assert_bits(gradients(Clamped(), rows), gradients(Clamped(columns_of), rows))


def test_ops_on_other_streams(monkeypatch):
    rows, streams = rows_of(), iter(range(100))
    right = gradients(Chain(columns_of), rows)
    monkeypatch.setattr(places, "_stream", lambda device: next(streams))
    assert_bits(gradients(Chain(), rows), right)
    assert next(streams) > 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, cats):
    rows, chain = rows_of(), Chain()
    chain(rows, None).square().sum().backward()
    right = [rows.grad, *(p.grad for p in chain.parameters())]
    rows.grad = None
    chain.zero_grad()
    checkpoint(chain, rows, use_reentrant=reentrant).square().sum().backward()
    assert_bits([rows.grad, *(p.grad for p in chain.parameters())], right)
    assert not cats


def test_compiling():
    rows, chain = rows_of(), Chain()
    right = gradients(chain, rows)
    torch._dynamo.reset()
    assert_bits(gradients(chain, rows, run=torch.compile(chain, fullgraph=True, backend="aot_eager")), right)


def test_a_gradient_penalty_by_formulas():
    def of(apart):
        rows = torch.linspace(-1, 1, sum(SIZES), dtype=torch.float64, device=DEVICE).requires_grad_()
        parts = apart(rows[None] * rows, SIZES)
        (first,) = torch.autograd.grad(sum(part.square().sum() for part in parts[:3]), rows, create_graph=True)
        return torch.autograd.grad(F.silu(first).sum(), rows)

    assert_bits(of(parts_of), of(columns_of))


def test_parts_that_hooks_have_moved_have_their_own_memory():
    """As offloads do: what comes back is contiguous, and lies no more as the place does."""
    found = []
    for apart in (columns_of, parts_of):
        chain, rows = Chain(apart), torch.linspace(-1, 1, 3 * 68, device=DEVICE).view(1, 3, 68).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x):
            chain(rows).square().sum().backward()
        found.append([rows.grad, *(p.grad for p in chain.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
