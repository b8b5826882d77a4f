"""Recognise a run that torchrun has started again.

A restarted process has the command line of the first one, and on some nodes torchrun is new and counts no restarts. So a run's
folder names the torchrun processes that train there, in a file `.torchrun`: where one of them is still there, it is their run.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from onepass.runtime.regular_file import read_regular
from onepass.train.files import write_atomically
from onepass.train.layout import ParallelLayout

_NAME = ".torchrun"


class Restart(NamedTuple):
    """A run that was started again, and how often torchrun has counted that."""

    folder: Path
    number: int  # of its newest checkpoint when it began: its own have larger ones
    times: int
    most: int

    def describe(self) -> str:
        """Return how the run was started again. torchrun doesn't count restarts because a node has come back."""
        return (
            f"restarted {self.times} of {self.most} times by torchrun" if self.times else "restarted by torchrun with a new node"
        )


def find_restart(named: Path | None, layout: ParallelLayout) -> Restart | None:
    """Return the run in a folder, or in any of `runs`, if torchrun processes of these ranks have begun it and not ended it."""

    def look() -> tuple[tuple[Path, int] | None, int, int]:
        times, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
        return _marked([named] if named else sorted(Path("runs").glob("*"), reverse=True)), times, most

    marked, times, most = zip(*layout.on_all(look), strict=True)
    known = [each for each in marked if each is not None]
    return Restart(known[0][0], known[0][1], max(times), max(most)) if known else None


def mark(folder: Path, number: int, layout: ParallelLayout) -> None:
    """Write to a run's folder which torchrun processes train there, if any do."""
    agents = sorted({agent for agent in layout.on_all(_agent) if agent is not None})
    if agents:
        layout.on_each_disk(lambda: write_atomically(folder / _NAME, json.dumps({"agents": agents, "number": number}) + "\n"))


def unmark(folder: Path, layout: ParallelLayout) -> None:
    """Say that a run has ended: a later one of the same torchrun process is another."""
    layout.on_each_disk(lambda: (folder / _NAME).unlink(missing_ok=True))


def _marked(folders: Iterable[Path]) -> tuple[Path, int] | None:
    """Return the folder that this rank's torchrun process trains in, and the number there."""
    agent = _agent()
    for folder in folders if agent is not None else ():
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            marker = json.loads(read_regular(folder / _NAME))
            if agent in marker["agents"]:
                return folder, int(marker["number"])
    return None


def _agent() -> str | None:
    """Return what tells this rank's torchrun process from all others: its host, and the folder that it has made for errors."""
    folder, attempt, _ = os.environ.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")
    return f"{socket.gethostname()} {folder}" if attempt else None
