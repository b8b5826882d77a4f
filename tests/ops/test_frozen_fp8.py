"""Codes of a frozen weight that are kept for products in eight bits: the bits of a plain weight's calls, bytes, errors."""

import copy
import io
from functools import partial

import pytest
import torch
from ops.calls import equal, gradients, relative
from ops.fp8_calls import RECIPES
from ops.frozen_calls import BF16, DEVICE, FP16, FP32, four_bits, numbers
from parallel.worlds import PAIRS
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from onepass import FP8Recipe, LoRA
from onepass.product.frozen.weight import FrozenWeight

N, K = 64, 96
CASES = [(name, layouts) for name, recipe in RECIPES.items() for layouts in (1, 2) if layouts == 2 or recipe.scaling != "row"]
cases = pytest.mark.parametrize(("recipe", "layouts"), CASES, ids=str)

OPS = {
    "linear": lambda x, w, bias, **o: onepass.linear(x, w, bias, **o),
    "norm_linear": lambda x, w, bias, **o: onepass.norm_linear(x, None, w, bias, **o),
    "norm_linear and its rows": lambda x, w, bias, **o: onepass.norm_linear(x, None, w, bias, return_norm_output=True, **o)[0],
    "activation_linear": lambda x, w, bias, **o: onepass.activation_linear(x, w, bias, "gelu", **o),
    "gated_norm_linear": lambda x, w, bias, **o: onepass.gated_norm_linear(x, x.detach().flip(0), None, w, bias, **o),
}


def plain(N=N, seed=2, dtype=BF16):
    return numbers(N, K, seed=seed, scale=K**-0.5, dtype=dtype)


def results(op, weight, lora=True, steps=2, **options):
    """Return y and the gradients of x, the bias and an adapter in each of several steps, between which scales change."""
    a, b = numbers(8, K, seed=3), numbers(len(weight), 8, seed=4)
    found = []
    for step in range(steps):
        inputs = [numbers(8, 10, K, seed=step, scale=1 + step, dtype=BF16), numbers(len(weight), seed=6, dtype=BF16)]
        inputs = [t.requires_grad_() for t in (*inputs, *((a, b) if lora else ()))]

        def call(x, bias, *parts):
            return op(x, weight, bias, **({"lora": LoRA(*parts, 0.5)} if parts else {}), **options)

        found += gradients(call, inputs)
        torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()
    return found


@cases
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("lora", (False, True))
def test_the_bits_are_those_of_codes_made_in_each_call(op, recipe, layouts, lora, by_formula):
    recipe = RECIPES[recipe]
    frozen = onepass.freeze_weight(plain(), recipe, layouts=layouts)
    assert equal(results(op, frozen, lora), results(op, plain(), lora, precision=recipe))


@cases
def test_the_bits_by_kernels(recipe, layouts):
    recipe = RECIPES[recipe]
    frozen = onepass.freeze_weight(plain(), recipe, layouts=layouts)
    assert equal(results(OPS["linear"], frozen, steps=1), results(OPS["linear"], plain(), steps=1, precision=recipe))


@cases
def test_bytes(recipe, layouts):
    frozen = onepass.freeze_weight(plain(), RECIPES[recipe], layouts=layouts)
    most = layouts * N * K + 8 * (N + K)
    assert layouts * N * K <= sum(t.nbytes for t in frozen.tensors.values()) <= most
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        onepass.linear(numbers(3, K, dtype=BF16).requires_grad_(), frozen)
    assert [type(t) for t in kept].count(type(frozen)) == 1 and sum(t.numel() for t in kept if type(t) is torch.Tensor) < N * K


def test_a_weights_own_numbers():
    """Of codes, which have three bits of mantissa; a decoded product takes them."""
    for dtype in (BF16, FP16, FP32):
        for recipe in ("current", "row"):
            frozen = onepass.freeze_weight(plain(dtype=dtype), RECIPES[recipe])
            assert frozen.dtype is dtype and relative(frozen.decoded(FP32), plain(dtype=FP32)) < 0.04
    assert onepass.linear(numbers(0, K), frozen).shape == (0, N)


