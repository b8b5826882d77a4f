"""Checkpoints: exact, whole or not there, under any layout, harmless. Ranks run checkpoint_runs.py."""

import json
import os
import pickle
import resource
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from parallel import worlds
from parallel.adamw_oracle import rounded
from torch.distributed.checkpoint.api import CheckpointException
from train import checkpoint_killed, checkpoint_runs
from train.checkpoint_runs import KIND, LAYOUTS, alone, configured, go, saved, started, whole

from onepass.gpt import Model
from onepass.gradients.adamw_state import ParameterState
from onepass.runtime.errors import CommandError
from onepass.train import checkpoint
from onepass.train.checkpoint import folders, storage
from onepass.train.setup import make

SETTINGS = {
    "fp32": {},
    "bf16": {"params_dtype": "bf16"},
    "dropout": {"hidden_dropout": 0.1},
    "8 bits": {"params_dtype": "bf16", "optimizer_moments": "8bit"},
    "lean": {"params_dtype": "bf16", "optimizer_moments": "8bit", "step_in_backward": True, "offload_optimizer": True},
}
WORLDS = [worlds.PAIRS[0], worlds.FOURS[0]]


def same(path, other):
    one, two = whole(path), whole(other)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


# ---- one rank ----


# a plain model has PyTorch's optimizer, whatever moments are asked for
@pytest.mark.parametrize(("settings", "plain"), [*((name, False) for name in SETTINGS), ("fp32", True), ("bf16", True)])
@pytest.mark.parametrize("kind", checkpoint_runs.KINDS)
def test_a_resumed_run_is_the_run(kind, settings, plain, tmp_path):
    settings = SETTINGS[settings]
    config, options = configured(kind, **settings)
    first, second = (make(config, options.replace(seed=seed), alone(), plain) for seed in (1, 2))
    go(first, alone(), 0, 2)
    path = saved(tmp_path, 2, first, config, options, alone())
    torch.manual_seed(3)
    lines = go(first, alone(), 2, 5)
    assert checkpoint.load(path, second, config, alone()) == 2
    torch.manual_seed(3)
    assert go(second, alone(), 2, 5) == lines
    paths = [saved(tmp_path / name, 5, each, config, options, alone()) for name, each in (("first", first), ("second", second))]
    same(*paths)


def test_what_is_in_it(tmp_path):
    trained, path = started(tmp_path, params_dtype="bf16")
    tensors = whole(path)
    masters = {(name, kind): tensor for name, kind, tensor, *_ in trained.update.optimizer.masters()}
    names = [name for name, _ in trained.model.named_parameters()]
    assert set(tensors) == {prefix + name for name in names for prefix in ("", "exp_avg.", "exp_avg_sq.")}
    for name, parameter in trained.model.named_parameters():
        assert torch.equal(tensors[name].flatten(), masters[name, "master"])
        assert not torch.equal(tensors[name], parameter.float()) or parameter.dim() == 1
        assert torch.equal(parameter, rounded(tensors[name], parameter.dtype))
        for moment in ("exp_avg", "exp_avg_sq"):
            assert tensors[f"{moment}.{name}"].any()
            assert torch.equal(tensors[f"{moment}.{name}"].flatten(), masters[name, moment])
    index = json.loads((path / "checkpoint.json").read_text())
    assert index["step"] == 2 and index["config"]["hidden_size"] == 16 and index["options"]["weight_decay"] == 0.3
    assert sorted(each.name for each in path.iterdir()) == ["0.safetensors", "checkpoint.json"]


def test_the_steps_of_the_optimizer_go_on(tmp_path):
    config, options = configured()
    _, path = started(tmp_path, steps=3)
    trained = make(config, options, alone())
    checkpoint.load(path, trained, config, alone())
    state = trained.update.optimizer.state
    assert len(state) == len(list(trained.model.parameters())) and all(float(each["step"]) == 3 for each in state.values())


@pytest.mark.parametrize("settings", [{}, {"params_dtype": "bf16"}], ids=["fp32", "bf16"])
def test_an_interrupted_save_leaves_weights_and_gradients_as_they_were(settings, tmp_path, monkeypatch):
    config, options = configured(**settings)
    straight, interrupted = (make(config, options, alone()) for _ in range(2))
    lines = go(straight, alone(), 0, 4)
    assert go(interrupted, alone(), 0, 2) == lines[:2]
    before = [parameter.clone() for parameter in interrupted.model.parameters()]
    write, left = storage._write_all, [4]

    def interrupting(file, data):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        write(file, data)

    monkeypatch.setattr(storage, "_write_all", interrupting)
    with pytest.raises((KeyboardInterrupt, CheckpointException)):
        saved(tmp_path, 2, interrupted, config, options, alone())
    monkeypatch.undo()
    assert all(map(torch.equal, before, interrupted.model.parameters()))
    assert not any(buffer.any() for buffer in interrupted.update.main_grads.buffers)
    assert go(interrupted, alone(), 2, 4) == lines[2:]
    same(*(saved(tmp_path / str(at), 4, each, config, options, alone()) for at, each in enumerate((straight, interrupted))))


