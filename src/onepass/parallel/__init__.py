"""Work on what several ranks hold together. Process groups are arguments."""

from onepass.parallel.adamw import AdamW
from onepass.parallel.deferred import DeferredWgrad
from onepass.parallel.main_grads import MainGrads
from onepass.parallel.master_weights import MasterWeights
from onepass.parallel.sequence_parallel import reduce_sequence_parallel_grads

__all__ = ["AdamW", "DeferredWgrad", "MainGrads", "MasterWeights", "reduce_sequence_parallel_grads"]
