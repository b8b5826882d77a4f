"""Products of a model's blocks in eight bits: which have them, how near they are to 16 bits', and what becomes of their state."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

import transformers
from integrations.huggingface.families import batch, both, made, step
from integrations.huggingface.trainer import trained
from nn.test_fp8_written_weights import by_numpy, copied, data_copied
from ops.fp8_calls import decibels
from torch import nn

import onepass
from onepass import FP8Recipe
from onepass.integrations import huggingface
from onepass.integrations.huggingface import applied as applied_module
from onepass.integrations.huggingface import linear_layers, linears, mlps, precision
from onepass.kernels.language import triton
from onepass.product.fp8 import updates as fp8_updates
from onepass.product.fp8 import weight as fp8_weight
from onepass.testing.mutants import mutate

pytestmark = [
    pytest.mark.usefixtures("by_formula"),
    pytest.mark.filterwarnings(
        "ignore:max_norm is None",  # Trainer is imported by some tests, and stays
        "ignore:.*gradient_checkpointing:FutureWarning",  # transformers' and PEFT's own
    ),
]
RECIPES = {"delayed": "fp8", "current": FP8Recipe(scaling="current"), "row": FP8Recipe(scaling="row")}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
PACKED = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")  # a Llama's products, by their first weights
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEARS = tuple(f"{'mlp' if i > 3 else 'self_attn'}.{name}" for i, name in enumerate(TARGETS))


def assert_near(found, expected, least=16):
    """Assert that losses are within a hundredth, and all gradients together as near as eight bits are, and no nearer."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-2, atol=1e-2, check_dtype=False)
    assert found[1].keys() == expected[1].keys()
    ours, exact = (torch.cat([grads[name].flatten().double() for name in expected[1]]) for _, grads in (found, expected))
    assert least <= decibels(ours, exact) < 45


def assert_same(found, expected):
    assert found[0].equal(expected[0]) and found[1].keys() == expected[1].keys()
    assert all(found[1][name].equal(grad) for name, grad in expected[1].items())


def rows_of(applied):
    """Return the report's rows of precision, by name: what runs in eight bits, or why it doesn't."""
    return {row.name: row.by or row.why for row in applied.rows if row.part == "precision"}


def states(model):
    return {name.removesuffix(".weight") for name, parameter in model.named_parameters() if hasattr(parameter, "fp8")}


def in_layers(*names):
    return {f"model.layers.{layer}.{name}" for layer in range(2) for name in names}


def twins(family="Llama", recipe="fp8", **options):
    """Return two models of the same weights, with onepass applied to each. A deep copy's weights are not packed."""
    models = made(family, **options), made(family, **options)
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        huggingface.apply(model, precision=recipe)
    return models


