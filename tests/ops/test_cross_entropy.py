"""What cross_entropy is, and how it behaves under autograd, the compiler and whatever else people do to an op."""

import math

import pytest
import torch
import torch.nn.functional as F
from ops.calls import backends, equal, needs_triton
from ops.cross_entropy_oracle import Case, cases, draw, judge_case, made
from ops.oracle import BF16, DEVICE, FP32, FP64, laid_out
from torch.utils.checkpoint import checkpoint

import onepass
import onepass.ops.loss.cross_entropy as module
from onepass.ops.loss import reduction as losses
from onepass.ops.loss import row_formula
from onepass.ops.loss.formula import LossTerms
from onepass.testing.poison import bytes_kept, saved_tensors, unchanged

reductions = pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
NAN, INF = float("nan"), float("inf")


def given_rows(lead=(2, 2), V=40, dtype=FP32):
    """Logits that ask for a gradient, and labels of which the second is ignored."""
    case = Case(lead, V, dtype)
    logits, labels, _ = draw(case)
    labels.view(-1)[1] = -100
    return logits.requires_grad_(), labels


def both(function, logits, labels, dy=None):
    """The loss, and the gradient of fresh logits."""
    leaf = logits.detach().requires_grad_()
    loss = function(leaf, labels)
    loss.backward(torch.ones_like(loss) if dy is None else dy)
    return [loss.detach(), leaf.grad]


def op(**options):
    return lambda logits, labels: onepass.cross_entropy(logits, labels, **options)


# ---- what it computes ----


@backends
def test_the_formula_by_hand(backend):
    z, right, a, weight = [1.0, -2.0, 0.5], 2, 0.25, 0.5
    lse = math.log(sum(map(math.exp, z)))
    expected = (1 - a) * (lse - z[right]) + a * (lse - sum(z) / 3) + weight * lse**2
    given = torch.tensor([z, [9.0, 9.0, 9.0]], device=DEVICE), torch.tensor([right, -100], device=DEVICE)
    options = {"label_smoothing": a, "z_loss": weight, "backend": backend}
    for reduction in ("mean", "sum"):
        loss, dz = both(op(reduction=reduction, **options), *given)
        torch.testing.assert_close(loss.item(), expected, rtol=1e-6, atol=0)
    p = [math.exp(t - lse) * (1 + 2 * weight * lse) - a / 3 for t in z]
    p[right] -= 1 - a
    torch.testing.assert_close(dz, torch.tensor([p, [0.0] * 3], device=DEVICE))


