"""VocabParallelEmbedding: an embedding whose rows are sharded over a tensor-parallel group.

A rank looks up the ids whose rows it has. Rows of other ids are zeros, and the sum over the ranks is the embedding. The weight's
gradient, in fp32 or wider, goes where gradients/main_grad.py says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.distributed.collectives import reduce_scatter_sequence, sum_over_group
from onepass.nn.fp8_state import shown
from onepass.nn.sharding import DividedParameters, Division, check_init, check_size, range_of
from onepass.ops.embedding.embedding import embedding


class VocabParallelEmbedding(DividedParameters):
    """torch.nn.Embedding with its rows sharded over tp_group. It is Megatron's without its config.

    Each rank has the rows of `vocab_range`, as torch.chunk divides: the last ranks may have fewer, or none. Shards are
    initialised like those of the unsharded embedding, if all ranks have the same random state: each rank makes the whole weight
    and keeps its shard. The state dict has this rank's rows under torch.nn.Embedding's key. `onepass.nn.sharded_state_dict`
    returns the whole.

    An id outside of the vocabulary raises on a CPU and under `onepass.validate()`. On a GPU and in a compiled graph its row is
    NaN.

    Args:
        num_embeddings: the size of the whole vocabulary.
        embedding_dim: the size of a row.
        init_method: called on the whole weight. The default is torch.nn.Embedding's normal distribution.
        reduce_scatter_embeddings: ids are [batch, sequence], and y is this rank's shard of [sequence, batch, embedding_dim], for
            sequence-parallel layers. In a group of one y has the sequence first, too.
        tp_group: the ranks. None is this rank alone.
        device, dtype: of the weight.
    """

    weight: nn.Parameter
    is_embedding = True  # optimizers with moments in 8 bits keep its in fp32

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], Any] | None = None,
        reduce_scatter_embeddings: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(tp_group)
        check_size("num_embeddings", num_embeddings)
        check_size("embedding_dim", embedding_dim)
        check_init("init_method", init_method)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.init_method, self.reduce_scatter_embeddings = init_method, reduce_scatter_embeddings
        self.vocab_range = range_of(num_embeddings, self.rank, self.ranks)
        self.vocab_start_index, self.vocab_end_index = self.vocab_range
        rows = self.vocab_end_index - self.vocab_start_index
        self.hold("weight", rows, embedding_dim, device=device, dtype=dtype, division=Division(0, num_embeddings))
        self.reset_parameters()
        self.mark_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise the weight, like that of the unsharded embedding."""
        self.start("weight", self.init_method or nn.init.normal_)

    def forward(self, ids: Tensor) -> Tensor:
        """Return [..., embedding_dim] for ids [...], which are the same on all ranks."""
        if self.reduce_scatter_embeddings and isinstance(ids, Tensor) and (ids.dim() != 2 or ids.shape[1] % self.ranks):
            raise ValueError(
                "ids must have shape [batch, sequence] for reduce_scatter_embeddings, its sequence a multiple of "
                f"{self.ranks}, the size of tp_group, but has {tuple(ids.shape)}"
            )
        y = embedding(ids, self.given(self.weight), vocab_start=self.vocab_start_index, vocab_size=self.num_embeddings)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_sequence(y.transpose(0, 1).contiguous(), self.tp_group)
        return sum_over_group(y, self.tp_group)

    def extra_repr(self) -> str:
        parts = [f"{self.num_embeddings}", f"{self.embedding_dim}"]
        parts += [f"vocab_range={self.vocab_range}", f"tp={self.ranks}"] if self.ranks > 1 else []
        return ", ".join(parts + shown(self, reduce_scatter_embeddings=False))
