"""What only a GPU shows of attention: real sizes and tiles, the same bits every time, graphs, streams, memory."""

import importlib

import pytest
import torch
from gpu.calls import at_the_side, captured, deterministic_algorithms, memory_goes_back, nobody_waits, other_stream, taken  # noqa: F401
from ops.attention_oracle import (
    BF16,
    FP16,
    Case,
    baseline,
    by_group,
    computed,
    draw,
    exact,
    judge_case,
    packed,
    packed_cases,
    real_cases,
)
from ops.calls import equal, relative

import onepass
from onepass.ops.attention import choice
from onepass.ops.attention.by_cudnn import has_cudnn
from onepass.ops.attention.formula import parts_of
from onepass.testing.fuzz import lay_out

module = importlib.import_module("onepass.ops.attention.attention")

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
overwriting = pytest.mark.parametrize("overwrite", (False, True), ids=("kept", "overwritten"))
REAL = Case(B=4, S=4096, heads=32, groups=8, D=64, R=64)


# ---- right ----


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("S", (1, 63, 64, 65, 127, 129, 257, 1000))
@pytest.mark.parametrize(("heads", "groups"), ((4, 4), (8, 2), (3, 1)))
@pytest.mark.parametrize("D", (16, 32, 64, 80, 96, 128, 192, 256, 512))
def test_every_kind_of_heads_and_ends(D, heads, groups, S, dtype):
    case = Case(S=S, heads=heads, groups=groups, D=D, R=D if S % 2 else 0, dtype=dtype, overwrite=S % 4 == 1)
    report = judge_case(module, case)
    assert report, report


LENGTHS = (300, 1, 0, 129, 64, 700, 513)
OPTIONS = [
    {},
    {"window": 100},
    {"window": 257, "sinks": True},
    {"softcap": 5.0},
    {"softcap": 20.0, "window": 64},
    {"sinks": True},
    {"causal": False},
    {"causal": False, "window": (130, 20)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "plain")
@pytest.mark.parametrize("documents", (False, True), ids=("one row", "documents"))
@pytest.mark.parametrize(("heads", "groups", "D"), ((8, 2, 64), (4, 4, 128), (2, 1, 256), (3, 1, 80)))
def test_documents_windows_caps_and_sinks(heads, groups, D, documents, options):
    sizes = {"heads": heads, "groups": groups, "D": D, "R": D, "overwrite": documents}
    case = packed(LENGTHS, **sizes, **options) if documents else Case(B=2, S=777, **sizes, **options)
    report = judge_case(module, case)
    assert report, report


@pytest.mark.parametrize("case", packed_cases(), ids=str)
def test_documents_and_more_in_the_real_tiles(case):
    report = judge_case(module, Case(**vars(case) | {"small": False}))
    assert report, report


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()) or "plain")
@pytest.mark.parametrize("D", (64, 128))
def test_a_document_has_the_bits_it_has_alone(D, options):
    case = packed(LENGTHS, heads=8, groups=2, D=D, R=D, each=True, **options)
    qkv, cos, sin, dy = draw(case)
    whole, begin = computed(module, case, qkv, cos, sin, dy), 0
    assert equal(whole, computed(module, case, qkv, cos, sin, dy))
    for length in filter(None, LENGTHS):
        at = slice(begin, begin + length)
        given = qkv[:, at], cos[:, at], sin[:, at], dy[:, at]
        alone = computed(module, packed((length,), heads=8, groups=2, D=D, R=D, each=True, **options), *given)
        assert equal([t[:, at] for t in whole[:2]], alone[:2]), length
        begin += length


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_document_of_nan_leaves_the_others_alone(value):
    case = packed((200, 130, 90), heads=4, groups=2, D=64, R=64, each=True, window=70)
    qkv, cos, sin, dy = draw(case)
    clean = computed(module, case, qkv, cos, sin, dy)[:2]
    qkv[:, 200:330] = value
    dirty = computed(module, case, qkv, cos, sin, dy)[:2]
    for at in (slice(0, 200), slice(330, 420)):
        assert equal([t[:, at] for t in clean], [t[:, at] for t in dirty])


