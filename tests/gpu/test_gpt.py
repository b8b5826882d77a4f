"""A GPT on a GPU: fused against reference, nobody waits, repeatable, as a CUDA graph; the grouped product."""

import pytest
import torch
from gpu.calls import captured, nobody_waits, other_stream

from onepass.gpt import Model, preset
from onepass.kernels import grouped_product
from onepass.ops.linear.grouped import grouped_linear
from onepass.product import grouped as gradients_grouped
from onepass.train.batches import TokenBatch
from onepass.train.layout import ParallelLayout
from onepass.train.memory import memory_of_run
from onepass.train.options import Options
from onepass.train.packing import Documents, PackedBatches
from onepass.train.setup import make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VARIANTS = {
    "llama": {"num_query_groups": 2},
    "norms alone": {"norm_linear_fusion": False, "qk_layernorm": True},
    "gpt-2": {
        "add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
        "gated_linear_unit": False, "activation_func": "gelu",
    },
    "experts": {"num_moe_experts": 8, "moe_ffn_hidden_size": 256, "moe_aux_loss_coeff": 0.01},
    "recomputed": {"recompute_granularity": "full"},
    "products again": {"recompute_granularity": "selective"},
    "native": {"cross_entropy_fusion_impl": "native"},
}  # fmt: skip
variants = pytest.mark.parametrize("name", VARIANTS)


def given(config):
    tokens = torch.randint(config.vocab_size, (2, 257), generator=torch.Generator().manual_seed(1)).cuda()
    return tokens[:, :-1], tokens[:, 1:]


def gathering(model):
    for parameter in model.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter, dtype=torch.float32), False
    return model


def gradients(model, *call):
    loss = model(*call)
    loss.backward()
    return loss.detach(), {name: t.grad for name, t in model.named_parameters()}


