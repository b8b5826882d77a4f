"""`onepass bench huggingface` on a CPU: what a contender's process finds, and what is made of several."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench.benching import bench, stand_in
from torch import Tensor

from onepass.bench import huggingface, huggingface_process
from onepass.bench.huggingface_cases import (
    AXOLOTL,
    CONTENDERS,
    EAGER,
    LIGER,
    OURS,
    OURS_COMPILED,
    OURS_FP8,
    OURS_GRAPHED,
    OURS_PACKED,
    OURS_TORCHS_ADAMW,
    UNSLOTH,
    AcceptanceBar,
    ModelCase,
    ModelResult,
    at_most,
    cases,
    compare,
    reached,
)
from onepass.integrations.huggingface import apply

CPU = torch.device("cpu")
LLAMA = cases(quick=True)[0]
CHATS = next(case for case in cases(quick=True) if case.chats)
LORA = next(case for case in cases(quick=True) if case.lora_rank)


pytestmark = pytest.mark.usefixtures("by_formula")


# ---- in a contender's process ----


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.usefixtures("transformers")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT's
@pytest.mark.parametrize("case", cases(quick=True), ids=lambda case: case.name)
def test_ours_is_as_good_as_eager(case: ModelCase) -> None:
    if case.lora_rank:
        pytest.importorskip("peft")
    names = [EAGER, OURS, OURS_FP8, *([OURS_PACKED] if case.chats else [])]
    rows = [huggingface_process.measured(case, name, CPU, 5, True) for name in names]
    compare(rows)
    for row in rows:
        assert row.status == "ok"
        assert len(row.losses) == 5
        assert row.ms is not None and row.ms_range[0] <= row.ms <= row.ms_range[1]
        assert row.peak_gib is None  # a GPU's
    trained = {"model.embed_tokens.weight", "model.layers.*.mlp.down_proj.weight", "model.norm.weight"}
    if case.lora_rank:
        trained = {f"base_model.model.model.layers.*.mlp.down_proj.lora_{part}.default.weight" for part in "AB"}
    assert trained <= rows[0].errors.keys()
    assert all(1e-4 < error < 0.05 for error in rows[0].errors.values())  # of bf16
    bars = [bar for bar in case.bars if bar.contender in names]
    assert all(found is not None and found[1] for bar in bars for found in [reached(bar, rows)])
    assert rows[0].losses != rows[1].losses != rows[2].losses  # they did not do the same
    assert rows[2].error_of_eager is not None and rows[2].error_of_eager > 3  # of eight bits


@pytest.mark.usefixtures("transformers")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT's
def test_a_step_changes_adapters_by_more_than_bf16_leaves_out() -> None:
    pytest.importorskip("peft")
    losses = {}
    for name in (EAGER, OURS):
        batches = huggingface_process.tokens(LORA, CPU)
        trainer = huggingface_process._Trainer(LORA, huggingface_process.new_model(LORA, CPU), name)
        losses[name] = [float(trainer.step(next(batches))) for _ in range(40)]
    assert max(abs(a - b) for a, b in zip(losses[EAGER], losses[OURS], strict=True)) < 1.5e-3


@pytest.mark.usefixtures("transformers")
def test_a_graphed_step_trains_as_others_at_a_rate_that_is_a_tensor() -> None:
    case = replace(LLAMA, graphed=True)
    assert OURS_GRAPHED in case.contenders and OURS_GRAPHED not in LLAMA.contenders
    losses: dict[str, list[float]] = {}
    for name in (OURS, OURS_GRAPHED):
        trainer = huggingface_process._Trainer(case, huggingface_process.new_model(case, CPU), name)
        (group,), batches = trainer.optimizer.param_groups, huggingface_process.tokens(case, CPU)
        rate, before = group["lr"], float(group["lr"])
        losses[name] = [float(trainer.step(next(batches))) for _ in range(3)]
    assert type(trainer.train).__name__ == "GraphedStep"
    assert group["lr"] is rate and float(rate) > before  # a captured step goes on reading it
    assert losses[OURS] == pytest.approx(losses[OURS_GRAPHED], abs=1e-5)
    assert losses[OURS][0] != losses[OURS][2]


def _lora_functions(calls: list[str]) -> dict[str, Any]:
    """Stand-ins for a package's functions, which read the layers' parameters and don't call the layers."""

    def layer(projection: Any, x: Tensor) -> Tensor:
        a, b = (part["default"].weight for part in (projection.lora_A, projection.lora_B))
        added = F.linear(F.linear(x.to(a.dtype), a), b) * projection.scaling["default"]
        return (F.linear(x, projection.base_layer.weight) + added).to(x.dtype)

    def apply_lora_qkv(self: Any, X: Tensor) -> tuple[Tensor, ...]:
        calls.append("qkv")
        return tuple(layer(projection, X) for projection in (self.q_proj, self.k_proj, self.v_proj))

    def apply_lora_o(self: Any, X: Tensor) -> Tensor:
        calls.append("o")
        return layer(self.o_proj, X)

    def apply_lora_mlp_swiglu(self: Any, X: Tensor) -> Tensor:
        calls.append("mlp")
        return layer(self.down_proj, F.silu(layer(self.gate_proj, X)) * layer(self.up_proj, X))

    return {function.__name__: function for function in (apply_lora_qkv, apply_lora_o, apply_lora_mlp_swiglu)}


