"""`apply` replaces parts of a model. The result reports them as a table and can undo them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from onepass.gradients.adamw_state import embeddings_apart
from onepass.gradients.sharded_adamw import ShardedAdamW
from onepass.integrations.huggingface.attentions import replace_attentions
from onepass.integrations.huggingface.batch_invariance import check_invariant, invariance_row
from onepass.integrations.huggingface.dense_experts import replace_dense_experts
from onepass.integrations.huggingface.embeddings import replace_embeddings
from onepass.integrations.huggingface.expert_adapters import replace_expert_adapters
from onepass.integrations.huggingface.experts import replace_experts
from onepass.integrations.huggingface.graph import add_graphs
from onepass.integrations.huggingface.layers import replace_layers
from onepass.integrations.huggingface.lora import replace_lora
from onepass.integrations.huggingface.loss import replace_loss
from onepass.integrations.huggingface.main_grad import MainGradAdamW, PatientMainGrads, add_in_place
from onepass.integrations.huggingface.masks import replace_masks
from onepass.integrations.huggingface.mixers import replace_mixers
from onepass.integrations.huggingface.mlps import replace_mlps
from onepass.integrations.huggingface.norms import replace_norms
from onepass.integrations.huggingface.patches import AppliedRow, Patches
from onepass.integrations.huggingface.precision import set_precision
from onepass.integrations.huggingface.probe import fresh_defaults
from onepass.integrations.huggingface.routers import replace_routers
from onepass.integrations.huggingface.zero import is_partitioned, shapes_of_empty
from onepass.kernels.invariant_product import batch_invariant as switch
from onepass.runtime.fp8_recipe import FP8Recipe, Precision, recipe_of
from onepass.runtime.notebook import html_report

PARTS = ("norm", "mlp", "rope", "loss", "qkv")
_MARK = "_onepass_applied"
_WIDE, _NAME = 118, 34  # columns of the report, and of a module's name in it


class Applied:
    """The replacements that `apply` has made in a model. `print` shows them, and `undo` restores the model.

    With main_grad keep this object: when it is deleted it releases the gradients, as `MainGrads` does.
    """

    def __init__(
        self, model: nn.Module, patches: Patches, rows: list[AppliedRow], main_grads: PatientMainGrads | None = None,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.main_grads, self.batch_invariant = model, main_grads, batch_invariant
        self._patches, self._rows = patches, rows

    @property
    def rows(self) -> list[AppliedRow]:
        """What was replaced, or why not, as it is now: what was changed since `apply` runs its own code, and says so."""
        rows = [row.now(self.model) for row in self._rows]
        return [*rows, invariance_row(self.model, rows)] if self.batch_invariant else rows

    @property
    def replaced(self) -> list[AppliedRow]:
        return [row for row in self.rows if row.by is not None]

    @property
    def left(self) -> list[AppliedRow]:
        return [row for row in self.rows if row.by is None]

    def undo(self) -> None:
        """Restore the model, except for weights that training has changed.

        Raise RuntimeError if other code has changed a replaced attribute since, and say how to take it back. Then nothing is
        restored. An autocast that accelerate has put around the model (`Trainer(bf16=True)`) is taken off.
        """
        if not len(self._patches):
            raise RuntimeError("there is nothing to undo: it has been undone already")
        changed = self._patches.changed()
        if changed:
            more = f" ({len(changed) - 1} more were changed)" if len(changed) > 1 else ""
            raise RuntimeError(
                f"the model was changed after onepass was applied: {changed[0].advice(self.model)}, then undo(){more}"
            )
        if self.main_grads is not None:
            self.main_grads.close()
        self._patches.undo()

    def optimizer(
        self, groups: Iterable[Mapping[str, Any]] | None = None, *, max_norm: float | None = None, **options: Any
    ) -> MainGradAdamW | ShardedAdamW:
        """Return an AdamW in one pass. It works as any torch optimizer: step, zero_grad, schedulers, state_dict.

        With main_grad it steps by those gradients. Without it is `onepass.parallel.ShardedAdamW` over `.grad`, with
        torch.optim.AdamW's steps and state.

        Args:
            groups: parameter groups with options, as in torch.optim. None is one group, of all parameters with main_grad, and
                without it of those that are trained.
            max_norm: clip the gradient to this norm in `step`, with main_grad: `torch.nn.utils.clip_grad_norm_` finds no `.grad`
                there. None warns where Trainer has been imported, whose max_grad_norm does that. Infinity clips nothing.
            options: lr, betas, eps, weight_decay, as in torch.optim.AdamW. moments, in_backward and offload, as in
                `onepass.parallel.AdamW`; for moments in 8 bits embeddings keep fp32. Without main_grad also masters, as in
                `ShardedAdamW`.
        """
        if self.main_grads is not None:
            known = {id(parameter) for _, parameter in self.main_grads.given}
            more = any(p.requires_grad and id(p) not in known for p in self.model.parameters())  # as PEFT's adapters, added since
            release = self.main_grads.releases or bool(options.get("in_backward"))  # so that their memory can be given back
            if more or release is not self.main_grads.releases:
                self.main_grads.close()
                self.main_grads = PatientMainGrads(self.model, release)
            return MainGradAdamW(self.main_grads, groups, max_norm=max_norm, **options)
        if max_norm is not None:
            raise ValueError(
                f"max_norm must be None without main_grad, but is {max_norm}: torch.nn.utils.clip_grad_norm_, Trainer's "
                "max_grad_norm, or the optimizer's step(max_norm=...) clip"
            )
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        given = [{"params": trained}] if groups is None else groups
        return ShardedAdamW(embeddings_apart(given, self.model, options.get("moments")), **options)

    def __str__(self) -> str:
        out, width = StringIO(), min(_WIDE, max(80, get_terminal_size((_WIDE, 24)).columns))
        Console(file=out, width=width).print(self.table(width < _WIDE))
        return out.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return html_report(self.table())

    def table(self, narrow: bool = False) -> Table:
        """Return the report. narrow: for 80 columns, with fewer of its own, so that names stay whole."""
        title = escape(f"onepass in {type(self.model).__name__}")
        made = Table(title=title, title_justify="left")
        for heading in ("", "part", "by, or left because") if narrow else ("", "class", "part", "by", "left, because"):
            made.add_column(heading, no_wrap=heading in ("", "part"))
        for names, row in _grouped(self.rows):
            folded = _folded(names)
            if narrow:
                cells = [f"{folded}\n  {row.kind}", row.part, row.by or f"left: {row.why}"]
            else:
                cells = [folded, row.kind, row.part, row.by or "", row.why or ""]
            made.add_row(*map(escape, cells))
        return made


def _folded(name: str) -> str:
    """Fold a name at its dots."""
    lines = [""]
    for part in re.findall(r"[^.]+\.?", name):
        if lines[-1] and len(lines[-1]) + len(part) > _NAME:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def _grouped(rows: Iterable[AppliedRow]) -> Iterator[tuple[str, AppliedRow]]:
    """Merge rows that differ only in a layer's number."""
    groups: dict[tuple[str, str, str, str | None, str | None], list[AppliedRow]] = {}
    for row in rows:
        groups.setdefault((re.sub(r"\.\d+", ".#", row.name), row.kind, row.part, row.by, row.why), []).append(row)
    for (pattern, *_), group in groups.items():
        yield pattern.replace(".#", f".{layers_of(group)}", 1).replace(".#", ".*"), group[0]


