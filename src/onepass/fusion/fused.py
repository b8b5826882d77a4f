"""fuse(fn_or_module): the same function or module, its groups of independent equal operators run as one.

Tracing is torch.compile's, and so are its rules: a new type or number of dimensions compiles anew, and what it can't trace
runs as written, with the pieces before and after it fused.
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
    """The same function or module with groups of independent, equal operators run as one, forward and backward.

        model = onepass.fuse(model)
        model(x)
        print(model.report())

        @onepass.fuse
        def features(x): ...

    Operators on slices of one tensor become one operator on the tensor, norms and activations of different widths one launch,
    linear layers of one input one product over weights that lie side by side in memory. What comes of it goes through inductor,
    as in torch.compile. Values and gradients are those of the function as written, to the last rounding: putting equal
    operators together changes no formula and adds no rounding. Compilers leave out roundings between the steps of a chain, and
    merged matrix products add in another order: both may change the last digits.

    A module stays one: the same parameters, hooks, state dict and type. It shares parameters, submodules and hooks with the
    module given, which goes on running as written; only train() and eval() of the outermost module are its own. Parameters that
    are used together may get new memory at the first call, of which each remains its own part. Where that can't be (somebody
    holds their memory) they are copied at each call, and the report says so.

    Args:
        fn_or_module: a function or nn.Module; without one, `fuse(...)` is a decorator.
        cuda_graph: replay each graph as a CUDA graph: for fixed shapes. A call's outputs are overwritten by the next call.
        compiler: "inductor"; "none" to run PyTorch's operators, fewer of them; "auto" for inductor wherever it can compile.
        fullgraph: raise where something can't be traced, instead of running it as written.
        dynamic: as torch.compile has it.
        options: of inductor.

    Returns:
        the fused function or module. Its `report(measure=False)` says what was fused and what wasn't, and why.
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
    """How to compile; picklable, where a compiled function is not."""

    cuda_graph: bool
    compiler: str
    fullgraph: bool
    dynamic: bool | None
    options: dict[str, Any] | None

    def compiled(self, fn: Callable[..., Any]) -> tuple[Callable[..., Any], FusionBackend]:
        from onepass.fusion.backend import FusionBackend  # a tenth of a second, which an import of onepass doesn't take

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
    """What a fused module is besides what it was."""

    __fused__ = True
    _fused_settings: _Settings
    _fused_backend: FusionBackend

    def report(self, measure: bool = False) -> FusionReport:
        """What was fused and what wasn't, and why; measure: also time each graph, as written and fused, on made-up inputs."""
        return self._fused_backend.reported(measure)

    def _compile_fused(self, settings: _Settings) -> None:
        self._fused_settings = settings
        call: Callable[..., Any] = self._call_impl

        def inlined(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

        # dynamo compiles no frame of PyTorch's own modules (nn.Sequential, say) unless a frame of somebody else's calls it.
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
