"""What only a GPU shows of route: real sizes and tiles; NaN; one kernel each way; graphs, streams, the compiler, determinism."""

import pytest
import torch
from gpu.calls import at_the_side, captured, memory_goes_back, nobody_waits, other_stream, taken
from ops.calls import equal
from ops.route_oracle import Case, judge_case, main_cases, real_cases

import onepass
import onepass.ops.routing.route as module
from onepass.ops.routing import kernels
from onepass.ops.routing.logits import router_logits

__all__ = ["memory_goes_back"]
pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
FP32, BF16, NAN = torch.float32, torch.bfloat16, float("nan")
OPTIONS = {
    "softmax": {"aux": 0.01, "z": 0.001},
    "deepseek": {"score": "sigmoid", "groups": (8, 4), "scale": 2.5, "aux": 0.01},
}  # fmt: skip
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def inputs(T=16384, E=128, k=8, dtype=FP32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(T, E, device="cuda", dtype=dtype, generator=generator)
    return logits, torch.randn(T, k, device="cuda", generator=generator)


def step(logits, dy, **options):
    logits = logits.detach().requires_grad_()
    routing = onepass.route(logits, dy.shape[1], backend="triton", **options)
    losses = [loss for loss in (routing.aux_loss, routing.z_loss) if loss is not None]
    grads = torch.autograd.grad([routing.weights, *losses], logits, [dy, *map(torch.ones_like, losses)])
    return [*(t.detach() for t in (routing.weights, routing.chosen, routing.counts, *losses)), *grads]


# ---- right ----


@pytest.mark.parametrize("case", [*main_cases(), *real_cases()], ids=str)
def test_within_the_budget(case):
    report = judge_case(module, case)
    assert report, report


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("E", (1, 2, 7, 8, 16, 60, 64, 96, 128, 160, 256, 384, 512, 777, 1024))
def test_every_number_of_experts(E, dtype):
    for score in ("softmax", "sigmoid"):
        for k in {1, min(8, E), min(E, 70)}:
            report = judge_case(module, Case((301, E), k, score, aux=0.5, z=0.25, dtype=dtype, path=""))
            assert report, report


@pytest.mark.parametrize("T", (1, 15, 16, 17, 2112, 2113, 16384, 70001))
def test_every_number_of_programs(T):
    """Counts are those of what was chosen, and losses those of the formula, however many programs have them."""
    logits, dy = inputs(T)
    found = step(logits, dy, **OPTIONS["softmax"])
    exact = module.route_reference(logits.double(), 8, **OPTIONS["softmax"])
    assert torch.equal(found[1], exact.chosen) and torch.equal(found[2], exact.counts)
    torch.testing.assert_close(torch.stack(found[3:5]).double(), torch.stack([exact.aux_loss, exact.z_loss]), rtol=1e-6, atol=0)


@options
@pytest.mark.parametrize("E", (64, 128, 256, 384))
def test_a_token_of_nan_stays_alone(E, options):
    logits, dy = inputs(1000, E)
    options = options | {"aux": None, "z": None}
    clean = step(logits, dy, **options)
    logits[17, 3] = NAN
    logits[500] = NAN
    found = step(logits, dy, **options)
    others = torch.ones(1000, dtype=torch.bool, device="cuda")
    others[[17, 500]] = False
    assert equal([t[others] for t in (clean[0], clean[1], clean[-1])], [t[others] for t in (found[0], found[1], found[-1])])
    assert found[0][500].isnan().all() and found[0][17].isnan().any()
    assert all(len(set(row)) == 8 for row in found[1][[17, 500]].tolist())


@options
def test_equal_experts_are_chosen_in_their_order(options):
    logits = torch.zeros(100, 128, device="cuda")
    chosen = onepass.route(logits, 8, backend="triton", **options).chosen
    assert (chosen == torch.arange(8, device="cuda")).all()


# ---- how it runs ----


@options
def test_a_hundred_steps_are_bitwise_equal(options):
    """Whoever is last to arrive adds up."""
    given = inputs()
    first = step(*given, **options)
    assert all(equal(first, step(*given, **options)) for _ in range(100))


@options
def test_beside_another_stream(options):
    given, other = inputs(), inputs(seed=1)
    first, second = step(*given, **options), step(*other, **options)
    for _ in range(20):
        with at_the_side():
            found = step(*other, **options)
        again = step(*given, **options)
        torch.cuda.synchronize()
        assert equal(first, again) and equal(second, found)


@options
def test_nobody_waits_and_one_kernel_each_way(options):
    logits, dy = inputs()
    step(logits, dy, **options)
    with nobody_waits():
        step(logits, dy, **options)
    leaf = logits.requires_grad_()
    ones = torch.ones((), device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        routing = onepass.route(leaf, 8, backend="triton", **options)
        losses = [loss for loss in (routing.aux_loss, routing.z_loss) if loss is not None]
        torch.autograd.grad([routing.weights, *losses], leaf, [dy, *[ones] * len(losses)])
        torch.cuda.synchronize()
    names = [e.key for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA for _ in range(e.count)]
    assert len(names) == 2, names


@pytest.mark.parametrize("drop", ("probs", "position"))
def test_a_capacity_waits_for_nobody(drop):
    logits, _ = inputs()
    onepass.route(logits, 8).with_capacity(1.0, drop)
    with nobody_waits():
        routing = onepass.route(logits, 8).with_capacity(1.0, drop)
    kept = torch.zeros(129, dtype=torch.long, device="cuda").scatter_add(
        0, torch.where(routing.kept, routing.chosen, 128).flatten(), torch.ones(16384 * 8, dtype=torch.long, device="cuda")
    )
    assert torch.equal(kept[:128], routing.counts.long().clamp(max=1024))


@options
def test_in_a_graph(options):
    given = inputs()
    results, graph = captured(lambda: step(*given, **options))
    given[0].copy_(given[0].flip(0))
    given[1].normal_()
    graph.replay()
    graph.replay()
    assert equal(results, step(*given, **options))


@options
def test_compiled(options):
    torch._dynamo.reset()
    logits, dy = inputs()

    def function(x):
        routing = onepass.route(x, 8, **options)
        return routing.weights * 1, routing.aux_loss

    compiled = torch.compile(function, fullgraph=True)
    leaf = logits.requires_grad_()
    results = []
    for each in (compiled, function):
        ys = each(leaf)
        results.append([*ys, *torch.autograd.grad(ys, leaf, [dy, torch.ones_like(ys[1])])])
    assert equal(*results)


def test_what_is_kept_and_taken():
    logits, dy = inputs()
    logits.requires_grad_()
    onepass.route(logits, 8, **OPTIONS["softmax"]).weights.backward(dy)
    logits.grad = None
    before = torch.cuda.memory_allocated()
    routing = onepass.route(logits, 8, **OPTIONS["softmax"])
    assert torch.cuda.memory_allocated() - before <= 16384 * 8 * 12 + 4096
    used, _ = taken(lambda: routing.weights.backward(dy))
    assert used <= logits.numel() * 4 + 4096


def test_a_new_number_of_tokens_compiles_nothing():
    def compiled():
        found = kernels._route_kernel, kernels._route_backward_kernel
        return sum(len(kernel.jit.device_caches[torch.cuda.current_device()][0]) for kernel in found)

    step(*inputs(640, 96))
    before = compiled()
    for T in (1, 2, 3, 16, 33, 4096, 65536):
        step(*inputs(T, 96))
    assert compiled() == before > 0


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(16384, 2048, 64), (37, 96, 5), (1, 8, 3)], ids=str)
def test_router_logits_are_as_precise_as_fp32s(shape, dtype):
    T, H, E = shape
    x = torch.randn(T, H, device="cuda").bfloat16()
    weight, dy = torch.randn(E, H, device="cuda").to(dtype), torch.randn(T, E, device="cuda")
    found = []
    for wide in (False, True):
        inputs = [(each.double() if wide else each.clone()).requires_grad_() for each in (x, weight)]
        with nobody_waits():
            y = inputs[0] @ inputs[1].t() if wide else router_logits(*inputs)
            y.backward(dy.to(y.dtype))
        found.append([y.detach(), *(each.grad for each in inputs)])
    most = (4e-6, 4e-3, 1e-5 if dtype is FP32 else 4e-3)  # tensor cores sum with fewer bits than fp32 has
    for name, ours, exact, limit in zip(("logits", "dx", "dweight"), *found, most, strict=True):
        assert float((ours.double() - exact).norm() / exact.norm()) < limit, name
