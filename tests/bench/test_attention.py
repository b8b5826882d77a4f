"""The case file of attention: every contender is called rightly, and one that writes over its input gets its own."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import benching
from bench.benching import bench, check_contenders, made, only, stand_in, wrong

from onepass.bench import attention, attention_options
from onepass.bench.model import BenchCase, Call, Contender, Inputs, Result
from onepass.kernels.language import triton


def given(variant: str) -> tuple[BenchCase, Inputs]:
    return benching.given(attention, (1 if "documents" in variant else 2, 9, 4, 4, 16), variant)


@pytest.mark.parametrize("variant", list(attention._GPU))
def test_every_contender_is_called_rightly_and_leaves_its_inputs(variant: str) -> None:
    case, inputs = given(variant)
    check_contenders(attention, case, inputs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what lacks a GPU")
def test_kernels_for_gpus_are_named_where_there_is_none() -> None:
    lacking = {variant: {c.name: c.lacks for c in attention.BENCH.contenders(given(variant)[0])} for variant in attention._GPU}
    assert lacking["turned"] == {
        "onepass": None, "rope + SDPA": None, "cuDNN frontend": "needs a GPU", "flash-attn 4": "needs a GPU",
        "cuDNN flex": "needs a GPU", "torch.compile": None,
    }  # fmt: skip
    assert lacking["turned, any order"]["cuDNN"] == lacking["window"]["varlen_attn"] == "needs a GPU"
    assert lacking["softcap"]["varlen_attn"] == "no softcap"
    assert lacking["softcap"]["flex_attention"] == "needs a GPU"


@pytest.mark.parametrize("variant", ["turned", "plain", "turned, any order"])
def test_the_frontend_of_cudnn_is_asked_for_the_cases_order(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = given(variant)

    def named(*args: Any, backend: str, deterministic: bool, **given: Any) -> torch.Tensor:
        assert backend == "cudnn"
        assert deterministic is (variant != "turned, any order")
        return attention.attention_reference(*args, **given)

    monkeypatch.setattr(attention, "attention", named)
    assert not wrong(attention, case, inputs, attention._cudnn_frontend(case))


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask_plan: Any, deterministic: bool) -> torch.Tensor:
    """As cuDNN's: rows of a batch, or documents behind each other, whose queries see intervals of their own keys."""
    seen, boundaries, ordered = mask_plan
    assert deterministic is ordered
    parts = [x.flatten(0, 1) if boundaries is None else x for x in (q, k, v)]
    lengths = [q.shape[1]] * q.shape[0] if boundaries is None else boundaries.diff().tolist()
    assert seen.dtype == torch.int32 and seen.is_contiguous() and seen.shape[:1] == (1,) and seen.shape[1] in (1, 3)
    rows = []
    for q1, k1, v1, ends in zip(*(x.split(lengths) for x in parts), seen[0].split(lengths, 1), strict=True):
        keys = torch.arange(k1.shape[0])
        visible = keys < ends[0][:, None]
        if len(ends) == 3:
            visible |= (keys >= ends[1][:, None]) & (keys < ends[2][:, None])
        each = (x.transpose(0, 1)[None] for x in (q1, k1, v1))
        y = torch.nn.functional.scaled_dot_product_attention(*each, attn_mask=visible, enable_gqa=True)
        rows.append(y[0].transpose(0, 1))
    return torch.cat(rows).view_as(q)


@pytest.mark.parametrize("variant", [variant for variant in attention._GPU if variant != "softcap"])
def test_flex_attention_of_cudnn_is_called_rightly(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = given(variant)
    made: list[Any] = []

    def plan(seen: torch.Tensor, *parts: torch.Tensor, build_backward: bool, **at: Any) -> Any:
        assert build_backward
        if "documents" in variant:
            assert at["cu_seqlens_q"] is at["cu_seqlens_k"] and at["max_seqlen_q"] == at["max_seqlen_k"] == 3
        made.append((seen, at.get("cu_seqlens_q"), variant in ("turned", "plain", "gated")))
        return made[0]

    stand_in(monkeypatch, {"cudnn.flex_attention": {"create_mask_plan": plan, "flex_attn_func": _flex}})
    call = attention._cudnn_flex(case)
    assert not wrong(attention, case, inputs, call)
    call(*inputs.tensors.values())
    assert len(made) == 1


def test_the_keys_that_a_window_shows() -> None:
    seen = attention_options.visible_keys(given("window")[0])  # of 3 keys; 2 sequences of 9
    assert seen[0, :, :9].tolist() == [[0] * 9, [0, 0, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert torch.equal(seen[0, :, 9:], seen[0, :, :9])


def test_what_computes_something_else_is_wrong() -> None:
    (case, inputs), plain = given("turned"), made(attention, given("plain")[0])
    assert wrong(attention, case, inputs, lambda qkv, cos, sin: plain(qkv)) == ["y", "dqkv"]


@pytest.mark.usefixtures("one_round")
def test_all_of_a_fixed_order_run_deterministically_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, set[bool]] = {"turned": set(), "turned, any order": set()}

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, variant: str) -> torch.Tensor:
            ctx.variant = variant
            asked[variant].add(torch.are_deterministic_algorithms_enabled())
            return x * 1

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
            asked[ctx.variant].add(torch.are_deterministic_algorithms_enabled())
            return dy, None

    def looking(case: BenchCase) -> list[Contender]:
        call = attention._after_rope(case)
        return [Contender("rope + SDPA", lambda _: lambda qkv, *tables: call(Looks.apply(qkv, case.variant), *tables))]  # type: ignore[no-untyped-call]

    def formula(case: BenchCase) -> Call:
        call = attention._formula(case)

        def judging(*tensors: torch.Tensor) -> Result:  # cuBLAS may refuse its products where it is asked to be deterministic
            assert not torch.are_deterministic_algorithms_enabled()
            return call(*tensors)

        return judging

    for variant in asked:
        only(monkeypatch, attention, given(variant)[0], contenders=looking, formula=formula)
        assert bench("attention", "--json", str(tmp_path / "run.json")) == 0
        assert {row["status"] for row in json.loads((tmp_path / "run.json").read_text())["rows"]} == {"ok"}
    assert asked == {"turned": {True}, "turned, any order": {False}}
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_full_cases_are_those_of_a_gpu() -> None:
    cases = attention.BENCH.cases(torch.device("cuda"), torch.bfloat16, False)
    assert [case.name for case in cases[:2]] == ["turned 4x4096x32x8x64", "turned 16x1024x12x12x64"]
    assert len(cases) == 18
    assert (cases[0].forward_bytes, cases[0].backward_bytes) == (4 * 4096 * 80 * 128, 4 * 4096 * 160 * 128)


@pytest.mark.skipif(triton is None, reason="triton is not installed")
@pytest.mark.parametrize("spread", (1.0, 16.0))
def test_the_stored_y_is_all_that_makes_sharp_scores_worse(spread: float) -> None:
    """As numerics.md says: delta of a y in 16 bits. Whoever mends it finds another figure here, and changes the page."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "attention_sharp_scores.py"))
    ours, stored = (script["ratio"](by, spread, 33, 64, 0, device) for by in ("onepass", "stored y"))
    assert ours == pytest.approx(stored, rel=0.05)
    assert (ours > 1.25) is (spread > 1)