def test_one_stretch_is_copied_at_a_time(tmp_path, monkeypatch):
    config, options = configured(params_dtype="bf16", optimizer_moments="8bit")
    trained, alive = make(config, options, alone()), []
    go(trained, alone(), 0, 1)
    read = ParameterState.read

    def reading(self, kind):
        assert sum(each() is not None for each in alive) <= 1  # the one before goes with this one's coming
        stored = {each.untyped_storage().data_ptr() for each in (self.weight, *self.stored.values())}
        if (found := read(self, kind)).untyped_storage().data_ptr() not in stored:
            alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(ParameterState, "read", reading)
    saved(tmp_path, 1, trained, config, options, alone())
    assert len(alive) > len(trained.update.main_grads.named)


def test_moments_of_another_kind_are_loaded(tmp_path):
    config, options = configured(params_dtype="bf16")
    fine = make(config, options, alone())
    go(fine, alone(), 0, 2)
    path = saved(tmp_path / "fine", 2, fine, config, options, alone())
    lean = options.replace(optimizer_moments="8bit", step_in_backward=True)
    coarse = make(config, lean, alone())
    checkpoint.load(path, coarse, config, alone())
    assert all(map(torch.equal, fine.model.parameters(), coarse.model.parameters()))
    states = zip(fine.update.optimizer.masters(), coarse.update.optimizer.masters(), strict=True)
    assert all((a[2] - b[2]).norm() <= 0.05 * a[2].norm() for a, b in states)
    path = saved(tmp_path / "coarse", 2, coarse, config, lean, alone())
    again = make(config, options, alone())
    checkpoint.load(path, again, config, alone())
    states = zip(coarse.update.optimizer.masters(), again.update.optimizer.masters(), strict=True)
    assert all(torch.equal(a[2], b[2]) for a, b in states)


# ---- several ranks ----


@pytest.fixture(scope="module")
def found(world, tmp_path_factory):
    """What each of several ranks has found, which begin with the checkpoint of one."""
    folder = tmp_path_factory.mktemp("ranks")
    started(folder / "one", KIND[len(world)])
    return world.run(checkpoint_runs.run_layouts, folder)


def test_each_layout_has_what_was_saved(found):
    for rank in found:
        assert {name: rank[name]["apart"] for name in LAYOUTS[len(found)]} == {name: [] for name in LAYOUTS[len(found)]}


def test_each_layouts_masters_start_as_they_were_drawn(found):
    """Not as their bf16 weights, whichever part of them a rank has."""
    narrow = {name: path for name, path in ((name, found[0][name]["drawn"]) for name in LAYOUTS[len(found)]) if path}
    config, options = configured(KIND[len(found)])
    exact = dict(Model(config, seed=options.seed).named_parameters())
    assert narrow
    for path in narrow.values():
        tensors = whole(Path(path))
        assert [name for name in exact if not torch.equal(tensors[name], exact[name])] == []


def test_and_saves_the_same(found):
    for name in LAYOUTS[len(found)]:
        again = Path(found[0][name]["again"])
        same(Path(found[0][name]["from"]), again)
        assert len(list(again.glob("*.safetensors"))) == len(found), name  # each rank writes a part


def test_each_layout_goes_on_bit_for_bit(found):
    for rank in found:
        for name in LAYOUTS[len(found)]:
            assert rank[name]["resumed"] == rank[name]["lines"][1:], name


def test_each_layout_goes_on_as_one_rank_would(found):
    for name, settings in LAYOUTS[len(found)].items():
        config, options = configured(KIND[len(found)], **{k: v for k, v in settings.items() if k == "params_dtype"})
        trained = make(config, options, alone())
        step = checkpoint.load(Path(found[0][name]["from"]), trained, config, alone())
        for at, (loss, _) in enumerate(go(trained, alone(), step, step + 2)):
            mean = sum(rank[name]["lines"][at][0] for rank in found) / len(found)
            assert mean == pytest.approx(loss, rel=3e-3 if "params_dtype" in settings else 1e-5), (name, at)


