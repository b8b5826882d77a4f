"""Checkpoints on two nodes' disks, ranks that others wait for, and other numbers of ranks. Nodes are folders here."""

import os
import re
import shutil
import time
import zlib
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from parallel import worlds
from parallel.worlds import World
from train.checkpoint_runs import FSDP, ZERO, alone, configured, flip, go, refused, saved

import onepass
from onepass.train import checkpoint, checksums, text, watch
from onepass.train.beginning import find_beginning, find_place
from onepass.train.checkpoint import folders, nodes
from onepass.train.disks import describe_disks, find_disks
from onepass.train.layout import ParallelLayout, _groups
from onepass.train.setup import make
from onepass.train.watch import RankWatch, Report, held_up_by

WORLDS = [worlds.PAIRS[0]]
HOSTS = ("left", "right")
rank_context = partial(onepass.use_backend, "torch")


@contextmanager
def on_nodes(folder, **settings):
    """Make each of two ranks a node with a folder of its own, in which it is. Yield what it trains."""
    config, options = configured(**ZERO, keep_checkpoints=0, **settings)
    layout = replace(_groups(config, torch.device("cpu")), hosts=HOSTS)
    place = folder / HOSTS[layout.rank]
    place.mkdir(parents=True, exist_ok=True)
    before = Path.cwd()
    os.chdir(place)
    try:
        disks = find_disks(Path("run"), layout)
        yield make(config, options, layout), config, options, replace(layout, disks=disks)
    finally:
        os.chdir(before)


def run_on_disks(group, folder):
    """Return what two nodes say of checkpoints that lack parts, and whether a rank resumes with what another node has."""
    found = {}
    with on_nodes(folder) as (trained, config, options, layout):
        found["disks"], found["said"] = layout.disks, describe_disks(layout)
        found["shared"] = find_disks(folder / "run", layout)
        save = partial(checkpoint.save, Path("run/checkpoints"), trained=trained, config=config, options=options, layout=layout)
        go(trained, layout, 0, 1)
        save(1)
        straight = go(trained, layout, 1, 2)
        save(2)
        first, second = (Path("run/checkpoints") / f"step-{step:08}" for step in (1, 2))
        own = f"{layout.rank}.safetensors"
        found["files"] = sorted(path.name for path in second.iterdir())
        layout.wait_for_all()

        # the left node's part is on the right node now, and the index is there alone
        if layout.rank == 0:
            shutil.copy(first / own, folder / "right" / first / own)
            shutil.rmtree(first)
        layout.wait_for_all()
        path, id = nodes.find_on_nodes(first, layout)
        checkpoint.share_index(path, id, layout)
        other = make(config, options.replace(seed=5), layout)
        with patch.object(checksums, "BLOCK", 4096):  # several messages
            found["flipped on its way"] = fetch_flipped(path, other, config, layout)
        assert checkpoint.load(path, other, config, layout) == 1
        found["resumed"] = go(other, layout, 1, 2) == straight
        found["kept"] = (first / own).exists()

        # the newest lacks a part: it was renamed on one node only, or a node is another one
        layout.wait_for_all()
        if layout.rank == 1:
            (second / own).unlink()
        layout.wait_for_all()
        found["lacks"] = refused(lambda: nodes.find_on_nodes(Path("run"), layout))
        newest, wrong = nodes.newest_whole(Path("run"), layout, 0, True)
        found["newest"], found["wrong"] = newest.path == first and newest.step == 1, wrong
        found["none since"] = nodes.newest_whole(Path("run"), layout, 1, True)[0]

        # a bit of the other has changed on one node
        layout.wait_for_all()
        if layout.rank == 1:
            flip(first / own, 5000)
        layout.wait_for_all()
        found["damaged"] = nodes.newest_whole(Path("run"), layout, 0, True)
        found["tokens"] = refused(lambda: text.check_same([["a"], ["b"]], layout))
    return found


