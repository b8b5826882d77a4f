"""nn.LinearCrossEntropy over two ranks, tied to an embedding, against the undivided formulas in fp64."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parallel.meeting import drawn, error_of, formulas_on_cpus, gather, own_group
from torch import nn
from torch.nn import functional as F

from onepass.nn import LinearCrossEntropy, VocabParallelEmbedding, sharded_state_dict
from onepass.nn.sharding import range_of
from onepass.parallel import MainGrads

rank_context = formulas_on_cpus
TIGHT = {"rtol": 1e-5, "atol": 1e-6}
S, B, D = 6, 2, 12  # sequence, batch and hidden_size
VOCABULARIES = (77, 1)  # the last rank's shard is smaller, or empty
cases = pytest.mark.parametrize(("size", "sequence"), [(size, sequence) for size in VOCABULARIES for sequence in (False, True)])
OPTIONS = {"softcap": 3.0, "logit_scale": 0.5, "z_loss": 1e-2}


class Model(nn.Module):
    """An embedding, and an output layer with a tied weight and a bias."""

    def __init__(self, size, group, sequence=False):
        super().__init__()
        self.embedding = VocabParallelEmbedding(size, D, tp_group=group, reduce_scatter_embeddings=sequence)
        self.head = LinearCrossEntropy(D, size, bias=True, tp_group=group, sequence_parallel=sequence, **OPTIONS)
        self.head.weight = self.embedding.weight

    def hidden(self, ids):
        return torch.tanh(self.embedding(ids))

    def forward(self, ids, labels, **options):
        return self.head(self.hidden(ids), labels, **options)


def model(size, group, sequence=False, seed=5):
    device = torch.get_default_device()
    torch.manual_seed(seed)
    with torch.device("cpu"):  # the test and all ranks draw alike
        made = Model(size, group, sequence)
    return made.to(device)


def tokens(size, microbatch):
    """Return ids [batch, sequence] and their labels, of which one is ignored."""
    generator = torch.Generator().manual_seed(microbatch)
    ids, labels = drawn(torch.randint, size, (2, B, S), generator=generator)
    labels[0, 2] = -100
    return ids, labels


def finished(products):
    return 3 * torch.tanh(0.5 * products / 3)


def exactly(size, microbatches):
    """Return the losses and the gradients of the undivided model, in fp64, and the logits of its first microbatch."""
    whole = model(size, None)
    weight, bias = (t.detach().double().requires_grad_() for t in (whole.head.weight, whole.head.bias))
    losses, all_logits = [], []
    for microbatch in microbatches:
        ids, labels = tokens(size, microbatch)
        logits = finished(F.linear(torch.tanh(F.embedding(ids, weight)), weight, bias))
        kept = labels.flatten() != -100
        z = 1e-2 * logits.flatten(0, 1).logsumexp(-1).square()[kept].mean()
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + z)
        all_logits.append(logits.detach())
    sum(losses).backward()
    grads = {"embedding.weight": weight.grad, "head.bias": bias.grad}
    return [loss.detach() for loss in losses], grads, all_logits[0]


def together(group, size, part):
    """Return the whole of which each rank has the part that `range_of` says."""
    parts = gather(group, part)
    ranges = [range_of(size, rank, len(parts)) for rank in range(len(parts))]
    assert [part.shape[0] for part in parts] == [last - first for first, last in ranges]
    return torch.cat(parts)


@cases
def test_tied_and_over_two_microbatches_as_undivided(group, size, sequence):
    """The second microbatch with grad_scale."""
    both, losses = model(size, group, sequence), []
    main_grads = MainGrads(both, group=own_group(), tp_group=group)
    for microbatch, options in ((0, {}), (1, {"grad_scale": 1.0})):
        ids, labels = tokens(size, microbatch)
        losses.append(both(ids, labels.t().contiguous() if sequence else labels, **options))
        if microbatch == 0:
            with main_grads.accumulate():
                losses[0].backward()
        else:
            losses[1].backward()
    main_grads.finish()
    exact, grads, _ = exactly(size, (0, 1))
    torch.testing.assert_close([loss.detach().double() for loss in losses], exact, **TIGHT)
    for name, wanted in grads.items():
        torch.testing.assert_close(together(group, size, both.get_parameter(name).main_grad).double(), wanted, **TIGHT)
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    torch.testing.assert_close(main_grads.norm().double(), norm, **TIGHT)


@cases
def test_it_starts_as_undivided(group, size, sequence):
    ours = model(size, group, sequence).state_dict()
    for name, wanted in model(size, None).state_dict().items():
        assert torch.equal(together(group, size, ours[name]), wanted), name


@cases
def test_all_ranks_have_the_whole_logits_and_their_gradient(group, size, sequence):
    """Of hidden states, as each rank has them or its part of them."""
    both, whole, ids = model(size, group, sequence), model(size, None), tokens(size, 0)[0]
    logits = both.head.logits(both.hidden(ids)).detach()
    wanted = exactly(size, (0,))[2]
    torch.testing.assert_close((logits.transpose(0, 1) if sequence else logits).double(), wanted, **TIGHT)
    hidden = both.hidden(ids).detach().requires_grad_()
    assert hidden.shape == ((S // group.size(), B, D) if sequence else (B, S, D))
    (dhidden,) = torch.autograd.grad(both.head.logits(hidden).square().sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    finished(F.linear(exact, whole.head.weight.double(), whole.head.bias.double())).square().sum().backward()
    torch.testing.assert_close(dhidden.double(), exact.grad, **TIGHT)


def test_data_parallel_ranks_average(group):
    """Each rank has its own tokens and the whole vocabulary."""
    both = model(77, None)
    main_grads = MainGrads(both, group=group)
    both(*tokens(77, group.rank())).backward()
    main_grads.finish()
    for name, wanted in exactly(77, range(group.size()))[1].items():
        torch.testing.assert_close(both.get_parameter(name).main_grad.double(), wanted / group.size(), **TIGHT)


def save(group, folder):
    dcp.save(sharded_state_dict(model(77, group)), checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_one_rank_loads_what_two_saved(world, tmp_path):
    world.run(save, str(tmp_path))
    one = model(77, None, seed=9)
    dcp.load(sharded_state_dict(one), checkpoint_id=str(tmp_path), no_dist=True)
    whole = model(77, None).state_dict()
    assert list(one.state_dict()) == list(whole)
    assert all(torch.equal(one.state_dict()[name], t) for name, t in whole.items())


def test_errors_raise_before_anything_is_sent(group):
    head = LinearCrossEntropy(D, 77, tp_group=group, sequence_parallel=True)
    hidden, labels = torch.ones(S, D), torch.zeros(2 * S, dtype=torch.int64)
    first, last = range_of(77, group.rank(), 2)
    where = f"vocab_range=({first}, {last}), tp=2, sequence_parallel=True"
    assert repr(head) == f"LinearCrossEntropy({D}, 77, bias=False, {where})"
    said = error_of(head, hidden, labels, weight=torch.ones(77, D))
    assert said == f"weight must have shape ({last - first}, {D}), the rows of vocab_range, but has (77, {D})"
    said = error_of(head.logits, hidden[:, :-1])
    assert said == f"hidden's last dimension must be {D}, hidden_size, but hidden has shape ({S}, {D - 1})"
    assert error_of(head, hidden, labels[:-1]).startswith(f"labels must have shape ({2 * S},)")
