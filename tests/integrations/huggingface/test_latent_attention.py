"""Multi-head latent attention that `apply` makes one op, and what leaves it to the model's own code."""

import copy
from functools import cache

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import assert_alike, assert_documents_are_apart, batch, both, made, mutant_tests, step
from torch import nn

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import latent_trials, rotation
from onepass.integrations.huggingface.latent_trials import FusedLatent

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning", "ignore:.*RoPE scaling factor")
SCALED = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0, "rope_theta": 1e4,
}  # fmt: skip
KINDS = {  # a family, its options, the pairs that are rotated and their tables, the norms
    "v3": ("DeepseekV3", {"v_head_dim": 16}, (True, "halves"), ("q_a_layernorm", "kv_a_layernorm")),
    "v3 of halves": (
        "DeepseekV3",
        {"rope_interleave": False, "rope_parameters": SCALED},
        (False, "halves"),
        ("q_a_layernorm", "kv_a_layernorm"),
    ),
    "v3 lite": ("DeepseekV3", {"q_lora_rank": None}, (True, "halves"), ("kv_a_layernorm",)),
    "v2": ("DeepseekV2", {}, (True, "complex"), ("q_a_layernorm", "kv_a_layernorm")),
    "v2 lite": ("DeepseekV2", {"q_lora_rank": None}, (True, "complex"), ("kv_a_layernorm",)),
    "minicpm": ("MiniCPM3", {"v_head_dim": 12}, (False, "halves"), ("q_a_layernorm", "kv_a_layernorm")),
    "glm": ("Glm4MoeLite", {"attention_bias": True}, (True, "halves"), ("q_a_layernorm", "kv_a_layernorm")),
}
PACKED = {"position_ids": torch.tensor([[*range(5), *range(7)], [*range(12)]]), "use_cache": False}


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


@pytest.fixture
def calls(monkeypatch):
    """Options of the calls of `onepass.latent_attention`."""
    found, stock = [], latent_trials.latent_attention
    monkeypatch.setattr(latent_trials, "latent_attention", lambda *a, **k: found.append(k) or stock(*a, **k))
    return found


def of_kind(kind, **more):
    family, options, *_ = KINDS[kind]
    return made(family, **options | more)


@cache
def usual(kind):
    """Return a model of a kind, batches, and the steps that it makes of them."""
    model, batches = of_kind(kind), (batch(), batch(masked=True), batch() | PACKED)
    steps = [step(model, **given) for given in batches]
    model.zero_grad()
    return model, batches, steps


