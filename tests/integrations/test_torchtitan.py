"""torchtitan's Trainer with onepass's overrides, beside torchtitan as it is."""

import importlib
import sys
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("torchtitan", reason="needs torchtitan")
pytest.importorskip("spmd_types", reason="needs torchtitan's spmd_types")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies' own
    from integrations import torchtitan_ranks, torchtitan_runs
    from integrations.torchtitan_runs import BLOCK, IN_FP8, NAMES, OURS, PACKED, SETS, VOCABULARY, new_config, train
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss, MSELoss
    from torchtitan.config.manager import ConfigManager
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common import attention, feed_forward, linear, moe, nn_modules, rope, token_dispatcher
    from torchtitan.models.common.decoder import TransformerBlock
    from torchtitan.models.common.dist_gemm import AllGatherFusedFeedForward, AllGatherFusedQKVLinear
    from torchtitan.models.deepseek_v3 import model as deepseek_v3
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
    from torchtitan.models.llama3 import model as llama3

    from onepass.integrations import torchtitan as onepass_titan
from parallel.worlds import found_by

import onepass
from onepass.integrations import seams
from onepass.integrations.seams import SeamError
from onepass.runtime.batch_invariance import invariant
from onepass.testing.invariance import check_batches

pytestmark = pytest.mark.filterwarnings("default")  # torchtitan's and its dependencies' own


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory):
    with patch.dict("os.environ", LOCAL_RANK="0", GLOO_SOCKET_IFNAME="lo"):
        meeting = tmp_path_factory.mktemp("gloo") / "meeting"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield
    distributed.set_spmd_backend("spmd_types")


_stock = {}


def stock(kind, folder, of_context=False, **options):
    """torchtitan's own steps, made once. of_context: of other weights and lengths."""
    key = kind, of_context, *options.items()
    if key not in _stock:
        _stock[key] = train(new_config(folder, kind=kind, **options))[0]
    return _stock[key]


def assert_alike(found, expected, steps=torchtitan_runs.STEPS, norms=1e-6):
    assert len(found) == len(expected) == steps
    for (loss, norm), (stock_loss, stock_norm) in zip(found, expected, strict=True):
        assert loss == pytest.approx(stock_loss, rel=2e-6) and norm == pytest.approx(stock_norm, rel=norms)


# ---- training ----


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), NAMES, ("gqa",), PACKED, BLOCK], ids=",".join)
@pytest.mark.parametrize("kind", ("sdpa", "varlen"))
def test_three_steps(names, kind, tmp_path):
    if kind == "varlen" and not {"attention", "gqa", "block"} & {*names}:
        pytest.skip("VarlenAttention needs a GPU")
    found, model = train(new_config(tmp_path, names, kind))
    assert_alike(found, stock("flex" if kind == "varlen" else kind, tmp_path))
    made = {cls.__name__ for module in model.modules() for cls in type(module).__mro__ if cls.__module__.startswith(OURS)}
    classes = ("Norm", "GatedFeedForward", "InterleavedRoPE", *(["DocumentAttention"] if kind == "varlen" else []))
    of_name = dict(zip(NAMES, classes, strict=False)) | {"gqa": "PackedAttention", "block": "Llama3Block"}
    expected = {of_name[name] for name in names if name in of_name} | ({"DocumentAttention"} if kind == "varlen" else set())
    expected |= {"PackedAttention", "GatedFeedForward", "_FoldedNorms"} if "block" in names else set()
    assert made - {"ActivationLinear"} == expected


@pytest.mark.parametrize("kind", ("sdpa", "varlen"))
@pytest.mark.parametrize("names", (PACKED, BLOCK), ids=",".join)
def test_projections_apart(names, kind, tmp_path):
    """wq, wk and wv with weights of their own."""
    found = train(new_config(tmp_path, names, kind, fuse_qkv=False))[0]
    assert_alike(found, stock("flex" if kind == "varlen" else kind, tmp_path, fuse_qkv=False))


@pytest.mark.parametrize(
    ("model", "names"),
    [("qwen3", ("norm", "feed_forward", "cos_sin_rope", "attention", "loss")),  # norms of heads
     ("qwen3", ("feed_forward", "gqa", "loss")),
     ("qwen3", BLOCK),
     ("deepseek_v3", ("norm", "feed_forward", "complex_rope", "loss"))],  # experts, of which some are shared
)  # fmt: skip
def test_other_models(model, names, tmp_path):
    found = [train(new_config(tmp_path, chosen, "sdpa", model=model))[0] for chosen in (names, ())]
    assert_alike(*found)


