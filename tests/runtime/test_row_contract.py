"""The contract of rows under `batch_invariant()` finds what depends on how many there are or on their places."""

from dataclasses import replace
from functools import partial, wraps

import pytest
import torch

import onepass
from onepass.kernels import invariant_product
from onepass.ops.norm import few_rows
from onepass.ops.softmax import kernels
from onepass.ops.softmax import softmax as module
from onepass.runtime import batch_invariance
from onepass.runtime.samples import random_tensors
from onepass.runtime.sharding import put_tensor, tensors_of
from onepass.testing.contract import subjects
from onepass.testing.mutants import mutate
from onepass.testing.row_contract import gives_rows_the_same_bits, row_call
from onepass.testing.subject import as_tuple, weighted_sum

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_a_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="of PyTorch's operators on a CPU")
MUTANTS = {  # function, what is there, what stands there instead
    "a row's bits depend on the number of rows": ("_softmax_rows", "tl.sum(e, 1)", "tl.sum(e, 1) * (1.0 + M * 1e-6)"),
    "on its place": ("_softmax_rows", "tl.sum(e, 1)", "tl.sum(e, 1) + rows * 1e-6"),
    "on the rows beside it": ("_softmax_rows", "tl.sum(e, 1)", "tl.sum(e, 1) + tl.max(tl.sum(e, 1), 0) * 1e-6"),
    "in backward": ("_softmax_backward_kernel", "total[:, None])", "total[:, None] * (1.0 + M * 1e-6))"),
}
FORGOTTEN = {  # a module that forgets to ask whether the promise is in force, and the sample and backend that find it
    "few rows' kernel": (few_rows, "rms_norm: wide", "triton"),
    "PyTorch's operators on all rows at once": (batch_invariance, "bias_activation: linear", "torch"),
    "a router's sigmoid": (batch_invariance, "route: sigmoid, groups, bias", "torch"),
    "PyTorch's products": (invariant_product, "norm_linear", "torch"),
}


def fails(subject):
    with pytest.raises(AssertionError, match="rows are not as among"):
        gives_rows_the_same_bits(subject)


def sigmoid_by_place(x):
    """Return a sigmoid whose last number is another. Of PyTorch's own few are: on some processors none of the sample's."""
    y = x.sigmoid().flatten()
    return torch.cat([y[:-1], y[-1:] * (1 + 1e-6)]).view_as(x)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_whose_rows_depend_on_others_fails(name):
    subject = subjects("triton", DEVICE)["softmax: plain"]
    fails(replace(subject, op=replace(subject.op, function=mutate(kernels, *MUTANTS[name], entry=module).softmax)))


@on_a_cpu
@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_forgets_to_ask_fails(monkeypatch, name):
    forgetful, sample, backend = FORGOTTEN[name]
    monkeypatch.setattr(few_rows, "MOST_ROWS", 8)
    monkeypatch.setattr(torch, "sigmoid", sigmoid_by_place)
    monkeypatch.setattr(forgetful, "invariant", lambda: False)
    subject = subjects(backend, DEVICE)[sample.removesuffix(": wide")]
    if sample.endswith(": wide"):  # of short rows both kernels have the same sums
        subject = replace(subject, sample=replace(subject.sample, tensors=partial(random_tensors, ((11, 2500), (2500,)))))
    fails(subject)


class _ByLayout(torch.autograd.Function):
    """Has another gradient of few rows that lie in a way."""

    @staticmethod
    def forward(ctx, y, lies):
        ctx.lies = lies
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * (1 + 1e-6 * (dy[..., 0].numel() < 4 and ctx.lies(dy))), None


LAYOUTS = {"by columns": lambda dy: dy.stride(-1) > 1, "one number a row": lambda dy: dy.stride(-1) == 0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_of_another_layout_that_depends_on_others_fails(layout):
    subject = subjects("torch", DEVICE)["rms_norm"]
    norm = subject.op.function
    wrong = wraps(norm)(lambda *args, **options: _ByLayout.apply(norm(*args, **options), LAYOUTS[layout]))
    fails(replace(subject, op=replace(subject.op, function=wrong)))


def test_every_op_has_rows():
    for name, subject in subjects("torch", DEVICE).items():
        call = row_call(subject.op, vars(subject.sample.call(subject.op.call, *subject.tensors())))
        assert call is not None or "documents" in name, name


def test_meta_tensors_have_no_bits():
    samples = subjects("torch", DEVICE)
    for name in (name for name in samples if "lora" not in name and "biases" not in name):  # the host reads where documents end
        subject = samples[name]
        arguments = vars(subject.sample.call(subject.op.call, *subject.tensors()))
        for each, t in tensors_of(arguments).items():
            put_tensor(arguments, each, t.detach().to("meta").requires_grad_(t.requires_grad))
        options = {"p": 0.0} if "p" in arguments else {"aux": None} if "aux" in arguments else {}  # what mixes rows
        call = partial(subject.op.function, **arguments | options, backend="torch")
        expected = as_tuple(call())
        with onepass.batch_invariant():
            found = as_tuple(call())
            torch.autograd.backward(weighted_sum(found))
        assert [y.shape for y in found] == [y.shape for y in expected], name