@pytest.mark.usefixtures("transformers")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # PEFT's
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("name", "module"), [(UNSLOTH, "unsloth.kernels.fast_lora"), (AXOLOTL, "axolotl.kernels.lora")])
def test_layers_with_lora_run_by_a_package_s_functions(
    name: str, module: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    calls: list[str] = []
    liger = {"_apply_liger_kernel_to_instance": lambda model: calls.append(type(model).__name__)}
    modules = {module: _lora_functions(calls), "liger_kernel.transformers": liger, "unsloth_zoo.temporary_patches": {}}
    stand_in(monkeypatch, modules)
    case = replace(LORA, checkpointed=checkpointed)
    trainer = huggingface_process._Trainer(case, huggingface_process.new_model(case, CPU), name)
    trainer.step(next(huggingface_process.tokens(case, CPU)))
    layer = ["qkv", "o", "mlp"]
    assert calls == ["LlamaForCausalLM", *layer * 2, *(layer * 2 if checkpointed else [])]
    del calls[:]
    rows = [huggingface_process.measured(case, each, CPU, 2, True) for each in (EAGER, name)]
    compare(rows)
    assert rows[1].error_of_eager is not None and rows[1].error_of_eager <= 1.25
    assert rows[1].loss_apart is not None and rows[1].loss_apart < 2e-3


def test_a_gpu_without_eight_bits_skips_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "unfit_gpu", lambda device: "A100 has 8.0")
    args, ends = argparse.Namespace(contender=None), float("inf")
    found = huggingface._skipped(OURS_FP8, args, torch.device("cuda"), ends)
    assert found is not None and (found.status, found.message) == (
        "skipped", "eight bits need compute capability 8.9 or later, but A100 has 8.0"
    )  # fmt: skip
    assert huggingface._skipped(OURS, args, torch.device("cuda"), ends) is None
    assert huggingface._skipped(OURS_FP8, args, CPU, ends) is None


@pytest.mark.usefixtures("transformers")
def test_a_contender_that_computes_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(model: Any) -> Any:
        model.model.layers[1].mlp.act_fn = torch.nn.GELU()
        return model

    monkeypatch.setitem(huggingface_process._MAKE, OURS, off)
    rows = [huggingface_process.measured(LLAMA, name, CPU, 2, True) for name in (EAGER, OURS)]
    compare(rows)
    assert rows[1].error_of_eager is not None and rows[1].error_of_eager > 5
    assert huggingface._wrong(LLAMA, rows)


