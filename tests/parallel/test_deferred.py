"""DeferredWgrad: what backward would have added is added by flush, to the bit; what is kept, and what is refused.

Over ranks and in pipeline schedules: test_deferred_ranks.py.
"""

import copy
import pickle

import pytest
import torch
from ops.calls import backends, equal
from ops.norm_oracle import BF16, DEVICE, FP32
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import deferred
from onepass.parallel import DeferredWgrad, MainGrads

K, N = 12, 8

OPS = {
    "linear": lambda x, p, **more: onepass.linear(x, p["weight"], p["bias"], **more),
    "rms_norm": lambda x, p, **more: onepass.norm_linear(x, p["vector"], p["weight"], p["bias"], **more),
    "activation": lambda x, p, **more: onepass.activation_linear(
        x, p["weight"], p["bias"], "gelu", activation_bias=p["vector"], **more
    ),
    "gated_rms_norm": lambda x, p, **more: onepass.gated_norm_linear(
        x, x.detach().flip(0), p["vector"], p["weight"], p["bias"], **more
    ),
}
ops = pytest.mark.parametrize("name", OPS)


def parameters(dtype=FP32, main=FP32, flag=True):
    shapes = {"weight": (N, K), "bias": (N,), "vector": (K,)}
    made = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(seed)
        made[name] = nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype))
        made[name].main_grad = torch.zeros(shape, dtype=main, device=DEVICE)
        if flag:
            made[name].grad_added_to_main_grad = False
    return made


def microbatch(seed=0, rows=(3, 5), dtype=FP32):
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(*rows, K, generator=generator), torch.randn(*rows, N, generator=generator)
    return x.to(DEVICE, dtype).requires_grad_(), dy.to(DEVICE, dtype)


def trained(call, made, **more):
    """Three microbatches; the gradients of x."""
    grads = []
    for seed in range(3):
        x, dy = microbatch(seed, dtype=made["weight"].dtype)
        call(x, made, **more).backward(dy)
        grads.append(x.grad)
    return grads


def main_grads(made):
    return [t.main_grad for t in made.values()]


@ops
@backends
@pytest.mark.parametrize("main", (FP32, BF16), ids=lambda t: f"main {t}")
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_flush_adds_what_backward_would_have_added(name, backend, dtype, main):
    at_once, later, put_off = parameters(dtype, main), parameters(dtype, main), DeferredWgrad()
    exact = trained(OPS[name], at_once, backend=backend)
    got = trained(OPS[name], later, backend=backend, deferred=put_off)
    assert equal(got, exact)
    assert len(put_off) == 3 and not later["weight"].main_grad.any()
    assert later["weight"].grad_added_to_main_grad and not later["weight"].grad.any()
    assert torch.equal(later["bias"].main_grad, at_once["bias"].main_grad)  # biases are never put off
    put_off.flush()
    assert equal(main_grads(later), main_grads(at_once)) and at_once["weight"].main_grad.any()
    assert len(put_off) == 0
    put_off.flush()  # nothing more
    assert equal(main_grads(later), main_grads(at_once))


@ops
def test_limit_is_of_each_weight_and_the_first_are_put_off(name):
    first, second, at_once, put_off = parameters(), parameters(), parameters(), DeferredWgrad(limit=1)
    trained(OPS[name], at_once)
    trained(OPS[name], first, deferred=put_off)
    trained(OPS[name], second, deferred=put_off)
    assert len(put_off) == 2
    x, dy = microbatch(0)
    alone = parameters()
    OPS[name](x, alone).backward(dy)
    for made in (first, second):  # the first microbatch is missing, and nothing else
        torch.testing.assert_close(made["weight"].main_grad, at_once["weight"].main_grad - alone["weight"].main_grad)
    put_off.flush()
    torch.testing.assert_close(first["weight"].main_grad, at_once["weight"].main_grad)
    trained(OPS[name], first, deferred=put_off)  # and the next step's first is put off again
    assert len(put_off) == 1


@ops
def test_a_pass_that_wants_the_gradient_itself_gets_it(name):
    made, put_off = parameters(), DeferredWgrad()
    x, dy = microbatch()
    y = OPS[name](x, made, deferred=put_off)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)  # nobody asks for the weight
    dweight, again = torch.autograd.grad(y, (made["weight"], x), dy)
    plain = parameters()
    OPS[name](microbatch()[0], plain).backward(dy)
    assert torch.equal(dx, again) and dx.any()
    assert torch.equal(dweight, plain["weight"].main_grad)
    assert len(put_off) == 0 and not made["weight"].main_grad.any()


