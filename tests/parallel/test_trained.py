"""Who is trained, and from which weights: optimizers beside torch.optim.AdamW, as people freeze, unfreeze and write weights."""

import copy
import gc
import re

import pytest
import torch
import torch.distributed as dist
from parallel.histories import BF16, FP16, FP32, KINDS, SHARD_WRITES, WRITES, History, Layers, Training, inputs_of, judged, made
from parallel.histories import OPTIONS as HISTORY_OPTIONS
from parallel.meeting import error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import onepass
from onepass.kernels.language import triton
from onepass.parallel import AdamW, FSDPMainGrads, MainGrads, MasterWeights, ShardedAdamW

needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton")


@pytest.fixture(params=["torch", pytest.param("triton", marks=needs_triton)])
def backend(request):
    with onepass.use_backend(request.param):
        yield request.param


# ---- histories ----


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_are_torchs(kind, dtype, release):
    with onepass.use_backend("torch"):
        for seed in range(4):
            assert not judged(History(seed), made(kind, dtype, release=release))


@needs_triton
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_by_kernels(kind, dtype):
    with onepass.use_backend("triton"):
        assert not judged(History(7), made(kind, dtype))


def test_random_histories_of_parameters_with_grad():
    with onepass.use_backend("torch"):
        for seed in range(4):
            assert not judged(History(seed), made("ShardedAdamW", FP32))


# ---- over ranks ----


@pytest.mark.parametrize("shard", (False, True))
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_over_ranks(group, kind, dtype, shard):
    in_place = tuple(name for name in WRITES if name != "memory" or not shard)
    with onepass.use_backend("torch"):
        for seed in range(2):
            history = History(seed, factor=2 * group.rank() + 1, mean=group.size(), writes=in_place)
            assert not judged(history, made(kind, dtype, shard=shard, bucket_bytes=200))


def under_fully_shard():
    """Return layers of which one is frozen, and what keeps their gradients in products."""
    layers = Layers(FP32)
    layers.weights[1].requires_grad_(False)
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    fully_shard(layers, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
    return layers, FSDPMainGrads(layers)


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_under_fully_shard(group, seed):
    with onepass.use_backend("torch"):
        layers, main_grads = under_fully_shard()
        assert not main_grads.reason
        training = Training(layers, None, ShardedAdamW(layers.parameters(), **HISTORY_OPTIONS), FP32)
        history = History(seed, factor=2 * group.rank() + 1, mean=group.size(), writes=tuple(SHARD_WRITES))
        assert not judged(history, training)
        for asks in (False, True):
            layers.weights[0].requires_grad_(True)
            layers.weights[1].requires_grad_(asks)
            loss = layers(inputs_of(0), 1)
            assert hasattr(layers.weights[1], "main_grad") or not asks
            loss.backward()


def test_ranks_that_train_other_parameters_are_told(group):
    layers, main_grads, _, _ = made("AdamW", FP32)
    layers.weights[0].requires_grad_(group.rank() == 0)
    rule = "parameters that require a gradient must be the same, .* on all ranks of group, but its rank 0 has weights.0 where"
    with onepass.validate():
        assert re.match(rule, error_of(main_grads.finish))
        layers.weights[0].requires_grad_()
        layers.weights[1].requires_grad_(group.rank() == 0)  # it gets memory, where the ranks agree
        said = error_of(main_grads.zero_)
    assert "that require a gradient" in said and "rank 0 has weights.1 where" in said


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_moved_is_told(group, kind):
    training = made(kind, FP32, shard=True)
    training.layers.weights[0].data = training.layers.weights[0].data.clone()
    training.main_grads.finish()
    said = error_of(training.optimizer.step)
    assert "must stay where they were put with shard=True, but weights.0 has other memory" in said


# ---- who is trained ----


def two(dtype=FP32):
    """A MainGrads of a weight that is trained and of one that is frozen."""
    trained, frozen = nn.Parameter(torch.ones(64, dtype=dtype)), nn.Parameter(torch.ones(32, dtype=dtype), requires_grad=False)
    return trained, frozen, MainGrads([trained, frozen])


def step(main_grads, optimizer, *weights):
    main_grads.zero_()
    sum(weight.float().sum() for weight in weights).backward()
    main_grads.finish()
    optimizer.step()


def test_a_frozen_weight_takes_no_memory_until_it_is_unfrozen():
    trained, frozen, main_grads = two()
    optimizer = AdamW(main_grads)
    step(main_grads, optimizer, trained)
    assert sum(buffer.numel() for buffer in main_grads.buffers) == 64 and not hasattr(frozen, "main_grad")
    assert frozen not in optimizer.state and frozen in set(optimizer.param_groups[0]["params"])
    frozen.requires_grad_()
    step(main_grads, optimizer, trained, frozen)
    assert sum(buffer.numel() for buffer in main_grads.buffers) == 128 and optimizer.state[frozen]["step"] == 1
    assert optimizer.state[trained]["step"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_between_backward_and_finish_counts_for_nothing(kind):
    trained, other, main_grads = two()
    optimizer = KINDS[kind](main_grads)
    other.requires_grad_()
    main_grads.zero_()
    (trained.sum() + 100 * other.sum()).backward()
    other.requires_grad_(False)
    main_grads.finish()
    assert main_grads.norm() == 8 and not other.main_grad.any()
    optimizer.step()
    assert (other == 1).all() and (trained != 1).all()


def test_reductions_start_under_backward_though_a_layer_is_frozen():
    """As its bucket waits for nothing of it."""
    one, other = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))
    main_grads = MainGrads([one, other])
    other.requires_grad_(False)
    main_grads.zero_()
    one.sum().backward()
    assert main_grads._next == 1


