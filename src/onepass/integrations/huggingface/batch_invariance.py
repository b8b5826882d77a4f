"""`apply(model, batch_invariant=True)`: what must not be so, and the row that says which of a model's parts may mix rows."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from onepass.integrations.huggingface.patches import AppliedRow
from onepass.runtime.batch_invariance import invariant
from onepass.runtime.fp8_recipe import FP8Recipe

_PRODUCTS_ALONE = ("linear", "causal_conv1d")  # words of attention or a mixer whose other arithmetic is the model's
_OF_ROWS = (nn.Linear, nn.Embedding, nn.Identity, _DropoutNd)  # dropout has no rate here
_OF_NUMBERS = "torch.nn.modules.activation", "transformers.activations"
_LARGE = "mlp", "qkv", "loss"  # parts that have more than one layer


def check_invariant(model: nn.Module, recipe: FP8Recipe | None) -> None:
    """Raise ValueError where a token's bits would depend on its place, by dropout, or on all rows, by scales or a loss."""
    if recipe is not None and recipe.scaling != "row":
        raise ValueError(
            f"precision must have scales by row with batch_invariant, FP8Recipe(scaling='row'), but has {recipe.scaling!r} ones, "
            "which are of all rows"
        )
    for name, module in model.named_modules():
        if getattr(vars(module).get("config"), "output_router_logits", False):
            raise ValueError(
                f"{name or type(module).__name__}.config.output_router_logits must be False with batch_invariant, as the loss "
                "that balances experts has gradients of all rows, but is True"
            )
        rates = {at: value for at, value in vars(module).items() if re.search("drop|jitter", at) and isinstance(value, float)}
        rates |= {"p": module.p} if isinstance(module, _DropoutNd) else {}
        for at, rate in rates.items():
            if rate > 0:
                raise ValueError(
                    f"{name}.{at} must be 0 with batch_invariant, as what is drawn depends on a token's place, but is {rate}: "
                    "set it to 0 in the configuration that the model is made of"
                )


def invariance_row(model: nn.Module, rows: list[AppliedRow]) -> AppliedRow:
    """Return the report's row: whether the promise is in force, and what of the model is not onepass's."""
    kind = type(model).__name__
    if not invariant():
        return AppliedRow("", kind, "bits", why="onepass.batch_invariant() is off by now")
    names = sorted({re.sub(r"\.\d+", ".*", name) for name in _others(model, rows)})
    why = f"not onepass's, and may mix rows: {', '.join(names)}" if names else None
    return AppliedRow("", kind, "bits", by="batch_invariant, of the process", why=why)


def _others(model: nn.Module, rows: list[AppliedRow]) -> Iterator[str]:
    """Yield the modules whose arithmetic is their own code's, and not known to keep rows apart."""
    whole = {(row.name, row.part) for row in rows if row.by is not None and row.by not in _PRODUCTS_ALONE}
    replaced, around = ({name for name, part in whole if part in parts} for parts in (("norm", *_LARGE), _LARGE))
    for row in rows:
        if row.part in _LARGE and (row.name, row.part) not in whole:
            yield f"{row.name} ({row.why})" if row.why else row.name
    for name, module in model.named_modules():
        kind = type(module)
        if name in replaced or name.rpartition(".")[0] in around or isinstance(module, _OF_ROWS):
            continue
        if kind.__module__.startswith(_OF_NUMBERS) or "Rotary" in kind.__name__ or kind.forward is nn.Module.forward:
            continue
        if not module._modules or module._parameters or "attention" in kind.__name__.lower():
            yield name