def test_one_rank_takes_what_several_saved(found, tmp_path):
    config, options = configured(KIND[len(found)])
    for name in LAYOUTS[len(found)]:
        path = Path(found[0][name]["after"])
        trained = make(config, options, alone())
        step = checkpoint.load(path, trained, config, alone())
        same(path, saved(tmp_path / name, step, trained, config, options, alone()))
        tensors = whole(path)
        for key, parameter in trained.model.named_parameters():
            assert torch.equal(tensors[key], parameter), key


def test_a_rank_with_a_full_disk_stops_all(found):
    said, left, good = zip(*(rank["full"] for rank in found), strict=True)
    assert all(each.startswith("the checkpoint of step 2 needs 0.1 MB in ") for each in said), said
    assert left == (["step-00000001"],) * len(found) and all(good)


def test_fully_shard_changes_no_loss(found):
    for rank in found:
        assert len(set(rank["first loss"])) == 1


def test_what_one_rank_cannot_read_stops_all(found):
    assert len({rank["damaged"] for rank in found}) == 1
    gone, flipped, damaged = found[0]["damaged"]
    assert flipped.endswith("is damaged: 0.safetensors has changed since it was written, in bytes 4096 to 8192")
    assert gone.endswith("nowhere/checkpoint.json can't be read: No such file or directory")
    assert "is damaged: 0.safetensors must be of" in damaged


# ---- whole or not there ----


@pytest.mark.parametrize("again", [False, True], ids=["a new one", "one of the same step"])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_leaves_one_that_is_whole(again, tmp_path):
    worlds.started(checkpoint_killed.run, (str(tmp_path), again), 1)
    found = torch.load(tmp_path / "found.pt")
    assert len(found) > 45 and [each["signal"] for each in found] == [9] * (len(found) - 1) + [0]
    for each in found:
        assert len(each["same"]) == 1 and each["step"] == (3 if each["same"] == ["after"] and not again else 2)
        assert each["left"] == ["step-00000004"]
    order = [each["same"][0] for each in found]
    assert order == sorted(order, reverse=True) and order[0] == "before" and order[-1] == "after"


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    config, options = configured()
    trained, folder = make(config, options, alone()), tmp_path / "checkpoints"
    done, sync, rename = [], os.fsync, Path.rename

    def fsync(number):
        sync(number)
        inode = os.fstat(number).st_ino
        done.append(next(path.name for path in (folder, *folder.rglob("*")) if path.stat().st_ino == inode))

    def renamed(path, target):
        done.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    saved(tmp_path, 2, trained, config, options, alone())
    assert done[:2] == ["0.safetensors", "checkpoint.json"] and done[-3:] == ["step-00000002.part", "renamed", "checkpoints"]


def test_a_full_disk_is_one_line_and_nothing_is_left(tmp_path):
    config, options = configured()
    trained, before = started(tmp_path)
    kept = whole(before)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, limits[1]))
    try:
        with pytest.raises(CommandError) as refused:
            saved(tmp_path, 3, trained, config, options, alone())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(refused.value).startswith(f"the checkpoint of step 3 needs 0.1 MB in {tmp_path}/checkpoints, where ")
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert all(torch.equal(tensor, kept[name]) for name, tensor in whole(checkpoint.find(tmp_path)).items())
    saved(tmp_path, 3, trained, config, options, alone())
    assert checkpoint.find(tmp_path).name == "step-00000003"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    config, options = configured()
    trained = make(config, options, alone())
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CommandError, match=r"^the checkpoint of step 2 can't be written to .*checkpoints: File exists$"):
        saved(tmp_path, 2, trained, config, options, alone())


@pytest.mark.parametrize(("most", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])])
def test_the_newest_are_kept(most, left, tmp_path):
    config, options = configured(keep_checkpoints=most)
    trained = make(config, options, alone())
    for step in range(1, 5):
        saved(tmp_path, step, trained, config, options, alone())
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == [f"step-{step:08}" for step in left]


def test_a_run_that_went_back_has_its_own_newest(tmp_path):
    """Those of the steps that it left are the older ones, and go first."""
    config, options = configured(keep_checkpoints=3)
    trained = make(config, options, alone())
    for step in (2, 4, 6, 3, 4):
        saved(tmp_path, step, trained, config, options, alone())
        assert checkpoint.find(tmp_path).name == f"step-{step:08}"
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == [f"step-{step:08}" for step in (3, 4, 6)]


