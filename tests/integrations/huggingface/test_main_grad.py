"""Gradients that are added in fp32 where they are made, and their optimizer, against PyTorch's."""

import copy
import math
import sys

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import batch, both, made
from integrations.huggingface.trainer import trained

import onepass
from onepass.integrations import huggingface
from onepass.parallel import StepInBackward

pytestmark = pytest.mark.filterwarnings("ignore:max_norm is None")  # Trainer is imported by some tests, and stays


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


def train(steps, *pairs):
    """Train models, each with its optimizer, side by side."""
    for _ in range(steps):
        for model, optimizer in pairs:
            model(**batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


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


@pytest.mark.parametrize("groups", (False, True))
def test_layers_are_frozen_and_unfrozen_as_by_torch_optim(groups):
    model = made("Mistral")
    before = copy.deepcopy(model)
    for each in (model, before):
        each.model.layers[0].requires_grad_(False)
    applied = huggingface.apply(model, main_grad=True)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = applied.optimizer([{"params": list(model.parameters())}] if groups else None, **options)
    plain = torch.optim.AdamW(before.parameters(), **options)
    for asks in (False, True, False, True):
        for each in (model, before):
            each.model.layers[0].mlp.requires_grad_(asks)
            each.lm_head.requires_grad_(not asks)
        train(2, (model, optimizer), (before, plain))
        for (name, found), expected in zip(model.named_parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # transformers' and PEFT's own
@pytest.mark.parametrize("release", (False, True))
def test_adapters_that_come_after_apply_are_trained(release):
    peft = pytest.importorskip("peft")
    model, before, applied = both("Mistral", main_grad=True, release_main_grad=release)
    for each in (model, before):
        torch.manual_seed(3)
        options = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["input_layernorm"], "init_lora_weights": False}
        peft.get_peft_model(each, peft.LoraConfig(r=4, **options))
    optimizer, plain = applied.optimizer(lr=1e-2), torch.optim.AdamW(before.parameters(), lr=1e-2)
    train(3, (model, optimizer), (before, plain))
    for (name, found), expected in zip(model.named_parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4, msg=name)
    applied.undo()
    assert not any(hasattr(parameter, "main_grad") for parameter in model.parameters())


def test_undo_gives_gradients_back():
    model, before, applied = both("Llama", main_grad=True)
    model(**batch()).loss.backward()
    applied.undo()
    for each in (model, before):
        each(**batch()).loss.backward()
    assert not any(hasattr(p, "main_grad") for p in model.parameters())
    for found, expected in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


# ---- transformers' Trainer ----


@pytest.mark.parametrize("release", (False, True))
def test_trainer(tmp_path, release):
    """With accumulation and clipping, as without onepass."""
    model, before, applied = both("Llama", main_grad=True, release_main_grad=release)
    optimizer = applied.optimizer(lr=1e-2, weight_decay=0.1, max_norm=0.5)
    plain = torch.optim.AdamW(before.parameters(), lr=1e-2, weight_decay=0.1)
    found = trained(model, optimizer, tmp_path / "onepass")
    assert len(found) == 4
    expected = trained(before, plain, tmp_path / "before", max_grad_norm=0.5)
    assert found == pytest.approx(expected, rel=1e-3)
    for p, other in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=2e-3, atol=2e-3)


def test_trainer_resumes(tmp_path):
    """bf16 weights are as in a run that did not stop: their masters' other bits come from the checkpoint."""
    whole, resumed = made("Llama").bfloat16(), made("Llama").bfloat16()
    stopped = copy.deepcopy(whole)
    kept = {each: huggingface.apply(each, main_grad=True) for each in (whole, stopped, resumed)}
    options = {"lr": 1e-2, "weight_decay": 0.1, "max_norm": math.inf}
    optimizers = {each: applied.optimizer(**options) for each, applied in kept.items()}
    trained(whole, optimizers[whole], tmp_path / "whole")
    trained(stopped, optimizers[stopped], tmp_path / "run", steps=2, save_strategy="steps", save_steps=2)
    trained(resumed, optimizers[resumed], tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-2"))
    for (name, p), other in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert p.equal(other), name


def test_an_optimizer_beside_trainer_says_that_it_clips_nothing(monkeypatch):
    _, _, applied = both("Llama", main_grad=True)
    monkeypatch.setitem(sys.modules, "transformers.trainer", object())
    with pytest.warns(UserWarning, match=r"max_norm is None.* Trainer's max_grad_norm .* infinity"):
        applied.optimizer(lr=1e-2)
    applied.optimizer(lr=1e-2, max_norm=math.inf)
    monkeypatch.delitem(sys.modules, "transformers.trainer")
    applied.optimizer(lr=1e-2)


def test_trainers_own_optimizer_raises_at_the_first_step(tmp_path):
    model, _, applied = both("Llama", main_grad=True)
    with pytest.raises(RuntimeError, match=r"but is AdamW, .* use applied\.optimizer\(\.\.\.\), as .* optimizers=\(applied"):
        trained(model, None, tmp_path)
    applied.undo()
    before = model.lm_head.weight.clone()
    trained(model, None, tmp_path, steps=1)
    assert not model.lm_head.weight.equal(before)


def test_only_optimizers_that_can_read_no_gradient_raise():
    model, _, applied = both("Llama", main_grad=True)
    other = torch.nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters()).step()  # of another model
    mine = torch.optim.SGD(model.parameters())
    model(**batch()).loss.backward()
    with pytest.raises(RuntimeError, match="but is SGD"):
        mine.step()
    applied.main_grads.finish()
    mine.reads_main_grad = True  # by itself
    mine.step()
    del applied, mine.reads_main_grad
    model(**batch()).loss.backward()
    mine.step()


