"""Names of another package that are rebound to ours, can be restored, and are told about.

    seams = Seams("megatron-core", tested="0.19.2", root="megatron.core")
    with seams.all_or_nothing():
        seams.rebind("megatron.core.fusions.fused_bias_gelu", "bias_gelu_impl", bias_gelu_impl)
        seams.leave("megatron.core...", "Apex's is there")
    print(seams)
    seams.undo()

Other modules of the package that hold the same object under any global name are rebound with it. `undo` finds those that were
imported later too. A name that moved upstream, one that is ours already and one that other code has rebound since raise
SeamError, which names the version and the seam. Then the package is as it was.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from onepass.kernels.invariant_product import BatchInvariance, batch_invariant

_ABSENT = object()
_rebound: dict[tuple[int, str], str] = {}  # seams that are ours now, over all packages, and who has rebound them
_warned: set[str] = set()


class SeamError(RuntimeError):
    """A name of another package can't be rebound, or restored."""


@dataclass
class Binding:
    """A name that was rebound."""

    owner: Any  # a module, a class, an instance, or a dict such as sys.modules
    name: str
    seam: str  # as it is printed
    before: Any  # the value before, or _ABSENT
    now: Any
    shared: bool = False  # whether other modules' names of the same object are rebound too
    copies: list[str] = field(default_factory=list)  # those modules

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def value(self) -> Any:
        own = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return own.get(self.name, _ABSENT)

    def assign(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            if value is _ABSENT:
                self.owner.pop(self.name, None)
            else:
                self.owner[self.name] = value
        elif value is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Seams:
    """Rebinds names of one package. `str` says which, and what was left and why; `undo` restores them."""

    def __init__(self, package: str, tested: str, root: str | None = None) -> None:
        """Args:
        package: its name where packages are installed from: "megatron-core".
        tested: the newest version tested. A newer one warns once.
        root: its modules' common name: "megatron.core". None: package.
        """
        self.package, self.root = package, root or package
        self.version = _version(package, self.root)
        self.bindings: list[Binding] = []
        self.left: list[tuple[str, str]] = []
        self._invariance: BatchInvariance | None = None
        if _numbers(self.version) > _numbers(tested) and package not in _warned:
            _warned.add(package)
            warnings.warn(
                f"{package} {self.version} is newer than {tested}, the newest that onepass was tested with", stacklevel=3
            )

    def rebind(
        self, module: str, name: str, value: Any, *, optional: bool = False, create: bool = False, copies: bool = True
    ) -> None:
        """Rebind module.name, where name may be "Class.method", and the copies of that object in the package's modules.

        Args:
            optional: a version without this name is no error; the name is printed as left.
            create: the name need not be there.
            copies: False rebinds this name alone.
        """
        seam = f"{module}.{name}"
        try:
            owner: Any = importlib.import_module(module)
            *path, name = name.split(".")
            for part in path:
                owner = getattr(owner, part)
            before = vars(owner).get(name, _ABSENT)
            if before is _ABSENT and not create:
                raise AttributeError(f"{owner.__name__} has no {name}")
        except (ImportError, AttributeError) as error:
            if optional:
                self.leave(seam, f"not in {self.version}")
                return
            raise SeamError(
                f"{self.package} {self.version} has no {seam}, which onepass rebinds ({error}); "
                f"nothing was changed: use a version that onepass was tested with, or switch this part off"
            ) from error
        self._bind(Binding(owner, name, seam, before, value), copies)

    def rebind_item(self, owner: dict[str, Any], name: str, value: Any, seam: str) -> None:
        """Rebind a dict's item, as sys.modules's."""
        self._bind(Binding(owner, name, seam, owner.get(name, _ABSENT), value))

    def leave(self, seam: str, why: str) -> None:
        self.left.append((seam, why))

    def make_invariant(self) -> None:
        """Turn `onepass.batch_invariant()` on, for the whole process, until `undo`."""
        self._invariance = batch_invariant()
        self.leave("other code of models", "its bits may depend on the batch: docs/equal-bits.md")

    def _bind(self, binding: Binding, copies: bool = False) -> None:
        if binding.key in _rebound:
            raise SeamError(
                f"{binding.seam} of {self.package} {self.version} is rebound by onepass already: undo() that install first"
            )
        binding.shared = copies and isinstance(binding.owner, ModuleType) and callable(binding.before)
        places = list(self._copies(binding.before)) if binding.shared else []
        places = [place for place in places if place != (binding.owner, binding.name)]
        _rebound[binding.key] = self.package
        self.bindings.append(binding)  # what raises from here on is restored
        binding.assign(binding.now)
        for copy, name in places:
            setattr(copy, name, binding.now)
            binding.copies.append(copy.__name__)

    def _copies(self, value: Any) -> Iterator[tuple[ModuleType, str]]:
        """Yield modules of the package and their global names that are this object."""
        for title, module in sys.modules.copy().items():  # list() may collect garbage, and that may import
            if isinstance(module, ModuleType) and (title == self.root or title.startswith(self.root + ".")):
                for name in [name for name, held in vars(module).copy().items() if held is value]:
                    yield module, name

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Restore what was rebound in this block if it raises."""
        try:
            yield
        except BaseException:
            self._restore()
            raise

    def undo(self) -> None:
        """Restore every name. Raise SeamError, and restore none, where other code has rebound one of them since."""
        if not self.bindings:
            raise SeamError(f"there is nothing to undo in {self.package} {self.version}: it has been undone already")
        for binding in self.bindings:
            if binding.value() is not binding.now:
                raise SeamError(
                    f"{binding.seam} of {self.package} {self.version} was rebound after onepass's install, "
                    f"to {_described(binding.value())}: undo that first; nothing was restored"
                )
        self._restore()

    def _restore(self) -> None:
        for binding in reversed(self.bindings):
            binding.assign(binding.before)
            del _rebound[binding.key]
            if binding.shared:
                for copy, name in self._copies(binding.now):
                    setattr(copy, name, binding.before)
        self.bindings.clear()
        if self._invariance is not None:
            self._invariance.undo()
            self._invariance = None

    def __str__(self) -> str:
        def short(module: str) -> str:
            return module.removeprefix(self.root + ".")

        lines = [f"onepass in {self.package} {self.version}"]
        for binding in self.bindings:
            copies = f" (and in {', '.join(map(short, binding.copies))})" if binding.copies else ""
            lines.append(f"  {short(binding.seam)}: {_described(binding.now)}{copies}")
        lines += ["  onepass.batch_invariant(): on, of the process"] if self._invariance is not None else []
        lines += [f"  left: {short(seam)}: {why}" for seam, why in self.left]
        return "\n".join(lines)


def _described(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    name = getattr(value, "__qualname__", getattr(value, "__name__", type(value).__qualname__))
    return f"{getattr(value, '__module__', type(value).__module__)}.{name}"


def _version(package: str, root: str) -> str:
    """Return the version of the modules that are imported: a clone on sys.path has no metadata, or those of another version."""
    try:
        version = getattr(importlib.import_module(root), "__version__", None)
    except ImportError as error:
        absent = error.name is not None and f"{root}.".startswith(f"{error.name}.")
        what = "is not installed, and no clone of it is on sys.path" if absent else f"cannot be imported: {error}"
        raise SeamError(f"{package} {what}") from error
    try:
        return version if isinstance(version, str) else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise SeamError(f"{package} is not installed: what is named {root} on sys.path has no version") from error


def _numbers(version: str) -> tuple[int, ...]:
    """Return (0, 19, 2) of "0.19.2rc1"."""
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
