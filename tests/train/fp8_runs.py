"""Small training runs with products in eight bits, on one rank and on several."""

from functools import partial

import torch
from parallel.fp8_layers import running
from train.checkpoint_runs import batch, configured, saved

from onepass.nn.precision import fp8_layers
from onepass.product.fp8 import product as product_fp8
from onepass.product.fp8 import weight as fp8_weight
from onepass.runtime.fp8 import E4M3, quantise, quantise_rows
from onepass.train import checkpoint
from onepass.train.layout import _groups
from onepass.train.setup import make

FP8 = {"fp8_format": "hybrid", "ffn_hidden_size": 32}  # a size that eight-bit products take
EXPERTS = {"num_moe_experts": 3, "moe_ffn_hidden_size": 32, "moe_router_topk": 2}
LAYOUTS = {
    "data": {},
    "data, bf16": {"params_dtype": "bf16", "release_main_grads": True},
    "zero": {"use_distributed_optimizer": True},
    "fsdp": {"use_fsdp": True, "recompute_granularity": "selective"},
    "fsdp, experts": {"use_fsdp": True, **EXPERTS},
    "fsdp, bf16": {"use_fsdp": True, "params_dtype": "bf16", "recompute_granularity": "full"},
    "pipeline": {"pipeline_model_parallel_size": 2, "global_batch_size": 4},
    "pipeline, mtp": {"pipeline_model_parallel_size": 2, "global_batch_size": 4, "mtp_num_layers": 1},
}


def states(trained):
    return {each.name: each.weight.fp8 for each in fp8_layers(trained.model) if hasattr(each.weight, "fp8")}


def scales(trained):
    """Return what all states hold, as one dict of tensors."""
    return {
        f"{name}.{key}": tensor.clone()
        for name, state in states(trained).items()
        for key, tensor in state.scales.state_dict().items()
    }


def weights(trained):
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained.model.parameters())
    return torch.cat([each.detach().float().flatten() for each in whole])


def go(trained, layout, first, last, evaluated=()):
    """Train these steps. Return losses and gradient norms. After the steps `evaluated` a batch is run without gradients."""
    found = []
    for step in range(first, last):
        loss, norm = trained.steps.run(batch(step, layout))
        trained.update.step(0.01 / (step + 1))
        found.append((loss.item(), norm.item()))
        if step in evaluated:
            trained.model.eval()
            found.append(trained.steps.loss(batch(99, layout)).item())
            trained.model.train()
    return found


def resumed(folder, layout, settings, evaluated=()):
    """Train two steps, save, and train two more; and train these two from what was saved. Return both runs' results."""
    config, options = configured(**FP8 | settings)
    trained = make(config, options, layout)
    go(trained, layout, 0, 2, evaluated)
    path = saved(folder, 2, trained, config, options, layout)
    other = make(config, options.replace(seed=5), layout)
    checkpoint.load(path, other, config, layout)
    again = saved(folder / "again", 2, other, config, options, layout)
    lines = [go(each, layout, 2, 4) for each in (trained, other)]
    return trained, other, lines, (path, again)


# ---- codes and weights ----


class FreshCodes:
    """Checks at each use of a weight's codes that they are those of its values."""

    def __init__(self, monkeypatch=None):
        self.used, self.stale = 0, []
        rows, transpose = fp8_weight.FP8Weight.rows, product_fp8.transposed_weight
        self._stock = (fp8_weight.FP8Weight, "rows", rows), (product_fp8, "transposed_weight", transpose)

        def checked_rows(state, weight):
            operand, factors = rows(state, weight)
            self._check(operand, weight.detach(), by_row=factors is None)
            return operand, factors

        def checked_transpose(weight, factors):
            operand = transpose(weight, factors)
            self._check(operand, weight.detach().mT, by_row=factors is None)
            return operand

        put = setattr if monkeypatch is None else monkeypatch.setattr
        put(fp8_weight.FP8Weight, "rows", checked_rows)
        put(product_fp8, "transposed_weight", checked_transpose)

    def undo(self):
        for where, name, stock in self._stock:
            setattr(where, name, stock)

    def _check(self, operand, x, by_row):
        self.used += 1
        again = quantise_rows(x, E4M3)[0] if by_row else quantise(x, 1 / operand.inverse, E4M3)
        if not operand.codes.view(torch.uint8).equal(again.view(torch.uint8)):
            self.stale.append(tuple(x.shape))


# ---- on several ranks ----


rank_context = partial(running, "formulas")


def found_on_ranks(group, folder):
    """Run each layout, and what is special about some. Return what each found on this rank, by name."""
    found = {}
    for name, settings in LAYOUTS.items():
        found[name] = case(folder / name, settings)
    counted = fp8_weight.version_of
    fp8_weight.version_of = lambda weight: (weight._version, 0)
    found["fsdp, steps are not counted"] = case(folder / "not counted", LAYOUTS["fsdp"])
    fp8_weight.version_of = counted
    found["loaded between steps"] = loaded_between_steps(folder / "loaded")
    return found | {"another layout": other_layout(folder / "data" / "checkpoints" / "step-00000002")}


def case(folder, settings):
    config, _ = configured(**FP8 | settings)
    layout = _groups(config, torch.device("cpu"))
    fresh = FreshCodes()
    trained, other, lines, _ = resumed(folder, layout, settings)
    fresh.undo()
    return {
        "lines": lines,
        "weights": [weights(each) for each in (trained, other)],
        "scales": [scales(each) for each in (trained, other)],
        "stale": fresh.stale,
        "used": fresh.used,
    }


def loaded_between_steps(folder):
    """Return which codes are stale after a load under fully_shard."""
    config, options = configured(**FP8 | {"use_fsdp": True, "fp8_recipe": "tensorwise"})
    layout = _groups(config, torch.device("cpu"))
    trained = make(config, options, layout)
    go(trained, layout, 0, 1)
    path = saved(folder, 1, trained, config, options, layout)
    go(trained, layout, 1, 2)
    trained.steps.loss(batch(99, layout))
    fresh = FreshCodes()
    checkpoint.load(path, trained, config, layout)
    trained.steps.loss(batch(99, layout))
    fresh.undo()
    assert fresh.used
    return fresh.stale


def other_layout(path):
    """Load a data-parallel run's checkpoint with fully_shard. Return the scales that it has there."""
    config, options = configured(**FP8 | {"use_fsdp": True})
    layout = _groups(config, torch.device("cpu"))
    trained = make(config, options, layout)
    checkpoint.load(path, trained, config, layout)
    return scales(trained)