def layers_of(rows: Iterable[AppliedRow]) -> str:
    """Return the layers' numbers in the rows' names."""
    return _ranges(sorted({int(found[1]) for row in rows if (found := re.search(r"\.(\d+)", row.name))}))


def _ranges(numbers: list[int]) -> str:
    """Format [0, 1, 2, 5] as {0-2,5}."""
    if not numbers:
        return ""
    ends, start = [], numbers[0]
    for number, after in zip(numbers, [*numbers[1:], None], strict=True):
        if after != number + 1:
            ends.append(str(start) if start == number else f"{start}-{number}")
            start = after if after is not None else start
    return ends[0] if len(numbers) == 1 else "{" + ",".join(ends) + "}"


def apply(
    model: nn.Module,
    norm: bool = True,
    mlp: bool = True,
    rope: bool = True,
    loss: bool = True,
    qkv: bool = True,
    *,
    main_grad: bool = False,
    release_main_grad: bool = False,
    precision: Precision = None,
    frozen_layouts: int | None = None,
    batch_invariant: bool = False,
    graph: bool = False,
) -> Applied:
    """Replace parts of this model instance by onepass ops. Parts that are not recognised stay unchanged.

    Args:
        model: a transformers model of any family. Modules are recognised by running them on test inputs, not by a list of names.
            PEFT may wrap the model before or after. If before, `mlp` and `qkv` run plain LoRA layers by `linear(lora=)`. Use
            FSDP2, DDP and torch.compile after. Under DeepSpeed before or after, also of empty weights (deepspeed.zero.Init).
        norm: RMSNorm and LayerNorm. With `qkv` or `mlp`, norms are also fused into the linear layers after them, and residual
            additions into the norms.
        mlp: one product up, then activation and product down as one op. Backward saves neither the norm's output nor the
            activation's. Between layers that LoRA wraps, and quantised ones, the activation is one op. Mixtures of experts become
            grouped GEMMs, with the router's weights in the activation's pass.
        rope: rotation of q and k in one launch.
        loss: the loss of hidden states and the head's weight, without logits, in training with labels. There the output's
            `logits` are empty. Without labels, in evaluation and in generation they are unchanged. With it, gradients of
            embeddings, in one pass that has no second derivative.
        qkv: queries, keys and values by one product, and causal convolutions as one op. With `rope`, causal attention runs as one
            op. Packed documents, padding, windows, softcaps and sinks are its options, in place of masks.
        main_grad: accumulate gradients in fp32 in the ops that compute them. `.grad` stays None; `Applied.optimizer` reads the
            fp32 gradients.
        release_main_grad: lend the gradients' memory to activations, from a step until the next gradients
            (`MainGrads(release=True)`).
        precision: ``fp8`` or an `onepass.FP8Recipe` runs products of the linear layers in blocks in eight bits, in training. The
            head, adapters, quantised layers and those whose sizes are no multiples of 16 keep their type. Experts' products run
            in eight bits where `mlp` has made them grouped GEMMs and PyTorch has such in eight bits.
        frozen_layouts: with `precision`, frozen weights of these layers become codes, made once, and their own memory is freed. 2
            keeps the codes by rows and transposed, 2 bytes a number. 1 keeps rows, 1 byte, which backward transposes. Merging
            adapters is refused then, and `undo` leaves the codes.
        batch_invariant: turn `onepass.batch_invariant()` on, for the whole process, until `undo`. A token's bits then depend on
            no other sequence, in forward and backward. The report's last row names what of the model is not onepass's.
        graph: run forward and backward of calls in training as CUDA graphs, for models that wait for the CPU. Each shape of the
            inputs, eight at most, has its own after three calls, and rows of causal models are padded to few lengths. Other calls
            run as they are: the report's row names why, and a warning says it once.

    Raises:
        ValueError: there is nothing to replace, or onepass is applied already, or no layer's product can have the precision, or
            weights are sharded by FSDP1, or dropout or a precision can't be batch_invariant, or what was asked for can't be in a
            graph. The model is unchanged.
        TypeError: the model is in fp64, with a precision.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, but is {type(model).__name__}")
    if vars(model).get(_MARK) is not None:
        raise ValueError(f"onepass is applied to this {type(model).__name__} already: undo that first")
    if release_main_grad and not main_grad:
        raise ValueError("release_main_grad must be False without main_grad, as there is none, but is True")
    asked = [part for part, wanted in zip(PARTS, (norm, mlp, rope, loss, qkv), strict=True) if wanted]
    if not asked and precision is None:
        raise ValueError(f"one of {', '.join(PARTS)} must be True without precision, but all are False")
    with shapes_of_empty(model):
        _check_whole(model)
    recipe = recipe_of(precision)
    if frozen_layouts is not None and (recipe is None or frozen_layouts not in (1, 2)):
        needs = "be 1 or 2" if recipe is not None else "be None without precision"
        raise ValueError(f"frozen_layouts must {needs}, but is {frozen_layouts!r}")
    if frozen_layouts is not None and any(map(is_partitioned, model.parameters())):
        raise ValueError(
            "frozen_layouts must be None with weights that DeepSpeed ZeRO-3 has partitioned: codes are of a whole weight"
        )
    if batch_invariant:
        check_invariant(model, recipe)
    for name, given in (("precision", recipe is not None), ("release_main_grad", release_main_grad)):
        if graph and given:
            raise ValueError(f"graph must be False with {name}, whose work between calls a graph would not repeat, but is True")
    patches = Patches()
    try:
        with fresh_defaults(), shapes_of_empty(model):
            rows = _replaced(model, patches, norm, mlp, rope, loss, qkv, recipe, frozen_layouts)
        if batch_invariant and len(patches):
            patches.on_undo(switch().undo)
        main_grads = add_in_place(model, patches, release_main_grad) if main_grad and len(patches) else None
        rows += [add_graphs(model, patches)] if graph and len(patches) else []
    except BaseException:
        patches.undo()
        raise
    if not len(patches):
        reasons = (
            "".join(f"\n  {row.name or type(model).__name__}: {row.why}" for row in rows if row.why)
            or f": it has no {', '.join(asked)} that is known"
        )
        raise ValueError(f"there is nothing to replace in this {type(model).__name__}{reasons}")
    applied = Applied(model, patches, rows, main_grads, batch_invariant)
    patches.set(model, _MARK, True)
    patches.set(model, "_replicate_for_data_parallel", _refuse_replicas)
    return applied


def _check_whole(model: nn.Module) -> None:
    """Raise where other code has sharded weights: recognition compares small copies of layers, and needs their sizes."""
    for name, module in model.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        if weight is not None and weight.dim() == 1:
            raise ValueError(
                f"{name}.weight must have two dimensions, but is of shape {tuple(weight.shape)}: FSDP1 has sharded it. "
                "Apply onepass before it wraps the model"
            )


def _refuse_replicas() -> None:
    """Raise, because replicas would run the original's forward, with its weights on its device."""
    raise RuntimeError(
        "a model with onepass can't be replicated by torch.nn.DataParallel, which Trainer takes for several GPUs in one process: "
        "start a process a GPU (torchrun, accelerate launch), let one be seen (CUDA_VISIBLE_DEVICES), or undo() first"
    )


