"""Keep two processes from training in one run's folder."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onepass.runtime.errors import CommandError
from onepass.runtime.regular_file import check_regular
from onepass.train.layout import ParallelLayout

_NAME = ".lock"
_MOST = 200  # bytes of another process's name
_TRIES = 100  # each takes an owner that ends between two system calls of ours
_PAUSE_S = 1.0
PATIENCE_S = 120  # in which the ranks of a torchrun process that was killed have found out that others are gone


class RunInUse(CommandError):
    """Another process has the folder."""


@contextmanager
def locked(folder: Path, layout: ParallelLayout, say: Callable[[str], None], patience: float = 0) -> Iterator[None]:
    """Have a run's folder for these ranks alone until the block ends. Raise CommandError if another process has it.

    A restart waits `patience` seconds for its predecessor to end.

    The first rank of each disk locks a file there, `.lock`, which names its process. The system unlocks it when the process
    ends, however it does, so what a killed one leaves is harmless. A filesystem without locks is said, and not an error.
    """
    lock = _Lock(folder)
    try:
        for said in filter(None, _acquire(lock, layout, say, patience)):
            say(said)
        yield
    finally:
        lock.release()


def _acquire(lock: _Lock, layout: ParallelLayout, say: Callable[[str], None], patience: float) -> list[str | None]:
    """Lock each disk, and return what is to be said. The ranks count tries together, as their clocks may differ."""
    tries = 1 + round(patience / _PAUSE_S)
    for at in range(tries):
        try:
            return layout.on_each_disk(lock.acquire)
        except RunInUse as error:
            if at + 1 == tries:
                raise
            if not at:
                say(f"{error}, for {patience:g} s")
            time.sleep(_PAUSE_S)
    raise AssertionError


class _Lock:
    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / _NAME
        self._number: int | None = None  # the file's, while it is open
        self._owned = False
        self._warning: str | None = None
        self._made: list[Path] = []  # folders that were not there, the innermost first

    def acquire(self) -> str | None:
        """Make the folder if need be, and lock it, unless it is. Return what is to be said, if anything."""
        if self._owned:
            return self._warning
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        warning = None
        for _ in range(_TRIES):
            self._close()
            self._number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            check_regular(self.path, os.fstat(self._number).st_mode)
            try:
                fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(self._number, _MOST, 0).decode(errors="replace").partition("\n")[0] or "another process"
                raise RunInUse(f"{self.folder} must have one run at a time, but {owner} trains there: wait for it") from None
            except OSError as error:
                warning = f"warning: {self.folder} can't be locked ({error.strerror}): a second run in it would not be refused"
            self._owned = self._is_there(self._number)  # its last owner may have removed what was opened
            if self._owned or warning is not None:
                break
        else:
            raise CommandError(
                f"{self.path} must be the file that was opened, but is another one each time: its filesystem can't lock "
                "this run's folder; give --run-dir a folder on another one"
            )
        assert self._number is not None
        with suppress(OSError):  # on a full disk it has no name
            os.ftruncate(self._number, 0)
            os.pwrite(self._number, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._warning = warning
        return warning

    def _is_there(self, number: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(number), os.lstat(self.path))
        return False

    def release(self) -> None:
        """Remove the lock while it is held, and folders in which nothing has been written."""
        if self._owned:
            with suppress(OSError):
                self.path.unlink()
        self._owned = False
        self._close()
        for path in self._made:
            with suppress(OSError):  # it holds something
                path.rmdir()

    def _close(self) -> None:
        if self._number is not None:
            os.close(self._number)
        self._number = None
