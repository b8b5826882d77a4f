"""verl's fused kernels replaced: the formula, what stays verl's, and install and undo."""

import importlib.util
import inspect
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("verl", reason="needs verl")

import verl.utils.experimental.torch_functional as functional
import verl.utils.kernel.linear_cross_entropy as kernel
from integrations import verl_ranks
from parallel.worlds import found_by

import onepass
from onepass.integrations import verl as onepass_verl
from onepass.integrations.seams import SeamError
from onepass.runtime.batch_invariance import invariant

pytestmark = pytest.mark.filterwarnings("default")  # verl's and Megatron's own


@contextmanager
def installed(**options):
    seams = onepass_verl.install(**options)
    try:
        yield seams
    finally:
        seams.undo()


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def operands(*tokens, dtype=torch.float32):
    hidden, weight = (torch.randn(*size).to(dtype).requires_grad_() for size in ((*tokens, 16), (67, 16)))
    return hidden, weight, torch.randint(67, tokens)


def by_logits(hidden, weight, labels, temperature):
    """In fp64. Return log_probs and entropies, and the gradients of a sum of both."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    log_p = ((hidden @ weight.T) / temperature).log_softmax(-1)
    made = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    return *(t.detach() for t in made), *grads(made, hidden, weight)


def grads(made, hidden, weight):
    return torch.autograd.grad(2 * made[0].sum() + 0.5 * made[1].sum(), (hidden, weight))


def assert_alike(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.detach().double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize("options", [{}, {"impl_backend": "liger"}], ids=str)
@pytest.mark.parametrize("tokens", [(13,), (2, 9)])
def test_the_module(backend, options, tokens):
    """FusedLinearForPPO, of the backends "torch" and "liger"."""
    if backend == "triton":
        pytest.importorskip("triton")
    if options and "impl_backend" not in inspect.signature(functional.FusedLinearForPPO).parameters:
        pytest.skip("this verl has no backend liger")
    hidden, weight, labels = operands(*tokens)
    expected = by_logits(hidden, weight, labels, 0.7)
    with installed(), onepass.use_backend(backend):
        module = functional.FusedLinearForPPO(**options)
        made = module(hidden, weight, labels.int(), temperature=0.7)
        assert made[0].shape == made[1].shape == tokens
        assert_alike((*made, *grads(made, hidden, weight)), expected)
    assert_alike((*module(hidden, weight, labels, temperature=0.7),), expected[:2])  # verl's again


def test_the_module_compiles():
    hidden, weight, labels = operands(13)
    expected = by_logits(hidden, weight, labels, 0.7)
    with installed():
        module = functional.FusedLinearForPPO()
        module.compile(dynamic=True, backend="aot_eager")
        made = module(hidden, weight, labels, temperature=0.7)
        assert_alike((*made, *grads(made, hidden, weight)), expected)


def test_the_function():
    """As the backend "triton" calls it. What it returns is flat."""
    hidden, weight, labels = operands(1, 13)
    log_prob, entropy, dhidden, dweight = by_logits(hidden, weight, labels, 0.7)
    with installed():
        made = kernel.linear_cross_entropy(hidden, weight, labels, 0.7, "none")
        assert_alike((*made, *grads(made, hidden, weight)), (log_prob.flatten(), entropy.flatten(), dhidden, dweight))


class Group:
    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


@pytest.mark.parametrize(("reduction", "ranks"), [("mean", None), ("none", 2)])
def test_what_stays_verls(reduction, ranks):
    """A reduction, and several ranks: there hidden's gradient is a part of a sum that callers make."""
    hidden, weight, labels = operands(13)
    group = None if ranks is None else Group(ranks)
    function = onepass_verl.LogProbsAndEntropy(lambda *given: given)
    assert function(hidden, weight, labels, 0.7, reduction, group) == (hidden, weight, labels, 0.7, reduction, group)


