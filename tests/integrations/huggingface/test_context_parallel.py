"""Sequences that other code spreads over two ranks, in transformers' models with onepass, against one process with whole ones.

PyTorch's ring is its own, and gets a CPU's attention. DeepSpeed's Ulysses has a stand-in, which exchanges heads for tokens and
drops masks as DeepSpeed's does.
"""

import contextlib
import copy
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel.cpu_ring import known_to_cpus
from parallel.worlds import PAIRS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

import onepass
from onepass.integrations import huggingface
from onepass.integrations.huggingface import attentions

transformers = pytest.importorskip("transformers", minversion="5")
accelerate = pytest.importorskip("accelerate.big_modeling")

WORLDS = PAIRS[:1]
V, ROWS, TOKENS = 61, 2, 16  # of the whole
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def rank_context():
    return onepass.use_backend("torch")


def model_of(kind, implementation="sdpa", **options):
    config = getattr(transformers, f"{kind}Config")(**SIZES | options, attn_implementation=implementation)
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().train()
    if hasattr(config, "num_experts"):
        model.set_experts_implementation("eager")  # PyTorch's grouped products take no fp64
    return model


def batch_of(documents=False):
    """Return ids, shifted labels and positions, of one sequence a row or of documents that cross the ranks' border."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(1, V, (ROWS, TOKENS), generator=generator)
    shifted = F.pad(ids, (0, 1), value=-100)[:, 1:].masked_fill(torch.rand(ROWS, TOKENS, generator=generator) < 0.2, -100)
    positions = torch.arange(TOKENS).repeat(ROWS, 1)
    if documents:
        positions[0] -= torch.where(positions[0] >= 5, 5, 0)
        positions[1] -= torch.where(positions[1] >= 12, 12, torch.where(positions[1] >= 3, 3, 0))
    return ids, shifted, positions


def loss_of(model, ids, shifted, positions, **options):
    items = batch_of()[1].ne(-100).sum()
    given = {
        "position_ids": positions,
        "labels": shifted,
        "shift_labels": shifted,
        "num_items_in_batch": items,
        "use_cache": False,
    }
    return model(input_ids=ids, **given | options).loss


def assert_as_alone(group, model, loss, alone, batch):
    """Losses of the ranks' tokens add up to the whole's, and so do gradients: of transformers' logits, in fp64 as they are."""
    ids, shifted, positions = batch
    logits = alone(input_ids=ids, position_ids=positions, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum") / shifted.ne(-100).sum()
    expected.backward()
    total = loss.detach().double()
    dist.all_reduce(total, group=group)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    for (name, p), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        dist.all_reduce(p.grad, group=group)
        assert (p.grad - other.grad).norm() <= 1e-6 * other.grad.norm(), name


# ---- PyTorch's ring ----


@contextlib.contextmanager
def in_ring(*buffers):
    """Leave each buffer this rank's part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kept = {"buffers": [*buffers], "buffer_seq_dims": [1] * len(buffers), "no_restore_buffers": {*buffers}}
    with known_to_cpus(), context_parallel(mesh, **kept):
        yield


MODELS = {
    "Llama": {},
    "Qwen3": {},  # norms of heads
    "Phi3": {"partial_rotary_factor": 0.5},  # one product of q, k and v; a part of a head is rotated
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("hooks", [True, False], ids=["accelerate's hooks", "none"])
@pytest.mark.parametrize("kind", MODELS)
def test_ring(group, kind, hooks):
    """Attention is PyTorch's, over head and tail of each sequence; accelerate's hooks take masks away."""
    alone = model_of(kind, **MODELS[kind])
    model = copy.deepcopy(alone)
    applied = huggingface.apply(model)
    assert any(row.part == "qkv" for row in applied.replaced)
    if hooks:
        accelerate._attach_context_parallel_hooks(model)
    parts = [each.clone() for each in batch_of()]
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch, in_ring(*parts, mask):
        patch.delattr(attentions.AttentionMatch, "at_once")  # kernels don't come by the ring; PyTorch's way on a CPU does
        assert parts[0].shape == (ROWS, TOKENS // 2)
        loss = loss_of(model, *parts, **({"attention_mask": mask} if hooks else {}))
        loss.backward()
    assert_as_alone(group, model, loss, alone, batch_of())


RAISES = {  # arguments of the model and of the call, what `apply` gets, the words
    "documents": ({}, {"documents": True}, {}, "position_ids must count one sequence a row under PyTorch's context_parallel"),
    "no positions": ({}, {"position_ids": None}, {}, "position_ids must be given where PyTorch's context_parallel spreads"),
    "no shift_labels": ({}, {"shift_labels": None}, {}, "shift_labels must be given where PyTorch's context_parallel spreads"),
    "lengths": ({}, {"cu_seq_lens_q": torch.tensor([0, 8])}, {}, "cu_seq_lens_q must be None"),
    "holes": ({}, {"attention_mask": torch.eye(8, dtype=torch.int64)[:ROWS]}, {}, "attention_mask must hide no token before one"),
    "eager": ({"implementation": "eager"}, {}, {}, """attn_implementation must be "sdpa" under PyTorch's .*, but is 'eager'"""),
    "onepass": ({"implementation": "onepass"}, {}, {}, """attn_implementation must be "sdpa" .*, but is 'onepass'"""),
    "windows": ({"kind": "Mistral", "sliding_window": 12}, {}, {}, "must see windows or chunks of 12"),
    "equal bits": ({}, {}, {"batch_invariant": True}, "can't run under onepass.batch_invariant"),
    "a rule": (
        {"kind": "Qwen3Next", "layer_types": ["linear_attention", "full_attention"], "num_experts": 0,
         "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}, {}, {},
        "Qwen3NextGatedDeltaNet needs the tokens before its own, which PyTorch's context_parallel has put on other ranks",
    ),
    "a scan": (
        {"kind": "Bamba", "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}, {}, {},
        "BambaMixer needs the tokens before its own",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RAISES)
def test_ring_raises(group, case):
    of_model, given, asked, words = RAISES[case]
    model = model_of(**{"kind": "Llama"} | of_model)
    applied = huggingface.apply(model, **asked)
    given = dict(given)
    parts = [each.clone() for each in batch_of(given.pop("documents", False))]
    try:
        with in_ring(*parts), pytest.raises((ValueError, NotImplementedError, RuntimeError), match=words):
            loss_of(model, *parts, **given)
        model.zero_grad()
        loss_of(model, *batch_of()).backward()  # outside of it all is as before
    finally:
        applied.undo()


def test_ring_in_a_row(group):
    """A balanced ring takes such positions for its own order; one that is not has them."""
    alone = model_of("Llama")
    model = copy.deepcopy(alone)
    huggingface.apply(model)
    row = part_of(batch_of()[2])
    parts = [each.clone() for each in batch_of()]
    with in_ring(*parts), pytest.raises(ValueError, match="position_ids must count one sequence a row"):
        loss_of(model, *parts[:2], row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring._cp_options, "enable_load_balance", False)
        parts = [each.clone() for each in batch_of()]
        with in_ring(*parts):
            assert parts[2].equal(row)
            loss = loss_of(model, *parts)
            loss.backward()
    assert_as_alone(group, model, loss, alone, batch_of())


def mask_without(*hidden):
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[1, [*hidden]] = 0
    return mask


HOLES = {
    "a rank's tokens": mask_without(*range(8)),
    "a part of it": mask_without(2, 3),
    "across the border": mask_without(6, 7, 8),
}


@pytest.mark.parametrize("case", HOLES)
def test_holes_raise_on_every_rank(group, case):
    model = model_of("Llama")
    huggingface.apply(model)
    words = "attention_mask must hide no token before one"
    parts, mask = [each.clone() for each in batch_of()], HOLES[case].clone()
    with in_ring(*parts, mask), pytest.raises(ValueError, match=words):
        loss_of(model, *parts, attention_mask=mask)
    with in_ulysses("sdpa"):
        parts = [*map(part_of, batch_of())]
        with pytest.raises(ValueError, match=words):
            loss_of(model, *parts, attention_mask=part_of(HOLES[case]))
        loss_of(model, *parts, attention_mask=part_of(mask_without(*range(7, 16))))


def test_ring_compiled(group):
    """Positions are looked at between graphs, and a model that must be one graph can't be compiled."""
    torch.compiler.reset()
    alone = model_of("Llama")
    model = copy.deepcopy(alone)
    huggingface.apply(model)
    compiled, whole = (torch.compile(model, backend="eager", fullgraph=full) for full in (False, True))
    parts = [each.clone() for each in batch_of()]
    with in_ring(*parts):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="batches are looked at where sequences are spread"):
            loss_of(whole, *parts)
        loss = loss_of(compiled, *parts)
        loss.backward()
    assert_as_alone(group, model, loss, alone, batch_of())
    parts = [each.clone() for each in batch_of(documents=True)]
    with in_ring(*parts), pytest.raises(ValueError, match="position_ids must count one sequence a row"):
        loss_of(compiled, *parts)


def test_implementation_onepass_without_apply(group):
    parts = [each.clone() for each in batch_of()]
    with in_ring(*parts), pytest.raises(ValueError, match='attn_implementation must be "sdpa"'):
        loss_of(model_of("Llama", "onepass"), *parts)


# ---- Ulysses ----


class _Exchange(torch.autograd.Function):
    """Heads for tokens, or back: x's dimension `parts` is divided over the ranks, and theirs of `whole` come together."""

    @staticmethod
    def forward(ctx, x, parts, whole):
        ctx.dims = parts, whole
        sent = [each.contiguous() for each in x.chunk(dist.get_world_size(), parts)]
        got = [torch.empty_like(each) for each in sent]
        dist.all_to_all(got, sent) if dist.get_backend() == "nccl" else _by_gathers(got, sent)
        return torch.cat(got, whole)

    @staticmethod
    def backward(ctx, dy):
        return _Exchange.apply(dy, *reversed(ctx.dims)), None, None


def _by_gathers(got, sent):
    for rank in range(len(sent)):
        dist.scatter(got[rank], sent if dist.get_rank() == rank else None, src=rank)


class Ulysses:
    """As DeepSpeed's UlyssesSPAttentionHF."""

    def __init__(self, core):
        self.core, self.sp_rank, self.world_size, self.disable_in_eval = core, dist.get_rank(), dist.get_world_size(), True
        self.process_group = dist.group.WORLD

    def __call__(self, module, query, key, value, attention_mask, **options):
        if not module.training:
            return self.core(module, query, key, value, attention_mask, **options)
        positions = [torch.empty_like(options["position_ids"]) for _ in range(self.world_size)]
        dist.all_gather(positions, options["position_ids"].contiguous())
        copies = max(1, self.world_size // key.shape[1])
        key, value = (each.repeat_interleave(copies, 1) for each in (key, value))
        q, k, v = (_Exchange.apply(each, 1, 2) for each in (query, key, value))
        module.num_key_value_groups = q.shape[1] // k.shape[1]
        y, weights = self.core(module, q, k, v, None, **options | {"position_ids": torch.cat(positions, 1)})
        return _Exchange.apply(y, 1, 2), weights


@contextlib.contextmanager
def in_ulysses(implementation):
    """Wrap transformers' attention function, as DeepSpeed does when it is asked for."""
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    core = functions[implementation]
    ulysses = Ulysses(core)

    def wrapper(module, query, key, value, attention_mask, *args, **options):
        return ulysses(module, query, key, value, attention_mask, *args, **options)

    functions[implementation] = wrapper
    try:
        yield
    finally:
        functions[implementation] = core


def part_of(x):
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


ULYSSES = {  # the implementation, whether documents are packed, `apply` or not, the model
    "sdpa": ("sdpa", False, True, {"kind": "Llama"}),
    "onepass": ("onepass", False, True, {"kind": "Qwen3"}),
    "documents": ("onepass", True, True, {"kind": "Llama"}),
    "documents, one head of keys": ("onepass", True, True, {"kind": "Llama", "num_key_value_heads": 1}),
    "documents and windows": ("onepass", True, True, {"kind": "Mistral", "sliding_window": 4}),
    "without apply": ("onepass", True, False, {"kind": "Mistral", "sliding_window": 4}),
}


@pytest.mark.parametrize(("case", "compiled"), [*((case, False) for case in ULYSSES), ("without apply", True)], ids=str)
def test_ulysses(group, case, compiled):
    """Attention of some heads over whole sequences, whose documents and windows onepass sees."""
    implementation, packed, applies, options = ULYSSES[case]
    alone = model_of(**options)
    model = copy.deepcopy(alone)
    model.set_attn_implementation(implementation)
    if applies:
        huggingface.apply(model)
    torch.compiler.reset()
    with in_ulysses(implementation):  # whose exchange stands between graphs
        loss = loss_of(torch.compile(model, backend="eager") if compiled else model, *map(part_of, batch_of(packed)))
        loss.backward()
    assert_as_alone(group, model, loss, alone, batch_of(packed))


def test_ulysses_raises(group):
    model, windows = model_of("Llama"), model_of("Mistral", sliding_window=12)
    mixers = model_of(**RAISES["a rule"][0])
    for each in (model, windows, mixers):
        huggingface.apply(each)
    with in_ulysses("sdpa"):
        parts = [*map(part_of, batch_of(documents=True))]
        with pytest.raises(
            ValueError, match=r"position_ids must count one sequence a row under .*, whose attention parts no documents"
        ):
            loss_of(model, *parts)
        parts = [*map(part_of, batch_of())]
        with pytest.raises(NotImplementedError, match="windows or chunks of 12"):
            loss_of(windows, *parts)
        with pytest.raises(NotImplementedError, match="needs the tokens before its own"):
            loss_of(mixers, *parts)
        with pytest.raises(ValueError, match="shift_labels must be given"):
            loss_of(model, *parts, shift_labels=None)
        with torch.no_grad():  # in evaluation sequences are whole
            ids, _, positions = batch_of(documents=True)
            found = model.eval()(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, model(input_ids=ids, position_ids=positions, use_cache=False).logits)


def test_verl_wraps_flash_attention_alone(group):
    stub = types.SimpleNamespace(get_ulysses_sequence_parallel_world_size=lambda: 2)
    model = model_of("Llama")
    huggingface.apply(model)
    ids, _, positions = map(part_of, batch_of())
    with pytest.MonkeyPatch.context() as patch:  # a rank goes on to other tests
        patch.setitem(sys.modules, "verl.utils.ulysses", stub)
        words = "must be flash attention under verl's ulysses_sequence_parallel_size.*but is 'sdpa'"
        with pytest.raises(ValueError, match=words):
            model(input_ids=ids, position_ids=positions)
        with pytest.raises(ValueError, match="but is 'onepass'"):
            model_of("Llama", "onepass")(input_ids=ids, position_ids=positions)
