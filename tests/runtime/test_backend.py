"""Who runs a call: the argument, then use_backend, then ONEPASS_BACKEND, then auto; what explain says; what others register."""

import logging
import os
import subprocess
import sys

import pytest
import torch

import onepass
from onepass.kernels.language import triton
from onepass.runtime import backend as runtime_backend
from onepass.runtime import op as runtime_op

needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
x, bias = torch.ones(2, 6, device=DEVICE), torch.ones(6, device=DEVICE)


def chosen(*args, **options):
    return onepass.explain(onepass.bias_activation, *(args or (x, bias)), **options).backend


@pytest.fixture
def others():
    """A backend of somebody else's, taken away afterwards."""
    calls = []

    def run(t, bias=None, activation="gelu", **options):
        calls.append(options)
        return t + 100

    def unsupported(t, *args, **options):
        return "only rows of six" if t.shape[-1] != 6 else None

    onepass.register_backend("bias_activation", "theirs", run, unsupported)
    yield calls
    del runtime_op.OPS["bias_activation"].others["theirs"]


@needs_triton
def test_auto_takes_triton_where_it_can():
    assert chosen() == "triton" and chosen(x.double(), bias.double()) == "torch"
    assert chosen(backend="auto") == "triton"


@needs_triton
def test_the_order_of_authority():
    with onepass.use_backend("torch"):
        assert chosen() == "torch" and chosen(backend="triton") == "triton"
        with onepass.use_backend("triton"):
            assert chosen() == "triton"
        assert chosen() == "torch"
        assert chosen(backend="auto") == "triton"
    assert chosen() == "triton"


@needs_triton
def test_use_backend_without_a_block_holds_until_changed():
    onepass.use_backend("torch")
    assert chosen() == "torch"
    onepass.use_backend("auto")
    assert chosen() == "triton"


def test_use_backend_comes_back_after_an_error():
    with pytest.raises(KeyError), onepass.use_backend("torch"):
        raise KeyError
    assert onepass.explain("bias_activation", x).why != "chosen by use_backend"


@pytest.mark.parametrize(
    ("given", "expected"), [("torch", "torch"), ("", "triton"), ("cuda", "ONEPASS_BACKEND must be one of auto, triton")]
)
@needs_triton
def test_the_environment(given, expected):
    code = (
        "import torch, onepass\n"
        "try: print(onepass.explain('bias_activation', torch.ones(2, 2)))\n"
        "except ValueError as error: print(error)"
    )
    interpret = {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}
    code = code if DEVICE == "cpu" else code.replace("torch.ones(2, 2)", "torch.ones(2, 2, device='cuda')")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **interpret, "ONEPASS_BACKEND": given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert expected in done.stdout and (given != "torch" or "chosen by ONEPASS_BACKEND" in done.stdout)


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"use_backend's name must be one of auto, triton, torch.* but is 'cuda'"):
        onepass.use_backend("cuda")
    with pytest.raises(ValueError, match=r"backend must be one of auto, triton, torch.* but is 'cuda'"):
        onepass.bias_activation(x, backend="cuda")
    with pytest.raises(ValueError, match=r"op must be one of activation_linear, attention.* but is 'bias_sigmoid'"):
        onepass.explain("bias_sigmoid", x)


def test_explain_runs_nothing_and_says_why():
    wrong = onepass.explain(onepass.bias_activation, x.double(), bias.double(), "swiglu")
    assert wrong.backend == "torch" and "float64" in wrong.why and "float64" in wrong.reasons["triton"]
    assert wrong.reasons["torch"] is None and "PyTorch formula" in str(wrong)
    assert "the backend argument" in onepass.explain("bias_activation", x, backend="torch").why


@needs_triton
def test_explain_names_the_kernel_and_its_tiles():
    said = onepass.explain(onepass.bias_swiglu, torch.ones(64, 512, device=DEVICE), save="fp8")
    assert said.backend == "triton" and said.reasons == {"triton": None, "torch": None}
    assert all(word in said.variant for word in ("forward", "backward", "strips", "programs", "fp8")) and "auto" in said.why


