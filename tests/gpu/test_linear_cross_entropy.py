"""What only a GPU shows of linear_cross_entropy: real tiles and sizes, cuBLAS's products, who waits, graphs, and memory."""

import re

import pytest
import torch
from gpu.calls import (  # noqa: F401
    captured,
    deterministic_algorithms,
    filled,
    memory_goes_back,
    needs_60_gib,
    nobody_waits,
    other_stream,
    room_for,
    said_by,
    taken,
)
from ops.calls import equal, relative
from ops.linear_cross_entropy_oracle import ALL, UPSTREAM, Case, judge_case, op, whole_sums  # noqa: F401
from torch.nn import functional as F

import onepass
import onepass.ops.loss.linear_cross_entropy as module
from onepass.ops.loss.head import passes
from onepass.parallel import DeferredWgrad
from onepass.testing.budget import compare

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
MIB = 1 << 20
N, D, V = 512, 256, 5003  # an odd vocabulary: products are of a copy of the weight with zeros after it
WAYS = {  # "main_grad": the weight's gradient is finished there, in forward
    "keep_logits": ("keep_logits", ALL, ALL),
    "grad_in_forward": ("grad_in_forward", 128, ALL),
    "known_grad_scale": ("known_grad_scale", 128, ALL),
    "main_grad": ("known_grad_scale", 128, ALL),
    "recompute": ("recompute", 128, ALL),
    "blocks": ("recompute", ALL, 1024),
    "both": ("recompute", 128, 1024),
}
ways = pytest.mark.parametrize("way", WAYS)


# ---- calls ----


def inputs(n=N, d=D, v=V, dtype=BF16, seed=0):
    """hidden, weight and labels, of which every fifth is ignored."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(n, d, device="cuda", generator=generator)
    weight = torch.randn(v, d, device="cuda", generator=generator).mul_(2 * d**-0.5)
    labels = torch.randint(v, (n,), device="cuda", generator=generator)
    labels[0], labels[-1] = v - 1, 0
    labels[1::5] = -100
    return [hidden.to(dtype), weight.to(dtype), labels]


def more(n=N, v=V, dtype=BF16):
    """A bias, and what each token's loss is multiplied by."""
    generator = torch.Generator("cuda").manual_seed(1)
    bias = torch.randn(v, device="cuda", generator=generator).to(dtype)
    return [bias, torch.rand(n, device="cuda", generator=generator) + 0.5]


TERMS = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "logit_scale": 0.75, "return_stats": True}


def plan_named(way):
    """The plan's own name for one of the ways above, or for one that is spelled out; None is whichever is cheapest."""
    way = WAYS.get(way, way)
    return None if way is None else way[0]


def by_rows(way):
    """The reduction that tells most: finished gradients wait for one number only."""
    return "sum" if plan_named(way) == "grad_in_forward" else "none"


def call(way, **options):
    """The op by its kernels."""
    promise = {"grad_scale": UPSTREAM} if plan_named(way) == "known_grad_scale" else {}
    return op(WAYS.get(way, way), backend="triton", **promise, **options)


