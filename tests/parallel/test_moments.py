"""AdamW over MainGrads with moments of each kind, in backward, and with its state in the host's memory."""

import copy
import gc
import io
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from parallel.adamw_oracle import BF16, FP32
from parallel.test_step_in_backward import Model, ids
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import onepass
from onepass.gradients import adamw, adamw_state, offloaded_state, step_in_backward
from onepass.gradients.packed_params import pack
from onepass.parallel import AdamW, MainGrads, MasterWeights, ShardedAdamW, StepInBackward
from onepass.testing.mutants import mutate

MOMENTS = ("fp32", "bf16", "8bit")
WAYS = {
    "after": {},
    "in backward": {"in_backward": True},
    "offload": {"offload": "state"},
    "both": {"in_backward": True, "offload": "state"},
}
SMALL = 256 * 20 * 4  # bytes of a releasable buffer: two or three parameters


def small(world, put):
    """Make buffers and passages of a few parameters, in a module's world."""
    put(world.MainGrads.__init__.__globals__, "RELEASED_BYTES", SMALL)
    put(world.allocate_state.__globals__, "PASSAGE", 256 * 7)


@pytest.fixture(autouse=True)
def _by_pytorch(monkeypatch):
    small(adamw, monkeypatch.setitem)
    with onepass.use_backend("torch"):
        yield


def made(moments="8bit", way="after", dtype=BF16, reentrant=None, world=adamw, **options):
    torch.manual_seed(0)
    model = Model(reentrant).to(dtype)
    grads = world.MainGrads(model, release=True, bucket_bytes=256 * 4)
    return model, grads, world.AdamW(grads, lr=1e-2, weight_decay=0.1, moments=moments, **WAYS[way], **options)


def trained(model, grads, optimizer, steps=range(4), microbatches=1):
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    for step in steps:
        grads.zero_()
        with optimizer.accumulate():
            for more in range(1, microbatches):
                model(ids(100 * more + step)).backward()
        model(ids(step)).backward()
        grads.finish()
        optimizer.step()
        schedule.step()
    return everything(model, optimizer)


def everything(model, optimizer):
    """Weights, and what is stored beside them."""
    optimizer._rings.settle()
    state = [each for _, mine, _ in optimizer.parameter_states() for each in mine.stored.values()]
    return [each.detach().clone() for each in (*model.parameters(), *state)]


def alike(a, b):
    return len(a) == len(b) and all(torch.equal(mine, theirs) for mine, theirs in zip(a, b, strict=True))


# ---- one formula, whenever it steps and wherever its state lies ----


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("way", [*WAYS][1:])
@pytest.mark.parametrize("moments", MOMENTS)
def test_all_ways_have_the_same_bits(moments, way, microbatches):
    usual = trained(*made(moments), microbatches=microbatches)
    assert alike(usual, trained(*made(moments, way), microbatches=microbatches))


