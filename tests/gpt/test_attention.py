"""The model's attention as one op: which way a configuration takes, what is kept, and what is computed again."""

from types import SimpleNamespace

import pytest
import torch
from gpt.test_model import GPT2, SHAPE, compare, found, given, started

import onepass
from onepass.gpt import Config, Model
from onepass.ops.attention import by_cudnn
from onepass.ops.attention.attention import attention
from onepass.ops.attention.by_cudnn import backward_by_cudnn, forward_by_cudnn
from onepass.ops.attention.choice import in_order, pytorch_is_faster
from onepass.ops.attention.formula import AttentionOptions

OFF = {"attention_fusion": False}
NORMED = {"qk_layernorm": True, "rotary_percent": 0.5, "layernorm_zero_centered_gamma": True}


def ops_called(config, monkeypatch, training=True):
    """How often rope and attention are called, and with what options."""
    calls = {"attention": [], "rope": []}
    for module, name in (("onepass.gpt.block", "attention"), ("onepass.gpt.positions", "rope")):
        real = getattr(onepass, name)
        spy = lambda *args, real=real, name=name, **options: calls[name].append(options) or real(*args, **options)  # noqa: E731
        monkeypatch.setattr(f"{module}.{name}", spy)
    model = Model(config, seed=0).train(training)
    tokens, labels, _ = given()
    model(tokens, labels).backward()
    return calls


@pytest.mark.parametrize(
    ("settings", "attention", "rope"),
    [
        ({}, 2, 0),
        (OFF, 0, 2),
        ({"apply_rope_fusion": False}, 2, 0),
        (OFF | {"apply_rope_fusion": False}, 0, 0),
        ({"position_embedding_type": "none"}, 2, 0),
        ({"qk_layernorm": True}, 2, 0),
        ({"qk_layernorm": True, "norm_fusion": False, "norm_linear_fusion": False}, 0, 2),
        ({"qk_layernorm": True, "normalization": "LayerNorm"}, 0, 2),
        ({"qk_layernorm": True, "position_embedding_type": "none"}, 0, 0),
        ({"qk_layernorm": True, "apply_rope_fusion": False}, 0, 0),
        ({"attention_dropout": 0.1}, 0, 2),
    ],
    ids=str,
)
def test_which_op_runs(settings, attention, rope, monkeypatch):
    calls = ops_called(Config(**SHAPE | settings), monkeypatch)
    assert (len(calls["attention"]), len(calls["rope"])) == (attention, rope)
    for options in calls["attention"]:
        assert (options["cos"] is not None) == (settings in ({}, {"qk_layernorm": True}))
        assert ("q_weight" in options) == ("qk_layernorm" in settings)
        assert options["overwrite"]


def test_dropout_is_for_training(monkeypatch):
    assert len(ops_called(Config(**SHAPE, attention_dropout=0.1), monkeypatch, training=False)["attention"]) == 2


@pytest.mark.parametrize("granularity", ("selective", "full"))
def test_what_is_computed_again_is_written_again(granularity, monkeypatch):
    """Selective recomputation rotates without the op."""
    settings = {"recompute_granularity": granularity}
    calls = ops_called(Config(**SHAPE, **settings), monkeypatch)["attention"]
    assert [options["overwrite"] for options in calls] == [True] * (4 if granularity == "full" else 2)
    compare(found(Config(**SHAPE, **settings)), found(Config(**SHAPE, **OFF)))


@pytest.mark.parametrize("off", (OFF, OFF | {"apply_rope_fusion": False}, {"apply_rope_fusion": False}), ids=str)
@pytest.mark.parametrize(
    "base",
    ({}, GPT2, {"rotary_percent": 0.5, "rotary_interleaved": True}, NORMED, {"num_query_groups": None, "kv_channels": None}),
    ids=("llama", "gpt-2", "half interleaved", "heads normed", "one head a query"),
)
def test_the_same_numbers_without(base, off):
    compare(found(Config(**SHAPE | base | off)), found(Config(**SHAPE | base)))


def test_the_reference_has_pytorchs(monkeypatch):
    assert not any(ops_called(Config(**SHAPE).reference(), monkeypatch).values())


@pytest.mark.parametrize("granularity", (None, "selective", "full"))
def test_by_kernels_in_bf16(granularity):
    """Within what bf16 leaves of a gradient, beside the same with PyTorch's attention."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SHAPE | {"num_layers": 1, "kv_channels": 16, "recompute_granularity": granularity}
    tokens, labels, _ = (t.to(device) for t in given(length=9))
    grads = []
    for settings, backend in (({}, "triton"), (OFF, "torch")):
        model = started(Config(**shape, **settings), torch.bfloat16).to(device)
        with onepass.use_backend(backend):
            model(tokens, labels).backward()
        grads.append({name: t.grad.float() for name, t in model.named_parameters()})
    for name, grad in grads[1].items():
        assert (grads[0][name] - grad).norm() <= 0.03 * grad.norm() + 1e-6, name


def test_less_is_kept():
    """qkv and y, and not q and k beside it."""

    def kept(settings):
        sizes = {}
        model, (tokens, labels, _) = started(Config(**SHAPE, **settings)), given()
        note = lambda t: sizes.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            loss = model(tokens, labels)
        loss.backward()
        return sum(sizes.values())

    q_and_k = 22 * (4 + 2) * 8 * 8  # bytes of a layer's, of 22 tokens in fp64
    assert kept(OFF) - kept({}) >= SHAPE["num_layers"] * q_and_k


@pytest.fixture
def a_gpu(monkeypatch):
    """What a projection on a Hopper GPU, or on another, shows of itself."""
    monkeypatch.setattr(by_cudnn, "_CUDNN", 91501)

    def projection(S, major=9, stride=1, is_cuda=True):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
        return SimpleNamespace(is_cuda=is_cuda, device=None, shape=(2, S, 3), stride=lambda: (S * 3 * stride, 3 * stride, stride))

    return projection


def refusals(monkeypatch, asks):
    """Whether nothing is cuDNN's where PyTorch may not take it, or has an old one."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        refused = not asks()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    monkeypatch.setattr(by_cudnn, "_CUDNN", 91500)
    return refused and not asks()


