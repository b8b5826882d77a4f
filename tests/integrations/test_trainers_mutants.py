"""Each mutant is a small, plausible slip in what takes TRL's and verl's places, and their own tests must fail on it."""

import importlib

import pytest

pytest.importorskip("triton")
from integrations.bindings import bindings_kept

from onepass.integrations import seams
from onepass.integrations import trl as onepass_trl
from onepass.integrations import verl as onepass_verl
from onepass.testing.mutants import copy_package, mutate

pytestmark = pytest.mark.filterwarnings("default")  # the packages' own
FORMULA = ("test_the_function_is_the_formula", "torch", 0.7, 3.0, 0.5, True)
ZERO = "test_weights_of_zero_3_are_trls"

TRL_MUTANTS = {  # name: module, function, what is there, what stands there instead, the test that must fail
    "no temperature": (onepass_trl, "LogProbFunction.apply", "temperature=temperature", "temperature=1.0", FORMULA),
    "no softcap": (onepass_trl, "LogProbFunction.apply", "softcap=final_logit_softcapping", "softcap=None", FORMULA),
    "no bias": (onepass_trl, "LogProbFunction.apply", "bias=bias", "bias=None", FORMULA),
    "no scale": (onepass_trl, "LogProbFunction.apply", "logit_scale=logit_scale", "logit_scale=1.0", FORMULA),
    "statistics in another order": (onepass_trl, "", '"mean_logits": "mean_logit", "is_top1": "correct"', '"is_top1": "correct", "mean_logits": "mean_logit"', FORMULA),
    "a mean for a sum": (onepass_trl, "", '"log_sum_sq_probs": "log_sum_sq_probs"', '"log_sum_sq_probs": "mean_logit"', FORMULA),
    "all statistics whatever is asked": (onepass_trl, "LogProbFunction.apply", " if theirs in outputs", "", ("test_only_what_is_asked_for",)),
    "the weight's type decides": (onepass_trl, "LogProbFunction.apply", "weight.to(hidden.dtype)", "weight.float()", ("test_products_have_hiddens_type",)),
    "under autocast as elsewhere": (onepass_trl, "LogProbFunction.apply", "if not under_autocast(hidden)", "if under_autocast(hidden)", ("test_products_have_hiddens_type",)),
    "fp32_head forgotten": (onepass_trl, "install", "(stock, fp32_head)", "(stock)", ("test_an_fp32_head",)),
    "fp32_head dropped under ZeRO-3": (onepass_trl, "LogProbFunction.apply", "if self.fp32_head:", "if False:", ("test_an_fp32_head",)),
    "1.14's pair is of five": (onepass_trl, "LogProbFunction.__init__", '"outputs" not in', '"outputs" in', ("test_trl_1_14_takes_a_pair",)),
    "1.14's pair the other way round": (onepass_trl, "LogProbFunction.apply", "return stats.log_prob, stats.entropy", "return stats.entropy, stats.log_prob", ("test_trl_1_14_takes_a_pair",)),
    "ZeRO-3 not noticed": (onepass_trl, "is_partitioned", '"ds_id"', '"ds_tensor"', (ZERO, "Many", (("entropy",),))),
    "ZeRO-3: 1.14's function given more": (onepass_trl, "LogProbFunction.apply", "() if self.pair else (outputs,)", "(outputs,)", (ZERO, "Pair", ())),
    "TRL's own bound again": (onepass_trl, "install", "LogProbFunction(stock, fp32_head))", "stock)", ("test_the_report",)),
    "installed twice without a word": (onepass_trl, "install", "isinstance(stock, LogProbFunction)", "stock is None", ("test_install_twice_and_undo_twice",)),
    "other arguments taken": (onepass_trl, "install", "if stock is not None: _check", "if stock is None: _check", ("test_other_arguments",)),
    "a name that moved is made": (onepass_trl, "install", "LogProbFunction(stock, fp32_head))", "LogProbFunction(stock, fp32_head), create=True)", ("test_a_name_that_moved",)),
    "undo forgets that it has undone": (seams, "Seams._restore", "self.bindings.clear()", "pass", ("test_install_twice_and_undo_twice",)),
    "undo goes over what others have bound": (seams, "Seams.undo", "is not binding.now", "is None", ("test_undo_in_another_order",)),
}  # fmt: skip
MODULE = ("test_the_module", "torch", {}, (2, 9))
VERL_MUTANTS = {
    "no temperature": (onepass_verl, "_log_probs_and_entropy", "temperature=temperature", "temperature=1.0", MODULE),
    "entropies first": (onepass_verl, "_log_probs_and_entropy", "stats.log_prob, stats.entropy", "stats.entropy, stats.log_prob", MODULE),
    "the function's temperature": (onepass_verl, "LogProbsAndEntropy.__call__", "*flat, temperature", "*flat, 1.0", ("test_the_function",)),
    "the function's results as labels lie": (onepass_verl, "LogProbsAndEntropy.__call__", "hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1)", "hidden, weight, labels", ("test_the_function",)),
    "a reduction that is ignored": (onepass_verl, "LogProbsAndEntropy.__call__", 'reduction.lower() != "none" or ', "", ("test_what_stays_verls", "mean", None)),
    "several ranks taken": (onepass_verl, "LogProbsAndEntropy.__call__", "size() > 1", "size() > 2", ("test_what_stays_verls", "none", 2)),
    "the module left": (onepass_verl, "install", '"FusedLinearForPPO.forward", fused_linear_for_ppo(fp32_head)', '"FusedLinearForPPO.backward", fused_linear_for_ppo(fp32_head), create=True', ("test_install_and_undo",)),
    "the function left": (onepass_verl, "install", "LogProbsAndEntropy(stock, fp32_head))", "stock)", ("test_install_and_undo",)),
    "the function's fp32_head forgotten": (onepass_verl, "install", "(stock, fp32_head))", "(stock))", ("test_an_fp32_head",)),
    "the module's fp32_head forgotten": (onepass_verl, "install", "ppo(fp32_head)", "ppo()", ("test_an_fp32_head",)),
    "fp32_head dropped where verl's stays": (onepass_verl, "_refuse", "if fp32_head:", "if False:", ("test_an_fp32_head",)),
    "half of it stays where a name moved": (onepass_verl, "install", "seams.all_or_nothing()", "__import__('contextlib').nullcontext()", ("test_a_name_that_moved",)),
    "undo leaves ours": (seams, "Seams._restore", "binding.assign(binding.before)", "binding.assign(binding.now)", ("test_install_and_undo",)),
}  # fmt: skip


