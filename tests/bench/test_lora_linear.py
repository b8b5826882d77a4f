"""The case file of lora_linear: its contenders are called rightly."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bench import benching
from bench.benching import check_contenders, made, stand_in, wrong
from torch import Tensor

from onepass.bench import lora_linear, peers
from onepass.bench.model import Columns, differentiate

given = partial(benching.given, lora_linear, (24, 48, 48))


def _layer(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    y = F.linear(x, weight)
    return (y + F.linear(F.linear(x.to(a.dtype), a), b) * scale).to(y.dtype)


def _layers(x: Tensor, values: tuple[Any, ...], count: int, given: str) -> list[partial[Tensor]]:
    """Return the layers of a function's arguments, which must have these names and be None but for the weight, a, b and s."""
    names = given.split()
    assert x.ndim == 3 and len(values) == count * len(names)
    found = [dict(zip(names, values[i : i + len(names)], strict=True)) for i in range(0, len(values), len(names))]
    assert all(value is None for layer in found for name, value in layer.items() if name not in "Wabs")
    return [partial(_layer, weight=layer["W"], a=layer["a"], b=layer["b"], scale=layer["s"]) for layer in found]


def _functions(given: str, dropped: int, names: tuple[str, str, str]) -> dict[str, Any]:
    """Stand-ins for a package's functions. `dropped`: how many arguments there are between x and the layers."""

    def forward(e: Tensor, g: Tensor) -> Tensor:
        return F.silu(e) * g

    def backward(dh: Tensor, e: Tensor, g: Tensor) -> None:
        raise AssertionError("autograd has it")

    class One:
        @staticmethod
        def apply(x: Tensor, *values: Any) -> Tensor:
            assert values[:dropped] == (None,) * dropped
            return _layers(x, values[dropped:], 1, given)[0](x)

    class QKV:
        @staticmethod
        def apply(x: Tensor, *values: Any) -> tuple[Tensor, ...]:
            *values, inplace = values  # type: ignore[assignment]
            assert values[:dropped] == [None] * dropped and inplace is False
            return tuple(layer(x) for layer in _layers(x, tuple(values[dropped:]), 3, given))

    class MLP:
        @staticmethod
        def apply(x: Tensor, *values: Any) -> Tensor:
            *values, act, of_act, inplace = values  # type: ignore[assignment]
            assert values[:dropped] == [None] * dropped and of_act is backward and inplace is False
            gate, up, down = _layers(x, tuple(values[dropped:]), 3, given)
            y: Tensor = down(act(gate(x), up(x)))
            return y

    one, of_act, of_act_backward = names
    return {"LoRA_QKV": QKV, "LoRA_MLP": MLP, one: One, of_act: forward, of_act_backward: backward}


@pytest.mark.parametrize("variant", ["fp32", "bf16", "bf16 fp8", "q, k, v", "gate, up, down", "8 documents"])
def test_every_contender_is_called_rightly(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unsloth = _functions("W quant a b s", 0, ("LoRA_W", "swiglu_fg_kernel", "swiglu_DWf_DW_dfg_kernel"))
    axolotl = _functions("W bias quant a b s bias_of_b magnitude", 1, ("LoRA_O", "swiglu_forward", "swiglu_backward"))
    modules = {"unsloth.kernels.fast_lora": unsloth, "unsloth_zoo.temporary_patches": {}, "axolotl.kernels.lora": axolotl}
    stand_in(monkeypatch, modules)
    monkeypatch.setattr(lora_linear, "needs_gpu", lambda: None)
    case, inputs = given(variant)
    lacking = [contender.name for contender in lora_linear.BENCH.contenders(case) if contender.lacks]
    assert lacking == (["Unsloth", "axolotl"] if variant == "8 documents" else [])
    check_contenders(lora_linear, case, inputs)


def test_an_adapter_without_its_scale_is_wrong() -> None:
    case, inputs = given("bf16")

    def unscaled(x: torch.Tensor, weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + F.linear(F.linear(x, lora_a), lora_b)

    assert wrong(lora_linear, case, inputs, unscaled, ours=True)


def test_a_layer_with_another_s_adapter_is_wrong() -> None:
    case, inputs = given("gate, up, down")

    def exchanged(x: Tensor, weight: Tensor, down: Tensor, *parts: Tensor) -> Tensor:
        y = made(lora_linear, case)(x, weight, down, *parts[2:4], *parts[:2], *parts[4:])
        assert isinstance(y, Tensor)
        return y

    assert {"y", "dx", "dgate_a", "dup_b"} <= set(wrong(lora_linear, case, inputs, exchanged, ours=True))


def test_columns_are_one_output_and_get_their_part_of_its_gradient() -> None:
    case, inputs = given("q, k, v")
    eager = made(lora_linear, case, "eager")
    parts = eager(*inputs.tensors.values())
    assert isinstance(parts, Columns) and [part.shape[-1] for part in parts] == [32, 8, 8]
    grads = differentiate(parts, list(inputs.asked.values()), inputs.fresh_grads(), False)
    joined = torch.cat(eager(*inputs.tensors.values()), -1)  # type: ignore[arg-type]
    expected = torch.autograd.grad(joined, list(inputs.asked.values()), inputs.fresh_grads())
    assert all(torch.equal(got, want) for got, want in zip(grads, expected, strict=True))

    def in_another_order(*tensors: Tensor) -> Columns:
        q, k, v = eager(*tensors)
        return Columns((q, v, k))

    assert "y" in wrong(lora_linear, case, inputs, in_another_order)


def test_bytes() -> None:
    case = lora_linear.BENCH.case("gate, up, down", (4096, 4096, 14336), torch.bfloat16)
    rows, weights, adapters = 4096 * 4096 * 2, 3 * 4096 * 14336 * 2, 3 * 16 * (4096 + 14336) * 4
    assert case.forward_bytes == 2 * rows + weights + adapters
    assert case.backward_bytes == 3 * rows + weights + 2 * adapters


def test_unsloth_s_functions_are_imported_without_its_patches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = ("unsloth", "unsloth/kernels", "unsloth_zoo", "unsloth_zoo/temporary_patches")
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('patches')\n")
    (tmp_path / "unsloth_zoo" / "utils.py").write_text("known = 1\n")
    (tmp_path / "unsloth" / "kernels" / "fast_lora.py").write_text("from unsloth_zoo.utils import known\nLoRA_W = known\n")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("unsloth", "unsloth_zoo")]:
        monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as patched:
        patched.setattr(peers.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match="Unsloth needs unsloth, which is not installed"):
            peers.unsloth_lora()
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert peers.unsloth_lora().LoRA_W == 1
        assert peers.unsloth_lora() is sys.modules["unsloth.kernels.fast_lora"]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("unsloth", "unsloth_zoo")]:
            del sys.modules[name]
