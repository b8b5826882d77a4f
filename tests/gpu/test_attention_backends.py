"""cuDNN's, flash-attn-4's and PyTorch's varlen_attn by their names, and where attention takes them by itself."""

import importlib
from functools import partial

import pytest
import torch
from ops.attention_oracle import BF16, FP16, Case, computed, draw, judge_case, packed
from ops.calls import equal

import onepass
from onepass.ops.attention.by_flash import flash_functions

module = importlib.import_module("onepass.ops.attention.attention")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LENGTHS = (300, 1, 0, 129, 64, 700, 513)
PACKED = partial(packed, LENGTHS)
flash = pytest.mark.skipif(torch.cuda.is_available() and isinstance(flash_functions(), str), reason="flash-attn-4 does not load")
CASES = [
    *(Case(B=2, S=776, heads=heads, groups=groups, D=D, R=D, dtype=dtype)
      for heads, groups in ((4, 4), (8, 2)) for D in (64, 128) for dtype in (BF16, FP16)),
    Case(B=1, S=1001, heads=4, groups=1, D=96, R=0),
    Case(B=2, S=777, heads=4, groups=2, D=256, R=64),
    Case(B=2, S=777, heads=8, groups=2, D=128, R=128, window=100),
    Case(B=2, S=777, heads=8, groups=2, D=64, R=64, causal=False),
    Case(B=2, S=777, heads=8, groups=2, D=64, R=64, causal=False, window=(130, 20)),
    Case(B=2, S=777, heads=8, groups=2, D=128, R=128, norm=False),
    Case(B=2, S=777, heads=8, groups=2, D=64, R=0, layout="strided"),
    Case(B=1, S=777, heads=8, groups=2, D=64, R=0, layout="unaligned"),
    PACKED(heads=8, groups=2, D=128, R=128),
    PACKED(heads=8, groups=2, D=64, R=64, each=True),
    PACKED(heads=4, groups=4, D=128, R=0, window=100),
    PACKED(heads=4, groups=2, D=64, R=64, causal=False),
    Case(B=2, S=777, heads=8, groups=2, D=64, R=64, sinks=True, window=100),
    PACKED(heads=8, groups=2, D=64, R=64, sinks=True),
    Case(B=2, S=777, heads=4, groups=2, D=128, R=128, softcap=5.0),
    PACKED(heads=4, groups=2, D=64, R=64, softcap=20.0, window=64),
]  # fmt: skip


def takes(name, case):
    """Whether a backend takes a case. What it refuses, it refuses by name."""
    qkv, cos, sin, _ = draw(case)
    options = case.options | {"cos": cos, "sin": sin, "sinks": case.draw_sinks()}
    options |= case.norm_options | dict(zip(("q_weight", "k_weight"), case.draw_weights(), strict=False))
    reason = onepass.explain("attention", qkv, case.heads, case.groups, **options).reasons[name]
    if reason is not None:
        with pytest.raises(RuntimeError) as error:
            onepass.attention(qkv, case.heads, case.groups, **options, backend=name)
        assert str(error.value) == f"backend '{name}' can't take this call of attention: {reason}"
    return reason is None