def test_a_group_must_be_main_grads_when_it_is_unfrozen():
    trained, stranger = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)
    main_grads = MainGrads([trained])
    optimizer = AdamW(main_grads, [{"params": [trained, stranger]}])
    stranger.requires_grad_()
    with pytest.raises(ValueError, match="groups must have each parameter of main_grads once, but one has another"):
        step(main_grads, optimizer, trained)


def test_a_swapped_parameter_raises():
    weight = nn.Parameter(torch.ones(4))
    main_grads = MainGrads({"weight": weight}.items())
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(4)))
    for call in (main_grads.zero_, main_grads.finish):
        with pytest.raises(RuntimeError, match=r"but weight was swapped for another.*make it and its optimizer anew"):
            call()


def test_what_cannot_be_held_is_named_when_it_is_unfrozen():
    trained, wide = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4).double(), requires_grad=False)
    main_grads = MainGrads([trained, wide])
    wide.requires_grad_()
    with pytest.raises(TypeError, match=r"parameters must be fp32, fp16 or bf16, but parameter 1 is torch.float64"):
        main_grads.zero_()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_state_of_a_weight_that_was_unfrozen_later_comes_back(dtype):
    trained, frozen, main_grads = two(dtype)
    optimizer = AdamW(main_grads)
    step(main_grads, optimizer, trained)
    early = copy.deepcopy(optimizer.state_dict())
    frozen.requires_grad_()
    step(main_grads, optimizer, trained, frozen)
    late = copy.deepcopy(optimizer.state_dict())
    again, other, theirs = two(dtype)
    resumed = AdamW(theirs)
    with pytest.raises(ValueError, match="but has parameter 1, which never was: unfreeze it before you load"):
        resumed.load_state_dict(late)
    other.requires_grad_()
    resumed.load_state_dict(late)
    assert torch.equal(other, frozen) and resumed.state[other]["step"] == 1
    resumed.load_state_dict(early)  # of a time when it had none
    assert resumed.state[other]["step"] == 0 and not resumed.state[other]["exp_avg"].any()
    for mine, each, optimizer_of in ((main_grads, (trained, frozen), optimizer), (theirs, (again, other), resumed)):
        optimizer_of.load_state_dict(late)
        step(mine, optimizer_of, *each)
    assert torch.equal(trained, again) and torch.equal(frozen, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_loaded_right_after_a_weight_is_unfrozen(kind):
    """Before a `zero_`: the reduction waits for the weight's gradient all the same."""
    whole = [nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(32))]
    state = KINDS[kind](MainGrads(whole)).state_dict()
    trained, other, main_grads = two()
    optimizer = KINDS[kind](main_grads)
    other.requires_grad_()
    optimizer.load_state_dict(state)
    (trained.sum() + 2 * other.sum()).backward()
    main_grads.finish()
    assert (other.main_grad == 2).all()


def test_masters_are_written_right_after_a_weight_is_unfrozen():
    _, other, main_grads = two()
    optimizer = AdamW(main_grads)
    other.requires_grad_()
    optimizer.set_masters([("parameter 1", torch.full((32,), 3.0))])
    assert (other == 3).all()


