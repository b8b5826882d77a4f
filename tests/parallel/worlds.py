"""Run functions of a test on the ranks of a process group: the fixture `world`, which is a backend and a number of ranks."""

import io
import os
import pickle
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.multiprocessing as mp
from parallel import meeting

TESTS = Path(__file__).parents[1]
GRACE = 3  # seconds in which ranks may still say what went wrong, after the first has


def _world(backend, ranks, may_share=True):
    """A backend and ranks. Over NCCL each has a GPU, or a part of one where the environment says so and the test allows it."""
    needed = 1 if may_share and os.environ.get("ONEPASS_RANKS_SHARE_GPUS") else ranks
    too_few = pytest.mark.skipif(torch.cuda.device_count() < needed, reason=f"needs {ranks} GPUs")
    return pytest.param((backend, ranks), id=f"{backend}-{ranks}", marks=[pytest.mark.gpu, too_few] if backend == "nccl" else [])


PAIRS = [_world("gloo", 2), _world("nccl", 2)]
FOURS = [_world("gloo", 4), _world("nccl", 4)]
WORLDS = [*PAIRS, *FOURS]
PAIRS_OF_GPUS = [_world("gloo", 2), _world("nccl", 2, may_share=False)]


def start_method():
    """Return how processes start: forked from a server process that has done what takes the most time, `preloaded.py`.

    The server is started at the first call, so all processes have the environment and the output streams of that time. By a
    CUDA build they are spawned: a fork can't use CUDA once its parent has counted the GPUs, nor autograd once that has run.
    """
    if torch.version.cuda is not None:
        return "spawn"
    mp.set_forkserver_preload(["parallel.preloaded"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # the server knows none of sys.path but this
        forkserver.ensure_running()
    return "forkserver"


class World:
    """The processes of a process group, which start with the first call and stay for others. A call that fails ends them."""

    seconds = meeting.SECONDS + 30  # in which all ranks answer: collectives have timed out by then

    def __init__(self, backend, size):
        self.backend, self.size = backend, size
        self._pipes, self._processes = [], []

    def __len__(self):
        return self.size

    def run(self, function, *args, **options):
        """Call `function(group, *args, **options)` on each rank and return their results, whose tensors are on the CPU.

        The function is at the top of its file, where `rank_context` may be a context for all of them. Both are sent by name.
        """
        file = Path(sys.modules[function.__module__].__file__)
        module = ".".join(file.relative_to(TESTS).with_suffix("").parts)
        if not self._processes:
            self._start()
        results, errors, waiting = [None] * self.size, {}, dict(zip(self._pipes, range(self.size), strict=True))
        try:
            self._send(pickle.dumps((module, function.__qualname__, args, options)))
            limit = time.monotonic() + self.seconds
            while waiting and (ready := connection.wait(waiting, max(0.0, limit - time.monotonic()))):
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    error, results[rank] = self._answer(pipe, rank)
                    if error:
                        errors.setdefault(error, []).append(rank)
                        limit = min(limit, time.monotonic() + GRACE)
        finally:
            if errors or waiting:
                self.close(at_once=True)
        if errors or waiting:
            ended_first = sorted(errors, key=lambda error: error.startswith("Traceback"))  # others fail where one has ended
            said = [f"on rank {', '.join(map(str, sorted(errors[error])))}: {error}" for error in ended_first]
            said += [f"on rank {rank}: no answer" for rank in waiting.values()]
            pytest.fail("\n".join([f"{function.__qualname__} failed", *said]))
        return results

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        context = get_context(start_method())
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            args = rank, self.size, self._folder.name, self.backend, theirs
            process = context.Process(target=meeting.serve, args=args, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process closes the pipe
            self._pipes.append(ours)
            self._processes.append(process)

    def _send(self, call):
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # `_answer` says what ended the process
                pipe.send_bytes(call)

    def _answer(self, pipe, rank):
        """Return a rank's error, if there is one, and its result."""
        try:
            return torch.load(io.BytesIO(pipe.recv_bytes()), map_location="cpu", weights_only=False)
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE)
            crash = Path(self._folder.name, f"crash-{rank}.txt")
            said = crash.read_text() if crash.exists() else ""
            return f"the process ended with exit code {self._processes[rank].exitcode}\n{said}", None

    def close(self, at_once=False):
        """End the processes. They leave the process group together, unless `at_once`."""
        if not at_once:
            self._send(b"")
        for process in self._processes:
            process.join(0 if at_once else GRACE)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._pipes, self._processes = [], []


def started(run, args, ranks, join=True):
    """Start processes that call `run`."""
    return mp.start_processes(run, args, ranks, join=join, start_method=start_method())


def found_by(run, world, folder, *more):
    """Run the ranks and return what each has saved. One start serves all tests of a file. `more`: their last arguments."""
    backend, ranks = world
    started(run, (ranks, str(folder), backend, *more), ranks)
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(ranks)]