def _targets(what, rows, V=40):
    """Labels, or probabilities that don't sum to 1; and class weights, one of which is 0."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.rand(V, generator=generator).to(DEVICE) * 3 if "weight" in what else None
    if weight is not None:
        weight[7] = 0.0
    mixed = torch.randn(*rows.shape, V, generator=generator).softmax(-1).to(DEVICE) * 2
    return (mixed if "probabilities" in what else rows), weight


@backends
@reductions
@pytest.mark.parametrize("smoothing", (0, 0.1))
@pytest.mark.parametrize("what", ("weight", "probabilities", "weight and probabilities"))
def test_class_weights_and_probabilities_are_pytorchs(what, smoothing, reduction, backend):
    logits, labels = given_rows((2, 3))
    labels.view(-1)[2] = 7
    targets, weight = _targets(what, labels)
    options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    flat = lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1), **options)  # noqa: E731
    theirs, dy = both(flat, logits, targets), None
    if reduction == "none":
        dy = torch.rand(2, 3, device=DEVICE)
        theirs = both(lambda x, y: flat(x, y).view(2, 3), logits, targets, dy)
    torch.testing.assert_close(both(op(backend=backend, **options), logits, targets, dy), theirs)
    x = logits.detach()[0, 0]
    alone = op(backend=backend, **options)(x, targets[0, 0])
    torch.testing.assert_close(alone, F.cross_entropy(x, targets[0, 0], **options))
    reference = both(lambda x, y: module.cross_entropy_reference(x, y, **options), logits, targets, dy)
    torch.testing.assert_close(reference, theirs)
    options["weight"] = None if weight is None else weight.double()  # which the loss doesn't become
    wide = targets.double() if "probabilities" in what else targets
    loss = op(backend=backend, z_loss=0.1, **options)(logits, wide)
    torch.testing.assert_close(loss, module.cross_entropy_reference(logits, wide, z_loss=0.1, **options))
    assert loss.dtype is FP32


@backends
def test_softcap_and_what_else_a_call_returns(backend):
    logits, labels = given_rows((2, 3), dtype=BF16)
    options = {"softcap": 2.0, "z_loss": 0.01, "reduction": "none", "backend": backend}
    capped = lambda x, y: 2.0 * torch.tanh(x.float() / 2.0)  # noqa: E731
    loss, stats = onepass.cross_entropy(logits, labels, return_stats=True, **options)
    z, kept = capped(logits, None).detach(), labels != -100
    lse = torch.where(kept, z.logsumexp(-1), 0.0)
    torch.testing.assert_close(stats.logsumexp, lse)
    assert torch.equal(stats.correct, (z.argmax(-1) == labels) & kept) and stats.correct.dtype is torch.bool
    torch.testing.assert_close(loss, torch.where(kept, 0.01 * lse**2 - stats.log_prob, 0.0))
    assert [t.requires_grad for t in stats] == [True, True, True, False]
    some = onepass.cross_entropy(logits, labels, return_stats=["z_loss", "correct"], **options)[1]
    torch.testing.assert_close(some.z_loss, 0.01 * lse**2)
    assert torch.equal(some.correct, stats.correct) and some.logsumexp is None and not some.z_loss.requires_grad
    (dlogits,) = torch.autograd.grad(stats.logsumexp.sum() + stats.entropy.sum(), logits, retain_graph=True)
    leaf = logits.detach().float().requires_grad_()
    p = capped(leaf, None).softmax(-1)
    theirs = (torch.where(kept, capped(leaf, None).logsumexp(-1), 0.0) - (p * p.log()).sum(-1) * kept).sum()
    torch.testing.assert_close(dlogits.float(), torch.autograd.grad(theirs, leaf)[0], rtol=1e-2, atol=1e-3)
    before = stats.logsumexp.clone()
    stats.logsumexp.data.zero_()  # its own memory
    loss.sum().backward()
    assert torch.equal(logits.grad, both(op(**options), logits, labels)[1]) and before.any()


@backends
@reductions
@pytest.mark.parametrize("smoothing", (0, 0.1))
def test_as_pytorchs_own(smoothing, reduction, backend):
    logits, labels = given_rows()
    stock = lambda x, y: F.cross_entropy(  # noqa: E731
        x.flatten(0, -2), y.flatten(), reduction=reduction, label_smoothing=smoothing
    )
    ours = both(op(reduction=reduction, label_smoothing=smoothing, backend=backend), logits, labels)
    theirs = both(stock, logits, labels)
    torch.testing.assert_close(ours, [theirs[0].view(ours[0].shape), theirs[1]])
    loss = onepass.cross_entropy(logits[0, 0], labels[0, 0], None, reduction, backend=backend)
    assert loss.shape == ()
    torch.testing.assert_close(loss, F.cross_entropy(logits[0, 0], labels[0, 0]))
    for ignored in (-1, 3):  # no label of these rows
        same = op(reduction=reduction, ignore_index=ignored, label_smoothing=smoothing, backend=backend)
        assert equal(ours, both(same, logits, torch.where(labels == -100, ignored, labels)))


@needs_triton
@pytest.mark.parametrize("case", cases(), ids=str)
def test_against_fp64(case):
    report = judge_case(module, case)
    assert report, report


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_torch_backend_against_fp64_in_blocks(case, monkeypatch):
    for name in ("_BLOCK", "_LARGE_BLOCK"):
        monkeypatch.setattr(row_formula, name, 2 * case.V + 1)
    report = judge_case(module, case, backend="torch")
    assert report, report


@backends
def test_fp64_stays_fp64(backend):
    logits, labels = given_rows(dtype=FP64)
    if backend == "triton":
        with pytest.raises(RuntimeError, match=r"logits is torch\.float64"):
            onepass.cross_entropy(logits, labels, backend=backend)
        return
    ours = both(op(reduction="none", label_smoothing=0.1, z_loss=0.1, backend=backend), logits, labels)
    exact = both(
        lambda x, y: module.cross_entropy_reference(x, y, reduction="none", label_smoothing=0.1, z_loss=0.1), logits, labels
    )
    assert ours[0].dtype == FP64
    torch.testing.assert_close(ours, exact, rtol=1e-13, atol=1e-14)


@backends
@reductions
def test_all_ignored_is_zero_and_not_read(reduction, backend):
    logits, labels = torch.full((3, 40), NAN, device=DEVICE), torch.full((3,), -100, device=DEVICE)
    for smoothing in (0.0, 0.5):
        options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": smoothing, "backend": backend}
        assert all(not t.any() for t in both(op(**options), logits, labels))


@backends
def test_nan_and_infinities_stay_in_their_rows(backend):
    logits, labels = (t.detach().clone() for t in given_rows((5,)))
    labels[:] = torch.tensor([3, 3, 7, -100, 3])
    logits[0, 5], logits[1, 5], logits[2, 5:], logits[3, 5] = NAN, INF, -INF, NAN
    labels[2] = 4
    loss, dlogits = both(op(reduction="none", backend=backend), logits, labels)
    assert loss.isfinite().tolist() == [False, False, True, True, True]
    assert dlogits.isfinite().all(-1).tolist() == [False, False, True, True, True]
    assert dlogits[0].isnan().all() and not dlogits[2, 5:].any() and not dlogits[3].any()
    torch.testing.assert_close(loss[2], F.cross_entropy(logits[2], labels[2]))


@backends
@reductions
def test_labels_of_no_token_are_nan_where_nobody_looks(reduction, backend, monkeypatch):
    monkeypatch.setattr(module, "can_validate_labels", lambda labels: False)
    logits, labels = (t.detach() for t in given_rows((4,)))
    sound = both(op(reduction="none", backend=backend), logits, labels)
    for wrong in (-1, 40, 1 << 40):
        labels[2] = wrong
        loss, dlogits = both(op(reduction=reduction, backend=backend), logits, labels)
        assert loss[2].isnan() and loss.isfinite().sum() == 3 if reduction == "none" else loss.isnan()
        assert not dlogits[2].any()
        if reduction == "sum":
            assert torch.equal(dlogits[[0, 1, 3]], sound[1][[0, 1, 3]])


@backends
def test_rows_further_apart_than_32_bits_count(backend):
    row = 2**31 + 64
    logits = torch.empty(row + 64, dtype=BF16, device=DEVICE).as_strided((2, 40), (row, 1))
    values, labels = given_rows((2,), dtype=BF16)
    with torch.no_grad():
        logits.copy_(values)
    assert equal(
        both(op(reduction="none", backend=backend), logits, labels), both(op(reduction="none", backend=backend), values, labels)
    )


# ---- autograd ----


@backends
def test_what_is_kept_and_that_it_is_not_written(backend):
    logits, labels = given_rows((3, 4), 100, BF16)
    with saved_tensors() as kept:
        loss = onepass.cross_entropy(logits, labels, backend=backend)
    assert logits.data_ptr() in {t.data_ptr() for t in kept}
    assert bytes_kept(kept, logits, labels) <= 12 * 4 * 2 + 4  # each row's logsumexp, beside its loss, and the mean's scale
    with unchanged(**{f"kept{i}": t for i, t in enumerate(kept)}):
        loss.backward()
    with saved_tensors() as kept:
        onepass.cross_entropy(logits.detach(), labels, backend=backend)
    assert not kept


@backends
def test_a_loss_of_each_row_is_its_own_and_can_be_masked_in_place(backend):
    logits, labels = given_rows()
    mask = torch.tensor([[1.0, 2.0], [0.0, 0.5]], device=DEVICE)
    loss = onepass.cross_entropy(logits, labels, reduction="none", backend=backend)
    assert loss._base is None and loss.untyped_storage().nbytes() == loss.nbytes
    loss *= mask
    loss.sum().backward()
    assert torch.equal(logits.grad, both(op(reduction="none", backend=backend), logits, labels, mask)[1])


# ---- over the logits ----


@backends
@reductions
def test_over_the_logits_is_the_same(reduction, backend):
    logits, labels = given_rows((4,), 40, BF16)
    options = {"reduction": reduction, "label_smoothing": 0.1, "backend": backend}
    ours = made(logits.detach().clone().requires_grad_())
    loss = onepass.cross_entropy(ours, labels, inplace_backward=True, **options)
    dy = torch.rand_like(loss)
    with unchanged(dy=dy, labels=labels):
        (dlogits,) = torch.autograd.grad(loss, ours, dy, retain_graph=True)
    assert dlogits.data_ptr() == ours.data_ptr() and torch.equal(dlogits, ours)
    assert equal([loss, dlogits], both(op(**options), logits, labels, dy))
    with pytest.raises(RuntimeError, match=r"inplace_backward=True.*once"):
        torch.autograd.grad(loss, ours, dy)


@backends
def test_who_needs_the_logits_after_that_is_told(backend):
    leaf, labels = given_rows()
    call = op(inplace_backward=True, backend=backend)
    logits = leaf * 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (logits.square().sum() + call(logits, labels) * 0).backward()
    logits = leaf * 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (call(logits, labels) + call(logits, labels)).backward()
    for bad in (leaf, leaf.view(4, -1), leaf[:1]):
        with pytest.raises(ValueError, match=r"logits must be made by an op.*a leaf that requires grad"):
            call(bad, labels.view(bad.shape[:-1]) if bad.dim() == 2 else labels[: len(bad)])
    for grad, kept in ((True, leaf.detach()), (False, leaf)):  # nothing is written there
        with torch.set_grad_enabled(grad):
            assert torch.equal(call(kept, labels), op(backend=backend)(leaf, labels))


@backends
def test_over_the_logits_of_a_model(backend):
    x, labels = torch.randn(4, 8, device=DEVICE), torch.tensor([1, 39, -100, 0], device=DEVICE)
    weight = torch.randn(40, 8, device=DEVICE)
    found = []
    for over in (False, True):
        w = weight.clone().requires_grad_()
        onepass.cross_entropy(F.linear(x, w), labels, inplace_backward=over, backend=backend).backward()
        found.append(w.grad)
    assert torch.equal(*found)


# ---- what people wrap around it ----


@backends
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_over_the_logits(reentrant, backend):
    logits, labels = given_rows()

    def block(x, y):
        return onepass.cross_entropy(x * 2, y, inplace_backward=True, backend=backend)

    again = both(lambda x, y: checkpoint(block, x, y, use_reentrant=reentrant), logits, labels)
    assert equal(both(block, logits, labels), again)


@backends
def test_compiled_for_any_number_of_rows(backend):
    """Over the logits, of rows' losses, with weights of classes: the contract has other calls."""
    torch._dynamo.reset()
    weight = torch.linspace(0, 2, 40, device=DEVICE)
    more = {"label_smoothing": 0.1, "z_loss": 0.01, "weight": weight, "inplace_backward": True}
    call = op(reduction="none", backend=backend, **more)
    block = lambda x, y: call(x * 2, y) * 3  # noqa: E731
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for lead in ((3,), (5,)):
        logits, labels = given_rows(lead, dtype=BF16)
        plain, graph = both(block, logits, labels), both(compiled, logits, labels)
        torch.testing.assert_close(plain, graph, rtol=1e-6 if backend == "triton" else 1e-2, atol=1e-6)


