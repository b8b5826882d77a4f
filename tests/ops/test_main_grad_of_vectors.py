"""Norm weights and biases that carry main_grad: gathered there in fp32 by every op that has such, in every kind of pass."""

from collections import Counter

import pytest
import torch
from ops.bias_activation_oracle import small_tiles as activation_tiles
from ops.calls import backends, equal, needs_triton
from ops.norm_oracle import small_tiles as norm_tiles
from ops.oracle import BF16, DEVICE, FP16, FP32

import onepass
from onepass.gradients import vectors
from onepass.gradients.vectors import contiguous_param, with_fp32_grad
from onepass.kernels import column_reduce
from onepass.ops.activation import kernels as activation_kernels
from onepass.ops.norm import backward as norm_backward
from onepass.ops.norm import few_rows
from onepass.testing.mutants import copy_package, mutate
from onepass.testing.poison import poisoned, unchanged

M, H = 130, 40
OPS = {
    "rms_norm": lambda x, a, b, backend, op=onepass: op.rms_norm(x, a, backend=backend),
    "layer_norm": lambda x, a, b, backend, op=onepass: op.layer_norm(x, a, b, backend=backend),
    "residual": lambda x, a, b, backend, op=onepass: sum(op.layer_norm(x, a, b, residual=x.detach(), backend=backend)),
    "gated_rms_norm": lambda x, a, b, backend, op=onepass: op.gated_rms_norm(x, x.detach(), a, backend=backend),
    "norm_linear": lambda x, a, b, backend, op=onepass: op.norm_linear(
        x, a, eye(x.shape[-1], x), norm="layer_norm", norm_bias=b, backend=backend
    ),
    "bias_activation": lambda x, a, b, backend, op=onepass: op.bias_activation(x, b, "swiglu", backend=backend),
    "activation_linear": lambda x, a, b, backend, op=onepass: op.activation_linear(
        x, eye(x.shape[-1], x), None, "gelu", activation_bias=b, backend=backend
    ),
}
ops = pytest.mark.parametrize("name", OPS)
def eye(n, x):
    """A linear layer that does nothing: its first rows, as wide ones would take long."""
    return torch.eye(min(n, 64), n, device=DEVICE, dtype=x.dtype)


def given(dtype=BF16, main=None):
    x = torch.randn(M, H, device=DEVICE).to(dtype).requires_grad_()
    vectors = [torch.nn.Parameter(torch.randn(H, device=DEVICE).to(dtype)) for _ in range(2)]
    for vector in vectors if main is not None else ():
        vector.main_grad, vector.grad_added_to_main_grad = torch.zeros(H, device=DEVICE, dtype=main), False
    return x, *vectors


def used(name, vectors):
    """Those of a and b that the op has."""
    if name in ("rms_norm", "gated_rms_norm"):
        return vectors[:1]
    return vectors[1:] if name in ("bias_activation", "activation_linear") else vectors


def exact(name, x, vectors):
    """The gradients that fp64 gives."""
    wide = [t.detach().double().requires_grad_() for t in (x, *vectors)]
    OPS[name](*wide, "torch").sum().backward()
    return [t.grad for t in used(name, wide[1:])]


def test_others_come_back_as_they_are():
    vector = torch.nn.Parameter(torch.ones(4))
    assert with_fp32_grad(vector) is contiguous_param(vector) is vector and with_fp32_grad(None) is contiguous_param(None) is None
    vector.sequence_parallel = True
    assert with_fp32_grad(vector) is vector
    vector.main_grad = torch.zeros(3)
    with pytest.raises(ValueError, match="main_grad must have"):
        onepass.rms_norm(torch.ones(2, 4), vector, backend="torch")


# ---- the kernels add by themselves ----

CASES = [
    (name, path, BF16) for name in ("rms_norm", "layer_norm") for path in ("alone", "", "single", "chunks", "shared", "crowd")
]
CASES += [(name, path, BF16) for name in ("bias_activation", "activation_linear") for path in ("alone", "")]
CASES += [(name, "strips" if "act" in name else "rows", main) for name in OPS for main in (FP32, BF16, FP16)]


def tiles(library, path):
    """Tiles of a path of a norm's kernels or of an activation's, or their own: of a few rows, one program has all."""
    if path == "strips":
        return activation_tiles(library.ops.activation.bias_activation)
    return norm_tiles(library.ops.norm.norm, "rows" if path == "alone" else path)


