"""Modules divided over ranks, against the undivided module in fp64. The processes run parallel_modules_ranks.py."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parallel import parallel_modules_ranks
from parallel.parallel_modules_ranks import ALIKE, CASES, SUM, ColumnParallelLinear, model
from parallel.worlds import PAIRS, found_by

from onepass.nn import sharded_state_dict
from onepass.nn.sharding import Division, part_of, range_of

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
sizes = pytest.mark.parametrize("ranks", (2, 4))
cases = pytest.mark.parametrize("name", CASES)


class Found(dict):
    """What each rank found, by the number of ranks: two, and then four, where there are as many GPUs."""

    def __init__(self, backend, folder):
        self.folder = folder
        for ranks in (2, 4):
            if backend == "gloo" or ranks <= torch.cuda.device_count():
                self[ranks] = found_by(parallel_modules_ranks.run, (backend, ranks), folder)

    def __missing__(self, ranks):
        pytest.skip(f"needs {ranks} GPUs")


@pytest.fixture(scope="module", params=PAIRS)
def found(request, tmp_path_factory):
    return Found(request.param[0], tmp_path_factory.mktemp("ranks"))


def together(parts, dim):
    if dim == ALIKE:
        assert all(torch.equal(one, parts[0]) for one in parts)
        return parts[0]
    return sum(parts) if dim == SUM else torch.cat(parts, dim)


def compare(found, name, undivided):
    """The whole made of the ranks' parts is what the undivided module has; its start to the last bit."""
    for key, (expected, dim) in undivided[name].items():
        parts = [rank[key][0] for rank in found]
        assert {rank[key][1] for rank in found} == {dim}
        got = together(parts, dim)
        assert got.dtype == expected.dtype
        if key.startswith(("start", "random state", "bias left")):
            assert torch.equal(got, expected), key
        else:
            tight = {"rtol": 1e-12, "atol": 1e-12} if got.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(got, expected, **tight, msg=lambda said, key=key: f"{key}: {said}")


@sizes
@cases
def test_as_undivided(found, name, ranks):
    compare([rank[name] for rank in found[ranks]], name, found[ranks][0]["undivided"])


def test_in_groups_of_two_of_four(found):
    for pair in (found[4][:2], found[4][2:]):
        compare([rank["pair"] for rank in pair], "mlp, sequence", found[4][0]["undivided"])


@sizes
def test_the_undivided_start_is_torchs(ranks):
    torch.manual_seed(5)
    layer = ColumnParallelLinear(12, 16)
    torch.manual_seed(5)
    assert torch.equal(layer.weight, torch.nn.Linear(12, 16).weight)


@sizes
def test_ids_of_nobody(found, ranks):
    for rank in found[ranks]:
        mine = rank["nobody's ids"]
        assert mine["y"].isnan().all(1).tolist() == [False, True, False, True, False]
        assert mine["said"].startswith("ids must be from 0 to 10")
    dweight = torch.cat([rank["nobody's ids"]["dweight"] for rank in found[ranks]])
    assert dweight[:, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 3, 0, 0, 2]


@sizes
def test_a_copy_has_the_same_group(found, ranks):
    assert all(rank["copied"] for rank in found[ranks])


def test_compiled_without_a_break(found):
    for rank in found[2]:
        for got, expected in zip(*rank["compiled"], strict=True):
            torch.testing.assert_close(got, expected)


@sizes
def test_errors_say_what_to_do_before_anything_is_sent(found, ranks):
    K, N = parallel_modules_ranks.K, parallel_modules_ranks.N
    for number, rank in enumerate(found[ranks]):
        outputs, blocks, inputs, part, whole, column, weight, sequence, group, said, embedding = rank["errors"]
        assert outputs == f"output_size must be a multiple of {ranks}, the size of tp_group, but is {ranks * 4 + 1}"
        assert blocks == f"output_size must be a multiple of {2 * ranks}, the size of tp_group times stride, but is {ranks}"
        assert inputs == f"input_size must be a multiple of {ranks}, the size of tp_group, but is {ranks * 4 + 1}"
        assert part.startswith(f"x's last dimension must be {K // ranks}, this rank's part of input_size, but x has")
        assert whole.startswith(f"x's last dimension must be {K}, input_size, but x has shape")
        assert column.startswith(f"x's last dimension must be {K}, input_size, but x has shape")
        assert weight == f"weight must have shape {(N // ranks, K)}, this rank's part, but has {(N, K)}"
        assert sequence.startswith("ids must have shape [batch, sequence] for reduce_scatter_embeddings, its sequence a multiple")
        assert group.startswith("tp_group must be None or a torch.distributed.ProcessGroup that has this rank, but is ")
        assert said == f"ColumnParallelLinear({K}, {N}, bias=True, tp={ranks}, sequence_parallel=True)"
        vocabulary = range_of(11, number, ranks)
        assert embedding == (
            f"VocabParallelEmbedding(11, {K}, vocab_range={vocabulary}, tp={ranks}, reduce_scatter_embeddings=True)"
        )


@pytest.mark.parametrize("size", (1, 4, 5, 11, 12))
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_parts_are_torchs_chunks(size, ranks):
    whole = torch.randn(3, size)
    parts = [part_of(whole, Division(1, size), rank, ranks) for rank in range(ranks)]
    chunks = whole.chunk(ranks, 1)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, chunks, strict=False))
    assert not any(mine.numel() for mine in parts[len(chunks) :])


@pytest.mark.parametrize("ranks", (1, 2))
def test_blocks_may_differ_in_size(ranks):
    """Of queries, keys and values each rank has its part."""
    whole = torch.arange(16)
    division = Division(0, 16, 3, (8, 4, 4))
    parts = [part_of(whole, division, rank, ranks) for rank in range(ranks)]
    expected = [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]] if ranks == 2 else [list(range(16))]
    assert [part.tolist() for part in parts] == expected


# ---- checkpoints ----


def divided(state, rank, ranks):
    """What a rank has of the undivided model's state."""
    divisions = {
        "embedding.weight": Division(0, 11),
        "few.weight": Division(0, 5),
        "up.weight": Division(0, 16, 2),
        "up.bias": Division(0, 16, 2),
        "down.weight": Division(1, 16),
    }
    return {key: part_of(t, divisions[key], rank, ranks) if key in divisions else t for key, t in state.items()}


def test_what_two_ranks_saved_four_have_loaded(found):
    whole = model(None).state_dict()
    for rank, mine in enumerate(found[4]):
        expected = divided(whole, rank, 4)
        assert set(mine["loaded"]) == set(expected)
        assert all(torch.equal(mine["loaded"][key], t) for key, t in expected.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize(("ranks", "saved"), ((2, "saved by 2"), (4, "saved by 4"), (4, "saved by 2 pairs")))
def test_what_ranks_saved_one_loads(found, ranks, saved):
    assert len(found[ranks]) == ranks
    one = model(None, seed=9)
    dcp.load(sharded_state_dict(one), checkpoint_id=str(found.folder / saved), no_dist=True)
    whole = model(None).state_dict()
    assert all(torch.equal(one.state_dict()[key], t) for key, t in whole.items())
