"""Train one model with one contender in its own process, so that a peer's patches and memory end with it.

    python -m onepass.bench.huggingface_process '{"case": ..., "contender": ...}' FILE

The model is made from a seed in bf16. AdamW trains the bf16 weights on random tokens from a seed: the same in every process. It
is torch's, fused, and for onepass that of `Applied.optimizer`, but for one contender. The process first compares the first step's
gradients with eager's in fp32. Then it records the losses of the steps. The learning rate rises at first: otherwise a difference
in the last bit grows to a hundredth. Then it runs rounds of steps on one batch for time and peak memory. Eager trains twice: its
distance from itself shows what a distance means. FILE gets the result, or the error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from onepass.bench.huggingface_cases import (
    AXOLOTL,
    COMPILED,
    EAGER,
    LIGER,
    MINE,
    OURS,
    OURS_COMPILED,
    OURS_FP8,
    OURS_GRAPHED,
    OURS_PACKED,
    OURS_TORCHS_ADAMW,
    UNSLOTH,
    ModelCase,
    ModelResult,
)
from onepass.bench.peers import imported, unsloth_lora
from onepass.gradients.graphed_step import graphed_step
from onepass.parallel import ShardedAdamW
from onepass.profiling.record import run, synchronize

_ROUNDS, _WARM = 5, 3
_ROUND_US, _FEWEST, _MOST = 1e6, 2, 20  # a round's length, and the fewest and the most steps in it
_RATE, _RISING = 1e-4, 50  # the learning rate, and in how many steps it is reached
_OF_B = 0.02  # of an adapter's b as PEFT draws it


def main(asked: str, file: str) -> None:
    told = json.loads(asked)
    name, device = told["contender"], torch.device(told["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        result = measured(ModelCase(**told["case"]), name, device, told["steps"], told["quick"])
    except Exception as error:  # a row of the table shows it
        result = ModelResult(name, "error", f"{type(error).__name__}: {error}".strip().splitlines()[0])
    written = Path(file)
    written.with_suffix(".part").write_text(json.dumps(asdict(result)))
    written.with_suffix(".part").rename(written)  # atomic: a reader never sees a partial file


def measured(case: ModelCase, contender: str, device: torch.device, steps: int, quick: bool) -> ModelResult:
    batches = tokens(case, device)
    first = next(batches)
    exact = exact_gradients(case, first)
    gc.collect()  # frees the fp32 model, which may have reference cycles, before peak memory is measured
    model = new_model(case, device, case.ours if contender in MINE else None)
    trainer = _Trainer(case, model, contender)
    result = ModelResult(contender)
    begun = time.perf_counter()
    losses = [trainer.gradients(first)]
    result.errors = errors(model, exact)
    del exact
    trainer.update()
    synchronize()
    result.first_s = time.perf_counter() - begun
    losses += [trainer.step(next(batches)) for _ in range(steps - 1)]
    result.losses = [float(loss) for loss in losses]
    _time(result, lambda: trainer.step(first), device, quick)
    if contender == EAGER:
        del model, trainer
        gc.collect()
        result.losses_again = _losses_again(case, device, steps)
    return result


def _losses_again(case: ModelCase, device: torch.device, steps: int) -> list[float]:
    """Return eager's losses of a second training. On a GPU they differ: sums have no fixed order there."""
    batches, trainer = tokens(case, device), _Trainer(case, new_model(case, device), EAGER)
    losses = [trainer.step(next(batches)) for _ in range(steps)]
    return [float(loss) for loss in losses]


# ---- model and data ----


