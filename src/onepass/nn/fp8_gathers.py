"""FSDP2's gathers of weights as codes of eight bits, where a product in eight bits would make the same: `use_fp8_gathers`.

A weight's scale is a power of two, found from the largest magnitude of all that is multiplied together. Ranks agree on it, each
casts its shard, and what arrives is decoded: a code times a power of two is a number of the weight's type. The product casts
that again, to the same codes or, where the largest magnitude was rounded down past a power of two, to codes twice as large at
half the scale. Either way y and its gradients have the bits that they have of weights gathered in their own type. They have not
where one rank has weights of a product apart and others have them in one storage: then each weight has a scale of its own.

With scales by row backward casts columns of the weight itself, which codes of rows don't have: such layers are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.distributed.collectives import raise_to_largest
from onepass.gradients.fsdp import check_collectives, groups_of, unsupported
from onepass.gradients.packed_gathers import packed_with
from onepass.kernels.device_tables import device_table
from onepass.kernels.fp8_cast import cast_tensor
from onepass.product.fp8.scales import FP8Scales
from onepass.runtime.fp8 import E4M3, SLOTS, FP8Target, fits_fp8
from onepass.runtime.fp8_recipe import FP8Recipe, recipe_of


class _Segment(NamedTuple):
    """A parameter's place in what a rank sends of its group."""

    parameter: Any
    first: int
    last: int

    def rows(self, sent: Tensor) -> Tensor:
        return sent[self.first : self.last].view(-1, self.parameter._orig_size[1])


class FP8AllGather:
    """FSDP2's all-gather of a group, some of whose weights travel as codes."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._scales: dict[FP8Recipe, FP8Scales] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:  # fmt: skip
        segments = self._segments(input_tensor)
        coded = {id(each.parameter) for each in segments if _recipe_of(each.parameter, group) is not None}
        if async_op or not coded:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)  # type: ignore[no-any-return]
        inverses = self._cast_scales(segments, coded, input_tensor, group)
        sent = []
        for each in segments:
            if id(each.parameter) in coded:
                scale, _ = inverses[id(each.parameter)]
                codes, _ = cast_tensor(each.rows(input_tensor), FP8Target(E4M3, scale))
                assert codes is not None
                sent.append(codes.view(torch.uint8).view(-1))
            else:
                sent.append(input_tensor[each.first : each.last].view(torch.uint8))
        mine, ranks = torch.cat(sent), group.size()
        came = mine.new_empty(ranks, mine.numel())
        dist.all_gather_into_tensor(came.view(-1), mine, group=group)
        whole, start = output_tensor.view(ranks, -1), 0
        for each, part in zip(segments, sent, strict=True):
            place, arrived = whole[:, each.first : each.last], came[:, start : start + part.numel()]
            if id(each.parameter) in coded:
                place.copy_(arrived.view(E4M3)).mul_(inverses[id(each.parameter)][1])
            else:
                place.copy_(arrived.contiguous().view(output_tensor.dtype))
            start += part.numel()
        return None

    def _segments(self, sent: Tensor) -> list[_Segment]:
        """Return the parameters' places, or none where FSDP2 sends other than their shards in the type of all."""
        found, first = [], 0
        for parameter in self._group.fsdp_params:
            last = first + parameter._sharded_param_data.numel()
            found.append(_Segment(parameter, first, last))
            first = last
        return found if first == sent.numel() and sent.dtype in (torch.float32, torch.bfloat16, torch.float16) else []

    def _cast_scales(
        self, segments: list[_Segment], coded: set[int], sent: Tensor, group: dist.ProcessGroup
    ) -> dict[int, tuple[Tensor, Tensor]]:  # fmt: skip
        """Return the scale of each weight that travels as codes, and its inverse. Weights of one product share it.

        A rank may have such weights apart, as where it keeps views of them, or its tokens have not reached their layer. Then all
        ranks take a scale for each. There is one collective, whatever ranks have.
        """
        weights = {id(each.parameter): each for each in segments if id(each.parameter) in coded}
        scales = [self._scales_of(each.parameter, sent.device, group) for each in weights.values()]
        together = [[other for other in map(id, packed_with(each.parameter)) if other in coded] for each in weights.values()]
        apart = device_table(tuple(int(len(others) == 1) for others in together), sent.device)
        own = [
            each.magnitude("weight", partial(cast_tensor, weight.rows(sent), codes=False))
            for each, weight in zip(scales, weights.values(), strict=True)
        ]
        noted = torch.cat([*own, apart.to(torch.int32)])
        raise_to_largest(noted, group)
        *largest, is_apart = noted.split([SLOTS] * len(own) + [len(own)])
        largest_of, found = dict(zip(weights, largest, strict=True)), {}
        for place, (number, mine) in enumerate(largest_of.items()):
            if len(together[place]) > 1:
                of_all = torch.stack([largest_of[other] for other in together[place]]).amax(0)
                mine = torch.where(is_apart[place] > 0, mine, of_all)
            factors = scales[place].factors_for("weight", mine)
            found[number] = factors.scale, factors.inverse
        return found

    def _scales_of(self, parameter: Any, device: torch.device, group: dist.ProcessGroup) -> FP8Scales:
        recipe = _recipe_of(parameter, group)
        assert recipe is not None
        if recipe not in self._scales:
            self._scales[recipe] = FP8Scales(recipe, device)
        return self._scales[recipe]


def _recipe_of(parameter: Any, group: dist.ProcessGroup) -> FP8Recipe | None:
    """Return the recipe by which a weight is nothing but an operand in eight bits, in training, or None."""
    info = parameter._module_info
    recipe = recipe_of(getattr(info.module, "precision", None)) if info.param_name == "weight" and info.module.training else None
    if recipe is None or recipe.scaling == "row" or info.shared_modules or len(parameter._orig_size) != 2:
        return None
    divided = parameter.fsdp_placement.dim == 0 and parameter._orig_size[0] % group.size() == 0
    plain = parameter.sharded_state.name == "SHARDED" and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
    return recipe if divided and plain and fits_fp8(parameter._orig_size) else None


def _coded(group: Any) -> int:
    """Return how many of a group's weights would travel as codes."""
    ranks = group._all_gather_process_group
    return sum(_recipe_of(parameter, ranks) is not None for parameter in group.fsdp_params) if ranks.size() > 1 else 0


def use_fp8_gathers(model: nn.Module) -> int:
    """Let FSDP2 gather weights as codes of eight bits where their products are in eight bits, and return how many weights.

        huggingface.apply(model, precision="fp8")    # or onepass.nn.set_precision
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        use_fp8_gathers(model)

    A byte a number travels, in training. Losses and gradients keep their bits, where all ranks run the same layers. Whatever
    else reads a gathered weight, such as a hook of yours, sees its codes' values. Casting and decoding take 10 bytes of memory
    traffic a number, so that it is for links slower than NVLink.

    Args:
        model: sharded by `fully_shard`, after its precision was set. Layers with scales by row are left alone.
    """
    groups, count = list(groups_of(model)), 0
    if not groups:
        raise ValueError("model must be sharded by fully_shard, but none of its modules is")
    if (reason := unsupported(groups)) is not None:
        raise RuntimeError(f"weights can't be gathered as codes: {reason}")
    of_group = [(group, _coded(group)) for group in groups]
    check_collectives([group for group, mine in of_group if mine])
    for group, mine in of_group:
        if mine:
            group._all_gather_comm = FP8AllGather(group)
            count += mine
    if not count:
        raise ValueError("model must have layers in eight bits with one scale a weight, in training mode, but has none")
    return count