def test_a_module_has_codes_alone():
    layer = nn.Linear(K, N, device=DEVICE, dtype=BF16).requires_grad_(False)
    before = layer.weight.detach().clone()
    onepass.freeze_weight(layer)
    frozen = layer.weight
    assert isinstance(frozen, FrozenWeight) and dict(layer.named_parameters())["weight"] is frozen
    x = numbers(3, K, dtype=BF16)
    assert torch.equal(onepass.linear(x, layer.weight, layer.bias), onepass.linear(x, before, layer.bias, precision="fp8"))
    copied, buffer = copy.deepcopy(layer), io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    frozen.codes.view(torch.uint8).zero_()
    buffer.seek(0)
    layer.load_state_dict(torch.load(buffer, weights_only=True))
    for one in (copied, layer):
        assert torch.equal(onepass.linear(x, one.weight, one.bias), onepass.linear(x, before, layer.bias, precision="fp8"))
    assert copied.weight.recipe == FP8Recipe()


def test_several_are_one():
    parts = [plain(rows, seed) for seed, rows in enumerate((32, 16, 48))]
    frozen = onepass.freeze_weight(parts)
    assert equal(results(OPS["linear"], frozen), results(OPS["linear"], torch.cat(parts), precision="fp8"))


@cases
def test_modules_that_are_frozen_together(recipe, layouts, by_formula):
    """Each has its rows, and all together are the whole, whose memory they share; so are those that come from a file."""
    recipe, shape = RECIPES[recipe], ((32, 1), (16, 2), (48, 3))
    layers = [nn.Linear(K, rows, bias=False, device=DEVICE, dtype=BF16).requires_grad_(False) for rows, _ in shape]
    for layer, (rows, seed) in zip(layers, shape, strict=True):
        layer.weight.copy_(plain(rows, seed))
    plains = [layer.weight.detach().clone() for layer in layers]
    whole = onepass.freeze_weight(layers, recipe, layouts=layouts)
    for layer, weight in zip(layers, plains, strict=True):
        assert relative(layer.weight.decoded(FP32), weight.float()) < 0.04
        mine, other = results(OPS["linear"], layer.weight, steps=1), results(OPS["linear"], weight, steps=1, precision=recipe)
        assert all(relative(a, b) < 0.1 for a, b in zip(mine, other, strict=True))
    loaded, buffer = nn.ModuleList(layers), io.BytesIO()
    torch.save(loaded, buffer)
    buffer.seek(0)
    for taken in (layers, torch.load(buffer, weights_only=False)):
        joined = onepass.frozen_weight(*taken)
        assert joined is onepass.frozen_weight(*taken) and joined.codes.data_ptr() == taken[0].weight.codes.data_ptr()
        assert equal(results(OPS["linear"], joined), results(OPS["linear"], torch.cat(plains), precision=recipe))
    assert joined.tensors.keys() == whole.tensors.keys()
    for wrong in (layers[::-1], layers[::2], [layers[0], copy.deepcopy(layers[1])]):
        with pytest.raises(ValueError, match="must be parts of one weight in eight bits to be joined"):
            onepass.frozen_weight(*wrong)


def test_a_write_to_the_plain_weight_is_not_seen():
    weight = plain()
    frozen = onepass.freeze_weight(weight)
    before = frozen.decoded(BF16)
    weight.data.zero_()
    assert torch.equal(frozen.decoded(BF16), before)


def test_onepass_modules():
    layer = onepass.nn.Linear(K, N, bias=False, precision="fp8", device=DEVICE, dtype=BF16).requires_grad_(False)
    x = numbers(3, K, dtype=BF16)
    expected = layer(x)
    onepass.freeze_weight(layer)
    assert torch.equal(layer(x), expected)


@cases
def test_under_checkpoint_and_hooks(recipe, layouts, by_formula):
    frozen = onepass.freeze_weight(plain(), RECIPES[recipe], layouts=layouts)

    def rerun(x, weight, bias, **options):
        return checkpoint(lambda x: onepass.norm_linear(x, None, weight, bias, **options), x, use_reentrant=False)

    other = onepass.freeze_weight(plain(), RECIPES[recipe], layouts=layouts)
    assert equal(results(rerun, frozen), results(OPS["norm_linear"], other))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own, where a graph goes on