@pytest.mark.parametrize("wrong", ([1, 50], [0, 49], [0, 30, 20, 50], [0, -3, 50], [0, 99, 50]), ids=str)
def test_wrong_boundaries_are_nan_and_raise_under_validate(wrong):
    case = Case(B=1, S=50, heads=4, groups=2, D=64, R=64)
    qkv, cos, sin, _ = draw(case)
    at = torch.tensor(wrong, dtype=torch.int32, device="cuda")
    for backend in ("triton", "torch"):
        y = onepass.attention(qkv, 4, 2, cos=cos, sin=sin, cu_seqlens=at, backend=backend)
        assert y.isnan().all()
        with onepass.validate(), pytest.raises(ValueError, match="cu_seqlens must"):
            onepass.attention(qkv, 4, 2, cos=cos, sin=sin, cu_seqlens=at, backend=backend)


def test_documents_wait_for_nothing():
    case = packed(LENGTHS, heads=8, groups=2, D=64, R=64, sinks=True)
    qkv, cos, sin, dy = draw(case)
    leaf, sinks, boundaries = qkv.requires_grad_(), case.draw_sinks(), case.boundaries

    def call():
        y = onepass.attention(leaf * 1, 8, 2, cos=cos, sin=sin, cu_seqlens=boundaries, sinks=sinks)
        return y.detach(), *torch.autograd.grad(y, (leaf, sinks), dy)

    first = call()
    with nobody_waits():
        again = call()
    assert equal(first, again)


def test_documents_in_a_graph_take_other_boundaries():
    """The grid does not depend on the lengths, so a graph is captured once for a number of documents."""
    case, other = (packed(lengths, heads=8, groups=2, D=64, R=64, each=True) for lengths in ((300, 213), (13, 500)))
    drawn = draw(case)
    boundaries = case.boundaries

    def call():
        leaf = drawn[0].detach().requires_grad_()
        y = onepass.attention(leaf * 1, 8, 2, cos=drawn[1], sin=drawn[2], cu_seqlens=boundaries)
        return y.detach(), torch.autograd.grad(y, leaf, drawn[3])[0]

    results, graph = captured(call)
    for each in (case, other):
        boundaries.copy_(each.boundaries)
        graph.replay()
        assert equal(results, computed(module, each, *drawn)[:2])


@pytest.mark.parametrize("case", real_cases(), ids=str)
@pytest.mark.parametrize("layout", ("contiguous", "sliced", "swapped", "unaligned"))
def test_wherever_it_lies(case, layout):
    report = judge_case(module, Case(**vars(case) | {"layout": layout}))
    assert report, report


@pytest.mark.parametrize("how", ("torch", "free"))
@pytest.mark.parametrize("R", (0, 64), ids=("as it is", "rotated"))
@pytest.mark.parametrize("layout", ("rows apart", "unaligned"))
def test_pytorch_reads_no_address_that_it_cannot(layout, R, how):
    """Its kernels read 16 bytes at a time and don't look: a misaligned address ends the process's use of the GPU."""
    case = Case(B=2, S=128, heads=4, groups=4, D=128, R=R)
    qkv, cos, sin, dy = draw(case)
    more = {"cos": cos, "sin": sin} if R else {}
    found = []
    for x, by in ((qkv, dy), (lay_out(qkv, layout), lay_out(dy, layout))):
        x = x.detach().requires_grad_()
        y = onepass.attention(x, 4, 4, **more, **({"backend": "torch"} if how == "torch" else {"deterministic": False}))
        y.backward(by)
        torch.cuda.synchronize()
        found.append((y, x.grad))
    for plain, strided in zip(*found, strict=True):
        assert relative(strided, plain) < 1e-2


