"""Ranks of tests/parallel/test_fp8_ranks.py: tensor-parallel layers in eight bits. Each rank saves its results for the tests."""

import importlib
import os
import pickle
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from parallel.meeting import drawn, join
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.gradients import fp8_scales, fp8_weight
from onepass.kernels import fp8_cast, fp8_turn, scaled_product
from onepass.nn import MLP, ColumnParallelLinear, RowParallelLinear
from onepass.parallel import DeferredWgrad, MainGrads
from onepass.product import fp8 as fp8_product
from onepass.testing.mutants import mutate

S, B, K, N = 12, 3, 64, 128  # 36 rows, which are no multiple of 16, and neither is a rank's part
STEPS = 4
RECIPES = {
    "delayed": onepass.FP8Recipe(amax_history_len=2),
    "current, e4m3": onepass.FP8Recipe(scaling="current", format="e4m3"),
    "row": onepass.FP8Recipe(scaling="row"),
    "16-bit wgrad": onepass.FP8Recipe(wgrad=False),
}
BY_KERNELS = ("delayed", "row")  # without a GPU: the others' kernels are these


def run(rank, ranks, folder, backend):
    join(rank, ranks, folder, backend)
    world = dist.group.WORLD

    def of_all(*scenarios, kinds=RECIPES):
        keys = [(name, kind) for name in CASES for kind in kinds]
        return {scenario.__name__: {key: scenario(*key, world) for key in keys} for scenario in scenarios}

    kernels = of_all(layer, alone, kinds=BY_KERNELS)
    if backend == "gloo":
        use_formulas()
    found = of_all(layer, alone, again, frozen, gathered, flushed, order)
    found["kernels"] = kernels
    found["trained"] = {name: [trained(name, world, divide=divide) for divide in (True, False)] for name in CASES}
    for scenario in (shared_late, shared_zeros, looked_at, released, validated, modules, mutants):
        found[scenario.__name__] = scenario(world)
    found["no tokens"] = {name: layer(name, "delayed", world, sequence=0)["y"].shape for name in CASES}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def use_formulas():
    """Leave the interpreter, in which all of it would take a minute."""
    onepass.use_backend("torch")
    for module in (fp8_cast, fp8_turn, fp8_scales):
        module.triton_unsupported = lambda x: "the formula is wanted"


# ---- layers ----


def linear(x, p, function=onepass.linear, **options):
    return function(x, p["weight"], p["bias"], **options)


def norm_linear(x, p, **options):
    return onepass.norm_linear(x, p["norm_weight"], p["weight"], p["bias"], **options)


def after_residual(x, p, **options):
    y, _ = norm_linear(x, p, residual=x * 0.5, norm="layer_norm", **options)
    return y


def after_norm(x, p, **options):
    y, _ = norm_linear(x, p, return_norm_output=True, **options)
    return y


def activation_linear(x, p, **options):
    return onepass.activation_linear(x, p["weight"], p["bias"], "gelu", **options)


# name -> the call, whether it is row-parallel, whether the sequence is divided
CASES = {
    "column": (partial(linear, allreduce_dgrad=True), False, False),
    "column, sequence": (partial(linear, sequence_parallel=True), False, True),
    "row": (partial(linear, reduce_output=True), True, False),
    "row, sequence": (partial(linear, reduce_output=True, sequence_parallel=True), True, True),
    "norm": (norm_linear, False, False),
    "norm, sequence": (partial(norm_linear, sequence_parallel=True), False, True),
    "norm of a sum, sequence": (partial(after_residual, sequence_parallel=True), False, True),
    "norm returned, sequence": (partial(after_norm, sequence_parallel=True), False, True),
    "activation": (activation_linear, True, False),
    "activation, sequence": (partial(activation_linear, sequence_parallel=True), True, True),
}


def whole(sequence=S, step=0):
    """Return the unsharded x, parameters and incoming gradient. Later rows are larger: no rank knows the largest of all."""
    seeds = torch.Generator().manual_seed(3 + step)

    def numbers(*shape):
        return drawn(torch.randn, shape, generator=seeds).bfloat16()

    parameters = {"weight": numbers(N, K) / 8, "bias": numbers(N), "norm_weight": numbers(K)}
    sizes = drawn(lambda device: (torch.arange(sequence, device=device) * 2.0 / max(1, sequence)).exp2().bfloat16())
    sizes = sizes.view(-1, 1, 1)
    return numbers(sequence, B, K) * sizes, parameters, numbers(sequence, B, N) * sizes