def test_an_fp32_head():
    """The log-probabilities are those of bf16 operands multiplied in fp64."""
    hidden, weight, labels = operands(13, dtype=torch.bfloat16)
    expected = by_logits(hidden, weight, labels, 0.7)[0]
    for fp32_head in (False, True):
        with installed(fp32_head=fp32_head):
            for found in (
                kernel.linear_cross_entropy(hidden, weight, labels, 0.7, "none")[0],
                functional.FusedLinearForPPO()(hidden, weight, labels, temperature=0.7)[0],
            ):
                assert ((found - expected).abs().max() < 1e-5) == fp32_head
            if fp32_head:
                with pytest.raises(ValueError, match="fp32_head must be False with a reduction"):
                    kernel.linear_cross_entropy(hidden, weight, labels, 0.7, "mean")


def test_bf16_gradients_are_added_to_main_grad():
    hidden, weight, labels = operands(13, dtype=torch.bfloat16)
    expected = by_logits(hidden, weight, labels, 1.0)
    weight.main_grad = torch.ones(67, 16)
    with installed():
        made = functional.FusedLinearForPPO()(hidden, weight, labels)
    assert made[0].dtype is made[1].dtype is torch.float32
    (2 * made[0].sum() + 0.5 * made[1].sum()).backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad - 1, expected[3].float(), rtol=0.05, atol=0.05)


# ---- Megatron ----


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    if not importlib.util.find_spec("megatron") or not importlib.util.find_spec("megatron.core"):
        pytest.skip("needs megatron-core")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    if not hasattr(importlib.import_module("verl.models.mcore.model_forward_fused"), "fused_output_processor"):
        pytest.skip("this verl has no output processor")
    return found_by(verl_ranks.run, ("gloo", 2), tmp_path_factory.mktemp("verl"))


@pytest.mark.parametrize("sequence", (False, True))
def test_the_output_processor_over_ranks(ranks, sequence):
    log_prob, entropy, dhidden, dweight = verl_ranks.expected()
    for rank, found in enumerate(ranks):
        mine = dhidden.chunk(2)[rank] if sequence else dhidden
        assert_alike(found[sequence], (log_prob, entropy, mine, dweight.chunk(2)[rank]))
        assert "fused_output_processor: onepass.integrations.verl.FusedOutputProcessor" in found["said"]


# ---- equal bits ----


@pytest.mark.parametrize("door", ("function", "module"))
def test_log_probabilities_do_not_depend_on_the_microbatch(door):
    hidden, weight, labels = operands(37)
    with installed(batch_invariant=True) as seams:
        assert invariant() and "onepass.batch_invariant(): on, of the process" in str(seams)
        call = kernel.linear_cross_entropy if door == "function" else functional.FusedLinearForPPO()
        whole = call(hidden, weight, labels, 0.7)
        for size in (1, 5, 20):
            parts = [call(h, weight, y, 0.7) for h, y in zip(hidden.split(size), labels.split(size), strict=True)]
            for mine, theirs in zip(zip(*parts, strict=True), whole, strict=True):
                assert torch.equal(torch.cat(mine), theirs)
        with pytest.raises(RuntimeError, match=r"verl's head with a reduction.* can't run under"):
            kernel.linear_cross_entropy(hidden, weight, labels, 1.0, "mean")
    assert not invariant()


# ---- install and undo ----


def test_install_and_undo():
    stock = kernel.linear_cross_entropy, functional.FusedLinearForPPO.forward
    seams = onepass_verl.install()
    said = str(seams)
    assert "utils.kernel.linear_cross_entropy.linear_cross_entropy: onepass.integrations.verl.LogProbsAndEntropy" in said
    assert "FusedLinearForPPO.forward: onepass.integrations.verl.fused_linear_for_ppo" in said
    assert "fused_output_processor" in said or "model_forward_fused: it can't be imported here" in said
    with pytest.raises(SeamError, match="is rebound by onepass already"):
        onepass_verl.install()
    seams.undo()
    assert (kernel.linear_cross_entropy, functional.FusedLinearForPPO.forward) == stock


def test_a_name_that_moved(monkeypatch):
    monkeypatch.delattr(functional.FusedLinearForPPO, "forward")
    stock = kernel.linear_cross_entropy
    with pytest.raises(SeamError, match=r"verl .* has no .*FusedLinearForPPO\.forward"):
        onepass_verl.install()
    assert kernel.linear_cross_entropy is stock
