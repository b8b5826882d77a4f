"""Several parameters as one: where they lie, what products with all of them give each, and where their gradients go."""

import copy
import ctypes

import pytest
import torch
from ops.calls import Operators, backends
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import main_grad as convention
from onepass.gradients.deferred import DeferredWgrad
from onepass.gradients.graphs import graphed
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.packed_params import are_packed, concat, pack, packed_groups, unpack
from onepass.testing.poison import unchanged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, K = (24, 8, 8), 16


def parameters(*rows, dtype=torch.float32, row=(K,)):
    return [nn.Parameter(torch.randn(n, *row, device=DEVICE).to(dtype)) for n in rows or ROWS]


def together(*rows, **options):
    made = parameters(*rows, **options)
    assert pack(made)
    return made


def with_main_grads(made, main=torch.float32, near=True):
    """Megatron's convention, without `MainGrads`: in one buffer, one after another, or each in its own."""
    buffer = torch.zeros(sum(p.shape[0] for p in made), *made[0].shape[1:], device=DEVICE, dtype=main)
    for parameter, place in zip(made, buffer.split([p.shape[0] for p in made]), strict=True):
        parameter.main_grad = place if near else place.clone()
        parameter.grad_added_to_main_grad = False
    return made


def main_grads_of(made):
    return [parameter.main_grad for parameter in made]


def places(made):
    return [parameter.data_ptr() for parameter in made]


# ---- where they lie ----


def test_laid_together_they_are_the_same_parameters_with_the_same_values():
    model = nn.ModuleDict({name: nn.Linear(K, n, device=DEVICE) for name, n in zip("qkv", ROWS, strict=True)})
    weights, biases = ([getattr(layer, kind) for layer in model.values()] for kind in ("weight", "bias"))
    with torch.no_grad():
        weights[1][0, :2] = torch.tensor([float("nan"), -0.0], device=DEVICE)
    before = {name: value.clone().view(torch.int32) for name, value in model.state_dict().items()}
    assert not are_packed(weights) and pack(weights) and pack(biases)
    assert all(layer.weight is weight for layer, weight in zip(model.values(), weights, strict=True))
    for name, value in model.state_dict().items():
        assert torch.equal(value.view(torch.int32), before[name])
    for made in (weights, biases):
        assert are_packed(made) and all(p.is_leaf and p.requires_grad and p.is_contiguous() for p in made)
        assert made[0].untyped_storage().nbytes() == sum(p.nbytes for p in made)
    lie = places(weights)
    assert pack(weights) and places(weights) == lie  # nothing is copied again
    assert not are_packed(weights[::-1]) and not are_packed([*weights, biases[0]])


class _Subclass(torch.Tensor):
    pass


def test_laid_apart_each_has_a_storage_and_its_values():
    made = together()
    values = [p.detach().clone() for p in made]
    unpack(made)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in made)
    assert all(p.equal(value) for p, value in zip(made, values, strict=True))


def test_in_somebody_elses_buffer_they_are_not_laid_apart():
    made = together()
    buffer = torch.zeros(sum(ROWS) + 8, K, device=DEVICE)
    for parameter, place in zip(made, buffer[: sum(ROWS)].split(ROWS), strict=True):
        parameter.data = place
    before = places(made)
    unpack(made)
    assert places(made) == before


def _tied(made):
    return nn.Parameter(made[1].data)


def _other_order(made):
    made[1].data = made[1].data.t().contiguous().t()


def _shared(made):
    made[1].data.share_memory_()


def _subclass(made):
    made[1] = made[1].detach().as_subclass(_Subclass)


def _empty(made):
    made[1] = nn.Parameter(made[1].data[:0].clone())


def _inference(made):
    with torch.inference_mode():
        made[1] = torch.randn(8, K, device=DEVICE)


def _overlapping(made):
    made[1] = nn.Parameter(made[0].data[:8])


REFUSED = [_tied, _other_order, _subclass, _empty, _inference, _overlapping]


