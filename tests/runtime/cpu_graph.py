"""A CUDA graph's stand-in on a CPU: it records a call's operators, undoes what they wrote, and replays them without Python."""

import itertools
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onepass.gradients import graph_surroundings

_WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}
_CAPTURES = [
    f"onepass.{module}.is_capturing"
    for module in ("gradients.main_grad", "gradients.main_grads", "product.fp8.weight", "product.fp8.updates", "gradients.adamw")
]


class Graph:
    """Operators with the tensors that they read and wrote. A replay leaves the tensors' versions, as a GPU's does."""

    def __init__(self):
        self.calls, self.replays = [], 0

    def replay(self):
        self.replays += 1
        written = [tensor for *_, results in self.calls for tensor in results]
        versions = [tensor._version for tensor in written]
        with torch.no_grad():
            for func, args, kwargs, results in self.calls:
                for kept, new in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                    if kept.data_ptr() != new.data_ptr() and kept.numel():
                        kept.data.copy_(new)
        torch._C._autograd._unsafe_set_version_counter(tuple(written), tuple(versions))


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Recording(TorchDispatchMode):
    def __init__(self, graph, may_wait):
        super().__init__()
        self.graph, self.may_wait, self.before = graph, may_wait, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _WAITS and not self.may_wait:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(given.get(argument.name)):
                    storage = tensor.untyped_storage()
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        found = func(*args, **kwargs)
        self.graph.calls.append((func, args, kwargs, _tensors(found)))
        return found

    def undo(self):
        """Give what was there before the recording its values back."""
        for storage, values in self.before.values():
            storage.copy_(values)


def record(call, device, pool=None, may_wait=False):
    """Stands for `onepass.runtime.cuda_graph.capture`. `may_wait`: for ops that look at values, which they do on a CPU alone."""
    graph = Graph()
    recording = _Recording(graph, may_wait)
    generator = torch.get_rng_state()
    with ExitStack() as stack:
        for name in _CAPTURES:
            stack.enter_context(mock.patch(name, return_value=True))
        try:
            with recording:
                found = call()
        finally:
            recording.undo()
            torch.set_rng_state(generator)
    return graph, found


@contextmanager
def beside(device, stream=None):
    """Stands for `side_stream`."""
    yield stream


def in_training(monkeypatch, *modules, capture):
    """Let this CPU capture for these modules of `onepass.train`, of which the first captures."""
    monkeypatch.setattr(modules[0], "capture", capture)
    monkeypatch.setattr(modules[0], "side_stream", beside)
    for module in modules:
        monkeypatch.setattr(module, "free_memory", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))


def install(monkeypatch, module, may_wait=False):
    """Let this CPU capture for `module`. Return the list of what it captured."""
    captured, failed, handles = [], set(), itertools.count(1)

    def capture(call, device, pool):
        assert pool not in failed, "beginAllocateToPool: already recording to mempool_id"  # as PyTorch says
        try:
            captured.append(record(call, device, may_wait=may_wait))
        except BaseException:
            failed.add(pool)
            raise
        return captured[-1]

    monkeypatch.setattr(module, "capture", capture)
    monkeypatch.setattr(module, "side_stream", beside)
    monkeypatch.setattr(module, "free_memory", lambda device: None)
    owner = module if hasattr(module, "has_graphs") else graph_surroundings
    monkeypatch.setattr(owner, "has_graphs", lambda device: device.type == "cpu")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    return captured
