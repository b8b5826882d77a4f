"""Frozen weights in few bits: products and gradients by the exact formula of the decoded weight, what is kept, others' views."""

import copy
import io
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ops.calls import equal, gradients, relative
from ops.frozen_calls import BF16, DEVICE, FP16, FP32, FP64, Int8Params, Params4bit, decoded, four_bits, int8, numbers
from parallel.worlds import PAIRS
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import LoRA
from onepass.gradients.deferred import DeferredWgrad
from onepass.product.frozen.weight import FrozenWeight

N, K = 96, 160
KINDS = {
    "nf4": {},
    "fp4, plain scales": {"quant_type": "fp4", "nested": False},
    "blocks of 128": {"block": 128},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def adapter(N=N, dtype=FP32, rank=8, rows=None):
    a = nn.Parameter(numbers(rank, K, seed=3, scale=K**-0.5, dtype=dtype))
    b = nn.Parameter(numbers(N if rows is None else rows[1] - rows[0], rank, seed=4, scale=rank**-0.5, dtype=dtype))
    return LoRA(a, b, 0.5, rows)


def exact(x, weight, dy, lora, rounded):
    """Return y, dx, da and db in fp64. Operands of products are rounded to a type first."""
    x, dy, a, b = (t.detach().to(rounded).double() for t in (x, dy, lora.a, lora.b))
    t, u = ((lora.scale * p).to(rounded).double() for p in (x @ a.T, dy @ b))
    rows = [r.flatten(0, -2) for r in (x, dy, t, u)]
    return x @ weight.T + t @ b.T, dy @ weight + u @ a, rows[3].T @ rows[0], rows[1].T @ rows[2]


@kinds
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_errors_are_those_of_rounding(dtype, kind):
    """At most 1.25 times the error of the formula of the decoded weight rounded once; y and dx are rounded twice."""
    weight = four_bits(N, K, dtype, **kind)
    x, dy, lora = numbers(7, 10, K, seed=1, dtype=dtype).requires_grad_(), numbers(7, 10, N, seed=5, dtype=dtype), adapter()
    y = onepass.linear(x, onepass.frozen_weight(weight), lora=lora)
    found = y, *torch.autograd.grad(y, (x, lora.a, lora.b), dy)
    truth = exact(x, decoded(weight), dy, lora, FP64)
    once = exact(x, decoded(weight), dy, lora, dtype)
    for name, mine, true, one in zip(("y", "dx", "da", "db"), found, truth, once, strict=True):
        floor = relative(one.to(mine.dtype), true)
        times = 1.25 * 2**0.5 if name in ("y", "dx") and dtype is not FP32 else 1.25
        assert relative(mine, true) < times * floor + 1e-6, name


@kinds
@pytest.mark.parametrize("shape", ((7, 13), (5, 100), (96, 160), (1, 1)), ids=str)
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_decoding_has_the_bits_of_plain_arithmetic(shape, dtype, kind):
    weight = four_bits(*shape, dtype, **kind)
    frozen = onepass.frozen_weight(weight)
    assert (frozen.shape, frozen.dtype, frozen.device) == (shape, dtype, weight.device)
    assert torch.equal(frozen.decoded(dtype), decoded(weight, dtype))


OPS = {
    "linear": lambda x, w, bias, **o: onepass.linear(x, w, bias, **o),
    "lora_linear": lambda x, w, bias, lora=None, **o: onepass.lora_linear(x, w, *(lora or adapter(len(w)))[:2], bias, **o),
    "norm_linear": lambda x, w, bias, **o: onepass.norm_linear(x, None, w, bias, **o),
    "activation_linear": lambda x, w, bias, **o: onepass.activation_linear(x, w, bias, "gelu", **o),
    "gated_norm_linear": lambda x, w, bias, **o: onepass.gated_norm_linear(x, x.detach().flip(0), None, w, bias, **o),
}
ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def results(op, weight, *, x=None, lora=True, dtype=FP32, **options):
    """Return y and the gradients of x, the bias and an adapter."""
    x = numbers(7, 10, K, seed=1, dtype=dtype) if x is None else x
    bias, adapted = numbers(len(weight), seed=6, dtype=dtype), adapter(len(weight)) if lora else None
    inputs = [x.requires_grad_(), bias.requires_grad_(), *(adapted[:2] if lora else ())]

    def call(x, bias, *parts):
        return op(x, weight, bias, **({"lora": LoRA(*parts, 0.5)} if parts else {}), **options)

    return gradients(call, inputs)


@ops
@pytest.mark.parametrize("lora", (False, True))
def test_every_op_has_the_bits_of_the_decoded_weight(op, lora):
    weight = four_bits(N, K)
    frozen = onepass.frozen_weight(weight)
    assert equal(results(op, frozen, lora=lora), results(op, decoded(weight, FP32), lora=lora))


@pytest.mark.parametrize("lora", (False, True))
@pytest.mark.parametrize("backend", ("torch", "triton"))
def test_backends(backend, lora):
    frozen = onepass.frozen_weight(four_bits(N, K))
    for op in (OPS["norm_linear"], OPS["activation_linear"]):
        plain = results(op, frozen.decoded(FP32), lora=lora, backend=backend)
        assert equal(results(op, frozen, lora=lora, backend=backend), plain)


def test_several_weights_are_one():
    """q, k and v of different kinds, with an adapter of some rows."""
    parts = [four_bits(rows, K, seed=rows, **kind) for rows, kind in zip((64, 16, 17), KINDS.values(), strict=True)]
    joined, whole = onepass.frozen_weight(*parts), torch.cat([decoded(part, FP32) for part in parts])
    assert joined.shape == (97, K) and torch.equal(joined.decoded(FP32), whole)
    for lora in (adapter(97), adapter(rows=(64, 80)), [adapter(rows=(0, 64)), adapter(rows=(80, 97))]):
        loras = lora if isinstance(lora, list) else [lora]
        inputs = numbers(5, K).requires_grad_(), *(t for one in loras for t in one[:2])

        def call(weight, x, *tensors, loras=loras):
            pairs = zip(tensors[::2], tensors[1::2], loras, strict=True)
            return onepass.linear(x, weight, lora=[LoRA(a, b, one.scale, one.rows) for a, b, one in pairs])

        assert equal(*(gradients(lambda *t, w=w: call(w, *t), inputs) for w in (joined, whole)))


def test_joined_weights_are_joined_again():
    parts = [onepass.frozen_weight(four_bits(rows, K, seed=rows)) for rows in (3, 5, 7)]
    whole = torch.cat([part.decoded(FP32) for part in parts])
    assert torch.equal(onepass.frozen_weight(onepass.frozen_weight(*parts[:2]), parts[2]).decoded(FP32), whole)


def test_layers_are_taken_by_their_weight():
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for seed, layer in enumerate(layers):
        layer.weight = four_bits(N, K, seed=seed)
    joined = onepass.frozen_weight(*layers)
    assert joined is onepass.frozen_weight(*(layer.weight for layer in layers))
    layers[0].quant_state, layers[0].weight.quant_state = layers[0].weight.quant_state, None
    assert torch.equal(onepass.frozen_weight(layers[0]).decoded(FP32), joined.part0.decoded(FP32))


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
def test_int8(dtype):
    """Codes of a row times its largest magnitude over 127: alone, after others' first forward, and joined."""
    weight, layer = int8(N, K), nn.Linear(1, 1, bias=False)
    whole = (weight.data * weight.SCB[:, None] * 7.874015718698502e-3).to(dtype)
    frozen = onepass.frozen_weight(weight, dtype=dtype)
    assert torch.equal(frozen.decoded(dtype), whole)
    x = numbers(3, K, dtype=dtype).requires_grad_()
    assert equal(*(gradients(lambda x, w=w: onepass.linear(x, w, lora=adapter()), (x,)) for w in (frozen, whole)))
    layer.weight, layer.state = weight, SimpleNamespace(SCB=weight.SCB)
    layer.weight.SCB = None
    assert onepass.frozen_weight(layer, dtype=dtype) is frozen
    joined = onepass.frozen_weight(layer, four_bits(16, K, dtype), dtype=dtype)
    assert torch.equal(joined.decoded(dtype)[:N], whole)
    layer.state.SCB = 2 * layer.state.SCB
    assert torch.equal(onepass.frozen_weight(layer, dtype=FP32).decoded(FP32), 2 * frozen.decoded(FP32))


# ---- what is kept ----


def test_nothing_of_the_weights_size_is_kept():
    frozen = onepass.frozen_weight(four_bits(N, K, BF16), four_bits(N, K, BF16, seed=1))
    x, kept = numbers(3, K, dtype=BF16).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        onepass.linear(x, frozen, lora=adapter(2 * N))
    plain = [t for t in kept if not isinstance(t, FrozenWeight)]
    assert len(kept) - len(plain) == 1
    assert sum(t.nbytes for t in plain) < 2 * N * K


def test_codes_are_the_memory_of_the_layer():
    weight = four_bits(N, K)
    frozen, before = onepass.frozen_weight(weight), decoded(weight, FP32)
    assert onepass.frozen_weight(weight) is frozen
    assert frozen.codes.data_ptr() == weight.data_ptr()
    weight.data.bitwise_xor_(255)
    assert onepass.frozen_weight(weight) is frozen
    assert torch.equal(frozen.decoded(FP32), decoded(weight, FP32)) and not torch.equal(frozen.decoded(FP32), before)


@pytest.mark.parametrize("changed", ("data", "state", "absmax"))
def test_other_memory_is_another_weight(changed):
    weight, other = four_bits(N, K), four_bits(N, K, seed=1)
    first = onepass.frozen_weight(weight)
    if changed == "data":
        weight.data = other.data
    elif changed == "state":
        weight.quant_state = other.quant_state
    else:
        weight.quant_state.absmax = other.quant_state.absmax
    assert onepass.frozen_weight(weight) is not first
    assert torch.equal(onepass.frozen_weight(weight).decoded(FP32), decoded(weight, FP32))


def test_types():
    """A weight is decoded to the product's type with one rounding, whatever it was quantised from."""
    weight = four_bits(N, K, FP16)
    wide = onepass.frozen_weight(weight, dtype=FP32)
    assert wide.dtype is FP32 and onepass.frozen_weight(weight).dtype is FP16
    assert torch.equal(onepass.frozen_weight(weight, dtype=BF16).decoded(BF16), wide.decoded(FP32).to(BF16))
    x = numbers(3, K, dtype=BF16)
    assert torch.equal(onepass.linear(x, onepass.frozen_weight(weight, dtype=BF16)), F.linear(x, wide.decoded(BF16)))
    with torch.autocast(DEVICE.type, BF16):
        y = onepass.linear(x.float(), wide)
    assert y.dtype is BF16 and torch.equal(y, F.linear(x, wide.decoded(BF16)))
    assert onepass.frozen_weight(wide, dtype=BF16).dtype is BF16 and onepass.frozen_weight(wide) is wide


def test_copies():
    """A module that has one: deepcopy, state_dict, pickle and types. Copies have codes of their own."""
    module, frozen = nn.Module(), onepass.frozen_weight(four_bits(N, K), four_bits(N, K, seed=1))
    module.weight = nn.Parameter(frozen, requires_grad=False)
    whole = frozen.decoded(FP32)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    copied, buffer = copy.deepcopy(module), io.BytesIO()
    torch.save(module.state_dict(), buffer)
    frozen.part1.codes.zero_()
    assert torch.equal(copied.weight.decoded(FP32), whole) and not torch.equal(module.weight.decoded(FP32), whole)
    buffer.seek(0)
    module.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(module.weight.decoded(FP32), whole)
    assert module.to(BF16).weight.dtype is BF16 and torch.equal(module.weight.decoded(FP32), whole)
    assert torch.equal(copy.deepcopy(four_bits(N, K)).data, four_bits(N, K).data)


def test_a_weight_is_copied_without_what_was_made_of_it():
    weight = four_bits(N, K)
    onepass.frozen_weight(weight)
    assert not copy.deepcopy(weight.__dict__)["onepass_frozen"]


# ---- where else it runs ----


def test_without_gradients():
    frozen, x = onepass.frozen_weight(four_bits(N, K)), numbers(3, K)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(onepass.linear(x, frozen), F.linear(x, frozen.decoded(FP32)))


def test_under_checkpoint():
    frozen = onepass.frozen_weight(four_bits(N, K))

    def rerun(x, weight, bias, **options):
        return checkpoint(lambda x: onepass.norm_linear(x, None, weight, bias, **options), x, use_reentrant=False)

    assert equal(results(rerun, frozen), results(OPS["norm_linear"], frozen))


def test_hooks_on_saved_tensors():
    frozen = onepass.frozen_weight(four_bits(N, K))

    def offloaded(x, weight, bias, **options):
        with torch.autograd.graph.save_on_cpu():
            return onepass.linear(x, weight, bias, **options)

    assert equal(results(offloaded, frozen), results(OPS["linear"], frozen))


@pytest.mark.parametrize("op", [OPS["linear"], OPS["norm_linear"]], ids=("linear", "norm_linear"))
def test_compiled(op):
    frozen = onepass.frozen_weight(four_bits(N, K), four_bits(16, K, seed=1))
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for mine, other in zip(results(compiled, frozen), results(op, frozen), strict=True):
        torch.testing.assert_close(mine, other)


WORLDS = PAIRS if DEVICE.type == "cpu" else PAIRS[1:]  # over gloo a GPU's tensors end the process at times
rank_context = partial(torch.device, "cpu")  # numbers are drawn there


@pytest.mark.parametrize("by_row", (False, True))
@pytest.mark.parametrize("sequence", (False, True))
def test_ranks_have_parts(group, by_row, sequence):
    """Each rank's part is a weight of its own: column and row parallel, with and without sequence parallelism."""
    frozen = onepass.frozen_weight(four_bits(N, K, seed=group.rank()))
    options = {"tp_group": group, "sequence_parallel": sequence, "reduce_output": by_row}
    options |= {} if by_row or sequence else {"allreduce_dgrad": True}
    x = numbers(4, 6, K, seed=7 + (group.rank() if by_row or sequence else 0))
    assert equal(*(results(OPS["linear"], weight, x=x, lora=False, **options) for weight in (frozen, frozen.decoded(FP32))))


def test_a_gradient_that_is_deferred_is_none():
    frozen, deferred = onepass.frozen_weight(four_bits(N, K)), DeferredWgrad()
    assert equal(results(OPS["linear"], frozen, deferred=deferred), results(OPS["linear"], frozen))


def test_explain():
    said = str(onepass.explain(onepass.linear, numbers(3, K), onepass.frozen_weight(four_bits(N, K))))
    assert "nf4 in blocks of 64, decoded" in said
    joined = onepass.frozen_weight(four_bits(N, K), four_bits(N, K, quant_type="fp4"))
    said = str(onepass.explain(onepass.norm_linear, numbers(3, K), None, joined, lora=adapter(2 * N)))
    assert "2 weights of nf4 in blocks of 64 and fp4 in blocks of 64" in said and "LoRA of rank 8" in said


# ---- errors ----


def changed(**names):
    weight = four_bits(N, K)
    for name, value in names.items():
        setattr(weight.quant_state, name, value)
    return weight


def test_weights_that_cant_be_taken():
    bad = (
        (TypeError, "Params4bit or Int8Params.*but one is a Tensor of torch.float32", numbers(N, K)),
        (TypeError, "but one is a int", 3),
        (TypeError, "but one is a Sequential", nn.Sequential()),
        (ValueError, "quant_type must be one of nf4, fp4, but is 'int4'", changed(quant_type="int4")),
        (ValueError, "blocksize must be one of 32, .*, 4096, but is 48", changed(blocksize=48)),
        (ValueError, "data must have 3840 elements", changed(shape=(N, K // 2))),
        (ValueError, "absmax must have 120 elements", changed(blocksize=128)),
        (ValueError, r"must have two dimensions, but its quant_state has shape \(96, 160, 1\)", changed(shape=(N, K, 1))),
        (ValueError, "packed for products on a CPU", changed(packing_format_for_cpu=True)),
        (TypeError, "type must be a floating-point type, but is torch.int8", changed(dtype=torch.int8)),
        (ValueError, "must be quantised, but its quant_state is None", Params4bit(four_bits(N, K).data, None)),
        (ValueError, "absmax of a frozen weight must be on", changed(absmax=torch.empty(240, dtype=torch.uint8, device="meta"))),
    )
    for error, message, weight in bad:
        with pytest.raises(error, match=message):
            onepass.frozen_weight(weight)
    with pytest.raises(ValueError, match="dtype must be given for weights in int8"):
        onepass.frozen_weight(int8(N, K))
    wrong = (
        (TypeError, "must be quantised to int8, but is torch.float32", Int8Params(numbers(N, K), None)),
        (ValueError, "SCB must be its rows' largest magnitudes, but is None", Int8Params(int8(N, K).data, None)),
        (ValueError, "SCB must have 96 elements, as weight has rows, but has 160", Int8Params(int8(N, K).data, numbers(K))),
    )
    for error, message, weight in wrong:
        with pytest.raises(error, match=message):
            onepass.frozen_weight(weight, dtype=FP32)
    with pytest.raises(ValueError, match="weights must be one or more"):
        onepass.frozen_weight()
    with pytest.raises(ValueError, match="weight 1 has 64, the first 160"):
        onepass.frozen_weight(four_bits(N, K), four_bits(N, 64))
    with pytest.raises(TypeError, match=r"weight 1 is torch.bfloat16, the first torch.float32"):
        onepass.frozen_weight(four_bits(N, K), four_bits(N, K, BF16))


def test_calls_that_cant_be_made():
    frozen, x = onepass.frozen_weight(four_bits(N, K)), numbers(3, K)
    with pytest.raises(ValueError, match=r"weight must have shape \(N, 64\)"):
        onepass.linear(numbers(3, 64), frozen)
    with pytest.raises(TypeError, match=r"weight must have x's type torch.bfloat16, but is torch.float32"):
        onepass.linear(x.to(BF16), frozen)
    with pytest.raises(ValueError, match="precision must be None with a weight that is decoded"):
        onepass.linear(x, frozen, precision="fp8")
    with pytest.raises(RuntimeError, match="weight must be a plain tensor under vmap"):
        torch.func.vmap(lambda x: onepass.linear(x, frozen))(x)
    with pytest.raises(RuntimeError, match="can't be written in place"):
        frozen.zero_()
    with pytest.raises(RuntimeError, match="only a weight of its kind and shape can be copied"):
        frozen.copy_(numbers(N, K))
    with pytest.raises(ValueError, match="weight must not require grad"):
        onepass.linear(x, onepass.frozen_weight(four_bits(N, K, seed=1)).requires_grad_())
    if DEVICE.type == "cuda":
        with pytest.raises(ValueError, match="weight must be on cpu"):
            onepass.linear(x.cpu(), frozen)


def test_others_see_a_decoded_weight():
    frozen, x = onepass.frozen_weight(four_bits(N, K)), numbers(3, K).requires_grad_()
    whole = frozen.decoded(FP32)
    assert torch.equal(frozen.sum(), whole.sum()) and torch.equal(F.linear(x, frozen), F.linear(x, whole))
    assert torch.equal(numbers(N, K).copy_(frozen), whole)
    assert "nf4" in repr(frozen)


class Int8Tensor:
    """Stands in for torchao's, of scales in a type that decoding widens."""

    act_quant_kwargs = act_pre_scale = zero_point = None
    shape, dtype, block_size, requires_grad = torch.Size((8, 16)), BF16, (1, 16), False

    def __init__(self):
        self.qdata, self.scale = torch.ones(8, 16, dtype=torch.int8, device=DEVICE), torch.ones(8, 1, dtype=BF16, device=DEVICE)


def test_scales_that_are_written_are_seen():
    weight = Int8Tensor()
    before = onepass.frozen_weight(weight)
    assert onepass.frozen_weight(weight) is before and before.decoded(BF16).eq(1).all()
    weight.scale.fill_(3)
    assert onepass.frozen_weight(weight).decoded(BF16).eq(3).all()
    weight.qdata.fill_(2)
    assert onepass.frozen_weight(weight).decoded(BF16).eq(6).all()