@pytest.mark.parametrize("use_triton", [pytest.param(True, marks=needs_triton), False])
def test_the_registered_ops_of_ranks_are_sound(use_triton):
    logits, labels = given_rows((4,), dtype=BF16)
    logits = logits.detach()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    place, terms = torch.tensor([40, 90], device=DEVICE), LossTerms(-100, 0.1, 0.01)
    labels[0] = 77
    mixed, short = _targets("weight and probabilities", labels)
    statistics, losses_of = module.partial_statistics.op, module.partial_losses.op
    for layout, of_masses, stats in (("contiguous", (None, None), ""), ("transposed", (mixed, short.repeat(3)[:90]), "entropy")):
        x, options = laid_out(logits, layout), (*terms, stats, use_triton)
        torch.library.opcheck(statistics, (x, labels, place, *of_masses, *options), test_utils=tests)
        parts = torch.cat([statistics(x, labels, place, *of_masses, *options)] * 2)
        finish = parts, labels, place, None, x.dtype, bool(stats), *options
        torch.library.opcheck(losses_of, finish, test_utils=tests)
        found = module.RowLosses(*losses_of(*finish))
        entropy, mass = (found.entropy, found.mass) if stats else (None, None)
        given = x, labels, place, *of_masses, found.logsumexp, entropy, found.loss, None, None, entropy, mass, *terms, use_triton
        torch.library.opcheck(module.logits_gradient.op, given, test_utils=tests)


