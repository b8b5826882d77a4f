"""Documents in every way that a batch may hold them: alone, packed in several orders, in a batch and padded at the right."""

import torch

import onepass


def ways_of(lengths, padded=True):
    """Yield, for each way, the documents of each row in order, and the rows' length. Documents are numbers; None is padding."""
    everyone = range(len(lengths))
    for order in (everyone, [*everyone][::-1], [*everyone[1:], 0]):
        yield [[*order]], None
    for number in everyone:  # twice in a batch
        yield [[number], [number]], lengths[number]
    if padded:
        yield [[number] for number in everyone], max(lengths) + 3
        yield [[number] for number in everyone][1:], max(lengths) + 70


def laid_out(documents, rows, length, fill):
    """Return [B, S, ...] of documents' tensors, with random padding, or zeros where fill is 0."""
    made = []
    for row in rows:
        own = torch.cat([documents[number] for number in row])
        missing = 0 if length is None else length - len(own)
        made.append(torch.cat([own, fill * torch.randn(missing, *own.shape[1:]).to(own)]))
    return torch.stack(made)


def boundaries_of(lengths, row, device):
    return torch.tensor([0, *(lengths[number] for number in row)]).cumsum(0).to(device, torch.int32)


def places_of(lengths, rows):
    """Yield (document, row, first token, end)."""
    for at, row in enumerate(rows):
        first = 0
        for number in row:
            yield number, at, first, first + lengths[number]
            first += lengths[number]


def check_ways(call, inputs, dys, padded=True, switch=onepass.batch_invariant):
    """Assert that each document has the bits that it has alone: its results, and its inputs' gradients.

    Args:
        call: takes tensors [B, S, ...] and boundaries or None, and returns results of as many tokens.
        inputs: of each document, tensors [tokens, ...].
        dys: of each document, its results' gradients.
        switch: `batch_invariant`, of a mutant its own.
    """
    lengths = [len(each[0]) for each in inputs]

    def run(rows, length):
        leaves = [laid_out([each[i] for each in inputs], rows, length, 1).requires_grad_() for i in range(len(inputs[0]))]
        boundaries = boundaries_of(lengths, rows[0], leaves[0].device) if length is None and len(rows) == 1 else None
        with switch():
            ys = call(*(leaf * 1 for leaf in leaves), boundaries)
            ys = ys if isinstance(ys, tuple) else (ys,)
            incoming = [laid_out([each[i] for each in dys], rows, length, 0) for i in range(len(ys))]
            grads = torch.autograd.grad(ys, leaves, incoming)
        return [*ys, *grads]

    alone = [run([[number]], lengths[number]) for number in range(len(lengths))]
    for rows, length in ways_of(lengths, padded):
        found = run(rows, length)
        for number, row, first, end in places_of(lengths, rows):
            for at, (mine, whole) in enumerate(zip(alone[number], found, strict=True)):
                same = torch.equal(mine[0], whole[row, first:end])
                assert same, f"tensor {at} of document {number}, {lengths[number]} tokens, differs in {rows} of {length}"
