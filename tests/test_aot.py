"""The ahead-of-time check: it finds every kernel, compiles for a GPU that is not here, and fails where it should."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from onepass.ops.activation import bias_activation as module
from onepass.ops.activation import kernels
from onepass.ops.activation.activations import _BUILT_IN
from onepass.runtime.op import OPS
from onepass.testing import aot


def test_compiles_in_a_process_of_its_own(tmp_path):
    """With TRITON_INTERPRET set, as our own tests have it: it must get rid of it."""
    options = ["--arch", "90", "--only", "relu 16384x16384 bf16", "--json", str(tmp_path / "figures.json")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    argv = [sys.executable, "-m", "onepass.testing.aot", *options]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 spill or fail" in done.stdout
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert {row["kernel"] for row in rows} == {"activation.kernels forward", "activation.kernels backward"}
    assert {row["call"] for row in rows} == {"relu 16384x16384", "squared_relu 16384x16384"}
    assert all(0 < row["registers"] <= 255 and row["arch"] == 90 and not row["spills"] for row in rows)


def test_tokens_are_ordered_without_an_exchange_of_layouts(tmp_path):
    """Which dimension Triton gives to a warp changed in 3.7: the wrong one takes 8 KiB, and twice the time."""
    options = ["--arch", "90", "--only", "embedding 16384x2048 bf16", "--json", str(tmp_path / "figures.json")]
    subprocess.run([sys.executable, "-m", "onepass.testing.aot", *options], check=True, capture_output=True)
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert [row["shared"] for row in rows if row["kernel"] == "embedding.forward embedding"] == [256]


WRONG = """
        /*35f0*/                   UIADD3 UR4, UP0, UR7, 0x20, URZ ;
        /*3600*/                   UIADD3.X UR5, UR7, -0x3ffffff0, URZ, UP0, !UPT ;