def part(t, dim, rank, ranks):
    return t.chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format) if t.shape[dim] else t


def shard(name, group, sequence=S, step=0, divide=True):
    """Return this rank's x, parameters and incoming gradient. divide=False: all rows of them, as without sequence parallelism."""
    _, by_row, divided = CASES[name]
    rank, ranks = group.rank(), group.size()
    x, parameters, dy = whole(sequence, step)
    if by_row:
        x, parameters["weight"] = part(x, -1, rank, ranks), part(parameters["weight"], 1, rank, ranks)
        dy = part(dy, 0, rank, ranks) if divided and divide else dy
    else:
        x = part(x, 0, rank, ranks) if divided and divide else x
        parameters |= {key: part(parameters[key], 0, rank, ranks) for key in ("weight", "bias")}
        dy = part(dy, -1, rank, ranks)
    return x.requires_grad_(), {key: torch.nn.Parameter(t) for key, t in parameters.items()}, dy


def used(name, parameters):
    return {key: t for key, t in parameters.items() if key != "norm_weight" or "norm" in name}


def layer(name, kind, group, sequence=S, call=None):
    x, parameters, dy = shard(name, group, sequence)
    y = (call or CASES[name][0])(x, parameters, tp_group=group, precision=RECIPES[kind])
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, **{key: t.grad for key, t in used(name, parameters).items()}}


def alone(name, kind, group):
    """Return what this rank makes of its part of the weight without a group, with all rows of x and dy, and without the bias."""
    x, parameters, dy = shard(name, group, divide=False)
    parameters["bias"] = None
    y = CASES[name][0](x, parameters, tp_group=None, precision=RECIPES[kind])
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "weight": parameters["weight"].grad}


def again(name, kind, group):
    """Return the results under checkpointing, which runs forward twice."""

    def checkpointed(x, parameters, **options):
        return checkpoint(CASES[name][0], x, parameters, use_reentrant=False, **options)

    return layer(name, kind, group, call=checkpointed)


def frozen(name, kind, group):
    """Return the gradients where only x, or only the weight, requires one."""
    found = {}
    for asked in ("x", "weight"):
        x, parameters, dy = shard(name, group)
        x.requires_grad_(asked == "x")
        for key, parameter in parameters.items():
            parameter.requires_grad_(key == asked)
        CASES[name][0](x, parameters, tp_group=group, precision=RECIPES[kind]).backward(dy)
        found[asked] = {"x": x.grad, **{key: t.grad for key, t in parameters.items()}}
    return found


# ---- main_grad ----


def with_main_grad(parameters):
    for parameter in parameters.values():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(parameter.shape), False


def gathered(name, kind, group):
    """Return main_grad after two microbatches, and the flags."""
    x, parameters, dy = shard(name, group)
    with_main_grad(parameters)
    for _ in range(2):
        CASES[name][0](x, parameters, tp_group=group, precision=RECIPES[kind]).backward(dy)
    mine = used(name, parameters)
    return {
        "main_grads": {key: t.main_grad for key, t in mine.items()},
        "flags": all(t.grad_added_to_main_grad for t in mine.values()),
        "grads": [t.grad is None or not t.grad.any() for t in mine.values()],
    }


