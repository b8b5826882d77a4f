"""Work on what several ranks hold together. Process groups are arguments."""

from onepass.parallel.sequence_parallel import reduce_sequence_parallel_grads

__all__ = ["reduce_sequence_parallel_grads"]
