"""The adapters of other packages' attention: right by the op's own oracle, what they are given, and what they refuse.

The packages are stand-ins that compute in plain PyTorch, with the packages' own signatures; on a CPU these adapters see a GPU.
"""

import importlib
import types
import warnings
from itertools import pairwise

import pytest
import torch
from ops.attention_oracle import BF16, Case, judge_case, normed_cases, packed, packed_cases
from ops.calls import needs_triton
from ops.packed_oracle import visible

import onepass
from onepass.integrations import attention_backends as backends
from onepass.ops.attention import by_cudnn, by_flash, choice
from onepass.ops.attention.formula import AttentionOptions
from onepass.runtime import wheels

module = importlib.import_module("onepass.ops.attention.attention")
NAMES = ("cudnn", "flash_attn", "varlen_attn")
HEADS, GROUPS, D = 4, 2, 16


# ---- stand-ins: attention of one document at a time, q [T, H, D] ----


def attended(q, k, v, scale, window, softcap, sinks):
    """y and the natural logarithm of each row's sum."""
    wide = [x.float().transpose(0, 1) for x in (q, k, v)]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[0], 0) for x in wide[1:])
    scores = wide[0] @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[0], [0, q.shape[0]], False, window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)], -1)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()[..., : q.shape[0]]
    return (p @ v).transpose(0, 1).to(q.dtype), lse


def by_document(q, boundaries):
    """Slices of q's first dimensions: rows of a batch, or documents of one row."""
    if boundaries is None:
        return [(b,) for b in range(q.shape[0])]
    ends = boundaries.tolist()
    return [(slice(first, end),) for first, end in pairwise(ends) if end > first]


def window_of(causal, left, right):
    return left, 0 if causal else right


class Flash(types.SimpleNamespace):
    """flash-attn-4's two functions."""

    given = None

    def forward(
        self, q, k, v, softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
        learnable_sink=None, cu_seqlens_q=None, cu_seqlens_k=None, out=None, lse=None, return_lse=False,
    ):  # fmt: skip
        assert return_lse and out.is_contiguous() and softcap != 0 and cu_seqlens_q is cu_seqlens_k
        window = window_of(causal, window_size_left, window_size_right)
        for at in by_document(q, cu_seqlens_q):
            y, rows = attended(*(x[at] for x in (q, k, v)), softmax_scale, window, softcap, learnable_sink)
            out[at].copy_(y)
            (lse[at] if cu_seqlens_q is None else lse[(slice(None), *at)]).copy_(rows)

    def backward(
        self, q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, learnable_sink=None, cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False,
        dq=None, dk=None, dv=None,
    ):  # fmt: skip
        assert softcap is not None and cu_seqlens_q is cu_seqlens_k
        self.given = {"deterministic": deterministic}
        window, dsinks = window_of(causal, window_size_left, window_size_right), 0
        for at in by_document(q, cu_seqlens_q):
            leaves = [x[at].detach().requires_grad_() for x in (q, k, v)]
            leaves += [] if learnable_sink is None else [learnable_sink.detach().requires_grad_()]
            with torch.enable_grad():
                y, rows = attended(*leaves[:3], softmax_scale, window, softcap, (*leaves, None)[3])
            of_rows = lse[at] if cu_seqlens_q is None else lse[(slice(None), *at)]
            if not of_rows.isnan().all():  # as they are where boundaries are wrong
                torch.testing.assert_close((out[at], of_rows), (y.detach(), rows.detach()))
            grads = torch.autograd.grad(y, leaves, dout[at] + 0 * of_rows.mean())  # NaN of NaN
            for into, grad in zip((dq, dk, dv), grads, strict=False):
                into[at].copy_(grad)
            dsinks = dsinks + grads[3] if learnable_sink is not None else dsinks
        return (dq, dk, dv) if learnable_sink is None else (dq, dk, dv, dsinks)


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa == (query.shape[1] != key.shape[1]) and max_q == max_k >= cu_seq_q.diff().max()
    window = tuple(None if side < 0 else side for side in window_size)
    each = [attended(query[at], key[at], value[at], scale, window, None, None)[0] for at in by_document(query, cu_seq_q)]
    return torch.cat(each)


def older_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None, scale=None):
    """As PyTorch 2.10 has it: no window, no groups."""
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=(-1, 0 if is_causal else -1))


