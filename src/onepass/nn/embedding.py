"""VocabParallelEmbedding: an embedding whose rows are sharded over a tensor-parallel group.

A rank looks up the ids whose rows it has. Rows of other ids are zeros, and the sum over the ranks is the embedding. The weight's
gradient, in fp32 or wider, goes where gradients/main_grad.py says. It uses no atomics, so it is the same at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from onepass.gradients.embedding_gradient import rows_gradient
from onepass.gradients.main_grad import GradRequest, grad_requests, main_grads_of
from onepass.nn.sharding import DividedParameters, Division, check_init, check_size, range_of
from onepass.parallel.collectives import reduce_scatter_sequence, sum_over_group
from onepass.runtime.dispatch import fast_apply, not_twice_differentiable, under_functorch
from onepass.runtime.validation import validating

# ---- rows of this rank ----


def _rows(weight: Tensor, ids: Tensor, first: int, size: int, sound: bool) -> Tensor:
    """Return the rows of `ids`: zeros for ids of other ranks, NaN for ids outside of the vocabulary."""
    rows = weight.shape[0]
    if sound and rows == size:
        return F.embedding(ids, weight)
    local = ids.long() - first
    here = (local >= 0) & (local < rows)
    fill = torch.where((ids >= 0) & (ids < size), 0.0, torch.nan).to(weight.dtype).unsqueeze(-1)
    if rows == 0:
        return fill.expand(*ids.shape, weight.shape[1]).contiguous()
    return torch.where(here.unsqueeze(-1), F.embedding(torch.where(here, local, 0), weight), fill)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, first: int, size: int, sound: bool) -> Tensor:
        ctx.weight, ctx.main_grad, ctx.how = weight, main_grads_of(ctx.needs_input_grad, weight)[0], (first, size, sound)
        ctx.save_for_backward(ids)
        return _rows(weight, ids, first, size, sound)

    @staticmethod
    @not_twice_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        request = grad_requests(ctx, True)[0]
        if request is GradRequest.SKIP:
            return None, None, None, None, None
        flat, local = _gradients_of_rows(dy, ids, ctx.weight.shape[0], *ctx.how)
        return rows_gradient(flat, local, ctx.weight, ctx.main_grad, request), None, None, None, None


def _gradients_of_rows(dy: Tensor, ids: Tensor, rows: int, first: int, size: int, sound: bool) -> tuple[Tensor, Tensor]:
    """Return gradients [tokens, features] and the row of each. No token is filtered out: that would synchronise with the GPU.

    Tokens of other ranks add zeros, spread over the rows. Additions to a single row would be serial.
    """
    dy, local = dy.reshape(ids.numel(), dy.shape[-1]), ids.reshape(-1).long() - first
    if sound and rows == size:
        return dy, local
    if rows == 0:
        return dy[:0], local[:0]
    here = (local >= 0) & (local < rows)
    elsewhere = torch.arange(local.shape[0], device=local.device) % rows
    return torch.where(here.unsqueeze(-1), dy, 0.0), torch.where(here, local, elsewhere)


_apply = fast_apply(_Rows)


# ---- the module ----


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
        self._check(ids)
        sound = self._look(ids)
        how = self.given(self.weight), ids, self.vocab_start_index, self.num_embeddings, sound
        y: Tensor = _rows(*how) if under_functorch() else _apply(*how)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_sequence(y.transpose(0, 1).contiguous(), self.tp_group)
        return sum_over_group(y, self.tp_group)

    def _check(self, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            kind = f"of {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise TypeError(f"ids must be an int32 or int64 tensor, but is {kind}")
        if ids.device != self.weight.device:
            raise ValueError(f"ids must be on {self.weight.device}, as weight, but is on {ids.device}")
        if self.reduce_scatter_embeddings and (ids.dim() != 2 or ids.shape[1] % self.ranks):
            raise ValueError(
                "ids must have shape [batch, sequence] for reduce_scatter_embeddings, its sequence a multiple of "
                f"{self.ranks}, the size of tp_group, but has {tuple(ids.shape)}"
            )

    def _look(self, ids: Tensor) -> bool:
        """Whether the ids were read and are all in the vocabulary. Raise IndexError where one is not."""
        if ids.device.type not in ("cpu", "meta") and not validating():
            return False
        if torch.compiler.is_compiling() or under_functorch() or ids.is_meta or isinstance(ids, FakeTensor):
            return False  # no values to read
        if ids.numel():
            least, most = ids.aminmax()
            if least < 0 or most >= self.num_embeddings:
                raise IndexError(
                    f"ids must be from 0 to {self.num_embeddings - 1}, the rows of the vocabulary, but are from {least} to {most}"
                )
        return True

    def extra_repr(self) -> str:
        said = [f"{self.num_embeddings}", f"{self.embedding_dim}"]
        if self.ranks > 1:
            said += [f"vocab_range={self.vocab_range}", f"tp={self.ranks}"]
        return ", ".join(said + (["reduce_scatter_embeddings=True"] if self.reduce_scatter_embeddings else []))
