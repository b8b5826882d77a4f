"""Models over two tensor-parallel ranks, over gloo, against one rank. The processes run gpt_ranks.py."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import gpt_ranks
from gpt.gpt_ranks import BIASES, CASES, case, configured, given, started
from ops.calls import relative
from parallel.worlds import found_by

from onepass.nn import sharded_state_dict

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this PyTorch has no gloo")
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder):
    return found_by(gpt_ranks.run, ("gloo", 2), folder)


def divisions(model):
    return {
        f"{path}.{name}": division
        for path, module in model.named_modules()
        for name, division in getattr(module, "_divisions", {}).items()
    }


def together(parts, division):
    """The whole parameter, or its gradient, of the ranks' parts."""
    if division is None:
        assert torch.allclose(parts[0], parts[1], rtol=1e-12, atol=1e-15)
        return parts[0]
    sizes = [[block // 2 for block in division.blocks()]] * 2
    if len(division.blocks()) == 1:  # the last rank may have less
        sizes = [[part.shape[division.dim]] for part in parts]
    blocks = [part.split(size, division.dim) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat([torch.cat(each, division.dim) for each in zip(*blocks, strict=True)], division.dim)


@cases
def test_two_ranks_are_as_one(found, name):
    expected, ranks = case(None, **CASES[name]), [rank[name] for rank in found]
    for rank in ranks:
        for what in ("loss", "masked", "rows", "sum", "logits"):
            assert relative(rank[what], expected[what]) < 1e-12, what
    division = divisions(started(configured(1, **CASES[name])))
    for kind, bound in (("start", 0.0), ("grads", 1e-12)):
        for key, t in expected[kind].items():
            whole = together([rank[kind][key] for rank in ranks], division.get(key))
            assert (whole - t).norm() <= bound * t.norm() + 1e-18, (kind, key)  # a key's bias has none, but for rounding


def test_gradients_come_to_main_grad_by_the_ops_or_by_the_hooks(found):
    model = started(configured(1, **BIASES)).float()
    for seed in range(2):
        model(*given(seed)[:2]).backward()
    division = divisions(model)
    for at in range(2):
        for name, parameter in model.named_parameters():
            whole = together([rank["main_grad"][at][name] for rank in found], division.get(name))
            assert relative(whole, parameter.grad) < 1e-5, name


def test_a_copy_has_the_same_group(found):
    assert all(rank["copied"] for rank in found)


def test_a_folder_of_hugging_faces_is_divided(found):
    for rank in found:
        whole, divided = rank["loaded"]
        torch.testing.assert_close(divided, whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_what_two_ranks_saved_one_loads(found, folder):
    model = started(configured(1))
    for parameter in model.parameters():
        parameter.data.zero_()
    dcp.load(sharded_state_dict(model), checkpoint_id=str(folder / "saved"), no_dist=True)
    for name, t in started(configured(1)).state_dict().items():
        assert torch.equal(model.state_dict()[name], t), name


@pytest.mark.parametrize("sequence", (False, True))
def test_two_ranks_in_eight_bits_are_as_one(found, sequence):
    single, exact = (gpt_ranks.eight_bits(None, False, precision) for precision in (True, False))
    for rank in found:
        ours = rank["eight bits"][sequence]
        for a, b, c in zip(ours["losses"], single["losses"], exact["losses"], strict=True):
            assert abs(a - c) < 0.02 and abs(a - b) < 0.02 and a != c
        for name in ("layers.0.input_layernorm.weight", "layers.1.pre_mlp_layernorm.weight"):
            assert relative(ours["grads"][name], exact["grads"][name]) < 0.158  # 16 dB