CASES = [("trl", name) for name in TRL_MUTANTS] + [("verl", name) for name in VERL_MUTANTS]
MUTANTS = {"trl": TRL_MUTANTS, "verl": VERL_MUTANTS}
ENTRIES = {"trl": onepass_trl, "verl": onepass_verl}


@pytest.fixture
def judge(monkeypatch):
    """Runs a test of a package with another module in the place of onepass's, and binds the package's names again."""
    monkeypatch.setenv("ONEPASS_BACKEND", "torch")  # a mutant has a use_backend of its own

    def run(package, module, call):
        tests = importlib.import_module(f"integrations.test_{package}")  # skips where the package is missing
        classes = [tests.functional.FusedLinearForPPO] if package == "verl" else []
        with bindings_kept(package, *classes), monkeypatch.context() as patch:
            patch.setattr(tests, f"onepass_{package}", module)
            patch.setattr(tests, "SeamError", vars(module)["Seams"].undo.__globals__["SeamError"])
            if package == "trl":
                patch.setattr(tests, "LogProbs", module.LogProbFunction(None))
            test = getattr(tests, call[0])
            given = [getattr(tests, value) if value in ("Pair", "Many") else value for value in call[1:]]
            if "monkeypatch" in test.__code__.co_varnames[: test.__code__.co_argcount]:
                given.append(patch)
            test(*given)

    return run


@pytest.mark.parametrize("package", ENTRIES)
def test_the_module_passes(package, judge):
    copy = copy_package(ENTRIES[package])
    for call in {repr(call): call for *_, call in MUTANTS[package].values()}.values():
        judge(package, copy, call)


@pytest.mark.parametrize(("package", "name"), CASES)
def test_mutants(package, name, judge):
    module, function, old, new, call = MUTANTS[package][name]
    mutant = mutate(module, function, old, new, entry=ENTRIES[package])
    with pytest.raises((Exception, pytest.fail.Exception)):
        judge(package, mutant, call)
