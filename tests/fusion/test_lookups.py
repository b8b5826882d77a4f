"""Embedding look-ups as one: what is found, values and gradients in fp64, and the ids that must still raise."""

import re
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from fusion.programs import NO_COPIES, check
from torch import nn
from torch._inductor.utils import run_and_get_code

import onepass

pytestmark = pytest.mark.usefixtures("machine")
EQUAL, RAGGED = [7] * 6, [3, 11, 5, 8, 4, 9]
FORWARD, BACKWARD = ("embedding", 6), ("embedding_dense_backward", 6)


class Features(nn.Module):
    """One table a column of ids. `options` are nn.Embedding's."""

    def __init__(self, rows, width=4, dtype=torch.float64, **options):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(count, width, dtype=dtype, **options) for count in rows)

    def forward(self, ids):
        columns = ids.unbind(1) if isinstance(ids, torch.Tensor) else ids
        return torch.cat([table(column) for table, column in zip(self.tables, columns, strict=True)], -1)


class Bags(Features):
    def forward(self, ids):  # [B, tables, ids of a bag]
        return torch.stack([table(bag).sum(1) for table, bag in zip(self.tables, ids.unbind(1), strict=True)], 1)


def ids_of(rows, *shape, dtype=torch.int64):
    torch.manual_seed(1)
    return torch.stack([torch.randint(count, (16, *shape), dtype=dtype) for count in rows], 1)


def found(fused):
    return Counter((group.operator, group.lanes) for group in fused.report().found)


@pytest.mark.parametrize(
    ("rows", "options"),
    [(EQUAL, {"padding_idx": 2}), (RAGGED, {}), (RAGGED, {"padding_idx": 0, "scale_grad_by_freq": True})],
    ids=str,
)
def test_a_table_a_column(rows, options):
    fused = check(Features(rows, **options), ids_of(rows))
    assert fused.inference == Counter([FORWARD])
    assert found(fused) == Counter({FORWARD: 2, BACKWARD: 1})  # with and without gradients
    assert all(group.copied == 0 for group in fused.report().found)


def test_the_report_counts_the_rows_that_are_read():
    (graph,) = check(Features([1000, 2000]), ids_of([1000, 2000]), grad=False).report().graphs
    assert graph.before.moved < 2 * 16 * (8 + 2 * 4 * 8) + 2 * 16 * 2 * 4 * 8 + 1


def test_bags_of_equal_lengths():
    fused = check(Bags(EQUAL), ids_of(EQUAL, 3), inference=False)
    assert {FORWARD, ("sum", 6), BACKWARD} <= set(found(fused))


def test_ids_in_tensors_of_their_own():
    """They are copied together, where that pays. The tables never are."""
    columns = [column.clone() for column in ids_of(RAGGED).unbind(1)]
    (graph,) = check(Features(RAGGED), columns, inference=False).report().graphs
    assert {group.operator: group.copied for group in graph.found} == {FORWARD[0]: 6 * 16 * 8, BACKWARD[0]: 0}


def test_a_copy_that_does_not_pay(machine):
    machine(NO_COPIES)
    columns = [column.clone() for column in ids_of(RAGGED).unbind(1)]
    fused = check(Features(RAGGED), columns, grad=False)
    assert not found(fused)
    assert any("would cost more than 5 launches" in refused.why for refused in fused.report().refused)


def test_one_id_in_every_table():
    """As a hash has it: the ids are shared, the tables are not. Ids of 32 bits, which an offset could pass."""

    class Hashed(Features):
        def forward(self, ids):
            return torch.cat([table(ids) for table in self.tables], -1)

    assert {FORWARD, BACKWARD} <= set(found(check(Hashed(EQUAL), ids_of(EQUAL, dtype=torch.int32)[:, 0], inference=False)))


def test_a_sum_of_look_ups():
    """Each table's gradient is the same tensor."""

    class Summed(Features):
        def forward(self, ids):
            return torch.stack([table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]).sum(0)

    assert {FORWARD, BACKWARD} <= set(found(check(Summed(RAGGED), ids_of(RAGGED), inference=False)))