def new_model(case: ModelCase, device: torch.device, attention: str | None = None) -> Any:
    config = imported("transformers", "AutoConfig").for_model(case.family, **case.sizes, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        make = imported("transformers", "AutoModelForCausalLM").from_config
        model = make(config, dtype=torch.bfloat16, attn_implementation=attention or case.attention).train()
        if case.four_bits:
            _in_four_bits(model, device)
        if case.lora_rank:
            model = _with_lora(model, case)
    if case.checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _in_four_bits(model: Any, device: torch.device) -> None:
    """Put bitsandbytes' layers, of NF4 with double quantisation, in place of the model's, but for its head."""
    Linear4bit, Params4bit = imported("bitsandbytes.nn", "Linear4bit"), imported("bitsandbytes.nn", "Params4bit")
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head:
            made = Linear4bit(layer.in_features, layer.out_features, bias=layer.bias is not None, quant_type="nf4", device="meta")
            made.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4").to(device)
            made.bias, made.compute_dtype = layer.bias, torch.bfloat16
            model.set_submodule(name, made)


def _with_lora(model: Any, case: ModelCase) -> Any:
    """Return the model with PEFT's adapters, both random: a first gradient of a is 0 where b is.

    b's numbers are those of an adapter some hundred steps old. PEFT makes adapters in bf16 before it keeps them in fp32. Where b
    is as large as it draws it, up to .25, bf16 doesn't show a step's change, and losses of products in bf16 are others.
    """
    options = {"r": case.lora_rank, "lora_alpha": 2 * case.lora_rank, "target_modules": "all-linear", "init_lora_weights": False}
    config = imported("peft", "LoraConfig")(**options, task_type="CAUSAL_LM")
    made = imported("peft", "get_peft_model")(model, config, autocast_adapter_dtype=case.adapters == "fp32")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.mul_(_OF_B)
    return made


def tokens(case: ModelCase, device: torch.device) -> Iterator[Tensor]:
    """Yield batches, the same on every device. Few tokens are frequent, like words, so that there is something to learn."""
    random, shape = torch.Generator().manual_seed(1), (case.sequences, case.length)
    while True:
        ranks = case.sizes["vocab_size"] ** torch.rand(shape, generator=random)
        yield (ranks.long() - 1).to(device)


class ModelInputs:
    """Makes a model's arguments of batches. What all batches have alike is made once: a step copies nothing from the host.

    Args:
        packed: the chats follow each other in one row, without padding.
    """

    def __init__(self, case: ModelCase, device: torch.device, packed: bool) -> None:
        positions, lengths = torch.arange(case.length, device=device), case.lengths
        here = positions < torch.tensor(lengths, device=device)[:, None]  # not padding
        self.ignored = ~here | (positions < case.ignored * case.length)
        self._places = None
        self._options: dict[str, Any] = {} if case.chats is None else {"attention_mask": here.long()}
        if packed:
            self.ignored[:, 0] = True  # which the chat before would predict
            self._places = here.flatten().nonzero().squeeze(1)
            ends, longest = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), max(lengths)
            self._options = {"position_ids": positions.expand_as(here).flatten()[self._places][None]}
            self._options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}

    def of(self, batch: Tensor) -> dict[str, Any]:
        labels = batch.masked_fill(self.ignored, -100)
        if self._places is not None:
            batch, labels = (x.flatten()[self._places][None] for x in (batch, labels))
        return {"input_ids": batch, "labels": labels, **self._options}


# ---- contenders ----


def _onepass(model: Any, precision: str | None = None) -> Any:
    """Apply onepass. Frozen weights of products in eight bits are codes, in both layouts."""
    from onepass.integrations.huggingface import apply

    frozen = precision is not None and not all(parameter.requires_grad for parameter in model.parameters())
    apply(model, precision=precision, frozen_layouts=2 if frozen else None)
    return model


def _liger(model: Any) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
    imported("liger_kernel.transformers", "_apply_liger_kernel_to_instance")(model=base)
    return model


def _with_lora_functions(model: Any, kernels: Any) -> Any:
    """Let Liger's kernels and a package's functions of layers with LoRA run a Llama, as the package patches it."""
    _liger(model)
    for layer in model.get_base_model().model.layers:
        _with_functions_of(layer.self_attn, kernels)
        layer.mlp.forward = partial(kernels.apply_lora_mlp_swiglu, layer.mlp)
    return model


def _with_functions_of(attention: Any, kernels: Any) -> None:
    """The model's code calls q_proj, then k_proj and v_proj: the first makes all three."""
    waiting: dict[str, Tensor] = {}

    def q_proj(x: Tensor) -> Tensor:
        q: Tensor
        q, waiting["k"], waiting["v"] = kernels.apply_lora_qkv(attention, x)
        return q

    attention.q_proj.forward = q_proj
    attention.k_proj.forward = lambda x: waiting.pop("k")
    attention.v_proj.forward = lambda x: waiting.pop("v")
    attention.o_proj.forward = partial(kernels.apply_lora_o, attention)


def _compiled(model: Any) -> Any:
    return torch.compile(model, dynamic=False)


