"""A GPT: an embedding, blocks, a norm and an output layer. The configuration chooses onepass or PyTorch operators for each.

Hidden states are [B, S, hidden_size]. Under sequence parallelism a rank holds a contiguous run of the B x S tokens, as
[B, S / ranks, hidden_size]. The ranks' shards concatenated along the first dimension hold all tokens in order, so nothing is
transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onepass.gpt.block import Block, sequences
from onepass.gpt.config import Config
from onepass.gpt.generate import Generated, Generators, Sampling, generate, prompts_of, stops_of
from onepass.gpt.multi_token import DepthTargets, MultiTokenLayer, labels_after, tokens_after
from onepass.gpt.packing import joined_boundaries, positions_in_rows
from onepass.gpt.parts import Initializer, Norm, make_norm, settled
from onepass.gpt.positions import PositionEmbedding, Rotary, Tables
from onepass.nn.embedding import VocabParallelEmbedding
from onepass.nn.linear_cross_entropy import LinearCrossEntropy
from onepass.nn.norm import MarkedParameters
from onepass.ops.dropout.dropout_add import dropout_add
from onepass.ops.loss.cross_entropy import cross_entropy
from onepass.ops.loss.kept_rows import KeptRows, kept_rows
from onepass.runtime.batch_invariance import refuse


class Model(nn.Module):
    """A GPT, or one pipeline stage of it.

        model = Model(config)
        loss = model(tokens, labels)
        logits = model(tokens)

    Weights start as normal values with standard deviation init_method_std; biases start as zeros. The standard deviation of the
    last linear layer of attention and of an MLP is divided by sqrt(2 num_layers). On one kind of device the values are the same
    however the model is divided over ranks and stages. State dicts have the same keys in every stage and with every fusion.
    `onepass.nn.sharded_state_dict` returns divided parameters as whole tensors.

    With several tensor-parallel ranks, call `onepass.parallel.reduce_sequence_parallel_grads(model, tp_group)` after the last
    backward of a step.

    Args:
        config: the configuration of the whole model.
        tp_group: the tensor-parallel group, of tensor_model_parallel_size ranks; None is this rank alone.
        layers: the indices of this stage's blocks; None is all blocks.
        first: whether this stage has the embedding and takes tokens. Other stages take hidden states.
        last: whether this stage has the final norm and the output layer, and returns logits or the loss. Other stages return
            hidden states. With mtp_num_layers it has a copy of the embedding too, which starts as the first stage's: add its
            gradients to those before a step, and take the weights from there after it.
        device: the parameters' device. After construction on the meta device, call `to_empty` and `reset_parameters`.
        seed: the seed of the weights. None draws one from torch's random state, which must then be the same on all ranks.
    """

    def __init__(
        self,
        config: Config,
        *,
        tp_group: dist.ProcessGroup | None = None,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        _check_division(config, tp_group, layers, first, last)
        self.config, self.tp_group = config, tp_group
        start = Initializer(int(torch.randint(1 << 62, ())) if seed is None else seed, config.init_method_std)
        self.first, mtp_layers = first, config.mtp_layers if last else 0
        self.embedding = Embedding(config, tp_group, start.of("embedding"), device) if first or mtp_layers else None
        self.rotary = Rotary(config, device) if config.position_embedding_type == "rope" else None
        self.layers = nn.ModuleDict(
            {
                str(n): Block(self._config_of(at), tp_group, start.of(f"layers.{n}"), device, config.precision(n))
                for at, n in enumerate(layers)
            }
        )
        self.final_layernorm: Norm | None = None
        self.output_layer: LinearCrossEntropy | None = None
        if last:
            self.final_layernorm = make_norm(config, config.hidden_size, config.sequence_parallel, device)
            self.output_layer = LinearCrossEntropy(
                config.hidden_size,
                config.vocab_size,
                label_smoothing=config.label_smoothing,
                z_loss=config.z_loss,
                softcap=config.final_logit_softcapping,
                logits_dtype=torch.float32 if config.fp32_logits else None,
                skip_weight_param_allocation=config.tied,
                init_method=start.of("output_layer.weight"),
                tp_group=tp_group,
                sequence_parallel=config.sequence_parallel,
                device=device,
                dtype=config.dtype,
            )
        self.mtp = nn.ModuleDict(
            {
                str(n): MultiTokenLayer(self._config_of(config.num_layers), tp_group, start.of(f"mtp.{n}"), device)
                for n in range(mtp_layers)
            }
        )
        for module in self.modules():
            if isinstance(module, MarkedParameters):
                module.gradient_accumulation_fusion = config.gradient_accumulation_fusion

    def reset_parameters(self) -> None:
        """Re-initialise all parameters."""
        for module in self.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if module is not self and reset is not None:
                reset()

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        loss_mask: Tensor | None = None,
        reduction: str = "mean",
        grad_scale: float | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the loss if labels are given, else logits [B, S, vocab_size]. Stages other than the last return hidden states.

        Args:
            x: tokens [B, S], or hidden states of the previous stage.
            labels: the target tokens [B, S]; -100 is ignored.
            cu_seqlens: int32, the boundaries of documents, on x's device: [B, documents + 1], each row's from 0 to S, or
                [documents + 1] where there is one row. A token sees its own document up to itself. Documents may be empty: rows
                of fewer repeat S. Where boundaries are wrong, a CPU and `onepass.validate()` raise, and a GPU computes NaN. Give
                the last token of a document the label -100, or a next token of its own: labels are taken as they are.
            positions: [B, S], each token's position. By default they are counted from a row's first token, or with
                `cu_seqlens` from a document's. Stages other than the first need them too.
            loss_mask: [B, S], a factor for each token's loss. A mean divides by its sum.
            reduction: ``mean``, ``sum`` or ``none``.
            grad_scale: as in `onepass.linear_cross_entropy`. Only that op supports it: cross_entropy_fusion_impl ``linear``.
            tokens: [B, S], what the last stage needs beside hidden states to train with mtp_num_layers.

        With mtp_num_layers the loss in training has the gradients of the depths' mean losses too, their average times
        mtp_loss_scaling_factor, as a loss that all tokens have. Its value is that of the next token alone, as in Megatron.
        """
        rows = None if labels is None or self.output_layer is None else rows_with_loss(labels, self.output_layer, self.config)
        boundaries, positions = self._places(x, cu_seqlens, positions)
        depths = [] if labels is None else self._depth_targets(labels, boundaries, loss_mask)
        tokens = x if self.first else tokens
        if depths and tokens is None:
            raise ValueError("tokens must be given to a last stage that trains with mtp_num_layers, but is None")
        h: Tensor = self.embedding(x, positions) if self.first and self.embedding is not None else x
        pending, aux_losses = None, []
        tables = None if self.rotary is None else self.rotary(self._length(x, positions), positions)
        for at, block in enumerate(self.layers.values()):
            if self._recomputed(at) and torch.is_grad_enabled():
                h, pending, own = checkpoint(block, settled(h, pending), None, tables, boundaries, **self._checkpointing)
            else:
                h, pending, own = block(h, pending, tables, boundaries)
            aux_losses += [] if own is None else [own]
        if self.output_layer is None or self.final_layernorm is None:
            return settled(h, pending)
        h = self.final_layernorm(h) if pending is None else self.final_layernorm(h, pending)[0]
        if labels is None:
            return sequences(self.output_layer.logits(h, self._head_weight()), self.config)
        if aux_losses and reduction == "none":
            refuse("reduction 'none' with moe_aux_loss_coeff", "each token's loss has that of all tokens' routes in it")
        loss = self._loss(h, labels, rows, loss_mask, reduction, grad_scale)
        if depths and tokens is not None:
            promised = grad_scale if reduction == "mean" else None
            aux_losses += self._depth_losses(h, tokens, positions, tables, boundaries, depths, promised)
        return loss + sum(aux_losses) * kept_tokens(labels, loss_mask, reduction) if aux_losses else loss

    def generate(
        self,
        tokens: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        *,
        cu_seqlens: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: int | Sequence[int] | None = None,
        generator: Generators = None,
        return_log_probs: bool = False,
    ) -> Generated:
        """Continue prompts: return (tokens, lengths, log_probs) of what follows them.

        Under `onepass.batch_invariant()` the log-probabilities have the bits of `forward`'s losses of the same tokens without
        label_smoothing and z_loss, in any batch or packing, and those of a prompt alone. Tokens are as many as the longest
        sequence got. A highest logit that is NaN or infinite raises at the end. Parameters that are DTensors, as FSDP2's, raise.

        Args:
            tokens: [B, S], prompts of one length; a list of prompts; or with `cu_seqlens` prompts in one row, [1, S].
            max_new_tokens: how many tokens each sequence gets at most.
            cu_seqlens: int32 [prompts + 1], their boundaries, which the host reads.
            temperature: divides the logits before a token is drawn; 0 takes the most probable.
            top_k: draw from as many of the most probable tokens.
            top_p: draw from the fewest of the most probable tokens that have this probability together, after `top_k`.
            stop_tokens: a sequence ends with any of these.
            generator: of random numbers; or one for each sequence, whose tokens then don't depend on the others.
            return_log_probs: give the tokens' log-probabilities too, of the model's own distribution: as if temperature were 1,
                and top_k and top_p None.
        """
        prompts, stops = prompts_of(tokens, cu_seqlens), stops_of(stop_tokens)
        return generate(self, prompts, max_new_tokens, Sampling(temperature, top_k, top_p, generator), stops, return_log_probs)

    def _depth_targets(self, labels: Tensor, boundaries: Tensor | None, loss_mask: Tensor | None) -> list[DepthTargets]:
        """Return what each depth of multi-token prediction foretells. Without gradients there is nothing to train: none."""
        if not (self.mtp and self.training and torch.is_grad_enabled()) or self.output_layer is None:
            return []
        depths = []
        for depth in range(1, (self.config.mtp_num_layers or 0) + 1):
            later = labels_after(labels, depth, boundaries)
            mask = None if loss_mask is None else tokens_after(loss_mask, depth)
            depths.append(DepthTargets(later, mask, rows_with_loss(later, self.output_layer, self.config)))
        return depths

    def _depth_losses(
        self, h: Tensor, tokens: Tensor, positions: Tensor | None, tables: Tables | None, boundaries: Tensor | None,
        depths: list[DepthTargets], grad_scale: float | None,
    ) -> list[Tensor]:  # fmt: skip
        """Return the depths' mean losses, with their blocks' auxiliary losses: zeros that have the gradients."""
        assert self.embedding is not None
        factor, losses = self.config.mtp_loss_scaling_factor / len(depths), []
        layers = [*self.mtp.values()] * (len(depths) // len(self.mtp))
        promised = None if grad_scale is None else grad_scale * factor
        if positions is None and self.embedding.position_embeddings is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        for depth, (layer, (labels, mask, rows)) in enumerate(zip(layers, depths, strict=True), 1):
            embedded = self.embedding(
                tokens_after(tokens, depth), None if positions is None else tokens_after(positions, depth)
            )  # fmt: skip
            if self._recomputed(self.config.num_layers):
                h, own = checkpoint(layer, h, embedded, tables, boundaries, **self._checkpointing)
            else:
                h, own = layer(h, embedded, tables, boundaries)
            loss = factor * self._loss(h, labels, rows, mask, "mean", promised)
            if own is not None:  # a layer has one such loss, however many depths it is: as in Megatron
                loss = loss + own * (len(self.mtp) / len(depths))
            losses.append(loss - loss.detach())
        return losses

    def _size(self, x: Tensor) -> tuple[int, int]:
        """Return how many rows x stands for, and of how many tokens."""
        if self.first:
            _check_tokens(x)
            return x.shape[0], x.shape[1]
        return x.shape[0], x.shape[1] * self.config.sequence_ranks

    def _places(self, x: Tensor, cu_seqlens: Tensor | None, positions: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return all rows' boundaries, joined, and the tokens' positions. None stands for whole rows, and for 0 to S - 1."""
        if cu_seqlens is None and positions is None:
            return None, None
        batch, length = self._size(x)
        if positions is not None and tuple(positions.shape) != (batch, length):
            raise ValueError(f"positions must have shape {(batch, length)}, as x's tokens, but has {tuple(positions.shape)}")
        if cu_seqlens is None:
            return None, positions
        boundaries = joined_boundaries(cu_seqlens, x, batch, length, self.config.max_position_embeddings)
        return boundaries, positions_in_rows(boundaries, batch, length) if positions is None else positions

    def _length(self, x: Tensor, positions: Tensor | None) -> int:
        longest, (_, length) = self.config.max_position_embeddings, self._size(x)
        if positions is None and length > longest:
            raise ValueError(f"x must have a sequence of at most max_position_embeddings, {longest}, but {length}")
        return length

    def _computes_again(self, at: int) -> bool:
        """Whether the stage's block `at` is one of those that recompute_granularity is for."""
        return self.config.recompute_num_layers is None or at < self.config.recompute_num_layers

    def _config_of(self, at: int) -> Config:
        again = self._computes_again(at)
        return self.config if again else self.config.replace(recompute_granularity=None, recompute_num_layers=None)

    def _recomputed(self, at: int) -> bool:
        return self.config.recompute_granularity == "full" and self._computes_again(at)

    @property
    def _checkpointing(self) -> dict[str, Any]:
        dropout = self.config.hidden_dropout > 0 or self.config.attention_dropout > 0
        return {"use_reentrant": False, "preserve_rng_state": dropout}

    def _head_weight(self) -> Tensor | None:
        """Return the embedding's weight if tied. None stands for the output layer's own weight."""
        return self.embedding.word_embeddings.weight if self.config.tied and self.embedding is not None else None

    def _loss(
        self, h: Tensor, labels: Tensor, rows: KeptRows | None, loss_mask: Tensor | None, reduction: str, grad_scale: float | None
    ) -> Tensor:
        c, head = self.config, self.output_layer
        assert head is not None
        if c.loss_without_logits:
            shape = labels.shape[0] * c.sequence_ranks, labels.shape[1] // c.sequence_ranks
            mask = None if loss_mask is None else loss_mask.reshape(shape)
            loss: Tensor = head(
                h,
                labels.reshape(shape),
                token_weight=mask,
                grad_scale=grad_scale,
                rows=rows,
                weight=self._head_weight(),
                reduction=reduction,
            )
            return loss.reshape(labels.shape) if reduction == "none" else loss
        if grad_scale is not None:
            raise ValueError(
                "grad_scale must be None without cross_entropy_loss_fusion and cross_entropy_fusion_impl 'linear', "
                f"but is {grad_scale}"
            )
        return loss_of_logits(head, h, self._head_weight(), labels, loss_mask, reduction, c)


class Embedding(nn.Module):
    """Token embedding, with position embeddings if the configuration has learned ones, and dropout."""

    def __init__(self, config: Config, tp_group: dist.ProcessGroup | None, start: Initializer, device: Any) -> None:
        super().__init__()
        self.config, self.tp_group = config, tp_group
        options: dict[str, Any] = {"device": device, "dtype": config.dtype}
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            init_method=start.of("word_embeddings.weight"),
            reduce_scatter_embeddings=config.sequence_parallel,
            tp_group=tp_group,
            **options,
        )
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(
                config.max_position_embeddings,
                config.hidden_size,
                init_method=start.of("position_embeddings.weight"),
                sequence_parallel=config.sequence_parallel,
                **options,
            )

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return [B, S, hidden_size] for tokens [B, S]; under sequence parallelism this rank's shard of it."""
        _check_tokens(tokens)
        if positions is None and self.position_embeddings is not None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self._dropped((self._divided if self.config.sequence_parallel else self._whole)(tokens, positions))

    def _whole(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        h: Tensor = self.word_embeddings(tokens)
        return h if self.position_embeddings is None else h + self.position_embeddings(positions)

    def _divided(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        batch, length = tokens.shape
        ranks = self.config.tensor_model_parallel_size
        if length % ranks:
            raise ValueError(
                f"tokens must have a sequence that is a multiple of tensor_model_parallel_size, {ranks}, with sequence_parallel, "
                f"but it is {length}"
            )
        h: Tensor = self.word_embeddings(tokens.reshape(1, -1)).view(batch, length // ranks, -1)
        if self.position_embeddings is not None and positions is not None and self.tp_group is not None:
            at = positions.expand(batch, length).flatten().chunk(ranks)[self.tp_group.rank()]
            h = h + self.position_embeddings(at.view(h.shape[:-1]))
        return h

    def _dropped(self, h: Tensor) -> Tensor:
        c = self.config
        p = c.hidden_dropout if self.training else 0.0
        if not (p and c.bias_dropout_fusion):
            return F.dropout(h, p) if p else h
        nothing = h.new_zeros(()).expand_as(h)
        return dropout_add(h, nothing, p, tp_group=self.tp_group, sequence_parallel=c.sequence_parallel)


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() != 2:
        raise ValueError(f"tokens must have shape [batch, sequence], but has {tuple(tokens.shape)}")


def _check_division(config: Config, tp_group: Any, layers: range, first: bool, last: bool) -> None:
    ranks = tp_group.size() if isinstance(tp_group, dist.ProcessGroup) else 1
    if ranks != config.tensor_model_parallel_size:
        raise ValueError(
            f"tp_group must be of tensor_model_parallel_size ranks, {config.tensor_model_parallel_size}, but is of {ranks}"
        )
    if layers.step != 1 or layers.start < 0 or layers.stop > config.num_layers:
        raise ValueError(f"layers must be a range within {config.num_layers}, num_layers, but is {layers!r}")
    if config.tied and first != last:
        raise ValueError(
            "untie_embeddings_and_output_weights must be true where first and last are not one stage, but is false: the head's "
            "weight is the embedding's"
        )


# ---- the loss ----


def rows_with_loss(labels: Tensor, head: LinearCrossEntropy, config: Config) -> KeptRows | None:
    """Ask which tokens have a loss, before the blocks run: the head computes no others. None stands for all."""
    if not config.loss_without_logits:
        return None
    return kept_rows(labels, head.ignore_index, tp_group=head.tp_group, sequence_parallel=head.sequence_parallel)


def loss_of_logits(
    head: LinearCrossEntropy,
    h: Tensor,
    weight: Tensor | None,
    labels: Tensor,
    loss_mask: Tensor | None,
    reduction: str,
    config: Config,
) -> Tensor:
    """Return the loss with the reductions of `onepass.linear_cross_entropy`. A mean with loss_mask divides by the mask's sum."""
    rows = "none" if loss_mask is not None else reduction
    if config.cross_entropy_loss_fusion:
        logits = sequences(head.logits(h, weight, gather=False), config)
        smoothing, z_loss = config.label_smoothing, config.z_loss
        loss: Tensor = cross_entropy(logits, labels, head.tp_group, rows, label_smoothing=smoothing, z_loss=z_loss)
    else:
        loss = _plain(sequences(head.logits(h, weight), config), labels, rows, config)
    if loss_mask is None or reduction == "none":
        return loss if loss_mask is None else loss * loss_mask
    total = (loss * loss_mask).sum()
    return (
        total if reduction == "sum" else total / (loss_mask * (labels != -100)).sum().clamp(min=torch.finfo(torch.float32).tiny)
    )


def kept_tokens(labels: Tensor, loss_mask: Tensor | None, reduction: str) -> Tensor | float:
    """Return the factor that adds a loss common to all tokens to the reduced loss, as if each kept token had it.

    It is 1 for a mean, the (masked) number of tokens for a sum, and each token's mask without a reduction.
    """
    if reduction == "mean":
        return 1.0
    weights = labels != -100 if loss_mask is None else loss_mask * (labels != -100)
    return weights.float() if reduction == "none" else weights.sum()


def _plain(logits: Tensor, labels: Tensor, reduction: str, config: Config) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    flat = labels.flatten()
    loss = F.cross_entropy(wide, flat, reduction=reduction, label_smoothing=config.label_smoothing)
    if config.z_loss:
        has_loss = flat != -100
        extra = torch.where(has_loss, config.z_loss * wide.logsumexp(-1).square(), 0.0)
        loss = loss + (extra if reduction == "none" else extra.sum() / (has_loss.sum() if reduction == "mean" else 1))
    return loss.view_as(labels) if reduction == "none" else loss
