"""Names that are rebound, restored and told about, on a package made up here."""

import sys
import warnings
from types import ModuleType

import pytest

from onepass.integrations import seams as module
from onepass.integrations.seams import SeamError, Seams
from onepass.runtime.batch_invariance import invariant


def theirs():
    return "theirs"


def ours():
    return "ours"


class Layer:
    def forward(self):
        return "theirs"


@pytest.fixture
def package(monkeypatch):
    """A package of three modules: one defines, one holds a copy, one holds the copy by another name."""
    made = {}
    for name in ("acme", "acme.ops", "acme.mlp", "acme.spec"):
        made[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made[name])
    made["acme.ops"].run = made["acme.mlp"].run = made["acme.spec"].Impl = theirs
    made["acme.ops"].Layer = Layer
    made["acme"].__version__ = "1.4.2"
    monkeypatch.setattr(module, "_warned", set())
    return made


def _seams():
    return Seams("acme", tested="1.4.2")


def test_copies_are_rebound_and_restored(package):
    seams = _seams()
    seams.rebind("acme.ops", "run", ours)
    assert package["acme.ops"].run is package["acme.mlp"].run is package["acme.spec"].Impl is ours
    late = sys.modules["acme.late"] = ModuleType("acme.late")
    late.run = package["acme.ops"].run  # imported after the install
    try:
        assert "ops.run: " in str(seams) and "and in mlp, spec" in str(seams) and "acme 1.4.2" in str(seams)
        seams.undo()
        assert package["acme.ops"].run is package["acme.mlp"].run is package["acme.spec"].Impl is late.run is theirs
    finally:
        del sys.modules["acme.late"]
    with pytest.raises(SeamError, match=r"nothing to undo in acme 1\.4\.2"):
        seams.undo()


def test_a_method_an_item_and_a_new_name(package):
    seams, before = _seams(), Layer.forward
    seams.rebind("acme.ops", "Layer.forward", ours)
    seams.rebind_item(sys.modules, "acme_wgrad", package["acme"], "acme_wgrad")
    seams.rebind("acme.ops", "flag", True, create=True)
    assert Layer.forward is ours and "acme_wgrad" in sys.modules and package["acme.ops"].flag is True
    seams.undo()
    assert Layer.forward is before and "acme_wgrad" not in sys.modules and not hasattr(package["acme.ops"], "flag")


@pytest.mark.parametrize("name", ["gone", "Layer.gone", "Gone.forward"])
def test_a_moved_name_names_version_and_seam_and_restores(package, name):
    seams = _seams()

    def install():
        with seams.all_or_nothing():
            seams.rebind("acme.ops", "run", ours)
            seams.rebind("acme.ops", name, ours)

    with pytest.raises(SeamError, match=rf"acme 1\.4\.2 has no acme\.ops\.{name}"):
        install()
    assert package["acme.ops"].run is package["acme.mlp"].run is theirs
    seams.rebind("acme.ops", name, ours, optional=True)
    assert f"left: ops.{name}: not in 1.4.2" in str(seams)
    _seams().rebind("acme.ops", "run", ours)  # the failed install is forgotten
    module._rebound.clear()


class Closed(ModuleType):
    """A module that takes no new value."""

    def __setattr__(self, name, value):
        if name == "run" and value is ours:
            raise RuntimeError("closed")
        super().__setattr__(name, value)


def test_what_fails_within_a_name_is_restored(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "acme.closed", Closed("acme.closed"))
    sys.modules["acme.closed"].run = theirs
    seams = _seams()
    with pytest.raises(RuntimeError, match="closed"), seams.all_or_nothing():
        seams.rebind("acme.ops", "run", ours)
    assert package["acme.ops"].run is package["acme.mlp"].run is package["acme.spec"].Impl is theirs
    assert not seams.bindings and not module._rebound


def test_modules_may_come_while_copies_are_looked_for(package, monkeypatch):
    class Growing(dict):
        """As modules that a finalizer imports while a list of them is made."""

        def items(self):
            raise RuntimeError("dictionary changed size during iteration")

        def copy(self):
            return dict(self)

    monkeypatch.setattr(module.sys, "modules", Growing(sys.modules))
    seams = _seams()
    seams.rebind("acme.ops", "run", ours)
    assert package["acme.mlp"].run is ours
    seams.undo()


def test_twice_is_refused_and_the_first_stays(package):
    first, second = _seams(), _seams()
    first.rebind("acme.ops", "run", ours)
    with pytest.raises(SeamError, match=r"acme\.ops\.run of acme 1\.4\.2 is rebound by onepass already"), second.all_or_nothing():
        second.rebind("acme.ops", "run", ours)
    assert package["acme.ops"].run is ours
    first.undo()


def test_undo_in_another_order(package):
    """Installs of different seams are undone in any order. A seam that other code has rebound since is not overwritten."""
    first, second = _seams(), _seams()
    first.rebind("acme.ops", "run", ours)
    second.rebind("acme.ops", "flag", True, create=True)
    package["acme.ops"].run = foreign = lambda: "foreign"
    with pytest.raises(SeamError, match=r"acme\.ops\.run of acme 1\.4\.2 was rebound after .*nothing was restored"):
        first.undo()
    assert package["acme.ops"].run is foreign and package["acme.mlp"].run is ours
    package["acme.ops"].run = ours
    first.undo()
    second.undo()
    assert package["acme.mlp"].run is theirs


def test_the_switch_is_on_until_undo(package):
    seams = _seams()
    with pytest.raises(SeamError, match=r"no acme\.ops\.walk"), seams.all_or_nothing():
        seams.make_invariant() or seams.rebind("acme.ops", "walk", ours)
    assert not invariant()
    first, second = _seams(), Seams("acme", tested="1.4.2")
    first.rebind("acme.ops", "run", ours)
    first.make_invariant()
    second.rebind("acme.ops", "Layer.forward", lambda self: "ours")
    second.make_invariant()
    assert "  onepass.batch_invariant(): on, of the process\n  left: other code of models: " in str(first)
    first.undo()
    assert invariant() and "on, of the process" not in str(first)
    second.undo()
    assert not invariant()


def test_a_newer_version_warns_once(package):
    with pytest.warns(UserWarning, match=r"acme 1\.4\.2 is newer than 1\.4\.1"):
        Seams("acme", tested="1.4.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Seams("acme", tested="1.4.1")


def test_a_package_that_is_not_there():
    with pytest.raises(SeamError, match=r"no-such-package is not installed, and no clone of it is on sys\.path"):
        Seams("no-such-package", tested="1")


def test_a_clone_on_the_path(tmp_path, monkeypatch):
    """Its modules say the version: nothing is installed, or another version. What they lack is named."""
    core = tmp_path / "cloned_acme" / "core"
    core.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    (core / "__init__.py").write_text("import no_such_dependency\n")
    with pytest.raises(SeamError, match="acme-core cannot be imported: No module named 'no_such_dependency'"):
        Seams("acme-core", "1.4.2", "cloned_acme.core")
    (core / "__init__.py").write_text("__version__ = '1.4.2+abc1234'\ndef run(): ...\n")
    seams = Seams("acme-core", "1.4.2", "cloned_acme.core")
    seams.rebind("cloned_acme.core", "run", ours)
    assert "acme-core 1.4.2+abc1234" in str(seams)
    seams.undo()


def test_a_module_without_a_version_is_asked_for_by_its_package(package):
    del package["acme"].__version__
    assert Seams("pytest", "99", "acme").version == pytest.__version__


def test_a_namesake_folder_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "namesake").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SeamError, match="namesake is not installed: what is named namesake on sys"):
        module._version("namesake", "namesake")