@ops
def test_nothing_is_kept_where_nobody_asks(name):
    made, put_off = parameters(), DeferredWgrad()
    x, dy = microbatch()
    with torch.no_grad():
        OPS[name](x, made, deferred=put_off)
    made["weight"].requires_grad_(False)
    del made["weight"].main_grad  # not needed then
    OPS[name](x, made, deferred=put_off).backward(dy)
    assert len(put_off) == 0 and x.grad.any() and made["bias"].main_grad.any()


def test_a_weight_used_twice_and_a_tied_embedding():
    made, at_once, put_off = parameters(), parameters(), DeferredWgrad()
    ids = torch.arange(5, device=DEVICE) % N
    for here, more in ((at_once, {}), (made, {"deferred": put_off})):
        x, _ = microbatch()
        hidden = F.embedding(ids, here["weight"]) + x[0]
        y = onepass.linear(hidden, here["weight"], **more)
        y = onepass.linear(y @ torch.ones(N, K, device=DEVICE), here["weight"], **more)
        y.sum().backward()
    assert len(put_off) == 2
    torch.testing.assert_close(made["weight"].grad, at_once["weight"].grad)  # the embedding's
    put_off.flush()
    torch.testing.assert_close(made["weight"].main_grad, at_once["weight"].main_grad)


@ops
def test_under_checkpointing(name):
    made, at_once, put_off = parameters(), parameters(), DeferredWgrad()
    trained(OPS[name], at_once)
    for seed in range(3):
        x, dy = microbatch(seed)
        checkpoint(OPS[name], x, made, deferred=put_off, use_reentrant=False).backward(dy)
    put_off.flush()
    assert equal(main_grads(made), main_grads(at_once))


def test_under_autocast():
    made, at_once, put_off = parameters(), parameters(), DeferredWgrad()
    for here, more in ((at_once, {}), (made, {"deferred": put_off})):
        with torch.autocast(DEVICE, torch.bfloat16):
            y = onepass.linear(microbatch()[0], here["weight"], here["bias"], **more)
        y.float().sum().backward()
    assert put_off._kept[0].work.tensors["x"].dtype == BF16
    put_off.flush()
    assert equal(main_grads(made), main_grads(at_once)) and made["weight"].main_grad.any()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own, where a graph is left
