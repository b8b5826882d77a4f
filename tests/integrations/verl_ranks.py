"""Ranks of tests/integrations/test_verl.py: verl's output processor over tensor-parallel ranks, and what it should return."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from parallel.meeting import join

import onepass
from onepass.integrations import verl

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 12, 16, 50, 0.7


def operands(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(*size, generator=generator) for size in ((TOKENS, 1, WIDTH), (VOCABULARY, WIDTH)))
    return hidden, weight, torch.randint(VOCABULARY, (1, TOKENS), generator=generator)


def expected():
    """Return log_probs, entropies and both gradients by all logits."""
    hidden, weight, labels = operands()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = ((hidden[:, 0] @ weight.T) / TEMPERATURE).log_softmax(-1)
    log_prob, entropy = log_p.gather(-1, labels[0].unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    (2 * log_prob + 0.5 * entropy).sum().backward()
    return log_prob.detach(), entropy.detach(), hidden.grad, weight.grad


def run(rank, ranks, folder, backend):
    from megatron.core import parallel_state
    from verl.models.mcore import model_forward_fused as fused

    join(rank, ranks, folder, backend)
    parallel_state.initialize_model_parallel(ranks)
    seams = verl.install()
    found = {"said": str(seams)}
    for sequence in (False, True):
        hidden, weight, labels = operands()
        hidden = (hidden.chunk(ranks)[rank] if sequence else hidden).clone().requires_grad_()
        layer = SimpleNamespace(weight=weight.chunk(ranks)[rank].clone().requires_grad_())
        with onepass.use_backend("torch"):
            output = fused.fused_output_processor(
                hidden_states=hidden, output_layer=layer, output_weight=None, labels=labels, input_ids=None,
                context=fused.FusedOutputProcessorContext(TEMPERATURE),
                config=SimpleNamespace(sequence_parallel=sequence, config_logger_dir=""),
            )  # fmt: skip
            (2 * output.log_probs + 0.5 * output.entropy).sum().backward()
        found[sequence] = output.log_probs.detach(), output.entropy.detach(), hidden.grad, layer.weight.grad
    seams.undo()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