def flushed(name, kind, group, function=None, deferred=DeferredWgrad, recipe=None):
    """Return the weight's main_grad without and with a deferred product, which is made after the scales have changed."""
    call, found = CASES[name][0], {}
    for later in (None, deferred()):
        more = {} if function is None else {"function": function}
        more |= {"tp_group": group, "precision": recipe or RECIPES[kind]}
        x, parameters, dy = shard(name, group)
        end_step(partial(call, **more), x.detach().requires_grad_(), parameters, dy)
        with_main_grad(parameters)
        for each in (x, x.detach().mul(0.5).requires_grad_()):
            call(each, parameters, deferred=later, **more).backward(dy)
        main_grad = parameters["weight"].main_grad
        if later is not None:
            found |= {"before": main_grad.clone(), "bytes": later.nbytes, "kept": len(later)}
        for _ in range(2):  # the second has other scales
            with torch.no_grad():
                parameters["weight"].mul_(64)
            there = main_grad.clone()
            call(x.detach().mul(64).requires_grad_(), parameters, **more).backward(dy.mul(64))
            main_grad.copy_(there)
        if later is not None:
            later.flush()
        found["at once" if later is None else "later"] = main_grad
        found["x"] = x.grad
    return found


# ---- scales ----


def end_step(call, x, parameters, dy):
    """Let a history set the scales."""
    call(x, parameters).backward(dy)
    with torch.no_grad():
        parameters["weight"].mul_(1)
        call(x, parameters)


def trained(name, group, function=None, recipe=None, divide=True):
    """Train some steps with delayed scales. Return the outputs, and the state of the scales. divide=False: without the group."""
    _, parameters, _ = shard(name, group)
    options = {"tp_group": group if divide else None, "precision": recipe or RECIPES["delayed"]}
    options |= {} if function is None else {"function": function}
    outputs = []
    for step in range(STEPS):
        x, _, dy = shard(name, group, step=step, divide=divide)
        x.data.mul_((0.25, 1, 30, 2)[step])
        dy.mul_((1, 1000, 1e-3, 5)[step])
        for _ in range(2):
            y = CASES[name][0](x, parameters if divide else parameters | {"bias": None}, **options)
            y.backward(dy)
            outputs.append(y.detach())
        with torch.no_grad():
            parameters["weight"].mul_(-1.5)
    return {"y": outputs, "scales": parameters["weight"].fp8.scales.state_dict()}


def shared_late(group):
    """Return the scales of x after a call in which each rank has the x of its own, and one that gathers it."""
    x, parameters, dy = shard("column, sequence", group)
    scales = []
    for sequence in (False, True):
        options = {"tp_group": group, "sequence_parallel": sequence, "precision": RECIPES["delayed"]}
        y = onepass.linear(x, parameters["weight"], **options)
        if not sequence:  # a step is over
            with torch.no_grad():
                parameters["weight"].mul_(1)
            onepass.linear(x, parameters["weight"], **options)
        scales.append(parameters["weight"].fp8.scales.factors[0].clone())
    y.backward(dy)
    copied = pickle.loads(pickle.dumps(parameters["weight"].fp8.scales))
    return {"scales": scales, "y": y.detach(), "copied": copied.factors.equal(parameters["weight"].fp8.scales.factors)}


def shared_zeros(group):
    """Return y and x's gradient in each step: first of zeros alone, which are no history, then of small values."""
    found = {}
    for name in ("column, sequence", "row, sequence"):
        x, parameters, dy = shard(name, group)
        call, steps = partial(CASES[name][0], tp_group=group, precision=RECIPES["delayed"]), []
        for factor in (0.0, 2.0**-20, 2.0**-20, 2.0**-20, 2.0**-20):
            own = (x.detach() * factor).requires_grad_()
            y = call(own, parameters | {"bias": None})
            y.backward(dy * factor)
            steps.append({"y": y.detach(), "x": own.grad})
            with torch.no_grad():
                parameters["weight"].mul_(1)
        scales = parameters["weight"].fp8.scales
        found[name] = {"steps": steps, "started": list(scales.started), "counts": scales.counts()}
    return found


def looked_at(group):
    """Return whether a forward without gradients leaves the state of the scales as it is."""
    found = {}
    for name in CASES:
        x, parameters, dy = shard(name, group)
        call = partial(CASES[name][0], tp_group=group, precision=RECIPES["delayed"])
        y = call(x, parameters)
        y.backward(dy)
        scales = parameters["weight"].fp8.scales
        before = {key: t.clone() for key, t in scales.state_dict().items()}
        with torch.no_grad():
            same = call(x, parameters).equal(y)
            call(x * 100, parameters)
        found[name] = same, all(t.equal(before[key]) for key, t in scales.state_dict().items())
    return found


