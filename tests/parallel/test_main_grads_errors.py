"""What MainGrads refuses, and when: before anything is written or sent."""

import warnings

import pytest
import torch
from parallel.mixed_model import BF16, BYTES, Mixed, backwards, close, exact, loss, main_grads_by_name
from torch import nn

import onepass
from onepass.gradients.main_grads import MainGrads
from onepass.gradients.master_weights import MasterWeights


@pytest.fixture(autouse=True)
def _plain_backend():
    with onepass.use_backend("torch"):
        yield


def good():
    return nn.Parameter(torch.ones(2))


def frozen():
    return nn.Parameter(torch.ones(2), requires_grad=False)


def taken():
    weight = nn.Parameter(torch.ones(2))
    weight.main_grad = torch.zeros(2)
    return weight


@pytest.mark.parametrize(
    ("parameters", "options", "error", "words"),
    [
        (lambda: [], {}, ValueError, "parameters must have one that requires a gradient, but is empty"),
        (lambda: [frozen(), frozen()], {}, ValueError, "must have one that requires a gradient, but has 2 frozen ones only"),
        (lambda: [good()] * 2, {}, ValueError, "but parameter 1 is there twice"),
        (lambda: [("w", frozen()), ("w", frozen())], {}, ValueError, "but w is there twice"),
        (lambda: torch.ones(2), {}, TypeError, "but is one tensor: put it in a list"),
        (lambda: [good(), nn.Linear(2, 2)], {}, TypeError, "but parameter 1 is a Linear"),
        (lambda: [good(), nn.Parameter(torch.ones(2).double())], {}, TypeError, "must be .* but parameter 1 is torch.float64"),
        (lambda: [nn.Parameter(torch.ones(2).cfloat())], {}, TypeError, "but parameter 0 is torch.complex64"),
        (lambda: [good(), torch.ones(2, requires_grad=True) * 2], {}, ValueError, "must be leaves .* but parameter 1"),
        (lambda: [good(), taken()], {}, ValueError, "must have no main_grad yet, but parameter 1 has"),
        (lambda: [good()], {"dtype": torch.float64}, TypeError, "dtype must be .* but is torch.float64"),
        (lambda: [good()], {"bucket_bytes": 0}, ValueError, "bucket_bytes must be positive, but is 0"),
        (lambda: [good()], {"group": 3}, TypeError, "group must be None or a .*ProcessGroup.* but is 3"),
        (lambda: [good()], {"tp_group": 3}, TypeError, "tp_group must be None or"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_named_and_nothing_is_written(parameters, options, error, words):
    given = parameters()
    with pytest.raises(error, match=words):
        MainGrads(given, **options)
    for each in given if isinstance(given, list) else []:
        if isinstance(each, nn.Parameter):
            assert not hasattr(each, "main_grads") and not each._post_accumulate_grad_hooks


def test_another_main_grads():
    weight, good = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first = MainGrads([weight])
    with pytest.raises(ValueError, match=r"parameter 1 has: close\(\) the MainGrads"):
        MainGrads([good, weight])
    assert weight.main_grads() is first and not hasattr(good, "main_grad")


def test_a_microbatch_after_the_last():
    model = Mixed()
    main_grads = MainGrads(model, bucket_bytes=BYTES)
    late = "must get its gradients before the step's reductions, but got one after"
    loss(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=late):
        loss(model, 0, 1).backward()
    main_grads.zero_()
    loss(model, 0, 0).backward()
    with main_grads.accumulate(), pytest.raises(RuntimeError, match=f"{late} the step's reductions had begun"):
        loss(model, 0, 1).backward()
    main_grads.zero_()
    backwards(main_grads, model, 0)
    main_grads.finish()
    with pytest.raises(RuntimeError, match=late):
        loss(model, 0, 1).backward()
    with pytest.raises(RuntimeError, match=late):  # it was added to what had been reduced
        main_grads.finish()
    main_grads.zero_()
    backwards(main_grads, model, 0)
    main_grads.finish()
    main_grads.finish()  # nothing more
    close(main_grads_by_name(model), exact([0]))
    with pytest.raises(RuntimeError, match=f"unused {late} the reduction of its bucket had begun"):
        model.unused.sum().backward()  # its first, but too late
    assert not model.unused.main_grad.any()


def test_a_second_last_microbatch_is_seen_before_any_reduction():
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    main_grads = MainGrads([one, two])
    one.sum().backward()
    with pytest.raises(RuntimeError, match=r"parameter 0 must .* after another one's outside of accumulate\(\)"):
        one.sum().backward()
    main_grads.zero_()
    one.sum().backward()
    two.sum().backward()  # the rest, by another pass
    main_grads.finish()
    assert one.main_grad.tolist() == two.main_grad.tolist() == [1.0, 1.0]


def test_accumulate_ends_with_an_error_too():
    weight = nn.Parameter(torch.ones(2))
    main_grads = MainGrads([weight])
    with pytest.raises(KeyError), main_grads.accumulate():
        raise KeyError
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="had begun"):
        main_grads.check_open(weight)


def test_what_needs_the_whole_gradient_comes_after_finish():
    weight = nn.Parameter(torch.ones(2))
    main_grads = MainGrads([weight])
    weights = MasterWeights(main_grads, torch.optim.SGD)
    weight.sum().backward()
    for name, call in {"norm": main_grads.norm, "clip_": lambda: main_grads.clip_(0.1), "step": weights.step}.items():
        with pytest.raises(RuntimeError, match=rf"{name}\(\) must come after finish\(\)"):
            call()
    assert weight.tolist() == [1.0, 1.0] and weight.main_grad.tolist() == [1.0, 1.0]
    main_grads.finish()
    with pytest.raises(ValueError, match="norm_type must be positive, but is 0"):
        main_grads.norm(0)
    with pytest.raises(ValueError, match=r"max_norm must be 0 or more, but is -1"):
        main_grads.clip_(-1)
    main_grads.zero_()
    with pytest.raises(RuntimeError, match=r"norm\(\) must come after"):
        main_grads.norm()


def test_groups_that_do_not_fit():
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    main_grads = MainGrads({"one": one, "two": two}.items())
    for groups, words in (
        ([{"params": [one]}], "but two is in none"),
        ([{"params": [one, two]}, {"params": [one]}], "but one is in two"),
        ([{"params": [one, two, nn.Parameter(torch.ones(2))]}], "but one has another"),
    ):
        with pytest.raises(ValueError, match=f"groups must have each parameter of main_grads once, {words}"):
            MasterWeights(main_grads, torch.optim.SGD, groups)
    main_grads.close()
    with pytest.raises(TypeError, match=r"main_grads must have dtype torch.float32, but has torch.bfloat16"):
        MasterWeights(MainGrads([one], dtype=BF16), torch.optim.SGD)


def test_a_module_is_saved_by_its_state_dict(tmp_path):
    model = nn.Linear(2, 2)
    main_grads = MainGrads(model)
    with pytest.raises(TypeError, match=r"can't be saved or sent whole while MainGrads has .* state_dict\(\), or close\(\)"):
        torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    main_grads.close()
    torch.save(model, tmp_path / "model.pt")


def _steps(model, main_grads):
    main_grads.zero_()
    model(torch.ones(1, 2)).sum().backward()
    main_grads.finish()


def _new_weight(model):
    model[0].weight = nn.Parameter(model[0].weight.detach())


def _new_layer(model):
    model[0] = nn.Linear(2, 2)


def _new_part(model):
    model[2][0] = nn.Linear(2, 2)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize(("replace", "name"), [(_new_weight, "0.weight"), (_new_layer, "0.weight"), (_new_part, "2.0.weight")])
def test_a_parameter_that_is_the_modules_no_more_is_named_whenever_it_went(replace, name, steps):
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(), nn.Sequential(nn.Linear(2, 2)))
    model[1].forward = lambda x: x
    main_grads = MainGrads(model)
    for _ in range(steps):
        _steps(model, main_grads)
    replace(model)
    with pytest.raises(RuntimeError, match=f"but {name} is another one by now"):
        _steps(model, main_grads)


def test_a_parameter_may_be_elsewhere_in_the_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    main_grads = MainGrads(model)
    _steps(model, main_grads)
    model[0] = nn.Sequential(model[0])  # as what wraps a layer does
    _steps(model, main_grads)
    _steps(model, main_grads)


def test_a_scripted_part():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch would rather have something else
        model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    main_grads = MainGrads(model)
    for _ in range(3):
        _steps(model, main_grads)


def test_parameters_that_a_module_has_and_does_not_hold():
    class Lent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lent = {"weight": nn.Parameter(torch.ones(2))}

        def named_parameters(self, *args, **options):
            return iter(self.lent.items())

        def forward(self, x):
            return x * self.lent["weight"]

    model = Lent()
    main_grads = MainGrads(model)
    _steps(model, main_grads)
    model.lent["weight"] = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="but weight is another one by now"):
        _steps(model, main_grads)
