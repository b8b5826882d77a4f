"""What a CPU shows of `graphed`: who asks for what, flags, and which zeros a capture is handed. A capture is one in name only."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import onepass
from onepass.gradients import main_grad as module
from onepass.gradients.graphs import graphed
from onepass.gradients.main_grad import GradRequest, placeholder
from onepass.gradients.main_grads import MainGrads
from onepass.nn.embedding import VocabParallelEmbedding


@pytest.fixture(autouse=True)
def _plain_backend():
    module._zeros.clear()
    with onepass.use_backend("torch"):
        yield


@contextmanager
def capture():
    """What runs here is taken for a graph's, but does run: as a replay would, once."""
    here, there = f"{module.__name__}.is_capturing", "onepass.gradients.main_grads.is_capturing"
    with mock.patch(here, return_value=True), mock.patch(there, return_value=True):
        yield


def model(flags=True):
    torch.manual_seed(0)
    made = nn.Sequential(onepass.nn.NormLinear(6, 8), nn.Linear(8, 8), onepass.nn.Linear(8, 4, bias=False))
    for parameter in [*made[0].parameters(), *made[2].parameters()]:
        parameter.main_grad = torch.zeros_like(parameter)
        if flags:
            parameter.grad_added_to_main_grad = False
    return made


def ours(made):
    return [parameter for parameter in made.parameters() if hasattr(parameter, "main_grad")]


def exact(made, x):
    """The gradients of x's sum, by name."""
    return dict(zip((name for name, _ in made.named_parameters()), grads(made, x), strict=True))


def grads(made, x, dy=1.0):
    """As make_graphed_callables asks."""
    x = x.detach().requires_grad_()
    y = made(x)
    return torch.autograd.grad(y, [x, *made.parameters()], torch.full_like(y, dy))[1:]


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


# ---- a pass by torch.autograd.grad ----


@pytest.mark.parametrize(("compiled", "flags"), [(False, True), (False, False), (True, True)])
def test_a_captured_pass_adds_to_main_grad_and_one_that_warms_up_does_not(compiled, flags):
    made = model(flags)
    expected = exact(made, X)
    torch._dynamo.reset()
    run = torch.compile(made, fullgraph=True, backend="aot_eager") if compiled else made
    with graphed(made) as captured:
        for _ in range(2):
            found = grads(run, X, float("nan"))  # its gradients are of nothing in particular
            assert not any(parameter.main_grad.any() for parameter in ours(made))
        with capture():
            found = grads(run, X)
    for (name, parameter), grad in zip(made.named_parameters(), found, strict=True):
        if hasattr(parameter, "main_grad"):
            torch.testing.assert_close(parameter.main_grad, expected[name])
            assert not grad.any() and grad.shape == parameter.shape
            assert getattr(parameter, "grad_added_to_main_grad", None) is (False if flags else None)
        else:
            torch.testing.assert_close(grad, expected[name])
    captured.replayed()
    assert all(getattr(parameter, "grad_added_to_main_grad", None) is (True if flags else None) for parameter in ours(made))


def test_outside_of_the_block_and_for_other_parameters_a_pass_returns_the_gradient():
    made, other = model(), model()
    expected = exact(made, X)
    with graphed(other), graphed([]):
        found = grads(made, X)
    with graphed(made):
        pass
    with pytest.raises(KeyError), graphed(made):
        raise KeyError
    for each in (found, grads(made, X)):
        torch.testing.assert_close(dict(zip(expected, each, strict=True)), expected)
    assert not any(parameter.main_grad.any() or parameter.grad_added_to_main_grad for parameter in ours(made))


def test_blocks_within_blocks():
    made, other = model(), model()
    expected = exact(made, X)
    with graphed(made):
        with graphed(other), capture():
            grads(made, X)
        with capture():
            grads(made, X)
    for name, parameter in made.named_parameters():
        if hasattr(parameter, "main_grad"):
            torch.testing.assert_close(parameter.main_grad, 2 * expected[name])


