"""Names of earlier releases. Importing a module's old path gives the module that took its place, with a DeprecationWarning.

They are kept for one release. The public names of `onepass`, `onepass.nn` and `onepass.parallel` are where they were.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_PREFIX = "onepass."
# Old path to new, below onepass.
MOVED = {
    "fusion.addresses": "fusion.graph_inputs",
    "fusion.give_back": "fusion.restore_lanes",
    "fusion.one_launch": "fusion.foreach_cat",
    "fusion.ragged_norm": "ops.norm.ragged.ragged_norm",
    "gradients.fp8_gradient": "product.fp8.gradient",
    "gradients.fp8_scales": "product.fp8.scales",
    "gradients.fp8_updates": "product.fp8.updates",
    "gradients.fp8_weight": "product.fp8.weight",
    "gpt.contradictions": "gpt.validate_config",
    "gpt.start": "gpt.parts",
    "integrations.huggingface.several": "ops.norm.compiled_projections",
    "integrations.huggingface.stand_in": "integrations.huggingface.probe",
    "kernels.activations": "ops.activation.activations",
    "kernels.adamw": "gradients.adamw_kernels",
    "kernels.adamw_formula": "gradients.adamw_formula",
    "kernels.attention_backward": "ops.attention.backward",
    "kernels.attention_formula": "ops.attention.formula",
    "kernels.attention_forward": "ops.attention.forward",
    "kernels.bias_activation": "ops.activation.kernels",
    "kernels.bias_activation_formula": "ops.activation.formula",
    "kernels.cross_entropy_formula": "ops.loss.formula",
    "kernels.dropout_add": "ops.dropout.kernels",
    "kernels.fp8_output": "runtime.fp8",
    "kernels.fp8_tile": "kernels.fp8",
    "kernels.losses": "ops.loss.reduction",
    "kernels.meeting": "kernels.grid_sync",
    "kernels.norm": "ops.norm.kernels",
    "kernels.norm_backward": "ops.norm.backward",
    "kernels.norm_formula": "ops.norm.formula",
    "kernels.norm_forward": "ops.norm.forward",
    "kernels.ragged_columns": "ops.norm.ragged.columns",
    "kernels.ragged_lanes": "ops.norm.ragged.lanes",
    "kernels.ragged_norm": "ops.norm.ragged.kernels",
    "kernels.random": "kernels.philox",
    "kernels.rope": "ops.attention.rope_kernels",
    "kernels.rope_formula": "ops.attention.rope_formula",
    "kernels.scaled": "ops.loss.head.autograd",
    "kernels.softmax_formula_rows": "ops.loss.row_formula",
    "kernels.softmax_pieces": "ops.loss.row_functions",
    "kernels.softmax_rows": "ops.loss.row_kernels",
    "kernels.softmax_whole_rows": "ops.loss.whole_row_kernels",
    "kernels.strips": "kernels.column_reduce",
    "nn.grouped": "ops.linear.grouped",
    "nn.routing": "ops.linear.routing",
    "ops.activation_linear": "ops.activation.activation_linear",
    "ops.bias_activation": "ops.activation.bias_activation",
    "ops.cross_entropy": "ops.loss.cross_entropy",
    "ops.dropout_add": "ops.dropout.dropout_add",
    "ops.linear_cross_entropy": "ops.loss.linear_cross_entropy",
    "ops.norm.fp8_kernels": "ops.norm.fp8",
    "ops.norm_linear": "ops.norm.norm_linear",
    "ops.rope": "ops.attention.rope",
    "parallel.adamw": "gradients.adamw",
    "parallel.buckets": "gradients.buckets",
    "parallel.collectives": "distributed.collectives",
    "parallel.deferred": "gradients.deferred",
    "parallel.main_grads": "gradients.main_grads",
    "parallel.master_weights": "gradients.master_weights",
    "parallel.module_tree": "gradients.module_tree",
    "parallel.product": "product.product",
    "parallel.sequence_parallel": "gradients.sequence_parallel",
    "parallel.tensor_parallel": "distributed.tensor_parallel",
    "parallel.vocab_shards": "distributed.collectives",
    "parallel.vocabulary": "distributed.collectives",
    "parallel.weights": "gradients.gathered_weights",
    "product.in_graph": "product.fp8.in_graph",
    "profiling.applies": "profiling.suggestions",
    "profiling.words": "profiling.verdict",
    "runtime.extras": "runtime.errors",
    "runtime.graphs": "gradients.graphs",
    "runtime.joined": "gradients.packed_params",
    "runtime.lang": "kernels.language",
    "runtime.lasting": "kernels.scratch",
    "runtime.launch": "kernels.launch",
    "runtime.layout": "kernels.layout",
    "runtime.main_grad": "gradients.main_grad",
    "runtime.main_grad_vectors": "gradients.vectors",
    "runtime.refused": "runtime.errors",
    "runtime.released": "gradients.releasable_storage",
    "runtime.scratch": "kernels.scratch",
    "runtime.seeds": "kernels.philox",
    "runtime.switch": "runtime.process_setting",
    "runtime.tables": "kernels.device_tables",
    "train.checkpoint.same": "train.checkpoint.compatibility",
    "train.start": "train.updates",
}
# Functions that documentation has named and that have another name now: of the new module, old name to new.
RENAMED = {"onepass.gradients.packed_params": {"joined": "concat", "lay_together": "pack", "lay_apart": "unpack"}}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.removeprefix(_PREFIX) in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = _PREFIX + MOVED[spec.name.removeprefix(_PREFIX)]
        warnings.warn(f"{spec.name} has moved to {new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        alias = ModuleType(spec.name, module.__doc__)
        names = vars(module)
        vars(alias).update({name: value for name, value in names.items() if not name.startswith("__")})
        vars(alias).update({old: names[now] for old, now in RENAMED.get(new, {}).items()})
        return alias

    def exec_module(self, module: ModuleType) -> None:
        """It is filled already."""


def renamed(old: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what answers to a method's old name."""

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        warnings.warn(f"{old} has the name {method.__name__} now", DeprecationWarning, stacklevel=2)
        return method(*args, **options)

    return run


def install() -> None:
    """Let `import` find them. Last in line: it costs nothing where a module is found."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