def test_a_billion_parameters_sizes():
    """Of the real call some groups against fp64: what heads give does not depend on the others."""
    drawn = draw(REAL)
    y, dqkv, _ = computed(module, REAL, *drawn)
    qkv, cos, sin, dy = drawn
    some = Case(B=1, S=4096, heads=4, groups=1, D=64, R=64)
    for b, group in ((0, 0), (3, 7)):
        heads = slice(4 * group, 4 * group + 4)

        def of(whole, b=b, group=group, heads=heads):
            q, k, v = parts_of(whole[b : b + 1], 32, 8)
            return torch.cat([q[:, :, heads], k[:, :, group : group + 1], v[:, :, group : group + 1]], 2).flatten(2)

        def of_y(whole, b=b, heads=heads):
            return whole[b : b + 1].unflatten(-1, (32, 64))[:, :, heads].flatten(2)

        given = of(qkv), cos, sin, of_y(dy)
        q, k, v = parts_of(of(dqkv), 4, 1)
        got = {"y": of_y(y), "dq": q, "dk": k, "dv": v}
        rounded, wanted = baseline(some, *given), exact(some, *given)
        for name, value in wanted.items():
            assert relative(got[name], value) <= 1.25 * relative(rounded[name], value) + 1e-6, (b, group, name)


@overwriting
@pytest.mark.parametrize(("D", "S"), ((64, 2048), (64, 2049), (128, 130)))
def test_pytorchs_between_our_rotations(D, S, overwrite, monkeypatch):
    """From Hopper on. It rounds the gradients of heads that share a group before they are summed."""
    if not has_cudnn(torch.empty(0, device="cuda"), newest=10):
        pytest.skip("needs Hopper, or Blackwell, and a cuDNN after 9.15")
    case = Case(B=2, S=S, heads=8, groups=2, D=D, R=D)
    qkv, cos, sin, dy = draw(case)
    leaf = qkv.requires_grad_()
    expected = computed(module, case, qkv, cos, sin, dy)
    monkeypatch.setattr(module, "attend", None)
    monkeypatch.setattr(module, "attend_backward", None)
    y = onepass.attention(leaf * 1, 8, 2, cos=cos, sin=sin, overwrite=overwrite, deterministic=False)
    (dqkv,) = torch.autograd.grad(y, leaf, dy)
    rounded, wanted = baseline(case, qkv, cos, sin, dy), exact(case, qkv, cos, sin, dy)
    q, k, v = parts_of(dqkv, 8, 2)
    for name, value in {"y": y.detach(), "dq": q, "dk": k, "dv": v}.items():
        assert relative(value, wanted[name]) <= 2.5 * relative(rounded[name], wanted[name]) + 1e-6, name
    assert relative(y.detach(), expected[0]) < 1e-2 and relative(dqkv, expected[1]) < 1e-2


def sequence_first(x):
    """The same numbers, whose memory is [S, B, ...]."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("grouped", (False, True), ids=("", "by group"))
def test_pytorchs_between_takes_a_gradient_that_lies_anywhere(grouped):
    """PyTorch finds cuDNN's plan of a backward without dy's strides: it would read one as another lay."""
    if not has_cudnn(torch.empty(0, device="cuda"), newest=10):
        pytest.skip("needs Hopper, or Blackwell, and a cuDNN after 9.15")
    case = Case(B=2, S=2048, heads=8, groups=2, D=64, R=64)
    qkv, cos, sin, dy = draw(case)
    expected, found = computed(module, case, qkv, cos, sin, dy), []
    for given in (dy, sequence_first(dy), dy):
        leaf = qkv.detach().requires_grad_()
        made = sequence_first(by_group(case, leaf)) if grouped else leaf * 1
        y = onepass.attention(made, 8, 2, cos=cos, sin=sin, by_group=grouped, deterministic=False)
        assert (y.transpose(0, 1) if grouped else y).is_contiguous()
        found.append((y.detach(), *torch.autograd.grad(y, leaf, given)))
    for y, dqkv in found:
        assert relative(y, expected[0]) < 1e-2 and relative(dqkv, expected[1]) < 1e-2


@pytest.mark.parametrize("norm", (None, False), ids=("", "normed"))
@pytest.mark.parametrize("layout", ("swapped", "contiguous"))
@pytest.mark.parametrize(("D", "S", "heads", "groups"), ((64, 130, 8, 2), (128, 200, 6, 3), (64, 2048, 8, 2), (128, 512, 4, 4)))
def test_by_group(D, S, heads, groups, layout, norm):
    """By our kernels, and by cuDNN's forward where it is taken."""
    case = Case(B=2, S=S, heads=heads, groups=groups, D=D, R=D, layout=layout, norm=norm, by_group=True)
    report = judge_case(module, case)
    assert report, report