def test_what_was_to_be_replaced_comes_back_where_the_other_never_came(tmp_path):
    config, options = configured()
    trained, path = started(tmp_path)
    tensors = whole(path)
    path.rename(path.with_name("step-00000002.replaced"))
    assert checkpoint.find(tmp_path).name == "step-00000002.replaced"
    saved(tmp_path, 4, trained, config, options, alone())
    assert sorted(each.name for each in path.parent.iterdir()) == ["step-00000002", "step-00000004"]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in whole(path).items())


# ---- which one ----


def test_found_by_the_run_or_by_itself(tmp_path, monkeypatch):
    _, path = started(tmp_path / "run")
    assert path == tmp_path / "run" / "checkpoints" / "step-00000002"
    assert checkpoint.find(path) == path and checkpoint.run_of(path) == tmp_path / "run"
    monkeypatch.chdir(path.parent)
    for here in ("step-00000002", "../checkpoints/step-00000002", "../../run"):
        found = checkpoint.find(Path(here))
        assert found.samefile(path) and checkpoint.run_of(found).samefile(tmp_path / "run")
    monkeypatch.chdir(path)
    assert checkpoint.run_of(checkpoint.find(Path("."))).samefile(tmp_path / "run")
    shutil.copytree(path, tmp_path / "elsewhere")
    assert checkpoint.find(tmp_path / "elsewhere") == tmp_path / "elsewhere"
    with pytest.raises(CommandError, match=r"elsewhere is in no run's folder: give --config with .* and --run-dir with a"):
        checkpoint.run_of(tmp_path / "elsewhere")


def test_where_there_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "checkpoints" / "step-00000003.part").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "notes").mkdir()
    for name, said in {
        "nothing": "is not there",
        "file": "is a file",
        "run": "has no checkpoint in it",
        "run/checkpoints/step-00000003.part": "is half a checkpoint: writing or removing it was cut short",
    }.items():
        with pytest.raises(CommandError) as refused:
            checkpoint.find(tmp_path / name)
        assert str(refused.value) == f"--resume {tmp_path / name} must be the folder of a run or of a checkpoint, but {said}"


def test_half_a_checkpoint_is_left_alone_until_the_next_is_saved(tmp_path):
    config, options = configured()
    trained, path = started(tmp_path)
    half = path.with_name("step-00000003.part")
    shutil.copytree(path, half)
    assert checkpoint.find(tmp_path) == path and half.exists()
    saved(tmp_path, 4, trained, config, options, alone())
    assert not half.exists()


# ---- another model ----


