"""Selective recomputation: losses and gradients keep their bits, and backward makes each product again once."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from gpt.test_packing import boundaries, drawn
from torch.multiprocessing.reductions import StorageWeakRef

import onepass
from onepass.gpt import Config, Model, add_adapters, model, parts
from onepass.gpt.memory import recomputed_share
from onepass.ops.attention import by_pytorch
from onepass.parallel import MainGrads
from onepass.runtime import recomputed as hooks
from onepass.runtime.recomputed import recomputed
from onepass.testing.mutants import mutate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 37,
    "max_position_embeddings": 16, "params_dtype": "bf16",
}  # fmt: skip
GPT2 = {
    "add_bias_linear": True, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute",
    "gated_linear_unit": False, "activation_func": "gelu",
}  # fmt: skip
CASES = {
    "llama": {},
    "fp32": {"params_dtype": "fp32"},
    "gpt-2, dropout": GPT2 | {"hidden_dropout": 0.2},
    "dropout in attention": {"attention_dropout": 0.2},
    "interleaved": {"rotary_interleaved": True, "rotary_percent": 0.5},
    "norms of heads": {"qk_layernorm": True},
    "norms alone": {"norm_linear_fusion": False},
    "experts": {"num_moe_experts": 3, "moe_aux_loss_coeff": 0.1},
    "experts, unfused activation": {"num_moe_experts": 3, "bias_activation_fusion": False},
    "eight bits": {"fp8_format": "hybrid"},
    "eight bits, by tensor": {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"},
    "eight bits, experts": {"fp8_format": "hybrid", "num_moe_experts": 3},
    "activations in eight bits": {"activation_func_fp8_input_store": True},
    "two tokens more": {"mtp_num_layers": 2},
    "rotated by PyTorch": {"apply_rope_fusion": False},
    "layer norms of heads": {"qk_layernorm": True, "normalization": "LayerNorm"},
    "no positions": {"position_embedding_type": "none"},
    "no fusion": None,
}
PACKED = ("llama", "gpt-2, dropout", "dropout in attention", "experts", "eight bits", "two tokens more", "no fusion")
IN_INTERPRETER = ("experts", "eight bits", "gpt-2, dropout")  # beside a llama
PLAIN = ("attention_fusion", "bias_activation_fusion", "norm_linear_fusion", "norm_fusion", "apply_rope_fusion")


def configured(name, granularity):
    given = dict.fromkeys(PLAIN, False) if CASES[name] is None else CASES[name]
    return Config(**SHAPE | given, recompute_granularity=granularity)


def trained(config, packed=False, lora=False, passes=1, autocast=False):
    """Return two steps' losses and gradients, of a model whose eight-bit scales have a history by then."""
    network, (tokens, labels) = Model(config, seed=3, device=DEVICE), (t.to(DEVICE) for t in drawn())
    if lora:
        add_adapters(network, 4)
    main_grads, found = MainGrads(network), []
    options = {"cu_seqlens": boundaries().to(DEVICE)} if packed else {}
    for step in range(2):
        torch.manual_seed(step)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = network(tokens, labels, **options)
        with main_grads.accumulate():
            for _ in range(passes - 1):
                loss.backward(retain_graph=True)
        loss.backward()
        main_grads.finish()
        found += [loss.detach(), *(p.main_grad.clone() for _, p in main_grads.named)]
        main_grads.zero_()
    main_grads.close()
    return found


def by_grad(kind, config):
    network, (tokens, labels) = kind(config, seed=3), drawn()
    loss = network(tokens, labels)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in network.parameters())]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize(("name", "packed"), [*((name, False) for name in CASES), *((name, True) for name in PACKED)])
def test_the_bits_are_those_of_a_step_that_keeps_all(name, packed, backend):
    if backend == "triton":
        pytest.importorskip("triton")
        if DEVICE == "cpu" and name not in ("llama", *(() if packed else IN_INTERPRETER)):
            pytest.skip("takes long in the interpreter")
    with onepass.use_backend(backend):
        assert same(*(trained(configured(name, granularity), packed) for granularity in (None, "selective")))


@pytest.mark.parametrize("options", ({"lora": True}, {"passes": 2}, {"autocast": True}), ids=str)
def test_with_adapters_in_two_passes_and_under_autocast(options):
    name = "fp32" if "autocast" in options else "llama"
    with onepass.use_backend("torch"):
        assert same(*(trained(configured(name, granularity), **options) for granularity in (None, "selective")))


