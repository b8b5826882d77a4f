"""Our ops and modules under torch's fully_shard, against the unsharded model in fp64. The processes run fsdp_ranks.py."""

import functools

import pytest
import torch
import torch.distributed as dist
from parallel import fsdp_ranks
from parallel.fsdp_ranks import CASES, MICROBATCHES, Model, batch, loss
from parallel.worlds import PAIRS, found_by

from onepass.gradients import fsdp

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo"),
    pytest.mark.skipif(
        not fsdp._TESTED[0] <= tuple(map(int, torch.__version__.split(".")[:2])) <= fsdp._TESTED[1],
        reason="FSDPMainGrads refuses this PyTorch",
    ),
]


@pytest.fixture(scope="module", params=PAIRS)
def found(request, tmp_path_factory):
    """What each rank found."""
    return found_by(fsdp_ranks.run, request.param, tmp_path_factory.mktemp("ranks"))


@functools.cache
def exact(ranks):
    model = Model(plain=True).double()
    for rank in range(ranks):
        for microbatch in range(MICROBATCHES):
            (loss(model, batch(rank, microbatch).double()) / ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def error(grad, name, ranks):
    reference = exact(ranks)[name]
    return ((grad.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_gradients(found, name):
    frozen = CASES[name].get("frozen", ())
    for mine in found:
        assert mine[name].keys() == exact(len(found)).keys()
        for key, grad in mine[name].items():
            if key in frozen:
                assert grad is None, key
                continue
            assert grad.dtype == torch.float32, key
            if CASES[name].get("mixed"):
                theirs = error(mine["by PyTorch"][key], key, len(found))
                few = grad.numel() <= 32  # numbers, whose roundings have no spread to compare
                assert error(grad, key, len(found)) <= (2 if few else 1.25) * theirs + 1e-3, key
            else:
                assert error(grad, key, len(found)) <= 1e-5, key


def test_gradients_in_products_are_not_rounded(found):
    for mine in found:
        in_products, by_pytorch = mine["rounding"]
        assert in_products < 1e-6 < 1e-4 < by_pytorch  # PyTorch rounds each microbatch's to bf16


def test_what_is_undone_or_unknown_is_fsdps_own(found):
    for mine in found:
        assert mine["undone"] == 0
        warning, reason, reduced = mine["stock"]
        assert "PyTorch 3.0.1 is not one of 2.11 to 2.15" in reason and reason in warning and reduced


def test_models_that_cannot_be_taken(found):
    for mine in found:
        plain, twice, low = mine["refused"]
        assert "model must be sharded by fully_shard" in plain
        assert "has FSDPMainGrads already" in twice
        assert "must reduce gradients in fp32" in low and "reduce_dtype=torch.float32" in low


def close(a, b):
    return float((a - b).norm() / b.norm()) <= 1e-6


def test_adamw_on_shards_is_torchs(found):
    for mine in found:
        adamw = mine["AdamW"]
        assert close(*adamw["norms"]) and close(*adamw["weights"])
        assert adamw["state lies"][0] == adamw["state lies"][1]


@pytest.mark.parametrize("name", ("theirs from mine", "mine from theirs", "same from mine"))
def test_checkpoints_of_adamw_are_torchs_both_ways(found, name):
    for mine in found:
        assert close(mine["AdamW"][name], mine["AdamW"]["on"])


def test_adamw_says_what_it_does_not_take(found):
    for mine in found:
        low, amsgrad, group = mine["AdamW said"]
        assert "parameters must be fp32, but one is torch.bfloat16" in low
        assert "amsgrad must be False" in amsgrad
        assert "groups must be given when ShardedAdamW is made" in group


def test_a_dtensors_gradient_has_no_main_grad_to_go_to(found):
    for mine in found:
        grad, said = mine["DTensor"]
        assert torch.equal(grad, torch.full_like(grad, float(fsdp_ranks.ROWS)))
        assert "main_grad must be a plain weight's, but its weight is a DTensor" in said


def test_main_grads_says_that_fully_shard_has_gradients_already(found):
    for mine in found:
        after, before = mine["MainGrads"]
        assert "parameters must be plain tensors, but mix is a DTensor" in after and ".grad" in after
        assert "parameters must be the module's" in before and "but mix is another one" in before and ".grad" in before
