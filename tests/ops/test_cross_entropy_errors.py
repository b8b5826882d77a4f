"""Bad input: an error that names the argument, what it was and what it must be; and nothing changed."""

import pytest
import torch
from ops.calls import refused, says

import onepass
from onepass.ops.loss.reduction import check_terms

x, y = torch.ones(3, 6), torch.tensor([0, 5, -100])
NAN, INF = float("nan"), float("inf")

BAD = {  # the call's arguments, its error, what is said: the argument, what it was, what it must be
    "no vocabulary": ((torch.ones(3, 0), y), {}, ValueError, ("logits must", "at least 1", "(3, 0)")),
    "labels of floats": ((x, y.float()), {}, ValueError, ("labels of torch.float32 are probabilities", "(3, 6)", "(3,)")),
    "probabilities that are trained": ((x, x.clone().requires_grad_()), {}, ValueError, ("labels that are prob", "detached")),
    "probabilities and ignore_index": ((x, x, None, "mean", 3), {}, ValueError, ("ignore_index must be left out", "3")),
    "probabilities' log_prob": ((x, x), {"return_stats": True}, ValueError, ("return_stats can't have log_prob",)),
    "statistic": ((x, y), {"return_stats": ["accuracy"]}, ValueError, ("return_stats must name some of", "'accuracy'")),
    "statistics a word": ((x, y), {"return_stats": "correct"}, TypeError, ("return_stats must be a bool or", "'correct'")),
    "weight that is trained": ((x, y), {"weight": torch.ones(6).requires_grad_()}, ValueError, ("weight must be detached",)),
    "short labels": ((x, y[:2]), {}, ValueError, ("labels must have shape (3,)", "logits", "(2,)")),
    "labels of logits' shape": ((x, x.long()), {}, ValueError, ("labels must have shape (3,)", "(3, 6)")),
    "label too large": ((x, y + 1), {}, IndexError, ("labels must be from 0 to 5", "-100", "2 of them", "one is 6")),
    "label below": ((x, y, None, "mean", 5), {}, IndexError, ("labels must be from 0 to 5", "ignore_index 5", "one is -100")),
    "reduction": ((x, y, None, "average"), {}, ValueError, ("reduction must be one of none, mean, sum", "'average'")),
    "no reduction": ((x, y, None, None), {}, ValueError, ("reduction must be one of none, mean, sum", "None")),
    "ignore_index half": ((x, y, None, "mean", 0.5), {}, TypeError, ("ignore_index must be an integer", "0.5", "float")),
    "ignore_index True": ((x, y, None, "mean", True), {}, TypeError, ("ignore_index must be an integer", "True")),
    "ignore_index huge": ((x, y, None, "mean", 1 << 63), {}, ValueError, ("ignore_index must be", "int64", str(1 << 63))),
    "ignore_index past int32 labels": (
        (x, y.int(), None, "mean", 1 << 40),
        {},
        ValueError,
        ("ignore_index must be", "int32 labels", str(1 << 40)),
    ),
    "smoothing above": ((x, y), {"label_smoothing": 1.1}, ValueError, ("label_smoothing must be from 0 to 1", "1.1")),
    "smoothing below": ((x, y), {"label_smoothing": -0.1}, ValueError, ("label_smoothing must be from 0 to 1", "-0.1")),
    "smoothing NaN": ((x, y), {"label_smoothing": NAN}, ValueError, ("label_smoothing must be", "nan")),
    "smoothing a word": ((x, y), {"label_smoothing": "0"}, TypeError, ("label_smoothing must be a number", "'0'")),
    "z_loss below": ((x, y), {"z_loss": -1e-4}, ValueError, ("z_loss must be", "at least 0", "-0.0001")),
    "z_loss infinite": ((x, y), {"z_loss": INF}, ValueError, ("z_loss must be finite", "inf")),
    "z_loss NaN": ((x, y), {"z_loss": NAN}, ValueError, ("z_loss must be finite", "nan")),
    "z_loss nothing": ((x, y), {"z_loss": None}, TypeError, ("z_loss must be a number", "None")),
    "group a word": ((x, y, "tp"), {}, TypeError, ("tp_group must be None or", "ProcessGroup", "'tp'")),
    "group a number": ((x, y, -100), {}, TypeError, ("tp_group must be None or", "ProcessGroup", "-100")),
}
BAD_TERMS = {  # of linear_cross_entropy too
    "softcap of zero": ({"softcap": 0.0}, ValueError, ("softcap must be", "above 0", "0.0")),
    "softcap infinite": ({"softcap": INF}, ValueError, ("softcap must be finite", "inf")),
    "softcap a word": ({"softcap": "30"}, TypeError, ("softcap must be a number or None", "'30'")),
    "scale NaN": ({"logit_scale": NAN}, ValueError, ("logit_scale must be finite", "nan")),
    "scale nothing": ({"logit_scale": None}, TypeError, ("logit_scale must be a number", "None")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    refused(onepass.cross_entropy, *BAD[name])


@pytest.mark.parametrize("name", BAD_TERMS)
def test_bad_terms_are_named(name):
    options, error, words = BAD_TERMS[name]
    with pytest.raises(error) as raised:
        check_terms(-100, 0.0, 0.0, **options)
    says(words, raised)


def test_terms_are_of_one_type():
    """Kernels are kept by the values they are compiled for, and 1, 1.0 and True are one key."""
    terms = check_terms(-100, 1, 0, 30, 2)
    assert [type(value) for value in terms] == [int, float, float, float, float]
    assert terms == (-100, 1.0, 0.0, 30.0, 2.0) and check_terms(-100, 0.0, 0.0).softcap == 0.0


def test_a_valid_call_works_after_a_bad_one():
    with pytest.raises(IndexError):
        onepass.cross_entropy(x, y + 1)
    assert onepass.cross_entropy(x, y).item() == pytest.approx(torch.tensor(6.0).log().item())