@pytest.mark.parametrize("name", ("attention", "gqa", "block"))
def test_flex_as_documents(name, tmp_path):
    config = new_config(tmp_path)
    config.override.imports = [(f"{OURS}.{name}", {"flex_as_documents": True})]
    assert_alike(train(config)[0], stock("flex", tmp_path))


@pytest.mark.parametrize("kind", ("sdpa", "varlen"))
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("names", SETS, ids=",".join)
def test_compiled(names, kind, backend, tmp_path):
    config = new_config(tmp_path, names, kind)
    config.compile.enable, config.compile.backend = True, backend
    assert_alike(train(config)[0], stock("flex" if kind == "varlen" else kind, tmp_path))


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("policy", ("FullAC", "SelectiveAC"))
@pytest.mark.parametrize("names", SETS, ids=",".join)
def test_activation_checkpointing(names, policy, compiled, tmp_path):
    config = new_config(tmp_path, names, "varlen")
    config.activation_checkpoint = getattr(activation_checkpoint, policy).Config()
    config.compile.enable, config.compile.backend = compiled, "aot_eager"
    assert_alike(train(config)[0], stock("flex", tmp_path))


def test_accumulation(tmp_path):
    """Two microbatches a step."""
    found = []
    for names in ((), NAMES):
        config = new_config(tmp_path, names, "sdpa")
        config.training.local_batch_size, config.training.global_batch_size = 2, 4
        found.append(train(config)[0])
    assert_alike(*reversed(found))


def test_tied_weights(tmp_path):
    found = []
    for names in ((), NAMES):
        config = new_config(tmp_path, names, "sdpa")
        config.model_spec.model.enable_weight_tying = True
        config.model_spec.model.tok_embeddings.param_init = {"weight": lambda weight: None}
        found.append(train(config)[0])
    assert_alike(*reversed(found))


def test_bf16(tmp_path):
    found = []
    for names in ((), NAMES):
        config = new_config(tmp_path, names, "sdpa")
        config.training.mixed_precision_param = "bfloat16"
        found.append(torch.tensor(train(config)[0]))
    torch.testing.assert_close(*found, rtol=2e-3, atol=0)


def test_a_loss_that_is_not_chunked(tmp_path):
    config = new_config(tmp_path, NAMES, "sdpa")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    assert_alike(train(config)[0], stock("sdpa", tmp_path))


@pytest.mark.parametrize("first", (False, True))
def test_checkpoints(first, tmp_path):
    """Two steps, then two from their checkpoint, of which one pair is onepass's."""
    found = []
    for ours, last in ((first, 2), (not first, 4)):
        config = new_config(tmp_path / "pair", NAMES if ours else (), "sdpa")
        config.checkpoint.enable, config.checkpoint.last_save_model_only = True, False
        config.training.steps, config.lr_scheduler.total_steps = last, 4
        found += train(config)[0]
    config = new_config(tmp_path, (), "sdpa")
    config.training.steps = config.lr_scheduler.total_steps = 4
    assert_alike(found, train(config)[0], steps=4)


