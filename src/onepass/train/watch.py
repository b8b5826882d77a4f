"""Say which rank the others wait for, before their collectives time out.

A thread of each rank writes to the process group's store, every few seconds, how many collectives the rank has started in each
group, and where its main thread is. It reads the other ranks' only when its own rank has come no further for long. Nothing is
added to a step. A stopped process writes nothing; one that hangs has started fewer collectives than those that wait for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from onepass.train.layout import ParallelLayout

_LONGEST_INTERVAL = 5.0  # seconds between two reports
_MARGIN = 30.0  # seconds before collectives time out, at most a fifth of the timeout


class Report(NamedTuple):
    """How far a rank is."""

    beat: int
    started: dict[str, int]  # collectives by group
    waits: bool  # in torch.distributed
    place: str


class RankWatch:
    """Watches the ranks of a layout until it is closed. Groups that are divided later are added."""

    def __init__(self, layout: ParallelLayout, timeout: timedelta) -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        self._prefix = layout.on_first(lambda: f"onepass/{os.urandom(8).hex()}/")  # a restart may have the same store
        self._layout, self._timeout = layout, timeout.total_seconds()
        self._interval = min(_LONGEST_INTERVAL, self._timeout / 20)
        self._limit = self._timeout - min(_MARGIN, self._timeout / 5)
        self._store = store.clone()  # its calls wait for no others'
        self._store.set_timeout(timedelta(seconds=max(1.0, self._limit / 4)))
        self._groups: dict[str, dist.ProcessGroup] = {"all": dist.distributed_c10d._get_default_group()}
        self._main = threading.main_thread().ident
        self._closed = threading.Event()
        self._beat = 0
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def add(self, layout: ParallelLayout) -> None:
        """Watch the groups of a divided layout, too."""
        groups = self._groups.copy()
        for name in ("tensor", "data", "pipeline"):
            if (group := getattr(layout, name).group) is not None:
                groups[f"{name} {min(dist.get_process_group_ranks(group))}"] = group
        self._groups = groups

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        since, answered = (time.monotonic() for _ in range(2))
        before: dict[str, int] = {}
        early: list[Report | None] | None = None
        while not self._closed.wait(self._interval):
            now, report = time.monotonic(), self._report()
            if report.started != before:
                before, since, early = report.started, now, None
            try:
                self._store.set(self._key(self._layout.rank), json.dumps(report))
                if now - since > self._limit / 2 and early is None:
                    early = self._reports()
                elif now - since > self._limit and early is not None:
                    self._judge(early, now - since)
                answered = time.monotonic()
            except RuntimeError as error:  # of the store
                if time.monotonic() - answered > self._limit / 2:
                    where = os.environ.get("MASTER_ADDR", "the first node")
                    self._end(
                        f"{where}, where the ranks meet, has not answered for {self._limit / 2:.0f} s: {error}".splitlines()[0]
                    )

    def _report(self) -> Report:
        self._beat += 1
        started = {}
        for name, group in self._groups.items():
            for kind in ("cpu", "cuda"):
                with suppress(RuntimeError):  # a group without that device
                    backend: Any = group._get_backend(torch.device(kind))
                    started[f"{name} {kind}"] = backend._get_sequence_number_for_group()
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return Report(self._beat, started, False, "")
        path = Path(frame.f_code.co_filename)
        waits = "distributed" in path.parts and "torch" in path.parts
        return Report(self._beat, started, waits, f"{path.name}:{frame.f_lineno}, {frame.f_code.co_name}")

    def _key(self, rank: int) -> str:
        return f"{self._prefix}{rank}"

    def _reports(self) -> list[Report | None]:
        """Return what each rank has written last, or None for one that has written nothing."""
        keys = [self._key(rank) for rank in range(self._layout.ranks)]
        return [Report(*json.loads(self._store.get(key))) if self._store.check([key]) else None for key in keys]

    def _judge(self, early: Sequence[Report | None], waited: float) -> None:
        """End the run if other ranks hold this one up. One rank of each node says so."""
        late = self._reports()
        silent = [rank for rank, (one, other) in enumerate(zip(early, late, strict=True)) if one == other]
        guilty = silent or held_up_by({rank: report for rank, report in enumerate(late) if report is not None})
        if not guilty or self._layout.rank in guilty:
            return
        named = ", ".join(self._layout.place(rank) for rank in guilty[:3]) + (" and others" if len(guilty) > 3 else "")
        report = late[guilty[0]]
        why = f"in {report.place}" if report is not None and not silent else "silent: stopped, or its machine is gone"
        self._end(
            f"{named} held up the others for {waited:.0f} s, {why}; --distributed-timeout-minutes, "
            f"{self._timeout / 60:g}, is how long they wait"
        )

    def _end(self, message: str) -> None:
        host = self._layout.hosts[self._layout.rank]
        try:
            mine = self._store.add(f"{self._prefix}{host}", 1) == 1
        except RuntimeError:
            mine = True
        if mine:
            os.write(2, f"onepass train: {message}\n".encode())
            os._exit(1)  # the main thread waits, and can't be interrupted


def held_up_by(reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that others wait for and that wait for nobody themselves."""
    ahead, behind = set(), set()
    for group in {group for report in reports.values() for group in report.started}:
        counts = {rank: report.started[group] for rank, report in reports.items() if group in report.started}
        ahead |= {rank for rank, count in counts.items() if count > min(counts.values())}
        behind |= {rank for rank, count in counts.items() if count < max(counts.values())}
    if not behind:  # all have started the same ones: messages between two ranks are not counted
        busy = [rank for rank, report in reports.items() if not report.waits]
        return busy if len(busy) < len(reports) else []
    return sorted(behind - ahead or behind)


@contextmanager
def watched(layout: ParallelLayout, timeout: timedelta) -> Iterator[RankWatch | None]:
    """Watch the ranks during a block, if there are several."""
    watch = RankWatch(layout, timeout) if layout.ranks > 1 else None
    try:
        yield watch
    finally:
        if watch is not None:
            watch.close()