@pytest.mark.parametrize("flag", (True, False), ids=("flag", ""))
def test_a_lookups_rows(flag):
    embedding = VocabParallelEmbedding(7, 4)
    embedding.weight.main_grad = torch.zeros(7, 4)
    if flag:
        embedding.weight.grad_added_to_main_grad = False

    def ask():
        y = embedding(torch.tensor([1, 1, 3]))
        return torch.autograd.grad(y, embedding.weight, torch.ones_like(y))[0]

    with graphed(embedding):
        assert not ask().any() and not embedding.weight.main_grad.any()
        with capture():
            assert not ask().any()
    assert embedding.weight.main_grad[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def test_megatron_fsdps_gradient_comes_back():
    """Its buffer is another one at the next backward: nothing that a graph could write to."""
    made = model()
    expected = exact(made, X)
    for parameter in ours(made):
        parameter.__fsdp_param__ = True
    with graphed(made), capture():
        found = grads(made, X)
    torch.testing.assert_close(dict(zip(expected, found, strict=True)), expected)


# ---- flags ----


@pytest.mark.parametrize("fails", (False, True))
def test_flags_are_as_before_the_block(fails):
    made = model()
    parameters = ours(made)
    before = [bool(index % 2) for index in range(len(parameters))]
    for parameter, was in zip(parameters, before, strict=True):
        parameter.grad_added_to_main_grad = was
    unused = nn.Parameter(torch.ones(3))
    unused.main_grad, unused.grad_added_to_main_grad = torch.zeros(3), True
    try:
        with graphed([*made.parameters(), unused]) as captured, capture():
            assert not any(parameter.grad_added_to_main_grad for parameter in parameters)
            made(X).sum().backward()
            assert all(parameter.grad_added_to_main_grad for parameter in parameters)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert [parameter.grad_added_to_main_grad for parameter in parameters] == before
    captured.replayed()
    assert [parameter.grad_added_to_main_grad for parameter in parameters] == (before if fails else [True] * len(before))
    unused.grad_added_to_main_grad = False
    captured.replayed()
    assert unused.grad_added_to_main_grad is False  # nothing was added there


@pytest.mark.parametrize(("wrong", "words"), [(torch.ones(3), "one tensor"), ([nn.Linear(2, 2)], "has a Linear in it")])
def test_errors_name_parameters(wrong, words):
    with pytest.raises(TypeError, match=f"parameters must be .*{words}"), graphed(wrong):
        pass


# ---- zeros ----


def test_a_graph_makes_its_own_zeros():
    """Autograd keeps them as .grad, and each replay may add to that."""
    made = model()
    weight = made[2].weight
    eager = placeholder(weight).data_ptr()
    with capture():
        first, second = placeholder(weight), placeholder(weight)
    assert len({eager, first.data_ptr(), second.data_ptr()}) == 3 and not first.any() and not second.any()
    assert placeholder(weight).data_ptr() == eager


def test_under_main_grads_the_zeros_of_the_warm_up_are_enough():
    """For who captures by torch.autograd.grad; its hooks need none."""
    weights = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    outside = nn.Parameter(torch.randn(4, 3))
    outside.grad_added_to_main_grad = False
    main_grads = MainGrads(weights)
    asked = partial(placeholder, request=GradRequest.CAPTURE)
    assert placeholder(weights[0]) is None
    with capture():
        assert not asked(weights[0]).any()  # made in the graph, so that each replay clears it: nobody else's
        assert placeholder(weights[0]) is None
    assert not module._zeros
    kept = asked(weights[0])
    with capture():
        given = [asked(weight) for weight in weights]  # whoever has them still
        assert {each.data_ptr() for each in given} == {kept.data_ptr()}
        assert placeholder(outside).data_ptr() != kept.data_ptr()
    assert placeholder(outside).data_ptr() != kept.data_ptr()  # it would stay there as .grad, to be added to
    assert all(module.is_placeholder(each) for each in given) and not module.is_placeholder(placeholder(outside))
    kept.add_(1.0)
    assert not module.is_placeholder(given[0])
    with capture():
        assert asked(weights[0]).data_ptr() != kept.data_ptr() and not asked(weights[0]).any()
    main_grads.close()


def test_compiled_under_main_grads_only_a_graphed_block_makes_zeros():
    """Compiled, it can't be told who asks. In a block it is compiled anew, once for all blocks, so that torch.autograd.grad gets
    its tensors."""
    made = nn.Sequential(onepass.nn.NormLinear(6, 8), onepass.nn.Linear(8, 4))
    main_grads, seen = MainGrads(made), []
    for parameter in made.parameters():
        parameter.register_hook(lambda grad: seen.append(grad))
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(made, fullgraph=True, backend=counter)

    def backward():
        seen.clear()
        main_grads.zero_()
        run(X).sum().backward()
        main_grads.finish()
        return seen == [None] * len(main_grads.named) and main_grads.norm() > 0

    assert backward()
    for listed in (made, [*made.parameters(), nn.Parameter(X)]):
        with graphed(listed):
            assert not any(grad.any() for grad in grads(run, X))
    assert backward() and counter.frame_count == 2


def test_compiled_in_a_block_nothing_is_made_for_who_waits_for_nothing():
    weight = nn.Parameter(torch.randn(4, 6))
    weight.main_grad = torch.zeros(4, 6)
    run = torch.compile(lambda x: onepass.linear(x, weight).sum(), fullgraph=True, backend="aot_eager")
    with graphed([weight]):
        run(X).backward()
    assert weight.grad is None and weight.main_grad.any()


@pytest.mark.parametrize("twice", (False, True))
def test_what_ops_added_meets_other_gradients(twice):
    """A weight tied between ops, one of PyTorch's among them: what autograd adds up goes elsewhere."""
    weight = nn.Parameter(torch.randn(4, 4))
    main_grads = MainGrads([weight])
    x = torch.randn(3, 4)
    reference = weight.detach().clone().requires_grad_()

    def forward(by, w):
        y = by(F.linear(x, w).tanh(), w)
        return F.linear(by(y, w) if twice else y, w).sum()

    for _ in range(2):
        with main_grads.accumulate():
            forward(onepass.linear, weight).backward()
            with capture():
                forward(onepass.linear, weight).backward()
        forward(F.linear, reference).backward()
        forward(F.linear, reference).backward()
    main_grads.finish()
    torch.testing.assert_close(weight.main_grad, reference.grad)
    assert not module._zeros


# ---- MainGrads ----


def test_a_capture_in_accumulate_leaves_the_books_as_they_were():
    made = model()
    for parameter in ours(made):
        del parameter.main_grad
    main_grads = MainGrads(made)
    with main_grads.accumulate():
        made(X).sum().backward()  # warm-up
        main_grads.zero_()
        written = main_grads.buffers[0]._version
        with graphed(made) as captured, capture():
            made(X).sum().backward()
    captured.replayed()
    bucket = main_grads.buckets[0]
    assert main_grads.buffers[0]._version - written == len(main_grads.named)  # by ours once each, no zeros among them
    assert set(bucket.missing) == {id(parameter) for parameter in made.parameters()} and not bucket.held and not bucket.streams
    assert main_grads._next == 0 and not any(parameter.grad_added_to_main_grad for parameter in made.parameters())
    made(X).sum().backward()
    captured.replayed()  # flags say nothing to MainGrads
    main_grads.finish()
    assert main_grads._next == len(main_grads.buckets)


def test_a_capture_outside_of_accumulate_raises():
    weight = nn.Parameter(torch.ones(2, 2))
    main_grads = MainGrads([("head", weight)])
    with capture(), pytest.raises(RuntimeError, match=r"head's gradient must be captured in .*accumulate\(\).* but was outside"):
        onepass.linear(X[:, :2], weight).sum().backward()
    main_grads.zero_()
    onepass.linear(X[:, :2], weight).sum().backward()
    main_grads.finish()


def test_what_make_graphed_callables_hands_autograd_is_taken_from_grad_each_time():
    """Its gradients lie in memory that the next replay writes: PyTorch alone would add a microbatch to itself."""
    made = model()
    for parameter in ours(made):
        del parameter.main_grad
    expected = exact(made, X)
    main_grads = MainGrads(made)
    parameters = list(made.parameters())
    with graphed(made):
        grads(made, X)
        with capture():
            static = grads(made, X)  # `real` is what the graph adds and writes, at each replay
    added, real = main_grads.buffers[0].clone(), [grad.clone() for grad in static]

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *parameters):
            return x.sum()

        @staticmethod
        def backward(ctx, dy):
            main_grads.buffers[0].add_(added)
            for place, grad in zip(static, real, strict=True):
                place.copy_(grad)
            return None, *(grad.detach() for grad in static)

    main_grads.zero_()
    with main_grads.accumulate():
        for _ in range(2):
            Graphed.apply(X, *parameters).backward()
    Graphed.apply(X, *parameters).backward()
    main_grads.finish()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.main_grad, 3 * expected[name])
