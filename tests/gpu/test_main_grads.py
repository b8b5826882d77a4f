"""What only a GPU shows of MainGrads: gradients that are added on other streams than the hooks run on."""

import pytest
import torch
from gpu.calls import memory_goes_back, other_stream  # noqa: F401
from torch.nn import functional as F

import onepass
from onepass.parallel.main_grads import MainGrads

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), other_stream]


class _Late(torch.autograd.Function):
    """Backward keeps its stream busy for a good part of a second first."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(500_000_000)
        return grad.clone()


@pytest.mark.parametrize("by", (onepass.linear, F.linear))
@pytest.mark.parametrize("microbatches", (1, 2))
def test_finish_waits_for_gradients_of_other_streams(by, microbatches):
    """While a graph is left that the weight was used in, autograd runs its hooks on the stream of that graph."""
    weight = torch.nn.Parameter(torch.ones(64, 64, device="cuda"))
    main_grads = MainGrads([weight])
    x, side = torch.ones(8, 64, device="cuda"), torch.cuda.Stream()
    left = by(x, weight)
    torch.cuda.synchronize()
    for microbatch in range(microbatches):
        with torch.cuda.stream(side):
            loss = _Late.apply(by(x, weight)).sum()
        if microbatch < microbatches - 1:
            with main_grads.accumulate():
                loss.backward()
        else:
            loss.backward()
    main_grads.finish()
    found = weight.main_grad.clone()
    torch.cuda.synchronize()
    assert left.requires_grad and torch.equal(found, torch.full_like(found, 8.0 * microbatches))