def train(model, steps=3, optimizer=None, **options):
    """Return the losses of some steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(**batch(), **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- numbers ----


@recipes
@pytest.mark.parametrize("family", ("Llama", "Qwen3", "Gemma2", "Mixtral", "GPTNeoX", "OPT"))
def test_loss_and_gradients_are_near_those_of_16_bits(family, recipe):
    model, before, _ = both(family, precision=recipe)
    assert_near(step(model, **batch()), step(before, **batch()))
    model, before = model.bfloat16(), before.bfloat16()
    assert_near(step(model, **batch(masked=True)), step(before, **batch(masked=True)))


@recipes
def test_training_goes_down_as_in_16_bits_and_again_by_the_same_bits(recipe):
    before = made()
    model, again = twins(recipe=recipe)
    for each in (model, again):
        each.load_state_dict(before.state_dict())
    losses, expected = train(model, 12), train(before, 12)
    assert losses[-1] < losses[0] - 1
    assert losses == pytest.approx(expected, rel=0.03) and losses != pytest.approx(expected, rel=1e-5)
    assert train(again, 12) == losses
    for p, other in zip(model.parameters(), again.parameters(), strict=True):
        assert p.equal(other)


@recipes
@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("family", ("Llama", "OPT"))
def test_gradient_checkpointing_has_the_same_bits(family, reentrant, recipe):
    model, other = twins(family, recipe)
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for _ in range(3):
        found, expected = step(other, **batch()), step(model, **batch())
        assert_same(found, expected)
        for each in (model, other):
            torch.optim.SGD(each.parameters(), lr=0.1).step()


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of models on a CPU need the interpreter")
@pytest.mark.parametrize("main_grad", (False, True))
def test_by_kernels(monkeypatch, main_grad):
    monkeypatch.undo()
    with onepass.use_backend("triton"):
        model, before, applied = both(num_hidden_layers=1, main_grad=main_grad, precision="fp8")
        model(**batch()).loss.backward()
    before(**batch()).loss.backward()
    if main_grad:
        applied.main_grads.finish()
    found = torch.cat([(p.main_grad if main_grad else p.grad).flatten() for p in model.parameters()])
    assert 16 < decibels(found, torch.cat([p.grad.flatten() for p in before.parameters()])) < 45


@pytest.mark.parametrize("release", (False, True))
def test_main_grad(release):
    model, before, applied = both(main_grad=True, release_main_grad=release, precision="fp8")
    optimizer = applied.optimizer(lr=1e-2)
    assert train(model, 12, optimizer) == pytest.approx(train(before, 12), rel=0.03)
    model.zero_grad()
    for _ in range(2):
        model(**batch()).loss.backward()
    applied.main_grads.finish()
    assert all(p.grad is None for p in model.parameters())
    found = {name: p.main_grad.clone() / 2 for name, p in model.named_parameters()}
    plain = copy.deepcopy(before)
    plain.load_state_dict(model.state_dict())
    _, expected = step(plain, **batch())
    assert_near((torch.zeros(()), found), (torch.zeros(()), expected))


@pytest.mark.parametrize("main_grad", (False, True))
def test_packed_weights_have_scales_that_last(main_grad):
    """Those of steps before, of several microbatches each."""
    model, _, applied = both(precision="fp8", main_grad=main_grad)
    optimizer = applied.optimizer(lr=1e-2) if main_grad else torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for _ in range(3):
            model(**batch()).loss.backward()
        optimizer.step()
    model(**batch())
    kept = [parameter.fp8.scales for parameter in model.parameters() if hasattr(parameter, "fp8")]
    assert len(kept) == 2 * len(PACKED)
    assert all(scales.steps.tolist() == [2, 2, 2] for scales in kept)
    assert all(scales.history[[0, 2], :2].all() for scales in kept)


def test_autocast():
    model, before, _ = both(precision="fp8")
    with torch.autocast("cpu", torch.bfloat16):
        assert_near(step(model, **batch()), step(before, **batch()))


# ---- which layers ----


@recipes
def test_the_report_says_what_runs(recipe):
    model, _, applied = both(precision=recipe)
    scaling = "delayed" if recipe == "fp8" else recipe.scaling
    expected = dict.fromkeys(in_layers(*LINEARS), f"fp8, {scaling} scales")
    assert rows_of(applied) == expected | {"lm_head": "the head keeps its type"}
    assert "model.layers.{0-1}.mlp.down" in str(applied) and f"fp8, {scaling} scales" in str(applied)
    step(model, **batch())
    assert states(model) == in_layers(*PACKED)
    assert {name.removesuffix(".weight") for name in onepass.nn.fp8_saturations(model)} == in_layers(*PACKED)


@pytest.mark.parametrize("left", ({"mlp": False}, {"qkv": False}, dict.fromkeys(("norm", "mlp", "rope", "loss", "qkv"), False)))
def test_layers_that_apply_leaves_to_torch_run_in_eight_bits_too(left):
    model = made()
    before = copy.deepcopy(model)
    applied = huggingface.apply(model, precision="fp8", **left)
    assert rows_of(applied).keys() == {*in_layers(*LINEARS), "lm_head"}
    assert_near(step(model, **batch()), step(before, **batch()))
    own = {"self_attn.k_proj", "self_attn.v_proj"} if "qkv" in left else set()
    own |= {"mlp.up_proj"} if "mlp" in left else set()
    assert states(model) == in_layers(*PACKED, *own)


def test_a_layer_by_itself_is_a_block():
    layer = made().model.layers[0]
    found = rows_of(huggingface.apply(layer, precision="fp8"))
    assert found == dict.fromkeys(LINEARS, "fp8, delayed scales")


def test_what_keeps_its_type_says_why():
    model, before, applied = both("Qwen3Moe", precision="fp8")
    found = rows_of(applied)
    assert found["model.layers.0.mlp.experts"] == "the experts' sizes, 32 x 24, are not multiples of 16"
    assert found["lm_head"] == "the head keeps its type"
    assert_near(step(model, **batch()), step(before, **batch()))
    assert states(model) == in_layers("self_attn.q_proj", "self_attn.o_proj")

    model, before, applied = both(intermediate_size=40, precision="fp8")
    found = rows_of(applied)
    assert found["model.layers.1.mlp.down_proj"] == "the weight's sizes, 32 x 40, are not multiples of 16"
    assert found["model.layers.1.mlp.up_proj"] == found["model.layers.1.self_attn.o_proj"] == "fp8, delayed scales"  # 80 x 32
    assert_near(step(model, **batch()), step(before, **batch()))
    assert states(model) == in_layers("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")

    with pytest.raises(ValueError, match=r"precision must be None, as no linear layer of this GPT2LMHeadModel fits") as raised:
        both("GPT2", precision="fp8")
    assert "transformer.h.0.attn.c_attn: its weight is stored transposed" in str(raised.value)


def test_experts_run_in_eight_bits_where_apply_runs_them():
    model, before, applied = both("Mixtral", precision="fp8")
    rows = in_layers("mlp.experts")
    assert {rows_of(applied)[name] for name in rows} == {"fp8, scales by row"}
    assert_near(step(model, **batch()), step(before, **batch()))
    assert states(model) == in_layers("self_attn.q_proj", "self_attn.o_proj")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.ReLU()
    said = [row.why for row in applied.rows if row.part == "precision" and row.name == "model.layers.0.mlp.experts"]
    assert said[0].startswith("changed since: ")
    del model.model.layers[0].mlp.experts._modules["act_fn"]
    applied.undo()
    assert not any("precision" in vars(module) for module in model.modules())

    _, _, applied = both("Mixtral", precision="fp8", intermediate_size=40)
    assert rows_of(applied)["model.layers.0.mlp.experts"] == "the experts' sizes, 32 x 40, are not multiples of 16"
    left = huggingface.apply(made("Mixtral"), precision="fp8", mlp=False)
    why = "grouped products of experts that onepass doesn't run keep their type"
    assert {rows_of(left)[name] for name in rows} == {why}


def test_experts_without_gradients_have_the_weights_own_type():
    model, before, _ = both("Mixtral", precision="fp8")
    for each in (model, before):
        each.eval()
    with torch.no_grad():
        found, expected = (each(batch()["input_ids"]).logits for each in (model, before))
    assert decibels(found, expected) > 60


class Linear4bit(torch.nn.Linear):
    """As quantised layers: derived from torch's, with a forward of its own."""

    def forward(self, x):
        return super().forward(x) / 2


