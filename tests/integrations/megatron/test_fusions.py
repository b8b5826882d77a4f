"""What install() puts in the place of each function, called by Megatron's own name for it, beside what stood there."""

import importlib
import types
from functools import partial

import pytest
import torch
from integrations.megatron.test_megatron import config_of

from onepass.integrations import megatron

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]

S, B, H = 5, 2, 16
X, BIAS, TOKENS, WEIGHTS = (S, B, H), (H,), (S * B, H), (S * B, 1)


class Case:
    """A call of one of Megatron's functions, by a name that Megatron's own code has for it."""

    def __init__(self, place, *given, call=None, stock=None, **options):
        """Args:
        place: "module:name" within megatron.core.
        given: shapes of tensors that get gradients, and other arguments.
        call: calls the function, which it gets first; None calls it with what is given.
        stock: the function to compare with, where stock has none without Apex or Transformer Engine.
        """
        self.place, self.given, self.call, self.stock, self.options = place, given, call, stock, options

    def function(self):
        module, name = self.place.split(":")
        try:
            return getattr(importlib.import_module(f"megatron.core.{module}"), name, None)
        except ImportError:
            return None  # not in this version

    def results(self, function, dtype):
        """Return the result, and its gradients by the tensors."""
        generator = torch.Generator().manual_seed(4)
        own = []
        for each in self.given:
            if isinstance(each, tuple):
                kind = torch.float32 if each == WEIGHTS else dtype  # as routers have them
                each = torch.randn(each, generator=generator).to(kind).requires_grad_()
            elif isinstance(each, torch.Tensor):
                each = each.clone()  # angles keep their tables
            own.append(each)
        y = (function if self.call is None else partial(self.call, function))(*own, **self.options)
        grads = [t for t in own if isinstance(t, torch.Tensor) and t.requires_grad] if y.requires_grad else []
        return [y, *torch.autograd.grad(y, grads, torch.randn(y.shape, generator=generator).to(y.dtype))] if grads else [y]


# ---- calls, and what to compare with, where stock has nothing without Apex or Transformer Engine ----


def keys_of(function, mixed, *rest, packed=False, **options):
    """Turn the keys within linear_qkv's output ``[s, b, (q, k, v)]``, as Megatron does."""
    keys = mixed.unflatten(-1, (3, 2, -1))[:, :, 1]
    return function(keys[:, 0] if packed else keys, *rest, **options)


def rope(t, freqs, *, interleaved=False, transpose_output_memory=False):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    y = _apply_rotary_pos_emb_bshd(t, freqs, interleaved)
    return y.transpose(0, 1).contiguous().transpose(0, 1) if transpose_output_memory else y


def packed_rope(t, cu_seqlens, freqs, *, interleaved=False):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
    from megatron.core.parallel_state import get_context_parallel_group

    return _apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, interleaved, cp_group=get_context_parallel_group())


