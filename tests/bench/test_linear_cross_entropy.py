"""The case file of linear_cross_entropy: every contender is called rightly, set against products that nobody judges, and judged
by sums over rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import bench, check_contenders, made, only, stand_in, wrong
from torch import Tensor

from onepass.bench import accuracy, linear_cross_entropy, report
from onepass.bench.model import BenchCase, Call, CaseResult, Contender, Measured

variants = pytest.mark.parametrize("variant", ["mean", "main_grad", "grad_scale"])
others = pytest.mark.parametrize("variant", ["mean half", *linear_cross_entropy._ALONE, *linear_cross_entropy._POLICY])


given = partial(benching.given, linear_cross_entropy, (40, 24, 96))


def _loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def _liger(hidden: Tensor, weight: Tensor, labels: Tensor, *more: object) -> tuple[Tensor, None, None]:
    assert more in ((), (None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32))
    return _loss(hidden, weight, labels), None, None


def _quack(hidden: Tensor, weight: Tensor, labels: Tensor, use_scaled_exp: bool, tuned: bool) -> Tensor:
    assert not use_scaled_exp
    assert not tuned
    return _loss(hidden, weight, labels)


def _by_token(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, ignore_index: int = -100, tiles: int = 1,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """As Liger's kernels for Hopper: the loss of each token in fp32, and its entropy in bf16."""
    assert (temperature, ignore_index, tiles) == (1.0, -100, 1)
    log_prob, entropy = linear_cross_entropy._logits_policy(hidden, weight, labels)
    return (-log_prob, entropy.bfloat16()) if return_entropy else -log_prob


class _Trl:
    """TRL's function, of log-probabilities and entropies of rows that are kept."""

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, bias: None, targets: Tensor, *rest: object) -> tuple[Tensor, ...]:
        assert bias is None
        assert rest in ((1.0, 32768, None, 1.0, ("entropy",)), (1.0, 32768, None, 1.0, ()))
        assert bool((targets >= 0).all())
        return linear_cross_entropy._logits_policy(hidden, weight, targets)


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")  # as the contender sets it, but gone after the test
    liger = {"LigerFusedLinearCrossEntropyFunction": SimpleNamespace(apply=_liger)}
    peers = {"liger_kernel.ops.fused_linear_cross_entropy": liger, "cut_cross_entropy": {"linear_cross_entropy": _loss}}
    by_token = {"LigerFusedScaledCrossEntropySM90Function": SimpleNamespace(apply=_by_token)}
    peers["liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"] = by_token
    peers["trl.kernels.chunked_logprob"] = {"ChunkedLogProbFunction": _Trl}
    stand_in(monkeypatch, peers | {"quack.linear_cross_entropy": {"chunked_linear_cross_entropy": _quack}})