@pytest.mark.usefixtures("transformers")
def test_all_train_the_same_model_on_the_same_tokens() -> None:
    models = [huggingface_process.new_model(LLAMA, CPU) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert {parameter.dtype for parameter in models[0].parameters()} == {torch.bfloat16}
    first, again = huggingface_process.tokens(LLAMA, CPU), huggingface_process.tokens(LLAMA, CPU)
    batches = [next(first) for _ in range(20)]
    assert all(torch.equal(batch, next(again)) for batch in batches)
    assert not torch.equal(batches[0], batches[1])
    drawn = torch.stack(batches)
    assert drawn.shape == (20, 2, 64)
    assert drawn.min() == 0 and 256 < drawn.max() < 512
    assert 0.3 < (drawn < 16).float().mean() < 0.6  # log(17) / log(512) of them


@pytest.mark.usefixtures("transformers")
def test_exact_gradients_are_those_of_the_whole_batch() -> None:
    batch = next(huggingface_process.tokens(LLAMA, CPU))
    model = huggingface_process.new_model(LLAMA, CPU).float()
    model(input_ids=batch, labels=batch).loss.backward()
    exact = huggingface_process.exact_gradients(LLAMA, batch)
    assert {grad.dtype for grad in exact.values()} == {torch.float32}
    assert max(huggingface_process.errors(model, exact).values()) < 1e-5


def test_errors_by_kind() -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(2))})
    exact = {name: torch.tensor([[3.0, 4.0]]) for name, _ in model.named_parameters()}
    for factor, parameter in zip((1.3, 0.6), model.parameters(), strict=True):
        parameter.grad = factor * torch.tensor([[3.0, 4.0]])
    assert huggingface_process.errors(model, exact) == {"layers.*.weight": pytest.approx(((0.3**2 + 0.4**2) / 2) ** 0.5)}
    parameter.grad = torch.full_like(parameter, float("nan"))
    found = ModelResult(OURS, errors={"fine": 0.1, **huggingface_process.errors(model, exact), "last": 0.2})
    assert found.worst_error != found.worst_error
    parameter.grad = None
    with pytest.raises(RuntimeError, match="no gradient"):
        huggingface_process.errors(model, exact)


def test_a_prompt_has_no_labels() -> None:
    batch = next(huggingface_process.tokens(LLAMA, CPU))
    inputs = huggingface_process.ModelInputs(LLAMA, CPU, packed=False).of(batch)
    assert inputs.keys() == {"input_ids", "labels"} and torch.equal(inputs["labels"], batch)
    labels = huggingface_process.ModelInputs(replace(LLAMA, ignored=0.6), CPU, packed=False).of(batch)["labels"]
    assert (labels[:, :39] == -100).all() and torch.equal(labels[:, 39:], batch[:, 39:])


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("quick", (True, False))
def test_chats_are_padded_or_packed(quick: bool) -> None:
    case = next(case for case in cases(quick) if case.chats)
    batch = next(huggingface_process.tokens(case, CPU))
    padded, packed = (huggingface_process.ModelInputs(case, CPU, packed).of(batch) for packed in (False, True))
    assert case.chats is not None and len(case.lengths) == case.sequences
    assert case.chats[0] <= min(case.lengths) and max(case.lengths) <= case.chats[1]
    assert abs(case.tokens / case.sequences / (sum(case.chats) / 2) - 1) < 0.05
    assert padded["attention_mask"].sum(1).tolist() == case.lengths
    kept = padded["attention_mask"].bool()
    assert (padded["labels"][~kept] == -100).all() and torch.equal(padded["labels"][kept], batch[kept])
    assert torch.equal(packed["input_ids"][0], batch[kept]) and packed["input_ids"].shape == (1, case.tokens)
    assert packed["cu_seq_lens_q"].diff().tolist() == case.lengths and packed["max_length_q"] == max(case.lengths)
    first = packed["position_ids"] == 0
    assert int(first.sum()) == case.sequences and (packed["labels"][first] == -100).all()
    for inputs in (padded, packed):
        assert int((inputs["labels"][:, 1:] != -100).sum()) == case.tokens - case.sequences