_MAKE: dict[str, Callable[[Any], Any]] = {
    COMPILED: _compiled,
    LIGER: _liger,
    UNSLOTH: lambda model: _with_lora_functions(model, unsloth_lora()),
    AXOLOTL: lambda model: _with_lora_functions(model, importlib.import_module("axolotl.kernels.lora")),
    OURS: _onepass,
    OURS_TORCHS_ADAMW: _onepass,
    OURS_GRAPHED: _onepass,
    OURS_COMPILED: lambda model: _compiled(_onepass(model)),
    OURS_FP8: lambda model: _onepass(model, "fp8"),
    OURS_PACKED: _onepass,
}


def as_contender(model: nn.Module, contender: str) -> Any:
    """Return the model as a contender runs it."""
    return _MAKE.get(contender, lambda model: model)(model)


class _Trainer:
    def __init__(self, case: ModelCase, model: nn.Module, contender: str) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.inputs = ModelInputs(case, trained[0].device, contender == OURS_PACKED)
        self.run = as_contender(model, contender)
        graphed = contender == OURS_GRAPHED
        rate = torch.tensor(_RATE, device=trained[0].device) if graphed else _RATE  # a tensor is written in place
        ours = contender in MINE and contender != OURS_TORCHS_ADAMW  # what Applied.optimizer returns
        self.optimizer = ShardedAdamW(trained, lr=rate) if ours else torch.optim.AdamW(trained, lr=rate, fused=True)
        self.train = graphed_step(self._train) if graphed else self._train
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1 / _RISING, total_iters=_RISING - 1)

    def gradients(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.run(**self.inputs.of(batch)).loss
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def _train(self, **inputs: Any) -> Tensor:
        loss: Tensor = self.run(**inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.train(**self.inputs.of(batch))
        self.schedule.step()
        return loss


# ---- measurements ----


def exact_gradients(case: ModelCase, batch: Tensor) -> dict[str, Tensor]:
    """Return eager's fp32 gradients from the same bf16 weights. To fit, take one sequence at a time and recompute layers."""
    model = new_model(case, batch.device, "eager" if case.attention == "flex_attention" else None).float()
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # the second is the older name
    labels = ModelInputs(case, batch.device, packed=False).of(batch)["labels"]
    kept = (labels[:, 1:] != -100).sum(1)
    for sequence, of_sequence, share in zip(batch.split(1), labels.split(1), kept / kept.sum(), strict=True):
        with without_packages(model):
            (model(input_ids=sequence, labels=of_sequence).loss * share).backward()  # padding after a chat is not seen by it
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def without_packages(model: nn.Module) -> Iterator[None]:
    """Let transformers' own functions run in place of those of packages that it finds, such as flash-linear-attention."""
    with ExitStack() as stack:
        for name in {type(module).__module__ for module in model.modules()}:
            there = vars(sys.modules[name])
            stock = {key: made.__wrapped__ for key, made in there.items() if _chooses(made)}
            stack.enter_context(mock.patch.dict(there, stock))
        yield


def _chooses(made: object) -> bool:
    """Whether this is a function that chose between its own code and a package's when transformers was imported."""
    chosen_in = getattr(made, "__globals__", {}).get("__name__")
    return chosen_in == "transformers.integrations.hub_kernels" and hasattr(made, "__wrapped__")


def errors(model: nn.Module, exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the gradients' relative RMS error for each kind of parameter, over all layers."""
    of_kind: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = re.sub(r"\.\d+\.", ".*.", name)
        of_kind.setdefault(kind, []).append(_error(parameter.grad, exact[name]))
    return {kind: (sum(value**2 for value in values) / len(values)) ** 0.5 for kind, values in of_kind.items()}


def _error(grad: Tensor | None, exact: Tensor) -> float:
    if grad is None:
        raise RuntimeError("a parameter has no gradient")
    return float((grad.float() - exact).norm() / exact.norm().clamp_min(1e-30))


def _time(result: ModelResult, step: Callable[[], object], device: torch.device, quick: bool) -> None:
    for _ in range(_WARM):
        step()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    once, _ = run(step, 1)
    count = _FEWEST if quick else max(_FEWEST, min(_MOST, int(_ROUND_US / once)))
    rounds = [run(step, count) for _ in range(_ROUNDS)]
    times = [wall / 1e3 for wall, _ in rounds]
    result.ms, result.ms_range = statistics.median(times), [min(times), max(times)]
    result.cpu_ms = statistics.median(host for _, host in rounds) / 1e3
    if device.type == "cuda":
        result.peak_gib = torch.cuda.max_memory_allocated(device) / 2**30


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded: models are made from their configurations
    main(*sys.argv[1:])