def test_zero_grad_of_model_and_optimizer():
    """Both drop gradients. After a step that cleared them they write nothing."""
    model, _, applied = both("Llama", main_grad=True)
    optimizer, (buffer, *_) = applied.optimizer(), applied.main_grads.buffers
    for each in (model, optimizer):
        model(**batch()).loss.backward()
        assert buffer.any()
        each.zero_grad()
        assert not buffer.any()
    model(**batch()).loss.backward()
    optimizer.step()
    version = buffer._version
    for each in (model, optimizer):
        each.zero_grad()
    assert buffer._version == version and not buffer.any()
    copied = copy.deepcopy(model)
    copied(**batch()).loss.backward()
    copied.zero_grad()
    assert all(p.grad is None for p in copied.parameters())


def test_a_closure_makes_the_gradients():
    """Lightning gives the optimizer all of a step: forward, zero_grad and backward."""
    losses = []
    for by_closure in (True, False):
        torch.manual_seed(0)
        model, _, applied = both("Llama", main_grad=True)
        optimizer = applied.optimizer(lr=1e-2)

        def closure(model=model, optimizer=optimizer):
            loss = model(**batch()).loss
            optimizer.zero_grad()
            loss.backward()
            return loss

        for _ in range(3):
            if by_closure:
                losses.append(optimizer.step(closure).item())
            else:
                losses.append(closure().item())
                assert optimizer.step() is None
    assert losses[:3] == losses[3:] and losses[2] < losses[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_main_grad_the_optimizer_is_torchs_over_grad(dtype):
    losses = []
    for fused in (True, False):
        torch.manual_seed(0)
        model, _, applied = both("Llama")
        model.to(dtype)
        model.model.embed_tokens.weight.requires_grad_(False)
        trained = [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.1}]
        optimizer = applied.optimizer(trained, lr=1e-2) if fused else torch.optim.AdamW(trained, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
        losses.append([])
        for _ in range(4):
            loss = model(**batch()).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0][3] < losses[0][0] - 0.1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5 if dtype is torch.float32 else 2e-3)


LEAN = ({"moments": "8bit"}, {"in_backward": True}, {"moments": "8bit", "in_backward": True, "offload": "state"})


@pytest.mark.parametrize("lean", LEAN, ids=str)
def test_lean_optimizers_train_alike(lean):
    """By main_grad and by .grad: masters in fp32 beside fp32 weights, and moments of embeddings in fp32."""
    losses = []
    for options in ({}, lean):
        for main_grad in (False, True):
            torch.manual_seed(0)
            model, _, applied = both("Llama", main_grad=main_grad)
            optimizer = applied.optimizer(lr=1e-2, **options)
            state = optimizer.state[model.model.embed_tokens.weight]
            assert "exp_avg" in state
            steps = []
            for _ in range(4):
                loss = model(**batch()).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append(loss.item())
            losses.append(torch.tensor(steps))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    for each in losses[2:]:
        torch.testing.assert_close(each, losses[0], rtol=0.02, atol=0.02)
        assert each[-1] < 0.9 * each[0]


def test_without_main_grad_it_steps_in_backward():
    torch.manual_seed(0)
    model, _, applied = both("Llama")
    model.bfloat16()
    optimizer = applied.optimizer(lr=1e-2, moments="8bit", masters=True, in_backward=StepInBackward(max_norm=1.0))
    losses = []
    for _ in range(4):
        loss = model(**batch()).loss
        loss.backward()
        assert sum(p.grad is not None for p in model.parameters()) == 0  # one part has them all
        norm = optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1 and norm.isfinite()


def test_bad_input():
    lean = huggingface.apply(made("Llama"), main_grad=True)
    with pytest.raises(ValueError, match=r"max_norm must be in_backward's, 5.0, or None, but is 1.0"):
        lean.optimizer(max_norm=1.0, in_backward=StepInBackward(max_norm=5.0))
    applied = huggingface.apply(made("Llama"))
    with pytest.raises(ValueError, match=r"max_norm must be None without main_grad, but is 1.0: .*clip_grad_norm_"):
        applied.optimizer(max_norm=1.0)
    with pytest.raises(ValueError, match="release_main_grad must be False without main_grad"):
        huggingface.apply(made("Llama"), release_main_grad=True)
