"""Files are replaced whole or not at all."""

import os
import resource
import signal

import pytest

from onepass.train.files import write_atomically


@pytest.mark.parametrize("sync", (True, False))
def test_text_and_bytes_are_written(tmp_path, sync):
    path = tmp_path / "file"
    for data in ("ä\n", b"\xff\x00", memoryview(b"abc"), ""):
        write_atomically(path, data, sync)
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else bytes(data))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, limits[1]))
    try:
        with pytest.raises(OSError) as raised:
            write_atomically(path, "afterwards")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(path) and raised.value.strerror == "File too large"
    assert path.read_text() == "before" and [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ("fsync", "replace"))
def test_a_killed_process_leaves_what_was_there(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    path.write_text("before")
    child = os.fork()
    if not child:
        setattr(os, call, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))
        write_atomically(path, "after")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert path.read_text() == "before"
    write_atomically(path, "after")
    assert path.read_text() == "after" and [each.name for each in tmp_path.iterdir()] == ["file"]


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order, sync, path = [], os.fsync, tmp_path / "file"

    def fsync(number):
        order.append((os.readlink(f"/proc/self/fd/{number}"), path.exists()))
        sync(number)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, "data")
    assert order == [(str(path) + ".part", False), (str(tmp_path), True)]


def test_links_are_not_followed(tmp_path):
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "file"
    elsewhere.write_text("another's")
    path.symlink_to(elsewhere)
    path.with_name("file.part").symlink_to(elsewhere)
    write_atomically(path, "own")
    assert elsewhere.read_text() == "another's" and path.read_text() == "own" and not path.is_symlink()