@pytest.mark.usefixtures("transformers")
def test_packed_chats_have_the_padded_ones_loss_and_gradients() -> None:
    batch = next(huggingface_process.tokens(CHATS, CPU))
    exact, losses = huggingface_process.exact_gradients(CHATS, batch), []
    for packed in (False, True):
        model = huggingface_process.new_model(CHATS, CPU).float()
        applied = apply(model) if packed else None
        loss = model(**huggingface_process.ModelInputs(CHATS, CPU, packed).of(batch)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        assert max(huggingface_process.errors(model, exact).values()) < 1e-5
        assert applied is None or "transformers' masks" not in str(applied)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_failure_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> ModelResult:
        raise ValueError("not like this\nand more lines")

    monkeypatch.setattr(huggingface_process, "measured", fails)
    asked = {"case": asdict(LLAMA) | {"asked": ()}, "contender": LIGER, "device": "cpu", "steps": 1, "quick": True}
    huggingface_process.main(json.dumps(asked), str(tmp_path / "found.json"))
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]
    found = ModelResult(**json.loads((tmp_path / "found.json").read_text()))
    assert (found.contender, found.status, found.message) == (LIGER, "error", "ValueError: not like this")


# ---- what is made of several ----


def test_bars() -> None:
    losses = [3.0, 2.0]
    rows = [
        ModelResult(EAGER, ms=100.0, peak_gib=50.0, losses=losses, errors={"a": 0.1, "b": 0.001}),
        ModelResult(LIGER, ms=80.0, peak_gib=30.0, losses=[3.0, 2.01], errors={"a": 0.1, "b": 0.002}),
        ModelResult(OURS, ms=70.0, peak_gib=20.0, losses=[3.001, 2.0], errors={"a": 0.11, "b": 0.001}),
        ModelResult(OURS_COMPILED, "error", "it crashed"),
    ]
    compare(rows)
    assert rows[1].loss_apart == pytest.approx(0.01) and rows[0].loss_apart is None
    rows[0].losses_again = [3.0005, 2.0]
    compare(rows)
    assert rows[0].loss_apart == pytest.approx(5e-4)
    assert at_most(AcceptanceBar(OURS, "loss_apart", 2e-3), rows) == 2e-3
    assert rows[1].error_of_eager == pytest.approx(2.0, rel=1e-2)
    assert reached(AcceptanceBar(OURS, "ms", 0.9, LIGER), rows) == (0.875, True)
    assert reached(AcceptanceBar(OURS, "ms", 0.8, LIGER), rows) == (0.875, False)
    assert reached(AcceptanceBar(OURS, "peak_gib", 22.0), rows) == (20.0, True)
    assert reached(AcceptanceBar(OURS_COMPILED, "ms", 1.0, OURS), rows) is None
    assert reached(AcceptanceBar(OURS, "ms", 1.0, OURS_COMPILED), rows) is None
    assert not huggingface._wrong(LLAMA, rows[:3])  # Liger is, but that is no fault of ours
    assert huggingface._wrong(LLAMA, rows)
    rows[2].loss_apart, rows[0].loss_apart = 0.015, 0.01  # so far is eager from itself
    assert at_most(bar := AcceptanceBar(OURS, "loss_apart", 2e-3), rows) == 0.02 and reached(bar, rows) == (0.015, True)
    assert at_most(AcceptanceBar(OURS, "ms", 2e-3), rows) == 2e-3
    for far, errors in (
        ([2.9, 2.0], {"a": 0.1, "b": 0.001}),
        ([float("nan"), 2.0], {"a": 0.1, "b": 0.001}),
        (losses, {"a": 1, "b": 0}),
    ):
        rows[2].losses, rows[2].errors = far, errors
        compare(rows)
        assert huggingface._wrong(LLAMA, rows[:3])


