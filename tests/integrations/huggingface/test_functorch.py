"""torch.func's transforms of a model: functional_call with other parameters, gradients, gradients of each row, Hessians."""

import pytest
from torch.func import functional_call, grad, jvp, vmap

pytest.importorskip("transformers", minversion="5")

from integrations.huggingface.families import batch, both


def parameters_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loss_of(model):
    def loss(parameters, ids):
        return functional_call(model, parameters, (), {"input_ids": ids, "labels": ids, "use_cache": False}).loss

    return loss


def gradients(model, ids):
    return grad(loss_of(model))(parameters_of(model), ids)


def gradients_of_each_row(model, ids):
    return vmap(grad(lambda parameters, row: loss_of(model)(parameters, row[None])), (None, 0))(parameters_of(model), ids)


def hessian_product(model, ids):
    own = parameters_of(model)
    return jvp(grad(lambda parameters: loss_of(model)(parameters, ids)), (own,), (own,))[1]


TRANSFORMS = {
    "Llama": (gradients, gradients_of_each_row),
    "Gemma2": (gradients, hessian_product),
    "Mixtral": (gradients, gradients_of_each_row),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of PyTorch's vmap, in the plain model too
@pytest.mark.parametrize("family", TRANSFORMS)
def test_a_transform_is_as_that_of_the_plain_model(family):
    model, before, _ = both(family, num_hidden_layers=1)
    ids = batch(tokens=7)["input_ids"]
    for transform in TRANSFORMS[family]:
        found, expected = transform(model, ids), transform(before, ids)
        assert found.keys() == expected.keys()
        largest = max(value.norm() for value in expected.values())
        for name, value in expected.items():
            assert (found[name] - value).norm() <= 2e-5 * value.norm() + 1e-6 * largest, (transform.__name__, name)
    assert all(parameter.grad is None for parameter in model.parameters())
