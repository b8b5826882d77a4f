"""Replaces parts of a Hugging Face transformers model by onepass ops, in one instance, until it is undone.

from onepass.integrations import huggingface

applied = huggingface.apply(model)  # an unmodified PreTrainedModel
print(applied)                      # what was replaced, what was not, and why
...                                 # train, evaluate, generate, save: as before
applied.undo()
"""

from onepass.integrations.huggingface.applied import Applied, apply

__all__ = ["Applied", "apply"]
