"""Kill saves of a checkpoint, and the writing of tokens, at each of their disk accesses. Each runs in a fork."""

import os
import shutil
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from train.checkpoint_runs import alone, configured, go, saved, started, whole

import onepass
from onepass.train import checkpoint, text
from onepass.train.checkpoint import storage
from onepass.train.setup import make

ONE_LAYER = {"num_layers": 1}  # each of its tensors is an access more to be killed at
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def run(rank, folder, again):
    """Kill saves until one completes. `again`: a checkpoint of the same step exists already."""
    torch.set_num_threads(1)
    folder = Path(folder)
    base, place = folder / "base", folder / "killed"
    with onepass.use_backend("torch"):
        trained, before = started(base, **ONE_LAYER)
        go(trained, alone(), 2, 3)
        after = saved(folder / "after", 3, trained, *configured(**ONE_LAYER), alone())
        tensors = {"before": whole(before), "after": whole(after)}
        found = []
        while not found or found[-1]["signal"]:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(base, place)
            act = partial(saved, place, 2 if again else 3, trained, *configured(keep_checkpoints=1, **ONE_LAYER), alone())
            found.append(killed(place, act, len(found) + 1) | resumed(place, tensors))
    torch.save(found, folder / "found.pt")


def run_tokens(folder):
    """Kill the tokenising of new texts, over tokens of other texts. Return the signals, and which tokens are there again."""
    place, found = folder / "tokens", []
    for name in ("old", "new"):
        (folder / name).write_text("".join(f"{name} {i} " for i in range(300)))
        tokenised(folder / f"{name} tokens", folder / name)
    while not found or found[-1][0]:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder / "old tokens", place)
        signal = killed(place, partial(tokenised, place, folder / "new"), len(found) + 1)["signal"]
        tokenised(place, folder / "new")
        wanted = {path.name: path.read_bytes() for path in (folder / "new tokens").iterdir()}
        found.append((signal, {path.name: path.read_bytes() for path in place.iterdir()} == wanted))
    return found


def tokenised(place, path):
    text.prepare(place, [str(path)], 270, 8, lambda *_: None)


def killed(place, act, touches):
    """Call act in a fork that is killed at disk access number `touches`. Return the signal, or 0 if it returned before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fork() warns of threads, which the child lacks
        child = os.fork()
    if child:
        return {"signal": os.WTERMSIG(os.waitpid(child, 0)[1])}
    dying(place, touches)
    act()
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
        reading = event == "open" and not (isinstance(args[1], str) and set("wx") & set(args[1]))
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
    config, options = configured(keep_checkpoints=1, **ONE_LAYER)
    trained = make(config, options, alone())
    step = checkpoint.load(path, trained, config, alone())
    saved(place, 4, trained, config, options, alone())
    left = [each.name for each in (place / "checkpoints").iterdir()]
    return {"same": same, "step": step, "left": left}