def test_steps_made_count_for_what_was_trained_only():
    trained, other, main_grads = two()
    optimizer = AdamW(main_grads)
    optimizer.set_step(1000)
    other.requires_grad_()
    step(main_grads, optimizer, trained, other)
    assert optimizer.state[trained]["step"] == 1001 and optimizer.state[other]["step"] == 1


def test_a_parameter_that_leaves_its_states_device_raises():
    """As by `module.to`, after the optimizer was made."""
    weight = nn.Parameter(torch.ones(4))
    optimizer = ShardedAdamW([weight])
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(4, device="meta")))
    weight.grad = torch.ones(4, device="meta")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"made, cpu, but one of 4 numbers is on meta .* after moving the model"):
            optimizer.step()


# ---- from which weights ----


@pytest.mark.parametrize("value", [0.0, -0.0, 3.0])
def test_whatever_is_written_in_bf16_is_stepped_from(backend, value):
    """Low bits of before make no NaN of a zero."""
    weight = nn.Parameter(torch.linspace(-2, 2, 64).to(BF16))
    main_grads = MainGrads([weight])
    optimizer = AdamW(main_grads, lr=1e-3, weight_decay=0.0)
    step(main_grads, optimizer, weight)
    assert (optimizer.state[weight]["low"] < 0).any() and (optimizer.state[weight]["low"] > 0).any()
    weight.data.fill_(value)
    main_grads.zero_()
    main_grads.finish()  # a gradient of zeros: momentum alone
    optimizer.step()
    torch.testing.assert_close(weight.float(), torch.full((64,), value), rtol=2**-7, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_has_the_weights_that_were_written(kind):
    """Also where no step came between: loading it would write the masters of before."""
    weight = nn.Parameter(torch.ones(8, dtype=FP16))
    main_grads = MainGrads([weight])
    optimizer = KINDS[kind](main_grads)
    step(main_grads, optimizer, weight)
    weight.data.fill_(2.0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert (weight == 2).all()


def test_weights_that_are_swapped_and_put_back_keep_their_masters(backend):
    """As by an evaluation of averaged weights."""
    for kind, make in KINDS.items():
        weight = nn.Parameter(torch.linspace(-2, 2, 64).to(BF16))
        main_grads = MainGrads([weight])
        optimizer = make(main_grads)
        step(main_grads, optimizer, weight)
        before = [each.clone() for each in masters(optimizer)]
        backup = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(torch.zeros(64))
            weight.copy_(backup)
        assert all(map(torch.equal, before, masters(optimizer))), kind


def masters(optimizer):
    if isinstance(optimizer, MasterWeights):
        return [master for _, master, _ in optimizer.pieces()]
    return [tensor for _, kind, tensor, *_ in optimizer.masters() if kind == "master"]


# ---- optimizers of others ----


def grads_of(main_grads):
    """Start a step, and end its gradients."""
    main_grads.zero_()
    sum(parameter.sum() for _, parameter in main_grads.named).backward()
    main_grads.finish()


def test_an_optimizer_that_reads_grad_raises_at_its_first_step():
    weight = nn.Parameter(torch.ones(4))
    main_grads = MainGrads([weight])
    theirs = torch.optim.SGD([weight], lr=1.0)
    grads_of(main_grads)
    with pytest.raises(RuntimeError, match=r"must read main_grad, but is SGD, .* trains nothing.* onepass.parallel.AdamW"):
        theirs.step()

    def closure():
        grads_of(main_grads)

    with pytest.raises(RuntimeError, match="must read main_grad, but is SGD"):
        theirs.step(closure)
    main_grads.close()
    weight.sum().backward()
    theirs.step()
    assert weight.tolist() == [0.0] * 4
    grads_of(MainGrads([weight]))
    gc.collect()
    theirs.step()  # nobody is there whose it is


def test_optimizers_that_find_gradients_step():
    weight, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    main_grads = MainGrads([weight])

    class OfMainGrad(torch.optim.SGD):
        reads_main_grad = True

        def step(self):
            with torch.no_grad():
                weight.sub_(weight.main_grad)

    grads_of(main_grads)
    OfMainGrad([weight]).step()
    weight.grad = weight.main_grad  # by the caller's own code
    torch.optim.SGD([weight], lr=1.0).step()
    weight.grad = None
    torch.optim.SGD([other], lr=1.0).step()  # of other parameters
    weight.requires_grad_(False)
    torch.optim.SGD([weight], lr=1.0).step()  # of frozen ones
    assert weight.tolist() == [-1.0] * 4