def test_quantised_layers_and_routers_are_left_alone():
    model = made()
    layer = model.model.layers[0]
    layer.mlp.down_proj.__class__ = layer.self_attn.q_proj.__class__ = Linear4bit
    layer.self_attn.o_proj.weight = torch.nn.Parameter(layer.self_attn.o_proj.weight.to(torch.float8_e4m3fn), False)
    layer.router = torch.nn.Linear(32, 16)
    found = rows_of(huggingface.apply(model, precision="fp8"))
    why = f"it is no plain torch.nn.Linear, but {Linear4bit.__module__}.Linear4bit"
    assert found["model.layers.0.mlp.down_proj"] == found["model.layers.0.self_attn.q_proj"] == why
    assert found["model.layers.0.self_attn.o_proj"] == "its weight is a Parameter of torch.float8_e4m3fn"
    assert found["model.layers.0.router"] == "a router keeps its type"
    assert found["model.layers.0.mlp.up_proj"] == found["model.layers.1.self_attn.o_proj"] == "fp8, delayed scales"
    layer.self_attn.o_proj.weight = torch.nn.Parameter(layer.self_attn.o_proj.weight.float(), False)
    step(model, **batch())
    left = {f"model.layers.0.{name}" for name in ("mlp.down_proj", "self_attn.q_proj")}
    assert not states(model) & left and in_layers("mlp.gate_proj") < states(model)


# ---- LoRA ----


# ---- frozen weights as codes ----


def with_adapters(**options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=16, target_modules=TARGETS, init_lora_weights=False)
    return peft.get_peft_model(made(**options), config)


