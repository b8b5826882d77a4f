"""Packed rows: a document's loss, gradients and logits are those that it has alone."""

import pytest
import torch
from gpt.small_models import BIASES, EXPERTS, SHAPE, configured, started
from ops.calls import relative

from onepass.gpt import Config, Model, model, packing
from onepass.runtime import documents
from onepass.testing.mutants import mutate

LENGTH = 12
LENGTHS = [[5, 1, 6], [12], [3, 4, 5]]  # of the documents in each row
VARIANTS = {
    "llama": {},
    "interleaved": {"rotary_interleaved": True},
    "gpt-2": BIASES | {"gated_linear_unit": False, "activation_func": "gelu"},
    "heads normed": {"qk_layernorm": True},
    "heads normed, unfused": {"qk_layernorm": True, "attention_fusion": False},
    "rope by PyTorch": {"apply_rope_fusion": False},
    "no positions": {"position_embedding_type": "none"},
    "native": {"cross_entropy_fusion_impl": "native"},
    "experts": EXPERTS | {"moe_aux_loss_coeff": 0.0},
    "recomputed": {"recompute_granularity": "full"},
    "products again": {"recompute_granularity": "selective"},
    "no fusion": {"reference": True},
    "no fusion, learned positions": BIASES | {"reference": True},
}


def boundaries(lengths=LENGTHS):
    """Each row's boundaries, the end repeated."""
    rows = [torch.tensor([0, *each]).cumsum(0) for each in lengths]
    width = max(map(len, rows))
    return torch.stack([torch.cat([row, row[-1:].expand(width - len(row))]) for row in rows]).int()


