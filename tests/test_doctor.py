"""Each known trap, sprung: its verdict, what it says to do, and the exit status."""

import dataclasses
import json
import os
import subprocess
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from onepass.doctor import diagnosis as doctor
from onepass.doctor import environment, report
from onepass.kernels import language as lang
from onepass.ops.activation import samples as activation_samples
from onepass.ops.activation.bias_activation import bias_activation_reference
from onepass.ops.attention import by_flash
from onepass.runtime import op as op_records
from onepass.runtime.samples import Sample

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _signatures():
    """An op keeps the signature of its function from the first call on: not that of a function that a test puts there."""
    for op in op_records.OPS.values():
        assert op._signature


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU, as far as the traps ask."""
    monkeypatch.setattr(doctor, "_gpus", lambda: [GPU])


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "_gpus", lambda: [])


def _triton(version):
    return types.SimpleNamespace(__version__=version)


def _only(trap, *args):
    (check,) = trap(*args)
    return check


def test_a_machine_where_all_is_well(monkeypatch, capsys):
    monkeypatch.delenv("ONEPASS_BACKEND", raising=False)
    status = doctor.run(types.SimpleNamespace(json=True))
    found = json.loads(capsys.readouterr().out)
    assert status == 0, found
    assert found["broken"] is False
    assert set(found["versions"]) == {"onepass", "python", "torch", "triton", "numpy", "cuda"}
    assert found["devices"][0]["device"] == "cpu"
    assert found["backends"]["bias_activation"]["cpu"]["torch"] is None
    tested = [check["name"] for check in found["checks"] if check["name"].startswith("self-test")]
    assert "self-test of bias_activation, torch on cpu" in tested
    assert lang.INTERPRETED is ("self-test of bias_activation, triton on cpu" in tested)


def test_what_is_broken_shows_in_the_exit_status(monkeypatch):
    monkeypatch.setattr(doctor, "OPS", {})
    monkeypatch.setattr(doctor, "_TRAPS", (lambda: [doctor.Check("a trap", doctor.WARNING, "found")],))
    assert doctor.run(types.SimpleNamespace(json=True)) == 0
    monkeypatch.setattr(doctor, "_TRAPS", (lambda: [doctor.Check("a trap", doctor.BROKEN, "found", "mend it")],))
    assert doctor.run(types.SimpleNamespace(json=True)) == 1


def test_as_people_read_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "OPS", {})
    broken = doctor.Check("a trap", doctor.BROKEN, "found [this]", "mend it")
    monkeypatch.setattr(doctor, "_TRAPS", (lambda: [broken],))
    assert doctor.run(types.SimpleNamespace(json=False, all=False)) == 1
    out = capsys.readouterr().out
    assert "found [this]" in out  # not taken for markup
    assert "do: mend it" in out
    assert "1 broken, 0 warnings" in out


def _diagnosis(*checks):
    reasons = {"triton": "x is on cpu", "torch": None}
    gpu = {"triton": None, "torch": None, "cudnn": None}
    backends = {"norm": {"cpu": reasons, "cuda:0": gpu}, "linear": {"cpu": {"triton": None, "torch": None}, "cuda:0": reasons}}
    devices = [{"device": "cpu", "name": "x86", "cores": 2}, {"device": "cuda:0", "name": "GPU [1]"}]
    return doctor.Diagnosis({"triton": "none"}, devices, backends, list(checks))


CHECKS = (
    *(doctor.Check(f"self-test of {op}, torch on cpu", doctor.OK, "0.80 of the allowed error") for op in ("norm", "linear")),
    doctor.Check("driver", doctor.OK, "570"),
    doctor.Check("self-test of norm, triton on cuda:0", doctor.BROKEN, "3.10 of the allowed error", "don't train with this"),
    doctor.Check("threads", doctor.WARNING, "too many", "set OMP_NUM_THREADS=1"),
)


def test_a_device_and_a_group_of_checks_are_one_line_and_failures_are_whole(monkeypatch, capsys):
    monkeypatch.setattr(lang, "INTERPRETED", False)
    monkeypatch.setenv("COLUMNS", "120")
    report.show(_diagnosis(*CHECKS), everything=False)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "triton none",
        "cpu     x86, cores 2: all 2 ops run as PyTorch's operators",
        "cuda:0  GPU [1]: kernels run 1 of 2 ops; as PyTorch's operators run linear; backends to name: cudnn (norm)",
        "",
        "ok       self-tests on cpu                    2 right, forward and backward against fp64",
        "ok       known problems                       none with driver",
        "broken   self-test of norm, triton on cuda:0  3.10 of the allowed error",
        "                                              do: don't train with this",
        "warning  threads                              too many",
        "                                              do: set OMP_NUM_THREADS=1",
        "",
        "1 broken, 1 warning; --all shows every check, and which backends each op can use",
    ]


def test_all_shows_every_check_and_backend_and_where_no_triton_kernel_runs(monkeypatch, capsys):
    monkeypatch.setattr(lang, "INTERPRETED", False)
    monkeypatch.setenv("COLUMNS", "120")
    report.show(_diagnosis(*CHECKS), everything=True)
    out = capsys.readouterr().out
    assert all(check.name in out for check in CHECKS) and "--all" not in out
    rows = [line.split(maxsplit=3) for line in out.splitlines()]
    assert ["norm", "cpu", "triton", "no: x is on cpu"] in [[word.strip() for word in row] for row in rows]
    (linear,) = (line for line in out.splitlines() if line.split()[:3] == ["linear", "cpu", "triton"])
    assert "no Triton kernel runs" in linear


@pytest.mark.usefixtures("gpu")
def test_triton_missing_on_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "triton", None)
    check = _only(doctor._triton_version)
    assert check.verdict == doctor.WARNING
    assert "pip install" in check.advice


@pytest.mark.usefixtures("no_gpu")
def test_triton_missing_on_a_cpu(monkeypatch):
    monkeypatch.setattr(doctor, "triton", None)
    assert _only(doctor._triton_version).verdict == doctor.OK
    assert not list(doctor._triton_cache())


@pytest.mark.parametrize(("device", "advised"), [("cpu", False), ("cuda", True)])
def test_triton_is_advised_where_it_could_run_only(device, advised, monkeypatch):
    monkeypatch.setattr(lang, "triton", None)
    with FakeTensorMode():
        reason = lang.triton_unsupported(torch.empty(4, device=device))
    assert ("pip install" in reason) is advised, reason


@pytest.mark.usefixtures("no_gpu")
def test_nothing_of_a_machine_without_a_gpu_is_advised_to_be_installed(monkeypatch):
    monkeypatch.setattr(lang, "triton", None)
    reasons = [reason for op in doctor._backends([torch.device("cpu")], []).values() for reason in op["cpu"].values() if reason]
    assert reasons and not [reason for reason in reasons if "install" in reason]


@pytest.mark.parametrize(
    ("version", "verdict"), [("3.4.0", "warning"), ("3.6.1", "ok"), ("3.60.0", "warning"), ("4.0.0", "warning")]
)
def test_triton_out_of_range(version, verdict, monkeypatch):
    monkeypatch.setattr(doctor, "triton", _triton(version))
    assert _only(doctor._triton_version).verdict == verdict


def test_interpreter_on_a_gpu_machine(monkeypatch, gpu):
    monkeypatch.setattr(lang, "INTERPRETED", True)
    check = _only(doctor._interpreter)
    assert check.verdict == doctor.BROKEN
    assert "unset TRITON_INTERPRET" in check.advice
    monkeypatch.setattr(lang, "INTERPRETED", False)
    assert not list(doctor._interpreter())


@pytest.mark.parametrize(
    ("numpy", "interpreted", "verdict"),
    [
        ("2.4.0", True, "warning"), ("2.4.0", False, "ok"), ("2.3.5", True, "ok"), ("3.0.0", True, "warning"),
        (None, True, "broken"), (None, False, "ok"),
    ],
)  # fmt: skip
def test_numpy_and_the_interpreter(numpy, interpreted, verdict, monkeypatch):
    monkeypatch.setattr(doctor, "triton", _triton("3.6.0"))
    monkeypatch.setattr(lang, "INTERPRETED", interpreted)
    monkeypatch.setattr(doctor, "version_of", lambda package: numpy)
    assert _only(doctor._numpy).verdict == verdict


@pytest.mark.parametrize(
    ("name", "gpus", "verdict"),
    [
        ("", 0, "ok"), ("auto", 1, "ok"), ("nope", 0, "broken"), ("nope", 1, "broken"),
        ("torch", 1, "warning"), ("torch", 0, "ok"), ("triton", 0, "broken"), ("triton", 1, "ok"),
    ],
)  # fmt: skip
def test_backend_from_the_environment(name, gpus, verdict, monkeypatch):
    monkeypatch.setenv("ONEPASS_BACKEND", name)
    monkeypatch.setattr(doctor, "_gpus", lambda: [GPU] * gpus)
    monkeypatch.setattr(lang, "INTERPRETED", False)
    assert _only(doctor._chosen_backend).verdict == verdict


@pytest.mark.parametrize(("capability", "verdict"), [((7, 5), "warning"), ((8, 0), "ok"), ((10, 0), "ok")])
def test_capability(capability, verdict, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check = _only(doctor._capability, GPU)
    assert check.verdict == verdict
    assert f"{capability[0]}.{capability[1]}" in check.found


def test_no_c_compiler(monkeypatch, gpu, tmp_path):
    monkeypatch.setattr(doctor, "triton", _triton("3.6.0"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _only(doctor._compiler).verdict == doctor.BROKEN
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    assert _only(doctor._compiler).verdict == doctor.OK
    monkeypatch.setenv("CC", "no-such-compiler")
    check = _only(doctor._compiler)
    assert check.verdict == doctor.BROKEN
    assert "no-such-compiler" in check.found


@pytest.mark.parametrize(("gpus", "verdict"), [(1, "broken"), (0, "warning")])
def test_cache_that_cannot_be_written(gpus, verdict, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "triton", _triton("3.6.0"))
    monkeypatch.setattr(doctor, "_gpus", lambda: [GPU] * gpus)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check = _only(doctor._triton_cache)
    assert check.verdict == verdict
    assert "TRITON_CACHE_DIR" in check.advice
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "there" / "yet"))
    assert _only(doctor._triton_cache).verdict == doctor.OK
    assert not (tmp_path / "not").exists()  # looking leaves nothing behind


def test_a_torch_that_sees_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _only(doctor._driver).verdict == doctor.WARNING


def test_addmm_without_out_dtype():
    check = _only(doctor._addmm, torch.device("cpu"))  # where it can't be done either
    assert check.verdict == doctor.WARNING
    assert "newer PyTorch" in check.advice


# ---- what turns fast paths off ----


@pytest.mark.parametrize("variable", environment._VARIABLES, ids=lambda variable: variable.name)
@pytest.mark.parametrize("gpus", (0, 1))
def test_a_variable_that_makes_programs_slower(variable, gpus, monkeypatch):
    for each in environment._VARIABLES:
        monkeypatch.delenv(each.name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert not list(environment._variables())
    monkeypatch.setenv(variable.name, "1" if variable.value == "0" else "0")
    assert not list(environment._variables())
    monkeypatch.setenv(variable.name, variable.value)
    if gpus or not variable.on_gpu:
        check = _only(environment._variables)
        assert check.verdict == doctor.WARNING and check.found.startswith(f"{variable.name}={variable.value} is set")
        assert f"unset {variable.name}" in check.advice
    else:
        assert not list(environment._variables())


@pytest.mark.parametrize(
    ("gpus", "threads", "cores", "warns"), [(0, 1, 8, True), (0, 2, 8, False), (0, 1, 1, False), (1, 1, 8, False)]
)
def test_one_thread_of_many(gpus, threads, cores, warns, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(environment, "slow_threads", lambda: None)
    checks = list(environment._threads())
    assert bool(checks) is warns
    assert not warns or f"set OMP_NUM_THREADS={cores}" in checks[0].advice


@pytest.mark.parametrize("gpus", (0, 1))
def test_threads_that_wait_for_each_other(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(environment, "slow_threads", lambda: ("the machine is busy", "set OMP_NUM_THREADS=1"))
    found = [(check.verdict, check.found, check.advice) for check in environment._threads()]
    assert found == [(doctor.WARNING, "the machine is busy", "set OMP_NUM_THREADS=1")] * (not gpus)


@pytest.mark.parametrize("taken", (True, False))
def test_kernels_that_transformers_refuses(taken, monkeypatch):
    utils = pytest.importorskip("transformers.utils.import_utils")
    monkeypatch.setattr(environment, "version_of", {"kernels": "0.1.0", "transformers": "5.24.0"}.get)
    monkeypatch.setattr(utils, "is_kernels_available", lambda: taken)
    monkeypatch.setattr(utils, "KERNELS_MIN_VERSION", "0.18.2", raising=False)
    monkeypatch.setattr(utils, "KERNELS_MAX_VERSION", "0.19.0", raising=False)
    check = _only(environment._kernels_of_the_hub)
    assert check.verdict == (doctor.OK if taken else doctor.WARNING) and "kernels 0.1.0" in check.found
    assert taken or "pip install 'kernels>=0.18.2,<0.19.0'" in check.advice


@pytest.mark.parametrize("missing", ("kernels", "transformers"))
def test_without_kernels_there_is_nothing_to_say(missing, monkeypatch):
    monkeypatch.setattr(environment, "version_of", lambda package: None if package == missing else "5.24.0")
    assert not list(environment._kernels_of_the_hub())


@pytest.mark.parametrize("drops", (True, False))
def test_a_softcap_that_sdpa_drops(drops, monkeypatch):
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    monkeypatch.setattr(gemma.Gemma2PreTrainedModel, "_supports_sdpa", drops)
    checks = list(environment._softcap_by_sdpa())
    assert bool(checks) is drops
    assert not drops or "attn_implementation='eager'" in checks[0].advice
    monkeypatch.setattr(environment, "version_of", lambda package: "4.57.1")
    assert not list(environment._softcap_by_sdpa())


@pytest.mark.parametrize(
    ("capability", "installed", "warns"), [((9, 0), False, True), ((9, 0), True, False), ((8, 0), False, False)]
)
def test_a_flash_attention_that_is_missing(capability, installed, warns, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = (None, None) if installed else f"flash-attn-4 is not installed ({by_flash.INSTALL})"
    monkeypatch.setattr(environment, "flash_functions", lambda: found)
    checks = list(environment._flash_attention(GPU))
    assert bool(checks) is warns
    if warns:
        assert checks[0].found.startswith("flash-attn-4 is not installed: attention")
        assert checks[0].advice == by_flash.INSTALL


def test_all_of_these_are_asked():
    assert set(environment.SLOWERS) < set(doctor._TRAPS) and set(environment.GPU_SLOWERS) < set(doctor._GPU_TRAPS)


# ---- huggingface.apply ----


@pytest.mark.parametrize(("version", "verdict"), [(None, "ok"), ("4.57.1", "warning")])
def test_where_apply_has_nothing_to_see(version, verdict, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda package: version)
    check = _only(doctor._huggingface_apply)
    assert check.verdict == verdict
    assert (version or "transformers is not installed") in check.found


@pytest.fixture
def huggingface():
    return pytest.importorskip("onepass.integrations.huggingface") if pytest.importorskip("transformers") else None


def test_apply_sees_the_parts_of_tiny_models(huggingface):
    checks = list(doctor._huggingface_apply())
    assert [check.verdict for check in checks] == [doctor.OK] * 2, checks
    assert "norm, mlp, rope, qkv, loss" in checks[0].found


def test_a_part_that_apply_does_not_see_is_named(huggingface, monkeypatch):
    parts = (*doctor._FAMILIES["llama"].parts, "window")
    monkeypatch.setitem(doctor._FAMILIES, "llama", dataclasses.replace(doctor._FAMILIES["llama"], parts=parts))
    check = _only(doctor._applied, "apply", "llama")
    assert check.verdict == doctor.WARNING and check.found.endswith("left: window: not recognised")


def test_an_apply_that_changes_numbers_is_found(huggingface, monkeypatch):
    stock = huggingface.apply

    def off(model):
        model.model.norm.weight.data.mul_(1.01)
        return stock(model)

    monkeypatch.setattr(huggingface, "apply", off)
    check = _only(doctor._applied, "apply", "llama")
    assert check.verdict == doctor.BROKEN and check.found.startswith("gradients differ by")


def test_an_apply_that_notices_no_change_is_found(huggingface, monkeypatch):
    monkeypatch.setattr(huggingface.applied.AppliedRow, "now", lambda row, model: row)
    check = _only(doctor._applied, "apply", "llama")
    assert check.verdict == doctor.BROKEN and check.found.startswith("a norm that was replaced is not noticed")


def test_an_apply_that_raises_is_broken(huggingface, monkeypatch):
    monkeypatch.setattr(huggingface, "apply", lambda model: 1 / 0)
    assert {check.verdict for check in doctor._huggingface_apply()} == {doctor.BROKEN}


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_wrong_numbers_are_found(factor, monkeypatch):
    def wrong(*tensors, backend, **options):
        return bias_activation_reference(*tensors, **options) * factor

    monkeypatch.setattr(op_records.OPS["bias_activation"], "function", wrong)
    check = _only(doctor._self_test, "bias_activation", torch.device("cpu"), "torch")
    assert check.verdict == doctor.BROKEN
    assert "don't train with this" in check.advice


def test_a_self_test_that_raises_is_reported(monkeypatch):
    def raising(*args, **kwargs):
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(op_records.OPS["bias_activation"], "function", raising)
    check = next(check for check in doctor.diagnose().checks if check.name == "self-test of bias_activation, torch on cpu")
    assert (check.verdict, check.found) == (doctor.BROKEN, "RuntimeError: no kernel image")


def test_an_op_that_loses_the_gpu_ends_the_self_tests_of_it(monkeypatch):
    """All others would fail too, by an error that says nothing of them."""
    tried = []

    def self_test(op, device, name):
        tried.append((op, name))
        if op == "attention":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        yield doctor.Check(f"self-test of {op}, {name} on {device}", doctor.OK, "fine")

    monkeypatch.setattr(doctor, "_self_test", self_test)
    monkeypatch.setattr(doctor, "is_lost", lambda device: ("attention", "triton") in tried)
    checks = []
    doctor._test_ops(torch.device("cuda", 0), checks)
    *_, lost, others = checks
    assert tried == [("activation_linear", "triton"), ("activation_linear", "torch"), ("attention", "triton")]
    assert lost.name == "self-test of attention, triton on cuda:0" and "illegal memory access" in lost.found
    assert others.verdict == doctor.BROKEN and f"{2 * len(op_records.OPS) - 3} self-tests" in others.found


def test_every_sample_is_tested(monkeypatch):
    """An op nobody has thought of, with a tensor that has no gradient."""

    def pick(x: torch.Tensor, index: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
        return x[index]

    def sample(device, dtype):
        return torch.randn(7, 5, device=device, dtype=dtype), torch.tensor([3, 1], device=device)

    monkeypatch.setitem(op_records.OPS, "pick", None)  # taken away again after the test
    op_records.define_op(
        pick, check=lambda c: None, unsupported=lambda c: "no kernel", variant=lambda c: "", sharding=lambda c: None,
        samples_module="pick_samples",
    )
    samples = types.SimpleNamespace(SAMPLES={"pick": Sample(sample, lambda x, index: x[index])})
    monkeypatch.setitem(sys.modules, "pick_samples", samples)
    found = doctor.diagnose()
    verdicts = {check.name: check.verdict for check in found.checks}
    assert verdicts["self-test of pick, torch on cpu"] == doctor.OK
    assert "self-test of pick, triton on cpu" not in verdicts
    assert found.backends["pick"]["cpu"] == {"triton": "no kernel", "torch": None}


@pytest.mark.parametrize("as_json", [True, False])
def test_a_gpu_that_answers_nothing_hides_nothing_else(as_json, monkeypatch, gpu, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with ...")

    def tensors(device, dtype, of=activation_samples.SAMPLES["bias_activation"].tensors):
        return broken() if device == GPU else of(device, dtype)

    sample = dataclasses.replace(activation_samples.SAMPLES["bias_activation"], tensors=tensors)
    monkeypatch.setitem(activation_samples.SAMPLES, "bias_activation", sample)
    for name in ("cuda.get_device_properties", "cuda.get_device_capability", "zeros"):
        monkeypatch.setattr(f"torch.{name}", broken)
    monkeypatch.setenv("COLUMNS", "300")  # so that no sentence is broken over lines
    monkeypatch.setenv("COLUMNS", "300")
    assert doctor.run(types.SimpleNamespace(json=as_json, all=False)) == 1
    out = capsys.readouterr().out
    assert "no kernel image" in out
    assert "Compile with" not in out
    assert "it does not answer" in out
    assert as_json or "it does not answer: no op runs" in out
    if as_json:
        found = json.loads(out)
        assert found["devices"][1] == {"device": "cuda:0", "name": "it does not answer"}
        assert found["backends"]["bias_activation"] == {"cpu": found["backends"]["bias_activation"]["cpu"], "cuda:0": {}}
        verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
        assert verdicts["self-test of bias_activation, torch on cpu"] == doctor.OK
        on_gpu = {name for name in verdicts if name.endswith("cuda:0")}
        assert {verdicts[name] for name in on_gpu} == {doctor.BROKEN}
        names = ("properties of", "capability of", "addmm of", "triton for bias_activation on", "torch for bias_activation on")
        assert {f"{name} cuda:0" for name in names} <= on_gpu


def test_a_machine_whose_gpus_cannot_be_counted(monkeypatch):
    monkeypatch.setattr(doctor, "OPS", {})
    def broken():
        raise RuntimeError("NVML: driver/library version mismatch")

    monkeypatch.setattr(doctor, "_gpus", broken)
    found = doctor.diagnose()
    check = found.checks[0]
    assert (check.name, check.verdict) == ("GPUs", doctor.BROKEN)
    assert check.found == "RuntimeError: NVML: driver/library version mismatch"
    assert [device["device"] for device in found.devices] == ["cpu"]


def test_another_packages_backend_is_shown(monkeypatch):
    op = op_records.OPS["bias_activation"]
    monkeypatch.setattr(
        op, "others", {"theirs": op_records.Backend(lambda *args: None, lambda *args, **more: "it has no swiglu")}
    )
    assert doctor._backends([torch.device("cpu")], [])["bias_activation"]["cpu"]["theirs"] == "it has no swiglu"


def test_every_op_has_a_sample_call():
    for name, op in op_records.OPS.items():
        assert name in op.samples.SAMPLES


def test_as_a_command():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"ONEPASS_BACKEND": "nope"}
    done = subprocess.run([sys.executable, "-m", "onepass.cli", "doctor"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr
    assert "ONEPASS_BACKEND" in done.stdout