@pytest.mark.parametrize("change", [*REFUSED, pytest.param(_shared, marks=pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's"))])
def test_what_somebody_else_has_or_is_no_plain_memory_stays_where_it_is(change):
    made = parameters()
    other = change(made)
    lie = places(made)
    assert pack(made) is False and places(made) == lie
    assert other is None or other.data_ptr() == made[1].data_ptr()
    with torch.no_grad():
        torch.testing.assert_close(torch.Tensor(concat(made)), torch.cat([torch.Tensor(p.data) for p in made]))


def test_on_the_meta_device_nothing_lies_anywhere():
    made = [nn.Parameter(torch.empty(n, K, device="meta")) for n in ROWS]
    assert pack(made) is False and concat(made).shape == (sum(ROWS), K)


def test_neighbours_in_two_storages_are_not_together():
    """Allocators give such memory; one of them may be freed before the other."""
    memory = (ctypes.c_float * (2 * K))()
    made = [torch.frombuffer(memory, dtype=torch.float32, count=K, offset=4 * K * i).view(1, K) for i in range(2)]
    assert made[1].data_ptr() == made[0].data_ptr() + made[0].nbytes
    assert not are_packed(made) and [len(group) for group in packed_groups(made)] == [1, 1]


def test_neighbours_of_another_kind_are_not_together():
    memory = torch.zeros(4 * K, device=DEVICE)
    first, after = memory[: 2 * K].view(2, K), memory[2 * K :]
    assert are_packed([first, after.view(2, K)])
    for other in (after.view(4, K // 2), after.view(torch.bfloat16)[: 2 * K].view(2, K), after):
        assert other.data_ptr() == first.data_ptr() + first.nbytes and not are_packed([first, other])


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (lambda: [], ValueError, "one or more"),
        (lambda: [*parameters(4), *parameters(4, dtype=torch.bfloat16)], TypeError, "parameter 1 is torch.bfloat16"),
        (
            lambda: [*parameters(4), *parameters(4, row=(8,))],
            ValueError,
            r"rows of one shape, but parameter 1 has shape \(4, 8\)",
        ),
        (lambda: [*parameters(4), nn.Parameter(torch.empty(4, K, device="meta"))], ValueError, "parameter 1 is on meta"),
        (lambda: [nn.Parameter(torch.ones((), device=DEVICE)) for _ in range(2)], ValueError, "parameter 0 is a scalar"),
    ],
    ids=("none", "types", "rows", "devices", "scalars"),
)
def test_errors_say_which_and_what(made, error, words):
    for function in (pack, concat):
        with pytest.raises(error, match=words):
            function(made())


def test_one_can_not_be_in_two_places():
    (one,) = parameters(4)
    with pytest.raises(ValueError, match="there twice"):
        pack([one, one])
    torch.testing.assert_close(concat([one, one]).detach(), torch.cat([one, one]).detach())


# ---- as one ----


def test_an_alias_where_they_lie_together_now_and_a_copy_elsewhere():
    made = together()
    for _ in range(2):
        whole = concat(made)
        assert whole.data_ptr() == made[0].data_ptr() and whole.shape == (sum(ROWS), K) and whole.requires_grad
        assert torch.equal(whole, torch.cat(made))
        with torch.no_grad():
            assert concat(made).data_ptr() == made[0].data_ptr() and concat(made).grad_fn is None
            made[1].mul_(2)  # seen by the next
    parted = copy.deepcopy(nn.ParameterList(made))
    assert not are_packed([*parted]) and torch.equal(concat([*parted]), torch.cat(made))
    model = nn.ParameterDict({str(i): p for i, p in enumerate(made)})
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()}, assign=True)
    now = [*model.values()]
    whole = concat(now)
    assert not are_packed(now) and torch.equal(whole, torch.ones_like(whole))
    assert whole.data_ptr() != now[0].data_ptr()
    assert pack(now) and concat(now).data_ptr() == now[0].data_ptr()


def test_a_single_one_is_itself():
    (one,) = parameters(4)
    assert concat([one]) is one


def test_gradients_are_rows_of_one_and_no_copies():
    made = together()
    whole, seen = concat(made), []
    whole.register_hook(lambda grad: seen.append(grad.data_ptr()))
    x = torch.randn(5, K, device=DEVICE)
    onepass.linear(x, whole).square().sum().backward()
    for parameter, before in zip(made, (0, 24, 32), strict=True):
        assert parameter.grad.data_ptr() == seen[0] + 4 * K * before
        assert not parameter.grad._is_view() and parameter.grad.is_contiguous()
    first = [parameter.grad.clone() for parameter in made]
    onepass.linear(x, concat(made)).square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in made], [2 * grad for grad in first])


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("main", (False, True), ids=("", "main_grad"))
@pytest.mark.parametrize("norm", (False, True), ids=("linear", "norm_linear"))
def test_some_need_no_gradient(frozen, main, norm):
    made = together()
    for index in frozen:
        made[index].requires_grad_(False)
    trained = [p for p in made if p.requires_grad]
    if main:
        with_main_grads(made)
    x = torch.randn(5, K, device=DEVICE, requires_grad=True)
    normed = F.rms_norm(x, (K,), eps=1e-6) if norm else x
    expected = torch.autograd.grad(F.linear(normed, torch.cat(made)).square().sum(), [x, *trained])
    whole = concat(made)
    assert whole.requires_grad is bool(trained) and whole.data_ptr() == made[0].data_ptr()
    (onepass.norm_linear(x, None, whole) if norm else onepass.linear(x, whole)).square().sum().backward()
    torch.testing.assert_close([x.grad, *(p.main_grad if main else p.grad for p in trained)], [*expected], rtol=1e-5, atol=1e-4)
    for index in frozen:
        assert made[index].grad is None and not (main and (made[index].main_grad.any() or made[index].grad_added_to_main_grad))