@variants
def test_every_contender_is_called_rightly(variant: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case, inputs = given(variant, dtype)
        check_contenders(linear_cross_entropy, case, inputs)


@others
def test_every_contender_of_the_others_is_called_rightly(variant: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case, inputs = given(variant, dtype)
        asked = set() if "forward" in variant else {"hidden"} if "frozen" in variant else {"hidden", "weight"}
        assert inputs.asked.keys() == asked
        check_contenders(linear_cross_entropy, case, inputs)


@others
@pytest.mark.usefixtures("one_round")
def test_a_run_is_set_against_its_products(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, linear_cross_entropy, given(variant)[0])
    assert bench("linear_cross_entropy", "--json", str(tmp_path / "run.json")) == 0
    rows = {row["contender"]: row for row in json.loads((tmp_path / "run.json").read_text())["rows"]}
    floor = {"mean frozen": "two products"}.get(variant, "one product" if "forward" in variant else "three products")
    assert rows["onepass"]["status"] == rows[floor]["status"] == "ok"
    assert rows["onepass"]["both_of_reference"] > 0
    assert rows[floor]["both_of_reference"] == 1


def test_the_chunked_loss_of_pytorch_is_a_contender_where_there_is_one() -> None:
    found = {contender.name: contender for contender in linear_cross_entropy.BENCH.contenders(given("mean")[0])}
    assert (found["F.linear_cross_entropy"].lacks is None) is hasattr(F, "linear_cross_entropy")


def test_an_old_pytorch_is_said_to_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    found = {contender.name: contender for contender in linear_cross_entropy.BENCH.contenders(given("mean")[0])}
    assert found["F.linear_cross_entropy"].lacks == f"PyTorch {torch.__version__} has none, 2.13 has"


@variants
def test_errors_are_of_sums_over_chunks_of_rows(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs = given(variant)
    ours = made(linear_cross_entropy, case)
    whole = accuracy.judged(linear_cross_entropy.BENCH, case, inputs, accuracy.outputs(ours, inputs), True)
    monkeypatch.setitem(accuracy._CHUNK, "cpu", 7 * 96)  # rows of 96 logits, though no input has as many
    seen = []

    def formula(case: BenchCase) -> Call:
        stock = linear_cross_entropy._formula(case)
        return lambda hidden, *rest: seen.append(hidden.shape[0]) or stock(hidden, *rest)  # type: ignore[func-returns-value]

    only(monkeypatch, linear_cross_entropy, case, formula=formula)
    chunked = accuracy.judged(linear_cross_entropy.BENCH, case, inputs, accuracy.outputs(ours, inputs), True)
    assert set(seen) == {7, 5}
    for first, second in zip(whole, chunked, strict=True):
        assert set(first) == {"loss", "dhidden", "dweight"}
        assert second == pytest.approx(first, rel=1e-3)


def test_what_computes_something_else_is_wrong() -> None:
    case, inputs = given("mean")
    ours = made(linear_cross_entropy, case)
    assert wrong(linear_cross_entropy, case, inputs, lambda h, w, y: ours(h, w, (y + (y == y[0])) % 96)) != []
    off_by_little = wrong(linear_cross_entropy, case, inputs, lambda h, w, y: ours(h, w, y) * (1 + 4e-4), ours=True)
    assert "loss" in off_by_little  # though as a peer's it would pass
    assert not wrong(linear_cross_entropy, case, inputs, lambda h, w, y: ours(h, w, y) * (1 + 4e-4))
    case, inputs = given("grad_scale")
    twice = made(linear_cross_entropy, case)
    assert "dweight" in wrong(linear_cross_entropy, case, inputs, lambda *t: (twice(*t), twice(*t))[0], ours=True)


def test_the_floor_is_the_three_products() -> None:
    for variant in ("mean", "main_grad"):
        case, inputs = given(variant, torch.float32)
        hidden, weight, labels = inputs.tensors.values()
        products: list[tuple[torch.Size, ...]] = []

        class Watching(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                if func is torch.ops.aten.mm.default:
                    products.append(tuple(t.shape for t in args))  # noqa: B023
                return func(*args, **(kwargs or {}))

        with Watching():
            linear_cross_entropy._products(case)(hidden, weight, labels).backward()
        assert products == [((40, 24), (24, 96)), ((40, 96), (96, 24)), ((96, 40), (40, 24))]
        assert (weight.grad is None) is (variant == "main_grad")
        assert not hasattr(weight, "main_grad") or not weight.main_grad.any()


@pytest.mark.usefixtures("one_round")
def test_a_run_is_set_against_the_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, linear_cross_entropy, given("grad_scale")[0])
    assert bench("linear_cross_entropy", "--json", str(tmp_path / "run.json")) == 0
    rows = {row["contender"]: row for row in json.loads((tmp_path / "run.json").read_text())["rows"]}
    for name in ("onepass", "three products", "eager", "eager fp32 logits"):
        assert rows[name]["status"] == "ok", rows[name]["message"]
        assert rows[name]["both_of_reference"] > 0
    assert rows["three products"]["both_of_reference"] == 1
    assert rows["three products"]["floor"] is True
    assert not rows["three products"]["errors"]
    assert rows["onepass"]["floor"] is False
    assert "f+b over three products" in capsys.readouterr().out


def test_a_floor_is_nobodys_best_peer() -> None:
    case = given("mean")[0]
    rows = [Measured("onepass", ours=True, forward_ms=2.0, backward_ms=2.0)]
    rows += [Measured("three products", floor=True, forward_ms=1.0, backward_ms=1.0), Measured("eager", forward_ms=4.0)]
    said = report.against_best(CaseResult(case, Measured("copy"), rows, "three products"))
    assert said == "onepass against the best peer: forward 2.00 x the speed of eager"


def test_a_peer_whose_gradients_are_made_in_forward_is_judged_by_both() -> None:
    rows = [Measured("onepass", ours=True, forward_ms=2.0, backward_ms=2.0)]
    rows += [Measured("Liger", forward_ms=5.0, backward_ms=0.1), Measured("eager", forward_ms=3.0, backward_ms=3.0)]
    said = report.against_best(CaseResult(given("mean")[0], Measured("copy"), rows))
    assert said == (
        "onepass against the best peer: forward 1.50 x the speed of eager, forward and backward 1.27 x the speed of Liger"
    )


@pytest.mark.usefixtures("one_round")
def test_a_floor_that_raises_is_a_line_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: BenchCase) -> Call:
        raise RuntimeError("not today")

    only(
        monkeypatch, linear_cross_entropy, given("mean")[0],
        contenders=lambda case: [
            Contender("onepass", linear_cross_entropy._ours, ours=True), Contender("three products", fails, floor=True),
        ],
    )  # fmt: skip
    assert bench("linear_cross_entropy", "--json", str(tmp_path / "run.json")) == 0
    rows = {row["contender"]: row for row in json.loads((tmp_path / "run.json").read_text())["rows"]}
    assert rows["three products"]["status"] == "error"
    assert rows["onepass"]["both_of_reference"] is None


def test_the_full_cases_are_those_of_a_gpu() -> None:
    cases = linear_cross_entropy.BENCH.cases(torch.device("cuda"), torch.bfloat16, False)
    shapes = [(8192, 4096, 128256), (16384, 4096, 32000), (8192, 768, 50257), (4096, 4096, 128256)]
    further = [(32768, 4096, 128256), (8192, 2304, 256000)]
    of = {variant: [case.shape for case in cases if case.variant == variant] for variant in ("mean", "main_grad", "grad_scale")}
    assert of == {"mean": shapes + further, "main_grad": shapes, "grad_scale": shapes + further}
    lacking = {one.name for one in linear_cross_entropy.BENCH.contenders(cases[4]) if "fit" in (one.lacks or "")}
    assert lacking == {"eager fp32 logits"}
    hidden, weight = 8192 * 4096 * 2, 128256 * 4096 * 2
    assert cases[0].forward_bytes == hidden + weight
    assert cases[0].backward_bytes == 2 * (hidden + weight)
    assert cases[6].backward_bytes == 2 * hidden + 5 * weight
    frozen = next(case for case in cases if case.variant == "mean frozen")
    assert frozen.backward_bytes == 2 * hidden + weight
