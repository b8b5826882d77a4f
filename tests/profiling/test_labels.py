"""Labels without a loss: counted as the step runs, and named with what their logits cost."""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import onepass
from onepass.profiling.record import LabelCounter
from onepass.runtime.ceilings import Ceilings

CEILINGS = Ceilings(copy_gbs=5.0, copy_bytes=1 << 20, matmul_tflops=None)


@pytest.fixture
def nothing_compiled():
    torch._dynamo.utils.counters.clear()


def ignored(*losses):
    with LabelCounter() as counter:
        for loss in losses:
            loss()
    return counter.ignored()


def test_labels_are_counted_over_all_losses():
    logits, labels = torch.randn(8, 5, requires_grad=True), torch.tensor([-100, 1, 2, 3, 4, -100, -100, 0])
    cubes = torch.randn(2, 5, 4)
    assert ignored(lambda: F.cross_entropy(logits, labels).backward()) == 3 / 8
    assert ignored(lambda: F.cross_entropy(cubes, labels.view(2, 4))) == 3 / 8
    assert (
        ignored(lambda: F.cross_entropy(logits, labels.clamp(min=0), ignore_index=0), lambda: F.cross_entropy(logits, labels))
        == 7 / 16
    )
    assert ignored(lambda: logits.sum()) == 0.0


def test_the_counter_changes_nothing():
    logits, labels = torch.randn(6, 5), torch.tensor([-100, 1, 2, 3, 4, -100])
    with LabelCounter():
        found = F.cross_entropy(logits, labels)
    assert torch.equal(found, F.cross_entropy(logits, labels))


@pytest.mark.parametrize(("prompt", "says"), [(0, False), (12, True)])
@pytest.mark.usefixtures("nothing_compiled")
def test_a_profile_names_prompts_that_have_no_loss(prompt, says):
    head, hidden = nn.Linear(16, 9000, bias=False), torch.randn(16, 16)
    labels = torch.randint(9000, (16,))
    labels[:prompt] = -100

    found = onepass.profile(lambda: F.cross_entropy(head(hidden), labels).backward(), warmup=0, steps=1, ceilings=CEILINGS)
    named = [suggestion for suggestion in found.suggestions if "hidden[kept]" in suggestion.call]
    assert bool(named) == says
    assert any(suggestion.call == "onepass.linear_cross_entropy(hidden, weight, labels)" for suggestion in found.suggestions)
    if says:
        assert named[0].saw.startswith("75% of the labels are ignore_index") and named[0].us > 0


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_code_is_not_watched():
    counter = LabelCounter()
    assert counter.watch() is counter
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert counter.watch() is not counter
