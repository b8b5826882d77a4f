"""Counters by which the programs of a kernel find out which of them is the last to finish.

The last one can do the work that needs everybody's partial results, and so spares a second kernel. A kernel adds 1 as each of
its programs ends and sets the counter back to 0 when it has seen the last: the same zeros serve every later call on that
stream. Only integers are counted, so the result does not depend on who came last.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 4096
_zeros: dict[tuple[int, int], Tensor] = {}


def arrival_counters(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 zeros for a kernel on the current stream of `device`, which leaves them zeros."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():  # a graph may be replayed on any stream: it gets zeros of its own
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)
    zeros = _zeros.get(key)
    if zeros is None or zeros.numel() < count:
        zeros = _zeros[key] = torch.zeros(max(count, _LEAST), dtype=torch.int32, device=device)
    return zeros
