"""Each mutant is a small, plausible slip in what takes the places of torchtitan's modules, and a test there must fail on it.

What several ranks do is not among them: their processes import the package itself.
"""

import importlib
import sys
from functools import partial

import pytest

pytest.importorskip("triton")
pytest.importorskip("torchtitan", reason="needs torchtitan")
from integrations import test_torchtitan as titan
from integrations.test_torchtitan import _by_pytorch, _one_rank  # noqa: F401

from onepass.integrations import torchtitan as onepass_titan
from onepass.integrations import torchtitan_attention, torchtitan_configs, torchtitan_experts, torchtitan_loss
from onepass.testing.mutants import copy_package, mutate

pytestmark = pytest.mark.filterwarnings("default")  # torchtitan's and its dependencies' own
FOLDER, PATCH = object(), object()  # in the places of tmp_path and monkeypatch
MODULES = onepass_titan, torchtitan_attention, torchtitan_configs, torchtitan_experts, torchtitan_loss


def steps(*names, kind="sdpa"):
    return titan.test_three_steps, names, kind, FOLDER


def refused(name, at):
    """The test of a config that a factory refuses: of those of its name, counted from 0."""
    return titan.test_configs_that_are_refused, *[row for row in titan.REFUSED if row[0] == name][at]


QWEN3 = titan.test_other_models, "qwen3", ("feed_forward", "gqa", "loss"), FOLDER
APART, BLOCK = (titan.test_projections_apart, titan.PACKED, "sdpa", FOLDER), steps("block", "loss")
EIGHT = titan.test_precision, "block", PATCH
WITHIN = titan.test_a_norm_within_one_product, True, PATCH
COMPLEX = titan.test_rope, "complex_rope", titan.rope.ComplexRoPE, None
HALVES = titan.test_rope, "cos_sin_rope", titan.rope.CosSinRoPE, None
SORTED, BY_RANK = (
    (titan.test_experts, titan.moe.GroupedExperts, each)
    for each in (titan.token_dispatcher.AllToAllTokenDispatcher, titan.ByRank)
)
BIASED = titan.test_experts, titan.GptOssGroupedExperts, titan.token_dispatcher.AllToAllTokenDispatcher
BIASED_ROWS, MAIN_GRAD = (
    (titan.test_experts, titan.GptOssGroupedExperts, titan.ByRank),
    (titan.test_experts_with_main_grad, *SORTED[1:]),
)
CALLS, VALIDATION = (titan.test_calls_that_are_refused,), (titan.test_a_loss_without_gradients, FOLDER)

FLEX = titan.test_flex_attention_stays, "block", FOLDER

