"""Checkpoints of `onepass train`: written whole or not at all, and read under any layout of ranks.

A checkpoint is a folder, `step-00000500` in the run's `checkpoints`:

    checkpoint.json         the step, the model, the settings, and which file has which part of which tensor
    0.safetensors, ...      what each rank wrote of them

All tensors are fp32 and have their whole parameter's name and place: the weight that the optimizer steps (of which a bf16 model's
is the rounded one), and its moments, `exp_avg.` and `exp_avg_sq.` before the name. So a file doesn't depend on how the model was
divided. torch.distributed.checkpoint plans which rank writes and reads what; nothing that is read can run anything.
"""

from onepass.train.checkpoint.folders import find, run_of
from onepass.train.checkpoint.saved import check, load, save

__all__ = ["check", "find", "load", "run_of", "save"]
