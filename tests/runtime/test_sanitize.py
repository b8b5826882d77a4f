"""What compute-sanitizer says is read right, and its absence is said in a line."""

import subprocess

import pytest
import torch

from onepass.testing import sanitize
from onepass.testing.sanitize import Violation, parse, sort_findings, table

OURS = frozenset({"_short_kernel", "_rows_kernel", "_softmax_kernel"})

MEMCHECK = """\
========= COMPUTE-SANITIZER
onepass call: rms_norm float32
onepass call: rms_norm bfloat16
========= Invalid __global__ write of size 4 bytes
=========     at _short_kernel+0x4f0 in forward.py:120
=========     by thread (5,0,0) in block (36,0,0)
=========     Access at 0x7f1e5fc00294 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1e5fc00200 of size 148 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x38b1f7] in libcuda.so.1
=========         Host Frame: launch in __triton_launcher.so
========= 
onepass call: softmax float32
========= Program hit cudaErrorInvalidValue (error 1) due to "invalid argument" on CUDA API call to cudaFuncGetAttributes.
=========     Saved host backtrace up to driver entry point at error
========= 
========= Invalid __shared__ read of size 16 bytes
=========     at void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(T3)+0x80
=========     by thread (0,0,0) in block (0,0,0)
========= ERROR SUMMARY: 2 errors
"""

RACECHECK = """\
========= COMPUTE-SANITIZER
onepass call: norm_linear bfloat16
========= Error: Race reported between Write access at nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT+0x1f30
=========     and Read access at nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT+0x2b40 [3 hazards]
========= 
========= Warning: Potential RAW hazard detected at __shared__ 0x10 in block (1, 0, 0) :
=========     Write Thread (0, 0, 0) at _rows_kernel+0x240 in backward.py:77
=========     Read Thread (32, 0, 0) at _rows_kernel+0x310 in backward.py:81
=========     Current Value : 0
========= 
========= Error: Race reported between Write access at _softmax_kernel+0x90 in kernels.py:10
=========     and Write access at _softmax_kernel+0xf0 in kernels.py:12 [64 hazards]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warnings)
"""

INITCHECK = """\
========= COMPUTE-SANITIZER
onepass call: adamw
========= Uninitialized __global__ memory read of size 4 bytes
=========     at _short_kernel+0x120 in forward.py:88
=========     by thread (1,0,0) in block (0,0,0)
========= Uninitialized __global__ memory read of size 2 bytes
=========     at nvjet_hsh_128x64+0x70
=========     by thread (2,0,0) in block (0,0,0)
========= 
========= Host API uninitialized memory access reported by initcheck on access by cudaMemcpyAsync source
=========     Access size 8 bytes
========= ERROR SUMMARY: 3 errors
"""

