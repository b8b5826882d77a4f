"""What tests of training share."""

from unittest.mock import patch

import pytest

import onepass
from onepass.train import live


@pytest.fixture(autouse=True, scope="module")
def _by_pytorch():
    """Not in the interpreter, in which training would take minutes."""
    with onepass.use_backend("torch"), patch.object(live, "_CPU_SIZE", 64):  # bf16 takes seconds a product on some CPUs
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text of 400 short functions."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(400)))
    return path
