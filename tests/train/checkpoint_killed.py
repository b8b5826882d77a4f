"""Kill saves of a checkpoint at each of their disk accesses. Each save runs in a fork of a process that has trained the model."""

import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import torch
from train.checkpoint_runs import alone, configured, go, saved, started, whole

import onepass
from onepass.train import checkpoint
from onepass.train.checkpoint import storage
from onepass.train.setup import make

_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def run(rank, folder, again):
    """Kill saves until one completes. `again`: a checkpoint of the same step exists already."""
    torch.set_num_threads(1)
    folder = Path(folder)
    base, place = folder / "base", folder / "killed"
    with onepass.use_backend("torch"):
        trained, before = started(base)
        go(trained, alone(), 2, 3)
        after = saved(folder / "after", 3, trained, *configured(), alone())
        tensors = {"before": whole(before), "after": whole(after)}
        found = []
        while not found or found[-1]["signal"]:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(base, place)
            found.append(killed(place, trained, 2 if again else 3, len(found) + 1) | resumed(place, tensors))
    torch.save(found, folder / "found.pt")


def killed(place, trained, step, touches):
    """Save in a fork that is killed at disk access number `touches`. Return the signal, or 0 if the save completed before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fork() warns of threads, which the child lacks
        child = os.fork()
    if child:
        return {"signal": os.WTERMSIG(os.waitpid(child, 0)[1])}
    dying(place, touches)
    config, options = configured(keep_checkpoints=1)
    saved(place, step, trained, config, options, alone())
    os._exit(0)


def dying(place, touches):
    """Make this process kill itself at its n-th write access below `place`, with n `touches`; for tensors in mid-write."""
    left = [touches]

    def touch(file=None, data=b""):
        left[0] -= 1
        if not left[0]:
            if file is not None:
                file.write(bytes(data[: len(data) // 2]))
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, args):
        reading = event == "open" and not (isinstance(args[1], str) and "w" in args[1])
        if event in _EVENTS and not reading and str(args[0]).startswith(str(place)):
            touch()

    write, sync = storage._write_all, os.fsync

    def write_all(file, data):
        touch(file, data)
        write(file, data)

    def fsync(number):
        touch()
        sync(number)

    storage._write_all, os.fsync = write_all, fsync
    sys.addaudithook(audit)


def resumed(place, tensors):
    """Load the checkpoint that the next run finds, and save again. Return which save it equals, its step, and the folders."""
    path = checkpoint.find(place)
    there = whole(path)
    same = [
        which for which, theirs in tensors.items() if all(torch.equal(there[name], tensor) for name, tensor in theirs.items())
    ]
    config, options = configured(keep_checkpoints=1)
    trained = make(config, options, alone())
    step = checkpoint.load(path, trained, config, alone())
    saved(place, 4, trained, config, options, alone())
    left = [each.name for each in (place / "checkpoints").iterdir()]
    return {"same": same, "step": step, "left": left}