@pytest.mark.parametrize("norm", (None, True), ids=("", "normed"))
@pytest.mark.parametrize(("D", "S", "heads", "groups"), ((64, 130, 8, 2), (128, 512, 4, 4), (80, 200, 6, 3), (256, 640, 8, 2)))
def test_gated(D, S, heads, groups, norm):
    """By our kernels, and in any order by PyTorch's ops of cuDNN where they are taken."""
    case = Case(B=2, S=S, heads=heads, groups=groups, D=D, R=D // 8 * 2, norm=norm, gated=True)
    report = judge_case(module, case)
    assert report, report
    qkv, cos, sin, dy = draw(case)
    expected, *gradients = computed(module, case, qkv, cos, sin, dy)
    leaf, weights = qkv.detach().requires_grad_(), case.draw_weights()
    options = case.norm_options | dict(zip(("q_weight", "k_weight"), weights, strict=False))
    y = onepass.attention(leaf * 1, heads, groups, cos=cos, sin=sin, gated=True, deterministic=False, **options)
    assert relative(y.detach(), expected) < 1e-2
    for found, wanted in zip(torch.autograd.grad(y, (leaf, *weights), dy), (gradients[0], *gradients[2:]), strict=True):
        assert relative(found, wanted) < 1e-2


def replayed(case):
    """What was drawn, and what comes of it, of a graph's replay too."""
    drawn = draw(case)
    expected = computed(module, case, *drawn)[:2]
    results, graph = captured(lambda: computed(module, case, *drawn)[:2])
    for t in results:
        t.fill_(float("nan"))
    graph.replay()
    assert equal(results, expected)
    return drawn, expected


# ---- forward by cuDNN ----

CUDNN = [(64, 2048, 8, 2), (64, 2176, 4, 4), (128, 512, 4, 4), (128, 896, 8, 2), (128, 4096, 6, 2)]
WIDE = Case(B=1, S=512, heads=8, groups=2, D=128, R=128)


def by_cudnn(monkeypatch):
    """Our kernel is not there to be called."""
    if not has_cudnn(torch.empty(0, device="cuda"), newest=9):
        pytest.skip("needs Hopper and a cuDNN after 9.15")
    monkeypatch.setattr(module, "attend", None)
    monkeypatch.setattr(choice, "has_flash", lambda *_: False)


def backward_by_cudnn(monkeypatch):
    """Our kernel, and flash-attn-4's, are not there to be called."""
    pytest.importorskip("cudnn")
    monkeypatch.setattr(module, "attend_backward", None)
    monkeypatch.setattr(choice, "has_flash", lambda *_: False)


@pytest.mark.parametrize(("D", "S", "heads", "groups"), CUDNN)
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=("bf16", "fp16"))
@overwriting
def test_forward_by_cudnn_and_backward_by_us(D, S, heads, groups, dtype, overwrite, monkeypatch):
    by_cudnn(monkeypatch)
    report = judge_case(module, Case(B=2, S=S, heads=heads, groups=groups, D=D, R=D, dtype=dtype, overwrite=overwrite))
    assert report, report