def fetch_flipped(path, trained, config, layout):
    """Return the error where a block changes on its way, and whether a file was left."""
    stock = dist.send

    def send(block, taker):
        block[7] ^= 1
        stock(block, taker)

    index = {**folders.read_index(path)}
    index["checksums"] = {name: checksums.block_sums(path / name) if (path / name).exists() else None for name in index["files"]}
    sums = layout.on_rank(1, lambda: index["checksums"])
    index["checksums"] = sums
    try:
        with patch.object(dist, "send", send):
            nodes.fetch(path, set(index["files"]), index, layout)
    except folders.Damaged as error:
        return str(error), sorted(each.name for each in path.iterdir())
    return None


def test_a_checkpoint_on_two_disks(world, tmp_path):
    left, right = world.run(run_on_disks, tmp_path)
    for found in (left, right):
        assert found["disks"] == ((0,), (1,)) and found["shared"] == ()
        assert found["said"] == "2 nodes have a folder each, with tokens and a part of each checkpoint. "
        assert found["resumed"] and found["newest"] and found["none since"] is None
        line = "the checkpoint run/checkpoints/step-00000002 lacks 1.safetensors, written on right"
        assert found["lacks"].startswith(f"{line}: start these nodes too, or copy the files to ")
        assert found["lacks"].endswith("; the newest whole one is run/checkpoints/step-00000001: --resume "
                                       "run/checkpoints/step-00000001 goes on with it")  # fmt: skip
        assert found["wrong"] == [line]
        newest, wrong = found["damaged"]
        assert newest is None and "is damaged: 1.safetensors has changed since it was written, in bytes 0 to " in wrong[1]
        assert "those of rank 1 on right differ from those of rank 0 on left" in found["tokens"]
    assert left["files"] == ["0.safetensors", "checkpoint.json"] and right["files"] == ["1.safetensors", "checkpoint.json"]
    for found, names in ((left, ["checkpoint.json"]), (right, ["0.safetensors", "1.safetensors", "checkpoint.json"])):
        error, there = found["flipped on its way"]
        assert error == "0.safetensors has changed since it was written, or on its way from rank 1"
        assert there == names
    assert left["kept"]


# ---- several saves of a step, and indexes that a node lacks ----


def run_crashes(group, folder):
    """Return what two nodes find after crashes between them, and where a run begins by it."""
    found = {}
    with on_nodes(folder) as (trained, config, options, layout):
        save = partial(checkpoint.save, Path("run/checkpoints"), 2, trained, config, options, layout)
        place, right = Path("run/checkpoints/step-00000002"), layout.rank == 1
        beginning = partial(begin, layout=layout)

        def changed(act):
            """Act on the right node alone."""
            layout.wait_for_all()
            if right:
                act()
            layout.wait_for_all()

        save()
        old = id_of(place)
        with patch.object(folders, "finish", broken if right else folders.finish):
            found["unfinished"] = refused(save)
        found["between renames"] = sorted(path.name for path in place.parent.iterdir())
        layout.wait_for_all()
        spread = nodes.spread(Path("run"), layout)
        found["both saves"] = [(each.number, each.whole) for each in spread], spread[0].id == old
        found["by itself"] = nodes.find_on_nodes(place, layout) == nodes.find_on_nodes(Path("run"), layout) == (place, old)
        found["old"] = beginning(resume_if_exists=True).resume == place and id_of(place) == old
        found["loads"] = checkpoint.load(place, trained, config, layout)

        # the left node went on alone, saved the step again, and has the right node's old part too
        layout.wait_for_all()
        save()
        shutil.copytree(place, "kept")
        save()
        new = id_of(place)
        layout.wait_for_all()
        if not right:
            shutil.copy(folder / "right" / place / "1.safetensors", place)
        changed(lambda: (shutil.rmtree(place), shutil.move("kept", place)))
        found["the right node's"] = id_of(place) == new
        found["newest"] = beginning(resume_if_exists=True).resume == place and id_of(place) == new
        found["takes"] = checkpoint.load(place, trained, config, layout)
        changed(lambda: shutil.copy(next(place.parent.glob("*.replaced")) / "1.safetensors", place))
        nodes.verify_on_nodes(place, folders.read_index(place), layout)  # another save's file is as if it were not there

        # the right node's index is damaged or gone; the left node's part is gone, too
        def damaged():
            return refused(lambda: beginning(resume=place).check(config, layout)), id_of(place) == new

        changed(lambda: flip(place / "checkpoint.json", 9))
        found["damaged there"] = damaged()
        nodes.fetch(place, {"1.safetensors"}, folders.read_index(place), layout)
        layout.wait_for_all()
        if not right:
            (place / "1.safetensors").unlink()
        changed((place / "checkpoint.json").unlink)
        found["absent there"] = damaged()
        changed((place / "checkpoint.json").unlink)
        found["together"] = raised(lambda: nodes.verify_on_nodes(place, dict.fromkeys(("files", "id")), layout))
        beginning(resume=place)
        changed((place / "1.safetensors").unlink)
        found["lacks"] = refused(lambda: beginning(resume_if_exists=True)), len(list(place.parent.iterdir())) > 0
        (place / "checkpoint.json").write_text("{")
        layout.wait_for_all()
        found["unread"] = refused(lambda: nodes.find_on_nodes(Path("run"), layout))
    return found