@pytest.mark.parametrize("dtype", [FP32, torch.float16], ids=str)
@pytest.mark.parametrize("way", [*WAYS][1:])
def test_other_weights_have_the_same_bits_too(way, dtype):
    assert alike(trained(*made("8bit", dtype=dtype)), trained(*made("8bit", way, dtype=dtype)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_made_again_in_backward(reentrant):
    model, grads, optimizer = made(reentrant=reentrant)
    if reentrant:  # whose backwards run within the backward
        early = made(way="both", reentrant=reentrant)
        early[1].zero_()
        early[0](ids(0)).backward()
        return
    assert alike(trained(model, grads, optimizer), trained(*made(way="both", reentrant=reentrant)))


def in_groups(model):
    """What ShardedAdamW has in fp32, as its rows are no blocks, and all others."""
    trained = [p for p in model.parameters() if p.requires_grad]
    wide = [p for p in trained if p is model.words.weight or p.shape[-1] % 256]
    rest = [p for p in trained if all(p is not each for each in wide)]
    return [{"params": wide, "moments": "fp32"}, {"params": rest}]


@pytest.mark.parametrize("moments", MOMENTS)
def test_codes_and_masters_are_those_of_sharded_adamw(moments):
    torch.manual_seed(0)
    model, options = Model().to(BF16), {"lr": 1e-2, "moments": moments}
    other = copy.deepcopy(model)
    grads = MainGrads(model)
    optimizer = AdamW(grads, in_groups(model), **options)
    theirs = ShardedAdamW(in_groups(other), masters=True, **options)
    for step in range(4):
        grads.zero_()
        model(ids(step)).backward()
        grads.finish()
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            if mine.requires_grad:
                its.grad = mine.main_grad.to(BF16)
                mine.main_grad.copy_(its.grad)
        optimizer.step()
        theirs.step()
    names = {name for state in theirs.state.values() for name in state}
    assert ("exp_avg_code" in names) == (moments == "8bit")
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
        for name, each in theirs.state.get(its, {}).items():
            assert torch.equal(optimizer.state[mine][name], each), name


def test_what_is_kept_in_eight_bits():
    model, _, optimizer = made()
    names = {name: set(optimizer.state[p]) for name, p in model.named_parameters() if p.requires_grad}
    coded = {"exp_avg_code", "exp_avg_scale", "exp_avg_sq_code", "exp_avg_sq_scale", "low", "step"}
    wide = {"exp_avg", "exp_avg_sq", "low", "step"}
    for name, found in names.items():
        assert found == (coded if name.endswith(("0.weight", "2.weight")) else wide), name
    layer = model.layers[0]
    assert optimizer.state[layer[0].weight]["exp_avg_scale"].shape == (8, 1)  # rows of 256
    assert optimizer.state[layer[2].weight]["exp_avg_scale"].shape == (8,)  # of 8: blocks go over several
    grouped = [{"params": [model.words.weight], "moments": "8bit"}, {"params": [*model.layers.parameters(), model.unused]}]
    own = AdamW(MainGrads([p for p in model.parameters() if p.requires_grad and not delattr(p, "main_grad")]), grouped)
    assert "exp_avg_code" in own.state[model.words.weight] and "exp_avg" in own.state[layer[0].weight]


# ---- memory ----


def test_gradients_memory_is_given_back_as_they_come():
    model, grads, optimizer = made(way="in backward")
    live = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _: live.append(sum(buffer.untyped_storage().nbytes() for buffer in grads.buffers))
            )
    grads.zero_()
    model(ids(0)).backward()
    whole = sum(buffer.numel() * 4 for buffer in grads.buffers)
    assert max(live) <= 3 * SMALL and whole > 3 * max(live)
    assert optimizer.stepped and "unused" not in optimizer.stepped
    grads.finish()
    assert not any(buffer.untyped_storage().nbytes() for buffer in grads.buffers)
    optimizer.step()
    assert not optimizer.stepped


def test_little_of_offloaded_state_is_on_the_device():
    _, _, optimizer = made(way="offload")
    ring = optimizer._rings[torch.device("cpu")]
    most = max(sum(used.nbytes for _, used in passage.pairs) for passage in ring.passages)
    assert len(ring.passages) > 5 and len(ring._slots) == 3
    assert all(slot.nbytes <= most + 20 * 512 for slot in ring._slots)
    assert ring.bytes == sum(each.nbytes for _, mine, _ in optimizer.parameter_states() for each in mine.stored.values())
    assert ring.rate() > 0


def test_state_comes_when_its_memory_is_free(monkeypatch):
    """The current stream allocates and clears it, and may not have come so far."""
    ring, waited = offloaded_state.StateRing(torch.device("cpu")), []
    ring._streams = [SimpleNamespace(wait_stream=to.append, synchronize=lambda: None) for to in (waited, [])]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current one")
    for passages, size in enumerate((512, 1024, 512, 2048), 1):  # the last in larger memory than the first
        ring.add_passage(size)
        assert waited == ["the current one"] * passages


def test_everything_goes_with_the_optimizer():
    model, grads, optimizer = made(way="both")
    trained(model, grads, optimizer, range(1))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    grads.zero_()
    model(ids(0)).backward()
    grads.finish()  # nobody steps in it any more
    assert grads.norm() > 0


# ---- clipping ----


def test_it_clips_by_the_norm_of_the_step_before():
    early, after = made("fp32", dtype=FP32, way="after", in_backward=StepInBackward(max_norm=0.05)), made("fp32", dtype=FP32)
    before = None
    for step in range(4):
        for model, grads, _ in (early, after):
            grads.zero_()
            model(ids(step)).backward()
            grads.finish()
        norm = after[1].norm()
        after[2].step(max_norm=None if before is None else 0.05, norm=before)
        torch.testing.assert_close(early[2].step(), norm)
        before = norm
    assert norm > 0.1
    torch.testing.assert_close([*early[0].parameters()], [*after[0].parameters()])


def test_a_step_that_broke_off_leaves_the_norm_of_the_step_before():
    model, grads, optimizer = made("fp32", dtype=FP32, in_backward=StepInBackward(max_norm=0.05))
    trained(model, grads, optimizer, range(1))
    norm = optimizer.backward_steps.last.norm.clone()
    handle = model.layers[0].register_full_backward_hook(lambda *_: (_ for _ in ()).throw(ValueError))
    grads.zero_()
    with pytest.raises(ValueError):
        (100 * model(ids(1))).backward()
    handle.remove()
    assert optimizer.stepped
    clipped, run = [], optimizer._run
    optimizer._run = lambda part, by, *rest: clipped.append(by) or run(part, by, *rest)
    trained(model, grads, optimizer, range(1))
    assert clipped and all(by == norm for by in clipped)


@pytest.mark.parametrize("most", [1.0, math.inf])
@pytest.mark.parametrize("over", ["main_grad", "grad"])
def test_a_norm_that_is_not_finite_clips_nothing(over, most):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(4, 256))
    grads = MainGrads([weight], release=True) if over == "main_grad" else None
    how = {"lr": 0.1, "in_backward": StepInBackward(max_norm=most)}
    optimizer = ShardedAdamW([weight], **how) if grads is None else AdamW(grads, **how)
    norms = []
    for size in (1.0, 1e30, 1.0):
        if grads is not None:
            grads.zero_()
        before = weight.detach().clone()
        (size * weight[:, 0]).sum().backward()
        if grads is not None:
            grads.finish()
        norms.append(optimizer.step().item())
        optimizer.zero_grad()
    assert norms == [2.0, math.inf, 2.0] and weight.isfinite().all() and not torch.equal(before, weight)