@pytest.mark.parametrize(("S", "heads"), ((2048, 40), (4096, 32)))
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=("bf16", "fp16"))
@overwriting
def test_backward_by_cudnn(S, heads, dtype, overwrite, monkeypatch):
    """Of the results those of the first head are judged: others do not matter to it."""
    backward_by_cudnn(monkeypatch)
    case = Case(B=2, S=S, heads=heads, groups=heads, D=128, R=128, dtype=dtype, overwrite=overwrite)
    qkv, cos, sin, dy = draw(case)
    whole = computed(module, case, qkv, cos, sin, dy)[:2]
    assert equal(whole, computed(module, case, qkv, cos, sin, dy)[:2])
    assert equal([t[1:] for t in whole], computed(module, case, qkv[1:], cos, sin, dy[1:])[:2])
    monkeypatch.undo()
    monkeypatch.setattr(choice, "has_flash", lambda *_: False)
    monkeypatch.setattr(choice, "backward_by_cudnn", lambda *_: False)
    ours = computed(module, case, qkv, cos, sin, dy)[:2]
    first, found, own = ([x[:, :, :1] for x in parts_of(t[:1], heads, heads)] for t in (qkv, whole[1], ours[1]))
    alone = Case(B=1, S=S, heads=1, groups=1, D=128, R=128, dtype=dtype)
    wanted = exact(alone, torch.cat(first, 2).flatten(2), cos, sin, dy[:1, :, :128])
    for name, theirs, mine in zip(("dq", "dk", "dv"), found, own, strict=True):
        assert relative(theirs, wanted[name]) <= 1.25 * relative(mine, wanted[name]) + 1e-6, name


def test_backward_by_cudnn_is_replayed_and_waits_for_nothing(monkeypatch):
    backward_by_cudnn(monkeypatch)
    case = Case(B=2, S=2048, heads=32, groups=32, D=128, R=128)
    drawn, expected = replayed(case)
    with nobody_waits(), at_the_side():
        again = computed(module, case, *drawn)[:2]
    assert equal(again, expected)


@pytest.mark.parametrize(("D", "S", "heads", "groups"), CUDNN)
def test_cudnns_forward_gives_the_same_bits_every_time_and_in_any_batch(D, S, heads, groups, monkeypatch):
    by_cudnn(monkeypatch)
    case = Case(B=9, S=S, heads=heads, groups=groups, D=D, R=D)
    qkv, cos, sin, dy = draw(case)
    whole = computed(module, case, qkv, cos, sin, dy)[:2]
    for _ in range(5):
        assert equal(whole, computed(module, case, qkv, cos, sin, dy)[:2])
    for some in (slice(0, 1), slice(3, 5), slice(2, 9)):
        assert equal([t[some] for t in whole], computed(module, case, qkv[some], cos, sin, dy[some])[:2])


def test_cudnns_forward_is_replayed_and_compiled(monkeypatch):
    by_cudnn(monkeypatch)
    case = Case(B=2, S=1024, heads=8, groups=2, D=128, R=128)
    (qkv, cos, sin, _), expected = replayed(case)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: onepass.attention(x, 8, 2, cos=cos, sin=sin, backend="triton"), fullgraph=True)
    assert equal([compiled(qkv)], expected[:1])


@pytest.mark.parametrize("layout", ("contiguous", "sliced", "swapped", "unaligned"))
@pytest.mark.parametrize("B", (1, 3))
def test_cudnns_forward_of_what_lies_anywhere(B, layout, monkeypatch):
    by_cudnn(monkeypatch)
    report = judge_case(module, Case(**vars(WIDE) | {"B": B, "layout": layout}))
    assert report, report