def freqs_of(turned, interleaved=False, rows=S):
    each = torch.randn(rows, turned // 2, generator=torch.Generator().manual_seed(5))
    return (torch.stack([each, each], -1).flatten(1) if interleaved else torch.cat([each, each], -1))[:, None, None]


def dropout_add(make, x, residual, bias=None, training=True, wide=False):
    """wide: as with fp32_residual_connection."""
    return make(training, True)((x, bias), residual.float() if wide else residual, 0.0)


def loss_of(function, logits):
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    target = torch.randint(H, logits.shape[:2], generator=torch.Generator().manual_seed(6))
    return function(logits, target, get_tensor_model_parallel_group())


def unfused_loss(logits, target, group):
    """Megatron's fused one rounds gradients to bf16."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return vocab_parallel_cross_entropy(logits, target)


def normed(make, x, weight, bias=None):
    """Build the norm, and call it with these weights."""
    config = config_of(normalization="RMSNorm" if bias is None else "LayerNorm", params_dtype=x.dtype)
    weights = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return torch.func.functional_call(make(config, H, 1e-5), weights, (x,))


def torch_norm(config, size, eps):
    return (torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm)(size, eps)


def drained(drain, *tensors):
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    weight, config = torch.nn.Parameter(torch.zeros(H, H)), config_of()
    weight.main_grad, config.gradient_accumulation_fusion = torch.ones(H, H), True
    kept = [t.detach() for t in tensors[::2]], [t.detach() for t in tensors[1::2]]
    assert drain(config, *kept, weight, get_tensor_model_parallel_group()) is None and kept == ([], [])
    return weight.main_grad


def accumulated(module, x, dy, function="wgrad_gemm_accum_fp32", dtype=torch.float32):
    main_grad = torch.ones(H, H, dtype=dtype)
    assert getattr(module, function)(x.detach(), dy.detach(), main_grad) is None
    return main_grad


def add_product(x, dy, main_grad):
    main_grad += dy.float().flatten(0, 1).T @ x.float().flatten(0, 1)


def scaled(scale, *tensors, inplace=False):
    source = [t.detach().clone() for t in tensors]
    target = source if inplace else [torch.empty_like(t) for t in source]
    assert scale(65536, None, [source, target], 0.3) is None
    return torch.stack(target)


def norm_of(l2_norm, *tensors):
    found, per_tensor = l2_norm(65536, None, [[t.detach() for t in tensors]], False)
    assert per_tensor is None
    return found


def norm_in_fp32(chunk_size, noop_flag, tensor_lists, per_tensor):
    return torch.cat([t.flatten().float() for tensors in tensor_lists for t in tensors]).norm()[None], None


MLP, EXPERTS, SPECS = "transformer.mlp", "transformer.moe.experts", "models.gpt.gpt_layer_specs"
DROPOUT, ROPE, CLIP = "fusions.fused_bias_dropout", "models.common.embeddings.rope_utils", "optimizer.clip_grads"
LOSS = "models.common.language_module.language_module:fused_vocab_parallel_cross_entropy"
WGRAD = "tensor_parallel.layers:fused_weight_gradient_mlp_cuda"
BOUNDS = torch.tensor([0, 2, 6], dtype=torch.int32)
APEX = types.SimpleNamespace(wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product)
CASES = {
    "swiglu": Case(f"{MLP}:bias_swiglu_impl", X, BIAS),
    "swiglu, no bias": Case(f"{MLP}:bias_swiglu_impl", X, None),
    "swiglu of experts": Case(f"{EXPERTS}:weighted_bias_swiglu_impl", TOKENS, None, WEIGHTS),
    "gelu": Case(f"{MLP}:bias_gelu_impl", X, BIAS),
    "geglu": Case(f"{MLP}:bias_geglu_impl", X, BIAS),
    "geglu, no bias": Case(f"{MLP}:bias_geglu_impl", X, None),
    "quick_geglu": Case(
        f"{EXPERTS}:weighted_bias_quick_geglu_impl", TOKENS, None, WEIGHTS, linear_offset=1.0, clamp_value=0.7
    ),
    "quick_geglu, a bias": Case(f"{EXPERTS}:weighted_bias_quick_geglu_impl", TOKENS, BIAS, WEIGHTS),
    "squared_relu": Case(f"{EXPERTS}:weighted_squared_relu_impl", TOKENS, WEIGHTS),
    "dropout": Case(f"{SPECS}:get_bias_dropout_add", X, X, BIAS, call=dropout_add),
    "dropout, no bias": Case(f"{SPECS}:get_bias_dropout_add", X, X, call=dropout_add),
    "dropout, evaluation": Case(f"{SPECS}:get_bias_dropout_add", X, X, BIAS, call=dropout_add, training=False),
    "dropout, a bias of x's shape": Case(f"{SPECS}:get_bias_dropout_add", X, X, X, call=dropout_add),
    "dropout, a wide residual": Case(f"{SPECS}:get_bias_dropout_add", X, X, BIAS, call=dropout_add, wide=True),
    "dropout's function": Case(
        f"{DROPOUT}:_bias_dropout_add_func", X, X, call=lambda function, x, residual: function((x, None), residual, 0.0, True)
    ),
    "loss": Case(LOSS, X, call=loss_of, stock=unfused_loss),
    "rope": Case(f"{ROPE}:fused_apply_rotary_pos_emb", (S, B, 6 * H), freqs_of(H), call=keys_of, stock=rope),
    "rope, neighbours": Case(
        f"{ROPE}:fused_apply_rotary_pos_emb", (S, B, 6 * H), freqs_of(H, True), call=keys_of, stock=rope, interleaved=True
    ),
    "rope of a part": Case(f"{ROPE}:fused_apply_rotary_pos_emb", (S, B, 6 * H), freqs_of(H // 2), call=keys_of, stock=rope),
    "rope, transposed": Case(
        f"{ROPE}:fused_apply_rotary_pos_emb", (S, B, 6 * H), freqs_of(H), call=keys_of, stock=rope, transpose_output_memory=True
    ),
    "rope of documents": Case(
        f"{ROPE}:fused_apply_rotary_pos_emb_thd", (6, 1, 6 * H), BOUNDS, freqs_of(H, rows=4), call=keys_of, stock=packed_rope,
        packed=True,
    ),
    "rope of documents, neighbours": Case(
        f"{ROPE}:fused_apply_rotary_pos_emb_thd", (6, 1, 6 * H), BOUNDS, freqs_of(H, True, 4), call=keys_of, stock=packed_rope,
        packed=True, interleaved=True,
    ),
    "PyTorch's norm": Case("transformer.torch_norm:WrappedTorchNorm", X, BIAS, call=normed),
    "Apex's norm": Case("fusions.fused_layer_norm:FusedLayerNorm", X, BIAS, BIAS, call=normed, stock=torch_norm),
    "a block's norm": Case("transformer.transformer_block:LayerNormImpl", X, BIAS, BIAS, call=normed),
    "a spec's norm": Case(f"{SPECS}:LNImpl", X, BIAS, call=normed),
    "a backend's norm": Case("models.backends:LNImpl", X, BIAS, BIAS, call=normed),
    "BERT's norm": Case("models.bert.bert_layer_specs:LNImpl", X, BIAS, BIAS, call=normed),
    "a hybrid stack's norm": Case("models.hybrid.hybrid_block:TENorm", X, BIAS, call=normed, stock=torch_norm),
    "drain": Case("pipeline_parallel.schedules:drain_embedding_wgrad_compute", *[X] * 6, call=drained),
    "main_grad": Case(WGRAD, X, X, call=accumulated, stock=APEX),
    "main_grad of 16 bits": Case(
        WGRAD, X, X, call=accumulated, stock=APEX, function="wgrad_gemm_accum_fp16", dtype=torch.bfloat16
    ),
    "clipping": Case(f"{CLIP}:multi_tensor_scale_impl", *[X] * 3, call=scaled),
    "clipping in place": Case(f"{CLIP}:multi_tensor_scale_impl", *[X] * 3, call=scaled, inplace=True),
    "gradients' norm": Case(f"{CLIP}:l2_norm_impl", *[X] * 3, call=norm_of, stock=norm_in_fp32),
}  # fmt: skip
ELSEWHERE = {  # what is no function of tensors, and the test that runs it
    "_grad_accum_fusion_available": "test_megatron.test_gradient_accumulation_fusion",
    "LocalSpecProvider": "test_megatron.test_installed_and_by_spec_as_stock",
    "grouped_mlp_modules": "test_experts.test_a_models_experts",
    **dict.fromkeys(("fused_permute", "fused_permute_with_probs", "fused_unpermute"), "test_permute.test_as_stock"),
    "HAVE_TE": "test_permute.test_as_stock",
    **{f"fused_sort_chunks_by_index{each}": "test_permute.test_chunks_as_stock" for each in ("", "_with_probs")},
    "__init__": "test_megatron.test_linear_cross_entropy_rounds_no_logits",
    "cross_entropy_fusion_impl": "test_megatron.test_linear_cross_entropy_by_the_command_line",
    "get_megatron_optimizer": "test_megatron.test_adam_and_clipping_as_stock",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_as_stock(name, dtype):
    """Shapes, strides, types and values of results and gradients: Megatron's code after them views them."""
    case = CASES[name]
    stock = case.stock or case.function()
    installed = megatron.install()
    try:
        function = case.function()
        if function is None:
            pytest.skip("this version has no such name")
        assert function is not stock
        found, expected = case.results(function, dtype), case.results(stock, dtype)
    finally:
        installed.undo()
    assert len(found) == len(expected)
    far = {"rtol": 2e-4, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.1}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.stride() == theirs.stride(), ours.shape
        torch.testing.assert_close(ours, theirs, **far)  # and types


def test_each_replaced_name_is_tested():
    installed = megatron.install()
    try:
        tested = [case.function() for case in CASES.values()]
        for binding in installed.bindings:
            assert binding.name in ELSEWHERE or any(each is binding.now for each in tested), binding.seam
    finally:
        installed.undo()


def test_fp8_store_and_clamp_after_the_bias():
    from megatron.core.fusions import fused_bias_swiglu

    installed = megatron.install()
    try:
        x, bias = torch.randn(X), torch.randn(BIAS)
        y = fused_bias_swiglu.bias_swiglu_impl(x, bias, clamp_value=0.5)
        gate, linear = (x + bias).chunk(2, -1)
        torch.testing.assert_close(y, torch.nn.functional.silu(gate.clamp(max=0.5)) * linear.clamp(-0.5, 0.5))
        x.requires_grad_()
        fused_bias_swiglu.bias_swiglu_impl(x, bias, fp8_input_store=True).sum().backward()
        assert x.grad.isfinite().all()
        with pytest.raises(NotImplementedError, match="activation_func_fp8_input_store"):
            fused_bias_swiglu.bias_swiglu_impl(x, bias, True, True)
    finally:
        installed.undo()


def test_dropout_adds_in_xs_memory_without_gradients():
    from megatron.core.fusions import fused_bias_dropout

    x, residual, bias = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    expected = fused_bias_dropout._bias_dropout_add_func((x.clone(), bias), residual, 0.0, False)
    installed = megatron.install()
    try:
        found = fused_bias_dropout.get_bias_dropout_add(False, True)((x, bias), residual, 0.0)
    finally:
        installed.undo()
    torch.testing.assert_close(found, expected)
    assert found.data_ptr() == x.data_ptr()


def test_a_norm_by_apexs_name():
    """Sequence-parallel, zero-centred and memory-efficient, persistent or not: options are the config's."""
    from megatron.core.fusions import fused_layer_norm

    with pytest.raises(ValueError, match="Apex must be installed"):
        fused_layer_norm.FusedLayerNorm(config_of(), H)
    installed = megatron.install()
    try:
        for persist in (False, True):
            config = config_of(layernorm_zero_centered_gamma=True, persist_layer_norm=persist, memory_efficient_layer_norm=True)
            config.sequence_parallel = True
            norm = fused_layer_norm.FusedLayerNorm(config, H, 1e-5, True, False, "LayerNorm")
            assert norm.weight.sequence_parallel and norm.bias.sequence_parallel and norm.memory_efficient
            x = torch.randn(X)
            torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (H,)))
        with pytest.raises(ValueError, match="must be LayerNorm, but is 'RMSNorm'"):
            fused_layer_norm.FusedLayerNorm(config_of(normalization="RMSNorm"), H)
    finally:
        installed.undo()


