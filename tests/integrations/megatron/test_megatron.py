"""GPT models of megatron-core beside stock on a CPU, in fp32."""

import importlib.metadata
import subprocess
import sys
import types
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from onepass.integrations import megatron
from onepass.integrations.seams import SeamError
from onepass.runtime.batch_invariance import invariant

megatron_core = pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]

KINDS = {
    "RMSNorm, swiglu": {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu},
    "LayerNorm, gelu": {"activation_func": F.gelu, "add_bias_linear": True},
    "qk norm, geglu, GQA": {"qk_layernorm": True, "gated_linear_unit": True, "activation_func": F.gelu, "num_query_groups": 2},
    "RMS qk norm, GQA": {
        "normalization": "RMSNorm", "qk_layernorm": True, "gated_linear_unit": True, "activation_func": F.silu,
        "num_query_groups": 2,
    },
    "experts": {
        "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "num_moe_experts": 2,
        "moe_shared_expert_intermediate_size": 32, "moe_router_topk": 2, "moe_ffn_hidden_size": 32,
    },
}  # fmt: skip


def config_of(**options):
    from megatron.core.transformer import TransformerConfig

    own = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "use_cpu_initialization": True,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "add_bias_linear": False, "persist_layer_norm": False, "params_dtype": torch.float32,
    }  # fmt: skip
    return TransformerConfig(**{**own, **options})


def model_of(config, spec, tied=True):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    torch.manual_seed(0)
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=16,
        share_embeddings_and_output_weights=tied, position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None,
    )  # fmt: skip


def local_spec(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )


def step(model, **options):
    """Return the loss and the gradients' norm."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (2, 17), generator=generator)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    positions = torch.arange(16)[None].expand(2, -1)
    loss = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous(), **options).mean()
    loss.backward()
    grads = [p.grad if p.grad is not None else p.main_grad for p in model.parameters()]
    return float(loss), float(torch.stack([g.double().norm() for g in grads]).norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_installed_and_by_spec_as_stock(kind, tied):
    options = KINDS[kind]
    config = config_of(**options)
    stock = step(model_of(config, local_spec(config), tied))
    installed = megatron.install()
    try:
        fused = config_of(**options, bias_activation_fusion=True, bias_dropout_fusion=True, apply_rope_fusion=True)
        assert step(model_of(fused, local_spec(fused), tied)) == pytest.approx(stock, rel=1e-3 if "gelu" in kind else 2e-6)
        model = model_of(config, megatron.gpt_layer_spec(config), tied)
        applied = megatron.apply(model)
        assert "linear_cross_entropy" in str(applied)
        assert step(model) == pytest.approx(stock, rel=2e-6)
    finally:
        installed.undo()


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        (KINDS["RMSNorm, swiglu"], "swiglu"),
        (KINDS["RMSNorm, swiglu"] | {"bias_activation_fusion": True, "activation_func_fp8_input_store": True}, "swiglu"),
        (KINDS["LayerNorm, gelu"], "gelu_exact"),
        (KINDS["LayerNorm, gelu"] | {"bias_activation_fusion": True}, "gelu"),
        ({"activation_func": F.relu, "add_bias_linear": True}, "relu"),
        ({"activation_func": F.silu, "gated_linear_unit": True, "activation_func_clamp_value": 0.3, "glu_linear_offset": 0.5},
         "swiglu"),
        (KINDS["qk norm, geglu, GQA"], "geglu_exact"),
        ({"activation_func": torch.tanh, "gated_linear_unit": True}, None),
        (KINDS["qk norm, geglu, GQA"] | {"bias_activation_fusion": True}, "geglu"),
    ],
)  # fmt: skip
def test_the_activation_lies_within_the_product(options, activation):
    """And fc2 is called as a module, whose hooks gather parameters. What backward keeps has no activation."""
    config = config_of(**options)
    stock = model_of(config, local_spec(config))
    saved, called, theirs = [], [], model_of(config, megatron.gpt_layer_spec(config))
    mlp = theirs.decoder.layers[0].mlp
    mlp.linear_fc2.register_forward_pre_hook(lambda module, given: called.append(len(given)))
    far = 2e-2 if config.activation_func_fp8_input_store else 2e-6
    assert getattr(mlp.linear_fc2, "activation", None) == activation and step(theirs) == pytest.approx(step(stock), rel=far)
    assert called == [1 if activation is None else 2]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        mlp(torch.randn(16, 3, 32, requires_grad=True))
    as_wide = sum(shape.numel() == 16 * 3 * 64 for shape in saved)
    assert activation is None or as_wide == (0 if config.gated_linear_unit else 1)  # fc1's output, twice as wide if gated


def test_quick_geglu_of_a_dense_mlp():
    """By the name that --quick-geglu gives it. Stock has no fused function of it without weights of tokens."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    options = {"activation_func": quick_gelu, "gated_linear_unit": True, "activation_func_clamp_value": 0.3}
    options |= {"glu_linear_offset": 0.5}
    test_the_activation_lies_within_the_product(options, "quick_geglu")
    steps = []
    for fused in (False, True):
        config = config_of(**options, bias_activation_fusion=fused)
        steps.append(step(model_of(config, megatron.gpt_layer_spec(config))))
    assert steps[0] == steps[1]