@pytest.mark.parametrize("name", ("linear", "rms_norm"))
def test_a_compiled_graph_is_left_for_it(name):
    made, at_once, put_off = parameters(), parameters(), DeferredWgrad()

    def whole(x, made, **more):
        return OPS[name](x * 2, made, backend="torch", **more).cos()

    exact = trained(whole, at_once)
    torch._dynamo.reset()
    got = trained(torch.compile(whole, backend="aot_eager"), made, deferred=put_off)
    assert len(put_off) == 3
    put_off.flush()
    for a, b in zip([*got, *main_grads(made)], [*exact, *main_grads(at_once)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="can't keep what a deferred gradient is made of"):
        torch.compile(whole, backend="aot_eager", fullgraph=True)(microbatch()[0], made, deferred=put_off)
    torch._dynamo.reset()


# ---- what is kept ----


@ops
def test_what_is_kept_is_x_and_dy_and_no_graph(name):
    made, put_off = parameters(dtype=BF16), DeferredWgrad()
    x, dy = microbatch(rows=(64,), dtype=BF16)
    OPS[name](x, made, deferred=put_off).backward(dy)
    (kept,) = put_off._kept
    held = kept.work.tensors
    assert held["x"].grad_fn is None and held["dy"].grad_fn is None
    assert put_off.nbytes == 64 * (K + N) * 2
    if name == "linear":
        assert held["x"].data_ptr() == x.data_ptr() and held["dy"].data_ptr() == dy.data_ptr()  # no copies
    put_off.flush()
    assert put_off.nbytes == 0


def test_an_expanded_gradient_is_kept_as_it_is():
    made, at_once, put_off = parameters(), parameters(), DeferredWgrad()
    for here, more in ((at_once, {}), (made, {"deferred": put_off})):
        onepass.linear(microbatch()[0], here["weight"], **more).sum().backward()
    assert put_off.nbytes < 4 * (15 * K + 15)
    put_off.flush()
    assert equal(main_grads(made), main_grads(at_once))


@pytest.mark.parametrize("which", ("x", "dy"))
def test_what_is_kept_must_not_be_written_to(which):
    made, put_off = parameters(), DeferredWgrad()
    x, dy = microbatch()
    onepass.linear(x, made["weight"], deferred=put_off).backward(dy)
    with torch.no_grad():
        (x if which == "x" else dy).zero_()
    with pytest.raises(RuntimeError, match=rf"{which} of a deferred gradient, of shape \(3, 5, .*was written to"):
        put_off.flush()
    assert not made["weight"].main_grad.any() and len(put_off) == 1
    put_off.clear()
    assert len(put_off) == 0
    put_off.flush()
    assert not made["weight"].main_grad.any()


def test_what_could_not_be_added_can_be_flushed_again(monkeypatch):
    made, at_once, put_off = parameters(), parameters(), DeferredWgrad()
    trained(OPS["linear"], at_once)
    trained(OPS["linear"], made, deferred=put_off)
    calls = []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        real(*args)

    real = deferred.add_gradient
    monkeypatch.setattr(deferred, "add_gradient", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        put_off.flush()
    assert len(put_off) == 2
    put_off.flush()
    assert equal(main_grads(made), main_grads(at_once))


def test_copies_of_a_module_share_it_and_a_checkpoint_has_none_of_its_gradients():
    put_off = DeferredWgrad(limit=3)
    model = nn.Sequential(onepass.nn.NormLinear(K, N), nn.ReLU(), onepass.nn.Linear(N, 4))
    put_off.attach(model)
    assert model[0].deferred is put_off and model[2].deferred is put_off
    copied = copy.deepcopy(model)
    assert copied[0].deferred is put_off
    made = parameters()
    trained(OPS["linear"], made, deferred=put_off)
    assert repr(put_off) == "DeferredWgrad(limit=3, 3 kept)"
    loaded = pickle.loads(pickle.dumps(put_off))
    assert loaded.limit == 3 and len(loaded) == 0
    put_off.clear()
    MainGrads(model).close()
    with pytest.raises(ValueError, match="module must have a layer that takes `deferred`"):
        put_off.attach(nn.Linear(2, 2))


def test_modules_pass_it_on():
    model = nn.Sequential(onepass.nn.NormLinear(K, K), onepass.nn.ColumnParallelLinear(K, 2 * K), onepass.nn.Linear(K, N))

    def run(x):
        y, _ = model[1](model[0](x))
        return model[2](y[..., :K])

    put_off, grads = DeferredWgrad(), MainGrads(model)
    put_off.attach(model)
    x, dy = microbatch(rows=(4,))
    run(x.cpu()).backward(dy.cpu())
    assert len(put_off) == 3
    put_off.flush()
    grads.finish()
    got = [p.main_grad.clone() for p in model.parameters()]
    grads.close()
    for layer in model:
        layer.deferred = None
    exact = torch.autograd.grad(run(x.cpu()), list(model.parameters()), dy.cpu())
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b)


def test_what_a_cuda_graph_keeps_it_must_flush_too(monkeypatch):
    made, put_off = parameters(), DeferredWgrad()
    x, dy = microbatch()
    monkeypatch.setattr(deferred, "is_capturing", lambda t: True)
    onepass.linear(x, made["weight"], deferred=put_off).backward(dy)
    put_off.flush()
    assert made["weight"].main_grad.any()
    onepass.linear(x, made["weight"], deferred=put_off).backward(dy)
    monkeypatch.setattr(deferred, "is_capturing", lambda t: False)
    with pytest.raises(RuntimeError, match=r"kept in the capture of a CUDA graph, which must flush\(\) too"):
        put_off.flush()


# ---- with MainGrads ----


def test_main_grads_wait_for_it():
    model = onepass.nn.Linear(K, N, device=DEVICE)
    put_off, grads = DeferredWgrad(), MainGrads(model)
    model.deferred = put_off
    x, dy = microbatch()
    with grads.accumulate():
        model(x).backward(dy)
    model(x).backward(dy)
    bucket = grads.buckets[0]
    assert not bucket.missing and bucket.held and grads._next == 0  # full, but not to be reduced
    with pytest.raises(RuntimeError, match=r"finish\(\) must come after all gradients, but weight's are deferred: flush"):
        grads.finish()
    with pytest.raises(RuntimeError, match=r"zero_\(\) must come .* flush them first, or clear\(\)"):
        grads.zero_()
    put_off.flush()
    assert not bucket.held and grads._next == 1
    grads.finish()
    torch.testing.assert_close(model.weight.main_grad, 2 * dy.flatten(0, 1).t() @ x.detach().flatten(0, 1))


def test_a_flush_after_the_reduction_has_begun_is_an_error_and_no_lost_gradient():
    model = onepass.nn.Linear(K, N, device=DEVICE)
    put_off, grads = DeferredWgrad(), MainGrads(model)
    model.deferred = put_off
    x, dy = microbatch()
    model(x).backward(dy)
    grads.give_up(model.weight)  # as if it had not been held
    grads.finish()
    before = model.weight.main_grad.clone()
    with pytest.raises(RuntimeError, match="weight must get its gradients before the step's reductions"):
        put_off.flush()
    assert torch.equal(model.weight.main_grad, before) and len(put_off) == 1
    with pytest.raises(RuntimeError, match="weight must get its gradients before the step's reductions"):
        model(x).backward(dy)  # too late to keep one, too


def test_a_step_that_is_given_up():
    model = onepass.nn.Linear(K, N, device=DEVICE)
    put_off, grads = DeferredWgrad(), MainGrads(model)
    model.deferred = put_off
    x, dy = microbatch()
    for handed in (False, True):
        model(x).backward(dy)
        runner = put_off.dw_builder() if handed else None
        put_off.clear()
        grads.zero_()
        if runner is not None:
            runner()
        assert not model.weight.main_grad.any() and len(put_off) == 0


def test_whoever_reduces_by_himself_can_ask():
    made, put_off = parameters(), DeferredWgrad()
    put_off.check_flushed()
    trained(OPS["linear"], made, deferred=put_off)
    with pytest.raises(RuntimeError, match="3 deferred gradients are not in main_grad yet: flush"):
        put_off.check_flushed()
    put_off.flush()
    put_off.check_flushed()


# ---- as dw_builder ----


def test_a_runner_makes_its_own_microbatch():
    made, put_off = parameters(), DeferredWgrad()
    runners, exact = [], []
    for seed in range(2):
        x, dy = microbatch(seed)
        onepass.linear(x, made["weight"], deferred=put_off).backward(dy)
        runners.append(put_off.dw_builder())
        exact.append(dy.flatten(0, 1).t() @ x.detach().flatten(0, 1))
    assert len(put_off) == 2
    runners[1]()
    torch.testing.assert_close(made["weight"].main_grad, exact[1])
    runners[1]()  # it is done
    torch.testing.assert_close(made["weight"].main_grad, exact[1])
    put_off.flush()  # what no runner has made
    torch.testing.assert_close(made["weight"].main_grad, exact[0] + exact[1])
    runners[0]()
    torch.testing.assert_close(made["weight"].main_grad, exact[0] + exact[1])
    assert len(put_off) == 0 and not put_off._handed


# ---- errors ----


@ops
def test_it_cannot_be_put_off_without_main_grad(name):
    made, put_off = parameters(), DeferredWgrad()
    del made["weight"].main_grad
    x, _ = microbatch()
    with pytest.raises(ValueError, match="cannot defer the gradient of a weight without main_grad"):
        OPS[name](x, made, deferred=put_off)
    made = parameters()
    made["weight"].__fsdp_param__ = True
    with pytest.raises(ValueError, match=r"cannot defer .* Megatron-FSDP"):
        OPS[name](x, made, deferred=put_off)
    with pytest.raises(TypeError, match="deferred must be a DeferredWgrad or None, but is a bool"):
        OPS[name](x, made, deferred=True)


def test_limit():
    with pytest.raises(ValueError, match="limit must be 0, for all of them, or more, but is -1"):
        DeferredWgrad(-1)
    for limit in (1.0, True, None):
        with pytest.raises(TypeError, match="limit must be a number of gradients, but is"):
            DeferredWgrad(limit)


def test_explain_says_when_the_product_is_made():
    made, put_off = parameters(), DeferredWgrad()
    x, _ = microbatch()
    assert "flush()" in str(onepass.explain(onepass.linear, x, made["weight"], deferred=put_off))
    assert "flush()" in str(onepass.explain(onepass.norm_linear, x, made["vector"], made["weight"], deferred=put_off))
    assert "flush()" in str(onepass.explain(onepass.activation_linear, x, made["weight"], None, "gelu", deferred=put_off))
    assert "flush()" not in str(onepass.explain(onepass.linear, x, made["weight"]))