@pytest.mark.parametrize(("scaling", "layouts"), [("delayed", 2), ("delayed", 1), ("current", 1), ("row", 2)])
def test_codes_made_once_have_the_bits_of_codes_of_each_call(scaling, layouts):
    model, recipe = with_adapters(), onepass.FP8Recipe(scaling=scaling)
    before, size = copy.deepcopy(model), weight_bytes(model)
    applied = huggingface.apply(model, precision=recipe, frozen_layouts=layouts)
    huggingface.apply(before, precision=recipe)
    assert weight_bytes(model) < (0.3 * layouts + 0.1) * size  # of fp32
    assert list(rows_of(applied).values()).count(f"fp8, {scaling} scales, weight as codes") == 2 * len(LINEARS)
    for _ in range(2):
        found, expected = step(model, **batch()), step(before, **batch())
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items())


def weight_bytes(model):
    """Return the bytes of the blocks' weights, whatever they are kept as."""
    held = {}
    for name, module in model.named_modules():
        if name.endswith("base_layer") and "lm_head" not in name:
            for tensor in getattr(module.weight, "tensors", {"weight": module.weight}).values():
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(held.values())


def test_codes_that_move_or_are_loaded_are_seen():
    model, other = (with_adapters() for _ in range(2))
    for each in (model, other):
        huggingface.apply(each, precision="fp8", frozen_layouts=2)
    with torch.no_grad():
        for name, module in other.named_modules():
            if name.endswith("k_proj.base_layer"):
                module.weight.codes.view(torch.uint8).bitwise_xor_(0x80)  # other signs
                module.weight.transposed.view(torch.uint8).bitwise_xor_(0x80)
    assert step(model, **batch())[0] != step(other, **batch())[0]
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    assert step(model, **batch())[0] == step(other, **batch())[0]
    moved = copy.deepcopy(model)
    for module in moved.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "codes"):
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)  # in other memory
    assert step(moved, **batch())[0] == pytest.approx(float(step(model, **batch())[0]), rel=1e-4)  # q, k and v by themselves


def test_weights_that_are_frozen_or_replaced_after_apply():
    model = with_adapters()
    before = copy.deepcopy(model)
    applied = huggingface.apply(model, precision="fp8", frozen_layouts=1)
    for name, module in model.named_modules():
        if name.endswith(("k_proj.base_layer", "down_proj.base_layer")):
            module.weight = nn.Parameter(before.get_submodule(name).weight.detach().clone(), requires_grad=False)
    assert_near(step(model, **batch()), step(before, **batch()))
    assert not [row for row in applied.rows if row.part == "qkv" and row.kind.endswith("Attention") and row.by]
    model = copy.deepcopy(before)
    huggingface.apply(model)
    for name, module in model.named_modules():
        if name.endswith("up_proj.base_layer"):
            onepass.freeze_weight(module)
    before.zero_grad(set_to_none=True)
    (loss, _), (expected, _) = step(model, **batch()), step(before, **batch())
    assert loss != expected and loss == pytest.approx(float(expected), rel=1e-2)


def test_codes_stay_after_undo_and_refuse_a_merge():
    model = with_adapters()
    applied = huggingface.apply(model, precision="fp8", frozen_layouts=2)
    with pytest.raises(RuntimeError, match="a frozen weight is kept in few bits and can't be written in place"):
        model.merge_adapter()
    found = step(model, **batch())
    applied.undo()
    assert_near(step(model, **batch()), found)


def test_what_frozen_layouts_needs():
    for options, words in (
        ({"frozen_layouts": 2}, "frozen_layouts must be None without precision, but is 2"),
        ({"frozen_layouts": 3, "precision": "fp8"}, "frozen_layouts must be 1 or 2, but is 3"),
    ):
        with pytest.raises(ValueError, match=words):
            huggingface.apply(made(), **options)
    with pytest.raises(ValueError, match="frozen_layouts must be None, as no weight of a product in eight bits is frozen"):
        huggingface.apply(made(), precision="fp8", frozen_layouts=2)