@variants
def test_fused_is_as_the_reference_in_fp32(name):
    config = preset("tiny", **VARIANTS[name])
    (loss, got), (expected, wanted) = (
        gradients(Model(c, seed=1, device="cuda"), *given(c)) for c in (config, config.reference())
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for key, grad in wanted.items():
        assert (got[key] - grad).norm() <= 1e-5 * grad.norm(), key


@variants
def test_nobody_waits_and_main_grad_is_the_same_every_time(name):
    config = preset("tiny", params_dtype="bf16", **VARIANTS[name])
    model, call = gathering(Model(config, seed=1, device="cuda")), given(config)
    model(*call).backward()
    found = []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.main_grad.zero_()
            parameter.grad = None
        with nobody_waits():
            model(*call).backward()
        found.append([parameter.main_grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    names = [key for key, parameter in model.named_parameters() if not parameter.main_grad.any()]
    assert all(key.endswith("router.weight") for key in names)  # PyTorch's own product


@other_stream
@variants
def test_a_graphs_replays_are_microbatches(name):
    config = preset("tiny", params_dtype="bf16", **VARIANTS[name])
    model, call = gathering(Model(config, seed=1, device="cuda")), given(config)

    def step():
        loss = model(*call)
        loss.backward()
        return loss.detach()

    loss, graph = captured(step)
    for parameter in model.parameters():
        parameter.main_grad.zero_()
    expected = step()
    once = [parameter.main_grad.clone() for parameter in model.parameters()]
    for _ in range(2):
        graph.replay()
    assert torch.equal(loss, expected)
    for parameter, one in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.main_grad, 3 * one, rtol=1e-5, atol=1e-7)


@other_stream
@pytest.mark.parametrize("recipe", ("delayed", "tensorwise", "rowwise"))
def test_graphed_steps_in_eight_bits_are_those_without_a_graph(recipe):
    config = preset("tiny", params_dtype="bf16", fp8_format="hybrid", fp8_recipe=recipe)
    tokens = torch.randint(config.vocab_size, (4, 8, 129), generator=torch.Generator().manual_seed(1)).cuda()
    found = []
    for graphs in (False, True):
        options = Options(micro_batch_size=4, cuda_graphs=graphs, release_main_grads=False)
        made = make(config, options, ParallelLayout(torch.device("cuda", 0)))
        for batch in tokens:
            loss, norm = made.steps.run(TokenBatch(batch[:, :-1], batch[:, 1:]))
            made.update.step(1e-2)
            found.append((loss.item(), norm.item()))
        found.append(made.steps.loss(TokenBatch(tokens[0][:, :-1], tokens[0][:, 1:])).item())
    half = len(found) // 2
    assert found[:half] == found[half:]


def batches(config, period, size=8, length=128):
    """Rows of packed documents of `period` tokens."""
    numbers = torch.randint(1, config.vocab_size, (20_000,), generator=torch.Generator().manual_seed(period))
    numbers[period::period] = 0
    arguments = numbers.numpy(), size, length, 3, 0, 1, torch.device("cuda", 0)
    return PackedBatches(Documents(numbers.numpy(), 0), *arguments)


@other_stream
@pytest.mark.parametrize("variant", ("llama", "norms alone", "gpt-2", "recomputed", "adapters"))
def test_graphed_steps_of_packed_rows_are_those_without_a_graph(variant):
    """The second steps have more documents than the first graph takes."""
    config = preset("tiny", params_dtype="bf16", **VARIANTS.get(variant, {}))
    found = []
    for graphs in (False, True):
        rank = 8 if variant == "adapters" else None
        options = Options(micro_batch_size=4, cuda_graphs=graphs, release_main_grads=False, lora_rank=rank)
        made = make(config, options, ParallelLayout(torch.device("cuda", 0)))
        for period in (50, 5, 20):
            for step in range(2):
                loss, norm = made.steps.run(batches(config, period).of_step(step))
                made.update.step(1e-2)
                found.append((loss.item(), norm.item()))
    half = len(found) // 2
    assert found[:half] == found[half:]


@pytest.mark.parametrize("variant", ("llama", "norms alone", "gpt-2"))
def test_packed_rows_wait_for_nobody_and_are_as_by_pytorch(variant):
    config = preset("tiny", params_dtype="bf16", **VARIANTS[variant])
    batch = batches(config, 20).of_step(0)
    model, plain = (Model(each, device="cuda", seed=1) for each in (config, config.reference()))
    loss = model(batch.tokens, batch.labels, **batch.documents)
    with nobody_waits():
        loss = model(batch.tokens, batch.labels, **batch.documents)
        loss.backward()
    expected = plain(batch.tokens, batch.labels, **batch.documents)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=2e-3)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= 0.05 * other.grad.norm()


def test_wrong_boundaries_of_packed_rows_give_nan():
    config = preset("tiny", params_dtype="bf16")
    batch = batches(config, 20).of_step(0)
    wrong = batch.cu_seqlens.clone()
    wrong[3, -1] -= 1
    for each in (config, config.reference()):
        assert Model(each, device="cuda", seed=1)(batch.tokens, cu_seqlens=wrong).isnan().all()


# ---- the grouped product ----


@pytest.mark.parametrize("sizes", ((30, 0, 1, 69, 0), (0, 0, 8)), ids=str)
def test_pytorchs_grouped_product_is_the_loop(sizes, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(sum(sizes), 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(len(sizes), 48, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    assert grouped_product.torch_can_group(x, weight)

    def results():
        y = grouped_linear(x, weight, ends)
        return [y, *torch.autograd.grad(y.sum(), (x, weight))]

    with nobody_waits():
        got = results()
    for module in (grouped_product, gradients_grouped):
        monkeypatch.setattr(module, "torch_can_group", lambda *_: False)
    for one, other in zip(got, results(), strict=True):
        assert (one.float() - other.float()).norm() <= 4e-3 * other.float().norm()
    assert not any(got[2][at].any() for at, size in enumerate(sizes) if not size)


@pytest.mark.parametrize("change", ("fp32", "unaligned", "autocast"))
def test_what_the_grouped_product_takes(change):
    x, weight = torch.ones(4, 16, device="cuda"), torch.ones(2, 12 if change == "unaligned" else 8, 16, device="cuda")
    x, weight = (x, weight) if change == "fp32" else (x.bfloat16(), weight if change == "autocast" else weight.bfloat16())
    assert grouped_product.torch_can_group(x, weight) is (change == "autocast")
    y = grouped_linear(x, weight, torch.tensor([1, 4], device="cuda", dtype=torch.int32))
    assert (y == 16).all() and y.dtype is x.dtype


@pytest.mark.parametrize("granularity", (None, "selective", "full"))
def test_a_step_takes_the_memory_that_is_planned(granularity):
    config = preset("124M", params_dtype="bf16", recompute_granularity=granularity)
    options, layout = Options(seq_length=1024, micro_batch_size=16, cuda_graphs=False), ParallelLayout(torch.device("cuda"))
    tokens = torch.randint(config.vocab_size, (16, 1025), device="cuda")
    before = torch.cuda.memory_allocated()
    made = make(config, options, layout)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        made.steps.run(TokenBatch(tokens[:, :-1], tokens[:, 1:]))
        made.update.step(1e-4)
    planned = memory_of_run(config, options, layout)
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(planned.total, rel=0.05)
