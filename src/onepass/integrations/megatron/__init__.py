"""onepass in an unmodified megatron-core, from 0.17 on.

from onepass.integrations import megatron

installed = megatron.install()          # before or after megatron.core is imported, before models are built
print(installed)                        # what was replaced, and what was left and why
spec = megatron.gpt_layer_spec(config)  # instead of get_gpt_layer_local_spec: norms inside of the products after them
megatron.apply(model)                   # a built GPTModel or HybridModel: the loss without logits
installed.undo()
"""

from onepass.integrations.megatron.head import apply, output_processor
from onepass.integrations.megatron.install import install
from onepass.integrations.megatron.specs import gpt_layer_spec, hybrid_stack_spec, spec_provider

__all__ = ["apply", "gpt_layer_spec", "hybrid_stack_spec", "install", "output_processor", "spec_provider"]
