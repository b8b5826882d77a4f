"""Whole models under batch_invariant() by the real kernels: batches, packed and padded, forward and backward."""

import pytest
import torch
from gpu.calls import memory_goes_back  # noqa: F401

import onepass
from onepass.gpt import Config, Model
from onepass.testing.invariance import check_batches, check_packing

transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers")

from onepass.integrations import huggingface  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARY = 1000
SIZES = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
}  # fmt: skip
MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
FAMILIES = {"Llama": {}, "Qwen3": {}, "Qwen3Moe": MOE}
LENGTHS = 5, 130, 64, 777, 1


def ids(*shape, seed=0):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).cuda()


@pytest.fixture
def model(request):
    family, dtype = request.param
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(config).to("cuda", dtype)
    applied = huggingface.apply(made, batch_invariant=True)
    assert applied.rows[-1].why is None
    yield made
    applied.undo()


every = pytest.mark.parametrize(
    "model", [(family, dtype) for family in FAMILIES for dtype in (torch.bfloat16, torch.float32)], indirect=True, ids=str
)


@every
def test_rows_of_a_batch(model):
    check_batches(model.train(), input_ids=ids(9, 130), use_cache=False, splits=10).raise_if_different()


@every
def test_packed_documents(model):
    if model.dtype is torch.float32:
        pytest.skip("PyTorch's attention of documents")
    check_packing(model.train(), [ids(length, seed=length) for length in LENGTHS]).raise_if_different()


@every
@pytest.mark.parametrize("side", ("left", "right"))
def test_padding(model, side):
    documents, most = [ids(length, seed=length) for length in LENGTHS], max(LENGTHS)
    rows, mask = (torch.zeros(len(LENGTHS), most, dtype=torch.long, device="cuda") for _ in range(2))
    places = [slice(most - n, None) if side == "left" else slice(n) for n in LENGTHS]
    for at, (place, document) in enumerate(zip(places, documents, strict=True)):
        rows[at, place], mask[at, place] = document, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if model.dtype is torch.float32:
        pytest.skip("PyTorch's attention of documents")
    with torch.no_grad():
        together = model(input_ids=rows, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for at, (place, document) in enumerate(zip(places, documents, strict=True)):
            assert torch.equal(together[at, place], model(input_ids=document[None], use_cache=False).logits[0])


@every
def test_the_losss_gradient_by_the_fused_head(model):
    """Of each row's tokens, with a loss that is a sum."""
    rows = ids(6, 130)
    embeddings = model.get_input_embeddings()(rows).detach()

    def gradient(which):
        x = embeddings[which].requires_grad_()
        model.train()(inputs_embeds=x, labels=rows[which], num_items_in_batch=1, use_cache=False).loss.backward()
        return x.grad

    whole = gradient(slice(None))
    for which in (slice(1), slice(2, 5), [4, 1]):
        assert torch.equal(gradient(which), whole[which])


@pytest.mark.parametrize("changes", ({}, {"qk_layernorm": True}, {"num_moe_experts": 8, "moe_router_topk": 2}), ids=str)
def test_the_gpt(changes):
    sizes = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 704, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    config = Config(**sizes, params_dtype="bf16", **changes)
    model, tokens = Model(config, device="cuda", seed=0), ids(9, 130)
    with onepass.batch_invariant():
        check_batches(model, tokens, splits=10, leave_out=("mlp.experts",)).raise_if_different()
        packed = torch.cat([tokens[at, : 20 * at + 1] for at in range(6)])
        ends = torch.tensor([0, *(20 * at + 1 for at in range(6))], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
        together = model(packed[None], cu_seqlens=ends)[0]
        for at, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
            assert torch.equal(together[start:end], model(tokens[at : at + 1, : end - start])[0])