def test_what_rope_refuses():
    from megatron.core.models.common.embeddings import rope_utils

    installed = megatron.install()
    try:
        with pytest.raises(NotImplementedError, match="start_positions"):
            rope_utils.fused_apply_rotary_pos_emb(torch.randn(2, 1, 1, 4), torch.randn(2, 1, 1, 4), start_positions=True)
    finally:
        installed.undo()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_rope_of_documents_over_context_parallel_ranks(interleaved):
    """Each rank's two parts of each document beside Megatron's unfused path; cu_seqlens counts whole documents."""
    from megatron.core.models.common.embeddings import rope_utils

    empty = [] if interleaved else [12]  # a document, whose neighbours Megatron can't turn
    ends, changed = (torch.tensor(sorted([*each, *empty]), dtype=torch.int32) for each in ([0, 12, 36, 48], [0, 12, 24, 48]))
    freqs, installed = freqs_of(H // 2, interleaved, 24), megatron.install()
    try:
        for size in (2, 3):
            for rank in range(size):
                group = types.SimpleNamespace(size=lambda size=size: size, rank=lambda rank=rank: rank)
                for ends_now in (ends, changed, ends):
                    t = torch.randn(48 // size, 2, H, requires_grad=True)
                    found = rope_utils.fused_apply_rotary_pos_emb_thd(t, ends_now, freqs, size, rank, interleaved)
                    expected = rope_utils._apply_rotary_pos_emb_thd(t, ends_now, freqs, interleaved, cp_group=group)
                    dy = torch.randn(found.shape)
                    torch.testing.assert_close(found, expected)
                    torch.testing.assert_close(*(torch.autograd.grad(y, t, dy)[0] for y in (found, expected)))
        ends.copy_(changed)  # in place: the positions are made anew
        found = rope_utils.fused_apply_rotary_pos_emb_thd(t, ends, freqs, size, rank, interleaved)
        torch.testing.assert_close(found, rope_utils._apply_rotary_pos_emb_thd(t, ends, freqs, interleaved, cp_group=group))
        for _ in range(3):
            ends.add_(0)  # a version each
            rope_utils.fused_apply_rotary_pos_emb_thd(t, ends, freqs, size, rank, interleaved)
        kept = [each for each in vars(ends).values() if isinstance(each, tuple)]
        assert len(kept) == 1 and sum(isinstance(each, torch.Tensor) for each in kept[0][1]) == 2  # the last alone
        with torch.inference_mode():
            ends = torch.tensor(sorted([0, 12, 36, 48, *empty]), dtype=torch.int32)
            rope_utils.fused_apply_rotary_pos_emb_thd(t, ends, freqs, size, rank, interleaved)
            ends.copy_(changed)
            found = rope_utils.fused_apply_rotary_pos_emb_thd(t, ends, freqs, size, rank, interleaved)
            torch.testing.assert_close(found, rope_utils._apply_rotary_pos_emb_thd(t, ends, freqs, interleaved, cp_group=group))
        odd = torch.tensor([0, 6, 12, 32], dtype=torch.int32)  # 6 tokens have no four parts, 12 and 20 have
        wrong = rope_utils.fused_apply_rotary_pos_emb_thd(torch.randn(16, 2, H), odd, freqs, 2, 0, interleaved)[..., 0].isnan()
        assert wrong.all(1).tolist() == [i < 6 for i in range(16)]
    finally:
        installed.undo()