@pytest.mark.parametrize("targets", (["q_proj", "v_proj"], TARGETS), ids=("two", "all"))
@pytest.mark.parametrize("first", ("onepass", "PEFT"))
def test_lora(first, targets):
    """Frozen weights in eight bits, adapters in their type; merged weights are what evaluation sees."""
    peft = pytest.importorskip("peft")
    model = made()
    before = copy.deepcopy(model)

    def wrapped(inner):
        torch.manual_seed(3)
        return peft.get_peft_model(inner, peft.LoraConfig(r=16, target_modules=targets, init_lora_weights=False))

    if first == "onepass":
        applied = huggingface.apply(model, precision="fp8")
        step(model, **batch())  # packed, before each is wrapped
        model.zero_grad(set_to_none=True)
        model = wrapped(model)
    else:
        model = wrapped(model)
        applied = huggingface.apply(model, precision="fp8")
    plain = wrapped(before)
    assert_near(step(model, **batch()), step(plain, **batch()))
    found = rows_of(applied)
    assert sum(by == "fp8, delayed scales" for by in found.values()) == 2 * len(LINEARS)
    assert not any("lora" in name for name in found)
    assert not any("lora" in name for name in states(model))
    for each in (model, plain):
        train(each, 3)
        each.merge_adapter()
        each.eval()
    with torch.no_grad():
        found, expected = (each(**batch()).loss for each in (model, plain))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    with torch.no_grad():
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss, rtol=1e-5, atol=1e-5)


# ---- evaluation, changes, state ----


@recipes
@pytest.mark.parametrize("write", (data_copied, by_numpy, copied), ids=lambda write: write.__name__)
def test_written_weights_are_seen(write, recipe):
    """One that is packed with others, and one alone."""
    model, before, _ = both(precision=recipe)
    for _ in range(2):
        step(model, **batch())
    for layer in (model.model.layers[0].self_attn.v_proj, model.model.layers[1].mlp.down_proj):
        write(layer, layer.weight.detach().roll(1, 0))
    before.load_state_dict(model.state_dict())
    assert_near(step(model, **batch()), step(before, **batch()))


def test_evaluation_has_the_weights_own_type():
    model, before, _ = both(precision="fp8")
    train(model, 2)
    model.eval()
    before.eval().load_state_dict(model.state_dict())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.data += 1  # as PEFT merges
        before.model.layers[0].mlp.up_proj.weight.data += 1
        torch.testing.assert_close(model(**batch()).logits, before(**batch()).logits)
    assert not model(**batch()).logits.allclose(before(**batch()).logits, rtol=1e-3, atol=1e-3)  # gradients are on
    with torch.no_grad():
        assert not model.train()(**batch()).loss.allclose(before.train()(**batch()).loss, rtol=1e-5)


@pytest.mark.parametrize("name", LINEARS)
def test_a_weight_that_is_written_in_place_is_seen(name):
    """Each of those that are packed, by whichever."""
    model, before, _ = both(precision="fp8")
    step(model, **batch())
    for each in (model, before):
        with torch.no_grad():
            each.model.layers[0].get_submodule(name).weight.mul_(-2)
    assert_near(step(model, **batch()), step(before, **batch()))


def test_a_part_that_is_changed_runs_its_own_code_in_eight_bits():
    model, before, applied = both(precision="fp8")
    for each in (model, before):
        each.model.layers[0].mlp.act_fn = torch.nn.ReLU()
        each.model.layers[1].mlp.down_proj = copy.deepcopy(before.model.layers[0].mlp.down_proj)
        each.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, y: 2 * y)
    assert_near(step(model, **batch()), step(before, **batch()))
    found = rows_of(applied)
    assert found["model.layers.0.mlp.up_proj"] == found["model.layers.1.self_attn.q_proj"] == "fp8, delayed scales"
    assert found["model.layers.1.mlp.down_proj"] == "changed since: Linear has its place"
    own = {f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")}
    own |= {f"model.layers.1.self_attn.{name}_proj" for name in "kv"} | {"model.layers.1.mlp.up_proj"}
    assert states(model) == (in_layers(*PACKED) | own) - {"model.layers.1.mlp.down_proj"}
    model.model.layers[0].self_attn.o_proj.weight = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), False)
    assert rows_of(applied)["model.layers.0.self_attn.o_proj"] == "changed since: its weight is a Parameter of torch.int8"