def test_the_cases_are_those_asked_for() -> None:
    real = {case.name: case for case in cases(quick=False)}
    names = ["llama_1b 4x4096", "llama_1b 4x4096 ignored", "llama_1b 16x1024 chats", "llama_1b 1x1024", "llama_124m 8x1024"]
    with_lora = ["lora_8b 2x2048", "lora_8b 2x2048 bf16", "lora_8b 2x2048 nf4", "lora_8b 4x4096 checkpointed"]
    hybrids = ["qwen3_moe_30b 4x4096", "qwen3_5_2b 4x4096", "gpt_oss_20b 4x4096", "gemma4_2b 1x8192", "deepseek_v3_16b 4x4096"]
    assert list(real) == [*names, "qwen3_0.6b 4x4096", "gemma2_2b 1x4096", *hybrids, *with_lora]
    assert [case.name for case in real.values() if case.lora_rank] == with_lora
    assert AcceptanceBar(OURS_PACKED, "ms", 0.6, OURS) in real["llama_1b 16x1024 chats"].bars
    assert [case.name for case in real.values() if OURS_PACKED in case.contenders] == ["llama_1b 16x1024 chats"]
    assert AcceptanceBar(OURS, "ms", 0.9, LIGER) in real["llama_1b 4x4096"].bars
    assert all(bar.contender in CONTENDERS and bar.of in (None, *CONTENDERS) for case in real.values() for bar in case.bars)


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama_1b 4x4096", 1236),
        ("gemma2_2b 1x4096", 2614),
        ("qwen3_5_2b 4x4096", 1882),
        ("gpt_oss_20b 4x4096", 4451),
        ("gemma4_2b 1x8192", 5077),
        ("deepseek_v3_16b 4x4096", 2509),
    ],
)
def test_the_models_have_their_sizes(name: str, millions: int) -> None:
    case = next(case for case in cases(quick=False) if case.name == name)
    model = huggingface_process.new_model(case, torch.device("meta"))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions
    assert model.config._attn_implementation == case.attention
    assert next(huggingface_process.tokens(case, torch.device("cpu"))).max() < model.config.vocab_size


