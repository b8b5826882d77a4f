"""How the head and its loss are run, by the plan of their own op."""

from __future__ import annotations

from onepass.gpt import Config
from onepass.gpt.memory import rank_config
from onepass.ops.loss.head.plan import HeadPlan, MachineSpeed, PlanInputs, make_plan

_SPEEDS = 5e14, 3e12  # plans depend on times only relative to each other


def head_plan(config: Config, rows: int, gpu: int, deferred: bool = False, speeds: tuple[float, float] = _SPEEDS) -> HeadPlan:
    """Return the plan of a microbatch of so many rows, on GPUs of so many bytes.

    Args:
        deferred: the weight's gradient is left to a pipeline's flush; otherwise gradients are made in forward.
        speeds: of products in FLOP/s, and of memory in bytes a second.
    """
    machine = MachineSpeed(*speeds, gpu, gpu // 32, gpu // 10)
    sizes = rows, config.hidden_size, rank_config(config).vocab_size, config.dtype.itemsize
    wide, shared = config.fp32_logits and config.dtype.itemsize < 4, config.tensor_model_parallel_size > 1
    return make_plan(PlanInputs(*sizes, wide, True, not deferred, True, True, not deferred, None, shared, None), machine)