def step(way, tensors, main=None, **options):
    """What the call returns that can be differentiated, and the gradients of fresh leaves. The weight's is added to `main`,
    where there is one."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
    if way == "main_grad":
        main = torch.zeros_like(tensors[1], dtype=FP32) if main is None else main
    if main is not None:
        leaves[1].main_grad = main
    returned = call(way, **options)(*leaves)
    outs = [returned] if isinstance(returned, torch.Tensor) else [returned[0], *returned[1][:3]]
    asked = outs[:1] if plan_named(way) == "known_grad_scale" else outs
    torch.autograd.backward(asked, [torch.full_like(out, UPSTREAM) for out in asked])
    found = [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return found if main is None else [*found, main]


# ---- against fp64: every kind of tile ----

SIZES = (20, 37, 1000, 4096, 4097, 32000, 36864, 36865, 50257, 65536, 65537, 128256)
ASKED = {
    "plain": {},
    "stats": {"full": True},
    "terms": {"smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "scale": 0.75, "full": True, "reduction": "sum"},
    "weights": {"classes": True, "smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0},
    "probabilities": {"classes": True, "mixed": True, "smoothing": 0.1, "full": True},
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("size", SIZES)
def test_whole_rows_in_every_kind_of_tile(size, dtype, asked):
    """Statistics and gradient in one kernel."""
    case = Case(("known_grad_scale", ALL, ALL), dtype=dtype, lead=(9,), D=16, V=size, **ASKED[asked])
    report = judge_case(module, case, seeds=2)
    assert report, report


@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize("wide", (None, FP32))
@pytest.mark.parametrize("V", (577, 1001))
def test_blocks_of_a_small_odd_vocabulary(V, wide, biased):
    """The weight's copy has rows of zeros up to a multiple of 64, which the last block's memory must have room for."""
    leaves = [torch.randn(*shape, device="cuda").to(BF16).requires_grad_() for shape in ((32, 16), (V, 16), (V,))]
    labels, given = torch.arange(32, device="cuda"), (leaves if biased else leaves[:2])
    found = []
    for backend in ("triton", "torch"):
        options = {"bias": leaves[2] if biased else None, "reduction": "none", "chunk_bytes": 1000, "logits_dtype": wide}
        losses = onepass.linear_cross_entropy(*leaves[:2], labels, **options, backend=backend)
        found.append([losses.detach().float(), *torch.autograd.grad(losses.sum(), given)])
    assert all(relative(one, other) < 2e-2 for one, other in zip(*found, strict=True))


@ways
@pytest.mark.parametrize("dtype", (BF16, FP32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("asked", ({"mixed": True}, {"smoothing": 0.1}, {}), ids=("probabilities", "smoothing", "weights"))
def test_class_weights_and_probabilities(asked, dtype, way):
    """An odd vocabulary, whose weight and logits have columns after the last that probabilities have not."""
    case = Case(WAYS[way], "mean", dtype, (300,), 64, 5003, classes=True, weighted=True, **asked)
    report = judge_case(module, case, seeds=2)
    assert report, report


# ---- against fp64: real sizes, and those past 32 bits ----


def chunks(hidden, weight):
    """Tokens, of 64 Mi logits at a time."""
    count = max(1, (1 << 26) // len(weight))
    return [slice(first, first + count) for first in range(0, len(hidden), count)]


def gradient_of(p, labels):
    """Of the rows' losses, each times UPSTREAM, in the place of their probabilities."""
    kept = labels != -100
    p *= torch.where(kept, UPSTREAM, 0.0).unsqueeze(-1)
    less = torch.where(kept, -UPSTREAM, 0.0).to(p.dtype)
    return p.scatter_add_(-1, labels.clamp(min=0).unsqueeze(-1), less.unsqueeze(-1))


def exact(hidden, weight, labels):
    """The rows' losses and the gradients, in fp64."""
    wide, d_weight = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    losses, d_hidden = [], []
    for rows in chunks(hidden, weight):
        tokens = hidden[rows].double()
        logits = tokens @ wide.t()
        losses.append(F.cross_entropy(logits, labels[rows], reduction="none"))
        d = gradient_of(logits.softmax(-1), labels[rows])
        del logits
        d_hidden.append(d @ wide)
        d_weight.addmm_(d.t(), tokens)
    return {"loss": torch.cat(losses), "dhidden": torch.cat(d_hidden), "dweight": d_weight}


def eager(hidden, weight, labels):
    """The same as eager code has it: logits and their gradient rounded to the operands' type, what is between in fp32."""
    losses, d = [], torch.empty(len(hidden), len(weight), device="cuda", dtype=hidden.dtype)
    for rows in chunks(hidden, weight):
        logits = F.linear(hidden[rows], weight).float()
        losses.append(F.cross_entropy(logits, labels[rows], reduction="none"))
        d[rows] = gradient_of(logits.softmax(-1), labels[rows])
    return {"loss": torch.cat(losses), "dhidden": d @ weight, "dweight": d.t() @ hidden}


def pieces(found, reduction, names):
    """What is compared, by name: of the weight's gradient, which is large, some rows at a time."""
    found = {name: found[name] for name in names}
    if reduction == "sum":
        found["loss"] = found["loss"].sum()
    weight = found.pop("dweight", None)
    some = () if weight is None else weight.split(max(1, (1 << 24) // weight.shape[1]))
    return {**found, **{f"dweight's {i}": rows for i, rows in enumerate(some)}}


def check(way, tensors, names=("loss", "dhidden", "dweight")):
    """No further from fp64 than eager code."""
    reduction = by_rows(way)
    ours = dict(zip(("loss", "dhidden", "dweight"), step(way, tensors, reduction=reduction), strict=True))
    three = ours, eager(*tensors), exact(*tensors)
    report = compare([tuple(pieces(found, reduction, names) for found in three)], tensors[0].dtype)
    assert report, report


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=("bf16", "fp16", "fp32"))
@pytest.mark.parametrize("size", (50257, 128256, 256000))
def test_real_sizes(size, dtype):
    check(None, inputs(2048, 1024, size, dtype))


@pytest.mark.parametrize(
    ("size", "way"),
    [
        (50257, ("grad_in_forward", 1024, ALL)),
        (50257, ("recompute", 1024, 16384)),
        (128256, ("known_grad_scale", 1024, ALL)),
        (256000, "main_grad"),
        (256000, ("recompute", ALL, 65536)),
    ],
    ids=str,
)
def test_real_sizes_in_chunks_and_blocks(size, way):
    check(way, inputs(2048, 1024, size))


@pytest.mark.parametrize("way", ("keep_logits", "grad_in_forward", "recompute", "both"))
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=("bf16", "fp16"))
def test_a_bias_is_rounded_once(dtype, way):
    """Columns that are a multiple of 8 and not of 64, whose rows have a gap where there is no bias."""
    for size in (1000, 2088):
        report = judge_case(module, Case(WAYS[way], dtype=dtype, lead=(200,), D=64, V=size, bias=True, reduction="mean"), seeds=2)
        assert report, f"{size}\n{report}"