def test_cudnns_forward_waits_for_nothing_and_runs_on_any_stream(monkeypatch):
    by_cudnn(monkeypatch)
    drawn = draw(WIDE)
    expected = computed(module, WIDE, *drawn)
    with nobody_waits(), at_the_side():
        got = computed(module, WIDE, *drawn)
    assert equal(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cudnns_forward_on_a_device_that_is_not_the_current_one(monkeypatch):
    by_cudnn(monkeypatch)
    drawn = draw(WIDE)
    got = computed(module, WIDE, *(t.to("cuda:1") for t in drawn))
    assert equal([t.to("cuda:0") for t in got], computed(module, WIDE, *drawn))


def test_cudnns_forward_can_be_refused(monkeypatch):
    by_cudnn(monkeypatch)
    drawn = draw(WIDE)
    computed(module, WIDE, *drawn)  # by cuDNN, as there is no other
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # ours
            computed(module, WIDE, *drawn)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


# ---- the same, every time and everywhere ----


@overwriting
def test_the_same_bits_every_time(overwrite):
    case = Case(B=4, S=1111, heads=16, groups=4, D=64, R=64, overwrite=overwrite)
    drawn = draw(case)
    first = computed(module, case, *drawn)
    with nobody_waits():
        again = [computed(module, case, *drawn) for _ in range(10)]
    assert all(equal(first, each) for each in again)
    with deterministic_algorithms():
        assert equal(first, computed(module, case, *drawn))


def test_no_sequence_depends_on_others():
    case = Case(B=5, S=300, heads=8, groups=2, D=64, R=64)
    qkv, cos, sin, dy = draw(case)
    whole = computed(module, case, qkv, cos, sin, dy)[:2]
    for b in range(5):
        alone = computed(module, case, qkv[b : b + 1], cos, sin, dy[b : b + 1])[:2]
        assert equal([t[b : b + 1] for t in whole], alone)


@overwriting
def test_graphs_replay(overwrite):
    replayed(Case(B=2, S=513, heads=8, groups=2, D=64, R=64, overwrite=overwrite))


def test_on_another_stream():
    case = Case(B=2, S=513, heads=8, groups=2, D=64, R=64)
    drawn = draw(case)
    expected = computed(module, case, *drawn)
    with at_the_side():
        got = computed(module, case, *drawn)
    assert equal(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    case = Case(B=2, S=513, heads=8, groups=2, D=64, R=64)
    drawn = draw(case)
    got = computed(module, case, *(t.to("cuda:1") for t in drawn))
    assert equal([t.to("cuda:0") for t in got], computed(module, case, *drawn))


@overwriting
@pytest.mark.parametrize("deterministic", (True, False))
def test_compiled_by_inductor(deterministic, overwrite):
    """Without determinism PyTorch's attention stands between our rotations, and its last bits are not always the same."""
    case = Case(B=2, S=200 if deterministic else 2048, heads=8, groups=2, D=64, R=64)
    qkv, cos, sin, dy = draw(case)
    torch._dynamo.reset()
    call = lambda x: onepass.attention(  # noqa: E731
        x * 1, 8, 2, cos=cos, sin=sin, overwrite=overwrite, deterministic=deterministic, backend="triton"
    )
    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        leaf = qkv.detach().requires_grad_()
        y = function(leaf)
        results.append([y.detach(), *torch.autograd.grad(y, leaf, dy)])
    if deterministic:
        assert equal(*results)
    else:
        assert all((a - b).float().norm() < 1e-2 * b.float().norm() for a, b in zip(*results, strict=True))


# ---- what it takes ----


def test_launches():
    case = Case(B=2, S=513, heads=8, groups=2, D=64, R=64, overwrite=True)
    drawn = draw(case)
    computed(module, case, *drawn)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        computed(module, case, *drawn)
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ours = [name for name in names if name.startswith("_")]
    assert ours == ["_rope_kernel", "_attend_kernel", "_dq_kernel", "_dk_dv_kernel", "_rope_kernel"]


def test_memory(monkeypatch):
    """Forward: y and a number a head and token. Backward: the gradient, and such a number again. flash-attn-4's takes more."""
    monkeypatch.setattr(choice, "has_flash", lambda *_: False)
    qkv, cos, sin, dy = draw(REAL)
    leaf = qkv.requires_grad_()
    made = leaf * 1
    numbers, blocks = 4 * 32 * 4 * 4096, 2**21 + 2**12  # an allocator's, and small tensors
    tables = {"cos": cos, "sin": sin, "overwrite": True, "backend": "triton"}
    computed(module, Case(S=64, D=64, R=64), *draw(Case(S=64, D=64, R=64)))
    ahead, y = taken(lambda: onepass.attention(made, 32, 8, **tables))
    back, _ = taken(lambda: torch.autograd.grad(y, made, dy))
    assert ahead <= 2 * y.numel() + numbers + blocks
    assert back <= 2 * made.numel() + numbers + blocks