@pytest.mark.parametrize("trained", (0, 1, 2))
def test_what_is_written_between_forward_and_backward_is_noticed(trained):
    made = together()
    for index, parameter in enumerate(made):
        parameter.requires_grad_(index == trained)
    y = onepass.linear(torch.randn(5, K, device=DEVICE, requires_grad=True), concat(made)).sum()
    with torch.no_grad():
        made[trained].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_steps_of_an_optimizer_are_seen():
    made = together()
    plain = [p.detach().clone().requires_grad_() for p in made]
    x = torch.randn(5, K, device=DEVICE)
    ours, theirs = (torch.optim.AdamW(each, lr=0.1) for each in (made, plain))
    for _ in range(3):
        onepass.linear(x, concat(made)).square().sum().backward()
        F.linear(x, torch.cat(plain)).square().sum().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert are_packed(made)
    torch.testing.assert_close(made, plain)


def test_differentiated_twice():
    made, x = together(), torch.randn(5, K, device=DEVICE, requires_grad=True)

    def twice(whole):
        first = torch.autograd.grad(F.linear(x, whole).pow(3).sum(), made, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), [x, *made])

    torch.testing.assert_close(twice(concat(made)), twice(torch.cat(made)))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_main_grad_takes_no_graph():
    made = with_main_grads(together())
    x = torch.randn(5, K, device=DEVICE)
    loss = F.linear(x, concat(made)).square().sum()
    with pytest.raises(RuntimeError, match="differentiable once"):
        loss.backward(create_graph=True)
    assert not any(p.main_grad.any() for p in made)


# ---- products with all of them ----


def _linear(x, weight, bias, backend):
    return onepass.linear(x, weight, bias, backend=backend)


def _norm_linear(x, weight, bias, backend):
    return onepass.norm_linear(x, torch.linspace(0.5, 1.5, x.shape[-1], device=x.device), weight, bias, backend=backend)


def _activation_linear(x, weight, bias, backend):
    return onepass.activation_linear(x, weight, bias, "gelu", backend=backend)


def _formula(op, x, weight, bias):
    if op is _norm_linear:
        x = F.rms_norm(x, x.shape[-1:], torch.linspace(0.5, 1.5, K, device=x.device).double(), 1e-6)
    elif op is _activation_linear:
        x = F.gelu(x, approximate="tanh")
    return F.linear(x, weight, bias)


OPS = pytest.mark.parametrize("op", (_linear, _norm_linear, _activation_linear), ids=lambda op: op.__name__[1:])
LIE = pytest.mark.parametrize("where", ("together", "apart", "main_grads apart", "weights apart"))


def laid_as(where, make=parameters):
    """Weights and biases with main_grad, one of each interleaved as modules have them, and how many bytes apart they lie."""
    weights, biases = make(), make(row=())
    if where in ("together", "main_grads apart"):
        assert pack(weights) and pack(biases)
    for made in (weights, biases):
        with_main_grads(made, near=where in ("together", "weights apart"))
    return weights, biases