def test_a_registered_backend_gets_the_call(others):
    y = onepass.bias_activation(x, bias, "relu", backend="theirs", save="fp8")
    assert torch.equal(y, x + 100) and others[0]["save"] == "fp8"
    assert chosen(backend="theirs") == "theirs" and onepass.explain("bias_activation", x).backend != "theirs"
    with onepass.use_backend("theirs"):
        assert torch.equal(onepass.bias_activation(x), x + 100)
    with pytest.raises(RuntimeError, match="backend 'theirs' can't take this call of bias_activation: only rows of six"):
        onepass.bias_activation(x[:, :4], backend="theirs")
    assert "theirs no: only rows of six" in str(onepass.explain("bias_activation", x[:, :4]))


def test_a_backend_registered_for_another_op_only(others, monkeypatch):
    other = runtime_op.Op(
        "other", test_explain_runs_nothing_and_says_why, lambda *_: None, lambda *_: None, lambda *_: "", None, None, ""
    )
    monkeypatch.setitem(runtime_op.OPS, "other", other)
    with (
        onepass.use_backend("theirs"),
        pytest.raises(RuntimeError, match="backend 'theirs' is not registered for other, which has triton"),
    ):
        runtime_backend.choose("other", None, None)


@pytest.mark.parametrize("name", ["triton", "torch", "auto"])
def test_native_names_are_taken(name):
    with pytest.raises(ValueError, match=f"name must not be one of triton, torch or auto, but is '{name}'"):
        onepass.register_backend("bias_activation", name, lambda x: x)
    with pytest.raises(ValueError, match="op must be one of"):
        onepass.register_backend("nothing", "theirs", lambda x: x)


def test_falling_back_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(runtime_backend, "_said", set())
    with caplog.at_level(logging.INFO, "onepass"):
        for _ in range(3):
            onepass.bias_activation(x.double())
    assert [record.getMessage() for record in caplog.records if "float64" in record.getMessage()] == [
        "bias_activation runs as plain PyTorch: x is torch.float64"
    ]


def test_validate_is_a_block_and_a_switch():
    assert not onepass.runtime.process_setting.validating()
    with onepass.validate():
        assert onepass.runtime.process_setting.validating()
        with onepass.validate(False):
            assert not onepass.runtime.process_setting.validating()
        assert onepass.runtime.process_setting.validating()
    onepass.validate()
    assert onepass.runtime.process_setting.validating()
    onepass.validate(False)
    with pytest.raises(KeyError), onepass.validate():
        raise KeyError
    assert not onepass.runtime.process_setting.validating()


def test_explain_knows_shorthands_empty_calls_and_bad_ones():
    x = torch.randn(4, 8)
    assert str(onepass.explain(onepass.bias_swiglu, x)) == str(onepass.explain("bias_activation", x, activation="swiglu"))
    assert "swiglu" in onepass.bias_swiglu.__doc__ and onepass.bias_swiglu.__name__ == "bias_swiglu"
    assert "nothing to do" in runtime_op.OPS["bias_activation"].variant(runtime_op.OPS["bias_activation"].call(torch.empty(0, 8)))
    with pytest.raises(ValueError, match="even last dimension"):
        onepass.explain(onepass.bias_swiglu, x[:, :7])
    with onepass.use_backend("torch"):
        assert onepass.explain(onepass.bias_swiglu, x, backend="auto").why.startswith(("auto", "chosen by auto"))


def test_a_choice_can_be_entered_again():
    choice = onepass.use_backend("torch")
    for _ in range(2):
        with choice:
            assert onepass.explain(onepass.bias_gelu, torch.ones(2, 2)).why == "chosen by use_backend"
        assert onepass.explain(onepass.bias_gelu, torch.ones(2, 2)).why != "chosen by use_backend"


@pytest.mark.parametrize(("name", "run"), [(5, print), ("", print), ("mine", 3)])
def test_what_is_no_backend_is_not_registered(name, run):
    with pytest.raises(TypeError, match=r"must be a (word|function)"):
        onepass.register_backend("bias_activation", name, run)
    with pytest.raises(TypeError, match="backend must be the name"):
        onepass.bias_activation(torch.ones(2, 2), backend=["triton"])