MUTANTS = {  # name: function, what is there, what stands there instead, the test that must fail
    "an epsilon of its own": ("Norm.forward", "self.eps", "1e-2", steps("norm")),
    "a norm without its weight": ("Norm.forward", "self.weight", "None", steps("norm")),
    "w1 and w3 exchanged": ("GatedFeedForward.forward", "norm, self.w1, self.w3)", "norm, self.w3, self.w1)", steps("feed_forward")),
    "layers that are not plain in one product": ("_parameters", "type(layer) not in (Linear, FP8Linear) for", "False for", (titan.test_a_layer_that_is_not_plain, PATCH)),
    "two products for one": ("_side_by_side", "if weights and", "if not weights and", (titan.test_plain_layers_are_one_product, False, PATCH)),
    "biases left out": ("_side_by_side", "projections(x, weights, biases, precision)\n    parts", "projections(x, weights, [], precision)\n    parts", (titan.test_plain_layers_are_one_product, True, PATCH)),
    "stock's product after the activation": ("feed_forward", "derive(config.w2, ActivationLinear.Config, precision=precision)", "config.w2", steps("feed_forward")),
    "a bias that is dropped": ("feed_forward", " or config.w2.bias", "", refused("feed_forward", 1)),
    "another product after the activation": ("feed_forward", "type(config.w2) is not Linear.Config", "False", refused("feed_forward", 2)),
    "a projection's parts in another order": ("PackedAttention.forward", '"wq", "wk", "wv"', '"wq", "wv", "wk"', APART),
    "by group whatever the projection": ("PackedAttention.__init__", "isinstance(self.qkv_linear, FusedQKVLinear)", "True", APART),
    "a scale of its own": ("PackedAttention.forward", '"scale": self.scaling', '"scale": 0.3', steps("gqa")),
    "heads not normalised": ("PackedAttention.forward", "self.q_norm is not None and self.k_norm is not None", "False", QWEN3),
    "q normalised as k": ("PackedAttention.forward", "_shared(self.q_norm.weight)", "_shared(self.k_norm.weight)", QWEN3),
    "heads' norms with another epsilon": ("PackedAttention.forward", '"eps": self.q_norm.eps', '"eps": 1e-2', QWEN3),
    "whole sequences where documents are": ("PackedAttention.forward", "isinstance(self.inner_attention, DocumentAttention)", "False", steps("gqa", kind="varlen")),
    "rows' positions in another order": ("PackedAttention.forward", "table.expand(local.shape[0], -1, -1)", "table.expand(local.shape[0], -1, -1).flip(0)", steps("gqa", kind="varlen")),
    "masks ignored": ("PackedAttention.forward", "elif attention_masks is not None:", "elif attention_masks is None and False:", CALLS),
    "positions ignored": ("PackedAttention._tables", "if positions is None", "if True", (titan.test_positions, titan.rope.ComplexRoPE, (2, 4))),
    "positions of the first row for all": ("PackedAttention._tables", "positions.shape[0] == 1", "True", (titan.test_positions, titan.rope.ComplexRoPE, (2, 4))),
    "neighbours whatever the rotation": ("PackedAttention.__init__", "isinstance(self.rope, ComplexRoPE)", "True", (titan.test_positions, titan.rope.CosSinRoPE, None)),
    "context parallelism of documents taken": ("PackedAttention.parallelize", "self.over_ranks and isinstance", "False and isinstance", (titan.test_documents_refuse_context_parallelism, FOLDER)),
    "heads turned with others' tables": ("PackedAttention._by_inner", "rope(q, k, *tables,", "rope(q, k, *reversed(tables),", FLEX),
    "heads without their norms": ("PackedAttention._by_inner", "rms_norm(x, _shared(norm.weight), norm.eps)", "x", FLEX),
    "queries for keys": ("PackedAttention._by_inner", "split((shared, 1, 1), 3)", "split((1, shared, 1), 3)", FLEX),
    "FlexAttention never called": ("PackedAttention._is_inner", "or isinstance(self.inner_attention, FlexAttention)", "", FLEX),
    "a projection that gathers": ("gqa", '"qkv_linear": (', '"wo": (', refused("gqa", 0)),
    "another rotation": ("gqa", '"rope": (', '"cache": (', refused("gqa", 1)),
    "another norm of heads": ("gqa", "if found not in kinds", "if found in kinds", refused("gqa", 2)),
    "a norm's epsilon left out": ("_norm_side_by_side", "NormOptions(False, norm.eps, False)", "NormOptions(False, 1e-6, False)", WITHIN),
    "a residual left out of products": ("_norm_side_by_side", "norm_projections(x, residual,", "norm_projections(x, None,", WITHIN),
    "LayerNorm for RMSNorm": ("_norm_side_by_side", "NormOptions(False, norm", "NormOptions(True, norm", WITHIN),
    "no product of two that keeps its norm's input": ("_norm_side_by_side", "if weights and", "if not weights and", WITHIN),
    "one product's norm with another epsilon": ("_norm_side_by_side", '"eps": norm.eps', '"eps": 1e-2', BLOCK),
    "a norm left out where layers stay apart": ("_norm_side_by_side", "norm(h), *layers", "h, *layers", BLOCK),
    "the sum before the norm left out of the result": ("GatedFeedForward.forward", "else h + self", "else x + self", BLOCK),
    "the attention's norm for the MLP's": ("_FoldedNorms.forward", "norm=self.ffn_norm, residual=x", "norm=self.attention_norm, residual=x", BLOCK),
    "no residual of attention": ("_FoldedNorms.forward", ", residual=x", "", BLOCK),
    "experts of what is not normalised": ("_FoldedNorms.forward", "self.moe(self.ffn_norm(h))", "self.moe(h)", (titan.test_moe_blocks, FOLDER)),
    "experts without attention": ("_FoldedNorms.forward", "h = attended + x", "h = x", (titan.test_moe_blocks, FOLDER)),
    "blocks whose norms are others": ("block", '("attention_norm", "ffn_norm")', '("attention_norm",)', refused("block", 1)),
    "blocks that are others": ("block", 'check("block", config, *_BLOCKS)', "pass", refused("block", 0)),
    "products in sixteen bits": ("_with_precision", "precision=precision)", "precision=None)", EIGHT),
    "a product down in sixteen bits": ("ActivationLinear.forward", "(packed, self.weight, precision=self.precision)", "(packed, self.weight)", EIGHT),
    "a norm's product in sixteen bits": ("_norm_side_by_side", '"precision": precision', '"precision": None', EIGHT),
    "attention's products in sixteen bits": ("gqa", "_with_precision(layer, precision) for", "layer for", EIGHT),
    "attention's last product in sixteen bits": ("gqa", "_with_precision(config.wo, precision)", "config.wo", EIGHT),
    "other layers in eight bits": ("_check_plain", "type(found) is not Linear.Config", "False", (titan.test_layers_that_have_no_precision, "gqa")),
    "halves for neighbours": ("InterleavedRoPE.apply_rotary_emb", "interleaved=True", "interleaved=False", COMPLEX),
    "sines for cosines": ("_complex_tables", ".unbind(-1)", ".flip(-1).unbind(-1)", COMPLEX),
    "cosines twice": ("_cos_sin_tables", "[::2]", "[:2]", HALVES),
    "neighbours for halves": ("HalvesRoPE.apply_rotary_emb", "rope_cache.squeeze(2)))", "rope_cache.squeeze(2)), interleaved=True)", HALVES),
    "a window one too short": ("DocumentAttention.__init__", "before + 1", "before", (titan.test_windows, (3, 0))),
    "a window of one's own key is none": ("DocumentAttention.__init__", "keys < 0", "keys <= 0", (titan.test_windows, (0, 0))),
    "keys before for keys after": ("DocumentAttention.__init__", "(before, after)", "(after, before)", (titan.test_windows, (2, 1))),
    "causal whatever the window": ("DocumentAttention.__init__", "after == 0", "True", (titan.test_windows, (-1, -1))),
    "documents that see each other": ("DocumentAttention.sees", ', "cu_seqlens": attention_masks.cu_seq_q', "", (titan.test_windows, (-1, 0))),
    "scores of documents not scaled": ("DocumentAttention.forward", "scale=scale", "scale=None", (titan.test_windows, (-1, 0))),
    "masks of another kind": ("DocumentAttention.sees", "if not isinstance(attention_masks, VarlenMetadata)", "if False", CALLS),
    "keys and values exchanged": ("_attend", "torch.cat([q, k, v], 2)", "torch.cat([q, v, k], 2)", (titan.test_windows, (-1, 0))),
    "options ignored": ("_attend", "if others:", "if not others:", CALLS),
    "context parallelism ignored": ("_attend", "q.shape[1] != k.shape[1]", "False", CALLS),
    "values of another size": ("_attend", "q.shape[-1] != v.shape[-1]", "False", CALLS),
    "masks by functions taken": ("_inner", "and not flex_as_documents", "and flex_as_documents", refused("attention", 0)),
    "whole sequences as documents": ("_inner", "type(config) is ScaledDotProductAttention.Config", "False", (titan.test_sdpa_stays,)),
    "ignored labels count": ("_head", "IGNORE_INDEX", "-1", steps("loss")),
    "a mean for a sum": ("_head", '"sum"', '"mean"', steps("loss")),
    "no logits without labels": ("_head", "labels is None", "labels is not None", VALIDATION),
    "not divided by the tokens": ("LinearCrossEntropyLoss.__call__", "loss if global_valid_tokens is None else loss / global_valid_tokens", "loss", VALIDATION),
    "a head that is no Linear": ("LinearCrossEntropyLoss.set_lm_head", "type(lm_head).forward is not nn.Linear.forward", "False", CALLS),
    "another loss within the chunks": ("loss", 'check("loss, within ChunkedLossWrapper,", config.loss_fn, CrossEntropyLoss.Config)', "pass", refused("loss", 1)),
    "rows' ends off by one": ("_multiply", "counts.cumsum(0, dtype=torch.int32)", "counts.cumsum(0, dtype=torch.int32) - 1", BY_RANK),
    "scores left out": ("_multiply", "ends, options, by_row, how", "ends, options, None, how", SORTED),
    "a bias of results that has no score": ("_multiply", "of_down[1], ends, by_row,", "of_down[1], ends, None,", BIASED),
    "no bias of up": ("_multiply", "add_expert_bias(h, of_up[1],", "add_expert_bias(h, None,", BIASED_ROWS),
    "gates and values exchanged": ("GatedExperts.forward", '"w1_EFD", "w3_EFD"', '"w3_EFD", "w1_EFD"', SORTED),
    "neighbouring gates as halves": ("BiasedExperts.forward", "interleaved=True", "interleaved=False", BIASED),
    "no clamp": ("BiasedExperts.forward", "self.swiglu_limit, 1.0", "None, 1.0", BIASED),
    "no offset": ("BiasedExperts.forward", "self.swiglu_limit, 1.0", "self.swiglu_limit, None", BIASED),
    "copies of weights": ("_local", "else each for", "else each.clone() for", MAIN_GRAD),
    "dispatchers of ranks passed over": ("SortedExperts.forward", "if by_rank or", "if not by_rank or", BY_RANK),
    "other experts": ("experts", "check(\"experts, of its inner_experts,\", inner, *OF_EXPERTS)", "inner = type(inner).__mro__[1](dim=64, hidden_dim=48, num_experts=5)", refused("experts", 0)),
    "blocks whose experts stay": ("block", "config.moe is not None", "False", (titan.test_moe_blocks, FOLDER)),
    "another loss": ("loss", "ChunkedLossWrapper.Config, CrossEntropyLoss.Config)", "*[type(config)])", refused("loss", 0)),
    "subclasses taken": ("check", "type(config) not in known", "not isinstance(config, known)", refused("norm", 0)),
    "full_dtensor taken": ("check", 'get_spmd_backend() == "full_dtensor"', "False", (titan.test_full_dtensor_is_refused, "norm", FOLDER)),
}  # fmt: skip


