"""Where a run begins: in which folder, and from which checkpoint, as the command says or as torchrun has started it again."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

from onepass.gpt import Config
from onepass.runtime.errors import CommandError
from onepass.train import checkpoint
from onepass.train.files import check_links
from onepass.train.layout import ParallelLayout
from onepass.train.restarts import Restart, find_restart, mark


class RunPlace(NamedTuple):
    """Where a run writes, which is known before the folder is locked, and what its command line says to go on from."""

    folder: Path
    restart: Restart | None
    again: bool  # the folder may have this run already
    resume: tuple[Path, str | None] | None  # a checkpoint and its id


class Beginning(NamedTuple):
    folder: Path
    resume: Path | None = None  # the checkpoint
    again: bool = False  # the folder may have a run that has saved no checkpoint
    verified: bool = False  # the checkpoint has been compared with its checksums
    said: tuple[str, ...] = ()  # for the log
    number: int | None = None  # of the newest checkpoint before the run, if it was started again

    def check(self, config: Config, layout: ParallelLayout) -> None:
        """Raise CommandError if the checkpoint is of another model."""
        path = self.resume
        assert path is not None
        layout.agree(lambda: checkpoint.check(path, config))

    def check_folder(self) -> None:
        if self.resume is None and not self.again and (self.folder / "log.csv").exists():
            raise CommandError(f"--run-dir {self.folder} has a run already: --resume {self.folder} goes on with it")
        check_links(self.folder)

    def mark(self, layout: ParallelLayout) -> None:
        """Write down that the torchrun processes of these ranks train in the folder."""
        number = self.number
        if number is None:
            number = max(layout.on_each_disk(lambda: checkpoint.newest_number(self.folder / "checkpoints")))
        mark(self.folder, number, layout)


def find_place(args: argparse.Namespace, layout: ParallelLayout) -> RunPlace:
    """Decide in which folder a run is, on all ranks alike. torchrun may have started it again."""
    if args.resume_if_exists and (args.folder is None or args.resume is not None):
        raise CommandError("--resume-if-exists needs --run-dir, the folder of its run, and no --resume")
    named = args.folder or (None if args.resume is None else checkpoint.folder_of(args.resume))
    restart = find_restart(named, layout)
    if restart is not None or args.resume_if_exists:
        return RunPlace(args.folder if restart is None else restart.folder, restart, True, None)
    resume = None if args.resume is None else checkpoint.find_on_nodes(args.resume, layout)
    return RunPlace(layout.on_first(lambda: _folder(args.folder, resume)), None, False, resume)


def find_beginning(args: argparse.Namespace, place: RunPlace, layout: ParallelLayout) -> Beginning:
    """Decide where a run begins, on all ranks alike, and share its checkpoint's index. The folder is locked.

    What torchrun has started again goes on from the newest good checkpoint that it has saved itself. Before there is one, it
    begins as the command says. --resume-if-exists takes the folder's newest, whoever saved it. Where there are checkpoints and
    none is whole, it raises: to begin anew would remove them.
    """
    folder, restart, again, resume = place
    said: list[str] = []
    if again:
        above = 0 if restart is None or args.resume_if_exists else restart.number
        verify = getattr(args, "verify_checksums", True)
        found, wrong = checkpoint.newest_whole(folder, layout, above, verify)
        how = "" if restart is None else f"{restart.describe()}: "
        if found is None and wrong and args.resume is None:
            raise CommandError(
                f"{how}{folder} must have a whole checkpoint to go on from, but {'; '.join(wrong)}: start the nodes that have "
                "the files, or copy them to any node; another --run-dir begins a new run"
            )
        said += [f"passed over: {each}" for each in wrong]
        if found is not None:
            said.append(f"{how}going on from step {found.step}, {found.path}")
            return Beginning(folder, found.path, True, verify, tuple(said), above)
        if args.resume is None:
            said += [f"{how}beginning anew, as there was no checkpoint yet"] if restart is not None else []
            return Beginning(folder, None, True, False, tuple(said), above)
        said.append(f"{how}going on from --resume, as there was no checkpoint since")
        resume = checkpoint.find_on_nodes(args.resume, layout)
    path, id = resume or (None, None)
    if path is not None and id is not None:
        checkpoint.share_index(path, id, layout)
    return Beginning(folder, path, again, False, tuple(said), None if restart is None else restart.number)


def _folder(named: Path | None, resume: tuple[Path, str | None] | None) -> Path:
    """Return the run's folder. Its name may be the current time."""
    return named or (checkpoint.run_of(resume[0]) if resume else Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S"))