def test_a_norm_gives_back_the_residual():
    """Stock's local spec ignores the flag; Transformer Engine's norm does what ours does."""
    config = config_of(**KINDS["RMSNorm, swiglu"])
    stock = step(model_of(config, local_spec(config)))
    installed = megatron.install()
    try:
        fused = config_of(**KINDS["RMSNorm, swiglu"], fused_residual_rmsnorm=True)
        model = model_of(fused, local_spec(fused))
        norm = model.decoder.layers[0].input_layernorm
        assert len(norm(torch.randn(16, 2, 32))) == 2 and not model.decoder.final_layernorm.return_input
        assert step(model) == pytest.approx(stock, rel=2e-6)
    finally:
        installed.undo()


def test_adam_and_clipping_as_stock():
    from megatron.core import optimizer, utils

    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.arange(15.0).view(5, 3)) for _ in range(2)]
    grads = [torch.randn(5, 3) for _ in range(3)]
    made = types.SimpleNamespace(chained_optimizers=[types.SimpleNamespace(optimizer=torch.optim.AdamW(weights[1:], lr=0.1))])
    optimizers = [torch.optim.AdamW(weights[:1], lr=0.1), made.chained_optimizers[0].optimizer]
    theirs = utils.local_multi_tensor_scale
    get = optimizer.get_megatron_optimizer
    optimizer.get_megatron_optimizer = lambda: made  # a real one needs CUDA
    installed = megatron.install()
    try:
        assert "get_megatron_optimizer: onepass." in str(installed)
        assert optimizer.get_megatron_optimizer() is made and optimizers[1].param_groups[0]["fused"]
        ours, norm = utils.local_multi_tensor_scale, utils.local_multi_tensor_l2_norm
        from megatron.core.optimizer import clip_grads

        assert clip_grads.multi_tensor_scale_impl is ours and clip_grads.l2_norm_impl is norm
        found, per_tensor = norm(65536, None, [grads], False)
        assert found.shape == (1,) and per_tensor is None
        torch.testing.assert_close(found[0], torch.cat(grads).norm())
        for dtype in (torch.float32, torch.bfloat16):
            for scale in (0.3, 1.0):
                for inplace in (True, False):
                    expected = [torch.empty_like(g, dtype=dtype) for g in grads]
                    theirs(65536, None, [grads, expected], scale)
                    source = [g.clone() for g in grads]
                    target = source if inplace else [torch.empty_like(g, dtype=dtype) for g in grads]
                    ours(65536, None, [source, target], scale)
                    for one, other in zip(target, expected, strict=True):
                        torch.testing.assert_close(one.to(dtype), other, rtol=0, atol=0)
        for grad in grads:
            for weight, each in zip(weights, optimizers, strict=True):
                weight.grad = grad.clone()
                each.step()
    finally:
        installed.undo()
        optimizer.get_megatron_optimizer = get
    torch.testing.assert_close(*(weight.detach() for weight in weights), rtol=1e-6, atol=1e-6)
    assert utils.local_multi_tensor_scale is theirs


