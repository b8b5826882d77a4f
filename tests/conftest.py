"""Before anything of onepass is imported: on a machine without a GPU the kernels run under Triton's interpreter, repaired."""

import gc
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(
    0, str(Path(__file__).parent)
)  # the oracles of tests/ops are modules: `from ops.bias_activation_oracle import ...`

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers are the threads
    torch.set_num_threads(1)

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    import onepass.testing.interpreter  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def _what_earlier_files_left():
    """Is not looked through by each collection of garbage from here on: late in a run that takes a second or two."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Why tests were skipped: how many by each reason."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ()))
    if reasons:
        terminalreporter.section("skipped, by reason")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:6}  {reason}")


@pytest.fixture(autouse=True)
def _the_same_start_every_time():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(False)  # which a training run before it settled for its process
