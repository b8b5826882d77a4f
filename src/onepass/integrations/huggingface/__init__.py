"""Replaces parts of a Hugging Face transformers model by onepass ops, in one instance, until it is undone.

from onepass.integrations import huggingface

applied = huggingface.apply(model)  # an unmodified PreTrainedModel
print(applied)                      # what was replaced, what was not, and why
...                                 # train, evaluate, generate, save: as before
applied.undo()

Importing it also registers `onepass.attention` and `onepass.experts` with transformers, as attn_implementation="onepass" and
experts_implementation="onepass".
"""

import importlib
from typing import Any

from onepass.integrations.huggingface.applied import Applied, apply
from onepass.integrations.huggingface.attention_interface import register as _register_attention
from onepass.integrations.huggingface.experts_interface import register as _register_experts

__all__ = ["Applied", "OnepassKernels", "apply", "kernel_mapping"]


def __getattr__(name: str) -> Any:
    if name in ("OnepassKernels", "kernel_mapping"):  # they import transformers
        return getattr(importlib.import_module(f"{__name__}.local_kernels"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register_attention()
_register_experts()