def test_state_dicts(tmp_path):
    keys = [list(train(new_config(tmp_path, names, "sdpa"))[1].state_dict()) for names in ((), *SETS)]
    assert all(each == keys[0] for each in keys)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    return found_by(torchtitan_ranks.run, ("gloo", 2), tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("names", SETS, ids=",".join)
@pytest.mark.parametrize("case", torchtitan_ranks.CASES)
def test_two_ranks(case, names, of_two_ranks):
    for found in of_two_ranks:
        assert_alike(found[case, names], found[case, ()])


@pytest.mark.parametrize("case", torchtitan_ranks.CASES)
def test_two_ranks_in_eight_bits(case, of_two_ranks):
    for found in of_two_ranks:
        ours, stock = torch.tensor(found[case, IN_FP8]), torch.tensor(found[case, ()])
        torch.testing.assert_close(ours, stock, rtol=0.03, atol=0)
        assert (ours[:, 0] != stock[:, 0]).all()


@pytest.mark.parametrize("case", torchtitan_ranks.CONTEXT)
def test_context_parallelism(case, of_two_ranks, tmp_path, monkeypatch):
    """Sequences shared by two ranks, in documents or whole, beside one rank of torchtitan's own code."""
    spmd, kind, model, _ = torchtitan_ranks.CONTEXT[case]
    monkeypatch.setattr(torchtitan_runs, "LENGTH", torchtitan_ranks.WHOLE)
    with torchtitan_runs.drawn_alike():
        alone = stock(kind, tmp_path, model=model, of_context=True)
    for found in of_two_ranks:
        if spmd == "spmd_types":  # nothing sums gradients without FSDP: a rank's are beside a rank's of torchtitan's
            assert found[case][0][0] == pytest.approx(alone[0][0], rel=2e-6)
            assert_alike(found[case], found["spmd_types: flex"])
        else:
            assert_alike(found[case], alone, norms=1e-5)


def test_documents_are_refused_before_a_model_is_built(of_two_ranks):
    for found in of_two_ranks:
        assert "Variable-length attention CP is not yet supported" in found["partial_dtensor: documents"]
        assert "Use FlexAttention + CP" in found["spmd_types: documents"]


def test_documents_refuse_context_parallelism(tmp_path):
    module = onepass_titan.gqa(new_config(tmp_path, (), "varlen").model_spec.model.layers[0].attention).build()
    with pytest.raises(NotImplementedError, match="no context parallelism: build the model with attn_backend='flex'"):
        module.parallelize(SimpleNamespace(cp=2))


@pytest.mark.parametrize("name", ("gqa", "block"))
def test_flex_attention_stays(name, tmp_path):
    """Its masks are functions, which onepass doesn't read: it gets heads that are normed and rotated."""
    found, model = train(new_config(tmp_path, (name, "loss"), model="qwen3"))
    assert type(model.layers["0"].attention.inner_attention) is attention.FlexAttention
    assert_alike(found, stock("flex", tmp_path, model="qwen3"))


def test_the_log_says_that_flex_attention_stays(tmp_path, caplog):
    onepass_titan._log_flex.cache_clear()
    with caplog.at_level("INFO"):
        onepass_titan.gqa(new_config(tmp_path).model_spec.model.layers[0].attention)
    assert "FlexAttention stays torchtitan's" in caplog.text


def test_the_command_line():
    options = {"attention": '={"flex_as_documents": true}'}
    words = [f"{OURS}.{name}{options.get(name, '')}" for name in NAMES]
    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", "--override.imports", *words])
    said = apply_overrides(config.override, config)
    assert len(said) == 13 + 6 + 6 + 6 + 1  # norms, MLPs, ropes, attentions of six layers; a loss


def test_overrides_of_the_same(tmp_path):
    """gqa does what complex_rope does: torchtitan names both."""
    config = new_config(tmp_path, ("gqa", "complex_rope"), "sdpa")
    with pytest.raises(ValueError, match=rf"{OURS}.gqa.*{OURS}.complex_rope"):
        apply_overrides(config.override, config)


# ---- modules ----


@pytest.mark.parametrize("shape", [None, (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("kind", (rope.ComplexRoPE, rope.CosSinRoPE))
def test_positions(kind, shape):
    config = of_gqa(rope=kind.Config(dim=8, max_seq_len=32))
    theirs, ours = config.build(), onepass_titan.gqa(config).build()
    ours.load_state_dict(theirs.state_dict())
    x, positions = torch.randn(2, 4, 8), None if shape is None else torch.randint(32, shape)
    torch.testing.assert_close(ours(x, None, positions), theirs(x, None, positions), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", (False, True))
def test_plain_layers_are_one_product(biased, monkeypatch):
    """As on a GPU: of w1 and w3, whose results lie side by side without a copy."""
    up = new_linear(bias=biased)
    config = feed_forward.FeedForward.Config(w1=up, w3=up, w2=new_linear())
    theirs, ours = config.build(), onepass_titan.feed_forward(config).build()
    ours.load_state_dict(theirs.state_dict())
    taken, projections = [], onepass_titan.projections
    monkeypatch.setattr(onepass_titan, "use_compiled_projections", lambda *_: True)
    monkeypatch.setattr(onepass_titan, "projections", lambda *given: taken.append(given) or projections(*given))
    found, x = [], torch.randn(2, 12, 8)
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        found.append([y, leaf.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert len(taken) == 1


def test_moe_blocks(tmp_path):
    """Of Qwen 3: their attention, norms and experts, whose products are in bf16 as torchtitan's are."""
    found = []
    for names in (BLOCK, ()):
        steps, model = train(torchtitan_runs.with_experts(new_config(tmp_path, names, "sdpa", model="qwen3")))
        found.append(torch.tensor(steps))
        names = {type(layer.moe.routed_experts.inner_experts).__name__ for layer in model.layers.values()}
        assert names == {"GroupedExperts" if len(found) == 2 else "GatedExperts"}
    assert_alike_in_bf16(*found)


def assert_alike_in_bf16(found, expected):
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=3e-5, atol=0)
    torch.testing.assert_close(found[:, 1], expected[:, 1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("policy", (None, "FullAC", "SelectiveAC"))
def test_compiled_experts(policy, tmp_path):
    found = []
    for names in (BLOCK, ()):
        config = torchtitan_runs.with_experts(new_config(tmp_path, names, "sdpa", model="qwen3"))
        config.compile.enable, config.compile.backend = True, "aot_eager"
        config.activation_checkpoint = None if policy is None else getattr(activation_checkpoint, policy).Config()
        found.append(torch.tensor(train(config)[0]))
    assert_alike_in_bf16(*found)


@pytest.mark.parametrize("case", torchtitan_ranks.OF_EXPERTS)
def test_experts_of_two_ranks(case, of_two_ranks):
    for found in of_two_ranks:
        assert_alike_in_bf16(*(torch.tensor(found[case, names]) for names in (("experts",), ())))


class ByRank(token_dispatcher.LocalTokenDispatcher):
    """Stands for dispatchers that send rows to ranks: tokens come sorted, with their counts."""

    @dataclass(kw_only=True, slots=True)
    class Config(token_dispatcher.LocalTokenDispatcher.Config):
        pass

    def dispatch(self, *given):
        self.called = True
        return super().dispatch(*given)


class OtherExperts(moe.GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(moe.GroupedExperts.Config):
        pass


def of_experts(kind=moe.GroupedExperts, dispatcher=token_dispatcher.AllToAllTokenDispatcher, experts=5):
    inner = kind.Config(dim=64, hidden_dim=48, num_experts=experts)
    return moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher.Config(num_experts=experts, top_k=2))


def by_formula(module, x, scores, chosen):
    """The sum over a token's experts, one by one."""
    p = dict(module.inner_experts.named_parameters())
    y = torch.zeros_like(x)
    for e in range(module.inner_experts.num_experts):
        if "w1_EFD" in p:
            own = (F.silu(x @ p["w1_EFD"][e].T) * (x @ p["w3_EFD"][e].T)) @ p["w2_EDF"][e].T
        else:
            gate, value = (x @ p["mlp1_weight_EGD"][e].T + p["mlp1_bias_EG"][e]).unflatten(-1, (-1, 2)).unbind(-1)
            gate, value = gate.clamp(max=0.5), value.clamp(-0.5, 0.5)
            own = gate * (1.702 * gate).sigmoid() * (value + 1) @ p["mlp2_weight_EDF"][e].T + p["mlp2_bias_ED"][e]
        y = y + own * torch.where(chosen == e, scores, 0).sum(-1, keepdim=True)
    return y


@pytest.mark.parametrize("dispatcher", (token_dispatcher.AllToAllTokenDispatcher, ByRank))
@pytest.mark.parametrize("kind", (moe.GroupedExperts, GptOssGroupedExperts))
def test_experts(kind, dispatcher):
    """One expert has no token. Errors are torchtitan's or less, as both round operands of products to bf16."""
    config = of_experts(kind, dispatcher)
    if kind is GptOssGroupedExperts:
        config.inner_experts.swiglu_limit = 0.5
    theirs, ours, oracle = config.build(), onepass_titan.experts(config).build(), config.build().double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter.data, std=0.2)
        parameter.data = parameter.data.bfloat16().float()
    for module in (ours, oracle):
        module.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x, scores = torch.randn(2, 48, 64, dtype=torch.bfloat16), torch.rand(2, 48, 2)
    chosen = torch.rand(2, 48, 4).topk(2).indices  # of five
    counts, dy = chosen.flatten().bincount(minlength=5), torch.randn(2, 48, 64, dtype=torch.bfloat16)
    found = []
    for module in (oracle, theirs, ours):
        leaves = [each.to(torch.float64) if module is oracle else each.clone() for each in (x, scores)]
        leaves = [each.requires_grad_() for each in leaves]
        y = by_formula(module, *leaves, chosen) if module is oracle else module(*leaves, chosen, counts)
        y.backward(dy.to(y.dtype))
        found.append([y, *(leaf.grad for leaf in leaves), *(parameter.grad for parameter in module.parameters())])
    for exact, stock_result, result in zip(*found, strict=True):
        bound = (stock_result.double() - exact).norm()
        assert (result.double() - exact).norm() <= 1.25 * bound + 1e-6 * exact.norm()
        assert bound < 0.06 * exact.norm()  # numbers near the clamp are cut by one and not by the other
    assert all(not parameter.grad[4].any() for parameter in ours.parameters())
    assert hasattr(ours.token_dispatcher, "called") == (dispatcher is ByRank)


@pytest.mark.parametrize("dispatcher", (token_dispatcher.AllToAllTokenDispatcher, ByRank))
@pytest.mark.parametrize("kind", (moe.GroupedExperts, GptOssGroupedExperts))
def test_experts_with_main_grad(kind, dispatcher):
    module = onepass_titan.experts(of_experts(kind, dispatcher, experts=4)).build()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x, scores, chosen = torch.randn(1, 24, 64, dtype=torch.bfloat16), torch.rand(1, 24, 2), torch.rand(1, 24, 4).topk(2).indices
    given = x, scores, chosen, chosen.flatten().bincount(minlength=4)
    module(*given).sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad, parameter.main_grad = None, torch.ones_like(parameter)
    module(*given).sum().backward()
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter.main_grad - 1, grad, rtol=1e-2, atol=1e-2 * float(grad.abs().max()))


@pytest.mark.parametrize("biased", (False, True))
def test_a_norm_within_one_product(biased, monkeypatch):
    """As on a GPU: of w1 and w3, which keep x + residual, and not its norm."""
    up = new_linear(bias=biased)
    config = feed_forward.FeedForward.Config(w1=up, w3=up, w2=new_linear())
    norm = nn_modules.RMSNorm.Config(normalized_shape=8, eps=1e-3).build()
    theirs, ours = config.build(), onepass_titan.feed_forward(config).build()
    ours.load_state_dict(theirs.state_dict())
    torch.nn.init.normal_(norm.weight)
    taken, projections = [], onepass_titan.norm_projections
    monkeypatch.setattr(onepass_titan, "use_compiled_projections", lambda *_: True)
    monkeypatch.setattr(onepass_titan, "norm_projections", lambda *given: taken.append(given) or projections(*given))
    found, given = [], (torch.randn(2, 12, 8), torch.randn(2, 12, 8))
    for module in (ours, theirs):
        norm.zero_grad()
        x, residual = (each.clone().requires_grad_() for each in given)
        if module is ours:
            y = module(x, norm=norm, residual=residual)
        else:
            h = x + residual
            y = h + module(norm(h))
        y.square().sum().backward()
        found.append([y, x.grad, residual.grad, norm.weight.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert len(taken) == 1


@pytest.mark.parametrize("name", ("block", "gqa", "feed_forward"))
def test_precision(name, monkeypatch):
    """Every product of the block's is in eight bits: those that are, are counted."""
    config = of_block(
        size=16, feed_forward=feed_forward.FeedForward.Config(w1=new_linear(16), w3=new_linear(16), w2=new_linear(16))
    )
    config.attention = of_gqa(16)
    if name != "block":
        config = config.attention if name == "gqa" else config.feed_forward
    theirs = config.build().bfloat16()
    ours = getattr(onepass_titan, name)(config, precision="fp8").build().bfloat16()
    ours.load_state_dict(theirs.state_dict())
    monkeypatch.setattr(onepass_titan, "use_compiled_projections", lambda *_: False)
    taken = {each: [] for each in ("linear", "norm_linear", "activation_linear")}
    for each in taken:
        op = getattr(onepass_titan, each)
        monkeypatch.setattr(
            onepass_titan, each, lambda *given, op=op, each=each, **o: taken[each].append(o["precision"]) or op(*given, **o)
        )
    x = torch.randn(2, 16, 16, dtype=torch.bfloat16)
    rest = () if name == "feed_forward" else (None,)
    found, expected = ours(x, *rest), theirs(x, *rest)
    assert 1e-3 < (found - expected).norm() / expected.norm() < 0.1
    counts = {"block": (3, 1, 1), "gqa": (2, 0, 0), "feed_forward": (2, 0, 1)}[name]
    assert taken == dict(zip(taken, (["fp8"] * count for count in counts), strict=True))


@pytest.mark.parametrize("name", ("gqa", "feed_forward"))
def test_layers_that_have_no_precision(name):
    config = (
        of_gqa(wo=SQUARED) if name == "gqa" else feed_forward.FeedForward.Config(w1=new_linear(), w3=SQUARED, w2=new_linear())
    )
    with pytest.raises(
        NotImplementedError, match=rf"{name} can't replace .*with a precision its w\w must be Linear.Config, but is Squared"
    ):
        getattr(onepass_titan, name)(config, precision="fp8")
    getattr(onepass_titan, name)(config)


def test_precision_trains(tmp_path):
    config = new_config(tmp_path, IN_FP8, "sdpa")
    for given in (config, in_bf16 := new_config(tmp_path, (), "sdpa")):
        given.training.mixed_precision_param = "bfloat16"
    found = torch.tensor([train(given)[0] for given in (config, in_bf16)])
    torch.testing.assert_close(found[0], found[1], rtol=0.05, atol=0)


def test_a_layer_that_is_not_plain(monkeypatch):
    """Its own forward is called."""
    config = feed_forward.FeedForward.Config(w1=SQUARED, w3=new_linear(), w2=new_linear())
    theirs, ours = config.build(), onepass_titan.feed_forward(config).build()
    ours.load_state_dict(theirs.state_dict())
    monkeypatch.setattr(onepass_titan, "use_compiled_projections", lambda *_: True)
    x = torch.randn(2, 12, 8)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("positions", [None, (1, 9), (2, 9)], ids=str)
@pytest.mark.parametrize(("name", "kind"), [("complex_rope", rope.ComplexRoPE), ("cos_sin_rope", rope.CosSinRoPE)])
def test_rope(name, kind, positions):
    config = kind.Config(dim=16, max_seq_len=32, scaling="yarn", rope_factor=4.0, original_seq_len=8)
    theirs, ours = config.build(), getattr(onepass_titan, name)(config).build()
    positions = None if positions is None else torch.randint(32, positions)
    given = [(torch.randn(2, 9, heads, 16), torch.randn(2, 9, heads, 16)) for heads in (4, 2)]
    found = []
    for module in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x, _ in given]
        turned = module(*leaves, positions)
        torch.autograd.backward(turned, [grad for _, grad in given])
        found.append([*turned, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (0, 0), (-1, -1), (2, 1), (-1, 2), (2, -1)], ids=str)
def test_windows(window):
    """As varlen_attn has them: the keys before and after a query's own that it sees."""
    q, k, v = (torch.randn(2, 12, heads, 16) for heads in (4, 2, 2))
    starts = torch.tensor([0, 5, 12, 19, 24], dtype=torch.int32)
    masks = attention.VarlenMetadata(starts, starts, 7, 7)
    module = onepass_titan.attention(attention.VarlenAttention.Config(window_size=window)).build()
    found = module(q, k, v, attention_masks=masks, scale=0.3, enable_gqa=True)
    document = torch.bucketize(torch.arange(24), starts, right=True)
    apart = torch.arange(24)[:, None] - torch.arange(24)
    seen = document[:, None] == document
    if window[0] >= 0:
        seen &= apart <= window[0]
    if window[1] >= 0:
        seen &= -apart <= window[1]
    rows = [x.flatten(0, 1).double().repeat_interleave(4 // x.shape[2], 1) for x in (q, k, v)]
    scores = torch.einsum("qhd,khd->hqk", rows[0], rows[1]).mul(0.3).masked_fill(~seen, -torch.inf)
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), rows[2])
    torch.testing.assert_close(found.flatten(0, 1).double(), expected, rtol=1e-5, atol=1e-5)


def test_norms_of_heads_without_weights():
    config = of_gqa(qk_norm=nn_modules.RMSNorm.Config(normalized_shape=8, elementwise_affine=False))
    theirs, ours = config.build(), onepass_titan.gqa(config).build()
    ours.load_state_dict(theirs.state_dict())
    found, x = [], 5 * torch.randn(2, 6, 8)
    for module in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = module(leaf, None)
        y.square().sum().backward()
        found.append([y, leaf.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_sdpa_stays():
    config = attention.ScaledDotProductAttention.Config()
    assert onepass_titan.attention(config) is config


def test_a_loss_without_gradients(tmp_path):
    """As the validator has it; and logits are as before where no labels are given."""
    head = linear.Linear.Config(in_features=8, out_features=50).build()
    hidden, labels = torch.randn(2, 12, 8), torch.randint(50, (2, 12))
    config = ChunkedLossWrapper.Config(num_chunks=3)
    found = []
    for loss in (config.build(), onepass_titan.loss(config).build(compile_config=None)):
        loss.set_lm_head(head)
        with torch.no_grad():
            found.append(loss(hidden, labels, torch.tensor(24), positions=labels)[0])
    torch.testing.assert_close(*found)
    torch.testing.assert_close(head(hidden), hidden @ head.weight.T)


# ---- what is refused ----


def new_linear(size=8, **options):
    return linear.Linear.Config(in_features=size, out_features=size, **options)


class Scaled(nn_modules.RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(nn_modules.RMSNorm.Config):
        pass


class Squared(linear.Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(linear.Linear.Config):
        pass

    def forward(self, x):
        return super().forward(x) ** 2


class Turned(rope.ComplexRoPE):
    @dataclass(kw_only=True, slots=True)
    class Config(rope.ComplexRoPE.Config):
        pass


class GatedAttention(attention.GQAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(attention.GQAttention.Config):
        pass


def of_qkv(kind=attention.FusedQKVLinear, size=8):
    wqkv = linear.Linear.Config(in_features=size, out_features=3 * size)
    return kind.Config(head_dim=size, n_heads=1, n_kv_heads=1, wqkv=wqkv)


def of_gqa(size=8, kind=attention.GQAttention, **options):
    given = {"qkv_linear": of_qkv(size=size), "rope": rope.ComplexRoPE.Config(dim=size, max_seq_len=16)}
    given |= {"inner_attention": attention.ScaledDotProductAttention.Config(), "wo": new_linear(size), **options}
    return kind.Config(n_heads=1, dim=size, **given)


def of_block(kind=llama3.Llama3TransformerBlock, size=8, **options):
    norm = nn_modules.RMSNorm.Config(normalized_shape=size)
    return kind.Config(**{"attention": of_gqa(), "attention_norm": norm, "ffn_norm": norm, **options})


SQUARED = Squared.Config(in_features=8, out_features=8)
FEED_FORWARD = {"w1": new_linear(), "w3": new_linear()}


def test_a_block_under_the_switch():
    """A sequence's rows, and their part of the gradient, don't depend on the sequences beside it."""
    config = of_block(feed_forward=feed_forward.FeedForward.Config(**FEED_FORWARD, w2=new_linear()))
    with pytest.raises(NotImplementedError, match=r"block can't replace .*a precision must have scales by row"):
        onepass_titan.block(config, precision="fp8", batch_invariant=True)
    flex = of_block(attention=of_gqa(inner_attention=attention.FlexAttention.Config()))
    with pytest.raises(NotImplementedError, match="with batch_invariant attention must be"):
        onepass_titan.block(flex, batch_invariant=True)
    assert not invariant()
    try:
        made = onepass_titan.block(config, batch_invariant=True).build()
        assert invariant()
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter)
        check_batches(made, torch.randn(6, 12, 8), None, splits=8).raise_if_different()
    finally:
        onepass.batch_invariant(False)


REFUSED = [
    ("norm", Scaled.Config(normalized_shape=8), r"Scaled\.Config .*RMSNorm\.Config alone"),
    ("feed_forward", AllGatherFusedFeedForward.Config(**FEED_FORWARD, w2=new_linear()), r"AllGatherFusedFeedForward\.Config"),
    ("feed_forward", feed_forward.FeedForward.Config(**FEED_FORWARD, w2=new_linear(bias=True)), r"without a bias"),
    (
        "feed_forward",
        feed_forward.FeedForward.Config(**FEED_FORWARD, w2=Squared.Config(in_features=8, out_features=8)),
        "Squared",
    ),
    ("attention", attention.FlexAttention.Config(), r"FlexAttention\.Config .*attn_backend='varlen'.*flex_as_documents"),
    ("gqa", of_gqa(qkv_linear=of_qkv(AllGatherFusedQKVLinear)), r"qkv_linear must .*AllGatherFusedQKVLinear"),
    ("gqa", of_gqa(rope=Turned.Config(dim=8, max_seq_len=4)), r"rope must be .*Turned"),
    ("gqa", of_gqa(qk_norm=Scaled.Config(normalized_shape=8)), r"qk_norm must be RMSNorm\.Config or NoneType, but is Scaled"),
    ("gqa", of_gqa(kind=GatedAttention), r"GatedAttention\.Config .*GQAttention\.Config alone"),
    ("block", of_block(deepseek_v3.DeepSeekV3TransformerBlock), r"DeepSeekV3TransformerBlock\.Config .*Llama3.* or Qwen3"),
    ("block", of_block(ffn_norm=Scaled.Config(normalized_shape=8)), r"Scaled\.Config .*RMSNorm\.Config alone"),
    ("gqa", of_block(attention=of_gqa(kind=GatedAttention)), r"GatedAttention\.Config"),
    ("experts", of_experts(OtherExperts), r"OtherExperts\.Config .*GroupedExperts\.Config or GptOssGroupedExperts\.Config"),
    ("loss", MSELoss.Config(), r"MSELoss\.Config"),
    ("loss", ChunkedLossWrapper.Config(loss_fn=MSELoss.Config()), r"MSELoss\.Config .*CrossEntropyLoss\.Config alone"),
]


@pytest.mark.parametrize(("name", "config", "said"), REFUSED)
def test_configs_that_are_refused(name, config, said):
    with pytest.raises(NotImplementedError, match=rf"{name}.* can't replace .*{said}"):
        getattr(onepass_titan, "block" if isinstance(config, TransformerBlock.Config) else name)(config)


@pytest.mark.parametrize("name", (*NAMES, "gqa", "block"))
def test_full_dtensor_is_refused(name, tmp_path):
    """By the trainer, before it builds a model."""
    config = new_config(tmp_path, (name,), "sdpa", spmd_backend="full_dtensor")
    with pytest.raises(NotImplementedError, match=rf"{name} can't replace .*spmd_backend must be"):
        train(config)


def test_a_subclass_is_not_passed_over(tmp_path):
    config = new_config(tmp_path, ("norm",), "sdpa")
    config.model_spec.model.norm = Scaled.Config(normalized_shape=256)
    with pytest.raises(NotImplementedError, match=r"norm can't replace test_torchtitan\.Scaled|norm can't replace .*Scaled"):
        apply_overrides(config.override, config)


def test_calls_that_are_refused():
    q, starts = torch.randn(2, 4, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
    documents = onepass_titan.attention(attention.VarlenAttention.Config()).build()
    masks = {"attention_masks": attention.VarlenMetadata(starts, starts, 8, 8)}
    with pytest.raises(NotImplementedError, match="knows no out_transform"):
        documents(q, q, q, **masks, out_transform=len)
    with pytest.raises(NotImplementedError, match="q's have 16 and v's 8"):
        documents(q, q, q[..., :8], **masks)
    with pytest.raises(NotImplementedError, match="no context parallelism"):
        documents(q[:, :2], q, q, **masks)
    with pytest.raises(TypeError, match="must be VarlenMetadata, but is NoneType"):
        documents(q, q, q, attention_masks=None)
    with pytest.raises(ValueError, match="takes no attention_masks"):
        onepass_titan.gqa(of_gqa()).build()(torch.randn(2, 4, 8), **masks)
    loss = onepass_titan.loss(CrossEntropyLoss.Config()).build(compile_config=None)
    with pytest.raises(NotImplementedError, match=r"lm_head that is a Linear, but it is .*Squared"):
        loss.set_lm_head(SQUARED.build())


# ---- versions ----


MODULES = OURS, f"{OURS}_configs", f"{OURS}_experts", f"{OURS}_loss"


@pytest.fixture
def anew(monkeypatch):
    """Import the integration as if for the first time."""
    monkeypatch.setattr(seams, "_warned", set())
    monkeypatch.setattr(override_registry(), "_REGISTRY", {})
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name)
    yield lambda: importlib.import_module(OURS)
    onepass.integrations.torchtitan = onepass_titan


def override_registry():
    return sys.modules[apply_overrides.__module__]


def test_a_newer_version_warns_once_and_works(anew, monkeypatch):
    monkeypatch.setattr("torchtitan.__version__", "9.1.0")
    with pytest.warns(UserWarning, match=r"torchtitan 9\.1\.0 is newer than 0\.3\.0"):
        module = anew()
    for name in MODULES:
        sys.modules.pop(name)
    override_registry()._REGISTRY.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anew()
    assert type(module.norm(nn_modules.RMSNorm.Config(normalized_shape=8)).build()(torch.ones(8))) is torch.Tensor


def test_a_class_that_moved(anew, monkeypatch, tmp_path):
    monkeypatch.delattr(rope, "CosSinRoPE")
    with pytest.raises(SeamError, match=r"torchtitan 0\.3\.0 lacks .*CosSinRoPE.*torchtitan\.models\.common\.rope"):
        anew()
    with pytest.raises(SeamError, match=r"lacks .*CosSinRoPE"):  # as torchtitan's command line says it
        apply_overrides(new_config(tmp_path, ("norm",)).override, new_config(tmp_path))


@pytest.mark.parametrize("now", [None, lambda query, key, rope_cache, scale: None], ids=("renamed", "changed"))
def test_a_method_that_changed(now, anew, monkeypatch):
    monkeypatch.delattr(rope.RoPE, "apply_rotary_emb")
    if now is not None:
        monkeypatch.setattr(rope.RoPE, "apply_rotary_emb", staticmethod(now), raising=False)
    with pytest.raises(SeamError, match=r"rope\.RoPE\.apply_rotary_emb of torchtitan 0\.3\.0 (is not there|takes \(.*scale\)), "):
        anew()
