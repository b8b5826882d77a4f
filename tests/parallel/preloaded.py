"""What the server of `worlds.start_method` does once, so that no rank that it forks has to: imports and a first compilation."""

import gc
import os

import pytest  # noqa: F401
import torch
import torch._C._dynamo.guards
import torch.distributed

if os.environ.get("TRITON_INTERPRET"):
    import onepass.testing.interpreter
import onepass

torch.set_num_threads(1)  # a fork has no threads of its parent, and would wait for them
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # as in conftest.py

_x = torch.ones(2, 8, requires_grad=True)
torch.compile(lambda x: onepass.rms_norm(x, backend="torch"), fullgraph=True, backend="aot_eager")(_x).sum().backward()
torch._dynamo.reset()
gc.collect()
gc.freeze()  # no rank's garbage collection looks through all of this