def assert_kind(kind, apply=huggingface.apply):
    _, _, how, norms = KINDS[kind]
    before, batches, steps = usual(kind)
    model = copy.deepcopy(before)
    apply(model)
    for layer in model.model.layers:
        whole = layer.self_attn._onepass.whole
        assert type(whole).__name__ == "FusedLatent" and whole.norms == norms
        assert (whole.rotation.interleaved, whole.rotation.layout) == how
    for given, expected in zip(batches, steps, strict=True):
        assert_alike(step(model, **given), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_a_kind(kind, calls):
    assert_kind(kind)
    documents = [options["cu_seqlens"] is not None for options in calls]
    assert documents == [False] * 2 + [True] * 4  # of a padded batch and packed rows boundaries stand for masks


@pytest.mark.parametrize("family", ("DeepseekV3", "DeepseekV2", "MiniCPM3"))
def test_documents_are_apart(family):
    assert_documents_are_apart(family, (7, 5, 1, 11), 1e-4)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing_and_main_grad(reentrant, calls):
    model, before, applied = both("DeepseekV3", main_grad=True)
    for each in (model, before):
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    expected = step(before, **batch())
    loss = model(**batch()).loss
    loss.backward()
    applied.main_grads.finish()
    assert len(calls) == 4
    assert_alike((loss.detach(), {name: p.main_grad for name, p in model.named_parameters() if name in expected[1]}), expected)


def test_compiled_as_one_graph():
    torch.compiler.reset()
    model, before, _ = both("Youtu")
    given = batch() | {"use_cache": False}
    assert_alike(step(torch.compile(model, fullgraph=True, backend="aot_eager"), **given), step(before, **given))


def test_generation_runs_the_models_own_code(calls):
    model, before, applied = both("DeepseekV3")
    ids = batch()["input_ids"]
    one, other = (each.eval().generate(ids, max_new_tokens=6, do_sample=False) for each in (model, before))
    assert one.equal(other) and not calls
    applied.undo()
    assert_alike(step(model, **batch()), step(before, **batch()), 1e-6)


@pytest.mark.parametrize("how", ("hooked norm", "another norm", "hooked up-projection", "dropout", "a mask", "other ranks"))
def test_what_was_changed_since_runs_its_own_code(how, calls):
    model, before, _ = both("DeepseekV3")
    given = batch()
    for each in (model, before):
        attention = each.model.layers[0].self_attn
        if how == "hooked norm":
            attention.kv_a_layernorm.register_forward_hook(lambda _, args, y: 2 * y)
        elif how == "another norm":
            attention.q_a_layernorm = nn.Identity()
        elif how == "hooked up-projection":
            attention.kv_b_proj.register_forward_hook(lambda _, args, y: 2 * y)
        elif how == "other ranks":
            attention.scaling = 2 * attention.scaling
        elif how == "a mask":
            given = batch() | {"attention_mask": torch.ones(2, 1, 12, 12).tril(-0).log()}
    if how == "dropout":
        model.model.layers[0].self_attn.attention_dropout = 0.5
        step(model, **given)
    else:
        assert_alike(step(model, **given), step(before, **given))
    assert len(calls) == (0 if how == "a mask" else 1)


def test_the_report_names_what_runs():
    _, _, applied = both("DeepseekV3")
    rows = {row.by for row in applied.rows if row.part == "qkv"}
    assert "latent_attention, norm_linear after q_a_layernorm and kv_a_layernorm" in rows
    assert "documents for packed and padded masks" in rows and not [row for row in applied.rows if row.why]


def test_without_norms_or_rope_it_is_not_one_op():
    for options in ({"norm": False}, {"rope": False}):
        model = made("DeepseekV3")
        before = copy.deepcopy(model)
        huggingface.apply(model, **options)
        assert model.model.layers[0].self_attn._onepass.whole is None
        assert_alike(step(model, **batch()), step(before, **batch()))


def test_lora_around_all_projections(calls):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    model = peft.get_peft_model(made("DeepseekV3"), peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    before = copy.deepcopy(model)
    huggingface.apply(model)
    found, expected = step(model, **batch()), step(before, **batch())
    assert len(calls) == 2
    assert_alike(found, expected)


def test_a_scale_of_each_position_is_not_one_op():
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(**made("DeepseekV3").config.to_dict())
    module = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention

    class ScaledAttention(module):
        def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
            cos, sin = position_embeddings
            return super().forward(hidden_states, (1.5 * cos, sin), attention_mask, **kwargs)

    model = transformers.AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        layer.self_attn.__class__ = ScaledAttention
    before = copy.deepcopy(model)
    huggingface.apply(model)
    assert all(layer.self_attn._onepass.whole is None for layer in model.model.layers if hasattr(layer.self_attn, "_onepass"))
    assert_alike(step(model, **batch()), step(before, **batch()))


def test_matches_are_copied_and_pickled():
    model, *_ = both("DeepseekV3")
    other = copy.deepcopy(model)
    whole = other.model.layers[0].self_attn._onepass.whole
    assert isinstance(whole, FusedLatent) and whole.keys.linears[0] is other.model.layers[0].self_attn.kv_b_proj
    assert_alike(step(other, **batch()), step(model, **batch()), 1e-6)


def all_kinds_are_right(applied):
    for kind in KINDS:
        assert_kind(kind, applied.apply)


MUTANTS = {
    "the first norm for both": (latent_trials, "FusedLatent.attend", "self.norms[-1]", "self.norms[0]"),
    "the scale not told": (latent_trials, "FusedLatent.attend", "scale=self.scale", "scale=None"),
    "documents not told": (latent_trials, "FusedLatent.attend", "cu_seqlens=documents,", "cu_seqlens=None,"),
    "pairs of halves": (latent_trials, "FusedLatent.attend", "self.rotation.interleaved", "False"),
    "any rotation": (latent_trials, "_is_all", "not all(close_by_rows(each, expected) for each in results)", "False"),
    "sines for cosines": (rotation, "Rotation.tables", "given.real, given.imag", "given.imag, given.real"),
    "norms in the other order": (
        latent_trials,
        "_candidates",
        "permutations(widths), rotations",
        "[tuple(widths)[::-1]], rotations",
    ),
}


test_a_mutant_is_found, test_what_mutants_are_tried_on_is_right = mutant_tests(MUTANTS, all_kinds_are_right)