def test_linear_cross_entropy_by_the_configs_name():
    config = config_of(**KINDS["RMSNorm, swiglu"])
    stock = step(model_of(config, local_spec(config)))
    linear = config_of(**KINDS["RMSNorm, swiglu"], cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear")
    installed = megatron.install()
    try:
        assert step(model_of(linear, local_spec(linear))) == pytest.approx(stock, rel=2e-6)
    finally:
        installed.undo()


def test_linear_cross_entropy_by_the_command_line():
    """Megatron-LM's trainer makes flags of the config's fields."""
    from megatron.core.transformer import TransformerConfig

    fields = TransformerConfig.__dataclass_fields__
    before = fields["cross_entropy_fusion_impl"].type
    installed = megatron.install()
    try:
        assert {*get_args(fields["cross_entropy_fusion_impl"].type)} == {*get_args(before), "linear"}
    finally:
        installed.undo()
    assert fields["cross_entropy_fusion_impl"].type is before


def test_linear_cross_entropy_rounds_no_logits():
    """In bf16 too, whether the version has the function itself or the config's name applies our head."""
    options = {**KINDS["RMSNorm, swiglu"], "params_dtype": torch.bfloat16, "cross_entropy_loss_fusion": True}
    installed = megatron.install()
    try:
        config = config_of(**options, cross_entropy_fusion_impl="linear")
        model, hidden = model_of(config, local_spec(config)), []
        model.decoder.register_forward_hook(lambda module, given, result: hidden.append(result.double()))
        tokens = torch.randint(64, (2, 17))
        mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
        given, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = model(given, torch.arange(16)[None].expand(2, -1), mask, labels=labels)
        logits = (hidden[0] @ model.shared_embedding_or_output_weight().double().T).permute(1, 2, 0)
        torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="none").float(), rtol=2e-6, atol=2e-6)
        assert loss.dtype is torch.float32 and loss.is_contiguous()
    finally:
        installed.undo()


def test_gradient_accumulation_fusion():
    config = config_of(**KINDS["RMSNorm, swiglu"])
    stock = step(model_of(config, local_spec(config), False))
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        model_of(config_of(**KINDS["RMSNorm, swiglu"], gradient_accumulation_fusion=True), local_spec(config))
    installed = megatron.install()
    try:
        fused = config_of(**KINDS["RMSNorm, swiglu"], gradient_accumulation_fusion=True)
        model = model_of(fused, local_spec(fused), False)
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        assert step(model) == pytest.approx(stock, rel=2e-6)
    finally:
        installed.undo()
    assert "fused_weight_gradient_mlp_cuda" not in sys.modules


@pytest.mark.parametrize("microbatches", [1, 3])
def test_drain(microbatches, monkeypatch):
    """The next rows are gathered before a product is made of those that are there, and no more."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.pipeline_parallel import schedules

    installed = megatron.install()
    try:
        calls, order = schedules.drain_embedding_wgrad_compute.__globals__["DeferredWgrad"].flush.__globals__, []
        for name in ("start_gather_rows", "add_gradient"):
            call = calls[name]
            monkeypatch.setitem(calls, name, lambda *given, call=call, name=name: order.append(name[:3]) or call(*given))
        weight = torch.nn.Parameter(torch.randn(6, 4))
        weight.main_grad = torch.zeros(6, 4)
        x, dy = ([torch.randn(5, 2, n) for _ in range(microbatches)] for n in (4, 6))
        expected = sum(torch.einsum("sbo,sbi->oi", b, a) for a, b in zip(x, dy, strict=True))
        schedules.drain_embedding_wgrad_compute(config_of(), x, dy, weight, get_tensor_model_parallel_group())
        torch.testing.assert_close(weight.main_grad, expected)
        assert not x and not dy
        assert order == (["sta", "add"] if microbatches == 1 else ["sta", "sta", "add", "sta", "add", "add"])
    finally:
        installed.undo()


def test_undo_restores_and_twice_is_refused():
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import mlp

    before = mlp.bias_swiglu_impl, gpt_layer_specs.LNImpl, gpt_layer_specs.LocalSpecProvider, gpt_layer_specs.get_bias_dropout_add
    installed = megatron.install()
    assert mlp.bias_swiglu_impl is not before[0] and gpt_layer_specs.LocalSpecProvider is not before[2]
    assert "transformer.mlp" in str(installed)
    with pytest.raises(SeamError, match=r"rebound by onepass already"):
        megatron.install()
    installed.undo()
    after = mlp.bias_swiglu_impl, gpt_layer_specs.LNImpl, gpt_layer_specs.LocalSpecProvider, gpt_layer_specs.get_bias_dropout_add
    assert after == before


def test_the_switch_is_on_until_undo():
    installed = megatron.install(batch_invariant=True)
    assert invariant() and "onepass.batch_invariant(): on" in str(installed)
    installed.undo()
    assert not invariant()


def test_apply_twice_undo_and_logits():
    config = config_of(**KINDS["RMSNorm, swiglu"])
    model = model_of(config, local_spec(config))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    mask = torch.triu(torch.ones(1, 1, 4, 4, dtype=torch.bool), 1)
    logits = model(tokens, torch.arange(4)[None], mask)
    applied = megatron.apply(model)
    with pytest.raises(ValueError, match="already"):
        megatron.apply(model)
    torch.testing.assert_close(model(tokens, torch.arange(4)[None], mask), logits)
    applied.undo()
    assert "forward" not in vars(model) and "forward" not in vars(model.output_layer)
    with pytest.raises(RuntimeError, match="nothing to undo"):
        applied.undo()


@pytest.mark.parametrize("name", ["multi_latent_attention", "fused_residual_rmsnorm"])
def test_flags_that_specs_refuse(name):
    config = config_of()
    setattr(config, name, True)
    with pytest.raises(NotImplementedError, match=name):
        megatron.gpt_layer_spec(config)


@pytest.fixture
def foretold(monkeypatch):
    """What Megatron logs of multi-token prediction, of a call and of each depth."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})

    def values():
        logged = {name: t.clone() for name, t in MTPLossLoggingHelper.tracker.items() if isinstance(t, torch.Tensor)}
        MTPLossLoggingHelper.tracker.clear()
        return logged

    return values