@pytest.fixture
def flash(monkeypatch):
    stand_in = Flash()
    monkeypatch.setattr(by_flash, "flash_functions", lambda: by_flash.FlashFunctions(stand_in.forward, stand_in.backward))
    monkeypatch.setattr(backends, "flash_functions", by_flash.flash_functions)
    return stand_in


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(backends, "_on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "_varlen", lambda: varlen_attn)


@pytest.fixture
def ordered():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


CASES = [Case(), Case(S=70, R=0, scale=0.5), *packed_cases(), *normed_cases()]


@needs_triton
@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_attention_is_the_same_attention(case, flash):
    report = judge_case(module, case, "flash_attn")
    assert report, report
    assert flash.given == {"deterministic": True}


OF_VARLEN = [case for case in CASES if case.softcap is None and not case.sinks]


@needs_triton
@pytest.mark.parametrize(("case", "name"), [
    *((case, "varlen_attn") for case in OF_VARLEN), *((case, "older_varlen_attn") for case in OF_VARLEN if case.window is None),
], ids=str)  # fmt: skip
def test_varlen_attention_is_the_same_attention(case, name, ordered, monkeypatch):
    monkeypatch.setattr(backends, "_varlen", lambda: globals()[name])
    report = judge_case(module, case, "varlen_attn")
    assert report, report


@pytest.mark.parametrize("window", ((3, None), (None, 3), (3, 3)))
def test_an_older_varlen_attention_has_no_windows(window, monkeypatch):
    monkeypatch.setattr(backends, "_varlen", lambda: older_varlen_attn)
    with pytest.raises(RuntimeError, match="has no window"):
        onepass.attention(drawn(), HEADS, GROUPS, causal=False, window=window, deterministic=False, backend="varlen_attn")


def drawn(dtype=BF16, S=40, D=D):
    return torch.randn(2, S, (HEADS + 2 * GROUPS) * D, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()


def test_any_order_is_passed_on(flash):
    onepass.attention(drawn(), HEADS, GROUPS, deterministic=False, backend="flash_attn").sum().backward()
    assert flash.given == {"deterministic": False}


def test_a_process_that_wants_an_order_gets_it(flash, ordered):
    onepass.attention(drawn(), HEADS, GROUPS, deterministic=False, backend="flash_attn").sum().backward()
    assert flash.given == {"deterministic": True}


def test_only_the_sinks_gradient(flash):
    qkv, sinks = drawn().detach(), torch.zeros(HEADS, requires_grad=True)
    found = []
    for backend in ("flash_attn", "torch"):
        y = onepass.attention(qkv, HEADS, GROUPS, sinks=sinks, backend=backend)
        found += torch.autograd.grad(y.float().square().sum(), sinks)
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


@needs_triton
@pytest.mark.parametrize("backend", ("flash_attn", "varlen_attn"))
@pytest.mark.parametrize("wrong", ([1, 50], [0, 49], [0, 30, 20, 50], [0, -3, 50], [0, 99, 50]), ids=str)
def test_wrong_boundaries_are_nan(backend, wrong, flash, ordered, monkeypatch):
    """On a GPU, where no host reads them; and the kernels are given none that lead out of memory."""
    monkeypatch.setattr(importlib.import_module("onepass.runtime.documents"), "are_readable", lambda cu_seqlens: False)
    case = packed((50,), heads=HEADS, groups=GROUPS, R=0)
    qkv = torch.randn(1, 50, (HEADS + 2 * GROUPS) * D).to(BF16).requires_grad_()
    at = torch.tensor(wrong, dtype=torch.int32)
    y = onepass.attention(qkv, HEADS, GROUPS, cu_seqlens=at, backend=backend)
    assert y.shape == (1, case.S, HEADS * D) and y.isnan().all()
    assert torch.autograd.grad(y.sum(), qkv)[0].isnan().all() or backend == "varlen_attn"


# ---- what is refused ----

PLAIN = "plain causal attention"
REFUSALS = [
    *((name, {"qkv": drawn(torch.float32)}, "qkv is torch.float32") for name in NAMES),
    *((name, {"qkv": drawn(S=0)}, "qkv is empty") for name in NAMES),
    *((name, {"qkv": drawn(D=12)}, "heads of 12 are no multiple of 8") for name in NAMES),
    *((name, {"qkv": drawn(D=264)}, "heads of 264 are no multiple of 8 up to 256") for name in NAMES),
    *(("cudnn", options, PLAIN) for options in ({"window": 3}, {"softcap": 2.0}, {"causal": False})),
    ("cudnn", {"sinks": torch.zeros(HEADS)}, PLAIN),
    ("cudnn", {"qkv": drawn()[:1], "cu_seqlens": torch.tensor([0, 9, 40]).int()}, PLAIN),
    ("varlen_attn", {"softcap": 2.0}, "varlen_attn has no softcap"),
    ("varlen_attn", {"sinks": torch.zeros(HEADS)}, "varlen_attn has no sinks"),
    ("varlen_attn", {}, r"only under torch\.use_deterministic_algorithms\(True\): turn that on, or pass deterministic=False"),
]


@pytest.mark.parametrize(("name", "arguments", "words"), REFUSALS)
def test_a_call_that_it_cannot_do_is_refused(name, arguments, words, flash):
    with pytest.raises(RuntimeError, match=f"backend '{name}' can't take this call of attention: .*{words}"):
        onepass.attention(**{"qkv": drawn(), "heads": HEADS, "groups": GROUPS, **arguments}, backend=name)
    assert flash.given is None


@pytest.mark.parametrize("name", NAMES)
def test_tensors_on_a_cpu_are_refused(name, monkeypatch):
    monkeypatch.setattr(backends, "_on_gpu", lambda x: x.is_cuda)
    with pytest.raises(RuntimeError, match=f"qkv is on cpu, and {name} needs a CUDA device"):
        onepass.attention(drawn(), HEADS, GROUPS, backend=name)


@pytest.mark.parametrize(("capability", "D", "words"), [((8, 0), 16, "this one is 8.0"), ((10, 0), 256, "wider than 128")])
def test_flash_attention_on_another_gpu(capability, D, words, flash, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(RuntimeError, match=words):
        onepass.attention(drawn(D=D), HEADS, GROUPS, backend="flash_attn")


def test_an_older_varlen_attention_refuses_a_window(monkeypatch, ordered):
    monkeypatch.setattr(backends, "_varlen", lambda: older_varlen_attn)
    with pytest.raises(RuntimeError, match=r"varlen_attn of PyTorch .* has no window"):
        onepass.attention(drawn(), HEADS, GROUPS, window=3, backend="varlen_attn")


@pytest.mark.parametrize(
    ("version", "frontend", "S", "D", "enabled", "words"),
    [(91899, True, 40, 64, True, "cuDNN's version is 91899"), (91900, False, 40, 64, True, r"pip install 'onepass\[cudnn\]'"),
     (91900, True, 42, 64, True, "42 tokens are no multiple of 4"), (91900, True, 40, 192, True, "wider than 128"),
     (91900, True, 40, 64, False, "enable_cudnn_sdp")],
)  # fmt: skip
def test_what_cudnn_needs(version, frontend, S, D, enabled, words, monkeypatch):
    monkeypatch.setattr(by_cudnn, "_CUDNN", version)
    monkeypatch.setattr(by_cudnn, "has_frontend", lambda: frontend)
    monkeypatch.setattr(by_cudnn, "has_cudnn", lambda qkv, newest: enabled)
    with pytest.raises(RuntimeError, match=f"backend 'cudnn' can't take this call of attention: .*{words}"):
        onepass.attention(drawn(S=S, D=D), HEADS, GROUPS, backend="cudnn")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(RuntimeError, match=r"the GPU is 10\.0"):
        onepass.attention(drawn(S=S, D=D), HEADS, GROUPS, backend="cudnn")


# ---- flash-attn-4 as it is found ----


@pytest.fixture
def found(monkeypatch):
    """Look flash-attn-4 up anew, in a module that a test gives."""
    given = types.SimpleNamespace(_flash_attn_fwd=Flash().forward, _flash_attn_bwd=Flash().backward)
    monkeypatch.setattr(wheels.metadata, "version", lambda name: "4.0.0b36")
    monkeypatch.setattr(wheels, "import_module", lambda name: given)
    return types.SimpleNamespace(module=given, look=by_flash.flash_functions.__wrapped__)


def test_its_functions_are_found(found):
    assert found.look() == by_flash.FlashFunctions(found.module._flash_attn_fwd, found.module._flash_attn_bwd)


def test_its_warnings_are_no_errors(found):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.look()
        for module in ("cutlass.base_dsl.dsl", "flash_attn.cute.flash_fwd"):
            warnings.warn_explicit("is deprecated", DeprecationWarning, "dsl.py", 1, module)
        with pytest.raises(DeprecationWarning):
            warnings.warn_explicit("is deprecated", DeprecationWarning, "mine.py", 1, "cutlassical")


def test_a_parameter_that_moved_is_named(found):
    found.module._flash_attn_bwd = lambda q, k, v, out, dout, lse, **more: None
    assert "_flash_attn_bwd of flash-attn-4 4.0.0b36 lacks causal, cu_seqlens_k" in found.look()
    del found.module._flash_attn_fwd
    assert "_flash_attn_fwd of flash-attn-4 4.0.0b36 lacks the function itself" in found.look()


def test_a_package_that_does_not_load_is_named(found, monkeypatch):
    def broken(name):
        raise OSError("libcute_dsl_runtime.so")

    monkeypatch.setattr(wheels, "import_module", broken)
    assert "flash-attn-4 4.0.0b36 can't be imported: OSError: libcute_dsl_runtime.so (pip install" in found.look()


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(backends, "flash_functions", by_flash.flash_functions.__wrapped__)
    with pytest.raises(RuntimeError, match=r"flash-attn-4 is not installed \(pip install 'flash-attn-4\[cu13\]'"):
        onepass.attention(drawn(), HEADS, GROUPS, backend="flash_attn")


# ---- what is chosen by itself ----


def chosen(monkeypatch, has=True, S=4096, D=128, heads=32, groups=32, cu_seqlens=None, sinks=None, **options):
    qkv = types.SimpleNamespace(is_cuda=True, device=None, shape=(2, S, 3), stride=lambda: (3 * S, 3, 1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(major=9))
    monkeypatch.setattr(by_cudnn, "_CUDNN", 91900)
    monkeypatch.setattr(by_cudnn, "has_frontend", lambda: True)
    monkeypatch.setattr(choice, "has_flash", lambda qkv: has)
    call = AttentionOptions(heads, groups, False, 1.0)._replace(**options)
    passes = choice.forward_kernels, choice.backward_kernels
    return tuple(of(qkv, D, call, cu_seqlens, sinks) for of in passes), choice.pytorch_is_faster(qkv, D, call, cu_seqlens, sinks)


TABLE = [  # what is called, whose forward and backward, and whether PyTorch's attention is taken for the whole
    ({}, "flash_attn", "flash_attn", False),
    ({"S": 2048}, "cudnn", "flash_attn", False),
    ({"S": 512}, "cudnn", "flash_attn", False),
    ({"S": 500}, "onepass", "onepass", False),
    ({"S": 515}, "flash_attn", "flash_attn", False),
    ({"has": False}, "cudnn", "cudnn", False),
    ({"S": 8064, "groups": 8}, "flash_attn", "onepass", False),
    ({"S": 8192, "groups": 8}, "flash_attn", "flash_attn", False),
    ({"S": 1024, "groups": 8, "in_order": False}, "cudnn", "flash_attn", False),
    ({"S": 512, "groups": 8, "in_order": False}, "cudnn", "onepass", True),
    ({"groups": 8, "in_order": False, "has": False}, "cudnn", "onepass", True),
    ({"D": 64, "groups": 8}, "flash_attn", "flash_attn", False),
    ({"D": 64, "groups": 8, "S": 2048}, "cudnn", "onepass", False),
    ({"D": 64, "groups": 8, "S": 2048, "in_order": False}, "cudnn", "flash_attn", False),
    ({"D": 64, "S": 1024}, "onepass", "flash_attn", False),
    ({"D": 96, "S": 1024}, "onepass", "onepass", False),
    ({"left": 1023}, "flash_attn", "onepass", False),
    ({"left": 4095, "S": 16384}, "flash_attn", "flash_attn", False),
    ({"left": 1023, "in_order": False}, "flash_attn", "flash_attn", False),
    ({"left": 1023, "has": False}, "onepass", "onepass", False),
    ({"left": 1023, "D": 64}, "flash_attn", "onepass", False),
    ({"left": 127, "D": 64, "in_order": False}, "onepass", "onepass", False),
    ({"left": 127, "in_order": False}, "flash_attn", "onepass", False),
    ({"left": 1023, "S": 2047, "in_order": False}, "onepass", "onepass", False),
    ({"right": -1, "in_order": False}, "onepass", "onepass", True),
    ({"softcap": 5.0, "in_order": False}, "onepass", "onepass", False),
    ({"cu_seqlens": "given", "in_order": False}, "onepass", "onepass", False),
    ({"left": 1023, "sinks": "given"}, "onepass", "onepass", False),
    ({"kernels": "flash_attn", "softcap": 5.0, "has": False}, "flash_attn", "flash_attn", False),
]


@pytest.mark.parametrize(("call", "forward", "backward", "whole"), TABLE, ids=str)
def test_the_fastest_is_taken(call, forward, backward, whole, monkeypatch):
    assert chosen(monkeypatch, **call) == ((forward, backward), whole)


def test_explain_names_them(flash):
    found = onepass.explain(onepass.attention, drawn(), HEADS, GROUPS, backend="flash_attn")
    assert found.backend == "flash_attn" and set(NAMES) < set(found.reasons)
    assert found.reasons["flash_attn"] is None and "use_deterministic_algorithms" in found.reasons["varlen_attn"]
