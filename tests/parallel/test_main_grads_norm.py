"""The norm of MainGrads' whole gradient, and clipping by it, on one rank."""

import pytest
import torch
from parallel.mixed_model import BF16, BYTES, FP32, MICROBATCHES, Mixed, backwards, close, loss, main_grads_by_name
from torch import nn

import onepass
from onepass.gradients.main_grads import MainGrads


@pytest.fixture(autouse=True)
def _plain_backend():
    with onepass.use_backend("torch"):
        yield


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_norm_and_clipping_as_pytorchs(norm_type):
    model, plain = Mixed(), Mixed()
    main_grads = MainGrads(model, bucket_bytes=BYTES)
    backwards(main_grads, model, 0)
    main_grads.finish()
    for microbatch in range(MICROBATCHES):
        loss(plain, 0, microbatch, plain=True).backward()
    for max_norm in (1e6, 0.1):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        got = main_grads.clip_(max_norm, norm_type)
        assert got.dtype == FP32 and got.shape == ()
        torch.testing.assert_close(got, expected)
        close(main_grads_by_name(model), {name: p.grad for name, p in plain.named_parameters() if p.requires_grad})
        torch.testing.assert_close(
            main_grads.norm(norm_type), nn.utils.get_total_norm(main_grads_by_name(model).values(), norm_type)
        )


def test_the_norm_of_narrow_buffers_is_fp32():
    weight = nn.Parameter(torch.ones(1001))
    main_grads = MainGrads([weight], dtype=BF16)
    weight.sum().backward()
    main_grads.finish()
    torch.testing.assert_close(main_grads.norm(), torch.tensor(1001.0).sqrt())


def test_nan_is_seen_in_the_norm():
    weight = nn.Parameter(torch.ones(2))
    main_grads = MainGrads([weight])
    (weight * torch.tensor([1.0, float("nan")])).sum().backward()
    main_grads.finish()
    assert main_grads.clip_(1.0).isnan() and weight.main_grad.isnan().all()


def test_a_norm_that_is_nan_is_forgotten_with_its_gradient():
    """Also in what lies between parameters, which an optimizer that leaves zeros behind doesn't see."""
    weight = nn.Parameter(torch.ones(3))
    main_grads = MainGrads([weight])
    optimizer = onepass.parallel.AdamW(main_grads, lr=0.1)
    for factor, norm in ((1.0, 3**0.5), (float("nan"), float("nan")), (1.0, 3**0.5)):
        main_grads.zero_()
        (weight.detach_().fill_(1.0).requires_grad_() * factor).sum().backward()
        main_grads.finish()
        torch.testing.assert_close(main_grads.clip_(10.0), torch.tensor(norm), equal_nan=True)
        optimizer.step(zero=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm_type", (1.0, 2.0, 3.0, float("inf")))
def test_the_norm_on_a_gpu_is_pytorchs(norm_type):
    weights = [nn.Parameter(torch.randn(size, device="cuda").to(dtype)) for size in (3, 70, 5_000_001) for dtype in (FP32, BF16)]
    main_grads = MainGrads(weights)
    main_grads.zero_()
    for weight in weights:
        weight.main_grad.normal_()
    main_grads.finish()
    expected = torch.nn.utils.get_total_norm([weight.main_grad.double() for weight in weights], norm_type)
    torch.testing.assert_close(main_grads.clip_(1.0, norm_type).double(), expected, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(main_grads.norm(norm_type), torch.ones((), device="cuda"), rtol=1e-4, atol=0.0)