@pytest.fixture
def ordered():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@flash
@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_attention(case):
    assert takes("flash_attn", case)
    report = judge_case(module, case, "flash_attn")
    assert report, report
    drawn = draw(case)
    assert equal(*(computed(module, case, *drawn, "flash_attn") for _ in range(2)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_varlen_attention(case, ordered):
    plain = case.softcap is None and not case.sinks
    older = torch.__version__ < "2.11" and case.window is not None
    assert takes("varlen_attn", case) == (plain and not older)
    if plain and not older:
        report = judge_case(module, case, "varlen_attn")
        assert report, report
        drawn = draw(case)
        assert equal(*(computed(module, case, *drawn, "varlen_attn") for _ in range(2)))


@pytest.mark.parametrize("case", CASES[:9], ids=str)
def test_cudnn(case):
    if importlib.util.find_spec("cudnn") is None:
        assert not takes("cudnn", case)
        pytest.skip("needs nvidia-cudnn-frontend")
    assert takes("cudnn", case) == (case.S % 4 == 0 and case.D <= 128)
    if case.S % 4 == 0 and case.D <= 128:
        report = judge_case(module, case, "cudnn")
        assert report, report
        drawn = draw(case)
        assert equal(*(computed(module, case, *drawn, "cudnn") for _ in range(2)))


@flash
@pytest.mark.parametrize("case", (CASES[4], CASES[10], CASES[16]), ids=str)
def test_any_order_is_right_too(case, monkeypatch):
    monkeypatch.setattr(module, "in_order", lambda deterministic: False)
    for name in ("flash_attn", "cudnn"):
        if takes(name, case):
            report = judge_case(module, case, name)
            assert report, report


@flash
def test_a_document_has_the_bits_it_has_alone():
    case = PACKED(heads=8, groups=2, D=128, R=128, each=True)
    qkv, cos, sin, dy = draw(case)
    whole, begin = computed(module, case, qkv, cos, sin, dy, "flash_attn"), 0
    for length in filter(None, LENGTHS):
        at = slice(begin, begin + length)
        alone = packed((length,), heads=8, groups=2, D=128, R=128, each=True)
        found = computed(module, alone, qkv[:, at], cos[:, at], sin[:, at], dy[:, at], "flash_attn")
        assert equal([t[:, at] for t in whole[:2]], found[:2]), length
        begin += length


@pytest.mark.parametrize("name", (pytest.param("flash_attn", marks=flash), "varlen_attn"))
@pytest.mark.parametrize("wrong", ([1, 50], [0, 49], [0, 30, 20, 50], [0, -3, 50], [0, 99, 50]), ids=str)
def test_wrong_boundaries_are_nan(name, wrong, ordered):
    qkv = draw(Case(B=1, S=50, heads=4, groups=2, D=64, R=0))[0]
    at = torch.tensor(wrong, dtype=torch.int32, device="cuda")
    assert onepass.attention(qkv, 4, 2, cu_seqlens=at, backend=name).isnan().all()


IN_ORDER = "backward by flash-attn-4, in a fixed order"
TAKEN = [  # by themselves, as the tables of choice.py have them
    (Case(B=1, S=2304, heads=8, groups=2, D=128, R=128, window=300), "forward by flash-attn-4"),
    (Case(B=2, S=1024, heads=4, groups=4, D=128, R=128, overwrite=True), f"forward by cuDNN; {IN_ORDER}"),
    (Case(B=1, S=1001, heads=4, groups=4, D=128, R=0), f"forward by flash-attn-4; {IN_ORDER}"),
    (Case(B=2, S=700, heads=4, groups=4, D=64, R=64, overwrite=True), IN_ORDER),
    (Case(B=1, S=4098, heads=4, groups=2, D=64, R=64), f"forward by flash-attn-4; {IN_ORDER}"),
]


@flash
@pytest.mark.parametrize(("case", "said"), TAKEN, ids=str)
def test_it_is_taken_where_it_is_faster(case, said):
    qkv, cos, sin, _ = drawn = draw(case)
    assert said in onepass.explain("attention", qkv, case.heads, case.groups, **case.options, cos=cos, sin=sin).variant
    report = judge_case(module, case)
    assert report, report
    assert equal(*(computed(module, case, *drawn) for _ in range(2)))


@flash
@pytest.mark.parametrize("window", (None, 600))
def test_it_compiles_and_is_taken_in_any_order(window):
    case = Case(B=1, S=2304, heads=8, groups=2, D=128, R=128, window=window)
    qkv, cos, sin, dy = draw(case)
    leaf = qkv.requires_grad_()

    def call(leaf):
        return onepass.attention(leaf, 8, 2, cos=cos, sin=sin, window=window, deterministic=False)

    assert "backward by flash-attn-4, in any order" in onepass.explain(
        "attention", leaf, 8, 2, cos=cos, sin=sin, window=window, deterministic=False
    ).variant
    found = []
    for function in (call, torch.compile(call, fullgraph=True)):
        y = function(leaf)
        found.append((y, *torch.autograd.grad(y, leaf, dy)))
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)