def drawn(seed=0):
    """Tokens and labels. A document's last token has no label here."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(SHAPE["vocab_size"], (2, len(LENGTHS), LENGTH), generator=generator)
    for row, lengths in zip(labels, LENGTHS, strict=True):
        row[torch.tensor(lengths).cumsum(0) - 1] = -100
    return tokens, labels


def alone(network, tokens, labels):
    """The summed loss, its gradients and the logits of documents one by one."""
    total, logits = 0.0, []
    for row, of_row, lengths in zip(tokens, labels, LENGTHS, strict=True):
        for document, targets in zip(row.split(lengths), of_row.split(lengths), strict=True):
            loss = network(document[None], targets[None], reduction="sum")
            loss.backward()
            total += loss.detach()
            logits.append(network(document[None]).detach()[0])
    return total, gradients(network), torch.cat(logits).view(*tokens.shape, -1)


def packed(network, tokens, labels, cu_seqlens):
    loss = network(tokens, labels, cu_seqlens=cu_seqlens, reduction="sum")
    loss.backward()
    return loss.detach(), gradients(network), network(tokens, cu_seqlens=cu_seqlens).detach()


def gradients(network):
    found = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    network.zero_grad()
    return found


def furthest(found, expected):
    """The largest relative error of loss, gradients and logits."""
    errors = [relative(found[0], expected[0]), relative(found[2], expected[2])]
    norms = [(grad - expected[1][name]).norm() / expected[1][name].norm().clamp_min(1e-12) for name, grad in found[1].items()]
    return max(*map(float, errors), *(float(norm) for name, norm in zip(found[1], norms, strict=True) if "k_bias" not in name))


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_are_those_alone(name):
    network = started(configured(1, **VARIANTS[name]))
    expected = alone(network, *drawn())
    assert furthest(packed(network, *drawn(), boundaries()), expected) < 1e-11
    narrow = network.float()
    assert furthest(packed(narrow, *drawn(), boundaries()), expected) < 2e-5


def test_documents_in_one_row():
    network = started(configured(1))
    tokens, labels = (x.view(1, -1) for x in drawn())  # longer than max_position_embeddings, which documents are not
    joined = torch.tensor([0, *(length for row in LENGTHS for length in row)]).cumsum(0).int()
    assert tokens.shape[1] > SHAPE["max_position_embeddings"]
    loss, grads, logits = packed(network, tokens, labels, joined)
    expected = alone(network, *drawn())
    assert furthest((loss, grads, logits.view_as(expected[2])), expected) < 1e-11


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("joined_boundaries", "cu_seqlens + first, -1", "torch.where(cu_seqlens == 5, 0, cu_seqlens) + first, -1"),
        ("joined_boundaries", "cu_seqlens + first, -1", "torch.where(cu_seqlens == 5, 4, cu_seqlens) + first, -1"),
        ("positions_in_rows", "positions_within(boundaries, batch * length)", "torch.arange(length).repeat(batch)"),
        ("visible_keys", "documents[:, :, None] ==", "documents[:, :, None] >="),
        ("visible_keys", ".tril()", ".tril(1)"),
    ],
    ids=["two as one", "a neighbour's token", "positions that go on", "documents before", "the next token"],
)
def test_a_document_that_sees_its_neighbour_is_caught(function, old, new):
    mutant = mutate(packing, function, old, new, entry=model)
    config = configured(1, reference=function == "visible_keys", position_embedding_type="learned_absolute")
    broken, network = (kind(config, seed=3).double() for kind in (mutant.Model, Model))
    assert furthest(packed(broken, *drawn(), boundaries()), alone(network, *drawn())) > 1e-4


@pytest.mark.parametrize("reference", (False, True))
def test_a_documents_bits_do_not_depend_on_its_neighbours(reference):
    network = started(configured(1, reference=reference)).float()
    tokens, _ = drawn()
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % SHAPE["vocab_size"]  # a document of one token
    before, after = (network(x, cu_seqlens=boundaries()) for x in (tokens, other))
    assert not torch.equal(before[0, 5], after[0, 5])
    after[0, 5] = before[0, 5]
    assert torch.equal(before, after)


def test_empty_documents_change_no_bit():
    network = started(configured(1)).float()
    wider = torch.cat([boundaries(), torch.full((3, 9), LENGTH)], 1).int()
    for one, other in zip(packed(network, *drawn(), boundaries()), packed(network, *drawn(), wider), strict=True):
        if isinstance(one, dict):
            assert all(torch.equal(grad, other[name]) for name, grad in one.items())
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ("llama", "gpt-2"))
def test_positions_are_those_given(name):
    network = started(configured(1, **VARIANTS[name])).float()
    tokens, _ = drawn()
    counted = torch.arange(LENGTH).expand_as(tokens)
    assert torch.equal(network(tokens, positions=counted), network(tokens))
    within = torch.stack([torch.cat([torch.arange(each) for each in row]) for row in LENGTHS])
    assert torch.equal(network(tokens, cu_seqlens=boundaries(), positions=within), network(tokens, cu_seqlens=boundaries()))
    assert not torch.allclose(network(tokens, positions=within), network(tokens))


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"cu_seqlens": [0, 12]}, TypeError, "cu_seqlens must be a tensor of torch.int32"),
        ({"cu_seqlens": boundaries().long()}, TypeError, "cu_seqlens must be a tensor of torch.int32, or None, but is one of"),
        ({"cu_seqlens": boundaries()[0]}, ValueError, "x must be one row of tokens where cu_seqlens"),
        ({"cu_seqlens": boundaries()[:2]}, ValueError, "a row of boundaries for each of x's 3 rows, but has shape"),
        ({"cu_seqlens": boundaries() + 1}, ValueError, "cu_seqlens must begin with 0, but begins with 1"),
        ({"cu_seqlens": boundaries().clamp(max=11)}, ValueError, "cu_seqlens must end with 12, a row of x's tokens, but"),
        ({"cu_seqlens": boundaries([[5, -1, 8], [12], [12]])}, ValueError, "cu_seqlens must not fall, but goes from 5 to 4"),
        ({"positions": torch.arange(12)}, ValueError, r"positions must have shape \(3, 12\), as x's tokens, but has"),
    ],
)
def test_bad_boundaries_raise(given, kind, said):
    with pytest.raises(kind, match=said):
        Model(configured(1), seed=0)(drawn()[0], **given)


def test_a_document_longer_than_there_are_positions_raises():
    network = Model(Config(**SHAPE), seed=0)
    with pytest.raises(ValueError, match="documents of at most max_position_embeddings, 16, but has one of 19"):
        network(torch.zeros(1, 24, dtype=torch.int64), cu_seqlens=torch.tensor([0, 5, 24], dtype=torch.int32))


@pytest.mark.parametrize("reference", (False, True))
@pytest.mark.parametrize("wrong", (boundaries() + 1, boundaries().clamp(max=11), boundaries([[5, -1, 8], [12], [12]])), ids=str)
def test_boundaries_that_nobody_reads_and_are_wrong_give_nan(wrong, reference, monkeypatch):
    """As on a GPU."""
    for module in (packing, documents):
        monkeypatch.setattr(module, "are_readable", lambda cu_seqlens: False)
    monkeypatch.setattr("onepass.ops.attention.formula.are_readable", lambda cu_seqlens: False)
    network = Model(configured(1, reference=reference), seed=0)
    assert network(drawn()[0], cu_seqlens=wrong).isnan().all()