def test_one_of_packed_weights_alone_has_a_state_of_its_own():
    model, _, _ = both(precision="fp8", attention_bias=False)
    first = step(model, **batch())
    layer, x = model.model.layers[0], torch.randn(4, 32)
    for name in ("gate_proj", "up_proj"):
        weight = layer.mlp.get_submodule(name).weight
        y = onepass.linear(x, weight, precision="fp8")
        assert decibels(y, x.double() @ weight.double().t()) > 20
    assert_same(step(model, **batch()), first)


def test_undo_gives_the_former_bits_back_and_leaves_nothing():
    model, before, applied = both(precision="fp8")
    expected = step(before, **batch())
    for _ in range(2):
        step(model, **batch())
    hooks = [len(module._load_state_dict_post_hooks) for module in before.modules()]
    applied.undo()
    assert not states(model)
    assert [len(module._load_state_dict_post_hooks) for module in model.modules()] == hooks
    assert not any({"forward", "precision", "_onepass"} & vars(module).keys() for module in model.modules())
    assert_same(step(model, **batch()), expected)
    assert_near(step(model, **batch()) if huggingface.apply(model, precision="fp8") else None, expected)


def test_saved_states_are_the_models(tmp_path):
    model, before, _ = both(precision="fp8")
    train(model)
    before.load_state_dict(model.state_dict())
    for name, each in (("ours", model), ("plain", before)):
        each.save_pretrained(tmp_path / name)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("ours", "plain")]
    assert files[0] == files[1]
    ours, plain = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("ours", "plain"))
    assert ours.keys() == plain.keys() == before.state_dict().keys()
    assert all(tensor.equal(plain[name]) for name, tensor in ours.items())


