"""Every module holds its contract."""

import pytest

from onepass.testing.module_contract import CHECKS, modules


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_holds_the_contract(module, check):
    check(modules()[module])