def _replaced(
    model: nn.Module, patches: Patches, norm: bool, mlp: bool, rope: bool, loss: bool, qkv: bool, recipe: FP8Recipe | None,
    layouts: int | None,
) -> list[AppliedRow]:  # fmt: skip
    rows = []
    norms, told = replace_norms(model, patches) if norm else ({}, [])
    rows += told
    mlps, told = replace_mlps(model, patches) if mlp else ({}, [])
    rows += told
    if mlp:
        done, told = replace_dense_experts(model, patches)
        rows += told + replace_experts(model, patches, done) + replace_expert_adapters(model, patches)
        rows += replace_routers(model, patches)
    attentions, told = replace_attentions(model, patches, qkv=qkv, rope=rope) if qkv or rope else ({}, [])
    rows += told + (replace_mixers(model, patches) if qkv else [])
    if norms and (mlp or qkv or rope):
        rows += replace_layers(model, patches, norms, attentions, mlps)
    told = replace_masks(model, patches) if qkv or rope else []
    rows += told if qkv else []
    rows += replace_loss(model, patches) if loss else []
    rows += replace_embeddings(model, patches) if loss and len(patches) else []
    rows += replace_lora(model, patches) if mlp and qkv else []
    if recipe is not None:
        linears = [each for match in mlps.values() for each in (match.up, match.down)]
        linears += [each for match in attentions.values() for each in match.products]
        rows += set_precision(model, patches, recipe, linears, layouts)
    return rows
