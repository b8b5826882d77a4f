"""Gradients that are added in fp32 where they are made, and their optimizer, against PyTorch's."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import batch, both, made

import onepass
from onepass.integrations import huggingface


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


@pytest.mark.parametrize("family", ("Llama", "Gemma3Text", "Phi3", "GPT2", "GPTNeoX", "OPT", "Qwen3Moe"))
@pytest.mark.parametrize("backwards", (1, 3))
def test_gradients_are_the_same(family, backwards):
    model, before, applied = both(family, main_grad=True)
    for _ in range(backwards):
        for each in (model, before):
            each(**batch()).loss.backward()
    applied.main_grads.finish()
    largest = max(p.grad.norm() for p in before.parameters())
    for (name, found), expected in zip(model.named_parameters(), before.parameters(), strict=True):
        assert found.grad is None
        apart = (found.main_grad - expected.grad).norm()
        assert apart < 2e-5 * expected.grad.norm() + 1e-6 * largest, name


def test_what_is_laid_together_is_added_at_once():
    model, _, _applied = both("Llama", main_grad=True)
    attention = model.model.layers[0].self_attn
    places = [getattr(attention, name).weight.main_grad for name in ("q_proj", "k_proj", "v_proj")]
    assert places[0].data_ptr() + places[0].nbytes == places[1].data_ptr()
    assert places[1].data_ptr() + places[1].nbytes == places[2].data_ptr()
    model(**batch()).loss.backward()
    assert all(place.abs().sum() > 0 for place in places)


@pytest.mark.parametrize("release", (False, True))
@pytest.mark.parametrize("max_norm", (None, 0.5))
def test_training_is_adamws(max_norm, release):
    model, before, applied = both("Llama", main_grad=True, release_main_grad=release)
    memory = [buffer.untyped_storage() for buffer in applied.main_grads.buffers]
    options = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}
    optimizer, plain = applied.optimizer(max_norm=max_norm, **options), torch.optim.AdamW(before.parameters(), **options)
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 0.1, 1.0, 3) for each in (optimizer, plain)]
    for _ in range(5):
        assert any(each.nbytes() for each in memory) != release
        losses = []
        for each in (model, before):
            for _ in range(2):
                loss = each(**batch()).loss / 2
                loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
        norm = optimizer.step()
        if max_norm is not None:
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(before.parameters(), max_norm), rtol=1e-4, atol=1e-4)
        plain.step()
        for each in (optimizer, plain, *schedules):
            each.zero_grad() if hasattr(each, "zero_grad") else each.step()
    assert loss < 4


def test_undo_gives_gradients_back():
    model, before, applied = both("Llama", main_grad=True)
    model(**batch()).loss.backward()
    applied.undo()
    for each in (model, before):
        each(**batch()).loss.backward()
    assert not any(hasattr(p, "main_grad") for p in model.parameters())
    for found, expected in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_bad_input():
    applied = huggingface.apply(made("Llama"))
    with pytest.raises(ValueError, match="main_grad must be True in apply"):
        applied.optimizer()
    with pytest.raises(ValueError, match="release_main_grad must be False without main_grad"):
        huggingface.apply(made("Llama"), release_main_grad=True)
    _, _, applied = both("Llama", main_grad=True)
    with pytest.raises(TypeError, match="closure must be None"):
        applied.optimizer().step(lambda: 0)