"""


@pytest.mark.parametrize(
    "right",
    (WRONG.replace(".X UR5, UR7", ".X UR5, UR8"), WRONG.replace(", URZ ;", ", URZ ;\n /*35f8*/ UIMAD.WIDE UR6, UR1, UR2, UR3 ;")),
)
def test_an_address_of_one_register_is_a_failure(right):
    with pytest.raises(RuntimeError, match="UR7 is both halves of an address"):
        aot._check_addresses(WRONG)
    aot._check_addresses(right)


@pytest.mark.parametrize(("arch", "ptx", "told"), [(90, "wgmma.mma_async", True), (90, "mma.sync", False), (100, "wgmma", False)])
def test_what_the_compiler_gets_wrong_is_told(arch, ptx, told, monkeypatch):
    said = {"cuobjdump": "Function k:\n REG:40 STACK:0 SHARED:0", "nvdisasm": WRONG}
    monkeypatch.setattr(aot, "_read_cubin", lambda _, tool, *options: said[tool])
    compiled = SimpleNamespace(asm={"ptx": ptx}, metadata=SimpleNamespace(shared=8))
    monkeypatch.setattr(aot, "_binary", lambda *_: compiled)
    row = aot._compile(aot.launches("latent_attention 5x32/16")[0], arch)
    assert ("both halves" in row.failure) is told and row.fine is not told


def test_nothing_chosen_is_a_failure():
    assert aot.main(["--only", "no such call"]) == 1


def test_calls_are_of_every_activation_and_type():
    """That they launch every kernel is what the check itself says, which CI runs: it would take half a minute here."""
    calls = [call for op in OPS.values() for call in op.samples.covering_calls()]
    assert {call.label.split()[0] for call in calls} >= _BUILT_IN
    assert {call.dtype for call in calls} == {torch.bfloat16, torch.float16, torch.float32}


def test_a_kernel_that_no_call_launches_is_told():
    missing = aot.uncovered([each for each in aot.launches("relu 16384x16384") if each.name != "activation.kernels backward"])
    assert "kernel _backward_kernel" in missing
    assert "kernel _forward_kernel" not in missing


def test_launches_are_those_of_the_call():
    forward, backward, column_sum = aot.launches("swiglu 16384x16384 token_weight")
    assert forward.kernel is kernels._forward_kernel
    assert backward.kernel is kernels._backward_kernel
    names = dict(zip(forward.kernel.jit.arg_names, forward.args, strict=True))
    assert (names["x_ptr"], names["weight_ptr"], names["codes_ptr"]) == (torch.bfloat16, torch.float32, None)
    assert (names["M"], names["H"], names["X_ROW"]) == (16384, 16384, 32768)
    assert column_sum.name == "kernels.column_reduce column_sum"


def test_kernels_that_triton_would_not_compile_twice_are_listed_once():
    (first, *_), (second, *_) = aot.launches("gelu 16384x16384 bf16"), aot.launches("gelu 16384x14336 bf16")
    assert first.key == second.key  # another width, but both divisible by 16
    assert first.key != aot.launches("gelu 777x5000 bf16")[0].key
    assert first.key != aot.launches("gelu 16384x16384 fp16")[0].key


def test_tiles_are_those_of_the_architecture():
    hopper, ampere = (aot.launches("layer_norm 2048x12288 bf16", arch) for arch in (90, 80))
    assert [each.name for each in hopper] == [each.name for each in ampere]
    assert {each.key for each in hopper} - {each.key for each in ampere}  # fewer rows on their way


def test_in_turn_each_value_is_for_one_architecture_and_each_kernel_for_all():
    every, some = (aot._tasks(aot.ARCHS, "swiglu", in_turn) for in_turn in (False, True))
    planned = {arch: aot._planned("swiglu", arch) for arch in aot.ARCHS}
    assert set(some) < set(every) and len(some) < len(every) / 3
    assert {(planned[arch][i].kernel, arch) for i, arch in some} == {(planned[arch][i].kernel, arch) for i, arch in every}
    covered, wanted = (set().union(*(planned[arch][i].values for i, arch in tasks)) for tasks in (some, every))
    assert covered == wanted
    counted = [sum(each == arch for _, each in some) for arch in aot.ARCHS]
    assert max(counted) < 2 * min(counted)


def test_in_turn_what_is_known_to_spill_is_compiled():
    _, call, _ = next(iter(aot.ALLOWED_SPILLS))
    tasks = aot._tasks(aot.ARCHS, call, True)
    compiled = {(launched.name, launched.call.label, arch) for i, arch in tasks for launched in [aot._planned(call, arch)[i]]}
    assert {known for known in aot.ALLOWED_SPILLS if known[1] == call} <= compiled


def test_architectures_that_launch_alike():
    """What is planned for one is planned for the other."""
    assert max(call.least_arch for op in OPS.values() for call in op.samples.covering_calls()) <= min(aot._LIKE.values())
    for arch, like in aot._LIKE.items():
        assert aot._SHARED[arch] == aot._SHARED[like]


def test_each_kernel_is_compiled_once_for_each_architecture():
    planned = {arch: aot._planned("swiglu 16384x16384", arch) for arch in aot.ARCHS}
    found = [(planned[arch][i].kernel, arch) for i, arch in aot._tasks(aot.ARCHS, "swiglu 16384x16384", False, True)]
    every = {(launched.kernel, arch) for arch in aot.ARCHS for launched in planned[arch]}
    assert len(found) == len(every) and set(found) == every


def test_recording_leaves_no_trace():
    aot.launches("relu 16384x16384")
    x = torch.randn(3, 8)
    torch.testing.assert_close(module.bias_activation(x, None, "relu"), x.relu())
    with pytest.raises(RuntimeError, match="take this call"):
        module.bias_activation(x.to("meta"), backend="triton")


def test_known_spills_are_allowed_where_they_are_known():
    (kernel, call, arch), spills = next(iter(aot.ALLOWED_SPILLS.items()))
    assert aot.Compiled(kernel, call, "bf16", arch, spills=spills).fine
    assert not aot.Compiled(kernel, call, "bf16", arch, spills=spills + 1).fine
    assert not aot.Compiled(kernel, call, "bf16", arch - 10, spills=1).fine
    assert not aot.Compiled(kernel, call, "bf16", arch, spills=spills, failure="no").fine
    of_attention = "attention.backward dq", "attention 8/4x128 softcap window", "bf16"
    assert aot.Compiled(*of_attention, 80, spills=187).fine and not aot.Compiled(*of_attention, 80, spills=188).fine
    assert not aot.Compiled("norm.backward rows", "rms_norm window", "bf16", 80, spills=1).fine


@pytest.mark.parametrize(
    ("stack", "code", "spills"),
    [(0, "STL [R1]", 0), (16, "STL [R1]; LDL R2; LDG R3", 2), (16, "", 16)],
    ids=["none", "read", "unread"],
)
def test_spills_are_counted_in_the_code_of_what_has_a_stack(stack, code, spills, monkeypatch):
    said = {"cuobjdump": f"Function k:\n REG:40 STACK:{stack} SHARED:0", "nvdisasm": code}
    monkeypatch.setattr(aot, "_read_cubin", lambda _, tool, *options: said[tool])
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=8))
    assert aot._usage(compiled) == (40, 8, spills)


@pytest.mark.parametrize(
    ("spills", "failure", "status"), [(0, "", 0), (2, "", 1), (0, "CompilationError: no", 1)], ids=["fine", "spills", "fails"]
)
def test_exit_status(spills, failure, status, monkeypatch, capsys):
    def compiled(archs, only, jobs, in_turn, each_kernel):
        return [aot.Compiled("kernel", "call", "bf16", arch, 32, 0, spills, failure) for arch in archs]

    monkeypatch.setattr(aot, "compile_all", compiled)
    assert aot.main(["--only", "relu 16384x16384"]) == status
    out = capsys.readouterr().out
    assert failure in out
    assert "3 binaries" in out


def test_an_uncovered_kernel_fails_the_whole_check(monkeypatch, capsys):
    monkeypatch.setattr(aot, "launches", lambda *_: [])
    monkeypatch.setattr(
        aot, "compile_all", lambda archs, only, jobs, in_turn, each_kernel: [aot.Compiled("kernel", "call", "bf16", 90, 32)]
    )
    monkeypatch.setattr(aot, "uncovered", lambda found: ["kernel _forgotten"])
    assert aot.main(["--arch", "90"]) == 1
    assert "_forgotten" in capsys.readouterr().out
