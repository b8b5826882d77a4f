"""transformers' models with onepass under DDP and fully_shard over two ranks, against one process."""

import copy
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parallel.worlds import PAIRS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import onepass
from onepass.gradients import copy_engines, packed_gathers
from onepass.gradients.fsdp import groups_of
from onepass.integrations import huggingface
from onepass.integrations.huggingface import linears
from onepass.integrations.huggingface.loss import replace_loss
from onepass.integrations.huggingface.patches import Patches
from onepass.kernels import fp8_cast
from onepass.nn import fp8_gathers, use_fp8_gathers
from onepass.parallel import use_copy_engines
from onepass.product.fp8 import scales

transformers = pytest.importorskip("transformers", minversion="5")

WORLDS = PAIRS[:1]
VOCABULARY = 307


def rank_context():
    return onepass.use_backend("torch")


def fully_sharded(model, *own):
    """Shard the layers and each of `own` by itself, and the rest with the root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.layers, *own):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPED = {
    "DDP": DistributedDataParallel,
    "fully_shard": fully_sharded,
    "fully_shard, the head too": lambda model: fully_sharded(model, model.lm_head),
    "fully_shard, norm and head": lambda model: fully_sharded(model, [model.model.norm, model.lm_head]),
}
PUT = {"the loss": lambda model: replace_loss(model, Patches()), "all": huggingface.apply}


def new_model(layers=2):
    layers = {"num_hidden_layers": layers, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, **layers)
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize("what", PUT)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_losses_and_gradients(group, wrapped, what):
    """Of the whole model with only the loss replaced, and with all of onepass."""
    alone = new_model()
    model = copy.deepcopy(alone)
    batches = torch.randint(VOCABULARY, (group.size(), 2, 12)).unbind()
    losses = [alone(input_ids=ids, labels=ids).loss for ids in batches]
    (sum(losses) / len(losses)).backward()
    PUT[what](model)
    called, mine = WRAPPED[wrapped](model), batches[group.rank()]
    outputs = called(input_ids=mine, labels=mine)
    outputs.loss.backward()
    assert outputs.logits.shape == (2, 12, 0)
    torch.testing.assert_close(outputs.loss, losses[group.rank()])
    for name, p in model.named_parameters():
        torch.testing.assert_close(getattr(p.grad, "full_tensor", lambda p=p: p.grad)(), alone.get_parameter(name).grad)


@pytest.mark.parametrize("wrapped", ("DDP", "fully_shard"))
def test_adapters(group, wrapped):
    """PEFT's adapters are in the products, and have the gradients of one process."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    alone = peft.get_peft_model(new_model(), config)
    model = copy.deepcopy(alone)
    batches = torch.randint(VOCABULARY, (group.size(), 2, 12)).unbind()
    losses = [alone(input_ids=ids, labels=ids).loss for ids in batches]
    (sum(losses) / len(losses)).backward()
    huggingface.apply(model)
    adapters = []
    called = DistributedDataParallel(model) if wrapped == "DDP" else fully_sharded(model.get_base_model())
    mine = batches[group.rank()]
    with pytest.MonkeyPatch.context() as patch:  # a rank goes on to other tests
        for name in ("linear", "norm_linear"):
            stock = getattr(linears, name)
            patch.setattr(linears, name, lambda *a, lora, s=stock, **o: adapters.append(len(lora)) or s(*a, lora=lora, **o))
        loss = called(input_ids=mine, labels=mine).loss
    loss.backward()
    together = 2 * [3, 2]  # q, k and v; gate and up, which FSDP gathers each by itself
    assert adapters == (together if wrapped == "DDP" else sum(together) * [1])
    torch.testing.assert_close(loss, losses[group.rank()])
    for name, p in model.named_parameters():
        expected = alone.get_parameter(name).grad
        assert (p.grad is None) is (expected is None)
        if expected is not None:
            torch.testing.assert_close(getattr(p.grad, "full_tensor", lambda p=p: p.grad)(), expected)


@contextmanager
def products():
    """The number of rows of each weight that LinearsMatch multiplies in the block."""
    rows = []
    with pytest.MonkeyPatch.context() as patch:  # a rank goes on to other tests
        for name, place in (("linear", 1), ("norm_linear", 2)):
            stock = getattr(linears, name)
            patch.setattr(linears, name, lambda *a, s=stock, i=place, **o: rows.append(a[i].shape[0]) or s(*a, **o))
        yield rows


GATHERED = {
    "as they come": {},
    "once": {"reshard_after_forward": False},
    "in fp32 of bf16, reduced in fp32": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
}


