"""onepass in a model of Hugging Face's transformers: one line, on one instance, that can be taken back.

from onepass.integrations import huggingface

applied = huggingface.apply(model)  # a PreTrainedModel, as it is
print(applied)                      # what was replaced, what was not, and why
...                                 # train, evaluate, generate, save: as before
applied.undo()
"""

from onepass.integrations.huggingface.applied import Applied, apply

__all__ = ["Applied", "apply"]
