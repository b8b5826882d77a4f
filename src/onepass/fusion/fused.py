"""fuse(fn_or_module): run groups of independent, equal operators of a function or module as one operator.

Tracing is torch.compile's, with the same rules. A new dtype or number of dimensions recompiles. Code that can't be traced runs
as written, and the graphs before and after it are fused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from onepass.fusion.backend import FusionBackend
    from onepass.fusion.report import FusionReport


def fuse(
    fn_or_module: Any = None,
    *,
    cuda_graph: bool = False,
    compiler: str = "auto",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Return the same function or module, with groups of independent, equal operators run as one, forward and backward.

        model = onepass.fuse(model)
        model(x)
        print(model.report())

        @onepass.fuse
        def features(x): ...

    Operators on slices of one tensor become one operator on that tensor. Norms and activations of different widths become one
    launch. Linear layers of one input become one product over weights that lie side by side in memory, and look-ups in
    embedding tables of one width become one. Inductor compiles the result, as under torch.compile. Values and gradients are
    those of the function as written, to the last rounding: merging equal operators changes no formula and adds no rounding. Two
    things may change the last digits. Compilers omit roundings between the steps of a chain, and merged matrix products add in
    another order.

    A module keeps its parameters, hooks, state dict and type. It shares parameters, submodules and hooks with the given module,
    which still runs as written. Only the train() and eval() of the outermost module are separate. Parameters that are used
    together may get new memory at the first call: each becomes a view of a common storage. Where another tensor holds their
    memory, they are copied at each call instead, and the report says so.

    Args:
        fn_or_module: a function or nn.Module. Without it, `fuse(...)` returns a decorator.
        cuda_graph: replay each graph as a CUDA graph, for fixed shapes. The next call overwrites a call's outputs.
        compiler: "inductor"; "none", which runs fewer of PyTorch's operators; "auto", which is inductor wherever it can compile.
        fullgraph: raise where code can't be traced, instead of running it as written.
        dynamic: as in torch.compile.
        options: inductor's options.

    Returns:
        the fused function or module. Its `report(measure=False)` says what was fused, what was not, and why.
    """
    if fn_or_module is None:
        return functools.partial(
            fuse, cuda_graph=cuda_graph, compiler=compiler, fullgraph=fullgraph, dynamic=dynamic, options=options
        )
    if not callable(fn_or_module):
        raise TypeError(f"fn_or_module must be a function or an nn.Module, but is a {type(fn_or_module).__name__}")
    if getattr(fn_or_module, "__fused__", False):
        raise ValueError("fn_or_module is fused already: fuse what it was made of")
    if cuda_graph and dynamic:
        raise ValueError("cuda_graph=True is for fixed shapes, so dynamic=True can't go with it")
    settings = _Settings(cuda_graph, compiler, fullgraph, False if cuda_graph else dynamic, options)
    if isinstance(fn_or_module, nn.Module):
        return _fused_module(fn_or_module, settings)
    return _fused_function(fn_or_module, settings)


@dataclass(frozen=True)
class _Settings:
    """The arguments of `fuse`. They can be pickled, which a compiled function can't."""

    cuda_graph: bool
    compiler: str
    fullgraph: bool
    dynamic: bool | None
    options: dict[str, Any] | None

    def compiled(self, fn: Callable[..., Any]) -> tuple[Callable[..., Any], FusionBackend]:
        from onepass.fusion.backend import FusionBackend  # takes a tenth of a second: too long for `import onepass`

        backend = FusionBackend(self.compiler, self.cuda_graph, self.options)
        return torch.compile(fn, backend=backend, fullgraph=self.fullgraph, dynamic=self.dynamic), backend


def _fused_function(fn: Callable[..., Any], settings: _Settings) -> Callable[..., Any]:
    compiled, backend = settings.compiled(fn)

    @functools.wraps(fn)
    def fused(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    fused.report = backend.reported  # type: ignore[attr-defined]
    fused.__fused__ = True  # type: ignore[attr-defined]
    return fused


# ---- modules ----


class FusedModule(nn.Module):
    """The mixin of fused modules: the compiled call, its report, and pickling."""

    __fused__ = True
    _fused_settings: _Settings
    _fused_backend: FusionBackend

    def report(self, measure: bool = False) -> FusionReport:
        """Return what was fused, what was not, and why.

        `measure`: also time each graph on random inputs, as written and as fused.
        """
        return self._fused_backend.reported(measure)

    def _compile_fused(self, settings: _Settings) -> None:
        self._fused_settings = settings
        call: Callable[..., Any] = self._call_impl

        def inlined(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        # Dynamo skips frames of PyTorch's own modules, such as nn.Sequential, unless a frame from outside of PyTorch calls them.
        pytorchs = type(self).forward.__module__.startswith("torch.")
        self._compiled_call_impl, self._fused_backend = settings.compiled(inlined if pytorchs else call)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_compiled_call_impl", "_fused_backend"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._compile_fused(self._fused_settings)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_fused, (type(self).__mro__[2],), self.__getstate__()


@functools.cache
def _fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{cls.__name__}", (FusedModule, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _new_fused(cls: type[nn.Module]) -> nn.Module:
    fused_class = _fused_class(cls)  # type: ignore[arg-type]
    return fused_class.__new__(fused_class)


def _fused_module(module: nn.Module, settings: _Settings) -> nn.Module:
    fused = _new_fused(type(module))
    fused.__dict__.update(module.__dict__)
    fused._compile_fused(settings)  # type: ignore[operator]
    return fused