def summed(name, path, main, library, start=0.0):
    """What one backward makes of main_grad: of the same numbers each time."""
    torch.manual_seed(7)
    rows, columns = {"alone": 3, "shared": 9, "crowd": 9}.get(path, 37), 300 if path == "chunks" else 100
    x = torch.randn(rows, columns, device=DEVICE).bfloat16().requires_grad_()
    vectors = [torch.nn.Parameter(torch.randn(columns, device=DEVICE).bfloat16()) for _ in range(2)]
    for vector in vectors:
        vector.main_grad = started(columns, start).to(main)
    with tiles(library, path):
        y = OPS[name](x, *vectors, "triton", library)
        y.backward(torch.randn(y.shape, device=DEVICE).bfloat16())
    return [vector.main_grad for vector in used(name, vectors)]


def started(columns, start):
    return start * torch.linspace(-30, 40, columns, device=DEVICE)


def added_right(name, path, main, library=onepass):
    """To what is there, in fp32, with one rounding; the same bits again."""
    alone = summed(name, path, FP32, onepass)
    got, again = (summed(name, path, main, library, start=1.0) for _ in range(2))
    expected = [(started(len(sums), 1.0).to(main).float() + sums).to(main) for sums in alone]
    return equal(got, expected) and equal(got, again) and all(sums.abs().max() > 1 for sums in alone)


@needs_triton
@pytest.mark.parametrize(("name", "path", "main"), CASES)
def test_the_kernel_adds_in_fp32_and_rounds_once(name, path, main):
    assert added_right(name, path, main)


@needs_triton
@ops
def test_no_node_no_copy_and_no_gradient_of_its_own(name):
    """What PyTorch is asked to do: with main_grad the gradients are not allocated, and nothing is converted or added."""

    def recorded(main):
        x, *vectors = given(BF16, main)
        for vector in vectors if main is not None else ():
            del vector.grad_added_to_main_grad
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as seen:
            y = OPS[name](x, *vectors, "triton")
            with poisoned() as allocations:
                y.backward(torch.ones_like(y))
        made = [what for *_, what in allocations.made if what.startswith(f"({H},)")]
        return Counter(event.name for event in seen.events() if event.name.startswith("aten::")), made, y

    recorded(None), recorded(FP32)  # what a first call does
    (plain, gradients, _), (ours, none, y) = recorded(None), recorded(FP32)
    assert len(gradients) == len(used(name, "ab")) and none == []
    assert not ours - plain, ours - plain
    nodes = {type(node).__name__ for node, _ in y.grad_fn.next_functions}
    assert "_GatheredBackward" not in nodes and (name == "residual" or nodes <= {"AccumulateGrad", "NoneType"})


@backends
@ops
def test_retained_graphs_tied_vectors_and_layers_used_twice(name, backend):
    torch.manual_seed(5)
    x, *vectors = given(FP32, FP32)
    y = OPS[name](x, *vectors, backend)
    y.sum().backward(retain_graph=True)
    once = [t.main_grad.clone() for t in used(name, vectors)]
    y.sum().backward()
    (OPS[name](x, *vectors, backend) + OPS[name](x, *vectors, backend)).sum().backward()
    torch.testing.assert_close([t.main_grad for t in used(name, vectors)], [4 * t for t in once], rtol=1e-6, atol=1e-5)
    tied = vectors[0]
    expected = sum(exact(name, x, [tied, tied.detach().clone().requires_grad_()]))
    tied.main_grad.zero_()
    OPS[name](x, tied, tied, backend).sum().backward()  # as weight and as bias
    torch.testing.assert_close(tied.main_grad.double(), expected, rtol=1e-4, atol=1e-4)


