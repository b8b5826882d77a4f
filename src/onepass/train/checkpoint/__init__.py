"""Checkpoints of `onepass train`. They are written atomically, and can be loaded under any layout of ranks.

A checkpoint is a folder, `step-00000500` in the run's `checkpoints`:

    checkpoint.json         the step, the model, the settings, which file has which part of which tensor, and checksums
    0.safetensors, ...      the parts that each rank wrote

All tensors are fp32: the weights that the optimizer steps, which a bf16 model's weights round, and their moments. A tensor has
its parameter's name, a moment with the prefix `exp_avg.` or `exp_avg_sq.`. Offsets are those in the whole parameter, so files
do not depend on how the model was divided. Scales of eight-bit products are tensors with the prefix `fp8.` (`scales.py`).
Nodes with disks of their own have the index each, and the files of their ranks (`nodes.py`).
torch.distributed.checkpoint plans which rank writes and reads what. Nothing is unpickled, so loading can't run code.
"""

from onepass.train.checkpoint.folders import find, folder_of, newest_number, run_of
from onepass.train.checkpoint.nodes import find_on_nodes, newest_whole, share_index
from onepass.train.checkpoint.saved import check, check_vocabulary, describe_scales, load, renamed, save

__all__ = [
    "check",
    "check_vocabulary",
    "describe_scales",
    "find",
    "find_on_nodes",
    "folder_of",
    "load",
    "newest_number",
    "newest_whole",
    "renamed",
    "run_of",
    "save",
    "share_index",
]