ANY_ORDER = AttentionOptions(4, 4, False, 1.0, in_order=False)


def test_pytorchs_is_taken_where_it_is_faster(a_gpu, monkeypatch):
    kinds = [(S, D, major) for S in (2047, 2048) for D in (64, 128) for major in (8, 9, 10, 12)]
    taken = [(S, D, major) for S, D, major in kinds if pytorch_is_faster(a_gpu(S, major), D, ANY_ORDER)]
    assert taken == [(2047, 128, 9), (2047, 128, 10), (2048, 64, 9), (2048, 64, 10), (2048, 128, 9), (2048, 128, 10)]
    assert not pytorch_is_faster(a_gpu(2048, is_cuda=False), 128, ANY_ORDER)
    assert not pytorch_is_faster(a_gpu(2048), 128, ANY_ORDER._replace(in_order=True))
    assert refusals(monkeypatch, lambda: pytorch_is_faster(a_gpu(2048), 128, ANY_ORDER))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not pytorch_is_faster(a_gpu(2048), 128, ANY_ORDER)


@pytest.mark.parametrize(
    ("deterministic", "process", "expected"), [(True, False, True), (False, False, False), (False, True, True)]
)
def test_an_order_is_asked_for_by_the_call_or_the_process(deterministic, process, expected):
    torch.use_deterministic_algorithms(process)
    found = in_order(deterministic)
    torch.use_deterministic_algorithms(False)
    assert found is expected


def test_cudnns_forward_is_taken_where_it_is_faster(a_gpu, monkeypatch):
    lengths, sizes = (384, 512, 516, 1920, 2048, 2052), (32, 64, 128, 256)
    taken = [(S, D) for S in lengths for D in sizes if forward_by_cudnn(a_gpu(S), D)]
    assert taken == [(512, 128), (1920, 128), (2048, 64), (2048, 128)]
    assert not any(forward_by_cudnn(each, 128) for each in (a_gpu(4096, is_cuda=False), a_gpu(4096, stride=2**18)))
    assert not any(forward_by_cudnn(a_gpu(4096, major), 128) for major in (8, 10, 12))
    torch.use_deterministic_algorithms(True)
    assert forward_by_cudnn(a_gpu(4096), 128)  # its order is fixed
    assert refusals(monkeypatch, lambda: forward_by_cudnn(a_gpu(4096), 128))


def test_cudnns_backward_is_taken_where_it_is_faster(a_gpu, monkeypatch):
    monkeypatch.setattr(by_cudnn, "_CUDNN", 91900)
    monkeypatch.setattr(by_cudnn, "has_frontend", lambda: True)
    of = lambda heads, groups: AttentionOptions(heads, groups, False, 1.0)  # noqa: E731
    lengths, sizes = (1920, 2048, 2052, 4096, 4224), (64, 128, 256)
    taken = [(S, D) for S in lengths for D in sizes if backward_by_cudnn(a_gpu(S), D, of(32, 32))]
    assert taken == [(2048, 128), (4096, 128)]  # then its workspace is a GiB
    assert not any(backward_by_cudnn(a_gpu(2048), 128, of(*heads)) for heads in ((32, 8), (16, 16), (160, 160)))
    assert not any(backward_by_cudnn(a_gpu(4096, major), 128, of(32, 32)) for major in (8, 10, 12))
    monkeypatch.setattr(by_cudnn, "has_frontend", lambda: False)
    assert not backward_by_cudnn(a_gpu(4096), 128, of(32, 32))
    monkeypatch.setattr(by_cudnn, "has_frontend", lambda: True)
    assert refusals(monkeypatch, lambda: backward_by_cudnn(a_gpu(4096), 128, of(32, 32)))


def test_an_exported_program_takes_any_length():
    """What is asked of a length on a GPU is not asked here."""

    class Attends(torch.nn.Module):
        def forward(self, qkv):
            return attention(qkv, 2, deterministic=False, backend="torch")

    length = torch.export.Dim("S", min=4, max=8192)
    program = torch.export.export(Attends(), (torch.randn(1, 32, 96),), dynamic_shapes={"qkv": {1: length}})
    for S in (8, 2100):
        qkv = torch.randn(1, S, 96)
        torch.testing.assert_close(program.module()(qkv), attention(qkv, 2, backend="torch"))


def test_bits_may_differ_where_pytorch_lets_them(monkeypatch):
    import onepass.gpt.block as block

    asked = []
    stock = block.attention
    monkeypatch.setattr(block, "attention", lambda *args, **options: asked.append(options) or stock(*args, **options))
    tokens, _, _ = given()
    started(Config(**SHAPE))(tokens)
    assert asked and not any(options["deterministic"] for options in asked)


@pytest.mark.parametrize("fusions", ({}, {"norm_linear_fusion": False}))
def test_norms_have_the_epsilon_they_are_given(fusions):
    """One as large as the hidden states' squares changes the result, in every way alike."""
    tokens, _, _ = given()
    losses = [started(Config(**SHAPE, layernorm_epsilon=eps, **fusions))(tokens) for eps in (1e-5, 1e-1)]
    plain = started(Config(**SHAPE, layernorm_epsilon=1e-1).reference())(tokens)
    assert not torch.allclose(losses[0], losses[1])
    torch.testing.assert_close(losses[1], plain)