def test_compiled(by_formula):
    """A graph breaks where the product is."""
    frozen, other = onepass.freeze_weight(plain()), onepass.freeze_weight(plain())
    for name in ("linear", "norm_linear"):
        torch._dynamo.reset()
        compiled = torch.compile(OPS[name], backend="aot_eager")
        assert equal(results(compiled, frozen, steps=1), results(OPS[name], other, steps=1))


WORLDS = PAIRS if DEVICE.type == "cpu" else PAIRS[1:]  # over gloo a GPU's tensors end the process at times
rank_context = partial(torch.device, "cpu")  # numbers are drawn there


@pytest.mark.parametrize(
    ("by_row", "sequence", "recipe"),
    ((False, False, "delayed"), (False, True, "row"), (True, False, "row"), (True, True, "delayed")),
)
def test_ranks_have_parts(group, by_row, sequence, recipe):
    recipe, weight = RECIPES[recipe], plain(seed=group.rank())
    options = {"tp_group": group, "sequence_parallel": sequence, "reduce_output": by_row}
    options |= {} if by_row or sequence else {"allreduce_dgrad": True}
    frozen = results(OPS["linear"], onepass.freeze_weight(weight, recipe), lora=False, **options)
    assert equal(frozen, results(OPS["linear"], weight, lora=False, precision=recipe, **options))


def test_explain():
    for layouts, said in ((1, "codes of rows"), (2, "codes of both layouts")):
        frozen = onepass.freeze_weight(plain(), layouts=layouts)
        explained = str(onepass.explain(onepass.linear, numbers(3, K, dtype=BF16), frozen))
        assert f"delayed scales) of a weight's {said} in eight bits" in explained


def test_errors():
    bad = (
        (ValueError, "precision must be 'fp8' or an FP8Recipe, but is None", (plain(), None), {}),
        (ValueError, "layouts must be 1 or 2, but is 3", (plain(),), {"layouts": 3}),
        (ValueError, "layouts must be 2 with scales by row", (plain(), FP8Recipe(scaling="row")), {"layouts": 1}),
        (ValueError, "weight must not require grad", (plain().requires_grad_(),), {}),
        (TypeError, "weight must be fp32, bf16 or fp16, but is fp64", (plain(dtype=torch.float64),), {}),
        (ValueError, r"multiples of 16, but has \(30, 96\)", (plain(30),), {}),
        (TypeError, "weight must be a plain tensor, but is a FourBitWeight", (onepass.frozen_weight(four_bits(N, K)),), {}),
        (TypeError, "weight must be a floating-point tensor", (torch.zeros(16, 16, dtype=torch.int8),), {}),
    )
    for error, message, args, options in bad:
        with pytest.raises(error, match=message):
            onepass.freeze_weight(*args, **options)
    frozen, x = onepass.freeze_weight(plain()), numbers(3, K, dtype=BF16)
    with pytest.raises(ValueError, match="precision must be None or that which the weight was frozen for"):
        onepass.linear(x, frozen, precision=FP8Recipe(scaling="row"))
    with pytest.raises(ValueError, match="must be parts of one weight in eight bits to be joined: freeze them together"):
        onepass.frozen_weight(frozen, onepass.freeze_weight(plain()))
    with pytest.raises(TypeError, match="weights must all be in eight bits or none, but weight 1 is FourBitWeight"):
        onepass.frozen_weight(frozen, four_bits(N, K, BF16))
    with pytest.raises(ValueError, match="weight must not require grad"):
        onepass.linear(x, onepass.freeze_weight(plain()).requires_grad_())
    with pytest.raises(RuntimeError, match="weight must be a plain tensor under vmap"):
        torch.func.vmap(lambda x: onepass.linear(x, frozen))(x)
    assert isinstance(frozen, FrozenWeight) and onepass.frozen_weight(frozen) is frozen
