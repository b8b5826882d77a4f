"""`apply` on models of every family: the same numbers, all as before around them, and all of it taken back."""

import copy
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5")

import transformers
from integrations.huggingface.families import FAMILIES, VOCABULARY, assert_alike, batch, both, made, step

import onepass
from onepass.gradients.packed_params import are_packed
from onepass.integrations import huggingface
from onepass.testing.poison import bytes_kept, saved_tensors

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning",  # transformers' and PEFT's own
    "ignore:None of the inputs have requires_grad:UserWarning",
)


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def kept_by(model, given):
    """Bytes for backward, weights apart."""
    with saved_tensors() as saved:
        model(**given)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return bytes_kept([t for t in saved if t.untyped_storage().data_ptr() not in weights])


def prompt():
    return torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


# ---- families ----


def test_options_that_are_all_false_and_weights_that_are_sharded():
    with pytest.raises(ValueError, match="one of norm, mlp, rope, loss, qkv must be True without"):
        huggingface.apply(made(), norm=False, mlp=False, rope=False, loss=False, qkv=False)
    model = made()
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().flatten())
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj.weight must have two dimensions, .* FSDP1 has sharded it"):
        huggingface.apply(model)


def test_names_stay_whole_in_80_columns(monkeypatch):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(made(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    applied = huggingface.apply(model)
    for columns in ("40", "80", "118", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = str(applied).splitlines()
        assert len({len(line) for line in lines[1:]}) == 1 and len(lines[1]) <= max(80, min(118, int(columns)))
        words = set(str(applied).replace("│", " ").replace(".", " ").split())
        for row in applied.rows:
            assert {row.kind, *re.sub(r"\.\d+", "", row.name).split("."), *(row.by or row.why).replace(".", " ").split()} <= words


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_the_same(family):
    model, before, _ = both(family)
    for given in (batch(), batch(masked=True), batch() | {"num_items_in_batch": torch.tensor(5)}, batch() | {"use_cache": False}):
        assert_alike(step(model, **given), step(before, **given))


@pytest.mark.parametrize("family", ("Llama", "Gemma2", "GPT2", "GPTNeoX", "Qwen3Moe"))
def test_a_step_in_bf16_is_as_near(family):
    """As the same in fp32, and as eager in bf16 is."""
    model, before, _ = both(family)
    exact = step(before, **batch())
    found, plain = step(model.bfloat16(), **batch()), step(before.bfloat16(), **batch())

    def error(result):
        return sum((result[1][name].float() - grad).square().sum() for name, grad in exact[1].items()).sqrt()

    assert error(found) < 1.25 * error(plain)
    assert abs(found[0] - exact[0]) < 1.5 * abs(plain[0] - exact[0]) + 2e-4 * exact[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_and_generation_are_the_same(family):
    model, before, _ = both(family)
    ids = prompt()
    mask = torch.ones_like(ids)
    for each in (model, before):
        each.eval()
    with torch.no_grad():
        found, expected = (each(input_ids=ids, attention_mask=mask, labels=ids) for each in (model, before))
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    written = [each.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False) for each in (model, before)]
    assert written[0].equal(written[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_leaves_nothing(family):
    def attributes():
        return [(set(vars(module)), type(module), vars(module).get("forward")) for module in model.modules()]

    model = made(family)
    step(model, **batch())  # transformers has notes of its own
    before = attributes()
    parameters = [(id(p), p.clone()) for p in model.parameters()]
    applied = huggingface.apply(model)
    step(model, **batch())
    applied.undo()
    assert attributes() == before
    assert all(id(p) == name and p.equal(value) for p, (name, value) in zip(model.parameters(), parameters, strict=True))
    with pytest.raises(RuntimeError, match="nothing to undo"):
        applied.undo()
    huggingface.apply(model)


@pytest.mark.parametrize("part", ("norm", "mlp", "rope", "loss", "qkv"))
@pytest.mark.parametrize("family", ("Llama", "Gemma3Text"))
def test_each_part_alone_and_all_but_it(family, part):
    before = made(family)
    parts = dict.fromkeys(("norm", "mlp", "rope", "loss", "qkv"), False)
    for chosen in (parts | {part: True}, dict.fromkeys(parts, True) | {part: False}):
        model = copy.deepcopy(before)
        applied = huggingface.apply(model, **chosen)
        assert {row.part for row in applied.replaced} <= {name for name, wanted in chosen.items() if wanted}
        assert_alike(step(model, **batch()), step(before, **batch()))


# ---- what models are put through ----


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("family", ("Llama", "Gemma2", "GPTNeoX", "Mixtral", "OPT"))
def test_gradient_checkpointing(family, reentrant):
    model, before, _ = both(family)
    for each in (model, before):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert_alike(step(model, **batch(masked=True)), step(before, **batch(masked=True)))


def test_gradient_checkpointing_keeps_a_layers_input_only():
    model, _, _ = both(tie_word_embeddings=False)
    given = batch(tokens=48) | {"use_cache": False}
    without = kept_by(model, given)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert kept_by(model, given) < 0.5 * without


@pytest.mark.parametrize("family", ("Llama", "Gemma3Text", "GPTNeoX"))
def test_autocast(family):
    model, before, _ = both(family)
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(step(model, **batch()), step(before, **batch()), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("family", ("Llama", "GPT2"))  # test_several.py compiles more, by kernels
def test_compiled_as_one_graph(family):
    model, before, _ = both(family, **({} if family == "Llama" else {"num_hidden_layers": 1}))
    given = batch() | {"use_cache": False}
    assert_alike(step(torch.compile(model, fullgraph=True, backend="aot_eager"), **given), step(before, **given))


@pytest.mark.parametrize(
    "targets", (["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
)
@pytest.mark.parametrize("first", ("onepass", "PEFT"))
def test_lora(first, targets):
    peft = pytest.importorskip("peft")
    model = made()
    before = copy.deepcopy(model)

    def wrapped(inner):
        torch.manual_seed(3)
        return peft.get_peft_model(inner, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))

    if first == "onepass":
        huggingface.apply(model)
        model = wrapped(model)
    else:
        model = wrapped(model)
        applied = huggingface.apply(model)
        assert {row.by for row in applied.rows if row.part == "rope"} == {"rope"}  # whatever makes q and k
    assert_alike(step(model, **batch()), step(wrapped(before), **batch()))


def test_training_makes_no_cache_unasked():
    model, before, _ = both()
    assert model(**batch()).past_key_values is None and before(**batch()).past_key_values is not None
    asked = model(**batch(), use_cache=True)
    assert asked.past_key_values.get_seq_length() == 12
    assert model(input_ids=prompt()).past_key_values is not None
    torch.testing.assert_close(asked.loss, before(**batch()).loss)


def test_an_attention_that_shows_its_weights():
    model, before, _ = both(attn_implementation="eager")
    ids = prompt()
    found, expected = (each(input_ids=ids, output_attentions=True, output_hidden_states=True) for each in (model, before))
    torch.testing.assert_close(found.attentions, expected.attentions)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states)


def test_hooks_are_called_as_before():
    model, before, _ = both()
    seen = {model: [], before: []}
    for each in (model, before):
        for name, module in each.named_modules():
            module.register_forward_hook(lambda *_, each=each, name=name: seen[each].append(name))
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert seen[model] == seen[before]


@pytest.mark.parametrize("place", ("self_attn", "mlp", "input_layernorm", "self_attn.q_proj", "mlp.up_proj"))
def test_a_hook_on_one_module_sees_and_changes_what_it_did(place):
    model, before, _ = both()
    seen = []
    for each in (model, before):
        module = each.model.layers[0].get_submodule(place)
        module.register_forward_pre_hook(
            lambda _, args, named: (
                tuple(a + 1 for a in args),
                {k: v + 1 if k == "hidden_states" else v for k, v in named.items()},
            ),
            with_kwargs=True,
        )
        module.register_forward_hook(lambda _, args, result: seen.append((args, result)))
    assert_alike(step(model, **batch()), step(before, **batch()))
    assert len(seen) == 2


@pytest.mark.parametrize("place", ("self_attn.q_proj", "mlp.up_proj", "mlp", "self_attn"))
@pytest.mark.parametrize("when", ("before", "after"))
def test_a_forward_that_somebody_has_replaced_is_kept(place, when):
    model = made()
    before = copy.deepcopy(model)

    def replace(each):
        module = each.model.layers[0].get_submodule(place)
        original = type(module).forward
        module.forward = lambda x=None, **named: (
            original(module, 2 * named.pop("hidden_states"), **named) if x is None else original(module, 2 * x, **named)
        )

    if when == "before":
        replace(model)
    huggingface.apply(model)
    if when == "after":
        replace(model)
    replace(before)
    assert_alike(step(model, **batch()), step(before, **batch()))


def zeros_made_by(model, place):
    """The share of zeros in what it makes in training."""
    found = []
    handle = model.get_submodule(place).register_forward_hook(lambda _, args, result: found.append(result))
    model(**batch())
    handle.remove()
    result = found[0][0] if isinstance(found[0], tuple) else found[0]
    return (result == 0).float().mean().item()


@pytest.mark.parametrize(
    ("family", "place", "options"),
    [
        ("GPT2", "transformer.h.0.attn", {"resid_pdrop": 0.5}),
        ("GPT2", "transformer.h.0.mlp", {"resid_pdrop": 0.5}),
        ("Starcoder2", "model.layers.0.self_attn", {"residual_dropout": 0.5}),
        ("Starcoder2", "model.layers.0.mlp", {"residual_dropout": 0.5}),
    ],
)
def test_dropout_stays(family, place, options):
    model, before, _ = both(family, **options)
    assert zeros_made_by(before, place) > 0.3
    assert abs(zeros_made_by(model, place) - zeros_made_by(before, place)) < 0.15


@pytest.mark.parametrize("family", ("Qwen3", "Gemma3Text", "Qwen3Moe"))
def test_norms_of_heads_are_attentions(family, monkeypatch):
    """Unless other code runs in one of them, which then is called."""
    from onepass.integrations.huggingface import attentions

    calls, seen = [], []
    stock = attentions.attention
    monkeypatch.setattr(attentions, "attention", lambda *args, **options: (calls.append(options), stock(*args, **options))[1])
    model, before, applied = both(family)
    expected = step(before, **batch())
    assert_alike(step(model, **batch()), expected)
    layers = [layer.self_attn for layer in model.model.layers]
    assert [call["q_weight"] is layer.q_norm.weight for call, layer in zip(calls, layers, strict=True)] == [True] * 2
    assert [call["k_weight"] is layer.k_norm.weight for call, layer in zip(calls, layers, strict=True)] == [True] * 2
    layers[0].k_norm.register_forward_hook(lambda *_: seen.append("k"))
    calls.clear()
    assert_alike(step(model, **batch()), expected)
    assert len(seen) == 1 and len(calls) == 1
    applied.undo()
    assert_alike(step(model, **batch()), expected)
    assert len(calls) == 1


def test_a_model_whose_norms_stay_has_attention_without_them():
    applied = huggingface.apply(made("Qwen3"), norm=False)
    assert {row.by for row in applied.replaced if row.part == "qkv" and "self_attn" in row.name} == {"linear"}


def test_attention_dropout_that_comes_later_is_seen():
    model, before, _ = both("Llama")
    for each in (model, before):
        for layer in each.model.layers:
            layer.self_attn.attention_dropout = 0.5
        torch.manual_seed(2)
    first, second = (model(**batch()).loss for _ in range(2))
    assert first != second


@pytest.mark.parametrize("by", ("eager", "sdpa"))
def test_attention_dropout_is_kept_by_whatever_name(by):
    """StarCoder's modules call it attn_dropout."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    config = transformers.GPTBigCodeConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=by).train()
    huggingface.apply(model)
    tokens, mask = torch.randint(2, 64, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    mask[1, :5] = 0
    for given in ({}, {"attention_mask": mask}):
        with torch.no_grad():
            first, second = (model(tokens, use_cache=False, **given).logits for _ in range(2))
        assert not first.equal(second)


def test_threads_do_not_meet():
    model, before, _ = both("Qwen3")
    for each in (model, before):
        each.eval()
    ids = [torch.randint(3, VOCABULARY, (2, 9)) for _ in range(12)]

    def logits_of(x):
        with onepass.use_backend("torch"), torch.no_grad():  # the fixture's block is the main thread's
            return model(input_ids=x).logits

    with torch.no_grad(), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(logits_of, ids))
        for logits, x in zip(found, ids, strict=True):
            torch.testing.assert_close(logits, before(input_ids=x).logits)


def test_a_copy_has_its_own_weights():
    model, before, _ = both()
    expected = step(before, **batch())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        assert_alike(step(copied, **batch()), expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)


def test_training_goes_on_by_the_same_optimizer():
    model, before = made(), None
    before = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, before)]
    applied = huggingface.apply(model)
    for at in range(6):
        losses = []
        for each, optimizer in zip((model, before), optimizers, strict=True):
            losses.append(step(each, **batch())[0])
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
        if at == 3:
            applied.undo()


def test_saved_as_before(tmp_path):
    model, before, _ = both()
    for name, each in (("onepass", model), ("before", before)):
        each.save_pretrained(tmp_path / name)
    files = [sorted((path.name, path.stat().st_size) for path in (tmp_path / name).iterdir()) for name in ("onepass", "before")]
    assert files[0] == files[1]
    again = type(model).from_pretrained(tmp_path / "onepass").train()
    assert_alike(step(again, **batch()), step(before, **batch()), 0)


def own_storage(tensor):
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_state_dict_shares_no_storage_and_is_the_weights():
    """Who saves tensors, as accelerate and safetensors do, drops all but one of those in one storage."""
    model, _, applied = both()
    state = model.state_dict()
    assert not own_storage(model.model.layers[0].self_attn.k_proj.weight)
    assert all(map(own_storage, state.values()))
    with torch.no_grad():
        state["model.layers.0.self_attn.k_proj.weight"].fill_(3)
    assert (model.model.layers[0].self_attn.k_proj.weight == 3).all()
    applied.undo()
    assert all(own_storage(p) for p in model.parameters())


def test_accelerate_saves_all(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, before, _ = both()
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process
    other = made()
    accelerate.load_checkpoint_in_model(other, tmp_path)
    assert_alike(step(other, **batch()), step(before, **batch()), 0)


def test_weights_that_are_replaced_are_seen():
    model, _, _ = both()
    other = made()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.7)
    model.load_state_dict(other.state_dict(), assign=True)
    model.tie_weights()
    assert_alike(step(model, **batch()), step(other, **batch()))


def test_weights_that_are_moved_lie_together_again():
    model, before, _ = both()
    model.double().float()
    attention = model.model.layers[0].self_attn

    def together():
        return are_packed([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])

    assert not together()
    assert_alike(step(model.double(), **batch()), step(before, **batch()))
    assert together()


@pytest.mark.parametrize("family", ("Llama", "Gemma3Text"))
def test_weights_that_lie_apart_are_not_copied(family):
    model, before, _ = both(family)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.clone()
    assert_alike(step(model, **batch()), step(before, **batch()))
    with saved_tensors() as saved:
        model(**batch())
    attention = model.model.layers[0].self_attn
    rows = sum(getattr(attention, name).out_features for name in ("q_proj", "k_proj", "v_proj"))
    assert not [t for t in saved if t.shape == (rows, attention.q_proj.in_features)]


def test_bits_may_differ_where_pytorch_lets_them(monkeypatch):
    import onepass.integrations.huggingface.attentions as module

    asked = []
    stock = module.attention
    monkeypatch.setattr(module, "attention", lambda *args, **options: asked.append(options) or stock(*args, **options))
    model = made()
    huggingface.apply(model)
    step(model, **batch())
    assert asked and not any(options["deterministic"] for options in asked)


def test_a_products_parts_give_their_gradients_back_at_once():
    model = made("OPT")
    huggingface.apply(model)
    loss = model(**batch()).loss
    with torch.profiler.profile() as profile:
        loss.backward()
    called = [event.name for event in profile.events()]
    assert not [name for name in called if "SliceBackward" in name]  # a tensor as wide as the product for each part
    assert sum("_PartsBackward" in name and "evaluate_function" in name for name in called) == 2  # layers


def test_undo_where_an_equal_method_has_been_put_back():
    """As accelerate does when it unwraps a model."""
    model, _, applied = both()
    model.forward = model.forward.__func__.__get__(model)
    applied.undo()


def test_frozen_weights_get_no_gradient():
    model, before, _ = both()
    for each in (model, before):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("k_proj" in name or "input_layernorm" in name)
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_less_is_kept_for_backward():
    model, before, _ = both(num_hidden_layers=4, tie_word_embeddings=False)
    given = batch(tokens=48) | {"use_cache": False}
    kept = [kept_by(each, given) for each in (model, before)]
    assert kept[0] < 0.6 * kept[1], kept


def test_apply_leaves_random_numbers_and_defaults_alone():
    model = made()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    huggingface.apply(model)
    assert torch.rand(3).equal(expected)
    assert not torch.overrides._get_current_function_mode_stack()  # a default device is one


# ---- bad input ----


def test_nothing_to_replace():
    with pytest.raises(ValueError, match="nothing to replace in this Sequential"):
        huggingface.apply(nn.Sequential(nn.Conv2d(3, 3, 3)))
    with pytest.raises(TypeError, match="model must be a module, but is str"):
        huggingface.apply("gpt2")


def test_twice():
    model, _, applied = both()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="applied to this LlamaForCausalLM already"):
        huggingface.apply(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    applied.undo()


def test_undo_of_what_somebody_has_changed_since():
    model, before, applied = both()
    inner = model.model.layers[0].mlp
    mine = inner.forward
    inner.forward = lambda x: mine(x)
    with pytest.raises(RuntimeError, match=r"changed after onepass was applied: LlamaMLP\.forward"):
        applied.undo()
    assert_alike(step(model, **batch()), step(before, **batch()))  # all is there still
    inner.forward = mine
    applied.undo()


def test_data_parallel_is_refused():
    model, _, applied = both()
    with pytest.raises(RuntimeError, match=r"can't be replicated by torch\.nn\.DataParallel"):
        model._replicate_for_data_parallel()  # as it does on several GPUs
    applied.undo()
    assert model._replicate_for_data_parallel() is not model


def test_a_failure_leaves_the_model_alone(monkeypatch):
    model = made()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    monkeypatch.setattr("onepass.integrations.huggingface.applied.replace_layers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        huggingface.apply(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