@pytest.mark.parametrize("way", (None, ("known_grad_scale", ALL, ALL), ("recompute", ALL, 65536)), ids=str)
def test_a_vocabulary_of_a_million(way):
    check(way, inputs(512, 64, 1_000_003))


@needs_60_gib
@pytest.mark.parametrize("way", (("keep_logits", ALL, ALL), ("known_grad_scale", ALL, ALL), ("recompute", ALL, 1 << 30)), ids=str)
def test_more_logits_at_once_than_31_bits_count(way):
    check(way, inputs(20000, 64, 131072))


def exact_products(offset):
    """Inputs of whole numbers of 2^-6, with products that fp32 holds: whoever adds them up in whatever order finds the same."""
    hidden, weight, labels = inputs(dtype=FP32)
    if offset:
        hidden, weight = (4 * hidden).round() / 4, (64 * weight).round() / 64
        hidden[:, 0], weight[:, 0] = offset, 1
        return [hidden, weight, labels]
    hidden, weight = (8 * hidden).round(), (64 * weight).round() / 8  # logits that are hundreds apart
    return [hidden, weight, torch.where(labels == -100, labels, F.linear(hidden, weight).argmin(-1))]


@pytest.mark.parametrize("offset", (0, 512))
@pytest.mark.parametrize("way", [way for way in WAYS if way != "main_grad"])
def test_fp32_logits_of_several_hundreds(way, offset):
    """A logsumexp rounded to fp32 would be further off than eager code is."""
    tensors = exact_products(offset)
    assert F.linear(*tensors[:2]).amax() > 400
    names = ("loss", "dhidden", "dweight") if offset else ("loss", "dhidden")  # that of tokens without any probability is noise
    check(way, tensors, names)


# ---- the CPU waits for nothing ----


def twice(function):
    """The first time kernels are compiled and workspaces made."""
    function()
    with nobody_waits():
        function()


def test_who_waits_is_seen():
    with pytest.raises(RuntimeError, match="synchronizing"), nobody_waits():
        torch.ones((), device="cuda").item()


@ways
def test_no_call_waits_for_the_gpu(way):
    tensors = inputs()
    for options in ({}, {"reduction": by_rows(way)}, {"logits_dtype": FP32}):
        twice(lambda options=options: step(way, tensors, **options))
    twice(lambda: step(way, [*tensors, *more()], **TERMS))


@pytest.mark.parametrize("main", (None, BF16, FP32), ids=str)
def test_no_call_waits_for_the_gpu_whatever_is_cheapest(main):
    tensors = inputs()
    place = None if main is None else torch.zeros_like(tensors[1], dtype=main)
    small = {"chunk_bytes": MIB}
    assert " blocks of " in onepass.explain("linear_cross_entropy", *asking(tensors), **small).variant
    for options in ({}, {"reduction": "none"}, small, {"reduction": "none", **small}, {"grad_scale": UPSTREAM}):
        twice(lambda options=options: step(None, tensors, place, **options))
    twice(lambda: call(None)(*tensors))
    twice(lambda: call(None, reduction="none", **small)(*tensors))
    twice(lambda: call(None, return_stats=True)(*tensors))


def asking(tensors):
    hidden, weight, labels = tensors
    return hidden.detach().requires_grad_(), weight.detach().requires_grad_(), labels


