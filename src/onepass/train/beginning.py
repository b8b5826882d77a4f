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
from onepass.train.restarts import find_restart, mark


class Beginning(NamedTuple):
    folder: Path
    resume: Path | None = None  # the checkpoint
    again: bool = False  # the folder may have a run that has saved no checkpoint
    verified: bool = False  # the checkpoint has been compared with its checksums
    said: tuple[str, ...] = ()  # for the log
    number: int | None = None  # of the newest checkpoint before the run, if it was started again

    def check(self, config: Config, layout: ParallelLayout) -> None:
        """Raise CommandError if the checkpoint is of another model. Nodes that lack it look when they have it."""
        path = self.resume
        assert path is not None
        elsewhere = layout.nodes > 1 and not (path / checkpoint.INDEX).exists()
        layout.on_all(lambda: elsewhere or bool(checkpoint.check(path, config)))

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


def find_beginning(args: argparse.Namespace, layout: ParallelLayout) -> Beginning:
    """Decide where a run begins, on all ranks alike.

    What torchrun has started again goes on from the newest good checkpoint that it has saved itself. Before there is one, it
    begins as the command says. --resume-if-exists takes the folder's newest, whoever saved it.
    """
    if args.resume_if_exists and (args.folder is None or args.resume is not None):
        raise CommandError("--resume-if-exists needs --run-dir, the folder of its run, and no --resume")
    named = args.folder or (None if args.resume is None else checkpoint.folder_of(args.resume))
    restart = find_restart(named, layout)
    again = restart is not None or args.resume_if_exists
    said: list[str] = []
    if again:
        folder = args.folder if restart is None else restart.folder
        above = 0 if restart is None or args.resume_if_exists else restart.number
        verify = getattr(args, "verify_checksums", True)
        found, wrong = checkpoint.newest_whole(folder, layout, above, verify)
        said += [f"passed over: {each}" for each in wrong]
        how = "" if restart is None else f"{restart.describe()}: "
        if found is not None:
            said.append(f"{how}going on from step {found.step}, {found.path}")
            return Beginning(folder, found.path, True, verify, tuple(said), above)
        if args.resume is None:
            said += [f"{how}beginning anew, as there was no checkpoint yet"] if restart is not None or wrong else []
            return Beginning(folder, None, True, False, tuple(said), above)
        said.append(f"{how}going on from --resume, as there was no checkpoint since")
    resume = None if args.resume is None else checkpoint.find_on_nodes(args.resume, layout)
    folder = layout.on_first(lambda: _folder(args.folder, resume))
    return Beginning(folder, resume, again, False, tuple(said), None if restart is None else restart.number)


def _folder(named: Path | None, resume: Path | None) -> Path:
    """Return the run's folder. Its name may be the current time."""
    return named or (checkpoint.run_of(resume) if resume else Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S"))