def begin(layout, resume=None, resume_if_exists=False):
    args = Namespace(folder=Path("run"), resume=resume, resume_if_exists=resume_if_exists)
    return find_beginning(args, find_place(args, layout), layout)


def id_of(path):
    return folders.read_index(path)["id"]


def broken(part):
    raise OSError(5, "the machine stops")


def raised(act):
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return None


def test_crashes_between_two_disks(world, tmp_path):
    left, right = world.run(run_crashes, tmp_path)
    assert left["between renames"] == ["step-00000002", "step-00000002.replaced"]
    assert right["between renames"] == ["step-00000002"]  # what was not renamed is removed
    assert left["the right node's"] and not right["the right node's"]
    for found in (left, right):
        assert "the machine stops" in found["unfinished"]
        assert found["both saves"] == ([(1, True), (2, False)], True) and found["by itself"]
        assert found["old"] and found["newest"] and found["loads"] == found["takes"] == 2
        assert found["damaged there"] == found["absent there"] == (None, True)
        assert found["together"] == "FileNotFoundError"
        line = "the checkpoint run/checkpoints/step-00000002 lacks 1.safetensors, written on right"
        assert found["lacks"] == (f"run must have a whole checkpoint to go on from, but {line}: start the nodes that have the "
                                  "files, or copy them to any node; another --run-dir begins a new run", True)  # fmt: skip
        assert found["unread"].startswith(
            "the checkpoint run/checkpoints/step-00000002 is damaged: run/checkpoints/step-00000002/checkpoint.json"
        )


def run_takers(group, folder):
    """Fetch a file with three nodes, of which two share a disk and have processes of one number. Return what is there."""
    rank = group.rank()
    layout = ParallelLayout(torch.device("cpu"), rank=rank, ranks=3, hosts=("a", "b", "c"))
    place = folder / "ab"[rank > 0] / "step-00000001"
    file = place / "0.safetensors"
    header = b'{"__metadata__": {"id": "one"}}'
    data = len(header).to_bytes(8, "little") + header + bytes(1000)
    index = {"id": "one", "files": {file.name: len(data)}, "checksums": {file.name: [zlib.crc32(data)]}}
    if rank < 2:
        place.mkdir(parents=True)
        (place / "checkpoint.json").write_text("{}")
        file.with_name(f"{file.name}.1.part").write_text("a killed process has left it")
    if rank == 0:
        file.write_bytes(data)
    layout.wait_for_all()
    before = Path.cwd()
    os.chdir(place.parent)
    try:
        with patch.object(os, "getpid", lambda: 17), patch.object(dist, "send", wraps=dist.send) as send:
            nodes.fetch(Path(place.name), {file.name}, index, layout)
    finally:
        os.chdir(before)
    takers = [call.args[1] for call in send.call_args_list]
    return file.read_bytes() == data, sorted(path.name for path in place.iterdir()), takers


def test_one_process_of_a_disk_takes_a_file(tmp_path):
    world = World("gloo", 3)
    try:
        first, *others = world.run(run_takers, tmp_path)
    finally:
        world.close()
    assert all(same for same, *_ in (first, *others))
    assert all(names == ["0.safetensors", "checkpoint.json"] for _, names, _ in others)
    assert first[2] == [1] and others[0][2] == others[1][2] == []


# ---- a rank that others wait for ----


