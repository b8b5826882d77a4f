"""A package's names, bound again after a broken `install` or `undo`."""

import sys
from contextlib import contextmanager


@contextmanager
def bindings_kept(package, *classes):
    """Bind names of the package's modules, and attributes of classes, after the block as before it."""
    modules = [module for name, module in list(sys.modules.items()) if name == package or name.startswith(f"{package}.")]
    owners = [*modules, *classes]
    before, loaded = [dict(vars(owner)) for owner in owners], set(sys.modules)
    try:
        yield
    finally:
        for owner, names in zip(owners, before, strict=True):
            for name, value in list(vars(owner).items()):
                if name in names and names[name] is not value:
                    setattr(owner, name, names[name])
                elif name not in names and not name.startswith("__"):  # the compiler's
                    delattr(owner, name)
        for name in [name for name, module in sys.modules.items() if name not in loaded and module.__spec__ is None]:
            del sys.modules[name]  # made by hand
