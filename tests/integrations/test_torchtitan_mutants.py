"""Each mutant is a small, plausible slip in what takes the places of torchtitan's modules, and a test there must fail on it.

What several ranks do is not among them: their processes import the package itself.
"""

import importlib
import sys

import pytest

pytest.importorskip("triton")
pytest.importorskip("torchtitan", reason="needs torchtitan")
from integrations import test_torchtitan as titan
from integrations.test_torchtitan import _by_pytorch, _one_rank  # noqa: F401

from onepass.integrations import torchtitan as onepass_titan
from onepass.testing.mutants import copy_package, mutate

pytestmark = pytest.mark.filterwarnings("default")  # torchtitan's and its dependencies' own
FOLDER = object()  # in the place of tmp_path


def steps(*names, kind="sdpa"):
    return titan.test_three_steps, names, kind, FOLDER


def refused(name, at):
    """The test of a config that a factory refuses: of those of its name, counted from 0."""
    return titan.test_configs_that_are_refused, *[row for row in titan.REFUSED if row[0] == name][at]


COMPLEX = titan.test_rope, "complex_rope", titan.rope.ComplexRoPE, None
HALVES = titan.test_rope, "cos_sin_rope", titan.rope.CosSinRoPE, None
CALLS, VALIDATION = (titan.test_calls_that_are_refused,), (titan.test_a_loss_without_gradients, FOLDER)

MUTANTS = {  # name: function, what is there, what stands there instead, the test that must fail
    "an epsilon of its own": ("Norm.forward", "self.eps", "1e-2", steps("norm")),
    "a norm without its weight": ("Norm.forward", "self.weight", "None", steps("norm")),
    "gates and values packed the other way round": ("ActivationLinear.forward", "activation_linear(torch.cat([gate, up], -1), self.weight)", "activation_linear(torch.cat([up, gate], -1), self.weight)", steps("feed_forward")),
    "w1 and w3 exchanged": ("GatedFeedForward.forward", "self.w1(x), self.w3(x)", "self.w3(x), self.w1(x)", steps("feed_forward")),
    "stock's product after the activation": ("feed_forward", ", w2=derive(config.w2, ActivationLinear.Config)", "", steps("feed_forward")),
    "a bias that is dropped": ("feed_forward", " or config.w2.bias", "", refused("feed_forward", 1)),
    "another product after the activation": ("feed_forward", "type(config.w2) is not Linear.Config", "False", refused("feed_forward", 2)),
    "halves for neighbours": ("InterleavedRoPE.apply_rotary_emb", "interleaved=True", "interleaved=False", COMPLEX),
    "sines for cosines": ("InterleavedRoPE.apply_rotary_emb", "cos, sin =", "sin, cos =", COMPLEX),
    "cosines twice": ("HalvesRoPE.apply_rotary_emb", "cos, _, sin, _", "cos, sin, _, _", HALVES),
    "neighbours for halves": ("HalvesRoPE.apply_rotary_emb", "key, cos, sin)", "key, cos, sin, interleaved=True)", HALVES),
    "a window one too short": ("DocumentAttention.__init__", "before + 1", "before", (titan.test_windows, (3, 0))),
    "a window of one's own key is none": ("DocumentAttention.__init__", "keys < 0", "keys <= 0", (titan.test_windows, (0, 0))),
    "keys before for keys after": ("DocumentAttention.__init__", "(before, after)", "(after, before)", (titan.test_windows, (2, 1))),
    "causal whatever the window": ("DocumentAttention.__init__", "after == 0", "True", (titan.test_windows, (-1, -1))),
    "documents that see each other": ("DocumentAttention.forward", "cu_seqlens=documents, ", "", (titan.test_windows, (-1, 0))),
    "scores of documents not scaled": ("DocumentAttention.forward", "scale=scale", "scale=None", (titan.test_windows, (-1, 0))),
    "masks of another kind": ("DocumentAttention.forward", "if not isinstance(attention_masks, VarlenMetadata)", "if False", CALLS),
    "keys and values exchanged": ("_attend", "torch.cat([q, k, v], 2)", "torch.cat([q, v, k], 2)", (titan.test_windows, (-1, 0))),
    "options ignored": ("_attend", "if others:", "if not others:", CALLS),
    "context parallelism ignored": ("_attend", "q.shape[1] != k.shape[1]", "False", CALLS),
    "values of another size": ("_attend", "q.shape[-1] != v.shape[-1]", "False", CALLS),
    "masks by functions taken": ("attention", "and not flex_as_documents", "and flex_as_documents", refused("attention", 0)),
    "whole sequences as documents": ("attention", "type(config) is ScaledDotProductAttention.Config", "False", (titan.test_sdpa_stays,)),
    "ignored labels count": ("_head", "IGNORE_INDEX", "-1", steps("loss")),
    "a mean for a sum": ("_head", '"sum"', '"mean"', steps("loss")),
    "no logits without labels": ("_head", "labels is None", "labels is not None", VALIDATION),
    "not divided by the tokens": ("LinearCrossEntropyLoss.__call__", "loss if global_valid_tokens is None else loss / global_valid_tokens", "loss", VALIDATION),
    "a head that is no Linear": ("LinearCrossEntropyLoss.set_lm_head", "type(lm_head).forward is not nn.Linear.forward", "False", CALLS),
    "another loss within the chunks": ("loss", '_check("loss, within ChunkedLossWrapper,", config.loss_fn, CrossEntropyLoss.Config)', "pass", refused("loss", 1)),
    "another loss": ("loss", "ChunkedLossWrapper.Config, CrossEntropyLoss.Config)", "*[type(config)])", refused("loss", 0)),
    "subclasses taken": ("_check", "type(config) not in known", "not isinstance(config, known)", refused("norm", 0)),
    "full_dtensor taken": ("_check", 'get_spmd_backend() == "full_dtensor"', "False", (titan.test_full_dtensor_is_refused, "norm", FOLDER)),
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


def judge(call, folder):
    test, *given = call
    test(*(folder if each is FOLDER else each for each in given))


def test_the_module_passes(load, tmp_path):
    load(copy_package, onepass_titan)
    for call in {repr(call): call for *_, call in MUTANTS.values()}.values():
        judge(call, tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(name, load, tmp_path):
    function, old, new, call = MUTANTS[name]
    load(mutate, onepass_titan, function, old, new)
    with pytest.raises((Exception, pytest.fail.Exception)):
        judge(call, tmp_path)