def test_the_norm_has_no_gradients_of_what_was_frozen_in_the_step():
    norms = []
    for way in ("after", "in backward"):
        model, grads, optimizer = made("fp32", way="after", dtype=FP32, in_backward=way != "after" and StepInBackward(1e9))
        grads.zero_()
        with optimizer.accumulate():
            model(ids(0)).backward()
        model.layers[1].requires_grad_(False)
        model(ids(1)).backward()
        grads.finish()
        norms.append(optimizer.step(1e9) if way == "after" else optimizer.step())
    torch.testing.assert_close(*norms)


# ---- freezing, states ----


def test_a_part_is_what_lies_in_a_buffer_whenever_that_was_made():
    """Buckets that came one after another have buffers of their own, which a plan over all of them would divide otherwise."""
    found = []
    for early in (False, True):
        torch.manual_seed(0)
        model = Model().to(BF16)
        for layer in list(model.layers)[1:]:
            layer.requires_grad_(False)
        grads = MainGrads(model, release=True, bucket_bytes=256 * 4)
        for layer in model.layers:
            layer.requires_grad_(True)
            grads.zero_()
        optimizer = AdamW(grads, lr=1e-2, moments="8bit", in_backward=early)
        found.append(trained(model, grads, optimizer, range(2), microbatches=2))
    assert alike(*found)