@OPS
@backends
@pytest.mark.parametrize("lie", (True, False), ids=("together", "apart"))
def test_values_and_gradients_of_products(op, backend, lie):
    weights, biases = parameters(), parameters(row=())
    assert not lie or (pack(weights) and pack(biases))
    x = torch.randn(3, 5, K, device=DEVICE, requires_grad=True)
    y = op(x, concat(weights), concat(biases), backend)
    dy = torch.randn_like(y)
    y.backward(dy)
    leaves = [t.detach().double().requires_grad_() for t in (x, *weights, *biases)]
    exact = _formula(op, leaves[0], torch.cat(leaves[1:4]), torch.cat(leaves[4:]))
    exact.backward(dy.double())
    got = [y.detach(), *(t.grad for t in (x, *weights, *biases))]
    torch.testing.assert_close([t.double() for t in got], [exact.detach(), *(t.grad for t in leaves)], rtol=1e-5, atol=1e-5)


@OPS
@backends
@LIE
def test_gradients_of_products_into_main_grad(op, backend, where):
    """Of a frozen x, and then twice over one graph."""
    weights, biases = laid_as(where)
    made = [*weights, *biases]
    totals = [torch.zeros_like(p, dtype=torch.float64) for p in made]
    for frozen in (True, False):
        x = torch.randn(3, 5, K, device=DEVICE, requires_grad=not frozen)
        y = op(x, concat(weights), concat(biases), backend)
        dy = torch.randn_like(y)
        leaves = [t.detach().double().requires_grad_() for t in (x, *made)]
        exact = _formula(op, leaves[0], torch.cat(leaves[1:4]), torch.cat(leaves[4:]))
        dx, *grads = torch.autograd.grad(exact, leaves, dy.double())
        for times in (1,) if frozen else (1, 2):
            for parameter in made:
                parameter.grad, parameter.grad_added_to_main_grad = None, False
            y.backward(dy, retain_graph=times == 1)
            for total, grad in zip(totals, grads, strict=True):
                total += grad
            torch.testing.assert_close([g.double() for g in main_grads_of(made)], totals, rtol=1e-5, atol=1e-5)
            assert all(p.grad_added_to_main_grad and not p.grad.any() for p in made)  # placeholders, so that hooks run
            assert frozen or torch.allclose(x.grad.double(), times * dx, rtol=1e-5, atol=1e-5)


def test_bf16_weights_gather_in_fp32_what_bf16_would_lose():
    made = with_main_grads(together(dtype=torch.bfloat16))
    x = torch.full((1, K), 2.0**-6, device=DEVICE, dtype=torch.bfloat16)
    for parameter in made:
        parameter.main_grad.fill_(1)
    for _ in range(16):
        onepass.linear(x, concat(made)).backward(torch.full((1, 40), 2.0**-6, device=DEVICE, dtype=torch.bfloat16))
    assert all(torch.equal(p.main_grad, torch.full_like(p.main_grad, 1 + 2.0**-8)) for p in made)


def test_the_product_adds_to_all_of_the_main_grads_at_once(monkeypatch):
    made = with_main_grads(together())
    added, real = [], convention._PRODUCT
    record = real._replace(add=lambda main_grad, *rest: added.append(main_grad.shape) or real.add(main_grad, *rest))
    monkeypatch.setattr(convention, "_PRODUCT", record)
    seen = []
    whole = concat(made)
    whole.register_hook(lambda grad: seen.append(grad.stride()))
    onepass.linear(torch.randn(5, K, device=DEVICE), whole).sum().backward()
    assert added == [(40, K)] and seen == [(0, 0)]  # nothing of the gradient's size but main_grad


# ---- who asks ----


@LIE
def test_each_kind_of_pass_gets_what_it_asks_for(where):
    made = laid_as(where)[0]
    x = torch.randn(5, K, device=DEVICE, requires_grad=True)
    dx, *expected = torch.autograd.grad(F.linear(x, torch.cat(made)).square().sum(), [x, *made])

    def loss():
        return onepass.linear(x * 1, concat(made)).square().sum()

    with unchanged(**{f"main_grad {i}": p.main_grad for i, p in enumerate(made)}):  # passes that don't gather
        torch.testing.assert_close(torch.autograd.grad(loss(), x), (dx,))
        torch.testing.assert_close(torch.autograd.grad(loss(), made), (*expected,))
        for index, parameter in enumerate(made):
            torch.testing.assert_close(torch.autograd.grad(loss(), parameter), (expected[index],))
        torch.testing.assert_close(torch.autograd.grad(loss(), (made[2], x)), (expected[2], dx))
        whole = concat(made)
        torch.testing.assert_close(
            torch.autograd.grad(onepass.linear(x, whole).square().sum(), whole), (torch.cat(expected),), rtol=1e-5, atol=1e-5
        )
        loss().backward(inputs=[x])
    assert not any(p.grad_added_to_main_grad for p in made) and all(p.grad is None for p in made)
    loss().backward(inputs=[made[1]])
    assert [p.grad_added_to_main_grad for p in made] == [False, True, False]
    torch.testing.assert_close(main_grads_of(made), [torch.zeros_like(expected[0]), expected[1], torch.zeros_like(expected[2])])
    loss().backward()
    torch.testing.assert_close(main_grads_of(made), [expected[0], 2 * expected[1], expected[2]])


