"""Eight bits in a run: what it says of them at the start, and how many numbers saturate or round to zero."""

from __future__ import annotations

from operator import sub
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onepass.gpt import Config
from onepass.kernels.grouped_product import unfit_for_scaled_groups
from onepass.nn.precision import fp8_layers
from onepass.product.fp8.scales import KINDS, ROLES, counts_of
from onepass.product.fp8.weight import FP8Weight
from onepass.runtime.fp8 import MULTIPLE, fits_fp8
from onepass.train.layout import ParallelLayout

_HEAVY = 0.01  # share of a tensor's numbers that saturate or round to zero, from which on the log warns
_DO = {"saturated": "saturates", "underflowed": "rounds to zero"}
_ROLES = {"input": "input", "weight": "weight", "gradient": "output's gradient"}

# ---- the summary ----


def describe_precision(config: Config, device: torch.device) -> str:
    """Return a run's sentences on its products in eight bits, or nothing where it has none."""
    recipes = {layer: recipe for layer in range(config.num_layers) if (recipe := config.precision(layer)) is not None}
    if not recipes:
        return ""
    blocks, recipe = list(recipes), next(iter(recipes.values()))
    ends = f"block {blocks[0] + 1}" if len(blocks) == 1 else f"blocks {blocks[0] + 1} to {blocks[-1] + 1}"
    which = "all blocks" if len(blocks) == config.num_layers else f"{ends} of {config.num_layers}"
    steps = f" of {recipe.amax_history_len} steps" if recipe.scaling == "delayed" else ""
    in_16_bits = ["embedding", "head", "norms"] + ([] if recipe.has_wgrad else ["weight gradients"])
    in_16_bits += [f"{name} ({rows} x {columns}: not multiples of {MULTIPLE})" for name, rows, columns in _unfit(config)]
    experts = ""
    if config.num_moe_experts:
        why = _unfit_experts(config, device)
        experts = "" if why else f", those of experts in e4m3 with scales by row and weight gradients in {config.params_dtype}"
        in_16_bits += [f"experts ({why})"] if why else []
    return (
        f"The products of {which} run in eight bits ({recipe.types}; {config.fp8_recipe} scales{steps}){experts}; "
        f"{', '.join(in_16_bits[:-1])} and {in_16_bits[-1]} stay in {config.params_dtype}."
    )


def _unfit(config: Config) -> list[tuple[str, int, int]]:
    """Return a rank's weights of a block whose sizes no product in eight bits takes."""
    ranks, hidden, ffn = config.tensor_model_parallel_size, config.hidden_size, config.ffn_size
    heads, groups = (number * config.head_size // ranks for number in (config.num_attention_heads, config.query_groups))
    weights = [("linear_qkv", heads + 2 * groups, hidden), ("linear_proj", hidden, heads)]
    if not config.num_moe_experts:
        weights += [("linear_fc1", (1 + config.gated_linear_unit) * ffn // ranks, hidden), ("linear_fc2", hidden, ffn // ranks)]
    return [each for each in weights if not fits_fp8(each[1:])]


def _unfit_experts(config: Config, device: torch.device) -> str | None:
    """Return why the products of a rank's experts stay in 16 bits, or None."""
    assert config.num_moe_experts is not None
    hidden, size, experts = config.hidden_size, config.expert_size // config.tensor_model_parallel_size, config.num_moe_experts
    shapes = (experts, (1 + config.gated_linear_unit) * size, hidden), (experts, hidden, size)
    reasons = [unfit_for_scaled_groups(shape, config.dtype, device) for shape in shapes]
    return reasons[0] or reasons[1]


def has_delayed_scales(config: Config) -> bool:
    """Whether a run's products have scales of the steps before, which alone can be far from a tensor's own."""
    return config.fp8_format is not None and config.fp8_recipe == "delayed"


# ---- saturation ----


class Counts(NamedTuple):
    """How many numbers of each tensor have saturated and rounded to zero until a step: [layers, kinds, roles] on the device."""

    names: list[str]
    counts: Tensor


class Heavy(NamedTuple):
    """A tensor of which many numbers are lost."""

    share: float
    layer: str
    role: str
    kind: str


class Saturation:
    """Counts what is lost between two lines of the log, in products with delayed scales. A recomputed forward counts twice.

    Args:
        tokens: of a step, on all ranks.
    """

    def __init__(self, model: nn.Module, config: Config, layout: ParallelLayout, tokens: int) -> None:
        self.layout, self._of_stages = layout, layout.pipeline.group if has_delayed_scales(config) else None
        self._weights = {each.name: each.weight for each in fp8_layers(model) if each.recipe.scaling == "delayed"}
        self._numbers = {name: self._numbers_of(weight, tokens) for name, weight in self._weights.items()}
        self._before: dict[str, list[list[int]]] = {}
        self._heavy = False

    def _numbers_of(self, weight: Tensor, tokens: int) -> tuple[int, int, int]:
        """Return how many numbers of each role all ranks cast in a step."""
        rows, columns = weight.shape
        ranks = self.layout.tensor.size
        return tokens * columns * ranks, rows * columns * ranks * self.layout.data.size, tokens * rows * ranks

    def counts(self) -> Counts | None:
        """Return the counts until now, without waiting for the device; None where nothing counts."""
        states: dict[str, FP8Weight] = {name: weight.fp8 for name, weight in self._weights.items() if hasattr(weight, "fp8")}
        return Counts([*states], counts_of([state.scales for state in states.values()])) if states else None

    def start(self) -> None:
        """Count from what a loaded checkpoint has."""
        counts = self.counts()
        self._before = {} if counts is None else dict(zip(counts.names, counts.counts.tolist(), strict=True))

    def read(self, counts: Counts | None, steps: int) -> tuple[dict[str, int] | None, list[Heavy]]:
        """Return how many numbers of each kind were lost in the steps since the last read, and heavy tensors, the worst first.

        It waits for the device once. All ranks call it; those of a pipeline exchange what they have.
        """
        lost, heavy = dict.fromkeys(KINDS, 0), list[Heavy]()
        now = {} if counts is None else dict(zip(counts.names, counts.counts.tolist(), strict=True))
        for name, of_kinds in now.items():
            before = self._before.get(name, [[0] * len(ROLES)] * len(KINDS))
            for kind, after, earlier in zip(KINDS, of_kinds, before, strict=True):
                for role, most, count in zip(ROLES, self._numbers[name], map(sub, after, earlier), strict=True):
                    lost[kind] += count
                    if count > _HEAVY * most * steps:
                        heavy.append(Heavy(count / (most * steps), name.removesuffix(".weight"), _ROLES[role], kind))
        self._before.update(now)
        stages = [(bool(self._weights), lost, heavy)]
        if self._of_stages is not None:
            stages *= self.layout.pipeline.size
            dist.all_gather_object(stages, stages[0], group=self._of_stages)
        worst = sorted((each for _, _, of_stage in stages for each in of_stage), reverse=True)
        if not any(has_weights for has_weights, _, _ in stages):
            return None, worst
        return {kind: sum(of_stage[kind] for _, of_stage, _ in stages) for kind in KINDS}, worst

    def words(self, heavy: list[Heavy]) -> str | None:
        """Return a warning where tensors lose many numbers, a line where they no longer do, or None."""
        before, self._heavy = self._heavy, bool(heavy)
        if not heavy:
            return "no tensor of the eight-bit products loses many numbers any more" if before else None
        share, layer, role, kind = heavy[0]
        others = f", and {len(heavy) - 1} more" if len(heavy) > 1 else ""
        return f"warning: {share:.1%} of the {role} of {layer} {_DO[kind]} in eight bits{others}"