OTHERS = {
    "num_layers is 2 there and 3 here": {"num_layers": 3},
    "ffn_hidden_size is 24 there and 256 here": {"ffn_hidden_size": None},
    "normalization is 'LayerNorm' there and 'RMSNorm' here": {"normalization": "RMSNorm"},
    "rotary_base is 10000.0 there and 500000.0 here, num_query_groups is 2 there and 4 here": {
        "num_query_groups": 4, "rotary_base": 5e5,
    },
    "position_embedding_type is 'rope' there and 'none' here, rotary_base is 10000.0 there and None here, "
    "rotary_percent is 1.0 there and None here, and 2 more": {"position_embedding_type": "none"},
    "num_moe_experts is None there and 2 here, moe_router_topk is None there and 2 here, "
    "moe_ffn_hidden_size is None there and 24 here, and 1 more": {"num_moe_experts": 2},
    "mtp_num_layers is None there and 1 here, mtp_use_repeated_layer is None there and False here": {"mtp_num_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("said", OTHERS)
def test_another_model_is_refused_before_anything_is_changed(said, tmp_path):
    _, path = started(tmp_path)
    config, options = configured(**OTHERS[said])
    trained = make(config, options, alone())
    before = [parameter.clone() for parameter in trained.model.parameters()]
    for act in (lambda: checkpoint.load(path, trained, config, alone()), lambda: checkpoint.check(path, config)):
        with pytest.raises(CommandError) as refused:
            act()
        assert str(refused.value) == f"the checkpoint {path} must be of this model, but is of another: {said}"
    assert all(map(torch.equal, before, trained.model.parameters()))
    assert not any(tensor.any() for _, kind, tensor, *_ in trained.update.optimizer.masters() if kind != "master")


def test_the_same_model_by_other_means_is_not_another(tmp_path):
    _, path = started(tmp_path, kv_channels=4)
    changes = {"hidden_dropout": 0.1, "params_dtype": "bf16", "max_position_embeddings": 64, "norm_linear_fusion": False}
    config, options = configured(recompute_granularity="full", z_loss=0.1, **changes)
    trained = make(config, options, alone())
    assert checkpoint.load(path, trained, config, alone()) == 2
    tensors = whole(path)
    for name, parameter in trained.model.named_parameters():
        assert torch.equal(parameter, rounded(tensors[name], parameter.dtype))


# ---- nothing in it is run, and nothing wrong is taken ----


class Bomb:
    """What leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def load_into_a_new_one(path, **how):
    config, options = configured()
    checkpoint.load(path, make(config, options, alone()), config, alone(), **how)


def test_a_pickle_is_never_read(tmp_path):
    _, path = started(tmp_path)
    gone_off, data = tmp_path / "gone off", path / "0.safetensors"
    bomb = pickle.dumps(Bomb(gone_off))
    (path / ".metadata").write_bytes(bomb)
    load_into_a_new_one(path)
    size = data.stat().st_size
    torch.save(Bomb(gone_off), data)
    with pytest.raises(CommandError, match=r"step-00000002 is damaged: 0\.safetensors must be of \d+ bytes, but is of \d+$"):
        load_into_a_new_one(path)
    data.write_bytes(bomb.ljust(size, b"."))
    for verify, said in ((True, f"has changed since it was written, in bytes 0 to {size}"), (False, "is no file of it")):
        with pytest.raises(CommandError, match=rf"is damaged: 0\.safetensors {said}$"):
            load_into_a_new_one(path, verify=verify)
    (path / "checkpoint.json").write_bytes(bomb)
    for act in (load_into_a_new_one, lambda path: checkpoint.find(path.parents[1])):
        with pytest.raises(CommandError, match=r"checkpoint\.json can't be read: it is no JSON$"):
            act(path)
    assert not gone_off.exists()
    pickle.loads(bomb)
    assert gone_off.exists()


def test_files_of_another_save_are_not_taken(tmp_path):
    config, options = configured()
    trained, path = started(tmp_path)
    other = saved(tmp_path, 3, trained, config, options, alone())
    shutil.copy(other / "0.safetensors", path)
    instead = f"; the newest good one is {other}: --resume {other} goes on with it$"
    with pytest.raises(CommandError, match=rf"is damaged: 0\.safetensors is no file of it{instead}"):
        load_into_a_new_one(path, verify=False)
    (path / "0.safetensors").unlink()
    with pytest.raises(CommandError, match=rf"is damaged: 0\.safetensors is not there{instead}"):
        load_into_a_new_one(path)


NORM = "final_layernorm.weight"
WRONG = {
    "must have a step of at least 0, but has -3": lambda index, norm: index.update(step=-3),
    "must have step, of type int, but has None": lambda index, norm: index.pop("step"),
    "must be of format 1, but is of another: it may be of another version of onepass": lambda index, norm: index.update(format=2),
    f"must have a tensor {NORM} of [16], but has none": lambda index, norm: index["tensors"].pop(NORM),
    f"must have a tensor {NORM} of [16], but has one of [20]": lambda index, norm: norm.update(shape=[20]),
    f"must have all of {NORM}, but has a part": lambda index, norm: norm["chunks"][0].__setitem__(1, [8]),
    "has a part [[0], [17], '0.safetensors', ": lambda index, norm: norm["chunks"][0].__setitem__(1, [17]),
    "has a part [[0], [16], 5, ": lambda index, norm: norm["chunks"][0].__setitem__(2, 5),
    "is not as it was written": lambda index, norm: norm.pop("chunks"),
    "names a file elsewhere, '../0.safetensors'": lambda index, norm: norm["chunks"][0].__setitem__(2, "../0.safetensors"),
    "a file of it ends early": lambda index, norm: norm["chunks"][0].__setitem__(3, 10**9),
}


@pytest.mark.parametrize("said", WRONG)
def test_an_index_that_was_changed_is_refused(said, tmp_path):
    _, path = started(tmp_path)
    index = json.loads((path / "checkpoint.json").read_text())
    del index["checksum"]
    WRONG[said](index, index["tensors"][NORM])
    (path / "checkpoint.json").write_text(folders.index_json(index))  # with a checksum that is right
    with pytest.raises(CommandError) as refused:
        load_into_a_new_one(path)
    assert said in str(refused.value)


def test_a_damaged_one_stops_no_save(tmp_path):
    config, options = configured(keep_checkpoints=1)
    trained, path = started(tmp_path)
    (path / "checkpoint.json").write_text("")
    saved_at = tmp_path / "checkpoints" / "step-00000004"
    checkpoint.save(tmp_path / "checkpoints", 4, trained, config, options, alone())
    assert path.exists() and checkpoint.find(saved_at) == saved_at
    assert checkpoint.find(tmp_path) == saved_at