@pytest.fixture
def load(monkeypatch):
    """Imports a copy by a function. Its factories are torchtitan's, in the place of the package's."""
    monkeypatch.setenv("ONEPASS_BACKEND", "torch")  # a mutant has a use_backend of its own
    monkeypatch.setattr(titan.override_registry(), "_REGISTRY", {})

    def loaded(make, *given):
        module = make(*given)
        monkeypatch.setitem(sys.modules, titan.OURS, module)
        monkeypatch.setattr(titan, "onepass_titan", module)

    yield loaded
    importlib.import_module("onepass.integrations").torchtitan = onepass_titan


def judge(call, folder, patch):
    test, *given = call
    test(*(folder if each is FOLDER else patch if each is PATCH else each for each in given))


def test_the_module_passes(load, tmp_path, monkeypatch):
    load(copy_package, onepass_titan)
    for call in {repr(call): call for *_, call in MUTANTS.values()}.values():
        judge(call, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, load, tmp_path, monkeypatch):
    function, old, new, call = MUTANTS[name]
    module = next(each for each in MODULES if getattr(vars(each).get(function.split(".")[0]), "__module__", "") == each.__name__)
    load(partial(mutate, entry=onepass_titan), module, function, old, new)
    with pytest.raises((Exception, pytest.fail.Exception)):
        judge(call, tmp_path, monkeypatch)
