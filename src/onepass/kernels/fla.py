"""What is known of FLA's kernels by the ops that call them."""

from __future__ import annotations

import re

from onepass.kernels.language import triton
from onepass.runtime.wheels import constant

_WRONG = (3, 4, 0), (3, 7, 1)  # from the first on, before the second


@constant
def has_wrong_triton() -> bool:
    """Whether gradients of gated rules are wrong on Hopper with the installed Triton (FLA's issue 640)."""
    first, fixed = _WRONG
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
    return first <= version < fixed