def released(group):
    """Return the main_grads of MainGrads whose memory comes and goes, at once and deferred."""
    own = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    found = {}
    for name in ("column, sequence", "row, sequence"):
        for put_off in (False, True):
            x, parameters, dy = shard(name, group)
            weight, later = parameters["weight"], DeferredWgrad() if put_off else None
            main_grads = MainGrads([weight], group=own, release=True)
            for _ in range(2):
                main_grads.zero_()
                call = partial(CASES[name][0], tp_group=group, precision="fp8", deferred=later)
                with main_grads.accumulate():
                    call(x, parameters).backward(dy)
                call(x, parameters).backward(dy)
                if later is not None:
                    later.flush()
                main_grads.finish()
            found[name, put_off] = weight.main_grad.clone()
    return found


# ---- what is sent ----


def order(name, kind, group):
    """Return what each part of a step does, in order: what is sent, as "start gather uint8", waits and products."""
    x, parameters, dy = shard(name, group)
    call = partial(CASES[name][0], tp_group=group, precision=RECIPES[kind])
    for _ in range(2):  # in the second ranks learn that there is a history
        end_step(call, x, parameters, dy)
    happened, here, scaled_mm = {}, [], scaled_product.scaled_mm

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            said = str(function)
            if "c10d_functional" in said:
                sent = f"{said.split('.')[1].split('_')[1]} {args[0].dtype}".replace("torch.", "")
                here.append("wait" if "wait" in said else f"start {sent}")
            elif ".mm" in said or ".addmm" in said or "scaled_mm" in said or "add_gradient" in said or "fp8_gradient" in said:
                here.append("product")
                with patch.object(scaled_product, "scaled_mm", scaled_mm):  # the same one, where the op calls cuBLASLt
                    return function(*args, **(kwargs or {}))
            return function(*args, **(kwargs or {}))

    def watched(*args, **options):  # cuBLASLt, which is called without PyTorch
        here.append("product")
        return scaled_mm(*args, **options)

    @contextmanager
    def watching(part):
        nonlocal here
        here = happened[part] = []
        with Watch(), patch.object(scaled_product, "scaled_mm", watched):
            yield

    with watching("forward"):
        y = call(x, parameters)
    with watching("backward"):
        y.backward(dy)
    later = DeferredWgrad()
    with_main_grad(parameters)
    for _ in range(2):
        call(x, parameters, deferred=later).backward(dy)
    with watching("flush"):
        later.flush()
    with torch.no_grad():
        parameters["weight"].mul_(2)
    with watching("refresh"):
        parameters["weight"].fp8.update(parameters["weight"])
    return happened


def validated(group):
    """Return what each rank says under validate() where one has updated its weight and the other has not, or has an odd part."""
    said = []

    def attempt(x, weight):
        try:
            with onepass.validate():
                onepass.linear(x, weight, tp_group=group, sequence_parallel=True, precision="fp8")
        except RuntimeError as error:
            said.append(str(error))

    x, parameters, _ = shard("column, sequence", group)
    weight = parameters["weight"].detach()
    x.requires_grad_()
    for _ in range(2):
        onepass.linear(x, weight, tp_group=group, sequence_parallel=True, precision="fp8")
        weight.mul_(1)
    onepass.linear(x, weight, tp_group=group, sequence_parallel=True, precision="fp8")
    if group.rank() == 1:
        weight.add_(1)
    attempt(x, weight)
    attempt(x, weight[: len(weight) - 8 * group.rank()].clone())
    return said


# ---- modules ----