def test_loaded_weights_start_anew_and_scales_resume_by_the_same_bits():
    model, _, _ = both(precision="fp8")
    train(model)
    saved = {"model": copy.deepcopy(model.state_dict()), "fp8": copy.deepcopy(onepass.nn.fp8_state_dict(model))}
    assert saved["fp8"].keys() == {f"{name}.weight" for name in in_layers(*PACKED)}
    resumed = made()
    huggingface.apply(resumed, precision="fp8")
    train(resumed)
    resumed.load_state_dict({name: 8 * weight for name, weight in saved["model"].items()})
    assert not states(resumed)
    resumed.load_state_dict(saved["model"])
    onepass.nn.load_fp8_state_dict(resumed, saved["fp8"])
    for _ in range(2):
        assert_same(step(resumed, **batch()), step(model, **batch()))
        for each in (resumed, model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
    ours, theirs = (onepass.nn.fp8_state_dict(each) for each in (resumed, model))
    assert all(state["history"].equal(theirs[name]["history"]) and state["steps"].min() == 4 for name, state in ours.items())


def test_copies_and_pickles_go_on():
    model, before, _ = both(precision="fp8")
    train(model)
    before.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_near(step(other, **batch()), step(before, **batch()))
        assert states(other) == in_layers(*LINEARS)
        own, theirs = ({id(p.fp8) for p in each.parameters() if hasattr(p, "fp8")} for each in (model, other))
        assert not own & theirs


# ---- transformers' Trainer ----


class KeepScales(transformers.TrainerCallback):
    """Keeps scales beside the weights that Trainer saves, as docs/huggingface/training.md shows."""

    def on_save(self, args, state, control, model, **rest):
        torch.save(onepass.nn.fp8_state_dict(model), f"{args.output_dir}/checkpoint-{state.global_step}/fp8.pt")

    def on_train_begin(self, args, state, control, model, **rest):
        if state.global_step:
            path = f"{args.output_dir}/checkpoint-{state.global_step}/fp8.pt"
            onepass.nn.load_fp8_state_dict(model, torch.load(path))


@pytest.mark.parametrize("main_grad", (False, True))
@pytest.mark.parametrize("recipe", ("fp8", FP8Recipe(scaling="current")), ids=("delayed", "current"))
def test_trainer_resumes_by_the_same_bits(tmp_path, main_grad, recipe):
    before, whole, resumed = made(), made(), made()
    whole.load_state_dict(before.state_dict())
    stopped = copy.deepcopy(whole)
    kept = {each: huggingface.apply(each, main_grad=main_grad, precision=recipe) for each in (whole, stopped, resumed)}
    optimizer = {each: applied.optimizer(lr=1e-2, max_norm=1e9) if main_grad else None for each, applied in kept.items()}
    options = {"callbacks": (KeepScales(),), "weight_decay": 0.0}
    losses = trained(whole, optimizer[whole], tmp_path / "whole", **options)
    assert losses == pytest.approx(trained(before, None, tmp_path / "before", **options), rel=0.02)
    trained(stopped, optimizer[stopped], tmp_path / "run", steps=2, save_strategy="steps", save_steps=2, **options)
    trained(resumed, optimizer[resumed], tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-2"), **options)
    for (name, p), other in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert p.equal(other), name


# ---- errors ----


def test_bad_input(monkeypatch):
    model, before = made(), made("GPT2")
    for wrong in ("fp4", "e4m3", 8):
        with pytest.raises(ValueError, match=f"precision must be None, 'fp8' or an FP8Recipe, but is {wrong!r}"):
            huggingface.apply(model, precision=wrong)
    with pytest.raises(TypeError, match=r"must be fp32, bf16 or fp16 with precision='fp8', but model\.layers\.0\.\S+ is fp64"):
        huggingface.apply(made().double(), precision="fp8")
    monkeypatch.setattr(precision, "check_gpu", lambda name, weight: (_ for _ in ()).throw(RuntimeError(f"{name} on this GPU")))
    with pytest.raises(RuntimeError, match="precision on this GPU"):
        huggingface.apply(model, precision="fp8")
    for each in (model, before):
        assert not any({"forward", "precision"} & vars(module).keys() for module in each.modules())
    monkeypatch.undo()
    applied = huggingface.apply(model, precision="fp8")
    model.double()
    with pytest.raises(TypeError, match="must be fp32, bf16 or fp16 with precision='fp8', but is fp64"):
        step(model, **batch())
    applied.undo()


def test_compiled_as_one_graph():
    model, before, _ = both("Llama", num_hidden_layers=1, precision="fp8")
    uncompiled = model(**batch()).loss
    torch._dynamo.reset()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**batch(), use_cache=False).loss
    loss.backward()
    before(**batch()).loss.backward()
    assert loss.allclose(uncompiled, rtol=1e-3)
    grads = [(parameter.grad, plain.grad) for parameter, plain in zip(model.parameters(), before.parameters(), strict=True)]
    assert max((grad - plain).norm() / plain.norm() for grad, plain in grads if plain.any()) > 1e-2
    assert all(parameter.grad is not None for parameter in model.parameters())


# ---- broken code ----

MUTANTS = {
    "up's product in 16 bits": (linears, "LinearsMatch.__call__", '"precision": precision', '"precision": None'),
    "down's product in 16 bits": (mlps, "MLPMatch.__call__", "precision=self.down.precision()", "precision=None"),
    "packed weights without lasting state": (fp8_updates, "whole_of", "return packed[0]", "return weight"),
    "q's state for q alone": (fp8_weight, "fp8_weight", "state.shape != weight.shape", "state.shape == ()"),
    "old scales of loaded weights": (precision, "_start_anew", '"weight": None', '"bias": None'),
    "evaluation in eight bits": (linear_layers, "precision_of", "module.training or torch.is_grad_enabled()", "True"),
}  # fmt: skip


@torch.no_grad()
def write(model, factor):
    model.model.layers[0].self_attn.v_proj.weight.mul_(factor)


def catches(apply):
    """Raise where a model that `apply` was applied to is wrong."""
    torch.manual_seed(0)
    model = made()
    write(model, 16)
    before = copy.deepcopy(model)
    apply(model, precision="fp8")
    alone = model.model.layers[0].self_attn.q_proj(torch.randn(4, 32))  # before it is packed with others
    for _ in range(2):
        assert_near(step(model, **batch()), step(before, **batch()))
    assert states(model) == in_layers(*PACKED)
    alone.sum().backward()
    for each in (model, before):
        write(each, -1)
    assert_near(step(model, **batch()), step(before, **batch()))
    before.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**batch()).logits, before.eval()(**batch()).logits)
    model.load_state_dict(model.state_dict())
    assert not states(model)


def test_what_is_right_passes():
    catches(huggingface.apply)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name, monkeypatch):
    with monkeypatch.context() as patched:
        patched.delenv("TRITON_INTERPRET", raising=False)  # the copy runs formulas
        mutant = mutate(*MUTANTS[name], entry=applied_module)
    with pytest.raises((AssertionError, RuntimeError)):
        catches(mutant.apply)