SYNCCHECK = """\
========= COMPUTE-SANITIZER
onepass call: attention bfloat16
========= Barrier error detected. Divergent thread(s) in warp
=========     at _rows_kernel+0x1d0 in backward.py:92
=========     by thread (31,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""

CLEAN = """\
========= COMPUTE-SANITIZER
onepass call: softmax float32
========= ERROR SUMMARY: 0 errors
"""


def test_a_memory_error_has_its_kernel_and_call():
    report = sort_findings("memcheck", MEMCHECK.splitlines(), OURS)
    assert report.calls == 3
    assert report.findings == [Violation("Invalid __global__ write of size 4 bytes", "_short_kernel", "rms_norm bfloat16")]
    ((foreign, count),) = report.others.items()
    assert "reduce_kernel" in foreign and count == 1


def test_races_of_other_kernels_are_left_out():
    report = sort_findings("racecheck", RACECHECK.splitlines(), OURS)
    assert [finding.kernel for finding in report.findings] == ["_rows_kernel", "_softmax_kernel"]
    assert report.others == {"nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT, which is not ours": 1}
    assert all(finding.call == "norm_linear bfloat16" for finding in report.findings)


def test_a_report_that_names_no_kernel_counts():
    report = sort_findings("initcheck", INITCHECK.splitlines(), OURS)
    assert [finding.kernel for finding in report.findings] == ["_short_kernel", ""]
    assert "cudaMemcpyAsync" in report.findings[1].what
    assert report.others == {"nvjet_hsh_128x64, which is not ours": 1}


def test_what_is_allowed_is_counted_and_named(monkeypatch):
    monkeypatch.setitem(sanitize.ALLOWED, ("initcheck", "_short_kernel"), "reads padding")
    report = sort_findings("initcheck", INITCHECK.splitlines(), OURS)
    assert [finding.kernel for finding in report.findings] == [""]
    assert report.others["_short_kernel, which reads padding"] == 1
    assert "_short_kernel" in {f.kernel for f in sort_findings("memcheck", INITCHECK.splitlines(), OURS).findings}


def test_what_is_allowed_is_a_kernel_of_ours():
    assert {tool for tool, _ in sanitize.ALLOWED} <= set(sanitize.TOOLS)
    assert {kernel for _, kernel in sanitize.ALLOWED} <= sanitize.our_kernels()


def test_a_wrong_barrier_is_a_finding():
    (finding,) = parse(SYNCCHECK.splitlines())
    assert finding == Violation("Barrier error detected. Divergent thread(s) in warp", "_rows_kernel", "attention bfloat16")


def test_a_clean_run_is_clean_and_a_table_tells_all():
    clean = sort_findings("memcheck", CLEAN.splitlines(), OURS)
    assert clean.clean and clean.calls == 1
    raced = sort_findings("racecheck", (RACECHECK + RACECHECK).splitlines(), OURS)
    assert not raced.clean
    lines = list(table([clean, raced]))
    assert lines[1].split() == ["memcheck", "1", "0", "0", "0"]
    assert lines[2].split() == ["racecheck", "2", "4", "2", "0"]
    assert any("_softmax_kernel" in line and "(2 times)" in line for line in lines)
    assert any("left out 2 of nvjet" in line for line in lines)


@pytest.mark.parametrize(("status", "expected"), ((0, 0), (1, 1)))
def test_the_exit_status_and_what_each_tool_is_run_with(monkeypatch, capsys, status, expected):
    seen = []

    def run(command, env, **options):
        seen.append((command, env))
        raced = status and "racecheck" in command
        return subprocess.CompletedProcess(command, 0, RACECHECK if raced else CLEAN)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize.shutil, "which", lambda *args, **options: "compute-sanitizer")
    monkeypatch.setattr(sanitize.subprocess, "run", run)
    monkeypatch.setattr(sanitize, "our_kernels", lambda: OURS)
    assert sanitize.main([]) == expected
    assert "compute-sanitizer" not in seen[0][0]  # compiles, and must not end with what a tool would find
    assert [command[2] for command, _ in seen[1:]] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert all(env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" for _, env in seen)
    assert capsys.readouterr().out.count("\n") >= 5


def test_a_program_that_ends_badly_is_no_clean_run(monkeypatch):
    ended = subprocess.CompletedProcess([], 139, CLEAN + "Segmentation fault\n")
    monkeypatch.setattr(sanitize.subprocess, "run", lambda *args, **options: ended)
    report = sanitize._run_tool("memcheck", "compute-sanitizer", "")
    assert not report.clean
    assert report.failure == "exit status 139: Segmentation fault"


def test_without_a_gpu_or_a_sanitizer_it_says_so_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sanitize.shutil, "which", lambda *args, **options: None)
    for gpu, words in ((False, "there is no GPU"), (True, "compute-sanitizer is not on the PATH")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert sanitize.main([]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


def test_the_calls_run_and_are_announced(capsys):
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sanitize.run_calls(device, "rope")
    announced = [f"onepass call: {name} {dtype}" for name in ("rope", "rope: normed") for dtype in ("fp32", "bf16")]
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(announced)


def test_the_calls_launch_every_kernel(monkeypatch):
    pytest.importorskip("triton")
    from onepass.testing import aot

    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)  # no kernel runs, and experts' rows have an order
    with aot._recording(90) as launched:
        sanitize.run_calls(torch.device("cpu"))
    names = {bound.kernel.jit.fn.__name__ for bound, _ in launched}
    assert names == sanitize.our_kernels()
