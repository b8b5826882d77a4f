"""Open files: regular ones alone where other people may have put them there, pipes too where the user names them."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}  # fmt: skip


def open_regular(path: Path) -> FileIO:
    """Open a file for reading, unbuffered. Raise OSError for anything else: a pipe may have no writer, a device no end."""
    check_regular(path, os.stat(path).st_mode)
    file = FileIO(str(path), opener=_open_at_once)
    try:
        check_regular(path, os.fstat(file.fileno()).st_mode)  # what has been opened, whatever was there before
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def read_regular_or_pipe(path: Path) -> bytes:
    """Read a file that the user names, which may be `<(command)`. A pipe is waited for."""
    if stat.S_ISFIFO(os.stat(path).st_mode):
        return path.read_bytes()
    return read_regular(path)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_regular(path: Path, mode: int) -> None:
    kind = stat.S_IFMT(mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it must be a file, but is {_KINDS.get(kind, 'something else')}", str(path))
