"""What DeepSpeed's ZeRO-3 does to a model, without DeepSpeed and on one rank, after its 0.19.8.

Weights are empty but while a module runs. Its hooks gather its own, and those that its forward was seen to read of other modules.
Released memory is overwritten with NaN, where ZeRO's would be kept by what still refers to it.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F

HOOKS = "deepspeed.runtime.zero.parameter_offload"  # the module of DeepSpeed's hooks


class Zero3:
    """Partitions a model's weights, and gathers them by hooks."""

    def __init__(self, model):
        self.running, self.gathers = [], True
        for parameter in model.parameters():
            partition(parameter)
        for module in model.modules():
            module._parameters = GatheringDict(module._parameters, self)
            module.external = {}
            for name, hook in (("pre_", self.before), ("pre_", self.mark_inputs), ("", self.after), ("", self.mark_outputs)):
                getattr(module, f"register_forward_{name}hook")(hook_of(HOOKS, hook))

    def parameters_of(self, module):
        return [*(p for p in OrderedDict.values(module._parameters) if p is not None), *module.external.values()]

    def gather(self, module):
        for parameter in self.parameters_of(module):
            gather(parameter)

    def release(self, module):
        for parameter in self.parameters_of(module):
            release(parameter)

    def before(self, module, args):
        self.running.append(module)
        self.gather(module)

    def after(self, module, args, output):
        self.running.pop()
        self.release(module)

    def mark_outputs(self, module, args, output):
        """Gather before the outputs' backward."""
        return _mapped(output, lambda x: Mark.apply(x, lambda: self.gather(module)))

    def mark_inputs(self, module, args):
        """Release after the inputs' backward."""
        return _mapped(args, lambda x: Mark.apply(x, lambda: self.release(module)))


class GatheringDict(OrderedDict):
    """A module's parameters. One that another module's forward reads is gathered, and by that module's hooks from then on."""

    def __init__(self, parameters, zero):
        super().__init__(parameters)
        self.zero = zero

    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        if parameter is not None and not parameter.numel() and self.zero.running and self.zero.gathers:
            self.zero.running[-1].external[id(parameter)] = parameter
            gather(parameter)
        return parameter


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, then):
        ctx.then = then
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.then()
        return grad, None


class Linear(torch.autograd.Function):
    """F.linear, which saves no view of the weight. DeepSpeed has one, too."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() if bias is None else x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        asked, rows = ctx.needs_input_grad, grad.flatten(0, -2)
        dx = grad @ weight if asked[0] else None
        return dx, rows.t() @ x.flatten(0, -2) if asked[1] else None, rows.sum(0) if asked[2] else None


def partition(parameter):
    if not hasattr(parameter, "ds_shape"):  # tied
        parameter.ds_shape, parameter.ds_tensor = parameter.shape, parameter.detach().clone()
        parameter.data = parameter.new_empty(0)


def gather(parameter):
    if not parameter.numel():
        parameter.data = parameter.ds_tensor.clone()


@torch.no_grad()
def release(parameter):
    if parameter.numel():
        parameter.data.fill_(float("nan"))
        parameter.data = parameter.new_empty(0)


def patch_linear(monkeypatch):
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: Linear.apply(x, weight, bias))


def hook_of(module, function):
    """Return the function as one of a module of this name."""

    def hook(*args):
        return function(*args)

    hook.__module__ = module
    return hook


def _mapped(value, function):
    if isinstance(value, torch.Tensor):
        return function(value) if value.requires_grad else value
    if isinstance(value, tuple | list):
        return type(value)(_mapped(each, function) for each in value)
    if isinstance(value, dict):  # transformers' outputs
        for name in [*value]:
            value[name] = _mapped(value[name], function)
    return value