def run_watched(group, how):
    """Return the line by which a watch ends the run while the second rank is late for a barrier."""
    said = []
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    layout = replace(_groups(configured()[0], device), hosts=HOSTS)
    ended = patch.object(watch.os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit))
    told = dist.broadcast_object_list  # by onepass train's gloo, which these worlds have not beside NCCL
    tell = lambda given, source, device: told(given, source, device=layout.device)  # noqa: E731
    by_device = patch.object(dist, "broadcast_object_list", tell)
    with ended, by_device, patch.object(watch.os, "write", lambda number, line: said.append(line.decode())):
        watching = RankWatch(layout, timedelta(seconds=3.0))
        watching.add(layout)
        dist.barrier()
        if group.rank() == 1:
            if how == "silent":
                watching.close()
            late_for_it()
        dist.barrier()
        watching.close()
    return said


def late_for_it():
    time.sleep(5.0)


@pytest.mark.parametrize("world", worlds.PAIRS, indirect=True, scope="module")
@pytest.mark.parametrize(
    ("how", "why"), [("hangs", r"in test_node_checkpoints.py:\d+, late_for_it"), ("silent", "silent: stopped, .*")]
)
def test_a_rank_that_others_wait_for_is_named(world, how, why):
    first, second = world.run(run_watched, how)
    (line,) = first
    assert re.fullmatch(rf"onepass train: rank 1 on right held up the others for [23] s, {why}; --distributed-[^\n]*\n", line)
    assert second == []


def test_who_waits_for_whom():
    """Rank 3 hangs. Rank 2 waits for it in their tensor group, the others for both in the data groups."""
    reports = {
        0: Report(9, {"tensor 0": 4, "data 0": 8}, True, ""),
        1: Report(9, {"tensor 0": 4, "data 1": 8}, True, ""),
        2: Report(9, {"tensor 2": 4, "data 0": 7}, True, ""),
        3: Report(9, {"tensor 2": 3, "data 1": 7}, False, ""),
    }
    assert held_up_by(reports) == [3]
    alike = {rank: report._replace(started={"all": 1}) for rank, report in reports.items()}
    assert held_up_by(alike) == [3]  # by where they are, as messages between two ranks are not counted
    assert held_up_by({rank: report._replace(waits=False) for rank, report in alike.items()}) == []


# ---- other numbers of ranks ----

CASES = {  # settings, and how far losses are from those of one rank
    "zero": (ZERO, 1e-6),
    "fsdp": (FSDP, 1e-6),
    "eight-bit moments": (ZERO | {"optimizer_moments": "8bit"}, 1e-6),
    "adapters": (ZERO | {"lora_rank": 2, "normalization": "RMSNorm", "add_qkv_bias": False}, 1e-6),
}


def run_cases(group, folder, first):
    """Train two steps on from a checkpoint, and save. Return the losses of each case."""
    found = {}
    for case, (settings, _) in CASES.items():
        config, options = configured(micro_batch_size=1, **settings)
        layout = _groups(config, torch.device("cpu"))
        trained = make(config, options.replace(seed=1234 + (7 * first if "lora_rank" not in settings else 0)), layout)
        if first:
            assert checkpoint.load(checkpoint.find(folder / case), trained, config, layout) == first
        found[case] = go(trained, layout, first, first + 2)
        saved(folder / case, first + 2, trained, config, options, layout)
    return found


def test_four_ranks_then_two_then_four(tmp_path):
    losses = {case: [] for case in CASES}
    for first, ranks in ((0, 4), (2, 2), (4, 4)):
        world = World("gloo", ranks)
        try:
            found = world.run(run_cases, tmp_path, first)
        finally:
            world.close()
        for case in CASES:
            losses[case] += [sum(rank[case][at][0] for rank in found) / ranks for at in range(2)]
    for case, (settings, rel) in CASES.items():
        config, options = configured(micro_batch_size=1, **settings)
        options = options.replace(use_fsdp=False, use_distributed_optimizer=False)
        straight = [loss for loss, _ in go(make(config, options, alone()), alone(), 0, 6)]
        print(case, max(abs(a / b - 1) for a, b in zip(losses[case], straight, strict=True)))
        assert losses[case] == pytest.approx(straight, rel=rel), case
