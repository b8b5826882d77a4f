"""onepass.gpt beside Megatron's GPTModel with the same weights, in fp32: hidden states, losses and all gradients."""

import pytest
import torch
import torch.nn.functional as F
from ops.calls import relative

from onepass.gpt import Config, Model
from onepass.gpt.multi_token import labels_after

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("on_cpu", "by_formula")]

B, S, VOCAB, HEAD = 2, 16, 64, 8
SHAPE = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2}
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
EXPERTS = {"num_moe_experts": 3, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.1}
GPT2 = {"normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True}
KINDS = {  # our options, and Megatron's
    "llama": (LLAMA | {"untie_embeddings_and_output_weights": True}, LLAMA | {"activation_func": F.silu}),
    "gpt-2": (GPT2 | {"activation_func": "gelu_exact", "position_embedding_type": "learned_absolute"}, GPT2),
    "experts": (
        LLAMA | EXPERTS,
        LLAMA | EXPERTS | {"activation_func": F.silu, "moe_router_load_balancing_type": "aux_loss"},
    ),
}
MASKS = {
    "all tokens": torch.ones_like,
    "some tokens": lambda drawn: (drawn > 0.3).float(),
    "weights of tokens": lambda drawn: 0.2 + drawn,
    "a depth without tokens": lambda drawn: F.pad(torch.ones(B, 1), (0, S - 1)),
}
DEPTHS = {
    "1": {"mtp_num_layers": 1},
    "2": {"mtp_num_layers": 2},
    "2 of one layer": {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
}


def of_megatron(kind, **options):
    """Return a GPTModel whose biases and norms' weights are drawn too."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import TransformerConfig

    ours, own = KINDS[kind]
    config = TransformerConfig(
        **SHAPE, **own, **options, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.1,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization=config.normalization)
    torch.manual_seed(0)
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=VOCAB, max_sequence_length=S,
        share_embeddings_and_output_weights=not ours.get("untie_embeddings_and_output_weights", False),
        position_embedding_type=ours.get("position_embedding_type", "rope"),
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


def as_ours(tensors):
    """Return Megatron's parameters, or their gradients, by our names and in our layouts."""
    made, experts = {}, {}
    for name, t in tensors.items():
        name = name.removeprefix("decoder.").replace("mtp.layers.", "mtp.").replace("mtp_model_layer", "transformer_layer")
        if "local_experts" in name:
            mlp, _, rest = name.partition("local_experts.")
            experts.setdefault(f"{mlp}weight{rest.split('linear_fc')[1][0]}", []).append(t)
        elif "linear_qkv" in name:  # theirs has each group's queries, key and value together
            groups = t.view(SHAPE["num_query_groups"], -1, HEAD, *t.shape[1:])
            made[name] = torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])
        else:
            made[name] = t
    return made | {name: torch.stack(parts) for name, parts in experts.items()}


def found_by_megatron(model, tokens, labels, mask):
    """Return the loss, the depths' losses and hidden states, and the gradients."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()
    hidden = []
    for layer in model.mtp.layers:
        layer.register_forward_hook(lambda module, given, found: hidden.append(found[0].detach().transpose(0, 1)))
    causal = torch.triu(torch.ones(1, 1, S, S, dtype=torch.bool), 1)
    losses = model(tokens, torch.arange(S)[None].expand(B, -1), causal, labels=labels, loss_mask=mask)
    loss = (losses * mask).sum() / mask.sum()
    loss.backward()
    tracker = MTPLossLoggingHelper.tracker
    logged = tracker["loss_values" if "loss_values" in tracker else "values"].clone()  # by version
    return loss.detach(), logged, hidden, as_ours({name: p.grad for name, p in model.named_parameters()})


def found_by_ours(model, tokens, labels, mask):
    hidden, losses = [], []
    for layer in model.mtp.values():
        layer.register_forward_hook(lambda module, given, found: hidden.append(found[0].detach()))
    model.output_layer.register_forward_hook(lambda module, given, found: losses.append(found.detach()))
    model(tokens, labels, loss_mask=mask).backward()
    return losses[0], torch.stack(losses[1:]), hidden, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("depths", DEPTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_multi_token_prediction(kind, depths, mask):
    options = DEPTHS[depths] | {"mtp_loss_scaling_factor": 0.7}
    if "num_moe_experts" in KINDS[kind][0]:
        moe_logging = pytest.importorskip("megatron.core.transformer.moe.moe_logging", reason="megatron-core 0.17 has none")
        moe_logging.set_moe_metrics_tracker(moe_logging.MoEMetricsTracker())  # it keeps the first model's number of layers
    theirs = of_megatron(kind, **options)
    ours = Model(Config(**SHAPE, **KINDS[kind][0], **options, vocab_size=VOCAB, max_position_embeddings=S), seed=0)
    ours.load_state_dict(as_ours(dict(theirs.named_parameters())))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (B, S + 1), generator=generator)
    given = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), MASKS[mask](torch.rand(B, S, generator=generator))
    found, expected = found_by_ours(ours, *given), found_by_megatron(theirs, *given)
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert len(found[2]) == options["mtp_num_layers"]
    for one, other in zip(found[2], expected[2], strict=True):
        assert relative(one, other) < 1e-6
    assert found[3].keys() == expected[3].keys()
    for name, grad in expected[3].items():
        assert (found[3][name] - grad).norm() <= 2e-6 * grad.norm(), name


def test_documents():
    """A depth's labels, of which those without a loss are ignored here and masked there."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    boundaries = torch.tensor([0, 1, 3, 3, 9, 16], dtype=torch.int32)
    labels, packed = torch.randint(VOCAB, (1, S)), PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries)
    theirs, mask = labels, torch.ones(1, S)
    for depth in (1, 2, 3):
        theirs, _ = roll_tensor(theirs, packed_seq_params=packed)
        mask, _ = roll_tensor(mask, packed_seq_params=packed)
        assert torch.equal(labels_after(labels, depth, boundaries), theirs.where(mask == 1, -100)), depth