def test_a_later_sharded_adamw_takes_over():
    weight = nn.Parameter(torch.ones(4, 256))
    old = ShardedAdamW([weight], lr=1e-3, in_backward=True)
    new = ShardedAdamW([weight], lr=1.0)
    weight.sum().backward()
    assert (weight == 1).all() and weight.grad is not None
    new.step()
    assert (weight < 0.5).all() and old is not None


def test_weights_of_another_type_are_refused_by_name():
    model, grads, optimizer = made()
    model.float()
    grads.zero_()
    with pytest.raises(RuntimeError, match=r"the type that they had when .* was torch.bfloat16 and is torch.float32"):
        trained(model, grads, optimizer, range(1))


def test_packed_parameters_have_packed_gradients_behind_any_other():
    first, *packed = (nn.Parameter(torch.ones(rows, 64)) for rows in (5, 3, 4, 8))
    pack(packed)
    grads = MainGrads([*packed, first])
    ends = [each.main_grad.data_ptr() + each.main_grad.nbytes for each in packed]
    assert ends[:-1] == [each.main_grad.data_ptr() for each in packed[1:]] and grads.buffers


@pytest.mark.parametrize("later", [AdamW, MasterWeights], ids=["AdamW", "MasterWeights"])
def test_an_optimizer_that_is_made_later_takes_over(later):
    model, grads, old = made(way="in backward", dtype=FP32)
    make = (grads,) if later is AdamW else (grads, lambda groups: torch.optim.AdamW(groups, lr=1e-3))
    new = later(*make)
    before = [p.clone() for p in model.parameters()]
    grads.zero_()
    model(ids(0)).backward()
    assert all(map(torch.equal, before, model.parameters()))  # nobody stepped
    grads.finish()
    new.step()
    assert not all(map(torch.equal, before, model.parameters())) and old is not None


