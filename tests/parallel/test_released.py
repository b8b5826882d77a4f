"""`MainGrads(release=True)`: the same bits as with buffers that stay, and memory for as long as a step's gradients need it."""

import gc
import weakref
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from ops.linear_cross_entropy_oracle import ALL, op
from parallel.mixed_model import BF16, BYTES, FP32, Mixed, backwards
from parallel.poisoned import have_memory, poisoned
from torch import nn

import onepass
from onepass.gpt import Model, preset
from onepass.gradients import adamw_kernels as kernels
from onepass.gradients import releasable_storage as released
from onepass.gradients import sequence_parallel
from onepass.gradients.main_grad import add_gradient
from onepass.gradients.packed_params import concat, pack
from onepass.gradients.releasable_storage import storage_id
from onepass.kernels.language import triton
from onepass.parallel import AdamW, DeferredWgrad, MainGrads, MasterWeights
from onepass.runtime.dispatch import TORCH

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.skipif(triton is None, reason="needs Triton"))]
SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 16}
LLAMA = {
    "normalization": "RMSNorm", "add_bias_linear": False, "gated_linear_unit": True, "activation_func": "silu",
    "position_embedding_type": "rope", "ffn_hidden_size": 48,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _all_of_it():
    with poisoned():
        yield


# ---- the same bits ----


def gpt(**changes):
    return Model(preset("tiny", params_dtype="bf16", **SMALL | changes))


def steps_of_gpt(release, changes, microbatches=2, deferred=False):
    """Norms and weights of three steps; a parameter that nobody uses, and one that is used in the first step only."""
    torch.manual_seed(0)
    model: nn.Module = gpt(**changes)
    model.unused, model.once = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))
    main_grads = MainGrads(model, release=release, bucket_bytes=2048)
    optimizer = AdamW(main_grads, lr=1e-2)
    later = DeferredWgrad()
    if deferred:
        later.attach(model)
    norms = []
    for step in range(3):
        tokens = torch.randint(40, (microbatches, 2, 9), generator=torch.Generator().manual_seed(step))
        main_grads.zero_()
        for at, part in enumerate(tokens):
            with nullcontext() if at == microbatches - 1 else main_grads.accumulate():
                loss = model(part[:, :-1], part[:, 1:])
                (loss + model.once.sum() if step == 0 else loss).backward()
        later.flush()
        main_grads.finish()
        norms.append(optimizer.step(1.0, zero=True).item())
    return norms, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(one, two):
    assert one[0] == two[0] and all(torch.equal(weight, two[1][name]) for name, weight in one[1].items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changes", [{}, LLAMA, {"num_moe_experts": 2}], ids=["gpt2", "llama", "experts"])
def test_a_gpts_steps_are_the_same_bits(changes, backend):
    changes = changes | ({"num_layers": 1} if backend == "triton" else {})  # which takes seconds in the interpreter
    with onepass.use_backend(backend):
        assert_same(steps_of_gpt(False, changes), steps_of_gpt(True, changes))


@pytest.mark.parametrize("how", [{"deferred": True}, {"microbatches": 1}], ids=str)
def test_and_however_gradients_are_made(how):
    changes = {"untie_embeddings_and_output_weights": True} if "deferred" in how else {}
    with onepass.use_backend("torch"):
        assert_same(steps_of_gpt(False, changes, **how), steps_of_gpt(True, changes, **how))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_of_pytorchs_layers_and_by_master_weights(dtype):
    """Gradients that come as .grad, tied ones, and one that is unused."""
    found = []
    for release in (False, True):
        model = Mixed(dtype, FP32)
        main_grads = MainGrads(model, bucket_bytes=BYTES, release=release)
        weights = MasterWeights(main_grads, lambda groups: torch.optim.AdamW(groups, lr=0.02))
        norms = []
        for step in range(3):
            main_grads.zero_()
            backwards(main_grads, model, 0, first=10 * step)
            main_grads.finish()
            norms.append(main_grads.clip_(0.5).item())
            weights.step()
        found.append((norms, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}))
    assert_same(*found)