@pytest.mark.parametrize("options", [{}, {"calculate_per_token_loss": True}, {"mtp_detach_heads": True}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_multi_token_prediction_makes_no_logits(tied, options, foretold):
    if options.keys() - vars(config_of()).keys():
        pytest.skip(f"this megatron-core has no {options}")
    config = config_of(**KINDS["RMSNorm, swiglu"], mtp_num_layers=2, mtp_loss_scaling_factor=0.5, **options)
    mask = torch.ones(2, 16)
    mask[0, 3:7] = 0
    stock = model_of(config, local_spec(config), tied)
    expected, logged = step(stock, loss_mask=mask), foretold()
    model = model_of(config, megatron.gpt_layer_spec(config), tied)
    applied, shapes = megatron.apply(model), set()
    logits = model.output_layer.register_forward_hook(lambda module, given, found: shapes.add(found[0].shape[-1]))
    assert step(model, loss_mask=mask) == pytest.approx(expected, rel=2e-6) and shapes == {32}
    torch.testing.assert_close(foretold(), logged)
    assert logged
    logits.remove()
    model.eval()
    assert step(model, loss_mask=mask)[0] == pytest.approx(expected[0], rel=2e-6)
    applied.undo()
    model.train().zero_grad()
    assert step(model, loss_mask=mask) == pytest.approx(expected, rel=2e-6)
    torch.testing.assert_close(foretold(), logged)
    with pytest.raises(NotImplementedError, match="mtp_num_layers must be None with output_processor"):
        megatron.output_processor(hidden_states=None, output_layer=None, output_weight=None, labels=mask, config=config)


def test_mup_scales_logits_once():
    if "use_mup" not in vars(config_of()):
        pytest.skip("this megatron-core has no mu-P")
    config = config_of(**KINDS["RMSNorm, swiglu"], use_mup=True, mup_output_mult=0.25)
    expected = step(model_of(config, local_spec(config)))
    model = model_of(config, megatron.gpt_layer_spec(config))
    megatron.apply(model)
    assert step(model) == pytest.approx(expected, rel=2e-6)


def test_script_in_a_clone(tmp_path):
    """A script beside Megatron's sources, as pretrain_gpt.py lies, takes those, from wherever it is run."""
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import sys\nimport megatron.core.transformer.mlp as m\nprint(m.__file__, m.bias_swiglu_impl.__module__, sys.argv[1:])\n"
    )
    (tmp_path / "megatron").symlink_to(megatron_core.__path__[0] + "/..")
    command = [sys.executable, "-W", "ignore", "-m", "onepass.integrations.megatron", str(script), "--lr", "1"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"onepass in megatron-core {megatron_core.__version__}" in out
    assert f"{tmp_path}/megatron/core/transformer/mlp.py onepass.integrations.megatron.fusions ['--lr', '1']" in out


def test_without_metadata(monkeypatch):
    """A clone is not installed."""

    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    installed = megatron.install()
    installed.undo()
    assert installed.version == megatron_core.__version__


def test_output_processor():
    pytest.importorskip("megatron.core.models.hybrid", reason="megatron-core 0.17 has no output_processor")
    config = config_of(**KINDS["RMSNorm, swiglu"])
    stock = step(model_of(config, local_spec(config)))
    ours = step(model_of(config, local_spec(config)), output_processor=megatron.output_processor)
    assert ours == pytest.approx(stock, rel=2e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("what", ["logits", "an embedding"])
def test_other_gradients_of_the_heads_weight(what, fused, installed):
    """Of a microbatch without labels, and of multi-token prediction's embedding on a pipeline's last stage."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    tied = what == "an embedding"

    def gradient(fused, apply):
        own = {"mtp_num_layers": 1} if tied else {}
        config = config_of(**KINDS["RMSNorm, swiglu"], gradient_accumulation_fusion=fused, **own)
        model = model_of(config, local_spec(config), tied)
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        vars(weight).pop("zero_out_wgrad", None)  # as with several stages
        if apply:
            megatron.apply(model)
            model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
            model.zero_grad_buffer()
        tokens = torch.randint(64, (3, 2, 17), generator=torch.Generator().manual_seed(1))
        mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
        for i, each in enumerate(tokens):
            given, labels = each[:, :-1].contiguous(), each[:, 1:].contiguous()
            by_logits = what == "logits" and i == 1
            found = model(given, torch.arange(16)[None].expand(2, -1), mask, **({} if by_logits else {"labels": labels}))
            loss = F.cross_entropy(found.flatten(0, 1), labels.flatten()) if by_logits else found.mean()
            loss.backward()
        return weight.main_grad if apply else weight.grad

    torch.testing.assert_close(gradient(fused, True), gradient(False, False), rtol=1e-4, atol=1e-6)


def test_deferred_head():
    """The gradient of a head without logits arrives at the drain, and needs our drain."""
    from megatron.core.pipeline_parallel import schedules

    config = config_of(**KINDS["RMSNorm, swiglu"])
    stock = step(model_of(config, local_spec(config), False))
    model = model_of(config, megatron.gpt_layer_spec(config), False)
    megatron.apply(model)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, 0
    model.embedding_activation_buffer, model.grad_output_buffer = [], []
    with pytest.raises(RuntimeError, match=r"needs install\(wgrad=True\)"):
        step(model)
    installed = megatron.install()
    try:
        model.zero_grad()
        loss, _ = step(model)
        head = model.output_layer.weight
        assert loss == pytest.approx(stock[0], rel=2e-6) and not head.main_grad.any()
        model.pre_process = False  # a pipeline's last stage, which is where Megatron defers
        schedules.finish_embedding_wgrad_compute(config, model, True, model.output_layer.tp_group)
        assert head.main_grad.any()
        grads = [p.main_grad if p.grad is None or p is head else p.grad + p.main_grad for p in model.parameters()]
        assert float(torch.stack([g.double().norm() for g in grads]).norm()) == pytest.approx(stock[1], rel=2e-6)
    finally:
        installed.undo()


def test_packed_documents_are_alone():
    """A packed row through a model gives each document the losses that it has by itself, and the same gradients."""
    from megatron.core.packed_seq_params import PackedSeqParams

    config = config_of(**KINDS["RMSNorm, swiglu"], num_query_groups=2)
    lengths = (5, 1, 7)
    tokens = torch.randint(64, (1, sum(lengths) + 1), generator=torch.Generator().manual_seed(1))
    given, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    places = torch.cat([torch.arange(length) for length in lengths])[None]

    def gradients(parts):
        model = model_of(config, megatron.gpt_layer_spec(config))
        losses = torch.cat([model(ids, at, None, labels=wanted, **options) for ids, at, wanted, options in parts], 1)
        losses.sum().backward()
        return losses.detach(), [p.grad for p in model.parameters()]

    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
    )
    found, grads = gradients([(given, places, labels, {"packed_seq_params": packed})])
    alone = [(t.split(lengths, 1)) for t in (given, places, labels)]
    expected, wanted = gradients([(*part, {}) for part in zip(*alone, strict=True)])
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ],
)
def test_recomputed(recompute, monkeypatch):
    from megatron.core.tensor_parallel import random

    state = {"get": lambda *_, **__: torch.get_rng_state(), "set": lambda new, *_, **__: torch.set_rng_state(new)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", state["get"])
    monkeypatch.setattr(random, "_get_cuda_rng_state", state["get"])
    monkeypatch.setattr(random, "_set_cuda_rng_state", state["set"])
    stock = step(model_of(config := config_of(**KINDS["RMSNorm, swiglu"]), local_spec(config)))
    config = config_of(**KINDS["RMSNorm, swiglu"], **recompute)
    model, called = model_of(config, megatron.gpt_layer_spec(config)), []
    model.decoder.layers[0].mlp.linear_fc2.register_forward_hook(lambda *_: called.append(1))
    assert step(model) == pytest.approx(stock, rel=2e-6) and len(called) == 2