@pytest.mark.parametrize("gathered", GATHERED)
def test_weights_of_one_product_are_gathered_together(group, gathered):
    """From the second forward on q, k and v are one product, and gate and up, with the gradients of products of their own."""
    apart, model = new_model(), new_model()
    model.load_state_dict(apart.state_dict())
    mesh = init_device_mesh("cpu", (group.size(),))
    for each in (apart, model):
        huggingface.apply(each)
        for part in (*each.model.layers, each):
            fully_shard(part, mesh=mesh, **GATHERED[gathered])
    ids = torch.randint(VOCABULARY, (6, 2, 12), generator=torch.Generator().manual_seed(group.rank()))

    def trained(each, counts):
        optimizer, losses = torch.optim.SGD(each.parameters(), lr=0.1), []
        for step in range(3):
            with products() as rows:
                first, second = (each(input_ids=some, labels=some).loss for some in ids[2 * step : 2 * step + 2])
            counts.append(rows)
            with torch.no_grad():
                each(input_ids=ids[0])
            each.set_requires_gradient_sync(False)
            first.backward()
            each.set_requires_gradient_sync(True)
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [float(first), float(second)]
        return losses, [p.detach().full_tensor() for p in each.parameters()]

    counts = []
    with patch.object(linears, "pack_gathers", lambda weights: False):
        expected, weights = trained(apart, [])
    losses, after = trained(model, counts)
    one, separate = [192, 192] * 2, [64, 64, 64, 96, 96] * 2
    assert counts[0] == 2 * separate and counts[2] == 2 * one, counts
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if "bf16" in gathered else {}
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), **tolerance)
    for mine, theirs in zip(after, weights, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


def losses_of(called, parameters, ids):
    """Return the losses of four steps of a batch."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for _ in range(4):
        loss = called(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrapped", ("DDP", "fully_shard"))
def test_eight_bits(group, wrapped):
    """Each step sees the weights of the one before, gathered ones too."""
    alone = new_model()
    model, ids = copy.deepcopy(alone), torch.randint(VOCABULARY, (2, 12))  # the same for each rank, and so the gradients' mean
    expected = losses_of(alone, alone.parameters(), ids)
    huggingface.apply(model, precision="fp8")
    called = WRAPPED[wrapped](model)
    losses = losses_of(called, called.parameters(), ids)
    assert expected[-1] < expected[0] - 0.3
    assert losses == pytest.approx(expected, rel=1e-2) and losses != pytest.approx(expected, rel=1e-6)


def sharded_in_eight_bits(mp_policy):
    """Return a model whose weights have magnitudes that differ by rows, so that many round to zero at one scale."""
    model = new_model(1)
    layer = model.model.layers[0]
    with torch.no_grad():
        for linear in [each for each in layer.modules() if isinstance(each, torch.nn.Linear)]:
            linear.weight[1::2] *= 2.0**-9 * 1.1
        for linear in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.weight[-1] *= 4.0 * 2**9  # the last rank has the largest, and one of those that share a product
    huggingface.apply(model, precision=onepass.FP8Recipe(scaling="current"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (layer, model):
        fully_shard(part, mesh=mesh, mp_policy=mp_policy)
    return model


def test_gathers_in_eight_bits_have_the_bits_of_others(group):
    """Losses and weights of steps, of an evaluation among them; and fewer bytes travel."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ids, found, travelled = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(group.rank())), [], []
    stock = dist.all_gather_into_tensor

    def gather(whole, mine, **options):
        travelled.append((whole.dtype, whole.numel()))
        return stock(whole, mine, **options)

    for coded in (False, True):
        torch.manual_seed(0)
        model, losses = sharded_in_eight_bits(policy), []
        if coded:
            assert use_fp8_gathers(model) == 7
            travelled.clear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        by_formulas = [
            patch.object(each, "triton_unsupported", lambda x: "formulas take less time") for each in (fp8_cast, scales)
        ]
        with patch.object(dist, "all_gather_into_tensor", gather), by_formulas[0], by_formulas[1]:
            for step in range(2):
                if step == 1:
                    model.eval()
                    with torch.no_grad():
                        losses.append(model(input_ids=ids, labels=ids).loss)
                    model.train()
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        found.append([*losses, *(p.detach().full_tensor() for p in model.parameters())])
    assert all(map(torch.equal, *found))
    of_layer = 4 * 64 * 64 + 3 * 64 * 96
    assert travelled.count((torch.uint8, of_layer + 2 * 2 * 64)) == 2 * 2  # a byte a number, but for the two norms
    assert travelled.count((torch.bfloat16, of_layer + 2 * 64)) == 1  # in evaluation


@pytest.mark.parametrize("why", ["it keeps views of them", "its layers have not run"])
def test_ranks_agree_on_scales_where_one_has_weights_of_a_product_apart(group, why):
    """It has as many collectives as others, and all gather the same weights."""
    model, ids, gathered = sharded_in_eight_bits(MixedPrecisionPolicy()), torch.arange(12).view(1, 12), []
    first = group.rank() == 0
    use_fp8_gathers(model)
    stock = fp8_gathers.FP8AllGather.__call__

    def gather(self, output_tensor, **given):
        stock(self, output_tensor, **given)
        gathered.append(output_tensor.clone())

    pack_gathers = linears.pack_gathers if why.startswith("it keeps") or not first else lambda weights: None
    with patch.object(fp8_gathers.FP8AllGather, "__call__", gather), patch.object(linears, "pack_gathers", pack_gathers):
        model(input_ids=ids, labels=ids)
        parameters = [each for part in groups_of(model) for each in part.fsdp_params] if first else []
        views = [each._unsharded_param.detach() for each in parameters]
        for _ in range(2):
            with products() as rows:
                model(input_ids=ids, labels=ids)
    del views
    assert rows == ([64, 64, 64, 96, 96] if first else [192, 192])
    assert len(gathered) == 3
    for mine in gathered:
        of_first = mine.clone()
        dist.broadcast(of_first, 0)
        assert mine.isfinite().all() and torch.equal(mine, of_first)


def test_a_graph_keeps_the_memory_that_it_was_made_with(group):
    """Backward of forwards before, and a second one, while others gather."""
    expected, ids = [], torch.arange(12).view(1, 12) + group.rank()
    for packed in (False, True):
        torch.manual_seed(0)
        model = new_model(1)
        huggingface.apply(model)
        fully_sharded(model)
        with patch.object(linears, "pack_gathers", linears.pack_gathers if packed else lambda weights: False):
            first, second = (model(input_ids=ids, labels=ids).loss for _ in range(2))
            first.backward()
            with torch.no_grad():
                model(input_ids=ids)
            second.backward()
            third = model(input_ids=ids, labels=ids).loss
            third.backward(retain_graph=True)
            model(input_ids=ids, labels=ids)
            third.backward()
            with products() as rows:
                model(input_ids=ids, labels=ids)
        expected.append({name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None})
    assert len(expected[0]) > 7
    assert rows == [192, 192]
    torch.testing.assert_close(*expected)


def test_one_rank_packs_nothing(group):
    """FSDP2 over one rank allocates each parameter's memory by its own size."""
    model, alone, ids = new_model(), new_model(), torch.arange(12).view(1, 12)
    model.load_state_dict(alone.state_dict())
    huggingface.apply(model)
    mesh = init_device_mesh("cpu", (group.size(), 1), mesh_dim_names=("other", "one"))["one"]
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    for _ in range(3):
        loss, expected = (each(input_ids=ids, labels=ids).loss for each in (model, alone))
        torch.testing.assert_close(loss, expected)
        loss.backward()


def test_without_names_of_fsdp2_products_stay_apart_and_a_warning_says_so(group):
    from torch.distributed import _composable_state
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    model, ids = new_model(1), torch.arange(12).view(1, 12)
    huggingface.apply(model)
    fully_sharded(model)
    with patch.object(_composable_state, "_module_state_mapping"):
        del _composable_state._module_state_mapping
        with pytest.warns(UserWarning, match="have products of their own under FSDP2: it has no _module_state_mapping"):
            assert packed_gathers.pack_gathers([model.lm_head.weight]) is False
    size = patch.object(FSDPMeshInfo, "__getattribute__", without_size)
    with size, pytest.warns(UserWarning, match="their own under FSDP2: its meshes have no shard_mesh_size"), torch.no_grad():
        model(input_ids=ids)


def without_size(info, name):
    if name == "shard_mesh_size":
        raise AttributeError(name)
    return object.__getattribute__(info, name)


def test_what_gathers_in_eight_bits_refuse(group):
    mesh = init_device_mesh("cpu", (group.size(),))
    for recipe in (None, onepass.FP8Recipe(scaling="row")):
        model = new_model()
        huggingface.apply(model, precision=recipe)
        with pytest.raises(ValueError, match="model must be sharded by fully_shard"):
            use_fp8_gathers(model)
        fully_shard(model, mesh=mesh)
        with pytest.raises(ValueError, match="must have layers in eight bits with one scale a weight"):
            use_fp8_gathers(model)


def test_gathers_in_eight_bits_and_by_copy_engines_exclude_each_other(group):
    policy, reach = MixedPrecisionPolicy(), patch.object(copy_engines, "_check_reach", lambda group: None)
    for first, second, found in ((use_copy_engines, use_fp8_gathers, "CopyEngine"), (use_fp8_gathers, use_copy_engines, "FP8")):
        model = sharded_in_eight_bits(policy)
        with reach:
            first(model)
            with pytest.raises(ValueError, match=f"collectives must be FSDP2's own, but {found}AllGather has replaced them"):
                second(model)