def modules(group):
    """Return y, dx and the gradients of modules over the group in eight bits, and of the same in fp32 on one rank."""
    found = {}
    for sequence in (False, True):
        for name, module in (("column", ColumnParallelLinear), ("row", RowParallelLinear), ("mlp", MLP)):
            sizes = (K, N) if name != "row" else (N, K)
            torch.manual_seed(5)
            ours = module(*sizes, tp_group=group, sequence_parallel=sequence, precision="fp8")
            torch.manual_seed(5)
            plain = module(*sizes)
            x, dy = (drawn(torch.randn, S, B, size, generator=torch.Generator().manual_seed(7)) for size in sizes)
            dy = x.clone() if name == "mlp" else dy
            rows = partial(part, dim=0, rank=group.rank(), ranks=group.size()) if sequence else lambda t: t
            columns = partial(part, dim=-1, rank=group.rank(), ranks=group.size())
            own_x = (columns(x) if name == "row" else rows(x)).requires_grad_()
            y = ours(own_x)
            y = y[0] if isinstance(y, tuple) else y
            y.backward(columns(dy) if name == "column" else rows(dy))
            exact = plain(x.requires_grad_())
            exact = exact[0] if isinstance(exact, tuple) else exact
            exact.backward(dy)
            wanted = {
                "y": columns(exact.detach()) if name == "column" else rows(exact.detach()),
                "x": columns(x.grad) if name == "row" else rows(x.grad),
            }
            found[name, sequence] = {"y": (y.detach(), wanted["y"]), "x": (own_x.grad, wanted["x"])}
            if name != "mlp":
                weight = part(plain.weight.grad, 1 if name == "row" else 0, group.rank(), group.size())
                found[name, sequence]["weight"] = ours.weight.grad, weight
    return found


# ---- mutants ----

LINEAR = importlib.import_module("onepass.ops.linear.linear")  # the package has a function of this name
MUTANTS = {
    "nothing is shared": (fp8_weight, "FP8Weight.share", "if layout.gathers_x or layout.gathers_dy", "if layout is None"),
    "a first scale of one rank": (fp8_scales, "FP8Scales.measure", "role in self._groups", "role is None"),
    "later scales of one rank": (fp8_scales, "FP8Scales.refresh", "self._groups.items()", "()"),
    "own rows of dx elsewhere": (
        fp8_product, "FP8Call._gathered_output_gradient", "out=drows[M * rank : M * (rank + 1)]", "out=drows[:M].clone()",
    ),
    "scales of the first rows": (fp8_weight, "FP8Operand.part", "self.inverse[first:last]", "self.inverse[: last - first]"),
    "16-bit rows at another scale": (fp8_product, "_cast_as", "1 / own.inverse", "2 / own.inverse"),
    "scales of the step to come": (fp8_product, "_DeferredFP8Product.__init__", "dy.inverse.clone()", "dy.inverse"),
    "x's scale of the step to come": (fp8_product, "_DeferredFP8Product.__init__", "x.inverse.clone()", "x.inverse"),
    "y is not summed": (
        fp8_product, "FP8Product.forward", "start_sum(y, layout).wait()", "start_sum(y.clone(), layout).wait() * 0 + y",
    ),
    "x is this rank's": (fp8_product, "FP8Call.start_input", "coming.wait().turned()", "own.turned()"),
}  # fmt: skip


def judged(group, module):
    """Return the results of the mutant's `linear`, which the test compares with those of the real one."""
    recipe_class = module.product_for.__globals__["fp8_state"].__globals__["FP8Recipe"]
    found = {}
    for name in ("column, sequence", "row, sequence", "row"):
        for kind in ("delayed", "row", "16-bit wgrad"):
            own = recipe_class(**vars(RECIPES[kind]))
            call = partial(CASES[name][0], function=module.linear)
            x, parameters, dy = shard(name, group)
            call(x, parameters, tp_group=group, precision=own).backward(dy)
            found[name, kind] = [x.grad, parameters["weight"].grad]
            if kind == "delayed":
                found[name, kind] += trained(name, group, module.linear, own)["y"]
                found[name, kind].append(flushed(name, kind, group, module.linear, module.DeferredWgrad, own)["later"])
    return found


def mutants(group):
    """Return, by name, whether a mutant's results are all those of the real functions."""
    real, found = judged(group, LINEAR), {}
    for name, mutant in MUTANTS.items():
        with patch.dict(os.environ):
            os.environ.pop("TRITON_INTERPRET", None)  # the copy runs formulas
            broken = mutate(*mutant, entry=LINEAR)
        try:
            theirs = judged(group, broken)
        except RuntimeError:  # of both ranks alike
            found[name] = False
            continue
        found[name] = all(a.equal(b) for key in real for a, b in zip(real[key], theirs[key], strict=True))
    return found