@pytest.mark.parametrize("frozen", (False, True), ids=("", "one frozen"))
def test_a_pass_by_something_else_makes_no_product_for_them(monkeypatch, frozen):
    made = together()
    made[0].requires_grad_(not frozen)
    x = torch.randn(5, K, device=DEVICE, requires_grad=True)
    wanted = []
    monkeypatch.setattr("onepass.product.product.weight_gradient", lambda *args: wanted.append(args[-1]))
    torch.autograd.grad(onepass.norm_linear(x, None, concat(made)).sum(), x)
    torch.autograd.grad(onepass.norm_linear(x, None, concat(made)).sum(), made[1], allow_unused=True)
    assert [each.name for each in wanted] == ["RETURN"]


@LIE
def test_used_twice_and_by_others_too(where):
    """One result in two of our ops, the same parameters as one once more, and one of them alone in PyTorch's own product."""
    made = laid_as(where)[0]
    x = torch.randn(5, K, device=DEVICE)

    def loss(first, second, product):
        y = product(product(x, first)[:, :K].tanh(), first) + product(x, second).sin()
        return (y.square().sum() + product(x, first[3:5]).sum() + F.linear(x, made[1]).square().sum()) / 8

    whole = torch.cat(made)
    expected = torch.autograd.grad(loss(whole, whole, F.linear), made)
    for step in (1, 2):
        for parameter in made:
            parameter.grad, parameter.grad_added_to_main_grad = None, False
        loss(concat(made), concat(made), onepass.linear).backward()
        left = [p.grad for p in made]  # what PyTorch's own product gives the second comes the way of autograd
        assert left[1].any() and not left[0].any() and not left[2].any()
        apart = torch.autograd.grad(F.linear(x, made[1]).square().sum() / 8, made[1])[0]
        want = [step * expected[0], step * (expected[1] - apart), step * expected[2]]
        torch.testing.assert_close(main_grads_of(made), want)
        torch.testing.assert_close(left[1], apart)


def test_an_output_that_nobody_uses_moves_nothing():
    made = with_main_grads(together())
    x = torch.randn(5, K, device=DEVICE, requires_grad=True)
    _, normed = onepass.norm_linear(x, None, concat(made), return_norm_output=True)
    normed.sum().backward()
    assert not any(p.main_grad.any() or p.grad_added_to_main_grad for p in made) and x.grad is not None


def test_a_gradient_of_theirs_is_not_put_off():
    made = with_main_grads(together())
    with pytest.raises(ValueError, match="cannot defer"):
        onepass.linear(torch.randn(5, K, device=DEVICE), concat(made), deferred=DeferredWgrad())


@LIE
def test_megatron_fsdps_buffer_is_overwritten(where):
    made = laid_as(where)[0]
    for parameter in made:
        parameter.__fsdp_param__, parameter.buffer = True, parameter.main_grad.fill_(float("nan"))
        parameter.get_main_grad = lambda parameter=parameter: parameter.buffer
        del parameter.main_grad
    x = torch.randn(5, K, device=DEVICE)
    expected = torch.autograd.grad(F.linear(x, torch.cat(made)).square().sum(), made)
    for _ in range(2):
        onepass.linear(x, concat(made)).square().sum().backward()
        torch.testing.assert_close([p.buffer for p in made], [*expected])


@pytest.mark.parametrize("watched", (False, True), ids=("", "watched"))
def test_what_warms_up_for_a_capture_leaves_main_grad_as_it_was(watched):
    made = with_main_grads(together())
    mode = Operators() if watched else torch.enable_grad()
    with graphed(made), mode, unchanged(**{f"main_grad {i}": p.main_grad for i, p in enumerate(made)}):
        x = torch.randn(5, K, device=DEVICE, requires_grad=True)
        dx, *grads = torch.autograd.grad(onepass.linear(x, concat(made)).sum(), [x, *made])
    assert dx.any() and not any(grad.any() for grad in grads)
    assert [grad.shape for grad in grads] == [p.shape for p in made]