@pytest.mark.parametrize(
    ("way", "scale", "deferred", "zeros"),
    [
        (("known_grad_scale", 6, ALL), 1.0, False, False),
        (("known_grad_scale", 20, ALL), 1.0, False, False),
        (("again", 6, ALL), None, False, False),
        (("again", 6, ALL), None, True, False),
        (("again", 6, 20), None, False, True),  # a block of the vocabulary comes first, which is a part of the weight
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("asks", [True, False], ids=["hidden asks", ""])
def test_a_heads_first_chunk_is_written_over_what_is_there(asks, dtype, way, scale, deferred, zeros):
    found = []
    for release in (False, True):
        torch.manual_seed(0)
        head, hidden, labels = nn.Linear(12, 70, bias=False, dtype=dtype), torch.randn(20, 12, dtype=dtype), torch.arange(20)
        main_grads = MainGrads(head, release=release)
        later, cleared = DeferredWgrad() if deferred else None, set()
        with patch.object(torch.Tensor, "zero_", _noting(cleared)):
            for _ in range(2):
                main_grads.zero_()
                for _ in range(2):
                    with main_grads.accumulate():
                        op(way, grad_scale=scale, deferred=later)(hidden.requires_grad_(asks), head.weight, labels).backward()
                        if later is not None:
                            later.flush()
        assert (storage_id(main_grads.buffers[0]) in cleared) is (zeros or not release)
        main_grads.finish()
        found.append(head.weight.main_grad.clone())
    assert found[0].any() and torch.equal(*found)


def _noting(cleared):
    """Tensor.zero_, which tells whose storage it was."""

    def zero_(tensor):
        cleared.add(storage_id(tensor))
        return tensor.fill_(0.0)

    return zero_


def test_sparse_gradients():
    embedding = nn.Embedding(9, 8, sparse=True)
    with torch.sparse.check_sparse_tensor_invariants(False):
        main_grads = MainGrads(embedding, release=True)
        for _ in range(2):
            main_grads.zero_()
            embedding(torch.tensor([1, 1, 4])).sum().backward()
            main_grads.finish()
    assert embedding.weight.main_grad[:, 0].tolist() == [0.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_compiled_by_inductor_which_adds_in_place():
    """A graph in which weights are used twice, and one is tied."""
    found = []
    for release in (False, True):
        torch._dynamo.reset()
        model = Mixed()
        main_grads = MainGrads(model, bucket_bytes=BYTES, release=release)
        compiled, grads = torch.compile(model), []
        for step in range(2):
            main_grads.zero_()
            with main_grads.accumulate():
                for microbatch in range(2):
                    tokens = torch.randint(11, (6, 4), generator=torch.Generator().manual_seed(2 * step + microbatch))
                    compiled(tokens).square().mean().backward()
            main_grads.finish()
            grads.append({name: parameter.main_grad.clone() for name, parameter in main_grads.named})
        found.append(grads)
    for one, two in zip(*found, strict=True):
        assert all(torch.equal(grad, two[name]) for name, grad in one.items())


def test_a_compiler_that_copies_what_ops_write_to_is_refused():
    first, second = (onepass.nn.Linear(8, 8, bias=False) for _ in range(2))
    main_grads = MainGrads(nn.ModuleList([first, second]), release=True)
    compiled = torch.compile(first, backend="aot_eager")
    main_grads.zero_()
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):  # PyTorch's: there is nothing to copy
        compiled(torch.randn(3, 8)).sum().backward()
    main_grads.zero_()
    y = second(compiled(torch.randn(3, 8)))
    refused = "but a compiler copied it before, as all but Inductor do"
    if TORCH < (2, 11):  # autograd refuses it by itself
        refused = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=refused):
        y.sum().backward()  # the second's gradient has brought memory


@pytest.mark.parametrize(
    "which", [slice(0, 3), slice(0, 2), slice(1, 3), slice(None, None, -1)], ids=["all", "two", "the others", "turned round"]
)
@pytest.mark.parametrize("columns", [8, 64])  # of 8 main_grads have gaps between them
def test_several_as_one(which, columns):
    found = []
    for release in (False, True):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(rows, columns)) for rows in (4, 2, 6)]
        assert pack(parameters)
        main_grads = MainGrads(parameters, release=release)
        grads = []
        for step in range(3):
            main_grads.zero_()
            whole = concat(parameters[which])
            at_once = which.step is None and columns == 64
            assert hasattr(whole, "main_grad") or not at_once
            onepass.linear(torch.full((3, columns), step + 1.0), whole).square().sum().backward()
            main_grads.finish()
            grads.append([parameter.main_grad.clone() for parameter in parameters])
        found.append(grads)
    assert all(torch.equal(one, two) for grads in zip(*found, strict=True) for one, two in zip(*grads, strict=True))


# ---- memory ----


def test_memory_comes_with_the_first_gradient_of_each_buffer_and_goes_with_the_step():
    layers = nn.Sequential(*(onepass.nn.Linear(32, 32, bias=False) for _ in range(3)))  # 4 KiB each
    main_grads = MainGrads(layers, release=True, bucket_bytes=1)
    optimizer = AdamW(main_grads)
    seen = []
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: seen.append(have_memory(main_grads)))
    for step in range(3):
        assert have_memory(main_grads) == [False] * 3
        if step:
            main_grads.zero_()
        loss = layers(torch.randn(2, 32, requires_grad=True)).sum()
        assert have_memory(main_grads) == [False] * 3
        loss.backward()
        assert seen == [[True, False, False], [True, True, False], [True] * 3]
        seen.clear()
        main_grads.finish()
        written = [buffer._version for buffer in main_grads.buffers]
        with onepass.use_backend("torch"):  # whose zeros would be seen
            optimizer.step(1.0, zero=True)
        assert written == [buffer._version for buffer in main_grads.buffers]  # no zeros: nobody would read them


def test_what_nothing_was_added_to_is_zeros_after_finish():
    used, unused = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))
    main_grads = MainGrads([used, unused], release=True, bucket_bytes=1)
    main_grads.zero_()
    used.sum().backward()
    main_grads.finish()
    assert not unused.main_grad.any() and main_grads.norm() == 8.0
    main_grads.zero_()
    main_grads.finish()
    assert main_grads.norm() == 0.0