@backends
def test_fake_tensors_have_no_values_to_look_at(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        logits = torch.empty(2, 40, device=DEVICE, requires_grad=True)
        loss = onepass.cross_entropy(logits, torch.empty(2, dtype=torch.int64, device=DEVICE), backend=backend)
        loss.backward()
    assert loss.shape == () and logits.grad.shape == logits.shape


# ---- what is said of a call ----


@needs_triton
def test_explain_names_the_kernels():
    logits, labels = torch.empty(4, 5000, device=DEVICE, dtype=BF16), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    said = onepass.explain("cross_entropy", logits, labels, backend="triton").variant
    assert "forward with 3 programs a row, tiles of 1728 columns" in said and "memory of its own" in said
    assert "over the logits" in onepass.explain("cross_entropy", logits, labels, inplace_backward=True, backend="triton").variant
    assert "nothing to do" in onepass.explain("cross_entropy", logits[:0], labels[:0], backend="triton").variant


@pytest.mark.parametrize("use_triton", [pytest.param(True, marks=needs_triton), False])
def test_weighted_sums_and_means(use_triton):
    """What linear_cross_entropy asks of the pieces that the two share."""
    rows, weight = torch.rand(4500, device=DEVICE), torch.rand(4500, 1, device=DEVICE, dtype=BF16)
    labels = torch.arange(4500, device=DEVICE) % 3
    kept = labels != 1
    rows[~kept], weight[~kept] = 0.0, NAN
    given = torch.where(kept, weight.view(-1).double(), 0)
    expected = (rows * given).sum(), 1 / given.sum()
    loss, scale = losses.reduce_rows(rows, labels, 1, "mean", weight.view(-1), use_triton)
    torch.testing.assert_close((loss.double(), scale.double()), (expected[0] * expected[1], expected[1]), rtol=1e-6, atol=0)
    g = losses.row_gradient(torch.tensor(3.0, device=DEVICE), "mean", 4500, scale, weight)
    torch.testing.assert_close(g[kept].double(), 3 * given[kept] * expected[1], rtol=1e-6, atol=0)
    loss, scale = losses.reduce_rows(rows, labels, 1, "sum", weight.view(-1), use_triton)
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-6, atol=0)
    assert scale is None
    loss, scale = losses.reduce_rows(rows, labels, 1, "mean", None, use_triton)
    torch.testing.assert_close((loss, scale), (rows.sum() / 3000, torch.tensor(1 / 3000, device=DEVICE)))
    for none in (losses.reduce_rows(rows, labels * 0 + 1, 1, "mean", each, use_triton) for each in (None, weight.view(-1))):
        assert none[0] == 0 and none[1] == 0
    g = losses.row_gradient(rows.view(-1, 3), "none", 4500, None, weight)
    assert torch.equal(g[kept], (rows * weight.view(-1).float())[kept]) and g.is_contiguous()


@backends
def test_zero_rows_are_not_written(backend):
    logits, labels = torch.randn(0, 5, device=DEVICE, requires_grad=True) * 1, torch.zeros(0, dtype=torch.int64, device=DEVICE)
    aux, loss = logits.square().sum(), onepass.cross_entropy(logits, labels, backend=backend)
    (loss + aux).backward(retain_graph=True)
    loss.backward()
    assert logits._version == 0