@pytest.mark.parametrize("way", ("keep_logits", "grad_in_forward", "both"))
def test_a_deferred_gradient_makes_nobody_wait(way):
    hidden, weight, labels = asking(inputs())
    weight.main_grad, deferred = torch.zeros_like(weight, dtype=FP32), DeferredWgrad()

    def microbatches():
        for _ in range(2):
            call(way, deferred=deferred)(hidden, weight, labels).backward()
        deferred.flush()

    twice(microbatches)
    _, _, exact_weight = step("recompute", [hidden, weight, labels])
    assert relative(weight.main_grad * UPSTREAM / 4, exact_weight) <= 1e-2


# ---- CUDA graphs ----


@ways
def test_graphs_replay_with_other_inputs(way):
    """Of the weight too, whose copy with zeros after it is made by the graph."""
    static = inputs()
    main = torch.zeros_like(static[1], dtype=FP32) if way == "main_grad" else None
    results, graph = captured(lambda: step(way, static, main))
    for seed in (1, 2):
        other = inputs(seed=seed)
        for t, new in zip(static, other, strict=True):
            t.copy_(new)
        expected, found = step(way, other), []
        for _ in range(2):
            for t in results:
                t.zero_() if t is main else t.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            found.append([t.clone() for t in results])
        assert equal(*found)
        assert all(relative(a, b) <= 1e-2 for a, b in zip(results, expected, strict=True))  # cuBLAS may choose anew
        assert relative(results[0], expected[0]) <= 1e-3


def test_graphs_add_to_main_grad_at_each_replay():
    static = inputs()
    main = torch.zeros_like(static[1], dtype=FP32)
    _, graph = captured(lambda: step("main_grad", static, main))
    main.zero_()
    graph.replay()
    torch.cuda.synchronize()
    once = main.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert once.any() and relative(main, 2 * once) <= 1e-6


# ---- the same, every time ----


@ways
def test_repeated_calls_are_bitwise_equal(way):
    for tensors, options in ((inputs(2048, 512, 32003), {}), ([*inputs(), *more()], {"reduction": by_rows(way), **TERMS})):
        first = step(way, tensors, **options)
        assert all(equal(first, step(way, tensors, **options)) for _ in range(5))
        with deterministic_algorithms():  # where memory starts as NaN, too
            assert equal(first, step(way, tensors, **options))


def test_what_is_cheapest_is_bitwise_equal_too():
    tensors = inputs(2048, 512, 32003)
    for options in ({}, {"reduction": "none"}, {"chunk_bytes": 16 * MIB}, {"chunk_bytes": 96 * MIB}):
        first = step(None, tensors, **options)
        assert all(equal(first, step(None, tensors, **options)) for _ in range(3))


# ---- labels that are no token's ----


@ways
def test_labels_of_no_token(way):
    """Their rows' losses are NaN, and no gradient comes of them: as if they were ignored."""
    hidden, weight, labels = inputs()
    labels[7] = -100
    sound = step(way, [hidden, weight, labels], reduction="sum")
    for wrong in (-1, -101, V, V + 52, 1 << 40):  # one among the zeros after the weight
        for kind in (torch.int64, torch.int32):
            if wrong >= 1 << 31 and kind is torch.int32:
                continue
            labels[7] = wrong
            given = [hidden, weight, labels.to(kind)]
            loss, *grads = step(way, given, reduction="sum")
            assert loss.isnan() and equal(grads, sound[1:]) and not grads[0][7].any()
            if by_rows(way) == "none":
                rows = step(way, given, reduction="none")[0]
                assert rows.isnan().nonzero().tolist() == [[7]]
    _, stats = call(way, return_stats=True)(hidden, weight, labels)
    assert stats.log_prob.isnan().nonzero().tolist() == [[7]] and not stats.correct[7]
    assert stats.logsumexp.isfinite().all() and stats.entropy.isfinite().all()
    with onepass.validate(), pytest.raises(IndexError, match=f"labels must be from 0 to {V - 1}.*one is {1 << 40}"):
        call(way)(hidden, weight, labels)
    labels[7] = -100
    torch.cuda.synchronize()  # nothing on the device has failed
    assert equal(step(way, [hidden, weight, labels], reduction="sum"), sound)


# ---- memory ----