@pytest.mark.parametrize("name", ("llama", "experts", "no fusion", "dropout in attention"))
def test_backward_makes_each_product_again_once(name, monkeypatch):
    """Two a block, and one where attention is PyTorch's, which keeps queries and keys of its own, or the MLP is experts."""
    calls, memory, real = Counter(), [], parts.Residual.take

    def take(*arguments):
        calls[torch.is_grad_enabled()] += 1
        taken = real(*arguments)
        memory.append(StorageWeakRef(taken[0][0].untyped_storage()))
        return taken

    config = configured(name, "selective")
    network, (tokens, labels) = Model(config, seed=3), drawn()
    monkeypatch.setattr(parts.Residual, "take", take)
    loss = network(tokens, labels)
    again = 2 - (name == "experts") - (name in ("no fusion", "dropout in attention"))
    assert sum(not each.expired() for each in memory) == 2 * (name == "no fusion")  # nobody else keeps it: values alone are there
    loss.backward()
    assert all(each.expired() for each in memory)
    assert calls == {True: (4, 2)[name == "experts"], False: 2 * again}
    with torch.no_grad():
        network(tokens, labels)
    assert calls[False] == 2 * again + calls[True]


@pytest.mark.parametrize("depths", (None, 1))
def test_the_first_blocks_alone(depths, monkeypatch):
    calls, real = Counter(), parts.Residual.take
    monkeypatch.setattr(parts.Residual, "take", lambda self, *a: calls.update([torch.is_grad_enabled()]) or real(self, *a))
    one = configured("llama", "selective").replace(num_layers=3, recompute_num_layers=2, mtp_num_layers=depths)
    found = by_grad(Model, one)
    assert calls[False] == 2 * 2  # of two blocks; a depth is none of them
    assert same(found, by_grad(Model, one.replace(recompute_granularity=None, recompute_num_layers=None)))


def test_share_of_flops():
    config = Config(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, vocab_size=256)
    step = config.flops_per_token(32)
    selective, full = (recomputed_share(config.replace(recompute_granularity=each), 32) for each in ("selective", "full"))
    assert selective * step == 2 * 2 * 64 * (3 * 64 + 2 * 96)
    assert full * step == 2 * 2 * (64 * (3 * 64 + 64 + 2 * 96) + 2 * 64 + 32 * 64 / 1)  # with its norms' weights, and attention
    assert recomputed_share(config, 32) == 0


def test_a_backward_under_autocast_of_a_forward_without():
    found = []
    for granularity in (None, "selective"):
        made = Model(
            Config(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, recompute_granularity=granularity), seed=0
        )
        ids = torch.arange(8)[None]
        loss = made(ids, ids).mean()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        found.append([p.grad for p in made.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-3)


# ---- recomputed() by itself ----


def test_an_op_that_keeps_its_own_result_goes_with_it():
    """A forward that has no backward leaves nothing behind."""
    x = torch.randn(4, requires_grad=True)
    y = x * 2
    with recomputed(y, lambda: x * 2):
        kept = torch.exp(y)  # saves its result
    gone = weakref.ref(kept)
    del kept, y
    gc.collect()
    assert gone() is None


def test_only_the_tensor_is_let_go_of_and_made_once():
    calls = []
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def make():
        calls.append(torch.is_grad_enabled())
        return x * 2

    y = make()
    calls.clear()
    noted = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: noted.append(t) or t, lambda t: t), recomputed(y, make):
        first, second = y.unflatten(-1, (2, 4)).unbind(1)
        z = (y * weight).exp() * first.mul(second).sum()
    assert not any(t.data_ptr() == y.data_ptr() for t in noted)  # what is kept goes to the block around
    assert any(t is weight for t in noted)
    gone = weakref.ref(y)
    del y, first, second
    gc.collect()
    assert gone() is None
    grads = torch.autograd.grad(z.sum(), (x, weight))
    assert calls == [False]
    plain = 2 * x
    parts_ = plain.unflatten(-1, (2, 4)).unbind(1)
    wanted = torch.autograd.grad(((plain * weight).exp() * parts_[0].mul(parts_[1]).sum()).sum(), (x, weight))
    assert same(grads, wanted)


def test_inference_and_compilers_make_nothing_again():
    network, (tokens, labels) = Model(configured("fp32", "selective"), seed=3), drawn()
    with torch.inference_mode():
        wanted = network(tokens, labels)
    compiled = torch.compile(network, backend="aot_eager")
    loss = compiled(tokens, labels)
    loss.backward()
    torch.testing.assert_close(loss.detach(), wanted.clone())


MUTANTS = {
    "rotated back": (by_pytorch, "rotate_again", "interleaved, False", "interleaved, True"),
    "made of another input": (parts, "Residual.again", "h = h.detach()", "h = 2 * h.detach()"),
    "all memory is the tensor's": (hooks, "_Recomputed.pack", "!= self.storage", "== 0"),
    "the first part for all": (hooks, "_Recomputed.pack", "tensor.storage_offset()", "0"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name):
    file, function, old, new = MUTANTS[name]
    config = configured("fp32", "selective")
    with onepass.use_backend("torch"):
        kept = by_grad(Model, config.replace(recompute_granularity=None))
        assert same(kept, by_grad(Model, config))
    mutant = mutate(file, function, old, new, entry=model)
    try:
        wrong = by_grad(mutant.Model, config)
    except (RuntimeError, TypeError):
        return
    assert not same(kept, wrong)
