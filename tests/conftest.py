"""On a machine without a GPU, run kernels in Triton's interpreter with our fixes. Set that up before onepass is imported."""

import gc
import importlib.util
import logging
import os
import sys
from collections import Counter
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # before numpy is imported, and for processes that tests start: threads of many wait long
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import torch._C._dynamo.guards

sys.path.insert(
    0, str(Path(__file__).parent)
)  # helper modules are imported from tests: `from ops.bias_activation_oracle import ...`
sys.path.append(str(Path(__file__).parents[1]))  # ranks import the file of a function that they run: `tests.train.test_x`

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers already use all cores
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each process that compiles starts others, which import torch

gc.set_threshold(20_000, 20, 50)  # collections took a tenth of the time, of graphs and compilers above all
# For each frame that it compiles Dynamo times its guards, on a cache that it empties first. Nobody reads it here.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# pytest adds its handlers to each logger that doesn't propagate, for each phase of each test. PyTorch has fifty of these. Where
# somebody listens, its compilers print all their graphs to one of them.
for _name, _logger in logging.root.manager.loggerDict.items():
    if _name.startswith("torch.") and isinstance(_logger, logging.Logger):
        _logger.propagate = True

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    import onepass.testing.interpreter  # noqa: F401
from parallel.worlds import PAIRS, World  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _what_earlier_files_left():
    """Freeze the objects of earlier files: late in a run each garbage collection would take a second or two for them."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc):
    """Run a test that asks for `world` or `group` in each of its file's WORLDS, or with two ranks."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "world" in metafunc.fixturenames and "world" not in named:
        metafunc.parametrize("world", getattr(metafunc.module, "WORLDS", PAIRS), indirect=True, scope="module")


@pytest.fixture(scope="module")
def world(request):
    """The ranks that run functions of a file (parallel/worlds.py). They stay until its end."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    world = World(*request.param)
    yield world
    world.close()


@pytest.fixture
def group(world):
    """The process group: a test that asks for it runs on each rank, and not here."""
    return world


def pytest_pyfunc_call(pyfuncitem):
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    world = arguments.pop("group", None)
    if not isinstance(world, World):
        return None  # pytest calls it
    world.run(pyfuncitem.function, **arguments)
    return True


def pytest_terminal_summary(terminalreporter):
    """Print how many tests were skipped, by reason."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ()))
    if reasons:
        terminalreporter.section("skipped, by reason")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:6}  {reason}")


@pytest.fixture
def fp8_by_formula(monkeypatch):
    """Cast and scale for eight bits by formulas, which the backend doesn't choose."""
    from onepass.kernels import fp8_cast, fp8_transpose
    from onepass.product.fp8 import scales as fp8_scales

    for module in (fp8_cast, fp8_transpose, fp8_scales):
        monkeypatch.setattr(module, "triton_unsupported", lambda x: "the formula is wanted")


@pytest.fixture
def by_formula(fp8_by_formula):
    """Run PyTorch's formulas only: the interpreter takes far longer."""
    import onepass

    with onepass.use_backend("torch"):
        yield


@pytest.fixture
def graphs_by_kernels():
    """Compile anew, and run kernels only."""
    import onepass

    torch._dynamo.reset()
    with onepass.use_backend("triton"):
        yield


@pytest.fixture(autouse=True)
def _no_interpreter_where_the_formula_is_tested(request):
    callspec = getattr(request.node, "callspec", None)
    if os.environ.get("TRITON_INTERPRET") == "1" and callspec is not None and callspec.params.get("backend") == "torch":
        request.getfixturevalue("fp8_by_formula")


@pytest.fixture(autouse=True)
def _the_same_start_every_time():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(False)  # an earlier training run in this process may have set it