SCALED = r"\d+ chunks of \d+ tokens, gradients in forward, scaled as grad_scale says"
BLOCKS = r"\d+ blocks of \d+ columns of the vocabulary, in "
TAKEN = {  # of 8192 tokens and 512 hidden numbers: options, how the plan is told, and what else is asked
    "keep_logits": ({}, "logits wait for backward", ""),
    "keep, of rows": ({"reduction": "none"}, "logits wait for backward", ""),
    "keep in fp32": ({"reduction": "none", "logits_dtype": FP32}, "logits wait for backward", ""),
    "grad_in_forward": ({"chunk_bytes": 256 * MIB}, r"\d+ chunks of \d+ tokens, gradients in forward, which wait", ""),
    "known_grad_scale": ({"grad_scale": 1.0, "chunk_bytes": 192 * MIB}, SCALED, ""),
    "promised into main_grad": ({"grad_scale": 1.0, "chunk_bytes": 64 * MIB}, SCALED, "main_grad"),
    "blocks": ({"chunk_bytes": 64 * MIB}, BLOCKS + "one chunk", ""),
    "blocks into main_grad": ({"chunk_bytes": 64 * MIB}, BLOCKS + "one chunk", "main_grad"),
    "chunks and blocks": ({"logits_dtype": FP32, "chunk_bytes": 128 * MIB}, BLOCKS + r"\d+ chunks", ""),
    "loss_only": ({"chunk_bytes": 64 * MIB}, r"\d+ chunks of \d+ tokens, no gradients", "frozen hidden and weight"),
    "frozen head": ({"chunk_bytes": 128 * MIB}, r"\d+ chunks of \d+ tokens, gradients in forward", "frozen weight"),
}


@pytest.mark.parametrize("size", (32000, 31999))
@pytest.mark.parametrize("name", TAKEN)
def test_what_a_plan_says_is_taken(name, size):
    options, words, asked = TAKEN[name]
    hidden, weight, labels = asking(inputs(8192, 512, size))
    hidden.requires_grad_("hidden" not in asked)
    weight.requires_grad_("frozen" not in asked)
    if asked == "main_grad":
        weight.main_grad = torch.zeros_like(weight, dtype=FP32)
    said = onepass.explain("linear_cross_entropy", hidden, weight, labels, backend="triton", **options).variant
    assert re.search(words, said), said
    mib = int(re.search(r"(\d+) MiB at most", said)[1])

    def run():
        hidden.grad = weight.grad = None
        loss = onepass.linear_cross_entropy(hidden, weight, labels, backend="triton", **options)
        if loss.requires_grad:
            loss.backward(torch.ones_like(loss))

    run()  # kernels compiled, workspaces made
    hidden.grad = weight.grad = None
    most = taken(run)[0] / MIB
    assert most <= mib + 64, f"{most:.0f} MiB taken, but {said}"


# ---- memory that runs out ----


def test_no_room_for_logits_leaves_main_grad_as_it_was():
    tensors = inputs(4096, 64, 32768)  # 256 MiB of logits
    expected = step("main_grad", tensors)
    main = torch.randn(tensors[1].shape, device="cuda")
    before = main.clone()
    way = ("known_grad_scale", ALL, ALL)
    with room_for(64 * MIB):
        said = said_by(lambda: step(way, tensors, main))
    assert torch.equal(main, before), said
    assert equal(step("main_grad", tensors), expected)


def test_running_out_of_memory_between_blocks_says_what_main_grad_may_have(monkeypatch):
    """The first block's gradient is in main_grad, and somebody has taken the rest of the memory."""
    tensors, way = inputs(256, 1024, 49152), ("recompute", 128, 16384)  # an fp32 sum of 64 MiB for each block
    main = torch.zeros_like(tensors[1])
    expected = [t.clone() for t in step(way, tensors, main)]
    made, taken = [], []

    class Sums(passes.WeightSum):
        def __init__(self, *args):
            made.append(args)
            if len(made) == 2:
                taken.extend(filled())
            super().__init__(*args)

    main.zero_()
    with room_for(512 * MIB), monkeypatch.context() as patch:
        patch.setattr(passes, "WeightSum", Sums)
        said = said_by(lambda: step(way, tensors, main))
        taken.clear()
    assert "main_grad may have a part of this call's gradient" in said and "chunk_bytes" in said
    assert torch.equal(main[:16384], expected[-1][:16384]) and not main[16384:].any()
    main.zero_()
    assert equal(step(way, tensors, main), expected)


def test_no_room_for_gradients_leaves_a_graph_that_works():
    tensors = inputs(4096, 1024, 32768)  # 64 MiB of the weight's gradient
    expected = step("keep_logits", tensors)
    hidden, weight, labels = asking(tensors)
    loss = call("keep_logits")(hidden, weight, labels)
    dy = torch.full_like(loss, UPSTREAM)
    with room_for(24 * MIB):
        said = said_by(lambda: loss.backward(dy, retain_graph=True))
    assert "out of memory" in said and "main_grad" not in said
    assert hidden.grad is None and weight.grad is None
    loss.backward(dy)
    assert all(relative(a, b) <= 1e-2 for a, b in zip((loss.detach(), hidden.grad, weight.grad), expected, strict=True))
