"""The public names of `onepass.gradients`: main_grad's buffers, optimizers, deferral. `onepass.distributed` has collectives."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onepass.gradients.adamw import AdamW
    from onepass.gradients.copy_engines import use_copy_engines
    from onepass.gradients.deferred import DeferredWgrad
    from onepass.gradients.fsdp import FSDPMainGrads
    from onepass.gradients.main_grads import MainGrads
    from onepass.gradients.master_weights import MasterWeights
    from onepass.gradients.sequence_parallel import reduce_sequence_parallel_grads
    from onepass.gradients.sharded_adamw import ShardedAdamW
    from onepass.gradients.step_in_backward import StepInBackward

__all__ = [
    "AdamW",
    "DeferredWgrad",
    "FSDPMainGrads",
    "MainGrads",
    "MasterWeights",
    "ShardedAdamW",
    "StepInBackward",
    "reduce_sequence_parallel_grads",
    "use_copy_engines",
]

_MODULES = {
    "AdamW": "adamw",
    "DeferredWgrad": "deferred",
    "FSDPMainGrads": "fsdp",
    "MainGrads": "main_grads",
    "MasterWeights": "master_weights",
    "ShardedAdamW": "sharded_adamw",
    "StepInBackward": "step_in_backward",
    "reduce_sequence_parallel_grads": "sequence_parallel",
    "use_copy_engines": "copy_engines",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use, as what only trainers need takes long to load."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"onepass.gradients.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
