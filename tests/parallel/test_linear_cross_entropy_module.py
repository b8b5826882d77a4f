"""nn.LinearCrossEntropy over ranks, tied to an embedding, against the undivided formulas in fp64. The processes run
linear_cross_entropy_module_ranks.py."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel import linear_cross_entropy_module_ranks as ranks_file
from parallel.linear_cross_entropy_module_ranks import VOCABULARIES, B, D, S, given, model
from parallel.worlds import PAIRS, found_by
from torch.nn import functional as F

from onepass.nn import sharded_state_dict
from onepass.nn.sharding import range_of

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
TIGHT = {"rtol": 1e-5, "atol": 1e-6}
cases = pytest.mark.parametrize(("size", "sequence"), [(size, sequence) for size in VOCABULARIES for sequence in (False, True)])


class Found(list):
    """What each of two ranks found, and where they saved."""

    def __init__(self, world, folder):
        super().__init__(found_by(ranks_file.run, world, folder))
        self.folder = folder


@pytest.fixture(scope="module", params=PAIRS)
def found(request, tmp_path_factory):
    return Found(request.param, tmp_path_factory.mktemp("ranks"))


def finished(products):
    return 3 * torch.tanh(0.5 * products / 3)


def exactly(size, microbatches):
    """The losses and the gradients of the undivided model, in fp64, and the logits of its first microbatch."""
    whole = model(size, None)
    weight, bias = (t.detach().double().requires_grad_() for t in (whole.head.weight, whole.head.bias))
    losses, all_logits = [], []
    for microbatch in microbatches:
        ids, labels = given(size, microbatch)
        logits = finished(F.linear(torch.tanh(F.embedding(ids, weight)), weight, bias))
        kept = labels.flatten() != -100
        z = 1e-2 * logits.flatten(0, 1).logsumexp(-1).square()[kept].mean()
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + z)
        all_logits.append(logits.detach())
    sum(losses).backward()
    grads = {"embedding.weight": weight.grad, "head.bias": bias.grad}
    return [loss.detach() for loss in losses], grads, all_logits[0]


def together(found, size, sequence, kind, name):
    """The ranks' parts of a whole, of which each has what `range_of` says."""
    parts = [rank[size, sequence][kind][name] for rank in found]
    ranges = [range_of(size, rank, len(found)) for rank in range(len(found))]
    assert [part.shape[0] for part in parts] == [last - first for first, last in ranges]
    return torch.cat(parts)


@cases
def test_tied_and_over_two_microbatches_as_undivided(found, size, sequence):
    losses, grads, _ = exactly(size, (0, 1))
    for rank in found:
        torch.testing.assert_close([loss.double() for loss in rank[size, sequence]["losses"]], losses, **TIGHT)
    for name, wanted in grads.items():
        got = together(found, size, sequence, "grads", name)
        torch.testing.assert_close(got.double(), wanted, **TIGHT, msg=lambda said, name=name: f"{name}: {said}")
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    for rank in found:
        torch.testing.assert_close(rank[size, sequence]["norm"].double(), norm, **TIGHT)


@cases
def test_it_starts_as_undivided(found, size, sequence):
    for name, wanted in model(size, None).state_dict().items():
        assert torch.equal(together(found, size, sequence, "start", name), wanted), name


@cases
def test_all_ranks_have_the_whole_logits(found, size, sequence):
    _, _, wanted = exactly(size, (0,))
    for rank in found:
        logits = rank[size, sequence]["logits"]
        torch.testing.assert_close((logits.transpose(0, 1) if sequence else logits).double(), wanted, **TIGHT)


@cases
def test_the_gradient_of_logits(found, size, sequence):
    """Of hidden states, as each rank has them or its part of them."""
    whole = model(size, None)
    weight, bias = whole.head.weight.detach().double(), whole.head.bias.detach().double()
    for rank in found:
        hidden = rank[size, sequence]["hidden"].double().requires_grad_()
        assert hidden.shape == ((S // len(found), B, D) if sequence else (B, S, D))
        finished(F.linear(hidden, weight, bias)).square().sum().backward()
        torch.testing.assert_close(rank[size, sequence]["dhidden"].double(), hidden.grad, **TIGHT)


def test_data_parallel_ranks_average(found):
    _, grads, _ = exactly(77, range(len(found)))
    for rank in found:
        for name, wanted in grads.items():
            torch.testing.assert_close(rank["data parallel"][name].double(), wanted / len(found), **TIGHT)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_what_the_ranks_saved_one_loads(found):
    one = model(77, None, seed=9)
    dcp.load(sharded_state_dict(one), checkpoint_id=str(found.folder / "saved"), no_dist=True)
    whole = model(77, None).state_dict()
    assert list(one.state_dict()) == list(whole)
    assert all(torch.equal(one.state_dict()[name], t) for name, t in whole.items())


def test_what_is_said(found):
    for number, rank in enumerate(found):
        said, weight, hidden, labels = rank["said"]
        first, last = range_of(77, number, 2)
        where = f"vocab_range=({first}, {last}), tp=2, sequence_parallel=True"
        assert said == f"LinearCrossEntropy({D}, 77, bias=False, {where})"
        assert weight == f"weight must have shape ({last - first}, {D}), the rows of vocab_range, but has (77, {D})"
        assert hidden == f"hidden's last dimension must be {D}, hidden_size, but hidden has shape ({S}, {D - 1})"
        assert labels.startswith(f"labels must have shape ({2 * S},)")