@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_an_optimizer_may_be_made_at_any_time(when):
    model, other = Mixed(BF16, FP32), Mixed(BF16, FP32)
    main_grads, theirs = MainGrads(model, release=True, bucket_bytes=BYTES), MainGrads(other)
    backwards(theirs, other, 0)
    theirs.finish()
    if when == "in a step":
        backwards(main_grads, model, 0)
        main_grads.finish()
    before = have_memory(main_grads)
    MasterWeights(main_grads, lambda groups: torch.optim.SGD(groups, lr=0.5))
    optimizer = AdamW(main_grads, lr=0.02)
    assert have_memory(main_grads) == before
    if when == "between steps":
        backwards(main_grads, model, 0)
        main_grads.finish()
    optimizer.step(zero=True)
    AdamW(theirs, lr=0.02).step()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))


def test_states_come_back_between_steps():
    models = [Mixed(BF16, FP32) for _ in range(2)]
    main_grads = [MainGrads(model, release=True, bucket_bytes=BYTES) for model in models]
    optimizers = [AdamW(each, lr=0.02) for each in main_grads]
    backwards(main_grads[0], models[0], 0)
    main_grads[0].finish()
    optimizers[0].step(zero=True)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, two)
    assert not any(have_memory(main_grads[1]))


def test_closed_before_a_backward_it_leaves_memory_to_that():
    norm, layer = onepass.nn.RMSNorm(8), onepass.nn.Linear(8, 8)
    main_grads = MainGrads(nn.ModuleList([norm, layer]), release=True)
    y = layer(norm(torch.randn(3, 8)))
    main_grads.close()
    y.sum().backward()
    assert not hasattr(layer.weight, "main_grad")


def test_a_first_gradient_that_fails_leaves_the_place_unwritten():
    weight, x = nn.Parameter(torch.ones(8, 8)), torch.ones(3, 8)
    main_grads = MainGrads([weight], release=True)
    main_grads.zero_()
    with pytest.raises(RuntimeError):
        add_gradient(weight.main_grad, torch.ones(3, 8), torch.ones(4, 8))
    onepass.linear(x, weight).sum().backward()
    main_grads.finish()
    assert torch.equal(weight.main_grad, torch.full((8, 8), 3.0))


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_sequence_parallel_parameters_that_did_not_come(fused):
    """Before finish, as that may come after it."""
    came, missed = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))
    came.sequence_parallel = missed.sequence_parallel = True
    main_grads = MainGrads([came, missed], release=True, bucket_bytes=1)
    main_grads.zero_()
    (onepass.linear(came.view(8, 8), torch.eye(8)) if fused else came).sum().backward()
    grads = sequence_parallel._marked_grads([("came", came), ("missed", missed)])
    assert grads["came"].eq(1).all() and not grads["missed"].any()


def test_dropped_it_leaves_nothing():
    weight = nn.Parameter(torch.ones(8, 8))
    gc.disable()  # nothing in a cycle
    try:
        main_grads = MainGrads([weight], release=True)
        main_grads.zero_()
        buffer = weakref.ref(main_grads.buffers[0])
        del main_grads
        assert buffer() is None and not hasattr(weight, "main_grad")
    finally:
        gc.enable()
    main_grads = MainGrads([weight], release=True)
    main_grads.zero_()
    key = released.storage_id(main_grads.buffers[0])
    assert key in released._by_storage
    main_grads.close()
    assert key not in released._by_storage


# ---- addresses ----


@pytest.mark.skipif(triton is None, reason="needs Triton")
def test_a_table_follows_buffers_that_are_given_other_memory():
    def step(others):
        """Three of them, between which somebody else has what was theirs."""
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(40, 50)) for _ in range(3)]
        main_grads = MainGrads(weights, release=bool(others), bucket_bytes=1)
        optimizer = AdamW(main_grads, lr=0.1)
        seen, kept = [], []
        for at in range(3):
            main_grads.zero_()
            kept.append(torch.empty(2000))  # takes what one of them had
            order = weights[at:] + weights[:at]
            for weight in order:
                (weight * (at + 1)).sin().sum().backward()
            main_grads.finish()
            seen.append([buffer.data_ptr() for buffer in main_grads.buffers])
            optimizer.step(1.0, zero=True)
        return seen, [weight.detach().clone() for weight in weights]

    with onepass.use_backend("triton"):
        addresses, moved = step(True)
        _, still = step(False)
    assert len({tuple(one - each[0] for one in each) for each in addresses}) > 1  # or nothing would be to follow
    assert all(torch.equal(one, two) for one, two in zip(moved, still, strict=True))


def test_one_storage_has_nothing_to_follow(monkeypatch):
    monkeypatch.setattr(kernels, "_follow", None)
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    main_grads = MainGrads(weights, bucket_bytes=1)
    optimizer = AdamW(main_grads)
    main_grads.finish()
    with onepass.use_backend("torch" if triton is None else "triton"):
        optimizer.step()