@pytest.mark.usefixtures("transformers")
def test_exact_gradients_are_of_transformers_own_functions() -> None:
    case = next(case for case in cases(quick=True) if "qwen3_5" in case.name)
    model = huggingface_process.new_model(case, torch.device("cpu"))
    there = vars(sys.modules[type(model).__module__])
    chosen = {name: there[name] for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")}
    with huggingface_process.without_packages(model):
        assert {name: there[name] for name in chosen} == {name: made.__wrapped__ for name, made in chosen.items()}
    assert {name: there[name] for name in chosen} == chosen


# ---- the command ----

Answer = Callable[[str], "ModelResult | None"]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[tuple[str, str]]]:
    """Puts a function in the place of the contenders' processes. None is one that crashes. The list has who was asked what."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(huggingface, "commit", lambda: "abc")

    def answering(answer: Answer) -> list[tuple[str, str]]:
        calls: list[tuple[str, str]] = []

        def run(command: list[str], log: Path, seconds: float | None) -> int:
            asked = json.loads(command[3])
            calls.append((asked["case"]["name"], asked["contender"]))
            found = answer(asked["contender"])
            log.write_text("Traceback\nSegmentation fault\n")
            if found is not None:
                Path(command[4]).write_text(json.dumps(asdict(found)))
            return 0 if found else -11

        monkeypatch.setattr(huggingface, "_run", run)
        return calls

    return answering


def fine(name: str, ms: float = 2.0, losses: tuple[float, ...] = (5.0, 4.0)) -> ModelResult:
    return ModelResult(name, ms=ms, cpu_ms=1.0, first_s=0.1, losses=list(losses), errors={"a": 0.1})


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["contender"]): row for row in json.loads(path.read_text())["rows"]}


Processes = Callable[[Answer], list[tuple[str, str]]]


def test_a_table_for_each_case(processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = processes(lambda name: fine(name, 2.0 if name == EAGER else 1.0))
    file = tmp_path / "run.json"
    assert bench("huggingface", "--json", str(file)) == 0
    on_cpu = (EAGER, OURS, OURS_TORCHS_ADAMW, OURS_FP8, OURS_PACKED)
    assert calls == [(case.name, name) for case in cases(quick=True) for name in on_cpu if name in case.contenders]
    said = capsys.readouterr()
    assert "llama 2 x 64 bf16, sdpa attention" in said.out
    assert "gemma2 2 x 64 bf16, eager attention" in said.out
    assert "llama 4 x 64 bf16, sdpa attention, chats of 4 to 60 tokens" in said.out
    assert rows_of(file)[CHATS.name, OURS_PACKED]["tokens"] == CHATS.tokens
    assert "> onepass                       1.0    0.500   128,000" in said.out
    assert "onepass, losses' distance to eager's at most 2.0e-03: 0.0e+00, reached" in said.out
    assert "torch.compile: left out of --quick on a CPU" in said.out
    assert f"{LLAMA.name}: eager" in said.err
    record = json.loads(file.read_text())
    assert record["commit"] == "abc"
    assert record["versions"]["transformers"]
    assert (record["steps"], record["quick"], record["dtype"]) == (5, True, "bf16")
    assert rows_of(file)[LLAMA.name, OURS]["shape"] == [2, 64]
    assert {row["status"] for row in record["rows"]} == {"ok", "skipped"}
    reached_by = {bar["contender"]: bar["reached"] for bar in record["bars"]}
    assert reached_by == {OURS: True, OURS_TORCHS_ADAMW: True, OURS_COMPILED: None, OURS_FP8: True, OURS_PACKED: True}


def test_one_that_fails_is_a_row(processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ("huggingface", "--case", LLAMA.name, "--contender", EAGER, "--contender", "torch.compile", "--contender", OURS)
    processes(lambda name: fine(name) if name != "torch.compile" else ModelResult(name, "error", "ValueError: [no] graph"))
    assert bench(*both, "--json", str(tmp_path / "run.json")) == 0  # a peer's fault is no fault of ours
    assert "torch.compile: error: ValueError: [no] graph" in capsys.readouterr().out
    assert rows_of(tmp_path / "run.json")[LLAMA.name, "torch.compile"]["ms"] is None
    processes(lambda name: fine(name) if name != OURS else None)
    assert bench(*both) == 1
    said = capsys.readouterr().out
    assert "ended with status -11: Segmentation fault" in said
    assert "onepass is wrong, or raised, in llama_tiny 2x64" in said
    processes(lambda name: fine(name, losses=(5.0, 4.0 + 0.1 * (name == OURS))))
    assert bench(*both) == 1
    assert "2.0e-03: 1.0e-01, not reached" in capsys.readouterr().out


def test_several_commands_fill_one_file(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    asked = ("huggingface", "--case", LLAMA.name, "--json", str(file), "--contender")
    processes(lambda name: fine(name, 2.0, (5.0, float("nan") if name == LIGER else 4.0)))
    assert bench(*asked, EAGER) == 0
    assert bench(*asked, OURS) == 0
    rows = rows_of(file)
    assert set(rows) == {(LLAMA.name, EAGER), (LLAMA.name, OURS)}
    assert rows[LLAMA.name, OURS]["loss_apart"] == 0
    assert bench(*asked, OURS, "--budget", "1e-9") == 0  # nothing was done: what was found stays
    assert rows_of(file) == rows
    processes(lambda name: fine(name, 3.0))
    assert bench(*asked, OURS) == 0
    assert rows_of(file)[LLAMA.name, OURS]["ms"] == 3.0
    for other in ("def", "def+", None):
        monkeypatch.setattr(huggingface, "commit", lambda other=other: other)
        assert bench(*asked, EAGER) == 0
        assert len(rows_of(file)) == 1
        assert bench(*asked, OURS) == 0
        assert len(rows_of(file)) == (2 if other == "def" else 1)  # what can't be told to be the same is not mixed
    file.write_text("no JSON")
    assert bench(*asked, EAGER) == 0
    assert len(rows_of(file)) == 1


def test_a_nan_is_kept_as_one(processes: Processes, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    asked = ("huggingface", "--case", LLAMA.name, "--json", str(file), "--contender")
    processes(lambda name: fine(name, losses=(5.0, float("nan") if name == OURS else 4.0)))
    assert bench(*asked, OURS) == 0  # eager is not known yet
    assert rows_of(file)[LLAMA.name, OURS]["losses"] == [5.0, "nan"]
    assert bench(*asked, EAGER) == 1
    assert rows_of(file)[LLAMA.name, OURS]["loss_apart"] == "nan"


def test_interruption(processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(name: str) -> ModelResult:
        if name == OURS:
            raise KeyboardInterrupt
        return fine(name)

    processes(interrupted)
    assert bench("huggingface", "--json", str(tmp_path / "run.json")) == 130
    assert rows_of(tmp_path / "run.json")[LLAMA.name, EAGER]["status"] == "ok"
    assert "interrupted" in capsys.readouterr().out


def test_a_budget_ends_a_process_and_all_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pid, popen = tmp_path / "pid", subprocess.Popen
    slow = f"import subprocess, time; open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)"
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", slow], **options))
    monkeypatch.setattr(huggingface, "commit", lambda: "abc")
    begun = time.monotonic()
    assert bench("huggingface", "--case", LLAMA.name, "--budget", "2") == 0
    assert time.monotonic() - begun < 55  # both processes sleep for 60 s
    said = capsys.readouterr().out
    assert re.search("eager: not done after [0-9]+ s, when --budget ended", said)  # a busy machine looks later
    assert "onepass: no time is left of --budget" in said
    assert not _runs(int(pid.read_text()))


def _runs(pid: int) -> bool:
    for _ in range(50):  # the system may take a moment
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["huggingface", "norm"], "huggingface stands alone, but is asked for with norm"),
        (["huggingface", "--peer", "liger"], "--peer is for ops"),
        (["huggingface", "--plot", "run.png"], "--plot is for ops"),
        (["huggingface", "--dtype", "fp32"], "--dtype must be bf16 for huggingface, but is fp32"),
        (["huggingface", "--steps", "0"], "--steps must be at least 1, but is 0"),
        (["huggingface", "--budget", "0"], "--budget must be more than 0 seconds, but is 0"),
        (["huggingface", "--case", "bert"], f"there are {', '.join(case.name for case in cases(quick=True))}"),
        (["norm", "--contender", "eager"], "--contender is only for huggingface"),
        (["--steps", "3"], "--steps is only for huggingface"),
        (["norm", "--budget", "3"], "--budget is only for huggingface"),
        (["nonsense"], "and huggingface by itself"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    assert bench(*arguments) == 2
    assert words in capsys.readouterr().err


def test_a_peer_s_packages_are_all_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    args, ends, gpu = argparse.Namespace(contender=None), float("inf"), torch.device("cuda")
    monkeypatch.setattr(huggingface, "find_peers", lambda: {"Liger": "0.8.5", "axolotl": "0.19.0", "TRL": "1.16"})
    found = huggingface._skipped(UNSLOTH, args, gpu, ends)
    assert found is not None and found.message == "not installed: Unsloth"
    assert huggingface._skipped(AXOLOTL, args, gpu, ends) is None
    assert huggingface._facts(CPU, 1, True)["versions"]["peers"] == {"Liger": "0.8.5", "axolotl": "0.19.0"}
    found = huggingface._skipped(AXOLOTL, args, CPU, ends)
    assert found is not None and found.message == "its kernels need a GPU"
    with_lora = [case.name for case in cases(quick=False) if {UNSLOTH, AXOLOTL} <= set(case.contenders)]
    assert with_lora == [case.name for case in cases(quick=False) if case.lora_rank]


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(huggingface, "version_of", lambda distribution: None)
    assert bench("huggingface") == 2
    assert "huggingface needs transformers: pip install transformers" in capsys.readouterr().err
    from onepass.cli import main

    assert main(["bench", "huggingface", "--device", "cpu"]) == 2
    assert "huggingface needs a GPU: on a CPU there is --quick" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("transformers")
def test_the_real_thing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    file = tmp_path / "run.json"
    asked = [word for name in (EAGER, OURS, LIGER) for word in ("--contender", name)]  # each a process of its own
    assert bench("huggingface", "--case", LLAMA.name, "--steps", "3", *asked, "--json", str(file)) == 0
    rows = rows_of(file)
    assert [rows[LLAMA.name, name]["status"] for name in (EAGER, OURS)] == ["ok", "ok"]
    assert len(rows[LLAMA.name, OURS]["losses"]) == 3
    assert rows[LLAMA.name, LIGER]["status"] == "skipped"
    assert {bar["reached"] for bar in json.loads(file.read_text())["bars"] if bar["contender"] == OURS} == {True}