@backends
@ops
@pytest.mark.parametrize("kind", ("main_grad with gaps", "a vector with gaps", "one of two", "one of two frozen", "computed"))
def test_what_the_kernel_can_add_to_in_part_or_not_at_all(name, backend, kind):
    torch.manual_seed(5)
    x, *vectors = given(FP32, FP32)
    if kind == "main_grad with gaps":
        for vector in vectors:
            vector.main_grad = torch.zeros(H, 3, device=DEVICE)[:, 1]
    elif kind == "a vector with gaps":
        for i, vector in enumerate(vectors):
            vectors[i] = torch.nn.Parameter(torch.stack([vector.detach()] * 3, 1)[:, 1])
            vectors[i].main_grad, vectors[i].grad_added_to_main_grad = torch.zeros(H, device=DEVICE), False
    elif kind == "one of two frozen":
        vectors[0].requires_grad_(name in ("rms_norm",))
    elif kind == "one of two":
        del vectors[0].main_grad, vectors[0].grad_added_to_main_grad
    leaf = vectors[1]
    given_vectors = [vectors[0], vectors[1] * 1] if kind == "computed" else vectors  # which has no main_grad
    with unchanged(x=x, a=vectors[0].detach(), b=leaf.detach()):
        OPS[name](x, *given_vectors, backend).sum().backward()
    for vector, expected in zip(used(name, vectors), exact(name, x, vectors), strict=True):
        moved = hasattr(vector, "main_grad") and not (kind == "computed" and vector is leaf)
        if not vector.requires_grad:
            assert vector.grad is None and not vector.main_grad.any() and vector.grad_added_to_main_grad is False
            continue
        torch.testing.assert_close((vector.main_grad if moved else vector.grad).double(), expected, rtol=1e-4, atol=1e-4)
        assert not moved or (vector.grad_added_to_main_grad is True and not vector.grad.any())


# ---- mutants of the addition ----

MUTANTS = {  # name: module, function, what is there, what stands there instead, a case
    "sums put in the place of main_grad": (
        column_reduce, "sum_strips",
        "tl.load(out_ptr + columns, mask=inside, other=0.0).to(tl.float32)", "0.0", ("rms_norm", "rows"),
    ),
    "main_grad twice": (column_reduce, "sum_strips", "result += ", "result += 2 * ", ("rms_norm", "rows")),
    "two roundings": (
        column_reduce, "sum_strips",
        "result +", "result = result.to(out_ptr.dtype.element_ty).to(tl.float32)\n        result +", ("rms_norm", "rows"),
    ),
    "main_grad of the columns before": (
        column_reduce, "sum_strips",
        "columns, mask", "tl.maximum(columns - 1, 0), mask", ("rms_norm", "rows"),
    ),
    "first half of a gated bias put": (
        activation_kernels, "_backward_kernel",
        "columns, strips, PARTS * H, columns < H, ADD",
        "columns, strips, PARTS * H, columns < H, False",
        ("bias_activation", "strips"),
    ),
    "second half of a gated bias put": (
        activation_kernels, "_backward_kernel",
        "H, strips, PARTS * H, columns < H, ADD", "H, strips, PARTS * H, columns < H, False", ("bias_activation", "strips"),
    ),
    "plan of an activation that does not add": (
        activation_kernels, "activation_backward",
        "into is not None", "False", ("bias_activation", "strips"),
    ),
    "plan of a norm that does not add": (norm_backward, "norm_backward", "into is not None,", "False,", ("rms_norm", "rows")),
    "few rows' sums put": (few_rows, "_store_columns", "if ADD", "if ADD and H < 0", ("rms_norm", "")),
    "one program's sums put": (norm_backward, "finish_sums", " & (not ADD)", "", ("rms_norm", "alone")),
    "programs' sums put": (norm_backward, "finish_sums", "ADD, SHARE_S", "False, SHARE_S", ("rms_norm", "rows")),
    "shared rows' sums put": (norm_backward, "_shared_kernel", "ADD, SHARE_S", "False, SHARE_S", ("rms_norm", "shared")),
    "few wide strips' sums put": (column_reduce, "share_strips", "H, ADD, 1", "H, False, 1", ("rms_norm", "chunks")),
    "dbias put": (
        column_reduce, "share_tiles",
        "other_ptr, helper, helpers, STRIPS, WIDTH, H, ADD",
        "other_ptr, helper, helpers, STRIPS, WIDTH, H, False",
        ("layer_norm", "rows"),
    ),
    "dweight and dbias exchanged": (norm_backward, "norm_backward", "dweight, dbias ", "dbias, dweight ", ("layer_norm", "rows")),
    "zeros in the place of main_grad": (
        vectors, "_kernel_output",
        "main_grad is None else kernel_target(main_grad, request)", "True else main_grad", ("rms_norm", "rows"),
    ),
}  # fmt: skip


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU would compile each")
@needs_triton
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    *change, case = MUTANTS[name]
    library = mutate(*change, entry=onepass)
    assert not added_right(*case, BF16, library)


@needs_triton
def test_a_copy_without_a_change_adds():
    library = copy_package(onepass)
    assert added_right("layer_norm", "rows", BF16, library) and added_right("bias_activation", "strips", BF16, library)