def test_one_table_for_every_column():
    """Forward is one look-up. Gradients stay apart: the compiler adds each to the last, and holds two of them at a time."""

    class One(Features):
        def forward(self, ids):
            return torch.cat([self.tables[0](column) for column in ids.unbind(1)], -1)

    fused = check(One([20]), ids_of(EQUAL), inference=False)
    assert FORWARD in found(fused) and BACKWARD not in found(fused)
    assert any("used twice adds its gradients" in refused.why for refused in fused.report().refused)


def test_a_table_in_two_groups_lies_in_one_place():
    """Two look-ups in the same table, in two groups: moved for one, it would be moved back for the other at each call."""

    class Twice(Features):
        def forward(self, ids, others):
            first = [table(column) for table, column in zip(self.tables, ids.unbind(1), strict=True)]
            turned = [self.tables[i](column) for i, column in zip([3, 4, 5, 0, 1, 2], others.unbind(1), strict=True)]
            return torch.cat(first, -1), torch.stack(turned).tanh()

    fused = check(Twice(EQUAL), ids_of(EQUAL), ids_of(EQUAL), inference=False)
    assert any("lies beside those of other look-ups" in refused.why for refused in fused.report().refused)
    assert all(whole.moves <= 1 and not whole.why_copied for graph in fused.report().graphs for whole in graph.wholes)


def test_widths_are_groups_of_their_own():
    """Here they alternate, so that the ids of a group don't follow one another, and are copied."""
    module = Features([*EQUAL, *RAGGED])
    for table in module.tables[::2]:
        table.weight.data = torch.randn(table.num_embeddings, 8, dtype=torch.float64)
    assert found(check(module, ids_of([*EQUAL, *RAGGED]), inference=False)) == Counter({FORWARD: 2, BACKWARD: 2})


def test_a_frozen_table_has_no_gradient():
    module = Features(RAGGED)
    module.tables[2].weight.requires_grad_(False)
    fused, ids = onepass.fuse(module, compiler="none"), ids_of(RAGGED)
    fused(ids).square().sum().backward()
    ours = [table.weight.grad for table in module.tables]
    module.zero_grad()
    module(ids).square().sum().backward()
    for mine, table in zip(ours, module.tables, strict=True):
        assert (mine is None) == (table.weight.grad is None)
        assert mine is None or torch.equal(mine, table.weight.grad)
    assert ("embedding_dense_backward", 5) in found(fused)


def test_tables_that_are_no_parameters_stay():
    """Their memory is somebody else's, and a copy of all tables at each call is no gain."""

    def look_up(ids, *tables):
        return torch.cat([F.embedding(column, table) for table, column in zip(tables, ids.unbind(1), strict=True)], -1)

    tables = [torch.randn(count, 4, dtype=torch.float64, requires_grad=True) for count in RAGGED]
    fused = check(look_up, ids_of(RAGGED), *tables, grad=False)
    assert not fused.inference
    assert any("tables are no parameters" in refused.why for refused in fused.report().refused)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_an_id_outside_of_its_table_raises(wrong):
    """In the middle of all tables, where -1 and 5 would be a neighbour's row."""
    fused, ids = onepass.fuse(Features(RAGGED), compiler="none"), ids_of(RAGGED)
    fused(ids)
    ids[3, 2] = wrong  # of 5 rows
    with pytest.raises(IndexError, match="out of range"):
        fused(ids)


def test_the_tables_keep_their_names_and_share_one_storage():
    module, ids = Features(RAGGED), ids_of(RAGGED)
    fused = onepass.fuse(module, compiler="none")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fused(ids)
    after = fused.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    tables = [table.weight for table in module.tables]
    assert all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(tables))
    with torch.no_grad():
        tables[3].mul_(2)  # as an optimizer writes
    assert torch.equal(fused(ids), module(ids))


@pytest.mark.slow
def test_compiled():
    """As many loops for six tables as for two: of ids, look-up and cat forward, of zeros and sums of rows backward."""
    loops = []
    for rows in (RAGGED, RAGGED[:2]):
        module, ids = Features(rows, dtype=torch.float32, padding_idx=1), ids_of(rows)
        _, codes = run_and_get_code(check, module, ids, rtol=1e-5, atol=1e-6, compiler="inductor", inference=False)
        loops.append([len(re.findall(r"for\(int64_t x0", code)) for code in codes])
    assert loops[0] == loops[1] and 2 <= sum(loops[0]) <= 6
