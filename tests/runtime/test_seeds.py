"""Seeds: from PyTorch's generators, as a number where that is right and as a tensor elsewhere."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from onepass.kernels import philox
from onepass.kernels.philox import _mix, as_tensor, draw_seed


class Generator:
    """A GPU's, as far as seeds need one."""

    def __init__(self, seed=7, offset=0):
        self.seed, self.offset = seed, offset

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0
        self.offset = offset


@pytest.fixture
def gpu(monkeypatch):
    """What stands for a tensor of a GPU that nobody watches, and its generator."""
    generator = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    monkeypatch.setattr(philox, "needs_dispatcher", lambda *tensors: False)
    monkeypatch.setattr(philox, "is_capturing", lambda device: False)
    return SimpleNamespace(is_cuda=True, device=torch.device("cpu"), get_device=lambda: 1), generator


def test_a_tensor_on_a_cpu_that_repeats():
    x = torch.ones(2)
    torch.manual_seed(3)
    first, second = draw_seed(x), draw_seed(x)
    assert first.dtype == torch.int64 and first.shape == (1,) and 0 <= int(first) < 1 << 63 and int(first) != int(second)
    torch.manual_seed(3)
    assert torch.equal(draw_seed(x), first)


def test_a_number_on_a_gpu_of_the_generators_seed_and_place(gpu):
    x, generator = gpu
    first, second = draw_seed(x), draw_seed(x)
    assert isinstance(first, int) and first != second and generator.offset == 8
    generator.offset = 0  # as torch.manual_seed leaves it, or whoever puts a state back
    assert draw_seed(x) == first
    generator.offset, generator.seed = 0, 8
    assert draw_seed(x) != first


@pytest.mark.parametrize("why", ["needs_dispatcher", "is_capturing", "under_functorch"])
def test_a_tensor_where_somebody_looks_on(gpu, why, monkeypatch):
    x, generator = gpu
    monkeypatch.setattr(philox, why, lambda *given: True)
    assert isinstance(draw_seed(x), torch.Tensor) and generator.offset == 0


def test_a_tensor_where_a_graph_would_draw_one(gpu):
    x, generator = gpu
    with philox.seeds_on_device():
        assert isinstance(draw_seed(x), torch.Tensor) and generator.offset == 0
    assert isinstance(draw_seed(x), int)


def test_checkpointing_draws_the_same_again():
    drawn = []

    def layer(x):
        drawn.append(int(draw_seed(x)))
        return x * 1

    checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=True).sum().backward()
    assert len(drawn) == 2 and drawn[0] == drawn[1]


def test_numbers_are_of_one_size_and_all_different():
    found = {_mix(seed, place) for seed in (0, 1, 2, 67280421310721, 2**64 - 1) for place in range(0, 40000, 4)}
    assert len(found) == 50000 and all(1 << 62 <= seed < 1 << 63 for seed in found)


def test_as_a_tensor():
    seed = torch.tensor([5])
    assert as_tensor(seed, seed.device) is seed
    assert torch.equal(as_tensor(1 << 62, torch.device("cpu")), torch.tensor([1 << 62]))