@pytest.mark.parametrize("way", WAYS)
def test_layers_that_are_frozen_and_unfrozen(way):
    early, usual = made(way=way, dtype=FP32), made(dtype=FP32)
    for step in range(6):
        for model, grads, optimizer in (early, usual):
            model.layers[1].requires_grad_(step % 3 != 0)
            model.frozen.requires_grad_(step > 3)
            trained(model, grads, optimizer, [step])
    assert alike(everything(early[0], early[2]), everything(usual[0], usual[2]))


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_state_goes_on_bit_for_bit(way, moments):
    model, grads, optimizer = made(moments, way)
    trained(model, grads, optimizer, range(2))
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    expected = trained(model, grads, optimizer, range(2, 4))
    for other_way in (way, "after"):
        again = made(moments, other_way)
        again[0].load_state_dict(weights)
        again[2].load_state_dict(state)
        assert alike(trained(*again, range(2, 4)), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_state_is_saved_by_torch_save(moments, way):
    model, grads, optimizer = made(moments, way)
    trained(model, grads, optimizer, range(1))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    most = sum(each.nbytes + 100 for state in optimizer.state_dict()["state"].values() for each in state.values())
    assert len(file.getvalue()) < 1.2 * most + 40_000
    file.seek(0)
    again = made(moments, way)
    again[0].load_state_dict(model.state_dict())
    again[2].load_state_dict(torch.load(file))
    assert alike(everything(again[0], again[2]), everything(model, optimizer))
    sharded = ShardedAdamW(model.parameters(), moments=moments, masters=True, offload=WAYS[way].get("offload"))
    torch.save(sharded.state_dict(), io.BytesIO())


@pytest.mark.parametrize("moments", MOMENTS)
def test_distributed_checkpoints_states_have_names_for_keys(moments):
    model, grads, optimizer = made(moments)
    trained(model, grads, optimizer, range(2))
    weights, state = get_state_dict(model, optimizer)
    other, other_grads, again = made(moments, "both")
    set_state_dict(other, again, model_state_dict=weights, optim_state_dict=copy.deepcopy(state))
    assert alike(everything(other, again), everything(model, optimizer))
    assert alike(trained(model, grads, optimizer, range(2, 3)), trained(other, other_grads, again, range(2, 3)))


def test_states_with_less_than_all_are_refused_by_name():
    model, grads, optimizer = made()
    trained(model, grads, optimizer, range(1))
    sharded = ShardedAdamW(in_groups(model), moments="8bit", masters=True)
    for each in (optimizer, sharded):
        whole, before = copy.deepcopy(each.state_dict()), copy.deepcopy(each.state_dict())
        key = next(key for key, state in whole["state"].items() if "exp_avg_code" in state)
        short = torch.zeros(3)
        for name, wrong in (("exp_avg_sq_scale", None), ("exp_avg_code", short), ("low", short), (key, None)):
            bad = copy.deepcopy(whole)
            if name == key:
                bad["state"]["another"] = bad["state"].pop(key)
            elif wrong is None:
                del bad["state"][key][name]
            else:
                bad["state"][key][name] = wrong
            with pytest.raises(ValueError, match="'another'" if name == key else f"state must have {name} of .* but has"):
                each.load_state_dict(bad)
            now = each.state_dict()
            assert all(torch.equal(mine, now["state"][k][n]) for k, state in before["state"].items() for n, mine in state.items())


def test_states_go_between_kinds_and_to_sharded_adamw():
    model, grads, fine = made("fp32")
    trained(model, grads, fine, range(3))
    state = copy.deepcopy(fine.state_dict())
    others = made("8bit", "both")
    others[2].load_state_dict(state)
    assert all(map(torch.equal, model.parameters(), others[0].parameters()))  # by the masters
    back = made("fp32")
    back[0].load_state_dict(others[0].state_dict())
    back[2].load_state_dict(copy.deepcopy(others[2].state_dict()))
    states = ((state for _, state, _ in each.parameter_states()) for each in (fine, others[2], back[2]))
    for exact, codes, again in zip(*states, strict=True):
        assert torch.equal(exact.read("master"), again.read("master"))
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(codes.read(kind), again.read(kind))
            assert (codes.read(kind) - exact.read(kind)).norm() <= 0.05 * exact.read(kind).norm()
    sharded = ShardedAdamW([p for p in others[0].parameters()], moments="8bit", masters=True)
    sharded.load_state_dict({**copy.deepcopy(others[2].state_dict()), "param_groups": sharded.state_dict()["param_groups"]})
    weight = others[0].layers[0][0].weight
    assert torch.equal(sharded.state[weight]["exp_avg_code"], others[2].state[weight]["exp_avg_code"])
    assert torch.equal(sharded.state[weight]["low"], others[2].state[weight]["low"])


@pytest.mark.parametrize("way", ["after", "offload"])
def test_a_part_of_a_state_in_eight_bits_is_written(way):
    model, grads, optimizer = made(way=way)
    trained(model, grads, optimizer, range(2))
    name, parameter = "layers.0.0.weight", model.layers[0][0].weight
    before = {kind: tensor.clone() for other, kind, tensor, *_ in optimizer.masters() if other == name}
    optimizer.set_master(name, "exp_avg", torch.full((300,), 2e-3), 100, 400)
    optimizer.set_master(name, "master", torch.full((300,), 0.5), 100, 400)
    after = {kind: tensor for other, kind, tensor, *_ in optimizer.masters() if other == name}
    torch.testing.assert_close(after["exp_avg"][100:400], torch.full((300,), 2e-3), rtol=0.05, atol=0)
    assert torch.equal(after["exp_avg"][512:], before["exp_avg"][512:])
    assert torch.equal(after["exp_avg_sq"], before["exp_avg_sq"])
    assert (parameter.flatten()[100:400] == 0.5).all() and torch.equal(after["master"][400:], before["master"][400:])


# ---- what breaks off, and what is refused ----


@pytest.mark.parametrize("way", ["in backward", "both"])
def test_a_backward_that_breaks_off_leaves_old_weights_or_new_ones(way):
    whole, whole_grads, after = made(way=way)
    whole_grads.zero_()
    whole(ids(0)).backward()
    whole_grads.finish()
    after.step()
    model, grads, optimizer = made(way=way)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.layers[0].register_full_backward_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
    grads.zero_()
    with pytest.raises(torch.OutOfMemoryError):
        model(ids(0)).backward()
    assert 0 < len(optimizer.stepped) < 13
    for name, parameter in model.named_parameters():
        expected = whole.get_parameter(name) if name in optimizer.stepped else before[name]
        assert torch.equal(parameter, expected), name
    model.layers[0]._backward_hooks.clear()
    trained(model, grads, optimizer, range(1))  # goes on


def test_what_it_refuses():
    for options, error, match in (
        ({"moments": "4bit"}, ValueError, "moments must be fp32, bf16 or 8bit, but is '4bit'"),
        ({"offload": "weights"}, ValueError, "offload must be None or 'state', but is 'weights'"),
        ({"in_backward": 1}, TypeError, "in_backward must be a bool or a StepInBackward, but is 1"),
    ):
        grads = MainGrads([nn.Parameter(torch.ones(4, 256))], release=True)
        with pytest.raises(error, match=match):
            AdamW(grads, **options)
    grads = MainGrads([nn.Parameter(torch.ones(4, 256))])
    with pytest.raises(ValueError, match=r"in_backward needs .*MainGrads\(\.\.\., release=True\)"):
        AdamW(grads, in_backward=True)
    model, grads, optimizer = made(way="in backward")
    grads.zero_()
    model(ids(0)).backward()
    with pytest.raises(RuntimeError, match=r"got one after the reduction of its bucket had begun: run every .*accumulate"):
        model(ids(0)).backward()
    grads.zero_()
    model(ids(0)).backward()
    grads.finish()
    with pytest.raises(RuntimeError, match=r"norm\(\) has no gradients .* step\(\) returns it"):
        grads.norm()
    with pytest.raises(ValueError, match=r"max_norm must be given as StepInBackward\(max_norm=...\)"):
        optimizer.step(1.0)


# ---- mutants ----

MUTANTS = {
    "before all are whole": (step_in_backward, "BucketSteps.on_bucket", "self._whole.issuperset(", "bool("),
    "twice": (step_in_backward, "BucketSteps.on_bucket", "bucket.index in self._whole", "False"),
    "memory is kept": (step_in_backward, "BucketSteps.on_bucket", "self._main_grads.give_back(together)", "pass"),
    "nothing goes back": (offloaded_state, "StateRing.leave", "stored.copy_(used, non_blocking=True)", "pass"),
    "nothing comes": (offloaded_state, "StateRing._fetch", "used.copy_(stored, non_blocking=True)", "pass"),
    "others' state is thought to stay": (offloaded_state, "StateRing._fetch", "difference_update(before)", "issuperset(before)"),
    "draws begin anew in each stretch": (adamw_state, "ParameterState.slices", "self.first + start", "self.first"),
    "scales of another stretch": (adamw_state, "allocate_state", "[start // unit : ceil_div", "[: ceil_div"),
    "frozen ones are stepped": (adamw, "AdamW._follow", "if id(piece.parameter) in trained", ""),
    "embeddings in eight bits": (adamw_state, "embeddings_of", "isinstance(each, nn.Embedding)", "False"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name, monkeypatch):
    mutant = mutate(*MUTANTS[name], entry=adamw)
    small(mutant, monkeypatch.setitem)
    with mutant.AdamWStepper.run.__globals__["backend"].use_backend("torch"):
        model, grads, optimizer = made(way="both", world=mutant)
        model.layers[1].requires_grad_(False)
        try:
            found = trained(model, grads, optimizer)
            grads.zero_()
            model(ids(0)).backward()
            live = sum(buffer.untyped_storage().nbytes() for buffer in grads.buffers)
        except RuntimeError:
            return
    usual = made()
    usual[0].layers[1].requires_grad_(False)
    assert not alike(trained(*usual), found) or live > 3 * SMALL