# ---- MainGrads ----


class _Layer(nn.Module):
    """Weights and biases lie turn by turn, as a model lists them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(K, device=DEVICE)
        self.q, self.k, self.v = (nn.Linear(K, n, device=DEVICE) for n in (64, 128, 64))
        self.out = nn.Linear(256, K, device=DEVICE)

    def kinds(self):
        layers = self.q, self.k, self.v
        return [layer.weight for layer in layers], [layer.bias for layer in layers]

    def forward(self, x):
        weight, bias = map(concat, self.kinds())
        return onepass.linear(onepass.linear(self.norm(x), weight, bias).tanh(), self.out.weight, self.out.bias)


@pytest.mark.parametrize("bucket_bytes", [1, 12_000, 1 << 30])
def test_main_grads_keeps_them_together_in_their_order(bucket_bytes):
    model = _Layer()
    for kind in model.kinds():
        assert pack(kind)
    main_grads = MainGrads(model, bucket_bytes=bucket_bytes)
    order = [place.name for bucket in main_grads.buckets for place in bucket.places]
    assert order == [
        "out.bias", "out.weight", "q.bias", "k.bias", "v.bias", "q.weight", "k.weight", "v.weight", "norm.bias", "norm.weight",
    ]  # fmt: skip
    for kind in model.kinds():
        assert are_packed(main_grads_of(kind)) and concat(kind).main_grad.shape == concat(kind).shape
        assert len({id(main_grads._bucket_of[id(parameter)]) for parameter in kind}) == 1
    for bucket in main_grads.buckets:
        assert all(place.start % 64 == 0 and place.parameter.main_grad.shape == place.parameter.shape for place in bucket.places)
        assert bucket.places[0].start == 0
        stops = [0, *(place.stop for place in bucket.places)]
        assert all(place.start >= stop for place, stop in zip(bucket.places, stops, strict=False))
        ends = {id(model.kinds()[0][0]): 3, id(model.kinds()[1][0]): 3}.get(id(bucket.places[0].parameter), 1)
        assert len(bucket.places) == ends or bucket.places[-1].stop * 4 <= bucket_bytes


def test_main_grads_lays_what_only_shares_a_storage_as_ever():
    flat = torch.randn(64 * K, device=DEVICE)
    left = [nn.Parameter(flat[: 16 * K].view(16, K)), nn.Parameter(flat[16 * K : 32 * K].view(16, K))]
    made = together(64, 64, 64)
    made[1].requires_grad_(False)  # the others are not all that fills the storage
    main_grads = MainGrads([("a", left[0]), ("b", left[1]), ("c", made[0]), ("d", made[1]), ("e", made[2])])
    assert [place.name for bucket in main_grads.buckets for place in bucket.places] == ["e", "c", "b", "a"]


def test_main_grads_looks_at_where_they_lie_not_at_how_they_are_listed():
    made = together()
    main_grads = MainGrads(made[1:] + made[:1])
    assert are_packed(main_grads_of(made)) and concat(made).main_grad.shape == (sum(ROWS), K)
    between = parameters(4)
    groups = packed_groups([made[2], *between, *made[:2]])
    assert [[*map(id, group)] for group in groups] == [[*map(id, between)], [*map(id, made)]]
    main_grads.close()


@pytest.mark.parametrize("lie", ("together", "apart", "later"))
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_steps_with_main_grads(bucket_bytes, lie):
    """Two steps of three microbatches: exact, hooks see each parameter once a backward, and nothing is left in .grad."""
    model = _Layer()
    plain = copy.deepcopy(model)
    for kind in model.kinds() if lie == "together" else ():
        assert pack(kind)
    main_grads = MainGrads(model, bucket_bytes=bucket_bytes)
    for kind in model.kinds() if lie == "later" else ():
        assert pack(kind)
    arrived = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    for _ in range(2):
        main_grads.zero_()
        plain.zero_grad()
        for last in (False, False, True):
            x = torch.randn(6, K, device=DEVICE)
            arrived.clear()
            if last:
                model(x).square().sum().backward()
            else:
                with main_grads.accumulate():
                    model(x).square().sum().backward()
            plain(x).square().sum().backward()
            assert sorted(arrived) == sorted(name for name, _ in model.named_parameters())
            assert all(p.grad is None and not p.grad_added_to_main_grad for p in model.parameters())
        assert main_grads._next == len(main_grads.buckets)  # all reductions began in backward
        main_grads.finish()
        expected = [parameter.grad for parameter in plain.parameters()]
        torch.testing.assert_close([p.main_grad for p in model.parameters()], expected, rtol=1e-5, atol=1e-4)
    main_grads.mark_zeroed()
    (concat(model.kinds()[0]).main_grad if lie == "together" else model.q.weight.main_grad).add_(1)
    main_grads.zero_()  # which must not take the buffers for clear still
    assert not any(buffer.any() for buffer in main_grads.buffers)


# ---- wrapped ----


@LIE
@pytest.mark.parametrize("kind", ("reentrant", "not reentrant", "watched"))
def test_checkpointing_and_modes_add_once(where, kind):
    weights, biases = laid_as(where)
    made = [*weights, *biases]
    x = torch.randn(5, K, device=DEVICE, requires_grad=True)
    expected = torch.autograd.grad(F.linear(x, torch.cat(weights), torch.cat(biases)).square().sum(), made)

    def loss(x):
        return onepass.linear(x, concat(weights), concat(biases)).square().sum()

    if kind == "watched":
        with Operators() as mode:
            loss(x).backward()
        assert any("add_gradient" in name for name in mode.names)
        assert ("aten.cat.default" in mode.names) is (where in ("apart", "weights apart"))
    else:
        checkpoint(loss, x, use_reentrant=kind == "reentrant").backward()
    torch.testing.assert_close(main_grads_of(made), [*expected])
    assert all(p.grad_added_to_main_grad and not p.grad.any() for p in made)


@OPS
@LIE
def test_autocast(op, where):
    weights, biases = laid_as(where)
    x = torch.randn(5, K, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = op(x, torch.cat(weights), torch.cat(biases), None)
        y = op(x, concat(weights), concat(biases), None)
    assert y.dtype is expected.dtype and torch.equal(y, expected)
    dx, *grads = torch.autograd.grad(expected.float().square().sum(), [x, *weights, *biases])
    y.float().square().sum().backward()
    torch.testing.assert_close([x.grad, *main_grads_of([*weights, *biases])], [dx, *grads], rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("where", (None, "together", "apart"))
def test_compiled(where):
    torch._dynamo.reset()
    weights, biases = (together(), together(row=())) if where is None else laid_as(where)
    made = [*weights, *biases]
    x = torch.randn(5, K, device=DEVICE)
    expected = torch.autograd.grad(F.linear(x, torch.cat(weights), torch.cat(biases)).square().sum(), made)

    def loss(x):
        return onepass.linear(x, concat(weights), concat(biases)).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for step in (1, 2):
        compiled(x).backward()
        got = [p.grad for p in made] if where is None else main_grads_of(made)
        torch.testing.assert_close(got, [step * grad for grad in expected])
    if where is not None:
        assert all(p.grad_added_to_main_grad and not p.grad.any() for p in made)
        with unchanged(main_grad=made[0].main_grad), pytest.raises(RuntimeError, match="main_grad must be gathered"):
            torch.autograd.grad(compiled(x), made[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at each input's
def test_made_outside_of_a_compiled_part():
    torch._dynamo.reset()
    made = with_main_grads(together())
    x = torch.randn(5, K, device=DEVICE)
    expected = torch.autograd.grad(F.linear(x, torch.cat(made)).square().sum(), made)
    compiled = torch.compile(lambda x, weight: onepass.linear(x, weight).square().sum(), fullgraph=True, backend="aot_eager")
    compiled(x, concat(made)).backward()
    torch.testing.assert_close(main_grads_of(made), [*expected])
    assert all(p.grad_added_to_main_grad and not p.grad.any() for p in made)


def test_under_a_transform():
    made = with_main_grads(together())
    x = torch.randn(3, 5, K, device=DEVICE)
    got = torch.func.vmap(lambda x: onepass.linear(x, concat(made)))(x)
    torch.testing.assert_close(got, F.linear(x, torch.cat(made)))
    grad = torch.func.grad(lambda k: onepass.linear(x, concat([made[0], k, made[2]])).square().sum())(made[1])
    torch.testing.assert_close(grad, torch.autograd.grad(F.linear(x, torch.cat(made)).square().sum(), made[1])[0])
